// Bulk tensor copies (sm_90): tensor maps made on the host, boxes copied by one thread.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "device/cuda_errors.h"
#include "device/sm90/mbarrier.cuh"

namespace msa::sm90 {

// cuTensorMapEncodeTiled, found at run time: a machine that only builds has no libcuda to link.
inline auto tensor_map_encoder(const char* op) {
  static const auto encode = [op] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check_cuda(op,
               cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &found),
               "finding cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess) {
      throw_runtime_error(op, "the CUDA driver has no cuTensorMapEncodeTiled; update the driver");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encode;
}

// Map with 128-byte swizzle; sizes and boxes in elements, strides in bytes (the first axis is
// contiguous and has none).
template <int kDims>
CUtensorMap make_tensor_map(const char* op, const void* data, const uint64_t (&sizes)[kDims],
                            const uint64_t (&strides)[kDims - 1], const uint32_t (&box)[kDims],
                            CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) {
  CUtensorMap map;
  uint32_t element_strides[kDims];
  for (uint32_t& stride : element_strides) stride = 1;
  uint64_t steps[kDims - 1];  // an axis of one element may come with any stride, 0 too
  for (int axis = 0; axis < kDims - 1; ++axis) {
    steps[axis] = sizes[axis + 1] == 1 ? 16 : strides[axis];
  }
  const CUresult result = tensor_map_encoder(op)(
      &map, type, kDims, const_cast<void*>(data), sizes, steps, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw_runtime_error(op, concat("cuTensorMapEncodeTiled failed with code ", int{result}));
  }
  return map;
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box of a 5-dimensional tensor to shared memory; its bytes arrive on `barrier`.
__device__ __forceinline__ void copy_box(void* shared, const CUtensorMap* map, uint64_t* barrier,
                                         int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The same box to the L2 cache alone; nothing says when it is there.
__device__ __forceinline__ void prefetch_box(const CUtensorMap* map, int c0, int c1, int c2, int c3,
                                             int c4) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

// For copies and stores: the L2 cache gives up these lines before others.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// The L2 cache keeps these lines as long as it keeps most.
__device__ __forceinline__ uint64_t evict_normal_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t evict_unchanged_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// The L2 cache gives up these lines after others.
__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy_box(void* shared, const CUtensorMap* map, uint64_t* barrier,
                                         int c0, int c1, int c2, int c3, int c4, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4),
      "l"(policy)
      : "memory");
}

// Contiguous bytes to shared memory, without a map; they arrive on `barrier`. Addresses and size
// are multiples of 16.
__device__ __forceinline__ void copy_bytes(void* shared, const void* global, uint32_t bytes,
                                           uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void copy_bytes(void* shared, const void* global, uint32_t bytes,
                                           uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// 16 bytes to memory, with a policy for L2.
__device__ __forceinline__ void store_16(void* address, const uint4& bits, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(address),
               "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w), "l"(policy)
               : "memory");
}

}  // namespace msa::sm90
