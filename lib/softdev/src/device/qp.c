#include "device.h"

#include "guard.h"
#include "port.h"
#include "slots.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void free_qp(struct sd_qp *qp)
{
	sd_requester_free(qp);
	sd_rq_free(&qp->rq);
	free(qp);
}

static struct ibv_qp *create(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp_cap *cap = &attr->cap;
	struct sd_dev *dev = sd_dev_of(pd->context);
	if ((attr->qp_type != IBV_QPT_RC && attr->qp_type != IBV_QPT_UD) || !attr->send_cq || !attr->recv_cq) {
		errno = attr->send_cq && attr->recv_cq ? EOPNOTSUPP : EINVAL;
		return NULL;
	}
	if (cap->max_send_wr > SD_MAX_WR || cap->max_recv_wr > SD_MAX_WR || cap->max_send_sge > SD_MAX_SGE || cap->max_recv_sge > SD_MAX_SGE ||
		cap->max_inline_data > SD_MAX_INLINE) {
		errno = EINVAL;
		return NULL;
	}
	if (cap->max_inline_data < SD_MIN_INLINE)
		cap->max_inline_data = SD_MIN_INLINE;
	struct sd_qp *qp = calloc(1, sizeof *qp);
	if (!qp)
		return NULL;
	qp->dev = dev;
	qp->cap = *cap;
	qp->signal_all = attr->sq_sig_all;
	qp->rp.recv.sges = qp->rp.recv_sges;
	int err = sd_requester_init(qp, cap);
	if (!err)
		err = sd_rq_init(&qp->rq, attr->srq ? 0 : cap->max_recv_wr, attr->srq ? 0 : cap->max_recv_sge);
	struct ibv_qp *b = &qp->ex.qp_base;
	b->context = pd->context;
	b->qp_context = attr->qp_context;
	b->pd = pd;
	b->send_cq = attr->send_cq;
	b->recv_cq = attr->recv_cq;
	b->srq = attr->srq;
	b->qp_type = attr->qp_type;
	uint32_t index;
	sd_enter(dev);
	if (!err)
		err = sd_table_add(&dev->qps, qp, &index);
	if (!err && index >= SD_MAX_QP) {
		sd_table_remove(&dev->qps, index);
		err = ENOMEM;
	}
	if (!err) {
		b->handle = index;
		b->qp_num = dev->process << SD_QPN_PROCESS | (++dev->generation & ((1 << (SD_QPN_PROCESS - SD_QPN_GENERATION)) - 1)) << SD_QPN_GENERATION |
			(index + 2);
		((struct sd_pd *)pd)->users++;
		((struct sd_cq *)b->send_cq)->users++;
		((struct sd_cq *)b->recv_cq)->users++;
		if (b->srq)
			((struct sd_srq *)b->srq)->users++;
	}
	sd_leave(dev);
	if (err) {
		free_qp(qp);
		errno = err;
		return NULL;
	}
	pthread_mutex_init(&b->mutex, NULL);
	pthread_cond_init(&b->cond, NULL);
	return b;
}

struct ibv_qp *softdev_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	return create(pd, attr);
}

struct ibv_qp *sd_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
	const uint32_t known = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	const uint64_t operations = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM |
		IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_SEND_WITH_INV;
	bool builder = attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	(void)context;
	if ((attr->comp_mask & ~known) || !(attr->comp_mask & IBV_QP_INIT_ATTR_PD) || (builder && (attr->send_ops_flags & ~operations))) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	/* The first fields of the extended attributes are those of struct ibv_qp_init_attr. */
	struct ibv_qp *qp = create(attr->pd, (struct ibv_qp_init_attr *)attr);
	if (qp && builder)
		sd_builder_init(sd_qp_of(qp));
	return qp;
}

struct ibv_qp_ex *softdev_qp_to_qp_ex(struct ibv_qp *qp)
{
	return sd_qp_of(qp)->ex.wr_start ? &sd_qp_of(qp)->ex : NULL;
}

