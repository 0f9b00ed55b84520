/* Shared by the files of the kernel's own test. */
#ifndef KVS_TEST_KERNEL_H
#define KVS_TEST_KERNEL_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

static inline uint64_t noise(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* A buffer of its own for each use, so that one byte too far is seen. */
static inline unsigned char *noisy(size_t length, uint64_t seed) {
    unsigned char *p = malloc(length ? length : 1);
    CHECK(p);
    for (size_t i = 0; i < length; i++) p[i] = (unsigned char)noise(&seed);
    return p;
}

/* test_restore.c */
void test_restore(void);
void test_guard(void);

/* test_standin.c */
void test_standin(void);

/* test_writes.c */
void test_buffers(void);
void test_writes(void);

#endif
