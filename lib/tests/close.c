/* Opens the library by name, reads a table, and closes both, 200 times: close LIBRARY PATH. Nothing of them is mapped
 * at the end. */
#include <fared.h>

#include <dlfcn.h>
#include <string.h>

#include "check.h"

#define SYMBOL(name) __typeof__(name) *name##_ = (__typeof__(name) *)dlsym(library, #name)

int main(int argc, char **argv)
{
	CHECK(argc == 3);
	for (int i = 0; i < 200; i++) {
		void *library = dlopen(argv[1], RTLD_NOW);
		CHECK(library);
		SYMBOL(fared_open);
		SYMBOL(fared_next_pair);
		SYMBOL(fared_close);
		struct fared_table *t;
		struct fared_address source, destination;
		struct fared_pair pair;
		uint32_t cursor = 0;
		CHECK(fared_open_ && fared_next_pair_ && fared_close_);
		CHECK(fared_open_(&t, argv[2]) == 0 && fared_next_pair_(t, &cursor, &source, &destination, &pair, NULL, 0) == 0);
		fared_close_(t);
		CHECK(dlclose(library) == 0);
	}
	char line[4096];
	FILE *f = fopen("/proc/self/maps", "re");
	CHECK(f);
	while (fgets(line, sizeof line, f))
		CHECK(!strstr(line, argv[1]) && !strstr(line, argv[2]));
	fclose(f);
	return 0;
}
