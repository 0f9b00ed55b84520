/* Telling other threads which streams of a restore are in place. */
#define _POSIX_C_SOURCE 200809L
#include "kvs_kernel.h"

#include <pthread.h>
#include <time.h>

/* Who waits for a stream of any call. The condition is made at its first use, since it has to count by a clock that nobody sets. */
static pthread_mutex_t progress_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t progress_made;
static pthread_once_t progress_once = PTHREAD_ONCE_INIT;

static void make_progress_condition(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&progress_made, &attributes);
    pthread_condattr_destroy(&attributes);
}

static void before_fork(void) { pthread_mutex_lock(&progress_lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&progress_lock); }

/* A condition still counts the threads that waited for it, which the child doesn't have: it would wait for them. */
static void after_fork_in_child(void) {
    pthread_mutex_init(&progress_lock, NULL);
    make_progress_condition();
}

static void prepare_progress(void) {
    make_progress_condition();
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

void kvs_progress_set(int32_t *progress, int32_t value) {
    pthread_once(&progress_once, prepare_progress);
    pthread_mutex_lock(&progress_lock);
    __atomic_store_n(progress, value, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&progress_made);
    pthread_mutex_unlock(&progress_lock);
}

int kvs_progress_wait(const int32_t *progress, int milliseconds) {
    struct timespec until;
    int value, error = 0;
    pthread_once(&progress_once, prepare_progress);
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += milliseconds / 1000;
    until.tv_nsec += milliseconds % 1000 * 1000000L;
    if (until.tv_nsec >= 1000000000L) until.tv_sec++, until.tv_nsec -= 1000000000L;
    pthread_mutex_lock(&progress_lock);
    while (!(value = __atomic_load_n(progress, __ATOMIC_ACQUIRE)) && !error)
        error = pthread_cond_timedwait(&progress_made, &progress_lock, &until);
    pthread_mutex_unlock(&progress_lock);
    return value;
}
