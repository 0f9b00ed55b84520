/*
 * Restore: blocks of a file go to an engine's arrays, checked on the way.
 *
 * First a plan: the bytes that the page cache has are copied out of the map,
 * segment by segment; the others are read in pieces of neighbouring segments
 * of a block, past the page cache or through it as the caller wants, and
 * copied from where they were read to. Then the pool works the plan off.
 */
#define _GNU_SOURCE
#include "restore.h"
#include "buffers.h"
#include "guard.h"
#include "pool.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>

enum {
    FIRST_SHARE = 32,    /* of all bytes, the part that is planned and copied ahead where somebody waits */
    LEAST_READERS = 8,   /* reads under way at once: twice the threads, within these limits */
    MOST_READERS = 16,
    ALONE = 128 << 10,   /* a call of fewer cached bytes is done before a thread wakes up */
    VECTORS = 64,        /* segments that one read puts where they belong */
    DIRECT_ALIGN = 4096, /* of offsets, lengths and addresses of direct reads: no device asks for more */
};

/*
 * As in copy.c: calls of more bytes store past the caches. But what is read right afterwards is stored in them, where it is
 * little enough to be still there.
 */
#define STREAM ((uint64_t)1 << 20)
#define STREAM_NEAR ((uint64_t)8 << 20)

/* Reads until `needed` bytes have come; the vector may ask for more, where the file goes on. 0, an errno or KVS_END_OF_FILE. */
static int read_fully(int fd, struct iovec *vector, int count, uint64_t offset, size_t needed) {
    for (size_t got = 0; got < needed;) {
        ssize_t n = preadv(fd, vector, count, (off_t)offset);
        if (n < 0) {
            if (errno == EINTR) continue;
            return errno;
        }
        if (!n) return KVS_END_OF_FILE;
        got += (size_t)n, offset += (uint64_t)n;
        for (; count && (size_t)n >= vector->iov_len; vector++, count--) n -= (ssize_t)vector->iov_len;
        if (count && n) {
            vector->iov_base = (char *)vector->iov_base + n;
            vector->iov_len -= (size_t)n;
        }
    }
    return 0;
}

/* Where a segment lies as one run in the engine's memory, or NULL. */
static unsigned char *run_of(const call *k, size_t s, size_t b) {
    const kvs_rows *r = &k->rows[s];
    if (r->outer || r->inner || r->page_rows || r->row_stride != r->row_bytes) return NULL;
    return (unsigned char *)(uintptr_t)r->base + k->first[b] / r->tokens_per_row * r->row_bytes;
}

/* Can a direct read put all segments of a piece where they belong? */
static bool lies_right(const call *k, const piece *p) {
    const uint64_t align = DIRECT_ALIGN - 1;
    if (p->parts > 1 || p->streams > VECTORS || k->used[p->block] != k->tokens[p->block]) return false;
    for (uint32_t s = p->stream; s < p->stream + p->streams; s++) {
        const unsigned char *to = run_of(k, s, p->block);
        if (!to || (((uintptr_t)to | segment_offset(k, s, p->block) | segment_bytes(k, s, p->block)) & align)) return false;
    }
    return true;
}

/*
 * False if they aren't there afterwards as they should be, for whatever reason: the destination may be memory that can't be
 * read into directly, or was written to meanwhile, and that says nothing of the block.
 */
static bool read_into_place(call *k, const piece *p) {
    struct iovec vector[VECTORS];
    size_t total = 0;
    for (uint32_t i = 0; i < p->streams; i++) {
        vector[i].iov_base = run_of(k, p->stream + i, p->block);
        total += vector[i].iov_len = segment_bytes(k, p->stream + i, p->block);
    }
    const uint64_t from = segment_offset(k, p->stream, p->block);
    if (read_fully((int)k->source->direct_fd, vector, (int)p->streams, from, total)) return false;
    bool sound = true;
    for (uint32_t s = p->stream; s < p->stream + p->streams; s++) {
        const size_t at = p->block * k->streams + s;
        k->sums[at] = ~k->path->update(~0u, run_of(k, s, p->block), segment_bytes(k, s, p->block));
        sound = sound && k->sums[at] == k->expected[at];
    }
    return sound;
}

