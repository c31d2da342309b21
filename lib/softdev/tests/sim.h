/* Two software devices on a simulated wire in virtual time: it drops, duplicates, delays and reorders packets. This
 * file replaces device.c, gid.c and port.c of the device. */
#ifndef SIM_H
#define SIM_H

#include "device/device.h"
#include "device/port.h"
#include "device/slots.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct flying {
	uint64_t at, number;
	int to;
	struct sd_flow flow;
	uint8_t tos;
	size_t n;
	uint8_t *data;
};

static struct sim {
	struct sd_dev dev[2];
	struct sd_context context[2];
	struct ibv_device device;
	struct sd_link link[2];
	uint64_t now, random;
	struct flying *heap;
	size_t count, room;
	uint32_t loss, copies, late, marked; /* per 10,000 packets */
	uint64_t delay, jitter;              /* ns */
	uint64_t packets, lost;
} sim;

static inline uint32_t rnd(uint32_t below)
{
	sim.random = sim.random * 6364136223846793005u + 1442695040888963407u;
	return below ? (uint32_t)((sim.random >> 33) % below) : 0;
}

static bool earlier(const struct flying *a, const struct flying *b)
{
	return a->at != b->at ? a->at < b->at : a->number < b->number;
}

static void sift(void)
{
	for (size_t i = sim.count - 1; i > 0 && earlier(&sim.heap[i], &sim.heap[(i - 1) / 2]); i = (i - 1) / 2) {
		struct flying f = sim.heap[i];
		sim.heap[i] = sim.heap[(i - 1) / 2];
		sim.heap[(i - 1) / 2] = f;
	}
}

static void fly(const struct flying *f)
{
	if (sim.count == sim.room) {
		sim.room = sim.room ? 2 * sim.room : 1024;
		sim.heap = realloc(sim.heap, sim.room * sizeof *sim.heap);
	}
	sim.heap[sim.count++] = *f;
	sift();
}

static struct flying land(void)
{
	struct flying first = sim.heap[0];
	sim.heap[0] = sim.heap[--sim.count];
	for (size_t i = 0, child; (child = 2 * i + 1) < sim.count; i = child) {
		if (child + 1 < sim.count && earlier(&sim.heap[child + 1], &sim.heap[child]))
			child++;
		if (earlier(&sim.heap[i], &sim.heap[child]))
			break;
		struct flying f = sim.heap[i];
		sim.heap[i] = sim.heap[child];
		sim.heap[child] = f;
	}
	return first;
}

static int sim_open(struct sd_link *link, struct sd_path *path)
{
	path->socket = link;
	return 0;
}
static void sim_close(struct sd_link *link, struct sd_path *path)
{
	(void)link;
	path->socket = NULL;
}
static void sim_flush(struct sd_link *link)
{
	(void)link;
}
static uint64_t sim_now(struct sd_link *link)
{
	(void)link;
	return sim.now;
}

static void sim_send(struct sd_link *link, const struct sd_path *path, const struct sd_packet *p)
{
	size_t n = (p->header_size + p->payload_size + 3) / 4 * 4 + SD_ICRC_SIZE, at = p->header_size;
	int to = link == &sim.link[0];
	sim.packets++;
	for (uint32_t copies = rnd(10000) < sim.copies ? 2 : 1; copies > 0; copies--) {
		if (rnd(10000) < sim.loss) {
			sim.lost++;
			continue;
		}
		uint8_t *b = calloc(1, n);
		if (!b)
			abort();
		memcpy(b, p->header, p->header_size);
		at = p->header_size;
		for (int i = 0; i < p->pieces; i++) {
			memcpy(b + at, p->payload[i].iov_base, p->payload[i].iov_len);
			at += p->payload[i].iov_len;
		}
		/* The headers have at least 12 bytes; a sender's identification is any. */
		uint32_t crc = sd_icrc(&path->flow, b, n, (uint16_t)rnd(65536));
		memcpy(b + n - SD_ICRC_SIZE, &crc, SD_ICRC_SIZE);
		struct flying f = {.at = sim.now + sim.delay + rnd((uint32_t)sim.jitter),
			.to = to,
			.flow = path->flow,
			.tos = path->tos,
			.number = sim.packets,
			.n = n,
			.data = b};
		if (rnd(10000) < sim.late)
			f.at += 100 * sim.delay;
		if (rnd(10000) < sim.marked)
			f.tos |= 3;
		fly(&f);
	}
}

