#include "machine.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <utility>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulation {

// The alias of machine.h, defined: a label may be given but once.
alignas(1024) thread_local uint8_t shared_memory[kSharedBytes];

namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr int kMostNaps = 1 << 20, kManyNaps = 1 << 12;
constexpr int kNap = -1;  // beside the collectives of cuda_runtime.h
constexpr int kAnyCta = -1;

// A stack, and where its code goes on.
#ifdef __x86_64__
using Context = void*;  // the stack pointer; what a function must preserve lies there
extern "C" void msa_emulation_switch(Context* from, Context to);
asm(R"(
.text
.globl msa_emulation_switch
.hidden msa_emulation_switch
.type msa_emulation_switch, @function
msa_emulation_switch:
  endbr64
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
void switch_to(Context& from, Context& to) { msa_emulation_switch(&from, to); }
void prepare(Context& context, uint8_t* stack, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + kStackBytes);
  *--top = nullptr;  // where `entry` would return to
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context = top;
}
#else
using Context = ucontext_t;
void switch_to(Context& from, Context& to) { swapcontext(&from, &to); }
void prepare(Context& context, uint8_t* stack, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStackBytes;
  makecontext(&context, entry, 0);
}
#endif

struct DeferredWork {
  int groups = 0;  // committed so far
  std::vector<std::pair<int, std::function<void()>>> pending;
};

struct Lane {
  std::unique_ptr<uint8_t, decltype(&std::free)> stack{nullptr, &std::free};
  Context context{};
  const uint32_t* word = nullptr;  // it waits while this is `value`
  uint32_t value = 0;
  const char* waits_for = "";
  bool done = true;
  uint32_t cluster_phase = 0;  // at its last arrival
  DeferredWork deferred[kEngines];
  bool can_run() const { return !done && (word == nullptr || *word != value); }
};

struct Warp {
  int op = 0, arrived = 0;
  uint32_t generation = 0;
  uint64_t values[2][32];
};

struct NamedBarrier {
  int arrived = 0, threads = 0;
  uint32_t generation = 0;
};

struct TransactionBarrier {
  uint32_t arrivals = 0;
  uint32_t phase = 0;  // how many are complete
  int64_t pending = 0, bytes = 0;
};

struct Cta {
  Index index;
  int live = 0;  // lanes
  NamedBarrier named[kNamedBarriers];
  int votes[2] = {0, 0};  // of __syncthreads_or() and _count(), by generation
  std::map<const uint64_t*, TransactionBarrier> barriers;
  std::vector<uint8_t> shared;  // while another CTA has the memory
};

struct Copy {
  int cta;  // whose memory it takes as that of the lane that runs
  std::function<void()> run;
  bool is_late;  // arrives where nothing else can run
};

// The CTAs that run in turn, and their lanes one after the other.
std::vector<Lane> lanes;
std::vector<Warp> warps;
std::vector<Cta> ctas;
std::vector<Copy> copies;
Context main_context;
const std::function<void()>* body = nullptr;
std::string error;
Grid grid;
int current = 0, resident = 0, num_lanes = 0;
uint64_t random_state = 0;
int slow_warp = 0;  // of each CTA, in random orders: runs where no other can, or seldom
int cluster_arrived = 0;
uint32_t cluster_phase = 0;
int naps = 0;  // since the last phase of a barrier

void run_others(bool leaves_warp);

uint32_t random_below(uint32_t end) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<uint32_t>((random_state >> 16) % end);
}

Cta& cta() { return ctas[current / grid.threads]; }

void give_memory_to(int next) {
  if (next == resident) return;
  ctas[resident].shared.assign(shared_memory, shared_memory + grid.shared_bytes);
  std::memcpy(shared_memory, ctas[next].shared.data(), grid.shared_bytes);
  resident = next;
}

void run_copy(size_t which) {
  const Copy copy = std::move(copies[which]);
  copies[which] = std::move(copies.back());
  copies.pop_back();
  if (copy.cta != kAnyCta) give_memory_to(copy.cta);
  copy.run();
}

