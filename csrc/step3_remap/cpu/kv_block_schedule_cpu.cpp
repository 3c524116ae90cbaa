// pairs of row (h * B + b) * max_blocks + j = { t * K + k : ids[h, t, k] = j counts }, ascending,
// rows one after another (CSR), then cut into even work items (work_plan.h).
//
// A counting sort in row_ptr itself: count into row_ptr[row + 1]; sum up; walk the entries
// backwards and store each at --row_ptr[row + 1], which leaves row_ptr[row + 1] at the row's begin;
// move all of them down by one.
//
// Threads: a unit is (KV head, request); its rows, hence its counters, are its own. Sums and work
// items are one pass over the rows on the calling thread.
// Limits: num_rows and num_pairs fit int32 (checked by the host side).
#include "cpu/element.h"
#include "cpu/token_tiles.h"
#include "host/parallel.h"
#include "step3_remap/kv_block_schedule_params.h"
#include "step3_remap/work_plan.h"

namespace msa {
namespace {

constexpr int64_t kEntriesPerTask = 16384;

// Calls visit(row, pair) for every entry of the head and request that counts, the last one first.
template <typename Visit>
void visit_backwards(const KVBlockScheduleParams& params, const TokenTile& tile, int64_t head,
                     const Visit& visit) {
  const IdsView& ids = params.ids;
  const int64_t max_blocks = params.batch.max_pages;
  const int64_t first_row = (head * params.batch.num_requests + tile.request) * max_blocks;
  for (int64_t token = tile.end - 1; token >= tile.begin; --token) {
    const int64_t visible = visible_blocks(tile.position(token), max_blocks);
    for (int64_t slot = std::min(ids.topk, visible) - 1; slot >= 0; --slot) {
      const int64_t block = id_at(ids, head, token, slot);
      if (block < 0 || block >= visible) continue;
      visit(first_row + block, token * ids.topk + slot);
    }
  }
}

template <typename Visit>
void visit_all(const KVBlockScheduleParams& params, const std::vector<TokenTile>& requests,
               const Visit& visit) {
  const auto num_requests = static_cast<int64_t>(requests.size());
  const int64_t entries = params.batch.num_tokens * params.ids.topk;  // of a head
  const int64_t grain = 1 + kEntriesPerTask * num_requests / (entries + 1);
  parallel_for(num_requests * params.ids.num_heads, grain, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const TokenTile& tile = requests[unit % num_requests];
      if (!tile.padding()) visit_backwards(params, tile, unit / num_requests, visit);
    }
  });
}

void cut_into_items(const KVBlockScheduleParams& params, int64_t num_rows) {
  int64_t count = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t begin = params.row_ptr[row], num_pairs = params.row_ptr[row + 1] - begin;
    const uint32_t items = row_items(static_cast<uint32_t>(num_pairs),
                                     static_cast<uint32_t>(params.max_queries_per_item));
    for (uint32_t item = 0; item < items; ++item) {
      int32_t* fields = params.work_items + 3 * count++;
      fields[0] = static_cast<int32_t>(row);
      fields[1] = static_cast<int32_t>(begin + item_begin(num_pairs, items, item));
      fields[2] = static_cast<int32_t>(begin + item_begin(num_pairs, items, item + 1));
    }
  }
  std::fill(params.work_items + 3 * count, params.work_items + 3 * params.max_work_items, -1);
  *params.num_work_items = static_cast<int32_t>(count);
}

}  // namespace

void run_kv_block_schedule(const KVBlockScheduleParams& params, const ExecContext&) {
  const int64_t num_rows =
      params.ids.num_heads * params.batch.num_requests * params.batch.max_pages;
  const int64_t capacity = params.ids.num_heads * params.batch.num_tokens * params.ids.topk;
  int32_t* row_ptr = params.row_ptr;
  const std::vector<TokenTile> requests =
      token_tiles(params.batch, std::max<int64_t>(params.batch.num_tokens, 1));

  std::fill(row_ptr, row_ptr + num_rows + 1, 0);
  visit_all(params, requests, [&](int64_t row, int64_t) { ++row_ptr[row + 1]; });
  for (int64_t row = 0; row < num_rows; ++row) row_ptr[row + 1] += row_ptr[row];
  const int32_t num_pairs = row_ptr[num_rows];
  visit_all(params, requests, [&](int64_t row, int64_t pair) {
    params.pairs[--row_ptr[row + 1]] = static_cast<int32_t>(pair);
  });
  std::fill(params.pairs + num_pairs, params.pairs + capacity, -1);
  std::copy(row_ptr + 1, row_ptr + num_rows + 1, row_ptr);
  row_ptr[num_rows] = num_pairs;
  cut_into_items(params, num_rows);
}

int64_t kv_block_schedule_workspace_bytes(const KVBlockScheduleParams&) { return 0; }

}  // namespace msa
