/* The largest of many values and the sum of exp(value - largest), in one pass.  `total` is the sum of exp(value - base), where base is
 * the multiple of 8 that is not above `top`: most threads have the same, and where it changes, what was added before is at most
 * exp(-8) of what it was, so that the rounding of the factors stays below that of the sum.  An infinite value makes the total inf, NaN
 * alone makes it NaN. */
struct gradc_exp_total { f32 top, base; sum_f32 total; };

#define GRADC_LARGEST_F32 f32_of_bits(0x7f7fffffu)

GRADC_FN gradc_exp_total gradc_exp_nothing(void) {
  gradc_exp_total s = {-GRADC_INFINITY_F32, -GRADC_LARGEST_F32, {0, 0}};
  return s;
}

GRADC_FN f32 gradc_exp_base(f32 top) {
  const f32 base = 8.0f * GRADC_LIBM(floorf)(0.125f * top);
  return base < -GRADC_LARGEST_F32 ? -GRADC_LARGEST_F32 : base > GRADC_LARGEST_F32 ? GRADC_LARGEST_F32 : base;
}

/* The same sum beside the base of a larger value. */
GRADC_FN void gradc_exp_raise(gradc_exp_total &s, f32 top) {
  const f32 base = gradc_exp_base(top);
  if (base != s.base) {
    const f32 factor = exp_f32(s.base - base);
    s.total.high *= factor, s.total.low *= factor;
  }
  s.top = top, s.base = base;
}

/* N: a power of two */
template <int N> GRADC_FN void gradc_exp_add(gradc_exp_total &s, const f32 (&values)[N]) {
  f32 top = s.top;
#pragma unroll
  for (int i = 0; i < N; i++) top = values[i] > top ? values[i] : top;
  if (top > s.top) gradc_exp_raise(s, top);
  f32 sums[N]; /* of pairs, of pairs of these: nothing is negative */
#pragma unroll
  for (int i = 0; i < N; i++) sums[i] = exp_f32(values[i] - s.base);
#pragma unroll
  for (int n = N / 2; n > 0; n /= 2)
#pragma unroll
    for (int i = 0; i < n; i++) sums[i] += sums[i + n];
  gradc_add(s.total, sums[0]);
}

struct gradc_exp_join {
  static __device__ __forceinline__ void join(gradc_exp_total &a, gradc_exp_total b) {
    if (b.top > a.top) gradc_exp_raise(a, b.top);
    else if (a.top > b.top) gradc_exp_raise(b, a.top);
    gradc_add(a.total, b.total);
  }
};

GRADC_FN f32 gradc_exp_top(const gradc_exp_total &s) {
  const f32 total = gradc_value(s.total);
  return total == total ? s.top : total;
}

/* finite_shift: of an infinite maximum 0 is subtracted instead, and not itself from itself. */
GRADC_FN f32 gradc_exp_sum(const gradc_exp_total &s, bool finite_shift) {
  const f32 top = gradc_exp_top(s), none = top - top;
  if (none != 0) return finite_shift ? exp_f32(top) : none;
  return gradc_value(s.total) * exp_f32(s.base - top);
}
