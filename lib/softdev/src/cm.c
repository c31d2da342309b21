#include "cm.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Fields of a management datagram (section 13.4.3), and those of messages from offset BODY on (sections 12.6 and 12.7). */
enum { CLASS = 1, METHOD = 3, TRANSACTION = 8, ATTRIBUTE = 16, BODY = 24 };
enum { BASE_VERSION = 1, CM_CLASS = 7, CM_VERSION = 2, SEND = 3 };
enum { REQ = 0x10, MRA, REJ, REP, RTU, DREQ, DREP };
enum { LOCAL_ID = BODY, REMOTE_ID = BODY + 4 };
enum {
	REQ_SERVICE = BODY + 8,
	REQ_GUID = BODY + 16,
	REQ_QPN = BODY + 32,
	REQ_RESPONDER = BODY + 35,
	REQ_INITIATOR = BODY + 39,
	REQ_REMOTE_TIMEOUT = BODY + 43, /* 5 bits, transport 2, flow control 1 */
	REQ_PSN = BODY + 44,
	REQ_LOCAL_TIMEOUT = BODY + 47, /* 5 bits, retry count 3 */
	REQ_PKEY = BODY + 48,
	REQ_MTU = BODY + 50,     /* 4 bits, RDC exists 1, RNR retry count 3 */
	REQ_RETRIES = BODY + 51, /* 4 bits, SRQ 1, extended transport 3 */
	REQ_LIDS = BODY + 52,
	REQ_LOCAL_GID = BODY + 56,
	REQ_REMOTE_GID = BODY + 72,
	REQ_RATE = BODY + 91,
	REQ_TRAFFIC_CLASS = BODY + 92,
	REQ_HOP_LIMIT = BODY + 93,
	REQ_ACK_TIMEOUT = BODY + 95, /* 5 bits */
	REQ_PRIVATE = BODY + 140,
	REP_QPN = BODY + 12,
	REP_PSN = BODY + 20,
	REP_RESPONDER = BODY + 24,
	REP_INITIATOR = BODY + 25,
	REP_ACK_DELAY = BODY + 26, /* 5 bits, failover 2, flow control 1 */
	REP_RNR = BODY + 27,       /* 3 bits, SRQ 1 */
	REP_GUID = BODY + 28,
	REP_PRIVATE = BODY + 36,
	REJ_MESSAGE = BODY + 8,   /* 2 bits */
	REJ_INFO_SIZE = BODY + 9, /* 7 bits */
	REJ_REASON = BODY + 10,
	REJ_INFO = BODY + 12,
	REJ_PRIVATE = BODY + 84,
	MRA_MESSAGE = BODY + 8, /* 2 bits */
	MRA_TIMEOUT = BODY + 9, /* 5 bits */
	DREQ_QPN = BODY + 8,
};
/* The message that a REJ or an MRA answers. */
enum { TO_REQ = 0, TO_REP = 1, TO_OTHER = 2 };

/* A timeout n is 4.096 us * 2^n. An answer is awaited for about 1 s, 16 times; that of a program that has the message for a minute a time. */
enum { RESPONSE_TIMEOUT = 18, SERVICE_TIMEOUT = 24, MOST_TIMEOUT = 26, LEAST_TIMEOUT = 16, RETRIES = 15, DREQ_RETRIES = 4, ACK_DELAY = 15 };
enum { FULL_MEMBER_PKEY = 0xffff, PERMISSIVE_LID = 0xffff, HOP_LIMIT = 64, RATE_100G = 16, ROUTED = 0 };
/* A device has at most this many connections; further requests are rejected. */
enum { MAX_CONNECTIONS = 1 << 16 };

static void put(uint8_t *p, uint64_t v, int bytes)
{
	for (int i = bytes - 1; i >= 0; i--, v >>= 8)
		p[i] = (uint8_t)v;
}

static uint64_t get(const uint8_t *p, int bytes)
{
	uint64_t v = 0;
	for (int i = 0; i < bytes; i++)
		v = v << 8 | p[i];
	return v;
}

static uint64_t timeout(unsigned exponent)
{
	return 4096ull << exponent;
}

static void set_timer(struct sd_cm_conn *c, unsigned exponent)
{
	c->timer = c->cm->now + timeout(exponent);
	if (c->timer < c->cm->next_timer)
		c->cm->next_timer = c->timer;
}

