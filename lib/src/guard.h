/* Threads and locks of a library in the process of another program: the rule of fared_soft0, libfared-verbs and
 * libnccl-net-fared.
 *
 * Signals: threads of a library handle none but their own faults. Cancellation: no thread is canceled while it has a
 * lock, or between guard_begin and guard_end. Fork: the child finds every lock free. The process forks between changes,
 * unless a signal handler that has interrupted one forks: it does not wait. */
#ifndef FARED_GUARD_H
#define FARED_GUARD_H

#include <pthread.h>

/* Begin and end work that must not be canceled. Pairs nest. */
void guard_begin(void);
void guard_end(void);

void guard_lock(pthread_mutex_t *lock);
void guard_unlock(pthread_mutex_t *lock);

/* Has fork take at most GUARD_LOCKS locks of default attributes, in the order in which threads take them, and the child
 * call a function; NULL: none. A library calls it once. */
enum { GUARD_LOCKS = 2 };
void guard_forks(pthread_mutex_t *const *locks, unsigned n, void (*in_child)(void));

/* Starts a thread. Returns an errno. */
int guard_start(pthread_t *thread, const char *name, void *(*function)(void *), void *argument);

#endif
