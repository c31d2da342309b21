/* A libibverbs.so.1 of few functions, which records their calls. The structures are the caller's. */
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fake.h"

struct fake fake;

/* GID 0 is link-local, GID 1 is 10.255.0.1, GID 2 is 2001:db8::1. */
int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
	static const char *const text[] = {"fe80::1", "::ffff:10.255.0.1", "2001:db8::1"};
	(void)context;
	fake.queried++;
	errno = EBADMSG; /* as a function may leave it */
	return port && index >= 0 && index < 3 && inet_pton(AF_INET6, text[index], gid->raw) == 1 ? 0 : -1;
}

/* Records a change of the source port by the flow label (rdma_flow_label_to_udp_sport of Linux), as a driver that
 * accepts one in RTS. */
static int change_vector(struct ibv_qp *qp, const struct ibv_qp_attr *attr)
{
	static const uint8_t there[] = {10, 255, 0, 2};
	struct timespec now;
	uint32_t label = attr->ah_attr.grh.flow_label;
	clock_gettime(CLOCK_MONOTONIC, &now);
	fake.other += !attr->ah_attr.is_global || attr->ah_attr.port_num != 1 || attr->ah_attr.grh.sgid_index != 1 ||
		memcmp(attr->ah_attr.grh.dgid.raw + 12, there, sizeof there) != 0;
	int n = atomic_load(&fake.calls);
	if (n < FAKE_CALLS)
		fake.call[n] =
			(struct fake_call){qp->qp_num, (uint16_t)(0xc000 | ((label & 0x3fff) ^ (label >> 14))), (int64_t)now.tv_sec * 1000000000 + now.tv_nsec};
	atomic_store(&fake.calls, n + 1);
	return fake.error;
}

int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	(void)mask;
	(void)init;
	attr->qp_state = qp->state;
	return 0;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	if (mask == IBV_QP_AV)
		return change_vector(qp, attr);
	fake.modified++;
	if (fake.fail) {
		errno = fake.fail;
		fake.fail = 0;
		return errno;
	}
	if (mask & IBV_QP_AV)
		fake.label = attr->ah_attr.grh.flow_label;
	if (mask & IBV_QP_STATE)
		qp->state = attr->qp_state;
	return 0;
}

int ibv_destroy_qp(struct ibv_qp *qp)
{
	if (fake.fail) {
		errno = fake.fail;
		fake.fail = 0;
		return errno;
	}
	free(qp);
	return 0;
}

int ibv_close_device(struct ibv_context *context)
{
	fake.closed = context;
	return 0;
}

void ibv_copy_qp_attr_from_kern(struct ibv_qp_attr *attr, void *kernel)
{
	attr->ah_attr.grh.flow_label = *(uint32_t *)kernel;
}

/* A function that the interposer does not have. */
int ibv_fork_init(void)
{
	return 42;
}
