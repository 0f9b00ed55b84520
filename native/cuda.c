/*
 * The few calls of the CUDA driver that a copy to a device takes. The driver is opened at run time, so that one build
 * serves machines with and without one; what is declared here of its binary interface is all that is used of it.
 */
#include "kvs_kernel.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *handle; /* of a context, a stream or an event */

/* CUDA_MEMCPY2D, version 2. */
typedef struct pitched_copy {
    size_t source_x, source_y;
    int source_type;
    const void *source_host;
    uint64_t source_device;
    void *source_array;
    size_t source_pitch;
    size_t target_x, target_y;
    int target_type;
    void *target_host;
    uint64_t target_device;
    void *target_array;
    size_t target_pitch;
    size_t width, height;
} pitched_copy;

_Static_assert(sizeof(void *) == 8 && sizeof(pitched_copy) == 128, "the layout of CUDA_MEMCPY2D on 64-bit systems");

enum {
    MEMORY_HOST = 1,
    MEMORY_DEVICE = 2,
    STREAM_NON_BLOCKING = 1,     /* doesn't wait for the legacy default stream, nor it for this one */
    EVENT_BLOCKING_SYNC = 1,     /* who waits on the host sleeps */
    EVENT_DISABLE_TIMING = 2,
    HOST_REGISTER_PORTABLE = 1,  /* pinned for every context of the process */
    POINTER_MEMORY_TYPE = 2,
    POINTER_DEVICE_ORDINAL = 9,
    NOT_READY = 600,
    CALL_SHIFT = 16,
};

/* X(call of the driver, its result, its parameters) */
#define CALLS(X)                                                                    \
    X(cuInit, int, (unsigned flags))                                                \
    X(cuGetErrorName, int, (int error, const char **name))                          \
    X(cuGetErrorString, int, (int error, const char **text))                        \
    X(cuDeviceGetCount, int, (int *count))                                          \
    X(cuDeviceGet, int, (int *device, int ordinal))                                 \
    X(cuDeviceGetName, int, (char *name, int size, int device))                     \
    X(cuDevicePrimaryCtxRetain, int, (handle *context, int device))                 \
    X(cuDevicePrimaryCtxRelease_v2, int, (int device))                              \
    X(cuCtxPushCurrent_v2, int, (handle context))                                   \
    X(cuCtxPopCurrent_v2, int, (handle *context))                                   \
    X(cuCtxSynchronize, int, (void))                                                \
    X(cuMemHostRegister_v2, int, (void *start, size_t size, unsigned flags))        \
    X(cuMemHostUnregister, int, (void *start))                                      \
    X(cuMemcpyHtoDAsync_v2, int, (uint64_t target, const void *source, size_t size, handle stream)) \
    X(cuMemcpy2DAsync_v2, int, (const pitched_copy *copy, handle stream))           \
    X(cuPointerGetAttribute, int, (void *value, int attribute, uint64_t pointer))   \
    X(cuStreamCreate, int, (handle *stream, unsigned flags))                        \
    X(cuStreamDestroy_v2, int, (handle stream))                                     \
    X(cuStreamSynchronize, int, (handle stream))                                    \
    X(cuStreamWaitEvent, int, (handle stream, handle event, unsigned flags))        \
    X(cuEventCreate, int, (handle *event, unsigned flags))                          \
    X(cuEventRecord, int, (handle event, handle stream))                            \
    X(cuEventQuery, int, (handle event))                                            \
    X(cuEventSynchronize, int, (handle event))                                      \
    X(cuEventDestroy_v2, int, (handle event))

#define NUMBER(call, result, parameters) number_##call,
enum { CALLS(NUMBER) call_count };

#define NAME(call, result, parameters) #call,
static const char *const names[] = {CALLS(NAME)};

#define MEMBER(call, result, parameters) result(*call) parameters;
struct kvs_cuda {
    CALLS(MEMBER)
};

/* A table of functions alone, in the order of their numbers. */
_Static_assert(sizeof(struct kvs_cuda) == call_count * sizeof(void *) && sizeof(void *) == sizeof(void (*)(void)), "");

