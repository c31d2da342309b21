/* Measures the round trips of small messages: pingpong apart|together TABLE TABLE ROUNDS NAME=TRANSPORT:PLUGIN...
 * The two processes have a processor each, as on two servers, or share one, and have a slot table each. In each round,
 * every contestant and a plain blocking TCP socket exchange a block of messages of each size, so that all have the same
 * neighbors on the processors. A plugin's file is copied before it is loaded: each contestant has a separate library.
 * A line of the output has a contestant, a size, the number of round trips, their median and 99th percentile in us, and
 * the median over the rounds of the ratio between the medians of the contestant and of the plain socket. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "host.h"

#define WARM 20   /* round trips before those that count */
#define BLOCK 100 /* that count */
#define AHEAD 8   /* receives that are posted before their messages, as many as NCCL posts */
#define MOST_CONTESTANTS 6
#define GREATEST 65536

static const size_t sizes[] = {8, 64, 1024, 8192, GREATEST};
enum { SIZES = sizeof sizes / sizeof *sizes };

/* contestant is a way to exchange messages. */
struct contestant {
	const char *name;
	int socket; /* of the plain one */
	struct host host;
	void *listener, *sends, *receives, *memory[2];
	double *all[SIZES], *medians[SIZES]; /* us: of round trips, and of the rounds */
};

static struct contestant contestants[MOST_CONTESTANTS];
static int count, rank, peer; /* peer: the socket by which the processes start */
static _Alignas(4096) char out[AHEAD][GREATEST], in[AHEAD][GREATEST];

static void fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

static void fail(const char *format, ...)
{
	va_list args;
	fprintf(stderr, "pingpong: rank %d: ", rank);
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	_exit(1);
}

static void must(ncclResult_t result, const char *call)
{
	if (result != ncclSuccess)
		fail("%s returned error %d", call, (int)result);
}

static void show(int level, unsigned long flags, const char *file, int line, const char *format, ...)
{
	(void)flags, (void)file, (void)line;
	if (level != NCCL_LOG_WARN)
		return;
	va_list args;
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
}

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void all_of(ssize_t (*call)(int, void *, size_t, int), int fd, void *data, size_t size)
{
	for (size_t at = 0; at < size;) {
		ssize_t n = call(fd, (char *)data + at, size - at, MSG_NOSIGNAL);
		if (n <= 0)
			fail("a socket has failed: %s", n ? strerror(errno) : "the other process has ended");
		at += (size_t)n;
	}
}

static ssize_t send_some(int fd, void *data, size_t size, int flags)
{
	return send(fd, data, size, flags);
}

/* Plain socket */

static void open_plain(struct contestant *c)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t size = sizeof a;
	int yes = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (rank == 0) {
		if (bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 1) || getsockname(fd, (struct sockaddr *)&a, &size))
			fail("listen: %s", strerror(errno));
		all_of(send_some, peer, &a, sizeof a);
		c->socket = accept(fd, NULL, NULL);
		close(fd);
	} else {
		all_of(recv, peer, &a, sizeof a);
		c->socket = connect(fd, (struct sockaddr *)&a, sizeof a) ? -1 : fd;
	}
	if (c->socket < 0 || setsockopt(c->socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes))
		fail("no plain connection: %s", strerror(errno));
}

static void plain(struct contestant *c, size_t size, double *times)
{
	for (int i = 0; i < WARM + BLOCK; i++) {
		double begin = now();
		if (rank == 0)
			all_of(send_some, c->socket, out[i % AHEAD], size);
		all_of(recv, c->socket, in[i % AHEAD], size);
		if (rank == 1)
			all_of(send_some, c->socket, out[i % AHEAD], size);
		else if (i >= WARM)
			times[i - WARM] = now() - begin;
	}
}

/* Plugin */

