// Host side of the tile kernel: a grid with room for any lengths, and tensor maps of q, K and V.
#include <algorithm>
#include <cmath>

#include "device/dependent_launch.cuh"
#include "device/persistent_grid.cuh"
#include "step4_attend/sm90/decode_tile_kernel.cuh"
#include "step4_attend/sm90/tensor_maps.h"

namespace msa {
namespace {

template <int kGroups>
void launch(const DecodeParams& params, const ExecContext& context) {
  using Storage = decode::sm90::DraftStorage<kGroups>;
  constexpr auto kernel = decode::sm90::msa_decode_tile_sm90_kernel<kGroups>;
  constexpr int kSharedBytes = sizeof(Storage);
  const AttendParams& attend = params.attend;
  const BatchView& batch = attend.batch;
  // Each request may end in a part of a tile.
  const int64_t tiles =
      batch.num_tokens / params.tile_tokens + std::min(batch.num_requests, batch.num_tokens);
  const float scale_log2 = attend.scale * 1.44269504088896340736f;
  const auto log_group = static_cast<int32_t>(std::lround(std::log2(attend.group_size)));
  const decode::sm90::DraftParams draft{{batch, attend.v_cache, attend.out, attend.lse, scale_log2,
                                         attend.num_kv_heads, log_group, attend.v_scale},
                                        params.ids,
                                        attend.k_cache.num_pages,
                                        params.tile_tokens};
  raise_shared_memory_limit<kernel>(context.op, context.device, kSharedBytes);
  launch_dependent(context.op, "launching msa_decode_tile_sm90_kernel", kernel,
                   std::max(int64_t{1}, tiles * attend.num_kv_heads), Storage::kThreads,
                   kSharedBytes, static_cast<cudaStream_t>(context.stream), draft,
                   make_q_map(attend, context), make_kv_map(attend.k_cache, attend, context),
                   make_kv_map(attend.v_cache, attend, context));
}

}  // namespace

void run_decode_tiles(const DecodeParams& params, const ExecContext& context) {
  if (params.tile_groups == 1) return launch<1>(params, context);
  return launch<kMaxDraftGroups>(params, context);
}

}  // namespace msa
