/* The environment of the core: its users define these functions, the only ones that the core calls outside of its
 * folder, except those of the C library for memory. */
#ifndef SOFTDEV_ENV_H
#define SOFTDEV_ENV_H

#include <infiniband/verbs.h>
#include <stdint.h>

struct sd_cq;
struct sd_packet;
struct sd_path;
struct sd_qp;

/* The carrier of packets: sockets, or a simulated wire. The core calls send and flush, its users call all. */
struct sd_link {
	/* Opens a path's source port; returns an errno. close ends its use. */
	int (*open)(struct sd_link *link, struct sd_path *path);
	void (*close)(struct sd_link *link, struct sd_path *path);
	/* Queues a copy of a packet, and adds padding and ICRC. flush sends the queue, at the end of sd_run. */
	void (*send)(struct sd_link *link, const struct sd_path *path, const struct sd_packet *packet);
	void (*flush)(struct sd_link *link);
	/* Returns the time in ns of a monotonic clock. */
	uint64_t (*now)(struct sd_link *link);
};

/* A completion queue has been armed, and has a completion: the program is notified if it awaits an event. */
void sd_completion_event(struct sd_cq *cq);
/* Reports an event of a queue pair, or of its shared receive queue, to the program. */
void sd_async(struct sd_qp *qp, enum ibv_event_type type);

#endif
