// Which GPU a call runs on. A library holds kernels of several architectures; a call that none of
// them serves says so before it launches anything.
#pragma once

#include <cuda_runtime_api.h>

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
