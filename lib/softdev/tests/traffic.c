/* Sends messages over many queue pairs and verifies every byte, by the functions of libibverbs alone:
 *   traffic DEVICE PORT                                      the receiver, which waits for one sender
 *   traffic DEVICE PORT ADDRESS QUEUE_PAIRS MESSAGES SIZE [AHEAD]    the sender
 * AHEAD is the number of messages by which a queue pair may be ahead of the slowest one, as in programs that divide
 * each buffer among all. Each message is a WRITE with immediate data into a slot of the receiver, which verifies it
 * and sends its number back. The sender then reads every fourth one back before it reuses the slot. Any wrong byte
 * or failed request ends both with status 1. */
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SLOTS = 16, MAX_QPS = 64 };

#define FAIL(...) (printf(__VA_ARGS__), printf("\n"), exit(1))

struct hello {
	uint32_t qps, messages, size, rkey;
	uint64_t address;
	union ibv_gid gid;
	uint32_t qpn[MAX_QPS], mtu;
};

static struct ibv_qp *qps[MAX_QPS];
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static uint8_t *memory; /* SLOTS areas of each queue pair, then a buffer to read back for each slot, then the numbers that are sent back */
static struct hello here, there;
static int stream, sender;

static uint8_t *slot(uint32_t qp, uint32_t i)
{
	return memory + ((size_t)qp * SLOTS + i) * here.size;
}
static uint8_t *back(uint32_t qp, uint32_t i)
{
	return slot(MAX_QPS + qp, i);
}

/* word returns the content of a message at a position. */
static uint64_t word(uint32_t qp, uint32_t message, uint32_t at)
{
	uint64_t x = ((uint64_t)qp << 40 | message) * 0x9e3779b97f4a7c15u + at;
	return (x ^ x >> 29) * 0xbf58476d1ce4e5b9u;
}

static void fill(uint8_t *b, uint32_t qp, uint32_t message)
{
	for (uint32_t i = 0; i + 8 <= here.size; i += 8)
		memcpy(b + i, &(uint64_t){word(qp, message, i)}, 8);
}

static void verify(const uint8_t *b, uint32_t qp, uint32_t message, const char *what)
{
	for (uint32_t i = 0; i + 8 <= here.size; i += 8)
		if (memcmp(b + i, &(uint64_t){word(qp, message, i)}, 8) != 0)
			FAIL("%s: message %u of queue pair %u differs at %u", what, message, qp, i);
}

static void exchange(const char *port, const char *address)
{
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port))};
	int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	if (address) {
		inet_pton(AF_INET, address, &at.sin_addr);
		for (int i = 0; connect(fd, (struct sockaddr *)&at, sizeof at) != 0; i++, usleep(50000)) {
			close(fd);
			if (i == 400)
				FAIL("no connection");
			fd = socket(AF_INET, SOCK_STREAM, 0);
		}
		stream = fd;
	} else {
		if (bind(fd, (struct sockaddr *)&at, sizeof at) != 0 || listen(fd, 1) != 0 || (stream = accept(fd, NULL, NULL)) < 0)
			FAIL("no connection");
	}
}

static void swap(const void *out, void *in, size_t n)
{
	if (write(stream, out, n) != (ssize_t)n || recv(stream, in, n, MSG_WAITALL) != (ssize_t)n)
		FAIL("the peer has ended");
}

