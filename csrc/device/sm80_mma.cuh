// Warp products m16n8k16 with float32 accumulators and the loads of their operands, sm_80 and up.
//
// Lane l = 4 g + t holds: of A [16][16] rows g and g + 8, columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9
// (a[0] row g, a[1] row g + 8, then a[2], a[3] for the upper columns); of B [16][8] column g, rows
// 2 t, 2 t + 1 (b0) and 2 t + 8, 2 t + 9 (b1); of the sum [16][8] columns 2 t, 2 t + 1 of row g
// (sum[0], sum[1]) and of row g + 8 (sum[2], sum[3]).
#pragma once

#include <cstdint>

#include "device/shared_memory.cuh"

namespace msa {

// Four 8 x 8 matrices of 16-bit elements. Lane l names row l % 8 of matrix l / 8, and gets of each
// matrix row l / 4, columns 2 q and 2 q + 1.
__device__ __forceinline__ void load_matrices(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// The same of the transposed matrices: column l / 4, rows 2 q and 2 q + 1.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// sum += A B, bfloat16.
__device__ __forceinline__ void multiply_bf16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// sum += A B, float16.
__device__ __forceinline__ void multiply_f16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace msa
