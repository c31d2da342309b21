#include "share.h"

#include "port.h"

#include <linux/filter.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum {
	PATIENCE_MS = 10000, /* wait for answers: a process may be stopped, or wait for a processor */
	REPEAT_MS = 100,     /* a question is repeated: the queue of a socket is short */
	ATTEMPTS = 3,        /* the user of a port may end while this process asks for it */
	NONE = -1,
	SILENT = -2,
	STALE = 1 << 20, /* packets that a process may have left in its socket */
};

/* The sockets of an address, in the order of their numbers: in a message that waits in the queue of a socket, so that a
 * process needs two descriptors for them. */
struct bank {
	struct bank *next;
	struct in6_addr address;
	int fd;
};

struct sd_share {
	int fd; /* of requests and answers; its abstract name is the claim of the number. -1: none */
	ino_t inode;
	uint32_t number, round;
	struct bank *banks;
};

struct message {
	uint32_t number;        /* of the sender */
	uint32_t round;         /* of the question */
	uint32_t question, has; /* booleans */
	struct in6_addr address;
};

static socklen_t name_of(uint32_t number, struct sockaddr_un *name)
{
	*name = (struct sockaddr_un){.sun_family = AF_UNIX};
	int n = snprintf(name->sun_path + 1, sizeof name->sun_path - 1, "fared_soft0/%u", number);
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static ino_t inode_of(int fd)
{
	struct stat s;
	return fstat(fd, &s) == 0 ? s.st_ino : 0;
}

static void set(int fd, int level, int name, int value)
{
	setsockopt(fd, level, name, &value, sizeof value);
}

/* claim takes the first free number. */
static void claim(struct sd_share *s)
{
	struct sockaddr_un name;
	s->fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (s->fd < 0)
		return;
	set(s->fd, SOL_SOCKET, SO_PASSCRED, 1);
	s->inode = inode_of(s->fd);
	for (s->number = 0; s->number < SD_PROCESSES; s->number++)
		if (bind(s->fd, (struct sockaddr *)&name, name_of(s->number, &name)) == 0)
			return;
	close(s->fd);
	s->fd = -1;
	s->number = 0;
}

struct sd_share *sd_share_open(void)
{
	struct sd_share *s = calloc(1, sizeof *s);
	if (s)
		claim(s);
	return s;
}

void sd_share_close(struct sd_share *s)
{
	if (!s)
		return;
	while (s->banks) {
		struct bank *b = s->banks;
		s->banks = b->next;
		close(b->fd);
		free(b);
	}
	if (s->fd >= 0)
		close(s->fd);
	free(s);
}

uint32_t sd_share_number(const struct sd_share *s)
{
	return s->number;
}

int sd_share_requests(const struct sd_share *s)
{
	return s->fd;
}

static void filter(int fd, int option, struct sock_filter *program, unsigned short length)
{
	struct sock_fprog p;
	memset(&p, 0, sizeof p); /* and its padding */
	p.len = length;
	p.filter = program;
	setsockopt(fd, SOL_SOCKET, option, &p, sizeof p);
}

/* discard has the kernel drop the packets to a socket. */
static void discard(int fd)
{
	struct sock_filter nothing = BPF_STMT(BPF_RET | BPF_K, 0);
	filter(fd, SO_ATTACH_FILTER, &nothing, 1);
}

void sd_share_leave(int fd)
{
	discard(fd);
	close(fd);
}

/* send_message sends a message to a process, with n descriptors. Returns an errno. */
static int send_message(int to, const struct sockaddr_un *name, socklen_t size, const struct message *m, const int *fds, size_t n)
{
	_Alignas(struct cmsghdr) uint8_t control[CMSG_SPACE(sizeof(int) * SD_PROCESSES)] = {0};
	struct iovec data = {(void *)m, sizeof *m};
	struct msghdr header = {.msg_name = (void *)name, .msg_namelen = size, .msg_iov = &data, .msg_iovlen = 1};
	if (n > 0) {
		header.msg_control = control;
		header.msg_controllen = CMSG_SPACE(sizeof(int) * n);
		struct cmsghdr *c = CMSG_FIRSTHDR(&header);
		*c = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int) * n), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
		memcpy(CMSG_DATA(c), fds, sizeof(int) * n);
	}
	return sendmsg(to, &header, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)sizeof *m ? 0 : errno;
}

