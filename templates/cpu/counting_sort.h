/* Stable counting sorts of rows by key in [0, keys]; key == keys is nowhere and comes last.
 * start[k] is the first position of key k, start[keys] the number of rows that go somewhere, start[keys + 1] that of all.
 * Sizes decide how it is done.  There is one stable order, so that every way, and any number of threads, gives the same. */
#ifndef GRADC_COUNTING_SORT_H
#define GRADC_COUNTING_SORT_H

#include "program.h"

#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define GRADC_SHUFFLES 1
#endif
#endif

enum {
  GRADC_SORT_ROWS = 4096,      /* rows per task at least */
  GRADC_SORT_CHUNKS = 64,      /* tasks of rows at most */
  GRADC_SORT_PER_KEY = 8,      /* rows per task for each key that a task counts apart */
  GRADC_SORT_WIDE = 1 << 19,   /* keys whose counts leave the nearer caches */
  GRADC_SORT_BITS = 12,        /* of a key's place in its range, as long as there are few ranges */
  GRADC_SORT_RANGES = 1024,    /* ranges at most */
  GRADC_SORT_TASK_KEYS = 2048  /* keys per task that adds up counts */
};

typedef struct { i32 key, row; } gradc_keyed;

/* bits: of a key's place in its range; ranges: of 2^bits keys, from all of which a chunk counts its rows apart. */
typedef struct {
  const gradc_ctx *ctx;
  const i32 *key;
  i64 rows, keys;
  i32 *start, *order;
  i64 bits, ranges, chunk, chunks;
  i32 *count;         /* of a chunk's rows with keys of a range; then where they go */
  i32 *first;         /* position of each range, or of each task of keys */
  gradc_keyed *keyed; /* rows by range */
} gradc_counting;

/* How it is done: by one thread (no chunks); by counts of each chunk for each key (bits 0), where there are many rows to a
 * key; or, for wide tables, by ranges of keys, each of which is then sorted by itself. */
static char *gradc_counting_layout(gradc_counting *s, char *end) {
  const i64 all = s->keys + 1, long_chunk = gradc_max(GRADC_SORT_ROWS, gradc_chunks(s->rows, GRADC_SORT_CHUNKS));
  s->bits = s->chunks = 0;
  s->chunk = gradc_max(long_chunk, GRADC_SORT_PER_KEY * all);
  if (s->rows < 2 * s->chunk) {
    if (all < GRADC_SORT_WIDE || s->rows < 2 * long_chunk) return end;
    s->chunk = long_chunk;
    for (s->bits = GRADC_SORT_BITS; s->keys >> s->bits >= GRADC_SORT_RANGES;) s->bits++;
  }
  s->chunks = gradc_chunks(s->rows, s->chunk);
  s->ranges = (s->keys >> s->bits) + 1;
  s->count = gradc_take(&end, s->chunks * s->ranges * (i64)sizeof(i32));
  s->first = gradc_take(&end, (s->bits ? s->ranges + 1 : gradc_chunks(all, GRADC_SORT_TASK_KEYS)) * (i64)sizeof(i32));
  if (s->bits) s->keyed = gradc_take(&end, s->rows * (i64)sizeof(gradc_keyed));
  return end;
}

/* A search for one row after another, each not below the one before: it goes on from where the last one ended, where what
 * it passes ascends (then that is what a search by itself finds), and there are not many more elements than rows. */
typedef struct { i64 at, end; int ascends; } gradc_seek;
#define GRADC_SEEK(T)                                                                                                 \
  static inline __attribute__((unused)) gradc_seek gradc_seek_##T(const T *row, i64 count, i64 first, i64 last) {     \
    gradc_seek s = { search_##T(row, count, first), search_##T(row, count, last), 0 };                                \
    s.ascends = s.end - s.at <= 4 * (last - first + 1);                                                               \
    for (i64 i = s.at + 1; s.ascends && i < s.end; i++) s.ascends = row[i - 1] <= row[i];                             \
    return s;                                                                                                         \
  }                                                                                                                   \
  static inline __attribute__((unused)) i64 gradc_found_##T(gradc_seek *s, const T *row, i64 count, i64 value) {      \
    if (!s->ascends) return search_##T(row, count, value);                                                            \
    while (s->at < s->end && row[s->at] <= value) s->at++;                                                            \
    return s->at;                                                                                                     \
  }
