/*
 * check_67ca52
 * reads tokens i64[N]
 * moves 8*N bytes, computes 0 operations
 *
 * kernel @check_67ca52 rows() cols(i0: N) {
 *   phase
 *   %0 = load tokens[i0] : i64
 *   check %0 {bound=V, op="embedding", source=""}
 * }
 */
typedef struct {
  const gradc_ctx *ctx;
  i64 site; /* the step's number, for what it reports */
  const i64 *tokens;
  i64 N, V;
  i64 chunk; /* rows per task */
} check_67ca52_args;

static void check_67ca52_layout(check_67ca52_args *A) {
  const i64 N = A->N;
  const i64 cols = N;
  A->chunk = maximum_i64((floordiv_i64(4095, maximum_i64(1, cols)) - 1 * maximum_i64((floordiv_i64(4095, maximum_i64(1, cols)) + 1), 128) + 129), 8);
}

static void check_67ca52_rows(const void *args, i64 task) {
  const check_67ca52_args *const A = args;
  const i64 N = A->N;
  const i64 V = A->V;
  const i64 *restrict const tokens = A->tokens;
  const i64 rows = 1;
  const i64 cols = N;
  const i64 chunk = A->chunk;
  const i64 strips = gradc_chunks(cols, GRADC_STRIP);
  const i64 first_row = task / strips * chunk, last_row = gradc_min(first_row + chunk, rows);
  const i64 first_col = task % strips * GRADC_STRIP, last_col = gradc_min(first_col + GRADC_STRIP, cols);
  for (i64 r = first_row; r < last_row; r++) {
    /* phase 1: check indices */
    for (i64 i0 = first_col; i0 < last_col; i0++) {
      const i64 v0 = tokens[i0];
      if ((u64)v0 >= (u64)V) gradc_report(A->ctx, GRADC_INDEX_OUT_OF_RANGE, A->site, i0, v0, V);
    }
  }
}

GRADC_SHARED int check_67ca52(const gradc_ctx *ctx, void *const *buffers, const i64 *dims, char *workspace, i64 site) {
  check_67ca52_args args = {
    .ctx = ctx,
    .site = site,
    .tokens = buffers[0],
    .N = dims[0],
    .V = dims[1],
  };
  check_67ca52_layout(&args);
  const check_67ca52_args *const A = &args;
  const i64 N = A->N;
  const i64 rows = 1;
  const i64 cols = N;
  const i64 chunk = A->chunk;
  ctx->parallel_for(ctx, gradc_chunks(rows, chunk) * gradc_chunks(cols, GRADC_STRIP), check_67ca52_rows, A);
  return gradc_failed(ctx);
}

/*
 * gelu_layer_norm_grad_5db000: test_golden.py:20
 * reads tokens i64[N], table i8[V,16], scale f32[V,1], gamma f32[16]
 * writes r_sum f32[N], r_sum2 f32[N], r_sum3 f32[N], y f32[N,16]
 * moves 104*N+64 bytes, computes 565*N operations
 *
 * kernel @gelu_layer_norm_grad_5db000 rows(i0: N) cols(i1: 16) {
 *   %0 = load tokens[i0] : i64
 *   phase
 *   %1 = load table[%0, i1] : i8
 *   %2 = cast %1 {dtype=f32} : f32
 *   %3 = load scale[%0, 0] : f32
 *   %4 = mul %2, %3 : f32
 *   %5 = const {value=0x1.6a09e6p-1} : f32
 *   %6 = mul %4, %5 : f32
 *   %7 = erf %6 : f32
 *   %8 = const {value=0x1p+0} : f32
 *   %9 = add %7, %8 : f32
 *   %10 = const {value=0x1p-1} : f32
 *   %11 = mul %9, %10 : f32
 *   %12 = mul %4, %11 : f32
 *   %13 = sum_cols %12 : f32
 *   store r_sum[i0] <- %13 : f32
 *   %14 = const {value=0x1p+4} : f32
 *   %15 = div %13, %14 : f32
 *   phase
 *   %16 = sub %12, %15 : f32
 *   %17 = sum_cols %16 : f32
 *   store r_sum2[i0] <- %17 : f32
 *   %18 = div %17, %14 : f32
 *   phase
 *   %19 = sub %16, %18 : f32
 *   %20 = mul %19, %19 : f32
 *   %21 = sum_cols %20 : f32
 *   store r_sum3[i0] <- %21 : f32
 *   %22 = div %21, %14 : f32
 *   %23 = const {value=0x1.4f8b58p-17} : f32
 *   %24 = add %22, %23 : f32
 *   %25 = rsqrt %24 : f32
 *   phase
 *   %26 = mul %19, %25 : f32
 *   %27 = load gamma[i1] : f32
 *   %28 = mul %26, %27 : f32
 *   store y[i0, i1] <- %28 : f32
 * }
 */
typedef struct {
  const gradc_ctx *ctx;
  i64 site; /* the step's number, for what it reports */
  const i64 *tokens;
  const i8 *table;
  const f32 *scale;
  f32 *r_sum;
  f32 *r_sum2;
  f32 *r_sum3;
  const f32 *gamma;
  f32 *y;
  i64 N, V;
  i64 chunk; /* rows per task */
} gelu_layer_norm_grad_5db000_args;

static void gelu_layer_norm_grad_5db000_layout(gelu_layer_norm_grad_5db000_args *A) {
  A->chunk = 128;
}

static i64 gelu_layer_norm_grad_5db000_thread_bytes(const gelu_layer_norm_grad_5db000_args *A) {
  const i64 cols = 16;
  i64 bytes = 0;
  bytes += gradc_align(cols * (i64)sizeof(f32));
  bytes += gradc_align(cols * (i64)sizeof(f32));
  bytes += gradc_align(cols * (i64)sizeof(f32));
  bytes += gradc_align(GRADC_BLOCK * (i64)sizeof(f32));
  return bytes;
}

GRADC_SHARED i64 gelu_layer_norm_grad_5db000_local_bytes(const i64 *dims) {
  gelu_layer_norm_grad_5db000_args args = { .N = dims[0], .V = dims[1] };
  gelu_layer_norm_grad_5db000_layout(&args);
  return gelu_layer_norm_grad_5db000_thread_bytes(&args);
}

