// torch's own thread pool, so that torch.set_num_threads() governs the CPU kernels too.
#pragma once

#include "host/torch_stable.h"

namespace msa {

// Calls body(begin, end) on disjoint ranges that cover [0, count), each at least `grain` long.
// The body must not throw.
template <typename Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  torch::stable::parallel_for(0, count, grain, body);
}

}  // namespace msa
