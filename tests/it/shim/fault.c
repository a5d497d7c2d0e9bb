/* Preloaded into the gate by tests: makes calls on the store's files fail, block or kill, and traces them.
 *
 * FAULT_MATCH    calls on files whose path contains this are the store's
 * FAULT_CONTROL  a file with one word: full, io (writes fail), sync (syncs fail), block (both wait); absent: nothing
 * FAULT_TRACE    a file that gets a line for each call of the store: "w" write, "s" sync, "t" truncate, "n" a note in
 *                the lock file, which follows a sync and needs none
 * FAULT_KILL_AT  the number of the call, from 1, at which the process ends
 * FAULT_KILL     before, torn (half a write done) or after that call; or lost: as if the power had gone before it, so
 *                that whatever was not synced by then is undone
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum when { NEVER, BEFORE, TORN, AFTER, LOST };

static atomic_int calls;
static int kill_at = -1;
static enum when kill_when = NEVER;
static int trace_fd = -1;

__attribute__((constructor)) static void set_up(void) {
    const char *at = getenv("FAULT_KILL_AT"), *when = getenv("FAULT_KILL"), *trace = getenv("FAULT_TRACE");
    if (at) kill_at = atoi(at);
    if (when) kill_when = *when == 'b' ? BEFORE : *when == 't' ? TORN : *when == 'l' ? LOST : AFTER;
    if (trace) trace_fd = open(trace, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

/* The path of a descriptor, or 0. */
static int path_of(int fd, char *path, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, size - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return 1;
}

static int ours(int fd) {
    const char *match = getenv("FAULT_MATCH");
    char path[4096];
    return match && path_of(fd, path, sizeof path) && strstr(path, match) != NULL;
}

/* What a change that is not synced yet has replaced, the latest first. */
struct undo {
    struct undo *next;
    char path[4096];
    off_t size, at;
    size_t kept;
    char data[];
};

static struct undo *undos;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Remembers the bytes from `at` on, up to `n` of them, and the size of the file. */
static void remember(int fd, off_t at, size_t n) {
    off_t here = lseek(fd, 0, SEEK_CUR), size = lseek(fd, 0, SEEK_END);
    lseek(fd, here, SEEK_SET);
    struct undo *undo = malloc(sizeof *undo + n);
    if (!undo || !path_of(fd, undo->path, sizeof undo->path)) abort();
    undo->size = size;
    undo->at = at;
    /* The descriptor may be for writing only. */
    int again = open(undo->path, O_RDONLY | O_CLOEXEC);
    ssize_t kept = again < 0 ? 0 : pread(again, undo->data, n, at);
    if (again >= 0) close(again);
    undo->kept = kept < 0 ? 0 : (size_t)kept;
    undo->next = undos;
    undos = undo;
}

/* The changes of a file are on disk now. */
static void forget(int fd) {
    char path[4096];
    if (!path_of(fd, path, sizeof path)) return;
    for (struct undo **link = &undos; *link;) {
        struct undo *undo = *link;
        if (strcmp(undo->path, path) == 0) {
            *link = undo->next;
            free(undo);
        } else {
            link = &undo->next;
        }
    }
}

static void undo_all(void) {
    for (struct undo *undo = undos; undo; undo = undo->next) {
        int fd = open(undo->path, O_WRONLY | O_CLOEXEC);
        if (fd < 0) continue;
        syscall(SYS_pwrite64, fd, undo->data, undo->kept, undo->at);
        syscall(SYS_ftruncate, fd, undo->size);
        close(fd);
    }
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
        if (kill_when == LOST) {
            /* Never unlocked: nothing is written after this. */
            pthread_mutex_lock(&lock);
            undo_all();
            end();
        }
        if (kill_when == BEFORE || (kill_when == TORN && kind != 'w')) end();
        *last = 1;
    }
    if (trace_fd >= 0) {
        char path[4096], *end = path_of(fd, path, sizeof path) ? strrchr(path, '.') : NULL;
        char line[3] = {kind == 'w' && end && strcmp(end, ".lock") == 0 ? 'n' : kind, '\n', 0};
        syscall(SYS_write, trace_fd, line, 2);
    }
    errno = saved;
    if (kind == 's') return control == 's' ? EIO : 0;
    return control == 'f' ? ENOSPC : control == 'i' ? EIO : 0;
}