static void gelu_layer_norm_grad_5db000_rows(const void *args, i64 task) {
  const gelu_layer_norm_grad_5db000_args *const A = args;
  const i64 N = A->N;
  const i64 *restrict const tokens = A->tokens;
  const i8 *restrict const table = A->table;
  const f32 *restrict const scale = A->scale;
  f32 *restrict const r_sum = A->r_sum;
  f32 *restrict const r_sum2 = A->r_sum2;
  f32 *restrict const r_sum3 = A->r_sum3;
  const f32 *restrict const gamma = A->gamma;
  f32 *restrict const y = A->y;
  const i64 rows = N;
  const i64 cols = 16;
  const i64 chunk = A->chunk;
  i64 since = 0; /* elements, since it was asked whether the call ends */
  char *memory = A->ctx->local(A->ctx, gelu_layer_norm_grad_5db000_thread_bytes(A));
  if (!memory) return;
  f32 *restrict const cache0 = gradc_take(&memory, cols * (i64)sizeof(f32));
  f32 *restrict const cache1 = gradc_take(&memory, cols * (i64)sizeof(f32));
  f32 *restrict const cache2 = gradc_take(&memory, cols * (i64)sizeof(f32));
  f32 *restrict const staged0 = gradc_take(&memory, GRADC_BLOCK * (i64)sizeof(f32));
  const int stream0 = (16 * N) * (i64)sizeof(f32) >= A->ctx->stream_from;
  const i64 last_row = gradc_min(task * chunk + chunk, rows);
  for (i64 r0 = task * chunk, r1; r0 < last_row; r0 = r1) {
    r1 = gradc_min(r0 + gradc_poll_rows(cols), last_row);
    for (i64 r = r0; r < r1; r++) {
      const i64 i0 = r;
      /* phase 1: sum of mul over the columns */
      const i64 v0 = tokens[i0];
      const f32 v3 = scale[(i64)v0];
      const f32 v5 = 0.70710677f;
      const f32 v8 = 1.0f;
      const f32 v10 = 0.5f;
      const f32 v14 = 16.0f;
      const f32 v23 = 1e-05f;
      f64 total_v13 = 0;
      for (i64 c0 = 0; c0 < 16; c0 += GRADC_BLOCK) {
        const i64 c1 = gradc_min(c0 + GRADC_BLOCK, 16);
        f64 block_v13 = 0;
        #pragma omp simd reduction(+:block_v13)
        for (i64 i1 = c0; i1 < c1; i1++) {
          const i8 v1 = table[((i64)v0 * 16 + i1)];
          const f32 v2 = (f32)v1;
          const f32 v4 = v2 * v3;
          const f32 v6 = v4 * v5;
          const f32 v7 = erf_f32(v6);
          const f32 v9 = v7 + v8;
          const f32 v11 = v9 * v10;
          const f32 v12 = v4 * v11;
          cache0[i1] = v12;
          block_v13 += v12;
        }
        total_v13 += block_v13;
      }
      const f32 v13 = (f32)total_v13;
      /* phase 2: sum of sub over the columns; store r_sum */
      r_sum[i0] = v13;
      const f32 v15 = v13 / v14;
      f64 total_v17 = 0;
      for (i64 c0 = 0; c0 < 16; c0 += GRADC_BLOCK) {
        const i64 c1 = gradc_min(c0 + GRADC_BLOCK, 16);
        f64 block_v17 = 0;
        #pragma omp simd reduction(+:block_v17)
        for (i64 i1 = c0; i1 < c1; i1++) {
          const f32 v12 = cache0[i1];
          const f32 v16 = v12 - v15;
          cache1[i1] = v16;
          block_v17 += v16;
        }
        total_v17 += block_v17;
      }
      const f32 v17 = (f32)total_v17;
      /* phase 3: sum of squares over the columns; store r_sum2 */
      r_sum2[i0] = v17;
      const f32 v18 = v17 / v14;
      f64 total_v21 = 0;
      for (i64 c0 = 0; c0 < 16; c0 += GRADC_BLOCK) {
        const i64 c1 = gradc_min(c0 + GRADC_BLOCK, 16);
        f64 block_v21 = 0;
        #pragma omp simd reduction(+:block_v21)
        for (i64 i1 = c0; i1 < c1; i1++) {
          const f32 v16 = cache1[i1];
          const f32 v19 = v16 - v18;
          cache2[i1] = v19;
          const f32 v20 = v19 * v19;
          block_v21 += v20;
        }
        total_v21 += block_v21;
      }
      const f32 v21 = (f32)total_v21;
      /* phase 4: store r_sum3, y */
      r_sum3[i0] = v21;
      const f32 v22 = v21 / v14;
      const f32 v24 = v22 + v23;
      const f32 v25 = rsqrt_f32(v24);
      for (i64 c0 = 0; c0 < 16; c0 += GRADC_STAGED) {
        const i64 c1 = gradc_min(c0 + GRADC_STAGED, 16);
        f32 *restrict const out0 = stream0 ? staged0 : y + (i0 * 16 + c0);
        #pragma omp simd
        for (i64 i1 = c0; i1 < c1; i1++) {
          const f32 v19 = cache2[i1];
          const f32 v26 = v19 * v25;
          const f32 v27 = gamma[i1];
          const f32 v28 = v26 * v27;
          out0[i1 - c0] = v28;
        }
        if (stream0) gradc_stream(y + (i0 * 16 + c0), staged0, (c1 - c0) * (i64)sizeof(f32));
      }
    }
    if (r1 < last_row && gradc_poll(A->ctx, &since, GRADC_POLL)) return;
  }
  gradc_stream_fence();
}

