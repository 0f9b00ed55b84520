/*
 * LMDB reads its trees through a map of the file. Where the disk fails under it, or the file is cut off, that is a SIGBUS in
 * the middle of LMDB, which holds locks and can't be left by a jump. So a page of memory is put in the place of the one that
 * can't be read, and LMDB goes on and comes to an error of its own, or to a record that fails its checks.
 *
 * Zeros won't do: LMDB looks at what kind a page is more than once, and ends the process where it isn't any more what it
 * was (a file is cut off at any time). What is put there is a branch and a leaf at once, and each way on from it leads to a page
 * number that no file has, which is an error for whoever follows it. The numbers below are those of LMDB 0.9.
 */
#define _GNU_SOURCE
#include "standin.h"
#include "guard.h"
#include "kvs_kernel.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_mmap
#define SYS_mmap SYS_mmap2
#endif

enum {
    PAGE_HEADER = 16,
    FLAGS_AT = 10, /* in a page's header; the bounds of its free space follow */
    BRANCH = 1,
    LEAF = 2,
    META_PAGES = 2,
    NODE = 8, /* bytes in front of a key: four numbers of 16 bits */
    KEY = 8,  /* bytes that the free list's keys are compared by, whatever their length says */

    /* Each stand-in is a map of the process, of which there are some 65,000. Where very much is lost, more is given up at once. */
    MANY = 1024,
    MANY_BYTES = 1 << 20
};

/* Written under `lock`, read by the handler: between two equal even values of `version` the rest belongs together. */
typedef struct watched {
    atomic_uint version;
    atomic_uintptr_t low, high; /* low is 0 where nothing is watched */
    _Atomic uint64_t lost;
    atomic_size_t page; /* of LMDB */
    atomic_size_t tail; /* what was put there last behind the end of a file that was cut off: offset, 0 for none */
    atomic_int reader, writer;
} watched;

static watched maps[KVS_MAX_WATCHED];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t system_page; /* set before the first map is watched */

/* The sanitizer doesn't see these pages come and go, and takes two at one address for one. */
#define UNSEEN __attribute__((no_sanitize("thread")))

UNSEEN static uint16_t *halves(char *p) { return (uint16_t *)(void *)p; }

/* The beginning of a page: whoever reads it as a branch or as a leaf finds `size / 2` ways on, all of them to one node. */
UNSEEN static void make_header(char *p, uint64_t number, size_t size) {
    const size_t node = (size < 32768 ? size : 32768) - NODE - KEY;
    for (int i = 0; i < 4; i++) halves(p)[i] = (uint16_t)(number >> 16 * i);
    halves(p)[4] = 0;
    halves(p)[FLAGS_AT / 2] = BRANCH | LEAF;
    halves(p)[6] = halves(p)[7] = (uint16_t)node; /* no free space */
    for (size_t at = PAGE_HEADER; at < node; at += 2) halves(p)[at / 2] = (uint16_t)node;
    /*
     * As a leaf's, an empty record under an empty key; as a branch's, one that leads to page 2^47. Nothing is less than its key,
     * a number of 0 for who doesn't look at lengths: LMDB ends the process where all of a branch's keys are greater than its own.
     */
    for (size_t i = 0; i < (NODE + KEY) / 2; i++) halves(p + node)[i] = 0;
    halves(p + node)[2] = 0x8000;
}

/* What stands in for the system's page at `offset` of a map. `p` holds zeros. */
UNSEEN static void fill(char *p, size_t offset, size_t page, int reader) {
    bool header = false;
    for (size_t at = 0; at < system_page; at += page < system_page ? page : system_page) {
        const size_t number = (offset + at) / page;
        if ((offset + at) % page || number < META_PAGES) continue; /* an empty meta page has no trees */
        make_header(p + at, number, page < system_page ? page : system_page);
        header = true;
    }
    const size_t number = offset / page;
    if (header || number < META_PAGES) return;
    /*
     * The middle of a page, whose header tells what it is and may be lost as well; so it's read and not touched. A branch leads
     * nowhere from here: node or list of nodes, at whatever even place. A leaf's records are empty, and so is what else it is.
     */
    uint16_t flags = BRANCH;
    if (syscall(SYS_pread64, reader, &flags, sizeof flags, (long)(number * page + FLAGS_AT)) != sizeof flags) flags = BRANCH;
    if (flags & BRANCH)
        for (size_t i = 0; i < system_page / 2; i++) halves(p)[i] = PAGE_HEADER;
}

