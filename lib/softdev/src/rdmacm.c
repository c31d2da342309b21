/* rdma_cm for fared0: this library replaces the functions of librdmacm. An identifier is of fared0 once it is bound to one of its addresses, or resolves a
 * destination from there; librdmacm has all others. One that listens at the wildcard address listens at both.
 *
 * librdmacm's functions call each other by their exported names, which lead here: within a call that this library forwards they go back to librdmacm. An
 * identifier that librdmacm has created stays in its memory also if it becomes one of fared0; librdmacm then sees it unbound at its end. */
#if !__has_include(<rdma/rdma_cma.h>)
typedef int sd_without_rdmacm; /* the headers of librdmacm are missing: the library has no rdma_cm */
#else
#include "forward.h"
#include "guard.h"
#include "manage.h"
#include "port.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#define FORWARD_AT(version, missing, name, ...)                                                                           \
	({                                                                                                                \
		inside++;                                                                                                 \
		__typeof__(name(__VA_ARGS__)) result = SD_FORWARD("librdmacm.so.1", version, missing, name, __VA_ARGS__); \
		inside--;                                                                                                 \
		result;                                                                                                   \
	})
#define FORWARD(missing, name, ...) FORWARD_AT("RDMACM_1.0", missing, name, __VA_ARGS__)
#define FORWARD_VOID(name, ...)                                                         \
	({                                                                              \
		inside++;                                                               \
		SD_FORWARD("librdmacm.so.1", "RDMACM_1.0", (void)0, name, __VA_ARGS__); \
		inside--;                                                               \
	})

/* Calls of this thread that are in librdmacm. */
static __thread int inside;

enum {
	BUCKETS = 1024,
	MAX_BACKLOG = 1024,
	FIRST_EPHEMERAL = 32768,
	EPHEMERALS = 28000,
	ACK_TIMEOUT = 17,   /* 0.5 s */
	MIN_RNR_TIMER = 12, /* 0.64 ms */
	ROOM_OF_LIBRDMACM = 1024,
	MAX_USER_DATA = SD_CM_REQ_PRIVATE - SD_CM_IP_HEADER,
	QP_ACCESS = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
};
#define RELISTEN 5000000000ull /* ns */
#define SERVICE_PREFIX 16      /* a service is the port space and the port */

struct event {
	struct rdma_cm_event base;
	struct event *next;
	struct id *owner; /* acknowledgements count for it */
	uint8_t private_data[SD_CM_MAX_PRIVATE];
};

/* An event channel. The program's descriptor is ready if a queued event or one of librdmacm is. */
struct channel {
	struct rdma_event_channel base;
	struct channel *next;
	struct rdma_event_channel *real; /* NULL: librdmacm has no device */
	int queued;                      /* eventfd that counts the queue */
	struct event *head, **tail;
};

struct id {
	struct id *next; /* of the bucket */
	struct rdma_cm_id *base;
	struct channel *channel;
	struct rdma_event_channel *real_channel; /* of an identifier that librdmacm has */
	bool real, ours, wild, listening, sync, v6_only, connect_failed, ack_timeout_set;
	struct in6_addr address; /* bound to; of the wildcard address: 0 */
	uint16_t port;
	uint32_t gid;
	struct sd_cm_conn *conn;
	int backlog, pending;
	uint8_t initiator_depth, responder_resources, traffic_class, ack_timeout, mtu;
	struct ibv_qp_init_attr *qp_attr; /* of connections of a listening endpoint */
	void *connect;                    /* first part of the private data */
	size_t connect_size;
	unsigned unacknowledged;
	pthread_cond_t acknowledged;
};

/* sd_ids_lock protects identifiers' and channels' lists and queues. The device's lock comes before it. */
static struct id *ids[BUCKETS];
static struct channel *channels;
static struct event *delivered; /* events that the program has */

static struct ibv_context *context;
static struct ibv_pd *default_pd;
static struct sd_cm *cm;
static pid_t context_owner;

static int fail(int err)
{
	errno = err;
	return -1;
}

/* active reports whether calls concern this library. */
static bool active(void)
{
	return inside == 0 && softdev_device() != NULL;
}

/* ---- addresses ---- */

static bool get_address(const struct sockaddr *from, struct in6_addr *a, uint16_t *port)
{
	if (!from)
		return false;
	if (from->sa_family == AF_INET6) {
		const struct sockaddr_in6 *s = (const struct sockaddr_in6 *)from;
		*a = s->sin6_addr;
		*port = ntohs(s->sin6_port);
		return true;
	}
	if (from->sa_family != AF_INET)
		return false;
	const struct sockaddr_in *s = (const struct sockaddr_in *)from;
	memset(a, 0, sizeof *a);
	a->s6_addr[10] = a->s6_addr[11] = 0xff;
	memcpy(&a->s6_addr[12], &s->sin_addr, 4);
	*port = ntohs(s->sin_port);
	return true;
}

static socklen_t set_address(struct sockaddr_storage *to, const struct in6_addr *a, uint16_t port)
{
	memset(to, 0, sizeof *to);
	if (sd_is_ipv4(a)) {
		struct sockaddr_in *s = (struct sockaddr_in *)to;
		s->sin_family = AF_INET;
		s->sin_port = htons(port);
		memcpy(&s->sin_addr, &a->s6_addr[12], 4);
		return sizeof *s;
	}
	struct sockaddr_in6 *s = (struct sockaddr_in6 *)to;
	s->sin6_family = AF_INET6;
	s->sin6_port = htons(port);
	s->sin6_addr = *a;
	return sizeof *s;
}

static bool is_wildcard(const struct in6_addr *a)
{
	static const uint8_t zero[4];
	return IN6_IS_ADDR_UNSPECIFIED(a) || (sd_is_ipv4(a) && memcmp(&a->s6_addr[12], zero, 4) == 0);
}

static bool find_gid(const struct in6_addr *a, uint32_t *gid)
{
	for (uint32_t i = 0; sd_gid(i); i++)
		if (memcmp(sd_gid(i), a, sizeof *a) == 0) {
			*gid = i;
			return true;
		}
	return false;
}

static bool gid_of_family(const struct in6_addr *a, uint32_t *gid)
{
	for (*gid = 0; sd_gid(*gid); ++*gid)
		if (sd_is_ipv4(sd_gid(*gid)) == sd_is_ipv4(a))
			return true;
	return false;
}

/* libfabric binds to the host's loopback address if it wants any device: it stands for the first address of fared0. */
static bool is_loopback(const struct in6_addr *a)
{
	return sd_is_ipv4(a) ? a->s6_addr[12] == 127 : IN6_IS_ADDR_LOOPBACK(a);
}

