// Kernels that break a rule each, to see that the machine notices.
#include <string>

#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"

namespace broken {
using namespace msa::sm90;

constexpr int kThreads = 64;

struct Shared {
  alignas(1024) uint8_t tile[128 * 128];
  alignas(16) int32_t numbers[4];
  uint64_t barrier, other;
};

__global__ void break_rule_kernel(const std::string rule, const int32_t* numbers, int32_t* result) {
  auto& shared = *reinterpret_cast<Shared*>(emulation::shared_memory);
  const int thread = threadIdx.x, lane = thread % 32;
  if (thread == 0) barrier_init(&shared.barrier, 2);
  __syncthreads();
  if (lane == 0) {
    if (rule != "an arrival is missing" || thread == 0) barrier_arrive(&shared.barrier);
    if (rule == "no init") barrier_arrive(&shared.other);
  }
  barrier_wait(&shared.barrier, 0);
  if (rule == "an arrival too many" && thread == 0) {
    barrier_arrive_expect(&shared.barrier, 16);
    barrier_arrive(&shared.barrier);
    barrier_arrive(&shared.barrier);
  }
  if (rule == "other collectives") {
    if (lane < 16) {
      __ballot_sync(~0u, true);
    } else {
      __syncwarp();
    }
  }
  if (rule == "other thread counts") named_barrier(1, thread < 32 ? 64 : 96);
  if (rule == "no copy" && lane == 0) barrier_arrive_expect(&shared.barrier, 16);
  if (rule == "no wait for a product") {
    Accumulator sums;
    multiply_ss(make_descriptor(0, 16, 1024), make_descriptor(0, 16, 1024), sums, false);
    wgmma_commit();
  }
  if (rule == "no wait for a copy" && thread == 0) {
    for (int32_t& number : shared.numbers) number = 0;
    barrier_arrive(&shared.barrier);
    barrier_arrive_expect(&shared.barrier, 16);
    copy_bytes(shared.numbers, numbers, 16, &shared.barrier);
    *result = shared.numbers[3];
  }
}

// Returns what a kernel read that did not wait for it.
void break_rule(const std::string& rule, int64_t* result) {
  alignas(16) const int32_t numbers[4] = {1, 2, 3, 4};
  int32_t last = 0;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  cudaLaunchKernelEx(&config, &break_rule_kernel, rule, &numbers[0], &last);
  *result = last;
}

}  // namespace broken
