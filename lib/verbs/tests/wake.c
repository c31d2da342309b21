/* Waits for the word at the start of a file, which another process changes, and writes the time at which it was awake,
 * CLOCK_MONOTONIC in ns, behind it: wake FILE. This is the least that any program has that waits for the slot table. */
#include <fcntl.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../../tests/check.h"

int main(int argc, char **argv)
{
	CHECK(argc == 2);
	int fd = open(argv[1], O_RDWR);
	CHECK(fd >= 0);
	struct {
		_Atomic uint32_t word, done;
		_Atomic int64_t ns;
	} *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(shared != MAP_FAILED);
	for (uint32_t seen = 0;;) {
		uint32_t word = atomic_load(&shared->word);
		if (word == UINT32_MAX)
			return 0;
		if (word == seen) {
			syscall(SYS_futex, &shared->word, FUTEX_WAIT, seen, NULL, NULL, 0);
			continue;
		}
		struct timespec now;
		clock_gettime(CLOCK_MONOTONIC, &now);
		atomic_store(&shared->ns, (int64_t)now.tv_sec * 1000000000 + now.tv_nsec);
		seen = word;
		atomic_store(&shared->done, word);
	}
}
