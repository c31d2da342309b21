#include "device.h"

#include "fared.h"
#include "guard.h"
#include "port.h"
#include "slots.h"

#include <arpa/inet.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The engine's thread sleeps at most this long, ns: without timers, with timers, and while a program polls and
 * therefore does its work. */
#define SLEEP_IDLE 100000000ull
#define SLEEP_BUSY 1000000ull
#define SLEEP_POLLED 100000ull
/* A program polls continuously if its calls are at most this far apart, ns, and a call that takes longer advances at
 * least this often, unless the processor has been taken from it. */
#define POLL_GAP 50000ull
#define CALL_GAP 1000000ull
/* After packets have waited for a program that does not poll, the thread receives them itself for a while: longer after
 * each mistake, and shorter again after each time of trust without one. */
#define DISTRUST_MIN 1000000ull
#define DISTRUST_MAX 512000000ull
#define DISTRUST_FACTOR 8
#define TRUST 100000000ull
/* During a bulk transfer by a program that has polled without a gap for a time, ns, the sleeps are longer: a wake-up
 * takes the processor from the program or its peer. */
#define SLEEP_BULK 1000000ull
#define STEADY 100000000ull
/* Time after which the thread looks for other work, although a program polls. */
#define UNSEEN 100000000ull
/* After this many packets at once the thread lets others gather for a while, ns, as interrupt moderation does: neither
 * end pays for a wake-up for each message. */
enum { BULK = 64 };
#define GATHER 30000ull
/* A thread that continues this much later than it asked for, ns, shares its processor: packets alone wake it for a
 * while, because the scheduler prefers their wake-ups. */
#define GATHER_LATE 100000ull
#define GATHER_PAUSE 100000000ull
/* After a packet the device waits this long, ns, for the program's next call, whose packets go with the
 * acknowledgement. */
#define HOLD 20000ull

/* The engine of a process. All contexts share it: a process has one socket for the packets to an address. */
struct engine {
	struct sd_dev dev;
	struct sd_port *port;
	pthread_t thread;
	unsigned contexts;
	bool stop, passive; /* passive: the thread leaves the packets to a program that polls */
	uint64_t sleeps_until;
	uint64_t steady_since;     /* the program has polled */
	uint64_t gathers_from;     /* packets do not gather before */
	_Atomic uint64_t polls;    /* of programs */
	_Atomic uint64_t advanced; /* time of the latest progress by a program's poll or post */
	_Atomic uint64_t packets;  /* sent or received until then */
	atomic_bool called;        /* the program is in such a call */
	uint64_t distrust, distrust_until;
	uint64_t held_until; /* what is due waits for the program */
};

pthread_mutex_t sd_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t engine_lock = PTHREAD_MUTEX_INITIALIZER;
static struct engine *engine;

static struct engine *engine_of(struct sd_dev *dev)
{
	return (struct engine *)((char *)dev - offsetof(struct engine, dev));
}

/* note records progress by the program. The thread reads this without the lock. */
static void note(struct engine *e, uint64_t now, bool called)
{
	atomic_store_explicit(&e->advanced, now, memory_order_relaxed);
	atomic_store_explicit(&e->packets, e->dev.counters.sent + e->dev.counters.received, memory_order_relaxed);
	atomic_store_explicit(&e->called, called, memory_order_relaxed);
}

/* still_polls reports whether the program has polled since it had a number of polls, or is in a call, and continues. */
static bool still_polls(struct engine *e, uint64_t polls)
{
	bool called = atomic_load_explicit(&e->called, memory_order_relaxed);
	uint64_t advanced = atomic_load_explicit(&e->advanced, memory_order_relaxed);
	return (called || atomic_load_explicit(&e->polls, memory_order_relaxed) != polls) &&
		e->dev.link->now(e->dev.link) < advanced + (called ? CALL_GAP : POLL_GAP);
}

/* watch_program sleeps while the program does the work of the thread, or until the thread is asked for something. It
 * keeps the number of polls that it has seen. */