/* Moves the segments of a piece, the first byte of which lies at `bytes`. */
static void move_piece(call *k, piece *p, const unsigned char *bytes) {
    const uint64_t begin = segment_offset(k, p->stream, p->block);
    for (uint32_t s = p->stream; s < p->stream + p->streams; s++) {
        const kvs_rows *r = &k->rows[s];
        const int64_t count = rows_of(k, s, p->block), used = k->used[p->block] / r->tokens_per_row;
        const int64_t first = k->first[p->block] / r->tokens_per_row;
        const int64_t lines = count ? r->row_bytes / kvs_line_bytes(r) * count : 0;
        const int64_t from = kvs_part_start(lines, p->part, p->parts), to = kvs_part_start(lines, p->part + 1, p->parts);
        const unsigned char *at = p->parts > 1 ? bytes : bytes + (segment_offset(k, s, p->block) - begin);
        uint32_t state = p->parts > 1 ? 0 : ~0u;
        if (to > from) state = kvs_scatter_lines(k->path, state, r, at, from, to, first, count, used, k->stream);
        if (p->parts > 1)
            p->state = state;
        else
            k->sums[p->block * k->streams + s] = ~state;
    }
}

/* First byte in the file and length of what a piece needs. */
static uint64_t extent(const call *k, const piece *p, size_t *length) {
    uint64_t from = segment_offset(k, p->stream, p->block);
    const uint32_t last = p->stream + p->streams - 1;
    uint64_t to = segment_offset(k, last, p->block) + segment_bytes(k, last, p->block);
    if (p->parts > 1) {
        const int64_t line = kvs_line_bytes(&k->rows[p->stream]), lines = (int64_t)(to - from) / line;
        to = from + (uint64_t)(kvs_part_start(lines, p->part + 1, p->parts) * line);
        from += (uint64_t)(kvs_part_start(lines, p->part, p->parts) * line);
    }
    *length = (size_t)(to - from);
    return from;
}

static int read_and_move(call *k, piece *p) {
    if (p->way == PAST_CACHE && lies_right(k, p) && read_into_place(k, p)) return 0;
    size_t length;
    const uint64_t from = extent(k, p, &length), skip = from % DIRECT_ALIGN;
    /* A line can be longer than a piece: then the buffer is the piece's own. */
    const bool own = skip + length > KVS_BUFFER - DIRECT_ALIGN;
    const size_t room = (skip + length + DIRECT_ALIGN - 1) / DIRECT_ALIGN * DIRECT_ALIGN;
    unsigned char *buffer;
    if (own) {
        void *fresh = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        buffer = fresh == MAP_FAILED ? NULL : fresh;
    } else {
        buffer = kvs_buffer_take();
    }
    if (!buffer) return ENOMEM;
    int error = EINVAL;
    if (p->way == PAST_CACHE) {
        struct iovec whole = {buffer, room};
        error = read_fully((int)k->source->direct_fd, &whole, 1, from - skip, skip + length);
    }
    if (error) { /* a direct read fails for more reasons than one through the cache, such as that there are none here */
        struct iovec exact = {buffer + skip, length};
        error = read_fully((int)k->source->fd, &exact, 1, from, length);
    }
    if (!error) move_piece(k, p, buffer + skip);
    if (own)
        munmap(buffer, room);
    else
        kvs_buffer_give(buffer);
    return error;
}

typedef struct mapped_move {
    call *call;
    piece *piece;
    const unsigned char *bytes;
} mapped_move;

static void move_mapped(void *context) {
    mapped_move *m = context;
    move_piece(m->call, m->piece, m->bytes);
}

static int move_from_map(call *k, piece *p) {
    size_t length;
    const uint64_t address = k->source->map + extent(k, p, &length);
    mapped_move m = {k, p, (const unsigned char *)(uintptr_t)address};
    if (kvs_guard_run(move_mapped, &m, address, length)) return 0;
    p->way = THROUGH_CACHE; /* which says why, or has the bytes after all */
    return read_and_move(k, p);
}

static void join_parts(call *k, const plan *list, size_t s) {
    for (size_t i = 0; i < list->count; i++) {
        const piece *p = &list->pieces[i];
        if (p->stream != s || p->parts < 2 || p->part) continue;
        const int64_t line = kvs_line_bytes(&k->rows[s]), lines = (int64_t)segment_bytes(k, s, p->block) / line;
        uint32_t state = ~0u;
        for (uint32_t part = 0; part < p->parts; part++) {
            int64_t length = kvs_part_start(lines, part + 1, p->parts) - kvs_part_start(lines, part, p->parts);
            state = kvs_crc_combine(state, p[part].state, (uint64_t)(length * line));
        }
        k->sums[p->block * k->streams + s] = ~state;
    }
}

