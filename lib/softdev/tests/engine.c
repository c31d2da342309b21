/* Random operations of two devices on a bad wire, compared with a model: engine SEED OPERATIONS LOSS (per 10,000). */
#include "sim.h"

enum { PAIRS = 4, DEPTH = 32, SLOT = 20000, PATTERN = 1 << 20 };

#define CHECK(condition, ...)                                                                     \
	do {                                                                                      \
		if (!(condition)) {                                                               \
			printf("%s:%d: ", __FILE__, __LINE__), printf(__VA_ARGS__), printf("\n"); \
			exit(1);                                                                  \
		}                                                                                 \
	} while (0)

/* A posted operation and its expected effect. */
struct operation {
	enum ibv_wr_opcode opcode;
	uint32_t length, seed, imm;
	uint64_t original; /* of an atomic */
	uint32_t offset;   /* of a READ in the pattern */
	bool signaled;
};

/* One end of a queue pair: it sends operations to the other end. */
struct end {
	struct ibv_qp *qp;
	struct ibv_cq *send_cq, *recv_cq;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	uint8_t *memory; /* DEPTH slots to send from, DEPTH to be written to, DEPTH to receive to, two atomics, the pattern */
	struct operation sent[DEPTH];
	uint64_t posted, completed;
	uint64_t expected[2]; /* values of the atomics at the other end */
	struct {
		uint32_t length, seed, imm;
		bool with_imm, write;
	} queue[4 * DEPTH];              /* messages that the other end must receive */
	uint64_t sends, receives, ready; /* sent, received, posted receives of this end */
};

static uint8_t *source_slot(struct end *e, uint64_t i)
{
	return e->memory + (i % DEPTH) * SLOT;
}
static uint8_t *target_slot(struct end *e, uint64_t i)
{
	return e->memory + (DEPTH + i % DEPTH) * SLOT;
}
static uint8_t *receive_slot(struct end *e, uint64_t i)
{
	return e->memory + (2 * DEPTH + i % DEPTH) * SLOT;
}
static uint64_t *atomics(struct end *e)
{
	return (uint64_t *)(e->memory + 3 * DEPTH * SLOT);
}
static uint8_t *pattern(struct end *e)
{
	return e->memory + 3 * DEPTH * SLOT + 64;
}

static void fill(uint8_t *b, uint32_t n, uint32_t seed)
{
	for (uint32_t i = 0; i < n; i++, seed = seed * 1664525u + 1013904223u)
		b[i] = (uint8_t)(seed >> 24);
}

static bool filled(const uint8_t *b, uint32_t n, uint32_t seed)
{
	for (uint32_t i = 0; i < n; i++, seed = seed * 1664525u + 1013904223u)
		if (b[i] != (uint8_t)(seed >> 24))
			return false;
	return true;
}

static void make_end(struct end *e, int side)
{
	struct ibv_context *c = &sim.context[side].verbs.context;
	e->pd = softdev_alloc_pd(c);
	e->send_cq = softdev_create_cq(c, 1, NULL, NULL, 0);
	e->recv_cq = softdev_create_cq(c, 1, NULL, NULL, 0);
	size_t size = 3 * DEPTH * SLOT + 64 + PATTERN;
	e->memory = aligned_alloc(64, size);
	memset(e->memory, 0, size);
	e->mr = softdev_reg_mr(e->pd, e->memory, size, (uintptr_t)e->memory, 15);
	fill(pattern(e), PATTERN, (uint32_t)(77 + side));
	struct ibv_qp_init_attr attr = {.send_cq = e->send_cq,
		.recv_cq = e->recv_cq,
		.qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 3, .max_recv_sge = 2, .max_inline_data = 100}};
	e->qp = softdev_create_qp(e->pd, &attr);
	CHECK(e->qp, "queue pair");
}

