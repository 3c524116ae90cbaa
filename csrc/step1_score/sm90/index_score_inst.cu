#include <algorithm>

#include "configs/built_configs.h"
#include "device/persistent_grid.cuh"
#include "step1_score/sm90/score_stream_kernel.cuh"
#include "step1_score/sm90/score_tile_kernel.cuh"

namespace msa::index_score::sm90 {
namespace {

template <DType dtype, int kRows, bool kSmall>
void launch_grid(const ScoreWork& work, int64_t grid, const ExecContext& context) {
  using Shape = StreamShape<dtype, kRows, kSmall>;
  launch_dependent(context.op, "the launch of msa_index_score_stream_sm90_kernel",
                   msa_index_score_stream_sm90_kernel<dtype, kRows, kSmall>, grid, Shape::kThreads,
                   Shape::kSharedBytes, static_cast<cudaStream_t>(context.stream), work);
}

template <DType dtype, int kRows>
void launch(const ScoreWork& work, const ExecContext& context) {
  using Shape = StreamShape<dtype, kRows, false>;
  static_assert(StreamShape<dtype, kRows, true>::kSharedBytes <= 40 << 10,
                "its limit is not raised, and it has static shared memory beside");
  const int64_t resident = resident_ctas<msa_index_score_stream_sm90_kernel<dtype, kRows, false>>(
      context.op, context.device, Shape::kThreads, Shape::kSharedBytes);
  const int64_t pages = useful_ctas(work, 1);
  if (pages <= resident) return launch_grid<dtype, kRows, true>(work, pages, context);
  launch_grid<dtype, kRows, false>(work, resident, context);
}

template <DType dtype>
void launch_rows(const ScoreWork& work, int64_t rows, const ExecContext& context) {
  if (rows <= 8) return launch<dtype, 8>(work, context);
  if (rows <= 16) return launch<dtype, 16>(work, context);
  if (rows <= 32) return launch<dtype, 32>(work, context);
  return launch<dtype, 64>(work, context);
}

template <DType dtype>
void launch_tiles(const ScoreWork& work, const ExecContext& context) {
  constexpr auto kernel = msa_index_score_tile_sm90_kernel<dtype>;
  constexpr int kSharedBytes = tile_shared_bytes<dtype>();
  // Pages in boxes of rows of 128 bytes: halves of bfloat16 rows, or whole FP8 ones.
  constexpr uint64_t kElementBytes = TileConfig<dtype>::kConverts ? 1 : 2;
  const PagedView& cache = work.index_k_cache;
  const uint64_t page_bytes = cache.page_stride * kElementBytes;
  const CUtensorMap map = msa::sm90::make_tensor_map<5>(
      context.op, cache.data,
      {64, kBlock, kElementBytes, 1, static_cast<uint64_t>(cache.num_pages)},
      {cache.token_stride * kElementBytes, 128, page_bytes, page_bytes},
      {64, kBlock, static_cast<uint32_t>(kElementBytes), 1, 1});
  const int64_t resident =
      resident_ctas<kernel>(context.op, context.device, kTileThreads, kSharedBytes);
  launch_dependent(context.op, "the launch of msa_index_score_tile_sm90_kernel", kernel,
                   std::min(resident, useful_ctas(work, 1)), kTileThreads, kSharedBytes,
                   static_cast<cudaStream_t>(context.stream), work, map);
}

}  // namespace

void run_stream(const ScoreWork& work, int64_t rows, const ExecContext& context) {
  if (work.index_q.dtype == DType::kFloat8E4M3) {
    return launch_rows<DType::kFloat8E4M3>(work, rows, context);
  }
  launch_rows<DType::kBFloat16>(work, rows, context);
}

void run_tiles(const ScoreWork& work, const ExecContext& context) {
  if (work.index_q.dtype == DType::kFloat8E4M3) {
    return launch_tiles<DType::kFloat8E4M3>(work, context);
  }
  launch_tiles<DType::kBFloat16>(work, context);
}

}  // namespace msa::index_score::sm90
