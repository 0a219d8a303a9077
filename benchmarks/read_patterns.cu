// Reads pieces of memory in a given order, into a ring in shared memory, as fast as they come: see
// gpu_read_patterns.py.
//
// Each block has a list of pieces. One warp asks for them: a lane has each 32nd number, loaded a batch ahead,
// and the first lane issues the copies, PIECES of them to a stage, which one barrier counts. Nothing is done
// with a stage when it has come but to use it again.
//
// Macros: PIECE_BYTES, PIECES (of a stage, a divisor of 32), STAGES, STREAMING (leave the L2 cache first).

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 STAGE_BYTES = PIECE_BYTES * PIECES;
constexpr int MAX_WAITS = 1 << 22;

__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
  for (int i = 0; i < MAX_WAITS; ++i) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done) return;
  }
  __trap();
}

// order: [blocks][count] numbers of pieces of `data`; count is a multiple of 32. first_words: a sum for each
// block.
extern "C" __global__ void __launch_bounds__(32)
    read_pieces(const char* data, const u32* order, int count, u32* first_words) {
  extern __shared__ __align__(128) char ring[];
  const int lane = threadIdx.x;
  const u32 base = (u32)__cvta_generic_to_shared(ring), barriers = base + STAGES * STAGE_BYTES;
  if (lane == 0) {
    for (int i = 0; i < STAGES; ++i)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  u64 policy;
#if STREAMING
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#else
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
#endif
  order += (u64)blockIdx.x * count;
  u32 sum = 0, number = 0, next = order[lane];
  for (int first = 0; first < count; first += 32) {
    const u32 own = next;
    if (first + 32 < count) next = order[first + 32 + lane];
    for (int piece = 0; piece < 32; piece += PIECES, ++number) {
      const u32 stage = number % STAGES, lap = number / STAGES, barrier = barriers + 8 * stage;
      if (lap > 0) {
        wait_for(barrier, lap + 1 & 1);
        sum += *(volatile u32*)(ring + stage * STAGE_BYTES);
      }
      if (lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(STAGE_BYTES)
                     : "memory");
      for (int i = 0; i < PIECES; ++i) {
        const u32 place = __shfl_sync(~0u, own, piece + i);
        if (lane == 0)
          asm volatile(
              "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
              "[%0], [%1], %2, [%3], %4;" ::"r"(base + stage * STAGE_BYTES + i * PIECE_BYTES),
              "l"(data + (u64)place * PIECE_BYTES), "r"(PIECE_BYTES), "r"(barrier), "l"(policy)
              : "memory");
      }
    }
  }
  const u32 left = number < STAGES ? number : STAGES;
  for (u32 i = number - left; i < number; ++i) wait_for(barriers + 8 * (i % STAGES), i / STAGES & 1);
  if (lane == 0) first_words[blockIdx.x] = sum;
}
