/* Blocks of a matrix product on one thread, for operands with any strides.  Included once per type: T is the element,
 * GEMM_SIZE its bytes, GEMM(name) makes the names.  The layout is Goto's: B is packed into panels of NR columns, A into panels
 * of MR rows, and a kernel keeps MR x NR sums in registers.  (Goto and van de Geijn, Anatomy of High-Performance Matrix
 * Multiplication.)
 *
 * An element's bits depend on its row of A, its column of B and its k alone: RUN steps are added up in a register, from the
 * first on, and the sums of the runs in a second accumulator, from the first on.  So it matters neither how an operand lies,
 * nor what is packed, nor how the result is cut, nor where in it the element is. */

#define GEMM_CHAIN GEMM_RUN
#define GEMM_HEADS 0
#define GEMM_ADD(sum, a, b) ((sum) += (a) * (b))
#include "gemm_kernels.h"
#undef GEMM_CHAIN
#undef GEMM_HEADS
#undef GEMM_ADD

/* A vector that is stored over a panel's end reaches no further than the step behind it. */
_Static_assert(GEMM(LANES) <= 2 * GEMM_MR, "a vector is wider than two steps of a panel");

/* to[p * width + i] = from[at[i] + p * apart] for i < rows <= LANES and p < steps <= LANES; LANES steps are read. */
static inline __attribute__((always_inline)) void GEMM(pack_lines)(T *restrict to, const T *restrict from, const int64_t *at, int rows, int steps, const int width,
                                                                   const int apart) {
  enum { LANES = GEMM(LANES) };
  GEMM(vec) v[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) {
    v[i] = i < rows ? GEMM(read_apart)(from + at[i], apart) : (GEMM(vec)){0};
  }
  GEMM(turn)(v);
  if (rows == LANES) {
#pragma GCC unroll 16
    for (int p = 0; p < LANES; p++) {
      if (p < steps) {
        *(GEMM(vec) *)(to + p * width) = v[p];
      }
    }
  } else if (width < LANES && rows == width) { /* what a vector has more than the width the next step overwrites */
#pragma GCC unroll 16
    for (int p = 0; p < LANES; p++) {
      if (p < steps - 1) {
        *(GEMM(vec) *)(to + p * width) = v[p];
      } else if (p < steps) {
        const GEMM(vec) last = v[p];
        memcpy(to + p * width, &last, (size_t)width * sizeof(T));
      }
    }
  } else {
    for (int p = 0; p < steps; p++) {
      memcpy(to + p * width, &v[p], (size_t)rows * sizeof(T));
    }
  }
}

/* v[p][i] = from[i * across + p] for i < rows <= LANES and p < LANES.  Nothing is fetched ahead: rows a power of two apart would
 * displace each other from the first cache before their lines are read to the end. */
static inline __attribute__((always_inline)) void GEMM(read_square)(GEMM(vec) *v, const T *restrict from, int64_t across, const int rows) {
#pragma GCC unroll 16
  for (int i = 0; i < GEMM(LANES); i++) {
    v[i] = i < rows ? *(const GEMM(vec) *)(from + i * across) : (GEMM(vec)){0};
  }
  GEMM(turn)(v);
}

