// A division by what the host knows, as a multiplication: on the device one takes long.
#pragma once

#include <cstdint>

namespace msa {

constexpr int kInverseShift = 31;

// n / divisor is n * inverse_of(divisor) >> kInverseShift, for n < 2^31 / divisor.
inline uint32_t inverse_of(int32_t divisor) {
  return static_cast<uint32_t>(((int64_t{1} << kInverseShift) + divisor - 1) / divisor);
}

}  // namespace msa
