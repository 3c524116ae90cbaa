// How a decode call is cut: by its shapes alone, never by lengths, which only the device knows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "step4_attend/attend_params.h"

namespace msa {

constexpr int64_t kMaxClusterSplits = 16;  // parts of a row that merge in a cluster
constexpr int64_t kMaxSplits = 128;        // parts of a row that merge by a second launch
constexpr int64_t kSmallCtas = 128;        // calls with so few CTAs: sm90/ gives each an SM

// What the kernels of sparse_decode and paged_decode take.
struct DecodeParams {
  AttendParams attend;  // workspace: partial results [units][splits][G] where no cluster merges
  IdsView ids;          // sparse_decode only
  int64_t num_units;    // T * Hkv; unit h * T + t
  int32_t splits;       // CTAs of a unit
};

// Parts that each (token, KV head) is cut in, a power of two. `blocks`: the most that a row may
// walk. Few blocks: just enough CTAs for the machine, since every part costs a share of a merge.
// Many, that is a page table of unknown lengths: several times that, so that a long row beside
// short ones is not left to one CTA.
inline int64_t decode_splits(int64_t num_units, int64_t blocks) {
  constexpr int64_t kShort = 64, kManyCtas = 1024, kBlocksPerPart = 8;
  const bool is_short = blocks <= kShort;
  const int64_t most = is_short ? std::min(kMaxClusterSplits, blocks)
                                : std::min(kMaxSplits, blocks / kBlocksPerPart);
  const int64_t ctas = is_short ? kSmallCtas : kManyCtas;
  int64_t splits = 1;
  while (2 * splits <= most && 2 * splits * num_units <= ctas) splits *= 2;
  return splits;
}

inline DecodeParams plan_decode(const AttendParams& attend, const IdsView& ids, int64_t blocks) {
  const int64_t units = attend.batch.num_tokens * attend.num_kv_heads;
  return {attend, ids, units, static_cast<int32_t>(decode_splits(units, blocks))};
}

// sm90/: few CTAs of many warps, the splits of a unit merged in a cluster.
void run_decode_cluster(const DecodeParams& params, const ExecContext& context, bool sparse);
// sm90/, sparse_decode: two neighbouring tokens a CTA, the blocks that they share read once.
void run_decode_pairs(const DecodeParams& params, const ExecContext& context);

}  // namespace msa
