/* The addresses of the matrices of products, for a library that steps along one axis of a batch: of those from `at` on along three axes,
 * of which a has `total`, b as many after them, out after these; starts and steps in bytes. */
extern "C" __global__ void __launch_bounds__(256) gradc_pointers(u64 *to, const u8 *a, const u8 *b, const u8 *out, i64 at, i64 total, i64 count,
                                                                 i64 n1, i64 n2, i64 from_a, i64 from_b, i64 from_out, i64 a_0, i64 a_1, i64 a_2,
                                                                 i64 b_0, i64 b_1, i64 b_2, i64 out_0, i64 out_1, i64 out_2) {
  for (i64 i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
    const i64 x = i / (n1 * n2), y = i / n2 % n1, z = i % n2;
    to[at + i] = (u64)(a + from_a + x * a_0 + y * a_1 + z * a_2);
    to[total + at + i] = (u64)(b + from_b + x * b_0 + y * b_1 + z * b_2);
    to[2 * total + at + i] = (u64)(out + from_out + x * out_0 + y * out_1 + z * out_2);
  }
}
