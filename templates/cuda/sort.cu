/* A stable sort of rows by a 32-bit key, 8 bits at a time from the lowest.  A tile is 2048 rows: 8 warps, each with 256 rows
 * of its own one after another, so that a row's place depends on the order of the rows alone. */

enum { GRADC_TILE = 2048, GRADC_WARP_ROWS = 256, GRADC_ONE_BLOCK = 4096, GRADC_TREE = 64 };

GRADC_FN u32 gradc_digit(u32 key, int shift) { return key >> shift & 255u; }

/* The sum of what the threads before have, of 256; all: of every thread's.  sums: room for 8, free again at the end. */
GRADC_FN u32 gradc_sort_before(u32 own, u32 *sums, u32 *all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 total = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u32 lower = __shfl_up_sync(0xffffffffu, total, step);
    if (lane >= step) total += lower;
  }
  if (lane == 31) sums[warp] = total;
  __syncthreads();
  u32 before = total - own;
  *all = 0;
#pragma unroll
  for (int w = 0; w < 8; w++) {
    if (w < warp) before += sums[w];
    *all += sums[w];
  }
  __syncthreads();
  return before;
}

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

/* Each count becomes the number of rows of its digit in the tiles before, a block per digit; behind the counts stand the sums of all tiles. */
extern "C" __global__ void __launch_bounds__(256) gradc_sort_scan(u32 *counts, i64 tiles, const u64 *flag, i64 site) {
  if (gradc_stopped(flag, site)) return;
  __shared__ u32 sums[8];
  u32 *const own = counts + blockIdx.x * tiles;
  u32 before = 0;
  for (i64 at = 0; at < tiles; at += 1024) {
    u32 count[4], mine = 0;
    const i64 first = at + 4 * (i64)threadIdx.x;
#pragma unroll
    for (int i = 0; i < 4; i++) count[i] = first + i < tiles ? own[first + i] : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 here = count[i];
      count[i] = mine;
      mine += here;
    }
    u32 all;
    const u32 lower = before + gradc_sort_before(mine, sums, &all);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (first + i < tiles) own[first + i] = lower + count[i];
    before += all;
  }
  if (threadIdx.x == 0) counts[256 * tiles + blockIdx.x] = before;
}

/* Rows go to their places; first: the row's number is its position. */
extern "C" __global__ void __launch_bounds__(256) gradc_sort_move(const u32 *key, const u32 *row, const u32 *counts, u32 *key_out, u32 *row_out,
                                                                  i64 rows, i64 tiles, i64 shift, i64 first, const u64 *flag, i64 site) {
  if (gradc_stopped(flag, site)) return;
  __shared__ u32 base[8][256], sums[8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 from = blockIdx.x * (i64)GRADC_TILE + warp * GRADC_WARP_ROWS;
  for (int d = lane; d < 256; d += 32) base[warp][d] = 0;
  __syncwarp();
  for (int i = 0; i < GRADC_WARP_ROWS / 32; i++) {
    const i64 r = from + i * 32 + lane;
    if (r < rows) atomicAdd(&base[warp][gradc_digit(key[r], (int)shift)], 1u);
  }
  __syncthreads();
  u32 all;
  u32 place = gradc_sort_before(counts[256 * tiles + threadIdx.x], sums, &all) + counts[threadIdx.x * tiles + blockIdx.x]; /* a digit per thread: the warps one after another */
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

/* Few rows: one block sorts (key, row), of which no two are alike, in shared memory; rows is at most GRADC_ONE_BLOCK. */
extern "C" __global__ void __launch_bounds__(1024) gradc_sort_block(u32 *key, u32 *row, i64 rows, const u64 *flag, i64 site) {
  if (gradc_stopped(flag, site)) return;
  __shared__ u64 pairs[GRADC_ONE_BLOCK];
  int count = 1;
  while (count < rows) count *= 2;
  for (int i = (int)threadIdx.x; i < count; i += 1024) pairs[i] = i < rows ? (u64)key[i] << 32 | (u64)i : ~0ull;
  for (int run = 2; run <= count; run *= 2) { /* bitonic: runs in alternating order become runs of twice their length */
    for (int step = run / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = (int)threadIdx.x; i < count / 2; i += 1024) {
        const int low = i / step * 2 * step + i % step, high = low + step;
        const u64 a = pairs[low], b = pairs[high];
        if ((a > b) == ((low & run) == 0)) pairs[low] = b, pairs[high] = a;
      }
    }
  }
  __syncthreads();
  for (int i = (int)threadIdx.x; i < rows; i += 1024) key[i] = (u32)(pairs[i] >> 32), row[i] = (u32)pairs[i];
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

/* How many chunks from c on have their pieces of the segment [from, to) added up already. */
GRADC_FN ix gradc_tree(ix c, ix from, ix to, ix CH, ix chunks) {
  return chunks >= 2 * GRADC_TREE && c % GRADC_TREE == 0 && from < c * CH && to >= (c + GRADC_TREE) * CH ? GRADC_TREE : 1;
}