/* route_source asks the kernel for the source address of packets to a destination. */
static bool route_source(const struct in6_addr *destination, struct in6_addr *source)
{
	struct sockaddr_storage name;
	socklen_t size = set_address(&name, destination, SD_UDP_PORT);
	uint16_t port;
	int fd = socket(name.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	bool ok = fd >= 0 && connect(fd, (struct sockaddr *)&name, size) == 0;
	size = sizeof name;
	ok = ok && getsockname(fd, (struct sockaddr *)&name, &size) == 0 && get_address((struct sockaddr *)&name, source, &port);
	if (fd >= 0)
		close(fd);
	return ok;
}

/* ---- identifiers and events ---- */

static struct id **bucket(const struct rdma_cm_id *base)
{
	return &ids[(uintptr_t)base / 64 % BUCKETS];
}

static struct id *find_id(const struct rdma_cm_id *base)
{
	guard_lock(&sd_ids_lock);
	struct id *i = *bucket(base);
	while (i && i->base != base)
		i = i->next;
	guard_unlock(&sd_ids_lock);
	return i;
}

/* find_ours returns an identifier of fared0, or NULL: the call is librdmacm's. */
static struct id *find_ours(const struct rdma_cm_id *base)
{
	struct id *i = active() ? find_id(base) : NULL;
	return i && (i->ours || !i->real) ? i : NULL;
}

static void insert_id(struct id *i)
{
	guard_lock(&sd_ids_lock);
	i->next = *bucket(i->base);
	*bucket(i->base) = i;
	guard_unlock(&sd_ids_lock);
}

static struct id *new_id(struct rdma_cm_id *base)
{
	struct id *i = calloc(1, sizeof *i);
	if (!i)
		return NULL;
	i->real = base != NULL;
	/* librdmacm's sockets read its private part, which has here the state: no device, asynchronous. */
	i->base = base ? base : calloc(1, sizeof *base + ROOM_OF_LIBRDMACM);
	if (!i->base) {
		free(i);
		return NULL;
	}
	pthread_cond_init(&i->acknowledged, NULL);
	return i;
}

/* find_channel finds a channel also by librdmacm's, which its identifiers name. */
static struct channel *find_channel(const struct rdma_event_channel *base)
{
	guard_lock(&sd_ids_lock);
	struct channel *c = base ? channels : NULL;
	while (c && &c->base != base && c->real != base)
		c = c->next;
	guard_unlock(&sd_ids_lock);
	return c;
}

static void enqueue(struct channel *c, struct event *e)
{
	uint64_t one = 1;
	e->next = NULL;
	*c->tail = e;
	c->tail = &e->next;
	if (write(c->queued, &one, sizeof one) < 0)
		return; /* the counter is at its maximum: the descriptor is ready */
}

/* dequeue removes the first event of an identifier, or of any. The caller has the lock. */
static struct event *dequeue(struct channel *c, const struct id *owner)
{
	uint64_t one;
	for (struct event **at = &c->head; *at; at = &(*at)->next) {
		struct event *e = *at;
		if (owner && e->owner != owner && e->base.id != owner->base)
			continue;
		*at = e->next;
		if (c->tail == &e->next)
			c->tail = at;
		if (read(c->queued, &one, sizeof one) < 0)
			return e;
		return e;
	}
	return NULL;
}

static struct event *new_event(struct id *owner, enum rdma_cm_event_type type, int status)
{
	struct event *e = calloc(1, sizeof *e);
	if (!e)
		return NULL;
	e->owner = owner;
	e->base.id = owner->base;
	e->base.event = type;
	e->base.status = status;
	return e;
}

static void post(struct id *i, struct event *e)
{
	if (!e)
		abort(); /* a lost event would block the program forever */
	guard_lock(&sd_ids_lock);
	enqueue(i->channel, e);
	guard_unlock(&sd_ids_lock);
}

static void set_private_data(struct event *e, const uint8_t *data, size_t size)
{
	if (size == 0)
		return;
	memcpy(e->private_data, data, size);
	e->base.param.conn.private_data = e->private_data;
	e->base.param.conn.private_data_len = (uint8_t)size;
}

/* set_peer gives an event the peer's properties as those that this end may use. */
static void set_peer(struct event *e, const struct sd_cm_end *peer)
{
	struct rdma_conn_param *p = &e->base.param.conn;
	p->responder_resources = peer->initiator_depth;
	p->initiator_depth = peer->responder_resources;
	p->flow_control = peer->flow_control;
	p->retry_count = peer->retry_count;
	p->rnr_retry_count = peer->rnr_retry;
	p->srq = peer->srq;
	p->qp_num = peer->qpn;
}

/* ---- the device ---- */

static uint8_t mtu_code(const struct in6_addr *from, const struct in6_addr *to)
{
	uint32_t mtu = sd_payload_mtu(sd_port_mtu(from, to), sd_is_ipv4(from));
	uint8_t code = 0;
	while (mtu >= 256u << code)
		code++;
	return code;
}

static uint64_t service_of(const struct id *i)
{
	return (uint64_t)i->base->ps << SERVICE_PREFIX | i->port;
}

/* listener_for returns the identifier that listens for a service at an address. The caller has the lock. */
static struct id *listener_for(uint64_t service, const struct in6_addr *address)
{
	struct id *wild = NULL;
	for (int b = 0; b < BUCKETS; b++)
		for (struct id *i = ids[b]; i; i = i->next) {
			if (!i->listening || service != service_of(i))
				continue;
			if (memcmp(&i->address, address, sizeof *address) == 0)
				return i;
			bool family = sd_is_ipv4(&i->address) == sd_is_ipv4(address) || (!sd_is_ipv4(&i->address) && !i->v6_only);
			if (i->wild && family)
				wild = i;
		}
	return wild;
}

/* Services whose listener has ended, with the time. Programs such as perftest replace their listener while the peer already connects again: a request for such a
 * service waits. The device's lock protects them. */
static struct {
	uint64_t service, at;
} ended[16];
static unsigned ended_next;

static bool has_ended_now(uint64_t service)
{
	for (size_t i = 0; i < sizeof ended / sizeof *ended; i++)
		if (ended[i].at && ended[i].service == service && cm->now - ended[i].at < RELISTEN)
			return true;
	return false;
}

static void bind_to_device(struct id *i, uint32_t gid)
{
	i->ours = true;
	i->gid = gid;
	i->address = *sd_gid(gid);
	i->base->verbs = context;
	i->base->pd = default_pd;
	i->base->port_num = 1;
}

static int on_request(struct sd_cm *m, struct sd_cm_conn *c)
{
	struct sd_cm_ip ip;
	uint32_t gid;
	(void)m;
	if (!find_gid(&c->local, &gid))
		return SD_CM_BAD_GID;
	if (!sd_cm_get_ip_header(c->private_data, &ip))
		return SD_CM_BY_CONSUMER;
	if (c->mtu > mtu_code(&c->local, &c->remote))
		return SD_CM_BAD_MTU;
	guard_lock(&sd_ids_lock);
	struct id *listener = listener_for(c->service, &c->local), *i = NULL;
	struct event *e = NULL;
	int reason = !listener                           ? (has_ended_now(c->service) ? SD_CM_LATER : SD_CM_UNKNOWN_SERVICE)
		: listener->pending >= listener->backlog ? SD_CM_NO_RESOURCES
							 : 0;
	if (!reason) {
		i = new_id(NULL);
		e = i ? new_event(listener, RDMA_CM_EVENT_CONNECT_REQUEST, 0) : NULL;
		if (!e) {
			if (i)
				free(i->base);
			free(i);
			reason = SD_CM_NO_RESOURCES;
		}
	}
	if (reason) {
		guard_unlock(&sd_ids_lock);
		return reason;
	}
	bind_to_device(i, gid);
	i->port = listener->port;
	i->channel = listener->channel;
	i->conn = c;
	i->mtu = c->mtu;
	i->traffic_class = c->traffic_class;
	i->base->channel = &listener->channel->base;
	i->base->context = listener->base->context;
	i->base->ps = listener->base->ps;
	i->base->qp_type = IBV_QPT_RC;
	i->initiator_depth = c->there.responder_resources;
	i->responder_resources = c->there.initiator_depth;
	set_address(&i->base->route.addr.src_storage, &c->local, i->port);
	set_address(&i->base->route.addr.dst_storage, &ip.source, ip.source_port);
	i->base->route.num_paths = 1;
	c->user = i;
	e->base.id = i->base;
	e->base.listen_id = listener->base;
	set_peer(e, &c->there);
	set_private_data(e, c->private_data + SD_CM_IP_HEADER, MAX_USER_DATA);
	listener->pending++;
	enqueue(listener->channel, e);
	i->next = *bucket(i->base);
	*bucket(i->base) = i;
	guard_unlock(&sd_ids_lock);
	return 0;
}

static void on_event(struct sd_cm *m, struct sd_cm_conn *c, enum sd_cm_event type, int status, const uint8_t *private_data, size_t size)
{
	static const enum rdma_cm_event_type types[] = {
		[SD_CM_RESPONSE] = RDMA_CM_EVENT_CONNECT_RESPONSE,
		[SD_CM_ACCEPTED] = RDMA_CM_EVENT_ESTABLISHED,
		[SD_CM_REJECTED] = RDMA_CM_EVENT_REJECTED,
		[SD_CM_UNREACHABLE] = RDMA_CM_EVENT_UNREACHABLE,
		[SD_CM_DISCONNECTED] = RDMA_CM_EVENT_DISCONNECTED,
		[SD_CM_TIMEWAIT_OVER] = RDMA_CM_EVENT_TIMEWAIT_EXIT,
	};
	struct event *e = new_event(c->user, types[type], status);
	(void)m;
	if (e && type == SD_CM_RESPONSE)
		set_peer(e, &c->there);
	if (e)
		set_private_data(e, private_data, size);
	post(c->user, e);
}

static void enter(void)
{
	sd_enter(sd_managed(cm));
	sd_manage_begin(cm);
}

static void leave(void)
{
	struct sd_dev *dev = sd_managed(cm);
	sd_manage_end(cm);
	sd_leave(dev);
}

/* open_context opens the device, once in a process. Returns an errno. */
static int open_context(void)
{
	int err = 0;
	guard_lock(&sd_opening_lock);
	if (!context || context_owner != getpid()) { /* a child of fork opens the device again */
		struct ibv_context *c = softdev_open_device(softdev_device());
		struct ibv_pd *pd = c ? softdev_alloc_pd(c) : NULL;
		if (pd) {
			sd_enter(sd_dev_of(c));
			cm = sd_manage(sd_dev_of(c), on_request, on_event);
			sd_leave(sd_dev_of(c));
		}
		if (pd && cm) {
			context = c;
			default_pd = pd;
			context_owner = getpid();
		} else {
			err = errno ? errno : ENOMEM;
		}
	}
	guard_unlock(&sd_opening_lock);
	return err;
}

/* ---- event channels ---- */

EXPORT struct rdma_event_channel *rdma_create_event_channel(void)
{
	struct rdma_event_channel *real = FORWARD(NULL, rdma_create_event_channel);
	if (!active())
		return real;
	struct channel *c = calloc(1, sizeof *c);
	if (!c)
		return NULL;
	c->real = real;
	c->tail = &c->head;
	c->queued = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
	c->base.fd = c->queued;
	if (real && c->queued >= 0) {
		struct epoll_event e = {.events = EPOLLIN};
		fcntl(real->fd, F_SETFL, fcntl(real->fd, F_GETFL) | O_NONBLOCK);
		c->base.fd = epoll_create1(EPOLL_CLOEXEC);
		if (c->base.fd >= 0 && (epoll_ctl(c->base.fd, EPOLL_CTL_ADD, c->queued, &e) != 0 || epoll_ctl(c->base.fd, EPOLL_CTL_ADD, real->fd, &e) != 0)) {
			close(c->base.fd);
			c->base.fd = -1;
		}
	}
	if (c->base.fd < 0) {
		int err = errno;
		if (c->queued >= 0)
			close(c->queued);
		if (real)
			FORWARD_VOID(rdma_destroy_event_channel, real);
		free(c);
		errno = err;
		return NULL;
	}
	guard_lock(&sd_ids_lock);
	c->next = channels;
	channels = c;
	guard_unlock(&sd_ids_lock);
	return &c->base;
}

EXPORT void rdma_destroy_event_channel(struct rdma_event_channel *base)
{
	struct channel *c = active() ? find_channel(base) : NULL;
	if (!c) {
		FORWARD_VOID(rdma_destroy_event_channel, base);
		return;
	}
	guard_lock(&sd_ids_lock);
	struct channel **at = &channels;
	while (*at != c)
		at = &(*at)->next;
	*at = c->next;
	guard_unlock(&sd_ids_lock);
	while (c->head) {
		struct event *e = c->head;
		c->head = e->next;
		free(e);
	}
	if (c->real) {
		close(c->base.fd);
		FORWARD_VOID(rdma_destroy_event_channel, c->real);
	}
	close(c->queued);
	free(c);
}

/* ---- queue pairs ---- */

static int modify(struct id *i, struct ibv_qp_attr *attr, int mask)
{
	int err = softdev_modify_qp(i->base->qp, attr, mask);
	return err ? fail(err) : 0;
}

static int fill_init(struct ibv_qp_attr *attr)
{
	attr->qp_access_flags = QP_ACCESS;
	attr->pkey_index = 0;
	attr->port_num = 1;
	return IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
}

static int fill_rtr(const struct id *i, struct ibv_qp_attr *attr)
{
	const struct sd_cm_conn *c = i->conn;
	attr->path_mtu = i->mtu;
	attr->dest_qp_num = c->there.qpn;
	attr->rq_psn = c->here.psn;
	attr->max_dest_rd_atomic = i->responder_resources;
	attr->min_rnr_timer = MIN_RNR_TIMER;
	attr->ah_attr =
		(struct ibv_ah_attr){.is_global = 1, .port_num = 1, .grh = {.sgid_index = (uint8_t)i->gid, .hop_limit = 64, .traffic_class = i->traffic_class}};
	memcpy(&attr->ah_attr.grh.dgid, &c->remote, 16);
	return IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
}

/* fill_rts: the starting PSN of a message is that at which its receiver begins to send. The REQ has the counts and the timeout of retries of both ends, and each
 * end states its patience with a receiver that is not ready. */
static int fill_rts(const struct id *i, struct ibv_qp_attr *attr)
{
	const struct sd_cm_conn *c = i->conn;
	attr->sq_psn = c->there.psn;
	attr->timeout = c->ack_timeout;
	attr->retry_cnt = c->active ? c->here.retry_count : c->there.retry_count;
	attr->rnr_retry = c->there.rnr_retry;
	attr->max_rd_atomic = i->initiator_depth;
	return IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
}

static int start_qp(struct id *i)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
	int mask = fill_rtr(i, &attr);
	if (!i->base->qp)
		return 0;
	if (modify(i, &attr, mask) != 0)
		return -1;
	attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS};
	mask = fill_rts(i, &attr);
	return modify(i, &attr, mask);
}

