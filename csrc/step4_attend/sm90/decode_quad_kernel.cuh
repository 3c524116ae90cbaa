// Step 4, sparse_decode on Hopper, few requests of several query tokens: four neighbouring tokens
// walk their blocks side by side, and slices that they share are brought to shared memory once. The
// splits of a unit, one a CTA, meet in a cluster.
//
//   of each token, over its own blocks: the math of sm80/decode_walk.cuh; slices as there
//
// Grid      splits x (4 tokens) x Hkv; S splits, 1, 2, 4 or 8, of a unit are one cluster. Tokens of
//           a unit are of one request or not: what they share are pages.
// Cut       CTA c takes slices c, c + S, .. of every block, whatever its rank among a token's
//           blocks: so tokens meet in a slice wherever their lists have it. A token's slices, by
//           rank of the block, then ascending, are its entries; entry e belongs to warp e % 4.
// Roles     warps    does
//           0-15     four of each token. Of a turn of 8 entries each computes S of its two, and 32
//                    of O's columns of all eight. Before that warps 0 to 3 make the list of what to
//                    fetch: entry (rank, token) a thread.
//           16, 17   fetch K of the list's even and odd slices
//           18, 19   V
// Shared    k, v       rings of 21 slices                                  86,016 each
//           weights    [token][entry of a turn][lane]: q, then P of a turn as operands    16,384
//           maxima, sums  [token][row][warp]                                1,024 each
//           inbox      [split][row of this CTA][D] floats                  32,768
//           inbox_state  [split][row of this CTA] (m, l). Rows of a unit: token * G + g; CTA r
//                      merges the R rows from r * R on, R = ceil(4 G / S)
//           list       of blocks to fetch: page, tokens that count, users; by entries' rank, then
//                      token, of their first user
//           entries    page and tokens of (rank, token), and its place in the list
//           The first request's row of the table comes to where K will lie.
// Barriers  k_full, v_full    32: lanes of the warp that fetched, behind their copies
//           k_empty, v_empty  32 and 128: a warp of each entry, four warps of each; the fetching
//                    warp arrives for those that do not exist
//           named 1  128 threads: steps of the list.  2 + token  a token's warps: the maxima are
//                    there, and P of the turn before has been read; P is there.
//           __syncthreads: rows and table are there; the list is.
//           cluster, arrived: as in decode_cluster_kernel.cuh
// Sharing   A slice is fetched for its first user, and kept for entries of ranks up to a window
//           past that (S 8: 4, 4: 2, 2: 1, 1: 0). So a warp never waits for a slice that lies a
//           ring or more behind one that it has yet to read: what it reads before are slices of at
//           most 4 tokens and the window's ranks (docs/kernels/sparse_decode.md). Slices of which
//           tokens see unlike many keys are not shared, so that each has what it does not see
//           zeroed.
// Order     a token's entries, turns of eight; then splits, ascending: its bits do not depend on
//           the tokens beside it.
// Limits    bfloat16, D = 128, G <= 16, K <= 32.
#pragma once

#include "device/sm90/cluster.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/wgmma.cuh"
#include "device/table_row.cuh"
#include "step4_attend/sm80/decode_walk.cuh"

