/* Restoring from files, whole and cut off, and reading maps that can't be read. */
#define _GNU_SOURCE
#include "guard.h"
#include "kvs_kernel.h"
#include "test_kernel.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

enum { STREAMS = 4, BLOCKS = 3, VALUE = 8 << 20 };

/* A file of BLOCKS payloads, VALUE bytes apart, and the arrays that they came from. */
typedef struct stored {
    char path[64];
    int fd, direct;
    int64_t tokens;
    int64_t run[STREAMS];
    unsigned char *source[STREAMS], *target[STREAMS];
    kvs_rows to[STREAMS];
    uint64_t payloads[BLOCKS], offsets[STREAMS], map;
    uint32_t row[BLOCKS], sums[STREAMS * BLOCKS];
    int64_t first[BLOCKS], count[BLOCKS];
} stored;

static void make(stored *f, const char *directory, int64_t tokens, const int64_t *run) {
    memset(f, 0, sizeof *f);
    f->tokens = tokens;
    snprintf(f->path, sizeof f->path, "%s/kvs_test_XXXXXX", directory);
    f->fd = mkstemp(f->path);
    CHECK(f->fd >= 0);
    kvs_rows from[STREAMS];
    uint64_t at = 0, values[BLOCKS];
    for (int s = 0; s < STREAMS; s++) {
        const size_t size = (size_t)(run[s] * tokens * BLOCKS);
        void *aligned;
        CHECK(!posix_memalign(&aligned, 4096, size));
        f->run[s] = run[s];
        f->source[s] = noisy(size, (uint64_t)s + 3);
        f->target[s] = aligned;
        kvs_rows r = {.tokens_per_row = 1, .row_stride = run[s], .row_bytes = run[s], .run_bytes = run[s]};
        from[s] = f->to[s] = r;
        from[s].base = (uint64_t)(uintptr_t)f->source[s];
        f->to[s].base = (uint64_t)(uintptr_t)f->target[s];
        f->offsets[s] = at;
        at += (uint64_t)(run[s] * tokens + 63) / 64 * 64;
    }
    CHECK(at + 4096 <= VALUE);
    for (int b = 0; b < BLOCKS; b++) {
        values[b] = (uint64_t)(uintptr_t)calloc(VALUE, 1);
        CHECK(values[b]);
        f->first[b] = b * tokens, f->count[b] = tokens;
        f->payloads[b] = 4096 + (uint64_t)b * VALUE;
    }
    kvs_gather(from, STREAMS, BLOCKS, values, f->first, f->count, f->offsets, f->row, f->sums, 2);
    for (int b = 0; b < BLOCKS; b++) {
        CHECK(pwrite(f->fd, (void *)(uintptr_t)values[b], VALUE, (off_t)f->payloads[b]) == VALUE);
        free((void *)(uintptr_t)values[b]);
    }
    CHECK(!fsync(f->fd));
    f->direct = open(f->path, O_RDONLY | O_DIRECT);
    CHECK(!kvs_map_open(f->fd, 4096 + BLOCKS * (size_t)VALUE, &f->map));
}

static void drop(const stored *f) {
    CHECK(!kvs_map_discard(f->map, 4096 + BLOCKS * (size_t)VALUE));
    CHECK(!posix_fadvise(f->fd, 0, 0, POSIX_FADV_DONTNEED));
}

static void end(stored *f) {
    for (int s = 0; s < STREAMS; s++) free(f->source[s]), free(f->target[s]);
    CHECK(!kvs_map_close(f->map, 4096 + BLOCKS * (size_t)VALUE));
    close(f->fd);
    if (f->direct >= 0) close(f->direct);
    unlink(f->path);
}

typedef struct outcome {
    uint32_t sums[STREAMS * BLOCKS];
    int32_t errors[BLOCKS], progress[STREAMS];
    uint8_t read[BLOCKS];
} outcome;

