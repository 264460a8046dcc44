/* Scalar arithmetic of every target: what the names in a generated C expression mean.

   Valid as C and as C++.  templates/TARGET/math.h includes this text below what differs from target to target: types,
   GRADC_FN, bit casts, mad, GRADC_LIBM (the libm function of that name), the constants of f32, and the choices
   GRADC_F64_IN_F32 (f32 functions may compute in f64) and GRADC_F16_NATIVE, GRADC_BF16_NATIVE (the target converts).
   With GRADC_GPU it brings reciprocals of its own.

   Names.  NAME_TYPE works on TYPE (exp_f32, floordiv_i32); TYPE_load, TYPE_store, TYPE_round convert storage
   formats that compute in f32 (bf16, f16, f8e4m3, f8e5m2); sat_TO_FROM is the saturating cast.

   Rules.  The f32 functions are branch-free (selects on values, integer work on bit patterns, no libm), so that a
   `#pragma omp simd` loop around them becomes vector code and a warp does not diverge; only floormod, floordiv and,
   without the instruction, fma call libm.  A float is converted to an integer only after a range test in float.
   Division by zero never traps.  NaN, infinities, signed zeros and gradual underflow are handled on purpose;
   -ffast-math, -ftz or contraction would break all of it.

   Errors, in units in the last place of the correctly rounded result, measured by tests/codegen/test_cpu_math.py over all
   f16 and bf16 values and random f32 bit patterns (all of f32, subnormals included):
       exp 0.8   log 0.9   log1p 1.5   expm1 1.7   tanh 1.5   sigmoid 1.5   erf 1.2   sin cos 1.6   pow rsqrt 0.51
   and of the larger of 1 and the result: normal_cdf 0.8, gelu_derivative 1.8, from -13.2 to -1 a relative error of 2^-24 (10 + x^2), too

   Targets.  With fma every function has the same bits on all of them, but for the f64 functions that are the target's
   libm and for two that compute in f64 here and in pairs of f32 there: pow_f32 (one unit, in fewer than 1 of 2000
   results that are no infinity, zero or NaN) and sigmoid_f32 (one unit, at two of all 2^32 arguments).

   Coefficients.  All polynomials were fitted for this file: Remez exchange in 50-digit arithmetic (mpmath) on the
   interval and in the error measure noted beside each; coefficients were rounded to the working type one by one,
   lowest order first, and the remaining ones fitted again after each rounding.

   The multiply-adds of the polynomials are fused where the machine has fma; the bounds hold with and without. */
#ifndef GRADC_MATH_H
#define GRADC_MATH_H

#define GRADC_MAX_F32 0x1.fffffep127f

GRADC_FN f32 copysign_f32(f32 magnitude, f32 sign) {
    return f32_of_bits((bits_of_f32(magnitude) & 0x7fffffffu) | (bits_of_f32(sign) & 0x80000000u));
}

/* x within a bound that is no NaN; NaN stays NaN. */
#ifndef GRADC_NAN_EXTREMES
GRADC_FN f32 at_least_f32(f32 x, f32 low) { return x < low ? low : x; }
GRADC_FN f32 at_most_f32(f32 x, f32 high) { return x > high ? high : x; }
#endif

/* Integers in the order of the floats, all NaN as the largest; -0.0 is 0.0. */
GRADC_FN i32 sort_key_f32(f32 x) {
    i32 bits = (i32)bits_of_f32(x);
    return x != x ? 0x7fffffff : x == 0 ? 0 : bits ^ (bits >> 31 & 0x7fffffff);
}
GRADC_FN i64 sort_key_f64(f64 x) {
    i64 bits = (i64)bits_of_f64(x);
    return x != x ? 0x7fffffffffffffff : x == 0 ? 0 : bits ^ (bits >> 63 & 0x7fffffffffffffff);
}

/* e with |x| = m 2^e and 1/2 <= m < 1; 0 for zeros, infinities and NaN.  Subnormals are scaled into the normal range. */
GRADC_FN f32 exponent_f32(f32 x) {
    f32 least = 0x1p-126f;
    f32 size = f32_of_bits(bits_of_f32(x) & 0x7fffffffu);
    i32 field = (i32)(bits_of_f32(size < least ? size * 0x1p24f : size) >> 23) - (size < least ? 24 : 0);
    return size - size != 0 || size == 0 ? 0.0f : (f32)(field - 126);
}
GRADC_FN f64 exponent_f64(f64 x) {
    f64 least = 0x1p-1022;
    f64 size = f64_of_bits(bits_of_f64(x) & 0x7fffffffffffffffull);
    i32 field = (i32)(bits_of_f64(size < least ? size * 0x1p53 : size) >> 52) - (size < least ? 53 : 0);
    return size - size != 0 || size == 0 ? 0.0 : (f64)(field - 1022);
}

/* ---- functions with one definition for f32 and f64 ---------------------------------------------------------- */

