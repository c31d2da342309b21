/* The engine's thread, and the calls of NCCL's threads. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "comm.h"
#include "verbs.h"

#define TICK_MS 10
#define LOOK_MS 1                      /* between looks of the engine's thread at callers that make progress */
#define CALL_GAP 100000                /* ns: callers make progress while they call more often than this */
#define POLLED_TIME (10 * MILLISECOND) /* after the last of them: it changes nothing if a caller loses its processor for less */
#define WATCH_MS 1000                  /* of the thread that waits for changes of the table */
#define MAX_GREETING 128

struct engine engine = {.turn = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .epoll = -1, .wake = -1};
static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER; /* held in start_threads */

static uint64_t clock_now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* interrupt ends the thread's wait. */
static void interrupt(void)
{
	uint64_t one = 1;
	while (write(engine.wake, &one, sizeof one) < 0 && errno == EINTR)
		;
}

static void wake(void)
{
	if (!atomic_exchange(&engine.awake, true))
		interrupt();
}

static void mark(struct comm *c)
{
	if (!atomic_exchange(&c->dirty, true)) {
		struct comm *head = atomic_load(&engine.dirty);
		do
			c->next_dirty = head;
		while (!atomic_compare_exchange_weak(&engine.dirty, &head, c));
	}
	wake();
}

/* ready has comm_run called for a communicator. */
static void ready(struct comm *c)
{
	if (c->in_ready)
		return;
	c->in_ready = true;
	c->next_ready = engine.ready;
	engine.ready = c;
}

static const struct lane_owner owner = {
	.begin = frame_begin,
	.end = frame_end,
	.target = frame_target,
	.written = frame_written,
	.acknowledged = sender_acknowledged,
	.broken = sender_pair_broken,
	.ready = ready,
	.fail = comm_fail,
};

static void adopt(struct comm *c)
{
	if (c->adopted)
		return;
	c->adopted = true;
	c->next = engine.comms;
	engine.comms = c;
	c->since = c->alive = engine.now;
	shares_follow(c);
}

static void take_dirty(void)
{
	struct comm *c = atomic_exchange(&engine.dirty, NULL);
	while (c) {
		struct comm *next = c->next_dirty;
		atomic_store(&c->dirty, false);
		adopt(c);
		ready(c);
		c = next;
	}
}

static void accept_lanes(struct listener *l)
{
	for (;;) {
		int fd = accept4(l->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
		if (fd < 0 && errno == EINTR)
			continue;
		if (fd < 0)
			return;
		if (l->greeting_count >= MAX_GREETING || !lane_accept(l, fd))
			close(fd);
	}
}

static void handle_lane(struct lane *lane, uint32_t events)
{
	if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR))
		lane->readable = true;
	if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))
		lane->ending = true;
	if (events & EPOLLOUT)
		lane->writable = true;
	if (lane->state == LANE_CONNECTING && lane->comm && events & (EPOLLERR | EPOLLHUP)) {
		int error = 0;
		socklen_t size = sizeof error;
		getsockopt(lane->fd, SOL_SOCKET, SO_ERROR, &error, &size);
		shares_open_failed(lane->comm, error == ECONNREFUSED);
		lane->ended = true;
	}
	if (!lane->comm) {
		lane_read(lane);
		if (lane->ended && !lane->comm) {
			lane_close(lane);
			return;
		}
	}
	if (lane->comm)
		ready(lane->comm);
}

/* note_end keeps what a peer has to know about a closed communicator of a listener when it returns. */
static void note_end(struct listener *l, const struct comm *c)
{
	l->comms--;
	struct ended *ended = realloc(l->ended, (l->ended_count + 1) * sizeof *ended);
	if (!ended)
		return;
	l->ended = ended;
	struct ended *e = &ended[l->ended_count++];
	memcpy(e->connection, c->hello.connection, sizeof e->connection);
	e->groups = c->receiver.first_group;
}

