/*
 * Buffers for reads. Fresh memory is dear: the system zeroes a huge page first, and where it gives free ones back to the host of a
 * virtual machine it has to get that page from there, which took 1.3 ms where it was measured, as long as reading 4 MB. So the
 * process keeps as many as one restore reads into.
 */
#define _GNU_SOURCE
#include "buffers.h"

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

enum { KEPT = 16 }; /* buffers: those of a restore with up to eight threads */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned char *kept[KEPT]; /* those that nobody uses */
static int count;
static pthread_once_t handlers_once = PTHREAD_ONCE_INIT;

static void before_fork(void) { pthread_mutex_lock(&lock); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }

/* The buffers are the parent's alone: a page that both have is copied when one of them writes to it, in the middle of a read. */
static void after_fork_in_child(void) {
    pthread_mutex_init(&lock, NULL);
    count = 0;
}

static void install_handlers(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

/*
 * A huge page, if there is one: a device takes only so many separate pages in one request (254 where this was measured), so
 * that a read of 1 MiB into ordinary pages became two, at about half the speed.
 */
static unsigned char *fresh(void) {
    unsigned char *start =
        mmap(NULL, 2 * KVS_BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return NULL;
    const size_t before = -(uintptr_t)start % KVS_BUFFER;
    if (before) munmap(start, before);
    munmap(start + before + KVS_BUFFER, KVS_BUFFER - before);
    madvise(start + before, KVS_BUFFER, MADV_HUGEPAGE);
    madvise(start + before, KVS_BUFFER, MADV_DONTFORK);
    return start + before;
}

unsigned char *kvs_buffer_take(void) {
    pthread_once(&handlers_once, install_handlers);
    pthread_mutex_lock(&lock);
    unsigned char *buffer = count ? kept[--count] : NULL;
    pthread_mutex_unlock(&lock);
    return buffer ? buffer : fresh();
}

void kvs_buffer_give(unsigned char *buffer) {
    pthread_mutex_lock(&lock);
    const int keep = count < KEPT;
    if (keep) kept[count++] = buffer;
    pthread_mutex_unlock(&lock);
    if (!keep) munmap(buffer, KVS_BUFFER);
}
