// Which GPU a call runs on. A library holds kernels of several architectures; a call that none of
// them serves says so before it launches anything.
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>

#include "configs/built_configs.h"
#include "device/cuda_errors.h"
#include "host/exec_context.h"

namespace msa {

// 10 * major + minor of the compute capability.
inline int compute_capability(const ExecContext& context) {
  int major = 0, minor = 0;
  check_cuda(context.op,
             cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, context.device),
             "reading the compute capability");
  check_cuda(context.op,
             cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, context.device),
             "reading the compute capability");
  return 10 * major + minor;
}

// Whether a call is Hopper's: an sm90 kernel is built for its dtypes, and the GPU runs it. The rule
// of support.py.
inline bool runs_sm90(const ExecContext& context, DType dtype, DType cache_dtype) {
  for (const KernelConfig& config : built_configs()) {
    if (std::strcmp(config.op, context.op) == 0 && std::strcmp(config.arch, "sm90") == 0 &&
        config.dtype == dtype && config.cache_dtype == cache_dtype) {
      return !portable_forced() && compute_capability(context) == 90;
    }
  }
  return false;
}

inline void require_sm90(const ExecContext& context) {
  const int capability = compute_capability(context);
  if (capability != 90) {
    throw_runtime_error(
        context.op, concat("the kernels of this operator are built for Hopper (compute capability "
                           "9.0), and this GPU has ",
                           capability / 10, ".", capability % 10,
                           "; `python -m msa_kernels.info` lists what runs on it"));
  }
}

}  // namespace msa
