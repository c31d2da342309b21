#include "device.h"

#include "guard.h"
#include "slots.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

struct ibv_pd *softdev_alloc_pd(struct ibv_context *context)
{
	struct sd_pd *pd = calloc(1, sizeof *pd);
	if (!pd)
		return NULL;
	pd->base.context = context;
	return &pd->base;
}

int softdev_dealloc_pd(struct ibv_pd *base)
{
	struct sd_pd *pd = (struct sd_pd *)base;
	struct sd_dev *dev = sd_dev_of(base->context);
	sd_enter(dev);
	bool used = pd->users > 0;
	sd_leave(dev);
	if (used)
		return EBUSY;
	free(pd);
	return 0;
}

static void use_pd(struct ibv_pd *pd, int n)
{
	((struct sd_pd *)pd)->users += (uint32_t)n;
}

/* check_access returns an errno for access that the device does not have, or that contradicts itself. */
static int check_access(unsigned access)
{
	const unsigned remote_writes = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
	const unsigned known = remote_writes | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_HUGETLB;
	if (access & ~known)
		return EOPNOTSUPP;
	return (access & remote_writes) && !(access & IBV_ACCESS_LOCAL_WRITE) ? EINVAL : 0;
}

/* check_memory returns EFAULT for memory that the process cannot use, where a driver of the kernel would pin it: all of
 * it must be mapped, and its first and last page readable, or writable. The other pages stay as they are, so that large
 * memory of a program without RDMA NICs costs nothing until its use. */
static int check_memory(void *address, size_t length, bool write)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)address & -page, last = ((uintptr_t)address + length - 1) & -page;
	int advice = write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
	unsigned char resident[4096];
	if (length == 0)
		return 0;
	if ((uintptr_t)address + length < length)
		return EINVAL;
	for (uintptr_t at = from; at <= last; at += sizeof resident * page) {
		size_t left = last - at + page;
		if (mincore((void *)at, left < sizeof resident * page ? left : sizeof resident * page, resident) != 0)
			return EFAULT; /* a page is not mapped; resident does not matter */
	}
	if (madvise((void *)from, 0, advice) != 0)
		return 0; /* Linux before 5.14 */
	return madvise((void *)from, page, advice) != 0 || madvise((void *)last, page, advice) != 0 ? EFAULT : 0;
}

struct ibv_mr *softdev_reg_mr(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned access)
{
	struct sd_dev *dev = sd_dev_of(pd->context);
	access &= ~(unsigned)IBV_ACCESS_OPTIONAL_RANGE;
	int err = check_access(access);
	if (!err)
		err = check_memory(address, length, access & IBV_ACCESS_LOCAL_WRITE);
	if (err) {
		errno = err;
		return NULL;
	}
	struct sd_mr *mr = calloc(1, sizeof *mr);
	if (!mr)
		return NULL;
	sd_enter(dev);
	uint32_t index;
	err = sd_table_add(&dev->mrs, mr, &index);
	if (!err) {
		mr->base = (struct ibv_mr){.context = pd->context, .pd = pd, .addr = address, .length = length, .handle = index};
		mr->base.lkey = mr->base.rkey = index << 8 | (++dev->generation & 0xff);
		mr->iova = access & IBV_ACCESS_ZERO_BASED ? 0 : iova;
		mr->access = access;
		use_pd(pd, 1);
	}
	sd_leave(dev);
	if (err) {
		free(mr);
		errno = err;
		return NULL;
	}
	return &mr->base;
}

int softdev_rereg_mr(struct ibv_mr *base, int flags, struct ibv_pd *pd, void *address, size_t length, int access)
{
	struct sd_mr *mr = (struct sd_mr *)base;
	struct sd_dev *dev = sd_dev_of(base->context);
	unsigned wanted = flags & IBV_REREG_MR_CHANGE_ACCESS ? (unsigned)access & ~(unsigned)IBV_ACCESS_OPTIONAL_RANGE : mr->access;
	bool other = flags & IBV_REREG_MR_CHANGE_TRANSLATION;
	int err = check_access(wanted);
	if (!err)
		err = check_memory(other ? address : mr->base.addr, other ? length : mr->base.length, wanted & IBV_ACCESS_LOCAL_WRITE);
	if (err) {
		errno = err;
		return IBV_REREG_MR_ERR_INPUT;
	}
	sd_enter(dev);
	if (flags & IBV_REREG_MR_CHANGE_PD) {
		use_pd(mr->base.pd, -1);
		use_pd(pd, 1);
		mr->base.pd = pd;
	}
	if (other) {
		mr->base.addr = address;
		mr->base.length = length;
		mr->iova = (uintptr_t)address;
	}
	mr->access = wanted;
	sd_leave(dev);
	return 0;
}

