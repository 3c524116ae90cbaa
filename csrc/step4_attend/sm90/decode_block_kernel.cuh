// Step 4, sparse_decode on Hopper, few requests with draft tokens: KV-block-major, as in prefill.
// Each block that a tile of tokens selected is brought to one CTA, once, and multiplied by wgmma
// with all rows of the tile; the tokens that selected it leave a partial result each, which a second
// small kernel merges.
//
//   for the G rows of each (token, k) of a block:  (o, m, l) as in prefill_kv_block_kernel.cuh
//
// clang-format off
// Grid      parts x tiles x Hkv CTAs, one an SM. A tile is tile_tokens consecutive tokens of the
//           call, whatever requests they are of; the blocks that its tokens selected, each counted
//           once, are dealt to the parts by turns. Every part finds them anew.
// Roles     role          warps
//           consumer 0-1  0-7     64 rows each: a tile of two groups has one for each of them, of a
//                                 tile of one group they take blocks by turns. Before that each
//                                 pair of threads has an entry (token, k).
//           producer      8       one lane: q at once; K and V when the blocks are known
// Shared    k, v    3 stages each, [half of d][128 tokens][64 d]   196,608   128-byte swizzle
//           q       2 groups [8 row groups][half of d][8 rows][64 d] 32,768
//           items   this part's blocks                                2,048
//           keys    request and block of each entry                     512
// Barriers  q_full          1 + bytes of the tile
//           k_full, v_full  1 + bytes of a block     producer -> consumers
//           k_empty, v_empty  8, a consumer warp each, also of items that are not for it
//           named 1         256: keys are there; leaders are there; V has been cleaned
// Timeline  q; ids and positions | pages, and under them which entries have the same block | items
//           K, V | S = Q K^T | softmax | O = P V | store. The merge, whose CTAs are there already:
//           partial results of a token, all in flight | sum | store.
// Bits      a partial result does not depend on what else is in its tile, and the merge takes them
//           in the order of the token's entries: a token's bits are its own.
// Unseen    as in prefill_kv_block_kernel.cuh.
// Limits    bfloat16, D = 128, G 8 or 16, tile_tokens * K <= 128, B * max_pages < 2^31.
// clang-format on
#pragma once

#include "device/dependent_launch.cuh"
#include "device/positions.cuh"
#include "step4_attend/decode_plan.h"
#include "step4_attend/sm90/prefill_kv_block_kernel.cuh"
#include "step4_attend/sm90/prefill_merge_kernel.cuh"

namespace msa::decode::sm90 {

namespace tiles = sparse_prefill::sm90;
namespace hopper = msa::sm90;

struct DraftBlockParams {
  AttendParams attend;
  IdsView ids;
  tiles::Partials partials;
  uint32_t* counts;  // [Hkv * T]: entries that count
  float scale_log2;
  int32_t log_group, tokens_each;
  int32_t tile_tokens, group_tokens;
  int32_t parts;
  uint32_t inverse_parts, inverse_topk;  // n / x = n * inverse >> 16 for n < 256
};

// A block, and the entries of the tile that selected it.
struct alignas(16) DraftBlock {
  int32_t page;
  int32_t first_valid;  // keys that token 0 of the call would see: token t sees t more
  int32_t written;      // tokens of the request from the block's first on
  int32_t masked;       // some token that selected it does not see all of it
  uint32_t entries[4];
};

struct DraftBlockStorage {
  static constexpr int kConsumers = 2, kThreads = (4 * kConsumers + 1) * 32;
  static constexpr int kStages = 3, kItems = kMaxDraftEntries / kMinDraftParts;
  alignas(1024) uint8_t k[kStages][tiles::kPageBytes];
  alignas(1024) uint8_t v[kStages][tiles::kPageBytes];
  alignas(1024) uint8_t q[kConsumers][tiles::kQTileBytes];
  DraftBlock items[kItems];
  alignas(16) int32_t keys[kMaxDraftEntries];
  alignas(16) uint16_t leaders[kMaxDraftEntries / 16];  // bit e: entry e is the first of its block
  alignas(16) uint16_t counted[kMaxDraftEntries / 16];  // bit e: it counts
  uint32_t wild[kStages][kBlock / 32];
  int32_t num_items;
  uint64_t q_full;
  uint64_t k_full[kStages], v_full[kStages], k_empty[kStages], v_empty[kStages];
};
static_assert(sizeof(DraftBlockStorage) <= 227 * 1024, "shared memory of one CTA");

// Bits [begin, begin + count) of 128, count <= 32.
__device__ __forceinline__ uint32_t bits_of(const uint32_t* words, int begin, int count) {
  const int word = begin / 32;
  const uint64_t high = word < 3 ? words[word + 1] : 0;
  return static_cast<uint32_t>((high << 32 | words[word]) >> begin % 32) &
         (0xffffffffu >> (32 - count));
}

__device__ __forceinline__ int count_below(const uint4& bits, int end) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
  int count = 0;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const int left = end - 32 * word;
    const uint32_t mask = left >= 32 ? 0xffffffffu : left <= 0 ? 0 : (1u << left) - 1;
    count += __popc(words[word] & mask);
  }
  return count;
}

