/* Follows a table as a long job does, until standard input ends: follow SOURCE DESTINATION. Each change of the state is
 * a line: CLOCK_MONOTONIC in ns, the number of the file, the share of the pair's first slot, and the sentence of
 * fared_check. */
#include <fared.h>

#include <poll.h>
#include <string.h>
#include <time.h>

#include "check.h"

int main(int argc, char **argv)
{
	struct fared_table *t;
	struct fared_address source, destination;
	CHECK(argc == 3 && !fared_parse_address(argv[1], &source) && !fared_parse_address(argv[2], &destination));
	int error = fared_open(&t, NULL);
	if (error) {
		printf("0 0 0 %s\n", fared_error_text(error));
		return 0;
	}
	char last[512] = "";
	struct pollfd end = {.fd = 0, .events = POLLIN};
	while (poll(&end, 1, 0) == 0) {
		struct fared_pair pair;
		struct fared_slot slots[128] = {{0}};
		struct fared_status status;
		struct timespec now;
		fared_lookup(t, &source, &destination, &pair, slots, 128);
		CHECK(!fared_get_status(t, &status));
		char line[512];
		snprintf(line, sizeof line, "%llu %u %s", (unsigned long long)status.run, slots[0].share_ppb, fared_error_text(fared_check(t)));
		if (strcmp(line, last)) {
			clock_gettime(CLOCK_MONOTONIC, &now);
			printf("%lld%09ld %s\n", (long long)now.tv_sec, now.tv_nsec, line);
			fflush(stdout);
			strcpy(last, line);
		}
		fared_wait(t, 100);
	}
	fared_close(t);
	return 0;
}
