/* A net plugin as NCCL sees it, whatever its version. */
#ifndef FARED_NCCL_HOST_H
#define FARED_NCCL_HOST_H

#include "abi.h"

struct host {
	int version; /* 8 to 12 */
	const void *table;
	void *context;
};

/* Loads a plugin and the newest version that it offers, from newest down to 8. Returns 0, or -1 after a message on the
 * standard error. */
int host_load(struct host *h, const char *library, int newest);
ncclResult_t host_init(struct host *h, ncclDebugLogger_t log);
ncclResult_t host_devices(const struct host *h, int *n);
/* The properties of all versions; members that a version lacks are 0, railId and planeId NCCL_NET_ID_UNDEF. */
ncclResult_t host_properties(const struct host *h, int dev, ncclNetProperties_v12_t *p);
ncclResult_t host_listen(const struct host *h, int dev, void *handle, void **comm);
ncclResult_t host_connect(const struct host *h, int dev, void *handle, void **comm);
ncclResult_t host_accept(const struct host *h, void *listener, void **comm);
ncclResult_t host_register(const struct host *h, void *comm, void *data, size_t size, void **handle);
ncclResult_t host_deregister(const struct host *h, void *comm, void *handle);
ncclResult_t host_send(const struct host *h, void *comm, void *data, size_t size, int tag, void *memory, void **request);
ncclResult_t host_receive(const struct host *h, void *comm, int n, void **data, size_t *sizes, int *tags, void **memory, void **request);
ncclResult_t host_test(const struct host *h, void *request, int *done, int *sizes);
ncclResult_t host_close_send(const struct host *h, void *comm);
ncclResult_t host_close_receive(const struct host *h, void *comm);
ncclResult_t host_close_listener(const struct host *h, void *comm);
ncclResult_t host_finalize(const struct host *h);

#endif