// This part's blocks of the tile, into shared.items. By the consumers, two threads an entry.
__device__ __forceinline__ void list_blocks(const DraftBlockParams& params,
                                            DraftBlockStorage& shared, int32_t head,
                                            int32_t first_token, int32_t tokens, int32_t part) {
  constexpr int kThreads = DraftBlockStorage::kConsumers * 128;
  const BatchView& batch = params.attend.batch;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto topk = static_cast<int32_t>(params.ids.topk);
  const int entry = warp * 16 + lane % 16;
  const bool upper = lane >= 16;
  const int own = static_cast<int>(entry * params.inverse_topk >> 16);
  const int32_t token = first_token + own, slot = entry - own * topk;

  int32_t key = -1 - entry, page = -1, valid = 0, length = 0;
  int64_t block = 0;
  if (own < tokens) {
    const PositionGuess guess = guess_position(batch, token, params.tokens_each);
    const LoadingId loading = start_load_id(params.ids, head, token, slot);
    const TokenPosition position = find_position(batch, token, guess);
    const int32_t visible = position.request < 0 ? 0 : visible_blocks(batch, position.pos);
    block = whole_id(params.ids, loading);
    if (slot < visible && block >= 0 && block < visible) {
      page = page_of(batch, position.request, block);
      key = position.request * static_cast<int32_t>(batch.max_pages) + static_cast<int32_t>(block);
      valid = position.pos + 1 - static_cast<int32_t>(block) * kBlock;
      length = seq_len_of(batch, position.request);
    }
  }
  if (!upper) shared.keys[entry] = key;
  hopper::named_barrier(1, kThreads);

  // Entries of the same block; each of the two threads looks at half of all.
  constexpr int kHalf = kMaxDraftEntries / 2;
  const auto* keys = reinterpret_cast<const int4*>(shared.keys + (upper ? kHalf : 0));
  uint32_t equal[2] = {};
#pragma unroll
  for (int word = 0; word < 2; ++word) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int4 it = keys[word * 8 + i];
      equal[word] |= (it.x == key ? 1u : 0u) << 4 * i | (it.y == key ? 2u : 0u) << 4 * i |
                     (it.z == key ? 4u : 0u) << 4 * i | (it.w == key ? 8u : 0u) << 4 * i;
    }
  }
  const uint32_t others[2] = {__shfl_xor_sync(kAllLanes, equal[0], 16),
                              __shfl_xor_sync(kAllLanes, equal[1], 16)};
  const bool counts = !upper && page >= 0 && page < params.attend.k_cache.num_pages;
  const uint4 same = make_uint4(equal[0], equal[1], others[0], others[1]);  // of the lower threads
  const bool leads = counts && count_below(same, entry) == 0;
  const uint32_t leaders = __ballot_sync(kAllLanes, leads);
  const uint32_t counted = __ballot_sync(kAllLanes, counts);
  if (lane == 0) {
    shared.leaders[warp] = static_cast<uint16_t>(leaders);
    shared.counted[warp] = static_cast<uint16_t>(counted);
  }
  hopper::named_barrier(1, kThreads);

  const uint4 all = *reinterpret_cast<const uint4*>(shared.leaders);
  const auto turn_of = [&](int number) {
    return static_cast<int>(number * params.inverse_parts >> 16);
  };
  if (leads) {
    const int number = count_below(all, entry), turn = turn_of(number);
    if (number - turn * params.parts == part) {
      shared.items[turn] = {page,
                            valid - token,
                            length - static_cast<int32_t>(block) * kBlock,
                            valid < kBlock,
                            {same.x, same.y, same.z, same.w}};
    }
  }
  if (threadIdx.x == 0) {
    shared.num_items = turn_of(count_below(all, kMaxDraftEntries) + params.parts - 1 - part);
  }
  if (part == 0 && static_cast<int32_t>(threadIdx.x) < tokens) {
    params.counts[head * batch.num_tokens + first_token + threadIdx.x] =
        __popc(bits_of(reinterpret_cast<const uint32_t*>(shared.counted),
                       static_cast<int>(threadIdx.x) * topk, topk));
  }
}