int softdev_dereg_mr(struct ibv_mr *base)
{
	struct sd_mr *mr = (struct sd_mr *)base;
	struct sd_dev *dev = sd_dev_of(base->context);
	sd_enter(dev);
	sd_table_remove(&dev->mrs, base->handle);
	use_pd(base->pd, -1);
	sd_leave(dev);
	free(mr);
	return 0;
}

struct ibv_comp_channel *softdev_create_comp_channel(struct ibv_context *context)
{
	struct sd_channel *c = calloc(1, sizeof *c);
	if (!c)
		return NULL;
	if (sd_events_open(&c->events) != 0) {
		free(c);
		return NULL;
	}
	c->base.context = context;
	c->base.fd = c->events.fd;
	return &c->base;
}

int softdev_destroy_comp_channel(struct ibv_comp_channel *base)
{
	struct sd_channel *c = (struct sd_channel *)base;
	if (c->base.refcnt)
		return EBUSY;
	sd_events_close(&c->events);
	free(c);
	return 0;
}

struct ibv_cq *softdev_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel, int vector)
{
	if (cqe <= 0 || cqe > SD_MAX_CQE || vector < 0 || vector >= context->num_comp_vectors) {
		errno = EINVAL;
		return NULL;
	}
	struct sd_cq *cq = calloc(1, sizeof *cq);
	if (!cq)
		return NULL;
	cq->dev = sd_dev_of(context);
	cq->size = (uint32_t)cqe;
	cq->ring = malloc(cq->size * sizeof *cq->ring);
	if (!cq->ring) {
		free(cq);
		return NULL;
	}
	cq->base = (struct ibv_cq){.context = context, .channel = channel, .cq_context = cq_context, .cqe = cqe};
	pthread_mutex_init(&cq->base.mutex, NULL);
	pthread_cond_init(&cq->base.cond, NULL);
	sd_enter(cq->dev);
	if (channel)
		channel->refcnt++;
	sd_leave(cq->dev);
	return &cq->base;
}

int softdev_resize_cq(struct ibv_cq *base, int cqe)
{
	struct sd_cq *cq = (struct sd_cq *)base;
	sd_enter(cq->dev);
	bool fits = cqe > 0 && cqe <= SD_MAX_CQE && cq->count <= (uint32_t)cqe;
	if (fits)
		base->cqe = cqe; /* the queue grows by itself */
	sd_leave(cq->dev);
	return fits ? 0 : EINVAL;
}

int softdev_destroy_cq(struct ibv_cq *base)
{
	struct sd_cq *cq = (struct sd_cq *)base;
	sd_enter(cq->dev);
	bool used = cq->users > 0;
	uint32_t delivered = cq->delivered;
	if (!used) {
		if (cq->armed)
			cq->dev->armed--;
		cq->armed = 0;
		if (base->channel) {
			sd_events_remove(&((struct sd_channel *)base->channel)->events, cq);
			base->channel->refcnt--;
		}
	}
	sd_leave(cq->dev);
	if (used)
		return EBUSY;
	guard_lock(&base->mutex);
	while (base->comp_events_completed != delivered)
		pthread_cond_wait(&base->cond, &base->mutex);
	guard_unlock(&base->mutex);
	pthread_mutex_destroy(&base->mutex);
	pthread_cond_destroy(&base->cond);
	free(cq->ring);
	free(cq);
	return 0;
}

int softdev_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)
{
	struct sd_event event;
	int err = sd_events_take(&((struct sd_channel *)channel)->events, &event);
	if (err) {
		errno = err;
		return -1;
	}
	struct sd_cq *from = event.object;
	*cq = &from->base;
	*cq_context = from->base.cq_context;
	return 0;
}

