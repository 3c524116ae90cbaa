// The selection of one row, block by block: forced blocks, then the best scores.
#pragma once

#include <algorithm>

#include "cpu/convert.h"
#include "cpu/element.h"
#include "step2_select/topk_blocks_params.h"

namespace msa {

// Orders candidates as the selection does: larger is better. Upper half: the score, +0 and -0
// alike, NaN below -inf. Lower half: the complement of the id, so that of equal scores the lower id
// wins. No two blocks of a row have the same key, so the best K do not depend on the order of
// arrival.
inline uint64_t candidate_key(float score, int64_t block) {
  uint32_t bits = float_bits(score + 0.0f);  // -0 + 0 = +0
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  if (score != score) bits = 0;
  return uint64_t{bits} << 32 | (0xffffffffu - static_cast<uint32_t>(block));
}

class TopkRow {
 public:
  void start(const SelectRule& rule, int64_t visible) {
    visible_ = visible;
    // Where everything visible is selected there is nothing to score: all of it counts as forced.
    init_end_ = visible <= rule.topk ? visible : rule.init_blocks;
    local_begin_ = std::max(visible - rule.local_blocks, init_end_);
    const int64_t forced = init_end_ + visible - local_begin_;
    capacity_ = static_cast<int>(std::min(rule.topk, visible) - forced);
    count_ = 0;
  }

  // The blocks whose scores matter: [candidates_begin(), candidates_end()), none of them where the
  // end is 0. Only these may be offered.
  int64_t candidates_begin() const { return init_end_; }
  int64_t candidates_end() const { return capacity_ > 0 ? local_begin_ : 0; }

  // keys_[0, count_) ascends: the worst of the best stands first.
  void offer(float score, int64_t block) {
    const uint64_t key = candidate_key(score, block);
    int place;
    if (count_ < capacity_) {
      for (place = count_++; place > 0 && keys_[place - 1] > key; --place) {
        keys_[place] = keys_[place - 1];
      }
    } else {
      if (key < keys_[0]) return;
      for (place = 0; place + 1 < count_ && keys_[place + 1] < key; ++place) {
        keys_[place] = keys_[place + 1];
      }
    }
    keys_[place] = key;
  }

  // Ids ascending, then -1.
  void write(const IdsView& ids, int64_t head, int64_t token) const {
    int32_t chosen[kMaxTopk];
    int count = 0;
    for (int64_t block = 0; block < init_end_; ++block) chosen[count++] = int32_t(block);
    for (int i = 0; i < count_; ++i) {
      chosen[count++] = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(keys_[i]));
    }
    std::sort(chosen + init_end_, chosen + count);
    for (int64_t block = local_begin_; block < visible_; ++block) chosen[count++] = int32_t(block);
    auto* row = static_cast<int32_t*>(ids.data) + head * ids.head_stride + token * ids.token_stride;
    for (int64_t slot = 0; slot < ids.topk; ++slot) {
      row[slot * ids.slot_stride] = slot < count ? chosen[slot] : -1;
    }
  }

 private:
  int64_t visible_, init_end_, local_begin_;
  int capacity_, count_;
  uint64_t keys_[kMaxTopk];
};

}  // namespace msa
