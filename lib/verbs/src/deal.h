/* Numbers of queue pairs on planes and slots, without state. */
#ifndef FARED_VERBS_DEAL_H
#define FARED_VERBS_DEAL_H

#include <stdint.h>

/* Number of planes: the slot table has 8 bits for a plane. */
#define DEAL_PLANES 256

struct deal_slot {
	uint32_t share; /* parts per billion; 0: no queue pair belongs here */
	uint32_t count; /* queue pairs that are here */
	uint8_t plane;
};

/* Returns the slot for one more queue pair: in the plane with the largest deficit (share of all queue pairs minus count), the slot with the largest deficit
 * in the plane. The first queue pair has the slot first, so that many processes with one queue pair each follow the shares together. Returns -1 if every
 * share is 0. */
int deal_next(const struct deal_slot *slots, uint32_t n, int first);

/* Sets want[i] to the number of queue pairs that slot i must have. The sum of the squared differences between the planes' counts and their shares is least,
 * and the same holds for the slots of each plane. Among such results this one moves the fewest queue pairs. If every share is 0, want equals the counts. */
void deal_targets(const struct deal_slot *slots, uint32_t n, uint32_t *want);

#endif
