{#- The stable argsort of rows of one type of key, rendered for each.  Every way gives the same positions: no two items are
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
  {{ name }}_long = 1 << 15,    /* items of a row that all threads sort together, where there are few rows */
  {{ name }}_rows = 16,         /* rows that are few */
  {{ name }}_task = 1 << 14,    /* items of a task */
  {{ name }}_chunks = 64,       /* tasks of a row that all threads sort, at most */
  {{ name }}_digits = 1 << 11   /* values of a digit there */
};

typedef struct {
  const gradc_ctx *ctx;
  const {{ key }} *keys;
  i64 *out;
  char *scratch;
  i64 axes;
  const i64 *size, *steps; /* of the axes that number the rows */
  i64 rows, n, step, count;
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

/* One long row by all threads: a digit of 11 bits at a time, each task's items behind those of the tasks before it.  Keys of
 * 64 bits are seldom that far apart: where 32 bits hold how far, an item is half as wide. */
static i64 {{ name }}_chunk(i64 n) { return gradc_max({{ name }}_task, gradc_chunks(n, {{ name }}_chunks)); }

{% if bits == 64 %}
typedef struct {
  const {{ A }} *a;
  const {{ key }} *from;
  {{ key }} *limits; /* the least and the largest key of each task */
  i64 chunk;
} {{ name }}_range;

static void {{ name }}_range_task(const void *args_, i64 task) {
  const {{ name }}_range *const p = args_;
  const i64 first = task * p->chunk, step = p->a->step;
  {{ key }} least = p->from[first * step], most = least;
  for (i64 i = first; i < gradc_min(p->a->n, first + p->chunk); i++) {
    const {{ key }} x = p->from[i * step];
    least = x < least ? x : least;
    most = x > most ? x : most;
  }
  p->limits[2 * task] = least;
  p->limits[2 * task + 1] = most;
}
{% endif %}
{% for part, Item, shift in [("", T, bits)] + ([("_near", "u64", 32)] if bits == 64 else []) %}
{% set long = name ~ part %}

typedef struct {
  const {{ A }} *a;
  const {{ key }} *from;
  i64 *out;
  {{ Item }} *items, *to;
  u32 *counts; /* [chunk][digit] */
  i64 chunk;
  int shift;
  {{ key }} least;
} {{ long }}_pass;

static void {{ long }}_load_task(const void *args_, i64 task) {
  const {{ long }}_pass *const p = args_;
  for (i64 i = task * p->chunk; i < gradc_min(p->a->n, (task + 1) * p->chunk); i++)
{% if part %}
    p->items[i] = ((u64)p->from[i * p->a->step] - (u64)p->least) << 32 | (u64)i;
{% else %}
    p->items[i] = {{ name }}_made(p->from[i * p->a->step], i);
{% endif %}
}
static void {{ long }}_count_task(const void *args_, i64 task) {
  const {{ long }}_pass *const p = args_;
  u32 *const counts = p->counts + task * {{ name }}_digits;
  __builtin_memset(counts, 0, sizeof(u32) * {{ name }}_digits);
  for (i64 i = task * p->chunk; i < gradc_min(p->a->n, (task + 1) * p->chunk); i++) counts[(u32)(p->items[i] >> p->shift) & ({{ name }}_digits - 1)]++;
}
static void {{ long }}_move_task(const void *args_, i64 task) {
  const {{ long }}_pass *const p = args_;
  u32 *const place = p->counts + task * {{ name }}_digits;
  for (i64 i = task * p->chunk; i < gradc_min(p->a->n, (task + 1) * p->chunk); i++) p->to[place[(u32)(p->items[i] >> p->shift) & ({{ name }}_digits - 1)]++] = p->items[i];
}
static void {{ long }}_store_task(const void *args_, i64 task) {
  const {{ long }}_pass *const p = args_;
  for (i64 i = task * p->chunk; i < gradc_min(p->a->count, (task + 1) * p->chunk); i++) p->out[i] = (i64)(u{{ shift }})p->items[i];
}
/* span: bits of the keys that may differ */
static void {{ long }}_passes({{ long }}_pass *p, i64 tasks, int span) {
  const gradc_ctx *const ctx = p->a->ctx;
  ctx->parallel_for(ctx, tasks, {{ long }}_load_task, p);
  for (p->shift = {{ shift }}; p->shift < {{ shift }} + span; p->shift += 11) {
    ctx->parallel_for(ctx, tasks, {{ long }}_count_task, p);
    u32 before = 0, most = 0;
    for (i64 d = 0; d < {{ name }}_digits; d++) {
      const u32 first = before;
      for (i64 t = 0; t < tasks; t++) {
        u32 *const place = &p->counts[t * {{ name }}_digits + d], here = *place;
        *place = before;
        before += here;
      }
      most = before - first > most ? before - first : most;
    }
    if (most == p->a->n) continue; /* all have the same digit */
    ctx->parallel_for(ctx, tasks, {{ long }}_move_task, p);
    {{ Item }} *const other = p->items;
    p->items = p->to;
    p->to = other;
  }
  ctx->parallel_for(ctx, tasks, {{ long }}_store_task, p);
}
{% endfor %}

static void {{ name }}_long_row(const {{ A }} *a, i64 row) {
  char *end = a->scratch;
  const i64 chunk = {{ name }}_chunk(a->n), tasks = gradc_chunks(a->n, chunk);
  void *const items = gradc_take(&end, (i64)sizeof({{ T }}) * a->n), *const to = gradc_take(&end, (i64)sizeof({{ T }}) * a->n);
  const {{ key }} *const from = {{ name }}_row(a, row);
  i64 *const out = a->out + row * a->count;
{% if bits == 64 %}
  {{ name }}_range r = { a, from, ({{ key }} *)end, chunk };
  a->ctx->parallel_for(a->ctx, tasks, {{ name }}_range_task, &r);
  {{ key }} least = r.limits[0], most = r.limits[1];
  for (i64 t = 1; t < tasks; t++) {
    least = r.limits[2 * t] < least ? r.limits[2 * t] : least;
    most = r.limits[2 * t + 1] > most ? r.limits[2 * t + 1] : most;
  }
  const u64 apart = (u64)most - (u64)least;
  if (apart >> 32 == 0 && a->n >> 32 == 0) {
    {{ name }}_near_pass p = { a, from, out, items, to, (u32 *)end, chunk, 0, least };
    {{ name }}_near_passes(&p, tasks, apart ? 64 - __builtin_clzll(apart) : 0);
    return;
  }
{% endif %}
  {{ name }}_pass p = { a, from, out, items, to, (u32 *)end, chunk, 0, 0 };
  {{ name }}_passes(&p, tasks, {{ bits }});
}

static i64 {{ name }}_workspace(i64 rows, i64 n, i64 count) {
  if (!{{ name }}_shared(rows, n, count)) return 0;
  return 2 * gradc_align((i64)sizeof({{ T }}) * n) + (i64)sizeof(u32) * {{ name }}_digits * gradc_chunks(n, {{ name }}_chunk(n));
}
static i64 {{ name }}_local(i64 rows, i64 n, i64 count) {
  const i64 room = {{ name }}_kept(n, count);
  return {{ name }}_shared(rows, n, count) ? 0 : 2 * (i64)sizeof({{ T }}) * (room ? room : n);
}

static int {{ name }}(const {{ A }} *a) {
  if (a->rows == 0 || a->count == 0) return 0;
  if ({{ name }}_shared(a->rows, a->n, a->count))
    for (i64 row = 0; row < a->rows; row++) {{ name }}_long_row(a, row);
  else a->ctx->parallel_for(a->ctx, gradc_chunks(a->rows, {{ name }}_rows_of_task(a->n)), {{ name }}_rows_task, a);
  return gradc_failed(a->ctx);
}
