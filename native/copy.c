/*
 * Gather and scatter: one task is one segment (a stream of a block), or a
 * part of one where there are too few segments to occupy the threads.
 *
 * A task walks its segment in payload order and copies run by run. Long runs
 * are copied and checksummed together; short ones are copied until a piece
 * that surely still is in the first-level cache has come together, which is
 * then checksummed on the payload's side. A large gather brings short runs
 * together in a buffer beside the payload, so that the payload as well is
 * written once, in whole lines past the caches, by what checksums it.
 */
#include "copy.h"
#include "pool.h"

#include <string.h>

enum {
    LONG_RUN = 2048,     /* from here a run is worth the start-up of the fused copy */
    PIECE = 8192,        /* short runs are checksummed in pieces of this size */
    STREAMED_RUN = 256,  /* from here a short run is worth storing past the caches: twice as fast at 256 to 2047 bytes */
    ASKED_RUN = 1024,    /* from here a short run is asked for before it is gathered */
    ASKED = 512,         /* that much of it, at its beginning */
    ASKED_LONG = 1024,   /* and that much of a long run, before the one in front of it is copied */
    CROSSWISE = 65536,   /* payload bytes that stay in a cache while they are filled crosswise */
    PART = 256 << 10,    /* a part of a segment isn't smaller than this */
    MAX_PARTS = 64,      /* of one segment */
    PARTED_TASKS = 1024, /* calls with more tasks than this need no parts */
    ALONE = 128 << 10,   /* a call of fewer bytes is done before a thread wakes up */
};

/*
 * Calls of more bytes store past the caches: an ordinary store reads the line before it overwrites it. Measured to win
 * in both directions, by 1.1 to 1.7 over the best plain copy. The exception are buffers that are filled again
 * while the last cache still holds them all (16 MiB of 32): there ordinary stores were up to 1.35 times as fast while
 * others kept the memory busy, and slower while they did not; a larger ring costs them a third. A call can't see
 * which it is.
 */
#define STREAM ((uint64_t)1 << 20)

typedef struct call {
    const kvs_rows *rows;
    size_t streams, blocks;
    const uint64_t *payloads;
    const int64_t *first, *tokens, *used;
    const uint64_t *offsets;
    const uint32_t *offset_row;
    uint32_t *sums;
    uint32_t *part_sums; /* parts > 1: [segment][part] states, each begun at 0 */
    size_t parts;
    bool scatter, stream;
    const kvs_crc_path *path;
} call;

typedef struct cursor {
    const kvs_rows *rows;
    const kvs_crc_path *path;
    unsigned char *at;            /* in the payload */
    const unsigned char *summed;  /* what lies before it is in the state */
    uint32_t state;
    bool stream, crosswise;
    unsigned char *beside; /* 2 * PIECE bytes that hold [summed, at) until it is summed, or NULL: it is in its place */
} cursor;

static inline void sum_pending(cursor *c) {
    const size_t length = (size_t)(c->at - c->summed);
    unsigned char *place = c->at - length;
    if (c->beside)
        c->state = c->path->copy(c->state, place, c->beside, length, true);
    else
        c->state = c->path->update(c->state, place, length);
    c->summed = c->at;
}

/* Both directions are compiled from the functions below, with `scatter` a constant. */
#define ALWAYS static inline __attribute__((always_inline))

ALWAYS void move_run(cursor *c, unsigned char *engine, size_t length, bool scatter) {
    if (c->summed != c->at) sum_pending(c);
    c->state = c->path->copy(c->state, scatter ? engine : c->at, scatter ? c->at : engine, length, c->stream);
    c->at += length;
    c->summed = c->at;
}

/* No prefetcher of the processor's sees where the next run begins. */
static inline void ask_for(const unsigned char *run, size_t length) {
    for (size_t i = 0; i < length; i += 64) __builtin_prefetch(run + i);
}

/* A size that the compiler knows becomes plain loads and stores. */
#define MOVE_EACH(size)                                                 \
    for (size_t i = 0; i < n; i++, engine += stride, payload += (size)) \
    memcpy(scatter ? engine : payload, scatter ? payload : engine, (size))