kvs_cuda *kvs_cuda_open(const char *path, char *why, size_t size, int *incomplete) {
    *incomplete = 0;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *error = dlerror();
        snprintf(why, size, "%s", error ? error : "it cannot be opened");
        return NULL;
    }
    void *table[call_count];
    for (int i = 0; i < call_count; i++)
        if (!(table[i] = dlsym(library, names[i]))) {
            snprintf(why, size, "it has no function %s", names[i]);
            *incomplete = 1;
            dlclose(library);
            return NULL;
        }
    kvs_cuda *d = malloc(sizeof *d);
    if (!d) {
        snprintf(why, size, "out of memory");
        dlclose(library);
        return NULL;
    }
    memcpy(d, table, sizeof table); /* the bytes, since C knows no conversion from data to functions */
    return d;
}

static uint32_t failure(int number, int result) {
    return result ? (uint32_t)number << CALL_SHIFT | ((uint32_t)result & 0xffff) : 0;
}

#define TRY(call, ...) failure(number_##call, d->call(__VA_ARGS__))

const char *kvs_cuda_call(uint32_t result) {
    const uint32_t number = result >> CALL_SHIFT;
    return number < call_count ? names[number] : "?";
}

const char *kvs_cuda_error_name(kvs_cuda *d, uint32_t result) {
    const char *name = NULL;
    return !d->cuGetErrorName((int)(result & 0xffff), &name) && name ? name : "an error that the driver has no name for";
}

const char *kvs_cuda_error_text(kvs_cuda *d, uint32_t result) {
    const char *text = NULL;
    return !d->cuGetErrorString((int)(result & 0xffff), &text) && text ? text : "no description";
}

uint32_t kvs_cuda_init(kvs_cuda *d, int *devices) {
    *devices = 0;
    const uint32_t failed = TRY(cuInit, 0);
    return failed ? failed : TRY(cuDeviceGetCount, devices);
}

uint32_t kvs_cuda_device_open(kvs_cuda *d, int ordinal, int *device, uint64_t *context, char *name, size_t size) {
    handle opened = NULL;
    uint32_t failed = TRY(cuDeviceGet, device, ordinal);
    if (!failed) failed = TRY(cuDeviceGetName, name, (int)size, *device);
    if (!failed) failed = TRY(cuDevicePrimaryCtxRetain, &opened, *device);
    *context = (uint64_t)(uintptr_t)opened;
    return failed;
}

uint32_t kvs_cuda_device_close(kvs_cuda *d, int device) { return TRY(cuDevicePrimaryCtxRelease_v2, device); }

#define HANDLE(number) ((handle)(uintptr_t)(number))

/*
 * Every call that needs a context runs with the device's own one on top, and leaves the thread's as it was. If both fail
 * the first failure is told, unless it only says that something is still to come.
 */
#define WITH_CONTEXT(...)                                                          \
    do {                                                                           \
        uint32_t failed = TRY(cuCtxPushCurrent_v2, HANDLE(context));               \
        if (failed) return failed;                                                 \
        failed = __VA_ARGS__;                                                      \
        handle popped;                                                             \
        const uint32_t pop_failed = TRY(cuCtxPopCurrent_v2, &popped);              \
        return failed && (failed & 0xffff) != NOT_READY ? failed                   \
               : pop_failed                             ? pop_failed : failed;     \
    } while (0)

uint32_t kvs_cuda_synchronize(kvs_cuda *d, uint64_t context) { WITH_CONTEXT(TRY(cuCtxSynchronize)); }

uint32_t kvs_cuda_pin(kvs_cuda *d, uint64_t context, uint64_t start, size_t size) {
    WITH_CONTEXT(TRY(cuMemHostRegister_v2, HANDLE(start), size, HOST_REGISTER_PORTABLE));
}

uint32_t kvs_cuda_unpin(kvs_cuda *d, uint64_t context, uint64_t start) {
    WITH_CONTEXT(TRY(cuMemHostUnregister, HANDLE(start)));
}

