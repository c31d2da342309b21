/* libfared reads the slot table of a running fared: the queue pair slots of every pair of a local and a remote
 * loopback, in shared memory.
 *
 * A look-up makes no system call, takes no lock and allocates nothing. libfared has no global state, starts no thread,
 * installs no signal handler and writes nothing that another process reads. The table stays readable while fared
 * restarts.
 *
 * Threads: functions whose table is const may be called by several threads at once. fared_refresh, fared_wait and
 * fared_close need the table for themselves; a thread that waits has a separate table. After fork, parent and child may
 * go on with their tables independently.
 *
 * Functions that return int return 0 or a count, or one of the negative errors below.
 */
#ifndef FARED_H
#define FARED_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct sockaddr;

/* Version of fared, from which the library is. The version of the interface is that of libfared.so. */
#define FARED_VERSION "0.1.0"

/* Path of the table if neither the caller nor the environment variable FARED_SLOTS names one. */
#define FARED_DEFAULT_PATH "/run/fared/table/slots"

enum fared_error {
	FARED_E_NO_TABLE = -1,  /* no file at the path: fared has not published a table yet */
	FARED_E_SYSTEM = -2,    /* a system call failed; errno has the reason */
	FARED_E_FORMAT = -3,    /* the file is not a slot table, or is damaged */
	FARED_E_LAYOUT = -4,    /* the table has a layout that this library does not know */
	FARED_E_TRUNCATED = -5, /* the file is shorter than its header states */
	FARED_E_NOT_FOUND = -6, /* no such pair, slot, sub-port or address */
	FARED_E_BUSY = -7,      /* the record changed during every attempt to read it, or its writer was killed in the middle of a change: use the last
	                            result and retry later */
	FARED_E_INVALID = -8,   /* an argument is invalid */
	FARED_E_SERVICE =
		-9, /* the table has no source ports for the service: slots.services of fared's configuration lists them, and fared_get_steered() those without
	                            separate ports */
	FARED_E_STALE = -10, /* nothing has updated the table for a minute: see 'fared health' on the host */
	FARED_E_DELETED =
		-11, /* the directory of the path, or the file, was deleted while it is mounted here: no other table can appear, so mount the directory again */
};

/* An IPv6 address, or an IPv4 address as ::ffff:a.b.c.d. */
struct fared_address {
	uint8_t bytes[16];
};

/* Flags of a slot. */
#define FARED_SLOT_PARKED 1u /* send nothing; the share is 0 */
#define FARED_SLOT_DRAIN \
	2u                      /* the slot has lost addresses to other slots: transactions of these addresses may start there only when every transaction
                                   outstanding on this slot is complete (draft-xu-rtgwg-fare-in-sun-02, Section 4) */
#define FARED_SLOT_IN_EFFECT 4u /* the data plane forwards by the weight of the slot's plane */
#define FARED_SLOT_WRONG 8u     /* probes by the slot's sub-port toward some destination are lost or go another way: see 'fared health' on the host */

#define FARED_NO_SUB_PORT 0xffffu

struct fared_slot {
	uint32_t share_ppb;   /* parts per billion of the pair's traffic; the shares of a reachable pair sum to exactly 1,000,000,000 */
	uint16_t source_port; /* UDP or TCP source port of the slot's packets, 49152 to 65535 */
	uint16_t slot;        /* number of the slot in the pair, from 0 */
	uint16_t plane;       /* see fared_plane_name */
	uint16_t sub_port;    /* see fared_get_sub_port; FARED_NO_SUB_PORT: packets are sprayed over the plane */
	uint32_t flags;       /* FARED_SLOT_... */
};

/* Flags of a pair. */
#define FARED_PAIR_REACHABLE 1u /* a plane has capacity toward the destination */
#define FARED_PAIR_IN_EFFECT 2u /* the data plane forwards by the weights of every plane */
#define FARED_PAIR_STALE 4u     /* no process maintains the table, or another file has replaced it: call fared_refresh */

