/* What every generated module shares: chunking by shape alone, layouts of memory, library calls.
 * All is inline, which -O2 makes nothing of: at -O0 gcc compiles other static functions whether they are called or not. */
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
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
  GRADC_WIDE_VECTOR = 64,  /* of those that wide_vectors.h asks for */
#else
  GRADC_WIDE_VECTOR = GRADC_VECTOR,
#endif
#if defined(__AVX2__)
  GRADC_MASKS = 1,         /* whether vectors of elements of 4 and 8 bytes are loaded and stored under masks */
#else
  GRADC_MASKS = 0,
#endif
#if defined(__AVX512VL__)
  GRADC_MASK_REGISTERS = 1, /* whether masks have registers of their own: by AVX2 gradients of 3 by 3 windows took up to 1.24 times as long under masks */
#else
  GRADC_MASK_REGISTERS = 0,
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
  GRADC_TASKS = 256,       /* tasks of chunks of sorted rows: a task begins with a search */
  GRADC_SEGMENTS = 64,     /* rows of a result per task that finishes segments */
  GRADC_TOTALS = 64,       /* elements that partial results are combined in at a time */
  GRADC_AHEAD = 16,        /* rows ahead that ask for what they gather */
  GRADC_DISTANT = 1 << 18, /* bytes that are gathered from further away than the nearest caches */
  GRADC_TASK_ELEMENTS = 1 << 14, /* elements that go through a step while threads wake */
  GRADC_HANDED = 8,        /* finished rows that are handed on together: one does not wait for the arithmetic of another */
  GRADC_HANDED_BYTES = 1 << 13, /* that they have at most: in the nearest cache */
  GRADC_LOOP_TASKS = 8     /* tasks of a loop from which each has blocks of its own */
};

/* An element of a local array as a value: gcc makes no memcpy of a loop that stores it, for which the array, of sums that
 * belong into registers, lay in memory where they are added up. */
#ifdef __has_builtin
#if __has_builtin(__builtin_assoc_barrier)
#define GRADC_VALUE(element) __builtin_assoc_barrier(element)
#endif
#endif
#ifndef GRADC_VALUE
#define GRADC_VALUE(element) (element)
#endif

/* 0, which a compiler does not know where masks have registers.  Of a load under a mask that it knows gcc 12 makes a blend with memory
 * (AVX-512VL, vectors of 16 and 32 bytes), which reads what the mask leaves out: behind the end of an array, where there may be no memory. */
static inline __attribute__((unused)) i64 gradc_unknown_zero(void) {
  i64 zero = 0;
#if defined(__GNUC__)
  if (GRADC_MASK_REGISTERS) __asm__("" : "+r"(zero));
#endif
  return zero;
}

/* Columns of a row that are computed: n, or so many that they fill vectors of elements of up to `bytes`, where a masked vector takes less time than
 * the half of one and the single elements that a compiler makes of the last columns.  A vector is 10, a masked one 12, an element 7:
 * measured, exp, sin and sigmoid of 3 to 20 columns, Intel Xeon, family 6 model 207, 2026-11-30.  Of f64 a masked vector took .96 to
 * 1.25 of the time. */
static inline __attribute__((unused)) i64 gradc_filled(i64 n, i64 bytes) {
  const i64 lanes = GRADC_WIDE_VECTOR / bytes, half = lanes / 2, rest = n % lanes, single = rest % half;
  const i64 plain = n / lanes * 10 + (rest >= half) * 10 + single * 7, masked = (n + lanes - 1) / lanes * 12;
  if (!GRADC_MASKS || bytes > 4 || n <= half / 2 || masked >= plain) return n;
  return n <= half ? half : (n + lanes - 1) / lanes * lanes;
}

/* GRADC_BOUNDS: the address of an element; of one outside its array, which is reported, a place of the thread's own. */
static __attribute__((unused, noinline)) void *gradc_guarded(const gradc_ctx *ctx, i64 site, const void *array, i64 at, i64 count, i64 bytes) {
  static _Thread_local i64 nowhere[2];
  if ((u64)at < (u64)count) return (char *)array + at * bytes;
  gradc_report(ctx, GRADC_OUTSIDE, site, at, at, count);
  nowhere[0] = nowhere[1] = 0;
  return nowhere;
}

