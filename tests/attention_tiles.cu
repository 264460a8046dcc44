/* Attention on tensor cores, a test of tensor_cores.h: y = softmax(scale q k^T) v and its gradients, in blocks of rows and columns.
 *
 * q, k, v, dy: bf16[heads, S, D].  Exponentials are powers of two: `scale` has log2(e) in it, and lse = log2(sum of 2^s).  A warp has 16
 * rows of a block; lanes have fragments as tensor_cores.h says.  Two stages of operands: one is multiplied while the next is copied.
 * Rows and columns from S on are zeros in shared memory, have weights of 0, and are not stored. */

/* An element of a tile of D columns: pieces of 16 bytes are permuted, so that a column of 8 pieces lies in 8 different sets of banks. */
template <int D> GRADC_FN int place(int r, int c) { return r * D + ((c >> 3 ^ r & 7) << 3) + (c & 7); }

/* Starts the copy of ROWS rows, of which `there` exist, by all threads of the block. */
template <int D, int ROWS, int THREADS> GRADC_FN void copy_tile(u16 *tile, const u16 *from, int there) {
#pragma unroll
  for (int i = 0; i < ROWS * D / 8 / THREADS; i++) {
    const int piece = i * THREADS + threadIdx.x, r = piece / (D / 8), c = piece % (D / 8) * 8;
    cp_async16(tile + place<D>(r, c), r < there ? from + (i64)r * D + c : from, r < there ? 16 : 0);
  }
}

/* Fragments of 16 x 16 elements from row r and column c on: a; b of two products, whose columns are the tile's rows; b whose columns are its
 * columns. */
