// Step 4, sparse_decode on Hopper, draft tokens of few requests: two neighbouring tokens walk the
// union of their blocks in a cluster, each slice brought to shared memory once for both. Where a
// call is small its data is in L2 but for the first reader, and what L2 brings to all SMs bounds
// it: 8 coherent tokens a request read 18 blocks a pair instead of 32.
//
//   of each token, over its own blocks: the math of sm80/decode_walk.cuh
//
// Grid      splits x pairs x Hkv, the splits of a pair one cluster of 1 to 8 CTAs, one an SM. A
//           pair is tokens 2 i and 2 i + 1, of one request or not; the last one may be alone.
// Union     by every warp for itself, an entry of ids a lane, token after token: lane i gets block
//           i of the union. Entries are one block where request and id are; the n-th entry of one
//           id of one token goes with the n-th of the other. Found while the pages are on their
//           way.
// Roles     12 warps: 6 rings of slices, each with a warp a token. Slice i of the union belongs to
//           CTA i % splits, there to ring i / splits % 6. Of a slice one of its ring's warps brings
//           K, the other one V; each computes S, P and O of its token if that selected the block.
// Registers q as 16 rows (G heads, the last one repeated) and o of 16 x 128, of the warp's token; a
//           block of the union a lane.
// Shared    ring     6 x 4 stages x (K 4096, V 4096)                  196,608
//           o        [warp][row][136] floats, over each ring's own stages
//           state    [warp][row] (m, l)                                 1,536
//           inbox    [split][row of this CTA][D] floats                20,480
//           inbox_state  the same of (m, l). Row r of a pair is head r % G of token r / G; CTA s
//                    merges the R rows from s * R on, R = ceil(2 G / splits).
// Timeline  positions and ids | pages and q | K and V of 3 slices, then for each slice of the ring:
//           wait K and V | barrier of the ring | fetch of slice + 3 | S = Q K^T | softmax | O += P V.
//           One cp.async group a slice. Then the warps' parts are merged and go to the CTAs that
//           own the rows; they merge the CTAs' parts and store. One launch, no workspace.
// Barriers  ring's  both warps' copies of a slice are there, and both have read the slice before.
//           cluster, arrived  as in decode_cluster_kernel.cuh.
// Unseen    rows past what either token sees are zero-filled; where the tokens see unlike many,
//           each has V's other rows masked out in registers: 0 * NaN is NaN.
// Order     of a token's slices: by the pair's union. So a token's bits depend on which blocks the
//           token beside it selected; they are the same on every run.
// Limits    bfloat16 caches, K up to 16.
#pragma once

#include "device/sm90/wgmma.cuh"
#include "step4_attend/sm90/decode_cluster_kernel.cuh"

namespace msa::decode::sm90 {

constexpr int kClusterPairTokens = 2, kClusterPairRings = 6, kClusterPairStages = 4;
constexpr int kMaxPairSplits = 8;
constexpr int kMaxPairTopk = 16;  // a warp has a lane for each entry of two tokens

struct PairClusterStorage {
  static constexpr int kTokens = kClusterPairTokens, kRings = kClusterPairRings;
  static constexpr int kThreads = kTokens * kRings * 32;
  static constexpr int kInboxRows = kTokens * kRows + kMaxPairSplits;  // splits * R is less
  alignas(1024) uint8_t ring[kRings][kClusterPairStages][2][kPartBytes];
  float2 state[kTokens][kRings][kRows];
  alignas(16) float4 inbox[kInboxRows * kHeadDim / 4];
  float2 inbox_state[kInboxRows];
  uint64_t arrived;

  __device__ __forceinline__ float* o(int token, int owner) {
    return reinterpret_cast<float*>(ring[owner]) + token * kRows * kOStride;
  }
};
static_assert(sizeof(PairClusterStorage) <= 227 * 1024, "shared memory of one CTA");
static_assert(kClusterPairTokens * kRows * kOStride * 4 <= kClusterPairStages * 2 * kPartBytes,
              "o lies in the ring");

// The place of bit `n`, of those that are set, from the lowest; past the last one anything.
__device__ __forceinline__ int place_of_bit(uint32_t bits, int n) {
  int place = 0;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    if (__popc(bits & ((1u << (place + step)) - 1)) <= n) place += step;
  }
  return place;
}

