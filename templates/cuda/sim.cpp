/* Runs CUDA kernels on the CPU: a fiber for each thread of a block, one block after another.
 *
 * A thread runs until it must wait (a barrier, a collective) or returns; then the next one that can run goes on, the
 * same warp first.  A thread that nobody waits for costs no switch: its fiber takes the next one.  Where nothing can run
 * and not all have returned, somebody waits for what will not come: a fault.  A fault leaves the fibers where they are
 * and goes back to the caller, so the launch ends and the process does not. */
#define GRADC_SIM_RUNTIME 1
#include "sim.h"

#include <link.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#if (!defined(__x86_64__) && !defined(__aarch64__)) || defined(__APPLE__) || defined(GRADC_SIM_UCONTEXT)
#undef GRADC_SIM_UCONTEXT
#define GRADC_SIM_UCONTEXT 1
#include <ucontext.h>
#endif

#define SIM_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum { LANES = 32, MAX_THREADS = 1024, MAX_SHARED = 227 * 1024, STACK = 128 * 1024, GUARD = 4096 * 4, PARAMETERS = 2 * 4096, MAX_PARAMETERS = 256 };

/* ---- What Python sees (cudasim.py mirrors these) -------------------------------------------------------------------- */

enum fault_kind { NO_FAULT, OUT_OF_BOUNDS, READ_ONLY, UNINITIALISED, RACE, MISALIGNED, OVERFLOWS, SHIFT, DIVISION, LOCAL_BOUNDS,
                  BARRIER_DIVERGES, BARRIER_SKIPPED, NOT_IN_MASK, MISSING_LANE, FOREIGN_LANE, TRAP, TOO_LARGE, NO_MEMORY,
                  IN_FLIGHT, WRONG_MEMORY, COPY_SIZE };
enum doing { READS = 1, WRITES = 2, UPDATES = 3, /* an atomic */ RETURNED, ABSENT, AT_BARRIER, AT_COLLECTIVE };

struct party {
  int64_t block, thread; /* flat */
  const void *pc;
  int64_t doing;
};

struct fault {
  int64_t kind;
  party who, other;
  int64_t region, offset, size; /* of the access; region -1: none of them is near */
  int64_t a, b;                 /* operands, a mask, an alignment... */
  const char *text;             /* an operator or a type */
};

struct cell { /* see sim_check.h */
  uint64_t write, seen[2];
  uint32_t write_pc, seen_pc[2]; /* distances from the start of the library */
};

struct region {
  char *start;
  int64_t size, granule; /* races are kept for each granule bytes, a power of two */
  int64_t writable;
  uint8_t *ready; /* for each byte whether it has a value; NULL: all have */
  cell *cells;
};

struct launch {
  void (*call)(void **);
  void **arguments;
  uint32_t grid[3], block[3];
  int64_t shared, parameters;
  const int64_t *parameter_sizes;
  int64_t check, shuffle;
  uint64_t seed;
  region *regions; /* of global memory */
  int64_t region_count;
  region *variables; /* of shared memory: the dynamic one, whose address is ours to say, then those that the text declares */
  int64_t variable_count;
  int64_t next; /* block, in the order of this launch */
  int64_t counts; /* whether the next two are counted, in the checking mode */
  int64_t transactions, least; /* of shared memory: those of its accesses, and what they were without conflicts of banks */
  char *stacks;                /* of a launch before, or NULL: for MAX_THREADS */
  int64_t guarded;             /* how many of them have their page that nobody may touch */
  fault found;
};

/* ---- Threads, warps, the block that runs ---------------------------------------------------------------------------- */

struct fiber {
  void *stack_pointer;
};

struct copy { /* an asynchronous one; its bytes arrive where its thread waits for its group */
  char *to;
  const char *from;
  int bytes, valid;
  int64_t group;
  const void *pc;
};

enum thread_state { RUNNABLE, IN_BARRIER, IN_COLLECTIVE, HAS_RETURNED };

