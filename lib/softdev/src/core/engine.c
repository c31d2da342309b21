#include "core.h"

#include <string.h>

/* Least time between two CNPs of a queue pair, as in DCQCN (Zhu et al., SIGCOMM 2015). */
#define CNP_INTERVAL 50000

enum { ECN_MASK = 3, ECN_CE = 3 };

void sd_dirty(struct sd_qp *qp)
{
	if (qp->in_dirty)
		return;
	qp->in_dirty = true;
	qp->next_dirty = qp->dev->dirty;
	qp->dev->dirty = qp;
}

void sd_emit(struct sd_qp *qp, const struct sd_header *h, struct sd_packet *packet)
{
	struct sd_header copy = *h;
	copy.qpn = qp->attr.dest_qp_num;
	copy.pad = (uint8_t)(-packet->payload_size & 3);
	packet->header_size = sd_encode(&copy, packet->header);
	qp->dev->counters.sent++;
	qp->dev->link->send(qp->dev->link, &qp->path, packet);
}

/* send_cnp notifies the peer of congestion (annex A17, section A17.9.3). */
static void send_cnp(struct sd_qp *qp)
{
	static uint8_t reserved[16];
	struct sd_dev *dev = qp->dev;
	dev->counters.congestion_marks++;
	if (qp->rp.cnp_at && dev->now - qp->rp.cnp_at < CNP_INTERVAL)
		return;
	qp->rp.cnp_at = dev->now;
	struct sd_packet packet = {.payload = {{reserved, sizeof reserved}}, .pieces = 1, .payload_size = sizeof reserved};
	sd_emit(qp, &(struct sd_header){.opcode = SD_CNP, .becn = true}, &packet);
	dev->counters.cnps_sent++;
}

static bool is_response(uint8_t opcode)
{
	return opcode >= SD_READ_FIRST && opcode <= SD_ATOMIC_ACK;
}

void sd_input(struct sd_dev *dev, const struct sd_flow *flow, uint8_t tos, uint16_t id, uint8_t *p, size_t n)
{
	struct sd_header h;
	dev->counters.received++;
	size_t header = n <= SD_MAX_DATAGRAM ? sd_decode(p, n, &h) : 0;
	if (header == 0) {
		dev->counters.malformed++;
		return;
	}
	if (!sd_icrc_check(flow, p, n, &id)) {
		dev->counters.bad_icrc++;
		return;
	}
	struct sd_qp *qp = sd_find_qp(dev, h.qpn);
	if (!qp) {
		dev->counters.unknown_qp++;
		return;
	}
	const uint8_t *payload = p + header;
	uint32_t length = (uint32_t)(n - header - SD_ICRC_SIZE - h.pad);
	bool datagram = h.opcode == SD_UD_SEND || h.opcode == SD_UD_SEND_IMM;
	if (datagram != (qp->ex.qp_base.qp_type == IBV_QPT_UD)) {
		dev->counters.malformed++;
		return;
	}
	if (datagram) {
		sd_datagram_receive(qp, flow, tos, &h, payload, length);
		return;
	}
	if (!qp->open || memcmp(&flow->source, &qp->path.flow.destination, sizeof flow->source) != 0) {
		dev->counters.wrong_source++;
		return;
	}
	if (h.opcode == SD_CNP) {
		dev->counters.cnps_received++;
		sd_requester_congested(qp);
		return;
	}
	if ((tos & ECN_MASK) == ECN_CE)
		send_cnp(qp);
	if (is_response(h.opcode))
		sd_requester_receive(qp, &h, payload, length);
	else
		sd_responder_receive(qp, &h, payload, length);
	sd_dirty(qp);
}

bool sd_run(struct sd_dev *dev)
{
	struct sd_qp *list = dev->dirty;
	dev->dirty = NULL;
	while (list) {
		struct sd_qp *qp = list;
		list = qp->next_dirty;
		qp->in_dirty = false;
		if (qp->ex.qp_base.qp_type == IBV_QPT_UD) {
			sd_datagram_run(qp);
			continue;
		}
		/* An acknowledgement is shorter than a request, and so joins the batch of a request before it, but not of one
		 * after it. */
		bool single = qp->rq_out.end - qp->rq_out.next == 1;
		if (single)
			sd_requester_run(qp);
		sd_responder_run(qp);
		if (!single)
			sd_requester_run(qp);
	}
	dev->link->flush(dev->link);
	return dev->dirty != NULL;
}

void sd_timers(struct sd_dev *dev)
{
	dev->next_timer = UINT64_MAX;
	for (uint32_t i = 0; i < dev->qps.size; i++) {
		struct sd_qp *qp = dev->qps.objects[i];
		if (qp && qp->open && qp->ex.qp_base.qp_type == IBV_QPT_RC)
			sd_requester_timer(qp);
	}
}

void sd_qp_error(struct sd_qp *qp)
{
	if (qp->attr.qp_state == IBV_QPS_ERR)
		return;
	qp->attr.qp_state = qp->ex.qp_base.state = IBV_QPS_ERR;
	sd_requester_flush(qp);
	sd_rq_flush(qp);
	if (qp->ex.qp_base.srq)
		sd_async(qp, IBV_EVENT_QP_LAST_WQE_REACHED);
}