void softdev_ack_cq_events(struct ibv_cq *cq, unsigned n)
{
	guard_lock(&cq->mutex);
	cq->comp_events_completed += n;
	pthread_cond_signal(&cq->cond);
	guard_unlock(&cq->mutex);
}

int sd_req_notify_cq(struct ibv_cq *base, int solicited_only)
{
	struct sd_cq *cq = (struct sd_cq *)base;
	sd_enter(cq->dev);
	if (!cq->armed)
		cq->dev->armed++;
	if (cq->armed != 1)
		cq->armed = solicited_only ? 2 : 1;
	sd_awaits_event(cq->dev);
	sd_leave(cq->dev);
	return 0;
}

/* The events of other threads: a program acknowledges each one that it has received, and a destroyed object waits for
 * that. */
static void count_async(struct ibv_async_event *event)
{
	switch (event->event_type) {
	case IBV_EVENT_SRQ_LIMIT_REACHED:
		((struct sd_srq *)event->element.srq)->async_delivered++;
		break;
	default:
		((struct sd_qp *)event->element.qp)->async_delivered++;
	}
}

int softdev_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	struct sd_event from;
	int err = sd_events_take(&sd_context_of(context)->async, &from);
	if (err) {
		errno = err;
		return -1;
	}
	event->event_type = (enum ibv_event_type)from.type;
	event->element.qp = from.object;
	count_async(event);
	return 0;
}

struct ibv_context *softdev_event_context(const struct ibv_async_event *event)
{
	switch (event->event_type) {
	case IBV_EVENT_CQ_ERR:
		return event->element.cq->context;
	case IBV_EVENT_SRQ_ERR:
	case IBV_EVENT_SRQ_LIMIT_REACHED:
		return event->element.srq->context;
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		return event->element.qp->context;
	default:
		return NULL;
	}
}

void softdev_ack_async_event(struct ibv_async_event *event)
{
	bool srq = event->event_type == IBV_EVENT_SRQ_LIMIT_REACHED;
	pthread_mutex_t *mutex = srq ? &event->element.srq->mutex : &event->element.qp->mutex;
	pthread_cond_t *cond = srq ? &event->element.srq->cond : &event->element.qp->cond;
	guard_lock(mutex);
	if (srq)
		event->element.srq->events_completed++;
	else
		event->element.qp->events_completed++;
	pthread_cond_signal(cond);
	guard_unlock(mutex);
}

struct ibv_srq *softdev_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
	if (attr->attr.max_wr == 0 || attr->attr.max_wr > SD_MAX_WR || attr->attr.max_sge > SD_MAX_SGE) {
		errno = EINVAL;
		return NULL;
	}
	struct sd_srq *srq = calloc(1, sizeof *srq);
	if (!srq || sd_rq_init(&srq->rq, attr->attr.max_wr, attr->attr.max_sge) != 0) {
		free(srq);
		errno = ENOMEM;
		return NULL;
	}
	srq->limit = attr->attr.srq_limit;
	srq->base = (struct ibv_srq){.context = pd->context, .srq_context = attr->srq_context, .pd = pd};
	pthread_mutex_init(&srq->base.mutex, NULL);
	pthread_cond_init(&srq->base.cond, NULL);
	sd_enter(sd_dev_of(pd->context));
	use_pd(pd, 1);
	sd_leave(sd_dev_of(pd->context));
	return &srq->base;
}

int softdev_modify_srq(struct ibv_srq *base, struct ibv_srq_attr *attr, int mask)
{
	struct sd_srq *srq = (struct sd_srq *)base;
	if (mask & IBV_SRQ_MAX_WR)
		return EOPNOTSUPP;
	sd_enter(sd_dev_of(base->context));
	if (mask & IBV_SRQ_LIMIT)
		srq->limit = attr->srq_limit;
	sd_leave(sd_dev_of(base->context));
	return 0;
}

