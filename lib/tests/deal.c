/* Deals and moves queue pairs in every small way, and compares with a search over all distributions. */
#include "../src/deal.h"

#include "check.h"
#include <string.h>

#define SLOTS 4
#define UNIT 100000000u /* of shares */

/* Planes of the slots; in the first layout each has one slot. */
static const uint16_t layouts[][SLOTS] = {{0, 1, 2, 3}, {0, 0, 1, 1}, {0, 1, 0, 0}, {2, 1, 0, 2}, {0, 0, 0, 0}};
static const uint32_t weights[] = {0, 1, 3};
static struct fared_slot slots[SLOTS];
static struct deal_count counts[SLOTS];
static struct deal d = {.n = SLOTS, .slots = slots, .counts = counts};

/* A distribution of queue pairs: its differences from the shares, which are squared, and the queue pairs that come to a
 * slot. */
struct result {
	int64_t on_plane[SLOTS], planes, slots[SLOTS], moves;
};

static int64_t square(int64_t n)
{
	return n * n;
}

static struct result judge(const uint32_t *count)
{
	struct result r = {0};
	int64_t share[SLOTS] = {0}, shares = 0, all = 0;
	for (int i = 0; i < SLOTS; i++) {
		share[slots[i].plane] += slots[i].share_ppb / UNIT;
		shares += slots[i].share_ppb / UNIT;
		r.on_plane[slots[i].plane] += count[i];
		all += count[i];
		r.moves += count[i] > counts[i].now ? count[i] - counts[i].now : 0;
	}
	for (int i = 0; i < SLOTS; i++) {
		int plane = slots[i].plane;
		r.planes += square(r.on_plane[i] * shares - all * share[i]);
		r.slots[plane] += square(count[i] * share[plane] - r.on_plane[plane] * (slots[i].share_ppb / UNIT));
	}
	return r;
}

/* Requires that no other distribution is closer to the shares of planes; or closer to those of a plane's slots, or as
 * close with fewer moves, with as many queue pairs on each plane. With one slot a plane, the last holds for any
 * other. */
static void compare(const struct result *got, const struct result *other, bool single)
{
	CHECK(other->planes >= got->planes);
	if (other->planes > got->planes || (!single && memcmp(other->on_plane, got->on_plane, sizeof got->on_plane)))
		return;
	bool equal = true;
	for (int i = 0; i < SLOTS && !single; i++) {
		CHECK(other->slots[i] >= got->slots[i]);
		equal &= other->slots[i] == got->slots[i];
	}
	CHECK(!equal || other->moves >= got->moves);
}

static void check_targets(bool single)
{
	uint32_t want[SLOTS], c[SLOTS], all = d.unplaced, total = 0;
	deal_targets(&d);
	for (int i = 0; i < SLOTS; i++) {
		all += counts[i].now;
		total += want[i] = counts[i].want;
		CHECK(slots[i].share_ppb || !want[i]);
	}
	CHECK(total == all);
	struct result got = judge(want);
	for (c[0] = 0; c[0] <= all; c[0]++)
		for (c[1] = 0; c[0] + c[1] <= all; c[1]++)
			for (c[2] = 0; c[0] + c[1] + c[2] <= all; c[2]++) {
				c[3] = all - c[0] - c[1] - c[2];
				bool parked = false;
				for (int i = 0; i < SLOTS; i++)
					parked |= !slots[i].share_ppb && c[i];
				struct result other = judge(c);
				if (!parked)
					compare(&got, &other, single);
			}
}

/* Moves the queue pairs one after another: to reach the targets, as many move as must. */
static void check_moves(void)
{
	uint32_t moves = 0, least = d.unplaced;
	for (int i = 0; i < SLOTS; i++)
		least += counts[i].now > counts[i].want ? counts[i].now - counts[i].want : 0;
	for (int from = -1; from < SLOTS; from++)
		for (uint32_t here = *deal_at(&d, from); here; here--) {
			int to = deal_move(&d, from);
			if (to < 0)
				continue;
			--*deal_at(&d, from);
			++*deal_at(&d, to);
			moves++;
		}
	CHECK(moves == least && !d.unplaced);
	for (int i = 0; i < SLOTS; i++)
		CHECK(counts[i].now == counts[i].want);
	deal_targets(&d);
	for (int i = 0; i < SLOTS; i++)
		CHECK(counts[i].now == counts[i].want);
}

