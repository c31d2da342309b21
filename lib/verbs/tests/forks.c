/* Children of the client, by every way that libc has, and a thread that is canceled. */
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../tests/check.h"
#include "client.h"

extern char **environ;

/* Brings a queue pair to RTR. Returns the label that libibverbs receives. */
static uint32_t connect_qp(struct ibv_qp *qp, uint32_t label)
{
	struct ibv_qp_attr attr = attr_to("::ffff:10.255.0.2", label, 1, 1, 1);
	CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV) == 0);
	return fake.label;
}

/* Waits for a child, for two minutes at most. Returns its exit code, or -1 if it hangs, or ended by a signal. */
static int wait_for(pid_t child)
{
	int status = 0;
	pid_t ended = 0;
	for (int i = 0; i < 120000 && (ended = waitpid(child, &status, WNOHANG)) == 0; i++)
		usleep(1000);
	if (ended == 0) {
		kill(child, SIGKILL);
		CHECK(waitpid(child, &status, 0) == child);
	}
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* Returns the number of open files but the standard ones. */
static int files(void)
{
	int n = 0;
	DIR *d = opendir("/proc/self/fd");
	CHECK(d);
	for (struct dirent *e; (e = readdir(d));)
		n += e->d_name[0] != '.' && atoi(e->d_name) > 2 && atoi(e->d_name) != dirfd(d);
	closedir(d);
	return n;
}

static int blocked(void)
{
	sigset_t set;
	int n = 0;
	CHECK(pthread_sigmask(SIG_SETMASK, NULL, &set) == 0);
	for (int i = 1; i < 65; i++)
		n += sigismember(&set, i) == 1;
	return n;
}

int executed(void)
{
	struct ibv_qp *qp = make(0, IBV_QPT_RC, 0);
	/* What is inherited, before the first slot: then a thread starts, and it opens the table for a moment. */
	int inherited = tasks(), opened = files();
	bool slot = connect_qp(qp, 0) != 0;
	printf("tasks %d files %d blocked %d slot %d\n", inherited, opened, blocked(), slot);
	return ibv_destroy_qp(qp);
}

/* Executes the client itself. way: 0 fork, 1 vfork, 2 posix_spawn, 3 system. */
static void execute(int way)
{
	char path[4096], command[4200];
	ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
	CHECK(n > 0);
	path[n] = 0;
	char *argv[] = {path, "child", NULL};
	snprintf(command, sizeof command, "exec %s child", path);
	pid_t child = -1;
	fflush(stdout);
	switch (way) {
	case 0:
		child = fork();
		break;
	case 1:
		child = vfork();
		break;
	case 2:
		CHECK(posix_spawn(&child, path, NULL, NULL, argv, environ) == 0);
		break;
	default:
		CHECK(system(command) == 0);
		return;
	}
	if (child == 0) {
		execv(path, argv);
		_exit(9);
	}
	CHECK(child > 0 && wait_for(child) == 0);
}

/* A child that goes on: it gives the parent's queue pairs back, and one that it makes receives a slot, unless label is
 * one of the program. It ends as programs do. */
static void go_on(uint32_t label)
{
	struct ibv_qp *own = make(QPS - 1, IBV_QPT_RC, 0);
	/* The writer of the table may be interrupted in the middle of a change. */
	for (int i = 0; connect_qp(own, label) == 0 && i < 1000; i++)
		usleep(10000);
	CHECK(fake.label && (!label || fake.label == label));
	for (int i = 0; i < QPS; i++) {
		if (qps[i])
			CHECK(ibv_destroy_qp(qps[i]) == 0);
	}
	exit(0);
}

/* Makes n children, one after the other; prints the number of those that ended as they should. */
static void children(int n, uint32_t label)
{
	int right = 0;
	fflush(stdout);
	for (int i = 0; i < n; i++) {
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0)
			go_on(label);
		right += wait_for(child) == 0;
		if (right <= i)
			break; /* the first one that is wrong decides */
	}
	printf("%d\n", right);
}

