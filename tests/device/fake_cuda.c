/*
 * A driver for tests: exports the calls of libcuda.so.1 that kvstore uses, works on host memory, and looks closely.
 *
 * Copies are queued and run late: by a thread after a delay, or, without one, only when somebody waits for them. So a wait
 * that is missing shows as wrong bytes. What real hardware would do in silence is written down as a complaint: memory that
 * is freed or let go of while a copy of it is queued, a source that was changed before its copy ran, an unknown pointer, a
 * handle used after its end, a call without a current context. Any call can be told to fail at its nth time.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400, NOT_READY = 600, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
};
enum { COPY, MARK, WAIT };
enum { MOST = 4096, DEVICES = 2, STACK = 16 };

typedef struct op {
    struct op *next;
    int kind;
    uint64_t number;          /* of the op on its stream, from 1 */
    uint64_t target;
    const unsigned char *source;
    unsigned char *staged;    /* of pageable memory: taken when the copy is queued, as the driver does */
    size_t target_pitch, source_pitch, width, height;
    uint64_t sum;             /* of the source when it was queued */
    struct stream *on;        /* WAIT: until this stream has done its op of that number */
    uint64_t until;
} op;

typedef struct stream {
    struct stream *next;
    op *first, *last;
    uint64_t queued, done;
    int ended, built_in;
} stream;

typedef struct event {
    struct event *next;
    stream *on;
    uint64_t number;
    int ended;
} event;

typedef struct range {
    uint64_t start, size;
    int ordinal, live;
} range;

typedef struct pitched {
    size_t source_x, source_y;
    int source_type;
    const void *source_host;
    uint64_t source_device;
    void *source_array;
    size_t source_pitch, target_x, target_y;
    int target_type;
    void *target_host;
    uint64_t target_device;
    void *target_array;
    size_t target_pitch, width, height;
} pitched;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static stream *streams;
static event *events;
static range allocated[MOST], registered[MOST];
static int allocations, registrations;
static int contexts[DEVICES], started, device_count = 1;
static char device_contexts[DEVICES]; /* their addresses are the contexts */
static stream defaults[3];            /* legacy default 0 and 1, per-thread default 2 */
static char complaints[4096];
static int delay_us, thread_runs;
static uint64_t copies, pitched_copies, pageable_copies, waits_on_device;
static __thread void *stack[STACK];
static __thread int depth;

static struct { char name[64]; int count; } counts[64];
static struct fault { char name[64]; int at, code, for_good, seen; } faults[4];
static int allowed = -1; /* ops that the thread may still run; any number below 0 */

static void complain(const char *format, ...) {
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (strlen(complaints) + strlen(line) + 2 < sizeof complaints) strcat(strcat(complaints, line), "\n");
}

/* Counts a call; its error if it is to fail now. The lock is held. */
static int enter(const char *name) {
    int result = SUCCESS;
    for (int i = 0; i < 64; i++) {
        if (!counts[i].name[0]) strcpy(counts[i].name, name);
        if (!strcmp(counts[i].name, name)) {
            counts[i].count++;
            break;
        }
    }
    for (struct fault *f = faults; f < faults + 4; f++) {
        if (strcmp(f->name, name) && strcmp(f->name, "*")) continue;
        f->seen++;
        if (f->seen == f->at || (f->for_good && f->seen > f->at)) result = f->code;
    }
    return result;
}

#define ENTER                               \
    pthread_mutex_lock(&lock);              \
    int result = enter(__func__);           \
    if (result) goto out

#define LEAVE                               \
    out:                                    \
    pthread_mutex_unlock(&lock);            \
    return result

static int need_context(const char *name) {
    void *current = depth ? stack[depth - 1] : NULL;
    for (int i = 0; i < DEVICES; i++)
        if (current == &device_contexts[i] && contexts[i]) return SUCCESS;
    complain("%s without a current context", name);
    return INVALID_CONTEXT;
}

#define CONTEXT                                       \
    if ((result = need_context(__func__))) goto out

static int within(const range *ranges, int n, uint64_t start, uint64_t size) {
    for (int i = 0; i < n; i++)
        if (ranges[i].live && start >= ranges[i].start && start + size <= ranges[i].start + ranges[i].size) return i;
    return -1;
}

static uint64_t sum_of(const unsigned char *p, size_t pitch, size_t width, size_t height) {
    uint64_t sum = 1469598103934665603u;
    for (size_t y = 0; y < height; y++)
        for (size_t x = 0; x < width; x++) sum = (sum ^ p[y * pitch + x]) * 1099511628211u;
    return sum;
}

