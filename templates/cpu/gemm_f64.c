/* Blocks of a matrix product of f64. */
#include "gemm_type.h"

#define T double
#define GEMM_SIZE 8
#define GEMM(name) dgemm_##name
#include "gemm.h"

EXPORT const gemm_kernels *gradc_f64_kernels(void) {
  static const gemm_kernels kernels = { GEMM_F64, {{&dgemm_type, &dgemm_type}, {&dgemm_type, &dgemm_type}} };
  return &kernels;
}
