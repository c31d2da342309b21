/* Tests of libfared in one process: unit GOLDEN KEYS. GOLDEN is internal/slotfile/testdata/v2.slots, KEYS is
 * testdata/keys.txt. */
#include <fared.h>

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../src/layout.h"
#include "check.h"

/* In memory, as /run: where / is an overlay, as in containers, no reader sees that a directory is deleted. */
static char dir[] = "/dev/shm/libfaredXXXXXX", path[64];
static unsigned char golden[1 << 20];
static size_t golden_size;

static void write_file(const void *data, size_t size)
{
	char next[80];
	snprintf(next, sizeof next, "%s.new", path);
	FILE *f = fopen(next, "wb");
	CHECK(f && fwrite(data, 1, size, f) == size && fclose(f) == 0 && rename(next, path) == 0);
}

/* Writes to the file in place. */
static void poke(size_t at, const void *data, size_t size)
{
	int fd = open(path, O_WRONLY);
	CHECK(fd >= 0 && pwrite(fd, data, size, (off_t)at) == (ssize_t)size && close(fd) == 0);
}

static void poke32(size_t at, uint32_t v)
{
	poke(at, &v, sizeof v);
}

static struct fared_address address(const char *text)
{
	struct fared_address a;
	CHECK(fared_parse_address(text, &a) == 0);
	return a;
}

static int descriptors(void)
{
	int n = 0;
	DIR *d = opendir("/proc/self/fd");
	CHECK(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

static uint64_t state = 1;

static uint64_t next_random(void)
{
	state = state * 6364136223846793005u + 1442695040888963407u;
	return state ^ state >> 29;
}

static void test_texts(void)
{
	CHECK(!strcmp(fared_version(), FARED_VERSION));
	for (int error = FARED_E_INVALID; error <= 0; error++)
		CHECK(strcmp(fared_error_text(error), "unknown error"));
	CHECK(!strcmp(fared_error_text(1), "unknown error") && !strcmp(fared_error_text(-99), "unknown error"));
}

static void test_addresses(void)
{
	struct fared_address a, b;
	char text[46];
	CHECK(fared_parse_address("10.255.0.1", &a) == 0 && fared_parse_address("::ffff:10.255.0.1", &b) == 0 && !memcmp(&a, &b, sizeof a));
	CHECK(fared_address_text(&a, text, sizeof text) == 0 && !strcmp(text, "10.255.0.1"));
	CHECK(fared_address_text(&a, text, 10) == FARED_E_INVALID);
	struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(0x0aff0001)};
	CHECK(fared_address_of((struct sockaddr *)&v4, &b) == 0 && !memcmp(&a, &b, sizeof a));
	struct sockaddr_in6 v6 = {.sin6_family = AF_INET6};
	v6.sin6_addr.s6_addr[0] = 0x20;
	CHECK(fared_address_of((struct sockaddr *)&v6, &b) == 0 && fared_address_text(&b, text, sizeof text) == 0 && !strcmp(text, "2000::"));
	struct sockaddr other = {.sa_family = AF_UNIX};
	CHECK(fared_address_of(&other, &b) == FARED_E_INVALID);
	CHECK(fared_parse_address("10.255.0", &a) == FARED_E_INVALID && fared_parse_address("", &a) == FARED_E_INVALID);
}

static void test_open(void)
{
	struct fared_table *t;
	unlink(path);
	CHECK(fared_open(&t, path) == FARED_E_NO_TABLE && t == NULL);
	CHECK(fared_open(NULL, path) == FARED_E_INVALID);
	CHECK(fared_open(&t, dir) == FARED_E_FORMAT);
	unsigned char copy[sizeof golden];
	static const struct {
		size_t at;
		unsigned char value;
		int error;
	} faults[] = {
		{0, 'X', FARED_E_FORMAT},
		{L_HEADER_ORDER, 9, FARED_E_FORMAT},
		{L_HEADER_LAYOUT, 99, FARED_E_LAYOUT},
		{L_HEADER_SIZE + 4, 1, FARED_E_TRUNCATED},
		{L_HEADER_INDEX_ENTRIES, 3, FARED_E_FORMAT},
		{L_HEADER_MAX_SLOTS + 1, 0xff, FARED_E_FORMAT},
		{L_HEADER_PAIRS + 2, 0xff, FARED_E_FORMAT},
		{L_HEADER_PAIRS_AT + 7, 0xff, FARED_E_FORMAT},
		{L_HEADER_VECTOR_SIZE, 33, FARED_E_FORMAT},
		{L_HEADER_PLANES_AT, 1, FARED_E_FORMAT},
	};
	for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
		memcpy(copy, golden, golden_size);
		copy[faults[i].at] = faults[i].value;
		write_file(copy, golden_size);
		int error = fared_open(&t, path);
		if (error != faults[i].error)
			fprintf(stderr, "byte %zu = %u: error %d\n", faults[i].at, faults[i].value, error);
		CHECK(error == faults[i].error && t == NULL);
	}
	for (size_t size = 0; size < golden_size; size += 1 + size / 3) {
		write_file(golden, size);
		CHECK(fared_open(&t, path) == FARED_E_TRUNCATED);
	}
	/* The environment names the path; no descriptor stays open. */
	write_file(golden, golden_size);
	setenv("FARED_SLOTS", path, 1);
	int before = descriptors();
	CHECK(fared_open(&t, NULL) == 0 && descriptors() == before);
	fared_close(t);
	fared_close(NULL);
	/* A service of the table, one that it does not have, and none at all. */
	struct fared_service service;
	CHECK(fared_open(&t, NULL) == 0 && fared_get_service(t, 1, &service) == 0 && service.protocol == 17 && service.port == 4444);
	fared_close(t);
	CHECK(fared_open_service(&t, NULL, &service) == 0);
	fared_close(t);
	service.port = 4445;
	CHECK(fared_open_service(&t, NULL, &service) == FARED_E_SERVICE && t == NULL && descriptors() == before);
	CHECK(fared_open_service(&t, NULL, NULL) == FARED_E_INVALID);
	unsetenv("FARED_SLOTS");
}

