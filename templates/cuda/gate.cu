/* The library (cuBLAS) cannot read the flag, but reads the factors of out = alpha a b + beta out from memory: (1, 0), or (0, 1) if a
 * check before it has found something, which leaves out as it is.  Operands in the workspace have not been written then; they are
 * cleared, because 0 NaN is NaN. */
GRADC_FN void gradc_gate_clear(u8 *to, i64 bytes) {
  const i64 thread = blockIdx.x * 256ll + threadIdx.x, threads = gridDim.x * 256ll;
  u64 *words = (u64 *)to; /* the beginning of a temporary, which is aligned */
  for (i64 i = thread; i < bytes / 8; i += threads) words[i] = 0;
  for (i64 i = bytes / 8 * 8 + thread; i < bytes; i += threads) to[i] = 0;
}

/* scale: the pair in f64, then the pair in f32 */
extern "C" __global__ void __launch_bounds__(256) gradc_gate(f64 *scale, u8 *a, i64 a_bytes, u8 *b, i64 b_bytes, const u64 *flag, i64 site) {
  const bool stopped = gradc_stopped(flag, site);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    f32 *narrow = (f32 *)(scale + 2);
    narrow[0] = stopped ? 0.0f : 1.0f, narrow[1] = stopped ? 1.0f : 0.0f;
    scale[0] = stopped ? 0.0 : 1.0, scale[1] = stopped ? 1.0 : 0.0;
  }
  if (!stopped) return;
  gradc_gate_clear(a, a_bytes);
  gradc_gate_clear(b, b_bytes);
}

/* An empty product. */
extern "C" __global__ void __launch_bounds__(256) gradc_gate_zero(u8 *out, i64 bytes, const u64 *flag, i64 site) {
  if (!gradc_stopped(flag, site)) gradc_gate_clear(out, bytes);
}
