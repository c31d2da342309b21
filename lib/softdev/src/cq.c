#include "core.h"

#include "guard.h"

#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* sd_cq_push never drops a completion: a queue that the program has made too small grows. */
void sd_cq_push(struct sd_cq *cq, const struct ibv_wc *wc, bool solicited)
{
	if (cq->count == cq->size) {
		struct ibv_wc *ring = malloc(2 * (size_t)cq->size * sizeof *ring);
		if (!ring)
			abort(); /* a lost completion would block the program forever */
		for (uint32_t i = 0; i < cq->count; i++)
			ring[i] = cq->ring[(cq->head + i) % cq->size];
		free(cq->ring);
		cq->ring = ring;
		cq->head = 0;
		cq->size *= 2;
	}
	cq->ring[(cq->head + cq->count++) % cq->size] = *wc;
	if (cq->armed == 1 || (cq->armed == 2 && (solicited || wc->status != IBV_WC_SUCCESS))) {
		cq->armed = 0;
		cq->dev->armed--;
		if (cq->base.channel)
			sd_events_add(&((struct sd_channel *)cq->base.channel)->events, cq, SD_COMPLETION_EVENT);
	}
}

int sd_cq_take(struct sd_cq *cq, int n, struct ibv_wc *wc)
{
	int i = 0;
	for (; i < n && cq->count > 0; i++, cq->count--) {
		wc[i] = cq->ring[cq->head];
		cq->head = (cq->head + 1) % cq->size;
	}
	return i;
}

void sd_cq_forget(struct sd_cq *cq, uint32_t qpn)
{
	uint32_t kept = 0;
	for (uint32_t i = 0; i < cq->count; i++) {
		const struct ibv_wc *wc = &cq->ring[(cq->head + i) % cq->size];
		if (wc->qp_num != qpn)
			cq->ring[(cq->head + kept++) % cq->size] = *wc;
	}
	cq->count = kept;
}

int sd_events_open(struct sd_events *e)
{
	e->head = NULL;
	e->tail = &e->head;
	e->fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
	return e->fd < 0 ? errno : 0;
}

void sd_events_close(struct sd_events *e)
{
	sd_events_remove(e, NULL);
	close(e->fd);
}

void sd_events_add(struct sd_events *e, void *object, int type)
{
	struct sd_event *event = malloc(sizeof *event);
	if (!event)
		abort(); /* a lost event would block the program forever */
	*event = (struct sd_event){.object = object, .type = type};
	*e->tail = event;
	e->tail = &event->next;
	uint64_t one = 1;
	if (write(e->fd, &one, sizeof one) < 0)
		return; /* the counter is at its maximum: readers do not wait */
}

void sd_events_remove(struct sd_events *e, const void *object)
{
	struct sd_event **at = &e->head;
	while (*at) {
		struct sd_event *event = *at;
		if (object && event->object != object) {
			at = &event->next;
			continue;
		}
		*at = event->next;
		free(event);
	}
	e->tail = at;
}

int sd_events_take(struct sd_events *e, pthread_mutex_t *lock, struct sd_event *out)
{
	for (;;) {
		uint64_t one;
		if (read(e->fd, &one, sizeof one) < 0)
			return errno;
		guard_lock(lock);
		struct sd_event *event = e->head;
		if (event) {
			*out = *event;
			e->head = event->next;
			if (event->type == SD_COMPLETION_EVENT)
				((struct sd_cq *)event->object)->delivered++;
			if (!e->head)
				e->tail = &e->head;
		}
		guard_unlock(lock);
		free(event);
		if (event)
			return 0; /* otherwise the event was removed with its object */
	}
}