namespace msa::decode::sm90 {

using namespace msa::decode::sm80;
namespace hopper = msa::sm90;

constexpr int kQuadTokens = 4;
constexpr int kTokenWarps = 4;
constexpr int kQuadConsumers = kQuadTokens * kTokenWarps;  // warps
constexpr int kQuadProducers = 2;                          // warps for K, and for V
constexpr int kQuadThreads = (kQuadConsumers + 2 * kQuadProducers) * 32;
constexpr int kTokenThreads = kTokenWarps * 32;
constexpr int kQuadEntries = kQuadTokens * kMaxTopk;  // a thread each
constexpr int kRingSlices = 21;
constexpr int kTurnEntries = 8;
constexpr int kTurnScores = kTurnEntries / kTokenWarps;  // of a warp
constexpr int kQuadVectors = 2;                          // of 16 columns of o, a warp's
constexpr int kQuadRows = kQuadTokens * kRows;
constexpr int kMaxQuadSplits = 8;  // slices of a block
constexpr uint32_t kKUses = 32, kVUses = 128;
constexpr uint32_t kQuadTablePages = 1024;
static_assert(kQuadEntries == kTokenThreads, "the list is made by warps 0 to 3");
static_assert(kQuadVectors * 16 * kTokenWarps == kHeadDim);

struct QuadParams {
  DecodeParams decode;
  int32_t log_splits;
  int32_t rows;           // R
  int32_t inverse_r;      // row / R = row * inverse_r >> 16
  int32_t inverse_group;  // row / G
};

// A block in the list, or of an entry.
struct QuadBlock {
  int32_t page;
  int32_t tokens;  // of the CTA's slices of it, that count
  int32_t users;   // entries
};

struct QuadStorage {
  alignas(1024) uint8_t k[kRingSlices][kPartBytes];
  alignas(1024) uint8_t v[kRingSlices][kPartBytes];
  uint4 weights[kQuadTokens][kTurnEntries * 32];
  alignas(16) float maxima[kQuadTokens][kRows][kTokenWarps];
  alignas(16) float sums[kQuadTokens][kRows][kTokenWarps];
  alignas(16) float4 inbox[kQuadRows * kHeadDim / 4];
  float2 inbox_state[kQuadRows];
  uint64_t k_full[kRingSlices], v_full[kRingSlices];
  uint64_t k_empty[kRingSlices], v_empty[kRingSlices];
  uint64_t arrived;
  int32_t k_slice[kRingSlices], v_slice[kRingSlices];  // which one a place holds, or will
  KeyRow rows[kQuadTokens];
  QuadBlock list[kQuadEntries];
  int32_t listed;
  int2 entries[kQuadEntries];     // [rank][token] page and tokens; page -1: nothing counts
  int32_t firsts[kQuadEntries];   // the first entry that could share with this one
  int32_t users[kQuadEntries];
  int32_t places[kQuadEntries];   // in the list; -1: nothing to fetch
  int32_t warp_listed[kTokenWarps];
};
static_assert(sizeof(QuadStorage) <= 227 * 1024, "shared memory of one CTA");

// How many of the first `seen` tokens of a block lie in slices split, split + S, ..
__device__ __forceinline__ int32_t own_tokens(int32_t seen, int32_t split, int32_t log_splits) {
  constexpr int kLogTokens = 4;
  const int32_t stripes = seen >> (kLogTokens + log_splits);
  const int32_t rest = seen - (stripes << (kLogTokens + log_splits));
  return (stripes << kLogTokens) + min(max(rest - (split << kLogTokens), 0), 1 << kLogTokens);
}

// Entries to the list of what is fetched, by warps 0 to 3, a thread an entry.
__device__ __forceinline__ void make_list(QuadStorage& shared, const QuadBlock& mine,
                                          int32_t window) {
  const int entry = threadIdx.x, lane = entry % 32, warp = entry / 32;
  shared.entries[entry] = make_int2(mine.page, mine.tokens);
  shared.users[entry] = 0;
  hopper::named_barrier(1, kQuadEntries);
  const auto same = [&](int other) {
    const int2 its = shared.entries[other];
    return its.x == mine.page && its.y == mine.tokens;
  };
  const int lowest = max(entry / kQuadTokens - window, 0) * kQuadTokens;
  int first = entry;
#pragma unroll 4
  for (int other = entry - 1; other >= lowest; --other) {
    if (same(other)) first = other;
  }
  shared.firsts[entry] = first;
  hopper::named_barrier(1, kQuadEntries);
  // A first one that shares with one before it is not fetched by itself.
  const int owner = shared.firsts[first] == first ? first : entry;
  const bool counts = mine.page >= 0, is_owner = counts && owner == entry;
  if (counts) atomicAdd(&shared.users[owner], 1);
  const uint32_t owners = __ballot_sync(kAllLanes, is_owner);
  if (lane == 0) shared.warp_listed[warp] = __popc(owners);
  hopper::named_barrier(1, kQuadEntries);
  int32_t before = 0, all = 0;
#pragma unroll
  for (int other = 0; other < kTokenWarps; ++other) {
    const int32_t listed = shared.warp_listed[other];
    if (other < warp) before += listed;
    all += listed;
  }
  const int32_t place = before + __popc(owners & ((1u << lane) - 1));
  if (is_owner) shared.list[place] = {mine.page, mine.tokens, shared.users[entry]};
  shared.places[entry] = place;
  if (entry == 0) shared.listed = all;
  hopper::named_barrier(1, kQuadEntries);
  const int32_t shared_place = shared.places[owner];
  hopper::named_barrier(1, kQuadEntries);
  shared.places[entry] = counts ? shared_place : -1;
}

// Brings K or V of the list's slices, every kQuadProducers-th of them.
template <bool kValues>
__device__ __forceinline__ void fetch_slices(const QuadParams& params, QuadStorage& shared,
                                             int64_t head, int32_t split, int first) {
  using S = Slice<__nv_bfloat16>;
  const int32_t log_parts = 3 - params.log_splits, parts = 1 << log_parts;
  const LaneCopy<__nv_bfloat16, true> copy(params.decode.attend, head);
  const int32_t slices = shared.listed << log_parts;
  auto& full = kValues ? shared.v_full : shared.k_full;
  auto& empty = kValues ? shared.v_empty : shared.k_empty;
  auto& names = kValues ? shared.v_slice : shared.k_slice;
  const uint32_t ring = shared_address(kValues ? shared.v : shared.k);
#pragma unroll 1
  for (int32_t slice = first; slice < slices; slice += kQuadProducers) {
    const int32_t turn = slice / kRingSlices, place = slice - turn * kRingSlices;
    const QuadBlock block = shared.list[slice >> log_parts];
    const int32_t part = slice & (parts - 1);
    if (turn > 0) {  // the other warp fetched what was there, perhaps not yet
      wait_for_word(&names[place], slice - kRingSlices);
      hopper::barrier_wait(&empty[place], (turn - 1) & 1);
    }
    if (threadIdx.x % 32 == 0) {
      names[place] = slice;
      hopper::barrier_arrive(&empty[place], kValues ? kVUses - block.users * kTokenWarps
                                                    : kKUses - block.users);
    }
    const SliceTokens tokens{block.page,
                             ((part << params.log_splits) + split) * S::kTokens,
                             min(max(block.tokens - part * S::kTokens, 0), S::kTokens)};
    const uint32_t target = ring + place * kPartBytes;
    if (kValues) {
      copy.copy_v(target, tokens);
    } else {
      copy.copy_k(target, tokens);
    }
    hopper::barrier_arrive_behind_copies(&full[place]);
  }
  wait_async_copies<0>();
}

// An entry's slice in a ring.
struct QuadSlice {
  int32_t slice, place, valid;
  uint32_t parity;

