// Step 3 of prefill, kv_block_schedule: {token -> blocks} into {block -> tokens}, a counting sort
// over rows (KV head, request, block), and the even work items that a persistent attention grid
// takes.
//
// Launches, no host knowledge of the selection. Each may start under the one before (programmatic
// dependent launch): it reads ids and lengths there, which no launch of the call writes, and waits
// before it touches what others write.
//   clear    counters, chain and ticket to 0
//   count    a CTA a (KV head, chunk of tokens): its entries into a histogram of its requests' rows
//            in shared memory, which goes into the counters: that gives the chunk's base in each
//            row. Too many rows: straight into the counters, with each entry's rank in its row
//   scan     only of more than kSummedRows rows, fewer are summed up by every CTA of scatter:
//            row_ptr, work items, and each counter becomes the row's first pair
//            (kv_block_schedule_scan_kernel.cuh)
//   scatter  the same CTAs sort their entries by row in shared memory, while count runs, and then
//            write those of a row in one run, from the row's begin + the chunk's base on, without
//            atomics. -1 past the last pair and item. Without scan: row_ptr and work items too,
//            cta_rows rows a CTA
// Shared    both     positions, rows and lengths of the tokens; ids (up to 32 KB); histogram (up to
//                    32 KB)
//           scatter  ids become row << 16 | rank; the histogram first each row's begin in `sorted`
//                    | its entries << 16, then what to add to a place in `sorted` for the place
//                    among the pairs; sorted entries (16 KB); what is known of the CTA's own rows
//
// Portable, sm_80 and up.
// Order of the pairs within a row is not fixed: the ranks come of atomics. What is computed from
// them is: a partial result lies in a slot of its own, whatever tile it was computed in.
// Limits: num_rows, Hkv * T * K and the items fit int32 (checked on the host).
#pragma once

#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/dependent_launch.cuh"
#include "device/division.h"
#include "device/positions.cuh"
#include "device/shared_memory.cuh"
#include "device/sm80_async_copy.cuh"
#include "step3_remap/kv_block_schedule_params.h"
#include "step3_remap/sm80/kv_block_schedule_scan_kernel.cuh"
#include "step3_remap/sm80/token_chunk.cuh"
#include "step3_remap/work_plan.h"