uint32_t kvs_cuda_copy(kvs_cuda *d, uint64_t context, uint64_t stream, uint64_t target, uint64_t source, size_t size) {
    WITH_CONTEXT(TRY(cuMemcpyHtoDAsync_v2, target, HANDLE(source), size, HANDLE(stream)));
}

uint32_t kvs_cuda_copy_pitched(kvs_cuda *d, uint64_t context, uint64_t stream, uint64_t target, size_t target_pitch,
                               uint64_t source, size_t source_pitch, size_t width, size_t height) {
    const pitched_copy copy = {
        .source_type = MEMORY_HOST,
        .source_host = HANDLE(source),
        .source_pitch = source_pitch,
        .target_type = MEMORY_DEVICE,
        .target_device = target,
        .target_pitch = target_pitch,
        .width = width,
        .height = height,
    };
    WITH_CONTEXT(TRY(cuMemcpy2DAsync_v2, &copy, HANDLE(stream)));
}

static uint32_t pointer_owner(kvs_cuda *d, uint64_t pointer, int *is_device, int *ordinal) {
    int type = 0; /* an unsigned enumeration of the driver's */
    uint32_t failed = TRY(cuPointerGetAttribute, &type, POINTER_MEMORY_TYPE, pointer);
    *is_device = type == MEMORY_DEVICE;
    return failed ? failed : TRY(cuPointerGetAttribute, ordinal, POINTER_DEVICE_ORDINAL, pointer);
}

uint32_t kvs_cuda_pointer(kvs_cuda *d, uint64_t context, uint64_t pointer, int *is_device, int *ordinal) {
    *is_device = 0, *ordinal = -1;
    WITH_CONTEXT(pointer_owner(d, pointer, is_device, ordinal));
}

static uint32_t create_stream(kvs_cuda *d, uint64_t *stream) {
    handle made = NULL;
    const uint32_t failed = TRY(cuStreamCreate, &made, STREAM_NON_BLOCKING);
    *stream = (uint64_t)(uintptr_t)made;
    return failed;
}

uint32_t kvs_cuda_stream_create(kvs_cuda *d, uint64_t context, uint64_t *stream) {
    *stream = 0;
    WITH_CONTEXT(create_stream(d, stream));
}

uint32_t kvs_cuda_stream_destroy(kvs_cuda *d, uint64_t context, uint64_t stream) {
    WITH_CONTEXT(TRY(cuStreamDestroy_v2, HANDLE(stream)));
}

uint32_t kvs_cuda_stream_synchronize(kvs_cuda *d, uint64_t context, uint64_t stream) {
    WITH_CONTEXT(TRY(cuStreamSynchronize, HANDLE(stream)));
}

uint32_t kvs_cuda_stream_wait(kvs_cuda *d, uint64_t context, uint64_t stream, uint64_t event) {
    WITH_CONTEXT(TRY(cuStreamWaitEvent, HANDLE(stream), HANDLE(event), 0));
}

static uint32_t create_event(kvs_cuda *d, uint64_t *event) {
    handle made = NULL;
    const uint32_t failed = TRY(cuEventCreate, &made, EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING);
    *event = (uint64_t)(uintptr_t)made;
    return failed;
}

uint32_t kvs_cuda_event_create(kvs_cuda *d, uint64_t context, uint64_t *event) {
    *event = 0;
    WITH_CONTEXT(create_event(d, event));
}

uint32_t kvs_cuda_event_destroy(kvs_cuda *d, uint64_t context, uint64_t event) {
    WITH_CONTEXT(TRY(cuEventDestroy_v2, HANDLE(event)));
}

uint32_t kvs_cuda_event_record(kvs_cuda *d, uint64_t context, uint64_t event, uint64_t stream) {
    WITH_CONTEXT(TRY(cuEventRecord, HANDLE(event), HANDLE(stream)));
}

uint32_t kvs_cuda_event_query(kvs_cuda *d, uint64_t context, uint64_t event) {
    WITH_CONTEXT(TRY(cuEventQuery, HANDLE(event)));
}

uint32_t kvs_cuda_event_synchronize(kvs_cuda *d, uint64_t context, uint64_t event) {
    WITH_CONTEXT(TRY(cuEventSynchronize, HANDLE(event)));
}
