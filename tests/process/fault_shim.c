/* Fails the n-th call of a kind that SQLite makes, once or from then on.

   Preloaded (LD_PRELOAD), it stands before the C library's reads, writes, syncs and truncates of the
   journal's file and log. `shim_take_allocations` puts it before SQLite's allocations too. Nothing
   fails until `shim_arm`; calls are counted from there. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum kind { NONE, INPUT_OUTPUT, ALLOCATION };

static volatile int armed_kind = NONE, is_lasting;
static volatile long counted, failing;

void shim_arm(int kind, long number, int lasting) {
    counted = 0, failing = number, is_lasting = lasting, armed_kind = kind;
}

long shim_disarm(void) {
    armed_kind = NONE;
    return counted;
}

static int fails(int kind) {
    if (armed_kind != kind) return 0;
    long number = __sync_add_and_fetch(&counted, 1);
    return failing && (number == failing || (is_lasting && number > failing));
}

/* The journal's own file and log; not the lock beside it, and not what others have open. */
static int is_ours(int file) {
    char link[64], path[1024];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strstr(path, "/chats.db") && !strstr(path, "-owner");
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRAP(type, name, parameters, arguments)                            \
    type name parameters {                                                 \
        static __typeof__(&name) real;                                     \
        if (!real) real = REAL(name);                                      \
        if (armed_kind == INPUT_OUTPUT && is_ours(file) && fails(INPUT_OUTPUT)) { \
            errno = EIO;                                                   \
            return -1;                                                     \
        }                                                                  \
        return real arguments;                                             \
    }

WRAP(ssize_t, pread64, (int file, void *data, size_t size, off64_t at), (file, data, size, at))
WRAP(ssize_t, pwrite64, (int file, const void *data, size_t size, off64_t at), (file, data, size, at))
WRAP(ssize_t, pread, (int file, void *data, size_t size, off_t at), (file, data, size, at))
WRAP(ssize_t, pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at))
WRAP(int, fsync, (int file), (file))
WRAP(int, fdatasync, (int file), (file))
WRAP(int, ftruncate64, (int file, off64_t size), (file, size))
WRAP(int, ftruncate, (int file, off_t size), (file, size))

/* SQLite's `sqlite3_mem_methods`, which its interface keeps as it is. */
struct memory {
    void *(*allocate)(int);
    void (*release)(void *);
    void *(*resize)(void *, int);
    int (*size)(void *);
    int (*round_up)(int);
    int (*start)(void *);
    void (*stop)(void *);
    void *data;
};

static struct memory memory;

static void *allocate(int size) { return fails(ALLOCATION) ? NULL : memory.allocate(size); }

static void *resize(void *block, int size) {
    return fails(ALLOCATION) ? NULL : memory.resize(block, size);
}

/* Before the first connection. Returns 0, or the number of the step that failed. */
int shim_take_allocations(const char *library) {
    enum { SET_MALLOC = 4, GET_MALLOC = 5 };
    void *sqlite = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    if (!sqlite) return 1;
    int (*configure)(int, ...) = (int (*)(int, ...))dlsym(sqlite, "sqlite3_config");
    int (*shut_down)(void) = (int (*)(void))dlsym(sqlite, "sqlite3_shutdown");
    if (!configure || !shut_down) return 2;
    if (shut_down()) return 3;
    if (configure(GET_MALLOC, &memory)) return 4;
    struct memory ours = memory;
    ours.allocate = allocate;
    ours.resize = resize;
    return configure(SET_MALLOC, &ours) ? 5 : 0;
}
