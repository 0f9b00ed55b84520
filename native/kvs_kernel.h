/*
 * The copy kernel of kvstore: moves attention state between an engine's arrays
 * and block payloads and checksums it in the same pass.
 *
 * Nothing here knows Python. Arguments are trusted: the Python wrapper has
 * checked every bound before it calls, so a function that is given a wrong
 * address or count has undefined behaviour. No function keeps a pointer after
 * it has returned, except kvs_writes_add. All functions may be called from any thread at any time
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

/* Bytes that kvs_writes_add may put in the place of the first ones. */
#define KVS_MAX_HEAD 32

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

/* What kvs_restore says of a block whose bytes lie behind the end of the file. */
#define KVS_END_OF_FILE 65536

/*
 * A file to restore from: the address of a map of it (kvs_map_open) that
 * reaches over all that is asked for, a descriptor for reading through the
 * page cache, and one opened with O_DIRECT, or -1.
 */
typedef struct kvs_source {
    uint64_t map;
    int64_t fd;
    int64_t direct_fd;
} kvs_source;

/*
 * kvs_scatter out of a file: payloads[b] is the offset of a payload in it.
 * What the page cache has is copied from the map; the rest is read, several
 * reads at once, past the page cache where direct[b] is set and the file
 * system can, else through it. A page or read that fails is no signal.
 *
 * sums[b * streams + s] receives the CRC32C of each segment as it was read;
 * errors[b], which the caller has zeroed, an errno or KVS_END_OF_FILE if some
 * of block b could not be read (its sums say nothing then); read[b] is 0 if
 * all of it came from the page cache, 1 if some was read through it, 2 if past
 * it. progress[s], which the caller has zeroed, becomes 1 as soon as stream s
 * is in place with the sums that are `expected`, -1 if it isn't; streams are
 * completed in order as far as the reads allow. progress may be NULL. *stop
 * may become other than 0 at any time: what is not under way is left then.
 * stop may be NULL.
 *
 * Returns 0; ENOMEM if there was no memory for the plan or to read into, or
 * ECANCELED if something was left, and then nothing is said of any block.
 */
int kvs_restore(const kvs_source *source, const kvs_rows *rows, size_t streams, size_t blocks,
                const uint64_t *payloads, const int64_t *first, const int64_t *tokens, const int64_t *used,
                const uint64_t *offsets, const uint32_t *offset_row, const uint32_t *expected,
                const uint8_t *direct, uint32_t *sums, int32_t *errors, uint8_t *read, int32_t *progress,
                const int32_t *stop, int threads);

/*
 * Restores `count` chunks: chunk p is blocks [ends[p - 1], ends[p]), which go to the `streams` rows that begin at
 * rows + which[p] * streams, first[b] being relative to those. What is put there stays near the processor, since it is
 * read right afterwards: chunks should be a few MiB.
 *
 * filled[p] (zeros before) becomes 1 as soon as chunk p is in place and sound; -1 if it isn't, and then none behind it is
 * begun any more, whatever is taken. Chunks are begun in order, two at once where they aren't in the page cache. Chunk p is begun when
 * taken[p - ahead - 1] isn't 0 any more, so a chunk must not lie over one of the `ahead` before it. Both are waited for and
 * set by kvs_progress_wait and kvs_progress_set. Everything else is as for kvs_restore; nothing is said of blocks whose
 * chunk was not begun.
 */
int kvs_restore_chunks(const kvs_source *source, const kvs_rows *rows, size_t streams, size_t count, const uint32_t *which,
                       const uint64_t *ends, const uint64_t *payloads, const int64_t *first, const int64_t *tokens,
                       const int64_t *used, const uint64_t *offsets, const uint32_t *offset_row, const uint32_t *expected,
                       const uint8_t *direct, uint32_t *sums, int32_t *errors, uint8_t *read, int32_t *filled,
                       const int32_t *taken, size_t ahead, const int32_t *stop, int threads);


/*
 * Waits until *progress, which a kvs_restore on another thread sets, isn't 0,
 * or for `milliseconds`; returns what it is.
 */
int kvs_progress_wait(const int32_t *progress, int milliseconds);

