/* What NVRTC knows by itself, for a C++ compiler: CUDA text in, one kernel per fiber out (sim.cpp runs them).
 *
 * The text is the one that a GPU gets; it sees GRADC_CUDA_SIM defined.  `__shared__` variables lie in a section of their
 * own, blocks run one after another.  What must stop a thread (barriers, collectives) or be seen as a whole (atomics) is
 * a call of sim.cpp; everything else is an ordinary function, loads and stores of which the checking mode sees. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* DWARF 4 has no range at the first address of a unit: it reads as the end of the list. */
__asm__(".text\n  nop\n");

#define GRADC_CUDA_SIM 1
#define SIM_INLINE static inline __attribute__((always_inline))
#define SIM_UNSEEN __attribute__((noinline, no_sanitize_thread)) /* what the checking mode is told by hand */

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__ __attribute__((section("gradc_constant")))
#define __grid_constant__
#define __launch_bounds__(...)
#define __noinline__
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#ifndef __builtin_assume
#define __builtin_assume(x) ((void)0)
#endif
#define __assume(x) ((void)0)

/* Variables of a block: in a section of their own, those of templates (of which gcc 12 forgets it) are known by their
 * symbols.  In the checking mode there is a gap before each.  `extern __shared__` is rewritten in Python, to a pointer: C++
 * has no array whose size the launch says. */
#define SIM_SECTION __attribute__((section("gradc_shared"), aligned(16), used))
#define SIM_JOIN_(a, b) a##b
#define SIM_JOIN(a, b) SIM_JOIN_(a, b)
#ifdef GRADC_SIM_CHECK
#define __shared__ static SIM_SECTION char SIM_JOIN(gradc_sim_gap_, __COUNTER__)[1024]; static SIM_SECTION
#else
#define __shared__ static SIM_SECTION
#endif

/* ---- Vectors ------------------------------------------------------------------------------------------------------- */

#define SIM_VECTORS(T, name, align2, align4)                                                              \
  struct __align__(align2) name##2 { T x, y; };                                                           \
  struct name##3 { T x, y, z; };                                                                          \
  struct __align__(align4) name##4 { T x, y, z, w; };                                                     \
  SIM_INLINE name##2 make_##name##2(T x, T y) { return {x, y}; }                                          \
  SIM_INLINE name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                  \
  SIM_INLINE name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SIM_VECTORS(signed char, char, 2, 4)
SIM_VECTORS(unsigned char, uchar, 2, 4)
SIM_VECTORS(short, short, 4, 8)
SIM_VECTORS(unsigned short, ushort, 4, 8)
SIM_VECTORS(int, int, 8, 16)
SIM_VECTORS(unsigned, uint, 8, 16)
SIM_VECTORS(float, float, 8, 16)
SIM_VECTORS(long long, longlong, 16, 16)
SIM_VECTORS(unsigned long long, ulonglong, 16, 16)
SIM_VECTORS(double, double, 16, 16)
typedef uint3 dim3;

/* ---- What sim.cpp does ---------------------------------------------------------------------------------------------
 * The first four are the same for all of a thread's life, so a call of them may be moved or dropped. */

enum sim_op { SIM_SYNCWARP, SIM_SHFL, SIM_SHFL_UP, SIM_SHFL_DOWN, SIM_SHFL_XOR, SIM_BALLOT, SIM_ANY, SIM_ALL, SIM_MATCH_ANY,
              SIM_ADD, SIM_MIN, SIM_MAX, SIM_UMIN, SIM_UMAX, SIM_AND, SIM_OR, SIM_XOR,
              SIM_MMA_BF16, SIM_MMA_F16, SIM_MMA_TF32, SIM_MMA_S8, SIM_LDMATRIX }; /* the last line: of all lanes of a warp */
