#include <fared.h>

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <linux/futex.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "deal.h"
#include "layout.h"
#include "logtable.h"

#define EXPORT __attribute__((visibility("default")))

_Static_assert(sizeof(_Atomic uint64_t) == 8 && ATOMIC_LLONG_LOCK_FREE == 2, "64-bit loads are atomic");
_Static_assert(sizeof(struct fared_slot) == 16, "size of a slot");

/* Readings of a record that changes meanwhile. A change takes less than a microsecond unless its writer is
 * interrupted. */
#define ATTEMPTS 2000

/* The greatest time for which fared_wait does not notice that another file has appeared at the path without a mark in
 * the previous one. */
#define RECHECK_MS 1000

/* The sections of the file, from the header when it was mapped; a reader that keeps to the counts stays inside the
 * file. */
struct section {
	uint64_t at;
	uint32_t count, size;
};

/* The hash of a source, and that with the first word of an IPv4 destination, which is 0. */
struct prefix {
	uint64_t word[2], hash, hash_v4;
};

/* Greatest number of sources with a prefix. Others are hashed in each look-up. */
#define PREFIXES 16

struct fared_table {
	const unsigned char *mem; /* NULL: the file was truncated */
	uint64_t bytes, seed, run;
	struct section planes, sub_ports, sources, services, steered, vectors, pairs, index;
	struct fared_service service; /* that of fared_open_service; zero: the first one */
	uint32_t ports_at;            /* offset in a pair of the service's source ports */
	uint32_t number;              /* of the service */
	uint32_t max_slots;
	uint32_t drain_words;
	uint32_t seen; /* value of the futex word at the last wait */
	dev_t dev;
	ino_t ino;
	struct prefix prefixes[PREFIXES]; /* of sources in the table; constant while mem is */
	char path[];
};

/* All reads of fields that change are atomic and have acquire order, so that the second read of a sequence number comes
 * after the fields. */
static inline uint32_t load32(const unsigned char *p)
{
	return atomic_load_explicit((const _Atomic uint32_t *)p, memory_order_acquire);
}
static inline uint64_t load64(const unsigned char *p)
{
	return atomic_load_explicit((const _Atomic uint64_t *)p, memory_order_acquire);
}

