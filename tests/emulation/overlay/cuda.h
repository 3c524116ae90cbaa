// Tensor maps: what the emulated copies need of them.
#pragma once

#include <cstdint>

enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_UINT8 };

struct CUtensorMap {
  const uint8_t* data;
  int element_bytes;
  uint64_t sizes[5], strides[5];  // of elements, in bytes
  uint32_t box[5];
};
