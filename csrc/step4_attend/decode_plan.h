// How a decode call is cut: by its shapes alone, never by lengths, which only the device knows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/inverse.h"
#include "step3_remap/prefill_plan.h"
#include "step4_attend/attend_params.h"

namespace msa {

constexpr int64_t kMaxClusterSplits = 16;  // parts of a row that merge in a cluster
constexpr int64_t kMaxSplits = 128;        // parts of a row that merge by a second launch
constexpr int kMaxDraftGroups = 2;         // of a tile of draft tokens: kGroupRows rows each
constexpr int kGroupEntries = 128;         // (token, k) of such a group

// What the kernels of sparse_decode and paged_decode take.
struct DecodeParams {
  AttendParams attend;    // workspace: partial results [units][splits][G] where no cluster merges
  IdsView ids;            // sparse_decode only
  int64_t num_units;      // T * Hkv; unit h * T + t
  int32_t splits;         // CTAs of a unit
  int32_t tokens_each;    // T / B: where a token's request is looked for first,
  uint32_t inverse_each;  // by its inverse_of()
  int32_t tile_groups;    // tiles of draft tokens only: groups that one has,
  int32_t tile_tokens;    // and the most tokens
  bool two_an_sm;         // clusters only: two CTAs an SM
};

// Parts that each (token, KV head) is cut in, a power of two. `blocks`: the most that a row may
// walk. Few blocks: just enough CTAs for the machine, since every part costs a share of a merge.
// Many, that is a page table of unknown lengths: several times that, so that a long row beside
// short ones is not left to one CTA.
inline int64_t decode_splits(int64_t num_units, int64_t blocks) {
  constexpr int64_t kShort = 64, kCtas = 128, kManyCtas = 1024, kBlocksPerPart = 8;
  const bool is_short = blocks <= kShort;
  const int64_t most =
      is_short ? std::min<int64_t>(16, blocks) : std::min(kMaxSplits, blocks / kBlocksPerPart);
  const int64_t ctas = is_short ? kCtas : kManyCtas;
  int64_t splits = 1;
  while (2 * splits <= most && 2 * splits * num_units <= ctas) splits *= 2;
  return splits;
}

inline DecodeParams plan_decode(const AttendParams& attend, const IdsView& ids, int64_t blocks) {
  const int64_t units = attend.batch.num_tokens * attend.num_kv_heads;
  const auto each = static_cast<int32_t>(std::max<int64_t>(
      1, attend.batch.num_tokens / std::max<int64_t>(1, attend.batch.num_requests)));
  return {attend, ids,
          units,  static_cast<int32_t>(decode_splits(units, blocks)),
          each,   inverse_of(each),
          0,      0,
          false};
}

// Tokens of a tile of draft tokens of `groups` groups, 0 where such tiles do not pay: of one or two
// tokens a request there is little to share, and a tile, which has an SM of its own, cannot use
// much more than its share of the memory's speed: tiles must fill the machine, the last round of
// them too. Requests of more tokens than a tile holds are cut evenly. docs/kernels/sparse_decode.md
inline int32_t draft_tile_tokens(const DecodeParams& params, int groups) {
  constexpr int64_t kFewTokens = 3, kSms = 132;
  const int64_t each = params.tokens_each, group_size = params.attend.group_size;
  if (group_size < 8 || each < kFewTokens) return 0;
  const int64_t most =
      std::min<int64_t>(groups * kGroupRows / group_size, groups * kGroupEntries / params.ids.topk);
  const int64_t request_tiles = (each + most - 1) / most;
  const int64_t tiles =
      request_tiles * params.attend.batch.num_requests * params.attend.num_kv_heads;
  const int64_t rounds = (tiles + kSms - 1) / kSms;
  if (10 * tiles < 9 * rounds * kSms || tiles == 0) return 0;
  return static_cast<int32_t>((each + request_tiles - 1) / request_tiles);
}

// Tiles of two groups where they fill the machine, since tokens that share a tile share its blocks,
// and those that share none are slower in tiles of one; of one where only so many tiles fill it.
inline void cut_drafts(DecodeParams& params) {
  for (const int32_t groups : {kMaxDraftGroups, 1}) {
    params.tile_groups = groups;
    params.tile_tokens = draft_tile_tokens(params, groups);
    if (params.tile_tokens > 0) return;
  }
}

// sm90/: calls small enough that every CTA has an SM of its own, or half of one, the splits of a
// unit merged in a cluster. How to cut, no splits where the call is not that small; `blocks` as
// above.
struct ClusterCut {
  int32_t splits = 0;
  bool two_an_sm = false;
};
ClusterCut decode_cluster_cut(const DecodeParams& params, int64_t blocks,
                              const ExecContext& context);
void run_decode_cluster(const DecodeParams& params, const ExecContext& context, bool sparse);
// sm90/: a CTA a unit, where that fills the machine; FP8 caches that fits_tensor_maps().
void run_decode_stream(const DecodeParams& params, const ExecContext& context, bool sparse);
// sm90/, sparse_decode: two neighbouring tokens a CTA, the blocks that they share read once.
void run_decode_pairs(const DecodeParams& params, const ExecContext& context);
// sm90/, sparse_decode over bfloat16 caches: four neighbouring tokens a CTA, the slices that they
// share read once. CTAs of a cluster for each four of them, 0 where they do not run all at once.
int32_t decode_quad_splits(const DecodeParams& params, const ExecContext& context);
void run_decode_quads(const DecodeParams& params, const ExecContext& context);
// sm90/, sparse_decode over bfloat16 caches that fits_tensor_maps(): tiles of a request's tokens.
void run_decode_tiles(const DecodeParams& params, const ExecContext& context);

}  // namespace msa
