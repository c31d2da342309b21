/* The frames of a lane. Numbers are little-endian. The connecting end, which sends messages, begins with HELLO; the
 * other end answers WELCOME.
 *
 * The receiver announces the buffers of each irecv by POST, confirmed by POSTED, or by a stripe for this irecv or a
 * later one. The sender sends each message as stripes (DATA) on any lanes, in any order, and repeats a stripe on
 * another lane when its lane fails. The receiver acknowledges each stripe on the lane on which it arrived (ACK),
 * repeated ones again. An end that waits for the other one and has heard nothing for some time asks by PING on all
 * lanes, answered by PONG.
 *
 * Over verbs a lane's connection carries all frames but DATA. The sender gives the lane a queue pair by CONNECT,
 * answered by CONNECTED, and each stripe is a WRITE into the announced buffer followed by a SEND of its DATA frame.
 * There is no ACK; qpair.c has the way in which a queue pair ends (FENCE, FENCED).
 */
#ifndef FARED_NCCL_WIRE_H
#define FARED_NCCL_WIRE_H

#include <stdint.h>

#define WIRE_VERSION 3

enum frame_type {
	FRAME_HELLO = 1, /* payload: struct hello */
	FRAME_WELCOME,
	FRAME_POST,   /* group, index: number of buffers; payload: struct buffer for each */
	FRAME_POSTED, /* group: all groups up to this one are known */
	FRAME_DATA,   /* group, index, offset, total, id, stripe; payload */
	FRAME_ACK,    /* payload: the 64-bit ids of stripes */
	FRAME_BYE,    /* group: number of groups that the closing end has completed */
	FRAME_PING,
	FRAME_PONG,
	FRAME_CONNECT,   /* group: no older queue pair has stripes; payload: struct endpoint of the sender */
	FRAME_CONNECTED, /* payload: struct endpoint of the receiver */
	FRAME_FENCE,     /* group: number of a queue pair; offset: no older one has stripes */
	FRAME_FENCED,    /* group: likewise; total: number of SENDs that have arrived on it, and no WRITE on it arrives from here on */
};

/* Bits of the ways in which stripes are carried. */
enum transport { TRANSPORT_TCP = 1, TRANSPORT_VERBS = 2 };

#define MAX_RDMA 8 /* ports of RDMA devices of a server */

struct frame {
	uint8_t type, version;
	uint16_t index;
	uint32_t length; /* bytes of payload */
	uint64_t group, offset, total, id;
	uint32_t stripe; /* bytes of every stripe of the message but the last */
	uint32_t reserved;
};

struct hello {
	uint8_t nonce[16];      /* of the listener's handle */
	uint8_t connection[16]; /* chosen by the connecting end; the same for all its lanes */
	uint8_t transport;      /* enum transport */
	uint8_t reserved[7];
};

struct buffer {
	int32_t tag;
	uint32_t reserved;
	uint64_t size;
	/* over verbs */
	uint64_t address;
	uint32_t keys[MAX_RDMA]; /* of the memory, for each port of the receiver's devices */
};

/* endpoint is one end of a queue pair. */
struct endpoint {
	uint32_t pair;   /* number of the queue pair, from 1, chosen by the sender */
	uint32_t number; /* that of the device */
	uint32_t sequence;
	uint8_t mtu;    /* enum ibv_mtu */
	uint8_t port;   /* index of the receiver's keys */
	uint8_t failed; /* the receiver could not make its end */
	uint8_t reserved;
	uint8_t gid[16];
	char plane[32]; /* name of the slot's plane */
};

/* What NCCL carries from the listening to the connecting process. */
struct handle {
	char magic[8]; /* HANDLE_MAGIC */
	uint8_t address[16];
	uint8_t nonce[16];
	uint16_t port;
	uint8_t version, transports, reserved[4]; /* transports: bits of enum transport that the listener accepts */
	uint64_t comm;                            /* of the connecting process, between its calls of connect */
};

#define HANDLE_MAGIC "faredNCL"

_Static_assert(sizeof(struct frame) == 48, "struct frame");
_Static_assert(sizeof(struct hello) == 40, "struct hello");
_Static_assert(sizeof(struct buffer) == 56, "struct buffer");
_Static_assert(sizeof(struct endpoint) == 64, "struct endpoint");
_Static_assert(sizeof(struct handle) == 56, "struct handle");
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the frames are written as they are in memory"
#endif

#endif
