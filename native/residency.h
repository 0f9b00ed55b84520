/* Private to the kernel: what of a file the page cache has. */
#ifndef KVS_RESIDENCY_H
#define KVS_RESIDENCY_H

#include "kvs_kernel.h"

#include <stddef.h>

typedef enum kvs_residency { KVS_NONE_CACHED, KVS_SOME_CACHED, KVS_ALL_CACHED } kvs_residency;

/*
 * How much of a range, of at least one byte, is in the page cache, as far as
 * one page of every `step` bytes tells. A hint: it may change the next moment,
 * and a system that won't tell says all.
 */
kvs_residency kvs_look(const kvs_source *source, uint64_t offset, size_t length, size_t step);

#endif