static void begin(uint8_t *m, unsigned attribute, uint64_t transaction, uint32_t local, uint32_t remote)
{
	memset(m, 0, SD_MAD_SIZE);
	m[0] = BASE_VERSION;
	m[CLASS] = CM_CLASS;
	m[2] = CM_VERSION;
	m[METHOD] = SEND;
	put(m + TRANSACTION, transaction, 8);
	put(m + ATTRIBUTE, attribute, 2);
	put(m + LOCAL_ID, local, 4);
	put(m + REMOTE_ID, remote, 4);
}

static void send_to(struct sd_cm *cm, const struct in6_addr *from, const struct in6_addr *to, const uint8_t *m)
{
	cm->counters.sent++;
	cm->send(cm, from, to, m);
}

static void send_message(struct sd_cm_conn *c, const uint8_t *m)
{
	send_to(c->cm, &c->local, &c->remote, m);
}

static void send_mra(struct sd_cm_conn *c, unsigned to)
{
	uint8_t m[SD_MAD_SIZE];
	begin(m, MRA, c->transaction, c->local_id, c->remote_id);
	m[MRA_MESSAGE] = (uint8_t)(to << 6);
	m[MRA_TIMEOUT] = SERVICE_TIMEOUT << 3;
	send_message(c, m);
}

static void send_rtu(struct sd_cm_conn *c)
{
	begin(c->message, RTU, c->transaction, c->local_id, c->remote_id);
	send_message(c, c->message);
}

/* send_rej rejects a message; without a connection local is 0. */
static void send_rej(struct sd_cm *cm, const struct in6_addr *from, const struct in6_addr *to, uint64_t transaction, uint32_t local, uint32_t remote,
	unsigned message, int reason, const void *private_data, size_t size)
{
	uint8_t m[SD_MAD_SIZE];
	begin(m, REJ, transaction, local, remote);
	m[REJ_MESSAGE] = (uint8_t)(message << 6);
	put(m + REJ_REASON, (unsigned)reason, 2);
	if (reason == SD_CM_TIMEOUT) { /* the peer may not have an identifier yet: the device identifies the connection */
		m[REJ_INFO_SIZE] = 8 << 1;
		put(m + REJ_INFO, cm->guid, 8);
	}
	if (size)
		memcpy(m + REJ_PRIVATE, private_data, size);
	send_to(cm, from, to, m);
}

static void emit(struct sd_cm_conn *c, enum sd_cm_event event, int status, const uint8_t *private_data, size_t size)
{
	if (c->user)
		c->cm->event(c->cm, c, event, status, private_data, size);
}

static void emit_disconnected(struct sd_cm_conn *c)
{
	if (!c->disconnected)
		emit(c, SD_CM_DISCONNECTED, 0, NULL, 0);
	c->disconnected = true;
}

static void enter_timewait(struct sd_cm_conn *c)
{
	c->state = SD_CM_TIMEWAIT;
	set_timer(c, RESPONSE_TIMEOUT);
}

/* end ends a connection without timewait. A released one is freed by the timers, so that loops over connections stay simple. */
static void end(struct sd_cm_conn *c)
{
	c->state = SD_CM_CLOSED;
	c->timer = 0;
	if (!c->user)
		set_timer(c, 0);
}

static void send_dreq(struct sd_cm_conn *c)
{
	begin(c->message, DREQ, ++c->transaction, c->local_id, c->remote_id);
	put(c->message + DREQ_QPN, c->there.qpn, 3);
	c->state = SD_CM_DREQ_SENT;
	c->tries = 0;
	set_timer(c, RESPONSE_TIMEOUT);
	send_message(c, c->message);
}

static struct sd_cm_conn *find_local(struct sd_cm *cm, uint32_t id, const struct in6_addr *from)
{
	for (struct sd_cm_conn *c = cm->all; c; c = c->next)
		if (c->local_id == id && memcmp(&c->remote, from, sizeof *from) == 0 && c->state != SD_CM_IDLE)
			return c;
	return NULL;
}

struct sd_cm_conn *sd_cm_open(struct sd_cm *cm, void *user)
{
	struct sd_cm_conn *c = cm->connections < MAX_CONNECTIONS ? calloc(1, sizeof *c) : NULL;
	if (!c)
		return NULL;
	bool used = true;
	while (used) {
		c->local_id = ++cm->next_id;
		used = c->local_id == 0;
		for (struct sd_cm_conn *other = cm->all; other && !used; other = other->next)
			used = other->local_id == c->local_id;
	}
	c->cm = cm;
	c->user = user;
	c->transaction = (uint64_t)c->local_id << 32;
	c->next = cm->all;
	cm->all = c;
	cm->connections++;
	return c;
}