static void stop_qp(struct id *i)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
	if (i->base->qp)
		softdev_modify_qp(i->base->qp, &attr, IBV_QP_STATE);
}

static void destroy_cqs(struct rdma_cm_id *base)
{
	if (base->recv_cq) {
		softdev_destroy_cq(base->recv_cq);
		softdev_destroy_comp_channel(base->recv_cq_channel);
	}
	if (base->send_cq && base->send_cq != base->recv_cq) { /* librdmacm's sockets have one queue for both */
		softdev_destroy_cq(base->send_cq);
		softdev_destroy_comp_channel(base->send_cq_channel);
	}
	base->recv_cq = base->send_cq = NULL;
	base->recv_cq_channel = base->send_cq_channel = NULL;
}

static int create_cq(struct rdma_cm_id *base, uint32_t size, struct ibv_comp_channel **channel, struct ibv_cq **cq)
{
	if (!(*channel = softdev_create_comp_channel(context)))
		return -1;
	if ((*cq = softdev_create_cq(context, size ? (int)size : 1, base, *channel, 0)))
		return 0;
	softdev_destroy_comp_channel(*channel);
	*channel = NULL;
	return -1;
}

EXPORT int rdma_create_qp_ex(struct rdma_cm_id *base, struct ibv_qp_init_attr_ex *attr)
{
	struct id *i = find_ours(base);
	if (!i)
		return FORWARD(-1, rdma_create_qp_ex, base, attr);
	if (base->qp || !base->verbs)
		return fail(EINVAL);
	if (!(attr->comp_mask & IBV_QP_INIT_ATTR_PD) || !attr->pd) {
		attr->comp_mask |= IBV_QP_INIT_ATTR_PD;
		attr->pd = base->pd;
	} else if (attr->pd->context != base->verbs) {
		return fail(EINVAL);
	}
	if ((!attr->recv_cq && !base->recv_cq && create_cq(base, attr->cap.max_recv_wr, &base->recv_cq_channel, &base->recv_cq) != 0) ||
		(!attr->send_cq && !base->send_cq && create_cq(base, attr->cap.max_send_wr, &base->send_cq_channel, &base->send_cq) != 0)) {
		destroy_cqs(base);
		return -1;
	}
	attr->recv_cq = attr->recv_cq ? attr->recv_cq : base->recv_cq;
	attr->send_cq = attr->send_cq ? attr->send_cq : base->send_cq;
	attr->srq = attr->srq ? attr->srq : base->srq;
	base->qp = sd_create_qp_ex(context, attr);
	struct ibv_qp_attr to = {.qp_state = IBV_QPS_INIT};
	if (!base->qp || modify(i, &to, fill_init(&to)) != 0) {
		int err = errno;
		if (base->qp)
			softdev_destroy_qp(base->qp);
		base->qp = NULL;
		destroy_cqs(base);
		return fail(err);
	}
	base->pd = base->qp->pd;
	return 0;
}

