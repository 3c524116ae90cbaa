// What the tests call: operators on Hopper's kernels, as their own host code launches them.
#include <cmath>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include "machine.h"
#include "step1_score/score_run.h"
#include "step2_select/select_blocks_params.h"
#include "step2_select/sm90/bounded_select_run.h"
#include "step3_remap/kv_block_schedule_params.h"
#include "step3_view/decode_view_params.h"
#include "step4_attend/attend_params.h"

namespace broken {
void break_rule(const std::string& rule, int64_t* result);
}

namespace {

using namespace msa;

// Past the devices whose number of SMs the host code keeps: settings change between calls.
ExecContext context_of(const char* op) { return {op, 1000, nullptr}; }

// The arguments of a call, one after the other, as emulator.py lists them.
struct Arguments {
  const int64_t* next;

  int64_t number() { return *next++; }
  template <typename T>
  T* pointer() {
    return reinterpret_cast<T*>(number());
  }
  DType dtype() { return static_cast<DType>(number()); }
  RowsView rows() { return {pointer<void>(), dtype(), number(), number()}; }
  PagedView cache() { return {pointer<void>(), dtype(), number(), number(), number(), number()}; }
  BatchView batch() {
    return {pointer<int32_t>(), number(), pointer<int32_t>(), number(), pointer<int32_t>(),
            number(),           number(), number(),           number(), number()};
  }
  IdsView ids() {
    return {pointer<void>(), dtype(), number(), number(), number(), number(), number()};
  }
  ScoresView scores() {
    return {pointer<float>(), number(), number(), number(), number(), number()};
  }
};

// Garbage: numbers that rise, so that what nobody wrote passes for a range.
class Workspace {
 public:
  explicit Workspace(int64_t bytes) : bytes_(bytes + kAlignment) {
    for (size_t i = 0; i < bytes_.size(); ++i) {
      bytes_[i] = static_cast<uint8_t>((0x4dcd0000 + i / 4) >> i % 4 * 8);
    }
  }
  void* data() const {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    return reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
  }

