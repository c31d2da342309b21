#include "deal.h"

#include <stdlib.h>

/* Shares are rounded to one part per billion, those of planes are sums of such shares: smaller differences are none. */
#define TOLERANCE 4

/* A slot, a plane, or all planes. */
struct part {
	int64_t share, count;
};

struct planes {
	struct part part[DEAL_PLANES], all;
	int end; /* greatest plane plus 1 */
};

bool deal_read(struct deal *d, const struct fared_table *table, const struct fared_address *source, const struct fared_address *destination)
{
	struct fared_status status;
	struct deal next = {0};
	if (fared_get_status(table, &status) == 0) {
		next.slots = calloc(status.max_slots, sizeof *next.slots);
		next.counts = calloc(status.max_slots, sizeof *next.counts);
	}
	bool read = next.slots && next.counts && !fared_lookup(table, source, destination, &next.pair, next.slots, status.max_slots) && next.pair.slots;
	next.n = next.pair.slots;
	deal_free(read ? d : &next);
	if (read)
		*d = next;
	return read;
}

void deal_free(struct deal *d)
{
	free(d->slots);
	free(d->counts);
	*d = (struct deal){0};
}

int deal_find(const struct deal *d, int slot, uint16_t port)
{
	if (slot >= 0 && (uint32_t)slot < d->n && d->slots[slot].source_port == port)
		return slot;
	for (uint32_t i = 0; i < d->n; i++)
		if (d->slots[i].source_port == port)
			return (int)i;
	return -1;
}

uint32_t *deal_at(struct deal *d, int slot)
{
	return slot < 0 ? &d->unplaced : &d->counts[slot].now;
}

static void sum(struct planes *p, struct deal *d)
{
	*p = (struct planes){.all.count = d->unplaced};
	for (uint32_t i = 0; i < d->n; i++) {
		int plane = d->slots[i].plane % DEAL_PLANES;
		p->part[plane].share += d->slots[i].share_ppb;
		p->part[plane].count += d->counts[i].now;
		p->all.share += d->slots[i].share_ppb;
		p->all.count += d->counts[i].now;
		d->counts[i].want = d->counts[i].now;
		if (plane >= p->end)
			p->end = plane + 1;
	}
}

/* The entries with the least and the greatest excess, and these: count minus share of all queue pairs, times the share
 * of all. -1: no entry. */
struct extremes {
	int least, greatest;
	int64_t low, high;
};

static void consider(struct extremes *e, int entry, struct part part, struct part all)
{
	int64_t excess = part.count * all.share - all.count * part.share;
	if ((part.share || part.count < 0) && (e->least < 0 || excess < e->low)) {
		e->least = entry;
		e->low = excess;
	}
	if (part.count > 0 && (e->greatest < 0 || excess > e->high)) {
		e->greatest = entry;
		e->high = excess;
	}
}

/* The extremes of the planes. The entry behind them has the queue pairs that are on none. */
static struct extremes of_planes(const struct planes *p)
{
	struct extremes e = {.least = -1, .greatest = -1};
	struct part rest = {.count = p->all.count};
	for (int i = 0; i < p->end; i++) {
		consider(&e, i, p->part[i], p->all);
		rest.count -= p->part[i].count;
	}
	consider(&e, p->end, rest, p->all);
	return e;
}

/* The extremes of a plane's slots. The entry behind them has the queue pairs of the plane that are on none, or below 0,
 * those that have to leave it. */
static struct extremes of_slots(const struct planes *p, const struct deal *d, int plane)
{
	struct extremes e = {.least = -1, .greatest = -1};
	struct part rest = {.count = p->part[plane].count};
	for (uint32_t i = 0; i < d->n; i++) {
		if (d->slots[i].plane % DEAL_PLANES != plane)
			continue;
		consider(&e, (int)i, (struct part){d->slots[i].share_ppb, d->counts[i].want}, p->part[plane]);
		rest.count -= d->counts[i].want;
	}
	consider(&e, (int)d->n, rest, p->part[plane]);
	return e;
}

int deal_next(struct deal *d, int first)
{
	struct planes p;
	sum(&p, d);
	if (!p.all.share)
		return -1;
	if (!p.all.count && first >= 0 && (uint32_t)first < d->n && d->slots[first].share_ppb)
		return first;
	p.all.count++;
	int plane = of_planes(&p).least;
	p.part[plane].count++;
	return of_slots(&p, d, plane).least;
}

/* Returns whether the move of one queue pair from the greatest to the least reduces the sum of the squared
 * differences. */
static bool improves(struct extremes e, struct part all)
{
	return e.least >= 0 && e.greatest >= 0 && e.least != e.greatest && e.high - e.low > all.share + TOLERANCE * all.count;
}

void deal_targets(struct deal *d)
{
	struct planes p;
	struct extremes e;
	sum(&p, d);
	while (improves(e = of_planes(&p), p.all)) {
		if (e.greatest < p.end)
			p.part[e.greatest].count--;
		p.part[e.least].count++;
	}
	for (uint32_t i = 0; i < d->n; i++)
		if (!p.part[d->slots[i].plane % DEAL_PLANES].count)
			d->counts[i].want = 0;
	for (int plane = 0; plane < p.end; plane++) {
		while (improves(e = of_slots(&p, d, plane), p.part[plane])) {
			if ((uint32_t)e.greatest < d->n)
				d->counts[e.greatest].want--;
			if ((uint32_t)e.least < d->n)
				d->counts[e.least].want++;
		}
	}
}

int deal_move(const struct deal *d, int slot)
{
	if (slot >= 0 && d->counts[slot].now <= d->counts[slot].want)
		return -1;
	for (uint32_t i = 0; i < d->n; i++)
		if (d->counts[i].now < d->counts[i].want)
			return (int)i;
	return -1;
}
