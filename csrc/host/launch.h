// What every launch_<op>() starts from: torch tensors -> TensorInfo, outputs, the call's stream.
// Launch files are compiled into both libraries; only run_<op>() differs between CPU and CUDA.
#pragma once

#include "host/exec_context.h"
#include "host/tensor_info.h"
#include "host/torch_stable.h"

namespace msa {

DType dtype_of(ScalarType scalar_type);
const char* name_of(ScalarType scalar_type);  // as Python spells it

TensorInfo info(const char* name, const Tensor& tensor);
TensorInfo info(const char* name, const OptionalTensor& tensor);

Tensor empty_like_device(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype);
Tensor empty_like_device(const Tensor& like, const std::vector<int64_t>& sizes);  // like's dtype

// Makes the tensors' device current and finds the caller's stream on it, for as long as it lives.
class ExecScope {
 public:
  ExecScope(const char* op, const Tensor& on);
  operator const ExecContext&() const { return context_; }

 private:
  ExecContext context_;
#ifdef MSA_BACKEND_CUDA
  torch::stable::accelerator::DeviceGuard guard_;
#endif
};

}  // namespace msa
