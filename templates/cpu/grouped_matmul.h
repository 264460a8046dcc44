/* Rows of x, each times the matrix of its group: those from offsets[g] to offsets[g + 1] times w[g]; rows behind the last are 0.
 * A group whose end is before its begin has no rows. */
static int gradc_grouped_matmul_{{ index }}(const gradc_ctx *ctx, int dtype, const {{ index }} *offsets, i64 step, i64 groups, i64 rows, i64 k, i64 n,
                                            gradc_matrix x, gradc_matrix w, char *out) {
  const i64 bytes = dtype / 8;
  i64 begin = 0;
  for (i64 g = 0; g < groups; g++) {
    const i64 end = gradc_min(gradc_max((i64)offsets[(g + 1) * step], begin), rows);
    if (end > begin) ctx->matmul(ctx, dtype, 1, end - begin, n, k, &x, &w, out + begin * n * bytes, n, 0);
    x.data += (end - begin) * x.row * x.bytes;
    w.data += w.batch * w.bytes;
    if (w.scale) w.scale += w.scale_batch * bytes;
    begin = end;
  }
  __builtin_memset(out + begin * n * bytes, 0, (unsigned long)((rows - begin) * n * bytes));
  return gradc_failed(ctx);
}
