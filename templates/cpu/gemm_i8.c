/* Blocks of a matrix product of integers of 8 bits, each operand's with a sign or without, with sums modulo 2^32: exact, and so the
 * same however they are added up.  A panel's element is a quad, four steps of a row, and a kernel adds the dot products of quads:
 * VPDPBUSD (AVX512-VNNI, AVX-VNNI), which does not saturate, PMADDWD on even and on odd bytes (AVX2, SSE2), or products of 32 bits.
 *
 * Rows of a have no sign in a panel, columns of b have one.  What lies otherwise is moved by 128, and what that changes a sum
 * begins with: a[i] = a'[i] - s and b[j] = b'[j] + t, so a[i] b[j] = a'[i] b'[j] + t a'[i] - s b'[j] - s t, s and t 128 or 0.
 * The first quad of each block of steps, its head, has a row's sum of t a'[i], and a column's of -s b'[j] - s t.
 * (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VPDPBUSD.) */

#include "gemm_words.h"

enum { I8_LANES = GEMM_BYTES / 4, I8_PANEL = 2 * I8_LANES, I8_QUAD = 4, I8_STEPS = GEMM_BYTES, I8_KC = 8 * GEMM_KC };
enum { I8_WIDEST = GEMM_MR > I8_PANEL ? GEMM_MR : I8_PANEL }; /* rows or columns of a panel, at most */
typedef uint32_t i8_vec __attribute__((vector_size(GEMM_BYTES), aligned(4)));

#if GEMM_BYTES == 64
#define I8_REGISTER "v"
#else
#define I8_REGISTER "x"
#endif
#if defined(__AVX512VNNI__) && GEMM_BYTES == 64
#define I8_VNNI "vpdpbusd"
#elif defined(__AVXVNNI__) && GEMM_BYTES == 32
#define I8_VNNI "%{vex%} vpdpbusd"
#elif (defined(__AVX2__) && (GEMM_BYTES == 32 || defined(__AVX512BW__))) || (defined(__SSE2__) && GEMM_BYTES == 16)
#define I8_PAIRS
typedef uint16_t i8_halves __attribute__((vector_size(GEMM_BYTES)));
typedef int16_t i8_signed_halves __attribute__((vector_size(GEMM_BYTES)));

/* sum + even * even + odd * odd of 16 bits, which are 17 bits of either sign at most. */
static inline __attribute__((always_inline)) i8_vec i8_add_pairs(i8_vec sum, i8_halves a, i8_signed_halves b) {
#if GEMM_BYTES == 16
  return sum + (i8_vec)__builtin_ia32_pmaddwd128((i8_signed_halves)a, b);
#else
  i8_vec products;
  __asm__("vpmaddwd %2, %1, %0" : "=" I8_REGISTER(products) : I8_REGISTER(a), I8_REGISTER(b));
  return sum + products;
#endif
}
#endif

/* sum + the dot products of quads, a's without a sign, b's with one. */
static inline __attribute__((always_inline)) i8_vec i8_dot(i8_vec sum, i8_vec a, i8_vec b) {
#ifdef I8_VNNI
  __asm__(I8_VNNI " %2, %1, %0" : "+" I8_REGISTER(sum) : I8_REGISTER(a), I8_REGISTER(b));
  return sum;
#elif defined(I8_PAIRS)
  sum = i8_add_pairs(sum, (i8_halves)a & 0xff, (i8_signed_halves)((i8_halves)b << 8) >> 8);
  return i8_add_pairs(sum, (i8_halves)a >> 8, (i8_signed_halves)b >> 8);
#else
  typedef int32_t i8_signed __attribute__((vector_size(GEMM_BYTES)));
  for (int i = 0; i < 32; i += 8) {
    sum += (a >> i & 0xff) * (i8_vec)((i8_signed)(b << (24 - i)) >> 24);
  }
  return sum;
#endif
}

#define T uint32_t
#define GEMM_SIZE 4
#define GEMM(name) i8_##name
#define GEMM_CHAIN (1 << 30)
#define GEMM_HEADS 1
#define GEMM_ADD(sum, a, b) ((sum) = i8_dot(sum, (i8_vec){0} + (a), b))
#include "gemm_kernels.h"
#undef T
#undef GEMM
#undef GEMM_SIZE
#undef GEMM_CHAIN
#undef GEMM_HEADS
#undef GEMM_ADD

