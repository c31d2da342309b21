#include "core.h"

#include <stdlib.h>
#include <string.h>

/* READ responses that one run sends, so that other queue pairs have their turn: what one flush of the port holds. */
enum { RUN_BYTES = 240 << 10 };

int sd_rq_init(struct sd_rq *rq, uint32_t wrs, uint32_t sges)
{
	rq->size = wrs ? wrs : 1;
	rq->max_sge = sges ? sges : 1;
	rq->ring = calloc(rq->size, sizeof *rq->ring);
	rq->sges = calloc((size_t)rq->size * rq->max_sge, sizeof *rq->sges);
	if (!rq->ring || !rq->sges)
		return ENOMEM;
	for (uint32_t i = 0; i < rq->size; i++)
		rq->ring[i].sges = rq->sges + (size_t)i * rq->max_sge;
	return 0;
}

void sd_rq_free(struct sd_rq *rq)
{
	free(rq->ring);
	free(rq->sges);
}

int sd_rq_post(struct sd_rq *rq, const struct ibv_recv_wr *wr)
{
	if (rq->count == rq->size)
		return ENOMEM;
	if (wr->num_sge < 0 || (uint32_t)wr->num_sge > rq->max_sge)
		return EINVAL;
	struct sd_recv *to = &rq->ring[(rq->head + rq->count++) % rq->size];
	to->wr_id = wr->wr_id;
	to->pieces = wr->num_sge;
	if (wr->num_sge > 0)
		memcpy(to->sges, wr->sg_list, (size_t)wr->num_sge * sizeof *wr->sg_list);
	return 0;
}

/* sd_rq_take copies the oldest receive of the queue pair, or of its shared queue, to out, whose sges have room for
 * SD_MAX_SGE. */
bool sd_rq_take(struct sd_qp *qp, struct sd_recv *out)
{
	struct sd_srq *srq = (struct sd_srq *)qp->ex.qp_base.srq;
	struct sd_rq *rq = srq ? &srq->rq : &qp->rq;
	if (rq->count == 0)
		return false;
	const struct sd_recv *from = &rq->ring[rq->head];
	out->wr_id = from->wr_id;
	out->pieces = from->pieces;
	memcpy(out->sges, from->sges, (size_t)from->pieces * sizeof *from->sges);
	rq->head = (rq->head + 1) % rq->size;
	rq->count--;
	if (srq && srq->limit && rq->count < srq->limit) {
		srq->limit = 0;
		sd_async(qp, IBV_EVENT_SRQ_LIMIT_REACHED);
	}
	return true;
}

static void push(struct sd_qp *qp, struct ibv_wc *wc, bool solicited)
{
	wc->qp_num = qp->ex.qp_base.qp_num;
	wc->src_qp = qp->attr.dest_qp_num;
	sd_cq_push((struct sd_cq *)qp->ex.qp_base.recv_cq, wc, solicited);
}

void sd_rq_flush(struct sd_qp *qp)
{
	struct ibv_wc wc = {.status = IBV_WC_WR_FLUSH_ERR, .opcode = IBV_WC_RECV};
	if (qp->rp.current == SD_SEND_FIRST) {
		wc.wr_id = qp->rp.recv.wr_id;
		push(qp, &wc, false);
		qp->rp.current = -1;
	}
	if (qp->ex.qp_base.srq)
		return;
	while (qp->rq.count > 0) {
		wc.wr_id = qp->rq.ring[qp->rq.head].wr_id;
		qp->rq.head = (qp->rq.head + 1) % qp->rq.size;
		qp->rq.count--;
		push(qp, &wc, false);
	}
}

void sd_responder_reset(struct sd_qp *qp)
{
	memset(&qp->rp, 0, sizeof qp->rp);
	qp->rp.current = -1;
	qp->rp.recv.sges = qp->rp.recv_sges;
	qp->rp.expected = (1ull << 32) | qp->attr.rq_psn;
}

static void send_ack(struct sd_qp *qp, uint8_t syndrome, uint64_t psn)
{
	struct sd_packet packet = {.pieces = 0};
	sd_emit(qp, &(struct sd_header){.opcode = SD_ACK, .psn = psn & 0xffffff, .syndrome = syndrome, .msn = qp->rp.msn}, &packet);
}

