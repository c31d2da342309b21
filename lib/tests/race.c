/* Readers and a writer in one process, for the thread sanitizer: race FILE SECONDS. FILE is a copy of
 * internal/slotfile/testdata/v2.slots. The writer changes the first pair and its vector; every reading must be of one
 * version of each. */
#include <fared.h>

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "../src/layout.h"
#include "check.h"

static unsigned char *mem;
static size_t pair_at, vector_at;
static atomic_int stop, written; /* written: the shares of the slots are equal, which those of the file are not */
static struct fared_address source, destination;
static atomic_ulong readings, retries;
static struct fared_table *shared;

static void store32(size_t at, uint32_t v)
{
	atomic_store((_Atomic uint32_t *)(mem + at), v);
}
static void store64(size_t at, uint64_t v)
{
	atomic_store((_Atomic uint64_t *)(mem + at), v);
}

static void *write_records(void *unused)
{
	(void)unused;
	uint32_t pair_sequence = 0, vector_sequence = 0;
	for (uint32_t k = 1; !atomic_load(&stop); k++) {
		store32(vector_at, ++vector_sequence);
		for (size_t i = 0; i < 4; i++)
			store64(vector_at + L_VECTOR_BYTES + 8 * i, k); /* share k, sub-port 0, plane 0 */
		store32(vector_at, ++vector_sequence);
		store32(pair_at, ++pair_sequence);
		store64(pair_at + L_PAIR_BYTES + 8, (k & 0xffff) * 0x0001000100010001u);
		store64(pair_at + L_PAIR_REVISION, k);
		store32(pair_at, ++pair_sequence);
		store32(L_HEADER_WAKE, k);
		atomic_store(&written, 1);
	}
	return NULL;
}

static void *read_records(void *own)
{
	struct fared_table *t = own ? own : shared;
	struct fared_pair pair;
	struct fared_slot slots[4];
	uint32_t last = 0;
	while (!atomic_load(&stop)) {
		int error = fared_lookup(t, &source, &destination, &pair, slots, 4);
		if (error == FARED_E_BUSY) {
			atomic_fetch_add(&retries, 1);
			continue;
		}
		CHECK(error == 0 && pair.slots == 4);
		for (int i = 1; i < 4; i++)
			CHECK(slots[i].share_ppb == slots[0].share_ppb && slots[i].source_port == slots[0].source_port);
		/* The port is that of the pair's revision, unless that is the initial one. */
		CHECK(pair.revision == 42 || slots[0].source_port == (uint16_t)pair.revision);
		CHECK(slots[0].share_ppb == 333333334 || slots[0].share_ppb >= last);
		last = slots[0].share_ppb == 333333334 ? 0 : slots[0].share_ppb;
		fared_is_current(t, &pair);
		if (own)
			fared_wait(t, 0);
		atomic_fetch_add(&readings, 1);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	CHECK(argc == 3);
	CHECK(fared_parse_address("10.255.0.1", &source) == 0 && fared_parse_address("10.255.0.2", &destination) == 0);
	int fd = open(argv[1], O_RDWR);
	struct stat st;
	CHECK(fd >= 0 && fstat(fd, &st) == 0);
	mem = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(mem != MAP_FAILED && close(fd) == 0);
	uint64_t pairs, vectors;
	uint32_t pair_size, vector_size, n;
	memcpy(&pairs, mem + L_HEADER_PAIRS_AT, 8);
	memcpy(&vectors, mem + L_HEADER_VECTORS_AT, 8);
	memcpy(&pair_size, mem + L_HEADER_PAIR_SIZE, 4);
	memcpy(&vector_size, mem + L_HEADER_VECTOR_SIZE, 4);
	for (pair_at = pairs; memcmp(mem + pair_at + L_PAIR_DESTINATION, &destination, 16); pair_at += pair_size)
		;
	memcpy(&n, mem + pair_at + L_PAIR_VECTOR, 4);
	vector_at = vectors + (size_t)(n - 1) * vector_size;
	/* The same memory as the writer's: the sanitizer does not know that two mappings are one file. */
	pthread_t threads[5];
	struct fared_table *own[2];
	CHECK(fared_open(&shared, argv[1]) == 0 && fared_open(&own[0], argv[1]) == 0 && fared_open(&own[1], argv[1]) == 0);
	CHECK(pthread_create(&threads[0], NULL, write_records, NULL) == 0);
	while (!atomic_load(&written))
		sched_yield();
	for (int i = 1; i < 5; i++)
		CHECK(pthread_create(&threads[i], NULL, read_records, i < 3 ? NULL : own[i - 3]) == 0);
	struct timespec pause = {.tv_sec = atoi(argv[2])};
	nanosleep(&pause, NULL);
	atomic_store(&stop, 1);
	for (int i = 0; i < 5; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	printf("%lu readings, %lu busy\n", atomic_load(&readings), atomic_load(&retries));
	CHECK(atomic_load(&readings) > 1000);
	fared_close(shared);
	fared_close(own[0]);
	fared_close(own[1]);
	return 0;
}
