/* The slots of queue pairs: which queue pair sends from which source port. One lock guards everything; sets, devices
 * and queue pairs are on the heap. */
#include "slots.h"

#include <errno.h>
#include <fared.h>
#include <netinet/in.h>
#include <pthread.h>
#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <time.h>
#include <unistd.h>

struct state state = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int by_qp(const void *a, const void *b)
{
	uintptr_t x = (uintptr_t)((const struct queue_pair *)a)->qp, y = (uintptr_t)((const struct queue_pair *)b)->qp;
	return (x > y) - (x < y);
}

static int by_key(const void *a, const void *b)
{
	return memcmp(&((const struct set *)a)->key, &((const struct set *)b)->key, sizeof(struct key));
}

static struct queue_pair *find(struct ibv_qp *qp)
{
	struct queue_pair key = {.qp = qp};
	void *node = tfind(&key, &state.queue_pairs, by_qp);
	return node ? *(struct queue_pair **)node : NULL;
}

int open_table(struct fared_table **table, const char *path)
{
	static const struct fared_service roce = {.protocol = IPPROTO_UDP, .port = 4791};
	return fared_open_service(table, path, &roce);
}

void report_stale(int now)
{
	if (now != state.stale)
		report(1, "%s: %s", state.path, now ? fared_error_text(now) : "the slot table is maintained again");
	state.stale = now;
}

/* Opens the slot table, or continues with the file that is now at its path. */
static bool table_ready(void)
{
	if (!state.path) {
		const char *path = getenv("FARED_SLOTS");
		state.path = strdup(path && *path ? path : FARED_DEFAULT_PATH);
	}
	if (state.table)
		return fared_refresh(state.table) != FARED_E_TRUNCATED;
	if (!state.path)
		return false;
	int error = open_table(&state.table, state.path);
	report_stale(error == FARED_E_DELETED ? error : 0); /* that there is none is no fault, except where none can appear */
	return !error;
}

static struct device *device_of(struct ibv_context *context, uint32_t port)
{
	for (struct device *d = state.devices; d; d = d->next) {
		if (d->port == port && strcmp(d->name, context->device->name) == 0)
			return d;
	}
	struct device *d = calloc(1, sizeof *d);
	if (d) {
		memcpy(d->name, context->device->name, sizeof d->name - 1);
		d->port = port;
		d->next = state.devices;
		state.devices = d;
	}
	return d;
}

static struct set *set_of(const struct key *key)
{
	struct set *s = calloc(1, sizeof *s);
	if (!s)
		return NULL;
	s->key = *key;
	void *node = tsearch(s, &state.by_key, by_key);
	if (!node || *(struct set **)node != s) {
		free(s);
		return node ? *(struct set **)node : NULL;
	}
	s->next = state.sets;
	state.sets = s;
	return s;
}

static void drop_if_empty(struct set *s)
{
	if (s->members)
		return;
	struct set **at = &state.sets;
	while (*at != s)
		at = &(*at)->next;
	*at = s->next;
	tdelete(s, &state.by_key, by_key);
	deal_free(&s->deal);
	free(s);
}

/* Takes a queue pair out of its set and frees it. */
static void release(struct queue_pair *q)
{
	struct set *s = q->set;
	struct queue_pair **at = &s->members;
	while (*at != q)
		at = &(*at)->next;
	*at = q->next;
	--*deal_at(&s->deal, q->slot);
	state.count--;
	state.changed = true;
	free(q);
	drop_if_empty(s);
}

static void forget(struct queue_pair *q)
{
	tdelete(q, &state.queue_pairs, by_qp);
	release(q);
}

/* The sub-ports that a port of a device sends by. */
struct reach {
	bool all; /* no sub-port names the device, as below a steering of the kernel */
	bool planes[DEAL_PLANES];
};

static bool serves(const struct set *s, uint32_t sub_port)
{
	struct fared_sub_port sp;
	return fared_get_sub_port(state.table, sub_port, &sp) == 0 && strcmp(sp.rdma_device, s->key.device->name) == 0 && sp.rdma_port == s->key.device->port;
}