struct thread {
  fiber *on; /* NULL: not started */
  uint3 index;
  int number; /* flat, in the block */
  thread_state state;
  /* What it waits in: */
  sim_op op;
  unsigned mask;
  int line, other, width;
  uint64_t value;
  const void *pc;
  unsigned given[6]; /* registers of a and b, or what to load */
  sim_four four;     /* registers of d, or loaded ones */
  copy *copies;      /* in flight, in their order; the array outlives the thread */
  int copy_count, copy_room;
  int64_t groups; /* that it has committed */
  uint64_t fenced; /* the time of its last __threadfence, 0: none */
};

struct request { /* an access to shared memory that lanes of a warp make together */
  const void *pc;
  size_t bytes;
  unsigned lanes;
  uintptr_t at[LANES];
};

struct warp {
  thread lanes[LANES];
  unsigned exist, runnable, waiting, returned; /* sets of lanes; waiting: in a collective */
  request *requests;                           /* since it last synchronised; the array outlives the block */
  int request_count, request_room, next_request[LANES];
  uint64_t known[LANES][LANES];                /* [a][b]: what lane b did before this time, lane a sees */
};

struct {
  launch *now;
  thread *self;
  warp *warps;
  fiber *fibers, *idle[MAX_THREADS];
  void *host; /* the caller's stack pointer */
  char *dynamic;
  char parameters[PARAMETERS];
  void *arguments[MAX_PARAMETERS];
  int idle_count, warp_count, threads, returned, at_barrier;
  int order[MAX_THREADS / LANES], at; /* of warps; where we are in it */
  int barrier_line, barrier_sum, barrier_result;
  const void *barrier_pc;
  int copies; /* in flight */
  int64_t block;
  uint3 block_index;
  uint64_t time, barrier_time; /* grows with every synchronisation; that of the block's last barrier */
  uint64_t random;
} sim;

