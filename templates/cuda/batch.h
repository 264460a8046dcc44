/* A function that steps of a batch start has the arguments of all of them in its parameters, and each block those of its member:
 * words[] has `count` members, of which each is the number of its first block and its arguments, and the number of all blocks. */
enum { GRADC_BATCH_WORDS = 511 }; /* of 4096 bytes of parameters, the last word of which is the flag's address */
struct gradc_batch { i64 count, words[GRADC_BATCH_WORDS - 1]; };

/* Where the words of a block's member begin, of EACH. */
template <int EACH> GRADC_FN i32 gradc_member(const gradc_batch &batch, u32 block) {
  i32 low = 0;
#pragma unroll 1
  for (i32 high = (i32)batch.count, middle; high - low > 1;) {
    middle = (low + high) / 2;
    if ((u32)batch.words[middle * EACH] <= block) low = middle;
    else high = middle;
  }
  i32 at = low * EACH;
  asm volatile("" : "+r"(at)); /* what is computed from it is not held in registers from here on */
  return at;
}