static void restore(stored *f, int direct, int64_t used, int threads, outcome *o) {
    const kvs_source source = {f->map, f->fd, direct == 2 ? -1 : f->direct};
    int64_t some[BLOCKS];
    uint8_t past[BLOCKS];
    memset(o, 0, sizeof *o);
    memset(past, direct != 0, sizeof past);
    for (int b = 0; b < BLOCKS; b++) some[b] = b + 1 < BLOCKS ? f->count[b] : used;
    for (int s = 0; s < STREAMS; s++) memset(f->target[s], 0x5a, (size_t)(f->run[s] * f->tokens * BLOCKS));
    CHECK(!kvs_restore(&source, f->to, STREAMS, BLOCKS, f->payloads, f->first, f->count, some, f->offsets, f->row, f->sums,
                       past, o->sums, o->errors, o->read, o->progress, NULL, threads));
}

static void check_all(const stored *f, int64_t used, const outcome *o) {
    CHECK(!memcmp(o->sums, f->sums, sizeof o->sums));
    for (int s = 0; s < STREAMS; s++) {
        const size_t whole = (size_t)(f->run[s] * (f->tokens * (BLOCKS - 1) + used));
        CHECK(kvs_progress_wait(&o->progress[s], 0) == 1);
        CHECK(!memcmp(f->target[s], f->source[s], whole));
        for (size_t i = whole; i < (size_t)(f->run[s] * f->tokens * BLOCKS); i++) CHECK(f->target[s][i] == 0x5a);
    }
    for (int b = 0; b < BLOCKS; b++) CHECK(!o->errors[b]);
}

static void restore_everywhere(const char *directory, int64_t tokens, const int64_t *run) {
    stored f;
    outcome o;
    make(&f, directory, tokens, run);
    for (int threads = 1; threads < 5; threads += 3)
        for (int64_t used = 0; used <= tokens; used += tokens / 2) {
            restore(&f, 1, used, threads, &o);
            check_all(&f, used, &o);
            for (int direct = 0; direct < 3; direct++) {
                drop(&f);
                restore(&f, direct, used, threads, &o);
                check_all(&f, used, &o);
            }
        }
    const kvs_source source = {f.map, f.fd, f.direct};
    const int32_t stop = 1;
    memset(&o, 0, sizeof o);
    CHECK(kvs_restore(&source, f.to, STREAMS, BLOCKS, f.payloads, f.first, f.count, f.count, f.offsets, f.row, f.sums, o.read,
                      o.sums, o.errors, o.read, o.progress, &stop, 4) == ECANCELED);
    for (int s = 0; s < STREAMS; s++) CHECK(!o.progress[s]);
    /* One wrong byte: that stream of that block, and no other. */
    unsigned char byte;
    const off_t at = (off_t)(f.payloads[1] + f.offsets[2] + (uint64_t)(f.run[2] * tokens) - 1);
    CHECK(pread(f.fd, &byte, 1, at) == 1);
    byte ^= 16;
    CHECK(pwrite(f.fd, &byte, 1, at) == 1 && !fsync(f.fd));
    for (int cold = 0; cold < 2; cold++) {
        if (cold) drop(&f);
        restore(&f, 1, tokens, 4, &o);
        for (int s = 0; s < STREAMS; s++) CHECK(o.progress[s] == (s == 2 ? -1 : 1));
        for (int i = 0; i < STREAMS * BLOCKS; i++) CHECK((o.sums[i] == f.sums[i]) == (i != STREAMS + 2));
    }
    /* Cut off inside the last block: the others are whole. */
    CHECK(!ftruncate(f.fd, (off_t)(f.payloads[2] + 4096)));
    for (int direct = 0; direct < 2; direct++) {
        restore(&f, direct, tokens, 4, &o);
        CHECK(!o.errors[0] && !o.errors[1] && o.errors[2] == KVS_END_OF_FILE);
        CHECK(o.progress[STREAMS - 1] == -1);
    }
    end(&f);
}

enum { CHUNKS = BLOCKS };

typedef struct taker {
    stored *f;
    outcome o;
    int32_t filled[CHUNKS], taken[CHUNKS], stop;
    unsigned char *room[STREAMS][2];
    kvs_rows rows[2 * STREAMS];
    int direct, result;
    size_t ahead;
} taker;

