/* What every generated CUDA kernel shares: the word that stops a call, sums that keep what they round off, reductions over
 * the threads of a task, the stable radix sort of row indices.  A task is `W` neighbouring threads that go through their
 * rows together; W is a power of two, and the whole block where it is more than a warp. */

/* ---- Offsets --------------------------------------------------------------------------------------------------------------
 * Of elements, and all that is counted on the way to them.  A launch for which 32 bits are not proved to hold them takes the
 * function from the same text compiled with GRADC_WIDE. */
#ifdef GRADC_WIDE
typedef i64 ix;
#else
typedef i32 ix;
#endif

/* ---- Bad indices ---------------------------------------------------------------------------------------------------------
 * flag[4 + s]: the position of the lowest bad element that check s has found, all ones while there is none.  flag[0] to [2]: what
 * went wrong at one position, its value and bound.  A kernel that follows `site` checks writes nothing if one of them has found
 * something; a check has a word of its own, so that none stops itself half-way.
 * flag[3]: the address of a word of host memory to be written where something is found, or all ones.  The host polls it, and waits
 * for the device before it reads anything else: the store needs system scope, which volatile has, and no order. */
#define GRADC_FINE (~0ull)
enum { GRADC_FLAG_NOTICE = 3, GRADC_FLAG_WORDS = 4 };

#ifdef GRADC_CUDA_SIM
SIM_UNSEEN static __attribute__((unused)) void gradc_notify(volatile u64 *host) { *host = 1; } /* it is in no array of a launch */
#else
GRADC_FN void gradc_notify(volatile u64 *host) { *host = 1; }
#endif

GRADC_FN bool gradc_stopped(const u64 *flag, i64 site) {
  bool stopped = false;
  for (i64 s = 0; s < site; s++) stopped |= flag[GRADC_FLAG_WORDS + s] != GRADC_FINE;
  return stopped;
}

/* aux: what a launch is asked for.  position + 1 writes down what stands at a bad position; what is not above 0 is a plain run. */
GRADC_FN void gradc_report(u64 *flag, i64 site, i64 aux, i64 code, i64 position, i64 value, i64 bound) {
  if (aux <= 0) {
    atomicMin((unsigned long long *)&flag[GRADC_FLAG_WORDS + site], (unsigned long long)position);
    if (flag[GRADC_FLAG_NOTICE] != GRADC_FINE) gradc_notify((volatile u64 *)flag[GRADC_FLAG_NOTICE]);
  } else if (position == aux - 1) flag[0] = (u64)code, flag[1] = (u64)value, flag[2] = (u64)bound;
}

#ifdef GRADC_CUDA_SIM
GRADC_FN i64 gradc_rounded_i64(f32 v) { return v - v == 0 ? (i64)__builtin_rintf(v) : 0; } /* of no number: any */
#else
GRADC_FN i64 gradc_rounded_i64(f32 v) { return __float2ll_rn(v); }
#endif

enum { GRADC_ALIGN = 256 }; /* bytes that the beginnings of a workspace's arrays are multiples of */

GRADC_FN ix gradc_min(ix a, ix b) { return a < b ? a : b; }
GRADC_FN ix gradc_max(ix a, ix b) { return a > b ? a : b; }
GRADC_FN ix gradc_chunks(ix count, ix each) { return (count + each - 1) / each; }
GRADC_FN i64 gradc_align(i64 bytes) { return (bytes + GRADC_ALIGN - 1) & ~(i64)(GRADC_ALIGN - 1); }

/* place == value, without 64 bits for each place of a row that is compared with one value. */
GRADC_FN i32 gradc_is_at(ix place, i64 value) { return (ix)value == value && place == (ix)value; }

/* ---- Neighbouring columns -----------------------------------------------------------------------------------------------
 * A thread has N elements of a row: from[col], from[col + col_step], ..., of which those below `end_col` are there.  Where
 * they are neighbours (col_step is 1) and `vectorized` says that they are aligned and all there or none, they move 16 bytes
 * at a time. */

GRADC_FN bool gradc_aligned(const void *p, int bytes) { return ((u64)p & (u64)(bytes - 1)) == 0; }

template <int BYTES> struct gradc_word { typedef uint4 type; };
template <> struct gradc_word<8> { typedef uint2 type; };
template <> struct gradc_word<4> { typedef u32 type; };
template <> struct gradc_word<2> { typedef u16 type; };
template <> struct gradc_word<1> { typedef u8 type; };

