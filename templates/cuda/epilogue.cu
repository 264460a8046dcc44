/* What is done to a matrix product after it, where the library has no kernel that does it to the sums: gelu by tanh, or gelu's
 * derivative at `argument` times each element, stored to `to`; and the sums over rows, stored to `sums`.  A block has 32 columns
 * of the matrix, whose eight groups of rows are added in a fixed order. */

enum { GRADC_NO_FUNCTION, GRADC_GELU, GRADC_GELU_GRAD };

/* sqrt(2 / pi) (x + .044715 x^3), the argument of gelu's tanh. */
GRADC_FN f32 gradc_gelu_argument(f32 x) { return 0x1.988454p-1f * (x + 0x1.6e4e26p-5f * (x * x * x)); }

GRADC_FN f32 gradc_gelu_tanh(f32 x) { return x * (0.5f * (1.0f + tanh_f32(gradc_gelu_argument(x)))); }

/* s + x s', s = sigmoid(2 u), from one exponential; s' is 0 where x^2 overflows. */
GRADC_FN f32 gradc_gelu_tanh_grad(f32 x) {
  const f32 z = 2.0f * gradc_gelu_argument(x), e = exp_f32(-GRADC_LIBM(fabsf)(z)), r = 1.0f / (1.0f + e), flat = e * r * r;
  const f32 slope = flat == 0.0f ? flat : x * flat * (0x1.b6676cp-3f * (x * x) + 0x1.988454p+0f);
  return (z >= 0.0f ? r : e * r) + slope;
}

template <class E>
GRADC_FN void gradc_epilogue(const typename E::stored *from, i64 start, i64 down, i64 across, i64 rows, i64 columns,
                             const typename E::stored *argument, typename E::stored *to, typename E::stored *sums, i64 function,
                             i64 summed) {
  __shared__ f32 parts[8][32];
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  const i64 column = blockIdx.x * 32ll + x;
  f32 total = 0.0f;
  for (i64 row = y; column < columns && row < rows; row += 8) {
    f32 value = E::load(from[start + row * down + column * across]);
    const i64 at = row * columns + column;
    if (function == GRADC_GELU) value = gradc_gelu_tanh(value);
    if (function == GRADC_GELU_GRAD) value = value * gradc_gelu_tanh_grad(E::load(argument[at]));
    if (function) to[at] = E::store(value);
    total = total + value;
  }
  parts[y][x] = total;
  __syncthreads();
  if (!summed || y || column >= columns) return;
  for (int i = 1; i < 8; i++) total = total + parts[i][x];
  sums[column] = E::store(total);
}
