/* The sender of a communicator: its messages wait for buffers of the receiver, and are dealt to lanes as stripes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"

#define QUEUED_STRIPES 2                /* stripes that wait for a lane's socket: more would delay a change of weights */
#define PAIR_TIME (10000 * MILLISECOND) /* from the begin of a communicator until its first queue pair */

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
			end += (size_t)snprintf(text + end, sizeof text - end, " %s %llu,", name, (unsigned long long)c->sender.plane_bytes[i]);
	}
	INFO("closed; bytes by plane:%s repeated %llu", text, (unsigned long long)c->sender.repeated);
}

void sender_free(struct comm *c)
{
	struct sender *out = &c->sender;
	if (c->sends && c->ready)
		report_bytes(c);
	for (uint32_t i = 0; i < out->stripe_count; i++)
		free(out->stripes[i]);
	free(out->stripes);
	deal_free(&out->deal);
}

static struct stripe *new_stripe(struct comm *c)
{
	struct stripe *s = c->sender.spare.first;
	if (s) {
		list_remove(s);
		return s;
	}
	if (c->sender.stripe_count == c->sender.stripe_room) {
		uint32_t room = c->sender.stripe_room ? c->sender.stripe_room * 2 : 64;
		struct stripe **more = realloc(c->sender.stripes, room * sizeof(struct stripe *));
		if (!more)
			return NULL;
		c->sender.stripes = more;
		c->sender.stripe_room = room;
	}
	s = calloc(1, sizeof *s);
	if (!s)
		return NULL;
	s->number = c->sender.stripe_count;
	c->sender.stripes[c->sender.stripe_count++] = s;
	return s;
}

static void free_stripe(struct comm *c, struct stripe *s)
{
	for (int i = 0; i < c->lane_count; i++) {
		if (c->lanes[i]->stripe == s)
			c->lanes[i]->stripe = NULL; /* the rest of the frame is of no use to the receiver: zeros are written */
	}
	list_remove(s);
	c->sender.outstanding--;
	s->generation++;
	s->length = 0;
	s->request = NULL;
	list_add(&c->sender.spare, s);
}

void sender_acknowledged(struct comm *c, struct stripe *s)
{
	struct request *r = s->request;
	r->acknowledged += s->length;
	free_stripe(c, s);
	if (r->whole && r->acknowledged == r->size)
		atomic_store_explicit(&r->state, REQUEST_DONE, memory_order_release);
}

void sender_stripe_arrived(struct lane *lane, uint64_t id)
{
	struct comm *c = lane->comm;
	lane_progress(lane);
	uint32_t number = (uint32_t)id;
	if (number >= c->sender.stripe_count || c->sender.stripes[number]->generation != id >> 32 || !c->sender.stripes[number]->request)
		return; /* of a repeated stripe */
	sender_acknowledged(c, c->sender.stripes[number]);
}

void sender_pair_broken(struct lane *lane)
{
	lane->suspect = true;
	shares_release(lane);
	qpair_release(lane); /* one without stripes */
}

void sender_closed(struct comm *c, uint64_t groups)
{
	/* Messages that the receiver has completed count as acknowledged. */
	bool missing = c->sender.waiting != NULL;
	for (uint32_t i = 0; i < c->sender.stripe_count; i++) {
		struct request *r = c->sender.stripes[i]->request;
		if (!r)
			continue;
		if (r->group >= groups) {
			missing = true;
			continue;
		}
		sender_acknowledged(c, c->sender.stripes[i]);
	}
	if (missing || !c->ready) /* connect waits too */
		c->owner->fail(c, ncclRemoteError, "the receiver has closed the communicator");
}

void sender_submit(struct comm *c, struct request *r)
{
	r->next = NULL;
	if (c->sender.waiting)
		c->sender.waiting_last->next = r;
	else
		c->sender.waiting = r;
	c->sender.waiting_last = r;
	if (c->peer_closed)
		c->owner->fail(c, ncclRemoteError, "the receiver has closed the communicator");
}

bool sender_owes(const struct comm *c)
{
	return !c->peer_closed && !c->abandoned && c->sender.confirmed < c->sender.next_posted;
}

