/* What tensor_cores.h calls in cuda-sim: products of fragments and loads of them, for all lanes of a warp at once, and asynchronous copies,
 * whose bytes arrive as late as they may: where their thread waits for their group.
 *
 * In the checking mode a copy is a read and a write of its thread, both where it starts, so that its destination must be nobody's any
 * more, and where it arrives, from when on a barrier makes it known to others.  Between the two its destination has no value, and
 * neither that nor its source may be written. */

namespace {

double element(sim_op op, unsigned bits, int e) {
  switch (op) {
    case SIM_MMA_S8: return (signed char)(bits >> 8 * e);
    case SIM_MMA_TF32: return sim_cast<float>(bits & ~0x1fffu);
    case SIM_MMA_BF16: return sim_cast<float>(bits >> 16 * e << 16);
    default: break;
  }
  const unsigned half = bits >> 16 * e & 0xffff, exponent = half >> 10 & 31, fraction = half & 0x3ff;
  const double size = exponent == 31 ? (fraction ? __builtin_nan("") : __builtin_inf())
                                     : ldexp((double)(exponent ? fraction + 1024 : fraction), (int)(exponent ? exponent : 1) - 25);
  return half >> 15 ? -size : size;
}

/* f64 -> f32, toward zero but for what is beyond f32. */
float toward_zero(double x) {
  float nearest = (float)x;
  if (fabs((double)nearest) > fabs(x) && fabs(x) < 0x1p128) {
    nearest = sim_cast<float>(sim_cast<unsigned>(nearest) - 1);
  }
  return nearest;
}

/* d += a b; a register of a or b has `per` elements. */
void multiply(warp &w, sim_op op) {
  const int per = op == SIM_MMA_S8 ? 4 : op == SIM_MMA_TF32 ? 1 : 2, depth = 8 * per;
  double a[16][32], b[8][32];
  for (int lane = 0; lane < LANES; lane++) {
    const unsigned *given = w.lanes[lane].given;
    const int g = lane / 4, t = lane % 4;
    for (int e = 0; e < per; e++) {
      for (int r = 0; r < 4; r++) {
        a[g + 8 * (r % 2)][per * t + 4 * per * (r / 2) + e] = element(op, given[r], e);
      }
      for (int r = 0; r < 2; r++) {
        b[g][per * t + 4 * per * r + e] = element(op, given[4 + r], e);
      }
    }
  }
  for (int lane = 0; lane < LANES; lane++) {
    for (int i = 0; i < 4; i++) {
      unsigned &d = w.lanes[lane].four.x[i];
      const double *x = a[lane / 4 + 8 * (i / 2)], *y = b[2 * (lane % 4) + i % 2];
      double sum = op == SIM_MMA_S8 ? (double)(int)d : sim_cast<float>(d);
      for (int k = 0; k < depth; k++) {
        sum += x[k] * y[k];
      }
      d = op == SIM_MMA_S8 ? (unsigned)(int64_t)sum : sim_cast<unsigned>(toward_zero(sum));
    }
  }
}

/* Row i of matrix j is where lane 8j + i points to. */
void load_matrices(warp &w) {
  for (int lane = 0; lane < LANES; lane++) {
    thread &t = w.lanes[lane];
    for (unsigned j = 0; j < t.given[0]; j++) {
      for (int e = 0; e < 2; e++) {
        const int row = t.given[1] ? 2 * (lane % 4) + e : lane / 4, column = t.given[1] ? lane / 4 : 2 * (lane % 4) + e;
        memcpy((char *)&t.four.x[j] + 2 * e, (const char *)w.lanes[8 * j + (unsigned)row].value + 2 * column, 2);
      }
    }
  }
}

void exchange_fragments(warp &w, sim_op op) {
  if (op == SIM_LDMATRIX) {
    load_matrices(w);
  } else {
    multiply(w, op);
  }
}

/* An access that an instruction makes only to one kind of memory, at a multiple of its bytes. */
region *access_in(int shared, void *at, size_t bytes, size_t multiple, int64_t kind, const void *pc) {
  const region *r = region_at((char *)at, bytes, pc);
  if (r && (number_of(r) < 0) != shared) {
    stop_at(WRONG_MEMORY, (char *)at, bytes, party_of(sim.self, pc, kind), {});
  }
  if ((uintptr_t)at % multiple) {
    stop(MISALIGNED, party_of(sim.self, pc, kind), {}, (int64_t)(intptr_t)at, (int64_t)multiple, NULL);
  }
  if (!r) { /* a thread's own memory neither */
    stop_at(OUT_OF_BOUNDS, (char *)at, bytes, party_of(sim.self, pc, kind), {});
  }
  return access(at, bytes, kind, pc);
}

/* What a copy does in the checking mode where it starts and where it arrives. */
void access_copied(const copy &c) {
  if ((uintptr_t)c.from % (uintptr_t)c.bytes) { /* also where nothing of it is read */
    stop(MISALIGNED, party_of(sim.self, c.pc, READS), {}, (int64_t)(intptr_t)c.from, c.bytes, NULL);
  }
  if (c.valid) {
    access_in(0, (void *)c.from, (size_t)c.valid, (size_t)c.bytes, READS, c.pc);
  }
  access_in(1, c.to, (size_t)c.bytes, (size_t)c.bytes, WRITES, c.pc);
}

/* Of the destination's bytes, whether they have a value. */
void mark(const copy &c, int mark) {
  const region *r = region_at(c.to, (size_t)c.bytes, c.pc);
  memset(r->ready + (c.to - r->start), mark, (size_t)c.bytes);
}

}  // namespace