static void copy_file(const char *from, const char *to)
{
	char text[65536];
	int a = open(from, O_RDONLY | O_CLOEXEC), b = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0700);
	if (a < 0 || b < 0)
		fail("%s, %s: %s", from, to, strerror(errno));
	for (ssize_t n; (n = read(a, text, sizeof text));) {
		if (n < 0 || write(b, text, (size_t)n) != n)
			fail("%s, %s: %s", from, to, strerror(errno));
	}
	close(a);
	close(b);
}

static void open_plugin(struct contestant *c, const char *transport, const char *plugin)
{
	_Alignas(8) unsigned char own[NCCL_NET_HANDLE_MAXSIZE], far[NCCL_NET_HANDLE_MAXSIZE];
	char copy[] = "/tmp/pingpong-XXXXXX";
	int fd = mkstemp(copy);
	close(fd);
	copy_file(plugin, copy);
	setenv("FARED_NCCL_TRANSPORT", transport, 1);
	if (host_load(&c->host, copy, 12))
		fail("%s cannot be loaded", plugin);
	unlink(copy);
	must(host_init(&c->host, show), "init");
	must(host_listen(&c->host, 0, own, &c->listener), "listen");
	all_of(send_some, peer, own, sizeof own);
	all_of(recv, peer, far, sizeof far);
	while (!c->sends || !c->receives) {
		if (!c->sends)
			must(host_connect(&c->host, 0, far, &c->sends), "connect");
		if (!c->receives)
			must(host_accept(&c->host, c->listener, &c->receives), "accept");
		nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
	}
	must(host_register(&c->host, c->sends, out, sizeof out, &c->memory[0]), "regMr");
	must(host_register(&c->host, c->receives, in, sizeof in, &c->memory[1]), "regMr");
}

/* window is the requests of one direction. */
struct window {
	void *requests[AHEAD];
	int begun, done;
};

static void send_one(struct contestant *c, struct window *w, size_t size)
{
	int i = w->begun % AHEAD;
	for (w->requests[i] = NULL; !w->requests[i];)
		must(host_send(&c->host, c->sends, out[i], size, 7, c->memory[0], &w->requests[i]), "isend");
	w->begun++;
}

static void receive_ahead(struct contestant *c, struct window *w)
{
	for (; w->begun < WARM + BLOCK && w->begun < w->done + AHEAD; w->begun++) {
		int i = w->begun % AHEAD, tag = 7;
		void *data = in[i];
		size_t room = GREATEST;
		for (w->requests[i] = NULL; !w->requests[i];)
			must(host_receive(&c->host, c->receives, 1, &data, &room, &tag, &c->memory[1], &w->requests[i]), "irecv");
	}
}

/* next tests the oldest request, and returns its size; -1: it is pending. */
static int next(struct contestant *c, struct window *w)
{
	int done = 0, size = 0;
	if (w->done == w->begun)
		return -1;
	must(host_test(&c->host, w->requests[w->done % AHEAD], &done, &size), "test");
	w->done += done;
	return done ? size : -1;
}

static void by_plugin(struct contestant *c, size_t size, double *times)
{
	struct window sends = {0}, receives = {0};
	for (int i = 0; i < WARM + BLOCK; i++) {
		double begin = now();
		uint64_t stamp = (uint64_t)i << 32 | size;
		receive_ahead(c, &receives);
		memcpy(out[i % AHEAD], &stamp, sizeof stamp);
		if (rank == 0)
			send_one(c, &sends, size);
		int got;
		while ((got = next(c, &receives)) < 0) {
			if (next(c, &sends) < 0)
				sched_yield(); /* as NCCL's proxy threads do */
		}
		if ((size_t)got != size || memcmp(in[i % AHEAD], &stamp, sizeof stamp))
			fail("%s: message %d has %d bytes, want %zu, or another content", c->name, i, got, size);
		if (rank == 1)
			send_one(c, &sends, size);
		else if (i >= WARM)
			times[i - WARM] = now() - begin;
		while (sends.begun - sends.done > AHEAD / 2)
			next(c, &sends);
	}
	while (sends.done < sends.begun) {
		if (next(c, &sends) < 0)
			sched_yield();
	}
}

