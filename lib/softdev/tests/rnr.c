/* SENDs to a queue pair without receives, for each value of rnr_retry, on a simulated wire. */
#include "sim.h"

#include "../../tests/check.h"

enum { UNLIMITED = 7, MANY = 1000 };

struct end {
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
};

static void make_end(struct end *e, int side)
{
	struct ibv_context *c = &sim.context[side].verbs.context;
	CHECK(e->pd = softdev_alloc_pd(c));
	CHECK(e->cq = softdev_create_cq(c, 1, NULL, NULL, 0));
	struct ibv_qp_init_attr attr = {.send_cq = e->cq, .recv_cq = e->cq, .qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 2, .max_recv_wr = 2}};
	CHECK(e->qp = softdev_create_qp(e->pd, &attr));
}

static void connect_end(struct end *e, const struct end *peer, int side, uint8_t retry)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1};
	CHECK(!softdev_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	a = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_256, .dest_qp_num = peer->qp->qp_num, .min_rnr_timer = 1};
	a.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1, .grh.sgid_index = (uint8_t)side};
	memcpy(&a.ah_attr.grh.dgid, &sim_gids[!side], 16);
	CHECK(!softdev_modify_qp(
		e->qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	a = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = retry};
	CHECK(!softdev_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

/* refused_sends sends without a receive, and returns the number of RNR NAKs until the completion, which has an error,
 * or MANY. */
static uint64_t refused_sends(struct end ends[2], struct ibv_wc *wc)
{
	uint64_t before = sim.dev[0].counters.rnr_naks;
	struct ibv_send_wr wr = {.opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
	CHECK(sd_post_send(ends[0].qp, &wr, &bad) == 0);
	while (sd_poll_cq(ends[0].cq, 1, wc) == 0 && sim.dev[0].counters.rnr_naks - before < MANY)
		CHECK(sim_step());
	return sim.dev[0].counters.rnr_naks - before;
}

int main(void)
{
	sim_init(1);
	for (uint8_t retry = 0; retry <= UNLIMITED; retry++) {
		struct end ends[2];
		struct ibv_wc wc = {0};
		for (int s = 0; s < 2; s++)
			make_end(&ends[s], s);
		for (int s = 0; s < 2; s++)
			connect_end(&ends[s], &ends[!s], s, retry);
		uint64_t naks = refused_sends(ends, &wc);
		if (retry < UNLIMITED) {
			CHECK(naks == retry + 1u && wc.status == IBV_WC_RNR_RETRY_EXC_ERR && ends[0].qp->state == IBV_QPS_ERR);
		} else {
			struct ibv_recv_wr receive = {0}, *bad;
			CHECK(naks == MANY && sd_post_recv(ends[1].qp, &receive, &bad) == 0);
			while (sd_poll_cq(ends[0].cq, 1, &wc) == 0)
				CHECK(sim_step());
			CHECK(wc.status == IBV_WC_SUCCESS);
		}
		for (int s = 0; s < 2; s++)
			CHECK(softdev_destroy_qp(ends[s].qp) == 0 && softdev_destroy_cq(ends[s].cq) == 0 && softdev_dealloc_pd(ends[s].pd) == 0);
	}
	sim_end();
	return 0;
}
