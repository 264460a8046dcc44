/*
 * mul_1d83d6: test_golden.py:LINE
 * reads x f32[N,D], gate f32[D]
 * writes y f32[N,D]
 * moves 8*D*N+4*D bytes, computes 3*D*N operations
 *
 * kernel @mul_1d83d6 rows(i0: N) cols(i1: D) {
 *   phase
 *   %0 = load x[i0, i1] : f32
 *   %1 = sigmoid %0 : f32
 *   %2 = mul %0, %1 : f32
 *   %3 = load gate[i1] : f32
 *   %4 = mul %2, %3 : f32
 *   store y[i0, i1] <- %4 : f32
 * }
 */
typedef struct {
  const gradc_ctx *ctx;
  i64 site; /* the step's number, for what it reports */
  const f32 *x;
  const f32 *gate;
  f32 *y;
  i64 N, D;
  i64 chunk; /* rows per task */
} mul_1d83d6_args;

static void mul_1d83d6_layout(mul_1d83d6_args *A) {
  const i64 N = A->N, D = A->D, rows = N, cols = D;
  const i64 worthwhile = minimum_i64((floordiv_i64(4095, maximum_i64(1, cols)) + 1), 128); /* as many rows as have 4096 elements, 128 at most */
  const i64 balanced = maximum_i64(minimum_i64(floordiv_i64(rows, 256), 64), 8); /* 256 tasks, of 8 to 64 rows */
  A->chunk = maximum_i64(balanced, worthwhile);
}

static i64 mul_1d83d6_thread_bytes(const mul_1d83d6_args *A) {
  const i64 D = A->D;
  i64 bytes = 0;
  bytes += gradc_align((D * (i64)sizeof(f32) >= GRADC_STREAMED_ROW ? GRADC_BLOCK : 0) * (i64)sizeof(f32));
  return bytes;
}

GRADC_SHARED i64 mul_1d83d6_local_bytes(const i64 *dims) {
  mul_1d83d6_args args = { .N = dims[0], .D = dims[1] };
  mul_1d83d6_layout(&args);
  return mul_1d83d6_thread_bytes(&args);
}

static void mul_1d83d6_rows(const void *args, i64 task) {
  const mul_1d83d6_args *const A = args;
  const i64 N = A->N, D = A->D;
  const f32 *restrict const x = A->x;
  const f32 *restrict const gate = A->gate;
  f32 *restrict const y = A->y;
  const i64 rows = N, cols = D, chunk = A->chunk;
  char *memory = A->ctx->local(A->ctx, mul_1d83d6_thread_bytes(A));
  if (!memory) return;
  f32 *restrict const staged0 = gradc_take(&memory, (D * (i64)sizeof(f32) >= GRADC_STREAMED_ROW ? GRADC_BLOCK : 0) * (i64)sizeof(f32));
  const int stream0 = (D * N) * (i64)sizeof(f32) >= A->ctx->stream_from && D * (i64)sizeof(f32) >= GRADC_STREAMED_ROW;
  const i64 strips = gradc_chunks(cols, GRADC_STRIP);
  const i64 first_row = task / strips * chunk, last_row = gradc_min(first_row + chunk, rows);
  const i64 first_col = task % strips * GRADC_STRIP;
  const i64 last_col = gradc_min(first_col + GRADC_STRIP, cols);
  for (i64 r = first_row; r < last_row; r++) {
    const i64 i0 = r;
    /* phase 1: store y */
    for (i64 c0 = first_col; c0 < last_col; c0 += GRADC_STAGED) {
      const i64 c1 = gradc_min(c0 + GRADC_STAGED, last_col);
      f32 *restrict const out0 = stream0 ? staged0 : y + (i0 * D + c0);
      #pragma omp simd
      for (i64 i1 = c0; i1 < c1; i1++) {
        const f32 v0 = x[i0 * D + i1];
        const f32 v1 = sigmoid_f32(v0);
        const f32 v2 = v0 * v1;
        const f32 v3 = gate[i1];
        const f32 v4 = v2 * v3;
        out0[i1 - c0] = v4;
      }
      if (stream0) gradc_stream(y + (i0 * D + c0), staged0, (c1 - c0) * (i64)sizeof(f32));
    }
  }
  gradc_stream_fence();
}

GRADC_SHARED int mul_1d83d6(const gradc_ctx *ctx, void *const *buffers, const i64 *dims, char *workspace, i64 site) {
  mul_1d83d6_args args = {
    .ctx = ctx, .site = site,
    .x = buffers[0],
    .gate = buffers[1],
    .y = buffers[2],
    .N = dims[0], .D = dims[1],
  };
  mul_1d83d6_layout(&args);
  const mul_1d83d6_args *const A = &args;
  const i64 N = A->N, D = A->D, rows = N, cols = D, chunk = A->chunk;
  ctx->parallel_for(ctx, gradc_chunks(rows, chunk) * gradc_chunks(cols, GRADC_STRIP), mul_1d83d6_rows, A);
  return 0;
}
