/*
 * Private to the kernel: its threads, and those that share a call's tasks.
 *
 * The pool is one for the process, started by the first call that wants it
 * and never stopped: an idle thread costs its stack. Calls from several threads run side
 * by side and share it. After a fork the child starts a pool of its own.
 */
#ifndef KVS_POOL_H
#define KVS_POOL_H

#include <pthread.h>
#include <stddef.h>

/*
 * Calls task(context, i) once for every i in [0, count), in order of i, from
 * up to `threads` threads, the caller's among them; returns when all have
 * returned, and what they wrote is visible then. If no thread can be started,
 * the caller does all the work: there is no error. A task must not call this.
 */
void kvs_pool_run(void (*task)(void *context, size_t i), void *context, size_t count, int threads);

/*
 * Starts a thread of the kernel's, to be joined or detached. It takes no signals: those are for the program's own threads.
 * Except those that a thread's own instruction raises, which would end the process if they were blocked; kvs_guard_run
 * answers one of them. Returns 0 or an errno.
 */
int kvs_start_thread(pthread_t *thread, void *(*run)(void *), void *context);

#endif