/* Every file with some changed bytes is refused or read within its bounds: the sanitizer judges. */
static void test_damage(int rounds)
{
	unsigned char copy[sizeof golden];
	struct fared_address source = address("10.255.0.1"), destination = address("10.255.0.2");
	int opened = 0;
	for (int n = 0; n < rounds; n++) {
		memcpy(copy, golden, golden_size);
		for (uint64_t i = 1 + next_random() % 4; i > 0; i--) {
			size_t at = next_random() % (next_random() % 2 ? L_HEADER_BYTES : golden_size);
			copy[at] = (unsigned char)(next_random() % 3 ? next_random() : next_random() % 2 ? 0xff : 0);
		}
		write_file(copy, golden_size);
		struct fared_table *t;
		if (fared_open(&t, path))
			continue;
		opened++;
		struct fared_pair pair;
		struct fared_slot slots[8];
		struct fared_status s;
		struct fared_sub_port sp;
		struct fared_address a, b;
		fared_lookup(t, &source, &destination, &pair, slots, 8);
		CHECK(fared_get_status(t, &s) == 0);
		uint32_t cursor = 0;
		for (int error = 0, k = 0; error != FARED_E_NOT_FOUND && k < 200; k++) {
			error = fared_next_pair(t, &cursor, &a, &b, &pair, slots, 8);
			for (uint32_t i = 0; error == 0 && i < pair.slots && i < 8; i++)
				if (slots[i].sub_port != FARED_NO_SUB_PORT)
					CHECK(slots[i].sub_port < s.sub_ports && slots[i].plane < s.planes);
		}
		for (uint32_t i = 0; i < s.sub_ports && i < 100; i++) {
			fared_get_sub_port(t, i, &sp);
			fared_gid_index(t, i, &source);
		}
		for (uint32_t i = 0; i < s.planes && i < 100; i++)
			fared_plane_name(t, i);
		fared_close(t);
	}
	CHECK(opened > rounds / 20);
}

