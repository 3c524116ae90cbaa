#include "checks/tensor_checks.h"

#include <array>

#include "host/errors.h"

namespace msa {

void Checker::fail(const std::string& argument, const std::string& expected,
                   const std::string& got) const {
  throw_value_error(op_, argument, expected, got);
}

void Checker::given(const TensorInfo& tensor, const char* why) const {
  if (!tensor.defined) fail(tensor.name, concat("a tensor (", why, ")"), "None");
}

void Checker::not_given(const TensorInfo& tensor, const char* why) const {
  if (tensor.defined) fail(tensor.name, concat("None (", why, ")"), describe(tensor));
}

void Checker::dtype(const TensorInfo& tensor, std::initializer_list<DType> allowed) const {
  std::string names;
  for (DType candidate : allowed) {
    if (tensor.dtype == candidate) return;
    names += (names.empty() ? "" : " or ") + std::string(dtype_name(candidate));
  }
  fail(tensor.name, names, tensor.dtype_name);
}

void Checker::same_dtype(const TensorInfo& tensor, const TensorInfo& as) const {
  if (tensor.dtype != as.dtype) {
    fail(tensor.name, concat(as.dtype_name, ", the dtype of ", as.name), tensor.dtype_name);
  }
}

void Checker::shape(const TensorInfo& tensor, const char* letters,
                    std::initializer_list<int64_t> expected) const {
  const int dims = static_cast<int>(expected.size());
  bool equal = tensor.dims == dims;
  for (int dim = 0; equal && dim < dims; ++dim) {
    const int64_t size = expected.begin()[dim];
    equal = size == kAnySize || size == tensor.size(dim);
  }
  if (!equal) {
    fail(tensor.name, concat(letters, " = ", shape_text(expected.begin(), dims)),
         shape_text(tensor.sizes.data(), tensor.dims));
  }
}

void Checker::same_device(const TensorInfo& tensor, const TensorInfo& as) const {
  if (tensor.on_cpu != as.on_cpu || tensor.device_index != as.device_index) {
    fail(tensor.name, concat("on ", device_text(as), ", the device of ", as.name),
         device_text(tensor));
  }
}

void Checker::aligned_rows(const TensorInfo& tensor) const {
  if (tensor.numel() == 0) return;
  const int last = tensor.dims - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1) {
    fail(concat("the last dimension of ", tensor.name), "contiguous (stride 1)",
         concat("stride ", tensor.stride(last)));
  }
  for (int dim = 0; dim < last; ++dim) {
    if (tensor.size(dim) > 1 && (tensor.stride(dim) * tensor.element_size) % 16 != 0) {
      fail(concat("stride ", dim, " of ", tensor.name), "a multiple of 16 bytes",
           concat(tensor.stride(dim), " elements of ", tensor.element_size, " bytes"));
    }
  }
  const auto address = reinterpret_cast<uintptr_t>(tensor.data);
  if (address % 16 != 0) {
    fail(concat("the first element of ", tensor.name), "aligned to 16 bytes",
         concat("an address ", address % 16, " bytes past a multiple of 16"));
  }
}

void Checker::dense_rows(const TensorInfo& tensor, int64_t alignment) const {
  if (tensor.numel() == 0) return;
  const int64_t width = tensor.size(1);
  const bool columns = width == 1 || tensor.stride(1) == 1;
  const bool rows = tensor.size(0) == 1 || tensor.stride(0) == width;
  if (!columns || !rows) {
    fail(tensor.name, concat("contiguous, strides [", width, ", 1]"),
         concat("strides ", shape_text(tensor.strides.data(), tensor.dims)));
  }
  const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.data) %
                                            static_cast<uintptr_t>(alignment));
  if (past != 0) {
    fail(concat("the first element of ", tensor.name), concat("aligned to ", alignment, " bytes"),
         concat("an address ", past, " bytes past a multiple of ", alignment));
  }
}

void Checker::no_overlap(const TensorInfo& tensor) const {
  // Each dimension, from the smallest stride up, must step over all that the smaller ones reach.
  std::array<bool, TensorInfo::kMaxDims> seen{};
  int64_t reach = 1;  // elements that the dimensions seen so far span
  for (int turn = 0; turn < tensor.dims; ++turn) {
    int next = -1;
    for (int dim = 0; dim < tensor.dims; ++dim) {
      if (!seen[dim] && (next < 0 || tensor.stride(dim) < tensor.stride(next))) next = dim;
    }
    seen[next] = true;
    if (tensor.size(next) <= 1) continue;
    if (tensor.stride(next) < reach) {
      fail(tensor.name, "writable without overlap",
           concat("stride ", tensor.stride(next), " in dimension ", next, ", where ", reach,
                  " elements lie between two steps"));
    }
    reach += (tensor.size(next) - 1) * tensor.stride(next);
  }
}

void Checker::in_range(const char* argument, int64_t value, int64_t low, int64_t high) const {
  if (value < low || value > high) {
    fail(argument, concat("from ", low, " to ", high), std::to_string(value));
  }
}

}  // namespace msa
