// out[t, h] = softmax(scale * q[t, h] . k) v over the tokens at or before pos(t) of the row's
// blocks; lse[t, h] = log of the softmax sum. sparse_prefill, sparse_decode and paged_decode are
// one algorithm here: they differ in the blocks of a token (its ids, or all of its table).
//
// Block-major within a tile of tokens: the tile's blocks are walked in ascending order, and each
// page is transposed (K) and converted (V, unless float32) once for all rows of the tile that
// selected it:
//   logits  = q . k        rows x 128, kRowBatch rows at a time, in the L1 cache
//   weights = exp(scale * logits - running max)
//   sums    = sums * exp(old max - new max) + weights . v
// Every row meets its blocks in ascending order with sums of fixed order, so its bits depend
// neither on the tile nor on the order of its ids.
//
// Masking: rows whose last token in a page differs are multiplied with V in separate groups, each
// up to its own last token. Nothing past it is read: weight 0 times NaN would be NaN.
//
// Threads: a unit is (tile of tokens of one request, KV head). 290 KiB of scratch a thread.
// Limits: float32 throughout; the keys of one token are not shared out between threads.
#include <cmath>
#include <limits>

#include "cpu/convert.h"
#include "cpu/element.h"
#include "cpu/simd.h"
#include "cpu/token_tiles.h"
#include "cpu/work_queue.h"
#include "step4_attend/attend_params.h"

namespace msa {
namespace {

constexpr int kTileRows = 128;  // query rows of a unit: their queries and sums take 64 KiB each
constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr int64_t kNoBlock = std::numeric_limits<int64_t>::max();

// The blocks of one token, ascending, and how far they have been walked.
struct TokenBlocks {
  int64_t position;
  int64_t count;
  int64_t done;
};

struct AttendScratch {
  alignas(64) float queries[kTileRows * kRowFloats];  // row (t - tile.begin) * G + g
  alignas(64) float sums[kTileRows * kRowFloats];
  alignas(64) float keys[kPageFloats];
  alignas(64) float values[kPageFloats];
  alignas(64) float logits[kRowBatch * kBlock];
  alignas(64) float unused_sums[kRowFloats];  // where the empty rows of a group go
  SoftmaxState states[kTileRows];
  TokenBlocks tokens[kTileRows];
  int32_t blocks[kTileRows][kMaxTopk];  // sparse only
  int32_t rows[kTileRows];              // those that meet the current block
  int32_t limits[kTileRows];            // tokens of the block that each of them sees
};

// What the operators differ in.
struct BlockSource {
  const AttendParams& params;
  const IdsView* ids;  // null: every block of the table

