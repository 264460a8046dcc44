/* The one pool of threads of a process, and the matrix product that runs on it.  Built once per machine. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <time.h>

#include "gemm_type.h"
#include "runtime.h"
#include "streaming.h"

#define APART _Alignas(128) /* on a cache line of its own, and its neighbour's prefetch */

/* ---- Memory of a thread ---------------------------------------------------------------------------------------------- */

enum { HUGE_PAGE = 2 << 20 };
enum { PACKS = 0, PARTIALS = 1, ROWS = 2, BLOCKS = 3, KINDS = 4 };
typedef struct {
  void *memory[KINDS];
  size_t bytes[KINDS];
} workspace;
static pthread_key_t workspace_key;

#ifndef GRADC_OWN_MEMORY /* else an exported module has these, which ask its user */
static void *host_allocate(size_t alignment, size_t bytes) {
  void *memory = NULL;
  return posix_memalign(&memory, alignment, bytes) ? NULL : memory;
}
static void host_free(void *memory) { free(memory); }
#endif

static void free_workspace(void *mine) {
  workspace *w = mine;
  for (int i = 0; i < KINDS; i++) {
    host_free(w->memory[i]);
  }
  free(w);
}

/* Memory of this thread, kept until it ends; NULL if there is none. */
static void *scratch(int which, size_t bytes) {
  workspace *w = pthread_getspecific(workspace_key);
  if (!w) {
    w = calloc(1, sizeof *w);
    if (!w || pthread_setspecific(workspace_key, w)) {
      free(w);
      return NULL;
    }
  }
  if (w->bytes[which] < bytes) {
    host_free(w->memory[which]);
    const int large = (which == PACKS || which == BLOCKS) && bytes >= HUGE_PAGE / 2;
    void *const memory = host_allocate(large ? HUGE_PAGE : 4096, bytes);
#ifdef MADV_HUGEPAGE
    if (memory && large) {
      madvise(memory, bytes, MADV_HUGEPAGE); /* a product reads it in strides: addresses are to be found quickly */
    }
#endif
    w->memory[which] = memory;
    w->bytes[which] = memory ? bytes : 0;
  }
  return w->memory[which];
}

/* ---- A call ----------------------------------------------------------------------------------------------------------
 * Everything that Python asks of us comes through gradc_call, which keeps the process's state away from results: it sets
 * the floating-point environment and brings the caller's back, and it looks for signals.  It holds the GIL when it is
 * entered and when it returns, as an extension module's function does, so that it may run the handlers of signals between
 * two tasks, and where a long one asks: they are the user's own, and only one that raises (KeyboardInterrupt) ends the call.
 * Nothing below a call that ends so goes on: its thread jumps out, and what it wrote is for nobody to see. */

enum { POLL_NS = 100000000 };

typedef struct {
  gradc_ctx ctx; /* what the code that runs is given */
  int64_t slots[8];
  gradc_ieee before; /* the caller's floating-point environment */
  void *thread;      /* Python's, while we do not hold the GIL */
  int64_t poll_at;   /* when signals are looked for next; 0: by this thread never */
  int shares;        /* its job is given to workers too */
  int how;           /* to go on, or not */
  jmp_buf out;
} call;

static struct {
  void *(*release)(void);   /* PyEval_SaveThread */
  void (*acquire)(void *);  /* PyEval_RestoreThread */
  int (*run_handlers)(void); /* PyErr_CheckSignals: not 0 when one raised */
  pthread_t main_thread;    /* the only one in which handlers run */
} python;

static atomic_int forks; /* how many forks lie between this process and the one that loaded us */
static _Thread_local int inside;    /* a task is running on this thread */
static _Thread_local int owner;     /* this thread holds pool.caller */
static _Thread_local call *current; /* whose tasks this thread runs, unless it is a worker */