/* to[p * width + i] = four steps, from 4 p on, of row i < width, whose rows lie side by side. */
static inline __attribute__((always_inline)) void i8_quads(uint32_t *restrict to, const uint8_t *restrict from, int64_t along, const int width) {
  for (int p = 0; p < I8_STEPS / I8_QUAD; p++) {
    const uint8_t *restrict step[I8_QUAD];
#pragma GCC unroll 4
    for (int x = 0; x < I8_QUAD; x++) {
      step[x] = from + (I8_QUAD * p + x) * along;
    }
#pragma omp simd
    for (int i = 0; i < width; i++) {
      to[p * width + i] = (uint32_t)step[0][i] | (uint32_t)step[1][i] << 8 | (uint32_t)step[2][i] << 16 | (uint32_t)step[3][i] << 24;
    }
  }
}

/* A block of `width` rows and I8_STEPS steps as quads, [step / 4][row][step % 4], filled up with bytes `empty`. */
static inline __attribute__((always_inline)) void i8_pack_block(uint32_t *to, const uint8_t *from, int64_t across, int64_t along, int64_t rows, int64_t steps, const int width,
                                                                uint8_t empty) {
  uint8_t whole_block[I8_WIDEST * I8_STEPS];
  uint32_t quads[I8_WIDEST * I8_STEPS / I8_QUAD], *const found = steps < I8_STEPS ? quads : to;
  if (rows < width || steps < I8_STEPS || (across != 1 && along != 1)) {
    memset(whole_block, empty, sizeof whole_block);
    if (across == 1) {
      for (int64_t p = 0; p < steps; p++) {
        memcpy(whole_block + p * width, from + p * along, (size_t)rows);
      }
      along = width;
    } else {
      for (int64_t i = 0; i < rows; i++) {
        for (int64_t p = 0; p < steps; p++) {
          whole_block[i * I8_STEPS + p] = from[i * across + p * along];
        }
      }
      across = I8_STEPS, along = 1;
    }
    from = whole_block;
  }
  if (along != 1) {
    i8_quads(found, from, along, width);
  } else {
#pragma GCC unroll 4
    for (int i = (width - 1) / I8_LANES * I8_LANES; i >= 0; i -= I8_LANES) { /* the last first: what it stores beyond a line is written over */
      turn_words(found + i, width, from + i * across, across, width - i < I8_LANES ? width - i : I8_LANES);
    }
  }
  if (found != to) {
    memcpy(to, quads, (size_t)(ceil_div(steps, I8_QUAD) * width) * sizeof *to);
  }
}

/* What becomes of an operand's elements in a panel: whether they are moved by 128, and what a row's sum begins with: `factor` times the
 * sum of what it has in the panel then, and `each` more for each step. */
typedef struct {
  int moved;
  uint32_t factor, each;
} i8_form;

