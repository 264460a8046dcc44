/* Rows of an array replaced, in the array itself where `to` is `base`, else in a copy of it. */

template <class T> GRADC_FN void gradc_put_rows_copy(const T *base, T *to, i64 count) {
  if (base == to) return;
  for (i64 i = blockIdx.x * (i64)256 + threadIdx.x; i < count; i += gridDim.x * (i64)256) to[i] = base[i];
}

/* `width` elements of each of `count` rows; the array has `size`. */
template <class T> GRADC_FN void gradc_put_rows(const i64 *rows, const T *values, T *to, i64 size, i64 count, i64 width) {
  for (i64 i = blockIdx.x * (i64)256 + threadIdx.x; i < count * width; i += gridDim.x * (i64)256) {
    const i64 row = rows[i / width];
    if (row >= 0 && row < size) to[row * width + i % width] = values[i];
  }
}
