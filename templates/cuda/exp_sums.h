/* The largest of many values and the sum of exp(value - largest), in one walk over them.  A thread's `total` is the sum of
 * exp(value) 2^(-8 base); the base is an integer that follows `top`, the largest value, from below, so that the total is at least 1,
 * and what was added before another base counts for an exact power of two.  No difference of a value and the largest is rounded.
 * A thread whose largest value is GRADC_EXP_FAR or more in size goes through its values again, `far` then, and takes them beside
 * the `first` largest value.  An infinite value does nothing to the total, NaN makes it NaN.
 *
 * A term is scale + scale r Q(r): a power of two, and e^r - 1 = r Q(r).  It is not rounded: its two parts are added up on their own.
 * r is x - k ln2 with ln2 rounded, one multiply-add for two: a term is at most 0.45 units in the last place from the exponential, and
 * 0.033 for each power of two that it is below the term of the largest value, whose quotient is taken: 0.8 down to 2^-10 of it.  2^n
 * terms that weigh as much as the largest are 2^-n of it, so that a sum of 2^17 terms is off by less than 1.1 units for this.
 * The terms of a chunk are rounded when they are added up, by at most 1.5 units, and the quotient by 1.  A term below 2^-118 is taken
 * to be there, where it adds nothing that is seen beside 1. */
struct gradc_exp_partial { f32 top, base, first; sum_f32 total; };
struct gradc_exp_total { f32 top, base; sum_f32 total; }; /* where the base is GRADC_EXP_FAR, of exp(value - top) */
struct gradc_exp_term { f32 scale, r, q; };

#define GRADC_LARGEST_F32 f32_of_bits(0x7f7fffffu)
#define GRADC_EXP_FAR 0x1p15f
#define GRADC_EXP_SHIFT 12583039.0f /* 1.5 * 2^23 + 127: the last bits of k + this are those of 2^k */

#define GRADC_LN2 0x1.62e43p-1f

/* x = k ln2 + r; least: the value whose scale is 2^-118 */
GRADC_FN gradc_exp_term gradc_exp_of(f32 value, f32 least, f32 shift) {
  const f32 x = at_least_f32(value, least), place = mad_f32(x, 0x1.715476p+0f, shift), k = place - shift;
  const f32 r = mad_f32(k, -GRADC_LN2, x);
  gradc_exp_term term = {f32_of_bits(bits_of_f32(place) << 23), r, mad_f32(exp_polynomial_f32(r), r, 1.0f)};
  return term;
}
GRADC_FN f32 gradc_exp_base(f32 top) { return GRADC_LIBM(floorf)(0x1.715476p-3f * top); }
/* What a sum counts for beside another base that is not smaller: a power of two. */
GRADC_FN f32 gradc_exp_less(f32 before, f32 base) {
  return f32_of_bits(bits_of_f32(GRADC_LIBM(fmaxf)(8.0f * (before - base), -126.0f) + GRADC_EXP_SHIFT) << 23);
}
GRADC_FN f32 gradc_exp_least(f32 base) { return mad_f32(8.0f, base, -118.0f) * GRADC_LN2; }
GRADC_FN f32 gradc_exp_shift(f32 base) { return mad_f32(-8.0f, base, GRADC_EXP_SHIFT); }

GRADC_FN gradc_exp_partial gradc_exp_first(void) {
  gradc_exp_partial s = {-GRADC_INFINITY_F32, -GRADC_EXP_FAR, 0, {0, 0}};
  return s;
}

/* N: a power of two; values: of the columns that there are, else -inf.  Sums of every fourth, the largest of every fourth. */
template <int N> GRADC_FN void gradc_exp_add(gradc_exp_partial &s, f32 (&values)[N], int far) {
  enum { SUMS = N < 4 ? N : 4 };
  if (far) {
    const f32 origin = GRADC_LIBM(fminf)(GRADC_LIBM(fmaxf)(s.first, -GRADC_LARGEST_F32), GRADC_LARGEST_F32);
#pragma unroll
    for (int i = 0; i < N; i++) {
      const f32 x = values[i] - origin;
      values[i] = x > 16.0f ? 16.0f : x; /* infinity */
    }
  }
  f32 tops[SUMS], high[SUMS], low[SUMS];
#pragma unroll
  for (int i = 0; i < N; i++) tops[i % SUMS] = i < SUMS ? values[i] : GRADC_LIBM(fmaxf)(tops[i % SUMS], values[i]);
#pragma unroll
  for (int i = 0; i < SUMS; i++) s.top = GRADC_LIBM(fmaxf)(s.top, tops[i]); /* of NaN and a number the number */
  const f32 base = gradc_exp_base(GRADC_LIBM(fmaxf)(s.top, -GRADC_EXP_FAR));
  const f32 least = gradc_exp_least(base), shift = gradc_exp_shift(base);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const gradc_exp_term term = gradc_exp_of(values[i], least, shift);
    const f32 slope = term.scale * term.r;
    high[i % SUMS] = i < SUMS ? term.scale : high[i % SUMS] + term.scale;
    low[i % SUMS] = i < SUMS ? slope * term.q : mad_f32(slope, term.q, low[i % SUMS]);
  }
