/*
 * kernel @check_67ca52 rows() cols(i0: n0) {
 *   phase
 *   %0 = load b0[i0] : i64
 *   check %0 {bound=n1, op="embedding", source=""}
 * }
 */
static void check_67ca52_rows(const void *args, i64 task) {
  const gradc_args *const A = args;
  const i64 *const n_ = A->n;
  (void)n_;
  const i64 n0 = n_[0];
  const i64 n1 = n_[1];
  const i64 *restrict const b0 = A->b[0];
  const i64 R = 1, C = n0;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  (void)scratch;
  i64 since = 0; /* elements, since it was asked whether the call ends */
  (void)since;
  const i64 strips = gradc_chunks(C, GRADC_STRIP), first_row = task / strips * CH, last_row = gradc_min(first_row + CH, R);
  const i64 first_col = task % strips * GRADC_STRIP, last_col = gradc_min(first_col + GRADC_STRIP, C);
  for (i64 r = first_row; r < last_row; r++) {
      {
        for (i64 c0 = first_col; c0 < last_col; c0 += GRADC_STRIP) {
          const i64 c1 = last_col;
          for (i64 i0 = c0; i0 < c1; i0++) {
            const i64 v0 = b0[i0];
            if ((u64)v0 >= (u64)n1) gradc_report(A->ctx, GRADC_INDEX_OUT_OF_RANGE, A->site, i0, v0, n1);
          }
        }
      }
  }
}
static i64 check_67ca52_chunk(const i64 *n_) {
  const i64 n0 = n_[0];
  (void)n0;
  const i64 n1 = n_[1];
  (void)n1;
  (void)n_;
  const i64 cols = n0;
  return maximum_i64((floordiv_i64(4095, maximum_i64(1, cols)) - 1 * maximum_i64((floordiv_i64(4095, maximum_i64(1, cols)) + 1), 128) + 129), 8);
}
GRADC_SHARED i64 check_67ca52_scratch(const i64 *n_) {
  const gradc_args all = {0, 0, n_, 0, 0, check_67ca52_chunk(n_)};
  const gradc_args *const A = &all;
  const i64 n0 = n_[0];
  (void)n0;
  const i64 n1 = n_[1];
  (void)n1;
  const i64 R = 1, C = n0;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  (void)scratch;
  return (i64)(scratch - A->scratch);
}
/* Bytes that each thread keeps for it. */
GRADC_SHARED i64 check_67ca52_local(const i64 *n_) {
  (void)n_;
  return 0;
}
GRADC_SHARED int check_67ca52(const gradc_ctx *ctx, void *const *buffers, const i64 *dims, char *scratch_, i64 site) {
  const gradc_args all = {ctx, buffers, dims, scratch_, site, check_67ca52_chunk(dims)};
  const void *const args = &all;
  const gradc_args *const A = args;
  const i64 *const n_ = A->n;
  (void)n_;
  const i64 n0 = n_[0];
  const i64 n1 = n_[1];
  const i64 *restrict const b0 = A->b[0];
  const i64 R = 1, C = n0;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  (void)scratch;
  (void)b0;
  ctx->parallel_for(ctx, gradc_chunks(R, CH) * gradc_chunks(C, GRADC_STRIP), check_67ca52_rows, args);
  return gradc_failed(ctx);
}

/*
 * kernel @gelu_layer_norm_grad_5db000 rows(i0: n0) cols(i1: 16) {
 *   %0 = load b0[i0] : i64
 *   phase
 *   %1 = load b1[%0, i1] : i8
 *   %2 = cast %1 {dtype=f32} : f32
 *   %3 = load b2[%0, 0] : f32
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
 *   store b3[i0] <- %13 : f32
 *   %14 = const {value=0x1p+4} : f32
 *   %15 = div %13, %14 : f32
 *   phase
 *   %16 = sub %12, %15 : f32
 *   %17 = sum_cols %16 : f32
 *   store b4[i0] <- %17 : f32
 *   %18 = div %17, %14 : f32
 *   phase
 *   %19 = sub %16, %18 : f32
 *   %20 = mul %19, %19 : f32
 *   %21 = sum_cols %20 : f32
 *   store b5[i0] <- %21 : f32
 *   %22 = div %21, %14 : f32
 *   %23 = const {value=0x1.4f8b58p-17} : f32
 *   %24 = add %22, %23 : f32
 *   %25 = rsqrt %24 : f32
 *   phase
 *   %26 = mul %19, %25 : f32
 *   %27 = load b6[i1] : f32
 *   %28 = mul %26, %27 : f32
 *   store b7[i0, i1] <- %28 : f32
 * }
 */
