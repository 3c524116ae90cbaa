// The only place that includes torch: its stable ABI, target version set by the build
// (TORCH_TARGET_VERSION), so that one binary serves every torch from that version on.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace msa {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalInt = std::optional<int64_t>;

}  // namespace msa
