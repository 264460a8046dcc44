/* Rows of an array replaced, in the array itself where `to` is `base`, else in a copy of it. */
typedef struct {
  const gradc_ctx *ctx;
  const char *base;
  char *to;
  const i64 *rows;
  const char *values;
  i64 size, count, bytes; /* rows of the array, rows that are replaced, and bytes of a row */
} gradc_put_rows_args;

enum { GRADC_PUT_BYTES = 1 << 16 }; /* of a task */

static i64 gradc_put_rows_of_task(const gradc_put_rows_args *a) { return gradc_max(GRADC_PUT_BYTES / gradc_max(a->bytes, 8), 1); }

static void gradc_put_rows_copy_task(const void *args_, i64 task) {
  const gradc_put_rows_args *const a = args_;
  const i64 each = gradc_put_rows_of_task(a) * a->bytes, first = task * each;
  __builtin_memcpy(a->to + first, a->base + first, (unsigned long)gradc_min(each, a->size * a->bytes - first));
}

static void gradc_put_rows_task(const void *args_, i64 task) {
  const gradc_put_rows_args *const a = args_;
  const i64 each = gradc_put_rows_of_task(a), bytes = a->bytes, last = gradc_min((task + 1) * each, a->count);
  for (i64 n = task * each; n < last; n++) {
    const i64 row = a->rows[n];
    if (row >= 0 && row < a->size) __builtin_memcpy(a->to + row * bytes, a->values + n * bytes, (unsigned long)bytes);
  }
}

static int gradc_put_rows(const gradc_put_rows_args *a) {
  const i64 each = gradc_put_rows_of_task(a);
  if (a->to != a->base) a->ctx->parallel_for(a->ctx, gradc_chunks(a->size, each), gradc_put_rows_copy_task, a);
  a->ctx->parallel_for(a->ctx, gradc_chunks(a->count, each), gradc_put_rows_task, a);
  return gradc_failed(a->ctx);
}
