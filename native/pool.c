/* The pool: one list of the calls under way, and threads that join them. */
#define _POSIX_C_SOURCE 200809L
#include "pool.h"
#include "kvs_kernel.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>

typedef struct job {
    void (*task)(void *, size_t);
    void *context;
    size_t count;
    atomic_size_t next; /* the task that is taken next */
    int wanted;         /* workers that may still join */
    int inside;         /* workers that have joined and not left */
    pthread_cond_t left;
    struct job *after;
} job;

/* Everything here, and `wanted`, `inside` and `after` of the jobs, is guarded by `lock`. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t posted = PTHREAD_COND_INITIALIZER;
static job *jobs; /* those that workers may join */
static int workers;
static pthread_once_t handlers_once = PTHREAD_ONCE_INIT;

static void before_fork(void) { pthread_mutex_lock(&lock); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }

/* Only the forking thread lives on, and it was in no call, so all state of the pool is stale. */
static void after_fork_in_child(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&posted, NULL);
    jobs = NULL;
    workers = 0;
}

static void install_handlers(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

static void unlist(job *j) {
    for (job **at = &jobs; *at; at = &(*at)->after)
        if (*at == j) {
            *at = j->after;
            return;
        }
}

static void work(job *j) {
    for (size_t i; (i = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed)) < j->count;)
        j->task(j->context, i);
}

static void *worker(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!jobs) pthread_cond_wait(&posted, &lock);
        job *j = jobs;
        if (--j->wanted == 0) unlist(j);
        j->inside++;
        pthread_mutex_unlock(&lock);
        work(j);
        pthread_mutex_lock(&lock);
        if (--j->inside == 0) pthread_cond_signal(&j->left);
    }
    return NULL;
}

int kvs_start_thread(pthread_t *thread, void *(*run)(void *), void *context) {
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(thread, NULL, run, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* With the lock held. */
static void grow(int wanted) {
    for (pthread_t thread; workers < wanted; workers++) {
        if (kvs_start_thread(&thread, worker, NULL)) break;
        pthread_detach(thread);
    }
}

void kvs_pool_run(void (*task)(void *, size_t), void *context, size_t count, int threads) {
    if (threads > KVS_MAX_THREADS) threads = KVS_MAX_THREADS;
    if (count < (size_t)(threads > 0 ? threads : 1)) threads = (int)count;
    job j = {.task = task, .context = context, .count = count};
    atomic_init(&j.next, 0);
    if (threads <= 1) {
        work(&j);
        return;
    }
    pthread_once(&handlers_once, install_handlers);
    pthread_cond_init(&j.left, NULL);
    j.wanted = threads - 1;
    pthread_mutex_lock(&lock);
    grow(j.wanted);
    j.after = jobs;
    jobs = &j;
    for (int i = 0; i < j.wanted; i++) pthread_cond_signal(&posted);
    pthread_mutex_unlock(&lock);

    work(&j);

    pthread_mutex_lock(&lock);
    if (j.wanted) unlist(&j);
    while (j.inside) pthread_cond_wait(&j.left, &lock);
    pthread_mutex_unlock(&lock);
    pthread_cond_destroy(&j.left);
}
