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

/* A value that is the same in all lanes of a warp, and that the compiler knows to be. */
GRADC_FN int gradc_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

/* Two of the 8 numbers of 4 bits in a word, n and n + 4, in the low byte of its halves, those of an odd n times 16, with `bits` beside them; of
 * numbers less 8, plus 8. */
template <int FLIP> GRADC_FN u32 gradc_nibbles(u32 word, int n, u32 bits) {
  const u32 mask = n % 2 ? 0x00f000f0u : 0x000f000fu, flipped = bits | (FLIP ? mask & 0x88888888u : 0);
  return flipped ? masked_xor(word >> n / 2 * 8, mask, flipped) : word >> n / 2 * 8 & mask;
}

/* What products are given: fragments of 16 bits, two in a register.
 *
 * digits: integers of 4 bits less zeros, each times 1 / UNITS, exactly.  As the last bits of a bf16 an integer q is 2^-133 q, up to 255, which is an
 * FMA from 2^-6 (q - z): of integers z of 8 bits it has 8 bits.  Behind those of 2^10 in f16 there is room for them.  Where q comes times 16 the FMA
 * multiplies by a sixteenth, and takes 2^10 / 16 away in f16.
 * zeros: what is added: of zero points z as floats, of codes that are plus `flip`; or of z - less as bytes, of flip + less, in halves of a register:
 * less is 0 or 8, of unsigned bytes, or 128 below, of signed ones plus 128. */
struct gradc_bf16_fragments {
  static constexpr f32 UNITS = 64.0f;
  static __device__ __forceinline__ u32 zeros(int flip, f32 low, f32 high) { return packed((f32)flip * -0x1p-6f - low * 0x1p-6f, (f32)flip * -0x1p-6f - high * 0x1p-6f); }
  static __device__ __forceinline__ u32 zeros(int less, u32 bytes) {
    return fma_bf16x2(bytes, 0xff00ff00u, less == 0 ? 0 : less == 8 ? 0xbe00be00u : less == -128 ? 0x40004000u : 0x3ff03ff0u);
  }
  static __device__ __forceinline__ u32 no_zeros(int flip) { return flip ? 0xbe00be00u : 0; }
  template <int FLIP> static __device__ __forceinline__ u32 digits(u32 word, int n, u32 zeros) {
    return fma_bf16x2(gradc_nibbles<FLIP>(word, n, 0), n % 2 ? 0x7d007d00u : 0x7f007f00u, zeros);
  }
  static __device__ __forceinline__ f32 half(u32 pair, int i) { return f32_of_bits(i ? pair & 0xffff0000u : pair << 16); }
  static __device__ __forceinline__ void multiply(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_m16n8k16_bf16(d, a, b0, b1); }
  static __device__ __forceinline__ u32 packed(f32 low, f32 high) { return pack_bf16(low, high); }
};
struct gradc_f16_fragments {
  static constexpr f32 UNITS = 1.0f;
  static __device__ __forceinline__ u32 zeros(int flip, f32 low, f32 high) { return packed(-1024.0f - (f32)flip - low, -1024.0f - (f32)flip - high); }
  static __device__ __forceinline__ u32 zeros(int less, u32 bytes) {
    return fma_f16x2(bytes | 0x64006400u, 0xbc00bc00u, less == 0 ? 0 : less == 8 ? 0xc800c800u : less == -128 ? 0x58005800u : 0x57805780u);
  }
  static __device__ __forceinline__ u32 no_zeros(int flip) { return flip ? 0xe408e408u : 0xe400e400u; }
  template <int FLIP> static __device__ __forceinline__ u32 digits(u32 word, int n, u32 zeros) {
    const u32 number = gradc_nibbles<FLIP>(word, n, 0x64006400u);
    return n % 2 ? fma_f16x2(number, 0x2c002c00u, fma_f16x2(zeros, 0x3c003c00u, 0x63806380u)) : fma_f16x2(number, 0x3c003c00u, zeros);
  }
  static __device__ __forceinline__ f32 half(u32 pair, int i) { return f16_load((u16)(i ? pair >> 16 : pair)); }
  static __device__ __forceinline__ void multiply(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_m16n8k16_f16(d, a, b0, b1); }
  static __device__ __forceinline__ u32 packed(f32 low, f32 high) { return pack_f16(low, high); }
};

