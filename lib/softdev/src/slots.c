#include "core.h"

#include "fared.h"

#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_SLOTS = 4096, FIRST_PORT = 49152, PORT_MASK = 0x3fff };
#define OPEN_INTERVAL 1000000000ull

/* The slots of a pair of addresses, and the paths on them. */
struct sd_pair {
	struct sd_pair *next;
	struct fared_address source, destination;
	struct fared_pair state;
	struct fared_slot *slots;
	uint32_t count;
	uint32_t *users; /* paths on each slot */
	struct sd_path *paths;
};

struct sd_slots {
	struct fared_table *table;
	char *path;
	int stale;    /* the last result of fared_check, or why no table could be opened */
	int reported; /* the one that sd_slots_report has printed; only its thread uses it */
	struct sd_pair *pairs;
	uint64_t next_open;
};

/* follow_file opens the table for RoCEv2, or continues with the file at its path. That there is none is no fault, except where none can appear. */
static void follow_file(struct sd_slots *s)
{
	static const struct fared_service roce = {.protocol = IPPROTO_UDP, .port = SD_UDP_PORT};
	if (s->table) {
		fared_refresh(s->table);
		s->stale = fared_check(s->table);
	} else {
		s->stale = fared_open_service(&s->table, s->path, &roce);
		if (s->stale != FARED_E_DELETED)
			s->stale = 0;
	}
}

struct sd_slots *sd_slots_open(void)
{
	const char *path = getenv("FARED_SLOTS");
	struct sd_slots *s = calloc(1, sizeof *s);
	if (!s)
		return NULL;
	s->path = strdup(path && *path ? path : FARED_DEFAULT_PATH);
	if (!s->path) {
		free(s);
		return NULL;
	}
	follow_file(s);
	return s;
}

int sd_slots_stale(const struct sd_dev *dev)
{
	return dev->slots ? dev->slots->stale : 0;
}

void sd_slots_report(struct sd_dev *dev, int stale)
{
	struct sd_slots *s = dev->slots;
	struct pollfd out = {.fd = STDERR_FILENO, .events = POLLOUT};
	if (!s || stale == s->reported || poll(&out, 1, 0) != 1)
		return;
	/* Not by stdio: another thread may have its lock and be blocked. */
	dprintf(STDERR_FILENO, "fared_soft0: %s: %s\n", s->path, stale ? fared_error_text(stale) : "the slot table is maintained again");
	s->reported = stale;
}

static void free_pair(struct sd_pair *p)
{
	free(p->slots);
	free(p->users);
	free(p);
}

void sd_slots_close(struct sd_slots *s)
{
	if (!s)
		return;
	while (s->pairs) {
		struct sd_pair *p = s->pairs;
		s->pairs = p->next;
		free_pair(p);
	}
	fared_close(s->table);
	free(s->path);
	free(s);
}

/* read_pair reads the pair's slots; slots beyond the previous number begin without paths. Returns false if the table has none, or cannot be read now. */
static bool read_pair(struct sd_slots *s, struct sd_pair *p)
{
	static struct fared_slot slots[MAX_SLOTS];
	struct fared_pair state;
	if (fared_lookup(s->table, &p->source, &p->destination, &state, slots, MAX_SLOTS) != 0 || state.slots == 0 || state.slots > MAX_SLOTS)
		return false;
	if (state.slots > p->count) {
		struct fared_slot *room = realloc(p->slots, state.slots * sizeof *room);
		if (room)
			p->slots = room;
		uint32_t *users = realloc(p->users, state.slots * sizeof *users);
		if (users)
			p->users = users;
		if (!room || !users)
			return false;
		memset(p->users + p->count, 0, (state.slots - p->count) * sizeof *users);
		p->count = state.slots;
	}
	for (uint32_t i = state.slots; i < p->count; i++)
		p->slots[i].share_ppb = 0; /* the slot is gone */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wanalyzer-null-argument" /* slots is NULL only while count is 0 */
	memcpy(p->slots, slots, state.slots * sizeof *slots);
#pragma GCC diagnostic pop
	p->state = state;
	return true;
}

/* load returns the paths and the share of a slot's plane. */
static void load(const struct sd_pair *p, uint32_t slot, uint64_t *users, uint64_t *share)
{
	*users = *share = 0;
	for (uint32_t i = 0; i < p->count; i++)
		if (p->slots[i].plane == p->slots[slot].plane) {
			*users += p->users[i];
			*share += p->slots[i].share_ppb;
		}
}

/* choose returns the slot for another path: on the plane with the fewest paths for its share, and there the slot with the fewest for its share. Returns
 * p->count if every share is 0. */
