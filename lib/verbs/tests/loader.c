/* Opens a library by name like NCCL and MSCCL++, a thousand times, looks up symbols by dlvsym or dlsym, and prints the
 * library of each: loader LIBRARY [SYMBOL VERSION|-]... If the environment has LOADER_CALL, it calls ibv_destroy_qp
 * through the handle. If it has FAKE_MLX5, it closes every library while a queue pair has a slot, prints "closed",
 * reads a line, and prints the queue pair's calls of the driver. */
#include <arpa/inet.h>
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../tests/check.h"
#include "fake.h"

typedef int modify(struct ibv_qp *, struct ibv_qp_attr *, int);

static void close_all(void *library)
{
	static struct ibv_device device = {.name = "dev0"};
	static struct ibv_context context = {.device = &device};
	static struct ibv_qp qp = {.context = &context, .qp_type = IBV_QPT_RC, .state = IBV_QPS_INIT};
	void *driver = dlopen(getenv("FAKE_MLX5"), RTLD_NOW | RTLD_LOCAL);
	CHECK(driver);
	struct fake_mlx5 *mlx5 = dlsym(driver, "fake_mlx5");
	modify *change = (modify *)dlvsym(library, "ibv_modify_qp", "IBVERBS_1.1");
	CHECK(mlx5 && change);
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR, .ah_attr = {.is_global = 1, .port_num = 1, .grh.sgid_index = 1}};
	CHECK(inet_pton(AF_INET6, "::ffff:10.255.0.2", attr.ah_attr.grh.dgid.raw) == 1);
	CHECK(change(&qp, &attr, IBV_QP_STATE | IBV_QP_AV) == 0);
	attr.qp_state = IBV_QPS_RTS;
	CHECK(change(&qp, &attr, IBV_QP_STATE) == 0);
	CHECK(dlclose(driver) == 0 && dlclose(library) == 0);
	pid_t child = fork(); /* which ends without the libraries' handles */
	CHECK(child >= 0);
	if (child == 0)
		exit(0);
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	char line[8];
	printf("closed\n");
	fflush(stdout);
	CHECK(fgets(line, sizeof line, stdin));
	for (int i = 0; i < 30000 && atomic_load(&mlx5->calls) == 0; i++)
		usleep(1000);
	printf("%d calls\n", atomic_load(&mlx5->calls));
	exit(0);
}

int main(int argc, char **argv)
{
	CHECK(argc > 1);
	void *library = NULL;
	for (int i = 0; i < 1000; i++) {
		CHECK(!library || dlclose(library) == 0);
		library = dlopen(argv[1], RTLD_NOW);
		if (!library)
			fprintf(stderr, "%s\n", dlerror());
		CHECK(library);
	}
	for (int i = 2; i + 1 < argc; i += 2) {
		void *symbol = strcmp(argv[i + 1], "-") ? dlvsym(library, argv[i], argv[i + 1]) : dlsym(library, argv[i]);
		Dl_info info = {0};
		CHECK(!symbol || dladdr(symbol, &info));
		const char *slash = info.dli_fname ? strrchr(info.dli_fname, '/') : NULL;
		printf("%s %s %s\n", argv[i], argv[i + 1], slash ? slash + 1 : "missing");
	}
	if (getenv("LOADER_CALL")) {
		int (*destroy)(struct ibv_qp *) = (int (*)(struct ibv_qp *))dlvsym(library, "ibv_destroy_qp", "IBVERBS_1.1");
		CHECK(destroy && destroy(calloc(1, sizeof(struct ibv_qp))) == 0);
	}
	if (getenv("FAKE_MLX5"))
		close_all(library);
	return dlclose(library);
}