/* An integer that is known where a function is made for its type. */
template <int N> struct gradc_constant { constexpr __device__ operator int() const { return N; } };

/* A value that is computed once, in a register, where the compiler would compute it again wherever it is used. */
#ifdef GRADC_CUDA_SIM
GRADC_FN int gradc_kept(int x) { return x; }
GRADC_FN i64 gradc_kept(i64 x) { return x; }
GRADC_FN u16 *gradc_kept(u16 *x) { return x; }
GRADC_FN u16 *gradc_in_shared(u16 *x) { return x; }
#else
GRADC_FN int gradc_kept(int x) { asm volatile("" : "+r"(x)); return x; }
GRADC_FN i64 gradc_kept(i64 x) { asm volatile("" : "+l"(x)); return x; }
GRADC_FN gradc_shared_u16 gradc_in_shared(const u16 *x) { return {gradc_shared_address(x)}; }
GRADC_FN gradc_shared_u16 gradc_kept(const u16 *x) {
  gradc_shared_u16 y = gradc_in_shared(x);
  asm volatile("" : "+r"(y.at));
  return y;
}
#endif

/* Rows of FEATURES elements in memory, `step` elements apart, of which all threads together copy ROWS into a panel.  16 bytes move at a
 * time, asynchronously, where all begin at multiples of 16; else an element, and nothing is under way. */