static void free_gone(void)
{
	for (struct comm **p = &engine.comms; *p;) {
		struct comm *c = *p;
		if (!c->gone || c->in_ready || !atomic_load(&c->left) || atomic_load(&c->dirty)) {
			p = &c->next;
			continue;
		}
		*p = c->next;
		if (c->receiver.listener)
			note_end(c->receiver.listener, c);
		comm_free(c);
	}
	guard_lock(&engine.lock);
	for (struct listener **p = &engine.listeners; *p;) {
		struct listener *l = *p;
		if (!atomic_load(&l->closing) || l->comms) {
			p = &l->next;
			continue;
		}
		*p = l->next;
		while (l->greeting)
			lane_close(l->greeting);
		close(l->fd);
		free(l->ended);
		free(l);
	}
	guard_unlock(&engine.lock);
}

/* busy returns whether something depends on time. */
static bool busy(void)
{
	for (struct comm *c = engine.comms; c; c = c->next) {
		if (c->closed_at || !c->ready || qpair_busy(c) || c->sender.again.first || c->sender.waiting || sender_owes(c) ||
			(!c->sends && c->receiver.first_group != c->receiver.next_group) || !c->lane_count)
			return true;
		for (int i = 0; i < c->lane_count; i++) {
			if (c->lanes[i]->state != LANE_READY || c->lanes[i]->sent.first)
				return true;
		}
	}
	return false;
}

static void run_ready(void)
{
	struct comm *c = engine.ready;
	engine.ready = NULL;
	while (c) {
		struct comm *next = c->next_ready;
		c->in_ready = false;
		if (comm_run(c))
			ready(c);
		c = next;
	}
}

static void tick(void)
{
	if (engine.table)
		fared_refresh(engine.table);
	for (struct comm *c = engine.comms; c; c = c->next) {
		comm_tick(c);
		ready(c);
	}
	guard_lock(&engine.lock);
	for (struct listener *l = engine.listeners; l; l = l->next) {
		for (struct lane *lane = l->greeting, *next; lane; lane = next) {
			next = lane->next;
			if (engine.now - lane->since > 5000 * MILLISECOND)
				lane_close(lane);
		}
	}
	guard_unlock(&engine.lock);
}

/* admitted waits for the end of start_threads, and returns whether all threads were started. */
static bool admitted(void)
{
	guard_lock(&starting);
	bool started = engine.started;
	guard_unlock(&starting);
	return started;
}

/* take_events takes what epoll has, without waiting. */
static void take_events(void)
{
	struct epoll_event events[64];
	int n = epoll_wait(engine.epoll, events, 64, 0);
	for (int i = 0; i < n; i++) {
		enum source_kind *kind = events[i].data.ptr;
		if (*kind == SOURCE_LISTENER)
			accept_lanes((struct listener *)kind);
		else if (*kind == SOURCE_RDMA)
			qpair_event((struct rdma *)kind);
		else
			handle_lane((struct lane *)kind, events[i].events);
	}
}

/* thread_turn does all there is to do, and returns how long the thread may wait, in ms; -1: without a limit. */
static int thread_turn(bool all)
{
	static uint64_t ticked;
	take_events();
	take_dirty();
	bool changed = atomic_exchange(&engine.attention, false);
	if (all || changed || engine.now - ticked >= TICK_MS * MILLISECOND) {
		ticked = engine.now;
		tick();
	}
	run_ready();
	free_gone();
	return engine.ready ? 0 : busy() ? TICK_MS : -1;
}

/* calls_often returns whether callers have called often since the last look. */
static bool calls_often(void)
{
	static uint64_t since;
	static uint32_t before;
	uint64_t now = clock_now();
	uint32_t calls = atomic_load_explicit(&engine.calls, memory_order_relaxed);
	bool often = calls - before > (now - since) / CALL_GAP;
	since = now;
	before = calls;
	if (often)
		engine.polled_until = now + POLLED_TIME;
	return often;
}

/* rest waits until there is something to do, or while callers make progress for the next look. It returns whether there
 * is. */
static bool rest(bool polled, int timeout)
{
	struct pollfd wait[] = {{.fd = engine.wake, .events = POLLIN}, {.fd = engine.epoll, .events = POLLIN}};
	uint64_t count;
	if (!polled)
		atomic_store(&engine.awake, false);
	bool found = atomic_load(&engine.dirty) || atomic_load(&engine.attention);
	if (!found && timeout)
		found = poll(wait, polled ? 1 : 2, timeout) > 0;
	atomic_store(&engine.awake, true);
	while (wait[0].revents && read(engine.wake, &count, sizeof count) < 0 && errno == EINTR)
		;
	return found;
}

