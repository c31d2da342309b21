/* The other end of TCP-AO, in C against the kernel's interface (include/uapi/linux/tcp.h of Linux 6.7 to 6.12): the structures stand here
 * because headers of older systems lack them.
 *
 *   ao layout                                  the octets of both structures, with every field set
 *   ao listen  US PEER PORT ALG KEY SND RCV    wait for one connection, then for the marker of a BGP message
 *   ao connect US PEER PORT ALG KEY SND RCV    connect, then wait for the same; an empty KEY signs nothing
 *
 * Output: "no" and an errno when the kernel refuses the key, "ready" before waiting, and at the end "marker" with the kernel's counts of
 * good and bad signatures, or "nothing" with an errno. */
#include <arpa/inet.h>
#include <errno.h>
#include <linux/types.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

struct ao_add {
	struct sockaddr_storage addr;
	char alg_name[64];
	__s32 ifindex;
	__u32 set_current : 1, set_rnext : 1, reserved : 30;
	__u16 reserved2;
	__u8 prefix, sndid, rcvid, maclen, keyflags, keylen, key[80];
} __attribute__((aligned(8)));

struct ao_info {
	__u32 set_current : 1, set_rnext : 1, ao_required : 1, set_counters : 1, accept_icmps : 1, reserved : 27;
	__u16 reserved2;
	__u8 current_key, rnext;
	__u64 pkt_good, pkt_bad, pkt_key_not_found, pkt_ao_required, pkt_dropped_icmp;
} __attribute__((aligned(8)));

static void dump(const void *p, size_t n)
{
	for (size_t i = 0; i < n; i++)
		printf("%02x", ((const uint8_t *)p)[i]);
	puts("");
}

static struct ao_add add(int family, const char *peer, const char *alg, const char *key, int snd, int rcv, int current)
{
	struct ao_add a;
	memset(&a, 0, sizeof a);
	if (family == AF_INET) {
		struct sockaddr_in *in = (void *)&a.addr;
		in->sin_family = AF_INET;
		inet_pton(AF_INET, peer, &in->sin_addr);
		a.prefix = 32;
	} else {
		struct sockaddr_in6 *in6 = (void *)&a.addr;
		in6->sin6_family = AF_INET6;
		inet_pton(AF_INET6, peer, &in6->sin6_addr);
		a.prefix = strncmp(peer, "::ffff:", 7) ? 128 : 32;
	}
	strcpy(a.alg_name, alg);
	a.set_current = a.set_rnext = current;
	a.sndid = snd;
	a.rcvid = rcv;
	a.maclen = 12;
	a.keylen = strlen(key);
	memcpy(a.key, key, a.keylen);
	return a;
}

static int layout(void)
{
	struct ao_add a = add(AF_INET, "10.1.2.3", "hmac(sha1)", "the key", 200, 100, 1);
	dump(&a, sizeof a);
	a = add(AF_INET6, "::ffff:10.1.2.3", "cmac(aes128)", "0123456789", 1, 2, 0);
	dump(&a, sizeof a);
	a = add(AF_INET6, "fd00::9", "cmac(aes128)", "", 0, 255, 0);
	dump(&a, sizeof a);
	struct ao_info i;
	memset(&i, 0, sizeof i);
	i.ao_required = 1;
	dump(&i, sizeof i);
	return 0;
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc == 2)
		return layout();
	int listening = !strcmp(argv[1], "listen"), one = 1;
	struct sockaddr_in us = {.sin_family = AF_INET}, peer = us;
	inet_pton(AF_INET, argv[2], &us.sin_addr);
	inet_pton(AF_INET, argv[3], &peer.sin_addr);
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	if (*argv[6]) {
		struct ao_add a = add(AF_INET, argv[3], argv[5], argv[6], atoi(argv[7]), atoi(argv[8]), !listening);
		if (setsockopt(fd, IPPROTO_TCP, 38, &a, sizeof a))
			return printf("no %d\n", errno), 0;
	}
	struct timeval patience = {.tv_sec = 12}; /* of accept, connect and read */
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
	patience.tv_sec = 6;
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
	(listening ? &us : &peer)->sin_port = htons(atoi(argv[4]));
	if (bind(fd, (void *)&us, sizeof us) || (listening && listen(fd, 1)))
		return perror("bind"), 1;
	puts("ready");
	if (listening)
		fd = accept(fd, NULL, NULL);
	else if (connect(fd, (void *)&peer, sizeof peer))
		return printf("nothing %d\n", errno), 0;
	uint8_t got[16], want[16];
	memset(want, 0xff, sizeof want);
	if (fd < 0 || recv(fd, got, sizeof got, MSG_WAITALL) != sizeof got || memcmp(got, want, sizeof got))
		return printf("nothing %d\n", errno), 0;
	struct ao_info i;
	memset(&i, 0, sizeof i);
	socklen_t n = sizeof i;
	if (*argv[6] && getsockopt(fd, IPPROTO_TCP, 40, &i, &n))
		return perror("TCP_AO_INFO"), 1;
	printf("marker good=%llu bad=%llu\n", (unsigned long long)i.pkt_good, (unsigned long long)i.pkt_bad);
	return 0;
}
