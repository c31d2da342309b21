/* The core of the software verbs device: its objects, and RoCEv2 between them. The core has no sockets, threads, locks
 * or clock; env.h has all that it calls, so tests run it on a simulated wire. Callers serialize all calls of a
 * device. */
#ifndef SOFTDEV_CORE_H
#define SOFTDEV_CORE_H

#include "env.h"
#include "wire.h"

#include <infiniband/verbs.h>
#include <sys/uio.h>

enum {
	SD_MAX_SGE = 30,      /* elements of a scatter or gather list */
	SD_MAX_INLINE = 1024, /* bytes of inline data */
	SD_MIN_INLINE = 64,   /* granted to every queue pair, as drivers do */
	SD_MAX_CQE = 1 << 22, /* completions that a program may ask room for */
	SD_MAX_WR = 32768,    /* work requests of a queue */
	SD_MAX_READS = 128,   /* outstanding READs and atomics of a queue pair, in each direction */
	SD_MAX_JOBS = 256,    /* queued responses of a queue pair */
	SD_READ_CHUNK = 64,   /* packets of a READ that one request asks for */
	SD_GRH_SIZE = 40,
	SD_MANAGEMENT_QPN = 1,
	SD_PROCESSES = 64,   /* that share the port of RoCEv2 */
	SD_QPN_BYTE = 5,     /* position of a destination's number in a packet */
	SD_QPN_PROCESS = 18, /* first bit of the process in a queue pair's number */
	SD_QPN_GENERATION = 13,
	SD_MAX_QP = (1 << SD_QPN_GENERATION) - 3, /* the highest number is that of multicast */
};

struct sd_qp;
struct sd_dev;

/* A path of packets: addresses, ports, DSCP and ECN, and the link's private socket. A path that takes its port from the
 * slot table is in a list of its pair. */
struct sd_path {
	struct sd_flow flow;
	uint8_t tos;
	void *socket;
	struct sd_pair *pair; /* NULL: the port is fixed */
	int slot;             /* index in the pair; -1: no slot has the port any longer */
	struct sd_qp *qp;     /* the user of the path; NULL: an address handle */
	struct sd_path *next;
};

/* A packet to send. The payload is memory of the program, which may change it at any time. */
struct sd_packet {
	uint8_t header[SD_MAX_HEADER];
	size_t header_size, payload_size;
	struct iovec payload[SD_MAX_SGE];
	int pieces;
};

struct sd_counters {
	uint64_t sent, received, retransmitted, duplicates, out_of_order, naks, rnr_naks, timeouts;
	uint64_t bad_icrc, malformed, unknown_qp, wrong_source, congestion_marks, cnps_sent, cnps_received, moved;
};

/* An object's number: index in the table in some bits, generation in others, so that the number of a destroyed object
 * is not reused at once. */
struct sd_table {
	void **objects;
	uint32_t size, used, hint;
};

struct sd_dev {
	struct sd_link *link;
	uint64_t now;        /* ns of a monotonic clock; set before each call of the core */
	uint64_t next_timer; /* time of the earliest timer; UINT64_MAX if there is none */
	struct sd_table mrs, qps;
	uint32_t generation;
	uint32_t process;    /* its number */
	struct sd_qp *dirty; /* queue pairs with something to send */
	struct sd_counters counters;
	struct sd_slots *slots; /* the slot table; NULL: none */
	uint32_t armed;         /* completion queues that await an event */
};

struct sd_cq {
	struct ibv_cq base;
	struct sd_dev *dev;
	struct ibv_wc *ring;
	uint32_t size, head, count;
	int armed; /* 0: no, 1: for any completion, 2: for solicited ones and errors */
	uint32_t users, delivered;
};

struct sd_mr {
	struct ibv_mr base;
	uint64_t iova;
	unsigned access;
};

struct sd_ah {
	struct ibv_ah base;
	struct sd_path path;
};

/* A posted receive, and a queue of them. */
struct sd_recv {
	uint64_t wr_id;
	int pieces;
	struct ibv_sge *sges;
};
struct sd_rq {
	struct sd_recv *ring;
	struct ibv_sge *sges;
	uint32_t size, head, count, max_sge;
};

struct sd_srq {
	struct ibv_srq base;
	struct sd_rq rq;
	uint32_t limit, users, async_delivered;
};

