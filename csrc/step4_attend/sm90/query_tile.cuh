// What the query-major kernels of sparse_prefill and sparse_decode have in common: a tile of tokens
// of one request and KV head walks a list of blocks in one running softmax.
//
//   for each block of the list: s = scale * q . K^T, masked; m' = max(m, max s); p = exp(s - m');
//     l = l * exp(m - m') + sum p;  o = o * exp(m - m') + p V
//   out = o / l;  lse = m + log(l)
//
// clang-format off
// Roles     role        warps              does
//           consumer    4 each             64 rows: a group of the tile's tokens, 64 / G at most;
//                                          skips blocks that none of them selected
//           K producer, V producer, q producer   1 each   a box a block; a box a token
//           cleaner     1                  V of blocks that a group's rows see in part only
// Shared    k  stages of [half of d][128 tokens][64 d]   32,768 each   128-byte swizzle
//           v  the same
//           q  stages of [consumer][8 row groups][half of d][8 rows][64 d]   16,384 a consumer
// Barriers  name     arrivals                      who arrives            who waits
//           k_full   1 + bytes of a block          K producer             consumers
//           k_empty  4 a consumer                  each of its warps      K producer
//           v_full   1 + bytes of a block          V producer             consumers, cleaner
//           v_clean  1                             cleaner, every block   consumers, if it matters
//           v_empty  4 a consumer, and 1           consumers, cleaner     V producer
//           q_full   1 + bytes of the tokens       q producer             consumers
//           q_empty  4 a consumer                  each of its warps      q producer
//           A consumer that skips a block still waits for K and V before it releases them. It need
//           not wait for every v_clean: v_full comes first, and says that v_empty of the stage's
//           block before, and so v_clean of it, are complete.
// Timeline  consumer: wait K | S = Q K^T | k_empty | softmax, o *= | wait V | o += P V | v_empty
//           the consumers are out of step: one's softmax runs under another's products, and the
//           cleaner's work under both
// Unseen    of K: masked columns are replaced before use. Of V: 0 * NaN is NaN, so where some row
//           of a group that attends to a block does not see all of it (is_seen_in_part), rows at or
//           past the request's length, and NaN and Inf, become 0 before the block's first use, by
//           the cleaner; NaN and Inf are added back, from the cache, to the rows that do see them.
// Order     a row takes part in its own blocks alone, in the order of the list: its bits do not
//           depend on who shares the tile, where lists are in one order.
// FP8       other producers, q in float16: prefill_query_block_fp8.cuh. The consumer does not
//           shrink o before its weights would leave float16.
// Limits    bfloat16 q, D = 128, G 8 and 16.
// clang-format on
#pragma once

#include "step4_attend/sm90/prefill_kv_block_kernel.cuh"
#include "step4_attend/sm90/prefill_merge_kernel.cuh"

namespace msa::sparse_prefill::sm90 {

struct Tile {
  int32_t blocks;
  int32_t head, first_token, tokens;
};

// Where the first token of a tile stands, and the length of its request.
struct TilePosition {
  int32_t request, pos, seq_len;
};

// For the cleaner, in place of how many rows of a V block were written.
constexpr int32_t kAllClean = 0;  // all are, and seen by whoever attends to the block
constexpr int32_t kNoMoreBlocks = -1;

// Shared memory of a kernel over bfloat16 caches.
template <int kStages, int kStagesOfQ, int kConsumerCount>
struct TileStorage {
  static constexpr DType kCache = DType::kBFloat16;
  static constexpr int kKVStages = kStages, kQStages = kStagesOfQ;
  static constexpr int kQBytes = kConsumerCount * kQTileBytes;
  static constexpr int kEmptyArrivals = kConsumerCount * 4;
  alignas(1024) uint8_t k[kKVStages][kPageBytes];
  alignas(1024) uint8_t v[kKVStages][kPageBytes];
  alignas(1024) uint8_t q[kQStages][kQBytes];
  alignas(16) uint32_t wild[kKVStages][kBlock / 32];  // rows of V that had NaN or Inf
  int32_t written[kKVStages];                         // tokens of the request from V's first row on
  uint64_t k_full[kKVStages], k_empty[kKVStages];
  uint64_t v_full[kKVStages], v_clean[kKVStages], v_empty[kKVStages];
  uint64_t q_full[kQStages], q_empty[kQStages];

