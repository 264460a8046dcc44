/* A matrix product of any strides, for what the library does not take: out[m, n] = sum over k of a[m, k] * b[k, n], for each
 * place of a batch with two axes.  A block of 256 threads has 32 x 32 elements of the result and goes along k in steps of 32;
 * what lies outside is 0 on both sides, so that it adds 0 * 0.  With `add` the product is added to what is there, `bias` to
 * each of its rows.  From and To say how an element is stored, To what is added up. */

template <class From, class To>
GRADC_FN void gradc_matmul(const typename From::stored *a, const typename From::stored *b, typename To::stored *out, i64 m, i64 n, i64 k, i64 count1,
                           i64 a_m, i64 a_k, i64 b_k, i64 b_n, i64 a_0, i64 b_0, i64 out_0, i64 a_1, i64 b_1, i64 out_1,
                           i64 out_m, const typename To::stored *bias, i64 add) {
  __shared__ typename To::sum left[32][33];
  __shared__ typename To::sum right[32][33];
  const i64 across = (n + 31) / 32, tiles = across * ((m + 31) / 32);
  const i64 tile = blockIdx.x % tiles, batch = blockIdx.x / tiles;
  const i64 from_row = tile / across * 32, from_column = tile % across * 32;
  a += batch / count1 * a_0 + batch % count1 * a_1;
  b += batch / count1 * b_0 + batch % count1 * b_1;
  out += batch / count1 * out_0 + batch % count1 * out_1;
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  const i64 column = from_column + x;
  typename To::sum sums[4] = {0, 0, 0, 0};
  for (i64 start = 0; start < k; start += 32) {
    for (int i = 0; i < 4; i++) {
      const i64 row = from_row + y + 8 * i, inner = start + y + 8 * i;
      left[y + 8 * i][x] = row < m && start + x < k ? From::load(a[row * a_m + (start + x) * a_k]) : 0;
      right[y + 8 * i][x] = inner < k && column < n ? From::load(b[inner * b_k + column * b_n]) : 0;
    }
    __syncthreads();
    for (int j = 0; j < 32; j++)
      for (int i = 0; i < 4; i++) sums[i] = sums[i] + left[y + 8 * i][j] * right[j][x];
    __syncthreads();
  }
  for (int i = 0; i < 4; i++) {
    const i64 row = from_row + y + 8 * i;
    if (row >= m || column >= n) continue;
    typename To::stored *const to = out + row * out_m + column;
    const typename To::sum sum = bias ? sums[i] + To::load(bias[column]) : sums[i];
    *to = To::store(add ? To::load(*to) + sum : sum);
  }
}
