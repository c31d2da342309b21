/* Memory that NCCL registers: with every RDMA port that its communicator may use. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"
#include "verbs.h"

static struct ibv_mr *register_with(const struct rdma *r, void *data, size_t size, uint64_t offset, int fd)
{
	const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	errno = 0;
	if (fd < 0)
		return verbs.ibv_reg_mr(r->pd, data, size, access);
	if (!verbs.ibv_reg_dmabuf_mr) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	return verbs.ibv_reg_dmabuf_mr(r->pd, offset, size, (uintptr_t)data, fd, access);
}

ncclResult_t net_register(struct comm *c, void *data, size_t size, uint64_t offset, int fd, struct memory **out)
{
	*out = NULL;
	if (!c->verbs && fd < 0)
		return ncclSuccess;
	if (!c->verbs) {
		WARN("a DMA-BUF: a communicator over TCP carries memory of the host alone");
		return ncclInvalidUsage;
	}
	struct memory *m = calloc(1, sizeof *m);
	if (!m)
		return ncclSystemError;
	m->data = data;
	m->size = size;
	for (int i = 0; i < rdma_count; i++) {
		if (!(c->device->ports >> i & 1))
			continue;
		m->regions[i] = register_with(&rdmas[i], data, size, offset, fd);
		if (!m->regions[i]) {
			WARN("%s port %d: %s of %zu bytes cannot be registered: %s", rdmas[i].name, rdmas[i].port, fd < 0 ? "memory" : "a DMA-BUF", size,
				strerror(errno));
			net_deregister(m);
			return fd < 0 ? ncclSystemError : ncclInvalidUsage;
		}
		m->local_keys[i] = m->regions[i]->lkey;
		m->remote_keys[i] = m->regions[i]->rkey;
	}
	*out = m;
	return ncclSuccess;
}

ncclResult_t net_deregister(struct memory *m)
{
	ncclResult_t result = ncclSuccess;
	for (int i = 0; m && i < MAX_RDMA; i++) {
		if (m->regions[i] && verbs.ibv_dereg_mr(m->regions[i]))
			result = ncclSystemError;
	}
	if (m && !atomic_load(&m->uses))
		free(m);
	return result;
}

void memory_use(struct memory *m, int n)
{
	if (m)
		atomic_fetch_add(&m->uses, (uint32_t)n);
}

bool memory_has(const struct comm *c, const struct memory *m, const void *data, size_t size)
{
	if (!c->verbs || !size)
		return true;
	bool inside = m && (const char *)data >= m->data && size <= m->size && (size_t)((const char *)data - m->data) <= m->size - size;
	if (!inside)
		WARN("a message of %zu bytes is not in the memory that it is registered by", size);
	return inside;
}

void memory_announce(const struct memory *m, const void *data, struct buffer *b)
{
	b->address = (uintptr_t)data;
	for (int i = 0; m && i < MAX_RDMA; i++)
		b->keys[i] = m->remote_keys[i];
}
