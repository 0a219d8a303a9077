// Runs tape.cu and experts.cu on a CPU: this file stands before them, weight_tape.py puts calls of
// emulated::ptx in the place of their inline assembly.
//
// All blocks' threads are coroutines that a seeded scheduler runs warp by warp in random order; blocks stand still
// for a while now and then. Copies complete in any order, some of them late; what is being copied to is NaN
// until then, and so is shared memory at first. A wrong parity, a stage that is refilled or read too early, a vector
// that is emptied too late thus end in a deadlock or in wrong numbers.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define threadIdx emulated::thread_index()
#define blockIdx emulated::block_index()

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulated {

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;

struct Failure {
  std::string text;
};
inline void check(bool holds, const char* text) {
  if (!holds) throw Failure{text};
}

struct Barrier {
  int count = 0, pending = 0;
  u32 phase = 0;
  int64_t bytes = 0;
  void settle() {
    if (pending == 0 && bytes == 0) phase++, pending = count;
  }
};
struct Named {
  int arrived = 0;
  u32 generation = 0;
};
struct Warp {
  u64 deposited[32], result[32];
  int arrived = 0;
  u32 generation = 0;
};
struct Block {
  std::vector<u8> space;
  u8* shared;
  std::map<u32, Barrier> barriers;
  Named named[16];
  std::vector<Warp> warps;
  int standing = 0;
};
struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  const u32* waits_for = nullptr;  // until it is not `old` any more
  u32 old = 0;
  bool done = false;
  int index = 0, block = 0;
};
struct Copy {
  u8* target;
  const u8* source;
  u32 bytes, barrier;
  int block;
};

inline ucontext_t scheduler;
inline std::vector<Thread> threads;
inline std::vector<Block> blocks;
inline std::vector<Copy> copies;
inline std::mt19937 dice;
inline Thread* self;
inline std::string failure;
inline void (*body)();
constexpr size_t STACK = 96 << 10;
constexpr u32 SHARED_BASE = 1024;

inline void yield() { swapcontext(&self->context, &scheduler); }
inline void wait_for(const u32& generation, u32 old) {
  self->waits_for = &generation, self->old = old;
  yield();
}
inline Block& block() { return blocks[self->block]; }
inline Warp& warp() { return block().warps[self->index / 32]; }
struct Index {
  u32 x;
};
inline Index thread_index() { return {(u32)self->index}; }
inline Index block_index() { return {(u32)self->block}; }
inline u8* shared_memory() { return block().shared; }

// All lanes of a warp meet; returns what they brought.
inline const u64* meet(u64 value) {
  Warp& w = warp();
  w.deposited[self->index % 32] = value;
  if (++w.arrived == 32) {
    memcpy(w.result, w.deposited, sizeof w.result);
    w.arrived = 0, w.generation++;
  } else
    wait_for(w.generation, w.generation);
  return w.result;
}
inline void arrive(int id, int count) {
  Named& named = block().named[id];
  if (++named.arrived == count) named.arrived = 0, named.generation++;
}
inline void sync(int id, int count) {
  Named& named = block().named[id];
  const u32 generation = named.generation;
  arrive(id, count);
  if (named.generation == generation) wait_for(named.generation, generation);
}

