/* The state of the engine: communicators, their lanes and stripes. Only a thread that has engine.turn uses it, except
 * where a member states otherwise.
 *
 * A file calls only those before it in this order, and the later ones by struct lane_owner alone: list, lane, qpair,
 * memory, shares, sender and receiver, comm, frames, engine. */
#ifndef FARED_NCCL_COMM_H
#define FARED_NCCL_COMM_H

#include "deal.h"
#include "guard.h"
#include "net.h"

/* stripe is a part of a message of a sender, from its assignment to a lane until its acknowledgement. */
struct stripe {
	struct stripe *next, *previous;
	struct list *list;
	struct request *request;
	uint64_t offset;
	uint32_t length, number, generation;
	uint64_t sequence; /* of its SEND on a queue pair */
};

struct list {
	struct stripe *first, *last;
	uint64_t bytes;
};

enum lane_state { LANE_CONNECTING, LANE_GREETING, LANE_READY };

/* source is the value that epoll returns. */
enum source_kind { SOURCE_LISTENER, SOURCE_LANE, SOURCE_RDMA };

struct lane {
	enum source_kind kind; /* first: SOURCE_LANE */
	enum lane_state state;
	const struct lane_owner *owner;
	struct comm *comm;         /* NULL until the HELLO of an accepted lane */
	struct listener *listener; /* of an accepted lane without a HELLO */
	struct lane *next;         /* of such lanes */
	struct qpair *pair;        /* over verbs, NULL while it has none */
	uint64_t connect_at;       /* ns: no queue pair is connected before */
	unsigned connect_failures;
	uint8_t far_port; /* index of the receiver's keys */
	int fd;
	bool readable, writable, suspect, retired, shut, ended;
	bool ending;                        /* after the bytes that are there */
	uint64_t since, progress, received; /* ns: state, last acknowledgement, last frame */
	uint64_t calm;                      /* ns: end of the last stall, or of the last CALM_TIME without one */
	unsigned stalls;                    /* the next stall is noticed after settings.stall_ms << stalls */

	/* steering of a sender's lane; slot -1: none */
	int slot;
	uint16_t port, plane, sub_port;
	uint32_t share;
	int64_t credit;

	/* receiving: a frame's header, then its payload */
	struct frame in;
	uint32_t in_have, payload_have;
	bool in_payload;
	char *control; /* payload of all frames but DATA */
	uint64_t acks[64];
	uint32_t ack_count;

	/* sending: control frames go between stripes */
	char *out;
	size_t out_at, out_end, out_room;
	struct list queue, sent; /* stripes not yet begun; begun and unacknowledged, over verbs on the present queue pair */
	struct frame head;
	struct stripe *stripe; /* that is being written; NULL once it is acknowledged, and zeros are written in its place */
	const char *payload;
	uint32_t head_at, payload_at;
	bool writing;
};

struct qpair;
struct rdma;

/* fenced is a queue pair that has ended. */
struct fenced {
	uint32_t pair;
	uint64_t count; /* SENDs that had arrived */
};

struct posted {
	bool valid;
	uint16_t n;
	uint32_t used; /* a bit for each buffer with a message */
	struct buffer buffers[MAX_PARTS];
};

enum comm_state { COMM_CONNECTING, COMM_READY };

/* lane_owner is what lanes and queue pairs report to: the functions of the layers above them. */
struct lane_owner {
	/* The header of a frame (lane.in), and the whole frame has arrived; false if it violates the protocol. */
	bool (*begin)(struct lane *lane);
	bool (*end)(struct lane *lane);
	/* Returns where the payload of a frame goes from an offset on, and how much fits there. */
	char *(*target)(struct lane *lane, uint32_t *room);
	/* A queue pair has written a stripe; false if its frame violates the protocol. */
	bool (*written)(struct comm *c, const struct frame *f);
	/* The receiver has a stripe. */
	void (*acknowledged)(struct comm *c, struct stripe *s);
	/* The device has failed the lane's queue pair. */
	void (*broken)(struct lane *lane);
	/* A communicator has something to do. */
	void (*ready)(struct comm *c);
	void (*fail)(struct comm *c, ncclResult_t error, const char *reason);
};

/* sender is the state of a communicator that sends. */
struct sender {
	struct fared_address destination;
	uint16_t port;       /* of the peer's listener */
	uint64_t open_again; /* ns: no lane is opened before */
	uint32_t open_failures;
	bool refused;
	struct request *waiting, *waiting_last; /* not all of whose stripes are assigned, in order */
	struct posted posted[MAX_GROUPS];
	uint64_t first_posted, next_posted; /* groups with unused buffers; contiguous */
	uint64_t confirmed;                 /* groups that the receiver knows to be known, unless a frame was lost */
	struct stripe **stripes;
	uint32_t stripe_count, stripe_room, outstanding; /* outstanding: stripes without an acknowledgement */
	struct list spare, again;                        /* again: to be assigned a second time */
	struct deal deal;
	int64_t credit[MAX_LANES]; /* of the lanes after the choice of the last shares_next */
	bool all_suspect;          /* every lane with a share is suspect: all are tried, because an acknowledgement on any shows that it works */
	bool steered, ports_taken; /* ports_taken: no slot of some sub-port had a free source port, which was reported */
	uint64_t plane_bytes[MAX_LANES], repeated;
};