static struct reach reach_of(const struct set *s, uint32_t sub_ports)
{
	struct reach r = {.all = true};
	for (uint32_t i = 0; i < sub_ports; i++) {
		struct fared_sub_port sp;
		if (fared_get_sub_port(state.table, i, &sp) || strcmp(sp.rdma_device, s->key.device->name))
			continue;
		r.all = false;
		r.planes[sp.plane % DEAL_PLANES] |= sp.rdma_port == s->key.device->port;
	}
	return r;
}

/* Returns whether queue pairs of a set can use a slot, parked or not. */
static bool usable(const struct set *s, const struct reach *r, const struct fared_slot *slot)
{
	if (slot->source_port < FIRST_PORT)
		return false;
	return r->all || (slot->sub_port == FARED_NO_SUB_PORT ? r->planes[slot->plane % DEAL_PLANES] : serves(s, slot->sub_port));
}

bool slots_load(struct set *s)
{
	struct fared_status status;
	struct deal *d = &s->deal;
	if (fared_get_status(state.table, &status) || !deal_read(d, state.table, &s->key.source, &s->key.destination))
		return false;
	struct reach r = reach_of(s, status.sub_ports);
	uint64_t sum = 0;
	for (uint32_t i = 0; i < d->n; i++) {
		if (!usable(s, &r, &d->slots[i]))
			d->slots[i].share_ppb = 0;
		sum += d->slots[i].share_ppb;
	}
	/* Without a plane that carries packets all are equal: packets arrive as soon as the queue pair's plane does so. */
	for (uint32_t i = 0; i < d->n && !sum; i++)
		d->slots[i].share_ppb = usable(s, &r, &d->slots[i]) ? 1000000 : 0;
	for (struct queue_pair *q = s->members; q; q = q->next)
		++*deal_at(d, q->slot = deal_find(d, q->slot, q->port));
	return true;
}

/* Returns the slot of the first queue pair of a set, which differs between processes and between destinations. */
static int first_slot(const struct set *s)
{
	uint64_t key = (uint64_t)getpid(), word;
	const void *random = (const void *)getauxval(AT_RANDOM);
	if (random) {
		memcpy(&word, random, sizeof word);
		key ^= word;
	}
	memcpy(&word, s->key.destination.bytes + 8, sizeof word);
	return fared_choose_key(s->deal.slots, s->deal.n, key ^ word * 0x9e3779b97f4a7c15u);
}

/* Gives a new queue pair a slot of a set. */
static struct queue_pair *deal(struct set *s, struct ibv_qp *qp)
{
	int slot = deal_next(&s->deal, first_slot(s));
	if (slot < 0) {
		counters.no_slot++;
		report(1, "queue pair %u of %s port %u: no slot that the device can use", qp->qp_num, s->key.device->name, s->key.device->port);
		return NULL;
	}
	struct queue_pair *q = calloc(1, sizeof *q);
	if (!q)
		return NULL;
	*q = (struct queue_pair){.qp = qp, .context = qp->context, .set = s, .slot = slot, .port = s->deal.slots[slot].source_port, .next = s->members};
	if (!tsearch(q, &state.queue_pairs, by_qp)) {
		free(q);
		return NULL;
	}
	s->members = q;
	++*deal_at(&s->deal, slot);
	counters.dealt++;
	state.dealt[s->deal.slots[slot].plane % DEAL_PLANES]++;
	state.count++;
	report(2, "queue pair %u of %s port %u: slot %d, plane %u, source port %u", qp->qp_num, s->key.device->name, s->key.device->port, slot,
		s->deal.slots[slot].plane, q->port);
	return q;
}

/* Returns the flow label by which the kernel's drivers choose a source port (rdma_flow_label_to_udp_sport). Label 0
 * means none, so the first port has another. */
uint32_t label_of(uint16_t port)
{
	return port == FIRST_PORT ? 1u << 14 | 1 : (uint32_t)port - FIRST_PORT;
}

/* Loads a set for a new queue pair, which would have no slot without it: a record that its writer was interrupted in
 * changing is read again for 10 ms. */
static bool load_new(struct set *s)
{
	const struct timespec pause = {.tv_nsec = 1000000};
	for (int attempt = 0; !move_set(s); attempt++) {
		struct fared_pair pair;
		if (attempt == 10 || fared_lookup(state.table, &s->key.source, &s->key.destination, &pair, NULL, 0) != FARED_E_BUSY)
			return false;
		nanosleep(&pause, NULL);
	}
	return true;
}