template <class T, int N> struct gradc_vector { /* N elements as the words that they are moved in */
  enum { BYTES = N * (int)sizeof(T), STEP = BYTES < 16 ? BYTES : 16, COUNT = BYTES / STEP };
  typedef typename gradc_word<STEP>::type word;
  union { word words[COUNT]; T items[N]; u32 pairs[(BYTES + 3) / 4]; };
};

/* Element j: the upper half of a word is a mask away from an f32, where an extracted element is shifted. */
template <int N> GRADC_FN f32 gradc_bf16_at(const gradc_vector<u16, N> &v, int j) {
  return N == 1 ? bf16_load(v.items[0]) : f32_of_bits(j % 2 ? v.pairs[j / 2] & 0xffff0000u : v.pairs[j / 2] << 16);
}

/* Many neighbours that are not aligned are loaded one at a time, in a loop that stays one: written out, its loads would be issued
 * for aligned rows too, under a predicate that is false.  In each pass all elements of a vector move down by one. */
template <class T, int N> GRADC_FN constexpr bool gradc_one_by_one() { return N >= 8 && sizeof(T) < 4; }
template <class T, int N> GRADC_FN void gradc_shift(gradc_vector<T, N> &v, T last) {
  if constexpr (sizeof(T) < 4) {
    enum { BITS = 8 * (int)sizeof(T), WORDS = ((int)gradc_vector<T, N>::BYTES + 3) / 4, USED = 8 * (int)gradc_vector<T, N>::BYTES - 32 * (WORDS - 1) };
#pragma unroll
    for (int i = 0; i < WORDS - 1; i++) v.pairs[i] = v.pairs[i] >> BITS | v.pairs[i + 1] << (32 - BITS);
    v.pairs[WORDS - 1] = v.pairs[WORDS - 1] >> BITS | ((u32)last & ((1u << BITS) - 1)) << (USED - BITS);
  } else {
#pragma unroll
    for (int j = 0; j < N - 1; j++) v.items[j] = v.items[j + 1];
    v.items[N - 1] = last;
  }
}
template <class T, int N> GRADC_FN void gradc_get_each(gradc_vector<T, N> &to, const T *from, ix col, ix end_col) {
#pragma unroll 1
  for (int j = 0; j < N; j++) gradc_shift(to, col + j < end_col ? from[col + j] : T());
}

template <class T, int N> GRADC_FN void gradc_get(T (&to)[N], const T *from, ix col, ix col_step, ix end_col, bool vectorized) {
  if (vectorized || (gradc_one_by_one<T, N>() && col_step == 1)) {
    if (col >= end_col) return;
    gradc_vector<T, N> all;
    if (vectorized) {
#pragma unroll
      for (int i = 0; i < (int)gradc_vector<T, N>::COUNT; i++) all.words[i] = ((const typename gradc_vector<T, N>::word *)(from + col))[i];
    } else {
      gradc_get_each(all, from, col, end_col);
    }
#pragma unroll
    for (int j = 0; j < N; j++) to[j] = all.items[j];
  } else {
#pragma unroll
    for (int j = 0; j < N; j++)
      if (col + j * col_step < end_col) to[j] = from[col + j * col_step];
  }
}

/* Element j, of elements that are set in order: of two bytes as a part of a word, which is one register whatever sets it. */
template <class T, int N> GRADC_FN void gradc_set(gradc_vector<T, N> &v, int j, T value) { v.items[j] = value; }
template <int N> GRADC_FN void gradc_set(gradc_vector<u16, N> &v, int j, u16 value) {
  v.pairs[j / 2] = j % 2 ? v.pairs[j / 2] | (u32)value << 16 : value;
}

/* N elements at each of TIMES columns `step` apart, all under way together. */
template <class T, int N, int TIMES>
GRADC_FN void gradc_get_all(gradc_vector<T, N> (&to)[TIMES], const T *from, ix col, ix step, ix col_step, ix end_col, bool vectorized) {
  typedef typename gradc_vector<T, N>::word word;
  if (vectorized) {
#pragma unroll
    for (int t = 0; t < TIMES; t++)
#pragma unroll
      for (int i = 0; i < (int)gradc_vector<T, N>::COUNT; i++)
        if (col + t * step < end_col) to[t].words[i] = ((const word *)(from + col + t * step))[i];
  } else if (gradc_one_by_one<T, N>() && col_step == 1) {
#pragma unroll
    for (int t = 0; t < TIMES; t++) gradc_get_each(to[t], from, col + t * step, end_col);
  } else {
#pragma unroll
    for (int t = 0; t < TIMES; t++)
#pragma unroll
      for (int j = 0; j < N; j++)
        gradc_set(to[t], j, col + t * step + j * col_step < end_col ? from[col + t * step + j * col_step] : T(0));
  }
}