/* refuse reports an error to the peer and breaks the queue pair. */
static void refuse(struct sd_qp *qp, unsigned nak, enum ibv_event_type event)
{
	send_ack(qp, (uint8_t)(SD_SYNDROME_NAK | nak), qp->rp.expected);
	sd_async(qp, event);
	sd_qp_error(qp);
}

static void refuse_request(struct sd_qp *qp)
{
	refuse(qp, SD_NAK_INVALID_REQUEST, IBV_EVENT_QP_REQ_ERR);
}

static void refuse_access(struct sd_qp *qp)
{
	refuse(qp, SD_NAK_ACCESS, IBV_EVENT_QP_ACCESS_ERR);
}

/* not_ready asks the peer to retry later, because no receive is posted. */
static void not_ready(struct sd_qp *qp)
{
	qp->rp.nak = (uint8_t)(SD_SYNDROME_RNR | qp->attr.min_rnr_timer);
	qp->rp.nak_sent = true;
}

static uint8_t *remote(struct sd_qp *qp, uint32_t rkey, uint64_t address, uint64_t length, unsigned access)
{
	if (!(qp->attr.qp_access_flags & access))
		return NULL;
	return sd_mr_check(qp->dev, qp->ex.qp_base.pd, rkey, address, length, access);
}

/* finish notes the end of a message, with a completion if the message consumes a receive. */
static void finish(struct sd_qp *qp, const struct sd_header *h, bool consumes)
{
	struct sd_responder *r = &qp->rp;
	bool send = r->current == SD_SEND_FIRST;
	r->msn = (r->msn + 1) & 0xffffff;
	r->current = -1;
	if (!consumes)
		return;
	struct ibv_wc wc = {.wr_id = r->recv.wr_id, .opcode = send ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM, .byte_len = r->offset};
	if (sd_opcode_flags(h->opcode) & SD_IMM) {
		wc.wc_flags = IBV_WC_WITH_IMM;
		wc.imm_data = h->imm;
	}
	push(qp, &wc, h->solicited);
}

/* receive_send executes a packet of a SEND. Returns false if the packet is not executed. */
static bool receive_send(struct sd_qp *qp, const struct sd_header *h, unsigned flags, const uint8_t *payload, uint32_t length)
{
	struct sd_responder *r = &qp->rp;
	if (flags & SD_IETH) { /* only memory windows can be invalidated, and the device has none */
		refuse_access(qp);
		return false;
	}
	if (flags & SD_BEGIN) {
		if (!sd_rq_take(qp, &r->recv)) {
			not_ready(qp);
			return false;
		}
		r->current = SD_SEND_FIRST;
		r->offset = 0;
	}
	enum ibv_wc_status status = sd_scatter(qp->dev, qp->ex.qp_base.pd, &r->recv, r->offset, payload, length);
	if (status != IBV_WC_SUCCESS) {
		struct ibv_wc wc = {.wr_id = r->recv.wr_id, .opcode = IBV_WC_RECV, .status = status};
		r->current = -1;
		push(qp, &wc, h->solicited);
		refuse(qp, status == IBV_WC_LOC_LEN_ERR ? SD_NAK_INVALID_REQUEST : SD_NAK_OPERATION, IBV_EVENT_QP_FATAL);
		return false;
	}
	r->offset += length;
	if (flags & SD_END)
		finish(qp, h, true);
	return true;
}

static bool receive_write(struct sd_qp *qp, const struct sd_header *h, unsigned flags, const uint8_t *payload, uint32_t length)
{
	struct sd_responder *r = &qp->rp;
	if (flags & SD_BEGIN) {
		/* A message without data accesses no memory: its key is not checked (C9-88). */
		if (h->length > 0 && !remote(qp, h->rkey, h->address, h->length, IBV_ACCESS_REMOTE_WRITE)) {
			refuse_access(qp);
			return false;
		}
		r->address = h->address;
		r->rkey = h->rkey;
		r->length = h->length;
		r->offset = 0;
	}
	if (length > r->length - r->offset || ((flags & SD_END) && length != r->length - r->offset)) {
		refuse_request(qp);
		return false;
	}
	if ((flags & SD_IMM) && !sd_rq_take(qp, &r->recv)) {
		not_ready(qp);
		return false;
	}
	r->current = SD_WRITE_FIRST;
	if (length > 0) {
		uint8_t *to = remote(qp, r->rkey, r->address + r->offset, length, IBV_ACCESS_REMOTE_WRITE);
		if (!to) {
			refuse_access(qp);
			return false;
		}
		memcpy(to, payload, length);
	}
	r->offset += length;
	if (flags & SD_END)
		finish(qp, h, flags & SD_IMM);
	return true;
}

