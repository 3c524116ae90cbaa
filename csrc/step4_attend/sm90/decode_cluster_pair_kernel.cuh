// Step 4, sparse_decode on Hopper, draft tokens of few requests: the cluster kernel
// (decode_cluster_kernel.cuh) for two neighbouring tokens, which walk the union of their blocks,
// each slice brought to shared memory once for both. Where a call is small its data is in L2 but
// for the first reader, and what L2 brings to all SMs bounds it: 8 coherent tokens a request read
// 18 blocks a pair instead of 32.
//
//   of each token, over its own blocks: the math of sm80/decode_walk.cuh
//
// Grid      splits x pairs x Hkv, the splits of a pair one cluster of 1 to 8 CTAs, one an SM. A
//           pair is tokens 2 i and 2 i + 1, of one request or not; the last one may be alone.
// Union     by every warp for itself, an entry of ids a lane, token after token: lane i gets block
//           i of the union. Entries are one block where request and id are; the n-th entry of one
//           id of one token goes with the n-th of the other. Found while the pages are on their
//           way.
// Rounds    as in the cluster kernel, over the slices of the union.
// Registers q and o of both tokens; a block of the union a lane.
// Shared    ring     8 warps x 3 stages x (K 4096, V 4096), boxes     196,608
//           weights  [token] P of a round as operands                   8,192
//           seen     [token][warp][quad]: which of V's rows of the round's slices count, as masks
//                    of the lanes' operands                               512
//           maxima, sums  [token][row][warp]                            2,048
//           inbox    [split][row of this CTA][D] floats                20,480
//           inbox_state  the same of (m, l). Row r of a pair is head r % G of token r / G; CTA s
//                    merges the R rows from s * R on, R = ceil(2 G / splits).
// Timeline, barriers  those of the cluster kernel.
// Unseen    keys past a token's pos, and slices of blocks that it did not select: masked in S, and
//           in V's operands, since another token's V, or what lay in shared memory, may be NaN.
// Order     of a token's slices: by the pair's union. So a token's bits depend on which blocks the
//           token beside it selected; they are the same on every run.
// Limits    bfloat16 caches that fits_tensor_maps(), K up to 16.
#pragma once

#include "step4_attend/sm90/decode_cluster_kernel.cuh"

namespace msa::decode::sm90 {

constexpr int kClusterPairTokens = 2, kClusterPairWarps = 8, kMaxPairSplits = 8;
constexpr int kMaxPairTopk = 16;  // a warp has a lane for each entry of two tokens

struct PairClusterStorage {
  static constexpr int kWarps = kClusterPairWarps, kTokens = kClusterPairTokens;
  static constexpr int kInboxRows = kTokens * kRows + kMaxPairSplits;  // splits * R is less
  alignas(1024) uint8_t ring[kWarps][kStages][2][kPartBytes];
  uint4 weights[kTokens][kWarps * 32];
  uint2 seen[kTokens][kWarps][4];
  alignas(16) RowValues<kWarps> maxima[kTokens];
  alignas(16) RowValues<kWarps> sums[kTokens];
  alignas(16) float4 inbox[kInboxRows * kHeadDim / 4];
  float2 inbox_state[kInboxRows];
  uint64_t k_full[kWarps][kStages], v_full[kWarps][kStages];
  uint64_t arrived;
};
static_assert(sizeof(PairClusterStorage) <= 227 * 1024, "shared memory of one CTA");

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

// Both tokens' S of a slice; K is read once.
__device__ __forceinline__ void score_both(const Query<__nv_bfloat16> (&query)[2], uint32_t k,
                                           float (&s)[2][2][4]) {
  using S = Slice<__nv_bfloat16>;
  const uint32_t address = box_key_address<__nv_bfloat16>(k);
#pragma unroll
  for (int tile = 0; tile < S::kColumns; ++tile) {
    float odd[2][4] = {};
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      const uint4 bits = load_shared_16((address ^ part % 2 * 64) + part / 2 * S::kHalfBytes +
                                        tile * 8 * S::kBoxRowBytes);
#pragma unroll
      for (int token = 0; token < 2; ++token) {
        multiply_bf16(s[token][tile], query[token].a[part * 2], bits.x, bits.y);
        multiply_bf16(odd[token], query[token].a[part * 2 + 1], bits.z, bits.w);
      }
    }
#pragma unroll
    for (int token = 0; token < 2; ++token) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[token][tile][i] += odd[token][i];
    }
  }
}

