#include "verbs.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"

#define LIBRARY "libibverbs.so.1"
#define SOFTWARE "fared_soft0"
#define FIRST_PORT 49152
#define MOST_GIDS 256

struct verbs verbs;
struct rdma rdmas[MAX_RDMA];
int rdma_count;

/* symbol returns the definition of a function that the program itself would call, such as that of a preloaded library,
 * or else that of libibverbs. */
static void *symbol(void *library, const char *name, const char *version)
{
	void *f = dlvsym(RTLD_DEFAULT, name, version);
	return f ? f : dlvsym(library, name, version);
}

static bool load(char *reason, size_t size)
{
	static void *library;
	if (library)
		return true;
	void *opened = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
	if (!opened) {
		snprintf(reason, size, "%s", dlerror());
		return false;
	}
	const char *missing = NULL;
#define ROW(name, version)                                                      \
	if (!(verbs.name = (__typeof__(name) *)symbol(opened, #name, version))) \
		missing = #name;
	VERBS_FUNCTIONS(ROW)
#undef ROW
	verbs.ibv_reg_dmabuf_mr = (__typeof__(ibv_reg_dmabuf_mr) *)symbol(opened, "ibv_reg_dmabuf_mr", "IBVERBS_1.12");
	if (missing) {
		snprintf(reason, size, "%s has no %s: rdma-core 32 or later is needed", LIBRARY, missing);
		dlclose(opened);
		return false;
	}
	library = opened;
	return true;
}

static bool open_port(struct ibv_device *d, uint8_t port)
{
	struct rdma *r = &rdmas[rdma_count];
	struct ibv_port_attr attributes = {0};
	*r = (struct rdma){.kind = SOURCE_RDMA, .port = port};
	snprintf(r->name, sizeof r->name, "%s", d->name);
	r->context = verbs.ibv_open_device(d);
	if (!r->context)
		return false;
	if (!verbs.ibv_query_port(r->context, port, (struct _compat_ibv_port_attr *)&attributes) && attributes.state == IBV_PORT_ACTIVE &&
		attributes.link_layer == IBV_LINK_LAYER_ETHERNET) {
		r->mtu = attributes.active_mtu;
		r->pd = verbs.ibv_alloc_pd(r->context);
		r->channel = r->pd ? verbs.ibv_create_comp_channel(r->context) : NULL;
		if (r->channel && fcntl(r->channel->fd, F_SETFL, fcntl(r->channel->fd, F_GETFL) | O_NONBLOCK) == 0) {
			rdma_count++;
			return true;
		}
	}
	if (r->channel)
		verbs.ibv_destroy_comp_channel(r->channel);
	if (r->pd)
		verbs.ibv_dealloc_pd(r->pd);
	verbs.ibv_close_device(r->context);
	return false;
}

static uint8_t ports_of(struct ibv_device *d)
{
	struct ibv_device_attr attributes = {0};
	struct ibv_context *context = verbs.ibv_open_device(d);
	if (!context)
		return 0;
	if (verbs.ibv_query_device(context, &attributes))
		attributes.phys_port_cnt = 0;
	verbs.ibv_close_device(context);
	return attributes.phys_port_cnt;
}

bool verbs_open(bool software, char *reason, size_t size)
{
	if (!load(reason, size))
		return false;
	int n = 0;
	struct ibv_device **list = verbs.ibv_get_device_list(&n);
	for (int i = 0; list && i < n; i++) {
		if (!software && strcmp(list[i]->name, SOFTWARE) == 0)
			continue;
		uint8_t ports = ports_of(list[i]);
		for (uint8_t p = 1; p <= ports && rdma_count < MAX_RDMA; p++)
			open_port(list[i], p);
	}
	if (list)
		verbs.ibv_free_device_list(list);
	if (!rdma_count)
		snprintf(reason, size, "no RDMA device has an active Ethernet port");
	return rdma_count > 0;
}

void verbs_close(void)
{
	while (rdma_count) {
		struct rdma *r = &rdmas[--rdma_count];
		verbs.ibv_destroy_comp_channel(r->channel);
		verbs.ibv_dealloc_pd(r->pd);
		verbs.ibv_close_device(r->context);
	}
}

int verbs_gid(const struct rdma *r, const uint8_t address[16])
{
	struct ibv_gid_entry entries[MOST_GIDS];
	ssize_t n = verbs._ibv_query_gid_table(r->context, entries, MOST_GIDS, 0, sizeof entries[0]);
	for (ssize_t i = 0; i < n; i++) {
		if (entries[i].port_num == r->port && entries[i].gid_type == IBV_GID_TYPE_ROCE_V2 && memcmp(entries[i].gid.raw, address, 16) == 0)
			return (int)entries[i].gid_index;
	}
	return -1;
}

static int named(const struct fared_sub_port *s)
{
	for (int i = 0; i < rdma_count; i++) {
		if (strcmp(rdmas[i].name, s->rdma_device) == 0 && rdmas[i].port == s->rdma_port)
			return i;
	}
	return -1;
}

int verbs_port_of(const struct fared_table *table, uint16_t plane, uint16_t sub_port, const struct fared_address *source)
{
	struct fared_status status;
	bool any = true;
	for (uint32_t i = 0; table && !fared_get_status(table, &status) && i < status.sub_ports; i++) {
		struct fared_sub_port s;
		int r = fared_get_sub_port(table, i, &s) ? -1 : named(&s);
		if (r < 0)
			continue;
		any = false;
		if ((sub_port == FARED_NO_SUB_PORT ? s.plane == plane : i == sub_port) && verbs_gid(&rdmas[r], source->bytes) >= 0)
			return r;
	}
	for (int r = 0; any && r < rdma_count; r++) {
		if (verbs_gid(&rdmas[r], source->bytes) >= 0)
			return r;
	}
	return -1;
}

uint32_t verbs_label(uint16_t source_port)
{
	if (source_port < FIRST_PORT)
		return 0;
	return source_port == FIRST_PORT ? 0x4001 : source_port - FIRST_PORT; /* 0 would mean that no label is set */
}
