/*
 * CRC32C on x86-64.
 *
 * sse42: the CRC instruction takes one word a cycle but answers three cycles
 * later, so three lanes run side by side and are joined by a carry-less
 * multiplication. Lanes that lie apart defeat the processor's own prefetcher,
 * so the piece after is asked for while one is being summed. A copy moves a
 * short piece and sums it while it is in the first-level cache.
 *
 * avx512: folds 256 bytes a step by carry-less multiplication of whole vector
 * registers. It reads the bytes with the same loads that the copy needs, so
 * that copying and checksumming cost one pass. Folding in 256-bit registers
 * was tried for processors without AVX-512 and not kept: two threads copied
 * 29 GB/s out of the page cache and summed 37, the lanes 28 and 42.
 *
 * Reflected arithmetic: a register holds its highest power in bit 0. The
 * product of two reflected operands comes out one place too low, hence the
 * odd exponents below.
 */
#if defined(__x86_64__)

#include "crc32c.h"

#include <immintrin.h>
#include <pthread.h>
#include <string.h>

#define SSE42 __attribute__((target("sse4.2,pclmul")))
#define AVX512 __attribute__((target("sse4.2,pclmul,avx512f,avx512bw,avx512vl,vpclmulqdq")))

enum {
    LONG_LANE = 2048,
    SHORT_LANE = 256,
    AHEAD = 1024, /* asked for early when copying, within the run: the processor's own prefetcher stops at every page */
};

static uint64_t long_one, long_two, short_one, short_two; /* x^(8 n - 33) for one and two lanes */
static uint64_t fold[2][2];                               /* by 64, 256 bytes: x^(D + 63), x^(D - 1) */
static pthread_once_t constants_once = PTHREAD_ONCE_INIT;

static void fill_constants(void) {
    long_one = kvs_crc_xpow(8 * LONG_LANE - 33);
    long_two = kvs_crc_xpow(16 * LONG_LANE - 33);
    short_one = kvs_crc_xpow(8 * SHORT_LANE - 33);
    short_two = kvs_crc_xpow(16 * SHORT_LANE - 33);
    for (int i = 0; i < 2; i++) {
        uint64_t bits = 512ull << (2 * i);
        fold[i][0] = (uint64_t)kvs_crc_xpow(bits + 63) << 32;
        fold[i][1] = (uint64_t)kvs_crc_xpow(bits - 1) << 32;
    }
}

static bool sse42_available(void) {
    if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul")) return false;
    pthread_once(&constants_once, fill_constants);
    return true;
}

static inline uint64_t load64(const unsigned char *p) {
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

/* Three lanes of whole lines. `ahead`: ask for the three lanes after these. */
SSE42 static inline __attribute__((always_inline)) uint32_t three_lanes(uint32_t state, const unsigned char *p,
                                                                        size_t lane, uint64_t one, uint64_t two,
                                                                        bool ahead) {
    uint64_t a = state, b = 0, c = 0;
    for (size_t i = 0; i < lane; i += 64) {
        if (ahead)
            for (size_t line = 0; line < 192; line += 64)
                _mm_prefetch((const char *)(p + 3 * lane + 3 * i + line), _MM_HINT_T0);
        for (size_t word = i; word < i + 64; word += 8) {
            a = _mm_crc32_u64(a, load64(p + word));
            b = _mm_crc32_u64(b, load64(p + lane + word));
            c = _mm_crc32_u64(c, load64(p + 2 * lane + word));
        }
    }
    __m128i far = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)a), _mm_cvtsi64_si128((long long)two), 0);
    __m128i near = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)b), _mm_cvtsi64_si128((long long)one), 0);
    uint64_t joined = (uint64_t)_mm_cvtsi128_si64(_mm_xor_si128(far, near));
    return (uint32_t)(_mm_crc32_u64(0, joined) ^ c);
}

SSE42 static inline uint32_t one_lane(uint32_t state, const unsigned char *p, size_t length) {
    uint64_t a = state;
    for (; length >= 8; length -= 8, p += 8) a = _mm_crc32_u64(a, load64(p));
    for (; length; length--) a = _mm_crc32_u8((uint32_t)a, *p++);
    return (uint32_t)a;
}

SSE42 static uint32_t sse42_update(uint32_t state, const void *data, size_t length) {
    const unsigned char *p = data;
    for (; length >= 3 * LONG_LANE; length -= 3 * LONG_LANE, p += 3 * LONG_LANE)
        state = three_lanes(state, p, LONG_LANE, long_one, long_two, true);
    for (; length >= 3 * SHORT_LANE; length -= 3 * SHORT_LANE, p += 3 * SHORT_LANE)
        state = three_lanes(state, p, SHORT_LANE, short_one, short_two, false);
    return one_lane(state, p, length);
}

/*
 * The four stores of a line one right after the other. With a load between them that has to wait, processors of AMD's
 * family 17h write the line in parts: measured to copy at less than half the speed.
 */
static inline __attribute__((always_inline)) void stream_line(unsigned char *to, const unsigned char *from) {
    __m128i part[4];
    for (int i = 0; i < 4; i++) part[i] = _mm_loadu_si128((const __m128i *)(const void *)(from + 16 * i));
    for (int i = 0; i < 4; i++) _mm_stream_si128((__m128i *)(void *)(to + 16 * i), part[i]);
}

