/* Inverse trigonometric, hyperbolic and special functions, on top of templates/common/math.h, which says how names,
   errors and coefficients are to be read.

   Errors, in units in the last place of the correctly rounded f32 result, measured by tests/codegen/test_cpu_math.py:
       exp2 1.1   log2 1.6   log10 2.0   tan 3.6   asin 2.4   acos 1.2   atan 2.2   atan2 2.2   sinh 2.9   cosh 2.2
       asinh 1.9   acosh 2.0   atanh 2.2   erfc 5.6   erfinv 3.0   hypot 1.2
       i0 7   i0e 9   i1 8   i1e 9   erfcx 9
   and of the larger of 1 and the result, for arguments above 0: lgamma 5   digamma 4 (below 0 poles and zeros take more). */
#ifndef GRADC_SPECIAL_H
#define GRADC_SPECIAL_H

GRADC_FN f64 copysign_f64(f64 magnitude, f64 sign) { return GRADC_LIBM(copysign)(magnitude, sign); }
GRADC_FN f32 fmod_f32(f32 a, f32 b) { return GRADC_LIBM(fmodf)(a, b); }
GRADC_FN f64 fmod_f64(f64 a, f64 b) { return GRADC_LIBM(fmod)(a, b); }

/* ---- f64: libm ---------------------------------------------------------------------------------------------- */

#define GRADC_LIBM_F64(NAME) GRADC_FN f64 NAME##_f64(f64 x) { return GRADC_LIBM(NAME)(x); }
GRADC_LIBM_F64(exp2)
GRADC_LIBM_F64(log2)
GRADC_LIBM_F64(log10)
GRADC_LIBM_F64(tan)
GRADC_LIBM_F64(asin)
GRADC_LIBM_F64(acos)
GRADC_LIBM_F64(atan)
GRADC_LIBM_F64(sinh)
GRADC_LIBM_F64(cosh)
GRADC_LIBM_F64(asinh)
GRADC_LIBM_F64(acosh)
GRADC_LIBM_F64(atanh)
GRADC_LIBM_F64(erfc)
GRADC_LIBM_F64(lgamma)
#undef GRADC_LIBM_F64
GRADC_FN f64 normal_cdf_f64(f64 x) { return 0.5 * GRADC_LIBM(erfc)(x * -0x1.6a09e667f3bcdp-1); }
GRADC_FN f64 gelu_derivative_f64(f64 x) {
    f64 e = GRADC_LIBM(exp)(-0.5 * x * x);
    return 0.5 * GRADC_LIBM(erfc)(x * -0x1.6a09e667f3bcdp-1) + (e == 0 ? 0.0 : x * e * 0x1.9884533d43651p-2);
}
GRADC_FN f64 atan2_f64(f64 y, f64 x) { return GRADC_LIBM(atan2)(y, x); }
GRADC_FN f64 hypot_f64(f64 x, f64 y) { return GRADC_LIBM(hypot)(x, y); }

/* ---- f32: exponentials and logarithms of base 2 and 10 ------------------------------------------------------------ */

GRADC_FN f32 exp2_f32(f32 x) {
    f32 low = x < -151.0f ? -151.0f : x;
    f32 t = low > 129.0f ? 129.0f : low;
    f32 shifted = t + 0x1.8p23f;
    i32 k = (i32)(bits_of_f32(shifted) - 0x4b400000u);
    f32 r = (t - (shifted - 0x1.8p23f)) * 0x1.62e430p-1f;
    i32 half = k >> 1; /* in two steps, as exp_f32 */
    f32 y = (1.0f + expm1_near_zero_f32(r)) * power_of_two_f32(half) * power_of_two_f32(k - half);
    return x != x ? x : y;
}