uint64_t draw(void) { /* splitmix64 */
  uint64_t x = sim.random += 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

warp &warp_of(const thread *t) { return sim.warps[t->number / LANES]; }
unsigned bit_of(const thread *t) { return 1u << t->number % LANES; }

/* ---- The switch: callee-saved registers on the old stack, the stack pointer exchanged -------------------------------- */

void thread_main(void);

#if defined(GRADC_SIM_UCONTEXT)
void gradc_sim_switch(void **from, void *to) {
  ucontext_t here;
  *from = &here;
  swapcontext(&here, (ucontext_t *)to);
}
void *first_frame(char *stack) {
  ucontext_t *context = (ucontext_t *)(stack + STACK) - 1;
  getcontext(context);
  context->uc_stack.ss_sp = stack + GUARD;
  context->uc_stack.ss_size = (size_t)((char *)context - (stack + GUARD)) & ~(size_t)63;
  context->uc_link = NULL;
  makecontext(context, thread_main, 0);
  return context;
}
#else
extern "C" void gradc_sim_switch(void **from, void *to) __attribute__((visibility("hidden")));
#if defined(__x86_64__)
__asm__(".text\n.p2align 4\n.globl gradc_sim_switch\n.hidden gradc_sim_switch\n.type gradc_sim_switch,@function\n"
        "gradc_sim_switch:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
        "  ret\n.size gradc_sim_switch, .-gradc_sim_switch\n");
enum { SAVED = 8, RETURN_AT = 6 }; /* words of a frame, and which of them is where it goes on; entered as by a call */
#else
__asm__(".text\n.p2align 4\n.globl gradc_sim_switch\n.hidden gradc_sim_switch\n.type gradc_sim_switch,%function\n"
        "gradc_sim_switch:\n"
        "  sub sp, sp, #160\n"
        "  stp x19, x20, [sp]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
        "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
        "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
        "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
        "  ldp x19, x20, [sp]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
        "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
        "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
        "  add sp, sp, #160\n"
        "  ret\n.size gradc_sim_switch, .-gradc_sim_switch\n");
enum { SAVED = 20, RETURN_AT = 11 };
#endif
void *first_frame(char *stack) {
  void **frame = (void **)(stack + STACK) - SAVED;
  memset(frame, 0, SAVED * sizeof *frame);
  frame[RETURN_AT] = (void *)thread_main;
  return frame;
}
#endif

/* ---- Scheduling ------------------------------------------------------------------------------------------------------ */

/* Back to the caller of the launch.  The fibers stay where they are: after a block at the head of their loop, for the
 * next one; after a fault in the middle of the kernel, never to go on. */
void leave(void) { gradc_sim_switch(&sim.self->on->stack_pointer, sim.host); }

party party_of(const thread *t, const void *pc, int64_t doing) { return {sim.block, t->number, pc, doing}; }

__attribute__((noreturn)) void stop(fault_kind kind, party who, party other, int64_t a, int64_t b, const char *text) {
  fault &f = sim.now->found;
  f.kind = kind;
  f.who = who;
  f.other = other;
  f.a = a;
  f.b = b;
  f.text = text;
  leave();
  __builtin_unreachable();
}

thread *pick(void) {
  for (int tried = 0; tried < sim.warp_count; tried++) {
    warp &w = sim.warps[sim.order[sim.at]];
    if (w.runnable) {
      const int turn = sim.now->shuffle ? (int)(draw() % LANES) : 0;
      const unsigned turned = turn ? w.runnable >> turn | w.runnable << (LANES - turn) : w.runnable;
      const int lane = (__builtin_ctz(turned) + turn) % LANES;
      w.runnable &= ~(1u << lane);
      return &w.lanes[lane];
    }
    sim.at = sim.at + 1 < sim.warp_count ? sim.at + 1 : 0;
  }
  return NULL;
}

void order_warps(void) {
  for (int i = 0; i < sim.warp_count; i++) {
    const int j = sim.now->shuffle ? (int)(draw() % (uint64_t)(i + 1)) : i;
    sim.order[i] = sim.order[j];
    sim.order[j] = i;
  }
  sim.at = 0;
}

int of_a_warp(sim_op op) { return op >= SIM_MMA_BF16; }

/* Whether two threads that wait in a collective wait for each other: in loads of matrices, of as many. */
int same_collective(const thread &a, const thread &b) {
  return a.op == b.op && a.mask == b.mask && a.line == b.line && (a.op != SIM_LDMATRIX || (a.given[0] == b.given[0] && a.given[1] == b.given[1]));
}

int collective_is_complete(const warp &w, const thread &t) {
  const unsigned returned = sim.now->check || of_a_warp(t.op) ? 0 : w.returned | ~w.exist; /* a GPU does not wait for them either */
  const unsigned wanted = t.mask & ~returned;
  if ((w.waiting & wanted) != wanted) {
    return 0;
  }
  for (unsigned rest = wanted; rest; rest &= rest - 1) {
    const thread &other = w.lanes[__builtin_ctz(rest)];
    if (!same_collective(other, t)) {
      return 0;
    }
  }
  return 1;
}

/* Nobody can run and somebody has not returned: say who waits for whom. */
__attribute__((noreturn)) void deadlock(void) {
  const thread *returned = NULL, *in_barrier = NULL;
  for (int i = 0; i < sim.threads; i++) {
    warp &w = sim.warps[i / LANES];
    const thread &t = w.lanes[i % LANES];
    if (t.state == IN_COLLECTIVE) {
      for (unsigned rest = t.mask; rest; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        const thread &other = w.lanes[lane];
        const party it = {sim.block, i / LANES * LANES + lane, other.pc,
                          !(w.exist >> lane & 1)            ? ABSENT
                          : other.state == HAS_RETURNED     ? RETURNED
                          : other.state == IN_BARRIER       ? AT_BARRIER
                                                            : AT_COLLECTIVE};
        if (it.doing != AT_COLLECTIVE || !same_collective(other, t)) {
          stop(MISSING_LANE, party_of(&t, t.pc, AT_COLLECTIVE), it, t.mask, lane, NULL);
        }
      }
    }
    returned = !returned && t.state == HAS_RETURNED ? &t : returned;
    in_barrier = !in_barrier && t.state == IN_BARRIER ? &t : in_barrier;
  }
  stop(BARRIER_SKIPPED, party_of(in_barrier, in_barrier->pc, AT_BARRIER), party_of(returned, NULL, RETURNED), 0, 0, NULL);
}

void go_to(thread *next) {
  fiber *mine = sim.self->on;
  if (!next->on) {
    next->on = sim.idle[--sim.idle_count];
  }
  sim.self = next;
  if (next->on != mine) {
    gradc_sim_switch(&mine->stack_pointer, next->on->stack_pointer);
  }
}

void wait(void) {
  thread *next = pick();
  if (!next) {
    deadlock();
  }
  go_to(next);
}

void count_requests(warp &w);

void finish_barrier(void) {
  for (int i = 0; i < sim.warp_count; i++) {
    warp &w = sim.warps[i];
    count_requests(w);
    for (unsigned rest = w.exist & ~w.returned; rest; rest &= rest - 1) {
      w.lanes[__builtin_ctz(rest)].state = RUNNABLE;
    }
    w.runnable = w.exist & ~w.returned;
  }
  sim.barrier_result = sim.barrier_sum;
  sim.at_barrier = sim.barrier_sum = 0;
  sim.barrier_time = ++sim.time;
  order_warps();
}

void finish_collective(warp &w, const thread &last);

/* On a fresh fiber: run the threads that come to it until the block is done. */
void thread_main(void) {
  for (;;) {
    thread *self = sim.self;
    sim.now->call(sim.arguments);
    self = sim.self;
    warp &w = warp_of(self);
    self->state = HAS_RETURNED;
    w.returned |= bit_of(self);
    sim.returned++;
    if (!sim.now->check) { /* a GPU counts who has returned as arrived */
      if (sim.at_barrier && sim.at_barrier + sim.returned == sim.threads) {
        finish_barrier();
      }
      for (unsigned rest = w.waiting; rest; rest &= rest - 1) {
        thread &t = w.lanes[__builtin_ctz(rest)];
        if (w.waiting & bit_of(&t) && collective_is_complete(w, t)) {
          finish_collective(w, t);
        }
      }
    }
    thread *next = pick();
    if (!next) {
      if (sim.returned < sim.threads) {
        deadlock();
      }
      sim.idle[sim.idle_count++] = self->on;
      leave();
    } else {
      if (next->on) {
        sim.idle[sim.idle_count++] = self->on;
      } else {
        next->on = self->on;
      }
      go_to(next);
    }
  }
}

/* ---- Barriers and collectives ---------------------------------------------------------------------------------------- */

void exchange_values(warp &w, const thread &last, unsigned lanes) {
  uint64_t results[LANES] = {0};
  uint64_t all = 0;
  const sim_op op = last.op;
  int first = 1;
  for (unsigned rest = lanes; rest; rest &= rest - 1) { /* what is the same for all */
    const int lane = __builtin_ctz(rest);
    const uint64_t value = w.lanes[lane].value;
    const int a = (int)all, b = (int)value;
    switch (op) {
      case SIM_BALLOT: all |= (value != 0) * (1ull << lane); break;
      case SIM_ANY: case SIM_OR: all |= value; break;
      case SIM_ALL: case SIM_AND: all = first ? value : all & value; break;
      case SIM_XOR: all ^= value; break;
      case SIM_ADD: all += value; break;
      case SIM_MIN: all = first || b < a ? value : all; break;
      case SIM_MAX: all = first || b > a ? value : all; break;
      case SIM_UMIN: all = first || (unsigned)b < (unsigned)a ? value : all; break;
      case SIM_UMAX: all = first || (unsigned)b > (unsigned)a ? value : all; break;
      default: break;
    }
    first = 0;
  }
  for (unsigned rest = lanes; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    const thread &t = w.lanes[lane];
    const int width = t.width, base = lane & ~(width - 1);
    int from = lane;
    results[lane] = all;
    switch (op) {
      case SIM_SHFL: from = base + (t.other & (width - 1)); break;
      case SIM_SHFL_UP: from = lane - t.other < base ? lane : lane - t.other; break;
      case SIM_SHFL_DOWN: from = (lane & (width - 1)) + t.other >= width ? lane : lane + t.other; break;
      case SIM_SHFL_XOR: from = (lane ^ t.other) >= base + width ? lane : lane ^ t.other; break;
      case SIM_MATCH_ANY:
        results[lane] = 0;
        for (unsigned others = lanes; others; others &= others - 1) {
          const int other = __builtin_ctz(others);
          results[lane] |= (uint64_t)(w.lanes[other].value == t.value) << other;
        }
        break;
      default: break;
    }
    if (op >= SIM_SHFL && op <= SIM_SHFL_XOR) {
      if (sim.now->check && !(lanes >> from & 1)) {
        stop(FOREIGN_LANE, party_of(&t, t.pc, AT_COLLECTIVE), {sim.block, t.number - lane + from, NULL, ABSENT}, t.mask, from, NULL);
      }
      results[lane] = w.lanes[from].value;
    }
  }
  if (sim.now->check && op == SIM_SYNCWARP) { /* the only one that orders memory: what one of them sees, all do */
    uint64_t seen[LANES] = {0};
    sim.time++;
    for (int other = 0; other < LANES; other++) {
      for (unsigned rest = lanes; rest; rest &= rest - 1) {
        const uint64_t known = w.known[__builtin_ctz(rest)][other];
        seen[other] = known > seen[other] ? known : seen[other];
      }
      seen[other] = lanes >> other & 1 ? sim.time : seen[other];
    }
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
      memcpy(w.known[__builtin_ctz(rest)], seen, sizeof seen);
    }
  }
  for (unsigned rest = lanes; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    w.lanes[lane].value = results[lane];
  }
}