GRADC_SHARED int gelu_layer_norm_grad_5db000(const gradc_ctx *ctx, void *const *buffers, const i64 *dims, char *workspace, i64 site) {
  gelu_layer_norm_grad_5db000_args args = {
    .ctx = ctx,
    .site = site,
    .tokens = buffers[0],
    .table = buffers[1],
    .scale = buffers[2],
    .r_sum = buffers[3],
    .r_sum2 = buffers[4],
    .r_sum3 = buffers[5],
    .gamma = buffers[6],
    .y = buffers[7],
    .N = dims[0],
    .V = dims[1],
  };
  gelu_layer_norm_grad_5db000_layout(&args);
  const gelu_layer_norm_grad_5db000_args *const A = &args;
  const i64 N = A->N;
  const i64 rows = N;
  const i64 chunk = A->chunk;
  const i64 chunks = gradc_chunks(rows, chunk);
  ctx->parallel_for(ctx, chunks, gelu_layer_norm_grad_5db000_rows, A);
  return 0;
}

/*
 * layer_norm_gelu_sum_grad_8ffb11
 * reads tokens i64[N], d_y f32[N,16], gamma f32[16], table i8[V,16], scale f32[V,1], r_sum f32[N], r_sum2 f32[N], r_sum3 f32[N]
 * writes d_scale f32[V,1], d_gamma f32[16]
 * moves 104*N+4*V+128 bytes, computes 602*N operations
 *
 * kernel @layer_norm_gelu_sum_grad_8ffb11 rows(i0: N) cols(i1: 16) order(d_scale) strategy(d_scale: segmented, d_gamma: privatized) {
 *   %0 = load tokens[i0] : i64
 *   %1 = const {value=0} : i64
 *   %2 = ne %0, %1 : bool
 *   phase
 *   %3 = load d_y[i0, i1] : f32
 *   %4 = load gamma[i1] : f32
 *   %5 = mul %3, %4 : f32
 *   %6 = sum_cols %5 : f32
 *   %7 = const {value=0x1p+4} : f32
 *   %8 = div %6, %7 : f32
 *   phase
 *   %9 = sub %5, %8 : f32
 *   %10 = load table[%0, i1] : i8
 *   %11 = cast %10 {dtype=f32} : f32
 *   %12 = load scale[%0, 0] : f32
 *   %13 = mul %11, %12 : f32
 *   %14 = const {value=0x1.6a09e6p-1} : f32
 *   %15 = mul %13, %14 : f32
 *   %16 = erf %15 : f32
 *   %17 = const {value=0x1p+0} : f32
 *   %18 = add %16, %17 : f32
 *   %19 = const {value=0x1p-1} : f32
 *   %20 = mul %18, %19 : f32
 *   %21 = mul %13, %20 : f32
 *   %22 = load r_sum[i0] : f32
 *   %23 = div %22, %7 : f32
 *   %24 = sub %21, %23 : f32
 *   %25 = load r_sum2[i0] : f32
 *   %26 = div %25, %7 : f32
 *   %27 = sub %24, %26 : f32
 *   %28 = load r_sum3[i0] : f32
 *   %29 = div %28, %7 : f32
 *   %30 = const {value=0x1.4f8b58p-17} : f32
 *   %31 = add %29, %30 : f32
 *   %32 = rsqrt %31 : f32
 *   %33 = mul %27, %32 : f32
 *   %34 = mul %5, %33 : f32
 *   %35 = sum_cols %34 : f32
 *   %36 = div %35, %7 : f32
 *   %37 = mul %33, %36 : f32
 *   %38 = sub %9, %37 : f32
 *   %39 = mul %13, %13 : f32
 *   %40 = const {value=-0x1p-1} : f32
 *   %41 = mul %39, %40 : f32
 *   %42 = exp %41 : f32
 *   %43 = const {value=0x1.988454p-2} : f32
 *   %44 = mul %42, %43 : f32
 *   %45 = mul %13, %44 : f32
 *   %46 = add %20, %45 : f32
 *   %47 = mul %38, %46 : f32
 *   %48 = mul %47, %11 : f32
 *   %49 = sum_cols %48 : f32
 *   %50 = mul %49, %32 : f32
 *   accum d_scale[%0, 0] <- %50 where %2 : f32
 *   %51 = mul %3, %33 : f32
 *   accum d_gamma[i1] <- %51 : f32
 * }
 */
typedef struct {
  const gradc_ctx *ctx;
  i64 site; /* the step's number, for what it reports */
  const i64 *tokens;
  const f32 *d_y;
  const f32 *gamma;
  const i8 *table;
  const f32 *scale;
  const f32 *r_sum;
  const f32 *r_sum2;
  const f32 *r_sum3;
  f32 *d_scale;
  f32 *d_gamma;
  i64 N, V;
  i64 chunk; /* rows per task */
  i32 *key;
  i32 *order;
  i32 *start;
  f32 *partial0;
  f64 *partial1;
} layer_norm_gelu_sum_grad_8ffb11_args;

static i64 layer_norm_gelu_sum_grad_8ffb11_layout(layer_norm_gelu_sum_grad_8ffb11_args *A, char *workspace) {
  const i64 N = A->N;
  const i64 V = A->V;
  const i64 rows = N;
  const i64 keys = V;
  const i64 chunk = maximum_i64(floordiv_i64((rows + 262143), 262144), 128);
  const i64 chunks = gradc_chunks(rows, chunk);
  A->chunk = chunk;
  char *end = workspace;
  A->key = gradc_take(&end, rows * (i64)sizeof(i32));
  A->order = gradc_take(&end, rows * (i64)sizeof(i32));
  A->start = gradc_take(&end, (keys + 2) * (i64)sizeof(i32));
  A->partial0 = gradc_take(&end, (2 * chunks * 1) * (i64)sizeof(f32));
  A->partial1 = gradc_take(&end, (chunks * 16) * (i64)sizeof(f64));
  return end - workspace;
}

static i64 layer_norm_gelu_sum_grad_8ffb11_thread_bytes(const layer_norm_gelu_sum_grad_8ffb11_args *A) {
  const i64 cols = 16;
  i64 bytes = 0;
  bytes += gradc_align(cols * (i64)sizeof(f32));
  bytes += gradc_align(cols * (i64)sizeof(f32));
  bytes += gradc_align(16 * (i64)sizeof(f32));
  bytes += gradc_align(1 * (i64)sizeof(f32));
  return bytes;
}