  // By one thread, before the CTA's first __syncthreads.
  __device__ __forceinline__ void init_barriers() {
    for (int stage = 0; stage < kKVStages; ++stage) {
      barrier_init(&k_full[stage], 1);
      barrier_init(&v_full[stage], 1);
      barrier_init(&k_empty[stage], kEmptyArrivals);
      barrier_init(&v_empty[stage], kEmptyArrivals + 1);
      barrier_init(&v_clean[stage], 1);
    }
    for (int stage = 0; stage < kQStages; ++stage) {
      barrier_init(&q_full[stage], 1);
      barrier_init(&q_empty[stage], kEmptyArrivals);
    }
    fence_barrier_init();
  }
};

// What the consumers need to know of a block over FP8 caches; it comes with K.
struct alignas(16) BlockInfo {
  int32_t first_valid;  // keys that the tile's first token may see, or more than there are
  uint32_t tokens;      // of TileBlock
  int32_t page;
  float scale_log2;
};

// Must V be clean of what a weight of 0 must not meet? A group that attends to the block has rows
// that see it in part or not at all. first_valid: keys of the block that the tile's first token may
// see, or more than there are; then all of its tokens see all of it. tokens: of TileBlock.
__device__ __forceinline__ bool is_seen_in_part(int32_t first_valid, uint32_t tokens) {
  return first_valid < kBlock || (tokens & kPartlyShared) != 0;
}

// Brings the K or the V blocks of a tile; whole warp, its lanes look up 32 pages at a time.
// `written` comes with V, null with K: what the cleaner is to know of a stage.
template <int kStages>
__device__ __forceinline__ void produce_blocks(const BatchView& batch, const CUtensorMap* map,
                                               const Tile& tile, const TilePosition& position,
                                               const TileBlock* list, uint8_t (*stages)[kPageBytes],
                                               uint64_t* full, uint64_t* empty, int32_t* written,
                                               RingPosition<kStages>& ring) {
  const int lane = threadIdx.x % 32;
  for (int32_t first = 0; first < tile.blocks; first += 32) {
    const int32_t count = min(32, tile.blocks - first);
    int32_t page = 0, rows = kAllClean;
    if (lane < count) {
      const TileBlock block = list[first + lane];
      page = page_of(batch, position.request, block.block);
      if (is_seen_in_part(position.pos + 1 - block.block * kBlock, block.tokens)) {
        rows = position.seq_len - block.block * kBlock;
      }
    }
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i) {
      const int32_t block_page = __shfl_sync(kAllLanes, page, i);
      const int32_t block_rows = __shfl_sync(kAllLanes, rows, i);
      if (lane == 0) {
        barrier_wait(&empty[ring.stage], ring.phase ^ 1);
        if (written) written[ring.stage] = block_rows;
        barrier_arrive_expect(&full[ring.stage], kPageBytes);
        copy_box(stages[ring.stage], map, &full[ring.stage], 0, 0, 0, tile.head, block_page);
      }
      ring.advance();
    }
  }
}

// Brings the tokens of a tile, of which each consumer gets `group_tokens`; whole warp.
template <typename Storage>
__device__ __forceinline__ void produce_tile_q(const CUtensorMap* map, Storage& shared,
                                               const Tile& tile, int log_group, int group_tokens,
                                               RingPosition<Storage::kQStages>& ring) {
  const int lane = threadIdx.x % 32, group = 1 << log_group;
  barrier_wait(&shared.q_empty[ring.stage], ring.phase ^ 1);
  if (lane == 0) {
    barrier_arrive_expect(&shared.q_full[ring.stage], tile.tokens * group * kHeadDim * 2);
  }
  __syncwarp();
  if (lane < tile.tokens) {
    const int consumer = lane / group_tokens, row = lane % group_tokens * group;
    copy_box(shared.q[ring.stage] + consumer * kQTileBytes + row / 8 * 2048, map,
             &shared.q_full[ring.stage], 0, 0, 0, tile.head * group / 8, tile.first_token + lane);
  }
  ring.advance();
}

