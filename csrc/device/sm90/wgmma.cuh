// Warpgroup products m64n128k16 of bfloat16 (or float16) and m64n128k32 of e4m3 with float32
// accumulators, on 128-byte-swizzled tiles.
#pragma once

#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

namespace msa::sm90 {

// The accumulator of a 64 x 128 tile: values of thread t of a warpgroup. Warp w holds rows 16 w to
// 16 w + 15; lane l of it holds, of each 8 columns n, rows l / 4 (values 4 n, 4 n + 1) and l / 4 +
// 8 (values 4 n + 2, 4 n + 3), columns 8 n + 2 (l % 4) and the next.
using Accumulator = float[64];

// Shared-memory matrix descriptor, 128-byte swizzle; offsets in bytes.
__device__ __forceinline__ uint64_t make_descriptor(uint32_t address, uint32_t leading_bytes,
                                                    uint32_t stride_bytes) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) |
         static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32 | uint64_t{1} << 62;
}

// Moves a descriptor by bytes (a multiple of 16).
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler must not read an accumulator before the wait that makes it whole.
__device__ __forceinline__ void hold(Accumulator& values) {
#pragma unroll
  for (float& value : values) asm volatile("" : "+f"(value)::"memory");
}

namespace detail {

using cute::SM90::GMMA::Major;
using cute::SM90::GMMA::ScaleOut;

template <typename Product, size_t... kIndex>
__device__ __forceinline__ void product_ss(uint64_t a, uint64_t b, Accumulator& sum, bool add,
                                           std::index_sequence<kIndex...>) {
  Product::fma(a, b, sum[kIndex]..., add ? ScaleOut::One : ScaleOut::Zero);
}

template <typename Product, size_t... kIndex>
__device__ __forceinline__ void product_rs(const uint32_t (&a)[4], uint64_t b, Accumulator& sum,
                                           bool add, std::index_sequence<kIndex...>) {
  Product::fma(a[0], a[1], a[2], a[3], b, sum[kIndex]..., add ? ScaleOut::One : ScaleOut::Zero);
}

}  // namespace detail

// sum (+)= A B^T for A [64][16] and B [128][16], both with k contiguous in shared memory.
__device__ __forceinline__ void multiply_ss(uint64_t a, uint64_t b, Accumulator& sum, bool add) {
  using cute::SM90::GMMA::Major;
  using Product = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<Major::K, Major::K>;
  detail::product_ss<Product>(a, b, sum, add, std::make_index_sequence<64>());
}

// The same of float16.
__device__ __forceinline__ void multiply_ss_float16(uint64_t a, uint64_t b, Accumulator& sum,
                                                    bool add) {
  using cute::SM90::GMMA::Major;
  using Product = cute::SM90::GMMA::MMA_64x128x16_F32F16F16_SS<Major::K, Major::K>;
  detail::product_ss<Product>(a, b, sum, add, std::make_index_sequence<64>());
}

// sum (+)= A B for A [64][16] in registers and B [16][128] in shared memory with n contiguous.
__device__ __forceinline__ void multiply_rs(const uint32_t (&a)[4], uint64_t b, Accumulator& sum,
                                            bool add) {
  using cute::SM90::GMMA::Major;
  using Product = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_RS<Major::K, Major::MN>;
  detail::product_rs<Product>(a, b, sum, add, std::make_index_sequence<64>());
}

// The same of float16.
__device__ __forceinline__ void multiply_rs_float16(const uint32_t (&a)[4], uint64_t b,
                                                    Accumulator& sum, bool add) {
  using cute::SM90::GMMA::Major;
  using Product = cute::SM90::GMMA::MMA_64x128x16_F32F16F16_RS<Major::K, Major::MN>;
  detail::product_rs<Product>(a, b, sum, add, std::make_index_sequence<64>());
}

// sum (+)= A B^T for A [64][16] of float16 in registers and B [128][16] with k contiguous in shared
// memory.
__device__ __forceinline__ void multiply_rs_float16_rows(const uint32_t (&a)[4], uint64_t b,
                                                         Accumulator& sum, bool add) {
  using cute::SM90::GMMA::Major;
  using Product = cute::SM90::GMMA::MMA_64x128x16_F32F16F16_RS<Major::K, Major::K>;
  detail::product_rs<Product>(a, b, sum, add, std::make_index_sequence<64>());
}

// sum (+)= A B^T for A [64][32] of e4m3 in registers and B [128][32] with k contiguous in shared
// memory. The sums are not float32's: see step1_score/sm90/score_error.cuh.
__device__ __forceinline__ void multiply_rs_e4m3(const uint32_t (&a)[4], uint64_t b,
                                                 Accumulator& sum, bool add) {
  using Product = cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_RS_TN<>;
  detail::product_rs<Product>(a, b, sum, add, std::make_index_sequence<64>());
}

template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A barrier among `threads` threads of a CTA; ids 1 to 15 are free.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Ordinary stores to shared memory become visible to the tensor cores and the copy engine.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace msa::sm90
