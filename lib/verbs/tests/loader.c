/* Opens a library by name like NCCL and MSCCL++, a thousand times, looks up symbols by dlvsym or dlsym, and prints the library of each: loader LIBRARY
 * [SYMBOL VERSION|-]... If the environment has LOADER_CALL, it calls ibv_destroy_qp through the handle. */
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <string.h>

#include "../../tests/check.h"

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
	return dlclose(library);
}
