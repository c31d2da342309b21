/* The UDP port of RoCEv2, shared by the processes of a user in a network namespace. Each process has a number, with
 * which the numbers of its queue pairs begin. An address has a socket for each number, and the kernel delivers a packet
 * to that of the number in it. Any process that has the sockets of an address gives them to another one: none depends
 * on the life of the one that opened them. */
#ifndef SOFTDEV_SHARE_H
#define SOFTDEV_SHARE_H

#include "core/core.h"

struct sd_share;

/* Takes a number. Without a free one the process has 0, and shares no port. Returns NULL without memory. */
struct sd_share *sd_share_open(void);
void sd_share_close(struct sd_share *share);
uint32_t sd_share_number(const struct sd_share *share);
/* Returns this process's socket of an address. If there are none, it opens those of all numbers. Returns -1 and
 * EADDRINUSE if a user of the port does not share it. */
int sd_share_socket(struct sd_share *share, const struct in6_addr *address);
/* Ends the use of such a socket: the kernel drops its packets until another process has the number. */
void sd_share_leave(int fd);
/* A descriptor that is readable when another process asks for sockets, or -1; sd_share_serve answers. */
int sd_share_requests(const struct sd_share *share);
void sd_share_serve(struct sd_share *share);

#endif