/* Finds the pair's and the vector's records. */
static void records(size_t *pair, size_t *vector)
{
	uint64_t pairs, vectors;
	uint32_t pair_size, vector_size, n;
	memcpy(&pairs, golden + L_HEADER_PAIRS_AT, 8);
	memcpy(&vectors, golden + L_HEADER_VECTORS_AT, 8);
	memcpy(&pair_size, golden + L_HEADER_PAIR_SIZE, 4);
	memcpy(&vector_size, golden + L_HEADER_VECTOR_SIZE, 4);
	struct fared_address destination = address("10.255.0.2");
	for (*pair = pairs; memcmp(golden + *pair + L_PAIR_DESTINATION, &destination, 16); *pair += pair_size)
		CHECK(*pair + pair_size < golden_size);
	memcpy(&n, golden + *pair + L_PAIR_VECTOR, 4);
	*vector = vectors + (n - 1) * (size_t)vector_size;
}

static void test_lookup(void)
{
	write_file(golden, golden_size);
	struct fared_table *t;
	CHECK(fared_open(&t, path) == 0);
	struct fared_address source = address("10.255.0.1"), destination = address("10.255.0.2"), nowhere = address("10.255.9.9");
	struct fared_pair pair;
	struct fared_slot slots[4];
	CHECK(fared_lookup(t, &source, &nowhere, &pair, slots, 4) == FARED_E_NOT_FOUND);
	CHECK(fared_lookup(t, &source, &destination, &pair, NULL, 4) == FARED_E_INVALID);
	CHECK(fared_lookup(NULL, &source, &destination, &pair, NULL, 0) == FARED_E_INVALID);
	CHECK(fared_lookup(t, &source, &destination, &pair, slots, 4) == 0 && pair.slots == 4 && pair.revision == 42 && !(pair.flags & FARED_PAIR_STALE));
	CHECK(fared_is_current(t, &pair));
	CHECK(fared_gid_index(t, 0, &source) == 3 && fared_gid_index(t, 1, &source) == FARED_E_NOT_FOUND &&
		fared_gid_index(t, 0, &nowhere) == FARED_E_NOT_FOUND);
	/* The golden file's heartbeat is old. */
	struct fared_status s;
	CHECK(fared_get_status(t, &s) == 0 && !s.live && s.run == 1700000000000000000u && !strcmp(s.instance, "test"));
	/* A record in the middle of a change is busy, a changed one is not current. */
	size_t at[2];
	records(&at[0], &at[1]);
	for (int i = 0; i < 2; i++) {
		uint32_t sequence;
		memcpy(&sequence, golden + at[i], 4);
		poke32(at[i], sequence | 1);
		struct fared_pair busy;
		CHECK(fared_lookup(t, &source, &destination, &busy, slots, 4) == FARED_E_BUSY && !fared_is_current(t, &pair));
		poke32(at[i], sequence + 2);
		CHECK(!fared_is_current(t, &pair));
		CHECK(fared_lookup(t, &source, &destination, &pair, slots, 4) == 0 && fared_is_current(t, &pair));
	}
	poke32(L_HEADER_STATE, L_STATE_ENDED);
	CHECK(!fared_is_current(t, &pair));
	CHECK(fared_lookup(t, &source, &destination, &pair, slots, 4) == 0 && pair.flags & FARED_PAIR_STALE && fared_is_current(t, &pair));
	fared_close(t);
}

static long elapsed_ms(const struct timespec *since)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (now.tv_sec - since->tv_sec) * 1000 + (now.tv_nsec - since->tv_nsec) / 1000000;
}

