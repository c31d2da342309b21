/* The interface between NCCL and a net plugin, versions 8 to 12: names and layouts as a plugin's binary needs them.
 * NCCL looks up the symbols ncclNetPlugin_v12 down to _v6 and uses the first that exists. RCCL has the same interface.
 * Every layout is checked at the end of this file.
 */
#ifndef FARED_NCCL_ABI_H
#define FARED_NCCL_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
	ncclSuccess = 0,
	ncclSystemError = 2,
	ncclInternalError = 3,
	ncclInvalidArgument = 4,
	ncclInvalidUsage = 5,
	ncclRemoteError = 6,
} ncclResult_t;

enum { NCCL_LOG_WARN = 2, NCCL_LOG_INFO = 3 };
enum { NCCL_INIT = 0x1, NCCL_NET = 0x10 };

typedef void (*ncclDebugLogger_t)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

#define NCCL_NET_HANDLE_MAXSIZE 128
#define NCCL_NET_MAX_REQUESTS 32
/* Kinds of memory, a bit each in ptrSupport. */
#define NCCL_PTR_HOST 0x1
#define NCCL_PTR_CUDA 0x2
#define NCCL_PTR_DMABUF 0x4
#define NCCL_NET_DEVICE_HOST 0
#define NCCL_NET_ID_UNDEF (-1)
#define NCCL_MAX_NET_SIZE_BYTES ((size_t)1 << 40)

typedef struct {
	char *name;
	char *pciPath; /* in /sys, or NULL for a virtual device */
	uint64_t guid;
	int ptrSupport;
	int regIsGlobal;
	int speed; /* Mbit/s */
	int port;
	float latency; /* us; 0 means unknown */
	int maxComms;
	int maxRecvs;
	int netDeviceType;
	int netDeviceVersion;
} ncclNetProperties_v8_t;

#define NCCL_PROPERTIES_V9 \
	char *name;        \
	char *pciPath;     \
	uint64_t guid;     \
	int ptrSupport;    \
	int regIsGlobal;   \
	int forceFlush;    \
	int speed;         \
	int port;          \
	float latency;     \
	int maxComms;      \
	int maxRecvs;      \
	int netDeviceType; \
	int netDeviceVersion;

typedef struct {
	int ndevs;
	int devs[4];
} ncclNetVDeviceProps_v9_t;

typedef struct {
	NCCL_PROPERTIES_V9
	ncclNetVDeviceProps_v9_t vProps;
	size_t maxP2pBytes;
	size_t maxCollBytes;
} ncclNetProperties_v9_t;

typedef struct {
	NCCL_PROPERTIES_V9
	ncclNetVDeviceProps_v9_t vProps;
	size_t maxP2pBytes;
	size_t maxCollBytes;
	int maxMultiRequestSize;
} ncclNetProperties_v11_t;

typedef struct {
	int ndevs;
	int devs[8];
} ncclNetVDeviceProps_v12_t;

typedef struct {
	NCCL_PROPERTIES_V9
	ncclNetVDeviceProps_v12_t vProps;
	size_t maxP2pBytes;
	size_t maxCollBytes;
	int maxMultiRequestSize;
	int16_t railId;
	int16_t planeId;
} ncclNetProperties_v12_t;

/* The members from accept on that all versions share. SIZE is the type of message sizes, PHANDLE is empty or the
 * argument for a profiler's handle. */
#define NCCL_NET_TRANSFERS(SIZE, PHANDLE, PHANDLES)                                                                                  \
	ncclResult_t (*accept)(void *listenComm, void **recvComm, void **recvDevComm);                                               \
	ncclResult_t (*regMr)(void *comm, void *data, size_t size, int type, void **mhandle);                                        \
	ncclResult_t (*regMrDmaBuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **mhandle);         \
	ncclResult_t (*deregMr)(void *comm, void *mhandle);                                                                          \
	ncclResult_t (*isend)(void *sendComm, void *data, SIZE size, int tag, void *mhandle PHANDLE, void **request);                \
	ncclResult_t (*irecv)(void *recvComm, int n, void **data, SIZE *sizes, int *tags, void **mhandles PHANDLES, void **request); \
	ncclResult_t (*iflush)(void *recvComm, int n, void **data, int *sizes, void **mhandles, void **request);                     \
	ncclResult_t (*test)(void *request, int *done, int *sizes);                                                                  \
	ncclResult_t (*closeSend)(void *sendComm);                                                                                   \
	ncclResult_t (*closeRecv)(void *recvComm);                                                                                   \
	ncclResult_t (*closeListen)(void *listenComm);                                                                               \
	ncclResult_t (*getDeviceMr)(void *comm, void *mhandle, void **deviceMr);                                                     \
	ncclResult_t (*irecvConsumed)(void *recvComm, int n, void *request);

