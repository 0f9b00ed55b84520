/*
 * The kernel's own test, for the sanitizers: small enough to run under each of
 * them, and free of Python, whose allocator would hide overruns. What the
 * copies must do in every shape is held by tests/kernel.
 *
 * Says what failed and exits with 1, or says "ok" and exits with 0.
 */
#define _GNU_SOURCE
#include "crc32c.h"
#include "kvs_kernel.h"
#include "pool.h"
#include "test_kernel.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Bit by bit, as the definition has it. */
static uint32_t slow_crc(uint32_t sum, const unsigned char *p, size_t length) {
    sum = ~sum;
    for (; length; length--) {
        sum ^= *p++;
        for (int bit = 0; bit < 8; bit++) sum = (sum >> 1) ^ (0x82F63B78u & (0u - (sum & 1)));
    }
    return ~sum;
}

static void test_checksums(void) {
    static const size_t lengths[] = {
        0, 1, 7, 8, 9, 63, 64, 65, 255, 256, 257, 767, 768, 769, 831,
        832, 1023, 1024, 1025, 1279, 1280, 1535, 1536, 1599, 1600, 2048, 4095, 4096, 4097, 6143,
        6144, 6145, 6911, 6912, 6913, 8191, 8192, 8193, 9999, 12287, 12288, 12289, 20000,
    };
    CHECK(kvs_crc32c(0, "123456789", 9) == 0xE3069283u);
    CHECK(kvs_crc32c_force("abacus") == EINVAL);
    const char *path;
    for (size_t i = 0; (path = kvs_crc32c_path(i)); i++) {
        CHECK(!kvs_crc32c_force(path));
        for (size_t k = 0; k < sizeof lengths / sizeof lengths[0]; k++)
            for (size_t shift = 0; shift < 64; shift += 9) {
                size_t n = lengths[k];
                unsigned char *data = noisy(n + shift, n + shift), *copy = noisy(n + shift, 1);
                uint32_t sum, expected = slow_crc(0x1234567u, data + shift, n);
                CHECK(!kvs_crc32c_with(path, 0x1234567u, (const char *)data + shift, n, &sum));
                CHECK(sum == expected);
                CHECK(kvs_crc32c(0x1234567u, (const char *)data + shift, n) == expected);
                for (int stream = 0; stream < 2; stream++) {
                    memset(copy, 0, n + shift);
                    CHECK(~kvs_crc_active()->copy(~0x1234567u, copy + shift, data + shift, n, stream) == expected);
                    kvs_store_fence();
                    CHECK(!n || !memcmp(copy + shift, data + shift, n));
                }
                CHECK(~kvs_crc_combine(~slow_crc(0, data, shift), ~slow_crc(~0u, data + shift, n), n) ==
                      slow_crc(0, data, n + shift));
                free(data);
                free(copy);
            }
    }
    CHECK(!kvs_crc32c_force(NULL));
}