void exchange_fragments(warp &w, sim_op op);

void finish_collective(warp &w, const thread &last) {
  const unsigned lanes = last.mask & w.waiting;
  count_requests(w);
  if (of_a_warp(last.op)) {
    exchange_fragments(w, last.op);
  } else {
    exchange_values(w, last, lanes);
  }
  for (unsigned rest = lanes; rest; rest &= rest - 1) {
    w.lanes[__builtin_ctz(rest)].state = RUNNABLE;
  }
  w.waiting &= ~lanes;
  w.runnable |= lanes;
}

/* Waits for all lanes of a mask: at the same line, where one is said. */
inline __attribute__((always_inline)) void meet(sim_op op, unsigned mask, int line, const void *pc) {
  thread *self = sim.self;
  warp &w = warp_of(self);
  self->pc = pc;
  self->op = op;
  self->mask = mask;
  self->line = line;
  if (!(mask & bit_of(self))) {
    stop(NOT_IN_MASK, party_of(self, pc, AT_COLLECTIVE), {}, mask, self->number % LANES, NULL);
  }
  self->state = IN_COLLECTIVE;
  w.waiting |= bit_of(self);
  if (collective_is_complete(w, *self)) {
    finish_collective(w, *self);
    w.runnable &= ~bit_of(self); /* it runs already */
  } else {
    wait();
  }
}

}  // namespace

