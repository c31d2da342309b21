/* Prints the slots of a pair, and again after every change: slots SOURCE DESTINATION.
 *
 *	cc -o slots slots.c $(pkg-config --cflags --libs libfared)
 */
#include <fared.h>

#include <stdio.h>

static void print(const struct fared_table *table, const struct fared_pair *pair, const struct fared_slot *slots)
{
	printf("revision %llu%s%s\n", (unsigned long long)pair->revision, pair->flags & FARED_PAIR_IN_EFFECT ? ", in effect" : "",
		pair->flags & FARED_PAIR_STALE ? ", fared does not run" : "");
	for (uint32_t i = 0; i < pair->slots; i++) {
		struct fared_sub_port sub_port = {.device = "(sprayed)"};
		if (slots[i].sub_port != FARED_NO_SUB_PORT)
			fared_get_sub_port(table, slots[i].sub_port, &sub_port);
		printf("  slot %u: plane %s, %s, source port %u, %u ppb%s\n", i, fared_plane_name(table, slots[i].plane), sub_port.device, slots[i].source_port,
			slots[i].share_ppb, slots[i].flags & FARED_SLOT_PARKED ? ", parked" : "");
	}
	fflush(stdout);
}

int main(int argc, char **argv)
{
	struct fared_address source, destination;
	if (argc != 3 || fared_parse_address(argv[1], &source) || fared_parse_address(argv[2], &destination)) {
		fprintf(stderr, "usage: slots SOURCE DESTINATION\n");
		return 2;
	}
	struct fared_table *table;
	int error = fared_open(&table, NULL);
	if (error) {
		fprintf(stderr, "slots: %s\n", fared_error_text(error));
		return 1;
	}
	struct fared_pair pair;
	struct fared_slot slots[128];
	do {
		error = fared_lookup(table, &source, &destination, &pair, slots, 128);
		if (error)
			printf("%s\n", fared_error_text(error));
		else
			print(table, &pair, slots);
		while (!error && fared_is_current(table, &pair) && fared_wait(table, -1) >= 0)
			; /* other pairs have changed */
		if (error)
			fared_wait(table, -1);
	} while (1);
}