  int64_t block(const AttendScratch& scratch, int64_t index) const {
    const TokenBlocks& token = scratch.tokens[index];
    if (token.done == token.count) return kNoBlock;
    return ids ? scratch.blocks[index][token.done] : token.done;
  }
};

void clear_rows(int64_t num_rows, AttendScratch& scratch) {
  std::fill(scratch.sums, scratch.sums + num_rows * kRowFloats, 0.0f);
  std::fill(scratch.states, scratch.states + num_rows, SoftmaxState{kNegInf, 0.0f});
}

// Everything of a tile that does not depend on a block. Of padding no input is looked at.
void start_tile(const BlockSource& source, const TokenTile& tile, int64_t head,
                AttendScratch& scratch) {
  const AttendParams& params = source.params;
  const int64_t group = params.group_size;
  clear_rows(tile.size() * group, scratch);
  for (int64_t index = 0; index < tile.size(); ++index) {
    if (tile.padding()) {
      scratch.tokens[index] = {-1, 0, 0};
      continue;
    }
    const int64_t token = tile.begin + index;
    const int64_t position = tile.position(token);
    const int64_t visible = visible_blocks(position, params.batch.max_pages);
    scratch.tokens[index] = {position, visible, 0};
    if (source.ids) {
      scratch.tokens[index].count =
          selected_blocks(*source.ids, head, token, visible, scratch.blocks[index]);
    }
    if (scratch.tokens[index].count == 0) continue;  // its query need not be readable
    simd().convert_rows(row_at(params.q, token, head * group), params.q.dtype, params.q.head_stride,
                        static_cast<int>(group), scratch.queries + index * group * kRowFloats);
  }
}

// Lists the rows that meet `block` and moves their tokens past it. Returns how many.
int take_rows(const BlockSource& source, const TokenTile& tile, int64_t block,
              AttendScratch& scratch) {
  const int group = static_cast<int>(source.params.group_size);
  int count = 0;
  for (int index = 0; index < static_cast<int>(tile.size()); ++index) {
    if (source.block(scratch, index) != block) continue;
    TokenBlocks& token = scratch.tokens[index];
    ++token.done;
    for (int g = 0; g < group; ++g, ++count) {
      scratch.rows[count] = index * group + g;
      scratch.limits[count] = static_cast<int32_t>(visible_tokens(token.position, block));
    }
  }
  return count;
}

// The page's values as float32 rows: in place where they are already.
struct Values {
  const float* data;
  int64_t stride;
};

Values load_values(const PagedView& cache, int64_t page, int64_t head, int count,
                   AttendScratch& scratch) {
  const char* first = page_at(cache, page, head);
  if (cache.dtype == DType::kFloat32) {
    return {reinterpret_cast<const float*>(first), cache.token_stride};
  }
  simd().convert_rows(first, cache.dtype, cache.token_stride, count, scratch.values);
  return {scratch.values, kRowFloats};
}

// Rows [begin, begin + count) of scratch.rows, at most kRowBatch, against a loaded page.
void attend_rows(AttendScratch& scratch, int begin, int count, int max_limit, float scale,
                 const Values& values) {
  const SimdKernels& kernels = simd();
  const int32_t* rows = scratch.rows + begin;
  const int32_t* limits = scratch.limits + begin;
  const int padded = (count + kRowGroup - 1) / kRowGroup * kRowGroup;
  const float* queries[kRowBatch];
  for (int i = 0; i < padded; ++i) {
    queries[i] = scratch.queries + rows[std::min(i, count - 1)] * kRowFloats;
  }
  kernels.dot_rows(queries, padded, scratch.keys, max_limit, scratch.logits);

  float factors[kRowBatch];
  for (int i = 0; i < count; ++i) {
    factors[i] = kernels.softmax_step(scratch.logits + i * kBlock, limits[i], scale,
                                      &scratch.states[rows[i]]);
  }
  for (int i = 0; i < count;) {
    const float* weights[kRowGroup];
    float* sums[kRowGroup];
    float shrink[kRowGroup];
    const int limit = limits[i];
    for (int lane = 0, first = i; lane < kRowGroup; ++lane) {
      const bool used = first + lane == i && i < count && limits[i] == limit;
      const int row = used ? i++ : first;
      weights[lane] = scratch.logits + row * kBlock;
      shrink[lane] = factors[row];
      sums[lane] = used ? scratch.sums + rows[row] * kRowFloats : scratch.unused_sums;
    }
    kernels.add_values(weights, limit, values.data, values.stride, shrink, sums);
  }
}

void finish_tile(const AttendParams& params, const TokenTile& tile, int64_t head, float v_scale,
                 const AttendScratch& scratch) {
  const int64_t group = params.group_size;
  for (int64_t row = 0; row < tile.size() * group; ++row) {
    const int64_t token = tile.begin + row / group, q_head = head * group + row % group;
    const SoftmaxState& state = scratch.states[row];
    // A sum of 0: nothing to attend to, or nothing above -inf. A NaN goes on.
    const float factor = state.sum == 0.0f ? 0.0f : v_scale / state.sum;
    const float* sums = scratch.sums + row * kRowFloats;
    char* out = row_at(params.out, token, q_head);
    if (params.out.dtype == DType::kFloat32) {
      auto* result = reinterpret_cast<float*>(out);
      for (int d = 0; d < kHeadDim; ++d) result[d] = sums[d] * factor;
    } else {
      auto* result = reinterpret_cast<uint16_t*>(out);
      for (int d = 0; d < kHeadDim; ++d) result[d] = float_to_bf16(sums[d] * factor);
    }
    if (params.lse.data) {
      params.lse.data[token * params.lse.token_stride + q_head * params.lse.head_stride] =
          state.sum == 0.0f ? kNegInf : state.max + std::log(state.sum);
    }
  }
}

void attend_unit(const BlockSource& source, const TokenTile& tile, int64_t head,
                 AttendScratch& scratch) {
  const AttendParams& params = source.params;
  start_tile(source, tile, head, scratch);
  const float scale = params.scale * scale_of(params.k_scale, head);
  for (;;) {
    int64_t block = kNoBlock;
    for (int64_t index = 0; index < tile.size(); ++index) {
      block = std::min(block, source.block(scratch, index));
    }
    if (block == kNoBlock) break;
    const int count = take_rows(source, tile, block, scratch);
    const int64_t page = page_of(params.batch, tile.request, block, params.k_cache.num_pages);
    if (page < 0) continue;
    const int max_limit = *std::max_element(scratch.limits, scratch.limits + count);
    simd().pack_keys(page_at(params.k_cache, page, head), params.k_cache.dtype,
                     params.k_cache.token_stride, max_limit, scratch.keys);
    const Values values = load_values(params.v_cache, page, head, max_limit, scratch);
    for (int begin = 0; begin < count; begin += kRowBatch) {
      attend_rows(scratch, begin, std::min(kRowBatch, count - begin), max_limit, scale, values);
    }
  }
  finish_tile(params, tile, head, scale_of(params.v_scale, head), scratch);
}

// paged_decode: lengths past the table's end are taken as its end, and without cu_seqlens_q row t
// is token t, the last of its own length.
std::vector<TokenTile> paged_tiles(const BatchView& batch, int64_t max_tokens) {
  std::vector<TokenTile> tiles;
  if (batch.cu_seqlens_q) {
    tiles = token_tiles(batch, max_tokens);
  } else {
    for (int64_t token = 0; token < batch.num_tokens; ++token) {
      const int64_t length = batch.seq_lens[token * batch.seq_lens_stride];
      tiles.push_back({token, token, token + 1, length - 1 - token});
    }
  }
  for (TokenTile& tile : tiles) {
    if (tile.padding()) continue;
    const int64_t length = batch.seq_lens[tile.request * batch.seq_lens_stride];
    tile.pos_offset += std::min(length, batch.max_pages * kBlock) - length;
  }
  return tiles;
}

void attend(const BlockSource& source, const std::vector<TokenTile>& tiles,
            const ExecContext& context) {
  const int64_t heads = source.params.num_kv_heads;
  for_each_unit<AttendScratch>(context.op, static_cast<int64_t>(tiles.size()) * heads,
                               [&](int64_t unit, AttendScratch& scratch) {
                                 attend_unit(source, tiles[unit / heads], unit % heads, scratch);
                               });
}

int64_t tokens_per_tile(const AttendParams& params) {
  return tile_tokens(kTileRows, params.group_size, params.batch.num_tokens, params.num_kv_heads);
}

void run_sparse(const SparseAttendParams& params, const ExecContext& context) {
  attend({params, &params.ids}, token_tiles(params.batch, tokens_per_tile(params)), context);
}

}  // namespace

void run_sparse_prefill(const SparseAttendParams& params, const ExecContext& context) {
  run_sparse(params, context);
}

void run_sparse_decode(const SparseAttendParams& params, const ExecContext& context) {
  run_sparse(params, context);
}

void run_paged_decode(const AttendParams& params, const ExecContext& context) {
  attend({params, nullptr}, paged_tiles(params.batch, tokens_per_tile(params)), context);
}

int64_t sparse_prefill_workspace_bytes(const SparseAttendParams&, const ExecContext&) { return 0; }
int64_t sparse_decode_workspace_bytes(const SparseAttendParams&, const ExecContext&) { return 0; }
int64_t paged_decode_workspace_bytes(const AttendParams&, const ExecContext&) { return 0; }

}  // namespace msa
