// Shared memory by its 32-bit addresses: 64-bit pointers cost registers.
#pragma once

#include <cstdint>

namespace msa {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t address) {
  uint32_t bits;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(address) : "memory");
  return bits;
}

__device__ __forceinline__ void store_shared_4(uint32_t address, uint32_t bits) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t address) {
  uint2 bits;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(bits.x), "=r"(bits.y)
               : "r"(address)
               : "memory");
  return bits;
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 bits;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "r"(address)
               : "memory");
  return bits;
}

__device__ __forceinline__ void store_shared_16(uint32_t address, const uint4& bits) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(bits.x), "r"(bits.y),
               "r"(bits.z), "r"(bits.w)
               : "memory");
}

}  // namespace msa