/* There and back through payloads that end where their memory ends. */
static void copy_blocks(size_t blocks, int64_t tokens, int64_t run, int64_t heads, uint64_t seed, int threads) {
    enum { STREAMS = 4 };
    const int64_t capacity = (int64_t)blocks * tokens, size = heads * capacity * run;
    unsigned char *source[STREAMS], *target[STREAMS];
    kvs_rows from[STREAMS], to[STREAMS];
    int64_t *slots = malloc(sizeof *slots * (size_t)capacity);
    CHECK(slots);
    for (int64_t i = 0; i < capacity; i++) slots[i] = capacity - 1 - i;
    for (int s = 0; s < STREAMS; s++) {
        source[s] = noisy((size_t)size, seed + (uint64_t)s);
        target[s] = calloc((size_t)size, 1);
        CHECK(target[s]);
        kvs_rows r = {.tokens_per_row = 1, .row_bytes = heads * run, .run_bytes = run};
        if (s == 0) { /* heads outside, as runs of all tokens */
            r.row_stride = run, r.outer = 1, r.shape[0] = heads, r.stride[0] = capacity * run;
        } else if (s == 1) { /* heads inside, backwards */
            r.row_stride = heads * run, r.inner = 1, r.shape[0] = heads, r.stride[0] = -run;
        } else if (s == 2) { /* heads inside but far apart */
            r.row_stride = run, r.inner = 1, r.shape[0] = heads, r.stride[0] = capacity * run;
        } else { /* pages of one row */
            r.row_stride = 0, r.slots = (uint64_t)(uintptr_t)slots, r.page_rows = 1, r.page_stride = heads * run;
            r.run_bytes = heads * run;
        }
        const uint64_t lead = s == 1 ? (uint64_t)((heads - 1) * run) : 0;
        from[s] = to[s] = r;
        from[s].base = (uint64_t)(uintptr_t)source[s] + lead;
        to[s].base = (uint64_t)(uintptr_t)target[s] + lead;
    }
    const size_t segment = (size_t)(tokens * heads * run), aligned = (segment + 63) / 64 * 64;
    uint64_t *payloads = calloc(blocks, sizeof *payloads), offsets[STREAMS];
    int64_t *first = calloc(blocks, sizeof *first), *count = calloc(blocks, sizeof *count);
    uint32_t *row = calloc(blocks, sizeof *row);
    uint32_t *sums = calloc(STREAMS * blocks, sizeof *sums), *again = calloc(STREAMS * blocks, sizeof *again);
    CHECK(payloads && first && count && row && sums && again);
    for (int s = 0; s < STREAMS; s++) offsets[s] = (uint64_t)s * aligned;
    for (size_t b = 0; b < blocks; b++) {
        payloads[b] = (uint64_t)(uintptr_t)noisy(STREAMS * aligned, 7);
        first[b] = (int64_t)b * tokens;
        count[b] = tokens;
    }
    kvs_gather(from, STREAMS, blocks, payloads, first, count, offsets, row, sums, threads);
    kvs_scatter(to, STREAMS, blocks, payloads, first, count, count, offsets, row, again, threads);
    CHECK(!memcmp(sums, again, sizeof *sums * STREAMS * blocks));
    for (size_t b = 0; b < blocks; b++)
        for (int s = 0; s < STREAMS; s++) {
            const unsigned char *p = (const unsigned char *)(uintptr_t)payloads[b] + offsets[s];
            CHECK(sums[b * STREAMS + (size_t)s] == slow_crc(0, p, segment));
            for (size_t i = segment; i < aligned; i++) CHECK(p[i] == 0);
        }
    for (int s = 0; s < STREAMS; s++) {
        CHECK(!memcmp(source[s], target[s], (size_t)size));
        free(source[s]);
        free(target[s]);
    }
    for (size_t b = 0; b < blocks; b++) free((void *)(uintptr_t)payloads[b]);
    free(payloads), free(first), free(count), free(row), free(sums), free(again), free(slots);
}

static void test_copies(void) {
    const char *path;
    for (size_t i = 0; (path = kvs_crc32c_path(i)); i++) {
        CHECK(!kvs_crc32c_force(path));
        copy_blocks(3, 16, 1, 3, 1, 1);
        copy_blocks(2, 5, 8, 7, 2, 1);
        copy_blocks(5, 64, 130, 4, 3, 4);
        copy_blocks(1, 256, 2100, 3, 4, 4);
        copy_blocks(3, 256, 1000, 3, 5, 4);
    }
    CHECK(!kvs_crc32c_force(NULL));
}

static void add_one(void *context, size_t i) { ((unsigned char *)context)[i]++; }

static void *run_jobs(void *argument) {
    const int seed = *(const int *)argument;
    unsigned char seen[500];
    for (int round = 0; round < 100; round++) {
        memset(seen, 0, sizeof seen);
        kvs_pool_run(add_one, seen, sizeof seen, 1 + (seed + round) % 6);
        for (size_t i = 0; i < sizeof seen; i++) CHECK(seen[i] == 1);
    }
    copy_blocks(4, 64, 130, 4, (uint64_t)seed, 3);
    return NULL;
}

static void test_pool(void) {
    enum { CALLERS = 6 };
    pthread_t callers[CALLERS];
    int seeds[CALLERS];
    for (int i = 0; i < CALLERS; i++) {
        seeds[i] = i;
        CHECK(!pthread_create(&callers[i], NULL, run_jobs, &seeds[i]));
    }
    for (int i = 0; i < CALLERS; i++) pthread_join(callers[i], NULL);
    kvs_pool_run(add_one, NULL, 0, 4);
}

#ifndef __SANITIZE_THREAD__ /* which knows nothing of threads that start after a fork */
static void test_fork(void) {
    for (int i = 0; i < 10; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (!child) {
            int seed = 1;
            alarm(30);
            run_jobs(&seed);
            _exit(0);
        }
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(status == 0);
    }
}
#endif

