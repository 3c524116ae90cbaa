// A GPU of one thread: the lanes of a launch are fibers that run in turn, and change over only
// where they wait for each other. What that leaves out: README.md.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace emulation {

constexpr int kSharedBytes = 228 * 1024;
constexpr int kNamedBarriers = 16;  // 0 is that of __syncthreads()

// How a launch runs; set between launches.
struct Settings {
  // 0: lanes in order, copies arrive at once. Else a seed: warps in random order, and copies arrive
  // when they like, at the latest when nothing else can run.
  uint32_t seed = 0;
  int sms = 3;  // of the device: CTAs of a persistent kernel
  // That run in turn, of kernels with dynamic shared memory, which each has its own of; static
  // shared memory is one for all. CTAs of a cluster always do.
  int ctas_at_once = 1;
};
inline Settings settings;

// Kernels that ran since the list was last cleared: name, threads of a CTA, CTAs of a cluster,
// which is 0 where there are none.
inline std::vector<std::string> launched;

// Of the grid that runs.
struct Index {
  unsigned x = 0, y = 0, z = 0;
};
struct ThreadIndex {
  unsigned x;  // of the lane that runs
};
inline Index block_index, grid_size, block_size;
inline ThreadIndex thread_index;

struct Grid {
  Index size;
  int threads, shared_bytes;
  int cluster;  // 0: not launched in clusters
};

// Runs `body`, a call of `kernel`, in every lane of a grid. Throws std::runtime_error where lanes
// hang or break a rule.
void launch(const void* kernel, const Grid& grid, const std::function<void()>& body);

// Ends the launch.
[[noreturn]] void fail(const std::string& what);

// Lets others run until `word`, which only grows, is not `value`. `what`: for the message if that
// is never.
void wait_while(const uint32_t& word, uint32_t value, const char* what);

// Does `copy`, to the shared memory of the lane's CTA, now or later.
void copy_later(std::function<void()> copy);

// Work of a lane that the hardware may do until the lane waits for it, in groups: here it is done
// then, at the latest.
enum Engine { kProducts, kCopies, kEngines };
void defer(Engine engine, std::function<void()> work);
void commit(Engine engine);
void finish(Engine engine, int groups_left);

// All lanes of the warp give a value each and get all of them. `op` tells collectives apart.
const uint64_t* exchange(int op, uint64_t value);

// The same, and the last lane to come does `work` with the values, for all.
void work_together(int op, uint64_t value, void (*work)(const uint64_t* values));

// Arrives at a named barrier of `threads` threads and waits for the others.
void meet(int barrier, int threads);

// The same of all lanes of the CTA. How many of them voted?
int meet_cta(bool vote = false);

// By whole warps that poll: lets other warps run.
void nap();

// Of the cluster: arrives, and waits until all its lanes have arrived as often.
void cluster_arrive();
void cluster_wait();

// Shared memory of a CTA of the cluster that has not ended, for accesses from another.
void store_to_cta(int rank, uint32_t address, uint32_t value);

// Arrives there now or later, as copies do; its bytes, 16 at most, count on a barrier of that CTA.
void send_to_cta(int rank, uint32_t address, const void* value, uint32_t bytes,
                 const uint64_t* barrier);

// Transaction barriers of the CTA, by the address of the word that stands for them.
void barrier_init(const uint64_t* barrier, uint32_t arrivals);
void barrier_arrive(const uint64_t* barrier, uint32_t announced_bytes);
// Arrives, now or later, behind the lane's deferred work, which is done no later than then.
void arrive_behind(Engine engine, const uint64_t* barrier);
void barrier_bytes(const uint64_t* barrier, uint32_t arrived_bytes);
void barrier_wait(const uint64_t* barrier, uint32_t parity);
bool barrier_test(const uint64_t* barrier, uint32_t parity);

}  // namespace emulation

// The dynamic shared memory of every kernel, by the name that they have for it.
#define MSA_SHARED_MEMORY(space)                                                     \
  namespace space {                                                                  \
  extern thread_local uint8_t shared_memory[] __asm__("msa_emulated_shared_memory"); \
  }
MSA_SHARED_MEMORY(emulation)
MSA_SHARED_MEMORY(msa::index_score::sm80)
MSA_SHARED_MEMORY(msa::index_score::sm90)
MSA_SHARED_MEMORY(msa::select_blocks::sm90)
MSA_SHARED_MEMORY(msa::kv_block_schedule::sm80)
MSA_SHARED_MEMORY(msa::split_selection::sm90)
MSA_SHARED_MEMORY(msa::decode_view::sm80)
MSA_SHARED_MEMORY(msa::sparse_prefill::sm90)
MSA_SHARED_MEMORY(msa::decode::sm80)
MSA_SHARED_MEMORY(msa::decode::sm90)
#undef MSA_SHARED_MEMORY
