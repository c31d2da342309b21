/* Prints a whole table in the form of client/slots/slotstest, with the source ports for the service PROTOCOL/PORT if
 * one is given. With "status", prints whether the table is live. */
#include <fared.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

struct row {
	struct fared_address source, destination;
	struct fared_pair pair;
	struct fared_slot *slots;
};

static int v4(const struct fared_address *a)
{
	static const unsigned char prefix[12] = {[10] = 0xff, [11] = 0xff};
	return !memcmp(a, prefix, sizeof prefix);
}

static int compare_address(const struct fared_address *a, const struct fared_address *b)
{
	return v4(a) != v4(b) ? v4(b) - v4(a) : memcmp(a, b, sizeof *a);
}

static int compare(const void *a, const void *b)
{
	const struct row *x = a, *y = b;
	int c = compare_address(&x->source, &y->source);
	return c ? c : compare_address(&x->destination, &y->destination);
}

static const char *text(const struct fared_address *a)
{
	static char texts[2][46];
	static int n;
	n = !n;
	CHECK(fared_address_text(a, texts[n], sizeof texts[n]) == 0);
	return texts[n];
}

int main(int argc, char **argv)
{
	struct fared_table *t;
	struct fared_service service = {0};
	int named = argc > 2 && sscanf(argv[2], "%hu/%hu", &service.protocol, &service.port) == 2;
	int error = named ? fared_open_service(&t, argv[1], &service) : fared_open(&t, argv[1]);
	if (error) {
		printf("error %d: %s\n", error, fared_error_text(error));
		return 1;
	}
	struct fared_status s;
	CHECK(fared_get_status(t, &s) == 0);
	if (argc > 2 && !named) {
		printf("live=%u instance=%s revision=%llu\n", s.live, s.instance, (unsigned long long)s.status_revision);
		fared_close(t);
		return 0;
	}
	for (uint32_t i = 0; i < s.planes; i++)
		printf("plane %u %s\n", i, fared_plane_name(t, i));
	CHECK(fared_plane_name(t, s.planes) == NULL);
	struct fared_address a;
	for (uint32_t i = 0; i < s.sources; i++) {
		CHECK(fared_get_source(t, i, &a) == 0);
		printf("source %u %s\n", i, text(&a));
	}
	CHECK(fared_get_source(t, s.sources, &a) == FARED_E_NOT_FOUND);
	uint32_t services = 0;
	for (; fared_get_service(t, services, &service) == 0; services++)
		printf("service %u %u/%u\n", services, service.protocol, service.port);
	CHECK(fared_get_service(t, services, &service) == FARED_E_NOT_FOUND);
	struct fared_service_range range;
	uint32_t ranges = 0;
	for (; fared_get_steered(t, ranges, &range) == 0; ranges++)
		printf("steered %u %u/%u-%u\n", ranges, range.protocol, range.first, range.last);
	CHECK(fared_get_steered(t, ranges, &range) == FARED_E_NOT_FOUND);
	struct fared_sub_port sp;
	for (uint32_t i = 0; i < s.sub_ports; i++) {
		CHECK(fared_get_sub_port(t, i, &sp) == 0);
		printf("sub-port %u %s plane=%u rdma=%s port=%u gids=", i, sp.device, sp.plane, sp.rdma_device, sp.rdma_port);
		for (uint32_t j = 0; j < s.sources; j++) {
			CHECK(fared_get_source(t, j, &a) == 0);
			int gid = fared_gid_index(t, i, &a);
			printf("%s%d", j ? "," : "", gid == FARED_E_NOT_FOUND ? -1 : gid);
		}
		printf("\n");
	}
	CHECK(fared_get_sub_port(t, s.sub_ports, &sp) == FARED_E_NOT_FOUND);
	struct row *rows = calloc(s.pairs + 1, sizeof *rows);
	CHECK(rows);
	uint32_t cursor = 0, n = 0;
	for (;; n++) {
		CHECK(n <= s.pairs);
		struct row *r = &rows[n];
		r->slots = calloc(s.max_slots, sizeof *r->slots);
		error = fared_next_pair(t, &cursor, &r->source, &r->destination, &r->pair, r->slots, s.max_slots);
		if (error)
			break;
		/* A look-up finds the same. */
		struct fared_pair pair;
		struct fared_slot *slots = calloc(s.max_slots, sizeof *slots);
		CHECK(fared_lookup(t, &r->source, &r->destination, &pair, slots, s.max_slots) == 0);
		CHECK(!memcmp(&pair, &r->pair, sizeof pair) && !memcmp(slots, r->slots, pair.slots * sizeof *slots));
		CHECK(fared_is_current(t, &pair));
		/* With less room, the number of slots is the same. */
		CHECK(fared_lookup(t, &r->source, &r->destination, &pair, slots, pair.slots / 2) == 0 && pair.slots == r->pair.slots);
		CHECK(fared_lookup(t, &r->source, &r->destination, &pair, NULL, 0) == 0 && pair.slots == r->pair.slots);
		free(slots);
	}
	CHECK(error == FARED_E_NOT_FOUND && n == s.pairs);
	qsort(rows, n, sizeof *rows, compare);
	static const char *const placements[] = {"uniform", "hash", "none", "asked"};
	for (uint32_t i = 0; i <= n; i++) {
		struct row *r = &rows[i];
		if (i < n) {
			printf("pair %s %s vector=%u %s", text(&r->source), text(&r->destination), r->pair.vector, placements[r->pair.placement]);
			printf("%s%s", r->pair.flags & FARED_PAIR_REACHABLE ? " reachable" : "", r->pair.flags & FARED_PAIR_IN_EFFECT ? " in-effect" : "");
			for (uint32_t j = 0; j < r->pair.slots; j++) {
				struct fared_slot *slot = &r->slots[j];
				CHECK(slot->slot == j);
				printf("; %u.%d %u:%u", slot->plane, slot->sub_port == FARED_NO_SUB_PORT ? -1 : slot->sub_port, slot->share_ppb,
					slot->source_port);
				printf("%s%s%s%s", slot->flags & FARED_SLOT_PARKED ? " parked" : "", slot->flags & FARED_SLOT_DRAIN ? " drain" : "",
					slot->flags & FARED_SLOT_IN_EFFECT ? " in-effect" : "", slot->flags & FARED_SLOT_WRONG ? " wrong" : "");
			}
			printf("\n");
		}
		free(r->slots);
	}
	free(rows);
	fared_close(t);
	return 0;
}
