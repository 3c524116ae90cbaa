// Step 4, sparse_decode and paged_decode on Hopper, calls so small that every CTA has an SM of its
// own, or half of one: the portable kernel's math (sm80/decode_walk.cuh) with W warps, 8 or 4, that
// share their softmax and split D, so that a CTA has one part of a row and no merge of warps; the
// parts of a unit, one a CTA, meet in a cluster.
//
// Grid      splits x T x Hkv, the splits of a unit one cluster of 1 to 16 CTAs.
// Rounds    slice i of a unit belongs to CTA i % splits, there to warp i / splits % W: a round is W
//           slices of a CTA, and what is left for the last round is spread over the CTAs.
// Roles     all warps alike. Of a round's slice of its own a warp brings K and V and computes S; of
//           all W it computes 128 / W of O's columns.
// Registers q as 16 rows (G heads, the last one repeated); o of 16 x (128 / W), even and odd slices
//           in sums of their own; what to fetch of the warp's next 32 slices, one a lane.
// Shared    of 8 warps, and of 4, two CTAs an SM:
//           ring     W warps x 2 stages x (K 4096, V 4096)          131,072     65,536
//           table    the first 1,024 pages of the guessed request's row, over the first warp's
//                    last stage, which round 1 is fetched to
//           weights  q, then P of a round as operands, 16 bytes a
//                    lane                                             8,192      4,096
//           maxima, sums  [row][warp]                                 1,024        512
//           inbox    [split][row of this CTA][D] floats,
//                    as the senders have them                        16,384     12,288
//           inbox_state  [split][row of this CTA] (m, l). CTA r merges the R rows from r * R on,
//                    R = ceil(G / splits).
// Timeline  ids, position, copies of table and q, scales: none waits for another | pages, from the
//           table | fetch K of round 0 | q | fetch V, then each round:
//           wait K | S = Q K^T | fetch K of round + 1 | row maxima | __syncthreads | P | fetch V of
//           round + 1 | wait V | __syncthreads | O += P V. A cp.async group each. Reads of shared
//           memory wait in line behind copies that were asked for before them, which come as fast
//           as L2 answers: so no more is asked for than keeps L2 busy, and behind what is read
//           next. Pages that are not in the table are loaded behind the ids; all of them again
//           where the guess was wrong. paged_decode needs no ids: it loads pages beside the
//           position. Then o goes to the CTAs that own its rows; they merge the parts and store.
//           One launch, no workspace.
// Barriers  __syncthreads before the rounds: the table is there; then q is there, the table has
//           been read. 1st of a round: the maxima are there, q and V of the round before have been
//           read; 2nd: P and V are there, the maxima have been read.
//           cluster  arrive at the start, wait before the first send: every CTA has started.
//           arrived  1 arrival, and the bytes of all parts of this CTA's rows. Nobody touches the
//                    memory of a CTA after that, so CTAs end when they like. Not of a CTA alone:
//                    __syncthreads behind its stores.
// Unseen    as in the walk, but V of a slice that does not count is zeroed: all multiply it by 0.
// Order     a CTA's rounds, in them the slices of even warps and those of odd ones, ascending;
//           then even + odd; then splits, ascending.
#pragma once

#include "device/sm90/cluster.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/table_row.cuh"
#include "step4_attend/sm80/decode_walk.cuh"