/* Puts pages at an offset of a map in one step: other threads see the old ones or the new ones, whole. */
static bool place(uintptr_t map, size_t offset, size_t length, size_t page, int reader) {
    const long got = syscall(SYS_mmap, NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0L);
    if (got == -1) return false;
    for (size_t at = 0; at < length; at += system_page) fill((char *)got + at, offset + at, page, reader);
    if (!syscall(SYS_mprotect, got, length, PROT_READ) &&
        syscall(SYS_mremap, got, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, map + offset) != -1)
        return true;
    syscall(SYS_munmap, got, length);
    return false;
}

/*
 * A file that was cut off in the middle of one of the system's pages has zeros behind its end in it, which are no fault. As
 * nodes of a branch they lead to page 0, which is neither branch nor leaf. So that page is replaced with the first that is lost.
 */
static void place_tail(watched *w, uintptr_t low, uintptr_t high, size_t lost, size_t page, int reader) {
    struct stat file;
    if (fstat(reader, &file) || (uintmax_t)file.st_size > lost) return; /* a bad sector */
    const size_t size = (size_t)file.st_size, tail = size / system_page * system_page;
    if (tail == size || tail / page < META_PAGES || tail >= high - low || atomic_load(&w->tail) == tail) return;
    if (place(low, tail, system_page, page, reader)) atomic_store(&w->tail, tail); /* twice does no harm */
}

bool kvs_stand_in(uintptr_t address) {
    for (int i = 0; i < KVS_MAX_WATCHED; i++) {
        watched *w = &maps[i];
        unsigned version;
        uintptr_t low, high;
        size_t page;
        int reader, writer;
        do {
            version = atomic_load(&w->version);
            low = atomic_load(&w->low), high = atomic_load(&w->high), page = atomic_load(&w->page);
            reader = atomic_load(&w->reader), writer = atomic_load(&w->writer);
        } while (version % 2 || version != atomic_load(&w->version));
        if (!low || address < low || address >= high) continue;
        const int saved = errno;
        /* Counted, and LMDB's descriptor made one that only reads, before anybody can see the page: no commit has it in it. */
        const uint64_t lost = atomic_fetch_add(&w->lost, 1);
        if (writer >= 0) syscall(SYS_dup3, reader, writer, O_CLOEXEC);
        const size_t unit = lost < MANY ? system_page : MANY_BYTES, offset = (address - low) / unit * unit;
        const size_t left = high - low - offset;
        place_tail(w, low, high, address - low, page, reader);
        const bool placed = place(low, offset, left < unit ? left : unit, page, reader);
        errno = saved;
        return placed;
    }
    return false;
}

static void set(watched *w, uintptr_t low, uintptr_t high, size_t page, int reader, int writer) {
    atomic_fetch_add(&w->version, 1);
    atomic_store(&w->low, low), atomic_store(&w->high, high), atomic_store(&w->page, page);
    atomic_store(&w->reader, reader), atomic_store(&w->writer, writer);
    atomic_fetch_add(&w->version, 1);
}

int kvs_watch(uint64_t address, size_t length, size_t page, int reader, int writer) {
    pthread_mutex_lock(&lock);
    system_page = (size_t)sysconf(_SC_PAGESIZE);
    int i = 0;
    while (i < KVS_MAX_WATCHED && atomic_load(&maps[i].low)) i++;
    if (i < KVS_MAX_WATCHED) {
        kvs_guard_hold();
        atomic_store(&maps[i].lost, 0);
        atomic_store(&maps[i].tail, 0);
        set(&maps[i], (uintptr_t)address, (uintptr_t)address + length, page, reader, writer);
    }
    pthread_mutex_unlock(&lock);
    return i < KVS_MAX_WATCHED ? i : -1;
}

uint64_t kvs_watch_lost(int watch) { return atomic_load(&maps[watch].lost); }

void kvs_watch_end(int watch) {
    pthread_mutex_lock(&lock);
    set(&maps[watch], 0, 0, 0, -1, -1);
    kvs_guard_release();
    pthread_mutex_unlock(&lock);
}

void kvs_stand_in_after_fork(void) {
    pthread_mutex_init(&lock, NULL);
    for (int i = 0; i < KVS_MAX_WATCHED; i++) {
        set(&maps[i], 0, 0, 0, -1, -1);
        atomic_store(&maps[i].version, 0); /* the parent may have been in the middle of it on another thread */
    }
}
