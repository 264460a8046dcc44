/*
 * scatter_add_cf34b0: test_golden.py:65
 * reads token i64[N], dy f32[N,128]
 * writes y f32[32000,128]
 * moves 520*N+16384000 bytes, computes 128*N operations
 *
 * kernel @scatter_add_cf34b0 rows(i0: N) cols(i1: 128) order(y) strategy(y: segmented) {
 *   %0 = load token[i0] : i64
 *   phase
 *   %1 = load dy[i0, i1] : f32
 *   accum y[%0, i1] <- %1 : f32
 * }
 */
/* The key of each row: the row of the result that it adds to. */
extern "C" __global__ void __launch_bounds__(256, 2) scatter_add_cf34b0_key(
  const i64 *__restrict__ const token,
  const f32 *__restrict__ const dy,
  f32 *__restrict__ const y,
  const i64 dim0, char *const workspace, u64 *const flag, const i64 site, const i64 chunk_length, const i64 aux, const i64 first_block) {
  if (aux <= 0 && gradc_stopped(flag, site)) return;
  const ix N = (ix)dim0;
  const ix rows = N;
  u32 *const sorted_keys = (u32 *)workspace;
  u32 *const sorted_rows = (u32 *)((char *)sorted_keys + gradc_align((i64)rows * 4));
  u32 *const unsorted_keys = (u32 *)((char *)sorted_rows + gradc_align((i64)rows * 4));
  const ix element = ((ix)first_block + (ix)blockIdx.x) * (ix)blockDim.x + (ix)threadIdx.x;
  if (element >= rows) return;
  const ix i0 = element;
  const i64 v0 = token[i0];
  (aux ? unsorted_keys : sorted_keys)[element] = (u32)((ix)v0);
}

/* Rows, tiled: a task has a chunk of rows x WIDTH * VEC columns. */
extern "C" __global__ void __launch_bounds__(256, 2) scatter_add_cf34b0_rows(
  const i64 *__restrict__ const token,
  const f32 *__restrict__ const dy,
  f32 *__restrict__ const y,
  const i64 dim0, char *const workspace, u64 *const flag, const i64 site, const i64 chunk_length, const i64 aux, const i64 first_block) {
  if (aux <= 0 && gradc_stopped(flag, site)) return;
  enum { WIDTH = 32 }; /* threads of a task */
  enum { VEC = 4 }; /* neighbouring columns of a thread */
  const ix N = (ix)dim0;
  const ix chunk = (ix)chunk_length;
  const ix rows = N;
  const ix cols = 128;
  const ix keys = 32000;
  const ix chunks = gradc_chunks(rows, chunk);
  u32 *const sorted_keys = (u32 *)workspace;
  u32 *const sorted_rows = (u32 *)((char *)sorted_keys + gradc_align((i64)rows * 4));
  u32 *const unsorted_keys = (u32 *)((char *)sorted_rows + gradc_align((i64)rows * 4));
  u32 *const segment_start = (u32 *)((char *)unsorted_keys + 2 * gradc_align((i64)rows * 4));
  f32 *const partial0 = (f32 *)((char *)segment_start + gradc_align((i64)(keys + 2) * 4));
  const ix element = ((ix)first_block + (ix)blockIdx.x) * (ix)blockDim.x + (ix)threadIdx.x;
  const ix task = element / WIDTH;
  const int lane = (int)(threadIdx.x % WIDTH);
  const bool even_cols = true;
  const ix col_step = even_cols ? 1 : WIDTH;
  const ix lane_col = even_cols ? lane * VEC : lane;
  const bool vectorized = even_cols && gradc_aligned(dy, 16) && gradc_aligned(y, 16);
  const ix tiles = gradc_chunks(cols, WIDTH * VEC);
  if (task >= chunks * tiles) return;
  const ix chunk_index = task / tiles, first_col = task % tiles * (WIDTH * VEC), end_col = gradc_min(first_col + WIDTH * VEC, cols);
  f32 a0[1][VEC];
  const ix end = segment_start[keys];
  const ix from = chunk_index * chunk, until = gradc_min(from + chunk, end);
  if (from >= until) return;
  const ix key_before = from > 0 ? (ix)sorted_keys[from - 1] : -1, key_after = until < end ? (ix)sorted_keys[until] : -1;
  ix segment = -1;
  #pragma unroll
  for (int t = 0; t < 1; t++)
    #pragma unroll
    for (int j = 0; j < VEC; j++) a0[t][j] = 0.0f;
  #pragma unroll 1
  for (ix group = from; group < until; group += 4) {
    gradc_vector<f32, VEC> loaded0[4];
    ix group_keys[4];
    #pragma unroll
    for (int u = 0; u < 4; u++) { /* load */
      if (group + u >= until) continue;
      const ix r = sorted_rows[group + u];
      group_keys[u] = sorted_keys[group + u];
      const ix i0 = r;
      const ix col = first_col + lane_col;
      gradc_get_vector(loaded0[u], dy + i0 * 128, col, col_step, end_col, vectorized);
    }
    #pragma unroll
    for (int u = 0; u < 4; u++) { /* phase 1: add to y */
      if (group + u >= until) continue;
      const ix key = group_keys[u];
      const bool valid = key < keys;
      if (key != segment) {
        if (segment >= 0 && segment < keys) {
          const ix carry = segment == key_before ? 2 * chunk_index : segment == key_after ? 2 * chunk_index + 1 : -1;
          #pragma unroll
          for (int t = 0; t < 1; t++) {
            const ix col = first_col + t * (WIDTH * VEC) + lane_col;
            if (col >= end_col) continue;
            if (carry >= 0) gradc_put(partial0 + carry * (128), a0[t], col, col_step, end_col, vectorized);
            else {
              f32 rounded0[VEC];
              #pragma unroll
              for (int j = 0; j < VEC; j++) rounded0[j] = a0[t][j];
              gradc_put(y + segment * (128), rounded0, col, col_step, end_col, vectorized);
            }
          }
        }
        #pragma unroll
        for (int t = 0; t < 1; t++)
          #pragma unroll
          for (int j = 0; j < VEC; j++) a0[t][j] = 0.0f;
        segment = key;
      }
      #pragma unroll
      for (int t = 0; t < 1; t++) {
        const ix col = first_col + t * (WIDTH * VEC) + lane_col;
        if (col >= end_col) continue;
        #pragma unroll
        for (int j = 0; j < VEC; j++) {
          const f32 v1 = loaded0[u].items[j];
          if (valid) gradc_add(a0[t][j], v1);
        }
      }
    }
  }
  if (segment >= 0 && segment < keys) {
    const ix carry = segment == key_before ? 2 * chunk_index : segment == key_after ? 2 * chunk_index + 1 : -1;
    #pragma unroll
    for (int t = 0; t < 1; t++) {
      const ix col = first_col + t * (WIDTH * VEC) + lane_col;
      if (col >= end_col) continue;
      if (carry >= 0) gradc_put(partial0 + carry * (128), a0[t], col, col_step, end_col, vectorized);
      else {
        f32 rounded0[VEC];
        #pragma unroll
        for (int j = 0; j < VEC; j++) rounded0[j] = a0[t][j];
        gradc_put(y + segment * (128), rounded0, col, col_step, end_col, vectorized);
      }
    }
  }
}
