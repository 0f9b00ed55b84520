/* What of a file the page cache has, by cachestat where the system has it (Linux 6.5), else by mincore. */
#define _GNU_SOURCE
#include "residency.h"

#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_cachestat
#define SYS_cachestat 451 /* the same on all architectures */
#endif

/* uapi/linux/mman.h, which may be older than the system that this runs on */
struct cache_range {
    uint64_t offset, length;
};
struct cache_state {
    uint64_t cached, dirty, writeback, evicted, recently_evicted;
};

enum { SHARE = 16 }; /* one page of so many may be missing: reading it by a fault costs less than reading all past the cache */

static bool by_mincore(const kvs_source *source, uint64_t offset, uint64_t pages, uint64_t page) {
    unsigned char present[1024];
    uint64_t missing = 0, step;
    for (uint64_t at = 0; at < pages; at += step) {
        step = pages - at < sizeof present ? pages - at : sizeof present;
        if (mincore((void *)(uintptr_t)(source->map + offset + at * page), step * page, present)) return true;
        for (uint64_t i = 0; i < step; i++) missing += !(present[i] & 1);
        if (missing * SHARE > pages) return false;
    }
    return true;
}

bool kvs_resident(const kvs_source *source, uint64_t offset, size_t length) {
    static atomic_bool no_cachestat;
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    const uint64_t start = offset / page * page, pages = (offset + length - start + page - 1) / page;
    if (!atomic_load_explicit(&no_cachestat, memory_order_relaxed)) {
        struct cache_range range = {start, pages * page};
        struct cache_state state;
        if (!syscall(SYS_cachestat, (unsigned)source->fd, &range, &state, 0))
            return (pages - (state.cached < pages ? state.cached : pages)) * SHARE <= pages;
        atomic_store_explicit(&no_cachestat, true, memory_order_relaxed);
    }
    return by_mincore(source, start, pages, page);
}