struct sim_four { unsigned x[4]; }; /* registers of a lane */
extern "C" {
__attribute__((const)) uint3 gradc_sim_thread(void);
__attribute__((const)) uint3 gradc_sim_block(void);
__attribute__((const)) uint3 gradc_sim_block_dim(void);
__attribute__((const)) uint3 gradc_sim_grid_dim(void);
void *gradc_sim_dynamic(void); /* the launch's shared memory */
int gradc_sim_barrier(sim_op op, int value, int line);
uint64_t gradc_sim_warp(sim_op op, unsigned mask, uint64_t value, int other, int width);
unsigned gradc_sim_active(void);
sim_four gradc_sim_mma(sim_op op, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1, sim_four d, int line);
sim_four gradc_sim_ldmatrix(int count, bool transposed, const void *row, int line);
void gradc_sim_copy(void *to, const void *from, int bytes, int valid);
void gradc_sim_commit(void);
void gradc_sim_wait(int groups);
void gradc_sim_atomic(void *at, size_t bytes, void *from);
void gradc_sim_fence(void);
void gradc_sim_trap(void);
}

#define threadIdx gradc_sim_thread()
#define blockIdx gradc_sim_block()
#define blockDim gradc_sim_block_dim()
#define gridDim gradc_sim_grid_dim()
static const int warpSize = 32;

SIM_INLINE void __syncthreads(int line = __builtin_LINE()) { gradc_sim_barrier(SIM_ADD, 0, line); }
SIM_INLINE int __syncthreads_count(int p, int line = __builtin_LINE()) { return gradc_sim_barrier(SIM_ADD, p != 0, line); }
SIM_INLINE int __syncthreads_or(int p, int line = __builtin_LINE()) { return gradc_sim_barrier(SIM_OR, p != 0, line); }
SIM_INLINE int __syncthreads_and(int p, int line = __builtin_LINE()) { return gradc_sim_barrier(SIM_AND, p != 0, line); }
SIM_INLINE void __syncwarp(unsigned mask = 0xffffffffu) { gradc_sim_warp(SIM_SYNCWARP, mask, 0, 0, 32); }
SIM_INLINE unsigned __activemask() { return gradc_sim_active(); } /* all that have not returned: more than a GPU may say */
SIM_INLINE unsigned __ballot_sync(unsigned mask, int p) { return (unsigned)gradc_sim_warp(SIM_BALLOT, mask, p != 0, 0, 32); }
SIM_INLINE int __any_sync(unsigned mask, int p) { return (int)gradc_sim_warp(SIM_ANY, mask, p != 0, 0, 32); }
SIM_INLINE int __all_sync(unsigned mask, int p) { return (int)gradc_sim_warp(SIM_ALL, mask, p != 0, 0, 32); }

/* Any value of 4 or 8 bytes travels as 64 bits. */
template <class T> SIM_INLINE uint64_t sim_bits(T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "collectives take 4 or 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <class T> SIM_INLINE T sim_value(uint64_t bits) {
  T value;
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}
#define SIM_COLLECTIVE(name, op, other_type)                                                                  \
  template <class T> SIM_INLINE T name(unsigned mask, T value, other_type other, int width = 32) {            \
    return sim_value<T>(gradc_sim_warp(op, mask, sim_bits(value), (int)other, width));                        \
  }
SIM_COLLECTIVE(__shfl_sync, SIM_SHFL, int)
SIM_COLLECTIVE(__shfl_up_sync, SIM_SHFL_UP, unsigned)
SIM_COLLECTIVE(__shfl_down_sync, SIM_SHFL_DOWN, unsigned)
SIM_COLLECTIVE(__shfl_xor_sync, SIM_SHFL_XOR, int)
template <class T> SIM_INLINE unsigned __match_any_sync(unsigned mask, T value) { return (unsigned)gradc_sim_warp(SIM_MATCH_ANY, mask, sim_bits(value), 0, 32); }
#define SIM_REDUCE(name, T, op) \
  SIM_INLINE T name(unsigned mask, T value) { return (T)gradc_sim_warp(op, mask, (uint64_t)value, 0, 32); }
SIM_REDUCE(__reduce_add_sync, int, SIM_ADD)
SIM_REDUCE(__reduce_add_sync, unsigned, SIM_ADD)
SIM_REDUCE(__reduce_min_sync, int, SIM_MIN)
SIM_REDUCE(__reduce_min_sync, unsigned, SIM_UMIN)
SIM_REDUCE(__reduce_max_sync, int, SIM_MAX)
SIM_REDUCE(__reduce_max_sync, unsigned, SIM_UMAX)
SIM_REDUCE(__reduce_and_sync, unsigned, SIM_AND)
SIM_REDUCE(__reduce_or_sync, unsigned, SIM_OR)
SIM_REDUCE(__reduce_xor_sync, unsigned, SIM_XOR)

