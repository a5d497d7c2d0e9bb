/* Preloaded into the gate by tests: makes calls on the store's files fail, block or kill, and traces them.
 *
 * FAULT_MATCH    calls on files whose path contains this are the store's
 * FAULT_CONTROL  a file with one word: full, io (writes fail), sync (syncs fail), block (both wait); absent: nothing
 * FAULT_TRACE    a file that gets a line for each call of the store: "w" write, "s" sync, "t" truncate
 * FAULT_KILL_AT  the number of the call, from 1, at which the process ends
 * FAULT_KILL     before, torn (half a write done) or after that call
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum when { NEVER, BEFORE, TORN, AFTER };

static atomic_int calls;
static int kill_at = -1;
static enum when kill_when = NEVER;
static int trace_fd = -1;

__attribute__((constructor)) static void set_up(void) {
    const char *at = getenv("FAULT_KILL_AT"), *when = getenv("FAULT_KILL"), *trace = getenv("FAULT_TRACE");
    if (at) kill_at = atoi(at);
    if (when) kill_when = *when == 'b' ? BEFORE : *when == 't' ? TORN : AFTER;
    if (trace) trace_fd = open(trace, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int ours(int fd) {
    const char *match = getenv("FAULT_MATCH");
    char link[64], path[4096];
    if (!match) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return strstr(path, match) != NULL;
}

/* The control word's first letter, or 0. */
static char word(void) {
    const char *control = getenv("FAULT_CONTROL");
    char first = 0;
    if (!control) return 0;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, control, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0) return 0;
    if (syscall(SYS_read, fd, &first, 1) != 1) first = 0;
    syscall(SYS_close, fd);
    return first;
}

static void end(void) { _exit(137); }

/* What to do about a call of this kind: 0 go on, else the errno to fail with. Sets `last` where it is the last. */
static int before(int fd, char kind, int *last) {
    *last = 0;
    if (!ours(fd)) return 0;
    int saved = errno;
    while (word() == 'b') usleep(5000);
    char control = word();
    int n = atomic_fetch_add(&calls, 1) + 1;
    if (n == kill_at) {
        if (kill_when == BEFORE || (kill_when == TORN && kind != 'w')) end();
        *last = 1;
    }
    if (trace_fd >= 0) {
        char line[3] = {kind, '\n', 0};
        syscall(SYS_write, trace_fd, line, 2);
    }
    errno = saved;
    if (kind == 's') return control == 's' ? EIO : 0;
    return control == 'f' ? ENOSPC : control == 'i' ? EIO : 0;
}

#define NEXT(name) static __typeof__(name) *next; if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define WRITES(name, params, args, torn_args)                                  \
    ssize_t name params {                                                      \
        NEXT(name);                                                            \
        int last, error = before(fd, 'w', &last);                              \
        if (error) { errno = error; return -1; }                               \
        if (last && kill_when == TORN) { (void)!next torn_args; end(); }       \
        ssize_t result = next args;                                            \
        if (last) end();                                                       \
        return result;                                                         \
    }

WRITES(write, (int fd, const void *data, size_t n), (fd, data, n), (fd, data, n / 2))
WRITES(pwrite, (int fd, const void *data, size_t n, off_t at), (fd, data, n, at), (fd, data, n / 2, at))
WRITES(pwrite64, (int fd, const void *data, size_t n, off64_t at), (fd, data, n, at), (fd, data, n / 2, at))
WRITES(writev, (int fd, const struct iovec *data, int n), (fd, data, n), (fd, data, n / 2))
WRITES(pwritev, (int fd, const struct iovec *data, int n, off_t at), (fd, data, n, at), (fd, data, n / 2, at))

#define CHANGES(name, kind, params, args)                                      \
    int name params {                                                          \
        NEXT(name);                                                            \
        int last, error = before(fd, kind, &last);                             \
        if (error) { errno = error; return -1; }                               \
        int result = next args;                                                \
        if (last) end();                                                       \
        return result;                                                         \
    }

CHANGES(ftruncate, 't', (int fd, off_t size), (fd, size))
CHANGES(ftruncate64, 't', (int fd, off64_t size), (fd, size))
CHANGES(fallocate, 't', (int fd, int mode, off_t from, off_t size), (fd, mode, from, size))
CHANGES(fsync, 's', (int fd), (fd))
CHANGES(fdatasync, 's', (int fd), (fd))

int posix_fallocate(int fd, off_t from, off_t size) {
    NEXT(posix_fallocate);
    int last, error = before(fd, 't', &last);
    if (error) return error;
    int result = next(fd, from, size);
    if (last) end();
    return result;
}
