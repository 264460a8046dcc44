/* Stable argsorts of rows of integers.  A tile of 1024 places is sorted by one block in shared memory: whole rows, each with as
 * many places as the next power of two, or a part of a long one.  Sorted runs of a long row become runs of twice their length,
 * pass by pass: an element's place is its own in its run and the number of those before it in the other.  Items are (key,
 * position), of which no two are alike, so that every way gives the same order. */

enum { GRADC_ORDER_TILE = 1024 };

/* Where the keys of a row begin: two axes of rows with strides of their own. */
GRADC_FN i64 gradc_order_row(i64 row, i64 rows1, i64 step0, i64 step1) { return row / rows1 * step0 + row % rows1 * step1; }

GRADC_FN i64 gradc_order_least(i64 a, i64 b) { return a < b ? a : b; }

template <class K> GRADC_FN bool gradc_before(K a, i64 at, K b, i64 other) { return a < b || (a == b && at < other); }

/* One block: `width` places (a power of two) for each row of n keys, or the tile of a row that has more.  Positions go to out, of
 * which a row has `count`; of a row that has more than one tile, keys and positions go to key_out and at_out. */
template <class K>
GRADC_FN void gradc_order_tile(i64 block, const K *key, i64 *out, K *key_out, u32 *at_out, i64 rows, i64 n, i64 count, i64 width, i64 rows1, i64 step0,
                               i64 step1, i64 step) {
  __shared__ K keys[GRADC_ORDER_TILE];
  __shared__ u32 at[GRADC_ORDER_TILE];
  const i64 tiles = (n + GRADC_ORDER_TILE - 1) / GRADC_ORDER_TILE, each = GRADC_ORDER_TILE / width;
  const i64 first = tiles > 1 ? block / tiles : block * each, from = tiles > 1 ? block % tiles * GRADC_ORDER_TILE : 0;
  for (int i = (int)threadIdx.x; i < GRADC_ORDER_TILE; i += 256) {
    const i64 row = first + i / width, position = from + i % width;
    const bool there = row < rows && position < n;
    keys[i] = there ? key[gradc_order_row(row, rows1, step0, step1) + position * step] : 0;
    at[i] = there ? (u32)position : ~0u; /* behind all that are there */
  }
  for (int run = 2; run <= width; run *= 2) { /* bitonic: runs in alternating order become runs of twice their length */
    for (int gap = run / 2; gap > 0; gap /= 2) {
      __syncthreads();
      for (int i = (int)threadIdx.x; i < GRADC_ORDER_TILE / 2; i += 256) {
        const int low = i / gap * 2 * gap + i % gap, high = low + gap;
        const K a = keys[low], b = keys[high];
        const u32 p = at[low], q = at[high];
        const bool swap = p == ~0u ? q != ~0u : q != ~0u && gradc_before<K>(b, q, a, p);
        const bool wrong = q == ~0u ? p != ~0u : p != ~0u && gradc_before<K>(a, p, b, q);
        if ((low & run) == 0 || run == width ? swap : wrong) keys[low] = b, keys[high] = a, at[low] = q, at[high] = p;
      }
    }
  }
  __syncthreads();
  for (int i = (int)threadIdx.x; i < GRADC_ORDER_TILE; i += 256) {
    const i64 row = first + i / width, place = from + i % width;
    if (row >= rows || place >= n) continue;
    if (tiles > 1) key_out[row * n + place] = keys[i], at_out[row * n + place] = at[i];
    else if (place < count) out[row * count + place] = (i64)at[i];
  }
}

/* Runs of `run` items of each row become runs of twice as many; the last pass writes the first `count` positions to out. */
template <class K>
GRADC_FN void gradc_order_merge(i64 block, i64 blocks, const K *key, const u32 *at, i64 *out, K *key_out, u32 *at_out, i64 rows, i64 n, i64 count, i64 run) {
  const i64 last = 2 * run >= n;
  const i64 items = rows * n;
  for (i64 item = block * 256 + threadIdx.x; item < items; item += blocks * 256) {
    const i64 row = item / n, place = item % n, pair = place / (2 * run) * (2 * run);
    const bool left = place < pair + run;
    const K *const other = key + row * n;
    const K own = key[item];
    i64 low = left ? gradc_order_least(pair + run, n) : pair, high = left ? gradc_order_least(pair + 2 * run, n) : pair + run;
    const i64 start = low;
    while (low < high) { /* an equal key of the left run comes first */
      const i64 middle = low + (high - low) / 2;
      if (left ? other[middle] < own : other[middle] <= own) low = middle + 1;
      else high = middle;
    }
    const i64 to = pair + (place - (left ? pair : pair + run)) + (low - start);
    if (!last) key_out[row * n + to] = own, at_out[row * n + to] = at[item];
    else if (to < count) out[row * count + to] = (i64)at[item];
  }
}
