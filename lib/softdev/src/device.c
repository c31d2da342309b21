#include "device.h"

#include "fared.h"
#include "guard.h"
#include "port.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The engine's thread sleeps at most this long, ns: without timers, with timers, and while a program polls and therefore does its work. */
#define SLEEP_IDLE 100000000ull
#define SLEEP_BUSY 1000000ull
#define SLEEP_POLLED 100000ull
/* A program polls continuously if its calls are at most this far apart, ns. After packets have waited for one that does not, the thread receives them itself
 * for a while. */
#define POLL_GAP 50000ull
#define DISTRUST 1000000000ull

/* The engine of a process. All contexts share it: a process has one socket for the packets to an address. */
struct engine {
	struct sd_dev dev;
	struct sd_port *port;
	pthread_t thread;
	unsigned contexts;
	bool stop, passive; /* passive: the thread leaves the packets to a program that polls */
	uint64_t sleeps_until;
	uint64_t polls; /* of programs */
	uint64_t distrust_until;
};

/* core_lock is the lock of every engine: it is in no memory that a child of fork may lack. */
static pthread_mutex_t engine_lock = PTHREAD_MUTEX_INITIALIZER, core_lock = PTHREAD_MUTEX_INITIALIZER;
static struct engine *engine;

static struct ibv_device device = {.node_type = IBV_NODE_CA, .transport_type = IBV_TRANSPORT_IB, .name = "fared_soft0", .dev_name = "fared_soft0"};
static struct in6_addr gids[SD_MAX_GIDS];
static uint32_t gid_count;
static pthread_once_t gids_once = PTHREAD_ONCE_INIT;

static struct engine *engine_of(struct sd_dev *dev)
{
	return (struct engine *)((char *)dev - offsetof(struct engine, dev));
}

static void add_gid(const struct fared_address *a)
{
	if (gid_count < SD_MAX_GIDS)
		memcpy(&gids[gid_count++], a->bytes, 16);
}

static void find_gids(void)
{
	struct fared_address a;
	const char *list = getenv("FARED_SOFT_ADDRESS");
	char copy[4096], *rest = copy, *text;
	if (list && *list) {
		snprintf(copy, sizeof copy, "%s", list);
		while ((text = strtok_r(rest, ", ", &rest)))
			if (fared_parse_address(text, &a) == 0)
				add_gid(&a);
			else
				fprintf(stderr, "fared_soft0: FARED_SOFT_ADDRESS has no address in \"%s\"\n", text);
		return;
	}
	struct fared_table *table;
	if (fared_open(&table, NULL) != 0)
		return;
	for (uint32_t i = 0; fared_get_source(table, i, &a) == 0; i++)
		add_gid(&a);
	fared_close(table);
}

static void read_gids(void)
{
	guard_begin();
	find_gids();
	guard_end();
}

const struct in6_addr *sd_gid(uint32_t index)
{
	pthread_once(&gids_once, read_gids);
	return index < gid_count ? &gids[index] : NULL;
}

struct ibv_device *softdev_device(void)
{
	return sd_gid(0) ? &device : NULL;
}

bool softdev_is_device(const struct ibv_device *d)
{
	return d == &device;
}

bool softdev_owns(const struct ibv_context *context)
{
	return context && context->device == &device;
}

__be64 softdev_get_device_guid(struct ibv_device *d)
{
	/* A locally administered EUI-64 from the first address. */
	uint8_t guid[8] = {0x02, 0, 0, 0xfa, 0, 0, 0, 0};
	const struct in6_addr *a = sd_gid(0);
	__be64 out;
	(void)d;
	for (int i = 0; a && i < 16; i++)
		guid[4 + i % 4] ^= a->s6_addr[i];
	memcpy(&out, guid, sizeof out);
	return out;
}

void sd_progress(struct sd_dev *dev)
{
	struct engine *e = engine_of(dev);
	dev->now = dev->link->now(dev->link);
	sd_slots_follow(dev);
	for (int i = 0; i < 8; i++) {
		int received = sd_port_receive(e->port, dev);
		bool more = sd_run(dev);
		if (!received && !more)
			break;
	}
	if (dev->now >= dev->next_timer) {
		sd_timers(dev);
		sd_run(dev);
	}
}

