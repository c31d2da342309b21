#include "device.h"

#include "fared.h"
#include "guard.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

static struct in6_addr gids[SD_MAX_GIDS];
static uint32_t gid_count;
static pthread_once_t gids_once = PTHREAD_ONCE_INIT;

static void add_gid(const struct fared_address *a)
{
	if (gid_count < SD_MAX_GIDS)
		memcpy(&gids[gid_count++], a->bytes, 16);
}

static void find_gids(void)
{
	struct fared_address a;
	const char *list = getenv("FARED_SOFT_ADDRESS");
	char copy[4096], *rest = copy, *text;
	if (list && *list) {
		snprintf(copy, sizeof copy, "%s", list);
		while ((text = strtok_r(rest, ", ", &rest)))
			if (fared_parse_address(text, &a) == 0)
				add_gid(&a);
			else
				fprintf(stderr, "fared_soft0: FARED_SOFT_ADDRESS has no address in \"%s\"\n", text);
		return;
	}
	struct fared_table *table;
	if (fared_open(&table, NULL) != 0)
		return;
	for (uint32_t i = 0; fared_get_source(table, i, &a) == 0; i++)
		add_gid(&a);
	fared_close(table);
}

static void read_gids(void)
{
	guard_begin();
	find_gids();
	guard_end();
}

const struct in6_addr *sd_gid(uint32_t index)
{
	pthread_once(&gids_once, read_gids);
	return index < gid_count ? &gids[index] : NULL;
}

uint32_t sd_gid_count(void)
{
	pthread_once(&gids_once, read_gids);
	return gid_count;
}

int sd_resolve(const struct ibv_ah_attr *attr, struct sd_path *path)
{
	const struct in6_addr *source = sd_gid(attr->grh.sgid_index);
	if (!attr->is_global || !source)
		return EINVAL;
	path->flow.source = *source;
	memcpy(&path->flow.destination, &attr->grh.dgid, sizeof path->flow.destination);
	path->flow.destination_port = SD_UDP_PORT;
	path->tos = (uint8_t)((attr->grh.traffic_class & ~3) | 2); /* ECT(0) */
	return sd_is_ipv4(source) == sd_is_ipv4(&path->flow.destination) ? 0 : EINVAL;
}

uint32_t sd_payload_mtu(uint32_t link_mtu, bool v4)
{
	uint32_t overhead = (v4 ? 20 : 40) + 8 + SD_MAX_HEADER + SD_ICRC_SIZE;
	for (uint32_t mtu = SD_MAX_MTU; mtu >= 256; mtu /= 2)
		if (link_mtu >= mtu + overhead)
			return mtu;
	return 0;
}

uint32_t sd_link_mtu(const struct in6_addr *gid, unsigned *ifindex)
{
	struct ifaddrs *list = NULL, *i;
	struct ifreq request;
	uint32_t least = 0, own = 0;
	guard_begin(); /* a canceled thread would leave the socket open */
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	bool v4 = sd_is_ipv4(gid), host = v4 ? gid->s6_addr[12] == 127 : IN6_IS_ADDR_LOOPBACK(gid);
	*ifindex = 0;
	if (fd >= 0 && getifaddrs(&list) != 0)
		list = NULL;
	for (i = list; i; i = i->ifa_next) {
		snprintf(request.ifr_name, sizeof request.ifr_name, "%s", i->ifa_name);
		if (!(i->ifa_flags & IFF_UP) || ioctl(fd, SIOCGIFMTU, &request) != 0)
			continue;
		uint32_t mtu = (uint32_t)request.ifr_mtu;
		bool loopback = i->ifa_flags & IFF_LOOPBACK, match = false;
		if (i->ifa_addr && i->ifa_addr->sa_family == AF_INET && v4)
			match = memcmp(&((struct sockaddr_in *)i->ifa_addr)->sin_addr, &gid->s6_addr[12], 4) == 0;
		else if (i->ifa_addr && i->ifa_addr->sa_family == AF_INET6 && !v4)
			match = memcmp(&((struct sockaddr_in6 *)i->ifa_addr)->sin6_addr, gid, 16) == 0;
		if (match)
			*ifindex = if_nametoindex(i->ifa_name);
		if (match && !loopback)
			own = mtu;
		if (!loopback && (least == 0 || mtu < least))
			least = mtu;
	}
	freeifaddrs(list);
	if (fd >= 0)
		close(fd);
	guard_end();
	if (own)
		return own;
	return host || least == 0 ? 65536 : least;
}