EXPORT int rdma_create_qp(struct rdma_cm_id *base, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	if (!find_ours(base))
		return FORWARD(-1, rdma_create_qp, base, pd, attr);
	struct ibv_qp_init_attr_ex ex = {0};
	memcpy(&ex, attr, sizeof *attr); /* its first fields are those of the structure */
	ex.comp_mask = IBV_QP_INIT_ATTR_PD;
	ex.pd = pd ? pd : base->pd;
	int result = rdma_create_qp_ex(base, &ex);
	memcpy(attr, &ex, sizeof *attr);
	return result;
}

EXPORT void rdma_destroy_qp(struct rdma_cm_id *base)
{
	if (!find_ours(base)) {
		FORWARD_VOID(rdma_destroy_qp, base);
		return;
	}
	softdev_destroy_qp(base->qp);
	base->qp = NULL;
	destroy_cqs(base);
}

EXPORT int rdma_create_srq(struct rdma_cm_id *base, struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
	if (!find_ours(base))
		return FORWARD(-1, rdma_create_srq, base, pd, attr);
	base->srq = softdev_create_srq(pd ? pd : base->pd, attr);
	return base->srq ? 0 : -1;
}

EXPORT int rdma_create_srq_ex(struct rdma_cm_id *base, struct ibv_srq_init_attr_ex *attr)
{
	if (!find_ours(base))
		return FORWARD(-1, rdma_create_srq_ex, base, attr);
	if ((attr->comp_mask & IBV_SRQ_INIT_ATTR_TYPE) && attr->srq_type != IBV_SRQT_BASIC)
		return fail(EOPNOTSUPP);
	struct ibv_srq_init_attr basic = {.srq_context = attr->srq_context, .attr = attr->attr};
	return rdma_create_srq(base, attr->comp_mask & IBV_SRQ_INIT_ATTR_PD ? attr->pd : NULL, &basic);
}

EXPORT void rdma_destroy_srq(struct rdma_cm_id *base)
{
	if (!find_ours(base)) {
		FORWARD_VOID(rdma_destroy_srq, base);
		return;
	}
	softdev_destroy_srq(base->srq);
	base->srq = NULL;
	destroy_cqs(base);
}

EXPORT int rdma_init_qp_attr(struct rdma_cm_id *base, struct ibv_qp_attr *attr, int *mask)
{
	struct id *i = find_ours(base);
	if (!i)
		return FORWARD_AT("RDMACM_1.2", -1, rdma_init_qp_attr, base, attr, mask);
	enum ibv_qp_state state = attr->qp_state;
	if (state != IBV_QPS_INIT && !i->conn)
		return fail(EINVAL);
	memset(attr, 0, sizeof *attr);
	attr->qp_state = state;
	switch (state) {
	case IBV_QPS_INIT:
		*mask = fill_init(attr);
		return 0;
	case IBV_QPS_RTR:
		*mask = fill_rtr(i, attr);
		return 0;
	case IBV_QPS_RTS:
		*mask = fill_rts(i, attr);
		return 0;
	default:
		return fail(EINVAL);
	}
}

/* ---- events ---- */

static int become_synchronous(struct id *i)
{
	struct rdma_event_channel *own = rdma_create_event_channel();
	if (!own)
		return -1;
	i->channel = find_channel(own);
	i->base->channel = own;
	i->sync = true;
	return 0;
}

/* answer completes a connection on arrival of the REP, as librdmacm does: the queue pair becomes ready before the RTU. */
static void answer(struct id *i, struct event *e)
{
	if (!i->base->qp)
		return; /* the program calls rdma_establish */
	i->initiator_depth = i->initiator_depth < e->base.param.conn.initiator_depth ? i->initiator_depth : e->base.param.conn.initiator_depth;
	int err = start_qp(i) != 0 ? errno : 0;
	enter();
	if (!err)
		err = sd_cm_ready(i->conn);
	else
		sd_cm_reject(i->conn, SD_CM_BY_CONSUMER, NULL, 0);
	leave();
	e->base.event = err ? RDMA_CM_EVENT_CONNECT_ERROR : RDMA_CM_EVENT_ESTABLISHED;
	e->base.status = -err;
	if (err) {
		i->connect_failed = true;
		stop_qp(i);
	}
}

/* deliver gives an event of this library to the program. Returns false if the event is of no interest. */
static bool deliver(struct event *e, struct id *i)
{
	switch (e->base.event) {
	case RDMA_CM_EVENT_CONNECT_RESPONSE:
		answer(i, e);
		return true;
	case RDMA_CM_EVENT_REJECTED:
		stop_qp(i);
		return !i->connect_failed;
	case RDMA_CM_EVENT_DISCONNECTED:
		return !i->connect_failed;
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		if (e->owner->sync && become_synchronous(i) != 0)
			e->base.status = -errno;
		return true;
	default:
		return true;
	}
}

EXPORT int rdma_get_cm_event(struct rdma_event_channel *base, struct rdma_cm_event **event)
{
	struct channel *c = active() ? find_channel(base) : NULL;
	if (!c)
		return FORWARD(-1, rdma_get_cm_event, base, event);
	if (!event)
		return fail(EINVAL);
	for (;;) {
		guard_lock(&sd_ids_lock);
		struct event *e = dequeue(c, NULL);
		struct id *i = NULL;
		if (e) {
			for (i = *bucket(e->base.id); i && i->base != e->base.id;)
				i = i->next;
			e->owner->unacknowledged++;
			if (e->base.event == RDMA_CM_EVENT_CONNECT_REQUEST)
				e->owner->pending--;
			e->next = delivered;
			delivered = e;
		}
		guard_unlock(&sd_ids_lock);
		if (e && i && deliver(e, i)) {
			*event = &e->base;
			return 0;
		}
		if (e) {
			rdma_ack_cm_event(&e->base);
			continue;
		}
		if (c->real && FORWARD(-1, rdma_get_cm_event, c->real, event) == 0)
			return 0;
		if (c->real && errno != EAGAIN && errno != EWOULDBLOCK)
			return -1;
		int flags = fcntl(c->base.fd, F_GETFL);
		struct pollfd ready = {.fd = c->base.fd, .events = POLLIN};
		if (flags < 0)
			return -1;
		if (flags & O_NONBLOCK)
			return fail(EAGAIN);
		if (poll(&ready, 1, -1) < 0)
			return -1;
	}
}

EXPORT int rdma_ack_cm_event(struct rdma_cm_event *base)
{
	if (!active() || !base)
		return FORWARD(-1, rdma_ack_cm_event, base);
	guard_lock(&sd_ids_lock);
	struct event **at = &delivered;
	while (*at && &(*at)->base != base)
		at = &(*at)->next;
	struct event *e = *at;
	if (e) {
		*at = e->next;
		e->owner->unacknowledged--;
		pthread_cond_signal(&e->owner->acknowledged);
	}
	guard_unlock(&sd_ids_lock);
	if (!e)
		return FORWARD(-1, rdma_ack_cm_event, base);
	free(e);
	return 0;
}

/* complete waits for the end of an operation on a synchronous identifier. */
static int complete(struct id *i)
{
	struct rdma_cm_id *base = i->base;
	if (!i->sync)
		return 0;
	if (base->event) {
		rdma_ack_cm_event(base->event);
		base->event = NULL;
	}
	if (rdma_get_cm_event(base->channel, &base->event) != 0)
		return -1;
	if (base->event->status == 0)
		return 0;
	if (base->event->event == RDMA_CM_EVENT_REJECTED)
		return fail(ECONNREFUSED);
	return fail(base->event->status < 0 ? -base->event->status : base->event->status);
}