/* prefer_wakeups asks the scheduler (from Linux 6.12) for the shortest time slices, so that the thread preempts programs that spin when packets arrive. */
static void prefer_wakeups(void)
{
	struct {
		uint32_t size, policy;
		uint64_t flags;
		int32_t nice;
		uint32_t priority;
		uint64_t runtime, deadline, period;
	} a = {0};
	if (syscall(SYS_sched_getattr, 0, &a, sizeof a, 0) == 0) {
		a.runtime = 100000; /* ns */
		syscall(SYS_sched_setattr, 0, &a, 0);
	}
}

static void *run_engine(void *argument)
{
	struct engine *e = argument;
	uint64_t polls = 0;
	prefer_wakeups();
	prctl(PR_SET_TIMERSLACK, 1000); /* ns; the default would double the shortest sleep */
	guard_lock(&core_lock);
	while (!e->stop) {
		uint64_t now = e->dev.link->now(e->dev.link);
		uint64_t sleep = e->dev.next_timer == UINT64_MAX ? SLEEP_IDLE : SLEEP_BUSY;
		e->passive = e->polls != polls && e->dev.armed == 0 && now >= e->distrust_until;
		polls = e->polls;
		if (e->passive)
			sleep = SLEEP_POLLED;
		else if (e->dev.dirty)
			sleep = 0;
		e->sleeps_until = now + sleep;
		bool packets = !e->passive;
		int stale = sd_slots_stale(&e->dev);
		guard_unlock(&core_lock);
		sd_slots_report(&e->dev, stale);
		sd_port_wait(e->port, packets, sleep);
		guard_lock(&core_lock);
		sd_port_serve(e->port);
		e->sleeps_until = 0;
		uint64_t last = e->dev.now, received = e->dev.counters.received;
		if (e->passive && e->polls != polls && e->dev.armed == 0 && e->dev.link->now(e->dev.link) - last < POLL_GAP)
			continue;
		sd_progress(&e->dev);
		if (e->passive && e->dev.counters.received != received)
			e->distrust_until = e->dev.now + DISTRUST;
	}
	guard_unlock(&core_lock);
	return NULL;
}

void sd_enter(struct sd_dev *dev)
{
	guard_lock(dev->lock);
	dev->now = dev->link->now(dev->link);
}

void sd_leave(struct sd_dev *dev)
{
	struct engine *e = engine_of(dev);
	bool more = e == engine && sd_run(dev); /* a child of fork sends nothing by the parent's sockets */
	bool wake = e->sleeps_until > dev->now + SLEEP_BUSY && (more || dev->next_timer < e->sleeps_until);
	if (wake)
		e->sleeps_until = 0;
	guard_begin();
	guard_unlock(dev->lock);
	if (wake)
		sd_port_wake(e->port);
	guard_end();
}

void sd_awaits_event(struct sd_dev *dev)
{
	struct engine *e = engine_of(dev);
	if (e->passive)
		sd_port_wake(e->port);
}

/* leave_to_parent leaves the engine and its sockets to the parent: a child of fork may open the device again. */
static void leave_to_parent(void)
{
	engine = NULL;
}

__attribute__((constructor)) static void watch_forks(void)
{
	guard_forks((pthread_mutex_t *const[]){&engine_lock, &core_lock}, 2, leave_to_parent);
}

static struct engine *start_engine(void)
{
	struct engine *e = calloc(1, sizeof *e);
	if (!e)
		return NULL;
	e->dev.lock = &core_lock;
	e->dev.next_timer = UINT64_MAX;
	int err = sd_port_open(&e->port);
	if (!err) {
		e->dev.link = sd_port_link(e->port);
		e->dev.process = sd_port_process(e->port);
		e->dev.slots = sd_slots_open();
		e->dev.now = e->dev.link->now(e->dev.link);
		e->dev.generation = (uint32_t)(e->dev.now / 1000) ^ (uint32_t)getpid();
		err = guard_start(&e->thread, "fared_soft0", run_engine, e);
		if (err) {
			sd_slots_close(e->dev.slots);
			sd_port_close(e->port);
		}
	}
	if (err) {
		free(e);
		errno = err;
		return NULL;
	}
	return e;
}

