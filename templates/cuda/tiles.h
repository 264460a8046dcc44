/* Blocks of rows and columns on tensor cores: what kernels share that are made of loops with sweeps (docs/tiles.md).
 *
 * A warp has 16 TILES rows of a thread block.  What they are computed into are fragments, T x[TILES * N / 8][4] for N columns: of element
 * i of x[m * N / 8 + n] a lane has row 16m + lane / 4 + 8 (i / 2) and column 8n + lane % 4 * 2 + i % 2.  So a lane has 2 TILES rows, four
 * lanes, a quad, share them, and a value of rows is x[2 * TILES], the same in a quad.
 *
 * A panel is rows of features in shared memory, PITCH elements apart: an odd number of pieces of 16 bytes, so that a piece of 8 rows lies in
 * 8 different sets of banks, and all addresses of a lane are one address and constants. */
#ifndef GRADC_TILES_H
#define GRADC_TILES_H

#include "tensor_cores.h"

/* What products are given: fragments of 16 bits, two in a register. */
struct gradc_bf16_fragments {
  static __device__ __forceinline__ void multiply(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_m16n8k16_bf16(d, a, b0, b1); }
  static __device__ __forceinline__ u32 packed(f32 low, f32 high) { return pack_bf16(low, high); }
};
struct gradc_f16_fragments {
  static __device__ __forceinline__ void multiply(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_m16n8k16_f16(d, a, b0, b1); }
  static __device__ __forceinline__ u32 packed(f32 low, f32 high) { return pack_f16(low, high); }
};

/* Rows of FEATURES elements in memory, `step` elements apart, of which all threads together copy ROWS into a panel.  16 bytes move at a
 * time, asynchronously, where all begin at multiples of 16; else an element, and nothing is under way. */
template <int FEATURES, int PADDED, int PITCH, int ROWS, int THREADS> struct gradc_rows {
  enum { PER_ROW = PADDED / 8, PIECES = ROWS * PER_ROW, TIMES = (PIECES + THREADS - 1) / THREADS, EVEN = PIECES % THREADS == 0 && THREADS % PER_ROW == 0 };
  const u16 *first_row; /* the same for all threads, as what a thread copies is a place behind it */
  i64 step, feature_step;
  bool in_pieces;

  static __device__ __forceinline__ int row() { return (int)threadIdx.x / PER_ROW; }
  static __device__ __forceinline__ int feature() { return (int)threadIdx.x % PER_ROW * 8; }
  static __device__ __forceinline__ gradc_rows at(const u16 *from, i64 step, i64 feature_step) {
    const bool in_pieces = FEATURES % 8 == 0 && feature_step == 1 && step % 8 == 0 && gradc_aligned(from, 16);
    return {from, step, feature_step, in_pieces};
  }

  /* Starts the copy of the rows from `first` on; what is not among the `there` first, or PADDED features have beside FEATURES, is 0. */
  __device__ __forceinline__ void copy(u16 *panel, ix first, ix there) const {
    if (in_pieces && EVEN && FEATURES == PADDED && there >= ROWS) {
      const u16 *const own = first_row + (i64)(first + row()) * step + feature();
      u16 *const to = panel + row() * PITCH + feature();
#pragma unroll
      for (int i = 0; i < TIMES; i++) cp_async16(to + i * (THREADS / PER_ROW * PITCH), own + i * (THREADS / PER_ROW) * step);
      return;
    }
    const u16 *const from = first_row + first * step;
    if (in_pieces) {
#pragma unroll 1
      for (int piece = threadIdx.x; piece < PIECES; piece += THREADS) {
        const int r = piece / PER_ROW, c = piece % PER_ROW * 8;
        const bool read = r < there && c < FEATURES;
        cp_async16(panel + r * PITCH + c, read ? from + r * step + c : first_row, read ? 16 : 0);
      }
    } else {
#pragma unroll 1
      for (int i = threadIdx.x; i < ROWS * PADDED; i += THREADS) {
        const int r = i / PADDED, c = i % PADDED;
        panel[r * PITCH + c] = r < there && c < FEATURES ? from[r * step + c * feature_step] : (u16)0;
      }
    }
  }
};

