#include "checks/tensor_checks.h"

#include <algorithm>
#include <array>

#include "host/errors.h"

namespace msa {
namespace {

// Bytes from a tensor's first to behind its last.
int64_t span_bytes(const TensorInfo& tensor) {
  int64_t reach = 1;  // elements
  for (int dim = 0; dim < tensor.dims; ++dim) {
    reach += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return reach * tensor.element_size;
}

// Looks for an element of `from` and one of `to` that share a byte: the distance from the one to
// the other is then less than the first one's size, and more than minus the second one's. Every
// distance is the least one and some of the tensors' steps, each as often as its axis has more
// elements: a step of `to` adds to it, and so does one that `from` does not take.
class MeetingSearch {
 public:
  MeetingSearch(const TensorInfo& from, const TensorInfo& to)
      : low_(-to.element_size), high_(from.element_size) {
    least_ = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to.data) -
                                  reinterpret_cast<uintptr_t>(from.data));
    least_ -= span_bytes(from) - from.element_size;
    add_steps(from);
    add_steps(to);
    std::sort(steps_.begin(), steps_.begin() + num_steps_,
              [](const Step& a, const Step& b) { return a.bytes > b.bytes; });
    for (int step = num_steps_ - 1; step >= 0; --step) {
      steps_[step].reach = steps_[step + 1].reach + steps_[step].most * steps_[step].bytes;
    }
  }

  bool finds_one() { return finds_one(0, least_); }

 private:
  struct Step {
    int64_t bytes = 0, most = 0;  // taken 0 to `most` times
    int64_t reach = 0;            // what it and all smaller ones add at most
  };

  void add_steps(const TensorInfo& tensor) {
    for (int dim = 0; dim < tensor.dims; ++dim) {
      const int64_t bytes = tensor.stride(dim) * tensor.element_size, most = tensor.size(dim) - 1;
      if (bytes == 0 || most == 0) continue;
      const auto same = std::find_if(steps_.begin(), steps_.begin() + num_steps_,
                                     [&](const Step& step) { return step.bytes == bytes; });
      if (same == steps_.begin() + num_steps_) steps_[num_steps_++].bytes = bytes;
      same->most += most;
    }
  }

  // Whether steps from number `step` on lead from `distance` into the range.
  bool finds_one(int step, int64_t distance) {
    const Step& mine = steps_[step];
    if (distance >= high_ || distance + mine.reach <= low_) return false;
    if (step == num_steps_) return true;
    --tries_left_;
    const int64_t short_by = low_ - distance - steps_[step + 1].reach;
    int64_t taken = short_by < 0 ? 0 : short_by / mine.bytes + 1;
    for (; taken <= mine.most && tries_left_ > 0; ++taken) {
      const int64_t there = distance + taken * mine.bytes;
      if (there >= high_) break;
      if (finds_one(step + 1, there)) return true;
    }
    return false;
  }

  std::array<Step, 2 * TensorInfo::kMaxDims + 1> steps_{};  // the largest first; an empty one last
  int num_steps_ = 0;
  int64_t least_, low_, high_;
  int tries_left_ = 4096;
};

bool share_memory(const TensorInfo& a, const TensorInfo& b) {
  if (!a.defined || !b.defined || a.numel() == 0 || b.numel() == 0) return false;
  const auto begin_a = reinterpret_cast<uintptr_t>(a.data);
  const auto begin_b = reinterpret_cast<uintptr_t>(b.data);
  if (begin_a + span_bytes(a) <= begin_b || begin_b + span_bytes(b) <= begin_a) return false;
  return MeetingSearch(a, b).finds_one();
}

}  // namespace

void Checker::fail(const std::string& argument, const std::string& expected,
                   const std::string& got) const {
  throw_value_error(op_, argument, expected, got);
}

void Checker::given(const TensorInfo& tensor, const char* why) const {
  if (!tensor.defined) fail(tensor.name, concat("a tensor (", why, ")"), "None");
}

void Checker::not_given(const TensorInfo& tensor, const char* why) const {
  if (tensor.defined) fail(tensor.name, concat("None (", why, ")"), describe(tensor));
}

void Checker::dtype(const TensorInfo& tensor, std::initializer_list<DType> allowed) const {
  std::string names;
  for (DType candidate : allowed) {
    if (tensor.dtype == candidate) return;
    names += (names.empty() ? "" : " or ") + std::string(dtype_name(candidate));
  }
  fail(tensor.name, names, tensor.dtype_name);
}