extern "C" uint64_t gradc_sim_warp(sim_op op, unsigned mask, uint64_t value, int other, int width) {
  thread *self = sim.self;
  self->value = value;
  self->other = other;
  self->width = width;
  meet(op, mask, 0, __builtin_return_address(0));
  return self->value;
}

extern "C" int gradc_sim_barrier(sim_op op, int value, int line) {
  thread *self = sim.self;
  self->pc = __builtin_return_address(0);
  self->line = line;
  if (sim.at_barrier == 0) {
    sim.barrier_line = line;
    sim.barrier_pc = self->pc;
    sim.barrier_sum = op == SIM_AND;
  } else if (sim.now->check && line != sim.barrier_line) {
    for (int i = 0; i < sim.threads; i++) {
      const thread &t = sim.warps[i / LANES].lanes[i % LANES];
      if (t.state == IN_BARRIER) {
        stop(BARRIER_DIVERGES, party_of(self, self->pc, AT_BARRIER), party_of(&t, t.pc, AT_BARRIER), line, t.line, NULL);
      }
    }
  }
  sim.barrier_sum = op == SIM_AND ? sim.barrier_sum & value : op == SIM_OR ? sim.barrier_sum | value : sim.barrier_sum + value;
  self->state = IN_BARRIER;
  if (++sim.at_barrier + (sim.now->check ? 0 : sim.returned) == sim.threads) {
    finish_barrier();
    warp_of(self).runnable &= ~bit_of(self);
    self->state = RUNNABLE;
  } else {
    wait();
  }
  return sim.barrier_result;
}

