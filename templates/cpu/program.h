/* What every generated module shares: chunking by shape alone, layouts of memory, library calls. */
#ifndef GRADC_PROGRAM_H
#define GRADC_PROGRAM_H

#include "runtime.h"
#include "streaming.h"

enum {
#if defined(__AVX2__)
  GRADC_VECTOR = 32,       /* bytes of a vector that sums of a run's rows are in: of longer ones, more lie across lines */
#else
  GRADC_VECTOR = 16,
#endif
#if defined(__AVX512VL__)
  GRADC_REGISTERS = 32,    /* vectors that are in registers */
#else
  GRADC_REGISTERS = 16,
#endif
  GRADC_ALIGN = 64,        /* bytes that the beginnings of a workspace's arrays are multiples of: a line */
  GRADC_STRIP = 8192,      /* columns per task of a map */
  GRADC_LANES = 512,       /* rows that a task scans side by side */
  GRADC_BLOCK = 2048,      /* columns per partial sum */
  GRADC_FINE_BLOCK = 128,  /* columns per partial sum of f64 */
  GRADC_STAGED = 512,      /* columns written by streaming stores at a time: reads wait for no more */
  GRADC_STREAMED_ROW = 2048, /* bytes of a row from which it is streamed: shorter ones are read while the stores that staged them are on their way */
  GRADC_RUN_ROWS = 8,      /* wide rows of a run that are added at once: what they are read from stays in the nearest caches */
  GRADC_BLOCK_ROWS = 16,   /* rows added in f32 */
  GRADC_POLL = 1 << 18,    /* elements, or rows sorted, between two looks for Ctrl-C */
  GRADC_KEY_ROWS = 4096,   /* rows per task of sort keys */
  GRADC_FOLD = 512,        /* elements of a result per task that combines partial results */
  GRADC_SEGMENTS = 64,     /* rows of a result per task that finishes segments */
  GRADC_TOTALS = 64,       /* elements that partial results are combined in at a time */
  GRADC_AHEAD = 16,        /* rows ahead that ask for what they gather */
  GRADC_DISTANT = 1 << 18, /* bytes that are gathered from further away than the nearest caches */
  GRADC_LOOP_TASKS = 8     /* tasks of a loop from which each has blocks of its own */
};

/* GRADC_BOUNDS: the address of an element; of one outside its array, which is reported, a place of the thread's own. */
static __attribute__((unused, noinline)) void *gradc_guarded(const gradc_ctx *ctx, i64 site, const void *array, i64 at, i64 count, i64 bytes) {
  static _Thread_local i64 nowhere[2];
  if ((u64)at < (u64)count) return (char *)array + at * bytes;
  gradc_report(ctx, GRADC_OUTSIDE, site, at, at, count);
  nowhere[0] = nowhere[1] = 0;
  return nowhere;
}

/* GRADC_BOUNDS: whether an array of `count` has all elements that a matrix product reads or writes: `steps` apart from element `at` on. */
static __attribute__((unused)) int gradc_within(const gradc_ctx *ctx, i64 site, i64 at, int axes, const i64 *sizes, const i64 *steps, i64 count) {
  i64 first = at, last = at;
  for (int i = 0; i < axes; i++) {
    if (sizes[i] == 0) return 1;
    *(steps[i] < 0 ? &first : &last) += (sizes[i] - 1) * steps[i];
  }
  if (first >= 0 && last < count) return 1;
  gradc_report(ctx, GRADC_OUTSIDE, site, 0, first < 0 ? first : last, count);
  return 0;
}

/* A sum of f64 partial sums: in `lost`, what its additions round away (Knuth's TwoSum). */
static inline __attribute__((unused)) void gradc_add(f64 *sum, f64 *lost, f64 x) {
  const f64 s = *sum + x, added = s - *sum;
  *lost += (*sum - (s - added)) + (x - added);
  *sum = s;
}
static inline __attribute__((unused)) f64 gradc_total(f64 sum, f64 lost) { return sum - sum == 0 ? sum + lost : sum; } /* lost is NaN beside inf */

