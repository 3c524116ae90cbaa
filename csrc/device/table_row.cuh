// The first pages of a request's row of the block table in shared memory: they come beside the ids,
// so that the page of an id is not a second trip to memory behind the first.
#pragma once

#include <cstdint>

#include "common/views.h"
#include "device/instructions.cuh"
#include "device/shared_memory.cuh"
#include "device/sm80_async_copy.cuh"

namespace msa {

// The most pages that a kernel copies: of 131,072 tokens. The page of a later block is a load of
// its own behind the id.
constexpr uint32_t kTableRowPages = 1024;

struct TableRow {
  const int32_t* pages;  // all of them, in global memory
  uint32_t copied;       // pages that come to shared memory

  // Asks for the page of a block that is none of those; of a block past the table, or of no
  // request, it stays as it is.
  __device__ __forceinline__ void load_others(const BatchView& batch, bool there, uint32_t block,
                                              int32_t& page) const {
    load_if(there && block >= copied && block < static_cast<uint32_t>(batch.max_pages),
            pages + block * batch.table_col_stride, page);
  }
};

// Begins to copy up to kMost pages of a request's row to `table`, a multiple of 16 bytes, by all
// `threads` threads of a CTA, as a group of copies. Nothing where the row is no vectors of 16
// bytes, or no request is `there`.
template <uint32_t kMost>
__device__ __forceinline__ TableRow copy_table_row(const BatchView& batch, int32_t request,
                                                   bool there, int32_t* table, uint32_t threads) {
  constexpr uint32_t kVector = 4;
  const int32_t* const pages =
      batch.block_table + static_cast<uint32_t>(request) * batch.table_row_stride;
  uint32_t copied = 0;
  if (there && batch.table_col_stride == 1 && reinterpret_cast<uintptr_t>(pages) % 16 == 0) {
    copied = min(static_cast<uint32_t>(batch.max_pages), kMost) / kVector * kVector;
  }
  if constexpr (kMost > 0) {
#pragma unroll
    for (uint32_t first = 0; first < kMost && first < copied; first += threads * kVector) {
      const uint32_t page = first + threadIdx.x * kVector;
      if (page < copied) copy_async_16(shared_address(table + page), pages + page);
    }
  }
  commit_async_copies();
  return {pages, copied};
}

}  // namespace msa
