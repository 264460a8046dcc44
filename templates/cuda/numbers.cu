/* Numbers that a call was given as numbers, to their cells in memory: up to eight in a launch, which carries them itself. */
extern "C" __global__ void __launch_bounds__(32) gradc_numbers(u64 *cells, i64 count, i64 at0, i64 at1, i64 at2, i64 at3, i64 at4, i64 at5, i64 at6,
                                                               i64 at7, i64 v0, i64 v1, i64 v2, i64 v3, i64 v4, i64 v5, i64 v6, i64 v7) {
  const i64 at[8] = {at0, at1, at2, at3, at4, at5, at6, at7}, v[8] = {v0, v1, v2, v3, v4, v5, v6, v7};
  for (int i = 0; i < 8; i++)
    if (threadIdx.x == i && i < count) cells[at[i]] = (u64)v[i];
}
