/* A program with queue pairs: obeys the commands on its standard input, one a line, and answers each with a line. The
 * environment variable FAKE_MLX5 names the library to load as that of mlx5 devices. */
#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../tests/check.h"
#include "client.h"

struct ibv_qp *qps[QPS];
struct fake_mlx5 *mlx5;
static struct ibv_device devices[4];
static struct ibv_context contexts[4];

void ibv_copy_qp_attr_from_kern(struct ibv_qp_attr *attr, void *kernel);

int tasks(void)
{
	int n = 0;
	DIR *d = opendir("/proc/self/task");
	CHECK(d);
	for (struct dirent *e; (e = readdir(d));)
		n += e->d_name[0] != '.';
	closedir(d);
	return n;
}

struct ibv_qp *make(int id, enum ibv_qp_type type, int device)
{
	struct ibv_qp *qp = calloc(1, sizeof *qp);
	CHECK(qp && id >= 0 && id < QPS && device < 4);
	if (!contexts[device].device) { /* as in a program, no context changes while the library's thread reads it */
		snprintf(devices[device].name, sizeof devices[device].name, "dev%d", device);
		contexts[device].device = &devices[device];
	}
	qp->context = &contexts[device];
	qp->qp_type = type;
	qp->qp_num = (uint32_t)id;
	qp->state = IBV_QPS_INIT;
	return qps[id] = qp;
}

struct ibv_qp_attr attr_to(const char *destination, uint32_t label, int global, int gid, int port)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR, .ah_attr = {.is_global = (uint8_t)global, .port_num = (uint8_t)port}};
	attr.ah_attr.grh.sgid_index = (uint8_t)gid;
	attr.ah_attr.grh.flow_label = label;
	CHECK(inet_pton(AF_INET6, destination, attr.ah_attr.grh.dgid.raw) == 1);
	return attr;
}

/* Changes the state of a queue pair and prints the result: error, errno, label that the library has received, whether
 * the attributes are as before. */
static void change(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	struct ibv_qp_attr before = *attr;
	fake.label = 0xdead;
	errno = ENOTTY;
	int error = ibv_modify_qp(qp, attr, mask), reason = errno;
	printf("%d %d %u %d\n", error, reason, fake.label, memcmp(&before, attr, sizeof before) == 0);
}

static void to_state(int id, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = {.qp_state = state};
	change(qps[id], &attr, IBV_QP_STATE);
}

/* Prints the recorded changes since the last time, when there are at least n, or 20 s have passed: those of mlx5
 * devices, or else of others. */
static void moves(int n)
{
	static int seen_of[2];
	bool others = !mlx5 || mlx5->other;
	int *seen = &seen_of[others];
	_Atomic int *calls = others ? &fake.calls : &mlx5->calls;
	const struct fake_call *call = others ? fake.call : mlx5->call;
	for (int i = 0; i < 20000 && atomic_load(calls) - *seen < n; i++)
		usleep(1000);
	usleep(n ? 0 : 100000); /* for calls that must not be there */
	for (int end = atomic_load(calls); *seen < end; ++*seen)
		printf("%u:%u:%lld ", call[*seen].qp_num, call[*seen].port, (long long)call[*seen].ns);
	printf("\n");
}

/* The child has no thread, and can have queue pairs with slots. A change of weights between its two answers does not
 * move the parent's queue pairs here. */
static void in_child(void)
{
	char line[8];
	int before = tasks(), modified = fake.modified;
	struct ibv_qp_attr attr = attr_to("::ffff:10.255.0.2", 0, 1, 1, 1);
	struct ibv_qp *own = make(QPS - 1, IBV_QPT_RC, 0);
	CHECK(ibv_modify_qp(own, &attr, IBV_QP_STATE | IBV_QP_AV) == 0);
	int label = fake.label != 0, after = tasks();
	printf("%d %d %d %d\n", before, fake.modified - modified, label, after);
	fflush(stdout);
	CHECK(fgets(line, sizeof line, stdin));
	int calls = atomic_load(&mlx5->calls);
	usleep(200000); /* for calls that must not be there */
	printf("%d\n", atomic_load(&mlx5->calls) - calls);
	CHECK(ibv_destroy_qp(own) == 0);
	for (int i = 0; i < QPS - 1; i++) {
		if (qps[i])
			CHECK(ibv_destroy_qp(qps[i]) == 0);
	}
}

