/* Kernels of a matrix product and what drives them over panels; gemm.h says how it is cut.  Included once per kind of panel: T is an
 * element of one and of the result, GEMM_SIZE its bytes, one step of the product or several; GEMM_ADD(sum, a, b) adds a's element times a vector of b's, step
 * by step, to a vector of sums; GEMM_CHAIN is how many elements are added up in a register, GEMM_HEADS whether the first element of each
 * block of steps is what a sum begins with, a's and b's; and GEMM(name) makes the names. */

#include "gemm_vector.h"

enum { GEMM(NR) = 2 * GEMM(LANES), GEMM(RUN) = GEMM_CHAIN };

/* `unroll` steps of all sums, or their heads; from[i / 3] is row i - i % 3 of a. */
static inline __attribute__((always_inline)) void GEMM(add_steps)(const int rows, const int vectors, const int unroll, const int heads, GEMM(vec) (*sums)[2], const T **from, int64_t a_row,
                                                                  int64_t a_step, const T **from_b, int64_t b_step) {
#pragma GCC unroll 8
  for (int u = 0; u < unroll; u++) {
    const T *b = *from_b;
    GEMM(vec) b0 = *(const GEMM(vec) *)b, b1 = vectors > 1 ? *(const GEMM(vec) *)(b + GEMM(LANES)) : b0;
    GEMM_KEEP_VECTOR(b0);
    if (vectors > 1) {
      GEMM_KEEP_VECTOR(b1);
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
      const T ai = from[i / 3][i % 3 * a_row + u * a_step];
      if (heads) {
        sums[i][0] = ai + b0;
        sums[i][1] = ai + b1;
        continue;
      }
      GEMM_ADD(sums[i][0], ai, b0);
      if (vectors > 1) {
        GEMM_ADD(sums[i][1], ai, b1);
      }
    }
    *from_b += b_step;
    GEMM_KEEP(*from_b);
  }
#pragma GCC unroll 4
  for (int i = 0; i < rows; i += 3) {
    from[i / 3] += unroll * a_step;
    GEMM_KEEP(from[i / 3]);
  }
}

/* c[rows,wide] (+)= a[rows,kc] b[kc,wide] for kc > 0 and `wide` one or two vectors; a's element (i, p) is a[i * a_row + p * a_step],
 * b and c have rows b_step and c_row apart.  The second accumulators are c's own when the first run begins and the last one
 * ends, and between them contiguous memory that stays in the first cache. */
static inline __attribute__((always_inline)) void GEMM(steps)(const int rows, const int vectors, const int far, int64_t kc, const T *restrict a, int64_t a_row, int64_t a_step,
                                                               const T *b, int64_t b_step, T *restrict c, int64_t c_row, int add) {
  const int unroll = rows == GEMM_MR ? GEMM_UNROLL : 1; /* a loop of few rounds, whose end is predicted */
  const T *from[4];
  T *to[4];
  GEMM(vec) totals[GEMM_MR][2];
#pragma GCC unroll 4
  for (int i = 0; i < rows; i += 3) {
    from[i / 3] = a + i * a_row;
    to[i / 3] = c + i * c_row;
    GEMM_KEEP(from[i / 3]);
    GEMM_KEEP(to[i / 3]);
  }
  if (kc > GEMM_UNROLL) { /* c may be far away: its lines come while the sums grow */
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 2
      for (int v = 0; v < vectors; v++) {
        __builtin_prefetch(to[i / 3] + i % 3 * c_row + v * GEMM(LANES), 1);
      }
    }
  }
  for (int64_t p = 0;;) {
    const int64_t begin = p, end = kc - p < GEMM(RUN) ? kc : p + GEMM(RUN);
    GEMM(vec) sums[GEMM_MR][2];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
      sums[i][0] = sums[i][1] = (GEMM(vec)){0};
    }
    for (; GEMM_HEADS && p == 0; p++) {
      GEMM(add_steps)(rows, vectors, 1, 1, sums, from, a_row, a_step, &b, b_step);
    }
    for (; p + unroll <= end; p += unroll) {
      if (far) { /* b's lines are fetched before they are read, too */
#pragma GCC unroll 8
        for (int u = GEMM_UNROLL; u < GEMM_UNROLL + unroll; u++) {
          __builtin_prefetch(b + u * b_step);
          if (vectors > 1) {
            __builtin_prefetch(b + u * b_step + GEMM(LANES));
          }
        }
      }
      GEMM(add_steps)(rows, vectors, unroll, 0, sums, from, a_row, a_step, &b, b_step);
    }
    for (; unroll > 1 && p < end; p++) {
      GEMM(add_steps)(rows, vectors, 1, 0, sums, from, a_row, a_step, &b, b_step);
    }
