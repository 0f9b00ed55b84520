/* Pages that stand in for those of a map that can't be read. */
#define _GNU_SOURCE
#include "guard.h"
#include "kvs_kernel.h"
#include "test_kernel.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 32768, PAGES = 8, BYTES = PAGE * PAGES, HEADER = 16, BRANCH = 1, LEAF = 2, NODE_AT = 4096 - 16 };

typedef struct opened {
    char path[64];
    int fd, reader;
    uint64_t map;
} opened;

/* A file of pages that are branches where `branch` says so and leaves elsewhere, mapped. */
static opened make(unsigned branch) {
    opened f = {.path = "/tmp/kvs_test_XXXXXX"};
    static unsigned char page[PAGE];
    CHECK((f.fd = mkstemp(f.path)) >= 0 && (f.reader = open(f.path, O_RDONLY | O_CLOEXEC)) >= 0);
    for (int i = 0; i < PAGES; i++) {
        memset(page, 0x77, PAGE);
        page[10] = branch >> i & 1 ? BRANCH : LEAF;
        page[11] = 0;
        CHECK(pwrite(f.fd, page, PAGE, (off_t)i * PAGE) == PAGE);
    }
    CHECK(!kvs_map_open(f.fd, BYTES, &f.map));
    return f;
}

static void end(opened *f) {
    CHECK(!kvs_map_close(f->map, BYTES));
    close(f->fd), close(f->reader);
    unlink(f->path);
}

static const volatile uint16_t *at(const opened *f, size_t offset) {
    return (const volatile uint16_t *)(uintptr_t)(f->map + offset);
}

static void check_header(const opened *f, size_t page) {
    const volatile uint16_t *p = at(f, page * PAGE);
    CHECK(p[0] == page && !p[1] && !p[2] && !p[3]);
    CHECK(p[5] == (BRANCH | LEAF) && p[6] == NODE_AT && p[7] == NODE_AT);
    for (int i = HEADER / 2; i < NODE_AT / 2; i++) CHECK(p[i] == NODE_AT);
    for (int i = 0; i < 8; i++) CHECK(p[NODE_AT / 2 + i] == (i == 2 ? 0x8000 : 0)); /* and a key of 0 behind it */
}

static void check_all(const opened *f, size_t from, size_t to, uint16_t value) {
    for (size_t i = from; i < to; i += 2) CHECK(*at(f, i) == value);
}

/* What comes in the place of meta pages, headers, and the middle of branches and leaves, whose header is there or not. */
static void test_contents(void) {
    opened f = make(1u << 3 | 1u << 5);
    CHECK(fcntl(f.fd, F_SETFL, 0) == 0);
    const int watch = kvs_watch(f.map, BYTES, PAGE, f.reader, f.fd);
    CHECK(watch >= 0 && kvs_watch_lost(watch) == 0);
    check_all(&f, 12, PAGE, 0x7777);
    CHECK(pwrite(f.fd, "w", 1, PAGE - 1) == 1);
    CHECK(!ftruncate(f.fd, 3 * PAGE + 4096)); /* a branch's header stays */
    check_all(&f, 2 * PAGE + 12, 3 * PAGE, 0x7777);
    CHECK(kvs_watch_lost(watch) == 0);
    check_all(&f, 3 * PAGE + 4096, 3 * PAGE + 8192, 16);
    CHECK(kvs_watch_lost(watch) == 1);
    check_all(&f, 3 * PAGE + 12, 3 * PAGE + 4096, 0x7777);
    check_header(&f, 4);
    CHECK(kvs_watch_lost(watch) == 2);
    check_all(&f, 4 * PAGE + 8192, 4 * PAGE + 12288, 16); /* of a page that is a branch as well by now */
    check_all(&f, 5 * PAGE + 12288, 6 * PAGE, 16);
    check_header(&f, 5);
    CHECK(kvs_watch_lost(watch) == 2 + 1 + 1 + 5);
    errno = 0;
    CHECK(pwrite(f.fd, "w", 1, 0) == -1 && errno == EBADF); /* reads only now */
    CHECK(fcntl(f.fd, F_GETFD) == FD_CLOEXEC);
    int again = open(f.path, O_RDWR);
    CHECK(again >= 0 && !ftruncate(again, 2 * PAGE + 4096)); /* a leaf's header stays */
    check_all(&f, 2 * PAGE + 4096, 2 * PAGE + 8192, 0);
    CHECK(!ftruncate(again, 0));
    check_all(&f, 0, 2 * PAGE, 0);
    close(again);
    kvs_watch_end(watch);
    end(&f);
}

