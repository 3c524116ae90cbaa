// Test-only binding of host-side C++: message builders, checks, configuration lists, planning. Not
// part of the product and not in the wheel; the product's bindings are the dispatcher's.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "checks/op_checks.h"
#include "checks/tensor_checks.h"
#include "configs/built_configs.h"
#include "host/errors.h"
#include "media/pixel_affine.h"
#include "step1_score/score_plan.h"
#include "step3_remap/kv_block_schedule_params.h"
#include "step3_remap/prefill_plan.h"
#include "step3_remap/work_plan.h"
#include "step4_attend/decode_plan.h"

namespace py = pybind11;

namespace {

// A tensor that exists only as a description: what the checks see.
struct Described {
  std::string name, dtype_name;
  msa::TensorInfo info;
};

msa::DType parse_dtype(const std::string& name) {
  for (int value = 0; value < static_cast<int>(msa::DType::kOther); ++value) {
    const auto dtype = static_cast<msa::DType>(value);
    if (name == msa::dtype_name(dtype)) return dtype;
  }
  return msa::DType::kOther;
}

std::unique_ptr<Described> make_tensor(std::string name, std::string dtype, int64_t element_size,
                                       const std::vector<int64_t>& sizes,
                                       const std::vector<int64_t>& strides, uint64_t address,
                                       int device_index) {
  auto tensor = std::make_unique<Described>();
  tensor->name = std::move(name);
  tensor->dtype_name = std::move(dtype);
  msa::TensorInfo& info = tensor->info;
  info.name = tensor->name.c_str();
  info.defined = true;
  info.data = reinterpret_cast<void*>(address);
  info.dtype = parse_dtype(tensor->dtype_name);
  info.dtype_name = tensor->dtype_name.c_str();
  info.element_size = element_size;
  info.on_cpu = device_index < 0;
  info.device_index = device_index;
  info.dims = static_cast<int>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), info.sizes.begin());
  std::copy(strides.begin(), strides.end(), info.strides.begin());
  return tensor;
}

// A Checker keeps the operator's name by pointer, as the library's own literals allow.
struct OwningChecker {
  explicit OwningChecker(std::string name) : op(std::move(name)), check(op.c_str()) {}
  OwningChecker(const OwningChecker&) = delete;
  const std::string op;
  const msa::Checker check;
};

}  // namespace