/* Held while a call of the store is made, so that what it replaces can be remembered. */
static int guarded(int fd) {
    if (kill_when != LOST || !ours(fd)) return 0;
    pthread_mutex_lock(&lock);
    return 1;
}

static void release(int held) {
    if (held) pthread_mutex_unlock(&lock);
}

#define NEXT(name) static __typeof__(name) *next; if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define WRITES(name, params, args, torn_args, where, length)                   \
    ssize_t name params {                                                      \
        NEXT(name);                                                            \
        int last, error = before(fd, 'w', &last);                              \
        if (error) { errno = error; return -1; }                               \
        if (last && kill_when == TORN) { (void)!next torn_args; end(); }       \
        int held = guarded(fd);                                                \
        if (held) remember(fd, where, length);                                 \
        ssize_t result = next args;                                            \
        release(held);                                                         \
        if (last) end();                                                       \
        return result;                                                         \
    }

static size_t length_of(const struct iovec *data, int n) {
    size_t length = 0;
    for (int i = 0; i < n; i++) length += data[i].iov_len;
    return length;
}

#define HERE lseek(fd, 0, SEEK_CUR)
WRITES(write, (int fd, const void *data, size_t n), (fd, data, n), (fd, data, n / 2), HERE, n)
WRITES(pwrite, (int fd, const void *data, size_t n, off_t at), (fd, data, n, at), (fd, data, n / 2, at), at, n)
WRITES(pwrite64, (int fd, const void *data, size_t n, off64_t at), (fd, data, n, at), (fd, data, n / 2, at), at, n)
WRITES(writev, (int fd, const struct iovec *data, int n), (fd, data, n), (fd, data, n / 2), HERE, length_of(data, n))
WRITES(pwritev, (int fd, const struct iovec *data, int n, off_t at), (fd, data, n, at), (fd, data, n / 2, at), at,
       length_of(data, n))

/* What a truncation cuts off. */
static void remember_from(int fd, off_t size) {
    off_t here = lseek(fd, 0, SEEK_CUR), end = lseek(fd, 0, SEEK_END);
    lseek(fd, here, SEEK_SET);
    remember(fd, size, end > size ? (size_t)(end - size) : 0);
}

#define CHANGES(name, kind, params, args, remembering, done)                   \
    int name params {                                                          \
        NEXT(name);                                                            \
        int last, error = before(fd, kind, &last);                             \
        if (error) { errno = error; return -1; }                               \
        int held = guarded(fd);                                                \
        if (held) { remembering; }                                             \
        int result = next args;                                                \
        if (held && result == 0) { done; }                                     \
        release(held);                                                         \
        if (last) end();                                                       \
        return result;                                                         \
    }

CHANGES(ftruncate, 't', (int fd, off_t size), (fd, size), remember_from(fd, size), (void)0)
CHANGES(ftruncate64, 't', (int fd, off64_t size), (fd, size), remember_from(fd, size), (void)0)
CHANGES(fallocate, 't', (int fd, int mode, off_t from, off_t size), (fd, mode, from, size), remember(fd, 0, 0), (void)0)
CHANGES(fsync, 's', (int fd), (fd), (void)0, forget(fd))
CHANGES(fdatasync, 's', (int fd), (fd), (void)0, forget(fd))

int posix_fallocate(int fd, off_t from, off_t size) {
    NEXT(posix_fallocate);
    int last, error = before(fd, 't', &last);
    if (error) return error;
    int held = guarded(fd);
    if (held) remember(fd, 0, 0);
    int result = next(fd, from, size);
    release(held);
    if (last) end();
    return result;
}