/* The same of rows that begin where N elements can be moved at once, and end within them: what is behind the end is not read. */
template <class T, int N, int TIMES> GRADC_FN void gradc_get_ragged(gradc_vector<T, N> (&to)[TIMES], const T *from, ix col, ix step, ix end_col, bool vectorized) {
  if (vectorized && col + (TIMES - 1) * step + N <= end_col) {
    gradc_get_all(to, from, col, step, 1, end_col, true);
    return;
  }
#pragma unroll 1
  for (int t = 0; t < TIMES; t++) {
    const ix first = col + t * step;
    gradc_vector<T, N> own;
    if (vectorized && first + N <= end_col) gradc_get_all((gradc_vector<T, N>(&)[1])own, from, first, 0, 1, end_col, true);
    else gradc_get_each(own, from, first, end_col);
#pragma unroll
    for (int i = 0; i < TIMES; i++) if (i == t) to[i] = own;
  }
}

/* Vectors of which nothing is loaded: one value in all elements. */
template <class T, int N, int TIMES, class V> GRADC_FN void gradc_fill(gradc_vector<T, N> (&to)[TIMES], V value) {
#pragma unroll
  for (int t = 0; t < TIMES; t++)
#pragma unroll
    for (int j = 0; j < N; j++) gradc_set(to[t], j, (T)value);
}

template <class T, int N> GRADC_FN void gradc_get_vector(gradc_vector<T, N> &to, const T *from, ix col, ix col_step, ix end_col, bool vectorized) {
  gradc_get_all((gradc_vector<T, N>(&)[1])to, from, col, 0, col_step, end_col, vectorized);
}

template <class T, int N> GRADC_FN void gradc_put(T *to, const T (&from)[N], ix col, ix col_step, ix end_col, bool vectorized) {
  if (vectorized) {
    if (col >= end_col) return;
    gradc_vector<T, N> all;
#pragma unroll
    for (int j = 0; j < N; j++) all.items[j] = from[j];
#pragma unroll
    for (int i = 0; i < (int)gradc_vector<T, N>::COUNT; i++) ((typename gradc_vector<T, N>::word *)(to + col))[i] = all.words[i];
  } else {
#pragma unroll
    for (int j = 0; j < N; j++)
      if (col + j * col_step < end_col) to[col + j * col_step] = from[j];
  }
}

#if GRADC_BF16_NATIVE
GRADC_FN u32 gradc_bf16_pair(f32 low, f32 high) { u32 w; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low)); return w; }
#else
GRADC_FN u32 gradc_bf16_pair(f32 low, f32 high) { return bf16_store(low) | (u32)bf16_store(high) << 16; }
#endif

/* Elements of bf16, which are rounded here: two at once. */
template <int N> GRADC_FN void gradc_put_bf16(u16 *to, const f32 (&from)[N], ix col, ix col_step, ix end_col, bool vectorized) {
  if (vectorized && N > 1) {
    if (col >= end_col) return;
    gradc_vector<u16, N> all;
#pragma unroll
    for (int j = 0; j + 1 < N; j += 2) all.pairs[j / 2] = gradc_bf16_pair(from[j], from[j + 1]);
#pragma unroll
    for (int i = 0; i < (int)gradc_vector<u16, N>::COUNT; i++) ((typename gradc_vector<u16, N>::word *)(to + col))[i] = all.words[i];
  } else {
#pragma unroll
    for (int j = 0; j < N; j++)
      if (col + j * col_step < end_col) to[col + j * col_step] = bf16_store(from[j]);
  }
}

/* exp_f32 of what is not above 0, or NaN: the same bits without the selects for infinity and for what is subnormal. */
GRADC_FN f32 gradc_exp_f32(f32 x) {
  const f32 t = at_least_f32(x, -104.5f);
  return exp_mantissa_f32(t) * f32_of_bits((u32)(exp_quotient_f32(t) + 191) << 23) * 0x1p-64f;
}

/* e^x for what reaches memory only rounded to a shorter format: within 2.8 units in the last place of f32 up to |x| = 10 and 6.4
 * for all x, where one of a format of 11 bits is 2^13 of them, for 14 instructions.  It is the square of e^(x/2) = 2^k e^(r/2),
 * r = x - 2 k ln2, so that one power of two is enough: the product overflows and becomes subnormal by itself. */