/* report prints the counters of an engine. */
static void report(const struct engine *e)
{
	const struct sd_counters *c = &e->dev.counters;
	if (!getenv("FARED_SOFT_COUNTERS"))
		return;
	fprintf(stderr,
		"fared_soft0: sent %lu received %lu retransmitted %lu duplicates %lu out_of_order %lu naks %lu rnr_naks %lu timeouts %lu bad_icrc %lu "
		"malformed %lu unknown_qp %lu wrong_source %lu ce %lu cnps_sent %lu cnps_received %lu moved %lu refused %lu\n",
		c->sent, c->received, c->retransmitted, c->duplicates, c->out_of_order, c->naks, c->rnr_naks, c->timeouts, c->bad_icrc, c->malformed,
		c->unknown_qp, c->wrong_source, c->congestion_marks, c->cnps_sent, c->cnps_received, c->moved, sd_port_refused(e->port));
}

/* A program may leave a context open. Other threads may run still, so nothing is freed. */
__attribute__((destructor)) static void end_at_exit(void)
{
	guard_begin();
	if (engine && pthread_mutex_trylock(&core_lock) == 0) {
		report(engine);
		pthread_mutex_unlock(&core_lock);
	}
	guard_end();
}

static void stop_engine(struct engine *e)
{
	guard_lock(&core_lock);
	e->stop = true;
	guard_unlock(&core_lock);
	sd_port_wake(e->port);
	pthread_join(e->thread, NULL);
	report(e);
	sd_slots_close(e->dev.slots);
	sd_port_close(e->port);
	free(e->dev.mrs.objects);
	free(e->dev.qps.objects);
	free(e);
}

/* put writes a structure for a program whose version of it has size bytes. */
static void put(void *to, size_t size, const void *from, size_t known)
{
	memset(to, 0, size);
	memcpy(to, from, size < known ? size : known);
}

static int query_port_ex(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t size)
{
	return softdev_query_port(context, port, attr, size);
}

static int query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input, struct ibv_device_attr_ex *attr, size_t size)
{
	struct ibv_device_attr_ex full = {.phys_port_cnt_ex = 1};
	if ((input && input->comp_mask) || size < offsetof(struct ibv_device_attr_ex, comp_mask) + sizeof attr->comp_mask)
		return EINVAL;
	softdev_query_device(context, &full.orig_attr);
	full.device_cap_flags_ex = full.orig_attr.device_cap_flags;
	/* They are atomic for programs, too: the processor executes them. A plain swap is no operation of the device. */
	full.pci_atomic_caps.fetch_add = full.pci_atomic_caps.compare_swap = IBV_PCI_ATOMIC_OPERATION_8_BYTE_SIZE_SUP;
	put(attr, size, &full, sizeof full);
	return 0;
}

struct ibv_context *softdev_open_device(struct ibv_device *d)
{
	struct sd_context *c = calloc(1, sizeof *c);
	if (!c)
		return NULL;
	int err = sd_events_open(&c->async);
	guard_lock(&engine_lock);
	if (!err && !engine)
		engine = start_engine();
	if (err || !engine) {
		guard_unlock(&engine_lock);
		free(c);
		return NULL;
	}
	engine->contexts++;
	c->dev = &engine->dev;
	guard_unlock(&engine_lock);
	struct ibv_context *context = &c->verbs.context;
	c->verbs.sz = sizeof c->verbs;
	c->verbs.query_port = query_port_ex;
	c->verbs.query_device_ex = query_device_ex;
	c->verbs.create_qp_ex = sd_create_qp_ex;
	context->device = d;
	context->abi_compat = __VERBS_ABI_IS_EXTENDED;
	context->cmd_fd = -1;
	context->async_fd = c->async.fd;
	context->num_comp_vectors = 1;
	context->ops.poll_cq = sd_poll_cq;
	context->ops.req_notify_cq = sd_req_notify_cq;
	context->ops.post_send = sd_post_send;
	context->ops.post_recv = sd_post_recv;
	context->ops.post_srq_recv = sd_post_srq_recv;
	pthread_mutex_init(&context->mutex, NULL);
	return context;
}

int softdev_close_device(struct ibv_context *context)
{
	struct sd_context *c = sd_context_of(context);
	struct engine *e = engine_of(c->dev), *last = NULL;
	guard_begin();
	guard_lock(&engine_lock);
	if (e == engine && --e->contexts == 0) {
		last = e;
		engine = NULL;
	}
	guard_unlock(&engine_lock);
	if (last)
		stop_engine(last);
	sd_events_close(&c->async);
	guard_end();
	pthread_mutex_destroy(&context->mutex);
	free(c);
	return 0;
}

