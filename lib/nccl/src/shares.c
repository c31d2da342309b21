/* The shares of lanes: those of their slots' sub-ports in the slot table. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"

#define WHOLE 1000000000u

bool shares_carries(const struct lane *lane)
{
	return lane->state == LANE_READY && !lane->ended && (!lane->comm->verbs || qpair_up(lane->pair));
}

void shares_release(struct lane *lane)
{
	if (lane->comm->verbs && lane->sent.first)
		qpair_release(lane);
	struct sender *out = &lane->comm->sender;
	struct list *lists[] = {&lane->sent, &lane->queue};
	for (int i = 0; i < 2; i++) {
		for (struct stripe *s; (s = lists[i]->first);) {
			list_remove(s);
			list_add(&out->again, s);
			out->repeated += i == 0 ? s->length : 0;
		}
	}
}

void shares_open_failed(struct comm *c, bool refused)
{
	c->sender.refused = refused;
	c->sender.open_again = engine.now + (10 * MILLISECOND << (c->sender.open_failures < 7 ? c->sender.open_failures : 7));
	c->sender.open_failures++;
}

/* share_of returns the share of a sub-port, that of its slots. */
static uint64_t share_of(const struct comm *c, uint16_t plane, uint16_t sub_port, bool any_plane)
{
	uint64_t sum = 0;
	for (uint32_t i = 0; i < c->sender.deal.n; i++) {
		const struct fared_slot *s = &c->sender.deal.slots[i];
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

/* report_missing reports a sub-port without a lane, once: connections to the same port hold the source ports of all its
 * slots. The other lanes carry its share. */
static void report_missing(struct comm *c)
{
	for (uint32_t i = 0; i < c->sender.deal.n && !c->sender.ports_taken && engine.now >= c->sender.open_again; i++) {
		const struct fared_slot *s = &c->sender.deal.slots[i];
		if (!s->share_ppb || lanes_of(c, s->plane, s->sub_port))
			continue;
		c->sender.ports_taken = true;
		WARN("plane %s is not used: the source ports of its slots are taken, or waiting to be free again (TIME_WAIT)",
			fared_plane_name(engine.table, s->plane));
	}
}

/* open_missing opens the lanes that sub-ports lack, each from a separate slot. Communicators begin at different slots,
 * so that their flows differ. */
static void open_missing(struct comm *c)
{
	if (c->closed_at || c->peer_closed || engine.now < c->sender.open_again)
		return;
	if (!c->sender.steered) {
		if (!c->lane_count && !lane_open(c, -1))
			shares_open_failed(c, false);
		return;
	}
	uint32_t offset = 0;
	memcpy(&offset, c->hello.connection, sizeof offset);
	for (uint32_t n = 0; n < c->sender.deal.n && c->lane_count < MAX_LANES; n++) {
		uint32_t i = (n + offset % c->sender.deal.n) % c->sender.deal.n;
		const struct fared_slot *s = &c->sender.deal.slots[i];
		bool used = (uint32_t)lanes_of(c, s->plane, s->sub_port) >= settings.lanes;
		for (int k = 0; k < c->lane_count; k++)
			used |= c->lanes[k]->slot == (int)i;
		if (!used && !lane_open(c, (int)i) && errno != EADDRINUSE && errno != EADDRNOTAVAIL)
			shares_open_failed(c, false);
	}
	report_missing(c);
}

/* apply sets the shares of lanes. A lane whose slot is parked or elsewhere gives up its stripes. */
static void apply(struct comm *c)
{
	bool any = c->device->plane == ALL_PLANES;
	if (!any) {
		uint64_t sum = 0;
		for (uint32_t i = 0; i < c->sender.deal.n; i++)
			sum += c->sender.deal.slots[i].plane == c->device->plane ? c->sender.deal.slots[i].share_ppb : 0;
		any = sum == 0; /* the device's plane has no capacity: all others carry its traffic */
	}
	for (int i = 0; i < c->lane_count; i++) {
		struct lane *l = c->lanes[i];
		uint64_t share = WHOLE; /* of a lane without a slot */
		if (l->slot >= 0) {
			int slot = deal_find(&c->sender.deal, l->slot, l->port);
			const struct fared_slot *s = slot < 0 ? NULL : &c->sender.deal.slots[slot];
			l->retired |= !s;
			l->slot = s ? slot : l->slot;
			if (s && (l->plane != s->plane || l->sub_port != s->sub_port)) {
				l->plane = s->plane;
				l->sub_port = s->sub_port;
				if (c->verbs)
					qpair_release(l); /* the slot may be another device's now */
			}
		} else {
			l->retired |= c->sender.steered; /* the pair has slots now */
		}
		if (l->retired)
			share = 0;
		else if (l->slot >= 0)
			share = share_of(c, l->plane, l->sub_port, any) / (uint64_t)lanes_of(c, l->plane, l->sub_port);
		if (share && settings.equal)
			share = WHOLE;
		l->share = (uint32_t)share;
		if (!share)
			shares_release(l);
	}
}

void shares_follow(struct comm *c)
{
	/* After an error the last shares stay. */
	if (engine.table && !fared_is_current(engine.table, &c->sender.deal.pair))
		c->sender.steered |= deal_read(&c->sender.deal, engine.table, &c->source, &c->sender.destination);
	open_missing(c);
	apply(c);
}

struct lane *shares_next(struct comm *c, uint32_t length)
{
	uint32_t shares[MAX_LANES] = {0};
	c->sender.all_suspect = true;
	for (int i = 0; i < c->lane_count; i++)
		c->sender.all_suspect &= c->lanes[i]->suspect || !c->lanes[i]->share || !shares_carries(c->lanes[i]);
	for (int i = 0; i < c->lane_count; i++) {
		const struct lane *l = c->lanes[i];
		shares[i] = shares_carries(l) && (!l->suspect || c->sender.all_suspect) ? l->share : 0;
		c->sender.credit[i] = l->credit;
	}
	int chosen = deal_turn(shares, 1, (uint32_t)c->lane_count, length, c->sender.credit);
	return chosen < 0 ? NULL : c->lanes[chosen];
}

void shares_deal(struct comm *c)
{
	for (int i = 0; i < c->lane_count; i++)
		c->lanes[i]->credit = c->sender.credit[i];
}