/* Moves a block's elements, and adds to its head what comes of them. */
static inline __attribute__((always_inline)) void i8_finish_block(uint32_t *to, uint32_t *head, int64_t steps, const int width, const int is_signed, const i8_form *form) {
  const int64_t lines = ceil_div(steps, I8_QUAD);
  if (form->moved) {
#pragma omp simd
    for (int64_t x = 0; x < lines * width; x++) {
      to[x] ^= 0x80808080;
    }
  }
  if (!form->factor) {
    return;
  }
  const i8_vec ones = (i8_vec){0} + 0x01010101;
  i8_vec sums[(I8_WIDEST + I8_LANES - 1) / I8_LANES];
#pragma GCC unroll 4
  for (int i = 0; i < width; i += I8_LANES) {
    sums[i / I8_LANES] = (i8_vec){0};
  }
  for (int64_t p = 0; p < lines; p++) {
#pragma GCC unroll 4
    for (int i = 0; i < width; i += I8_LANES) {
      const uint32_t *const line = to + p * width + i;
      i8_vec quads = {0}, *const sum = &sums[i / I8_LANES];
      if (p + 1 < lines || width - i >= I8_LANES) { /* what a vector has more than the width is not used */
        memcpy(&quads, line, sizeof quads);
      } else {
        memcpy(&quads, line, (size_t)(width - i) * sizeof *line);
      }
      *sum = is_signed ? i8_dot(*sum, ones, quads) : i8_dot(*sum, quads, ones);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < width; i += I8_LANES) {
    const size_t bytes = (size_t)(width - i < I8_LANES ? width - i : I8_LANES) * sizeof *head;
    i8_vec begin = {0};
    memcpy(&begin, head + i, bytes);
    begin += sums[i / I8_LANES] * form->factor + form->each * (uint32_t)steps;
    memcpy(head + i, &begin, bytes);
  }
}

/* Panels of `width` rows, [panel][steps / I8_KC] of a head and its quads. */
static inline __attribute__((always_inline)) void i8_pack(uint32_t *to, const gradc_matrix *in, int64_t across, int64_t along, int64_t at, int64_t count, int64_t steps,
                                                          const int width, const int is_signed, i8_form form) {
  const int64_t panel = (ceil_div(steps, I8_QUAD) + ceil_div(steps, I8_KC)) * width, first = across == 1 ? steps : count, second = across == 1 ? count : steps;
  const int first_some = across == 1 ? I8_STEPS : width, second_some = across == 1 ? width : I8_STEPS;
  for (int64_t x = 0; x < first; x += first_some) {
    for (int64_t y = 0; y < second; y += second_some) { /* along what lies together */
      const int64_t i = across == 1 ? y : x, p = across == 1 ? x : y, some = at_most(steps - p, I8_STEPS);
      uint32_t *const head = to + (at + i) / width * panel + p / I8_KC * (I8_KC / I8_QUAD + 1) * width, *const block = head + (1 + p % I8_KC / I8_QUAD) * width;
      if (p % I8_KC == 0) {
        memset(head, 0, (size_t)width * sizeof *head);
      }
      i8_pack_block(block, (const uint8_t *)in->data + (at + i) * across + p * along, across, along, at_most(count - i, width), some, width, form.moved ? 0x80 : 0);
      i8_finish_block(block, head, some, width, is_signed, &form);
    }
  }
}

static __attribute__((noinline)) void i8_pack_rows(void *to, const gradc_matrix *a, int64_t i, int64_t rows, int64_t steps, i8_form form) {
  i8_pack(to, a, a->row, a->col, i, rows, steps, GEMM_MR, 0, form);
}
static __attribute__((noinline)) void i8_pack_columns(void *to, const gradc_matrix *b, int64_t j, int64_t cols, int64_t steps, i8_form form) {
  i8_pack(to, b, b->col, b->row, j, cols, steps, I8_PANEL, 1, form);
}

static void i8_blocks(int64_t m, int64_t n, int64_t k, int64_t kc, gemm_panels a, gemm_panels b, gemm_result c, int64_t j0, int add) {
  a.panel /= I8_QUAD, b.panel /= I8_QUAD;
  i8_block(m, n, ceil_div(k, I8_QUAD) + ceil_div(k, kc), kc / I8_QUAD + 1, a, b, c, j0, add);
}

/* ---- Few rows
 *
 * Columns of b that are contiguous fill vectors of steps where they lie.  They are moved by 128 as they are read where both operands have a
 * sign or both none, which changes a sum by the sum of the row of a. */

#if GEMM_BYTES == 64
#define I8_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define I8_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif GEMM_BYTES == 32
#define I8_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define I8_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define I8_LOW 0, 4, 1, 5
#define I8_HIGH 2, 6, 3, 7
#endif

/* v[0][i] = the sum of the lanes of v[i]. */
static inline __attribute__((always_inline)) void i8_sum_lanes(i8_vec *v) {
#ifdef GEMM_SHUFFLES /* each round adds both halves of two vectors, side by side: one bit of a vector's number becomes one of a lane's */
#pragma GCC unroll 4
  for (int half = I8_LANES / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; i++) {
      v[i] = __builtin_shufflevector(v[i], v[i + half], I8_LOW) + __builtin_shufflevector(v[i], v[i + half], I8_HIGH);
    }
  }
#else
  i8_vec sums;
  for (int i = 0; i < I8_LANES; i++) {
    sums[i] = 0;
    for (int j = 0; j < I8_LANES; j++) {
      sums[i] += v[i][j];
    }
  }
  v[0] = sums;
#endif
}
#undef I8_LOW
#undef I8_HIGH