static void connect_ends(struct end *a, struct end *b, int side, enum ibv_mtu mtu, uint32_t psn_a, uint32_t psn_b)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = 15};
	CHECK(!softdev_modify_qp(a->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR, .path_mtu = mtu, .dest_qp_num = b->qp->qp_num, .rq_psn = psn_b, .max_dest_rd_atomic = 8, .min_rnr_timer = 4};
	attr.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1, .grh.sgid_index = (uint8_t)side};
	memcpy(&attr.ah_attr.grh.dgid, &sim_gids[!side], 16);
	CHECK(!softdev_modify_qp(a->qp, &attr,
		      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
		"RTR");
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7, .sq_psn = psn_a, .max_rd_atomic = (uint8_t)(1 + rnd(8))};
	CHECK(!softdev_modify_qp(a->qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
		"RTS");
}

static void post_receives(struct end *e, uint32_t n)
{
	for (; n > 0 && e->ready - e->receives < DEPTH; n--, e->ready++) {
		uint8_t *b = receive_slot(e, e->ready);
		uint32_t cut = rnd(SLOT);
		struct ibv_sge sges[2] = {{(uintptr_t)b, cut, e->mr->lkey}, {(uintptr_t)b + cut, SLOT - cut, e->mr->lkey}};
		struct ibv_recv_wr wr = {.wr_id = e->ready, .sg_list = sges, .num_sge = 2}, *bad;
		CHECK(!sd_post_recv(e->qp, &wr, &bad), "receive");
	}
}

static void post(struct end *e, struct end *peer)
{
	static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_READ,
		IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD};
	uint64_t i = e->posted;
	struct operation *o = &e->sent[i % DEPTH];
	uint8_t *from = source_slot(e, i);
	*o = (struct operation){.opcode = opcodes[rnd(7)], .seed = rnd(1u << 30), .imm = rnd(1u << 30)};
	o->length = rnd(4) == 0 ? rnd(SLOT) : rnd(3) == 0 ? 0 : rnd(200);
	/* The last entry of a full window is signaled, so that completions of all follow. */
	o->signaled = rnd(2) || i % (DEPTH / 4) == 0;
	struct ibv_sge sges[3];
	struct ibv_send_wr wr = {.wr_id = i, .sg_list = sges, .num_sge = 3, .opcode = o->opcode, .imm_data = o->imm}, *bad;
	wr.send_flags = (o->signaled ? IBV_SEND_SIGNALED : 0) | (rnd(8) == 0 ? IBV_SEND_FENCE : 0);
	if (o->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || o->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		uint32_t k = rnd(2);
		o->length = 8;
		o->original = e->expected[k];
		wr.wr.atomic.remote_addr = (uintptr_t)&atomics(peer)[k];
		wr.wr.atomic.rkey = peer->mr->rkey;
		wr.wr.atomic.compare_add = o->opcode == IBV_WR_ATOMIC_CMP_AND_SWP && rnd(2) ? e->expected[k] : rnd(1000);
		wr.wr.atomic.swap = rnd(1u << 30);
		if (o->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
			e->expected[k] += wr.wr.atomic.compare_add;
		else if (wr.wr.atomic.compare_add == e->expected[k])
			e->expected[k] = wr.wr.atomic.swap;
	} else {
		o->offset = rnd(PATTERN - SLOT);
		wr.wr.rdma.remote_addr = o->opcode == IBV_WR_RDMA_READ ? (uintptr_t)pattern(peer) + o->offset : (uintptr_t)target_slot(peer, i);
		wr.wr.rdma.rkey = o->length == 0 ? 12345 : peer->mr->rkey; /* messages without data need no key */
	}
	uint32_t a = rnd(o->length + 1), b = rnd(o->length - a + 1);
	sges[0] = (struct ibv_sge){(uintptr_t)from, a, e->mr->lkey};
	sges[1] = (struct ibv_sge){(uintptr_t)from + a, b, e->mr->lkey};
	sges[2] = (struct ibv_sge){(uintptr_t)from + a + b, o->length - a - b, e->mr->lkey};
	if (o->opcode != IBV_WR_RDMA_READ)
		fill(from, o->length, o->seed);
	if (o->length <= 100 && o->opcode <= IBV_WR_SEND_WITH_IMM && rnd(2))
		wr.send_flags |= IBV_SEND_INLINE;
	bool consumes = o->opcode == IBV_WR_SEND || o->opcode == IBV_WR_SEND_WITH_IMM || o->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
	if (consumes) {
		uint64_t k = e->sends++ % (4 * DEPTH);
		e->queue[k].length = o->length;
		e->queue[k].seed = o->seed;
		e->queue[k].imm = o->imm;
		e->queue[k].with_imm = o->opcode != IBV_WR_SEND;
		e->queue[k].write = o->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
	}
	CHECK(!sd_post_send(e->qp, &wr, &bad), "send %d", o->opcode);
	if (wr.send_flags & IBV_SEND_INLINE)
		memset(from, 0xee, o->length);
	e->posted++;
}