// Makes 0 of what must not meet a weight of 0 in a block of V: rows at or past `written`, and NaN
// and Inf, whose rows it notes in `wild`. Whole warp: vector i of a lane is in row 4 (i % 32) +
// lane / 8.
__device__ __forceinline__ void clean_block(uint8_t* v, int32_t written, uint32_t* wild) {
  constexpr int kStep = 512, kVectors = kPageBytes / kStep, kInFlight = 4;
  const int lane = threadIdx.x % 32;
  const uint32_t address = shared_address(v) + lane * 16;
  const auto row_of = [&](int i) { return i % 32 * 4 + lane / 8; };
#pragma unroll 1
  for (int i = written / 4; i < 32; ++i) {
    if (row_of(i) < written) continue;
    store_shared_16(address + i * kStep, make_uint4(0, 0, 0, 0));
    store_shared_16(address + (i + 32) * kStep, make_uint4(0, 0, 0, 0));
  }
  // Is there anything? Sums of 0 times each number say so.
  uint4 bits[kInFlight];
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) bits[i] = load_shared_16(address + i * kStep);
  uint32_t sums[2] = {};
#pragma unroll 1
  for (uint32_t next = address + kInFlight * kStep;; next += kInFlight * kStep) {
    const bool last = next == address + kVectors * kStep;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      sums[0] = add_zero_times(bits[i].x, sums[0]);
      sums[1] = add_zero_times(bits[i].y, sums[1]);
      sums[0] = add_zero_times(bits[i].z, sums[0]);
      sums[1] = add_zero_times(bits[i].w, sums[1]);
      if (!last) bits[i] = load_shared_16(next + i * kStep);
    }
    if (last) break;
  }
  if (lane < kBlock / 32) wild[lane] = 0;
  if (!__any_sync(kAllLanes, is_wild(sums[0]) || is_wild(sums[1]))) return;
#pragma unroll 1
  for (int i = 0; i < kVectors; ++i) {
    const uint4 vector = load_shared_16(address + i * kStep);
    if (is_wild(vector.x) || is_wild(vector.y) || is_wild(vector.z) || is_wild(vector.w)) {
      atomicOr(&wild[row_of(i) / 32], 1u << row_of(i) % 32);
      store_shared_16(address + i * kStep,
                      make_uint4(without_wild(vector.x), without_wild(vector.y),
                                 without_wild(vector.z), without_wild(vector.w)));
    }
  }
}

__device__ __forceinline__ bool has_wild(const uint32_t* wild) {
  static_assert(kBlock == 128, "a word for each 32 rows");
  const uint4 rows = *reinterpret_cast<const uint4*>(wild);
  return (rows.x | rows.y | rows.z | rows.w) != 0;
}

// Cleans the next block of V, where it must be; whole warp. False: there is none.
template <typename Storage>
__device__ __forceinline__ bool clean_next_block(Storage& shared,
                                                 RingPosition<Storage::kKVStages>& ring) {
  barrier_wait(&shared.v_full[ring.stage], ring.phase);
  const int32_t written = shared.written[ring.stage];
  if (written == kNoMoreBlocks) return false;
  if (written != kAllClean) {
    clean_block(shared.v[ring.stage], written, shared.wild[ring.stage]);
    fence_async_proxy();
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    barrier_arrive(&shared.v_clean[ring.stage]);
    barrier_arrive(&shared.v_empty[ring.stage]);
  }
  ring.advance();
  return true;
}

