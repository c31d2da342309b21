/* Slots of a pair, and the queue pairs, paths or lanes on them, all of which are called queue pairs here. The C
 * libraries share it. */
#ifndef FARED_DEAL_H
#define FARED_DEAL_H

#include <fared.h>
#include <stdbool.h>

/* Number of planes: the slot table has 8 bits for a plane. */
#define DEAL_PLANES 256

/* Queue pairs that are on a slot, and those that must be there. */
struct deal_count {
	uint32_t now, want;
};

/* Zero at first: no slots. A slot whose share is 0 must have no queue pair. */
struct deal {
	struct fared_pair pair;
	uint32_t n, unplaced; /* slots; queue pairs that are on none, because none has their port */
	struct fared_slot *slots;
	struct deal_count *counts;
};

/* Reads the slots of a pair, without queue pairs. Returns false, and leaves the last slots, if the table does not have
 * the pair with at least one slot. */
bool deal_read(struct deal *d, const struct fared_table *table, const struct fared_address *source, const struct fared_address *destination);
void deal_free(struct deal *d);

/* Returns the slot of a queue pair that was on a slot, or on none, -1, and sends from a port: the same if that has the
 * port, else another one that has it. Returns -1 if none has. */
int deal_find(const struct deal *d, int slot, uint16_t port);
/* Returns the number of queue pairs that are on a slot, or on none, -1. The caller changes it when a queue pair comes
 * or goes. */
uint32_t *deal_at(struct deal *d, int slot);

/* Returns the slot for one more queue pair: in the plane with the largest deficit (share of all queue pairs minus
 * count), the slot with the largest deficit in the plane. The first queue pair has the slot first, so that many
 * processes with one queue pair each follow the shares together; -1: no such slot. Returns -1 if every share is 0. */
int deal_next(struct deal *d, int first);

/* Sets the number of queue pairs that each slot must have, also of those that are on none. The sum of the squared
 * differences between the planes' counts and their shares is least, and the same holds for the slots of each plane;
 * differences of a few parts per billion count as none. No other such result with as many queue pairs on each plane
 * moves fewer, and if every plane has one slot, no other at all. If every share is 0, all stay. */
void deal_targets(struct deal *d);

/* Returns the slot to which a queue pair moves from a slot, or from none, -1, after deal_targets. Returns -1 if it
 * stays. */
int deal_move(const struct deal *d, int slot);

/* Chooses by smooth weighted round robin: adds share × amount to each of n credits, and takes the sum of that from the
 * credit of the entry that it returns, the first one with the greatest. An entry without share loses its credit.
 * Returns -1 if every share is 0. stride is the distance of shares, in words of 32 bits. */
static inline int deal_turn(const uint32_t *shares, size_t stride, uint32_t n, uint32_t amount, int64_t *credit)
{
	int64_t total = 0;
	int best = -1;
	for (uint32_t i = 0; i < n; i++) {
		int64_t more = (int64_t)shares[i * stride] * amount;
		if (!shares[i * stride]) {
			credit[i] = 0;
			continue;
		}
		total += more;
		credit[i] += more;
		if (best < 0 || credit[i] > credit[best])
			best = (int)i;
	}
	if (best >= 0)
		credit[best] -= total;
	return best;
}

#endif
