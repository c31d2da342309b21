/* Two connected RC queue pairs of fared_soft0 in one process: one at GID 0, the other at GID 1. */
#ifndef PAIR_H
#define PAIR_H

#include <infiniband/verbs.h>
#include <stdint.h>
#include <string.h>

#include "../../tests/check.h"

struct end {
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_comp_channel *channel;
	struct ibv_qp *qp;
	union ibv_gid gid;
	int index;
};

static struct ibv_context *open_fared_soft0(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *c = NULL;
	for (int i = 0; list && list[i]; i++)
		if (strcmp(ibv_get_device_name(list[i]), "fared_soft0") == 0)
			c = ibv_open_device(list[i]);
	if (list)
		ibv_free_device_list(list);
	CHECK(c);
	return c;
}

static void make_end(struct end *e, struct ibv_context *c, int index)
{
	e->index = index;
	CHECK(ibv_query_gid(c, 1, index, &e->gid) == 0);
	CHECK(e->pd = ibv_alloc_pd(c));
	CHECK(e->channel = ibv_create_comp_channel(c));
	CHECK(e->cq = ibv_create_cq(c, 256, NULL, e->channel, 0));
	struct ibv_qp_init_attr attr = {
		.send_cq = e->cq, .recv_cq = e->cq, .qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 64, .max_recv_wr = 64, .max_send_sge = 2, .max_recv_sge = 2}};
	CHECK(e->qp = ibv_create_qp(e->pd, &attr));
	struct ibv_qp_attr a = {
		.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC};
	CHECK(ibv_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
}

static void connect_end(struct end *e, const struct end *peer)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = peer->qp->qp_num,
		.max_dest_rd_atomic = 16,
		.min_rnr_timer = 12,
		.ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = peer->gid, .sgid_index = (uint8_t)e->index, .hop_limit = 64}}};
	CHECK(ibv_modify_qp(e->qp, &a,
		      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
	a = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 17, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 16};
	CHECK(ibv_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

static void make_pair(struct end ends[2], struct ibv_context *c)
{
	for (int i = 0; i < 2; i++)
		make_end(&ends[i], c, i);
	for (int i = 0; i < 2; i++)
		connect_end(&ends[i], &ends[!i]);
}

static void destroy_pair(struct end ends[2])
{
	for (int i = 0; i < 2; i++)
		CHECK(ibv_destroy_qp(ends[i].qp) == 0 && ibv_destroy_cq(ends[i].cq) == 0 && ibv_destroy_comp_channel(ends[i].channel) == 0 &&
			ibv_dealloc_pd(ends[i].pd) == 0);
}

static void post(struct end *e, enum ibv_wr_opcode opcode, const struct ibv_mr *local, const struct ibv_mr *remote)
{
	struct ibv_sge sge = {(uintptr_t)local->addr, (uint32_t)local->length, local->lkey};
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED}, *bad;
	wr.wr.rdma.remote_addr = (uintptr_t)remote->addr;
	wr.wr.rdma.rkey = remote->rkey;
	CHECK(ibv_post_send(e->qp, &wr, &bad) == 0);
}

/* await polls for a completion, and returns its status. */
static enum ibv_wc_status await(struct end *e)
{
	struct ibv_wc wc;
	int n;
	while ((n = ibv_poll_cq(e->cq, 1, &wc)) == 0)
		;
	CHECK(n == 1);
	return wc.status;
}

#endif