/* All pieces of a stream are done: compare its sums, and tell who waits. */
static void finish_stream(call *k, size_t s) {
    if (k->parted) {
        join_parts(k, &k->cached, s);
        join_parts(k, &k->cold, s);
    }
    if (!k->progress) return;
    bool sound = true;
    for (size_t b = 0; b < k->blocks && sound; b++)
        sound = !__atomic_load_n(&k->errors[b], __ATOMIC_RELAXED) &&
                k->sums[b * k->streams + s] == k->expected[b * k->streams + s];
    kvs_progress_set(&k->progress[s], sound ? 1 : -1);
}

static void run_piece(void *context, size_t i) {
    call *k = context;
    /* Both lists at once, in proportion: the processors copy while the disk is at work. */
    const size_t total = k->cached.count + k->cold.count;
    const size_t before = i * k->cold.count / total, after = (i + 1) * k->cold.count / total;
    if (k->stop && __atomic_load_n(k->stop, __ATOMIC_RELAXED)) {
        __atomic_store_n(&k->stopped, true, __ATOMIC_RELAXED);
        return;
    }
    piece *p = after > before ? &k->cold.pieces[before] : &k->cached.pieces[i - before];
    int error = p->way == FROM_MAP ? move_from_map(k, p) : read_and_move(k, p);
    if (error == ENOMEM) __atomic_store_n(&k->no_memory, true, __ATOMIC_RELAXED); /* that says nothing of the block */
    if (error) __atomic_store_n(&k->errors[p->block], error, __ATOMIC_RELAXED);
    for (uint32_t s = p->stream; s < p->stream + p->streams; s++)
        if (!__atomic_sub_fetch(&k->remaining[s], 1, __ATOMIC_ACQ_REL)) finish_stream(k, s);
}

static void run_plan(call *k, uint64_t bytes, int threads) {
    kvs_guard_mask mask;
    if (k->cold.count) {
        const int readers = 2 * threads > LEAST_READERS ? 2 * threads : LEAST_READERS;
        const int most = threads > MOST_READERS ? threads : MOST_READERS;
        threads = readers < most ? readers : most;
    } else if (bytes < ALONE) {
        threads = 1;
    }
    kvs_guard_begin(&mask);
    kvs_pool_run(run_piece, k, k->cached.count + k->cold.count, threads);
    kvs_guard_end(&mask);
}

/* Plans streams [begin, end) and copies them. False where memory for the plan was missing. */
static bool run_streams(call *k, size_t begin, size_t end, const uint8_t *direct, uint64_t bytes, int threads) {
    k->begin = (uint32_t)begin, k->end = (uint32_t)end;
    const bool planned = kvs_plan(k, direct, threads);
    if (planned) run_plan(k, bytes, threads);
    free(k->remaining);
    free(k->cached.pieces);
    free(k->cold.pieces);
    k->remaining = NULL;
    k->cached = k->cold = (plan){0};
    k->parted = false;
    return planned;
}

int kvs_restore_call(call *k, const uint8_t *direct, int threads) {
    uint64_t total = 0, first_bytes = 0;
    size_t first_end = 0;
    k->path = kvs_crc_active();
    memset(k->read, 0, k->blocks);
    for (size_t s = 0; s < k->streams; s++)
        for (size_t b = 0; b < k->blocks && k->rows[s].base; b++) total += segment_bytes(k, s, b);
    /* Somebody waits for the first layer: planning all the others would take as long as copying it. */
    for (; k->progress && first_end < k->streams && first_bytes * FIRST_SHARE < total; first_end++)
        for (size_t b = 0; b < k->blocks && k->rows[first_end].base; b++) first_bytes += segment_bytes(k, first_end, b);
    k->stream = total >= (k->near ? STREAM_NEAR : STREAM);
    k->residency = malloc(k->blocks);
    bool planned = k->residency;
    if (planned && first_end) planned = run_streams(k, 0, first_end, direct, first_bytes, threads);
    if (planned && first_end < k->streams)
        planned = run_streams(k, first_end, k->streams, direct, total - first_bytes, threads);
    free(k->residency);
    return !planned || k->no_memory ? ENOMEM : k->stopped ? ECANCELED : 0;
}

int kvs_restore(const kvs_source *source, const kvs_rows *rows, size_t streams, size_t blocks, const uint64_t *payloads,
                const int64_t *first, const int64_t *tokens, const int64_t *used, const uint64_t *offsets,
                const uint32_t *offset_row, const uint32_t *expected, const uint8_t *direct, uint32_t *sums,
                int32_t *errors, uint8_t *read, int32_t *progress, const int32_t *stop, int threads) {
    call k = {.source = source,
              .rows = rows,
              .streams = streams,
              .blocks = blocks,
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
              .progress = progress,
              .stop = stop};
    return kvs_restore_call(&k, direct, threads);
}
