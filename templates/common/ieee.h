/* IEEE 754, on which every result rests: what the compiler was told, and the floating-point environment of the thread that runs. */
#ifndef GRADC_IEEE_H
#define GRADC_IEEE_H

#include <stdint.h>

/* Flags that came past the check of CC: in a wrapper, a specs file, the compiler's own environment. */
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || defined(__NO_SIGNED_ZEROS__)
#error "the C compiler was told to break IEEE 754 (-ffast-math, -Ofast or a part of them): results would be wrong"
#endif
#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0 && __FLT_EVAL_METHOD__ != 16
#error "the C compiler keeps floats in a wider type (-mfpmath=387): results would be rounded twice"
#endif

/* gradc_ieee_enter: round to nearest, subnormals kept, no exception traps; gives the environment that was there, which
 * gradc_ieee_leave brings back, its flags included.  x87 is not touched: nothing of ours computes in it. */
#if defined(__x86_64__)
typedef uint32_t gradc_ieee;
static inline __attribute__((unused)) gradc_ieee gradc_ieee_enter(void) {
  gradc_ieee before;
  const gradc_ieee plain = 0x1f80;
  __asm__ volatile("stmxcsr %0" : "=m"(before) : : "memory");
  __asm__ volatile("ldmxcsr %0" : : "m"(plain) : "memory");
  return before;
}
static inline __attribute__((unused)) void gradc_ieee_leave(gradc_ieee before) { __asm__ volatile("ldmxcsr %0" : : "m"(before) : "memory"); }
#elif defined(__aarch64__)
typedef struct {
  uint64_t control, status;
} gradc_ieee;
static inline __attribute__((unused)) void gradc_ieee_leave(gradc_ieee before) {
  __asm__ volatile("msr fpcr, %0\n\tmsr fpsr, %1" : : "r"(before.control), "r"(before.status) : "memory");
}
static inline __attribute__((unused)) gradc_ieee gradc_ieee_enter(void) {
  gradc_ieee before;
  __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(before.control), "=r"(before.status) : : "memory");
  const gradc_ieee plain = {0, 0};
  gradc_ieee_leave(plain);
  return before;
}
#else
#include <fenv.h>
typedef fenv_t gradc_ieee;
static inline __attribute__((unused)) gradc_ieee gradc_ieee_enter(void) {
  gradc_ieee before;
  fegetenv(&before);
  fesetenv(FE_DFL_ENV);
  return before;
}
static inline __attribute__((unused)) void gradc_ieee_leave(gradc_ieee before) { fesetenv(&before); }
#endif

#endif