/* The page in which a file was cut off has zeros behind the end: with the first fault behind it, it's replaced as well. */
static void test_tail(void) {
    opened f = make(1u << 3 | 1u << 4 | 1u << 5);
    const int watch = kvs_watch(f.map, BYTES, PAGE, f.reader, -1);
    CHECK(watch >= 0);
    CHECK(!ftruncate(f.fd, 5 * PAGE + 6)); /* in a header */
    CHECK(*at(&f, 5 * PAGE) == 0x7777 && !*at(&f, 5 * PAGE + 10) && kvs_watch_lost(watch) == 0);
    check_all(&f, 5 * PAGE + 4096, 5 * PAGE + 8192, 16);
    check_header(&f, 5);
    CHECK(!ftruncate(f.fd, 3 * PAGE + 4096 + 2)); /* in the middle of a branch */
    CHECK(*at(&f, 3 * PAGE + 4096) == 0x7777 && !*at(&f, 3 * PAGE + 4096 + 2));
    check_header(&f, 4);
    check_all(&f, 3 * PAGE + 4096, 3 * PAGE + 8192, 16);
    CHECK(!ftruncate(f.fd, 2 * PAGE + 8192 + 8)); /* in the middle of a leaf */
    check_header(&f, 3);
    check_all(&f, 2 * PAGE + 8192, 2 * PAGE + 12288, 0);
    check_all(&f, 2 * PAGE + 12, 2 * PAGE + 8192, 0x7777);
    CHECK(!ftruncate(f.fd, 100)); /* a meta page's bytes stay as they are */
    CHECK(!*at(&f, PAGE) && *at(&f, 0) == 0x7777);
    kvs_watch_end(watch);
    end(&f);
}

/* Where very many pages are lost, those around them are given up as well, up to the map's end. */
static void test_many(void) {
    const size_t length = ((size_t)40 << 20) + 3 * PAGE;
    opened f = {.path = "/tmp/kvs_test_XXXXXX"};
    CHECK((f.fd = mkstemp(f.path)) >= 0 && !kvs_map_open(f.fd, length, &f.map));
    const int watch = kvs_watch(f.map, length, PAGE, f.fd, -1);
    CHECK(watch >= 0);
    for (size_t i = 2; i < 2 + 1024; i++) check_header(&f, i);
    CHECK(kvs_watch_lost(watch) == 1024);
    for (size_t i = 1056; i < length / PAGE; i++) check_header(&f, i);
    CHECK(kvs_watch_lost(watch) == 1024 + 40 - 33 + 1);
    kvs_watch_end(watch);
    CHECK(!kvs_map_close(f.map, length));
    close(f.fd);
    unlink(f.path);
}

static void *touch_all(void *context) {
    const opened *f = context;
    for (size_t i = 0; i < BYTES; i += 512) (void)*at(f, i);
    for (size_t i = 2; i < PAGES; i++) check_header(f, i);
    return NULL;
}

/* Many threads, several maps: each page is whole whoever came first, and counted for its own map. */
static void test_threads(void) {
    opened f[3];
    int watch[3];
    pthread_t threads[3][3];
    for (int i = 0; i < 3; i++) {
        f[i] = make(0);
        CHECK((watch[i] = kvs_watch(f[i].map, BYTES, PAGE, f[i].reader, -1)) >= 0);
    }
    for (int i = 0; i < 2; i++) CHECK(!ftruncate(f[i].fd, 0));
    for (int i = 0; i < 2; i++)
        for (int t = 0; t < 3; t++) CHECK(!pthread_create(&threads[i][t], NULL, touch_all, &f[i]));
    for (int i = 0; i < 2; i++)
        for (int t = 0; t < 3; t++) pthread_join(threads[i][t], NULL);
    for (int i = 0; i < 2; i++) CHECK(kvs_watch_lost(watch[i]) >= PAGES);
    CHECK(!kvs_watch_lost(watch[2]) && pwrite(f[0].fd, "w", 1, 0) == 1);
    for (int i = 0; i < 3; i++) {
        kvs_watch_end(watch[i]);
        end(&f[i]);
    }
}

static sigjmp_buf elsewhere;

static void own_handler(int signal) {
    (void)signal;
    siglongjmp(elsewhere, 1);
}

static void expect_own(const opened *f, size_t offset) {
    if (!sigsetjmp(elsewhere, 1)) {
        (void)*at(f, offset);
        CHECK(false);
    }
}

