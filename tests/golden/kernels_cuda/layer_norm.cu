/*
 * layer_norm_211e48: test_golden.py:60
 * reads x bf16[N,1024], gamma bf16[1024], beta bf16[1024]
 * writes y bf16[N,1024]
 * moves 4096*N+4096 bytes, computes 12293*N operations
 *
 * kernel @layer_norm_211e48 rows(i0: N) cols(i1: 1024) {
 *   phase
 *   %0 = load x[i0, i1] : bf16
 *   %1 = cast %0 {dtype=f32} : f32
 *   %2 = sum_cols %1 : f32
 *   %3 = const {value=0x1p+10} : f32
 *   %4 = div %2, %3 : f32
 *   phase
 *   %5 = sub %1, %4 : f32
 *   %6 = sum_cols %5 : f32
 *   %7 = div %6, %3 : f32
 *   phase
 *   %8 = sub %5, %7 : f32
 *   %9 = mul %8, %8 : f32
 *   %10 = sum_cols %9 : f32
 *   %11 = div %10, %3 : f32
 *   %12 = const {value=0x1.4f8b58p-17} : f32
 *   %13 = add %11, %12 : f32
 *   %14 = rsqrt %13 : f32
 *   phase
 *   %15 = mul %8, %14 : f32
 *   %16 = load gamma[i1] : bf16
 *   %17 = cast %16 {dtype=f32} : f32
 *   %18 = mul %15, %17 : f32
 *   %19 = load beta[i1] : bf16
 *   %20 = cast %19 {dtype=f32} : f32
 *   %21 = add %18, %20 : f32
 *   %22 = cast %21 {dtype=bf16} : bf16
 *   store y[i0, i1] <- %22 : bf16
 * }
 */
