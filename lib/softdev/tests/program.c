/* What programs do around a device: program CASE [ARGUMENT]. Each case ends with 0 if it went as with any other device,
 * and prints "ok". */
#include "pair.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

static atomic_bool stop;

/* ---- memory that changes ---- */

/* The memory that changes. */
static uint64_t *changes;
static size_t words;

/* sendmmsg stands before that of libc: the memory changes in the last moment in which a device can have read it. */
__attribute__((visibility("default"))) int sendmmsg(int fd, struct mmsghdr *messages, unsigned n, int flags)
{
	for (size_t i = 0; i < words; i++)
		__atomic_fetch_add(&changes[i], 1, __ATOMIC_RELAXED);
	return (int)syscall(SYS_sendmmsg, fd, messages, n, flags);
}

/* change_meanwhile reads or writes n times. Each word of the source grows, so each one at the destination does, too. */
static void change_meanwhile(enum ibv_wr_opcode opcode, size_t size, int n)
{
	struct ibv_context *c = open_fared_soft0();
	struct end ends[2];
	make_pair(ends, c);
	bool read = opcode == IBV_WR_RDMA_READ;
	uint64_t *to = calloc(1, size), before = 0;
	CHECK(to && (changes = calloc(1, size)));
	struct ibv_mr *source = ibv_reg_mr(ends[read].pd, changes, size, ACCESS), *destination = ibv_reg_mr(ends[!read].pd, to, size, ACCESS);
	CHECK(source && destination);
	words = size / 8;
	for (int i = 0; i < n; i++) {
		post(&ends[0], opcode, read ? destination : source, read ? source : destination);
		CHECK(await(&ends[0]) == IBV_WC_SUCCESS);
		for (size_t k = 0; k < words; k++)
			CHECK(to[k] >= before && to[k] <= changes[k]);
		CHECK(to[0] > before || i == 0);
		before = to[words - 1];
	}
	CHECK(ibv_dereg_mr(source) == 0 && ibv_dereg_mr(destination) == 0);
	destroy_pair(ends);
	CHECK(ibv_close_device(c) == 0);
	words = 0;
	free(changes);
	free(to);
}

static void changing(const char *n)
{
	change_meanwhile(IBV_WR_RDMA_READ, 8, atoi(n));
	change_meanwhile(IBV_WR_RDMA_READ, 65536, atoi(n));
	change_meanwhile(IBV_WR_RDMA_WRITE, 1024, atoi(n));
}

/* ---- signals ---- */

/* blocked returns the mask of blocked signals of a thread. */
static uint64_t blocked(const char *task)
{
	char path[300], line[256];
	unsigned long mask = 0;
	snprintf(path, sizeof path, "/proc/self/task/%s/status", task);
	FILE *f = fopen(path, "re");
	CHECK(f);
	while (fgets(line, sizeof line, f))
		if (strncmp(line, "SigBlk:", 7) == 0)
			mask = strtoul(line + 7, NULL, 16);
	fclose(f);
	return mask;
}

static volatile sig_atomic_t handled;

static void count(int signal)
{
	(void)signal;
	handled++;
}

/* signals: no thread of the device handles a signal of the program. */
static void signals(const char *unused)
{
	(void)unused;
	struct ibv_context *c = open_fared_soft0();
	char own[16];
	int threads = 0;
	/* Signals are 1 to 64; a bit is the number minus 1. KILL, STOP and those of libc cannot be blocked, and faults must
	 * not be. */
	uint64_t wanted = ~0ull & ~(1ull << (SIGKILL - 1) | 1ull << (SIGSTOP - 1) | 1ull << 31 | 1ull << 32);
	for (const int *fault = (const int[]){SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP, 0}; *fault; fault++)
		wanted &= ~(1ull << (*fault - 1));
	snprintf(own, sizeof own, "%d", getpid());
	DIR *d = opendir("/proc/self/task");
	CHECK(d);
	for (struct dirent *e; (e = readdir(d));)
		if (e->d_name[0] != '.' && strcmp(e->d_name, own) != 0) {
			threads++;
			while (blocked(e->d_name) & 1ull << (SIGSEGV - 1)) /* until it runs */
				sched_yield();
			CHECK((blocked(e->d_name) & wanted) == wanted);
		}
	closedir(d);
	CHECK(threads > 0 && blocked(own) == 0);

	sigset_t set, pending;
	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	CHECK(sigprocmask(SIG_BLOCK, &set, NULL) == 0);
	int fd = signalfd(-1, &set, SFD_CLOEXEC);
	struct signalfd_siginfo info;
	CHECK(kill(getpid(), SIGUSR1) == 0 && read(fd, &info, sizeof info) == sizeof info && info.ssi_signo == SIGUSR1);

	CHECK(signal(SIGUSR1, count) != SIG_ERR && kill(getpid(), SIGUSR1) == 0);
	CHECK(sigpending(&pending) == 0 && sigismember(&pending, SIGUSR1) && handled == 0);
	CHECK(sigprocmask(SIG_UNBLOCK, &set, NULL) == 0 && handled == 1);
	close(fd);
	CHECK(ibv_close_device(c) == 0);
}