/* Moves up to 10 queue pairs of any distribution to any shares. */
static void targets(size_t layout)
{
	for (int s = 1; s < 81; s++)
		for (int n = 0; n < 81 * 3; n++) {
			d.unplaced = (uint32_t)(n / 81);
			for (int i = 0, x = s, y = n; i < SLOTS; i++, x /= 3, y /= 3) {
				slots[i].plane = layouts[layout][i];
				slots[i].share_ppb = weights[x % 3] * UNIT;
				counts[i].now = (uint32_t)(y % 3);
			}
			check_targets(layout == 0);
			check_moves();
		}
}

/* Deals queue pairs by any shares: they are exact for planes after every period, and none is on a slot without
 * share. */
static void next(size_t layout)
{
	d.unplaced = 0;
	for (int s = 0; s < 81; s++) {
		uint32_t weight[SLOTS] = {0}, on[SLOTS] = {0}, total = 0;
		for (int i = 0, x = s; i < SLOTS; i++, x /= 3) {
			counts[i].now = 0;
			slots[i].plane = layouts[layout][i];
			slots[i].share_ppb = weights[x % 3] * UNIT;
			weight[slots[i].plane] += weights[x % 3];
			total += weights[x % 3];
		}
		for (uint32_t k = 1; k <= 2 * total; k++) {
			int first = s % (SLOTS + 1) - 1, slot = deal_next(&d, first);
			CHECK(slot >= 0 && slots[slot].share_ppb && (k > 1 || first < 0 || !slots[first].share_ppb || slot == first));
			++*deal_at(&d, slot);
			on[slots[slot].plane]++;
			for (int p = 0; p < SLOTS; p++)
				CHECK(k % total || on[p] == k / total * weight[p]);
		}
		CHECK(total || (deal_next(&d, 1) == -1 && deal_next(&d, -1) == -1));
	}
}

/* No queue pair moves for rounded shares, or where no slot has a share. */
static void stay(void)
{
	for (int n = 0; n < 3 * 3 * 3 * 3 * 2; n++) {
		for (int i = 0, x = n; i < SLOTS; i++, x /= 3) {
			slots[i].plane = layouts[n % 2][i];
			slots[i].share_ppb = n < 81 ? (uint32_t)(250000000 + x % 3 - 1) : 0;
			counts[i].now = n < 81 ? 1000 : (uint32_t)(x % 3);
		}
		counts[n % SLOTS].now++; /* one slot has the odd one, whichever has the part more */
		d.unplaced = n < 81 ? 0 : 2;
		deal_targets(&d);
		for (int i = -1; i < SLOTS; i++)
			CHECK(deal_move(&d, i) == -1);
	}
}

/* A queue pair belongs to the slot with its port. */
static void ports(void)
{
	for (int i = 0; i < SLOTS; i++)
		slots[i].source_port = (uint16_t)(50000 + i % 3);
	CHECK(deal_find(&d, 3, 50000) == 3 && deal_find(&d, -1, 50000) == 0 && deal_find(&d, 9, 50000) == 0);
	CHECK(deal_find(&d, 3, 50002) == 2 && deal_find(&d, 3, 50003) == -1 && deal_find(&d, -1, 0) == -1);
}

/* Turns of other amounts are exact, too, and an amount of 0 has a turn that changes nothing. */
static void turns(void)
{
	const uint32_t shares[] = {5, 9, 0, 9, 3, 9, 2}; /* every second one */
	int64_t credit[4] = {0}, sent[4] = {0}, all = 0;
	for (uint32_t k = 1; k <= 1000; k++) {
		uint32_t amount = k % 4 ? k * k % 1000 : 0;
		int64_t before[4];
		memcpy(before, credit, sizeof credit);
		int i = deal_turn(shares, 2, 4, amount, credit);
		CHECK(i >= 0 && i != 1 && (amount || !memcmp(before, credit, sizeof credit)));
		sent[i] += amount;
		all += amount;
		for (int n = 0; n < 4; n++)
			CHECK(llabs(10 * sent[n] - all * shares[2 * n]) < 10 * 4 * 1000);
	}
	CHECK(deal_turn(shares + 2, 2, 1, 7, credit) == -1 && credit[0] == 0 && deal_turn(shares, 2, 0, 7, credit) == -1);
}

int main(void)
{
	for (size_t layout = 0; layout < sizeof layouts / sizeof *layouts; layout++) {
		targets(layout);
		next(layout);
	}
	stay();
	ports();
	turns();
	return 0;
}