int sd_listen(struct sd_dev *dev, uint32_t gid_index)
{
	const struct in6_addr *a = sd_gid(gid_index);
	char text[INET6_ADDRSTRLEN];
	int err = a ? sd_port_listen(engine_of(dev)->port, a) : EINVAL;
	if (a && err && fared_address_text((const struct fared_address *)a, text, sizeof text) >= 0)
		fprintf(stderr, "fared_soft0: cannot receive at %s, UDP port %d: %s\n", text, SD_UDP_PORT,
			err == ETIMEDOUT
				? "a process of fared_soft0 that has the address does not answer. It is stopped, or a child of one that has ended: ss -xap | grep fared_soft0 "
				  "names it"
				: err == EADDRINUSE
				? "the kernel module rdma_rxe, or a program of another kind or user, has the port. Run this program in another network namespace "
				  "(ip netns), at another address (FARED_SOFT_ADDRESS; rdma_rxe has all), or remove the module (modprobe -r rdma_rxe)"
				: strerror(err));
	return err;
}

int sd_resolve(struct sd_dev *dev, const struct ibv_ah_attr *attr, struct sd_path *path)
{
	const struct in6_addr *source = sd_gid(attr->grh.sgid_index);
	(void)dev;
	if (!attr->is_global || !source)
		return EINVAL;
	path->flow.source = *source;
	memcpy(&path->flow.destination, &attr->grh.dgid, sizeof path->flow.destination);
	path->flow.destination_port = SD_UDP_PORT;
	path->tos = (uint8_t)((attr->grh.traffic_class & ~3) | 2); /* ECT(0) */
	return sd_is_ipv4(source) == sd_is_ipv4(&path->flow.destination) ? 0 : EINVAL;
}

uint32_t sd_payload_mtu(uint32_t link_mtu, bool v4)
{
	uint32_t overhead = (v4 ? 20 : 40) + 8 + SD_MAX_HEADER + SD_ICRC_SIZE;
	for (uint32_t mtu = SD_MAX_MTU; mtu >= 256; mtu /= 2)
		if (link_mtu >= mtu + overhead)
			return mtu;
	return 0;
}

/* link_mtu returns the MTU of the netdev with a GID's address; for an address on lo that is not of 127.0.0.0/8 or ::1, the smallest MTU of all
 * other netdevs that are up. */
static uint32_t link_mtu(const struct in6_addr *gid, unsigned *ifindex)
{
	struct ifaddrs *list = NULL, *i;
	struct ifreq request;
	uint32_t least = 0, own = 0;
	guard_begin(); /* a canceled thread would leave the socket open */
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	bool v4 = sd_is_ipv4(gid), host = v4 ? gid->s6_addr[12] == 127 : IN6_IS_ADDR_LOOPBACK(gid);
	*ifindex = 0;
	if (fd >= 0 && getifaddrs(&list) != 0)
		list = NULL;
	for (i = list; i; i = i->ifa_next) {
		snprintf(request.ifr_name, sizeof request.ifr_name, "%s", i->ifa_name);
		if (!(i->ifa_flags & IFF_UP) || ioctl(fd, SIOCGIFMTU, &request) != 0)
			continue;
		uint32_t mtu = (uint32_t)request.ifr_mtu;
		bool loopback = i->ifa_flags & IFF_LOOPBACK, match = false;
		if (i->ifa_addr && i->ifa_addr->sa_family == AF_INET && v4)
			match = memcmp(&((struct sockaddr_in *)i->ifa_addr)->sin_addr, &gid->s6_addr[12], 4) == 0;
		else if (i->ifa_addr && i->ifa_addr->sa_family == AF_INET6 && !v4)
			match = memcmp(&((struct sockaddr_in6 *)i->ifa_addr)->sin6_addr, gid, 16) == 0;
		if (match)
			*ifindex = if_nametoindex(i->ifa_name);
		if (match && !loopback)
			own = mtu;
		if (!loopback && (least == 0 || mtu < least))
			least = mtu;
	}
	freeifaddrs(list);
	if (fd >= 0)
		close(fd);
	guard_end();
	if (own)
		return own;
	return host || least == 0 ? 65536 : least;
}

