/* Private to the kernel: what a restore knows, and its plan. */
#ifndef KVS_RESTORE_H
#define KVS_RESTORE_H

#include "copy.h"

#include <stdbool.h>

enum { KVS_PIECE = 1 << 20 }; /* bytes of one read, at most; but a line is never cut */

enum way { FROM_MAP, THROUGH_CACHE, PAST_CACHE };

/* Streams [stream, stream + streams) of a block; or a part of one, where parts > 1. */
typedef struct piece {
    uint32_t block, stream, streams;
    uint32_t part, parts;
    uint32_t state; /* of the CRC, begun at 0, where parts > 1 */
    uint8_t way;
} piece;

typedef struct plan {
    piece *pieces;
    size_t count, room;
} plan;

typedef struct call {
    const kvs_source *source;
    const kvs_rows *rows;
    size_t streams, blocks;
    const uint64_t *payloads; /* offsets in the file */
    const int64_t *first, *tokens, *used;
    const uint64_t *offsets;
    const uint32_t *offset_row;
    const uint32_t *expected;
    uint32_t *sums;
    int32_t *errors;
    uint8_t *read;
    int32_t *progress;
    const int32_t *stop;
    bool stopped;        /* something was left */
    bool no_memory;      /* to read into */
    uint32_t begin, end; /* the streams that are planned and copied now */
    uint8_t *residency;  /* of each block, in these streams */
    plan cached, cold;   /* what is copied from the map, and what is read */
    int32_t *remaining;  /* pieces of each stream that aren't done */
    bool parted;         /* some piece is a part of a segment */
    bool near;           /* what is restored is read right afterwards */
    bool stream;         /* store past the caches */
    const kvs_crc_path *path;
} call;

static inline int64_t rows_of(const call *k, size_t s, size_t b) { return k->tokens[b] / k->rows[s].tokens_per_row; }

static inline uint64_t segment_bytes(const call *k, size_t s, size_t b) {
    return (uint64_t)(rows_of(k, s, b) * k->rows[s].row_bytes);
}

static inline uint64_t segment_offset(const call *k, size_t s, size_t b) {
    return k->payloads[b] + k->offsets[k->offset_row[b] * k->streams + s];
}

/*
 * Fills `cached`, `cold`, `remaining` and `parted` for streams [begin, end),
 * each list stream by stream, and notes in `read` how blocks are read.
 * direct[b]: whether what block b lacks in the page cache is read past it.
 * False if there was no memory; what was allocated is the caller's either way.
 */
bool kvs_plan(call *k, const uint8_t *direct, int threads);

/* As kvs_restore, for a call that is filled in as far as its arguments go. */
int kvs_restore_call(call *k, const uint8_t *direct, int threads);

#endif
