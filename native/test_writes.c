/* The memory that is read into, and what is written behind the caller's back. */
#define _GNU_SOURCE
#include "buffers.h"
#include "kvs_kernel.h"
#include "test_kernel.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BUFFERS = 24 }; /* more than are kept */

static void *take_and_give(void *seed) {
    unsigned char *mine[BUFFERS];
    for (int round = 0; round < 50; round++) {
        const int some = 1 + (int)((*(uint64_t *)seed + (uint64_t)round * 7) % BUFFERS);
        for (int i = 0; i < some; i++) {
            mine[i] = kvs_buffer_take();
            CHECK(mine[i]);
            memcpy(mine[i], &mine[i], sizeof mine[i]);
            memcpy(mine[i] + KVS_BUFFER - sizeof seed, &seed, sizeof seed);
        }
        for (int i = 0; i < some; i++) { /* nobody else has had one of them */
            CHECK(!memcmp(mine[i], &mine[i], sizeof mine[i]));
            CHECK(!memcmp(mine[i] + KVS_BUFFER - sizeof seed, &seed, sizeof seed));
            kvs_buffer_give(mine[i]);
        }
    }
    return NULL;
}

/* A buffer that was given back is the next one that is taken; each has one owner; a forked child has none of its parent's. */
void test_buffers(void) {
    unsigned char *first = kvs_buffer_take();
    CHECK(first && (uintptr_t)first % KVS_BUFFER == 0);
    memset(first, 7, KVS_BUFFER);
    kvs_buffer_give(first);
    CHECK(kvs_buffer_take() == first && first[KVS_BUFFER - 1] == 7);
    kvs_buffer_give(first);
    pthread_t threads[4];
    uint64_t seeds[4] = {1, 2, 3, 4};
    for (int i = 0; i < 4; i++) CHECK(!pthread_create(&threads[i], NULL, take_and_give, &seeds[i]));
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
#ifndef __SANITIZE_THREAD__
    const pid_t child = fork();
    if (!child) {
        unsigned char *own = kvs_buffer_take();
        for (size_t i = 0; i < KVS_BUFFER; i++)
            if (own[i]) _exit(1); /* what its parent has read */
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
}

/* Runs of every length around a step, each in memory of its own that goes as soon as it may, over one another and side by side. */
void test_writes(void) {
    static const size_t lengths[] = {1, 16, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 5};
    enum { RUNS = sizeof lengths / sizeof lengths[0] };
    FILE *file = tmpfile();
    CHECK(file);
    for (int ends = 0; ends < 2; ends++) {
        kvs_writes *w = kvs_writes_start(fileno(file));
        unsigned char *data[RUNS], *expected = calloc(8 << 20, 1), *found = calloc(8 << 20, 1);
        CHECK(w && expected && found);
        size_t at = 0;
        for (size_t i = 0; i < RUNS; i++) {
            const size_t head = lengths[i] < 16 ? lengths[i] : 16;
            data[i] = noisy(lengths[i], i + (size_t)ends);
            CHECK(!kvs_writes_add(w, "0123456789abcdef", head, (uintptr_t)data[i], lengths[i], (int64_t)at));
            memcpy(expected + at, data[i], lengths[i]);
            memcpy(expected + at, "0123456789abcdef", head);
            at += lengths[i] - lengths[i] / 8; /* the next one begins in it */
            if (i + 2 == RUNS) at = (3 << 20) - 7; /* and the last one so that a step ends in its head */
        }
        if (!ends) CHECK(!kvs_writes_wait(w));
        kvs_writes_end(w);
        CHECK(pread(fileno(file), found, 8 << 20, 0) > (ssize_t)at);
        CHECK(!memcmp(found, expected, 8 << 20));
        for (size_t i = 0; i < RUNS; i++) free(data[i]);
        free(expected), free(found);
    }
    fclose(file);
    kvs_writes *w = kvs_writes_start(-1);
    CHECK(w && !kvs_writes_wait(w));
    CHECK(!kvs_writes_add(w, "", 0, (uintptr_t) "abc", 3, 0) && kvs_writes_wait(w) == EBADF);
    kvs_writes_end(w);
    file = tmpfile();
    CHECK(file && (w = kvs_writes_start(fileno(file))));
    for (int64_t offset = 2; offset > -3; offset -= 2) /* the third is no place in a file, and the fourth comes behind it */
        CHECK(!kvs_writes_add(w, "", 0, (uintptr_t) "abc", 3, offset));
    CHECK(!kvs_writes_add(w, "", 0, (uintptr_t) "abc", 3, 5));
    CHECK(kvs_writes_wait(w) == EINVAL && kvs_writes_wait(w) == EINVAL);
    kvs_writes_end(w);
    CHECK(lseek(fileno(file), 0, SEEK_END) == 5);
    fclose(file);
}
