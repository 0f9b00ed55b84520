/* Read-only maps of a file that may still grow, and their safe population. */
#define _GNU_SOURCE
#include "kvs_kernel.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* since Linux 5.14 */
#endif

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
