#include "core.h"

#include <string.h>

uint8_t *sd_mr_check(const struct sd_dev *dev, const struct ibv_pd *pd, uint32_t key, uint64_t address, uint64_t length, unsigned access)
{
	const struct sd_mr *mr = sd_table_get(&dev->mrs, key >> 8);
	if (!mr || mr->base.lkey != key || mr->base.pd != pd || (mr->access & access) != access)
		return NULL;
	if (address < mr->iova || length > mr->base.length || address - mr->iova > mr->base.length - length)
		return NULL;
	return (uint8_t *)mr->base.addr + (address - mr->iova);
}

int sd_gather(const struct sd_qp *qp, const struct sd_send *s, uint64_t offset, uint32_t length, struct sd_packet *packet)
{
	if (length == 0)
		return 0;
	if (s->flags & IBV_SEND_INLINE) {
		packet->payload[packet->pieces++] = (struct iovec){s->inlined + offset, length};
		packet->payload_size += length;
		return 0;
	}
	for (int i = 0; i < s->pieces && length > 0; i++) {
		const struct ibv_sge *sge = &s->sges[i];
		if (offset >= sge->length) {
			offset -= sge->length;
			continue;
		}
		uint32_t n = sge->length - (uint32_t)offset < length ? sge->length - (uint32_t)offset : length;
		uint8_t *p = sd_mr_check(qp->dev, qp->ex.qp_base.pd, sge->lkey, sge->addr + offset, n, 0);
		if (!p)
			return -1;
		packet->payload[packet->pieces++] = (struct iovec){p, n};
		packet->payload_size += n;
		length -= n;
		offset = 0;
	}
	return 0;
}

enum ibv_wc_status sd_scatter(const struct sd_dev *dev, const struct ibv_pd *pd, const struct sd_recv *r, uint64_t offset, const uint8_t *data, uint32_t length)
{
	for (int i = 0; i < r->pieces && length > 0; i++) {
		const struct ibv_sge *sge = &r->sges[i];
		if (offset >= sge->length) {
			offset -= sge->length;
			continue;
		}
		uint32_t n = sge->length - (uint32_t)offset < length ? sge->length - (uint32_t)offset : length;
		uint8_t *p = sd_mr_check(dev, pd, sge->lkey, sge->addr + offset, n, IBV_ACCESS_LOCAL_WRITE);
		if (!p)
			return IBV_WC_LOC_PROT_ERR;
		memcpy(p, data, n);
		data += n;
		length -= n;
		offset = 0;
	}
	return length == 0 ? IBV_WC_SUCCESS : IBV_WC_LOC_LEN_ERR;
}
