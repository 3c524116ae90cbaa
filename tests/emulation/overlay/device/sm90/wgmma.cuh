// csrc/device/sm90/wgmma.cuh, emulated. A lane's part of a product is done when it waits for it:
// the latest that a GPU may, so that operands that were given away too early show.
//
// Sums of 16-bit products are float32's, in order of k; those of e4m3 follow
// step1_score/sm90/score_error.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <array>

#include "device/shared_memory.cuh"

namespace msa::sm90 {

using Accumulator = float[64];

inline uint64_t make_descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) |
         static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32 | uint64_t{1} << 62;
}
inline uint64_t advance(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

namespace detail {

using msa::detail::shared_bytes;

constexpr int kColumns = 32;  // of 128, those of which a lane has sums, of two rows each
constexpr uint32_t kNan = 0x7fffffff;

// Column i of a lane, and the places of its two sums.
inline int column_of(int i) { return i / 2 * 8 + emulation::lane() % 4 * 2 + i % 2; }
inline int place_of(int i, int high) { return i / 2 * 4 + 2 * high + i % 2; }

// 128-byte swizzle of bytes `offset` behind a descriptor's address.
inline const uint8_t* swizzled(uint64_t descriptor, uint32_t offset) {
  uint32_t address = static_cast<uint32_t>(descriptor & 0x3fff) * 16 + offset;
  address ^= (address >> 7 & 7) << 4;
  return shared_bytes(address, 1);
}

// Bytes [0, 32) of row `row` of a tile whose rows are contiguous, eight rows of 128 bytes together.
inline void load_row(uint64_t descriptor, int row, uint8_t (&bytes)[32]) {
  const uint32_t stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) * 16;
  const uint32_t offset = row / 8 * stride + row % 8 * 128;
  std::memcpy(bytes, swizzled(descriptor, offset), 16);
  std::memcpy(bytes + 16, swizzled(descriptor, offset + 16), 16);
}

// Row k of 16, columns `column` and the next, of a tile whose rows have 64 columns in 128 bytes,
// eight rows together.
inline void load_pair(uint64_t descriptor, int k, int column, uint16_t (&pair)[2]) {
  const uint32_t leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) * 16;
  const uint32_t stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) * 16;
  const uint32_t offset = column / 64 * leading + k / 8 * stride + k % 8 * 128 + column % 64 * 2;
  std::memcpy(pair, swizzled(descriptor, offset), 4);
}

// One instruction of a lane.
struct Product {
  void (*run)(const Product&);
  uint8_t a[2][32];  // its two rows, where they come from registers
  uint64_t a_tile, b_tile;
  float* sum;
  bool add;
};

inline void load_rows(const Product& product, uint8_t (&bytes)[2][32]) {
  const int first = emulation::thread_index.x / 32 % 4 * 16 + emulation::lane() / 4;
  for (int high = 0; high < 2; ++high) load_row(product.a_tile, first + 8 * high, bytes[high]);
}

// Of 16-bit elements.
template <float (*to_float)(uint16_t), bool kFromRegisters, bool kColumnsOfB>
void run_product(const Product& product) {
  constexpr int kDepth = 16;
  uint8_t bytes[2][32];
  if (!kFromRegisters) load_rows(product, bytes);
  const auto element = [](const uint8_t (&row)[32], int k) {
    return to_float(static_cast<uint16_t>(row[2 * k] | row[2 * k + 1] << 8));
  };
  float b[kDepth][kColumns];
  for (int i = 0; i < kColumns; i += 1 + kColumnsOfB) {
    if constexpr (kColumnsOfB) {
      for (int k = 0; k < kDepth; ++k) {
        uint16_t pair[2];
        load_pair(product.b_tile, k, column_of(i), pair);
        b[k][i] = to_float(pair[0]);
        b[k][i + 1] = to_float(pair[1]);
      }
    } else {
      uint8_t row[32];
      load_row(product.b_tile, column_of(i), row);
      for (int k = 0; k < kDepth; ++k) b[k][i] = element(row, k);
    }
  }
  for (int high = 0; high < 2; ++high) {
    float sums[kColumns];
    for (int i = 0; i < kColumns; ++i)
      sums[i] = product.add ? product.sum[place_of(i, high)] : 0.0f;
    for (int k = 0; k < kDepth; ++k) {
      const float a = element(kFromRegisters ? product.a[high] : bytes[high], k);
      for (int i = 0; i < kColumns; ++i) sums[i] += a * b[k][i];
    }
    for (int i = 0; i < kColumns; ++i) {
      product.sum[place_of(i, high)] = sums[i] != sums[i] ? __uint_as_float(kNan) : sums[i];
    }
  }
}

struct E4M3 {
  struct Row {
    float values[32];
    int32_t exponents[32];  // kNoExponent of zeros
    bool has_nan;
  };
  static constexpr int32_t kNoExponent = -1000;

