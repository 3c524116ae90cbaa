#include <algorithm>

#include "configs/built_configs.h"
#include "device/persistent_grid.cuh"
#include "step1_score/sm90/score_stream_kernel.cuh"

namespace msa::index_score::sm90 {
namespace {

template <DType dtype, int kRows>
void launch(ScoreWork work, const ExecContext& context) {
  constexpr auto kernel = msa_index_score_stream_sm90_kernel<dtype, kRows>;
  constexpr int kThreads = stream_warps<dtype, kRows>() * 32;
  constexpr int kSharedBytes = stream_shared_bytes<dtype, kRows>();
  work.cut.log_tile = log_tile_tokens(kRows, work.num_heads);
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

}  // namespace msa::index_score::sm90