/* v[row * cols + col] and the dot products of so many bytes of rows of a, whole vectors of which there are, and of columns of b. */
static inline __attribute__((always_inline)) void i8_add_dots(i8_vec *v, const int rows, const int cols, const uint8_t **a, const uint8_t **b, int64_t p, size_t bytes,
                                                              int64_t ahead, uint32_t moves, const int a_signed) {
  i8_vec column[I8_LANES];
#pragma GCC unroll 16
  for (int j = 0; j < cols; j++) {
    column[j] = (i8_vec){0};
    memcpy(&column[j], b[j] + p, bytes);
    __builtin_prefetch(b[j] + p + ahead); /* columns are short: the next ones are asked for */
    column[j] ^= (i8_vec){0} + moves;
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++) {
    i8_vec row;
    memcpy(&row, a[i] + p, sizeof row);
#pragma GCC unroll 16
    for (int j = 0; j < cols; j++) {
      v[i * cols + j] = a_signed ? i8_dot(v[i * cols + j], column[j], row) : i8_dot(v[i * cols + j], row, column[j]);
    }
  }
}

/* c[row,col] (+)= begins[row] and a's row times b's column, rows * cols = LANES of them, of which m and n are there; rows of a are filled
 * up with zeros to whole vectors. */
static inline __attribute__((always_inline)) void i8_dots(const int rows, const int cols, int64_t m, int64_t n, int64_t k, const uint8_t *a, int64_t a_row, const uint8_t *b,
                                                          int64_t b_col, uint32_t moves, const int a_signed, const uint32_t *begins, uint32_t *c, int64_t c_row,
                                                          int64_t c_col, int add) {
  i8_vec v[I8_LANES];
  const uint8_t *from_a[I8_LANES], *from_b[I8_LANES];
#pragma GCC unroll 16
  for (int i = 0; i < I8_LANES; i++) {
    v[i] = (i8_vec){0};
    from_a[i / cols] = a + (i / cols < m ? i / cols : 0) * a_row;
    from_b[i % cols] = b + (i % cols < n ? i % cols : 0) * b_col;
  }
  int64_t p = 0;
  for (; p + GEMM_BYTES <= k; p += GEMM_BYTES) {
    i8_add_dots(v, rows, cols, from_a, from_b, p, GEMM_BYTES, cols * b_col, moves, a_signed);
  }
  if (p < k) {
    i8_add_dots(v, rows, cols, from_a, from_b, p, (size_t)(k - p), cols * b_col, moves, a_signed);
  }
  i8_sum_lanes(v);
  uint32_t sums[I8_LANES];
  memcpy(sums, &v[0], sizeof sums);
  for (int i = 0; i < rows && i < m; i++) {
    uint32_t *const to = c + i * c_row;
    if (n >= cols && c_col == 1) {
#pragma omp simd
      for (int j = 0; j < cols; j++) {
        to[j] = (add ? to[j] : 0) + begins[i] + sums[i * cols + j];
      }
      continue;
    }
    for (int j = 0; j < cols && j < n; j++) {
      to[j * c_col] = (add ? to[j * c_col] : 0) + begins[i] + sums[i * cols + j];
    }
  }
}

enum { I8_FEW = I8_LANES / 4, I8_MOST = 48, I8_MOST_ACROSS = 64 }; /* rows that are multiplied with four columns at a time, and as many as are so at most */
typedef void (*i8_dots_kernel)(int64_t m, int64_t n, int64_t k, const uint8_t *a, int64_t a_row, const uint8_t *b, int64_t b_col, uint32_t moves, const uint32_t *begins,
                               uint32_t *c, int64_t c_row, int64_t c_col, int add);
#define I8_DOTS(name, rows, a_signed)                                                                                            \
  static __attribute__((noinline)) void name(int64_t m, int64_t n, int64_t k, const uint8_t *a, int64_t a_row, const uint8_t *b, \
                                             int64_t b_col, uint32_t moves, const uint32_t *begins, uint32_t *c, int64_t c_row,  \
                                             int64_t c_col, int add) {                                                           \
    i8_dots(rows, I8_LANES / (rows), m, n, k, a, a_row, b, b_col, moves, a_signed, begins, c, c_row, c_col, add);                \
  }