static void gelu_layer_norm_grad_5db000_rows(const void *args, i64 task) {
  const gradc_args *const A = args;
  const i64 *const n_ = A->n;
  (void)n_;
  const i64 n0 = n_[0];
  const i64 n1 = n_[1];
  const i64 *restrict const b0 = A->b[0];
  const i8 *restrict const b1 = A->b[1];
  const f32 *restrict const b2 = A->b[2];
  f32 *restrict const b3 = A->b[3];
  f32 *restrict const b4 = A->b[4];
  f32 *restrict const b5 = A->b[5];
  const f32 *restrict const b6 = A->b[6];
  f32 *restrict const b7 = A->b[7];
  const i64 R = n0, C = 16;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  (void)scratch;
  i64 since = 0; /* elements, since it was asked whether the call ends */
  (void)since;
  i64 local_bytes = 0;
  local_bytes += gradc_align((C) * (i64)sizeof(f32));
  local_bytes += gradc_align((C) * (i64)sizeof(f32));
  local_bytes += gradc_align((C) * (i64)sizeof(f32));
  local_bytes += gradc_align((GRADC_BLOCK) * (i64)sizeof(f32));
  char *local = A->ctx->local(A->ctx, local_bytes);
  if (!local) return;
  f32 *restrict const h0 = (f32 *)local;
  local += gradc_align((C) * (i64)sizeof(f32));
  f32 *restrict const h1 = (f32 *)local;
  local += gradc_align((C) * (i64)sizeof(f32));
  f32 *restrict const h2 = (f32 *)local;
  local += gradc_align((C) * (i64)sizeof(f32));
  f32 *restrict const o0 = (f32 *)local;
  local += gradc_align((GRADC_BLOCK) * (i64)sizeof(f32));
  const int past0 = (16 * n0) * (i64)sizeof(f32) >= A->ctx->past;
  const i64 last_row = gradc_min(task * CH + CH, R);
  for (i64 r0 = task * CH, r1; r0 < last_row; r0 = r1) {
    r1 = gradc_min(r0 + gradc_stretch(C), last_row);
    for (i64 r = r0; r < r1; r++) {
      const i64 i0 = r;
      const i64 v0 = b0[i0];
      const f32 v3 = b2[(i64)v0];
      const f32 v5 = 0x1.6a09e60000000p-1f;
      const f32 v8 = 0x1.0000000000000p+0f;
      const f32 v10 = 0x1.0000000000000p-1f;
      const f32 v14 = 0x1.0000000000000p+4f;
      const f32 v23 = 0x1.4f8b580000000p-17f;
      f64 t_v13 = 0;
      {
        for (i64 c0 = 0; c0 < 16; c0 += GRADC_BLOCK) {
          const i64 c1 = gradc_min(c0 + GRADC_BLOCK, 16);
          f64 b_v13 = 0;
#pragma omp simd reduction(+:b_v13)
          for (i64 i1 = c0; i1 < c1; i1++) {
            const i8 v1 = b1[((i64)v0 * 16 + i1)];
            const f32 v2 = (f32)v1;
            const f32 v4 = v2 * v3;
            const f32 v6 = v4 * v5;
            const f32 v7 = erf_f32(v6);
            const f32 v9 = v7 + v8;
            const f32 v11 = v9 * v10;
            const f32 v12 = v4 * v11;
            h0[i1] = v12;
            b_v13 += v12;
          }
          t_v13 += b_v13;
        }
      }
      const f32 v13 = (f32)t_v13;
      b3[i0] = v13;
      const f32 v15 = v13 / v14;
      f64 t_v17 = 0;
      {
        for (i64 c0 = 0; c0 < 16; c0 += GRADC_BLOCK) {
          const i64 c1 = gradc_min(c0 + GRADC_BLOCK, 16);
          f64 b_v17 = 0;
#pragma omp simd reduction(+:b_v17)
          for (i64 i1 = c0; i1 < c1; i1++) {
            const f32 v12 = h0[i1];
            const f32 v16 = v12 - v15;
            h1[i1] = v16;
            b_v17 += v16;
          }
          t_v17 += b_v17;
        }
      }
      const f32 v17 = (f32)t_v17;
      b4[i0] = v17;
      const f32 v18 = v17 / v14;
      f64 t_v21 = 0;
      {
        for (i64 c0 = 0; c0 < 16; c0 += GRADC_BLOCK) {
          const i64 c1 = gradc_min(c0 + GRADC_BLOCK, 16);
          f64 b_v21 = 0;
#pragma omp simd reduction(+:b_v21)
          for (i64 i1 = c0; i1 < c1; i1++) {
            const f32 v16 = h1[i1];
            const f32 v19 = v16 - v18;
            h2[i1] = v19;
            const f32 v20 = v19 * v19;
            b_v21 += v20;
          }
          t_v21 += b_v21;
        }
      }
      const f32 v21 = (f32)t_v21;
      b5[i0] = v21;
      const f32 v22 = v21 / v14;
      const f32 v24 = v22 + v23;
      const f32 v25 = rsqrt_f32(v24);
      {
        for (i64 c0 = 0; c0 < 16; c0 += GRADC_BURST) {
          const i64 c1 = gradc_min(c0 + GRADC_BURST, 16);
          f32 *restrict const w0 = past0 ? o0 : b7 + (i0 * 16 + c0);
#pragma omp simd
          for (i64 i1 = c0; i1 < c1; i1++) {
            const f32 v19 = h2[i1];
            const f32 v26 = v19 * v25;
            const f32 v27 = b6[i1];
            const f32 v28 = v26 * v27;
            w0[i1 - c0] = v28;
          }
          if (past0) gradc_past(b7 + (i0 * 16 + c0), o0, (c1 - c0) * (i64)sizeof(f32));
        }
      }
    }
    if (r1 < last_row && gradc_ends(A, &since, GRADC_STRETCH)) return;
  }
  gradc_past_done();
}
static i64 gelu_layer_norm_grad_5db000_chunk(const i64 *n_) {
  const i64 n0 = n_[0];
  (void)n0;
  const i64 n1 = n_[1];
  (void)n1;
  (void)n_;
  return 128;
}
GRADC_SHARED i64 gelu_layer_norm_grad_5db000_scratch(const i64 *n_) {
  const gradc_args all = {0, 0, n_, 0, 0, gelu_layer_norm_grad_5db000_chunk(n_)};
  const gradc_args *const A = &all;
  const i64 n0 = n_[0];
  (void)n0;
  const i64 n1 = n_[1];
  (void)n1;
  const i64 R = n0, C = 16;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  (void)scratch;
  return (i64)(scratch - A->scratch);
}
/* Bytes that each thread keeps for it. */
GRADC_SHARED i64 gelu_layer_norm_grad_5db000_local(const i64 *n_) {
  const gradc_args all = {0, 0, n_, 0, 0, gelu_layer_norm_grad_5db000_chunk(n_)};
  const gradc_args *const A = &all;
  const i64 n0 = n_[0];
  (void)n0;
  const i64 n1 = n_[1];
  (void)n1;
  const i64 R = n0, C = 16;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  (void)scratch;
  i64 local_bytes = 0;
  local_bytes += gradc_align((C) * (i64)sizeof(f32));
  local_bytes += gradc_align((C) * (i64)sizeof(f32));
  local_bytes += gradc_align((C) * (i64)sizeof(f32));
  local_bytes += gradc_align((GRADC_BLOCK) * (i64)sizeof(f32));
  return local_bytes;
}
GRADC_SHARED int gelu_layer_norm_grad_5db000(const gradc_ctx *ctx, void *const *buffers, const i64 *dims, char *scratch_, i64 site) {
  const gradc_args all = {ctx, buffers, dims, scratch_, site, gelu_layer_norm_grad_5db000_chunk(dims)};
  const void *const args = &all;
  const gradc_args *const A = args;
  const i64 *const n_ = A->n;
  (void)n_;
  const i64 n0 = n_[0];
  const i64 n1 = n_[1];
  const i64 *restrict const b0 = A->b[0];
  const i8 *restrict const b1 = A->b[1];
  const f32 *restrict const b2 = A->b[2];
  f32 *restrict const b3 = A->b[3];
  f32 *restrict const b4 = A->b[4];
  f32 *restrict const b5 = A->b[5];
  const f32 *restrict const b6 = A->b[6];
  f32 *restrict const b7 = A->b[7];
  const i64 R = n0, C = 16;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  (void)scratch;
  (void)b0;
  (void)b1;
  (void)b2;
  (void)b3;
  (void)b4;
  (void)b5;
  (void)b6;
  (void)b7;
  ctx->parallel_for(ctx, chunks, gelu_layer_norm_grad_5db000_rows, args);
  return 0;
}

