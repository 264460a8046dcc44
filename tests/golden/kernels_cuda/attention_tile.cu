/*
 * loop over(at0_: B, at1_: H) rows(row_: S) by(128) count(rows_) tile(mma, warps 4, stages 2) {
 *   sweep cols(col_: S) by(48) count(cols_) to(row_+rows_) {
 *     carry top: f32[rows_] max
 *     carry total_: f32[rows_] sum by exp(top)
 *     carry t6_sum: f32[rows_,64] sum by exp(top)
 *     block t3_: f32[rows_,cols_]
 *     block t5_: bf16[rows_,cols_]
 *     call @matmul axes(m: rows_, n: cols_, k: 64) t3_[m, n] <- matmul q_[(at0_), (at1_), m + (row_), k], k_[(at0_), (at1_), n + (col_), k]
 *     kernel @softmax_matmul_4ec39b rows(i0: rows_) cols(i1: cols_) {
 *       phase
 *       %0 = index i1 + (col_) : i64
 *       %1 = index i0 + (row_) : i64
 *       %2 = le %0, %1 : bool
 *       %3 = load t3_[i0, i1] : f32
 *       %4 = const {value=0x1p-3} : f32
 *       %5 = mul %3, %4 : f32
 *       %6 = const {value=-inf} : f32
 *       %7 = where %2, %5, %6 : f32
 *       %8 = max_cols %7 : f32
 *       accum top[i0] <- %8 {combine="max"} : f32
 *     }
 *     kernel @softmax_matmul_ad74bd rows(i0: rows_) cols(i1: cols_) {
 *       phase
 *       %0 = index i1 + (col_) : i64
 *       %1 = index i0 + (row_) : i64
 *       %2 = le %0, %1 : bool
 *       %3 = load t3_[i0, i1] : f32
 *       %4 = const {value=0x1p-3} : f32
 *       %5 = mul %3, %4 : f32
 *       %6 = const {value=-inf} : f32
 *       %7 = where %2, %5, %6 : f32
 *       %8 = load top[i0] : f32
 *       %9 = eq %8, %6 : bool
 *       %10 = const {value=0x0p+0} : f32
 *       %11 = where %9, %10, %8 : f32
 *       %12 = sub %7, %11 : f32
 *       %13 = exp %12 : f32
 *       %14 = sum_cols %13 : f32
 *       %15 = cast %13 {dtype=bf16} : bf16
 *       accum total_[i0] <- %14 : f32
 *       store t5_[i0, i1] <- %15 : bf16
 *     }
 *     call @matmul axes(m: rows_, n: 64, k: cols_) t6_sum[m, n] += matmul t5_[m, k], v_[(at0_), (at1_), k + (col_), n]
 *   }
 *   kernel @softmax_matmul_3f1571 rows(i0: rows_) cols() {
 *     %0 = load top[i0] : f32
 *     %1 = const {value=-inf} : f32
 *     %2 = eq %0, %1 : bool
 *     %3 = load total_[i0] : f32
 *     store t4_[(at0_), (at1_), i0 + (row_)] <- %2 : bool
 *     store t7_[(at0_), (at1_), i0 + (row_)] <- %3 : f32
 *   }
 *   kernel @softmax_matmul_e0d82c rows(i0: rows_) cols(i1: 64) {
 *     phase
 *     %0 = load t6_sum[i0, i1] : f32
 *     store t6_[(at0_), (at1_), i0 + (row_), i1] <- %0 : f32
 *   }
 * }
 */
