/* What a call does beside its kernels: adding to what is there, and packing arrays whose elements lie in any order. */

/* H says how an element is stored and what is added. */
template <class H>
GRADC_FN void gradc_add_elements(typename H::stored *to, const typename H::stored *from, i64 count, const u64 *flag, i64 site) {
  if (gradc_stopped(flag, site)) return;
  for (i64 i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) to[i] = H::store(H::load(to[i]) + H::load(from[i]));
}

/* Elements along eight axes, some of size 1, to row-major order; steps in elements from the one at `start`. */
template <class T>
GRADC_FN void gradc_pack_elements(const T *from, T *to, i64 count, i64 start, i64 n1, i64 n2, i64 n3, i64 n4, i64 n5, i64 n6, i64 n7,
                                  i64 s0, i64 s1, i64 s2, i64 s3, i64 s4, i64 s5, i64 s6, i64 s7) {
  for (i64 i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
    i64 rest = i, at = start;
    at += rest % n7 * s7, rest /= n7;
    at += rest % n6 * s6, rest /= n6;
    at += rest % n5 * s5, rest /= n5;
    at += rest % n4 * s4, rest /= n4;
    at += rest % n3 * s3, rest /= n3;
    at += rest % n2 * s2, rest /= n2;
    at += rest % n1 * s1, rest /= n1;
    to[i] = from[at + rest * s0];
  }
}
