/* The checking mode: what the sanitizers' instructions call in a kernel, defined by us instead of their libraries.
 *
 * -fsanitize=thread puts a call before every load and store.  Each goes through `access`: the address must lie in an
 * array of the launch or in the block's shared memory, be writable, have a value if it is read, and not be in a race.
 * For races every few bytes have a cell: the last plain write, and two other accesses that nothing has ordered yet
 * (of more readers, any two are as good: who comes next differs from one of them).  An access is one word: block,
 * thread, time, kind.  Time grows with every barrier and __syncwarp; an access is ordered before a thread's next one if
 * it is its own, older than the block's last barrier, or older than what a __syncwarp made known to its lane.  Between
 * blocks, what a thread of one did before its __threadfence and an atomic is ordered before what a thread of another does
 * after an atomic on the same address: how the last block finds the partial results of all. */

enum { SHARED_GAP = 64 * 1024, TIME_BITS = 32, THREAD_BITS = 10, BLOCK_BITS = 20 };

extern "C" {
extern char __ehdr_start[] __attribute__((visibility("hidden")));
extern char __start_gradc_constant[] __attribute__((weak, visibility("hidden")));
extern char __stop_gradc_constant[] __attribute__((weak, visibility("hidden")));
}

static const char *stacks_from, *stacks_to, *constants_to;
enum { HITS = 64 };
static region *hits[HITS]; /* of the last access from about here: an instruction goes to one array, neighbours to others */
struct release {
  const void *at; /* of the atomic */
  int64_t block;
  int thread;
  uint64_t block_until, own_until; /* what the others of the block did, what the thread did, before this time */
};
static struct {
  release *all;
  int64_t count;
  /* What the block that runs has acquired, by which thread and when. */
  const void *at;
  int64_t block;
  int thread;
  uint64_t time;
} fences;

static uint64_t stamp_of(int64_t kind) {
  return (uint64_t)sim.block << 44 | (uint64_t)sim.self->number << 34 | (sim.time & 0xffffffffu) << 2 | (uint64_t)kind;
}
static party party_of(uint64_t stamp, uint32_t pc) {
  return {(int64_t)(stamp >> 44), (int64_t)(stamp >> 34 & (MAX_THREADS - 1)), __ehdr_start + pc, (int64_t)(stamp & 3)};
}

/* Whether the access is past for the thread that runs. */
static int is_past(uint64_t stamp, int shared) {
  const int64_t block = (int64_t)(stamp >> 44);
  const int number = (int)(stamp >> 34 & (MAX_THREADS - 1));
  const uint64_t time = stamp >> 2 & 0xffffffffu;
  const thread *self = sim.self;
  if (block != sim.block) {
    if (shared) {
      return 1; /* each block has its own */
    }
    if (fences.block == sim.block && (self->number == fences.thread || fences.time < sim.barrier_time)) {
      for (int64_t i = 0; i < fences.count; i++) {
        const release &r = fences.all[i];
        if (r.at == fences.at && r.block == block && time < (r.thread == number ? r.own_until : r.block_until)) {
          return 1;
        }
      }
    }
    return 0;
  }
  return number == self->number || time < sim.barrier_time ||
         (number / LANES == self->number / LANES && time < warp_of(self).known[self->number % LANES][number % LANES]);
}

/* ---- Regions ----------------------------------------------------------------------------------------------------------- */

static region *region_of(const launch *l, int64_t i) { return i < l->variable_count ? &l->variables[i] : &l->regions[i - l->variable_count]; }

static int is_on_stack(const char *at) { return at >= stacks_from && at < stacks_to; }

static region *region_at(const char *at, size_t bytes, const void *pc) {
  if (is_on_stack(at)) {
    return NULL;
  }
  region *&hit = hits[((uintptr_t)pc >> 2) % HITS];
  if (hit && at >= hit->start && at + bytes <= hit->start + hit->size) {
    return hit;
  }
  const launch *l = sim.now;
  for (int64_t i = 0; i < l->variable_count + l->region_count; i++) {
    region *r = region_of(l, i);
    if (at >= r->start && at + bytes <= r->start + r->size) {
      return hit = r;
    }
  }
  return NULL;
}