/* A posted operation. Its packets, or those of its responses, have the sequence numbers psn to psn + packets - 1. */
struct sd_send {
	uint64_t wr_id, psn;
	uint32_t packets, length;
	enum ibv_wr_opcode opcode;
	unsigned flags; /* IBV_SEND_... */
	uint32_t imm;   /* immediate data, or the R_Key to invalidate */
	uint64_t address, compare_add, swap;
	uint32_t rkey;
	struct sd_ah *ah;
	uint32_t remote_qpn, remote_qkey;
	int pieces;
	struct ibv_sge *sges; /* room for the queue pair's max_send_sge */
	uint8_t *inlined;     /* room for the queue pair's max_inline_data */
};

/* The sender of requests. Sequence numbers have 64 bits, of which packets contain the lower 24. */
struct sd_requester {
	struct sd_send *ring;
	struct ibv_sge *sges;
	uint8_t *inlined;
	uint32_t size, head, count;
	uint32_t staged; /* built by ibv_wr_..., not yet posted */
	int staging_error;
	uint32_t cursor;              /* operations from head on that are sent completely */
	uint64_t una, next, end;      /* oldest unacknowledged, next to send, after the last posted */
	uint64_t highest;             /* after the highest one sent */
	uint64_t reads[SD_MAX_READS]; /* last sequence number of each outstanding READ and atomic request */
	uint32_t read_head, read_count, max_reads;
	uint64_t asked; /* sequence number of the latest request for an acknowledgement */
	uint32_t window, window_max, threshold, window_credit;
	uint32_t alpha;                            /* DCQCN's estimate of congestion, 1/1024 */
	uint64_t cut_at;                           /* time of the latest reduction by a CNP */
	uint64_t rtt_psn, rtt_start, srtt, rttvar; /* ns */
	bool rtt_active;
	uint64_t timer, progress, rnr_until; /* 0: off */
	uint32_t expiries, rnr_left, backoff;
	uint64_t rewound_at, rewound_to;
};

/* A queued response: packets of a READ, or the result of an atomic. */
struct sd_job {
	uint64_t psn;
	uint32_t packets, sent, length, msn;
	uint64_t address;
	uint32_t rkey;
	bool atomic;
	uint64_t original;
};

/* The executor of the peer's requests. */
struct sd_responder {
	uint64_t expected;
	uint32_t msn;
	bool nak_sent;       /* a gap has been reported: the next report follows the next packet in order */
	int current;         /* first opcode of the message in progress: SD_SEND_FIRST or SD_WRITE_FIRST; -1: none */
	struct sd_recv recv; /* the receive in use by a SEND */
	struct ibv_sge recv_sges[SD_MAX_SGE];
	uint32_t offset;  /* received bytes of the message */
	uint64_t address; /* of the WRITE in progress */
	uint32_t rkey, length;
	struct sd_job jobs[SD_MAX_JOBS];
	uint32_t job_head, job_count;
	struct sd_job atomics[SD_MAX_READS * 2]; /* results of the latest atomics, for duplicates */
	uint32_t atomic_count;
	bool ack;
	uint8_t nak; /* syndrome to send; 0: none */
	uint64_t cnp_at;
};

struct sd_qp {
	struct ibv_qp_ex ex;
	struct sd_dev *dev;
	struct ibv_qp_attr attr; /* as set by ibv_modify_qp */
	struct ibv_qp_cap cap;
	bool signal_all, open, in_dirty;
	struct sd_qp *next_dirty;
	uint32_t mtu;
	struct sd_path path;
	struct sd_requester rq_out;
	struct sd_responder rp;
	struct sd_rq rq;
	uint32_t async_delivered;
};

/* table.c */
int sd_table_add(struct sd_table *t, void *object, uint32_t *index);
void sd_table_remove(struct sd_table *t, uint32_t index);
static inline void *sd_table_get(const struct sd_table *t, uint32_t index)
{
	return index < t->size ? t->objects[index] : NULL;
}
/* The number of a queue pair is that of its process in the upper 6 bits, a generation in 5, and index + 2 in the lower
 * 13, since 0 and 1 are those of management; a memory key has its index in the upper 24 bits. */
struct sd_qp *sd_find_qp(const struct sd_dev *dev, uint32_t qpn);

/* mr.c */
/* Returns the local address of remote or local memory, or NULL if the key does not permit the access (IBV_ACCESS_...
 * bits, all of which are required). */