/* Sets *progress and wakes who waits for it: where no kvs_restore will. */
void kvs_progress_set(int32_t *progress, int32_t value);

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
 * Watches LMDB's map of a file, [address, address + length), whole pages of the system, whose trees have pages of `page` bytes:
 * while it is watched, a page that the disk can't deliver, or that the file doesn't have any more, is replaced by one
 * of memory, where touching it would be a signal; and with it the one in which the file was cut off. Every walk through such a
 * page ends in an error of LMDB's, or at records that are empty. The process's handler for SIGBUS is ours meanwhile.
 *
 * Before anybody sees such a page it is counted, and the descriptor `writer`, by which LMDB writes (-1 for none), is made
 * a copy of `reader`, which may only read: what was read from such a page can be in no commit from then on. Both stay
 * the caller's, and open while the map is watched.
 *
 * Returns a number for the calls below, or -1 where KVS_MAX_WATCHED maps are watched already. A forked child watches none.
 */
#define KVS_MAX_WATCHED 64
int kvs_watch(uint64_t address, size_t length, size_t page, int reader, int writer);

/* How many pages were replaced so far. */
uint64_t kvs_watch_lost(int watch);

/* Ends that, before the map ends. Nobody may be reading it. */
void kvs_watch_end(int watch);

/* Lets this thread be helped: a fault of a thread that has SIGBUS blocked ends the process, whatever is watched. */
void kvs_watch_here(void);

/*
 * Makes a window: `length` bytes of address space that begin with `count`
 * pieces of a file, `piece` bytes each, side by side, and go on with zeros.
 * Readable and writeable; what is written is private to the process. Offsets,
 * `piece` and `length` are multiples of the system's page size, and length is
 * at least 1 and count * piece. No byte is read: a piece behind the end of
 * the file is a signal for who touches it. The window outlives the
 * descriptor. Returns 0 and sets *address, or an errno with nothing left
 * mapped: ENOMEM at a limit of address space or of the number of maps.
 */
int kvs_window_open(int fd, const uint64_t *offsets, size_t count, size_t piece, size_t length, uint64_t *address);

/*
 * Replaces a window, in place, by private memory with the same bytes: nothing
 * of the file is in it any more. Other threads may read it meanwhile, none may
 * write to it. Returns 0, or an errno with the window as it was: EFAULT or
 * EHWPOISON where it can't be read, ENOMEM.
 */
int kvs_window_detach(uint64_t address, size_t length, int threads);

/* Ends a window. Nobody may use it any more. 0 or an errno. */
int kvs_window_close(uint64_t address, size_t length);

/*
 * An open CUDA driver. Never closed: a driver can't be unloaded while a process may still use it.
 *
 * The functions below return 0, or what failed: the number of the driver's call (see kvs_cuda_call) above 16 bits of its
 * error code. Each makes the device's primary context current while it runs, and leaves that of the calling thread as it
 * was. Contexts, streams and events are handles as the driver gives them, so those of other libraries in the process do.
 */
typedef struct kvs_cuda kvs_cuda;

/*
 * Opens the driver's library, at a path or by the name that the system's loader finds, and looks its functions up.
 * NULL if it can't be opened or (*incomplete is 1 then, else 0) lacks a function, with the reason in `why`.
 */
kvs_cuda *kvs_cuda_open(const char *path, char *why, size_t size, int *incomplete);

/* The name of the call that a result stands for; the error's name and description. Static strings. */
const char *kvs_cuda_call(uint32_t result);
const char *kvs_cuda_error_name(kvs_cuda *d, uint32_t result);
const char *kvs_cuda_error_text(kvs_cuda *d, uint32_t result);

/* Starts the driver and counts devices. May be called again. */
uint32_t kvs_cuda_init(kvs_cuda *d, int *devices);

/* Retains a device's primary context, the one that other libraries use too; to be ended with its close. */
uint32_t kvs_cuda_device_open(kvs_cuda *d, int ordinal, int *device, uint64_t *context, char *name, size_t size);
uint32_t kvs_cuda_device_close(kvs_cuda *d, int device);

/* Waits until everything in the context is done. */
uint32_t kvs_cuda_synchronize(kvs_cuda *d, uint64_t context);

/* Page-locks host memory, whole pages, and ends it. Nobody may use the memory for a copy any more when it ends. */
uint32_t kvs_cuda_pin(kvs_cuda *d, uint64_t context, uint64_t start, size_t size);
uint32_t kvs_cuda_unpin(kvs_cuda *d, uint64_t context, uint64_t start);