/* k log_b 2 + log_b m: `scale` is 1 / ln b, HIGH + LOW is log_b 2, of which k HIGH is exact */
GRADC_FN f32 log_to_base_f32(f32 x, f32 scale, f32 high, f32 low) {
    i32 subnormal = x < 0x1p-126f;
    f32 t = subnormal ? x * 0x1p23f : x;
    f32 k = (f32)(log_exponent_f32(t) - (subnormal ? 23 : 0));
    f32 m = log_sum_f32(0, log_mantissa_f32(t) - 1.0f);
    f32 y = mad_f32(k, high, mad_f32(k, low, m * scale));
    f32 upper = x <= GRADC_MAX_F32 ? y : x;
    f32 lower = x == 0.0f ? -GRADC_INFINITY_F32 : GRADC_NAN_F32;
    return x <= 0.0f ? lower : upper;
}
GRADC_FN f32 log2_f32(f32 x) { return log_to_base_f32(x, 0x1.715476p+0f, 1.0f, 0.0f); }
GRADC_FN f32 log10_f32(f32 x) { return log_to_base_f32(x, 0x1.bcb7b2p-2f, 0x1.344p-2f, 0x1.3509f8p-18f); }

/* ---- f32: inverse trigonometric functions ------------------------------------------------------------------------- */

#define GRADC_PI_F32 0x1.921fb6p+1f
#define GRADC_PI_LOST_F32 -0x1.777a5cp-24f /* pi - GRADC_PI_F32 */

GRADC_FN f32 tan_f32(f32 x) { return sin_f32(x) / cos_f32(x); }

/* atan(a / b) for 0 <= a <= b, b > 0: (t + t^3 P(t^2)) with t = a/b up to tan(pi/8), above it pi/4 + atan((a-b)/(a+b)) */
GRADC_FN f32 atan_of_quotient_f32(f32 a, f32 b) {
    i32 far = a > 0x1.a8279ap-2f * b;
    f32 t = far ? (a - b) / (a + b) : a / b;
    f32 s = t * t;
    f32 p = -0x1.ee24d6p-5f; /* |t| <= tan(pi/8), relative error 2^-30.3 */
    p = mad_f32(p, s, 0x1.b1345cp-4f);
    p = mad_f32(p, s, -0x1.23a944p-3f);
    p = mad_f32(p, s, 0x1.9990fep-3f);
    p = mad_f32(p, s, -0x1.555548p-2f);
    f32 small = mad_f32(s * t, p, t);
    return far ? 0.25f * GRADC_PI_F32 + (small + 0.25f * GRADC_PI_LOST_F32) : small;
}
GRADC_FN f32 atan_f32(f32 x) {
    f32 a = GRADC_LIBM(fabsf)(x);
    i32 inverted = a > 1.0f;
    i32 infinite = a > GRADC_MAX_F32;
    f32 y = atan_of_quotient_f32(inverted ? 1.0f : a, inverted ? (infinite ? 1.0f : a) : 1.0f);
    f32 rest = infinite ? 0.0f : y;
    f32 z = inverted ? 0.5f * GRADC_PI_F32 + (0.5f * GRADC_PI_LOST_F32 - rest) : y;
    return x != x ? x : copysign_f32(z, x);
}
GRADC_FN f32 atan2_f32(f32 y, f32 x) {
    f32 a = GRADC_LIBM(fabsf)(y), b = GRADC_LIBM(fabsf)(x);
    i32 steep = a > b;
    f32 less = steep ? b : a, more = steep ? a : b;
    i32 infinite = more > GRADC_MAX_F32; /* 0 or, of two infinities, pi/4 */
    f32 scale = more > 0x1p100f ? 0x1p-30f : more < 0x1p-100f ? 0x1p+30f : 1.0f; /* a + b stays finite, a/b loses nothing */
    f32 over = infinite ? (less > GRADC_MAX_F32 ? 1.0f : 0.0f) : less * scale;
    f32 under = infinite || more == 0.0f ? 1.0f : more * scale;
    f32 t = atan_of_quotient_f32(over, under);
    f32 quarter = steep ? 0.5f * GRADC_PI_F32 + (0.5f * GRADC_PI_LOST_F32 - t) : t;
    f32 turned = (bits_of_f32(x) >> 31) != 0 ? GRADC_PI_F32 + (GRADC_PI_LOST_F32 - quarter) : quarter;
    return x != x || y != y ? x + y : copysign_f32(turned, y);
}

