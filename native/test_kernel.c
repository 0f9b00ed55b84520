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

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

static uint64_t noise(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* A buffer of its own for each use, so that one byte too far is seen. */
static unsigned char *noisy(size_t length, uint64_t seed) {
    unsigned char *p = malloc(length ? length : 1);
    CHECK(p);
    for (size_t i = 0; i < length; i++) p[i] = (unsigned char)noise(&seed);
    return p;
}

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
    uint64_t *payloads = malloc(sizeof *payloads * blocks), offsets[STREAMS];
    int64_t *first = malloc(sizeof *first * blocks), *count = malloc(sizeof *count * blocks);
    uint32_t *row = calloc(blocks, sizeof *row);
    uint32_t *sums = malloc(sizeof *sums * STREAMS * blocks), *again = malloc(sizeof *again * STREAMS * blocks);
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

int main(void) {
    test_checksums();
    test_copies();
    test_pool();
#ifndef __SANITIZE_THREAD__
    test_fork();
#endif
    test_map();
    puts("ok");
    return 0;
}
