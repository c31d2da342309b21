/* The passive end of a queue pair, by the functions of libibverbs: its memory may be read and changed by atomics.
 *   target DEVICE GID_INDEX PEER_GID PEER_QPN PEER_PSN READS BYTES
 * READS is the number of outstanding READs and atomics of the peer, BYTES the length of the memory, whose byte i is 13 * i + i / 256. Prints the number of the queue pair, the R_Key
 * and the address of the memory, and ends with the standard input. */
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FAIL(...) (fprintf(stderr, __VA_ARGS__), fprintf(stderr, "\n"), exit(1))

int main(int argc, char **argv)
{
	if (argc != 8)
		FAIL("usage: target DEVICE GID_INDEX PEER_GID PEER_QPN PEER_PSN READS BYTES");
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *c = NULL;
	for (int i = 0; list && list[i]; i++)
		if (strcmp(ibv_get_device_name(list[i]), argv[1]) == 0)
			c = ibv_open_device(list[i]);
	if (!c)
		FAIL("no device %s", argv[1]);
	size_t n = strtoul(argv[7], NULL, 0);
	unsigned char *memory = aligned_alloc(4096, (n + 4095) & ~4095ul);
	for (size_t i = 0; i < n; i++)
		memory[i] = (unsigned char)(13 * i + i / 256);
	struct ibv_pd *pd = ibv_alloc_pd(c);
	struct ibv_cq *cq = ibv_create_cq(c, 16, NULL, NULL, 0);
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, n, access);
	struct ibv_qp_init_attr create = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
	struct ibv_qp *qp = ibv_create_qp(pd, &create);
	if (!mr || !qp)
		FAIL("no memory region or queue pair");
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = access};
	if (ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
		FAIL("INIT");
	a = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = (uint32_t)strtoul(argv[4], NULL, 0),
		.rq_psn = (uint32_t)strtoul(argv[5], NULL, 0),
		.max_dest_rd_atomic = (uint8_t)atoi(argv[6]),
		.min_rnr_timer = 12,
		.ah_attr = {.is_global = 1, .port_num = 1, .grh = {.sgid_index = (uint8_t)atoi(argv[2]), .hop_limit = 64}}};
	if (inet_pton(AF_INET6, argv[3], a.ah_attr.grh.dgid.raw) != 1)
		FAIL("the GID %s", argv[3]);
	if (ibv_modify_qp(
		    qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
		FAIL("RTR");
	printf("%u %u %lu\n", qp->qp_num, mr->rkey, (unsigned long)(uintptr_t)memory);
	fflush(stdout);
	while (getchar() != EOF)
		;
	struct ibv_qp_init_attr init;
	if (ibv_query_qp(qp, &a, IBV_QP_STATE, &init) || a.qp_state != IBV_QPS_RTR)
		FAIL("the queue pair is in state %d", a.qp_state);
	return 0;
}