static uint32_t label(struct ibv_qp *qp, const struct ibv_qp_attr *attr, const union ibv_gid *source)
{
	struct key key = {.device = device_of(qp->context, attr->ah_attr.port_num)};
	memcpy(&key.source, source, sizeof key.source);
	memcpy(&key.destination, &attr->ah_attr.grh.dgid, sizeof key.destination);
	if (!key.device)
		return 0;
	struct queue_pair *q = find(qp);
	if (q && memcmp(&q->set->key, &key, sizeof key)) {
		forget(q);
		q = NULL;
	}
	if (q) {
		q->vector = attr->ah_attr;
		return label_of(q->port);
	}
	struct set *s = set_of(&key);
	if (!s)
		return 0;
	if (fared_is_current(state.table, &s->deal.pair) || load_new(s))
		q = deal(s, qp);
	else
		counters.no_pair++;
	if (q)
		q->vector = attr->ah_attr;
	uint32_t result = q ? label_of(q->port) : 0;
	drop_if_empty(s);
	return result;
}

uint32_t slots_label(struct ibv_qp *qp, const struct ibv_qp_attr *attr)
{
	union ibv_gid source;
	int reason = errno;
	uint32_t result = 0;
	watch_prepare();
	guard_lock(&state.lock);
	bool ready = table_ready();
	guard_unlock(&state.lock);
	/* Drivers may take the GID from the kernel: no thread waits for that, and none asks without a table. */
	if (ready && ibv_query_gid(qp->context, attr->ah_attr.port_num, attr->ah_attr.grh.sgid_index, &source) == 0) {
		guard_lock(&state.lock);
		state.changed = true;
		result = label(qp, attr, &source);
		if (result)
			watch_start();
		guard_unlock(&state.lock);
	}
	errno = reason;
	return result;
}

void slots_own_label(struct ibv_qp *qp)
{
	guard_lock(&state.lock);
	struct queue_pair *q = find(qp);
	if (q)
		forget(q);
	counters.own_label++;
	state.changed = true;
	guard_unlock(&state.lock);
}

void slots_changed(struct ibv_qp *qp, const struct ibv_qp_attr *attr, int mask, bool failed)
{
	int reason = errno;
	guard_lock(&state.lock);
	struct queue_pair *q = find(qp);
	if (q && (mask & IBV_QP_STATE)) {
		if (failed ? attr->qp_state == IBV_QPS_RTR : attr->qp_state == IBV_QPS_RESET) {
			forget(q);
		} else if (!failed) {
			q->ready = attr->qp_state == IBV_QPS_RTS;
			if (q->ready && (q->set->waiting || !fared_is_current(state.table, &q->set->deal.pair)))
				move_set(q->set);
		}
	}
	guard_unlock(&state.lock);
	errno = reason;
}

struct queue_pair *slots_take(struct ibv_qp *qp)
{
	guard_lock(&state.lock);
	struct queue_pair *q = find(qp);
	if (q) {
		/* The memory of a destroyed queue pair may become that of another one before slots_end. */
		tdelete(q, &state.queue_pairs, by_qp);
		q->was_ready = q->ready;
		q->ready = false;
	}
	guard_unlock(&state.lock);
	return q;
}

void slots_end(struct queue_pair *q, bool destroyed)
{
	if (!q)
		return;
	int reason = errno;
	guard_lock(&state.lock);
	if (destroyed) {
		release(q);
	} else if (tsearch(q, &state.queue_pairs, by_qp)) {
		q->ready = q->was_ready;
	}
	guard_unlock(&state.lock);
	errno = reason;
}

void slots_forget(struct ibv_context *context)
{
	int reason = errno;
	guard_lock(&state.lock);
	for (struct set *s = state.sets, *next_set; s; s = next_set) {
		next_set = s->next;
		for (struct queue_pair *q = s->members, *next; q; q = next) {
			next = q->next;
			if (q->context == context)
				forget(q);
		}
	}
	guard_unlock(&state.lock);
	errno = reason;
}
