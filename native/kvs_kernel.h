/*
 * The copy kernel of kvstore: moves attention state between an engine's arrays
 * and block payloads and checksums it in the same pass.
 *
 * Nothing here knows Python. Arguments are trusted: the Python wrapper has
 * checked every bound before it calls, so a function that is given a wrong
 * address or count has undefined behaviour. No function keeps a pointer after
 * it has returned. All functions may be called from any thread at any time
 * unless a declaration says otherwise.
 *
 * native/build_kernel.py reads the declarations of this file, so it holds no
 * preprocessor conditions beyond the include guard.
 */
#ifndef KVS_KERNEL_H
#define KVS_KERNEL_H

#include <stddef.h>
#include <stdint.h>

/* Segments of a payload start at multiples of this many bytes. On disk. */
#define KVS_SEGMENT_ALIGN 64

/* Dimensions of an engine array besides its token axis, after coalescing. */
#define KVS_MAX_DIMS 8

/* Threads that may work on one call, its caller included. */
#define KVS_MAX_THREADS 64

/* Bytes that a header may have in front of its checksums. */
#define KVS_MAX_PREFIX 256

/*
 * The engine side of one stream: 64-bit fields only, so that the wrapper can
 * pack it without asking the compiler about padding.
 *
 * Row r lies at base + r * row_stride, or, where page_rows > 0, at
 * base + (slots[r] / page_rows) * page_stride + (slots[r] % page_rows) * row_stride.
 * shape[0..outer) and stride[0..outer) are the dimensions before the token
 * axis, the next `inner` ones those after it; the innermost run_bytes are
 * contiguous and no dimension of their own. Strides are bytes and may be
 * negative. base == 0 marks a stream that is neither copied nor checked.
 */
typedef struct kvs_rows {
    uint64_t base;
    int64_t row_stride;
    uint64_t slots; /* address of int64_t[], or 0 */
    int64_t page_rows;
    int64_t page_stride;
    int64_t tokens_per_row;
    int64_t row_bytes; /* run_bytes times the product of shape */
    int64_t run_bytes;
    int64_t outer;
    int64_t inner;
    int64_t shape[8];
    int64_t stride[8];
} kvs_rows;

/*
 * CRC32C of `length` bytes, continued from `seed` (the result for the bytes
 * before them; 0 to start).
 */
uint32_t kvs_crc32c(uint32_t seed, const char *data, size_t length);

/*
 * The same on one named path. Returns 0, or EINVAL if this processor has no
 * such path; *sum is set on success only.
 */
int kvs_crc32c_with(const char *path, uint32_t seed, const char *data, size_t length, uint32_t *sum);

/*
 * Name of the i-th path that this processor can run, fastest first; NULL
 * behind the last one. The string is static.
 */
const char *kvs_crc32c_path(size_t i);

/*
 * Makes every later call use the named path, or the fastest one for NULL.
 * Returns 0 or EINVAL. For tests and benchmarks: calls under way finish on
 * the path that they began with.
 */
int kvs_crc32c_force(const char *path);

/*
 * Copies blocks out of an engine's arrays: for every block b and stream s,
 * rows first[b] / tokens_per_row onward, tokens[b] / tokens_per_row of them,
 * to payloads[b] + offsets[offset_row[b] * streams + s], and zeroes up to the
 * next multiple of KVS_SEGMENT_ALIGN. sums[b * streams + s] receives the
 * CRC32C of the segment (without the zeroes), 0 for a skipped stream, whose
 * segment is left as it was.
 *
 * Payloads must not overlap one another nor the arrays. All memory stays the
 * caller's and must live until the call returns. At most `threads` threads
 * work, the caller's among them; streams complete in order as far as there
 * are blocks to share out.
 */
void kvs_gather(const kvs_rows *rows, size_t streams, size_t blocks, const uint64_t *payloads,
                const int64_t *first, const int64_t *tokens, const uint64_t *offsets,
                const uint32_t *offset_row, uint32_t *sums, int threads);

/*
 * The way back: of block b the first used[b] / tokens_per_row rows of each
 * stream go to the arrays; sums[b * streams + s] receives the CRC32C of the
 * whole segment as it was read (0 for a skipped stream), for the caller to
 * compare. The destinations of two blocks or streams must not overlap. A page
 * of a payload that can't be read is a signal: populate maps first.
 */
void kvs_scatter(const kvs_rows *rows, size_t streams, size_t blocks, const uint64_t *payloads,
                 const int64_t *first, const int64_t *tokens, const int64_t *used,
                 const uint64_t *offsets, const uint32_t *offset_row, uint32_t *sums, int threads);

/*
 * Maps the first `length` bytes of a file read-only and shared. The file may
 * be shorter: pages behind its end become readable when it grows. The map
 * outlives the descriptor. Returns 0 and sets *address, or an errno.
 */
int kvs_map_open(int fd, size_t length, uint64_t *address);

/*
 * Makes [address, address + length) of a map resident. Returns 0, or an errno
 * where touching the range would be a signal: EFAULT behind the end of the
 * file or on a bad sector, EHWPOISON for broken memory.
 */
int kvs_map_populate(uint64_t address, size_t length);

/*
 * Unmaps what of a range is mapped in now; the next access brings it back
 * from the file. For a range whose contents nobody wants any more, so that
 * the page cache can drop it. Reading meanwhile is safe. 0 or an errno.
 */
int kvs_map_discard(uint64_t address, size_t length);

/* Ends a map made by kvs_map_open. Nobody may use it any more. 0 or an errno. */
int kvs_map_close(uint64_t address, size_t length);

/*
 * CRC32C of each of `count` records of `length` bytes, which lie one behind
 * another; the first `skip` bytes of each (at most `length`) are left out.
 */
void kvs_crc32c_each(const char *data, size_t count, size_t length, size_t skip, uint32_t *sums);

/*
 * Reads `count` headers of prefix + 4 * sums + 4 bytes from a file, number i
 * at offsets[i], and checks them: each has to begin with the `prefix` bytes
 * (at most KVS_MAX_PREFIX) at expected + i * prefix, and to end with the
 * CRC32C, little-endian, of all before it. The 4 * sums bytes in between go to
 * found + i * sums as they lie in the file.
 *
 * status[i] receives 0; or the errno of the read; or EBADMSG where the file
 * ends or what lies there is not what was expected. Then the row of `found` is
 * undefined. What is not in the page cache is asked for all at once, then
 * waited for.
 */
void kvs_read_headers(int fd, size_t count, const int64_t *offsets, const char *expected, size_t prefix, size_t sums,
                      uint32_t *found, int32_t *status);

#endif