/* Restores one block a chunk, into two destinations by turns. */
static void *restore_chunks(void *context) {
    taker *t = context;
    stored *f = t->f;
    const kvs_source source = {f->map, f->fd, f->direct};
    static const uint32_t which[CHUNKS] = {0, 1, 0};
    static const uint64_t ends[CHUNKS] = {1, 2, 3};
    static const int64_t first[BLOCKS];
    uint8_t past[BLOCKS];
    memset(past, t->direct, sizeof past);
    t->result = kvs_restore_chunks(&source, t->rows, STREAMS, CHUNKS, which, ends, f->payloads, first, f->count, f->count,
                                   f->offsets, f->row, f->sums, past, t->o.sums, t->o.errors, t->o.read, t->filled, t->taken,
                                   t->ahead, &t->stop, 2);
    for (int p = 0; p < CHUNKS; p++)
        if (!t->filled[p]) kvs_progress_set(&t->filled[p], -2);
    return NULL;
}

static void begin_chunks(stored *f, taker *t, int direct, size_t ahead, pthread_t *thread) {
    memset(t, 0, sizeof *t);
    t->f = f, t->direct = direct, t->ahead = ahead;
    for (int i = 0; i < 2; i++)
        for (int s = 0; s < STREAMS; s++) {
            CHECK((t->room[s][i] = malloc((size_t)(f->run[s] * f->tokens))));
            t->rows[i * STREAMS + s] = f->to[s];
            t->rows[i * STREAMS + s].base = (uint64_t)(uintptr_t)t->room[s][i];
        }
    CHECK(!pthread_create(thread, NULL, restore_chunks, t));
}

static void end_chunks(taker *t, pthread_t thread) {
    pthread_join(thread, NULL);
    for (int i = 0; i < 2; i++)
        for (int s = 0; s < STREAMS; s++) free(t->room[s][i]);
}

static int await(const int32_t *value) {
    int got;
    while (!(got = kvs_progress_wait(value, 1000))) {}
    return got;
}

static void restore_in_chunks(const char *directory, int64_t tokens, const int64_t *run) {
    stored f;
    taker t;
    pthread_t thread;
    make(&f, directory, tokens, run);
    for (int cold = 0; cold < 3; cold++) { /* in the cache, read through it, past it */
        if (cold) drop(&f);
        begin_chunks(&f, &t, cold == 2, 1, &thread);
        for (int p = 0; p < CHUNKS; p++) {
            CHECK(await(&t.filled[p]) == 1);
            if (!p) CHECK(!kvs_progress_wait(&t.filled[2], 20)); /* not over the one that isn't taken */
            for (int s = 0; s < STREAMS; s++)
                CHECK(!memcmp(t.room[s][p % 2], f.source[s] + p * f.run[s] * tokens, (size_t)(f.run[s] * tokens)));
            kvs_progress_set(&t.taken[p], 1);
        }
        end_chunks(&t, thread);
        CHECK(!t.result && !memcmp(t.o.sums, f.sums, sizeof f.sums));
    }
    /* Stopped while it waits for room, and while nobody waits for it. */
    begin_chunks(&f, &t, 0, 1, &thread);
    CHECK(await(&t.filled[1]) == 1);
    __atomic_store_n(&t.stop, 1, __ATOMIC_RELAXED);
    end_chunks(&t, thread);
    CHECK(t.result == ECANCELED && t.filled[2] == -2);
    /* A wrong byte in the second chunk: the first is sound, and nothing behind it is begun. */
    unsigned char byte;
    const off_t at = (off_t)(f.payloads[1] + f.offsets[2]);
    CHECK(pread(f.fd, &byte, 1, at) == 1);
    byte ^= 16;
    CHECK(pwrite(f.fd, &byte, 1, at) == 1 && !fsync(f.fd));
    begin_chunks(&f, &t, 0, 0, &thread); /* none ahead */
    CHECK(await(&t.filled[0]) == 1 && !kvs_progress_wait(&t.filled[1], 20));
    kvs_progress_set(&t.taken[0], 1);
    CHECK(await(&t.filled[1]) == -1); /* which nobody takes */
    end_chunks(&t, thread);
    CHECK(!t.result && t.filled[2] == -2 && !t.o.errors[1]);
    for (int i = 0; i < 2 * STREAMS; i++) CHECK((t.o.sums[i] == f.sums[i]) == (i != STREAMS + 2));
    /* Cold, so that the third chunk waits beside the second, for a buffer that it would never get. */
    for (size_t ahead = 0; ahead < 2; ahead++) {
        drop(&f);
        begin_chunks(&f, &t, 1, ahead, &thread);
        CHECK(await(&t.filled[0]) == 1);
        kvs_progress_set(&t.taken[0], 1);
        CHECK(await(&t.filled[1]) == -1);
        end_chunks(&t, thread);
        CHECK(!t.result);
    }
    end(&f);
}

