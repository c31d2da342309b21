#include "manage.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

pthread_mutex_t sd_ids_lock = PTHREAD_MUTEX_INITIALIZER, sd_opening_lock = PTHREAD_MUTEX_INITIALIZER;

struct manager {
	struct sd_management management;
	struct sd_cm cm;
	struct sd_dev *dev;
	uint32_t psn, seed;
};

static struct manager *manager_of(struct sd_cm *cm)
{
	return (struct manager *)((char *)cm - offsetof(struct manager, cm));
}

struct sd_dev *sd_managed(struct sd_cm *cm)
{
	return manager_of(cm)->dev;
}

/* send_message sends a message by the plane that the slot table gives. Each one, also when it is retransmitted, chooses again. */
static void send_message(struct sd_cm *cm, const struct in6_addr *from, const struct in6_addr *to, const uint8_t *message)
{
	struct manager *m = manager_of(cm);
	struct sd_path path = {.flow = {.source = *from, .destination = *to, .destination_port = SD_UDP_PORT}, .tos = 2 /* ECT(0) */};
	struct sd_header h = {.opcode = SD_UD_SEND, .qpn = SD_MANAGEMENT_QPN, .source_qpn = SD_MANAGEMENT_QPN, .qkey = (uint32_t)SD_MANAGEMENT_QKEY};
	h.psn = m->psn++ & 0xffffff;
	struct sd_packet packet = {.payload = {{(void *)(uintptr_t)message, SD_MAD_SIZE}}, .pieces = 1, .payload_size = SD_MAD_SIZE};
	if (sd_slots_join(m->dev, &path, ++m->seed) != 0)
		return; /* lost, as on a network: timers send it again */
	packet.header_size = sd_encode(&h, packet.header);
	m->dev->counters.sent++;
	m->dev->link->send(m->dev->link, &path, &packet);
	m->dev->link->flush(m->dev->link);
	sd_slots_leave(m->dev, &path);
}

void sd_manage_begin(struct sd_cm *cm)
{
	cm->now = manager_of(cm)->dev->now;
}

void sd_manage_end(struct sd_cm *cm)
{
	struct sd_dev *dev = manager_of(cm)->dev;
	if (cm->next_timer < dev->next_timer)
		dev->next_timer = cm->next_timer;
}

static void receive(struct sd_dev *dev, const struct sd_flow *flow, const uint8_t *payload, uint32_t length)
{
	struct sd_cm *cm = &((struct manager *)dev->management)->cm;
	sd_manage_begin(cm);
	sd_cm_input(cm, &flow->source, &flow->destination, payload, length);
	sd_manage_end(cm);
}

static void timers(struct sd_dev *dev)
{
	struct sd_cm *cm = &((struct manager *)dev->management)->cm;
	sd_manage_begin(cm);
	if (cm->next_timer <= cm->now)
		sd_cm_timers(cm);
	sd_manage_end(cm);
}

struct sd_cm *sd_manage(struct sd_dev *dev, int (*request)(struct sd_cm *, struct sd_cm_conn *),
	void (*event)(struct sd_cm *, struct sd_cm_conn *, enum sd_cm_event, int, const uint8_t *, size_t))
{
	if (dev->management)
		return &((struct manager *)dev->management)->cm;
	struct manager *m = calloc(1, sizeof *m);
	if (!m)
		return NULL;
	m->management = (struct sd_management){receive, timers};
	m->dev = dev;
	m->cm = (struct sd_cm){.next_timer = UINT64_MAX, .send = send_message, .request = request, .event = event};
	__be64 guid = softdev_get_device_guid(NULL);
	for (int i = 0; i < 8; i++)
		m->cm.guid = m->cm.guid << 8 | ((const uint8_t *)&guid)[i];
	/* Identifiers of an earlier process at this address must not return soon. */
	if (getrandom(&m->cm.next_id, sizeof m->cm.next_id, 0) != sizeof m->cm.next_id)
		m->cm.next_id = (uint32_t)dev->now;
	m->seed = m->psn = m->cm.next_id;
	dev->management = &m->management;
	return &m->cm;
}

void sd_unmanage(struct sd_dev *dev)
{
	struct manager *m = (struct manager *)dev->management;
	if (!m)
		return;
	sd_cm_close(&m->cm);
	dev->management = NULL;
	free(m);
}

void sd_manage_exit(struct sd_dev *dev)
{
	struct manager *m = (struct manager *)dev->management;
	for (struct sd_cm_conn *c = m ? m->cm.all : NULL; c; c = c->next)
		if (c->user)
			sd_cm_release(c);
}

const struct sd_cm_counters *sd_manage_counters(const struct sd_dev *dev)
{
	return dev->management ? &((const struct manager *)dev->management)->cm.counters : NULL;
}
