/* The plugin below NCCL's interface: communicators whose messages are striped over lanes. A lane is a TCP connection
 * from the source port of a slot, and over verbs also a queue pair from this port, so the packets of a lane take the
 * slot's plane.
 *
 * All communicators and sockets belong to the thread that has engine.turn. To send, receive and test, the threads of
 * NCCL pass requests by a ring of each communicator and read their results from atomic words. They never wait for the
 * turn, but take it if it is free: isend writes, and test reads, so a small message does not wait for another thread.
 * The engine's thread does what is left: it has large messages and time limits, and everything while the threads of
 * NCCL do not call often.
 */
#ifndef FARED_NCCL_NET_H
#define FARED_NCCL_NET_H

#include <netinet/in.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "abi.h"
#include "fared.h"
#include "wire.h"

#define MAX_PARTS 8                                   /* messages of a grouped receive */
#define MAX_SENDS (NCCL_NET_MAX_REQUESTS * MAX_PARTS) /* requests of a sending communicator */
#define MAX_GROUPS 64                                 /* a power of two above NCCL_NET_MAX_REQUESTS */
#define MAX_LANES 64
#define LEAST_STRIPE 4096
#define ALL_PLANES (-1)

/* settings are those of the environment. */
struct settings {
	uint16_t first_port, last_port; /* of listeners: FARED_NCCL_PORTS */
	uint32_t stripe;                /* bytes: FARED_NCCL_STRIPE */
	uint32_t lanes;                 /* per sub-port: FARED_NCCL_LANES */
	uint32_t stall_ms;              /* a lane without progress for this time is avoided: FARED_NCCL_STALL_MS */
	uint32_t patience_ms;           /* time without an answer until a communicator fails: FARED_NCCL_TIMEOUT, in s */
	bool equal;                     /* stripes ignore shares: FARED_NCCL_STRIPING=equal */
	bool planes;                    /* a device for each plane: FARED_NCCL_DEVICES=plane */
	bool automatic;                 /* verbs where RDMA devices reach all planes, or else TCP: FARED_NCCL_TRANSPORT=auto */
	int transports;                 /* bits of enum transport: FARED_NCCL_TRANSPORT */
};

struct device {
	struct fared_address source;
	int plane; /* ALL_PLANES, or the only plane that its communicators use while that has capacity */
	int rail;  /* number of the source */
	char name[96];
	char *pci_path;
	uint64_t guid;
	int speed;      /* Mbit/s */
	int transports; /* bits of enum transport */
	uint32_t ports; /* a bit for each RDMA port with a GID of the source */
};

/* memory is a range that NCCL has registered; NULL stands for memory of a communicator over TCP. */
struct memory {
	char *data;
	size_t size;
	struct ibv_mr *regions[MAX_RDMA]; /* NULL for a port without an address of the communicator's device */
	uint32_t local_keys[MAX_RDMA], remote_keys[MAX_RDMA];
	_Atomic uint32_t uses; /* requests: after an error NCCL ends a registration although some are left, which the engine may look at */
};

enum request_state { REQUEST_FREE, REQUEST_BUSY, REQUEST_DONE };

struct part {
	char *data;
	struct memory *memory;
	uint64_t capacity, total, received;
	uint64_t *have; /* a bit for each stripe, from the first one on */
	size_t have_words;
	uint32_t stripe;
	int32_t tag;
	bool known;
};

struct request {
	struct comm *comm;
	_Atomic int state; /* enum request_state: the owner of the turn has the request while it is BUSY */
	struct request *next;
	uint64_t group;
	/* of a send */
	char *data;
	struct memory *memory;
	struct buffer remote; /* once it is matched */
	uint64_t size, assigned, acknowledged;
	int32_t tag, index;
	bool matched, whole; /* whole: all stripes are assigned */
	/* of a receive */
	int n;
	struct part parts[MAX_PARTS];
};

struct comm;
struct listener;

/* log.c */
extern _Atomic(ncclDebugLogger_t) logger;
#define WARN(...) log_line(NCCL_LOG_WARN, NCCL_NET, __FILE__, __LINE__, __VA_ARGS__)
#define INFO(...) log_line(NCCL_LOG_INFO, NCCL_INIT | NCCL_NET, __FILE__, __LINE__, __VA_ARGS__)
void log_line(int level, unsigned long flags, const char *file, int line, const char *format, ...) __attribute__((format(printf, 5, 6)));

/* device.c: what is read from the slot table once. */
extern struct settings settings;
ncclResult_t devices_init(void);
int devices_count(void);
const struct device *device_get(int i);
/* Returns the path of the slot table. */
const char *slots_path(void);

/* engine.c: calls of NCCL's threads. Pointers that are not ready stay NULL. */
/* Has communicators refused in a child of this process. */
void net_watch_forks(void);
ncclResult_t net_listen(int dev, void *handle, struct listener **out);
ncclResult_t net_connect(int dev, void *handle, struct comm **out);
ncclResult_t net_accept(struct listener *l, struct comm **out);
/* memory receives NULL for a communicator over TCP. A DMA-BUF has a descriptor, other memory -1. */
ncclResult_t net_register(struct comm *c, void *data, size_t size, uint64_t offset, int fd, struct memory **memory);
ncclResult_t net_deregister(struct memory *memory);
ncclResult_t net_send(struct comm *c, void *data, size_t size, int tag, struct memory *memory, struct request **out);
ncclResult_t net_receive(struct comm *c, int n, void **data, const size_t *sizes, const int *tags, struct memory *const *memory, struct request **out);
ncclResult_t net_test(struct request *r, int *done, int *sizes);
ncclResult_t net_close(struct comm *c);
ncclResult_t net_close_listener(struct listener *l);
/* Waits until closed communicators have notified their peers, at most two seconds. */
void net_finish(void);

#endif
