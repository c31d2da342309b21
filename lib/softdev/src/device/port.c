#include "port.h"

#include "share.h"

#include <linux/filter.h>
#include <netinet/udp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#ifndef UDP_NO_CHECK6_RX
#define UDP_NO_CHECK6_RX 102
#endif
#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif

enum {
	QUEUE = 256,           /* batches that one flush sends */
	QUEUE_BYTES = 1 << 18, /* bytes that one flush sends: few enough to stay in a processor's cache between their copies */
	MAX_SEGMENTS = 64,     /* packets of a batch that every kernel with UDP_SEGMENT accepts */
	MAX_BATCH = 65000,     /* bytes of a batch */
	MESSAGES = 16,         /* messages of a receiving system call */
	RECEIVE_CALLS = 4,     /* receiving system calls of one sd_port_receive */
	MESSAGE_SIZE = 65536,
	SOCKET_BUFFER = 16 << 20,
	SEND_PATIENCE_MS = 10, /* wait for room in a socket's buffer */
	CONTROL_SIZE = 128,
};

/* A socket that sends from one address and port, shared by paths. */
struct sender {
	struct sender *next;
	struct in6_addr source;
	uint16_t port;
	unsigned users;
	int fd;
};

struct receiver {
	struct receiver *next;
	struct in6_addr address;
	int fd;
};

/* Packets that one message carries: the same socket, destination and size, except for a shorter last one. */
struct batch {
	struct sender *socket;
	struct sd_flow flow;
	uint8_t tos, process; /* of the destination: the first bits of a queue pair's number */
	size_t size;          /* of the first packet */
	unsigned packets;
	bool closed; /* by a shorter packet */
	struct iovec data;
};

struct sd_port {
	struct sd_link link;
	struct sd_share *share;
	int epoll, wake;
	bool asked; /* another process asks for sockets */
	struct sender *senders;
	struct receiver *receivers;
	bool segment; /* the kernel segments batches */
	uint64_t refused;
	unsigned batches;
	size_t queued; /* bytes */
	struct batch queue[QUEUE];
	struct mmsghdr out[QUEUE];
	struct sockaddr_in6 out_names[QUEUE];
	_Alignas(struct cmsghdr) uint8_t out_control[QUEUE][CONTROL_SIZE];
	struct mmsghdr in[MESSAGES];
	struct iovec in_pieces[MESSAGES];
	struct sockaddr_in6 in_names[MESSAGES];
	uint8_t in_control[MESSAGES][CONTROL_SIZE];
	uint8_t (*buffers)[MESSAGE_SIZE];
	uint8_t data[QUEUE_BYTES];
};

/* to_sockaddr writes an address for a socket of its family, and returns its size. */
static socklen_t to_sockaddr(const struct in6_addr *a, uint16_t port, struct sockaddr_in6 *out)
{
	memset(out, 0, sizeof *out);
	if (!sd_is_ipv4(a)) {
		out->sin6_family = AF_INET6;
		out->sin6_port = htons(port);
		out->sin6_addr = *a;
		return sizeof *out;
	}
	struct sockaddr_in *in = (struct sockaddr_in *)out;
	in->sin_family = AF_INET;
	in->sin_port = htons(port);
	memcpy(&in->sin_addr, &a->s6_addr[12], 4);
	return sizeof *in;
}

static void from_sockaddr(const struct sockaddr_in6 *in, struct in6_addr *a, uint16_t *port)
{
	*port = ntohs(in->sin6_port);
	if (in->sin6_family == AF_INET6) {
		*a = in->sin6_addr;
		return;
	}
	memset(a, 0, sizeof *a);
	a->s6_addr[10] = a->s6_addr[11] = 0xff;
	memcpy(&a->s6_addr[12], &((const struct sockaddr_in *)in)->sin_addr, 4);
}

static void set(int fd, int level, int name, int value)
{
	setsockopt(fd, level, name, &value, sizeof value);
}

