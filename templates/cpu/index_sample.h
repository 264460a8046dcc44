/* Two numbers of an index, by which a program chooses between kernels: gradc/ir/sample.py says what they are. */
#ifndef GRADC_INDEX_SAMPLE_H
#define GRADC_INDEX_SAMPLE_H

#include "runtime.h"

enum { GRADC_SAMPLE_SIDE = 32, GRADC_SAMPLE_FEWEST = 1 << 17, GRADC_SAMPLE_STRIDES = 3 };

/* bytes: of an element, 4 or 8; known: whether it has been looked at. */
typedef struct {
  const void *index;
  i64 bytes, count, skew, locality;
  int known;
} gradc_sample;

/* Blocks of the index; each element of one twice, so that places beyond its end are its first. */
typedef i64 gradc_blocks[GRADC_SAMPLE_SIDE][2 * GRADC_SAMPLE_SIDE];

/* As NumPy's abs of a difference of int64. */
static inline i64 gradc_sample_apart(i64 a, i64 b) {
  const unsigned long long d = (unsigned long long)a - (unsigned long long)b;
  return (i64)((i64)d < 0 ? 0 - d : d);
}

/* Elements that one at the same place of a block before has. */
static i64 gradc_sample_skew(const gradc_blocks block) {
  i64 found = 0;
  for (int b = 1; b < GRADC_SAMPLE_SIDE; b++) {
    i64 again[GRADC_SAMPLE_SIDE] = { 0 };
    for (int before = 0; before < b; before++)
      #pragma omp simd
      for (int p = 0; p < GRADC_SAMPLE_SIDE; p++) again[p] |= block[b][p] == block[before][p];
    for (int p = 0; p < GRADC_SAMPLE_SIDE; p++) found += again[p];
  }
  return found;
}

/* How many more pairs of elements are nearer to each other in a block than at the same places of two than are less near. */
static i64 gradc_sample_nearer(const gradc_blocks block, int stride) {
  i64 found = 0;
  for (int b = 0; b < GRADC_SAMPLE_SIDE; b++) {
    const i64 *const other = block[(b + stride) % GRADC_SAMPLE_SIDE];
    #pragma omp simd reduction(+ : found)
    for (int p = 0; p < GRADC_SAMPLE_SIDE; p++) {
      const i64 within = gradc_sample_apart(block[b][p + stride], block[b][p]), across = gradc_sample_apart(other[p], block[b][p]);
      found += (within < across) - (within > across);
    }
  }
  return found;
}

static __attribute__((noinline)) void gradc_sample_index(gradc_sample *s) {
  s->known = 1;
  if (s->count < GRADC_SAMPLE_FEWEST) return;
  gradc_blocks block;
  for (i64 b = 0; b < GRADC_SAMPLE_SIDE; b++) {
    const i64 first = b * (s->count - GRADC_SAMPLE_SIDE) / (GRADC_SAMPLE_SIDE - 1);
    for (i64 p = 0; p < GRADC_SAMPLE_SIDE; p++)
      block[b][p] = block[b][p + GRADC_SAMPLE_SIDE] = s->bytes == 4 ? ((const i32 *)s->index)[first + p] : ((const i64 *)s->index)[first + p];
  }
  i64 nearer = 0;
  for (int part = 1; part <= GRADC_SAMPLE_STRIDES; part++)
    nearer += gradc_sample_nearer(block, GRADC_SAMPLE_SIDE * part / (GRADC_SAMPLE_STRIDES + 1));
  s->skew = gradc_sample_skew(block);
  s->locality = nearer > 0 ? nearer / GRADC_SAMPLE_STRIDES : 0;
}

static inline i64 gradc_skew(gradc_sample *s) {
  if (!s->known) gradc_sample_index(s);
  return s->skew;
}

static inline i64 gradc_locality(gradc_sample *s) {
  if (!s->known) gradc_sample_index(s);
  return s->locality;
}

#endif