/* Placement of a pair's source ports. */
enum fared_placement {
	FARED_UNIFORM = 0, /* evenly spread: the hash of the data plane is unknown */
	FARED_HASH = 1,    /* each port lands on the slot's sub-port by a known hash */
	FARED_NONE = 2,    /* the addressing needs no distinct ports */
	FARED_ASKED = 3,   /* each port lands on the slot's sub-port by the data plane's answer */
};

struct fared_pair {
	uint64_t revision;  /* revision of fare.v1.WeightService at the last change of the pair or of its weights */
	uint32_t flags;     /* FARED_PAIR_... */
	uint32_t slots;     /* number of slots */
	uint32_t vector;    /* number of the weight vector; 0: none */
	uint32_t placement; /* enum fared_placement */
	/* Private: the records that were read. */
	uint64_t run;
	uint32_t record, sequence, vector_record, vector_sequence;
	uint64_t reserved[2];
};

struct fared_sub_port {
	char device[16];      /* name of the netdev */
	char rdma_device[64]; /* its RDMA device, such as mlx5_0; "" if there is none */
	uint32_t plane;
	uint32_t rdma_port; /* port of the RDMA device, from 1; 0 if there is none */
	uint64_t reserved[4];
};

struct fared_status {
	uint64_t run;             /* number of the file: increases when another file replaces it */
	uint64_t revision;        /* number of publications */
	uint64_t status_revision; /* revision of fare.v1.WeightService up to which the table is current */
	uint32_t live;            /* 1: a process maintains the table, and its heartbeat is at most five seconds old */
	uint32_t pairs;           /* number of pairs */
	uint32_t planes, sub_ports, sources;
	uint32_t max_slots; /* greatest number of slots of a pair */
	char instance[64];  /* name of the run of fared, as in fare.v1.WatchWeightsResponse.instance */
	uint64_t reserved[8];
};

/* A destination of flows. */
struct fared_service {
	uint16_t protocol; /* number of the IP protocol: 17 (UDP) or 6 (TCP) */
	uint16_t port;     /* destination port */
};

/* A range of services of one protocol. */
struct fared_service_range {
	uint16_t protocol;    /* number of the IP protocol: 17 (UDP) or 6 (TCP) */
	uint16_t first, last; /* destination ports */
	uint16_t reserved;
};

struct fared_table;

/* Returns the version of the library, such as "1.0.0". */
const char *fared_version(void);
/* Returns a sentence for an error, and for any other number "unknown error". */
const char *fared_error_text(int error);

/* Opens the table at a path; NULL means the environment variable FARED_SLOTS, or else FARED_DEFAULT_PATH. The caller
 * closes it. */
int fared_open(struct fared_table **table, const char *path);
/* Does the same for a service: source ports and placements are those for flows to it. Where the data plane places flows
 * by a hash, those for another service lead to other sub-ports. fared_open has those for the table's first service.
 * Where the data plane steers by source port, whatever the service, every service that it steers has these, and only
 * another one is an error. A table that names no service, of an older fared, is used as it is. Since 1.1. */
int fared_open_service(struct fared_table **table, const char *path, const struct fared_service *service);
/* Closes a table. NULL has no effect. */
void fared_close(struct fared_table *table);

/* Continues with the file that is now at the path. Returns 1 if it is another one, 0 if it is the same. After an error
 * the table keeps the last file, unless that was truncated: then look-ups fail with FARED_E_TRUNCATED until
 * fared_refresh returns 1. A file without the table's service is an error. Indexes of planes and sub-ports, and names,
 * are those of the file. */
int fared_refresh(struct fared_table *table);
/* Waits until the table has changed since the last fared_wait, fared_refresh or fared_open, or timeout_ms have passed;
 * -1 means no limit. Returns 1 after a change of any pair, or 0: time over, or a signal. It continues with another file
 * at the path like fared_refresh. A missing file is not an error. */
