// csrc/device/sm80_async_copy.cuh, emulated: copies are done when they are waited for.
#pragma once

#include "device/shared_memory.cuh"

namespace msa {
namespace detail {

inline void copy_async(uint32_t shared_address, const void* global_address, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(global_address) % bytes != 0) {
    emulation::fail("a copy's source is not a multiple of its size");
  }
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

inline void commit_async_copies() { emulation::commit(emulation::kCopies); }
template <int kPending>
void wait_async_copies() {
  emulation::finish(emulation::kCopies, kPending);
}

}  // namespace msa
