/* The functions that programs call in place of those of libibverbs, and the way to these. Every other symbol of
 * libibverbs is found behind this library, which needs it: in the global scope if it is preloaded, and among the
 * dependencies of its handle if a program opens it by name. */
#include "internal.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* The kernel's form of the attributes, of which nothing is read here. */
struct ib_uverbs_qp_attr;

#define EXPORT __attribute__((visibility("default")))

/* A row for each function: version, type of the result, name, parameters. The version script has the same names. */
#define FUNCTIONS(ROW)                                                                                           \
	ROW("IBVERBS_1.0", void, ibv_copy_qp_attr_from_kern, (struct ibv_qp_attr *, struct ib_uverbs_qp_attr *)) \
	ROW("IBVERBS_1.1", int, ibv_close_device, (struct ibv_context *))                                        \
	ROW("IBVERBS_1.1", int, ibv_destroy_qp, (struct ibv_qp *))                                               \
	ROW("IBVERBS_1.1", int, ibv_modify_qp, (struct ibv_qp *, struct ibv_qp_attr *, int))

enum function {
#define ROW(version, type, name, parameters) INDEX_##name,
	FUNCTIONS(ROW)
#undef ROW
		COUNT
};

static const struct {
	const char *name, *version;
} functions[COUNT] = {
#define ROW(version, type, name, parameters) {#name, version},
	FUNCTIONS(ROW)
#undef ROW
};

static _Atomic(void *) found[COUNT];

/* Finds the functions early: a child of fork that looks them up waits forever if another thread of the parent was
 * loading a library. */
__attribute__((constructor)) static void find(void)
{
	for (int f = 0; f < COUNT; f++)
		atomic_store_explicit(&found[f], dlvsym(RTLD_NEXT, functions[f].name, functions[f].version), memory_order_release);
}

/* Returns the next definition of a function, which is that of another preloaded library or of libibverbs. */
static void *next(enum function f)
{
	void *function = atomic_load_explicit(&found[f], memory_order_acquire);
	if (!function) {
		function = dlvsym(RTLD_NEXT, functions[f].name, functions[f].version);
		if (!function)
			abort(); /* libibverbs has had these functions since 2006, and this library does not load without it */
		atomic_store_explicit(&found[f], function, memory_order_release);
	}
	return function;
}

#define ROW(version, type, name, parameters)   \
	typedef type(*type_##name) parameters; \
	EXPORT type name parameters;
FUNCTIONS(ROW)
#undef ROW

#define NEXT(name) ((type_##name)next(INDEX_##name))

/* The attributes that this thread has last received from the kernel: librdmacm passes them on, and their flow label is
 * the choice of the kernel. */
static _Thread_local struct {
	const struct ibv_qp_attr *attr;
	uint32_t label;
} from_kernel;

EXPORT void ibv_copy_qp_attr_from_kern(struct ibv_qp_attr *attr, struct ib_uverbs_qp_attr *kernel)
{
	NEXT(ibv_copy_qp_attr_from_kern)(attr, kernel);
	from_kernel.attr = attr;
	from_kernel.label = attr->ah_attr.grh.flow_label;
}

/* Returns whether the label is one that the program has chosen. A value above 20 bits is no label: UCX means by
 * 0xffffffff that none is chosen. */
static bool own_label(const struct ibv_qp_attr *attr)
{
	uint32_t label = attr->ah_attr.grh.flow_label;
	return label && label <= 0xfffff && !(attr == from_kernel.attr && label == from_kernel.label);
}

EXPORT int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	struct ibv_qp_attr labeled;
	struct ibv_qp_attr *use = attr;
	/* A device without one of the kernel, as fared_soft0, chooses its source ports itself. */
	bool connected = (qp->qp_type == IBV_QPT_RC || qp->qp_type == IBV_QPT_UC) && qp->context->cmd_fd >= 0;
	if (connected && (mask & IBV_QP_AV) && attr->ah_attr.is_global) {
		uint32_t label = 0;
		if (own_label(attr))
			slots_own_label(qp);
		else
			label = slots_label(qp, attr);
		if (label) {
			/* The structure has grown: a program that does not set the last member may have a shorter one. */
			memcpy(&labeled, attr, mask & IBV_QP_RATE_LIMIT ? sizeof labeled : offsetof(struct ibv_qp_attr, rate_limit));
			labeled.ah_attr.grh.flow_label = label;
			use = &labeled;
		}
	}
	int error = NEXT(ibv_modify_qp)(qp, use, mask);
	if (connected && (mask & IBV_QP_STATE))
		slots_changed(qp, attr, mask, error != 0);
	return error;
}

int next_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	return NEXT(ibv_modify_qp)(qp, attr, mask);
}

EXPORT int ibv_destroy_qp(struct ibv_qp *qp)
{
	struct queue_pair *q = slots_take(qp);
	int error = NEXT(ibv_destroy_qp)(qp);
	slots_end(q, error == 0);
	return error;
}

EXPORT int ibv_close_device(struct ibv_context *context)
{
	slots_forget(context);
	return NEXT(ibv_close_device)(context);
}
