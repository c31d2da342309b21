/* The queue pairs of lanes over verbs: RC, one at a time for each lane, from the UDP source port of the lane's slot.
 * The lane's TCP connection exchanges their ends.
 *
 * A stripe is a WRITE into the receiver's buffer and a SEND of the stripe's DATA frame behind it. Both are on one queue
 * pair, so the whole stripe is in memory when the SEND completes at the receiver. The sender counts a stripe as
 * acknowledged when its SEND completes.
 *
 * A WRITE needs no consent of the receiver's processor, so nothing there can drop one that arrives twice or late: it
 * would overwrite a buffer that NCCL uses for something else by then. Therefore a stripe is on one queue pair at a
 * time, and changes to another one only in this order:
 *  1. The sender stops the queue pair (state ERR) and asks the receiver by FENCE, on all connections, because that of
 *     the lane may be as dead as its plane.
 *  2. The receiver stops its end, waits until the device has returned every posted RECV, and destroys the queue pair.
 *     From then on the device executes none of its packets, neither those that are still under way nor repeated ones.
 *     The RECVs returned as complete before are those of stripes that have arrived.
 *  3. The receiver answers FENCED with the number of SENDs that have arrived on the queue pair. RC executes requests in
 *     their order, each of them once: the sender counts as many stripes as acknowledged, whether it has seen their
 *     completions or not, destroys the queue pair, and assigns the others again.
 * So each stripe arrives by one SEND in all, and when the last one of a receive is there, each queue pair that had a
 * WRITE of this receive has either executed it, or is destroyed: the receive completes without any further check. A
 * FENCE that is lost with its connection is repeated. The receiver remembers the numbers of queue pairs that have ended
 * until the sender has no stripe left on them, so a repeated FENCE has the same answer.
 *
 * An end that gives up the memory of messages, after an error or by a close, destroys its queue pairs before the call
 * of NCCL returns.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"
#include "verbs.h"

#define DEPTH 32               /* stripes on a queue pair */
#define DEPTH_BYTES (1u << 20) /* likewise, unless one stripe is larger: more would delay a change of weights */
#define RECEIVES 128           /* posted RECVs: the device would delay SENDs that find none */
#define BATCH 16               /* completions of a call */
#define TURNS 16               /* calls before others have their turn */
#define ACK_TIMEOUT 16         /* 4.096 us << 16 is 268 ms */
#define RETRIES 7
#define RNR_TIMER 8 /* 0.16 ms */
#define HOPS 64
#define FENCE_DELAY (20 * MILLISECOND) /* until an unanswered FENCE is repeated, doubling up to a second */
#define MOST_DELAY (1000 * MILLISECOND)
#define PAGE 4096

enum qpair_state {
	QPAIR_CONNECTING, /* of a sender: asked, and nothing is posted */
	QPAIR_UP,
	QPAIR_FENCING, /* stopped: the sender waits for FENCED, the receiver for the RECVs */
};

struct qpair {
	struct qpair *next;
	struct comm *comm;
	struct lane *lane; /* NULL if the lane is closed or has another one */
	enum qpair_state state;
	struct rdma *rdma;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	uint32_t number, psn;
	bool armed, unpolled; /* armed: the next completion is an event */
	/* of a sender */
	struct list sent;           /* stripes of a stopped queue pair; before that they are in the lane */
	uint64_t posted, completed; /* SENDs */
	uint64_t asked, delay;
	/* of a receiver */
	struct ibv_mr *region;
	struct frame *frames;
	uint32_t receives; /* posted */
	uint64_t arrived;  /* SENDs */
};

static void destroy(struct qpair *p)
{
	struct comm *c = p->comm;
	struct qpair **at = &c->pairs.all;
	while (*at && *at != p)
		at = &(*at)->next;
	if (*at)
		*at = p->next;
	if (p->lane)
		p->lane->pair = NULL;
	if (p->qp)
		verbs.ibv_destroy_qp(p->qp);
	if (p->cq)
		verbs.ibv_destroy_cq(p->cq);
	if (p->region)
		verbs.ibv_dereg_mr(p->region);
	free(p->frames);
	free(p);
}

/* report reports the first failure of a communicator; the others are most likely of the same kind. */
static void report(struct comm *c, const struct rdma *r, const char *what, int error)
{
	if (c->pairs.failed)
		return;
	c->pairs.failed = true;
	if (r)
		WARN("%s port %d: %s: %s", r->name, r->port, what, strerror(error));
	else
		WARN("%s", what);
}

