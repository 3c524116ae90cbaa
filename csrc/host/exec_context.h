// Where a call runs. Filled by ExecScope (launch.h); the CPU library leaves it as it is.
#pragma once

#include <cstdint>

namespace msa {

struct ExecContext {
  const char* op = "";     // for errors
  int32_t device = -1;     // CUDA device index
  void* stream = nullptr;  // cudaStream_t of the caller
};

}  // namespace msa