void Checker::same_dtype(const TensorInfo& tensor, const TensorInfo& as) const {
  if (tensor.dtype != as.dtype) {
    fail(tensor.name, concat(as.dtype_name, ", the dtype of ", as.name), tensor.dtype_name);
  }
}

void Checker::shape(const TensorInfo& tensor, const char* letters,
                    std::initializer_list<int64_t> expected) const {
  const int dims = static_cast<int>(expected.size());
  bool equal = tensor.dims == dims;
  for (int dim = 0; equal && dim < dims; ++dim) {
    const int64_t size = expected.begin()[dim];
    equal = size == kAnySize || size == tensor.size(dim);
  }
  if (!equal) {
    fail(tensor.name, concat(letters, " = ", shape_text(expected.begin(), dims)),
         shape_text(tensor.sizes.data(), tensor.dims));
  }
}

void Checker::same_device(const TensorInfo& tensor, const TensorInfo& as) const {
  if (tensor.on_cpu != as.on_cpu || tensor.device_index != as.device_index) {
    fail(tensor.name, concat("on ", device_text(as), ", the device of ", as.name),
         device_text(tensor));
  }
}

void Checker::aligned_rows(const TensorInfo& tensor) const {
  if (tensor.numel() == 0) return;
  const int last = tensor.dims - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1) {
    fail(concat("the last dimension of ", tensor.name), "contiguous (stride 1)",
         concat("stride ", tensor.stride(last)));
  }
  for (int dim = 0; dim < last; ++dim) {
    if (tensor.size(dim) > 1 && (tensor.stride(dim) * tensor.element_size) % 16 != 0) {
      fail(concat("stride ", dim, " of ", tensor.name), "a multiple of 16 bytes",
           concat(tensor.stride(dim), " elements of ", tensor.element_size, " bytes"));
    }
  }
  const auto address = reinterpret_cast<uintptr_t>(tensor.data);
  if (address % 16 != 0) {
    fail(concat("the first element of ", tensor.name), "aligned to 16 bytes",
         concat("an address ", address % 16, " bytes past a multiple of 16"));
  }
}

void Checker::dense_rows(const TensorInfo& tensor, int64_t alignment) const {
  if (tensor.numel() == 0) return;
  const int64_t width = tensor.size(1);
  const bool columns = width == 1 || tensor.stride(1) == 1;
  const bool rows = tensor.size(0) == 1 || tensor.stride(0) == width;
  if (!columns || !rows) {
    fail(tensor.name, concat("contiguous, strides [", width, ", 1]"),
         concat("strides ", shape_text(tensor.strides.data(), tensor.dims)));
  }
  const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.data) %
                                            static_cast<uintptr_t>(alignment));
  if (past != 0) {
    fail(concat("the first element of ", tensor.name), concat("aligned to ", alignment, " bytes"),
         concat("an address ", past, " bytes past a multiple of ", alignment));
  }
}

void Checker::no_overlap(const TensorInfo& tensor) const {
  // Each dimension, from the smallest stride up, must step over all that the smaller ones reach.
  std::array<bool, TensorInfo::kMaxDims> seen{};
  int64_t reach = 1;  // elements that the dimensions seen so far span
  for (int turn = 0; turn < tensor.dims; ++turn) {
    int next = -1;
    for (int dim = 0; dim < tensor.dims; ++dim) {
      if (!seen[dim] && (next < 0 || tensor.stride(dim) < tensor.stride(next))) next = dim;
    }
    seen[next] = true;
    if (tensor.size(next) <= 1) continue;
    if (tensor.stride(next) < reach) {
      fail(tensor.name, "writable without overlap",
           concat("stride ", tensor.stride(next), " in dimension ", next, ", where ", reach,
                  " elements lie between two steps"));
    }
    reach += (tensor.size(next) - 1) * tensor.stride(next);
  }
}

void Checker::apart(const TensorInfo& tensor, const TensorInfo& other) const {
  if (share_memory(tensor, other)) {
    fail(tensor.name, concat("in memory that ", other.name, " does not use"), "memory of both");
  }
}

void Checker::in_range(const char* argument, int64_t value, int64_t low, int64_t high) const {
  if (value < low || value > high) {
    fail(argument, concat("from ", low, " to ", high), std::to_string(value));
  }
}

}  // namespace msa
