/* The communication management of InfiniBand for reliable connections (InfiniBand Architecture Specification, volume 1, chapter 12) with the private data of
 * the RDMA IP CM service (annex A11). It has no sockets, threads or clock: its user passes received messages and the time in, and gets messages and events out
 * of functions. All fields are those of one device; the caller serializes the calls. */
#ifndef SOFTDEV_CM_H
#define SOFTDEV_CM_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of a management datagram, and of the private data of messages. That of a REQ begins with the header of the RDMA IP CM service. */
enum {
	SD_MAD_SIZE = 256,
	SD_CM_REQ_PRIVATE = 92,
	SD_CM_IP_HEADER = 36,
	SD_CM_REP_PRIVATE = 196,
	SD_CM_REJ_PRIVATE = 148,
	SD_CM_MAX_PRIVATE = 196,
};

/* Reasons of a rejection (section 12.6.7.2). */
enum {
	SD_CM_NO_RESOURCES = 3,
	SD_CM_TIMEOUT = 4,
	SD_CM_UNSUPPORTED = 5,
	SD_CM_UNKNOWN_ID = 6,
	SD_CM_UNKNOWN_SERVICE = 8,
	SD_CM_BAD_TRANSPORT = 9,
	SD_CM_STALE = 10,
	SD_CM_BAD_GID = 12,
	SD_CM_BAD_MTU = 26,
	SD_CM_BY_CONSUMER = 28,
};

/* A request waits up to a second for a listener. */
#define SD_CM_LATER (-1)

enum sd_cm_state {
	SD_CM_IDLE,
	SD_CM_REQ_SENT,
	SD_CM_REP_RECEIVED, /* until sd_cm_ready */
	SD_CM_REQ_RECEIVED, /* until sd_cm_accept or sd_cm_reject */
	SD_CM_REP_SENT,
	SD_CM_ESTABLISHED,
	SD_CM_DREQ_SENT,
	SD_CM_TIMEWAIT,
	SD_CM_CLOSED,
};

enum sd_cm_event {
	SD_CM_RESPONSE,    /* a REP has arrived */
	SD_CM_ACCEPTED,    /* an RTU has arrived */
	SD_CM_REJECTED,    /* the status is the reason */
	SD_CM_UNREACHABLE, /* no answer to a REQ or a REP */
	SD_CM_DISCONNECTED,
	SD_CM_TIMEWAIT_OVER,
};

/* The properties of an end's queue pair. */
struct sd_cm_end {
	uint32_t qpn, psn;                            /* psn: at which the other end begins to send */
	uint8_t responder_resources, initiator_depth; /* READs and atomics that the end accepts and that it sends */
	uint8_t retry_count, rnr_retry;
	bool flow_control, srq;
};

struct sd_cm;

struct sd_cm_conn {
	struct sd_cm_conn *next;
	struct sd_cm *cm;
	void *user; /* NULL: released, and only the end of the protocol is missing */
	enum sd_cm_state state;
	bool active, disconnected; /* the end that has sent the REQ; the user knows of the end */
	struct in6_addr local, remote;
	uint32_t local_id, remote_id;
	uint64_t transaction, service, remote_guid;
	struct sd_cm_end here, there;
	uint8_t mtu, ack_timeout, traffic_class; /* of the path: the encodings of an MTU and of a timeout */
	uint8_t peer_timeout, peer_retries;      /* of the REQ, for the retransmission of a REP */
	uint8_t message[SD_MAD_SIZE];            /* the latest message, which may be sent again */
	uint64_t timer;                          /* 0: off */
	unsigned tries;
	uint8_t private_data[SD_CM_MAX_PRIVATE]; /* of the REQ or the REP that has arrived */
};

struct sd_cm_counters {
	uint64_t sent, received, malformed, unknown, duplicates, retransmitted, timeouts, rejected;
};

struct sd_cm {
	uint64_t now, next_timer; /* ns; UINT64_MAX if there is no timer */
	uint64_t guid;            /* of the device */
	uint32_t next_id;         /* begins at any number */
	uint32_t connections;     /* number of entries of all */
	struct sd_cm_conn *all;
	struct sd_cm_counters counters;
	/* Sends a message of SD_MAD_SIZE bytes. */
	void (*send)(struct sd_cm *cm, const struct in6_addr *from, const struct in6_addr *to, const uint8_t *message);
	/* A REQ has arrived. Returns 0 and sets the user of the connection, a reason to reject it, or SD_CM_LATER. */
	int (*request)(struct sd_cm *cm, struct sd_cm_conn *c);
	void (*event)(struct sd_cm *cm, struct sd_cm_conn *c, enum sd_cm_event event, int status, const uint8_t *private_data, size_t size);
};

/* Handles the payload of a datagram for queue pair 1. */
void sd_cm_input(struct sd_cm *cm, const struct in6_addr *from, const struct in6_addr *to, const uint8_t *message, size_t size);
/* Runs the timers that are due, and sets next_timer. */
void sd_cm_timers(struct sd_cm *cm);
/* Offers the requests that wait for a listener again. */
void sd_cm_offer(struct sd_cm *cm);
/* Frees every connection without messages. */
void sd_cm_close(struct sd_cm *cm);

/* Returns a connection, or NULL without memory. sd_cm_release ends its use by the user: the peer is informed, and no event follows. */
struct sd_cm_conn *sd_cm_open(struct sd_cm *cm, void *user);
void sd_cm_release(struct sd_cm_conn *c);
/* Sends a REQ with the addresses, the service, the ends' properties and the path of the connection. These functions return an errno: EINVAL in a wrong state or
 * for too much private data. */
int sd_cm_connect(struct sd_cm_conn *c, const void *private_data, size_t size);
/* Sends an RTU: the queue pair is ready. */
int sd_cm_ready(struct sd_cm_conn *c);
int sd_cm_accept(struct sd_cm_conn *c, const void *private_data, size_t size);
int sd_cm_reject(struct sd_cm_conn *c, int reason, const void *private_data, size_t size);
int sd_cm_disconnect(struct sd_cm_conn *c);

/* The header of the RDMA IP CM service: ports and addresses of a connection. IPv4 addresses are ::ffff:a.b.c.d. sd_cm_get_ip_header returns false if the version
 * or the family is unknown. */
struct sd_cm_ip {
	struct in6_addr source, destination;
	uint16_t source_port;
};
void sd_cm_put_ip_header(uint8_t *out, const struct sd_cm_ip *ip);
bool sd_cm_get_ip_header(const uint8_t *in, struct sd_cm_ip *ip);

#endif