  static Row unpack(const uint8_t (&bytes)[32]) {
    static const auto values = [] {
      std::array<float, 256> table{};
      for (int i = 0; i < 256; ++i) table[i] = emulation::e4m3_to_float(static_cast<uint8_t>(i));
      return table;
    }();
    Row row{};
    for (int k = 0; k < 32; ++k) {
      const int magnitude = bytes[k] & 127;
      row.values[k] = values[bytes[k]];
      row.exponents[k] = magnitude == 0 ? kNoExponent : std::max(magnitude >> 3, 1) - 7;
      row.has_nan |= magnitude == 127;
    }
    return row;
  }

  // Terms are cut to 13 bits behind the largest exponent, and so is their sum behind its own.
  static float multiply(const Row& a, const Row& b, float sum) {
    if (a.has_nan || b.has_nan || sum != sum) return __uint_as_float(kNan);
    int32_t largest = sum == 0.0f ? kNoExponent : std::ilogb(sum);
    for (int k = 0; k < 32; ++k) largest = std::max(largest, a.exponents[k] + b.exponents[k]);
    if (largest < -100) return 0.0f;
    const float unit = __uint_as_float(static_cast<uint32_t>(127 + 13 - largest) << 23);
    auto total = static_cast<int32_t>(sum * unit);
    for (int k = 0; k < 32; ++k) total += static_cast<int32_t>(a.values[k] * b.values[k] * unit);
    if (total == 0) return 0.0f;
    const int excess = 31 - 13 - __clz(static_cast<uint32_t>(std::abs(total)));
    if (excess > 0) total = total / (1 << excess) * (1 << excess);
    return static_cast<float>(total) / unit;
  }
};

// Of e4m3, the rows in registers.
inline void run_e4m3_product(const Product& product) {
  const E4M3::Row rows[2] = {E4M3::unpack(product.a[0]), E4M3::unpack(product.a[1])};
  for (int i = 0; i < kColumns; ++i) {
    uint8_t bytes[32];
    load_row(product.b_tile, column_of(i), bytes);
    const E4M3::Row column = E4M3::unpack(bytes);
    for (int high = 0; high < 2; ++high) {
      float& sum = product.sum[place_of(i, high)];
      sum = E4M3::multiply(rows[high], column, product.add ? sum : 0.0f);
    }
  }
}

inline void start(const Product& product) {
  emulation::defer(emulation::kProducts, [product] { product.run(product); });
}

// The lane's two rows of an operand in registers: four lanes have 32 bytes of each.
inline void gather_rows(const uint32_t (&a)[4], Product& product) {
  for (int i = 0; i < 2; ++i) {
    const uint64_t* const words =
        emulation::exchange(emulation::kMma, a[2 * i] | static_cast<uint64_t>(a[2 * i + 1]) << 32);
    for (int quad = 0; quad < 4; ++quad) {
      const uint64_t word = words[emulation::lane() / 4 * 4 + quad];
      std::memcpy(product.a[0] + 16 * i + 4 * quad, &word, 4);
      std::memcpy(product.a[1] + 16 * i + 4 * quad, reinterpret_cast<const uint8_t*>(&word) + 4, 4);
    }
  }
}

template <float (*to_float)(uint16_t)>
void start_ss(uint64_t a, uint64_t b, Accumulator& sum, bool add) {
  start({&run_product<to_float, false, false>, {}, a, b, sum, add});
}
inline void start_rs(void (*run)(const Product&), const uint32_t (&a)[4], uint64_t b,
                     Accumulator& sum, bool add) {
  Product product{run, {}, 0, b, sum, add};
  gather_rows(a, product);
  start(product);
}

}  // namespace detail

inline void wgmma_fence() { __syncwarp(); }
inline void wgmma_commit() { emulation::commit(emulation::kProducts); }
template <int kPending>
void wgmma_wait() {
  __syncwarp();
  emulation::finish(emulation::kProducts, kPending);
}

inline void hold(Accumulator&) {}

inline void multiply_ss(uint64_t a, uint64_t b, Accumulator& sum, bool add) {
  detail::start_ss<emulation::bfloat16_to_float>(a, b, sum, add);
}
inline void multiply_ss_float16(uint64_t a, uint64_t b, Accumulator& sum, bool add) {
  detail::start_ss<emulation::half_to_float>(a, b, sum, add);
}
inline void multiply_rs(const uint32_t (&a)[4], uint64_t b, Accumulator& sum, bool add) {
  detail::start_rs(&detail::run_product<emulation::bfloat16_to_float, true, true>, a, b, sum, add);
}
inline void multiply_rs_float16(const uint32_t (&a)[4], uint64_t b, Accumulator& sum, bool add) {
  detail::start_rs(&detail::run_product<emulation::half_to_float, true, true>, a, b, sum, add);
}
inline void multiply_rs_float16_rows(const uint32_t (&a)[4], uint64_t b, Accumulator& sum,
                                     bool add) {
  detail::start_rs(&detail::run_product<emulation::half_to_float, true, false>, a, b, sum, add);
}
inline void multiply_rs_e4m3(const uint32_t (&a)[4], uint64_t b, Accumulator& sum, bool add) {
  detail::start_rs(&detail::run_e4m3_product, a, b, sum, add);
}

template <int kRegisters>
void raise_registers() {}
template <int kRegisters>
void lower_registers() {}

inline void named_barrier(int id, int threads) { emulation::meet(id, threads); }

inline void fence_async_proxy() {}

}  // namespace msa::sm90
