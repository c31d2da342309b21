/* Reads a table in parent and children of fork: fork PATH CHILDREN. Two threads read a table while the parent forks.
 * Then every process waits for changes, by itself, with the table that it has inherited, until the shares of the pair
 * are 777. In the tables of these tests, the shares of a pair are equal, and the ports consecutive. */
#include <fared.h>

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define LAST 777

static struct fared_address source, destination;
static struct fared_table *shared;
static atomic_int stop;

/* Returns the share of the slots, or 0 if the pair was being changed. */
static uint32_t read_pair(struct fared_table *t, uint64_t *run)
{
	struct fared_pair pair;
	struct fared_slot slots[128];
	int error = fared_lookup(t, &source, &destination, &pair, slots, 128);
	CHECK(error == 0 || error == FARED_E_BUSY);
	if (error)
		return 0;
	CHECK(pair.slots > 1);
	for (uint32_t i = 1; i < pair.slots; i++)
		CHECK(slots[i].share_ppb == slots[0].share_ppb && slots[i].source_port == slots[0].source_port + i);
	*run = pair.run;
	return slots[0].share_ppb;
}

static void *read_shared(void *unused)
{
	uint64_t run;
	while (!atomic_load(&stop))
		read_pair(shared, &run);
	return unused;
}

/* Reads until the last change. The file must have been replaced meanwhile. */
static void follow(struct fared_table *t)
{
	uint64_t first = 0, run = 0;
	while (read_pair(t, &first) == 0)
		;
	while (read_pair(t, &run) != LAST)
		CHECK(fared_wait(t, 1000) >= 0);
	CHECK(run > first);
}

static int files(void)
{
	int n = 0;
	DIR *d = opendir("/proc/self/fd");
	CHECK(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

int main(int argc, char **argv)
{
	CHECK(argc == 3 && fared_parse_address("10.255.0.1", &source) == 0 && fared_parse_address("10.255.0.2", &destination) == 0);
	int before = files(), n = atoi(argv[2]);
	struct fared_table *t;
	CHECK(fared_open(&shared, argv[1]) == 0 && fared_open(&t, argv[1]) == 0 && files() == before);
	pthread_t threads[2];
	for (int i = 0; i < 2; i++)
		CHECK(pthread_create(&threads[i], NULL, read_shared, NULL) == 0);
	for (int i = 0; i < n; i++) {
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			uint64_t run;
			read_pair(shared, &run);
			fared_close(shared); /* the child's mapping; the parent's stays */
			follow(t);
			fared_close(t);
			_exit(0);
		}
	}
	printf("reading\n");
	fflush(stdout);
	follow(t);
	atomic_store(&stop, 1);
	for (int i = 0; i < 2; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	for (int status; n > 0; n--)
		CHECK(wait(&status) > 0 && status == 0);
	fared_close(shared);
	fared_close(t);
	return 0;
}