GRADC_FN f32 gradc_exp_narrow(f32 x) {
  const f32 t = at_most_f32(at_least_f32(x, -150.0f), 150.0f);
  const f32 place = mad_f32(t, 0x1.715476p-1f, 12583039.0f); /* 1.5 * 2^23 + 127 */
  const f32 r = mad_f32(place - 12583039.0f, -0x1.62e430p+0f, t);
  f32 p = 0x1.6a4154p-16f; /* e^(r/2) on |r| <= 1.002 ln2, relative error 2^-28 */
  p = mad_f32(p, r, 0x1.1239c6p-12f);
  p = mad_f32(p, r, 0x1.5558bcp-9f);
  p = mad_f32(p, r, 0x1.555492p-6f);
  p = mad_f32(p, r, 0x1.fffffcp-4f);
  p = mad_f32(p, r, 0.5f);
  p = mad_f32(p, r, 1.0f) * f32_of_bits(bits_of_f32(place) << 23);
  return p * p;
}

/* ---- Sums ---------------------------------------------------------------------------------------------------------------
 * An f32 sum of many terms is a pair: what each addition rounds off is added up beside it (Knuth's two-sum), so that no
 * f64 is needed, of which most devices have one unit for 64 of f32. */

struct __align__(8) sum_f32 { f32 high, low; };
GRADC_FN void gradc_add(sum_f32 &s, f32 v) {
  const f32 high = s.high + v, seen = high - s.high;
  s.low += (s.high - (high - seen)) + (v - seen);
  s.high = high;
}
GRADC_FN void gradc_add(sum_f32 &s, sum_f32 v) { /* the same bits as v + s */
  const f32 high = s.high + v.high, seen = high - s.high;
  s.low = (s.low + v.low) + ((s.high - (high - seen)) + (v.high - seen));
  s.high = high;
}

/* A term that is added to a sum in a register: four additions for seven (Dekker's fast two-sum).  What is rounded off is kept
   whole where the sum is the larger of the two, else up to u |term|: together an error of u |sum| + u (sum of all |terms|). */
GRADC_FN void gradc_add_next(sum_f32 &s, f32 v) {
  const f32 high = s.high + v;
  s.low += v - (high - s.high);
  s.high = high;
}
/* A thread's N neighbouring terms are added up pairwise before they meet the sum.  N <= 8: each term is rounded with three
   times, so that with u = 2^-24 the error of a sum of any length is at most u |sum| + 3 u (sum of all |terms|), up to
   terms of u^2. */
template <int N> GRADC_FN f32 gradc_pairwise(f32 (&terms)[N]) {
#pragma unroll
  for (int step = 1; step < N; step *= 2)
#pragma unroll
    for (int j = 0; j + step < N; j += 2 * step) terms[j] += terms[j + step];
  return terms[0];
}
template <int N> GRADC_FN void gradc_add_all(sum_f32 &s, f32 (&terms)[N]) { gradc_add(s, gradc_pairwise(terms)); }
/* Rows whose terms are added up in plain f32 before they meet a sum in shared memory: each is rounded with three times, as above. */
enum { GRADC_PLAIN_ROWS = 4 };
GRADC_FN f32 gradc_value(sum_f32 s) { return s.low - s.low == 0 ? s.high + s.low : s.high; } /* an infinite sum loses inf - inf */
GRADC_FN void gradc_clear(sum_f32 &s) { s.high = 0, s.low = 0; }

/* U: what T is added and multiplied as; signed integers wrap so. */
#define GRADC_PLAIN(T, U)                                        \
  GRADC_FN void gradc_add(T &s, T v) { s = (T)((U)s + (U)v); }   \
  GRADC_FN void gradc_times(T &s, T v) { s = (T)((U)s * (U)v); } \
  GRADC_FN T gradc_value(T s) { return s; }                      \
  GRADC_FN void gradc_clear(T &s) { s = 0; }
GRADC_PLAIN(f32, f32)
GRADC_PLAIN(f64, f64)
GRADC_PLAIN(i8, u32)
GRADC_PLAIN(u8, u32)
GRADC_PLAIN(i16, u32)
GRADC_PLAIN(u16, u32)
GRADC_PLAIN(i32, u32)
GRADC_PLAIN(u32, u32)
GRADC_PLAIN(i64, u64)
GRADC_PLAIN(u64, u64)
#undef GRADC_PLAIN

