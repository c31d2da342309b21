/* Packets of RoCEv2: BTH, extended headers and the invariant CRC (InfiniBand Architecture Specification, volume 1:
 * chapter 9, annex A17). */
#ifndef SOFTDEV_WIRE_H
#define SOFTDEV_WIRE_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* UDP destination port of RoCEv2. */
#define SD_UDP_PORT 4791
/* Flow labels have 20 bits. A value above is no label: UCX means by 0xffffffff that none is chosen. */
#define SD_LABEL_MAX 0xfffff
/* Bytes of the shortest header (BTH), of the longest ones (BTH and AtomicETH), and of the ICRC. */
#define SD_MIN_HEADER 12
#define SD_MAX_HEADER 40
#define SD_ICRC_SIZE 4
/* Greatest payload of a packet. */
#define SD_MAX_MTU 4096
/* Greatest UDP payload: headers, payload, ICRC. */
#define SD_MAX_DATAGRAM (SD_MAX_HEADER + SD_MAX_MTU + SD_ICRC_SIZE)

/* Opcodes of the reliable connection, and those of other services that the device uses. */
enum sd_opcode {
	SD_SEND_FIRST = 0,
	SD_SEND_MIDDLE,
	SD_SEND_LAST,
	SD_SEND_LAST_IMM,
	SD_SEND_ONLY,
	SD_SEND_ONLY_IMM,
	SD_WRITE_FIRST,
	SD_WRITE_MIDDLE,
	SD_WRITE_LAST,
	SD_WRITE_LAST_IMM,
	SD_WRITE_ONLY,
	SD_WRITE_ONLY_IMM,
	SD_READ_REQUEST,
	SD_READ_FIRST,
	SD_READ_MIDDLE,
	SD_READ_LAST,
	SD_READ_ONLY,
	SD_ACK,
	SD_ATOMIC_ACK,
	SD_COMPARE_SWAP,
	SD_FETCH_ADD,
	SD_SEND_LAST_INV = 22,
	SD_SEND_ONLY_INV,
	SD_UD_SEND = 0x64,
	SD_UD_SEND_IMM,
	SD_CNP = 0x81,
};

/* Extended headers and other properties of an opcode. */
enum {
	SD_RETH = 1 << 0,
	SD_AETH = 1 << 1,
	SD_IMM = 1 << 2,
	SD_ATOMIC_ETH = 1 << 3,
	SD_ATOMIC_ACK_ETH = 1 << 4,
	SD_DETH = 1 << 5,
	SD_IETH = 1 << 6,
	SD_PAYLOAD = 1 << 7, /* the packet may have a payload */
	SD_BEGIN = 1 << 8,   /* the first packet of a message */
	SD_END = 1 << 9,     /* the last packet of a message */
	SD_KNOWN = 1 << 10,
};

/* Kinds of an AETH syndrome, in its upper three bits. */
enum { SD_SYNDROME_ACK = 0x00, SD_SYNDROME_RNR = 0x20, SD_SYNDROME_NAK = 0x60, SD_SYNDROME_MASK = 0xe0 };
/* An acknowledgement without end-to-end credits. */
#define SD_SYNDROME_NO_CREDIT 0x1f
enum { SD_NAK_SEQUENCE = 0, SD_NAK_INVALID_REQUEST, SD_NAK_ACCESS, SD_NAK_OPERATION };

struct sd_header {
	uint8_t opcode;
	bool solicited, ack_request, becn;
	uint8_t pad; /* bytes after the payload, up to a multiple of 4 */
	uint16_t pkey;
	uint32_t qpn, psn; /* 24 bits */
	uint64_t address;  /* RETH, AtomicETH */
	uint32_t rkey, length;
	uint64_t swap_add, compare; /* AtomicETH */
	uint64_t original;          /* AtomicAckETH */
	uint8_t syndrome;           /* AETH */
	uint32_t msn;               /* AETH, 24 bits */
	uint32_t imm;               /* ImmDt in the byte order of the network */
	uint32_t invalidate;        /* IETH */
	uint32_t qkey, source_qpn;  /* DETH */
};

/* Addresses and ports of a packet. IPv4 addresses are ::ffff:a.b.c.d. */
struct sd_flow {
	struct in6_addr source, destination;
	uint16_t source_port, destination_port;
};

/* Returns the SD_... bits of an opcode; 0 if it is unknown. */
unsigned sd_opcode_flags(uint8_t opcode);
/* Writes a header to SD_MAX_HEADER bytes, and returns its size. */
size_t sd_encode(const struct sd_header *h, uint8_t *out);
/* Reads the header of a UDP payload of n bytes with its ICRC. Returns the size of the header, or 0 if the packet is
 * malformed. The payload, without padding, has n - size - SD_ICRC_SIZE - pad bytes. */
size_t sd_decode(const uint8_t *p, size_t n, struct sd_header *h);

/* Advances the register of a CRC-32 (0xffffffff at first, not inverted at the end) by n bytes. */
uint32_t sd_crc(uint32_t state, const void *data, size_t n);
/* Returns the ICRC of a UDP payload of n bytes, of which the last four are the ICRC's. It covers ones, IP and UDP
 * header with their changing fields as ones, and the payload. id is the IPv4 identification, 0 for IPv6. DF is set and
 * IPv4 options are absent, as in packets of UDP sockets and NICs. The payload is the same afterwards. */
uint32_t sd_icrc(const struct sd_flow *flow, uint8_t *p, size_t n, uint16_t id);
/* Reports whether the ICRC at the end of a UDP payload is right. Sockets do not report the IPv4 identification that the
 * ICRC covers, so the check solves for it: since a CRC is linear and detects each burst of 32 bits, at most one
 * identification explains a difference. *id is a guess, which saves that when it is right, and receives the
 * identification. */
bool sd_icrc_check(const struct sd_flow *flow, uint8_t *p, size_t n, uint16_t *id);

static inline bool sd_is_ipv4(const struct in6_addr *a)
{
	return IN6_IS_ADDR_V4MAPPED(a);
}

#endif
