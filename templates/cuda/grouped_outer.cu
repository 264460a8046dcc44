/* For each group the sum of the outer products of its rows, those from offsets[g] to offsets[g + 1]; one whose end is before its
 * begin has none: out[g, k, n] = sum over its rows s of x[s, k] * y[s, n].  A block of 256 threads has 32 x 32 elements of the
 * matrix of a group and goes along its rows in steps of 32. */

template <class T, class Index>
GRADC_FN void gradc_grouped_outer(const T *x, const T *y, const Index *offsets, T *out, i64 step, i64 groups, i64 rows, i64 k, i64 n, i64 x_s, i64 x_k,
                                  i64 y_s, i64 y_n) {
  __shared__ T left[32][33];
  __shared__ T right[32][33];
  const i64 across = (n + 31) / 32, tiles = across * ((k + 31) / 32);
  const i64 group = blockIdx.x / tiles, tile = blockIdx.x % tiles, from_row = tile / across * 32, from_column = tile % across * 32;
  const int lane = threadIdx.x % 32, line = threadIdx.x / 32;
  const i64 column = from_column + lane;
  i64 begin = 0, end = 0;
  for (i64 g = 0; g <= group; g++) {
    begin = end;
    const i64 next = offsets[(g + 1) * step];
    end = next < begin ? begin : next < rows ? next : rows;
  }
  T sums[4] = {0, 0, 0, 0};
  for (i64 start = begin; start < end; start += 32) {
    for (int i = 0; i < 4; i++) {
      const i64 s = start + line + 8 * i;
      left[line + 8 * i][lane] = s < end && from_row + lane < k ? x[s * x_s + (from_row + lane) * x_k] : 0;
      right[line + 8 * i][lane] = s < end && column < n ? y[s * y_s + column * y_n] : 0;
    }
    __syncthreads();
    for (int j = 0; j < 32; j++)
      for (int i = 0; i < 4; i++) sums[i] = sums[i] + left[j][line + 8 * i] * right[j][lane];
    __syncthreads();
  }
  for (int i = 0; i < 4; i++) {
    const i64 row = from_row + line + 8 * i;
    if (row < k && column < n) out[(group * k + row) * n + column] = sums[i];
  }
}