static void reset(struct sd_qp *qp)
{
	sd_cq_forget((struct sd_cq *)qp->ex.qp_base.send_cq, qp->ex.qp_base.qp_num);
	sd_cq_forget((struct sd_cq *)qp->ex.qp_base.recv_cq, qp->ex.qp_base.qp_num);
	sd_requester_reset(qp);
	qp->rq.count = 0;
	if (qp->open && qp->ex.qp_base.qp_type == IBV_QPT_RC)
		sd_slots_leave(qp->dev, &qp->path);
	qp->open = false;
	qp->path = (struct sd_path){.qp = qp};
	qp->attr = (struct ibv_qp_attr){.cap = qp->cap};
}

/* open_path applies the address vector: it opens the source port and checks that packets of the path MTU fit the
 * route. */
static int open_path(struct sd_qp *qp, const struct ibv_qp_attr *attr)
{
	struct sd_dev *dev = qp->dev;
	int err = sd_resolve(&attr->ah_attr, &qp->path);
	if (err)
		return err;
	err = sd_listen(dev, attr->ah_attr.grh.sgid_index);
	if (err)
		return err;
	qp->path.qp = qp;
	if (attr->ah_attr.grh.flow_label && attr->ah_attr.grh.flow_label <= SD_LABEL_MAX) {
		qp->path.flow.source_port = ibv_flow_label_to_udp_sport(attr->ah_attr.grh.flow_label);
		return dev->link->open(dev->link, &qp->path);
	}
	return sd_slots_join(dev, &qp->path, qp->ex.qp_base.qp_num);
}

static int to_rtr(struct sd_qp *qp, const struct ibv_qp_attr *attr, int mask)
{
	const int needed = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	if (qp->ex.qp_base.qp_type == IBV_QPT_UD) {
		qp->mtu = SD_MAX_MTU;
		for (uint32_t i = 0; sd_gid(i); i++) {
			int err = sd_listen(qp->dev, i);
			if (err)
				return err;
		}
		qp->open = true;
		return 0;
	}
	if ((mask & needed) != needed || attr->path_mtu < IBV_MTU_256 || attr->path_mtu > IBV_MTU_4096)
		return EINVAL;
	qp->mtu = 128u << attr->path_mtu;
	int err = open_path(qp, attr);
	if (err)
		return err;
	uint32_t route = sd_port_mtu(&qp->path.flow.source, &qp->path.flow.destination);
	if (route && sd_payload_mtu(route, sd_is_ipv4(&qp->path.flow.source)) < qp->mtu) {
		fprintf(stderr, "fared_soft0: packets of path MTU %u do not fit the route's MTU of %u\n", qp->mtu, route);
		sd_slots_leave(qp->dev, &qp->path);
		return EINVAL;
	}
	qp->open = true;
	qp->attr.rq_psn = attr->rq_psn & 0xffffff;
	sd_responder_reset(qp);
	return 0;
}

static void copy_attributes(struct ibv_qp_attr *to, const struct ibv_qp_attr *from, int mask)
{
	if (mask & IBV_QP_ACCESS_FLAGS)
		to->qp_access_flags = from->qp_access_flags;
	if (mask & IBV_QP_PKEY_INDEX)
		to->pkey_index = from->pkey_index;
	if (mask & IBV_QP_PORT)
		to->port_num = from->port_num;
	if (mask & IBV_QP_QKEY)
		to->qkey = from->qkey;
	if (mask & IBV_QP_AV)
		to->ah_attr = from->ah_attr;
	if (mask & IBV_QP_PATH_MTU)
		to->path_mtu = from->path_mtu;
	if (mask & IBV_QP_TIMEOUT)
		to->timeout = from->timeout & 31;
	if (mask & IBV_QP_RETRY_CNT)
		to->retry_cnt = from->retry_cnt & 7;
	if (mask & IBV_QP_RNR_RETRY)
		to->rnr_retry = from->rnr_retry & 7;
	if (mask & IBV_QP_RQ_PSN)
		to->rq_psn = from->rq_psn & 0xffffff;
	if (mask & IBV_QP_SQ_PSN)
		to->sq_psn = from->sq_psn & 0xffffff;
	if (mask & IBV_QP_MAX_QP_RD_ATOMIC)
		to->max_rd_atomic = from->max_rd_atomic;
	if (mask & IBV_QP_MAX_DEST_RD_ATOMIC)
		to->max_dest_rd_atomic = from->max_dest_rd_atomic;
	if (mask & IBV_QP_MIN_RNR_TIMER)
		to->min_rnr_timer = from->min_rnr_timer & 31;
	if (mask & IBV_QP_DEST_QPN)
		to->dest_qp_num = from->dest_qp_num & 0xffffff;
}

