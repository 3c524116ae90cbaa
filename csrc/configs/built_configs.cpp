#include "configs/built_configs.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "host/errors.h"
#include "host/tensor_info.h"

#ifdef MSA_BACKEND_CUDA
#define MSA_BUILT_CONFIGS MSA_CUDA_CONFIGS
#define MSA_BACKEND_NAME "CUDA"
#else
#define MSA_BUILT_CONFIGS MSA_CPU_CONFIGS
#define MSA_BACKEND_NAME "CPU"
#endif

namespace msa {
namespace {

std::string config_text(DType dtype, DType cache_dtype) {
  std::string text = dtype_name(dtype);
  if (cache_dtype != DType::kOther && cache_dtype != dtype) {
    text += std::string(" with a ") + dtype_name(cache_dtype) + " cache";
  }
  return text;
}

}  // namespace

const std::vector<KernelConfig>& built_configs() {
#define MSA_ENTRY(op, arch, dtype, cache_dtype) {#op, #arch, DType::dtype, DType::cache_dtype},
  static const std::vector<KernelConfig> configs = {MSA_BUILT_CONFIGS(MSA_ENTRY)};
#undef MSA_ENTRY
  return configs;
}

bool portable_forced() {
  static const bool forced = [] {
    const char* const value = std::getenv("MSA_FORCE_PORTABLE");
    const std::string text = value ? value : "";
    if (text != "" && text != "0" && text != "1") {
      throw std::runtime_error("msa_kernels: MSA_FORCE_PORTABLE must be 0, 1 or unset, got '" +
                               text + "'");
    }
    return text == "1";
  }();
  return forced;
}

std::string built_configs_text(const char* op) {
  std::vector<std::string> texts;  // each once: an operator may have kernels for several GPUs
  for (const KernelConfig& config : built_configs()) {
    if (std::strcmp(config.op, op) != 0) continue;
    const std::string text = config_text(config.dtype, config.cache_dtype);
    if (std::find(texts.begin(), texts.end(), text) == texts.end()) texts.push_back(text);
  }
  std::string all;
  for (const std::string& text : texts) all += (all.empty() ? "" : ", ") + text;
  return all.empty() ? "nothing" : all;
}

void require_built(const char* op, DType dtype, DType cache_dtype) {
  for (const KernelConfig& config : built_configs()) {
    if (std::strcmp(config.op, op) == 0 && config.dtype == dtype &&
        config.cache_dtype == cache_dtype) {
      return;
    }
  }
  throw_not_built(op, dtype, cache_dtype);
}

void throw_not_built(const char* op, DType dtype, DType cache_dtype) {
  throw_runtime_error(
      op, concat("no " MSA_BACKEND_NAME " kernel is built for ", config_text(dtype, cache_dtype),
                 "; built for this operator: ", built_configs_text(op),
                 ". Use one of these, or tensors on the other device type; "
                 "`python -m msa_kernels.info` lists what this build runs"));
}

}  // namespace msa
