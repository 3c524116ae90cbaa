// A tensor as checks and launchers see it: shape, strides, dtype, device, pointer; no torch.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "common/views.h"

namespace msa {

struct TensorInfo {
  static constexpr int kMaxDims = 8;

  const char* name = "";  // the argument's name, for messages
  bool defined = false;   // false: the optional argument was not given
  void* data = nullptr;
  DType dtype = DType::kOther;
  const char* dtype_name = "";  // as Python spells it, also for dtypes that no operator takes
  int64_t element_size = 0;
  bool on_cpu = true;
  int32_t device_index = -1;
  int dims = 0;
  std::array<int64_t, kMaxDims> sizes{};
  std::array<int64_t, kMaxDims> strides{};  // elements

  int64_t size(int dim) const { return sizes[dim]; }
  int64_t stride(int dim) const { return strides[dim]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int dim = 0; dim < dims; ++dim) count *= sizes[dim];
    return count;
  }
};

const char* dtype_name(DType dtype);
std::string shape_text(const int64_t* sizes, int dims);
std::string device_text(const TensorInfo& tensor);
std::string describe(const TensorInfo& tensor);  // "bfloat16 [4, 128] on cpu", or "None"

// Views of checked tensors, for params structs. A missing optional gives a null pointer.
RowsView rows_view(const TensorInfo& tensor);      // [T, heads, D] or [T, D]
LseView lse_view(const TensorInfo& tensor);        // [T, heads]
PagedView paged_view(const TensorInfo& tensor);    // [pages, heads, 128, D] or [pages, 128, D]
IdsView ids_view(const TensorInfo& tensor);        // [heads, T, K]
ScoresView scores_view(const TensorInfo& tensor);  // [heads, T, blocks]
ScaleView scale_view(const TensorInfo& tensor);    // 1 element or [heads]; on the CPU: read here
BatchView batch_view(const TensorInfo& cu_seqlens_q, const TensorInfo& seq_lens,
                     const TensorInfo& block_table, int64_t num_tokens);

}  // namespace msa