/*
 * kernel @layer_norm_gelu_sum_grad_8ffb11 rows(i0: n0) cols(i1: 16) order(b8) strategy(b8: segmented, b9: privatized) {
 *   %0 = load b0[i0] : i64
 *   %1 = const {value=0} : i64
 *   %2 = ne %0, %1 : bool
 *   phase
 *   %3 = load b1[i0, i1] : f32
 *   %4 = load b2[i1] : f32
 *   %5 = mul %3, %4 : f32
 *   %6 = sum_cols %5 : f32
 *   %7 = const {value=0x1p+4} : f32
 *   %8 = div %6, %7 : f32
 *   phase
 *   %9 = sub %5, %8 : f32
 *   %10 = load b3[%0, i1] : i8
 *   %11 = cast %10 {dtype=f32} : f32
 *   %12 = load b4[%0, 0] : f32
 *   %13 = mul %11, %12 : f32
 *   %14 = const {value=0x1.6a09e6p-1} : f32
 *   %15 = mul %13, %14 : f32
 *   %16 = erf %15 : f32
 *   %17 = const {value=0x1p+0} : f32
 *   %18 = add %16, %17 : f32
 *   %19 = const {value=0x1p-1} : f32
 *   %20 = mul %18, %19 : f32
 *   %21 = mul %13, %20 : f32
 *   %22 = load b5[i0] : f32
 *   %23 = div %22, %7 : f32
 *   %24 = sub %21, %23 : f32
 *   %25 = load b6[i0] : f32
 *   %26 = div %25, %7 : f32
 *   %27 = sub %24, %26 : f32
 *   %28 = load b7[i0] : f32
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
 *   accum b8[%0, 0] <- %50 where %2 : f32
 *   %51 = mul %3, %33 : f32
 *   accum b9[i1] <- %51 : f32
 * }
 */