/* 16 rows of a panel from feature c on, as the left operand of a product. */
template <int PITCH> GRADC_FN void gradc_load_left(u32 (&a)[4], const u16 *panel, int c) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4(a, panel + lane % 16 * PITCH + lane / 16 * 8 + c);
}
/* All of the rows of a warp, 16 TILES of them. */
template <int PITCH, int DEPTH, int TILES> GRADC_FN void gradc_load_rows(u32 (&a)[DEPTH / 16][TILES][4], const u16 *panel) {
#pragma unroll
  for (int c = 0; c < DEPTH / 16; c++)
#pragma unroll
    for (int m = 0; m < TILES; m++) gradc_load_left<PITCH>(a[c][m], panel + m * 16 * PITCH, c * 16);
}

/* s += a b^T, for features c to c + 15 of a and of the panel b, whose rows are columns of s. */
template <class F, int PITCH, int COLUMNS, int TILES>
GRADC_FN void gradc_add_scores(f32 (&s)[TILES * COLUMNS / 8][4], const u32 (&a)[TILES][4], const u16 *b, int c) {
  const int lane = threadIdx.x % 32;
  const u16 *const own = b + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 8 + c;
#pragma unroll
  for (int n = 0; n < COLUMNS; n += 16) {
    u32 r[4];
    ldmatrix_x4(r, own + n * PITCH);
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      F::multiply(s[(m * COLUMNS + n) / 8], a[m], r[0], r[1]);
      F::multiply(s[(m * COLUMNS + n) / 8 + 1], a[m], r[2], r[3]);
    }
  }
}
/* s = a b^T: rows of a warp, in fragments or in a panel, times a panel. */
template <class F, int PITCH, int COLUMNS, int DEPTH, int TILES>
GRADC_FN void gradc_scores(f32 (&s)[TILES * COLUMNS / 8][4], const u32 (&a)[DEPTH / 16][TILES][4], const u16 *b) {
#pragma unroll
  for (int c = 0; c < DEPTH / 16; c++) gradc_add_scores<F, PITCH, COLUMNS, TILES>(s, a[c], b, c * 16);
}
template <class F, int PITCH, int COLUMNS, int DEPTH, int TILES>
GRADC_FN void gradc_scores(f32 (&s)[TILES * COLUMNS / 8][4], const u16 *rows, const u16 *b) {
#pragma unroll
  for (int c = 0; c < DEPTH; c += 16) {
    u32 a[TILES][4];
#pragma unroll
    for (int m = 0; m < TILES; m++) gradc_load_left<PITCH>(a[m], rows + m * 16 * PITCH, c);
    gradc_add_scores<F, PITCH, COLUMNS, TILES>(s, a, b, c);
  }
}

/* Elements of x[n], rounded to 16 bits, two in a register: those of n and n + 1 are 16 columns of a left operand. */
template <class F> GRADC_FN void gradc_pack(u32 (&packed)[2], const f32 (&x)[4]) { packed[0] = F::packed(x[0], x[1]), packed[1] = F::packed(x[2], x[3]); }

/* o += p b: fragments, packed or rounded here, times a panel whose rows are columns of p. */
template <class F, int PITCH, int COLUMNS, int DEPTH, int TILES>
GRADC_FN void gradc_add_product(f32 (&o)[TILES * DEPTH / 8][4], const u32 (&p)[TILES * COLUMNS / 8][2], const u16 *b) {
  const int lane = threadIdx.x % 32;
  const u16 *const own = b + lane % 16 * PITCH + lane / 16 * 8;
#pragma unroll
  for (int n = 0; n < COLUMNS; n += 16) {
    u32 a[TILES][4];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      const u32(&left)[2] = p[(m * COLUMNS + n) / 8], (&right)[2] = p[(m * COLUMNS + n) / 8 + 1];
      a[m][0] = left[0], a[m][1] = left[1], a[m][2] = right[0], a[m][3] = right[1];
    }
#pragma unroll
    for (int c = 0; c < DEPTH; c += 16) {
      u32 r[4];
      ldmatrix_x4_trans(r, own + n * PITCH + c);
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        F::multiply(o[(m * DEPTH + c) / 8], a[m], r[0], r[1]);
        F::multiply(o[(m * DEPTH + c) / 8 + 1], a[m], r[2], r[3]);
      }
    }
  }
}
template <class F, int PITCH, int COLUMNS, int DEPTH, int TILES>
GRADC_FN void gradc_add_product(f32 (&o)[TILES * DEPTH / 8][4], const f32 (&p)[TILES * COLUMNS / 8][4], const u16 *b) {
  u32 packed[TILES * COLUMNS / 8][2];
#pragma unroll
  for (int n = 0; n < TILES * COLUMNS / 8; n++) gradc_pack<F>(packed[n], p[n]);
  gradc_add_product<F, PITCH, COLUMNS, DEPTH, TILES>(o, packed, b);
}

