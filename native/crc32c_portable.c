/*
 * CRC32C without special instructions, eight bytes a step ("slicing by 8"),
 * and the arithmetic on checksums that all paths share. The other paths are
 * tested against this one.
 */
#include "crc32c.h"

#include <pthread.h>
#include <string.h>

#define POLYNOMIAL 0x82F63B78u /* Castagnoli, reflected */

static uint32_t table[8][256];
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void fill_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++) c = (c >> 1) ^ (POLYNOMIAL & (0u - (c & 1)));
        table[0][i] = c;
    }
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++) table[k][i] = (table[k - 1][i] >> 8) ^ table[0][table[k - 1][i] & 255];
}

static uint32_t load32(const unsigned char *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint32_t update(uint32_t state, const void *data, size_t length) {
    pthread_once(&table_once, fill_table);
    const unsigned char *p = data;
    for (; length >= 8; length -= 8, p += 8) {
        uint32_t lo = load32(p) ^ state, hi = load32(p + 4);
        state = table[7][lo & 255] ^ table[6][lo >> 8 & 255] ^ table[5][lo >> 16 & 255] ^ table[4][lo >> 24] ^
                table[3][hi & 255] ^ table[2][hi >> 8 & 255] ^ table[1][hi >> 16 & 255] ^ table[0][hi >> 24];
    }
    for (; length; length--) state = (state >> 8) ^ table[0][(state ^ *p++) & 255];
    return state;
}

static uint32_t copy(uint32_t state, void *to, const void *from, size_t length, bool stream) {
    (void)stream;
    if (length) memcpy(to, from, length);
    return update(state, from, length);
}

static bool available(void) { return true; }

const kvs_crc_path kvs_crc_portable = {"portable", available, NULL, update, copy};

/* a * b modulo the polynomial; bit 31 of a reflected value is x^0. */
static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (int bit = 31; bit >= 0; bit--) {
        product ^= b & (0u - (a >> bit & 1));
        b = (b >> 1) ^ (POLYNOMIAL & (0u - (b & 1)));
    }
    return product;
}

uint32_t kvs_crc_xpow(uint64_t n) {
    uint32_t result = 0x80000000u, square = 0x40000000u; /* x^0, x^1 */
    for (; n; n >>= 1) {
        if (n & 1) result = multiply(result, square);
        square = multiply(square, square);
    }
    return result;
}

uint32_t kvs_crc_combine(uint32_t a, uint32_t b, uint64_t length) {
    return multiply(a, kvs_crc_xpow(8 * length)) ^ b;
}

#if !defined(__x86_64__)
void kvs_stream_runs(unsigned char *to, int64_t stride, const unsigned char *from, size_t count, size_t run) {
    for (; count; count--, to += stride, from += run) memcpy(to, from, run);
}
#endif
