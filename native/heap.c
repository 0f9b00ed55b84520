/* Memory that is freed and soon wanted again. */
#include "kvs_kernel.h"

#include <stddef.h>
#include <stdlib.h>

/* The most by which glibc adapts: its DEFAULT_MMAP_THRESHOLD_MAX, less what it puts around a block. */
enum { MOST = (32 << 20) - (64 << 10) };

void kvs_keep_freed(void) {
    void *volatile block = malloc(MOST); /* volatile, or the compiler takes both calls for nothing */
    free(block);
}
