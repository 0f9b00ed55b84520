/* Chooses the way to compute CRC32C that suits the processor. */
#include "crc32c.h"
#include "kvs_kernel.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

/* Fastest first, but for those that say that they lose; the portable one is the last and always available. */
static const kvs_crc_path *const known[] = {
#if defined(__x86_64__)
    &kvs_crc_avx512,
    &kvs_crc_pclmul,
    &kvs_crc_sse42,
#elif defined(__aarch64__)
    &kvs_crc_arm64,
#endif
    &kvs_crc_portable,
};
enum { KNOWN = sizeof known / sizeof known[0] };

static const kvs_crc_path *usable[KNOWN + 1]; /* ends with NULL */
static _Atomic(const kvs_crc_path *) active;
static pthread_once_t detected = PTHREAD_ONCE_INIT;

static const kvs_crc_path *best(void) {
    size_t i = 0;
    while (usable[i]->loses && usable[i]->loses()) i++;
    return usable[i];
}

static void detect(void) {
    size_t n = 0;
    for (size_t i = 0; i < KNOWN; i++)
        if (known[i]->available()) usable[n++] = known[i];
    atomic_store_explicit(&active, best(), memory_order_release);
}

const kvs_crc_path *kvs_crc_active(void) {
    const kvs_crc_path *path = atomic_load_explicit(&active, memory_order_acquire);
    if (__builtin_expect(path == NULL, 0)) {
        pthread_once(&detected, detect);
        path = atomic_load_explicit(&active, memory_order_acquire);
    }
    return path;
}

static const kvs_crc_path *find(const char *name) {
    pthread_once(&detected, detect);
    for (size_t i = 0; usable[i]; i++)
        if (!strcmp(usable[i]->name, name)) return usable[i];
    return NULL;
}

uint32_t kvs_crc32c(uint32_t seed, const char *data, size_t length) {
    return ~kvs_crc_active()->update(~seed, data, length);
}

int kvs_crc32c_with(const char *name, uint32_t seed, const char *data, size_t length, uint32_t *sum) {
    const kvs_crc_path *path = find(name);
    if (!path) return EINVAL;
    *sum = ~path->update(~seed, data, length);
    return 0;
}

const char *kvs_crc32c_path(size_t i) {
    pthread_once(&detected, detect);
    return i < KNOWN && usable[i] ? usable[i]->name : NULL;
}

int kvs_crc32c_force(const char *name) {
    pthread_once(&detected, detect);
    const kvs_crc_path *path = name ? find(name) : best();
    if (!path) return EINVAL;
    atomic_store_explicit(&active, path, memory_order_release);
    return 0;
}
