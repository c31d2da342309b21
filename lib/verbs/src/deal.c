#include "deal.h"

#include <stdbool.h>

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

static void sum(struct planes *p, const struct deal_slot *slots, uint32_t n)
{
	*p = (struct planes){0};
	for (uint32_t i = 0; i < n; i++) {
		struct part *part = &p->part[slots[i].plane];
		part->share += slots[i].share;
		part->count += slots[i].count;
		p->all.share += slots[i].share;
		p->all.count += slots[i].count;
		if (slots[i].plane >= p->end)
			p->end = slots[i].plane + 1;
	}
}

/* The entries with the least and the greatest excess, and these: count minus share of all queue pairs, times the share of all. -1: no entry. */
struct extremes {
	int least, greatest;
	int64_t low, high;
};

static void consider(struct extremes *e, int entry, struct part part, struct part all)
{
	int64_t excess = part.count * all.share - all.count * part.share;
	if (part.share && (e->least < 0 || excess < e->low)) {
		e->least = entry;
		e->low = excess;
	}
	if (part.count && (e->greatest < 0 || excess > e->high)) {
		e->greatest = entry;
		e->high = excess;
	}
}

static struct extremes of_planes(const struct planes *p, struct part all)
{
	struct extremes e = {.least = -1, .greatest = -1};
	for (int i = 0; i < p->end; i++)
		consider(&e, i, p->part[i], all);
	return e;
}

/* The extremes of a plane's slots, whose counts are in count. */
static struct extremes of_slots(const struct deal_slot *slots, uint32_t n, const uint32_t *count, int plane, struct part all)
{
	struct extremes e = {.least = -1, .greatest = -1};
	for (uint32_t i = 0; i < n; i++) {
		if (slots[i].plane == plane)
			consider(&e, (int)i, (struct part){slots[i].share, count ? count[i] : slots[i].count}, all);
	}
	return e;
}

int deal_next(const struct deal_slot *slots, uint32_t n, int first)
{
	struct planes p;
	sum(&p, slots, n);
	if (!p.all.share)
		return -1;
	if (!p.all.count && first >= 0 && (uint32_t)first < n && slots[first].share)
		return first;
	p.all.count++;
	int plane = of_planes(&p, p.all).least;
	p.part[plane].count++;
	return of_slots(slots, n, 0, plane, p.part[plane]).least;
}

/* Returns whether the move of one queue pair from the greatest to the least reduces the sum of the squared differences. */
static bool improves(struct extremes e, struct part all)
{
	return e.least >= 0 && e.greatest >= 0 && e.least != e.greatest && e.high - e.low > all.share + TOLERANCE * all.count;
}

/* Moves queue pairs between planes. */
static void level_planes(struct planes *p, const struct deal_slot *slots, uint32_t n, uint32_t *want)
{
	for (;;) {
		struct extremes e = of_planes(p, p->all);
		if (!improves(e, p->all))
			return;
		struct part *from = &p->part[e.greatest], *to = &p->part[e.least];
		from->count--;
		to->count++;
		want[of_slots(slots, n, want, e.greatest, *from).greatest]--;
		want[of_slots(slots, n, want, e.least, *to).least]++;
	}
}

void deal_targets(const struct deal_slot *slots, uint32_t n, uint32_t *want)
{
	struct planes p;
	sum(&p, slots, n);
	for (uint32_t i = 0; i < n; i++)
		want[i] = slots[i].count;
	if (!p.all.share)
		return;
	level_planes(&p, slots, n, want);
	for (int plane = 0; plane < p.end; plane++) {
		for (;;) {
			struct extremes e = of_slots(slots, n, want, plane, p.part[plane]);
			if (!improves(e, p.part[plane]))
				break;
			want[e.greatest]--;
			want[e.least]++;
		}
	}
}
