#include "host/tensor_info.h"

#include "host/errors.h"

namespace msa {

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kUInt8:
      return "uint8";
    case DType::kOther:
      break;
  }
  return "other";
}

std::string shape_text(const int64_t* sizes, int dims) {
  std::string text = "[";
  for (int dim = 0; dim < dims; ++dim) {
    if (dim) text += ", ";
    text += sizes[dim] < 0 ? "*" : std::to_string(sizes[dim]);
  }
  return text + "]";
}

std::string device_text(const TensorInfo& tensor) {
  return tensor.on_cpu ? "cpu" : concat("cuda:", tensor.device_index);
}

std::string describe(const TensorInfo& tensor) {
  if (!tensor.defined) return "None";
  return concat(tensor.dtype_name, " ", shape_text(tensor.sizes.data(), tensor.dims), " on ",
                device_text(tensor));
}

RowsView rows_view(const TensorInfo& tensor) {
  RowsView view{tensor.data, tensor.dtype, 0, 0};
  if (!tensor.defined) return view;
  view.token_stride = tensor.stride(0);
  view.head_stride = tensor.dims == 3 ? tensor.stride(1) : 0;
  return view;
}

LseView lse_view(const TensorInfo& tensor) {
  if (!tensor.defined) return {nullptr, 0, 0};
  return {static_cast<float*>(tensor.data), tensor.stride(0), tensor.stride(1)};
}

PagedView paged_view(const TensorInfo& tensor) {
  if (!tensor.defined) return {nullptr, DType::kOther, 0, 0, 0, 0};
  const bool has_heads = tensor.dims == 4;
  return {tensor.data,
          tensor.dtype,
          tensor.size(0),
          tensor.stride(0),
          has_heads ? tensor.stride(1) : 0,
          tensor.stride(has_heads ? 2 : 1)};
}

IdsView ids_view(const TensorInfo& tensor) {
  return {tensor.data,      tensor.dtype,     tensor.size(0),  tensor.size(2),
          tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

ScoresView scores_view(const TensorInfo& tensor) {
  return {static_cast<float*>(tensor.data),
          tensor.size(0),
          tensor.size(2),
          tensor.stride(0),
          tensor.stride(1),
          tensor.stride(2)};
}

ScaleView scale_view(const TensorInfo& tensor) {
  if (!tensor.defined) return {nullptr, 0, 1.0f};
  const float* data = static_cast<const float*>(tensor.data);
  const bool per_head = tensor.numel() > 1;
  if (tensor.on_cpu && !per_head) return {nullptr, 0, *data};
  return {data, per_head ? tensor.stride(0) : 0, 1.0f};
}

BatchView batch_view(const TensorInfo& cu_seqlens_q, const TensorInfo& seq_lens,
                     const TensorInfo& block_table, int64_t num_tokens) {
  BatchView view{};
  if (cu_seqlens_q.defined) {
    view.cu_seqlens_q = static_cast<const int32_t*>(cu_seqlens_q.data);
    view.cu_seqlens_stride = cu_seqlens_q.stride(0);
  }
  view.seq_lens = static_cast<const int32_t*>(seq_lens.data);
  view.seq_lens_stride = seq_lens.stride(0);
  view.num_requests = seq_lens.size(0);
  view.num_tokens = num_tokens;
  if (block_table.defined) {
    view.block_table = static_cast<const int32_t*>(block_table.data);
    view.table_row_stride = block_table.stride(0);
    view.table_col_stride = block_table.stride(1);
    view.max_pages = block_table.size(1);
  }
  return view;
}

}  // namespace msa
