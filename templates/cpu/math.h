/* The CPU's scalar arithmetic: types, GRADC_FN and builtins for the text that all targets share. */
#ifndef GRADC_CPU_MATH_H
#define GRADC_CPU_MATH_H

#include <stdint.h>

typedef int8_t i8;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef float f32;
typedef double f64;

/* Always inlined: a call left in a loop keeps the loop scalar.  At -O0 every loop is, and inlining is work. */
#ifdef __OPTIMIZE__
#define GRADC_FN static inline __attribute__((always_inline, unused))
#else
#define GRADC_FN static inline __attribute__((unused))
#endif
#define GRADC_LONG_FN static inline __attribute__((unused))
#define GRADC_LIBM(name) __builtin_##name
#define GRADC_INFINITY_F32 __builtin_inff()
#define GRADC_NAN_F32 __builtin_nanf("")

#define GRADC_F64_IN_F32 1 /* half the lanes, and no fma is needed to keep what a rounding lost */
#define GRADC_BF16_NATIVE 0

/* Own conversions of f16 unless the compiler turns those of _Float16 into vector code: gcc 12 does not, for x86, with AVX-512 FP16 as
 * with F16C.  Either gives the same bits, those of NaN included. */
#ifndef GRADC_F16_NATIVE
#if defined(__FLT16_MAX__) \
    && (defined(__aarch64__) || (defined(__clang__) && (defined(__F16C__) || defined(__AVX512FP16__))))
#define GRADC_F16_NATIVE 1
#else
#define GRADC_F16_NATIVE 0
#endif
#endif

GRADC_FN u32 bits_of_f32(f32 x) { u32 b; __builtin_memcpy(&b, &x, sizeof b); return b; }
GRADC_FN u64 bits_of_f64(f64 x) { u64 b; __builtin_memcpy(&b, &x, sizeof b); return b; }
GRADC_FN f32 f32_of_bits(u32 b) { f32 x; __builtin_memcpy(&x, &b, sizeof x); return x; }
GRADC_FN f64 f64_of_bits(u64 b) { f64 x; __builtin_memcpy(&x, &b, sizeof x); return x; }

/* a*b + c, fused where that is one instruction: for polynomials, where either rounding will do. */
#if defined(__FMA__) || defined(__FMA4__) || defined(__aarch64__) || defined(__ARM_FEATURE_FMA)
GRADC_FN f32 mad_f32(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
GRADC_FN f64 mad_f64(f64 a, f64 b, f64 c) { return __builtin_fma(a, b, c); }
#else
GRADC_FN f32 mad_f32(f32 a, f32 b, f32 c) { return a * b + c; }
GRADC_FN f64 mad_f64(f64 a, f64 b, f64 c) { return a * b + c; }
#endif

#if GRADC_F16_NATIVE
GRADC_FN f32 f16_load(u16 h) { _Float16 x; __builtin_memcpy(&x, &h, sizeof x); return (f32)x; }
GRADC_FN u16 f16_store(f32 x) { _Float16 y = (_Float16)x; u16 h; __builtin_memcpy(&h, &y, sizeof h); return h; }
GRADC_FN f32 f16_round(f32 x) { return (f32)(_Float16)x; }
#endif

/* Functions of every integer type compare with 0, the unsigned ones too. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtype-limits"
#include "../common/math.h"
#pragma GCC diagnostic pop

#endif