static void discard(struct sd_cm_conn *c)
{
	struct sd_cm_conn **at = &c->cm->all;
	while (*at != c)
		at = &(*at)->next;
	*at = c->next;
	c->cm->connections--;
	free(c);
}

void sd_cm_close(struct sd_cm *cm)
{
	while (cm->all)
		discard(cm->all);
}

static int message_of(const struct sd_cm_conn *c)
{
	return c->state == SD_CM_REQ_RECEIVED ? TO_REQ : c->state == SD_CM_REP_RECEIVED ? TO_REP : TO_OTHER;
}

void sd_cm_release(struct sd_cm_conn *c)
{
	c->user = NULL;
	switch (c->state) {
	case SD_CM_REQ_SENT:
		send_rej(c->cm, &c->local, &c->remote, c->transaction, c->local_id, 0, TO_OTHER, SD_CM_TIMEOUT, NULL, 0);
		end(c);
		break;
	case SD_CM_REQ_RECEIVED:
	case SD_CM_REP_RECEIVED:
	case SD_CM_REP_SENT:
		sd_cm_reject(c, SD_CM_BY_CONSUMER, NULL, 0);
		break;
	case SD_CM_ESTABLISHED:
		send_dreq(c);
		break;
	case SD_CM_IDLE:
	case SD_CM_CLOSED:
		end(c);
		break;
	case SD_CM_DREQ_SENT:
	case SD_CM_TIMEWAIT:
		break;
	}
}

int sd_cm_connect(struct sd_cm_conn *c, const void *private_data, size_t size)
{
	uint8_t *m = c->message;
	if (c->state != SD_CM_IDLE || size > SD_CM_REQ_PRIVATE)
		return EINVAL;
	begin(m, REQ, c->transaction, c->local_id, 0);
	put(m + REQ_SERVICE, c->service, 8);
	put(m + REQ_GUID, c->cm->guid, 8);
	put(m + REQ_QPN, c->here.qpn, 3);
	m[REQ_RESPONDER] = c->here.responder_resources;
	m[REQ_INITIATOR] = c->here.initiator_depth;
	m[REQ_REMOTE_TIMEOUT] = (uint8_t)(RESPONSE_TIMEOUT << 3 | c->here.flow_control);
	put(m + REQ_PSN, c->here.psn, 3);
	m[REQ_LOCAL_TIMEOUT] = (uint8_t)(RESPONSE_TIMEOUT << 3 | (c->here.retry_count & 7));
	put(m + REQ_PKEY, FULL_MEMBER_PKEY, 2);
	m[REQ_MTU] = (uint8_t)(c->mtu << 4 | (c->here.rnr_retry & 7));
	m[REQ_RETRIES] = (uint8_t)(RETRIES << 4 | c->here.srq << 3);
	put(m + REQ_LIDS, PERMISSIVE_LID, 2);
	put(m + REQ_LIDS + 2, PERMISSIVE_LID, 2);
	memcpy(m + REQ_LOCAL_GID, &c->local, 16);
	memcpy(m + REQ_REMOTE_GID, &c->remote, 16);
	m[REQ_RATE] = RATE_100G;
	m[REQ_TRAFFIC_CLASS] = c->traffic_class;
	m[REQ_HOP_LIMIT] = HOP_LIMIT;
	m[REQ_ACK_TIMEOUT] = (uint8_t)(c->ack_timeout << 3);
	if (size)
		memcpy(m + REQ_PRIVATE, private_data, size);
	c->active = true;
	c->state = SD_CM_REQ_SENT;
	c->tries = 0;
	set_timer(c, RESPONSE_TIMEOUT);
	send_message(c, m);
	return 0;
}

int sd_cm_ready(struct sd_cm_conn *c)
{
	if (c->state != SD_CM_REP_RECEIVED)
		return EINVAL;
	c->state = SD_CM_ESTABLISHED;
	c->timer = 0;
	send_rtu(c);
	return 0;
}

static unsigned limited(unsigned exponent, unsigned least)
{
	return exponent < least ? least : exponent > MOST_TIMEOUT ? MOST_TIMEOUT : exponent;
}

