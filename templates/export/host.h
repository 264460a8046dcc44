/* The host's part of an exported module: sizes, the plan of its memory, checks of arguments, calls.  Included by the module's C
 * file behind the runtime and the tables that say what the module is; every name is static, so that programs hold several modules. */
#include <limits.h>
#include <stdio.h>

typedef __int128 host_size; /* sizes before they are known to fit; larger ones than fit here are first computed as doubles */

static inline __attribute__((unused)) host_size floordiv_i64(host_size a, host_size b) {
  const host_size q = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q;
}
static inline __attribute__((unused)) host_size maximum_i64(host_size a, host_size b) { return a > b ? a : b; }
static inline __attribute__((unused)) host_size minimum_i64(host_size a, host_size b) { return a < b ? a : b; }
static inline __attribute__((unused)) double floordiv_f64(double a, double b) { return a / b; }
static inline __attribute__((unused)) double maximum_f64(double a, double b) { return a > b ? a : b; }
static inline __attribute__((unused)) double minimum_f64(double a, double b) { return a < b ? a : b; }

enum { HOST_ALIGN = 64, HOST_TEXT = 320 };
#define HOST_MOST_SYMBOL ((int64_t)1 << 40) /* more elements than any memory has */
#define HOST_MOST ((host_size)INT64_MAX - HOST_ALIGN)

/* Codes beyond those of the runtime (GRADC_INDEX_OUT_OF_RANGE ...). */
enum { HOST_INVALID_SIZES = 16, HOST_INVALID_ARGUMENT = 17, HOST_WORKSPACE_TOO_SMALL = 18, HOST_NO_FORWARD = 19, HOST_NO_MEMORY = GRADC_OUT_OF_MEMORY };

/* An array of the caller's, or a residual: its name in errors and the bytes of an element. */
typedef struct {
  const char *name;
  int64_t bytes;
} host_array;

/* Where a buffer of a program lies: an array of the module, a temp in the workspace, a constant, or nowhere: no step touches it. */
typedef enum { HOST_ARRAY, HOST_RESULT, HOST_TEMP, HOST_CONST, HOST_UNUSED } host_kind;
typedef struct {
  host_kind kind;
  int index;
} host_buffer;

/* The steps that first write and last use a temp. */
typedef struct {
  int first, last;
} host_span;

/* A check of indices: the number of its step, the op and the user's name of the indices. */
typedef struct {
  int64_t step;
  const char *op, *source;
} host_site;

/* A result that may lie where a donated input does. */
typedef struct {
  int result, input;
} host_donation;

/* A compiled program.  Temps are sorted by their spans. */
typedef struct {
  const char *name;
  gradc_entry run;
  int64_t (*scratch)(const int64_t *n);
  int buffers, temps, dims, sites, donations;
  const host_buffer *buffer;
  const host_span *span;
  const int *dim; /* which of the module's sizes each of the program's is */
  const host_site *site;
  const host_donation *donation;
  const void *const *constants;
  void (*temp_bytes)(const int64_t *n, int64_t *bytes);
} host_program;

/* What is known of a program once sizes are. */
typedef struct {
  int64_t *offset; /* of each temp in the workspace */
  int64_t *n;
  int64_t temps, workspace; /* bytes of all temps; those and of what a step needs beside */
} host_plan;

static int host_fail(char *text, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
static int host_fail(char *text, int code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, HOST_TEXT, format, arguments);
  va_end(arguments);
  return code;
}

/* Where each temp lies: the largest first, each in the smallest gap that holds it between those that are alive with it. */
static int64_t host_place(const host_program *p, const int64_t *bytes, int64_t *offset, int *order, char *placed) {
  int64_t total = 0;
  for (int i = 0; i < p->temps; i++) {
    int at = i;
    for (; at > 0 && bytes[order[at - 1]] < bytes[i]; at--) order[at] = order[at - 1];
    order[at] = i;
    placed[i] = 0;
  }
  for (int o = 0; o < p->temps; o++) {
    const int t = order[o];
    int64_t best = -1, gap = INT64_MAX, end = 0;
    for (;;) { /* the temps alive with it in the order of their places: what lies from `end` on begins at `next` */
      int64_t next = INT64_MAX, stop = end;
      for (int u = 0; u < p->temps; u++) {
        if (!placed[u] || p->span[t].first > p->span[u].last || p->span[u].first > p->span[t].last || offset[u] + bytes[u] <= end) continue;
        if (offset[u] < next || (offset[u] == next && offset[u] + bytes[u] > stop)) next = offset[u], stop = offset[u] + bytes[u];
      }
      if (next == INT64_MAX) break;
      if (next - end >= bytes[t] && next - end < gap) best = end, gap = next - end;
      end = end > stop ? end : stop;
    }
    offset[t] = best < 0 ? end : best;
    placed[t] = 1;
    total = total > offset[t] + bytes[t] ? total : offset[t] + bytes[t];
  }
  return total;
}

