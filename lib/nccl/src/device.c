#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "net.h"
#include "verbs.h"

struct settings settings;

static struct device *devices;
static int count;

/* number reads a decimal number of the environment within bounds. */
static bool number(const char *name, uint32_t *out, uint32_t least, uint32_t greatest)
{
	const char *text = getenv(name);
	if (!text || !*text)
		return true;
	char *end;
	errno = 0;
	unsigned long n = strtoul(text, &end, 10);
	if (errno || *end || n < least || n > greatest) {
		WARN("%s is \"%s\": write a number from %u to %u", name, text, least, greatest);
		return false;
	}
	*out = (uint32_t)n;
	return true;
}

/* choice reads one of two words of the environment. */
static bool choice(const char *name, bool *out, const char *no, const char *yes)
{
	const char *text = getenv(name);
	if (!text || !*text)
		return true;
	*out = strcasecmp(text, yes) == 0;
	if (*out || strcasecmp(text, no) == 0)
		return true;
	WARN("%s is \"%s\": write %s or %s", name, text, no, yes);
	return false;
}

/* transport reads FARED_NCCL_TRANSPORT. */
static bool transport(void)
{
	const char *text = getenv("FARED_NCCL_TRANSPORT");
	settings.automatic = !text || !*text || strcasecmp(text, "auto") == 0;
	settings.transports = TRANSPORT_TCP;
	if (settings.automatic)
		settings.transports |= TRANSPORT_VERBS;
	else if (strcasecmp(text, "verbs") == 0)
		settings.transports = TRANSPORT_VERBS;
	else if (strcasecmp(text, "tcp") != 0) {
		WARN("FARED_NCCL_TRANSPORT is \"%s\": write auto, tcp or verbs", text);
		return false;
	}
	return true;
}

static bool read_settings(void)
{
	settings = (struct settings){.first_port = 4800, .last_port = 5055, .stripe = 65536, .lanes = 1, .stall_ms = 250, .patience_ms = 60000};
	uint32_t seconds = settings.patience_ms / 1000;
	bool good = number("FARED_NCCL_STRIPE", &settings.stripe, LEAST_STRIPE, 1 << 20);
	good &= number("FARED_NCCL_LANES", &settings.lanes, 1, 8);
	good &= number("FARED_NCCL_STALL_MS", &settings.stall_ms, 10, 60000);
	good &= number("FARED_NCCL_TIMEOUT", &seconds, 1, 86400);
	settings.patience_ms = seconds * 1000;
	good &= choice("FARED_NCCL_STRIPING", &settings.equal, "share", "equal");
	good &= choice("FARED_NCCL_DEVICES", &settings.planes, "gpu", "plane");
	good &= transport();
	const char *ports = getenv("FARED_NCCL_PORTS");
	if (ports && *ports) {
		unsigned first, last;
		char rest;
		if (sscanf(ports, "%u-%u%c", &first, &last, &rest) != 2 || first < 1 || last < first || last > 65535) {
			WARN("FARED_NCCL_PORTS is \"%s\": write FIRST-LAST, such as 4800-5055", ports);
			return false;
		}
		settings.first_port = (uint16_t)first;
		settings.last_port = (uint16_t)last;
	}
	return good;
}

/* speed_of reads the speed of a netdev in Mbit/s; 0 is unknown, as of a netdev without carrier. */
static int speed_of(const char *netdev)
{
	char path[128];
	snprintf(path, sizeof path, "/sys/class/net/%s/speed", netdev);
	FILE *f = fopen(path, "re");
	int speed = 0;
	if (f) {
		if (fscanf(f, "%d", &speed) != 1 || speed < 0)
			speed = 0;
		fclose(f);
	}
	return speed;
}

static char *pci_path_of(const char *netdev)
{
	char path[128];
	snprintf(path, sizeof path, "/sys/class/net/%s/device", netdev);
	return realpath(path, NULL);
}

static uint64_t hash(const void *data, size_t size)
{
	uint64_t h = 0xcbf29ce484222325; /* FNV-1a */
	for (size_t i = 0; i < size; i++)
		h = (h ^ ((const uint8_t *)data)[i]) * 0x100000001b3;
	return h;
}

/* reaches_planes finds the RDMA ports with a GID of a device's source, and returns whether each plane has one; if not
 * it writes the reason. */
static bool reaches_planes(struct device *d, const struct fared_table *table, const struct fared_status *status, char *reason, size_t size)
{
	for (int i = 0; i < rdma_count; i++)
		d->ports |= (uint32_t)(verbs_gid(&rdmas[i], d->source.bytes) >= 0) << i;
	for (uint32_t p = 0; p < status->planes; p++) {
		if (verbs_port_of(table, (uint16_t)p, FARED_NO_SUB_PORT, &d->source) < 0) {
			snprintf(reason, size, "plane %s has no active RDMA port with the GID of %s: fared rdma explains", fared_plane_name(table, p), d->name);
			return false;
		}
	}
	return true;
}

