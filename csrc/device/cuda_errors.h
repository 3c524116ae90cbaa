// CUDA's own errors, as RuntimeError: a launch that fails says so at once, where it failed.
#pragma once

#include <cuda_runtime_api.h>

#include "host/errors.h"

namespace msa {

inline void check_cuda(const char* op, cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw_runtime_error(op, concat(what, " failed: ", cudaGetErrorName(error), " (",
                                   cudaGetErrorString(error), ")"));
  }
}

}  // namespace msa
