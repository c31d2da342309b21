/* The slot table of the device: it gives paths their source ports. Callers hold sd_lock, except in sd_slots_report. */
#ifndef SOFTDEV_SLOTS_H
#define SOFTDEV_SLOTS_H

#include "core/core.h"

/* Opens the slot table as fared_open does. A missing table is looked for once a second. */
struct sd_slots *sd_slots_open(void);
void sd_slots_close(struct sd_slots *slots);
/* Chooses the path's source port and opens it: that of the slot by deal_next, or a port from seed if the pair has no
 * slots. Returns an errno. */
int sd_slots_join(struct sd_dev *dev, struct sd_path *path, uint32_t seed);
void sd_slots_leave(struct sd_dev *dev, struct sd_path *path);
/* Follows changes of the table: moves the paths that must move. Cheap if nothing has changed. */
void sd_slots_follow(struct sd_dev *dev);
/* Returns why the table is stale, an error of libfared, or 0. */
int sd_slots_stale(const struct sd_dev *dev);
/* Reports a change of that on standard error, in one thread and without the lock. A standard error that takes nothing
 * is tried again by the next call. */
void sd_slots_report(struct sd_dev *dev, int stale);

#endif