/* To within some milliseconds, but in a fifth of the time that the exact one takes. */
static inline int64_t roughly_now(void) {
  struct timespec t;
#if defined(CLOCK_MONOTONIC_COARSE)
  clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
#else
  clock_gettime(CLOCK_MONOTONIC, &t);
#endif
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

EXPORT void gradc_set_python(void *release, void *acquire, void *run_handlers, uint64_t main_thread) {
  python.release = (void *(*)(void))release;
  python.acquire = (void (*)(void *))acquire;
  python.run_handlers = (int (*)(void))run_handlers;
  python.main_thread = (pthread_t)main_thread;
}

/* Run an entry.  The error slots lie here and are given out at the end: a handler may call the same module meanwhile. */
EXPORT int gradc_call(gradc_entry entry, const gradc_ctx *given, void *const *buffers, const int64_t *dims, char *scratch, int64_t only) {
  call c = {.ctx = *given}, *const before = current;
  c.ctx.error = c.slots;
  c.ctx.call = &c;
  c.poll_at = pthread_equal(pthread_self(), python.main_thread) ? roughly_now() + POLL_NS : 0;
  c.thread = python.release();
  c.before = gradc_ieee_enter();
  int code = 1;
  if (!_setjmp(c.out)) {
    code = entry(&c.ctx, buffers, dims, scratch, only);
  }
  current = before;
  gradc_ieee_leave(c.before);
  python.acquire(c.thread);
  memcpy(given->error, c.slots, sizeof c.slots);
  return code;
}

/* An array of a call: its position in the table, its size, what its address is a multiple of, and whether it is refused where
 * another array has a byte of it. */
typedef struct {
  int64_t place, bytes, unit, exclusive;
} prepared_array;

/* A call at sizes that were bound before, of which only the addresses of its arrays are left to say. */
typedef struct {
  gradc_entry entry;
  const int64_t *dims;
  int64_t given, temps, lent, scratch; /* how many: addresses, temps in the workspace, arrays in others; byte of the workspace */
  int64_t exclusive;                   /* whether there are any of which no other array may have a byte */
  const prepared_array *arrays;        /* of each address */
  const int64_t *temp_places; /* position, byte of the workspace */
  const int64_t *lent_places; /* position, that of the array it lies in, byte of that */
} gradc_prepared;

enum { UNFIT = -1 }; /* an array has no memory, or is not aligned, or not what was bound: nothing was run */

/* Whether an exclusive array shares a byte with another one.
 * order: the arrays, as they lay in memory in an earlier call, which is mostly as they lie now. */
static int overlap(const gradc_prepared *p, const uintptr_t *addresses, uintptr_t *order) {
  for (int64_t gap = p->given; gap > 1;) {
    gap = gap > 2 ? gap * 5 / 11 : 1; /* Shell's sort, with the steps of Gonnet and Baeza-Yates */
    for (int64_t i = gap; i < p->given; i++) {
      const uintptr_t array = order[i];
      int64_t at = i;
      for (; at >= gap && addresses[order[at - gap]] > addresses[array]; at -= gap) {
        order[at] = order[at - gap];
      }
      order[at] = array;
    }
  }
  uintptr_t end = 0, exclusive_end = 0;
  for (int64_t i = 0; i < p->given; i++) {
    const prepared_array *const a = &p->arrays[order[i]];
    const uintptr_t start = addresses[order[i]], stop = start + (uintptr_t)a->bytes;
    if (!a->bytes) {
      continue;
    }
    if (start < (a->exclusive ? end : exclusive_end)) {
      return 1;
    }
    end = stop > end ? stop : end;
    exclusive_end = a->exclusive ? end : exclusive_end;
  }
  return 0;
}

/* What the entry gives, or 1 where it reported an error; `table` has the addresses of constants, and room for the others.
 * addresses: of the arrays, and then the order of an earlier call of theirs (a permutation). */
EXPORT int gradc_call_prepared(const gradc_prepared *p, const gradc_ctx *ctx, uintptr_t *addresses, void **table, char *workspace) {
  for (int64_t i = 0; i < p->given; i++) {
    const prepared_array *const a = &p->arrays[i];
    if (a->bytes && (!addresses[i] || addresses[i] % (uintptr_t)a->unit)) {
      return UNFIT;
    }
    table[a->place] = (void *)addresses[i];
  }
  if (p->exclusive && overlap(p, addresses, addresses + p->given)) {
    return UNFIT;
  }
  for (int64_t i = 0; i < p->temps; i++) {
    table[p->temp_places[2 * i]] = workspace + p->temp_places[2 * i + 1];
  }
  for (int64_t i = 0; i < p->lent; i++) {
    table[p->lent_places[3 * i]] = (char *)table[p->lent_places[3 * i + 1]] + p->lent_places[3 * i + 2];
  }
  const int code = gradc_call(p->entry, ctx, table, p->dims, workspace + p->scratch, -1);
  return code ? code : gradc_failed(ctx);
}

/* An array of NumPy's, as its ABI lays it out; read only where Python has found it so. */
typedef struct {
  intptr_t references;
  const void *type;
  const char *data;
  int rank;
  const intptr_t *shape, *strides;
  const void *base, *dtype;
  int flags;
} numpy_array;

/* What the arrays of a tuple have to be.  Of each: its dtype's object, its flags (NumPy's NPY_ARRAY_*), its rank, and its shape. */
typedef struct {
  void *(*item)(void *tuple, intptr_t index); /* PyTuple_GetItem */
  const void *type;                           /* the class of all of them */
  const int64_t *expected;
  int64_t count;
} gradc_array_types;

/* The addresses of a tuple's arrays, which has `count`: whether each is as expected. */
static int array_addresses(const gradc_array_types *types, void *tuple, uintptr_t *addresses) {
  const int64_t *e = types->expected;
  for (int64_t i = 0; i < types->count; i++) {
    const numpy_array *const a = types->item(tuple, i);
    const int64_t flags = e[1], rank = e[2];
    if (a->type != types->type || a->dtype != (const void *)(intptr_t)e[0] || a->rank != rank || (a->flags & flags) != flags) {
      return 0;
    }
    for (int64_t axis = 0; axis < rank; axis++) {
      if (a->shape[axis] != e[3 + axis]) {
        return 0;
      }
    }
    addresses[i] = (uintptr_t)a->data;
    e += 3 + rank;
  }
  return 1;
}

/* gradc_call_prepared on a tuple's arrays; UNFIT too where one is not as expected. */
EXPORT int gradc_call_arrays(const gradc_array_types *types, void *tuple, const gradc_prepared *p, const gradc_ctx *ctx, uintptr_t *addresses,
                             void **table, char *workspace) {
  return array_addresses(types, tuple, addresses) ? gradc_call_prepared(p, ctx, addresses, table, workspace) : UNFIT;
}

/* What reads the addresses of a tuple's tensors, which has `count`: torch's own function of its stable C interface, which takes the
 * at::Tensor that lies behind the head of each object. */
typedef struct {
  void *(*item)(void *tuple, intptr_t index); /* PyTuple_GetItem */
  int32_t (*data_pointer)(void *tensor, void **address);
  int64_t count;
} gradc_tensors;

typedef struct {
  intptr_t references;
  const void *type;
  void *tensor;
} torch_tensor;

/* gradc_call_prepared on a tuple's tensors, whose addresses come before the others. */
EXPORT int gradc_call_tensors(const gradc_tensors *tensors, void *tuple, const gradc_prepared *p, const gradc_ctx *ctx, uintptr_t *addresses,
                              void **table, char *workspace) {
  for (int64_t i = 0; i < tensors->count; i++) {
    torch_tensor *const object = tensors->item(tuple, i);
    void *address;
    if (tensors->data_pointer(&object->tensor, &address)) {
      return UNFIT;
    }
    addresses[i] = (uintptr_t)address;
  }
  return gradc_call_prepared(p, ctx, addresses, table, workspace);
}

/* ---- The pool ------------------------------------------------------------------------------------------------------
 * One job at a time.  A job is open from the moment its fields are set until every task has been handed out; a worker
 * takes part by adding 2 to `state` while bit 0 says open, and the caller returns once the job is closed and nobody is
 * inside.  A worker that comes late finds it closed (or a later one open, which is as good), so the caller never waits
 * for a thread that the system has not run yet. */

enum { MAX_THREADS = 1024, SPIN_NS = 30000, WAIT_NS = 50000000 };

/* A thread's share of a job's tasks, in a row; when it is done it helps with the others'.  So tasks that share memory, and the same
 * ones of the next job, are mostly the same thread's. */
typedef struct {
  APART atomic_int_fast64_t next; /* the next to hand out */
  int64_t end;
} seat;

static struct {
  pthread_mutex_t caller; /* held by the thread whose job it is */
  pthread_mutex_t lock;   /* of the two conditions */
  pthread_cond_t wake, done;
  int workers;
  int64_t spin_ns;
  pthread_t threads[MAX_THREADS];
  APART atomic_int wanted;         /* threads of a job, the caller's included */
  APART atomic_uint_fast64_t jobs; /* opened so far: what a waiting worker watches */
  atomic_int sleepers, stop;
  APART atomic_int state;
  atomic_int caller_sleeps;
  atomic_int ending; /* what a task of this job still computes is for nobody */
  APART int seats; /* of the threads of this job */
  int processor;   /* the caller's, on Linux */
  gradc_body body;
  const void *args;
  uint_fast64_t seen[MAX_THREADS]; /* jobs before a worker was started */
  seat seat[MAX_THREADS];          /* the caller's is the first */
} pool = {.caller = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

enum { GO_ON = 0, STOP = 1, LOST = 2 /* the process is a child that a handler made: it has no workers */ };

/* In a call that has run for a while: whether a handler of a signal ended it. */
static int look_for_signals(call *c) {
  if (!c || c->how != GO_ON || !c->poll_at || roughly_now() < c->poll_at) {
    return c ? c->how : GO_ON;
  }
  const int was_inside = inside, was_forks = atomic_load(&forks);
  void *const mine = pthread_getspecific(workspace_key);
  inside = 0; /* a handler may call a module, which has memory of its own */
  pthread_setspecific(workspace_key, NULL);
  gradc_ieee_leave(c->before);
  python.acquire(c->thread);
  const int raised = python.run_handlers();
  c->thread = python.release();
  c->before = gradc_ieee_enter();
  if (pthread_getspecific(workspace_key)) {
    free_workspace(pthread_getspecific(workspace_key));
  }
  pthread_setspecific(workspace_key, mine);
  inside = was_inside;
  c->poll_at = roughly_now() + POLL_NS;
  c->how = atomic_load(&forks) != was_forks && c->shares ? LOST : raised ? STOP : GO_ON;
  if (c->how == LOST) {
    c->slots[GRADC_LOCK] = 0; /* a worker may have held it */
  } else if (c->how == STOP && c->shares) { /* nobody gets another task, and who is at a long one hears of it */
    for (int i = 0; i < pool.seats; i++) {
      atomic_store(&pool.seat[i].next, pool.seat[i].end);
    }
    atomic_store(&pool.ending, 1);
  }
  return c->how;
}

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Tasks of the job until there are none, a seat's own first; c: the call, on the thread whose job it is. */
static int work(call *c, int own) {
  for (int i = 0; i < pool.seats; i++) {
    seat *const from = &pool.seat[(own + i) % pool.seats];
    int64_t task;
    while (atomic_load_explicit(&from->next, memory_order_relaxed) < from->end &&
           (task = atomic_fetch_add_explicit(&from->next, 1, memory_order_relaxed)) < from->end) {
      pool.body(pool.args, task);
      const int how = look_for_signals(c);
      if (how != GO_ON) {
        return how;
      }
    }
  }
  return GO_ON;
}

static void wait_for_job(uint_fast64_t seen) {
  if (pool.spin_ns > 0) {
    const int64_t end = now() + pool.spin_ns;
    do {
      for (int i = 0; i < 64; i++) {
        if (atomic_load_explicit(&pool.jobs, memory_order_acquire) != seen) {
          return;
        }
        pause_briefly();
      }
    } while (now() < end);
  }
  pthread_mutex_lock(&pool.lock);
  atomic_fetch_add(&pool.sleepers, 1);
  while (atomic_load(&pool.jobs) == seen) {
    pthread_cond_wait(&pool.wake, &pool.lock);
  }
  atomic_fetch_sub(&pool.sleepers, 1);
  pthread_mutex_unlock(&pool.lock);
}

/* A thread that was woken where the caller runs would take turns with it until the system moves one of them. */
static void leave_processor_of_caller(void) {
#ifdef __linux__
  const int here = sched_getcpu();
  cpu_set_t allowed, others;
  if (pool.spin_ns == 0 || here < 0 || here != pool.processor || sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
    return;
  }
  others = allowed;
  CPU_CLR((size_t)here, &others);
  if (CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof others, &others) == 0) {
    sched_setaffinity(0, sizeof allowed, &allowed);
  }
#endif
}

static void *worker(void *number) {
  const int own = (int)(intptr_t)number;
  uint_fast64_t seen = pool.seen[own];
  inside = 1;
  for (;;) {
    wait_for_job(seen);
    seen = atomic_load(&pool.jobs);
    if (atomic_load(&pool.stop)) {
      return NULL;
    }
    int state = atomic_load(&pool.state);
    while ((state & 1) && !atomic_compare_exchange_weak(&pool.state, &state, state + 2)) {
    }
    if (!(state & 1)) {
      continue;
    }
    leave_processor_of_caller();
    gradc_ieee_enter(); /* a thread is born with its maker's, and a library may have changed it since */
    work(NULL, own);
    if (atomic_fetch_sub(&pool.state, 2) == 2 && atomic_load(&pool.caller_sleeps)) {
      pthread_mutex_lock(&pool.lock);
      pthread_cond_signal(&pool.done);
      pthread_mutex_unlock(&pool.lock);
    }
  }
}

/* Bring the workers up to their number; fewer if the system gives no more. */
static void start_workers(void) {
  const int wanted = atomic_load(&pool.wanted) - 1;
  if (pool.workers >= wanted) {
    return;
  }
  sigset_t all, before; /* signals are for the threads that the user made */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  /* They count from the last job, so that one which starts late still sees the job that it was started for. */
  for (int own = pool.workers + 1; own <= wanted; own++) {
    pool.seen[own] = atomic_load(&pool.jobs);
    if (pthread_create(&pool.threads[own - 1], NULL, worker, (void *)(intptr_t)own) != 0) {
      break;
    }
    pool.workers = own;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static int run_here(call *c, int64_t tasks, gradc_body body, const void *args) {
  call *const before = current;
  current = c ? c : before;
  int how = GO_ON;
  for (int64_t task = 0; task < tasks && how == GO_ON; task++) {
    body(args, task);
    how = look_for_signals(c);
  }
  current = before;
  return how;
}

/* Close the job, and wait until nobody is at a task of it, looking for signals; what became of the call. */
static int wait_for_workers(call *c, int how) {
  if (how == LOST) {
    return how;
  }
  atomic_fetch_and(&pool.state, ~1);
  const int64_t end = now() + SPIN_NS;
  while (atomic_load_explicit(&pool.state, memory_order_acquire) != 0) {
    if (pool.spin_ns > 0 && now() < end) {
      for (int i = 0; i < 32 && atomic_load_explicit(&pool.state, memory_order_acquire) != 0; i++) {
        pause_briefly();
      }
      continue;
    }
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += WAIT_NS;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.caller_sleeps, 1);
    int code = 0;
    while (code == 0 && atomic_load(&pool.state) != 0) {
      code = pthread_cond_timedwait(&pool.done, &pool.lock, &until);
    }
    atomic_store(&pool.caller_sleeps, 0);
    pthread_mutex_unlock(&pool.lock);
    if (code != 0 && (how = look_for_signals(c)) == LOST) {
      return how;
    }
  }
  return how;
}

/* Run a job; whether the call has to end, which is the caller's to do. */
static int run_tasks(const gradc_ctx *ctx, int64_t tasks, gradc_body body, const void *args) {
  call *c = inside ? NULL : ctx->call;
  if (tasks <= 1 || inside || atomic_load_explicit(&pool.wanted, memory_order_relaxed) <= 1 || pthread_mutex_trylock(&pool.caller) != 0) {
    return run_here(c, tasks, body, args); /* also when another thread's job has the workers: they are busy */
  }
  owner = 1;
  if (c) {
    c->shares = 1;
  }
  start_workers();
  pool.seats = pool.workers + 1;
#ifdef __linux__
  pool.processor = sched_getcpu();
#endif
  pool.body = body;
  pool.args = args;
  for (int i = 0; i < pool.seats; i++) {
    atomic_store_explicit(&pool.seat[i].next, tasks * i / pool.seats, memory_order_relaxed);
    pool.seat[i].end = tasks * (i + 1) / pool.seats;
  }
  atomic_store_explicit(&pool.ending, 0, memory_order_relaxed);
  atomic_store(&pool.state, 1);
  atomic_fetch_add(&pool.jobs, 1);
  const int sleepers = atomic_load(&pool.sleepers);
  if (sleepers > 0) {
    /* Who has looked at `jobs` under the lock is asleep once we have had it; woken after that, nobody runs into it. */
    pthread_mutex_lock(&pool.lock);
    pthread_mutex_unlock(&pool.lock);
    if (tasks - 1 >= sleepers) {
      pthread_cond_broadcast(&pool.wake);
    } else {
      for (int64_t i = 0; i < tasks - 1; i++) {
        pthread_cond_signal(&pool.wake);
      }
    }
  }
  call *const before = current;
  current = c;
  inside = 1;
  const int how = wait_for_workers(c, work(c, 0));
  inside = owner = 0;
  current = before;
  if (c) {
    c->shares = 0;
  }
  if (how == LOST) { /* the workers' tasks are the parent's, and the pool is as new */
    gradc_report(ctx, GRADC_FORKED, -1, 0, 0, 0);
  } else {
    pthread_mutex_unlock(&pool.caller);
  }
  return how;
}

/* Out of everything below gradc_call, where the call has to end. */
static void leave_if(int how, const gradc_ctx *ctx) {
  if (how != GO_ON) {
    _longjmp(((call *)ctx->call)->out, 1);
  }
}

EXPORT void gradc_parallel_for(const gradc_ctx *ctx, int64_t tasks, gradc_body body, const void *args) {
  leave_if(run_tasks(ctx, tasks, body, args), ctx);
}

/* gradc_parallel_for as an entry: the body and its arguments, the number of tasks. */
EXPORT int gradc_run_tasks(const gradc_ctx *ctx, void *const *buffers, const int64_t *dims, char *scratch, int64_t only) {
  (void)scratch, (void)only;
  gradc_body body;
  memcpy(&body, &buffers[0], sizeof body);
  gradc_parallel_for(ctx, dims[0], body, buffers[1]);
  return 0;
}

/* Use this many threads from the next job on; cpus is how many can run at once: beyond that, spinning takes time from work.
 * -1: not now, this thread is in the middle of a job (it is the handler of a signal that asks). */
EXPORT int gradc_set_threads(int threads, int cpus) {
  if (owner) {
    return -1;
  }
  threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
  pthread_mutex_lock(&pool.caller);
  if (threads != atomic_load(&pool.wanted)) {
    atomic_store(&pool.stop, 1);
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.jobs, 1);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    for (int i = 0; i < pool.workers; i++) {
      pthread_join(pool.threads[i], NULL);
    }
    pool.workers = 0;
    atomic_store(&pool.stop, 0);
    pool.spin_ns = threads <= cpus ? SPIN_NS : 0;
    atomic_store(&pool.wanted, threads);
  }
  pthread_mutex_unlock(&pool.caller);
  return 0;
}

EXPORT int gradc_threads(void) { return atomic_load(&pool.wanted); }

static void after_fork(void) {
  /* Only the forking thread is here; it was not inside a task. */
  const pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  const pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
  pool.caller = pool.lock = mutex;
  pool.wake = pool.done = condition;
  pool.workers = 0;
  atomic_store(&pool.sleepers, 0);
  atomic_store(&pool.stop, 0);
  atomic_store(&pool.state, 0);
  atomic_store(&pool.caller_sleeps, 0);
  python.main_thread = pthread_self();
  atomic_fetch_add(&forks, 1);
}

/* ---- The matrix product --------------------------------------------------------------------------------------------
 * Parts of the result are the threads'; what is added up in which order the shape alone decides (where a result is small and k is
 * long, stretches of k, whose partial results are added in order), so that the bits do not depend on the number of threads. */

#define T float
#define GEMM_SIZE 4
#define GEMM(name) sgemm_##name
#include "gemm.h"

static struct {
  int known;
  const gemm_type *of[2][2];
} gemm_known[GEMM_TYPES] = { /* by type */
  [GEMM_F32] = {1, {{&sgemm_type, &sgemm_type}, {&sgemm_type, &sgemm_type}}},
};

/* The kernels of a type, before any call that has products of it. */
EXPORT void gradc_add_kernels(const gemm_kernels *more) {
  memcpy(gemm_known[more->type].of, more->of, sizeof more->of);
  gemm_known[more->type].known = 1;
}

static char *own_memory(const gradc_ctx *ctx, int which, int64_t bytes) {
  char *memory = scratch(which, bytes > 0 ? (size_t)bytes : 1);
  if (!memory) {
    gradc_report(ctx, GRADC_OUT_OF_MEMORY, 0, 0, bytes, 0);
  }
  return memory;
}

EXPORT char *gradc_local(const gradc_ctx *ctx, int64_t bytes) { return own_memory(ctx, ROWS, bytes); }

EXPORT char *gradc_block(const gradc_ctx *ctx, int64_t bytes) { return own_memory(ctx, BLOCKS, bytes); }

EXPORT int gradc_stopped(const gradc_ctx *ctx) {
  (void)ctx;
  return current ? look_for_signals(current) != GO_ON : atomic_load_explicit(&pool.ending, memory_order_relaxed);
}

#ifndef GRADC_OWN_MEMORY /* else an exported module does it first, which constructors may call before ours */
__attribute__((constructor))
#endif
static void set_up(void) {
  pthread_key_create(&workspace_key, free_workspace);
  pthread_atfork(NULL, NULL, after_fork);
}

/* The products of one call, batch x splits of them, and how each is cut: into parts of the result, each by one thread; a part into
 * slabs, of which both operands are packed one after the other; a slab into tiles. */
typedef struct {
  const gradc_ctx *ctx;
  const gemm_type *type;
  gradc_matrix a, b;
  char *c;
  int64_t batch, m, n, k;
  int64_t c_row, c_col;       /* of what the products write: the result, or partials */
  int64_t rows, width, apart_rows; /* of the result in each batch, their elements, and from one to the next */
  int64_t each, apart; /* see gemm_result */
  int64_t splits, step, group; /* `group` products to a task */
  int64_t part_m, part_n, slab_m, slab_n, slab_k, tile_m, tile_n, block_k;
  int rows_in_place, columns_in_place; /* a, b are read where they are */
  char *partials;                      /* [splits][batch], each as c */
  int accumulate;
  atomic_int *unfit; /* set where an operand has elements that the type's kernels cannot multiply */
} product;

/* Product `number` of a call: its operands and result from step `from` on. */
static char *one_product(const product *p, int64_t number, gradc_matrix *a, gradc_matrix *b, int64_t *from, int *add) {
  const int64_t batch = number / p->splits, split = number % p->splits, size = p->type->size;
  *from = split * p->step;
  *a = p->a, *b = p->b;
  a->data += (batch * a->batch + *from * a->col) * a->bytes;
  b->data += (batch * b->batch + *from * b->row) * b->bytes;
  if (a->scale) {
    a->scale += batch * a->scale_batch * size;
  }
  if (b->scale) {
    b->scale += batch * b->scale_batch * size;
  }
  *add = p->accumulate && p->splits == 1;
  return p->splits > 1 ? p->partials + (split * p->batch + batch) * p->m * p->n * size : p->c + batch * p->rows * p->apart_rows * size;
}

/* Steps of a panel with what it is filled up with, and heads. */
static int64_t filled(const gemm_type *type, int64_t steps) { return whole(steps, type->whole) + ceil_div(steps, type->kc) * type->head; }

static void *packs_or_report(const product *p, int64_t bytes) {
  void *packs = scratch(PACKS, bytes > 0 ? (size_t)bytes : 1);
  if (!packs) {
    gradc_report(p->ctx, GRADC_OUT_OF_MEMORY, -1, 0, bytes, 0);
  }
  return packs;
}

/* ---- One row, or few of integers */

static void row_task(const void *args, int64_t task) {
  const product *p = args;
  const int64_t tiles = ceil_div(p->n, p->tile_n), last = at_most((task / tiles + 1) * p->group, p->batch * p->splits);
  const int64_t j = task % tiles * p->tile_n, cols = at_most(p->tile_n, p->n - j);
  void *packs = packs_or_report(p, p->type->rows_bytes(p->m, at_most(p->step, GEMM_STRETCH)));
  for (int64_t number = task / tiles * p->group; packs && number < last; number++) {
    gradc_matrix a, b;
    int64_t from;
    int add;
    char *c = one_product(p, number, &a, &b, &from, &add) + j * p->c_col * p->type->size;
    b.data += j * b.col * b.bytes;
    for (int64_t at = from, end = at_most(from + p->step, p->k); at < end; at += GEMM_STRETCH, add = 1) {
      const int64_t some = at_most(end - at, GEMM_STRETCH);
      if (at > from && gradc_stopped(p->ctx)) {
        return;
      }
      p->type->rows(p->m, cols, some, at, j, &a, &b, c, p->c_row, p->c_col, add, packs);
      a.data += some * a.col * a.bytes;
      b.data += some * b.row * b.bytes;
    }
  }
}

/* ---- Several rows
 *
 * What one thread has written is slow to read for another where they share no cache, so each packs what it multiplies. */

/* Rows from i0, columns from j0 and steps from p0 on of a product: both operands where they are, and in panels. */
typedef struct {
  gradc_matrix a, b;
  int64_t i0, p0, j0, rows, cols, steps;
  gemm_panels left, right;
} slab;

/* Rows and columns that a part has in panels; where columns are read in place, the last may fill no vector. */
static int64_t packed_rows(const product *p) { return p->rows_in_place ? 0 : p->slab_m; }
static int64_t packed_columns(const product *p) { return !p->columns_in_place ? p->slab_n : p->n % p->type->lanes ? p->type->nr : 0; }

static int64_t bytes_of_steps(const product *p) { return filled(p->type, p->slab_k) * p->type->packed; }

/* Bytes of the panels of a slab. */
static int64_t bytes_of_slab(const product *p) { return (packed_columns(p) + packed_rows(p)) * bytes_of_steps(p); }

/* Pack a slab's operands, b unless it is packed already. */
static void pack_slab(const product *p, slab *s, char *packs, int has_b) {
  const gemm_type *type = p->type;
  const int64_t along = filled(type, s->steps);
  char *const packed_b = packs, *const packed_a = packs + packed_columns(p) * bytes_of_steps(p);
  const int columns_in_place = p->columns_in_place && s->cols % type->lanes == 0;
  int unfit = 0;
  s->left = p->rows_in_place ? (gemm_panels){s->a.data, type->mr * s->a.row, s->a.row, 1} : (gemm_panels){packed_a, along * type->mr, 1, type->mr};
  s->right = columns_in_place ? (gemm_panels){s->b.data, type->nr, 1, s->b.row} : (gemm_panels){packed_b, along * type->nr, 1, type->nr};
  if (!p->rows_in_place) {
    unfit |= type->pack_rows(packed_a, &s->a, s->i0, s->p0, 0, s->rows, s->steps);
  }
  if (!columns_in_place && !has_b) {
    unfit |= type->pack_columns(packed_b, &s->b, s->p0, s->j0, 0, s->cols, s->steps);
  }
  if (unfit) {
    atomic_store_explicit(p->unfit, 1, memory_order_relaxed);
  }
}

/* c begins at the product's row 0 and column 0; tiles that are neighbours share columns of b. */
static void multiply_slab(const product *p, const slab *s, char *c, int add) {
  const int64_t size = p->type->size;
  for (int64_t j = 0; j < s->cols; j += p->tile_n) {
    for (int64_t i = 0; i < s->rows; i += p->tile_m) {
      gemm_panels left = s->left, right = s->right;
      left.data += i / p->type->mr * left.panel * p->type->packed;
      right.data += j / p->type->nr * right.panel * p->type->packed;
      const gemm_result to = {c + (s->i0 + i) * p->c_row * size, p->c_row, p->c_col, p->each, p->apart};
      p->type->block(at_most(p->tile_m, s->rows - i), at_most(p->tile_n, s->cols - j), s->steps, p->block_k, left, right, to, s->j0 + j, add);
    }
  }
}

/* Rows from i0 and columns from j0 on of product `number`. */
static void multiply_part(const product *p, int64_t number, int64_t i0, int64_t j0, char *packs) {
  gradc_matrix a, b;
  int64_t from;
  int accumulate;
  char *c = one_product(p, number, &a, &b, &from, &accumulate);
  const int64_t last_i = at_most(i0 + p->part_m, p->m), last_j = at_most(j0 + p->part_n, p->n), end = at_most(from + p->step, p->k);
  for (int64_t j = j0, cols; j < last_j; j += cols) {
    cols = at_most(p->slab_n, last_j - j);
    if (p->columns_in_place && cols > p->type->lanes) { /* what fills no vector is packed by itself */
      cols = cols / p->type->lanes * p->type->lanes;
    }
    for (int64_t at = from; at < end; at += p->slab_k) {
      for (int64_t i = i0; i < last_i; i += p->slab_m) {
        if ((i > i0 || at > from || j > j0) && gradc_stopped(p->ctx)) {
          return;
        }
        slab s = {.a = a, .b = b, .i0 = i, .p0 = at, .j0 = j};
        s.rows = at_most(p->slab_m, last_i - i), s.cols = cols, s.steps = at_most(p->slab_k, end - at);
        s.a.data += (i * a.row + (at - from) * a.col) * a.bytes;
        s.b.data += ((at - from) * b.row + j * b.col) * b.bytes;
        pack_slab(p, &s, packs, i > i0);
        multiply_slab(p, &s, c, accumulate || at > from);
      }
    }
  }
}

enum { GEMM_ASKED = 1 << 16 }; /* bytes of a matrix that is asked for whole */

/* Of functions that are called, gcc takes those that only ask for memory to have no effect, and drops the calls. */
static inline __attribute__((always_inline)) void ask_for_matrix(const char *data, int64_t step, int64_t bytes, int64_t number) {
  for (int64_t at = 0; step == bytes && bytes <= GEMM_ASKED && at < bytes; at += 64) {
    __builtin_prefetch(data + number * step + at);
  }
}

/* Ask for a small product while the one before it is multiplied: its rows end before a processor sees how they go on. */
static inline __attribute__((always_inline)) void ask_for_product(const product *p, int64_t number) {
  const int64_t size = p->type->size;
  ask_for_matrix(p->a.data, p->a.batch * p->a.bytes, p->m * p->k * p->a.bytes, number);
  ask_for_matrix(p->b.data, p->b.batch * p->b.bytes, p->k * p->n * p->b.bytes, number);
  ask_for_matrix(p->c, p->m * p->n * size, p->m * p->n * size, number);
}

/* Some products, or a part of one. */
static void product_task(const void *args, int64_t task) {
  const product *p = args;
  const int64_t parts_m = ceil_div(p->m, p->part_m), parts = parts_m * ceil_div(p->n, p->part_n), part = task % parts;
  const int64_t first = task / parts * p->group, last = at_most(first + p->group, p->batch * p->splits);
  char *packs = packs_or_report(p, bytes_of_slab(p));
  for (int64_t number = first; packs && number < last && !(number > first && gradc_stopped(p->ctx)); number++) {
    if (number + 1 < last && p->splits == 1) {
      ask_for_product(p, number + 1);
    }
    multiply_part(p, number, part % parts_m * p->part_m, part / parts_m * p->part_n, packs);
  }
}

enum { ADD_CHUNK = 8192 };

#define ADD_PARTIALS(T)                                                                                                          \
  for (int64_t i = first, end; i < last; i = end) { /* elements of one row */                                                    \
    end = at_most(last, (i / p->width + 1) * p->width);                                                                          \
    T *to = (T *)p->c + i / p->width * p->apart_rows + i % p->width;                                                             \
    for (int64_t x = i; x < end; x++, to++) {                                                                                    \
      const T *part = (const T *)p->partials + x;                                                                                \
      T sum = part[0];                                                                                                           \
      for (int64_t s = 1; s < p->splits; s++) {                                                                                  \
        sum += part[s * all];                                                                                                    \
      }                                                                                                                          \
      *to = p->accumulate ? *to + sum : sum;                                                                                     \
    }                                                                                                                            \
  }

static void add_task(const void *args, int64_t task) {
  const product *p = args;
  const int64_t all = p->batch * p->m * p->n, first = task * ADD_CHUNK, last = first + ADD_CHUNK < all ? first + ADD_CHUNK : all;
  if (p->type->integers) {
    ADD_PARTIALS(uint32_t)
  } else if (p->type->size == 4) {
    ADD_PARTIALS(float)
  } else {
    ADD_PARTIALS(double)
  }
}

static gradc_matrix transpose(const gradc_matrix *in) {
  gradc_matrix t = *in;
  t.row = in->col, t.col = in->row;
  t.scale_row = in->scale_col, t.scale_col = in->scale_row;
  t.row_per = in->col_per, t.col_per = in->row_per;
  return t;
}

static gradc_places transposed_places(const gradc_matrix *in) {
  return in->places ? (gradc_places){in->places->col, in->places->row, in->places->end} : (gradc_places){0};
}

EXPORT int gradc_vector_bytes(void) { return GEMM_BYTES; }

/* What multiplies two operands of bf16, on which the bits depend: 0: the kernels of f32, 1: vectors of pairs, 2: tiles. */
EXPORT int gradc_bf16_product(void) {
  const gemm_type *type = gemm_known[GEMM_BF16].of[0][0];
  return !type ? 0 : type->mr == GEMM_MR ? 1 : 2;
}

/* A gradc_read: bf16 as f32. */
EXPORT void gradc_read_bf16(void *restrict to, const void *restrict from, int64_t count, int64_t to_step, int64_t from_step) {
  if (to_step == 1 && from_step == 1) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
      ((uint32_t *)to)[i] = (uint32_t)((const uint16_t *)from)[i] << 16;
    }
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    ((uint32_t *)to)[i * to_step] = (uint32_t)((const uint16_t *)from)[i * from_step] << 16;
  }
}

