// The inner loops for whatever the compiler targets by itself (SSE2, NEON), and the choice of the
// instruction set: made once a process, so that a machine gives the same bits every time.
#include <cmath>
#include <cstring>
#include <utility>

#include "cpu/convert.h"
#include "cpu/element.h"
#include "cpu/simd.h"

#define MSA_ISA baseline
#define MSA_VECTOR_FLOATS 4
#define MSA_PANEL_VECTORS 2
#define MSA_KERNELS kBaselineKernels
#include "cpu/simd_kernels.inc"

namespace msa {
namespace {

const SimdKernels& best_kernels() {
#ifdef MSA_CPU_X86_KERNELS
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return kAvx512Kernels;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2Kernels;
#endif
  return kBaselineKernels;
}

}  // namespace

const SimdKernels& simd() {
  static const SimdKernels& kernels = best_kernels();
  return kernels;
}

}  // namespace msa
