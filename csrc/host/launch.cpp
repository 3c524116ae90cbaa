#include "host/launch.h"

#include <algorithm>

#include "host/errors.h"

namespace msa {
namespace {

struct DTypeEntry {
  ScalarType scalar_type;
  DType dtype;
  const char* name;
};

// Dtypes that some operator takes, and those that callers are most likely to pass by mistake.
constexpr DTypeEntry kDTypes[] = {
    {ScalarType::Float, DType::kFloat32, "float32"},
    {ScalarType::BFloat16, DType::kBFloat16, "bfloat16"},
    {ScalarType::Float8_e4m3fn, DType::kFloat8E4M3, "float8_e4m3fn"},
    {ScalarType::Int, DType::kInt32, "int32"},
    {ScalarType::Long, DType::kInt64, "int64"},
    {ScalarType::Byte, DType::kUInt8, "uint8"},
    {ScalarType::Half, DType::kOther, "float16"},
    {ScalarType::Double, DType::kOther, "float64"},
    {ScalarType::Float8_e5m2, DType::kOther, "float8_e5m2"},
    {ScalarType::Float8_e4m3fnuz, DType::kOther, "float8_e4m3fnuz"},
    {ScalarType::Float8_e5m2fnuz, DType::kOther, "float8_e5m2fnuz"},
    {ScalarType::Char, DType::kOther, "int8"},
    {ScalarType::Short, DType::kOther, "int16"},
    {ScalarType::Bool, DType::kOther, "bool"},
};

const DTypeEntry* find_entry(ScalarType scalar_type) {
  for (const DTypeEntry& entry : kDTypes) {
    if (entry.scalar_type == scalar_type) return &entry;
  }
  return nullptr;
}

}  // namespace

DType dtype_of(ScalarType scalar_type) {
  const DTypeEntry* const entry = find_entry(scalar_type);
  return entry ? entry->dtype : DType::kOther;
}

const char* name_of(ScalarType scalar_type) {
  const DTypeEntry* const entry = find_entry(scalar_type);
  return entry ? entry->name : torch::headeronly::toString(scalar_type);
}

TensorInfo info(const char* name, const Tensor& tensor) {
  TensorInfo result;
  result.name = name;
  result.defined = true;
  if (!tensor.defined()) {  // None where a tensor must be: the check of its dtype refuses it
    result.dtype_name = "None";
    return result;
  }
  result.dims = static_cast<int>(tensor.dim());
  // More dimensions than any operator takes are cut off: the shape check refuses what is left.
  result.dims = std::min(result.dims, TensorInfo::kMaxDims);
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  for (int dim = 0; dim < result.dims; ++dim) {
    result.sizes[dim] = sizes[dim];
    result.strides[dim] = strides[dim];
  }
  const ScalarType scalar_type = tensor.scalar_type();
  result.dtype = dtype_of(scalar_type);
  result.dtype_name = name_of(scalar_type);
  result.element_size = static_cast<int64_t>(tensor.element_size());
  result.on_cpu = tensor.is_cpu();
  result.device_index = result.on_cpu ? -1 : tensor.get_device_index();
  result.data = tensor.data_ptr();
  return result;
}

TensorInfo info(const char* name, const OptionalTensor& tensor) {
  if (tensor.has_value()) return info(name, *tensor);
  TensorInfo result;
  result.name = name;
  return result;
}

Tensor empty_like_device(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  return torch::stable::new_empty(like, sizes, dtype);
}

Tensor empty_like_device(const Tensor& like, const std::vector<int64_t>& sizes) {
  return torch::stable::new_empty(like, sizes);
}

#ifdef MSA_BACKEND_CUDA

ExecScope::ExecScope(const char* op, const Tensor& on) : guard_(on.get_device_index()) {
  context_.op = op;
  context_.device = on.get_device_index();
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(context_.device, &context_.stream));
}

#else

ExecScope::ExecScope(const char* op, const Tensor&) { context_.op = op; }

#endif

}  // namespace msa