int softdev_query_srq(struct ibv_srq *base, struct ibv_srq_attr *attr)
{
	struct sd_srq *srq = (struct sd_srq *)base;
	sd_enter(sd_dev_of(base->context));
	*attr = (struct ibv_srq_attr){.max_wr = srq->rq.size, .max_sge = srq->rq.max_sge, .srq_limit = srq->limit};
	sd_leave(sd_dev_of(base->context));
	return 0;
}

int softdev_destroy_srq(struct ibv_srq *base)
{
	struct sd_srq *srq = (struct sd_srq *)base;
	sd_enter(sd_dev_of(base->context));
	bool used = srq->users > 0;
	if (!used) {
		use_pd(base->pd, -1);
		sd_events_remove(&sd_context_of(base->context)->async, srq);
	}
	sd_leave(sd_dev_of(base->context));
	if (used)
		return EBUSY;
	guard_lock(&base->mutex);
	while (base->events_completed != srq->async_delivered)
		pthread_cond_wait(&base->cond, &base->mutex);
	guard_unlock(&base->mutex);
	pthread_mutex_destroy(&base->mutex);
	pthread_cond_destroy(&base->cond);
	sd_rq_free(&srq->rq);
	free(srq);
	return 0;
}

int sd_post_srq_recv(struct ibv_srq *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct sd_srq *srq = (struct sd_srq *)base;
	int err = 0;
	sd_enter(sd_dev_of(base->context));
	for (; wr && !err; wr = err ? wr : wr->next)
		err = sd_rq_post(&srq->rq, wr);
	sd_leave(sd_dev_of(base->context));
	if (err)
		*bad = wr;
	return err;
}

struct ibv_ah *softdev_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	struct sd_dev *dev = sd_dev_of(pd->context);
	struct sd_ah *ah = calloc(1, sizeof *ah);
	if (!ah)
		return NULL;
	ah->base = (struct ibv_ah){.context = pd->context, .pd = pd};
	int err = sd_resolve(attr, &ah->path);
	sd_enter(dev);
	if (!err && attr->grh.flow_label && attr->grh.flow_label <= SD_LABEL_MAX) {
		ah->path.flow.source_port = ibv_flow_label_to_udp_sport(attr->grh.flow_label);
		err = dev->link->open(dev->link, &ah->path);
	} else if (!err) {
		err = sd_slots_join(dev, &ah->path, ++dev->generation);
	}
	if (!err)
		use_pd(pd, 1);
	sd_leave(dev);
	if (err) {
		free(ah);
		errno = err;
		return NULL;
	}
	return &ah->base;
}

int softdev_init_ah_from_wc(struct ibv_context *context, uint8_t port, struct ibv_wc *wc, struct ibv_grh *grh, struct ibv_ah_attr *attr)
{
	struct in6_addr source = {0}, destination;
	(void)context;
	if (!(wc->wc_flags & IBV_WC_GRH))
		return EINVAL;
	const uint8_t *b = (const uint8_t *)grh;
	*attr = (struct ibv_ah_attr){.is_global = 1, .port_num = port, .grh.hop_limit = 64};
	if (b[0] >> 4 == 6) {
		memcpy(&source, b + 8, 16);
		memcpy(&destination, b + 24, 16);
	} else { /* an IPv4 header in the latter 20 bytes */
		source.s6_addr[10] = source.s6_addr[11] = 0xff;
		destination = source;
		memcpy(&source.s6_addr[12], b + 32, 4);
		memcpy(&destination.s6_addr[12], b + 36, 4);
	}
	memcpy(&attr->grh.dgid, &source, 16);
	for (uint32_t i = 0; i < SD_MAX_GIDS && sd_gid(i); i++)
		if (memcmp(sd_gid(i), &destination, 16) == 0) {
			attr->grh.sgid_index = (uint8_t)i;
			return 0;
		}
	return EINVAL;
}

int softdev_destroy_ah(struct ibv_ah *base)
{
	struct sd_ah *ah = (struct sd_ah *)base;
	struct sd_dev *dev = sd_dev_of(base->context);
	sd_enter(dev);
	sd_run(dev); /* posted datagrams refer to the handle */
	sd_slots_leave(dev, &ah->path);
	use_pd(base->pd, -1);
	sd_leave(dev);
	free(ah);
	return 0;
}