// All lanes of the warp have come as far as this one: the warp may stay behind others from here on.
void maybe_stay_behind() {
  if (settings.seed != 0 && random_below(8) == 0) run_others(true);
}

// The first lane from `first` on that can run, of `count`; -1: none.
int find_lane(int first, int count, int begin, int end) {
  for (int i = 0, lane = first; i < count; ++i) {
    if (lanes[lane].can_run()) return lane;
    if (++lane == end) lane = begin;
  }
  return -1;
}

// The next lane of the warp, so that its lanes stay together as those of a GPU do; else, or where
// the warp is left, of its CTA, and now and then of any.
int choose_lane(bool leaves_warp) {
  const bool random = settings.seed != 0;
  if (random && !copies.empty() && random_below(8) == 0) {
    const uint32_t which = random_below(copies.size());
    if (!copies[which].is_late) run_copy(which);
  }
  if (!leaves_warp) {
    const int warp = current / 32 * 32;
    const int next = find_lane(warp + (current + 1) % 32, 32, warp, warp + 32);
    if (next >= 0) return next;
  }
  const int own = current / grid.threads * grid.threads;
  const auto choose = [&](int first, int count) {
    const int warp = random ? random_below(count / 32) : (current - first) / 32 + 1;
    const int next = find_lane(first + warp * 32 % count, count, first, first + count);
    const bool is_slow = next >= 0 && next % grid.threads / 32 == slow_warp;
    if (!random || !is_slow || random_below(32) == 0) return next;
    const int behind = next / 32 * 32 + 32;
    return find_lane(behind < first + count ? behind : first, count, first, first + count);
  };
  if (!random || ctas.size() == 1 || random_below(16) != 0) {
    const int next = choose(own, grid.threads);
    if (next >= 0) return next;
  }
  return choose(0, num_lanes);
}

void enter_lane(int next) {
  current = next;
  give_memory_to(next / grid.threads);
  block_index = cta().index;
  thread_index.x = next % grid.threads;
}

void leave_to(Context& from, int next) {
  enter_lane(next);
  switch_to(from, lanes[next].context);
}

std::string describe_hang() {
  std::map<std::string, int> waiting;
  for (int i = 0; i < num_lanes; ++i) {
    if (!lanes[i].done) ++waiting[lanes[i].waits_for];
  }
  std::string text = "hangs:";
  for (const auto& [what, count] : waiting) {
    text += " " + std::to_string(count) + " lanes wait for " + what + ";";
  }
  return text;
}

void run_others(bool leaves_warp) {
  const int from = current;
  int next = choose_lane(leaves_warp);
  while (next < 0 && !copies.empty()) {
    run_copy(settings.seed == 0 ? 0 : random_below(copies.size()));
    next = choose_lane(leaves_warp);
  }
  if (next < 0) {
    for (int i = 0; i < num_lanes; ++i) {
      if (!lanes[i].done) fail(describe_hang());
    }
    switch_to(lanes[from].context, main_context);  // all are done
  }
  if (next != from) leave_to(lanes[from].context, next);
  enter_lane(from);
}

void release_if_full(NamedBarrier& barrier, int threads) {
  if (barrier.arrived < threads) return;
  barrier.arrived = 0;
  ++barrier.generation;
}

// Where all lanes that have not ended have arrived.
void release_cta(Cta& cta) {
  const uint32_t generation = cta.named[0].generation;
  if (cta.live > 0) release_if_full(cta.named[0], cta.live);
  if (cta.named[0].generation != generation) cta.votes[cta.named[0].generation % 2] = 0;
}

void lane_main() {
  (*body)();
  for (const DeferredWork& work : lanes[current].deferred) {
    if (!work.pending.empty()) fail("ends with products or copies that it did not wait for");
  }
  lanes[current].done = true;
  --cta().live;
  if (cta().named[0].arrived > 0) release_cta(cta());
  run_others(false);
  std::abort();  // nobody comes back
}

