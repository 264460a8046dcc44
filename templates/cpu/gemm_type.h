/* What the kernels of all matrix products share: how wide they are, how operands and results lie, and what gemm_type has of a type. */
#ifndef GRADC_GEMM_TYPE_H
#define GRADC_GEMM_TYPE_H

#include <string.h>

#include "runtime.h"

#ifndef EXPORT /* an exported module is one text with us, and shows nothing of ours */
#define EXPORT __attribute__((visibility("default")))
#endif
#define GEMM_UNUSED __attribute__((unused)) /* by the kernels of some types */

#if defined(__AVX512F__)
#define GEMM_BYTES 64
#define GEMM_MR 12
#elif defined(__AVX2__)
#define GEMM_BYTES 32
#define GEMM_MR 6
#elif defined(__aarch64__)
#define GEMM_BYTES 16
#define GEMM_MR 12
#else
#define GEMM_BYTES 16
#define GEMM_MR 6
#endif
#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define GEMM_SHUFFLES 1
#endif
#endif
enum { GEMM_UNROLL = 8, GEMM_SIDE_BY_SIDE = 8, GEMM_KC = 256, GEMM_WIDE = GEMM_BYTES > 32 ? 512 : 1024, GEMM_RUN = 64, GEMM_STRETCH = 64 * GEMM_KC, GEMM_PACKED = 2 << 20, GEMM_LINES = 4 };
/* The longest chain of additions is RUN + k / RUN steps, least near the square root of k; shorter runs take time.
 * STRETCH: steps between two looks for signals.  WIDE: columns of one row whose sums, a vector each, fill a first cache at most.
 * LINES: vectors in a line of an operand of another type. */

/* An address that stays in one register, rather than many that are computed ahead. */
#define GEMM_KEEP(pointer) __asm__("" : "+r"(pointer))
/* A vector that is loaded once, rather than by each instruction that reads it: a load that crosses a line takes two. */
#if defined(__AVX512F__)
#define GEMM_KEEP_VECTOR(vector) __asm__("" : "+v"(vector))
#elif defined(__SSE2__)
#define GEMM_KEEP_VECTOR(vector) __asm__("" : "+x"(vector))
#elif defined(__aarch64__)
#define GEMM_KEEP_VECTOR(vector) __asm__("" : "+w"(vector))
#else
#define GEMM_KEEP_VECTOR(vector) (void)(vector)
#endif