/* receive_message receives a message with its descriptors, at most SD_PROCESSES, and the user who sent it. Returns
 * false if there is none. */
static bool receive_message(int from, int flags, struct message *m, int *fds, size_t *n, uid_t *uid)
{
	_Alignas(struct cmsghdr) uint8_t control[CMSG_SPACE(sizeof(int) * SD_PROCESSES) + CMSG_SPACE(sizeof(struct ucred))];
	struct iovec data = {m, sizeof *m};
	struct msghdr header = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
	ssize_t got;
	*n = 0;
	*uid = (uid_t)-1;
	do
		got = recvmsg(from, &header, flags | MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	while (got < 0 && errno == EINTR);
	if (got < 0)
		return false;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c)) {
		if (c->cmsg_level != SOL_SOCKET)
			continue;
		if (c->cmsg_type == SCM_RIGHTS) {
			size_t all = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
			*n = all < SD_PROCESSES ? all : SD_PROCESSES;
			memcpy(fds, CMSG_DATA(c), *n * sizeof(int));
			for (size_t i = *n; i < all; i++) {
				int fd;
				memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
				close(fd);
			}
		} else if (c->cmsg_type == SCM_CREDENTIALS) {
			struct ucred u;
			memcpy(&u, CMSG_DATA(c), sizeof u);
			*uid = u.uid;
		}
	}
	if (got != (ssize_t)sizeof *m)
		*m = (struct message){.number = SD_PROCESSES};
	return true;
}

static struct bank *find(const struct sd_share *s, const struct in6_addr *address)
{
	struct bank *b = s->banks;
	while (b && memcmp(&b->address, address, sizeof *address) != 0)
		b = b->next;
	return b;
}

/* handle answers the next message if it is a question. An answer to this process's question, which may be NULL, becomes
 * *answer, and has a descriptor or -1. Returns false if there is no message. */
static bool handle(struct sd_share *s, const struct message *question, struct message *answer, int *fd)
{
	struct message m;
	struct sockaddr_un name;
	int fds[SD_PROCESSES];
	size_t n;
	uid_t uid;
	answer->number = SD_PROCESSES;
	*fd = -1;
	if (!receive_message(s->fd, 0, &m, fds, &n, &uid))
		return false;
	bool known = m.number < SD_PROCESSES, ours = uid == geteuid(); /* a process of another user gets no sockets, and gives none */
	if (known && m.question) {
		const struct bank *b = ours ? find(s, &m.address) : NULL;
		struct message reply = {.number = s->number, .round = m.round, .has = b != NULL, .address = m.address};
		socklen_t size = name_of(m.number, &name);
		send_message(s->fd, &name, size, &reply, b ? &b->fd : NULL, b ? 1 : 0); /* without an answer the process asks again */
	} else if (known && question && m.round == question->round && memcmp(&m.address, &question->address, sizeof m.address) == 0) {
		*answer = m;
		if (m.has && n == 1 && ours) {
			*fd = fds[0];
			n = 0;
		}
	}
	for (size_t i = 0; i < n; i++)
		close(fds[i]);
	return true;
}

void sd_share_serve(struct sd_share *s)
{
	struct message unused;
	int none;
	if (s->inode != inode_of(s->fd))
		s->fd = -1; /* the program has closed every descriptor, and may have opened another one */
	while (s->fd >= 0 && handle(s, NULL, &unused, &none))
		;
}

static uint64_t now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* ask asks all processes for the sockets of an address, and answers their questions meanwhile. Returns the descriptor
 * of a bank, NONE if no process has it, or SILENT if one that may have it does not answer. */
static int ask(struct sd_share *s, const struct in6_addr *address)
{
	struct message question = {.number = s->number, .round = ++s->round, .question = true, .address = *address}, answer;
	bool done[SD_PROCESSES] = {0};
	uint64_t end = now_ms() + PATIENCE_MS;
	struct pollfd wait = {.fd = s->fd, .events = POLLIN};
	int fd;
	done[s->number] = true;
	for (;;) {
		bool more = false;
		for (uint32_t i = 0; i < SD_PROCESSES; i++) {
			struct sockaddr_un name;
			socklen_t size = name_of(i, &name);
			done[i] = done[i] || send_message(s->fd, &name, size, &question, NULL, 0) == ECONNREFUSED;
			more |= !done[i];
		}
		uint64_t repeat = now_ms() + REPEAT_MS, now;
		while (more && (now = now_ms()) < repeat) {
			poll(&wait, 1, (int)(repeat - now));
			while (handle(s, &question, &answer, &fd)) {
				if (fd >= 0)
					return fd;
				if (answer.number < SD_PROCESSES)
					done[answer.number] = true;
			}
			more = memchr(done, false, sizeof done);
		}
		if (!more)
			return NONE;
		if (now_ms() >= end)
			return SILENT;
	}
}

