// DType of a params struct -> element type of device code.
#pragma once

#include <cuda_bf16.h>

#include "common/views.h"

namespace msa {

template <DType dtype>
struct ElementOf;
template <>
struct ElementOf<DType::kFloat32> {
  using Type = float;
};
template <>
struct ElementOf<DType::kBFloat16> {
  using Type = __nv_bfloat16;
};

}  // namespace msa
