/*
 * Stands in front of the system's reading calls in a child process (LD_PRELOAD) and fails some of them, for files named
 * data.mdb only. Told by the environment, once:
 *   BAD_FROM, BAD_TO  reads that touch these bytes of the file fail with EIO, as a bad sector makes them
 *   RENEWED=yes       a write over those bytes succeeds and makes them good, until BAD_FROM is taken back; =no: it fails with EIO
 *   NO_DIRECT=open    files can't be opened with O_DIRECT; =read: they can, but reads fail with EINVAL
 *   ALL_CACHED=1      the page cache is said to have every page; =0: none
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif

static int is_data(int fd) {
    char link[64], name[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, name, sizeof name - 1);
    if (n < 0) return 0;
    name[n] = 0;
    const char *under = getenv("BAD_UNDER");
    return (!under || !strncmp(name, under, strlen(under))) && n >= 9 && !strcmp(name + n - 9, "/data.mdb");
}

static int renewed;

static int is_bad(int fd, off_t offset, size_t length) {
    const char *from = getenv("BAD_FROM"), *to = getenv("BAD_TO"), *direct = getenv("NO_DIRECT");
    int saved = errno, error = 0;
    if (is_data(fd)) {
        if (!from) renewed = 0;
        if (!renewed && from && to && offset < atoll(to) && (long long)(offset + (off_t)length) > atoll(from)) error = EIO;
        if (direct && !strcmp(direct, "read") && (fcntl(fd, F_GETFL) & O_DIRECT)) error = EINVAL;
    }
    errno = error ? error : saved;
    return error;
}

static size_t total(const struct iovec *vector, int count) {
    size_t length = 0;
    for (int i = 0; i < count; i++) length += vector[i].iov_len;
    return length;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t read(int fd, void *into, size_t length) {
    const off_t at = is_data(fd) ? lseek(fd, 0, SEEK_CUR) : -1;
    return at >= 0 && is_bad(fd, at, length) ? -1 : NEXT(read)(fd, into, length);
}
ssize_t pread(int fd, void *into, size_t length, off_t offset) {
    return is_bad(fd, offset, length) ? -1 : NEXT(pread)(fd, into, length, offset);
}
ssize_t pread64(int fd, void *into, size_t length, off64_t offset) {
    return is_bad(fd, offset, length) ? -1 : NEXT(pread64)(fd, into, length, offset);
}
ssize_t preadv(int fd, const struct iovec *vector, int count, off_t offset) {
    return is_bad(fd, offset, total(vector, count)) ? -1 : NEXT(preadv)(fd, vector, count, offset);
}
ssize_t preadv64(int fd, const struct iovec *vector, int count, off64_t offset) {
    return is_bad(fd, offset, total(vector, count)) ? -1 : NEXT(preadv64)(fd, vector, count, offset);
}
ssize_t preadv2(int fd, const struct iovec *vector, int count, off_t offset, int flags) {
    return is_bad(fd, offset, total(vector, count)) ? -1 : NEXT(preadv2)(fd, vector, count, offset, flags);
}

ssize_t preadv64v2(int fd, const struct iovec *vector, int count, off64_t offset, int flags) {
    return is_bad(fd, offset, total(vector, count)) ? -1 : NEXT(preadv64v2)(fd, vector, count, offset, flags);
}

ssize_t pwrite(int fd, const void *from, size_t length, off_t offset) {
    const char *how = getenv("RENEWED");
    if (how && is_bad(fd, offset, length)) {
        if (strcmp(how, "yes")) return -1;
        renewed = 1;
    }
    return NEXT(pwrite)(fd, from, length, offset);
}
ssize_t pwrite64(int fd, const void *from, size_t length, off64_t offset) { return pwrite(fd, from, length, offset); }

static int refused(const char *path, int flags) {
    const char *direct = getenv("NO_DIRECT"), *name = strrchr(path, '/');
    if (!direct || strcmp(direct, "open") || !(flags & O_DIRECT) || !name || strcmp(name, "/data.mdb")) return 0;
    errno = EINVAL;
    return 1;
}

int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return refused(path, flags) ? -1 : NEXT(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return refused(path, flags) ? -1 : NEXT(open64)(path, flags, mode);
}

long syscall(long number, ...) {
    va_list rest;
    long a[6];
    va_start(rest, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
    va_end(rest);
    const char *all = getenv("ALL_CACHED");
    if (number == SYS_cachestat && all) {
        const unsigned long long *range = (const unsigned long long *)a[1];
        unsigned long long *state = (unsigned long long *)a[2];
        memset(state, 0, 5 * sizeof *state);
        state[0] = strcmp(all, "0") ? range[1] / 4096 : 0;
        return 0;
    }
    return NEXT(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

int mincore(void *address, size_t length, unsigned char *present) {
    const char *all = getenv("ALL_CACHED");
    if (!all) return NEXT(mincore)(address, length, present);
    memset(present, strcmp(all, "0") != 0, (length + 4095) / 4096);
    return 0;
}