/* ---- cancellation ---- */

/* use_canceled uses a device in a thread that is to be canceled: none of the functions is a place at which it is. */
static void *use_canceled(void *end)
{
	struct end *e = end;
	struct ibv_wc wc;
	struct ibv_port_attr port;
	CHECK(pthread_cancel(pthread_self()) == 0);
	for (int i = 0; i < 10; i++)
		CHECK(ibv_poll_cq(e->cq, 1, &wc) == 0 && ibv_req_notify_cq(e->cq, 0) == 0 && ibv_query_port(e->pd->context, 1, &port) == 0);
	handled = 1;
	pthread_testcancel();
	return NULL;
}

static void *poll_forever(void *end)
{
	struct ibv_wc wc;
	for (;;) {
		pthread_testcancel();
		CHECK(ibv_poll_cq(((struct end *)end)->cq, 1, &wc) >= 0);
	}
	return NULL;
}

static void *notify_forever(void *end)
{
	for (;;) {
		pthread_testcancel();
		CHECK(ibv_req_notify_cq(((struct end *)end)->cq, 0) == 0);
	}
	return NULL;
}

static void *await_event(void *end)
{
	struct ibv_cq *cq;
	void *context;
	ibv_get_cq_event(((struct end *)end)->channel, &cq, &context);
	return NULL;
}

static void *query_forever(void *end)
{
	struct ibv_port_attr attr;
	for (;;) {
		pthread_testcancel();
		CHECK(ibv_query_port(((struct end *)end)->pd->context, 1, &attr) == 0);
	}
	return NULL;
}

static void *open_forever(void *unused)
{
	(void)unused;
	for (;;) {
		pthread_testcancel();
		CHECK(ibv_close_device(open_fared_soft0()) == 0);
	}
	return NULL;
}

/* cancel: threads are canceled in functions of the device, which the others use on. */
static void cancel(const char *rounds)
{
	static void *(*const users[])(void *) = {poll_forever, notify_forever, await_event, query_forever, open_forever};
	enum { USERS = sizeof users / sizeof *users };
	for (int i = 0; i < atoi(rounds); i++) {
		struct ibv_context *c = open_fared_soft0();
		struct end ends[2];
		pthread_t threads[USERS];
		make_pair(ends, c);
		handled = 0;
		CHECK(pthread_create(&threads[0], NULL, use_canceled, &ends[0]) == 0 && pthread_join(threads[0], NULL) == 0 && handled == 1);
		for (int u = 0; u < USERS; u++)
			CHECK(pthread_create(&threads[u], NULL, users[u], &ends[0]) == 0);
		usleep((useconds_t)(i % 20) * 100); /* another moment in each round */
		for (int u = 0; u < USERS; u++) {
			void *result;
			CHECK(pthread_cancel(threads[u]) == 0 && pthread_join(threads[u], &result) == 0 && result == PTHREAD_CANCELED);
		}
		destroy_pair(ends);
		CHECK(ibv_close_device(c) == 0);
	}
}

/* ---- fork ---- */

static void fork_now(int signal)
{
	(void)signal;
	int reason = errno, status = -1;
	pid_t child = fork();
	if (child == 0)
		_exit(0);
	CHECK(child > 0);
	while (waitpid(child, &status, 0) < 0)
		CHECK(errno == EINTR);
	CHECK(status == 0);
	handled++;
	errno = reason;
}

/* fork_in_handler forks n times in a handler that interrupts operations of the device anywhere. */
static void fork_in_handler(const char *n)
{
	struct ibv_context *c = open_fared_soft0();
	struct end ends[2];
	static char memory[2][4096];
	make_pair(ends, c);
	struct ibv_mr *from = ibv_reg_mr(ends[0].pd, memory[0], 4096, ACCESS), *to = ibv_reg_mr(ends[1].pd, memory[1], 4096, ACCESS);
	CHECK(from && to);
	struct sigaction action = {.sa_handler = fork_now, .sa_flags = SA_RESTART};
	CHECK(sigaction(SIGALRM, &action, NULL) == 0);
	for (int forks = 0; forks < atoi(n); forks++) {
		struct itimerval soon = {.it_value.tv_usec = 1 + forks % 50 * 7}; /* another moment each time */
		CHECK(setitimer(ITIMER_REAL, &soon, NULL) == 0);
		while (handled == forks) {
			post(&ends[0], IBV_WR_RDMA_WRITE, from, to);
			CHECK(await(&ends[0]) == IBV_WC_SUCCESS);
		}
	}
	CHECK(ibv_dereg_mr(from) == 0 && ibv_dereg_mr(to) == 0);
	destroy_pair(ends);
	CHECK(ibv_close_device(c) == 0);
}