void sender_confirm(struct comm *c, struct lane *lane)
{
	lane_control(lane, &(struct frame){.type = FRAME_POSTED, .group = c->sender.next_posted}, NULL);
	c->sender.confirmed = c->sender.next_posted;
}

/* match gives a message the first posted buffer with its tag. */
static bool match(struct comm *c, struct request *r)
{
	for (uint64_t g = c->sender.first_posted; g < c->sender.next_posted; g++) {
		struct posted *p = &c->sender.posted[g % MAX_GROUPS];
		for (int i = 0; i < p->n; i++) {
			if (p->used >> i & 1 || p->buffers[i].tag != r->tag)
				continue;
			if (r->size > p->buffers[i].size) {
				c->owner->fail(c, ncclInvalidUsage, "a message is larger than the receiver's buffer");
				return false;
			}
			p->used |= 1u << i;
			r->remote = p->buffers[i];
			r->group = g;
			r->index = i;
			while (c->sender.first_posted < c->sender.next_posted &&
				c->sender.posted[c->sender.first_posted % MAX_GROUPS].used ==
					(1u << c->sender.posted[c->sender.first_posted % MAX_GROUPS].n) - 1)
				c->sender.posted[c->sender.first_posted++ % MAX_GROUPS].valid = false;
			return r->matched = true;
		}
	}
	return false;
}

/* assign deals stripes to lanes until the next one in turn is full: the shares are those of bytes, whatever the sizes
 * of messages. */
static void assign(struct comm *c)
{
	for (;;) {
		struct stripe *s = c->sender.again.first;
		struct request *r = s ? s->request : c->sender.waiting;
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
			c->sender.outstanding++;
			s->request = r;
			s->offset = r->assigned;
			s->length = length;
			r->assigned += length;
			if (r->size > LARGE_BYTES)
				engine.large_until = engine.now + LARGE_TIME;
			if (r->group >= c->sender.confirmed)
				c->sender.confirmed = r->group + 1;
			if (r->assigned == r->size) {
				r->whole = true;
				c->sender.waiting = r->next;
			}
		}
		list_add(&lane->queue, s);
	}
}

void sender_abandon(struct comm *c)
{
	c->sender.waiting = NULL;
	for (uint32_t i = 0; i < c->sender.stripe_count; i++) {
		if (c->sender.stripes[i]->request)
			free_stripe(c, c->sender.stripes[i]);
	}
}

void sender_run(struct comm *c)
{
	if (engine.table && !fared_is_current(engine.table, &c->sender.deal.pair))
		shares_follow(c);
	assign(c);
}

static bool has_room(const struct lane *lane)
{
	return !lane->queue.first && (lane->comm->verbs ? qpair_has_room(lane) : lane->writable);
}

bool sender_has_work(struct comm *c)
{
	/* Bytes of messages for which the receiver has a buffer, and which are not assigned to a lane. */
	const struct sender *out = &c->sender;
	if (!out->again.first && !(out->waiting && (out->waiting->matched || out->first_posted != out->next_posted)))
		return false;
	const struct lane *lane = shares_next(c, 1);
	return lane && has_room(lane);
}

void sender_tick(struct comm *c)
{
	if (c->peer_closed)
		return;
	if (!c->lane_count && c->sender.refused && c->ready)
		c->owner->fail(c, ncclRemoteError, "the receiver's process has ended");
	else if (c->verbs && !c->ready && c->lane_count && engine.now - c->since > PAIR_TIME)
		c->owner->fail(c, ncclSystemError, "no queue pair to the receiver could be connected");
	else if (engine.now - (c->ready ? c->alive : c->since) > settings.patience_ms * MILLISECOND) /* lanes that come and go are no communicator */
		c->owner->fail(c, ncclRemoteError,
			c->lane_count ? "the receiver does not answer on any plane"
				      : "no lane to the receiver could be opened: is its address reachable from this loopback?");
	else
		shares_follow(c);
	for (int i = 0; i < c->lane_count && sender_owes(c); i++) {
		if (shares_carries(c->lanes[i]) && !c->lanes[i]->suspect)
			sender_confirm(c, c->lanes[i]);
	}
}