int fared_wait(struct fared_table *table, int timeout_ms);

int fared_get_status(const struct fared_table *table, struct fared_status *status);
/* Returns 0 while a process maintains the table, and in the first minute without one; afterwards FARED_E_STALE, or
 * FARED_E_DELETED where no other table can appear at the path. Programs log a change of the result: the last weights
 * stay in use, however old they are. It makes system calls only after that minute. Since 1.2. */
int fared_check(const struct fared_table *table);

/* Reads a pair and up to room of its slots; slots may be NULL if room is 0. pair->slots is the number of all slots. */
int fared_lookup(const struct fared_table *table, const struct fared_address *source, const struct fared_address *destination, struct fared_pair *pair,
	struct fared_slot *slots, uint32_t room);
/* Does the same for a pair that the caller has read before, or whose fared_pair is zero: it begins with the records of
 * that reading and not with the index, which saves a cache line. The result is that of fared_lookup in any case. */
int fared_lookup_again(const struct fared_table *table, const struct fared_address *source, const struct fared_address *destination, struct fared_pair *pair,
	struct fared_slot *slots, uint32_t room);
/* Returns 1 if a pair that fared_lookup or fared_next_pair has read is still the state of the table, else 0. */
int fared_is_current(const struct fared_table *table, const struct fared_pair *pair);
/* Reads the next pair, in no order. *cursor begins at 0. FARED_E_NOT_FOUND ends the list. A pair that is added or
 * removed meanwhile may be missing. */
int fared_next_pair(const struct fared_table *table, uint32_t *cursor, struct fared_address *source, struct fared_address *destination, struct fared_pair *pair,
	struct fared_slot *slots, uint32_t room);

/* Returns the name of a plane, or NULL. It is valid until the table is refreshed or closed. */
const char *fared_plane_name(const struct fared_table *table, uint32_t plane);
int fared_get_sub_port(const struct fared_table *table, uint32_t sub_port, struct fared_sub_port *out);
/* Reads the n-th local loopback, from 0. */
int fared_get_source(const struct fared_table *table, uint32_t n, struct fared_address *out);
/* Reads the n-th service of the table, from 0. Since 1.1. */
int fared_get_service(const struct fared_table *table, uint32_t n, struct fared_service *out);
/* Reads the n-th range, from 0, of services that have the source ports of the first service, because the data plane
 * steers by them, whatever the service. None where each service has separate ports. Since 1.1. */
int fared_get_steered(const struct fared_table *table, uint32_t n, struct fared_service_range *out);
/* Returns the index of a local loopback's RoCEv2 GID in the GID table of a sub-port's RDMA port, or
 * FARED_E_NOT_FOUND. */
int fared_gid_index(const struct fared_table *table, uint32_t sub_port, const struct fared_address *source);

/* Returns the index of the next slot by share, or FARED_E_NOT_FOUND if every share is 0. credit has n elements, zero at
 * first, and belongs to one sender: while the shares stay, each slot's number of choices differs from its share of all
 * choices by less than n, and is exact after every period. */
int fared_choose(const struct fared_slot *slots, uint32_t n, int64_t *credit);
/* Returns the index of the slot for a memory address or a hash key, or FARED_E_NOT_FOUND if every share is 0. Equal
 * keys have equal slots while the shares stay; a changed share moves only the keys that must move. It is a weighted
 * rendezvous, the same as that of fared's package wecmp. */
int fared_choose_key(const struct fared_slot *slots, uint32_t n, uint64_t key);

/* Parses "10.255.0.1" or "2001:db8::1". */
int fared_parse_address(const char *text, struct fared_address *out);
/* Converts an AF_INET or AF_INET6 address. */
int fared_address_of(const struct sockaddr *from, struct fared_address *out);
/* Writes an address as text; 46 bytes are enough. */
int fared_address_text(const struct fared_address *address, char *text, size_t size);

#ifdef __cplusplus
}
#endif

#endif
