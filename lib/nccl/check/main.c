/* nccl-net-check loads a net plugin as NCCL does and runs collectives of host memory with it, one process a rank; every
 * element is checked. See usage. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "host.h"

static const char usage[] = "usage: nccl-net-check --rank N --ranks N --rendezvous DIRECTORY [OPTION]...\n"
			    "\n"
			    "Runs a collective between processes that share a directory, through a net plugin of NCCL, and checks every element.\n"
			    "\n"
			    "  --plugin FILE        the plugin (libnccl-net-fared.so)\n"
			    "  --abi N              newest version of the interface to look for, 8 to 12 (12)\n"
			    "  --device N           device of the plugin (0)\n"
			    "  --op NAME            allreduce, allgather, alltoall, sendrecv or grouped (allreduce)\n"
			    "  --bytes N            size of the result at each rank (1048576)\n"
			    "  --slice N            greatest message (262144)\n"
			    "  --iterations N       repetitions (1)\n"
			    "  --seconds N          repeats until this time has passed; rank 0 decides\n"
			    "  --until FILE         repeats until this file exists; rank 0 decides\n"
			    "  --idle N             seconds to wait with open communicators before the end; shows the processor time used then\n"
			    "  --timeout N          seconds without progress until the program fails (60)\n"
			    "  --verbose            prints the plugin's messages\n"
			    "\n"
			    "Ranks exchange the handles of listeners as files in the directory. Exit code: 0 every element is right, 1 not, 2 wrong usage.\n"
			    "\n"
			    "example: for r in 0 1; do nccl-net-check --rank $r --ranks 2 --rendezvous /tmp/ring --bytes 1000000000 & done; wait\n";

#define WINDOW 8 /* messages in flight in each direction */
#define MAX_RANKS 256

static struct {
	struct host host;
	const char *directory;
	int rank, ranks, device;
	size_t bytes, slice;
	double timeout;
	bool verbose;
	char *memory[2]; /* registered */
	size_t room;     /* bytes of each */
	uint64_t wrong;
	/* calls of test: their durations in processor time of the thread. As many intervals without a call show what the
	 * kernel adds to them. */
	uint64_t tests, slow_tests, longest_test, slow_empty;
} run = {.device = 0, .bytes = 1 << 20, .slice = 256 << 10, .timeout = 60};