// FP8: the 16 rows of q that a warp multiplies, bfloat16 -> float16 in their place, so that K can
// be float16: it costs a fourth of the instructions that bfloat16 does. Eight rows at a time, which
// are one token's, are multiplied by the power of two that brings their largest finite number to
// 2^14; what is lost then is under 2^-38 of that. factor: its inverse, for the thread's two rows.
__device__ __forceinline__ void convert_q(uint8_t* rows, float (&factor)[2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    uint4* vectors = reinterpret_cast<uint4*>(rows + group * 2048) + lane;
    uint32_t words[16];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 bits = vectors[32 * i];
      words[4 * i] = bits.x;
      words[4 * i + 1] = bits.y;
      words[4 * i + 2] = bits.z;
      words[4 * i + 3] = bits.w;
    }
    const auto low = [](uint32_t word) { return __uint_as_float(word << 16); };
    const auto high = [](uint32_t word) { return __uint_as_float(word & 0xffff0000u); };
    float largest = 0.0f;  // fmaxf leaves NaN out
#pragma unroll
    for (const uint32_t word : words) {
      largest = fmaxf(largest, fmaxf(fabsf(low(word)), fabsf(high(word))));
    }
    if (largest == INFINITY) {
      largest = 0.0f;
#pragma unroll
      for (const uint32_t word : words) {
        if (fabsf(low(word)) < INFINITY) largest = fmaxf(largest, fabsf(low(word)));
        if (fabsf(high(word)) < INFINITY) largest = fmaxf(largest, fabsf(high(word)));
      }
    }
    const uint32_t exponent = __reduce_max_sync(kAllLanes, __float_as_uint(largest)) >> 23;
    const uint32_t scale_exponent = min(2 * 127 + 14 - exponent, 253u);
    const float scale = __uint_as_float(scale_exponent << 23);
    factor[group] = __uint_as_float((254 - scale_exponent) << 23);
#pragma unroll
    for (uint32_t& word : words) {
      const __half2 pair = __floats2half2_rn(low(word) * scale, high(word) * scale);
      word = *reinterpret_cast<const uint32_t*>(&pair);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      vectors[32 * i] =
          make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    }
  }
}

// As a row's maximum grows, its weights may grow to 2^7 times those of the first block before o and
// the sum are made smaller: few blocks need that, and o is 64 registers. FP8: weights are float16,
// whose largest is 2^15; they begin at 2^8, so that small ones are not lost.
template <DType kCache>
constexpr float kFirstWeight = kIsFp8<kCache> ? 8.0f : 0.0f;
constexpr float kWeightGrowth = 7.0f;

// What a consumer thread keeps of its two rows while it walks the blocks of a tile.
struct RunningRows {
  float maximum[2];  // log2 units, -inf: nothing yet
  float sum[2];
};

// s of one block -> p, the running maximum and sum, and the factors that o shrinks by. valid: keys
// that each row may see, 0 where its token does not share the block.
template <DType kCache>
__device__ __forceinline__ void running_softmax(Accumulator& s, const int32_t (&valid)[2],
                                                float (&scale_log2)[2], RunningRows& rows,
                                                uint32_t (&p)[32], float (&factor)[2]) {
  const int quad = threadIdx.x % 4;
  if (scale_log2[0] <= 0.0f) {  // so that the largest product is the largest logit, and -inf stays
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] *= scale_log2[i / 2 % 2];
    scale_log2[0] = scale_log2[1] = 1.0f;
  }
  if (valid[0] < kBlock || valid[1] < kBlock) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int column = i / 4 * 8 + quad * 2 + i % 2;
      if (column >= valid[i / 2 % 2]) s[i] = -INFINITY;
    }
  }
  float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < 64; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[i]);
  float reference[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAllLanes, largest[r], 1));
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAllLanes, largest[r], 2));
    float maximum = largest[r] * scale_log2[r] - kFirstWeight<kCache>;
    if (!(maximum > rows.maximum[r] + kWeightGrowth)) maximum = rows.maximum[r];
    reference[r] = maximum == -INFINITY ? 0.0f : maximum;
    factor[r] = exp2_fast(rows.maximum[r] - reference[r]);
    rows.maximum[r] = maximum;
    rows.sum[r] *= factor[r];
  }
  float sum[2] = {};