#define NCCL_NO_PHANDLE
#define NCCL_PHANDLE , void *phandle
#define NCCL_PHANDLES , void **phandles

typedef struct {
	const char *name;
	ncclResult_t (*init)(ncclDebugLogger_t log);
	ncclResult_t (*devices)(int *ndev);
	ncclResult_t (*getProperties)(int dev, ncclNetProperties_v8_t *properties);
	ncclResult_t (*listen)(int dev, void *handle, void **listenComm);
	ncclResult_t (*connect)(int dev, void *handle, void **sendComm, void **sendDevComm);
	NCCL_NET_TRANSFERS(int, NCCL_NO_PHANDLE, NCCL_NO_PHANDLE)
} ncclNet_v8_t;

typedef struct {
	const char *name;
	ncclResult_t (*init)(ncclDebugLogger_t log);
	ncclResult_t (*devices)(int *ndev);
	ncclResult_t (*getProperties)(int dev, ncclNetProperties_v9_t *properties);
	ncclResult_t (*listen)(int dev, void *handle, void **listenComm);
	ncclResult_t (*connect)(int dev, void *handle, void **sendComm, void **sendDevComm);
	NCCL_NET_TRANSFERS(size_t, NCCL_NO_PHANDLE, NCCL_NO_PHANDLE)
	ncclResult_t (*makeVDevice)(int *dev, ncclNetVDeviceProps_v9_t *properties);
} ncclNet_v9_t;

typedef struct {
	const char *name;
	ncclResult_t (*init)(ncclDebugLogger_t log, void *profiler);
	ncclResult_t (*devices)(int *ndev);
	ncclResult_t (*getProperties)(int dev, ncclNetProperties_v9_t *properties);
	ncclResult_t (*listen)(int dev, void *handle, void **listenComm);
	ncclResult_t (*connect)(int dev, void *config, void *handle, void **sendComm, void **sendDevComm);
	NCCL_NET_TRANSFERS(size_t, NCCL_PHANDLE, NCCL_PHANDLES)
	ncclResult_t (*makeVDevice)(int *dev, ncclNetVDeviceProps_v9_t *properties);
} ncclNet_v10_t;

typedef struct {
	const char *name;
	ncclResult_t (*init)(void **context, uint64_t commId, void *config, ncclDebugLogger_t log, void *profiler);
	ncclResult_t (*devices)(int *ndev);
	ncclResult_t (*getProperties)(int dev, ncclNetProperties_v11_t *properties);
	ncclResult_t (*listen)(void *context, int dev, void *handle, void **listenComm);
	ncclResult_t (*connect)(void *context, int dev, void *handle, void **sendComm, void **sendDevComm);
	NCCL_NET_TRANSFERS(size_t, NCCL_PHANDLE, NCCL_PHANDLES)
	ncclResult_t (*makeVDevice)(int *dev, ncclNetVDeviceProps_v9_t *properties);
	ncclResult_t (*finalize)(void *context);
	ncclResult_t (*setNetAttr)(void *context, void *attributes);
} ncclNet_v11_t;

typedef struct {
	const char *name;
	ncclResult_t (*init)(void **context, uint64_t commId, void *config, ncclDebugLogger_t log, void *profiler);
	ncclResult_t (*devices)(int *ndev);
	ncclResult_t (*getProperties)(int dev, ncclNetProperties_v12_t *properties);
	ncclResult_t (*listen)(void *context, int dev, void *handle, void **listenComm);
	ncclResult_t (*connect)(void *context, int dev, void *handle, void **sendComm, void **sendDevComm);
	NCCL_NET_TRANSFERS(size_t, NCCL_PHANDLE, NCCL_PHANDLES)
	ncclResult_t (*makeVDevice)(int *dev, ncclNetVDeviceProps_v12_t *properties);
	ncclResult_t (*finalize)(void *context);
	ncclResult_t (*setNetAttr)(void *context, void *attributes);
} ncclNet_v12_t;

#define NCCL_AT(type, member, offset) _Static_assert(offsetof(type, member) == (offset), #type "." #member)
#define NCCL_SIZE(type, size) _Static_assert(sizeof(type) == (size), #type)