/* to[p * width + i] = from[i * across + p] for i < width and p < LANES. */
static inline __attribute__((always_inline)) void GEMM(pack_square)(T *restrict to, const T *restrict from, int64_t across, const int width) {
  enum { LANES = GEMM(LANES) };
  if (width % LANES == 0) {
#pragma GCC unroll 4
    for (int i = 0; i < width; i += LANES) {
      GEMM(vec) v[LANES];
      GEMM(read_square)(v, from + i * across, across, LANES);
#pragma GCC unroll 16
      for (int p = 0; p < LANES; p++) {
        *(GEMM(vec) *)(to + p * width + i) = v[p];
      }
    }
    return;
  }
  const int whole = width / LANES, rest = width % LANES; /* whole is 0 or 1 */
  GEMM(vec) v[2][LANES];
  if (whole) {
    GEMM(read_square)(v[0], from, across, LANES);
  }
  GEMM(read_square)(v[1], from + whole * LANES * across, across, rest);
#pragma GCC unroll 16
  for (int p = 0; p < LANES; p++) { /* what a vector has more than `rest` the next step overwrites */
    if (whole) {
      *(GEMM(vec) *)(to + p * width) = v[0][p];
    }
    if (p < LANES - 1) {
      *(GEMM(vec) *)(to + p * width + whole * LANES) = v[1][p];
    } else {
      const GEMM(vec) last = v[1][p];
      memcpy(to + p * width + whole * LANES, &last, (size_t)rest * sizeof(T));
    }
  }
}

/* Panels of `width` rows (or columns), [panel][step][width], the last one filled up with zeros; squares: of steps side by side are
 * transposed in registers. */
