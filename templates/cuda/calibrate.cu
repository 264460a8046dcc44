/* Kernels whose times give a device's constants (gradc/calibration/measure.py).  Tables have a power of two of elements, so that finding a place
 * costs next to nothing; every kernel leaves something in memory that a test can count. */

extern "C" __global__ void __launch_bounds__(256) gradc_calibrate_nothing(i64) {}

/* A chain of dependent steps: the device is busy while the host queues what is timed behind it. */
extern "C" __global__ void __launch_bounds__(32) gradc_calibrate_spin(u32 *out, i64 steps) {
  u32 x = 1;
  for (i64 i = 0; i < steps; i++) x = x * 1664525u + 1013904223u;
  if (threadIdx.x == 0) out[0] = x;
}

/* What L2 holds, whatever L1 does. */
#ifdef GRADC_CUDA_SIM
GRADC_FN uint4 gradc_from_l2(const uint4 *at) { return *at; }
#else
GRADC_FN uint4 gradc_from_l2(const uint4 *at) { return __ldcg(at); }
#endif

/* Each round copies all of it. */
extern "C" __global__ void __launch_bounds__(256) gradc_calibrate_copy(const uint4 *from, uint4 *to, i64 count, i64 rounds) {
  for (i64 round = 0; round < rounds; round++)
    for (i64 i = blockIdx.x * (i64)256 + threadIdx.x; i < count; i += gridDim.x * (i64)256) to[i] = gradc_from_l2(&from[i]);
}

/* Reads and writes nothing (no count is negative): what was in L2 is not there any more, and nothing waits to be written back. */
extern "C" __global__ void __launch_bounds__(256) gradc_calibrate_read(const uint4 *from, u32 *out, i64 count) {
  u32 seen = 0;
  for (i64 i = blockIdx.x * (i64)256 + threadIdx.x; i < count; i += gridDim.x * (i64)256) {
    const uint4 v = gradc_from_l2(&from[i]);
    seen ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (count < 0) out[0] = seen;
}

/* Neighbouring lanes add to neighbouring elements. */
extern "C" __global__ void __launch_bounds__(256) gradc_calibrate_coalesced(f32 *table, i64 size, i64 count) {
  for (i64 i = blockIdx.x * (i64)256 + threadIdx.x; i < count; i += gridDim.x * (i64)256) atomicAdd(&table[i & (size - 1)], 1.0f);
}

/* Each add reaches another line of 128 bytes. */
extern "C" __global__ void __launch_bounds__(256) gradc_calibrate_scattered(f32 *table, i64 size, i64 count) {
  for (i64 i = blockIdx.x * (i64)256 + threadIdx.x; i < count; i += gridDim.x * (i64)256) {
    u32 h = (u32)i * 2654435761u;
    h ^= h >> 15;
    atomicAdd(&table[((i64)h * 32 + (i & 31)) & (size - 1)], 1.0f);
  }
}

extern "C" __global__ void __launch_bounds__(256) gradc_calibrate_vectors(f32 *table, i64 size, i64 count) {
  for (i64 i = blockIdx.x * (i64)256 + threadIdx.x; i < count; i += gridDim.x * (i64)256) gradc_atomic_add_four(&table[4 * i & (size - 1)], 1.0f, 1.0f, 1.0f, 1.0f);
}

/* A warp adds 512 bytes, every warp to the same ones. */
extern "C" __global__ void __launch_bounds__(256) gradc_calibrate_hot(f32 *row, i64 count) {
  for (i64 i = (blockIdx.x * (i64)256 + threadIdx.x) / 32; i < count; i += gridDim.x * (i64)8) gradc_atomic_add_four(&row[4 * (threadIdx.x & 31)], 1.0f, 1.0f, 1.0f, 1.0f);
}
