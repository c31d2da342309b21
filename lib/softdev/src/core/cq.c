#include "core.h"

#include <stdlib.h>

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
		sd_completion_event(cq);
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