// The union of the blocks of two tokens, a block a lane.
struct PairUnion {
  int32_t page;   // the lane's block
  int32_t block;  // 4 block + its tokens: bit t says that token t selected it
  int32_t count;

  // The lane's entry: block `id` of token lane / 16, if it counts; its page may be on its way.
  __device__ __forceinline__ PairUnion(bool counts, int32_t id, int32_t entry_page,
                                       bool one_request) {
    const int lane = threadIdx.x % 32, token = lane / kMaxPairTopk;
    const uint32_t own_half = 0xffffu << token * kMaxPairTopk;
    const uint32_t same = __match_any_sync(kAllLanes, counts ? id : ~lane);
    const int earlier = __popc(same & own_half & ((1u << lane) - 1));
    const bool both = one_request && __popc(same & ~own_half) > earlier;
    const uint32_t listed = __ballot_sync(kAllLanes, counts && !(token == 1 && both));
    const int from = place_of_bit(listed, lane);
    count = __popc(listed);
    block = __shfl_sync(kAllLanes, id * 4 + (both ? 3 : 1 << token), from % 32);
    page = __shfl_sync(kAllLanes, entry_page, from % 32);
  }
};

// How a lane copies K or V of a slice: 8 vectors, 2 rows apart. Layouts: decode_slice.cuh.
struct PartCopy {
  using S = Slice<__nv_bfloat16>;
  static constexpr int kStepRows = 32 / S::kVectors, kTurns = 4;
  static constexpr int kTurnBytes = kTurns * kStepRows * S::kRowBytes;
  const char* data;     // of the KV head, at the lane's vector of its first row
  int64_t page, token;  // strides in bytes
  int row;
  uint32_t places[kTurns];  // of the first four vectors, in the part; then kTurnBytes further

  __device__ __forceinline__ PartCopy(const PagedView& cache, int64_t head, bool is_v) {
    const int lane = threadIdx.x % 32, vector = lane % S::kVectors;
    row = lane / S::kVectors;
    page = 2 * cache.page_stride;
    token = 2 * cache.token_stride;
    data = static_cast<const char*>(cache.data) + 2 * head * cache.head_stride + row * token +
           vector * 16;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int part_row = i * kStepRows + row, turn = is_v ? part_row % 8 : part_row % 2 * 4;
      places[i] = part_row * S::kRowBytes + (vector ^ turn) * 16;
    }
  }

  // `offset`: of the slice's first token from `data`; its rows from `valid` on become 0.
  __device__ __forceinline__ void operator()(uint32_t part, int64_t offset, int valid) const {
    const char* source = data + offset;
    if (valid == S::kTokens) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        copy_async_16(part + places[i % kTurns] + i / kTurns * kTurnBytes, source);
        source += kStepRows * token;
      }
      return;
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        const int part_row = row + (half * kTurns + i) * kStepRows;
        copy_async_16_or_zero(part + places[i] + half * kTurnBytes, source, part_row < valid);
        source += kStepRows * token;
      }
    }
  }
};