static void verify(struct end *e, struct end *peer, uint64_t i, bool last)
{
	const struct operation *o = &e->sent[i % DEPTH];
	if ((o->opcode == IBV_WR_RDMA_WRITE || o->opcode == IBV_WR_RDMA_WRITE_WITH_IMM) && last)
		CHECK(filled(target_slot(peer, i), o->length, o->seed), "WRITE %lu of %u bytes", i, o->length);
	if (o->opcode == IBV_WR_RDMA_READ)
		CHECK(memcmp(source_slot(e, i), pattern(peer) + o->offset, o->length) == 0, "READ %lu of %u bytes", i, o->length);
	if (o->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || o->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
		CHECK(memcmp(source_slot(e, i), &o->original, 8) == 0, "atomic %lu", i);
}

static void collect(struct end *e, struct end *peer)
{
	struct ibv_wc wc;
	while (sd_poll_cq(e->send_cq, 1, &wc) > 0) {
		CHECK(wc.status == IBV_WC_SUCCESS, "operation %lu: %s at %lu ms", wc.wr_id, ibv_wc_status_str(wc.status), sim.now / 1000000);
		CHECK(wc.wr_id >= e->completed && wc.wr_id < e->posted && e->sent[wc.wr_id % DEPTH].signaled, "completion %lu after %lu", wc.wr_id,
			e->completed);
		for (; e->completed <= wc.wr_id; e->completed++) {
			CHECK(e->completed == wc.wr_id || !e->sent[e->completed % DEPTH].signaled, "no completion of %lu", e->completed);
			verify(e, peer, e->completed, true);
		}
	}
	while (sd_poll_cq(peer->recv_cq, 1, &wc) > 0) {
		CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == peer->receives, "receive %lu: %s", wc.wr_id, ibv_wc_status_str(wc.status));
		uint64_t k = peer->receives % (4 * DEPTH);
		CHECK(wc.byte_len == e->queue[k].length && !!(wc.wc_flags & IBV_WC_WITH_IMM) == e->queue[k].with_imm, "receive %lu has %u bytes", wc.wr_id,
			wc.byte_len);
		CHECK(!e->queue[k].with_imm || wc.imm_data == e->queue[k].imm, "immediate data of %lu", wc.wr_id);
		CHECK(wc.opcode == (e->queue[k].write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV), "opcode of %lu", wc.wr_id);
		if (!e->queue[k].write)
			CHECK(filled(receive_slot(peer, wc.wr_id), wc.byte_len, e->queue[k].seed), "message %lu", wc.wr_id);
		peer->receives++;
	}
}