static void touch(void *context) {
    const volatile unsigned char *p = context;
    (void)*p;
}

static struct sigaction ours;
static int passed_on;

/* One that was installed over ours, and passes on. */
static void later_handler(int signal, siginfo_t *info, void *machine) {
    passed_on++;
    ours.sa_sigaction(signal, info, machine);
}

/* Who copies guarded is told also where somebody has put his handler over ours since; what isn't ours he has all the same. */
static void test_later(opened *f, opened *other) {
    struct sigaction later = {.sa_sigaction = later_handler, .sa_flags = SA_SIGINFO | SA_NODEFER}, now;
    kvs_guard_mask mask, inner;
    CHECK(!sigaction(SIGBUS, &later, &ours));
    for (int i = 0; i < 2; i++) {
        passed_on = 0;
        kvs_guard_begin(&mask);
        expect_own(other, 2 * PAGE);
        kvs_guard_begin(&inner);
        CHECK(!kvs_guard_run(touch, (void *)(uintptr_t)(f->map + 3 * PAGE), f->map + 3 * PAGE, PAGE));
        kvs_guard_end(&inner);
        CHECK(passed_on == 1);
        kvs_guard_end(&mask);
        CHECK(!sigaction(SIGBUS, NULL, &now) && now.sa_sigaction == later_handler);
        kvs_watch_here(); /* a sanitizer's handler leaves the signal blocked behind a jump */
        expect_own(other, 2 * PAGE);
        CHECK(passed_on == 2);
    }
    CHECK(!sigaction(SIGBUS, &ours, NULL));
}

static bool is_own(void) {
    struct sigaction now;
    CHECK(!sigaction(SIGBUS, NULL, &now));
    return now.sa_handler == own_handler;
}

/* What isn't in a map that is watched is somebody else's, and so is everything once no map is. */
static void test_others(void) {
    opened f = make(0), other = make(0);
    struct sigaction own = {.sa_handler = own_handler, .sa_flags = SA_NODEFER}, old;
    sigset_t bus;
    kvs_guard_mask mask;
    int status, many[KVS_MAX_WATCHED];
    CHECK(!sigaction(SIGBUS, &own, &old));
    CHECK(!ftruncate(f.fd, PAGE) && !ftruncate(other.fd, PAGE));
    int watch = kvs_watch(f.map, BYTES, PAGE, f.reader, -1);
    CHECK(!is_own());
    expect_own(&other, 2 * PAGE);
    if (!sigsetjmp(elsewhere, 1)) {
        raise(SIGBUS); /* sent, not a fault */
        CHECK(false);
    }
    check_header(&f, 2);

    /* who copies guarded is told of it, and gets no page instead */
    kvs_guard_begin(&mask);
    CHECK(!kvs_guard_run(touch, (void *)(uintptr_t)(f.map + 3 * PAGE), f.map + 3 * PAGE, PAGE));
    kvs_guard_end(&mask);
    CHECK(!is_own() && kvs_watch_lost(watch) == 1);
    test_later(&f, &other);
    CHECK(!is_own() && kvs_watch_lost(watch) == 1);

    sigemptyset(&bus);
    sigaddset(&bus, SIGBUS);
    pthread_sigmask(SIG_BLOCK, &bus, NULL);
    kvs_watch_here();
    check_header(&f, 4);

    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) {
        CHECK(is_own());
        expect_own(&f, 5 * PAGE);
        watch = kvs_watch(f.map, BYTES, PAGE, f.reader, -1);
        check_header(&f, 5);
        kvs_watch_end(watch);
        CHECK(is_own());
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && !status);

    for (int i = 0; i < KVS_MAX_WATCHED - 1; i++) CHECK((many[i] = kvs_watch(other.map + i, 1, PAGE, -1, -1)) >= 0);
    CHECK(kvs_watch(other.map, 1, PAGE, -1, -1) == -1);
    for (int i = 0; i < KVS_MAX_WATCHED - 1; i++) kvs_watch_end(many[i]);
    check_header(&f, 5);
    CHECK(kvs_watch_lost(watch) == 3 && !is_own());
    kvs_watch_end(watch);
    CHECK(is_own());
    expect_own(&f, 6 * PAGE);
    CHECK(!sigaction(SIGBUS, &old, NULL));
    end(&f);
    end(&other);
}

void test_standin(void) {
    test_contents();
    test_tail();
    test_many();
    test_threads();
    test_others();
}
