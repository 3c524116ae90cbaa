// Step 4, sparse_decode and paged_decode, portable: every GPU from sm_80 on. Math, roles,
// registers, shared memory, barriers, timeline and order of a CTA: decode_walk.cuh.
//
//   msa_decode_sm80_kernel        a split of a unit a CTA. One split: its result is the call's;
//                                 more: o (not normalised), m and l of its rows to the workspace.
//   msa_decode_merge_sm80_kernel  then, a CTA a row: parts dealt to 4 warps, added in ascending
//                                 order; the warps' sums then, in shared memory. Launched while the
//                                 first kernel still runs where the GPU can (sm_90 on); the order
//                                 of all sums is fixed.
// Limits  at most kMaxSplits parts.
#pragma once

#include "step4_attend/sm80/decode_walk.cuh"

namespace msa::decode::sm80 {

constexpr int kWarps = 4, kThreads = kWarps * 32;
static_assert(sizeof(SharedStorage<kWarps>) <= 99 * 1024, "shared memory of one CTA on sm_86");

// Partial results of a unit's rows: o [unit][split][G][D], then (m, l) [unit][split][G].
struct Workspace {
  float* o;
  float2* state;
  __device__ __forceinline__ explicit Workspace(const DecodeParams& params)
      : o(static_cast<float*>(params.attend.workspace)),
        state(reinterpret_cast<float2*>(o + params.num_units * params.splits *
                                                params.attend.group_size * kHeadDim)) {}
};

template <typename Element, bool kSparse>
__global__ void __launch_bounds__(kThreads)
    msa_decode_sm80_kernel(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<kWarps>*>(shared_memory);
  const AttendParams& attend = params.attend;
  const int32_t split = blockIdx.x % params.splits, unit = blockIdx.x / params.splits;
  const auto num_tokens = static_cast<int32_t>(attend.batch.num_tokens);
  const int64_t head = unit / num_tokens;
  const int32_t token = unit % num_tokens;
  wait_for_previous_kernel();
  const float v_scale = load_scale(attend.v_scale, head);
  walk_slices<Element, kSparse, kWarps>(params, shared, head, token, split);
  start_next_kernel();
  __syncthreads();
  const int group = static_cast<int>(attend.group_size);
  for (int row = threadIdx.x / 32; row < group; row += kWarps) {
    float maximum, sum;
    const float4 o = merge_warps(shared, row, maximum, sum);
    if (params.splits == 1) {
      store_result(attend, token, head, row, o, maximum, sum, v_scale);
    } else {
      const Workspace workspace(params);
      const int64_t place = static_cast<int64_t>(blockIdx.x) * group + row;
      reinterpret_cast<float4*>(workspace.o)[place * 32 + threadIdx.x % 32] = o;
      if (threadIdx.x % 32 == 0) workspace.state[place] = make_float2(maximum, sum);
    }
  }
}

// The second launch where parts went through the workspace: a CTA a row, parts dealt to its warps.
__global__ void __launch_bounds__(kThreads)
    msa_decode_merge_sm80_kernel(const __grid_constant__ DecodeParams params) {
  __shared__ float4 o_of_warp[kWarps][32];
  __shared__ float2 state_of_warp[kWarps];
  const AttendParams& attend = params.attend;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto group = static_cast<int32_t>(attend.group_size);
  const auto num_tokens = static_cast<int32_t>(attend.batch.num_tokens);
  const int32_t row = blockIdx.x % group, unit = blockIdx.x / group;
  const int64_t head = unit / num_tokens;
  const int64_t token = unit % num_tokens;
  const Workspace workspace(params);
  wait_for_previous_kernel();
  const auto place_of = [&](int part) {
    return (static_cast<int64_t>(unit) * params.splits + warp + part * kWarps) * group + row;
  };
  const int count = (params.splits - warp + kWarps - 1) / kWarps;
  // (m, l) of the warp's parts, at most 32 of them: one a lane.
  static_assert(kMaxSplits <= 32 * kWarps, "a lane holds one part");
  const float2 lane_state =
      lane < count ? workspace.state[place_of(lane)] : make_float2(-INFINITY, 0.0f);
  float maximum, sum;
  const float4 o = merge_parts<kMaxSplits / kWarps>(
      count,
      [&](int part) {
        return make_float2(__shfl_sync(kAllLanes, lane_state.x, part),
                           __shfl_sync(kAllLanes, lane_state.y, part));
      },
      [&](int part) {
        return reinterpret_cast<const float4*>(workspace.o)[place_of(part) * 32 + lane];
      },
      maximum, sum);
  o_of_warp[warp][lane] = o;
  if (lane == 0) state_of_warp[warp] = make_float2(maximum, sum);
  __syncthreads();
  if (warp != 0) return;
  const float4 whole = merge_parts<kWarps>(
      kWarps, [&](int part) { return state_of_warp[part]; },
      [&](int part) { return o_of_warp[part][lane]; }, maximum, sum);
  store_result(attend, token, head, row, whole, maximum, sum, scale_of(attend.v_scale, head));
}

}  // namespace msa::decode::sm80