static void layer_norm_gelu_sum_grad_8ffb11_key(const void *args, i64 task) {
  const gradc_args *const A = args;
  const i64 *const n_ = A->n;
  (void)n_;
  const i64 n0 = n_[0];
  const i64 n1 = n_[1];
  const i64 *restrict const b0 = A->b[0];
  const f32 *restrict const b1 = A->b[1];
  const f32 *restrict const b2 = A->b[2];
  const i8 *restrict const b3 = A->b[3];
  const f32 *restrict const b4 = A->b[4];
  const f32 *restrict const b5 = A->b[5];
  const f32 *restrict const b6 = A->b[6];
  const f32 *restrict const b7 = A->b[7];
  f32 *restrict const b8 = A->b[8];
  f32 *restrict const b9 = A->b[9];
  const i64 R = n0, C = 16;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  const i64 V = n1;
  i32 *const key = (i32 *)scratch;
  scratch += gradc_align(R * 4);
  i32 *const perm = (i32 *)scratch;
  scratch += gradc_align(R * 4);
  i32 *const start = (i32 *)scratch;
  scratch += gradc_align((V + 2) * 4);
  f32 *const s0 = (f32 *)scratch;
  scratch += gradc_align(2 * chunks * (1) * (i64)sizeof(f32));
  f64 *const s1 = (f64 *)scratch;
  scratch += gradc_align(chunks * (16) * (i64)sizeof(f64));
  (void)scratch;
  for (i64 r = task * 4096; r < gradc_min(task * 4096 + 4096, R); r++) {
      const i64 i0 = r;
      const i64 v0 = b0[i0];
      const i64 v1 = 0;
      const i32 v2 = v0 != v1;
      key[r] = (i32)(v2 ? (i64)v0 : n1);
  }
}
static void layer_norm_gelu_sum_grad_8ffb11_rows(const void *args, i64 task) {
  const gradc_args *const A = args;
  const i64 *const n_ = A->n;
  (void)n_;
  const i64 n0 = n_[0];
  const i64 n1 = n_[1];
  const i64 *restrict const b0 = A->b[0];
  const f32 *restrict const b1 = A->b[1];
  const f32 *restrict const b2 = A->b[2];
  const i8 *restrict const b3 = A->b[3];
  const f32 *restrict const b4 = A->b[4];
  const f32 *restrict const b5 = A->b[5];
  const f32 *restrict const b6 = A->b[6];
  const f32 *restrict const b7 = A->b[7];
  f32 *restrict const b8 = A->b[8];
  f32 *restrict const b9 = A->b[9];
  const i64 R = n0, C = 16;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  const i64 V = n1;
  i32 *const key = (i32 *)scratch;
  scratch += gradc_align(R * 4);
  i32 *const perm = (i32 *)scratch;
  scratch += gradc_align(R * 4);
  i32 *const start = (i32 *)scratch;
  scratch += gradc_align((V + 2) * 4);
  f32 *const s0 = (f32 *)scratch;
  scratch += gradc_align(2 * chunks * (1) * (i64)sizeof(f32));
  f64 *const s1 = (f64 *)scratch;
  scratch += gradc_align(chunks * (16) * (i64)sizeof(f64));
  (void)scratch;
  i64 since = 0; /* elements, since it was asked whether the call ends */
  (void)since;
  f64 *restrict const p1 = s1 + task * (16);
  for (i64 e0 = 0, e1; e0 < 16; e0 = e1) {
    e1 = gradc_min(e0 + GRADC_STRETCH, 16);
    for (i64 e = e0; e < e1; e++) p1[e] = 0x0.0p+0f;
    if (gradc_ends(A, &since, e1 - e0)) return;
  }
  i64 local_bytes = 0;
  local_bytes += gradc_align((C) * (i64)sizeof(f32));
  local_bytes += gradc_align((C) * (i64)sizeof(f32));
  local_bytes += gradc_align((16) * (i64)sizeof(f32));
  local_bytes += gradc_align((1) * (i64)sizeof(f32));
  char *local = A->ctx->local(A->ctx, local_bytes);
  if (!local) return;
  f32 *restrict const h0 = (f32 *)local;
  local += gradc_align((C) * (i64)sizeof(f32));
  f32 *restrict const h1 = (f32 *)local;
  local += gradc_align((C) * (i64)sizeof(f32));
  f32 *restrict const q1 = (f32 *)local;
  local += gradc_align((16) * (i64)sizeof(f32));
  f32 *restrict const o_a0 = (f32 *)local;
  local += gradc_align((1) * (i64)sizeof(f32));
  const int past_a0 = (n1) * (i64)sizeof(f32) >= A->ctx->past && (1) * (i64)sizeof(f32) >= 128;
  for (i64 e = 0; e < 16; e++) q1[e] = 0;
  i64 pending = 0;
  const i64 end = R;
  const i64 from = task * CH, until = gradc_min(from + CH, end);
  i64 now = -1;
  f32 *restrict a0 = 0;
  f32 *to0 = 0; /* where a row in thread memory goes */
  for (i64 p = from; p < until; p++) {
    const i64 r = perm[p], at = key[r], goes = at < V;
    const int first = at != now;
    (void)goes, (void)first;
    if (first && goes) { /* a piece of a segment that is not whole in this chunk goes to a carry row */
      const i64 carry = start[at] < from ? 2 * task : start[at + 1] > from + CH ? 2 * task + 1 : -1;
      if (to0) gradc_past(to0, o_a0, (1) * (i64)sizeof(f32));
      a0 = carry < 0 ? b8 + at * (1) : s0 + carry * (1);
      to0 = carry < 0 && past_a0 ? a0 : 0;
      if (to0) a0 = o_a0;
    }
    now = at;
      const i64 i0 = r;
      const i64 v0 = b0[i0];
      const i64 v1 = 0;
      const i32 v2 = v0 != v1;
      const f32 v7 = 0x1.0000000000000p+4f;
      const f32 v12 = b4[(i64)v0];
      const f32 v14 = 0x1.6a09e60000000p-1f;
      const f32 v17 = 0x1.0000000000000p+0f;
      const f32 v19 = 0x1.0000000000000p-1f;
      const f32 v22 = b5[i0];
      const f32 v23 = v22 / v7;
      const f32 v25 = b6[i0];
      const f32 v26 = v25 / v7;
      const f32 v28 = b7[i0];
      const f32 v29 = v28 / v7;
      const f32 v30 = 0x1.4f8b580000000p-17f;
      const f32 v31 = v29 + v30;
      const f32 v32 = rsqrt_f32(v31);
      const f32 v40 = -0x1.0000000000000p-1f;
      const f32 v43 = 0x1.9884540000000p-2f;
      f64 t_v6 = 0;
      f64 t_v35 = 0;
      {
        for (i64 c0 = 0; c0 < 16; c0 += GRADC_BLOCK) {
          const i64 c1 = gradc_min(c0 + GRADC_BLOCK, 16);
          f64 b_v6 = 0;
          f64 b_v35 = 0;
#pragma omp simd reduction(+:b_v6,b_v35)
          for (i64 i1 = c0; i1 < c1; i1++) {
            const f32 v3 = b1[i0 * 16 + i1];
            const f32 v4 = b2[i1];
            const f32 v5 = v3 * v4;
            const i8 v10 = b3[((i64)v0 * 16 + i1)];
            const f32 v11 = (f32)v10;
            const f32 v13 = v11 * v12;
            const f32 v15 = v13 * v14;
            const f32 v16 = erf_f32(v15);
            const f32 v18 = v16 + v17;
            const f32 v20 = v18 * v19;
            h0[i1] = v20;
            const f32 v21 = v13 * v20;
            const f32 v24 = v21 - v23;
            const f32 v27 = v24 - v26;
            const f32 v33 = v27 * v32;
            h1[i1] = v33;
            const f32 v34 = v5 * v33;
            const f32 v51 = v3 * v33;
            b_v6 += v5;
            b_v35 += v34;
            q1[i1] += v51;
          }
          t_v6 += b_v6;
          t_v35 += b_v35;
        }
      }
      const f32 v6 = (f32)t_v6;
      const f32 v35 = (f32)t_v35;
      const f32 v8 = v6 / v7;
      const f32 v36 = v35 / v7;
      f64 t_v49 = 0;
      {
        for (i64 c0 = 0; c0 < 16; c0 += GRADC_BLOCK) {
          const i64 c1 = gradc_min(c0 + GRADC_BLOCK, 16);
          f64 b_v49 = 0;
#pragma omp simd reduction(+:b_v49)
          for (i64 i1 = c0; i1 < c1; i1++) {
            const f32 v3 = b1[i0 * 16 + i1];
            const f32 v4 = b2[i1];
            const f32 v5 = v3 * v4;
            const f32 v9 = v5 - v8;
            const i8 v10 = b3[((i64)v0 * 16 + i1)];
            const f32 v11 = (f32)v10;
            const f32 v13 = v11 * v12;
            const f32 v20 = h0[i1];
            const f32 v33 = h1[i1];
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
            b_v49 += v48;
          }
          t_v49 += b_v49;
        }
      }
      const f32 v49 = (f32)t_v49;
      const f32 v50 = v49 * v32;
      if (goes) a0[0] = (f32)((first ? 0 : a0[0]) + v50);
      if (++pending == GRADC_FEW) {
        pending = 0;
  for (i64 e = 0; e < 16; e++) p1[e] += q1[e], q1[e] = 0;
      }
  }
  if (to0) gradc_past(to0, o_a0, (1) * (i64)sizeof(f32));
  for (i64 e = 0; e < 16; e++) p1[e] += q1[e], q1[e] = 0;
  gradc_past_done();
}
static void layer_norm_gelu_sum_grad_8ffb11_fold1(const void *args, i64 task) {
  const gradc_args *const A = args;
  const i64 *const n_ = A->n;
  (void)n_;
  const i64 n0 = n_[0];
  const i64 n1 = n_[1];
  const i64 *restrict const b0 = A->b[0];
  const f32 *restrict const b1 = A->b[1];
  const f32 *restrict const b2 = A->b[2];
  const i8 *restrict const b3 = A->b[3];
  const f32 *restrict const b4 = A->b[4];
  const f32 *restrict const b5 = A->b[5];
  const f32 *restrict const b6 = A->b[6];
  const f32 *restrict const b7 = A->b[7];
  f32 *restrict const b8 = A->b[8];
  f32 *restrict const b9 = A->b[9];
  const i64 R = n0, C = 16;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  const i64 V = n1;
  i32 *const key = (i32 *)scratch;
  scratch += gradc_align(R * 4);
  i32 *const perm = (i32 *)scratch;
  scratch += gradc_align(R * 4);
  i32 *const start = (i32 *)scratch;
  scratch += gradc_align((V + 2) * 4);
  f32 *const s0 = (f32 *)scratch;
  scratch += gradc_align(2 * chunks * (1) * (i64)sizeof(f32));
  f64 *const s1 = (f64 *)scratch;
  scratch += gradc_align(chunks * (16) * (i64)sizeof(f64));
  (void)scratch;
  const i64 size = 16;
  for (i64 e0 = task * 512; e0 < gradc_min(task * 512 + 512, size); e0 += 64) {
    const i64 count = gradc_min(64, size - e0);
    f64 total[64];
    for (i64 e = 0; e < count; e++) total[e] = 0x0.0p+0;
    for (i64 c = 0; c < chunks; c++)
      for (i64 e = 0; e < count; e++) total[e] += s1[c * size + e0 + e];
    for (i64 e = 0; e < count; e++) b9[e0 + e] = (f32)total[e];
  }
}
static void layer_norm_gelu_sum_grad_8ffb11_finish(const void *args, i64 task) {
  const gradc_args *const A = args;
  const i64 *const n_ = A->n;
  (void)n_;
  const i64 n0 = n_[0];
  const i64 n1 = n_[1];
  const i64 *restrict const b0 = A->b[0];
  const f32 *restrict const b1 = A->b[1];
  const f32 *restrict const b2 = A->b[2];
  const i8 *restrict const b3 = A->b[3];
  const f32 *restrict const b4 = A->b[4];
  const f32 *restrict const b5 = A->b[5];
  const f32 *restrict const b6 = A->b[6];
  const f32 *restrict const b7 = A->b[7];
  f32 *restrict const b8 = A->b[8];
  f32 *restrict const b9 = A->b[9];
  const i64 R = n0, C = 16;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  const i64 V = n1;
  i32 *const key = (i32 *)scratch;
  scratch += gradc_align(R * 4);
  i32 *const perm = (i32 *)scratch;
  scratch += gradc_align(R * 4);
  i32 *const start = (i32 *)scratch;
  scratch += gradc_align((V + 2) * 4);
  f32 *const s0 = (f32 *)scratch;
  scratch += gradc_align(2 * chunks * (1) * (i64)sizeof(f32));
  f64 *const s1 = (f64 *)scratch;
  scratch += gradc_align(chunks * (16) * (i64)sizeof(f64));
  (void)scratch;
  i64 local_bytes = 0;
  const int past0 = (n1) * (i64)sizeof(f32) >= A->ctx->past && (1) * (i64)sizeof(f32) >= 128;
  if (past0) local_bytes += gradc_align((1) * (i64)sizeof(f32));
  char *local = A->ctx->local(A->ctx, local_bytes);
  if (!local) return;
  f32 *none0 = 0; /* a row of no rows */
  if (past0) {
    none0 = (f32 *)local;
    local += gradc_align((1) * (i64)sizeof(f32));
    for (i64 e = 0; e < 1; e++) none0[e] = 0x0.0p+0f;
  }
  for (i64 v = task * 64; v < gradc_min(task * 64 + 64, V); v++) {
    const i64 from = start[v], to = start[v + 1];
    if (to > from && from / CH == (to - 1) / CH) continue;
    {
      f32 *restrict const row = b8 + v * (1);
      const i64 inner = 1;
      if (to == from && none0) {
        gradc_past(row, none0, inner * (i64)sizeof(f32));
      } else
      if (to == from) {
        for (i64 e = 0; e < inner; e++) row[e] = 0x0.0p+0f;
      } else {
        for (i64 e0 = 0; e0 < inner; e0 += 64) {
          const i64 count = gradc_min(64, inner - e0);
          f64 total[64];
          for (i64 e = 0; e < count; e++) total[e] = s0[(2 * (from / CH) + 1) * inner + e0 + e];
          for (i64 c = from / CH + 1; c <= (to - 1) / CH; c++)
            for (i64 e = 0; e < count; e++) total[e] += s0[2 * c * inner + e0 + e];
          for (i64 e = 0; e < count; e++) row[e0 + e] = (f32)total[e];
        }
      }
    }
  }
  gradc_past_done();
}
static i64 layer_norm_gelu_sum_grad_8ffb11_chunk(const i64 *n_) {
  const i64 n0 = n_[0];
  (void)n0;
  const i64 n1 = n_[1];
  (void)n1;
  (void)n_;
  const i64 rows = n0;
  return maximum_i64(floordiv_i64((rows + 262143), 262144), 128);
}
GRADC_SHARED i64 layer_norm_gelu_sum_grad_8ffb11_scratch(const i64 *n_) {
  const gradc_args all = {0, 0, n_, 0, 0, layer_norm_gelu_sum_grad_8ffb11_chunk(n_)};
  const gradc_args *const A = &all;
  const i64 n0 = n_[0];
  (void)n0;
  const i64 n1 = n_[1];
  (void)n1;
  const i64 R = n0, C = 16;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  const i64 V = n1;
  i32 *const key = (i32 *)scratch;
  scratch += gradc_align(R * 4);
  i32 *const perm = (i32 *)scratch;
  scratch += gradc_align(R * 4);
  i32 *const start = (i32 *)scratch;
  scratch += gradc_align((V + 2) * 4);
  f32 *const s0 = (f32 *)scratch;
  scratch += gradc_align(2 * chunks * (1) * (i64)sizeof(f32));
  f64 *const s1 = (f64 *)scratch;
  scratch += gradc_align(chunks * (16) * (i64)sizeof(f64));
  (void)scratch;
  return (i64)(scratch - A->scratch);
}
/* Bytes that each thread keeps for it. */
GRADC_SHARED i64 layer_norm_gelu_sum_grad_8ffb11_local(const i64 *n_) {
  const gradc_args all = {0, 0, n_, 0, 0, layer_norm_gelu_sum_grad_8ffb11_chunk(n_)};
  const gradc_args *const A = &all;
  const i64 n0 = n_[0];
  (void)n0;
  const i64 n1 = n_[1];
  (void)n1;
  const i64 R = n0, C = 16;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  const i64 V = n1;
  i32 *const key = (i32 *)scratch;
  scratch += gradc_align(R * 4);
  i32 *const perm = (i32 *)scratch;
  scratch += gradc_align(R * 4);
  i32 *const start = (i32 *)scratch;
  scratch += gradc_align((V + 2) * 4);
  f32 *const s0 = (f32 *)scratch;
  scratch += gradc_align(2 * chunks * (1) * (i64)sizeof(f32));
  f64 *const s1 = (f64 *)scratch;
  scratch += gradc_align(chunks * (16) * (i64)sizeof(f64));
  (void)scratch;
  i64 local_bytes = 0;
  local_bytes += gradc_align((C) * (i64)sizeof(f32));
  local_bytes += gradc_align((C) * (i64)sizeof(f32));
  local_bytes += gradc_align((16) * (i64)sizeof(f32));
  local_bytes += gradc_align((1) * (i64)sizeof(f32));
  return local_bytes;
}
GRADC_SHARED int layer_norm_gelu_sum_grad_8ffb11(const gradc_ctx *ctx, void *const *buffers, const i64 *dims, char *scratch_, i64 site) {
  const gradc_args all = {ctx, buffers, dims, scratch_, site, layer_norm_gelu_sum_grad_8ffb11_chunk(dims)};
  const void *const args = &all;
  const gradc_args *const A = args;
  const i64 *const n_ = A->n;
  (void)n_;
  const i64 n0 = n_[0];
  const i64 n1 = n_[1];
  const i64 *restrict const b0 = A->b[0];
  const f32 *restrict const b1 = A->b[1];
  const f32 *restrict const b2 = A->b[2];
  const i8 *restrict const b3 = A->b[3];
  const f32 *restrict const b4 = A->b[4];
  const f32 *restrict const b5 = A->b[5];
  const f32 *restrict const b6 = A->b[6];
  const f32 *restrict const b7 = A->b[7];
  f32 *restrict const b8 = A->b[8];
  f32 *restrict const b9 = A->b[9];
  const i64 R = n0, C = 16;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  const i64 V = n1;
  i32 *const key = (i32 *)scratch;
  scratch += gradc_align(R * 4);
  i32 *const perm = (i32 *)scratch;
  scratch += gradc_align(R * 4);
  i32 *const start = (i32 *)scratch;
  scratch += gradc_align((V + 2) * 4);
  f32 *const s0 = (f32 *)scratch;
  scratch += gradc_align(2 * chunks * (1) * (i64)sizeof(f32));
  f64 *const s1 = (f64 *)scratch;
  scratch += gradc_align(chunks * (16) * (i64)sizeof(f64));
  (void)scratch;
  (void)b0;
  (void)b1;
  (void)b2;
  (void)b3;
  (void)b4;
  (void)b5;
  (void)b6;
  (void)b7;
  (void)b8;
  (void)b9;
  ctx->parallel_for(ctx, gradc_chunks(R, 4096), layer_norm_gelu_sum_grad_8ffb11_key, args);
  gradc_sort(ctx, key, R, V, start, perm);
  ctx->parallel_for(ctx, gradc_chunks(R, CH), layer_norm_gelu_sum_grad_8ffb11_rows, args);
  ctx->parallel_for(ctx, gradc_chunks(16, 512), layer_norm_gelu_sum_grad_8ffb11_fold1, args);
  ctx->parallel_for(ctx, gradc_chunks(V, 64), layer_norm_gelu_sum_grad_8ffb11_finish, args);
  return 0;
}