/* Copies three short lanes, in order, and sums them where they are now: in the cache. `to` is line-aligned for `stream`. */
SSE42 static inline __attribute__((always_inline)) uint32_t copy_pieces(uint32_t state, unsigned char *to,
                                                                        const unsigned char *from, size_t length,
                                                                        bool stream) {
    for (; length; length -= 3 * SHORT_LANE, from += 3 * SHORT_LANE, to += 3 * SHORT_LANE) {
        for (size_t i = 0; i < 3 * SHORT_LANE; i += 64) {
            if (length > AHEAD) _mm_prefetch((const char *)(from + i + AHEAD), _MM_HINT_T0);
            if (stream)
                stream_line(to + i, from + i);
            else
                memcpy(to + i, from + i, 64);
        }
        state = three_lanes(state, from, SHORT_LANE, short_one, short_two, false);
    }
    return state;
}

SSE42 static uint32_t sse42_copy(uint32_t state, void *to, const void *from, size_t length, bool stream) {
    unsigned char *d = to;
    const unsigned char *s = from;
    size_t head = (size_t)(-(uintptr_t)d & 63);
    if (length < head + 3 * SHORT_LANE) head = length;
    if (head) {
        memcpy(d, s, head);
        state = one_lane(state, s, head);
        d += head, s += head, length -= head;
    }
    const size_t whole = length - length % (3 * SHORT_LANE);
    state = stream ? copy_pieces(state, d, s, whole, true) : copy_pieces(state, d, s, whole, false);
    if (length > whole) {
        memcpy(d + whole, s + whole, length - whole);
        state = one_lane(state, s + whole, length - whole);
    }
    return state;
}

const kvs_crc_path kvs_crc_sse42 = {"sse42", sse42_available, NULL, sse42_update, sse42_copy};

static bool avx512_available(void) {
    return sse42_available() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("vpclmulqdq");
}

AVX512 static inline __m512i folded(__m512i x, __m512i k, __m512i next) {
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, k, 0x00), _mm512_clmulepi64_epi128(x, k, 0x11), next,
                                     0x96);
}

AVX512 static inline __m512i constant(int i) {
    return _mm512_broadcast_i32x4(_mm_set_epi64x((long long)fold[i][1], (long long)fold[i][0]));
}

enum { NO_COPY, PLAIN, STREAM };

/* Of `length` bytes the whole 256-byte steps, at least two; `to` is line-aligned for STREAM. */
AVX512 static inline __attribute__((always_inline)) uint32_t fold_steps(uint32_t state, unsigned char *to,
                                                                        const unsigned char *from, size_t length,
                                                                        int mode) {
    __m512i acc[4];
    const __m512i far = constant(1), line = constant(0);
#define STORE(i, v)                                                                      \
    do {                                                                                 \
        if (mode == PLAIN) _mm512_storeu_si512((void *)(to + 64 * (i)), v);              \
        if (mode == STREAM) _mm512_stream_si512((void *)(to + 64 * (i)), v);             \
    } while (0)
    for (int i = 0; i < 4; i++) {
        acc[i] = _mm512_loadu_si512((const void *)(from + 64 * i));
        STORE(i, acc[i]);
    }
    acc[0] = _mm512_xor_si512(acc[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
    for (length -= 256, from += 256, to += mode ? 256 : 0; length >= 256; length -= 256, from += 256) {
        for (int i = 0; i < 4; i++) {
            if (mode != NO_COPY && length > AHEAD) _mm_prefetch((const char *)(from + AHEAD + 64 * i), _MM_HINT_T0);
            __m512i next = _mm512_loadu_si512((const void *)(from + 64 * i));
            STORE(i, next);
            acc[i] = folded(acc[i], far, next);
        }
        if (mode) to += 256;
    }
#undef STORE
    __m512i x = folded(acc[0], line, acc[1]);
    x = folded(x, line, acc[2]);
    x = folded(x, line, acc[3]);
    unsigned char rest[64];
    _mm512_storeu_si512((void *)rest, x);
    return one_lane(0, rest, 64);
}

AVX512 static uint32_t avx512_update(uint32_t state, const void *data, size_t length) {
    if (length < 1024) return sse42_update(state, data, length);
    size_t whole = length & ~(size_t)255;
    state = fold_steps(state, NULL, data, whole, NO_COPY);
    return one_lane(state, (const unsigned char *)data + whole, length - whole);
}

AVX512 static uint32_t avx512_copy(uint32_t state, void *to, const void *from, size_t length, bool stream) {
    if (length < 1024) return sse42_copy(state, to, from, length, false);
    unsigned char *d = to;
    const unsigned char *s = from;
    size_t head = (size_t)(-(uintptr_t)d & 63);
    if (head) {
        memcpy(d, s, head);
        state = one_lane(state, s, head);
        d += head, s += head, length -= head;
    }
    size_t whole = length & ~(size_t)255;
    state = stream ? fold_steps(state, d, s, whole, STREAM) : fold_steps(state, d, s, whole, PLAIN);
    if (length > whole) {
        memcpy(d + whole, s + whole, length - whole);
        state = one_lane(state, s + whole, length - whole);
    }
    return state;
}

const kvs_crc_path kvs_crc_avx512 = {"avx512", avx512_available, NULL, avx512_update, avx512_copy};

void kvs_stream_runs(unsigned char *to, int64_t stride, const unsigned char *from, size_t count, size_t run) {
    for (; count; count--, to += stride, from += run) {
        const size_t head = (size_t)(-(uintptr_t)to & 63), end = run - (run - head) % 64;
        memcpy(to, from, head);
        for (size_t i = head; i < end; i += 64)
            stream_line(to + i, from + i);
        memcpy(to + end, from + end, run - end);
    }
}

#else
typedef int kvs_no_x86;
#endif
