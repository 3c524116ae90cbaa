// Step 4, sparse_decode on Hopper, several query tokens a request: two neighbouring tokens walk the
// union of their blocks, each block brought to shared memory once for both. Their sums never meet:
// each is what it would be beside any other token.
//
//   of each token, over its own blocks: the math of sm80/decode_walk.cuh; ring and slices as there
//
// Grid      (2 tokens, KV head); unit h * pairs + i: tokens 2 i, 2 i + 1, of one request or not.
// Roles     all warps alike, each its own producer. Before the walk warps 0 and 1 bring a token's q
//           each into the order of products, threads 0 to 2 K - 1 make the union of the tokens'
//           entries, one each.
// Registers o of 2 x 16 x 128; q is read from shared memory part by part.
// Shared    ring   warps x 17,408: 2 stages of (K 4096, V 4096)    69,632 (139,264 with 8 warps)
//           q      [token][product][lane] 16 bytes                    8,192
//           table  the first 1,024 pages of the first token's request, where the first warp's
//                  stages will lie; q as it comes, where the second's will
//           list   blocks of the union, ascending, with the tokens that want them
//           o      2 tokens, over each warp's own part of the ring
//           others scales, (m, l), tokens of each stage's slice that count, keys of the union
// Barriers  __syncthreads: around the steps of the union, and once before the merge of the warps.
// Timeline  ids, positions, table, q and scales, none waits for another; the union; then as in
//           decode_walk.cuh, but K of slice + 2 is asked for behind S, V behind O; a slice that one
//           token wants is multiplied for that one alone.
// Unseen    a slice's copy reaches to the last key that either token sees. Where they see unlike
//           many, each has V's other rows masked out in registers: 0 * NaN is NaN.
// Order     a warp takes the same 16 or 32 tokens of every block, in ascending order of blocks, so
//           that a token's sums do not depend on its partner. Equal blocks of one token count one
//           by one.
// Limits    those of the walk; as many warps as a block has slices, or half: bfloat16 8 (one CTA an
//           SM) or 4 (two), FP8 4.
#pragma once

#include <type_traits>

#include "device/table_row.cuh"
#include "step4_attend/sm80/decode_walk.cuh"

