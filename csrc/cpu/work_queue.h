// Work units of uneven cost over torch's threads, each thread with a scratch of its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

#include "host/errors.h"
#include "host/parallel.h"

namespace msa {

// Calls body(unit, scratch) once for every unit in [0, count), last unit first: later tokens see
// more blocks, so the long units start early. Which thread takes which unit is not fixed: units
// must not depend on each other. Scratch must be trivial; it is not cleared between units. The body
// must not throw.
template <typename Scratch, typename Body>
void for_each_unit(const char* op, int64_t count, const Body& body) {
  static_assert(std::is_trivially_destructible<Scratch>::value, "freed without a destructor");
  std::atomic<int64_t> next{0};
  parallel_for(count, 1, [&](int64_t, int64_t) {
    // A thread that gets no memory leaves its share to the others.
    const std::unique_ptr<void, decltype(&std::free)> memory(
        std::aligned_alloc(alignof(Scratch), sizeof(Scratch)), &std::free);
    if (!memory) return;
    Scratch* scratch = new (memory.get()) Scratch;
    for (int64_t taken = next.fetch_add(1); taken < count; taken = next.fetch_add(1)) {
      body(count - 1 - taken, *scratch);
    }
  });
  if (next.load() < count) {
    throw_runtime_error(op, concat("no memory for ", sizeof(Scratch), " bytes of scratch"));
  }
}

}  // namespace msa