/*
 * Queue a copy from host memory to the device on a stream; pitched, `height` runs of `width` bytes, each `pitch` bytes
 * behind the one before. The source must stay as it is until the copy is done.
 */
uint32_t kvs_cuda_copy(kvs_cuda *d, uint64_t context, uint64_t stream, uint64_t target, uint64_t source, size_t size);
uint32_t kvs_cuda_copy_pitched(kvs_cuda *d, uint64_t context, uint64_t stream, uint64_t target, size_t target_pitch,
                               uint64_t source, size_t source_pitch, size_t width, size_t height);

/* Where a pointer points: to memory of a device or not, and of which. Fails for memory that the driver doesn't know. */
uint32_t kvs_cuda_pointer(kvs_cuda *d, uint64_t context, uint64_t pointer, int *is_device, int *ordinal);

/*
 * Streams don't wait for the default stream. Destroying one doesn't wait for what it holds. Where a create fails with a
 * handle other than 0 set, the stream (the event) was made all the same and is the caller's to destroy.
 */
uint32_t kvs_cuda_stream_create(kvs_cuda *d, uint64_t context, uint64_t *stream);
uint32_t kvs_cuda_stream_destroy(kvs_cuda *d, uint64_t context, uint64_t stream);
uint32_t kvs_cuda_stream_synchronize(kvs_cuda *d, uint64_t context, uint64_t stream);
uint32_t kvs_cuda_stream_wait(kvs_cuda *d, uint64_t context, uint64_t stream, uint64_t event);

/* Events tell no time, and who waits for one on the host sleeps. A query of one that is still to come fails with 600. */
uint32_t kvs_cuda_event_create(kvs_cuda *d, uint64_t context, uint64_t *event);
uint32_t kvs_cuda_event_destroy(kvs_cuda *d, uint64_t context, uint64_t event);
uint32_t kvs_cuda_event_record(kvs_cuda *d, uint64_t context, uint64_t event, uint64_t stream);
uint32_t kvs_cuda_event_query(kvs_cuda *d, uint64_t context, uint64_t event);
uint32_t kvs_cuda_event_synchronize(kvs_cuda *d, uint64_t context, uint64_t event);

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

/*
 * Has the C library keep memory that is freed: glibc asks the system for blocks above a threshold one by one, gives them back
 * at once, and gives back the end of a heap when that is twice as large. Whoever frees a large block raises both, up to
 * 32 and 64 MiB; this does nothing else, without touching the block. It counts for the whole process: each of its heaps (threads
 * have some of their own) may keep 64 MiB at its end, and what lies in front of a block that is in use stays as well. A
 * program that has set the thresholds itself is left alone, and other C libraries just see a block come and go.
 */
void kvs_keep_freed(void);

/*
 * A queue of writes to a file, and the thread that does them, in order. The
 * disk is asked to begin with each as soon as it is written, so that little is
 * left to wait for in the end. One thread at a time may use a queue.
 */
typedef struct kvs_writes kvs_writes;

/*
 * `fd` stays the caller's, open until kvs_writes_end. Nothing is written once the file is shorter than it was here: what lies
 * between its new end and what was written would read as zeros. NULL where there is no memory or no thread to be had.
 */
kvs_writes *kvs_writes_start(int fd);

/*
 * Queues `length` bytes at the address `data` to be written at `offset`, the
 * first `head_bytes` (at most KVS_MAX_HEAD and `length`) of them taken from
 * `head` instead, which is copied. The memory at `data` stays the caller's; it
 * must live and not change until kvs_writes_wait or kvs_writes_end has
 * returned. Returns 0, or ENOMEM: then it is not queued.
 */
int kvs_writes_add(kvs_writes *w, const char *head, size_t head_bytes, uint64_t data, size_t length, int64_t offset);

/*
 * Waits until all is written that was queued; that is in the page cache then,
 * not on the disk. Returns 0, or the errno of the first write that failed:
 * nothing that was queued behind it is written.
 */
int kvs_writes_wait(kvs_writes *w);

/* Waits as well, ends the thread and frees the queue. */
void kvs_writes_end(kvs_writes *w);

#endif
