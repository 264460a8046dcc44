/* Streaming stores, past the caches, of what nothing reads soon: the lines that they fill need not be read first. */
#ifndef GRADC_STREAMING_H
#define GRADC_STREAMING_H

#include <stdint.h>

#if defined(__x86_64__)
#if defined(__AVX512F__)
enum { GRADC_LINE = 64 };
#elif defined(__AVX__)
enum { GRADC_LINE = 32 };
#else
enum { GRADC_LINE = 16 };
#endif
typedef float gradc_line __attribute__((vector_size(GRADC_LINE)));
typedef float gradc_unaligned_line __attribute__((vector_size(GRADC_LINE), aligned(1)));

static inline __attribute__((unused)) void gradc_stream_line(gradc_line *to, gradc_line v) {
#if defined(__clang__)
  __builtin_nontemporal_store(v, to);
#elif defined(__AVX512F__)
  __builtin_ia32_movntps512((float *)to, v);
#elif defined(__AVX__)
  __builtin_ia32_movntps256((float *)to, v);
#else
  __builtin_ia32_movntps((float *)to, v);
#endif
}

static inline __attribute__((unused)) void gradc_stream(void *to_, const void *from_, int64_t bytes) {
  char *to = to_;
  const char *from = from_;
  const int64_t before_line = (int64_t)(-(uint64_t)to & 63);
  const int64_t head = before_line < bytes ? before_line : bytes, whole = (bytes - head) / 64 * 64; /* a line stored both ways goes to memory twice */
  __builtin_memcpy(to, from, (unsigned long)head);
  to += head, from += head;
  for (int64_t i = 0; i < whole / GRADC_LINE; i++) gradc_stream_line((gradc_line *)to + i, *((const gradc_unaligned_line *)from + i));
  __builtin_memcpy(to + whole, from + whole, (unsigned long)(bytes - head - whole));
}

/* Before anybody is told that a task has ended. */
static inline __attribute__((unused)) void gradc_stream_fence(void) { __builtin_ia32_sfence(); }
#else
static inline __attribute__((unused)) void gradc_stream(void *to, const void *from, int64_t bytes) { __builtin_memcpy(to, from, (unsigned long)bytes); }
static inline __attribute__((unused)) void gradc_stream_fence(void) {}
#endif

#endif
