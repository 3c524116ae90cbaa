// csrc/device/sm80_mma.cuh, emulated.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/shared_memory.cuh"

namespace msa {
namespace detail {

// What a lane has of an instruction; the last lane to come does it for all.
struct LaneMatrices {
  uint32_t* words;
  uint32_t address;
};
struct LaneProduct {
  float* sum;
  const uint32_t* a;
  uint32_t b[2];
};

template <bool kTransposed>
void load_all_matrices(const uint64_t* lanes) {
  const auto lane_of = [&](int lane) {
    return *reinterpret_cast<const LaneMatrices*>(lanes[lane]);
  };
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t elements[8][8];
    for (int row = 0; row < 8; ++row) {
      const uint32_t address = lane_of(8 * matrix + row).address;
      std::memcpy(elements[row], shared_bytes(address, 16), 16);
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int major = lane / 4, minor = 2 * (lane % 4);
      const uint16_t low = kTransposed ? elements[minor][major] : elements[major][minor];
      const uint16_t high = kTransposed ? elements[minor + 1][major] : elements[major][minor + 1];
      lane_of(lane).words[matrix] = low | static_cast<uint32_t>(high) << 16;
    }
  }
}

// In order of k, in float32.
template <float (*to_float)(uint16_t)>
void multiply_all(const uint64_t* lanes) {
  float a[16][16], b[16][8], sums[16][8];  // [row][k], [k][column], [row][column]
  const auto unpack = [](uint32_t word, float& first, float& second) {
    first = to_float(static_cast<uint16_t>(word));
    second = to_float(static_cast<uint16_t>(word >> 16));
  };
  for (int lane = 0; lane < 32; ++lane) {
    const auto& product = *reinterpret_cast<const LaneProduct*>(lanes[lane]);
    const int group = lane / 4, pair = 2 * (lane % 4);
    for (int i = 0; i < 4; ++i) {
      float* const row = a[group + i % 2 * 8] + i / 2 * 8 + pair;
      unpack(product.a[i], row[0], row[1]);
      sums[group + i / 2 * 8][pair + i % 2] = product.sum[i];
    }
    for (int i = 0; i < 2; ++i) {
      unpack(product.b[i], b[8 * i + pair][group], b[8 * i + pair + 1][group]);
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) sums[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto& product = *reinterpret_cast<const LaneProduct*>(lanes[lane]);
    for (int i = 0; i < 4; ++i) {
      product.sum[i] = sums[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
    }
  }
}

template <typename Lane>
void do_together(emulation::Collective op, const Lane& lane, void (*work)(const uint64_t*)) {
  emulation::work_together(op, reinterpret_cast<uint64_t>(&lane), work);
}

}  // namespace detail

inline void load_matrices(uint32_t (&words)[4], uint32_t address) {
  const detail::LaneMatrices lane{words, address};
  detail::do_together(emulation::kMatrices, lane, &detail::load_all_matrices<false>);
}
inline void load_matrices_transposed(uint32_t (&words)[4], uint32_t address) {
  const detail::LaneMatrices lane{words, address};
  detail::do_together(emulation::kMatrices, lane, &detail::load_all_matrices<true>);
}

inline void multiply_bf16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const detail::LaneProduct lane{sum, a, {b0, b1}};
  detail::do_together(emulation::kMma, lane, &detail::multiply_all<emulation::bfloat16_to_float>);
}
inline void multiply_f16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const detail::LaneProduct lane{sum, a, {b0, b1}};
  detail::do_together(emulation::kMma, lane, &detail::multiply_all<emulation::half_to_float>);
}

}  // namespace msa