#define GRADC_FLOAT(F, S)                                                                                            \
    GRADC_FN i32 isnan_##F(F x) { return x != x; }                                                                   \
    GRADC_FN i32 isfinite_##F(F x) { return x - x == 0; } /* inf - inf is NaN */                                     \
    GRADC_FN F fma_##F(F a, F b, F c) { return GRADC_LIBM(fma##S)(a, b, c); }                                          \
    GRADC_FN F abs_##F(F x) { return GRADC_LIBM(fabs##S)(x); }                                                         \
    GRADC_FN F sign_##F(F x) { return x > 0 ? (F)1 : x < 0 ? (F)-1 : x == 0 ? (F)0 : x; }                            \
    GRADC_FN F sqrt_##F(F x) { return GRADC_LIBM(sqrt##S)(x); }                                                        \
    GRADC_FN F reciprocal_##F(F x) { return (F)1 / x; }                                                              \
    GRADC_FN F floor_##F(F x) { return GRADC_LIBM(floor##S)(x); }                                                      \
    GRADC_FN F ceil_##F(F x) { return GRADC_LIBM(ceil##S)(x); }                                                        \
    GRADC_FN F trunc_##F(F x) { return GRADC_LIBM(trunc##S)(x); }                                                      \
    /* half to even, the default rounding direction */                                                               \
    GRADC_FN F round_##F(F x) { return GRADC_LIBM(rint##S)(x); }                                                       \
    /* NaN if either is NaN: an unordered comparison is false and hands on the NaN operand */                        \
    GRADC_FN F minimum_##F(F a, F b) { F c = a < b ? a : b; return a != a ? a : c; }                                 \
    GRADC_FN F maximum_##F(F a, F b) { F c = a > b ? a : b; return a != a ? a : c; }                                 \
    GRADC_FN F relu_##F(F x) { return x < 0 ? (F)0 : x; }                                                            \
    /* a - b*floor(a/b) with the sign of b, exact through fmod; np.mod */                                            \
    GRADC_FN F floormod_##F(F a, F b) {                                                                              \
        F rest = GRADC_LIBM(fmod##S)(a, b);                                                                            \
        F shifted = (rest < 0) != (b < 0) ? rest + b : rest;                                                         \
        return rest == 0 ? GRADC_LIBM(copysign##S)((F)0, b) : shifted;                                                 \
    }                                                                                                                \
    /* floor(a/b) of the exact quotient, not of the rounded one; np.floor_divide */                                  \
    GRADC_FN F floordiv_##F(F a, F b) {                                                                              \
        F rest = GRADC_LIBM(fmod##S)(a, b);                                                                            \
        F exact = (a - rest) / b;                                                                                    \
        F shifted = rest != 0 && (rest < 0) != (b < 0) ? exact - 1 : exact;                                          \
        F below = GRADC_LIBM(floor##S)(shifted);                                                                       \
        F nearest = shifted - below > (F)0.5 ? below + 1 : below;                                                    \
        F signed_zero = GRADC_LIBM(copysign##S)((F)0, a / b);                                                          \
        return b == 0 ? a / b : shifted == 0 ? signed_zero : nearest;                                                \
    }

GRADC_FLOAT(f32, f)
GRADC_FLOAT(f64, )
#undef GRADC_FLOAT

/* ---- f32: exponentials -------------------------------------------------------------------------------------- */

/* 2^k for -126 <= k <= 127 */
GRADC_FN f32 power_of_two_f32(i32 k) { return f32_of_bits((u32)(k + 127) << 23); }

/* x = k*ln2 + r, |r| <= ln2/2.  Needs |x| < 2^21: adding 1.5 * 2^23 leaves the integer k in the low bits. */
#define GRADC_LN2_HIGH 0x1.62e4p-1f /* 15 bits: k * GRADC_LN2_HIGH is exact */
#define GRADC_LN2_LOW 0x1.7f7d1cp-20f
GRADC_FN i32 exp_quotient_f32(f32 x) {
    return (i32)(bits_of_f32(mad_f32(x, 0x1.715476p+0f, 0x1.8p23f)) - 0x4b400000u);
}
GRADC_FN f32 exp_quotient_as_f32(f32 x) { return mad_f32(x, 0x1.715476p+0f, 0x1.8p23f) - 0x1.8p23f; }
GRADC_FN f32 exp_remainder_f32(f32 x) {
    f32 k = exp_quotient_as_f32(x);
    return mad_f32(k, -GRADC_LN2_LOW, mad_f32(k, -GRADC_LN2_HIGH, x));
}

/* e^r - 1 on |r| <= 1.002 ln2/2: r + r^2 P(r), relative error 2^-26 of e^r - 1 and 2^-27.5 of e^r */
GRADC_FN f32 exp_polynomial_f32(f32 r) {
    f32 p = 0x1.6cee80p-10f;
    p = mad_f32(p, r, 0x1.122bb8p-7f);
    p = mad_f32(p, r, 0x1.555534p-5f);
    p = mad_f32(p, r, 0x1.5554aap-3f);
    return mad_f32(p, r, 0x1.000000p-1f);
}
GRADC_FN f32 expm1_near_zero_f32(f32 r) { return mad_f32(r * r, exp_polynomial_f32(r), r); }

/* What 1 + high rounds off and the low part of k ln2 are added up beside it; x and its quotient as above */
GRADC_FN f32 exp_mantissa_at_f32(f32 x, f32 kf) {
    f32 high = mad_f32(kf, -GRADC_LN2_HIGH, x);
    f32 r = mad_f32(kf, -GRADC_LN2_LOW, high);
    f32 sum = 1.0f + high;
    f32 lost = mad_f32(kf, -GRADC_LN2_LOW, high - (sum - 1.0f));
    return sum + mad_f32(r * r, exp_polynomial_f32(r), lost);
}
GRADC_FN f32 exp_mantissa_f32(f32 x) { return exp_mantissa_at_f32(x, exp_quotient_as_f32(x)); }

/* On a GPU the same bits in fewer scalar instructions: 2^k is added to the exponent's bits, and only where the result may
   be subnormal it is 2^(k + 32), multiplied by 2^-32, which rounds once.  Below -104.5 the result rounds to 0. */
GRADC_FN f32 exp_f32(f32 x) {
#ifdef GRADC_GPU
    f32 t = GRADC_LIBM(fmaxf)(x, -104.5f); /* of NaN -104.5: the last line is for it */
    i32 small = t < -86.0f;
    u32 scaled = bits_of_f32(exp_mantissa_f32(t)) + ((u32)exp_quotient_f32(t) << 23);
    f32 y = f32_of_bits(small ? scaled + (32u << 23) : scaled);
    y = small ? y * 0x1p-32f : y;
    return x <= 0x1.62e42ep+6f ? y : x * GRADC_INFINITY_F32; /* the largest x whose result is finite; NaN stays NaN */
#else
    f32 biased = mad_f32(x, 0x1.715476p+0f, 0x1.8p23f + 254.0f); /* k + 254 in the low bits; of what is out of range anything: */
    u32 bits = bits_of_f32(biased), half = bits >> 1; /* the result is chosen at the end, which takes fewer selects */
    f32 e = exp_mantissa_at_f32(x, biased - (0x1.8p23f + 254.0f));
    /* in two steps: 2^k may be out of range, and a subnormal result is rounded once */
    f32 y = e * f32_of_bits(half << 23) * f32_of_bits((bits - half) << 23);
    y = x > 89.0f ? GRADC_INFINITY_F32 : y; /* NaN passes both */
    return x < -104.0f ? 0.0f : y;
#endif
}

#ifndef GRADC_GPU
/* exp_f32 of what is not above 0, or NaN: the same bits, with one power of two that is computed and one select.  2^k may be too
   small, so it is 2^(k + 63) 2^-63; an even bias does not change how x / ln2 is rounded. */
GRADC_FN f32 exp_below_one_f32(f32 x) {
    f32 biased = mad_f32(x, 0x1.715476p+0f, 0x1.8p23f + 190.0f); /* k + 63 + 127 in the low bits */
    f32 e = exp_mantissa_at_f32(x, biased - (0x1.8p23f + 190.0f));
    f32 y = e * f32_of_bits(bits_of_f32(biased) << 23) * 0x1p-63f;
    return x < -104.0f ? 0.0f : y;
}
#endif

GRADC_FN f32 expm1_f32(f32 x) {
    f32 low = x < -18.0f ? -18.0f : x;
    f32 t = low > 89.0f ? 89.0f : low;
    i32 k = exp_quotient_f32(t);
    f32 p = expm1_near_zero_f32(exp_remainder_f32(t));
    f32 scale = power_of_two_f32(k - 1); /* half of 2^k: 2^128 is out of range */
    f32 y = 2.0f * mad_f32(scale, p, scale - 0.5f);
    return copysign_f32(k == 0 ? p : y, x); /* -0.0 */
}

#ifndef GRADC_GPU
GRADC_FN f32 reciprocal_in_range_f32(f32 x) { return 1.0f / x; }
#endif

/* Near 0: x + x^3 P(x^2).  Else 1 - 2 / (e^2|x| + 1), which only there loses no digits. */
GRADC_FN f32 tanh_f32(f32 x) {
    f32 a = GRADC_LIBM(fabsf)(x);
    f32 s = a * a;
    f32 p = -0x1.9921a2p-8f; /* |x| <= 0.55, relative error 2^-29.7 */
    p = mad_f32(p, s, 0x1.58e518p-6f);
    p = mad_f32(p, s, -0x1.b91e7ep-5f);
    p = mad_f32(p, s, 0x1.110ceep-3f);
    p = mad_f32(p, s, -0x1.55554ap-2f);
    f32 near_zero = mad_f32(s * a, p, a);

    f32 t = a > 10.0f ? 20.0f : a + a; /* 1 - tanh(10) < 2^-25 */
    f32 scale = power_of_two_f32(exp_quotient_f32(t));
    f32 e = mad_f32(scale, expm1_near_zero_f32(exp_remainder_f32(t)), scale);
    f32 far = 1.0f - 2.0f * reciprocal_in_range_f32(e + 1.0f);
    return copysign_f32(a < 0.55f ? near_zero : far, x);
}

/* 1 / (1 + e^-x), with the exponential of -|x| only: e^x / (1 + e^x) keeps its digits where e^-x overflows.
   The quotient with more than the digits of f32, whose three roundings would add up to 2.3 units. */
GRADC_FN f32 sigmoid_f32(f32 x) {
#ifdef GRADC_GPU
    f32 e = exp_f32(-GRADC_LIBM(fabsf)(x));
#else
    f32 e = exp_below_one_f32(-GRADC_LIBM(fabsf)(x));
#endif
#if GRADC_F64_IN_F32
    return (f32)((f64)(x >= 0.0f ? 1.0f : e) / (1.0 + (f64)e));
#else
    f32 numerator = x >= 0.0f ? 1.0f : e;
    f32 sum = 1.0f + e;
    f32 lost = e - (sum - 1.0f);
    f32 q = reciprocal_in_range_f32(sum); /* 1 / (1 + e) = q / (1 - rest) = q + q (rest + rest^2) */
    f32 rest = fma_f32(-q, lost, fma_f32(-q, sum, 1.0f));
    f32 q_low = q * fma_f32(rest, rest, rest);
    return fma_f32(numerator, q, numerator * q_low);
#endif
}

/* Near 0: x + x P(x^2).  Else 1 - e^g, g = log(erfc|x|) as a polynomial in |x|; erf(3.93) rounds to 1.  e^g = 2^k e^r >= 2^-26:
   adding 1.5 * 2^23 + 127 leaves k + 127 in the low bits. */
GRADC_FN f32 erf_f32(f32 x) {
    f32 a = GRADC_LIBM(fabsf)(x);
    f32 s = a * a;
    f32 p = 0x1.4fa924p-14f; /* |x| <= 0.95, relative error 2^-30 */
    p = mad_f32(p, s, -0x1.a61810p-11f);
    p = mad_f32(p, s, 0x1.544b08p-8f);
    p = mad_f32(p, s, -0x1.b80124p-6f);
    p = mad_f32(p, s, 0x1.ce2d64p-4f);
    p = mad_f32(p, s, -0x1.812740p-2f);
    p = mad_f32(p, s, 0x1.06eba8p-3f);
    f32 near_zero = mad_f32(a, p, a);

#ifdef GRADC_GPU
    f32 b = GRADC_LIBM(fminf)(a, 3.95f); /* one instruction; of NaN the last line takes the other branch */
#else
    f32 b = a > 3.95f ? 3.95f : a;
#endif
    f32 g = 0x1.93cb14p-13f; /* 0.949 <= |x| <= 3.95, relative error of erf 2^-29 */
    g = mad_f32(g, b, -0x1.8a7c7ap-9f);
    g = mad_f32(g, b, 0x1.69f5c6p-6f);
    g = mad_f32(g, b, -0x1.a88d0ap-4f);
    g = mad_f32(g, b, -0x1.466722p-1f);
    g = mad_f32(g, b, -0x1.20a2a8p+0f);
    g = mad_f32(g, b, -0x1.fd9398p-13f);
    f32 place = mad_f32(g, 0x1.715476p+0f, 12583039.0f);
    f32 k = place - 12583039.0f;
    f32 r = mad_f32(k, -GRADC_LN2_LOW, mad_f32(k, -GRADC_LN2_HIGH, g));
    f32 scale = f32_of_bits(bits_of_f32(place) << 23);
    f32 tail = mad_f32(-scale, expm1_near_zero_f32(r), 1.0f - scale);
    return copysign_f32(a >= 0.95f ? tail : near_zero, x);
}

/* Phi(x), the standard normal CDF: 2^g, g = log2 Phi(-|x|) as a polynomial in |x|, and above 0 what is missing to 1; Phi(-5.75) is
   below 2^-27.  2^g = 2^k 2^r, |r| <= 1/2, k as in erf_f32. */
GRADC_FN f32 normal_cdf_f32(f32 x) {
    f32 a = GRADC_LIBM(fabsf)(x);
    f32 g = 0x1.52bf6ep-22f; /* |x| <= 5.75: Phi to 2^-27.7, and of itself to 2^-10.7 */
    g = mad_f32(g, a, -0x1.cb226cp-18f);
    g = mad_f32(g, a, 0x1.f74870p-15f);
    g = mad_f32(g, a, -0x1.fad9dep-13f);
    g = mad_f32(g, a, -0x1.ba4330p-15f);
    g = mad_f32(g, a, 0x1.ca2c6ap-8f);
    g = mad_f32(g, a, -0x1.adc6c0p-5f);
    g = mad_f32(g, a, -0x1.d63c8ep-2f);
    g = mad_f32(g, a, -0x1.26aeccp+0f);
    g = mad_f32(g, a, -1.0f);
    f32 place = g + 12583039.0f;
    f32 r = g - (place - 12583039.0f);
    f32 p = 0x1.41d33ep-13f; /* relative error 2^-25.9 */
    p = mad_f32(p, r, 0x1.5f4574p-10f);
    p = mad_f32(p, r, 0x1.3b2dbcp-7f);
    p = mad_f32(p, r, 0x1.c6aed4p-5f);
    p = mad_f32(p, r, 0x1.ebfbdap-3f);
    p = mad_f32(p, r, 0x1.62e430p-1f);
    p = mad_f32(p, r, 1.0f);
    f32 near_zero = p * f32_of_bits(bits_of_f32(place) << 23);
    f32 tail = a >= 5.75f ? 0.0f : near_zero;
    return x < 0.0f ? tail : 1.0f - tail;
}

/* Phi(x) + x phi(x), the derivative of x Phi(x).  Below 0 it is e^(-x^2/2) (R(|x|) - |x|/sqrt(2 pi)) with Mills' ratio
   R(a) = Phi(-a) e^(a^2/2) / sqrt(2 pi) as t P(t), t = 1 / (1 + 0.3 a); above 0 what is missing to 1.  One exponential serves
   both terms: e^(-s/2) = 2^k e^(-r/2) with s = x^2 and r = s + 2 k ln2, |r| <= ln2; 2^-127 is 0, with which small results end. */
GRADC_FN f32 gelu_derivative_f32(f32 x) {
    f32 a = at_most_f32(GRADC_LIBM(fabsf)(x), 13.266f); /* k = -127 */
    f32 s = a * a;
    f32 place = mad_f32(s, -0x1.715476p-1f, 12583039.0f); /* as in erf_f32 */
    f32 r = mad_f32(place - 12583039.0f, 0x1.62e430p+0f, s);
    f32 p = 0x1.6a4154p-16f; /* e^(-r/2) on |r| <= 1.002 ln2, relative error 2^-28 */
    p = mad_f32(p, r, -0x1.1239c6p-12f);
    p = mad_f32(p, r, 0x1.5558bcp-9f);
    p = mad_f32(p, r, -0x1.555492p-6f);
    p = mad_f32(p, r, 0x1.fffffcp-4f);
    p = mad_f32(p, r, -0.5f);
    p = mad_f32(p, r, 1.0f);
    f32 e = p * f32_of_bits(bits_of_f32(place) << 23);

    f32 t = reciprocal_in_range_f32(mad_f32(a, 0.3f, 1.0f));
    f32 q = 0x1.2671bep-5f; /* R: error 2^-26.6 beside e^(-a^2/2), relative error 2^-21 */
    q = mad_f32(q, t, -0x1.43944ep-3f);
    q = mad_f32(q, t, 0x1.a835e2p-3f);
    q = mad_f32(q, t, -0x1.b90c8ep-5f);
    q = mad_f32(q, t, 0x1.06d892p-3f);
    q = mad_f32(q, t, 0x1.99e17ep-4f);
    q = mad_f32(q, t, 0x1.ee73d0p-4f);
    q = mad_f32(q, t, 0x1.ea03d0p-4f);
    f32 tail = e * mad_f32(q, t, a * -0x1.988454p-2f);
    return x < 0.0f ? tail : 1.0f - tail;
}

/* ---- f32: logarithms and powers ------------------------------------------------------------------------------- */

/* x = 2^k m with sqrt(1/2) <= m < sqrt(2), for normal x > 0 */
GRADC_FN i32 log_exponent_f32(f32 x) { return (i32)(bits_of_f32(x) - 0x3f3504f3u) >> 23; }
GRADC_FN f32 log_mantissa_f32(f32 x) {
    return f32_of_bits(((bits_of_f32(x) - 0x3f3504f3u) & 0x007fffffu) + 0x3f3504f3u);
}

/* k ln2 + log(1 + f), sqrt(1/2) <= 1 + f < sqrt(2): log(1 + f) = f - f^2/2 + f^3 Q(f), relative error 2^-27 */
GRADC_FN f32 log_sum_f32(i32 k, f32 f) {
    f32 q = -0x1.390f7ap-4f;
    q = mad_f32(q, f, 0x1.057778p-3f);
    q = mad_f32(q, f, -0x1.0d81aep-3f);
    q = mad_f32(q, f, 0x1.22d5dcp-3f);
    q = mad_f32(q, f, -0x1.547226p-3f);
    q = mad_f32(q, f, 0x1.99a036p-3f);
    q = mad_f32(q, f, -0x1.000228p-2f);
    q = mad_f32(q, f, 0x1.555554p-2f);
    f32 s = f * f;
    f32 kf = (f32)k;
    f32 curvature = mad_f32(s * f, q, -0.5f * s);
    f32 small = mad_f32(kf, GRADC_LN2_LOW, curvature);
    return mad_f32(kf, GRADC_LN2_HIGH, f + small);
}

GRADC_FN f32 log_f32(f32 x) {
    i32 subnormal = x < 0x1p-126f;
    f32 t = subnormal ? x * 0x1p23f : x;
    i32 k = log_exponent_f32(t) - (subnormal ? 23 : 0);
    f32 y = log_sum_f32(k, log_mantissa_f32(t) - 1.0f);
    f32 upper = x <= GRADC_MAX_F32 ? y : x; /* infinity, NaN */
    f32 lower = x == 0.0f ? -GRADC_INFINITY_F32 : GRADC_NAN_F32;
    return x <= 0.0f ? lower : upper;
}

/* log(u + c), u = 1 + x rounded and c what the rounding lost */
GRADC_FN f32 log1p_f32(f32 x) {
    f32 u = 1.0f + x;
    f32 lost_of_x = x - (u - 1.0f);
    f32 lost_of_1 = 1.0f - (u - x);
    f32 c = x < 1.0f ? lost_of_x : lost_of_1;
    i32 k = log_exponent_f32(u);
    f32 half_scale = f32_of_bits((u32)(128 - k) << 23); /* 2^(1-k), 0 at k = 128; 2^-k may be subnormal */
    f32 y = log_sum_f32(k, (log_mantissa_f32(u) - 1.0f) + c * half_scale * 0.5f);
    f32 upper = x <= GRADC_MAX_F32 ? y : x;
    f32 lower = x == -1.0f ? -GRADC_INFINITY_F32 : GRADC_NAN_F32;
    f32 z = x <= -1.0f ? lower : upper;
    return GRADC_LIBM(fabsf)(x) < 0x1p-25f ? x : z; /* -0.0 too */
}

/* |x|^y for pow_f32, a = |x|: 2^(y log2 a), rounded once.  log2 m = s P(s^2), s = (m-1)/(m+1). */
#if GRADC_F64_IN_F32
/* In f64.  P: relative error 2^-45, so the exponent is right to 2^-38; 2^r on |r| <= 1/2 relative error 2^-37. */
GRADC_FN f32 pow_magnitude_f32(f32 a, f32 y) {
    i32 subnormal = a < 0x1p-126f;
    f32 t = subnormal ? a * 0x1p23f : a;
    i32 e = log_exponent_f32(t) - (subnormal ? 23 : 0);
    f64 m = (f64)log_mantissa_f32(t);
    f64 s = (m - 1.0) / (m + 1.0);
    f64 w = s * s;
    f64 p = 0x1.21b1244dc59cfp-2;
    p = mad_f64(p, w, 0x1.4795525ef5a1fp-2);
    p = mad_f64(p, w, 0x1.a61a2ee0436bcp-2);
    p = mad_f64(p, w, 0x1.2776c293242b4p-1);
    p = mad_f64(p, w, 0x1.ec709dc53c7c3p-1);
    p = mad_f64(p, w, 0x1.71547652b8251p+1);
    f64 log2_finite = mad_f64(p, s, (f64)e);
    f64 log2_upper = a <= GRADC_MAX_F32 ? log2_finite : (f64)a;
    f64 log2_a = a == 0.0f ? -(f64)GRADC_INFINITY_F32 : log2_upper;

    f64 z = (f64)y * log2_a;
    f64 low = z < -160.0 ? -160.0 : z;
    f64 h = low > 140.0 ? 140.0 : low;
    f64 shifted = h + 0x1.8p52;
    f64 r = h - (shifted - 0x1.8p52);
    f64 q = 0x1.60d2f3286e164p-20;
    q = mad_f64(q, r, 0x1.00c564738d7adp-16);
    q = mad_f64(q, r, 0x1.430aeea3fada5p-13);
    q = mad_f64(q, r, 0x1.5d87621e459a4p-10);
    q = mad_f64(q, r, 0x1.3b2ab6073018cp-7);
    q = mad_f64(q, r, 0x1.c6b08dc6136bap-5);
    q = mad_f64(q, r, 0x1.ebfbdff89556fp-3);
    q = mad_f64(q, r, 0x1.62e42fef84bbfp-1);
    f64 scale = f64_of_bits((bits_of_f64(shifted) + 1023u) << 52);
    return (f32)(mad_f64(q, r, 1.0) * scale);
}
#else
/* In pairs of f32, high + low with |low| <= half a unit of high: the leading terms of both polynomials (those above, cut
   to pairs) to 2^-44, what follows them in one f32. */
typedef struct { f32 high, low; } f32_pair;
GRADC_FN f32_pair pair_f32(f32 high, f32 low) { /* high + low, |high| >= |low| or high = 0 */
    f32_pair p;
    p.high = high + low;
    p.low = low - (p.high - high);
    return p;
}
GRADC_FN f32_pair pair_times_f32(f32_pair a, f32_pair b) {
    f32 high = a.high * b.high;
    f32 lost = fma_f32(a.high, b.high, -high);
    return pair_f32(high, lost + fma_f32(a.high, b.low, a.low * b.high));
}
GRADC_FN f32_pair pair_sum_f32(f32 high, f32 low, f32_pair b) { /* high + low + b, |high| >= |b.high| or high = 0 */
    f32_pair sum = pair_f32(high, b.high);
    return pair_f32(sum.high, sum.low + (low + b.low));
}

GRADC_FN f32 pow_magnitude_f32(f32 a, f32 y) {
    i32 subnormal = a < 0x1p-126f;
    f32 t = subnormal ? a * 0x1p23f : a;
    i32 e = log_exponent_f32(t) - (subnormal ? 23 : 0);
    f32 m = log_mantissa_f32(t);
    f32 over = m - 1.0f, under = m + 1.0f; /* the first is exact */
    f32 inverse = 1.0f / under;
    f32 quotient = over * inverse;
    f32 rest = fma_f32(-quotient, m - (under - 1.0f), fma_f32(-quotient, under, over));
    f32_pair s = pair_f32(quotient, rest * inverse);
    f32_pair w = pair_times_f32(s, s);
    f32 p = 0x1.21b124p-2f;
    p = fma_f32(p, w.high, 0x1.479552p-2f);
    p = fma_f32(p, w.high, 0x1.a61a2ep-2f);
    f32_pair sum = pair_f32(0x1.2776c2p-1f, fma_f32(p, w.high, 0x1.264856p-26f));
    sum = pair_sum_f32(0x1.ec709ep-1f, -0x1.d61c1ep-28f, pair_times_f32(sum, w));
    sum = pair_sum_f32(0x1.715476p+1f, 0x1.4ae094p-25f, pair_times_f32(sum, w));
    f32_pair log2_finite = pair_sum_f32((f32)e, 0.0f, pair_times_f32(sum, s));
    f32 log2_upper = a <= GRADC_MAX_F32 ? log2_finite.high : a;
    f32 log2_a = a == 0.0f ? -GRADC_INFINITY_F32 : log2_upper;

    f32 z = y * log2_a;
    f32 low = z < -160.0f ? -160.0f : z;
    f32 h = low > 140.0f ? 140.0f : low;
    f32 lost = fma_f32(y, log2_a, -z) + y * log2_finite.low;
    f32 shifted = h + 0x1.8p23f;
    i32 k = (i32)(bits_of_f32(shifted) - 0x4b400000u);
    f32_pair r = pair_f32(h - (shifted - 0x1.8p23f), h == z ? lost : 0.0f);
    f32 q = 0x1.60d2f4p-20f;
    q = fma_f32(q, r.high, 0x1.00c564p-16f);
    q = fma_f32(q, r.high, 0x1.430aeep-13f);
    q = fma_f32(q, r.high, 0x1.5d8762p-10f);
    q = fma_f32(q, r.high, 0x1.3b2ab6p-7f);
    sum = pair_f32(0x1.c6b08ep-5f, fma_f32(q, r.high, -0x1.cf64a4p-32f));
    sum = pair_sum_f32(0x1.ebfbe0p-3f, -0x1.daaa44p-33f, pair_times_f32(sum, r));
    sum = pair_sum_f32(0x1.62e430p-1f, -0x1.07b440p-29f, pair_times_f32(sum, r));
    f32_pair power = pair_sum_f32(1.0f, 0.0f, pair_times_f32(sum, r));

    /* A subnormal result is rounded here, before the scale: the sum with `unit` keeps just the bits that it has. */
    i32 gradual = (k < -126) | ((k == -126) & (power.high < 1.0f));
    f32 unit = power_of_two_f32(gradual ? -126 - k : 0);
    f32_pair cut = pair_f32(unit, power.high);
    f32 coarse = (cut.high + (cut.low + power.low)) - unit;
    i32 half = k >> 1;
    return (gradual ? coarse : power.high) * power_of_two_f32(half) * power_of_two_f32(k - half);
}
#endif

/* x^y of C */
GRADC_FN f32 pow_f32(f32 x, f32 y) {
    f32 magnitude = pow_magnitude_f32(GRADC_LIBM(fabsf)(x), y);
    f32 half_y = 0.5f * y;
    i32 whole = GRADC_LIBM(floorf)(y) == y;
    i32 odd = whole & (GRADC_LIBM(floorf)(half_y) != half_y);
    f32 with_sign = odd ? copysign_f32(magnitude, x) : magnitude;
    i32 undefined = (x < 0.0f) & (x >= -GRADC_MAX_F32) & (whole == 0);
    i32 one = (x == 1.0f) | (y == 0.0f) | ((x == -1.0f) & (GRADC_LIBM(fabsf)(y) > GRADC_MAX_F32));
    f32 value = undefined ? GRADC_NAN_F32 : with_sign;
    f32 nan_or_value = y != y ? y : value;
    return one ? 1.0f : nan_or_value;
}

/* With more than the digits of f32, where 1/sqrt would be off by up to 1.5 units. */
#if GRADC_F64_IN_F32
GRADC_FN f32 rsqrt_f32(f32 x) { return (f32)(1.0 / GRADC_LIBM(sqrt)((f64)x)); }
#else
GRADC_FN f32 rsqrt_f32(f32 x) {
    i32 small = x < 0x1p-40f; /* the remainders below stay out of the subnormal numbers */
    f32 t = small ? x * 0x1p80f : x;
    f32 root = GRADC_LIBM(sqrtf)(t);
    f32 y = 1.0f / root;
    f32 rest = fma_f32(-y, root, 1.0f);        /* 1/root = y (1 + rest + ...) */
    f32 below = fma_f32(-root, root, t);       /* t = root^2 + below */
    f32 half = 0.5f * y * (below * y);         /* 1/sqrt(t) = 1/root (1 - half + 3/2 half^2 ...) */
    f32 square = fma_f32(rest, rest - half, 1.5f * half * half);
    f32 value = fma_f32(y, (rest - half) + square, y);
    f32 scaled = small ? value * 0x1p40f : value;
    return t > 0.0f && t <= GRADC_MAX_F32 ? scaled : y;
}
#endif

/* ---- f32: sine and cosine ----------------------------------------------------------------------------------- */

/* |x| * 2/pi mod 4 in units of 2^-62, for every finite |x| >= 1/2 (Payne and Hanek's reduction).
   |x| = mantissa * 2^(exponent - 23); the product needs the bits of 2/pi from position exponent - 25 on, 96 of them:
   those above are multiples of 4, those below are worth less than one unit. */
GRADC_FN u64 quadrants_f32(f32 x) {
    u32 b = bits_of_f32(x) & 0x7fffffffu;
    b = b < 0x3f000000u ? 0x3f000000u : b;
    u32 mantissa = (b & 0x007fffffu) | 0x00800000u;
    u32 position = (b >> 23) - 120u; /* exponent + 7, counted from 32 zero bits before 2/pi */
    u32 shift = position & 31u;
    /* words position/32 ... position/32 + 3 of 0, 2/pi, by selects: no table, no gather */
    i32 by4 = (position & 128u) != 0, by2 = (position & 64u) != 0, by1 = (position & 32u) != 0;
    u32 a0 = by4 ? 0xf534ddc0u : 0u;
    u32 a1 = by4 ? 0xdb629599u : 0xa2f9836eu;
    u32 a2 = by4 ? 0x3c439041u : 0x4e441529u;
    u32 a3 = by4 ? 0xfe5163abu : 0xfc2757d1u;
    u32 c0 = by2 ? a2 : a0;
    u32 c1 = by2 ? a3 : a1;
    u32 c2 = by2 ? 0xf534ddc0u : a2;
    u32 c3 = by2 ? 0xdb629599u : a3;
    u32 c4 = by2 ? 0x3c439041u : 0xf534ddc0u;
    u32 w0 = by1 ? c1 : c0;
    u32 w1 = by1 ? c2 : c1;
    u32 w2 = by1 ? c3 : c2;
    u32 w3 = by1 ? c4 : c3;
    u32 high = (w0 << shift) | ((w1 >> 1) >> (31u - shift));
    u32 middle = (w1 << shift) | ((w2 >> 1) >> (31u - shift));
    u32 low = (w2 << shift) | ((w3 >> 1) >> (31u - shift));
    u64 product_high = (u64)(mantissa * high) << 32;
    u64 product_middle = (u64)mantissa * middle;
    u64 product_low = ((u64)mantissa * low) >> 32;
    return product_high + product_middle + product_low;
}

/* sin(|x| + quarters * pi/2) */
GRADC_FN f32 sin_shifted_f32(f32 x, u32 quarters) {
    f32 a = GRADC_LIBM(fabsf)(x);
    i32 small = a < 0.5f;
    u64 turned = quadrants_f32(a);
    u64 rounded = turned + (1ull << 61);
    u64 rest = turned - ((rounded >> 62) << 62); /* signed, |rest| <= 2^61 */
#if GRADC_F64_IN_F32
    f64 rest_high = (f64)(i32)(u32)(rest >> 32);
    f64 rest_low = (f64)(i32)((u32)rest >> 1);
    f64 angle = mad_f64(rest_high, 0x1.921fb54442d18p-30, rest_low * 0x1.921fb54442d18p-61);
    f32 r = small ? a : (f32)angle;
#else
    i32 negative = (i64)rest < 0;
    u64 magnitude = negative ? 0u - rest : rest;
    i32 zeros = leading_zeros_u64(magnitude | 1u);
    u64 product = high_product_u64(magnitude << zeros, 0xc90fdaa22168c234ull); /* pi/4 in units of 2^-64 */
    f32 angle = (f32)(product | 1u) * power_of_two_f32(-61 - zeros); /* the product goes on below its last bit */
    f32 r = small ? a : negative ? -angle : angle;
#endif
    u32 quadrant = (small ? 0u : (u32)(rounded >> 62)) + quarters;

    f32 s = r * r;
    f32 p = -0x1.9953fep-13f; /* sin r = r + r^3 P(r^2) on |r| <= pi/4, relative error 2^-27.9 */
    p = mad_f32(p, s, 0x1.110778p-7f);
    p = mad_f32(p, s, -0x1.555546p-3f);
    f32 sine = mad_f32(s * r, p, r);
    f32 q = 0x1.99e80cp-16f; /* cos r = 1 - r^2/2 + r^4 Q(r^2), relative error 2^-33 */
    q = mad_f32(q, s, -0x1.6c0c28p-10f);
    q = mad_f32(q, s, 0x1.55554ap-5f);
    f32 cosine = mad_f32(s * s, q, mad_f32(s, -0.5f, 1.0f));
    f32 y = (quadrant & 1u) != 0 ? cosine : sine;
    f32 signed_y = f32_of_bits(bits_of_f32(y) ^ ((quadrant & 2u) << 30));
    return a <= GRADC_MAX_F32 ? signed_y : GRADC_NAN_F32;
}

GRADC_FN f32 sin_f32(f32 x) {
    return f32_of_bits(bits_of_f32(sin_shifted_f32(x, 0u)) ^ (bits_of_f32(x) & 0x80000000u));
}
GRADC_FN f32 cos_f32(f32 x) { return sin_shifted_f32(x, 1u); }

/* ---- f64: libm ---------------------------------------------------------------------------------------------- */

GRADC_FN f64 exp_f64(f64 x) { return GRADC_LIBM(exp)(x); }
GRADC_FN f64 log_f64(f64 x) { return GRADC_LIBM(log)(x); }
GRADC_FN f64 log1p_f64(f64 x) { return GRADC_LIBM(log1p)(x); }
GRADC_FN f64 expm1_f64(f64 x) { return GRADC_LIBM(expm1)(x); }
GRADC_FN f64 tanh_f64(f64 x) { return GRADC_LIBM(tanh)(x); }
GRADC_FN f64 erf_f64(f64 x) { return GRADC_LIBM(erf)(x); }
GRADC_FN f64 sin_f64(f64 x) { return GRADC_LIBM(sin)(x); }
GRADC_FN f64 cos_f64(f64 x) { return GRADC_LIBM(cos)(x); }
GRADC_FN f64 pow_f64(f64 x, f64 y) { return GRADC_LIBM(pow)(x, y); }
GRADC_FN f64 rsqrt_f64(f64 x) { return 1.0 / GRADC_LIBM(sqrt)(x); }
GRADC_FN f64 sigmoid_f64(f64 x) {
    f64 e = GRADC_LIBM(exp)(-GRADC_LIBM(fabs)(x));
    return (x >= 0.0 ? 1.0 : e) / (1.0 + e);
}

#include "special.h"

/* ---- storage formats: bf16, f16, f8e4m3, f8e5m2, f4e2m1, e8m0 ----------------------------------------------- */

/* f64 on its way to a shorter format, as an f32 from which the second rounding is that of x itself: what f32 does not
   hold becomes the neighbour whose last bit is 1 (round to odd). */
GRADC_FN f32 odd_f64(f64 x) {
    f32 y = (f32)x;
    f64 back = (f64)y;
    u32 inward = bits_of_f32(y) - (u32)(GRADC_LIBM(fabs)(back) > GRADC_LIBM(fabs)(x));
    return back == x || x != x ? y : f32_of_bits(inward | 1u);
}

GRADC_FN f32 bf16_load(u16 h) { return f32_of_bits((u32)h << 16); }
#if !GRADC_BF16_NATIVE
GRADC_FN u32 bf16_rounded_bits(f32 x) { /* the rounded value as f32 bits, low half garbage */
    u32 b = bits_of_f32(x);
    u32 nan = (b & 0x80000000u) | 0x7fc00000u;
    return x == x ? b + 0x7fffu + ((b >> 16) & 1u) : nan;
}
GRADC_FN u16 bf16_store(f32 x) { return (u16)(bf16_rounded_bits(x) >> 16); }
GRADC_FN f32 bf16_round(f32 x) { return f32_of_bits(bf16_rounded_bits(x) & 0xffff0000u); }
#endif

/* |x| to a format with MANTISSA stored bits and exponent bias BIAS, half to even, no limit at the top.
   Normal numbers: add half a unit to the bits and cut.  Subnormal ones: MAGIC is the f32 whose unit in the last
   place is the format's smallest subnormal, so that adding it rounds, and leaves the answer in its low bits. */
#define GRADC_ENCODE(b, MANTISSA, BIAS, MAGIC)                                                                        \
    ((b) < (u32)(128 - (BIAS)) << 23                                                                                  \
         ? bits_of_f32(f32_of_bits(b) + (MAGIC)) - bits_of_f32(MAGIC)                                                 \
         : (((b) + ((1u << (22 - (MANTISSA))) - 1u) + (((b) >> (23 - (MANTISSA))) & 1u)) >> (23 - (MANTISSA)))        \
               - ((u32)(127 - (BIAS)) << (MANTISSA)))

/* The exponent and mantissa bits of such a format, moved into place: f32 with an exponent off by 127 - BIAS. */
#define GRADC_DECODE(h, MANTISSA, REBIAS) (f32_of_bits((h) << (23 - (MANTISSA))) * (REBIAS))

#if !GRADC_F16_NATIVE
GRADC_FN f32 f16_decode(u32 h) {
    u32 a = h & 0x7fffu;
    f32 finite = GRADC_DECODE(a, 10, 0x1p112f);
    u32 special = a > 0x7c00u ? 0x7fc00000u : a == 0x7c00u ? 0x7f800000u : 0u; /* NaN keeps its mantissa and becomes quiet */
    return f32_of_bits(bits_of_f32(finite) | special | (h & 0x8000u) << 16);
}
GRADC_FN u32 f16_encode(f32 x) {
    u32 b = bits_of_f32(x);
    u32 a = b & 0x7fffffffu;
    u32 finite = GRADC_ENCODE(a, 10, 15, 0x1p-1f);
    u32 bounded = a >= 0x477ff000u ? 0x7c00u : finite; /* 65520 rounds to infinity */
    u32 nan = 0x7e00u | ((a >> 13) & 0x3ffu);
    return (x == x ? bounded : nan) | ((b >> 16) & 0x8000u);
}
GRADC_FN f32 f16_load(u16 h) { return f16_decode(h); }
GRADC_FN u16 f16_store(f32 x) { return (u16)f16_encode(x); }
GRADC_FN f32 f16_round(f32 x) { return f16_decode(f16_encode(x)); }
#endif

/* E4M3FN: no infinity, largest 448, NaN is 0x7f.  Finite values saturate; infinity becomes NaN. */
#ifndef GRADC_F8E4M3_NATIVE
GRADC_FN f32 f8e4m3_decode(u32 h) {
    f32 finite = GRADC_DECODE(h & 0x7fu, 3, 0x1p120f);
    u32 nan = (h & 0x7fu) == 0x7fu ? 0x7fc00000u : 0u;
    return f32_of_bits(bits_of_f32(finite) | nan | (h & 0x80u) << 24);
}
#endif
GRADC_FN u32 f8e4m3_encode(f32 x) {
    u32 b = bits_of_f32(x);
    u32 a = b & 0x7fffffffu;
    u32 bounded = a > 0x43e00000u ? 0x43e00000u : a; /* 448 */
    u32 finite = GRADC_ENCODE(bounded, 3, 7, 0x1p14f);
    return (a >= 0x7f800000u ? 0x7fu : finite) | ((b >> 24) & 0x80u);
}
GRADC_FN f32 f8e4m3_load(u8 h) { return f8e4m3_decode(h); }
GRADC_FN u8 f8e4m3_store(f32 x) { return (u8)f8e4m3_encode(x); }
GRADC_FN f32 f8e4m3_round(f32 x) { return f8e4m3_decode(f8e4m3_encode(x)); }

/* E5M2: the upper half of f16.  Finite values saturate at 57344; infinity stays. */
#ifndef GRADC_F8E5M2_NATIVE
GRADC_FN f32 f8e5m2_decode(u32 h) {
    f32 finite = GRADC_DECODE(h & 0x7fu, 2, 0x1p112f);
    u32 special = (h & 0x7cu) == 0x7cu ? 0x7f800000u : 0u;
    return f32_of_bits(bits_of_f32(finite) | special | (h & 0x80u) << 24);
}
#endif
GRADC_FN u32 f8e5m2_encode(f32 x) {
    u32 b = bits_of_f32(x);
    u32 a = b & 0x7fffffffu;
    u32 bounded = a > 0x47600000u ? 0x47600000u : a; /* 57344 */
    u32 finite = GRADC_ENCODE(bounded, 2, 15, 0x1p7f);
    u32 special = a == 0x7f800000u ? 0x7cu : 0x7eu;
    return (a >= 0x7f800000u ? special : finite) | ((b >> 24) & 0x80u);
}
GRADC_FN f32 f8e5m2_load(u8 h) { return f8e5m2_decode(h); }
GRADC_FN u8 f8e5m2_store(f32 x) { return (u8)f8e5m2_encode(x); }
GRADC_FN f32 f8e5m2_round(f32 x) { return f8e5m2_decode(f8e5m2_encode(x)); }

/* E2M1, one to a byte: no infinity, no NaN.  Everything above 6 is 6, infinity too; NaN is -0, as in ml_dtypes. */
GRADC_FN f32 f4e2m1_decode(u32 h) {
    u32 code = h & 0x7u; /* no product, whose operand would be subnormal half of the time, and no branch: either is slow */
    u32 small = 0u - ((code - 2u) >> 31);
    u32 finite = (((code << 22) + 0x3f000000u) & ~small) | ((0u - code) & 0x3f000000u & small);
    return f32_of_bits(finite | (h & 0x8u) << 28);
}
GRADC_FN u32 f4e2m1_encode(f32 x) {
    u32 b = bits_of_f32(x);
    u32 a = b & 0x7fffffffu;
    u32 bounded = a > 0x40c00000u ? 0x40c00000u : a; /* 6 */
    u32 finite = GRADC_ENCODE(bounded, 1, 1, 0x1p22f) | ((b >> 28) & 0x8u);
    return a > 0x7f800000u ? 0x8u : finite;
}
GRADC_FN f32 f4e2m1_load(u8 h) { return f4e2m1_decode(h); }
GRADC_FN u8 f4e2m1_store(f32 x) { return (u8)f4e2m1_encode(x); }
GRADC_FN f32 f4e2m1_round(f32 x) { return f4e2m1_decode(f4e2m1_encode(x)); }

/* E8M0: 2^(h - 127), NaN is 0xff.  Half-way goes up.  What is not above 0 or rounds to 2^128 becomes NaN, what lies
   between 0 and 2^-127 becomes 2^-127. */
GRADC_FN f32 e8m0_decode(u32 h) {
    u32 finite = h == 0u ? 0x00400000u : h << 23;
    return f32_of_bits(h == 0xffu ? 0x7fc00000u : finite);
}
GRADC_FN u32 e8m0_encode(f32 x) {
    u32 b = bits_of_f32(x);
    u32 finite = b < 0x00800000u ? (u32)(b >= 0x00600000u) : (b + 0x00400000u) >> 23;
    return b - 1u < 0x7f7fffffu ? finite : 0xffu; /* +0, the negative ones, infinity and NaN lie outside */
}
GRADC_FN f32 e8m0_load(u8 h) { return e8m0_decode(h); }
GRADC_FN u8 e8m0_store(f32 x) { return (u8)e8m0_encode(x); }
GRADC_FN f32 e8m0_round(f32 x) { return e8m0_decode(e8m0_encode(x)); }

#undef GRADC_ENCODE
#undef GRADC_DECODE

/* ---- saturating casts, towards zero, NaN -> 0 --------------------------------------------------------------- */

/* LOW and TOP are the least and the greatest F that convert; both are exact bounds of the integer type here. */
#define GRADC_SATURATE(NAME, T, VIA, F, LOW, TOP)                                                                     \
    GRADC_FN T sat_##NAME##_##F(F x) {                                                                                \
        F number = x == x ? x : (F)0;                                                                                 \
        F above = number < (F)(LOW) ? (F)(LOW) : number;                                                              \
        F inside = above > (F)(TOP) ? (F)(TOP) : above;                                                               \
        return (T)(VIA)inside;                                                                                        \
    }
/* The integer type's greatest value is no F: TOP is the F below it, and BEYOND = TOP + 1 unit stands for it. */
#define GRADC_SATURATE_WIDE(T, F, LOW, TOP, BEYOND, GREATEST)                                                         \
    GRADC_FN T sat_##T##_##F(F x) {                                                                                   \
        F number = x == x ? x : (F)0;                                                                                 \
        F above = number < (F)(LOW) ? (F)(LOW) : number;                                                              \
        F inside = above > (F)(TOP) ? (F)(TOP) : above;                                                               \
        T value = (T)inside;                                                                                          \
        return x >= (F)(BEYOND) ? (T)(GREATEST) : value;                                                              \
    }
#define GRADC_SATURATE_NARROW(F)                                                                                      \
    GRADC_SATURATE(i2, i8, i32, F, -2, 1)                                                                             \
    GRADC_SATURATE(u2, u8, i32, F, 0, 3)                                                                              \
    GRADC_SATURATE(i4, i8, i32, F, -8, 7)                                                                             \
    GRADC_SATURATE(u4, u8, i32, F, 0, 15)                                                                             \
    GRADC_SATURATE(i8, i8, i32, F, -128, 127)                                                                         \
    GRADC_SATURATE(u8, u8, i32, F, 0, 255)                                                                            \
    GRADC_SATURATE(i16, i16, i32, F, -32768, 32767)                                                                   \
    GRADC_SATURATE(u16, u16, i32, F, 0, 65535)

GRADC_SATURATE_NARROW(f32)
GRADC_SATURATE_NARROW(f64)
GRADC_SATURATE(i32, i32, i32, f64, -0x1p31, 0x1.fffffffcp30)
GRADC_SATURATE(u32, u32, u32, f64, 0, 0x1.fffffffep31)
GRADC_SATURATE_WIDE(i32, f32, -0x1p31, 0x1.fffffep30, 0x1p31, 0x7fffffff)
GRADC_SATURATE_WIDE(u32, f32, 0, 0x1.fffffep31, 0x1p32, 0xffffffffu)
GRADC_SATURATE_WIDE(i64, f32, -0x1p63, 0x1.fffffep62, 0x1p63, 0x7fffffffffffffffll)
GRADC_SATURATE_WIDE(u64, f32, 0, 0x1.fffffep63, 0x1p64, 0xffffffffffffffffull)
GRADC_SATURATE_WIDE(i64, f64, -0x1p63, 0x1.fffffffffffffp62, 0x1p63, 0x7fffffffffffffffll)
GRADC_SATURATE_WIDE(u64, f64, 0, 0x1.fffffffffffffp63, 0x1p64, 0xffffffffffffffffull)
#undef GRADC_SATURATE
#undef GRADC_SATURATE_WIDE
#undef GRADC_SATURATE_NARROW

/* ---- integers: everything wraps, x/0 and x mod 0 are 0 ------------------------------------------------------ */

/* floor(a/b) through F, in which the quotient of two T never rounds across an integer (F has at least as many bits
   as T): vector machines divide floats, not integers. */
#define GRADC_FLOORDIV_SIGNED(T, U, F, S)                                                                             \
    GRADC_FN T floordiv_##T(T a, T b) {                                                                               \
        i32 direct = (b == 0) | (b == -1); /* -1: the least T has no negative in T */                                 \
        F quotient = GRADC_LIBM(floor##S)((F)a / (F)(direct ? (T)1 : b));                                               \
        T whole = (T)(i32)quotient;                                                                                   \
        T negated = b == 0 ? (T)0 : (T)((U)0 - (U)a);                                                                 \
        return direct ? negated : whole;                                                                              \
    }
#define GRADC_FLOORDIV_UNSIGNED(T, VIA, F)                                                                            \
    GRADC_FN T floordiv_##T(T a, T b) {                                                                               \
        T whole = (T)(VIA)((F)a / (F)(b == 0 ? (T)1 : b));                                                            \
        return b == 0 ? (T)0 : whole;                                                                                 \
    }

