/* Communicators: messages, stripes and groups of receives. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"

#define QUEUED_STRIPES 2                  /* stripes that wait for a lane's socket: more would delay a change of weights */
#define LINGER (2000 * MILLISECOND)       /* from the close of a communicator until its lanes are closed at the latest */
#define FIRST_LANES (200 * MILLISECOND)   /* that a communicator waits for its other lanes once one is ready */
#define CONNECT_TIME (3000 * MILLISECOND) /* until an attempt is given up */
#define POST_DELAY (20 * MILLISECOND)     /* until an unconfirmed POST is repeated on another lane, doubling up to a second */
#define PAIR_TIME (10000 * MILLISECOND)   /* from the begin of a communicator until its first queue pair */
#define BYE_TIME (1000 * MILLISECOND)     /* from the close of a sender until its last SEND is complete at the receiver */
#define RETURN_TIME (5000 * MILLISECOND)  /* in which a sender must open a lane after the last one has ended */

struct comm *comm_new(const struct device *d, bool sends)
{
	struct comm *c = calloc(1, sizeof *c);
	if (!c)
		return NULL;
	c->request_count = sends ? MAX_SENDS : NCCL_NET_MAX_REQUESTS;
	c->requests = calloc(c->request_count, sizeof *c->requests);
	if (!c->requests) {
		free(c);
		return NULL;
	}
	for (uint32_t i = 0; i < c->request_count; i++)
		c->requests[i].comm = c;
	c->sends = sends;
	c->device = d;
	c->source = d->source;
	c->next_pair = 1;
	return c;
}

/* report_bytes reports what each plane has carried, and what was sent a second time. */
static void report_bytes(const struct comm *c)
{
	char text[400] = "";
	size_t end = 0;
	struct fared_status status;
	uint32_t planes = engine.table && !fared_get_status(engine.table, &status) && status.planes < MAX_LANES ? status.planes : MAX_LANES;
	for (uint32_t i = 0; i < planes && end < sizeof text - 1; i++) {
		const char *name = engine.table ? fared_plane_name(engine.table, i) : NULL;
		if (name)
			end += (size_t)snprintf(text + end, sizeof text - end, " %s %llu,", name, (unsigned long long)c->plane_bytes[i]);
	}
	INFO("closed; bytes by plane:%s repeated %llu", text, (unsigned long long)c->repeated);
}

void comm_free(struct comm *c)
{
	qpair_drop_all(c);
	while (c->lane_count)
		lane_close(c->lanes[0]);
	if (c->sends && c->ready)
		report_bytes(c);
	for (uint32_t i = 0; i < c->stripe_count; i++)
		free(c->stripes[i]);
	for (uint32_t i = 0; i < c->request_count; i++) {
		for (int k = 0; k < MAX_PARTS; k++)
			free(c->requests[i].parts[k].have);
	}
	free(c->stripes);
	free(c->fenced);
	free(c->requests);
	deal_free(&c->deal);
	if (atomic_load(&c->closing))
		atomic_fetch_sub(&engine.closing, 1);
	free(c);
}

void comm_fail(struct comm *c, ncclResult_t error, const char *reason)
{
	if (atomic_load(&c->error))
		return;
	if (!c->closed_at) {
		/* The reason comes first: a program may end as soon as it sees the error. */
		char peer[46] = "";
		fared_address_text(&c->destination, peer, sizeof peer);
		WARN("%s %s: %s", c->sends ? "sending to" : "receiving", c->sends ? peer : "", reason);
	}
	atomic_store(&c->error, error);
}

void comm_join(struct comm *c, struct lane *lane)
{
	lane->comm = c;
	c->lanes[c->lane_count++] = lane;
}

void comm_leave(struct lane *lane)
{
	struct comm *c = lane->comm;
	for (int i = 0; i < c->lane_count; i++) {
		if (c->lanes[i] == lane) {
			c->lanes[i] = c->lanes[--c->lane_count];
			break;
		}
	}
	if (!c->lane_count && lane->state == LANE_READY)
		c->alive = engine.now;
	lane->comm = NULL;
}