/* ---- identifiers ---- */

EXPORT int rdma_create_id(struct rdma_event_channel *base, struct rdma_cm_id **out, void *user, enum rdma_port_space ps)
{
	struct channel *c = active() && base ? find_channel(base) : NULL;
	if (!active() || (base && !c))
		return FORWARD(-1, rdma_create_id, base, out, user, ps);
	struct rdma_cm_id *real = NULL;
	if ((!c || c->real) && FORWARD(-1, rdma_create_id, c ? c->real : NULL, &real, user, ps) != 0)
		real = NULL;
	struct id *i = new_id(real);
	if (!i) {
		if (real)
			FORWARD(-1, rdma_destroy_id, real);
		return fail(ENOMEM);
	}
	i->channel = c;
	i->real_channel = real ? real->channel : NULL;
	if (!real) {
		i->base->context = user;
		i->base->ps = ps;
		i->base->qp_type = ps == RDMA_PS_UDP || ps == RDMA_PS_IPOIB ? IBV_QPT_UD : IBV_QPT_RC;
		i->base->channel = base;
		if (!c && become_synchronous(i) != 0) {
			free(i->base);
			free(i);
			return -1;
		}
	}
	insert_id(i);
	*out = i->base;
	return 0;
}

/* take makes an identifier one of fared0. Returns an errno. */
static int take(struct id *i, uint32_t gid, uint16_t port)
{
	if (i->base->ps != RDMA_PS_TCP)
		return EPROTONOSUPPORT;
	int err = open_context();
	if (err)
		return err;
	sd_enter(sd_dev_of(context));
	err = sd_listen(sd_dev_of(context), gid);
	sd_leave(sd_dev_of(context));
	if (err)
		return err;
	if (!i->channel && become_synchronous(i) != 0)
		return errno;
	i->base->channel = &i->channel->base;
	i->wild = false;
	bind_to_device(i, gid);
	if (port)
		i->port = port;
	return 0;
}

/* choose_port gives an identifier a port that no listener uses. */
static void choose_port(struct id *i)
{
	uint32_t at = 0;
	if (i->port)
		return;
	if (getrandom(&at, sizeof at, 0) < 0)
		at = (uint32_t)(uintptr_t)i;
	guard_lock(&sd_ids_lock);
	for (int n = 0; n < EPHEMERALS; n++) {
		i->port = (uint16_t)(FIRST_EPHEMERAL + (at + (uint32_t)n) % EPHEMERALS);
		bool used = false;
		for (int b = 0; b < BUCKETS && !used; b++)
			for (struct id *other = ids[b]; other && !used; other = other->next)
				used = other != i && other->listening && other->port == i->port;
		if (!used)
			break;
	}
	guard_unlock(&sd_ids_lock);
}

EXPORT int rdma_bind_addr(struct rdma_cm_id *base, struct sockaddr *name)
{
	struct id *i = active() ? find_id(base) : NULL;
	struct in6_addr a;
	uint16_t port;
	uint32_t gid;
	if (!i || (i->real && !i->ours && !get_address(name, &a, &port)))
		return FORWARD(-1, rdma_bind_addr, base, name);
	if (!get_address(name, &a, &port) || i->ours || i->wild)
		return fail(EINVAL);
	if (is_wildcard(&a)) {
		if (i->real) {
			if (FORWARD(-1, rdma_bind_addr, base, name) != 0)
				return -1;
			get_address(&base->route.addr.src_addr, &a, &port);
		}
		i->wild = true;
		i->address = a;
		i->port = port;
		choose_port(i);
		if (!i->real)
			set_address(&base->route.addr.src_storage, &a, i->port);
		return 0;
	}
	if (!find_gid(&a, &gid)) {
		/* The kernel would bind the host's loopback address to any of its devices. */
		if (!is_loopback(&a) || !gid_of_family(&a, &gid))
			return i->real ? FORWARD(-1, rdma_bind_addr, base, name) : fail(ENODEV);
	}
	int err = take(i, gid, port);
	if (err)
		return fail(err);
	choose_port(i);
	set_address(&base->route.addr.src_storage, &i->address, i->port);
	return 0;
}

/* choose_source returns the GID from which an identifier reaches a destination: the bound address, the requested one, or that of the kernel's route. Without
 * librdmacm's devices any of the family is better than none. */
static bool choose_source(const struct id *i, const struct sockaddr *source, const struct in6_addr *destination, uint32_t *gid)
{
	struct in6_addr a;
	uint16_t port;
	if (i->ours) {
		*gid = i->gid;
		return true;
	}
	if (get_address(source, &a, &port) && !is_wildcard(&a))
		return find_gid(&a, gid);
	if (route_source(destination, &a) && find_gid(&a, gid))
		return true;
	return !i->real && gid_of_family(destination, gid);
}

EXPORT int rdma_resolve_addr(struct rdma_cm_id *base, struct sockaddr *source, struct sockaddr *destination, int timeout_ms)
{
	struct id *i = active() ? find_id(base) : NULL;
	struct in6_addr to, from;
	uint16_t port, source_port = 0;
	uint32_t gid;
	if (!i || (i->real && !i->ours && !get_address(destination, &to, &port)))
		return FORWARD(-1, rdma_resolve_addr, base, source, destination, timeout_ms);
	if (!get_address(destination, &to, &port) || i->conn)
		return fail(EINVAL);
	if (!choose_source(i, source, &to, &gid) || sd_is_ipv4(sd_gid(gid)) != sd_is_ipv4(&to))
		return i->real && !i->ours ? FORWARD(-1, rdma_resolve_addr, base, source, destination, timeout_ms) : fail(ENODEV);
	if (source)
		get_address(source, &from, &source_port);
	int err = take(i, gid, source_port);
	if (err)
		return fail(err);
	i->mtu = mtu_code(&i->address, &to);
	if (i->mtu == 0)
		return fail(ENETUNREACH);
	choose_port(i);
	set_address(&base->route.addr.src_storage, &i->address, i->port);
	set_address(&base->route.addr.dst_storage, &to, port);
	memcpy(&base->route.addr.addr.ibaddr.sgid, &i->address, 16);
	memcpy(&base->route.addr.addr.ibaddr.dgid, &to, 16);
	base->route.addr.addr.ibaddr.pkey = 0xffff;
	post(i, new_event(i, RDMA_CM_EVENT_ADDR_RESOLVED, 0));
	return complete(i);
}

EXPORT int rdma_resolve_route(struct rdma_cm_id *base, int timeout_ms)
{
	struct id *i = find_ours(base);
	if (!i)
		return FORWARD(-1, rdma_resolve_route, base, timeout_ms);
	struct in6_addr to;
	uint16_t port;
	if (!i->ours || !get_address(&base->route.addr.dst_addr, &to, &port))
		return fail(EINVAL);
	struct ibv_sa_path_rec *path = calloc(1, sizeof *path);
	if (!path)
		return -1;
	memcpy(&path->sgid, &i->address, 16);
	memcpy(&path->dgid, &to, 16);
	path->hop_limit = 64;
	path->pkey = 0xffff;
	path->mtu_selector = 2; /* exactly */
	path->mtu = i->mtu;
	path->reversible = 1;
	path->numb_path = 1;
	free(base->route.path_rec);
	base->route.path_rec = path;
	base->route.num_paths = 1;
	post(i, new_event(i, RDMA_CM_EVENT_ROUTE_RESOLVED, 0));
	return complete(i);
}

