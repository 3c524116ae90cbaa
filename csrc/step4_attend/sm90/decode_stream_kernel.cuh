// Step 4, sparse_decode and paged_decode on Hopper over FP8 caches, calls whose units fill the
// machine: the portable kernel's walk (sm80/decode_walk.cuh) with bulk copies in place of cp.async.
// K or V of a slice is a box of a tensor map, which one lane asks for and a barrier counts.
//
// Grid      T x Hkv: a unit a CTA, two CTAs an SM.
// Roles     all 4 warps alike, each its own producer: lane by lane they compute, one lane copies.
// Registers as in the walk.
// Shared    ring    4 warps x 3 stages x (K 4096, V 4096)            98,304; layout: boxes of
//                   decode_slice.cuh
//           o       4 warps x 16 rows x 136 floats, over each warp's own part of the ring
//           state   4 warps x 16 rows (m, l)
//           full    4 warps x 3 stages
// Barriers  full    1 arrival and the bytes of K and V, none of a slice that does not count; its
//                   warp waits. __syncwarp says that a stage has been read.
//           __syncthreads once, between the last slice and the merge of the warps.
// Timeline  position, ids and scales | pages and q | 3 slices asked for, then for each slice:
//           wait | S = Q K^T | softmax | O += P V | K and V of slice + 3 asked for, together: in
//           interleaved pools they are the halves of one piece of memory.
// L2        blocks that one token reads are read once: their lines give way to each other before
//           they displace others, which are to be written back first where they are dirty. Tokens
//           of a request share blocks, whose lines stay.
// Unseen    slices of blocks that do not count are not copied. Of the others a box is whole,
//           whatever of it counts: tokens past pos are masked in S, and their rows of V, where
//           0 * NaN would be NaN, become 0 in shared memory before they are read.
// Order     that of the walk: slice i belongs to warp i % 4, warps are merged in ascending order.
// Limits    those of the walk; calls that fits_tensor_maps(). Of bfloat16 a box is two halves of a
//           row, and slower than cp.async (docs/kernels/sparse_decode.md).
#pragma once

#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "step4_attend/sm80/decode_walk.cuh"

namespace msa::decode::sm90 {

using namespace msa::decode::sm80;
namespace hopper = msa::sm90;
using Fp8 = __nv_fp8_e4m3;

constexpr int kStreamWarps = 4, kStreamThreads = kStreamWarps * 32;

struct StreamStorage : SharedStorage<kStreamWarps> {
  uint64_t full[kStreamWarps][kStages];
};
static_assert(2 * (sizeof(StreamStorage) + 1024) <= 228 * 1024, "two CTAs an SM");

// How slices of a KV head come to shared memory; by one thread.
struct SliceBoxes {
  const CUtensorMap& k_map;
  const CUtensorMap& v_map;
  int head;
  uint64_t policy;

  __device__ __forceinline__ SliceBoxes(const DecodeParams& params, const CUtensorMap& k_map,
                                        const CUtensorMap& v_map, int head)
      : k_map(k_map),
        v_map(v_map),
        head(head),
        policy(params.tokens_each.divisor == 1 ? hopper::evict_first_policy()
                                               : hopper::evict_normal_policy()) {}