namespace msa::decode::sm90 {

using namespace msa::decode::sm80;

constexpr int kPairTokens = 2, kPairStages = 2;
// Of a warp: its stages, and then o of both tokens in their place.
constexpr int kPairRingBytes = kPairTokens * kRows * kOStride * static_cast<int>(sizeof(float));
static_assert(kPairRingBytes >= kPairStages * 2 * kPartBytes && kPairRingBytes % 1024 == 0);
static_assert(kTableRowPages * sizeof(int32_t) <= kPairRingBytes &&
                  kPairTokens * kRows * kQueryVectors * 16 <= kPairRingBytes,
              "table and q: a warp's ring each");
constexpr int32_t kNoKey = 0x7fffffff;

struct UnionEntry {
  int32_t page, block;
  int32_t tokens;  // bit t: token t of the pair selected it
};

template <int kWarpCount>
struct PairStorage {
  static constexpr int kWarps = kWarpCount, kThreads = kWarps * 32;
  alignas(1024) uint8_t ring[kWarps][kPairRingBytes];
  uint4 q[kPairTokens][8][32];
  float2 state[kPairTokens][kWarps][kRows];
  float scale[kPairTokens][kRows];
  int2 valid[kWarps][kPairStages];
  UnionEntry list[kPairTokens * kMaxTopk];
  int32_t key[kPairTokens * kMaxTopk], page[kPairTokens * kMaxTopk];
};
static_assert(2 * (sizeof(PairStorage<4>) + 1024) <= 228 * 1024, "two CTAs an SM");
static_assert(sizeof(PairStorage<8>) <= 227 * 1024, "shared memory of one CTA");

// Of an entry: the block that it selects, and the page of that; -1: it counts nothing.
struct SliceSource {
  int32_t block;
  int32_t page;
};

// Makes shared.list of what the tokens' entries select, a thread's each; returns its length. All
// threads.
template <int kWarps>
__device__ __forceinline__ int make_union(PairStorage<kWarps>& shared, const SliceSource& source,
                                          int token, int topk) {
  const int index = threadIdx.x;
  const bool is_entry = token < kPairTokens;
  const bool counts = source.page >= 0;
  if (is_entry) shared.key[index] = counts ? source.block : kNoKey;
  __syncthreads();
  // Of equal blocks of one token: how many stand before this one.
  int occurrence = 0;
  if (counts) {
#pragma unroll 4
    for (int other = token * topk; other < index; ++other) {
      occurrence += shared.key[other] == source.block;
    }
  }
  const int32_t key = counts ? source.block * (2 * kMaxTopk) + occurrence : kNoKey;
  __syncthreads();
  if (is_entry) {
    shared.key[index] = key;
    shared.page[index] = source.page;
  }
  __syncthreads();
  bool shared_by_both = false;
  if (counts) {
    const int other_begin = token == 0 ? topk : 0;
#pragma unroll 4
    for (int other = other_begin; other < other_begin + topk; ++other) {
      shared_by_both |= shared.key[other] == key && shared.page[other] == source.page;
    }
  }
  const bool listed = counts && !(token == 1 && shared_by_both);
  const int count = __syncthreads_count(listed);
  if (is_entry && !listed) shared.key[index] = kNoKey;
  __syncthreads();
  if (listed) {
    int rank = 0;
#pragma unroll 8
    for (int other = 0; other < kPairTokens * topk; ++other) {
      rank += shared.key[other] < key || (shared.key[other] == key && other < index);
    }
    shared.list[rank] = {source.page, source.block, shared_by_both ? 3 : 1 << token};
  }
  __syncthreads();
  return count;
}

// s = Q K^T of a slice for the tokens asked for; products in one order, whoever else is there.
template <typename Element, bool kFirst, bool kSecond, int kWarps>
__device__ __forceinline__ void score_pair(const PairStorage<kWarps>& shared, uint32_t k,
                                           float (&s)[kPairTokens][Slice<Element>::kColumns][4]) {
  using S = Slice<Element>;
  const int lane = threadIdx.x % 32;
  const uint32_t address = key_address<Element>(k);
#pragma unroll
  for (int token = 0; token < kPairTokens; ++token) {
    if (!(token == 0 ? kFirst : kSecond)) continue;
#pragma unroll
    for (auto& tile : s[token]) {
#pragma unroll
      for (float& value : tile) value = 0.0f;
    }
  }
#pragma unroll
  for (int turn = 0; turn < 4; ++turn) {  // two products
    uint4 a[kPairTokens][2];
#pragma unroll
    for (int token = 0; token < kPairTokens; ++token) {
      if (!(token == 0 ? kFirst : kSecond)) continue;
      a[token][0] = shared.q[token][2 * turn][lane];
      a[token][1] = shared.q[token][2 * turn + 1][lane];
    }
#pragma unroll
    for (int tile = 0; tile < S::kColumns; ++tile) {
      const uint32_t row = address + tile * 8 * S::kRowBytes;
      uint32_t b[2][2];
      if constexpr (S::kFp8) {
        const uint2 bits = load_shared_8((row ^ turn / 2 * 64) + turn % 2 * 8);
        fp8_to_f16(bits.x, b[0][0], b[0][1]);
        fp8_to_f16(bits.y, b[1][0], b[1][1]);
      } else {
        const uint4 bits = load_shared_16(row ^ turn * 64);
        b[0][0] = bits.x, b[0][1] = bits.y, b[1][0] = bits.z, b[1][1] = bits.w;
      }
#pragma unroll
      for (int token = 0; token < kPairTokens; ++token) {
        if (!(token == 0 ? kFirst : kSecond)) continue;
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const uint4& it = a[token][step];
          const uint32_t operand[4] = {it.x, it.y, it.z, it.w};
          if constexpr (S::kFp8) {
            multiply_f16(s[token][tile], operand, b[step][0], b[step][1]);
          } else {
            multiply_bf16(s[token][tile], operand, b[step][0], b[step][1]);
          }
        }
      }
    }
  }
}

// o += P V with V's rows at or past `valid` taken as 0.
template <typename Element>
__device__ __forceinline__ void add_masked_values(Rows<Element>& rows, uint32_t v,
                                                  const typename Rows<Element>::Weights& p,
                                                  int valid) {
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int step = 0; step < Slice<Element>::kTokens / 16; ++step) {
    uint32_t mask[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = step * 16 + half * 8 + quad * 2;
      mask[half] = (row < valid ? 0x0000ffffu : 0) | (row + 1 < valid ? 0xffff0000u : 0);
    }
    for_value_operands<Element>(v, step, [&](int n, uint32_t b0, uint32_t b1) {
      rows.multiply(p, step, n, b0 & mask[0], b1 & mask[1]);
    });
  }
}