// Of V's operands a lane of quad place `quad` holds tokens quad, quad + 4 and both again 8 further
// on: the bits of those under `valid`.
__device__ __forceinline__ uint2 seen_mask(int quad, int valid) {
  const auto mask = [&](int token) {
    return (token < valid ? 0x0000ffffu : 0) | (token + 4 < valid ? 0xffff0000u : 0);
  };
  return make_uint2(mask(quad), mask(quad + 8));
}

static __global__ void __launch_bounds__(kClusterPairWarps * 32, 1)
    msa_decode_cluster_pair_sm90_kernel(const __grid_constant__ ClusterParams params,
                                        const __grid_constant__ CUtensorMap k_map,
                                        const __grid_constant__ CUtensorMap v_map) {
  using Element = __nv_bfloat16;
  using S = Slice<Element>;
  constexpr int kWarps = kClusterPairWarps, kTokens = kClusterPairTokens;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  auto& shared = *reinterpret_cast<PairClusterStorage*>(shared_memory);
  const AttendParams& attend = params.decode.attend;
  const BatchView& batch = attend.batch;
  const auto split = static_cast<int32_t>(blockIdx.x), head = static_cast<int32_t>(blockIdx.z);
  const auto first_token = static_cast<int32_t>(blockIdx.y) * kTokens;
  const int tokens = min(kTokens, static_cast<int32_t>(batch.num_tokens) - first_token);
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
  const int group = static_cast<int>(attend.group_size), splits = params.decode.splits;
  const int own_rows = min(params.rows, max(0, kTokens * group - split * params.rows));
  if (hopper::elect_one()) {  // by a lane each, the assembler would make a loop over the lanes
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::barrier_init(&shared.k_full[warp][stage], 1);
      hopper::barrier_init(&shared.v_full[warp][stage], 1);
    }
  }
  if (threadIdx.x == 0) {
    hopper::prefetch_tensor_map(&k_map);
    hopper::prefetch_tensor_map(&v_map);
    hopper::barrier_init(&shared.arrived, 1);
  }
  hopper::fence_barrier_init();
  if (threadIdx.x == 0) {
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
  const KeyRow key_rows[kTokens] = {find_row<true>(params.decode, first_token, guess),
                                    find_row<true>(params.decode, first_token + second, guess)};
  const KeyRow key_row = member == 0 ? key_rows[0] : key_rows[1];
  const int64_t id = whole_id(params.decode.ids, loading);
  const bool counts = member < tokens && slot < key_row.blocks && id >= 0 &&
                      id < visible_blocks(batch, key_row.pos);
  int32_t page = -1;
  if (counts) page = page_of(batch, key_row.request, id);
  Query<Element> query[kTokens];
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    query[token].load(attend.q, first_token + min(token, second), int64_t{head} * group, group);
  }
  const PairUnion blocks(counts, static_cast<int32_t>(id), page,
                         key_rows[0].request == key_rows[1].request);

  const int32_t slices = blocks.count * S::kPerBlock, turn = splits * kWarps;
  // Whether the CTA, not just this warp, has a round of that number.
  const auto is_round = [&](int32_t round) { return round * turn < slices; };
  const SliceBoxes boxes(params.decode, k_map, v_map, head);
  // Begins to bring the warp's slice of a round. Returns how many of its keys each token sees.
  const auto fetch = [&](int stage, int32_t round) {
    int2 seen = make_int2(0, 0);
    if (!is_round(round)) return seen;
    const int32_t slice = round * turn + warp * splits + split;
    const int32_t block = __shfl_sync(kAllLanes, blocks.block, slice / S::kPerBlock % 32);
    SliceTokens source;
    source.page = __shfl_sync(kAllLanes, blocks.page, slice / S::kPerBlock % 32);
    source.first = slice % S::kPerBlock * S::kTokens;
    if (slice < slices && source.page >= 0 && source.page < attend.k_cache.num_pages) {
      const int32_t begin = block / 4 * kBlock + source.first;
      if (block & 1) seen.x = max(0, min(S::kTokens, key_rows[0].pos + 1 - begin));
      if (block & 2) seen.y = max(0, min(S::kTokens, key_rows[1].pos + 1 - begin));
    }
    if (hopper::elect_one()) {
      uint64_t *k_full = &shared.k_full[warp][stage], *v_full = &shared.v_full[warp][stage];
      if (seen.x > 0 || seen.y > 0) {
        hopper::barrier_arrive_expect(k_full, kPartBytes);
        boxes.copy_k(shared.ring[warp][stage][0], source, k_full);
        hopper::barrier_arrive_expect(v_full, kPartBytes);
        boxes.copy_v(shared.ring[warp][stage][1], source, v_full);
      } else {
        hopper::barrier_arrive(k_full);
        hopper::barrier_arrive(v_full);
      }
    }
    return seen;
  };
  int2 seen = make_int2(0, 0), next_seen = make_int2(0, 0);  // of this round and of the next one
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) {
    seen = next_seen;
    next_seen = fetch(stage, stage);
  }