  // -1: nothing to read.
  static __device__ __forceinline__ int32_t word(const QuadStorage& shared, int token,
                                                 int32_t entry, int32_t entries,
                                                 int32_t log_parts) {
    using S = Slice<__nv_bfloat16>;
    if (entry >= entries) return -1;
    const int32_t listed = shared.places[(entry >> log_parts) * kQuadTokens + token];
    if (listed < 0) return -1;
    const int32_t part = entry & ((1 << log_parts) - 1);
    const int32_t valid =
        min(max(shared.list[listed].tokens - part * S::kTokens, 0), S::kTokens);
    return ((listed << log_parts) + part) << 8 | valid;
  }
  explicit __device__ __forceinline__ QuadSlice(int32_t word) {
    slice = word >> 8;
    valid = word & 0xff;
    const int32_t turn = slice / kRingSlices;
    place = slice - turn * kRingSlices;
    parity = turn & 1;
  }
  // A place that is reused says by name that the slice is on its way: its barrier's parity alone
  // could be that of an earlier one.
  __device__ __forceinline__ void wait(const int32_t* names, uint64_t* full) const {
    if (slice >= kRingSlices) wait_for_word(names + place, slice);
    hopper::barrier_wait(full + place, parity);
  }
};

__global__ void __launch_bounds__(kQuadThreads, 1)
    msa_decode_quad_sm90_kernel(const __grid_constant__ QuadParams params) {
  using Element = __nv_bfloat16;
  using S = Slice<Element>;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  auto& shared = *reinterpret_cast<QuadStorage*>(shared_memory);
  const DecodeParams& decode = params.decode;
  const AttendParams& attend = decode.attend;
  const BatchView& batch = attend.batch;
  const auto split = static_cast<int32_t>(blockIdx.x);
  const int32_t first_token = static_cast<int32_t>(blockIdx.y) * kQuadTokens;
  const int64_t head = blockIdx.z;
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp = __shfl_sync(kAllLanes, thread / 32, 0);
  const int group = static_cast<int>(attend.group_size), splits = decode.splits;
  const int32_t unit_tokens =
      min(kQuadTokens, static_cast<int32_t>(batch.num_tokens) - first_token);
  const int own_rows = min(params.rows, max(0, unit_tokens * group - split * params.rows));
  const bool alone = splits == 1, consumes = warp < kQuadConsumers;
  const int token_of_warp = warp / kTokenWarps, member = warp % kTokenWarps;
  wait_for_previous_kernel();

  // Ids, positions, table and q do not wait for each other.
  const int32_t entry_token = thread % kQuadTokens, entry_rank = thread / kQuadTokens;
  const bool is_entry =
      entry_token < unit_tokens && entry_rank < static_cast<int32_t>(decode.ids.topk);
  const LoadingId id =
      start_load_id(decode.ids, head, first_token + entry_token, entry_rank, is_entry);
  __syncwarp();
  const bool finds_row = warp < unit_tokens;
  PositionGuess guess;
  if (finds_row) guess = guess_row<true>(decode, first_token + warp);
  __syncwarp();
  auto* const table = reinterpret_cast<int32_t*>(shared.k);
  const int32_t request = guess_request(batch, first_token, decode.inverse_each);
  const TableRow first_pages =
      copy_table_row<kQuadTablePages>(batch, request, request >= 0, table, kQuadThreads);
  if (consumes) {
    const int32_t token = first_token + min(token_of_warp, unit_tokens - 1);
    Query<Element>::template fetch<kTokenThreads>(shared.weights[token_of_warp], attend.q, token,
                                                  head * group, group, thread % kTokenThreads);
  }
  const float k_scale = load_scale(attend.k_scale, head);
  const float v_scale = load_scale(attend.v_scale, head);

  // While they are on their way.
  if (warp == kQuadConsumers) {
    if (lane < kRingSlices) {
      hopper::barrier_init(&shared.k_full[lane], 32);
      hopper::barrier_init(&shared.v_full[lane], 32);
      hopper::barrier_init(&shared.k_empty[lane], kKUses);
      hopper::barrier_init(&shared.v_empty[lane], kVUses);
      shared.k_slice[lane] = shared.v_slice[lane] = -1;
    }
    if (lane == 0 && !alone) {
      hopper::barrier_init(&shared.arrived, 1);
      hopper::fence_barrier_init();
      hopper::barrier_arrive_expect(
          &shared.arrived, splits * own_rows * (kHeadDim * sizeof(float) + sizeof(float2)));
    }
    __syncwarp();
  }
  hopper::cluster_arrive_relaxed();
  if (finds_row) {
    const KeyRow row = find_row<true>(decode, first_token + warp, guess);
    if (lane == 0) shared.rows[warp] = row;
  }
  if (consumes) {
    wait_async_copies<1>();  // behind the table: q
  } else {
    wait_async_copies<0>();
  }
  __syncthreads();
  if (thread < kQuadEntries) {
    QuadBlock mine{-1, 0, 0};
    const KeyRow row = shared.rows[min(entry_token, unit_tokens - 1)];
    if (is_entry && entry_rank < row.blocks && is_visible(id, row.visible)) {
      const auto block = static_cast<uint32_t>(id.low);
      const int32_t page = row.request == request && block < first_pages.copied
                               ? table[block]
                               : page_of(batch, row.request, block);
      const int32_t seen = min(kBlock, row.pos + 1 - id.low * kBlock);
      const int32_t tokens = own_tokens(seen, split, params.log_splits);
      if (int64_t{static_cast<uint32_t>(page)} < attend.k_cache.num_pages && tokens > 0) {
        mine = {page, tokens, 0};
      }
    }
    make_list(shared, mine, splits / 2);
  }
  __syncthreads();

  if (!consumes) {
    const int producer = warp - kQuadConsumers;
    if (producer < kQuadProducers) {
      fetch_slices<false>(params, shared, head, split, producer);
    } else {
      fetch_slices<true>(params, shared, head, split, producer - kQuadProducers);
    }
    hopper::cluster_wait();
    return;
  }

  const int token = token_of_warp;
  const bool there = token < unit_tokens;
  const int32_t log_parts = 3 - params.log_splits;
  const int32_t entries = there ? shared.rows[token].blocks << log_parts : 0;
  Query<Element> query;
  wait_async_copies<0>();
  hopper::named_barrier(2 + token, kTokenThreads);
  query.load_fetched(shared.weights[token]);
  query.prepare(attend.scale * k_scale * kLog2E);
  const uint32_t k_ring = shared_address(shared.k), v_ring = shared_address(shared.v);
  const int row_of_lane = lane / 4;
  float o[kQuadVectors][2][4] = {};
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {};
#pragma unroll 1
  for (int32_t first = 0; first < entries; first += kTurnEntries) {
    // The lane's of the turn's entries.
    const int32_t lane_word =
        QuadSlice::word(shared, token, lane < kTurnEntries ? first + lane : entries, entries,
                        log_parts);
    float s[kTurnScores][S::kColumns][4] = {};
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kTurnScores; ++i) {
      const int32_t word = __shfl_sync(kAllLanes, lane_word, i * kTokenWarps + member);
      int valid = 0;
      if (word >= 0) {
        const QuadSlice slice(word);
        valid = slice.valid;
        slice.wait(shared.k_slice, shared.k_full);
        if (valid > 0) score(query, k_ring + slice.place * kPartBytes, s[i]);
        hopper::barrier_arrive_warp(&shared.k_empty[slice.place]);
      }
      float its_largest[2];
      scale_logits(s[i], valid, query.scale, its_largest);
#pragma unroll
      for (int r = 0; r < 2; ++r) largest[r] = fmaxf(largest[r], its_largest[r]);
    }
    if (lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) shared.maxima[token][row_of_lane + 8 * r][member] = largest[r];
    }
    hopper::named_barrier(2 + token, kTokenThreads);
    float reference[2], factor[2], added[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float4 fours = *reinterpret_cast<const float4*>(
          shared.maxima[token][row_of_lane + 8 * r]);
      const float all = fmaxf(fmaxf(fours.x, fours.y), fmaxf(fours.z, fours.w));
      const float grown = fmaxf(all, maximum[r]);
      reference[r] = reference_of(grown);
      factor[r] = exp2_fast(maximum[r] - reference[r]);
      maximum[r] = grown;
    }
#pragma unroll
    for (int i = 0; i < kTurnScores; ++i) {
      uint32_t p[S::kColumns][2];
#pragma unroll
      for (int tile = 0; tile < S::kColumns; ++tile) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float low = exp2_fast(s[i][tile][2 * r] - reference[r]);
          const float high = exp2_fast(s[i][tile][2 * r + 1] - reference[r]);
          added[r] += low + high;
          p[tile][r] = pack_weights<Element>(low, high);
        }
      }
      shared.weights[token][(i * kTokenWarps + member) * 32 + lane] =
          make_uint4(p[0][0], p[0][1], p[1][0], p[1][1]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = sum[r] * factor[r] + added[r];
#pragma unroll
    for (auto& vector : o) {
#pragma unroll
      for (auto& tile : vector) {
#pragma unroll
        for (int i = 0; i < 4; ++i) tile[i] *= factor[i / 2];
      }
    }
    if (first + kTurnEntries >= entries) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float whole = sum[r] + __shfl_xor_sync(kAllLanes, sum[r], 1);
        whole += __shfl_xor_sync(kAllLanes, whole, 2);
        if (lane % 4 == 0) shared.sums[token][row_of_lane + 8 * r][member] = whole;
      }
    }
    hopper::named_barrier(2 + token, kTokenThreads);