/* Looks pairs up again from every reading: that of the same pair, of another pair, of another file, of nothing. */
static void test_again(void)
{
	struct fared_table *t;
	CHECK(fared_open(&t, path) == 0);
	struct {
		struct fared_address source, destination;
		struct fared_pair pair;
		struct fared_slot slots[8];
	} known[16];
	uint32_t cursor = 0, n = 0;
	memset(known, 0, sizeof known);
	while (n < 16 && fared_next_pair(t, &cursor, &known[n].source, &known[n].destination, &known[n].pair, known[n].slots, 8) == 0)
		n++;
	CHECK(n > 1);
	for (uint32_t i = 0; i < n; i++) {
		for (uint32_t k = 0; k < n + 3; k++) {
			struct fared_pair pair = {0};
			struct fared_slot slots[8] = {0};
			if (k < n)
				pair = known[k].pair;
			if (k == n)
				pair.run = known[i].pair.run + 1, pair.record = known[i].pair.record;
			if (k == n + 1)
				pair.run = known[i].pair.run, pair.record = UINT32_MAX, pair.vector_record = UINT32_MAX;
			CHECK(fared_lookup_again(t, &known[i].source, &known[i].destination, &pair, slots, 8) == 0);
			CHECK(!memcmp(&pair, &known[i].pair, sizeof pair) && !memcmp(slots, known[i].slots, sizeof slots));
		}
		struct fared_pair pair = known[i].pair;
		struct fared_address other = address("10.9.9.9");
		CHECK(fared_lookup_again(t, &known[i].source, &other, &pair, NULL, 0) == FARED_E_NOT_FOUND);
		CHECK(fared_lookup_again(t, NULL, &other, &pair, NULL, 0) == FARED_E_INVALID &&
			fared_lookup_again(t, &other, &other, &pair, NULL, 1) == FARED_E_INVALID);
	}
	fared_close(t);
}

static void ignore(int signal)
{
	(void)signal;
}

static void test_refresh_and_wait(void)
{
	write_file(golden, golden_size);
	struct fared_table *t;
	CHECK(fared_open(&t, path) == 0);
	struct fared_address source = address("10.255.0.1"), destination = address("10.255.0.2");
	struct fared_pair pair;
	CHECK(fared_lookup(t, &source, &destination, &pair, NULL, 0) == 0);
	CHECK(fared_refresh(t) == 0 && fared_wait(t, 0) == 0);
	struct timespec start;
	clock_gettime(CLOCK_MONOTONIC, &start);
	CHECK(fared_wait(t, 30) == 0 && elapsed_ms(&start) >= 30);
	/* A change before the wait counts. */
	poke32(L_HEADER_WAKE, 77);
	CHECK(fared_wait(t, -1) == 1 && fared_wait(t, 0) == 0);
	/* A signal ends a wait. */
	struct sigaction action = {.sa_handler = ignore}, old;
	sigaction(SIGALRM, &action, &old);
	ualarm(20000, 0);
	clock_gettime(CLOCK_MONOTONIC, &start);
	CHECK(fared_wait(t, 60000) == 0 && elapsed_ms(&start) < 30000);
	sigaction(SIGALRM, &old, NULL);
	/* Another file appears while a child waits. */
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		CHECK(fared_wait(t, 60000) == 1 && !fared_is_current(t, &pair));
		CHECK(fared_lookup(t, &source, &destination, &pair, NULL, 0) == 0 && fared_is_current(t, &pair));
		_exit(0);
	}
	unsigned char copy[sizeof golden];
	memcpy(copy, golden, golden_size);
	copy[L_HEADER_RUN]++;
	write_file(copy, golden_size);
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	/* The parent's table is unchanged by the child, and continues too. */
	CHECK(fared_is_current(t, &pair) && fared_refresh(t) == 1 && !fared_is_current(t, &pair));
	/* Without a usable file the last one stays. */
	CHECK(unlink(path) == 0 && fared_refresh(t) == FARED_E_NO_TABLE && fared_lookup(t, &source, &destination, &pair, NULL, 0) == 0);
	write_file("something else", 14);
	CHECK(fared_refresh(t) == FARED_E_FORMAT && fared_lookup(t, &source, &destination, &pair, NULL, 0) == 0 && fared_wait(t, 120) == 0);
	/* A truncated file is not accessed. */
	write_file(golden, golden_size);
	CHECK(fared_refresh(t) == 1 && truncate(path, 0) == 0);
	CHECK(fared_wait(t, 50) == 0 && fared_lookup(t, &source, &destination, &pair, NULL, 0) == FARED_E_TRUNCATED);
	struct fared_status s;
	uint32_t cursor = 0;
	CHECK(fared_get_status(t, &s) == FARED_E_TRUNCATED && fared_plane_name(t, 0) == NULL && !fared_is_current(t, &pair));
	CHECK(fared_next_pair(t, &cursor, &source, &destination, &pair, NULL, 0) == FARED_E_TRUNCATED && fared_refresh(t) == FARED_E_TRUNCATED);
	write_file(golden, golden_size);
	source = address("10.255.0.1"), destination = address("10.255.0.2");
	CHECK(fared_wait(t, 1000) == 1 && fared_lookup(t, &source, &destination, &pair, NULL, 0) == 0);
	fared_close(t);
}