 private:
  static constexpr int64_t kAlignment = 256;
  std::vector<uint8_t> bytes_;
};

void fill(SelectBlocksParams& params, Arguments& arguments) {
  params.index_q = arguments.rows();
  params.index_k_cache = arguments.cache();
  params.batch = arguments.batch();
  params.rule = {arguments.number(), arguments.number(), arguments.number()};
  params.ids = arguments.ids();
}

void select_by_bounds(Arguments& arguments) {
  SelectBlocksParams params{};
  fill(params, arguments);
  const int64_t window_tokens = arguments.number(), row_blocks = arguments.number();
  const Workspace workspace(
      select_blocks::sm90::bounded_workspace_bytes(params, window_tokens, row_blocks));
  params.workspace = workspace.data();
  select_blocks::sm90::run_bounded(params, window_tokens, row_blocks, context_of("select_blocks"));
}

// select_blocks, whichever way the call goes.
void select(Arguments& arguments) {
  SelectBlocksParams params{};
  fill(params, arguments);
  const Workspace workspace(select_blocks_workspace_bytes(params));
  params.workspace = workspace.data();
  run_select_blocks(params, context_of("select_blocks"));
}

void select_from_scores(Arguments& arguments) {
  TopkBlocksParams params{};
  params.scores = arguments.scores();
  params.visible_blocks = arguments.pointer<int32_t>();
  params.visible_stride = arguments.number();
  params.num_tokens = arguments.number();
  params.rule = {arguments.number(), arguments.number(), arguments.number()};
  params.ids = arguments.ids();
  run_topk_blocks(params, context_of("topk_blocks"));
}

// Scores of the blocks before the tokens' own. `rows` of a tile: 256, or 8 to 64 by the kernel that
// streams pages.
void score(Arguments& arguments) {
  index_score::ScoreWork work{};
  work.index_q = arguments.rows();
  work.index_k_cache = arguments.cache();
  work.batch = arguments.batch();
  work.scores = arguments.scores();
  const int64_t rows = arguments.number(), heads = work.scores.num_heads;
  const ExecContext context = context_of("index_score");
  work.set_heads(static_cast<int32_t>(heads));
  work.cut.token_end = work.batch.num_tokens;
  work.cut.max_blocks = index_score::capped_blocks(work.batch);
  work.cut.log_tile = index_score::log_tile_tokens(rows, heads);
  if (rows == 256) {
    work.cut.tile_cost = kMaxTileCost;
    index_score::sm90::run_tiles(work, context);
  } else {
    work.cut.tile_cost = 1;
    index_score::sm90::run_stream(work, rows, context);
  }
}

void fill(AttendParams& params, Arguments& arguments) {
  params.q = arguments.rows();
  params.k_cache = arguments.cache();
  params.v_cache = arguments.cache();
  params.batch = arguments.batch();
  params.out = arguments.rows();
  params.lse = {arguments.pointer<float>(), arguments.number(), arguments.number()};
  params.k_scale = {arguments.pointer<float>(), 1, 1.0f};
  params.v_scale = {arguments.pointer<float>(), 1, 1.0f};
  params.num_kv_heads = arguments.number();
  params.group_size = arguments.number();
  params.scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
}

// sparse_prefill, whichever way the call goes.
void attend_prefill(Arguments& arguments) {
  SparseAttendParams params{};
  fill(params, arguments);
  params.ids = arguments.ids();
  params.batch_invariant = arguments.number() != 0;
  const Workspace workspace(sparse_prefill_sm90_workspace_bytes(params));
  params.workspace = workspace.data();
  run_sparse_prefill_sm90(params, context_of("sparse_prefill"));
}

// sparse_decode, whichever way the call goes.
void attend_decode(Arguments& arguments) {
  SparseAttendParams params{};
  fill(params, arguments);
  params.ids = arguments.ids();
  const ExecContext context = context_of("sparse_decode");
  const Workspace workspace(sparse_decode_workspace_bytes(params, context));
  params.workspace = workspace.data();
  run_sparse_decode(params, context);
}

void attend_pages(Arguments& arguments) {
  AttendParams params{};
  fill(params, arguments);
  const ExecContext context = context_of("paged_decode");
  const Workspace workspace(paged_decode_workspace_bytes(params, context));
  params.workspace = workspace.data();
  run_paged_decode(params, context);
}

void view(Arguments& arguments) {
  DecodeViewParams params{};
  params.ids = arguments.ids();
  params.batch = arguments.batch();
  params.num_pages = arguments.number();
  params.page_step = arguments.number();
  params.head_step = arguments.number();
  params.page_table = arguments.pointer<int32_t>();
  params.table_row_stride = arguments.number();
  params.table_entry_stride = arguments.number();
  params.kv_lens = arguments.pointer<int32_t>();
  params.kv_lens_stride = arguments.number();
  run_decode_view(params, context_of("decode_view"));
}

void schedule(Arguments& arguments) {
  KVBlockScheduleParams params{};
  params.ids = arguments.ids();
  params.batch = arguments.batch();
  params.batch.block_table = nullptr;
  params.batch.max_pages = arguments.number();
  params.max_queries_per_item = arguments.number();
  params.row_ptr = arguments.pointer<int32_t>();
  params.pairs = arguments.pointer<int32_t>();
  params.work_items = arguments.pointer<int32_t>();
  params.num_work_items = arguments.pointer<int32_t>();
  params.max_work_items = arguments.number();
  const Workspace workspace(kv_block_schedule_workspace_bytes(params));
  params.workspace = workspace.data();
  run_kv_block_schedule(params, context_of("kv_block_schedule"));
}

void break_rule(Arguments& arguments) {
  const std::string rule = arguments.pointer<char>();
  broken::break_rule(rule, arguments.pointer<int64_t>());
}

const std::map<std::string, void (*)(Arguments&)> kCalls{
    {"select_by_bounds", select_by_bounds}, {"select_blocks", select},
    {"topk_blocks", select_from_scores},    {"score", score},
    {"sparse_prefill", attend_prefill},     {"sparse_decode", attend_decode},
    {"paged_decode", attend_pages},         {"decode_view", view},
    {"kv_block_schedule", schedule},        {"break_rule", break_rule},
};

std::string message, kernels;

}  // namespace

// Null, or what went wrong. Settings: seed, SMs, CTAs at once.
extern "C" const char* msa_emulate(const char* name, const int64_t* values) {
  Arguments arguments{values};
  emulation::settings.seed = static_cast<uint32_t>(arguments.number());
  emulation::settings.sms = static_cast<int>(arguments.number());
  emulation::settings.ctas_at_once = static_cast<int>(arguments.number());
  emulation::launched.clear();
  try {
    kCalls.at(name)(arguments);
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
  return nullptr;
}

// Those that the last call launched: a line each, the name, threads of a CTA, CTAs of a cluster.
extern "C" const char* msa_emulated_kernels() {
  kernels.clear();
  for (const std::string& kernel : emulation::launched) kernels += kernel + "\n";
  return kernels.c_str();
}