static double seconds(clockid_t clock)
{
	struct timespec t;
	clock_gettime(clock, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* complain writes a line to the standard error. */
static void complain(const char *prefix, const char *format, va_list args)
{
	char text[512];
	vsnprintf(text, sizeof text, format, args);
	fprintf(stderr, "%srank %d: %s\n", prefix, run.rank, text);
}

static void fail(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	complain("nccl-net-check: ", format, args);
	va_end(args);
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
	if (!run.verbose && level != NCCL_LOG_WARN)
		return;
	va_list args;
	va_start(args, format);
	complain("", format, args);
	va_end(args);
}

/* idle gives the processor to other threads when a loop has made no progress, as NCCL's proxy threads do. */
static void idle(double *since, bool progress)
{
	static unsigned passes;
	if (progress) {
		*since = seconds(CLOCK_MONOTONIC);
		passes = 0;
		return;
	}
	if (++passes < 16)
		sched_yield();
	else
		nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
	if (passes % 1024 == 0 && seconds(CLOCK_MONOTONIC) - *since > run.timeout)
		fail("no progress for %.0f s", run.timeout);
}

static uint64_t thread_time(void)
{
	struct timespec t;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static void test(void *request, int *done, int *sizes)
{
	uint64_t empty = thread_time(), begin = thread_time();
	ncclResult_t result = host_test(&run.host, request, done, sizes);
	uint64_t took = thread_time() - begin;
	run.tests++;
	run.slow_tests += took > 100000;
	run.slow_empty += begin - empty > 100000;
	if (took > run.longest_test)
		run.longest_test = took;
	must(result, "test");
}

/* Files of the rendezvous appear whole, by rename. */
static void publish(const char *name, const void *data, size_t size)
{
	char path[512], temporary[540];
	snprintf(path, sizeof path, "%s/%s", run.directory, name);
	snprintf(temporary, sizeof temporary, "%s.%d", path, run.rank);
	int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd < 0 || write(fd, data, size) != (ssize_t)size || close(fd) || rename(temporary, path))
		fail("%s: %s", path, strerror(errno));
}

static void obtain(const char *name, void *data, size_t size)
{
	char path[512];
	snprintf(path, sizeof path, "%s/%s", run.directory, name);
	double since = seconds(CLOCK_MONOTONIC);
	for (;;) {
		int fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd >= 0) {
			ssize_t n = read(fd, data, size);
			close(fd);
			if (n != (ssize_t)size)
				fail("%s has %zd bytes, want %zu", path, n, size);
			return;
		}
		if (errno != ENOENT)
			fail("%s: %s", path, strerror(errno));
		if (seconds(CLOCK_MONOTONIC) - since > run.timeout)
			fail("%s: no such file after %.0f s: has the other rank ended?", path, run.timeout);
		nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
	}
}

static void handle_name(char *out, size_t size, int listener, int sender)
{
	snprintf(out, size, "handle-%d-%d", listener, sender);
}

/* connect_all opens a communicator to each rank of one list, and accepts one from each rank of another. -1 ends a
 * list. */
static void connect_all(const int *to, void **sends, const int *from, void **receives)
{
	static unsigned char handles[MAX_RANKS][NCCL_NET_HANDLE_MAXSIZE] __attribute__((aligned(8)));
	static void *listeners[MAX_RANKS];
	char name[64];
	int left = 0;
	for (int i = 0; from[i] >= 0; i++, left++) {
		unsigned char handle[NCCL_NET_HANDLE_MAXSIZE] __attribute__((aligned(8)));
		must(host_listen(&run.host, run.device, handle, &listeners[i]), "listen");
		handle_name(name, sizeof name, run.rank, from[i]);
		publish(name, handle, sizeof handle);
		receives[i] = NULL;
	}
	for (int i = 0; to[i] >= 0; i++, left++) {
		handle_name(name, sizeof name, to[i], run.rank);
		obtain(name, handles[i], sizeof handles[i]);
		sends[i] = NULL;
	}
	double since = seconds(CLOCK_MONOTONIC);
	while (left) {
		bool progress = false;
		for (int i = 0; to[i] >= 0; i++) {
			if (sends[i])
				continue;
			must(host_connect(&run.host, run.device, handles[i], &sends[i]), "connect");
			left -= sends[i] != NULL;
			progress |= sends[i] != NULL;
		}
		for (int i = 0; from[i] >= 0; i++) {
			if (receives[i])
				continue;
			must(host_accept(&run.host, listeners[i], &receives[i]), "accept");
			left -= receives[i] != NULL;
			progress |= receives[i] != NULL;
		}
		idle(&since, progress);
	}
	for (int i = 0; from[i] >= 0; i++)
		must(host_close_listener(&run.host, listeners[i]), "closeListen");
}

/* base is the part of value that depends on the contributor alone. */
static uint32_t base(int rank, uint64_t iteration)
{
	uint64_t x = (uint64_t)rank * 0x9e3779b97f4a7c15 + iteration * 0x94d049bb133111eb;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
	return (uint32_t)(x ^ x >> 31);
}

#define STEP 0x9e3779b1u /* odd: no two elements of a contribution are equal */

/* value is the contribution of a rank to an element. */
static uint32_t value(int rank, uint64_t element, uint64_t iteration)
{
	return base(rank, iteration) + (uint32_t)element * STEP;
}

/* pipe is a sequence of messages in one direction of a communicator, in flight up to WINDOW at a time. */
struct pipe {
	void *comm, *memory[2]; /* of run.memory */
	uint64_t begun, done;
	void *requests[WINDOW];
	size_t sizes[WINDOW];
	int first; /* index of the request of message done */
};

/* handle_of returns the registration of a message's memory. */
static void *handle_of(const struct pipe *p, const void *data)
{
	const char *at = data;
	return p->memory[at >= run.memory[1] && at < run.memory[1] + run.room];
}

static bool pipe_full(const struct pipe *p)
{
	return p->begun - p->done == WINDOW;
}

static bool pipe_send(struct pipe *p, void *data, size_t size, int tag)
{
	void *request = NULL;
	must(host_send(&run.host, p->comm, data, size, tag, handle_of(p, data), &request), "isend");
	if (!request)
		return false;
	p->requests[p->begun++ % WINDOW] = request;
	return true;
}

static bool pipe_receive(struct pipe *p, void *data, size_t size, int tag)
{
	void *request = NULL, *datas[1] = {data}, *memory[1] = {handle_of(p, data)};
	size_t sizes[1] = {size};
	int tags[1] = {tag};
	must(host_receive(&run.host, p->comm, 1, datas, sizes, tags, memory, &request), "irecv");
	if (!request)
		return false;
	p->sizes[p->begun % WINDOW] = size;
	p->requests[p->begun++ % WINDOW] = request;
	return true;
}

/* pipe_next completes the oldest message if it is done. */
static bool pipe_next(struct pipe *p, bool receive)
{
	if (p->done == p->begun)
		return false;
	int done = 0, sizes[8] = {0};
	test(p->requests[p->done % WINDOW], &done, sizes);
	if (!done)
		return false;
	if (receive && (size_t)sizes[0] != p->sizes[p->done % WINDOW])
		fail("a message has %d bytes, want %zu", sizes[0], p->sizes[p->done % WINDOW]);
	p->done++;
	return true;
}

/* ring runs a ring all-reduce (sum) or all-gather in place. A segment is split into slices, and slice k of step s is
 * sent once slice k of step s-1 has arrived. */
static void ring(struct pipe *out, struct pipe *in, uint32_t *data, uint32_t *landing, bool reduce)
{
	uint64_t elements = run.bytes / 4, segment = (elements + (uint64_t)run.ranks - 1) / (uint64_t)run.ranks, slice = run.slice / 4;
	uint64_t slices = (segment + slice - 1) / slice, steps = (uint64_t)(reduce ? 2 : 1) * (uint64_t)(run.ranks - 1), total = steps * slices;
	uint64_t sent = 0, posted = 0, arrived = 0;
	uint64_t out_base = out->done;
	double since = seconds(CLOCK_MONOTONIC);
	int ranks = run.ranks;
	uint64_t reducing = reduce ? (uint64_t)(ranks - 1) : 0;
#define SEGMENT_SENT(step) ((uint64_t)(((run.rank - (int)(step) + (int)((step) >= reducing && reduce ? ranks : 0)) % ranks + ranks) % ranks))
#define SEGMENT_RECEIVED(step) ((uint64_t)(((run.rank - (int)(step)-1) % ranks + ranks) % ranks))
	while (arrived < total || out->done - out_base < total) {
		bool progress = false;
		while (posted < total && !pipe_full(in)) {
			uint64_t step = posted / slices, at = SEGMENT_RECEIVED(step) * segment + posted % slices * slice;
			uint64_t end = (SEGMENT_RECEIVED(step) + 1) * segment;
			uint64_t n = at >= elements ? 0 : (end < elements ? end : elements) - at;
			n = n > slice ? slice : n;
			uint32_t *target = step < reducing ? landing + posted % WINDOW * slice : data + (n ? at : 0);
			if (!pipe_receive(in, target, n * 4, 7))
				break;
			posted++;
			progress = true;
		}
		while (sent < total && sent < arrived + slices && !pipe_full(out)) {
			uint64_t step = sent / slices, at = SEGMENT_SENT(step) * segment + sent % slices * slice;
			uint64_t end = (SEGMENT_SENT(step) + 1) * segment;
			uint64_t n = at >= elements ? 0 : (end < elements ? end : elements) - at;
			n = n > slice ? slice : n;
			if (!pipe_send(out, data + (n ? at : 0), n * 4, 7))
				break;
			sent++;
			progress = true;
		}
		while (pipe_next(in, true)) {
			uint64_t step = arrived / slices, at = SEGMENT_RECEIVED(step) * segment + arrived % slices * slice;
			if (step < reducing) {
				size_t n = in->sizes[(in->done - 1) % WINDOW] / 4;
				const uint32_t *from = landing + arrived % WINDOW * slice;
				for (size_t i = 0; i < n; i++)
					data[at + i] += from[i];
			}
			arrived++;
			progress = true;
		}
		while (pipe_next(out, false))
			progress = true;
		idle(&since, progress);
	}
}

static void check(const char *op, uint64_t element, uint32_t got, uint32_t want)
{
	if (got == want)
		return;
	if (!run.wrong++)
		fprintf(stderr, "nccl-net-check: rank %d: %s: element %llu is %#x, want %#x\n", run.rank, op, (unsigned long long)element, got, want);
}

static void allreduce(struct pipe *out, struct pipe *in, uint32_t *data, uint32_t *landing, uint64_t iteration)
{
	uint64_t elements = run.bytes / 4;
	for (uint64_t i = 0; i < elements; i++)
		data[i] = value(run.rank, i, iteration);
	ring(out, in, data, landing, true);
	uint32_t sum = 0;
	for (int r = 0; r < run.ranks; r++)
		sum += base(r, iteration);
	for (uint64_t i = 0; i < elements; i++)
		check("allreduce", i, data[i], sum + (uint32_t)i * STEP * (uint32_t)run.ranks);
}

static void allgather(struct pipe *out, struct pipe *in, uint32_t *data, uint32_t *landing, uint64_t iteration)
{
	uint64_t elements = run.bytes / 4, segment = (elements + (uint64_t)run.ranks - 1) / (uint64_t)run.ranks;
	for (uint64_t i = 0; i < elements; i++)
		data[i] = (int)(i / segment) == run.rank ? value(run.rank, i, iteration) : ~0u;
	ring(out, in, data, landing, false);
	for (uint64_t i = 0; i < elements; i++)
		check("allgather", i, data[i], value((int)(i / segment), i, iteration));
}

/* exchange sends a part to each peer and receives one from each: all-to-all, or with one peer send/recv. Parts are
 * messages of the slice's size. With grouped, each receive takes as many messages as the device permits, sent with
 * their tags in the reverse order. */
static void exchange(const char *op, const int *peers, struct pipe *outs, struct pipe *ins, uint32_t *data, uint32_t *result, uint64_t iteration)
{
	int n = 0;
	while (peers[n] >= 0)
		n++;
	uint64_t part = run.bytes / 4 / (uint64_t)n, slice = run.slice / 4, slices = (part + slice - 1) / slice;
	for (int p = 0; p < n; p++) {
		for (uint64_t i = 0; i < part; i++) {
			data[(uint64_t)p * part + i] = value(run.rank * MAX_RANKS + peers[p], i, iteration);
			result[(uint64_t)p * part + i] = ~0u;
		}
	}
	double since = seconds(CLOCK_MONOTONIC);
	uint64_t bases[MAX_RANKS], in_bases[MAX_RANKS];
	for (int p = 0; p < n; p++) {
		bases[p] = outs[p].begun;
		in_bases[p] = ins[p].begun;
	}
	for (int left = n; left;) {
		bool progress = false;
		left = 0;
		for (int p = 0; p < n; p++) {
			struct pipe *out = &outs[p], *in = &ins[p];
#define SLICE_BYTES(k) (((k) + 1 == slices ? part - (k)*slice : slice) * 4)
			for (uint64_t k; (k = in->begun - in_bases[p]) < slices && !pipe_full(in);) {
				if (!pipe_receive(in, result + (uint64_t)p * part + k * slice, SLICE_BYTES(k), (int)(k % 5)))
					break;
				progress = true;
			}
			for (uint64_t k; (k = out->begun - bases[p]) < slices && !pipe_full(out);) {
				if (!pipe_send(out, data + (uint64_t)p * part + k * slice, SLICE_BYTES(k), (int)(k % 5)))
					break;
				progress = true;
			}
			while (pipe_next(in, true))
				progress = true;
			while (pipe_next(out, false))
				progress = true;
			left += out->done - bases[p] < slices || in->done - in_bases[p] < slices;
		}
		idle(&since, progress);
	}
	for (int p = 0; p < n; p++) {
		for (uint64_t i = 0; i < part; i++)
			check(op, (uint64_t)p * part + i, result[(uint64_t)p * part + i], value(peers[p] * MAX_RANKS + run.rank, i, iteration));
	}
}

/* grouped posts one receive of several buffers; the messages come in the reverse order of the buffers. */
static void grouped(struct pipe *out, struct pipe *in, int to, int from, uint32_t *data, uint32_t *result, int most, uint64_t iteration)
{
	uint64_t part = run.bytes / 4 / (uint64_t)most;
	void *datas[8], *memory[8], *receive = NULL, *sends[8] = {0};
	size_t sizes[8];
	int tags[8], got[8] = {0}, left = most + 1;
	bool done[8] = {false}, received = false;
	for (int i = 0; i < most; i++) {
		datas[i] = result + (uint64_t)i * part;
		memory[i] = handle_of(in, datas[i]);
		sizes[i] = part * 4;
		tags[i] = 100 + i;
		for (uint64_t k = 0; k < part; k++) {
			data[(uint64_t)i * part + k] = value(run.rank * MAX_RANKS + to, (uint64_t)i * part + k, iteration);
			result[(uint64_t)i * part + k] = ~0u;
		}
	}
	double since = seconds(CLOCK_MONOTONIC);
	while (left) {
		bool progress = false;
		if (!receive && !received)
			must(host_receive(&run.host, in->comm, most, datas, sizes, tags, memory, &receive), "irecv");
		for (int i = most - 1; i >= 0; i--) {
			/* Message i is i elements short of its buffer. */
			if (!sends[i] && !done[i])
				must(host_send(&run.host, out->comm, data + (uint64_t)i * part, (part - (uint64_t)i) * 4, 100 + i, handle_of(out, data),
					     &sends[i]),
					"isend");
			int finished = 0;
			if (sends[i])
				test(sends[i], &finished, NULL);
			if (finished) {
				sends[i] = NULL;
				done[i] = progress = true;
				left--;
			}
		}
		int finished = 0;
		if (receive)
			test(receive, &finished, got);
		if (finished) {
			receive = NULL;
			received = progress = true;
			left--;
		}
		idle(&since, progress);
	}
	for (int i = 0; i < most; i++) {
		if ((uint64_t)got[i] != (part - (uint64_t)i) * 4)
			fail("message %d of a group has %d bytes, want %llu", i, got[i], (unsigned long long)(part - (uint64_t)i) * 4);
		for (uint64_t k = 0; k < part - (uint64_t)i; k++)
			check("grouped", (uint64_t)i * part + k, result[(uint64_t)i * part + k],
				value(from * MAX_RANKS + run.rank, (uint64_t)i * part + k, iteration));
	}
}

static double processor_time(void)
{
	struct rusage u;
	getrusage(RUSAGE_SELF, &u);
	return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

/* more decides for all ranks whether another iteration follows. */
static bool more(uint64_t iteration, uint64_t iterations, double limit, const char *until, double begin)
{
	if (limit <= 0 && !until)
		return iteration < iterations;
	char name[64], word = 0;
	snprintf(name, sizeof name, "more-%llu", (unsigned long long)iteration);
	if (run.rank == 0) {
		word = (until ? access(until, F_OK) != 0 : seconds(CLOCK_MONOTONIC) - begin < limit) ? '1' : '0';
		publish(name, &word, 1);
	}
	obtain(name, &word, 1);
	return word == '1';
}

int main(int argc, char **argv)
{
	enum { PLUGIN = 1, ABI, DEVICE, OP, BYTES, SLICE, ITERATIONS, SECONDS, UNTIL, IDLE, TIMEOUT, VERBOSE, RANK, RANKS, RENDEZVOUS, HELP };
	static const struct option options[] = {
		{"plugin", 1, NULL, PLUGIN},
		{"abi", 1, NULL, ABI},
		{"device", 1, NULL, DEVICE},
		{"op", 1, NULL, OP},
		{"bytes", 1, NULL, BYTES},
		{"slice", 1, NULL, SLICE},
		{"iterations", 1, NULL, ITERATIONS},
		{"seconds", 1, NULL, SECONDS},
		{"until", 1, NULL, UNTIL},
		{"idle", 1, NULL, IDLE},
		{"timeout", 1, NULL, TIMEOUT},
		{"verbose", 0, NULL, VERBOSE},
		{"rank", 1, NULL, RANK},
		{"ranks", 1, NULL, RANKS},
		{"rendezvous", 1, NULL, RENDEZVOUS},
		{"help", 0, NULL, HELP},
		{0},
	};
	const char *plugin = "libnccl-net-fared.so", *op = "allreduce", *until = NULL;
	int newest = 12;
	uint64_t iterations = 1;
	double limit = 0, rest = 0;
	run.rank = -1;
	for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) {
		switch (o) {
		case PLUGIN:
			plugin = optarg;
			break;
		case ABI:
			newest = atoi(optarg);
			break;
		case DEVICE:
			run.device = atoi(optarg);
			break;
		case OP:
			op = optarg;
			break;
		case BYTES:
			run.bytes = strtoull(optarg, NULL, 10);
			break;
		case SLICE:
			run.slice = strtoull(optarg, NULL, 10);
			break;
		case ITERATIONS:
			iterations = strtoull(optarg, NULL, 10);
			break;
		case SECONDS:
			limit = atof(optarg);
			break;
		case UNTIL:
			until = optarg;
			break;
		case IDLE:
			rest = atof(optarg);
			break;
		case TIMEOUT:
			run.timeout = atof(optarg);
			break;
		case VERBOSE:
			run.verbose = true;
			break;
		case RANK:
			run.rank = atoi(optarg);
			break;
		case RANKS:
			run.ranks = atoi(optarg);
			break;
		case RENDEZVOUS:
			run.directory = optarg;
			break;
		case HELP:
			fputs(usage, stdout);
			return 0;
		default:
			fputs(usage, stderr);
			return 2;
		}
	}
	static const char *const ops[] = {"allreduce", "allgather", "alltoall", "sendrecv", "grouped"};
	bool known = false;
	for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++)
		known |= !strcmp(op, ops[i]);
	if (!known || optind != argc || !run.directory || run.ranks < 2 || run.ranks > MAX_RANKS || run.rank < 0 || run.rank >= run.ranks || newest < 8 ||
		newest > 12 || run.slice < 4 || run.slice % 4 || run.bytes < (size_t)run.ranks * 64 || run.bytes % 4) {
		fputs(usage, stderr);
		return 2;
	}
	if (host_load(&run.host, plugin, newest))
		return 1;
	int devices = 0;
	ncclNetProperties_v12_t properties;
	must(host_init(&run.host, show), "init");
	must(host_devices(&run.host, &devices), "devices");
	if (run.device >= devices)
		fail("the plugin has %d devices, so none has the number %d", devices, run.device);
	must(host_properties(&run.host, run.device, &properties), "getProperties");

	bool all = !strcmp(op, "alltoall"), pair = !strcmp(op, "sendrecv");
	int to[MAX_RANKS], from[MAX_RANKS], n = 0;
	if (all) {
		for (int i = 1; i < run.ranks; i++)
			to[n] = from[n] = (run.rank + i) % run.ranks, n++;
	} else if (pair) {
		to[0] = from[0] = run.rank ^ 1;
		n = 1;
		if (to[0] >= run.ranks)
			fail("sendrecv needs an even number of ranks");
	} else {
		to[0] = (run.rank + 1) % run.ranks;
		from[0] = (run.rank + run.ranks - 1) % run.ranks;
		n = 1;
	}
	to[n] = from[n] = -1;
	void *sends[MAX_RANKS], *receives[MAX_RANKS];
	double begin = seconds(CLOCK_MONOTONIC);
	connect_all(to, sends, from, receives);
	double connected = seconds(CLOCK_MONOTONIC);

	size_t room = run.bytes + run.slice * WINDOW;
	uint32_t *data = malloc(room), *result = malloc(room);
	static struct pipe outs[MAX_RANKS], ins[MAX_RANKS];
	if (!data || !result)
		fail("%s", strerror(errno));
	run.memory[0] = (char *)data;
	run.memory[1] = (char *)result;
	run.room = room;
	for (int i = 0; i < n; i++) {
		outs[i].comm = sends[i];
		ins[i].comm = receives[i];
		for (int k = 0; k < 2; k++) {
			must(host_register(&run.host, sends[i], run.memory[k], room, &outs[i].memory[k]), "regMr");
			must(host_register(&run.host, receives[i], run.memory[k], room, &ins[i].memory[k]), "regMr");
		}
	}
	double cpu = processor_time(), start = seconds(CLOCK_MONOTONIC), communicating = 0;
	uint64_t iteration = 0;
	for (; more(iteration, iterations, limit, until, start) && !run.wrong; iteration++) {
		double t = seconds(CLOCK_MONOTONIC);
		if (!strcmp(op, "allreduce"))
			allreduce(&outs[0], &ins[0], data, result, iteration);
		else if (!strcmp(op, "allgather"))
			allgather(&outs[0], &ins[0], data, result, iteration);
		else if (!strcmp(op, "grouped"))
			grouped(&outs[0], &ins[0], to[0], from[0], data, result, properties.maxRecvs < 8 ? properties.maxRecvs : 8, iteration);
		else
			exchange(op, to, outs, ins, data, result, iteration);
		communicating += seconds(CLOCK_MONOTONIC) - t;
	}
	printf("rank %d: v%d %s %s: %llu x %zu bytes in %.3f s, %.2f MB/s; connected after %.3f s; processor %.3f s; %llu tests, longest %.1f us, %llu above 100 us, as %llu empty intervals; wrong elements: %llu\n",
		run.rank, run.host.version, properties.name, op, (unsigned long long)iteration, run.bytes, communicating,
		(double)iteration * (double)run.bytes / communicating / 1e6, connected - begin, processor_time() - cpu, (unsigned long long)run.tests,
		(double)run.longest_test / 1e3, (unsigned long long)run.slow_tests, (unsigned long long)run.slow_empty, (unsigned long long)run.wrong);
	fflush(stdout);
	if (rest > 0) {
		cpu = processor_time();
		nanosleep(&(struct timespec){.tv_sec = (time_t)rest, .tv_nsec = (long)((rest - (double)(time_t)rest) * 1e9)}, NULL);
		printf("rank %d: idle for %.1f s: processor %.4f s\n", run.rank, rest, processor_time() - cpu);
	}
	for (int i = 0; i < n; i++) {
		for (int k = 0; k < 2; k++) {
			must(host_deregister(&run.host, sends[i], outs[i].memory[k]), "deregMr");
			must(host_deregister(&run.host, receives[i], ins[i].memory[k]), "deregMr");
		}
		must(host_close_send(&run.host, sends[i]), "closeSend");
		must(host_close_receive(&run.host, receives[i]), "closeRecv");
	}
	must(host_finalize(&run.host), "finalize");
	free(data);
	free(result);
	return run.wrong ? 1 : 0;
}
