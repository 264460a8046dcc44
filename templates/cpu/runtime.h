/* What a generated module may ask of its host: run tasks, multiply matrices, report an error.  Nothing else is linked. */
#ifndef GRADC_RUNTIME_H
#define GRADC_RUNTIME_H

#include <stdint.h>

#include "../common/ieee.h"

typedef struct gradc_ctx gradc_ctx;
typedef void (*gradc_body)(const void *args, int64_t task);

/* Elements of a narrower type as the product's: to[i * to_step] = from[i * from_step] for i in [0, count). */
typedef void (*gradc_read)(void *to, const void *from, int64_t count, int64_t to_step, int64_t from_step);

enum { GRADC_BF16 = 1, GRADC_I8 = 2, GRADC_U8 = 3 };
/* A product's dtype beside 32 and 64, the bits of its floats: integers of 32 bits.  All are their bytes, divided by 8. */
enum { GRADC_I32 = 33 };

/* The places along an axis of an operand that is not evenly spaced: it is several axes of the array in one, the last one innermost. */
enum { GRADC_PARTS = 4 };
typedef struct {
  int64_t count; /* of its parts */
  int64_t size[GRADC_PARTS], step[GRADC_PARTS];
} gradc_axis;

/* Both axes of an operand.  What lies between two elements of it may be read, nothing outside all of them. */
typedef struct {
  gradc_axis row, col;
  const char *end; /* of the array */
} gradc_places;

/* An operand of a matrix product.  Strides are in elements, any value that stays inside the array (0 repeats). */
typedef struct {
  const char *data;
  int64_t batch, row, col;
  int64_t bytes;     /* of an element */
  gradc_read read;   /* 0 where the elements are the product's own */
  const char *scale; /* elements of the product's type that these are multiplied with, or 0 */
  int64_t scale_batch, scale_row, scale_col;
  int64_t row_per, col_per; /* that many rows, or columns, have one scale */
  int64_t dtype;            /* GRADC_BF16: of the elements where `read` is there for who has no kernels for them; GRADC_I8, GRADC_U8; else 0 */
  const gradc_places *places; /* instead of row and col, which are 0 then; or 0.  Such elements are the product's own. */
} gradc_matrix;

struct gradc_ctx {
  /* body(args, t) for each t in [0, tasks), in any order, on any threads; a call from inside a body runs in place. */
  void (*parallel_for)(const gradc_ctx *ctx, int64_t tasks, gradc_body body, const void *args);
  /* c[b,i,j] = sum over p of a[b,i,p] * b[b,p,j] (+ c[b,i,j] if accumulate); dtype is 32, 64, or GRADC_I32, modulo 2^32,
   * of operands of 8 bits.  c's rows, one after another in all batches, are c_row elements apart, and overlap neither operand. */
  void (*matmul)(const gradc_ctx *ctx, int dtype, int64_t batch, int64_t m, int64_t n, int64_t k, const gradc_matrix *a,
                 const gradc_matrix *b, void *c, int64_t c_row, int accumulate);
  /* Memory of the calling thread, at a multiple of 64, until it asks again; 0 if there is none (the error is reported). */
  char *(*local)(const gradc_ctx *ctx, int64_t bytes);
  /* The same, of other memory: for a block of a loop, whose steps ask for local. */
  char *(*block)(const gradc_ctx *ctx, int64_t bytes);
  /* Asked now and then by a task that runs for long: whether the call is to end.  Then the task returns, done or not. */
  int (*stopped)(const gradc_ctx *ctx);
  /* Arrays of so many bytes or more are written by streaming stores. */
  int64_t stream_from;
  /* 8 slots, all 0 before the call: see gradc_report.  Slots 5 and 6 are free, slot 7 is a lock. */
  int64_t *error;
  void *call; /* the runtime's own; 0 where no gradc_call is under way */
};

/* The one function of a generated module, gradc_run. */
typedef int (*gradc_entry)(const gradc_ctx *ctx, void *const *buffers, const int64_t *dims, char *scratch, int64_t only);

enum { GRADC_FINE = 0, GRADC_INDEX_OUT_OF_RANGE = 1, GRADC_OUT_OF_MEMORY = 2, GRADC_DECREASES = 3, GRADC_OUTSIDE = 4, GRADC_FORKED = 5, GRADC_NO_KERNELS = 6 };
enum { GRADC_CODE = 0, GRADC_SITE = 1, GRADC_POSITION = 2, GRADC_VALUE = 3, GRADC_BOUND = 4, GRADC_LOCK = 7 };

/* Record an error; of several, the one with the lowest (site, position) stays, whichever thread meets it first. */
static inline __attribute__((unused, cold)) void gradc_report(const gradc_ctx *ctx, int64_t code, int64_t site,
                                                                        int64_t position, int64_t value, int64_t bound) {
  int64_t *e = ctx->error;
  while (__atomic_exchange_n(&e[GRADC_LOCK], 1, __ATOMIC_ACQUIRE)) {
  }
  if (e[GRADC_CODE] == GRADC_FINE || site < e[GRADC_SITE] || (site == e[GRADC_SITE] && position < e[GRADC_POSITION])) {
    e[GRADC_SITE] = site;
    e[GRADC_POSITION] = position;
    e[GRADC_VALUE] = value;
    e[GRADC_BOUND] = bound;
    __atomic_store_n(&e[GRADC_CODE], code, __ATOMIC_RELAXED);
  }
  __atomic_store_n(&e[GRADC_LOCK], 0, __ATOMIC_RELEASE);
}

/* Whether an error stands: what runs after it must write nothing. */
static inline __attribute__((unused)) int gradc_failed(const gradc_ctx *ctx) {
  return __atomic_load_n(&ctx->error[GRADC_CODE], __ATOMIC_RELAXED) != GRADC_FINE;
}

#endif
