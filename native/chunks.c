/* Restoring chunk by chunk through a few buffers, ahead of who takes the chunks out of them. */
#define _GNU_SOURCE
#include "pool.h"
#include "residency.h"
#include "restore.h"

#include <errno.h>
#include <string.h>

enum { LOOK = 200 }; /* milliseconds after which a wait looks whether it is to stop */

typedef struct chunks {
    call all; /* what all chunks have in common: where block 0 and destination 0 are */
    size_t count, ahead;
    const uint32_t *which;
    const uint64_t *ends;
    const uint8_t *direct;
    int32_t *filled;
    const int32_t *taken;
    int threads;
    pthread_mutex_t lock;
    size_t next;   /* the chunk that nobody has begun yet */
    size_t failed; /* the first that failed, or `count`: none behind it is begun any more; written under the lock */
    int error;     /* why that one failed; 0 where it isn't sound */
} chunks;

/* Every segment was read and has the sum that it should. */
static bool is_sound(const call *k) {
    for (size_t b = 0; b < k->blocks; b++) {
        if (k->errors[b]) return false;
        for (size_t s = 0; s < k->streams; s++)
            if (k->rows[s].base && k->sums[b * k->streams + s] != k->expected[b * k->streams + s]) return false;
    }
    return true;
}

static bool stopped(const chunks *all) { return all->all.stop && __atomic_load_n(all->all.stop, __ATOMIC_RELAXED); }

/* Notes that chunk p failed. What comes before it is still wanted. */
static void fail(chunks *all, size_t p, int error) {
    pthread_mutex_lock(&all->lock);
    if (p < all->failed) {
        __atomic_store_n(&all->failed, p, __ATOMIC_RELAXED);
        all->error = error;
    }
    pthread_mutex_unlock(&all->lock);
}

/* Waits until chunk p may be begun. False if it's not to be begun any more: who has met a bad chunk takes no other. */
static bool await_room(const chunks *all, size_t p) {
    for (;;) {
        if (stopped(all) || __atomic_load_n(&all->failed, __ATOMIC_RELAXED) < p) return false;
        if (p <= all->ahead || kvs_progress_wait(&all->taken[p - all->ahead - 1], LOOK)) break;
    }
    return !stopped(all) && __atomic_load_n(&all->failed, __ATOMIC_RELAXED) > p;
}

/* Restores chunk p. Returns whether some of it was not in the page cache. */
static bool restore_chunk(chunks *all, size_t p) {
    const size_t begin = p ? (size_t)all->ends[p - 1] : 0, streams = all->all.streams;
    call k = all->all;
    k.rows += all->which[p] * streams;
    k.blocks = (size_t)all->ends[p] - begin;
    k.payloads += begin, k.first += begin, k.tokens += begin, k.used += begin, k.offset_row += begin;
    k.expected += begin * streams, k.sums += begin * streams, k.errors += begin, k.read += begin;
    const int error = kvs_restore_call(&k, all->direct + begin, all->threads);
    if (error) {
        memset(k.errors, 0, k.blocks * sizeof *k.errors); /* that says nothing of the blocks */
        fail(all, p, error);
        return false;
    }
    bool cold = false;
    for (size_t b = 0; b < k.blocks; b++) cold = cold || k.read[b];
    const bool sound = is_sound(&k);
    if (!sound) fail(all, p, 0);
    kvs_progress_set(&all->filled[p], sound ? 1 : -1);
    return cold;
}

/* Whether the page cache lacks the first bytes: most likely what comes after them as well. */
static bool begins_cold(const call *k) {
    size_t s = 0;
    while (s < k->streams && !k->rows[s].base) s++;
    const uint64_t length = s < k->streams ? segment_bytes(k, s, 0) : 0;
    return length && kvs_look(k->source, segment_offset(k, s, 0), length, length) != KVS_ALL_CACHED;
}

static void *run_lane(void *context);

/*
 * Begins chunks as long as there are any. The disk would have nothing to do between the last reads of one and the first of the
 * next, nor have enough to do with one of a few MiB: so where the first chunk is cold, two are under way at once.
 */
static void run(chunks *all, bool first) {
    pthread_t other;
    bool helped = false;
    for (;;) {
        pthread_mutex_lock(&all->lock);
        const size_t p = all->next < all->failed ? all->next++ : all->count;
        pthread_mutex_unlock(&all->lock);
        if (p == all->count) break;
        if (!await_room(all, p)) {
            if (stopped(all)) fail(all, p, ECANCELED);
            break;
        }
        if (first && !p && all->count > 1 && begins_cold(&all->all)) helped = !kvs_start_thread(&other, run_lane, all);
        const bool cold = restore_chunk(all, p);
        if (first && cold && !helped && all->count > 2) helped = !kvs_start_thread(&other, run_lane, all);
    }
    if (helped) pthread_join(other, NULL);
}

static void *run_lane(void *context) {
    run(context, false);
    return NULL;
}

int kvs_restore_chunks(const kvs_source *source, const kvs_rows *rows, size_t streams, size_t count, const uint32_t *which,
                       const uint64_t *ends, const uint64_t *payloads, const int64_t *first, const int64_t *tokens,
                       const int64_t *used, const uint64_t *offsets, const uint32_t *offset_row, const uint32_t *expected,
                       const uint8_t *direct, uint32_t *sums, int32_t *errors, uint8_t *read, int32_t *filled,
                       const int32_t *taken, size_t ahead, const int32_t *stop, int threads) {
    chunks all = {.all = {.source = source,
                          .rows = rows,
                          .streams = streams,
                          .payloads = payloads,
                          .first = first,
                          .tokens = tokens,
                          .used = used,
                          .offsets = offsets,
                          .offset_row = offset_row,
                          .expected = expected,
                          .sums = sums,
                          .errors = errors,
                          .read = read,
                          .stop = stop,
                          .near = true},
                  .count = count,
                  .failed = count,
                  .ahead = ahead,
                  .which = which,
                  .ends = ends,
                  .direct = direct,
                  .filled = filled,
                  .taken = taken,
                  .threads = threads,
                  .lock = PTHREAD_MUTEX_INITIALIZER};
    run(&all, true);
    pthread_mutex_destroy(&all.lock);
    return all.error;
}