static void *run(void *unused)
{
	(void)unused;
	if (!admitted())
		return NULL;
	for (bool polled = false;;) {
		guard_lock(&engine.turn);
		engine.now = clock_now();
		bool before = polled;
		polled = engine.now < engine.polled_until && engine.now >= engine.large_until;
		atomic_store(&engine.polled, polled);
		engine.lazy = polled;
		int timeout = thread_turn(before && !polled);
		engine.lazy = false;
		guard_unlock(&engine.turn);
		bool found = rest(polled, polled ? LOOK_MS : timeout);
		for (int looks = 1; calls_often() && polled && !found && looks < TICK_MS / LOOK_MS; looks++)
			found = rest(true, LOOK_MS);
	}
	return NULL;
}

/* try_turn begins a turn in a caller's thread, unless another thread has its turn. */
static bool try_turn(void)
{
	if (engine.forked)
		return false; /* the sockets are the parent's */
	guard_begin();
	if (pthread_mutex_trylock(&engine.turn)) {
		guard_end();
		return false;
	}
	engine.now = clock_now();
	engine.lazy = atomic_load(&engine.polled);
	return true;
}

/* end_turn leaves a large message to the engine's thread. */
static void end_turn(void)
{
	bool large = engine.lazy && engine.large_until > engine.now;
	if (large)
		atomic_store(&engine.polled, false);
	engine.lazy = false;
	pthread_mutex_unlock(&engine.turn);
	if (large)
		interrupt();
	guard_end();
}

/* send_now writes a message in the caller's thread. It returns false if another thread has its turn. */
static bool send_now(struct comm *c)
{
	if (!c->adopted || !try_turn())
		return false;
	bool lazy = engine.lazy;
	if (comm_run(c))
		ready(c);
	end_turn();
	return lazy; /* or else the engine's thread does the rest */
}

/* progress does in a caller's thread what the engine's would do. What other callers have marked meanwhile is not left
 * behind. */
static void progress(struct comm *c)
{
	do {
		if (!try_turn())
			return;
		if (engine.lazy) { /* or else the engine's thread has taken over */
			take_events();
			take_dirty();
			if (c->verbs)
				ready(c); /* its completions may raise no event */
			run_ready();
		}
		end_turn();
	} while (atomic_load(&engine.dirty) && atomic_load(&engine.polled));
}

/* called counts a call; one that is lost does not matter. */
static void called(void)
{
	uint32_t calls = atomic_load_explicit(&engine.calls, memory_order_relaxed);
	atomic_store_explicit(&engine.calls, calls + 1, memory_order_relaxed);
}

/* watch wakes the engine after each change of the table, and reports when the table becomes stale, and the end of
 * that. */
static void *watch(void *unused)
{
	(void)unused;
	struct fared_table *table;
	if (!admitted() || fared_open(&table, NULL))
		return NULL;
	for (int stale = 0;;) {
		if (fared_wait(table, WATCH_MS) == 1) {
			atomic_store(&engine.attention, true);
			wake();
		}
		int now = fared_check(table);
		if (now && now != stale)
			WARN("%s: %s", slots_path(), fared_error_text(now));
		else if (now != stale)
			INFO("%s: the slot table is maintained again", slots_path());
		stale = now;
	}
	return NULL;
}

static void in_child(void)
{
	engine.forked = true;
}

void net_watch_forks(void)
{
	if (engine.watches_forks)
		return;
	guard_forks((pthread_mutex_t *const[]){&engine.turn, &engine.lock}, 2, in_child);
	engine.watches_forks = true;
}

/* watch_ports has the engine wait for the events of RDMA ports. */
static bool watch_ports(void)
{
	for (int i = 0; i < rdma_count; i++) {
		struct epoll_event e = {.events = EPOLLIN, .data.ptr = &rdmas[i]};
		if (epoll_ctl(engine.epoll, EPOLL_CTL_ADD, rdmas[i].channel->fd, &e))
			return false;
	}
	return true;
}