inline float widen(u16 bits) {
  const u32 word = (u32)bits << 16;
  float value;
  memcpy(&value, &word, 4);
  return value;
}
inline u16 narrow(float value) {
  u32 word;
  memcpy(&word, &value, 4);
  if (value != value) return 0x7fff;
  return (u16)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

struct Operands {
  float* d[4];
  u32 a[4], b[2];
};

namespace ptx {
inline void globaltimer(u64& t) { t = 1; }
inline void mbarrier_init(u32 b, u32 count) {
  Barrier& barrier = block().barriers[b];
  barrier.count = barrier.pending = (int)count;
}
inline Barrier& barrier_at(u32 b) {
  auto found = block().barriers.find(b);
  check(found != block().barriers.end(), "no barrier here");
  return found->second;
}
inline void mbarrier_arrive(u32 b) {
  Barrier& barrier = barrier_at(b);
  check(barrier.pending > 0, "more arrivals than the barrier counts");
  barrier.pending--, barrier.settle();
}
inline void mbarrier_expect(u32 b, u32 bytes) {
  barrier_at(b).bytes += bytes;
  mbarrier_arrive(b);
}
inline void mbarrier_try_wait(u32& done, u32 b, u32 parity) { done = (barrier_at(b).phase & 1) != parity; }
inline void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier, u64) {
  check(to % 16 == 0 && (uintptr_t)from % 16 == 0 && bytes % 16 == 0, "an unaligned copy");
  u8* target = block().shared + (to - SHARED_BASE);
  memset(target, 0xff, bytes);
  copies.push_back({target, (const u8*)from, bytes, barrier, self->block});
}
inline void load4(u32& x, u32& y, u32& z, u32& w, const u32* p) { x = p[0], y = p[1], z = p[2], w = p[3]; }
inline void load2(u64& v, const u32* p) { memcpy(&v, p, 8); }
inline void store2(u32* p, u64 v) { memcpy(p, &v, 8); }
inline void store_half(u16* p, u16 v) { *p = v; }
inline void any_nan(u32& is, u32 x, u32 y, u32 z, u32 w) {
  is = 0;
  for (u32 word : {x, y, z, w})
    is |= std::isnan(widen((u16)word)) || std::isnan(widen((u16)(word >> 16)));
}
inline void pack(u32& r, float high, float low) { r = (u32)narrow(high) << 16 | narrow(low); }
inline void multiply2(u32& r, u32 a, u32 b) {
  pack(r, widen((u16)(a >> 16)) * widen((u16)(b >> 16)), widen((u16)a) * widen((u16)b));
}
inline void exp2(float& y, float x) { y = std::exp2(x); }
inline void mma(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  Operands own{{&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}};
  const u64* lanes = meet((u64)&own);
  const int lane = self->index % 32;
  float results[4];
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    float sum = *own.d[i];
    for (int term = 0; term < 16; ++term) {
      const Operands& left = *(const Operands*)lanes[row % 8 * 4 + term % 8 / 2];
      const Operands& right = *(const Operands*)lanes[column * 4 + term % 8 / 2];
      const int shift = term % 2 * 16;
      sum += widen((u16)(left.a[row / 8 + term / 8 * 2] >> shift)) * widen((u16)(right.b[term / 8] >> shift));
    }
    results[i] = sum;
  }
  meet(0);  // the operands are on the lanes' stacks
  for (int i = 0; i < 4; ++i) *own.d[i] = results[i];
}
inline void transpose(u32& r, u32 v) {
  const u64* lanes = meet(v);
  const int lane = self->index % 32, row = lane / 4, column = lane % 4 * 2;
  r = 0;
  for (int half = 0; half < 2; ++half)
    r |= ((u32)lanes[(column + half) * 4 + row / 2] >> row % 2 * 16 & 0xffff) << half * 16;
}
inline void tid(int& t) { t = self->index; }
inline void ctaid(u32& t) { t = (u32)self->block; }
inline void policy(u64& p) { p = 0; }
inline void bar_sync(int id, int count) { sync(id, count); }
inline void bar_arrive(int id, int count) { arrive(id, count); }
template <class... Any>
inline void nothing(const Any&...) {}
}  // namespace ptx

inline void start() {
  try {
    body();
  } catch (const Failure& failed) {
    if (failure.empty()) failure = failed.text;
  }
  self->done = true;
  swapcontext(&self->context, &scheduler);
}

inline void complete_copies() {
  for (size_t i = 0; i < copies.size();) {
    if (dice() % 6) {
      ++i;
      continue;
    }
    const Copy copy = copies[i];
    copies[i] = copies.back();
    copies.pop_back();
    memcpy(copy.target, copy.source, copy.bytes);
    Barrier& barrier = blocks[copy.block].barriers[copy.barrier];
    barrier.bytes -= copy.bytes, barrier.settle();
  }
}