enum { GEMM_FEW = 2 * GEMM_MR, GEMM_TILES = 16 };

/* Packing an element takes as long as so many multiplications and additions; one that is read another way than it lies, twice as long. */
enum { GEMM_PACKING = 24 };

static double packing(const product *p, const gradc_matrix *in, int in_place) {
  return in_place ? 0 : (in->places || in->read || in->scale ? 2 : 1) * GEMM_PACKING * p->type->speed;
}

/* How each of so many products is cut into parts for so many threads: whole panels, so that the slowest thread is soonest done. */
static void cut_parts(product *p, int64_t products, int64_t threads) {
  const int64_t mr = p->type->mr, nr = p->type->nr;
  const double of_a = packing(p, &p->a, p->rows_in_place), of_b = packing(p, &p->b, p->columns_in_place);
  double least = 0;
  for (int64_t high = 1; high <= threads; high++) {
    for (int64_t each = 1; each <= 2; each++) { /* parts for a thread */
      const int64_t part_m = whole(ceil_div(p->m, high), mr), part_n = whole(ceil_div(p->n, ceil_div(threads * each, products * high)), nr);
      const int64_t parts = products * ceil_div(p->m, part_m) * ceil_div(p->n, part_n);
      const double time = (double)(ceil_div(parts, threads) * part_m * part_n) * (1 + of_a / (double)part_n + of_b / (double)part_m);
      if (least == 0 || time < least) {
        least = time, p->part_m = part_m, p->part_n = part_n;
      }
    }
  }
}