/* open_engine makes the things that the threads use. */
static bool open_engine(void)
{
	engine.now = clock_now();
	fared_open(&engine.table, NULL);
	engine.scrap = malloc(SCRAP_BYTES);
	if (!engine.scrap)
		return false;
	engine.epoll = epoll_create1(EPOLL_CLOEXEC);
	if (engine.epoll < 0)
		return false;
	engine.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return engine.wake >= 0 && watch_ports();
}

/* close_engine undoes open_engine, wherever that has failed. */
static void close_engine(void)
{
	if (engine.wake >= 0)
		close(engine.wake);
	if (engine.epoll >= 0)
		close(engine.epoll);
	free(engine.scrap);
	fared_close(engine.table);
	engine.wake = engine.epoll = -1;
	engine.scrap = NULL;
	engine.table = NULL;
}

/* start_threads starts both threads, or none: they wait for the lock until each of them has been started. */
static bool start_threads(void)
{
	pthread_t threads[2];
	int n = 0;
	guard_lock(&starting);
	int error = guard_start(&threads[n], "fared-nccl", run, NULL);
	if (!error)
		error = guard_start(&threads[++n], "fared-nccl-slot", watch, NULL);
	engine.started = !error;
	guard_unlock(&starting);
	if (n == 1 && error)
		pthread_join(threads[0], NULL);
	for (int i = 0; i < 2 && !error; i++)
		pthread_detach(threads[i]);
	errno = error;
	return !error;
}

static bool start(void)
{
	if (engine.forked) {
		WARN("the process was forked after its first communicator: NCCL has to be initialized in the child");
		return false;
	}
	guard_lock(&engine.lock);
	if (!engine.started) {
		net_watch_forks();
		if (!open_engine() || !start_threads()) {
			WARN("the plugin's threads could not be started: %s", strerror(errno));
			close_engine();
		}
	}
	bool started = engine.started;
	guard_unlock(&engine.lock);
	return started;
}

/* bind_port binds a listening socket to a free port of the range, beginning anywhere. */
static int bind_port(const struct device *d, uint16_t *port)
{
	uint32_t random = 0;
	if (getrandom(&random, sizeof random, 0) < 0)
		random = (uint32_t)getpid();
	uint32_t n = settings.last_port - settings.first_port + 1u;
	for (uint32_t i = 0; i < n; i++) {
		*port = (uint16_t)(settings.first_port + (random + i) % n);
		struct sockaddr_storage a;
		socklen_t size = socket_address(&a, &d->source, *port);
		int fd = socket(a.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), yes = 1;
		if (fd < 0)
			return -1;
		setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
		if (!bind(fd, (struct sockaddr *)&a, size) && !listen(fd, MAX_LANES))
			return fd;
		int error = errno;
		close(fd);
		errno = error;
		if (error != EADDRINUSE)
			return -1;
	}
	return -1;
}

ncclResult_t net_listen(int dev, void *handle, struct listener **out)
{
	*out = NULL;
	const struct device *d = device_get(dev);
	if (!d)
		return ncclInvalidArgument;
	if (!start())
		return ncclSystemError;
	struct listener *l = calloc(1, sizeof *l);
	if (!l)
		return ncclSystemError;
	struct handle h = {.magic = HANDLE_MAGIC, .version = WIRE_VERSION, .transports = (uint8_t)d->transports};
	l->kind = SOURCE_LISTENER;
	l->device = d;
	l->owner = &owner;
	l->fd = bind_port(d, &h.port);
	if (l->fd < 0 || getrandom(l->nonce, sizeof l->nonce, 0) != sizeof l->nonce) {
		WARN("%s: no port from %u to %u can be bound: %s. Set FARED_NCCL_PORTS to a free range, and dataplane.tcp_port_range of fared to the same one",
			d->name, settings.first_port, settings.last_port, strerror(errno));
		if (l->fd >= 0)
			close(l->fd);
		free(l);
		return ncclSystemError;
	}
	memcpy(h.address, d->source.bytes, sizeof h.address);
	memcpy(h.nonce, l->nonce, sizeof h.nonce);
	memset(handle, 0, NCCL_NET_HANDLE_MAXSIZE);
	memcpy(handle, &h, sizeof h);
	guard_lock(&engine.lock);
	l->next = engine.listeners;
	engine.listeners = l;
	struct epoll_event e = {.events = EPOLLIN, .data.ptr = l};
	int failed = epoll_ctl(engine.epoll, EPOLL_CTL_ADD, l->fd, &e);
	atomic_store(&l->closing, failed != 0);
	guard_unlock(&engine.lock);
	if (failed)
		return ncclSystemError;
	*out = l;
	return ncclSuccess;
}