static void open_device(const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *c = NULL;
	for (int i = 0; list && list[i]; i++)
		if (strcmp(ibv_get_device_name(list[i]), name) == 0)
			c = ibv_open_device(list[i]);
	if (list)
		ibv_free_device_list(list);
	if (!c)
		FAIL("no device %s", name);
	struct ibv_port_attr port;
	if (ibv_query_port(c, 1, &port) || ibv_query_gid(c, 1, 0, &here.gid))
		FAIL("port");
	here.mtu = port.active_mtu;
	size_t size = (size_t)2 * MAX_QPS * SLOTS * here.size + MAX_QPS * SLOTS * 4;
	memory = calloc(1, size);
	struct ibv_pd *pd = ibv_alloc_pd(c);
	mr = ibv_reg_mr(pd, memory, size, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
	cq = ibv_create_cq(c, 4096, NULL, NULL, 0);
	here.rkey = mr->rkey;
	here.address = (uintptr_t)memory;
	for (uint32_t i = 0; i < here.qps; i++) {
		struct ibv_qp_init_attr attr = {.send_cq = cq,
			.recv_cq = cq,
			.qp_type = IBV_QPT_RC,
			.cap = {.max_send_wr = 4 * SLOTS, .max_recv_wr = 2 * SLOTS, .max_send_sge = 1, .max_recv_sge = 1}};
		qps[i] = ibv_create_qp(pd, &attr);
		if (!qps[i])
			FAIL("queue pair");
		here.qpn[i] = qps[i]->qp_num;
	}
}

static void connect_qps(void)
{
	for (uint32_t i = 0; i < here.qps; i++) {
		struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ};
		if (ibv_modify_qp(qps[i], &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
			FAIL("INIT");
		a = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR,
			.path_mtu = here.mtu < there.mtu ? here.mtu : there.mtu,
			.dest_qp_num = there.qpn[i],
			.max_dest_rd_atomic = 4,
			.min_rnr_timer = 12,
			.ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = there.gid, .hop_limit = 64}}};
		if (ibv_modify_qp(qps[i], &a,
			    IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
			FAIL("RTR");
		a = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 17, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4};
		if (ibv_modify_qp(qps[i], &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
			FAIL("RTS");
	}
}

enum { RECEIVE = 1, SENT, READ };
static uint64_t id(int kind, uint32_t qp, uint32_t message)
{
	return (uint64_t)kind << 60 | (uint64_t)qp << 32 | message;
}

static void post_receive(uint32_t qp)
{
	struct ibv_recv_wr wr = {.wr_id = id(RECEIVE, qp, 0)}, *bad;
	if (ibv_post_recv(qps[qp], &wr, &bad))
		FAIL("receive");
}

static void post(uint32_t qp, enum ibv_wr_opcode opcode, uint8_t *local, uint32_t length, uint32_t message)
{
	struct ibv_sge sge = {(uintptr_t)local, length, mr->lkey};
	struct ibv_send_wr wr = {.wr_id = id(opcode == IBV_WR_RDMA_READ ? READ : SENT, qp, message),
				   .sg_list = &sge,
				   .num_sge = length > 0,
				   .opcode = opcode,
				   .send_flags = IBV_SEND_SIGNALED,
				   .imm_data = htonl(message),
				   .wr.rdma = {there.address + (uint64_t)(slot(qp, message % SLOTS) - memory), there.rkey}},
			   *bad;
	if (ibv_post_send(qps[qp], &wr, &bad))
		FAIL("send");
}

static uint32_t next[MAX_QPS], finished[MAX_QPS], ahead = UINT32_MAX, slowest, at_slowest;

/* send_messages sends from a queue pair what it may send. */
static void send_messages(uint32_t qp)
{
	for (; next[qp] < here.messages && next[qp] < finished[qp] + SLOTS && next[qp] - slowest < ahead; next[qp]++) {
		uint8_t *b = slot(qp, next[qp] % SLOTS);
		fill(b, qp, next[qp]);
		post(qp, IBV_WR_RDMA_WRITE_WITH_IMM, b, here.size, next[qp]);
	}
}

/* finish notes a message that has come back. finished is a number of messages, in whose order they finish but for those
 * that are read back; a slot is free when its message and all before have finished. */
static void finish(uint32_t qp, uint32_t message)
{
	static uint32_t done[MAX_QPS];
	done[qp] |= 1u << message % SLOTS;
	for (uint32_t before = finished[qp]; done[qp] & 1u << finished[qp] % SLOTS; before = finished[qp]) {
		done[qp] &= ~(1u << finished[qp]++ % SLOTS);
		if (before == slowest && --at_slowest == 0) {
			slowest = UINT32_MAX;
			for (uint32_t q = 0; q < here.qps; q++)
				slowest = finished[q] < slowest ? finished[q] : slowest;
			for (uint32_t q = 0; q < here.qps; q++)
				at_slowest += finished[q] == slowest;
			for (uint32_t q = 0; ahead != UINT32_MAX && q < here.qps; q++)
				send_messages(q);
		}
	}
	send_messages(qp);
}

int main(int argc, char **argv)
{
	uint64_t done = 0;
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc != 3 && argc != 7 && argc != 8)
		FAIL("usage: traffic DEVICE PORT [ADDRESS QUEUE_PAIRS MESSAGES SIZE [AHEAD]]");
	sender = argc >= 7;
	if (argc == 8)
		ahead = (uint32_t)atoi(argv[7]);
	exchange(argv[2], sender ? argv[3] : NULL);
	if (sender)
		here = (struct hello){.qps = (uint32_t)atoi(argv[4]), .messages = (uint32_t)atoi(argv[5]), .size = (uint32_t)atoi(argv[6])};
	swap(&here, &there, sizeof here);
	if (!sender)
		here.qps = there.qps, here.messages = there.messages, here.size = there.size;
	open_device(argv[1]);
	swap(&here, &there, sizeof here);
	connect_qps();
	for (uint32_t q = 0; q < here.qps; q++)
		for (int i = 0; i < 2 * SLOTS; i++)
			post_receive(q);
	char byte = 0;
	swap(&byte, &byte, 1);
	at_slowest = here.qps;
	for (uint32_t q = 0; sender && q < here.qps; q++)
		send_messages(q);
	while (done < (uint64_t)here.qps * here.messages) {
		struct ibv_wc wc;
		int n = ibv_poll_cq(cq, 1, &wc);
		if (n == 0)
			continue;
		uint32_t qp = wc.wr_id >> 32 & 0xffff, message = (uint32_t)wc.wr_id;
		if (n < 0 || wc.status != IBV_WC_SUCCESS)
			FAIL("queue pair %u: %s", qp, ibv_wc_status_str(wc.status));
		if (wc.opcode & IBV_WC_RECV) {
			message = ntohl(wc.imm_data);
			post_receive(qp);
			if (!sender) {
				verify(slot(qp, message % SLOTS), qp, message, "received");
				post(qp, IBV_WR_SEND_WITH_IMM, NULL, 0, message);
			} else if (message % 4 == 0) {
				post(qp, IBV_WR_RDMA_READ, back(qp, message % SLOTS), here.size, message);
			} else {
				done++;
				finish(qp, message);
			}
		} else if (wc.wr_id >> 60 == READ) {
			verify(back(qp, message % SLOTS), qp, message, "read back");
			done++;
			finish(qp, message);
		} else if (!sender) {
			done++; /* the number has arrived */
		}
	}
	swap(&byte, &byte, 1); /* the receiver answers READs until the sender has ended */
	printf("verified %lu messages of %u bytes\n", done, here.size);
	for (uint32_t i = 0; i < here.qps; i++)
		if (ibv_destroy_qp(qps[i]))
			FAIL("destroy");
	struct ibv_context *c = cq->context;
	struct ibv_pd *pd = mr->pd;
	if (ibv_dereg_mr(mr) || ibv_destroy_cq(cq) || ibv_dealloc_pd(pd) || ibv_close_device(c))
		FAIL("close");
	free(memory);
	return 0;
}