/* GRADC_BOUNDS: whether an array of `count` has all elements that a matrix product reads or writes: `steps` apart from element `at` on. */
static inline __attribute__((unused)) int gradc_within(const gradc_ctx *ctx, i64 site, i64 at, int axes, const i64 *sizes, const i64 *steps, i64 count) {
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

/* The combination of accumulators, a constant power of two of them and one more, in the order of this text whatever the compiler, its
 * level and the processor's vectors: each of the first half with the one half of all further on, the one more last.  No vector is
 * longer than those that are stored: its parts would have to reach the cache before it can be read. */
#define GRADC_COMBINE(name, T, both)                                                                                 \
  GRADC_FN T name(T *lane, int count) {                                                                              \
    GRADC_HALVE(32, T, both)                                                                                         \
    GRADC_HALVE(16, T, both)                                                                                         \
    GRADC_HALVE(8, T, both)                                                                                          \
    GRADC_HALVE(4, T, both)                                                                                          \
    GRADC_HALVE(2, T, both)                                                                                          \
    return both(lane[0], lane[count]);                                                                               \
  }
#define GRADC_HALVE(from, T, both)                                                                                   \
  if (count >= from) {                                                                                               \
    enum { half = from / 2, vector = GRADC_VECTOR / sizeof(T), each = half < vector ? half : vector };               \
    _Pragma("GCC unroll 4")                                                                                          \
    for (int first = 0; first < half; first += each) {                                                               \
      _Pragma("omp simd")                                                                                            \
      for (int i = first; i < first + each; i++) lane[i] = both(lane[i], lane[i + half]);                            \
    }                                                                                                                \
  }
#define GRADC_ADDED(a, b) ((a) + (b))
#define GRADC_MULTIPLIED(a, b) ((a) * (b))
#define GRADC_LARGER(a, b) ((b) > (a) ? (b) : (a))
#define GRADC_SMALLER(a, b) ((b) < (a) ? (b) : (a))
#define GRADC_EITHER(a, b) ((a) | (b))
#define GRADC_COMBINES(T)                                                                                            \
  GRADC_COMBINE(gradc_sum_##T, T, GRADC_ADDED)                                                                       \
  GRADC_COMBINE(gradc_prod_##T, T, GRADC_MULTIPLIED)                                                                 \
  GRADC_COMBINE(gradc_max_##T, T, GRADC_LARGER)                                                                      \
  GRADC_COMBINE(gradc_min_##T, T, GRADC_SMALLER)
GRADC_COMBINES(f32)
GRADC_COMBINES(f64)
GRADC_COMBINES(i8)
GRADC_COMBINES(i16)
GRADC_COMBINES(i32)
GRADC_COMBINES(i64)
GRADC_COMBINES(u8)
GRADC_COMBINES(u16)
GRADC_COMBINES(u32)
GRADC_COMBINES(u64)
GRADC_COMBINE(gradc_any_i32, i32, GRADC_EITHER)
GRADC_COMBINE(gradc_any_i64, i64, GRADC_EITHER)

static inline __attribute__((unused)) i64 gradc_min(i64 a, i64 b) { return a < b ? a : b; }
static inline __attribute__((unused)) i64 gradc_max(i64 a, i64 b) { return a > b ? a : b; }
static inline __attribute__((unused)) i64 gradc_chunks(i64 count, i64 each) { return (count + each - 1) / each; }
/* Bytes of an array in the workspace, whole lines; one of no elements has a first one too, for sums that add 0 there. */
static inline __attribute__((unused)) i64 gradc_align(i64 bytes) { return bytes ? (bytes + GRADC_ALIGN - 1) & ~(i64)(GRADC_ALIGN - 1) : GRADC_ALIGN; }

/* How many chunks of sorted rows a task has. */
static inline __attribute__((unused)) i64 gradc_together(i64 chunks) { return gradc_max(1, chunks / GRADC_TASKS); }

/* How many finished rows of so many bytes are handed on together. */
static inline __attribute__((unused)) i64 gradc_handed(i64 bytes) { return gradc_max(1, gradc_min(GRADC_HANDED, GRADC_HANDED_BYTES / gradc_max(bytes, 1))); }

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

/* A function that only fills in arguments, once for each of its calls: what a compiler does to hundreds of them takes seconds. */
#if defined(__clang__)
#define GRADC_STEP __attribute__((optnone, noinline))
#else
#define GRADC_STEP __attribute__((optimize("O0")))
#endif

/* A step, and steps that run as the tasks of one launch; own: the workspace of each. */
typedef int (*gradc_step)(const gradc_ctx *ctx, void *const *buf, const i64 *n, char *scratch);
typedef struct {
  const gradc_ctx *ctx;
  void *const *buf;
  const i64 *n;
  const gradc_step *steps;
  char *const *own;
} gradc_batch;

static inline __attribute__((unused)) void gradc_batch_task(const void *args, i64 task) {
  const gradc_batch *const b = args;
  b->steps[task](b->ctx, b->buf, b->n, b->own[task]);
}

/* As parallel_for of a context whose calls wake no thread. */
static inline __attribute__((unused)) void gradc_in_order(const gradc_ctx *ctx, i64 tasks, gradc_body body, const void *args) {
  (void)ctx;
  for (i64 task = 0; task < tasks; task++) body(args, task);
}

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

/* What a code book of 16 floats has at codes below 16: a permutation of the book, which is one vector or two. */
GRADC_FN void gradc_lookup(f32 *restrict to, const u8 *restrict codes, const f32 *restrict book, i64 count) {
  i64 i = 0;
#if defined(__AVX2__)
#if defined(__AVX512F__)
  enum { LANES = 16 };
#else
  enum { LANES = 8 };
#endif
  typedef i32 places __attribute__((vector_size(4 * LANES)));
  typedef f32 floats __attribute__((vector_size(4 * LANES)));
#if defined(__clang__)
  typedef u8 bytes __attribute__((vector_size(LANES)));
#define GRADC_PLACES(code) __builtin_convertvector(code, places)
#if defined(__AVX512F__)
#define GRADC_PERMUTED __builtin_ia32_permvarsf512
#else
#define GRADC_PERMUTED __builtin_ia32_permvarsf256
#endif
#else /* gcc widens a vector of bytes by halves, see above */
  typedef char bytes __attribute__((vector_size(16)));
  typedef i64 halves __attribute__((vector_size(16), unused));
#define GRADC_PERMUTED __builtin_shuffle
#if defined(__AVX512F__)
#define GRADC_PLACES(code) (places)__builtin_ia32_pmovzxbd512_mask(code, (places){ 0 }, -1)
#else
#define GRADC_PLACES(code) (places)__builtin_ia32_pmovzxbd256(code)
#endif
#endif
  floats low, high;
  __builtin_memcpy(&low, book, sizeof low);
  __builtin_memcpy(&high, book + 16 - LANES, sizeof high);
  for (; i + LANES <= count; i += LANES) {
    bytes code;
#if defined(__AVX512F__) || defined(__clang__)
    __builtin_memcpy(&code, codes + i, LANES);
#else /* in a register: half of a vector that is stored is not in the cache yet when the whole of it is read */
    i64 half;
    __builtin_memcpy(&half, codes + i, LANES);
    code = (bytes)(halves){ half, 0 };
#endif
    const places at = GRADC_PLACES(code);
    floats found = GRADC_PERMUTED(low, at);
    if (LANES == 8) {
      const places upper = at > 7;
      found = (floats)((upper & (places)GRADC_PERMUTED(high, at)) | (~upper & (places)found));
    }
    __builtin_memcpy(to + i, &found, sizeof found);
  }
#undef GRADC_PLACES
#undef GRADC_PERMUTED
#endif
  for (; i < count; i++) to[i] = book[codes[i]];
}

/* Rows between two such questions. */
static inline __attribute__((unused)) i64 gradc_poll_rows(i64 cols) { return gradc_max(1, GRADC_POLL / gradc_max(cols, 1)); }

/* A matrix product over several batch axes: neighbours that step alike are one, the last goes to the library, the rest are loops.
 * steps: of a, b and their scales along each axis. */
static inline __attribute__((unused)) void gradc_product(const gradc_ctx *ctx, int dtype, int axes, const i64 *size, const i64 (*steps)[4], i64 m, i64 n,
                                                  i64 k, gradc_matrix a, gradc_matrix b, char *c, i64 c_row, int accumulate) {
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
    ctx->matmul(ctx, dtype, batch, m, n, k, &a, &b, c + o * batch * m * c_row * bytes, c_row, accumulate);
  }
}

#endif
