/* Deals and moves queue pairs at random, and compares with a search over all distributions. */
#include "../src/deal.h"

#include "../../tests/check.h"
#include <stdbool.h>
#include <string.h>

#define PLANES 4

static uint64_t seed = 7;

static uint32_t random_below(uint32_t n)
{
	seed = seed * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(seed >> 33) % n;
}

/* The sum of the squared differences between counts and shares, times the squared sum of the shares. */
static double distance(const int64_t *count, const int64_t *share, int64_t n, int64_t total)
{
	double sum = 0;
	for (int i = 0; i < PLANES; i++) {
		double d = (double)(count[i] * total - n * share[i]);
		sum += d * d;
	}
	return sum;
}

/* Finds the least distance over all distributions of n queue pairs, and among the best the least number of moves from before. */
static void search(const int64_t *share, const int64_t *before, int64_t n, int64_t total, double *best, int64_t *moves)
{
	*best = -1;
	for (int64_t a = 0; a <= n; a++)
		for (int64_t b = 0; a + b <= n; b++)
			for (int64_t c = 0; a + b + c <= n; c++) {
				int64_t count[PLANES] = {a, b, c, n - a - b - c}, m = 0;
				bool parked = false;
				for (int i = 0; i < PLANES; i++) {
					parked |= share[i] == 0 && count[i];
					m += count[i] > before[i] ? count[i] - before[i] : 0;
				}
				double d = distance(count, share, n, total);
				if (parked || (*best >= 0 && d > *best * (1 + 1e-9)))
					continue;
				if (*best < 0 || d < *best * (1 - 1e-9) || m < *moves) {
					*moves = m;
					*best = *best < 0 || d < *best ? d : *best;
				}
			}
}

static void check_targets(struct deal_slot *slots, uint32_t n)
{
	int64_t share[PLANES] = {0}, before[PLANES] = {0}, after[PLANES] = {0}, total = 0, all = 0, moves = 0, least = 0;
	uint32_t want[64];
	deal_targets(slots, n, want);
	for (uint32_t i = 0; i < n; i++) {
		share[slots[i].plane] += slots[i].share;
		before[slots[i].plane] += slots[i].count;
		after[slots[i].plane] += want[i];
		total += slots[i].share;
		all += slots[i].count;
		moves += want[i] > slots[i].count ? want[i] - slots[i].count : 0;
	}
	if (!total)
		return;
	for (uint32_t i = 0; i < n; i++)
		CHECK(slots[i].share || want[i] == 0);
	double best, got = distance(after, share, all, total);
	search(share, before, all, total, &best, &least);
	CHECK(got <= best * (1 + 1e-6) + 1);
	/* Slots of one plane are level as well: equal shares differ by at most one queue pair. */
	for (uint32_t i = 0; i < n; i++)
		for (uint32_t j = 0; j < n; j++)
			CHECK(slots[i].plane != slots[j].plane || slots[i].share != slots[j].share || !slots[i].share || want[i] <= want[j] + 1);
	/* With one slot a plane, no distribution that is as close needs fewer moves. */
	if (n == PLANES)
		CHECK(moves == least);
	for (uint32_t i = 0; i < n; i++)
		slots[i].count = want[i];
	deal_targets(slots, n, want);
	for (uint32_t i = 0; i < n; i++)
		CHECK(want[i] == slots[i].count);
}

int main(void)
{
	for (int round = 0; round < 3000; round++) {
		struct deal_slot slots[64];
		uint32_t n = PLANES * (round % 2 ? 1 : 1 + random_below(4)), weight[PLANES];
		for (int p = 0; p < PLANES; p++)
			weight[p] = random_below(4) ? 1 + random_below(8) : 0;
		memset(slots, 0, sizeof slots);
		for (uint32_t i = 0; i < n; i++) {
			slots[i].plane = (uint8_t)(i % PLANES);
			slots[i].share = weight[i % PLANES] * (60000000 / (n / PLANES));
		}
		bool any = weight[0] + weight[1] + weight[2] + weight[3] > 0;
		int first = (int)random_below(n), queue_pairs = (int)random_below(20);
		for (int k = 0; k < queue_pairs; k++) {
			int slot = deal_next(slots, n, first);
			CHECK((slot >= 0) == any);
			if (slot < 0)
				break;
			CHECK(slots[slot].share && (k || !slots[first].share || slot == first));
			slots[slot].count++;
			/* Every plane is within one queue pair of its share, the first one aside, which is by choice. */
			int64_t total = weight[0] + weight[1] + weight[2] + weight[3], count[PLANES] = {0};
			for (uint32_t i = 0; i < n; i++)
				count[slots[i].plane] += slots[i].count;
			for (int p = 0; p < PLANES; p++)
				CHECK((k + 1) % total || count[p] == (k + 1) / total * weight[p]);
		}
		for (int changes = 0; changes < 4; changes++) {
			for (uint32_t i = 0; i < n && changes; i++) {
				if (i < PLANES)
					weight[i] = random_below(3) ? 1 + random_below(8) : 0;
				slots[i].share = weight[i % PLANES] * (60000000 / (n / PLANES));
			}
			check_targets(slots, n);
		}
	}
	return 0;
}
