/*
 * The plan of a restore: which bytes the page cache has, so that they are
 * copied from the map, and in which pieces the others are read.
 */
#include "pool.h"
#include "residency.h"
#include "restore.h"

#include <stdlib.h>

enum {
    WAITED_PIECE = KVS_PIECE / 2, /* of a read, where somebody waits for the first streams */
    LOOK = 1 << 20,               /* bytes of which one page is looked for in the page cache */
    CLOSE_LOOK = 256 << 10,       /* where some are there and some not */
    MANY = 64,                    /* blocks; fewer are looked at before a thread wakes up */
    PART = 256 << 10,             /* a part of a segment in the page cache isn't smaller than this */
    MAX_PARTS = 64,               /* of one segment in the page cache */
};

static bool add(plan *p, piece one) {
    if (p->count == p->room) {
        size_t room = p->room ? 2 * p->room : 256;
        piece *more = realloc(p->pieces, room * sizeof *more);
        if (!more) return false;
        p->pieces = more, p->room = room;
    }
    p->pieces[p->count++] = one;
    return true;
}

/* How many parts a segment of `bytes` is cut into where a part should have `most` bytes. */
static uint32_t parts_of(const kvs_rows *r, uint64_t bytes, uint64_t most, uint64_t limit) {
    const uint64_t lines = bytes / (uint64_t)kvs_line_bytes(r);
    uint64_t parts = (bytes + most - 1) / most;
    if (parts > limit) parts = limit;
    if (parts > lines) parts = lines;
    return parts ? (uint32_t)parts : 1;
}

static bool add_cached(call *k, uint32_t b, uint32_t s) {
    return add(&k->cached, (piece){.block = b, .stream = s, .streams = 1, .parts = 1, .way = FROM_MAP});
}

/* Streams [s, end) of a block whose bytes aren't in the page cache. */
static bool add_cold(call *k, uint32_t b, uint32_t s, uint32_t end, bool direct) {
    const uint8_t way = direct && k->source->direct_fd >= 0 ? PAST_CACHE : THROUGH_CACHE;
    piece p = {.block = b, .stream = s, .streams = end - s, .parts = 1, .way = way};
    if (way > k->read[b]) k->read[b] = way;
    if (end - s > 1) return add(&k->cold, p);
    p.parts = parts_of(&k->rows[s], segment_bytes(k, s, b), KVS_PIECE, UINT32_MAX);
    for (p.part = 0; p.part < p.parts; p.part++)
        if (!add(&k->cold, p)) return false;
    return true;
}

/* From the first wanted segment of a block to the end of the last: a look at a few of its pages. */
static void look_at_block(void *context, size_t b) {
    call *k = context;
    uint64_t from = 0, to = 0;
    for (uint32_t s = k->begin; s < k->end; s++)
        if (k->rows[s].base) {
            const uint64_t start = segment_offset(k, s, b);
            if (!to) from = start;
            to = start + segment_bytes(k, s, b);
        }
    k->residency[b] = to > from ? (uint8_t)kvs_look(k->source, from, to - from, LOOK) : KVS_ALL_CACHED;
}

/* Segments of a block in pieces; streams that are skipped part them. */
static bool plan_block(call *k, uint32_t b, bool direct) {
    const uint64_t most = k->progress ? WAITED_PIECE : KVS_PIECE;
    const kvs_residency block = k->residency[b];
    for (uint32_t s = k->begin, end; s < k->end; s = end) {
        end = s + 1;
        if (!k->rows[s].base) continue;
        const uint64_t from = segment_offset(k, s, b);
        uint64_t to = from + segment_bytes(k, s, b);
        for (; end < k->end && k->rows[end].base; end++) {
            const uint64_t further = segment_offset(k, end, b) + segment_bytes(k, end, b);
            if (further - from > most) break;
            to = further;
        }
        bool cached = to == from || block == KVS_ALL_CACHED;
        if (block == KVS_SOME_CACHED && !cached)
            cached = kvs_look(k->source, from, to - from, CLOSE_LOOK) == KVS_ALL_CACHED;
        if (cached) {
            for (uint32_t one = s; one < end; one++)
                if (!add_cached(k, b, one)) return false;
        } else if (!add_cold(k, b, s, end, direct)) {
            return false;
        }
    }
    return true;
}

/* Stream by stream, keeping the order of the blocks: so the first stream is complete first. */
static bool sort(plan *p, size_t streams) {
    if (!p->count) return true;
    size_t *place = calloc(streams + 1, sizeof *place);
    piece *sorted = malloc(p->count * sizeof *sorted);
    if (place && sorted) {
        for (size_t i = 0; i < p->count; i++) place[p->pieces[i].stream + 1]++;
        for (size_t s = 0; s < streams; s++) place[s + 1] += place[s];
        for (size_t i = 0; i < p->count; i++) sorted[place[p->pieces[i].stream]++] = p->pieces[i];
        free(p->pieces);
        p->pieces = sorted, p->room = p->count;
        sorted = NULL;
    }
    const bool done = !sorted && place;
    free(place);
    free(sorted);
    return done;
}

/* Where there are too few segments to occupy the threads, cuts them into parts. */
static bool part_cached(call *k, int threads) {
    plan cut = {0};
    if (threads > 1 && k->cached.count < 4 * (size_t)threads) {
        for (size_t i = 0; i < k->cached.count; i++) {
            piece p = k->cached.pieces[i];
            p.parts = parts_of(&k->rows[p.stream], segment_bytes(k, p.stream, p.block), PART, MAX_PARTS);
            for (p.part = 0; p.part < p.parts; p.part++)
                if (!add(&cut, p)) {
                    free(cut.pieces);
                    return false;
                }
        }
        free(k->cached.pieces);
        k->cached = cut;
    }
    return true;
}

bool kvs_plan(call *k, const uint8_t *direct, int threads) {
    kvs_pool_run(look_at_block, k, k->blocks, k->blocks < MANY ? 1 : threads);
    for (uint32_t b = 0; b < k->blocks; b++)
        if (!plan_block(k, b, direct[b])) return false;
    if (!part_cached(k, threads)) return false;
    /* Where nobody waits for the first streams, what comes out of the map is read in the order in which it lies there. */
    if (k->progress && !sort(&k->cached, k->streams)) return false;
    if (!sort(&k->cold, k->streams)) return false;
    k->remaining = calloc(k->streams, sizeof *k->remaining);
    if (!k->remaining) return false;
    for (int list = 0; list < 2; list++) {
        const plan *p = list ? &k->cold : &k->cached;
        for (size_t i = 0; i < p->count; i++) {
            k->parted = k->parted || p->pieces[i].parts > 1;
            for (uint32_t s = 0; s < p->pieces[i].streams; s++) k->remaining[p->pieces[i].stream + s]++;
        }
    }
    return true;
}