/* asin(x) = x + x z P(z) with z = x^2 <= 1/4 */
GRADC_FN f32 asin_polynomial_f32(f32 z) { /* relative error of asin 2^-31.6 */
    f32 p = 0x1.345056p-5f;
    p = mad_f32(p, z, 0x1.d62b1ap-7f);
    p = mad_f32(p, z, 0x1.04c6dap-5f);
    p = mad_f32(p, z, 0x1.6ca808p-5f);
    p = mad_f32(p, z, 0x1.3338acp-4f);
    p = mad_f32(p, z, 0x1.55554cp-3f);
    return z * p;
}
/* above 1/2: pi/2 - 2 asin(sqrt((1 - |x|) / 2)) */
GRADC_FN f32 asin_f32(f32 x) {
    f32 a = GRADC_LIBM(fabsf)(x);
    i32 near_one = a > 0.5f;
    f32 z = near_one ? 0.5f * (1.0f - a) : a * a;
    f32 s = near_one ? GRADC_LIBM(sqrtf)(z) : a;
    f32 y = mad_f32(s, asin_polynomial_f32(z), s);
    f32 far = 0.5f * GRADC_PI_F32 - (2.0f * y - 0.5f * GRADC_PI_LOST_F32);
    return copysign_f32(near_one ? far : y, x);
}
GRADC_FN f32 acos_f32(f32 x) {
    f32 a = GRADC_LIBM(fabsf)(x);
    i32 near_one = a > 0.5f;
    f32 z = near_one ? 0.5f * (1.0f - a) : a * a;
    f32 s = near_one ? GRADC_LIBM(sqrtf)(z) : x;
    f32 y = mad_f32(s, asin_polynomial_f32(z), s);
    f32 folded = x < 0.0f ? GRADC_PI_F32 - (2.0f * y - GRADC_PI_LOST_F32) : 2.0f * y;
    return near_one ? folded : 0.5f * GRADC_PI_F32 - (y - 0.5f * GRADC_PI_LOST_F32);
}

/* ---- f32: hyperbolic functions ------------------------------------------------------------------------------------ */

/* e^a / 2 for a >= 1, where a - 1 is exact: e^a alone is out of range before its half is */
GRADC_FN f32 half_exp_f32(f32 a) { return exp_f32(a - 1.0f) * 0x1.5bf0a8p+0f; }

GRADC_FN f32 sinh_f32(f32 x) {
    f32 a = GRADC_LIBM(fabsf)(x);
    f32 e = expm1_f32(a);
    f32 u = half_exp_f32(a);
    f32 y = a < 1.0f ? 0.5f * (e + e / (e + 1.0f)) : u - 0.25f / u;
    return copysign_f32(y, x);
}
GRADC_FN f32 cosh_f32(f32 x) {
    f32 a = GRADC_LIBM(fabsf)(x);
    f32 e = expm1_f32(a);
    f32 u = half_exp_f32(a);
    return a < 1.0f ? 1.0f + 0.5f * e * e / (e + 1.0f) : u + 0.25f / u;
}
/* log(a + sqrt(a^2 + 1)) = log1p(a + a^2 / (1 + sqrt(a^2 + 1))) */
GRADC_FN f32 asinh_f32(f32 x) {
    f32 a = GRADC_LIBM(fabsf)(x);
    i32 far = a > 0x1p12f; /* log(2a) */
    f32 t = far ? 1.0f : a;
    f32 square = t * t;
    f32 y = log1p_f32(far ? a - 1.0f : t + square / (1.0f + GRADC_LIBM(sqrtf)(square + 1.0f)));
    return copysign_f32(far ? y + 0x1.62e430p-1f : y, x);
}
GRADC_FN f32 acosh_f32(f32 x) {
    i32 far = x > 0x1p12f;
    f32 t = x - 1.0f;
    f32 y = log1p_f32(far ? t : t + GRADC_LIBM(sqrtf)(t * (t + 2.0f)));
    f32 value = far ? y + 0x1.62e430p-1f : y;
    return x < 1.0f ? GRADC_NAN_F32 : value;
}
GRADC_FN f32 atanh_f32(f32 x) {
    f32 a = GRADC_LIBM(fabsf)(x);
    return copysign_f32(0.5f * log1p_f32(2.0f * a / (1.0f - a)), x);
}

