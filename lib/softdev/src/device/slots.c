#include "slots.h"

#include "deal.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FIRST_PORT = 49152, PORT_MASK = 0x3fff };
#define OPEN_INTERVAL 1000000000ull

/* The slots of a pair of addresses, and the paths on them. */
struct sd_pair {
	struct sd_pair *next;
	struct fared_address source, destination;
	struct deal deal;
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

/* follow_file opens the table for RoCEv2, or continues with the file at its path. That there is none is no fault,
 * except where none can appear. */
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

void sd_slots_close(struct sd_slots *s)
{
	if (!s)
		return;
	while (s->pairs) {
		struct sd_pair *p = s->pairs;
		s->pairs = p->next;
		deal_free(&p->deal);
		free(p);
	}
	fared_close(s->table);
	free(s->path);
	free(s);
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
	if (!deal_read(&p->deal, s->table, &p->source, &p->destination)) {
		free(p);
		return NULL;
	}
	p->next = s->pairs;
	s->pairs = p;
	return p;
}

int sd_slots_join(struct sd_dev *dev, struct sd_path *path, uint32_t seed)
{
	struct sd_pair *p = dev->slots && dev->slots->table ? find_pair(dev->slots, &path->flow) : NULL;
	int slot = p ? deal_next(&p->deal, -1) : -1;
	if (slot >= 0) {
		path->flow.source_port = p->deal.slots[slot].source_port;
		int err = dev->link->open(dev->link, path);
		if (err)
			return err;
		path->pair = p;
		path->slot = slot;
		++*deal_at(&p->deal, slot);
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
		--*deal_at(&p->deal, path->slot);
		path->pair = NULL;
	}
	dev->link->close(dev->link, path);
}

/* move gives a path another slot. The path keeps its port if the new one cannot be opened. */
static void move(struct sd_dev *dev, struct sd_path *path, int slot)
{
	struct deal *d = &path->pair->deal;
	struct sd_path old = *path;
	path->flow.source_port = d->slots[slot].source_port;
	path->slot = slot;
	if (dev->link->open(dev->link, path) != 0) {
		*path = old;
		return;
	}
	--*deal_at(d, old.slot);
	++*deal_at(d, slot);
	dev->link->close(dev->link, &old);
	dev->counters.moved++;
	if (path->qp)
		sd_requester_moved(path->qp);
}

/* rebalance moves the paths whose port no slot has, and those on slots with too many paths for the new shares. */
static void rebalance(struct sd_dev *dev, struct sd_pair *p)
{
	for (struct sd_path *path = p->paths; path; path = path->next)
		++*deal_at(&p->deal, path->slot = deal_find(&p->deal, path->slot, path->flow.source_port));
	deal_targets(&p->deal);
	for (struct sd_path *path = p->paths; path; path = path->next) {
		int slot = deal_move(&p->deal, path->slot);
		if (slot >= 0)
			move(dev, path, slot);
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
		if (p->paths && !fared_is_current(s->table, &p->deal.pair) && deal_read(&p->deal, s->table, &p->source, &p->destination))
			rebalance(dev, p);
}
