#include <algorithm>

#include "configs/built_configs.h"
#include "device/persistent_grid.cuh"
#include "step1_score/sm90/score_stream_kernel.cuh"
#include "step1_score/sm90/score_tile_kernel.cuh"

namespace msa::index_score::sm90 {
namespace {

template <DType dtype, int kRows>
void launch(const ScoreWork& work, const ExecContext& context) {
  constexpr auto kernel = msa_index_score_stream_sm90_kernel<dtype, kRows>;
  constexpr int kThreads = stream_warps<dtype, kRows>() * 32;
  constexpr int kSharedBytes = stream_shared_bytes<dtype, kRows>();
  const int64_t resident =
      resident_ctas<kernel>(context.op, context.device, kThreads, kSharedBytes);
  launch_dependent(context.op, "the launch of msa_index_score_stream_sm90_kernel", kernel,
                   std::min(resident, useful_ctas(work, kThreads / 32)), kThreads, kSharedBytes,
                   static_cast<cudaStream_t>(context.stream), work);
}

template <DType dtype>
void launch_rows(const ScoreWork& work, int64_t rows, const ExecContext& context) {
  if (rows <= 8) return launch<dtype, 8>(work, context);
  if (rows <= 16) return launch<dtype, 16>(work, context);
  if (rows <= 32) return launch<dtype, 32>(work, context);
  return launch<dtype, 64>(work, context);
}

}  // namespace

void run_stream(const ScoreWork& work, int64_t rows, const ExecContext& context) {
  if (work.index_q.dtype == DType::kFloat8E4M3) {
    return launch_rows<DType::kFloat8E4M3>(work, rows, context);
  }
  launch_rows<DType::kBFloat16>(work, rows, context);
}

void run_tiles(const ScoreWork& work, const ExecContext& context) {
  const PagedView& cache = work.index_k_cache;
  const uint64_t page_bytes = cache.page_stride * 2;
  const CUtensorMap map = msa::sm90::make_tensor_map<5>(
      context.op, cache.data, {64, kBlock, 2, 1, static_cast<uint64_t>(cache.num_pages)},
      {static_cast<uint64_t>(cache.token_stride) * 2, 128, page_bytes, page_bytes},
      {64, kBlock, 2, 1, 1});
  const int64_t resident = resident_ctas<msa_index_score_tile_sm90_kernel>(
      context.op, context.device, kTileThreads, kTileSharedBytes);
  launch_dependent(context.op, "the launch of msa_index_score_tile_sm90_kernel",
                   msa_index_score_tile_sm90_kernel, std::min(resident, useful_ctas(work, 1)),
                   kTileThreads, kTileSharedBytes, static_cast<cudaStream_t>(context.stream), work,
                   map);
}

}  // namespace msa::index_score::sm90
