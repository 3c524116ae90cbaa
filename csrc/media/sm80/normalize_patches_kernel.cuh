// Media, normalize_patches: uint8 pixels of patches into normalised numbers, temporal copy
// included.
//
//   out[row, c, t, i] = (patches[row, c, frames == 1 ? 0 : t, i] - 255 mean_c) / (255 std_c)
//   in float32, rounded to nearest even where out is bfloat16.
//
// Portable: every GPU from sm_80 on. Bound by memory: every byte is read once, every number written
// once; nothing is reused but the 48 bytes of the affine.
//
// Layout    both tensors are without gaps, so they are one line of words, 4 pixels each. A run is
//           the words of one (row, channel): frames * patch^2 / 4. A plane of 14 x 14 is 49 words,
//           so a word never holds two channels or two frames, but 8 pixels may.
// Grid      a CTA takes a tile of kThreads * kUnroll units of kWords words, from any place of the
//           line on: rows of 147 or 294 words would not fill a CTA evenly.
// Roles     all threads alike; a warp reads and writes neighbouring units.
// Copies    1: out's line is that of the patches. Word w goes to word w, 16 bytes a store; of
//           bfloat16 two words a unit (one where the line has an odd number, or is not aligned).
//           2: word w of a run goes to 2 w - offset and once more a run further, offset being its
//           place in the run; the second plane starts 392 bytes later, so that bfloat16 stores have
//           8 bytes (a warp still writes whole sectors, 256 bytes in a row); float32 16.
// Shared    the affine of the three channels, 16 bytes each, and where in a row the tile begins.
// Barriers  one, before the affine is used; the loads are under way by then.
// Timeline  kUnroll loads a thread, barrier, then convert and store one unit after the other. A
//           third of the bytes at most are read (a fifth with 2 copies): 8 to 16 KiB of loads in
//           flight an SM are enough, and no 16-byte load is needed.
// Limits    run at least 4 and at most 8192 words (checked by patch and temporal); 64-bit offsets.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "device/vector_io.cuh"
#include "media/normalize_patches_params.h"

namespace msa::normalize_patches::sm80 {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

struct PatchGrid {
  int64_t num_units;
  uint32_t run;        // words of one (row, channel)
  uint32_t run_magic;  // floor(2^32 / run) + 1: the high half of n * run_magic is n / run where
                       // n * run < 2^32
};

constexpr uint32_t kMaxRun = kMaxTemporal * kMaxPatch * kMaxPatch / 4;
static_assert(uint64_t{kChannels * kMaxRun + kThreads * kUnroll * 2} * kMaxRun < uint64_t{1} << 32,
              "the place of a word in its row and tile is divided by the magic product");
static_assert(uint64_t{kChannels * kMaxRun} * kChannels * kMaxRun < uint64_t{1} << 32,
              "the start of a tile within its row is a 32-bit product");

// Byte `index` of a word as a float: 2^23 + x is made of the byte and a constant, then 2^23 goes.
__device__ __forceinline__ float pixel(uint32_t word, int index) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u + index)) - 8388608.0f;
}

// 4 or 8 numbers as the 8 or 16 bytes that they are stored in.
template <typename Element, int kNumbers>
struct Store {
  using Type = uint4;
  static __device__ __forceinline__ Type pack(const float (&values)[kNumbers]) {
    return Vector16<Element>::from_float(values);
  }
};
template <>
struct Store<__nv_bfloat16, 4> {
  using Type = uint2;
  static __device__ __forceinline__ Type pack(const float (&values)[4]) {
    const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(values[0], values[1]),
                                     __floats2bfloat162_rn(values[2], values[3])};
    return {*reinterpret_cast<const uint32_t*>(&pairs[0]),
            *reinterpret_cast<const uint32_t*>(&pairs[1])};
  }
};

template <typename Element, int kCopies, int kWords>
__global__ void __launch_bounds__(kThreads)
    msa_normalize_patches_sm80_kernel(const __grid_constant__ NormalizePatchesParams params,
                                      const PatchGrid grid) {
  static_assert(kWords == 1 || (kWords == 2 && kCopies == 1 && sizeof(Element) == 2));
  using Load = std::conditional_t<kWords == 2, uint2, uint32_t>;
  using Out = Store<Element, 4 * kWords>;
  __shared__ PixelAffine affine[kChannels];
  __shared__ uint32_t tile_place;  // of the tile's first word in its row, 0 to 3 run - 1

  const int64_t first_unit = static_cast<int64_t>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
  const Load* const source = reinterpret_cast<const Load*>(params.patches) + first_unit;
  Load bits[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (first_unit + i * kThreads < grid.num_units) bits[i] = source[i * kThreads];
  }

  if (threadIdx.x < kChannels) affine[threadIdx.x] = params.affine[threadIdx.x];
  if (threadIdx.x == 0) {
    const uint32_t row = kChannels * grid.run;
    tile_place = blockIdx.x % row * (kThreads * kUnroll * kWords % row) % row;
  }
  __syncthreads();

#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t unit = first_unit + i * kThreads;
    if (unit >= grid.num_units) continue;
    float values[4 * kWords];
    uint32_t offset = 0;
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      uint32_t word;
      if constexpr (kWords == 2) {
        word = j == 0 ? bits[i].x : bits[i].y;
      } else {
        word = bits[i];
      }
      const uint32_t place = tile_place + (threadIdx.x + i * kThreads) * kWords + j;
      const uint32_t run = __umulhi(place, grid.run_magic);
      offset = place - run * grid.run;
      const PixelAffine channel = affine[run % kChannels];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        values[4 * j + b] = normalize_pixel(pixel(word, b), channel);
      }
    }
    const auto stored = Out::pack(values);
    auto* const out = static_cast<typename Out::Type*>(params.out);
    if constexpr (kCopies == 1) {
      out[unit] = stored;
    } else {
      out[2 * unit - offset] = stored;
      out[2 * unit - offset + grid.run] = stored;
    }
  }
}

}  // namespace msa::normalize_patches::sm80