static void fork_child(void)
{
	fflush(stdout);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		in_child();
		fflush(stdout);
		_exit(0); /* like a child that ends without the exit handlers */
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void obey(const char *command, const int a[4], const char *destination)
{
	struct ibv_qp_attr attr;
	if (strcmp(command, "qp") == 0) {
		make(a[0], (enum ibv_qp_type)a[1], a[2]);
		printf("ok\n");
	} else if (strcmp(command, "rtr") == 0) { /* queue pair, label, is_global, GID index + 16 * port */
		attr = attr_to(destination, (uint32_t)a[1], a[2], a[3] % 16, a[3] / 16);
		change(qps[a[0]], &attr, IBV_QP_STATE | IBV_QP_AV);
	} else if (strcmp(command, "cm") == 0) { /* the same, with the kernel's label */
		attr = attr_to(destination, 0, a[2], a[3] % 16, a[3] / 16);
		uint32_t label = (uint32_t)a[1];
		ibv_copy_qp_attr_from_kern(&attr, &label);
		change(qps[a[0]], &attr, IBV_QP_STATE | IBV_QP_AV);
	} else if (strcmp(command, "state") == 0) {
		to_state(a[0], (enum ibv_qp_state)a[1]);
	} else if (strcmp(command, "destroy") == 0) {
		errno = ENOTTY;
		int error = ibv_destroy_qp(qps[a[0]]), reason = errno;
		if (!error)
			qps[a[0]] = NULL;
		printf("%d %d\n", error, reason);
	} else if (strcmp(command, "close") == 0) {
		int error = ibv_close_device(&contexts[a[0]]);
		printf("%d %d\n", error, fake.closed == &contexts[a[0]]);
	} else if (strcmp(command, "fail") == 0) {
		fake.fail = a[0];
		printf("ok\n");
	} else if (strcmp(command, "mlx5") == 0) {
		mlx5->error = a[0];
		printf("ok\n");
	} else if (strcmp(command, "other") == 0) { /* mlx5's library is there, and the devices are of another driver */
		mlx5->other = 1;
		printf("ok\n");
	} else if (strcmp(command, "vector") == 0) { /* the result of a change of the address vector; prints the changes with wrong ones */
		fake.error = a[0];
		printf("%d\n", fake.other);
	} else if (strcmp(command, "moves") == 0) {
		moves(a[0]);
	} else if (strcmp(command, "tasks") == 0) {
		printf("%d\n", tasks());
	} else if (strcmp(command, "queried") == 0) {
		printf("%d\n", fake.queried);
	} else if (strcmp(command, "fork") == 0) {
		fork_child();
	} else if (!forks(command, a[0])) {
		CHECK(strcmp(command, "exec") == 0);
		fflush(stdout);
		execlp("/bin/echo", "echo", "executed", NULL);
	}
	fflush(stdout);
}

int main(int argc, char **argv)
{
	if (argc > 1 && strcmp(argv[1], "child") == 0)
		return executed();
	const char *library = getenv("FAKE_MLX5");
	if (library) {
		void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL); /* as libibverbs loads a driver */
		CHECK(handle && (mlx5 = dlsym(handle, "fake_mlx5")));
	}
	char line[256], command[16], destination[64];
	while (fgets(line, sizeof line, stdin)) {
		int a[4] = {0};
		destination[0] = 0;
		CHECK(sscanf(line, "%15s %d %d %d %d %63s", command, &a[0], &a[1], &a[2], &a[3], destination) >= 1);
		obey(command, a, destination);
	}
	for (int i = 0; i < QPS; i++) {
		if (qps[i])
			CHECK(ibv_destroy_qp(qps[i]) == 0);
	}
	return 0;
}