int sd_cm_accept(struct sd_cm_conn *c, const void *private_data, size_t size)
{
	uint8_t *m = c->message;
	if (c->state != SD_CM_REQ_RECEIVED || size > SD_CM_REP_PRIVATE)
		return EINVAL;
	begin(m, REP, c->transaction, c->local_id, c->remote_id);
	put(m + REP_QPN, c->here.qpn, 3);
	put(m + REP_PSN, c->here.psn, 3);
	m[REP_RESPONDER] = c->here.responder_resources;
	m[REP_INITIATOR] = c->here.initiator_depth;
	m[REP_ACK_DELAY] = (uint8_t)(ACK_DELAY << 3 | c->here.flow_control);
	m[REP_RNR] = (uint8_t)((c->here.rnr_retry & 7) << 5 | c->here.srq << 4);
	put(m + REP_GUID, c->cm->guid, 8);
	if (size)
		memcpy(m + REP_PRIVATE, private_data, size);
	c->state = SD_CM_REP_SENT;
	c->tries = 0;
	set_timer(c, limited(c->peer_timeout, LEAST_TIMEOUT));
	send_message(c, m);
	return 0;
}

int sd_cm_reject(struct sd_cm_conn *c, int reason, const void *private_data, size_t size)
{
	if ((c->state != SD_CM_REQ_RECEIVED && c->state != SD_CM_REP_RECEIVED && c->state != SD_CM_REP_SENT) || size > SD_CM_REJ_PRIVATE)
		return EINVAL;
	send_rej(c->cm, &c->local, &c->remote, c->transaction, c->local_id, c->remote_id, (unsigned)message_of(c), reason, private_data, size);
	end(c);
	return 0;
}

int sd_cm_disconnect(struct sd_cm_conn *c)
{
	switch (c->state) {
	case SD_CM_ESTABLISHED:
	case SD_CM_REP_SENT: /* the peer may have what it needs from the REP alone */
		send_dreq(c);
		return 0;
	case SD_CM_DREQ_SENT:
	case SD_CM_TIMEWAIT:
		return 0;
	default:
		return EINVAL;
	}
}

/* receive_duplicate answers a REQ that has arrived before. */
static void receive_duplicate(struct sd_cm_conn *c)
{
	c->cm->counters.duplicates++;
	if (c->state == SD_CM_REQ_RECEIVED)
		send_mra(c, TO_REQ);
	else if (c->state == SD_CM_REP_SENT)
		send_message(c, c->message);
}

/* check_req returns a reason to reject a REQ, or 0. */
static int check_req(const struct in6_addr *from, const struct in6_addr *to, const uint8_t *m)
{
	unsigned mtu = m[REQ_MTU] >> 4;
	if ((m[REQ_REMOTE_TIMEOUT] >> 1 & 3) != 0 || (m[REQ_RETRIES] & 7) != 0)
		return SD_CM_BAD_TRANSPORT;
	if (mtu < 1 || mtu > 5)
		return SD_CM_BAD_MTU;
	if (memcmp(m + REQ_REMOTE_GID, to, 16) != 0)
		return SD_CM_BAD_GID;
	/* Packets of the connection come from the address of the REQ. */
	if (memcmp(m + REQ_LOCAL_GID, from, 16) != 0 || get(m + REQ_QPN, 3) < 2 || get(m + REQ_PKEY, 2) != FULL_MEMBER_PKEY)
		return SD_CM_UNSUPPORTED;
	return 0;
}

/* offer passes a REQ to the user. A rejected one without a user is freed by the timers. */
static void offer(struct sd_cm_conn *c)
{
	int reason = c->cm->request(c->cm, c);
	if (reason == SD_CM_LATER) {
		if (!c->timer)
			set_timer(c, RESPONSE_TIMEOUT);
		return;
	}
	c->timer = 0;
	if (reason) {
		c->cm->counters.rejected++;
		sd_cm_reject(c, reason, NULL, 0);
	}
}

