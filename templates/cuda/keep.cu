/* What a library wrote, to where it belongs, unless a check before it has found something: the library itself cannot look. */
#define GRADC_KEEP(T)                                                                                                          \
  GRADC_FN void gradc_keep_elements(const T *from, T *to, i64 count, const u64 *flag, i64 site) {                              \
    if (gradc_stopped(flag, site)) return;                                                                                     \
    for (i64 i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) to[i] = from[i];                         \
  }
GRADC_KEEP(u16)
GRADC_KEEP(u32)
GRADC_KEEP(u64)
#undef GRADC_KEEP
extern "C" __global__ void __launch_bounds__(256) gradc_keep_2(const u16 *from, u16 *to, i64 count, const u64 *flag, i64 site) { gradc_keep_elements(from, to, count, flag, site); }
extern "C" __global__ void __launch_bounds__(256) gradc_keep_4(const u32 *from, u32 *to, i64 count, const u64 *flag, i64 site) { gradc_keep_elements(from, to, count, flag, site); }
extern "C" __global__ void __launch_bounds__(256) gradc_keep_8(const u64 *from, u64 *to, i64 count, const u64 *flag, i64 site) { gradc_keep_elements(from, to, count, flag, site); }
