// Reads a buffer once, as fast as the card can be read: see read_probe.py.
//
// One block per SM, one working thread per block. It issues 1-D bulk copies of CHUNK_BYTES into a ring in
// shared memory, at most `window` of them in flight, and sleeps in try_wait until the oldest has landed.
// Nothing is done with the data, except that the first word of every landed chunk is added up: a test can
// tell whether each chunk was read.
//
// Chunk c of block b lies at (c * blocks + b) * CHUNK_BYTES: all blocks together read one run of memory.

#ifndef CHUNK_BYTES
#define CHUNK_BYTES 16384
#endif

// A copy takes about a microsecond; a wait that needs this many sleeps will never end.
constexpr int MAX_WAITS = 1 << 22;

unsigned int shared_address(const void* pointer) { return (unsigned int)__cvta_generic_to_shared(pointer); }

void wait_for_copy(unsigned int barrier, unsigned int parity) {
  for (int i = 0; i < MAX_WAITS; i++) {
    unsigned int done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done) return;
  }
  __trap();
}

void start_copy(unsigned int target, const char* source, unsigned int barrier, unsigned long long policy) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(barrier), "r"(CHUNK_BYTES)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;"
      :
      : "r"(target), "l"(source), "r"(CHUNK_BYTES), "r"(barrier), "l"(policy)
      : "memory");
}

// data: num_chunks * CHUNK_BYTES bytes, 16-byte aligned. first_words: one sum per block.
// Dynamic shared memory: window + 1 chunks, then as many barriers of 8 bytes.
extern "C" __global__ void __launch_bounds__(32, 1)
    read_probe(const char* data, unsigned int num_chunks, unsigned int window, unsigned int* first_words) {
  extern __shared__ __align__(128) char ring[];
  if (threadIdx.x != 0) return;
  // One slot more than copies in flight: a landed chunk is looked at while the next copy is on its way.
  const unsigned int num_slots = window + 1;
  const unsigned int slots = shared_address(ring), barriers = slots + num_slots * CHUNK_BYTES;
  for (unsigned int i = 0; i < num_slots; i++)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  // The stream passes through L2 once; what other kernels keep there should stay.
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));

  const unsigned int own_chunks = (num_chunks + gridDim.x - 1 - blockIdx.x) / gridDim.x;
  const char* source = data + (unsigned long long)blockIdx.x * CHUNK_BYTES;
  unsigned int sum = 0, free_slot = 0, landing_slot = 0, parity = 0;
  for (unsigned int i = 0; i < own_chunks + window; i++) {
    if (i >= window) wait_for_copy(barriers + 8 * landing_slot, parity);
    if (i < own_chunks) {
      start_copy(slots + free_slot * CHUNK_BYTES, source, barriers + 8 * free_slot, policy);
      source += (unsigned long long)gridDim.x * CHUNK_BYTES;
      if (++free_slot == num_slots) free_slot = 0;
    }
    if (i >= window) {
      sum += *(volatile unsigned int*)(ring + landing_slot * CHUNK_BYTES);
      if (++landing_slot == num_slots) {
        landing_slot = 0;
        parity ^= 1;
      }
    }
  }
  first_words[blockIdx.x] = sum;
}
