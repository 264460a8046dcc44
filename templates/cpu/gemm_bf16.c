/* Blocks of a matrix product of bf16 with sums in f32, by the processor's tiles of 16 rows of 64 bytes (AMX) or by vectors of
 * pairs of steps (AVX512-BF16).  What gemm.h says of bits holds here too: they depend on an element's row of A, its column of B
 * and its k alone.  The product of two bf16 is exact in f32, and every addition rounds to nearest even.
 *
 * TDPBF16PS adds, in each 32 steps, the products of even and of odd steps in a sum each, and their sum to the tile's; BF16_KC
 * steps are one chain.  VDPBF16PS adds to a sum the product of the odd step of a pair, then that of the even one; chains are
 * runs as in gemm.h.  Both read subnormals as 0 and write 0 for them: a product one of whose operands has any is left to the
 * kernels of f32, so that what is lost lies below 2^-126 in each addition.
 * (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS and VDPBF16PS.) */

#include "gemm_words.h"

#if defined(__AMX_BF16__) && defined(__linux__) && defined(__x86_64__) && GEMM_BYTES == 64
#define BF16_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__AVX512BF16__) && GEMM_BYTES == 64
#define BF16_PAIRS 1
#endif

#if defined(BF16_TILES) || defined(BF16_PAIRS)

enum { BF16_PANEL = 32, BF16_STEPS = 32, BF16_KC = 1024 };

/* to[p * width + i] = two steps, 2 p and 2 p + 1, of row i < width, whose rows lie side by side. */
static inline __attribute__((always_inline)) void bf16_pairs(uint32_t *restrict to, const uint16_t *restrict from, int64_t along, const int width) {
  for (int p = 0; p < BF16_STEPS / 2; p++) {
    const uint16_t *restrict even = from + 2 * p * along, *restrict odd = even + along;
#pragma omp simd
    for (int i = 0; i < width; i++) {
      to[p * width + i] = (uint32_t)even[i] | (uint32_t)odd[i] << 16;
    }
  }
}

/* A block of `width` rows and 32 steps, filled up with zeros: [row][step], or [step / 2][row][step % 2] if paired. */
static inline __attribute__((always_inline)) void bf16_pack_block(uint16_t *to, const uint16_t *from, int64_t across, int64_t along, int64_t rows, int64_t steps, const int width,
                                                                  const int paired) {
  uint16_t whole_block[BF16_PANEL * BF16_STEPS];
  uint32_t pairs[BF16_PANEL * BF16_STEPS / 2];
  if (rows < width || steps < BF16_STEPS || (across != 1 && along != 1)) {
    memset(whole_block, 0, sizeof whole_block);
    if (across == 1) {
      for (int64_t p = 0; p < steps; p++) {
        memcpy(whole_block + p * width, from + p * along, (size_t)rows * 2);
      }
      along = width;
    } else {
      for (int64_t i = 0; i < rows; i++) {
        for (int64_t p = 0; p < steps; p++) {
          whole_block[i * BF16_STEPS + p] = from[i * across + p * along];
        }
      }
      across = BF16_STEPS, along = 1;
    }
    from = whole_block;
  }
  if (along != 1) {
    uint32_t *const found = paired ? (uint32_t *)to : pairs;
    bf16_pairs(found, from, along, width);
    for (int i = 0; !paired && i < width; i += 16) {
      turn_words((uint32_t *)to + i * 16, 16, pairs + i, 4 * width, 16);
    }
  } else if (paired) {
#pragma GCC unroll 2
    for (int i = 0; i < width; i += 16) {
      turn_words((uint32_t *)to + i, width, from + i * across, 2 * across, width - i < 16 ? width - i : 16);
    }
  } else {
    for (int i = 0; i < width; i++) {
      memcpy(to + i * BF16_STEPS, from + i * across, 64);
    }
  }
}

typedef uint16_t bf16_vec __attribute__((vector_size(64), aligned(2)));

/* Lanes of `found` that are not 0: there is a subnormal among the elements, or was. */
static inline __attribute__((always_inline)) bf16_vec bf16_subnormals(bf16_vec found, const uint16_t *from, const int count) {
#pragma GCC unroll 4
  for (int i = 0; i < count; i += 32) {
    found |= (bf16_vec)(((*(const bf16_vec *)(from + i) & 0x7fff) - 1) < 0x7f); /* 0 becomes the largest */
  }
  return found;
}

