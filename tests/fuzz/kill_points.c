/* Preloaded into a process that writes files: counts the system calls that change one, and kills the process in front of the n-th, or in its middle.
 *
 * gradc_kill_arm(n, torn): from now on; n = 0 only counts.  torn: a write puts half of its bytes there first.
 * gradc_kill_count(): how many there were.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static long armed = -1, point, torn;

void gradc_kill_arm(long n, long half) { point = 0; armed = n; torn = half; }
long gradc_kill_count(void) { return point; }

static int here(void) { return armed >= 0 && ++point == armed; }
static void die(void) { kill(getpid(), SIGKILL); for (;;) pause(); }

#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define PLAIN(name, types, names) int name types { REAL(name); if (here()) die(); return real names; }

PLAIN(rename, (const char *a, const char *b), (a, b))
PLAIN(renameat, (int d, const char *a, int e, const char *b), (d, a, e, b))
PLAIN(unlink, (const char *a), (a))
PLAIN(unlinkat, (int d, const char *a, int f), (d, a, f))
PLAIN(link, (const char *a, const char *b), (a, b))
PLAIN(mkdir, (const char *a, mode_t m), (a, m))
PLAIN(rmdir, (const char *a), (a))
PLAIN(fsync, (int f), (f))
PLAIN(fdatasync, (int f), (f))
PLAIN(ftruncate, (int f, off_t n), (f, n))
PLAIN(ftruncate64, (int f, off64_t n), (f, n))
PLAIN(fchmod, (int f, mode_t m), (f, m))

ssize_t write(int f, const void *p, size_t n)
{
    REAL(write);
    if (here()) {
        if (torn && n > 1) real(f, p, n / 2);
        die();
    }
    return real(f, p, n);
}

#define OPEN(name)                                                             \
    int name(const char *path, int flags, ...)                                 \
    {                                                                          \
        REAL(name);                                                            \
        va_list more;                                                          \
        va_start(more, flags);                                                 \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more);                                                          \
        if ((flags & (O_WRONLY | O_RDWR | O_CREAT)) && here()) die();          \
        return real(path, flags, mode);                                        \
    }
OPEN(open)
OPEN(open64)
