#include "bindings/launch_functions.h"
#include "checks/op_checks.h"
#include "host/launch.h"
#include "step5_merge/merge_lse_params.h"

namespace msa {
namespace {

MergePart part_view(const TensorInfo& out, const TensorInfo& lse) {
  // Of stacked [P, T, H, D] parts this is the first.
  const int token_dim = out.dims - 3, head_dim = out.dims - 2;
  return {out.data,
          static_cast<const float*>(lse.data),
          out.stride(token_dim),
          out.stride(head_dim),
          lse.stride(token_dim),
          lse.stride(head_dim)};
}

void run_stacked(const Tensor& outs, const TensorInfo& outs_info, const TensorInfo& lses_info,
                 const Tensor& out, const Tensor& lse) {
  if (out.numel() == 0) return;
  MergeLseParams params{};
  params.parts[0] = part_view(outs_info, lses_info);
  params.out_part_stride = outs_info.stride(0);
  params.lse_part_stride = lses_info.stride(0);
  params.stacked = true;
  params.dtype = outs_info.dtype;
  params.num_parts = outs_info.size(0);
  params.num_tokens = outs_info.size(1);
  params.num_heads = outs_info.size(2);
  params.out = rows_view(info("out", out));
  params.lse = lse_view(info("lse", lse));
  run_merge_lse(params, ExecScope("merge_lse", outs));
}

}  // namespace

TwoTensors launch_merge_lse(const Tensor& outs, const Tensor& lses) {
  const TensorInfo outs_info = info("outs", outs), lses_info = info("lses", lses);
  check_merge_lse(outs_info, lses_info, TensorInfo{}, TensorInfo{});
  const Tensor out = empty_like_device(outs, {outs_info.size(1), outs_info.size(2), kHeadDim});
  const Tensor lse = empty_like_device(lses, {outs_info.size(1), outs_info.size(2)});
  run_stacked(outs, outs_info, lses_info, out, lse);
  return {out, lse};
}

void launch_merge_lse_out(const Tensor& outs, const Tensor& lses, const Tensor& out,
                          const Tensor& lse) {
  const TensorInfo outs_info = info("outs", outs), lses_info = info("lses", lses);
  check_merge_lse(outs_info, lses_info, info("out", out), info("lse", lse));
  run_stacked(outs, outs_info, lses_info, out, lse);
}

TwoTensors launch_merge_lse_parts(const std::vector<Tensor>& outs,
                                  const std::vector<Tensor>& lses) {
  // Names of their own for messages: the infos keep pointers to them.
  std::vector<std::string> names;
  names.reserve(outs.size() + lses.size());
  const auto infos = [&names](const char* list, const std::vector<Tensor>& parts) {
    std::vector<TensorInfo> result;
    for (size_t part = 0; part < parts.size(); ++part) {
      names.push_back(list + std::string("[") + std::to_string(part) + "]");
      result.push_back(info(names.back().c_str(), parts[part]));
    }
    return result;
  };
  const std::vector<TensorInfo> out_infos = infos("outs", outs), lse_infos = infos("lses", lses);
  check_merge_lse_parts(out_infos.data(), static_cast<int64_t>(outs.size()), lse_infos.data(),
                        static_cast<int64_t>(lses.size()));

  const Tensor out =
      empty_like_device(outs[0], {out_infos[0].size(0), out_infos[0].size(1), kHeadDim});
  const Tensor lse = empty_like_device(lses[0], {out_infos[0].size(0), out_infos[0].size(1)});
  if (out.numel() == 0) return {out, lse};
  MergeLseParams params{};
  for (size_t part = 0; part < outs.size(); ++part) {
    params.parts[part] = part_view(out_infos[part], lse_infos[part]);
  }
  params.dtype = out_infos[0].dtype;
  params.num_parts = static_cast<int64_t>(outs.size());
  params.num_tokens = out_infos[0].size(0);
  params.num_heads = out_infos[0].size(1);
  params.out = rows_view(info("out", out));
  params.lse = lse_view(info("lse", lse));
  run_merge_lse(params, ExecScope("merge_lse", outs[0]));
  return {out, lse};
}

}  // namespace msa
