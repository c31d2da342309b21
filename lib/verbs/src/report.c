/* Messages and statistics, both only if the environment asks for them. */
#include "internal.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct counters counters;

static int log_level;
static char *statistics; /* name of the file; NULL: none */

void report_prepare(void)
{
	const char *level = getenv("FARED_VERBS_LOG"), *file = secure_getenv("FARED_VERBS_STATS");
	log_level = level ? atoi(level) : 0;
	statistics = file && *file ? strdup(file) : NULL;
}

void report(int level, const char *format, ...)
{
	if (level > log_level)
		return;
	char line[512];
	int n = snprintf(line, sizeof line, "libfared-verbs[%d]: ", (int)getpid());
	va_list arguments;
	va_start(arguments, format);
	n += vsnprintf(line + n, sizeof line - (size_t)n, format, arguments);
	va_end(arguments);
	if (n > (int)sizeof line - 1)
		n = (int)sizeof line - 1;
	line[n] = '\n';
	/* One write, so that lines of several processes stay whole; a message that cannot be written has no other place. */
	if (write(STDERR_FILENO, line, (size_t)n + 1) < 0)
		return;
}

bool report_wanted(void)
{
	return statistics;
}

/* Copies a name and replaces the first %p by the number of the process. */
static int expand(char *out, size_t size, const char *name)
{
	const char *at = strstr(name, "%p");
	if (!at)
		return snprintf(out, size, "%s", name);
	return snprintf(out, size, "%.*s%d%s", (int)(at - name), name, (int)getpid(), at + 2);
}

void report_write(const char *const *names, const uint64_t *dealt, const uint64_t *present, uint32_t n)
{
	char file[4096], next[4104];
	int length = expand(file, sizeof file, statistics);
	if (length < 0 || length >= (int)sizeof file)
		return;
	snprintf(next, sizeof next, "%s.new", file);
	FILE *f = fopen(next, "we");
	if (!f)
		return;
	fprintf(f,
		"dealt %" PRIu64 "\nown_label %" PRIu64 "\nno_pair %" PRIu64 "\nno_slot %" PRIu64 "\nmoved %" PRIu64 "\nunsupported %" PRIu64
		"\nfailed %" PRIu64 "\n",
		counters.dealt, counters.own_label, counters.no_pair, counters.no_slot, counters.moved, counters.unsupported, counters.failed);
	for (uint32_t i = 0; i < n; i++)
		fprintf(f, "plane %s queue_pairs %" PRIu64 " dealt %" PRIu64 "\n", names[i] ? names[i] : "?", present[i], dealt[i]);
	if (fclose(f) == 0)
		rename(next, file);
	else
		unlink(next);
}
