/* Words of 32 bits, transposed: for types whose panels have several narrow elements in one. */
#ifndef GRADC_GEMM_WORDS_H
#define GRADC_GEMM_WORDS_H

#include "gemm_type.h"

#define T uint32_t
#define GEMM_SIZE 4
#define GEMM(name) words_##name
#include "gemm_vector.h"
#undef T
#undef GEMM_SIZE
#undef GEMM

/* to[p * to_step + i] = word p < LANES of row i < rows, a row every from_step bytes; what a vector has more the next step overwrites. */
static inline __attribute__((always_inline)) void turn_words(uint32_t *to, int64_t to_step, const void *from, int64_t from_step, const int rows) {
  enum { LANES = words_LANES };
  words_vec v[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) {
    v[i] = (words_vec){0};
    if (i < rows) {
      memcpy(&v[i], (const char *)from + i * from_step, sizeof v[i]);
    }
  }
  words_turn(v);
#pragma GCC unroll 16
  for (int p = 0; p < LANES; p++) {
    memcpy(to + p * to_step, &v[p], p < LANES - 1 ? sizeof v[p] : (size_t)rows * 4);
  }
}

#endif
