/* The library (cuBLAS) cannot read the flag: where a check before a product has found something, the output's bytes are put by before it
 * and put back after it. */
GRADC_FN i64 gradc_gate_thread() { return blockIdx.x * 256ll + threadIdx.x; }

extern "C" __global__ void __launch_bounds__(256) gradc_gate(u8 *to, const u8 *from, i64 bytes, const u64 *flag, i64 site) {
  if (!gradc_stopped(flag, site)) return;
  for (i64 i = gradc_gate_thread(); i < bytes; i += gridDim.x * 256ll) to[i] = from[i];
}

/* An empty product. */
extern "C" __global__ void __launch_bounds__(256) gradc_gate_zero(u8 *out, i64 bytes, const u64 *flag, i64 site) {
  if (gradc_stopped(flag, site)) return;
  for (i64 i = gradc_gate_thread(); i < bytes; i += gridDim.x * 256ll) out[i] = 0;
}