__device__ __forceinline__ void attend_blocks(const DraftBlockParams& params,
                                              DraftBlockStorage& shared, int32_t head,
                                              int32_t first_token, int consumer) {
  constexpr int kStages = DraftBlockStorage::kStages;
  constexpr int kThreads = DraftBlockStorage::kConsumers * 128;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const auto topk = static_cast<int32_t>(params.ids.topk);
  const bool by_turns = params.tile_tokens <= params.group_tokens;
  const int group = by_turns ? 0 : consumer;
  const int first = group * params.group_tokens;  // token of the group, in the tile
  const int end = min(first + params.group_tokens, params.tile_tokens);
  const uint64_t q_base = hopper::make_descriptor(shared_address(shared.q[group]), 16, 2048);
  const uint64_t k_base = hopper::make_descriptor(shared_address(shared.k[0]), 16, 1024);
  const uint64_t v_base =
      hopper::make_descriptor(shared_address(shared.v[0]), tiles::kPageBytes / 2, 1024);
  const auto* counted = reinterpret_cast<const uint32_t*>(shared.counted);

  hopper::RingPosition<kStages> ring;
  hopper::barrier_wait(&shared.q_full, 0);
  const int num_items = shared.num_items;
#pragma unroll 1
  for (int i = 0; i < num_items; ++i, ring.advance()) {
    const DraftBlock& item = shared.items[i];
    const int stage = ring.stage;
    uint32_t selected = 0;  // entries of the group
#pragma unroll 1
    for (int token = first; token < end; ++token) {
      selected |= bits_of(item.entries, token * topk, topk);
    }
    const bool mine = by_turns ? i % 2 == consumer : selected != 0;
    hopper::barrier_wait(&shared.k_full[stage], ring.phase);
    const bool masked = item.masked != 0;
    if (masked) {
      hopper::barrier_wait(&shared.v_full[stage], ring.phase);
      tiles::clean_values<kThreads>(shared.v[stage], item.written, shared.wild[stage]);
    }
    if (!mine) {
      __syncwarp();
      if (lane == 0) hopper::barrier_arrive(&shared.k_empty[stage]);
      hopper::barrier_wait(&shared.v_full[stage], ring.phase);
      __syncwarp();
      if (lane == 0) hopper::barrier_arrive(&shared.v_empty[stage]);
      continue;
    }
    tiles::Row rows[2];
    uint32_t entries[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = first + ((warp * 16 + lane / 4 + 8 * r) >> params.log_group);
      entries[r] = token < end ? bits_of(item.entries, token * topk, topk) : 0;
      rows[r] = {-1, entries[r] ? min(kBlock, first_token + token + item.first_valid) : kBlock};
    }

    hopper::Accumulator s;
    tiles::multiply_q_k(q_base, 0, k_base, stage * tiles::kPageBytes, s);
    if (lane == 0) hopper::barrier_arrive(&shared.k_empty[stage]);
    uint32_t p[32];
    float maximum[2], sum[2];
    tiles::softmax<DType::kBFloat16>(s, rows, params.scale_log2, p, maximum, sum);
    hopper::barrier_wait(&shared.v_full[stage], ring.phase);
    hopper::Accumulator o;
    tiles::multiply_p_v<DType::kBFloat16>(p, v_base, stage * tiles::kPageBytes, o, false);
    if (masked) {
      const int32_t valid[2] = {rows[0].valid, rows[1].valid};
      tiles::add_wild_values<DType::kBFloat16>(params.attend.v_cache, item.page, head,
                                               shared.wild[stage], valid, o);
      __syncwarp();
    }
    if (lane == 0) hopper::barrier_arrive(&shared.v_empty[stage]);
    // Once, but for tokens that selected the block twice.
#pragma unroll 1
    while ((entries[0] | entries[1]) != 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int token = first + ((warp * 16 + lane / 4 + 8 * r) >> params.log_group);
        rows[r].slot = -1;
        if (entries[r] == 0) continue;
        const uint32_t below = (entries[r] & -entries[r]) - 1;
        entries[r] &= entries[r] - 1;
        const int64_t unit = head * params.attend.batch.num_tokens + first_token + token;
        rows[r].slot = static_cast<int32_t>(
            unit * topk + __popc(bits_of(counted, token * topk, topk) & below));
      }
      tiles::store_partial(params.partials, params.log_group, rows, o, maximum, sum);
    }
  }
}