namespace msa::kv_block_schedule::sm80 {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kChunkTokens = 256;            // of a chunk at most
constexpr int kChunkEntries = 4096;          // at most
constexpr int kNearRequests = kThreads - 1;  // whose lengths a CTA keeps in shared memory
constexpr int kSummedRows = 4096;            // that every CTA of scatter sums up by itself
constexpr int kCtaRows = kWarps;             // of which such a CTA writes row_ptr and items
constexpr int kBatch = 4;                    // entries that a thread looks up at a time
constexpr uint32_t kNone = ~0u;
// An SM has room for two CTAs of count and two of scatter, where these may run at the same time.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr int kScatterCtas = 4;
#else
constexpr int kScatterCtas = 1;
#endif
static_assert(kSummedRows <= kHistogramRows, "a chunk of fewer rows counts all it has");
static_assert(kThreads == kScanThreads, "scan_threads() serves both");
static_assert(kChunkTokens <= kThreads, "a thread a token");
static_assert(kHistogramRows < 1 << 16 && kChunkEntries < 1 << 16, "both in one word, none kNone");

// Between count and scatter.
struct Ranks {
  uint32_t* entry_rank;  // [Hkv * T * K]: in its row, where the chunk has too many rows
  uint32_t* chunk_base;  // [Hkv * chunks][chunk_rows]: the row's entries of other chunks before
  int64_t chunk_rows;
  int32_t chunk_tokens;
  int32_t ids_bytes;  // that a CTA keeps of the ids
  int32_t id_bytes;
  int32_t copied_ids;                     // at a time, adjacent in memory: 16 bytes, or one id
  int32_t cta_rows;                       // of which a CTA of scatter writes row_ptr and items
  Division by_topk, by_limit, by_chunks;  // chunks of a head
};

struct Chunk : TokenChunk {
  int32_t head;
  uint32_t entries;
  int64_t first_row;    // of the first request, among all rows
  int64_t first_entry;  // of the first token, among all entries
};

struct TokenRows {
  int32_t visible;     // blocks
  uint32_t first_row;  // of the chunk
};

// Ids and histogram follow.
struct SharedChunk {
  TokenPosition positions[kChunkTokens];
  TokenRows tokens[kChunkTokens];
  int32_t first_tokens[kNearRequests + 1], seq_lens[kNearRequests];
  int32_t padding[5];
};
static_assert(sizeof(SharedChunk) % 16 == 0);

inline __host__ __device__ int64_t shared_bytes(const Ranks& ranks) {
  return int64_t{sizeof(SharedChunk)} + ranks.ids_bytes + ranks.chunk_rows * 4;
}

__device__ __forceinline__ uint32_t* ids_of(SharedChunk& shared) {
  return reinterpret_cast<uint32_t*>(&shared + 1);
}

__device__ __forceinline__ void copy_ids(const KVBlockScheduleParams& params, const Ranks& ranks,
                                         const Chunk& chunk, uint32_t* ids) {
  const auto id_bytes = static_cast<uint32_t>(ranks.id_bytes);
  const auto copied = static_cast<uint32_t>(ranks.copied_ids);
  const char* const first =
      static_cast<const char*>(params.ids.data) +
      (chunk.head * params.ids.head_stride + chunk.first_token * params.ids.token_stride) *
          id_bytes;
  const uint32_t target = shared_address(ids);
#pragma unroll 1
  for (uint32_t entry = threadIdx.x * copied; entry < chunk.entries; entry += kThreads * copied) {
    const uint32_t token = ranks.by_topk(entry), slot = entry - token * ranks.by_topk.divisor;
    const char* const source =
        first + (token * params.ids.token_stride + slot * params.ids.slot_stride) * id_bytes;
    const uint32_t place = target + entry * id_bytes;
    if (copied > 1) {
      copy_async_16(place, source);
    } else if (id_bytes == 8) {
      copy_async<8>(place, source);
    } else {
      copy_async<4>(place, source);
    }
  }
  commit_async_copies();
}

// Starts copying the chunk's ids to shared memory, and finds its tokens and rows meanwhile. By all
// threads of a CTA.
__device__ __forceinline__ Chunk load_chunk(const KVBlockScheduleParams& params, const Ranks& ranks,
                                            SharedChunk& shared) {
  const BatchView& batch = params.batch;
  Chunk chunk{};
  chunk.head = static_cast<int32_t>(ranks.by_chunks(blockIdx.x));
  if (chunk.head >= params.ids.num_heads) return chunk;  // a CTA for its own rows alone
  chunk.first_token =
      static_cast<int32_t>(blockIdx.x - chunk.head * ranks.by_chunks.divisor) * ranks.chunk_tokens;
  chunk.tokens =
      min(ranks.chunk_tokens, static_cast<int32_t>(batch.num_tokens) - chunk.first_token);
  if (chunk.tokens <= 0) return chunk;
  chunk.entries = chunk.tokens * ranks.by_topk.divisor;

  const auto thread = static_cast<int32_t>(threadIdx.x);
  const bool is_near = batch.num_requests <= kNearRequests;
  int32_t first_token = 0, seq_len = 0;
  if (is_near && thread <= batch.num_requests) first_token = first_token_of(batch, thread);
  if (is_near && thread < batch.num_requests)
    seq_len = batch.seq_lens[thread * batch.seq_lens_stride];
  copy_ids(params, ranks, chunk, ids_of(shared));
  BatchView near = batch;
  if (is_near) {
    if (thread <= batch.num_requests) shared.first_tokens[thread] = first_token;
    if (thread < batch.num_requests) shared.seq_lens[thread] = seq_len;
    near.cu_seqlens_q = shared.first_tokens;
    near.seq_lens = shared.seq_lens;
    near.cu_seqlens_stride = near.seq_lens_stride = 1;
    __syncthreads();
  }
  locate_tokens(near, ranks.chunk_rows, chunk, shared.positions);
  chunk.first_row = (chunk.head * batch.num_requests + chunk.first_request) * batch.max_pages;
  chunk.first_entry = (chunk.head * batch.num_tokens + chunk.first_token) * params.ids.topk;
  if (thread < chunk.tokens) {
    const TokenPosition position = shared.positions[thread];
    const bool counts = chunk.rows > 0 && position.request >= 0;
    shared.tokens[thread] = {counts ? visible_blocks(batch, position.pos) : 0,
                             static_cast<uint32_t>(position.request - chunk.first_request) *
                                 static_cast<uint32_t>(batch.max_pages)};
  }
  wait_async_copies<0>();
  __syncthreads();
  return chunk;
}

// Calls visit(first, rows) for batches of the thread's entries first, first + kThreads, ..: their
// rows of the chunk, kNone where an entry counts nothing.
template <typename Visit>
__device__ __forceinline__ void visit_rows(const Ranks& ranks, const Chunk& chunk,
                                           SharedChunk& shared, const Visit& visit) {
  const uint32_t words = ranks.id_bytes / 4;  // of an id
  const uint32_t* const ids = ids_of(shared);
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < chunk.entries; first += kBatch * kThreads) {
    uint32_t rows[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {  // without branches, so that loads do not wait for others
      const uint32_t entry = min(first + i * kThreads, chunk.entries - 1);
      const uint32_t token = ranks.by_topk(entry), slot = entry - token * ranks.by_topk.divisor;
      const TokenRows of_token = shared.tokens[token];
      const uint32_t low = ids[entry * words], high = ids[entry * words + words - 1];
      const auto visible = static_cast<uint32_t>(of_token.visible);
      // A negative id is a large one.
      const bool counts = (first + i * kThreads == entry) & (slot < visible) & (low < visible) &
                          (words == 1 || high == 0);
      rows[i] = counts ? of_token.first_row + low : kNone;
    }
    visit(first, rows);
  }
}

// Calls visit(entry, row) for the entries that count, of a chunk of too many rows.
template <typename Visit>
__device__ __forceinline__ void visit_many_rows(const KVBlockScheduleParams& params,
                                                const Ranks& ranks, const Chunk& chunk,
                                                const TokenPosition* positions,
                                                const Visit& visit) {
#pragma unroll 1
  for (uint32_t entry = threadIdx.x; entry < chunk.entries; entry += kThreads) {
    const uint32_t token = ranks.by_topk(entry), slot = entry - token * ranks.by_topk.divisor;
    const int32_t block = selected_block(params.ids, params.batch, 0, positions[token], chunk.head,
                                         chunk.first_token + token, static_cast<int32_t>(slot));
    if (block < 0) continue;
    visit(entry, chunk.row_of(params.batch, positions[token].request, block));
  }
}

static __global__ void __launch_bounds__(kThreads)
    msa_kv_block_schedule_clear_sm80_kernel(uint32_t* const words, const int64_t count) {
  start_next_kernel();
#pragma unroll 1
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    words[i] = 0;
  }
}

