/* CUDA's scalar arithmetic: types, GRADC_FN and builtins for the text that all targets share.

   Nothing comes from outside: NVRTC has no headers and knows these functions by itself.  With GRADC_CUDA_SIM the text is
   C++ for g++ and clang, whose builtins give the same bits (but those of NaN); __device__ and __forceinline__ are macros
   then, defined before. */
#ifndef GRADC_CUDA_MATH_H
#define GRADC_CUDA_MATH_H

typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;

#define GRADC_FN static __device__ __forceinline__ __attribute__((unused))
#define GRADC_LONG_FN GRADC_FN
#define GRADC_INFINITY_F32 f32_of_bits(0x7f800000u)
#define GRADC_NAN_F32 f32_of_bits(0x7fc00000u)

/* Most devices have one f64 unit for 64 of f32: where f32 is not enough, pairs of f32 and integers. */
#define GRADC_F64_IN_F32 0
#define GRADC_GPU

#ifdef GRADC_CUDA_SIM

#define GRADC_LIBM(name) __builtin_##name
#define GRADC_F16_NATIVE 0
#define GRADC_BF16_NATIVE 0

GRADC_FN u32 bits_of_f32(f32 x) { u32 b; __builtin_memcpy(&b, &x, sizeof b); return b; }
GRADC_FN u64 bits_of_f64(f64 x) { u64 b; __builtin_memcpy(&b, &x, sizeof b); return b; }
GRADC_FN f32 f32_of_bits(u32 b) { f32 x; __builtin_memcpy(&x, &b, sizeof x); return x; }
GRADC_FN f64 f64_of_bits(u64 b) { f64 x; __builtin_memcpy(&x, &b, sizeof x); return x; }
GRADC_FN i32 leading_zeros_u64(u64 x) { return __builtin_clzll(x); }
GRADC_FN u64 high_product_u64(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
GRADC_FN f32 reciprocal_in_range_f32(f32 x) { return 1.0f / x; }

#else

#if (defined(__CUDA_FTZ) && __CUDA_FTZ) || (defined(__CUDA_PREC_DIV) && !__CUDA_PREC_DIV) \
    || (defined(__CUDA_PREC_SQRT) && !__CUDA_PREC_SQRT)
#error "--use_fast_math, --ftz=true, --prec-div=false and --prec-sqrt=false change results"
#endif
#pragma nv_diag_suppress 186 /* an unsigned integer is never below 0: one macro defines a function for i32 and u32 */

#define GRADC_LIBM(name) name

GRADC_FN u32 bits_of_f32(f32 x) { return __float_as_uint(x); }
GRADC_FN u64 bits_of_f64(f64 x) { return (u64)__double_as_longlong(x); }
GRADC_FN f32 f32_of_bits(u32 b) { return __uint_as_float(b); }
GRADC_FN f64 f64_of_bits(u64 b) { return __longlong_as_double((i64)b); }
GRADC_FN i32 leading_zeros_u64(u64 x) { return __clzll((i64)x); }
GRADC_FN u64 high_product_u64(u64 a, u64 b) { return __umul64hi(a, b); }

/* 1/x for 2^-125 <= |x| <= 2^125: what the IEEE division computes for such x, an approximation within one unit and a step of
   Newton's, without its test and its branch to what it does for all others. */
GRADC_FN f32 reciprocal_in_range_f32(f32 x) {
  f32 near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
  return __fmaf_rn(near, __fmaf_rn(-x, near, 1.0f), near);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define GRADC_NAN_EXTREMES
GRADC_FN f32 at_least_f32(f32 x, f32 low) { f32 y; asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(low)); return y; }
GRADC_FN f32 at_most_f32(f32 x, f32 high) { f32 y; asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(high)); return y; }
#endif

/* The device's conversions: one instruction each where our own take 11 (f16_load), 25 (f16_store) and 8 (bf16_store),
   for which a kernel as fast as memory has no time.  They round alike; NaN becomes 0x7fff. */
#define GRADC_F16_NATIVE 1
GRADC_FN f32 f16_load(u16 h) { f32 x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h)); return x; }
GRADC_FN u16 f16_store(f32 x) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x)); return h; }
GRADC_FN f32 f16_round(f32 x) { return f16_load(f16_store(x)); }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define GRADC_BF16_NATIVE 1
GRADC_FN u16 bf16_store(f32 x) { u16 h; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x)); return h; }
GRADC_FN f32 bf16_round(f32 x) { return f32_of_bits((u32)bf16_store(x) << 16); }
#else
#define GRADC_BF16_NATIVE 0
#endif

/* Floats of 8 bits as f16, which holds them: E5M2 is the upper half of one, of E4M3 a device has the conversion from sm_89 on, CUDA 12.1. */
#define GRADC_F8E5M2_NATIVE 1
GRADC_FN f32 f8e5m2_decode(u32 h) { return f16_load((u16)(h << 8)); }
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 900 || (__CUDA_ARCH__ >= 890 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1201))
#define GRADC_F8E4M3_NATIVE 1
GRADC_FN f32 f8e4m3_decode(u32 h) { u32 x; asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(x) : "h"((u16)h)); return f16_load((u16)x); }
#endif

#endif

/* The polynomials' a*b + c, fused as on a CPU with fma. */
GRADC_FN f32 mad_f32(f32 a, f32 b, f32 c) { return GRADC_LIBM(fmaf)(a, b, c); }

#include "../common/math.h"

#endif