GRADC_SHARED i64 layer_norm_gelu_sum_grad_8ffb11_workspace_bytes(const i64 *dims) {
  layer_norm_gelu_sum_grad_8ffb11_args args = { .N = dims[0], .V = dims[1] };
  return layer_norm_gelu_sum_grad_8ffb11_layout(&args, 0);
}
GRADC_SHARED i64 layer_norm_gelu_sum_grad_8ffb11_local_bytes(const i64 *dims) {
  layer_norm_gelu_sum_grad_8ffb11_args args = { .N = dims[0], .V = dims[1] };
  layer_norm_gelu_sum_grad_8ffb11_layout(&args, 0);
  return layer_norm_gelu_sum_grad_8ffb11_thread_bytes(&args);
}

static void layer_norm_gelu_sum_grad_8ffb11_key(const void *args, i64 task) {
  const layer_norm_gelu_sum_grad_8ffb11_args *const A = args;
  const i64 N = A->N;
  const i64 V = A->V;
  const i64 *restrict const tokens = A->tokens;
  const i64 rows = N;
  i32 *const key = A->key;
  for (i64 r = task * GRADC_KEY_ROWS; r < gradc_min(task * GRADC_KEY_ROWS + GRADC_KEY_ROWS, rows); r++) {
    const i64 i0 = r;
    const i64 v0 = tokens[i0];
    const i64 v1 = 0;
    const i32 v2 = v0 != v1;
    key[r] = (i32)(v2 ? (i64)v0 : V);
  }
}

static void layer_norm_gelu_sum_grad_8ffb11_rows(const void *args, i64 task) {
  const layer_norm_gelu_sum_grad_8ffb11_args *const A = args;
  const i64 N = A->N;
  const i64 V = A->V;
  const i64 *restrict const tokens = A->tokens;
  const f32 *restrict const d_y = A->d_y;
  const f32 *restrict const gamma = A->gamma;
  const i8 *restrict const table = A->table;
  const f32 *restrict const scale = A->scale;
  const f32 *restrict const r_sum = A->r_sum;
  const f32 *restrict const r_sum2 = A->r_sum2;
  const f32 *restrict const r_sum3 = A->r_sum3;
  f32 *restrict const d_scale = A->d_scale;
  const i64 rows = N;
  const i64 cols = 16;
  const i64 keys = V;
  const i64 chunk = A->chunk;
  i32 *const key = A->key;
  i32 *const order = A->order;
  i32 *const start = A->start;
  f32 *const partial0 = A->partial0;
  f64 *const partial1 = A->partial1;
  i64 since = 0; /* elements, since it was asked whether the call ends */
  f64 *restrict const acc1 = partial1 + task * 16;
  for (i64 e0 = 0, e1; e0 < 16; e0 = e1) {
    e1 = gradc_min(e0 + GRADC_POLL, 16);
    for (i64 e = e0; e < e1; e++) acc1[e] = 0.0f;
    if (gradc_poll(A->ctx, &since, e1 - e0)) return;
  }
  char *memory = A->ctx->local(A->ctx, layer_norm_gelu_sum_grad_8ffb11_thread_bytes(A));
  if (!memory) return;
  f32 *restrict const cache0 = gradc_take(&memory, cols * (i64)sizeof(f32));
  f32 *restrict const cache1 = gradc_take(&memory, cols * (i64)sizeof(f32));
  f32 *restrict const block1 = gradc_take(&memory, 16 * (i64)sizeof(f32));
  f32 *restrict const row_a0 = gradc_take(&memory, 1 * (i64)sizeof(f32));
  const int stream_a0 = V * (i64)sizeof(f32) >= A->ctx->stream_from && 1 * (i64)sizeof(f32) >= 128;
  for (i64 e = 0; e < 16; e++) block1[e] = 0;
  i64 block_rows = 0; /* rows in the block sums */
  const i64 first = task * chunk, last = gradc_min(first + chunk, rows);
  i64 segment = -1;
  f32 *restrict target0 = 0;
  f32 *dest0 = 0; /* where a row in thread memory goes */
  for (i64 p = first; p < last; p++) {
    const i64 r = order[p], to = key[r], valid = to < keys;
    const int begins = to != segment;
    if (begins && valid) { /* a piece of a segment that is not whole in this chunk goes to a carry row */
      const i64 carry = start[to] < first ? 2 * task : start[to + 1] > first + chunk ? 2 * task + 1 : -1;
      if (dest0) gradc_stream(dest0, row_a0, 1 * (i64)sizeof(f32));
      target0 = carry < 0 ? d_scale + to * 1 : partial0 + carry * 1;
      dest0 = carry < 0 && stream_a0 ? target0 : 0;
      if (dest0) target0 = row_a0;
    }
    segment = to;
    const i64 i0 = r;
    /* phase 1: sum of mul over the columns; add to d_gamma */
    const i64 v0 = tokens[i0];
    const i64 v1 = 0;
    const i32 v2 = v0 != v1;
    const f32 v7 = 16.0f;
    const f32 v12 = scale[(i64)v0];
    const f32 v14 = 0.70710677f;
    const f32 v17 = 1.0f;
    const f32 v19 = 0.5f;
    const f32 v22 = r_sum[i0];
    const f32 v23 = v22 / v7;
    const f32 v25 = r_sum2[i0];
    const f32 v26 = v25 / v7;
    const f32 v28 = r_sum3[i0];
    const f32 v29 = v28 / v7;
    const f32 v30 = 1e-05f;
    const f32 v31 = v29 + v30;
    const f32 v32 = rsqrt_f32(v31);
    const f32 v40 = -0.5f;
    const f32 v43 = 0.3989423f;
    f64 total_v6 = 0;
    f64 total_v35 = 0;
    for (i64 c0 = 0; c0 < 16; c0 += GRADC_BLOCK) {
      const i64 c1 = gradc_min(c0 + GRADC_BLOCK, 16);
      f64 block_v6 = 0;
      f64 block_v35 = 0;
      #pragma omp simd reduction(+:block_v6,block_v35)
      for (i64 i1 = c0; i1 < c1; i1++) {
        const f32 v3 = d_y[i0 * 16 + i1];
        const f32 v4 = gamma[i1];
        const f32 v5 = v3 * v4;
        const i8 v10 = table[((i64)v0 * 16 + i1)];
        const f32 v11 = (f32)v10;
        const f32 v13 = v11 * v12;
        const f32 v15 = v13 * v14;
        const f32 v16 = erf_f32(v15);
        const f32 v18 = v16 + v17;
        const f32 v20 = v18 * v19;
        cache0[i1] = v20;
        const f32 v21 = v13 * v20;
        const f32 v24 = v21 - v23;
        const f32 v27 = v24 - v26;
        const f32 v33 = v27 * v32;
        cache1[i1] = v33;
        const f32 v34 = v5 * v33;
        const f32 v51 = v3 * v33;
        block_v6 += v5;
        block_v35 += v34;
        block1[i1] += v51;
      }
      total_v6 += block_v6;
      total_v35 += block_v35;
    }
    const f32 v6 = (f32)total_v6;
    const f32 v35 = (f32)total_v35;
    /* phase 2: sum of mul over the columns */
    const f32 v8 = v6 / v7;
    const f32 v36 = v35 / v7;
    f64 total_v49 = 0;
    for (i64 c0 = 0; c0 < 16; c0 += GRADC_BLOCK) {
      const i64 c1 = gradc_min(c0 + GRADC_BLOCK, 16);
      f64 block_v49 = 0;
      #pragma omp simd reduction(+:block_v49)
      for (i64 i1 = c0; i1 < c1; i1++) {
        const f32 v3 = d_y[i0 * 16 + i1];
        const f32 v4 = gamma[i1];
        const f32 v5 = v3 * v4;
        const f32 v9 = v5 - v8;
        const i8 v10 = table[((i64)v0 * 16 + i1)];
        const f32 v11 = (f32)v10;
        const f32 v13 = v11 * v12;
        const f32 v20 = cache0[i1];
        const f32 v33 = cache1[i1];
        const f32 v37 = v33 * v36;
        const f32 v38 = v9 - v37;
        const f32 v39 = v13 * v13;
        const f32 v41 = v39 * v40;
        const f32 v42 = exp_f32(v41);
        const f32 v44 = v42 * v43;
        const f32 v45 = v13 * v44;
        const f32 v46 = v20 + v45;
        const f32 v47 = v38 * v46;
        const f32 v48 = v47 * v11;
        block_v49 += v48;
      }
      total_v49 += block_v49;
    }
    const f32 v49 = (f32)total_v49;
    /* phase 3: add to d_scale */
    const f32 v50 = v49 * v32;
    if (valid) target0[0] = (f32)((begins ? 0 : target0[0]) + v50);
    if (++block_rows == GRADC_BLOCK_ROWS) {
      block_rows = 0;
      for (i64 e = 0; e < 16; e++) acc1[e] += block1[e], block1[e] = 0;
    }
  }
  if (dest0) gradc_stream(dest0, row_a0, 1 * (i64)sizeof(f32));
  for (i64 e = 0; e < 16; e++) acc1[e] += block1[e], block1[e] = 0;
  gradc_stream_fence();
}