/* `n` runs of `run` bytes, `stride` apart in the engine's array. */
ALWAYS void move_runs(cursor *c, unsigned char *engine, size_t count, int64_t stride, size_t run, bool scatter) {
    if (stride == (int64_t)run) run *= count, count = 1;
    if (run >= LONG_RUN) {
        for (; count; count--, engine += stride) {
            if (count > 1) ask_for(scatter ? c->at + run : engine + stride, ASKED_LONG);
            move_run(c, engine, run, scatter);
        }
        return;
    }
    while (count) {
        size_t n = PIECE / run < count ? PIECE / run : count;
        unsigned char *payload = c->beside ? c->beside + (c->at - c->summed) : c->at;
        count -= n;
        c->at += n * run;
        switch (run) {
        case 1: MOVE_EACH(1); break;
        case 2: MOVE_EACH(2); break;
        case 4: MOVE_EACH(4); break;
        case 8: MOVE_EACH(8); break;
        case 16: MOVE_EACH(16); break;
        case 32: MOVE_EACH(32); break;
        case 64: MOVE_EACH(64); break;
        default:
            if (scatter && c->stream && run >= STREAMED_RUN) {
                kvs_stream_runs(engine, stride, payload, n, run);
                engine += stride * (int64_t)n;
            } else if (!scatter && run >= ASKED_RUN) {
                for (size_t i = 0; i < n; i++, engine += stride, payload += run) {
                    if (i + 2 < n + count) ask_for(engine + 2 * stride, ASKED);
                    memcpy(payload, engine, run);
                }
            } else {
                MOVE_EACH(run);
            }
        }
        if (c->at - c->summed >= PIECE) sum_pending(c);
    }
}

/* What lies after the token axis, of one row. */
ALWAYS void move_row(cursor *c, unsigned char *engine, bool scatter) {
    const kvs_rows *r = c->rows;
    const int64_t *shape = r->shape + r->outer, *stride = r->stride + r->outer;
    const int64_t last = r->inner - 1;
    int64_t index[KVS_MAX_DIMS] = {0};
    for (;;) {
        move_runs(c, engine, (size_t)shape[last], stride[last], (size_t)r->run_bytes, scatter);
        int64_t d = last - 1;
        for (; d >= 0; d--) {
            engine += stride[d];
            if (++index[d] < shape[d]) break;
            engine -= stride[d] * shape[d];
            index[d] = 0;
        }
        if (d < 0) return;
    }
}

/*
 * `n` rows of an array whose token axis is the densest: row by row, each element would cost a cache line. So all
 * rows of an element are moved before the next element.
 */
#define MOVE_ROWS(size)                                                                      \
    for (int64_t i = 0; i < n; i++, e += r->row_stride, p += line)                           \
    memcpy(scatter ? e : p, scatter ? p : e, (size))

ALWAYS void move_rows_crosswise(cursor *c, unsigned char *engine, int64_t n, int64_t line, bool scatter) {
    const kvs_rows *r = c->rows;
    const int64_t *shape = r->shape + r->outer, *stride = r->stride + r->outer;
    const size_t run = (size_t)r->run_bytes;
    int64_t index[KVS_MAX_DIMS] = {0};
    for (unsigned char *payload = c->at;; payload += run) {
        unsigned char *e = engine, *p = payload;
        switch (run) {
        case 1: MOVE_ROWS(1); break;
        case 2: MOVE_ROWS(2); break;
        case 4: MOVE_ROWS(4); break;
        case 8: MOVE_ROWS(8); break;
        default: MOVE_ROWS(run); break;
        }
        int64_t d = r->inner - 1;
        for (; d >= 0; d--) {
            engine += stride[d];
            if (++index[d] < shape[d]) break;
            engine -= stride[d] * shape[d];
            index[d] = 0;
        }
        if (d < 0) break;
    }
    c->at += n * line;
    sum_pending(c);
}

int64_t kvs_line_bytes(const kvs_rows *r) {
    int64_t bytes = r->run_bytes;
    for (int64_t d = r->outer; d < r->outer + r->inner; d++) bytes *= r->shape[d];
    return bytes;
}

static bool is_crosswise(const kvs_rows *r) {
    if (!r->inner || r->run_bytes > 16) return false;
    const int64_t innermost = r->stride[r->outer + r->inner - 1];
    return (r->row_stride < 0 ? -r->row_stride : r->row_stride) < (innermost < 0 ? -innermost : innermost);
}