enum { GEMM_LONG = 2048 }; /* rows or columns of a slab that are read where they are: we look for signals between two slabs */

/* How slabs and tiles are cut, which the bits do not depend on: both are whole panels, a slab's steps whole blocks. */
static void cut_slabs(product *p) {
  const int64_t mr = p->type->mr, nr = p->type->nr, kc = p->type->kc, elements = p->type->packs / p->type->packed, steps = at_most(p->step, p->k);
  const int64_t most = elements / at_most(steps, kc); /* rows and columns in panels */
  p->slab_n = p->columns_in_place ? at_most(p->part_n, whole(GEMM_LONG, nr)) : at_most(p->part_n, (p->rows_in_place ? most : most * 3 / 4) / nr * nr);
  p->slab_m = p->rows_in_place ? at_most(p->part_m, whole(GEMM_LONG, mr)) : at_most(p->part_m, (most - packed_columns(p)) / mr * mr);
  if (!p->rows_in_place && p->slab_m > 0) { /* slabs of as many rows each */
    p->slab_m = whole(ceil_div(p->part_m, ceil_div(p->part_m, p->slab_m)), mr);
  }
  const int64_t packed = packed_rows(p) + packed_columns(p);
  p->slab_k = at_most(steps, packed ? elements / packed / kc * kc : GEMM_STRETCH);
  if (p->slab_k == 0) {
    p->slab_k = steps;
  }
  /* Rows that lie far apart displace each other from the caches; columns of a result that do are to be written rarely. */
  p->block_k = p->type->packed < p->type->size ? kc : p->columns_in_place && p->b.row > 4 * nr ? GEMM_RUN : p->c_col != 1 ? 2 * kc : kc;
  p->tile_m = 8 * mr;
  p->tile_n = 8 * nr;
}

