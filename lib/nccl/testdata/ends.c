/* Ends one end of a communicator in every state of the other one: ends PLUGIN closing, where the end is closed; ends
 * PLUGIN silent, where it stops answering, for which FARED_NCCL_TIMEOUT should be short; or ends PLUGIN
 * silent-receiver, where it does so after every lane was opened, for which FARED_NCCL_TIMEOUT should be long enough. A
 * call that stays pending fails the program after a minute. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "host.h"
#include "wire.h"

#define MESSAGES 8
#define BYTES (1 << 20)

static struct host host;
static char memory[2 * MESSAGES][BYTES];

static void fail(const char *state, const char *what)
{
	fprintf(stderr, "ends: %s: %s\n", state, what);
	exit(1);
}

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void rest(const char *state, double begin)
{
	if (now() - begin > 60)
		fail(state, "a call stays pending");
	nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}

static char warning[512]; /* the last one, which comes before the error */

static void show(int level, unsigned long flags, const char *file, int line, const char *format, ...)
{
	(void)flags, (void)file, (void)line;
	char text[sizeof warning];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	puts(text);
	if (level == NCCL_LOG_WARN)
		strcpy(warning, text);
}

struct pair {
	_Alignas(8) unsigned char handle[NCCL_NET_HANDLE_MAXSIZE];
	void *listener, *sends, *receives, *registered[2];
};

static void must(ncclResult_t result, const char *state, const char *call)
{
	if (result != ncclSuccess)
		fail(state, call);
}

static void listens(struct pair *p, const char *state)
{
	memset(p, 0, sizeof *p);
	must(host_listen(&host, 0, p->handle, &p->listener), state, "listen");
}

/* accepts waits for a communicator, and has the other end go on. */
static void accepts(struct pair *p, const char *state)
{
	for (double begin = now(); !p->receives; rest(state, begin)) {
		if (!p->sends)
			must(host_connect(&host, 0, p->handle, &p->sends), state, "connect");
		must(host_accept(&host, p->listener, &p->receives), state, "accept");
	}
}

static void connects(struct pair *p, const char *state)
{
	accepts(p, state);
	for (double begin = now(); !p->sends; rest(state, begin))
		must(host_connect(&host, 0, p->handle, &p->sends), state, "connect");
	must(host_register(&host, p->sends, memory, sizeof memory, &p->registered[0]), state, "regMr");
	must(host_register(&host, p->receives, memory, sizeof memory, &p->registered[1]), state, "regMr");
}

/* ends_with_error waits until a request fails. */
static void ends_with_error(void *request, const char *state)
{
	for (double begin = now();; rest(state, begin)) {
		int done = 0, sizes[8];
		if (host_test(&host, request, &done, sizes) != ncclSuccess)
			return;
		if (done)
			fail(state, "a request to a closed communicator is done");
	}
}

static void sends(struct pair *p, void **requests, const char *state)
{
	for (int i = 0; i < MESSAGES; i++) {
		requests[i] = NULL;
		must(host_send(&host, p->sends, memory[i], BYTES, 0, p->registered[0], &requests[i]), state, "isend");
	}
}

static void receives(struct pair *p, void **requests, int n, const char *state)
{
	for (int i = 0; i < n; i++) {
		void *data = memory[MESSAGES + i];
		size_t size = BYTES;
		int tag = 0;
		requests[i] = NULL;
		must(host_receive(&host, p->receives, 1, &data, &size, &tag, &p->registered[1], &requests[i]), state, "irecv");
	}
}

/* send_fails uses a communicator whose peer is closed: the call or its request fails. */
static void send_fails(struct pair *p, const char *state)
{
	void *request = NULL, *registered = NULL;
	if (host_register(&host, p->sends, memory, sizeof memory, &registered) == ncclSuccess &&
		host_send(&host, p->sends, memory[0], BYTES, 0, registered, &request) == ncclSuccess && request)
		ends_with_error(request, state);
	must(host_close_send(&host, p->sends), state, "closeSend");
}

/* connect_ends goes on with a connect whose peer has closed: it fails, or its communicator does. */
static void connect_ends(struct pair *p, const char *state)
{
	for (double begin = now(); !p->sends; rest(state, begin)) {
		if (host_connect(&host, 0, p->handle, &p->sends) != ncclSuccess)
			return;
	}
	send_fails(p, state);
}

static void receiver_closes_after_accept(bool listener_too)
{
	const char *state = listener_too ? "receiver and listener close after accept" : "receiver closes after accept";
	struct pair p;
	listens(&p, state);
	accepts(&p, state);
	must(host_close_receive(&host, p.receives), state, "closeRecv");
	if (listener_too)
		must(host_close_listener(&host, p.listener), state, "closeListen");
	connect_ends(&p, state);
	if (!listener_too)
		must(host_close_listener(&host, p.listener), state, "closeListen");
}