extern "C" __global__ void __launch_bounds__(128, 3) softmax_matmul_tile_387a59(
  const u16 *__restrict__ const q_,
  const u16 *__restrict__ const k_,
  const u16 *__restrict__ const v_,
  u8 *__restrict__ const t4_,
  f32 *__restrict__ const t7_,
  f32 *__restrict__ const t6_,
  const i64 dim0, const i64 dim1, const i64 dim2, u64 *const flag, const i64 site, const i64 first_block) {
  if (gradc_stopped(flag, site)) return;
  typedef gradc_bf16_fragments operand;
  enum { ROWS = 128, COLUMNS = 48, TILES = 2, STAGES = 2, THREADS = 128, LAST_ROW = ROWS - 1, LAST_COLUMN = COLUMNS - 1 };
  const ix B = (ix)dim0;
  const ix H = (ix)dim1;
  const ix S = (ix)dim2;
  /* the block's place */
  ix at_block = (ix)first_block + (ix)blockIdx.x;
  const ix blocks = gradc_chunks(S, ROWS), row_block = at_block % blocks;
  const ix row_ = (blocks - 1 - row_block) * ROWS, rows_ = gradc_min(ROWS, S - row_); /* longest first */
  at_block /= blocks;
  const ix at1_ = at_block % H;
  at_block /= H;
  const ix at0_ = at_block % B;
  at_block /= B;
  /* the lane's rows and columns; lanes behind the last row compute that row and store nothing */
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = warp * 16 * TILES, lane_row = warp_row + lane / 4, lane_column = lane % 4 * 2;
  /* panels: of the rows for the whole kernel, of columns in stages */
  extern __shared__ __align__(16) char dynamic_shared[];
  u16 *const left0 = (u16 *)dynamic_shared + 0; /* q_: 128 x 64 */
  gradc_rows<64, 64, 72, ROWS, THREADS>::at(q_, (64 * H * S * at0_ + 64 * S * at1_ + 64 * row_), 64, 1).copy(left0, 0, rows_);
  cp_async_commit();
  f32 top[2 * TILES] = {f32_of_bits(0xff800000u), f32_of_bits(0xff800000u), f32_of_bits(0xff800000u), f32_of_bits(0xff800000u)}; f32 top_factor[2 * TILES], top_exponent[2 * TILES] = {-0x1.fffffep127f, -0x1.fffffep127f, -0x1.fffffep127f, -0x1.fffffep127f}; /* carry top: f32[rows_] max */
  f32 total_[2 * TILES] = {0.0f, 0.0f, 0.0f, 0.0f}; /* carry total_: f32[rows_] sum by exp(top) */
  f32 t6_sum[TILES * 64 / 8][4] = {}; /* carry t6_sum: f32[rows_,64] sum by exp(top) */
  const auto pieces_72 = gradc_in_shared(gradc_rows<64, 64, 72, COLUMNS, THREADS>::own_of(dynamic_shared)), rows_72 = gradc_in_shared(gradc_of_lane<72>(dynamic_shared)), columns_72 = gradc_in_shared(gradc_right_of_lane<72>(dynamic_shared)); /* a thread's first piece, and what a lane loads */
  /* ---- sweep over col_ ---- */
  u16 *const right0 = (u16 *)dynamic_shared + 9216; /* k_: 48 x 64, 2 stages */
  const auto from0 = gradc_rows<64, 64, 72, COLUMNS, THREADS>::at(k_, (64 * H * S * at0_ + 64 * S * at1_), 64, 1);
  u16 *const right1 = (u16 *)dynamic_shared + 16128; /* v_: 48 x 64, 2 stages */
  const auto from1 = gradc_rows<64, 64, 72, COLUMNS, THREADS>::at(v_, (64 * H * S * at0_ + 64 * S * at1_), 64, 1);
  const f32 v4 = f32_of_bits(0xff800000u), v7 = 0.125f;
  const f32 v13 = 67108864.0f, v15 = 0.18033688f;
  const ix begin0 = 0, end0 = minimum_i64(S, (row_ + rows_));
  const ix even0 = gradc_kept(from0.is_even() && from1.is_even() && 1 ? S - COLUMNS : -1);
  ix place0 = from0.own(begin0), place1 = from1.own(begin0);
  auto copy0 = [&](const ix col_, const int stage) {
    if (col_ <= even0) { /* all are there, and move 16 bytes at a time */
      from0.copy_even(pieces_72 + 9216 + stage * COLUMNS * 72, place0);
      from1.copy_even(pieces_72 + 16128 + stage * COLUMNS * 72, place1);
    } else {
      from0.copy_any(right0 + stage * COLUMNS * 72, col_, S - col_);
      from1.copy_any(right1 + stage * COLUMNS * 72, col_, S - col_);
    }
  };
  for (int stage = 0; stage < STAGES - 1; stage++) {
    if (begin0 + stage * COLUMNS < end0) copy0(begin0 + stage * COLUMNS, stage);
    cp_async_commit();
  }
  #pragma unroll 1
  for (ix col_ = begin0, stage = 0; col_ < end0; col_ += COLUMNS, stage = stage + 1 < STAGES ? stage + 1 : 0) {
    const ix cols_ = gradc_min(COLUMNS, S - col_);
    cp_async_wait<STAGES - 2>();
    __syncthreads(); /* the stage is there for all, and nobody reads the one before it any more */
    if (col_ + (STAGES - 1) * COLUMNS < end0) copy0(col_ + (STAGES - 1) * COLUMNS, stage > 0 ? stage - 1 : STAGES - 1);
    cp_async_commit();
    const ix lane_columns = cols_ - lane_column; /* so many are there from the lane's first column on */
    const int at_edge = !(cols_ == COLUMNS && ((LAST_COLUMN - 1 * row_ + col_) <= 0));
    u32 t5_[TILES * COLUMNS / 8][2];
    /* call @matmul axes(m: rows_, n: cols_, k: 64) t3_[m, n] <- matmul q_[(at0_), (at1_), m + (row_), k], k_[(at0_), (at1_), n + (col_), k] */
    f32 t3_[TILES * COLUMNS / 8][4] = {};
    gradc_scores<operand, 72, COLUMNS, 64, TILES>(t3_, rows_72 + 0 + warp_row * 72, columns_72 + 9216 + (stage * COLUMNS) * 72);
    { const auto elements = [&](const auto EDGE) {
        {
          /* softmax_matmul_4ec39b */
          ix d2[2 * TILES];
          #pragma unroll
          for (int h = 0; h < 2 * TILES; h++) {
            const ix i0 = gradc_min(lane_row + 8 * h, rows_ - 1);
            d2[h] = lane_column + (i0 * (-1) + (-1 * row_ + col_));
          }
          f32 r6[2 * TILES];
          #pragma unroll
          for (int piece = 0; piece < TILES * COLUMNS / 8; piece++) {
            const int t = piece % TILES, c = piece / TILES, n = t * (COLUMNS / 8) + c;
            #pragma unroll
            for (int i = 0; i < 4; i++) {
              const int h = 2 * t + i / 2, step = 8 * c + i % 2;
              const bool there = !EDGE || step < lane_columns;
              const i32 v2 = !EDGE || d2[h] + step <= 0;
              const f32 v3 = t3_[n][i];
              const f32 v5 = v2 ? v3 : v4;
              t3_[n][i] = there ? v5 : 0;
              gradc_join<gradc_maximum<f32>>(c == 0 && i % 2 == 0, r6[h], there ? v5 : f32_of_bits(0xff800000u));
            }
          }
          #pragma unroll
          for (int h = 0; h < 2 * TILES; h++) {
            r6[h] = gradc_of_quad<gradc_maximum<f32>>(r6[h]);
          }
          #pragma unroll
          for (int h = 0; h < 2 * TILES; h++) {
            const f32 v6 = r6[h];
            const f32 v8 = v6 * v7;
            top_factor[h] = gradc_raised(top[h], v8, top_exponent[h]);
            #pragma unroll
            for (int n = h / 2 * (64 / 8); n < (h / 2 + 1) * (64 / 8); n++) {
              t6_sum[n][h % 2 * 2] *= top_factor[h], t6_sum[n][h % 2 * 2 + 1] *= top_factor[h];
            }
          }
        }
        {
          /* softmax_matmul_ad74bd */
          f32 r16[2 * TILES], r18[2 * TILES];
          #pragma unroll
          for (int h = 0; h < 2 * TILES; h++) {
            const f32 v9 = top[h];
            const f32 v11 = gradc_base(v9);
            const f32 v12 = abs_f32(v11);
            const i32 v14 = v12 < v13;
            const f32 v16 = v14 ? v15 : v7;
            r16[h] = v16;
            const f32 v17 = gradc_exponent(v11);
            const f32 v18 = -v17;
            r18[h] = v18;
          }
          f32 r21[2 * TILES];
          #pragma unroll
          for (int piece = 0; piece < TILES * COLUMNS / 8; piece++) {
            const int t = piece % TILES, c = piece / TILES, n = t * (COLUMNS / 8) + c;
            f32 of_b10[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) {
              const int h = 2 * t + i / 2, step = 8 * c + i % 2;
              const bool there = !EDGE || step < lane_columns;
              const f32 v16 = r16[h];
              const f32 v18 = r18[h];
              const f32 v10 = t3_[n][i];
              const f32 v19 = mad_f32(v10, v16, v18);
              const f32 v20 = exp2_approx(v19);
              gradc_join<gradc_plain_sum>(c == 0 && i % 2 == 0, r21[h], there ? v20 : 0.0f);
              of_b10[i] = there ? v20 : 0;
            }
            gradc_pack<operand>(t5_[n], of_b10);
          }
          #pragma unroll
          for (int h = 0; h < 2 * TILES; h++) {
            const f32 v21 = r21[h];
            total_[h] = mad_f32(total_[h], top_factor[h], v21);
          }
        }
      }; at_edge ? elements(gradc_constant<1>()) : elements(gradc_constant<0>()); }
    /* call @matmul axes(m: rows_, n: 64, k: cols_) t6_sum[m, n] += matmul t5_[m, k], v_[(at0_), (at1_), k + (col_), n] */
    gradc_add_product<operand, 72, COLUMNS, 64, TILES>(t6_sum, t5_, rows_72 + 16128 + (stage * COLUMNS) * 72);
  }
  cp_async_wait<0>();
  __syncthreads();
  #pragma unroll
  for (int h = 0; h < 2 * TILES; h++) {
    total_[h] = gradc_of_quad<gradc_plain_sum>(total_[h]);
  }
  gradc_unrounded(total_, top); gradc_unrounded(t6_sum, top);
  /* ---- after the sweeps ---- */
  {
    /* softmax_matmul_3f1571 */
    #pragma unroll
    for (int h = 0; h < 2 * TILES; h++) {
      const ix i0 = gradc_min(lane_row + 8 * h, rows_ - 1);
      const f32 v23 = top[h];
      const i32 v24 = v23 == v4;
      const f32 v25 = total_[h];
      if (lane_row + 8 * h < rows_ && lane_column == 0) t4_[(i0 + (H * S * at0_ + S * at1_ + row_))] = (u8)(v24);
      if (lane_row + 8 * h < rows_ && lane_column == 0) t7_[(i0 + (H * S * at0_ + S * at1_ + row_))] = v25;
    }
  }
  {
    /* softmax_matmul_e0d82c */
    #pragma unroll
    for (int piece = 0; piece < TILES * 64 / 8; piece++) {
      const int t = piece % TILES, c = piece / TILES, n = t * (64 / 8) + c;
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        const int h = 2 * t + i / 2, step = 8 * c + i % 2;
        const ix i0 = gradc_min(lane_row + 8 * h, rows_ - 1);
        const ix i1 = lane_column + step;
        const f32 v26 = t6_sum[n][i];
        if (lane_row + 8 * h < rows_) t6_[(i0 * 64 + i1 + (64 * H * S * at0_ + 64 * S * at1_ + 64 * row_))] = v26;
      }
    }
  }
}
