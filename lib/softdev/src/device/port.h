/* Sockets of the software verbs device: a link on UDP. Callers hold the device's lock, except for sd_port_wait,
 * sd_port_wake and sd_port_mtu. */
#ifndef SOFTDEV_PORT_H
#define SOFTDEV_PORT_H

#include "core/core.h"

#ifndef SOL_UDP
#define SOL_UDP 17
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

struct sd_port;

/* Opens a port without addresses. Returns an errno. */
int sd_port_open(struct sd_port **port);
void sd_port_close(struct sd_port *port);
struct sd_link *sd_port_link(struct sd_port *port);
/* Receives packets to an address from now on, those to queue pairs of this process. Returns EADDRINUSE if a user of the
 * port does not share it. An address of this port has no effect. */
int sd_port_listen(struct sd_port *port, const struct in6_addr *address);
/* Delivers received packets to the device, at most a few hundred; returns the number of system calls that returned
 * any. */
int sd_port_receive(struct sd_port *port, struct sd_dev *dev);
/* Waits for packets or sd_port_wake, at most timeout_ns, and returns whether the time has not passed. With packets
 * false it waits for sd_port_wake alone. */
bool sd_port_wait(struct sd_port *port, bool packets, uint64_t timeout_ns);
void sd_port_wake(struct sd_port *port);
/* Answers other processes that share the port, if sd_port_wait has seen a question. */
void sd_port_serve(struct sd_port *port);
/* Returns the number of this process, with which those of its queue pairs begin. */
uint32_t sd_port_process(const struct sd_port *port);
/* Returns a socket that is bound to an address and port with an option of reuse (SO_REUSE..., or 0), or -1. */
int sd_port_socket(const struct in6_addr *address, uint16_t port, int reuse);
/* Returns the MTU of the route between two addresses, or 0 if there is none. */
uint32_t sd_port_mtu(const struct in6_addr *source, const struct in6_addr *destination);
/* Returns the number of datagrams that the kernel refused to send. */
uint64_t sd_port_refused(const struct sd_port *port);

#endif