  __device__ __forceinline__ void copy(uint8_t (&stage)[2][kPartBytes], const SliceTokens& tokens,
                                       uint64_t* full) const {
    hopper::copy_box(stage[0], &k_map, full, 0, tokens.first, 0, head, tokens.page, policy);
    hopper::copy_box(stage[1], &v_map, full, 0, tokens.first, 0, head, tokens.page, policy);
  }
};

// Makes 0 of the rows of V at or past `valid`; by the warp that reads them next.
__device__ __forceinline__ void clear_unseen_values(uint8_t* v, int valid) {
  using S = Slice<Fp8>;
  static_assert(S::kTokens == 32, "a lane a row");
  const int lane = threadIdx.x % 32;
  if (lane >= valid) {
    auto* row = reinterpret_cast<uint4*>(v + lane * S::kRowBytes);
#pragma unroll 1
    for (int i = 0; i < S::kVectors; ++i) row[i] = make_uint4(0, 0, 0, 0);
  }
  hopper::fence_async_proxy();  // the stage's next box is written after these zeros
  __syncwarp();
}

// The walk of a warp over its slices; its result lies in shared memory afterwards.
template <bool kSparse>
__device__ __forceinline__ void walk_boxes(const DecodeParams& params, const SliceBoxes& boxes,
                                           StreamStorage& shared, int64_t head, int32_t token) {
  using S = Slice<Fp8>;
  const AttendParams& attend = params.attend;
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
  // Position and ids do not wait for each other, nor do pages and q.
  const PositionGuess guess = guess_row<kSparse>(params, token);
  WarpSlices<Fp8, kSparse> slices{params, head, token, warp, kStreamWarps};
  const LoadingId lane_id = slices.id_of(slices.slot_of(lane));
  const float k_scale = load_scale(attend.k_scale, head);
  slices.look_up(lane_id, guess);
  Query<Fp8> query;
  query.load(attend.q, token, head * attend.group_size, attend.group_size);

  // Begins to bring a slice; returns how many of its tokens count.
  const auto fetch = [&](int stage, int32_t index) {
    const SliceTokens tokens = slices.get(index);
    if (hopper::elect_one()) {
      uint64_t* full = &shared.full[warp][stage];
      if (tokens.valid > 0) {
        hopper::barrier_arrive_expect(full, 2 * kPartBytes);
        boxes.copy(shared.ring[warp][stage], tokens, full);
      } else {
        hopper::barrier_arrive(full);
      }
    }
    return tokens.valid;
  };
  int valid[kStages];  // of the slice at hand and the next ones
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) valid[stage] = fetch(stage, stage);

  Rows<Fp8, true> rows;
  rows.clear();
  query.prepare(attend.scale * k_scale * kLog2E);
  hopper::RingPosition<kStages> ring;
#pragma unroll 1
  for (int32_t index = 0; slices.has(index); ++index) {
    hopper::barrier_wait(&shared.full[warp][ring.stage], ring.phase);
    if (valid[0] > 0) {
      uint8_t (&stage)[2][kPartBytes] = shared.ring[warp][ring.stage];
      float s[S::kColumns][4], factor[2];
      typename Rows<Fp8, true>::Weights p;
      score<Fp8, true>(query, shared_address(stage[0]), s);
      rows.softmax(s, valid[0], query.scale, p, factor);
      if (__any_sync(kAllLanes, any_shrinks(factor))) rows.shrink(factor);
      if (valid[0] < S::kTokens) clear_unseen_values(stage[1], valid[0]);
      rows.add_values(shared_address(stage[1]), p);
    }
    __syncwarp();
    const int later_valid = fetch(ring.stage, index + kStages);
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) valid[i] = valid[i + 1];
    valid[kStages - 1] = later_valid;
    ring.advance();
  }
  rows.store(reinterpret_cast<float*>(shared.ring[warp]), shared.state[warp]);
}

template <bool kSparse>
__global__ void __launch_bounds__(kStreamThreads, 2)
    msa_decode_stream_sm90_kernel(const __grid_constant__ DecodeParams params,
                                  const __grid_constant__ CUtensorMap k_map,
                                  const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  auto& shared = *reinterpret_cast<StreamStorage*>(shared_memory);
  const AttendParams& attend = params.attend;
  const int warp = threadIdx.x / 32;
  const auto num_tokens = static_cast<int32_t>(attend.batch.num_tokens);
  const int32_t head = blockIdx.x / num_tokens, token = blockIdx.x % num_tokens;
  if (hopper::elect_one()) {  // by a lane each, the assembler would make a loop over the lanes
#pragma unroll
    for (uint64_t& full : shared.full[warp]) hopper::barrier_init(&full, 1);
  }
  hopper::fence_barrier_init();
  if (threadIdx.x == 0) {
    hopper::prefetch_tensor_map(&k_map);
    hopper::prefetch_tensor_map(&v_map);
  }
  __syncwarp();
  wait_for_previous_kernel();
  const float v_scale = load_scale(attend.v_scale, head);
  walk_boxes<kSparse>(params, {params, k_map, v_map, head}, shared, head, token);
  start_next_kernel();
  __syncthreads();
  const int group = static_cast<int>(attend.group_size);
  for (int row = warp; row < group; row += kStreamWarps) {
    float maximum, sum;
    const float4 o = merge_warps(shared, row, maximum, sum);
    store_result(attend, token, head, row, o, maximum, sum, v_scale);
  }
}

}  // namespace msa::decode::sm90
