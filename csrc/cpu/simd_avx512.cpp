// The inner loops for x86-64 with AVX-512: 16 lanes, 32 registers.
#include "cpu/simd.h"

#ifdef MSA_CPU_X86_KERNELS
#include <cmath>
#include <cstring>
#include <utility>

#include "cpu/convert.h"
#include "cpu/element.h"

// Stays in force to the end of the file: templates are compiled there.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#define MSA_ISA avx512
#define MSA_VECTOR_FLOATS 16
#define MSA_PANEL_VECTORS 4
#define MSA_KERNELS kAvx512Kernels
#include "cpu/simd_kernels.inc"
#endif
