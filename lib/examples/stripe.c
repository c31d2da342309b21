/* Sends datagrams to a destination from the source ports of its slots, in proportion to their shares: stripe SOURCE
 * DESTINATION PORT COUNT. Both addresses are IPv4. It opens a socket for each slot, and follows changes of the shares
 * without reopening any.
 *
 * cc -o stripe stripe.c $(pkg-config --cflags --libs libfared)
 */
#include <fared.h>

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define ROOM 128

int main(int argc, char **argv)
{
	struct sockaddr_in from = {.sin_family = AF_INET}, to = {.sin_family = AF_INET};
	struct fared_address source, destination;
	if (argc != 5 || inet_pton(AF_INET, argv[1], &from.sin_addr) != 1 || inet_pton(AF_INET, argv[2], &to.sin_addr) != 1) {
		fprintf(stderr, "usage: stripe SOURCE DESTINATION PORT COUNT\n");
		return 2;
	}
	to.sin_port = htons((uint16_t)atoi(argv[3]));
	fared_address_of((struct sockaddr *)&from, &source);
	fared_address_of((struct sockaddr *)&to, &destination);

	struct fared_table *table;
	struct fared_pair pair;
	struct fared_slot slots[ROOM];
	int error = fared_open(&table, NULL);
	if (!error)
		error = fared_lookup(table, &source, &destination, &pair, slots, ROOM);
	if (error) {
		fprintf(stderr, "stripe: %s\n", fared_error_text(error));
		return 1;
	}
	int sockets[ROOM];
	int64_t credit[ROOM] = {0};
	for (uint32_t i = 0; i < pair.slots && i < ROOM; i++) {
		from.sin_port = htons(slots[i].source_port);
		sockets[i] = socket(AF_INET, SOCK_DGRAM, 0);
		if (sockets[i] < 0 || bind(sockets[i], (struct sockaddr *)&from, sizeof from)) {
			fprintf(stderr, "stripe: port %u: %s\n", slots[i].source_port, strerror(errno));
			return 1;
		}
	}
	for (long n = atol(argv[4]); n > 0; n--) {
		if (!fared_is_current(table, &pair)) {
			if (pair.flags & FARED_PAIR_STALE)
				fared_refresh(table);
			fared_lookup(table, &source, &destination, &pair, slots, ROOM); /* after an error the last shares stay */
		}
		int slot = fared_choose(slots, pair.slots, credit);
		if (slot >= 0)
			sendto(sockets[slot], "fared", 5, 0, (struct sockaddr *)&to, sizeof to);
	}
	fared_close(table);
	return 0;
}