template <int D> GRADC_FN void load_a(u32 (&a)[4], const u16 *tile, int r, int c) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4(a, tile + place<D>(r + lane % 16, c + lane / 16 * 8));
}
template <int D> GRADC_FN void load_b_of_rows(u32 (&b)[4], const u16 *tile, int r, int c) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4(b, tile + place<D>(r + lane % 8 + lane / 16 * 8, c + lane / 8 % 2 * 8));
}
template <int D> GRADC_FN void load_b_of_columns(u32 (&b)[4], const u16 *tile, int r, int c) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4_trans(b, tile + place<D>(r + lane % 16, c + lane / 16 * 8));
}
GRADC_FN void multiply_2(f32 (&left)[4], f32 (&right)[4], const u32 (&a)[4], const u32 (&b)[4]) {
  mma_m16n8k16_bf16(left, a, b[0], b[1]);
  mma_m16n8k16_bf16(right, a, b[2], b[3]);
}
/* Two neighbouring results as an operand. */
GRADC_FN void as_a(u32 (&a)[4], const f32 (&left)[4], const f32 (&right)[4]) {
  a[0] = pack_bf16(left[0], left[1]);
  a[1] = pack_bf16(left[2], left[3]);
  a[2] = pack_bf16(right[0], right[1]);
  a[3] = pack_bf16(right[2], right[3]);
}
/* s += a b^T for columns c to c + 15 of a and of b, which has N rows. */
template <int D, int N> GRADC_FN void add_products_of_rows(f32 (&s)[N / 8][4], const u32 (&a)[4], const u16 *b_tile, int c) {
#pragma unroll
  for (int n = 0; n < N / 16; n++) {
    u32 b[4];
    load_b_of_rows<D>(b, b_tile, n * 16, c);
    multiply_2(s[2 * n], s[2 * n + 1], a, b);
  }
}
/* s = a b^T: 16 rows of a tile from `row` on times N rows of another. */
template <int D, int N> GRADC_FN void products_of_rows(f32 (&s)[N / 8][4], const u16 *a_tile, int row, const u16 *b_tile) {
#pragma unroll
  for (int c = 0; c < D; c += 16) {
    u32 a[4];
    load_a<D>(a, a_tile, row, c);
    add_products_of_rows<D, N>(s, a, b_tile, c);
  }
}
/* o += p b: p 16 x N in f32, b N x D. */
template <int D, int N> GRADC_FN void add_products(f32 (&o)[D / 8][4], const f32 (&p)[N / 8][4], const u16 *b_tile) {
#pragma unroll
  for (int c = 0; c < N / 16; c++) {
    u32 a[4], b[4];
    as_a(a, p[2 * c], p[2 * c + 1]);
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
      load_b_of_columns<D>(b, b_tile, c * 16, n * 16);
      multiply_2(o[2 * n], o[2 * n + 1], a, b);
    }
  }
}
template <int D> GRADC_FN void store_rows(u16 *to, const f32 (&o)[D / 8][4], int row, int S, const f32 (&factor)[2]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    if (row + 8 * h < S) {
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
        *(u32 *)(to + (i64)(row + 8 * h) * D + n * 8 + t * 2) = pack_bf16(o[n][2 * h] * factor[h], o[n][2 * h + 1] * factor[h]);
      }
    }
  }
}
GRADC_FN f32 max_of_quad(f32 x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
GRADC_FN f32 sum_of_quad(f32 x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <int BM, int BN, int D, bool CAUSAL>
GRADC_FN void attention(const u16 *q, const u16 *k, const u16 *v, u16 *y, f32 *lse, int S, f32 scale, u16 *shared) {
  enum { THREADS = BM / 16 * 32 };
  u16 *const q_tile = shared, *const k_tiles = q_tile + BM * D, *const v_tiles = k_tiles + 2 * BN * D;
  const int blocks = (S + BM - 1) / BM, row0 = (blocks - 1 - (int)blockIdx.x % blocks) * BM; /* longest first */
  const int warp_row = threadIdx.x / 32 * 16, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = row0 + warp_row + g;
  const i64 head = blockIdx.x / blocks * (i64)S;
  q += head * D; k += head * D; v += head * D; y += head * D; lse += head;
  const int end = CAUSAL ? min(row0 + BM, S) : S;
  copy_tile<D, BM, THREADS>(q_tile, q + (i64)row0 * D, S - row0);
  cp_async_commit();
  copy_tile<D, BN, THREADS>(k_tiles, k, S);
  copy_tile<D, BN, THREADS>(v_tiles, v, S);
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads(); /* q is there for all */
  u32 a[D / 16][4];
#pragma unroll
  for (int c = 0; c < D / 16; c++) load_a<D>(a[c], q_tile, warp_row, c * 16);
  f32 o[D / 8][4] = {}, top[2] = {-GRADC_INFINITY_F32, -GRADC_INFINITY_F32}, total[2] = {0, 0};
  for (int col0 = 0; col0 < end; col0 += BN) {
    const int stage = col0 / BN % 2, next = col0 + BN;
    if (next < end) {
      copy_tile<D, BN, THREADS>(k_tiles + (1 - stage) * BN * D, k + (i64)next * D, S - next);
      copy_tile<D, BN, THREADS>(v_tiles + (1 - stage) * BN * D, v + (i64)next * D, S - next);
    }
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads(); /* the stage is there for all */
    f32 s[BN / 8][4] = {};
#pragma unroll
    for (int c = 0; c < D / 16; c++) add_products_of_rows<D, BN>(s, a[c], k_tiles + stage * BN * D, c * 16);
    const bool edge = col0 + BN > (CAUSAL ? row0 : S);
#pragma unroll
    for (int n = 0; n < BN / 8; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int c = col0 + n * 8 + t * 2 + i % 2;
        s[n][i] = edge && (c >= S || (CAUSAL && c > row + i / 2 * 8)) ? -GRADC_INFINITY_F32 : s[n][i] * scale;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      f32 m = top[h], sum = 0;
#pragma unroll
      for (int n = 0; n < BN / 8; n++) m = fmaxf(m, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      m = max_of_quad(m);
      const f32 base = m == -GRADC_INFINITY_F32 ? 0 : m, less = exp2_approx(top[h] - base);
      top[h] = m;
#pragma unroll
      for (int n = 0; n < BN / 8; n++) {
        s[n][2 * h] = exp2_approx(s[n][2 * h] - base);
        s[n][2 * h + 1] = exp2_approx(s[n][2 * h + 1] - base);
        sum += s[n][2 * h] + s[n][2 * h + 1];
      }
      total[h] = total[h] * less + sum;
#pragma unroll
      for (int n = 0; n < D / 8; n++) o[n][2 * h] *= less, o[n][2 * h + 1] *= less;
    }
    add_products<D, BN>(o, s, v_tiles + stage * BN * D);
    __syncthreads(); /* nobody reads the stage any more */
  }
  f32 factor[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const f32 z = sum_of_quad(total[h]);
    factor[h] = 1 / z;
    if (t == 0 && row + 8 * h < S) lse[row + 8 * h] = top[h] + log2f(z);
  }
  store_rows<D>(y, o, row, S, factor);
}

/* dk and dv of BN columns, over blocks of BM rows: the transposed scores k q^T have the block's columns as their rows, so that the transposed
 * weights are operands as they are. */
template <int BM, int BN, int D, bool CAUSAL>
GRADC_FN void gradients_of_columns(const u16 *q, const u16 *k, const u16 *v, const u16 *dy, const f32 *lse, const f32 *delta, u16 *dk,
                                   u16 *dv, int S, f32 scale, f32 slope, u16 *shared) {
  enum { THREADS = BN / 16 * 32 };
  u16 *const k_tile = shared, *const v_tile = k_tile + BN * D, *const q_tiles = v_tile + BN * D, *const dy_tiles = q_tiles + 2 * BM * D;
  f32 *const of_rows = (f32 *)(dy_tiles + 2 * BM * D); /* lse and delta of a stage's rows */
  const int blocks = (S + BN - 1) / BN, col0 = (int)blockIdx.x % blocks * BN;
  const int warp_col = threadIdx.x / 32 * 16, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, col = col0 + warp_col + g;
  const i64 head = blockIdx.x / blocks * (i64)S;
  q += head * D; k += head * D; v += head * D; dy += head * D; dk += head * D; dv += head * D; lse += head; delta += head;
  const int first = CAUSAL ? col0 / BM * BM : 0;
  auto copy_stage = [&](int stage, int row0) {
    copy_tile<D, BM, THREADS>(q_tiles + stage * BM * D, q + (i64)row0 * D, S - row0);
    copy_tile<D, BM, THREADS>(dy_tiles + stage * BM * D, dy + (i64)row0 * D, S - row0);
    for (int r = threadIdx.x; r < BM; r += THREADS) {
      cp_async4(of_rows + 2 * stage * BM + r, lse + min(row0 + r, S - 1));
      cp_async4(of_rows + (2 * stage + 1) * BM + r, delta + min(row0 + r, S - 1));
    }
  };
  copy_tile<D, BN, THREADS>(k_tile, k + (i64)col0 * D, S - col0);
  copy_tile<D, BN, THREADS>(v_tile, v + (i64)col0 * D, S - col0);
  copy_stage(0, first);
  cp_async_commit();
  f32 k_sum[D / 8][4] = {}, v_sum[D / 8][4] = {};
  for (int row0 = first; row0 < S; row0 += BM) {
    const int stage = (row0 - first) / BM % 2;
    if (row0 + BM < S) copy_stage(1 - stage, row0 + BM);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    const u16 *const q_tile = q_tiles + stage * BM * D, *const dy_tile = dy_tiles + stage * BM * D;
    const f32 *const row_lse = of_rows + 2 * stage * BM, *const row_delta = row_lse + BM;
    f32 p[BM / 8][4] = {}, ds[BM / 8][4] = {};
    products_of_rows<D, BM>(p, k_tile, warp_col, q_tile);
    products_of_rows<D, BM>(ds, v_tile, warp_col, dy_tile);
    const bool edge = row0 + BM > S || (CAUSAL && row0 < col0 + BN);
#pragma unroll
    for (int n = 0; n < BM / 8; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = n * 8 + t * 2 + i % 2, c = col + i / 2 * 8;
        const bool none = edge && (row0 + r >= S || (CAUSAL && c > row0 + r));
        p[n][i] = none ? 0 : exp2_approx(p[n][i] * scale - row_lse[r]);
        ds[n][i] = p[n][i] * (ds[n][i] - row_delta[r]);
      }
    }
    add_products<D, BM>(v_sum, p, dy_tile);
    add_products<D, BM>(k_sum, ds, q_tile);
    __syncthreads();
  }
  store_rows<D>(dk, k_sum, col, S, {slope, slope});
  store_rows<D>(dv, v_sum, col, S, {1, 1});
}

/* dq of BM rows, over blocks of BN columns. */
template <int BM, int BN, int D, bool CAUSAL>
GRADC_FN void gradients_of_rows(const u16 *q, const u16 *k, const u16 *v, const u16 *dy, const f32 *lse, const f32 *delta, u16 *dq, int S,
                                f32 scale, f32 slope, u16 *shared) {
  enum { THREADS = BM / 16 * 32 };
  u16 *const q_tile = shared, *const dy_tile = q_tile + BM * D, *const k_tiles = dy_tile + BM * D, *const v_tiles = k_tiles + 2 * BN * D;
  const int blocks = (S + BM - 1) / BM, row0 = (blocks - 1 - (int)blockIdx.x % blocks) * BM;
  const int warp_row = threadIdx.x / 32 * 16, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = row0 + warp_row + g;
  const i64 head = blockIdx.x / blocks * (i64)S;
  q += head * D; k += head * D; v += head * D; dy += head * D; dq += head * D; lse += head; delta += head;
  const int end = CAUSAL ? min(row0 + BM, S) : S;
  copy_tile<D, BM, THREADS>(q_tile, q + (i64)row0 * D, S - row0);
  copy_tile<D, BM, THREADS>(dy_tile, dy + (i64)row0 * D, S - row0);
  copy_tile<D, BN, THREADS>(k_tiles, k, S);
  copy_tile<D, BN, THREADS>(v_tiles, v, S);
  cp_async_commit();
  f32 sum[D / 8][4] = {}, row_lse[2], row_delta[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int r = min(row + 8 * h, S - 1);
    row_lse[h] = lse[r];
    row_delta[h] = delta[r];
  }
  for (int col0 = 0; col0 < end; col0 += BN) {
    const int stage = col0 / BN % 2, next = col0 + BN;
    if (next < end) {
      copy_tile<D, BN, THREADS>(k_tiles + (1 - stage) * BN * D, k + (i64)next * D, S - next);
      copy_tile<D, BN, THREADS>(v_tiles + (1 - stage) * BN * D, v + (i64)next * D, S - next);
    }
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    f32 p[BN / 8][4] = {}, ds[BN / 8][4] = {};
    products_of_rows<D, BN>(p, q_tile, warp_row, k_tiles + stage * BN * D);
    products_of_rows<D, BN>(ds, dy_tile, warp_row, v_tiles + stage * BN * D);
    const bool edge = col0 + BN > (CAUSAL ? row0 : S);
#pragma unroll
    for (int n = 0; n < BN / 8; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int c = col0 + n * 8 + t * 2 + i % 2;
        const bool none = edge && (c >= S || (CAUSAL && c > row + i / 2 * 8));
        const f32 weight = none ? 0 : exp2_approx(p[n][i] * scale - row_lse[i / 2]);
        ds[n][i] = weight * (ds[n][i] - row_delta[i / 2]);
      }
    }
    add_products<D, BN>(sum, ds, k_tiles + stage * BN * D);
    __syncthreads();
  }
  store_rows<D>(dq, sum, row, S, {slope, slope});
}
