#include "device.h"

#include "fared.h"
#include "guard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct ibv_device device = {.node_type = IBV_NODE_CA, .transport_type = IBV_TRANSPORT_IB, .name = "fared_soft0", .dev_name = "fared_soft0"};

struct ibv_device *softdev_device(void)
{
	return sd_gid(0) ? &device : NULL;
}

bool softdev_is_device(const struct ibv_device *d)
{
	return d == &device;
}

bool softdev_owns(const struct ibv_context *context)
{
	return context && context->device == &device;
}

__be64 softdev_get_device_guid(struct ibv_device *d)
{
	/* A locally administered EUI-64 from the first address. */
	uint8_t guid[8] = {0x02, 0, 0, 0xfa, 0, 0, 0, 0};
	const struct in6_addr *a = sd_gid(0);
	__be64 out;
	(void)d;
	for (int i = 0; a && i < 16; i++)
		guid[4 + i % 4] ^= a->s6_addr[i];
	memcpy(&out, guid, sizeof out);
	return out;
}

/* put writes a structure for a program whose version of it has size bytes. */
static void put(void *to, size_t size, const void *from, size_t known)
{
	memset(to, 0, size);
	memcpy(to, from, size < known ? size : known);
}

static int query_port_ex(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t size)
{
	return softdev_query_port(context, port, attr, size);
}

static int query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input, struct ibv_device_attr_ex *attr, size_t size)
{
	struct ibv_device_attr_ex full = {.phys_port_cnt_ex = 1};
	if ((input && input->comp_mask) || size < offsetof(struct ibv_device_attr_ex, comp_mask) + sizeof attr->comp_mask)
		return EINVAL;
	softdev_query_device(context, &full.orig_attr);
	full.device_cap_flags_ex = full.orig_attr.device_cap_flags;
	/* They are atomic for programs, too: the processor executes them. A plain swap is no operation of the device. */
	full.pci_atomic_caps.fetch_add = full.pci_atomic_caps.compare_swap = IBV_PCI_ATOMIC_OPERATION_8_BYTE_SIZE_SUP;
	put(attr, size, &full, sizeof full);
	return 0;
}

struct ibv_context *softdev_open_device(struct ibv_device *d)
{
	struct sd_context *c = calloc(1, sizeof *c);
	if (!c)
		return NULL;
	if (sd_events_open(&c->async) != 0) {
		free(c);
		return NULL;
	}
	c->dev = sd_device_open();
	if (!c->dev) {
		sd_events_close(&c->async);
		free(c);
		return NULL;
	}
	struct ibv_context *context = &c->verbs.context;
	c->verbs.sz = sizeof c->verbs;
	c->verbs.query_port = query_port_ex;
	c->verbs.query_device_ex = query_device_ex;
	c->verbs.create_qp_ex = sd_create_qp_ex;
	context->device = d;
	context->abi_compat = __VERBS_ABI_IS_EXTENDED;
	context->cmd_fd = -1;
	context->async_fd = c->async.fd;
	context->num_comp_vectors = 1;
	context->ops.poll_cq = sd_poll_cq;
	context->ops.req_notify_cq = sd_req_notify_cq;
	context->ops.post_send = sd_post_send;
	context->ops.post_recv = sd_post_recv;
	context->ops.post_srq_recv = sd_post_srq_recv;
	pthread_mutex_init(&context->mutex, NULL);
	return context;
}

int softdev_close_device(struct ibv_context *context)
{
	struct sd_context *c = sd_context_of(context);
	guard_begin();
	sd_device_close(c->dev);
	sd_events_close(&c->async);
	guard_end();
	pthread_mutex_destroy(&context->mutex);
	free(c);
	return 0;
}