/* In whatever order threads come: exact for integers alone. */
GRADC_FN void gradc_atomic_add(f32 *to, f32 v) { atomicAdd(to, v); }
GRADC_FN void gradc_atomic_add(f64 *to, f64 v) { atomicAdd(to, v); }
GRADC_FN void gradc_atomic_add(i32 *to, i32 v) { atomicAdd(to, v); }
GRADC_FN void gradc_atomic_add(u32 *to, u32 v) { atomicAdd(to, v); }
GRADC_FN void gradc_atomic_add(i64 *to, i64 v) { atomicAdd((unsigned long long *)to, (unsigned long long)v); }
GRADC_FN void gradc_atomic_add(u64 *to, u64 v) { atomicAdd((unsigned long long *)to, (unsigned long long)v); }

/* 16 bytes an add, where the hardware has it; elsewhere four adds. */
GRADC_FN void gradc_atomic_add_four(f32 *to, f32 a, f32 b, f32 c, f32 d) {
#if !defined(GRADC_CUDA_SIM) && __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" : : "l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
#else
  atomicAdd(to, a), atomicAdd(to + 1, b), atomicAdd(to + 2, c), atomicAdd(to + 3, d);
#endif
}

/* A thread's columns, as gradc_put has them, are added to a row. */
template <int N> GRADC_FN void gradc_atomic_add_row(f32 *to, const f32 (&from)[N], ix col, ix col_step, ix end_col, bool vectorized) {
  if (vectorized) {
    if (col >= end_col) return;
#pragma unroll
    for (int i = 0; i < N; i += 4) gradc_atomic_add_four(to + col + i, from[i], from[i + 1], from[i + 2], from[i + 3]);
  } else {
#pragma unroll
    for (int j = 0; j < N; j++)
      if (col + j * col_step < end_col) atomicAdd(&to[col + j * col_step], from[j]);
  }
}

#define GRADC_ATOMIC_EXTREMES(T)                                   \
  GRADC_FN void gradc_atomic_max(T *to, T v) { atomicMax(to, v); } \
  GRADC_FN void gradc_atomic_min(T *to, T v) { atomicMin(to, v); }
GRADC_ATOMIC_EXTREMES(i32)
GRADC_ATOMIC_EXTREMES(u32)
GRADC_ATOMIC_EXTREMES(i64)
GRADC_ATOMIC_EXTREMES(u64)
#undef GRADC_ATOMIC_EXTREMES

/* ---- Sums in any order with the same bits: 64-bit integers, all scaled by one power of two ------------------------------
 * 2^scale * (the largest |value|) * (the most additions) stays below 2^61, so that no sum overflows; what is smaller than the
 * largest by 2^-(61 - log2 additions) is rounded away.  All that is added is a multiple of 4: no addition changes the last two
 * bits of a sum, which are flags that an infinity and -infinity set, and NaN both. */

enum { GRADC_FIXED_FLAGS = 2 }; /* bits of a sum */

GRADC_FN u32 gradc_magnitude(f32 v) { /* bits of |v|, 0 for what is not finite */
  const u32 bits = bits_of_f32(v) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0u;
}

GRADC_FN int gradc_fixed_scale(u32 largest, i64 additions) {
  const int exponent = largest >> 23 ? (int)(largest >> 23) - 126 : -126; /* |v| < 2^exponent */
  return 63 - GRADC_FIXED_FLAGS - (64 - leading_zeros_u64((u64)additions | 1u)) - exponent;
}

/* 2^k for -252 <= k <= 254, in two factors: it may be out of range. */
GRADC_FN f32 gradc_scaled(f32 v, int k) {
  const int half = k / 2;
  return v * power_of_two_f32(half) * power_of_two_f32(k - half);
}

GRADC_FN i64 gradc_fixed(f32 v, int scale) { return gradc_rounded_i64(gradc_scaled(v, scale)); }
GRADC_FN u64 gradc_addend(i64 fixed) { return (u64)fixed << GRADC_FIXED_FLAGS; }
GRADC_FN void gradc_fixed_add(u64 *sums, ix at, u64 addend) { atomicAdd((unsigned long long *)&sums[at], (unsigned long long)addend); }
GRADC_FN void gradc_note_odd(u64 *sums, ix at, f32 v) { atomicOr((unsigned long long *)&sums[at], v != v ? 3ull : v > 0 ? 1ull : 2ull); }

