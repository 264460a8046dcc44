/*
 * sum_b99632: test_golden.py:69
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
extern "C" __global__ void __launch_bounds__(256, 4) sum_b99632_rows(
  const f32 *__restrict__ const dy,
  f32 *__restrict__ const y,
  const i64 dim0, char *const workspace, u64 *const flag, const i64 site, const i64 chunk_length, const i64 aux, const i64 first_block) {
  if (aux <= 0 && gradc_stopped(flag, site)) return;
  enum { WIDTH = 64 }; /* threads of a task */
  enum { SHARING = 4 }; /* tasks of a block that share a chunk */
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
  if (task >= chunks * SHARING) return;
  const ix chunk_index = task / SHARING, first_col = 0, end_col = cols;
  sum_f32 a0[1][VEC];
  #pragma unroll
  for (int t = 0; t < 1; t++)
    #pragma unroll
    for (int j = 0; j < VEC; j++) gradc_clear(a0[t][j]);
  const ix from = chunk_index * chunk + task % SHARING, until = gradc_min((chunk_index + 1) * chunk, rows);
  #pragma unroll 1
  for (ix group = from; group < until; group += 4 * SHARING) {
    gradc_vector<f32, VEC> loaded0[4];
    #pragma unroll
    for (int u = 0; u < 4; u++) { /* load */
      if (group + u * SHARING >= until) continue;
      const ix r = group + u * SHARING;
      const ix i0 = r;
      const ix col = first_col + lane_col;
      gradc_get_vector(loaded0[u], dy + i0 * 256, col, col_step, end_col, vectorized);
    }
    #pragma unroll
    for (int u = 0; u < 4; u++) { /* phase 1: add to y */
      if (group + u * SHARING >= until) continue;
      #pragma unroll
      for (int t = 0; t < 1; t++) {
        const ix col = first_col + t * (WIDTH * VEC) + lane_col;
        if (col >= end_col) continue;
        #pragma unroll
        for (int j = 0; j < VEC; j++) {
          const f32 v0 = loaded0[u].items[j];
          gradc_add_next(a0[t][j], v0);
        }
      }
    }
  }
  __shared__ sum_f32 totals0[1][VEC][256];
  #pragma unroll
  for (int t = 0; t < 1; t++)
    #pragma unroll
    for (int j = 0; j < VEC; j++) totals0[t][j][threadIdx.x] = a0[t][j];
  #pragma unroll 1
  for (int step = SHARING / 2; step > 0; step /= 2) {
    __syncthreads();
    if ((int)threadIdx.x >= step * WIDTH) continue;
    #pragma unroll
    for (int t = 0; t < 1; t++)
      #pragma unroll
      for (int j = 0; j < VEC; j++) { gradc_add(totals0[t][j][threadIdx.x], totals0[t][j][threadIdx.x + step * WIDTH]); }
  }
  if ((int)threadIdx.x >= WIDTH) return;
  #pragma unroll
  for (int t = 0; t < 1; t++)
    #pragma unroll
    for (int j = 0; j < VEC; j++) a0[t][j] = totals0[t][j][threadIdx.x];
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
  enum { ELEMENTS = 8, WALKERS = 32 };
  const ix size = 256, e = element / (ix)blockDim.x * ELEMENTS + (ix)(threadIdx.x % ELEMENTS);
  __shared__ sum_f32 totals[256];
  sum_f32 total;
  gradc_clear(total);
  if (e < size)
    #pragma unroll 8
    for (ix c = (ix)threadIdx.x / ELEMENTS; c < chunks; c += WALKERS) gradc_add(total, partial0[c * size + e]);
  totals[threadIdx.x] = total;
  for (int step = WALKERS / 2; step > 0; step /= 2) {
    __syncthreads();
    if ((int)threadIdx.x < step * ELEMENTS) { gradc_add(totals[threadIdx.x], totals[threadIdx.x + step * ELEMENTS]); }
  }
  if ((int)threadIdx.x >= ELEMENTS || e >= size) return;
  y[e] = gradc_value(totals[threadIdx.x]);
}
