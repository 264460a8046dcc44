/*
 * scatter_add_6afce2: test_golden.py:LINE
 * reads labels i64[N], rows_ f32[N,16]
 * writes y f32[1000,16]
 * moves 72*N+64000 bytes, computes 16*N operations
 *
 * kernel @scatter_add_6afce2 rows(i0: N) cols(i1: 16) order(y) strategy(y: segmented) {
 *   %0 = load labels[i0] : i64
 *   phase
 *   %1 = load rows_[i0, i1] : f32
 *   accum y[%0, i1] <- %1 : f32
 * }
 */
typedef struct {
  const gradc_ctx *ctx;
  i64 site; /* the step's number, for what it reports */
  const i64 *labels;
  const f32 *rows_;
  f32 *y;
  i64 N;
  i64 chunk; /* rows per task */
  i32 *key;
  i32 *order;
  i32 *start;
  char *sorting;
  f32 *partial0;
} scatter_add_6afce2_args;

static i64 scatter_add_6afce2_layout(scatter_add_6afce2_args *A, char *workspace) {
  const i64 N = A->N, rows = N, keys = 1000, chunk = 128, chunks = gradc_chunks(rows, chunk);
  A->chunk = chunk;
  char *end = workspace;
  A->key = gradc_take(&end, rows * (i64)sizeof(i32));
  A->order = gradc_take(&end, rows * (i64)sizeof(i32));
  A->start = gradc_take(&end, (keys + 2) * (i64)sizeof(i32));
  A->sorting = gradc_take(&end, (gradc_sort_bytes(rows, keys)) * (i64)sizeof(char));
  A->partial0 = gradc_take(&end, (2 * chunks * 16) * (i64)sizeof(f32));
  return end - workspace;
}

GRADC_SHARED i64 scatter_add_6afce2_workspace_bytes(const i64 *dims) {
  scatter_add_6afce2_args args = { .N = dims[0] };
  return scatter_add_6afce2_layout(&args, 0);
}

static void scatter_add_6afce2_key(const void *args, i64 task) {
  const scatter_add_6afce2_args *const A = args;
  const i64 N = A->N;
  const i64 *restrict const labels = A->labels;
  const i64 rows = N;
  i32 *const key = A->key;
  const i64 first = task * GRADC_KEY_ROWS, last = gradc_min(first + GRADC_KEY_ROWS, rows);
  for (i64 r = first; r < last; r++) {
    const i64 i0 = r;
    const i64 v0 = labels[i0];
    key[r] = (i32)((i64)v0);
  }
}

static void scatter_add_6afce2_rows(const void *args, i64 task) {
  const scatter_add_6afce2_args *const A = args;
  const i64 N = A->N;
  const f32 *restrict const rows_ = A->rows_;
  f32 *restrict const y = A->y;
  const i64 rows = N, keys = 1000, chunk = A->chunk, chunks = gradc_chunks(rows, chunk);
  i32 *const key = A->key;
  i32 *const order = A->order;
  i32 *const start = A->start;
  f32 *const partial0 = A->partial0;
  const int distant = 16 * N * (i64)sizeof(*rows_) >= GRADC_DISTANT; /* what rows gather: it is asked for rows ahead */
  const i64 first = task * gradc_together(chunks) * chunk, last = gradc_min(first + gradc_together(chunks) * chunk, start[keys]);
  f32 *restrict target0 = 0;
  for (i64 run_first = first, run_last; run_first < last; run_first = run_last) { /* the rows of a segment in a chunk, or all of one that is no longer */
    const i64 to = key[order[run_first]];
    const i64 part = gradc_whole(start, to, chunk) ? -1 : run_first / chunk; /* the chunk of a longer one */
    const i64 carry = part < 0 ? -1 : start[to] < part * chunk ? 2 * part : 2 * part + 1;
    run_last = carry < 0 ? start[to + 1] : gradc_min((part + 1) * chunk, start[to + 1]);
    if (carry < 0 && start[to] < first) continue; /* the task before has it */
    target0 = carry < 0 ? y + to * 16 : partial0 + carry * 16;
    if (run_last <= run_first) __builtin_unreachable(); /* a run has a row: sums of none would be stored, and read again behind all of them */
    {
      i64 c0 = 0;
      for (; c0 + 16 <= 16; c0 += 16) {
        f32 sum0[16];
        #pragma GCC unroll 16
        for (i64 lane0 = 0; lane0 < 16; lane0 += gradc_min(16, GRADC_VECTOR / 4))
          #pragma omp simd
          for (i64 e = lane0; e < lane0 + gradc_min(16, GRADC_VECTOR / 4); e++) sum0[e] = 0;
        for (i64 q = run_first; q < run_last; q++) {
          if (distant && c0 == 0) {
            if (q + GRADC_AHEAD < rows) {
              const i64 r = order[q + GRADC_AHEAD];
              __builtin_prefetch(key + r);
              const i64 i0 = r;
              __builtin_prefetch(rows_ + i0 * 16, 0, 2);
              if ((u64)(rows_ + i0 * 16) % 64) __builtin_prefetch(rows_ + i0 * 16 + 15, 0, 2);
            }
          }
          const i64 r = order[q];
          const i64 i0 = r;
          #pragma GCC unroll 16
          for (i64 lane0 = 0; lane0 < 16; lane0 += gradc_min(16, GRADC_VECTOR / 4))
            #pragma omp simd
            for (i64 e = lane0; e < lane0 + gradc_min(16, GRADC_VECTOR / 4); e++) {
            const i64 i1 = c0 + e;
            const f32 v1 = rows_[i0 * 16 + i1];
            sum0[e] = (f32)(sum0[e] + v1);
          }
        }
        {
          #pragma GCC unroll 16
          for (i64 lane0 = 0; lane0 < 16; lane0 += gradc_min(16, GRADC_VECTOR / 4))
            #pragma omp simd
            for (i64 e = lane0; e < lane0 + gradc_min(16, GRADC_VECTOR / 4); e++) {
            const i64 i1 = c0 + e;
            target0[i1] = GRADC_VALUE(sum0[e]);
          }
        }
      }
    }
  }
}