template <typename Element, int kWarps>
__device__ __forceinline__ void walk_union(const DecodeParams& params, PairStorage<kWarps>& shared,
                                           const KeyRow (&token_rows)[kPairTokens], int64_t head,
                                           int blocks) {
  using S = Slice<Element>;
  static_assert(S::kPerBlock % kWarps == 0, "a warp takes the same slices of every block");
  const AttendParams& attend = params.attend;
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
  const int32_t slices = blocks * S::kPerBlock;
  const int32_t count = warp < slices ? (slices - warp + kWarps - 1) / kWarps : 0;
  const LaneCopy<Element> copy(attend, head);

  int32_t page = 0, first = 0, copied = 0;
  int2 valid = make_int2(0, 0);
  const auto next_source = [&](int32_t index) {
    valid = make_int2(0, 0);
    copied = 0;
    if (index >= count) return;
    const int32_t slice = warp + index * kWarps;
    const UnionEntry entry = shared.list[slice / S::kPerBlock];
    page = entry.page;
    first = slice % S::kPerBlock * S::kTokens;
    const int32_t begin = entry.block * kBlock + first;
    if (entry.tokens & 1) valid.x = max(0, min(S::kTokens, token_rows[0].pos + 1 - begin));
    if (entry.tokens & 2) valid.y = max(0, min(S::kTokens, token_rows[1].pos + 1 - begin));
    copied = max(valid.x, valid.y);
  };
  const uint32_t ring = shared_address(shared.ring[warp]);
  for (int stage = 0; stage < kPairStages; ++stage) {
    const uint32_t k = ring + stage * 2 * kPartBytes, v = k + kPartBytes;
    next_source(stage);
    if (lane == 0) shared.valid[warp][stage] = valid;
    copy.copy_k(k, {page, first, copied});
    copy.copy_v(v, {page, first, copied});
  }

  Rows<Element> rows[kPairTokens];
  rows[0].clear();
  rows[1].clear();
  int stage = 0;
  // A slice, for one token or both. A body for each case: merged, they would cost registers.
  const auto attend_slice = [&](auto first_token, auto second_token, int32_t next, int2 seen) {
    constexpr bool kFirst = decltype(first_token)::value, kSecond = decltype(second_token)::value;
    const uint32_t k = ring + stage * 2 * kPartBytes, v = k + kPartBytes;
    float s[kPairTokens][S::kColumns][4], factor[kPairTokens][2];
    typename Rows<Element>::Weights p[kPairTokens];
    score_pair<Element, kFirst, kSecond>(shared, k, s);
    __syncwarp();
    next_source(next);
    if (lane == 0) shared.valid[warp][stage] = valid;
    copy.copy_k(k, {page, first, copied});
    bool shrinks = false;
    if constexpr (kFirst) {
      const float scale[2] = {shared.scale[0][lane / 4], shared.scale[0][lane / 4 + 8]};
      rows[0].softmax(s[0], seen.x, scale, p[0], factor[0]);
      shrinks |= any_shrinks(factor[0]);
    }
    if constexpr (kSecond) {
      const float scale[2] = {shared.scale[1][lane / 4], shared.scale[1][lane / 4 + 8]};
      rows[1].softmax(s[1], seen.y, scale, p[1], factor[1]);
      shrinks |= any_shrinks(factor[1]);
    }
    if (__any_sync(kAllLanes, shrinks)) {
      if constexpr (kFirst) rows[0].shrink(factor[0]);
      if constexpr (kSecond) rows[1].shrink(factor[1]);
    }
    wait_async_copies<2 * kPairStages - 1>();
    __syncwarp();
    if constexpr (kFirst && kSecond) {
      if (seen.x == seen.y) {
#pragma unroll
        for (int step = 0; step < S::kTokens / 16; ++step) {
          for_value_operands<Element>(v, step, [&](int n, uint32_t b0, uint32_t b1) {
            rows[0].multiply(p[0], step, n, b0, b1);
            rows[1].multiply(p[1], step, n, b0, b1);
          });
        }
      } else {
        add_masked_values(rows[0], v, p[0], seen.x);
        add_masked_values(rows[1], v, p[1], seen.y);
      }
    } else {  // nobody else's rows were copied
      if constexpr (kFirst) rows[0].add_values(v, p[0]);
      if constexpr (kSecond) rows[1].add_values(v, p[1]);
    }
    __syncwarp();
    copy.copy_v(v, {page, first, copied});
  };
  const std::true_type yes;
  const std::false_type no;
#pragma unroll 1
  for (int32_t index = 0; index < count; ++index) {
    wait_async_copies<2 * kPairStages - 1>();  // as in walk_slices
    __syncwarp();
    const int2 seen = shared.valid[warp][stage];
    const int32_t next = index + kPairStages;
    if (seen.x > 0 && seen.y > 0) {
      attend_slice(yes, yes, next, seen);
    } else if (seen.x > 0) {
      attend_slice(yes, no, next, seen);
    } else if (seen.y > 0) {
      attend_slice(no, yes, next, seen);
    } else {
      const uint32_t k = ring + stage * 2 * kPartBytes;
      __syncwarp();
      next_source(next);
      if (lane == 0) shared.valid[warp][stage] = valid;
      copy.copy_k(k, {page, first, copied});
      copy.copy_v(k + kPartBytes, {page, first, copied});
    }
    stage = stage + 1 == kPairStages ? 0 : stage + 1;
  }
  wait_async_copies<0>();
  __syncwarp();
#pragma unroll
  for (int token = 0; token < kPairTokens; ++token) {
    rows[token].store(reinterpret_cast<float*>(shared.ring[warp]) + token * kRows * kOStride,
                      shared.state[token][warp]);
  }
}

