/* libfared-softdev.so presents fared_soft0 to unmodified programs: it replaces the functions of libibverbs that are not
 * inline. Objects of fared_soft0 go to the device, all others to libibverbs. */
#include "softdev.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The header declares some functions as macros, which choose between two versions. */
#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#define EXPORT __attribute__((visibility("default")))

/* next returns a library's function of a name and version. It is found once, when the library is loaded, or else by a
 * handle: the library may have been opened by name, outside of the global scope. */
static void *next(void **cache, const char *library, const char *name, const char *version)
{
	void *f = __atomic_load_n(cache, __ATOMIC_ACQUIRE);
	if (f)
		return f;
	f = dlvsym(RTLD_NEXT, name, version);
	if (!f) {
		void *handle = dlopen(library, RTLD_LAZY | RTLD_LOCAL);
		f = handle ? dlvsym(handle, name, version) : NULL;
	}
	__atomic_store_n(cache, f, __ATOMIC_RELEASE);
	return f;
}

/* FORWARD calls libibverbs' function with the caller's arguments, or gives a value and an errno if this version of
 * libibverbs lacks it. */
#define FORWARD_TO(library, version, missing, name, ...)                                         \
	({                                                                                       \
		static void *cache;                                                              \
		__typeof__(name) *f = (__typeof__(name) *)next(&cache, library, #name, version); \
		f ? f(__VA_ARGS__) : (errno = EOPNOTSUPP, missing);                              \
	})
#define FORWARD_AT(version, missing, name, ...) FORWARD_TO("libibverbs.so.1", version, missing, name, __VA_ARGS__)
#define FORWARD(missing, name, ...) FORWARD_AT("IBVERBS_1.1", missing, name, __VA_ARGS__)

/* A list of devices: that of libibverbs before the array that the program has. */
struct list {
	struct ibv_device **theirs;
	struct ibv_device *devices[];
};

EXPORT struct ibv_device **ibv_get_device_list(int *num)
{
	int n = 0;
	struct ibv_device **theirs = FORWARD(NULL, ibv_get_device_list, &n), *own = softdev_device();
	if (!theirs && !own)
		return NULL;
	if (!theirs)
		n = 0; /* a kernel without RDMA is an error to libibverbs */
	struct list *list = calloc(1, sizeof *list + ((size_t)n + 2) * sizeof *list->devices);
	if (!list)
		return NULL;
	list->theirs = theirs;
	for (int i = 0; i < n; i++)
		list->devices[i] = theirs[i];
	if (own)
		list->devices[n++] = own;
	if (num)
		*num = n;
	return list->devices;
}

EXPORT void ibv_free_device_list(struct ibv_device **devices)
{
	struct list *list = (struct list *)((char *)devices - offsetof(struct list, devices));
	if (list->theirs)
		FORWARD((void)0, ibv_free_device_list, list->theirs);
	free(list);
}

EXPORT struct ibv_context *ibv_open_device(struct ibv_device *d)
{
	return softdev_is_device(d) ? softdev_open_device(d) : FORWARD(NULL, ibv_open_device, d);
}

EXPORT int ibv_close_device(struct ibv_context *c)
{
	return softdev_owns(c) ? softdev_close_device(c) : FORWARD(-1, ibv_close_device, c);
}

EXPORT __be64 ibv_get_device_guid(struct ibv_device *d)
{
	return softdev_is_device(d) ? softdev_get_device_guid(d) : FORWARD(0, ibv_get_device_guid, d);
}

EXPORT int ibv_get_device_index(struct ibv_device *d)
{
	return softdev_is_device(d) ? -1 : FORWARD_AT("IBVERBS_1.9", -1, ibv_get_device_index, d);
}

EXPORT int ibv_query_device(struct ibv_context *c, struct ibv_device_attr *attr)
{
	return softdev_owns(c) ? softdev_query_device(c, attr) : FORWARD(errno, ibv_query_device, c, attr);
}

/* Programs of old versions expect a shorter structure: they have fields up to the link layer. */
EXPORT int ibv_query_port(struct ibv_context *c, uint8_t port, struct _compat_ibv_port_attr *attr)
{
	if (softdev_owns(c))
		return softdev_query_port(c, port, (struct ibv_port_attr *)attr, offsetof(struct ibv_port_attr, port_cap_flags2));
	return FORWARD(errno, ibv_query_port, c, port, attr);
}

EXPORT int ibv_query_gid(struct ibv_context *c, uint8_t port, int index, union ibv_gid *gid)
{
	return softdev_owns(c) ? softdev_query_gid(c, port, index, gid) : FORWARD(-1, ibv_query_gid, c, port, index, gid);
}

EXPORT int _ibv_query_gid_ex(struct ibv_context *c, uint32_t port, uint32_t index, struct ibv_gid_entry *entry, uint32_t flags, size_t size)
{
	if (softdev_owns(c))
		return flags || size < sizeof *entry ? EINVAL : softdev_query_gid_entry(c, port, index, entry);
	return FORWARD_AT("IBVERBS_1.11", errno, _ibv_query_gid_ex, c, port, index, entry, flags, size);
}

EXPORT ssize_t _ibv_query_gid_table(struct ibv_context *c, struct ibv_gid_entry *entries, size_t max, uint32_t flags, size_t size)
{
	if (softdev_owns(c))
		return flags ? -EINVAL : softdev_query_gid_table(c, entries, max, size);
	return FORWARD_AT("IBVERBS_1.11", -errno, _ibv_query_gid_table, c, entries, max, flags, size);
}

/* A private function that ibv_devinfo uses; its type is not in libibverbs' public headers. */
EXPORT int ibv_query_gid_type(struct ibv_context *c, uint8_t port, unsigned index, int *type);
EXPORT int ibv_query_gid_type(struct ibv_context *c, uint8_t port, unsigned index, int *type)
{
	enum { ROCE_V2_SYSFS = 1 };
	if (!softdev_owns(c))
		return FORWARD_AT("IBVERBS_PRIVATE_34", -1, ibv_query_gid_type, c, port, index, type);
	struct ibv_gid_entry entry;
	if (softdev_query_gid_entry(c, port, index, &entry) != 0)
		return -1;
	*type = ROCE_V2_SYSFS;
	return 0;
}

EXPORT int ibv_query_pkey(struct ibv_context *c, uint8_t port, int index, __be16 *pkey)
{
	return softdev_owns(c) ? softdev_query_pkey(c, port, index, pkey) : FORWARD(-1, ibv_query_pkey, c, port, index, pkey);
}

EXPORT int ibv_get_pkey_index(struct ibv_context *c, uint8_t port, __be16 pkey)
{
	if (softdev_owns(c))
		return port == 1 && pkey == 0xffff ? 0 : -1;
	return FORWARD_AT("IBVERBS_1.5", -1, ibv_get_pkey_index, c, port, pkey);
}

EXPORT int ibv_get_async_event(struct ibv_context *c, struct ibv_async_event *event)
{
	return softdev_owns(c) ? softdev_get_async_event(c, event) : FORWARD(-1, ibv_get_async_event, c, event);
}

EXPORT void ibv_ack_async_event(struct ibv_async_event *event)
{
	if (softdev_owns(softdev_event_context(event)))
		softdev_ack_async_event(event);
	else
		FORWARD((void)0, ibv_ack_async_event, event);
}

EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *c)
{
	return softdev_owns(c) ? softdev_alloc_pd(c) : FORWARD(NULL, ibv_alloc_pd, c);
}