#pragma unroll
  for (int n = SUMS / 2; n > 0; n /= 2)
#pragma unroll
    for (int i = 0; i < n; i++) high[i] += high[i + n], low[i] += low[i + n];
  const f32 factor = gradc_exp_less(s.base, base);
  s.base = base, s.total.high *= factor, s.total.low *= factor;
  gradc_add(s.total, high[0] + low[0]);
}

/* Whether a thread goes through its values again. */
GRADC_FN bool gradc_exp_again(gradc_exp_partial &s, int far) {
  if (far || GRADC_LIBM(fabsf)(s.top) < GRADC_EXP_FAR) return false;
  const f32 first = s.top;
  s = gradc_exp_first();
  s.first = first;
  return true;
}

GRADC_FN gradc_exp_total gradc_exp_nothing(void) {
  gradc_exp_total s = {-GRADC_INFINITY_F32, GRADC_EXP_FAR, {0, 0}};
  return s;
}

/* exp(top) 2^(-8 base), rounded */
GRADC_FN f32 gradc_exp_largest(f32 top, f32 base) {
  const gradc_exp_term term = gradc_exp_of(top, gradc_exp_least(base), gradc_exp_shift(base));
  return mad_f32(term.scale * term.r, term.q, term.scale);
}

/* The sum of exp(value - top) */
GRADC_FN sum_f32 gradc_exp_beside(sum_f32 total, f32 top, f32 base) {
  const f32 largest = gradc_exp_largest(top, base);
  total.high /= largest, total.low /= largest;
  return total;
}

GRADC_FN gradc_exp_total gradc_exp_settled(const gradc_exp_partial &s) {
  gradc_exp_total near = {s.top, s.base, s.total};
  if (s.first == 0) return near;
  gradc_exp_total far = {s.first, GRADC_EXP_FAR, gradc_exp_beside(s.total, s.top, s.base)};
  return far;
}

/* The same sum beside a value that is not smaller: exact where both are less than GRADC_EXP_FAR in size. */
GRADC_FN void gradc_exp_raise(gradc_exp_total &s, f32 top) {
  const bool far = GRADC_LIBM(fabsf)(top) >= GRADC_EXP_FAR;
  const f32 base = far ? GRADC_EXP_FAR : gradc_exp_base(top);
  f32 factor;
  if (!far && s.base != GRADC_EXP_FAR) {
    factor = gradc_exp_less(s.base, base);
  } else {
    if (s.base != GRADC_EXP_FAR) s.total = gradc_exp_beside(s.total, s.top, s.base);
    factor = s.top == top ? 1.0f : exp_f32(s.top - top);
    if (!far) factor *= gradc_exp_largest(top, base);
  }
  s.top = top, s.base = base, s.total.high *= factor, s.total.low *= factor;
}

struct gradc_exp_larger {
  static __device__ __forceinline__ void join(f32 &a, f32 b) { a = GRADC_LIBM(fmaxf)(a, b); }
};

struct gradc_exp_join {
  static __device__ __forceinline__ void join(gradc_exp_total &a, gradc_exp_total b) {
    const f32 top = GRADC_LIBM(fmaxf)(a.top, b.top);
    gradc_exp_raise(a, top), gradc_exp_raise(b, top);
    gradc_add(a.total, b.total);
  }
};

/* gradc_reduce<gradc_exp_join, W>, with one exponential in each thread. */
template <int W> GRADC_FN gradc_exp_total gradc_exp_reduce(gradc_exp_total s, char *shared) {
  gradc_exp_raise(s, gradc_reduce<gradc_exp_larger, W>(s.top, shared));
  s.total = gradc_reduce<gradc_sum<sum_f32>, W>(s.total, shared);
  return s;
}

GRADC_FN f32 gradc_exp_top(const gradc_exp_total &s) {
  const f32 total = gradc_value(s.total);
  return total == total ? s.top : total;
}

/* finite_shift: of an infinite maximum 0 is subtracted instead, and not itself from itself. */
GRADC_FN f32 gradc_exp_sum(const gradc_exp_total &s, bool finite_shift) {
  const f32 top = gradc_exp_top(s), none = top - top;
  if (none != 0) return finite_shift ? exp_f32(top) : none;
  return gradc_value(s.base == GRADC_EXP_FAR ? s.total : gradc_exp_beside(s.total, s.top, s.base));
}
