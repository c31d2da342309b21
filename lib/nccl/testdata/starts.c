/* Fails each call by which a plugin starts its threads, and looks for leftovers: starts PLUGIN. These functions stand
 * before those of libc. */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "host.h"

#define SCRAP_BYTES (256 << 10) /* comm.h */

static const struct step {
	const char *call;
	int before; /* calls that succeed */
} steps[] = {{"malloc", 0}, {"epoll_create1", 0}, {"eventfd", 0}, {"pthread_create", 0}, {"pthread_create", 1}};

static struct step now;

/* fails counts a call, and reports whether it is the one to fail. */
static bool fails(const char *call, int reason)
{
	if (!now.call || strcmp(now.call, call) != 0 || now.before-- != 0)
		return false;
	errno = reason;
	return true;
}

extern void *__libc_malloc(size_t size);

void *malloc(size_t size)
{
	return size == SCRAP_BYTES && fails("malloc", ENOMEM) ? NULL : __libc_malloc(size);
}

int epoll_create1(int flags)
{
	return fails("epoll_create1", EMFILE) ? -1 : (int)syscall(SYS_epoll_create1, flags);
}

int eventfd(unsigned count, int flags)
{
	return fails("eventfd", EMFILE) ? -1 : (int)syscall(SYS_eventfd2, count, flags);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*function)(void *), void *argument)
{
	__typeof__(pthread_create) *create = (__typeof__(pthread_create) *)dlsym(RTLD_NEXT, "pthread_create");
	return fails("pthread_create", EAGAIN) ? EAGAIN : create(thread, attr, function, argument);
}

static int entries(const char *folder)
{
	int n = 0;
	DIR *d = opendir(folder);
	while (d && readdir(d))
		n++;
	closedir(d);
	return n;
}

/* mappings returns the number of mappings of the slot table. */
static int mappings(void)
{
	char line[4096];
	int n = 0;
	FILE *f = fopen("/proc/self/maps", "re");
	while (f && fgets(line, sizeof line, f))
		n += strstr(line, getenv("FARED_SLOTS")) != NULL;
	fclose(f);
	return n;
}

static void show(int level, unsigned long flags, const char *file, int line, const char *format, ...)
{
	va_list args;
	(void)level, (void)flags, (void)file, (void)line;
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	putchar('\n');
}

int main(int argc, char **argv)
{
	struct host host;
	_Alignas(8) unsigned char handle[NCCL_NET_HANDLE_MAXSIZE];
	void *listener;
	int devices, bad = 0;
	if (argc != 2 || host_load(&host, argv[1], 12) || host_init(&host, show) != ncclSuccess || host_devices(&host, &devices) != ncclSuccess)
		return 2;
	int descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task");
	for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
		now = steps[i];
		bool succeeds = host_listen(&host, 0, handle, &listener) == ncclSuccess;
		for (int k = 0; k < 1000 && entries("/proc/self/task") != threads; k++)
			usleep(1000); /* a thread that has been joined is listed for some time */
		int more[] = {entries("/proc/self/fd") - descriptors, entries("/proc/self/task") - threads, mappings()};
		if (!succeeds && !more[0] && !more[1] && !more[2])
			continue;
		printf("%s %d: listen %s; left: %d descriptors, %d threads, %d mappings of the table\n", steps[i].call, steps[i].before,
			succeeds ? "succeeds" : "fails", more[0], more[1], more[2]);
		bad = 1;
	}
	if (host_listen(&host, 0, handle, &listener) != ncclSuccess || host_close_listener(&host, listener) != ncclSuccess)
		return 1;
	return bad;
}