static __global__ void __launch_bounds__(kThreads)
    msa_kv_block_schedule_count_sm80_kernel(const __grid_constant__ KVBlockScheduleParams params,
                                            const Workspace workspace, const Ranks ranks) {
  extern __shared__ __align__(16) uint8_t shared_memory[];
  start_next_kernel();
  SharedChunk& shared = *reinterpret_cast<SharedChunk*>(shared_memory);
  uint32_t* const histogram = ids_of(shared) + ranks.ids_bytes / 4;
#pragma unroll 1
  for (int row = threadIdx.x; row < ranks.chunk_rows; row += kThreads) histogram[row] = 0;
  const Chunk chunk = load_chunk(params, ranks, shared);
  visit_rows(ranks, chunk, shared, [&](uint32_t, const uint32_t (&rows)[kBatch]) {
#pragma unroll
    for (const uint32_t row : rows) {
      if (row != kNone) atomicAdd(histogram + row, 1);
    }
  });
  __syncthreads();
  wait_for_previous_kernel();
  uint32_t* const counters = workspace.counters + chunk.first_row;
  uint32_t* const bases = ranks.chunk_base + blockIdx.x * ranks.chunk_rows;
#pragma unroll 1
  for (int row = threadIdx.x; row < chunk.rows; row += kThreads) {
    const uint32_t count = histogram[row];
    if (count != 0) bases[row] = atomicAdd(counters + row, count);
  }
  if (chunk.rows == 0) {
    visit_many_rows(params, ranks, chunk, shared.positions, [&](uint32_t entry, int64_t row) {
      ranks.entry_rank[chunk.first_entry + entry] = atomicAdd(counters + row, 1);
    });
  }
}

// What a CTA of scatter knows of the rows that are its own to write.
struct OwnRows {
  Sums before[kCtaRows];  // of all rows before
  Sums sums[kCtaRows];    // of the row
};

// The rows that a thread sums up, in pairs: counters lie at a multiple of 8 bytes, and behind the
// last is the ticket, 0.
struct ThreadRows {
  const uint32_t* counters;
  uint32_t first, last;
  Division by_limit;

  __device__ __forceinline__ uint2 load(uint32_t row) const {
    return *reinterpret_cast<const uint2*>(counters + row);
  }
  __device__ __forceinline__ Sums sums_of(uint32_t count) const {
    const uint32_t full = by_limit(count);
    const uint32_t items = full + (full * by_limit.divisor != count);
    return static_cast<Sums>(items) << kItemShift | count;
  }
};