static int of_bf16(const gradc_matrix *a, const gradc_matrix *b) { return a->dtype == GRADC_BF16 && b->dtype == GRADC_BF16 && !a->scale && !b->scale; }

/* The kernels for all products with a result of a dtype, and for one. */
static const gemm_type *every(int dtype) { return gemm_known[dtype == GRADC_I32 ? GEMM_I8 : dtype == 32 ? GEMM_F32 : GEMM_F64].of[0][0]; }
static const gemm_type *type_of(int dtype, const gradc_matrix *a, const gradc_matrix *b) {
  if (dtype == GRADC_I32) {
    return gemm_known[GEMM_I8].of[a->dtype == GRADC_I8][b->dtype == GRADC_I8];
  }
  const gemm_type *bf16 = of_bf16(a, b) ? gemm_known[GEMM_BF16].of[0][0] : NULL;
  return bf16 ? bf16 : every(dtype);
}

/* Whether the kernels for a product were added. */
static int has_kernels(int dtype, const gradc_matrix *a, const gradc_matrix *b) {
  return gemm_known[dtype == GRADC_I32 ? GEMM_I8 : dtype == 64 ? GEMM_F64 : of_bf16(a, b) ? GEMM_BF16 : GEMM_F32].known;
}

/* Where few tiles have long sums, these are cut, too; what decides that is part of the order of additions. */
static void split(product *p) {
  const int64_t large = p->batch * ceil_div(p->m, 256) * ceil_div(p->n, 512) >= 64;
  const int64_t tiles = p->batch * ceil_div(p->m, large ? 256 : 128) * ceil_div(p->n, large ? 512 : 256);
  p->splits = 1;
  p->step = p->k;
  if (tiles < GEMM_TILES && p->k >= 4096) {
    p->step = whole(ceil_div(p->k, at_most(GEMM_TILES / tiles, p->k / 2048)), 64);
    p->splits = ceil_div(p->k, p->step);
  }
}