/*
 * kernel @layer_norm_gelu_sum_grad_45cc9e rows(i0: n0) cols(i1: 16) strategy(b8: privatized, b9: privatized) {
 *   %0 = load b0[i0] : i64
 *   %1 = const {value=0} : i64
 *   %2 = ne %0, %1 : bool
 *   phase
 *   %3 = load b1[i0, i1] : f32
 *   %4 = load b2[i1] : f32
 *   %5 = mul %3, %4 : f32
 *   %6 = sum_cols %5 : f32
 *   %7 = const {value=0x1p+4} : f32
 *   %8 = div %6, %7 : f32
 *   phase
 *   %9 = sub %5, %8 : f32
 *   %10 = load b3[%0, i1] : i8
 *   %11 = cast %10 {dtype=f32} : f32
 *   %12 = load b4[%0, 0] : f32
 *   %13 = mul %11, %12 : f32
 *   %14 = const {value=0x1.6a09e6p-1} : f32
 *   %15 = mul %13, %14 : f32
 *   %16 = erf %15 : f32
 *   %17 = const {value=0x1p+0} : f32
 *   %18 = add %16, %17 : f32
 *   %19 = const {value=0x1p-1} : f32
 *   %20 = mul %18, %19 : f32
 *   %21 = mul %13, %20 : f32
 *   %22 = load b5[i0] : f32
 *   %23 = div %22, %7 : f32
 *   %24 = sub %21, %23 : f32
 *   %25 = load b6[i0] : f32
 *   %26 = div %25, %7 : f32
 *   %27 = sub %24, %26 : f32
 *   %28 = load b7[i0] : f32
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
 *   accum b8[%0, 0] <- %50 where %2 : f32
 *   %51 = mul %3, %33 : f32
 *   accum b9[i1] <- %51 : f32
 * }
 */