static ncclResult_t connection_failed(struct comm *c)
{
	ncclResult_t error = atomic_load(&c->error);
	net_close(c);
	return error;
}

/* begin_connect makes the communicator of a peer's handle, which refers to it from then on. */
static ncclResult_t begin_connect(const struct device *d, struct handle *h)
{
	int common = h->transports & d->transports;
	if (!common) {
		WARN("this end carries messages by %s and the peer by %s: set FARED_NCCL_TRANSPORT to the same value for all ranks",
			d->transports & TRANSPORT_VERBS ? "verbs" : "tcp", h->transports & TRANSPORT_VERBS ? "verbs" : "tcp");
		return ncclInvalidUsage;
	}
	struct comm *c = start() ? comm_new(d, true, &owner) : NULL;
	if (!c)
		return ncclSystemError;
	c->verbs = common & TRANSPORT_VERBS;
	c->hello.transport = c->verbs ? TRANSPORT_VERBS : TRANSPORT_TCP;
	memcpy(c->sender.destination.bytes, h->address, sizeof h->address);
	c->sender.port = h->port;
	memcpy(c->hello.nonce, h->nonce, sizeof h->nonce);
	if (getrandom(c->hello.connection, sizeof c->hello.connection, 0) != sizeof c->hello.connection) {
		comm_free(c);
		return ncclSystemError;
	}
	h->comm = (uint64_t)(uintptr_t)c;
	mark(c);
	return ncclSuccess;
}

ncclResult_t net_connect(int dev, void *handle, struct comm **out)
{
	*out = NULL;
	struct handle h;
	memcpy(&h, handle, sizeof h);
	const struct device *d = device_get(dev);
	if (!d)
		return ncclInvalidArgument;
	if (memcmp(h.magic, HANDLE_MAGIC, sizeof h.magic) || h.version != WIRE_VERSION) {
		WARN("the peer's handle is not of this plugin and version %d: all ranks need the same version", WIRE_VERSION);
		return ncclInvalidUsage;
	}
	struct comm *c = (struct comm *)(uintptr_t)h.comm;
	if (!c) {
		ncclResult_t result = begin_connect(d, &h);
		memcpy(handle, &h, sizeof h);
		return result;
	}
	bool failed = atomic_load(&c->error);
	if (failed || atomic_load(&c->state) == COMM_READY) {
		h.comm = 0;
		memcpy(handle, &h, sizeof h);
	}
	if (failed)
		return connection_failed(c);
	if (atomic_load(&c->state) == COMM_READY)
		*out = c;
	return ncclSuccess;
}

ncclResult_t net_accept(struct listener *l, struct comm **out)
{
	*out = NULL;
	guard_lock(&engine.lock);
	if (l->accepted_count) {
		*out = l->accepted[0];
		memmove(l->accepted, l->accepted + 1, (size_t)--l->accepted_count * sizeof l->accepted[0]);
	}
	guard_unlock(&engine.lock);
	return ncclSuccess;
}

static struct request *new_request(struct comm *c)
{
	for (uint32_t i = 0; i < c->request_count; i++) {
		struct request *r = &c->requests[c->next_request++ % c->request_count];
		if (atomic_load_explicit(&r->state, memory_order_acquire) == REQUEST_FREE)
			return r;
	}
	return NULL;
}

static void submit(struct comm *c, struct request *r)
{
	atomic_store_explicit(&r->state, REQUEST_BUSY, memory_order_relaxed);
	uint32_t n = atomic_load_explicit(&c->submitted, memory_order_relaxed);
	c->ring[n % MAX_SENDS] = r;
	atomic_store_explicit(&c->submitted, n + 1, memory_order_release);
	called();
	if (!c->sends || !send_now(c))
		mark(c);
}