static void *fork_forever(void *context)
{
	while (!atomic_load(&stop)) {
		int status = -1;
		pid_t child = fork();
		if (child == 0) { /* the parent's context goes, and one of the child comes */
			(void)context;
#ifndef __SANITIZE_ADDRESS__ /* whose allocator has locks that other threads held at the fork */
			CHECK(ibv_close_device(context) == 0);
#ifndef __SANITIZE_THREAD__ /* which permits children of threads no thread */
			CHECK(ibv_close_device(open_fared_soft0()) == 0);
#endif
#endif
			_exit(0);
		}
		CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
	}
	return NULL;
}

/* ---- threads ---- */

static void *use_pair(void *context)
{
	for (int round = 0; round < 4; round++) {
		struct end ends[2];
		uint64_t memory[2][64] = {{0}};
		make_pair(ends, context);
		struct ibv_mr *from = ibv_reg_mr(ends[0].pd, memory[0], sizeof memory[0], ACCESS);
		struct ibv_mr *to = ibv_reg_mr(ends[1].pd, memory[1], sizeof memory[1], ACCESS);
		CHECK(from && to);
		for (uint64_t i = 1; i < 20; i++) {
			for (int k = 0; k < 64; k++)
				memory[0][k] = i * 64 + (uint64_t)k;
			post(&ends[0], IBV_WR_RDMA_WRITE, from, to);
			CHECK(await(&ends[0]) == IBV_WC_SUCCESS && memcmp(memory[0], memory[1], sizeof memory[0]) == 0);
		}
		CHECK(ibv_dereg_mr(from) == 0 && ibv_dereg_mr(to) == 0);
		destroy_pair(ends);
	}
	return NULL;
}

/* threads: each of n threads makes, uses and destroys queue pairs of one context, while another one forks. */
static void threads(const char *n)
{
	enum { MOST = 64 };
	struct ibv_context *c = open_fared_soft0();
	pthread_t users[MOST], forks;
	CHECK(atoi(n) <= MOST && pthread_create(&forks, NULL, fork_forever, c) == 0);
	for (int i = 0; i < atoi(n); i++)
		CHECK(pthread_create(&users[i], NULL, use_pair, c) == 0);
	for (int i = 0; i < atoi(n); i++)
		CHECK(pthread_join(users[i], NULL) == 0);
	atomic_store(&stop, true);
	CHECK(pthread_join(forks, NULL) == 0 && ibv_close_device(c) == 0);
}

/* ---- descriptors ---- */

/* descriptors: the program closes every descriptor, as daemons do. Its requests fail, and its objects can be
 * destroyed. */
static void descriptors(const char *unused)
{
	(void)unused;
	struct ibv_context *c = open_fared_soft0();
	struct end ends[2];
	static char memory[64];
	make_pair(ends, c);
	struct ibv_mr *mr = ibv_reg_mr(ends[0].pd, memory, sizeof memory, ACCESS);
	CHECK(mr);
	struct ibv_qp_attr soon = {.qp_state = IBV_QPS_RTS, .timeout = 1, .retry_cnt = 1};
	CHECK(ibv_modify_qp(ends[0].qp, &soon, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT) == 0);
	for (int fd = 3; fd < 1024; fd++)
		close(fd);
	post(&ends[0], IBV_WR_RDMA_WRITE, mr, mr);
	CHECK(await(&ends[0]) == IBV_WC_RETRY_EXC_ERR);
	CHECK(ibv_dereg_mr(mr) == 0);
	destroy_pair(ends);
	CHECK(ibv_close_device(c) == 0);
}

/* failed_open opens the device with one free descriptor, which is too few: none is left open. */
static void failed_open(const char *unused)
{
	(void)unused;
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct rlimit limit;
	int only = dup(STDERR_FILENO);
	CHECK(list && only >= 0 && getrlimit(RLIMIT_NOFILE, &limit) == 0 && close(only) == 0);
	limit.rlim_cur = (rlim_t)only + 1;
	CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	for (int i = 0; list[i]; i++)
		CHECK(strcmp(ibv_get_device_name(list[i]), "fared_soft0") != 0 || !ibv_open_device(list[i]));
	CHECK(dup(STDERR_FILENO) == only);
	ibv_free_device_list(list);
}