static void scatter_add_6afce2_finish(const void *args, i64 task) {
  const scatter_add_6afce2_args *const A = args;
  f32 *restrict const y = A->y;
  const i64 keys = 1000, chunk = A->chunk;
  i32 *const start = A->start;
  f32 *const partial0 = A->partial0;
  for (i64 segment = task * GRADC_SEGMENTS; segment < gradc_min(task * GRADC_SEGMENTS + GRADC_SEGMENTS, keys); segment++) {
    const i64 first = start[segment], last = start[segment + 1];
    if (last > first && gradc_whole(start, segment, chunk)) continue; /* the task where it begins has written it */
    {
      f32 *restrict const row = y + segment * 16;
      const i64 inner = 16;
      if (last == first) {
        for (i64 e = 0; e < inner; e++) row[e] = 0.0f;
      } else {
        for (i64 e0 = 0; e0 < inner; e0 += GRADC_TOTALS) {
          const i64 count = gradc_min(GRADC_TOTALS, inner - e0);
          f64 total[GRADC_TOTALS];
          for (i64 e = 0; e < count; e++) total[e] = partial0[(2 * (first / chunk) + 1) * inner + e0 + e];
          for (i64 c = first / chunk + 1; c <= (last - 1) / chunk; c++)
            for (i64 e = 0; e < count; e++) total[e] += partial0[2 * c * inner + e0 + e];
          for (i64 e = 0; e < count; e++) row[e0 + e] = (f32)total[e];
        }
      }
    }
  }
}

GRADC_SHARED int scatter_add_6afce2(const gradc_ctx *ctx, void *const *buffers, const i64 *dims, char *workspace, i64 site) {
  scatter_add_6afce2_args args = {
    .ctx = ctx, .site = site,
    .labels = buffers[0],
    .rows_ = buffers[1],
    .y = buffers[2],
    .N = dims[0],
  };
  scatter_add_6afce2_layout(&args, workspace);
  const scatter_add_6afce2_args *const A = &args;
  const i64 N = A->N, rows = N, keys = 1000, chunk = A->chunk, chunks = gradc_chunks(rows, chunk);
  i32 *const key = A->key;
  i32 *const order = A->order;
  i32 *const start = A->start;
  char *const sorting = A->sorting;
  ctx->parallel_for(ctx, gradc_chunks(rows, GRADC_KEY_ROWS), scatter_add_6afce2_key, A);
  gradc_sort(ctx, key, rows, keys, start, order, sorting);
  ctx->parallel_for(ctx, gradc_chunks(start[keys], gradc_together(chunks) * chunk), scatter_add_6afce2_rows, A);
  ctx->parallel_for(ctx, gradc_chunks(keys, GRADC_SEGMENTS), scatter_add_6afce2_finish, A);
  return 0;
}
