// The predicates of the input checks, all with one message form:
//   msa.<op>: <argument> must be <expected>, got <got>
// A caller's fault is a ValueError; nothing has been allocated or written when it is raised.
#pragma once

#include <initializer_list>
#include <string>

#include "host/tensor_info.h"

namespace msa {

constexpr int64_t kAnySize = -1;

class Checker {
 public:
  explicit Checker(const char* op) : op_(op) {}

  void given(const TensorInfo& tensor, const char* why) const;
  void not_given(const TensorInfo& tensor, const char* why) const;
  void dtype(const TensorInfo& tensor, std::initializer_list<DType> allowed) const;
  void same_dtype(const TensorInfo& tensor, const TensorInfo& as) const;
  // `letters` names the axes as the docstring does, e.g. "[T, Hq, D]"; kAnySize leaves one free.
  void shape(const TensorInfo& tensor, const char* letters,
             std::initializer_list<int64_t> expected) const;
  void same_device(const TensorInfo& tensor, const TensorInfo& as) const;
  // Rows of the last axis lie contiguous, every other stride and the first byte are multiples of
  // 16 bytes: what vector loads and the tensor memory accelerator need.
  void aligned_rows(const TensorInfo& tensor) const;
  // [rows, width] without a gap between rows, its first byte a multiple of `alignment` bytes.
  void dense_rows(const TensorInfo& tensor, int64_t alignment) const;
  // No two elements of an output share memory (judged by its strides: interleavings that happen not
  // to meet are refused too).
  void no_overlap(const TensorInfo& tensor) const;
  // No element of an output lies in memory of the other tensor, where there is one. Judged by the
  // elements, not by first and last byte: outputs may be interleaved with anything. What takes too
  // long to tell, of strides that have little to do with each other, is taken.
  void apart(const TensorInfo& tensor, const TensorInfo& other) const;
  void in_range(const char* argument, int64_t value, int64_t low, int64_t high) const;
  [[noreturn]] void fail(const std::string& argument, const std::string& expected,
                         const std::string& got) const;

 private:
  const char* op_;
};

}  // namespace msa