#define GEMM_EACH(statement)                    \
  _Pragma("GCC unroll 16")                      \
  for (int i = 0; i < rows; i++) {              \
    _Pragma("GCC unroll 2")                     \
    for (int v = 0; v < vectors; v++) {         \
      statement;                                \
    }                                           \
  }
#define GEMM_TO(i, v) (*(GEMM(vec) *)(to[i / 3] + i % 3 * c_row + v * GEMM(LANES)))
    if (begin > 0) {
      GEMM_EACH(sums[i][v] = totals[i][v] + sums[i][v])
    } else if (add) {
      GEMM_EACH(sums[i][v] = GEMM_TO(i, v) + sums[i][v])
    }
    if (end == kc) {
      GEMM_EACH(GEMM_TO(i, v) = sums[i][v])
      return;
    }
    GEMM_EACH(totals[i][v] = sums[i][v])
  }
#undef GEMM_EACH
#undef GEMM_TO
}

/* Kernels of a as it is packed, whose addresses are constants: of a third of a panel's rows, two, all, and all with b from far away; and
 * of a where it is, all of a panel's rows or a third. */
enum { GEMM(THIRD) = GEMM_MR / 3, GEMM(PANEL) = 2, GEMM(STREAMED) = 3, GEMM(IN_PLACE) = 4, GEMM(THIRD_IN_PLACE) = 5 };
typedef void (*GEMM(kernel))(int64_t kc, const T *a, int64_t a_row, const T *b, int64_t b_step, T *c, int64_t c_row, int add);
#define GEMM_KERNEL(name, rows, vectors, far, row, step)                                                                         \
  static __attribute__((noinline)) void GEMM(name##_##vectors)(int64_t kc, const T *a, int64_t a_row, const T *b, int64_t b_step, \
                                                               T *c, int64_t c_row, int add) {                                   \
    (void)a_row;                                                                                                                 \
    GEMM(steps)(rows, vectors, far, kc, a, row, step, b, b_step, c, c_row, add);                                                 \
  }
#define GEMM_DEFINE(name, rows, far, row, step) GEMM_KERNEL(name, rows, 1, far, row, step) GEMM_KERNEL(name, rows, 2, far, row, step)
GEMM_DEFINE(third, GEMM(THIRD), b_step > 4 * GEMM(NR), 1, GEMM_MR)
GEMM_DEFINE(thirds, 2 * GEMM(THIRD), b_step > 4 * GEMM(NR), 1, GEMM_MR)
GEMM_DEFINE(panel, GEMM_MR, 0, 1, GEMM_MR)
GEMM_KERNEL(streamed, GEMM_MR, 2, 1, 1, GEMM_MR)
GEMM_DEFINE(in_place, GEMM_MR, 0, a_row, 1)
GEMM_DEFINE(third_in_place, GEMM(THIRD), 0, a_row, 1)
#define GEMM_NAMES(name) {GEMM(name##_1), GEMM(name##_2)}
static const GEMM(kernel) GEMM(kernels)[6][2] = { /* [thirds - 1, STREAMED, ...][vectors - 1] */
  GEMM_NAMES(third), GEMM_NAMES(thirds), GEMM_NAMES(panel), {GEMM(panel_1), GEMM(streamed_2)}, GEMM_NAMES(in_place), GEMM_NAMES(third_in_place)};
#undef GEMM_NAMES
#undef GEMM_KERNEL
#undef GEMM_DEFINE

/* to[i] = from[i] for i < count <= 2 LANES. */
static inline __attribute__((always_inline)) void GEMM(copy)(T *restrict to, const T *restrict from, int count) {
#pragma GCC unroll 8
  for (int some = GEMM(NR); some > 0; some /= 2) {
    if (count & some) {
      __builtin_memcpy(to, from, (size_t)some * sizeof(T));
      to += some, from += some;
    }
  }
}