#pragma unroll 2
    for (int i = 0; i < kTurnEntries; ++i) {
      const int32_t word = __shfl_sync(kAllLanes, lane_word, i);
      if (word < 0) continue;
      const QuadSlice slice(word);
      slice.wait(shared.v_slice, shared.v_full);
      if (slice.valid > 0) {
        const uint4 p = shared.weights[token][i * 32 + lane];
        const uint32_t a[4] = {p.x, p.y, p.z, p.w};
        const uint32_t values = v_ring + slice.place * kPartBytes + lane % 16 * S::kRowBytes;
#pragma unroll
        for (int vector = 0; vector < kQuadVectors; ++vector) {
          const int column = 2 * (member * kQuadVectors + vector) + lane / 16;
          uint32_t b[4];
          load_matrices_transposed(b, values + (column ^ lane % 8) * 16);
          multiply_bf16(o[vector][0], a, b[0], b[1]);
          multiply_bf16(o[vector][1], a, b[2], b[3]);
        }
      }
      hopper::barrier_arrive_warp(&shared.v_empty[slice.place]);
    }
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
    const int head_row = row_of_lane + 8 * r;
    if (!there || head_row >= group) break;
    const int row = token * group + head_row, owner = row * params.inverse_r >> 16;
    const int place = split * params.rows + row - owner * params.rows;
    const uint32_t arrived = hopper::cluster_address(shared_address(&shared.arrived), owner);
