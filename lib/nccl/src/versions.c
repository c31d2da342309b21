/* The tables that NCCL looks up. Each function of a version converts its arguments and calls the same function of
 * net.h. */
#include <string.h>

#include "net.h"

#define EXPORT __attribute__((visibility("default")))

static ncclResult_t init(ncclDebugLogger_t log)
{
	atomic_store(&logger, log);
	ncclResult_t result = devices_init();
	for (int i = 0; i < devices_count(); i++) {
		if (device_get(i)->transports & TRANSPORT_VERBS)
			net_watch_forks(); /* contexts of a device are of no use to a child */
	}
	return result;
}

static ncclResult_t init_v10(ncclDebugLogger_t log, void *profiler)
{
	(void)profiler;
	return init(log);
}

static ncclResult_t init_v11(void **context, uint64_t comm, void *config, ncclDebugLogger_t log, void *profiler)
{
	(void)comm, (void)config, (void)profiler;
	*context = NULL;
	return init(log);
}

static ncclResult_t finalize(void *context)
{
	(void)context;
	net_finish();
	return ncclSuccess;
}

static ncclResult_t set_attributes(void *context, void *attributes)
{
	(void)context, (void)attributes; /* hints that depend on the use of a communicator: stripes follow the weights whatever the use */
	return ncclSuccess;
}

static ncclResult_t get_devices(int *n)
{
	*n = devices_count();
	return ncclSuccess;
}

#define PROPERTIES(p)                               \
	const struct device *d = device_get(dev);   \
	if (!d) {                                   \
		WARN("there is no device %d", dev); \
		return ncclInvalidArgument;         \
	}                                           \
	memset(p, 0, sizeof *(p));                  \
	(p)->name = (char *)d->name;                \
	(p)->pciPath = d->pci_path;                 \
	(p)->guid = d->guid;                        \
	(p)->ptrSupport = NCCL_PTR_HOST;            \
	(p)->speed = d->speed;                      \
	(p)->port = 1;                              \
	(p)->maxComms = 65536;                      \
	(p)->maxRecvs = MAX_PARTS;                  \
	(p)->netDeviceType = NCCL_NET_DEVICE_HOST

#define PROPERTIES_V9(p)           \
	PROPERTIES(p);             \
	(p)->vProps.ndevs = 1;     \
	(p)->vProps.devs[0] = dev; \
	(p)->maxP2pBytes = (p)->maxCollBytes = NCCL_MAX_NET_SIZE_BYTES

static ncclResult_t properties_v8(int dev, ncclNetProperties_v8_t *p)
{
	PROPERTIES(p);
	return ncclSuccess;
}

static ncclResult_t properties_v9(int dev, ncclNetProperties_v9_t *p)
{
	PROPERTIES_V9(p);
	return ncclSuccess;
}

static ncclResult_t properties_v11(int dev, ncclNetProperties_v11_t *p)
{
	PROPERTIES_V9(p);
	p->maxMultiRequestSize = 1;
	return ncclSuccess;
}

static ncclResult_t properties_v12(int dev, ncclNetProperties_v12_t *p)
{
	PROPERTIES_V9(p);
	p->maxMultiRequestSize = 1;
	p->railId = (int16_t)d->rail;
	p->planeId = (int16_t)(d->plane == ALL_PLANES ? NCCL_NET_ID_UNDEF : d->plane);
	return ncclSuccess;
}

static ncclResult_t listen_v8(int dev, void *handle, void **out)
{
	return net_listen(dev, handle, (struct listener **)out);
}

static ncclResult_t listen_v11(void *context, int dev, void *handle, void **out)
{
	(void)context;
	return listen_v8(dev, handle, out);
}

static ncclResult_t connect_v8(int dev, void *handle, void **out, void **device_comm)
{
	if (device_comm)
		*device_comm = NULL;
	return net_connect(dev, handle, (struct comm **)out);
}

static ncclResult_t connect_v10(int dev, void *config, void *handle, void **out, void **device_comm)
{
	(void)config;
	return connect_v8(dev, handle, out, device_comm);
}

static ncclResult_t connect_v11(void *context, int dev, void *handle, void **out, void **device_comm)
{
	(void)context;
	return connect_v8(dev, handle, out, device_comm);
}

static ncclResult_t accept_v8(void *listener, void **out, void **device_comm)
{
	if (device_comm)
		*device_comm = NULL;
	return net_accept(listener, (struct comm **)out);
}