I8_DOTS(i8_dots_one, 1, 1)
I8_DOTS(u8_dots_one, 1, 0)
I8_DOTS(i8_dots_few, I8_FEW, 1)
I8_DOTS(u8_dots_few, I8_FEW, 0)
#undef I8_DOTS

/* Rows of b that are contiguous fill vectors of columns: those of four steps are interleaved to quads, once for all rows of a.  A
 * vector of quads has four columns of each of its 16 bytes. */
#if defined(I8_VNNI) || defined(I8_PAIRS)
#define I8_ACROSS
enum { I8_DEEP = GEMM_BYTES == 64 ? 16 : 8, I8_SUMS = 1 << 15 }; /* steps whose quads stay in registers; bytes of sums, which stay in the nearest cache */
#if GEMM_BYTES == 16
#define I8_UNPACK(op, a, b) __asm__("p" op " %1, %0" : "+x"(a) : "x"(b))
#else
#define I8_UNPACK(op, a, b) __asm__("vp" op " %1, %0, %0" : "+" I8_REGISTER(a) : I8_REGISTER(b))
#endif

/* to[0..3] = the quads of four steps. */
static inline __attribute__((always_inline)) void i8_interleave(i8_vec *to, const i8_vec *step) {
  i8_vec low = step[0], high = step[0], more_low = step[2], more_high = step[2];
  I8_UNPACK("unpcklbw", low, step[1]);
  I8_UNPACK("unpckhbw", high, step[1]);
  I8_UNPACK("unpcklbw", more_low, step[3]);
  I8_UNPACK("unpckhbw", more_high, step[3]);
  to[0] = to[1] = low, to[2] = to[3] = high;
  I8_UNPACK("unpcklwd", to[0], more_low);
  I8_UNPACK("unpckhwd", to[1], more_low);
  I8_UNPACK("unpcklwd", to[2], more_high);
  I8_UNPACK("unpckhwd", to[3], more_high);
}

/* sums (+)= rows of a times so many bytes of I8_DEEP rows of b, of which `steps` are there. */
static inline __attribute__((always_inline)) void i8_add_across(int64_t m, const uint8_t *a, int64_t a_row, const uint8_t *b, int64_t b_row, int64_t steps, size_t bytes,
                                                                uint32_t moves, const int a_signed, i8_vec *sums, int64_t sums_row, int first) {
  i8_vec quads[I8_DEEP];
#pragma GCC unroll 4
  for (int p = 0; p < I8_DEEP; p += I8_QUAD) {
    i8_vec step[I8_QUAD];
#pragma GCC unroll 4
    for (int x = 0; x < I8_QUAD; x++) { /* of those that are not there a has zeros */
      const uint8_t *const from = b + (p + x < steps ? p + x : steps - 1) * b_row;
      step[x] = (i8_vec){0};
      memcpy(&step[x], from, bytes);
      __builtin_prefetch(from + I8_DEEP * b_row, 0, 2);
      step[x] ^= (i8_vec){0} + moves;
    }
    i8_interleave(quads + p, step);
  }
  for (int64_t i = 0; i < m; i++) {
    i8_vec v[I8_QUAD], *const sum = sums + i * sums_row;
#pragma GCC unroll 4
    for (int x = 0; x < I8_QUAD; x++) {
      v[x] = first ? (i8_vec){0} : sum[x];
    }
#pragma GCC unroll 4
    for (int p = 0; p < I8_DEEP; p += I8_QUAD) {
      uint32_t quad;
      memcpy(&quad, a + i * a_row + p, sizeof quad);
      const i8_vec row = (i8_vec){0} + quad;
#pragma GCC unroll 4
      for (int x = 0; x < I8_QUAD; x++) {
        v[x] = a_signed ? i8_dot(v[x], quads[p + x], row) : i8_dot(v[x], row, quads[p + x]);
      }
    }
#pragma GCC unroll 4
    for (int x = 0; x < I8_QUAD; x++) {
      sum[x] = v[x];
    }
  }
}

