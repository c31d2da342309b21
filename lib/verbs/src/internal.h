/* The parts of libfared-verbs. */
#ifndef FARED_VERBS_INTERNAL_H
#define FARED_VERBS_INTERNAL_H

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>

/* dispatch.c: the exported functions. */

/* Calls the ibv_modify_qp that a program calls without this library. */
int next_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);

/* slots.c: the slots of queue pairs. All functions may be called by any thread, and leave errno unchanged. */

/* A queue pair that is known. */
struct queue_pair;

/* Chooses a slot for a queue pair whose address vector the program sets, and returns its flow label; 0: the queue pair
 * has no slot. */
uint32_t slots_label(struct ibv_qp *qp, const struct ibv_qp_attr *attr);
/* Notes that the program has set a flow label itself. */
void slots_own_label(struct ibv_qp *qp);
/* Notes that a queue pair has changed its state, or that a change with an address vector has failed. */
void slots_changed(struct ibv_qp *qp, const struct ibv_qp_attr *attr, int mask, bool failed);
/* Takes a queue pair out before its destruction, after which it does not change its port, and returns it; NULL: it has
 * no slot. */
struct queue_pair *slots_take(struct ibv_qp *qp);
/* Ends the destruction of a queue pair that slots_take has returned. If it failed, the queue pair has its slot as
 * before. */
void slots_end(struct queue_pair *q, bool destroyed);
/* Forgets the queue pairs of a device that is closed. */
void slots_forget(struct ibv_context *context);

/* report.c: messages and statistics. The caller holds the lock of slots.c. */

struct counters {
	uint64_t dealt;       /* queue pairs that have received a slot */
	uint64_t own_label;   /* the program has set a flow label */
	uint64_t no_pair;     /* the slot table does not have the pair of addresses */
	uint64_t no_slot;     /* no slot is on a plane of the device, or none has a source port from 49152 on */
	uint64_t moved;       /* changes of source ports */
	uint64_t unsupported; /* queue pairs that should have changed the source port, whose device cannot do so */
	uint64_t failed;      /* changes of source ports that failed otherwise */
};

extern struct counters counters;

/* Reads the environment, once. */
void report_prepare(void);
/* Writes a message to the standard error if the environment variable FARED_VERBS_LOG is at least level: 1 problems, 2
 * every slot. */
void report(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Returns whether the environment variable FARED_VERBS_STATS names a file for statistics. */
bool report_wanted(void);
/* Writes the statistics to their file if they have changed. dealt and present have an element for each of n planes. */
void report_write(const char *const *names, const uint64_t *dealt, const uint64_t *present, uint32_t n);

#endif