/* Stacks, and constants of the module: not ours to watch.  Its variables are none of the kernel's. */
static int is_private(const char *at, int64_t kind) {
  return is_on_stack(at) || (kind == READS && ((at >= __ehdr_start && at < constants_to) || (at >= __start_gradc_constant && at < __stop_gradc_constant)));
}

/* The end of what the library has in pages that cannot be written. */
static const char *end_of_constants(void) {
  const ElfW(Ehdr) *head = (const ElfW(Ehdr) *)__ehdr_start;
  const ElfW(Phdr) *part = (const ElfW(Phdr) *)(__ehdr_start + head->e_phoff);
  const char *end = (const char *)UINTPTR_MAX;
  for (int i = 0; i < head->e_phnum; i++) {
    const char *start = __ehdr_start + part[i].p_vaddr;
    end = part[i].p_type == PT_LOAD && part[i].p_flags & PF_W && start < end ? start : end;
  }
  return end;
}

static int64_t number_of(const region *r) { /* as Python counts: arrays from 0, shared memory from -2 down */
  const launch *l = sim.now;
  return r >= l->variables && r < l->variables + l->variable_count ? -2 - (r - l->variables) : r - l->regions;
}

static void __attribute__((noreturn)) stop_at(fault_kind kind, const char *at, size_t bytes, party who, party other) {
  fault &f = sim.now->found;
  const region *near = NULL;
  int64_t nearest = INT64_MAX;
  for (int64_t i = 0; i < sim.now->variable_count + sim.now->region_count; i++) {
    const region *r = region_of(sim.now, i);
    const int64_t distance = at < r->start ? r->start - at : at < r->start + r->size ? 0 : at - r->start - r->size;
    if (distance < nearest) {
      nearest = distance;
      near = r;
    }
  }
  f.region = near && nearest < (1 << 19) ? number_of(near) : -1;
  f.offset = near ? at - near->start : 0;
  f.size = (int64_t)bytes;
  stop(kind, who, other, (int64_t)(intptr_t)at, near ? near->size : 0, NULL);
}

/* ---- Copies in flight: what they write has the mark IN_COPY and no value, what they read is not to be written ------------------ */

enum { HAS_VALUE = 1, IN_COPY = 2 };

static int overlap(const char *a, size_t a_bytes, const char *b, size_t b_bytes) { return a < b + b_bytes && b < a + a_bytes; }

/* Whether a copy of the block that runs reads or writes these bytes; who started it. */
static int is_copied(const char *at, size_t bytes, party *by) {
  for (int i = 0; i < sim.threads; i++) {
    const thread &t = sim.warps[i / LANES].lanes[i % LANES];
    for (int j = 0; j < t.copy_count; j++) {
      const copy &c = t.copies[j];
      const int written = overlap(at, bytes, c.to, (size_t)c.bytes);
      if (written || overlap(at, bytes, c.from, (size_t)c.valid)) {
        *by = party_of(&t, c.pc, written ? WRITES : READS);
        return 1;
      }
    }
  }
  return 0;
}

/* Apart from `access`, which is faster without it. */
static void __attribute__((noinline)) expect_no_copy(const region *r, const char *at, size_t bytes, int64_t kind, const void *pc) {
  party by;
  if ((number_of(r) >= 0 ? kind != READS : memchr(r->ready + (at - r->start), IN_COPY, bytes) != NULL) && is_copied(at, bytes, &by)) {
    stop_at(IN_FLIGHT, at, bytes, party_of(sim.self, pc, kind), by);
  }
}

/* ---- An access ----------------------------------------------------------------------------------------------------------- */

