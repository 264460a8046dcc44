/* Vectors of a type, and what moves their elements.  Included once per type: T is the element, GEMM_SIZE its bytes, GEMM(name) makes
 * the names. */

typedef T GEMM(vec) __attribute__((vector_size(GEMM_BYTES), aligned(sizeof(T))));

enum { GEMM(LANES) = GEMM_BYTES / GEMM_SIZE };

/* How a pair of vectors is mixed in each round of a transpose, and which elements of it are every second one; a vector of two halves moves as few elements between them as can be. */
#if GEMM_BYTES / GEMM_SIZE == 16
#define GEMM_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define GEMM_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define GEMM_EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#elif GEMM_BYTES == 32 && GEMM_SIZE == 4
#define GEMM_LOW 0, 8, 1, 9, 4, 12, 5, 13
#define GEMM_HIGH 2, 10, 3, 11, 6, 14, 7, 15
#define GEMM_EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define GEMM_LOW_HALVES 0, 1, 2, 3, 8, 9, 10, 11
#define GEMM_HIGH_HALVES 4, 5, 6, 7, 12, 13, 14, 15
#elif GEMM_BYTES == 32
#define GEMM_LOW 0, 4, 2, 6
#define GEMM_HIGH 1, 5, 3, 7
#define GEMM_EVEN 0, 2, 4, 6
#define GEMM_LOW_HALVES 0, 1, 4, 5
#define GEMM_HIGH_HALVES 2, 3, 6, 7
#elif GEMM_BYTES / GEMM_SIZE == 8
#define GEMM_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define GEMM_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define GEMM_EVEN 0, 2, 4, 6, 8, 10, 12, 14
#elif GEMM_BYTES / GEMM_SIZE == 4
#define GEMM_LOW 0, 4, 1, 5
#define GEMM_HIGH 2, 6, 3, 7
#define GEMM_EVEN 0, 2, 4, 6
#else
#define GEMM_LOW 0, 2
#define GEMM_HIGH 1, 3
#define GEMM_EVEN 0, 2
#endif

/* The transpose of a square. */
static inline __attribute__((always_inline)) void GEMM(turn)(GEMM(vec) *v) {
  GEMM(vec) w[GEMM(LANES)];
#ifdef GEMM_SHUFFLES
  /* Each round moves one bit of the column's number to the row's, the last one of two halves which half it is. */
#ifdef GEMM_LOW_HALVES
  enum { ALIKE = GEMM(LANES) / 2 };
#else
  enum { ALIKE = GEMM(LANES) };
#endif
#pragma GCC unroll 4
  for (int round = 1; round < ALIKE; round *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < GEMM(LANES) / 2; i++) {
      const int from = i / (ALIKE / 2) * ALIKE + i % (ALIKE / 2);
      w[2 * i] = __builtin_shufflevector(v[from], v[from + ALIKE / 2], GEMM_LOW);
      w[2 * i + 1] = __builtin_shufflevector(v[from], v[from + ALIKE / 2], GEMM_HIGH);
    }
#pragma GCC unroll 16
    for (int i = 0; i < GEMM(LANES); i++) {
      v[i] = w[i];
    }
  }
#ifdef GEMM_LOW_HALVES
#pragma GCC unroll 4
  for (int i = 0; i < ALIKE; i++) {
    w[i] = __builtin_shufflevector(v[i], v[i + ALIKE], GEMM_LOW_HALVES);
    w[i + ALIKE] = __builtin_shufflevector(v[i], v[i + ALIKE], GEMM_HIGH_HALVES);
  }
  __builtin_memcpy(v, w, sizeof w);
#endif
#else
  for (int i = 0; i < GEMM(LANES); i++) {
    for (int j = 0; j < GEMM(LANES); j++) {
      w[j][i] = v[i][j];
    }
  }
  memcpy(v, w, sizeof w);
#endif
}

/* Every `apart`th element, 1 or 2, from `from` on; as many are read as lie in so many vectors. */
static inline __attribute__((always_inline)) GEMM(vec) GEMM(read_apart)(const T *from, const int apart) {
  const GEMM(vec) first = *(const GEMM(vec) *)from;
#ifdef GEMM_SHUFFLES
  if (apart == 2) {
    return __builtin_shufflevector(first, *(const GEMM(vec) *)(from + GEMM(LANES)), GEMM_EVEN);
  }
#endif
  return first;
}
#undef GEMM_LOW
#undef GEMM_HIGH
#undef GEMM_EVEN
#undef GEMM_LOW_HALVES
#undef GEMM_HIGH_HALVES