static void watch_program(struct engine *e, uint64_t *polls)
{
	uint64_t sleep = SLEEP_POLLED, now = e->dev.link->now(e->dev.link), until = now + UNSEEN;
	uint64_t packets = atomic_load_explicit(&e->packets, memory_order_relaxed);
	for (; still_polls(e, *polls) && now < until; now = e->dev.link->now(e->dev.link)) {
		uint64_t before = packets;
		*polls = atomic_load_explicit(&e->polls, memory_order_relaxed);
		if (sd_port_wait(e->port, false, sleep))
			return;
		packets = atomic_load_explicit(&e->packets, memory_order_relaxed);
		sleep = packets - before >= BULK && now > e->steady_since + STEADY ? SLEEP_BULK : SLEEP_POLLED;
	}
}

/* distrust has the thread receive packets by itself for a while. */
static void distrust(struct engine *e)
{
	uint64_t trusted = e->dev.now - e->distrust_until;
	for (; trusted > TRUST && e->distrust > DISTRUST_MIN; trusted -= TRUST)
		e->distrust /= DISTRUST_FACTOR;
	e->distrust_until = e->dev.now + e->distrust;
	e->distrust = e->distrust * DISTRUST_FACTOR < DISTRUST_MAX ? e->distrust * DISTRUST_FACTOR : DISTRUST_MAX;
}

/* acknowledgements_alone reports whether all that is due are acknowledgements. */
static bool acknowledgements_alone(const struct sd_dev *dev)
{
	bool some = false;
	for (const struct sd_qp *qp = dev->dirty; qp; qp = qp->next_dirty) {
		if (qp->rq_out.next != qp->rq_out.end || qp->rp.job_count > 0 || qp->rp.nak)
			return false;
		some |= qp->rp.ack;
	}
	return some;
}

/* holds reports whether acknowledgements that have become due wait for the next call of the program: it is about to
 * receive a completion, or has polled a short time ago. The thread sends them if no call follows. */
static bool holds(struct engine *e, const struct sd_cq *cq, bool polled, bool received)
{
	uint64_t now = e->dev.now;
	bool hold = (cq ? cq->count > 0 && e->sleeps_until <= now + SLEEP_POLLED : polled && received) && acknowledgements_alone(&e->dev);
	if (hold)
		e->held_until = now + HOLD;
	return hold;
}

/* progress receives, sends and runs timers in the calling thread, with the lock: for a program that polls a completion
 * queue, or for the engine's thread. */
static void progress(struct sd_dev *dev, const struct sd_cq *cq, bool polled)
{
	struct engine *e = engine_of(dev);
	dev->now = dev->link->now(dev->link);
	if (cq)
		note(e, dev->now, true);
	bool due = dev->dirty; /* no packet waits twice */
	sd_slots_follow(dev);
	for (int i = 0; i < 8; i++) {
		int received = sd_port_receive(e->port, dev);
		if (received) {
			dev->now = dev->link->now(dev->link);
			if (cq)
				note(e, dev->now, true);
		}
		if (due ? !cq && dev->now < e->held_until : holds(e, cq, polled, received))
			return;
		bool more = sd_run(dev);
		if (!received && !more)
			break;
	}
	if (dev->now >= dev->next_timer) {
		sd_timers(dev);
		sd_run(dev);
	}
}