uint8_t *sd_mr_check(const struct sd_dev *dev, const struct ibv_pd *pd, uint32_t key, uint64_t address, uint64_t length, unsigned access);
/* Appends the pieces of a gather list from offset on to a packet. Returns 0, or -1 if a key does not permit it. */
int sd_gather(const struct sd_qp *qp, const struct sd_send *s, uint64_t offset, uint32_t length, struct sd_packet *packet);
/* Copies data into a scatter list at offset. Returns IBV_WC_SUCCESS, IBV_WC_LOC_LEN_ERR or IBV_WC_LOC_PROT_ERR. */
enum ibv_wc_status sd_scatter(
	const struct sd_dev *dev, const struct ibv_pd *pd, const struct sd_recv *r, uint64_t offset, const uint8_t *data, uint32_t length);

/* cq.c */
void sd_cq_push(struct sd_cq *cq, const struct ibv_wc *wc, bool solicited);
int sd_cq_take(struct sd_cq *cq, int n, struct ibv_wc *wc);
/* Removes the completions of a queue pair, which is to be destroyed or reset. */
void sd_cq_forget(struct sd_cq *cq, uint32_t qpn);

/* requester.c */
int sd_requester_init(struct sd_qp *qp, const struct ibv_qp_cap *cap);
void sd_requester_free(struct sd_qp *qp);
void sd_requester_reset(struct sd_qp *qp);
/* Starts to send from a sequence number. */
void sd_requester_start(struct sd_qp *qp, uint32_t psn);
/* Returns the next free entry of the send queue, or NULL if the queue is full. */
struct sd_send *sd_requester_stage(struct sd_qp *qp);
/* Checks the staged entry and posts it. Returns an errno. */
int sd_requester_post(struct sd_qp *qp, struct sd_send *s);
void sd_requester_run(struct sd_qp *qp);
void sd_requester_receive(struct sd_qp *qp, const struct sd_header *h, const uint8_t *payload, uint32_t length);
void sd_requester_timer(struct sd_qp *qp);
void sd_requester_congested(struct sd_qp *qp);
/* Retransmits everything unacknowledged at once: the path has changed. */
void sd_requester_moved(struct sd_qp *qp);
void sd_requester_flush(struct sd_qp *qp);

/* responder.c */
void sd_responder_reset(struct sd_qp *qp);
void sd_responder_receive(struct sd_qp *qp, const struct sd_header *h, const uint8_t *payload, uint32_t length);
void sd_responder_run(struct sd_qp *qp);
bool sd_rq_take(struct sd_qp *qp, struct sd_recv *out);
int sd_rq_init(struct sd_rq *rq, uint32_t wrs, uint32_t sges);
void sd_rq_free(struct sd_rq *rq);
int sd_rq_post(struct sd_rq *rq, const struct ibv_recv_wr *wr);
void sd_rq_flush(struct sd_qp *qp);

/* datagram.c */
void sd_datagram_run(struct sd_qp *qp);
void sd_datagram_receive(struct sd_qp *qp, const struct sd_flow *flow, uint8_t tos, const struct sd_header *h, const uint8_t *payload, uint32_t length);

/* engine.c */
/* Handles a received UDP payload. id is a guess of its IPv4 identification. */
void sd_input(struct sd_dev *dev, const struct sd_flow *flow, uint8_t tos, uint16_t id, uint8_t *p, size_t n);
/* Sends what is due, up to a budget; returns true if more remains. */
bool sd_run(struct sd_dev *dev);
/* Runs the timers that are due, and sets next_timer. */
void sd_timers(struct sd_dev *dev);
void sd_dirty(struct sd_qp *qp);
void sd_emit(struct sd_qp *qp, const struct sd_header *h, struct sd_packet *packet);
/* Moves a queue pair into the error state: every posted request is flushed. */
void sd_qp_error(struct sd_qp *qp);

static inline struct sd_qp *sd_qp_of(struct ibv_qp *qp)
{
	return (struct sd_qp *)qp;
}
static inline uint32_t sd_packets(uint64_t length, uint32_t mtu)
{
	return length == 0 ? 1 : (uint32_t)((length + mtu - 1) / mtu);
}
/* Extends the 24 bits of a packet's sequence number to the nearest number to base. */
static inline uint64_t sd_unwrap(uint64_t base, uint32_t psn)
{
	return base + (uint64_t)(int64_t)((int32_t)((psn - (uint32_t)base) << 8) >> 8);
}

#endif