static ncclResult_t register_memory(void *comm, void *data, size_t size, int type, void **handle)
{
	*handle = NULL;
	if (type == NCCL_PTR_HOST)
		return net_register(comm, data, size, 0, -1, (struct memory **)handle);
	WARN("memory of type %d: only memory of the host is registered by its address", type);
	return ncclInvalidUsage;
}

static ncclResult_t register_dmabuf(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **handle)
{
	(void)type;
	return net_register(comm, data, size, offset, fd, (struct memory **)handle);
}

static ncclResult_t deregister_memory(void *comm, void *handle)
{
	(void)comm;
	return net_deregister(handle);
}

static ncclResult_t send_v9(void *comm, void *data, size_t size, int tag, void *memory, void **request)
{
	return net_send(comm, data, size, tag, memory, (struct request **)request);
}

static ncclResult_t send_v8(void *comm, void *data, int size, int tag, void *memory, void **request)
{
	if (size < 0)
		return ncclInvalidArgument;
	return send_v9(comm, data, (size_t)size, tag, memory, request);
}

static ncclResult_t send_v10(void *comm, void *data, size_t size, int tag, void *memory, void *profiled, void **request)
{
	(void)profiled;
	return send_v9(comm, data, size, tag, memory, request);
}

/* OPTIONAL marks a request of a receive whose completion NCCL does not need: the lanes' receives are not optional, and
 * the mark is not an address. */
#define OPTIONAL ((void *)1)

static ncclResult_t receive_v9(void *comm, int n, void **data, size_t *sizes, int *tags, void **memory, void **request)
{
	if (*request == OPTIONAL)
		*request = NULL;
	return net_receive(comm, n, data, sizes, tags, (struct memory *const *)memory, (struct request **)request);
}

static ncclResult_t receive_v8(void *comm, int n, void **data, int *sizes, int *tags, void **memory, void **request)
{
	size_t wide[MAX_PARTS];
	if (n < 1 || n > MAX_PARTS)
		return ncclInvalidArgument;
	for (int i = 0; i < n; i++) {
		if (sizes[i] < 0)
			return ncclInvalidArgument;
		wide[i] = (size_t)sizes[i];
	}
	return receive_v9(comm, n, data, wide, tags, memory, request);
}

static ncclResult_t receive_v10(void *comm, int n, void **data, size_t *sizes, int *tags, void **memory, void **profiled, void **request)
{
	(void)profiled;
	return receive_v9(comm, n, data, sizes, tags, memory, request);
}

static ncclResult_t flush(void *comm, int n, void **data, int *sizes, void **memory, void **request)
{
	(void)comm, (void)n, (void)data, (void)sizes, (void)memory;
	*request = NULL; /* host memory is complete when the receive is */
	return ncclSuccess;
}

static ncclResult_t test(void *request, int *done, int *sizes)
{
	return net_test(request, done, sizes);
}

static ncclResult_t close_comm(void *comm)
{
	return net_close(comm);
}

static ncclResult_t close_listener(void *listener)
{
	return net_close_listener(listener);
}

#define TRANSFERS(VERSION)                                                                                                                    \
	.accept = accept_v8, .regMr = register_memory, .regMrDmaBuf = register_dmabuf, .deregMr = deregister_memory, .isend = send_##VERSION, \
	.irecv = receive_##VERSION, .iflush = flush, .test = test, .closeSend = close_comm, .closeRecv = close_comm, .closeListen = close_listener

#define NAME "fared"

EXPORT const ncclNet_v8_t ncclNetPlugin_v8 = {
	NAME,
	init,
	get_devices,
	properties_v8,
	listen_v8,
	connect_v8,
	TRANSFERS(v8),
};

EXPORT const ncclNet_v9_t ncclNetPlugin_v9 = {
	NAME,
	init,
	get_devices,
	properties_v9,
	listen_v8,
	connect_v8,
	TRANSFERS(v9),
};

EXPORT const ncclNet_v10_t ncclNetPlugin_v10 = {
	NAME,
	init_v10,
	get_devices,
	properties_v9,
	listen_v8,
	connect_v10,
	TRANSFERS(v10),
};

EXPORT const ncclNet_v11_t ncclNetPlugin_v11 = {
	NAME,
	init_v11,
	get_devices,
	properties_v11,
	listen_v11,
	connect_v11,
	TRANSFERS(v10),
	.finalize = finalize,
	.setNetAttr = set_attributes,
};

EXPORT const ncclNet_v12_t ncclNetPlugin_v12 = {
	NAME,
	init_v11,
	get_devices,
	properties_v12,
	listen_v11,
	connect_v11,
	TRANSFERS(v10),
	.finalize = finalize,
	.setNetAttr = set_attributes,
};