#pragma unroll
    for (int vector = 0; vector < kQuadVectors; ++vector) {
      const int columns = (member * kQuadVectors + vector) * 4 + lane % 4;
      const float4 values = make_float4(o[vector][0][2 * r], o[vector][0][2 * r + 1],
                                        o[vector][1][2 * r], o[vector][1][2 * r + 1]);
      deliver(&shared.inbox[place * 32 + columns], values, owner, arrived);
    }
    if (member == 0 && lane % 4 == 0) {
      float all = 0.0f;
      if (entries > 0) {
        const float4 fours = *reinterpret_cast<const float4*>(shared.sums[token][head_row]);
        all = (fours.x + fours.y) + (fours.z + fours.w);
      }
      deliver(&shared.inbox_state[place], make_float2(maximum[r], all), owner, arrived);
    }
  }
  if (alone) hopper::named_barrier(1, kQuadConsumers * 32);
  if (warp >= own_rows) return;
  if (!alone) hopper::barrier_wait_cluster(&shared.arrived, 0);
#pragma unroll 1
  for (int own = warp; own < own_rows; own += kQuadConsumers) {
    const auto state = [&](int part) { return shared.inbox_state[part * params.rows + own]; };
    const auto value = [&](int part) {
      return shared.inbox[(part * params.rows + own) * 32 + lane];
    };
    float row_maximum, row_sum;
    const float4 merged =
        merge_parts<kMaxQuadSplits>(splits, state, value, row_maximum, row_sum);
    const int row = split * params.rows + own, its_token = row * params.inverse_group >> 16;
    store_result<true>(attend, first_token + its_token, head, row - its_token * group, merged,
                       row_maximum, row_sum, v_scale);
  }
}

}  // namespace msa::decode::sm90