EXPORT int ibv_dealloc_pd(struct ibv_pd *pd)
{
	return softdev_owns(pd->context) ? softdev_dealloc_pd(pd) : FORWARD(errno, ibv_dealloc_pd, pd);
}

EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access)
{
	if (softdev_owns(pd->context))
		return softdev_reg_mr(pd, address, length, (uintptr_t)address, (unsigned)access);
	return FORWARD(NULL, ibv_reg_mr, pd, address, length, access);
}

EXPORT struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, int access)
{
	if (softdev_owns(pd->context))
		return softdev_reg_mr(pd, address, length, iova, (unsigned)access);
	return FORWARD_AT("IBVERBS_1.7", NULL, ibv_reg_mr_iova, pd, address, length, iova, access);
}

EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned access)
{
	if (softdev_owns(pd->context))
		return softdev_reg_mr(pd, address, length, iova, access);
	return FORWARD_AT("IBVERBS_1.8", NULL, ibv_reg_mr_iova2, pd, address, length, iova, access);
}

EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
	if (softdev_owns(pd->context)) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	return FORWARD_AT("IBVERBS_1.12", NULL, ibv_reg_dmabuf_mr, pd, offset, length, iova, fd, access);
}

EXPORT int ibv_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *address, size_t length, int access)
{
	if (softdev_owns(mr->context))
		return softdev_rereg_mr(mr, flags, pd, address, length, access);
	return FORWARD(IBV_REREG_MR_ERR_CMD, ibv_rereg_mr, mr, flags, pd, address, length, access);
}