/* ---- f32: hypot, error functions ----------------------------------------------------------------------------------- */

GRADC_FN f32 hypot_f32(f32 x, f32 y) {
    f32 a = GRADC_LIBM(fabsf)(x), b = GRADC_LIBM(fabsf)(y);
    f32 more = a > b ? a : b, less = a > b ? b : a;
    f32 scale = more > 0x1p60f ? 0x1p-80f : more < 0x1p-60f ? 0x1p+80f : 1.0f; /* squares stay in range */
    f32 unit = more > 0x1p60f ? 0x1p+80f : more < 0x1p-60f ? 0x1p-80f : 1.0f;
    f32 m = more * scale, l = less * scale;
    f32 z = GRADC_LIBM(sqrtf)(mad_f32(m, m, l * l)) * unit;
    f32 value = x != x || y != y ? x + y : z;
    return ((a > GRADC_MAX_F32) | (b > GRADC_MAX_F32)) != 0 ? GRADC_INFINITY_F32 : value; /* beside NaN, too */
}

/* Below 1/2 1 - erf(x); above e^-x^2 R(x), the exponential by halves, so that no factor is subnormal before the product. */
GRADC_FN f32 erfc_f32(f32 x) {
    f32 near_zero = 1.0f - erf_f32(x);
    f32 a = x < 0.5f ? 0.5f : x;
    f32 b = a > 10.3f ? 10.3f : a;
    f32 t = (b - 3.0f) / (b + 3.0f);
    f32 r = -0x1.1cae4ap-11f; /* R in t = (x - 3) / (x + 3), 0.49 <= x <= 10.3, relative error 2^-26 */
    r = mad_f32(r, t, 0x1.82358ap-11f);
    r = mad_f32(r, t, 0x1.169c46p-8f);
    r = mad_f32(r, t, -0x1.8fc0aep-6f);
    r = mad_f32(r, t, 0x1.258dc8p-4f);
    r = mad_f32(r, t, -0x1.336fbap-3f);
    r = mad_f32(r, t, 0x1.f6ff0ep-3f);
    r = mad_f32(r, t, -0x1.4e102cp-2f);
    r = mad_f32(r, t, 0x1.6e9828p-3f);
    f32 head = f32_of_bits(bits_of_f32(b) & 0xfffff000u); /* 12 bits: its square is exact */
    f32 root = exp_f32(-0.5f * head * head);
    f32 rest = exp_f32((head - b) * (head + b));
    f32 tail = (root * rest) * r * root;
    f32 y = x < 0.5f ? near_zero : tail;
    return x != x ? x : y;
}