static atomic_bool stop;

static void *relabel(void *qp)
{
	while (!atomic_load(&stop)) {
		struct ibv_qp_attr attr = attr_to("::ffff:10.255.0.2", 77, 1, 1, 1);
		CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV) == 0);
	}
	return NULL;
}

/* Makes children while two threads set labels of the program. */
static void children_of_threads(int n)
{
	pthread_t threads[2];
	for (int i = 0; i < 2; i++)
		CHECK(pthread_create(&threads[i], NULL, relabel, make(100 + i, IBV_QPT_RC, 0)) == 0);
	children(n, 78);
	atomic_store(&stop, true);
	for (int i = 0; i < 2; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
}

static volatile sig_atomic_t handled;

/* As handlers of crashes do, which start a debugger. */
static void handle(int signal)
{
	(void)signal;
	pid_t child = fork();
	if (child == 0) {
		execl("/bin/true", "true", NULL);
		_exit(9);
	}
	handled = child > 0 && wait_for(child) == 0;
}

/* Moves queue pair 0 in this thread, and forks in a handler of a signal that the driver raises. */
static void in_handler(void)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS};
	CHECK(signal(SIGUSR1, handle) != SIG_ERR);
	mlx5->raised = SIGUSR1;
	CHECK(ibv_modify_qp(qps[0], &attr, IBV_QP_STATE) == 0);
	mlx5->raised = 0;
	printf("%d\n", handled);
}

/* A thread that is to be canceled moves queue pair 0: the driver's wait is a place at which it could be, with the
 * lock. */
static void *move_canceled(void *moved)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS};
	CHECK(pthread_cancel(pthread_self()) == 0);
	*(bool *)moved = ibv_modify_qp(qps[0], &attr, IBV_QP_STATE) == 0;
	pthread_testcancel();
	return NULL;
}

static void canceled(void)
{
	pthread_t thread;
	void *result;
	bool moved = false;
	mlx5->delay_us = 1;
	CHECK(pthread_create(&thread, NULL, move_canceled, &moved) == 0 && pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
	printf("%d\n", moved);
}

/* Withholds the heap from a child, which calls exec. */
static void without_heap(void)
{
	unsigned long from = 0, to = 0;
	char line[512];
	FILE *f = fopen("/proc/self/maps", "re");
	CHECK(f);
	while (fgets(line, sizeof line, f)) {
		if (strstr(line, "[heap]"))
			CHECK(sscanf(line, "%lx-%lx", &from, &to) == 2);
	}
	fclose(f);
	CHECK(to && (unsigned long)(uintptr_t)qps[0] >= from && (unsigned long)(uintptr_t)qps[0] < to);
	fflush(stdout);
	/* The output is on the heap, and belongs to the parent. */
	CHECK(madvise((void *)from, to - from, MADV_DONTFORK) == 0);
	pid_t child = fork();
	if (child == 0) {
		execl("/bin/true", "true", NULL);
		_exit(9);
	}
	CHECK(madvise((void *)from, to - from, MADV_DOFORK) == 0);
	printf("%d\n", wait_for(child));
}

bool forks(const char *command, int n)
{
	if (strcmp(command, "execute") == 0)
		execute(n);
	else if (strcmp(command, "children") == 0)
		children(n, 0);
	else if (strcmp(command, "threads") == 0)
		children_of_threads(n);
	else if (strcmp(command, "handler") == 0)
		in_handler();
	else if (strcmp(command, "cancel") == 0)
		canceled();
	else if (strcmp(command, "heap") == 0)
		without_heap();
	else if (strcmp(command, "unset") == 0)
		printf("%d\n", unsetenv("LD_PRELOAD"));
	else if (strcmp(command, "delay") == 0)
		printf("%d\n", mlx5->delay_us = n);
	else if (strcmp(command, "files") == 0)
		printf("%d\n", files());
	else if (strcmp(command, "forkinit") == 0)
		printf("%d\n", ibv_fork_init());
	else
		return false;
	return true;
}
