/* The frames of a lane. Numbers are little-endian. The connecting end, which sends messages, begins with HELLO; the other end answers WELCOME.
 *
 * The receiver announces the buffers of each irecv by POST, confirmed by POSTED. The sender sends each message as stripes (DATA) on any lanes, in any order, and
 * repeats a stripe on another lane when its lane fails. The receiver acknowledges each stripe on the lane on which it arrived (ACK), repeated ones again.
 * An end that waits for the other one and has heard nothing for some time asks by PING on all lanes, answered by PONG.
 */
#ifndef FARED_NCCL_WIRE_H
#define FARED_NCCL_WIRE_H

#include <stdint.h>

#define WIRE_VERSION 2

enum frame_type {
	FRAME_HELLO = 1, /* payload: struct hello */
	FRAME_WELCOME,
	FRAME_POST,      /* group, index: number of buffers; payload: struct buffer for each */
	FRAME_POSTED,    /* group: all groups up to this one are known */
	FRAME_DATA,      /* group, index, offset, total, id, stripe; payload */
	FRAME_ACK,       /* payload: the 64-bit ids of stripes */
	FRAME_BYE,       /* group: number of groups that the closing end has completed */
	FRAME_PING,
	FRAME_PONG,
};

struct frame {
	uint8_t type, version;
	uint16_t index;
	uint32_t length; /* bytes of payload */
	uint64_t group, offset, total, id;
	uint32_t stripe; /* bytes of every stripe of the message but the last */
	uint32_t reserved;
};

struct hello {
	uint8_t nonce[16];  /* of the listener's handle */
	uint8_t connection[16]; /* chosen by the connecting end; the same for all its lanes */
};

struct buffer {
	int32_t tag;
	uint32_t reserved;
	uint64_t size;
};

/* What NCCL carries from the listening to the connecting process. */
struct handle {
	char magic[8]; /* HANDLE_MAGIC */
	uint8_t address[16];
	uint8_t nonce[16];
	uint16_t port;
	uint8_t version, reserved[5];
	uint64_t comm; /* of the connecting process, between its calls of connect */
};

#define HANDLE_MAGIC "faredNCL"

_Static_assert(sizeof(struct frame) == 48, "struct frame");
_Static_assert(sizeof(struct hello) == 32, "struct hello");
_Static_assert(sizeof(struct buffer) == 16, "struct buffer");
_Static_assert(sizeof(struct handle) == 56, "struct handle");
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the frames are written as they are in memory"
#endif

#endif