ncclResult_t net_send(struct comm *c, void *data, size_t size, int tag, struct memory *memory, struct request **out)
{
	*out = NULL;
	if (atomic_load(&c->error))
		return atomic_load(&c->error);
	if (!memory_has(c, memory, data, size))
		return ncclInvalidArgument;
	struct request *r = new_request(c);
	if (!r)
		return ncclSuccess; /* NCCL calls again */
	r->data = data;
	memory_use(r->memory = memory, 1);
	r->size = size;
	r->tag = tag;
	r->assigned = r->acknowledged = 0;
	r->matched = r->whole = false;
	*out = r;
	submit(c, r);
	return ncclSuccess;
}

ncclResult_t net_receive(struct comm *c, int n, void **data, const size_t *sizes, const int *tags, struct memory *const *memory, struct request **out)
{
	*out = NULL;
	if (n < 1 || n > MAX_PARTS)
		return ncclInvalidArgument;
	if (atomic_load(&c->error))
		return atomic_load(&c->error);
	for (int i = 0; i < n; i++) {
		if (!memory_has(c, memory ? memory[i] : NULL, data[i], sizes[i]))
			return ncclInvalidArgument;
	}
	struct request *r = new_request(c);
	if (!r)
		return ncclSuccess;
	r->n = n;
	for (int i = 0; i < n; i++) {
		struct part *p = &r->parts[i];
		size_t words = sizes[i] / LEAST_STRIPE / 64 + 1;
		if (words > p->have_words) {
			uint64_t *have = realloc(p->have, words * sizeof *have);
			if (!have)
				return ncclSystemError;
			p->have = have;
			p->have_words = words;
		}
		memset(p->have, 0, words * sizeof *p->have);
		p->capacity = sizes[i];
		p->data = data[i];
		memory_use(p->memory = memory ? memory[i] : NULL, 1);
		p->tag = tags[i];
		p->known = false;
		p->total = p->received = 0;
	}
	*out = r;
	submit(c, r);
	return ncclSuccess;
}

static bool is_done(const struct request *r)
{
	return atomic_load_explicit(&r->state, memory_order_acquire) == REQUEST_DONE;
}

ncclResult_t net_test(struct request *r, int *done, int *sizes)
{
	*done = 0;
	if (!is_done(r)) {
		called();
		if (atomic_load_explicit(&engine.polled, memory_order_relaxed))
			progress(r->comm);
		if (!is_done(r))
			return atomic_load(&r->comm->error);
	}
	*done = 1;
	if (r->comm->sends)
		memory_use(r->memory, -1);
	for (int i = 0; !r->comm->sends && i < r->n; i++)
		memory_use(r->parts[i].memory, -1);
	if (sizes && r->comm->sends)
		sizes[0] = (int)r->size;
	for (int i = 0; sizes && !r->comm->sends && i < r->n; i++)
		sizes[i] = (int)r->parts[i].total;
	atomic_store_explicit(&r->state, REQUEST_FREE, memory_order_release);
	return ncclSuccess;
}

ncclResult_t net_close(struct comm *c)
{
	if (!c)
		return ncclSuccess;
	if (engine.forked)
		return ncclInternalError; /* the communicator is the parent's */
	atomic_fetch_add(&engine.closing, 1);
	atomic_store(&c->closing, true);
	mark(c);
	while (!atomic_load(&c->released))
		poll(NULL, 0, 1);
	atomic_store(&c->left, true); /* the engine may free it from here on */
	return ncclSuccess;
}

ncclResult_t net_close_listener(struct listener *l)
{
	if (!l)
		return ncclSuccess;
	/* The socket stays while communicators may need further lanes. */
	guard_lock(&engine.lock);
	int n = l->accepted_count;
	struct comm *left[NCCL_NET_MAX_REQUESTS];
	memcpy(left, l->accepted, sizeof left);
	l->accepted_count = 0;
	atomic_store(&l->closing, true);
	guard_unlock(&engine.lock);
	for (int i = 0; i < n; i++)
		net_close(left[i]);
	atomic_store(&engine.attention, true);
	wake();
	return ncclSuccess;
}

void net_finish(void)
{
	for (int i = 0; i < 200 && !engine.forked && atomic_load(&engine.closing); i++)
		poll(NULL, 0, 10);
}

/* Versions before v11 have no finalize. */
__attribute__((destructor)) static void at_exit(void)
{
	net_finish();
}
