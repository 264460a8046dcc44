/* What every generated module shares: the arguments of a stage, chunking by shape alone, the stable counting sort, library calls. */
#include "runtime.h"

typedef struct {
  const gradc_ctx *ctx;
  void *const *b; /* the kernel's buffers */
  const i64 *n;   /* the kernel's dims */
  char *scratch;
  i64 site;       /* which check reports */
  i64 chunk;      /* rows, or visited positions, per task */
} gradc_args;

enum { GRADC_STRIP = 8192, GRADC_BLOCK = 2048 }; /* columns per task of a map; columns per partial sum */

static inline __attribute__((unused)) i64 gradc_min(i64 a, i64 b) { return a < b ? a : b; }
static inline __attribute__((unused)) i64 gradc_max(i64 a, i64 b) { return a > b ? a : b; }
static inline __attribute__((unused)) i64 gradc_chunks(i64 count, i64 each) { return (count + each - 1) / each; }
static inline __attribute__((unused)) i64 gradc_align(i64 bytes) { return (bytes + 63) & ~(i64)63; }

/* Rows per task: the unit of determinism, so a function of the shape and nothing else.  Short rows come by more: a task is some work,
 * but no chain of additions grows long. */
static inline __attribute__((unused)) i64 gradc_chunk(i64 rows, i64 cols) {
  const i64 wanted = gradc_max(8, gradc_min(rows / 256, 64));
  return gradc_max(wanted, gradc_min(128, gradc_chunks(4096, gradc_max(cols, 1))));
}

/* Rows per task where each task holds a whole partial result of `size` elements: at most 4 Mi elements of partials. */
static inline __attribute__((unused)) i64 gradc_chunk_private(i64 rows, i64 cols, i64 size) {
  const i64 most = gradc_max(1, ((i64)1 << 22) / gradc_max(size, 1));
  return gradc_max(gradc_chunk(rows, cols), gradc_chunks(rows, most));
}

/* Stable counting sort of rows by key in [0, keys]; key == keys is nowhere and comes last.
 * start[k] is the first position of key k, start[keys] the number of rows that go somewhere. */
static __attribute__((unused)) void gradc_sort(const i32 *key, i64 rows, i64 keys, i32 *start, i32 *perm) {
  __builtin_memset(start, 0, sizeof(i32) * (unsigned long)(keys + 2));
  for (i64 r = 0; r < rows; r++) start[key[r] + 1]++;
  for (i64 k = 0; k < keys + 1; k++) start[k + 1] += start[k];
  for (i64 r = 0; r < rows; r++) perm[start[key[r]]++] = (i32)r;
  for (i64 k = keys + 1; k > 0; k--) start[k] = start[k - 1];
  start[0] = 0;
}

/* How many elements of an ascending row are <= value; of a row that does not ascend, some number in [0, count]. */
#define GRADC_SEARCH(T)                                                                                       \
  static inline __attribute__((unused)) i64 search_##T(const T *row, i64 count, i64 value) {                  \
    i64 low = 0, high = count;                                                                                \
    while (low < high) {                                                                                      \
      const i64 middle = low + (high - low) / 2;                                                              \
      if (row[middle] <= value) low = middle + 1;                                                             \
      else high = middle;                                                                                     \
    }                                                                                                         \
    return low;                                                                                               \
  }
GRADC_SEARCH(i8)
GRADC_SEARCH(i16)
GRADC_SEARCH(i32)
GRADC_SEARCH(i64)
GRADC_SEARCH(u8)
#undef GRADC_SEARCH

/* A matrix product over several batch axes: neighbours that step alike are one, the last goes to the library, the rest are loops. */
static __attribute__((unused)) void gradc_product(const gradc_ctx *ctx, int dtype, int axes, const i64 *size, const i64 *as, const i64 *bs, i64 m, i64 n,
                                                  i64 k, gradc_matrix a, gradc_matrix b, char *c) {
  i64 batch = 1, sa = 0, sb = 0, done = axes;
  while (done > 0) {
    const i64 s = size[done - 1];
    if (batch != 1 && s != 1 && (as[done - 1] != sa * batch || bs[done - 1] != sb * batch)) break;
    if (batch == 1) sa = as[done - 1], sb = bs[done - 1];
    batch *= s;
    done--;
  }
  i64 outer = 1;
  for (i64 i = 0; i < done; i++) outer *= size[i];
  const char *const a_first = a.data, *const b_first = b.data;
  a.batch = sa, b.batch = sb;
  for (i64 o = 0; o < outer; o++) {
    i64 left = o, ao = 0, bo = 0;
    for (i64 i = done - 1; i >= 0; i--) {
      ao += left % size[i] * as[i], bo += left % size[i] * bs[i];
      left /= size[i];
    }
    a.data = a_first + ao * a.bytes, b.data = b_first + bo * b.bytes;
    ctx->matmul(ctx, dtype, batch, m, n, k, &a, &b, c + o * batch * m * n * (dtype / 8), 0);
  }
}