static double flops_of(const product *p) { return 2.0 * (double)p->m * (double)p->n * (double)p->step / p->type->speed; /* as f32 would take */ }
enum { GEMM_SMALL = 4000000 }; /* operations of a product that one thread is left to, */
enum { GEMM_GROUP = 4000000 }; /* and of a task of several products */

/* The most bytes of panels of a part of a product by the kernels of a type, whichever side is its rows. */
static int64_t packs_of(const gemm_type *type, int64_t m, int64_t n, int64_t k) {
  const int64_t upright = whole(m, type->mr) + whole(n, type->nr), turned = whole(n, type->mr) + whole(m, type->nr);
  const int64_t sides = upright > turned ? upright : turned, elements = type->packs / type->packed;
  const int64_t panels = at_most(sides, elements / at_most(k, type->kc)) * filled(type, k);
  return (k < type->kc ? panels : at_most(panels, elements + elements / type->kc * type->head)) * type->packed;
}

/* The most bytes that a thread keeps for a product by the kernels of a type, whatever the number of threads. */
EXPORT int64_t gradc_pack_bytes(int kernels, int64_t m, int64_t n, int64_t k) {
  const gemm_type *type = gemm_known[kernels == GEMM_BF16 ? GEMM_F32 : kernels].of[0][0];
  if (m <= 0 || n <= 0 || k <= 0) {
    return 0;
  }
  const int64_t plain = packs_of(type, m, n, k);
  if (type->integers) { /* few rows, or all of them */
    const int64_t few = type->rows_bytes(type->most_rows, at_most(k, GEMM_STRETCH));
    return few > plain ? few : plain;
  }
  if (m == 1 || n == 1) {
    return type->rows_bytes(1, k);
  }
  const gemm_type *bf16 = kernels == GEMM_BF16 ? gemm_known[GEMM_BF16].of[0][0] : NULL; /* or those of f32: see `unfit` */
  const int64_t others = bf16 ? packs_of(bf16, m, n, k) : 0;
  return others > plain ? others : plain;
}

