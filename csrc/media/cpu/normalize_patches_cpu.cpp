// out[row, c, t] = (patches[row, c, t or 0] - 255 mean_c) / (255 std_c), in float32, rounded to
// out's dtype; a single frame is written `temporal` times.
//
// Threads: ranges of rows.
// Limits: none beyond the check's. A division is no slower here than what the GPU does instead: the
// loop writes memory.
#include <cstring>

#include "cpu/element.h"
#include "cpu/simd.h"
#include "host/parallel.h"
#include "media/normalize_patches_params.h"

namespace msa {
namespace {

constexpr int64_t kRowsPerTask = 32;  // fewer are done sooner than a thread wakes up

void normalize_row(const NormalizePatchesParams& params, int64_t row) {
  const int64_t in_run = params.frames * params.plane, out_run = params.temporal * params.plane;
  const int64_t size = element_size(params.dtype);
  for (int64_t channel = 0; channel < kChannels; ++channel) {
    const int64_t run = row * kChannels + channel;
    const PixelAffine& affine = params.affine[channel];
    char* out = static_cast<char*>(params.out) + run * out_run * size;
    simd().normalize_pixels(params.patches + run * in_run, in_run, affine.mean, affine.stddev,
                            params.dtype, out);
    for (int64_t done = in_run; done < out_run; done += in_run) {
      std::memcpy(out + done * size, out, static_cast<size_t>(in_run * size));
    }
  }
}

}  // namespace

void run_normalize_patches(const NormalizePatchesParams& params, const ExecContext&) {
  parallel_for(params.num_rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) normalize_row(params, row);
  });
}

}  // namespace msa