/* Panels of `width` rows, [panel][steps / 32] of blocks; whether there is a subnormal among them. */
static inline __attribute__((always_inline)) int bf16_pack(void *to, const void *from, int64_t at, int64_t count, int64_t steps, int64_t across, int64_t along, const int width,
                                                           const int paired) {
  const int64_t filled = whole(steps, BF16_STEPS), first = across == 1 ? steps : count, second = across == 1 ? count : steps;
  const int first_some = across == 1 ? BF16_STEPS : width, second_some = across == 1 ? width : BF16_STEPS;
  bf16_vec found = {0};
  const uint16_t *before = NULL;
  for (int64_t x = 0; x < first; x += first_some) {
    for (int64_t y = 0; y < second; y += second_some) { /* along what lies together */
      const int64_t i = across == 1 ? y : x, p = across == 1 ? x : y;
      uint16_t *block = (uint16_t *)to + (at + i) * filled + p * width;
      bf16_pack_block(block, (const uint16_t *)from + (at + i) * across + p * along, across, along, at_most(count - i, width), at_most(steps - p, BF16_STEPS), width, paired);
      found = bf16_subnormals(found, before ? before : block, width * BF16_STEPS);
      before = block; /* what has just been stored is not there yet */
    }
  }
  found = before ? bf16_subnormals(found, before, width * BF16_STEPS) : found;
  int subnormal = 0;
  for (int i = 0; i < 32; i++) {
    subnormal |= found[i];
  }
  return subnormal;
}

/* A type's `name`: panels of an operand whose rows and steps are so far apart. */
#define BF16_PACK(name, across, along, width, paired)                                                                            \
  static int name(void *to, const gradc_matrix *in, int64_t at_row, int64_t at_col, int64_t at, int64_t count, int64_t steps) {  \
    (void)at_row, (void)at_col;                                                                                                  \
    return bf16_pack(to, in->data, at, count, steps, in->across, in->along, width, paired);                                      \
  }
BF16_PACK(bf16_pack_columns, col, row, BF16_PANEL, 1)

#ifdef BF16_PAIRS
/* Panels of pairs, which are as wide as an f32. */
typedef float bf16_sums __attribute__((vector_size(64)));

static inline __attribute__((always_inline)) bf16_sums bf16_add_pair(bf16_sums sum, float a, bf16_sums b) {
  const bf16_sums all = {a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a};
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(b), "v"(all));
  return sum;
}
#define T float
#define GEMM_SIZE 4
#define GEMM(name) bf16_pairs_##name
#define GEMM_CHAIN (GEMM_RUN / 2)
#define GEMM_HEADS 0
#define GEMM_ADD(sum, a, b) ((sum) = bf16_add_pair(sum, a, b))
#include "gemm_kernels.h"
#undef T
#undef GEMM
#undef GEMM_SIZE
#undef GEMM_CHAIN
#undef GEMM_HEADS
#undef GEMM_ADD
BF16_PACK(bf16_pairs_pack_rows, row, col, GEMM_MR, 1)

static void bf16_pairs_blocks(int64_t m, int64_t n, int64_t k, int64_t kc, gemm_panels a, gemm_panels b, gemm_result c, int64_t j0, int add) {
  a.panel /= 2, b.panel /= 2;
  bf16_pairs_block(m, n, ceil_div(k, 2), kc / 2, a, b, c, j0, add);
}

static const gemm_type bf16_pairs_type = {
  .size = 4, .packed = 2, .mr = GEMM_MR, .nr = BF16_PANEL, .lanes = 16, .whole = BF16_STEPS, .kc = 4 * GEMM_KC, .packs = 2 * GEMM_PACKED, .speed = 2,
  .pack_rows = bf16_pairs_pack_rows, .pack_columns = bf16_pack_columns, .block = bf16_pairs_blocks,
};
#endif

