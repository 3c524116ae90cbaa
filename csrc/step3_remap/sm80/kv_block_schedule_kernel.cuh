// Step 3 of prefill, kv_block_schedule: {token -> blocks} into {block -> tokens}, a counting sort
// over rows (KV head, request, block), and the even work items that a persistent attention grid
// takes.
//
// Launches, no host knowledge of the selection. Each may start under the one before (programmatic
// dependent launch) and waits before it touches what others write:
//   clear    counters, chain and ticket to 0
//   count    a CTA a (KV head, chunk of tokens): its entries into a histogram of its requests' rows
//            in shared memory, which goes into the counters: that gives the chunk's base in each
//            row. Its entries sorted by row, for scatter. Too many rows: straight into the
//            counters, with each entry's rank in its row
//   scan     only of more than kSummedRows rows, fewer are summed up by every CTA of scatter:
//            row_ptr, work items, and each counter becomes the row's first pair
//            (kv_block_schedule_scan_kernel.cuh)
//   scatter  the same CTAs: the entries of a row in one run, from the row's begin + the chunk's
//            base on, without atomics. -1 past the last pair and item. Without scan: row_ptr and
//            work items, cta_rows rows a CTA
// Shared    count    positions, rows and lengths of the tokens; ids (up to 32 KB), then each
//                    entry's row << 16 | rank; histogram (up to 32 KB), then each row's begin among
//                    the sorted | its entries << 16; sorted entries (16 KB)
//           scatter  histogram: what to add to an entry's place among the chunk's sorted for its
//                    place among the pairs; what is known of the CTA's own rows
//
// Portable, sm_80 and up.
// Order of the pairs within a row is not fixed: the ranks come of atomics. What is computed from
// them is: a partial result lies in a slot of its own, whatever tile it was computed in.
// Limits: num_rows, Hkv * T * K and the items fit int32 (checked on the host).
#pragma once

#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/dependent_launch.cuh"
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
constexpr int kThreadEntries = kChunkEntries / kThreads;
constexpr int kBatch = 4;  // entries that a thread looks up at a time
constexpr uint32_t kNone = ~0u;
// An SM has room for two CTAs of count and two of scatter, where these may run at the same time.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr int kScatterCtas = 4;
#else
constexpr int kScatterCtas = 1;
#endif
static_assert(kSummedRows <= kHistogramRows, "a chunk of fewer rows counts all it has");
static_assert(kChunkTokens <= kThreads, "a thread a token");
static_assert(kHistogramRows < 1 << 16 && kChunkEntries < 1 << 16, "both in one word, none kNone");

// Divisions that the host has prepared: 32-bit ones cost some 20 instructions each.
struct Division {
  uint32_t divisor, factor, shift;

  __host__ __device__ uint32_t operator()(uint32_t number) const {  // below 2^31
    return static_cast<uint32_t>(static_cast<uint64_t>(number) * factor >> shift);
  }
};

// factor = 2^shift / divisor rounded up, and less than divisor <= 2^(shift - 31) too large in all.
inline Division division_by(uint32_t divisor) {
  uint32_t shift = 31;
  while (uint64_t{1} << (shift - 31) < divisor) ++shift;
  return {divisor, static_cast<uint32_t>(((uint64_t{1} << shift) - 1) / divisor + 1), shift};
}

// A chunk's rows among all; none: too many for the histogram.
struct ChunkRows {
  int32_t first, rows;
};

