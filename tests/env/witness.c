/* Preloaded into a child: notes every write to a store's data file and every wait for the disk, in order, with the bytes
 * that were written, and fails a wait if it is told to, or one of two that overlap. What a power loss may leave can be made from the notes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int notes = -1;
static long fail_after = 0;
static int tell_one = 0, told = 0;

static void *next(const char *name)
{
	void *found = dlsym(RTLD_NEXT, name);
	if (!found)
		abort();
	return found;
}

/* The path that a descriptor is open on: its length, or less than 1. */
static ssize_t path_of(int fd, char *target, size_t size)
{
	char link[64];
	strcpy(link, "/proc/self/fd/");
	char digits[16];
	int at = 0;
	unsigned value = (unsigned)fd;
	do
		digits[at++] = (char)('0' + value % 10);
	while (value /= 10);
	size_t length = strlen(link);
	while (at)
		link[length++] = digits[--at];
	link[length] = 0;
	return readlink(link, target, size);
}

static int is_data(int fd)
{
	char target[4096];
	static const char end[] = "/data.mdb";
	ssize_t n = path_of(fd, target, sizeof target);
	return n >= (ssize_t)sizeof end - 1 && !memcmp(target + n - (sizeof end - 1), end, sizeof end - 1);
}

static void put(const void *data, size_t length)
{
	static ssize_t (*plain)(int, const void *, size_t);
	if (!plain)
		*(void **)&plain = next("write");
	for (const char *at = data; length;) {
		ssize_t done = plain(notes, at, length);
		if (done <= 0)
			abort();
		at += done;
		length -= (size_t)done;
	}
}

static void note(char kind, int64_t offset, const struct iovec *parts, int count, int64_t length)
{
	const char *path = getenv("WITNESS_NOTES");
	if (!path)
		return;
	pthread_mutex_lock(&lock);
	if (notes < 0)
		notes = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	put(&kind, 1);
	put(&offset, sizeof offset);
	put(&length, sizeof length);
	for (int i = 0; i < count && length; i++) {
		size_t part = parts[i].iov_len < (size_t)length ? parts[i].iov_len : (size_t)length;
		put(parts[i].iov_base, part);
		length -= (int64_t)part;
	}
	pthread_mutex_unlock(&lock);
}

/* From the child: note that it has come to a point; fail the wait that comes after `waits` more. */
void witness_mark(int64_t number) { note('m', number, NULL, 0, 0); }
void witness_fail(long waits) { fail_after = waits; }

/* From the child: from now on the disk fails, of which the store's own descriptor is told once; say how many asked by it. */
void witness_tell_one(void) { __atomic_store_n(&tell_one, 1, __ATOMIC_SEQ_CST); }
int witness_asked(void) { return __atomic_load_n(&told, __ATOMIC_SEQ_CST); }

/* Whether this wait is the one that is told. It gives another one time to come, and goes on alone where none may. */
static int is_told(int fd)
{
	if (!__atomic_load_n(&tell_one, __ATOMIC_SEQ_CST) || (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY)
		return 0;
	if (__atomic_fetch_add(&told, 1, __ATOMIC_SEQ_CST))
		return 0;
	struct timespec moment = {0, 10000000};
	for (int i = 0; i < 200 && witness_asked() < 2; i++)
		nanosleep(&moment, NULL);
	return 1;
}

static char kind_of(int fd) { return fcntl(fd, F_GETFL) & O_DSYNC ? 'W' : 'w'; }

#define WRAP_PWRITE(name) \
	ssize_t name(int fd, const void *data, size_t length, off_t offset) \
	{ \
		static ssize_t (*real)(int, const void *, size_t, off_t); \
		if (!real) \
			*(void **)&real = next(#name); \
		ssize_t done = real(fd, data, length, offset); \
		if (done > 0 && is_data(fd)) { \
			struct iovec part = {(void *)data, length}; \
			note(kind_of(fd), offset, &part, 1, done); \
		} \
		return done; \
	}
WRAP_PWRITE(pwrite)
WRAP_PWRITE(pwrite64)

#define WRAP_PWRITEV(name) \
	ssize_t name(int fd, const struct iovec *parts, int count, off_t offset) \
	{ \
		static ssize_t (*real)(int, const struct iovec *, int, off_t); \
		if (!real) \
			*(void **)&real = next(#name); \
		ssize_t done = real(fd, parts, count, offset); \
		if (done > 0 && is_data(fd)) \
			note(kind_of(fd), offset, parts, count, done); \
		return done; \
	}
WRAP_PWRITEV(pwritev)
WRAP_PWRITEV(pwritev64)

ssize_t writev(int fd, const struct iovec *parts, int count)
{
	static ssize_t (*real)(int, const struct iovec *, int);
	if (!real)
		*(void **)&real = next("writev");
	off_t offset = lseek(fd, 0, SEEK_CUR);
	ssize_t done = real(fd, parts, count);
	if (done > 0 && is_data(fd))
		note(kind_of(fd), offset, parts, count, done);
	return done;
}

/* Note that a directory is on the disk, if the child's environment asks for that. */
static void note_directory(int fd)
{
	char target[4096];
	struct stat there;
	ssize_t n;
	if (!getenv("WITNESS_DIRECTORIES") || fstat(fd, &there) || !S_ISDIR(there.st_mode))
		return;
	if ((n = path_of(fd, target, sizeof target)) > 0) {
		struct iovec part = {target, (size_t)n};
		note('d', 0, &part, 1, n);
	}
}

#define WRAP_SYNC(name) \
	int name(int fd) \
	{ \
		static int (*real)(int); \
		if (!real) \
			*(void **)&real = next(#name); \
		if (is_data(fd)) { \
			if (is_told(fd) || (fail_after && !--fail_after)) { \
				note('f', 0, NULL, 0, 0); \
				errno = EIO; \
				return -1; \
			} \
			int failed = real(fd); \
			if (!failed) \
				note('s', 0, NULL, 0, 0); \
			return failed; \
		} \
		int failed = real(fd); \
		if (!failed) \
			note_directory(fd); \
		return failed; \
	}
WRAP_SYNC(fdatasync)
WRAP_SYNC(fsync)
