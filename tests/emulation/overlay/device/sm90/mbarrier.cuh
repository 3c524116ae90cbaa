// csrc/device/sm90/mbarrier.cuh, emulated.
#pragma once

#include "device/shared_memory.cuh"

namespace msa::sm90 {

inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  emulation::barrier_init(barrier, arrivals);
}
inline void fence_barrier_init() {}
inline void barrier_arrive(uint64_t* barrier) { emulation::barrier_arrive(barrier, 0); }
inline void barrier_arrive(uint64_t* barrier, uint32_t arrivals) {
  for (uint32_t i = 0; i < arrivals; ++i) emulation::barrier_arrive(barrier, 0);
}
inline void barrier_arrive_behind_copies(uint64_t* barrier) {
  emulation::arrive_behind(emulation::kCopies, barrier);
}
inline void barrier_arrive_warp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}
inline void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  emulation::barrier_arrive(barrier, bytes);
}
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  emulation::barrier_wait(barrier, parity);
}
inline bool barrier_test(uint64_t* barrier, uint32_t parity) {
  return emulation::barrier_test(barrier, parity);
}

inline bool elect_one() {
  emulation::exchange(emulation::kElect, 0);
  return emulation::lane() == 0;
}

template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;
  void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace msa::sm90
