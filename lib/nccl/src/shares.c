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
	for (uint32_t i = 0; i < c->deal.n; i++) {
		const struct fared_slot *s = &c->deal.slots[i];
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
	for (uint32_t i = 0; i < c->deal.n && !c->ports_taken && engine.now >= c->open_again; i++) {
		const struct fared_slot *s = &c->deal.slots[i];
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
	for (uint32_t n = 0; n < c->deal.n && c->lane_count < MAX_LANES; n++) {
		uint32_t i = (n + offset % c->deal.n) % c->deal.n;
		const struct fared_slot *s = &c->deal.slots[i];
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
		for (uint32_t i = 0; i < c->deal.n; i++)
			sum += c->deal.slots[i].plane == c->device->plane ? c->deal.slots[i].share_ppb : 0;
		any = sum == 0; /* the device's plane has no capacity: all others carry its traffic */
	}
	for (int i = 0; i < c->lane_count; i++) {
		struct lane *l = c->lanes[i];
		uint64_t share = WHOLE; /* of a lane without a slot */
		if (l->slot >= 0) {
			int slot = deal_find(&c->deal, l->slot, l->port);
			const struct fared_slot *s = slot < 0 ? NULL : &c->deal.slots[slot];
			l->retired |= !s;
			l->slot = s ? slot : l->slot;
			if (s && (l->plane != s->plane || l->sub_port != s->sub_port)) {
				l->plane = s->plane;
				l->sub_port = s->sub_port;
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
		l->share = (uint32_t)share;
		if (!share)
			lane_release(l);
	}
}

void shares_follow(struct comm *c)
{
	/* After an error the last shares stay. */
	if (engine.table && !fared_is_current(engine.table, &c->deal.pair))
		c->steered |= deal_read(&c->deal, engine.table, &c->source, &c->destination);
	open_missing(c);
	apply(c);
}

struct lane *shares_next(struct comm *c, uint32_t length)
{
	uint32_t shares[MAX_LANES] = {0};
	c->all_suspect = true;
	for (int i = 0; i < c->lane_count; i++)
		c->all_suspect &= c->lanes[i]->suspect || !c->lanes[i]->share || !lane_carries(c->lanes[i]);
	for (int i = 0; i < c->lane_count; i++) {
		const struct lane *l = c->lanes[i];
		shares[i] = lane_carries(l) && (!l->suspect || c->all_suspect) ? l->share : 0;
		c->credit[i] = l->credit;
	}
	int chosen = deal_turn(shares, 1, (uint32_t)c->lane_count, length, c->credit);
	return chosen < 0 ? NULL : c->lanes[chosen];
}

void shares_deal(struct comm *c)
{
	for (int i = 0; i < c->lane_count; i++)
		c->lanes[i]->credit = c->credit[i];
}