static uint64_t spanned(size_t pitch, size_t width, size_t height) { return (height - 1) * pitch + width; }

static stream *stream_of(void *handle, const char *name) {
    uintptr_t number = (uintptr_t)handle;
    if (number <= 2) return &defaults[number == 1 ? 0 : number];
    for (stream *s = streams; s; s = s->next)
        if (s == handle && !s->ended) return s;
    complain("%s of a stream that is none, or has ended", name);
    return NULL;
}

static event *event_of(void *handle, const char *name) {
    for (event *e = events; e; e = e->next)
        if (e == handle && !e->ended) return e;
    complain("%s of an event that is none, or has ended", name);
    return NULL;
}

static void push(stream *s, op *o) {
    o->number = ++s->queued;
    if (s->last)
        s->last->next = o;
    else
        s->first = o;
    s->last = o;
    pthread_cond_broadcast(&progress);
}

static void run_copy(op *o) {
    if (!o->staged && sum_of(o->source, o->source_pitch, o->width, o->height) != o->sum)
        complain("the source of a copy was changed before the copy ran");
    const unsigned char *from = o->staged ? o->staged : o->source;
    if (within(allocated, allocations, o->target, spanned(o->target_pitch, o->width, o->height)) < 0) {
        complain("a copy ran to memory that had been freed");
        return;
    }
    for (size_t y = 0; y < o->height; y++)
        memcpy((void *)(uintptr_t)(o->target + y * o->target_pitch), from + y * o->source_pitch, o->width);
}

/* Runs the first op of a stream; 0 if it waits for another stream. */
static int run_one(stream *s) {
    op *o = s->first;
    if (o->kind == WAIT && o->on->done < o->until) return 0;
    if (o->kind == COPY) run_copy(o);
    s->done = o->number;
    if (!(s->first = o->next)) s->last = NULL;
    free(o->staged);
    free(o);
    pthread_cond_broadcast(&progress);
    return 1;
}

/* Until a stream has done an op: what it takes is run here, or waited for where a thread runs things. */
static void run_until(stream *s, uint64_t number) {
    while (s->done < number) {
        if (thread_runs)
            pthread_cond_wait(&progress, &lock);
        else if (!run_one(s))
            run_until(s->first->on, s->first->until);
    }
}

static void *run_late(void *nothing) {
    (void)nothing;
    pthread_mutex_lock(&lock);
    while (thread_runs) {
        stream *found = NULL;
        for (int i = 0; i < 3 && !found; i++)
            if (defaults[i].first && !(defaults[i].first->kind == WAIT && defaults[i].first->on->done < defaults[i].first->until))
                found = &defaults[i];
        for (stream *s = streams; s && !found; s = s->next)
            if (s->first && !(s->first->kind == WAIT && s->first->on->done < s->first->until)) found = s;
        if (!found) {
            pthread_cond_wait(&progress, &lock);
            continue;
        }
        if (!allowed) { /* not for ever, so that a test that fails meanwhile ends */
            struct timespec until;
            clock_gettime(CLOCK_REALTIME, &until);
            until.tv_sec += 60;
            if (pthread_cond_timedwait(&progress, &lock, &until) == ETIMEDOUT) allowed = -1;
            continue;
        }
        if (delay_us) {
            pthread_mutex_unlock(&lock);
            usleep((useconds_t)delay_us);
            pthread_mutex_lock(&lock);
            if (!thread_runs || !found->first) continue;
        }
        if (run_one(found) && allowed > 0) allowed--;
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* ---- what the tests use ---- */

void fake_reset(void) {
    pthread_mutex_lock(&lock);
    thread_runs = 0;
    pthread_cond_broadcast(&progress);
    complaints[0] = 0;
    depth = 0;
    allowed = -1;
    memset(counts, 0, sizeof counts);
    memset(faults, 0, sizeof faults);
    for (int i = 0; i < allocations; i++)
        if (allocated[i].live) free((void *)(uintptr_t)allocated[i].start);
    allocations = registrations = 0;
    memset(contexts, 0, sizeof contexts);
    memset(defaults, 0, sizeof defaults);
    copies = pitched_copies = pageable_copies = waits_on_device = 0;
    device_count = 1;
    streams = NULL; /* ended ones stay allocated, so that their handles are never given out again */
    events = NULL;
    pthread_mutex_unlock(&lock);
}

void fake_run_late(int microseconds) {
    pthread_t thread;
    pthread_mutex_lock(&lock);
    delay_us = microseconds;
    thread_runs = 1;
    pthread_mutex_unlock(&lock);
    pthread_create(&thread, NULL, run_late, NULL);
    pthread_detach(thread);
}

void fake_devices(int count) { device_count = count; }

/* Lets a call, or "*" for any, fail at its nth time from here on; for good: from then on. */
void fake_fail(const char *name, int nth, int code, int for_good) {
    pthread_mutex_lock(&lock);
    for (struct fault *f = faults; f < faults + 4; f++)
        if (!f->name[0]) {
            strncpy(f->name, name, sizeof f->name - 1);
            f->at = nth, f->code = code, f->for_good = for_good, f->seen = 0;
            break;
        }
    pthread_mutex_unlock(&lock);
}

/* Lets the thread run so many ops more; any number if it is negative. */
void fake_allow(int ops) {
    pthread_mutex_lock(&lock);
    allowed = ops;
    pthread_cond_broadcast(&progress);
    pthread_mutex_unlock(&lock);
}

int fake_calls(const char *name) {
    for (int i = 0; i < 64; i++)
        if (!strcmp(counts[i].name, name)) return counts[i].count;
    return 0;
}

uint64_t fake_alloc(size_t size, int ordinal) {
    void *p = calloc(size ? size : 1, 1);
    pthread_mutex_lock(&lock);
    allocated[allocations++] = (range){(uint64_t)(uintptr_t)p, size, ordinal, 1};
    pthread_mutex_unlock(&lock);
    return (uint64_t)(uintptr_t)p;
}

static void complain_of_queued(uint64_t start, uint64_t size, int of_source, const char *what) {
    for (stream *s = streams; s; s = s->next)
        for (op *o = s->first; o; o = o->next) {
            if (o->kind != COPY || (of_source && o->staged)) continue;
            uint64_t from = of_source ? (uint64_t)(uintptr_t)o->source : o->target;
            if (from < start + size && start < from + spanned(of_source ? o->source_pitch : o->target_pitch, o->width, o->height))
                complain("%s while a copy of it was queued", what);
        }
}

void fake_free(uint64_t pointer) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < allocations; i++)
        if (allocated[i].live && allocated[i].start == pointer) {
            complain_of_queued(pointer, allocated[i].size, 0, "device memory was freed");
            allocated[i].live = 0;
            free((void *)(uintptr_t)pointer);
        }
    pthread_mutex_unlock(&lock);
}