/* x Q(w), w = -log(1 - x^2): a polynomial in w up to 5, in sqrt(w) above (Giles 2010) */
GRADC_FN f32 erfinv_f32(f32 x) {
    f32 a = GRADC_LIBM(fabsf)(x);
    f32 w = a < 0.5f ? -log1p_f32(-(x * x)) : -log_f32((1.0f - a) * (1.0f + a));
    f32 c = (w < 5.0f ? w : 5.0f) - 2.5f;
    f32 p = 0x1.70e9e2p-32f; /* relative error 2^-24.3 */
    p = mad_f32(p, c, -0x1.2d6e96p-27f);
    p = mad_f32(p, c, 0x1.35e178p-26f);
    p = mad_f32(p, c, 0x1.f43f76p-22f);
    p = mad_f32(p, c, -0x1.ccfc66p-19f);
    p = mad_f32(p, c, -0x1.4cfd02p-18f);
    p = mad_f32(p, c, 0x1.c9c598p-13f);
    p = mad_f32(p, c, -0x1.486646p-10f);
    p = mad_f32(p, c, -0x1.11c420p-8f);
    p = mad_f32(p, c, 0x1.f91e8cp-3f);
    p = mad_f32(p, c, 0x1.805c5ep+0f);
    f32 d = GRADC_LIBM(sqrtf)(w < 17.0f ? w : 17.0f) - 3.0f;
    f32 q = -0x1.ef2eccp-16f; /* 5 <= w <= 16.8, relative error 2^-26.7 */
    q = mad_f32(q, d, 0x1.50b446p-13f);
    q = mad_f32(q, d, -0x1.22f91cp-12f);
    q = mad_f32(q, d, -0x1.f780c6p-14f);
    q = mad_f32(q, d, 0x1.82b114p-10f);
    q = mad_f32(q, d, -0x1.d38bbcp-9f);
    q = mad_f32(q, d, 0x1.74bfc0p-8f);
    q = mad_f32(q, d, -0x1.f4e04ep-8f);
    q = mad_f32(q, d, 0x1.3580f2p-7f);
    q = mad_f32(q, d, 0x1.006dcap+0f);
    q = mad_f32(q, d, 0x1.6a9efcp+1f);
    f32 y = x * (w < 5.0f ? p : q);
    f32 edge = a == 1.0f ? copysign_f32(GRADC_INFINITY_F32, x) : GRADC_NAN_F32;
    return a < 1.0f ? y : edge;
}

/* The same form to 2^-19, then a step of Halley's iteration, whose error is the third power of that. */
GRADC_FN f64 erfinv_f64(f64 x) {
    f64 a = GRADC_LIBM(fabs)(x);
    f64 w = a < 0.5 ? -GRADC_LIBM(log1p)(-(x * x)) : -GRADC_LIBM(log)((1.0 - a) * (1.0 + a));
    f64 c = w - 2.5, d = GRADC_LIBM(sqrt)(w) - 3.0, e = d - 2.0;
    f64 p = 0x1.b612380000000p-26;
    p = p * c + 0x1.6d7b2ep-22;
    p = p * c - 0x1.d551acp-19;
    p = p * c - 0x1.24644ap-18;
    p = p * c + 0x1.ca3a54p-13;
    p = p * c - 0x1.48b07cp-10;
    p = p * c - 0x1.11c8c6p-8;
    p = p * c + 0x1.f91ed2p-3;
    p = p * c + 0x1.805c5ep+0;
    f64 q = -0x1.dd6d06p-14; /* sqrt(5) <= sqrt(w) <= 4.1 */
    q = q * d + 0x1.1edbe6p-10;
    q = q * d - 0x1.c0d250p-9;
    q = q * d + 0x1.7fa574p-8;
    q = q * d - 0x1.f8d76ep-8;
    q = q * d + 0x1.34a73cp-7;
    q = q * d + 0x1.006e22p+0;
    q = q * d + 0x1.6a9f02p+1;
    f64 r = -0x1.190723c368643p-20; /* up to sqrt(w) = 6.3 */
    r = r * e + 0x1.5e577e286060dp-18;
    r = r * e - 0x1.4d06439a0338fp-16;
    r = r * e + 0x1.3c8260ef0cf27p-14;
    r = r * e - 0x1.c296787ddae22p-13;
    r = r * e - 0x1.22ad018b327cbp-13;
    r = r * e + 0x1.02a30c61952c7p+0;
    r = r * e + 0x1.3664ddcbd1925p+2;
    f64 y = a * (w < 5.0 ? p : w < 16.5 ? q : r);
    f64 missed = a < 0.5 ? GRADC_LIBM(erf)(y) - a : (1.0 - a) - GRADC_LIBM(erfc)(y);
    f64 step = missed * 0x1.c5bf891b4ef6bp-1 * GRADC_LIBM(exp)(y * y); /* sqrt(pi)/2 */
    f64 z = y - step / (1.0 + y * step);
    f64 edge = a == 1.0 ? (f64)GRADC_INFINITY_F32 : (f64)GRADC_NAN_F32;
    return GRADC_LIBM(copysign)(a < 1.0 ? z : edge, x);
}

/* ---- gamma functions ------------------------------------------------------------------------------------------------ */

