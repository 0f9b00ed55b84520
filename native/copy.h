/* Private to the kernel: moving the lines of one segment, for whoever plans the work. */
#ifndef KVS_COPY_H
#define KVS_COPY_H

#include "crc32c.h"
#include "kvs_kernel.h"

/* A line is what lies after the token axis; lines are numbered in payload order, so outer index times rows plus row. */
int64_t kvs_line_bytes(const kvs_rows *rows);

/* First of `lines` lines of part p; p == parts gives the end. */
static inline int64_t kvs_part_start(int64_t lines, size_t p, size_t parts) {
    return lines / (int64_t)parts * (int64_t)p + lines % (int64_t)parts * (int64_t)p / (int64_t)parts;
}

/*
 * Lines [from, to) of a segment of `count` rows, the first of which lies at
 * `payload`, go to rows `first` onward of the array as far as they belong to
 * the first `used` rows. Returns the state of the CRC after all of them.
 * `stream`: as in kvs_crc_path; what was written is fenced.
 */
uint32_t kvs_scatter_lines(const kvs_crc_path *path, uint32_t state, const kvs_rows *rows, const unsigned char *payload,
                           int64_t from, int64_t to, int64_t first, int64_t count, int64_t used, bool stream);

#endif