SIM_INLINE void __threadfence() { gradc_sim_fence(); }
SIM_INLINE void __threadfence_block() { gradc_sim_fence(); }
SIM_INLINE void __threadfence_system() { gradc_sim_fence(); }
SIM_INLINE void __nanosleep(unsigned) {}
SIM_INLINE void __trap() { gradc_sim_trap(); }
SIM_INLINE long long clock64() { return 0; }

/* ---- Atomics -------------------------------------------------------------------------------------------------------
 * One operating system thread runs all fibers and none is interrupted in here.  `inline`, and yet never inlined: at -O0 a
 * compiler leaves out only the unused functions that are declared so. */

#define SIM_ATOMIC(name, T, made)                                 \
  static inline SIM_UNSEEN T name(T *at, T value) {               \
    gradc_sim_atomic(at, sizeof(T), __builtin_return_address(0)); \
    const T old = *at;                                            \
    *at = made;                                                   \
    return old;                                                   \
  }
#define SIM_ATOMICS(T)                                              \
  SIM_ATOMIC(atomicExch, T, value)                                  \
  SIM_ATOMIC(atomicMin, T, value < old ? value : old)               \
  SIM_ATOMIC(atomicMax, T, value > old ? value : old)               \
  SIM_ATOMIC(atomicAnd, T, (T)(old & value))                        \
  SIM_ATOMIC(atomicOr, T, (T)(old | value))                         \
  SIM_ATOMIC(atomicXor, T, (T)(old ^ value))                        \
  static inline SIM_UNSEEN T atomicCAS(T *at, T compare, T value) { \
    gradc_sim_atomic(at, sizeof(T), __builtin_return_address(0));   \
    const T old = *at;                                              \
    *at = old == compare ? value : old;                             \
    return old;                                                     \
  }
SIM_ATOMICS(int)
SIM_ATOMICS(unsigned)
SIM_ATOMICS(long long)
SIM_ATOMICS(unsigned long long)
SIM_ATOMIC(atomicExch, float, value)
SIM_ATOMIC(atomicAdd, int, (int)((unsigned)old + (unsigned)value)) /* wraps, as on the device */
SIM_ATOMIC(atomicAdd, unsigned, old + value)
SIM_ATOMIC(atomicAdd, unsigned long long, old + value)
SIM_ATOMIC(atomicAdd, float, old + value)
SIM_ATOMIC(atomicAdd, double, old + value)
SIM_ATOMIC(atomicSub, int, (int)((unsigned)old - (unsigned)value))
SIM_ATOMIC(atomicSub, unsigned, old - value)
SIM_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
SIM_ATOMIC(atomicDec, unsigned, old == 0 || old > value ? value : old - 1)
SIM_ATOMIC(atomicAdd, float2, (float2{old.x + value.x, old.y + value.y})) /* sm_90 */
SIM_ATOMIC(atomicAdd, float4, (float4{old.x + value.x, old.y + value.y, old.z + value.z, old.w + value.w}))

/* ---- Loads and stores with a hint ---------------------------------------------------------------------------------- */

template <class T> SIM_INLINE T __ldg(const T *at) { return *at; }
template <class T> SIM_INLINE T __ldcs(const T *at) { return *at; }
template <class T> SIM_INLINE T __ldcg(const T *at) { return *at; }
template <class T> SIM_INLINE T __ldca(const T *at) { return *at; }
template <class T> SIM_INLINE T __ldlu(const T *at) { return *at; }
template <class T> SIM_INLINE T __ldcv(const T *at) { return *at; }
template <class T> SIM_INLINE void __stcs(T *at, T value) { *at = value; }
template <class T> SIM_INLINE void __stcg(T *at, T value) { *at = value; }
template <class T> SIM_INLINE void __stwb(T *at, T value) { *at = value; }
template <class T> SIM_INLINE void __stwt(T *at, T value) { *at = value; }