__device__ __forceinline__ ThreadRows thread_rows(const uint32_t* counters, uint32_t num_rows,
                                                  const Division& by_limit) {
  const uint32_t rows = (num_rows + 2 * kThreads - 1) / (2 * kThreads) * 2;
  const uint32_t first = min(threadIdx.x * rows, num_rows);
  return {counters, first, min(first + rows, num_rows), by_limit};
}

__device__ __forceinline__ Sums sum_rows(const ThreadRows& rows) {
  Sums sum = 0;
#pragma unroll 2
  for (uint32_t row = rows.first; row < rows.last; row += 2) {
    const uint2 counts = rows.load(row);
    sum += rows.sums_of(counts.x) + rows.sums_of(counts.y);
  }
  return sum;
}

// Adds the begins of the chunk's rows to `histogram`, and keeps what is known of the CTA's own.
// `before`: the sum of all threads before.
__device__ __forceinline__ void place_rows(const ThreadRows& rows, Sums before, const Ranks& ranks,
                                           const Chunk& chunk, uint32_t* histogram, OwnRows& own) {
  const auto chunk_row = static_cast<uint32_t>(chunk.first_row);
  const uint32_t cta_rows = ranks.cta_rows, own_row = blockIdx.x * cta_rows;
#pragma unroll 1
  for (uint32_t row = rows.first; row < rows.last; row += 2) {
    const uint2 counts = rows.load(row);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Sums sums = rows.sums_of(i == 0 ? counts.x : counts.y);
      const uint32_t in_chunk = row + i - chunk_row, in_own = row + i - own_row;
      if (in_chunk < static_cast<uint32_t>(chunk.rows)) {
        histogram[in_chunk] += static_cast<uint32_t>(before & kFieldMask);
      }
      if (in_own < cta_rows) {
        own.before[in_own] = before;
        own.sums[in_own] = sums;
      }
      before += sums;
    }
  }
}

// row_ptr and work items of the CTA's own rows, a warp a row.
__device__ __forceinline__ void write_own_rows(const KVBlockScheduleParams& params,
                                               uint32_t num_rows, uint32_t cta_rows,
                                               const OwnRows& own) {
  const uint32_t first = min(blockIdx.x * cta_rows, num_rows);
  const uint32_t row = threadIdx.x / 32;
  if (row >= min(cta_rows, num_rows - first)) return;
  const auto count = static_cast<uint32_t>(own.sums[row] & kFieldMask);
  const auto items = static_cast<uint32_t>(own.sums[row] >> kItemShift);
  const auto begin = static_cast<int32_t>(own.before[row] & kFieldMask);
  const auto first_item = static_cast<int64_t>(own.before[row] >> kItemShift);
  const RowItems target{params.work_items};
  if (threadIdx.x % 32 == 0) params.row_ptr[first + row] = begin;
#pragma unroll 1
  for (uint32_t part = threadIdx.x % 32; part < items; part += 32) {
    target.write(first_item + part, static_cast<int32_t>(first + row),
                 begin + static_cast<int32_t>(item_begin(count, items, part)),
                 begin + static_cast<int32_t>(item_begin(count, items, part + 1)));
  }
}

// Puts the chunk's entries into `sorted`, row << 16 | entry, by row; returns how many. Leaves a
// row's begin there and its entries << 16 in `histogram`.
__device__ __forceinline__ uint32_t sort_chunk(const Ranks& ranks, const Chunk& chunk,
                                               SharedChunk& shared, uint32_t* histogram,
                                               uint32_t* sorted) {
  uint32_t* const kept = ids_of(shared);  // in place of the ids: row << 16 | rank
  const uint32_t stride = ranks.id_bytes / 4;
  visit_rows(ranks, chunk, shared, [&](uint32_t first, const uint32_t (&rows)[kBatch]) {
    uint32_t placed[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      placed[i] = rows[i] == kNone ? kNone : rows[i] << 16 | atomicAdd(histogram + rows[i], 1);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t entry = first + i * kThreads;
      if (entry < chunk.entries) kept[entry * stride] = placed[i];
    }
  });
  __syncthreads();
  const auto rows = static_cast<uint32_t>(chunk.rows);
  const uint32_t thread_rows = (rows + kThreads - 1) / kThreads;
  const uint32_t first_row = min(threadIdx.x * thread_rows, rows);
  const uint32_t last_row = min(first_row + thread_rows, rows);
  uint32_t mine = 0, all;
#pragma unroll 1
  for (uint32_t row = first_row; row < last_row; ++row) mine += histogram[row];
  uint32_t begin = scan_threads(mine, all);
#pragma unroll 1
  for (uint32_t row = first_row; row < last_row; ++row) {
    const uint32_t count = histogram[row];
    histogram[row] = begin | count << 16;
    begin += count;
  }
  __syncthreads();
#pragma unroll 4
  for (uint32_t entry = threadIdx.x; entry < chunk.entries; entry += kThreads) {
    const uint32_t placed = kept[entry * stride];
    if (placed == kNone) continue;
    const uint32_t row = placed >> 16;
    sorted[(histogram[row] & 0xffff) + (placed & 0xffff)] = row << 16 | entry;
  }
  __syncthreads();
  return all;
}

