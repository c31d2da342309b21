/* Measures libfared on a table: bench PATH. Prints ns per call: each call is timed by the processor's counter. The
 * median cost of the timer is subtracted. The counter may have steps of 10 ns: a row of calls, each of which needs the
 * result of the previous one, is finer. */
#include <fared.h>

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

static uint64_t now(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

#if defined(__x86_64__)
#include <x86intrin.h>
static inline uint64_t ticks(void)
{
	_mm_lfence();
	uint64_t t = __rdtsc();
	_mm_lfence();
	return t;
}
#else
static inline uint64_t ticks(void)
{
	return now();
}
#endif

#define N 1000000
#define ROW 20 /* calls in a row */
static uint32_t took[N];

static int compare(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
	return (x > y) - (x < y);
}

static double scale;   /* ns per tick */
static uint32_t empty; /* ticks of an empty measurement */

/* Prints the times per call of n measurements of some calls. */
static void report_rows(const char *name, size_t n, int calls)
{
	qsort(took, n, sizeof *took, compare);
#define TOOK(p) took[(size_t)((double)(n - 1) * (p))]
#define AT(p) ((TOOK(p) > empty ? TOOK(p) - empty : 0) * scale / calls)
	printf("%-30s p50 %5.1f ns  p99 %5.1f ns  p99.9 %6.1f ns\n", name, AT(0.5), AT(0.99), AT(0.999));
}

static void report(const char *name)
{
	report_rows(name, N, 1);
}

static double file_size(const char *path)
{
	struct stat st;
	CHECK(stat(path, &st) == 0);
	return (double)st.st_size;
}

/* Measures the machine: one and two dependent loads of random cache lines of the file, mapped as libfared maps it. A
 * look-up of a random pair has at least two, that of the index and that of the pair. */
static void measure_memory(const char *path)
{
	struct stat st;
	int fd = open(path, O_RDONLY);
	CHECK(fd >= 0 && fstat(fd, &st) == 0);
	const volatile unsigned char *mem = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
	CHECK(mem != MAP_FAILED);
	uint64_t random = 1, lines = (uint64_t)st.st_size / 64, sink = 0;
	for (int loads = 1; loads <= 2; loads++) {
		for (int pass = 0; pass < 2; pass++) /* the first pass maps the pages */
			for (int i = 0; i < N; i++) {
				uint64_t first = (random = random * 6364136223846793005u + 1442695040888963407u) >> 33;
				uint64_t second = (random = random * 6364136223846793005u + 1442695040888963407u) >> 33;
				uint64_t a = first % lines * 64, b = second % lines * 64;
				uint64_t start = ticks();
				uint64_t v = mem[a];
				if (loads == 2)
					v = mem[b + (v & 1)]; /* the address depends on the first load */
				sink += v;
				took[i] = (uint32_t)(ticks() - start);
			}
		report(loads == 1 ? "one random load of the file" : "two dependent loads");
	}
	CHECK(sink != 1);
	munmap((void *)mem, (size_t)st.st_size);
	close(fd);
}

int main(int argc, char **argv)
{
	CHECK(argc == 2);
	uint64_t t0 = now(), c0 = ticks();
	while (now() - t0 < 50000000)
		;
	scale = (double)(now() - t0) / (double)(ticks() - c0);
	for (int i = 0; i < N; i++) {
		uint64_t start = ticks();
		took[i] = (uint32_t)(ticks() - start);
	}
	qsort(took, N, sizeof *took, compare);
	empty = took[N / 2];
	uint32_t step = UINT32_MAX;
	for (int i = 1; i < N; i++)
		if (took[i] != took[i - 1] && took[i] - took[i - 1] < step)
			step = took[i] - took[i - 1];

	struct fared_table *t;
	CHECK(fared_open(&t, argv[1]) == 0);
	struct fared_status s;
	CHECK(fared_get_status(t, &s) == 0 && s.pairs);
	struct {
		struct fared_address source, destination;
	} *keys = calloc(s.pairs, sizeof *keys);
	struct fared_pair pair;
	struct fared_slot *slots = calloc(s.max_slots, sizeof *slots);
	int64_t *credit = calloc(s.max_slots, sizeof *credit);
	uint32_t cursor = 0, n = 0;
	while (n < s.pairs && fared_next_pair(t, &cursor, &keys[n].source, &keys[n].destination, &pair, slots, s.max_slots) == 0)
		n++;
	CHECK(n == s.pairs);
	printf("%u pairs, %u slots, file of %.1f MB; the timer's cost, subtracted: %.1f ns, its step: %.1f ns\n", n, pair.slots, file_size(argv[1]) / 1e6,
		empty * scale, step * scale);
	measure_memory(argv[1]);
	uint64_t random = 1;
	volatile int sink = 0;
	for (int pass = 0; pass < 3; pass++) { /* the first pass maps the pages, the second one reads no slots */
		uint32_t room = pass == 1 ? 0 : s.max_slots;
		for (int i = 0; i < N; i++) {
			random = random * 6364136223846793005u + 1442695040888963407u;
			uint32_t k = (uint32_t)(random >> 33) % n;
			struct fared_address source = keys[k].source, destination = keys[k].destination; /* the caller has them in its cache */
			uint64_t start = ticks();
			sink += fared_lookup(t, &source, &destination, &pair, slots, room);
			took[i] = (uint32_t)(ticks() - start);
		}
		if (pass)
			report(room ? "look-up of a random pair" : "the same without slots");
	}
	/* The caller has the last reading of every pair, and that of this pair in its cache, as the addresses. */
	struct fared_pair *last = calloc(n, sizeof *last);
	CHECK(last);
	for (uint32_t k = 0; k < n; k++)
		CHECK(fared_lookup(t, &keys[k].source, &keys[k].destination, &last[k], slots, s.max_slots) == 0);
	for (int pass = 0; pass < 2; pass++) {
		for (int i = 0; i < N; i++) {
			random = random * 6364136223846793005u + 1442695040888963407u;
			uint32_t k = (uint32_t)(random >> 33) % n;
			struct fared_address source = keys[k].source, destination = keys[k].destination;
			pair = last[k];
			uint64_t start = ticks();
			sink += pass ? fared_is_current(t, &pair) : fared_lookup_again(t, &source, &destination, &pair, slots, s.max_slots);
			took[i] = (uint32_t)(ticks() - start);
		}
		report(pass ? "is a random pair current?" : "look-up again of a random pair");
	}
	free(last);
	for (int i = 0; i < N; i++) {
		uint64_t start = ticks();
		sink += fared_lookup(t, &keys[0].source, &keys[0].destination, &pair, slots, s.max_slots);
		took[i] = (uint32_t)(ticks() - start);
	}
	report("look-up of one pair");
	CHECK(pair.slots);
	uint32_t share = slots[pair.slots - 1].share_ppb;
	for (int i = 0; i < N / ROW; i++) {
		const struct fared_address *destination = &keys[0].destination;
		uint64_t start = ticks();
		for (int k = 0; k < ROW; k++) {
			sink += fared_lookup(t, &keys[0].source, destination, &pair, slots, s.max_slots);
			destination += slots[pair.slots - 1].share_ppb - share; /* 0 */
		}
		took[i] = (uint32_t)(ticks() - start);
	}
	report_rows("the same in a row", N / ROW, ROW);
	for (int i = 0; i < N; i++) {
		uint64_t start = ticks();
		sink += fared_is_current(t, &pair);
		took[i] = (uint32_t)(ticks() - start);
	}
	report("is it current?");
	for (int i = 0; i < N; i++) {
		uint64_t start = ticks();
		sink += fared_choose(slots, pair.slots, credit);
		took[i] = (uint32_t)(ticks() - start);
	}
	report("choice by share");
	for (int i = 0; i < N; i++) {
		uint64_t start = ticks();
		sink += fared_choose_key(slots, pair.slots, (uint64_t)i);
		took[i] = (uint32_t)(ticks() - start);
	}
	report("choice by key");
	fared_close(t);
	free(keys);
	free(slots);
	free(credit);
	return 0;
}