void comm_open_failed(struct comm *c, bool refused)
{
	c->refused = refused;
	c->open_again = engine.now + (10 * MILLISECOND << (c->open_failures < 7 ? c->open_failures : 7));
	c->open_failures++;
}

static struct stripe *new_stripe(struct comm *c)
{
	struct stripe *s = c->spare.first;
	if (s) {
		list_remove(s);
		return s;
	}
	if (c->stripe_count == c->stripe_room) {
		uint32_t room = c->stripe_room ? c->stripe_room * 2 : 64;
		struct stripe **more = realloc(c->stripes, room * sizeof(struct stripe *));
		if (!more)
			return NULL;
		c->stripes = more;
		c->stripe_room = room;
	}
	s = calloc(1, sizeof *s);
	if (!s)
		return NULL;
	s->number = c->stripe_count;
	c->stripes[c->stripe_count++] = s;
	return s;
}

static void free_stripe(struct comm *c, struct stripe *s)
{
	for (int i = 0; i < c->lane_count; i++) {
		if (c->lanes[i]->stripe == s)
			c->lanes[i]->stripe = NULL; /* the rest of the frame is of no use to the receiver: zeros are written */
	}
	list_remove(s);
	c->outstanding--;
	s->generation++;
	s->length = 0;
	s->request = NULL;
	list_add(&c->spare, s);
}

void comm_stripe_acknowledged(struct comm *c, struct stripe *s)
{
	struct request *r = s->request;
	r->acknowledged += s->length;
	free_stripe(c, s);
	if (r->whole && r->acknowledged == r->size)
		atomic_store_explicit(&r->state, REQUEST_DONE, memory_order_release);
}

void comm_acknowledged(struct lane *lane, uint64_t id)
{
	struct comm *c = lane->comm;
	lane_progress(lane);
	uint32_t number = (uint32_t)id;
	if (number >= c->stripe_count || c->stripes[number]->generation != id >> 32 || !c->stripes[number]->request)
		return; /* of a repeated stripe */
	comm_stripe_acknowledged(c, c->stripes[number]);
}

void comm_closed_by_peer(struct comm *c, uint64_t groups)
{
	if (!c->peer_closed)
		c->bye_at = engine.now;
	c->peer_closed = true;
	if (!c->sends) {
		if (c->verbs)
			return; /* comm_tick looks whether the messages are complete in time */
		if (c->first_group != c->next_group)
			comm_fail(c, ncclRemoteError, "the sender has closed the communicator");
		return;
	}
	qpair_drop_all(c);
	/* What the receiver has completed counts as acknowledged. */
	bool missing = c->waiting != NULL;
	for (uint32_t i = 0; i < c->stripe_count; i++) {
		struct request *r = c->stripes[i]->request;
		if (!r)
			continue;
		if (r->group >= groups) {
			missing = true;
			continue;
		}
		comm_stripe_acknowledged(c, c->stripes[i]);
	}
	if (missing || !c->ready) /* connect waits too */
		comm_fail(c, ncclRemoteError, "the receiver has closed the communicator");
}

/* comm_received completes the receives at the head of the order in which they were posted. */
void comm_received(struct comm *c)
{
	while (c->first_group != c->next_group) {
		struct request *r = c->groups[c->first_group % MAX_GROUPS];
		for (int i = 0; i < r->n; i++) {
			if (!r->parts[i].known || r->parts[i].received != r->parts[i].total)
				return;
		}
		c->groups[c->first_group++ % MAX_GROUPS] = NULL;
		atomic_store_explicit(&r->state, REQUEST_DONE, memory_order_release);
	}
}