template <int FEATURES, int PADDED, int PITCH, int ROWS, int THREADS> struct gradc_rows {
  enum { PER_ROW = PADDED / 8, PIECES = ROWS * PER_ROW, TIMES = (PIECES + THREADS - 1) / THREADS, EVEN = PIECES % THREADS == 0 && THREADS % PER_ROW == 0 };
  const u16 *array;
  ix start; /* of its first row */
  i64 step, feature_step;
  bool in_pieces;

  static __device__ __forceinline__ int row() { return (int)threadIdx.x / PER_ROW; }
  static __device__ __forceinline__ int feature() { return (int)threadIdx.x % PER_ROW * 8; }
  static __device__ __forceinline__ gradc_rows at(const u16 *array, ix start, i64 step, i64 feature_step) {
    const bool in_pieces = FEATURES % 8 == 0 && feature_step == 1 && step % 8 == 0 && gradc_aligned(array + start, 16);
    return {array, start, step, feature_step, in_pieces};
  }

  /* Whether a thread's pieces are the same of each ROWS rows that are there. */
  __device__ __forceinline__ bool is_even() const { return EVEN && FEATURES == PADDED && in_pieces; }
  /* The place of what a thread copies of the rows from `first` on, in the array and in the panel: that of its piece in a middle row, since small
   * distances of both signs cost nothing. */
  enum { APART = THREADS / PER_ROW, MIDDLE = TIMES > 1 ? APART : 0 };
  __device__ __forceinline__ ix own(ix first) const { return start + (first + row() + MIDDLE) * (ix)step + feature(); }
  static __device__ __forceinline__ u16 *own_of(void *panel) { return (u16 *)panel + (row() + MIDDLE) * PITCH + feature(); }
  /* Starts the copy of ROWS rows; `own` is then the place of the next ones. */
  template <class To> __device__ __forceinline__ void copy_even(To to, ix &own) const {
#pragma unroll
    for (int i = 0; i < TIMES; i++) cp_async16(to + (i * APART - MIDDLE) * PITCH, array + own + (i64)(i * APART - MIDDLE) * step);
    own += ROWS * (ix)step;
  }

  /* Starts the copy of the rows from `first` on; what is not among the `there` first, or PADDED features have beside FEATURES, is 0. */
  __device__ __forceinline__ void copy(u16 *panel, ix first, ix there) const {
    if (is_even() && there >= ROWS) {
      ix place = own(first);
      copy_even(own_of(panel), place);
      return;
    }
    copy_any(panel, first, there);
  }
  __device__ __forceinline__ void copy_any(u16 *panel, ix first, ix there) const {
    const u16 *const from = array + start + first * step;
    if (in_pieces) {
#pragma unroll 1
      for (int piece = threadIdx.x; piece < PIECES; piece += THREADS) {
        const int r = piece / PER_ROW, c = piece % PER_ROW * 8;
        const bool read = r < there && c < FEATURES;
        cp_async16(panel + r * PITCH + c, read ? from + r * step + c : array + start, read ? 16 : 0);
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

/* What a lane points to, of 16 rows of a panel as the left operand of a product, and as the right one of a product that sums up rows; and as the
 * right one of a product that sums up features. */
template <int PITCH> GRADC_FN u16 *gradc_of_lane(void *panel) {
  const int lane = threadIdx.x % 32;
  return (u16 *)panel + lane % 16 * PITCH + lane / 16 * 8;
}
template <int PITCH> GRADC_FN u16 *gradc_right_of_lane(void *panel) {
  const int lane = threadIdx.x % 32;
  return (u16 *)panel + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 8;
}
/* All of the rows of a warp, 16 TILES of them. */
template <int PITCH, int DEPTH, int TILES, class Own> GRADC_FN void gradc_load_rows(u32 (&a)[DEPTH / 16][TILES][4], Own own) {
#pragma unroll
  for (int c = 0; c < DEPTH / 16; c++)
#pragma unroll
    for (int m = 0; m < TILES; m++) ldmatrix_x4(a[c][m], own + (m * 16 * PITCH + c * 16));
}

/* s += a b^T, for features c to c + 15 of a and of the panel b, whose rows are columns of s. */
template <class F, int PITCH, int COLUMNS, int TILES, class Own>
GRADC_FN void gradc_add_scores(f32 (&s)[TILES * COLUMNS / 8][4], const u32 (&a)[TILES][4], Own own, int c) {
#pragma unroll
  for (int n = 0; n < COLUMNS; n += 16) {
    u32 r[4];
    ldmatrix_x4(r, own + (n * PITCH + c));
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      F::multiply(s[(m * COLUMNS + n) / 8], a[m], r[0], r[1]);
      F::multiply(s[(m * COLUMNS + n) / 8 + 1], a[m], r[2], r[3]);
    }
  }
}
/* s = a b^T: rows of a warp, in fragments or in a panel, times a panel. */
template <class F, int PITCH, int COLUMNS, int DEPTH, int TILES, class Own>
GRADC_FN void gradc_scores(f32 (&s)[TILES * COLUMNS / 8][4], const u32 (&a)[DEPTH / 16][TILES][4], Own b) {
#pragma unroll
  for (int c = 0; c < DEPTH / 16; c++) gradc_add_scores<F, PITCH, COLUMNS, TILES>(s, a[c], b, c * 16);
}
template <class F, int PITCH, int COLUMNS, int DEPTH, int TILES, class Own>
GRADC_FN void gradc_scores(f32 (&s)[TILES * COLUMNS / 8][4], Own rows, Own b) {
#pragma unroll
  for (int c = 0; c < DEPTH; c += 16) {
    u32 a[TILES][4];
#pragma unroll
    for (int m = 0; m < TILES; m++) ldmatrix_x4(a[m], rows + (m * 16 * PITCH + c));
    gradc_add_scores<F, PITCH, COLUMNS, TILES>(s, a, b, c);
  }
}

/* Elements of x[n], rounded to 16 bits, two in a register: those of n and n + 1 are 16 columns of a left operand. */
template <class F> GRADC_FN void gradc_pack(u32 (&packed)[2], const f32 (&x)[4]) { packed[0] = F::packed(x[0], x[1]), packed[1] = F::packed(x[2], x[3]); }

/* o += p b: fragments, packed or rounded here, times a panel whose rows are columns of p. */
template <class F, int PITCH, int COLUMNS, int DEPTH, int TILES, class Own>
GRADC_FN void gradc_add_product(f32 (&o)[TILES * DEPTH / 8][4], const u32 (&p)[TILES * COLUMNS / 8][2], Own own) {
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
      ldmatrix_x4_trans(r, own + (n * PITCH + c));
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        F::multiply(o[(m * DEPTH + c) / 8], a[m], r[0], r[1]);
        F::multiply(o[(m * DEPTH + c) / 8 + 1], a[m], r[2], r[3]);
      }
    }
  }
}
template <class F, int PITCH, int COLUMNS, int DEPTH, int TILES, class Own>
GRADC_FN void gradc_add_product(f32 (&o)[TILES * DEPTH / 8][4], const f32 (&p)[TILES * COLUMNS / 8][4], Own b) {
  u32 packed[TILES * COLUMNS / 8][2];
#pragma unroll
  for (int n = 0; n < TILES * COLUMNS / 8; n++) gradc_pack<F>(packed[n], p[n]);
  gradc_add_product<F, PITCH, COLUMNS, DEPTH, TILES>(o, packed, b);
}

