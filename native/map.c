/*
 * Maps of a file: read-only ones of a file that may still grow, their safe
 * population, and windows, in which pieces of a file lie side by side.
 */
#define _GNU_SOURCE
#include "guard.h"
#include "kvs_kernel.h"
#include "pool.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* since Linux 5.14 */
#endif

/*
 * The system's read-ahead stays as it is: who touches a cold map in order gets 2.1 GB/s with it (8 MiB on the disk that
 * this was measured on), 0.07 without (MADV_RANDOM), 1.4 with MADV_SEQUENTIAL. What it would cost readers of single
 * records, 3.1 ms instead of 0.06, nobody pays: headers are read by pread, which brings nothing along.
 */
int kvs_map_open(int fd, size_t length, uint64_t *address) {
    void *map = mmap(NULL, length, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) return errno;
    *address = (uint64_t)(uintptr_t)map;
    return 0;
}

/*
 * For kernels that can't populate: the kernel itself reads a byte of every
 * page, into a pipe, and says EFAULT where this process would get a signal.
 */
static int touch_pages(const char *p, const char *end, size_t page) {
    int ends[2], error = 0;
    char sink[1024];
    size_t held = 0;
    if (pipe2(ends, O_CLOEXEC)) return errno;
    for (; p < end && !error; p += page) {
        while (write(ends[1], p, 1) != 1)
            if (errno != EINTR) {
                error = errno;
                break;
            }
        if (!error && ++held == sizeof sink) {
            for (size_t got = 0; got < held && !error;) {
                ssize_t n = read(ends[0], sink, held - got);
                if (n > 0)
                    got += (size_t)n;
                else if (n == 0 || errno != EINTR)
                    error = EIO;
            }
            held = 0;
        }
    }
    close(ends[0]);
    close(ends[1]);
    return error;
}

int kvs_map_populate(uint64_t address, size_t length) {
    if (!length) return 0;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uintptr_t start = (uintptr_t)address & ~(uintptr_t)(page - 1);
    uintptr_t end = ((uintptr_t)address + length + page - 1) & ~(uintptr_t)(page - 1);
    while (madvise((void *)start, end - start, MADV_POPULATE_READ)) {
        if (errno == EINVAL || errno == ENOSYS) return touch_pages((const char *)start, (const char *)end, page);
        if (errno != EINTR && errno != EAGAIN) return errno;
    }
    return 0;
}

int kvs_map_discard(uint64_t address, size_t length) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uintptr_t start = ((uintptr_t)address + page - 1) & ~(uintptr_t)(page - 1);
    uintptr_t end = ((uintptr_t)address + length) & ~(uintptr_t)(page - 1);
    if (start >= end) return 0;
    return madvise((void *)start, end - start, MADV_DONTNEED) ? errno : 0;
}

int kvs_map_close(uint64_t address, size_t length) {
    return munmap((void *)(uintptr_t)address, length) ? errno : 0;
}

/* What one entry of the second level of page tables maps; the larger one of x86-64 and arm64 with 4 KiB pages. */
#define TABLE_BYTES ((size_t)2 << 20)

/*
 * Fresh private memory, at a multiple of TABLE_BYTES if it is as large: then
 * huge pages fit, and moving it moves tables and not each page. NULL and errno.
 */
static char *fresh(size_t length, int protection, int flags) {
    const size_t spare = length < TABLE_BYTES ? 0 : TABLE_BYTES;
    char *start = mmap(NULL, length + spare, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (start == MAP_FAILED) return NULL;
    const size_t lead = spare ? -(uintptr_t)start & (TABLE_BYTES - 1) : 0, behind = spare - lead;
    if ((lead && munmap(start, lead)) || (behind && munmap(start + lead + length, behind))) {
        const int error = errno; /* cutting a map needs one more of them */
        munmap(start, length + spare);
        errno = error;
        return NULL;
    }
    return start + lead;
}

int kvs_window_open(int fd, const uint64_t *offsets, size_t count, size_t piece, size_t length, uint64_t *address) {
    /* nothing else can be put into the range once it is reserved */
    char *start = fresh(length, PROT_NONE, MAP_NORESERVE);
    if (!start) return errno;
    int error = 0;
    size_t mapped = 0;
    for (; mapped < count && !error; mapped++)
        if (mmap(start + mapped * piece, piece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd,
                 (off_t)offsets[mapped]) == MAP_FAILED) {
            error = errno;
            break;
        }
    const size_t taken = mapped * piece;
    if (!error && taken < length && mprotect(start + taken, length - taken, PROT_READ | PROT_WRITE)) error = errno;
    if (error) {
        /* in two steps: where the number of maps is the limit, what is left of the reservation can be cut out after the first */
        if (taken) munmap(start, taken);
        if (taken < length) munmap(start + taken, length - taken);
        return error;
    }
    *address = (uint64_t)(uintptr_t)start;
    return 0;
}

/* A window's bytes on their way to memory of its own, cut into parts for several threads. */
typedef struct copying {
    char *to;
    const char *from;
    size_t length;
    atomic_int error; /* of any part; the others need not be copied then */
} copying;

#define COPY_PART ((size_t)8 << 20)

typedef struct range {
    char *to;
    const char *from;
    size_t length;
} range;

static void copy_range(void *context) {
    const range *r = context;
    memcpy(r->to, r->from, r->length);
}

static void copy_part(void *context, size_t i) {
    copying *c = context;
    if (atomic_load_explicit(&c->error, memory_order_relaxed)) return;
    const size_t start = i * COPY_PART, left = c->length - start;
    range r = {c->to + start, c->from + start, left < COPY_PART ? left : COPY_PART};
    int error = kvs_map_populate((uint64_t)(uintptr_t)r.from, r.length);
    if (!error && !kvs_guard_run(copy_range, &r, (uint64_t)(uintptr_t)r.from, r.length)) error = EFAULT;
    if (error) atomic_store_explicit(&c->error, error, memory_order_relaxed);
}

int kvs_window_detach(uint64_t address, size_t length, int threads) {
    char *window = (char *)(uintptr_t)address;
    char *copy = fresh(length, PROT_READ | PROT_WRITE, 0);
    if (!copy) return errno;
    madvise(copy, length, MADV_HUGEPAGE); /* a help where it can be had */
    copying c = {.to = copy, .from = window, .length = length};
    kvs_guard_mask mask;
    kvs_guard_begin(&mask);
    kvs_pool_run(copy_part, &c, (length + COPY_PART - 1) / COPY_PART, threads);
    kvs_guard_end(&mask);
    int error = atomic_load(&c.error);
    /* One system call, in which the kernel lets no thread fault: readers see the old pages or the new ones. */
    if (!error && mremap(copy, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, window) == MAP_FAILED) error = errno;
    if (error) munmap(copy, length);
    return error;
}

int kvs_window_close(uint64_t address, size_t length) {
    return munmap((void *)(uintptr_t)address, length) ? errno : 0;
}
