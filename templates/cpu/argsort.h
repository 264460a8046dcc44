{#- The stable argsort of rows of one type of key, and the segments of a row, rendered for each.  Every way gives the same positions: no two items are
    equal.  No name of the user's stands in it, so that it reserves none of its local variables' names. -#}
{% set name = "gradc_argsort_" ~ key %}
{% set T = name ~ "_item" %}
{% set A = name ~ "_args" %}
/* Stable argsorts of rows of {{ key }}.  An item is a key, as an unsigned number of the same order, above its position. */
{% if item == "u128" %}
typedef unsigned __int128 {{ T }};
{% else %}
typedef {{ item }} {{ T }};
{% endif %}
enum {
  {{ name }}_few = 24,          /* items that are sorted by insertion */
  {{ name }}_long = 1 << 10,    /* items of a row that all threads sort together, where there are few rows */
  {{ name }}_rows = 16,         /* rows that are few */
  {{ name }}_task = 1 << 14,    /* items of a task */
  {{ name }}_chunks = 64,       /* tasks of a row that all threads sort, at most */
  {{ name }}_widest = 14        /* bits of a digit there, at most: what its values count stays in the nearer caches */
};

typedef struct {
  const gradc_ctx *ctx;
  const {{ key }} *keys;
  i64 *out;
  char *scratch;
  i64 axes;
  const i64 *size, *steps; /* of the axes that number the rows */
  i64 rows, n, step, count;
  int segments; /* whether `out` is [3, n]: positions; the distinct keys, then the largest i64; where each begins, then n */
} {{ A }};

static const {{ key }} *{{ name }}_row(const {{ A }} *a, i64 row) {
  i64 at = 0;
  for (i64 i = a->axes - 1; i >= 0; i--) {
    at += row % a->size[i] * a->steps[i];
    row /= a->size[i];
  }
  return a->keys + at;
}

static inline {{ T }} {{ name }}_made({{ key }} key, i64 position) {
  return ({{ T }})((u{{ bits }})key ^ (u{{ bits }})1 << {{ bits - 1 }}) << {{ bits }} | ({{ T }})position;
}
static inline i64 {{ name }}_position({{ T }} item) { return (i64)(u{{ bits }})item; }

/* How many smallest keys are asked for that are sought before they are sorted: of these so many are kept. */
static i64 {{ name }}_kept(i64 n, i64 count) { return count < n / 8 ? gradc_max(4 * count, 256) : 0; }
static int {{ name }}_shared(i64 rows, i64 n, i64 count) {
  return rows < {{ name }}_rows && n >= {{ name }}_long && !{{ name }}_kept(n, count);
}

/* Items in order, in `a` or in `b`; both have room for n. */
static {{ T }} *{{ name }}_sorted({{ T }} *a, {{ T }} *b, i64 n) {
  if (n <= {{ name }}_few) {
    for (i64 i = 1; i < n; i++) {
      const {{ T }} x = a[i];
      i64 j = i;
      for (; j > 0 && a[j - 1] > x; j--) a[j] = a[j - 1];
      a[j] = x;
    }
    return a;
  }
  u32 counts[{{ bits // 8 }}][256] = {0};
  for (i64 i = 0; i < n; i++) {
    const u{{ bits }} k = (u{{ bits }})(a[i] >> {{ bits }});
{% for d in range(bits // 8) %}
    counts[{{ d }}][k >> {{ 8 * d }} & 255]++;
{% endfor %}
  }
  for (int d = 0; d < {{ bits // 8 }}; d++) {
    u32 *const place = counts[d], first = (u32)(a[0] >> ({{ bits }} + 8 * d)) & 255;
    if (place[first] == n) continue;
    u32 before = 0;
    for (int v = 0; v < 256; v++) {
      const u32 here = place[v];
      place[v] = before;
      before += here;
    }
    for (i64 i = 0; i < n; i++) b[place[(u32)(a[i] >> ({{ bits }} + 8 * d)) & 255]++] = a[i];
    {{ T }} *const other = a;
    a = b;
    b = other;
  }
  return a;
}

/* The `count` smallest of a row, in order: what may be one of them is kept, and sorted when there is no more room. */
static {{ T }} *{{ name }}_smallest(const {{ key }} *from, i64 n, i64 step, i64 count, i64 room, {{ T }} *a) {
  {{ T }} *kept = a, limit = ~({{ T }})0;
  i64 have = 0;
  for (i64 i = 0; i < n; i++) {
    const {{ T }} x = {{ name }}_made(from[i * step], i);
    if (x >= limit) continue;
    kept[have++] = x;
    if (have == room) {
      kept = {{ name }}_sorted(kept, kept == a ? a + room : a, have);
      have = count;
      limit = count ? kept[count - 1] : 0;
    }
  }
  return {{ name }}_sorted(kept, kept == a ? a + room : a, have);
}

static i64 {{ name }}_rows_of_task(i64 n) { return gradc_max(1, {{ name }}_task / gradc_max(n, 1)); }

static void {{ name }}_rows_task(const void *args_, i64 task) {
  const {{ A }} *const a = args_;
  const i64 room = {{ name }}_kept(a->n, a->count), each = {{ name }}_rows_of_task(a->n);
  {{ T }} *const memory = ({{ T }} *)a->ctx->local(a->ctx, 2 * (i64)sizeof({{ T }}) * (room ? room : a->n));
  if (!memory) return;
  i64 since = 0;
  for (i64 row = task * each; row < gradc_min(a->rows, (task + 1) * each); row++) {
    if (gradc_poll(a->ctx, &since, a->n)) return;
    const {{ key }} *const from = {{ name }}_row(a, row);
    const {{ T }} *sorted;
    if (room) sorted = {{ name }}_smallest(from, a->n, a->step, a->count, room, memory);
    else {
      for (i64 i = 0; i < a->n; i++) memory[i] = {{ name }}_made(from[i * a->step], i);
      sorted = {{ name }}_sorted(memory, memory + a->n, a->n);
    }
    for (i64 i = 0; i < a->count; i++) a->out[row * a->count + i] = {{ name }}_position(sorted[i]);
  }
}

/* One long row by all threads: a digit at a time, each task's items behind those of the tasks before it.  An item holds how far its key
 * is from the least; keys of 64 bits are seldom 2^32 apart, and an item is half as wide where they are not. */
static i64 {{ name }}_chunk(i64 n) { return gradc_max({{ name }}_task, gradc_chunks(n, {{ name }}_chunks)); }

/* Rows of counts that are added up: one task's are the sums already. */
static i64 {{ name }}_counted(i64 tasks) { return tasks > 1 ? tasks : 0; }

/* Bits of a digit at most: two digits of few values take less time than one of more than twice as many as there are items. */
static int {{ name }}_most(i64 n) {
  int bits = 1;
  while (bits < {{ name }}_widest && (i64)2 << bits <= 2 * n) bits++;
  return bits;
}

/* Bits of the digits by which `span` bits take least time: each digit is one pass over the items that counts, one that moves, and one over
 * the counts: one by one over their sums, and over those of several tasks in vectors. */
static int {{ name }}_digit(i64 n, i64 tasks, int span) {
  const i64 each = 4 + {{ name }}_counted(tasks); /* quarters of a value's time */
  int best = 0;
  i64 least = 0;
  for (int bits = {{ name }}_most(n); bits > 0; bits--) {
    const i64 time = gradc_chunks(span, bits) * (2 * n + (each << bits) / 4);
    if (best && time >= least) continue;
    best = bits;
    least = time;
  }
  return best;
}

typedef struct {
  const {{ A }} *a;
  const {{ key }} *from;
  {{ key }} *limits; /* the least and the largest key of each task */
  i64 chunk;
} {{ name }}_range;

static void {{ name }}_range_task(const void *args_, i64 task) {
  const {{ name }}_range *const p = args_;
  const i64 first = task * p->chunk, last = gradc_min(p->a->n, first + p->chunk), step = p->a->step;
  const {{ key }} *const from = p->from;
  {{ key }} least = from[first * step], most = least;
  if (step == 1) {
    #pragma omp simd reduction(min : least) reduction(max : most)
    for (i64 i = first; i < last; i++) {
      least = from[i] < least ? from[i] : least;
      most = from[i] > most ? from[i] : most;
    }
  } else {
    for (i64 i = first; i < last; i++) {
      const {{ key }} x = from[i * step];
      least = x < least ? x : least;
      most = x > most ? x : most;
    }
  }
  p->limits[2 * task] = least;
  p->limits[2 * task + 1] = most;
}
{% for part, Item, shift in [("_near", "u64", 32)] + ([("", T, bits)] if bits == 64 else []) %}
{% set long = name ~ part %}

typedef struct {
  const {{ A }} *a;
  const {{ key }} *from;
  i64 *out;
  {{ Item }} *items, *to;
  u32 *counts; /* [chunk][digit]; then the sums of several chunks */
  i64 *heads;  /* [chunk]: keys that begin in the chunks before it */
  i64 *before; /* [chunk]: the last key of the chunk before it: there may be positions where items were */
  i64 chunk, distinct;
  i64 digits; /* values of a digit */
  int bits, shift;
  {{ key }} least;
} {{ long }}_pass;

/* Item i: at first, before any is moved, made of its key. */
static inline {{ Item }} {{ long }}_item_at(const {{ long }}_pass *p, i64 i, int first) {
  return first ? ({{ Item }})((u64)p->from[i * p->a->step] - (u64)p->least) << {{ shift }} | ({{ Item }})i : p->items[i];
}
static inline void {{ long }}_count(const {{ long }}_pass *p, i64 task, int first) {
  const {{ long }}_pass own = *p; /* what stores cannot change */
  const i64 last = gradc_min(own.a->n, (task + 1) * own.chunk);
  const u32 mask = ((u32)1 << own.bits) - 1;
  u32 *restrict const counts = own.counts + task * own.digits;
  __builtin_memset(counts, 0, sizeof(u32) * (unsigned long)own.digits);
  for (i64 i = task * own.chunk; i < last; i++) counts[(u32)({{ long }}_item_at(&own, i, first) >> own.shift) & mask]++;
}
static void {{ long }}_count_first_task(const void *args_, i64 task) { {{ long }}_count(args_, task, 1); }
static void {{ long }}_count_task(const void *args_, i64 task) { {{ long }}_count(args_, task, 0); }
static inline void {{ long }}_move(const {{ long }}_pass *p, i64 task, int first) {
  const {{ long }}_pass own = *p;
  const i64 begin = task * own.chunk, last = gradc_min(own.a->n, begin + own.chunk), asked = gradc_max(begin, last - GRADC_AHEAD);
  const u32 mask = ((u32)1 << own.bits) - 1;
  {{ Item }} *restrict const to = own.to;
  u32 *restrict const place = own.counts + task * own.digits;
  for (i64 i = begin; i < last; i++) { /* digits have more lines than the nearest cache: these are asked for ahead, as stores wait for one another */
    if (i < asked) __builtin_prefetch(to + place[(u32)({{ long }}_item_at(&own, i + GRADC_AHEAD, first) >> own.shift) & mask], 1);
    const {{ Item }} item = {{ long }}_item_at(&own, i, first);
    to[place[(u32)(item >> own.shift) & mask]++] = item;
  }
}
static void {{ long }}_move_first_task(const void *args_, i64 task) { {{ long }}_move(args_, task, 1); }
static void {{ long }}_move_task(const void *args_, i64 task) { {{ long }}_move(args_, task, 0); }
/* Items of keys that are all equal. */
static void {{ long }}_load_task(const void *args_, i64 task) {
  const {{ long }}_pass *const p = args_;
  for (i64 i = task * p->chunk; i < gradc_min(p->a->n, (task + 1) * p->chunk); i++) p->items[i] = {{ long }}_item_at(p, i, 1);
}
static void {{ long }}_store_task(const void *args_, i64 task) {
  const {{ long }}_pass *const p = args_;
  for (i64 i = task * p->chunk; i < gradc_min(p->a->count, (task + 1) * p->chunk); i++) p->out[i] = (i64)(u{{ shift }})p->items[i];
}
/* Counts -> places.  Returns whether all items have the same digit. */
static int {{ long }}_places(const {{ long }}_pass *p, i64 tasks) {
  const i64 digits = p->digits, counted = {{ name }}_counted(tasks), n = p->a->n;
  u32 *const counts = p->counts, *restrict const all = counts + counted * digits, before = 0, most = 0; /* one task's are `all` */
  if (counted) __builtin_memset(all, 0, sizeof(u32) * (unsigned long)digits);
  for (i64 t = 0; t < counted; t++) {
    const u32 *restrict const of_task = counts + t * digits;
    #pragma omp simd
    for (i64 d = 0; d < digits; d++) all[d] += of_task[d];
  }
  for (i64 d = 0; d < digits; d++) {
    const u32 here = all[d];
    all[d] = before;
    before += here;
    most = here > most ? here : most;
  }
  for (i64 t = 0; t < counted; t++) {
    u32 *restrict const place = counts + t * digits;
    #pragma omp simd
    for (i64 d = 0; d < digits; d++) {
      const u32 first = all[d];
      all[d] = first + place[d];
      place[d] = first;
    }
  }
  return most == n;
}

/* The distinct keys, and where each begins: a task writes those that begin in its chunk. */
static void {{ long }}_heads_task(const void *args_, i64 task) {
  const {{ long }}_pass *const p = args_;
  const {{ Item }} *const items = p->items;
  i64 heads = task == 0;
  p->before[task] = task ? (i64)(u64)(items[task * p->chunk - 1] >> {{ shift }}) : 0;
  #pragma omp simd reduction(+ : heads)
  for (i64 i = gradc_max(1, task * p->chunk); i < gradc_min(p->a->n, (task + 1) * p->chunk); i++) heads += (items[i] ^ items[i - 1]) >> {{ shift }} != 0;
  p->heads[task] = heads;
}
static void {{ long }}_segments_task(const void *args_, i64 task) {
  const {{ long }}_pass *const p = args_;
  const i64 n = p->a->n, first = task * p->chunk, last = gradc_min(n, first + p->chunk);
  const {{ Item }} *const items = p->items; /* they may lie in `order` */
  i64 *const order = p->out, *restrict const keys = p->out + n, *restrict const starts = p->out + 2 * n;
  const u64 least = (u64)p->least;
  u64 key = (u64)p->before[task];
  i64 number = p->heads[task] - 1, i = first;
  for (; i < last && i > 0 && (u64)(items[i] >> {{ shift }}) == key; i++) order[i] = (i64)(u{{ shift }})items[i];
  i64 begin = i;
  for (key = i < last ? ~(u64)(items[i] >> {{ shift }}) : 0; i < last; i++) {
    const u64 next = (u64)(items[i] >> {{ shift }});
    begin = next != key ? i : begin;
    number += next != key;
    key = next;
    order[i] = (i64)(u{{ shift }})items[i];
    keys[number] = (i64)(key + least);
    starts[number] = begin;
  }
  for (i = gradc_max(first, p->distinct); i < last; i++) keys[i] = INT64_MAX, starts[i] = n;
}

{% if part %}
/* Keys of one digit: nothing is moved but positions, and the counts say which keys there are and where each begins. */
static void {{ long }}_count_keys_task(const void *args_, i64 task) {
  const {{ long }}_pass *const p = args_;
  const i64 last = gradc_min(p->a->n, (task + 1) * p->chunk), step = p->a->step;
  const u64 least = (u64)p->least;
  const {{ key }} *restrict const from = p->from;
  u32 *restrict const counts = p->counts + task * p->digits;
  __builtin_memset(counts, 0, sizeof(u32) * (unsigned long)p->digits);
  for (i64 i = task * p->chunk; i < last; i++) counts[(u64)from[i * step] - least]++;
}
static void {{ long }}_move_keys_task(const void *args_, i64 task) {
  const {{ long }}_pass *const p = args_;
  const i64 first = task * p->chunk, last = gradc_min(p->a->n, first + p->chunk), step = p->a->step;
  const u64 least = (u64)p->least;
  const {{ key }} *restrict const from = p->from;
  u32 *restrict const to = (u32 *)p->items, *restrict const place = p->counts + task * p->digits; /* half as many lines as in the result */
  const i64 asked = gradc_max(first, last - GRADC_AHEAD);
  for (i64 i = first; i < asked; i++) { /* many keys have as many lines: they are asked for ahead, as stores wait for one another */
    __builtin_prefetch(to + place[(u64)from[(i + GRADC_AHEAD) * step] - least], 1);
    to[place[(u64)from[i * step] - least]++] = (u32)i;
  }
  for (i64 i = asked; i < last; i++) to[place[(u64)from[i * step] - least]++] = (u32)i;
}
static void {{ long }}_store_keys_task(const void *args_, i64 task) {
  const {{ long }}_pass *const p = args_;
  const i64 n = p->a->n, first = task * p->chunk, last = gradc_min(n, first + p->chunk);
  const u32 *restrict const positions = (const u32 *)p->items;
  i64 *restrict const order = p->out, *restrict const keys = p->out + n, *restrict const starts = p->out + 2 * n;
  #pragma omp simd
  for (i64 i = first; i < last; i++) order[i] = positions[i];
  for (i64 i = gradc_max(first, p->distinct); i < last; i++) keys[i] = INT64_MAX, starts[i] = n;
}
static void {{ long }}_one_digit({{ long }}_pass *p, i64 digits) {
  const gradc_ctx *const ctx = p->a->ctx;
  const i64 n = p->a->n;
  i64 *restrict const keys = p->out + n, *restrict const starts = p->out + 2 * n;
  i64 number = 0;
  p->digits = digits;
  p->chunk = gradc_max(p->chunk, 4 * digits); /* a task's counts are added up in less time than its items take */
  const i64 tasks = gradc_chunks(n, p->chunk);
  ctx->parallel_for(ctx, tasks, {{ long }}_count_keys_task, p);
  {{ long }}_places(p, tasks);
  const u32 *restrict const first = p->counts; /* of the first task: where each key begins */
  for (i64 d = 0; d < digits && number < n; d++) { /* behind the last key there is none */
    keys[number] = (i64)((u64)d + (u64)p->least);
    starts[number] = first[d];
    number += (d + 1 < digits ? first[d + 1] : n) != first[d];
  }
  p->distinct = number;
  ctx->parallel_for(ctx, tasks, {{ long }}_move_keys_task, p);
  ctx->parallel_for(ctx, tasks, {{ long }}_store_keys_task, p);
}
{% endif %}

/* apart: the largest key less the least; span: its bits */
static void {{ long }}_passes({{ long }}_pass *p, i64 tasks, u64 apart, int span) {
  const gradc_ctx *const ctx = p->a->ctx;
  p->bits = {{ name }}_digit(p->a->n, tasks, span);
{% if part %}
  if (p->a->segments && p->bits >= span) {
    {{ long }}_one_digit(p, (i64)apart + 1);
    return;
  }
{% endif %}
  p->digits = (i64)1 << p->bits;
{% if part %}
  if (p->a->segments) { /* items of 64 bits lie in the result, in the end where their positions go */
    const int odd = gradc_chunks(span, p->bits) & 1;
    p->items = (u64 *)p->out + odd * p->a->n;
    p->to = (u64 *)p->out + !odd * p->a->n;
  }
{% endif %}
  int first = 1;
  for (p->shift = {{ shift }}; p->shift < {{ shift }} + span; p->shift += p->bits) {
    ctx->parallel_for(ctx, tasks, first ? {{ long }}_count_first_task : {{ long }}_count_task, p);
    if ({{ long }}_places(p, tasks)) continue;
    ctx->parallel_for(ctx, tasks, first ? {{ long }}_move_first_task : {{ long }}_move_task, p);
    {{ Item }} *const other = p->items;
    p->items = p->to;
    p->to = other;
    first = 0;
  }
  if (first) ctx->parallel_for(ctx, tasks, {{ long }}_load_task, p);
{% if part %}
  if (p->a->segments && p->items != (u64 *)p->out) { /* a digit that all keys share was passed over */
    __builtin_memcpy(p->out, p->items, sizeof(u64) * (unsigned long)p->a->n);
    p->items = (u64 *)p->out;
  }
{% endif %}
  if (!p->a->segments) {
    ctx->parallel_for(ctx, tasks, {{ long }}_store_task, p);
    return;
  }
  ctx->parallel_for(ctx, tasks, {{ long }}_heads_task, p);
  p->distinct = 0;
  for (i64 t = 0; t < tasks; t++) {
    const i64 here = p->heads[t];
    p->heads[t] = p->distinct;
    p->distinct += here;
  }
  ctx->parallel_for(ctx, tasks, {{ long }}_segments_task, p);
}
{% endfor %}

static void {{ name }}_long_row(const {{ A }} *a, i64 row) {
  char *end = a->scratch;
  const i64 chunk = {{ name }}_chunk(a->n), tasks = gradc_chunks(a->n, chunk);
  void *const items = gradc_take(&end, (i64)sizeof({{ T }}) * a->n), *const to = gradc_take(&end, (i64)sizeof({{ T }}) * a->n);
  i64 *const of_tasks = gradc_take(&end, 2 * (i64)sizeof(i64) * tasks); /* limits of keys, then heads and keys before */
  u32 *const counts = (u32 *)end;
  const {{ key }} *const from = {{ name }}_row(a, row);
  i64 *const out = a->out + row * a->count;
  {{ name }}_range r = { a, from, ({{ key }} *)of_tasks, chunk };
  a->ctx->parallel_for(a->ctx, tasks, {{ name }}_range_task, &r);
  {{ key }} least = r.limits[0], most = r.limits[1];
  for (i64 t = 1; t < tasks; t++) {
    least = r.limits[2 * t] < least ? r.limits[2 * t] : least;
    most = r.limits[2 * t + 1] > most ? r.limits[2 * t + 1] : most;
  }
  const u64 apart = (u64)most - (u64)least;
  const int span = apart ? 64 - __builtin_clzll(apart) : 0;
{% if bits == 64 %}
  if (span > 32 || a->n >> 32) {
    {{ name }}_pass p = { a, from, out, items, to, counts, of_tasks, of_tasks + tasks, chunk, 0, 0, 0, 0, least };
    {{ name }}_passes(&p, tasks, apart, span);
    return;
  }
{% endif %}
  {{ name }}_near_pass p = { a, from, out, items, to, counts, of_tasks, of_tasks + tasks, chunk, 0, 0, 0, 0, least };
  {{ name }}_near_passes(&p, tasks, apart, span);
}

static i64 {{ name }}_long_workspace(i64 n) {
  const i64 tasks = gradc_chunks(n, {{ name }}_chunk(n));
  return 2 * gradc_align((i64)sizeof({{ T }}) * n) + gradc_align(2 * (i64)sizeof(i64) * tasks) + ((i64)sizeof(u32) * ({{ name }}_counted(tasks) + 1) << {{ name }}_most(n));
}
static __attribute__((unused)) i64 {{ name }}_workspace(i64 rows, i64 n, i64 count) { return {{ name }}_shared(rows, n, count) ? {{ name }}_long_workspace(n) : 0; }
static __attribute__((unused)) i64 {{ name }}_local(i64 rows, i64 n, i64 count) {
  const i64 room = {{ name }}_kept(n, count);
  return {{ name }}_shared(rows, n, count) ? 0 : 2 * (i64)sizeof({{ T }}) * (room ? room : n);
}

static int {{ name }}(const {{ A }} *a) {
  if (a->rows == 0 || a->count == 0) return 0;
  if (a->segments || {{ name }}_shared(a->rows, a->n, a->count))
    for (i64 row = 0; row < a->rows; row++) {{ name }}_long_row(a, row);
  else a->ctx->parallel_for(a->ctx, gradc_chunks(a->rows, {{ name }}_rows_of_task(a->n)), {{ name }}_rows_task, a);
  return gradc_failed(a->ctx);
}
