/* One tile of a matrix product on one thread, for operands with any strides.  Included once per type: T is the element,
 * GEMM(name) makes the names.  The layout is Goto's: B is packed into panels of NR columns, A into panels of MR rows, and
 * a kernel keeps MR x NR sums in registers.  (Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication.) */

typedef T GEMM(vec) __attribute__((vector_size(GEMM_BYTES), aligned(sizeof(T))));

enum { GEMM(LANES) = GEMM_BYTES / sizeof(T), GEMM(NR) = 2 * GEMM(LANES) };

/* c[MR,NR] (+)= a[MR,kc] x panel b over kc > 0 steps; a's element (i, p) is a[i * a_row + p * a_col], c has rows ldc apart.  Registers
 * add `run` steps and memory the runs: the error grows with the square root of their length, not of kc. */
static inline __attribute__((always_inline)) void GEMM(steps)(int64_t kc, const T *restrict a, int64_t a_row, int64_t a_col,
                                                               const T *restrict b, T *restrict c, int64_t ldc, int add, int64_t run) {
  for (int64_t p = 0, end; p < kc; add = 1) {
    end = kc - p < run ? kc : p + run;
    GEMM(vec) sums[GEMM_MR][2];
    for (int i = 0; i < GEMM_MR; i++) {
      sums[i][0] = sums[i][1] = (GEMM(vec)){0};
    }
    for (; p < end; p++) {
      const GEMM(vec) b0 = *(const GEMM(vec) *)(b + p * GEMM(NR));
      const GEMM(vec) b1 = *(const GEMM(vec) *)(b + p * GEMM(NR) + GEMM(LANES));
#pragma GCC unroll 16
      for (int i = 0; i < GEMM_MR; i++) {
        const T ai = a[i * a_row + p * a_col];
        sums[i][0] += ai * b0;
        sums[i][1] += ai * b1;
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < GEMM_MR; i++) {
      GEMM(vec) *row0 = (GEMM(vec) *)(c + i * ldc), *row1 = (GEMM(vec) *)(c + i * ldc + GEMM(LANES));
      *row0 = add ? *row0 + sums[i][0] : sums[i][0];
      *row1 = add ? *row1 + sums[i][1] : sums[i][1];
    }
  }
}

static void GEMM(kernel)(int64_t kc, const T *a, const T *b, T *c, int64_t ldc, int add, int64_t run) {
  GEMM(steps)(kc, a, 1, GEMM_MR, b, c, ldc, add, run);
}

/* The same with a not packed, its rows contiguous. */
static void GEMM(direct)(int64_t kc, const T *a, int64_t a_row, const T *b, T *c, int64_t ldc, int add, int64_t run) {
  GEMM(steps)(kc, a, a_row, 1, b, c, ldc, add, run);
}

/* Panels of `width` rows (or columns), [panel][step][width], the last one filled up with zeros. */
static void GEMM(pack)(T *restrict to, const T *restrict from, int64_t count, int64_t steps, int64_t across, int64_t along, int width) {
  for (int64_t i0 = 0; i0 < count; i0 += width, to += steps * width) {
    const int w = count - i0 < width ? (int)(count - i0) : width;
    const T *panel = from + i0 * across;
    if (w < width) {
      memset(to, 0, (size_t)(steps * width) * sizeof(T));
    }
    if (across == 1) {
      for (int64_t p = 0; p < steps; p++) {
        memcpy(to + p * width, panel + p * along, (size_t)w * sizeof(T));
      }
    } else {
      for (int64_t p0 = 0; p0 < steps; p0 += 16) { /* short runs, so that both sides stay in the first cache */
        const int64_t end = p0 + 16 < steps ? p0 + 16 : steps;
        for (int i = 0; i < w; i++) {
          for (int64_t p = p0; p < end; p++) {
            to[p * width + i] = panel[i * across + p * along];
          }
        }
      }
    }
  }
}

/* The same, from elements of another type; short runs again. */
static void GEMM(pack_read)(T *restrict to, const gradc_matrix *in, int64_t at, int64_t count, int64_t steps, int64_t across, int64_t along, int width) {
  for (int64_t i0 = 0; i0 < count; i0 += width, to += steps * width) {
    const int w = count - i0 < width ? (int)(count - i0) : width;
    const char *panel = in->data + (at + i0 * across) * in->bytes;
    if (w < width) {
      memset(to, 0, (size_t)(steps * width) * sizeof(T));
    }
    if (across == 1) {
      for (int64_t p = 0; p < steps; p++) {
        in->read(to + p * width, panel + p * along * in->bytes, w, 1, 1);
      }
    } else {
      for (int64_t p = 0; p < steps; p += 32) {
        for (int i = 0; i < w; i++) {
          in->read(to + p * width + i, panel + (i * across + p * along) * in->bytes, steps - p < 32 ? steps - p : 32, width, along);
        }
      }
    }
  }
}

/* Panels times the scales of rows (columns) i and steps p on. */
static void GEMM(pack_scale)(T *restrict to, const T *restrict scale, int64_t i, int64_t p, int64_t count, int64_t steps, int64_t across, int64_t along,
                             int64_t across_per, int64_t along_per, int width) {
  for (int64_t i0 = 0; i0 < count; i0 += width, to += steps * width) {
    const int w = count - i0 < width ? (int)(count - i0) : width;
    T line[GEMM_MR > GEMM(NR) ? GEMM_MR : GEMM(NR)];
    for (int64_t q = 0, end; q < steps; q = end) { /* steps that have one line of scales */
      end = along ? ((p + q) / along_per + 1) * along_per - p : steps;
      end = end < steps ? end : steps;
      for (int x = 0; x < w; x++) {
        line[x] = scale[(i + i0 + x) / across_per * across + (p + q) / along_per * along];
      }
      for (int64_t step = q; step < end; step++) {
        for (int x = 0; x < w; x++) {
          to[step * width + x] *= line[x];
        }
      }
    }
  }
}

/* Where a tile of an operand begins in the whole of it, which decides what groups it lies in; columns of b are the rows of its transpose. */
typedef struct {
  const gradc_matrix *in;
  int64_t row, col;
  int transposed;
} GEMM(part);

/* Panels of rows from i and steps from p on, both counted from the tile. */
static void GEMM(panels)(T *to, GEMM(part) t, int64_t i, int64_t p, int64_t count, int64_t steps, int width) {
  const gradc_matrix *in = t.in;
  const int64_t across = t.transposed ? in->col : in->row, along = t.transposed ? in->row : in->col;
  const int64_t at = i * across + p * along;
  if (in->read) {
    GEMM(pack_read)(to, in, at, count, steps, across, along, width);
  } else {
    GEMM(pack)(to, (const T *)in->data + at, count, steps, across, along, width);
  }
  if (in->scale && t.transposed) {
    GEMM(pack_scale)(to, (const T *)in->scale, t.col + i, t.row + p, count, steps, in->scale_col, in->scale_row, in->col_per, in->row_per, width);
  } else if (in->scale) {
    GEMM(pack_scale)(to, (const T *)in->scale, t.row + i, t.col + p, count, steps, in->scale_row, in->scale_col, in->row_per, in->col_per, width);
  }
}

static T GEMM(element)(GEMM(part) t, int64_t row, int64_t col) {
  const gradc_matrix *in = t.in;
  const char *from = in->data + (row * in->row + col * in->col) * in->bytes;
  T value;
  if (in->read) {
    in->read(&value, from, 1, 1, 1);
  } else {
    memcpy(&value, from, sizeof value);
  }
  return in->scale ? value * ((const T *)in->scale)[(t.row + row) / in->row_per * in->scale_row + (t.col + col) / in->col_per * in->scale_col] : value;
}

/* c[m,n] (+)= a[m,k] b[k,n], from row i0, step p0 and column j0 of the whole on; m <= GEMM_MC, n <= GEMM_NC; c has rows ldc apart. */
static void GEMM(tile)(int64_t m, int64_t n, int64_t k, int64_t i0, int64_t p0, int64_t j0, const gradc_matrix *a, const gradc_matrix *b, T *c,
                       int64_t ldc, int add, void *workspace) {
  const GEMM(part) left = {a, i0, p0, 0}, right = {b, p0, j0, 1};
  if (!workspace) { /* no memory: slow and right */
    for (int64_t i = 0; i < m; i++) {
      for (int64_t j = 0; j < n; j++) {
        T sum = 0;
        for (int64_t p = 0; p < k; p++) {
          sum += GEMM(element)(left, i, p) * GEMM(element)(right, p, j);
        }
        c[i * ldc + j] = add ? c[i * ldc + j] + sum : sum;
      }
    }
    return;
  }
  T *pa = workspace, *pb = pa + (GEMM_MC + GEMM_MR) * GEMM_KC;
  T edge[GEMM_MR * GEMM(NR)];
  /* Packing a pays when its rows are read often; its last panel, if not full, needs the zeros. */
  const int direct = !a->read && !a->scale && a->col == 1 && n <= 4 * GEMM(NR);
  const int64_t whole = direct ? m / GEMM_MR * GEMM_MR : 0;
  for (int64_t p = 0; p < k; p += GEMM_KC) {
    const int64_t kc = k - p < GEMM_KC ? k - p : GEMM_KC;
    const int more = add || p > 0;
    GEMM(panels)(pa, left, whole, p, m - whole, kc, GEMM_MR);
    GEMM(panels)(pb, right, 0, p, n, kc, GEMM(NR));
    for (int64_t j = 0; j < n; j += GEMM(NR)) {
      for (int64_t i = 0; i < m; i += GEMM_MR) {
        const T *panel_a = pa + (i - whole) * kc, *panel_b = pb + j * kc;
        const int full = n - j >= GEMM(NR);
        if (i < whole && full) {
          GEMM(direct)(kc, (const T *)a->data + i * a->row + p, a->row, panel_b, c + i * ldc + j, ldc, more, GEMM_LONG);
        } else if (m - i >= GEMM_MR && full) {
          GEMM(kernel)(kc, panel_a, panel_b, c + i * ldc + j, ldc, more, GEMM_LONG);
        } else {
          const int64_t rows = m - i < GEMM_MR ? m - i : GEMM_MR, cols = n - j < GEMM(NR) ? n - j : GEMM(NR);
          if (i < whole) {
            GEMM(direct)(kc, (const T *)a->data + i * a->row + p, a->row, panel_b, edge, GEMM(NR), 0, GEMM_SHORT);
          } else {
            GEMM(kernel)(kc, panel_a, panel_b, edge, GEMM(NR), 0, GEMM_SHORT);
          }
          for (int64_t r = 0; r < rows; r++) {
            for (int64_t s = 0; s < cols; s++) {
              T *to = c + (i + r) * ldc + j + s;
              *to = more ? *to + edge[r * GEMM(NR) + s] : edge[r * GEMM(NR) + s];
            }
          }
        }
      }
    }
  }
}

#undef T
#undef GEMM
