/* Blocks of rows and columns on tensor cores: what kernels share that are made of loops with sweeps (docs/tiles.md).
 *
 * A warp has 16 rows of a thread block.  What they are computed into are fragments, T x[N / 8][4] for N columns: of element i of x[n] a lane
 * has row lane / 4 + 8 (i / 2) and column 8n + lane % 4 * 2 + i % 2.  So a lane has two rows, four lanes, a quad, share them, and a value
 * of rows is x[2], the same in a quad.
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

/* Starts the copy of ROWS rows of FEATURES elements into a panel, by all threads; rows from `there` on, and what PADDED features lack, are
 * zeros.  in_pieces: 16 bytes at a time, at multiples of 16; else element by element, and nothing is under way. */
template <int FEATURES, int PADDED, int PITCH, int ROWS, int THREADS>
GRADC_FN void gradc_copy_panel(u16 *panel, const u16 *from, i64 step, i64 feature_step, ix there, bool in_pieces) {
  enum { PER_ROW = PADDED / 8, PIECES = ROWS * PER_ROW };
  if (in_pieces) {
#pragma unroll
    for (int at = 0; at < PIECES; at += THREADS) {
      const int piece = at + (int)threadIdx.x, r = piece / PER_ROW, c = piece % PER_ROW * 8;
      const bool read = r < there && c < FEATURES;
      if (PIECES % THREADS == 0 || piece < PIECES) cp_async16(panel + r * PITCH + c, read ? from + r * step + c : from, read ? 16 : 0);
    }
  } else {
#pragma unroll 1
    for (int at = threadIdx.x; at < ROWS * PADDED; at += THREADS) {
      const int r = at / PADDED, c = at % PADDED;
      panel[r * PITCH + c] = r < there && c < FEATURES ? from[r * step + c * feature_step] : (u16)0;
    }
  }
}
/* Whether pieces of 16 bytes begin at multiples of 16. */
GRADC_FN bool gradc_in_pieces(const u16 *from, i64 step, i64 feature_step, int features) {
  return features % 8 == 0 && feature_step == 1 && step % 8 == 0 && gradc_aligned(from, 16);
}

/* 16 rows of a panel from feature c on, as the left operand of a product. */
template <int PITCH> GRADC_FN void gradc_load_left(u32 (&a)[4], const u16 *panel, int c) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4(a, panel + lane % 16 * PITCH + lane / 16 * 8 + c);
}
template <int PITCH, int DEPTH> GRADC_FN void gradc_load_rows(u32 (&a)[DEPTH / 16][4], const u16 *panel) {
#pragma unroll
  for (int c = 0; c < DEPTH; c += 16) gradc_load_left<PITCH>(a[c / 16], panel, c);
}

/* s += a b^T, for features c to c + 15 of a and of the panel b, whose rows are columns of s. */
template <class F, int PITCH, int COLUMNS> GRADC_FN void gradc_add_scores(f32 (&s)[COLUMNS / 8][4], const u32 (&a)[4], const u16 *b, int c) {
  const int lane = threadIdx.x % 32;
  const u16 *const own = b + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 8 + c;
#pragma unroll
  for (int n = 0; n < COLUMNS; n += 16) {
    u32 r[4];
    ldmatrix_x4(r, own + n * PITCH);
    F::multiply(s[n / 8], a, r[0], r[1]);
    F::multiply(s[n / 8 + 1], a, r[2], r[3]);
  }
}
/* s = a b^T: fragments of rows, or 16 rows of a panel, times a panel. */
template <class F, int PITCH, int COLUMNS, int DEPTH>
GRADC_FN void gradc_scores(f32 (&s)[COLUMNS / 8][4], const u32 (&a)[DEPTH / 16][4], const u16 *b) {
#pragma unroll
  for (int c = 0; c < DEPTH; c += 16) gradc_add_scores<F, PITCH, COLUMNS>(s, a[c / 16], b, c);
}
template <class F, int PITCH, int COLUMNS, int DEPTH>
GRADC_FN void gradc_scores(f32 (&s)[COLUMNS / 8][4], const u16 *rows, const u16 *b) {
#pragma unroll
  for (int c = 0; c < DEPTH; c += 16) {
    u32 a[4];
    gradc_load_left<PITCH>(a, rows, c);
    gradc_add_scores<F, PITCH, COLUMNS>(s, a, b, c);
  }
}

/* o += p b: fragments, rounded to 16 bits, times a panel whose rows are columns of p. */
template <class F, int PITCH, int COLUMNS, int DEPTH>
GRADC_FN void gradc_add_product(f32 (&o)[DEPTH / 8][4], const f32 (&p)[COLUMNS / 8][4], const u16 *b) {
  const int lane = threadIdx.x % 32;
  const u16 *const own = b + lane % 16 * PITCH + lane / 16 * 8;
#pragma unroll
  for (int n = 0; n < COLUMNS / 8; n += 2) {
    const u32 a[4] = {F::packed(p[n][0], p[n][1]), F::packed(p[n][2], p[n][3]), F::packed(p[n + 1][0], p[n + 1][1]),
                      F::packed(p[n + 1][2], p[n + 1][3])};
#pragma unroll
    for (int c = 0; c < DEPTH; c += 16) {
      u32 r[4];
      ldmatrix_x4_trans(r, own + n * 8 * PITCH + c);
      F::multiply(o[c / 8], a, r[0], r[1]);
      F::multiply(o[c / 8 + 1], a, r[2], r[3]);
    }
  }
}

/* A plain sum, unlike gradc_sum's: the terms of a block of columns are few. */
struct gradc_plain_sum { template <class T> static __device__ __forceinline__ void join(T &a, const T &b) { a += b; } };

/* x of rows relative to a maximum that was `before`, relative to what it is now. */
GRADC_FN f32 gradc_rescaled(f32 before, f32 now) { return before == now ? 1.0f : exp2_approx((before - now) * 0x1.715476p+0f); }

/* e^x of a score: its argument is rounded once more, as the score itself was, and the power of two is within 2 units in the last place; what
 * would be subnormal is 0. */
GRADC_FN f32 gradc_exp_of_score(f32 x) { return exp2_approx(x * 0x1.715476p+0f); }

#endif
