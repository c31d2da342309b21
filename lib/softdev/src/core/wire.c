#include "wire.h"

#include <string.h>

enum { BTH_SIZE = 12, FULL_MEMBER_PKEY = 0xffff };

static const uint16_t opcode_flags[256] = {
	[SD_SEND_FIRST] = SD_KNOWN | SD_PAYLOAD | SD_BEGIN,
	[SD_SEND_MIDDLE] = SD_KNOWN | SD_PAYLOAD,
	[SD_SEND_LAST] = SD_KNOWN | SD_PAYLOAD | SD_END,
	[SD_SEND_LAST_IMM] = SD_KNOWN | SD_PAYLOAD | SD_END | SD_IMM,
	[SD_SEND_ONLY] = SD_KNOWN | SD_PAYLOAD | SD_BEGIN | SD_END,
	[SD_SEND_ONLY_IMM] = SD_KNOWN | SD_PAYLOAD | SD_BEGIN | SD_END | SD_IMM,
	[SD_WRITE_FIRST] = SD_KNOWN | SD_PAYLOAD | SD_BEGIN | SD_RETH,
	[SD_WRITE_MIDDLE] = SD_KNOWN | SD_PAYLOAD,
	[SD_WRITE_LAST] = SD_KNOWN | SD_PAYLOAD | SD_END,
	[SD_WRITE_LAST_IMM] = SD_KNOWN | SD_PAYLOAD | SD_END | SD_IMM,
	[SD_WRITE_ONLY] = SD_KNOWN | SD_PAYLOAD | SD_BEGIN | SD_END | SD_RETH,
	[SD_WRITE_ONLY_IMM] = SD_KNOWN | SD_PAYLOAD | SD_BEGIN | SD_END | SD_RETH | SD_IMM,
	[SD_READ_REQUEST] = SD_KNOWN | SD_BEGIN | SD_END | SD_RETH,
	[SD_READ_FIRST] = SD_KNOWN | SD_PAYLOAD | SD_BEGIN | SD_AETH,
	[SD_READ_MIDDLE] = SD_KNOWN | SD_PAYLOAD,
	[SD_READ_LAST] = SD_KNOWN | SD_PAYLOAD | SD_END | SD_AETH,
	[SD_READ_ONLY] = SD_KNOWN | SD_PAYLOAD | SD_BEGIN | SD_END | SD_AETH,
	[SD_ACK] = SD_KNOWN | SD_AETH,
	[SD_ATOMIC_ACK] = SD_KNOWN | SD_AETH | SD_ATOMIC_ACK_ETH,
	[SD_COMPARE_SWAP] = SD_KNOWN | SD_BEGIN | SD_END | SD_ATOMIC_ETH,
	[SD_FETCH_ADD] = SD_KNOWN | SD_BEGIN | SD_END | SD_ATOMIC_ETH,
	[SD_SEND_LAST_INV] = SD_KNOWN | SD_PAYLOAD | SD_END | SD_IETH,
	[SD_SEND_ONLY_INV] = SD_KNOWN | SD_PAYLOAD | SD_BEGIN | SD_END | SD_IETH,
	[SD_UD_SEND] = SD_KNOWN | SD_PAYLOAD | SD_BEGIN | SD_END | SD_DETH,
	[SD_UD_SEND_IMM] = SD_KNOWN | SD_PAYLOAD | SD_BEGIN | SD_END | SD_DETH | SD_IMM,
	[SD_CNP] = SD_KNOWN | SD_PAYLOAD, /* 16 reserved bytes */
};

unsigned sd_opcode_flags(uint8_t opcode)
{
	return opcode_flags[opcode];
}

static uint8_t *put(uint8_t *p, uint64_t v, int bytes)
{
	for (int i = bytes - 1; i >= 0; i--, v >>= 8)
		p[i] = (uint8_t)v;
	return p + bytes;
}

static uint64_t get(const uint8_t **p, int bytes)
{
	uint64_t v = 0;
	for (int i = 0; i < bytes; i++)
		v = v << 8 | *(*p)++;
	return v;
}