static inline __attribute__((always_inline)) void GEMM(pack)(T *restrict to, const T *restrict from, int64_t count, int64_t steps, int64_t across,
                                                              int64_t along, const int width, const int squares) {
  for (int64_t i0 = 0; i0 < count; i0 += width, to += steps * width) {
    const int w = count - i0 < width ? (int)(count - i0) : width;
    const T *panel = from + i0 * across;
    if (across == 1) {
      if (count - i0 >= GEMM_SIDE_BY_SIDE * width) { /* panels side by side, so that reads are long */
        for (int64_t p = 0; p < steps; p++) {
#pragma GCC unroll 8
          for (int x = 0; x < GEMM_SIDE_BY_SIDE; x++) {
            memcpy(to + x * steps * width + p * width, panel + p * along + x * width, (size_t)width * sizeof(T));
            __builtin_prefetch(panel + (p + 8) * along + x * width);
          }
        }
        i0 += (GEMM_SIDE_BY_SIDE - 1) * width, to += (GEMM_SIDE_BY_SIDE - 1) * steps * width;
        continue;
      }
      for (int64_t p = 0; p < steps; p++) {
        if (w == width) {
          memcpy(to + p * width, panel + p * along, (size_t)width * sizeof(T));
        } else {
#pragma omp simd
          for (int i = 0; i < width; i++) {
            to[p * width + i] = i < w ? panel[i + p * along] : 0;
          }
        }
      }
      continue;
    }
    if (w < width) {
      memset(to, 0, (size_t)(steps * width) * sizeof(T));
    }
    int64_t transposed = 0;
    if (squares && along == 1 && w == width) {
      for (; transposed + GEMM(LANES) <= steps; transposed += GEMM(LANES)) {
        GEMM(pack_square)(to + transposed * width, panel + transposed, across, width);
      }
    }
    for (int64_t p0 = transposed; p0 < steps; p0 += 16) { /* short runs, so that both sides stay in the first cache */
      const int64_t end = p0 + 16 < steps ? p0 + 16 : steps;
      for (int i = 0; i < w; i++) {
        for (int64_t p = p0; p < end; p++) {
          to[p * width + i] = panel[i * across + p * along];
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

/* Elements that are side by side in memory, from element `at` and row and column on, as T and times their scales: along the rows or the columns. */
static inline __attribute__((always_inline)) void GEMM(read_line)(T *restrict to, const gradc_matrix *in, int64_t at, int64_t row, int64_t col, int64_t count,
                                                                  const int along_rows) {
  if (in->read) {
    in->read(to, in->data + at * in->bytes, count, 1, 1);
  } else {
    memcpy(to, (const T *)in->data + at, (size_t)count * sizeof(T));
  }
  if (!in->scale) {
    return;
  }
  const T *scale = (const T *)in->scale + (along_rows ? col / in->col_per * in->scale_col : row / in->row_per * in->scale_row);
  const int64_t first = along_rows ? row : col, step = along_rows ? in->scale_row : in->scale_col, per = along_rows ? in->row_per : in->col_per;
  if (step && per == 1) {
    for (int64_t i = 0; i < count; i++) {
      to[i] *= scale[(first + i) * step];
    }
    return;
  }
  for (int64_t i = 0, end; i < count; i = end) { /* elements that have one scale */
    end = step ? at_most(((first + i) / per + 1) * per - first, count) : count;
    const T factor = scale[step ? (first + i) / per * step : 0];
#pragma omp simd
    for (int64_t x = i; x < end; x++) {
      to[x] *= factor;
    }
  }
}

/* Panels of rows from i and steps from p on of an operand of another type, or with scales: by lines, as it lies. */
static inline __attribute__((always_inline)) void GEMM(pack_read)(T *restrict to, GEMM(part) t, int64_t i, int64_t p, int64_t count, int64_t steps, int64_t across,
                                                                  int64_t along, const int width, const int squares) {
  enum { LINE = 128, WIDEST = GEMM_MR > GEMM(NR) ? GEMM_MR : GEMM(NR) };
  const gradc_matrix *in = t.in;
  const int64_t at = i * across + p * along, row = t.row + (t.transposed ? p : i), col = t.col + (t.transposed ? i : p);
  if (along == 1) {
    T lines[WIDEST * LINE];
    for (int64_t i0 = 0; i0 < count; i0 += width, to += steps * width) {
      const int64_t w = at_most(count - i0, width);
      for (int64_t q = 0; q < steps; q += LINE) {
        const int64_t some = at_most(steps - q, LINE);
        for (int64_t x = i0; x < i0 + w; x++) { /* each line from another page: the next one is asked for, of the last one's row, of the next panel */
          const int64_t next = q + LINE < steps ? x * across + q + LINE : (x + width) * across;
          for (int64_t e = 0; e < LINE * in->bytes; e += 64) {
            __builtin_prefetch(in->data + (at + next) * in->bytes + e);
          }
          GEMM(read_line)(lines + (x - i0) * LINE, in, at + x * across + q, row + (t.transposed ? q : x), col + (t.transposed ? x : q), some, t.transposed);
        }
        GEMM(pack)(to + q * width, lines, w, some, LINE, 1, width, squares);
      }
    }
  } else if (across == 1) { /* panels side by side, so that lines are long */
    T line[GEMM_SIDE_BY_SIDE * WIDEST];
    for (int64_t i0 = 0, some; i0 < count; i0 += some, to += some * steps) {
      some = at_most(count - i0, GEMM_SIDE_BY_SIDE * width);
      memset(line + some / width * width, 0, (size_t)(whole(some, width) - some / width * width) * sizeof(T));
      for (int64_t q = 0; q < steps; q++) {
        for (int64_t x = 0; x < some * in->bytes; x += 64) {
          __builtin_prefetch(in->data + (at + i0 + (q + 8) * along) * in->bytes + x);
        }
        GEMM(read_line)(line, in, at + i0 + q * along, row + (t.transposed ? q : i0), col + (t.transposed ? i0 : q), some, !t.transposed);
        for (int64_t x = 0; x < some; x += width) {
          memcpy(to + x * steps + q * width, line + x, (size_t)width * sizeof(T));
        }
      }
    }
  } else {
    for (int64_t i0 = 0; i0 < count; i0 += width, to += steps * width) {
      const int64_t w = at_most(count - i0, width);
      if (w < width) {
        memset(to, 0, (size_t)(steps * width) * sizeof(T));
      }
      for (int64_t q = 0; q < steps; q++) {
        for (int64_t x = i0; x < i0 + w; x++) {
          GEMM(read_line)(to + q * width + x - i0, in, at + x * across + q * along, row + (t.transposed ? q : x), col + (t.transposed ? x : q), 1, 0);
        }
      }
    }
  }
}

/* One panel of w rows from places, `at`, whose steps begin at p of `along`: as far as the steps allow by squares, transposed. */
static inline __attribute__((always_inline)) void GEMM(pack_apart)(T *restrict to, const gradc_matrix *in, const int64_t *at, int w, const gradc_axis *along, int64_t p,
                                                                   int64_t steps, const int width) {
  const T *restrict from = (const T *)in->data;
  const int64_t apart = along->step[along->count - 1];
  int64_t last = at[0];
  for (int i = 1; i < w; i++) {
    last = at[i] > last ? at[i] : last;
  }
  const int64_t readable = (in->places->end - in->data) / (int64_t)sizeof(T) - last; /* a place from which whole vectors are read ends before it */
  gemm_stretch s = gemm_stretch_at(along, p);
  for (int64_t q = 0, run; q < steps; q += run, gemm_next_stretch(along, &s)) {
    run = at_most(s.count, steps - q);
    int64_t done = 0;
    if ((apart == 1 || apart == GEMM_APART) && run > 2) {
      for (; done < run && s.place + (done + GEMM(LANES)) * apart <= readable; done += GEMM(LANES)) {
        for (int i = 0; i < w; i += GEMM(LANES)) {
          const int rows = (int)at_most(w - i, GEMM(LANES)), some = (int)at_most(run - done, GEMM(LANES));
          if (apart == 1) {
            GEMM(pack_lines)(to + (q + done) * width + i, from + s.place + done, at + i, rows, some, width, 1);
          } else {
            GEMM(pack_lines)(to + (q + done) * width + i, from + s.place + done * apart, at + i, rows, some, width, GEMM_APART);
          }
        }
      }
    }
    for (; done < run; done++) {
      for (int i = 0; i < w; i++) {
        to[(q + done) * width + i] = from[s.place + done * apart + at[i]];
      }
    }
    for (int64_t step = q; w < width && step < q + run; step++) {
      memset(to + step * width + w, 0, (size_t)(width - w) * sizeof(T));
    }
  }
}

/* Steps of a panel's rows that are `sides` stretches of elements `apart`, from row begin[x] and element at[x] of a step on: whole vectors, of
 * which what is too much is written over by what follows. */
static inline __attribute__((always_inline)) void GEMM(copy_stretches)(T *restrict to, const T *restrict from, const int64_t *places, int64_t steps, const int64_t *at,
                                                                       const int *begin, const int sides, const int apart, const int width) {
  for (int64_t p = 0; p < steps; p++) {
#pragma GCC unroll 2
    for (int x = 0; x < sides; x++) {
      const T *own = from + places[p] + at[x];
      T *line = to + p * width + begin[x];
#pragma GCC unroll 8
      for (int v = 0; v < width; v += GEMM(LANES)) {
        const GEMM(vec) some = GEMM(read_apart)(own + v * apart, apart);
        if (width - v >= GEMM(LANES)) {
          *(GEMM(vec) *)(line + v) = some;
        } else {
          memcpy(line + v, &some, (size_t)(width - v) * sizeof(T));
        }
      }
    }
  }
}

/* Rows that are few stretches of elements side by side, or `apart`; w of them. */
typedef struct {
  int64_t at[GEMM_FEW_SIDES];
  int begin[GEMM_FEW_SIDES + 1], sides;
} GEMM(stretches);

/* The same panel, of such rows; `places` of the steps, none behind `furthest`. */
static inline __attribute__((always_inline)) void GEMM(pack_stretches)(T *restrict to, const gradc_matrix *in, const GEMM(stretches) *r, const int64_t *places,
                                                                       int64_t furthest, int64_t steps, const int apart, const int width) {
  const T *restrict from = (const T *)in->data;
  const int w = r->begin[r->sides];
  int64_t last = r->at[0];
  for (int x = 1; x < r->sides; x++) {
    last = r->at[x] > last ? r->at[x] : last;
  }
  const int64_t readable = (in->places->end - in->data) / (int64_t)sizeof(T) - last;
  const int64_t quick = furthest + whole(width, GEMM(LANES)) * apart <= readable ? steps - 1 : 0;
  if (r->sides == 1) {
    GEMM(copy_stretches)(to, from, places, quick, r->at, r->begin, 1, apart, width);
  } else if (r->sides == 2) {
    GEMM(copy_stretches)(to, from, places, quick, r->at, r->begin, 2, apart, width);
  } else {
    GEMM(copy_stretches)(to, from, places, quick, r->at, r->begin, r->sides, apart, width);
  }
  for (int64_t p = quick; p < steps; p++) {
    for (int x = 0; x < r->sides; x++) {
      for (int i = r->begin[x]; i < r->begin[x + 1]; i++) {
        to[p * width + i] = from[places[p] + r->at[x] + (i - r->begin[x]) * apart];
      }
    }
  }
  for (int64_t p = 0; w < width && p < steps; p++) {
    memset(to + p * width + w, 0, (size_t)(width - w) * sizeof(T));
  }
}

/* The same panels as `pack`, from places: rows from i, steps from p on. */
static inline __attribute__((always_inline)) void GEMM(pack_places)(T *restrict to, const gradc_matrix *in, int transposed, int64_t i, int64_t p, int64_t count, int64_t steps,
                                                        const int width) {
  const gradc_axis *across = transposed ? &in->places->col : &in->places->row, *along = transposed ? &in->places->row : &in->places->col;
  const int64_t apart = across->step[across->count - 1];
  gemm_stretch s = gemm_stretch_at(across, i);
  int64_t used = 0;
  for (int64_t i0 = 0; i0 < count; i0 += width, to += steps * width) {
    const int w = count - i0 < width ? (int)(count - i0) : width;
    int64_t at[GEMM_MR > GEMM(NR) ? GEMM_MR : GEMM(NR)];
    for (int x = 0; x < w;) {
      if (used == s.count) {
        gemm_next_stretch(across, &s);
        used = 0;
      }
      for (; x < w && used < s.count; x++, used++) {
        at[x] = s.place + used * apart;
      }
    }
    GEMM(pack_apart)(to, in, at, w, along, p, steps, width);
  }
}

/* The same where every panel's rows are few stretches. */
static inline __attribute__((always_inline)) void GEMM(pack_few)(T *restrict to, const gradc_matrix *in, int transposed, int64_t i, int64_t p, int64_t count, int64_t steps,
                                                     const int width) {
  const gradc_axis *across = transposed ? &in->places->col : &in->places->row, *along = transposed ? &in->places->row : &in->places->col;
  const int64_t apart = across->step[across->count - 1];
  for (int64_t q = 0, some; q < steps; q += some) { /* where the steps lie is found once for all panels */
    int64_t places[GEMM_KC], used = 0;
    some = at_most(steps - q, GEMM_KC);
    const int64_t furthest = gemm_find_places(along, p + q, some, places);
    gemm_stretch s = gemm_stretch_at(across, i);
    for (int64_t i0 = 0; i0 < count; i0 += width) {
      const int w = count - i0 < width ? (int)(count - i0) : width;
      GEMM(stretches) r = {.sides = 0};
      for (int x = 0; x < w; r.sides++) {
        if (used == s.count) {
          gemm_next_stretch(across, &s);
          used = 0;
        }
        const int some_rows = (int)at_most(w - x, s.count - used);
        r.at[r.sides] = s.place + used * apart, r.begin[r.sides] = x;
        x += some_rows, used += some_rows;
      }
      T *panel = to + i0 * steps + q * width;
      r.begin[r.sides] = w;
      if (apart == 1) {
        GEMM(pack_stretches)(panel, in, &r, places, furthest, some, 1, width);
      } else {
        GEMM(pack_stretches)(panel, in, &r, places, furthest, some, GEMM_APART, width);
      }
    }
  }
}

/* Panels of rows from i and steps from p on, both counted from the tile. */
static inline __attribute__((always_inline)) void GEMM(panels)(T *to, GEMM(part) t, int64_t i, int64_t p, int64_t count, int64_t steps, const int width,
                                                               const int squares) {
  const gradc_matrix *in = t.in;
  const int64_t across = t.transposed ? in->col : in->row, along = t.transposed ? in->row : in->col;
  const int64_t at = i * across + p * along;
  if (in->places && gemm_few_stretches(t.transposed ? &in->places->col : &in->places->row, width)) {
    GEMM(pack_few)(to, in, t.transposed, (t.transposed ? t.col : t.row) + i, (t.transposed ? t.row : t.col) + p, count, steps, width);
  } else if (in->places) {
    GEMM(pack_places)(to, in, t.transposed, (t.transposed ? t.col : t.row) + i, (t.transposed ? t.row : t.col) + p, count, steps, width);
  } else if (in->read || in->scale) {
    GEMM(pack_read)(to, t, i, p, count, steps, across, along, width, squares);
  } else {
    GEMM(pack)(to, (const T *)in->data + at, count, steps, across, along, width, squares);
  }
}

/* The same for the only row of a product and columns beside it, which are seldom packed. */
static __attribute__((noinline)) void GEMM(row_panels)(T *to, GEMM(part) t, int64_t i, int64_t p, int64_t count, int64_t steps, int width) {
  GEMM(panels)(to, t, i, p, count, steps, width, 0);
}

/* The sums of a[kc] b[kc,LANES] in v[0], b's columns contiguous and `apart` from one another; a goes on with zeros to a whole vector. */
static inline __attribute__((always_inline)) void GEMM(columns)(GEMM(vec) *v, int64_t cols, int64_t kc, const T *restrict a, const T *restrict b, int64_t apart) {
  const int64_t even = kc / GEMM(LANES) * GEMM(LANES);
  const T *from[GEMM(LANES)];
#pragma GCC unroll 16
  for (int i = 0; i < GEMM(LANES); i++) {
    from[i] = b + (i < cols ? i : 0) * apart;
    v[i] = (GEMM(vec)){0};
  }
  enum { FEW = GEMM(LANES) < 8 ? GEMM(LANES) : 8 }; /* columns a power of two apart share a set of a first cache, which has eight lines */
#pragma GCC unroll 4
  for (int first = 0; first < GEMM(LANES); first += FEW) {
    for (int64_t p = 0; p < even; p += GEMM(LANES)) {
      const GEMM(vec) x = *(const GEMM(vec) *)(a + p);
#pragma GCC unroll 16
      for (int i = 0; i < FEW; i++) {
        __builtin_prefetch(from[first + i] + p + 256 / sizeof(T));
        v[first + i] += x * *(const GEMM(vec) *)(from[first + i] + p);
      }
    }
  }
  if (even < kc) {
    const GEMM(vec) x = *(const GEMM(vec) *)(a + even);
    for (int i = 0; i < GEMM(LANES); i++) {
      GEMM(vec) last = {0};
      memcpy(&last, from[i] + even, (size_t)(kc - even) * sizeof(T));
      v[i] += x * last;
    }
  }
  GEMM(turn)(v);
#pragma GCC unroll 4
  for (int half = GEMM(LANES) / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; i++) {
      v[i] += v[i + half];
    }
  }
}

/* to[cols] += a[0] b[0,cols], then the same for step `every`, and so on for `turns` steps. */
static inline __attribute__((always_inline)) void GEMM(add_rows)(T *restrict to, int64_t cols, const int turns, int64_t every, const T *restrict a, const T *restrict b, int64_t apart, int64_t ahead) {
  const int64_t whole = cols / GEMM(LANES) * GEMM(LANES), next = every * apart;
  for (int64_t j = 0; j < whole; j += GEMM(LANES)) {
    GEMM(vec) sum = *(const GEMM(vec) *)(to + j);
#pragma GCC unroll 4
    for (int x = 0; x < turns; x++) {
      if (j % (64 / (int)sizeof(T)) == 0) { /* once a line */
        __builtin_prefetch(b + x * next + ahead + j);
      }
      sum += a[x * every] * *(const GEMM(vec) *)(b + x * next + j);
    }
    *(GEMM(vec) *)(to + j) = sum;
  }
  for (int64_t j = whole; j < cols; j++) {
#pragma GCC unroll 4
    for (int x = 0; x < turns; x++) {
      to[j] += a[x * every] * b[x * next + j];
    }
  }
}

/* The sums of a[kc] b[kc,cols] in the first row of sums[LANES,cols], b's rows contiguous and `apart` from one another. */
static void GEMM(rows)(T *restrict sums, int64_t cols, int64_t kc, const T *restrict a, const T *restrict b, int64_t apart) {
  enum { LANES = GEMM(LANES), TURNS = 4 }; /* so many steps that go to one sum are added while it is in a register */
  const int64_t wide = whole(cols, LANES);
  memset(sums, 0, (size_t)(LANES * wide) * sizeof(T));
  const int64_t full = (kc + LANES - 1) / LANES * LANES;
  int64_t p = 0;
  for (; p + TURNS * LANES <= kc; p += TURNS * LANES) {
    for (int i = 0; i < LANES; i++) {
      const int64_t ahead = (i + 1 < LANES ? 1 : 1 + (TURNS - 1) * LANES) * apart;
      GEMM(add_rows)(sums + i * wide, cols, TURNS, LANES, a + p + i, b + (p + i) * apart, apart, ahead);
    }
  }
  for (; p < full; p++) {
    T *restrict to = sums + p % LANES * wide;
    if (p < kc) {
      GEMM(add_rows)(to, cols, 1, LANES, a + p, b + p * apart, apart, 2 * apart);
    } else { /* what a product of zeros does to a sum */
#pragma omp simd
      for (int64_t j = 0; j < cols; j++) {
        to[j] += 0;
      }
    }
  }
  for (int half = GEMM(LANES) / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) {
      T *restrict to = sums + i * wide;
      const T *restrict from = to + half * wide;
#pragma omp simd
      for (int64_t j = 0; j < cols; j++) {
        to[j] += from[j];
      }
    }
  }
}

/* c[n] (+)= a[k] b[k,n], the only row of a product, from step p0 and column j0 of the whole on; c's elements are c_col apart.  Here
 * step p is added to sum p modulo LANES, from the first on, and these in a tree, in blocks of KC steps: whether b lies in columns,
 * which fill vectors of steps, or in rows, which fill vectors of columns. */
static void GEMM(row)(int64_t n, int64_t k, int64_t p0, int64_t j0, const gradc_matrix *a, const gradc_matrix *b, T *c, int64_t c_col, int add, void *workspace) {
  const GEMM(part) left = {a, 0, p0, 0}, right = {b, p0, j0, 1};
  const int in_columns = b->row == 1, in_rows = b->col == 1 && !in_columns, as_it_lies = !b->read && !b->scale;
  const int64_t width = !in_rows ? GEMM(LANES) : as_it_lies ? GEMM_WIDE : GEMM_LINES * GEMM(LANES);
  T *pa = workspace, *sums = pa + 2 * GEMM_KC, *pb = sums + GEMM_WIDE * GEMM(LANES);
  for (int64_t p = 0; p < k; p += GEMM_KC) {
    const int64_t kc = k - p < GEMM_KC ? k - p : GEMM_KC;
    memset(pa + kc, 0, sizeof(GEMM(vec)));
    GEMM(row_panels)(pa, left, 0, p, 1, kc, 1);
    for (int64_t j = 0; j < n; j += width) {
      const int64_t cols = n - j < width ? n - j : width;
      const T *from = (const T *)b->data + p * b->row + j * b->col, *found = sums;
      GEMM(vec) v[GEMM(LANES)];
      if (in_columns && !as_it_lies) {
        for (int64_t i = 0; i < cols; i++) {
          GEMM(read_line)(pb + i * kc, b, p + (j + i) * b->col, p0 + p, j0 + j + i, kc, 1);
        }
        GEMM(columns)(v, cols, kc, pa, pb, kc);
        found = (const T *)v;
      } else if (in_columns) {
        GEMM(columns)(v, cols, kc, pa, from, b->col);
        found = (const T *)v;
      } else if (in_rows && !as_it_lies) {
        for (int64_t q = 0; q < kc; q++) {
          GEMM(read_line)(pb + q * width, b, (p + q) * b->row + j, p0 + p + q, j0 + j, cols, 0);
        }
        GEMM(rows)(sums, cols, kc, pa, pb, width);
      } else if (in_rows) {
        GEMM(rows)(sums, cols, kc, pa, from, b->row);
      } else {
        GEMM(row_panels)(pb, right, j, p, cols, kc, GEMM(LANES));
        GEMM(rows)(sums, cols, kc, pa, pb, GEMM(LANES));
      }
      for (int64_t i = 0; i < cols; i++) {
        T *to = c + (j + i) * c_col;
        *to = add || p > 0 ? *to + found[i] : found[i];
      }
    }
  }
}

/* Panels of a from row i of a slab on, all its steps, and of b from column j on.  a and b begin where the slab does: at row i0,
 * step p0, column j0 of the whole. */
static int GEMM(pack_rows)(void *to, const gradc_matrix *a, int64_t i0, int64_t p0, int64_t i, int64_t rows, int64_t steps) {
  GEMM(panels)((T *)to + i * steps, (GEMM(part)){a, i0, p0, 0}, i, 0, rows, steps, GEMM_MR, 1);
  return 0;
}
static int GEMM(pack_columns)(void *to, const gradc_matrix *b, int64_t p0, int64_t j0, int64_t j, int64_t cols, int64_t steps) {
  GEMM(panels)((T *)to + j * steps, (GEMM(part)){b, p0, j0, 1}, j, 0, cols, steps, GEMM(NR), 1);
  return 0;
}

static int GEMM(few)(int64_t m, const gradc_matrix *b) {
  (void)b;
  return m == 1;
}
static int64_t GEMM(rows_bytes)(int64_t m, int64_t k) { /* a's block, the sums, b's lines */
  (void)m, (void)k;
  return GEMM_KC * (2 * GEMM_SIZE + GEMM_LINES * GEMM_BYTES) + GEMM_WIDE * GEMM_BYTES;
}
static void GEMM(one_row)(int64_t m, int64_t n, int64_t k, int64_t p0, int64_t j0, const gradc_matrix *a, const gradc_matrix *b, char *c, int64_t c_row, int64_t c_col,
                          int add, void *workspace) {
  (void)m, (void)c_row;
  GEMM(row)(n, k, p0, j0, a, b, (T *)c, c_col, add, workspace);
}

static const gemm_type GEMM(type) = {
  .size = GEMM_SIZE, .packed = GEMM_SIZE, .mr = GEMM_MR, .nr = GEMM(NR), .lanes = GEMM(LANES), .whole = 1, .kc = GEMM_KC, .packs = GEMM_PACKED, .speed = 1,
  .pack_rows = GEMM(pack_rows), .pack_columns = GEMM(pack_columns), .block = GEMM(block),
  .few = GEMM(few), .most_rows = 1, .rows_bytes = GEMM(rows_bytes), .rows = GEMM(one_row),
};

#undef T
#undef GEMM
#undef GEMM_SIZE