/* change_state follows the state machine of section 10.3. */
static int change_state(struct sd_qp *qp, const struct ibv_qp_attr *attr, int mask)
{
	enum ibv_qp_state from = qp->attr.qp_state, to = attr->qp_state;
	int err = 0;
	if (to == IBV_QPS_RESET) {
		reset(qp);
	} else if (to == IBV_QPS_ERR) {
		sd_qp_error(qp);
	} else if (to == IBV_QPS_RTR && from == IBV_QPS_INIT) {
		err = to_rtr(qp, attr, mask);
	} else if (to == IBV_QPS_RTS && from == IBV_QPS_RTR) {
		copy_attributes(&qp->attr, attr, mask);
		sd_requester_start(qp, qp->attr.sq_psn);
	} else if (!(to == IBV_QPS_INIT && (from == IBV_QPS_RESET || from == IBV_QPS_INIT)) && !(to == from && to == IBV_QPS_RTS)) {
		err = EINVAL;
	}
	if (!err)
		qp->attr.qp_state = qp->ex.qp_base.state = to;
	return err;
}

int softdev_modify_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask)
{
	struct sd_qp *qp = sd_qp_of(base);
	if (mask & (IBV_QP_ALT_PATH | IBV_QP_CAP | IBV_QP_RATE_LIMIT))
		return EOPNOTSUPP;
	if (((mask & IBV_QP_PORT) && attr->port_num != 1) || ((mask & IBV_QP_PKEY_INDEX) && attr->pkey_index != 0) ||
		((mask & IBV_QP_MAX_QP_RD_ATOMIC) && attr->max_rd_atomic > SD_MAX_READS) ||
		((mask & IBV_QP_MAX_DEST_RD_ATOMIC) && attr->max_dest_rd_atomic > SD_MAX_READS))
		return EINVAL;
	sd_enter(qp->dev);
	int err = 0;
	if ((mask & IBV_QP_CUR_STATE) && attr->cur_qp_state != qp->attr.qp_state)
		err = EINVAL;
	else if (mask & IBV_QP_STATE)
		err = change_state(qp, attr, mask);
	if (!err)
		copy_attributes(&qp->attr, attr, mask);
	sd_leave(qp->dev);
	return err;
}

int softdev_query_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	struct sd_qp *qp = sd_qp_of(base);
	(void)mask;
	sd_enter(qp->dev);
	*attr = qp->attr;
	attr->cur_qp_state = qp->attr.qp_state;
	attr->cap = qp->cap;
	if (init)
		*init = (struct ibv_qp_init_attr){.qp_context = base->qp_context,
			.send_cq = base->send_cq,
			.recv_cq = base->recv_cq,
			.srq = base->srq,
			.cap = qp->cap,
			.qp_type = base->qp_type,
			.sq_sig_all = qp->signal_all};
	sd_leave(qp->dev);
	return 0;
}