static uint32_t choose(const struct sd_pair *p)
{
	uint32_t best = p->count;
	uint64_t best_users = 0, best_share = 0;
	for (uint32_t i = 0; i < p->count; i++) {
		uint64_t users, share;
		const struct fared_slot *s = &p->slots[i];
		if (s->share_ppb == 0)
			continue;
		load(p, i, &users, &share);
		uint64_t a = (users + 1) * best_share, b = (best_users + 1) * share;
		bool better = best == p->count || a < b;
		if (best < p->count && a == b) {
			const struct fared_slot *t = &p->slots[best];
			better = (p->users[i] + 1ull) * t->share_ppb < (p->users[best] + 1ull) * s->share_ppb;
		}
		if (better) {
			best = i;
			best_users = users;
			best_share = share;
		}
	}
	return best;
}

static struct sd_pair *find_pair(struct sd_slots *s, const struct sd_flow *flow)
{
	struct sd_pair *p;
	for (p = s->pairs; p; p = p->next)
		if (memcmp(&p->source, &flow->source, 16) == 0 && memcmp(&p->destination, &flow->destination, 16) == 0)
			return p;
	p = calloc(1, sizeof *p);
	if (!p)
		return NULL;
	memcpy(&p->source, &flow->source, 16);
	memcpy(&p->destination, &flow->destination, 16);
	if (!read_pair(s, p)) {
		free_pair(p);
		return NULL;
	}
	p->next = s->pairs;
	s->pairs = p;
	return p;
}

int sd_slots_join(struct sd_dev *dev, struct sd_path *path, uint32_t seed)
{
	struct sd_pair *p = dev->slots && dev->slots->table ? find_pair(dev->slots, &path->flow) : NULL;
	uint32_t slot = p ? choose(p) : 0;
	if (p && slot < p->count) {
		path->flow.source_port = p->slots[slot].source_port;
		int err = dev->link->open(dev->link, path);
		if (err)
			return err;
		path->pair = p;
		path->slot = slot;
		p->users[slot]++;
		path->next = p->paths;
		p->paths = path;
		return 0;
	}
	/* Fibonacci hashing spreads consecutive numbers of queue pairs over the ports. */
	path->flow.source_port = (uint16_t)(FIRST_PORT + ((seed * 2654435769u >> 16) & PORT_MASK));
	return dev->link->open(dev->link, path);
}

void sd_slots_leave(struct sd_dev *dev, struct sd_path *path)
{
	struct sd_pair *p = path->pair;
	if (p) {
		struct sd_path **at = &p->paths;
		while (*at != path)
			at = &(*at)->next;
		*at = path->next;
		p->users[path->slot]--;
		path->pair = NULL;
	}
	dev->link->close(dev->link, path);
}

/* move gives a path another slot, or its slot's new port. The path keeps its port if the new one cannot be opened. */
static void move(struct sd_dev *dev, struct sd_path *path, uint32_t slot)
{
	struct sd_pair *p = path->pair;
	struct sd_path old = *path;
	p->users[path->slot]--;
	path->flow.source_port = p->slots[slot].source_port;
	path->slot = slot;
	if (dev->link->open(dev->link, path) != 0) {
		*path = old;
		p->users[path->slot]++;
		return;
	}
	p->users[slot]++;
	dev->link->close(dev->link, &old);
	dev->counters.moved++;
	if (path->qp)
		sd_requester_moved(path->qp);
}

/* rebalance moves the paths whose slot is parked or has another port, and those on planes with too many paths for the new shares. */
static void rebalance(struct sd_dev *dev, struct sd_pair *p)
{
	for (struct sd_path *path = p->paths; path; path = path->next) {
		const struct fared_slot *s = &p->slots[path->slot];
		uint64_t users, share, best_users, best_share;
		p->users[path->slot]--;
		uint32_t best = choose(p);
		p->users[path->slot]++;
		if (best == p->count)
			return; /* no plane has capacity: stay until there is one */
		load(p, path->slot, &users, &share);
		load(p, best, &best_users, &best_share);
		bool overloaded = s->plane != p->slots[best].plane && (best_users + 1) * share < users * best_share;
		if (s->share_ppb == 0 || overloaded)
			move(dev, path, best);
		else if (s->source_port != path->flow.source_port)
			move(dev, path, path->slot);
	}
}

void sd_slots_follow(struct sd_dev *dev)
{
	struct sd_slots *s = dev->slots;
	if (!s)
		return;
	if (dev->now >= s->next_open) {
		s->next_open = dev->now + OPEN_INTERVAL;
		follow_file(s);
	}
	for (struct sd_pair *p = s->pairs; p; p = p->next)
		if (p->paths && !fared_is_current(s->table, &p->state) && read_pair(s, p))
			rebalance(dev, p);
}