static void receive_req(struct sd_cm *cm, const struct in6_addr *from, const struct in6_addr *to, const uint8_t *m)
{
	uint32_t id = (uint32_t)get(m + LOCAL_ID, 4), qpn = (uint32_t)get(m + REQ_QPN, 3);
	uint64_t guid = get(m + REQ_GUID, 8), transaction = get(m + TRANSACTION, 8);
	int reason = check_req(from, to, m);
	for (struct sd_cm_conn *c = cm->all; c; c = c->next) {
		bool same = !c->active && c->remote_id == id && c->remote_guid == guid && memcmp(&c->remote, from, 16) == 0;
		if (same && c->state != SD_CM_CLOSED && c->state != SD_CM_TIMEWAIT) {
			receive_duplicate(c);
			return;
		}
		/* The peer's queue pair has another connection: the peer has lost its state (section 12.9.8.3.1). */
		bool known = c->there.qpn == qpn && c->remote_guid == guid && memcmp(&c->remote, from, 16) == 0;
		if (!reason && known && (c->state == SD_CM_ESTABLISHED || c->state == SD_CM_REP_SENT)) {
			emit_disconnected(c);
			send_dreq(c);
			reason = SD_CM_STALE;
		}
	}
	struct sd_cm_conn *c = reason ? NULL : sd_cm_open(cm, NULL);
	if (!c) {
		cm->counters.rejected++;
		send_rej(cm, to, from, transaction, 0, id, TO_REQ, reason ? reason : SD_CM_NO_RESOURCES, NULL, 0);
		return;
	}
	c->state = SD_CM_REQ_RECEIVED;
	c->local = *to;
	c->remote = *from;
	c->remote_id = id;
	c->remote_guid = guid;
	c->transaction = transaction;
	c->service = get(m + REQ_SERVICE, 8);
	c->there.qpn = qpn;
	c->there.psn = (uint32_t)get(m + REQ_PSN, 3);
	c->there.responder_resources = m[REQ_RESPONDER];
	c->there.initiator_depth = m[REQ_INITIATOR];
	c->there.flow_control = m[REQ_REMOTE_TIMEOUT] & 1;
	c->there.retry_count = m[REQ_LOCAL_TIMEOUT] & 7;
	c->there.rnr_retry = m[REQ_MTU] & 7;
	c->there.srq = m[REQ_RETRIES] >> 3 & 1;
	c->mtu = m[REQ_MTU] >> 4;
	c->traffic_class = m[REQ_TRAFFIC_CLASS];
	c->ack_timeout = m[REQ_ACK_TIMEOUT] >> 3;
	c->peer_timeout = m[REQ_LOCAL_TIMEOUT] >> 3;
	c->peer_retries = m[REQ_RETRIES] >> 4;
	memcpy(c->private_data, m + REQ_PRIVATE, SD_CM_REQ_PRIVATE);
	offer(c);
}

void sd_cm_offer(struct sd_cm *cm)
{
	for (struct sd_cm_conn *c = cm->all; c; c = c->next)
		if (c->state == SD_CM_REQ_RECEIVED && !c->user)
			offer(c);
}

static void receive_rep(struct sd_cm_conn *c, const uint8_t *m)
{
	uint32_t id = (uint32_t)get(m + LOCAL_ID, 4);
	if (c->state == SD_CM_REQ_SENT && get(m + REP_QPN, 3) < 2) {
		c->cm->counters.malformed++;
		return;
	}
	if (c->state != SD_CM_REQ_SENT) {
		c->cm->counters.duplicates++;
		if (c->remote_id == id && c->active && c->state == SD_CM_REP_RECEIVED)
			send_mra(c, TO_REP);
		else if (c->remote_id == id && c->active && c->state == SD_CM_ESTABLISHED)
			send_message(c, c->message); /* the RTU */
		return;
	}
	c->state = SD_CM_REP_RECEIVED;
	c->timer = 0;
	c->remote_id = id;
	c->remote_guid = get(m + REP_GUID, 8);
	c->there.qpn = (uint32_t)get(m + REP_QPN, 3);
	c->there.psn = (uint32_t)get(m + REP_PSN, 3);
	c->there.responder_resources = m[REP_RESPONDER];
	c->there.initiator_depth = m[REP_INITIATOR];
	c->there.flow_control = m[REP_ACK_DELAY] & 1;
	c->there.rnr_retry = m[REP_RNR] >> 5;
	c->there.srq = m[REP_RNR] >> 4 & 1;
	memcpy(c->private_data, m + REP_PRIVATE, SD_CM_REP_PRIVATE);
	emit(c, SD_CM_RESPONSE, 0, c->private_data, SD_CM_REP_PRIVATE);
}

