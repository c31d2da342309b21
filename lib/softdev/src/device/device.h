/* The device of a process: its engine, contexts and addresses. */
#ifndef SOFTDEV_DEVICE_H
#define SOFTDEV_DEVICE_H

#include "core/core.h"
#include "softdev.h"

enum { SD_MAX_GIDS = 64 };

/* Queue of events that a program awaits on a file descriptor: an eventfd that counts them. */
#define SD_COMPLETION_EVENT (-1)
struct sd_event {
	struct sd_event *next;
	void *object;
	int type; /* SD_COMPLETION_EVENT, or enum ibv_event_type */
};
struct sd_events {
	int fd;
	struct sd_event *head, **tail;
};

struct sd_channel {
	struct ibv_comp_channel base;
	struct sd_events events;
};

struct sd_pd {
	struct ibv_pd base;
	uint32_t users;
};

struct sd_context {
	struct sd_events async;
	struct sd_dev *dev;
	struct verbs_context verbs; /* the last field of it is the struct ibv_context */
};

static inline struct sd_context *sd_context_of(const struct ibv_context *context)
{
	return (struct sd_context *)((char *)context - offsetof(struct sd_context, verbs) - offsetof(struct verbs_context, context));
}
static inline struct sd_dev *sd_dev_of(const struct ibv_context *context)
{
	return sd_context_of(context)->dev;
}

/* events.c */
int sd_events_open(struct sd_events *e);
void sd_events_close(struct sd_events *e);
/* Removes the undelivered events of an object. */
void sd_events_remove(struct sd_events *e, const void *object);
/* Waits for an event, without the lock; returns an errno. A nonblocking descriptor returns EAGAIN. */
int sd_events_take(struct sd_events *e, struct sd_event *out);

/* device.c */
/* The lock of every engine: callers of the core hold it. It is in no memory that a child of fork may lack. */
extern pthread_mutex_t sd_lock;
/* Returns the device to a context, the first of which starts the engine; NULL and errno after a failure. */
struct sd_dev *sd_device_open(void);
/* Ends the use by a context; that by the last one stops the engine. */
void sd_device_close(struct sd_dev *dev);
/* Take and release the lock; sd_enter updates the time, and sd_leave sends the packets that are due and wakes the
 * engine's thread if a timer is earlier than its sleep. */
void sd_enter(struct sd_dev *dev);
void sd_leave(struct sd_dev *dev);
/* Makes the engine's thread wait for packets: a program awaits an event. */
void sd_awaits_event(struct sd_dev *dev);
/* Receives packets to a GID from now on. */
int sd_listen(struct sd_dev *dev, uint32_t gid_index);
/* Takes completions; with fewer than n, it first receives, sends and runs timers in the calling thread. */
int sd_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc);

/* gid.c */
/* Sets a path's addresses and traffic class. Returns EINVAL for an unknown GID or another family. */
int sd_resolve(const struct ibv_ah_attr *attr, struct sd_path *path);
/* Returns a GID of the device, or NULL. */
const struct in6_addr *sd_gid(uint32_t index);
uint32_t sd_gid_count(void);
/* Returns the MTU of the netdev with a GID's address, and its index; for an address on lo that is not of 127.0.0.0/8 or
 * ::1, the smallest MTU of all other netdevs that are up. */
uint32_t sd_link_mtu(const struct in6_addr *gid, unsigned *ifindex);
/* Returns the MTU in bytes of payload that a link's MTU permits, of at most SD_MAX_MTU, or 0. */
uint32_t sd_payload_mtu(uint32_t link_mtu, bool v4);

/* verbs.c: operations of a context that libibverbs' header calls. */
int sd_req_notify_cq(struct ibv_cq *cq, int solicited_only);
int sd_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
/* qp.c */
int sd_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int sd_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
struct ibv_qp *sd_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);
/* builder.c: the functions ibv_wr_... of a queue pair. */
void sd_builder_init(struct sd_qp *qp);

#endif