/* A product by the kernels of a type; whether they could multiply all its elements, else the result is undefined. */
static int multiply_as(const gemm_type *type, const gradc_ctx *ctx, int64_t batch, int64_t m, int64_t n, int64_t k, const gradc_matrix *a,
                       const gradc_matrix *b, void *c, int64_t c_row, int accumulate) {
  const int64_t size = type->size;
  atomic_int unfit = 0;
  product p = {.ctx = ctx, .unfit = &unfit, .type = type, .a = *a, .b = *b, .c = c, .batch = batch, .m = m, .n = n, .k = k, .c_col = 1, .rows = m, .width = n, .apart_rows = c_row, .accumulate = accumulate};
  /* The long side belongs into the vectors, and what is read where it is into a kernel's columns: the product of the transposes. */
  const int as_they_lie = type->packed == type->size; /* else no kernel takes them from where they are */
  const int tall = type->integers ? type->few(n, &(gradc_matrix){.row = a->col, .col = a->row})
                                  : n <= GEMM_FEW && k >= 4 * n && m <= 4 * type->nr && a->row == 1 && a->col <= 4 * type->nr && !a->read && !a->scale;
  const gradc_places turned[2] = {transposed_places(a), transposed_places(b)};
  if (n < m && (n == 1 || 4 * n * size <= GEMM_BYTES || tall)) {
    p.a = transpose(b), p.b = transpose(a);
    p.a.places = b->places ? &turned[1] : 0, p.b.places = a->places ? &turned[0] : 0;
    p.m = n, p.n = m, p.c_row = 1;
    m = p.m, n = p.n;
    p.type = type = type->turned ? type->turned : type;
  }
  const int in_dots = type->few && type->few(m, &p.b) && !(type->integers && (p.a.places || p.b.places));
  split(&p);
  *(p.c_row ? &p.c_col : &p.c_row) = p.splits > 1 ? p.width : c_row;
  p.partials = p.splits > 1 ? scratch(PARTIALS, (size_t)(p.splits * batch * m * n * size)) : NULL;
  if (p.splits > 1 && !p.partials) {
    gradc_report(ctx, GRADC_OUT_OF_MEMORY, -1, 0, p.splits * batch * m * n * size, 0);
    return 1;
  }
  /* Windows of several arrays are the columns of one product, so that what they are multiplied with is packed once. */
  gradc_places joined;
  if (batch > 1 && m > 1 && n >= type->nr && p.b.places && p.a.batch == 0 && !p.a.scale && p.c_col == 1 && p.b.places->col.count < GRADC_PARTS) {
    joined = *p.b.places;
    memmove(joined.col.size + 1, joined.col.size, sizeof joined.col.size - sizeof *joined.col.size);
    memmove(joined.col.step + 1, joined.col.step, sizeof joined.col.step - sizeof *joined.col.step);
    joined.col.count++, joined.col.size[0] = batch, joined.col.step[0] = p.b.batch;
    p.b.places = &joined;
    p.each = n, p.apart = m * p.c_row - n;
    p.n = n *= batch, p.batch = batch = 1;
  }
  const int64_t products = batch * p.splits;
  const double flops = flops_of(&p);
  p.group = flops >= GEMM_GROUP ? 1 : at_most(products, (int64_t)(GEMM_GROUP / flops) + 1);
  if (in_dots) {
    /* Long reads of each row of b, where enough tasks are left; no bits depend on it. */
    const int64_t threads = atomic_load(&pool.wanted), each = whole(ceil_div(n, ceil_div(threads, products)), GEMM_BYTES);
    p.tile_n = type->integers && p.b.row != 1 ? (each > 512 ? each : 512) : ceil_div(n, GEMM_WIDE) * products >= threads ? GEMM_WIDE : at_most(GEMM_WIDE, 512);
    leave_if(run_tasks(ctx, ceil_div(products, p.group) * ceil_div(n, p.tile_n), row_task, &p), ctx);
  } else {
    /* Packing pays for what is read often, a by the panels of b, b by those of a, and lies far apart. */
    p.rows_in_place = as_they_lie && !p.a.read && !p.a.scale && p.a.col == 1 && p.a.row != 1 && n <= 4 * type->nr;
    p.columns_in_place = as_they_lie && !p.b.read && !p.b.scale && p.b.col == 1 && (m <= GEMM_FEW || (m <= 8 * GEMM_MR && p.b.row <= 4 * type->nr));
    const int threads = inside || flops < GEMM_SMALL ? 1 : atomic_load_explicit(&pool.wanted, memory_order_relaxed);
    cut_parts(&p, products, threads);
    cut_slabs(&p);
    leave_if(run_tasks(ctx, ceil_div(products, p.group) * ceil_div(m, p.part_m) * ceil_div(n, p.part_n), product_task, &p), ctx);
  }
  if (p.splits > 1) {
    gradc_parallel_for(ctx, ceil_div(batch * m * n, ADD_CHUNK), add_task, &p);
  }
  return !atomic_load(&unfit);
}