#pragma unroll
  for (auto& it : query) it.prepare(attend.scale * kLog2E);
  using TokenRows = ClusterRows<Element, kWarps>;
  static_assert(TokenRows::kVectors == 1 && TokenRows::kSteps == 1, "a vector a warp, a step");
  TokenRows rows[kTokens];
  hopper::RingPosition<kStages> ring;
#pragma unroll 1
  for (int32_t round = 0; is_round(round); ++round) {
    const int stage = ring.stage;
    hopper::barrier_wait(&shared.k_full[warp][stage], ring.phase);
    float s[kTokens][S::kColumns][4] = {};
    if (seen.x > 0 || seen.y > 0) {
      score_both(query, shared_address(shared.ring[warp][stage][0]), s);
    }
    rows[0].store_maxima(shared.maxima[0], warp, s[0], seen.x, query[0].scale);
    rows[1].store_maxima(shared.maxima[1], warp, s[1], seen.y, query[1].scale);
    __syncthreads();
    const int2 later_seen = fetch(stage == 0 ? kStages - 1 : stage - 1, round + 2);
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      rows[token].store_weights(shared.maxima[token], shared.weights[token] + warp * 32, s[token]);
      if (!is_round(round + 1)) rows[token].store_sums(shared.sums[token], warp);
    }
    if (lane < kTokens * 4) {
      shared.seen[lane / 4][warp][lane % 4] = seen_mask(lane % 4, lane < 4 ? seen.x : seen.y);
    }
    hopper::barrier_wait(&shared.v_full[warp][stage], ring.phase);
    __syncthreads();
    const uint32_t values =
        TokenRows::value_address(shared_address(shared.ring[0][stage][1]), warp);
#pragma unroll
    for (int slice = 0; slice < kWarps; ++slice) {
      uint32_t v[4];
      load_matrices_transposed(v, values + slice * sizeof(shared.ring[0]));
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        const uint4 p = shared.weights[token][slice * 32 + lane];
        const uint2 mask = shared.seen[token][slice][lane % 4];
        const uint32_t a[4] = {p.x, p.y, p.z, p.w};
        auto& sums = rows[token].o[0][slice % 2];
        multiply_bf16(sums[0], a, v[0] & mask.x, v[1] & mask.y);
        multiply_bf16(sums[1], a, v[2] & mask.x, v[3] & mask.y);
      }
    }
    seen = next_seen;
    next_seen = later_seen;
    ring.advance();
  }
  start_next_kernel();

  hopper::cluster_wait();
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane / 4 + 8 * r;
      if (row >= group) break;
      const int pair_row = token * group + row;
      const int owner = pair_row * params.inverse_r >> 16;
      const int place = split * params.rows + pair_row - owner * params.rows;
      const uint32_t arrived = hopper::cluster_address(shared_address(&shared.arrived), owner);
      hopper::cluster_send(
          hopper::cluster_address(shared_address(&shared.inbox[place * 32 + warp * 4 + lane % 4]),
                                  owner),
          rows[token].columns(0, r), arrived);
      if (warp == 0 && lane % 4 == 0) {
        const float sum = slices > 0 ? sum_of(shared.sums[token][row]) : 0.0f;
        hopper::cluster_send(
            hopper::cluster_address(shared_address(&shared.inbox_state[place]), owner),
            make_float2(rows[token].maximum[r], sum), arrived);
      }
    }
  }
  if (warp >= own_rows) return;
  hopper::barrier_wait_cluster(&shared.arrived, 0);
  for (int own = warp; own < own_rows; own += kWarps) {
    const int pair_row = split * params.rows + own, token = pair_row >= group;
    if (token >= tokens) continue;
    const auto state = [&](int part) { return shared.inbox_state[part * params.rows + own]; };
    const auto value = [&](int part) {
      return shared.inbox[(part * params.rows + own) * 32 + lane];
    };
    float maximum, sum;
    const float4 o = merge_parts<kMaxPairSplits>(splits, state, value, maximum, sum);
    store_result<true>(attend, first_token + token, head, pair_row - token * group, o, maximum, sum,
                       1.0f);
  }
}

}  // namespace msa::decode::sm90
