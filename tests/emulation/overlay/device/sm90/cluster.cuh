// csrc/device/sm90/cluster.cuh, emulated, as far as the plan of short calls uses it.
#pragma once

#include "device/shared_memory.cuh"

namespace msa::sm90 {

inline void cluster_arrive() { emulation::cluster_arrive(); }
inline void cluster_wait() { emulation::cluster_wait(); }

// The CTA's rank stands above what an address of its own memory can be.
constexpr uint32_t kLogCtaBytes = 18;
inline uint32_t cluster_address(uint32_t address, uint32_t rank) {
  return address | rank << kLogCtaBytes;
}
inline void cluster_store(uint32_t address, uint32_t value) {
  const uint32_t own = address & ((1u << kLogCtaBytes) - 1);
  emulation::store_to_cta(static_cast<int>(address >> kLogCtaBytes), own, value);
}

}  // namespace msa::sm90