GRADC_FLOORDIV_SIGNED(i8, u8, f32, f)
GRADC_FLOORDIV_SIGNED(i16, u16, f32, f)
#if GRADC_F64_IN_F32
GRADC_FLOORDIV_SIGNED(i32, u32, f64, )
#endif
GRADC_FLOORDIV_UNSIGNED(u8, i32, f32)
GRADC_FLOORDIV_UNSIGNED(u16, i32, f32)
#if GRADC_F64_IN_F32
GRADC_FLOORDIV_UNSIGNED(u32, u32, f64)
#endif
#undef GRADC_FLOORDIV_SIGNED
#undef GRADC_FLOORDIV_UNSIGNED

/* By the machine's own division. */
#define GRADC_FLOORDIV_EXACT(T, U)                                                                                    \
    GRADC_FN T floordiv_##T(T a, T b) {                                                                               \
        i32 direct = (b == 0) | (b == -1);                                                                            \
        T divisor = direct ? 1 : b;                                                                                   \
        T quotient = a / divisor;                                                                                     \
        T rest = a - quotient * divisor;                                                                              \
        T whole = quotient - ((rest != 0) & ((rest ^ divisor) < 0));                                                  \
        T negated = b == 0 ? 0 : (T)(0u - (U)a);                                                                      \
        return direct ? negated : whole;                                                                              \
    }                                                                                                                 \
    GRADC_FN U floordiv_##U(U a, U b) {                                                                               \
        U whole = a / (b == 0 ? 1u : b);                                                                              \
        return b == 0 ? 0u : whole;                                                                                   \
    }