static void receive_rej(struct sd_cm *cm, const struct in6_addr *from, const uint8_t *m)
{
	uint32_t local = (uint32_t)get(m + REMOTE_ID, 4), remote = (uint32_t)get(m + LOCAL_ID, 4);
	int reason = (int)get(m + REJ_REASON, 2);
	struct sd_cm_conn *c = find_local(cm, local, from);
	/* A peer that gives up before it knows our identifier names its device. */
	if (!c && reason == SD_CM_TIMEOUT && m[REJ_INFO_SIZE] >> 1 >= 8)
		for (c = cm->all; c; c = c->next)
			if (c->remote_id == remote && c->remote_guid == get(m + REJ_INFO, 8) && memcmp(&c->remote, from, 16) == 0 && !c->active)
				break;
	if (!c) {
		cm->counters.unknown++;
		return;
	}
	switch (c->state) {
	case SD_CM_REQ_SENT:
	case SD_CM_REP_RECEIVED:
	case SD_CM_REQ_RECEIVED:
	case SD_CM_REP_SENT:
		end(c);
		emit(c, SD_CM_REJECTED, reason, m + REJ_PRIVATE, SD_CM_REJ_PRIVATE);
		break;
	case SD_CM_DREQ_SENT:
		enter_timewait(c);
		emit_disconnected(c);
		break;
	default:
		cm->counters.duplicates++;
	}
}

static void receive_mra(struct sd_cm_conn *c, const uint8_t *m)
{
	unsigned message = m[MRA_MESSAGE] >> 6;
	if ((c->state == SD_CM_REQ_SENT && message == TO_REQ) || (c->state == SD_CM_REP_SENT && message == TO_REP))
		set_timer(c, limited(m[MRA_TIMEOUT] >> 3, LEAST_TIMEOUT));
	else
		c->cm->counters.duplicates++;
}

static void receive_rtu(struct sd_cm_conn *c)
{
	if (c->state != SD_CM_REP_SENT) {
		c->cm->counters.duplicates++;
		return;
	}
	c->state = SD_CM_ESTABLISHED;
	c->timer = 0;
	emit(c, SD_CM_ACCEPTED, 0, NULL, 0);
}

static void receive_dreq(struct sd_cm *cm, struct sd_cm_conn *c, const struct in6_addr *from, const struct in6_addr *to, const uint8_t *m)
{
	uint8_t answer[SD_MAD_SIZE];
	if (c && get(m + DREQ_QPN, 3) != c->here.qpn) {
		cm->counters.malformed++;
		return;
	}
	/* A connection that is over is answered as well: the DREP may have been lost. */
	begin(answer, DREP, get(m + TRANSACTION, 8), (uint32_t)get(m + REMOTE_ID, 4), (uint32_t)get(m + LOCAL_ID, 4));
	send_to(cm, to, from, answer);
	if (!c) {
		cm->counters.unknown++;
		return;
	}
	switch (c->state) {
	case SD_CM_REP_SENT:
	case SD_CM_ESTABLISHED:
	case SD_CM_DREQ_SENT:
		enter_timewait(c);
		emit_disconnected(c);
		break;
	case SD_CM_REP_RECEIVED:
		end(c);
		emit(c, SD_CM_REJECTED, SD_CM_BY_CONSUMER, NULL, 0);
		break;
	default:
		cm->counters.duplicates++;
	}
}

static void receive_drep(struct sd_cm_conn *c)
{
	if (c->state != SD_CM_DREQ_SENT) {
		c->cm->counters.duplicates++;
		return;
	}
	enter_timewait(c);
	emit_disconnected(c);
}