GRADC_FN void gradc_fixed_add(u64 *sums, ix at, f32 v, int scale) {
  if (v - v == 0) gradc_fixed_add(sums, at, gradc_addend(gradc_fixed(v, scale)));
  else gradc_note_odd(sums, at, v);
}

/* What the lanes of a warp exchange in shared memory: value i of a lane at i * PITCH + lane, so that lanes which read the EACH values
 * of a few places side by side find them in different banks; then each lane's places of other taps than the first of a row. */
template <int ROWS, int TAPS, int N> struct gradc_exchange {
  enum { PLACES = ROWS * TAPS, EACH = N / PLACES, PITCH = EACH > 1 ? 32 + (15 + EACH) / EACH : 32, REST = TAPS > 1 ? TAPS - 1 : 1, OTHERS = PLACES - ROWS };
  static __device__ __forceinline__ int value(int place, int lane, int i) { return (place * EACH + i) * PITCH + lane; }
  static __device__ __forceinline__ int other(int q) { return q / REST * TAPS + q % REST + 1; } /* its number among all places */
  static __device__ __forceinline__ ix *places(u64 *exchanged, int q) { return (ix *)(exchanged + N * PITCH) + q * 32; }
  static __device__ __forceinline__ void add_other(u64 *sums, u64 *exchanged, int q, int lane, int i) {
    const ix at = places(exchanged, q)[lane];
    if (at >= 0) gradc_fixed_add(sums, at + i, exchanged[value(other(q), lane, i)]);
  }
};
enum { GRADC_EXCHANGED = 32 + 4 * (int)sizeof(ix) }; /* its words for one value of each lane, at most */

#ifdef GRADC_CUDA_SIM
#define GRADC_ASSUME(condition)
#else
#define GRADC_ASSUME(condition) __builtin_assume(condition)
#endif

/* All taps but the first of each row are added: what grids that are not smooth need, once in the text. */
template <int ROWS, int TAPS, int N> __device__ __noinline__ void gradc_fixed_add_others(u64 *sums, u64 *exchanged) {
  typedef gradc_exchange<ROWS, TAPS, N> E;
  GRADC_ASSUME(__isGlobal(sums) && __isShared(exchanged));
#pragma unroll
  for (int q = 0; q < E::OTHERS; q++)
#pragma unroll
    for (int i = (int)(threadIdx.x % 32); i < 32 * E::EACH; i += 32) E::add_other(sums, exchanged, q, i / E::EACH, i % E::EACH);
}

/* Each lane of a warp adds N values to sums that may be neighbours: neighbouring lanes add to them, in a few sectors of L2.
 * They are of ROWS rows of taps, the same number of each tap: to the sum `at` and those that follow it; -1: to none.  Where a
 * lane's tap is the tap before of the next lane, as of all neighbours on a smooth grid, the next one adds both: integers have the
 * same sum in any order.  exchanged: GRADC_EXCHANGED * N words of the warp. */
template <int ROWS, int TAPS, int N> GRADC_FN void gradc_fixed_add_together(u64 *sums, const ix (&at)[ROWS][TAPS], const f32 (&values)[N], int scale, u64 *exchanged) {
  typedef gradc_exchange<ROWS, TAPS, N> E;
  enum { PLACES = E::PLACES, EACH = E::EACH, LAST = 31, ALONE = 0x7fffffff };
  const unsigned all = 0xffffffffu;
  const int lane = (int)(threadIdx.x % 32);
  i64 fixed[N];
  ix to[PLACES];
#pragma unroll
  for (int p = 0; p < PLACES; p++) to[p] = at[p / TAPS][p % TAPS];
  f32 nothing = 0; /* unless something is not finite */
#pragma unroll
  for (int i = 0; i < N; i++) fixed[i] = gradc_fixed(values[i], scale), nothing = fma_f32(values[i], 0.0f, nothing);
  if (nothing != 0) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      if (values[i] - values[i] == 0) continue;
      if (to[i / EACH] >= 0) gradc_note_odd(sums, to[i / EACH] + i % EACH, values[i]);
      fixed[i] = 0;
    }
  }
  u32 left = 0; /* lanes with more to add than their first taps */
#pragma unroll
  for (int p = PLACES - 1; p > 0; p--) {
    if (p % TAPS == 0) continue;
    const ix next = __shfl_down_sync(all, to[p - 1], 1);
    const bool passed = lane < LAST && to[p] >= 0 && next == to[p];
    const bool taken = __ballot_sync(all, passed) << 1 >> lane & 1u;
    left |= __ballot_sync(all, to[p] >= 0 && !passed);
#pragma unroll
    for (int i = p * EACH; i < (p + 1) * EACH; i++) {
      const i64 before = __shfl_up_sync(all, fixed[i], 1);
      fixed[i - EACH] += taken ? before : 0;
    }
    if (passed) to[p] = -1;
  }
  __syncwarp(); /* what was exchanged before has been read */