#if !GRADC_F64_IN_F32
GRADC_FLOORDIV_EXACT(i32, u32)
#endif
GRADC_FLOORDIV_EXACT(i64, u64)
#undef GRADC_FLOORDIV_EXACT

/* PRODUCT: the unsigned type in which T multiplies without C's promotion to a signed int. */
#define GRADC_INTEGER(T, PRODUCT)                                                                                     \
    GRADC_FN T minimum_##T(T a, T b) { return a < b ? a : b; }                                                        \
    GRADC_FN T maximum_##T(T a, T b) { return a > b ? a : b; }                                                        \
    GRADC_FN T sign_##T(T a) { return (T)((a > 0) - (a < (T)0)); }                                                    \
    GRADC_FN T relu_##T(T a) { return a > 0 ? a : (T)0; }                                                             \
    GRADC_FN T abs_##T(T a) { return a > 0 ? a : (T)((PRODUCT)0 - (PRODUCT)a); }                                      \
    GRADC_FN T floormod_##T(T a, T b) {                                                                               \
        T rest = (T)((PRODUCT)a - (PRODUCT)floordiv_##T(a, b) * (PRODUCT)b);                                          \
        return b == 0 ? (T)0 : rest;                                                                                  \
    }                                                                                                                 \
    /* a shift by all of the bits or by a negative number leaves the sign */                                          \
    GRADC_FN T right_shift_##T(T a, T b) {                                                                            \
        T most = (T)(8 * sizeof(T) - 1);                                                                              \
        T by = b < (T)0 || b > most ? most : b;                                                                       \
        return (T)((a >> by) >> (b != by));                                                                           \
    }                                                                                                                 \
    /* by squaring, wrapping; a negative exponent gives 0 but for the bases 1 and -1 */                               \
    GRADC_FN T pow_##T(T base, T exponent) {                                                                          \
        PRODUCT result = 1, square = (PRODUCT)base;                                                                   \
        for (u64 e = exponent < (T)1 ? 0u : (u64)exponent; e != 0; e >>= 1) {                                         \
            result = (e & 1u) != 0 ? result * square : result;                                                        \
            square = square * square;                                                                                 \
        }                                                                                                             \
        T unit = base == (T)1 || (base == (T)-1 && (exponent & 1) == 0) ? (T)1 : base == (T)-1 ? (T)-1 : (T)0;        \
        return exponent < (T)0 ? unit : (T)result;                                                                    \
    }