PYBIND11_MODULE(_internals, module) {
  py::class_<Described>(module, "TensorInfo")
      .def(py::init(&make_tensor), py::arg("name"), py::arg("dtype"), py::arg("element_size"),
           py::arg("sizes"), py::arg("strides"), py::arg("address") = 0,
           py::arg("device_index") = -1)
      .def("describe", [](const Described& tensor) { return msa::describe(tensor.info); })
      .def("numel", [](const Described& tensor) { return tensor.info.numel(); });

  py::class_<OwningChecker>(module, "Checker")
      .def(py::init<std::string>())
      .def("shape",
           [](const OwningChecker& self, const Described& tensor, const char* letters,
              const std::array<int64_t, 3>& expected) {
             self.check.shape(tensor.info, letters, {expected[0], expected[1], expected[2]});
           })
      .def("same_device", [](const OwningChecker& self, const Described& tensor,
                             const Described& as) { self.check.same_device(tensor.info, as.info); })
      .def("aligned_rows", [](const OwningChecker& self,
                              const Described& tensor) { self.check.aligned_rows(tensor.info); })
      .def("no_overlap", [](const OwningChecker& self,
                            const Described& tensor) { self.check.no_overlap(tensor.info); })
      .def("apart", [](const OwningChecker& self, const Described& tensor,
                       const Described& other) { self.check.apart(tensor.info, other.info); })
      .def("in_range",
           [](const OwningChecker& self, const char* argument, int64_t value, int64_t low,
              int64_t high) { self.check.in_range(argument, value, low, high); });

  module.def("check_merge_lse", [](const Described& outs, const Described& lses) {
    msa::check_merge_lse(outs.info, lses.info, {}, {});
  });

  // What the CUDA kernel makes of every byte of a channel.
  module.def("normalized_bytes", [](double mean, double stddev) {
    const msa::PixelAffine affine = msa::make_pixel_affine(mean, stddev);
    std::vector<float> values;
    for (int x = 0; x < 256; ++x) {
      values.push_back(msa::normalize_pixel(static_cast<float>(x), affine));
    }
    return values;
  });

  module.def("built_configs", [] {
    py::list rows;
    for (const msa::KernelConfig& config : msa::built_configs()) {
      rows.append(py::make_tuple(config.op, config.arch, msa::dtype_name(config.dtype),
                                 msa::dtype_name(config.cache_dtype)));
    }
    return rows;
  });
  module.def("built_configs_text",
             [](const std::string& op) { return msa::built_configs_text(op.c_str()); });
  module.def("throw_not_built",
             [](const std::string& op, const std::string& dtype, const std::string& cache_dtype) {
               msa::throw_not_built(op.c_str(), parse_dtype(dtype), parse_dtype(cache_dtype));
             });

  module.def("prefill_sizes", [](int64_t num_tokens, int64_t num_kv_heads, int64_t group_size,
                                 int64_t topk, int64_t num_requests, int64_t max_pages,
                                 int64_t max_seqlen_k, int64_t slot_bytes, int64_t budget_bytes,
                                 bool batch_invariant) {
    const msa::PrefillSizes sizes =
        msa::prefill_sizes(num_tokens, num_kv_heads, group_size, topk, num_requests, max_pages,
                           max_seqlen_k, slot_bytes, budget_bytes, batch_invariant);
    py::dict result;
    result["by_request"] = sizes.by_request;
    result["query_major"] = sizes.query_major;
    result["short_call"] = sizes.short_call;
    result["chunk_tiles"] = sizes.chunk_tiles;
    result["chunks"] = sizes.chunks;
    result["tile_places"] = sizes.tile_places;
    result["tile_tokens"] = sizes.tile_tokens;
    result["group_tokens"] = sizes.group_tokens;
    result["tiles"] = sizes.tiles;
    result["slots"] = sizes.slots;
    result["round_slots"] = sizes.round_slots;
    result["rounds"] = sizes.rounds;
    result["max_queries_per_item"] = sizes.max_queries_per_item;
    result["max_items"] = sizes.max_items;
    return result;
  });
  module.def("draft_tile_tokens", [](int64_t num_tokens, int64_t num_requests, int64_t num_kv_heads,
                                     int64_t group_size, int64_t topk) {
    msa::AttendParams attend{};
    attend.batch.num_tokens = num_tokens;
    attend.batch.num_requests = num_requests;
    attend.num_kv_heads = num_kv_heads;
    attend.group_size = group_size;
    msa::IdsView ids{};
    ids.topk = topk;
    msa::DecodeParams params = msa::plan_decode(attend, ids, topk);
    msa::cut_drafts(params);
    return std::make_pair(params.tile_groups, params.tile_tokens);
  });
  module.def("marked_if_partly", [](uint32_t tokens, int tile_tokens, int group_tokens) {
    return msa::marked_if_partly(tokens, tile_tokens, group_tokens);
  });
  // A request's part of a scoring launch: its tokens, their tiles, and the units before each tile.
  module.def("score_plan", [](int64_t token_begin, int64_t token_end, int32_t max_blocks,
                              int32_t log_tile, bool own, int32_t tile_cost, int32_t first,
                              int32_t end, int32_t seq_len) {
    const msa::ScoreCut cut{token_begin, token_end, max_blocks, log_tile, own ? 1 : 0, tile_cost};
    const msa::RequestTokens tokens = msa::request_tokens(cut, first, end, seq_len);
    py::list tiles;
    int64_t units = 0;
    for (int32_t tile = 0; tile < tokens.num_tiles(cut); ++tile) {
      tiles.append(py::make_tuple(tokens.tile_tokens(cut, tile), tokens.tile_blocks(cut, tile),
                                  msa::units_before(tokens, cut, tile)));
      units += tokens.tile_blocks(cut, tile) + tile_cost;
    }
    py::list tile_of_unit;
    for (int64_t unit = 0; unit < std::min<int64_t>(units, 5000); ++unit) {
      tile_of_unit.append(msa::tile_of_unit(tokens, cut, unit));
    }
    return py::make_tuple(tokens.first_token, tokens.num_tokens, tokens.first_pos, tiles,
                          msa::request_units(tokens, cut), tile_of_unit);
  });
  module.def("row_items", &msa::row_items);
  module.def("item_begin", &msa::item_begin);
  module.def("max_work_items", &msa::max_work_items);
}