size_t sd_encode(const struct sd_header *h, uint8_t *out)
{
	unsigned flags = opcode_flags[h->opcode];
	uint8_t *p = out;
	*p++ = h->opcode;
	/* MigReq is set: the path is the primary path. */
	*p++ = (uint8_t)(h->solicited << 7 | 1 << 6 | h->pad << 4);
	p = put(p, FULL_MEMBER_PKEY, 2);
	*p++ = (uint8_t)(h->becn << 6);
	p = put(p, h->qpn, 3);
	*p++ = (uint8_t)(h->ack_request << 7);
	p = put(p, h->psn, 3);
	if (flags & SD_DETH) {
		p = put(p, h->qkey, 4);
		p = put(p, h->source_qpn & 0xffffff, 4);
	}
	if (flags & SD_RETH) {
		p = put(p, h->address, 8);
		p = put(p, h->rkey, 4);
		p = put(p, h->length, 4);
	}
	if (flags & SD_ATOMIC_ETH) {
		p = put(p, h->address, 8);
		p = put(p, h->rkey, 4);
		p = put(p, h->swap_add, 8);
		p = put(p, h->compare, 8);
	}
	if (flags & SD_AETH)
		p = put(p, (uint32_t)h->syndrome << 24 | (h->msn & 0xffffff), 4);
	if (flags & SD_ATOMIC_ACK_ETH)
		p = put(p, h->original, 8);
	if (flags & SD_IMM) {
		memcpy(p, &h->imm, 4);
		p += 4;
	}
	if (flags & SD_IETH)
		p = put(p, h->invalidate, 4);
	return (size_t)(p - out);
}

static size_t header_size(unsigned flags)
{
	size_t size = BTH_SIZE;
	size += flags & SD_DETH ? 8 : 0;
	size += flags & SD_RETH ? 16 : 0;
	size += flags & SD_ATOMIC_ETH ? 28 : 0;
	size += flags & SD_AETH ? 4 : 0;
	size += flags & SD_ATOMIC_ACK_ETH ? 8 : 0;
	size += flags & SD_IMM ? 4 : 0;
	size += flags & SD_IETH ? 4 : 0;
	return size;
}

size_t sd_decode(const uint8_t *p, size_t n, struct sd_header *h)
{
	if (n < BTH_SIZE + SD_ICRC_SIZE || n % 4 != 0)
		return 0;
	memset(h, 0, sizeof *h);
	h->opcode = *p++;
	unsigned flags = opcode_flags[h->opcode];
	size_t size = header_size(flags);
	h->solicited = *p >> 7;
	h->pad = *p >> 4 & 3;
	unsigned version = *p++ & 15;
	if (!flags || version != 0 || n < size + SD_ICRC_SIZE + h->pad)
		return 0;
	if (!(flags & SD_PAYLOAD) && n != size + SD_ICRC_SIZE)
		return 0;
	h->pkey = (uint16_t)get(&p, 2);
	h->becn = *p++ >> 6 & 1;
	h->qpn = (uint32_t)get(&p, 3);
	h->ack_request = *p++ >> 7;
	h->psn = (uint32_t)get(&p, 3);
	if (flags & SD_DETH) {
		h->qkey = (uint32_t)get(&p, 4);
		h->source_qpn = (uint32_t)get(&p, 4) & 0xffffff;
	}
	if (flags & (SD_RETH | SD_ATOMIC_ETH)) {
		h->address = get(&p, 8);
		h->rkey = (uint32_t)get(&p, 4);
	}
	if (flags & SD_RETH)
		h->length = (uint32_t)get(&p, 4);
	if (flags & SD_ATOMIC_ETH) {
		h->swap_add = get(&p, 8);
		h->compare = get(&p, 8);
	}
	if (flags & SD_AETH) {
		h->syndrome = (uint8_t)get(&p, 1);
		h->msn = (uint32_t)get(&p, 3);
	}
	if (flags & SD_ATOMIC_ACK_ETH)
		h->original = get(&p, 8);
	if (flags & SD_IMM) {
		memcpy(&h->imm, p, 4);
		p += 4;
	}
	if (flags & SD_IETH)
		h->invalidate = (uint32_t)get(&p, 4);
	return size;
}
