// Media: uint8 pixels of patches into what the vision tower's first convolution reads.
#pragma once

#include <cstdint>

#include "common/views.h"
#include "host/exec_context.h"
#include "media/pixel_affine.h"

namespace msa {

constexpr int kChannels = 3;
constexpr int kMinPatch = 4, kMaxPatch = 128;  // pixels a side, even
constexpr int kMaxTemporal = 2;
constexpr double kMinPixelStd = 1e-6;

struct NormalizePatchesParams {
  const uint8_t* patches;  // [rows, kChannels, frames, plane], no gaps, aligned to 4 bytes
  void* out;               // [rows, kChannels, temporal, plane], no gaps, aligned to 16 bytes
  DType dtype;             // of out: kFloat32 or kBFloat16
  int64_t num_rows;
  int64_t frames;    // that patches holds of each row: temporal, or 1 to be copied
  int64_t temporal;  // 1 or 2
  int64_t plane;     // pixels of one frame of a patch and channel, a multiple of 4
  PixelAffine affine[kChannels];
};

void run_normalize_patches(const NormalizePatchesParams& params, const ExecContext& context);

}  // namespace msa