static void layer_norm_gelu_sum_grad_8ffb11_fold1(const void *args, i64 task) {
  const layer_norm_gelu_sum_grad_8ffb11_args *const A = args;
  const i64 N = A->N;
  f32 *restrict const d_gamma = A->d_gamma;
  const i64 rows = N;
  const i64 chunk = A->chunk;
  const i64 chunks = gradc_chunks(rows, chunk);
  f64 *const partial1 = A->partial1;
  const i64 size = 16;
  for (i64 e0 = task * GRADC_FOLD; e0 < gradc_min(task * GRADC_FOLD + GRADC_FOLD, size); e0 += GRADC_TOTALS) {
    const i64 count = gradc_min(GRADC_TOTALS, size - e0);
    f64 total[GRADC_TOTALS];
    for (i64 e = 0; e < count; e++) total[e] = 0.0;
    for (i64 c = 0; c < chunks; c++)
      for (i64 e = 0; e < count; e++) total[e] += partial1[c * size + e0 + e];
    for (i64 e = 0; e < count; e++) d_gamma[e0 + e] = (f32)total[e];
  }
}

static void layer_norm_gelu_sum_grad_8ffb11_finish(const void *args, i64 task) {
  const layer_norm_gelu_sum_grad_8ffb11_args *const A = args;
  const i64 V = A->V;
  f32 *restrict const d_scale = A->d_scale;
  const i64 keys = V;
  const i64 chunk = A->chunk;
  i32 *const start = A->start;
  f32 *const partial0 = A->partial0;
  i64 empty_bytes = 0;
  const int stream_a0 = V * (i64)sizeof(f32) >= A->ctx->stream_from && 1 * (i64)sizeof(f32) >= 128;
  if (stream_a0) empty_bytes += gradc_align(1 * (i64)sizeof(f32));
  char *memory = A->ctx->local(A->ctx, empty_bytes);
  if (!memory) return;
  f32 *empty0 = 0; /* a row that no row goes to */
  if (stream_a0) {
    empty0 = gradc_take(&memory, 1 * (i64)sizeof(f32));
    for (i64 e = 0; e < 1; e++) empty0[e] = 0.0f;
  }
  for (i64 segment = task * GRADC_SEGMENTS; segment < gradc_min(task * GRADC_SEGMENTS + GRADC_SEGMENTS, keys); segment++) {
    const i64 first = start[segment], last = start[segment + 1];
    if (last > first && first / chunk == (last - 1) / chunk) continue; /* whole in one chunk, which has written it */
    {
      f32 *restrict const row = d_scale + segment * 1;
      const i64 inner = 1;
      if (last == first && empty0) {
        gradc_stream(row, empty0, inner * (i64)sizeof(f32));
      } else if (last == first) {
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
  gradc_stream_fence();
}

GRADC_SHARED int layer_norm_gelu_sum_grad_8ffb11(const gradc_ctx *ctx, void *const *buffers, const i64 *dims, char *workspace, i64 site) {
  layer_norm_gelu_sum_grad_8ffb11_args args = {
    .ctx = ctx,
    .site = site,
    .tokens = buffers[0],
    .d_y = buffers[1],
    .gamma = buffers[2],
    .table = buffers[3],
    .scale = buffers[4],
    .r_sum = buffers[5],
    .r_sum2 = buffers[6],
    .r_sum3 = buffers[7],
    .d_scale = buffers[8],
    .d_gamma = buffers[9],
    .N = dims[0],
    .V = dims[1],
  };
  layer_norm_gelu_sum_grad_8ffb11_layout(&args, workspace);
  const layer_norm_gelu_sum_grad_8ffb11_args *const A = &args;
  const i64 N = A->N;
  const i64 V = A->V;
  const i64 rows = N;
  const i64 keys = V;
  const i64 chunk = A->chunk;
  i32 *const key = A->key;
  i32 *const order = A->order;
  i32 *const start = A->start;
  ctx->parallel_for(ctx, gradc_chunks(rows, GRADC_KEY_ROWS), layer_norm_gelu_sum_grad_8ffb11_key, A);
  gradc_sort(ctx, key, rows, keys, start, order);
  ctx->parallel_for(ctx, gradc_chunks(rows, chunk), layer_norm_gelu_sum_grad_8ffb11_rows, A);
  ctx->parallel_for(ctx, gradc_chunks(16, GRADC_FOLD), layer_norm_gelu_sum_grad_8ffb11_fold1, A);
  ctx->parallel_for(ctx, gradc_chunks(keys, GRADC_SEGMENTS), layer_norm_gelu_sum_grad_8ffb11_finish, A);
  return 0;
}

/*
 * layer_norm_gelu_sum_grad_45cc9e
 * reads tokens i64[N], d_y f32[N,16], gamma f32[16], table i8[V,16], scale f32[V,1], r_sum f32[N], r_sum2 f32[N], r_sum3 f32[N]
 * writes d_scale f32[V,1], d_gamma f32[16]
 * moves 104*N+4*V+128 bytes, computes 602*N operations
 *
 * kernel @layer_norm_gelu_sum_grad_45cc9e rows(i0: N) cols(i1: 16) strategy(d_scale: privatized, d_gamma: privatized) {
 *   %0 = load tokens[i0] : i64
 *   %1 = const {value=0} : i64
 *   %2 = ne %0, %1 : bool
 *   phase
 *   %3 = load d_y[i0, i1] : f32
 *   %4 = load gamma[i1] : f32
 *   %5 = mul %3, %4 : f32
 *   %6 = sum_cols %5 : f32
 *   %7 = const {value=0x1p+4} : f32
 *   %8 = div %6, %7 : f32
 *   phase
 *   %9 = sub %5, %8 : f32
 *   %10 = load table[%0, i1] : i8
 *   %11 = cast %10 {dtype=f32} : f32
 *   %12 = load scale[%0, 0] : f32
 *   %13 = mul %11, %12 : f32
 *   %14 = const {value=0x1.6a09e6p-1} : f32
 *   %15 = mul %13, %14 : f32
 *   %16 = erf %15 : f32
 *   %17 = const {value=0x1p+0} : f32
 *   %18 = add %16, %17 : f32
 *   %19 = const {value=0x1p-1} : f32
 *   %20 = mul %18, %19 : f32
 *   %21 = mul %13, %20 : f32
 *   %22 = load r_sum[i0] : f32
 *   %23 = div %22, %7 : f32
 *   %24 = sub %21, %23 : f32
 *   %25 = load r_sum2[i0] : f32
 *   %26 = div %25, %7 : f32
 *   %27 = sub %24, %26 : f32
 *   %28 = load r_sum3[i0] : f32
 *   %29 = div %28, %7 : f32
 *   %30 = const {value=0x1.4f8b58p-17} : f32
 *   %31 = add %29, %30 : f32
 *   %32 = rsqrt %31 : f32
 *   %33 = mul %27, %32 : f32
 *   %34 = mul %5, %33 : f32
 *   %35 = sum_cols %34 : f32
 *   %36 = div %35, %7 : f32
 *   %37 = mul %33, %36 : f32
 *   %38 = sub %9, %37 : f32
 *   %39 = mul %13, %13 : f32
 *   %40 = const {value=-0x1p-1} : f32
 *   %41 = mul %39, %40 : f32
 *   %42 = exp %41 : f32
 *   %43 = const {value=0x1.988454p-2} : f32
 *   %44 = mul %42, %43 : f32
 *   %45 = mul %13, %44 : f32
 *   %46 = add %20, %45 : f32
 *   %47 = mul %38, %46 : f32
 *   %48 = mul %47, %11 : f32
 *   %49 = sum_cols %48 : f32
 *   %50 = mul %49, %32 : f32
 *   accum d_scale[%0, 0] <- %50 where %2 : f32
 *   %51 = mul %3, %33 : f32
 *   accum d_gamma[i1] <- %51 : f32
 * }
 */
typedef struct {
  const gradc_ctx *ctx;
  i64 site; /* the step's number, for what it reports */
  const i64 *tokens;
  const f32 *d_y;
  const f32 *gamma;
  const i8 *table;
  const f32 *scale;
  const f32 *r_sum;
  const f32 *r_sum2;
  const f32 *r_sum3;
  f32 *d_scale;
  f32 *d_gamma;
  i64 N, V;
  i64 chunk; /* rows per task */
  f64 *partial0;
  f64 *partial1;
} layer_norm_gelu_sum_grad_45cc9e_args;

static i64 layer_norm_gelu_sum_grad_45cc9e_layout(layer_norm_gelu_sum_grad_45cc9e_args *A, char *workspace) {
  const i64 N = A->N;
  const i64 V = A->V;
  const i64 rows = N;
  const i64 size0 = V;
  const i64 chunk = maximum_i64((floordiv_i64((rows - 1), maximum_i64(floordiv_i64(4194304, (size0 + 16)), 1)) + 1), 128);
  const i64 chunks = gradc_chunks(rows, chunk);
  A->chunk = chunk;
  char *end = workspace;
  A->partial0 = gradc_take(&end, (chunks * V) * (i64)sizeof(f64));
  A->partial1 = gradc_take(&end, (chunks * 16) * (i64)sizeof(f64));
  return end - workspace;
}

static i64 layer_norm_gelu_sum_grad_45cc9e_thread_bytes(const layer_norm_gelu_sum_grad_45cc9e_args *A) {
  const i64 cols = 16;
  i64 bytes = 0;
  bytes += gradc_align(cols * (i64)sizeof(f32));
  bytes += gradc_align(cols * (i64)sizeof(f32));
  bytes += gradc_align(16 * (i64)sizeof(f32));
  return bytes;
}

GRADC_SHARED i64 layer_norm_gelu_sum_grad_45cc9e_workspace_bytes(const i64 *dims) {
  layer_norm_gelu_sum_grad_45cc9e_args args = { .N = dims[0], .V = dims[1] };
  return layer_norm_gelu_sum_grad_45cc9e_layout(&args, 0);
}
GRADC_SHARED i64 layer_norm_gelu_sum_grad_45cc9e_local_bytes(const i64 *dims) {
  layer_norm_gelu_sum_grad_45cc9e_args args = { .N = dims[0], .V = dims[1] };
  layer_norm_gelu_sum_grad_45cc9e_layout(&args, 0);
  return layer_norm_gelu_sum_grad_45cc9e_thread_bytes(&args);
}

static void layer_norm_gelu_sum_grad_45cc9e_rows(const void *args, i64 task) {
  const layer_norm_gelu_sum_grad_45cc9e_args *const A = args;
  const i64 N = A->N;
  const i64 V = A->V;
  const i64 *restrict const tokens = A->tokens;
  const f32 *restrict const d_y = A->d_y;
  const f32 *restrict const gamma = A->gamma;
  const i8 *restrict const table = A->table;
  const f32 *restrict const scale = A->scale;
  const f32 *restrict const r_sum = A->r_sum;
  const f32 *restrict const r_sum2 = A->r_sum2;
  const f32 *restrict const r_sum3 = A->r_sum3;
  const i64 rows = N;
  const i64 cols = 16;
  const i64 chunk = A->chunk;
  f64 *const partial0 = A->partial0;
  f64 *const partial1 = A->partial1;
  i64 since = 0; /* elements, since it was asked whether the call ends */
  f64 *restrict const acc0 = partial0 + task * V;
  for (i64 e0 = 0, e1; e0 < V; e0 = e1) {
    e1 = gradc_min(e0 + GRADC_POLL, V);
    for (i64 e = e0; e < e1; e++) acc0[e] = 0.0f;
    if (gradc_poll(A->ctx, &since, e1 - e0)) return;
  }
  f64 *restrict const acc1 = partial1 + task * 16;
  for (i64 e0 = 0, e1; e0 < 16; e0 = e1) {
    e1 = gradc_min(e0 + GRADC_POLL, 16);
    for (i64 e = e0; e < e1; e++) acc1[e] = 0.0f;
    if (gradc_poll(A->ctx, &since, e1 - e0)) return;
  }
  char *memory = A->ctx->local(A->ctx, layer_norm_gelu_sum_grad_45cc9e_thread_bytes(A));
  if (!memory) return;
  f32 *restrict const cache0 = gradc_take(&memory, cols * (i64)sizeof(f32));
  f32 *restrict const cache1 = gradc_take(&memory, cols * (i64)sizeof(f32));
  f32 *restrict const block1 = gradc_take(&memory, 16 * (i64)sizeof(f32));
  for (i64 e = 0; e < 16; e++) block1[e] = 0;
  i64 block_rows = 0; /* rows in the block sums */
  const i64 last_row = gradc_min(task * chunk + chunk, rows);
  for (i64 r0 = task * chunk, r1; r0 < last_row; r0 = r1) {
    r1 = gradc_min(r0 + gradc_poll_rows(cols), last_row);
    for (i64 r = r0; r < r1; r++) {
      const i64 i0 = r;
      /* phase 1: sum of mul over the columns; add to d_gamma */
      const i64 v0 = tokens[i0];
      const i64 v1 = 0;
      const i32 v2 = v0 != v1;
      const f32 v7 = 16.0f;
      const f32 v12 = scale[(i64)v0];
      const f32 v14 = 0.70710677f;
      const f32 v17 = 1.0f;
      const f32 v19 = 0.5f;
      const f32 v22 = r_sum[i0];
      const f32 v23 = v22 / v7;
      const f32 v25 = r_sum2[i0];
      const f32 v26 = v25 / v7;
      const f32 v28 = r_sum3[i0];
      const f32 v29 = v28 / v7;
      const f32 v30 = 1e-05f;
      const f32 v31 = v29 + v30;
      const f32 v32 = rsqrt_f32(v31);
      const f32 v40 = -0.5f;
      const f32 v43 = 0.3989423f;
      f64 total_v6 = 0;
      f64 total_v35 = 0;
      for (i64 c0 = 0; c0 < 16; c0 += GRADC_BLOCK) {
        const i64 c1 = gradc_min(c0 + GRADC_BLOCK, 16);
        f64 block_v6 = 0;
        f64 block_v35 = 0;
        #pragma omp simd reduction(+:block_v6,block_v35)
        for (i64 i1 = c0; i1 < c1; i1++) {
          const f32 v3 = d_y[i0 * 16 + i1];
          const f32 v4 = gamma[i1];
          const f32 v5 = v3 * v4;
          const i8 v10 = table[((i64)v0 * 16 + i1)];
          const f32 v11 = (f32)v10;
          const f32 v13 = v11 * v12;
          const f32 v15 = v13 * v14;
          const f32 v16 = erf_f32(v15);
          const f32 v18 = v16 + v17;
          const f32 v20 = v18 * v19;
          cache0[i1] = v20;
          const f32 v21 = v13 * v20;
          const f32 v24 = v21 - v23;
          const f32 v27 = v24 - v26;
          const f32 v33 = v27 * v32;
          cache1[i1] = v33;
          const f32 v34 = v5 * v33;
          const f32 v51 = v3 * v33;
          block_v6 += v5;
          block_v35 += v34;
          block1[i1] += v51;
        }
        total_v6 += block_v6;
        total_v35 += block_v35;
      }
      const f32 v6 = (f32)total_v6;
      const f32 v35 = (f32)total_v35;
      /* phase 2: sum of mul over the columns */
      const f32 v8 = v6 / v7;
      const f32 v36 = v35 / v7;
      f64 total_v49 = 0;
      for (i64 c0 = 0; c0 < 16; c0 += GRADC_BLOCK) {
        const i64 c1 = gradc_min(c0 + GRADC_BLOCK, 16);
        f64 block_v49 = 0;
        #pragma omp simd reduction(+:block_v49)
        for (i64 i1 = c0; i1 < c1; i1++) {
          const f32 v3 = d_y[i0 * 16 + i1];
          const f32 v4 = gamma[i1];
          const f32 v5 = v3 * v4;
          const f32 v9 = v5 - v8;
          const i8 v10 = table[((i64)v0 * 16 + i1)];
          const f32 v11 = (f32)v10;
          const f32 v13 = v11 * v12;
          const f32 v20 = cache0[i1];
          const f32 v33 = cache1[i1];
          const f32 v37 = v33 * v36;
          const f32 v38 = v9 - v37;
          const f32 v39 = v13 * v13;
          const f32 v41 = v39 * v40;
          const f32 v42 = exp_f32(v41);
          const f32 v44 = v42 * v43;
          const f32 v45 = v13 * v44;
          const f32 v46 = v20 + v45;
          const f32 v47 = v38 * v46;
          const f32 v48 = v47 * v11;
          block_v49 += v48;
        }
        total_v49 += block_v49;
      }
      const f32 v49 = (f32)total_v49;
      /* phase 3: add to d_scale */
      const f32 v50 = v49 * v32;
      if (v2) acc0[(i64)v0] += v50;
      if (++block_rows == GRADC_BLOCK_ROWS) {
        block_rows = 0;
        for (i64 e = 0; e < 16; e++) acc1[e] += block1[e], block1[e] = 0;
      }
    }
    if (r1 < last_row && gradc_poll(A->ctx, &since, GRADC_POLL)) return;
  }
  for (i64 e = 0; e < 16; e++) acc1[e] += block1[e], block1[e] = 0;
}

static void layer_norm_gelu_sum_grad_45cc9e_fold0(const void *args, i64 task) {
  const layer_norm_gelu_sum_grad_45cc9e_args *const A = args;
  const i64 N = A->N;
  const i64 V = A->V;
  f32 *restrict const d_scale = A->d_scale;
  const i64 rows = N;
  const i64 chunk = A->chunk;
  const i64 chunks = gradc_chunks(rows, chunk);
  f64 *const partial0 = A->partial0;
  const i64 size = V;
  for (i64 e0 = task * GRADC_FOLD; e0 < gradc_min(task * GRADC_FOLD + GRADC_FOLD, size); e0 += GRADC_TOTALS) {
    const i64 count = gradc_min(GRADC_TOTALS, size - e0);
    f64 total[GRADC_TOTALS];
    for (i64 e = 0; e < count; e++) total[e] = 0.0;
    for (i64 c = 0; c < chunks; c++)
      for (i64 e = 0; e < count; e++) total[e] += partial0[c * size + e0 + e];
    for (i64 e = 0; e < count; e++) d_scale[e0 + e] = (f32)total[e];
  }
}

static void layer_norm_gelu_sum_grad_45cc9e_fold1(const void *args, i64 task) {
  const layer_norm_gelu_sum_grad_45cc9e_args *const A = args;
  const i64 N = A->N;
  f32 *restrict const d_gamma = A->d_gamma;
  const i64 rows = N;
  const i64 chunk = A->chunk;
  const i64 chunks = gradc_chunks(rows, chunk);
  f64 *const partial1 = A->partial1;
  const i64 size = 16;
  for (i64 e0 = task * GRADC_FOLD; e0 < gradc_min(task * GRADC_FOLD + GRADC_FOLD, size); e0 += GRADC_TOTALS) {
    const i64 count = gradc_min(GRADC_TOTALS, size - e0);
    f64 total[GRADC_TOTALS];
    for (i64 e = 0; e < count; e++) total[e] = 0.0;
    for (i64 c = 0; c < chunks; c++)
      for (i64 e = 0; e < count; e++) total[e] += partial1[c * size + e0 + e];
    for (i64 e = 0; e < count; e++) d_gamma[e0 + e] = (f32)total[e];
  }
}

GRADC_SHARED int layer_norm_gelu_sum_grad_45cc9e(const gradc_ctx *ctx, void *const *buffers, const i64 *dims, char *workspace, i64 site) {
  layer_norm_gelu_sum_grad_45cc9e_args args = {
    .ctx = ctx,
    .site = site,
    .tokens = buffers[0],
    .d_y = buffers[1],
    .gamma = buffers[2],
    .table = buffers[3],
    .scale = buffers[4],
    .r_sum = buffers[5],
    .r_sum2 = buffers[6],
    .r_sum3 = buffers[7],
    .d_scale = buffers[8],
    .d_gamma = buffers[9],
    .N = dims[0],
    .V = dims[1],
  };
  layer_norm_gelu_sum_grad_45cc9e_layout(&args, workspace);
  const layer_norm_gelu_sum_grad_45cc9e_args *const A = &args;
  const i64 N = A->N;
  const i64 V = A->V;
  const i64 rows = N;
  const i64 chunk = A->chunk;
  const i64 chunks = gradc_chunks(rows, chunk);
  ctx->parallel_for(ctx, chunks, layer_norm_gelu_sum_grad_45cc9e_rows, A);
  ctx->parallel_for(ctx, gradc_chunks(V, GRADC_FOLD), layer_norm_gelu_sum_grad_45cc9e_fold0, A);
  ctx->parallel_for(ctx, gradc_chunks(16, GRADC_FOLD), layer_norm_gelu_sum_grad_45cc9e_fold1, A);
  return 0;
}