#ifdef BF16_TILES
/* Whether tiles may be used, which a process has to ask for. */
static int bf16_tiles(void) {
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

enum { BF16_BLOCK = BF16_PANEL * BF16_STEPS };
BF16_PACK(bf16_tiles_pack_rows, row, col, BF16_PANEL, 0)

#define TILE_LOAD(tile, from, apart) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(apart)) : "memory")
/* What passes by leaves the first cache to the rows that stay. */
#define TILE_STREAM(tile, from, apart) __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(apart)) : "memory")
#define TILE_STORE(tile, to, apart) __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(apart)) : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define TILE_ADD(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

/* c[16 high,16 wide] = a b for blocks of 32 steps, c's rows `apart` bytes from one another. */
static inline __attribute__((always_inline)) void bf16_tiles_steps(const int high, const int wide, int64_t blocks, const uint16_t *a, const uint16_t *b, float *c, int64_t apart) {
  enum { HALF_A = BF16_BLOCK / 2, HALF_B = BF16_PANEL };
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (; blocks > 0; blocks--, a += BF16_BLOCK, b += BF16_BLOCK) {
    TILE_STREAM(6, b, 4 * BF16_PANEL);
    TILE_LOAD(4, a, 2 * BF16_STEPS);
    TILE_ADD(0, 4, 6);
    if (wide > 1) {
      TILE_STREAM(7, b + HALF_B, 4 * BF16_PANEL);
      TILE_ADD(1, 4, 7);
    }
    if (high > 1) {
      TILE_LOAD(5, a + HALF_A, 2 * BF16_STEPS);
      TILE_ADD(2, 5, 6);
      if (wide > 1) {
        TILE_ADD(3, 5, 7);
      }
    }
  }
  TILE_STORE(0, c, apart);
  if (wide > 1) {
    TILE_STORE(1, c + 16, apart);
  }
  if (high > 1) {
    TILE_STORE(2, (char *)c + 16 * apart, apart);
    if (wide > 1) {
      TILE_STORE(3, (char *)(c + 16) + 16 * apart, apart);
    }
  }
}

static void bf16_tiles_multiply(int64_t rows, int64_t cols, int64_t blocks, const uint16_t *a, const uint16_t *b, float *c, int64_t apart) {
  if (rows > 16 && cols > 16) {
    bf16_tiles_steps(2, 2, blocks, a, b, c, apart);
  } else if (rows > 16) {
    bf16_tiles_steps(2, 1, blocks, a, b, c, apart);
  } else if (cols > 16) {
    bf16_tiles_steps(1, 2, blocks, a, b, c, apart);
  } else {
    bf16_tiles_steps(1, 1, blocks, a, b, c, apart);
  }
}

/* c[m,n] (+)= a[m,k] b[k,n], both in panels; see gemm.h. */
static void bf16_tiles_block(int64_t m, int64_t n, int64_t k, int64_t kc, gemm_panels a, gemm_panels b, gemm_result to_c, int64_t j0, int add) {
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } const tiles = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
  __asm__ volatile("ldtilecfg %0" ::"m"(tiles));
  const int64_t c_row = to_c.row, c_col = to_c.col;
  float *c = (float *)to_c.data + gemm_column(&to_c, j0), sums[BF16_PANEL * BF16_PANEL] __attribute__((aligned(64)));
  for (int64_t p = 0; p < k; p += kc, add = 1) {
    const int64_t blocks = ceil_div(at_most(kc, k - p), BF16_STEPS);
    for (int64_t i = 0; i < m; i += BF16_PANEL) {
      const int64_t rows = at_most(BF16_PANEL, m - i);
      const uint16_t *from_a = (const uint16_t *)a.data + i / BF16_PANEL * a.panel + p * a.step;
      for (int64_t j = 0; j < n; j += BF16_PANEL) {
        const int64_t cols = at_most(BF16_PANEL, n - j);
        const uint16_t *from_b = (const uint16_t *)b.data + j / BF16_PANEL * b.panel + p * b.step;
        float *to = c + i * c_row + j * c_col;
        if (!add && c_col == 1 && rows % 16 == 0 && cols % 16 == 0) {
          bf16_tiles_multiply(rows, cols, blocks, from_a, from_b, to, 4 * c_row);
          continue;
        }
        bf16_tiles_multiply(rows, cols, blocks, from_a, from_b, sums, 4 * BF16_PANEL);
        for (int64_t r = 0; r < rows; r++) {
          float *restrict line = to + r * c_row;
          const float *restrict found = sums + r * BF16_PANEL;
          if (c_col != 1) {
            for (int64_t s = 0; s < cols; s++) {
              line[s * c_col] = add ? line[s * c_col] + found[s] : found[s];
            }
          } else if (add) {
#pragma omp simd
            for (int64_t s = 0; s < cols; s++) {
              line[s] += found[s];
            }
          } else {
            memcpy(line, found, (size_t)cols * sizeof(float));
          }
        }
      }
    }
  }
  __asm__ volatile("tilerelease");
}
#undef TILE_LOAD
#undef TILE_STREAM
#undef TILE_STORE
#undef TILE_ZERO
#undef TILE_ADD

static const gemm_type bf16_tiles_type = {
  .size = 4, .packed = 2, .mr = BF16_PANEL, .nr = BF16_PANEL, .lanes = 16, .whole = BF16_STEPS, .kc = BF16_KC, .packs = 8 << 20, .speed = 8,
  .pack_rows = bf16_tiles_pack_rows, .pack_columns = bf16_pack_columns, .block = bf16_tiles_block,
};
#endif
#undef BF16_PACK
#endif

EXPORT const gemm_kernels *gradc_bf16_kernels(void) {
  static gemm_kernels kernels = { GEMM_BF16, {{0}} };
#ifdef BF16_PAIRS
  const gemm_type *type = &bf16_pairs_type;
#else
  const gemm_type *type = 0;
#endif
#ifdef BF16_TILES
  type = bf16_tiles() ? &bf16_tiles_type : type;
#endif
  for (int i = 0; i < 4; i++) {
    kernels.of[i / 2][i % 2] = type;
  }
  return &kernels;
}