/* Results */

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static double quantile(double *values, int n, double q)
{
	qsort(values, (size_t)n, sizeof *values, compare);
	return values[(int)((n - 1) * q)];
}

static void report(int rounds)
{
	double *ratios = calloc((size_t)rounds, sizeof *ratios);
	for (int k = 0; k < count; k++) {
		struct contestant *c = &contestants[k];
		for (int s = 0; s < SIZES; s++) {
			int n = rounds * BLOCK;
			for (int r = 0; r < rounds; r++)
				ratios[r] = c->medians[s][r] / contestants[0].medians[s][r];
			printf("%s %zu %d %.2f %.2f %.3f\n", c->name, sizes[s], n, quantile(c->all[s], n, 0.5), quantile(c->all[s], n, 0.99),
				quantile(ratios, rounds, 0.5));
		}
	}
	free(ratios);
}

int main(int argc, char **argv)
{
	int ends[2], rounds = argc > 4 ? atoi(argv[4]) : 0;
	if (argc < 5 || argc - 5 >= MOST_CONTESTANTS || rounds < 1 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends))
		return 2;
	pid_t child = fork();
	if (child < 0)
		return 2;
	rank = child == 0;
	peer = ends[rank];
	close(ends[!rank]);
	cpu_set_t processor;
	CPU_ZERO(&processor);
	CPU_SET(strcmp(argv[1], "apart") ? 0 : rank, &processor);
	if (sched_setaffinity(0, sizeof processor, &processor))
		fail("sched_setaffinity: %s", strerror(errno));
	setenv("FARED_SLOTS", argv[2 + rank], 1);
	contestants[count++].name = "plain";
	open_plain(&contestants[0]);
	for (int i = 5; i < argc; i++) {
		char *transport = strchr(argv[i], '='), *plugin = transport ? strchr(transport, ':') : NULL;
		if (!plugin)
			return 2;
		*transport++ = *plugin++ = 0;
		contestants[count].name = argv[i];
		open_plugin(&contestants[count++], transport, plugin);
	}
	for (int k = 0; k < count; k++) {
		for (int s = 0; s < SIZES; s++) {
			contestants[k].all[s] = calloc((size_t)rounds * BLOCK, sizeof(double));
			contestants[k].medians[s] = calloc((size_t)rounds, sizeof(double));
		}
	}
	for (int r = 0; r < rounds; r++) {
		for (int s = 0; s < SIZES; s++) {
			for (int k = 0; k < count; k++) {
				struct contestant *c = &contestants[(r + k) % count];
				double *times = c->all[s] + (size_t)r * BLOCK, sorted[BLOCK];
				if (c == contestants)
					plain(c, sizes[s], times);
				else
					by_plugin(c, sizes[s], times);
				memcpy(sorted, times, sizeof sorted);
				c->medians[s][r] = quantile(sorted, BLOCK, 0.5);
			}
		}
	}
	char word = 0;
	all_of(send_some, peer, &word, 1);
	all_of(recv, peer, &word, 1);
	for (int k = 1; k < count; k++) {
		must(host_deregister(&contestants[k].host, contestants[k].sends, contestants[k].memory[0]), "deregMr");
		must(host_deregister(&contestants[k].host, contestants[k].receives, contestants[k].memory[1]), "deregMr");
		must(host_close_send(&contestants[k].host, contestants[k].sends), "closeSend");
		must(host_close_receive(&contestants[k].host, contestants[k].receives), "closeRecv");
		must(host_close_listener(&contestants[k].host, contestants[k].listener), "closeListen");
		must(host_finalize(&contestants[k].host), "finalize");
	}
	if (rank == 1)
		return 0;
	report(rounds);
	int status;
	return waitpid(child, &status, 0) == child && status == 0 ? 0 : 1;
}