/* HEIGHT rows of WIDTH neighbours as they lie in memory, `step` elements apart: all threads together copy them.  Pieces of 16 bytes, or of
 * what a row is a multiple of, move asynchronously where all begin at multiples of them; else an element, and nothing is under way. */
template <class T, int WIDTH, int PITCH, int HEIGHT, int THREADS> struct gradc_strip {
  enum { BYTES = WIDTH * (int)sizeof(T), PIECE = BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : BYTES % 4 == 0 ? 4 : 0, PER = PIECE ? PIECE / (int)sizeof(T) : 1 };
  enum { PER_ROW = WIDTH / PER, PIECES = HEIGHT * PER_ROW };
  enum { EVEN = PIECES && THREADS % PER_ROW == 0, ROWS = THREADS / PER_ROW, TIMES = (HEIGHT + ROWS - 1) / ROWS };
  const T *first;
  i64 step, next;
  bool in_pieces;

  static __device__ __forceinline__ gradc_strip at(const T *from, i64 step, i64 next) {
    const bool in_pieces = PIECE && next == 1 && step % PER == 0 && gradc_aligned(from, PIECE ? PIECE : 1);
    return {from, step, next, in_pieces};
  }

  static __device__ __forceinline__ void piece(T *to, const T *from, int bytes) {
    if (PIECE == 16) cp_async16(to, from, bytes);
    else if (PIECE == 8) cp_async8(to, from, bytes);
    else cp_async4(to, from, bytes);
  }

  /* Starts the copy of what is `offset` elements behind the first: of each of the `there` first rows the `valid` first; the others are 0. */
  __device__ __forceinline__ void copy(T *strip, i64 offset, ix there, ix valid) const {
    if (in_pieces && EVEN && valid >= WIDTH) {
      const int row = (int)threadIdx.x / PER_ROW, place = (int)threadIdx.x % PER_ROW * PER;
      const T *const own = first + offset + row * step + place;
      T *const to = strip + row * PITCH + place;
#pragma unroll
      for (int i = 0; i < TIMES; i++) {
        if (HEIGHT % ROWS && row + i * ROWS >= HEIGHT) break;
        piece(to + i * ROWS * PITCH, own + i * ROWS * step, row + i * ROWS < there ? PIECE : 0);
      }
    } else if (in_pieces) {
#pragma unroll 1
      for (int i = threadIdx.x; i < PIECES; i += THREADS) {
        const int r = i / PER_ROW, c = i % PER_ROW * PER;
        const int own = r < there ? (int)gradc_max(0, gradc_min((ix)PER, valid - c)) : 0;
        piece(strip + r * PITCH + c, own > 0 ? first + offset + r * step + c : first, own * (int)sizeof(T));
      }
    } else {
#pragma unroll 1
      for (int i = threadIdx.x; i < HEIGHT * WIDTH; i += THREADS) {
        const int r = i / WIDTH, c = i % WIDTH;
        strip[r * PITCH + c] = r < there && c < valid ? first[offset + r * step + c * next] : (T)0;
      }
    }
  }
};