const char *fake_complaints(void) { return complaints; }

/* Things that are there: 0 contexts, 1 streams, 2 events, 3 registered ranges, 4 copies that are queued. */
int fake_live(int what) {
    int n = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; what == 0 && i < DEVICES; i++) n += contexts[i];
    for (stream *s = streams; s; s = s->next) {
        n += what == 1 && !s->ended;
        for (op *o = s->first; o; o = o->next) n += what == 4 && o->kind == COPY;
    }
    for (event *e = events; e; e = e->next) n += what == 2 && !e->ended;
    for (int i = 0; what == 3 && i < registrations; i++) n += registered[i].live;
    pthread_mutex_unlock(&lock);
    return n;
}

/* What was asked for: 0 plain copies, 1 pitched ones, 2 copies from pageable memory, 3 waits of a stream for an event. */
uint64_t fake_asked(int what) {
    return what == 0 ? copies : what == 1 ? pitched_copies : what == 2 ? pageable_copies : waits_on_device;
}

/* The current context of this thread. */
void *fake_current(void) { return depth ? stack[depth - 1] : NULL; }

/* ---- the driver's calls ---- */

int cuInit(unsigned flags) {
    ENTER;
    if (!device_count) result = NO_DEVICE;
    else if (flags) result = INVALID_VALUE;
    else started = 1;
    LEAVE;
}

