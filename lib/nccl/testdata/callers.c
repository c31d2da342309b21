/* Callers of the plugin that make progress, and callers that do not. callers PLUGIN unattended TABLE TABLE: a process
 * that has called test all the time posts messages and never calls again, to another process with another slot table.
 * callers PLUGIN threads: threads exchange messages at the same time. A message that stays pending fails the program
 * after a minute. */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "host.h"

#define GREATEST (1 << 20)
#define THREADS 4
#define MESSAGES 800 /* of a thread */
#define WARM 500     /* after which callers make progress */

static struct host host;

static void fail(const char *what)
{
	fprintf(stderr, "callers: %s\n", what);
	_exit(1);
}

static void must(ncclResult_t result, const char *call)
{
	if (result != ncclSuccess)
		fail(call);
}

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void show(int level, unsigned long flags, const char *file, int line, const char *format, ...)
{
	(void)flags, (void)file, (void)line;
	if (level != NCCL_LOG_WARN)
		return;
	va_list args;
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
}

/* link is a communicator in each direction, to another process or to the own one. */
struct link {
	_Alignas(8) unsigned char handle[NCCL_NET_HANDLE_MAXSIZE];
	void *listener, *sends, *receives, *out_memory, *in_memory;
	char *out, *in;
};

static void listens(struct link *l)
{
	memset(l, 0, sizeof *l);
	must(host_listen(&host, 0, l->handle, &l->listener), "listen");
}

static void connects(struct link *l)
{
	for (double begin = now(); !l->sends || !l->receives;) {
		if (!l->sends)
			must(host_connect(&host, 0, l->handle, &l->sends), "connect");
		if (!l->receives)
			must(host_accept(&host, l->listener, &l->receives), "accept");
		if (now() - begin > 60)
			fail("no connection");
		nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
	}
	l->out = malloc(GREATEST);
	l->in = malloc(GREATEST);
	must(host_register(&host, l->sends, l->out, GREATEST, &l->out_memory), "regMr");
	must(host_register(&host, l->receives, l->in, GREATEST, &l->in_memory), "regMr");
}

static void closes(struct link *l)
{
	must(host_deregister(&host, l->sends, l->out_memory), "deregMr");
	must(host_deregister(&host, l->receives, l->in_memory), "deregMr");
	must(host_close_send(&host, l->sends), "closeSend");
	must(host_close_receive(&host, l->receives), "closeRecv");
	must(host_close_listener(&host, l->listener), "closeListen");
	free(l->out);
	free(l->in);
}

static void *sends(struct link *l, size_t size)
{
	void *request = NULL;
	while (!request)
		must(host_send(&host, l->sends, l->out, size, 1, l->out_memory, &request), "isend");
	return request;
}

static void *receives(struct link *l)
{
	void *request = NULL, *data = l->in;
	size_t size = GREATEST;
	int tag = 1;
	while (!request)
		must(host_receive(&host, l->receives, 1, &data, &size, &tag, &l->in_memory, &request), "irecv");
	return request;
}

static int ends(void *request)
{
	int done = 0, size = 0;
	for (double begin = now(); !done; sched_yield()) {
		must(host_test(&host, request, &done, &size), "test");
		if (!done && now() - begin > 60)
			fail("a message stays pending");
	}
	return size;
}

/* exchange sends a message and receives another one. */
static void exchange(struct link *l, size_t size, char content)
{
	void *in = receives(l);
	memset(l->out, content, size);
	void *out = sends(l, size);
	if ((size_t)ends(in) != size || l->in[0] != content || memcmp(l->in, l->in + 1, size - 1))
		fail("a message has another size or content");
	ends(out);
}

/* process has one end of a link between two processes. The first one calls test as long as anything is pending; the
 * second one posts a receive and a message, and pauses. */
static void process(struct link *l, int peer, int first, size_t size)
{
	unsigned char far[NCCL_NET_HANDLE_MAXSIZE];
	listens(l);
	if (send(peer, l->handle, sizeof l->handle, MSG_NOSIGNAL) != sizeof l->handle || recv(peer, far, sizeof far, MSG_WAITALL) != sizeof far)
		fail("the other process has ended");
	memcpy(l->handle, far, sizeof far);
	connects(l);
	for (int i = 0; i < WARM; i++)
		exchange(l, 8, (char)i);
	memset(l->out, 7, size);
	void *in = receives(l), *out = sends(l, size);
	if (!first) {
		for (;;)
			pause();
	}
	if ((size_t)ends(in) != size || l->in[0] != 7 || memcmp(l->in, l->in + 1, size - 1))
		fail("a message has another size or content");
	ends(out);
	closes(l);
}

static void unattended(const char *plugin, char **tables)
{
	static const size_t sizes[] = {8, 60000, GREATEST};
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		int peers[2];
		if (socketpair(AF_UNIX, SOCK_STREAM, 0, peers))
			fail("socketpair");
		pid_t child[2];
		for (int k = 0; k < 2; k++) {
			child[k] = fork();
			if (child[k] > 0)
				continue;
			struct link l;
			setenv("FARED_SLOTS", tables[k], 1);
			if (host_load(&host, plugin, 12))
				_exit(2);
			must(host_init(&host, show), "init");
			process(&l, peers[k], k == 0, sizes[i]);
			exit(0);
		}
		int status = 1;
		waitpid(child[0], &status, 0);
		kill(child[1], SIGKILL);
		waitpid(child[1], NULL, 0);
		if (status)
			exit(1);
		close(peers[0]);
		close(peers[1]);
	}
}

static void *run(void *link)
{
	static const size_t sizes[] = {8, 3000, 8, 70000, 1, 8, 200000, 64};
	for (int i = 0; i < MESSAGES; i++)
		exchange(link, sizes[i % 8] + (i % 100 ? 0 : GREATEST / 2), (char)i);
	return NULL;
}

static void threads(const char *plugin)
{
	static struct link links[THREADS];
	pthread_t ids[THREADS];
	if (host_load(&host, plugin, 12))
		exit(2);
	must(host_init(&host, show), "init");
	for (int i = 0; i < THREADS; i++) {
		listens(&links[i]);
		connects(&links[i]);
	}
	for (int i = 0; i < THREADS; i++)
		pthread_create(&ids[i], NULL, run, &links[i]);
	for (int i = 0; i < THREADS; i++) {
		pthread_join(ids[i], NULL);
		closes(&links[i]);
	}
	must(host_finalize(&host), "finalize");
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[2], "threads"))
		threads(argv[1]);
	else if (argc == 5 && !strcmp(argv[2], "unattended"))
		unattended(argv[1], argv + 3);
	else
		return 2;
	puts("each message has arrived");
	return 0;
}
