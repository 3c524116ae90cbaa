// Single instructions that C++ has no word for.
#pragma once

#include <cstdint>

namespace msa {

// 2^x by the special-function unit alone; results under 2^-126 become 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Loads where `there` holds, without a branch, and here: not where the value is first looked at.
__device__ __forceinline__ void load_if(bool there, const int32_t* address, int32_t& value) {
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.u32 there, %2, 0;\n"
      "@there ld.global.s32 %0, [%1];\n"
      "}\n"
      : "+r"(value)
      : "l"(address), "r"(static_cast<uint32_t>(there))
      : "memory");
}
__device__ __forceinline__ void load_if(bool there, const float* address, float& value) {
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.u32 there, %2, 0;\n"
      "@there ld.global.f32 %0, [%1];\n"
      "}\n"
      : "+f"(value)
      : "l"(address), "r"(static_cast<uint32_t>(there))
      : "memory");
}

// count + 1 where a + b is past 32 bits, in two instructions.
__device__ __forceinline__ uint32_t count_carry(uint32_t a, uint32_t b, uint32_t count) {
  asm("{\n"
      ".reg .u32 sum;\n"
      "add.cc.u32 sum, %1, %2;\n"
      "addc.u32 %0, %0, 0;\n"
      "}\n"
      : "+r"(count)
      : "r"(a), "r"(b));
  return count;
}

// What a counter in global memory was before 1 was added to it; past 2^31 - 1 it begins again at 0.
// Nothing waits for it until the result is looked at: atomicAdd() of a warp's lanes the assembler
// gathers into one, whose result it passes on by a shuffle, and so waits for memory at once.
__device__ __forceinline__ int32_t fetch_and_increment(int32_t* counter) {
  uint32_t before;
  asm volatile("atom.global.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(before) : "l"(counter));
  return static_cast<int32_t>(before);
}

// Waits until a word of shared memory is `value`, which another warp of the CTA will store.
__device__ __forceinline__ void wait_for_word(const int32_t* word, int32_t value) {
  while (*const_cast<const volatile int32_t*>(word) != value) {
  }
}

// Has the line of `address` come to L2; nothing waits for it.
__device__ __forceinline__ void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// A NaN anywhere gives NaN, so that a broken part shows instead of vanishing.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// sum + 0 * pair, of two bfloat16: NaN where one is NaN or Inf.
__device__ __forceinline__ uint32_t add_zero_times(uint32_t pair, uint32_t sum) {
  asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0));
  return sum;
}

// The value is computed here, not where it is first looked at.
__device__ __forceinline__ void compute_here(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void compute_here(const void* address) {
  asm volatile("" ::"l"(address));
}
// The same, and it stays in a register from here on.
__device__ __forceinline__ void compute_here(uint32_t& value) { asm volatile("" : "+r"(value)); }

// threadIdx.x % 32, read anew: the compiler keeps nothing that follows from it.
__device__ __forceinline__ int read_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

}  // namespace msa
