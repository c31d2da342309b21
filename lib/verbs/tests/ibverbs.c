/* A libibverbs.so.1 of four functions, which records their calls. The structures are the caller's. */
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <string.h>

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

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
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
