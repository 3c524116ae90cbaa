// Step 4, sparse_decode and paged_decode on Hopper, rows that are split: the portable kernel's walk
// (sm80/decode_walk.cuh: math, roles, shared memory, timeline), its splits merged in a cluster.
//
// Grid      (token, KV head) x splits, the splits of a unit one cluster of 2 to 16 CTAs.
// Shared    as there, and
//           inbox        [split][row of this CTA][D] floats       8,192
//           inbox_state  [split][row of this CTA] (m, l)            128
//           CTA r merges rows r * R to r * R + R - 1 of the G, R = max(1, G / splits).
// Barriers  cluster  all threads of all CTAs, phase 0: arrive at the start, wait before the first
//                    remote store (every CTA has started); phase 1: arrive and wait after the last
//                    (every part has come). Nobody touches another CTA's memory after that, so CTAs
//                    end when they like.
// Timeline  walk | __syncthreads | warps' parts merged, row by row to the CTA that owns it |
// cluster
//           barrier | splits' parts merged, stored. One launch, no workspace.
// Order     warps, then splits, ascending.
#pragma once

#include "device/sm90/cluster.cuh"
#include "step4_attend/sm80/decode_walk.cuh"

namespace msa::decode::sm90 {

using namespace msa::decode::sm80;
using msa::sm90::cluster_address;
using msa::sm90::cluster_arrive;
using msa::sm90::cluster_store;
using msa::sm90::cluster_wait;

constexpr int kWarps = 8, kThreads = kWarps * 32;

struct ClusterStorage : SharedStorage<kWarps> {
  alignas(16) float4 inbox[kRows * kHeadDim / 4];
  float2 inbox_state[kRows];
};
static_assert(kMaxClusterSplits <= kRows, "the inbox holds a row of every split");
static_assert(sizeof(ClusterStorage) <= 227 * 1024, "shared memory of one CTA");

template <typename Element, bool kSparse>
__global__ void __launch_bounds__(kThreads)
    msa_decode_cluster_sm90_kernel(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  ClusterStorage& shared = *reinterpret_cast<ClusterStorage*>(shared_memory);
  cluster_arrive();
  const AttendParams& attend = params.attend;
  const int32_t split = blockIdx.x % params.splits, unit = blockIdx.x / params.splits;
  const auto num_tokens = static_cast<int32_t>(attend.batch.num_tokens);
  const int64_t head = unit / num_tokens;
  const int32_t token = unit % num_tokens;
  wait_for_previous_kernel();
  walk_slices<Element, kSparse, kWarps>(params, shared, head, token, split);
  allow_next_kernel();
  const float v_scale = scale_of(attend.v_scale, head);
  __syncthreads();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = static_cast<int>(attend.group_size);
  const int rows = max(1, group / params.splits);  // that a CTA merges
  cluster_wait();
  if (params.splits == 1) {
    for (int row = warp; row < group; row += kWarps) {
      float maximum, sum;
      const float4 o = merge_warps(shared, row, maximum, sum);
      store_result(attend, token, head, row, o, maximum, sum, v_scale);
    }
    return;
  }
  for (int row = warp; row < group; row += kWarps) {
    float maximum, sum;
    const float4 o = merge_warps(shared, row, maximum, sum);
    const int place = split * rows + row % rows;
    const uint32_t owner = row / rows;
    cluster_store(cluster_address(shared_address(&shared.inbox[place * 32 + lane]), owner), o);
    if (lane == 0) {
      cluster_store(cluster_address(shared_address(&shared.inbox_state[place]), owner),
                    make_float2(maximum, sum));
    }
  }
  cluster_arrive();
  cluster_wait();
  for (int own = warp; own < rows && split * rows + own < group; own += kWarps) {
    float maximum, sum;
    const float4 o = merge_parts(
        params.splits, [&](int part) { return shared.inbox_state[part * rows + own]; },
        [&](int part) { return shared.inbox[(part * rows + own) * 32 + lane]; }, maximum, sum);
    store_result(attend, token, head, split * rows + own, o, maximum, sum, v_scale);
  }
}

}  // namespace msa::decode::sm90
