/* Changes of source ports of connected queue pairs: for mlx5 by a function of its library, which a program has loaded
 * if it has opened such a device; for others by a new address vector, which the specification does not permit in RTS,
 * and a driver accepts (rdma_rxe of Linux 6.12) or refuses (rdma_rxe of 6.1). */
#include "slots.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>

typedef int (*set_port)(struct ibv_qp *qp, uint16_t port);
typedef bool (*is_supported)(struct ibv_device *device);

static _Atomic(set_port) mlx5_set_port;
static _Atomic(is_supported) is_mlx5;

void move_prepare(void)
{
	if (atomic_load_explicit(&is_mlx5, memory_order_acquire))
		return;
	void *library = dlopen("libmlx5.so.1", RTLD_LAZY | RTLD_NOLOAD);
	void *is = library ? dlsym(library, "mlx5dv_is_supported") : NULL;
	/* The library stays loaded, because its functions are in use from now on. */
	if (is) {
		atomic_store_explicit(&mlx5_set_port, (set_port)dlsym(library, "mlx5dv_modify_qp_udp_sport"), memory_order_release);
		atomic_store_explicit(&is_mlx5, (is_supported)is, memory_order_release);
	} else if (library) {
		dlclose(library);
	}
}

/* Sets the address vector with another flow label. A driver that refuses that does so in any state: only the refusal
 * for a queue pair in RTS is one for all. */
static int change_vector(struct queue_pair *q, uint16_t port)
{
	struct ibv_qp_attr attr = {.ah_attr = q->vector}, now;
	struct ibv_qp_init_attr init;
	attr.ah_attr.grh.flow_label = label_of(port);
	int error = next_modify_qp(q->qp, &attr, IBV_QP_AV);
	bool refused = error == EINVAL || error == ENOSYS;
	return refused && ibv_query_qp(q->qp, &now, IBV_QP_STATE, &init) == 0 && now.qp_state == IBV_QPS_RTS ? EOPNOTSUPP : error;
}

/* Returns 0 or an errno value. */
static int change_port(struct queue_pair *q, uint16_t port)
{
	is_supported is = atomic_load_explicit(&is_mlx5, memory_order_acquire);
	if (!is || !is(q->context->device))
		return change_vector(q, port);
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
	uint16_t port = s->deal.slots[slot].source_port;
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
	report(2, "queue pair %u of %s: slot %d, plane %u, source port %u instead of %u", q->qp->qp_num, d->name, slot, s->deal.slots[slot].plane, port,
		q->port);
	--*deal_at(&s->deal, q->slot);
	++*deal_at(&s->deal, slot);
	q->slot = slot;
	q->port = port;
	return true;
}

bool move_set(struct set *s)
{
	if (!slots_load(s))
		return false;
	s->waiting = false;
	state.changed = true;
	deal_targets(&s->deal);
	for (struct queue_pair *q = s->members; q; q = q->next) {
		int from = q->slot, to = deal_move(&s->deal, from);
		/* Where no queue pair can move, one that should move stands for all that should. */
		if (to >= 0 && !move(q, to) && from >= 0 && q->ready && s->key.device->fixed)
			s->deal.counts[from].want++;
	}
	return true;
}