extern "C" sim_four gradc_sim_mma(sim_op op, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1, sim_four d, int line) {
  thread *self = sim.self;
  const unsigned given[] = {a0, a1, a2, a3, b0, b1};
  memcpy(self->given, given, sizeof given);
  self->four = d;
  meet(op, 0xffffffffu, line, __builtin_return_address(0));
  return self->four;
}

extern "C" sim_four gradc_sim_ldmatrix(int count, bool transposed, const void *row, int line) {
  thread *self = sim.self;
  const void *pc = __builtin_return_address(0);
  self->value = (uint64_t)(uintptr_t)row;
  self->given[0] = (unsigned)count;
  self->given[1] = transposed;
  if (sim.now->check && self->number % LANES < 8 * count) {
    request_shared(access_in(1, (void *)row, 16, 16, READS, pc), (void *)row, 16, pc);
  }
  meet(SIM_LDMATRIX, 0xffffffffu, line, pc);
  return self->four;
}

extern "C" void gradc_sim_copy(void *to, const void *from, int bytes, int valid) {
  thread *self = sim.self;
  const copy made = {(char *)to, (const char *)from, bytes, valid, self->groups, __builtin_return_address(0)};
  if (valid < 0 || valid > bytes) {
    stop(COPY_SIZE, party_of(self, made.pc, WRITES), {}, valid, bytes, NULL);
  }
  if (self->copy_count == self->copy_room) {
    const int room = 2 * self->copy_room + 16;
    copy *more = (copy *)realloc(self->copies, (size_t)room * sizeof(copy));
    if (!more) {
      stop(NO_MEMORY, party_of(self, made.pc, WRITES), {}, 0, 0, NULL);
    }
    self->copies = more;
    self->copy_room = room;
  }
  if (sim.now->check) {
    access_copied(made);
    request_shared(region_at(made.to, (size_t)bytes, made.pc), to, (size_t)bytes, made.pc);
    mark(made, IN_COPY);
  }
  self->copies[self->copy_count++] = made;
  sim.copies++;
}

extern "C" void gradc_sim_commit(void) { sim.self->groups++; }

extern "C" void gradc_sim_wait(int groups) {
  thread *self = sim.self;
  int kept = 0, arrived = 0;
  while (arrived < self->copy_count && self->copies[arrived].group < self->groups - groups) {
    arrived++;
  }
  sim.copies -= arrived;
  const int count = self->copy_count;
  self->copy_count = 0; /* those that arrive are not in flight any more; none of them overlaps one that is */
  for (int i = 0; i < arrived; i++) {
    const copy &c = self->copies[i];
    if (sim.now->check) {
      mark(c, 0);
      access_copied(c);
    }
    memcpy(c.to, c.from, (size_t)c.valid);
    memset(c.to + c.valid, 0, (size_t)(c.bytes - c.valid));
  }
  for (int i = arrived; i < count; i++) {
    self->copies[kept++] = self->copies[i];
  }
  self->copy_count = kept;
}
