// csrc/device/sm90/tma.cuh, emulated.
#pragma once

#include <cuda.h>

#include "device/cuda_errors.h"
#include "device/sm90/mbarrier.cuh"

namespace msa::sm90 {

template <int kDims>
CUtensorMap make_tensor_map(const char*, const void* data, const uint64_t (&sizes)[kDims],
                            const uint64_t (&strides)[kDims - 1], const uint32_t (&box)[kDims],
                            CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) {
  static_assert(kDims == 5);
  CUtensorMap map{};
  map.data = static_cast<const uint8_t*>(data);
  map.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2 : 1;
  map.strides[0] = map.element_bytes;
  for (int axis = 0; axis < kDims; ++axis) {
    map.sizes[axis] = sizes[axis];
    map.box[axis] = box[axis];
    if (axis > 0) map.strides[axis] = strides[axis - 1];
  }
  return map;
}

inline void prefetch_tensor_map(const CUtensorMap*) {}

// The box's rows of 128 bytes, one after the other; zeros outside the tensor. Their 16-byte chunks
// are exchanged by bits 7 to 9 of where they would lie.
inline void copy_box(void* shared, const CUtensorMap* map, uint64_t* barrier, int c0, int c1,
                     int c2, int c3, int c4) {
  constexpr uint32_t kRowBytes = 128;
  if (map->box[0] * map->element_bytes != kRowBytes || c0 != 0) {
    emulation::fail("a box's rows are not whole ones of 128 bytes");
  }
  const uint32_t target = shared_address(shared);
  // The map itself is a parameter of the kernel, which the lane may have left by then.
  emulation::copy_later([=, map = *map] {
    const uint32_t rows = map.box[1] * map.box[2] * map.box[3] * map.box[4];
    const int begin[5] = {c0, c1, c2, c3, c4};
    for (uint32_t row = 0; row < rows; ++row) {
      const uint8_t* source = map.data;
      bool inside = true;
      uint32_t rest = row;
      for (int axis = 1; axis < 5; ++axis) {
        const int64_t place = begin[axis] + static_cast<int64_t>(rest % map.box[axis]);
        rest /= map.box[axis];
        inside &= place >= 0 && place < static_cast<int64_t>(map.sizes[axis]);
        source += place * static_cast<int64_t>(map.strides[axis]);
      }
      for (uint32_t chunk = 0; chunk < kRowBytes; chunk += 16) {
        uint32_t address = target + row * kRowBytes + chunk;
        address ^= (address >> 7 & 7) << 4;
        uint8_t* const bytes = detail::shared_bytes(address, 16);
        if (inside) {
          std::memcpy(bytes, source + chunk, 16);
        } else {
          std::memset(bytes, 0, 16);
        }
      }
    }
    emulation::barrier_bytes(barrier, rows * kRowBytes);
  });
}

inline void prefetch_box(const CUtensorMap* map, int, int, int, int head, int page) {
  if (head < 0 || head >= static_cast<int64_t>(map->sizes[3]) || page < 0 ||
      page >= static_cast<int64_t>(map->sizes[4])) {
    emulation::fail("a prefetch outside the tensor");
  }
}

inline uint64_t evict_first_policy() { return 0; }
inline uint64_t evict_normal_policy() { return 0; }
inline uint64_t evict_unchanged_policy() { return 0; }
inline uint64_t evict_last_policy() { return 0; }

inline void copy_box(void* shared, const CUtensorMap* map, uint64_t* barrier, int c0, int c1,
                     int c2, int c3, int c4, uint64_t) {
  copy_box(shared, map, barrier, c0, c1, c2, c3, c4);
}

inline void copy_bytes(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    emulation::fail("a bulk copy is not of whole 16 bytes");
  }
  uint8_t* const target = detail::shared_bytes(shared_address(shared), 16);
  emulation::copy_later([=] {
    std::memcpy(target, global, bytes);
    emulation::barrier_bytes(barrier, bytes);
  });
}

inline void copy_bytes(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                       uint64_t) {
  copy_bytes(shared, global, bytes, barrier);
}

inline void store_16(void* address, const uint4& bits, uint64_t) {
  *static_cast<uint4*>(address) = bits;
}

}  // namespace msa::sm90
