// Warp products m16n8k16 of bfloat16 with float32 accumulators, and the loads of their operands
// from shared memory: sm_80 and up.
//
// Lane l, quad q = l % 4, holds
//   a     rows l / 4 (words 0, 2) and l / 4 + 8 (words 1, 3), k 2 q, 2 q + 1 (0, 1) and + 8 (2, 3)
//   b     column l / 4, k 2 q, 2 q + 1 (word 0) and + 8 (word 1)
//   sum   rows l / 4 (values 0, 1) and l / 4 + 8 (values 2, 3), columns 2 q, 2 q + 1
#pragma once

#include <cstdint>

namespace msa {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

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

// sum += a b
__device__ __forceinline__ void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace msa