/* receiver is the state of a communicator that receives. */
struct receiver {
	struct listener *listener;
	struct request *groups[MAX_GROUPS];
	uint64_t next_group, first_group, confirmed; /* groups: to be posted, incomplete, known to the sender */
	uint64_t posted_at, post_delay;
	int post_lane;
	uint64_t bye_at; /* ns: when the sender has closed; its last SENDs may be complete after that */
};

/* qpairs are the queue pairs of a communicator over verbs. */
struct qpairs {
	struct qpair *all;                         /* also those of closed lanes */
	uint32_t next;                             /* of a sender: the number of the next one */
	struct fenced *fenced;                     /* of a receiver: queue pairs that have ended */
	uint32_t fenced_count, fenced_room, first; /* first: older ones are settled */
	bool failed;                               /* the failure of a queue pair has been reported */
};

struct comm {
	/* shared with NCCL's thread */
	_Atomic int state, error; /* enum comm_state; ncclResult_t */
	_Atomic uint32_t submitted;
	_Atomic bool closing;
	_Atomic bool released; /* closed, and the engine no longer touches the memory of messages */
	_Atomic bool left;     /* the closing call has returned: the communicator may be freed */
	_Atomic bool dirty;
	struct comm *next_dirty;
	struct request *ring[MAX_SENDS];
	/* NCCL's thread alone */
	struct request *requests;
	uint32_t request_count, next_request;

	bool sends, verbs; /* verbs: stripes are carried by queue pairs */
	const struct device *device;
	const struct lane_owner *owner;
	struct fared_address source;
	struct hello hello;

	uint32_t taken;
	bool deferred; /* acknowledgements are left to the next turn */
	bool adopted, in_ready, ready, abandoned, peer_closed, gone;
	struct comm *next, *next_ready;
	struct lane *lanes[MAX_LANES];
	int lane_count;
	uint64_t since, closed_at, alive; /* ns; alive: when the peer was last heard of, or nothing was expected of it */
	uint64_t asked;                   /* ns: the last PING */
	struct qpairs pairs;
	struct sender sender;     /* of one that sends */
	struct receiver receiver; /* of one that receives */
};

/* ended is a communicator of a listener that this end has closed. */
struct ended {
	uint8_t connection[16];
	uint64_t groups; /* that were complete */
};

struct listener {
	enum source_kind kind; /* first: SOURCE_LISTENER */
	int fd;
	const struct device *device;
	const struct lane_owner *owner;
	uint8_t nonce[16];
	struct lane *greeting; /* lanes without a HELLO */
	int greeting_count;
	int comms;
	struct ended *ended;
	uint32_t ended_count;
	struct listener *next;
	_Atomic bool closing;
	/* under engine.lock */
	struct comm *accepted[NCCL_NET_MAX_REQUESTS];
	int accepted_count;
};

struct engine {
	pthread_mutex_t turn; /* of the thread that makes progress; before lock */
	pthread_mutex_t lock; /* of what is rare: start, listeners, accepted communicators */
	bool started, forked, watches_forks;
	int epoll, wake;
	_Atomic bool awake;     /* the engine's thread looks for what is dirty without being woken */
	_Atomic bool polled;    /* callers make progress; changes under turn */
	_Atomic uint32_t calls; /* of isend and irecv, and of test for pending requests */
	_Atomic(struct comm *) dirty;
	_Atomic bool attention; /* the table has changed, or a listener is closing */
	_Atomic int closing;    /* closed communicators that are not freed */
	struct listener *listeners;
	uint64_t polled_until; /* ns; of the engine's thread alone */
	/* under turn */
	bool lazy; /* callers make progress: what need not be done at once is left to their next turns */
	struct fared_table *table;
	struct comm *comms, *ready;
	uint64_t now, large_until; /* ns; large_until: the engine's thread makes progress, because of large messages */
	char *scrap;
};

extern struct engine engine;

#define SCRAP_BYTES (256 << 10)
#define MILLISECOND 1000000ull
#define LARGE_BYTES (128 << 10)       /* of a message that the engine's thread carries, and not callers */
#define LARGE_TIME (10 * MILLISECOND) /* that it goes on after such a message */

/* list.c */
void list_add(struct list *l, struct stripe *s);
void list_remove(struct stripe *s);

