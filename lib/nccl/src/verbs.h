/* libibverbs and the RDMA devices of the server. libibverbs is opened by name when it is needed, so the plugin loads on
 * hosts without it. */
#ifndef FARED_NCCL_VERBS_H
#define FARED_NCCL_VERBS_H

#include <infiniband/verbs.h>

#include "net.h"

/* The header declares some functions as macros, which choose between two versions. */
#undef ibv_query_port
#undef ibv_reg_mr

/* FUNCTIONS has a row for each function that the plugin calls: name and version of the symbol. Inline functions of the
 * header call the device by its context. */
#define VERBS_FUNCTIONS(ROW)                         \
	ROW(ibv_get_device_list, "IBVERBS_1.1")      \
	ROW(ibv_free_device_list, "IBVERBS_1.1")     \
	ROW(ibv_open_device, "IBVERBS_1.1")          \
	ROW(ibv_close_device, "IBVERBS_1.1")         \
	ROW(ibv_query_device, "IBVERBS_1.1")         \
	ROW(ibv_query_port, "IBVERBS_1.1")           \
	ROW(_ibv_query_gid_table, "IBVERBS_1.11")    \
	ROW(ibv_alloc_pd, "IBVERBS_1.1")             \
	ROW(ibv_dealloc_pd, "IBVERBS_1.1")           \
	ROW(ibv_reg_mr, "IBVERBS_1.1")               \
	ROW(ibv_dereg_mr, "IBVERBS_1.1")             \
	ROW(ibv_create_comp_channel, "IBVERBS_1.0")  \
	ROW(ibv_destroy_comp_channel, "IBVERBS_1.0") \
	ROW(ibv_create_cq, "IBVERBS_1.1")            \
	ROW(ibv_destroy_cq, "IBVERBS_1.1")           \
	ROW(ibv_get_cq_event, "IBVERBS_1.1")         \
	ROW(ibv_ack_cq_events, "IBVERBS_1.1")        \
	ROW(ibv_create_qp, "IBVERBS_1.1")            \
	ROW(ibv_modify_qp, "IBVERBS_1.1")            \
	ROW(ibv_destroy_qp, "IBVERBS_1.1")

/* verbs has a pointer for each function. */
extern struct verbs {
#define ROW(name, version) __typeof__(name) *name;
	VERBS_FUNCTIONS(ROW)
#undef ROW
	__typeof__(ibv_reg_dmabuf_mr) *ibv_reg_dmabuf_mr; /* NULL before rdma-core 34 */
} verbs;

/* rdma is a port of an RDMA device. */
struct rdma {
	int kind; /* first: enum source_kind SOURCE_RDMA */
	char name[64];
	uint8_t port;
	enum ibv_mtu mtu;
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel; /* its descriptor does not block */
};

extern struct rdma rdmas[MAX_RDMA];
extern int rdma_count;

/* verbs_open opens libibverbs and the active RoCE ports of all devices, the software device fared_soft0 only on
 * request. It returns whether there is a port, and else writes the reason. */
bool verbs_open(bool software, char *reason, size_t size);
void verbs_close(void);

/* verbs_gid returns the index of an address in a port's table of GIDs for RoCEv2, or -1. */
int verbs_gid(const struct rdma *r, const uint8_t address[16]);

/* verbs_port_of returns the number of the port for a slot: that of the slot's sub-port. If the table names no port of
 * this server, as where the kernel steers packets below the device, the first port with the address serves all slots.
 * It returns -1 if there is none. */
int verbs_port_of(const struct fared_table *table, uint16_t plane, uint16_t sub_port, const struct fared_address *source);

/* verbs_label returns the flow label for a UDP source port from 49152 on; 0 leaves the port to the driver. */
uint32_t verbs_label(uint16_t source_port);

#endif