static void test_map(void) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    FILE *file = tmpfile();
    CHECK(file);
    CHECK(!ftruncate(fileno(file), (off_t)(2 * page + 1)));
    uint64_t address = 0;
    CHECK(!kvs_map_open(fileno(file), 10 * page, &address));
    CHECK(!kvs_map_populate(address, 3 * page));
    CHECK(!kvs_map_populate(address + 5, 0));
    CHECK(kvs_map_populate(address, 4 * page) == EFAULT);
    CHECK(!ftruncate(fileno(file), (off_t)(10 * page)));
    CHECK(!kvs_map_populate(address + 9 * page + 7, page - 7));
    CHECK(((const char *)(uintptr_t)address)[9 * page] == 0);
    CHECK(!kvs_map_close(address, 10 * page));
    CHECK(kvs_map_open(-1, page, &address) == EBADF);
    fclose(file);
}

static atomic_int done;

static void *read_window(void *argument) {
    const volatile unsigned char *window = argument;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    do
        for (size_t i = 0; i < 4; i++) CHECK(window[i * page] == 3 - i);
    while (!atomic_load(&done));
    return NULL;
}

/* Pieces of a file in reverse order, and zeros behind; a piece is as large as given. */
static void test_window(size_t piece) {
    enum { PIECES = 4 };
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), length = PIECES * piece + 2 * page;
    FILE *file = tmpfile();
    CHECK(file);
    const int fd = fileno(file);
    uint64_t offsets[PIECES], address = 1;
    unsigned char *bytes = malloc(piece);
    CHECK(bytes);
    for (size_t i = 0; i < PIECES; i++) {
        offsets[i] = (PIECES - 1 - i) * (piece + page);
        memset(bytes, (int)i, piece);
        CHECK(pwrite(fd, bytes, piece, (off_t)(i * (piece + page))) == (ssize_t)piece);
    }
    CHECK(kvs_window_open(-1, offsets, PIECES, piece, length, &address) == EBADF);
    CHECK(kvs_window_open(fd, offsets, PIECES, piece, (size_t)1 << 62, &address) == ENOMEM);
    CHECK(address == 1);
    CHECK(!kvs_window_open(fd, offsets, PIECES, piece, length, &address));
    unsigned char *window = (unsigned char *)(uintptr_t)address;
    for (size_t i = 0; i < PIECES; i++) CHECK(window[i * piece] == 3 - i && window[(i + 1) * piece - 1] == 3 - i);
    for (size_t i = PIECES * piece; i < length; i++) CHECK(window[i] == 0);
    window[3 * piece + 1] = 9;
    window[length - 1] = 8;
    CHECK(pread(fd, bytes, 2, (off_t)offsets[3]) == 2 && bytes[1] == 0);

    CHECK(!ftruncate(fd, (off_t)piece)); /* which leaves one piece, the last */
    CHECK(kvs_window_detach(address, length, 2) == EFAULT);
    CHECK(window[3 * piece] == 0 && window[3 * piece + 1] == 9 && window[length - 1] == 8);
    for (size_t i = 1; i < PIECES; i++) {
        memset(bytes, (int)i, piece);
        CHECK(pwrite(fd, bytes, piece, (off_t)(i * (piece + page))) == (ssize_t)piece);
    }
    pthread_t reader;
    atomic_store(&done, 0);
    if (piece == page) CHECK(!pthread_create(&reader, NULL, read_window, window));
    CHECK(!kvs_window_detach(address, length, 2));
    CHECK(!ftruncate(fd, 0));
    for (size_t i = 0; i < PIECES; i++) CHECK(window[i * piece] == 3 - i && window[(i + 1) * piece - 1] == 3 - i);
    CHECK(window[3 * piece + 1] == 9 && window[length - 1] == 8 && window[length - 2] == 0);
    window[2 * piece + 5] = 7;
    CHECK(!kvs_window_detach(address, length, 1)); /* to no end, and no harm */
    CHECK(window[3 * piece + 1] == 9 && window[2 * piece + 5] == 7);
    atomic_store(&done, 1);
    if (piece == page) pthread_join(reader, NULL);
    CHECK(!kvs_window_close(address, length));
    CHECK(!kvs_window_open(fd, NULL, 0, 0, page, &address));
    CHECK(*(const unsigned char *)(uintptr_t)address == 0);
    CHECK(!kvs_window_detach(address, page, 1));
    CHECK(!kvs_window_close(address, page));
    free(bytes);
    fclose(file);
}

