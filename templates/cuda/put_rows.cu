/* Rows of an array replaced, in the array itself where `to` is `base`, else in a copy of it. */

template <class T> GRADC_FN void gradc_put_rows_copy(i64 block, i64 blocks, const T *base, T *to, i64 count) {
  if (base == to) return;
  for (i64 i = block * 256 + threadIdx.x; i < count; i += blocks * 256) to[i] = base[i];
}

/* `width` elements of each of `count` rows; the array has `size`. */
template <class T> GRADC_FN void gradc_put_rows(i64 block, i64 blocks, const i64 *rows, const T *values, T *to, i64 size, i64 count, i64 width) {
  for (i64 i = block * 256 + threadIdx.x; i < count * width; i += blocks * 256) {
    const i64 row = rows[i / width];
    if (row >= 0 && row < size) to[row * width + i % width] = values[i];
  }
}
