/* Writing behind the caller's back: a thread that writes to a file what it is given, in order, and has the disk begin at once. */
#define _GNU_SOURCE
#include "kvs_kernel.h"
#include "pool.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>

/*
 * Bytes after which the disk is asked to begin with them. A step ends where the file's offset is a multiple of that, so that the
 * page cache can take it as one folio, which is mapped with half as many page faults later on.
 */
enum { STEP = 1 << 20 };

typedef struct run {
    struct run *next;
    const char *data;
    size_t length, head_bytes;
    int64_t offset;
    char head[KVS_MAX_HEAD];
} run;

struct kvs_writes {
    int fd;
    off_t size; /* of the file in the beginning */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    run *first, **last; /* what is still to be written, the one under way among it */
    int error;          /* of the first write that failed; what comes behind it is not written */
    bool ending;
};

/* Writes [from, to) of a run, however often the system writes only a part. Returns 0 or an errno. */
static int write_part(int fd, const run *r, size_t from, size_t to) {
    while (from < to) {
        struct iovec parts[2];
        int count = 0;
        if (from < r->head_bytes) parts[count++] = (struct iovec){(char *)r->head + from, r->head_bytes - from};
        const size_t plain = from < r->head_bytes ? r->head_bytes : from;
        if (plain < to) parts[count++] = (struct iovec){(char *)r->data + plain, to - plain};
        const ssize_t written = pwritev(fd, parts, count, r->offset + (int64_t)from);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return written < 0 ? errno : EIO;
        from += (size_t)written;
    }
    return 0;
}

/*
 * Has the disk begin with what was written. Returns 0, or the errno of a file system that finds no place for it now: it may
 * not say so again to who waits later. One that knows no such call begins when it is waited for.
 */
static int begin(int fd, int64_t offset, int64_t length) {
    if (!sync_file_range(fd, offset, length, SYNC_FILE_RANGE_WRITE)) return 0;
    return errno == ENOSYS || errno == EINVAL || errno == ESPIPE || errno == EOPNOTSUPP || errno == EINTR ? 0 : errno;
}

static int write_run(const kvs_writes *w, const run *r) {
    for (size_t from = 0; from < r->length;) {
        const size_t room = STEP - (size_t)((r->offset + (int64_t)from) % STEP);
        const size_t to = r->length - from > room ? from + room : r->length;
        struct stat file;
        if (fstat(w->fd, &file)) return errno;
        if (file.st_size < w->size) return EIO; /* it was cut off */
        const int error = write_part(w->fd, r, from, to);
        if (error) return error;
        const int refused = begin(w->fd, r->offset + (int64_t)from, (int64_t)(to - from));
        if (refused) return refused;
        from = to;
    }
    return 0;
}

static void *work(void *context) {
    kvs_writes *w = context;
    pthread_mutex_lock(&w->lock);
    for (;;) {
        while (!w->first && !w->ending) pthread_cond_wait(&w->changed, &w->lock);
        run *r = w->first;
        if (!r) break;
        int error = w->error;
        pthread_mutex_unlock(&w->lock);
        if (!error) error = write_run(w, r);
        pthread_mutex_lock(&w->lock);
        w->error = error;
        w->first = r->next;
        if (!w->first) {
            w->last = &w->first;
            pthread_cond_broadcast(&w->changed);
        }
        free(r);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

kvs_writes *kvs_writes_start(int fd) {
    kvs_writes *w = calloc(1, sizeof *w);
    if (!w) return NULL;
    struct stat file;
    w->fd = fd;
    w->size = fstat(fd, &file) ? 0 : file.st_size; /* the first write says what is wrong */
    w->last = &w->first;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
    if (!kvs_start_thread(&w->thread, work, w)) return w;
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    free(w);
    return NULL;
}

int kvs_writes_add(kvs_writes *w, const char *head, size_t head_bytes, uint64_t data, size_t length, int64_t offset) {
    run *r = malloc(sizeof *r);
    if (!r) return ENOMEM;
    *r = (run){.data = (const char *)(uintptr_t)data, .length = length, .head_bytes = head_bytes, .offset = offset};
    memcpy(r->head, head, head_bytes);
    pthread_mutex_lock(&w->lock);
    *w->last = r;
    w->last = &r->next;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    return 0;
}

int kvs_writes_wait(kvs_writes *w) {
    pthread_mutex_lock(&w->lock);
    while (w->first) pthread_cond_wait(&w->changed, &w->lock);
    const int error = w->error;
    pthread_mutex_unlock(&w->lock);
    return error;
}

void kvs_writes_end(kvs_writes *w) {
    pthread_mutex_lock(&w->lock);
    w->ending = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    free(w);
}