void comm_post(struct comm *c, uint64_t group, struct lane *lane)
{
	const struct request *r = c->groups[group % MAX_GROUPS];
	struct buffer buffers[MAX_PARTS];
	memset(buffers, 0, sizeof buffers);
	for (int i = 0; i < r->n; i++) {
		const struct part *p = &r->parts[i];
		buffers[i] = (struct buffer){.tag = p->tag, .size = p->capacity};
		if (c->verbs)
			memory_announce(p->memory, p->data, &buffers[i]);
	}
	lane_control(
		lane, &(struct frame){.type = FRAME_POST, .index = (uint16_t)r->n, .length = (uint32_t)(r->n * sizeof buffers[0]), .group = group}, buffers);
}

int comm_control_lane(const struct comm *c, int avoid)
{
	int best = -1;
	for (int k = 0; k < c->lane_count; k++) {
		int i = (avoid + 1 + k) % c->lane_count;
		if (c->lanes[i]->ended || (i == avoid && c->lane_count > 1))
			continue;
		if (best < 0 || (avoid < 0 && c->lanes[i]->received > c->lanes[best]->received))
			best = i;
	}
	return best;
}

static void submit_receive(struct comm *c, struct request *r)
{
	r->group = c->next_group++;
	c->groups[r->group % MAX_GROUPS] = r;
	if (c->peer_closed)
		comm_fail(c, ncclRemoteError, "the sender has closed the communicator");
	int i = comm_control_lane(c, -1);
	if (i < 0)
		return; /* comm_tick posts it */
	c->post_lane = i;
	c->posted_at = engine.now;
	comm_post(c, r->group, c->lanes[i]);
}

/* expects returns whether an answer of the peer is outstanding: a buffer or an acknowledgement for a sender, a message for a receiver. */
static bool expects(const struct comm *c)
{
	return c->sends ? c->outstanding || c->waiting : c->first_group != c->next_group;
}

static void take_submissions(struct comm *c)
{
	uint32_t end = atomic_load_explicit(&c->submitted, memory_order_acquire);
	if (c->taken != end && !expects(c) && c->lane_count)
		c->alive = c->asked = engine.now; /* the engine may have slept */
	for (; c->taken != end; c->taken++) {
		struct request *r = c->ring[c->taken % MAX_SENDS];
		if (!c->sends) {
			submit_receive(c, r);
			continue;
		}
		r->next = NULL;
		if (c->waiting)
			c->waiting_last->next = r;
		else
			c->waiting = r;
		c->waiting_last = r;
		if (c->peer_closed)
			comm_fail(c, ncclRemoteError, "the receiver has closed the communicator");
	}
}

/* match gives a message the first posted buffer with its tag. */
static bool match(struct comm *c, struct request *r)
{
	for (uint64_t g = c->first_posted; g < c->next_posted; g++) {
		struct posted *p = &c->posted[g % MAX_GROUPS];
		for (int i = 0; i < p->n; i++) {
			if (p->used >> i & 1 || p->buffers[i].tag != r->tag)
				continue;
			if (r->size > p->buffers[i].size) {
				comm_fail(c, ncclInvalidUsage, "a message is larger than the receiver's buffer");
				return false;
			}
			p->used |= 1u << i;
			r->remote = p->buffers[i];
			r->group = g;
			r->index = i;
			while (c->first_posted < c->next_posted &&
				c->posted[c->first_posted % MAX_GROUPS].used == (1u << c->posted[c->first_posted % MAX_GROUPS].n) - 1)
				c->posted[c->first_posted++ % MAX_GROUPS].valid = false;
			return r->matched = true;
		}
	}
	return false;
}