/* prefer_wakeups asks the scheduler (from Linux 6.12) for the shortest time slices, so that the thread preempts
 * programs that spin when packets arrive. */
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
	bool gather = false;
	prefer_wakeups();
	prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0); /* ns; the default would double the shortest sleep */
	guard_lock(&sd_lock);
	e->steady_since = e->dev.now;
	while (!e->stop) {
		uint64_t now = e->dev.link->now(e->dev.link);
		uint64_t sleep = e->dev.next_timer == UINT64_MAX ? SLEEP_IDLE : SLEEP_BUSY;
		bool polled = atomic_load_explicit(&e->polls, memory_order_relaxed) != polls;
		e->passive = polled && e->dev.armed == 0 && now >= e->distrust_until;
		polls = e->polls;
		if (e->dev.dirty && !e->passive)
			sleep = e->held_until > now ? e->held_until - now : 0;
		else if (polled)
			sleep = SLEEP_POLLED;
		gather = gather && !e->passive && !e->dev.dirty && now >= e->gathers_from;
		if (gather && sleep > GATHER)
			sleep = GATHER;
		e->sleeps_until = now + sleep;
		bool packets = !e->passive && !gather;
		int stale = sd_slots_stale(&e->dev);
		guard_unlock(&sd_lock);
		sd_slots_report(&e->dev, stale);
		bool woken = sd_port_wait(e->port, packets, sleep);
		if (e->passive && !woken)
			watch_program(e, &polls);
		uint64_t before = e->dev.link->now(e->dev.link);
		if (gather && before > now + sleep + GATHER_LATE)
			e->gathers_from = before + GATHER_PAUSE;
		guard_lock(&sd_lock);
		sd_port_serve(e->port);
		e->sleeps_until = 0;
		uint64_t received = e->dev.counters.received;
		if (e->passive && e->dev.armed == 0 && still_polls(e, polls))
			continue;
		e->steady_since = before;
		progress(&e->dev, NULL, e->polls != polls || polled);
		gather = e->dev.counters.received - received >= BULK;
		if (e->passive && (e->dev.counters.received != received || e->dev.now > before + CALL_GAP))
			distrust(e);
	}
	guard_unlock(&sd_lock);
	return NULL;
}

void sd_enter(struct sd_dev *dev)
{
	guard_lock(&sd_lock);
	dev->now = dev->link->now(dev->link);
	note(engine_of(dev), dev->now, true);
}

void sd_leave(struct sd_dev *dev)
{
	struct engine *e = engine_of(dev);
	bool more = e == engine && sd_run(dev); /* a child of fork sends nothing by the parent's sockets */
	bool wake = e->sleeps_until > dev->now + SLEEP_BUSY && (more || dev->next_timer < e->sleeps_until);
	if (wake)
		e->sleeps_until = 0;
	note(e, dev->link->now(dev->link), false);
	guard_begin();
	guard_unlock(&sd_lock);
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
	guard_forks((pthread_mutex_t *const[]){&engine_lock, &sd_lock}, 2, leave_to_parent);
}

static struct engine *start_engine(void)
{
	struct engine *e = calloc(1, sizeof *e);
	if (!e)
		return NULL;
	e->dev.next_timer = UINT64_MAX;
	e->distrust = DISTRUST_MIN;
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
	if (engine && pthread_mutex_trylock(&sd_lock) == 0) {
		report(engine);
		pthread_mutex_unlock(&sd_lock);
	}
	guard_end();
}

static void stop_engine(struct engine *e)
{
	guard_lock(&sd_lock);
	e->stop = true;
	guard_unlock(&sd_lock);
	sd_port_wake(e->port);
	pthread_join(e->thread, NULL);
	report(e);
	sd_slots_close(e->dev.slots);
	sd_port_close(e->port);
	free(e->dev.mrs.objects);
	free(e->dev.qps.objects);
	free(e);
}

struct sd_dev *sd_device_open(void)
{
	guard_lock(&engine_lock);
	if (!engine)
		engine = start_engine();
	struct sd_dev *dev = engine ? &engine->dev : NULL;
	if (dev)
		engine->contexts++;
	guard_unlock(&engine_lock);
	return dev;
}

void sd_device_close(struct sd_dev *dev)
{
	struct engine *e = engine_of(dev), *last = NULL;
	guard_lock(&engine_lock);
	if (e == engine && --e->contexts == 0) {
		last = e;
		engine = NULL;
	}
	guard_unlock(&engine_lock);
	if (last)
		stop_engine(last);
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

int sd_poll_cq(struct ibv_cq *base, int n, struct ibv_wc *wc)
{
	struct sd_cq *cq = (struct sd_cq *)base;
	struct engine *e = engine_of(cq->dev);
	if (e != engine)
		return -1; /* a child of fork */
	guard_lock(&sd_lock);
	atomic_fetch_add_explicit(&e->polls, 1, memory_order_relaxed);
	if (cq->count < (uint32_t)n)
		progress(cq->dev, cq, true);
	int taken = sd_cq_take(cq, n, wc);
	note(e, cq->dev->link->now(cq->dev->link), false);
	guard_unlock(&sd_lock);
	return taken;
}
