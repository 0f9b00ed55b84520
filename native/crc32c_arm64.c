/*
 * CRC32C on 64-bit Arm, with its CRC instructions: three lanes side by side,
 * because an instruction answers later than the next one can start. The lanes
 * are long because they are joined by plain arithmetic.
 */
#if defined(__aarch64__)

#include "crc32c.h"

#include <arm_acle.h>
#include <pthread.h>
#include <string.h>
#include <sys/auxv.h>

#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif

#if defined(__clang__)
#define CRC __attribute__((target("crc")))
#else
#define CRC __attribute__((target("+crc")))
#endif

enum { LANE = 4096, PIECE = 3 * LANE };

static bool available(void) { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }

static inline uint64_t load64(const unsigned char *p) {
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

CRC static uint32_t update(uint32_t state, const void *data, size_t length) {
    const unsigned char *p = data;
    for (; length >= 3 * LANE; length -= 3 * LANE, p += 3 * LANE) {
        uint32_t b = 0, c = 0;
        for (size_t i = 0; i < LANE; i += 8) {
            state = __crc32cd(state, load64(p + i));
            b = __crc32cd(b, load64(p + LANE + i));
            c = __crc32cd(c, load64(p + 2 * LANE + i));
        }
        state = kvs_crc_combine(kvs_crc_combine(state, b, LANE), c, LANE);
    }
    for (; length >= 8; length -= 8, p += 8) state = __crc32cd(state, load64(p));
    for (; length; length--) state = __crc32cb(state, *p++);
    return state;
}

static uint32_t copy(uint32_t state, void *to, const void *from, size_t length, bool stream) {
    (void)stream;
    unsigned char *d = to;
    const unsigned char *s = from;
    while (length) {
        size_t n = length < PIECE ? length : PIECE;
        state = update(state, s, n);
        memcpy(d, s, n);
        d += n, s += n, length -= n;
    }
    return state;
}

const kvs_crc_path kvs_crc_arm64 = {"arm64", available, NULL, update, copy};

#else
typedef int kvs_no_arm64;
#endif