GRADC_INTEGER(i8, u32)
GRADC_INTEGER(i16, u32)
GRADC_INTEGER(i32, u32)
GRADC_INTEGER(i64, u64)
GRADC_INTEGER(u8, u32)
GRADC_INTEGER(u16, u32)
GRADC_INTEGER(u32, u32)
GRADC_INTEGER(u64, u64)
#undef GRADC_INTEGER

/* ---- rows ---------------------------------------------------------------------------------------------------- */

/* How many elements of an ascending row are <= value; of a row that does not ascend, some number in [0, count]. */
#define GRADC_SEARCH(T)                                                                                               \
    GRADC_LONG_FN i64 search_##T(const T *row, i64 count, i64 value) {                                                \
        i64 low = 0, high = count;                                                                                    \
        while (low < high) {                                                                                          \
            const i64 middle = low + (high - low) / 2;                                                                \
            if (row[middle] <= value) low = middle + 1;                                                               \
            else high = middle;                                                                                       \
        }                                                                                                             \
        return low;                                                                                                   \
    }

GRADC_SEARCH(i8)
GRADC_SEARCH(i16)
GRADC_SEARCH(i32)
GRADC_SEARCH(i64)
GRADC_SEARCH(u8)
#undef GRADC_SEARCH

/* 64 random bits: half of a block of Philox4x32-10 (Salmon et al. 2011) for the counter (index / 2, stream). */
GRADC_FN i64 philox_i64(i64 index, i64 stream, i64 key) {
    u64 count = (u64)index >> 1;
    u32 c0 = (u32)count, c1 = (u32)(count >> 32), c2 = (u32)stream, c3 = (u32)((u64)stream >> 32);
    u32 k0 = (u32)key, k1 = (u32)((u64)key >> 32);
    for (i32 round = 0; round < 10; round++) {
        u64 left = 0xd2511f53ull * c0, right = 0xcd9e8d57ull * c2;
        c0 = (u32)(right >> 32) ^ c1 ^ k0;
        c1 = (u32)right;
        c2 = (u32)(left >> 32) ^ c3 ^ k1;
        c3 = (u32)left;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    u64 low = (u64)c0 | (u64)c1 << 32, high = (u64)c2 | (u64)c3 << 32;
    return (i64)((index & 1) != 0 ? high : low);
}

#endif
