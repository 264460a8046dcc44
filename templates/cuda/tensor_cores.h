/* Products of a warp's fragments, loads of them from shared memory, and asynchronous copies into it: inline PTX for NVRTC, collectives
 * of cuda-sim (sim_tensor_cores.h) where GRADC_CUDA_SIM is defined.  math.h stands before it; sm_80 and later.
 *
 * Fragments.  A lane has g = lane / 4 and t = lane % 4, and a register P elements of one row: P is 2 for 16 bits, 1 for tf32, 4 for s8.
 * d += a b with d 16 x 8, a 16 x 8P, b 8P x 8:
 *   a[r], element e:  row g + 8 (r % 2), column P t + 4P (r / 2) + e
 *   b[r], element e:  row P t + 4P r + e, column g
 *   d[i]:             row g + 8 (i / 2), column 2t + i % 2
 * so that d of two neighbouring products, rounded to 16 bits and packed, is an a.
 *
 * Numbers.  PTX promises exact products of 16-bit floats and sums of at least f32's precision, in an order and with a rounding that it
 * leaves open.  Devices measured in public add all products of a step to d at once, cut off what lies below the largest term's last
 * bits, and round toward zero (Fasi, Higham, Mikaitis, Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ CS 2021).  cuda-sim:
 * products exact, summed with d in f64 in ascending order of columns of a, the sum rounded toward zero to f32 once.  It cuts no term
 * off: a device may differ by some units in the last place of the largest term.  A sum beyond f32 is infinite. */
#ifndef GRADC_TENSOR_CORES_H
#define GRADC_TENSOR_CORES_H

#ifdef GRADC_CUDA_SIM

#define GRADC_MMA(name, op, T, shape, types, of_d)                                                          \
  GRADC_FN void name(T (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, int line = __builtin_LINE()) {           \
    const sim_four c = {{sim_cast<u32>(d[0]), sim_cast<u32>(d[1]), sim_cast<u32>(d[2]), sim_cast<u32>(d[3])}}; \
    const sim_four y = gradc_sim_mma(op, a[0], a[1], a[2], a[3], b0, b1, c, line);                          \
    for (int i = 0; i < 4; i++) d[i] = sim_cast<T>(y.x[i]);                                                 \
  }
#define GRADC_LDMATRIX(count, suffix, transposed, ...)                                                              \
  GRADC_FN void ldmatrix_x##count##suffix(u32 (&r)[count], const void *row, int line = __builtin_LINE()) {          \
    const sim_four y = gradc_sim_ldmatrix(count, transposed, row, line);                                            \
    for (int i = 0; i < count; i++) r[i] = y.x[i];                                                                  \
  }
#define GRADC_CP_ASYNC(bytes, cache) \
  GRADC_FN void cp_async##bytes(void *to, const void *from, int valid = bytes) { gradc_sim_copy(to, from, bytes, valid); }
GRADC_FN void cp_async_commit() { gradc_sim_commit(); }
template <int N> GRADC_FN void cp_async_wait() { gradc_sim_wait(N); }

GRADC_FN u32 pack_bf16(f32 low, f32 high) { return bf16_store(low) | (u32)bf16_store(high) << 16; }
GRADC_FN u32 pack_f16(f32 low, f32 high) { return f16_store(low) | (u32)f16_store(high) << 16; }
GRADC_FN u32 masked_or(u32 x, u32 mask, u32 bits) { return (x & mask) | bits; }
GRADC_FN u32 masked_xor(u32 x, u32 mask, u32 bits) { return (x & mask) ^ bits; }
GRADC_FN u32 rotated(u32 x, int places) { return places ? x << places | x >> (32 - places) : x; }
GRADC_FN u32 permuted(u32 low, u32 high, u32 places) { return __byte_perm(low, high, places); }
GRADC_FN u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  const f32 low = bf16_load((u16)a) * bf16_load((u16)b) + bf16_load((u16)c);
  return pack_bf16(low, bf16_load((u16)(a >> 16)) * bf16_load((u16)(b >> 16)) + bf16_load((u16)(c >> 16)));
}
GRADC_FN u32 fma_f16x2(u32 a, u32 b, u32 c) {
  const f32 low = f16_load((u16)a) * f16_load((u16)b) + f16_load((u16)c);
  return pack_f16(low, f16_load((u16)(a >> 16)) * f16_load((u16)(b >> 16)) + f16_load((u16)(c >> 16)));
}
GRADC_FN f32 exp2_approx(f32 x) { const f32 y = exp2f(x); return y < 0x1p-126f ? 0.0f : y; }

#else

GRADC_FN u32 gradc_shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
/* A pointer to shared memory in a register. */
struct gradc_shared_u16 {
  u32 at;
  __device__ __forceinline__ gradc_shared_u16 operator+(int n) const { return {at + 2 * n}; }
};
GRADC_FN u32 gradc_shared_address(gradc_shared_u16 p) { return p.at; }