namespace msa::decode::sm90 {

using namespace msa::decode::sm80;
namespace hopper = msa::sm90;

constexpr int kVectorColumns = 16;  // of o, what a warp owns one or two of
constexpr int kRounds = 2;          // stages of a warp's ring
static_assert(kTableRowPages * sizeof(int32_t) <= 2 * kPartBytes, "a stage of a warp");

struct ClusterParams {
  DecodeParams decode;
  int32_t rows;       // R
  int32_t inverse_r;  // row / R = row * inverse_r >> 16
};

// Four warps: two CTAs an SM.
template <int kWarpCount>
struct ClusterStorage {
  static constexpr int kWarps = kWarpCount;
  static constexpr int kMaxSplits = kWarps == 8 ? kMaxClusterSplits : 8;
  static constexpr int kInboxRows = kRows + kMaxSplits;  // splits * ceil(G / splits) is less
  alignas(1024) uint8_t ring[kWarps][kRounds][2][kPartBytes];
  uint4 weights[kWarps * 2 * 32];
  alignas(16) float maxima[kRows][kWarps];
  alignas(16) float sums[kRows][kWarps];
  alignas(16) float4 inbox[kInboxRows * kHeadDim / 4];
  float2 inbox_state[kInboxRows];
  uint64_t arrived;
};
static_assert(sizeof(ClusterStorage<8>) <= 227 * 1024, "shared memory of one CTA");
static_assert(2 * (sizeof(ClusterStorage<4>) + 1024) <= 228 * 1024, "two CTAs an SM");

// Has what is not copied of the table row of the request that the token is probably of come to L2,
// a part by each CTA of it, while position and ids are on their way.
__device__ __forceinline__ void prefetch_table(const DecodeParams& params, const TableRow& row,
                                               bool there, int64_t head, int32_t split) {
  constexpr int32_t kEntries = 128 / sizeof(int32_t);  // of a line
  const BatchView& batch = params.attend.batch;
  if (batch.table_col_stride != 1 || !there || row.copied >= batch.max_pages) return;
  const auto ctas = static_cast<int32_t>(params.attend.num_kv_heads) * params.splits;
  const auto cta = static_cast<int32_t>(head) * params.splits + split;
  const int32_t entry = static_cast<int32_t>(row.copied) +
                        (static_cast<int32_t>(threadIdx.x) * ctas + cta) * kEntries;
  if (entry < batch.max_pages) prefetch_to_l2(row.pages + entry);
}

// The largest, or the sum, of a row's values, one a warp.
template <int kWarps>
__device__ __forceinline__ float largest_of(const float (&values)[kWarps]) {
  const auto* fours = reinterpret_cast<const float4*>(values);
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kWarps / 4; ++i) {
    const float4 it = fours[i];
    largest = fmaxf(largest, fmaxf(fmaxf(it.x, it.y), fmaxf(it.z, it.w)));
  }
  return largest;
}
template <int kWarps>
__device__ __forceinline__ float sum_of(const float (&values)[kWarps]) {
  const auto* fours = reinterpret_cast<const float4*>(values);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps / 4; ++i) {
    const float4 it = fours[i];
    sum += (it.x + it.y) + (it.z + it.w);
  }
  return sum;
}

// What a warp holds of the CTA's part: one or two vectors of 16 columns of 16 rows; of a lane rows
// g and g + 8. Tile n of a vector: bf16: columns 8 n + 2 t and the next; FP8: 4 t + n and 4 t + n
// + 2.
template <typename Element, int kWarps>
struct ClusterRows {
  using S = Slice<Element>;
  using Storage = ClusterStorage<kWarps>;
  static constexpr int kVectors = kHeadDim / kVectorColumns / kWarps;
  static constexpr int kSteps = S::kTokens / 16;
  static constexpr float kFirstWeight = Rows<Element>::kFirstWeight;
  float o[kVectors][2][2][4] = {};                         // [slice % 2][tile]
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {};  // the CTA's; of the lane's own columns

  // s -> logits; their largest to shared.maxima.
  __device__ __forceinline__ void store_maxima(Storage& shared, int warp,
                                               float (&s)[S::kColumns][4], int valid,
                                               const float (&scale)[2]) {
    const int row = threadIdx.x % 32 / 4;
    float largest[2];
    scale_logits(s, valid, scale, largest);
    if (threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) shared.maxima[row + 8 * r][warp] = largest[r];
  }