/* step delivers the next packet or runs the next timer. Returns false if nothing is due ever. */
static bool sim_step(void)
{
	int timer = sim.dev[1].next_timer < sim.dev[0].next_timer;
	uint64_t t = sim.dev[timer].next_timer;
	if (sim.count > 0 && sim.heap[0].at <= t) {
		struct flying f = land();
		sim.now = f.at > sim.now ? f.at : sim.now;
		sd_enter(&sim.dev[f.to]);
		sd_input(&sim.dev[f.to], &f.flow, f.tos, (uint16_t)f.number, f.data, f.n);
		sd_leave(&sim.dev[f.to]);
		free(f.data);
		return true;
	}
	if (t == UINT64_MAX)
		return false;
	sim.now = t > sim.now ? t : sim.now;
	sd_enter(&sim.dev[timer]);
	sd_timers(&sim.dev[timer]);
	sd_leave(&sim.dev[timer]);
	return true;
}

static void sim_init(uint64_t seed)
{
	sim.random = seed;
	sim.delay = 10000;
	sim.jitter = 1000;
	for (int i = 0; i < 2; i++) {
		sim.link[i] = (struct sd_link){sim_open, sim_close, sim_send, sim_flush, sim_now};
		sim.dev[i].link = &sim.link[i];
		sim.dev[i].next_timer = UINT64_MAX;
		sim.context[i].dev = &sim.dev[i];
		sd_events_open(&sim.context[i].async);
		struct ibv_context *c = &sim.context[i].verbs.context;
		c->device = &sim.device;
		c->num_comp_vectors = 1;
		c->abi_compat = __VERBS_ABI_IS_EXTENDED;
		c->ops.poll_cq = sd_poll_cq;
		c->ops.post_send = sd_post_send;
		c->ops.post_recv = sd_post_recv;
		c->ops.post_srq_recv = sd_post_srq_recv;
		c->ops.req_notify_cq = sd_req_notify_cq;
	}
}

static void sim_end(void)
{
	while (sim.count > 0)
		free(land().data);
	free(sim.heap);
	for (int i = 0; i < 2; i++) {
		sd_events_close(&sim.context[i].async);
		free(sim.dev[i].mrs.objects);
		free(sim.dev[i].qps.objects);
	}
}

/* The functions of device.c, gid.c and port.c. */
pthread_mutex_t sd_lock = PTHREAD_MUTEX_INITIALIZER;
void sd_enter(struct sd_dev *dev)
{
	pthread_mutex_lock(&sd_lock);
	dev->now = sim.now;
}
void sd_leave(struct sd_dev *dev)
{
	while (sd_run(dev))
		;
	pthread_mutex_unlock(&sd_lock);
}
void sd_awaits_event(struct sd_dev *dev)
{
	(void)dev;
}
int sd_listen(struct sd_dev *dev, uint32_t gid_index)
{
	(void)dev, (void)gid_index;
	return 0;
}
int sd_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
	return sd_cq_take((struct sd_cq *)cq, n, wc);
}
static const struct in6_addr sim_gids[2] = {
	{{{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1}}},
	{{{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2}}},
};
const struct in6_addr *sd_gid(uint32_t index)
{
	return index < 2 ? &sim_gids[index] : NULL;
}
int sd_resolve(const struct ibv_ah_attr *attr, struct sd_path *path)
{
	path->flow.source = sim_gids[attr->grh.sgid_index];
	memcpy(&path->flow.destination, &attr->grh.dgid, 16);
	path->flow.destination_port = SD_UDP_PORT;
	path->tos = 2;
	return 0;
}
uint32_t sd_port_mtu(const struct in6_addr *source, const struct in6_addr *destination)
{
	(void)source, (void)destination;
	return 9000;
}
uint32_t sd_payload_mtu(uint32_t link_mtu, bool v4)
{
	(void)v4;
	return link_mtu > 4200 ? 4096 : 1024;
}

#endif
