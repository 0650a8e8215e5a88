// Runs one cluster of thread blocks on a CPU: every CUDA thread is a fiber that stops where threads wait for each other.
// It shows errors of logic (a missing barrier of most kinds, an order that results depend on, a thread that never arrives), not
// errors of the memory model. Fibers run in an order drawn from a seed; shared memory starts poisoned.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct int4 {
  int x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulation {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// A meeting of a fixed set of threads; the last to arrive publishes what all brought.
struct Meeting {
  int members = 0, arrived = 0;
  uint64_t generation = 0;
  std::vector<uint64_t> brought, published;
};

struct Block {
  Index index;
  std::vector<char> shared;
  Meeting barrier;
  std::vector<Meeting> warps;
};

struct Cluster {
  Index grid;
  std::vector<std::unique_ptr<Block>> blocks;
  Meeting barrier;
  uint64_t seed = 0;
  bool progressed = false;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Cluster* cluster = nullptr;
  Block* block = nullptr;
  Index thread;
  uint64_t cluster_generation = 0;
  std::vector<std::vector<std::function<void()>>> copies{1};  // asynchronous ones, in groups
  bool finished = false;
};

constexpr size_t kStackBytes = 64 << 10;
inline Fiber* current = nullptr;
inline ucontext_t scheduler;
inline const std::function<void()>* body = nullptr;

inline void yield() { swapcontext(&current->context, &scheduler); }

// Half of the warps stop for so long that the other blocks finish ahead of them: what they do next comes late.
inline void fall_behind() {
  const uint64_t draw = (current->cluster->seed * 31 + current->block->index.x * 16 + current->thread.x / 32) * 0x9E3779B97F4A7C15u;
  const int turns = draw >> 63 == 0 ? 200 : 0;
  current->cluster->progressed = true;
  for (int turn = 0; turn < turns; turn++) {
    yield();
    current->cluster->progressed = true;
  }
}

inline void complete_if_all_here(Meeting& meeting) {
  if (meeting.members == 0 || meeting.arrived < meeting.members) return;
  meeting.arrived = 0;
  meeting.published = meeting.brought;
  meeting.generation++;
  current->cluster->progressed = true;
}

inline void arrive(Meeting& meeting, size_t place, uint64_t value) {
  meeting.brought[place] = value;
  meeting.arrived++;
  complete_if_all_here(meeting);
}

inline const std::vector<uint64_t>& meet(Meeting& meeting, size_t place, uint64_t value) {
  const uint64_t generation = meeting.generation;
  arrive(meeting, place, value);
  while (meeting.generation == generation) yield();
  return meeting.published;
}

// A thread that ends counts as arrived from now on.
inline void leave(Meeting& meeting, size_t place) {
  meeting.brought[place] = 0;
  meeting.members--;
  complete_if_all_here(meeting);
}

inline Meeting meeting_of(int members) {
  Meeting meeting;
  meeting.members = members;
  meeting.brought.assign(members, 0);
  return meeting;
}

inline size_t place_in_cluster() {
  const auto& blocks = current->cluster->blocks;
  const size_t threads = current->block->barrier.brought.size();
  size_t block = 0;
  while (blocks[block].get() != current->block) block++;
  return block * threads + current->thread.x;
}

inline void fiber_main() {
  Fiber* self = current;
  (*body)();
  leave(self->block->warps[self->thread.x / 32], self->thread.x % 32);
  leave(self->block->barrier, self->thread.x);
  leave(self->cluster->barrier, place_in_cluster());
  self->finished = true;
  self->cluster->progressed = true;
  swapcontext(&self->context, &scheduler);
}

// Runs `kernel` in one cluster of `blocks` blocks at grid row `row`; throws if the threads wait for each other for ever.
inline void run_cluster(int blocks, int rows, int row, int threads, size_t shared_bytes, uint64_t seed, const std::function<void()>& kernel) {
  Cluster cluster;
  cluster.grid = {static_cast<unsigned>(blocks), static_cast<unsigned>(rows), 1};
  cluster.barrier = meeting_of(blocks * threads);
  std::vector<std::unique_ptr<Fiber>> fibers;
  for (int b = 0; b < blocks; b++) {
    auto block = std::make_unique<Block>();
    block->index = {static_cast<unsigned>(b), static_cast<unsigned>(row), 0};
    block->shared.assign(shared_bytes + 128, static_cast<char>(0xA5));
    block->barrier = meeting_of(threads);
    for (int w = 0; w < threads / 32; w++) block->warps.push_back(meeting_of(32));
    for (int t = 0; t < threads; t++) {
      auto fiber = std::make_unique<Fiber>();
      fiber->cluster = &cluster;
      fiber->block = block.get();
      fiber->thread = {static_cast<unsigned>(t), 0, 0};
      fiber->stack.reset(new char[kStackBytes]);
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = fiber->stack.get();
      fiber->context.uc_stack.ss_size = kStackBytes;
      fiber->context.uc_link = nullptr;
      makecontext(&fiber->context, fiber_main, 0);
      fibers.push_back(std::move(fiber));
    }
    cluster.blocks.push_back(std::move(block));
  }
  cluster.seed = seed;
  std::mt19937_64 random(seed);
  std::shuffle(fibers.begin(), fibers.end(), random);
  body = &kernel;
  size_t running = fibers.size();
  while (running > 0) {
    cluster.progressed = false;
    running = 0;
    for (auto& fiber : fibers) {
      if (fiber->finished) continue;
      current = fiber.get();
      swapcontext(&scheduler, &fiber->context);
      running += !fiber->finished;
    }
    if (running > 0 && !cluster.progressed) throw std::runtime_error("emulated threads wait for each other for ever");
  }
}

inline const std::vector<uint64_t>& meet_warp(uint64_t value) {
  return meet(current->block->warps[current->thread.x / 32], current->thread.x % 32, value);
}

}  // namespace emulation