int softdev_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	memset(attr, 0, sizeof *attr);
	snprintf(attr->fw_ver, sizeof attr->fw_ver, "%s", fared_version());
	attr->node_guid = attr->sys_image_guid = softdev_get_device_guid(context->device);
	/* The prefix of the GUID, which is one of local administration: no registered vendor. */
	attr->vendor_id = 0x020000;
	attr->vendor_part_id = attr->hw_ver = 1;
	attr->max_mr_size = UINT64_MAX;
	attr->page_size_cap = 0xfffffffffffff000;
	attr->max_qp = SD_MAX_QP;
	attr->max_qp_wr = SD_MAX_WR;
	attr->device_cap_flags = IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_SYS_IMAGE_GUID;
	attr->max_sge = attr->max_sge_rd = attr->max_srq_sge = SD_MAX_SGE;
	attr->max_cq = attr->max_pd = attr->max_ah = attr->max_srq = 32768;
	attr->max_cqe = SD_MAX_CQE;
	attr->max_mr = 1 << 22;
	attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = SD_MAX_READS;
	attr->max_res_rd_atom = SD_MAX_READS * attr->max_qp;
	attr->atomic_cap = IBV_ATOMIC_HCA; /* as NICs; UCX 1.13 has no atomics of devices with IBV_ATOMIC_GLOB */
	attr->max_srq_wr = SD_MAX_WR;
	attr->max_pkeys = 1;
	attr->local_ca_ack_delay = 15;
	attr->phys_port_cnt = 1;
	return 0;
}

int softdev_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t size)
{
	unsigned ifindex;
	struct ibv_port_attr full = {.state = IBV_PORT_ACTIVE, .max_mtu = IBV_MTU_4096, .pkey_tbl_len = 1, .max_msg_sz = 1u << 31, .max_vl_num = 1};
	const struct in6_addr *gid = sd_gid(0);
	(void)context;
	if (port != 1 || !gid)
		return EINVAL;
	uint32_t mtu = sd_payload_mtu(sd_link_mtu(gid, &ifindex), sd_is_ipv4(gid));
	full.active_mtu = IBV_MTU_256;
	while (128u << full.active_mtu < mtu)
		full.active_mtu++;
	full.gid_tbl_len = (int)sd_gid_count();
	full.port_cap_flags = 1 << 26; /* IP-based GIDs */
	full.active_width = 2;         /* 4x */
	full.active_speed = 32;        /* 25 Gbit/s a lane */
	full.phys_state = 5;           /* link up */
	full.link_layer = IBV_LINK_LAYER_ETHERNET;
	full.flags = IBV_QPF_GRH_REQUIRED;
	put(attr, size, &full, sizeof full);
	return 0;
}

int softdev_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
	const struct in6_addr *a = port == 1 && index >= 0 ? sd_gid((uint32_t)index) : NULL;
	(void)context;
	if (!a) {
		errno = EINVAL;
		return -1;
	}
	memcpy(gid, a, sizeof *gid);
	return 0;
}

int softdev_query_gid_entry(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry)
{
	const struct in6_addr *a = port == 1 ? sd_gid(index) : NULL;
	unsigned ifindex;
	(void)context;
	if (!a)
		return EINVAL;
	sd_link_mtu(a, &ifindex);
	*entry = (struct ibv_gid_entry){.gid_index = index, .port_num = 1, .gid_type = IBV_GID_TYPE_ROCE_V2, .ndev_ifindex = ifindex};
	memcpy(&entry->gid, a, sizeof entry->gid);
	return 0;
}

ssize_t softdev_query_gid_table(struct ibv_context *context, void *entries, size_t max, size_t size)
{
	struct ibv_gid_entry entry;
	if (sd_gid_count() > max || size == 0)
		return -EINVAL;
	for (uint32_t i = 0; softdev_query_gid_entry(context, 1, i, &entry) == 0; i++)
		put((char *)entries + i * size, size, &entry, sizeof entry);
	return sd_gid_count();
}

int softdev_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
	(void)context;
	if (port != 1 || index != 0) {
		errno = EINVAL;
		return -1;
	}
	*pkey = 0xffff;
	return 0;
}
