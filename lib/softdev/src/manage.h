/* The communication management of the device of this process. */
#ifndef SOFTDEV_MANAGE_H
#define SOFTDEV_MANAGE_H

#include "cm.h"
#include "device.h"

/* The locks of rdmacm.c: of the lists of identifiers, and of the opening of the device. */
extern pthread_mutex_t sd_ids_lock, sd_opening_lock;

/* Makes queue pair 1 of the device, if it has none. request and event are called with the device's lock. Returns NULL without memory. */
struct sd_cm *sd_manage(struct sd_dev *dev, int (*request)(struct sd_cm *, struct sd_cm_conn *),
	void (*event)(struct sd_cm *, struct sd_cm_conn *, enum sd_cm_event, int, const uint8_t *, size_t));
/* Prepares for functions of cm.h, and follows them, with the device's lock: the clock, and the device's timer. */
void sd_manage_begin(struct sd_cm *cm);
void sd_manage_end(struct sd_cm *cm);
struct sd_dev *sd_managed(struct sd_cm *cm);
/* Ends the management: connections end without messages. */
void sd_unmanage(struct sd_dev *dev);
/* Informs the peers that the process ends. */
void sd_manage_exit(struct sd_dev *dev);
/* Reports the counters of a device's management, or NULL. */
const struct sd_cm_counters *sd_manage_counters(const struct sd_dev *dev);

#endif