extern "C" uint3 gradc_sim_thread(void) { return sim.self->index; }
extern "C" uint3 gradc_sim_block(void) { return sim.block_index; }
extern "C" uint3 gradc_sim_block_dim(void) { return {sim.now->block[0], sim.now->block[1], sim.now->block[2]}; }
extern "C" uint3 gradc_sim_grid_dim(void) { return {sim.now->grid[0], sim.now->grid[1], sim.now->grid[2]}; }
extern "C" void *gradc_sim_dynamic(void) { return sim.dynamic; }
extern "C" unsigned gradc_sim_active(void) { return warp_of(sim.self).exist & ~warp_of(sim.self).returned; }
extern "C" void gradc_sim_trap(void) { stop(TRAP, party_of(sim.self, __builtin_return_address(0), 0), {}, 0, 0, NULL); }

#include "sim_check.h"
#include "sim_tensor_cores.h"

/* ---- A launch --------------------------------------------------------------------------------------------------------- */

static void *reserve(size_t bytes) {
  void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? NULL : memory;
}

/* Memory for this many threads and for shared memory.  A stack that overflows meets a page that nobody may touch: two
 * mappings for each, of which a process has 65530, so that the caller hands the stacks on to launches of other libraries. */
static int have_room(launch &l) {
  const int threads = (int)(l.block[0] * l.block[1] * l.block[2]);
  if (!sim.dynamic) {
    char *memory = (char *)reserve(MAX_SHARED + 2 * SHARED_GAP);
    sim.fibers = (fiber *)calloc(MAX_THREADS, sizeof(fiber));
    sim.warps = (warp *)reserve(sizeof(warp) * (MAX_THREADS / LANES));
    if (!memory || !sim.fibers || !sim.warps) {
      return 0;
    }
    sim.dynamic = memory + SHARED_GAP;
  }
  if (!l.stacks) {
    l.stacks = (char *)reserve((size_t)STACK * MAX_THREADS);
    if (!l.stacks) {
      return 0;
    }
  }
  stacks_from = l.stacks;
  stacks_to = l.stacks + (size_t)STACK * MAX_THREADS;
  for (; l.guarded < threads; l.guarded++) {
    if (mprotect(l.stacks + (size_t)STACK * l.guarded, GUARD, PROT_NONE)) {
      return 0;
    }
  }
  sim.idle_count = 0;
  for (int i = threads; i-- > 0;) {
    sim.idle[sim.idle_count++] = &sim.fibers[i];
    sim.fibers[i].stack_pointer = first_frame(l.stacks + (size_t)STACK * i);
  }
  return 1;
}

