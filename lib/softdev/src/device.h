/* The device of a process: its engine, contexts and addresses. */
#ifndef SOFTDEV_DEVICE_H
#define SOFTDEV_DEVICE_H

#include "core.h"
#include "softdev.h"

enum { SD_MAX_GIDS = 64 };

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

/* Takes and releases the device's lock; sd_enter updates the time, and sd_leave sends what is due and wakes the engine's thread if a timer is earlier than its
 * sleep. */
void sd_enter(struct sd_dev *dev);
void sd_leave(struct sd_dev *dev);
/* Receives, sends and runs timers in the calling thread, with the lock. */
void sd_progress(struct sd_dev *dev);
/* Makes the engine's thread wait for packets: a program awaits an event. */
void sd_awaits_event(struct sd_dev *dev);
/* Receives packets to a GID from now on. */
int sd_listen(struct sd_dev *dev, uint32_t gid_index);
/* Sets a path's addresses and traffic class. Returns EINVAL for an unknown GID or another family. */
int sd_resolve(struct sd_dev *dev, const struct ibv_ah_attr *attr, struct sd_path *path);
/* Reports a GID of the device, or NULL. */
const struct in6_addr *sd_gid(uint32_t index);
/* Returns the MTU in bytes of payload that a link's MTU permits, of at most SD_MAX_MTU, or 0. */
uint32_t sd_payload_mtu(uint32_t link_mtu, bool v4);

/* verbs.c: operations of a context that libibverbs' header calls. */
int sd_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc);
int sd_req_notify_cq(struct ibv_cq *cq, int solicited_only);
int sd_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
/* qp.c */
int sd_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int sd_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
struct ibv_qp *sd_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);
/* builder.c: the functions ibv_wr_... of a queue pair. */
void sd_builder_init(struct sd_qp *qp);

#endif