static __global__ void __launch_bounds__(PairClusterStorage::kThreads, 1)
    msa_decode_cluster_pair_sm90_kernel(const __grid_constant__ ClusterParams params) {
  using Element = __nv_bfloat16;
  using S = Slice<Element>;
  constexpr int kRings = kClusterPairRings, kTokens = kClusterPairTokens;
  constexpr int kPairStages = kClusterPairStages, kWarps = kRings * kTokens;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  auto& shared = *reinterpret_cast<PairClusterStorage*>(shared_memory);
  const AttendParams& attend = params.decode.attend;
  const BatchView& batch = attend.batch;
  const auto split = static_cast<int32_t>(blockIdx.x);
  const auto first_token = static_cast<int32_t>(blockIdx.y) * kTokens;
  const int64_t head = blockIdx.z;
  const int tokens = min(kTokens, static_cast<int32_t>(batch.num_tokens) - first_token);
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
  const int own = warp % kTokens, ring = warp / kTokens;  // the warp's token, its ring
  const int group = static_cast<int>(attend.group_size), splits = params.decode.splits;
  const int own_rows = min(params.rows, max(0, kTokens * group - split * params.rows));
  if (threadIdx.x == 0) {
    hopper::barrier_init(&shared.arrived, 1);
    hopper::fence_barrier_init();
    hopper::barrier_arrive_expect(&shared.arrived,
                                  splits * own_rows * (kHeadDim * sizeof(float) + sizeof(float2)));
  }
  __syncwarp();
  hopper::cluster_arrive_relaxed();
  wait_for_previous_kernel();

  // Positions and ids do not wait for each other, nor do pages and q. Both tokens are looked for in
  // the request that the first one is probably of: where requests have evenly many, they are.
  const int second = tokens - 1;  // 0: the first token again, of which no entry counts
  const PositionGuess guess = guess_row<true>(params.decode, first_token);
  const int member = lane / kMaxPairTopk, slot = lane % kMaxPairTopk;
  LoadingId loading;
  if (slot < params.decode.ids.topk && member < tokens) {
    loading = start_load_id(params.decode.ids, head, first_token + member, slot);
  }
  prefetch_inputs(params.decode, guess, head, first_token, split, tokens);
  // What takes long to compute and waits for nothing, while those are on their way.
  PartCopy copy(own == 0 ? attend.k_cache : attend.v_cache, head, own != 0);
  compute_here(copy.data);
  for (uint32_t& place : copy.places) compute_here(place);
  const char* q_rows[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    q_rows[r] = Query<Element>::row_of(attend.q, first_token + min(own, tokens - 1), head * group,
                                       group, r);
    compute_here(q_rows[r]);
  }
  const KeyRow key_rows[kTokens] = {find_row<true>(params.decode, first_token, guess),
                                    find_row<true>(params.decode, first_token + second, guess)};
  const KeyRow key_row = member == 0 ? key_rows[0] : key_rows[1];
  const int64_t id = whole_id(params.decode.ids, loading);
  const bool counts = member < tokens && slot < key_row.blocks && id >= 0 &&
                      id < visible_blocks(batch, key_row.pos);
  int32_t page = -1;
  if (counts) page = page_of(batch, key_row.request, id);
  Query<Element> query;
#pragma unroll
  for (int r = 0; r < 2; ++r) query.load_row(r, q_rows[r]);
  const PairUnion blocks(counts, static_cast<int32_t>(id), page,
                         key_rows[0].request == key_rows[1].request);

  const int slices = blocks.count * S::kPerBlock, stride = splits * kRings;
  const int32_t first_slice = ring * splits + split;
  const int own_bit = 1 << own;
  const int32_t own_end = own == 0 ? key_rows[0].pos + 1 : key_rows[1].pos + 1;
  const int32_t other_end = own == 0 ? key_rows[1].pos + 1 : key_rows[0].pos + 1;
  const uint32_t stages = shared_address(shared.ring[ring]);
  // Of the ring's slice `lane`, at most 32: where the warp's part of it lies, and seen + 32 copied:
  // how many of its keys the warp's token sees, and how many either does.
  const auto lane_slice = static_cast<uint32_t>(first_slice + lane * stride);
  const int32_t lane_first = lane_slice % S::kPerBlock * S::kTokens;
  const int32_t lane_block = __shfl_sync(kAllLanes, blocks.block, lane_slice / S::kPerBlock % 32);
  const int32_t lane_page = __shfl_sync(kAllLanes, blocks.page, lane_slice / S::kPerBlock % 32);
  const int64_t lane_offset = lane_page * copy.page + lane_first * copy.token;
  int32_t lane_tokens = 0;
  if (lane_slice < static_cast<uint32_t>(slices) && lane_page >= 0 && lane_page < attend.k_cache.num_pages) {
    const int32_t begin = lane_block / 4 * kBlock + lane_first;
    const auto seen_by = [&](int32_t end) { return max(0, min(S::kTokens, end - begin)); };
    const int seen = lane_block & own_bit ? seen_by(own_end) : 0;
    const int other = lane_block & (3 - own_bit) ? seen_by(other_end) : 0;
    lane_tokens = seen + 32 * max(seen, other);
  }
  const auto has = [&](int32_t index) { return first_slice + index * stride < slices; };
  // Begins to bring the warp's part of a slice.
  const auto fetch = [&](int stage, int32_t index) {
    if (has(index)) {
      const int64_t offset = __shfl_sync(kAllLanes, lane_offset, index);
      const int copied = __shfl_sync(kAllLanes, lane_tokens, index) / 32;
      if (copied > 0) copy(stages + (2 * stage + own) * kPartBytes, offset, copied);
    }
    commit_async_copies();
  };
#pragma unroll 1
  for (int stage = 0; stage < kPairStages - 1; ++stage) fetch(stage, stage);

  query.prepare(attend.scale * kLog2E);
  Rows<Element> rows;
  rows.clear();
  wait_async_copies<kPairStages - 2>();
  int stage = 0, free_stage = kPairStages - 1;
#pragma unroll 1
  for (int32_t index = 0; has(index); ++index) {
    hopper::named_barrier(1 + ring, kTokens * 32);
    fetch(free_stage, index + kPairStages - 1);
    const int32_t counted = __shfl_sync(kAllLanes, lane_tokens, index), seen = counted % 32;
    if (seen > 0) {
      const uint32_t k = stages + 2 * stage * kPartBytes, v = k + kPartBytes;
      float s[S::kColumns][4], factor[2];
      uint32_t p[S::kColumns][2];
      score(query, k, s);
      rows.softmax(s, seen, query.scale, p, factor);
      if (__any_sync(kAllLanes, any_shrinks(factor))) rows.shrink(factor);
      if (seen == counted / 32) {
        rows.add_values(v, p);
      } else {  // the other token sees more: what it does may be NaN
        const auto mask = [&](int token) {
          return (token < seen ? 0x0000ffffu : 0) | (token + 1 < seen ? 0xffff0000u : 0);
        };
        const uint32_t mask_low = mask(lane % 4 * 2), mask_high = mask(lane % 4 * 2 + 8);
        for_value_operands<Element>(v, 0, [&](int n, uint32_t b0, uint32_t b1) {
          rows.multiply(p, 0, n, b0 & mask_low, b1 & mask_high);
        });
      }
    }
    wait_async_copies<kPairStages - 2>();
    free_stage = stage;
    stage = stage + 1 == kPairStages ? 0 : stage + 1;
  }
  wait_async_copies<0>();
  hopper::named_barrier(1 + ring, kTokens * 32);
  rows.store(shared.o(own, ring), shared.state[own][ring]);
  start_next_kernel();
  __syncthreads();

  // The warp's rows side by side; past the last row that one again, which is not sent.
  constexpr int kTurns = (kTokens * kRows + kWarps - 1) / kWarps;
  const int unit_rows = kTokens * group;
  float4 parts[kTurns];
  float2 states[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int pair_row = min(warp + turn * kWarps, unit_rows - 1);
    const int token = pair_row >= group, row = pair_row - token * group;
    parts[turn] = merge_parts<kRings>(
        kRings, [&](int part) { return shared.state[token][part][row]; },
        [&](int part) {
          return reinterpret_cast<const float4*>(shared.o(token, part) + row * kOStride)[lane];
        },
        states[turn].x, states[turn].y);
  }
  hopper::cluster_wait();
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int pair_row = warp + turn * kWarps;
    if (pair_row >= unit_rows) break;
    const int owner = pair_row * params.inverse_r >> 16;
    const int place = split * params.rows + pair_row - owner * params.rows;
    const uint32_t arrived = hopper::cluster_address(shared_address(&shared.arrived), owner);
    hopper::cluster_send(
        hopper::cluster_address(shared_address(&shared.inbox[place * 32 + lane]), owner),
        parts[turn], arrived);
    if (lane == 0) {
      hopper::cluster_send(
          hopper::cluster_address(shared_address(&shared.inbox_state[place]), owner), states[turn],
          arrived);
    }
  }
  if (warp >= own_rows) return;
  hopper::barrier_wait_cluster(&shared.arrived, 0);
  for (int own_row = warp; own_row < own_rows; own_row += kWarps) {
    const int pair_row = split * params.rows + own_row, token = pair_row >= group;
    if (token >= tokens) continue;
    const auto state = [&](int part) { return shared.inbox_state[part * params.rows + own_row]; };
    const auto value = [&](int part) {
      return shared.inbox[(part * params.rows + own_row) * 32 + lane];
    };
    float maximum, sum;
    const float4 o = merge_parts<kMaxPairSplits>(splits, state, value, maximum, sum);
    store_result(attend, first_token + token, head, pair_row - token * group, o, maximum, sum,
                 1.0f);
  }
}

}  // namespace msa::decode::sm90