/* Through a driver that works on host memory (tests/device), which runs what is queued when it is waited for. */
static void test_cuda(const char *path) {
    enum { ROWS = 5, WIDTH = 100, PITCH = 160 };
    char text[200];
    int incomplete = 7, devices = 0, device = 0, is_device = 0, ordinal = 0;
    CHECK(!kvs_cuda_open("/no/such/driver", text, sizeof text, &incomplete) && !incomplete && strlen(text));
    CHECK(!kvs_cuda_open("libc.so.6", text, sizeof text, &incomplete) && incomplete && strstr(text, "cuInit"));
    if (!path) return;
    kvs_cuda *d = kvs_cuda_open(path, text, sizeof text, &incomplete);
    CHECK(d && !kvs_cuda_init(d, &devices) && devices == 1);
    uint64_t context = 0, stream = 0, event = 0;
    const uint32_t missing = kvs_cuda_device_open(d, 4, &device, &context, text, sizeof text);
    CHECK(!strcmp(kvs_cuda_call(missing), "cuDeviceGet") && !strcmp(kvs_cuda_error_name(d, missing), "CUDA_ERROR_INVALID_DEVICE"));
    CHECK(strlen(kvs_cuda_error_text(d, missing)) && !strcmp(kvs_cuda_call(~0u), "?"));
    CHECK(!kvs_cuda_device_open(d, 0, &device, &context, text, 12) && strlen(text) == 11);
    CHECK(!kvs_cuda_stream_create(d, context, &stream) && stream && !kvs_cuda_event_create(d, context, &event) && event);

    uint64_t (*allocate)(size_t, int);
    void *library = dlopen(path, RTLD_NOW), *symbol = dlsym(library, "fake_alloc");
    CHECK(library && symbol);
    memcpy(&allocate, &symbol, sizeof symbol);
    const uint64_t target = allocate(ROWS * PITCH, 0);
    CHECK(!kvs_cuda_pointer(d, context, target + 9, &is_device, &ordinal) && is_device && ordinal == 0);
    CHECK((kvs_cuda_pointer(d, context, (uint64_t)(uintptr_t)text, &is_device, &ordinal) & 0xffff) == 1 && !is_device);

    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *source = aligned_alloc(page, page);
    const uint64_t start = (uint64_t)(uintptr_t)source;
    CHECK(source);
    for (size_t i = 0; i < page; i++) source[i] = (unsigned char)(i % 251 + 1);
    CHECK(!kvs_cuda_pin(d, context, start, page));
    CHECK(!kvs_cuda_copy_pitched(d, context, stream, target, PITCH, start, WIDTH, WIDTH, ROWS));
    CHECK(!kvs_cuda_copy(d, context, stream, target + WIDTH, start, PITCH - WIDTH));
    CHECK(!kvs_cuda_event_record(d, context, event, stream) && !kvs_cuda_stream_wait(d, context, stream, event));
    const unsigned char *got = (const unsigned char *)(uintptr_t)target;
    CHECK(!got[0] && (kvs_cuda_event_query(d, context, event) & 0xffff) == 600);
    CHECK(!kvs_cuda_event_synchronize(d, context, event) && !kvs_cuda_event_query(d, context, event));
    for (size_t y = 0; y < ROWS; y++) CHECK(!memcmp(got + y * PITCH, source + y * WIDTH, WIDTH));
    CHECK(!memcmp(got + WIDTH, source, PITCH - WIDTH) && !got[PITCH + WIDTH]);
    CHECK(!kvs_cuda_stream_synchronize(d, context, stream) && !kvs_cuda_synchronize(d, context));
    CHECK(!kvs_cuda_unpin(d, context, start) && kvs_cuda_unpin(d, context, start));
    CHECK(!kvs_cuda_event_destroy(d, context, event) && !kvs_cuda_stream_destroy(d, context, stream));
    CHECK(!kvs_cuda_device_close(d, device));
    const uint32_t late = kvs_cuda_pin(d, context, start, page);
    CHECK(!strcmp(kvs_cuda_call(late), "cuCtxPushCurrent_v2"));
    free(source);
    free(d);
}

static void test_each_checksum(void) {
    static const size_t lengths[] = {1, 4, 76, 300};
    for (size_t k = 0; k < sizeof lengths / sizeof lengths[0]; k++)
        for (size_t count = 0; count < 70; count += 23) {
            const size_t n = lengths[k], skip = k % 2 ? 4 : 0;
            unsigned char *data = noisy(n * count, n);
            uint32_t *sums = malloc(sizeof *sums * (count ? count : 1));
            CHECK(sums);
            kvs_crc32c_each((const char *)data, count, n, skip, sums);
            for (size_t i = 0; i < count; i++) CHECK(sums[i] == slow_crc(0, data + i * n + skip, n - skip));
            free(data), free(sums);
        }
}