/* assign deals stripes to lanes until the next one in turn is full: the shares are those of bytes, whatever the sizes of messages. */
static void assign(struct comm *c)
{
	for (;;) {
		struct stripe *s = c->again.first;
		struct request *r = s ? s->request : c->waiting;
		if (!r || (!s && !r->matched && !match(c, r)))
			return;
		uint64_t left = r->size - r->assigned;
		uint32_t length = s ? s->length : left < settings.stripe ? (uint32_t)left : settings.stripe;
		struct lane *lane = shares_next(c, length);
		if (!lane || lane->queue.bytes >= (uint64_t)QUEUED_STRIPES * settings.stripe || (!s && !(s = new_stripe(c))))
			return;
		shares_deal(c);
		if (s->request) {
			list_remove(s);
		} else {
			c->outstanding++;
			s->request = r;
			s->offset = r->assigned;
			s->length = length;
			r->assigned += length;
			if (r->assigned == r->size) {
				r->whole = true;
				c->waiting = r->next;
			}
		}
		list_add(&lane->queue, s);
	}
}

static void hello(struct lane *lane)
{
	if (lane->state == LANE_CONNECTING && lane->writable && !lane->ended) {
		lane->state = LANE_GREETING;
		lane_control(lane, &(struct frame){.type = FRAME_HELLO, .length = sizeof lane->comm->hello}, &lane->comm->hello);
	}
}

/* abandon ends all use of the memory of messages. */
static void abandon(struct comm *c)
{
	c->abandoned = true;
	c->waiting = NULL;
	qpair_drop_all(c);
	for (uint32_t i = 0; i < c->stripe_count; i++) {
		if (c->stripes[i]->request)
			free_stripe(c, c->stripes[i]);
	}
}

void comm_bye(struct lane *lane)
{
	lane_control(lane, &(struct frame){.type = FRAME_BYE, .group = lane->comm->first_group}, NULL);
}

static void close_comm(struct comm *c)
{
	c->closed_at = engine.now;
	abandon(c);
	for (int i = 0; i < c->lane_count; i++)
		comm_bye(c->lanes[i]);
	atomic_store(&c->released, true);
}

static void close_ended(struct comm *c)
{
	for (int i = 0; i < c->lane_count;) {
		struct lane *l = c->lanes[i];
		bool empty = !l->writing && l->out_at == l->out_end;
		if (c->closed_at && empty && !l->shut) {
			shutdown(l->fd, SHUT_WR);
			l->shut = true;
		}
		if (l->ended || (l->retired && empty && !l->queue.first && !l->sent.first && c->lane_count > 1))
			lane_close(l);
		else
			i++;
	}
	if (!c->ready) {
		int ready = 0;
		for (int i = 0; i < c->lane_count; i++)
			ready += lane_carries(c->lanes[i]);
		if (ready && (ready == c->lane_count || engine.now - c->since > FIRST_LANES)) {
			c->ready = true;
			atomic_store(&c->state, COMM_READY);
		}
	}
}

/* sendable returns whether a sender has bytes of messages for which the receiver has a buffer, and which are not assigned to a lane. */
static bool sendable(const struct comm *c)
{
	return c->again.first || (c->waiting && (c->waiting->matched || c->first_posted != c->next_posted));
}

/* comm_run does what can be done without waiting. It returns true if more is left. */
bool comm_run(struct comm *c)
{
	take_submissions(c);
	for (int i = 0; i < c->lane_count; i++) {
		struct lane *l = c->lanes[i];
		hello(l);
		if (l->readable)
			lane_read(l);
	}
	bool more = c->verbs && qpair_poll(c);
	qpair_follow(c);
	if (atomic_load(&c->closing) && !c->closed_at)
		close_comm(c);
	else if (atomic_load(&c->error) && !c->abandoned)
		abandon(c);
	if (c->sends && !c->abandoned) {
		if (engine.table && !fared_is_current(engine.table, &c->deal.pair))
			shares_follow(c);
		assign(c);
	}
	for (int i = 0; i < c->lane_count; i++) {
		struct lane *l = c->lanes[i];
		lane_write(l);
		more |= !l->ended && (l->readable || (l->writable && (l->writing || (l->queue.first && !c->verbs))));
	}
	close_ended(c);
	if (c->sends && !c->abandoned && sendable(c)) {
		struct lane *l = shares_next(c, 1);
		more |= l && lane_has_room(l);
	}
	c->gone = c->closed_at && (!c->lane_count || engine.now - c->closed_at > LINGER);
	return more && !c->gone;
}