/* ---- Mathematical functions ------------------------------------------------------------------------------------------
 * Those of the C library, declared here: <math.h> is ten times the rest of a small text's compilation, and its macros take
 * names (INFINITY, M_PI) that NVRTC leaves free. */

#define SIM_MATH_1(name)               \
  extern "C" double name(double);      \
  extern "C" float name##f(float);     \
  SIM_INLINE float name(float x) { return name##f(x); }
#define SIM_MATH_2(name)                       \
  extern "C" double name(double, double);      \
  extern "C" float name##f(float, float);      \
  SIM_INLINE float name(float x, float y) { return name##f(x, y); }
SIM_MATH_1(acos) SIM_MATH_1(acosh) SIM_MATH_1(asin) SIM_MATH_1(asinh) SIM_MATH_1(atan) SIM_MATH_1(atanh) SIM_MATH_1(cbrt)
SIM_MATH_1(ceil) SIM_MATH_1(cos) SIM_MATH_1(cosh) SIM_MATH_1(erf) SIM_MATH_1(erfc) SIM_MATH_1(exp) SIM_MATH_1(exp2)
SIM_MATH_1(expm1) SIM_MATH_1(fabs) SIM_MATH_1(floor) SIM_MATH_1(lgamma) SIM_MATH_1(log) SIM_MATH_1(log10) SIM_MATH_1(log1p)
SIM_MATH_1(log2) SIM_MATH_1(logb) SIM_MATH_1(nearbyint) SIM_MATH_1(rint) SIM_MATH_1(round) SIM_MATH_1(sin) SIM_MATH_1(sinh)
SIM_MATH_1(sqrt) SIM_MATH_1(tan) SIM_MATH_1(tanh) SIM_MATH_1(tgamma) SIM_MATH_1(trunc)
SIM_MATH_2(atan2) SIM_MATH_2(copysign) SIM_MATH_2(fdim) SIM_MATH_2(fmax) SIM_MATH_2(fmin) SIM_MATH_2(fmod) SIM_MATH_2(hypot)
SIM_MATH_2(nextafter) SIM_MATH_2(pow) SIM_MATH_2(remainder)
extern "C" double fma(double, double, double);
extern "C" float fmaf(float, float, float);
SIM_INLINE float fma(float x, float y, float z) { return fmaf(x, y, z); }
extern "C" double ldexp(double, int);
extern "C" float ldexpf(float, int);
SIM_INLINE float ldexp(float x, int exponent) { return ldexpf(x, exponent); }
#ifndef GRADC_SIM_RUNTIME /* which includes <stdlib.h>, where C++ has them */
extern "C" int abs(int);
SIM_INLINE long long abs(long long x) { return x < 0 ? -x : x; }
SIM_INLINE float abs(float x) { return fabsf(x); }
SIM_INLINE double abs(double x) { return fabs(x); }
#endif
#define SIM_CLASSIFY(T)                                               \
  SIM_INLINE bool isnan(T x) { return __builtin_isnan(x); }           \
  SIM_INLINE bool isinf(T x) { return __builtin_isinf(x) != 0; }      \
  SIM_INLINE bool isfinite(T x) { return __builtin_isfinite(x) != 0; } \
  SIM_INLINE bool signbit(T x) { return __builtin_signbit(x) != 0; }
SIM_CLASSIFY(float)
SIM_CLASSIFY(double)

/* ---- Bits and numbers ---------------------------------------------------------------------------------------------- */

template <class To, class From> SIM_INLINE To sim_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
SIM_INLINE int __float_as_int(float x) { return sim_cast<int>(x); }
SIM_INLINE unsigned __float_as_uint(float x) { return sim_cast<unsigned>(x); }
SIM_INLINE float __int_as_float(int x) { return sim_cast<float>(x); }
SIM_INLINE float __uint_as_float(unsigned x) { return sim_cast<float>(x); }
SIM_INLINE long long __double_as_longlong(double x) { return sim_cast<long long>(x); }
SIM_INLINE double __longlong_as_double(long long x) { return sim_cast<double>(x); }
SIM_INLINE int __double2hiint(double x) { return (int)(sim_cast<uint64_t>(x) >> 32); }
SIM_INLINE int __double2loint(double x) { return (int)sim_cast<uint64_t>(x); }
SIM_INLINE double __hiloint2double(int hi, int lo) { return sim_cast<double>((uint64_t)(unsigned)hi << 32 | (unsigned)lo); }

SIM_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
SIM_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
SIM_INLINE int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
SIM_INLINE int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
SIM_INLINE int __ffs(int x) { return __builtin_ffs(x); }
SIM_INLINE int __ffsll(long long x) { return __builtin_ffsll(x); }
SIM_INLINE unsigned long long __brevll(unsigned long long x) {
  x = (x >> 1 & 0x5555555555555555ull) | (x & 0x5555555555555555ull) << 1;
  x = (x >> 2 & 0x3333333333333333ull) | (x & 0x3333333333333333ull) << 2;
  x = (x >> 4 & 0x0f0f0f0f0f0f0f0full) | (x & 0x0f0f0f0f0f0f0f0full) << 4;
  return __builtin_bswap64(x);
}
SIM_INLINE unsigned __brev(unsigned x) { return (unsigned)(__brevll(x) >> 32); }
SIM_INLINE unsigned __byte_perm(unsigned low, unsigned high, unsigned which) {
  const uint64_t bytes = (uint64_t)high << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned pick = which >> 4 * i, byte = (unsigned)(bytes >> 8 * (pick & 7)) & 0xff;
    out |= (pick & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
  }
  return out;
}
SIM_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) { return (unsigned)(((uint64_t)high << 32 | low) << (by & 31) >> 32); }
SIM_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) { return (unsigned)(((uint64_t)high << 32 | low) >> (by & 31)); }
SIM_INLINE unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
SIM_INLINE int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
SIM_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned long long)((unsigned __int128)a * b >> 64); }
SIM_INLINE long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }

#define SIM_MIN_MAX(T)                                         \
  SIM_INLINE T min(T a, T b) { return b < a ? b : a; }         \
  SIM_INLINE T max(T a, T b) { return a < b ? b : a; }
SIM_MIN_MAX(int)
SIM_MIN_MAX(unsigned)
SIM_MIN_MAX(long)
SIM_MIN_MAX(unsigned long)
SIM_MIN_MAX(long long)
SIM_MIN_MAX(unsigned long long)
SIM_INLINE float min(float a, float b) { return fminf(a, b); } /* a NaN loses */
SIM_INLINE float max(float a, float b) { return fmaxf(a, b); }
SIM_INLINE double min(double a, double b) { return fmin(a, b); }
SIM_INLINE double max(double a, double b) { return fmax(a, b); }

SIM_INLINE float __fadd_rn(float a, float b) { return a + b; }
SIM_INLINE float __fsub_rn(float a, float b) { return a - b; }
SIM_INLINE float __fmul_rn(float a, float b) { return a * b; }
SIM_INLINE float __fdiv_rn(float a, float b) { return a / b; }
SIM_INLINE float __frcp_rn(float a) { return 1.0f / a; }
SIM_INLINE float __fsqrt_rn(float a) { return sqrtf(a); }
SIM_INLINE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
SIM_INLINE double __dadd_rn(double a, double b) { return a + b; }
SIM_INLINE double __dsub_rn(double a, double b) { return a - b; }
SIM_INLINE double __dmul_rn(double a, double b) { return a * b; }
SIM_INLINE double __ddiv_rn(double a, double b) { return a / b; }
SIM_INLINE double __drcp_rn(double a) { return 1.0 / a; }
SIM_INLINE double __dsqrt_rn(double a) { return sqrt(a); }
SIM_INLINE double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
SIM_INLINE float rsqrtf(float a) { return 1.0f / sqrtf(a); }
SIM_INLINE double rsqrt(double a) { return 1.0 / sqrt(a); }
SIM_INLINE float __saturatef(float a) { return fminf(fmaxf(a, 0.0f), 1.0f); }
SIM_INLINE float __int2float_rn(int a) { return (float)a; }
SIM_INLINE float __uint2float_rn(unsigned a) { return (float)a; }
SIM_INLINE float __ll2float_rn(long long a) { return (float)a; }
SIM_INLINE float __double2float_rn(double a) { return (float)a; }
/* A conversion to integers stops at the ends of their range, and NaN is 0 (64-bit: the lowest), as in PTX. */
SIM_INLINE int sim_to_int(double a) { return a >= 2147483647.0 ? 2147483647 : a <= -2147483648.0 ? -2147483647 - 1 : a == a ? (int)a : 0; }
SIM_INLINE long long sim_to_long(double a) { return a >= 0x1p63 ? 0x7fffffffffffffffll : a > -0x1p63 ? (long long)a : -0x7fffffffffffffffll - 1; }
SIM_INLINE int __float2int_rn(float a) { return sim_to_int(rintf(a)); }
SIM_INLINE int __float2int_rz(float a) { return sim_to_int(a); }
SIM_INLINE int __float2int_rd(float a) { return sim_to_int(floorf(a)); }
SIM_INLINE int __float2int_ru(float a) { return sim_to_int(ceilf(a)); }
SIM_INLINE long long __float2ll_rn(float a) { return sim_to_long(rintf(a)); }
SIM_INLINE long long __float2ll_rz(float a) { return sim_to_long(a); }
SIM_INLINE int __double2int_rn(double a) { return sim_to_int(rint(a)); }
SIM_INLINE int __double2int_rz(double a) { return sim_to_int(a); }
SIM_INLINE long long __double2ll_rn(double a) { return sim_to_long(rint(a)); }
SIM_INLINE long long __double2ll_rz(double a) { return sim_to_long(a); }

