#include "core.h"

#include <stdlib.h>
#include <string.h>

/* Bounds of the retransmission timeout, ns. The lower one exceeds a time slice of a busy processor. */
#define RTO_MIN 10000000ull
#define RTO_MAX 100000000ull
/* Packets in flight: at first, at least, and at most in packets and bytes. */
enum { WINDOW_START = 32, WINDOW_MIN = 2, WINDOW_PACKETS = 1024, WINDOW_BYTES = 1 << 20 };
/* An acknowledgement is requested at least every this part of a window. */
enum { ASKS_PER_WINDOW = 4 };
/* New READs are sent when this part of those that may be outstanding is complete. */
enum { READ_GROUPS = 4 };
/* Time between two reductions by CNPs, ns, and the full scale of sd_requester.alpha. */
#define CUT_INTERVAL 50000
enum { ALPHA_ONE = 1024 };

/* RNR timers in units of 10 us (specification, table 45). */
static const uint32_t rnr_timers[32] = {65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144,
	8192, 12288, 16384, 24576, 32768, 49152};

static struct sd_send *entry(struct sd_requester *r, uint32_t i)
{
	return &r->ring[(r->head + i) % r->size];
}

static bool is_read(const struct sd_send *s)
{
	return s->opcode == IBV_WR_RDMA_READ || s->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || s->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

static bool is_atomic(const struct sd_send *s)
{
	return s->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || s->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

int sd_requester_init(struct sd_qp *qp, const struct ibv_qp_cap *cap)
{
	struct sd_requester *r = &qp->rq_out;
	size_t sges = cap->max_send_sge ? cap->max_send_sge : 1;
	r->size = cap->max_send_wr ? cap->max_send_wr : 1;
	r->ring = calloc(r->size, sizeof *r->ring);
	r->sges = calloc(r->size * sges, sizeof *r->sges);
	r->inlined = malloc((size_t)r->size * cap->max_inline_data + 1);
	if (!r->ring || !r->sges || !r->inlined)
		return ENOMEM;
	for (uint32_t i = 0; i < r->size; i++) {
		r->ring[i].sges = r->sges + i * sges;
		r->ring[i].inlined = r->inlined + (size_t)i * cap->max_inline_data;
	}
	return 0;
}

void sd_requester_free(struct sd_qp *qp)
{
	free(qp->rq_out.ring);
	free(qp->rq_out.sges);
	free(qp->rq_out.inlined);
}

void sd_requester_reset(struct sd_qp *qp)
{
	struct sd_requester *r = &qp->rq_out;
	*r = (struct sd_requester){.ring = r->ring, .sges = r->sges, .inlined = r->inlined, .size = r->size};
}

void sd_requester_start(struct sd_qp *qp, uint32_t psn)
{
	struct sd_requester *r = &qp->rq_out;
	/* The first number is above 2^32, so that numbers before it exist. */
	r->una = r->next = r->end = r->highest = r->asked = (1ull << 32) | (psn & 0xffffff);
	uint32_t packets = WINDOW_BYTES / qp->mtu;
	r->window_max = packets < WINDOW_PACKETS ? packets : WINDOW_PACKETS;
	r->threshold = r->window_max;
	r->window = WINDOW_START;
	r->max_reads = qp->attr.max_rd_atomic < SD_MAX_READS ? qp->attr.max_rd_atomic : SD_MAX_READS;
	r->rnr_left = qp->attr.rnr_retry;
}

struct sd_send *sd_requester_stage(struct sd_qp *qp)
{
	struct sd_requester *r = &qp->rq_out;
	return r->count < r->size ? entry(r, r->count) : NULL;
}

static int check(struct sd_qp *qp, const struct sd_send *s)
{
	bool ud = qp->ex.qp_base.qp_type == IBV_QPT_UD;
	switch (s->opcode) {
	case IBV_WR_SEND:
	case IBV_WR_SEND_WITH_IMM:
		if (ud && (!s->ah || s->length > qp->mtu))
			return EINVAL;
		return 0;
	case IBV_WR_RDMA_READ:
	case IBV_WR_ATOMIC_CMP_AND_SWP:
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		if (ud || qp->rq_out.max_reads == 0 || (s->flags & IBV_SEND_INLINE) || (is_atomic(s) && s->length != 8))
			return EINVAL;
		return 0;
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
	case IBV_WR_SEND_WITH_INV:
		return ud ? EINVAL : 0;
	default:
		return EINVAL;
	}
}

static enum ibv_wc_opcode completion_opcode(enum ibv_wr_opcode opcode)
{
	switch (opcode) {
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		return IBV_WC_RDMA_WRITE;
	case IBV_WR_RDMA_READ:
		return IBV_WC_RDMA_READ;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		return IBV_WC_COMP_SWAP;
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		return IBV_WC_FETCH_ADD;
	default:
		return IBV_WC_SEND;
	}
}

/* complete removes the oldest operation and reports it. */
static void complete(struct sd_qp *qp, enum ibv_wc_status status)
{
	struct sd_requester *r = &qp->rq_out;
	const struct sd_send *s = entry(r, 0);
	if (status != IBV_WC_SUCCESS || qp->signal_all || (s->flags & IBV_SEND_SIGNALED)) {
		struct ibv_wc wc = {.wr_id = s->wr_id, .status = status, .opcode = completion_opcode(s->opcode), .qp_num = qp->ex.qp_base.qp_num};
		wc.byte_len = s->length;
		sd_cq_push((struct sd_cq *)qp->ex.qp_base.send_cq, &wc, false);
	}
	r->head = (r->head + 1) % r->size;
	r->count--;
	if (r->cursor > 0)
		r->cursor--;
}

int sd_requester_post(struct sd_qp *qp, struct sd_send *s)
{
	struct sd_requester *r = &qp->rq_out;
	uint64_t length = 0;
	if (!(s->flags & IBV_SEND_INLINE))
		for (int i = 0; i < s->pieces; i++)
			length += s->sges[i].length;
	else
		length = s->length;
	if (length > 1u << 31)
		return EINVAL;
	s->length = (uint32_t)length;
	int err = check(qp, s);
	if (err)
		return err;
	s->packets = is_atomic(s) ? 1 : sd_packets(length, qp->mtu);
	s->psn = r->end;
	r->end += s->packets;
	r->count++;
	if (qp->attr.qp_state == IBV_QPS_ERR) {
		sd_requester_flush(qp);
		return 0;
	}
	sd_dirty(qp);
	return 0;
}

void sd_requester_flush(struct sd_qp *qp)
{
	struct sd_requester *r = &qp->rq_out;
	while (r->count > 0)
		complete(qp, IBV_WC_WR_FLUSH_ERR);
	r->una = r->next = r->end;
	r->timer = r->rnr_until = 0;
}

/* fail completes the oldest operation with an error, and all others as flushed. */
static void fail(struct sd_qp *qp, enum ibv_wc_status status)
{
	if (qp->rq_out.count > 0)
		complete(qp, status);
	sd_qp_error(qp);
}

static uint64_t timeout_of(const struct sd_qp *qp)
{
	const struct sd_requester *r = &qp->rq_out;
	uint64_t rto = r->srtt + 4 * r->rttvar;
	rto = rto < RTO_MIN ? RTO_MIN : rto;
	rto <<= r->backoff;
	return rto > RTO_MAX ? RTO_MAX : rto;
}

static void wake_at(struct sd_dev *dev, uint64_t t)
{
	if (t < dev->next_timer)
		dev->next_timer = t;
}

static void start_timer(struct sd_qp *qp)
{
	struct sd_requester *r = &qp->rq_out;
	r->timer = qp->dev->now + timeout_of(qp);
	wake_at(qp->dev, r->timer);
}

/* rewind_to continues to send from a sequence number. */
static void rewind_to(struct sd_qp *qp, uint64_t psn)
{
	struct sd_requester *r = &qp->rq_out;
	r->next = psn;
	for (r->cursor = 0; r->cursor < r->count; r->cursor++) {
		const struct sd_send *s = entry(r, r->cursor);
		if (s->psn + s->packets > psn)
			break;
	}
	while (r->read_count > 0 && r->reads[(r->read_head + r->read_count - 1) % SD_MAX_READS] >= psn)
		r->read_count--;
	r->asked = psn;
	r->rtt_active = false;
	r->rewound_at = qp->dev->now;
	r->rewound_to = psn;
	sd_dirty(qp);
}

static void shrink(struct sd_requester *r, uint32_t to)
{
	r->window = to < WINDOW_MIN ? WINDOW_MIN : to;
	r->threshold = r->window;
	r->window_credit = 0;
}

/* lost handles a reported gap. Reports of a gap that is already being repaired have no effect. */
static void lost(struct sd_qp *qp, uint64_t psn)
{
	struct sd_requester *r = &qp->rq_out;
	uint64_t patience = r->srtt ? r->srtt : RTO_MIN;
	if (psn == r->rewound_to && r->rewound_at && qp->dev->now - r->rewound_at < patience)
		return;
	shrink(r, r->window / 2);
	rewind_to(qp, psn);
}

void sd_requester_moved(struct sd_qp *qp)
{
	struct sd_requester *r = &qp->rq_out;
	if (r->next > r->una)
		rewind_to(qp, r->una);
	r->backoff = 0;
	r->expiries = 0;
	if (r->timer)
		start_timer(qp);
}

static void grow(struct sd_requester *r, uint64_t acked)
{
	if (r->window < r->threshold) {
		r->window += (uint32_t)acked;
	} else {
		r->window_credit += (uint32_t)acked;
		if (r->window_credit >= r->window) {
			r->window_credit = 0;
			r->window += 1 + r->window / 16;
		}
	}
	if (r->window > r->window_max)
		r->window = r->window_max;
}

static void measure(struct sd_requester *r, uint64_t now)
{
	uint64_t rtt = now - r->rtt_start;
	r->rtt_active = false;
	if (r->srtt == 0) {
		r->srtt = rtt;
		r->rttvar = rtt / 2;
		return;
	}
	uint64_t deviation = rtt > r->srtt ? rtt - r->srtt : r->srtt - rtt;
	r->rttvar = (3 * r->rttvar + deviation) / 4;
	r->srtt = (7 * r->srtt + rtt) / 8;
}

/* advance notes that everything before psn is complete. */
static void advance(struct sd_qp *qp, uint64_t psn)
{
	struct sd_requester *r = &qp->rq_out;
	if (psn <= r->una)
		return;
	grow(r, psn - r->una);
	r->una = psn;
	while (r->read_count > 0 && r->reads[r->read_head] < psn) {
		r->read_head = (r->read_head + 1) % SD_MAX_READS;
		r->read_count--;
	}
	if (r->rtt_active && r->rtt_psn < psn)
		measure(r, qp->dev->now);
	r->expiries = r->backoff = 0;
	r->rnr_left = qp->attr.rnr_retry;
	r->progress = qp->dev->now;
	while (r->count > 0 && entry(r, 0)->psn + entry(r, 0)->packets <= psn)
		complete(qp, IBV_WC_SUCCESS);
	if (r->next < psn)
		rewind_to(qp, psn);
	if (r->asked < psn)
		r->asked = psn;
	if (r->una == r->next)
		r->timer = 0;
	else
		start_timer(qp);
}

/* advance_to advances up to psn, but not beyond a READ or an atomic, which only its response completes. Returns false
 * if such a response is missing. */
static bool advance_to(struct sd_qp *qp, uint64_t psn)
{
	struct sd_requester *r = &qp->rq_out;
	for (uint32_t i = 0; i < r->count; i++) {
		const struct sd_send *s = entry(r, i);
		uint64_t from = s->psn > r->una ? s->psn : r->una;
		if (from >= psn)
			break;
		if (is_read(s)) {
			advance(qp, from);
			lost(qp, from);
			return false;
		}
	}
	advance(qp, psn);
	return true;
}

static void receive_nak(struct sd_qp *qp, const struct sd_header *h, uint64_t psn)
{
	qp->dev->counters.naks++;
	switch (h->syndrome & ~SD_SYNDROME_MASK) {
	case SD_NAK_SEQUENCE:
		lost(qp, psn);
		break;
	case SD_NAK_INVALID_REQUEST:
		fail(qp, IBV_WC_REM_INV_REQ_ERR);
		break;
	case SD_NAK_ACCESS:
		fail(qp, IBV_WC_REM_ACCESS_ERR);
		break;
	default:
		fail(qp, IBV_WC_REM_OP_ERR);
	}
}

static void receive_rnr(struct sd_qp *qp, const struct sd_header *h, uint64_t psn)
{
	struct sd_requester *r = &qp->rq_out;
	enum { UNLIMITED = 7 };
	qp->dev->counters.rnr_naks++;
	if (r->rnr_until && r->next == psn)
		return; /* a duplicate */
	if (qp->attr.rnr_retry != UNLIMITED && r->rnr_left-- == 0) {
		fail(qp, IBV_WC_RNR_RETRY_EXC_ERR);
		return;
	}
	rewind_to(qp, psn);
	r->timer = 0;
	r->progress = qp->dev->now;
	r->expiries = 0;
	r->rnr_until = qp->dev->now + rnr_timers[h->syndrome & 31] * 10000ull;
	wake_at(qp->dev, r->rnr_until);
}

static void receive_ack(struct sd_qp *qp, const struct sd_header *h, uint64_t psn)
{
	switch (h->syndrome & SD_SYNDROME_MASK) {
	case SD_SYNDROME_ACK:
		advance_to(qp, psn + 1);
		break;
	case SD_SYNDROME_NAK:
		if (advance_to(qp, psn) || (h->syndrome & ~SD_SYNDROME_MASK) != SD_NAK_SEQUENCE)
			receive_nak(qp, h, psn);
		break;
	case SD_SYNDROME_RNR:
		if (advance_to(qp, psn))
			receive_rnr(qp, h, psn);
		break;
	default:
		qp->dev->counters.malformed++;
	}
}

static void receive_data(struct sd_qp *qp, const struct sd_header *h, const uint8_t *payload, uint32_t length, uint64_t psn)
{
	struct sd_requester *r = &qp->rq_out;
	if (psn < r->una || !advance_to(qp, psn) || r->count == 0)
		return;
	const struct sd_send *s = entry(r, 0);
	bool atomic = h->opcode == SD_ATOMIC_ACK;
	if (!is_read(s) || atomic != is_atomic(s) || psn < s->psn) {
		qp->dev->counters.malformed++;
		return;
	}
	uint8_t value[8];
	uint64_t offset = (psn - s->psn) * qp->mtu;
	if (atomic) {
		memcpy(value, &h->original, 8);
		payload = value;
		length = 8;
	} else {
		uint64_t left = s->length - offset;
		if (length != (left < qp->mtu ? left : qp->mtu)) {
			fail(qp, IBV_WC_BAD_RESP_ERR);
			return;
		}
	}
	const struct sd_recv to = {.pieces = s->pieces, .sges = s->sges};
	enum ibv_wc_status status = sd_scatter(qp->dev, qp->ex.qp_base.pd, &to, offset, payload, length);
	if (status != IBV_WC_SUCCESS)
		fail(qp, status);
	else
		advance(qp, psn + 1);
}

void sd_requester_receive(struct sd_qp *qp, const struct sd_header *h, const uint8_t *payload, uint32_t length)
{
	struct sd_requester *r = &qp->rq_out;
	uint64_t psn = sd_unwrap(r->una, h->psn);
	if (qp->attr.qp_state != IBV_QPS_RTS || psn >= r->highest || psn < r->una)
		return;
	if (h->opcode == SD_ACK)
		receive_ack(qp, h, psn);
	else
		receive_data(qp, h, payload, length, psn);
	sd_dirty(qp);
}

/* sd_requester_congested reduces the window as DCQCN reduces its rate: by alpha / 2, where alpha estimates the part of
 * marked intervals. */
void sd_requester_congested(struct sd_qp *qp)
{
	struct sd_requester *r = &qp->rq_out;
	uint64_t quiet = qp->dev->now - r->cut_at;
	if (r->cut_at && quiet < CUT_INTERVAL)
		return;
	for (uint64_t t = 0; r->cut_at && r->alpha > 0 && t < quiet / CUT_INTERVAL && t < 64; t++)
		r->alpha -= r->alpha / 16;
	r->alpha = r->cut_at ? r->alpha + (ALPHA_ONE - r->alpha) / 16 : ALPHA_ONE;
	r->cut_at = qp->dev->now;
	shrink(r, r->window - r->window * r->alpha / (2 * ALPHA_ONE));
}

static uint8_t request_opcode(const struct sd_send *s, bool first, bool last)
{
	static const uint8_t opcodes[][4] = {
		/* by position: middle, first, last, only */
		[IBV_WR_RDMA_WRITE] = {SD_WRITE_MIDDLE, SD_WRITE_FIRST, SD_WRITE_LAST, SD_WRITE_ONLY},
		[IBV_WR_RDMA_WRITE_WITH_IMM] = {SD_WRITE_MIDDLE, SD_WRITE_FIRST, SD_WRITE_LAST_IMM, SD_WRITE_ONLY_IMM},
		[IBV_WR_SEND] = {SD_SEND_MIDDLE, SD_SEND_FIRST, SD_SEND_LAST, SD_SEND_ONLY},
		[IBV_WR_SEND_WITH_IMM] = {SD_SEND_MIDDLE, SD_SEND_FIRST, SD_SEND_LAST_IMM, SD_SEND_ONLY_IMM},
		[IBV_WR_RDMA_READ] = {SD_READ_REQUEST, SD_READ_REQUEST, SD_READ_REQUEST, SD_READ_REQUEST},
		[IBV_WR_ATOMIC_CMP_AND_SWP] = {SD_COMPARE_SWAP, SD_COMPARE_SWAP, SD_COMPARE_SWAP, SD_COMPARE_SWAP},
		[IBV_WR_ATOMIC_FETCH_AND_ADD] = {SD_FETCH_ADD, SD_FETCH_ADD, SD_FETCH_ADD, SD_FETCH_ADD},
		[IBV_WR_SEND_WITH_INV] = {SD_SEND_MIDDLE, SD_SEND_FIRST, SD_SEND_LAST_INV, SD_SEND_ONLY_INV},
	};
	return opcodes[s->opcode][first + 2 * last];
}

/* emit_read sends a READ or atomic request for the packets from psn on, up to the end of a chunk, and returns the
 * number after that. Chunks have fixed bounds in the message, so that a retransmitted request asks for nothing beyond
 * the original one. */
static uint64_t emit_read(struct sd_qp *qp, const struct sd_send *s, uint64_t psn)
{
	uint64_t index = psn - s->psn, offset = index * qp->mtu;
	uint64_t stop = (index / SD_READ_CHUNK + 1) * SD_READ_CHUNK;
	stop = stop < s->packets ? stop : s->packets;
	uint64_t length = stop * qp->mtu < s->length ? stop * qp->mtu - offset : s->length - offset;
	struct sd_header h = {.opcode = request_opcode(s, true, true), .ack_request = true, .psn = psn & 0xffffff, .rkey = s->rkey};
	struct sd_packet packet = {.pieces = 0};
	h.address = s->address + (is_atomic(s) ? 0 : offset);
	h.length = (uint32_t)length;
	h.swap_add = s->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ? s->swap : s->compare_add;
	h.compare = s->compare_add;
	sd_emit(qp, &h, &packet);
	return s->psn + stop;
}

static void send_read(struct sd_qp *qp, const struct sd_send *s)
{
	struct sd_requester *r = &qp->rq_out;
	r->next = r->asked = emit_read(qp, s, r->next);
	r->reads[(r->read_head + r->read_count++) % SD_MAX_READS] = r->next - 1;
	if (r->next == s->psn + s->packets)
		r->cursor++;
}

/* emit_data sends a packet of a SEND or WRITE. Returns false if a key does not permit it. */
static bool emit_data(struct sd_qp *qp, const struct sd_send *s, uint64_t psn, bool ask)
{
	uint64_t index = psn - s->psn, offset = index * qp->mtu;
	bool first = index == 0, last = index + 1 == s->packets;
	uint32_t length = last ? (uint32_t)(s->length - offset) : qp->mtu;
	struct sd_header h = {.opcode = request_opcode(s, first, last), .psn = psn & 0xffffff, .address = s->address, .rkey = s->rkey, .length = s->length};
	struct sd_packet packet = {.pieces = 0};
	h.imm = h.invalidate = s->imm;
	h.solicited = last && (s->flags & IBV_SEND_SOLICITED);
	h.ack_request = last || ask;
	if (sd_gather(qp, s, offset, length, &packet) != 0)
		return false;
	sd_emit(qp, &h, &packet);
	return true;
}

static bool send_data(struct sd_qp *qp, const struct sd_send *s)
{
	struct sd_requester *r = &qp->rq_out;
	uint64_t after = r->next + 1;
	bool last = after == s->psn + s->packets;
	bool ask = last || after - r->una >= r->window || after - r->asked >= r->window / ASKS_PER_WINDOW;
	if (!emit_data(qp, s, r->next, ask))
		return false;
	if (ask)
		r->asked = after;
	r->next = after;
	if (last)
		r->cursor++;
	return true;
}

void sd_requester_run(struct sd_qp *qp)
{
	struct sd_requester *r = &qp->rq_out;
	if (qp->attr.qp_state != IBV_QPS_RTS || r->rnr_until)
		return;
	/* READs go in groups: the peer sends the answers of a group by fewer system calls and larger batches. */
	bool refill = r->next - r->una <= r->window - r->window / READ_GROUPS && r->read_count <= r->max_reads - r->max_reads / READ_GROUPS;
	while (r->cursor < r->count && r->next - r->una < r->window) {
		const struct sd_send *s = entry(r, r->cursor);
		if ((s->flags & IBV_SEND_FENCE) && r->next == s->psn && r->read_count > 0)
			break;
		uint64_t from = r->next;
		if (r->una == r->next) /* idle until now */
			r->progress = qp->dev->now;
		if (!r->rtt_active && r->next >= r->highest) {
			r->rtt_active = true;
			r->rtt_psn = r->next;
			r->rtt_start = qp->dev->now;
		}
		if (is_read(s)) {
			if (!refill || r->read_count >= r->max_reads)
				break;
			send_read(qp, s);
		} else if (!send_data(qp, s)) {
			while (r->count > 0 && entry(r, 0) != s)
				complete(qp, IBV_WC_WR_FLUSH_ERR);
			fail(qp, IBV_WC_LOC_PROT_ERR);
			return;
		}
		if (from < r->highest)
			qp->dev->counters.retransmitted += (r->next < r->highest ? r->next : r->highest) - from;
		if (r->highest < r->next)
			r->highest = r->next;
		if (!r->timer)
			start_timer(qp);
	}
}

/* probe sends one packet again, or the request of a chunk of a READ: the peer acknowledges what it has, or reports a
 * gap before the packet. */
static void probe(struct sd_qp *qp, uint64_t psn)
{
	struct sd_requester *r = &qp->rq_out;
	uint32_t i = 0;
	while (entry(r, i)->psn + entry(r, i)->packets <= psn)
		i++;
	const struct sd_send *s = entry(r, i);
	r->rtt_active = false;
	qp->dev->counters.retransmitted++;
	if (is_read(s)) {
		uint64_t start = psn - (psn - s->psn) % SD_READ_CHUNK;
		emit_read(qp, s, start > r->una ? start : r->una);
	} else {
		emit_data(qp, s, psn, true); /* a later timer reports memory that is no longer registered */
	}
}

void sd_requester_timer(struct sd_qp *qp)
{
	struct sd_requester *r = &qp->rq_out;
	struct sd_dev *dev = qp->dev;
	if (r->rnr_until) {
		if (dev->now < r->rnr_until) {
			wake_at(dev, r->rnr_until);
			return;
		}
		r->rnr_until = 0;
		sd_dirty(qp);
	}
	if (!r->timer)
		return;
	if (dev->now < r->timer) {
		wake_at(dev, r->timer);
		return;
	}
	dev->counters.timeouts++;
	r->expiries++;
	/* The specification allows a timer to take up to four times its value. */
	uint64_t limit = 4 * (qp->attr.retry_cnt + 1ull) * (4096ull << qp->attr.timeout);
	if (qp->attr.timeout != 0 && r->expiries > qp->attr.retry_cnt && dev->now - r->progress > limit) {
		fail(qp, IBV_WC_RETRY_EXC_ERR);
		return;
	}
	/* The first two timers without progress are those of a peer that has not had a processor, more often than of a
	 * loss, which the peer reports by itself unless the last packets or the report were lost. So may be the others: few
	 * packets are sent again before the answer. That of a READ tells nothing about the next packets. */
	if (r->next > r->una && (r->expiries <= 2 || is_read(entry(r, 0)))) {
		probe(qp, r->expiries % 2 ? r->next - 1 : r->una);
	} else {
		shrink(r, r->window / 2);
		if (r->window > WINDOW_START)
			r->window = WINDOW_START;
		rewind_to(qp, r->una);
	}
	if (r->backoff < 8)
		r->backoff++;
	start_timer(qp);
}