TransactionBarrier& find_barrier(Cta& owner, const uint64_t* address) {
  const auto found = owner.barriers.find(address);
  if (found == owner.barriers.end()) fail("a transaction barrier was not initialised");
  return found->second;
}

void complete_if_due(TransactionBarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  naps = 0;
  barrier.pending = barrier.arrivals;
}

void count_bytes(TransactionBarrier& barrier, uint32_t arrived) {
  barrier.bytes -= arrived;
  complete_if_due(barrier);
}

uint8_t* memory_of(int rank) {
  if (rank >= static_cast<int>(ctas.size())) fail("a store to a CTA that is not in the cluster");
  if (ctas[rank].live == 0) fail("a store to a CTA that has ended");
  return rank == resident ? shared_memory : ctas[rank].shared.data();
}

// The symbol at an address of this library. Its file has the local ones too.
std::string symbol_at(const void* address) {
  Dl_info info{};
  dladdr(address, &info);
  std::ifstream stream(info.dli_fname, std::ios::binary);
  const std::vector<char> file{std::istreambuf_iterator<char>(stream), {}};
  const auto* const header = reinterpret_cast<const Elf64_Ehdr*>(file.data());
  const auto* const sections = reinterpret_cast<const Elf64_Shdr*>(file.data() + header->e_shoff);
  const uint64_t place =
      static_cast<const char*>(address) - static_cast<const char*>(info.dli_fbase);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const auto* symbol = reinterpret_cast<const Elf64_Sym*>(file.data() + sections[i].sh_offset);
    const char* const names = file.data() + sections[sections[i].sh_link].sh_offset;
    for (uint64_t left = sections[i].sh_size / sizeof *symbol; left > 0; --left, ++symbol) {
      if (symbol->st_value == place && ELF64_ST_TYPE(symbol->st_info) == STT_FUNC) {
        return names + symbol->st_name;
      }
    }
  }
  return "a kernel";
}

std::string find_name(const void* kernel) {
  const std::string symbol = symbol_at(kernel);
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status), &std::free);
  std::string whole = status == 0 ? name.get() : symbol;
  whole.resize(std::min(whole.size(), whole.find_first_of("<(")));
  return whole.substr(whole.rfind(':') + 1);
}

const std::string& name_of(const void* kernel) {
  static std::map<const void*, std::string> names;
  std::string& name = names[kernel];
  if (name.empty()) name = find_name(kernel);
  return name;
}

// The CTAs from `first` on, `count` of them.
void run_ctas(int first, int count) {
  num_lanes = count * grid.threads;
  if (lanes.size() < static_cast<size_t>(num_lanes)) lanes.resize(num_lanes);
  warps.assign(num_lanes / 32, {});
  ctas.assign(count, {});
  copies.clear();
  resident = cluster_arrived = 0;
  cluster_phase = 0;
  const int garbage = settings.seed % 2 == 0 ? 0xab : 0xff;  // small numbers, or NaN of every type
  for (int i = 0; i < count; ++i) {
    const unsigned index = first + i;
    ctas[i].index = {index % grid.size.x, index / grid.size.x % grid.size.y,
                     index / grid.size.x / grid.size.y};
    ctas[i].live = grid.threads;
    ctas[i].shared.assign(grid.shared_bytes, garbage);
  }
  std::memset(shared_memory, garbage, kSharedBytes);
  for (int i = 0; i < num_lanes; ++i) {
    Lane& lane = lanes[i];
    if (!lane.stack) {
      lane.stack.reset(static_cast<uint8_t*>(std::aligned_alloc(4096, kStackBytes)));
    }
    prepare(lane.context, lane.stack.get(), &lane_main);
    lane.word = nullptr;
    lane.done = false;
    lane.cluster_phase = 0;
    for (DeferredWork& work : lane.deferred) work = {};
  }
  slow_warp = random_below(grid.threads / 32);
  error.clear();
  leave_to(main_context, settings.seed == 0 ? 0 : random_below(num_lanes / 32) * 32);
  if (!error.empty()) return;
  for (const Cta& ended : ctas) {
    for (const auto& [address, barrier] : ended.barriers) {
      if (barrier.bytes != 0) error = "a transaction barrier is left with announced bytes";
    }
  }
}

}  // namespace