static void watch_lane(struct comm *c, struct lane *l)
{
	if (l->state != LANE_READY) {
		l->ended |= engine.now - l->since > CONNECT_TIME;
		return;
	}
	if (!l->sent.first || c->lane_count == 1 || engine.now - l->progress <= (settings.stall_ms * MILLISECOND) << l->stalls)
		return;
	/* While all lanes are suspect their stripes stay: there is no better lane. */
	if (!l->suspect || !c->all_suspect)
		lane_release(l);
	l->suspect = true;
}

/* watch_peer notes when the peer was last heard of, and asks a silent one for an answer: the end of a process does not arrive when no plane carries its packets. A peer of
 * which nothing is expected has only to keep a lane. It returns the number of lanes in use. */
static int watch_peer(struct comm *c)
{
	int ready = 0;
	for (int i = 0; i < c->lane_count; i++) {
		const struct lane *l = c->lanes[i];
		if (l->state != LANE_READY || l->ended)
			continue;
		ready++;
		uint64_t heard = expects(c) ? l->received : engine.now;
		if (heard > c->alive)
			c->alive = heard;
	}
	uint64_t period = settings.patience_ms * MILLISECOND / 4;
	if (!expects(c) || engine.now - c->alive <= period || engine.now - c->asked <= period)
		return ready;
	c->asked = engine.now;
	for (int i = 0; i < c->lane_count; i++) {
		if (c->lanes[i]->state == LANE_READY && !c->lanes[i]->ended)
			lane_control(c->lanes[i], &(struct frame){.type = FRAME_PING}, NULL);
	}
	return ready;
}

/* comm_tick does what depends on time. */
void comm_tick(struct comm *c)
{
	if (atomic_load(&c->error) || c->closed_at)
		return;
	for (int i = 0; i < c->lane_count; i++)
		watch_lane(c, c->lanes[i]);
	int ready = watch_peer(c);
	if (c->sends && !c->peer_closed) {
		if (!c->lane_count && c->refused && c->ready)
			comm_fail(c, ncclRemoteError, "the receiver's process has ended");
		else if (c->verbs && !c->ready && c->lane_count && engine.now - c->since > PAIR_TIME)
			comm_fail(c, ncclSystemError, "no queue pair to the receiver could be connected");
		else if (engine.now - (c->ready ? c->alive : c->since) > settings.patience_ms * MILLISECOND) /* lanes that come and go are no communicator */
			comm_fail(c, ncclRemoteError,
				c->lane_count ? "the receiver does not answer on any plane"
					      : "no lane to the receiver could be opened: is its address reachable from this loopback?");
		else
			shares_follow(c);
	}
	if (c->sends)
		return;
	if (c->verbs && c->peer_closed && c->first_group != c->next_group && engine.now - c->bye_at > BYE_TIME)
		comm_fail(c, ncclRemoteError, "the sender has closed the communicator");
	if (!c->peer_closed && c->first_group != c->next_group && engine.now - c->alive > (ready ? settings.patience_ms * MILLISECOND : RETURN_TIME))
		comm_fail(c, ncclRemoteError, ready ? "the sender does not answer on any plane" : "the sender's process has ended");
	uint64_t delay = c->post_delay ? c->post_delay : POST_DELAY;
	if (c->confirmed < c->next_group && engine.now - c->posted_at > delay) {
		int i = c->lane_count ? comm_control_lane(c, c->post_lane % c->lane_count) : -1;
		if (i < 0)
			return;
		c->post_lane = i;
		c->posted_at = engine.now;
		c->post_delay = delay * 2 < 1000 * MILLISECOND ? delay * 2 : 1000 * MILLISECOND;
		uint64_t first = c->confirmed > c->first_group ? c->confirmed : c->first_group;
		for (uint64_t g = first; g < c->next_group; g++)
			comm_post(c, g, c->lanes[i]);
	}
}