/* take_socket returns this process's socket of a bank, without what another process has left in it. If the bank is
 * another process's, the kernel no longer coalesces packets: those of one flow may have different numbers. */
static int take_socket(const struct sd_share *s, int bank, bool alone)
{
	struct message unused;
	int fds[SD_PROCESSES], fd = -1;
	size_t n;
	uid_t uid;
	char byte;
	if (!receive_message(bank, MSG_PEEK, &unused, fds, &n, &uid)) /* it copies the descriptors */
		return -1;
	for (size_t i = 0; i < n; i++) {
		set(fds[i], SOL_UDP, UDP_GRO, alone);
		if (i == s->number)
			fd = fds[i];
		else
			close(fds[i]);
	}
	if (fd < 0) {
		errno = EMFILE;
		return -1;
	}
	discard(fd);
	for (int i = 0; i < STALE && recv(fd, &byte, sizeof byte, MSG_DONTWAIT) >= 0; i++)
		;
	set(fd, SOL_SOCKET, SO_DETACH_FILTER, 0);
	return fd;
}

/* make_bank opens the sockets of the other numbers, where first is that of 0, and returns the bank, or -1. */
static int make_bank(int first, const struct in6_addr *address)
{
	/* The number of the process is the first 6 bits of that of the destination's queue pair. */
	struct sock_filter number[] = {
		BPF_STMT(BPF_LD | BPF_B | BPF_ABS, SD_QPN_BYTE), BPF_STMT(BPF_ALU | BPF_RSH | BPF_K, SD_QPN_PROCESS - 16), BPF_STMT(BPF_RET | BPF_A, 0)};
	const struct message none = {0};
	int fds[SD_PROCESSES] = {first}, pair[2] = {-1, -1}, n = 1;
	set(first, SOL_SOCKET, SO_REUSEPORT, 1);
	while (n < SD_PROCESSES && (fds[n] = sd_port_socket(address, SD_UDP_PORT, SO_REUSEPORT)) >= 0)
		n++;
	bool ok = n == SD_PROCESSES && socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, pair) == 0;
	if (ok) {
		filter(first, SO_ATTACH_REUSEPORT_CBPF, number, sizeof number / sizeof *number);
		ok = send_message(pair[0], NULL, 0, &none, fds, SD_PROCESSES) == 0;
	}
	for (int i = 1; i < n; i++)
		close(fds[i]);
	if (pair[0] >= 0)
		close(pair[0]);
	if (!ok && pair[1] >= 0)
		close(pair[1]);
	return ok ? pair[1] : -1;
}

/* keep adds a bank. Without memory the process does not give it to others. */
static void keep(struct sd_share *s, const struct in6_addr *address, int fd)
{
	struct bank *b = malloc(sizeof *b);
	if (!b) {
		close(fd);
		return;
	}
	*b = (struct bank){s->banks, *address, fd};
	s->banks = b;
}

int sd_share_socket(struct sd_share *s, const struct in6_addr *address)
{
	int bank = NONE;
	for (int i = 0; i < ATTEMPTS && bank == NONE; i++) {
		int first = sd_port_socket(address, SD_UDP_PORT, 0);
		bool alone = first >= 0;
		if (alone) {
			bank = s->fd >= 0 ? make_bank(first, address) : -1;
			if (bank < 0) { /* too many descriptors, or no number: it is this process's port alone */
				set(first, SOL_UDP, UDP_GRO, 1);
				return first;
			}
		} else if (errno != EADDRINUSE) {
			return -1;
		} else if (s->fd >= 0) {
			bank = ask(s, address);
		}
		int fd = bank >= 0 ? take_socket(s, bank, alone) : -1;
		if (alone)
			close(first);
		if (fd >= 0) {
			keep(s, address, bank);
			return fd;
		}
		if (bank >= 0) {
			int err = errno;
			close(bank);
			errno = err;
			return -1;
		}
	}
	errno = bank == SILENT ? ETIMEDOUT : EADDRINUSE;
	return -1;
}
