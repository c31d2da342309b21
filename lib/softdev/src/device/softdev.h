/* fared_soft0, a software verbs device in the process of the program: RoCEv2 over UDP sockets on all planes, without
 * kernel modules and privileges.
 *
 * The functions are those of libibverbs, for objects of this device. A library that replaces libibverbs' symbols calls
 * them if softdev_owns(context), and libibverbs otherwise. Functions that libibverbs' header implements inline reach
 * the device through its context.
 *
 * FARED_SOFT_ADDRESS addresses of the device, separated by commas; each is an entry of the GID table. Default: the
 * sources of the slot table. FARED_SLOTS path of the slot table, as for libfared.
 */
#ifndef SOFTDEV_H
#define SOFTDEV_H

#include <infiniband/verbs.h>
#include <stdbool.h>

/* Returns the device, or NULL if it has no address. */
struct ibv_device *softdev_device(void);
bool softdev_is_device(const struct ibv_device *device);
/* Reports whether a context is one of this device. */
bool softdev_owns(const struct ibv_context *context);

struct ibv_context *softdev_open_device(struct ibv_device *device);
int softdev_close_device(struct ibv_context *context);
__be64 softdev_get_device_guid(struct ibv_device *device);

int softdev_query_device(struct ibv_context *context, struct ibv_device_attr *attr);
int softdev_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t size);
int softdev_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid);
int softdev_query_gid_entry(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry);
/* Writes all entries, each of size bytes, and returns their number, or -EINVAL if there are more than max. */
ssize_t softdev_query_gid_table(struct ibv_context *context, void *entries, size_t max, size_t size);
int softdev_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey);
int softdev_get_async_event(struct ibv_context *context, struct ibv_async_event *event);
void softdev_ack_async_event(struct ibv_async_event *event);
/* The context of the object of an asynchronous event, or NULL if the event has none. */
struct ibv_context *softdev_event_context(const struct ibv_async_event *event);

struct ibv_pd *softdev_alloc_pd(struct ibv_context *context);
int softdev_dealloc_pd(struct ibv_pd *pd);
struct ibv_mr *softdev_reg_mr(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned access);
int softdev_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *address, size_t length, int access);
int softdev_dereg_mr(struct ibv_mr *mr);

struct ibv_comp_channel *softdev_create_comp_channel(struct ibv_context *context);
int softdev_destroy_comp_channel(struct ibv_comp_channel *channel);
struct ibv_cq *softdev_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel, int vector);
int softdev_resize_cq(struct ibv_cq *cq, int cqe);
int softdev_destroy_cq(struct ibv_cq *cq);
int softdev_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context);
void softdev_ack_cq_events(struct ibv_cq *cq, unsigned n);

struct ibv_srq *softdev_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr);
int softdev_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask);
int softdev_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr);
int softdev_destroy_srq(struct ibv_srq *srq);

struct ibv_qp *softdev_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
int softdev_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
int softdev_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init);
int softdev_destroy_qp(struct ibv_qp *qp);
/* Returns NULL if the queue pair has not been created by ibv_create_qp_ex with operations. */
struct ibv_qp_ex *softdev_qp_to_qp_ex(struct ibv_qp *qp);

struct ibv_ah *softdev_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr);
int softdev_init_ah_from_wc(struct ibv_context *context, uint8_t port, struct ibv_wc *wc, struct ibv_grh *grh, struct ibv_ah_attr *attr);
int softdev_destroy_ah(struct ibv_ah *ah);

#endif
