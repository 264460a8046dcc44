/* What a call does beside its kernels: adding to what is there. */

/* H says how an element is stored and what is added. */
template <class H>
GRADC_FN void gradc_add_elements(typename H::stored *to, const typename H::stored *from, i64 count, const u64 *flag, i64 site) {
  if (gradc_stopped(flag, site)) return;
  for (i64 i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) to[i] = H::store(H::load(to[i]) + H::load(from[i]));
}