__global__ void __launch_bounds__(384, 1)
    msa_decode_block_sm90_kernel(const __grid_constant__ DraftBlockParams params,
                                 const __grid_constant__ CUtensorMap q_map,
                                 const __grid_constant__ CUtensorMap k_map,
                                 const __grid_constant__ CUtensorMap v_map) {
  constexpr int kConsumers = DraftBlockStorage::kConsumers;
  constexpr int kStages = DraftBlockStorage::kStages;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  auto& shared = *reinterpret_cast<DraftBlockStorage*>(shared_memory);
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
  const auto part = static_cast<int32_t>(blockIdx.x), head = static_cast<int32_t>(blockIdx.z);
  const int32_t first_token = static_cast<int32_t>(blockIdx.y) * params.tile_tokens;
  const int32_t tokens =
      min(params.tile_tokens, static_cast<int32_t>(params.attend.batch.num_tokens) - first_token);
  const bool produces = threadIdx.x == kConsumers * 128;
  if (produces) {
    hopper::prefetch_tensor_map(&q_map);
    hopper::prefetch_tensor_map(&k_map);
    hopper::prefetch_tensor_map(&v_map);
    hopper::barrier_init(&shared.q_full, 1);
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::barrier_init(&shared.k_full[stage], 1);
      hopper::barrier_init(&shared.v_full[stage], 1);
      hopper::barrier_init(&shared.k_empty[stage], kConsumers * 4);
      hopper::barrier_init(&shared.v_empty[stage], kConsumers * 4);
    }
    hopper::fence_barrier_init();
  }
  start_next_kernel();
  wait_for_previous_kernel();

  if (produces) {
    const int group_size = 1 << params.log_group;
    hopper::barrier_arrive_expect(&shared.q_full, tokens * group_size * kHeadDim * 2);
    for (int token = 0; token < tokens; ++token) {
      const int group = token >= params.group_tokens;
      const int row = (token - group * params.group_tokens) * group_size;
      hopper::copy_box(shared.q[group] + row / 8 * 2048, &q_map, &shared.q_full, 0, 0, 0,
                       head * group_size / 8, first_token + token);
    }
  } else if (warp < kConsumers * 4) {
    list_blocks(params, shared, head, first_token, tokens, part);
  }
  __syncthreads();

  if (warp < kConsumers * 4) {
    attend_blocks(params, shared, head, first_token, warp / 4);
  } else if (produces) {
    hopper::RingPosition<kStages> ring;
    const int num_items = shared.num_items;
    for (int i = 0; i < num_items; ++i, ring.advance()) {
      const int stage = ring.stage;
      const int32_t page = shared.items[i].page;
      hopper::barrier_wait(&shared.k_empty[stage], ring.phase ^ 1);
      hopper::barrier_arrive_expect(&shared.k_full[stage], tiles::kPageBytes);
      hopper::copy_box(shared.k[stage], &k_map, &shared.k_full[stage], 0, 0, 0, head, page);
      hopper::barrier_wait(&shared.v_empty[stage], ring.phase ^ 1);
      for (uint32_t& rows : shared.wild[stage]) rows = 0;
      hopper::barrier_arrive_expect(&shared.v_full[stage], tiles::kPageBytes);
      hopper::copy_box(shared.v[stage], &v_map, &shared.v_full[stage], 0, 0, 0, head, page);
    }
  }
}

// Eight rows (token, g) of a KV head a CTA, a warp 32 columns of them.
__global__ void __launch_bounds__(128)
    msa_decode_block_merge_sm90_kernel(const __grid_constant__ tiles::FinishParams params) {
  wait_for_previous_kernel();
  start_next_kernel();
  tiles::merge_rows<DType::kBFloat16, 1, 16>(params, blockIdx.y,
                                             static_cast<int32_t>(blockIdx.x) * 8,
                                             static_cast<int32_t>(threadIdx.x / 32));
}

}  // namespace msa::decode::sm90