void sd_cm_input(struct sd_cm *cm, const struct in6_addr *from, const struct in6_addr *to, const uint8_t *m, size_t size)
{
	cm->counters.received++;
	if (size != SD_MAD_SIZE || m[0] != BASE_VERSION || m[CLASS] != CM_CLASS || m[2] != CM_VERSION || m[METHOD] != SEND) {
		cm->counters.malformed++;
		return;
	}
	unsigned attribute = (unsigned)get(m + ATTRIBUTE, 2);
	if (attribute == REQ) {
		receive_req(cm, from, to, m);
		return;
	}
	if (attribute == REJ) {
		receive_rej(cm, from, m);
		return;
	}
	uint32_t remote = (uint32_t)get(m + LOCAL_ID, 4);
	struct sd_cm_conn *c = find_local(cm, (uint32_t)get(m + REMOTE_ID, 4), from);
	bool first = attribute == REP || (attribute == MRA && c && c->state == SD_CM_REQ_SENT); /* messages with the peer's identifier */
	if (c && !first && c->remote_id != remote)
		c = NULL;
	if (attribute == DREQ) {
		receive_dreq(cm, c, from, to, m);
		return;
	}
	if (!c && attribute == REP)
		send_rej(cm, to, from, get(m + TRANSACTION, 8), (uint32_t)get(m + REMOTE_ID, 4), remote, TO_REP, SD_CM_UNKNOWN_ID, NULL, 0);
	if (!c) {
		cm->counters.unknown++;
		return;
	}
	switch (attribute) {
	case REP:
		receive_rep(c, m);
		break;
	case MRA:
		receive_mra(c, m);
		break;
	case RTU:
		receive_rtu(c);
		break;
	case DREP:
		receive_drep(c);
		break;
	default:
		cm->counters.malformed++;
	}
}

/* expire runs the timer of a connection: the latest message is sent again, or the connection ends. */
static void expire(struct sd_cm_conn *c)
{
	unsigned most = c->state == SD_CM_REP_SENT ? c->peer_retries : c->state == SD_CM_DREQ_SENT ? DREQ_RETRIES : RETRIES;
	c->timer = 0;
	if (c->state == SD_CM_TIMEWAIT) {
		end(c);
		emit(c, SD_CM_TIMEWAIT_OVER, 0, NULL, 0);
		return;
	}
	if (c->state == SD_CM_REQ_RECEIVED) { /* no listener has come */
		c->cm->counters.rejected++;
		sd_cm_reject(c, SD_CM_UNKNOWN_SERVICE, NULL, 0);
		return;
	}
	if (c->tries < most) {
		c->tries++;
		c->cm->counters.retransmitted++;
		set_timer(c, c->state == SD_CM_REP_SENT ? limited(c->peer_timeout, LEAST_TIMEOUT) : RESPONSE_TIMEOUT);
		send_message(c, c->message);
		return;
	}
	c->cm->counters.timeouts++;
	if (c->state == SD_CM_DREQ_SENT) {
		enter_timewait(c);
		emit_disconnected(c);
		return;
	}
	send_rej(c->cm, &c->local, &c->remote, c->transaction, c->local_id, c->remote_id, TO_OTHER, SD_CM_TIMEOUT, NULL, 0);
	end(c);
	emit(c, SD_CM_UNREACHABLE, -ETIMEDOUT, NULL, 0);
}

void sd_cm_timers(struct sd_cm *cm)
{
	cm->next_timer = UINT64_MAX;
	for (struct sd_cm_conn *c = cm->all, *next; c; c = next) {
		next = c->next;
		if (c->timer && c->timer <= cm->now) {
			if (!c->user && c->state == SD_CM_CLOSED) {
				discard(c);
				continue;
			}
			expire(c);
		}
		if (c->timer && c->timer < cm->next_timer)
			cm->next_timer = c->timer;
	}
}

void sd_cm_put_ip_header(uint8_t *out, const struct sd_cm_ip *ip)
{
	bool v4 = IN6_IS_ADDR_V4MAPPED(&ip->source);
	memset(out, 0, SD_CM_IP_HEADER);
	out[1] = (uint8_t)((v4 ? 4 : 6) << 4);
	put(out + 2, ip->source_port, 2);
	memcpy(out + 4 + (v4 ? 12 : 0), ip->source.s6_addr + (v4 ? 12 : 0), v4 ? 4 : 16);
	memcpy(out + 20 + (v4 ? 12 : 0), ip->destination.s6_addr + (v4 ? 12 : 0), v4 ? 4 : 16);
}

bool sd_cm_get_ip_header(const uint8_t *in, struct sd_cm_ip *ip)
{
	unsigned version = in[1] >> 4;
	if (in[0] != 0 || (version != 4 && version != 6))
		return false;
	ip->source_port = (uint16_t)get(in + 2, 2);
	memcpy(&ip->source, in + 4, 16);
	memcpy(&ip->destination, in + 20, 16);
	for (int i = 0; i < 2 && version == 4; i++) {
		struct in6_addr *a = i ? &ip->destination : &ip->source;
		memset(a, 0, 12);
		a->s6_addr[10] = a->s6_addr[11] = 0xff;
	}
	return true;
}