// kScanned: behind scan, which has turned counters into begins.
template <bool kScanned>
static __global__ void __launch_bounds__(kThreads, kScatterCtas)
    msa_kv_block_schedule_scatter_sm80_kernel(const __grid_constant__ KVBlockScheduleParams params,
                                              const Workspace workspace, const Ranks ranks) {
  extern __shared__ __align__(16) uint8_t shared_memory[];
  __shared__ uint32_t sorted[kChunkEntries];
  SharedChunk& shared = *reinterpret_cast<SharedChunk*>(shared_memory);
  uint32_t* const histogram = ids_of(shared) + ranks.ids_bytes / 4;
#pragma unroll 1
  for (int row = threadIdx.x; row < ranks.chunk_rows; row += kThreads) histogram[row] = 0;
  const Chunk chunk = load_chunk(params, ranks, shared);
  const uint32_t counted = chunk.rows > 0 ? sort_chunk(ranks, chunk, shared, histogram, sorted) : 0;
  const auto first_pair = static_cast<uint32_t>(chunk.first_token * params.ids.topk);

  wait_for_previous_kernel();
  const uint32_t* const begins = workspace.counters + chunk.first_row;
  const uint32_t* const bases = ranks.chunk_base + blockIdx.x * ranks.chunk_rows;
  const auto num_rows = static_cast<uint32_t>(params.ids.num_heads * params.batch.num_requests *
                                              params.batch.max_pages);
  const ThreadRows rows = thread_rows(workspace.counters, num_rows, ranks.by_limit);
  Sums sum = kScanned ? 0 : sum_rows(rows), all;
#pragma unroll 1
  for (int row = threadIdx.x; row < chunk.rows; row += kThreads) {
    const uint32_t place = histogram[row] & 0xffff, count = histogram[row] >> 16;
    if (count == 0) continue;  // nobody wrote its base
    histogram[row] = bases[row] - place + (kScanned ? begins[row] : 0);
  }
  if constexpr (kScanned) {
    all = static_cast<Sums>(*params.num_work_items) << kItemShift | params.row_ptr[num_rows];
    __syncthreads();
  } else {
    __shared__ OwnRows own;
    const Sums before = scan_threads(sum, all);
    place_rows(rows, before, ranks, chunk, histogram, own);
    __syncthreads();
    write_own_rows(params, num_rows, ranks.cta_rows, own);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      params.row_ptr[num_rows] = static_cast<int32_t>(all & kFieldMask);
      *params.num_work_items = static_cast<int32_t>(all >> kItemShift);
    }
  }

#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < counted; i += kThreads) {
    const uint32_t row = sorted[i] >> 16, entry = sorted[i] & 0xffff;
    params.pairs[histogram[row] + i] = static_cast<int32_t>(first_pair + entry);
  }
  if (kScanned && chunk.rows == 0) {
    visit_many_rows(params, ranks, chunk, shared.positions, [&](uint32_t entry, int64_t row) {
      params.pairs[begins[row] + ranks.entry_rank[chunk.first_entry + entry]] =
          static_cast<int32_t>(first_pair + entry);
    });
  }

  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t num_pairs = params.ids.num_heads * params.batch.num_tokens * params.ids.topk;
#pragma unroll 1
  for (int64_t i = static_cast<int64_t>(all & kFieldMask) + thread; i < num_pairs; i += threads) {
    params.pairs[i] = -1;
  }
#pragma unroll 1
  for (int64_t i = 3 * static_cast<int64_t>(all >> kItemShift) + thread;
       i < 3 * params.max_work_items; i += threads) {
    params.work_items[i] = -1;
  }
}

}  // namespace msa::kv_block_schedule::sm80
