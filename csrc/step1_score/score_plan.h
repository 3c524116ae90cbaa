// Step 1: how the work of scoring is cut, by arithmetic alone, on the device: lengths are not known
// on the host, and no table of them is made.
//
// A tile is `tile_tokens` consecutive query tokens of one request; a unit is (tile, block), for
// every block that a token of the tile needs, and before them tile_cost units for starting on the
// tile: no work, but time. Units stand in one line: by request, tile, block.
// Workers take equal contiguous pieces of it, so that one long request and many short ones both
// fill the machine, and a worker changes its tile seldom.
//
// Units are counted in 32 bits: the host cuts a call into launches that have fewer than 2^32.
// Sums below may wrap on their way; differences of them are right.
#pragma once

#include <cstdint>

#include "common/views.h"

#ifdef __CUDACC__
#define MSA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MSA_HOST_DEVICE inline
#endif

namespace msa {

constexpr int kLogBlock = 7;
static_assert(1 << kLogBlock == kBlock, "positions are turned into blocks by shifts");

constexpr int32_t kMaxBlocks = 1 << (31 - kLogBlock);   // positions are 32-bit
constexpr int64_t kMostUnits = (int64_t{1} << 32) - 1;  // of a launch
constexpr int32_t kMaxTileCost = 2;

// Whether a launch of some tokens has units that can be counted: a tile of them and, since a tile
// crosses no request, one more of every request.
inline bool units_can_be_counted(int64_t num_requests, int64_t max_pages) {
  const int64_t blocks = max_pages < kMaxBlocks ? max_pages : kMaxBlocks;
  return num_requests < kMostUnits / (blocks + kMaxTileCost);
}

struct ScoreCut {
  int64_t token_begin, token_end;  // query tokens of this launch
  int32_t max_blocks;              // columns of the block table, at most kMaxBlocks
  int32_t log_tile;                // log2 of tile_tokens, at most 8
  int32_t own;                     // 1: the own block is scored too; 0: only blocks before it
  int32_t tile_cost;               // time that a tile takes besides its blocks, in units
};

// The query tokens of a request that a launch scores: those of its window that see anything.
struct RequestTokens {
  int32_t first_token = 0, num_tokens = 0;
  int32_t first_pos = 0;  // position of first_token

  MSA_HOST_DEVICE int32_t num_tiles(const ScoreCut& cut) const {
    return (num_tokens + (1 << cut.log_tile) - 1) >> cut.log_tile;
  }
  MSA_HOST_DEVICE int32_t tile_tokens(const ScoreCut& cut, int32_t tile) const {
    const int32_t left = num_tokens - (tile << cut.log_tile);
    return left < 1 << cut.log_tile ? left : 1 << cut.log_tile;
  }
  // Blocks of a tile: those that its last token needs.
  MSA_HOST_DEVICE int32_t tile_blocks(const ScoreCut& cut, int32_t tile) const {
    const int32_t last_pos = first_pos + (tile << cut.log_tile) + tile_tokens(cut, tile) - 1;
    const int32_t blocks = (last_pos >> kLogBlock) + cut.own;
    return blocks < cut.max_blocks ? blocks : cut.max_blocks;
  }
};

// Tokens [first, end) of a batch are a request's, and its length is seq_len, or 0 if that is below.
MSA_HOST_DEVICE RequestTokens request_tokens(const ScoreCut& cut, int32_t first, int32_t end,
                                             int32_t seq_len) {
  RequestTokens request;
  const auto window_begin = static_cast<int32_t>(cut.token_begin);  // tokens are 32-bit
  const auto window_end = static_cast<int32_t>(cut.token_end);
  int32_t begin = first > window_begin ? first : window_begin;
  const int32_t stop = end < window_end ? end : window_end;
  const bool any = begin < stop;
  const int32_t length = seq_len > 0 ? seq_len : 0;
  // May wrap where there is none. No early return: the load of seq_len would wait for the others.
  const auto unseen = static_cast<int32_t>(static_cast<uint32_t>(end) - begin - length);
  const int32_t pos = unseen < 0 ? -unseen : 0;
  begin += unseen > 0 ? unseen : 0;  // before the start of the request: nothing is seen
  if (any && begin < stop) {
    request.first_token = begin;
    request.num_tokens = stop - begin;
    request.first_pos = pos;
  }
  return request;
}

// sum over j < count of min(floor((start + j) / 2^log_ratio), cap).
MSA_HOST_DEVICE uint32_t sum_of_quotients(uint32_t start, uint32_t count, int32_t log_ratio,
                                          uint32_t cap) {
  const auto sum_below = [&](uint32_t end) {
    const uint32_t capped = cap << log_ratio;
    const uint32_t plain = end < capped ? end : capped;
    const uint32_t quotient = plain >> log_ratio;
    const uint32_t rest = plain - (quotient << log_ratio);
    const uint32_t pairs =
        quotient & 1 ? quotient * ((quotient - 1) / 2) : quotient / 2 * (quotient - 1);
    return (pairs << log_ratio) + quotient * rest + (end - plain) * cap;
  };
  return sum_below(start + count) - sum_below(start);
}

// Units of the first `tiles` tiles of a request, which has at least one tile.
MSA_HOST_DEVICE uint32_t units_before(const RequestTokens& request, const ScoreCut& cut,
                                      int32_t tiles) {
  if (tiles <= 0 || cut.max_blocks <= 0) return 0;
  const int32_t full_tiles = request.num_tokens >> cut.log_tile;
  const uint32_t full = tiles < full_tiles ? tiles : full_tiles;
  uint32_t units = tiles * static_cast<uint32_t>(cut.tile_cost);
  if (tiles > full_tiles) units += request.tile_blocks(cut, full_tiles);
  if (full == 0) return units;
  const uint32_t cap = cut.max_blocks - cut.own;
  const uint32_t last_pos = request.first_pos + (1u << cut.log_tile) - 1;  // of the first tile
  units += full * cut.own;
  if (cut.log_tile <= kLogBlock) {
    // floor((last_pos + j tile_tokens) / kBlock), in steps of tile_tokens
    units += sum_of_quotients(last_pos >> cut.log_tile, full, kLogBlock - cut.log_tile, cap);
  } else {
    const uint32_t first = last_pos >> kLogBlock, step = 1u << (cut.log_tile - kLogBlock);
    uint32_t plain = first < cap ? (cap - first + step - 1) >> (cut.log_tile - kLogBlock) : 0;
    if (plain > full) plain = full;
    const uint32_t pairs = plain & 1 ? plain * ((plain - 1) / 2) : plain / 2 * (plain - 1);
    units += plain * first + step * pairs + (full - plain) * cap;
  }
  return units;
}

MSA_HOST_DEVICE uint32_t request_units(const RequestTokens& request, const ScoreCut& cut) {
  const int32_t tiles = request.num_tiles(cut);
  if (tiles <= 1 && cut.max_blocks > 0) {
    return tiles * static_cast<uint32_t>(cut.tile_cost + request.tile_blocks(cut, 0));
  }
  return units_before(request, cut, tiles);
}

// The tile that holds unit `unit` of a request, which has more units than that.
MSA_HOST_DEVICE int32_t tile_of_unit(const RequestTokens& request, const ScoreCut& cut,
                                     uint32_t unit) {
  int32_t low = 0, high = request.num_tiles(cut);  // units before low <= unit < units before high
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (units_before(request, cut, middle) <= unit) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace msa
