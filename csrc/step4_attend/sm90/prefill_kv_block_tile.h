// Sizes, shared memory and barriers of the KV-block-major prefill kernel, and the layout of its
// partial results, which the merge kernel reads.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "common/views.h"
#include "step3_remap/prefill_plan.h"

namespace msa::sparse_prefill::sm90 {

// The kernels are instantiated for what the caches hold, kCache: bfloat16, or FP8 (e4m3).
template <DType kCache>
constexpr bool kIsFp8 = kCache == DType::kFloat8E4M3;

constexpr int kConsumers = 3;                     // warpgroups of 64 rows each
constexpr int kThreads = (kConsumers + 1) * 128;  // and one of producers
constexpr int kTileRows = kGroupRows;             // rows of a consumer's tile: 64 / G tokens
constexpr int kKVStages = 2;
constexpr int kQStagesPerConsumer = 2;  // a q stage belongs to one warpgroup
constexpr int kQStages = kConsumers * kQStagesPerConsumer;
constexpr int kConsumerRegisters = 152;
constexpr int kProducerRegisters = 56;
static_assert((kConsumers * kConsumerRegisters + kProducerRegisters) * 128 <= 65536,
              "setmaxnreg hands out what the CTA holds at launch");

constexpr int kPageBytes = kBlock * kHeadDim * 2;  // one K or V block in shared memory, 16 bits
constexpr int kQTileBytes = kTileRows * kHeadDim * 2;

// Places of work items on their way to q producers and consumers. An item is published when K of
// the item three before it was used up, which is after every consumer read the one four before it.
constexpr int kItemPlaces = 4;

// What FP8 caches need beside: the scale of an item's logits, and where copied pages arrive before
// they are converted (prefill_fp8_page.cuh).
template <DType kCache>
struct ConversionStorage {};
template <>
struct ConversionStorage<DType::kFloat8E4M3> {
  float scale_log2[kKVStages];
  uint64_t k_landed[kKVStages], v_landed[kKVStages];
};

template <DType kCache>
struct SharedStorage {
  alignas(1024) uint8_t k[kKVStages][kPageBytes];  // [2 halves of d][128 tokens][64 d], swizzled
  alignas(1024) uint8_t v[kKVStages][kPageBytes];
  alignas(1024) uint8_t q[kQStages][kQTileBytes];  // [8 row groups][2 halves of d][8 rows][64 d]
  int32_t slots[kQStages][kTileRows];              // of each token of a tile, -1: none
  uint8_t valid[kQStages][kTileRows];     // keys of the block that the token may see, 1 to 128
  WorkItem items[kItemPlaces];            // without pairs: there are no more
  uint32_t wild[kKVStages][kBlock / 32];  // rows of V with NaN or Inf, of masked blocks
  uint32_t warps_done[kShortHeads];       // consumer warps that have attended to all of a head
  uint64_t item_full[kItemPlaces];
  uint64_t item_empty[kItemPlaces];
  uint64_t first_tiles;
  uint64_t k_full[kKVStages];
  uint64_t v_full[kKVStages];
  uint64_t k_empty[kKVStages];
  uint64_t v_empty[kKVStages];
  uint64_t q_full[kQStages];
  uint64_t q_empty[kQStages];
  ConversionStorage<kCache> conversion;
};
template <DType kCache>
constexpr int kSharedBytes = sizeof(SharedStorage<kCache>);
static_assert(kSharedBytes<DType::kBFloat16> <= 227 * 1024, "shared memory of one CTA");
static_assert(kSharedBytes<DType::kFloat8E4M3> <= 227 * 1024, "shared memory of one CTA");

constexpr int kProducers = 4;  // warps
template <DType kCache>
constexpr int kKVFullArrivals = kIsFp8<kCache> ? kProducers : 1;  // each converts a part
constexpr int kKVEmptyArrivals = kConsumers * 4;                  // one a consumer warp
constexpr int kQEmptyArrivals = 4;  // one a warp of the stage's warpgroup

// Partial results, a slot for each leftover entry (prefill_plan.h):
//   out    [slots][G][128] bfloat16, not normalised, in the order of the accumulator: of 8 rows
//          of a slot four chunks of [row][quad] 16 bytes; chunk c holds columns 32 c to 32 c + 31
//   state  [slots][G] {maximum of the logits in log2 units, sum of exp2(logit - maximum)}
struct Partials {
  __nv_bfloat16* out;
  float2* state;
};

struct KVBlockParams {
  PagedView v_cache;
  Partials partials;
  const Pair* pairs;
  const WorkItem* work_items;
  const int32_t* item_range;  // [2]: the work items of this round
  int32_t* item_tickets;      // [1]: how many of them CTAs have drawn beyond their first
  const int32_t* used_slots;  // [1], of the call; null in short calls, which do not count them
  int32_t kept_slots;         // that L2 holds
  int32_t max_items;          // in memory
  int32_t round;
  float scale_log2;   // scale * log2(e)
  int32_t log_group;  // log2(G)
  ScaleView k_scale;  // of FP8 caches
  // Short calls, whose heads are merged as they end; else null:
  uint32_t* ended_heads;  // [num_heads]: how many CTAs have attended to all of a head
  int32_t num_heads;
  int32_t leaving_ctas;  // these end after the first head, to make room for the merge
};

}  // namespace msa::sparse_prefill::sm90