// Between count and scatter.
struct Ranks {
  // [Hkv * T * K], a chunk's together: row << 16 | entry of the chunk, by row, kNone behind; of a
  // chunk of too many rows an entry's rank in its row
  uint32_t* entries;
  // [Hkv * chunks][chunk_rows]: the row's entries of other chunks before, less its begin in
  // `entries`
  uint32_t* chunk_base;
  ChunkRows* chunks;  // [Hkv * chunks]
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
  int64_t first_entry;  // of the first token, among all entries
  int64_t first_row;    // of the first request, among all rows
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

// The CTA's chunk, without its requests and rows; no tokens where the CTA has none.
__device__ __forceinline__ Chunk find_chunk(const KVBlockScheduleParams& params,
                                            const Ranks& ranks) {
  const auto num_tokens = static_cast<int32_t>(params.batch.num_tokens);
  Chunk chunk{};
  chunk.head = static_cast<int32_t>(ranks.by_chunks(blockIdx.x));
  if (chunk.head >= params.ids.num_heads) return chunk;
  chunk.first_token =
      static_cast<int32_t>(blockIdx.x - chunk.head * ranks.by_chunks.divisor) * ranks.chunk_tokens;
  chunk.tokens = max(0, min(ranks.chunk_tokens, num_tokens - chunk.first_token));
  chunk.entries = chunk.tokens * ranks.by_topk.divisor;
  chunk.first_entry =
      (static_cast<int64_t>(chunk.head) * num_tokens + chunk.first_token) * ranks.by_topk.divisor;
  return chunk;
}

// Starts copying the chunk's ids to shared memory, and finds its tokens and rows meanwhile. By all
// threads of a CTA.
__device__ __forceinline__ Chunk load_chunk(const KVBlockScheduleParams& params, const Ranks& ranks,
                                            SharedChunk& shared) {
  const BatchView& batch = params.batch;
  Chunk chunk = find_chunk(params, ranks);
  if (chunk.tokens <= 0) return chunk;

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

// Exclusive sum over the CTA's threads; `total` is their sum. As scan_threads(), in half the
// instructions, which all warps share an SM's issue slots for.
template <typename Number>
__device__ __forceinline__ Number sum_before(Number value, Number& total) {
  __shared__ Number warp_sums[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Number inclusive = sum_up_to_lane(value);
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  Number sums = lane < kWarps ? warp_sums[lane] : 0;
#pragma unroll
  for (int distance = 1; distance < kWarps; distance *= 2) {
    const Number other = __shfl_up_sync(kAllLanes, sums, distance);
    if (lane >= distance) sums += other;
  }
  total = __shfl_sync(kAllLanes, sums, kWarps - 1);
  const Number before = __shfl_sync(kAllLanes, sums, max(warp - 1, 0));
  return (warp == 0 ? 0 : before) + inclusive - value;
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
  __shared__ uint32_t sorted[kChunkEntries];
  start_next_kernel();
  SharedChunk& shared = *reinterpret_cast<SharedChunk*>(shared_memory);
  uint32_t* const histogram = ids_of(shared) + ranks.ids_bytes / 4;
#pragma unroll 1
  for (int row = threadIdx.x; row < ranks.chunk_rows; row += kThreads) histogram[row] = 0;
  const Chunk chunk = load_chunk(params, ranks, shared);
  uint32_t* const counters = workspace.counters + chunk.first_row;
  uint32_t* const entries = ranks.entries + chunk.first_entry;
  if (chunk.rows == 0) {
    wait_for_previous_kernel();
    if (threadIdx.x == 0) ranks.chunks[blockIdx.x] = {};
    visit_many_rows(params, ranks, chunk, shared.positions, [&](uint32_t entry, int64_t row) {
      entries[entry] = atomicAdd(counters + row, 1);
    });
    return;
  }

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

  wait_for_previous_kernel();
  if (threadIdx.x == 0) {
    ranks.chunks[blockIdx.x] = {static_cast<int32_t>(chunk.first_row), chunk.rows};
  }
  const auto rows = static_cast<uint32_t>(chunk.rows);
  // A thread's first base comes while the entries are sorted.
  const uint32_t first_count = threadIdx.x < rows ? histogram[threadIdx.x] : 0;
  uint32_t first_base = 0;
  if (first_count != 0) first_base = atomicAdd(counters + threadIdx.x, first_count);
  const uint32_t thread_rows = (rows + kThreads - 1) / kThreads;
  const uint32_t first_row = min(threadIdx.x * thread_rows, rows);
  const uint32_t last_row = min(first_row + thread_rows, rows);
  uint32_t mine = 0, all;
#pragma unroll 1
  for (uint32_t row = first_row; row < last_row; ++row) mine += histogram[row];
  uint32_t begin = sum_before(mine, all);
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
  uint32_t* const bases = ranks.chunk_base + blockIdx.x * ranks.chunk_rows;
  if (threadIdx.x < rows) bases[threadIdx.x] = first_base - (histogram[threadIdx.x] & 0xffff);
#pragma unroll 1
  for (uint32_t row = threadIdx.x + kThreads; row < rows; row += kThreads) {
    const uint32_t count = histogram[row] >> 16;
    bases[row] = (count == 0 ? 0 : atomicAdd(counters + row, count)) - (histogram[row] & 0xffff);
  }
  __syncthreads();
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < chunk.entries; i += kThreads) {
    entries[i] = i < all ? sorted[i] : kNone;
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
  const bool meets_chunk = rows.first < chunk_row + chunk.rows && rows.last > chunk_row;
  const bool meets_own = rows.first < own_row + cta_rows && rows.last > own_row;
  if (!meets_chunk && !meets_own) return;  // most warps: instructions are what this takes
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

// kScanned: behind scan, which has turned counters into begins.
template <bool kScanned>
static __global__ void __launch_bounds__(kThreads, kScatterCtas)
    msa_kv_block_schedule_scatter_sm80_kernel(const __grid_constant__ KVBlockScheduleParams params,
                                              const Workspace workspace, const Ranks ranks) {
  extern __shared__ __align__(16) uint8_t shared_memory[];
  auto* const histogram = reinterpret_cast<uint32_t*>(shared_memory);
  Chunk chunk = find_chunk(params, ranks);
  const uint32_t* const entries = ranks.entries + chunk.first_entry;
  const uint32_t* const bases = ranks.chunk_base + blockIdx.x * ranks.chunk_rows;
  const auto num_rows = static_cast<uint32_t>(params.ids.num_heads * params.batch.num_requests *
                                              params.batch.max_pages);
  const auto first_pair = static_cast<uint32_t>(chunk.first_token * params.ids.topk);
  const ThreadRows rows = thread_rows(workspace.counters, num_rows, ranks.by_limit);

  wait_for_previous_kernel();
  // All at once on their way; what is beyond the chunk's rows is not used.
  const ChunkRows chunk_rows = chunk.tokens > 0 ? ranks.chunks[blockIdx.x] : ChunkRows{};
  uint32_t listed[kThreadEntries];
#pragma unroll
  for (int i = 0; i < kThreadEntries; ++i) {
    const uint32_t entry = threadIdx.x + i * kThreads;
    listed[i] = entry < chunk.entries ? entries[entry] : kNone;
  }
  uint32_t base = 0;
  if (chunk.tokens > 0 && threadIdx.x < ranks.chunk_rows) base = bases[threadIdx.x];
  const Sums sum = kScanned ? 0 : sum_rows(rows);
  chunk.first_row = chunk_rows.first;
  chunk.rows = chunk_rows.rows;
  const uint32_t* const begins = workspace.counters + chunk.first_row;
#pragma unroll 1
  for (int row = threadIdx.x; row < chunk.rows; row += kThreads) {
    if (row >= kThreads) base = bases[row];
    histogram[row] = base + (kScanned ? begins[row] : 0);
  }
  Sums all;
  if constexpr (kScanned) {
    all = static_cast<Sums>(*params.num_work_items) << kItemShift | params.row_ptr[num_rows];
    __syncthreads();
  } else {
    __shared__ OwnRows own;
    const Sums before = sum_before(sum, all);
    place_rows(rows, before, ranks, chunk, histogram, own);
    __syncthreads();
    write_own_rows(params, num_rows, ranks.cta_rows, own);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      params.row_ptr[num_rows] = static_cast<int32_t>(all & kFieldMask);
      *params.num_work_items = static_cast<int32_t>(all >> kItemShift);
    }
  }

  if (chunk.rows > 0) {
#pragma unroll
    for (int i = 0; i < kThreadEntries; ++i) {
      if (listed[i] == kNone) continue;
      params.pairs[histogram[listed[i] >> 16] + threadIdx.x + i * kThreads] =
          static_cast<int32_t>(first_pair + (listed[i] & 0xffff));
    }
  } else if (kScanned && chunk.tokens > 0) {
    __shared__ TokenPosition positions[kChunkTokens];
    locate_tokens(params.batch, 0, chunk, positions);
    const uint32_t* const request_begins =
        workspace.counters +
        (chunk.head * params.batch.num_requests + chunk.first_request) * params.batch.max_pages;
    visit_many_rows(params, ranks, chunk, positions, [&](uint32_t entry, int64_t row) {
      params.pairs[request_begins[row] + entries[entry]] = static_cast<int32_t>(first_pair + entry);
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