/* The region that it is in; NULL: a thread's own memory. */
static region *access(void *address, size_t bytes, int64_t kind, const void *pc) {
  char *at = (char *)address;
  region *r = region_at(at, bytes, pc);
  if (!r) {
    if (!is_private(at, kind)) {
      stop_at(OUT_OF_BOUNDS, at, bytes, party_of(sim.self, pc, kind), {});
    }
    return NULL;
  }
  if (!r->writable && kind != READS) {
    stop_at(READ_ONLY, at, bytes, party_of(sim.self, pc, kind), {});
  }
  const size_t offset = (size_t)(at - r->start);
  if (sim.copies) {
    expect_no_copy(r, at, bytes, kind, pc);
  }
  if (kind != WRITES && r->ready) {
    const uint8_t *none = (const uint8_t *)memchr(r->ready + offset, 0, bytes);
    if (none) {
      stop_at(UNINITIALISED, r->start + (none - r->ready), bytes, party_of(sim.self, pc, kind), {});
    }
  }
  if (!r->writable) {
    return r;
  }
  const int shared = number_of(r) < 0;
  const uint64_t stamp = stamp_of(kind);
  const uint32_t place = (uint32_t)((const char *)pc - __ehdr_start);
  const size_t granule = (size_t)r->granule;
  const int shift = __builtin_ctzll(granule);
  cell before, after = {};
  for (size_t first = offset >> shift, i = first; i <= (offset + bytes - 1) >> shift; i++) {
    cell &c = r->cells[i];
    if (i > first && !memcmp(&c, &before, sizeof c)) { /* as its neighbour: most accesses are to what one access wrote */
      c = after;
      continue;
    }
    before = c;
    if (c.write && !is_past(c.write, shared)) {
      stop_at(RACE, r->start + i * granule, bytes, party_of(sim.self, pc, kind), party_of(c.write, c.write_pc));
    }
    int slot = -1;
    for (int j = 0; j < 2; j++) {
      const int past = !c.seen[j] || is_past(c.seen[j], shared);
      if (!past && kind != (int64_t)(c.seen[j] & 3)) {
        stop_at(RACE, r->start + i * granule, bytes, party_of(sim.self, pc, kind), party_of(c.seen[j], c.seen_pc[j]));
      }
      slot = past && slot < 0 ? j : slot;
    }
    if (kind == WRITES) {
      c.write = stamp;
      c.write_pc = place;
    } else if (slot >= 0) {
      c.seen[slot] = stamp;
      c.seen_pc[slot] = place;
    }
    after = c;
  }
  if (kind != READS && r->ready) {
    memset(r->ready + offset, HAS_VALUE, bytes);
  }
  return r;
}

/* ---- Conflicts of banks: how many transactions the accesses of a warp to shared memory take -------------------------------------
 * Fibers run one after another, so that accesses of lanes that a warp makes together are those of one instruction, the n-th of each
 * since the warp last synchronised.  NVRTC may widen or merge accesses, which are the compiler's here. */

enum { BANKS = 32, AHEAD = 64 };

static void add_request(void *at, size_t bytes, const void *pc) {
  warp &of_warp = warp_of(sim.self);
  const int lane = sim.self->number % LANES;
  int &next = of_warp.next_request[lane], i = next;
  while (i < of_warp.request_count && i < next + AHEAD && (of_warp.requests[i].pc != pc || of_warp.requests[i].bytes != bytes)) {
    i++;
  }
  if (i == of_warp.request_count || i == next + AHEAD) { /* of this lane alone, as yet */
    if (of_warp.request_count == of_warp.request_room) {
      const int room = 2 * of_warp.request_room + 64;
      request *more = (request *)realloc(of_warp.requests, (size_t)room * sizeof(request));
      if (!more) {
        return; /* it does not count */
      }
      of_warp.requests = more;
      of_warp.request_room = room;
    }
    next += next == of_warp.request_count;
    i = of_warp.request_count++;
    of_warp.requests[i] = {pc, bytes, 0, {0}};
  } else {
    next = i + 1;
  }
  of_warp.requests[i].lanes |= 1u << lane;
  of_warp.requests[i].at[lane] = (uintptr_t)at;
}

static inline void request_shared(const region *r, void *at, size_t bytes, const void *pc) {
  if (sim.now->counts && r && number_of(r) < 0 && bytes <= 16) {
    add_request(at, bytes, pc);
  }
}