int main(int argc, char **argv)
{
	static struct end ends[PAIRS][2];
	CHECK(argc == 4, "usage: engine SEED OPERATIONS LOSS");
	sim_init(strtoull(argv[1], NULL, 10));
	uint64_t operations = strtoull(argv[2], NULL, 10), done = 0, turns = 0;
	sim.loss = (uint32_t)atoi(argv[3]);
	sim.copies = sim.loss / 2;
	sim.late = sim.loss / 2;
	sim.marked = sim.loss;
	sim.jitter = sim.loss ? 3000 : 1;
	for (int p = 0; p < PAIRS; p++) {
		uint32_t psns[2] = {rnd(1 << 24), 0xffffff - rnd(1000)};
		for (int s = 0; s < 2; s++)
			make_end(&ends[p][s], s);
		for (int s = 0; s < 2; s++)
			connect_ends(&ends[p][s], &ends[p][!s], s, (enum ibv_mtu)(IBV_MTU_256 + p), psns[s], psns[!s]);
	}
	while (done < operations) {
		struct end *e = ends[rnd(PAIRS)];
		int side = (int)rnd(2);
		e += side;
		struct end *peer = side ? e - 1 : e + 1;
		for (uint32_t n = rnd(8); n > 0 && e->posted - e->completed < DEPTH && e->sends - peer->receives < 4 * DEPTH; n--)
			post(e, peer);
		if (++turns % 512 > 32) /* now and then both ends are without receives */
			post_receives(peer, rnd(4));
		for (uint32_t n = rnd(60); n > 0 && sim_step(); n--)
			;
		uint64_t before = e->completed;
		collect(e, peer);
		done += e->completed - before;
		if (rnd(200) == 0) {
			sd_enter(&sim.dev[side]);
			sd_requester_moved(sd_qp_of(e->qp));
			sd_leave(&sim.dev[side]);
		}
	}
	for (int p = 0; p < PAIRS; p++)
		for (int s = 0; s < 2; s++) {
			struct end *e = &ends[p][s], *peer = &ends[p][!s];
			for (collect(e, peer); e->sends > peer->receives; collect(e, peer)) {
				post_receives(peer, DEPTH);
				CHECK(sim_step() || sd_qp_of(e->qp)->rq_out.count == 0, "messages are missing");
			}
			while (sd_qp_of(e->qp)->rq_out.count > 0)
				CHECK(sim_step(), "operations are outstanding");
			collect(e, peer);
			CHECK(memcmp(atomics(peer), e->expected, sizeof e->expected) == 0, "atomics are wrong at the end");
		}
	struct sd_counters c = {0};
	for (int s = 0; s < 2; s++) {
		const struct sd_counters *x = &sim.dev[s].counters;
		CHECK(x->bad_icrc == 0 && x->malformed == 0 && x->unknown_qp == 0, "bad packets");
		c.retransmitted += x->retransmitted, c.duplicates += x->duplicates, c.out_of_order += x->out_of_order, c.naks += x->naks;
		c.rnr_naks += x->rnr_naks, c.timeouts += x->timeouts, c.cnps_received += x->cnps_received;
	}
	CHECK(!sim.loss || (c.retransmitted && c.duplicates && c.out_of_order && c.naks && c.rnr_naks && c.timeouts && c.cnps_received),
		"the wire was too good: %lu %lu %lu %lu %lu %lu %lu", c.retransmitted, c.duplicates, c.out_of_order, c.naks, c.rnr_naks, c.timeouts,
		c.cnps_received);
	printf("%lu operations, %lu packets, %lu lost, %lu retransmitted, %.3f s of virtual time\n", done, sim.packets, sim.lost, c.retransmitted,
		(double)sim.now / 1e9);
	for (int p = 0; p < PAIRS; p++)
		for (int s = 0; s < 2; s++) {
			struct end *e = &ends[p][s];
			softdev_destroy_qp(e->qp);
			softdev_dereg_mr(e->mr);
			softdev_destroy_cq(e->send_cq);
			softdev_destroy_cq(e->recv_cq);
			CHECK(softdev_dealloc_pd(e->pd) == 0, "the protection domain is in use");
			free(e->memory);
		}
	sim_end();
	return 0;
}
