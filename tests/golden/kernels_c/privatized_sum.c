/*
 * sum_60acaf: test_golden.py:LINE
 * reads x f32[N,D]
 * writes y f32[D]
 * moves 4*D*N+4*D bytes, computes D*N operations
 *
 * kernel @sum_60acaf rows(i0: N) cols(i1: D) strategy(y: privatized) {
 *   phase
 *   %0 = load x[i0, i1] : f32
 *   accum y[i1] <- %0 : f32
 * }
 */
typedef struct {
  const gradc_ctx *ctx;
  i64 site; /* the step's number, for what it reports */
  const f32 *x;
  f32 *y;
  i64 N, D;
  i64 chunk; /* rows per task */
  f64 *partial0;
} sum_60acaf_args;

static i64 sum_60acaf_layout(sum_60acaf_args *A, char *workspace) {
  const i64 N = A->N, D = A->D, rows = N, cols = D, size0 = D;
  const i64 worthwhile = minimum_i64((floordiv_i64(4095, maximum_i64(1, cols)) + 1), 128); /* as many rows as have 4096 elements, 128 at most */
  const i64 balanced = maximum_i64(minimum_i64(floordiv_i64(rows, 256), 64), 8); /* 256 tasks, of 8 to 64 rows */
  const i64 affordable = (floordiv_i64((rows - 1), maximum_i64(floordiv_i64(4194304, maximum_i64(1, size0)), 1)) + 1); /* so few tasks that their partial results have 4194304 elements at most */
  const i64 chunk = maximum_i64(affordable, maximum_i64(balanced, worthwhile));
  const i64 chunks = gradc_chunks(rows, chunk);
  A->chunk = chunk;
  char *end = workspace;
  A->partial0 = gradc_take(&end, (chunks * D) * (i64)sizeof(f64));
  return end - workspace;
}

static i64 sum_60acaf_thread_bytes(const sum_60acaf_args *A) {
  const i64 D = A->D;
  i64 bytes = 0;
  bytes += gradc_align(D * (i64)sizeof(f32));
  return bytes;
}

GRADC_SHARED i64 sum_60acaf_workspace_bytes(const i64 *dims) {
  sum_60acaf_args args = { .N = dims[0], .D = dims[1] };
  return sum_60acaf_layout(&args, 0);
}
GRADC_SHARED i64 sum_60acaf_local_bytes(const i64 *dims) {
  sum_60acaf_args args = { .N = dims[0], .D = dims[1] };
  sum_60acaf_layout(&args, 0);
  return sum_60acaf_thread_bytes(&args);
}

static void sum_60acaf_rows(const void *args, i64 task) {
  const sum_60acaf_args *const A = args;
  const i64 N = A->N, D = A->D;
  const f32 *restrict const x = A->x;
  const i64 rows = N, cols = D, chunk = A->chunk;
  f64 *const partial0 = A->partial0;
  i64 since = 0; /* elements, since it was asked whether the call ends */
  f64 *restrict const acc0 = partial0 + task * D;
  for (i64 e0 = 0, e1; e0 < D; e0 = e1) {
    e1 = gradc_min(e0 + GRADC_POLL, D);
    for (i64 e = e0; e < e1; e++) acc0[e] = 0.0f;
    if (gradc_poll(A->ctx, &since, e1 - e0)) return;
  }
  char *memory = A->ctx->local(A->ctx, sum_60acaf_thread_bytes(A));
  if (!memory) return;
  f32 *restrict const block0 = gradc_take(&memory, D * (i64)sizeof(f32));
  for (i64 e = 0; e < D; e++) block0[e] = 0;
  i64 block_rows = 0; /* rows in the block sums */
  const i64 last_row = gradc_min(task * chunk + chunk, rows);
  for (i64 r0 = task * chunk, r1; r0 < last_row; r0 = r1) {
    r1 = gradc_min(r0 + gradc_poll_rows(cols), last_row);
    for (i64 r = r0; r < r1; r++) {
      const i64 i0 = r;
      /* phase 1: add to y */
      for (i64 c0 = 0; c0 < D; c0 += GRADC_POLL) {
        const i64 c1 = gradc_min(c0 + GRADC_POLL, D);
        #pragma omp simd
        for (i64 i1 = c0; i1 < c1; i1++) {
          const f32 v0 = x[i0 * D + i1];
          block0[i1] += v0;
        }
        if (c1 < D && gradc_poll(A->ctx, &since, c1 - c0)) return;
      }
      if (++block_rows == GRADC_BLOCK_ROWS) {
        block_rows = 0;
        #pragma omp simd
        for (i64 e = 0; e < D; e++) acc0[e] += block0[e], block0[e] = 0;
      }
    }
    if (r1 < last_row && gradc_poll(A->ctx, &since, GRADC_POLL)) return;
  }
  #pragma omp simd
  for (i64 e = 0; e < D; e++) acc0[e] += block0[e], block0[e] = 0;
}

static void sum_60acaf_fold0(const void *args, i64 task) {
  const sum_60acaf_args *const A = args;
  const i64 N = A->N, D = A->D;
  f32 *restrict const y = A->y;
  const i64 rows = N, chunk = A->chunk, chunks = gradc_chunks(rows, chunk);
  f64 *const partial0 = A->partial0;
  const i64 size = D;
  for (i64 e0 = task * GRADC_FOLD; e0 < gradc_min(task * GRADC_FOLD + GRADC_FOLD, size); e0 += GRADC_TOTALS) {
    const i64 count = gradc_min(GRADC_TOTALS, size - e0);
    f64 total[GRADC_TOTALS];
    for (i64 e = 0; e < count; e++) total[e] = 0.0;
    for (i64 c = 0; c < chunks; c++)
      #pragma omp simd
      for (i64 e = 0; e < count; e++) total[e] += partial0[c * size + e0 + e];
    for (i64 e = 0; e < count; e++) y[e0 + e] = (f32)total[e];
  }
}

GRADC_SHARED int sum_60acaf(const gradc_ctx *ctx, void *const *buffers, const i64 *dims, char *workspace, i64 site) {
  sum_60acaf_args args = {
    .ctx = ctx, .site = site,
    .x = buffers[0],
    .y = buffers[1],
    .N = dims[0], .D = dims[1],
  };
  sum_60acaf_layout(&args, workspace);
  const sum_60acaf_args *const A = &args;
  const i64 N = A->N, D = A->D, rows = N, chunk = A->chunk, chunks = gradc_chunks(rows, chunk);
  ctx->parallel_for(ctx, chunks, sum_60acaf_rows, A);
  ctx->parallel_for(ctx, gradc_chunks(D, GRADC_FOLD), sum_60acaf_fold0, A);
  return 0;
}