/* Transactions of so many lanes from one on: the most words that they want of a bank. */
static int transactions_of(const request &q, int lane, int lanes) {
  uintptr_t words[BANKS][LANES];
  int count[BANKS] = {0}, most = 0;
  for (const int end = lane + lanes; lane < end; lane++) {
    for (uintptr_t word = q.at[lane] / 4; q.lanes >> lane & 1 && word <= (q.at[lane] + q.bytes - 1) / 4; word++) {
      const int bank = (int)(word % BANKS);
      int i = 0;
      while (i < count[bank] && words[bank][i] != word) {
        i++;
      }
      if (i == count[bank]) {
        words[bank][count[bank]++] = word;
        most = count[bank] > most ? count[bank] : most;
      }
    }
  }
  return most;
}

namespace {
/* Lanes of 4 bytes go 32 at a time, of 8 bytes 16, of 16 bytes (the rows of a matrix of ldmatrix, too) 8. */
void count_requests(warp &w) {
  if (w.request_count == 0) {
    return;
  }
  for (int i = 0; i < w.request_count; i++) {
    const request &q = w.requests[i];
    const int lanes = q.bytes <= 4 ? LANES : (int)(4 * LANES / q.bytes);
    for (int lane = 0; lane < LANES; lane += lanes) {
      const int found = transactions_of(q, lane, lanes);
      sim.now->transactions += found;
      sim.now->least += found > 0;
    }
  }
  w.request_count = 0;
  memset(w.next_request, 0, sizeof w.next_request);
}
}  // namespace

extern "C" void gradc_sim_atomic(void *at, size_t bytes, void *pc) {
  const launch *l = sim.now;
  if (l->check) {
    if ((uintptr_t)at % bytes) {
      stop(MISALIGNED, party_of(sim.self, pc, UPDATES), {}, (int64_t)(intptr_t)at, (int64_t)bytes, NULL);
    }
    access(at, bytes, UPDATES, pc);
    if (fences.count) {
      fences.at = at;
      fences.block = sim.block;
      fences.thread = sim.self->number;
      fences.time = sim.time++;
    }
    if (sim.self->fenced) {
      release *more = (release *)realloc(fences.all, (size_t)(fences.count + 1) * sizeof(release));
      if (more) { /* else a race is reported that is none */
        fences.all = more;
        more[fences.count++] = {at, sim.block, sim.self->number, sim.barrier_time, sim.self->fenced};
      }
    }
  }
}

extern "C" void gradc_sim_fence(void) { sim.self->fenced = ++sim.time; }

#define SEEN(name, bytes, kind)                                          \
  extern "C" void name(void *at) {                                       \
    const void *const pc = __builtin_return_address(0);                  \
    request_shared(access(at, bytes, kind, pc), at, bytes, pc);          \
  }
