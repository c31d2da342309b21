/* The least that a transfer over UDP takes of this kernel: datagrams of fared_soft0's size, sent and received in the
 * kernel's largest groups, without a copy, a checksum or a protocol of the device. It writes a line as perftest does.
 *
 *	floor -p PORT -n MESSAGES [ADDRESS]     with an address the sender, else the receiver */
#include "../../tests/check.h"

#include <arpa/inet.h>
#include <netinet/udp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
	MESSAGE = 65536,
	DATA = 1024, /* of a datagram */
	DATAGRAM = DATA + 16 /* with the base transport header and the ICRC */,
	GROUP = 62,       /* datagrams of one system call: at most 65,507 bytes */
	WINDOW = 4 << 20, /* bytes without an acknowledgment */
	EVERY = 8         /* groups of an acknowledgment */
};

static char buffer[MESSAGE];

/* receive receives datagrams until there have been as many, and acknowledges them. */
static void receive(int fd, uint64_t datagrams)
{
	struct sockaddr_storage from;
	uint64_t received = 0, acknowledged = 0;
	while (received < datagrams) {
		socklen_t length = sizeof from;
		ssize_t n = recvfrom(fd, buffer, sizeof buffer, 0, (struct sockaddr *)&from, &length);
		CHECK(n > 0 && n % DATAGRAM == 0);
		received += (uint64_t)n / DATAGRAM;
		if (received - acknowledged >= EVERY * GROUP || received == datagrams) {
			acknowledged = received;
			CHECK(sendto(fd, &received, sizeof received, 0, (struct sockaddr *)&from, length) == sizeof received);
		}
	}
}

/* transmit sends datagrams, and returns the time until all are acknowledged, in seconds. */
static double transmit(int fd, uint64_t datagrams)
{
	struct timespec begin, end;
	uint64_t sent = 0, acknowledged = 0;
	clock_gettime(CLOCK_MONOTONIC, &begin);
	while (acknowledged < datagrams) {
		while (sent < datagrams && sent - acknowledged + GROUP <= WINDOW / DATAGRAM) {
			uint64_t group = datagrams - sent < GROUP ? datagrams - sent : GROUP;
			CHECK(send(fd, buffer, group * DATAGRAM, 0) == (ssize_t)(group * DATAGRAM));
			sent += group;
		}
		CHECK(recv(fd, &acknowledged, sizeof acknowledged, 0) == sizeof acknowledged);
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	return (double)(end.tv_sec - begin.tv_sec) + (double)(end.tv_nsec - begin.tv_nsec) / 1e9;
}

int main(int argc, char **argv)
{
	struct sockaddr_in at = {.sin_family = AF_INET};
	uint64_t messages = 0;
	for (int option; (option = getopt(argc, argv, "p:n:")) != -1;) {
		if (option == 'p')
			at.sin_port = htons((uint16_t)atoi(optarg));
		else
			messages = strtoull(optarg, NULL, 10);
	}
	uint64_t datagrams = messages * (MESSAGE / DATA);
	int fd = socket(AF_INET, SOCK_DGRAM, 0), on = 1, segment = DATAGRAM, space = 2 * WINDOW;
	CHECK(fd >= 0 && !setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &space, sizeof space) &&
		!setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &space, sizeof space));
	if (optind < argc) {
		CHECK(inet_pton(AF_INET, argv[optind], &at.sin_addr) == 1 && !setsockopt(fd, SOL_UDP, UDP_SEGMENT, &segment, sizeof segment));
		CHECK(!connect(fd, (struct sockaddr *)&at, sizeof at));
		double seconds = transmit(fd, datagrams);
		printf(" %d %llu 0 %.2f 0\n", MESSAGE, (unsigned long long)messages, (double)messages * MESSAGE / seconds / (1 << 20));
		return 0;
	}
	int listener = socket(AF_INET, SOCK_STREAM, 0); /* shows that the receiver is ready */
	CHECK(!bind(fd, (struct sockaddr *)&at, sizeof at) && !setsockopt(fd, SOL_UDP, UDP_GRO, &on, sizeof on));
	CHECK(listener >= 0 && !bind(listener, (struct sockaddr *)&at, sizeof at) && !listen(listener, 1));
	receive(fd, datagrams);
	return 0;
}