/* A table without an owner is reported from a minute on, and where its directory was deleted that is the reason: a
 * descriptor leads to it as a mount does. */
static void test_stale(void)
{
	write_file(golden, golden_size);
	struct fared_table *t, *mounted, *none;
	int at = open(dir, O_RDONLY | O_DIRECTORY), file = open(path, O_WRONLY);
	char mount[80];
	CHECK(at >= 0 && file >= 0);
	snprintf(mount, sizeof mount, "/proc/self/fd/%d/%s", at, strrchr(path, '/') + 1);
	CHECK(fared_open(&t, path) == 0 && fared_open(&mounted, mount) == 0);
	/* Ages of the heartbeat, s: one of an earlier boot may be in the future. */
	static const struct {
		int age, want;
	} cases[] = {{0, 0}, {60, FARED_E_STALE}, {30, 0}, {-3600, FARED_E_STALE}, {0, 0}, {60, FARED_E_STALE}};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct timespec now;
		clock_gettime(CLOCK_MONOTONIC, &now);
		uint64_t beat = (uint64_t)(now.tv_sec - cases[i].age) * 1000000000u;
		CHECK(pwrite(file, &beat, sizeof beat, L_HEADER_HEARTBEAT) == sizeof beat);
		CHECK(fared_check(t) == cases[i].want && fared_check(mounted) == cases[i].want);
	}
	/* A file that another one has replaced is not reported, though no call has continued with the other one yet. */
	uint32_t state = L_STATE_REPLACED;
	CHECK(pwrite(file, &state, sizeof state, L_HEADER_STATE) == sizeof state && fared_check(t) == FARED_E_STALE);
	write_file(golden, golden_size);
	CHECK(fared_check(t) == 0 && fared_check(mounted) == 0);
	CHECK(unlink(path) == 0 && rmdir(dir) == 0);
	CHECK(fared_check(t) == FARED_E_STALE && fared_check(mounted) == FARED_E_DELETED && fared_refresh(mounted) == FARED_E_DELETED);
	CHECK(fared_open(&none, mount) == FARED_E_DELETED && fared_open(&none, path) == FARED_E_NO_TABLE);
	CHECK(fared_check(NULL) == FARED_E_INVALID);
	fared_close(t);
	fared_close(mounted);
	close(at);
	close(file);
	CHECK(mkdir(dir, 0700) == 0);
}