/* Sums and products of a block's terms, in the order of this text whatever the compiler, its level and the processor's vectors:
 * four accumulators of vectors, then one, then the terms that fill no vector. */
#define GRADC_COMBINE(name, T, W, lanes, sign, start)                                                                \
  GRADC_FN W name(const T *terms, i64 count) {                                                                       \
    typedef T narrow __attribute__((vector_size(lanes * sizeof(T)), aligned(sizeof(T))));                            \
    typedef W wide __attribute__((vector_size(lanes * sizeof(W))));                                                  \
    W all = start;                                                                                                   \
    i64 i = 0;                                                                                                       \
    if (count >= lanes) {                                                                                            \
      wide a = (wide){ 0 } + start, b = a, c = a, d = a;                                                             \
      for (; i + 4 * lanes <= count; i += 4 * lanes) {                                                               \
        a = a sign __builtin_convertvector(*(const narrow *)(terms + i), wide);                                      \
        b = b sign __builtin_convertvector(*(const narrow *)(terms + i + lanes), wide);                              \
        c = c sign __builtin_convertvector(*(const narrow *)(terms + i + 2 * lanes), wide);                          \
        d = d sign __builtin_convertvector(*(const narrow *)(terms + i + 3 * lanes), wide);                          \
      }                                                                                                              \
      a = (a sign b) sign (c sign d);                                                                                \
      for (; i + lanes <= count; i += lanes) a = a sign __builtin_convertvector(*(const narrow *)(terms + i), wide); \
      W lane[lanes];                                                                                                 \
      __builtin_memcpy(lane, &a, sizeof a);                                                                          \
      for (int half = lanes / 2; half; half /= 2)                                                                    \
        for (int l = 0; l < half; l++) lane[l] = lane[l] sign lane[l + half];                                        \
      all = lane[0];                                                                                                 \
    }                                                                                                                \
    for (; i < count; i++) all = all sign (W)terms[i];                                                               \
    return all;                                                                                                      \
  }
GRADC_COMBINE(gradc_sum_f32, f32, f32, 8, +, 0)
GRADC_COMBINE(gradc_sum_f64, f64, f64, 4, +, 0)
GRADC_COMBINE(gradc_sum_f32_in_f64, f32, f64, 4, +, 0)
GRADC_COMBINE(gradc_prod_f32, f32, f32, 8, *, 1)
GRADC_COMBINE(gradc_prod_f64, f64, f64, 4, *, 1)

static inline __attribute__((unused)) i64 gradc_min(i64 a, i64 b) { return a < b ? a : b; }
static inline __attribute__((unused)) i64 gradc_max(i64 a, i64 b) { return a > b ? a : b; }
static inline __attribute__((unused)) i64 gradc_chunks(i64 count, i64 each) { return (count + each - 1) / each; }
/* Bytes of an array in the workspace, whole lines; one of no elements has a first one too, for sums that add 0 there. */
static inline __attribute__((unused)) i64 gradc_align(i64 bytes) { return bytes ? (bytes + GRADC_ALIGN - 1) & ~(i64)(GRADC_ALIGN - 1) : GRADC_ALIGN; }

/* The next array, of so many bytes, from `end` on. */
static inline __attribute__((unused)) void *gradc_take(char **end, i64 bytes) {
  char *const array = *end;
  *end += gradc_align(bytes);
  return array;
}

/* What the tasks of a loop over blocks of rows share; own: a block's memory, or 0 where each thread has some of its own. */
typedef struct {
  const gradc_ctx *ctx;
  void *const *buf;
  const i64 *n;
  char *own;
} gradc_loop;

static void gradc_nothing(const void *args, i64 task) { (void)args, (void)task; }
/* Ctrl-C is looked for between two tasks: what runs for long beside them has one of nothing now and then. */
static inline __attribute__((unused)) void gradc_pause(const gradc_ctx *ctx) { ctx->parallel_for(ctx, 1, gradc_nothing, 0); }