/* lane.c */
/* Converts an address and a port, and returns the size of the result. */
socklen_t socket_address(struct sockaddr_storage *out, const struct fared_address *a, uint16_t port);
/* Opens a lane of a sender from the port of a slot; -1: from any port. */
struct lane *lane_open(struct comm *c, int slot);
struct lane *lane_accept(struct listener *l, int fd);
/* Gives a communicator a lane. */
void lane_join(struct lane *lane, struct comm *c);
void lane_read(struct lane *lane);
/* Appends the acknowledgement of what has arrived. */
void lane_acknowledge(struct lane *lane);
void lane_write(struct lane *lane);
void lane_control(struct lane *lane, const struct frame *f, const void *payload);
/* Frees a lane that has neither stripes nor a queue pair. */
void lane_close(struct lane *lane);
/* Moves the first stripe of the queue to those that were sent, and fills in its frame but for the id. */
struct stripe *lane_take(struct lane *lane, struct frame *f);
/* Notes that an acknowledgement has arrived by a lane. */
void lane_progress(struct lane *lane);

/* qpair.c: the queue pairs of lanes over verbs. */
bool qpair_up(const struct qpair *p);
bool qpair_has_room(const struct lane *lane);
/* Posts the stripes of the lane's queue for which there is room. */
void qpair_write(struct lane *lane);
/* Gives up the lane's queue pair: its stripes are assigned again once the receiver has reported which of them have
 * arrived. */
void qpair_release(struct lane *lane);
/* Connects lanes without a queue pair, and repeats requests; comm_run and comm_tick call it. */
void qpair_follow(struct comm *c);
/* Takes completions. It returns whether some are left. */
bool qpair_poll(struct comm *c);
/* Destroys all queue pairs, after which no device accesses the memory of messages. */
void qpair_drop_all(struct comm *c);
/* Returns whether a queue pair needs qpair_follow in time. */
bool qpair_busy(const struct comm *c);
/* Takes the events of a port's completion queues. */
void qpair_event(struct rdma *r);
/* Frames; they return false if the frame violates the protocol. */
bool qpair_asked(struct lane *lane, const struct endpoint *peer, uint64_t first_pair);
bool qpair_connected(struct lane *lane, const struct endpoint *peer);
bool qpair_fence(struct lane *lane, uint64_t pair, uint64_t first_pair);
bool qpair_fenced(struct comm *c, uint64_t pair, uint64_t count);

/* memory.c */
/* Returns whether a communicator may use a part of registered memory, and reports it if not. */
bool memory_has(const struct comm *c, const struct memory *m, const void *data, size_t size);
/* Counts the requests that use registered memory. */
void memory_use(struct memory *m, int n);
/* Fills in the address and the keys of a buffer. */
void memory_announce(const struct memory *m, const void *data, struct buffer *b);

/* shares.c */
/* Returns whether a lane can carry stripes. */
bool shares_carries(const struct lane *lane);
/* Takes a sender's stripes off a lane, to be assigned again. */
void shares_release(struct lane *lane);
/* Delays the next attempt to open a lane. */
void shares_open_failed(struct comm *c, bool refused);
void shares_follow(struct comm *c);
/* Returns the lane for a number of bytes; NULL: none carries stripes. shares_deal confirms the choice. */
struct lane *shares_next(struct comm *c, uint32_t length);
void shares_deal(struct comm *c);

/* sender.c */
void sender_free(struct comm *c);
void sender_submit(struct comm *c, struct request *r);
/* Assigns stripes to lanes. */
void sender_run(struct comm *c);
/* Returns whether stripes can be assigned at once. */
bool sender_has_work(struct comm *c);
void sender_tick(struct comm *c);
/* Returns whether the receiver is to be notified of groups that are known. */
bool sender_owes(const struct comm *c);
/* Confirms all groups that are known. */
void sender_confirm(struct comm *c, struct lane *lane);
/* Ends all use of the memory of messages. */
void sender_abandon(struct comm *c);
/* The receiver has closed the communicator, with a number of complete groups. */
void sender_closed(struct comm *c, uint64_t groups);
void sender_acknowledged(struct comm *c, struct stripe *s);
/* Accounts for an acknowledgement that has arrived by a lane. */
void sender_stripe_arrived(struct lane *lane, uint64_t id);
void sender_pair_broken(struct lane *lane);

/* receiver.c */
/* The sender knows all groups up to a number. */
void receiver_confirmed(struct comm *c, uint64_t groups);
void receiver_submit(struct comm *c, struct request *r);
/* Completes the receives at the head of the order in which they were posted. */
void receiver_complete(struct comm *c);
/* Repeats POSTs, and fails if no lane is in use for long; reachable: some are. */
void receiver_tick(struct comm *c, bool reachable);
/* The sender has closed the communicator. */
void receiver_closed(struct comm *c);

/* comm.c */
struct comm *comm_new(const struct device *d, bool sends, const struct lane_owner *owner);
void comm_free(struct comm *c);
void comm_fail(struct comm *c, ncclResult_t error, const char *reason);
bool comm_run(struct comm *c);
void comm_tick(struct comm *c);
/* Notifies the peer, by a lane, that this end is closed. */
void comm_bye(struct lane *lane);
void comm_closed_by_peer(struct comm *c, uint64_t groups);

/* frames.c: the meaning of frames, by functions of struct lane_owner. */
bool frame_begin(struct lane *lane);
bool frame_end(struct lane *lane);
char *frame_target(struct lane *lane, uint32_t *room);
bool frame_written(struct comm *c, const struct frame *f);

#endif
