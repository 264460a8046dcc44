/* For each group the sum of the outer products of its rows of x and y, those from offsets[g] to offsets[g + 1].  A group whose
 * end is before its begin has no rows. */
static int gradc_grouped_outer_{{ index }}(const gradc_ctx *ctx, int dtype, const {{ index }} *offsets, i64 step, i64 groups, i64 rows, i64 k, i64 n,
                                           gradc_matrix x, gradc_matrix y, char *out) {
  const i64 across = x.row, matrix = k * n * (dtype / 8);
  x.row = x.col;
  x.col = across;
  i64 begin = 0;
  for (i64 g = 0; g < groups; g++) {
    const i64 end = gradc_min(gradc_max((i64)offsets[(g + 1) * step], begin), rows);
    ctx->matmul(ctx, dtype, 1, k, n, end - begin, &x, &y, out + g * matrix, n, 0);
    x.data += (end - begin) * x.col * x.bytes;
    y.data += (end - begin) * y.row * y.bytes;
    begin = end;
  }
  return gradc_failed(ctx);
}
