/* Where the rows of each key begin, once they are sorted. */

enum { GRADC_BOUNDS = 1024, GRADC_MOST_FILLED = 16384, GRADC_TREE = 64 }; /* keys of a block; rows of theirs that it goes through */

/* The first position whose key is k or more, found by a whole block: of 256 parts those whose last key is less are passed over. */
GRADC_FN i64 gradc_sort_lower(const u32 *key, i64 rows, i64 k) {
  i64 low = 0, count = rows;
  while (count > 0) {
    const i64 step = (count + 255) / 256, last = ((i64)threadIdx.x + 1) * step - 1;
    const i64 below = __syncthreads_count(last < count && (i64)key[low + last] < k) * step;
    low += below;
    count = count - below < step ? count - below : step - 1;
  }
  return low;
}

/* start[k]: the first position whose key is k or more, for k in [0, keys + 1].  The first row of a key writes its position; a key without
 * rows starts where the next one does.  Where a few keys have very many rows, each key looks for its own by halving. */
extern "C" __global__ void __launch_bounds__(256) gradc_sort_bounds(const u32 *key, u32 *start, i64 rows, i64 keys, const u64 *flag, i64 site) {
  if (gradc_stopped(flag, site)) return;
  __shared__ u32 found[GRADC_BOUNDS], least[8];
  const i64 base = blockIdx.x * (i64)GRADC_BOUNDS;
  const i64 from = gradc_sort_lower(key, rows, base), to = gradc_sort_lower(key, rows, base + GRADC_BOUNDS);
  const bool many = to - from > GRADC_MOST_FILLED;
  i64 low[4]; /* a thread's keys are looked for side by side, as each step waits for a load */
#pragma unroll
  for (int j = 0; j < 4; j++) low[j] = many ? from : to;
  for (i64 count = many ? to - from : 0, half; count > 0; count -= half) { /* of the rows from low on the first that is not less is one, or behind all */
    half = (count + 1) / 2;
#pragma unroll
    for (int j = 0; j < 4; j++)
      if ((i64)key[low[j] + half - 1] < base + (int)threadIdx.x + 256 * j) low[j] += half;
  }
#pragma unroll
  for (int j = 0; j < 4; j++) found[threadIdx.x + 256 * j] = (u32)low[j];
  __syncthreads();
  if (!many)
    for (i64 p = from + threadIdx.x; p < to; p += 256)
      if (p == from || key[p] != key[p - 1]) found[key[p] - base] = (u32)p;
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = 4 * (int)threadIdx.x;
  u32 after = found[own]; /* the least from here on: of the thread, of the warp's threads behind it, of the warps behind */
#pragma unroll
  for (int i = 1; i < 4; i++) after = found[own + i] < after ? found[own + i] : after;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u32 higher = __shfl_down_sync(0xffffffffu, after, step);
    if (lane + step < 32 && higher < after) after = higher;
  }
  if (lane == 0) least[warp] = after;
  after = __shfl_down_sync(0xffffffffu, after, 1);
  if (lane == 31) after = ~0u;
  __syncthreads();
  for (int w = warp + 1; w < 8; w++) after = least[w] < after ? least[w] : after;
#pragma unroll
  for (int i = 3; i >= 0; i--) {
    after = found[own + i] < after ? found[own + i] : after;
    if (base + own + i < keys + 2) start[base + own + i] = after;
  }
}

/* Rows in groups that were sorted as one: row r of the sort is rows r * groups + g, key k the keys k * groups + g.  Of a key's rows g comes first,
 * then their order, so that the rows of each single key lie together. */
extern "C" __global__ void __launch_bounds__(256) gradc_sort_spread(const u32 *group_key, const u32 *group_row, const u32 *group_start, u32 *key, u32 *row,
                                                                    u32 *start, i64 rows, i64 keys, i64 groups, const u64 *flag, i64 site) {
  if (gradc_stopped(flag, site)) return;
  const i64 place = blockIdx.x * (i64)256 + threadIdx.x;
  const u32 at = (u32)place, each = (u32)groups; /* rows and keys have 32 bits, whose quotients take a few instructions */
  if (place < rows) {
    const u32 k = group_key[at / each], from = group_start[k], count = group_start[k + 1] - from;
    const u32 within = at - from * each, g = within / count;
    key[at] = (i64)k * each < keys ? k * each + g : (u32)keys;
    row[at] = group_row[from + within % count] * each + g;
  }
  if (place <= keys) {
    const u32 k = at / each, from = group_start[k];
    start[at] = from * each + at % each * (group_start[k + 1] - from);
  } else if (place == keys + 1) {
    start[at] = (u32)rows;
  }
}

/* How many chunks from c on have their pieces of the segment [from, to) added up already. */
GRADC_FN ix gradc_tree(ix c, ix from, ix to, ix CH, ix chunks) {
  return chunks >= 2 * GRADC_TREE && c % GRADC_TREE == 0 && from < c * CH && to >= (c + GRADC_TREE) * CH ? GRADC_TREE : 1;
}