/* ---- dlclose ---- */

/* close_library closes the library while its device is open, a hundred times: the device stays, and its functions can
 * be called. */
static void close_library(const char *library)
{
	for (int i = 0; i < 100; i++) {
		void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
		CHECK(handle);
		struct ibv_device **(*list)(int *) = dlsym(handle, "ibv_get_device_list");
		struct ibv_context *(*open)(struct ibv_device *) = dlsym(handle, "ibv_open_device");
		int (*close)(struct ibv_context *) = dlsym(handle, "ibv_close_device");
		void (*free_list)(struct ibv_device **) = dlsym(handle, "ibv_free_device_list");
		CHECK(list && open && close && free_list);
		struct ibv_device **devices = list(NULL);
		CHECK(devices && devices[0]);
		struct ibv_context *c = open(devices[0]);
		CHECK(c && dlclose(handle) == 0);
		free_list(devices);
		CHECK(close(c) == 0);
	}
}

/* ---- paths ---- */

static void print(const char *what, int result)
{
	printf("%s: %d %d\n", what, result, result ? errno : 0);
}

/* paths prints the results of functions with paths, among them some that no program should use: with the library they
 * are as without it. */
static void paths(const char *unused)
{
	(void)unused;
	static char endless[8192];
	char *edge = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(edge != MAP_FAILED && mprotect(edge + 4096, 4096, PROT_NONE) == 0);
	memset(edge, 'a', 4096);
	memset(endless, 'a', sizeof endless - 1);
	char *cut = strcpy(edge + 4096 - 22, "/dev/infiniband/fared");
	edge[4095] = '0'; /* a path without an end before memory that cannot be read */
	const char *const names[] = {NULL, (char *)1, (char *)-1, edge + 4000, cut, "", "/", ".", "/dev/null", "/dev/null/x", "/missing",
		"/dev/infiniband/fared", endless, "/proc/self/exe"};
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		struct stat s, *volatile bad[] = {NULL, (struct stat *)8, &s};
		const char *volatile name = names[i]; /* the compiler knows that the functions want no NULL */
		for (int mode = -1; mode <= 8; mode++)
			print("access", access(name, mode));
		for (int k = 0; k < 3; k++)
			print("stat", stat(name, bad[k]));
	}
}

/* device_file: UCX wants to read and write the device's file. */
static void device_file(const char *unused)
{
	(void)unused;
	struct stat s;
	CHECK(stat("/dev/infiniband/fared_soft0", &s) == 0 && S_ISCHR(s.st_mode) && access("/dev/infiniband/fared_soft0", R_OK | W_OK) == 0);
}

/* ---- properties and refusals ---- */

/* refused reports whether a function has failed with an errno. */
static bool refused(const void *result, int reason)
{
	return !result && errno == reason;
}