void fail(const std::string& what) {
  error = what;
  Context nowhere;
  switch_to(nowhere, main_context);
  std::abort();
}

void launch(const void* kernel, const Grid& asked, const std::function<void()>& run) {
  grid = asked;
  body = &run;
  grid_size = grid.size;
  block_size = {static_cast<unsigned>(grid.threads), 1, 1};
  const std::string& name = name_of(kernel);
  launched.push_back(name + " " + std::to_string(grid.threads) + " " +
                     std::to_string(grid.cluster));
  if (grid.threads % 32 != 0 || grid.threads > 1024) throw std::runtime_error(name + ": threads");
  if (grid.shared_bytes > kSharedBytes) throw std::runtime_error(name + ": shared memory");
  random_state = 88172645463325252u + settings.seed * 0x9e3779b97f4a7c15u;
  const int total = static_cast<int>(grid.size.x * grid.size.y * grid.size.z);
  const int at_once = grid.shared_bytes > 0 ? settings.ctas_at_once : 1;
  const int together = grid.cluster > 0 ? grid.cluster : at_once;
  for (int first = 0; first < total; first += together) {
    run_ctas(first, std::min(together, total - first));
    if (!error.empty()) throw std::runtime_error(name + " " + error);
  }
}

void wait_while(const uint32_t& word, uint32_t value, const char* what) {
  Lane& lane = lanes[current];
  lane.word = &word;
  lane.value = value;
  lane.waits_for = what;
  run_others(false);
  lane.word = nullptr;
}

void copy_later(std::function<void()> copy) {
  if (settings.seed == 0) return copy();
  copies.push_back({current / grid.threads, std::move(copy), random_below(2) == 0});
}

void defer(Engine engine, std::function<void()> work) {
  DeferredWork& deferred = lanes[current].deferred[engine];
  deferred.pending.emplace_back(deferred.groups, std::move(work));
}

void commit(Engine engine) { ++lanes[current].deferred[engine].groups; }

void finish(Engine engine, int groups_left) {
  DeferredWork& deferred = lanes[current].deferred[engine];
  size_t done = 0;
  for (; done < deferred.pending.size(); ++done) {
    const auto& [group, work] = deferred.pending[done];
    if (group >= deferred.groups - groups_left) break;
    work();
  }
  deferred.pending.erase(deferred.pending.begin(), deferred.pending.begin() + done);
}

namespace {

const uint64_t* exchange(int op, uint64_t value, void (*work)(const uint64_t*)) {
  Warp& warp = warps[current / 32];
  const uint32_t generation = warp.generation;
  uint64_t* const values = warp.values[generation % 2];
  values[current % 32] = value;
  if (warp.arrived == 0) warp.op = op;
  if (warp.op != op) fail("lanes of a warp are in different collectives");
  if (++warp.arrived == 32) {
    if (work != nullptr) work(values);
    warp.arrived = 0;
    ++warp.generation;
    maybe_stay_behind();
  } else {
    wait_while(warp.generation, generation, "the other lanes of their warp");
  }
  return values;
}

}  // namespace

const uint64_t* exchange(int op, uint64_t value) { return exchange(op, value, nullptr); }

void work_together(int op, uint64_t value, void (*work)(const uint64_t*)) {
  exchange(op, value, work);
}

