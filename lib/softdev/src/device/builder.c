#include "device.h"

#include <string.h>

/* Requests between ibv_wr_start and ibv_wr_complete are staged in the free entries of the send queue. The lock is held
 * meanwhile. */

static struct sd_requester *requester(struct ibv_qp_ex *ex)
{
	return &((struct sd_qp *)ex)->rq_out;
}

static void start(struct ibv_qp_ex *ex)
{
	struct sd_qp *qp = (struct sd_qp *)ex;
	sd_enter(qp->dev);
	qp->rq_out.staged = 0;
	qp->rq_out.staging_error = qp->attr.qp_state == IBV_QPS_RTS || qp->attr.qp_state == IBV_QPS_ERR ? 0 : EINVAL;
}

static struct sd_send *staged(struct ibv_qp_ex *ex)
{
	struct sd_requester *r = requester(ex);
	return &r->ring[(r->head + r->count + r->staged - 1) % r->size];
}

static struct sd_send *begin(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode)
{
	struct sd_requester *r = requester(ex);
	static struct sd_send overflow; /* the entry of a request that will not be posted */
	if (r->count + r->staged == r->size)
		r->staging_error = ENOMEM;
	if (r->staging_error)
		return &overflow;
	r->staged++;
	struct sd_send *s = staged(ex);
	s->wr_id = ex->wr_id;
	s->flags = ex->wr_flags & ~(unsigned)IBV_SEND_INLINE;
	s->opcode = opcode;
	s->pieces = 0;
	s->length = 0;
	s->ah = NULL;
	return s;
}

static void begin_rdma(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint32_t rkey, uint64_t address, uint32_t imm)
{
	struct sd_send *s = begin(ex, opcode);
	s->rkey = rkey;
	s->address = address;
	s->imm = imm;
}

static void write_data(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address)
{
	begin_rdma(ex, IBV_WR_RDMA_WRITE, rkey, address, 0);
}

static void write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address, __be32 imm)
{
	begin_rdma(ex, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, address, imm);
}

static void read_data(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address)
{
	begin_rdma(ex, IBV_WR_RDMA_READ, rkey, address, 0);
}

static void send_data(struct ibv_qp_ex *ex)
{
	begin(ex, IBV_WR_SEND);
}

static void send_imm(struct ibv_qp_ex *ex, __be32 imm)
{
	begin(ex, IBV_WR_SEND_WITH_IMM)->imm = imm;
}

static void send_invalidate(struct ibv_qp_ex *ex, uint32_t rkey)
{
	begin(ex, IBV_WR_SEND_WITH_INV)->imm = rkey;
}

static void compare_swap(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address, uint64_t compare, uint64_t swap)
{
	struct sd_send *s = begin(ex, IBV_WR_ATOMIC_CMP_AND_SWP);
	s->rkey = rkey;
	s->address = address;
	s->compare_add = compare;
	s->swap = swap;
}

static void fetch_add(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address, uint64_t add)
{
	struct sd_send *s = begin(ex, IBV_WR_ATOMIC_FETCH_AND_ADD);
	s->rkey = rkey;
	s->address = address;
	s->compare_add = add;
}

static void set_address(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey)
{
	if (requester(ex)->staging_error)
		return;
	struct sd_send *s = staged(ex);
	s->ah = (struct sd_ah *)ah;
	s->remote_qpn = qpn;
	s->remote_qkey = qkey;
}

static void set_sge_list(struct ibv_qp_ex *ex, size_t n, const struct ibv_sge *list)
{
	struct sd_qp *qp = (struct sd_qp *)ex;
	if (n > qp->cap.max_send_sge)
		qp->rq_out.staging_error = EINVAL;
	if (qp->rq_out.staging_error)
		return;
	struct sd_send *s = staged(ex);
	s->pieces = (int)n;
	memcpy(s->sges, list, n * sizeof *list);
}

static void set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t address, uint32_t length)
{
	set_sge_list(ex, 1, &(struct ibv_sge){.addr = address, .length = length, .lkey = lkey});
}

static void set_inline_list(struct ibv_qp_ex *ex, size_t n, const struct ibv_data_buf *list)
{
	struct sd_qp *qp = (struct sd_qp *)ex;
	for (size_t i = 0; i < n && !qp->rq_out.staging_error; i++) {
		struct sd_send *s = staged(ex);
		s->flags |= IBV_SEND_INLINE;
		if (list[i].length > qp->cap.max_inline_data - s->length) {
			qp->rq_out.staging_error = EINVAL;
			return;
		}
		memcpy(s->inlined + s->length, list[i].addr, list[i].length);
		s->length += (uint32_t)list[i].length;
	}
}

static void set_inline(struct ibv_qp_ex *ex, void *address, size_t length)
{
	set_inline_list(ex, 1, &(struct ibv_data_buf){.addr = address, .length = length});
}

/* complete posts all staged requests, or none after an error. */
static int complete(struct ibv_qp_ex *ex)
{
	struct sd_qp *qp = (struct sd_qp *)ex;
	struct sd_requester *r = &qp->rq_out;
	int err = r->staging_error;
	for (uint32_t n = r->staged; n > 0 && !err; n--)
		err = sd_requester_post(qp, &r->ring[(r->head + r->count) % r->size]);
	r->staged = 0;
	sd_leave(qp->dev);
	return err;
}

static void discard(struct ibv_qp_ex *ex)
{
	struct sd_qp *qp = (struct sd_qp *)ex;
	qp->rq_out.staged = 0;
	sd_leave(qp->dev);
}

void sd_builder_init(struct sd_qp *qp)
{
	struct ibv_qp_ex *ex = &qp->ex;
	ex->wr_start = start;
	ex->wr_complete = complete;
	ex->wr_abort = discard;
	ex->wr_send = send_data;
	ex->wr_send_imm = send_imm;
	ex->wr_send_inv = send_invalidate;
	ex->wr_rdma_write = write_data;
	ex->wr_rdma_write_imm = write_imm;
	ex->wr_rdma_read = read_data;
	ex->wr_atomic_cmp_swp = compare_swap;
	ex->wr_atomic_fetch_add = fetch_add;
	ex->wr_set_ud_addr = set_address;
	ex->wr_set_sge = set_sge;
	ex->wr_set_sge_list = set_sge_list;
	ex->wr_set_inline_data = set_inline;
	ex->wr_set_inline_data_list = set_inline_list;
}