static __attribute__((noinline)) void i8_across(int64_t m, int64_t n, int64_t k, const uint8_t *a, int64_t a_row, const uint8_t *b, int64_t b_row, uint32_t moves,
                                                int a_signed, i8_vec *sums, int64_t sums_row) {
  for (int64_t p = 0; p < k; p += I8_DEEP) {
    const uint8_t *const rows = a + p, *const from = b + p * b_row;
    for (int64_t j = 0; j < n; j += GEMM_BYTES) {
      i8_vec *const to = sums + j / I8_LANES;
      if (n - j < GEMM_BYTES || k - p < I8_DEEP) {
        i8_add_across(m, rows, a_row, from + j, b_row, at_most(k - p, I8_DEEP), (size_t)at_most(n - j, GEMM_BYTES), moves, a_signed, to, sums_row, !p);
      } else if (a_signed) {
        i8_add_across(m, rows, a_row, from + j, b_row, I8_DEEP, GEMM_BYTES, moves, 1, to, sums_row, !p);
      } else {
        i8_add_across(m, rows, a_row, from + j, b_row, I8_DEEP, GEMM_BYTES, moves, 0, to, sums_row, !p);
      }
    }
  }
}

/* c (+)= begins[row] and the sums, whose columns lie as those of quads. */
static void i8_put_across(int64_t m, int64_t n, const i8_vec *sums, int64_t sums_row, const uint32_t *begins, uint32_t *c, int64_t c_row, int64_t c_col, int add) {
  for (int64_t i = 0; i < m; i++) {
    for (int64_t j = 0; j < n; j += GEMM_BYTES) {
      uint32_t block[GEMM_BYTES], *const to = c + i * c_row + j * c_col;
      const uint32_t *const from = (const uint32_t *)(sums + i * sums_row + j / I8_LANES);
#pragma GCC unroll 16
      for (int q = 0; q < GEMM_BYTES; q += I8_QUAD) {
        memcpy(block + q, from + q % 16 / I8_QUAD * I8_LANES + q / 16 * I8_QUAD, I8_QUAD * sizeof *block);
      }
      const int64_t some = at_most(n - j, GEMM_BYTES);
      if (c_col == 1) {
#pragma omp simd
        for (int64_t x = 0; x < some; x++) {
          to[x] = (add ? to[x] : 0) + begins[i] + block[x];
        }
        continue;
      }
      for (int64_t x = 0; x < some; x++) {
        to[x * c_col] = (add ? to[x * c_col] : 0) + begins[i] + block[x];
      }
    }
  }
}
#endif

/* Whether so few rows are multiplied with b where it lies. */
static int i8_in_place(int64_t m, const gradc_matrix *b) {
#ifdef I8_ACROSS
  if (b->col == 1 && b->row != 1) {
    return m <= I8_MOST_ACROSS;
  }
#endif
  return b->row == 1 && m <= I8_MOST;
}

static int64_t i8_rows_bytes(int64_t m, int64_t k) {
  const int64_t rows = whole(m * (whole(k, GEMM_BYTES) + 4), GEMM_BYTES);
#ifdef I8_ACROSS
  return rows + I8_SUMS;
#else
  return rows;
#endif
}