/* log gamma(x) for x > 0.  Moved to [1.5, 2.5) by factors of x, whose logarithm is added; there t (1+t) Q(t), t = x - 2. */
GRADC_FN f32 lgamma_positive_f32(f32 x) {
    i32 large = x >= 8.5f;
    f32 z = large ? 2.0f : x;
    f32 over = 1.0f, under = 1.0f, t = z - 2.0f;
    i32 twice = z < 0.5f, once = z < 1.5f;
    over = once ? z : over;
    over = twice ? z * (z + 1.0f) : over;
    t = once ? z - 1.0f : t;
    t = twice ? z : t;
    f32 u = z;
    for (i32 k = 0; k < 6; k++) {
        i32 down = u >= 2.5f;
        u = down ? u - 1.0f : u;
        under = down ? under * u : under;
    }
    t = z >= 2.5f ? u - 2.0f : t;
    f32 q = -0x1.a2318cp-18f; /* |t| <= 1/2, relative error 2^-25.9 */
    q = mad_f32(q, t, -0x1.dba882p-12f);
    q = mad_f32(q, t, 0x1.0ac15ep-10f);
    q = mad_f32(q, t, -0x1.132ea4p-9f);
    q = mad_f32(q, t, 0x1.46831cp-8f);
    q = mad_f32(q, t, -0x1.95d2e0p-7f);
    q = mad_f32(q, t, 0x1.0e0e60p-5f);
    q = mad_f32(q, t, -0x1.9ae64ep-4f);
    q = mad_f32(q, t, 0x1.b0ee60p-2f);
    f32 small = t * (1.0f + t) * q + (log_f32(under) - log_f32(over));
    f32 v = large ? x : 8.5f;
    f32 i = 1.0f / v;
    f32 tail = i * mad_f32(i * i, -0x1.6c16c2p-9f, 0x1.555556p-4f);
    f32 stirling = mad_f32(v - 0.5f, log_f32(v) - 1.0f, 0x1.acfe3ap-2f + tail); /* log(2 pi)/2 - 1/2 */
    return large ? stirling : small;
}
GRADC_FN f32 lgamma_f32(f32 x) {
    f32 a = GRADC_LIBM(fabsf)(x);
    f32 y = lgamma_positive_f32(a);
    f32 r = a - GRADC_LIBM(rintf)(a);
    f32 sine = GRADC_LIBM(fabsf)(sin_f32(GRADC_PI_F32 * r));
    f32 reflected = log_f32(GRADC_PI_F32 / (a * sine)) - y; /* |gamma(x)| = pi / (|x| |sin(pi x)| gamma(|x|)) */
    f32 value = x < 0.0f ? reflected : y;
    f32 finite = a < 0x1p-40f ? -log_f32(a) : value;
    f32 pole = x <= 0.0f && r == 0.0f ? GRADC_INFINITY_F32 : finite;
    f32 whole = a > GRADC_MAX_F32 ? GRADC_INFINITY_F32 : pole;
    return x != x ? x : whole;
}

