/* Packing arrays whose elements lie in any order. */

/* The place of element i along eight axes, those of size 1 left out: a division for each of the others but the first.  U holds
 * the number of elements. */
template <class U>
GRADC_FN i64 gradc_packed_from(U i, i64 start, const i64 (&sizes)[8], const i64 (&steps)[8]) {
  U rest = i;
  i64 at = start;
#pragma unroll
  for (int axis = 7; axis > 0; axis--) {
    if (sizes[axis] == 1) continue;
    const U size = (U)sizes[axis], above = rest / size;
    at += (i64)(rest - above * size) * steps[axis];
    rest = above;
  }
  return at + (i64)rest * steps[0];
}

/* 16 bytes at once where the last axis is made of them; else an element. */
template <class T, class U>
GRADC_FN void gradc_pack_range(const T *from, T *to, U count, i64 start, const i64 (&sizes)[8], const i64 (&steps)[8]) {
  enum { N = 16 / (int)sizeof(T) };
  typedef typename gradc_vector<T, N>::word word;
  const U first = (U)blockIdx.x * 256u + threadIdx.x, threads = (U)gridDim.x * 256u;
  if ((U)sizes[7] % N != 0) {
    for (U i = first; i < count; i += threads) to[i] = from[gradc_packed_from(i, start, sizes, steps)];
    return;
  }
  for (U group = first; group < count / N; group += threads) {
    const T *const at = from + gradc_packed_from(group * N, start, sizes, steps);
    gradc_vector<T, N> all;
    if (steps[7] == 1 && gradc_aligned(at, 16)) {
      all.words[0] = *(const word *)at;
    } else {
#pragma unroll
      for (int j = 0; j < N; j++) all.items[j] = at[j * steps[7]];
    }
    ((word *)to)[group] = all.words[0];
  }
}

/* Elements along eight axes, some of size 1, to row-major order, aligned; steps in elements from the one at `start`. */
template <class T>
GRADC_FN void gradc_pack_elements(const T *from, T *to, i64 count, i64 start, i64 n1, i64 n2, i64 n3, i64 n4, i64 n5, i64 n6, i64 n7,
                                  i64 s0, i64 s1, i64 s2, i64 s3, i64 s4, i64 s5, i64 s6, i64 s7) {
  const i64 sizes[8] = {1, n1, n2, n3, n4, n5, n6, n7}, steps[8] = {s0, s1, s2, s3, s4, s5, s6, s7};
  if (count < 1ll << 31) gradc_pack_range<T, u32>(from, to, (u32)count, start, sizes, steps);
  else gradc_pack_range<T, u64>(from, to, (u64)count, start, sizes, steps);
}
