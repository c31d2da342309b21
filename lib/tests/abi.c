/* Prints the parts of the ABI that callers compile in: sizes, offsets and constants. */
#include <fared.h>

#include <stdio.h>

#define SIZE(s) printf(#s " %zu\n", sizeof(struct s))
#define FIELD(s, f) printf(#s "." #f " %zu %zu\n", offsetof(struct s, f), sizeof(((struct s *)0)->f))
#define CONSTANT(c) printf(#c " %lld\n", (long long)(c))

int main(void)
{
	SIZE(fared_address);
	FIELD(fared_address, bytes);
	SIZE(fared_slot);
	FIELD(fared_slot, share_ppb);
	FIELD(fared_slot, source_port);
	FIELD(fared_slot, slot);
	FIELD(fared_slot, plane);
	FIELD(fared_slot, sub_port);
	FIELD(fared_slot, flags);
	SIZE(fared_pair);
	FIELD(fared_pair, revision);
	FIELD(fared_pair, flags);
	FIELD(fared_pair, slots);
	FIELD(fared_pair, vector);
	FIELD(fared_pair, placement);
	FIELD(fared_pair, run);
	FIELD(fared_pair, record);
	FIELD(fared_pair, sequence);
	FIELD(fared_pair, vector_record);
	FIELD(fared_pair, vector_sequence);
	FIELD(fared_pair, reserved);
	SIZE(fared_sub_port);
	FIELD(fared_sub_port, device);
	FIELD(fared_sub_port, rdma_device);
	FIELD(fared_sub_port, plane);
	FIELD(fared_sub_port, rdma_port);
	FIELD(fared_sub_port, reserved);
	SIZE(fared_status);
	FIELD(fared_status, run);
	FIELD(fared_status, revision);
	FIELD(fared_status, status_revision);
	FIELD(fared_status, live);
	FIELD(fared_status, pairs);
	FIELD(fared_status, planes);
	FIELD(fared_status, sub_ports);
	FIELD(fared_status, sources);
	FIELD(fared_status, max_slots);
	FIELD(fared_status, instance);
	FIELD(fared_status, reserved);
	SIZE(fared_service);
	FIELD(fared_service, protocol);
	FIELD(fared_service, port);
	SIZE(fared_service_range);
	FIELD(fared_service_range, protocol);
	FIELD(fared_service_range, first);
	FIELD(fared_service_range, last);
	FIELD(fared_service_range, reserved);
	CONSTANT(FARED_E_NO_TABLE);
	CONSTANT(FARED_E_SYSTEM);
	CONSTANT(FARED_E_FORMAT);
	CONSTANT(FARED_E_LAYOUT);
	CONSTANT(FARED_E_TRUNCATED);
	CONSTANT(FARED_E_NOT_FOUND);
	CONSTANT(FARED_E_BUSY);
	CONSTANT(FARED_E_INVALID);
	CONSTANT(FARED_E_SERVICE);
	CONSTANT(FARED_SLOT_PARKED);
	CONSTANT(FARED_SLOT_DRAIN);
	CONSTANT(FARED_SLOT_IN_EFFECT);
	CONSTANT(FARED_SLOT_WRONG);
	CONSTANT(FARED_NO_SUB_PORT);
	CONSTANT(FARED_PAIR_REACHABLE);
	CONSTANT(FARED_PAIR_IN_EFFECT);
	CONSTANT(FARED_PAIR_STALE);
	CONSTANT(FARED_UNIFORM);
	CONSTANT(FARED_HASH);
	CONSTANT(FARED_NONE);
	CONSTANT(FARED_ASKED);
	return 0;
}
