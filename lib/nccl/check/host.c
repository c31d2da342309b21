#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "host.h"

int host_load(struct host *h, const char *library, int newest)
{
	void *dl = dlopen(library, RTLD_NOW | RTLD_LOCAL);
	if (!dl) {
		fprintf(stderr, "nccl-net-check: %s\n", dlerror());
		return -1;
	}
	for (h->version = newest; h->version >= 8; h->version--) {
		char symbol[32];
		snprintf(symbol, sizeof symbol, "ncclNetPlugin_v%d", h->version);
		if ((h->table = dlsym(dl, symbol)))
			return 0;
	}
	fprintf(stderr, "nccl-net-check: %s has no symbol ncclNetPlugin_v8 to _v%d\n", library, newest);
	return -1;
}

/* Version 11 differs from version 12 by its properties alone, and versions 10 to 12 share the functions of transfers,
 * all at the same places (abi.h). CALL calls a member that all versions have with the same arguments. */
#define CALL(h, member, ...)                                                                            \
	((h)->version == 8                   ? ((const ncclNet_v8_t *)(h)->table)->member(__VA_ARGS__)  \
			: (h)->version == 9  ? ((const ncclNet_v9_t *)(h)->table)->member(__VA_ARGS__)  \
			: (h)->version == 10 ? ((const ncclNet_v10_t *)(h)->table)->member(__VA_ARGS__) \
					     : ((const ncclNet_v12_t *)(h)->table)->member(__VA_ARGS__))

ncclResult_t host_init(struct host *h, ncclDebugLogger_t log)
{
	switch (h->version) {
	case 8:
		return ((const ncclNet_v8_t *)h->table)->init(log);
	case 9:
		return ((const ncclNet_v9_t *)h->table)->init(log);
	case 10:
		return ((const ncclNet_v10_t *)h->table)->init(log, NULL);
	}
	return ((const ncclNet_v12_t *)h->table)->init(&h->context, 1, NULL, log, NULL);
}

ncclResult_t host_devices(const struct host *h, int *n)
{
	return CALL(h, devices, n);
}

#define COPY(from)                                                                                                                                       \
	out->name = (from).name, out->pciPath = (from).pciPath, out->guid = (from).guid, out->ptrSupport = (from).ptrSupport, out->speed = (from).speed, \
	out->maxComms = (from).maxComms, out->maxRecvs = (from).maxRecvs

ncclResult_t host_properties(const struct host *h, int dev, ncclNetProperties_v12_t *out)
{
	union {
		ncclNetProperties_v8_t v8;
		ncclNetProperties_v9_t v9;
		ncclNetProperties_v11_t v11;
	} p;
	memset(out, 0, sizeof *out);
	memset(&p, 0, sizeof p);
	out->railId = out->planeId = NCCL_NET_ID_UNDEF;
	ncclResult_t result;
	switch (h->version) {
	case 8:
		result = ((const ncclNet_v8_t *)h->table)->getProperties(dev, &p.v8);
		COPY(p.v8);
		return result;
	case 9:
		result = ((const ncclNet_v9_t *)h->table)->getProperties(dev, &p.v9);
		COPY(p.v9);
		return result;
	case 10:
		result = ((const ncclNet_v10_t *)h->table)->getProperties(dev, &p.v9);
		COPY(p.v9);
		return result;
	case 11:
		result = ((const ncclNet_v11_t *)h->table)->getProperties(dev, &p.v11);
		COPY(p.v11);
		return result;
	}
	return ((const ncclNet_v12_t *)h->table)->getProperties(dev, out);
}

ncclResult_t host_listen(const struct host *h, int dev, void *handle, void **comm)
{
	switch (h->version) {
	case 8:
		return ((const ncclNet_v8_t *)h->table)->listen(dev, handle, comm);
	case 9:
		return ((const ncclNet_v9_t *)h->table)->listen(dev, handle, comm);
	case 10:
		return ((const ncclNet_v10_t *)h->table)->listen(dev, handle, comm);
	}
	return ((const ncclNet_v12_t *)h->table)->listen(h->context, dev, handle, comm);
}

ncclResult_t host_connect(const struct host *h, int dev, void *handle, void **comm)
{
	void *device = NULL;
	switch (h->version) {
	case 8:
		return ((const ncclNet_v8_t *)h->table)->connect(dev, handle, comm, &device);
	case 9:
		return ((const ncclNet_v9_t *)h->table)->connect(dev, handle, comm, &device);
	case 10:
		return ((const ncclNet_v10_t *)h->table)->connect(dev, NULL, handle, comm, &device);
	}
	return ((const ncclNet_v12_t *)h->table)->connect(h->context, dev, handle, comm, &device);
}

ncclResult_t host_accept(const struct host *h, void *listener, void **comm)
{
	void *device = NULL;
	return CALL(h, accept, listener, comm, &device);
}

ncclResult_t host_register(const struct host *h, void *comm, void *data, size_t size, void **handle)
{
	return CALL(h, regMr, comm, data, size, NCCL_PTR_HOST, handle);
}

ncclResult_t host_deregister(const struct host *h, void *comm, void *handle)
{
	return CALL(h, deregMr, comm, handle);
}

ncclResult_t host_send(const struct host *h, void *comm, void *data, size_t size, int tag, void *memory, void **request)
{
	switch (h->version) {
	case 8:
		return ((const ncclNet_v8_t *)h->table)->isend(comm, data, (int)size, tag, memory, request);
	case 9:
		return ((const ncclNet_v9_t *)h->table)->isend(comm, data, size, tag, memory, request);
	}
	return ((const ncclNet_v12_t *)h->table)->isend(comm, data, size, tag, memory, NULL, request);
}

ncclResult_t host_receive(const struct host *h, void *comm, int n, void **data, size_t *sizes, int *tags, void **memory, void **request)
{
	int narrow[8];
	switch (h->version) {
	case 8:
		for (int i = 0; i < n; i++)
			narrow[i] = (int)sizes[i];
		return ((const ncclNet_v8_t *)h->table)->irecv(comm, n, data, narrow, tags, memory, request);
	case 9:
		return ((const ncclNet_v9_t *)h->table)->irecv(comm, n, data, sizes, tags, memory, request);
	}
	return ((const ncclNet_v12_t *)h->table)->irecv(comm, n, data, sizes, tags, memory, NULL, request);
}

ncclResult_t host_test(const struct host *h, void *request, int *done, int *sizes)
{
	return CALL(h, test, request, done, sizes);
}

ncclResult_t host_close_send(const struct host *h, void *comm)
{
	return CALL(h, closeSend, comm);
}

ncclResult_t host_close_receive(const struct host *h, void *comm)
{
	return CALL(h, closeRecv, comm);
}

ncclResult_t host_close_listener(const struct host *h, void *comm)
{
	return CALL(h, closeListen, comm);
}

ncclResult_t host_finalize(const struct host *h)
{
	return h->version < 11 ? ncclSuccess : ((const ncclNet_v12_t *)h->table)->finalize(h->context);
}