/* ---- A kernel's entry ----------------------------------------------------------------------------------------------
 * The compiler takes the parameters apart, so nobody parses them: gradc_call_NAME calls the kernel with an array of
 * pointers to its arguments, as cuLaunchKernel does; gradc_signature_NAME says for each parameter what it is (P: pointer,
 * C: pointer to const, i: signed, u: unsigned, f: float, s: anything else) and, as a character from '0', its size. */

template <class T> struct sim_code { enum { value = 's' }; };
template <class T> struct sim_code<T *> { enum { value = 'P' }; };
template <class T> struct sim_code<const T *> { enum { value = 'C' }; };
#define SIM_CODE(T, code) template <> struct sim_code<T> { enum { value = code }; };
SIM_CODE(bool, 'u') SIM_CODE(char, 'i') SIM_CODE(signed char, 'i') SIM_CODE(short, 'i') SIM_CODE(int, 'i') SIM_CODE(long, 'i') SIM_CODE(long long, 'i')
SIM_CODE(unsigned char, 'u') SIM_CODE(unsigned short, 'u') SIM_CODE(unsigned, 'u') SIM_CODE(unsigned long, 'u') SIM_CODE(unsigned long long, 'u')
SIM_CODE(float, 'f') SIM_CODE(double, 'f')

template <size_t... I> struct sim_places {};
template <size_t N, size_t... I> struct sim_count : sim_count<N - 1, N - 1, I...> {};
template <size_t... I> struct sim_count<0, I...> { typedef sim_places<I...> type; };

template <class... P, size_t... I> SIM_UNSEEN void sim_call(void (*kernel)(P...), void **args, sim_places<I...>) { kernel(*(P *)args[I]...); }
template <class... P> SIM_INLINE void sim_call(void (*kernel)(P...), void **args) { sim_call(kernel, args, typename sim_count<sizeof...(P)>::type()); }
template <class... P> SIM_INLINE const char *sim_signature(void (*)(P...)) {
  static const char text[] = {((char)sim_code<P>::value)..., '/', ((char)('0' + sizeof(P)))..., 0};
  return text;
}
#define GRADC_SIM_KERNEL(name)                                                                                              \
  extern "C" __attribute__((visibility("default"))) void gradc_call_##name(void **args) { sim_call(name, args); }            \
  extern "C" __attribute__((visibility("default"))) const char *gradc_signature_##name(void) { return sim_signature(name); }
