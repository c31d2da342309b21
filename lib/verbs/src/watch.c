/* The thread that waits for changes of the slot table while queue pairs have slots. */
#include "slots.h"

#include <time.h>

/* The longest time without a look at the queue pairs. */
#define TICK_MS 1000

static void write_statistics(void)
{
	struct fared_status status;
	if (!state.changed || !report_wanted() || fared_get_status(state.table, &status))
		return;
	uint64_t present[DEAL_PLANES] = {0};
	const char *names[DEAL_PLANES];
	uint32_t planes = status.planes < DEAL_PLANES ? status.planes : DEAL_PLANES;
	for (uint32_t i = 0; i < planes; i++)
		names[i] = fared_plane_name(state.table, i);
	for (struct set *s = state.sets; s; s = s->next) {
		for (struct queue_pair *q = s->members; q; q = q->next) {
			if (q->slot >= 0)
				present[s->deal.slots[q->slot].plane % DEAL_PLANES]++;
		}
	}
	report_write(names, state.dealt, present, planes);
	state.changed = false;
}

static void move_sets(void)
{
	for (struct set *s = state.sets; s; s = s->next) {
		if (!fared_is_current(state.table, &s->deal.pair))
			move_set(s);
	}
}

/* Moves queue pairs. After a change the writer has just been there, so the file is whole, and its pairs are read before
 * the path is looked at. */
static void follow(bool changed)
{
	if (changed)
		move_sets();
	if (fared_refresh(state.table) == 1 || !changed)
		move_sets();
}

static void *watch(void *path)
{
	struct fared_table *table = NULL;
	bool changed = false;
	open_table(&table, path);
	for (;;) {
		guard_lock(&state.lock);
		state.waiting = table;
		follow(changed);
		report_stale(fared_check(state.table));
		write_statistics();
		bool end = !table || !state.count;
		state.watching = !end;
		if (end)
			state.waiting = NULL;
		guard_unlock(&state.lock);
		if (end)
			break;
		changed = fared_wait(table, TICK_MS) == 1;
	}
	fared_close(table);
	return NULL;
}

void watch_start(void)
{
	if (state.watching)
		return;
	pthread_t thread;
	state.watching = guard_start(&thread, "fared-verbs", watch, state.path) == 0;
	if (state.watching)
		pthread_detach(thread);
	else
		report(1, "no thread that follows changes of weights: queue pairs keep their slots");
}

/* The state of the parent in a child of fork: the queue pairs are the parent's, and the child has neither the thread
 * nor any reason to change their source ports. It is neither read nor freed, because a program may withhold pages of
 * its heap from children (MADV_DONTFORK, as ibv_fork_init does), and the child must live until it calls exec. The copy
 * lets leak checkers find the memory. */
__attribute__((used)) static struct state inherited;

static void in_child(void)
{
	inherited = state;
	state = (struct state){.lock = PTHREAD_MUTEX_INITIALIZER};
	counters = (struct counters){0};
}

/* No thread holds the lock before this. */
__attribute__((constructor)) static void watch_forks(void)
{
	guard_forks((pthread_mutex_t *const[]){&state.lock}, 1, in_child);
}

void watch_prepare(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	pthread_once(&once, report_prepare);
	move_prepare();
}

/*
 * The last statistics of a program that ends before the thread's next look. The thread may hold the lock for a look; a
 * thread that stands still with the lock must not keep the program.
 */
__attribute__((destructor)) static void at_exit(void)
{
	struct timespec until;

	if (!report_wanted())
		return;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += 5;
	guard_begin();
	if (pthread_mutex_timedlock(&state.lock, &until) == 0) {
		if (state.table)
			write_statistics();
		pthread_mutex_unlock(&state.lock);
	}
	guard_end();
}
