/* The meaning of frames. What arrives is checked before it is used: a peer may have another version, or be damaged. */
#include <string.h>
#include <sys/socket.h>

#include "comm.h"

static struct request *group_of(struct comm *c, const struct frame *f)
{
	if (c->abandoned || f->group < c->receiver.first_group || f->group >= c->receiver.next_group)
		return NULL;
	return c->receiver.groups[f->group % MAX_GROUPS];
}

/* wanted returns the part of a receive that a stripe belongs to, or NULL if the stripe has arrived already. */
static struct part *wanted(struct comm *c, const struct frame *f)
{
	struct request *r = group_of(c, f);
	if (!r || f->index >= r->n)
		return NULL;
	struct part *p = &r->parts[f->index];
	uint64_t bit = f->offset / f->stripe;
	return p->have[bit / 64] >> (bit % 64) & 1 ? NULL : p;
}

/* admit checks a DATA frame, and takes the size of a message from its first one. */
static bool admit(struct comm *c, const struct frame *f)
{
	if (f->total > LARGE_BYTES)
		engine.large_until = engine.now + LARGE_TIME;
	if (f->group >= c->receiver.next_group || f->stripe < 1 || f->length > f->stripe || f->offset > f->total || f->length > f->total - f->offset)
		return false;
	if (f->offset % f->stripe || (f->length != f->stripe && f->offset + f->length != f->total))
		return false;
	receiver_confirmed(c, f->group + 1);
	struct request *r = group_of(c, f);
	if (!r)
		return true; /* complete: a repeated stripe */
	if (f->index >= r->n)
		return false;
	struct part *p = &r->parts[f->index];
	if (p->known)
		return p->total == f->total && p->stripe == f->stripe;
	if (f->total > p->capacity || f->stripe < LEAST_STRIPE)
		return false;
	p->known = true;
	p->total = f->total;
	p->stripe = f->stripe;
	return true;
}

bool frame_begin(struct lane *lane)
{
	const struct frame *f = &lane->in;
	struct comm *c = lane->comm;
	if (!c)
		return lane->listener && f->type == FRAME_HELLO && f->length == sizeof(struct hello);
	switch (f->type) {
	case FRAME_DATA:
		return !c->sends && !c->verbs && admit(c, f);
	case FRAME_WELCOME:
		return c->sends && lane->state == LANE_GREETING && !f->length;
	case FRAME_POST:
		return c->sends && f->index >= 1 && f->index <= MAX_PARTS && f->length == f->index * sizeof(struct buffer);
	case FRAME_POSTED:
		return !c->sends && !f->length && f->group <= c->receiver.next_group;
	case FRAME_ACK:
		return c->sends && f->length % sizeof(uint64_t) == 0;
	case FRAME_BYE:
	case FRAME_PING:
	case FRAME_PONG:
		return !f->length;
	case FRAME_CONNECT:
		return c->verbs && !c->sends && f->length == sizeof(struct endpoint);
	case FRAME_CONNECTED:
		return c->verbs && c->sends && f->length == sizeof(struct endpoint);
	case FRAME_FENCE:
		return c->verbs && !c->sends && !f->length && f->group >= 1 && f->group <= UINT32_MAX;
	case FRAME_FENCED:
		return c->verbs && c->sends && !f->length;
	}
	return false;
}

char *frame_target(struct lane *lane, uint32_t *room)
{
	const struct frame *f = &lane->in;
	uint32_t left = f->length - lane->payload_have;
	*room = left;
	if (f->type != FRAME_DATA)
		return lane->control + lane->payload_have;
	struct part *p = wanted(lane->comm, f);
	if (p)
		return p->data + f->offset + lane->payload_have;
	*room = left < SCRAP_BYTES ? left : SCRAP_BYTES;
	return engine.scrap;
}

/* note_stripe accounts for a stripe that is in memory. */
static void note_stripe(struct comm *c, const struct frame *f)
{
	struct part *p = wanted(c, f);
	if (p) {
		uint64_t bit = f->offset / f->stripe;
		p->have[bit / 64] |= (uint64_t)1 << (bit % 64);
		p->received += f->length;
		if (p->received == p->total)
			receiver_complete(c);
	}
}

static void arrived(struct lane *lane)
{
	note_stripe(lane->comm, &lane->in);
	lane->acks[lane->ack_count++] = lane->in.id;
}

bool frame_written(struct comm *c, const struct frame *f)
{
	if (!admit(c, f))
		return false;
	note_stripe(c, f);
	return true;
}

