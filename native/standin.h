/* Private to the kernel: pages that stand in for those of LMDB's maps that can't be read. */
#ifndef KVS_STANDIN_H
#define KVS_STANDIN_H

#include <stdbool.h>
#include <stdint.h>

/*
 * For the handler of SIGBUS: if `address` lies in a map that is watched, puts a page in the place of the one that can't be
 * read there, counts it, and returns true: the instruction can be run again. Safe in a signal handler.
 */
bool kvs_stand_in(uintptr_t address);

/* In a forked child: the maps are the parent's, and nobody may use them here. */
void kvs_stand_in_after_fork(void);

#endif