static inline int GEMM(how)(int rows, int64_t across, int64_t b_step) {
  const int thirds = (rows - 1) / GEMM(THIRD);
  return across != 1 ? (rows == GEMM_MR ? GEMM(IN_PLACE) : GEMM(THIRD_IN_PLACE)) : thirds == GEMM(PANEL) && b_step > 4 * GEMM(NR) ? GEMM(STREAMED) : thirds;
}

/* What lies at an edge of the result, or in columns that are not contiguous, or `apart` more after `whole` of them: the sums are in memory of their own, of whole thirds
 * of a panel, which a has if it is packed; else it is here. */
static __attribute__((noinline)) void GEMM(at_edge)(int rows, int cols, int64_t kc, gemm_panels a, const T *from_a, const T *b, int64_t b_step, T *c, int64_t c_row, int64_t c_col,
                                                    int whole, int64_t apart, int add) {
  T sums[GEMM_MR * GEMM(NR)] __attribute__((aligned(64))) = {0}, packed[2 * GEMM_KC * GEMM_MR];
  const int vectors = cols <= GEMM(LANES) ? 1 : 2;
  if (a.across != 1 && rows % GEMM(THIRD)) {
    for (int64_t p = 0; p < kc; p++) {
      for (int r = 0; r < GEMM(THIRD); r++) {
        packed[p * GEMM_MR + r] = r < rows ? from_a[r * a.across + p * a.step] : 0;
      }
    }
    from_a = packed, a.across = 1;
  }
  for (int r = 0; add && r < rows; r++) {
    for (int s = 0; c_col != 1 && s < cols; s++) {
      sums[r * GEMM(NR) + s] = c[r * c_row + s * c_col];
    }
    GEMM(copy)(sums + r * GEMM(NR), c + r * c_row, c_col == 1 ? whole : 0);
    GEMM(copy)(sums + r * GEMM(NR) + whole, c + r * c_row + whole + apart, cols - whole);
  }
  GEMM(kernels)[GEMM(how)(rows, a.across, b_step)][vectors - 1](kc, from_a, a.across, b, b_step, sums, GEMM(NR), add);
  for (int r = 0; r < rows; r++) {
    for (int s = 0; c_col != 1 && s < cols; s++) {
      c[r * c_row + s * c_col] = sums[r * GEMM(NR) + s];
    }
    GEMM(copy)(c + r * c_row, sums + r * GEMM(NR), c_col == 1 ? whole : 0);
    GEMM(copy)(c + r * c_row + whole + apart, sums + r * GEMM(NR) + whole, cols - whole);
  }
}

/* c[m,n] (+)= a[m,k] b[k,n], both in panels; columns from j0 of the whole on.  kc steps at a time: a panel of a
 * stays in the first cache while those of b, which stay in the second, pass by. */
static void GEMM(block)(int64_t m, int64_t n, int64_t k, int64_t kc, gemm_panels a, gemm_panels b, gemm_result c, int64_t j0, int add) {
  for (int64_t p = 0; p < k; p += kc, add = 1) {
    const int64_t steps = k - p < kc ? k - p : kc;
    for (int64_t i = 0, rows; i < m; i += rows) {
      rows = m - i < GEMM_MR ? m - i : GEMM_MR;
      rows = rows < GEMM_MR && rows > GEMM(THIRD) && a.across != 1 ? GEMM(THIRD) : rows;
      const T *from_a = (const T *)a.data + i / GEMM_MR * a.panel + i % GEMM_MR * a.across + p * a.step;
      for (int64_t j = 0; j < n; j += GEMM(NR)) {
        const int cols = n - j < GEMM(NR) ? (int)(n - j) : GEMM(NR);
        const T *from_b = (const T *)b.data + j / GEMM(NR) * b.panel + p * b.step;
        T *to = (T *)c.data + i * c.row + gemm_column(&c, j0 + j);
        const int whole = c.apart ? (int)at_most(cols, c.each - (j0 + j) % c.each) : cols;
        if (c.col != 1 || cols % GEMM(LANES) || rows % GEMM(THIRD) || whole < cols) {
          GEMM(at_edge)((int)rows, cols, steps, a, from_a, from_b, b.step, to, c.row, c.col, whole, c.apart, add);
        } else {
          GEMM(kernels)[GEMM(how)((int)rows, a.across, b.step)][cols / GEMM(LANES) - 1](steps, from_a, a.across, from_b, b.step, to, c.row, add);
        }
      }
    }
  }
}

