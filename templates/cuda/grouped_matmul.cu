/* Rows by groups, each times the matrix of its group, that has the rows from offsets[g] to offsets[g + 1]; one whose end is before
 * its begin has none, and rows behind the last are 0: out[s, n] = sum over k of x[s, k] * w[g, k, n].  A block of 256 threads has
 * 32 x 32 elements of the result and goes along k in steps of 32, for one group after another that has rows of them. */

template <class T, class Index>
GRADC_FN void gradc_grouped_matmul(const T *x, const T *w, const Index *offsets, T *out, i64 step, i64 groups, i64 rows, i64 k, i64 n, i64 x_s, i64 x_k,
                                   i64 w_g, i64 w_k, i64 w_n) {
  __shared__ T left[32][33];
  __shared__ T right[32][33];
  const i64 across = (n + 31) / 32, from_row = blockIdx.x / across * 32, from_column = blockIdx.x % across * 32;
  const int lane = threadIdx.x % 32, y = threadIdx.x / 32;
  const i64 column = from_column + lane;
  T sums[4] = {0, 0, 0, 0};
  i64 begin = 0;
  for (i64 g = 0; g < groups && begin < from_row + 32; g++) {
    const i64 next = offsets[(g + 1) * step], end = next < begin ? begin : next < rows ? next : rows;
    if (end > begin && end > from_row) {
      for (i64 start = 0; start < k; start += 32) {
        for (int i = 0; i < 4; i++) {
          const i64 row = from_row + y + 8 * i, inner = start + y + 8 * i;
          left[y + 8 * i][lane] = row >= begin && row < end && start + lane < k ? x[row * x_s + (start + lane) * x_k] : 0;
          right[y + 8 * i][lane] = inner < k && column < n ? w[g * w_g + inner * w_k + column * w_n] : 0;
        }
        __syncthreads();
        for (int i = 0; i < 4; i++) {
          const i64 row = from_row + y + 8 * i;
          if (row < begin || row >= end) continue; /* 0 times an infinity of another group is no 0 */
          for (int j = 0; j < 32; j++) sums[i] = sums[i] + left[y + 8 * i][j] * right[j][lane];
        }
        __syncthreads();
      }
    }
    begin = end;
  }
  for (int i = 0; i < 4; i++) {
    const i64 row = from_row + y + 8 * i;
    if (row < rows && column < n) out[row * n + column] = sums[i];
  }
}