static void layer_norm_gelu_sum_grad_45cc9e_rows(const void *args, i64 task) {
  const gradc_args *const A = args;
  const i64 *const n_ = A->n;
  (void)n_;
  const i64 n0 = n_[0];
  const i64 n1 = n_[1];
  const i64 *restrict const b0 = A->b[0];
  const f32 *restrict const b1 = A->b[1];
  const f32 *restrict const b2 = A->b[2];
  const i8 *restrict const b3 = A->b[3];
  const f32 *restrict const b4 = A->b[4];
  const f32 *restrict const b5 = A->b[5];
  const f32 *restrict const b6 = A->b[6];
  const f32 *restrict const b7 = A->b[7];
  f32 *restrict const b8 = A->b[8];
  f32 *restrict const b9 = A->b[9];
  const i64 R = n0, C = 16;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  f64 *const s0 = (f64 *)scratch;
  scratch += gradc_align(chunks * (n1) * (i64)sizeof(f64));
  f64 *const s1 = (f64 *)scratch;
  scratch += gradc_align(chunks * (16) * (i64)sizeof(f64));
  (void)scratch;
  i64 since = 0; /* elements, since it was asked whether the call ends */
  (void)since;
  f64 *restrict const p0 = s0 + task * (n1);
  for (i64 e0 = 0, e1; e0 < n1; e0 = e1) {
    e1 = gradc_min(e0 + GRADC_STRETCH, n1);
    for (i64 e = e0; e < e1; e++) p0[e] = 0x0.0p+0f;
    if (gradc_ends(A, &since, e1 - e0)) return;
  }
  f64 *restrict const p1 = s1 + task * (16);
  for (i64 e0 = 0, e1; e0 < 16; e0 = e1) {
    e1 = gradc_min(e0 + GRADC_STRETCH, 16);
    for (i64 e = e0; e < e1; e++) p1[e] = 0x0.0p+0f;
    if (gradc_ends(A, &since, e1 - e0)) return;
  }
  i64 local_bytes = 0;
  local_bytes += gradc_align((C) * (i64)sizeof(f32));
  local_bytes += gradc_align((C) * (i64)sizeof(f32));
  local_bytes += gradc_align((16) * (i64)sizeof(f32));
  char *local = A->ctx->local(A->ctx, local_bytes);
  if (!local) return;
  f32 *restrict const h0 = (f32 *)local;
  local += gradc_align((C) * (i64)sizeof(f32));
  f32 *restrict const h1 = (f32 *)local;
  local += gradc_align((C) * (i64)sizeof(f32));
  f32 *restrict const q1 = (f32 *)local;
  local += gradc_align((16) * (i64)sizeof(f32));
  for (i64 e = 0; e < 16; e++) q1[e] = 0;
  i64 pending = 0;
  const i64 last_row = gradc_min(task * CH + CH, R);
  for (i64 r0 = task * CH, r1; r0 < last_row; r0 = r1) {
    r1 = gradc_min(r0 + gradc_stretch(C), last_row);
    for (i64 r = r0; r < r1; r++) {
      const i64 i0 = r;
      const i64 v0 = b0[i0];
      const i64 v1 = 0;
      const i32 v2 = v0 != v1;
      const f32 v7 = 0x1.0000000000000p+4f;
      const f32 v12 = b4[(i64)v0];
      const f32 v14 = 0x1.6a09e60000000p-1f;
      const f32 v17 = 0x1.0000000000000p+0f;
      const f32 v19 = 0x1.0000000000000p-1f;
      const f32 v22 = b5[i0];
      const f32 v23 = v22 / v7;
      const f32 v25 = b6[i0];
      const f32 v26 = v25 / v7;
      const f32 v28 = b7[i0];
      const f32 v29 = v28 / v7;
      const f32 v30 = 0x1.4f8b580000000p-17f;
      const f32 v31 = v29 + v30;
      const f32 v32 = rsqrt_f32(v31);
      const f32 v40 = -0x1.0000000000000p-1f;
      const f32 v43 = 0x1.9884540000000p-2f;
      f64 t_v6 = 0;
      f64 t_v35 = 0;
      {
        for (i64 c0 = 0; c0 < 16; c0 += GRADC_BLOCK) {
          const i64 c1 = gradc_min(c0 + GRADC_BLOCK, 16);
          f64 b_v6 = 0;
          f64 b_v35 = 0;
#pragma omp simd reduction(+:b_v6,b_v35)
          for (i64 i1 = c0; i1 < c1; i1++) {
            const f32 v3 = b1[i0 * 16 + i1];
            const f32 v4 = b2[i1];
            const f32 v5 = v3 * v4;
            const i8 v10 = b3[((i64)v0 * 16 + i1)];
            const f32 v11 = (f32)v10;
            const f32 v13 = v11 * v12;
            const f32 v15 = v13 * v14;
            const f32 v16 = erf_f32(v15);
            const f32 v18 = v16 + v17;
            const f32 v20 = v18 * v19;
            h0[i1] = v20;
            const f32 v21 = v13 * v20;
            const f32 v24 = v21 - v23;
            const f32 v27 = v24 - v26;
            const f32 v33 = v27 * v32;
            h1[i1] = v33;
            const f32 v34 = v5 * v33;
            const f32 v51 = v3 * v33;
            b_v6 += v5;
            b_v35 += v34;
            q1[i1] += v51;
          }
          t_v6 += b_v6;
          t_v35 += b_v35;
        }
      }
      const f32 v6 = (f32)t_v6;
      const f32 v35 = (f32)t_v35;
      const f32 v8 = v6 / v7;
      const f32 v36 = v35 / v7;
      f64 t_v49 = 0;
      {
        for (i64 c0 = 0; c0 < 16; c0 += GRADC_BLOCK) {
          const i64 c1 = gradc_min(c0 + GRADC_BLOCK, 16);
          f64 b_v49 = 0;
#pragma omp simd reduction(+:b_v49)
          for (i64 i1 = c0; i1 < c1; i1++) {
            const f32 v3 = b1[i0 * 16 + i1];
            const f32 v4 = b2[i1];
            const f32 v5 = v3 * v4;
            const f32 v9 = v5 - v8;
            const i8 v10 = b3[((i64)v0 * 16 + i1)];
            const f32 v11 = (f32)v10;
            const f32 v13 = v11 * v12;
            const f32 v20 = h0[i1];
            const f32 v33 = h1[i1];
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
            b_v49 += v48;
          }
          t_v49 += b_v49;
        }
      }
      const f32 v49 = (f32)t_v49;
      const f32 v50 = v49 * v32;
      if (v2) p0[(i64)v0] += v50;
      if (++pending == GRADC_FEW) {
        pending = 0;
  for (i64 e = 0; e < 16; e++) p1[e] += q1[e], q1[e] = 0;
      }
    }
    if (r1 < last_row && gradc_ends(A, &since, GRADC_STRETCH)) return;
  }
  for (i64 e = 0; e < 16; e++) p1[e] += q1[e], q1[e] = 0;
}
static void layer_norm_gelu_sum_grad_45cc9e_fold0(const void *args, i64 task) {
  const gradc_args *const A = args;
  const i64 *const n_ = A->n;
  (void)n_;
  const i64 n0 = n_[0];
  const i64 n1 = n_[1];
  const i64 *restrict const b0 = A->b[0];
  const f32 *restrict const b1 = A->b[1];
  const f32 *restrict const b2 = A->b[2];
  const i8 *restrict const b3 = A->b[3];
  const f32 *restrict const b4 = A->b[4];
  const f32 *restrict const b5 = A->b[5];
  const f32 *restrict const b6 = A->b[6];
  const f32 *restrict const b7 = A->b[7];
  f32 *restrict const b8 = A->b[8];
  f32 *restrict const b9 = A->b[9];
  const i64 R = n0, C = 16;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  f64 *const s0 = (f64 *)scratch;
  scratch += gradc_align(chunks * (n1) * (i64)sizeof(f64));
  f64 *const s1 = (f64 *)scratch;
  scratch += gradc_align(chunks * (16) * (i64)sizeof(f64));
  (void)scratch;
  const i64 size = n1;
  for (i64 e0 = task * 512; e0 < gradc_min(task * 512 + 512, size); e0 += 64) {
    const i64 count = gradc_min(64, size - e0);
    f64 total[64];
    for (i64 e = 0; e < count; e++) total[e] = 0x0.0p+0;
    for (i64 c = 0; c < chunks; c++)
      for (i64 e = 0; e < count; e++) total[e] += s0[c * size + e0 + e];
    for (i64 e = 0; e < count; e++) b8[e0 + e] = (f32)total[e];
  }
}
static void layer_norm_gelu_sum_grad_45cc9e_fold1(const void *args, i64 task) {
  const gradc_args *const A = args;
  const i64 *const n_ = A->n;
  (void)n_;
  const i64 n0 = n_[0];
  const i64 n1 = n_[1];
  const i64 *restrict const b0 = A->b[0];
  const f32 *restrict const b1 = A->b[1];
  const f32 *restrict const b2 = A->b[2];
  const i8 *restrict const b3 = A->b[3];
  const f32 *restrict const b4 = A->b[4];
  const f32 *restrict const b5 = A->b[5];
  const f32 *restrict const b6 = A->b[6];
  const f32 *restrict const b7 = A->b[7];
  f32 *restrict const b8 = A->b[8];
  f32 *restrict const b9 = A->b[9];
  const i64 R = n0, C = 16;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  f64 *const s0 = (f64 *)scratch;
  scratch += gradc_align(chunks * (n1) * (i64)sizeof(f64));
  f64 *const s1 = (f64 *)scratch;
  scratch += gradc_align(chunks * (16) * (i64)sizeof(f64));
  (void)scratch;
  const i64 size = 16;
  for (i64 e0 = task * 512; e0 < gradc_min(task * 512 + 512, size); e0 += 64) {
    const i64 count = gradc_min(64, size - e0);
    f64 total[64];
    for (i64 e = 0; e < count; e++) total[e] = 0x0.0p+0;
    for (i64 c = 0; c < chunks; c++)
      for (i64 e = 0; e < count; e++) total[e] += s1[c * size + e0 + e];
    for (i64 e = 0; e < count; e++) b9[e0 + e] = (f32)total[e];
  }
}
static i64 layer_norm_gelu_sum_grad_45cc9e_chunk(const i64 *n_) {
  const i64 n0 = n_[0];
  (void)n0;
  const i64 n1 = n_[1];
  (void)n1;
  (void)n_;
  const i64 size0 = n1;
  const i64 rows = n0;
  return maximum_i64((floordiv_i64((rows - 1), maximum_i64(floordiv_i64(4194304, (size0 + 16)), 1)) + 1), 128);
}
GRADC_SHARED i64 layer_norm_gelu_sum_grad_45cc9e_scratch(const i64 *n_) {
  const gradc_args all = {0, 0, n_, 0, 0, layer_norm_gelu_sum_grad_45cc9e_chunk(n_)};
  const gradc_args *const A = &all;
  const i64 n0 = n_[0];
  (void)n0;
  const i64 n1 = n_[1];
  (void)n1;
  const i64 R = n0, C = 16;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  f64 *const s0 = (f64 *)scratch;
  scratch += gradc_align(chunks * (n1) * (i64)sizeof(f64));
  f64 *const s1 = (f64 *)scratch;
  scratch += gradc_align(chunks * (16) * (i64)sizeof(f64));
  (void)scratch;
  return (i64)(scratch - A->scratch);
}
/* Bytes that each thread keeps for it. */
GRADC_SHARED i64 layer_norm_gelu_sum_grad_45cc9e_local(const i64 *n_) {
  const gradc_args all = {0, 0, n_, 0, 0, layer_norm_gelu_sum_grad_45cc9e_chunk(n_)};
  const gradc_args *const A = &all;
  const i64 n0 = n_[0];
  (void)n0;
  const i64 n1 = n_[1];
  (void)n1;
  const i64 R = n0, C = 16;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  f64 *const s0 = (f64 *)scratch;
  scratch += gradc_align(chunks * (n1) * (i64)sizeof(f64));
  f64 *const s1 = (f64 *)scratch;
  scratch += gradc_align(chunks * (16) * (i64)sizeof(f64));
  (void)scratch;
  i64 local_bytes = 0;
  local_bytes += gradc_align((C) * (i64)sizeof(f32));
  local_bytes += gradc_align((C) * (i64)sizeof(f32));
  local_bytes += gradc_align((16) * (i64)sizeof(f32));
  return local_bytes;
}
GRADC_SHARED int layer_norm_gelu_sum_grad_45cc9e(const gradc_ctx *ctx, void *const *buffers, const i64 *dims, char *scratch_, i64 site) {
  const gradc_args all = {ctx, buffers, dims, scratch_, site, layer_norm_gelu_sum_grad_45cc9e_chunk(dims)};
  const void *const args = &all;
  const gradc_args *const A = args;
  const i64 *const n_ = A->n;
  (void)n_;
  const i64 n0 = n_[0];
  const i64 n1 = n_[1];
  const i64 *restrict const b0 = A->b[0];
  const f32 *restrict const b1 = A->b[1];
  const f32 *restrict const b2 = A->b[2];
  const i8 *restrict const b3 = A->b[3];
  const f32 *restrict const b4 = A->b[4];
  const f32 *restrict const b5 = A->b[5];
  const f32 *restrict const b6 = A->b[6];
  const f32 *restrict const b7 = A->b[7];
  f32 *restrict const b8 = A->b[8];
  f32 *restrict const b9 = A->b[9];
  const i64 R = n0, C = 16;
  const i64 CH = A->chunk, chunks = gradc_chunks(R, CH);
  (void)R, (void)C, (void)CH, (void)chunks;
  char *scratch = A->scratch;
  f64 *const s0 = (f64 *)scratch;
  scratch += gradc_align(chunks * (n1) * (i64)sizeof(f64));
  f64 *const s1 = (f64 *)scratch;
  scratch += gradc_align(chunks * (16) * (i64)sizeof(f64));
  (void)scratch;
  (void)b0;
  (void)b1;
  (void)b2;
  (void)b3;
  (void)b4;
  (void)b5;
  (void)b6;
  (void)b7;
  (void)b8;
  (void)b9;
  ctx->parallel_for(ctx, chunks, layer_norm_gelu_sum_grad_45cc9e_rows, args);
  ctx->parallel_for(ctx, gradc_chunks(n1, 512), layer_norm_gelu_sum_grad_45cc9e_fold0, args);
  ctx->parallel_for(ctx, gradc_chunks(16, 512), layer_norm_gelu_sum_grad_45cc9e_fold1, args);
  return 0;
}