void meet(int id, int threads) {
  NamedBarrier& barrier = cta().named[id];
  if (barrier.arrived == 0) barrier.threads = threads;
  if (barrier.threads != threads) fail("a named barrier is met with different thread counts");
  const uint32_t generation = barrier.generation;
  ++barrier.arrived;
  release_if_full(barrier, threads);
  wait_while(barrier.generation, generation, id == 0 ? "__syncthreads" : "a named barrier");
}

int meet_cta(bool vote) {
  Cta& mine = cta();
  NamedBarrier& barrier = mine.named[0];
  const uint32_t generation = barrier.generation;
  mine.votes[generation % 2] += vote;
  ++barrier.arrived;
  release_cta(mine);
  wait_while(barrier.generation, generation, "__syncthreads");
  return mine.votes[generation % 2];
}

void nap() {
  if (++naps > kMostNaps) fail("hangs: a warp polls what never comes");
  exchange(kNap, 0);
  if (current % 32 != 31) return;
  // Others wait by now, if they ever do.
  if (naps > kManyNaps && !copies.empty()) run_copy(random_below(copies.size()));
  run_others(true);
}

void cluster_arrive() {
  lanes[current].cluster_phase = cluster_phase;
  if (++cluster_arrived == num_lanes) {
    cluster_arrived = 0;
    ++cluster_phase;
  }
}

void cluster_wait() {
  wait_while(cluster_phase, lanes[current].cluster_phase, "the other CTAs of their cluster");
}

void store_to_cta(int rank, uint32_t address, uint32_t value) {
  std::memcpy(memory_of(rank) + address, &value, sizeof value);
}

void send_to_cta(int rank, uint32_t address, const void* value, uint32_t bytes,
                 const uint64_t* barrier) {
  // compute-sanitizer's memcheck refuses it too.
  if (grid.cluster == 1) fail("a CTA that is alone in its cluster sends to itself");
  std::array<uint8_t, 16> sent{};
  std::memcpy(sent.data(), value, bytes);
  std::function<void()> arrive = [=] {
    std::memcpy(memory_of(rank) + address, sent.data(), bytes);
    count_bytes(find_barrier(ctas[rank], barrier), bytes);
  };
  if (settings.seed == 0) return arrive();
  copies.push_back({kAnyCta, std::move(arrive), random_below(2) == 0});
}

void barrier_init(const uint64_t* address, uint32_t arrivals) {
  TransactionBarrier barrier;
  barrier.arrivals = arrivals;
  barrier.pending = arrivals;
  cta().barriers[address] = barrier;
}

void barrier_arrive(const uint64_t* address, uint32_t announced_bytes) {
  TransactionBarrier& barrier = find_barrier(cta(), address);
  if (barrier.pending == 0) fail("arrives at a transaction barrier too often");
  barrier.bytes += announced_bytes;
  --barrier.pending;
  complete_if_due(barrier);
}

void arrive_behind(Engine engine, const uint64_t* address) {
  auto pending = std::move(lanes[current].deferred[engine].pending);
  lanes[current].deferred[engine].pending.clear();
  const int rank = resident;
  copy_later([pending = std::move(pending), rank, address] {
    for (const auto& [group, work] : pending) work();
    TransactionBarrier& barrier = find_barrier(ctas[rank], address);
    if (barrier.pending == 0) fail("arrives at a transaction barrier too often");
    --barrier.pending;
    complete_if_due(barrier);
  });
}

void barrier_bytes(const uint64_t* address, uint32_t arrived_bytes) {
  count_bytes(find_barrier(ctas[resident], address), arrived_bytes);
}

void barrier_wait(const uint64_t* address, uint32_t parity) {
  const TransactionBarrier& barrier = find_barrier(cta(), address);
  // A phase that is complete stays so for this wait, as the warp's other lanes pass it too.
  const uint32_t phase = barrier.phase;
  wait_while(barrier.phase, phase % 2 == parity ? phase : phase - 1, "a transaction barrier");
}

bool barrier_test(const uint64_t* address, uint32_t parity) {
  return find_barrier(cta(), address).phase % 2 != parity;
}

}  // namespace emulation
