#include "device.h"

#include "guard.h"

#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

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

static void add_event(struct sd_events *e, void *object, int type)
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

int sd_events_take(struct sd_events *e, struct sd_event *out)
{
	for (;;) {
		uint64_t one;
		if (read(e->fd, &one, sizeof one) < 0)
			return errno;
		guard_lock(&sd_lock);
		struct sd_event *event = e->head;
		if (event) {
			*out = *event;
			e->head = event->next;
			if (event->type == SD_COMPLETION_EVENT)
				((struct sd_cq *)event->object)->delivered++;
			if (!e->head)
				e->tail = &e->head;
		}
		guard_unlock(&sd_lock);
		free(event);
		if (event)
			return 0; /* otherwise the event was removed with its object */
	}
}

void sd_completion_event(struct sd_cq *cq)
{
	if (cq->base.channel)
		add_event(&((struct sd_channel *)cq->base.channel)->events, cq, SD_COMPLETION_EVENT);
}

void sd_async(struct sd_qp *qp, enum ibv_event_type type)
{
	void *object = type == IBV_EVENT_SRQ_LIMIT_REACHED ? (void *)qp->ex.qp_base.srq : qp;
	add_event(&sd_context_of(qp->ex.qp_base.context)->async, object, type);
}
