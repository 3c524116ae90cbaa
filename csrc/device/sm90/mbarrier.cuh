// Transaction barriers in shared memory (sm_90). A barrier completes a phase when its expected
// arrivals and announced bytes are in; waits name the parity of the phase they wait for.
//
// A wait on a parity tolerates a lag of one phase only: whoever shares a barrier must wait for
// every phase of it, also for those whose data it does not need.
#pragma once

#include <cstdint>

#include "device/shared_memory.cuh"

namespace msa::sm90 {

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine; before the CTA's first __syncthreads.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// So many arrivals at once.
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Arrives once all cp.async copies that the thread has begun are done; nothing waits here.
__device__ __forceinline__ void barrier_arrive_behind_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                   shared_address(barrier))
               : "memory");
}

// The arrival of a warp, after all its lanes have read what lies behind the barrier and waited for
// the phases before. Behind products that the warp has waited for, a lane alone may arrive.
__device__ __forceinline__ void barrier_arrive_warp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Arrives and announces bytes that copies will bring.
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// The loop lies inside the asm block: around it, it makes ptxas serialise wgmma and spill.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
      "@complete bra done;\n"
      "bra again;\n"
      "done:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Is the phase of this parity complete? Does not wait.
__device__ __forceinline__ bool barrier_test(uint64_t* barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
      "selp.u32 %0, 1, 0, complete;\n"
      "}\n"
      : "=r"(complete)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return complete != 0;
}

// True in one lane of a whole warp; the compiler knows that it is one.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// Stage and phase of a ring of buffers.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace msa::sm90
