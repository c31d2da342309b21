/* Paths on the slots of a table that changes: slots TABLE, which is internal/slotfile/testdata/v2.slots. The pair's
 * shares are 2:1:2:1 on the planes 0, 1, 0, 1. */
#include "sim.h"

#include "../../src/layout.h"
#include "../../tests/check.h"

#include <fared.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PATHS = 13, SLOTS = 4 };

static struct sd_path paths[PATHS];
static uint16_t before[PATHS]; /* ports */
static uint8_t *pair, *vector; /* records */
static uint16_t *ports;        /* of the pair's slots */

/* map copies the table to a file, which FARED_SLOTS names, and finds the records of a pair. */
static void map(const char *table, const struct fared_address *source, const struct fared_address *destination)
{
	char name[] = "/dev/shm/fared-softdev-XXXXXX";
	FILE *from = fopen(table, "rb"), *to = fdopen(mkstemp(name), "r+b");
	CHECK(from && to);
	for (int c; (c = getc(from)) != EOF;)
		putc(c, to);
	CHECK(fclose(from) == 0 && fflush(to) == 0 && setenv("FARED_SLOTS", name, 1) == 0);
	uint8_t *file = mmap(NULL, (size_t)ftell(to), PROT_READ | PROT_WRITE, MAP_SHARED, fileno(to), 0);
	CHECK(file != MAP_FAILED && fclose(to) == 0);
	struct fared_table *t;
	struct fared_pair p;
	CHECK(fared_open(&t, name) == 0 && fared_lookup(t, source, destination, &p, NULL, 0) == 0 && p.slots == SLOTS);
	fared_close(t);
	pair = file + *(uint64_t *)(file + L_HEADER_PAIRS_AT) + p.record * *(uint32_t *)(file + L_HEADER_PAIR_SIZE);
	vector = file + *(uint64_t *)(file + L_HEADER_VECTORS_AT) + (p.vector_record - 1) * *(uint32_t *)(file + L_HEADER_VECTOR_SIZE);
	ports = (uint16_t *)(pair + L_PAIR_BYTES + (*(uint32_t *)(file + L_HEADER_MAX_SLOTS) + 63) / 64 * 8);
}

/* follow sets the shares of the slots, and returns the number of paths that have moved. before has their previous
 * ports. */
static int follow(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
	int moved = 0;
	uint64_t count = sim.dev[0].counters.moved;
	for (int i = 0; i < SLOTS; i++)
		*(uint32_t *)(vector + L_VECTOR_BYTES + L_SLOT_BYTES * i + L_SLOT_SHARE) = (uint32_t[]){a, b, c, d}[i];
	*(uint32_t *)(vector + L_VECTOR_SEQUENCE) += 2;
	*(uint32_t *)(pair + L_PAIR_SEQUENCE) += 2;
	for (int i = 0; i < PATHS; i++)
		before[i] = paths[i].flow.source_port;
	sd_slots_follow(&sim.dev[0]);
	for (int i = 0; i < PATHS; i++)
		moved += paths[i].flow.source_port != before[i];
	CHECK(sim.dev[0].counters.moved == count + moved);
	return moved;
}

/* on returns the number of paths on a slot. */
static int on(int slot)
{
	int n = 0;
	for (int i = 0; i < PATHS; i++)
		n += paths[i].flow.source_port == ports[slot];
	return n;
}

static void join(uint32_t i)
{
	memcpy(&paths[i].flow.source, pair + L_PAIR_SOURCE, 16);
	memcpy(&paths[i].flow.destination, pair + L_PAIR_DESTINATION, 16);
	CHECK(sd_slots_join(&sim.dev[0], &paths[i], i) == 0);
}

static bool spread(int a, int b, int c, int d)
{
	return on(0) == a && on(1) == b && on(2) == c && on(3) == d;
}

int main(int argc, char **argv)
{
	struct fared_address source, destination;
	CHECK(argc == 2 && fared_parse_address("10.255.0.1", &source) == 0 && fared_parse_address("10.255.0.2", &destination) == 0);
	map(argv[1], &source, &destination);
	sim_init(1);
	struct sd_dev *dev = &sim.dev[0];
	CHECK(dev->slots = sd_slots_open());
	for (uint32_t i = 0; i < PATHS - 1; i++)
		join(i);
	CHECK(spread(4, 2, 4, 2));

	/* A parked slot: its paths move, and no other one; the same number returns. */
	CHECK(follow(400000000, 0, 400000000, 200000000) == 2 && spread(5, 0, 5, 2));
	CHECK(follow(333333334, 166666667, 333333333, 166666666) == 2 && spread(4, 2, 4, 2));

	/* A new port of a slot: its paths move there. Exchanged ports of equal slots: every path stays at its port. */
	ports[0] = 51000;
	CHECK(follow(333333334, 166666667, 333333333, 166666666) == 4 && spread(4, 2, 4, 2));
	ports[0] = ports[2];
	ports[2] = 51000;
	CHECK(follow(333333334, 166666667, 333333333, 166666666) == 0 && spread(4, 2, 4, 2));

	/* Without any capacity all paths stay, also at a port that no slot has any longer, until there is some. */
	ports[3] = 51003;
	CHECK(follow(0, 0, 0, 0) == 0 && spread(4, 2, 4, 0));
	CHECK(follow(250000000, 250000000, 250000000, 250000000) == 4 && spread(3, 3, 3, 3));

	/* A difference of one part per billion moves no path, whichever slot has it, and whichever has the odd path. */
	join(PATHS - 1);
	CHECK(spread(4, 3, 3, 3));
	for (uint32_t i = 0; i < SLOTS; i++)
		CHECK(follow(250000000 - (i == 0), 250000000 + (i == 0) - (i == 1), 250000000 + (i == 1) - (i == 2), 250000000 + (i == 2)) == 0);
	for (uint32_t i = 0; i < SLOTS; i++)
		CHECK(follow(250000000 + (i == 0), 250000000 + (i == 1), 250000000 + (i == 2), 250000000 + (i == 3)) == 0);

	for (int i = 0; i < PATHS; i++)
		sd_slots_leave(dev, &paths[i]);
	sd_slots_close(dev->slots);
	CHECK(unlink(getenv("FARED_SLOTS")) == 0);
	dev->slots = NULL;
	sim_end();
	return 0;
}