static GEMM_UNUSED int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static GEMM_UNUSED int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static GEMM_UNUSED int64_t whole(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

enum { GEMM_FEW_SIDES = 4 }; /* stretches of a panel's rows that are copied side by side, rather than transposed */
#ifdef GEMM_SHUFFLES
enum { GEMM_APART = 2 }; /* elements so far apart are read by vectors, too */
#else
enum { GEMM_APART = 1 };
#endif

/* A stretch of an axis that is evenly spaced: where it is, its place in elements, and how many positions it has. */
typedef struct {
  int64_t index[GRADC_PARTS], place, count;
} gemm_stretch;

/* From position `at` on. */
static GEMM_UNUSED gemm_stretch gemm_stretch_at(const gradc_axis *axis, int64_t at) {
  gemm_stretch s = {.count = 0};
  for (int64_t i = axis->count - 1; i >= 0; i--) {
    s.index[i] = at % axis->size[i];
    s.place += s.index[i] * axis->step[i];
    at /= axis->size[i];
  }
  s.count = axis->size[axis->count - 1] - s.index[axis->count - 1];
  return s;
}

/* The one behind it. */
static inline void gemm_next_stretch(const gradc_axis *axis, gemm_stretch *s) {
  int64_t i = axis->count - 1;
  s->place -= s->index[i] * axis->step[i];
  s->index[i] = 0;
  s->count = axis->size[i];
  while (--i >= 0) {
    s->place += axis->step[i];
    if (++s->index[i] < axis->size[i]) {
      return;
    }
    s->place -= axis->size[i] * axis->step[i];
    s->index[i] = 0;
  }
}

/* The places of `count` steps from `at` on, and the furthest one. */
static GEMM_UNUSED int64_t gemm_find_places(const gradc_axis *axis, int64_t at, int64_t count, int64_t *places) {
  const int64_t apart = axis->step[axis->count - 1];
  gemm_stretch s = gemm_stretch_at(axis, at);
  int64_t furthest = s.place;
  for (int64_t p = 0; p < count; gemm_next_stretch(axis, &s)) {
    for (int64_t end = p + at_most(s.count, count - p), place = s.place; p < end; p++, place += apart) {
      places[p] = place;
      furthest = place > furthest ? place : furthest;
    }
  }
  return furthest;
}

/* Whether any `width` positions in a row are few stretches that are read by vectors. */
static GEMM_UNUSED int gemm_few_stretches(const gradc_axis *axis, int width) {
  const int64_t apart = axis->step[axis->count - 1];
  return (apart == 1 || apart == GEMM_APART) && (width - 2) / axis->size[axis->count - 1] + 2 <= GEMM_FEW_SIDES;
}

/* Rows of a, or columns of b, in panels: elements from a panel to the next, in it from a row (column) to the next, and from a
 * step to the next. */
typedef struct {
  const char *data;
  int64_t panel, across, step;
} gemm_panels;

/* Rows and columns of a result from row 0 of a block and column 0 of the whole on: elements from a row (column) to the next, and
 * what is between two columns more after every `each`. */
typedef struct {
  char *data;
  int64_t row, col, each, apart;
} gemm_result;

/* Elements from column 0 to column j. */
static inline int64_t gemm_column(const gemm_result *c, int64_t j) { return j * c->col + (c->apart ? j / c->each * c->apart : 0); }

/* The kernels of a type, as gemm.h has them for floats: see there. */
typedef struct gemm_type {
  int64_t size, packed; /* bytes of an element of the result, and of one in a panel */
  int integers;         /* whether its sums are */
  int64_t mr, nr, lanes;
  int64_t whole, kc, head; /* a panel's steps are filled up to a multiple; steps of a block, before which there are so many more */
  int64_t packs;     /* bytes of the panels that are in memory at a time */
  double speed;      /* operations a second, of those of f32 */
  const struct gemm_type *turned; /* of the product of the transposes, if another */
  /* Both say whether there are elements that `block` cannot multiply. */
  int (*pack_rows)(void *to, const gradc_matrix *a, int64_t i0, int64_t p0, int64_t i, int64_t rows, int64_t steps);
  int (*pack_columns)(void *to, const gradc_matrix *b, int64_t p0, int64_t j0, int64_t j, int64_t cols, int64_t steps);
  void (*block)(int64_t m, int64_t n, int64_t k, int64_t kc, gemm_panels a, gemm_panels b, gemm_result c, int64_t j0, int add);
  /* What multiplies few rows of a with b where it lies, which is not packed; 0: nothing.  Whether it does, for so many rows; and the
   * bytes of its workspace, most for `most_rows` of them. */
  int (*few)(int64_t m, const gradc_matrix *b);
  int64_t most_rows;
  int64_t (*rows_bytes)(int64_t m, int64_t k);
  void (*rows)(int64_t m, int64_t n, int64_t k, int64_t p0, int64_t j0, const gradc_matrix *a, const gradc_matrix *b, char *c, int64_t c_row, int64_t c_col, int add,
               void *workspace);
} gemm_type;

/* Types of products, and their kernels.  Those of one are a library of their own, which runtime.c is given before a product needs it, or
 * are one text with it: most programs multiply f32 alone, and a compiler works on the others for twice as long as on all else. */
enum { GEMM_F32, GEMM_F64, GEMM_BF16, GEMM_I8, GEMM_TYPES };
typedef struct {
  int64_t type;             /* of these */
  const gemm_type *of[2][2]; /* by whether a and b have a sign, where that matters; 0: this processor has none, and those of f32 multiply */
} gemm_kernels;

#endif