/* After exec nothing of the table remains. */
static void test_exec(void)
{
	write_file(golden, golden_size);
	struct fared_table *t;
	CHECK(fared_open(&t, path) == 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		execl("/bin/sh", "sh", "-c", "! grep -q libfared /proc/$$/maps && ! ls -l /proc/$$/fd | grep -q libfared", (char *)NULL);
		_exit(9);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	fared_close(t);
}

static void test_choose(void)
{
	int64_t worst = 0;
	for (int round = 0; round < 300; round++) {
		struct fared_slot slots[32] = {0};
		int64_t credit[32] = {0}, count[32] = {0}, total = 0;
		uint32_t n = 1 + (uint32_t)(next_random() % 32);
		for (uint32_t i = 0; i < n; i++)
			total += slots[i].share_ppb = next_random() % 4 ? 1 + (uint32_t)(next_random() % (round % 2 ? 1000 : 5)) : 0;
		if (total == 0) {
			CHECK(fared_choose(slots, n, credit) == FARED_E_NOT_FOUND);
			continue;
		}
		for (int64_t k = 1; k <= 2 * total; k++) {
			int i = fared_choose(slots, n, credit);
			CHECK(i >= 0 && (uint32_t)i < n && slots[i].share_ppb);
			count[i]++;
			for (uint32_t j = 0; j < n; j++) {
				int64_t off = llabs(count[j] * total - k * slots[j].share_ppb);
				CHECK(off < n * total);
				if (off * 1000 / total > worst)
					worst = off * 1000 / total;
				CHECK(k % total || off == 0);
			}
		}
	}
	printf("greatest deviation of a slot: %lld.%03lld choices\n", (long long)worst / 1000, (long long)worst % 1000);
	CHECK(fared_choose(NULL, 0, NULL) == FARED_E_NOT_FOUND && fared_choose(NULL, 1, NULL) == FARED_E_INVALID);
	/* A parked slot loses its credit; the others go on. */
	struct fared_slot slots[3] = {{.share_ppb = 1}, {.share_ppb = 1}, {.share_ppb = 2}};
	int64_t credit[3] = {0};
	fared_choose(slots, 3, credit);
	slots[2].share_ppb = 0;
	for (int i = 0; i < 8; i++)
		CHECK(fared_choose(slots, 3, credit) != 2);
	CHECK(credit[2] == 0);
}

static void test_keys(const char *file)
{
	FILE *f = fopen(file, "r");
	CHECK(f);
	char line[4096];
	int lines = 0;
	while (fgets(line, sizeof line, f)) {
		if (line[0] == '#')
			continue;
		struct fared_slot slots[256] = {0};
		uint32_t n = 0;
		char *at = line, *end;
		uint64_t key = strtoull(at, &at, 0);
		long want = strtol(at, &at, 10);
		for (unsigned long share; share = strtoul(at, &end, 10), end != at; at = end) {
			CHECK(n < 256);
			slots[n++].share_ppb = (uint32_t)share;
		}
		int got = fared_choose_key(slots, n, key);
		if (got != want && !(want == -1 && got == FARED_E_NOT_FOUND))
			fprintf(stderr, "key %#llx: slot %d, want %ld\n", (unsigned long long)key, got, want);
		CHECK(want == -1 ? got == FARED_E_NOT_FOUND : got == want);
		lines++;
	}
	fclose(f);
	CHECK(lines >= 500 && fared_choose_key(NULL, 0, 1) == FARED_E_NOT_FOUND);
}

int main(int argc, char **argv)
{
	CHECK(argc == 4 && mkdtemp(dir)); /* table, choices by key, number of damaged files */
	snprintf(path, sizeof path, "%s/slots", dir);
	FILE *f = fopen(argv[1], "rb");
	CHECK(f && (golden_size = fread(golden, 1, sizeof golden, f)) > L_HEADER_BYTES && fclose(f) == 0);
	test_texts();
	test_addresses();
	test_choose();
	test_keys(argv[2]);
	test_open();
	test_lookup();
	test_again();
	test_refresh_and_wait();
	test_stale();
	test_exec();
	test_damage(atoi(argv[3]));
	CHECK(unlink(path) == 0 && rmdir(dir) == 0);
	return 0;
}