/* c[m,n] (+)= a[m,k] b[k,n], b's columns or its rows contiguous. */
static void i8_rows(int64_t m, int64_t n, int64_t k, int64_t p0, int64_t j0, const gradc_matrix *a, const gradc_matrix *b, char *to, int64_t c_row, int64_t c_col, int add,
                    void *workspace) {
  (void)p0, (void)j0;
  uint32_t *const c = (uint32_t *)to;
  const int64_t filled = whole(k, GEMM_BYTES);
  const int a_signed = a->dtype == GRADC_I8, alike = a->dtype == b->dtype;
  uint8_t *const rows = workspace;
  uint32_t *const begins = (uint32_t *)(rows + m * filled);
  for (int64_t i = 0; i < m; i++) {
    const uint8_t *from = (const uint8_t *)a->data + i * a->row;
    uint8_t *restrict to = rows + i * filled;
    const i8_vec ones = (i8_vec){0} + 0x01010101;
    i8_vec sums = {0};
    if (a->col == 1) {
      memcpy(to, from, (size_t)k);
    }
    for (int64_t p = 0; a->col != 1 && p < k; p++) {
      to[p] = from[p * a->col];
    }
    memset(to + k, 0, (size_t)(filled - k));
    for (int64_t p = 0; alike && p < k; p += GEMM_BYTES) {
      const i8_vec some = *(const i8_vec *)(to + p);
      sums = a_signed ? i8_dot(sums, ones, some) : i8_dot(sums, some, ones);
    }
    begins[i] = 0;
    for (int x = 0; x < I8_LANES; x++) {
      begins[i] += a_signed ? sums[x] * -128u : sums[x] * 128u;
    }
  }
#ifdef I8_ACROSS
  if (b->row != 1) {
    i8_vec *const sums = (i8_vec *)(rows + whole(m * (filled + 4), GEMM_BYTES));
    const int64_t strip = at_most(whole(n, GEMM_BYTES), I8_SUMS / 4 / m / GEMM_BYTES * GEMM_BYTES);
    for (int64_t j = 0; j < n; j += strip) {
      const int64_t some = at_most(n - j, strip);
      i8_across(m, some, k, rows, filled, (const uint8_t *)b->data + j, b->row, alike ? 0x80808080 : 0, a_signed, sums, strip / I8_LANES);
      i8_put_across(m, some, sums, strip / I8_LANES, begins, c + j * c_col, c_row, c_col, add);
    }
    return;
  }
#endif
  const int64_t high = m == 1 ? 1 : I8_FEW, wide = I8_LANES / high;
  const i8_dots_kernel dots = m == 1 ? (a_signed ? i8_dots_one : u8_dots_one) : a_signed ? i8_dots_few : u8_dots_few;
  for (int64_t j = 0; j < n; j += wide) {
    const uint8_t *const columns = (const uint8_t *)b->data + j * b->col;
    for (int64_t i = 0; i < m; i += high) {
      dots(m - i, n - j, k, rows + i * filled, filled, columns, b->col, alike ? 0x80808080 : 0, begins + i, c + i * c_row + j * c_col, c_row, c_col, add);
    }
  }
}

#ifdef I8_VNNI
enum { I8_SPEED = 4 };
#else
enum { I8_SPEED = 1 };
#endif
#define I8_TYPE(name, a_signed, b_signed, transposed)                                                                            \
  static const gemm_type transposed;                                                                                             \
  static int name##_rows(void *to, const gradc_matrix *a, int64_t i0, int64_t p0, int64_t i, int64_t rows, int64_t steps) {      \
    (void)i0, (void)p0;                                                                                                          \
    i8_pack_rows(to, a, i, rows, steps, (i8_form){a_signed, b_signed ? 0 : 128, 0});                                             \
    return 0;                                                                                                                    \
  }                                                                                                                              \
  static int name##_columns(void *to, const gradc_matrix *b, int64_t p0, int64_t j0, int64_t j, int64_t cols, int64_t steps) {   \
    (void)p0, (void)j0;                                                                                                          \
    i8_pack_columns(to, b, j, cols, steps, (i8_form){!b_signed, a_signed ? -128u : 0, a_signed && !b_signed ? -16384u : 0});     \
    return 0;                                                                                                                    \
  }                                                                                                                              \
  static const gemm_type name = {                                                                                                \
    .size = 4, .packed = 1, .integers = 1, .mr = GEMM_MR, .nr = I8_PANEL, .lanes = I8_LANES, .whole = I8_QUAD, .head = I8_QUAD,  \
    .kc = I8_KC, .packs = 2 * GEMM_PACKED, .speed = I8_SPEED, .turned = &transposed,                                             \
    .pack_rows = name##_rows, .pack_columns = name##_columns, .block = i8_blocks,                                                \
    .few = i8_in_place, .most_rows = I8_MOST_ACROSS, .rows_bytes = i8_rows_bytes, .rows = i8_rows,                                                \
  }
I8_TYPE(i8_u8_type, 1, 0, u8_i8_type);
I8_TYPE(u8_i8_type, 0, 1, i8_u8_type);
I8_TYPE(i8_i8_type, 1, 1, i8_i8_type);
I8_TYPE(u8_u8_type, 0, 0, u8_u8_type);
#undef I8_TYPE

EXPORT const gemm_kernels *gradc_i8_kernels(void) {
  static const gemm_kernels kernels = { GEMM_I8, {{&u8_u8_type, &u8_i8_type}, {&i8_u8_type, &i8_i8_type}} };
  return &kernels;
}