/* The socket sets DF and ECT(0). It accepts the checksum 0, which RoCEv2 devices such as rdma_rxe send over IPv6 too:
 * the ICRC protects their packets. */
int sd_port_socket(const struct in6_addr *a, uint16_t port, int reuse)
{
	struct sockaddr_in6 name;
	socklen_t size = to_sockaddr(a, port, &name);
	int fd = socket(name.sin6_family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -1;
	if (sd_is_ipv4(a)) {
		set(fd, IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO);
		set(fd, IPPROTO_IP, IP_RECVTOS, 1);
	} else {
		set(fd, IPPROTO_IPV6, IPV6_V6ONLY, 1);
		set(fd, IPPROTO_IPV6, IPV6_MTU_DISCOVER, IPV6_PMTUDISC_DO);
		set(fd, IPPROTO_IPV6, IPV6_RECVTCLASS, 1);
		set(fd, SOL_UDP, UDP_NO_CHECK6_RX, 1);
	}
	for (int i = 0; i < 2; i++) {
		set(fd, SOL_SOCKET, i ? SO_SNDBUF : SO_RCVBUF, SOCKET_BUFFER);
		set(fd, SOL_SOCKET, i ? SO_SNDBUFFORCE : SO_RCVBUFFORCE, SOCKET_BUFFER); /* with CAP_NET_ADMIN beyond the system's limit */
	}
	if (reuse)
		set(fd, SOL_SOCKET, reuse, 1);
	if (bind(fd, (struct sockaddr *)&name, size) != 0) {
		int err = errno;
		close(fd);
		errno = err;
		return -1;
	}
	return fd;
}

/* open_path finds or opens the socket of a path's source port. It shares the port with sockets of other processes, and
 * discards datagrams that arrive there: peers answer to the port of RoCEv2. */
static int open_path(struct sd_link *link, struct sd_path *path)
{
	struct sd_port *p = (struct sd_port *)link;
	struct sender *s;
	for (s = p->senders; s; s = s->next)
		if (s->port == path->flow.source_port && memcmp(&s->source, &path->flow.source, sizeof s->source) == 0)
			break;
	if (!s) {
		s = calloc(1, sizeof *s);
		if (!s)
			return ENOMEM;
		s->source = path->flow.source;
		s->port = path->flow.source_port;
		s->fd = sd_port_socket(&s->source, s->port, SO_REUSEADDR);
		if (s->fd < 0) {
			free(s);
			return errno;
		}
		struct sock_filter nothing = BPF_STMT(BPF_RET | BPF_K, 0);
		struct sock_fprog program = {1, &nothing};
		setsockopt(s->fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
		s->next = p->senders;
		p->senders = s;
	}
	s->users++;
	path->socket = s;
	return 0;
}

static void flush(struct sd_link *link);

static void close_path(struct sd_link *link, struct sd_path *path)
{
	struct sd_port *p = (struct sd_port *)link;
	struct sender *s = path->socket;
	path->socket = NULL;
	if (!s || --s->users > 0)
		return;
	flush(link); /* queued packets refer to the socket */
	struct sender **at = &p->senders;
	while (*at != s)
		at = &(*at)->next;
	*at = s->next;
	close(s->fd);
	free(s);
}

/* joins reports whether a packet can follow those of a batch: the kernel delivers a batch to one socket. */
static bool joins(const struct sd_port *p, const struct batch *b, const struct sd_path *path, uint8_t process, size_t size)
{
	return p->segment && !b->closed && b->packets < MAX_SEGMENTS && b->socket == path->socket && b->tos == path->tos && b->process == process &&
		size <= b->size && b->data.iov_len + size <= MAX_BATCH && memcmp(&b->flow, &path->flow, sizeof b->flow) == 0;
}

/* batch_for returns the batch that a packet joins: the last one, or another one. */
static struct batch *batch_for(struct sd_port *p, const struct sd_path *path, uint8_t process, size_t size)
{
	if (p->queued + size > sizeof p->data)
		flush(&p->link);
	if (p->batches > 0 && joins(p, &p->queue[p->batches - 1], path, process, size))
		return &p->queue[p->batches - 1];
	if (p->batches == QUEUE)
		flush(&p->link);
	struct batch *b = &p->queue[p->batches++];
	*b = (struct batch){
		.socket = path->socket, .flow = path->flow, .tos = path->tos, .process = process, .size = size, .data.iov_base = p->data + p->queued};
	return b;
}

/* send_packet copies a packet, and then computes the ICRC: the program may change the payload at any time. The sockets
 * set DF and are not connected: Linux gives the identification 0, and counts up from 0 when it segments a batch. */
static void send_packet(struct sd_link *link, const struct sd_path *path, const struct sd_packet *packet)
{
	struct sd_port *p = (struct sd_port *)link;
	size_t covered = (packet->header_size + packet->payload_size + 3) / 4 * 4, size = covered + SD_ICRC_SIZE;
	if (!path->socket)
		return;
	struct batch *b = batch_for(p, path, packet->header[SD_QPN_BYTE] >> (SD_QPN_PROCESS - 16), size);
	uint8_t *start = p->data + p->queued, *at = start + packet->header_size;
	memcpy(start, packet->header, packet->header_size);
	for (int i = 0; i < packet->pieces; at += packet->payload[i++].iov_len)
		memcpy(at, packet->payload[i].iov_base, packet->payload[i].iov_len);
	memset(at, 0, (size_t)(start + covered - at));
	uint32_t crc = sd_icrc(&b->flow, start, size, (uint16_t)b->packets);
	memcpy(start + covered, &crc, SD_ICRC_SIZE);
	b->closed = size < b->size;
	b->packets++;
	b->data.iov_len += size;
	p->queued += size;
}

/* put_control writes a control message, and returns its size with padding. */
static size_t put_control(uint8_t *at, int level, int type, const void *value, size_t size)
{
	struct cmsghdr *c = (struct cmsghdr *)at;
	*c = (struct cmsghdr){.cmsg_len = CMSG_LEN(size), .cmsg_level = level, .cmsg_type = type};
	memcpy(CMSG_DATA(c), value, size);
	return CMSG_SPACE(size);
}

/* make_message prepares the message of a batch. */
static void make_message(struct sd_port *p, unsigned i)
{
	struct batch *b = &p->queue[i];
	struct msghdr *m = &p->out[i].msg_hdr;
	bool v4 = sd_is_ipv4(&b->flow.source);
	int tos = b->tos;
	uint16_t size = (uint16_t)b->size;
	*m = (struct msghdr){.msg_name = &p->out_names[i], .msg_iov = &b->data, .msg_iovlen = 1, .msg_control = p->out_control[i]};
	m->msg_namelen = to_sockaddr(&b->flow.destination, b->flow.destination_port, m->msg_name);
	m->msg_controllen = put_control(m->msg_control, v4 ? IPPROTO_IP : IPPROTO_IPV6, v4 ? IP_TOS : IPV6_TCLASS, &tos, sizeof tos);
	if (b->packets > 1)
		m->msg_controllen += put_control(p->out_control[i] + m->msg_controllen, SOL_UDP, UDP_SEGMENT, &size, sizeof size);
}

/* transmit sends the messages of n batches of one socket from i on. A message that the kernel refuses is dropped, as by
 * a network. */
static void transmit(struct sd_port *p, unsigned i, unsigned n)
{
	int fd = p->queue[i].socket->fd;
	while (n > 0) {
		int sent = sendmmsg(fd, p->out + i, n, 0);
		if (sent > 0) {
			i += (unsigned)sent;
			n -= (unsigned)sent;
			continue;
		}
		if (errno == EINTR)
			continue;
		struct pollfd room = {.fd = fd, .events = POLLOUT};
		if ((errno == EAGAIN || errno == ENOBUFS) && poll(&room, 1, SEND_PATIENCE_MS) > 0 && errno == EAGAIN)
			continue;
		if (p->queue[i].packets > 1 && (errno == EIO || errno == EINVAL || errno == EOPNOTSUPP))
			p->segment = false; /* the device or the kernel cannot segment: later packets go one by one */
		p->refused++;
		i++;
		n--;
	}
}

static void flush(struct sd_link *link)
{
	struct sd_port *p = (struct sd_port *)link;
	unsigned from = 0;
	for (unsigned i = 0; i < p->batches; i++) {
		make_message(p, i);
		if (p->queue[i].socket != p->queue[from].socket) {
			transmit(p, from, i - from);
			from = i;
		}
	}
	if (p->batches > 0)
		transmit(p, from, p->batches - from);
	p->batches = 0;
	p->queued = 0;
}

static uint64_t monotonic(struct sd_link *link)
{
	(void)link;
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void watch(struct sd_port *p, int fd)
{
	struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
	epoll_ctl(p->epoll, EPOLL_CTL_ADD, fd, &e);
}

int sd_port_open(struct sd_port **port)
{
	struct sd_port *p = calloc(1, sizeof *p);
	if (!p)
		return ENOMEM;
	p->link = (struct sd_link){open_path, close_path, send_packet, flush, monotonic};
	p->segment = true;
	p->buffers = malloc(sizeof *p->buffers * MESSAGES);
	p->epoll = epoll_create1(EPOLL_CLOEXEC);
	p->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	p->share = sd_share_open();
	*port = p;
	if (!p->share || !p->buffers || p->epoll < 0 || p->wake < 0) {
		int err = errno;
		sd_port_close(p);
		return err;
	}
	watch(p, p->wake);
	return 0;
}

void sd_port_close(struct sd_port *p)
{
	while (p->receivers) {
		struct receiver *r = p->receivers;
		p->receivers = r->next;
		sd_share_leave(r->fd);
		free(r);
	}
	while (p->senders) {
		struct sender *s = p->senders;
		p->senders = s->next;
		close(s->fd);
		free(s);
	}
	if (p->epoll >= 0)
		close(p->epoll);
	if (p->wake >= 0)
		close(p->wake);
	sd_share_close(p->share);
	free(p->buffers);
	free(p);
}

struct sd_link *sd_port_link(struct sd_port *port)
{
	return &port->link;
}

int sd_port_listen(struct sd_port *p, const struct in6_addr *address)
{
	for (struct receiver *r = p->receivers; r; r = r->next)
		if (memcmp(&r->address, address, sizeof *address) == 0)
			return 0;
	struct receiver *r = calloc(1, sizeof *r);
	if (!r)
		return ENOMEM;
	r->address = *address;
	r->fd = sd_share_socket(p->share, address);
	if (r->fd < 0) {
		free(r);
		return errno;
	}
	r->next = p->receivers;
	p->receivers = r;
	watch(p, r->fd);
	return 0;
}

/* deliver cuts a message that the kernel has coalesced into its datagrams. */
static void deliver(struct sd_dev *dev, const struct in6_addr *address, struct msghdr *m, uint8_t *data, size_t n)
{
	struct sd_flow flow = {.destination = *address, .destination_port = SD_UDP_PORT};
	size_t size = n;
	uint8_t tos = 0;
	from_sockaddr(m->msg_name, &flow.source, &flow.source_port);
	for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
		if (c->cmsg_level == SOL_UDP && c->cmsg_type == UDP_GRO) {
			int v;
			memcpy(&v, CMSG_DATA(c), sizeof v);
			size = v > 0 ? (size_t)v : n;
		} else if (c->cmsg_type == (c->cmsg_level == IPPROTO_IP ? IP_TOS : IPV6_TCLASS)) {
			tos = *CMSG_DATA(c);
		}
	}
	uint16_t id = 0; /* Linux counts up from 0 when it segments a batch */
	for (size_t at = 0; at < n; at += size)
		sd_input(dev, &flow, tos, id++, data + at, n - at < size ? n - at : size);
}

static int receive(struct sd_port *p, struct receiver *r, struct sd_dev *dev)
{
	for (int i = 0; i < MESSAGES; i++) {
		p->in_pieces[i] = (struct iovec){p->buffers[i], MESSAGE_SIZE};
		p->in[i].msg_hdr =
			(struct msghdr){.msg_name = &p->in_names[i], .msg_namelen = sizeof p->in_names[i], .msg_iov = &p->in_pieces[i], .msg_iovlen = 1};
		p->in[i].msg_hdr.msg_control = p->in_control[i];
		p->in[i].msg_hdr.msg_controllen = CONTROL_SIZE;
	}
	int n = recvmmsg(r->fd, p->in, MESSAGES, MSG_DONTWAIT, NULL);
	for (int i = 0; i < n; i++)
		deliver(dev, &r->address, &p->in[i].msg_hdr, p->buffers[i], p->in[i].msg_len);
	return n;
}

int sd_port_receive(struct sd_port *p, struct sd_dev *dev)
{
	int calls = 0;
	for (struct receiver *r = p->receivers; r; r = r->next)
		for (int i = 0; i < RECEIVE_CALLS; i++) {
			int n = receive(p, r, dev);
			calls += n > 0;
			if (n < MESSAGES)
				break;
		}
	return calls;
}

bool sd_port_wait(struct sd_port *p, bool packets, uint64_t timeout_ns)
{
	struct timespec t = {(time_t)(timeout_ns / 1000000000), (long)(timeout_ns % 1000000000)};
	struct pollfd fds[] = {{.fd = packets ? p->epoll : p->wake, .events = POLLIN}, {.fd = sd_share_requests(p->share), .events = POLLIN}};
	uint64_t n;
	if (ppoll(fds, 2, &t, NULL) <= 0)
		return false;
	p->asked = fds[1].revents & ~POLLNVAL; /* an error, too, may be that of another descriptor: sd_share_serve looks */
	if ((fds[0].revents | fds[1].revents) & POLLNVAL)
		nanosleep(&t, NULL); /* the program has closed every descriptor */
	else if (read(p->wake, &n, sizeof n) < 0)
		return true; /* packets alone */
	return true;
}

void sd_port_serve(struct sd_port *p)
{
	if (p->asked)
		sd_share_serve(p->share);
	p->asked = false;
}

uint32_t sd_port_process(const struct sd_port *p)
{
	return sd_share_number(p->share);
}

void sd_port_wake(struct sd_port *p)
{
	uint64_t one = 1;
	if (write(p->wake, &one, sizeof one) < 0)
		return; /* the counter is at its maximum */
}

uint32_t sd_port_mtu(const struct in6_addr *source, const struct in6_addr *destination)
{
	struct sockaddr_in6 name;
	bool v4 = sd_is_ipv4(source);
	int mtu = 0, fd = socket(v4 ? AF_INET : AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	socklen_t size = to_sockaddr(source, 0, &name);
	if (fd < 0)
		return 0;
	if (bind(fd, (struct sockaddr *)&name, size) == 0) {
		size = to_sockaddr(destination, SD_UDP_PORT, &name);
		if (connect(fd, (struct sockaddr *)&name, size) == 0) {
			size = sizeof mtu;
			getsockopt(fd, v4 ? IPPROTO_IP : IPPROTO_IPV6, v4 ? IP_MTU : IPV6_MTU, &mtu, &size);
		}
	}
	close(fd);
	return mtu > 0 ? (uint32_t)mtu : 0;
}

uint64_t sd_port_refused(const struct sd_port *port)
{
	return port->refused;
}