ALWAYS void move_span(cursor *c, unsigned char *engine, int64_t count, bool scatter) {
    const kvs_rows *r = c->rows;
    if (!r->inner) {
        move_runs(c, engine, (size_t)count, r->row_stride, (size_t)r->run_bytes, scatter);
    } else if (c->crosswise) {
        const int64_t line = kvs_line_bytes(r), fits = CROSSWISE / line < 16 ? 16 : CROSSWISE / line;
        for (int64_t n; count; count -= n, engine += n * r->row_stride) {
            n = count < fits ? count : fits;
            move_rows_crosswise(c, engine, n, line, scatter);
        }
    } else {
        for (; count; count--, engine += r->row_stride) move_row(c, engine, scatter);
    }
}

/* Rows [row, row + count) of the array at one place of the outer dimensions. */
ALWAYS void move_rows(cursor *c, unsigned char *engine, int64_t row, int64_t count, bool scatter) {
    const kvs_rows *r = c->rows;
    if (!r->page_rows) {
        move_span(c, engine + row * r->row_stride, count, scatter);
        return;
    }
    const int64_t *slot = (const int64_t *)(uintptr_t)r->slots + row;
    while (count) {
        int64_t page = *slot / r->page_rows, offset = *slot % r->page_rows, span = 1;
        const int64_t most = count < r->page_rows - offset ? count : r->page_rows - offset;
        while (span < most && slot[span] == slot[span - 1] + 1) span++;
        move_span(c, engine + page * r->page_stride + offset * r->row_stride, span, scatter);
        slot += span, count -= span;
    }
}

/*
 * Lines [from, to) of a segment, where a line is what lies after the token
 * axis, numbered in payload order, so outer index times rows plus row.
 */
ALWAYS void move_lines(cursor *c, int64_t from, int64_t to, int64_t first, int64_t rows, int64_t used, bool scatter) {
    const kvs_rows *r = c->rows;
    unsigned char *engine = (unsigned char *)(uintptr_t)r->base;
    int64_t index[KVS_MAX_DIMS] = {0};
    const int64_t line_bytes = kvs_line_bytes(r);
    int64_t place = from / rows, row = from % rows;
    for (int64_t d = r->outer - 1; d >= 0; d--) {
        index[d] = place % r->shape[d];
        place /= r->shape[d];
        engine += index[d] * r->stride[d];
    }
    while (from < to) {
        int64_t count = rows - row < to - from ? rows - row : to - from;
        int64_t copied = used - row < count ? used - row : count;
        if (copied > 0) move_rows(c, engine, first + row, copied, scatter);
        if (copied < count) c->at += (count - (copied > 0 ? copied : 0)) * line_bytes;
        from += count;
        row = 0;
        for (int64_t d = r->outer - 1; d >= 0; d--) {
            engine += r->stride[d];
            if (++index[d] < r->shape[d]) break;
            engine -= r->stride[d] * r->shape[d];
            index[d] = 0;
        }
    }
    if (c->summed != c->at) sum_pending(c);
}

static void gather_lines(cursor *c, int64_t from, int64_t to, int64_t first, int64_t rows) {
    move_lines(c, from, to, first, rows, rows, false);
}

static void scatter_lines(cursor *c, int64_t from, int64_t to, int64_t first, int64_t rows, int64_t used) {
    move_lines(c, from, to, first, rows, used, true);
}

uint32_t kvs_scatter_lines(const kvs_crc_path *path, uint32_t state, const kvs_rows *rows, const unsigned char *payload,
                           int64_t from, int64_t to, int64_t first, int64_t count, int64_t used, bool stream) {
    cursor c = {.rows = rows, .path = path, .state = state, .stream = stream, .crosswise = is_crosswise(rows)};
    c.at = (unsigned char *)(uintptr_t)payload; /* read only: both directions share the cursor */
    c.summed = c.at;
    scatter_lines(&c, from, to, first, count, used);
    if (stream) kvs_store_fence();
    return c.state;
}

