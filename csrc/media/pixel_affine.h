// (x - 255 mean) / (255 std) of a channel, to the bit as float32 subtraction and division give it.
//
// The device divides by a product: with y = 1 / s as the sum of two floats, d y is so near that its
// rounding is one of the two floats around d / s; its remainder is then exact, and one step by it
// rounds correctly (Markstein's theorem). No branch and no reciprocal in the loop, unlike a
// division. All of it holds while nothing underflows: for mean 0, or from 1e-20 on.
#pragma once

#include <cmath>

#ifdef __CUDACC__
#define MSA_PIXEL_FUNCTION __host__ __device__ __forceinline__
#else
#define MSA_PIXEL_FUNCTION inline
#endif

namespace msa {

struct alignas(16) PixelAffine {
  float mean;         // 255 mean
  float stddev;       // 255 std
  float inverse;      // 1 / stddev, rounded
  float inverse_low;  // what that rounding left
};

inline PixelAffine make_pixel_affine(double mean, double stddev) {
  PixelAffine affine{};
  // Rounded before the product too: the reference processors hold both as float32.
  affine.mean = static_cast<float>(mean) * 255.0f;
  affine.stddev = static_cast<float>(stddev) * 255.0f;
  const double inverse = 1.0 / static_cast<double>(affine.stddev);
  affine.inverse = static_cast<float>(inverse);
  affine.inverse_low = static_cast<float>(inverse - static_cast<double>(affine.inverse));
  return affine;
}

MSA_PIXEL_FUNCTION float normalize_pixel(float x, const PixelAffine& affine) {
  const float d = x - affine.mean;
  const float q = fmaf(d, affine.inverse, d * affine.inverse_low);
  return fmaf(fmaf(-q, affine.stddev, d), affine.inverse, q);
}

}  // namespace msa