static bool posted(struct lane *lane)
{
	struct comm *c = lane->comm;
	const struct frame *f = &lane->in;
	if (f->group >= c->sender.first_posted + MAX_GROUPS)
		return false;
	bool repeated = f->group < c->sender.next_posted;
	if (!repeated) {
		struct posted *p = &c->sender.posted[f->group % MAX_GROUPS];
		*p = (struct posted){.valid = true, .n = f->index};
		memcpy(p->buffers, lane->control, f->length);
		while (c->sender.next_posted < c->sender.first_posted + MAX_GROUPS && c->sender.posted[c->sender.next_posted % MAX_GROUPS].valid)
			c->sender.next_posted++;
	}
	if (repeated)
		sender_confirm(c, lane); /* the first time the message itself or sender_tick does */
	return true;
}

/* has_ended answers the lane of a communicator that this end has closed: the BYE to its earlier lanes may have been
 * lost with them. */
static bool has_ended(struct lane *lane, const struct hello *h)
{
	const struct listener *l = lane->listener;
	for (uint32_t i = 0; i < l->ended_count; i++) {
		if (memcmp(l->ended[i].connection, h->connection, sizeof h->connection))
			continue;
		struct frame bye = {.type = FRAME_BYE, .version = WIRE_VERSION, .group = l->ended[i].groups};
		send(lane->fd, &bye, sizeof bye, MSG_NOSIGNAL); /* a lane without a communicator has sent nothing, so there is room */
		return true;
	}
	return false;
}

/* accept_comm makes the communicator of a HELLO, and queues it for net_accept. */
static struct comm *accept_comm(struct listener *l, const struct hello *h)
{
	guard_lock(&engine.lock);
	bool room = l->accepted_count < (int)(sizeof l->accepted / sizeof l->accepted[0]);
	guard_unlock(&engine.lock);
	struct comm *c = room ? comm_new(l->device, false, l->owner) : NULL;
	if (!c)
		return NULL;
	c->hello = *h;
	c->verbs = h->transport == TRANSPORT_VERBS;
	c->receiver.listener = l;
	c->adopted = c->ready = true;
	c->since = c->alive = engine.now;
	l->comms++;
	c->next = engine.comms;
	engine.comms = c;
	atomic_store(&c->state, COMM_READY);
	guard_lock(&engine.lock);
	l->accepted[l->accepted_count++] = c;
	guard_unlock(&engine.lock);
	return c;
}

static bool greeted(struct lane *lane)
{
	struct listener *l = lane->listener;
	struct hello h;
	memcpy(&h, lane->control, sizeof h);
	unsigned difference = 0;
	for (size_t i = 0; i < sizeof h.nonce; i++)
		difference |= h.nonce[i] ^ l->nonce[i];
	if (difference || !(h.transport & l->device->transports))
		return false;
	struct comm *c = engine.comms;
	while (c && (c->receiver.listener != l || memcmp(&c->hello, &h, sizeof h)))
		c = c->next;
	if (!c) {
		if (has_ended(lane, &h) || atomic_load(&l->closing))
			return false;
		c = accept_comm(l, &h);
	}
	if (!c || c->lane_count == MAX_LANES)
		return false;
	struct lane **p = &l->greeting;
	while (*p != lane)
		p = &(*p)->next;
	*p = lane->next;
	l->greeting_count--;
	lane->listener = NULL;
	lane_join(lane, c);
	lane->state = LANE_READY;
	lane_control(lane, &(struct frame){.type = FRAME_WELCOME}, NULL);
	if (c->closed_at)
		comm_bye(lane);
	return true;
}

bool frame_end(struct lane *lane)
{
	const struct frame *f = &lane->in;
	switch (f->type) {
	case FRAME_HELLO:
		return greeted(lane);
	case FRAME_WELCOME:
		lane->state = LANE_READY;
		lane->comm->sender.open_failures = 0;
		lane->comm->sender.refused = false;
		break;
	case FRAME_POST:
		return posted(lane);
	case FRAME_POSTED:
		receiver_confirmed(lane->comm, f->group);
		break;
	case FRAME_DATA:
		arrived(lane);
		break;
	case FRAME_ACK:
		for (uint32_t i = 0; i < f->length / sizeof(uint64_t); i++) {
			uint64_t id;
			memcpy(&id, lane->control + i * sizeof id, sizeof id);
			sender_stripe_arrived(lane, id);
		}
		break;
	case FRAME_PING:
		lane_control(lane, &(struct frame){.type = FRAME_PONG}, NULL);
		break;
	case FRAME_PONG:
		break; /* lane_read has noted when it came */
	case FRAME_CONNECT:
	case FRAME_CONNECTED: {
		struct endpoint e;
		memcpy(&e, lane->control, sizeof e);
		return f->type == FRAME_CONNECT ? qpair_asked(lane, &e, f->group) : qpair_connected(lane, &e);
	}
	case FRAME_FENCE:
		return qpair_fence(lane, f->group, f->offset);
	case FRAME_FENCED:
		return qpair_fenced(lane->comm, f->group, f->total);
	case FRAME_BYE:
		comm_closed_by_peer(lane->comm, f->group);
		break;
	}
	return true;
}
