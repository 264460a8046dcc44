/* Segments of many chunks: carry rows added up in groups of GRADC_TREE. */
extern "C" __global__ void __launch_bounds__(256, 2) scatter_add_cf34b0_tree(
  const i64 *__restrict__ const token,
  const f32 *__restrict__ const dy,
  f32 *__restrict__ const y,
  const i64 dim0, char *const workspace, u64 *const flag, const i64 site, const i64 chunk_length, const i64 aux, const i64 first_block) {
  if (aux <= 0 && gradc_stopped(flag, site)) return;
  enum { WIDTH = 32 }; /* threads of a task */
  enum { VEC = 4 }; /* neighbouring columns of a thread */
  const ix N = (ix)dim0;
  const ix chunk = (ix)chunk_length;
  const ix rows = N;
  const ix keys = 32000;
  const ix chunks = gradc_chunks(rows, chunk);
  u32 *const sorted_keys = (u32 *)workspace;
  u32 *const sorted_rows = (u32 *)((char *)sorted_keys + gradc_align((i64)rows * 4));
  u32 *const unsorted_keys = (u32 *)((char *)sorted_rows + gradc_align((i64)rows * 4));
  u32 *const segment_start = (u32 *)((char *)unsorted_keys + 2 * gradc_align((i64)rows * 4));
  f32 *const partial0 = (f32 *)((char *)segment_start + gradc_align((i64)(keys + 2) * 4));
  const ix element = ((ix)first_block + (ix)blockIdx.x) * (ix)blockDim.x + (ix)threadIdx.x;
  const ix task = element / WIDTH;
  const int lane = (int)(threadIdx.x % WIDTH);
  const ix first = task * GRADC_TREE;
  if (first + GRADC_TREE > chunks || (first + GRADC_TREE) * chunk > rows) return;
  const ix key = sorted_keys[first * chunk];
  if (key >= keys || segment_start[key] >= first * chunk || segment_start[key + 1] < (first + GRADC_TREE) * chunk) return;
  {
    const ix inner = 128;
    const bool even_inner = inner % VEC == 0;
    const ix inner_step = even_inner ? 1 : WIDTH;
    for (ix c0 = 0; c0 < inner; c0 += WIDTH * VEC) {
      const ix col = c0 + (even_inner ? lane * VEC : lane);
      sum_f32 total[VEC];
      f32 carried[VEC];
      #pragma unroll
      for (int j = 0; j < VEC; j++) gradc_clear(total[j]);
      #pragma unroll 4
      for (ix c = first; c < first + GRADC_TREE; c++) {
        gradc_get(carried, partial0 + (2 * c) * inner, col, inner_step, inner, even_inner);
        #pragma unroll
        for (int j = 0; j < VEC; j++)
          if (col + j * inner_step < inner) gradc_add(total[j], carried[j]);
      }
      #pragma unroll
      for (int j = 0; j < VEC; j++) carried[j] = gradc_value(total[j]);
      gradc_put(partial0 + (2 * first + 1) * inner, carried, col, inner_step, inner, even_inner);
    }
  }
}

/* Segments of more than one chunk, their carry rows added up; rows that nobody hits. */
extern "C" __global__ void __launch_bounds__(256, 2) scatter_add_cf34b0_finish(
  const i64 *__restrict__ const token,
  const f32 *__restrict__ const dy,
  f32 *__restrict__ const y,
  const i64 dim0, char *const workspace, u64 *const flag, const i64 site, const i64 chunk_length, const i64 aux, const i64 first_block) {
  if (aux <= 0 && gradc_stopped(flag, site)) return;
  enum { WIDTH = 32 }; /* threads of a task */
  enum { VEC = 4 }; /* neighbouring columns of a thread */
  const ix N = (ix)dim0;
  const ix chunk = (ix)chunk_length;
  const ix rows = N;
  const ix keys = 32000;
  const ix chunks = gradc_chunks(rows, chunk);
  u32 *const sorted_keys = (u32 *)workspace;
  u32 *const sorted_rows = (u32 *)((char *)sorted_keys + gradc_align((i64)rows * 4));
  u32 *const unsorted_keys = (u32 *)((char *)sorted_rows + gradc_align((i64)rows * 4));
  u32 *const segment_start = (u32 *)((char *)unsorted_keys + 2 * gradc_align((i64)rows * 4));
  f32 *const partial0 = (f32 *)((char *)segment_start + gradc_align((i64)(keys + 2) * 4));
  const ix element = ((ix)first_block + (ix)blockIdx.x) * (ix)blockDim.x + (ix)threadIdx.x;
  const ix task = element / WIDTH;
  const int lane = (int)(threadIdx.x % WIDTH);
  if (task < chunks) {
    const ix after = (task + 1) * chunk; /* the first position behind the chunk */
    if (after >= segment_start[keys]) return;
    const ix key = sorted_keys[after], from = segment_start[key], to = segment_start[key + 1];
    if (from >= after || from < after - chunk) return;
    {
      const ix inner = 128;
      const bool even_inner = inner % VEC == 0, aligned = even_inner && gradc_aligned(y, 16);
      const ix inner_step = even_inner ? 1 : WIDTH;
      for (ix c0 = 0; c0 < inner; c0 += WIDTH * VEC) {
        const ix col = c0 + (even_inner ? lane * VEC : lane);
        sum_f32 total[VEC];
        f32 carried[VEC];
        #pragma unroll
        for (int j = 0; j < VEC; j++) gradc_clear(total[j]);
        #pragma unroll 4
        for (ix c = task, next; c <= (to - 1) / chunk; c = next) {
          next = c + gradc_tree(c, from, to, chunk, chunks);
          gradc_get(carried, partial0 + (2 * c + (c == task || next > c + 1)) * inner, col, inner_step, inner, even_inner);
          #pragma unroll
          for (int j = 0; j < VEC; j++)
            if (col + j * inner_step < inner) gradc_add(total[j], carried[j]);
        }
        f32 done[VEC];
        #pragma unroll
        for (int j = 0; j < VEC; j++) done[j] = gradc_value(total[j]);
        gradc_put(y + key * inner, done, col, inner_step, inner, aligned);
      }
    }
    return;
  }
  enum { EACH = 8, BESIDE = 1 }; /* rows of a task, and how far they are apart */
  const ix own = task - chunks, first_key = own / BESIDE * (BESIDE * EACH) + own % BESIDE;
  u32 begin[EACH], end[EACH];
  #pragma unroll
  for (int i = 0; i < EACH; i++) {
    const ix key = gradc_min(first_key + i * BESIDE, keys);
    begin[i] = segment_start[key], end[i] = segment_start[key + 1];
  }
  {
    const ix inner = 128;
    const bool even_inner = inner % VEC == 0, aligned = even_inner && gradc_aligned(y, 16);
    const ix inner_step = even_inner ? 1 : WIDTH;
    sum_f32 nothing;
    gradc_clear(nothing);
    f32 done[VEC];
    #pragma unroll
    for (int j = 0; j < VEC; j++) done[j] = gradc_value(nothing);
    for (ix c0 = 0; c0 < inner; c0 += WIDTH * VEC) {
      const ix col = c0 + (even_inner ? lane * VEC : lane);
      #pragma unroll
      for (int i = 0; i < EACH; i++)
        if (begin[i] == end[i] && first_key + i * BESIDE < keys) gradc_put(y + (first_key + i * BESIDE) * inner, done, col, inner_step, inner, aligned);
    }
  }
}
