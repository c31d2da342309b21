/* Reads a table while another process changes it: reader PATH attach N, or reader PATH read, until standard input ends.
 * In the tables of these tests, the shares of a vector's slots are equal, and the ports of a pair are consecutive. */
#include <fared.h>

#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

static unsigned long readings, busy;

static void check(int error, const struct fared_pair *pair, const struct fared_slot *slots)
{
	if (error == FARED_E_BUSY) {
		busy++;
		return;
	}
	CHECK(error == 0 && pair->slots <= 128);
	for (uint32_t i = 1; i < pair->slots; i++)
		CHECK(slots[i].share_ppb == slots[0].share_ppb && slots[i].source_port == (uint16_t)(slots[0].source_port + i));
	readings++;
}

static int read_all(struct fared_table *t)
{
	struct fared_address source, destination;
	struct fared_pair pair, again;
	struct fared_slot slots[128];
	uint32_t cursor = 0;
	int n = 0;
	for (;; n++) {
		int error = fared_next_pair(t, &cursor, &source, &destination, &pair, slots, 128);
		if (error == FARED_E_NOT_FOUND)
			return n;
		check(error, &pair, slots);
		if (error)
			continue;
		error = fared_lookup(t, &source, &destination, &again, slots, 128);
		if (error != FARED_E_NOT_FOUND) /* it may have been removed */
			check(error, &again, slots);
	}
}

int main(int argc, char **argv)
{
	CHECK(argc >= 3);
	struct fared_table *t;
	if (!strcmp(argv[2], "attach")) {
		for (int i = atoi(argv[3]); i > 0; i--) {
			CHECK(fared_open(&t, argv[1]) == 0);
			read_all(t);
			fared_close(t);
		}
	} else {
		int error = fared_open(&t, argv[1]);
		CHECK(error == 0);
		struct pollfd end = {.fd = 0, .events = POLLIN};
		while (poll(&end, 1, 0) == 0) {
			read_all(t);
			CHECK(fared_wait(t, 1) >= 0);
		}
		fared_close(t);
	}
	printf("%lu readings, %lu busy\n", readings, busy);
	return 0;
}