#define threadIdx (emulation::current->thread)
#define blockIdx (emulation::current->block->index)
#define gridDim (emulation::current->cluster->grid)

inline void __syncthreads() { emulation::meet(emulation::current->block->barrier, threadIdx.x, 0); }
inline void __syncwarp() { emulation::meet_warp(0); }
inline int __syncthreads_or(int predicate) {
  const auto& all = emulation::meet(emulation::current->block->barrier, threadIdx.x, predicate != 0);
  return std::any_of(all.begin(), all.end(), [](uint64_t value) { return value != 0; });
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  const auto& all = emulation::meet_warp(predicate != 0);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; lane++) bits |= static_cast<unsigned>(all[lane]) << lane;
  return bits;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return static_cast<T>(emulation::meet_warp(static_cast<uint64_t>(value))[lane & 31]);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = threadIdx.x % 32;
  return static_cast<T>(emulation::meet_warp(static_cast<uint64_t>(value))[lane >= distance ? lane - distance : lane]);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  return static_cast<T>(emulation::meet_warp(static_cast<uint64_t>(value))[(threadIdx.x % 32) ^ lanes]);
}
template <typename T>
T __reduce_add_sync(unsigned, T value) {
  T sum = 0;
  for (const uint64_t each : emulation::meet_warp(static_cast<uint64_t>(value))) sum += static_cast<T>(each);
  return sum;
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  const auto& all = emulation::meet_warp(value);
  return static_cast<unsigned>(*std::min_element(all.begin(), all.end()));
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const auto& all = emulation::meet_warp(value);
  return static_cast<unsigned>(*std::max_element(all.begin(), all.end()));
}
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value)); }
inline int __ffs(int value) { return __builtin_ffs(value); }
template <typename T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address = old + value;
  return old;
}
template <typename T>
T atomicOr(T* address, T value) {
  const T old = *address;
  *address = old | value;
  return old;
}
template <typename T>
T atomicMax(T* address, T value) {
  const T old = *address;
  *address = std::max(old, value);
  return old;
}
inline unsigned each_byte(unsigned a, unsigned b, unsigned (*combine)(unsigned, unsigned)) {
  unsigned result = 0;
  for (int shift = 0; shift < 32; shift += 8) result |= (combine((a >> shift) & 255u, (b >> shift) & 255u) & 255u) << shift;
  return result;
}
inline unsigned __vsub4(unsigned a, unsigned b) {
  return each_byte(a, b, [](unsigned x, unsigned y) { return x - y; });
}
inline unsigned __vminu4(unsigned a, unsigned b) {
  return each_byte(a, b, [](unsigned x, unsigned y) { return x < y ? x : y; });
}
template <typename T>
T atomicCAS(T* address, T expected, T value) {
  const T old = *address;
  if (old == expected) *address = value;
  return old;
}
using std::max;
using std::min;

namespace hisparse {

inline char* block_shared_memory() {
  char* memory = emulation::current->block->shared.data();
  return memory + (128 - reinterpret_cast<uintptr_t>(memory) % 128) % 128;
}
inline void cluster_arrive() {
  emulation::current->cluster_generation = emulation::current->cluster->barrier.generation;
  emulation::arrive(emulation::current->cluster->barrier, emulation::place_in_cluster(), 0);
}
inline void cluster_wait() {
  while (emulation::current->cluster->barrier.generation == emulation::current->cluster_generation) emulation::yield();
}
inline void wait_for_previous_kernel() {}
inline int4 load_host(const int4* address) { return *address; }
inline void launch_next_kernel() {}
// Copies happen as late as they may: when their group is waited for.
template <typename T>
void copy_async(T* target, const T* source) {
  emulation::current->copies.back().push_back([target, source] { *target = *source; });
}
inline void commit_copies() { emulation::current->copies.emplace_back(); }
template <int kYounger>
void wait_for_copies() {
  auto& groups = emulation::current->copies;  // the last is not committed yet
  while (groups.size() > kYounger + 1) {
    for (const auto& copy : groups.front()) copy();
    groups.erase(groups.begin());
  }
}
inline void barrier_expect(uint64_t* barrier, uint32_t bytes) { *barrier = bytes; }
inline void barrier_wait(uint64_t* barrier, uint32_t) {
  while (*barrier != 0) emulation::yield();
}
// The same place in the shared memory of another block.
inline char* in_block(const void* address, int block) {
  const auto base = [](emulation::Block& of) { return of.shared.data() + (128 - reinterpret_cast<uintptr_t>(of.shared.data()) % 128) % 128; };
  return base(*emulation::current->cluster->blocks[block]) + (static_cast<const char*>(address) - base(*emulation::current->block));
}
template <typename T>
void send_to_block(const void* target, T value, const uint64_t* barrier, int block) {
  auto* counter = reinterpret_cast<uint64_t*>(in_block(barrier, block));
  if (*counter < sizeof value) throw std::runtime_error("more arrives than is expected");
  std::memcpy(in_block(target, block), &value, sizeof value);
  *counter -= sizeof value;
  emulation::fall_behind();
}
inline int4 load_shared_by_blocks(const int4* address) { return *address; }
inline void fence_all_blocks() {}

}  // namespace hisparse
