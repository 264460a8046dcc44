/* Vectors of 512 bits where the processor has them, for the functions below: compilers prefer 256 for some that do. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__AVX512F__)
#pragma GCC target("prefer-vector-width=512")
#endif