GRADC_SEEK(i8)
GRADC_SEEK(i16)
GRADC_SEEK(i32)
GRADC_SEEK(i64)
GRADC_SEEK(u8)
#undef GRADC_SEEK

/* Bytes of its own that a sort needs. */
static __attribute__((unused)) i64 gradc_sort_bytes(i64 rows, i64 keys) {
  gradc_counting s = { .rows = rows, .keys = keys };
  return (i64)gradc_counting_layout(&s, 0);
}

/* Counts as sums of those before them, from `sum` on; the sum of all. */
static i32 gradc_sums(i32 *count, i64 n, i32 sum) {
  i64 k = 0;
#ifdef GRADC_SHUFFLES
  typedef i32 four __attribute__((vector_size(16)));
  const four zero = { 0, 0, 0, 0 };
  four before = { sum, sum, sum, sum };
  for (; k + 4 <= n; k += 4) { /* four at a time, for each sum waits for the one before */
    four here, at;
    __builtin_memcpy(&here, count + k, sizeof here);
    at = here + __builtin_shufflevector(here, zero, 4, 0, 1, 2);
    at += __builtin_shufflevector(at, zero, 4, 4, 0, 1);
    const four all = __builtin_shufflevector(at, at, 3, 3, 3, 3);
    at += before - here;
    __builtin_memcpy(count + k, &at, sizeof at);
    before += all;
  }
  sum = before[0];
#endif
  for (; k < n; k++) {
    const i32 here = count[k];
    count[k] = sum;
    sum += here;
  }
  return sum;
}

/* All by one thread; at[k], the end of key k once its rows are at their positions, is start[k + 1]. */
static void gradc_sort_alone(const gradc_counting *s) {
  const i32 *restrict const key = s->key;
  const i64 rows = s->rows, keys = s->keys;
  i32 *restrict const at = s->start + 1, *restrict const order = s->order;
  i32 sum = 0;
  __builtin_memset(s->start, 0, sizeof(i32) * (unsigned long)(keys + 2));
  for (i64 r0 = 0; r0 < rows; r0 += GRADC_POLL, gradc_pause(s->ctx))
    for (i64 r = r0; r < gradc_min(rows, r0 + GRADC_POLL); r++) at[key[r]]++;
  for (i64 k0 = 0; k0 < keys + 1; k0 += GRADC_POLL, gradc_pause(s->ctx))
    sum = gradc_sums(at + k0, gradc_min(keys + 1 - k0, GRADC_POLL), sum);
  for (i64 r0 = 0; r0 < rows; r0 += GRADC_POLL, gradc_pause(s->ctx))
    for (i64 r = r0; r < gradc_min(rows, r0 + GRADC_POLL); r++) order[at[key[r]]++] = (i32)r;
}

static void gradc_sort_count(const void *args, i64 task) {
  const gradc_counting *const s = args;
  const i32 *restrict const key = s->key;
  i32 *restrict const count = s->count + task * s->ranges;
  const i64 bits = s->bits, first = task * s->chunk, last = gradc_min(first + s->chunk, s->rows);
  __builtin_memset(count, 0, sizeof(i32) * (unsigned long)s->ranges);
  for (i64 r = first; r < last; r++) count[key[r] >> bits]++;
}

/* Keys of a task, in all chunks: how many rows they have. */
static void gradc_sort_total(const void *args, i64 task) {
  const gradc_counting *const s = args;
  const i64 k0 = task * GRADC_SORT_TASK_KEYS, n = gradc_min(s->ranges - k0, GRADC_SORT_TASK_KEYS);
  i32 sum = 0;
  for (i64 c = 0; c < s->chunks; c++)
    #pragma omp simd reduction(+ : sum)
    for (i64 k = 0; k < n; k++) sum += s->count[c * s->ranges + k0 + k];
  s->first[task] = sum;
}