EXPORT void gradc_matmul(const gradc_ctx *ctx, int dtype, int64_t batch, int64_t m, int64_t n, int64_t k, const gradc_matrix *a,
                         const gradc_matrix *b, void *c, int64_t c_row, int accumulate) {
  if (batch <= 0 || m <= 0 || n <= 0) {
    return;
  }
  if (!has_kernels(dtype, a, b)) {
    gradc_report(ctx, GRADC_NO_KERNELS, -1, 0, dtype, 0);
    return;
  }
  /* What multiplies a product of integers depends on both operands, and no other does all of them. */
  const gemm_type *all = dtype == GRADC_I32 ? type_of(dtype, a, b) : every(dtype);
  const gemm_type *type = m == 1 || n == 1 || accumulate ? all : type_of(dtype, a, b);
  if (k <= 0) { /* a sum of nothing */
    if (!accumulate) {
      for (int64_t row = 0; row < batch * m; row++) {
        memset((char *)c + row * c_row * all->size, 0, (size_t)(n * all->size));
      }
    }
    return;
  }
  if (!multiply_as(type, ctx, batch, m, n, k, a, b, c, c_row, accumulate)) {
    multiply_as(all, ctx, batch, m, n, k, a, b, c, c_row, accumulate);
  }
}

/* gradc_matmul as an entry: both operands and the result; dtype, batch, m, n, k, accumulate. */
EXPORT int gradc_run_matmul(const gradc_ctx *ctx, void *const *buffers, const int64_t *dims, char *scratch, int64_t only) {
  (void)scratch, (void)only;
  gradc_matmul(ctx, (int)dims[0], dims[1], dims[2], dims[3], dims[4], buffers[0], buffers[1], buffers[2], dims[3], (int)dims[5]);
  return 0;
}

/* ---- Do streaming stores pay? -----------------------------------------------------------------------------------------
 * It saves the read of each line that is written, and costs something that depends on the machine. */

enum { STREAM_TASK = 1 << 18, STREAM_BLOCK = 2048 };
typedef struct {
  float *to;
  const float *from;
} copied_arrays;

static void copy_plain(const void *args, int64_t task) {
  const copied_arrays *p = args;
  float *restrict to = p->to + task * STREAM_TASK;
  const float *restrict from = p->from + task * STREAM_TASK;
  for (int64_t i = 0; i < STREAM_TASK; i++) {
    to[i] = -from[i];
  }
}

static void copy_streaming(const void *args, int64_t task) {
  const copied_arrays *p = args;
  float block[STREAM_BLOCK];
  for (int64_t i0 = task * STREAM_TASK; i0 < task * STREAM_TASK + STREAM_TASK; i0 += STREAM_BLOCK) {
    for (int64_t i = 0; i < STREAM_BLOCK; i++) {
      block[i] = -p->from[i0 + i];
    }
    gradc_stream(p->to + i0, block, sizeof block);
  }
  gradc_stream_fence();
}

/* The time of a plain copy over that of one by streaming stores, in percent.  Both arrays hold `bytes`, a multiple of 1 MiB. */
EXPORT int gradc_stream_gain(const gradc_ctx *ctx, void *to, const void *from, int64_t bytes) {
  const copied_arrays copy = {to, from};
  int64_t best[2] = {INT64_MAX, INT64_MAX};
  for (int round = 0; round < 10; round++) {
    const int64_t began = now();
    gradc_parallel_for(ctx, bytes / (4 * STREAM_TASK), round % 2 ? copy_streaming : copy_plain, &copy);
    const int64_t took = now() - began;
    best[round % 2] = took < best[round % 2] ? took : best[round % 2];
  }
  return (int)(100 * best[0] / (best[1] > 0 ? best[1] : 1));
}
