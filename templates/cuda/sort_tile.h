/* What the stable sort of rows by a 32-bit key does in one block: a radix pass over a tile of rows, whose keys are in registers and change places in
 * shared memory.  Thread and item say a row's position: each warp has groups of 32 rows of its own one after another, so that a
 * row's place depends on the order of the rows alone. */

enum { GRADC_DIGIT_BITS = 9, GRADC_DIGITS = 512, GRADC_ITEMS = 16 }; /* of a digit, at most; its values; rows of a thread */

/* A number of 16 bits for each item, two in a register. */
struct gradc_halves {
  u32 words[GRADC_ITEMS / 2];
  __device__ __forceinline__ u32 get(int i) const { return words[i / 2] >> i % 2 * 16 & 0xffffu; }
  __device__ __forceinline__ void set(int i, u32 v) { words[i / 2] = i % 2 ? (words[i / 2] & 0xffffu) | v << 16 : (words[i / 2] & 0xffff0000u) | v; }
};

GRADC_FN u32 gradc_digit(u32 key, int shift, int bits) { return key >> shift & ((1u << bits) - 1); }

/* The rows of a tile that a thread has: item i at position first + 32 i, `most` of them, of which `count` are there.  Behind the
 * last row keys are all ones, which no pass moves in front of a row's: nothing else asks whether a row is there. */
struct gradc_items { int first, count, most; };

GRADC_FN gradc_items gradc_items_of(int rows, int most) {
  const int first = (int)threadIdx.x / 32 * most * 32 + (int)threadIdx.x % 32;
  return {first, (rows - first + 31) / 32, most};
}

GRADC_FN void gradc_sort_load(u32 (&keys)[GRADC_ITEMS], const u32 *key, gradc_items items) {
#pragma unroll
  for (int i = 0; i < GRADC_ITEMS; i++) keys[i] = i < items.most && i < items.count ? key[items.first + 32 * i] : ~0u;
}

/* The sum of what the threads before have, of a block of WARPS warps; all: of every thread's.  sums: room for WARPS, free again at the end. */
template <int WARPS> GRADC_FN u32 gradc_sort_before(u32 own, u32 *sums, u32 *all) {
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
#pragma unroll 8
  for (int w = 0; w < WARPS; w++) {
    if (w < warp) before += sums[w];
    *all += sums[w];
  }
  __syncthreads();
  return before;
}

/* The lanes whose digits are this lane's: a vote for each bit.  One __match_any_sync would say the same, and takes some ten clocks for
 * each of the digits that a warp has: it was nearly all of a pass's time on an H100. */
GRADC_FN u32 gradc_alike(u32 digit) {
  u32 alike = 0xffffffffu;
#pragma unroll
  for (int b = 0; b < GRADC_DIGIT_BITS; b++) {
    const bool set = digit >> b & 1u;
    alike &= __ballot_sync(0xffffffffu, set) ^ (set ? 0u : 0xffffffffu);
  }
  return alike;
}

/* place: the position of item i after a pass over one digit of 1 << bits values; first[d]: where digit d begins.  count: a
 * number for each warp and digit, free again at the end. */
template <int WARPS>
GRADC_FN void gradc_sort_places(const u32 (&key)[GRADC_ITEMS], gradc_halves &place, gradc_items items, int shift, int bits, u16 *count,
                                u32 *first, u32 *sums) {
  const int lane = threadIdx.x % 32, digits = 1 << bits, thread = (int)threadIdx.x;
  u16 *const own = count + threadIdx.x / 32 * GRADC_DIGITS;
#pragma unroll
  for (int d = 0; d < GRADC_DIGITS; d += 32) own[d + lane] = 0;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < GRADC_ITEMS; i++) {
    if (i >= items.most) continue;
    const u32 alike = gradc_alike(gradc_digit(key[i], shift, bits));
    place.set(i, __popc(alike & ((1u << lane) - 1)) | __popc(alike) << 5); /* rank among those alike, and their number */
  }
#pragma unroll
  for (int i = 0; i < GRADC_ITEMS; i++) {
    if (i >= items.most) continue;
    const u32 digit = gradc_digit(key[i], shift, bits), rank = place.get(i) & 31u, lower = own[digit];
    __syncwarp();
    if (rank == 0) own[digit] = (u16)(lower + (place.get(i) >> 5));
    place.set(i, lower + rank);
    __syncwarp();
  }
  __syncthreads();
  u32 total = 0, all;
  if (thread < digits)
#pragma unroll 8
    for (int w = 0; w < WARPS; w++) total += count[w * GRADC_DIGITS + thread];
  u32 before = gradc_sort_before<WARPS>(total, sums, &all); /* a digit per thread: the warps one after another */
  if (thread < digits) {
    first[thread] = before;
#pragma unroll 8
    for (int w = 0; w < WARPS; w++) {
      const u32 here = count[w * GRADC_DIGITS + thread];
      count[w * GRADC_DIGITS + thread] = (u16)before;
      before += here;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < GRADC_ITEMS; i++)
    if (i < items.most) place.set(i, place.get(i) + own[gradc_digit(key[i], shift, bits)]);
  __syncthreads();
}

/* The bits of each item's word from SHIFT on that a T holds go to its place.  room: a T for each row, free again at the end. */
template <class T, int SHIFT>
GRADC_FN void gradc_sort_exchange(const gradc_halves &place, u32 (&word)[GRADC_ITEMS], gradc_items items, T *room) {
#pragma unroll
  for (int i = 0; i < GRADC_ITEMS; i++)
    if (i < items.most) room[place.get(i)] = (T)(word[i] >> SHIFT);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < GRADC_ITEMS; i++)
    if (i < items.most)
      word[i] = (word[i] & ~((u32)(T)~0u << SHIFT)) | (u32)room[items.first + 32 * i] << SHIFT;
  __syncthreads();
}

GRADC_FN void gradc_sort_exchange(const gradc_halves &place, gradc_halves &number, gradc_items items, u16 *room) {
#pragma unroll
  for (int i = 0; i < GRADC_ITEMS; i++)
    if (i < items.most) room[place.get(i)] = (u16)number.get(i);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < GRADC_ITEMS; i++)
    if (i < items.most) number.set(i, room[items.first + 32 * i]);
  __syncthreads();
}
