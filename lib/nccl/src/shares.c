/* The shares of lanes: those of their slots' sub-ports in the slot table. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"

#define WHOLE 1000000000u

/* share_of returns the share of a sub-port, that of its slots. */
static uint64_t share_of(const struct comm *c, uint16_t plane, uint16_t sub_port, bool any_plane)
{
	uint64_t sum = 0;
	for (uint32_t i = 0; i < c->slot_count; i++) {
		const struct fared_slot *s = &c->slots[i];
		if (s->plane == plane && s->sub_port == sub_port && (any_plane || c->device->plane == plane))
			sum += s->share_ppb;
	}
	return sum;
}

static int lanes_of(const struct comm *c, uint16_t plane, uint16_t sub_port)
{
	int n = 0;
	for (int i = 0; i < c->lane_count; i++) {
		const struct lane *l = c->lanes[i];
		n += l->slot >= 0 && !l->retired && l->plane == plane && l->sub_port == sub_port;
	}
	return n;
}

/* report_missing reports a sub-port without a lane, once: connections to the same port hold the source ports of all its slots. The other lanes carry its share. */
static void report_missing(struct comm *c)
{
	for (uint32_t i = 0; i < c->slot_count && !c->ports_taken && engine.now >= c->open_again; i++) {
		const struct fared_slot *s = &c->slots[i];
		if (!s->share_ppb || lanes_of(c, s->plane, s->sub_port))
			continue;
		c->ports_taken = true;
		WARN("plane %s is not used: the source ports of its slots are taken, or waiting to be free again (TIME_WAIT)",
			fared_plane_name(engine.table, s->plane));
	}
}

/* open_missing opens the lanes that sub-ports lack, each from a separate slot. Communicators begin at different slots, so that their flows differ. */
static void open_missing(struct comm *c)
{
	if (c->closed_at || c->peer_closed || engine.now < c->open_again)
		return;
	if (!c->steered) {
		if (!c->lane_count && !lane_open(c, -1))
			comm_open_failed(c, false);
		return;
	}
	uint32_t offset = 0;
	memcpy(&offset, c->hello.connection, sizeof offset);
	for (uint32_t n = 0; n < c->slot_count && c->lane_count < MAX_LANES; n++) {
		uint32_t i = (n + offset % c->slot_count) % c->slot_count;
		const struct fared_slot *s = &c->slots[i];
		bool used = (uint32_t)lanes_of(c, s->plane, s->sub_port) >= settings.lanes;
		for (int k = 0; k < c->lane_count; k++)
			used |= c->lanes[k]->slot == (int)i;
		if (!used && !lane_open(c, (int)i) && errno != EADDRINUSE && errno != EADDRNOTAVAIL)
			comm_open_failed(c, false);
	}
	report_missing(c);
}

/* apply sets the shares of lanes. A lane whose slot is parked or elsewhere gives up its stripes. */
static void apply(struct comm *c)
{
	bool any = c->device->plane == ALL_PLANES;
	if (!any) {
		uint64_t sum = 0;
		for (uint32_t i = 0; i < c->slot_count; i++)
			sum += c->slots[i].plane == c->device->plane ? c->slots[i].share_ppb : 0;
		any = sum == 0; /* the device's plane has no capacity: all others carry its traffic */
	}
	for (int i = 0; i < c->lane_count; i++) {
		struct lane *l = c->lanes[i];
		uint64_t share = WHOLE; /* of a lane without a slot */
		if (l->slot >= 0) {
			if ((uint32_t)l->slot >= c->slot_count || c->slots[l->slot].source_port != l->port) {
				l->retired = true;
			} else if (l->plane != c->slots[l->slot].plane || l->sub_port != c->slots[l->slot].sub_port) {
				l->plane = c->slots[l->slot].plane;
				l->sub_port = c->slots[l->slot].sub_port;
				if (c->verbs)
					qpair_release(l); /* the slot may be another device's now */
			}
		} else {
			l->retired |= c->steered; /* the pair has slots now */
		}
		if (l->retired)
			share = 0;
		else if (l->slot >= 0)
			share = share_of(c, l->plane, l->sub_port, any) / (uint64_t)lanes_of(c, l->plane, l->sub_port);
		if (share && settings.equal)
			share = WHOLE;
		if ((share == 0) != (l->share == 0))
			l->credit = 0;
		l->share = share;
		if (!share)
			lane_release(l);
	}
}

static bool make_room(struct comm *c, uint32_t room)
{
	struct fared_slot *slots = realloc(c->slots, room * sizeof *slots);
	if (slots)
		c->slots = slots;
	struct fared_slot *fresh = realloc(c->fresh, room * sizeof *fresh);
	if (fresh)
		c->fresh = fresh;
	if (!slots || !fresh)
		return false;
	c->slot_room = room;
	return true;
}

void shares_follow(struct comm *c)
{
	if (engine.table && !(c->pair.revision && fared_is_current(engine.table, &c->pair))) {
		struct fared_pair pair;
		int n = fared_lookup(engine.table, &c->source, &c->destination, &pair, c->fresh, c->slot_room);
		if (n >= 0 && pair.slots > c->slot_room && make_room(c, pair.slots))
			n = fared_lookup(engine.table, &c->source, &c->destination, &pair, c->fresh, c->slot_room);
		/* After an error the last shares stay. */
		if (n >= 0 && pair.slots) {
			struct fared_slot *previous = c->slots;
			c->slots = c->fresh;
			c->fresh = previous;
			c->slot_count = pair.slots < c->slot_room ? pair.slots : c->slot_room;
			c->pair = pair;
			c->steered = true;
		}
	}
	open_missing(c);
	apply(c);
}

static bool usable(const struct comm *c, const struct lane *l)
{
	return lane_carries(l) && l->share && (!l->suspect || c->all_suspect);
}

struct lane *shares_next(struct comm *c, uint32_t length, int64_t *total)
{
	struct lane *best = NULL;
	int64_t most = 0;
	*total = 0;
	c->all_suspect = true;
	for (int i = 0; i < c->lane_count; i++)
		c->all_suspect &= c->lanes[i]->suspect || !c->lanes[i]->share || !lane_carries(c->lanes[i]);
	for (int i = 0; i < c->lane_count; i++) {
		struct lane *l = c->lanes[i];
		if (!usable(c, l))
			continue;
		int64_t credit = l->credit + (int64_t)l->share * length;
		*total += (int64_t)l->share;
		if (!best || credit > most) {
			best = l;
			most = credit;
		}
	}
	return best;
}

void shares_deal(struct comm *c, struct lane *chosen, uint32_t length, int64_t total)
{
	for (int i = 0; i < c->lane_count; i++) {
		struct lane *l = c->lanes[i];
		if (usable(c, l))
			l->credit += (int64_t)l->share * length;
	}
	chosen->credit -= total * length;
}