  // Logits -> P to shared.weights; o shrinks to the new maximum.
  __device__ __forceinline__ void store_weights(Storage& shared, int warp,
                                                const float (&s)[S::kColumns][4]) {
    const int lane = threadIdx.x % 32, row = lane / 4;
    float reference[2], factor[2], added[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float largest =
          fmaxf(largest_of(shared.maxima[row + 8 * r]) - kFirstWeight, maximum[r]);
      reference[r] = reference_of(largest);
      factor[r] = exp2_fast(maximum[r] - reference[r]);
      maximum[r] = largest;
    }
    uint32_t p[S::kColumns][2];
#pragma unroll
    for (int tile = 0; tile < S::kColumns; ++tile) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float first = exp2_fast(s[tile][2 * r] - reference[r]);
        const float second = exp2_fast(s[tile][2 * r + 1] - reference[r]);
        added[r] += first + second;
        p[tile][r] = pack_weights<Element>(first, second);
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      shared.weights[(warp * kSteps + step) * 32 + lane] =
          make_uint4(p[2 * step][0], p[2 * step][1], p[2 * step + 1][0], p[2 * step + 1][1]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = sum[r] * factor[r] + added[r];
#pragma unroll
    for (auto& vector : o) {
#pragma unroll
      for (auto& slices : vector) {
#pragma unroll
        for (auto& tile : slices) {
#pragma unroll
          for (int i = 0; i < 4; ++i) tile[i] *= factor[i / 2];
        }
      }
    }
  }

  // The warp's share of l, after its last round.
  __device__ __forceinline__ void store_sums(Storage& shared, int warp) {
    const int row = threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float whole = sum[r] + __shfl_xor_sync(kAllLanes, sum[r], 1);
      whole += __shfl_xor_sync(kAllLanes, whole, 2);
      if (threadIdx.x % 4 == 0) shared.sums[row + 8 * r][warp] = whole;
    }
  }

  // o += P V of the round's slices; `values`: where the lane reads V of slice 0.
  __device__ __forceinline__ void add_values(const Storage& shared,
                                             const uint32_t (&values)[kVectors]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int slice = 0; slice < kWarps; ++slice) {
      uint32_t b[kVectors][4];
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        load_matrices_transposed(b[vector], values[vector] + slice * sizeof(shared.ring[0]));
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint4 p = shared.weights[(slice * kSteps + step) * 32 + lane];
        const uint32_t a[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector) {
          auto& sums = o[vector][slice % 2];
          const uint32_t (&v)[4] = b[vector];
          if constexpr (S::kFp8) {  // of two tokens d and d + 1: by d, then by token
            uint32_t low[2], high[2];
            fp8_to_f16(__byte_perm(v[2 * step], 0, 0x3120), low[0], high[0]);
            fp8_to_f16(__byte_perm(v[2 * step + 1], 0, 0x3120), low[1], high[1]);
            multiply_f16(sums[0], a, low[0], low[1]);
            multiply_f16(sums[1], a, high[0], high[1]);
          } else {
            multiply_bf16(sums[0], a, v[0], v[1]);
            multiply_bf16(sums[1], a, v[2], v[3]);
          }
        }
      }
    }
  }

  // Where the lane reads 16 columns of the V at `v`: of bf16 two vectors of 16 tokens, of FP8 one
  // of 32.
  static __device__ __forceinline__ uint32_t value_address(uint32_t v, int columns) {
    const int lane = threadIdx.x % 32, token = S::kFp8 ? lane : lane % 16;
    const int vector = S::kFp8 ? columns : 2 * columns + lane / 16;
    return v + token * S::kRowBytes + (vector ^ token % 8) * 16;
  }

  // The lane's columns of a vector in row g + 8 r.
  __device__ __forceinline__ float4 columns(int vector, int r) const {
    const auto whole = [&](int tile, int i) {
      return o[vector][0][tile][2 * r + i] + o[vector][1][tile][2 * r + i];
    };
    if constexpr (S::kFp8) return make_float4(whole(0, 0), whole(1, 0), whole(0, 1), whole(1, 1));
    return make_float4(whole(0, 0), whole(0, 1), whole(1, 0), whole(1, 1));
  }
};

