/*
 * gelu_4169f1: test_golden.py:58
 * reads x f32[N,D], bias f32[D]
 * writes y f32[N,D]
 * moves 8*D*N+4*D bytes, computes 3*D*N operations
 *
 * kernel @gelu_4169f1 rows(i0: N) cols(i1: D) {
 *   phase
 *   %0 = load x[i0, i1] : f32
 *   %1 = load bias[i1] : f32
 *   %2 = add %0, %1 : f32
 *   %3 = normal_cdf %2 : f32
 *   %4 = mul %2, %3 : f32
 *   store y[i0, i1] <- %4 : f32
 * }
 */
/* Rows, in strips: a task has a strip of one row's columns. */
extern "C" __global__ void __launch_bounds__(256, 2) gelu_4169f1_rows(
  const f32 *const x,
  const f32 *__restrict__ const bias,
  f32 *const y,
  const i64 dim0, const i64 dim1, char *const workspace, u64 *const flag, const i64 site, const i64 chunk_length, const i64 aux, const i64 first_block) {
  if (aux <= 0 && gradc_stopped(flag, site)) return;
  enum { WIDTH = 256 }; /* threads of a task */
  enum { VEC = 4 }; /* neighbouring columns of a thread */
  const ix N = (ix)dim0;
  const ix D = (ix)dim1;
  const ix chunk = (ix)chunk_length;
  const ix rows = N;
  const ix cols = D;
  const ix element = ((ix)first_block + (ix)blockIdx.x) * (ix)blockDim.x + (ix)threadIdx.x;
  const ix task = element / WIDTH;
  const int lane = (int)(threadIdx.x % WIDTH);
  const bool even_cols = cols % VEC == 0;
  const ix col_step = even_cols ? 1 : WIDTH;
  const ix lane_col = even_cols ? lane * VEC : lane;
  const bool vectorized = even_cols && gradc_aligned(x, 16) && D % 4 == 0 && gradc_aligned(bias, 16) && gradc_aligned(y, 16);
  const ix strips = gradc_chunks(cols, chunk), r = task / strips;
  if (r >= rows) return;
  const ix first_col = task % strips * chunk, end_col = gradc_min(first_col + chunk, cols);
  const ix i0 = r;
  /* phase 1: store y */
  #pragma unroll 1
  for (ix col = first_col + lane_col; col - lane_col < end_col; col += WIDTH * VEC) {
    gradc_vector<f32, VEC> loaded0[1];
    gradc_get_all(loaded0, x + i0 * D, col, 0, col_step, end_col, vectorized);
    gradc_vector<f32, VEC> loaded1[1];
    gradc_get_all(loaded1, bias, col, 0, col_step, end_col, vectorized);
    f32 stored2[VEC];
    #pragma unroll
    for (int j = 0; j < VEC; j++) {
      const ix c = col + j * col_step;
      if (c >= end_col) continue;
      const f32 v0 = loaded0[0].items[j];
      const f32 v1 = loaded1[0].items[j];
      const f32 v2 = v0 + v1;
      const f32 v3 = normal_cdf_f32(v2);
      const f32 v4 = v2 * v3;
      stored2[j] = v4;
    }
    gradc_put(y + i0 * D, stored2, col, col_step, end_col, vectorized);
  }
}
