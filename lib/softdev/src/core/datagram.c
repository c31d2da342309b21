#include "core.h"

#include <stdlib.h>
#include <string.h>

/* sd_datagram_run sends all posted datagrams and completes them. */
void sd_datagram_run(struct sd_qp *qp)
{
	struct sd_requester *r = &qp->rq_out;
	if (qp->attr.qp_state != IBV_QPS_RTS)
		return;
	while (r->count > 0) {
		struct sd_send *s = &r->ring[r->head];
		struct sd_packet packet = {.pieces = 0};
		struct ibv_wc wc = {.wr_id = s->wr_id, .opcode = IBV_WC_SEND, .qp_num = qp->ex.qp_base.qp_num, .byte_len = s->length};
		if (sd_gather(qp, s, 0, s->length, &packet) != 0) {
			wc.status = IBV_WC_LOC_PROT_ERR;
		} else {
			struct sd_header h = {.opcode = s->opcode == IBV_WR_SEND_WITH_IMM ? SD_UD_SEND_IMM : SD_UD_SEND, .qpn = s->remote_qpn, .imm = s->imm};
			/* A queue key with its highest bit set stands for that of the queue pair (section 3.5.3). */
			h.qkey = s->remote_qkey & 1u << 31 ? qp->attr.qkey : s->remote_qkey;
			h.source_qpn = qp->ex.qp_base.qp_num;
			h.psn = (uint32_t)s->psn & 0xffffff;
			h.solicited = s->flags & IBV_SEND_SOLICITED;
			h.pad = (uint8_t)(-packet.payload_size & 3);
			packet.header_size = sd_encode(&h, packet.header);
			qp->dev->counters.sent++;
			qp->dev->link->send(qp->dev->link, &s->ah->path, &packet);
		}
		if (wc.status != IBV_WC_SUCCESS || qp->signal_all || (s->flags & IBV_SEND_SIGNALED))
			sd_cq_push((struct sd_cq *)qp->ex.qp_base.send_cq, &wc, false);
		r->head = (r->head + 1) % r->size;
		r->count--;
	}
}

/* put_grh writes the 40 bytes before a datagram: a GRH over IPv6, and the IPv4 header in the latter half otherwise
 * (annex A17). */
static void put_grh(uint8_t *b, const struct sd_flow *flow, uint8_t tos, uint32_t length)
{
	uint16_t udp = (uint16_t)(8 + length);
	memset(b, 0, SD_GRH_SIZE);
	if (!sd_is_ipv4(&flow->source)) {
		b[0] = (uint8_t)(0x60 | tos >> 4), b[1] = (uint8_t)(tos << 4);
		b[4] = (uint8_t)(udp >> 8), b[5] = (uint8_t)udp;
		b[6] = IPPROTO_UDP, b[7] = 64;
		memcpy(b + 8, &flow->source, 16);
		memcpy(b + 24, &flow->destination, 16);
		return;
	}
	uint8_t *ip = b + 20;
	uint16_t total = (uint16_t)(20 + udp);
	ip[0] = 0x45, ip[1] = tos;
	ip[2] = (uint8_t)(total >> 8), ip[3] = (uint8_t)total;
	ip[6] = 0x40, ip[8] = 64, ip[9] = IPPROTO_UDP;
	memcpy(ip + 12, &flow->source.s6_addr[12], 4);
	memcpy(ip + 16, &flow->destination.s6_addr[12], 4);
	uint32_t sum = 0;
	for (int i = 0; i < 20; i += 2)
		sum += (uint32_t)(ip[i] << 8 | ip[i + 1]);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = ~((sum & 0xffff) + (sum >> 16));
	ip[10] = (uint8_t)(sum >> 8), ip[11] = (uint8_t)sum;
}

void sd_datagram_receive(struct sd_qp *qp, const struct sd_flow *flow, uint8_t tos, const struct sd_header *h, const uint8_t *payload, uint32_t length)
{
	if (qp->attr.qp_state != IBV_QPS_RTR && qp->attr.qp_state != IBV_QPS_RTS)
		return;
	if (h->qkey != qp->attr.qkey || length > qp->mtu) {
		qp->dev->counters.malformed++;
		return;
	}
	struct sd_recv *to = &qp->rp.recv;
	if (!sd_rq_take(qp, to))
		return; /* as on a NIC, a datagram without a receive is dropped */
	uint8_t grh[SD_GRH_SIZE];
	put_grh(grh, flow, tos, length);
	struct ibv_wc wc = {
		.wr_id = to->wr_id, .opcode = IBV_WC_RECV, .byte_len = length + SD_GRH_SIZE, .qp_num = qp->ex.qp_base.qp_num, .src_qp = h->source_qpn};
	wc.wc_flags = IBV_WC_GRH;
	/* The type of the network header, in the form of mlx5's driver; UCX reads it: 8 for UDP, and 1 for IPv6 or 2 for
	 * IPv4. */
	wc.sl = sd_is_ipv4(&flow->source) ? 8 | 2 : 8 | 1;
	if (h->opcode == SD_UD_SEND_IMM) {
		wc.wc_flags |= IBV_WC_WITH_IMM;
		wc.imm_data = h->imm;
	}
	wc.status = sd_scatter(qp->dev, qp->ex.qp_base.pd, to, 0, grh, SD_GRH_SIZE);
	if (wc.status == IBV_WC_SUCCESS)
		wc.status = sd_scatter(qp->dev, qp->ex.qp_base.pd, to, SD_GRH_SIZE, payload, length);
	sd_cq_push((struct sd_cq *)qp->ex.qp_base.recv_cq, &wc, h->solicited);
	if (wc.status != IBV_WC_SUCCESS)
		sd_qp_error(qp);
}