#define GRADC_MMA(name, op, T, shape, types, of_d)                                                               \
  GRADC_FN void name(T (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {                                             \
    asm volatile("mma.sync.aligned." shape ".row.col." types " {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};" \
                 : "+" of_d(d[0]), "+" of_d(d[1]), "+" of_d(d[2]), "+" of_d(d[3])                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                \
  }
#define GRADC_INTO_1(r) "=r"(r[0])
#define GRADC_INTO_2(r) "=r"(r[0]), "=r"(r[1])
#define GRADC_INTO_4(r) "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
#define GRADC_LDMATRIX(count, suffix, transposed, modifier, registers, address)                    \
  template <class Row> GRADC_FN void ldmatrix_x##count##suffix(u32 (&r)[count], Row row) {         \
    asm volatile("ldmatrix.sync.aligned.m8n8.x" #count modifier ".shared.b16 {" registers "},[" address "];" \
                 : GRADC_INTO_##count(r) : "r"(gradc_shared_address(row)) : "memory");             \
  }
#define GRADC_CP_ASYNC(bytes, cache)                                                                  \
  template <class To> GRADC_FN void cp_async##bytes(To to, const void *from, int valid = bytes) {     \
    asm volatile("cp.async." cache ".shared.global [%0],[%1]," #bytes ",%2;"                          \
                 :: "r"(gradc_shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(valid) : "memory"); \
  }
GRADC_FN void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> GRADC_FN void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

GRADC_FN u32 pack_bf16(f32 low, f32 high) { u32 r; asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
GRADC_FN u32 pack_f16(f32 low, f32 high) { u32 r; asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
/* (x & mask) | bits in one operation, which takes no two constants: the compiler makes two of it. */
GRADC_FN u32 masked_or(u32 x, u32 mask, u32 bits) { u32 r; asm("lop3.b32 %0,%1,%2,%3,0xea;" : "=r"(r) : "r"(x), "r"(mask), "r"(bits)); return r; }
GRADC_FN u32 masked_xor(u32 x, u32 mask, u32 bits) { u32 r; asm("lop3.b32 %0,%1,%2,%3,0x6a;" : "=r"(r) : "r"(x), "r"(mask), "r"(bits)); return r; }
GRADC_FN u32 rotated(u32 x, int places) { return __funnelshift_l(x, x, places); }
/* Four of the bytes of low, 0 to 3, and high, 4 to 7: those of the places in 4 bits each, which are below 8. */
GRADC_FN u32 permuted(u32 low, u32 high, u32 places) { u32 r; asm("prmt.b32 %0,%1,%2,%3;" : "=r"(r) : "r"(low), "r"(high), "r"(places)); return r; }
/* a * b + c of both halves, each rounded once; subnormal numbers, too. */
GRADC_FN u32 fma_bf16x2(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
GRADC_FN u32 fma_f16x2(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
GRADC_FN f32 exp2_approx(f32 x) { f32 y; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x)); return y; }

#endif

/* d += a b, by all lanes of a warp.  tf32: the last 13 bits of a register do not count.  s8: d wraps. */
GRADC_MMA(mma_m16n8k16_bf16, SIM_MMA_BF16, f32, "m16n8k16", "f32.bf16.bf16.f32", "f")
GRADC_MMA(mma_m16n8k16_f16, SIM_MMA_F16, f32, "m16n8k16", "f32.f16.f16.f32", "f")
GRADC_MMA(mma_m16n8k8_tf32, SIM_MMA_TF32, f32, "m16n8k8", "f32.tf32.tf32.f32", "f")
GRADC_MMA(mma_m16n8k32_s8, SIM_MMA_S8, i32, "m16n8k32", "s32.s8.s8.s32", "r")

/* Matrices of 8 x 8 elements of 16 bits, by all lanes of a warp: lane 8j + i points to row i of matrix j, 16 bytes of shared memory at a
 * multiple of 16, and gets in r[j] elements 2t and 2t + 1 of its row g; _trans: of its column g.  Where there are fewer than 4, the other
 * lanes' pointers do not count. */
GRADC_LDMATRIX(1, , false, "", "%0", "%1")
GRADC_LDMATRIX(2, , false, "", "%0,%1", "%2")
GRADC_LDMATRIX(4, , false, "", "%0,%1,%2,%3", "%4")
GRADC_LDMATRIX(1, _trans, true, ".trans", "%0", "%1")
GRADC_LDMATRIX(2, _trans, true, ".trans", "%0,%1", "%2")
GRADC_LDMATRIX(4, _trans, true, ".trans", "%0,%1,%2,%3", "%4")

/* Starts a copy of so many bytes from global to shared memory, both at multiples of them; of `from` only the first `valid` are read, and
 * zeros follow.  The bytes are there for a thread after its cp_async_wait<N>(), which waits for all of its groups but the last N, and for
 * others after a barrier that follows.  A group is what a thread has started since its cp_async_commit() before. */
GRADC_CP_ASYNC(4, "ca")
GRADC_CP_ASYNC(8, "ca")
GRADC_CP_ASYNC(16, "cg")

#undef GRADC_MMA
#undef GRADC_LDMATRIX
#undef GRADC_CP_ASYNC
#endif
