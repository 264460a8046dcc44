/*
 * rms_norm_17f2b6: test_golden.py:LINE
 * reads x bf16[N,768], gamma bf16[768]
 * writes y bf16[N,768]
 * moves 3072*N+1536 bytes, computes 3075*N operations
 *
 * kernel @rms_norm_17f2b6 rows(i0: N) cols(i1: 768) {
 *   phase
 *   %0 = load x[i0, i1] : bf16
 *   %1 = cast %0 {dtype=f32} : f32
 *   %2 = mul %1, %1 : f32
 *   %3 = sum_cols %2 : f32
 *   %4 = const {value=0x1.8p+9} : f32
 *   %5 = div %3, %4 : f32
 *   %6 = const {value=0x1p-23} : f32
 *   %7 = add %5, %6 : f32
 *   %8 = rsqrt %7 : f32
 *   phase
 *   %9 = mul %1, %8 : f32
 *   %10 = load gamma[i1] : bf16
 *   %11 = cast %10 {dtype=f32} : f32
 *   %12 = mul %9, %11 : f32
 *   %13 = cast %12 {dtype=bf16} : bf16
 *   store y[i0, i1] <- %13 : bf16
 * }
 */
typedef struct {
  const gradc_ctx *ctx;
  i64 site; /* the step's number, for what it reports */
  const u16 *x;
  const u16 *gamma;
  u16 *y;
  i64 N;
  i64 chunk; /* rows per task */
} rms_norm_17f2b6_args;

static void rms_norm_17f2b6_layout(rms_norm_17f2b6_args *A) {
  const i64 N = A->N, rows = N;
  const i64 balanced = maximum_i64(minimum_i64(floordiv_i64(rows, 256), 64), 8); /* 256 tasks, of 8 to 64 rows */
  A->chunk = maximum_i64(6, balanced);
}

static void rms_norm_17f2b6_rows(const void *args, i64 task) {
  const rms_norm_17f2b6_args *const A = args;
  const i64 N = A->N;
  const u16 *restrict const x = A->x;
  const u16 *restrict const gamma = A->gamma;
  u16 *restrict const y = A->y;
  const i64 rows = N, cols = 768, chunk = A->chunk;
  i64 since = 0; /* elements, since it was asked whether the call ends */
  const i64 last_row = gradc_min(task * chunk + chunk, rows);
  for (i64 r0 = task * chunk, r1; r0 < last_row; r0 = r1) {
    r1 = gradc_min(r0 + gradc_poll_rows(cols), last_row);
    for (i64 r = r0; r < r1; r++) {
      const i64 i0 = r;
      /* phase 1: v3 = sum of squares over the columns */
      const f32 v4 = 768.0f;
      const f32 v6 = 1.1920929e-07f;
      f64 total_v3 = 0;
      for (i64 c0 = 0; c0 < 768; c0 += GRADC_BLOCK) {
        const i64 c1 = gradc_min(c0 + GRADC_BLOCK, 768);
        f32 lanes_v3[33];
        for (int lane = 0; lane <= 32; lane++) lanes_v3[lane] = 0;
        {
          i64 strip = c0;
          for (; strip + 32 <= c1; strip += 32) {
            for (i64 lane0 = 0; lane0 < 32; lane0 += 32) {
              #pragma omp simd
              for (i64 lane = lane0; lane < lane0 + 32; lane++) {
                const i64 i1 = strip + lane;
                const f32 v0 = bf16_load(x[i0 * 768 + i1]);
                const f32 v1 = (f32)v0;
                const f32 v2 = v1 * v1;
                lanes_v3[lane] += v2;
              }
            }
          }
        }
        total_v3 += gradc_sum_f32(lanes_v3, 32);
      }
      const f32 v3 = (f32)total_v3;
      /* phase 2: store y */
      const f32 v5 = v3 / v4;
      const f32 v7 = v5 + v6;
      const f32 v8 = rsqrt_f32(v7);
      for (i64 c0 = 0; c0 < 768; c0 += 768) {
        const i64 c1 = 768;
        for (i64 e = 0; e < c1 - c0; e += 32) __builtin_prefetch(x + (i0 * 768 + c0 + 768) + e);
        #pragma omp simd
        for (i64 i1 = c0; i1 < c1; i1++) {
          const f32 v0 = bf16_load(x[i0 * 768 + i1]);
          const f32 v1 = (f32)v0;
          const f32 v9 = v1 * v8;
          const f32 v10 = bf16_load(gamma[i1]);
          const f32 v11 = (f32)v10;
          const f32 v12 = v9 * v11;
          const f32 v13 = bf16_round((f32)v12);
          y[i0 * 768 + i1] = bf16_store(v13);
        }
      }
    }
    if (r1 < last_row && gradc_poll(A->ctx, &since, GRADC_POLL)) return;
  }
}

GRADC_SHARED int rms_norm_17f2b6(const gradc_ctx *ctx, void *const *buffers, const i64 *dims, char *workspace, i64 site) {
  rms_norm_17f2b6_args args = {
    .ctx = ctx, .site = site,
    .x = buffers[0],
    .gamma = buffers[1],
    .y = buffers[2],
    .N = dims[0],
  };
  rms_norm_17f2b6_layout(&args);
  const rms_norm_17f2b6_args *const A = &args;
  const i64 N = A->N, rows = N, chunk = A->chunk, chunks = gradc_chunks(rows, chunk);
  ctx->parallel_for(ctx, chunks, rms_norm_17f2b6_rows, A);
  return 0;
}