static void run_task(void *context, size_t task) {
    const call *k = context;
    const size_t part = task % k->parts, segment = task / k->parts;
    const size_t s = segment / k->blocks, b = segment % k->blocks;
    const kvs_rows *r = &k->rows[s];
    uint32_t *sum = &k->sums[b * k->streams + s];
    if (!r->base) {
        *sum = 0;
        return;
    }
    const int64_t rows = k->tokens[b] / r->tokens_per_row, first = k->first[b] / r->tokens_per_row;
    unsigned char *start = (unsigned char *)(uintptr_t)(k->payloads[b] + k->offsets[k->offset_row[b] * k->streams + s]);
    cursor c = {.rows = r, .path = k->path, .state = k->parts > 1 ? 0 : ~0u, .stream = k->stream};
    unsigned char beside[2 * PIECE];
    c.crosswise = is_crosswise(r);
    c.beside = k->stream && !k->scatter && !c.crosswise ? beside : NULL;
    c.at = start;
    if (rows) {
        const int64_t line = kvs_line_bytes(r), lines = r->row_bytes / line * rows;
        const int64_t from = kvs_part_start(lines, part, k->parts), to = kvs_part_start(lines, part + 1, k->parts);
        c.at += from * line;
        c.summed = c.at;
        if (k->scatter)
            scatter_lines(&c, from, to, first, rows, k->used[b] / r->tokens_per_row);
        else
            gather_lines(&c, from, to, first, rows);
    }
    if (!k->scatter && part + 1 == k->parts) memset(c.at, 0, (size_t)(-(c.at - start) & (KVS_SEGMENT_ALIGN - 1)));
    if (k->parts > 1)
        k->part_sums[segment * k->parts + part] = c.state;
    else
        *sum = ~c.state;
    if (k->stream) kvs_store_fence();
}

static void join_parts(const call *k) {
    for (size_t s = 0; s < k->streams; s++)
        for (size_t b = 0; b < k->blocks; b++) {
            const kvs_rows *r = &k->rows[s];
            if (!r->base) continue;
            const int64_t rows = k->tokens[b] / r->tokens_per_row, line = kvs_line_bytes(r);
            const int64_t lines = r->row_bytes / line * rows;
            uint32_t state = ~0u;
            for (size_t p = 0; p < k->parts; p++) {
                int64_t length = kvs_part_start(lines, p + 1, k->parts) - kvs_part_start(lines, p, k->parts);
                state = kvs_crc_combine(state, k->part_sums[(s * k->blocks + b) * k->parts + p],
                                        (uint64_t)(length * line));
            }
            k->sums[b * k->streams + s] = ~state;
        }
}

static void run_call(call *k, int threads) {
    uint64_t total = 0, largest = 0;
    for (size_t s = 0; s < k->streams; s++)
        for (size_t b = 0; b < k->blocks && k->rows[s].base; b++) {
            uint64_t bytes = (uint64_t)(k->tokens[b] / k->rows[s].tokens_per_row) * (uint64_t)k->rows[s].row_bytes;
            total += bytes;
            if (bytes > largest) largest = bytes;
        }
    uint32_t part_sums[PARTED_TASKS];
    const size_t segments = k->streams * k->blocks;
    k->path = kvs_crc_active();
    k->stream = total >= STREAM;
    k->parts = 1;
    if (total < ALONE) threads = 1;
    if (threads > 1 && segments < 4 * (size_t)threads && largest >= 2 * PART) {
        size_t parts = (size_t)(largest / PART), most = PARTED_TASKS / segments;
        if (parts > MAX_PARTS) parts = MAX_PARTS;
        k->parts = parts < most ? parts : most;
        k->part_sums = part_sums;
    }
    kvs_pool_run(run_task, k, segments * k->parts, threads);
    if (k->parts > 1) join_parts(k);
}

void kvs_gather(const kvs_rows *rows, size_t streams, size_t blocks, const uint64_t *payloads, const int64_t *first,
                const int64_t *tokens, const uint64_t *offsets, const uint32_t *offset_row, uint32_t *sums,
                int threads) {
    call k = {.rows = rows,
              .streams = streams,
              .blocks = blocks,
              .payloads = payloads,
              .first = first,
              .tokens = tokens,
              .used = tokens,
              .offsets = offsets,
              .offset_row = offset_row,
              .sums = sums};
    run_call(&k, threads);
}

void kvs_scatter(const kvs_rows *rows, size_t streams, size_t blocks, const uint64_t *payloads, const int64_t *first,
                 const int64_t *tokens, const int64_t *used, const uint64_t *offsets, const uint32_t *offset_row,
                 uint32_t *sums, int threads) {
    call k = {.rows = rows,
              .streams = streams,
              .blocks = blocks,
              .payloads = payloads,
              .first = first,
              .tokens = tokens,
              .used = used,
              .offsets = offsets,
              .offset_row = offset_row,
              .sums = sums,
              .scatter = true};
    run_call(&k, threads);
}
