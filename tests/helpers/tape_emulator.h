// Runs the whole weight-tape kernel on a CPU, with these functions in the place of its instructions.
//
// The threads of all blocks are coroutines that a seeded scheduler runs in random order, blocks unevenly.
// Bulk copies complete in any order, as late as they may; until then their target is NaN. Shared memory
// starts as NaN. A wrong parity, a stage reused or read too early, a missing arrival or wait thus ends in a
// deadlock, in a failed check or in wrong numbers. A thread that finds nothing new in the exchange sleeps
// until some thread stores there.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
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

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct uint2 {
  u32 x, y;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

namespace emulated {

struct Failure {
  std::string text;
};
inline void check(bool holds, const char* text) {
  if (!holds) throw Failure{text};
}

struct Thread {
  ucontext_t context;
  jmp_buf place;
  std::unique_ptr<char[]> stack;
  std::function<bool()> condition;
  bool started = false, done = false;
  int index = 0, block = 0;
};
struct Warp {
  u64 deposited[32], result[32];
  int arrived = 0, generation = 0;
};
struct Barrier {
  int count = 0, pending = 0, phase = 0;
  i64 bytes = 0;
};
struct Named {
  int arrived = 0, generation = 0;
};
struct Block {
  std::vector<u8> space;
  u8* memory;
  std::vector<Warp> warps;
  std::map<u32, Barrier> barriers;
  std::map<u32, Named> named;
};
struct Copy {
  u8* target;
  const u8* source;
  u32 bytes;
  Barrier* barrier;
};

constexpr int STACK = 1 << 15;
inline ucontext_t entry;
inline jmp_buf scheduler;
inline std::vector<std::unique_ptr<Thread>> threads;
inline std::vector<Block> blocks;
inline std::vector<Copy> copies;
inline std::mt19937 dice;
inline Thread* self;
inline u64 num_stores;  // to the exchange
inline std::string failure;
inline void (*body)();

inline Block& own_block() { return blocks[self->block]; }
inline u8* memory() { return own_block().memory; }
inline Warp& own_warp() { return own_block().warps[self->index / 32]; }

inline void until(std::function<bool()> condition) {
  if (condition()) return;
  self->condition = std::move(condition);
  if (_setjmp(self->place) == 0) _longjmp(scheduler, 1);
}

// All lanes of a warp meet; the last one runs `last`. Returns what all lanes brought.
inline const u64* meet(u64 value, const std::function<void(const u64*)>& last = {}) {
  Warp& warp = own_warp();
  warp.deposited[self->index % 32] = value;
  if (++warp.arrived == 32) {
    memcpy(warp.result, warp.deposited, sizeof warp.result);
    if (last) last(warp.result);
    warp.arrived = 0, ++warp.generation;
  } else {
    const int generation = warp.generation;
    until([&warp, generation] { return warp.generation != generation; });
  }
  return warp.result;
}

inline void arrive_named(u32 barrier, int count) {
  Named& own = own_block().named[barrier];
  if (++own.arrived == count) own.arrived = 0, ++own.generation;
}
inline void named_arrive(u32 barrier, int count) { arrive_named(barrier, count); }
inline void named_sync(u32 barrier, int count) {
  Named& own = own_block().named[barrier];
  const int generation = own.generation;
  arrive_named(barrier, count);
  until([&own, generation] { return own.generation != generation; });
}

inline Barrier& barrier_at(u32 address) {
  check(own_block().barriers.count(address), "no barrier here");
  return own_block().barriers[address];
}
inline void complete(Barrier& barrier) {
  check(barrier.pending >= 0, "more arrivals at a barrier than it expects");
  if (barrier.pending == 0 && barrier.bytes == 0) barrier.phase ^= 1, barrier.pending = barrier.count;
}
inline void perform_one() {
  std::swap(copies[dice() % copies.size()], copies.back());
  const Copy copy = copies.back();
  copies.pop_back();
  memcpy(copy.target, copy.source, copy.bytes);
  copy.barrier->bytes -= copy.bytes;
  complete(*copy.barrier);
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
inline u16 half_of(u32 word, int half) { return (u16)(word >> half * 16); }

struct Operands {
  float* d;
  u32 a[4], b[2];
};

inline void enter() {
  try {
    body();
  } catch (const Failure& reason) {
    failure = reason.text;
  }
  self->done = true;
  _longjmp(scheduler, 1);
}

inline void resume(Thread& thread) {
  self = &thread;
  if (_setjmp(scheduler)) return;
  if (thread.started) _longjmp(thread.place, 1);
  thread.started = true;
  setcontext(&thread.context);
}

inline void run(int num_blocks, int num_threads, u32 shared_bytes) {
  threads.clear(), blocks.clear(), copies.clear();
  blocks.resize(num_blocks);
  for (int b = 0; b < num_blocks; ++b) {
    blocks[b].space.assign(shared_bytes + 1024, 0xff);
    blocks[b].memory = (u8*)(((uintptr_t)blocks[b].space.data() + 1023) / 1024 * 1024);
    blocks[b].warps.assign(num_threads / 32, Warp{});
    for (int i = 0; i < num_threads; ++i) {
      threads.push_back(std::make_unique<Thread>());
      Thread& thread = *threads.back();
      thread.index = i, thread.block = b;
      thread.stack.reset(new char[STACK]);
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = STACK;
      makecontext(&thread.context, enter, 0);
    }
  }
  std::vector<int> order(num_blocks);
  for (int b = 0; b < num_blocks; ++b) order[b] = b;
  bool progress = true;
  while (progress) {
    progress = !copies.empty();
    for (int rest = copies.empty() ? 0 : (int)(dice() % (copies.size() / 2 + 2)); rest > 0 && !copies.empty();
         --rest)
      perform_one();
    std::shuffle(order.begin(), order.end(), dice);
    for (int b : order) {
      if (dice() % 4 == 0) {  // it is late
        for (int i = 0; i < num_threads; ++i) progress |= !threads[b * num_threads + i]->done;
        if (dice() % 64) continue;
      }
      const int start = dice() % num_threads;
      for (int i = 0; i < num_threads; ++i) {
        Thread& thread = *threads[b * num_threads + (start + i) % num_threads];
        if (thread.done || (thread.condition && !thread.condition())) continue;
        thread.condition = {};
        resume(thread);
        if (!failure.empty()) return;
        progress = true;
      }
    }
  }
}

}  // namespace emulated

struct Index {
  u32 x;
};
#define threadIdx (Index{(u32)emulated::self->index})
#define blockIdx (Index{(u32)emulated::self->block})

inline u32 shared_address(const void* p) { return (u32)((const u8*)p - emulated::memory()); }
struct Watch {
  void failed() {
    const u64 seen = emulated::num_stores;
    emulated::until([seen] { return emulated::num_stores != seen; });
  }
};

inline void barrier_init(u32 barrier, u32 count) {
  emulated::check(barrier % 8 == 0, "a barrier's address");
  emulated::own_block().barriers[barrier] = {(int)count, (int)count, 0, 0};
}
inline void barrier_arrive(u32 barrier) {
  emulated::Barrier& own = emulated::barrier_at(barrier);
  --own.pending;
  emulated::complete(own);
}
inline void barrier_expect(u32 barrier, u32 bytes) {
  emulated::barrier_at(barrier).bytes += bytes;
  barrier_arrive(barrier);
}
inline void barrier_wait(u32 barrier, u32 parity) {
  emulated::Barrier& own = emulated::barrier_at(barrier);
  emulated::until([&own, parity] { return own.phase != (int)parity; });
}
inline void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier, u64) {
  u8* const target = emulated::memory() + to;
  emulated::check(to % 16 == 0 && (uintptr_t)from % 16 == 0 && bytes % 16 == 0, "an unaligned copy");
  emulated::check(bytes > 0 && to + bytes <= STAGES * CHUNK_BYTES, "a copy beyond the ring");
  memset(target, 0xff, bytes);
  emulated::copies.push_back({target, (const u8*)from, bytes, &emulated::barrier_at(barrier)});
}
inline void consumers_sync() { emulated::named_sync(1, 512); }
inline void __syncthreads() { emulated::named_sync(0, NUM_THREADS); }
inline void __syncwarp() { emulated::meet(0); }
inline void __trap() { throw emulated::Failure{"trap"}; }

inline uint4 load_words4(const u32* p) {
  uint4 v;
  memcpy(&v, p, 16);
  return v;
}
inline u64 load_pair(const u32* p) {
  u64 v;
  memcpy(&v, p, 8);
  return v;
}
inline void store_pair(u32* p, u32 low, u32 high) {
  p[0] = low, p[1] = high;
  ++emulated::num_stores;
}
inline void store_half(u16* p, u16 v) {
  *p = v;
  ++emulated::num_stores;
}
inline bool has_nan(const uint4& a) {
  const u32 words[4] = {a.x, a.y, a.z, a.w};
  for (u32 word : words)
    for (int half = 0; half < 2; ++half)
      if (std::isnan(emulated::widen(emulated::half_of(word, half)))) return true;
  return false;
}
template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcg(const T* p) {
  return *p;
}
inline void prefetch_l2(const void* p) { (void)*(const volatile u8*)p; }

inline u32 __float_as_uint(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(u32 bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline float __int_as_float(u32 bits) { return __uint_as_float(bits); }
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
  const u64 bytes = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; ++i) r |= (u32)(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return r;
}
inline u32 pack_bf16(float low, float high) {
  return emulated::narrow(low) | (u32)emulated::narrow(high) << 16;
}
inline u32 multiply_pair(u32 a, u32 b) {
  using namespace emulated;
  return pack_bf16(widen(half_of(a, 0)) * widen(half_of(b, 0)), widen(half_of(a, 1)) * widen(half_of(b, 1)));
}
inline float exp2_fast(float x) { return std::exp2(x); }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
using std::max;
using std::min;
inline u32 min(u32 a, int b) { return std::min(a, (u32)b); }
inline u32 min(int a, u32 b) { return std::min((u32)a, b); }

template <typename T>
T from_lane(T value, int lane) {
  u64 bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = emulated::meet(bits)[lane];
  memcpy(&value, &bits, sizeof value);
  return value;
}
template <typename T>
T __shfl_xor_sync(u32, T value, int mask) {
  return from_lane(value, emulated::self->index % 32 ^ mask);
}
template <typename T>
T __shfl_sync(u32, T value, int lane) {
  return from_lane(value, lane);
}
inline int __reduce_add_sync(u32, int value) {
  const u64* all = emulated::meet((u32)value);
  int sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += (int)all[lane];
  return sum;
}

inline void multiply_add(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  emulated::Operands own{d, {a0, a1, a2, a3}, {b0, b1}};
  emulated::meet((u64)&own, [](const u64* lanes) {
    using namespace emulated;
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const Operands& part = *(const Operands*)lanes[lane];
      for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < 4; ++i)
          a[lane / 4 + i % 2 * 8][lane % 4 * 2 + half + i / 2 * 8] = widen(half_of(part.a[i], half));
        for (int i = 0; i < 2; ++i)
          b[lane % 4 * 2 + half + i * 8][lane / 4] = widen(half_of(part.b[i], half));
      }
    }
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        float& sum = ((const Operands*)lanes[lane])->d[i];
        for (int k = 0; k < 16; ++k) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
      }
  });
}
inline u32 transpose8(u32 block) {
  const u64* lanes = emulated::meet(block);
  const int lane = emulated::self->index % 32, row = lane / 4, column = lane % 4 * 2;
  u32 r = 0;
  for (int half = 0; half < 2; ++half)
    r |= (u32)emulated::half_of((u32)lanes[(column + half) * 4 + row / 2], row % 2) << half * 16;
  return r;
}