/* new_pair makes a queue pair in state INIT. */
static struct qpair *new_pair(struct comm *c, struct lane *lane, struct rdma *r, uint32_t number)
{
	struct qpair *p = calloc(1, sizeof *p);
	if (!p)
		return NULL;
	p->comm = c;
	p->rdma = r;
	p->number = number;
	p->psn = (uint32_t)(engine.now >> 10) & 0xffffff; /* another one than that of the previous queue pair */
	p->next = c->pairs.all;
	c->pairs.all = p;
	errno = 0;
	p->cq = verbs.ibv_create_cq(r->context, c->sends ? 2 * DEPTH + 2 : RECEIVES + 2, p, r->channel, 0);
	struct ibv_qp_init_attr make = {
		.send_cq = p->cq,
		.recv_cq = p->cq,
		.qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = c->sends ? 2 * DEPTH + 2 : 1,
			.max_recv_wr = c->sends ? 1 : RECEIVES,
			.max_send_sge = 1,
			.max_recv_sge = 1,
			.max_inline_data = sizeof(struct frame)},
	};
	p->qp = p->cq ? verbs.ibv_create_qp(r->pd, &make) : NULL;
	struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = r->port, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
	int error = p->qp ? verbs.ibv_modify_qp(p->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) : errno;
	if (!p->qp || error) {
		report(c, r, "no queue pair can be made", error);
		destroy(p);
		return NULL;
	}
	p->lane = lane;
	lane->pair = p;
	p->unpolled = true; /* the first look arms the completion queue */
	return p;
}

/* describe fills in an end of a queue pair; false means that the address has left the device. */
static bool describe(struct qpair *p, struct endpoint *e)
{
	*e = (struct endpoint){
		.pair = p->number, .number = p->qp->qp_num, .sequence = p->psn, .mtu = (uint8_t)p->rdma->mtu, .port = (uint8_t)(p->rdma - rdmas)};
	memcpy(e->gid, p->comm->source.bytes, sizeof e->gid);
	return verbs_gid(p->rdma, e->gid) >= 0;
}