/* Whole rows: a task goes through those of a chunk. */
extern "C" __global__ void __launch_bounds__(256, 2) layer_norm_211e48_rows(
  const u16 *const x,
  const u16 *__restrict__ const gamma,
  const u16 *__restrict__ const beta,
  u16 *const y,
  const i64 dim0, char *const workspace, u64 *const flag, const i64 site, const i64 chunk_length, const i64 aux, const i64 first_block) {
  if (aux <= 0 && gradc_stopped(flag, site)) return;
  enum { WIDTH = 32 }; /* threads of a task */
  enum { VEC = 8 }; /* neighbouring columns of a thread */
  const ix N = (ix)dim0;
  const ix chunk = (ix)chunk_length;
  const ix rows = N;
  const ix cols = 1024;
  const ix chunks = gradc_chunks(rows, chunk);
  const ix element = ((ix)first_block + (ix)blockIdx.x) * (ix)blockDim.x + (ix)threadIdx.x;
  const ix task = element / WIDTH;
  const int lane = (int)(threadIdx.x % WIDTH);
  const bool even_cols = true;
  const ix col_step = even_cols ? 1 : WIDTH;
  const ix lane_col = even_cols ? lane * VEC : lane;
  const bool vectorized = even_cols && gradc_aligned(x, 16) && gradc_aligned(gamma, 16) && gradc_aligned(beta, 16) && gradc_aligned(y, 16);
  const ix chunk_index = task;
  const ix first_col = 0;
  const ix end_col = cols;
  if (task >= chunks) return;
  const ix from = chunk_index * chunk, until = gradc_min(from + chunk, rows);
  for (ix p = from; p < until; p++) {
    const ix r = p;
    const ix i0 = r;
    f32 kept_v1[4][VEC];
    f32 kept_v5[4][VEC];
    f32 kept_v8[4][VEC];
    gradc_vector<u16, VEC> loaded0[4];
    gradc_get_all(loaded0, x + i0 * 1024, first_col + lane_col, WIDTH * VEC, col_step, end_col, vectorized);
    /* phase 1: v2 = sum of x over the columns */
    const f32 v3 = 1024.0f;
    const f32 v12 = 1e-05f;
    sum_f32 total_v2; gradc_clear(total_v2);
    {
      const ix begin_col = first_col + lane_col;
      #pragma unroll
      for (int t = 0; t < 4; t++) {
        const ix col = begin_col + t * (WIDTH * VEC);
        f32 terms_v2[VEC] = {};
        #pragma unroll
        for (int j = 0; j < VEC; j++) {
          const f32 v0 = gradc_bf16_at(loaded0[t], j);
          const f32 v1 = (f32)v0;
          kept_v1[t][j] = v1;
          terms_v2[j] = v1;
        }
        gradc_add_all(total_v2, terms_v2);
      }
    }
    const f32 v2 = (f32)gradc_value(gradc_reduce<gradc_sum<sum_f32>, WIDTH>(total_v2, 0));
    /* phase 2: v6 = sum of sub over the columns */
    const f32 v4 = v2 / v3;
    sum_f32 total_v6; gradc_clear(total_v6);
    {
      const ix begin_col = first_col + lane_col;
      #pragma unroll
      for (int t = 0; t < 4; t++) {
        const ix col = begin_col + t * (WIDTH * VEC);
        f32 terms_v6[VEC] = {};
        #pragma unroll
        for (int j = 0; j < VEC; j++) {
          const f32 v1 = kept_v1[t][j];
          const f32 v5 = v1 - v4;
          kept_v5[t][j] = v5;
          terms_v6[j] = v5;
        }
        gradc_add_all(total_v6, terms_v6);
      }
    }
    const f32 v6 = (f32)gradc_value(gradc_reduce<gradc_sum<sum_f32>, WIDTH>(total_v6, 0));
    /* phase 3: v10 = sum of squares over the columns */
    const f32 v7 = v6 / v3;
    sum_f32 total_v10; gradc_clear(total_v10);
    {
      const ix begin_col = first_col + lane_col;
      #pragma unroll
      for (int t = 0; t < 4; t++) {
        const ix col = begin_col + t * (WIDTH * VEC);
        f32 terms_v10[VEC] = {};
        #pragma unroll
        for (int j = 0; j < VEC; j++) {
          const f32 v5 = kept_v5[t][j];
          const f32 v8 = v5 - v7;
          kept_v8[t][j] = v8;
          const f32 v9 = v8 * v8;
          terms_v10[j] = v9;
        }
        gradc_add_all(total_v10, terms_v10);
      }
    }
    const f32 v10 = (f32)gradc_value(gradc_reduce<gradc_sum<sum_f32>, WIDTH>(total_v10, 0));
    /* phase 4: store y */
    const f32 v11 = v10 / v3;
    const f32 v13 = v11 + v12;
    const f32 v14 = rsqrt_f32(v13);
    {
      const ix begin_col = first_col + lane_col;
      #pragma unroll
      for (int t = 0; t < 4; t++) {
        if (t > 0) __syncwarp(gradc_mask(WIDTH)); /* no loads begin before it: there are no registers for them */
        const ix col = begin_col + t * (WIDTH * VEC);
        gradc_vector<u16, VEC> loaded1[1];
        gradc_get_all(loaded1, gamma, col, 0, col_step, end_col, vectorized);
        gradc_vector<u16, VEC> loaded2[1];
        gradc_get_all(loaded2, beta, col, 0, col_step, end_col, vectorized);
        f32 stored3[VEC];
        #pragma unroll
        for (int j = 0; j < VEC; j++) {
          const f32 v8 = kept_v8[t][j];
          const f32 v15 = v8 * v14;
          const f32 v16 = gradc_bf16_at(loaded1[0], j);
          const f32 v17 = (f32)v16;
          const f32 v18 = v15 * v17;
          const f32 v19 = gradc_bf16_at(loaded2[0], j);
          const f32 v20 = (f32)v19;
          const f32 v21 = v18 + v20;
          stored3[j] = (f32)v21;
        }
        gradc_put_bf16(y + i0 * 1024, stored3, col, col_step, end_col, vectorized);
      }
    }
  }
}
