/*
 * Private to the kernel: the threads that share a call's tasks.
 *
 * The pool is one for the process, started by the first call that wants it
 * and never stopped: an idle thread costs its stack. Calls from several threads run side
 * by side and share it. After a fork the child starts a pool of its own.
 */
#ifndef KVS_POOL_H
#define KVS_POOL_H

#include <stddef.h>

/*
 * Calls task(context, i) once for every i in [0, count), in order of i, from
 * up to `threads` threads, the caller's among them; returns when all have
 * returned, and what they wrote is visible then. If no thread can be started,
 * the caller does all the work: there is no error. A task must not call this.
 */
void kvs_pool_run(void (*task)(void *context, size_t i), void *context, size_t count, int threads);

#endif
