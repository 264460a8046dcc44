/* A stable sort of rows by a 32-bit key, 8 bits at a time from the lowest.  A tile is 2048 rows: 8 warps, each with 256 rows
 * of its own one after another, so that a row's place depends on the order of the rows alone. */

enum { GRADC_TILE = 2048, GRADC_WARP_ROWS = 256 };

GRADC_FN u32 gradc_digit(u32 key, int shift) { return key >> shift & 255u; }

/* counts[digit][tile]: how many rows of each tile have each digit. */
extern "C" __global__ void __launch_bounds__(256) gradc_sort_count(const u32 *key, u32 *counts, i64 rows, i64 tiles, i64 shift, const u64 *flag, i64 site) {
  if (gradc_stopped(flag, site)) return;
  __shared__ u32 count[256];
  count[threadIdx.x] = 0;
  __syncthreads();
  for (int i = 0; i < GRADC_TILE / 256; i++) {
    const i64 r = blockIdx.x * (i64)GRADC_TILE + i * 256 + threadIdx.x;
    if (r < rows) atomicAdd(&count[gradc_digit(key[r], (int)shift)], 1u);
  }
  __syncthreads();
  counts[threadIdx.x * tiles + blockIdx.x] = count[threadIdx.x];
}

/* Each count becomes the number of rows before: one block goes through all of them. */
extern "C" __global__ void __launch_bounds__(1024) gradc_sort_scan(u32 *counts, i64 size, const u64 *flag, i64 site) {
  if (gradc_stopped(flag, site)) return;
  __shared__ u32 sums[32];
  u32 before = 0;
  for (i64 at = 0; at < size; at += 1024) {
    const i64 mine = at + threadIdx.x;
    const u32 own = mine < size ? counts[mine] : 0;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 total = own;
    for (int step = 1; step < 32; step *= 2) {
      const u32 lower = __shfl_up_sync(0xffffffffu, total, step);
      if (lane >= step) total += lower;
    }
    if (lane == 31) sums[warp] = total;
    __syncthreads();
    if (warp == 0) {
      u32 all = sums[lane];
      for (int step = 1; step < 32; step *= 2) {
        const u32 lower = __shfl_up_sync(0xffffffffu, all, step);
        if (lane >= step) all += lower;
      }
      sums[lane] = all;
    }
    __syncthreads();
    if (mine < size) counts[mine] = before + (warp > 0 ? sums[warp - 1] : 0) + total - own;
    before += sums[31];
    __syncthreads();
  }
}

/* Rows go to their places; first: the row's number is its position. */
extern "C" __global__ void __launch_bounds__(256) gradc_sort_move(const u32 *key, const u32 *row, const u32 *counts, u32 *key_out, u32 *row_out,
                                                                  i64 rows, i64 tiles, i64 shift, i64 first, const u64 *flag, i64 site) {
  if (gradc_stopped(flag, site)) return;
  __shared__ u32 base[8][256];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 from = blockIdx.x * (i64)GRADC_TILE + warp * GRADC_WARP_ROWS;
  for (int d = lane; d < 256; d += 32) base[warp][d] = 0;
  __syncwarp();
  for (int i = 0; i < GRADC_WARP_ROWS / 32; i++) {
    const i64 r = from + i * 32 + lane;
    if (r < rows) atomicAdd(&base[warp][gradc_digit(key[r], (int)shift)], 1u);
  }
  __syncthreads();
  u32 place = counts[threadIdx.x * tiles + blockIdx.x]; /* a digit per thread: the warps one after another */
  for (int w = 0; w < 8; w++) {
    const u32 here = base[w][threadIdx.x];
    base[w][threadIdx.x] = place;
    place += here;
  }
  __syncthreads();
  for (int i = 0; i < GRADC_WARP_ROWS / 32; i++) {
    const i64 r = from + i * 32 + lane;
    const u32 active = __ballot_sync(0xffffffffu, r < rows);
    if (r < rows) {
      const u32 k = key[r], digit = gradc_digit(k, (int)shift), alike = __match_any_sync(active, digit);
      const u32 rank = __popc(alike & ((1u << lane) - 1)), to = base[warp][digit] + rank;
      __syncwarp(active);
      if (rank == 0) base[warp][digit] += __popc(alike);
      key_out[to] = k;
      row_out[to] = first ? (u32)r : row[r];
    }
    __syncwarp();
  }
}

/* start[k]: the first position whose key is k or more, for k in [0, keys + 1]. */
extern "C" __global__ void __launch_bounds__(256) gradc_sort_bounds(const u32 *key, u32 *start, i64 rows, i64 keys, const u64 *flag, i64 site) {
  if (gradc_stopped(flag, site)) return;
  const i64 k = blockIdx.x * (i64)256 + threadIdx.x;
  if (k > keys + 1) return;
  i64 low = 0, high = rows;
  while (low < high) {
    const i64 middle = low + (high - low) / 2;
    if ((i64)key[middle] < k) low = middle + 1;
    else high = middle;
  }
  start[k] = (u32)low;
}