/* remove_id ends an identifier that no other thread uses, and the connection requests that wait at it. The program has acknowledged its events. */
static void remove_id(struct id *i)
{
	struct event *e;
	if (i->conn || i->listening) {
		enter();
		if (i->conn)
			sd_cm_release(i->conn);
		if (i->listening) {
			ended[ended_next].service = service_of(i);
			ended[ended_next].at = cm->now;
			ended_next = (ended_next + 1) % (sizeof ended / sizeof *ended);
		}
		leave();
	}
	guard_lock(&sd_ids_lock);
	i->listening = false;
	struct event *requests = NULL;
	while (i->channel && (e = dequeue(i->channel, i))) {
		if (e->base.event == RDMA_CM_EVENT_CONNECT_REQUEST && e->owner == i) {
			e->next = requests;
			requests = e;
		} else {
			free(e);
		}
	}
	while (i->unacknowledged > 0)
		pthread_cond_wait(&i->acknowledged, &sd_ids_lock);
	struct id **at = bucket(i->base);
	while (*at != i)
		at = &(*at)->next;
	*at = i->next;
	guard_unlock(&sd_ids_lock);
	while (requests) {
		e = requests;
		requests = e->next;
		struct id *child = find_id(e->base.id);
		if (child)
			rdma_destroy_id(child->base);
		free(e);
	}
}

EXPORT int rdma_destroy_id(struct rdma_cm_id *base)
{
	struct id *i = active() ? find_id(base) : NULL;
	int result = 0;
	if (!i)
		return FORWARD(-1, rdma_destroy_id, base);
	if (base->event && (i->ours || !i->real)) {
		rdma_ack_cm_event(base->event);
		base->event = NULL;
	}
	remove_id(i);
	if (i->ours || !i->real) {
		free(base->route.path_rec);
		base->route.path_rec = NULL;
	}
	if (i->sync && i->channel)
		rdma_destroy_event_channel(&i->channel->base);
	if (i->real && i->ours) { /* as librdmacm has left it */
		base->channel = i->real_channel;
		base->verbs = NULL;
		base->pd = NULL;
		base->port_num = 0;
		base->route.num_paths = 0;
	}
	if (i->real)
		result = FORWARD(-1, rdma_destroy_id, base);
	else
		free(base);
	free(i->qp_attr);
	free(i->connect);
	pthread_cond_destroy(&i->acknowledged);
	free(i);
	return result;
}

EXPORT int rdma_migrate_id(struct rdma_cm_id *base, struct rdma_event_channel *to)
{
	struct id *i = active() ? find_id(base) : NULL;
	struct channel *c = active() && to ? find_channel(to) : NULL;
	if (!i) /* a connection that librdmacm has accepted */
		return FORWARD(-1, rdma_migrate_id, base, c ? c->real : to);
	if (i->real && !i->ours) {
		if (to && (!c || !c->real))
			return fail(EINVAL);
		if (FORWARD(-1, rdma_migrate_id, base, c ? c->real : NULL) != 0)
			return -1;
		i->real_channel = base->channel;
		i->channel = c;
		return 0;
	}
	struct channel *from = i->channel;
	bool was_sync = i->sync;
	struct event *e;
	if ((to && !c) || (was_sync && !to))
		return fail(EINVAL);
	if (!to && become_synchronous(i) != 0)
		return -1;
	c = to ? c : i->channel;
	if (was_sync && base->event) {
		rdma_ack_cm_event(base->event);
		base->event = NULL;
	}
	guard_lock(&sd_ids_lock);
	while ((e = dequeue(from, i)))
		enqueue(c, e);
	i->sync = !to;
	i->channel = c;
	base->channel = &c->base;
	while (i->unacknowledged > 0)
		pthread_cond_wait(&i->acknowledged, &sd_ids_lock);
	guard_unlock(&sd_ids_lock);
	if (was_sync)
		rdma_destroy_event_channel(&from->base);
	return 0;
}

EXPORT int rdma_set_option(struct rdma_cm_id *base, int level, int name, void *value, size_t size)
{
	struct id *i = active() ? find_id(base) : NULL;
	if (!i || (i->real && !i->ours && FORWARD(-1, rdma_set_option, base, level, name, value, size) != 0))
		return i ? -1 : FORWARD(-1, rdma_set_option, base, level, name, value, size);
	if (level != RDMA_OPTION_ID)
		return i->real && !i->ours ? 0 : fail(ENOSYS);
	if (size != (name == RDMA_OPTION_ID_TOS || name == RDMA_OPTION_ID_ACK_TIMEOUT ? sizeof(uint8_t) : sizeof(int)))
		return fail(EINVAL);
	switch (name) {
	case RDMA_OPTION_ID_TOS:
		i->traffic_class = *(uint8_t *)value;
		return 0;
	case RDMA_OPTION_ID_REUSEADDR:
		return 0;
	case RDMA_OPTION_ID_AFONLY:
		i->v6_only = *(int *)value;
		return 0;
	case RDMA_OPTION_ID_ACK_TIMEOUT:
		i->ack_timeout = *(uint8_t *)value & 31;
		i->ack_timeout_set = true;
		return 0;
	default:
		return fail(ENOSYS);
	}
}

/* ---- connections ---- */

/* listen_everywhere receives at every address of the device. Returns an errno. */
static int listen_everywhere(void)
{
	int err = open_context();
	if (err)
		return err;
	struct sd_dev *dev = sd_dev_of(context);
	sd_enter(dev);
	for (uint32_t g = 0; sd_gid(g) && !err; g++)
		err = sd_listen(dev, g);
	sd_leave(dev);
	return err;
}

EXPORT int rdma_listen(struct rdma_cm_id *base, int backlog)
{
	struct id *i = active() ? find_id(base) : NULL;
	if (!i || (i->real && !i->ours && !i->wild))
		return FORWARD(-1, rdma_listen, base, backlog);
	if (base->ps != RDMA_PS_TCP)
		return i->real && !i->ours ? FORWARD(-1, rdma_listen, base, backlog) : fail(EPROTONOSUPPORT);
	if (!i->ours && !i->wild) {
		i->wild = true;
		i->address = (struct in6_addr){0};
		choose_port(i);
	}
	int err = 0;
	if (!i->channel && become_synchronous(i) != 0) /* librdmacm has the endpoint's channel */
		return -1;
	if (i->real && i->wild && !i->sync && FORWARD(-1, rdma_listen, base, backlog) != 0)
		return -1;
	guard_lock(&sd_ids_lock);
	for (int b = 0; b < BUCKETS; b++)
		for (struct id *other = ids[b]; other; other = other->next)
			if (other->listening && other != i && other->port == i->port && other->base->ps == base->ps &&
				(other->wild || i->wild || memcmp(&other->address, &i->address, 16) == 0))
				err = EADDRINUSE;
	if (!err) {
		i->backlog = backlog > 0 && backlog < MAX_BACKLOG ? backlog : MAX_BACKLOG;
		i->listening = true;
	}
	guard_unlock(&sd_ids_lock);
	if (!err && i->wild && (err = listen_everywhere()) != 0) /* last, so that no request comes before */
		i->listening = false;
	if (!err) {
		enter();
		sd_cm_offer(cm);
		leave();
	}
	return err ? fail(err) : 0;
}

EXPORT int rdma_get_request(struct rdma_cm_id *listener, struct rdma_cm_id **out)
{
	struct id *i = active() ? find_id(listener) : NULL;
	struct rdma_cm_event *event;
	if (!i || !i->listening)
		return FORWARD(-1, rdma_get_request, listener, out);
	if (!i->sync)
		return fail(EINVAL);
	if (listener->event) {
		rdma_ack_cm_event(listener->event);
		listener->event = NULL;
	}
	if (rdma_get_cm_event(&i->channel->base, &event) != 0)
		return -1;
	int err = event->status ? abs(event->status) : event->event != RDMA_CM_EVENT_CONNECT_REQUEST ? EINVAL : 0;
	if (!err && i->qp_attr) {
		struct ibv_qp_init_attr attr = *i->qp_attr;
		err = rdma_create_qp(event->id, listener->pd, &attr) != 0 ? errno : 0;
	}
	if (err) {
		listener->event = event;
		return fail(err);
	}
	*out = event->id;
	(*out)->event = event;
	return 0;
}

static uint8_t within(uint8_t wanted, uint8_t any, uint8_t most)
{
	return wanted == any ? most : wanted;
}