#pragma unroll
  for (int i = 0; i < N; i++)
    if (i / EACH % TAPS == 0) exchanged[E::value(0, lane, i)] = gradc_addend(fixed[i]);
  if (left >> lane & 1u) {
#pragma unroll
    for (int i = 0; i < N; i++)
      if (i / EACH % TAPS > 0) exchanged[E::value(0, lane, i)] = gradc_addend(fixed[i]);
  }
#pragma unroll
  for (int q = 0; q < E::OTHERS; q++) E::places(exchanged, q)[lane] = to[E::other(q)];
  __syncwarp();
#pragma unroll
  for (int p = 0; p < PLACES; p += TAPS) {
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      const int from = (k * 32 + lane) / EACH, i = (k * 32 + lane) % EACH;
      const ix place = __shfl_sync(all, to[p], from);
      if (place >= 0) gradc_fixed_add(sums, place + i, exchanged[E::value(p, from, i)]);
    }
  }
  if (left & ALONE) gradc_fixed_add_others<ROWS, TAPS, N>(sums, exchanged);
  else if (lane < E::OTHERS * EACH) E::add_other(sums, exchanged, lane / EACH, LAST, lane % EACH); /* it has nobody to pass them on to */
}

/* The integer as f32, half to even, times 2^-scale. */
GRADC_FN f32 gradc_fixed_value(u64 sum, int scale) {
  const u32 odd = (u32)sum & 3u;
  if (odd) return f32_of_bits(odd == 3u ? 0x7fc00000u : odd == 1u ? 0x7f800000u : 0xff800000u);
  return gradc_scaled((f32)(i64)sum, -scale - GRADC_FIXED_FLAGS);
}

/* ---- Over the threads of a task -------------------------------------------------------------------------------------- */

template <class T> struct gradc_sum { static __device__ __forceinline__ void join(T &a, const T &b) { gradc_add(a, b); } };
template <class T> struct gradc_prod { static __device__ __forceinline__ void join(T &a, const T &b) { gradc_times(a, b); } };
/* Whether a joined with b has the bits of b joined with a. */
template <class F> struct gradc_commutes { enum { VALUE = 0 }; };
template <class T> struct gradc_commutes<gradc_sum<T> > { enum { VALUE = 1 }; };
template <class T> struct gradc_commutes<gradc_prod<T> > { enum { VALUE = 1 }; };
/* NaN wins */
template <class T> struct gradc_maximum { static __device__ __forceinline__ void join(T &a, const T &b) { a = a != a ? a : b != b || b > a ? b : a; } };
template <class T> struct gradc_minimum { static __device__ __forceinline__ void join(T &a, const T &b) { a = a != a ? a : b != b || b < a ? b : a; } };
#ifdef GRADC_NAN_EXTREMES /* one instruction for four; of zeros the positive one is the larger */
template <> struct gradc_maximum<f32> { static __device__ __forceinline__ void join(f32 &a, const f32 &b) { a = at_least_f32(a, b); } };
template <> struct gradc_minimum<f32> { static __device__ __forceinline__ void join(f32 &a, const f32 &b) { a = at_most_f32(a, b); } };
#endif

/* The place of an extremum: NaN wins, of equals the first; index < 0 is none. */
template <class T> struct gradc_arg_extremum { T value; ix index; };
template <class T> struct gradc_arg_max {
  static __device__ __forceinline__ void join(gradc_arg_extremum<T> &a, const gradc_arg_extremum<T> &b) {
    const bool nan_a = a.value != a.value, nan_b = b.value != b.value;
    const bool same = a.value == b.value || (nan_a && nan_b), better = nan_b ? !nan_a : !nan_a && b.value > a.value;
    if (b.index >= 0 && (a.index < 0 || (same ? b.index < a.index : better))) a = b;
  }
};
template <class T> struct gradc_arg_min {
  static __device__ __forceinline__ void join(gradc_arg_extremum<T> &a, const gradc_arg_extremum<T> &b) {
    const bool nan_a = a.value != a.value, nan_b = b.value != b.value;
    const bool same = a.value == b.value || (nan_a && nan_b), better = nan_b ? !nan_a : !nan_a && b.value < a.value;
    if (b.index >= 0 && (a.index < 0 || (same ? b.index < a.index : better))) a = b;
  }
};

