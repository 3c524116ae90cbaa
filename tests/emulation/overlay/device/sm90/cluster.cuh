// csrc/device/sm90/cluster.cuh, emulated.
#pragma once

#include "device/sm90/mbarrier.cuh"

namespace msa::sm90 {

inline void cluster_arrive() { emulation::cluster_arrive(); }
inline void cluster_arrive_relaxed() { emulation::cluster_arrive(); }
inline void cluster_wait() { emulation::cluster_wait(); }

// The CTA's rank stands above what an address of its own memory can be.
constexpr uint32_t kLogCtaBytes = 18;
inline uint32_t cluster_address(uint32_t address, uint32_t rank) {
  return address | rank << kLogCtaBytes;
}

namespace detail {

using msa::detail::shared_bytes;

inline int rank_of(uint32_t address) { return static_cast<int>(address >> kLogCtaBytes); }

// In the CTA that it is of; checked as that of an access of so many bytes.
inline uint32_t own_address(uint32_t address, uint32_t bytes) {
  const uint32_t own = address & ((1u << kLogCtaBytes) - 1);
  shared_bytes(own, bytes);
  return own;
}

template <typename Value>
void send(uint32_t address, const Value& value, uint32_t barrier) {
  const int rank = rank_of(address);
  if (rank_of(barrier) != rank) emulation::fail("a send counts on another CTA's barrier");
  const uint8_t* const word = emulation::shared_memory + own_address(barrier, sizeof(uint64_t));
  emulation::send_to_cta(rank, own_address(address, sizeof value), &value, sizeof value,
                         reinterpret_cast<const uint64_t*>(word));
}

}  // namespace detail

inline void cluster_store(uint32_t address, uint32_t value) {
  const uint32_t own = detail::own_address(address, sizeof value);
  emulation::store_to_cta(detail::rank_of(address), own, value);
}
inline void cluster_send(uint32_t address, float4 value, uint32_t barrier) {
  detail::send(address, value, barrier);
}
inline void cluster_send(uint32_t address, float2 value, uint32_t barrier) {
  detail::send(address, value, barrier);
}

inline void barrier_wait_cluster(uint64_t* barrier, uint32_t parity) {
  barrier_wait(barrier, parity);
}

}  // namespace msa::sm90