/* set_local fills in the properties of this end's queue pair. */
static void set_local(struct id *i, const struct rdma_conn_param *p)
{
	struct sd_cm_end *e = &i->conn->here;
	uint32_t psn = 0;
	if (getrandom(&psn, sizeof psn, 0) < 0)
		psn = (uint32_t)i->conn->local_id;
	*e = (struct sd_cm_end){.psn = psn & 0xffffff, .responder_resources = i->responder_resources, .initiator_depth = i->initiator_depth};
	e->qpn = (i->base->qp ? i->base->qp->qp_num : p ? p->qp_num : 0) & 0xffffff;
	e->srq = i->base->qp ? i->base->qp->srq != NULL : p && p->srq;
	e->retry_count = p ? p->retry_count & 7 : 7;
	e->rnr_retry = p ? p->rnr_retry_count & 7 : 7;
	e->flow_control = p && p->flow_control;
}

/* private_data joins the parts of the private data. Returns its size, or -1 if it is too long. */
static int private_data(const struct id *i, const struct rdma_conn_param *p, uint8_t *out, size_t most)
{
	size_t size = p && p->private_data ? p->private_data_len : 0;
	if (i->connect_size + size > most)
		return fail(EINVAL);
	if (i->connect_size)
		memcpy(out, i->connect, i->connect_size);
	if (size)
		memcpy(out + i->connect_size, p->private_data, size);
	return (int)(i->connect_size + size);
}

EXPORT int rdma_connect(struct rdma_cm_id *base, struct rdma_conn_param *p)
{
	struct id *i = find_ours(base);
	uint8_t data[SD_CM_REQ_PRIVATE];
	struct sd_cm_ip ip;
	uint16_t port;
	if (!i)
		return FORWARD(-1, rdma_connect, base, p);
	int size = private_data(i, p, data + SD_CM_IP_HEADER, MAX_USER_DATA);
	if (size < 0)
		return -1;
	if ((!base->qp && !p) || !i->ours || i->conn || !get_address(&base->route.addr.dst_addr, &ip.destination, &port) || !base->route.num_paths)
		return fail(EINVAL);
	i->responder_resources = within(p ? p->responder_resources : RDMA_MAX_RESP_RES, RDMA_MAX_RESP_RES, SD_MAX_READS);
	i->initiator_depth = within(p ? p->initiator_depth : RDMA_MAX_INIT_DEPTH, RDMA_MAX_INIT_DEPTH, SD_MAX_READS);
	if (i->responder_resources > SD_MAX_READS || i->initiator_depth > SD_MAX_READS)
		return fail(EINVAL);
	ip.source = i->address;
	ip.source_port = i->port;
	sd_cm_put_ip_header(data, &ip);
	enter();
	struct sd_cm_conn *c = sd_cm_open(cm, i);
	int err = c ? 0 : ENOMEM;
	if (c) {
		i->conn = c;
		set_local(i, p);
		c->local = i->address;
		c->remote = ip.destination;
		c->service = (uint64_t)base->ps << SERVICE_PREFIX | port;
		c->mtu = i->mtu;
		c->traffic_class = i->traffic_class;
		c->ack_timeout = i->ack_timeout_set ? i->ack_timeout : ACK_TIMEOUT;
		err = sd_cm_connect(c, data, SD_CM_IP_HEADER + (size_t)size);
	}
	leave();
	return err ? fail(err) : complete(i);
}

EXPORT int rdma_establish(struct rdma_cm_id *base)
{
	struct id *i = find_ours(base);
	if (!i)
		return FORWARD_AT("RDMACM_1.2", -1, rdma_establish, base);
	if (base->qp || !i->conn)
		return fail(EINVAL);
	enter();
	int err = sd_cm_ready(i->conn);
	leave();
	return err ? fail(err) : 0;
}

EXPORT int rdma_accept(struct rdma_cm_id *base, struct rdma_conn_param *p)
{
	struct id *i = find_ours(base);
	uint8_t data[SD_CM_REP_PRIVATE];
	if (!i)
		return FORWARD(-1, rdma_accept, base, p);
	int size = private_data(i, p, data, sizeof data);
	if (size < 0)
		return -1;
	if (!i->conn || (!base->qp && !p))
		return fail(EINVAL);
	uint8_t offered = i->initiator_depth < SD_MAX_READS ? i->initiator_depth : SD_MAX_READS;
	uint8_t wanted = i->responder_resources < SD_MAX_READS ? i->responder_resources : SD_MAX_READS;
	i->initiator_depth = within(p ? p->initiator_depth : RDMA_MAX_INIT_DEPTH, RDMA_MAX_INIT_DEPTH, offered);
	i->responder_resources = within(p ? p->responder_resources : RDMA_MAX_RESP_RES, RDMA_MAX_RESP_RES, wanted);
	if (i->responder_resources > SD_MAX_READS || i->initiator_depth > SD_MAX_READS)
		return fail(EINVAL);
	enter();
	set_local(i, p);
	leave();
	if (start_qp(i) != 0)
		return -1;
	enter();
	int err = sd_cm_accept(i->conn, data, (size_t)size);
	leave();
	if (err) {
		stop_qp(i);
		return fail(err);
	}
	return complete(i);
}

EXPORT int rdma_reject(struct rdma_cm_id *base, const void *data, uint8_t size)
{
	struct id *i = find_ours(base);
	if (!i)
		return FORWARD(-1, rdma_reject, base, data, size);
	if (!i->conn)
		return fail(EINVAL);
	enter();
	int err = sd_cm_reject(i->conn, SD_CM_BY_CONSUMER, data, data ? size : 0);
	leave();
	return err ? fail(err) : 0;
}

EXPORT int rdma_reject_ece(struct rdma_cm_id *base, const void *data, uint8_t size)
{
	return find_ours(base) ? fail(EOPNOTSUPP) : FORWARD_AT("RDMACM_1.3", -1, rdma_reject_ece, base, data, size);
}

EXPORT int rdma_set_local_ece(struct rdma_cm_id *base, struct ibv_ece *ece)
{
	return find_ours(base) ? fail(EOPNOTSUPP) : FORWARD_AT("RDMACM_1.3", -1, rdma_set_local_ece, base, ece);
}

EXPORT int rdma_get_remote_ece(struct rdma_cm_id *base, struct ibv_ece *ece)
{
	return find_ours(base) ? fail(EOPNOTSUPP) : FORWARD_AT("RDMACM_1.3", -1, rdma_get_remote_ece, base, ece);
}

EXPORT int rdma_notify(struct rdma_cm_id *base, enum ibv_event_type event)
{
	return find_ours(base) ? 0 : FORWARD(-1, rdma_notify, base, event);
}

EXPORT int rdma_disconnect(struct rdma_cm_id *base)
{
	struct id *i = find_ours(base);
	if (!i)
		return FORWARD(-1, rdma_disconnect, base);
	if (!i->conn)
		return fail(EINVAL);
	stop_qp(i);
	enter();
	int err = sd_cm_disconnect(i->conn);
	leave();
	return err ? fail(err) : complete(i);
}

/* ---- multicast, which fared0 does not have ---- */

EXPORT int rdma_join_multicast(struct rdma_cm_id *base, struct sockaddr *a, void *user)
{
	return find_ours(base) ? fail(EOPNOTSUPP) : FORWARD(-1, rdma_join_multicast, base, a, user);
}

EXPORT int rdma_join_multicast_ex(struct rdma_cm_id *base, struct rdma_cm_join_mc_attr_ex *attr, void *user)
{
	return find_ours(base) ? fail(EOPNOTSUPP) : FORWARD_AT("RDMACM_1.1", -1, rdma_join_multicast_ex, base, attr, user);
}

EXPORT int rdma_leave_multicast(struct rdma_cm_id *base, struct sockaddr *a)
{
	return find_ours(base) ? fail(EOPNOTSUPP) : FORWARD(-1, rdma_leave_multicast, base, a);
}

/* ---- devices and names ---- */

