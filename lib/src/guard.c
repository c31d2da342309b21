#include "guard.h"

#include <signal.h>
#include <stdbool.h>

/* The work of this thread that must not be canceled: its depth, and the state of cancellation before. */
static _Thread_local struct {
	unsigned depth;
	int before;
	bool forking; /* this thread forks, and has the locks */
} own;

static struct {
	pthread_mutex_t *locks[GUARD_LOCKS];
	unsigned n;
	void (*in_child)(void);
} forks;

void guard_begin(void)
{
	if (own.depth++ == 0)
		pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &own.before);
}

void guard_end(void)
{
	if (--own.depth == 0)
		pthread_setcancelstate(own.before, NULL);
}

void guard_lock(pthread_mutex_t *lock)
{
	guard_begin();
	pthread_mutex_lock(lock);
}

void guard_unlock(pthread_mutex_t *lock)
{
	pthread_mutex_unlock(lock);
	guard_end();
}

/* A handler of a signal that interrupts this thread with a lock would wait for the thread itself. */
static void before_fork(void)
{
	own.forking = own.depth == 0;
	for (unsigned i = 0; own.forking && i < forks.n; i++)
		guard_lock(forks.locks[i]);
}

static void in_parent(void)
{
	for (unsigned i = forks.n; own.forking && i > 0; i--)
		guard_unlock(forks.locks[i - 1]);
	own.forking = false;
}

/* in_child makes the locks anew: their owners are threads of the parent. It reads no memory that a program may withhold
 * from children (MADV_DONTFORK). */
static void in_child(void)
{
	for (unsigned i = 0; i < forks.n; i++) {
		*forks.locks[i] = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
		if (own.forking)
			guard_end();
	}
	own.forking = false;
	if (forks.in_child)
		forks.in_child();
}

void guard_forks(pthread_mutex_t *const *locks, unsigned n, void (*child)(void))
{
	for (forks.n = 0; forks.n < n; forks.n++)
		forks.locks[forks.n] = locks[forks.n];
	forks.in_child = child;
	pthread_atfork(before_fork, in_parent, in_child);
}

int guard_start(pthread_t *thread, const char *name, void *(*function)(void *), void *argument)
{
	static const int faults[] = {SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP};
	sigset_t all, before;
	sigfillset(&all);
	for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
		sigdelset(&all, faults[i]);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	int err = pthread_create(thread, NULL, function, argument);
	if (!err)
		pthread_setname_np(*thread, name);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return err;
}