int softdev_destroy_qp(struct ibv_qp *base)
{
	struct sd_qp *qp = sd_qp_of(base);
	struct sd_dev *dev = qp->dev;
	sd_enter(dev);
	sd_run(dev);
	for (struct sd_qp **at = &dev->dirty; *at;)
		if (*at == qp)
			*at = qp->next_dirty;
		else
			at = &(*at)->next_dirty;
	reset(qp);
	sd_events_remove(&sd_context_of(base->context)->async, qp);
	sd_table_remove(&dev->qps, base->handle);
	((struct sd_pd *)base->pd)->users--;
	((struct sd_cq *)base->send_cq)->users--;
	((struct sd_cq *)base->recv_cq)->users--;
	if (base->srq)
		((struct sd_srq *)base->srq)->users--;
	sd_leave(dev);
	guard_lock(&base->mutex);
	while (base->events_completed != qp->async_delivered)
		pthread_cond_wait(&base->cond, &base->mutex);
	guard_unlock(&base->mutex);
	pthread_mutex_destroy(&base->mutex);
	pthread_cond_destroy(&base->cond);
	free_qp(qp);
	return 0;
}

/* copy_inline copies the data of a request into its entry, since the program may reuse its buffers at once. */
static int copy_inline(struct sd_qp *qp, struct sd_send *s, const struct ibv_send_wr *wr)
{
	size_t at = 0;
	for (int i = 0; i < wr->num_sge; i++) {
		if (wr->sg_list[i].length > qp->cap.max_inline_data - at)
			return EINVAL;
		memcpy(s->inlined + at, (const void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
		at += wr->sg_list[i].length;
	}
	s->length = (uint32_t)at;
	return 0;
}

static int post_one(struct sd_qp *qp, const struct ibv_send_wr *wr)
{
	struct sd_send *s = sd_requester_stage(qp);
	if (!s)
		return ENOMEM;
	if (wr->num_sge < 0 || ((uint32_t)wr->num_sge > qp->cap.max_send_sge && !(wr->send_flags & IBV_SEND_INLINE)))
		return EINVAL;
	s->wr_id = wr->wr_id;
	s->opcode = wr->opcode;
	s->flags = wr->send_flags;
	s->imm = wr->imm_data;
	s->pieces = 0;
	if (qp->ex.qp_base.qp_type == IBV_QPT_UD) {
		s->ah = (struct sd_ah *)wr->wr.ud.ah;
		s->remote_qpn = wr->wr.ud.remote_qpn;
		s->remote_qkey = wr->wr.ud.remote_qkey;
	} else if (wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		s->address = wr->wr.atomic.remote_addr;
		s->rkey = wr->wr.atomic.rkey;
		s->compare_add = wr->wr.atomic.compare_add;
		s->swap = wr->wr.atomic.swap;
	} else {
		s->address = wr->wr.rdma.remote_addr;
		s->rkey = wr->wr.rdma.rkey;
	}
	if (wr->send_flags & IBV_SEND_INLINE) {
		int err = copy_inline(qp, s, wr);
		if (err)
			return err;
	} else {
		s->pieces = wr->num_sge;
		if (wr->num_sge > 0)
			memcpy(s->sges, wr->sg_list, (size_t)wr->num_sge * sizeof *wr->sg_list);
	}
	return sd_requester_post(qp, s);
}

int sd_post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct sd_qp *qp = sd_qp_of(base);
	sd_enter(qp->dev);
	int err = qp->attr.qp_state == IBV_QPS_RTS || qp->attr.qp_state == IBV_QPS_ERR ? 0 : EINVAL;
	for (; wr && !err; wr = err ? wr : wr->next)
		err = post_one(qp, wr);
	sd_leave(qp->dev);
	if (err)
		*bad = wr;
	return err;
}

int sd_post_recv(struct ibv_qp *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct sd_qp *qp = sd_qp_of(base);
	sd_enter(qp->dev);
	int err = qp->attr.qp_state == IBV_QPS_RESET || base->srq ? EINVAL : 0;
	for (; wr && !err; wr = err ? wr : wr->next)
		err = sd_rq_post(&qp->rq, wr);
	if (qp->attr.qp_state == IBV_QPS_ERR)
		sd_rq_flush(qp);
	sd_leave(qp->dev);
	if (err)
		*bad = wr;
	return err;
}