static void listener_closes_before_accept(void)
{
	const char *state = "listener closes before accept";
	struct pair p;
	listens(&p, state);
	must(host_connect(&host, 0, p.handle, &p.sends), state, "connect");
	for (double begin = now(); !p.sends; rest(state, begin))
		must(host_connect(&host, 0, p.handle, &p.sends), state, "connect");
	must(host_close_listener(&host, p.listener), state, "closeListen");
	send_fails(&p, state);
}

static void receiver_closes_with_flights(void)
{
	const char *state = "receiver closes with messages in flight";
	void *out[MESSAGES], *in[MESSAGES];
	struct pair p;
	listens(&p, state);
	connects(&p, state);
	receives(&p, in, 1, state);
	sends(&p, out, state);
	must(host_close_receive(&host, p.receives), state, "closeRecv");
	ends_with_error(out[MESSAGES - 1], state);
	must(host_close_send(&host, p.sends), state, "closeSend");
	must(host_close_listener(&host, p.listener), state, "closeListen");
}

static void sender_closes_with_flights(bool any)
{
	const char *state = any ? "sender closes with messages in flight" : "sender closes before a message";
	void *out[MESSAGES], *in[MESSAGES];
	struct pair p;
	listens(&p, state);
	connects(&p, state);
	receives(&p, in, MESSAGES, state);
	if (any)
		must(host_send(&host, p.sends, memory[0], BYTES, 0, p.registered[0], &out[0]), state, "isend");
	must(host_close_send(&host, p.sends), state, "closeSend");
	ends_with_error(in[MESSAGES - 1], state);
	must(host_close_receive(&host, p.receives), state, "closeRecv");
	must(host_close_listener(&host, p.listener), state, "closeListen");
}

/* lane connects to the listener of a handle as a sender's lane does. */
static int lane(const struct handle *h, const struct hello *hello, const char *state)
{
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(h->port)};
	memcpy(&to.sin_addr, h->address + 12, 4);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct frame f = {.type = FRAME_HELLO, .version = WIRE_VERSION, .length = sizeof *hello};
	struct timeval limit = {.tv_sec = 60};
	if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) || connect(fd, (struct sockaddr *)&to, sizeof to) ||
		write(fd, &f, sizeof f) != sizeof f || write(fd, hello, sizeof *hello) != sizeof *hello)
		fail(state, strerror(errno));
	return fd;
}

/* type returns the type of the next frame; 0: the connection has ended. */
static int type(int fd, const char *state)
{
	struct frame f;
	ssize_t n = recv(fd, &f, sizeof f, MSG_WAITALL);
	if (n < 0)
		fail(state, "no frame arrives");
	return n == sizeof f ? f.type : 0;
}

/* A sender that has lost its lanes together with the BYE returns, before and after the receiver has forgotten its
 * lanes, whose listener is still open: it gets another BYE. */
static void sender_returns(void)
{
	const char *state = "sender returns to a closed receiver";
	struct pair p;
	struct handle h;
	listens(&p, state);
	memcpy(&h, p.handle, sizeof h);
	struct hello hello = {.connection = "a sender's", .transport = h.transports & TRANSPORT_VERBS ? TRANSPORT_VERBS : TRANSPORT_TCP};
	memcpy(hello.nonce, h.nonce, sizeof hello.nonce);
	int first = lane(&h, &hello, state);
	if (type(first, state) != FRAME_WELCOME)
		fail(state, "no WELCOME");
	for (double begin = now(); !p.receives; rest(state, begin))
		must(host_accept(&host, p.listener, &p.receives), state, "accept");
	must(host_close_receive(&host, p.receives), state, "closeRecv");
	bool forgotten = false; /* the answer has no WELCOME */
	for (double begin = now(); !forgotten; rest(state, begin)) {
		int fd = lane(&h, &hello, state), answer = type(fd, state);
		forgotten = answer != FRAME_WELCOME;
		if ((forgotten ? answer : type(fd, state)) != FRAME_BYE)
			fail(state, "no BYE");
		close(fd);
	}
	void *other = NULL;
	must(host_accept(&host, p.listener, &other), state, "accept");
	if (other)
		fail(state, "a second communicator was accepted");
	close(first);
	must(host_close_listener(&host, p.listener), state, "closeListen");
}

/* answer is what a receiver of this program does with each lane. */
enum answer { NOTHING, WELCOME, WELCOME_AND_BYE };