static void run_block(int64_t block) {
  const launch &l = *sim.now;
  const int64_t x = block % l.grid[0], y = block / l.grid[0] % l.grid[1], z = block / l.grid[0] / l.grid[1];
  sim.block = block;
  sim.block_index = {(unsigned)x, (unsigned)y, (unsigned)z};
  sim.threads = (int)(l.block[0] * l.block[1] * l.block[2]);
  sim.warp_count = (sim.threads + LANES - 1) / LANES;
  sim.returned = sim.at_barrier = sim.copies = 0;
  sim.barrier_time = ++sim.time;
  uint3 index = {0, 0, 0};
  for (int i = 0; i < sim.threads; i++) {
    warp &w = sim.warps[i / LANES];
    if (i % LANES == 0) {
      w.exist = w.waiting = w.returned = 0;
      if (l.check) {
        memset(w.known, 0, sizeof w.known);
      }
    }
    thread &t = w.lanes[i % LANES];
    t.on = NULL;
    t.index = index;
    t.number = i;
    t.state = RUNNABLE;
    t.fenced = 0;
    t.copy_count = 0;
    t.groups = 0;
    w.exist |= bit_of(&t);
    w.runnable = w.exist;
    if (++index.x == l.block[0]) {
      index.x = 0;
      if (++index.y == l.block[1]) {
        index.y = 0;
        index.z++;
      }
    }
  }
  clear_shared();
  order_warps();
  sim.self = pick();
  sim.self->on = sim.idle[--sim.idle_count];
  gradc_sim_switch(&sim.host, sim.self->on->stack_pointer);
  for (int i = 0; i < sim.warp_count; i++) {
    count_requests(sim.warps[i]);
  }
}

/* Run blocks for some milliseconds: 1 when all have run, 0 to be called again, -1 with a fault in `found`. */
SIM_EXPORT int gradc_sim_run(launch *l, int64_t milliseconds) {
  const int64_t blocks = (int64_t)l->grid[0] * l->grid[1] * l->grid[2];
  sim.now = l;
  if (l->next == 0) {
    char *to = sim.parameters;
    if (!have_room(*l) || !watch(l)) {
      l->found.kind = NO_MEMORY;
      return -1;
    }
    for (int i = 0; i < l->parameters; i++) { /* each on a place of 16 bytes; Python has counted them */
      memcpy(to, l->arguments[i], (size_t)l->parameter_sizes[i]);
      sim.arguments[i] = to;
      to += (l->parameter_sizes[i] + 15) / 16 * 16;
    }
    sim.random = l->seed;
    sim.time = 0;
  }
  /* With a seed, block i is step * i + first: each once, as step has no factor in common with their number. */
  uint64_t step = 1, first = 0;
  if (l->shuffle) {
    sim.random = l->seed;
    first = draw() % (uint64_t)blocks;
    uint64_t a, b;
    do {
      step = draw() % (uint64_t)blocks;
      for (a = (uint64_t)blocks, b = step; b;) {
        const uint64_t rest = a % b;
        a = b;
        b = rest;
      }
    } while (a != 1);
    sim.random += (uint64_t)l->next;
  }
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  const int64_t end = t.tv_sec * 1000 + t.tv_nsec / 1000000 + milliseconds;
  int64_t now = end - milliseconds;
  while (l->next < blocks && now < end) {
    run_block((int64_t)(((unsigned __int128)step * (uint64_t)l->next + first) % (uint64_t)blocks));
    if (l->found.kind) {
      return -1;
    }
    l->next++;
    clock_gettime(CLOCK_MONOTONIC, &t);
    now = t.tv_sec * 1000 + t.tv_nsec / 1000000;
  }
  return l->next == blocks;
}

/* Give back what a launch holds, whatever became of it; its stacks stay the caller's. */
SIM_EXPORT void gradc_sim_end(launch *l) { unwatch(l); }

/* What addresses in `found` are counted from. */
SIM_EXPORT const char *gradc_sim_base(void) { return __ehdr_start; }