static int to_rtr(struct qpair *p, const struct endpoint *peer, uint32_t label)
{
	int gid = verbs_gid(p->rdma, p->comm->source.bytes);
	if (gid < 0)
		return EADDRNOTAVAIL;
	struct ibv_qp_attr a = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = peer->mtu < p->rdma->mtu ? (enum ibv_mtu)peer->mtu : p->rdma->mtu,
		.dest_qp_num = peer->number,
		.rq_psn = peer->sequence,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = RNR_TIMER,
		.ah_attr = {.is_global = 1, .port_num = p->rdma->port, .grh = {.flow_label = label, .sgid_index = (uint8_t)gid, .hop_limit = HOPS}},
	};
	memcpy(a.ah_attr.grh.dgid.raw, peer->gid, sizeof peer->gid);
	return verbs.ibv_modify_qp(
		p->qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

static int to_rts(struct qpair *p)
{
	struct ibv_qp_attr a = {
		.qp_state = IBV_QPS_RTS, .timeout = ACK_TIMEOUT, .retry_cnt = RETRIES, .rnr_retry = 7 /* no limit */, .sq_psn = p->psn, .max_rd_atomic = 1};
	return verbs.ibv_modify_qp(p->qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

static void stop(struct qpair *p)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_ERR};
	verbs.ibv_modify_qp(p->qp, &a, IBV_QP_STATE);
	p->state = QPAIR_FENCING;
	p->unpolled = true;
}

static struct qpair *find(struct comm *c, uint64_t number)
{
	struct qpair *p = c->pairs.all;
	while (p && p->number != number)
		p = p->next;
	return p;
}

/* to_all sends a frame on all connections. */
static void to_all(struct comm *c, const struct frame *f)
{
	for (int i = 0; i < c->lane_count; i++) {
		if (c->lanes[i]->state == LANE_READY && !c->lanes[i]->ended)
			lane_control(c->lanes[i], f, NULL);
	}
}

/* Sender */

bool qpair_up(const struct qpair *p)
{
	return p && p->state == QPAIR_UP;
}

bool qpair_has_room(const struct lane *lane)
{
	const struct qpair *p = lane->pair;
	const struct stripe *s = lane->queue.first;
	uint64_t next = s ? s->length : settings.stripe;
	return qpair_up(p) && p->posted - p->completed < DEPTH && (!lane->sent.first || lane->sent.bytes + next <= DEPTH_BYTES);
}

/* oldest returns the number of the oldest queue pair that may have stripes. */
static uint32_t oldest(const struct comm *c)
{
	uint32_t least = c->pairs.next;
	for (const struct qpair *p = c->pairs.all; p; p = p->next)
		least = p->number < least ? p->number : least;
	return least;
}

static void ask(struct qpair *p)
{
	p->asked = engine.now;
	p->delay = !p->delay ? FENCE_DELAY : 2 * p->delay < MOST_DELAY ? 2 * p->delay : MOST_DELAY;
	to_all(p->comm, &(struct frame){.type = FRAME_FENCE, .group = p->number, .offset = oldest(p->comm)});
}

static void back_off(struct lane *lane)
{
	lane->connect_at = engine.now + (10 * MILLISECOND << (lane->connect_failures < 7 ? lane->connect_failures : 7));
	lane->connect_failures++;
}

void qpair_release(struct lane *lane)
{
	struct qpair *p = lane->pair;
	if (!p)
		return;
	lane->pair = NULL;
	p->lane = NULL;
	back_off(lane);
	if (!p->comm->sends)
		return; /* it stays until the sender asks */
	for (struct stripe *s; (s = lane->sent.first);) {
		list_remove(s);
		list_add(&p->sent, s);
	}
	stop(p);
	ask(p);
}

/* post adds a SEND of a frame, after a WRITE of a stripe's data if there is any. */
static bool post(struct lane *lane, struct frame *f, const struct stripe *s)
{
	struct qpair *p = lane->pair;
	const struct request *r = s ? s->request : NULL;
	int port = (int)(p->rdma - rdmas), far = lane->far_port;
	struct ibv_sge header = {.addr = (uintptr_t)f, .length = sizeof *f};
	struct ibv_send_wr send = {
		.wr_id = p->posted + 1, .sg_list = &header, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE};
	struct ibv_send_wr *first = &send, *bad;
	struct ibv_sge data;
	struct ibv_send_wr write;
	if (s && s->length) {
		data = (struct ibv_sge){.addr = (uintptr_t)r->data + s->offset, .length = s->length, .lkey = r->memory->local_keys[port]};
		write = (struct ibv_send_wr){.next = &send, .sg_list = &data, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE};
		write.wr.rdma.remote_addr = r->remote.address + s->offset;
		write.wr.rdma.rkey = r->remote.keys[far];
		first = &write;
	}
	f->version = WIRE_VERSION;
	p->posted++;
	return ibv_post_send(p->qp, first, &bad) == 0;
}

/* broken gives up a queue pair that the device has failed. */
static void broken(struct lane *lane, const char *reason)
{
	INFO("plane %u: queue pair %u: %s", lane->plane, lane->pair->number, reason);
	lane->owner->broken(lane);
}

void qpair_write(struct lane *lane)
{
	while (lane->queue.first && qpair_has_room(lane) && !lane->ended) {
		struct frame f;
		struct stripe *s = lane_take(lane, &f);
		s->sequence = lane->pair->posted + 1;
		if (!post(lane, &f, s))
			broken(lane, "the device takes no request");
	}
}

static void connect_lane(struct comm *c, struct lane *lane)
{
	back_off(lane);
	int port = verbs_port_of(engine.table, lane->plane, lane->slot < 0 ? FARED_NO_SUB_PORT : lane->sub_port, &c->source);
	if (port < 0) {
		report(c, NULL, "the plane of a slot has no active RDMA port with the loopback's GID: fared rdma explains", 0);
		return;
	}
	struct qpair *p = new_pair(c, lane, &rdmas[port], c->pairs.next);
	if (!p)
		return;
	c->pairs.next++;
	struct endpoint e;
	if (!describe(p, &e)) {
		destroy(p);
		return;
	}
	const char *name = lane->slot >= 0 && engine.table ? fared_plane_name(engine.table, lane->plane) : NULL;
	snprintf(e.plane, sizeof e.plane, "%s", name ? name : "");
	lane_control(lane, &(struct frame){.type = FRAME_CONNECT, .length = sizeof e, .group = oldest(c)}, &e);
}

void qpair_follow(struct comm *c)
{
	if (!c->verbs || !c->sends || c->closed_at || c->abandoned || c->peer_closed)
		return;
	for (int i = 0; i < c->lane_count; i++) {
		struct lane *l = c->lanes[i];
		if (l->state == LANE_READY && !l->pair && !l->ended && !l->retired && engine.now >= l->connect_at)
			connect_lane(c, l);
	}
	for (struct qpair *p = c->pairs.all; p; p = p->next) {
		if (p->state == QPAIR_FENCING && engine.now - p->asked > p->delay)
			ask(p);
	}
}

bool qpair_busy(const struct comm *c)
{
	if (!c->verbs || !c->sends || c->abandoned || c->peer_closed)
		return false;
	for (int i = 0; i < c->lane_count; i++) {
		if (!c->lanes[i]->pair && !c->lanes[i]->retired)
			return true;
	}
	for (const struct qpair *p = c->pairs.all; p; p = p->next) {
		if (p->state != QPAIR_UP)
			return true;
	}
	return false;
}

bool qpair_connected(struct lane *lane, const struct endpoint *peer)
{
	struct qpair *p = lane->pair;
	if (!p || p->number != peer->pair)
		return true; /* the answer for one that has been given up */
	if (p->state != QPAIR_CONNECTING || peer->port >= MAX_RDMA)
		return false;
	if (peer->failed) {
		report(p->comm, NULL, "the receiver cannot make a queue pair: its log has the reason", 0);
		destroy(p); /* the receiver has none */
		return true;
	}
	lane->far_port = peer->port;
	int error = to_rtr(p, peer, lane->slot < 0 ? 0 : verbs_label(lane->port));
	if (!error)
		error = to_rts(p);
	if (error) {
		report(p->comm, p->rdma, "a queue pair cannot be connected", error);
		qpair_release(lane);
		return true;
	}
	p->state = QPAIR_UP;
	if (!lane->suspect) {
		lane->connect_failures = 0;
		return true;
	}
	/* The plane may still be dead. The first completion shows that it is not, and until then other lanes have the
	 * stripes. */
	struct frame f = {.type = FRAME_PING};
	if (!post(lane, &f, NULL))
		broken(lane, "the device takes no request");
	return true;
}

/* acknowledge completes the stripes of a list up to a SEND. */
static void acknowledge(struct comm *c, struct list *sent, uint64_t sequence)
{
	while (sent->first && sent->first->sequence <= sequence)
		c->owner->acknowledged(c, sent->first);
}

bool qpair_fenced(struct comm *c, uint64_t number, uint64_t count)
{
	struct qpair *p = find(c, number);
	if (!p)
		return true; /* a repeated answer */
	if (p->state != QPAIR_FENCING || count > p->posted)
		return false;
	struct list sent = p->sent;
	for (struct stripe *s = sent.first; s; s = s->next)
		s->list = &sent;
	destroy(p); /* before NCCL may use the memory again */
	acknowledge(c, &sent, count);
	for (struct stripe *s; (s = sent.first);) {
		list_remove(s);
		c->sender.repeated += s->length;
		list_add(&c->sender.again, s);
	}
	return true;
}

/* sent_one takes a completion of a sender, and returns false if the queue pair is no longer up. */
static bool sent_one(struct qpair *p, const struct ibv_wc *wc)
{
	struct lane *lane = p->lane;
	if (wc->status != IBV_WC_SUCCESS) {
		if (p->state != QPAIR_UP)
			return false;
		char reason[64];
		snprintf(reason, sizeof reason, "completion status %d", (int)wc->status);
		broken(lane, reason);
		return false;
	}
	p->completed = wc->wr_id;
	acknowledge(p->comm, lane ? &lane->sent : &p->sent, wc->wr_id);
	if (lane) {
		lane->received = engine.now;
		lane->connect_failures = 0;
		lane_progress(lane);
	}
	return true;
}

/* Receiver */

static bool post_receive(struct qpair *p, uint32_t i)
{
	struct ibv_sge where = {.addr = (uintptr_t)&p->frames[i], .length = sizeof p->frames[i], .lkey = p->region->lkey};
	struct ibv_recv_wr r = {.wr_id = i, .sg_list = &where, .num_sge = 1}, *bad;
	if (ibv_post_recv(p->qp, &r, &bad))
		return false;
	p->receives++;
	return true;
}

/* way returns the port and the flow label for acknowledgements, which take the sender's plane, too: they would be lost
 * with another one. */
static int way(struct comm *c, const struct endpoint *peer, uint32_t *label)
{
	struct fared_status status;
	struct fared_address destination;
	memcpy(destination.bytes, peer->gid, sizeof destination.bytes);
	*label = 0;
	if (!engine.table || fared_get_status(engine.table, &status))
		return verbs_port_of(NULL, 0, FARED_NO_SUB_PORT, &c->source);
	struct fared_slot *slots = calloc(status.max_slots ? status.max_slots : 1, sizeof *slots), *chosen = NULL;
	struct fared_pair pair;
	if (slots && !fared_lookup(engine.table, &c->source, &destination, &pair, slots, status.max_slots)) {
		uint32_t n = pair.slots < status.max_slots ? pair.slots : status.max_slots;
		for (uint32_t k = 0; k < n; k++) {
			struct fared_slot *s = &slots[(peer->pair + k) % n];
			const char *name = fared_plane_name(engine.table, s->plane);
			if (name && strncmp(name, peer->plane, sizeof peer->plane - 1) == 0 && (!chosen || (!chosen->share_ppb && s->share_ppb)))
				chosen = s;
		}
	}
	int port = -1;
	if (chosen) {
		*label = verbs_label(chosen->source_port);
		port = verbs_port_of(engine.table, chosen->plane, chosen->sub_port, &c->source);
	}
	free(slots);
	for (uint16_t plane = 0; port < 0 && !chosen && plane < status.planes; plane++)
		port = verbs_port_of(engine.table, plane, FARED_NO_SUB_PORT, &c->source);
	return port;
}

static bool listen_for(struct comm *c, struct lane *lane, const struct endpoint *peer, struct endpoint *e)
{
	uint32_t label;
	int port = way(c, peer, &label);
	if (port < 0) {
		report(c, NULL, "the plane of a slot has no active RDMA port with the loopback's GID: fared rdma explains", 0);
		return false;
	}
	struct qpair *p = new_pair(c, lane, &rdmas[port], peer->pair);
	if (!p)
		return false;
	size_t size = (RECEIVES * sizeof *p->frames + PAGE - 1) / PAGE * PAGE;
	p->frames = aligned_alloc(PAGE, size);
	if (p->frames) {
		memset(p->frames, 0, size);
		p->region = verbs.ibv_reg_mr(p->rdma->pd, p->frames, size, IBV_ACCESS_LOCAL_WRITE);
	}
	int error = p->region ? to_rtr(p, peer, label) : ENOMEM;
	for (uint32_t i = 0; !error && i < RECEIVES; i++)
		error = post_receive(p, i) ? 0 : ENOMEM;
	if (error || !describe(p, e)) {
		report(c, p->rdma, "a queue pair cannot be connected", error);
		destroy(p);
		return false;
	}
	p->state = QPAIR_UP;
	return true;
}

/* forget drops the records of queue pairs that the sender has settled. */
static void forget(struct comm *c, uint64_t first_pair)
{
	if (first_pair <= c->pairs.first || first_pair > UINT32_MAX)
		return;
	c->pairs.first = (uint32_t)first_pair;
	uint32_t kept = 0;
	for (uint32_t i = 0; i < c->pairs.fenced_count; i++) {
		if (c->pairs.fenced[i].pair >= c->pairs.first)
			c->pairs.fenced[kept++] = c->pairs.fenced[i];
	}
	c->pairs.fenced_count = kept;
}

static const struct fenced *record_of(const struct comm *c, uint64_t number)
{
	for (uint32_t i = 0; i < c->pairs.fenced_count; i++) {
		if (c->pairs.fenced[i].pair == number)
			return &c->pairs.fenced[i];
	}
	return NULL;
}

static bool record(struct comm *c, uint32_t number, uint64_t count)
{
	if (c->pairs.fenced_count == c->pairs.fenced_room) {
		uint32_t room = c->pairs.fenced_room ? 2 * c->pairs.fenced_room : 16;
		struct fenced *more = realloc(c->pairs.fenced, room * sizeof *more);
		if (!more) {
			c->owner->fail(c, ncclSystemError, "no memory");
			return false;
		}
		c->pairs.fenced = more;
		c->pairs.fenced_room = room;
	}
	c->pairs.fenced[c->pairs.fenced_count++] = (struct fenced){.pair = number, .count = count};
	return true;
}

bool qpair_asked(struct lane *lane, const struct endpoint *peer, uint64_t first_pair)
{
	struct comm *c = lane->comm;
	if (c->abandoned || c->closed_at)
		return true;
	forget(c, first_pair);
	/* A connection that was slow may bring the request after another one has brought the end. */
	if (peer->pair < c->pairs.first || record_of(c, peer->pair))
		return true;
	if (find(c, peer->pair) || peer->mtu < IBV_MTU_256 || peer->mtu > IBV_MTU_4096)
		return false;
	if (lane->pair) {
		lane->pair->lane = NULL; /* a FENCE for it is under way */
		lane->pair = NULL;
	}
	struct endpoint e;
	if (!listen_for(c, lane, peer, &e))
		e = (struct endpoint){.pair = peer->pair, .failed = 1};
	lane_control(lane, &(struct frame){.type = FRAME_CONNECTED, .length = sizeof e}, &e);
	return true;
}

/* finish answers the sender once the device has returned all RECVs. */
static void finish(struct qpair *p)
{
	struct comm *c = p->comm;
	struct frame f = {.type = FRAME_FENCED, .group = p->number, .total = p->arrived};
	if (p->receives)
		return;
	destroy(p); /* before the answer: its end is what the answer promises */
	if (record(c, (uint32_t)f.group, f.total))
		to_all(c, &f);
}

/* arrived_one takes a completion of a receiver. */
static void arrived_one(struct qpair *p, const struct ibv_wc *wc)
{
	struct comm *c = p->comm;
	p->receives--;
	if (wc->status != IBV_WC_SUCCESS || wc->wr_id >= RECEIVES)
		return; /* the queue pair has ended, and the sender is going to ask */
	const struct frame *f = &p->frames[wc->wr_id];
	p->arrived++;
	if (p->lane)
		p->lane->received = engine.now;
	if (wc->byte_len != sizeof *f || f->version != WIRE_VERSION || (f->type == FRAME_DATA && !c->owner->written(c, f)))
		c->owner->fail(c, ncclRemoteError, "the peer violates the protocol: does it use another version of the plugin?");
	if (p->state == QPAIR_UP)
		post_receive(p, (uint32_t)wc->wr_id);
}

/* Both */

/* poll returns whether completions may be left. */
static bool poll(struct qpair *p)
{
	for (int turn = 0; turn < TURNS; turn++) {
		struct ibv_wc wc[BATCH];
		int n = ibv_poll_cq(p->cq, BATCH, wc);
		if (n <= 0 && (p->armed || engine.lazy)) {
			p->unpolled = !p->armed; /* or else the next turn polls again */
			return false;
		}
		if (n <= 0) {
			/* A completion before this call raises no event, so another look follows. */
			p->armed = true;
			ibv_req_notify_cq(p->cq, 0);
			continue;
		}
		for (int i = 0; i < n; i++) {
			if (!p->comm->sends)
				arrived_one(p, &wc[i]);
			else
				sent_one(p, &wc[i]);
		}
	}
	return true;
}

bool qpair_poll(struct comm *c)
{
	bool more = false;
	for (struct qpair *p = c->pairs.all, *next; p; p = next) {
		next = p->next;
		bool idle = c->sends && p->state == QPAIR_UP && p->posted == p->completed;
		if (p->unpolled && !(engine.lazy && idle))
			more |= poll(p);
		if (!c->sends && p->state == QPAIR_FENCING)
			finish(p);
	}
	return more;
}

bool qpair_fence(struct lane *lane, uint64_t number, uint64_t first_pair)
{
	struct comm *c = lane->comm;
	if (c->abandoned || c->closed_at)
		return true;
	forget(c, first_pair);
	if (number < c->pairs.first)
		return true; /* a late repetition */
	struct qpair *p = find(c, number);
	if (p) {
		if (p->state == QPAIR_UP) {
			stop(p);
			poll(p);
			finish(p);
		}
		return true;
	}
	const struct fenced *r = record_of(c, number);
	uint64_t count = r ? r->count : 0;
	if (!r && !record(c, (uint32_t)number, 0))
		return true; /* its CONNECT has not arrived, and is ignored when it does */
	lane_control(lane, &(struct frame){.type = FRAME_FENCED, .group = number, .total = count}, NULL);
	return true;
}

void qpair_drop_all(struct comm *c)
{
	while (c->pairs.all) {
		struct qpair *p = c->pairs.all;
		for (struct stripe *s; (s = p->sent.first);) {
			list_remove(s);
			list_add(&c->sender.again, s);
		}
		destroy(p);
	}
}

void qpair_event(struct rdma *r)
{
	struct ibv_cq *cq;
	void *context;
	while (!verbs.ibv_get_cq_event(r->channel, &cq, &context)) {
		struct qpair *p = context;
		verbs.ibv_ack_cq_events(cq, 1);
		p->armed = false;
		p->unpolled = true;
		p->comm->owner->ready(p->comm);
	}
}
