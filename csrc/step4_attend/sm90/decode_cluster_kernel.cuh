// Step 4, sparse_decode and paged_decode on Hopper, calls so small that every CTA has an SM of its
// own: the portable kernel's walk (sm80/decode_walk.cuh: math, roles, shared memory, timeline) with
// 8 warps and twice the bytes in flight, the splits of a unit merged in a cluster.
//
// Grid      splits x T x Hkv, the splits of a unit one cluster of 1 to 16 CTAs.
// Shared    as there with 8 warps (ring 196,608), and
//           inbox        [split][row of this CTA][D] floats       8,192 and up to a row a split
//           more inbox_state  [split][row of this CTA] (m, l) CTA r merges rows r * R to r * R + R
//           - 1 of the G, R = ceil(G / splits).
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

constexpr int kClusterWarps = 8, kClusterThreads = kClusterWarps * 32;

struct ClusterParams {
  DecodeParams decode;
  int32_t rows;       // R
  int32_t inverse_r;  // row / R = row * inverse_r >> 16
};

struct ClusterStorage : SharedStorage<kClusterWarps> {
  static constexpr int kInboxRows = kRows + kMaxClusterSplits;  // splits * ceil(G / splits) is less
  alignas(16) float4 inbox[kInboxRows * kHeadDim / 4];
  float2 inbox_state[kInboxRows];
};
static_assert(sizeof(ClusterStorage) <= 227 * 1024, "shared memory of one CTA");

template <typename Element, bool kSparse>
__global__ void __launch_bounds__(kClusterThreads)
    msa_decode_cluster_sm90_kernel(const __grid_constant__ ClusterParams params) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  ClusterStorage& shared = *reinterpret_cast<ClusterStorage*>(shared_memory);
  cluster_arrive();
  const AttendParams& attend = params.decode.attend;
  const auto split = static_cast<int32_t>(blockIdx.x), token = static_cast<int32_t>(blockIdx.y);
  const int64_t head = blockIdx.z;
  wait_for_previous_kernel();
  walk_slices<Element, kSparse, kClusterWarps>(params.decode, shared, head, token, split);
  start_next_kernel();
  const float v_scale = scale_of(attend.v_scale, head);
  __syncthreads();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = static_cast<int>(attend.group_size), splits = params.decode.splits;
  const int rows = params.rows;
  cluster_wait();
#pragma unroll
  for (int turn = 0; turn < kRows / kClusterWarps; ++turn) {
    const int row = warp + turn * kClusterWarps;
    if (row >= group) break;
    float maximum, sum;
    const float4 o = merge_warps(shared, row, maximum, sum);
    if (splits == 1) {
      store_result(attend, token, head, row, o, maximum, sum, v_scale);
      continue;
    }
    const int owner = row * params.inverse_r >> 16;
    const int place = split * rows + row - owner * rows;
    cluster_store(cluster_address(shared_address(&shared.inbox[place * 32 + lane]), owner), o);
    if (lane == 0) {
      cluster_store(cluster_address(shared_address(&shared.inbox_state[place]), owner),
                    make_float2(maximum, sum));
    }
  }
  if (splits == 1) return;
  cluster_arrive();
  cluster_wait();
  for (int own = warp; own < rows && split * rows + own < group; own += kClusterWarps) {
    float maximum, sum;
    const float4 o = merge_parts<kMaxClusterSplits>(
        splits, [&](int part) { return shared.inbox_state[part * rows + own]; },
        [&](int part) { return shared.inbox[(part * rows + own) * 32 + lane]; }, maximum, sum);
    store_result(attend, token, head, split * rows + own, o, maximum, sum, v_scale);
  }
}

}  // namespace msa::decode::sm90