void test_restore(void) {
    static const int64_t small[STREAMS] = {64, 1, 130, 33}, even[STREAMS] = {4096, 4096, 8192, 4096},
                         large[STREAMS] = {8192, 40, 3 << 18, 1 << 20};
    restore_everywhere("/tmp", 64, small);
    restore_everywhere("/tmp", 128, even);
    restore_everywhere("/tmp", 4, large);
    restore_everywhere("/dev/shm", 128, even);
    restore_in_chunks("/tmp", 64, small);
    restore_in_chunks("/tmp", 128, even);
}

static void touch(void *context) {
    const volatile unsigned char *p = context;
    (void)*p;
}

static void *touch_guarded(void *context) {
    kvs_guard_mask mask;
    const uint64_t map = (uint64_t)(uintptr_t)context;
    for (int i = 0; i < 200; i++) {
        kvs_guard_begin(&mask);
        CHECK(kvs_guard_run(touch, context, map, 4096));
        CHECK(!kvs_guard_run(touch, (void *)(uintptr_t)(map + 4096), map + 4096, 4096));
        CHECK(kvs_guard_run(touch, context, map, 4096));
        kvs_guard_end(&mask);
    }
    return NULL;
}

static sigjmp_buf elsewhere;

static void own_handler(int signal) {
    (void)signal;
    siglongjmp(elsewhere, 1);
}

/* Unreadable pages end what runs guarded and nothing else; what is not guarded goes to whoever was there before. */
void test_guard(void) {
    FILE *file = tmpfile();
    uint64_t map;
    pthread_t threads[4];
    sigset_t bus, was;
    CHECK(file && !ftruncate(fileno(file), 4096) && !kvs_map_open(fileno(file), 3 * 4096, &map));
    for (int i = 0; i < 4; i++) CHECK(!pthread_create(&threads[i], NULL, touch_guarded, (void *)(uintptr_t)map));
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);

    struct sigaction own = {.sa_handler = own_handler, .sa_flags = SA_NODEFER}, old, now;
    CHECK(!sigaction(SIGBUS, &own, &old));
    kvs_guard_mask mask;
    kvs_guard_begin(&mask);
    for (int i = 0; i < 3; i++)
        if (!sigsetjmp(elsewhere, 1)) {
            kvs_guard_run(touch, (void *)(uintptr_t)(map + 8192), map, 4096); /* not in the range that it named */
            CHECK(false);
        }
    if (!sigsetjmp(elsewhere, 1)) {
        raise(SIGBUS); /* sent, not a fault */
        CHECK(false);
    }
    kvs_guard_end(&mask);
    CHECK(!sigaction(SIGBUS, &old, &now) && now.sa_handler == own_handler);

    sigemptyset(&bus);
    sigaddset(&bus, SIGBUS);
    pthread_sigmask(SIG_BLOCK, &bus, NULL);
    touch_guarded((void *)(uintptr_t)map);
    pthread_sigmask(SIG_UNBLOCK, &bus, &was);
    CHECK(sigismember(&was, SIGBUS) == 1);
    CHECK(!kvs_map_close(map, 3 * 4096));
    fclose(file);
}