template <typename Element, int kWarps>
__global__ void __launch_bounds__(kWarps * 32)
    msa_decode_pair_sm90_kernel(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  auto& shared = *reinterpret_cast<PairStorage<kWarps>*>(shared_memory);
  const AttendParams& attend = params.attend;
  const auto num_tokens = static_cast<int32_t>(attend.batch.num_tokens);
  const int32_t pairs = (num_tokens + 1) / kPairTokens;
  const int64_t head = blockIdx.x / pairs;
  const int32_t first_token = blockIdx.x % pairs * kPairTokens;
  const int tokens = min(kPairTokens, num_tokens - first_token);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  wait_for_previous_kernel();

  // Ids, positions, table, q and scales do not wait for each other.
  const BatchView& batch = attend.batch;
  const auto topk = static_cast<int>(params.ids.topk);
  const int token = static_cast<int>(threadIdx.x) / topk;
  const int slot = static_cast<int>(threadIdx.x) - token * topk;
  const LoadingId id = start_load_id(params.ids, head, first_token + token, slot, token < tokens);
  __syncwarp();  // as in the cluster kernel
  PositionGuess guesses[kPairTokens];
  guesses[0] = guess_row<true>(params, first_token);
  guesses[1] = guess_row<true>(params, first_token + tokens - 1);
  __syncwarp();
  auto* const table = reinterpret_cast<int32_t*>(shared.ring[0]);
  auto* const queries = reinterpret_cast<uint4*>(shared.ring[1]);
  const int32_t request = guesses[0].request;
  const TableRow first_pages = copy_table_row<kTableRowPages>(batch, request, request >= 0, table,
                                                              PairStorage<kWarps>::kThreads);
#pragma unroll
  for (int i = 0; i < kPairTokens; ++i) {
    Query<Element>::template fetch<PairStorage<kWarps>::kThreads>(
        queries + i * kRows * kQueryVectors, attend.q, first_token + min(i, tokens - 1),
        head * attend.group_size, static_cast<int32_t>(attend.group_size));
  }
  const float k_scale = load_scale(attend.k_scale, head);
  const float v_scale = load_scale(attend.v_scale, head);

  const auto block = static_cast<uint32_t>(id.low);
  int32_t page = -1;
  first_pages.load_others(batch, request >= 0, block, page);
  KeyRow rows[kPairTokens] = {find_row<true>(params, first_token, guesses[0]), {0, -1, 0, 0}};
  if (tokens == kPairTokens) rows[1] = find_row<true>(params, first_token + 1, guesses[1]);
  const KeyRow row = token == 0 ? rows[0] : rows[1];
  const bool is_visible_entry = token < tokens && slot < row.blocks && is_visible(id, row.visible);
  const bool is_right = row.request == request;
  if (is_visible_entry && !is_right) page = page_of(batch, row.request, block);
  wait_async_copies<kPairTokens>();  // behind the table: q of both
  __syncthreads();
  if (is_visible_entry && is_right && block < first_pages.copied) page = table[block];
  SliceSource source{kNoKey, -1};
  if (is_visible_entry && page < attend.k_cache.num_pages) source = {id.low, page};
  wait_async_copies<0>();
  const int blocks = make_union(shared, source, token, topk);
  if (warp < tokens) {
    Query<Element> query;
    query.load_fetched(queries + warp * kRows * kQueryVectors);
    query.prepare(attend.scale * k_scale * kLog2E);
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      shared.q[warp][step][lane] =
          make_uint4(query.a[step][0], query.a[step][1], query.a[step][2], query.a[step][3]);
    }
    if (lane % 4 == 0) {
      shared.scale[warp][lane / 4] = query.scale[0];
      shared.scale[warp][lane / 4 + 8] = query.scale[1];
    }
  }
  __syncthreads();
  walk_union<Element>(params, shared, rows, head, blocks);
  start_next_kernel();
  __syncthreads();

  const int group = static_cast<int>(attend.group_size);
  for (int i = 0; i < tokens; ++i) {
    for (int row = warp; row < group; row += kWarps) {
      float maximum, sum;
      const float4 o = merge_parts<kWarps>(
          kWarps, [&](int part) { return shared.state[i][part][row]; },
          [&](int part) {
            const float* from =
                reinterpret_cast<const float*>(shared.ring[part]) + (i * kRows + row) * kOStride;
            return reinterpret_cast<const float4*>(from)[lane];
          },
          maximum, sum);
      store_result(attend, first_token + i, head, row, o, maximum, sum, v_scale);
    }
  }
}

}  // namespace msa::decode::sm90