EXPORT int ibv_dereg_mr(struct ibv_mr *mr)
{
	return softdev_owns(mr->context) ? softdev_dereg_mr(mr) : FORWARD(errno, ibv_dereg_mr, mr);
}

EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *c)
{
	return softdev_owns(c) ? softdev_create_comp_channel(c) : FORWARD_AT("IBVERBS_1.0", NULL, ibv_create_comp_channel, c);
}

EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
	return softdev_owns(channel->context) ? softdev_destroy_comp_channel(channel) : FORWARD_AT("IBVERBS_1.0", errno, ibv_destroy_comp_channel, channel);
}

EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *c, int cqe, void *cq_context, struct ibv_comp_channel *channel, int vector)
{
	if (softdev_owns(c))
		return softdev_create_cq(c, cqe, cq_context, channel, vector);
	return FORWARD(NULL, ibv_create_cq, c, cqe, cq_context, channel, vector);
}

EXPORT int ibv_resize_cq(struct ibv_cq *cq, int cqe)
{
	return softdev_owns(cq->context) ? softdev_resize_cq(cq, cqe) : FORWARD(errno, ibv_resize_cq, cq, cqe);
}

EXPORT int ibv_destroy_cq(struct ibv_cq *cq)
{
	return softdev_owns(cq->context) ? softdev_destroy_cq(cq) : FORWARD(errno, ibv_destroy_cq, cq);
}

EXPORT int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)
{
	if (softdev_owns(channel->context))
		return softdev_get_cq_event(channel, cq, cq_context);
	return FORWARD(-1, ibv_get_cq_event, channel, cq, cq_context);
}

EXPORT void ibv_ack_cq_events(struct ibv_cq *cq, unsigned n)
{
	if (softdev_owns(cq->context))
		softdev_ack_cq_events(cq, n);
	else
		FORWARD((void)0, ibv_ack_cq_events, cq, n);
}

EXPORT struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
	return softdev_owns(pd->context) ? softdev_create_srq(pd, attr) : FORWARD(NULL, ibv_create_srq, pd, attr);
}

EXPORT int ibv_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask)
{
	return softdev_owns(srq->context) ? softdev_modify_srq(srq, attr, mask) : FORWARD(errno, ibv_modify_srq, srq, attr, mask);
}

EXPORT int ibv_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr)
{
	return softdev_owns(srq->context) ? softdev_query_srq(srq, attr) : FORWARD(errno, ibv_query_srq, srq, attr);
}

EXPORT int ibv_destroy_srq(struct ibv_srq *srq)
{
	return softdev_owns(srq->context) ? softdev_destroy_srq(srq) : FORWARD(errno, ibv_destroy_srq, srq);
}

EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	return softdev_owns(pd->context) ? softdev_create_qp(pd, attr) : FORWARD(NULL, ibv_create_qp, pd, attr);
}

EXPORT int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	return softdev_owns(qp->context) ? softdev_modify_qp(qp, attr, mask) : FORWARD(errno, ibv_modify_qp, qp, attr, mask);
}

