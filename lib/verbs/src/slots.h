/* The state that slots.c, move.c and watch.c share. */
#ifndef FARED_VERBS_SLOTS_H
#define FARED_VERBS_SLOTS_H

#include <fared.h>
#include <pthread.h>

#include "deal.h"
#include "guard.h"
#include "internal.h"

/* The first of the source ports that a flow label can select. */
#define FIRST_PORT 49152

/* A port of an RDMA device. */
struct device {
	struct device *next;
	char name[64];
	uint32_t port;
	bool fixed; /* the driver cannot change source ports */
};

/* The queue pairs of one process, from one address of a port to another. */
struct key {
	struct fared_address source, destination;
	struct device *device;
};

struct set {
	struct set *next;
	struct key key;
	struct deal deal; /* a slot that the device cannot use has no share */
	struct queue_pair *members;
	bool waiting; /* a member must move as soon as it is in RTS */
};

struct queue_pair {
	struct queue_pair *next; /* of the set */
	struct ibv_qp *qp;
	struct ibv_context *context;
	struct set *set;
	int slot; /* -1: the table no longer has a slot with the port */
	uint16_t port;
	struct ibv_ah_attr vector; /* of the program */
	bool ready;                /* in RTS */
	bool was_ready;
};

struct state {
	pthread_mutex_t lock;
	char *path;
	struct fared_table *table;  /* NULL: none yet */
	void *queue_pairs, *by_key; /* trees of tsearch */
	struct set *sets;
	struct device *devices;
	uint64_t count; /* queue pairs */
	uint64_t dealt[DEAL_PLANES];
	bool changed; /* since the statistics were written */
	bool watching;
	int stale;                   /* the last result of fared_check */
	struct fared_table *waiting; /* the thread's table */
};

extern struct state state;

/* The caller of the following functions holds the lock. */

/* Reads the slots of a set, and counts its queue pairs. Returns false, and leaves the last ones, if the table does not
 * have the pair. */
bool slots_load(struct set *s);
/* Does the same as slots_load, then changes the source ports of the queue pairs that must move. */
bool move_set(struct set *s);
/* Returns the flow label by which the kernel's drivers choose a source port. */
uint32_t label_of(uint16_t port);
/* Opens the slot table at a path, with the source ports for RoCEv2. Returns an error of libfared. */
int open_table(struct fared_table **table, const char *path);
/* Reports a change of the result of fared_check. */
void report_stale(int now);
/* Starts the thread that waits for changes of the table, unless it runs. It ends by itself when no queue pair has been
 * there for a second. */
void watch_start(void);

/* Must run before the lock is taken for the first queue pair: reads the environment, finds the functions of mlx5. */
void watch_prepare(void);
/* Finds the functions of mlx5 if their library is loaded. */
void move_prepare(void);

#endif