/* The plan of a program, in memory of one piece that begins at plan->offset; 0 where there is none. */
static int host_bind(host_plan *plan, const host_program *p, const int64_t *n) {
  const size_t temps = (size_t)p->temps + 1, dims = (size_t)p->dims + 1;
  int64_t *const memory = host_allocate(HOST_ALIGN, (2 * temps + dims) * sizeof(int64_t) + temps * (sizeof(int) + 1));
  if (!memory) return 0;
  int64_t *const bytes = memory + temps + dims;
  int *const order = (int *)(bytes + temps);
  plan->offset = memory, plan->n = memory + temps;
  for (int i = 0; i < p->dims; i++) plan->n[i] = n[p->dim[i]];
  p->temp_bytes(n, bytes);
  for (int i = 0; i < p->temps; i++) bytes[i] = (bytes[i] + HOST_ALIGN - 1) / HOST_ALIGN * HOST_ALIGN;
  plan->temps = host_place(p, bytes, plan->offset, order, (char *)(order + temps));
  plan->workspace = plan->temps + p->scratch(plan->n);
  return 1;
}

/* Arrays that are there, aligned, and do not share memory where one is written. */
static int host_check(const host_program *p, const host_array *arrays, void *const *pointer, const int64_t *bytes, char *text) {
  for (int i = 0; i < p->buffers; i++) {
    if (p->buffer[i].kind > HOST_RESULT) continue;
    const int a = p->buffer[i].index;
    if (!pointer[a] && bytes[a] > 0) return host_fail(text, HOST_INVALID_ARGUMENT, "%s: %s is NULL", p->name, arrays[a].name);
    if ((uintptr_t)pointer[a] % (uintptr_t)arrays[a].bytes != 0) {
      return host_fail(text, HOST_INVALID_ARGUMENT, "%s: %s is not at a multiple of %lld bytes", p->name, arrays[a].name, (long long)arrays[a].bytes);
    }
    for (int j = 0; j < p->buffers && p->buffer[i].kind == HOST_RESULT; j++) {
      const int b = p->buffer[j].index;
      if (j == i || p->buffer[j].kind > HOST_RESULT || !bytes[a] || !bytes[b]) continue;
      const uintptr_t x = (uintptr_t)pointer[a], y = (uintptr_t)pointer[b];
      int donated = 0;
      for (int d = 0; d < p->donations; d++) donated |= p->donation[d].result == a && p->donation[d].input == b && x == y;
      if (!donated && x < y + (uintptr_t)bytes[b] && y < x + (uintptr_t)bytes[a]) {
        return host_fail(text, HOST_INVALID_ARGUMENT, "%s: %s shares memory with %s", p->name, arrays[a].name, arrays[b].name);
      }
    }
  }
  return GRADC_FINE;
}

static int host_report(const host_program *p, const int64_t *error, char *text) {
  const char *op = "index", *source = "?";
  for (int i = 0; i < p->sites; i++) {
    if (p->site[i].step == error[GRADC_SITE]) op = p->site[i].op, source = p->site[i].source;
  }
  const long long position = error[GRADC_POSITION], value = error[GRADC_VALUE], bound = error[GRADC_BOUND];
  switch (error[GRADC_CODE]) {
    case GRADC_INDEX_OUT_OF_RANGE:
      return host_fail(text, GRADC_INDEX_OUT_OF_RANGE, "%s: index %lld at position %lld of '%s' is out of range [0, %lld)", op, value, position, source, bound);
    case GRADC_DECREASES:
      return host_fail(text, GRADC_DECREASES, "%s: %lld at position %lld of '%s' is below the %lld before it; it must not decrease", op, value, position, source, bound);
    case GRADC_OUT_OF_MEMORY:
      return host_fail(text, HOST_NO_MEMORY, "%s: a thread needs %lld bytes more for itself, and the system does not give them", p->name, value);
    default:
      return host_fail(text, (int)error[GRADC_CODE], "%s: step %lld touches element %lld of an array of %lld", p->name, (long long)error[GRADC_SITE], value, bound);
  }
}

/* Run a program over arrays that have been checked. */
static int host_run(const host_program *p, const host_plan *plan, void *const *pointer, char *workspace, void **table, char *text) {
  int64_t error[8] = {0};
  const gradc_ctx ctx = {gradc_parallel_for, HOST_MATMUL, gradc_local, gradc_block, gradc_stopped, INT64_MAX, error, NULL};
  for (int i = 0; i < p->buffers; i++) {
    const host_buffer b = p->buffer[i];
    if (b.kind == HOST_TEMP) {
      table[i] = workspace + plan->offset[b.index];
    } else if (b.kind == HOST_CONST) {
      memcpy(&table[i], &p->constants[b.index], sizeof table[i]);
    } else if (b.kind == HOST_UNUSED) {
      table[i] = NULL;
    } else {
      table[i] = pointer[b.index];
    }
  }
  const int code = gradc_call(p->run, &ctx, table, plan->n, workspace + plan->temps, -1);
  return code || error[GRADC_CODE] ? host_report(p, error, text) : GRADC_FINE;
}

/* ---- The runtime without Python: nothing is held, no handler of a signal is run -------------------------------------------- */

static void *host_release(void) { return NULL; }
static void host_acquire(void *thread) { (void)thread; }
static int host_run_handlers(void) { return 0; }

static int host_processors(void) {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  const long processors = sysconf(_SC_NPROCESSORS_ONLN);
  return processors > 0 && processors < INT_MAX ? (int)processors : 1;
}

static void host_start(void) {
  set_up();
  host_add_kernels();
  gradc_set_python((void *)host_release, (void *)host_acquire, (void *)host_run_handlers, 0);
  gradc_set_threads(host_processors(), host_processors());
}
