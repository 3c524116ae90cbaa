// Row t * Hkv + h: page_table = page(j) * page_step + h * head_step for the selected blocks j of
// (t, h), ascending, then 0; kv_lens = (n - 1) * 128 + tokens of the last of these n blocks.
//
// Left out of a row: entries of ids that count nothing, and blocks on a page outside the cache.
//
// Threads: ranges of tiles, each of up to 64 tokens of one request.
// Limits: view pages fit int32 (the Python API checks the view that it makes).
#include "cpu/element.h"
#include "cpu/token_tiles.h"
#include "host/parallel.h"
#include "step3_view/decode_view_params.h"

namespace msa {
namespace {

constexpr int64_t kTokensPerTile = 64;
constexpr int64_t kTilesPerTask = 16;  // a decode token is a tile of its own

void write_row(const DecodeViewParams& params, const TokenTile& tile, int64_t token, int64_t head) {
  const int64_t topk = params.ids.topk;
  const int64_t row = token * params.ids.num_heads + head;
  int32_t* const pages = params.page_table + row * params.table_row_stride;
  int32_t& length = params.kv_lens[row * params.kv_lens_stride];
  for (int64_t k = 0; k < topk; ++k) pages[k * params.table_entry_stride] = 0;
  length = 0;
  if (tile.padding()) return;

  const int64_t position = tile.position(token);
  int32_t blocks[kMaxTopk];
  const int64_t visible = visible_blocks(position, params.batch.max_pages);
  const int count = selected_blocks(params.ids, head, token, visible, blocks);
  int64_t listed = 0, last_tokens = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t page = page_of(params.batch, tile.request, blocks[i], params.num_pages);
    if (page < 0) continue;
    pages[listed++ * params.table_entry_stride] =
        static_cast<int32_t>(page * params.page_step + head * params.head_step);
    last_tokens = visible_tokens(position, blocks[i]);
  }
  if (listed > 0) length = static_cast<int32_t>((listed - 1) * kBlock + last_tokens);
}

}  // namespace

void run_decode_view(const DecodeViewParams& params, const ExecContext&) {
  const std::vector<TokenTile> tiles = token_tiles(params.batch, kTokensPerTile);
  parallel_for(static_cast<int64_t>(tiles.size()), kTilesPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const TokenTile& tile = tiles[index];
      for (int64_t token = tile.begin; token < tile.end; ++token) {
        for (int64_t head = 0; head < params.ids.num_heads; ++head) {
          write_row(params, tile, token, head);
        }
      }
    }
  });
}

}  // namespace msa