#pragma unroll
  for (int i = 0; i < 64; i += 2) {
    const int r = i / 2 % 2;
    const float first = exp2_fast(fmaf(s[i], scale_log2[r], -reference[r]));
    const float second = exp2_fast(fmaf(s[i + 1], scale_log2[r], -reference[r]));
    sum[r] += first + second;
    p[i / 2] = pack_weights<kCache>(first, second);
  }
  rows.sum[0] += sum[0];  // each thread's own columns; the quad's are added at the end
  rows.sum[1] += sum[1];
}

template <DType kCache>
__device__ __forceinline__ void store_rows(const TileParams& params, const Tile& tile,
                                           const int32_t (&token)[2], const bool (&in_tile)[2],
                                           const RunningRows& rows, const Accumulator& o) {
  constexpr float kLn2 = 0.69314718055994530942f;
  const int quad = threadIdx.x % 4, warp_row = threadIdx.x % 32 / 4;
  const int group = 1 << params.log_group;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float normalise = normaliser<kCache>(params, tile.head, rows.sum[r]);
    const int64_t q_head = (tile.head << params.log_group) + ((warp_row + 8 * r) & (group - 1));
    __nv_bfloat16* out = static_cast<__nv_bfloat16*>(params.out.data) +
                         token[r] * params.out.token_stride + q_head * params.out.head_stride;
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
      uint32_t words[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = (chunk * 4 + n) * 4 + r * 2;
        const __nv_bfloat162 pair = __floats2bfloat162_rn(o[i] * normalise, o[i + 1] * normalise);
        words[n] = *reinterpret_cast<const uint32_t*>(&pair);
      }
      transpose_quad(words, quad);
      if (in_tile[r]) {
        *reinterpret_cast<uint4*>(out + chunk * 32 + quad * 8) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
    if (in_tile[r] && quad == 0 && params.lse.data != nullptr) {
      params.lse.data[token[r] * params.lse.token_stride + q_head * params.lse.head_stride] =
          rows.sum[r] == 0.0f ? -INFINITY : (rows.maximum[r] + log2f(rows.sum[r])) * kLn2;
    }
  }
}