/* add_job queues a response. Returns false if the queue is full: the peer will retry. */
static bool add_job(struct sd_qp *qp, const struct sd_job *job)
{
	struct sd_responder *r = &qp->rp;
	if (r->job_count == SD_MAX_JOBS)
		return false;
	r->jobs[(r->job_head + r->job_count++) % SD_MAX_JOBS] = *job;
	return true;
}

static bool receive_read(struct sd_qp *qp, const struct sd_header *h, uint64_t psn, uint32_t msn)
{
	if (h->length > 0 && !remote(qp, h->rkey, h->address, h->length, IBV_ACCESS_REMOTE_READ)) {
		refuse_access(qp);
		return false;
	}
	struct sd_job job = {.psn = psn, .packets = sd_packets(h->length, qp->mtu), .length = h->length, .msn = msn, .address = h->address, .rkey = h->rkey};
	return add_job(qp, &job);
}

static uint64_t execute_atomic(const struct sd_header *h, uint64_t *at)
{
	if (h->opcode == SD_FETCH_ADD)
		return __atomic_fetch_add(at, h->swap_add, __ATOMIC_SEQ_CST);
	uint64_t original = h->compare;
	__atomic_compare_exchange_n(at, &original, h->swap_add, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
	return original;
}

static bool receive_atomic(struct sd_qp *qp, const struct sd_header *h)
{
	struct sd_responder *r = &qp->rp;
	uint8_t *at = remote(qp, h->rkey, h->address, 8, IBV_ACCESS_REMOTE_ATOMIC);
	if (!at) {
		refuse_access(qp);
		return false;
	}
	if ((uintptr_t)at % 8 != 0) {
		refuse_request(qp);
		return false;
	}
	if (r->job_count == SD_MAX_JOBS)
		return false;
	struct sd_job job = {.psn = r->expected, .packets = 1, .msn = r->msn + 1, .atomic = true, .original = execute_atomic(h, (uint64_t *)at)};
	r->atomics[r->atomic_count++ % (SD_MAX_READS * 2)] = job;
	return add_job(qp, &job);
}

/* duplicate answers a request that is already executed: SENDs and WRITEs by an acknowledgement, READs by reading again,
 * atomics by their first result. */
static void duplicate(struct sd_qp *qp, const struct sd_header *h, uint64_t psn)
{
	struct sd_responder *r = &qp->rp;
	qp->dev->counters.duplicates++;
	if (h->opcode == SD_READ_REQUEST) {
		if (psn + sd_packets(h->length, qp->mtu) <= r->expected)
			receive_read(qp, h, psn, r->msn);
		return;
	}
	if (h->opcode == SD_FETCH_ADD || h->opcode == SD_COMPARE_SWAP) {
		for (uint32_t i = 0; i < SD_MAX_READS * 2 && i < r->atomic_count; i++)
			if (r->atomics[i].psn == psn)
				add_job(qp, &r->atomics[i]);
		return;
	}
	r->ack |= h->ack_request;
}

/* in_sequence reports whether an opcode and a payload's length fit the message in progress. */
static bool in_sequence(const struct sd_qp *qp, const struct sd_header *h, unsigned flags, uint32_t length)
{
	int kind = h->opcode >= SD_WRITE_FIRST && h->opcode <= SD_WRITE_ONLY_IMM ? SD_WRITE_FIRST : SD_SEND_FIRST;
	if (qp->rp.current != (flags & SD_BEGIN ? -1 : kind))
		return false;
	if (!(flags & SD_END))
		return length == qp->mtu;
	return length <= qp->mtu && (length > 0 || (flags & SD_BEGIN));
}

void sd_responder_receive(struct sd_qp *qp, const struct sd_header *h, const uint8_t *payload, uint32_t length)
{
	struct sd_responder *r = &qp->rp;
	uint64_t psn = sd_unwrap(r->expected, h->psn);
	if (qp->attr.qp_state != IBV_QPS_RTR && qp->attr.qp_state != IBV_QPS_RTS)
		return;
	if (psn > r->expected) {
		qp->dev->counters.out_of_order++;
		if (!r->nak_sent)
			r->nak = SD_SYNDROME_NAK | SD_NAK_SEQUENCE;
		r->nak_sent = true;
		return;
	}
	if (psn < r->expected) {
		duplicate(qp, h, psn);
		return;
	}
	unsigned flags = sd_opcode_flags(h->opcode);
	if (!in_sequence(qp, h, flags, length)) {
		refuse_request(qp);
		return;
	}
	bool executed;
	uint32_t packets = 1;
	r->nak = 0;
	r->nak_sent = false;
	if (h->opcode == SD_READ_REQUEST) {
		packets = sd_packets(h->length, qp->mtu);
		executed = receive_read(qp, h, psn, r->msn + 1);
		r->msn = (r->msn + executed) & 0xffffff;
	} else if (h->opcode == SD_FETCH_ADD || h->opcode == SD_COMPARE_SWAP) {
		executed = receive_atomic(qp, h);
		r->msn = (r->msn + executed) & 0xffffff;
	} else {
		bool write = h->opcode >= SD_WRITE_FIRST && h->opcode <= SD_WRITE_ONLY_IMM;
		executed = write ? receive_write(qp, h, flags, payload, length) : receive_send(qp, h, flags, payload, length);
		r->ack |= executed && h->ack_request;
	}
	if (executed)
		r->expected += packets;
}

/* send_response sends the next packet of a READ response, or the result of an atomic. Returns false if the memory is no
 * longer readable. */
static bool send_response(struct sd_qp *qp, struct sd_job *job)
{
	struct sd_packet packet = {.pieces = 0};
	struct sd_header h = {.psn = (job->psn + job->sent) & 0xffffff, .syndrome = SD_SYNDROME_NO_CREDIT, .msn = job->msn, .original = job->original};
	if (job->atomic) {
		h.opcode = SD_ATOMIC_ACK;
	} else {
		bool first = job->sent == 0, last = job->sent + 1 == job->packets;
		uint64_t offset = (uint64_t)job->sent * qp->mtu;
		uint32_t n = last ? (uint32_t)(job->length - offset) : qp->mtu;
		h.opcode = first && last ? SD_READ_ONLY : first ? SD_READ_FIRST : last ? SD_READ_LAST : SD_READ_MIDDLE;
		if (n > 0) {
			uint8_t *from = remote(qp, job->rkey, job->address + offset, n, IBV_ACCESS_REMOTE_READ);
			if (!from)
				return false;
			packet.payload[packet.pieces++] = (struct iovec){from, n};
			packet.payload_size = n;
		}
	}
	sd_emit(qp, &h, &packet);
	job->sent++;
	return true;
}

/* sd_responder_run sends responses in the order of the requests. An acknowledgement follows all queued responses, since
 * it would otherwise report them lost. */
void sd_responder_run(struct sd_qp *qp)
{
	struct sd_responder *r = &qp->rp;
	if (qp->attr.qp_state != IBV_QPS_RTR && qp->attr.qp_state != IBV_QPS_RTS)
		return;
	for (uint32_t budget = RUN_BYTES / qp->mtu; r->job_count > 0; budget--) {
		if (budget == 0) {
			sd_dirty(qp);
			return;
		}
		struct sd_job *job = &r->jobs[r->job_head];
		if (!send_response(qp, job)) {
			refuse_access(qp);
			return;
		}
		if (job->sent == job->packets) {
			r->job_head = (r->job_head + 1) % SD_MAX_JOBS;
			r->job_count--;
		}
	}
	if (r->nak)
		send_ack(qp, r->nak, r->expected);
	else if (r->ack)
		send_ack(qp, SD_SYNDROME_NO_CREDIT, r->expected - 1);
	r->nak = 0;
	r->ack = false;
}
