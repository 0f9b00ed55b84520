/*
 * Stands in front of the system's writing calls in a child process (LD_PRELOAD), for files named data.mdb only: counts them,
 * and fails them from the n-th on, or the n-th alone. The child tells it with bad_writes_arm, which it finds in itself.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long seen, first;            /* calls since it was armed; which of them fails, 0 for none */
static int error, sticky, early, waits;

/* Count anew. The `n`-th call (from 1; 0: none) fails with `with`; those behind it too where `on`. Where `half`, that first one writes
 * half of what it was given, as a disk does that fills up. Waits for the disk are counted and failed where `syncs`. */
void bad_writes_arm(long n, int with, int on, int half, int syncs) {
    pthread_mutex_lock(&lock);
    seen = 0, first = n, error = with, sticky = on, early = half, waits = syncs;
    pthread_mutex_unlock(&lock);
}
long bad_writes_seen(void) { return seen; }

static int is_data(int fd) {
    char link[64], name[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, name, sizeof name - 1);
    if (n < 0) return 0;
    name[n] = 0;
    return n >= 9 && !strcmp(name + n - 9, "/data.mdb");
}

enum verdict { GOOD, BAD, HALF };

static enum verdict judge(int fd, int is_wait) {
    int saved = errno;
    enum verdict verdict = GOOD;
    if (is_data(fd) && (!is_wait || waits)) {
        pthread_mutex_lock(&lock);
        seen++;
        if (first && seen == first) verdict = early && !is_wait ? HALF : BAD;
        if (first && seen > first && sticky) verdict = BAD;
        pthread_mutex_unlock(&lock);
    }
    errno = verdict == BAD ? error : saved;
    return verdict;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Half of it, in whole sectors where there are several. */
static size_t half(size_t length) { return length > 8192 ? length / 2 / 4096 * 4096 : length / 2; }

#define WRITE(name, type)                                                                                 \
    ssize_t name(int fd, const void *data, size_t length, type offset) {                                     \
        enum verdict verdict = judge(fd, 0);                                                                  \
        return verdict == BAD ? -1 : NEXT(name)(fd, data, verdict == HALF ? half(length) : length, offset);    \
    }
WRITE(pwrite, off_t)
WRITE(pwrite64, off64_t)

ssize_t write(int fd, const void *data, size_t length) {
    enum verdict verdict = judge(fd, 0);
    return verdict == BAD ? -1 : NEXT(write)(fd, data, verdict == HALF ? half(length) : length);
}

/* Half of the parts that there are; of a single one, half of it. */
static int shorten(const struct iovec *parts, int count, struct iovec *one) {
    *one = parts[0];
    if (count > 1) return count / 2;
    one->iov_len = half(one->iov_len);
    return 0;
}

#define WRITEV(name, type)                                                                 \
    ssize_t name(int fd, const struct iovec *parts, int count, type offset) {               \
        enum verdict verdict = judge(fd, 0);                                                \
        struct iovec one;                                                                   \
        if (verdict == BAD) return -1;                                                      \
        if (verdict == GOOD) return NEXT(name)(fd, parts, count, offset);                   \
        int left = shorten(parts, count, &one);                                             \
        return left ? NEXT(name)(fd, parts, left, offset) : NEXT(name)(fd, &one, 1, offset); \
    }
WRITEV(pwritev, off_t)
WRITEV(pwritev64, off64_t)

ssize_t writev(int fd, const struct iovec *parts, int count) {
    enum verdict verdict = judge(fd, 0);
    struct iovec one;
    if (verdict == BAD) return -1;
    if (verdict == GOOD) return NEXT(writev)(fd, parts, count);
    int left = shorten(parts, count, &one);
    return left ? NEXT(writev)(fd, parts, left) : NEXT(writev)(fd, &one, 1);
}

int fallocate(int fd, int mode, off_t offset, off_t length) {
    return judge(fd, 0) == GOOD ? NEXT(fallocate)(fd, mode, offset, length) : (errno = error, -1);
}
int fallocate64(int fd, int mode, off64_t offset, off64_t length) {
    return judge(fd, 0) == GOOD ? NEXT(fallocate64)(fd, mode, offset, length) : (errno = error, -1);
}
int ftruncate(int fd, off_t length) { return judge(fd, 0) == GOOD ? NEXT(ftruncate)(fd, length) : (errno = error, -1); }
int ftruncate64(int fd, off64_t length) { return judge(fd, 0) == GOOD ? NEXT(ftruncate64)(fd, length) : (errno = error, -1); }
int fdatasync(int fd) { return judge(fd, 1) == GOOD ? NEXT(fdatasync)(fd) : (errno = error, -1); }
int sync_file_range(int fd, off64_t offset, off64_t length, unsigned flags) {
    return judge(fd, 1) == GOOD ? NEXT(sync_file_range)(fd, offset, length, flags) : (errno = error, -1);
}
int fsync(int fd) { return judge(fd, 1) == GOOD ? NEXT(fsync)(fd) : (errno = error, -1); }
