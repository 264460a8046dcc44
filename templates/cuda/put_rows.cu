/* Rows of an array replaced, in the array itself where `to` is `base`, else in a copy of it. */

template <class T> GRADC_FN void gradc_copy_range(i64 first, i64 threads, const T *base, T *to, i64 count) {
  for (i64 i = first; i < count; i += threads) to[i] = base[i];
}

/* In words of 16 bytes, where the arrays are made of them. */
template <class T> GRADC_FN void gradc_put_rows_copy(i64 block, i64 blocks, const T *base, T *to, i64 count) {
  enum { N = 16 / (int)sizeof(T) };
  typedef typename gradc_vector<T, N>::word word;
  const i64 first = block * 256 + threadIdx.x, threads = blocks * 256;
  if (base == to) return;
  if (count % N == 0 && gradc_aligned(base, 16) && gradc_aligned(to, 16)) gradc_copy_range(first, threads, (const word *)base, (word *)to, count / N);
  else gradc_copy_range(first, threads, base, to, count);
}

/* U holds the number of elements of all rows. */
template <class T, class U> GRADC_FN void gradc_put_range(U first, U threads, const i64 *rows, const T *values, T *to, i64 size, i64 count, i64 width) {
  for (U i = first; i < (U)(count * width); i += threads) {
    const U place = i / (U)width;
    const i64 row = rows[place];
    if (row >= 0 && row < size) to[row * width + (i64)(i - place * (U)width)] = values[i];
  }
}

template <class T> GRADC_FN void gradc_put_elements(i64 block, i64 blocks, const i64 *rows, const T *values, T *to, i64 size, i64 count, i64 width) {
  const i64 first = block * 256 + threadIdx.x, threads = blocks * 256;
  if (count * width < 1ll << 31) gradc_put_range<T, u32>((u32)first, (u32)threads, rows, values, to, size, count, width);
  else gradc_put_range<T, u64>((u64)first, (u64)threads, rows, values, to, size, count, width);
}

/* `width` elements of each of `count` rows; the array has `size`.  In words of 16 bytes, where rows are made of them. */
template <class T> GRADC_FN void gradc_put_rows(i64 block, i64 blocks, const i64 *rows, const T *values, T *to, i64 size, i64 count, i64 width) {
  enum { N = 16 / (int)sizeof(T) };
  typedef typename gradc_vector<T, N>::word word;
  if (width % N == 0 && gradc_aligned(values, 16) && gradc_aligned(to, 16)) gradc_put_elements(block, blocks, rows, (const word *)values, (word *)to, size, count, width / N);
  else gradc_put_elements(block, blocks, rows, values, to, size, count, width);
}
