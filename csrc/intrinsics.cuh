// The few instructions that CUDA C++ does not spell. An emulation that runs the device code on a CPU brings its own.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)

namespace hisparse {

// The block's dynamic shared memory.
__device__ __forceinline__ char* block_shared_memory() {
  extern __shared__ __align__(128) char shared_memory[];
  return shared_memory;
}

// Relaxed: the barriers only keep writes of state behind the other blocks' reads, and a block arrives when the values it has
// read are already in use.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// With programmatic dependent launch: returns when the kernel ahead in the stream has ended and its writes are visible. What ran
// ahead of that one has ended too, if it was launched plainly or waited likewise.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel start, if it was launched to overlap this one: then it must wait as above before it touches what this one
// writes. One that was launched plainly, as attention is, starts when this one has ended, whatever is said here. Only after the
// wait: a kernel may read, before it waits, what a kernel before the last has written, and that one has ended only then.
__device__ __forceinline__ void launch_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Host rows are read once: keep them out of L1. The memory clobber keeps a batch of loads ahead of what follows it.
__device__ __forceinline__ int4 load_host(const int4* address) {
  int4 value;
  asm volatile("ld.global.L1::no_allocate.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 4 or 8 bytes from global to shared memory without waiting for them and without a register. They arrive for the thread
// that waits: for all, or for all groups but the youngest kYounger. Not for host memory: there it was slower than plain loads.
template <typename T>
__device__ __forceinline__ void copy_async(T* target, const T* source) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(target)), "l"(source), "n"(sizeof(T)) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kYounger>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kYounger) : "memory");
}

// Starts a barrier that completes when `bytes` bytes have arrived; visible to the cluster once it has met.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t phase) {
  uint32_t done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(phase)
                 : "memory");
}

// Writes 16 bytes to where `target` is in the shared memory of another block of the cluster, and counts them at its barrier.
__device__ __forceinline__ void send_to_block(const void* target, uint4 value, const uint64_t* barrier, int block) {
  uint32_t to, counter;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(target)), "r"(block));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counter) : "r"(shared_address(barrier)), "r"(block));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w), "r"(counter)
               : "memory");
}

__device__ __forceinline__ void send_to_block(const void* target, uint2 value, const uint64_t* barrier, int block) {
  uint32_t to, counter;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(target)), "r"(block));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counter) : "r"(shared_address(barrier)), "r"(block));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to), "r"(value.x),
               "r"(value.y), "r"(counter)
               : "memory");
}

// A read of what other blocks write during this kernel: it passes the first cache.
__device__ __forceinline__ int4 load_shared_by_blocks(const int4* address) { return __ldcg(address); }

__device__ __forceinline__ void fence_all_blocks() { __threadfence(); }

}  // namespace hisparse

#endif
