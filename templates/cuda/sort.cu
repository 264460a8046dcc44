/* A stable sort of rows by a 32-bit key, `bits` bits at a time from the lowest: in one block, or in passes over tiles. */

#include "sort_tile.h"
#include "sort_bounds.cu"

enum { GRADC_TILE = 8192, GRADC_ONE_BLOCK = 8192, GRADC_FEW_TILES = 32 }; /* FEW_TILES: each adds up the counts of those before it by itself */

/* Up to GRADC_ONE_BLOCK rows; a row's number is its position. */
extern "C" __global__ void __launch_bounds__(1024) gradc_sort_block(u32 *key, u32 *row, i64 rows, i64 passes, i64 bits, const u64 *flag, i64 site) {
  if (gradc_stopped(flag, site)) return;
  __shared__ u16 room[32 * GRADC_DIGITS]; /* counts, then the rows' words */
  __shared__ u32 first[GRADC_DIGITS], sums[32], *results[2]; /* results: until the end, where registers are few */
  if (threadIdx.x == 0) results[0] = key, results[1] = row;
  const gradc_items items = gradc_items_of((int)rows, ((int)rows + 1023) / 1024);
  u32 keys[GRADC_ITEMS];
  gradc_halves numbers, place;
#pragma unroll
  for (int i = 0; i < GRADC_ITEMS; i++) numbers.set(i, (u32)(items.first + 32 * i));
  gradc_sort_load(keys, key, items);
#pragma unroll 1
  for (int pass = 0; pass < (int)passes; pass++) {
    gradc_sort_places<32>(keys, place, items, pass * (int)bits, (int)bits, room, first, sums);
    gradc_sort_exchange<u16, 0>(place, keys, items, room);
    if ((int)passes * (int)bits > 16) gradc_sort_exchange<u16, 16>(place, keys, items, room);
    gradc_sort_exchange(place, numbers, items, room);
  }
#pragma unroll
  for (int i = 0; i < GRADC_ITEMS; i++)
    if (i < items.most && i < items.count) results[0][items.first + 32 * i] = keys[i], results[1][items.first + 32 * i] = numbers.get(i);
}

/* Where the number of a tile's rows with a digit stands. */
GRADC_FN i64 gradc_sort_count_at(i64 digit, i64 tile, i64 tiles) { return tiles <= GRADC_FEW_TILES ? tile * GRADC_DIGITS + digit : digit * tiles + tile; }

/* How many rows of each tile have each digit.  A tile has `each` rows for each of 512 threads. */
extern "C" __global__ void __launch_bounds__(512) gradc_sort_count(const u32 *key, u32 *counts, i64 rows, i64 tiles, i64 each, i64 shift, i64 bits, const u64 *flag, i64 site) {
  if (gradc_stopped(flag, site)) return;
  __shared__ u32 count[GRADC_DIGITS];
  count[threadIdx.x] = 0;
  const i64 first = blockIdx.x * each * 512 + threadIdx.x;
  const int most = (int)each;
  u32 keys[GRADC_ITEMS]; /* all loads before the first addition: none moves in front of one */
#pragma unroll
  for (int i = 0; i < GRADC_ITEMS; i++) keys[i] = i < most && first + i * 512 < rows ? key[first + i * 512] : 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < GRADC_ITEMS; i++)
    if (i < most && first + i * 512 < rows) atomicAdd(&count[gradc_digit(keys[i], (int)shift, (int)bits)], 1u);
  __syncthreads();
  if (threadIdx.x < 1u << bits) counts[gradc_sort_count_at(threadIdx.x, blockIdx.x, tiles)] = count[threadIdx.x];
}

/* Many tiles: each count becomes the number of rows of its digit in the tiles before, a block per digit; behind the counts stand the sums of all tiles. */
extern "C" __global__ void __launch_bounds__(256) gradc_sort_scan(u32 *counts, i64 tiles, const u64 *flag, i64 site) {
  if (gradc_stopped(flag, site)) return;
  __shared__ u32 sums[8];
  u32 *const own = counts + blockIdx.x * tiles;
  u32 before = 0;
  for (i64 at = 0; at < tiles; at += 1024) {
    u32 count[4], mine = 0;
    const i64 from = at + 4 * (i64)threadIdx.x;
#pragma unroll
    for (int i = 0; i < 4; i++) count[i] = from + i < tiles ? own[from + i] : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 here = count[i];
      count[i] = mine;
      mine += here;
    }
    u32 all;
    const u32 lower = before + gradc_sort_before<8>(mine, sums, &all);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (from + i < tiles) own[from + i] = lower + count[i];
    before += all;
  }
  if (threadIdx.x == 0) counts[GRADC_DIGITS * tiles + blockIdx.x] = before;
}

/* Rows go to their places, those of one digit side by side; first: a row's number is its position. */
extern "C" __global__ void __launch_bounds__(512) gradc_sort_move(const u32 *key, const u32 *row, const u32 *counts, u32 *key_out, u32 *row_out, i64 rows,
                                                                  i64 tiles, i64 each, i64 shift, i64 bits, i64 first, const u64 *flag, i64 site) {
  if (gradc_stopped(flag, site)) return;
  __shared__ u32 room[GRADC_TILE], begin[GRADC_DIGITS], sums[16]; /* room: counts, then the rows' words */
  const i64 tile = blockIdx.x, from = tile * each * 512;
  const gradc_items items = gradc_items_of(rows - from < each * 512 ? (int)(rows - from) : (int)each * 512, (int)each);
  const int digit = (int)threadIdx.x;
  u32 before = 0, whole = 0, all;
  if (digit < 1 << bits) {
    if (tiles > GRADC_FEW_TILES) before = counts[gradc_sort_count_at(digit, tile, tiles)], whole = counts[GRADC_DIGITS * tiles + digit];
    else
#pragma unroll 16
      for (i64 t = 0; t < tiles; t++) {
        const u32 here = counts[gradc_sort_count_at(digit, t, tiles)];
        whole += here;
        if (t < tile) before += here;
      }
  }
  before += gradc_sort_before<16>(whole, sums, &all);
  u32 keys[GRADC_ITEMS];
  gradc_halves place;
  gradc_sort_load(keys, key + from, items);
  gradc_sort_places<16>(keys, place, items, (int)shift, (int)bits, (u16 *)room, begin, sums);
  if (digit < 1 << bits) begin[digit] = before - begin[digit]; /* from a row's position in the tile to its place */
  gradc_sort_exchange<u32, 0>(place, keys, items, room);
#pragma unroll
  for (int i = 0; i < GRADC_ITEMS; i++)
    if (i < items.most && i < items.count) room[place.get(i)] = first ? (u32)(from + items.first + 32 * i) : (row + from)[items.first + 32 * i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < GRADC_ITEMS; i++) {
    if (i >= items.most || i >= items.count) continue;
    const u32 to = begin[gradc_digit(keys[i], (int)shift, (int)bits)] + (u32)(items.first + 32 * i);
    key_out[to] = keys[i], row_out[to] = room[items.first + 32 * i];
  }
}
