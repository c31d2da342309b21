/* Timers of a requester without an acknowledgement, on a simulated wire: they cost a peer that is late a few
 * duplicates, and repair what was lost. */
#include "sim.h"

#include "../../tests/check.h"

enum { SIZE = 100000, NONE = 0, ALL = 10000 };
#define LATE 20000000ull       /* ns, twice the least timeout */
#define VERY_LATE 200000000ull /* after more than two timers */

struct end {
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	uint8_t memory[SIZE];
};

static void make_end(struct end *e, int side)
{
	struct ibv_context *c = &sim.context[side].verbs.context;
	CHECK(e->pd = softdev_alloc_pd(c));
	CHECK(e->cq = softdev_create_cq(c, 1, NULL, NULL, 0));
	CHECK(e->mr = softdev_reg_mr(e->pd, e->memory, SIZE, (uintptr_t)e->memory, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ));
	struct ibv_qp_init_attr attr = {
		.send_cq = e->cq, .recv_cq = e->cq, .qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1}};
	CHECK(e->qp = softdev_create_qp(e->pd, &attr));
}

static void connect_end(struct end *e, const struct end *peer, int side)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ};
	CHECK(!softdev_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	a = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_256, .dest_qp_num = peer->qp->qp_num, .max_dest_rd_atomic = 16};
	a.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1, .grh.sgid_index = (uint8_t)side};
	memcpy(&a.ah_attr.grh.dgid, &sim_gids[!side], 16);
	CHECK(!softdev_modify_qp(
		e->qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	a = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 17, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 16};
	CHECK(!softdev_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

/* transfer executes an operation while the wire loses all packets until a number of timers have expired. Returns the
 * retransmitted packets. */
static uint64_t transfer(struct end *from, struct end *to, enum ibv_wr_opcode opcode, uint64_t timers)
{
	static uint8_t seed;
	struct sd_counters *c = &sim.dev[0].counters;
	struct end *source = opcode == IBV_WR_RDMA_READ ? to : from;
	uint64_t retransmitted = c->retransmitted, until = c->timeouts + timers;
	struct ibv_sge sge = {(uintptr_t)from->memory, SIZE, from->mr->lkey};
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED}, *bad;
	struct ibv_wc wc;
	wr.wr.rdma.remote_addr = (uintptr_t)to->memory;
	wr.wr.rdma.rkey = to->mr->rkey;
	memset(source->memory, ++seed, SIZE);
	sim.loss = timers ? ALL : NONE;
	CHECK(sd_post_send(from->qp, &wr, &bad) == 0);
	while (c->timeouts < until)
		CHECK(sim_step());
	sim.loss = NONE;
	while (sd_poll_cq(from->cq, 1, &wc) == 0)
		CHECK(sim_step());
	CHECK(wc.status == IBV_WC_SUCCESS && memcmp(from->memory, to->memory, SIZE) == 0 && from->memory[SIZE - 1] == seed);
	return c->retransmitted - retransmitted;
}

int main(void)
{
	static struct end ends[2];
	static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ};
	sim_init(1);
	sim.jitter = 1; /* no packet overtakes another one */
	for (int i = 0; i < 2; i++) {
		for (int s = 0; s < 2; s++)
			make_end(&ends[s], s);
		for (int s = 0; s < 2; s++)
			connect_end(&ends[s], &ends[!s], s);
		for (int n = 0; n < 8; n++) /* the window grows */
			CHECK(transfer(&ends[0], &ends[1], opcodes[i], 0) == 0);
		uint64_t delay = sim.delay, timeouts = sim.dev[0].counters.timeouts;
		sim.delay = LATE;
		uint64_t retransmitted = transfer(&ends[0], &ends[1], opcodes[i], 0);
		CHECK(sim.dev[0].counters.timeouts > timeouts && retransmitted <= 2);
		timeouts = sim.dev[0].counters.timeouts;
		sim.delay = VERY_LATE;
		retransmitted = transfer(&ends[0], &ends[1], opcodes[i], 0);
		CHECK(sim.dev[0].counters.timeouts > timeouts + 3 && retransmitted <= SIZE / 256 / 4);
		sim.delay = delay;
		for (uint64_t timers = 1; timers <= 4; timers++) {
			timeouts = sim.dev[0].counters.timeouts;
			CHECK(transfer(&ends[0], &ends[1], opcodes[i], timers) > 0 && sim.dev[0].counters.timeouts - timeouts <= timers + 3);
		}
		for (int s = 0; s < 2; s++)
			CHECK(softdev_destroy_qp(ends[s].qp) == 0 && softdev_dereg_mr(ends[s].mr) == 0 && softdev_destroy_cq(ends[s].cq) == 0 &&
				softdev_dealloc_pd(ends[s].pd) == 0);
	}
	sim_end();
	return 0;
}