static void refusals(const char *version)
{
	struct ibv_context *c = open_fared_soft0();
	struct ibv_pd *pd = ibv_alloc_pd(c);
	struct ibv_device_attr_ex ex;
	CHECK(pd && ibv_query_device_ex(c, NULL, &ex) == 0);
	const struct ibv_device_attr *device = &ex.orig_attr;
	CHECK(strcmp(device->fw_ver, version) == 0 && device->vendor_id && device->vendor_part_id && device->hw_ver);
	CHECK(ex.phys_port_cnt_ex == 1 && device->phys_port_cnt == 1 && device->atomic_cap == IBV_ATOMIC_HCA);
	CHECK(ex.pci_atomic_caps.fetch_add == IBV_PCI_ATOMIC_OPERATION_8_BYTE_SIZE_SUP &&
		ex.pci_atomic_caps.compare_swap == IBV_PCI_ATOMIC_OPERATION_8_BYTE_SIZE_SUP);
	struct ibv_query_device_ex_input unknown = {.comp_mask = 1};
	CHECK(ibv_query_device_ex(c, &unknown, &ex) == EINVAL);

	struct ibv_port_attr port;
	struct ibv_gid_entry table[64];
	CHECK(ibv_query_port(c, 1, &port) == 0 && ibv_query_gid_table(c, table, 64, 0) == port.gid_tbl_len && port.gid_tbl_len == 2);
	for (int i = 0; i < 2; i++) {
		union ibv_gid gid;
		CHECK(ibv_query_gid(c, 1, i, &gid) == 0 && memcmp(&gid, &table[i].gid, sizeof gid) == 0 && table[i].gid_index == (uint32_t)i);
		CHECK(table[i].port_num == 1 && table[i].gid_type == IBV_GID_TYPE_ROCE_V2);
	}
	CHECK(ibv_query_gid_table(c, table, 1, 0) == -EINVAL && ibv_query_gid_table(c, table, 64, 1) == -EINVAL);

	const int sizes[] = {0, -1, device->max_cqe + 1}, vectors[] = {-1, c->num_comp_vectors};
	for (int i = 0; i < 3; i++)
		CHECK(refused(ibv_create_cq(c, sizes[i], NULL, NULL, 0), EINVAL));
	for (int i = 0; i < 2; i++)
		CHECK(refused(ibv_create_cq(c, 1, NULL, NULL, vectors[i]), EINVAL));
	struct ibv_cq *cq = ibv_create_cq(c, device->max_cqe, NULL, NULL, 0);
	CHECK(cq && ibv_resize_cq(cq, 0) == EINVAL && ibv_resize_cq(cq, device->max_cqe + 1) == EINVAL && ibv_resize_cq(cq, 8) == 0);

	struct ibv_qp_init_attr attr = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 1, .max_send_sge = 1}}, asked;
	struct ibv_qp_attr current;
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);
	CHECK(qp && attr.cap.max_inline_data >= 64);
	CHECK(ibv_query_qp(qp, &current, IBV_QP_CAP, &asked) == 0 && asked.cap.max_inline_data == attr.cap.max_inline_data);
	CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0);

	char *memory = mmap(NULL, 4 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(memory != MAP_FAILED);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory + 100, 3 * 4096, ACCESS);
	CHECK(mr && ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, memory + 1, 4096, 0) == 0);
	CHECK(munmap(memory + 4096, 4096) == 0 && mprotect(memory + 2 * 4096, 4096, PROT_READ) == 0 && mprotect(memory + 3 * 4096, 4096, PROT_NONE) == 0);
	CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, memory, 8192, 0) == IBV_REREG_MR_ERR_INPUT && errno == EFAULT);
	CHECK(ibv_dereg_mr(mr) == 0);
	CHECK(refused(ibv_reg_mr(pd, memory + 4096, 1, 0), EFAULT) && refused(ibv_reg_mr(pd, memory, 3 * 4096, 0), EFAULT));
	CHECK(refused(ibv_reg_mr(pd, memory + 2 * 4096, 4096, ACCESS), EFAULT) && refused(ibv_reg_mr(pd, memory + 2 * 4096, 4097, 0), EFAULT));
	CHECK(refused(ibv_reg_mr(pd, NULL, 4096, ACCESS), EFAULT) && refused(ibv_reg_mr(pd, memory, SIZE_MAX, ACCESS), EINVAL));
	CHECK((mr = ibv_reg_mr(pd, memory + 2 * 4096, 4096, IBV_ACCESS_REMOTE_READ)) && ibv_dereg_mr(mr) == 0);
	CHECK((mr = ibv_reg_mr(pd, memory, 4096, ACCESS)));

	CHECK(refused(ibv_import_device(c->cmd_fd), EOPNOTSUPP) && refused(ibv_import_pd(c, pd->handle), EOPNOTSUPP));
	CHECK(refused(ibv_import_mr(pd, mr->handle), EOPNOTSUPP) && refused(ibv_import_dm(c, 0), EOPNOTSUPP));
	struct ibv_dm dm = {.context = c};
	ibv_unimport_mr(mr);
	ibv_unimport_pd(pd);
	ibv_unimport_dm(&dm);
	CHECK(ibv_dereg_mr(mr) == 0 && ibv_dealloc_pd(pd) == 0 && ibv_close_device(c) == 0);
}

static const struct {
	const char *name;
	void (*run)(const char *argument);
} cases[] = {
	{"changing", changing},
	{"signals", signals},
	{"cancel", cancel},
	{"fork", fork_in_handler},
	{"threads", threads},
	{"descriptors", descriptors},
	{"failed_open", failed_open},
	{"dlclose", close_library},
	{"paths", paths},
	{"device_file", device_file},
	{"refusals", refusals},
};

int main(int argc, char **argv)
{
	for (size_t i = 0; argc > 1 && i < sizeof cases / sizeof *cases; i++)
		if (strcmp(cases[i].name, argv[1]) == 0) {
			cases[i].run(argc > 2 ? argv[2] : "1");
			puts("ok");
			return 0;
		}
	fprintf(stderr, "usage: program CASE [ARGUMENT]\n");
	return 2;
}
