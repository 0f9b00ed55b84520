/* Private to the kernel: reading a map whose pages may turn out to be unreadable. */
#ifndef KVS_GUARD_H
#define KVS_GUARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * From begin to end, kvs_guard_run may be called, on any thread. Between them
 * the process's handler for SIGBUS is ours, also if somebody has put his own
 * over it since a hold; it passes on what it isn't meant for. Pairs may nest and overlap. `mask` keeps the caller's setting.
 */
typedef struct kvs_guard_mask {
    bool blocked;
} kvs_guard_mask;
void kvs_guard_begin(kvs_guard_mask *mask);
void kvs_guard_end(const kvs_guard_mask *mask);

/* The same without a mask: the handler is ours from hold to release. */
void kvs_guard_hold(void);
void kvs_guard_release(void);

/*
 * Calls f(context), which may read [address, address + length) of maps.
 * Returns false if a page of that range could not be read: f was left where
 * it stood then, so it must hold no lock and own nothing. Not to be nested.
 */
bool kvs_guard_run(void (*f)(void *context), void *context, uint64_t address, size_t length);

#endif