/* Asked by a task after so many elements: whether the call is to end, which it finds out now and then. */
static inline __attribute__((unused)) int gradc_poll(const gradc_ctx *ctx, i64 *since, i64 elements) {
  if ((*since += elements) < GRADC_POLL) return 0;
  *since = 0;
  return ctx->stopped(ctx);
}
/* Bytes as floats.  gcc widens a vector of bytes by halves, by way of 16 bits; what a constant number of them is put into stays in registers. */
#if defined(__AVX2__) && !defined(__clang__)
#define GRADC_FLOATS_OF_BYTES(widen)                                                                                 \
  _Pragma("GCC unroll 8")                                                                                            \
  for (; i + 8 <= count; i += 8) {                                                                                   \
    typedef char bytes __attribute__((vector_size(16)));                                                             \
    typedef i64 halves __attribute__((vector_size(16)));                                                             \
    typedef i32 wide __attribute__((vector_size(32)));                                                               \
    typedef f32 floats __attribute__((vector_size(32)));                                                             \
    i64 low;                                                                                                         \
    __builtin_memcpy(&low, from + i, sizeof low);                                                                    \
    const floats f = __builtin_convertvector((wide)widen((bytes)(halves){ low, 0 }), floats);                        \
    __builtin_memcpy(to + i, &f, sizeof f);                                                                          \
  }
#else
#define GRADC_FLOATS_OF_BYTES(widen)
#endif
GRADC_FN void gradc_floats_u8(f32 *restrict to, const u8 *restrict from, i64 count) {
  i64 i = 0;
  GRADC_FLOATS_OF_BYTES(__builtin_ia32_pmovzxbd256)
  _Pragma("omp simd")
  for (i64 e = i; e < count; e++) to[e] = (f32)from[e];
}
GRADC_FN void gradc_floats_i8(f32 *restrict to, const i8 *restrict from, i64 count) {
  i64 i = 0;
  GRADC_FLOATS_OF_BYTES(__builtin_ia32_pmovsxbd256)
  _Pragma("omp simd")
  for (i64 e = i; e < count; e++) to[e] = (f32)from[e];
}

/* Rows between two such questions. */
static inline __attribute__((unused)) i64 gradc_poll_rows(i64 cols) { return gradc_max(1, GRADC_POLL / gradc_max(cols, 1)); }

/* A matrix product over several batch axes: neighbours that step alike are one, the last goes to the library, the rest are loops.
 * steps: of a, b and their scales along each axis. */
static __attribute__((unused)) void gradc_product(const gradc_ctx *ctx, int dtype, int axes, const i64 *size, const i64 (*steps)[4], i64 m, i64 n,
                                                  i64 k, gradc_matrix a, gradc_matrix b, char *c, int accumulate) {
  i64 batch = 1, last[4] = {0}, done = axes;
  while (done > 0) {
    const i64 s = size[done - 1], *step = steps[done - 1];
    int alike = 1;
    for (int x = 0; x < 4; x++) alike &= step[x] == last[x] * batch;
    if (batch != 1 && s != 1 && !alike) break;
    if (batch == 1) __builtin_memcpy(last, step, sizeof last);
    batch *= s;
    done--;
  }
  i64 outer = 1;
  for (i64 i = 0; i < done; i++) outer *= size[i];
  const i64 bytes = dtype / 8;
  const char *const first[4] = {a.data, b.data, a.scale, b.scale};
  a.batch = last[0], b.batch = last[1], a.scale_batch = last[2], b.scale_batch = last[3];
  for (i64 o = 0; o < outer; o++) {
    i64 left = o, at[4] = {0};
    for (i64 i = done - 1; i >= 0; i--) {
      for (int x = 0; x < 4; x++) at[x] += left % size[i] * steps[i][x];
      left /= size[i];
    }
    a.data = first[0] + at[0] * a.bytes, b.data = first[1] + at[1] * b.bytes;
    if (first[2]) a.scale = first[2] + at[2] * bytes;
    if (first[3]) b.scale = first[3] + at[3] * bytes;
    ctx->matmul(ctx, dtype, batch, m, n, k, &a, &b, c + o * batch * m * n * bytes, accumulate);
  }
}

#endif
