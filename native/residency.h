/* Private to the kernel: what of a file the page cache has. */
#ifndef KVS_RESIDENCY_H
#define KVS_RESIDENCY_H

#include "kvs_kernel.h"

#include <stdbool.h>

/*
 * Is (nearly) all of a range in the page cache? A hint: it may change the
 * next moment, and a system that won't tell says yes.
 */
bool kvs_resident(const kvs_source *source, uint64_t offset, size_t length);

#endif
