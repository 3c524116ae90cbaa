// cp.async: global memory -> shared memory without registers in between, sm_80 and up.
#pragma once

#include <cstdint>

namespace msa {

// 4 or 8 bytes; both addresses are multiples of that.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t shared_address, const void* global_address) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address),
               "l"(global_address), "n"(kBytes)
               : "memory");
}

// 16 bytes, past L1. Both addresses are multiples of 16.
__device__ __forceinline__ void copy_async_16(uint32_t shared_address, const void* global_address) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address),
               "l"(global_address)
               : "memory");
}

// The same; L2 reads the whole 256 bytes around the address.
__device__ __forceinline__ void copy_async_16_of_256(uint32_t shared_address,
                                                     const void* global_address) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared_address),
               "l"(global_address)
               : "memory");
}

// copy_async_16() where `there` holds; otherwise nothing is read and the 16 bytes become 0.
__device__ __forceinline__ void copy_async_16_or_zero(uint32_t shared_address,
                                                      const void* global_address, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address),
               "l"(global_address), "r"(there ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void commit_async_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's latest groups are still on their way.
template <int kPending>
__device__ __forceinline__ void wait_async_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace msa