/* HEIGHT rows of WIDTH neighbours as they lie in memory, `step` elements apart: all threads together copy them.  Pieces of 16 bytes, or of
 * what a row is a multiple of, move asynchronously where all begin at multiples of them; of rows of an element of less than 4, the word that
 * it is in, where that begins in the array and all elements have the same place, the block's shift, in theirs; else an element, and nothing is
 * under way. */
template <class T, int WIDTH, int PITCH, int HEIGHT, int THREADS> struct gradc_strip {
  enum { BYTES = WIDTH * (int)sizeof(T), PIECE = BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : BYTES % 4 == 0 ? 4 : 0, PER = PIECE ? PIECE / (int)sizeof(T) : 1 };
  enum { PER_ROW = WIDTH / PER, PIECES = HEIGHT * PER_ROW, PER_WORD = sizeof(T) < 4 ? 4 / (int)sizeof(T) : 1 };
  enum { EVEN = PIECES && THREADS % PER_ROW == 0, ROWS = THREADS / PER_ROW, TIMES = (HEIGHT + ROWS - 1) / ROWS };
  const T *first, *own; /* own: what the thread copies, if its part is even */
  i64 step, next;
  bool in_pieces, in_words;
  int in_word; /* the place of the first */

  /* 8 threads write 8 sets of banks: a piece of 8 rows, where a row has fewer than 8 and begins an odd number of them behind the one before. */
  enum { OF_ROWS = PIECE == 16 && (PER_ROW == 2 || PER_ROW == 4) && PITCH * (int)sizeof(T) / 16 % 2 && THREADS % (8 * PER_ROW) == 0 };
  static __device__ __forceinline__ int row() { return OF_ROWS ? (int)threadIdx.x / (8 * PER_ROW) * 8 + (int)threadIdx.x % 8 : (int)threadIdx.x / PER_ROW; }
  static __device__ __forceinline__ int place() { return (OF_ROWS ? (int)threadIdx.x / 8 : (int)threadIdx.x) % PER_ROW * PER; }
  static __device__ __forceinline__ gradc_strip at(const T *array, i64 start, i64 step, i64 next) {
    const T *const from = array + start;
    const bool in_pieces = PIECE && next == 1 && step % PER == 0 && gradc_aligned(from, PIECE ? PIECE : 1);
    const bool in_words = BYTES < 4 && WIDTH == 1 && step * (int)sizeof(T) % 4 == 0 && gradc_aligned(array, 4);
    return {from, from + row() * step + place(), step, next, in_pieces, in_words, (int)(start % PER_WORD)};
  }
  /* Elements of a word before the one that is `offset` elements behind the first. */
  __device__ __forceinline__ int shift(i64 offset) const { return in_words ? (in_word + (int)(offset % PER_WORD)) % PER_WORD : 0; }

  static __device__ __forceinline__ void piece(T *to, const T *from, int bytes) {
    if (PIECE == 16) cp_async16(to, from, bytes);
    else if (PIECE == 8) cp_async8(to, from, bytes);
    else cp_async4(to, from, bytes);
  }

  /* Starts the copy of what is `offset` elements behind the first: of each of the `there` first rows the `valid` first; the others are 0. */
  __device__ __forceinline__ void copy(T *strip, i64 offset, ix there, ix valid) const {
    if (in_pieces && EVEN && valid >= WIDTH) {
      const T *const from = own + offset;
      T *const to = strip + row() * PITCH + place();
      const bool all = there >= HEIGHT;
#pragma unroll
      for (int i = 0; i < TIMES; i++) {
        if (HEIGHT % ROWS && row() + i * ROWS >= HEIGHT) break;
        piece(to + i * ROWS * PITCH, from + i * ROWS * step, all || row() + i * ROWS < there ? PIECE : 0);
      }
    } else if (in_pieces) {
#pragma unroll 1
      for (int i = threadIdx.x; i < PIECES; i += THREADS) {
        const int r = i / PER_ROW, c = i % PER_ROW * PER;
        const int own = r < there ? (int)gradc_max(0, gradc_min((ix)PER, valid - c)) : 0;
        piece(strip + r * PITCH + c, own > 0 ? first + offset + r * step + c : first, own * (int)sizeof(T));
      }
    } else if (in_words) {
      const int before = shift(offset);
#pragma unroll 1
      for (int r = threadIdx.x; r < HEIGHT; r += THREADS) {
        const bool read = r < there && valid > 0;
        cp_async4(strip + r * PITCH, first + (read ? offset + r * step - before : -in_word), read ? (before + 1) * (int)sizeof(T) : 0);
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
template <class T, int N> GRADC_FN T gradc_part(const u32 (&words)[N], int n) {
  const u32 word = words[n * (int)sizeof(T) / 4] >> n * (int)sizeof(T) % 4 * 8;
  T x;
  memcpy(&x, &word, sizeof x);
  return x;
}
/* Bytes in the halves of a register: one twice; signed ones plus 128. */
template <int N> GRADC_FN u32 gradc_twice(const u32 (&words)[N], int n) { return permuted(words[n / 4], 0, 0x4040u + n % 4 * 0x0101u); }
GRADC_FN u32 gradc_both(u8 low, u8 high) { return permuted(low, high, 0x5410u); }
GRADC_FN u32 gradc_unsigned(u32 both) { return both ^ 0x00800080u; }
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
/* Half a word of 4 bits each, of two columns: the first in its low half. */
GRADC_FN u32 gradc_of_columns(u32 first, u32 second, int half) { return permuted(first, second, half ? 0x7632u : 0x5410u); }
/* A pair of which columns that are not there are 0. */
GRADC_FN u32 gradc_of_there(u32 pair, bool low, bool high) { return (low ? pair & 0xffffu : 0) | (high ? pair & 0xffff0000u : 0); }

/* The bytes of 16 numbers, rounded to 16 bits: the low ones, and the high ones. */
template <class F> GRADC_FN void gradc_codebook(u32 (&book)[8], const f32 *values) {
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const u32 first = F::packed(values[4 * n], values[4 * n + 1]), second = F::packed(values[4 * n + 2], values[4 * n + 3]);
    book[n] = permuted(first, second, 0x6420u), book[4 + n] = permuted(first, second, 0x7531u);
  }
}
/* The bytes of a codebook for four codes. */
GRADC_FN u32 gradc_bytes_of_codes(u32 b0, u32 b1, u32 b2, u32 b3, u32 low_bits, u32 high_bit) {
  return permuted(permuted(b0, b1, low_bits), permuted(b2, b3, low_bits), high_bit);
}
/* The entries of the codes n and n + 4 of a word's 8. */
GRADC_FN u32 gradc_entries(const u32 (&book)[8], u32 word, int n) {
  const u32 low_bits = word & 0x77777777u, high_bit = masked_or(word >> 1, 0x44444444u, 0x32103210u);
  u32 entries[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u32 low = gradc_bytes_of_codes(book[0], book[1], book[2], book[3], low_bits >> 16 * half, high_bit >> 16 * half);
    const u32 high = gradc_bytes_of_codes(book[4], book[5], book[6], book[7], low_bits >> 16 * half, high_bit >> 16 * half);
    entries[half] = permuted(low, high, n < 2 ? 0x5140u : 0x7362u);
  }
  return gradc_of_columns(entries[0], entries[1], n % 2);
}

/* Two neighbours in a register, times a scale each, rounded once. */
template <class F> GRADC_FN u32 gradc_scaled(u32 pair, const f32 (&scale)[2]) { return F::packed(F::half(pair, 0) * scale[0], F::half(pair, 1) * scale[1]); }

/* o += p b^T: fragments times a strip whose neighbours are columns of p; `scaled` has the two registers of columns n to n + 7 and n + 8 to n + 15. */
template <class F, int PITCH, int COLUMNS, int DEPTH, int TILES, class Scaled>
GRADC_FN void gradc_add_strip_of(f32 (&o)[TILES * DEPTH / 8][4], const u32 (&p)[TILES * COLUMNS / 8][2], const u16 *b, const Scaled &scaled) {
  const int lane = threadIdx.x % 32;
  const u16 *const own = b + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 8;
#pragma unroll
  for (int n = 0; n < COLUMNS; n += 16) {
    u32 a[TILES][4];
    gradc_left_of_block<COLUMNS, TILES>(a, p, n);
#pragma unroll
    for (int c = 0; c < DEPTH; c += 16) {
      u32 r[4];
      if (c + 16 <= DEPTH) ldmatrix_x4(r, own + c * PITCH + n);
      else ldmatrix_x2(*(u32(*)[2])r, own + (c - lane / 16 * 8) * PITCH + n);
#pragma unroll
      for (int i = 0; i < (c + 16 <= DEPTH ? 4 : 2); i++) r[i] = scaled(r[i], n / 8 + i % 2);
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        F::multiply(o[(m * DEPTH + c) / 8], a[m], r[0], r[1]);
        if (c + 16 <= DEPTH) F::multiply(o[(m * DEPTH + c + 8) / 8 % (TILES * DEPTH / 8)], a[m], r[2], r[3]);
      }
    }
  }
}
template <class F, int PITCH, int COLUMNS, int DEPTH, int TILES>
GRADC_FN void gradc_add_strip(f32 (&o)[TILES * DEPTH / 8][4], const u32 (&p)[TILES * COLUMNS / 8][2], const u16 *b) {
  gradc_add_strip_of<F, PITCH, COLUMNS, DEPTH, TILES>(o, p, b, [](u32 pair, int) { return pair; });
}
/* The same where all rows share a scale of each column. */
template <class F, int PITCH, int COLUMNS, int DEPTH, int TILES>
GRADC_FN void gradc_add_strip(f32 (&o)[TILES * DEPTH / 8][4], const u32 (&p)[TILES * COLUMNS / 8][2], const u16 *b, const f32 (&scale)[COLUMNS / 8][2]) {
  gradc_add_strip_of<F, PITCH, COLUMNS, DEPTH, TILES>(o, p, b, [&](u32 pair, int eight) { return gradc_scaled<F>(pair, scale[eight]); });
}
/* Pieces of 8 of a run of neighbours in a row of b, as the right operands of RUN / 4 products: neighbours 4u to 4u + 3; or, in words, of each 8
 * neighbours those of u and u + 4, and of u + 1 and u + 5. */
template <int RUN, bool IN_WORDS> GRADC_FN void gradc_load_run(u32 (&r)[RUN / 4][2], const u16 *b) {
#pragma unroll
  for (int n = 0; n < RUN / 8; n++) {
    const uint4 x = ((const uint4 *)b)[n];
    r[2 * n][0] = IN_WORDS ? permuted(x.x, x.z, 0x5410u) : x.x, r[2 * n][1] = IN_WORDS ? permuted(x.x, x.z, 0x7632u) : x.y;
    r[2 * n + 1][0] = IN_WORDS ? permuted(x.y, x.w, 0x5410u) : x.z, r[2 * n + 1][1] = IN_WORDS ? permuted(x.y, x.w, 0x7632u) : x.w;
  }
}
/* Columns n to n + 4 RUN of p times a lane's run of b, added to every STEP-th block of sums. */
template <class F, int COLUMNS, int TILES, int RUN, bool IN_WORDS, int STEP>
GRADC_FN void gradc_multiply_run(f32 (*sums)[4], const u32 (&p)[TILES * COLUMNS / 8][2], int n, const u16 *b) {
  u32 r[RUN / 4][2];
  gradc_load_run<RUN, IN_WORDS>(r, b);
#pragma unroll
  for (int u = 0; u < RUN / 4; u++) {
    u32 a[TILES][4];
    gradc_left_of_block<COLUMNS, TILES>(a, p, n + 16 * u);
#pragma unroll
    for (int m = 0; m < TILES; m++) F::multiply(sums[m * STEP], a[m], r[u][0], r[u][1]);
  }
}
/* The same where a lane has RUN neighbours of each 4 RUN columns, those of RUN / 4 products. */
template <class F, int PITCH, int COLUMNS, int DEPTH, int TILES, int RUN, bool IN_WORDS>
GRADC_FN void gradc_add_runs(f32 (&o)[TILES * DEPTH / 8][4], const u32 (&p)[TILES * COLUMNS / 8][2], const u16 *b) {
  const int lane = threadIdx.x % 32;
  const u16 *const own = b + lane / 4 * PITCH + lane % 4 * RUN;
#pragma unroll
  for (int n = 0; n < COLUMNS; n += 4 * RUN)
#pragma unroll
    for (int c = 0; c < DEPTH; c += 8) {
      gradc_multiply_run<F, COLUMNS, TILES, RUN, IN_WORDS, DEPTH / 8>(o + c / 8, p, n, own + c * PITCH + n);
    }
}
/* The same where SCALED columns share a scale of each row. */
template <class F, int PITCH, int COLUMNS, int DEPTH, int TILES, int RUN, bool IN_WORDS, int SCALED>
GRADC_FN void gradc_add_runs(f32 (&o)[TILES * DEPTH / 8][4], const u32 (&p)[TILES * COLUMNS / 8][2], const u16 *b, const f32 (&scale)[2 * TILES][COLUMNS / (4 * RUN)]) {
  const int lane = threadIdx.x % 32;
  const u16 *const own = b + lane / 4 * PITCH + lane % 4 * RUN;
#pragma unroll
  for (int n = 0; n < COLUMNS; n += SCALED)
#pragma unroll
    for (int c = 0; c < DEPTH; c += 8) {
      f32 sum[TILES][4] = {};
#pragma unroll
      for (int k = n; k < n + SCALED; k += 4 * RUN) gradc_multiply_run<F, COLUMNS, TILES, RUN, IN_WORDS, 1>(sum, p, k, own + c * PITCH + k);
#pragma unroll
      for (int i = 0; i < 4 * TILES; i++) {
        f32 &to = o[(i / 4 * DEPTH + c) / 8][i % 4];
        to = mad_f32(sum[i / 4][i % 4], scale[i / 2][n / (4 * RUN)], to);
      }
    }
}

/* Rows of DEPTH elements in memory, `step` apart, of which two neighbours are loaded at a time. */
template <int DEPTH> struct gradc_pairs {
  const u16 *first;
  i64 step, next;
  bool in_words;

  static __device__ __forceinline__ gradc_pairs at(const u16 *from, i64 step, i64 next) {
    return {from, step, next, DEPTH % 2 == 0 && next == 1 && step % 2 == 0 && gradc_aligned(from, 4)};
  }
  __device__ __forceinline__ u32 load(ix row, int k) const {
    const u16 *const from = first + row * step + k * next;
    if (k >= DEPTH) return 0;
    if (in_words) return *(const u32 *)from;
    return from[0] | (k + 1 < DEPTH ? (u32)from[next] << 16 : 0);
  }
};
/* o += a b^T, of a lane's rows of a, APART apart, `there` in all, and COLUMNS rows of b: what is few enough to come straight from memory. */
template <class F, int DEPTH, int COLUMNS, int PADDED, int TILES, int APART>
GRADC_FN void gradc_multiply_rows(f32 (&o)[TILES * PADDED / 8][4], const gradc_pairs<DEPTH> a, const gradc_pairs<DEPTH> b, ix lane_row, ix there) {
  const int own = threadIdx.x % 32 / 4, place = threadIdx.x % 4 * 2;
#pragma unroll
  for (int k = 0; k < DEPTH; k += 16) {
    u32 left[TILES][4];
#pragma unroll
    for (int i = 0; i < 4 * TILES; i++) left[i / 4][i % 4] = a.load(gradc_min(lane_row + APART * (i / 4 * 2 + i % 2), there - 1), k + i % 4 / 2 * 8 + place);
#pragma unroll
    for (int c = 0; c < PADDED; c += 8) {
      const ix column = gradc_min((ix)(c + own), (ix)(COLUMNS - 1));
      const u32 low = b.load(column, k + place), high = b.load(column, k + 8 + place);
#pragma unroll
      for (int m = 0; m < TILES; m++) F::multiply(o[(m * PADDED + c) / 8], left[m], low, high);
    }
  }
}

/* Sums of SPLIT neighbouring warps, in their order, by the first of them. */
template <int SPLIT, int N> GRADC_FN void gradc_sum_of_warps(f32 (&x)[N][4], f32 *shared) {
  const int warp = threadIdx.x / 32, part = warp % SPLIT;
  float4 *const own = (float4 *)shared + warp / SPLIT * ((SPLIT - 1) * N * 32) + threadIdx.x % 32;
  if (part > 0) {
#pragma unroll
    for (int i = 0; i < N; i++) own[((part - 1) * N + i) * 32] = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
  }
  __syncthreads();
  if (part == 0) {
#pragma unroll
    for (int other = 0; other < SPLIT - 1; other++)
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float4 sum = own[(other * N + i) * 32];
        x[i][0] += sum.x, x[i][1] += sum.y, x[i][2] += sum.z, x[i][3] += sum.w;
      }
  }
  __syncthreads();
}

/* A plain sum, unlike gradc_sum's: the terms of a block of columns are few. */
struct gradc_plain_sum { template <class T> static __device__ __forceinline__ void join(T &a, const T &b) { a += b; } };

/* Combines a value with those before it, if it is not the first. */
template <class J, class T> GRADC_FN void gradc_join(bool first, T &a, const T &b) {
  if (first) a = b;
  else J::join(a, b);
}

/* The combination of a quad's values, of which the order of two changes no bit that counts. */
template <class J, class T> GRADC_FN T gradc_of_quad(T x) {
  T other = __shfl_xor_sync(0xffffffffu, x, 2);
  J::join(x, other);
  other = __shfl_xor_sync(0xffffffffu, x, 1);
  J::join(x, other);
  return x;
}

/* What weights are relative to: of rows that are -inf alone so far the least finite number, whose distance from -inf is infinite, too. */
GRADC_FN f32 gradc_base(f32 top) {
  gradc_maximum<f32>::join(top, -0x1.fffffep127f);
  return top;
}
/* A base as a power of two: what is rounded here is so in all weights of a row alike. */
GRADC_FN f32 gradc_exponent(f32 base, f32 most = 0x1p26f) { return fabsf(base) < most ? base * 0x1.715476p+0f : base; }
/* Raises a maximum to x, and its exponent with it; what makes of weights that were relative to it such that are now.  Of two maxima with 2^26
 * between them the larger one may have the smaller exponent, by 10^7: then it is 0, which of neighbours is half the rounding of a score. */
GRADC_FN f32 gradc_raised(f32 &top, f32 x, f32 &exponent) {
  const f32 before = exponent;
  gradc_maximum<f32>::join(top, x);
  exponent = gradc_exponent(gradc_base(top));
  const f32 change = before - exponent;
  return exp2_approx(fminf(change, -change));
}

/* What the rounding of a base's exponent makes of weights, as a factor. */
GRADC_FN f32 gradc_rounding(f32 base, f32 most = 0x1p26f) {
  return fabsf(base) < most ? exp2_approx(-mad_f32(base, 0x1.715476p+0f, -gradc_exponent(base, most))) : 1.0f;
}
/* Sums x of weights relative to a maximum, after the sweep, without the rounding of its exponent: what they would be of e^(score - top). */
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
/* As gradc_raised, for a sum whose logarithm is taken: of a maximum's own weight, 1, nothing is rounded. */
GRADC_FN f32 gradc_raised_sum(f32 &top, f32 x) {
  const f32 before = top;
  gradc_maximum<f32>::join(top, x);
  return before == top ? 1.0f : gradc_exp_of_score(before - top);
}

#endif