// A consumer's part of a tile: its group, `group_tokens` of the tokens. finish(tokens, which of
// them are there, rows, o) may add to the thread's rows before they are written.
template <typename Storage, typename Finish>
__device__ __forceinline__ void attend_tile(const TileParams& params, Storage& shared,
                                            const Tile& tile, const TilePosition& first,
                                            const TileBlock* list, int consumer, int group_tokens,
                                            RingPosition<Storage::kKVStages>& kv,
                                            RingPosition<Storage::kQStages>& ring,
                                            const Finish& finish) {
  constexpr DType kCache = Storage::kCache;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint64_t q_base =
      make_descriptor(shared_address(shared.q[0] + consumer * kQTileBytes), 16, 2048);
  const uint64_t k_base = make_descriptor(shared_address(shared.k[0]), 16, 1024);
  const uint64_t v_base = make_descriptor(shared_address(shared.v[0]), kPageBytes / 2, 1024);
  // The thread's rows belong to these tokens of its group.
  const int member[2] = {(warp * 16 + lane / 4) >> params.log_group,
                         (warp * 16 + lane / 4 + 8) >> params.log_group};

  const int q_barrier = kIsFp8<kCache> ? consumer : ring.stage;  // FP8: the consumer's own
  const int group_shift = consumer * group_tokens;
  const int32_t pos[2] = {first.pos + group_shift + member[0], first.pos + group_shift + member[1]};

  Accumulator o;
#pragma unroll
  for (float& value : o) value = 0.0f;
  RunningRows rows{{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
  barrier_wait(&shared.q_full[q_barrier], ring.phase);
  float q_factor[2] = {1.0f, 1.0f};
  if constexpr (kIsFp8<kCache>) {
    convert_q(shared.q[0] + consumer * kQTileBytes + warp * kQTileBytes / 4, q_factor);
    fence_async_proxy();
    named_barrier(1 + consumer, 128);
  }
  TileBlock next{};
  if constexpr (!kIsFp8<kCache>) next = list[0];
  for (int32_t i = 0; i < tile.blocks; ++i) {
    const TileBlock current = next;
    if constexpr (!kIsFp8<kCache>) {
      if (i + 1 < tile.blocks) next = list[i + 1];
    }
    const auto members_of = [&](uint32_t tokens) {
      return tokens >> group_shift & ((1u << group_tokens) - 1);
    };
    BlockInfo block{};  // FP8
    uint32_t members = members_of(current.tokens);
    barrier_wait(&shared.k_full[kv.stage], kv.phase);
    if constexpr (kIsFp8<kCache>) {
      block = shared.blocks[kv.stage + kv.phase * Storage::kKVStages];
      members = members_of(block.tokens);
    }
    const auto release_k = [&] {
      if (lane != 0) return;
      barrier_arrive(&shared.k_empty[kv.stage]);
      if constexpr (kIsFp8<kCache>) {  // q has one stage: the next one is needed soon
        if (i + 1 == tile.blocks) barrier_arrive(&shared.q_empty[q_barrier]);
      }
    };
    if (members != 0) {
      const bool in_part =
          kIsFp8<kCache> ? is_seen_in_part(block.first_valid, block.tokens)
                         : is_seen_in_part(first.pos + 1 - current.block * kBlock, current.tokens);
      Accumulator s;
      multiply_q_k<kIsFp8<kCache>>(q_base, ring.stage * Storage::kQBytes, k_base,
                                   kv.stage * kPageBytes, s);
      release_k();

      int32_t valid[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int32_t seen =
            kIsFp8<kCache> ? pos[r] + block.first_valid : pos[r] - current.block * kBlock + 1;
        valid[r] = members >> member[r] & 1 ? min(kBlock, seen) : 0;
      }
      uint32_t p[32];
      float factor[2];
      float scale_log2[2] = {params.scale_log2, params.scale_log2};
      if constexpr (kIsFp8<kCache>) {
#pragma unroll
        for (int r = 0; r < 2; ++r) scale_log2[r] = block.scale_log2 * q_factor[r];
      }
      running_softmax<kCache>(s, valid, scale_log2, rows, p, factor);
      if (__any_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
        for (int j = 0; j < 64; ++j) o[j] *= factor[j / 2 % 2];
      }
      barrier_wait(&shared.v_full[kv.stage], kv.phase);
      if constexpr (!kIsFp8<kCache>) {
        if (in_part) barrier_wait(&shared.v_clean[kv.stage], kv.phase);
      }
      multiply_p_v<kCache>(p, v_base, kv.stage * kPageBytes, o, true);
      if (in_part) {
        const uint32_t* wild = shared.wild[kv.stage];
        if (has_wild(wild)) {
          const int32_t page =
              kIsFp8<kCache> ? block.page : page_of(params.batch, first.request, current.block);
          add_wild_values<kCache>(params.v_cache, page, tile.head, wild, valid, o);
        }
        __syncwarp();
      }
      if (lane == 0) barrier_arrive(&shared.v_empty[kv.stage]);
    } else {
      __syncwarp();  // all lanes have read and waited before lane 0 arrives
      release_k();
      barrier_wait(&shared.v_full[kv.stage], kv.phase);
      barrier_arrive_warp(&shared.v_empty[kv.stage]);
    }
    kv.advance();
  }
  if (!kIsFp8<kCache> && lane == 0) barrier_arrive(&shared.q_empty[q_barrier]);
  ring.advance();

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.sum[r] += __shfl_xor_sync(kAllLanes, rows.sum[r], 1);
    rows.sum[r] += __shfl_xor_sync(kAllLanes, rows.sum[r], 2);
  }
  int32_t token[2];
  bool in_tile[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    token[r] = tile.first_token + group_shift + member[r];
    in_tile[r] = member[r] < group_tokens && group_shift + member[r] < tile.tokens;
  }
  finish(token, in_tile, rows, o);
  store_rows<kCache>(params, tile, token, in_tile, rows, o);
}

}  // namespace msa::sparse_prefill::sm90