/* A list of devices: that of librdmacm before the array that the program has. */
struct devices {
	struct ibv_context **theirs;
	struct ibv_context *contexts[];
};

EXPORT struct ibv_context **rdma_get_devices(int *num)
{
	int n = 0;
	struct ibv_context **theirs = FORWARD(NULL, rdma_get_devices, &n);
	if (!active()) {
		if (num)
			*num = theirs ? n : 0;
		return theirs;
	}
	n = theirs ? n : 0;
	struct devices *d = open_context() == 0 ? calloc(1, sizeof *d + ((size_t)n + 2) * sizeof *d->contexts) : NULL;
	if (!d) {
		if (theirs)
			FORWARD_VOID(rdma_free_devices, theirs);
		return NULL;
	}
	d->theirs = theirs;
	int all = 0;
	for (int i = 0; i < n; i++)
		if (!softdev_owns(theirs[i])) /* librdmacm has found fared0 by libibverbs' functions */
			d->contexts[all++] = theirs[i];
	d->contexts[all++] = context;
	if (num)
		*num = all;
	return d->contexts;
}

EXPORT void rdma_free_devices(struct ibv_context **contexts)
{
	if (!active()) {
		FORWARD_VOID(rdma_free_devices, contexts);
		return;
	}
	struct devices *d = (struct devices *)((char *)contexts - offsetof(struct devices, contexts));
	if (d->theirs)
		FORWARD_VOID(rdma_free_devices, d->theirs);
	free(d);
}

static bool copy_name(struct sockaddr **to, socklen_t *to_size, const struct sockaddr *from, socklen_t size)
{
	if (!from || size == 0)
		return true;
	*to = malloc(size);
	if (!*to)
		return false;
	memcpy(*to, from, size);
	*to_size = size;
	return true;
}

EXPORT int rdma_getaddrinfo(const char *node, const char *service, const struct rdma_addrinfo *hints, struct rdma_addrinfo **out)
{
	static const struct rdma_addrinfo none = {.ai_port_space = RDMA_PS_TCP, .ai_qp_type = IBV_QPT_RC};
	if (!active() || (hints && hints->ai_family != AF_UNSPEC && hints->ai_family != AF_INET && hints->ai_family != AF_INET6))
		return FORWARD(-1, rdma_getaddrinfo, node, service, hints, out);
	const struct rdma_addrinfo *h = hints ? hints : &none;
	bool passive = h->ai_flags & RAI_PASSIVE;
	if (!node && !service && (!hints || !(passive ? h->ai_src_len : h->ai_dst_len)))
		return fail(EINVAL);
	struct addrinfo *list = NULL, wanted = {.ai_family = h->ai_family};
	wanted.ai_flags = (passive ? AI_PASSIVE : 0) | (h->ai_flags & RAI_NUMERICHOST ? AI_NUMERICHOST : 0);
	wanted.ai_socktype = h->ai_qp_type == IBV_QPT_UD || h->ai_port_space == RDMA_PS_UDP ? SOCK_DGRAM : SOCK_STREAM;
	if (node || service) {
		int err = getaddrinfo(node, service, &wanted, &list);
		if (err)
			return err;
	}
	struct rdma_addrinfo *r = calloc(1, sizeof *r);
	bool ok = r != NULL;
	if (ok) {
		r->ai_flags = h->ai_flags;
		r->ai_qp_type = h->ai_qp_type ? h->ai_qp_type : wanted.ai_socktype == SOCK_DGRAM ? IBV_QPT_UD : IBV_QPT_RC;
		r->ai_port_space = h->ai_port_space ? h->ai_port_space : wanted.ai_socktype == SOCK_DGRAM ? RDMA_PS_UDP : RDMA_PS_TCP;
		const struct sockaddr *found = list ? list->ai_addr : passive ? h->ai_src_addr : h->ai_dst_addr;
		socklen_t size = list ? list->ai_addrlen : passive ? h->ai_src_len : h->ai_dst_len;
		r->ai_family = found->sa_family;
		ok = passive ? copy_name(&r->ai_src_addr, &r->ai_src_len, found, size) : copy_name(&r->ai_dst_addr, &r->ai_dst_len, found, size);
		ok = ok && (passive || copy_name(&r->ai_src_addr, &r->ai_src_len, h->ai_src_addr, h->ai_src_len));
	}
	if (list)
		freeaddrinfo(list);
	if (!ok) {
		if (r)
			rdma_freeaddrinfo(r);
		return fail(ENOMEM);
	}
	*out = r;
	return 0;
}

/* The lists of librdmacm are of the same kind. */
EXPORT void rdma_freeaddrinfo(struct rdma_addrinfo *r)
{
	while (r) {
		struct rdma_addrinfo *next = r->ai_next;
		free(r->ai_connect);
		free(r->ai_route);
		free(r->ai_src_canonname);
		free(r->ai_dst_canonname);
		free(r->ai_src_addr);
		free(r->ai_dst_addr);
		free(r);
		r = next;
	}
}

static int fill_endpoint(struct id *i, struct rdma_addrinfo *r, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct rdma_cm_id *base = i->base;
	if (r->ai_flags & RAI_PASSIVE) {
		if (rdma_bind_addr(base, r->ai_src_addr) != 0)
			return -1;
		if (pd)
			base->pd = pd;
		if (attr && !(i->qp_attr = malloc(sizeof *attr)))
			return -1;
		if (attr) {
			*i->qp_attr = *attr;
			i->qp_attr->qp_type = (enum ibv_qp_type)r->ai_qp_type;
		}
		return 0;
	}
	enum { PATIENCE_MS = 2000 };
	if (rdma_resolve_addr(base, r->ai_src_addr, r->ai_dst_addr, PATIENCE_MS) != 0 || rdma_resolve_route(base, PATIENCE_MS) != 0)
		return -1;
	if (attr) {
		attr->qp_type = (enum ibv_qp_type)r->ai_qp_type;
		if (rdma_create_qp(base, pd, attr) != 0)
			return -1;
	}
	if (r->ai_connect_len) {
		if (!(i->connect = malloc(r->ai_connect_len)))
			return -1;
		memcpy(i->connect, r->ai_connect, r->ai_connect_len);
		i->connect_size = r->ai_connect_len;
	}
	return 0;
}

/* concerns_fared0 reports whether an endpoint with these addresses is one of fared0. */
static bool concerns_fared0(const struct rdma_addrinfo *r, bool librdmacm)
{
	struct in6_addr a;
	uint16_t port;
	uint32_t gid;
	if (r->ai_flags & RAI_PASSIVE)
		return get_address(r->ai_src_addr, &a, &port) && (is_wildcard(&a) || find_gid(&a, &gid) || !librdmacm);
	struct id none = {.real = librdmacm};
	return get_address(r->ai_dst_addr, &a, &port) && choose_source(&none, r->ai_src_addr, &a, &gid);
}

EXPORT int rdma_create_ep(struct rdma_cm_id **out, struct rdma_addrinfo *r, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct rdma_cm_id *base;
	if (!active())
		return FORWARD(-1, rdma_create_ep, out, r, pd, attr);
	if (rdma_create_id(NULL, &base, NULL, (enum rdma_port_space)r->ai_port_space) != 0)
		return -1;
	struct id *i = find_id(base);
	if (!concerns_fared0(r, i->real)) {
		rdma_destroy_id(base);
		return FORWARD(-1, rdma_create_ep, out, r, pd, attr);
	}
	base->qp_type = (enum ibv_qp_type)r->ai_qp_type;
	if (fill_endpoint(i, r, pd, attr) != 0) {
		int err = errno;
		rdma_destroy_ep(base);
		return fail(err);
	}
	*out = base;
	return 0;
}

EXPORT void rdma_destroy_ep(struct rdma_cm_id *base)
{
	if (!active() || !find_id(base)) {
		FORWARD_VOID(rdma_destroy_ep, base);
		return;
	}
	if (base->qp)
		rdma_destroy_qp(base);
	if (base->srq)
		rdma_destroy_srq(base);
	rdma_destroy_id(base);
}
#endif
