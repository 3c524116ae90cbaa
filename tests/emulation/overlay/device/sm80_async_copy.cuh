// csrc/device/sm80_async_copy.cuh, emulated: copies are done when they are waited
// for; until then there is garbage where they go, NaN of every type.
#pragma once

#include "device/shared_memory.cuh"

namespace msa {
namespace detail {

inline void copy_async(uint32_t shared_address, const void* global_address, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(global_address) % bytes != 0) {
    emulation::fail("a copy's source is not a multiple of its size");
  }
  std::memset(shared_bytes(shared_address, bytes), 0xff, bytes);
  emulation::defer(emulation::kCopies, [=] {
    std::memcpy(shared_bytes(shared_address, bytes), global_address, bytes);
  });
}

}  // namespace detail

template <int kBytes>
void copy_async(uint32_t shared_address, const void* global_address) {
  detail::copy_async(shared_address, global_address, kBytes);
}

inline void copy_async_16(uint32_t shared_address, const void* global_address) {
  detail::copy_async(shared_address, global_address, 16);
}

inline void copy_async_16_or_zero(uint32_t shared_address, const void* global_address, bool there) {
  static const uint4 zero{};
  detail::copy_async(shared_address, there ? global_address : &zero, 16);
}

inline void commit_async_copies() { emulation::commit(emulation::kCopies); }
template <int kPending>
void wait_async_copies() {
  emulation::finish(emulation::kCopies, kPending);
}

}  // namespace msa