/* psi(x): moved above LIMIT by psi(x) = psi(x + 1) - 1/x, there the asymptotic series; below 0 reflected */
#define GRADC_GAMMA(F, S, LIMIT, STEPS)                                                                               \
    GRADC_FN F digamma_##F(F x) {                                                                                     \
        i32 below = x < (F)0;                                                                                         \
        F z = below ? (F)1 - x : x, sum = 0;                                                                          \
        for (i32 k = 0; k < (STEPS); k++) {                                                                           \
            i32 small = z < (F)(LIMIT);                                                                               \
            sum += small ? (F)1 / z : (F)0;                                                                           \
            z += small ? (F)1 : (F)0;                                                                                 \
        }                                                                                                             \
        F s = (F)1 / (z * z);                                                                                         \
        F p = (F)(1.0 / 12.0);                                                                                        \
        p = (F)(691.0 / 32760.0) - s * p;                                                                             \
        p = (F)(1.0 / 132.0) - s * p;                                                                                 \
        p = (F)(1.0 / 240.0) - s * p;                                                                                 \
        p = (F)(1.0 / 252.0) - s * p;                                                                                 \
        p = (F)(1.0 / 120.0) - s * p;                                                                                 \
        p = (F)(1.0 / 12.0) - s * p;                                                                                  \
        F y = log_##F(z) - ((F)0.5 / z + s * p) - sum;                                                                \
        F r = x - GRADC_LIBM(rint##S)(x);                                                                               \
        F angle = (F)0x1.921fb54442d18p+1 * r;                                                                        \
        F turned = y - (F)0x1.921fb54442d18p+1 * cos_##F(angle) / sin_##F(angle);                                     \
        F value = below ? (r == 0 ? (F)GRADC_NAN_F32 : turned) : y;                                                   \
        return x == 0 ? copysign_##F((F)GRADC_INFINITY_F32, -x) : value;                                              \
    }                                                                                                                 \
    GRADC_FN F inverse_power_##F(F z, i32 exponent) { /* z^-exponent, exponent >= 1 */                                \
        F square = z, power = 1;                                                                                      \
        for (i32 e = exponent; e > 0; e >>= 1) {                                                                      \
            power = (e & 1) != 0 ? power * square : power;                                                            \
            square = square * square;                                                                                 \
        }                                                                                                             \
        return (F)1 / power;                                                                                          \
    }                                                                                                                 \
    /* sum over k >= 0 of (z + k)^-s for z > 0: ten terms, the smallest first, after the rest by Euler and Maclaurin */ \
    GRADC_LONG_FN F hurwitz_zeta_##F(i32 s, F z) {                                                                    \
        F n = (F)s, far = z + 10, i = (F)1 / far, w = i * i, power = inverse_power_##F(far, s);                       \
        F p = (F)(691.0 / 1307674368000.0) * (n + 9) * (n + 10) * w;                                                  \
        p = ((F)(1.0 / 47900160.0) - p) * (n + 7) * (n + 8) * w;                                                      \
        p = ((F)(1.0 / 1209600.0) - p) * (n + 5) * (n + 6) * w;                                                       \
        p = ((F)(1.0 / 30240.0) - p) * (n + 3) * (n + 4) * w;                                                         \
        p = ((F)(1.0 / 720.0) - p) * (n + 1) * (n + 2) * w;                                                           \
        p = ((F)(1.0 / 12.0) - p) * n * i;                                                                            \
        F sum = power * (far / (n - 1) + (F)0.5 + p);                                                                 \
        for (i32 k = 9; k >= 0; k--) sum += inverse_power_##F(z + (F)k, s);                                           \
        return z > (F)GRADC_MAX_F32 ? (F)0 : sum;                                                                     \
    }                                                                                                                 \
    /* the derivative of order n >= 1 of digamma: (-1)^(n+1) n! zeta(n + 1, x).  Below 0 the terms before the sign    \
       changes are those of two more sums. */                                                                         \
    GRADC_LONG_FN F polygamma_##F(i32 n, F x) {                                                                       \
        i32 below = x < (F)0, even = (n & 1) == 0;                                                                    \
        F part = x - GRADC_LIBM(floor##S)(x);                                                                           \
        F total = hurwitz_zeta_##F(n + 1, below ? part : x);                                                          \
        if (below) {                                                                                                  \
            F gap = GRADC_LIBM(ceil##S)(x) - x; /* 1 - part, exact even where part was rounded to 1 */                  \
            F before = hurwitz_zeta_##F(n + 1, gap) - hurwitz_zeta_##F(n + 1, (F)1 - x);                              \
            total = even ? total - before : total + before;                                                           \
        }                                                                                                             \
        F factorial = 1;                                                                                              \
        for (i32 k = 2; k <= n; k++) factorial *= (F)k;                                                               \
        F value = even ? -(factorial * total) : factorial * total;                                                    \
        return below && part == 0 ? (even ? (F)GRADC_NAN_F32 : (F)GRADC_INFINITY_F32) : value;                        \
    }

GRADC_GAMMA(f32, f, 6, 6)
GRADC_GAMMA(f64, , 10, 10)
#undef GRADC_GAMMA

/* ---- modified Bessel functions, scaled complementary error function ------------------------------------------------ */

/* I_n(x) for n = 0, 1: up to LIMIT the series (x/2)^n sum (x^2/4)^k / (k! (k+n)!), whose terms are all positive (DLMF
   10.25.2); above, e^x / sqrt(2 pi x) times the asymptotic one (10.40.1), whose smallest term is about e^(-2x).
   erfcx(x) = e^(x^2) erfc(x): above 2 Laplace's continued fraction (7.9.2). */
#define GRADC_BESSEL(F, S, LIMIT, SERIES, TAIL, STEPS)                                                                \
    GRADC_LONG_FN F bessel_series_##F(i32 n, F a) {                                                                   \
        F q = a * a * (F)0.25, term = n != 0 ? a * (F)0.5 : (F)1, sum = term;                                         \
        for (i32 k = 1; k <= (SERIES); k++) {                                                                         \
            term = term * (q / ((F)k * (F)(k + n)));                                                                  \
            sum += term;                                                                                              \
        }                                                                                                             \
        return sum;                                                                                                   \
    }                                                                                                                 \
    GRADC_LONG_FN F bessel_tail_##F(i32 n, F a) {                                                                     \
        F term = 1, sum = 1, mu = n != 0 ? (F)4 : (F)0;                                                               \
        for (i32 k = 1; k <= (TAIL); k++) {                                                                           \
            F odd = (F)(2 * k - 1);                                                                                   \
            term = term * ((odd * odd - mu) / ((F)(8 * k) * a));                                                      \
            sum += term;                                                                                              \
        }                                                                                                             \
        return sum / ((F)0x1.40d931ff62706p+1 * GRADC_LIBM(sqrt##S)(a)); /* 2 pi a may overflow */                    \
    }                                                                                                                 \
    GRADC_FN F bessel_##F(i32 n, i32 scaled, F x) {                                                                   \
        F a = GRADC_LIBM(fabs##S)(x);                                                                                 \
        F half = exp_##F(scaled != 0 ? (F)0 : a * (F)0.5); /* in two steps: e^a may overflow where I_n does not */    \
        F near = bessel_series_##F(n, a < (F)(LIMIT) ? a : (F)(LIMIT)) * (scaled != 0 ? exp_##F(-a) : (F)1);          \
        F far = half * bessel_tail_##F(n, a < (F)(LIMIT) ? (F)(LIMIT) : a) * half;                                    \
        F value = a < (F)(LIMIT) ? near : far;                                                                        \
        F whole = a > (F)GRADC_MAX_F32 && a - a != 0 ? (scaled != 0 ? (F)0 : a) : value;                              \
        return x != x ? x : n != 0 ? copysign_##F(whole, x) : whole;                                                  \
    }                                                                                                                 \
    GRADC_FN F i0_##F(F x) { return bessel_##F(0, 0, x); }                                                            \
    GRADC_FN F i0e_##F(F x) { return bessel_##F(0, 1, x); }                                                           \
    GRADC_FN F i1_##F(F x) { return bessel_##F(1, 0, x); }                                                            \
    GRADC_FN F i1e_##F(F x) { return bessel_##F(1, 1, x); }                                                           \
    GRADC_LONG_FN F erfcx_##F(F x) {                                                                                  \
        F z = x < (F)2 ? (F)2 : x, below = z;                                                                         \
        for (i32 k = (STEPS); k >= 1; k--) below = z + (F)k * (F)0.5 / below;                                         \
        F low = x < (F)-30 ? (F)-30 : x;                                                                              \
        F head = GRADC_LIBM(rint##S)(low * (F)8) * (F)0.125; /* its square is exact */                                \
        F near = exp_##F(head * head) * exp_##F((low - head) * (low + head)) * erfc_##F(x);                           \
        return x < (F)2 ? near : (F)0x1.20dd750429b6dp-1 / below;                                                     \
    }

GRADC_BESSEL(f32, f, 9, 30, 12, 30)
GRADC_BESSEL(f64, , 19, 60, 36, 60)
#undef GRADC_BESSEL

#endif
