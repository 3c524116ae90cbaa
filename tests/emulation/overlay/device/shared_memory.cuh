// csrc/device/shared_memory.cuh, emulated: an address is an offset in the CTA's dynamic shared
// memory.
#pragma once

#include <cuda_runtime.h>

namespace msa {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

namespace detail {

// The `bytes` at an address, which must be a multiple of them and in shared memory.
inline uint8_t* shared_bytes(uint32_t address, uint32_t bytes) {
  if (address % bytes != 0 || address > emulation::kSharedBytes - bytes) {
    emulation::fail("an address is not of shared memory, or not a multiple of the access");
  }
  return emulation::shared_memory + address;
}

template <typename Value>
Value load_shared(uint32_t address) {
  Value value;
  std::memcpy(&value, shared_bytes(address, sizeof value), sizeof value);
  return value;
}

}  // namespace detail

inline uint32_t load_shared_4(uint32_t address) { return detail::load_shared<uint32_t>(address); }
inline void store_shared_4(uint32_t address, uint32_t bits) {
  std::memcpy(detail::shared_bytes(address, 4), &bits, 4);
}
inline uint2 load_shared_8(uint32_t address) { return detail::load_shared<uint2>(address); }
inline uint4 load_shared_16(uint32_t address) { return detail::load_shared<uint4>(address); }
inline void store_shared_16(uint32_t address, const uint4& bits) {
  std::memcpy(detail::shared_bytes(address, 16), &bits, 16);
}

}  // namespace msa