/* Where each chunk's rows of these keys go. */
static void gradc_sort_place(const void *args, i64 task) {
  const gradc_counting *const s = args;
  const i64 k0 = task * GRADC_SORT_TASK_KEYS, n = gradc_min(s->ranges - k0, GRADC_SORT_TASK_KEYS);
  i32 *restrict const start = s->start + k0;
  i32 next[GRADC_SORT_TASK_KEYS] = { 0 };
  for (i64 c = 0; c < s->chunks; c++)
    #pragma omp simd
    for (i64 k = 0; k < n; k++) next[k] += s->count[c * s->ranges + k0 + k];
  gradc_sums(next, n, s->first[task]);
  #pragma omp simd
  for (i64 k = 0; k < n; k++) start[k] = next[k];
  for (i64 c = 0; c < s->chunks; c++) {
    i32 *restrict const at = s->count + c * s->ranges + k0;
    #pragma omp simd
    for (i64 k = 0; k < n; k++) {
      const i32 here = at[k];
      at[k] = next[k];
      next[k] += here;
    }
  }
}

static void gradc_sort_rows(const void *args, i64 task) {
  const gradc_counting *const s = args;
  const i32 *restrict const key = s->key;
  i32 *restrict const at = s->count + task * s->ranges, *restrict const order = s->order;
  const i64 first = task * s->chunk, last = gradc_min(first + s->chunk, s->rows);
  for (i64 r = first; r < last; r++) order[at[key[r]]++] = (i32)r;
}

static void gradc_sort_by_range(const void *args, i64 task) {
  const gradc_counting *const s = args;
  const i32 *restrict const key = s->key;
  i32 *restrict const at = s->count + task * s->ranges;
  gradc_keyed *restrict const keyed = s->keyed;
  const i64 bits = s->bits, first = task * s->chunk, last = gradc_min(first + s->chunk, s->rows);
  for (i64 r = first; r < last; r++) keyed[at[key[r] >> bits]++] = (gradc_keyed){ key[r], (i32)r };
}

/* One range by itself, as gradc_sort_alone does all. */
static void gradc_sort_range(const void *args, i64 task) {
  const gradc_counting *const s = args;
  const i64 k0 = task << s->bits, n = gradc_min((i64)1 << s->bits, s->keys + 1 - k0);
  const i64 first = s->first[task], last = s->first[task + 1];
  const gradc_keyed *restrict const keyed = s->keyed;
  i32 *restrict const at = s->start + k0 + 1, *restrict const order = s->order;
  __builtin_memset(at, 0, sizeof(i32) * (unsigned long)n);
  for (i64 p0 = first; p0 < last && !s->ctx->stopped(s->ctx); p0 += GRADC_POLL) /* one key may have all rows */
    for (i64 p = p0; p < gradc_min(last, p0 + GRADC_POLL); p++) at[keyed[p].key - k0]++;
  gradc_sums(at, n, (i32)first);
  for (i64 p0 = first; p0 < last && !s->ctx->stopped(s->ctx); p0 += GRADC_POLL)
    for (i64 p = p0; p < gradc_min(last, p0 + GRADC_POLL); p++) order[at[keyed[p].key - k0]++] = keyed[p].row;
}

/* Where each chunk's rows of each range go. */
static void gradc_sort_place_ranges(const gradc_counting *s) {
  i32 sum = 0;
  for (i64 i = 0; i < s->ranges; i++) {
    s->first[i] = sum;
    for (i64 c = 0; c < s->chunks; c++) {
      i32 *const at = s->count + c * s->ranges + i;
      const i32 here = *at;
      *at = sum;
      sum += here;
    }
  }
  s->first[s->ranges] = sum;
}

