#include "checks/op_checks.h"

#include <algorithm>
#include <string>

#include "checks/tensor_checks.h"
#include "host/errors.h"
#include "media/normalize_patches_params.h"
#include "step1_score/score_plan.h"
#include "step5_merge/merge_lse_params.h"

namespace msa {
namespace {

constexpr int64_t kInt32Max = 2147483647;

// A [T, heads, D] input or output that kernels read or write row by row.
void check_rows(const Checker& check, const TensorInfo& tensor, const char* letters,
                std::initializer_list<int64_t> expected, const TensorInfo& device_of) {
  check.shape(tensor, letters, expected);
  check.same_device(tensor, device_of);
  check.aligned_rows(tensor);
}

// Outputs share memory with no input, nor with each other: what is read would depend on what has
// been written before.
void check_apart(const Checker& check, std::initializer_list<const TensorInfo*> outputs,
                 std::initializer_list<const TensorInfo*> inputs) {
  for (auto output = outputs.begin(); output != outputs.end(); ++output) {
    for (auto other = outputs.begin(); other != output; ++other) check.apart(**output, **other);
    for (const TensorInfo* input : inputs) check.apart(**output, *input);
  }
}

void check_batch(const Checker& check, const BatchArgs& batch, const TensorInfo& device_of) {
  check.dtype(batch.seq_lens, {DType::kInt32});
  check.shape(batch.seq_lens, "[B]", {kAnySize});
  check.same_device(batch.seq_lens, device_of);
  const int64_t num_requests = batch.seq_lens.size(0);
  if (batch.cu_seqlens_q.defined) {
    check.dtype(batch.cu_seqlens_q, {DType::kInt32});
    check.shape(batch.cu_seqlens_q, "[B + 1]", {num_requests + 1});
    check.same_device(batch.cu_seqlens_q, device_of);
  }
  if (batch.block_table.defined) {
    check.dtype(batch.block_table, {DType::kInt32});
    check.shape(batch.block_table, "[B, max_pages]", {num_requests, kAnySize});
    check.same_device(batch.block_table, device_of);
  }
}

void check_select_rule(const Checker& check, int64_t topk, int64_t init_blocks,
                       int64_t local_blocks) {
  check.in_range("topk", topk, 1, kMaxTopk);
  check.in_range("init_blocks", init_blocks, 0, topk);
  check.in_range("local_blocks", local_blocks, 0, topk);
  if (init_blocks + local_blocks > topk) {
    check.fail("init_blocks + local_blocks", concat("at most topk = ", topk),
               std::to_string(init_blocks + local_blocks));
  }
}

void check_index_inputs(const Checker& check, const TensorInfo& index_q,
                        const TensorInfo& index_k_cache, const BatchArgs& batch) {
  check.dtype(index_q, {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3});
  check_rows(check, index_q, "[T, Hi, Di]", {kAnySize, kAnySize, kHeadDim}, index_q);
  check.same_dtype(index_k_cache, index_q);
  check_rows(check, index_k_cache, "[pages, 128, Di]", {kAnySize, kBlock, kHeadDim}, index_q);
  check_batch(check, batch, index_q);
  const int64_t num_requests = batch.seq_lens.size(0), max_pages = batch.block_table.size(1);
  if (!units_can_be_counted(num_requests, max_pages)) {
    check.fail(concat("(B + 1) * (max_pages + ", kMaxTileCost, ")"),
               concat("below 2^32, where pages past ", kMaxBlocks, " of a request do not count"),
               concat("(", num_requests, " + 1) * (", max_pages, " + ", kMaxTileCost, ")"));
  }
}

void check_ids_out(const Checker& check, const TensorInfo& ids, int64_t num_heads,
                   int64_t num_tokens, int64_t topk, const TensorInfo& device_of) {
  if (!ids.defined) return;
  check.dtype(ids, {DType::kInt32});
  check.shape(ids, "[Hi, T, K]", {num_heads, num_tokens, topk});
  check.same_device(ids, device_of);
  check.no_overlap(ids);
}

void check_ids_in(const Checker& check, const TensorInfo& ids, int64_t num_heads,
                  int64_t num_tokens, const TensorInfo& device_of) {
  check.dtype(ids, {DType::kInt32, DType::kInt64});
  check.shape(ids, "[Hkv, T, K]", {num_heads, num_tokens, kAnySize});
  check.in_range("K, the last dimension of ids,", ids.size(2), 1, kMaxTopk);
  check.same_device(ids, device_of);
}

// Whether a * b > most; the product could wrap, as sizes of expanded tensors are without limit.
bool product_exceeds(int64_t a, int64_t b, int64_t most) { return a > 0 && b > most / a; }

// Rows and pairs of a remap are numbered by int32.
void check_schedule_sizes(const Checker& check, const TensorInfo& ids, const TensorInfo& seq_lens,
                          int64_t max_blocks) {
  check.in_range("Hkv * T * K", ids.numel(), 0, kInt32Max);
  if (product_exceeds(ids.size(0) * seq_lens.size(0), max_blocks, kInt32Max - 1)) {
    check.fail("Hkv * B * max_blocks", concat("at most ", kInt32Max - 1),
               concat(ids.size(0), " * ", seq_lens.size(0), " * ", max_blocks));
  }
}

void check_scale(const Checker& check, const TensorInfo& scale, const TensorInfo& cache,
                 int64_t num_kv_heads) {
  if (!scale.defined) return;
  if (cache.dtype != DType::kFloat8E4M3) {
    check.fail(scale.name, concat("None beside a ", cache.dtype_name, " ", cache.name),
               describe(scale));
  }
  check.dtype(scale, {DType::kFloat32});
  const bool one = scale.numel() == 1;
  const bool per_head = scale.dims == 1 && scale.size(0) == num_kv_heads && num_kv_heads > 0;
  if (!one && !per_head) {
    check.fail(scale.name, concat("of 1 element or [Hkv] = [", num_kv_heads, "]"),
               shape_text(scale.sizes.data(), scale.dims));
  }
  // A one-element CPU tensor is a plain number: it is read on the host, whatever the device.
  if (!(one && scale.on_cpu)) check.same_device(scale, cache);
}

void check_kv_caches(const Checker& check, const TensorInfo& k_cache, const TensorInfo& v_cache,
                     int64_t num_kv_heads, const TensorInfo& rows) {
  if (k_cache.dtype != DType::kFloat8E4M3) {
    check.dtype(k_cache, {rows.dtype, DType::kFloat8E4M3});
  }
  check_rows(check, k_cache, "[pages, Hkv, 128, D]", {kAnySize, num_kv_heads, kBlock, kHeadDim},
             rows);
  check.same_dtype(v_cache, k_cache);
  check_rows(check, v_cache, "[pages, Hkv, 128, D]",
             {k_cache.size(0), k_cache.size(1), kBlock, kHeadDim}, rows);
}

void check_attend(const Checker& check, const TensorInfo& q, const TensorInfo& k_cache,
                  const TensorInfo& v_cache, const TensorInfo& k_scale, const TensorInfo& v_scale,
                  const TensorInfo& out, const TensorInfo& lse) {
  check.dtype(q, {DType::kFloat32, DType::kBFloat16});
  check_rows(check, q, "[T, Hq, D]", {kAnySize, kAnySize, kHeadDim}, q);
  check_kv_caches(check, k_cache, v_cache, kAnySize, q);
  const int64_t num_q_heads = q.size(1), num_kv_heads = k_cache.size(1);
  const int64_t group = num_kv_heads > 0 ? num_q_heads / num_kv_heads : 0;
  const bool listed = group == 1 || group == 2 || group == 4 || group == 8 || group == 16;
  if (!listed || group * num_kv_heads != num_q_heads) {
    check.fail("G = Hq / Hkv", "1, 2, 4, 8 or 16",
               concat("Hq = ", num_q_heads, " (q), Hkv = ", num_kv_heads, " (k_cache)"));
  }
  check_scale(check, k_scale, k_cache, num_kv_heads);
  check_scale(check, v_scale, v_cache, num_kv_heads);
  if (out.defined) {
    check.same_dtype(out, q);
    check_rows(check, out, "[T, Hq, D]", {q.size(0), num_q_heads, kHeadDim}, q);
    check.no_overlap(out);
  }
  if (lse.defined) {
    check.dtype(lse, {DType::kFloat32});
    check.shape(lse, "[T, Hq]", {q.size(0), num_q_heads});
    check.same_device(lse, q);
    check.no_overlap(lse);
  }
}

}  // namespace

void check_write_cache(const TensorInfo& k, const TensorInfo& v, const TensorInfo& index_k,
                       const TensorInfo& slot_mapping, const TensorInfo& k_cache,
                       const TensorInfo& v_cache, const TensorInfo& index_k_cache,
                       const TensorInfo& k_scale, const TensorInfo& v_scale) {
  const Checker check("write_cache");
  check.dtype(k, {DType::kFloat32, DType::kBFloat16});
  check_rows(check, k, "[T, Hkv, D]", {kAnySize, kAnySize, kHeadDim}, k);
  const int64_t num_tokens = k.size(0), num_kv_heads = k.size(1);
  check.in_range("Hkv, the second dimension of k,", num_kv_heads, 1, kInt32Max);
  check.same_dtype(v, k);
  check_rows(check, v, "[T, Hkv, D]", {num_tokens, num_kv_heads, kHeadDim}, k);
  check.dtype(slot_mapping, {DType::kInt64});
  check.shape(slot_mapping, "[T]", {num_tokens});
  check.same_device(slot_mapping, k);
  check_kv_caches(check, k_cache, v_cache, num_kv_heads, k);
  check.no_overlap(k_cache);
  check.no_overlap(v_cache);
  check_scale(check, k_scale, k_cache, num_kv_heads);
  check_scale(check, v_scale, v_cache, num_kv_heads);
  check_apart(check, {&k_cache, &v_cache, &index_k_cache}, {});
  if (!index_k.defined) {
    check.not_given(index_k_cache, "index_k is None");
    return;
  }
  check.given(index_k_cache, "index_k is given");
  check.dtype(index_k, {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3});
  check_rows(check, index_k, "[T, Di]", {num_tokens, kHeadDim}, k);
  check.same_dtype(index_k_cache, index_k);
  // One page id names a page in all three caches.
  check_rows(check, index_k_cache, "[pages, 128, Di]", {k_cache.size(0), kBlock, kHeadDim}, k);
  check.no_overlap(index_k_cache);
}

void check_index_score(const TensorInfo& index_q, const TensorInfo& index_k_cache,
                       const BatchArgs& batch, const TensorInfo& scores) {
  const Checker check("index_score");
  check_index_inputs(check, index_q, index_k_cache, batch);
  if (!scores.defined) return;
  check.dtype(scores, {DType::kFloat32});
  check.shape(scores, "[Hi, T, max_pages]",
              {index_q.size(1), index_q.size(0), batch.block_table.size(1)});
  check.same_device(scores, index_q);
  check.no_overlap(scores);
  check_apart(check, {&scores},
              {&index_q, &index_k_cache, &batch.block_table, &batch.cu_seqlens_q, &batch.seq_lens});
}

void check_topk_blocks(const TensorInfo& scores, const TensorInfo& visible_blocks, int64_t topk,
                       int64_t init_blocks, int64_t local_blocks, const TensorInfo& ids) {
  const Checker check("topk_blocks");
  check.dtype(scores, {DType::kFloat32});
  check.shape(scores, "[Hi, T, blocks]", {kAnySize, kAnySize, kAnySize});
  check.dtype(visible_blocks, {DType::kInt32});
  check.shape(visible_blocks, "[T]", {scores.size(1)});
  check.same_device(visible_blocks, scores);
  const int64_t num_heads = scores.size(0), num_tokens = scores.size(1);
  if (product_exceeds(num_heads, num_tokens, kInt32Max)) {
    check.fail("Hi * T, the rows of scores,", concat("at most ", kInt32Max),
               concat(num_heads, " * ", num_tokens));
  }
  check_select_rule(check, topk, init_blocks, local_blocks);
  check_ids_out(check, ids, num_heads, num_tokens, topk, scores);
  check_apart(check, {&ids}, {&scores, &visible_blocks});
}

void check_select_blocks(const TensorInfo& index_q, const TensorInfo& index_k_cache,
                         const BatchArgs& batch, int64_t topk, int64_t init_blocks,
                         int64_t local_blocks, const TensorInfo& ids) {
  const Checker check("select_blocks");
  check_index_inputs(check, index_q, index_k_cache, batch);
  check_select_rule(check, topk, init_blocks, local_blocks);
  check_ids_out(check, ids, index_q.size(1), index_q.size(0), topk, index_q);
  check_apart(check, {&ids},
              {&index_q, &index_k_cache, &batch.block_table, &batch.cu_seqlens_q, &batch.seq_lens});
}

void check_kv_block_schedule(const TensorInfo& ids, const TensorInfo& cu_seqlens_q,
                             const TensorInfo& seq_lens, int64_t max_blocks,
                             int64_t max_queries_per_item) {
  const Checker check("kv_block_schedule");
  check_ids_in(check, ids, kAnySize, kAnySize, ids);
  check_batch(check, {{}, cu_seqlens_q, seq_lens}, ids);
  check.in_range("max_blocks", max_blocks, 0, kInt32Max);
  check.in_range("max_queries_per_item", max_queries_per_item, 1, kInt32Max);
  check_schedule_sizes(check, ids, seq_lens, max_blocks);
}

void check_decode_view(const TensorInfo& ids, const BatchArgs& batch, int64_t num_pages,
                       int64_t page_step, int64_t head_step, const TensorInfo& page_table,
                       const TensorInfo& kv_lens) {
  const Checker check("decode_view");
  check_ids_in(check, ids, kAnySize, kAnySize, ids);
  check_batch(check, batch, ids);
  check.in_range("num_pages", num_pages, 0, kInt32Max);
  check.in_range("page_step", page_step, 0, kInt32Max);
  check.in_range("head_step", head_step, 0, kInt32Max);
  const int64_t last_page = std::max<int64_t>(num_pages - 1, 0) * page_step +
                            std::max<int64_t>(ids.size(0) - 1, 0) * head_step;
  check.in_range("the last view page, (num_pages - 1) * page_step + (Hkv - 1) * head_step,",
                 last_page, 0, kInt32Max);
  const int64_t num_rows = ids.size(0) * ids.size(1);
  if (page_table.defined) {
    check.dtype(page_table, {DType::kInt32});
    check.shape(page_table, "[T * Hkv, K]", {num_rows, ids.size(2)});
    check.same_device(page_table, ids);
    check.no_overlap(page_table);
  }
  if (kv_lens.defined) {
    check.dtype(kv_lens, {DType::kInt32});
    check.shape(kv_lens, "[T * Hkv]", {num_rows});
    check.same_device(kv_lens, ids);
    check.no_overlap(kv_lens);
  }
  check_apart(check, {&page_table, &kv_lens},
              {&ids, &batch.block_table, &batch.cu_seqlens_q, &batch.seq_lens});
}

void check_sparse_attend(const char* op, const TensorInfo& q, const TensorInfo& k_cache,
                         const TensorInfo& v_cache, const TensorInfo& ids, const BatchArgs& batch,
                         const TensorInfo& k_scale, const TensorInfo& v_scale,
                         const TensorInfo& out, const TensorInfo& lse) {
  const Checker check(op);
  check_attend(check, q, k_cache, v_cache, k_scale, v_scale, out, lse);
  check_ids_in(check, ids, k_cache.size(1), q.size(0), q);
  check_batch(check, batch, q);
  check_schedule_sizes(check, ids, batch.seq_lens, batch.block_table.size(1));
  check_apart(check, {&out, &lse},
              {&q, &k_cache, &v_cache, &ids, &batch.block_table, &batch.cu_seqlens_q,
               &batch.seq_lens, &k_scale, &v_scale});
}

void check_paged_decode(const TensorInfo& q, const TensorInfo& k_cache, const TensorInfo& v_cache,
                        const BatchArgs& batch, const TensorInfo& k_scale,
                        const TensorInfo& v_scale, const TensorInfo& out, const TensorInfo& lse) {
  const Checker check("paged_decode");
  check_attend(check, q, k_cache, v_cache, k_scale, v_scale, out, lse);
  check_batch(check, batch, q);
  if (!batch.cu_seqlens_q.defined) {
    check.shape(batch.seq_lens, "[T] (a row is a token without cu_seqlens_q)", {q.size(0)});
  }
  check_apart(check, {&out, &lse},
              {&q, &k_cache, &v_cache, &batch.block_table, &batch.cu_seqlens_q, &batch.seq_lens,
               &k_scale, &v_scale});
}

namespace {

void check_merge_part(const Checker& check, const TensorInfo& out, const TensorInfo& lse,
                      const char* out_letters, std::initializer_list<int64_t> out_shape,
                      const char* lse_letters, std::initializer_list<int64_t> lse_shape,
                      const TensorInfo& device_of) {
  check.dtype(out, {DType::kFloat32, DType::kBFloat16});
  check_rows(check, out, out_letters, out_shape, device_of);
  check.dtype(lse, {DType::kFloat32});
  check.shape(lse, lse_letters, lse_shape);
  check.same_device(lse, device_of);
}

}  // namespace

void check_merge_lse(const TensorInfo& outs, const TensorInfo& lses, const TensorInfo& out,
                     const TensorInfo& lse) {
  const Checker check("merge_lse");
  check.dtype(outs, {DType::kFloat32, DType::kBFloat16});
  check.shape(outs, "[P, T, H, D]", {kAnySize, kAnySize, kAnySize, kHeadDim});
  const int64_t parts = outs.size(0), tokens = outs.size(1), heads = outs.size(2);
  check.in_range("P, the first dimension of outs,", parts, 1, kInt32Max);
  check.in_range("T * H of outs", tokens * heads, 0, kInt32Max);
  check_merge_part(check, outs, lses, "[P, T, H, D]", {parts, tokens, heads, kHeadDim}, "[P, T, H]",
                   {parts, tokens, heads}, outs);
  if (!out.defined) return;
  check.same_dtype(out, outs);
  check_merge_part(check, out, lse, "[T, H, D]", {tokens, heads, kHeadDim}, "[T, H]",
                   {tokens, heads}, outs);
  check.no_overlap(out);
  check.no_overlap(lse);
  check_apart(check, {&out, &lse}, {&outs, &lses});
}

void check_merge_lse_parts(const TensorInfo* outs, int64_t num_outs, const TensorInfo* lses,
                           int64_t num_lses) {
  const Checker check("merge_lse");
  check.in_range("the number of parts in outs", num_outs, 1, kMaxSeparateParts);
  if (num_lses != num_outs) {
    check.fail("lses", concat("a list of ", num_outs, " tensors, like outs"),
               concat(num_lses, " tensors"));
  }
  check.shape(outs[0], "[T, H, D]", {kAnySize, kAnySize, kHeadDim});
  const int64_t tokens = outs[0].size(0), heads = outs[0].size(1);
  check.in_range("T * H of outs", tokens * heads, 0, kInt32Max);
  for (int64_t part = 0; part < num_outs; ++part) {
    check.same_dtype(outs[part], outs[0]);
    check_merge_part(check, outs[part], lses[part], "[T, H, D]", {tokens, heads, kHeadDim},
                     "[T, H]", {tokens, heads}, outs[0]);
  }
}

namespace {

// Written so that NaN is refused too.
void check_per_channel(const Checker& check, const char* name, const std::vector<double>& values,
                       double low, double high) {
  if (values.size() != kChannels) {
    check.fail(name, concat("a list of ", kChannels, " numbers, one a channel"),
               concat(values.size(), " numbers"));
  }
  for (size_t channel = 0; channel < values.size(); ++channel) {
    if (!(values[channel] >= low && values[channel] <= high)) {
      check.fail(concat(name, "[", channel, "]"), concat("from ", low, " to ", high),
                 concat(values[channel]));
    }
  }
}

}  // namespace

void check_normalize_patches(const TensorInfo& patches, const std::vector<double>& mean,
                             const std::vector<double>& stddev, int64_t patch, int64_t temporal,
                             DType dtype, const char* dtype_name, const TensorInfo& out) {
  const Checker check("normalize_patches");
  check.in_range("patch", patch, kMinPatch, kMaxPatch);
  if (patch % 2 != 0) check.fail("patch", "even", std::to_string(patch));
  check.in_range("temporal", temporal, 1, kMaxTemporal);
  check_per_channel(check, "mean", mean, 0.0, 1.0);
  check_per_channel(check, "std", stddev, kMinPixelStd, 1.0);
  if (dtype != DType::kFloat32 && dtype != DType::kBFloat16) {
    check.fail(out.defined ? out.name : "dtype", "float32 or bfloat16", dtype_name);
  }

  check.dtype(patches, {DType::kUInt8});
  check.shape(patches, "[rows, 3 * frames * patch * patch]", {kAnySize, kAnySize});
  const int64_t frame = kChannels * patch * patch;
  const int64_t width = patches.size(1);
  if (width != frame && width != frame * temporal) {
    const std::string all = temporal > 1 ? concat(" or ", frame * temporal) : "";
    check.fail("the second dimension of patches",
               concat("3 * frames * patch * patch = ", frame, all), std::to_string(width));
  }
  check.dense_rows(patches, 4);
  if (!out.defined) return;
  check.shape(out, "[rows, 3 * temporal * patch * patch]", {patches.size(0), frame * temporal});
  check.same_device(out, patches);
  check.dense_rows(out, 16);
  check_apart(check, {&out}, {&patches});
}

}  // namespace msa