/* Neighbouring bytes in shared memory, as words: 1, 2, or a multiple of 4 at a multiple of what they are. */
template <int BYTES> GRADC_FN void gradc_lane_bytes(u32 (&to)[(BYTES + 3) / 4], const void *from) {
  if (BYTES == 16) {
    const uint4 x = *(const uint4 *)from;
    to[0] = x.x, to[1 % ((BYTES + 3) / 4)] = x.y, to[2 % ((BYTES + 3) / 4)] = x.z, to[3 % ((BYTES + 3) / 4)] = x.w;
  } else if (BYTES == 8) {
    const uint2 x = *(const uint2 *)from;
    to[0] = x.x, to[1 % ((BYTES + 3) / 4)] = x.y;
  } else {
    to[0] = BYTES == 4 ? *(const u32 *)from : BYTES == 2 ? (u32) * (const u16 *)from : (u32) * (const u8 *)from;
  }
}
template <class T, int N> GRADC_FN T gradc_byte(const u32 (&words)[N], int n) { return (T)(u8)(words[n / 4] >> n % 4 * 8); }

/* The left operand of a product that sums columns n to n + 15 of a block. */
template <int COLUMNS, int TILES> GRADC_FN void gradc_left_of_block(u32 (&a)[TILES][4], const u32 (&p)[TILES * COLUMNS / 8][2], int n) {
#pragma unroll
  for (int m = 0; m < TILES; m++) {
    const u32(&left)[2] = p[(m * COLUMNS + n) / 8], (&right)[2] = p[(m * COLUMNS + n) / 8 + 1];
    a[m][0] = left[0], a[m][1] = left[1], a[m][2] = right[0], a[m][3] = right[1];
  }
}

/* An integer of 8 bits as f32: what follows the bits of 2^23. */
GRADC_FN f32 gradc_whole(u8 q) { return f32_of_bits(0x4b000000u | q) - 0x1p23f; }
GRADC_FN f32 gradc_whole(i8 q) { return f32_of_bits(0x4b000000u | (u8)(q ^ 0x80)) - (0x1p23f + 128.0f); }
/* 1 + q / 16 of the 4 bits q at bit `place` of words, of a signed q 1 + (q + 8) / 16: they follow the bits of 1. */
template <bool SIGNED, int N> GRADC_FN f32 gradc_fraction(const u32 (&words)[N], int byte, int place) {
  const u32 word = SIGNED ? words[byte / 4] ^ 0x88888888u : words[byte / 4];
  return f32_of_bits(masked_or(rotated(word, (19 - byte % 4 * 8 - place) & 31), 0x780000u, 0x3f800000u));
}

/* o += p b^T: fragments times a strip whose neighbours are columns of p. */
template <class F, int PITCH, int COLUMNS, int DEPTH, int TILES>
GRADC_FN void gradc_add_strip(f32 (&o)[TILES * DEPTH / 8][4], const u32 (&p)[TILES * COLUMNS / 8][2], const u16 *b) {
  const int lane = threadIdx.x % 32;
  const u16 *const own = b + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 8;
#pragma unroll
  for (int n = 0; n < COLUMNS; n += 16) {
    u32 a[TILES][4];
    gradc_left_of_block<COLUMNS, TILES>(a, p, n);
#pragma unroll
    for (int c = 0; c < DEPTH; c += 16) {
      u32 r[4];
      ldmatrix_x4(r, own + c * PITCH + n);
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        F::multiply(o[(m * DEPTH + c) / 8], a[m], r[0], r[1]);
        F::multiply(o[(m * DEPTH + c) / 8 + 1], a[m], r[2], r[3]);
      }
    }
  }
}
/* The same where a lane has 16 neighbours of each 64 columns, those of four products: pieces 2u and 2u + 1 of 8 columns are its neighbours
 * 4u to 4u + 3. */