EXPORT int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	return softdev_owns(qp->context) ? softdev_query_qp(qp, attr, mask, init) : FORWARD(errno, ibv_query_qp, qp, attr, mask, init);
}

EXPORT int ibv_destroy_qp(struct ibv_qp *qp)
{
	return softdev_owns(qp->context) ? softdev_destroy_qp(qp) : FORWARD(errno, ibv_destroy_qp, qp);
}

EXPORT struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
	return softdev_owns(qp->context) ? softdev_qp_to_qp_ex(qp) : FORWARD_AT("IBVERBS_1.6", NULL, ibv_qp_to_qp_ex, qp);
}

EXPORT int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode opcode, uint32_t flags)
{
	return softdev_owns(qp->context) ? 0 : FORWARD_AT("IBVERBS_1.14", 0, ibv_query_qp_data_in_order, qp, opcode, flags);
}

EXPORT int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	return softdev_owns(qp->context) ? EOPNOTSUPP : FORWARD_AT("IBVERBS_1.10", errno, ibv_set_ece, qp, ece);
}

EXPORT int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	return softdev_owns(qp->context) ? EOPNOTSUPP : FORWARD_AT("IBVERBS_1.10", errno, ibv_query_ece, qp, ece);
}

EXPORT struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	return softdev_owns(pd->context) ? softdev_create_ah(pd, attr) : FORWARD(NULL, ibv_create_ah, pd, attr);
}

EXPORT int ibv_init_ah_from_wc(struct ibv_context *c, uint8_t port, struct ibv_wc *wc, struct ibv_grh *grh, struct ibv_ah_attr *attr)
{
	return softdev_owns(c) ? softdev_init_ah_from_wc(c, port, wc, grh, attr) : FORWARD(-1, ibv_init_ah_from_wc, c, port, wc, grh, attr);
}

EXPORT struct ibv_ah *ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *grh, uint8_t port)
{
	struct ibv_ah_attr attr;
	if (!softdev_owns(pd->context))
		return FORWARD(NULL, ibv_create_ah_from_wc, pd, wc, grh, port);
	int err = softdev_init_ah_from_wc(pd->context, port, wc, grh, &attr);
	errno = err ? err : errno;
	return err ? NULL : softdev_create_ah(pd, &attr);
}

EXPORT int ibv_destroy_ah(struct ibv_ah *ah)
{
	return softdev_owns(ah->context) ? softdev_destroy_ah(ah) : FORWARD(errno, ibv_destroy_ah, ah);
}

EXPORT int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	return softdev_owns(qp->context) ? EOPNOTSUPP : FORWARD(errno, ibv_attach_mcast, qp, gid, lid);
}

EXPORT int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	return softdev_owns(qp->context) ? EOPNOTSUPP : FORWARD(errno, ibv_detach_mcast, qp, gid, lid);
}

/* Objects of fared_soft0 belong to one process. */
static void *refuse_import(void)
{
	errno = EOPNOTSUPP;
	return NULL;
}

EXPORT struct ibv_context *ibv_import_device(int fd)
{
	/* -1 is the descriptor of fared_soft0's contexts. */
	return fd < 0 ? refuse_import() : FORWARD_AT("IBVERBS_1.10", NULL, ibv_import_device, fd);
}

EXPORT struct ibv_pd *ibv_import_pd(struct ibv_context *c, uint32_t handle)
{
	return softdev_owns(c) ? refuse_import() : FORWARD_AT("IBVERBS_1.10", NULL, ibv_import_pd, c, handle);
}

EXPORT void ibv_unimport_pd(struct ibv_pd *pd)
{
	if (softdev_owns(pd->context))
		refuse_import();
	else
		FORWARD_AT("IBVERBS_1.10", (void)0, ibv_unimport_pd, pd);
}

EXPORT struct ibv_mr *ibv_import_mr(struct ibv_pd *pd, uint32_t handle)
{
	return softdev_owns(pd->context) ? refuse_import() : FORWARD_AT("IBVERBS_1.10", NULL, ibv_import_mr, pd, handle);
}