static inline void pause_cpu(void)
{
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

static inline const unsigned char *record(const struct fared_table *t, const struct section *s, uint32_t n)
{
	return t->mem + s->at + (uint64_t)n * s->size;
}

EXPORT const char *fared_version(void)
{
	return FARED_VERSION;
}

EXPORT const char *fared_error_text(int error)
{
	switch (error) {
	case 0:
		return "success";
	case FARED_E_NO_TABLE:
		return "there is no slot table at the path: fared does not publish one there";
	case FARED_E_SYSTEM:
		return "a system call failed";
	case FARED_E_FORMAT:
		return "the file is not a slot table, or is damaged";
	case FARED_E_LAYOUT:
		return "the slot table has a layout that this libfared does not know: install the libfared of the fared that runs";
	case FARED_E_TRUNCATED:
		return "the slot table is shorter than its header states";
	case FARED_E_NOT_FOUND:
		return "the slot table has no such entry";
	case FARED_E_BUSY:
		return "the slot table's record is being changed";
	case FARED_E_INVALID:
		return "an argument is invalid";
	case FARED_E_SERVICE:
		return "the slot table has no source ports for the service: add it to slots.services";
	case FARED_E_STALE:
		return "nothing has updated the slot table for a minute: see \"fared health\" on the host";
	case FARED_E_DELETED:
		return "the directory of the slot table was deleted after it was mounted here, so that no later table appears: restart the container, with the "
		       "directory mounted and not the file";
	}
	return "unknown error";
}

/* Fields of the header that are constant. */
static uint32_t field32(const unsigned char *header, size_t at)
{
	uint32_t v;
	memcpy(&v, header + at, sizeof v);
	return v;
}

static uint64_t field64(const unsigned char *header, size_t at)
{
	uint64_t v;
	memcpy(&v, header + at, sizeof v);
	return v;
}

static uint64_t round8(uint64_t n)
{
	return (n + 7) / 8 * 8;
}

/* Reads a section from the header; least is the size of a record that this library reads. */
static int read_section(const unsigned char *header, struct section *s, size_t count, size_t size, size_t at, uint64_t least, uint64_t bytes)
{
	s->count = field32(header, count);
	s->size = size ? field32(header, size) : 4;
	s->at = field64(header, at);
	if (s->size < least || (size && s->size % 8) || s->at % 8 || s->at < field32(header, L_HEADER_HEADER_SIZE) || s->count > 1u << 31 || s->at > bytes ||
		(uint64_t)s->count * s->size > bytes - s->at)
		return FARED_E_FORMAT;
	return 0;
}

/* Checks a header, and fills in the sections. */
static int check(struct fared_table *t, const unsigned char *header, uint64_t size)
{
	if (memcmp(header, "FAREDSLT", 8) || field32(header, L_HEADER_ORDER) != L_ORDER)
		return FARED_E_FORMAT;
	if (field32(header, L_HEADER_LAYOUT) != L_LAYOUT)
		return FARED_E_LAYOUT;
	t->bytes = field64(header, L_HEADER_SIZE);
	if (size < t->bytes)
		return FARED_E_TRUNCATED;
	t->seed = field64(header, L_HEADER_SEED);
	t->run = field64(header, L_HEADER_RUN);
	t->max_slots = field32(header, L_HEADER_MAX_SLOTS);
	uint32_t header_size = field32(header, L_HEADER_HEADER_SIZE), services = field32(header, L_HEADER_SERVICES);
	t->services.count = services;
	t->steered.count = field32(header, L_HEADER_STEERED);
	if (t->max_slots > L_MAX_SLOTS || services > L_MAX_SERVICES || t->steered.count > L_MAX_STEERED || header_size < L_HEADER_BYTES || header_size % 8 ||
		t->bytes < header_size)
		return FARED_E_FORMAT;
	t->drain_words = (t->max_slots + 63) / 64;
	if (read_section(header, &t->planes, L_HEADER_PLANES, L_HEADER_PLANE_SIZE, L_HEADER_PLANES_AT, L_PLANE_BYTES, t->bytes) ||
		read_section(header, &t->sources, L_HEADER_SOURCES, L_HEADER_SOURCE_SIZE, L_HEADER_SOURCES_AT, L_SOURCE_BYTES, t->bytes) ||
		read_section(header, &t->sub_ports, L_HEADER_SUB_PORTS, L_HEADER_SUB_PORT_SIZE, L_HEADER_SUB_PORTS_AT,
			round8(L_SUB_PORT_BYTES + 4 * (uint64_t)field32(header, L_HEADER_SOURCES)), t->bytes) ||
		read_section(header, &t->vectors, L_HEADER_VECTORS, L_HEADER_VECTOR_SIZE, L_HEADER_VECTORS_AT,
			L_VECTOR_BYTES + L_SLOT_BYTES * (uint64_t)t->max_slots, t->bytes) ||
		read_section(header, &t->pairs, L_HEADER_PAIRS, L_HEADER_PAIR_SIZE, L_HEADER_PAIRS_AT,
			L_PAIR_BYTES + 8 * (uint64_t)t->drain_words + (services ? services : 1) * round8(2 * (uint64_t)t->max_slots), t->bytes) ||
		(services && read_section(header, &t->services, L_HEADER_SERVICES, L_HEADER_SERVICE_SIZE, L_HEADER_SERVICES_AT, L_SERVICE_BYTES, t->bytes)) ||
		(t->steered.count &&
			read_section(header, &t->steered, L_HEADER_STEERED, L_HEADER_STEERED_SIZE, L_HEADER_STEERED_AT, L_RANGE_BYTES, t->bytes)) ||
		read_section(header, &t->index, L_HEADER_INDEX_ENTRIES, 0, L_HEADER_INDEX_AT, 4, t->bytes))
		return FARED_E_FORMAT;
	if (t->index.count == 0 || t->index.count & (t->index.count - 1))
		return FARED_E_FORMAT;
	return 0;
}

/* Reads up to size bytes from the start of a file; returns their number, or -1. */
static ssize_t read_start(int fd, unsigned char *buf, size_t size)
{
	size_t n = 0;
	while (n < size) {
		ssize_t got = pread(fd, buf + n, size - n, (off_t)n);
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return -1;
		if (got == 0)
			break;
		n += (size_t)got;
	}
	return (ssize_t)n;
}

static void unmap(struct fared_table *t)
{
	if (t->mem)
		munmap((void *)t->mem, t->bytes);
	t->mem = NULL;
}

static void service_at(const struct fared_table *t, uint32_t n, struct fared_service *out)
{
	const unsigned char *p = record(t, &t->services, n);
	out->protocol = (uint16_t)field32(p, L_SERVICE_PROTOCOL);
	out->port = (uint16_t)field32(p, L_SERVICE_PORT);
}

static void range_at(const struct fared_table *t, uint32_t n, struct fared_service_range *out)
{
	const unsigned char *p = record(t, &t->steered, n);
	memset(out, 0, sizeof *out);
	out->protocol = (uint16_t)field32(p, L_RANGE_PROTOCOL);
	memcpy(&out->first, p + L_RANGE_FIRST, sizeof out->first);
	memcpy(&out->last, p + L_RANGE_LAST, sizeof out->last);
}

/* Returns whether a service has the source ports of the first one, because the data plane steers it by them. */
static int steered(const struct fared_table *t, const struct fared_service *service)
{
	struct fared_service_range r;
	for (uint32_t n = 0; n < t->steered.count; n++) {
		range_at(t, n, &r);
		if (r.protocol == service->protocol && service->port >= r.first && service->port <= r.last)
			return 1;
	}
	return 0;
}

/* Finds the source ports of the table's service. */
static int find_service(struct fared_table *t)
{
	uint32_t n = 0;
	if (t->service.protocol) {
		struct fared_service s;
		for (; n < t->services.count; n++) {
			service_at(t, n, &s);
			if (s.protocol == t->service.protocol && s.port == t->service.port)
				break;
		}
		if (n == t->services.count && n) {
			if (!steered(t, &t->service))
				return FARED_E_SERVICE;
			n = 0;
		}
	}
	t->number = n;
	t->ports_at = (uint32_t)(L_PAIR_BYTES + 8 * (uint64_t)t->drain_words + n * round8(2 * (uint64_t)t->max_slots));
	return 0;
}

/* The finalizer of MurmurHash3 with Stafford's constants (variant 13). */
static inline uint64_t mix(uint64_t x)
{
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

/* The four words of a pair of addresses. */
struct key {
	uint64_t word[4];
};

static inline struct key key_of(const struct fared_address *source, const struct fared_address *destination)
{
	struct key k;
	memcpy(&k.word[0], source, 16);
	memcpy(&k.word[2], destination, 16);
	return k;
}

/* Returns the prefix of the two words of a source. */
static inline struct prefix prefix_of(const struct fared_table *t, const uint64_t *source)
{
	struct prefix p = {.word = {source[0], source[1]}};
	p.hash = mix(mix(t->seed ^ source[0]) ^ source[1]);
	p.hash_v4 = mix(p.hash);
	return p;
}

/* Returns the place of a source's prefix. IPv4 and IPv6 loopbacks of a server often end in the same octet. */
static inline uint32_t prefix_place(const uint64_t *source)
{
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
	uint32_t octet = (uint32_t)(source[1] >> 56);
#else
	uint32_t octet = (uint32_t)source[1];
#endif
	return (octet + (source[0] ? PREFIXES / 2 : 0)) % PREFIXES;
}

/* Computes the prefixes of the table's sources. A place without a source has the prefix of the address 0. */
static void keep_prefixes(struct fared_table *t)
{
	const uint64_t none[2] = {0, 0};
	for (uint32_t i = 0; i < PREFIXES; i++)
		t->prefixes[i] = prefix_of(t, none);
	for (uint32_t n = 0; n < t->sources.count; n++) {
		uint64_t source[2];
		memcpy(source, record(t, &t->sources, n) + L_SOURCE_ADDRESS, sizeof source);
		t->prefixes[prefix_place(source)] = prefix_of(t, source);
	}
}

/* Returns the hash of a pair. Each of its four steps needs the result of the previous one, so those of a source in the
 * table have been computed before: one step is left for an IPv4 destination, two for another. */
static inline uint64_t hash_of(const struct fared_table *t, const struct key *key)
{
	const struct prefix *p = &t->prefixes[prefix_place(key->word)];
	uint64_t hash;
	if (p->word[0] != key->word[0] || p->word[1] != key->word[1])
		hash = mix(mix(t->seed ^ key->word[0]) ^ key->word[1]);
	else if (key->word[2] == 0)
		return mix(p->hash_v4 ^ key->word[3]);
	else
		hash = p->hash;
	return mix(mix(hash ^ key->word[2]) ^ key->word[3]);
}

static int deleted_inode(const char *path)
{
	struct stat st;
	return !stat(path, &st) && !st.st_nlink;
}

/* Returns whether the file at a path or its directory has been deleted: only a mount still leads there. errno keeps its
 * value. */
static int deleted(const char *path)
{
	int reason = errno, found = deleted_inode(path);
	char *directory = strdup(path), *end = directory ? strrchr(directory, '/') : NULL;
	if (end) {
		end[end == directory] = 0;
		found |= deleted_inode(directory);
	}
	free(directory);
	errno = reason;
	return found;
}

/* Maps the file at the table's path into t, whose other fields it fills in. */
static int map(struct fared_table *t)
{
	int fd;
	do
		fd = open(t->path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
	while (fd < 0 && errno == EINTR);
	if (fd < 0 && errno != ENOENT && errno != ENOTDIR)
		return FARED_E_SYSTEM;
	if (fd < 0)
		return deleted(t->path) ? FARED_E_DELETED : FARED_E_NO_TABLE;
	/* The header decides about the rest, so it is read before the file is mapped whole. */
	_Alignas(8) unsigned char header[L_HEADER_BYTES];
	struct stat st;
	int error = fstat(fd, &st) ? FARED_E_SYSTEM : S_ISREG(st.st_mode) ? 0 : FARED_E_FORMAT;
	ssize_t n = error ? 0 : read_start(fd, header, sizeof header);
	if (error)
		;
	else if (n < 0)
		error = FARED_E_SYSTEM;
	else if ((n >= 8 && memcmp(header, "FAREDSLT", 8)))
		error = FARED_E_FORMAT;
	else if (n < L_HEADER_BYTES)
		error = FARED_E_TRUNCATED;
	else
		error = check(t, header, (uint64_t)st.st_size);
	if (!error) {
		void *mem = mmap(NULL, t->bytes, PROT_READ, MAP_SHARED, fd, 0);
		if (mem == MAP_FAILED) {
			error = FARED_E_SYSTEM;
		} else {
			t->mem = mem;
			t->dev = st.st_dev;
			t->ino = st.st_ino;
			t->seen = load32(t->mem + L_HEADER_WAKE);
			keep_prefixes(t);
			error = find_service(t);
			if (error)
				unmap(t);
		}
	}
	int reason = errno;
	close(fd);
	errno = reason;
	return error;
}

EXPORT int fared_open(struct fared_table **table, const char *path)
{
	static const struct fared_service first;
	return table ? fared_open_service(table, path, &first) : FARED_E_INVALID;
}

EXPORT int fared_open_service(struct fared_table **table, const char *path, const struct fared_service *service)
{
	if (!table)
		return FARED_E_INVALID;
	*table = NULL;
	if (!service)
		return FARED_E_INVALID;
	if (!path)
		path = getenv("FARED_SLOTS");
	if (!path || !*path)
		path = FARED_DEFAULT_PATH;
	struct fared_table *t = calloc(1, sizeof *t + strlen(path) + 1);
	if (!t)
		return FARED_E_SYSTEM;
	strcpy(t->path, path);
	t->service = *service;
	int error = map(t);
	if (error) {
		int reason = errno;
		free(t);
		errno = reason;
		return error;
	}
	*table = t;
	return 0;
}

EXPORT void fared_close(struct fared_table *table)
{
	if (!table)
		return;
	unmap(table);
	free(table);
}

EXPORT int fared_refresh(struct fared_table *table)
{
	if (!table)
		return FARED_E_INVALID;
	struct stat st;
	if (table->mem && stat(table->path, &st) == 0 && st.st_dev == table->dev && st.st_ino == table->ino) {
		if ((uint64_t)st.st_size >= table->bytes)
			return 0;
		unmap(table); /* an access to the missing part would end the process */
		return FARED_E_TRUNCATED;
	}
	size_t size = sizeof *table + strlen(table->path) + 1;
	struct fared_table *next = malloc(size);
	if (!next)
		return FARED_E_SYSTEM;
	memcpy(next, table, size);
	next->mem = NULL;
	int error = map(next);
	if (!error) {
		unmap(table);
		memcpy(table, next, size);
	}
	int reason = errno;
	free(next);
	errno = reason;
	return error ? error : 1;
}

static uint64_t now_ns(clockid_t clock)
{
	struct timespec ts;
	clock_gettime(clock, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

EXPORT int fared_wait(struct fared_table *table, int timeout_ms)
{
	if (!table)
		return FARED_E_INVALID;
	uint64_t start = now_ns(CLOCK_MONOTONIC);
	for (int woken = 0;;) {
		/* No process wakes the readers of a truncated file: its size is checked before an access, unless the writer has
		 * just changed it. */
		if (!woken && fared_refresh(table) == 1)
			return 1;
		if (table->mem) {
			uint32_t word = load32(table->mem + L_HEADER_WAKE);
			if (word != table->seen) {
				table->seen = word;
				if (load32(table->mem + L_HEADER_STATE) == L_STATE_REPLACED)
					fared_refresh(table); /* a failure leaves the last file */
				return 1;
			}
		}
		/* Another file is expected soon if this one has no owner. */
		uint64_t slice = table->mem && load32(table->mem + L_HEADER_STATE) == L_STATE_LIVE ? RECHECK_MS : RECHECK_MS / 10;
		slice *= 1000000u;
		if (timeout_ms >= 0) {
			uint64_t limit = (uint64_t)timeout_ms * 1000000u, passed = now_ns(CLOCK_MONOTONIC) - start;
			if (passed >= limit)
				return 0;
			if (limit - passed < slice)
				slice = limit - passed;
		}
		struct timespec ts = {.tv_sec = (time_t)(slice / 1000000000u), .tv_nsec = (long)(slice % 1000000000u)};
		long error = table->mem ? syscall(SYS_futex, table->mem + L_HEADER_WAKE, FUTEX_WAIT, table->seen, &ts, NULL, 0) : nanosleep(&ts, NULL);
		if (error && errno == EINTR)
			return 0;
		woken = table->mem && (!error || errno == EAGAIN);
	}
}

/* Copies a text of a fixed field, which the file may not end. */
static void copy_text(char *out, size_t size, const unsigned char *from)
{
	size_t n = 0;
	while (n + 1 < size && from[n])
		n++;
	memcpy(out, from, n);
	memset(out + n, 0, size - n);
}

EXPORT int fared_get_status(const struct fared_table *table, struct fared_status *status)
{
	if (!table || !status)
		return FARED_E_INVALID;
	if (!table->mem)
		return FARED_E_TRUNCATED;
	memset(status, 0, sizeof *status);
	status->run = table->run;
	status->revision = load64(table->mem + L_HEADER_REVISION);
	status->status_revision = load64(table->mem + L_HEADER_STATUS_REVISION);
	status->pairs = load32(table->mem + L_HEADER_USED_PAIRS);
	status->planes = table->planes.count;
	status->sub_ports = table->sub_ports.count;
	status->sources = table->sources.count;
	status->max_slots = table->max_slots;
	copy_text(status->instance, sizeof status->instance, table->mem + L_HEADER_INSTANCE);
	uint64_t beat = load64(table->mem + L_HEADER_HEARTBEAT); /* before the clock, which is then later */
	status->live = load32(table->mem + L_HEADER_STATE) == L_STATE_LIVE && now_ns(CLOCK_MONOTONIC) - beat < L_HEARTBEAT_LIMIT;
	return 0;
}

/* Returns whether another file at the path has replaced the mapped one, whose heartbeat then stands still. errno keeps
 * its value. */
static int replaced(const struct fared_table *table)
{
	struct stat st;
	int reason = errno, found = load32(table->mem + L_HEADER_STATE) == L_STATE_REPLACED && !stat(table->path, &st);
	errno = reason;
	return found && (st.st_dev != table->dev || st.st_ino != table->ino);
}

EXPORT int fared_check(const struct fared_table *table)
{
	if (!table)
		return FARED_E_INVALID;
	if (!table->mem)
		return FARED_E_TRUNCATED;
	uint64_t beat = load64(table->mem + L_HEADER_HEARTBEAT); /* before the clock, which is then later */
	if (now_ns(CLOCK_MONOTONIC) - beat < L_STALE_LIMIT || replaced(table))
		return 0;
	return deleted(table->path) ? FARED_E_DELETED : FARED_E_STALE;
}

/* Numbers of planes and sub-ports, at most the first ones that no slot can name, and the flags of slots that count. */
struct bounds {
	uint32_t planes, sub_ports, keep;
};

#if defined(__x86_64__)
/* Reads four slots: each register has one field of all. It takes half of the time of four calls of read_slot. Returns
 * whether the slots are valid. */
static inline int read_four(const struct bounds *b, const unsigned char *from, uint64_t ports, uint64_t drain, uint32_t number, struct fared_slot *out)
{
	__m128 low = _mm_castsi128_ps(_mm_set_epi64x((long long)load64(from + L_SLOT_BYTES), (long long)load64(from)));
	__m128 high = _mm_castsi128_ps(_mm_set_epi64x((long long)load64(from + 3 * L_SLOT_BYTES), (long long)load64(from + 2 * L_SLOT_BYTES)));
	__m128i share = _mm_castps_si128(_mm_shuffle_ps(low, high, _MM_SHUFFLE(2, 0, 2, 0)));
	__m128i rest = _mm_castps_si128(_mm_shuffle_ps(low, high, _MM_SHUFFLE(3, 1, 3, 1)));
	__m128i plane = _mm_and_si128(_mm_srli_epi32(rest, 16), _mm_set1_epi32(0xff));
	__m128i bit = _mm_set_epi32(8, 4, 2, 1);
	__m128i drains = _mm_cmpeq_epi32(_mm_and_si128(_mm_set1_epi32((int)(drain & 15)), bit), bit);
	__m128i flags = _mm_or_si128(
		_mm_and_si128(_mm_srli_epi32(rest, 24), _mm_set1_epi32((int)b->keep)), _mm_and_si128(drains, _mm_set1_epi32((int)FARED_SLOT_DRAIN)));
	__m128i numbers = _mm_add_epi16(_mm_set1_epi16((short)number), _mm_set_epi16(0, 0, 0, 0, 3, 2, 1, 0));
	__m128i port = _mm_unpacklo_epi16(_mm_set_epi64x(0, (long long)ports), numbers);
	__m128i where = _mm_or_si128(plane, _mm_slli_epi32(rest, 16));
	/* The number after L_NO_SUB_PORT is 0. */
	__m128i next = _mm_and_si128(_mm_add_epi32(rest, _mm_set1_epi32(1)), _mm_set1_epi32(0xffff));
	__m128i wrong = _mm_or_si128(_mm_cmpgt_epi32(plane, _mm_set1_epi32((int)b->planes - 1)), _mm_cmpgt_epi32(next, _mm_set1_epi32((int)b->sub_ports)));
	__m128i a = _mm_unpacklo_epi32(share, port), c = _mm_unpackhi_epi32(share, port);
	__m128i d = _mm_unpacklo_epi32(where, flags), e = _mm_unpackhi_epi32(where, flags);
	_mm_storeu_si128((__m128i *)&out[0], _mm_unpacklo_epi64(a, d));
	_mm_storeu_si128((__m128i *)&out[1], _mm_unpackhi_epi64(a, d));
	_mm_storeu_si128((__m128i *)&out[2], _mm_unpacklo_epi64(c, e));
	_mm_storeu_si128((__m128i *)&out[3], _mm_unpackhi_epi64(c, e));
	return !_mm_movemask_epi8(wrong);
}
#endif

/* Reads a slot. Returns whether it is valid. */
static inline int read_slot(const struct bounds *b, const unsigned char *from, uint16_t port, uint64_t drain, uint32_t number, struct fared_slot *out)
{
	struct {
		uint32_t share;
		uint16_t sub_port;
		uint8_t plane, flags;
	} s;
	uint64_t word = load64(from);
	memcpy(&s, &word, 8);
	out->share_ppb = s.share;
	out->source_port = port;
	out->slot = (uint16_t)number;
	out->plane = s.plane;
	out->sub_port = s.sub_port;
	out->flags = (s.flags & b->keep) | (uint32_t)(drain & 1) * FARED_SLOT_DRAIN;
	return s.plane < b->planes && (s.sub_port < b->sub_ports || s.sub_port == L_NO_SUB_PORT);
}

/* Reads the vector of a pair, with the ports and drains of the pair. Returns 1, or 0 if it changes meanwhile, or an
 * error. */
static inline int read_vector(
	const struct fared_table *t, const unsigned char *p, uint32_t pair_flags, struct fared_pair *pair, struct fared_slot *slots, uint32_t room)
{
	uint32_t n = load32(p + L_PAIR_VECTOR);
	pair->vector_record = n;
	if (n == 0)
		return 1;
	if (n > t->vectors.count)
		return FARED_E_FORMAT;
	const unsigned char *v = record(t, &t->vectors, n - 1);
	uint32_t sequence = load32(v + L_VECTOR_SEQUENCE);
	if (sequence & 1)
		return 0;
	uint32_t count = load32(v + L_VECTOR_SLOTS), flags = load32(v + L_VECTOR_FLAGS);
	uint64_t revision = load64(v + L_VECTOR_REVISION);
	pair->vector = load32(v + L_VECTOR_ID);
	if (revision > pair->revision)
		pair->revision = revision;
	int valid = count <= t->max_slots;
	pair->slots = count;
	pair->vector_sequence = sequence;
	uint32_t in_effect = pair_flags & L_PAIR_IN_EFFECT;
	if (flags & L_VECTOR_REACHABLE)
		pair->flags |= FARED_PAIR_REACHABLE;
	if (in_effect && (flags & L_VECTOR_IN_EFFECT))
		pair->flags |= FARED_PAIR_IN_EFFECT;
	const unsigned char *drains = p + L_PAIR_BYTES, *ports = p + t->ports_at, *from = v + L_VECTOR_BYTES;
	uint32_t last = valid ? (count < room ? count : room) : 0;
	const struct bounds b = {
		.planes = t->planes.count < 256 ? t->planes.count : 256,
		.sub_ports = t->sub_ports.count < L_NO_SUB_PORT ? t->sub_ports.count : L_NO_SUB_PORT,
		.keep = L_SLOT_PARKED | L_SLOT_DRAIN | L_SLOT_WRONG | (in_effect ? L_SLOT_IN_EFFECT : 0),
	};
	uint64_t drain = 0;
	for (uint32_t i = 0; i < last; i += 4, drain >>= 4) {
		if (i % 64 == 0)
			drain = load64(drains + i / 8);
		uint64_t word = load64(ports + 2 * (size_t)i);
#if defined(__x86_64__)
		if (last - i >= 4) {
			valid &= read_four(&b, from + L_SLOT_BYTES * (size_t)i, word, drain, i, &slots[i]);
			continue;
		}
#endif
		uint16_t four[4];
		memcpy(four, &word, 8);
		for (uint32_t k = 0; k < 4 && k < last - i; k++)
			valid &= read_slot(&b, from + L_SLOT_BYTES * (size_t)(i + k), four[k], drain >> k, i + k, &slots[i + k]);
	}
	if (load32(v + L_VECTOR_SEQUENCE) != sequence)
		return 0;
	return valid ? 1 : FARED_E_FORMAT;
}

/* Reads a record of a pair: one that is not that of the key, if one is given, or not in use, is not found. */
static inline int read_pair(const struct fared_table *t, uint32_t n, const struct key *key, struct fared_address *source, struct fared_address *destination,
	struct fared_pair *pair, struct fared_slot *slots, uint32_t room)
{
	const unsigned char *p = record(t, &t->pairs, n);
	__builtin_prefetch(p + t->ports_at); /* the ports, in another cache line than the addresses */
	for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
		uint32_t sequence = load32(p + L_PAIR_SEQUENCE);
		if (sequence & 1) {
			pause_cpu();
			continue;
		}
		struct key k;
		k.word[0] = load64(p + L_PAIR_SOURCE);
		k.word[1] = load64(p + L_PAIR_SOURCE + 8);
		k.word[2] = load64(p + L_PAIR_DESTINATION);
		k.word[3] = load64(p + L_PAIR_DESTINATION + 8);
		uint32_t flags = load32(p + L_PAIR_FLAGS);
		if (!(flags & L_PAIR_USED) || (key && memcmp(&k, key, sizeof k))) {
			if (load32(p + L_PAIR_SEQUENCE) == sequence)
				return FARED_E_NOT_FOUND;
			continue;
		}
		memset(pair, 0, sizeof *pair);
		pair->revision = load64(p + L_PAIR_REVISION);
		pair->placement = t->number ? load32(p + L_PAIR_PLACEMENTS) >> 4 * (t->number - 1) & 0xf : flags >> L_PLACEMENT_SHIFT & 0xff;
		pair->run = t->run;
		pair->record = n;
		pair->sequence = sequence;
		if (load32(t->mem + L_HEADER_STATE) != L_STATE_LIVE)
			pair->flags = FARED_PAIR_STALE;
		int whole = read_vector(t, p, flags, pair, slots, room);
		if (load32(p + L_PAIR_SEQUENCE) != sequence)
			continue;
		if (whole < 0)
			return whole;
		if (!whole) {
			pause_cpu();
			continue;
		}
		if (source) {
			memcpy(source, &k.word[0], 16);
			memcpy(destination, &k.word[2], 16);
		}
		return 0;
	}
	return FARED_E_BUSY;
}

EXPORT int fared_lookup(const struct fared_table *table, const struct fared_address *source, const struct fared_address *destination, struct fared_pair *pair,
	struct fared_slot *slots, uint32_t room)
{
	if (!table || !source || !destination || !pair || (!slots && room))
		return FARED_E_INVALID;
	if (!table->mem)
		return FARED_E_TRUNCATED;
	struct key key = key_of(source, destination);
	uint64_t hash = hash_of(table, &key);
	/* The record that the writer prefers is loaded at the same time as the index. */
	const unsigned char *home = record(table, &table->pairs, (uint32_t)((hash >> 32) * table->pairs.count >> 32));
	__builtin_prefetch(home);
	__builtin_prefetch(home + table->ports_at);
	uint32_t mask = table->index.count - 1, at = (uint32_t)hash & mask, tag = (uint32_t)(hash >> 32) & ~mask;
	for (uint32_t probes = 0; probes < table->index.count; probes++, at = (at + 1) & mask) {
		uint32_t entry = load32(table->mem + table->index.at + 4 * (uint64_t)at), n = entry & mask;
		if (entry == 0)
			break;
		if (entry == L_INDEX_DELETED || (entry & ~mask) != tag || n == 0)
			continue;
		if (n > table->pairs.count)
			return FARED_E_FORMAT;
		int error = read_pair(table, n - 1, &key, NULL, NULL, pair, slots, room);
		if (error != FARED_E_NOT_FOUND)
			return error;
	}
	return FARED_E_NOT_FOUND;
}

EXPORT int fared_lookup_again(const struct fared_table *table, const struct fared_address *source, const struct fared_address *destination,
	struct fared_pair *pair, struct fared_slot *slots, uint32_t room)
{
	if (!table || !source || !destination || !pair || (!slots && room))
		return FARED_E_INVALID;
	if (table->mem && pair->run == table->run && pair->record < table->pairs.count) {
		struct key key = key_of(source, destination);
		/* The vector is loaded at the same time as the pair, which most likely has it still. */
		if (pair->vector_record && pair->vector_record <= table->vectors.count)
			__builtin_prefetch(record(table, &table->vectors, pair->vector_record - 1));
		int error = read_pair(table, pair->record, &key, NULL, NULL, pair, slots, room);
		if (error != FARED_E_NOT_FOUND)
			return error;
	}
	return fared_lookup(table, source, destination, pair, slots, room);
}

EXPORT int fared_is_current(const struct fared_table *table, const struct fared_pair *pair)
{
	if (!table || !table->mem || !pair || pair->run != table->run || pair->record >= table->pairs.count || pair->vector_record > table->vectors.count)
		return 0;
	if (load32(record(table, &table->pairs, pair->record)) != pair->sequence)
		return 0;
	if (pair->vector_record && load32(record(table, &table->vectors, pair->vector_record - 1)) != pair->vector_sequence)
		return 0;
	return !(pair->flags & FARED_PAIR_STALE) == (load32(table->mem + L_HEADER_STATE) == L_STATE_LIVE);
}

EXPORT int fared_next_pair(const struct fared_table *table, uint32_t *cursor, struct fared_address *source, struct fared_address *destination,
	struct fared_pair *pair, struct fared_slot *slots, uint32_t room)
{
	if (!table || !cursor || !source || !destination || !pair || (!slots && room))
		return FARED_E_INVALID;
	if (!table->mem)
		return FARED_E_TRUNCATED;
	while (*cursor < table->pairs.count) {
		int error = read_pair(table, (*cursor)++, NULL, source, destination, pair, slots, room);
		if (error != FARED_E_NOT_FOUND)
			return error;
	}
	return FARED_E_NOT_FOUND;
}

EXPORT const char *fared_plane_name(const struct fared_table *table, uint32_t plane)
{
	if (!table || !table->mem || plane >= table->planes.count)
		return NULL;
	const unsigned char *name = record(table, &table->planes, plane) + L_PLANE_NAME;
	return memchr(name, 0, L_PLANE_BYTES) ? (const char *)name : NULL;
}

EXPORT int fared_get_source(const struct fared_table *table, uint32_t n, struct fared_address *out)
{
	if (!table || !out)
		return FARED_E_INVALID;
	if (!table->mem)
		return FARED_E_TRUNCATED;
	if (n >= table->sources.count)
		return FARED_E_NOT_FOUND;
	memcpy(out, record(table, &table->sources, n) + L_SOURCE_ADDRESS, 16);
	return 0;
}

EXPORT int fared_get_service(const struct fared_table *table, uint32_t n, struct fared_service *out)
{
	if (!table || !out)
		return FARED_E_INVALID;
	if (!table->mem)
		return FARED_E_TRUNCATED;
	if (n >= table->services.count)
		return FARED_E_NOT_FOUND;
	service_at(table, n, out);
	return 0;
}

EXPORT int fared_get_steered(const struct fared_table *table, uint32_t n, struct fared_service_range *out)
{
	if (!table || !out)
		return FARED_E_INVALID;
	if (!table->mem)
		return FARED_E_TRUNCATED;
	if (n >= table->steered.count)
		return FARED_E_NOT_FOUND;
	range_at(table, n, out);
	return 0;
}

/* Reads the RDMA device of a sub-port, and the GID index of a source unless gid is NULL or the table has no such
 * source. */
static int read_sub_port(const struct fared_table *t, uint32_t n, struct fared_sub_port *out, uint32_t source, int32_t *gid)
{
	const unsigned char *p = record(t, &t->sub_ports, n);
	for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
		uint32_t sequence = load32(p + L_SUB_PORT_SEQUENCE);
		if (sequence & 1) {
			pause_cpu();
			continue;
		}
		_Alignas(8) unsigned char name[64];
		for (size_t i = 0; i < sizeof name; i += 8) {
			uint64_t word = load64(p + L_SUB_PORT_RDMA_DEVICE + i);
			memcpy(name + i, &word, 8);
		}
		out->rdma_port = load32(p + L_SUB_PORT_RDMA_PORT);
		if (gid && source < t->sources.count)
			*gid = (int32_t)load32(p + L_SUB_PORT_BYTES + 4 * (size_t)source);
		if (load32(p + L_SUB_PORT_SEQUENCE) == sequence) {
			copy_text(out->rdma_device, sizeof out->rdma_device, name);
			return 0;
		}
	}
	return FARED_E_BUSY;
}

EXPORT int fared_get_sub_port(const struct fared_table *table, uint32_t sub_port, struct fared_sub_port *out)
{
	if (!table || !out)
		return FARED_E_INVALID;
	if (!table->mem)
		return FARED_E_TRUNCATED;
	if (sub_port >= table->sub_ports.count)
		return FARED_E_NOT_FOUND;
	memset(out, 0, sizeof *out);
	const unsigned char *p = record(table, &table->sub_ports, sub_port);
	out->plane = load32(p + L_SUB_PORT_PLANE);
	copy_text(out->device, sizeof out->device, p + L_SUB_PORT_DEVICE);
	return read_sub_port(table, sub_port, out, UINT32_MAX, NULL);
}

EXPORT int fared_gid_index(const struct fared_table *table, uint32_t sub_port, const struct fared_address *source)
{
	if (!table || !source)
		return FARED_E_INVALID;
	if (!table->mem)
		return FARED_E_TRUNCATED;
	if (sub_port >= table->sub_ports.count)
		return FARED_E_NOT_FOUND;
	for (uint32_t n = 0; n < table->sources.count; n++) {
		if (memcmp(record(table, &table->sources, n) + L_SOURCE_ADDRESS, source, 16))
			continue;
		struct fared_sub_port out;
		int32_t gid = -1;
		int error = read_sub_port(table, sub_port, &out, n, &gid);
		return error ? error : gid < 0 ? FARED_E_NOT_FOUND : gid;
	}
	return FARED_E_NOT_FOUND;
}

EXPORT int fared_choose(const struct fared_slot *slots, uint32_t n, int64_t *credit)
{
	if (!slots || !credit)
		return n ? FARED_E_INVALID : FARED_E_NOT_FOUND;
	int best = deal_turn(&slots->share_ppb, sizeof *slots / sizeof slots->share_ppb, n, 1, credit);
	return best < 0 ? FARED_E_NOT_FOUND : best;
}

/* Returns -log2(h / 2^64) with 46 bits after the point, at least 1 and below 2^52. */
static uint64_t minus_log2(uint64_t h)
{
	h |= 1;
	unsigned zeros = (unsigned)__builtin_clzll(h);
	uint64_t x = h << zeros;
	uint64_t i = x << 1 >> (64 - LOG_STEPS);
	const unsigned rest = 63 - LOG_STEPS;
	uint64_t inside = x & (((uint64_t)1 << rest) - 1);
	uint64_t up = (uint64_t)((unsigned __int128)(log_table[i + 1] - log_table[i]) * (inside << (64 - rest)) >> 64);
	uint64_t draw = ((uint64_t)(zeros + 1) << LOG_FRACTION) - (log_table[i] + up);
	const uint64_t most = ((uint64_t)1 << 52) - 1;
	return draw < 1 ? 1 : draw > most ? most : draw;
}

EXPORT int fared_choose_key(const struct fared_slot *slots, uint32_t n, uint64_t key)
{
	if (!slots && n)
		return FARED_E_INVALID;
	key = mix(key + 0x9e3779b97f4a7c15u);
	int best = FARED_E_NOT_FOUND;
	uint64_t best_draw = 0;
	for (uint32_t i = 0; i < n; i++) {
		uint32_t share = slots[i].share_ppb;
		if (share == 0)
			continue;
		uint64_t draw = minus_log2(mix(key ^ (uint64_t)(i + 1) * 0xd1342543de82ef95u));
		if (best < 0 || (unsigned __int128)draw * slots[best].share_ppb < (unsigned __int128)best_draw * share) {
			best = (int)i;
			best_draw = draw;
		}
	}
	return best;
}

static void mapped(struct fared_address *out, const void *v4)
{
	memset(out->bytes, 0, 10);
	memset(out->bytes + 10, 0xff, 2);
	memcpy(out->bytes + 12, v4, 4);
}

EXPORT int fared_parse_address(const char *text, struct fared_address *out)
{
	if (!text || !out)
		return FARED_E_INVALID;
	struct in_addr v4;
	if (inet_pton(AF_INET, text, &v4) == 1)
		mapped(out, &v4);
	else if (inet_pton(AF_INET6, text, out->bytes) != 1)
		return FARED_E_INVALID;
	return 0;
}

EXPORT int fared_address_of(const struct sockaddr *from, struct fared_address *out)
{
	if (!from || !out)
		return FARED_E_INVALID;
	sa_family_t family;
	memcpy(&family, (const char *)from + offsetof(struct sockaddr, sa_family), sizeof family);
	switch (family) {
	case AF_INET:
		mapped(out, (const char *)from + offsetof(struct sockaddr_in, sin_addr));
		return 0;
	case AF_INET6:
		memcpy(out->bytes, (const char *)from + offsetof(struct sockaddr_in6, sin6_addr), 16);
		return 0;
	}
	return FARED_E_INVALID;
}

EXPORT int fared_address_text(const struct fared_address *address, char *text, size_t size)
{
	static const unsigned char prefix[12] = {[10] = 0xff, [11] = 0xff};
	if (!address || !text || size > INT_MAX)
		return FARED_E_INVALID;
	int v4 = !memcmp(address->bytes, prefix, sizeof prefix);
	return inet_ntop(v4 ? AF_INET : AF_INET6, address->bytes + (v4 ? 12 : 0), text, (socklen_t)size) ? 0 : FARED_E_INVALID;
}