GRADC_FN u32 gradc_mask(int width) { /* the lanes of this thread's task in its warp */
  return width >= 32 ? 0xffffffffu : ((1u << width) - 1) << (threadIdx.x % 32 / width * width);
}

template <class T> struct gradc_words { union { T value; u32 words[(sizeof(T) + 3) / 4]; }; };

#define GRADC_SHUFFLE(name, call)                                                                     \
  template <class T> GRADC_FN T name(T v, u32 mask, int lane) {                                       \
    gradc_words<T> from, to;                                                                          \
    from.value = v;                                                                                   \
    _Pragma("unroll") for (int i = 0; i < (int)((sizeof(T) + 3) / 4); i++) to.words[i] = call(mask, from.words[i], lane); \
    return to.value;                                                                                  \
  }
GRADC_SHUFFLE(gradc_shuffle_xor, __shfl_xor_sync)
GRADC_SHUFFLE(gradc_shuffle_up, __shfl_up_sync)
GRADC_SHUFFLE(gradc_broadcast, __shfl_sync)
#undef GRADC_SHUFFLE

template <int W> GRADC_FN void gradc_sync() {
  if (W > 32) __syncthreads();
  else if (W > 1) __syncwarp(gradc_mask(W));
}

/* Over LANES neighbouring lanes of a warp: the same bits in each. */
template <class F, int LANES, class T> GRADC_FN T gradc_reduce_lanes(T v, u32 mask) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) {
    T other = gradc_shuffle_xor(v, mask, step);
    const bool upper = !gradc_commutes<F>::VALUE && (threadIdx.x & step); /* both add in the same order */
    T first = upper ? other : v;
    F::join(first, upper ? v : other);
    v = first;
  }
  return v;
}

/* The same bits in every thread, in an order that W alone decides.  shared: room for 32 of T, free again at the end. */
template <class F, int W, class T> GRADC_FN T gradc_reduce(T v, char *shared) {
  v = gradc_reduce_lanes<F, (W < 32 ? W : 32)>(v, gradc_mask(W));
  if (W > 32) {
    T *const each = (T *)shared;
    if (threadIdx.x % 32 == 0) each[threadIdx.x / 32] = v;
    __syncthreads();
    enum { WARPS = W > 32 ? W / 32 : 1 };
    v = each[threadIdx.x % WARPS];
    __syncthreads();
    v = gradc_reduce_lanes<F, WARPS>(v, 0xffffffffu);
  }
  return v;
}

/* Two sums at once: half of the lanes go on with either, so that both cost little more than one, and wait once.
   W > 1; shared: room for 4 sums for each 32 threads. */
template <int W> GRADC_FN void gradc_reduce_both(sum_f32 &a, sum_f32 &b, char *shared) {
  enum { LANES = W < 32 ? W : 32, HALF = LANES / 2, WARPS = W > 32 ? W / 32 : 1 };
  const u32 mask = gradc_mask(W);
  const int second = threadIdx.x / HALF % 2;
  sum_f32 own = second ? b : a, other = second ? a : b;
  gradc_add(own, gradc_shuffle_xor(other, mask, HALF));
  own = gradc_reduce_lanes<gradc_sum<sum_f32>, HALF>(own, mask);
  if (W > 32) {
    sum_f32 *const each = (sum_f32 *)shared;
    if (threadIdx.x % HALF == 0) each[threadIdx.x / HALF] = own;
    __syncthreads();
    own = each[2 * (threadIdx.x % WARPS) + second];
    __syncthreads();
    own = gradc_reduce_lanes<gradc_sum<sum_f32>, WARPS>(own, mask);
  }
  other = gradc_shuffle_xor(own, mask, HALF);
  a = second ? other : own, b = second ? own : other;
}

/* The same where a task's threads are blockDim.x / W apart.  shared: room for a T of each thread of the block. */
template <class F, int W, class T> GRADC_FN T gradc_reduce_across(T v, char *shared) {
  if (W == 1) return v;
  const int rows = (int)blockDim.x / W;
  T *const each = (T *)shared + threadIdx.x % rows;
  ((T *)shared)[threadIdx.x] = v;
  __syncthreads();
  v = each[0];
#pragma unroll
  for (int i = 1; i < W; i++) F::join(v, each[i * rows]);
  __syncthreads();
  return v;
}