NCCL_AT(ncclNetProperties_v8_t, guid, 16);
NCCL_AT(ncclNetProperties_v8_t, ptrSupport, 24);
NCCL_AT(ncclNetProperties_v8_t, regIsGlobal, 28);
NCCL_AT(ncclNetProperties_v8_t, speed, 32);
NCCL_AT(ncclNetProperties_v8_t, port, 36);
NCCL_AT(ncclNetProperties_v8_t, latency, 40);
NCCL_AT(ncclNetProperties_v8_t, maxComms, 44);
NCCL_AT(ncclNetProperties_v8_t, maxRecvs, 48);
NCCL_AT(ncclNetProperties_v8_t, netDeviceType, 52);
NCCL_AT(ncclNetProperties_v8_t, netDeviceVersion, 56);
NCCL_SIZE(ncclNetProperties_v8_t, 64);

#define NCCL_CHECK_V9(type)                  \
	NCCL_AT(type, name, 0);              \
	NCCL_AT(type, pciPath, 8);           \
	NCCL_AT(type, guid, 16);             \
	NCCL_AT(type, ptrSupport, 24);       \
	NCCL_AT(type, regIsGlobal, 28);      \
	NCCL_AT(type, forceFlush, 32);       \
	NCCL_AT(type, speed, 36);            \
	NCCL_AT(type, port, 40);             \
	NCCL_AT(type, latency, 44);          \
	NCCL_AT(type, maxComms, 48);         \
	NCCL_AT(type, maxRecvs, 52);         \
	NCCL_AT(type, netDeviceType, 56);    \
	NCCL_AT(type, netDeviceVersion, 60); \
	NCCL_AT(type, vProps.ndevs, 64);     \
	NCCL_AT(type, vProps.devs, 68)

NCCL_CHECK_V9(ncclNetProperties_v9_t);
NCCL_AT(ncclNetProperties_v9_t, maxP2pBytes, 88);
NCCL_AT(ncclNetProperties_v9_t, maxCollBytes, 96);
NCCL_SIZE(ncclNetProperties_v9_t, 104);

NCCL_CHECK_V9(ncclNetProperties_v11_t);
NCCL_AT(ncclNetProperties_v11_t, maxP2pBytes, 88);
NCCL_AT(ncclNetProperties_v11_t, maxCollBytes, 96);
NCCL_AT(ncclNetProperties_v11_t, maxMultiRequestSize, 104);
NCCL_SIZE(ncclNetProperties_v11_t, 112);

NCCL_CHECK_V9(ncclNetProperties_v12_t);
NCCL_AT(ncclNetProperties_v12_t, maxP2pBytes, 104);
NCCL_AT(ncclNetProperties_v12_t, maxCollBytes, 112);
NCCL_AT(ncclNetProperties_v12_t, maxMultiRequestSize, 120);
NCCL_AT(ncclNetProperties_v12_t, railId, 124);
NCCL_AT(ncclNetProperties_v12_t, planeId, 126);
NCCL_SIZE(ncclNetProperties_v12_t, 128);

#define NCCL_CHECK_TABLE(type, size)       \
	NCCL_AT(type, init, 8);            \
	NCCL_AT(type, devices, 16);        \
	NCCL_AT(type, getProperties, 24);  \
	NCCL_AT(type, listen, 32);         \
	NCCL_AT(type, connect, 40);        \
	NCCL_AT(type, accept, 48);         \
	NCCL_AT(type, regMr, 56);          \
	NCCL_AT(type, regMrDmaBuf, 64);    \
	NCCL_AT(type, deregMr, 72);        \
	NCCL_AT(type, isend, 80);          \
	NCCL_AT(type, irecv, 88);          \
	NCCL_AT(type, iflush, 96);         \
	NCCL_AT(type, test, 104);          \
	NCCL_AT(type, closeSend, 112);     \
	NCCL_AT(type, closeRecv, 120);     \
	NCCL_AT(type, closeListen, 128);   \
	NCCL_AT(type, getDeviceMr, 136);   \
	NCCL_AT(type, irecvConsumed, 144); \
	NCCL_SIZE(type, size)

NCCL_CHECK_TABLE(ncclNet_v8_t, 152);
NCCL_CHECK_TABLE(ncclNet_v9_t, 160);
NCCL_AT(ncclNet_v9_t, makeVDevice, 152);
NCCL_CHECK_TABLE(ncclNet_v10_t, 160);
NCCL_AT(ncclNet_v10_t, makeVDevice, 152);
NCCL_CHECK_TABLE(ncclNet_v11_t, 176);
NCCL_AT(ncclNet_v11_t, finalize, 160);
NCCL_AT(ncclNet_v11_t, setNetAttr, 168);
NCCL_CHECK_TABLE(ncclNet_v12_t, 176);
NCCL_AT(ncclNet_v12_t, finalize, 160);
NCCL_AT(ncclNet_v12_t, setNetAttr, 168);

#endif
