// What a kernel sees of a tensor: pointer, type and strides, without torch. Strides are in elements
// and 64-bit everywhere: pools exceed 2^31 elements.
#pragma once

#include <cstdint>

namespace msa {

constexpr int kBlock = 128;    // tokens of one block of selection, and slots of one cache page
constexpr int kHeadDim = 128;  // D, head size, and Di, index head size
constexpr int kMaxTopk = 32;   // largest K

enum class DType : int32_t { kFloat32, kBFloat16, kFloat8E4M3, kInt32, kInt64, kUInt8, kOther };

// [rows, heads, kHeadDim], last dimension contiguous: q, k, v, index_q, out. Without heads the head
// stride is 0.
struct RowsView {
  void* data;
  DType dtype;
  int64_t token_stride;
  int64_t head_stride;
};

// [rows, heads] float32, strides free: LSE. data is null where none was asked for.
struct LseView {
  float* data;
  int64_t token_stride;
  int64_t head_stride;
};

// [pages, heads, kBlock, kHeadDim]: one of the caches. An index cache has one head.
struct PagedView {
  void* data;
  DType dtype;
  int64_t num_pages;
  int64_t page_stride;
  int64_t head_stride;
  int64_t token_stride;
};

// Which tokens of which requests a call holds, and where their blocks lie.
struct BatchView {
  const int32_t* cu_seqlens_q;  // [B + 1], null where every row is one token (paged_decode)
  int64_t cu_seqlens_stride;
  const int32_t* seq_lens;  // [B]
  int64_t seq_lens_stride;
  const int32_t* block_table;  // [B, max_pages], null where the step needs no pages
  int64_t table_row_stride;
  int64_t table_col_stride;
  int64_t num_requests;  // B
  int64_t num_tokens;    // T, padding rows included
  int64_t max_pages;     // blocks a request may have
};

// [heads, T, topk] int32 or int64, strides free: a selection.
struct IdsView {
  void* data;
  DType dtype;  // kInt32 or kInt64
  int64_t num_heads;
  int64_t topk;
  int64_t head_stride;
  int64_t token_stride;
  int64_t slot_stride;
};

// The FP8 scale of KV head h: data ? data[h * head_stride] : value.
struct ScaleView {
  const float* data;
  int64_t head_stride;
  float value;
};

// [heads, T, blocks] float32, strides free: index scores.
struct ScoresView {
  float* data;
  int64_t num_heads;
  int64_t num_blocks;
  int64_t head_stride;
  int64_t token_stride;
  int64_t block_stride;
};

}  // namespace msa
