// The inner loops for x86-64 with AVX2 and FMA: 8 lanes, 16 registers.
#include "cpu/simd.h"

#ifdef MSA_CPU_X86_KERNELS
#include <cmath>
#include <cstring>
#include <utility>

#include "cpu/convert.h"
#include "cpu/element.h"

// Stays in force to the end of the file: templates are compiled there.
#pragma GCC target("avx2,fma")
#define MSA_ISA avx2
#define MSA_VECTOR_FLOATS 8
#define MSA_PANEL_VECTORS 2
#define MSA_KERNELS kAvx2Kernels
#include "cpu/simd_kernels.inc"
#endif