int softdev_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	memset(attr, 0, sizeof *attr);
	snprintf(attr->fw_ver, sizeof attr->fw_ver, "%s", fared_version());
	attr->node_guid = attr->sys_image_guid = softdev_get_device_guid(context->device);
	/* The prefix of the GUID, which is one of local administration: no registered vendor. */
	attr->vendor_id = 0x020000;
	attr->vendor_part_id = attr->hw_ver = 1;
	attr->max_mr_size = UINT64_MAX;
	attr->page_size_cap = 0xfffffffffffff000;
	attr->max_qp = SD_MAX_QP;
	attr->max_qp_wr = SD_MAX_WR;
	attr->device_cap_flags = IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_SYS_IMAGE_GUID;
	attr->max_sge = attr->max_sge_rd = attr->max_srq_sge = SD_MAX_SGE;
	attr->max_cq = attr->max_pd = attr->max_ah = attr->max_srq = 32768;
	attr->max_cqe = SD_MAX_CQE;
	attr->max_mr = 1 << 22;
	attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = SD_MAX_READS;
	attr->max_res_rd_atom = SD_MAX_READS * attr->max_qp;
	attr->atomic_cap = IBV_ATOMIC_HCA; /* as NICs; UCX 1.13 has no atomics of devices with IBV_ATOMIC_GLOB */
	attr->max_srq_wr = SD_MAX_WR;
	attr->max_pkeys = 1;
	attr->local_ca_ack_delay = 15;
	attr->phys_port_cnt = 1;
	return 0;
}

int softdev_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t size)
{
	unsigned ifindex;
	struct ibv_port_attr full = {.state = IBV_PORT_ACTIVE, .max_mtu = IBV_MTU_4096, .pkey_tbl_len = 1, .max_msg_sz = 1u << 31, .max_vl_num = 1};
	const struct in6_addr *gid = sd_gid(0);
	(void)context;
	if (port != 1 || !gid)
		return EINVAL;
	uint32_t mtu = sd_payload_mtu(link_mtu(gid, &ifindex), sd_is_ipv4(gid));
	full.active_mtu = IBV_MTU_256;
	while (128u << full.active_mtu < mtu)
		full.active_mtu++;
	full.gid_tbl_len = (int)gid_count;
	full.port_cap_flags = 1 << 26; /* IP-based GIDs */
	full.active_width = 2;         /* 4x */
	full.active_speed = 32;        /* 25 Gbit/s a lane */
	full.phys_state = 5;           /* link up */
	full.link_layer = IBV_LINK_LAYER_ETHERNET;
	full.flags = IBV_QPF_GRH_REQUIRED;
	put(attr, size, &full, sizeof full);
	return 0;
}

int softdev_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
	const struct in6_addr *a = port == 1 && index >= 0 ? sd_gid((uint32_t)index) : NULL;
	(void)context;
	if (!a) {
		errno = EINVAL;
		return -1;
	}
	memcpy(gid, a, sizeof *gid);
	return 0;
}

int softdev_query_gid_entry(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry)
{
	const struct in6_addr *a = port == 1 ? sd_gid(index) : NULL;
	unsigned ifindex;
	(void)context;
	if (!a)
		return EINVAL;
	link_mtu(a, &ifindex);
	*entry = (struct ibv_gid_entry){.gid_index = index, .port_num = 1, .gid_type = IBV_GID_TYPE_ROCE_V2, .ndev_ifindex = ifindex};
	memcpy(&entry->gid, a, sizeof entry->gid);
	return 0;
}

ssize_t softdev_query_gid_table(struct ibv_context *context, void *entries, size_t max, size_t size)
{
	struct ibv_gid_entry entry;
	if (gid_count > max || size == 0)
		return -EINVAL;
	for (uint32_t i = 0; softdev_query_gid_entry(context, 1, i, &entry) == 0; i++)
		put((char *)entries + i * size, size, &entry, sizeof entry);
	return gid_count;
}

int softdev_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
	(void)context;
	if (port != 1 || index != 0) {
		errno = EINVAL;
		return -1;
	}
	*pkey = 0xffff;
	return 0;
}

int sd_poll_cq(struct ibv_cq *base, int n, struct ibv_wc *wc)
{
	struct sd_cq *cq = (struct sd_cq *)base;
	struct engine *e = engine_of(cq->dev);
	if (e != engine)
		return -1; /* a child of fork */
	guard_lock(&core_lock);
	e->polls++;
	if (cq->count < (uint32_t)n)
		sd_progress(cq->dev);
	int taken = sd_cq_take(cq, n, wc);
	guard_unlock(&core_lock);
	return taken;
}