/* receiver is the socket of a receiver that this program plays. */
static int receiver(struct pair *p, const char *state)
{
	struct handle h;
	listens(p, state); /* for the address */
	memcpy(&h, p->handle, sizeof h);
	must(host_close_listener(&host, p->listener), state, "closeListen");
	struct sockaddr_in at = {.sin_family = AF_INET};
	socklen_t size = sizeof at;
	memcpy(&at.sin_addr, h.address + 12, 4);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 64) || getsockname(fd, (struct sockaddr *)&at, &size))
		fail(state, strerror(errno));
	h.port = ntohs(at.sin_port);
	memcpy(p->handle, &h, sizeof h);
	return fd;
}

static void answers(int listener, enum answer answer, const char *state)
{
	static const struct frame frames[] = {{.type = FRAME_WELCOME, .version = WIRE_VERSION}, {.type = FRAME_BYE, .version = WIRE_VERSION}};
	char hello[sizeof(struct frame) + sizeof(struct hello)];
	int fd = accept(listener, NULL, NULL);
	if (fd < 0)
		return;
	if (recv(fd, hello, sizeof hello, MSG_WAITALL) != sizeof hello)
		fail(state, "no HELLO");
	size_t size = answer == NOTHING ? 0 : answer == WELCOME_AND_BYE ? sizeof frames : sizeof *frames;
	if (size && send(fd, frames, size, MSG_NOSIGNAL) != (ssize_t)size)
		fail(state, strerror(errno));
	if (answer == WELCOME_AND_BYE)
		close(fd); /* the others end with the program */
}

/* connect_fails connects to a receiver that this program plays. */
static void connect_fails(enum answer answer, const char *state, const char *reason)
{
	struct pair p;
	int listener = receiver(&p, state);
	for (double begin = now();; rest(state, begin)) {
		answers(listener, answer, state);
		if (host_connect(&host, 0, p.handle, &p.sends) != ncclSuccess)
			break;
		if (p.sends)
			fail(state, "connect succeeds");
	}
	if (!strstr(warning, reason))
		fail(state, warning);
	close(listener);
}

/* The receiver accepts a communicator and never receives. */
static void receiver_is_silent(void)
{
	const char *state = "receiver is silent";
	struct pair p;
	struct handle h;
	int listener = receiver(&p, state);
	memcpy(&h, p.handle, sizeof h);
	ncclResult_t result = ncclSuccess;
	for (double begin = now(); !p.sends && result == ncclSuccess; rest(state, begin)) {
		answers(listener, WELCOME, state);
		result = host_connect(&host, 0, p.handle, &p.sends);
	}
	if (p.sends)
		send_fails(&p, state);
	else if (!(h.transports & TRANSPORT_VERBS)) /* over verbs the receiver has to answer with queue pairs */
		fail(state, warning);
	close(listener);
}

/* The sender connects and never sends, nor answers. */
static void sender_is_silent(void)
{
	const char *state = "sender is silent";
	struct pair p;
	struct handle h;
	void *request;
	listens(&p, state);
	memcpy(&h, p.handle, sizeof h);
	struct hello hello = {.connection = "a sender's", .transport = h.transports & TRANSPORT_VERBS ? TRANSPORT_VERBS : TRANSPORT_TCP};
	memcpy(hello.nonce, h.nonce, sizeof hello.nonce);
	int fd = lane(&h, &hello, state);
	for (double begin = now(); !p.receives; rest(state, begin))
		must(host_accept(&host, p.listener, &p.receives), state, "accept");
	must(host_register(&host, p.receives, memory, sizeof memory, &p.registered[1]), state, "regMr");
	receives(&p, &request, 1, state);
	ends_with_error(request, state);
	must(host_close_receive(&host, p.receives), state, "closeRecv");
	must(host_close_listener(&host, p.listener), state, "closeListen");
	close(fd);
}

static void silent(void)
{
	connect_fails(NOTHING, "receiver does not welcome", "the receiver");
	sender_is_silent();
}

static void closing(void)
{
	connect_fails(WELCOME_AND_BYE, "receiver closes before connect returns", "the receiver has closed the communicator");
	for (int i = 0; i < 20; i++) {
		receiver_closes_after_accept(false);
		receiver_closes_after_accept(true);
		listener_closes_before_accept();
		receiver_closes_with_flights();
		sender_closes_with_flights(false);
		sender_closes_with_flights(true);
	}
	sender_returns();
}

int main(int argc, char **argv)
{
	int n;
	if (argc != 3 || host_load(&host, argv[1], 12))
		return 2;
	must(host_init(&host, show), "begin", "init");
	must(host_devices(&host, &n), "begin", "devices");
	if (!strcmp(argv[2], "silent"))
		silent();
	else if (!strcmp(argv[2], "silent-receiver"))
		receiver_is_silent();
	else
		closing();
	puts("each pending call has ended");
	return 0;
}
