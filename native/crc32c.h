/*
 * Private to the kernel: one record for each way to compute CRC32C.
 *
 * "State" is the register of the CRC, which is the complement of the checksum
 * that callers see. All functions are pure and thread-safe.
 */
#ifndef KVS_CRC32C_H
#define KVS_CRC32C_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct kvs_crc_path {
    const char *name;
    /* May this processor run it? Called once. */
    bool (*available)(void);
    /* Is the next one in the list faster here? NULL: never. */
    bool (*loses)(void);
    /* The state after `length` bytes more. */
    uint32_t (*update)(uint32_t state, const void *data, size_t length);
    /*
     * Copies and returns the state after the bytes copied. `stream`: the
     * destination is too large to be worth a place in the caches; whoever
     * passes it calls kvs_store_fence() before he publishes the bytes.
     */
    uint32_t (*copy)(uint32_t state, void *to, const void *from, size_t length, bool stream);
} kvs_crc_path;

extern const kvs_crc_path kvs_crc_portable;
#if defined(__x86_64__)
extern const kvs_crc_path kvs_crc_sse42;
extern const kvs_crc_path kvs_crc_avx512;
extern const kvs_crc_path kvs_crc_pclmul;
#elif defined(__aarch64__)
extern const kvs_crc_path kvs_crc_arm64;
#endif

/* The path in force. */
const kvs_crc_path *kvs_crc_active(void);

/* x^n modulo the polynomial of CRC32C, bits reflected as in a state. */
uint32_t kvs_crc_xpow(uint64_t n);

/*
 * The state over A || B, of the state over A and the one over B that was
 * begun at 0, where B is `length` bytes.
 */
uint32_t kvs_crc_combine(uint32_t a, uint32_t b, uint64_t length);

/*
 * Copies `count` runs of `run` bytes, at least 128, that follow each other to
 * places `stride` apart, past the caches as far as they are whole lines. As
 * with `stream` above, a fence is owed.
 */
void kvs_stream_runs(unsigned char *to, int64_t stride, const unsigned char *from, size_t count, size_t run);

/* Orders streaming stores before what this thread publishes next. */
static inline void kvs_store_fence(void) {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#endif
}

#endif