EXPORT void ibv_unimport_mr(struct ibv_mr *mr)
{
	if (softdev_owns(mr->context))
		refuse_import();
	else
		FORWARD_AT("IBVERBS_1.10", (void)0, ibv_unimport_mr, mr);
}

EXPORT struct ibv_dm *ibv_import_dm(struct ibv_context *c, uint32_t handle)
{
	return softdev_owns(c) ? refuse_import() : FORWARD_AT("IBVERBS_1.13", NULL, ibv_import_dm, c, handle);
}

EXPORT void ibv_unimport_dm(struct ibv_dm *dm)
{
	if (softdev_owns(dm->context))
		refuse_import();
	else
		FORWARD_AT("IBVERBS_1.13", (void)0, ibv_unimport_dm, dm);
}

EXPORT int ibv_resolve_eth_l2_from_gid(struct ibv_context *c, struct ibv_ah_attr *attr, uint8_t mac[ETHERNET_LL_SIZE], uint16_t *vid)
{
	if (softdev_owns(c)) { /* the kernel resolves neighbors when it sends */
		errno = EOPNOTSUPP;
		return -1;
	}
	return FORWARD(-1, ibv_resolve_eth_l2_from_gid, c, attr, mac, vid);
}

/* alone reports whether fared_soft0 is the only device. */
static bool alone(void)
{
	int n = 0;
	struct ibv_device **theirs = FORWARD(NULL, ibv_get_device_list, &n);
	if (theirs)
		FORWARD((void)0, ibv_free_device_list, theirs);
	return n == 0 && softdev_device();
}

/* of_ucx reports whether code is UCX's, which looks for rdma_cm at its start and works without it, so that its users
 * need no line. */
static bool of_ucx(const void *code)
{
	Dl_info info;
	return dladdr(code, &info) && info.dli_fname && strstr(info.dli_fname, "/libuct_");
}

/* rdma_cm has its ports and connections in the kernel, which does not know fared_soft0. Every use of librdmacm begins
 * here, also that by identifiers without a channel. With a device of the kernel, the kernel itself refuses
 * fared_soft0's addresses (ENODEV); without one librdmacm would find no file, or listen in vain. */
EXPORT struct rdma_event_channel *rdma_create_event_channel(void);
EXPORT struct rdma_event_channel *rdma_create_event_channel(void)
{
	static bool reported;
	if (!alone())
		return FORWARD_TO("librdmacm.so.1", "RDMACM_1.0", NULL, rdma_create_event_channel);
	if (!of_ucx(__builtin_return_address(0)) && !__atomic_exchange_n(&reported, true, __ATOMIC_RELAXED))
		fprintf(stderr,
			"fared_soft0: rdma_cm is not supported: connect by the program's own sockets (perftest without -R), or use rdma_rxe, in a network "
			"namespace or a virtual machine (make vm)\n");
	errno = ENODEV;
	return NULL;
}

/* UCX uses a device only if the program may read and write its character device, which fared_soft0 does not have. No
 * other path is changed. The kernel has looked for the file first, so the path can be read. */
static bool device_file(const char *path)
{
	return errno == ENOENT && strcmp(path, "/dev/infiniband/fared_soft0") == 0 && softdev_device();
}

EXPORT int stat(const char *restrict path, struct stat *restrict out)
{
	int result = fstatat(AT_FDCWD, path, out, 0);
	return result != 0 && device_file(path) ? fstatat(AT_FDCWD, "/dev/null", out, 0) : result;
}

/* check_access is libc's access: its faccessat would call another function of the kernel, which filters of system calls
 * may refuse. */
static int check_access(const char *path, int mode)
{
#ifdef SYS_access
	return (int)syscall(SYS_access, path, mode);
#else
	return (int)syscall(SYS_faccessat, AT_FDCWD, path, mode);
#endif
}

EXPORT int access(const char *path, int mode)
{
	int result = check_access(path, mode);
	return result != 0 && device_file(path) ? check_access("/dev/null", mode) : result;
}