template <typename Element, bool kSparse, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 8 / kWarps)
    msa_decode_cluster_sm90_kernel(const __grid_constant__ ClusterParams params) {
  using S = Slice<Element>;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  auto& shared = *reinterpret_cast<ClusterStorage<kWarps>*>(shared_memory);
  const AttendParams& attend = params.decode.attend;
  const auto split = static_cast<int32_t>(blockIdx.x), token = static_cast<int32_t>(blockIdx.y);
  const int64_t head = blockIdx.z;
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
  const int group = static_cast<int>(attend.group_size), splits = params.decode.splits;
  const int own_rows = min(params.rows, max(0, group - split * params.rows));
  // A cluster of one CTA has nobody to send to. Four warps are never alone: their cut has parts.
  const bool alone = kWarps == 8 && splits == 1;
  wait_for_previous_kernel();

  // Ids, table, position and q do not wait for each other, and nothing else is done before they are
  // asked for. The table comes to where round 1 will lie, which is fetched behind the
  // __syncthreads() that q is waited for in; q to where the weights of round 0 will lie: asked for
  // in registers, it would be waited for before pages are looked up. The row of a paged_decode
  // token needs no id: its pages are asked for at once.
  const BatchView& batch = attend.batch;
  const auto lane_warp = static_cast<int32_t>(threadIdx.x / 32);  // without waiting for the shuffle
  WarpSlices<Element, kSparse, kSparse> slices{params.decode, head, token,
                                               lane_warp * splits + split, splits * kWarps};
  const int32_t lane_slot = slices.slot_of(lane);
  const LoadingId lane_id = slices.id_of(lane_slot);
  __syncwarp();  // the compiler would put them behind what follows
  const PositionGuess guess = guess_row<kSparse>(params.decode, token);
  __syncwarp();
  const bool guesses = guess.request >= 0;
  auto* const table = reinterpret_cast<int32_t*>(shared.ring[0][kRounds - 1]);
  const TableRow first_pages = copy_table_row<kSparse ? kTableRowPages : 0>(
      batch, guess.request, guesses, table, kWarps * 32);
  int32_t page = -1;
  __syncwarp();
  if (!kSparse) first_pages.load_others(batch, guesses, lane_slot, page);
  Query<Element>::template fetch<kWarps * 32>(shared.weights, attend.q, token,
                                              head * attend.group_size, group);
  const float k_scale = load_scale(attend.k_scale, head);
  const float v_scale = load_scale(attend.v_scale, head);
  if (kSparse) prefetch_table(params.decode, first_pages, guesses, head, split);

  // While they are on their way.
  if (threadIdx.x == 0 && !alone) {
    hopper::barrier_init(&shared.arrived, 1);
    hopper::fence_barrier_init();
    hopper::barrier_arrive_expect(&shared.arrived,
                                  splits * own_rows * (kHeadDim * sizeof(float) + sizeof(float2)));
  }
  __syncwarp();
  hopper::cluster_arrive_relaxed();
  uint32_t ring = shared_address(shared.ring);
  compute_here(ring);
  const auto stage_address = [&](int owner, int32_t round) {
    return ring + static_cast<uint32_t>((owner * kRounds + round % kRounds) * 2 * kPartBytes);
  };
  const LaneCopy<Element, true> copy(attend, head);
  compute_here(copy.k);
  compute_here(copy.v);

  const auto block = static_cast<uint32_t>(lane_id.low);
  if (kSparse) first_pages.load_others(batch, guesses, block, page);
  slices.find(guess);
  const int32_t tokens = slices.tokens_of(lane, lane_id);
  const bool is_right = slices.row.request == guess.request;
  if (!is_right) page = slices.page_of_counting(tokens, slices.block_of(lane, lane_id));
  if (kSparse) {
    wait_async_copies<1>();  // behind the table: q
    __syncthreads();
    if (is_right && block < first_pages.copied) {
      page = static_cast<int32_t>(load_shared_4(stage_address(0, kRounds - 1) + block * 4));
    }
  }
  slices.ahead = slices.source_of(tokens, page);

  // Whether the CTA, not just this warp, has a round of that number.
  const auto is_round = [&](int32_t round) { return round * slices.turn < slices.count; };
  // Begins to bring K, then V, of the warp's slice of a round, a group of copies each.
  const auto fetch_k = [&](int32_t round) {
    SliceTokens tokens{};
    if (is_round(round)) {
      tokens = slices.get(round);
      copy.copy_k(stage_address(warp, round), tokens);
    } else {
      commit_async_copies();
    }
    return tokens;
  };
  const auto fetch_v = [&](int32_t round, const SliceTokens& tokens) {
    if (is_round(round)) {
      copy.copy_v(stage_address(warp, round) + kPartBytes, tokens);
    } else {
      commit_async_copies();
    }
  };
  SliceTokens next = fetch_k(0);
  int valid = next.valid;  // of the round's slice

  Query<Element> query;
  wait_async_copies<1>();  // behind q: K
  __syncthreads();
  query.load_fetched(shared.weights);
  fetch_v(0, next);
  query.prepare(attend.scale * k_scale * kLog2E);
  ClusterRows<Element, kWarps> rows;
#pragma unroll 1
  for (int32_t round = 0; is_round(round); ++round) {
    wait_async_copies<1>();  // behind K: V
    __syncwarp();
    float s[S::kColumns][4] = {};
    if (valid > 0) score(query, stage_address(warp, round), s);
    next = fetch_k(round + 1);
    rows.store_maxima(shared, warp, s, valid, query.scale);
    __syncthreads();
    rows.store_weights(shared, warp, s);
    fetch_v(round + 1, next);
    if (!is_round(round + 1)) rows.store_sums(shared, warp);
    wait_async_copies<2>();  // behind V: both of the next round
    __syncthreads();
    uint32_t values[rows.kVectors];
#pragma unroll
    for (int vector = 0; vector < rows.kVectors; ++vector) {
      values[vector] =
          rows.value_address(stage_address(0, round) + kPartBytes, warp * rows.kVectors + vector);
    }
    rows.add_values(shared, values);
    valid = next.valid;
  }
  start_next_kernel();

  const auto deliver = [&](auto* place, const auto& value, int owner, uint32_t arrived) {
    if (alone) {
      *place = value;
    } else {
      hopper::cluster_send(hopper::cluster_address(shared_address(place), owner), value, arrived);
    }
  };
  hopper::cluster_wait();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    if (row >= group) break;
    const int owner = row * params.inverse_r >> 16;
    const int place = split * params.rows + row - owner * params.rows;
    const uint32_t arrived = hopper::cluster_address(shared_address(&shared.arrived), owner);
#pragma unroll
    for (int vector = 0; vector < rows.kVectors; ++vector) {
      const int columns = (warp * rows.kVectors + vector) * 4 + lane % 4;
      deliver(&shared.inbox[place * 32 + columns], rows.columns(vector, r), owner, arrived);
    }
    if (warp == 0 && lane % 4 == 0) {
      const float sum = slices.count > 0 ? sum_of(shared.sums[row]) : 0.0f;
      deliver(&shared.inbox_state[place], make_float2(rows.maximum[r], sum), owner, arrived);
    }
  }
  if (alone) __syncthreads();
  if (warp >= own_rows) return;
  if (!alone) hopper::barrier_wait_cluster(&shared.arrived, 0);
  for (int own = warp; own < own_rows; own += kWarps) {
    const auto state = [&](int part) { return shared.inbox_state[part * params.rows + own]; };
    const auto value = [&](int part) {
      return shared.inbox[(part * params.rows + own) * 32 + lane];
    };
    float maximum, sum;
    const float4 o = splits <= 4 ? merge_parts<4>(splits, state, value, maximum, sum)
                                 : merge_parts<ClusterStorage<kWarps>::kMaxSplits>(
                                       splits, state, value, maximum, sum);
    store_result<!S::kFp8>(attend, token, head, split * params.rows + own, o, maximum, sum,
                           v_scale);
  }
}

}  // namespace msa::decode::sm90