template <class F, int PITCH, int COLUMNS, int DEPTH, int TILES>
GRADC_FN void gradc_add_runs(f32 (&o)[TILES * DEPTH / 8][4], const u32 (&p)[TILES * COLUMNS / 8][2], const u16 *b) {
  const int lane = threadIdx.x % 32;
  const u16 *const own = b + lane / 4 * PITCH + lane % 4 * 16;
#pragma unroll
  for (int n = 0; n < COLUMNS; n += 64)
#pragma unroll
    for (int c = 0; c < DEPTH; c += 8) {
      const uint4 low = *(const uint4 *)(own + c * PITCH + n), high = *(const uint4 *)(own + c * PITCH + n + 8);
      const u32 r[4][2] = {{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
#pragma unroll
      for (int u = 0; u < 4; u++) {
        u32 a[TILES][4];
        gradc_left_of_block<COLUMNS, TILES>(a, p, n + 16 * u);
#pragma unroll
        for (int m = 0; m < TILES; m++) F::multiply(o[(m * DEPTH + c) / 8], a[m], r[u][0], r[u][1]);
      }
    }
}

/* Sums of SPLIT neighbouring warps, in their order, by the first of them. */
template <int SPLIT, int N> GRADC_FN void gradc_sum_of_warps(f32 (&x)[N][4], f32 *shared) {
  const int warp = threadIdx.x / 32, part = warp % SPLIT;
  f32 *const own = shared + warp / SPLIT * ((SPLIT - 1) * N * 128) + threadIdx.x % 32;
  if (part > 0) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) own[((part - 1) * N * 4 + i) * 32] = x[i / 4][i % 4];
  }
  __syncthreads();
  if (part == 0) {
#pragma unroll
    for (int other = 0; other < SPLIT - 1; other++)
#pragma unroll
      for (int i = 0; i < 4 * N; i++) x[i / 4][i % 4] += own[(other * N * 4 + i) * 32];
  }
  __syncthreads();
}

/* A plain sum, unlike gradc_sum's: the terms of a block of columns are few. */
struct gradc_plain_sum { template <class T> static __device__ __forceinline__ void join(T &a, const T &b) { a += b; } };

/* The combination of a quad's values, of which the order of two changes no bit that counts. */
template <class J, class T> GRADC_FN T gradc_of_quad(T x) {
  T other = __shfl_xor_sync(0xffffffffu, x, 2);
  J::join(x, other);
  other = __shfl_xor_sync(0xffffffffu, x, 1);
  J::join(x, other);
  return x;
}

/* A maximum as a power of two that weights are relative to: what is rounded here is so in all weights of a row alike. */
GRADC_FN f32 gradc_exponent(f32 top) { return fabsf(top) < 0x1p26f ? top * 0x1.715476p+0f : top; }
/* x of rows relative to a maximum that was `before`, relative to what it is now. */
GRADC_FN f32 gradc_rescaled(f32 before, f32 now) { return before == now ? 1.0f : exp2_approx(gradc_exponent(before) - gradc_exponent(now)); }

/* Sums x of weights relative to a maximum, after the sweep, without the rounding of its exponent: what they would be of e^(score - top). */
GRADC_FN f32 gradc_rounding(f32 top) { return fabsf(top) < 0x1p26f ? exp2_approx(-mad_f32(top, 0x1.715476p+0f, -gradc_exponent(top))) : 1.0f; }
template <int ROWS> GRADC_FN void gradc_unrounded(f32 (&x)[ROWS], const f32 (&top)[ROWS]) {
#pragma unroll
  for (int h = 0; h < ROWS; h++) x[h] *= gradc_rounding(top[h]);
}
template <int N, int ROWS> GRADC_FN void gradc_unrounded(f32 (&x)[N][4], const f32 (&top)[ROWS]) {
#pragma unroll
  for (int h = 0; h < ROWS; h++) {
    const f32 factor = gradc_rounding(top[h]);
#pragma unroll
    for (int n = h / 2 * (2 * N / ROWS); n < (h / 2 + 1) * (2 * N / ROWS); n++) x[n][h % 2 * 2] *= factor, x[n][h % 2 * 2 + 1] *= factor;
  }
}

/* e^x of a score: its argument is rounded once more, as the score itself was, and the power of two is within 2 units in the last place; what
 * would be subnormal is 0. */
GRADC_FN f32 gradc_exp_of_score(f32 x) { return exp2_approx(x * 0x1.715476p+0f); }
/* As gradc_rescaled, of a sum whose logarithm is taken: of a maximum's own weight, 1, nothing is rounded. */
GRADC_FN f32 gradc_rescaled_sum(f32 before, f32 now) { return before == now ? 1.0f : gradc_exp_of_score(before - now); }

#endif
