// Host side of KV-block-major decode: the kernel that attends, and the one that merges.
#include <algorithm>
#include <cmath>

#include "device/dependent_launch.cuh"
#include "device/persistent_grid.cuh"
#include "step4_attend/sm90/decode_block_kernel.cuh"
#include "step4_attend/sm90/tensor_maps.h"

namespace msa {
namespace {

namespace hopper = decode::sm90;

struct Workspace {
  sparse_prefill::sm90::Partials partials;
  uint32_t* counts;
  int64_t bytes;
};

Workspace cut_workspace(const DecodeParams& params) {
  Workspace work{};
  const int64_t rows = params.num_units * params.ids.topk * params.attend.group_size;
  uint8_t* const base = static_cast<uint8_t*>(params.attend.workspace);
  int64_t offset = 0;
  const auto take = [&](auto*& array, int64_t count) {
    using Element = std::remove_pointer_t<std::remove_reference_t<decltype(array)>>;
    array = reinterpret_cast<Element*>(base + offset);
    offset += (count * int64_t{sizeof(Element)} + 255) / 256 * 256;
  };
  take(work.partials.out, rows * kHeadDim);
  take(work.partials.state, rows);
  take(work.counts, params.num_units);
  work.bytes = offset;
  return work;
}

uint32_t inverse_of(int64_t divisor) {
  return static_cast<uint32_t>((65536 + divisor - 1) / divisor);
}

}  // namespace

bool deal_draft_blocks(DecodeParams& params, const ExecContext& context) {
  constexpr int64_t kFewTokens = 3;
  const BatchView& batch = params.attend.batch;
  const int64_t each = params.tokens_each, group_size = params.attend.group_size;
  if (group_size < 8 || each < kFewTokens) return false;
  if (batch.num_requests * batch.max_pages > 0x7fffffff) return false;
  const int64_t group_tokens = kGroupRows / group_size;
  const int64_t most =
      std::min(kMaxDraftGroups * group_tokens, kMaxDraftEntries / params.ids.topk);
  const int64_t request_tiles = (each + most - 1) / most;
  const int64_t tile_tokens = (each + request_tiles - 1) / request_tiles;
  const int64_t tiles = (batch.num_tokens + tile_tokens - 1) / tile_tokens;
  const int64_t ctas = resident_ctas<hopper::msa_decode_block_sm90_kernel>(
      context.op, context.device, hopper::DraftBlockStorage::kThreads,
      sizeof(hopper::DraftBlockStorage));
  const int64_t parts =
      std::min(ctas / (tiles * params.attend.num_kv_heads), tile_tokens * params.ids.topk);
  if (parts < kMinDraftParts) return false;
  params.tile_tokens = static_cast<int32_t>(tile_tokens);
  params.tile_groups = tile_tokens > group_tokens ? kMaxDraftGroups : 1;
  params.splits = static_cast<int32_t>(parts);
  return true;
}

int64_t decode_blocks_workspace_bytes(const DecodeParams& params) {
  return cut_workspace(params).bytes;
}

void run_decode_blocks(const DecodeParams& params, const ExecContext& context) {
  constexpr auto kernel = hopper::msa_decode_block_sm90_kernel;
  constexpr int kSharedBytes = sizeof(hopper::DraftBlockStorage);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const AttendParams& attend = params.attend;
  const BatchView& batch = attend.batch;
  const Workspace work = cut_workspace(params);
  const float scale_log2 = attend.scale * 1.44269504088896340736f;
  const auto log_group = static_cast<int32_t>(std::lround(std::log2(attend.group_size)));
  const auto heads = static_cast<unsigned>(attend.num_kv_heads);
  const auto tiles =
      static_cast<unsigned>((batch.num_tokens + params.tile_tokens - 1) / params.tile_tokens);
  const int32_t group_tokens = (params.tile_tokens + params.tile_groups - 1) / params.tile_groups;
  launch_in_stream(context.op, "launching msa_decode_block_sm90_kernel", true, kernel,
                   dim3(static_cast<unsigned>(params.splits), tiles, heads),
                   hopper::DraftBlockStorage::kThreads, kSharedBytes, stream,
                   hopper::DraftBlockParams{attend, params.ids, work.partials, work.counts,
                                          scale_log2, log_group, params.tokens_each,
                                          params.tile_tokens, group_tokens, params.splits,
                                          inverse_of(params.splits), inverse_of(params.ids.topk)},
                   make_q_map(attend, context), make_kv_map(attend.k_cache, attend, context),
                   make_kv_map(attend.v_cache, attend, context));

  sparse_prefill::sm90::FinishParams finish{};
  finish.out = attend.out;
  finish.lse = attend.lse;
  finish.num_kv_heads = attend.num_kv_heads;
  finish.log_group = log_group;
  finish.partials = work.partials;
  finish.plan.num_tokens = batch.num_tokens;
  finish.plan.leftovers = work.counts;
  finish.fixed_slots = static_cast<int32_t>(params.ids.topk);
  launch_in_stream(context.op, "launching msa_decode_block_merge_sm90_kernel", true,
                   hopper::msa_decode_block_merge_sm90_kernel,
                   dim3(static_cast<unsigned>(batch.num_tokens * attend.group_size / 8), heads),
                   128, 0, stream, finish);
}

}  // namespace msa