/* A file of headers 5000 bytes apart, of which some are damaged; every buffer ends where its memory ends. */
static void read_some_headers(size_t count, size_t prefix, size_t sums, uint64_t seed) {
    const size_t length = prefix + 4 * sums + 4, apart = 5000;
    FILE *file = tmpfile();
    CHECK(file);
    const int fd = fileno(file);
    unsigned char *expected = noisy(count * prefix, seed), *bytes = noisy(length, seed);
    unsigned char *words = malloc(count * 4 * sums + 1);
    uint32_t *found = malloc(count * 4 * sums + 1);
    int32_t *status = malloc(sizeof *status * count);
    int64_t *offsets = malloc(sizeof *offsets * count);
    CHECK(words && found && status && offsets);
    for (size_t i = 0; i < count; i++) {
        memcpy(bytes, expected + i * prefix, prefix);
        for (size_t k = prefix; k < length - 4; k++) bytes[k] = (unsigned char)noise(&seed);
        const uint32_t crc = slow_crc(0, bytes, length - 4);
        for (size_t k = 0; k < 4; k++) bytes[length - 4 + k] = (unsigned char)(crc >> 8 * k);
        if (sums) memcpy(words + i * 4 * sums, bytes + prefix, 4 * sums);
        if (i % 5 == 1) bytes[noise(&seed) % length] ^= 0x10; /* wherever it is, it must not pass */
        offsets[i] = (int64_t)(i * apart + i % 3);
        CHECK(pwrite(fd, bytes, length, (off_t)offsets[i]) == (ssize_t)length);
        if (i + 1 == count && i % 5 == 2) CHECK(!ftruncate(fd, (off_t)(offsets[i] + (int64_t)length - 1))); /* cut short */
        if (i % 5 == 3) offsets[i] = (int64_t)(count * apart + i); /* behind the end */
        if (i % 5 == 4) offsets[i] = -1 - (int64_t)i;
    }
    kvs_read_headers(fd, count, offsets, (const char *)expected, prefix, sums, found, status);
    for (size_t i = 0; i < count; i++) {
        const bool cut = i % 5 == 2 && i + 1 == count;
        CHECK(status[i] == (i % 5 == 4 ? EINVAL : i % 5 == 1 || i % 5 == 3 || cut ? EBADMSG : 0));
        CHECK(status[i] || !sums || !memcmp(found + i * sums, words + i * 4 * sums, 4 * sums));
    }
    kvs_read_headers(-1, count, offsets, (const char *)expected, prefix, sums, found, status);
    for (size_t i = 0; i < count; i++) CHECK(status[i] == (offsets[i] < 0 ? EINVAL : EBADF));
    free(expected), free(bytes), free(words), free(found), free(status), free(offsets);
    fclose(file);
}

static void *read_headers_again(void *argument) {
    for (int round = 0; round < 10; round++) read_some_headers(130, 96, 16, *(const uint64_t *)argument);
    return NULL;
}

static void test_headers(void) {
    read_some_headers(1, 96, 16, 1);
    read_some_headers(3, 1, 1, 2);
    read_some_headers(33, 96, 0, 3);
    read_some_headers(200, KVS_MAX_PREFIX, 1000, 4);
    pthread_t callers[3];
    uint64_t seeds[3] = {5, 6, 7};
    for (int i = 0; i < 3; i++) CHECK(!pthread_create(&callers[i], NULL, read_headers_again, &seeds[i]));
    for (int i = 0; i < 3; i++) pthread_join(callers[i], NULL);
    kvs_read_headers(-1, 0, NULL, NULL, 1, 0, NULL, NULL);
}

int main(int count, char **arguments) {
    test_checksums();
    test_each_checksum();
    test_copies();
    test_pool();
#ifndef __SANITIZE_THREAD__
    test_fork();
#endif
    test_map();
    test_guard();
    test_standin();
    test_restore();
    test_window((size_t)sysconf(_SC_PAGESIZE));
    test_window((size_t)3 << 20);
    test_cuda(count > 1 ? arguments[1] : NULL);
    test_headers();
    test_writes();
    test_buffers();
    puts("ok");
    return 0;
}