inline void run(int num_blocks, int num_threads, u32 shared_bytes, int max_rounds) {
  failure.clear(), copies.clear();
  blocks = std::vector<Block>(num_blocks);
  for (Block& b : blocks) {
    b.space.assign(shared_bytes + 1024, 0xff);
    b.shared = (u8*)(((uintptr_t)b.space.data() + 1023) / 1024 * 1024);
    b.warps.resize(num_threads / 32);
  }
  threads = std::vector<Thread>(num_blocks * num_threads);
  for (size_t i = 0; i < threads.size(); ++i) {
    Thread& thread = threads[i];
    thread.index = (int)i % num_threads, thread.block = (int)i / num_threads;
    thread.stack.reset(new char[STACK]);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = STACK;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, start, 0);
  }
  std::vector<int> order(threads.size() / 32);
  for (size_t i = 0; i < order.size(); ++i) order[i] = (int)i;
  size_t num_done = 0;
  for (int round = 0; num_done < threads.size() && failure.empty(); ++round) {
    if (round == max_rounds) {
      failure = "stuck";
      break;
    }
    std::shuffle(order.begin(), order.end(), dice);
    complete_copies();
    for (Block& b : blocks) b.standing = b.standing ? b.standing - 1 : dice() % 100 ? 0 : (int)(dice() % 100);
    for (int w : order) {
      if (blocks[w * 32 / num_threads].standing || dice() % 8 == 0) continue;
      for (int lane = 0; lane < 32 && failure.empty(); ++lane) {
        Thread& thread = threads[w * 32 + lane];
        if (thread.done || (thread.waits_for && *thread.waits_for == thread.old)) continue;
        thread.waits_for = nullptr;
        self = &thread;
        swapcontext(&scheduler, &thread.context);
        num_done += thread.done;
      }
    }
  }
  if (failure.empty() && !copies.empty()) failure = "a copy that nobody waited for";
}

}  // namespace emulated

// ---------------------------------------------------------------- CUDA's functions

inline unsigned long long __cvta_generic_to_shared(const void* p) {
  return (unsigned long long)((const unsigned char*)p - emulated::shared_memory()) + emulated::SHARED_BASE;
}
template <class T>
inline T __ldg(const T* p) {
  return *p;
}
template <class T>
inline T __ldcg(const T* p) {
  return *p;
}
inline float __uint_as_float(unsigned v) {
  float f;
  memcpy(&f, &v, 4);
  return f;
}
inline float __int_as_float(int v) { return __uint_as_float((unsigned)v); }
inline unsigned __float_as_uint(float f) {
  unsigned v;
  memcpy(&v, &f, 4);
  return v;
}
template <class T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = emulated::meet(bits)[(emulated::self->index % 32) ^ mask];
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline int __reduce_max_sync(unsigned, int value) {
  const unsigned long long* lanes = emulated::meet((unsigned long long)(long long)value);
  int found = (int)lanes[0];
  for (int i = 1; i < 32; ++i) found = std::max(found, (int)lanes[i]);
  return found;
}
inline int __reduce_add_sync(unsigned, int value) {
  const unsigned long long* lanes = emulated::meet((unsigned long long)(long long)value);
  int sum = 0;
  for (int i = 0; i < 32; ++i) sum += (int)lanes[i];
  return sum;
}
template <class T>
inline T __shfl_sync(unsigned, T value, int lane) {
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = emulated::meet(bits)[lane];
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const unsigned long long* lanes = emulated::meet(value);
  unsigned mask = 0;
  for (int i = 0; i < 32; ++i) mask |= (unsigned)lanes[i] << i;
  return mask;
}
inline void __syncwarp() { emulated::meet(0); }
inline void __syncthreads() { emulated::sync(15, (int)emulated::block().warps.size() * 32); }
inline void __trap() { throw emulated::Failure{"trap"}; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= (unsigned)(both >> (selector >> i * 4 & 7) * 8 & 0xff) << i * 8;
  return r;
}
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