/* describe fills in a device. Its sub-ports are those whose RDMA port has a GID of the source, or all if the server has
 * one source. */
static void describe(struct device *d, const struct fared_table *table, const struct fared_status *status)
{
	char address[46] = "";
	fared_address_text(&d->source, address, sizeof address);
	d->guid = hash(&d->source, sizeof d->source) + (uint64_t)(d->plane + 1);
	if (d->plane == ALL_PLANES)
		snprintf(d->name, sizeof d->name, "fared-%s", address);
	else
		snprintf(d->name, sizeof d->name, "fared-%s-%.15s", address, fared_plane_name(table, (uint32_t)d->plane));
	for (uint32_t i = 0; i < status->sub_ports; i++) {
		struct fared_sub_port s;
		if (fared_get_sub_port(table, i, &s) || (d->plane != ALL_PLANES && s.plane != (uint32_t)d->plane))
			continue;
		if (status->sources > 1 && fared_gid_index(table, i, &d->source) < 0)
			continue;
		d->speed += speed_of(s.device);
		if (!d->pci_path)
			d->pci_path = pci_path_of(s.device);
	}
	if (d->speed <= 0)
		d->speed = 10000; /* NCCL's own sockets assume this for a netdev that does not know its speed */
}

const char *slots_path(void)
{
	const char *path = getenv("FARED_SLOTS");
	return path && *path ? path : FARED_DEFAULT_PATH;
}

/* add_device makes a device of a source and a plane, unless no transport reaches its planes. */
static void add_device(struct device *d, const struct fared_table *table, const struct fared_status *status, bool verbs, char *reason, size_t size)
{
	describe(d, table, status);
	d->transports = settings.transports;
	if (!verbs || !reaches_planes(d, table, status, reason, size))
		d->transports &= ~TRANSPORT_VERBS;
	if (!d->transports) {
		WARN("FARED_NCCL_TRANSPORT is verbs: %s", reason);
		*d = (struct device){0};
		return;
	}
	INFO("device %d: %s, %d Mbit/s, by %s", count, d->name, d->speed, d->transports & TRANSPORT_VERBS ? "verbs" : "TCP");
	count++;
}

ncclResult_t devices_init(void)
{
	if (count)
		return ncclSuccess;
	if (!read_settings())
		return ncclInvalidUsage;
	struct fared_table *table;
	struct fared_status status;
	int error = fared_open(&table, NULL);
	if (error) {
		/* Without fared on the server another network is what is wanted; with a mount of a deleted directory it is
		 * not. */
		log_line(error == FARED_E_DELETED ? NCCL_LOG_WARN : NCCL_LOG_INFO, NCCL_INIT | NCCL_NET, __FILE__, __LINE__,
			"%s: %s; NCCL uses another network", slots_path(), fared_error_text(error));
		return ncclSystemError;
	}
	error = fared_get_status(table, &status);
	char reason[256] = "";
	bool verbs = !error && settings.transports & TRANSPORT_VERBS && verbs_open(!settings.automatic, reason, sizeof reason), used = false;
	if (!error && !verbs && !(settings.transports & TRANSPORT_TCP)) {
		WARN("FARED_NCCL_TRANSPORT is verbs: %s", reason);
		fared_close(table);
		return ncclSystemError;
	}
	uint32_t per_source = settings.planes ? status.planes : 1;
	if (!error && status.sources && per_source)
		devices = calloc((size_t)status.sources * per_source, sizeof *devices);
	for (uint32_t i = 0; devices && i < status.sources; i++) {
		for (uint32_t p = 0; p < per_source; p++) {
			struct device *d = &devices[count];
			if (fared_get_source(table, i, &d->source))
				continue;
			d->rail = (int)i;
			d->plane = settings.planes ? (int)p : ALL_PLANES;
			add_device(d, table, &status, verbs, reason, sizeof reason);
			used |= d->transports & TRANSPORT_VERBS;
		}
	}
	if (count)
		INFO("GPUDirect RDMA is not offered: %s, so NCCL copies through memory of the host",
			used ? "the flush that GPUs before Hopper need after a receive is missing" : "TCP carries memory of the host alone");
	if (verbs && !used)
		verbs_close();
	fared_close(table);
	if (!count && devices && status.sources)
		return ncclSystemError;
	if (!count) {
		WARN("the slot table has no loopback of this server: is \"fared run\" configured with one?");
		return ncclSystemError;
	}
	return ncclSuccess;
}

int devices_count(void)
{
	return count;
}

const struct device *device_get(int i)
{
	return i >= 0 && i < count ? &devices[i] : NULL;
}
