/*
 * sum_b99632: test_golden.py:68
 * reads dy f32[N,256]
 * writes y f32[256]
 * moves 1024*N+1024 bytes, computes 256*N operations
 *
 * kernel @sum_b99632 rows(i0: N) cols(i1: 256) strategy(y: privatized) {
 *   phase
 *   %0 = load dy[i0, i1] : f32
 *   accum y[i1] <- %0 : f32
 * }
 */
/* Rows, tiled: a task has a chunk of rows x WIDTH * VEC columns. */
extern "C" __global__ void __launch_bounds__(256, 2) sum_b99632_rows(
  const f32 *__restrict__ const dy,
  f32 *__restrict__ const y,
  const i64 dim0, char *const workspace, u64 *const flag, const i64 site, const i64 chunk_length, const i64 aux, const i64 first_block) {
  if (aux <= 0 && gradc_stopped(flag, site)) return;
  enum { WIDTH = 64 }; /* threads of a task */
  enum { VEC = 4 }; /* neighbouring columns of a thread */
  const ix N = (ix)dim0;
  const ix chunk = (ix)chunk_length;
  const ix rows = N;
  const ix cols = 256;
  const ix chunks = gradc_chunks(rows, chunk);
  sum_f32 *const partial0 = (sum_f32 *)workspace;
  const ix element = ((ix)first_block + (ix)blockIdx.x) * (ix)blockDim.x + (ix)threadIdx.x;
  const ix task = element / WIDTH;
  const int lane = (int)(threadIdx.x % WIDTH);
  const bool even_cols = true;
  const ix col_step = even_cols ? 1 : WIDTH;
  const ix lane_col = even_cols ? lane * VEC : lane;
  const bool vectorized = even_cols && gradc_aligned(dy, 16);
  const ix tiles = gradc_chunks(cols, WIDTH * VEC);
  if (task >= chunks * tiles) return;
  const ix chunk_index = task / tiles, first_col = task % tiles * (WIDTH * VEC), end_col = gradc_min(first_col + WIDTH * VEC, cols);
  sum_f32 a0[1][VEC];
  #pragma unroll
  for (int t = 0; t < 1; t++)
    #pragma unroll
    for (int j = 0; j < VEC; j++) gradc_clear(a0[t][j]);
  const ix from = chunk_index * chunk, until = gradc_min(from + chunk, rows);
  #pragma unroll 1
  for (ix group = from; group < until; group += 4) {
    f32 loaded0[4][VEC];
    #pragma unroll
    for (int u = 0; u < 4; u++) { /* load */
      if (group + u >= until) continue;
      const ix r = group + u;
      const ix i0 = r;
      const ix col = first_col + lane_col;
      gradc_get(loaded0[u], dy + i0 * 256, col, col_step, end_col, vectorized);
    }
    #pragma unroll
    for (int u = 0; u < 4; u++) { /* phase 1: add to y */
      if (group + u >= until) continue;
      #pragma unroll
      for (int t = 0; t < 1; t++) {
        const ix col = first_col + t * (WIDTH * VEC) + lane_col;
        if (col >= end_col) continue;
        #pragma unroll
        for (int j = 0; j < VEC; j++) {
          const f32 v0 = loaded0[u][j];
          gradc_add_next(a0[t][j], v0);
        }
      }
    }
  }
  #pragma unroll
  for (int t = 0; t < 1; t++) {
    const ix col = first_col + t * (WIDTH * VEC) + lane_col;
    if (col >= end_col) continue;
    gradc_put(partial0 + chunk_index * (256), a0[t], col, col_step, end_col, vectorized);
  }
}

/* The chunks' partial results, added up. */
extern "C" __global__ void __launch_bounds__(256, 2) sum_b99632_fold0(
  const f32 *__restrict__ const dy,
  f32 *__restrict__ const y,
  const i64 dim0, char *const workspace, u64 *const flag, const i64 site, const i64 chunk_length, const i64 aux, const i64 first_block) {
  if (aux <= 0 && gradc_stopped(flag, site)) return;
  const ix N = (ix)dim0;
  const ix chunk = (ix)chunk_length;
  const ix rows = N;
  const ix chunks = gradc_chunks(rows, chunk);
  sum_f32 *const partial0 = (sum_f32 *)workspace;
  const ix element = ((ix)first_block + (ix)blockIdx.x) * (ix)blockDim.x + (ix)threadIdx.x;
  const ix size = 256, e = element / (ix)blockDim.x * 32 + (ix)(threadIdx.x % 32);
  const int warps = 8, warp = (int)threadIdx.x / 32;
  __shared__ sum_f32 warp_totals[256];
  sum_f32 total;
  gradc_clear(total);
  if (e < size)
    #pragma unroll 4
    for (ix c = warp; c < chunks; c += warps) gradc_add(total, partial0[c * size + e]);
  warp_totals[threadIdx.x] = total;
  __syncthreads();
  if (warp > 0 || e >= size) return;
  for (int i = 1; i < warps; i++) gradc_add(total, warp_totals[i * 32 + threadIdx.x]);
  y[e] = gradc_value(total);
}