#define SEEN_ALL(bytes)                                                                      \
  SEEN(__tsan_read##bytes, bytes, READS) SEEN(__tsan_write##bytes, bytes, WRITES)            \
  SEEN(__tsan_unaligned_read##bytes, bytes, READS) SEEN(__tsan_unaligned_write##bytes, bytes, WRITES)
SEEN_ALL(1) SEEN_ALL(2) SEEN_ALL(4) SEEN_ALL(8) SEEN_ALL(16)
extern "C" {
void __tsan_read_range(void *at, size_t bytes) { access(at, bytes, READS, __builtin_return_address(0)); }
void __tsan_write_range(void *at, size_t bytes) { access(at, bytes, WRITES, __builtin_return_address(0)); }
void __tsan_init(void) {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit(void) {}
/* clang calls these for whole objects */
void *__tsan_memcpy(void *to, const void *from, size_t bytes) {
  access((void *)from, bytes, READS, __builtin_return_address(0));
  access(to, bytes, WRITES, __builtin_return_address(0));
  return memcpy(to, from, bytes);
}
void *__tsan_memset(void *to, int value, size_t bytes) {
  access(to, bytes, WRITES, __builtin_return_address(0));
  return memset(to, value, bytes);
}

/* ---- Undefined behaviour: the first words of what the compiler hands over ----------------------------------------------- */

struct sim_place { const char *file; uint32_t line, column; };
struct sim_type { uint16_t kind, info; char name[1]; };
struct sim_about { sim_place at; const sim_type *type, *other; };
struct sim_mismatch { sim_place at; const sim_type *type; uint8_t log_alignment, what; };

static int64_t operand(const sim_type *type, uintptr_t value) { /* of up to 64 bits */
  const int bits = 1 << (type->info >> 1);
  return type->kind == 0 && (type->info & 1) && bits < 64 ? (int64_t)(value << (64 - bits)) >> (64 - bits) : (int64_t)value;
}
#define REPORT(kind, a, b, text) stop(kind, party_of(sim.self, __builtin_return_address(0), 0), {}, a, b, text)
#define REPORT2(kind, name) \
  void name(sim_about *about, uintptr_t a, uintptr_t b) { REPORT(kind, operand(about->type, a), operand(about->type, b), #name); }
REPORT2(OVERFLOWS, __ubsan_handle_add_overflow)
REPORT2(OVERFLOWS, __ubsan_handle_sub_overflow)
REPORT2(OVERFLOWS, __ubsan_handle_mul_overflow)
REPORT2(DIVISION, __ubsan_handle_divrem_overflow)
void __ubsan_handle_negate_overflow(sim_about *about, uintptr_t a) { REPORT(OVERFLOWS, 0, operand(about->type, a), "sub"); }
void __ubsan_handle_shift_out_of_bounds(sim_about *about, uintptr_t a, uintptr_t b) {
  REPORT(SHIFT, operand(about->type, a), operand(about->other, b), about->type->name);
}
void __ubsan_handle_out_of_bounds(sim_about *about, uintptr_t index) {
  REPORT(LOCAL_BOUNDS, operand(about->other, index), 0, about->type->name);
}
void __ubsan_handle_type_mismatch_v1(sim_mismatch *about, uintptr_t at) {
  if (at & ((1ull << about->log_alignment) - 1)) { /* else it is null, and the access comes yet */
    REPORT(MISALIGNED, (int64_t)at, 1ll << about->log_alignment, about->type->name);
  }
}
/* What a compiler that checks all of it may call. */
void __ubsan_handle_pointer_overflow(sim_place *, uintptr_t, uintptr_t) {} /* the access shows it */
void __ubsan_handle_load_invalid_value(sim_about *about, uintptr_t a) { REPORT(OVERFLOWS, (int64_t)a, 0, about->type->name); }
void __ubsan_handle_builtin_unreachable(sim_place *) { REPORT(TRAP, 0, 0, NULL); }
void __ubsan_handle_float_cast_overflow(void *, uintptr_t) {} /* CUDA says what comes out */
void __ubsan_handle_invalid_builtin(sim_place *) { REPORT(DIVISION, 0, 0, "clz"); }
}

/* ---- A launch and a block ------------------------------------------------------------------------------------------------ */

static int watch(launch *l) {
  l->variables[0].start = sim.dynamic;
  memset(hits, 0, sizeof hits);
  fences.block = -1;
  constants_to = end_of_constants();
  for (int64_t i = 0; l->check && i < l->variable_count + l->region_count; i++) {
    region *r = region_of(l, i);
    if (r->writable) {
      r->cells = (cell *)calloc((size_t)(r->size / r->granule) + 1, sizeof(cell));
      if (!r->cells) {
        return 0;
      }
    }
  }
  return 1;
}

static void unwatch(launch *l) {
  free(fences.all);
  fences.all = NULL;
  fences.count = 0;
  for (int64_t i = 0; i < l->variable_count + l->region_count; i++) {
    free(region_of(l, i)->cells);
    region_of(l, i)->cells = NULL;
  }
}

/* A block finds no values in its shared memory: NaN where nobody looks, a fault where the checking mode does. */
static void clear_shared(void) {
  for (int64_t i = 0; i < sim.now->variable_count; i++) {
    const region *r = &sim.now->variables[i];
    memset(r->start, 0xff, (size_t)r->size);
    if (r->ready) {
      memset(r->ready, 0, (size_t)r->size);
    }
  }
}