/* Whether no key is below the one before: rows of any order are found out after a few. */
static int gradc_ascends(const gradc_ctx *ctx, const i32 *key, i64 rows) {
  for (i64 r0 = 1, next = GRADC_SORT_ROWS / 4; r0 < rows; r0 += next, next = GRADC_POLL, gradc_pause(ctx)) {
    i32 below = 0;
    #pragma omp simd reduction(| : below)
    for (i64 r = r0; r < gradc_min(rows, r0 + next); r++) below |= key[r] < key[r - 1];
    if (below) return 0;
  }
  return rows > 0;
}

/* Rows that are in the order of their keys already; a task also has the first positions of the keys between its rows. */
static void gradc_sort_none(const void *args, i64 task) {
  const gradc_counting *const s = args;
  const i32 *restrict const key = s->key;
  i32 *restrict const start = s->start, *restrict const order = s->order;
  const i64 first = task * GRADC_SORT_ROWS, last = gradc_min(first + GRADC_SORT_ROWS, s->rows);
  for (i64 r = first; r < last; r++) order[r] = (i32)r;
  for (i64 r = first, k = first ? key[first - 1] + 1 : 0; r < last; r++)
    for (; k <= key[r]; k++) start[k] = (i32)r;
  if (last == s->rows)
    for (i64 k = key[last - 1] + 1; k < s->keys + 2; k++) start[k] = (i32)last;
}

/* The key of a row of those in the order of their keys: the last that begins there or before. */
static __attribute__((unused)) i64 gradc_key_of(const i32 *start, i64 keys, i64 row) {
  i64 low = 0, high = keys;
  while (low < high) {
    const i64 middle = (low + high + 1) / 2;
    if (start[middle] <= row) low = middle;
    else high = middle - 1;
  }
  return low;
}

/* Whether the segment of a key is whole in one task, that of the chunk where it begins: if it is no longer than a chunk. */
static __attribute__((unused)) int gradc_whole(const i32 *start, i64 key, i64 chunk) { return start[key + 1] - start[key] <= chunk; }

/* Where the task begins that has the chunk from position `first` on, and where it ends; `key` is that of the chunk's first, and of
 * its last position. */
static __attribute__((unused)) i64 gradc_first_of(const i32 *start, i64 key, i64 first, i64 chunk) {
  return start[key] < first && gradc_whole(start, key, chunk) ? start[key + 1] : first;
}
static __attribute__((unused)) i64 gradc_last_of(const i32 *start, i64 key, i64 first, i64 last, i64 chunk) {
  return start[key] >= first && gradc_whole(start, key, chunk) ? start[key + 1] : last;
}

static __attribute__((unused)) void gradc_sort(const gradc_ctx *ctx, const i32 *key, i64 rows, i64 keys, i32 *start, i32 *order, char *scratch) {
  gradc_counting s = { .ctx = ctx, .key = key, .rows = rows, .keys = keys, .start = start, .order = order };
  if (gradc_ascends(ctx, key, rows)) {
    ctx->parallel_for(ctx, gradc_chunks(rows, GRADC_SORT_ROWS), gradc_sort_none, &s);
    return;
  }
  gradc_counting_layout(&s, scratch);
  if (!s.chunks) {
    gradc_sort_alone(&s);
    return;
  }
  ctx->parallel_for(ctx, s.chunks, gradc_sort_count, &s);
  if (s.bits) {
    gradc_sort_place_ranges(&s);
    ctx->parallel_for(ctx, s.chunks, gradc_sort_by_range, &s);
    ctx->parallel_for(ctx, s.ranges, gradc_sort_range, &s);
  } else {
    const i64 tasks = gradc_chunks(s.ranges, GRADC_SORT_TASK_KEYS);
    ctx->parallel_for(ctx, tasks, gradc_sort_total, &s);
    gradc_sums(s.first, tasks, 0);
    ctx->parallel_for(ctx, tasks, gradc_sort_place, &s);
    ctx->parallel_for(ctx, s.chunks, gradc_sort_rows, &s);
  }
  start[0] = 0;
  start[keys + 1] = (i32)rows;
}

#endif