int cuGetErrorName(int error, const char **name) {
    static const struct { int code; const char *name; } known[] = {
        {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {3, "CUDA_ERROR_NOT_INITIALIZED"},
        {100, "CUDA_ERROR_NO_DEVICE"}, {101, "CUDA_ERROR_INVALID_DEVICE"}, {201, "CUDA_ERROR_INVALID_CONTEXT"},
        {400, "CUDA_ERROR_INVALID_HANDLE"}, {600, "CUDA_ERROR_NOT_READY"}, {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"}, {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
        {999, "CUDA_ERROR_UNKNOWN"},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (known[i].code == error) {
            *name = known[i].name;
            return SUCCESS;
        }
    *name = NULL;
    return INVALID_VALUE;
}

int cuGetErrorString(int error, const char **text) {
    *text = error == 999 ? NULL : "as the test wanted it";
    return error == 999 ? INVALID_VALUE : SUCCESS;
}

int cuDeviceGetCount(int *count) {
    ENTER;
    if (!started) result = NOT_INITIALIZED;
    else *count = device_count;
    LEAVE;
}

int cuDeviceGet(int *device, int ordinal) {
    ENTER;
    if (ordinal < 0 || ordinal >= device_count || ordinal >= DEVICES) result = INVALID_DEVICE;
    else *device = 70 + ordinal; /* not the ordinal, so that who takes the one for the other is noticed */
    LEAVE;
}

int cuDeviceGetName(char *name, int size, int device) {
    ENTER;
    snprintf(name, (size_t)size, "pretended device %d", device - 70);
    LEAVE;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER;
    if (device < 70 || device >= 70 + DEVICES) {
        result = INVALID_DEVICE;
    } else {
        contexts[device - 70]++;
        *context = &device_contexts[device - 70];
    }
    LEAVE;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    pthread_mutex_lock(&lock);
    int result = enter(__func__); /* an error of this call tells of earlier work: the context is released all the same */
    if (device < 70 || device >= 70 + DEVICES || !contexts[device - 70]) {
        complain("release of a context that is not retained");
        result = INVALID_CONTEXT;
    } else if (!--contexts[device - 70]) {
        for (int i = 0; i < registrations; i++)
            if (registered[i].live) complain("a context went before memory that is pinned for it");
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int cuCtxPushCurrent_v2(void *context) {
    ENTER;
    int known = 0;
    for (int i = 0; i < DEVICES; i++) known |= context == &device_contexts[i] && contexts[i];
    if (!known || depth == STACK) {
        complain("push of a context that is not retained");
        result = INVALID_CONTEXT;
    } else {
        stack[depth++] = context;
    }
    LEAVE;
}

int cuCtxPopCurrent_v2(void **context) {
    pthread_mutex_lock(&lock);
    int result = enter(__func__);
    if (depth) *context = stack[--depth];
    else if (!result) result = INVALID_CONTEXT;
    pthread_mutex_unlock(&lock);
    return result;
}

int cuCtxSynchronize(void) {
    ENTER;
    CONTEXT;
    for (stream *s = streams; s; s = s->next) run_until(s, s->queued);
    for (int i = 0; i < 3; i++) run_until(&defaults[i], defaults[i].queued);
    LEAVE;
}

int cuMemHostRegister_v2(void *start, size_t size, unsigned flags) {
    ENTER;
    CONTEXT;
    if ((uintptr_t)start % 4096 || size % 4096 || !size) complain("pinned memory is not made of whole pages");
    if (flags != 1) complain("memory pinned with flags %u", flags);
    for (int i = 0; i < registrations; i++)
        if (registered[i].live && (uint64_t)(uintptr_t)start < registered[i].start + registered[i].size &&
            registered[i].start < (uint64_t)(uintptr_t)start + size) {
            complain("memory was pinned twice");
            result = ALREADY_REGISTERED;
            goto out;
        }
    registered[registrations++] = (range){(uint64_t)(uintptr_t)start, size, 0, 1};
    LEAVE;
}

int cuMemHostUnregister(void *start) {
    ENTER;
    CONTEXT;
    result = NOT_REGISTERED;
    for (int i = 0; i < registrations; i++)
        if (registered[i].live && registered[i].start == (uint64_t)(uintptr_t)start) {
            complain_of_queued(registered[i].start, registered[i].size, 1, "pinned memory was let go of");
            registered[i].live = 0;
            result = SUCCESS;
        }
    LEAVE;
}

static int queue_copy(const op *given, void *handle, const char *name) {
    stream *s = stream_of(handle, name);
    if (!s) return INVALID_HANDLE;
    if (!given->width || !given->height || given->target_pitch < given->width || given->source_pitch < given->width ||
        given->target_pitch > 0x7fffffff) {
        complain("%s of %zu x %zu bytes, pitches %zu and %zu", name, given->width, given->height, given->target_pitch, given->source_pitch);
        return INVALID_VALUE;
    }
    if (within(allocated, allocations, given->target, spanned(given->target_pitch, given->width, given->height)) < 0) {
        complain("%s to memory of no device, or beyond its end", name);
        return INVALID_VALUE;
    }
    op *o = malloc(sizeof *o);
    *o = *given;
    o->kind = COPY;
    const uint64_t size = spanned(o->source_pitch, o->width, o->height);
    if (within(registered, registrations, (uint64_t)(uintptr_t)o->source, size) < 0) {
        pageable_copies++;
        o->staged = malloc(size);
        memcpy(o->staged, o->source, size);
    } else {
        o->sum = sum_of(o->source, o->source_pitch, o->width, o->height);
    }
    push(s, o);
    return SUCCESS;
}

int cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t size, void *handle) {
    ENTER;
    CONTEXT;
    copies++;
    result = queue_copy(&(op){.target = target, .source = source, .target_pitch = size, .source_pitch = size, .width = size, .height = 1},
                        handle, __func__);
    LEAVE;
}

int cuMemcpy2DAsync_v2(const pitched *c, void *handle) {
    ENTER;
    CONTEXT;
    pitched_copies++;
    if (c->source_type != 1 || c->target_type != 2 || c->source_x || c->source_y || c->target_x || c->target_y || c->source_device ||
        c->source_array || c->target_host || c->target_array)
        complain("a pitched copy that is not from the host to the device");
    result = queue_copy(&(op){.target = c->target_device,
                              .source = c->source_host,
                              .target_pitch = c->target_pitch,
                              .source_pitch = c->source_pitch,
                              .width = c->width,
                              .height = c->height},
                        handle, __func__);
    LEAVE;
}

int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
    ENTER;
    CONTEXT;
    int found = within(allocated, allocations, pointer, 1);
    if (found < 0) {
        result = INVALID_VALUE;
    } else if (attribute == 2) {
        *(int *)value = 2;
    } else if (attribute == 9) {
        *(int *)value = allocated[found].ordinal;
    } else {
        result = INVALID_VALUE;
    }
    LEAVE;
}

int cuStreamCreate(void **handle, unsigned flags) {
    ENTER;
    CONTEXT;
    if (flags != 1) complain("a stream that waits for the default stream");
    stream *s = calloc(1, sizeof *s);
    s->next = streams;
    streams = s;
    *handle = s;
    LEAVE;
}

int cuStreamDestroy_v2(void *handle) {
    pthread_mutex_lock(&lock);
    int result = enter(__func__); /* as for the release of a context */
    stream *s = stream_of(handle, __func__);
    if (!need_context(__func__) && s) {
        for (op *o = s->first; o; o = o->next)
            if (o->kind == COPY) complain("a stream was ended with a copy on it");
        s->ended = 1;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int cuStreamSynchronize(void *handle) {
    ENTER;
    CONTEXT;
    stream *s = stream_of(handle, __func__);
    if (!s) result = INVALID_HANDLE;
    else run_until(s, s->queued);
    LEAVE;
}

int cuStreamWaitEvent(void *handle, void *mark, unsigned flags) {
    ENTER;
    CONTEXT;
    stream *s = stream_of(handle, __func__);
    event *e = event_of(mark, __func__);
    waits_on_device++;
    if (!s || !e || flags) {
        result = INVALID_HANDLE;
    } else if (e->on && e->on != s) {
        op *o = calloc(1, sizeof *o);
        o->kind = WAIT, o->on = e->on, o->until = e->number;
        push(s, o);
    }
    LEAVE;
}

int cuEventCreate(void **handle, unsigned flags) {
    ENTER;
    CONTEXT;
    if (flags != 3) complain("an event that takes the time, or lets the host spin");
    event *e = calloc(1, sizeof *e);
    e->next = events;
    events = e;
    *handle = e;
    LEAVE;
}

int cuEventRecord(void *mark, void *handle) {
    ENTER;
    CONTEXT;
    stream *s = stream_of(handle, __func__);
    event *e = event_of(mark, __func__);
    if (!s || !e) {
        result = INVALID_HANDLE;
    } else {
        op *o = calloc(1, sizeof *o);
        o->kind = MARK;
        push(s, o);
        e->on = s, e->number = o->number;
    }
    LEAVE;
}

int cuEventQuery(void *mark) {
    ENTER;
    CONTEXT;
    event *e = event_of(mark, __func__);
    if (!e) {
        result = INVALID_HANDLE;
    } else if (e->on && e->on->done < e->number) {
        /* who asks often enough gets there */
        if (!thread_runs && !run_one(e->on)) run_until(e->on->first->on, e->on->first->until);
        result = NOT_READY;
    }
    LEAVE;
}

int cuEventSynchronize(void *mark) {
    ENTER;
    CONTEXT;
    event *e = event_of(mark, __func__);
    if (!e) result = INVALID_HANDLE;
    else if (e->on) run_until(e->on, e->number);
    LEAVE;
}

int cuEventDestroy_v2(void *mark) {
    pthread_mutex_lock(&lock);
    int result = enter(__func__); /* as for the release of a context */
    event *e = event_of(mark, __func__);
    if (!need_context(__func__) && e) e->ended = 1;
    pthread_mutex_unlock(&lock);
    return result;
}
