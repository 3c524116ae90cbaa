// Every built kernel configuration, once: dispatch walks these lists, instantiations are made from
// them, error texts and `python -m msa_kernels.info` print them. Adding a configuration is a line.
//
//   X(op, arch, dtype, cache dtype)   dtype: of q, index_q, k or the parts, of normalize_patches'
//                                     result; kOther: no such tensor
//
// arch names the folder of the kernel: cpu, sm80 (portable, every GPU from sm_80 on), sm90
// (Hopper). Of an operator's lines that serve a call, the last one that runs on its GPU is taken.
#pragma once

#include <string>
#include <vector>

#include "common/views.h"

#define MSA_CUDA_WRITE_CACHE_CONFIGS(X)       \
  X(write_cache, sm80, kFloat32, kFloat32)    \
  X(write_cache, sm80, kBFloat16, kBFloat16)  \
  X(write_cache, sm80, kFloat32, kFloat8E4M3) \
  X(write_cache, sm80, kBFloat16, kFloat8E4M3)

// The sm90 lines: few query rows a request, and select_blocks with more where own blocks are
// forced.
#define MSA_CUDA_INDEX_CONFIGS(X, op)   \
  X(op, sm80, kBFloat16, kBFloat16)     \
  X(op, sm80, kFloat8E4M3, kFloat8E4M3) \
  X(op, sm90, kBFloat16, kBFloat16)     \
  X(op, sm90, kFloat8E4M3, kFloat8E4M3)

#define MSA_CUDA_MERGE_LSE_CONFIGS(X)  \
  X(merge_lse, sm80, kFloat32, kOther) \
  X(merge_lse, sm80, kBFloat16, kOther)

#define MSA_CUDA_NORMALIZE_PATCHES_CONFIGS(X)  \
  X(normalize_patches, sm80, kFloat32, kOther) \
  X(normalize_patches, sm80, kBFloat16, kOther)

#define MSA_CUDA_SPARSE_PREFILL_SM80_CONFIGS(X) \
  X(sparse_prefill, sm80, kBFloat16, kBFloat16) \
  X(sparse_prefill, sm80, kBFloat16, kFloat8E4M3)

// sm90: splits merged in a cluster.
#define MSA_CUDA_DECODE_CONFIGS(X, op) \
  X(op, sm80, kBFloat16, kBFloat16)    \
  X(op, sm80, kBFloat16, kFloat8E4M3)  \
  X(op, sm90, kBFloat16, kBFloat16)    \
  X(op, sm90, kBFloat16, kFloat8E4M3)

#define MSA_CUDA_CONFIGS(X)                       \
  MSA_CUDA_WRITE_CACHE_CONFIGS(X)                 \
  MSA_CUDA_INDEX_CONFIGS(X, index_score)          \
  X(topk_blocks, sm80, kFloat32, kOther)          \
  MSA_CUDA_INDEX_CONFIGS(X, select_blocks)        \
  X(kv_block_schedule, sm80, kInt32, kOther)      \
  X(kv_block_schedule, sm80, kInt64, kOther)      \
  X(decode_view, sm80, kInt32, kOther)            \
  X(decode_view, sm80, kInt64, kOther)            \
  MSA_CUDA_DECODE_CONFIGS(X, sparse_decode)       \
  MSA_CUDA_DECODE_CONFIGS(X, paged_decode)        \
  MSA_CUDA_SPARSE_PREFILL_SM80_CONFIGS(X)         \
  X(sparse_prefill, sm90, kBFloat16, kBFloat16)   \
  X(sparse_prefill, sm90, kBFloat16, kFloat8E4M3) \
  MSA_CUDA_MERGE_LSE_CONFIGS(X)                   \
  MSA_CUDA_NORMALIZE_PATCHES_CONFIGS(X)

#define MSA_CPU_ATTEND_CONFIGS(X, op) \
  X(op, cpu, kFloat32, kFloat32)      \
  X(op, cpu, kBFloat16, kBFloat16)    \
  X(op, cpu, kFloat32, kFloat8E4M3)   \
  X(op, cpu, kBFloat16, kFloat8E4M3)

#define MSA_CPU_INDEX_CONFIGS(X, op) \
  X(op, cpu, kFloat32, kFloat32)     \
  X(op, cpu, kBFloat16, kBFloat16)   \
  X(op, cpu, kFloat8E4M3, kFloat8E4M3)

#define MSA_CPU_CONFIGS(X)                    \
  MSA_CPU_ATTEND_CONFIGS(X, write_cache)      \
  MSA_CPU_INDEX_CONFIGS(X, index_score)       \
  X(topk_blocks, cpu, kFloat32, kOther)       \
  MSA_CPU_INDEX_CONFIGS(X, select_blocks)     \
  X(kv_block_schedule, cpu, kInt32, kOther)   \
  X(kv_block_schedule, cpu, kInt64, kOther)   \
  X(decode_view, cpu, kInt32, kOther)         \
  X(decode_view, cpu, kInt64, kOther)         \
  MSA_CPU_ATTEND_CONFIGS(X, sparse_prefill)   \
  MSA_CPU_ATTEND_CONFIGS(X, sparse_decode)    \
  MSA_CPU_ATTEND_CONFIGS(X, paged_decode)     \
  X(merge_lse, cpu, kFloat32, kOther)         \
  X(merge_lse, cpu, kBFloat16, kOther)        \
  X(normalize_patches, cpu, kFloat32, kOther) \
  X(normalize_patches, cpu, kBFloat16, kOther)

namespace msa {

struct KernelConfig {
  const char* op;
  const char* arch;
  DType dtype;
  DType cache_dtype;
};

// The configurations of this library.
const std::vector<KernelConfig>& built_configs();

// Whether MSA_FORCE_PORTABLE=1 in the environment keeps every call to the portable kernels, so that
// they can be tested and timed on Hopper. Read once a process; build_info() tells it.
bool portable_forced();

// "float32, bfloat16 with a float8_e4m3fn cache", of one operator; "nothing" where none is built.
std::string built_configs_text(const char* op);

// RuntimeError that says what was asked for, what is built, and the way out.
[[noreturn]] void throw_not_built(const char* op, DType dtype, DType cache_dtype = DType::kOther);

// throw_not_built() unless a line of the list, of whatever architecture, serves the dtypes.
void require_built(const char* op, DType dtype, DType cache_dtype);

}  // namespace msa
