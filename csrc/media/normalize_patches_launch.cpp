#include "bindings/launch_functions.h"
#include "checks/op_checks.h"
#include "host/launch.h"
#include "media/normalize_patches_params.h"

namespace msa {
namespace {

void run(const TensorInfo& patches, const std::vector<double>& mean,
         const std::vector<double>& stddev, int64_t patch, int64_t temporal, const Tensor& out) {
  if (out.numel() == 0) return;
  NormalizePatchesParams params{};
  params.patches = static_cast<const uint8_t*>(patches.data);
  params.out = out.data_ptr();
  params.dtype = dtype_of(out.scalar_type());
  params.num_rows = patches.size(0);
  params.plane = patch * patch;
  params.frames = patches.size(1) / (kChannels * params.plane);
  params.temporal = temporal;
  for (size_t channel = 0; channel < kChannels; ++channel) {
    params.affine[channel] = make_pixel_affine(mean[channel], stddev[channel]);
  }
  run_normalize_patches(params, ExecScope("normalize_patches", out));
}

}  // namespace

Tensor launch_normalize_patches(const Tensor& patches, const std::vector<double>& mean,
                                const std::vector<double>& stddev, int64_t patch, int64_t temporal,
                                ScalarType dtype) {
  const TensorInfo patches_info = info("patches", patches);
  check_normalize_patches(patches_info, mean, stddev, patch, temporal, dtype_of(dtype),
                          name_of(dtype), TensorInfo{});
  const Tensor out = empty_like_device(
      patches, {patches_info.size(0), kChannels * temporal * patch * patch}, dtype);
  run(patches_info, mean, stddev, patch, temporal, out);
  return out;
}

void launch_normalize_patches_out(const Tensor& patches, const std::vector<double>& mean,
                                  const std::vector<double>& stddev, int64_t patch,
                                  int64_t temporal, const Tensor& out) {
  const TensorInfo patches_info = info("patches", patches), out_info = info("out", out);
  check_normalize_patches(patches_info, mean, stddev, patch, temporal, out_info.dtype,
                          out_info.dtype_name, out_info);
  run(patches_info, mean, stddev, patch, temporal, out);
}

}  // namespace msa
