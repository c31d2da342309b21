/* Changes of source ports. The only driver that can change one of a connected queue pair is mlx5, by a function of its library, which a program has loaded if it
 * has opened such a device. */
#include "slots.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>

typedef int (*set_port)(struct ibv_qp *qp, uint16_t port);

static _Atomic(set_port) mlx5_set_port;

void move_prepare(void)
{
	if (atomic_load_explicit(&mlx5_set_port, memory_order_acquire))
		return;
	void *library = dlopen("libmlx5.so.1", RTLD_LAZY | RTLD_NOLOAD);
	void *function = library ? dlsym(library, "mlx5dv_modify_qp_udp_sport") : NULL;
	/* The library stays loaded, because its function is in use from now on. */
	if (function)
		atomic_store_explicit(&mlx5_set_port, (set_port)function, memory_order_release);
	else if (library)
		dlclose(library);
}

/* Returns 0 or an errno value. */
static int change_port(struct queue_pair *q, uint16_t port)
{
	set_port function = atomic_load_explicit(&mlx5_set_port, memory_order_acquire);
	return function ? function(q->qp, port) : EOPNOTSUPP;
}

/* Moves a queue pair to a slot. Returns false if it has stayed. */
static bool move(struct queue_pair *q, int slot)
{
	struct set *s = q->set;
	struct device *d = s->key.device;
	if (!q->ready) {
		s->waiting = true;
		return false;
	}
	uint16_t port = s->slots[slot].source_port;
	int error = d->fixed ? EOPNOTSUPP : change_port(q, port);
	if (error == EOPNOTSUPP) {
		counters.unsupported++;
		if (!d->fixed)
			report(1, "%s cannot change the source port of a connected queue pair: queue pairs keep the plane that they have", d->name);
		d->fixed = true;
		return false;
	}
	if (error) {
		counters.failed++;
		report(1, "queue pair %u of %s: source port %u is refused: error %d", q->qp->qp_num, d->name, port, error);
		return false;
	}
	counters.moved++;
	report(2, "queue pair %u of %s: slot %d, plane %u, source port %u instead of %u", q->qp->qp_num, d->name, slot, s->deal[slot].plane, port, q->port);
	if (q->slot >= 0)
		s->deal[q->slot].count--;
	s->deal[slot].count++;
	q->slot = slot;
	q->port = port;
	return true;
}

/* Moves a queue pair from a slot that has too many to one that has too few. */
static void level(struct queue_pair *q)
{
	struct set *s = q->set;
	int from = q->slot;
	for (uint32_t to = 0; to < s->n; to++) {
		if (s->deal[to].count >= s->want[to])
			continue;
		/* Where no queue pair can move, one that should move stands for all that should. */
		if (!move(q, (int)to) && q->ready && s->key.device->fixed)
			s->want[from]++;
		return;
	}
}

bool move_set(struct set *s)
{
	if (!slots_load(s))
		return false;
	s->waiting = false;
	state.changed = true;
	for (struct queue_pair *q = s->members; q; q = q->next) {
		int slot = q->slot < 0 ? deal_next(s->deal, s->n, -1) : -1;
		if (slot >= 0)
			move(q, slot);
	}
	deal_targets(s->deal, s->n, s->want);
	for (struct queue_pair *q = s->members; q; q = q->next) {
		if (q->slot >= 0 && s->deal[q->slot].count > s->want[q->slot])
			level(q);
	}
	return true;
}
