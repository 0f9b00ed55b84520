/*
 * A page of a mapped file that can't be read, because the disk fails or the
 * file was truncated meanwhile, is a SIGBUS for whoever touches it. Populating
 * the range beforehand leaves a window; so the copies run guarded. What LMDB
 * reads through its own map can't be left by a jump: see standin.c.
 */
#define _GNU_SOURCE
#include "guard.h"
#include "kvs_kernel.h"
#include "standin.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>

typedef struct guarded {
    sigjmp_buf back;
    uintptr_t low, high;
} guarded;

/* In the static block of each thread: the handler must not be the one that allocates it. */
static _Thread_local guarded *volatile current __attribute__((tls_model("initial-exec")));
/* The fault that was passed on last, and how often in a row. */
static _Thread_local void *volatile passed __attribute__((tls_model("initial-exec")));
static _Thread_local volatile sig_atomic_t times __attribute__((tls_model("initial-exec")));
/* Whether `over` has got the signal: what it passes on goes to `before`. */
static _Thread_local volatile sig_atomic_t passing __attribute__((tls_model("initial-exec")));

enum { TIMES = 256 };

/* Guarded by `lock`. The handler reads `before` without it: it only changes while no handler of ours is installed. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int users, runs;
static struct sigaction before;
/* Installed over ours while it was held: behind it while copies run, and where it was afterwards. */
static struct sigaction over;
static atomic_bool covered;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

/* Ends the process as it would have without us: by the instruction, which is run again, or by the signal that was sent. */
static void die(int signal, bool sent) {
    struct sigaction standard = {.sa_handler = SIG_DFL};
    sigemptyset(&standard.sa_mask);
    sigaction(signal, &standard, NULL);
    if (sent) raise(signal);
}

static void on_bus_error(int signal, siginfo_t *info, void *machine) {
    guarded *g = current;
    const uintptr_t at = (uintptr_t)info->si_addr;
    const bool sent = info->si_code <= 0; /* by somebody, not by a fault */
    if (g && !sent && at >= g->low && at < g->high) siglongjmp(g->back, 1);
    if (!sent && kvs_stand_in(at)) return;
    /*
     * Somebody who was installed after us and passes on to us may be who we pass on to. He may as well leave by a jump: so
     * only many times the same fault is taken for a circle.
     */
    if (!sent) {
        times = passed == info->si_addr ? times + 1 : 1;
        passed = info->si_addr;
    }
    const bool to_over = atomic_load(&covered) && !passing;
    const struct sigaction *next = to_over ? &over : &before;
    passing = to_over;
    if (!sent && times > TIMES)
        die(signal, false);
    else if (next->sa_flags & SA_SIGINFO)
        next->sa_sigaction(signal, info, machine);
    else if (next->sa_handler == SIG_DFL || (next->sa_handler == SIG_IGN && !sent))
        die(signal, sent);
    else if (next->sa_handler != SIG_IGN)
        next->sa_handler(signal);
    passing = 0;
}

static bool is_ours(const struct sigaction *action) {
    return (action->sa_flags & SA_SIGINFO) && action->sa_sigaction == on_bus_error;
}

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }

/* The forking thread was in no call of ours, so whatever others were doing is over in the child. */
static void after_fork_in_child(void) {
    struct sigaction now;
    pthread_mutex_init(&lock, NULL);
    if (users && !sigaction(SIGBUS, NULL, &now) && is_ours(&now))
        sigaction(SIGBUS, atomic_load(&covered) ? &over : &before, NULL);
    users = runs = 0;
    atomic_store(&covered, false);
    kvs_stand_in_after_fork();
}

static void install_handlers(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

/* Puts our handler in front, and what was there into `behind`. Returns whether it wasn't there already. */
static bool install(struct sigaction *behind) {
    struct sigaction now, ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    if (sigaction(SIGBUS, NULL, &now) || is_ours(&now)) return false;
    sigemptyset(&ours.sa_mask);
    *behind = now;
    return !sigaction(SIGBUS, &ours, NULL);
}

static void hold(void) {
    /* Still there from before if somebody had put his own over it when we wanted to take it back. */
    if (!users++) install(&before);
}

void kvs_guard_hold(void) {
    pthread_once(&fork_once, install_handlers);
    pthread_mutex_lock(&lock);
    hold();
    pthread_mutex_unlock(&lock);
}

void kvs_guard_release(void) {
    pthread_mutex_lock(&lock);
    if (!--users) {
        struct sigaction now;
        if (!sigaction(SIGBUS, NULL, &now) && is_ours(&now)) sigaction(SIGBUS, &before, NULL);
    }
    pthread_mutex_unlock(&lock);
}

/* A fault whose signal is blocked ends the process, whatever handler there is. Returns whether it was. */
static bool unblock(void) {
    sigset_t bus, was;
    sigemptyset(&bus);
    sigaddset(&bus, SIGBUS);
    return !pthread_sigmask(SIG_UNBLOCK, &bus, &was) && sigismember(&was, SIGBUS) == 1;
}

void kvs_watch_here(void) { unblock(); }

void kvs_guard_begin(kvs_guard_mask *mask) {
    times = passing = 0;
    pthread_once(&fork_once, install_handlers);
    pthread_mutex_lock(&lock);
    hold();
    if (!runs++) atomic_store(&covered, install(&over));
    pthread_mutex_unlock(&lock);
    mask->blocked = unblock();
}

void kvs_guard_end(const kvs_guard_mask *mask) {
    if (mask->blocked) {
        sigset_t bus;
        sigemptyset(&bus);
        sigaddset(&bus, SIGBUS);
        pthread_sigmask(SIG_BLOCK, &bus, NULL);
    }
    pthread_mutex_lock(&lock);
    if (!--runs && atomic_load(&covered)) {
        struct sigaction now;
        if (!sigaction(SIGBUS, NULL, &now) && is_ours(&now)) sigaction(SIGBUS, &over, NULL);
        atomic_store(&covered, false);
    }
    pthread_mutex_unlock(&lock);
    kvs_guard_release();
}

bool kvs_guard_run(void (*f)(void *), void *context, uint64_t address, size_t length) {
    guarded g = {.low = (uintptr_t)address, .high = (uintptr_t)address + length};
    if (sigsetjmp(g.back, 0)) {
        current = NULL;
        return false;
    }
    current = &g;
    f(context);
    current = NULL;
    return true;
}
