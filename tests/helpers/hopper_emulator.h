// Runs attention.cu of kernels/hopper_prefill on a CPU, with these functions in the place of instructions.cu.
//
// The threads of a block are coroutines that a seeded scheduler runs in random order. What Hopper does
// behind the threads' backs happens as late, as early or as much out of order as it may: copies complete
// in any order, and products run when they are issued or when they are waited for (reading operands and
// writing results in that moment). A wrong parity, a buffer that is reused or read too early, a missing
// fence or wait thus ends in a deadlock, in a failed check or in wrong numbers. Shared memory starts as
// NaN, and so does what is being copied to.
//
// Layouts are the documented ones: rows of 128 bytes whose 16-byte pieces are permuted by address bits 7
// to 9, for copies and operands alike.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEV inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define NEG_INF (-INFINITY)

struct alignas(64) TensorMap {
  u64 words[16];  // address, dimensions, then three each: sizes, bytes from one to the next, sizes of a box
};

namespace emulated {

struct Failure {
  std::string text;
};
inline void check(bool holds, const char* text) {
  if (!holds) throw Failure{text};
}

constexpr u32 BASE = 528;  // the block's shared memory begins at an odd place
struct Product {
  float* d;
  const u32* registers;  // or null
  u64 a, b;
  int n;
  bool accumulate;
};
struct Stored {
  u32 address, words[4];
};
struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  std::function<bool()> condition;
  bool done = false, fenced = false;
  int index = 0;
  std::vector<Product> open;
  std::deque<std::vector<Product>> groups;
  std::vector<Stored> stored;  // what the asynchronous units do not see yet
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
  std::set<int> arrived;
  int generation = 0;
};
struct Copy {
  u32 target;
  TensorMap map;
  int at[3];
  u32 barrier;
  const u8* run = nullptr;  // no box: so many bytes as they are
  u32 bytes = 0;
};

inline ucontext_t scheduler;
inline std::vector<std::unique_ptr<Thread>> threads;
inline std::vector<Warp> warps;
inline std::map<u32, Barrier> barriers;
inline std::map<u32, Named> named;
inline std::vector<Copy> copies;
inline std::vector<u8> shared;
inline std::mt19937 dice;
inline Thread* self;
inline int block, blocks;
inline std::string failure;
inline void (*body)();

inline void until(std::function<bool()> condition) {
  if (condition()) return;
  self->condition = std::move(condition);
  swapcontext(&self->context, &scheduler);
}
inline u8* at(u32 address, u32 bytes) {
  check(address >= BASE && address + bytes <= BASE + shared.size(), "outside of shared memory");
  return shared.data() + (address - BASE);
}
inline u32 permuted(u32 address) { return address ^ (address >> 7 & 7) << 4; }

inline float widen(u16 bits) {
#if HALF
  _Float16 value;
  memcpy(&value, &bits, 2);
  return (float)value;
#else
  u32 word = (u32)bits << 16;
  float value;
  memcpy(&value, &word, 4);
  return value;
#endif
}
inline u16 narrow(float value) {
#if HALF
  _Float16 half = (_Float16)value;
  u16 bits;
  memcpy(&bits, &half, 2);
  return bits;
#else
  u32 word;
  memcpy(&word, &value, 4);
  if (value != value) return 0x7fff;
  return (u16)((word + 0x7fff + (word >> 16 & 1)) >> 16);
#endif
}

// All lanes of a warp meet; the last one runs `last`. Returns what all lanes brought.
inline const u64* meet(u64 value, const std::function<void()>& last = {}) {
  Warp& warp = warps[self->index / 32];
  warp.deposited[self->index % 32] = value;
  if (++warp.arrived == 32) {
    memcpy(warp.result, warp.deposited, sizeof warp.result);
    if (last) last();
    warp.arrived = 0, ++warp.generation;
  } else {
    const int generation = warp.generation;
    until([&warp, generation] { return warp.generation != generation; });
  }
  return warp.result;
}

inline void complete(Barrier& barrier) {
  check(barrier.pending >= 0, "more arrivals at a barrier than it expects");
  if (barrier.pending == 0 && barrier.bytes == 0) barrier.phase ^= 1, barrier.pending = barrier.count;
}
inline Barrier& barrier_at(u32 address) {
  check(barriers.count(address), "no barrier here");
  return barriers[address];
}

inline void for_each_row(const Copy& copy, const std::function<void(u32 target, const u16* source)>& visit) {
  const u64* words = copy.map.words;
  const int rank = (int)words[1];
  const u64 *sizes = words + 2, *steps = words + 5, *box = words + 8;
  check(box[0] == 64 && steps[0] == 2, "boxes of 64 columns");
  for (u64 z = 0; z < (rank > 2 ? box[2] : 1); ++z)
    for (u64 y = 0; y < box[1]; ++y) {
      const i64 row = copy.at[1] + (i64)y, slice = rank > 2 ? copy.at[2] + (i64)z : 0;
      const bool inside = row < (i64)sizes[1] && (rank < 3 || slice < (i64)sizes[2]);
      const i64 offset = copy.at[0] * 2 + row * (i64)steps[1] + (rank > 2 ? slice * (i64)steps[2] : 0);
      const u8* source = (const u8*)words[0] + offset;
      visit(copy.target + (u32)(z * box[1] + y) * 128, inside ? (const u16*)source : nullptr);
    }
}
inline void perform(const Copy& copy) {
  if (copy.run) {
    memcpy(at(copy.target, copy.bytes), copy.run, copy.bytes);
    Barrier& barrier = barrier_at(copy.barrier);
    barrier.bytes -= copy.bytes;
    complete(barrier);
    return;
  }
  i64 bytes = 0;
  for_each_row(copy, [&](u32 target, const u16* source) {
    for (u32 c = 0; c < 64; ++c) {
      const u16 value = source && copy.at[0] + (i64)c < (i64)copy.map.words[2] ? source[c] : 0;
      memcpy(at(permuted(target + c * 2), 2), &value, 2);
    }
    bytes += 128;
  });
  Barrier& barrier = barrier_at(copy.barrier);
  barrier.bytes -= bytes;
  complete(barrier);
}
inline void enqueue(u32 target, const TensorMap& map, int x, int y, int z, u32 barrier) {
  check(target % 1024 == 0, "a box begins where the permutation does");
  Copy copy{target, map, {x, y, z}, barrier};
  for_each_row(copy, [](u32 row, const u16*) { memset(at(row, 128), 0xff, 128); });
  copies.push_back(copy);
}

struct Operand {
  u32 address, across, down;
  // The blocks of a cluster are one here: addresses have two bits more than on the device.
  explicit Operand(u64 bits)
      : address((bits & 0xffff) << 4), across((bits >> 16 & 0x3fff) << 4), down((bits >> 32 & 0x3fff) << 4) {
    check(bits >> 62 == 1, "operands are permuted as rows of 128 bytes");
  }
  float value(u32 offset) const {
    u16 bits;
    memcpy(&bits, at(permuted(address + offset), 2), 2);
    return widen(bits);
  }
  float row_term(int row, int term) const { return value(row / 8 * down + row % 8 * 128 + term * 2); }
  float term_column(int term, int column) const {
    return value(column / 64 * across + term / 8 * down + term % 8 * 128 + column % 64 * 2);
  }
};

// The oldest group of products of a warp.
inline void run_group(int warp) {
  std::vector<Product> groups[32];
  for (int lane = 0; lane < 32; ++lane) {
    Thread& thread = *threads[warp * 32 + lane];
    check(!thread.groups.empty(), "lanes have issued different products");
    groups[lane] = std::move(thread.groups.front());
    thread.groups.pop_front();
  }
  for (size_t index = 0; index < groups[0].size(); ++index) {
    const Product& first = groups[0][index];
    static float a[16][16], b[16][256];
    const Operand right(first.b);
    for (int lane = 0; lane < 32; ++lane)
      check(groups[lane].size() == groups[0].size() && groups[lane][index].b == first.b &&
                groups[lane][index].a == first.a && groups[lane][index].n == first.n,
            "lanes have issued different products");
    for (int term = 0; term < 16; ++term)
      for (int column = 0; column < first.n; ++column)
        b[term][column] = first.registers ? right.term_column(term, column) : right.row_term(column, term);
    if (first.registers) {
      for (int row = 0; row < 16; ++row)
        for (int term = 0; term < 16; ++term) {
          const Product& own = groups[row % 8 * 4 + term % 8 / 2][index];
          const u32 word = own.registers[row / 8 + term / 8 * 2];
          a[row][term] = widen((u16)(word >> term % 2 * 16));
        }
    } else {
      const Operand left(first.a);
      for (int row = 0; row < 16; ++row)
        for (int term = 0; term < 16; ++term) a[row][term] = left.row_term(warp % 4 * 16 + row, term);
    }
    for (int row = 0; row < 16; ++row)
      for (int column = 0; column < first.n; ++column) {
        const Product& own = groups[row % 8 * 4 + column % 8 / 2][index];
        float& d = own.d[column / 8 * 4 + row / 8 * 2 + column % 2];
        float sum = own.accumulate ? d : 0;
        for (int term = 0; term < 16; ++term) sum += a[row][term] * b[term][column];
        d = sum;
      }
  }
}

inline void enter() {
  try {
    body();
  } catch (const Failure& reason) {
    failure = reason.text;
  }
  self->done = true;
  swapcontext(&self->context, &scheduler);
}

inline void run_block(int count, u32 shared_bytes) {
  threads.clear(), barriers.clear(), named.clear(), copies.clear();
  shared.assign(shared_bytes, 0xff);
  warps.assign(count / 32, Warp{});
  for (int i = 0; i < count; ++i) {
    threads.push_back(std::make_unique<Thread>());
    Thread& thread = *threads.back();
    thread.index = i;
    thread.stack.reset(new char[1 << 16]);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = 1 << 16;
    thread.context.uc_link = &scheduler;
    makecontext(&thread.context, enter, 0);
  }
  std::vector<int> order(count);
  for (int i = 0; i < count; ++i) order[i] = i;
  for (bool progress = true; progress;) {
    progress = false;
    // Most copies take long.
    while (!copies.empty() && dice() % 8 == 0) {
      std::swap(copies[dice() % copies.size()], copies.back());
      const Copy copy = copies.back();
      copies.pop_back();
      perform(copy);
    }
    progress = !copies.empty();
    const int start = dice() % count, step = dice() % 2 ? 1 : count - 1;
    for (int i = 0, index = start; i < count; ++i, index = (index + step) % count) {
      Thread& thread = *threads[index];
      if (thread.done || (thread.condition && !thread.condition())) continue;
      if (dice() % 16 == 0) {  // it is late
        progress = true;
        continue;
      }
      thread.condition = {};
      self = &thread;
      swapcontext(&scheduler, &thread.context);
      if (!failure.empty()) return;
      progress = true;
    }
  }
  for (const auto& thread : threads) {
    if (!thread->done) failure = "deadlock";
    else if (!thread->groups.empty()) failure = "products that nobody has waited for";
  }
  for (const auto& [address, barrier] : barriers)
    if (failure.empty() && barrier.bytes) failure = "a copy that nobody has waited for";
  for (const auto& [index, barrier] : named)
    if (failure.empty() && !barrier.arrived.empty()) failure = "a named barrier is left half full";
}

}  // namespace emulated

inline int thread_index() { return emulated::self->index; }
inline int lane_index_again() { return emulated::self->index % 32; }
inline int block_index() { return emulated::block; }
inline int num_blocks() { return emulated::blocks; }
inline u32 shared_base() { return emulated::BASE; }
inline void store_shared(u32 address, int value) { memcpy(emulated::at(address, 4), &value, 4); }
inline int load_shared(u32 address) {
  int value;
  memcpy(&value, emulated::at(address, 4), 4);
  return value;
}
inline void store_shared_16_bytes(u32 address, u32 a, u32 b, u32 c, u32 d) {
  emulated::at(address, 16);
  emulated::check(address % 16 == 0, "an unaligned store");
  emulated::self->stored.push_back({address, {a, b, c, d}});
}
inline void store_shared_zeros(u32 address) { store_shared_16_bytes(address, 0, 0, 0, 0); }
inline void fence_shared() {
  for (const auto& [address, words] : emulated::self->stored) memcpy(emulated::at(address, 16), words, 16);
  emulated::self->stored.clear();
}
inline void stay_before(float, u32 scratch) { emulated::at(scratch, 4); }

inline void barrier_init(u32 barrier, u32 count) {
  emulated::at(barrier, 8);
  emulated::check(barrier % 8 == 0, "a barrier's address");
  emulated::barriers[barrier] = {(int)count, (int)count, 0, 0};
}
inline void publish_barriers() {}
inline void arrive(u32 barrier) {
  emulated::Barrier& own = emulated::barrier_at(barrier);
  --own.pending;
  emulated::complete(own);
}
inline void arrive_expecting(u32 barrier, u32 bytes) {
  emulated::barrier_at(barrier).bytes += bytes;
  arrive(barrier);
}
inline void wait(u32 barrier, u32 parity) {
  emulated::Barrier& own = emulated::barrier_at(barrier);
  emulated::until([&own, parity] { return own.phase != (int)parity; });
}
inline void arrive_named(u32 barrier, u32 count) {
  emulated::Named& own = emulated::named[barrier];
  emulated::check(barrier < 16, "there are 16 named barriers");
  emulated::check(own.arrived.insert(emulated::self->index).second, "a thread is twice at a named barrier");
  if (own.arrived.size() == count) own.arrived.clear(), ++own.generation;
}
inline void named_arrive(u32 barrier, u32 count) {
  // All lanes at once, as on the device.
  emulated::meet(0);
  arrive_named(barrier, count);
}
inline void named_sync(u32 barrier, u32 count) {
  emulated::meet(0);
  emulated::Named& own = emulated::named[barrier];
  const int generation = own.generation;
  arrive_named(barrier, count);
  emulated::until([&own, generation] { return own.generation != generation; });
}

inline void copy_box(u32 target, const TensorMap& map, int x, int y, u32 barrier) {
  emulated::enqueue(target, map, x, y, 0, barrier);
}
inline void copy_box(u32 target, const TensorMap& map, int x, int y, int z, u32 barrier) {
  emulated::enqueue(target, map, x, y, z, barrier);
}
inline void fetch_map(const TensorMap&) {}
template <int COUNT>
void release_registers() {}
template <int COUNT>
void claim_registers() {}

inline void products_begin() { emulated::self->fenced = true; }
inline void products_commit() {
  emulated::Thread& thread = *emulated::self;
  thread.fenced = false;
  thread.groups.push_back(std::move(thread.open));
  thread.open.clear();
  emulated::meet(0, [] {
    const int warp = emulated::self->index / 32;
    if (emulated::dice() % 2)
      while (!emulated::self->groups.empty()) emulated::run_group(warp);
  });
}
template <int LEFT>
void products_wait() {
  emulated::meet(0, [] {
    const int warp = emulated::self->index / 32;
    while (emulated::self->groups.size() > LEFT) emulated::run_group(warp);
  });
}
template <typename T, size_t COUNT>
void hold(T (&)[COUNT]) {}

struct Operand {
  u32 low;
  Operand(u32 address, u32 across) : low(across >> 4 << 16 | address >> 4) {}
  u64 behind(u32 bytes) const { return (u64)(1 << 30 | 1024 >> 4) << 32 | (low + (bytes >> 4)); }
};
template <int N>
void multiply_shared(float (&d)[N / 2], u64 a, u64 b, int accumulate) {
  emulated::check(emulated::self->fenced, "products without products_begin");
  emulated::self->open.push_back({d, nullptr, a, b, N, accumulate != 0});
}
template <int N>
void multiply_registers(float (&d)[N / 2], const u32 (&a)[4], u64 b) {
  emulated::check(emulated::self->fenced, "products without products_begin");
  emulated::self->open.push_back({d, a, 0, b, N, true});
}

inline float exp2_fast(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1 / x; }
inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline u32 bits_of(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float float_of(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline u32 pack(float low, float high) { return emulated::narrow(low) | (u32)emulated::narrow(high) << 16; }
template <typename T>
T exchange(T value, int lane_mask) {
  u64 bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = emulated::meet(bits)[emulated::self->index % 32 ^ lane_mask];
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline void load_matrices(u32 (&words)[4], u32 row) {
  const int lane = emulated::self->index % 32;
  emulated::check(row % 16 == 0, "rows of matrices are aligned");
  const u64* rows = emulated::meet(row);
  for (int i = 0; i < 4; ++i) memcpy(&words[i], emulated::at((u32)rows[i * 8 + lane / 4] + lane % 4 * 4, 4), 4);
}
inline void multiply_warp(float* d, const u32 (&a)[4], u32 b_first, u32 b_last) {
  const int lane = emulated::self->index % 32;
  u32 words[6][32];
  for (int i = 0; i < 6; ++i) {
    const u64* all = emulated::meet(i < 4 ? a[i] : i == 4 ? b_first : b_last);
    for (int other = 0; other < 32; ++other) words[i][other] = (u32)all[other];
  }
  const auto half = [](u32 word, int index) { return emulated::widen((u16)(word >> index % 2 * 16)); };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, column = lane % 4 * 2 + i % 2;
    for (int term = 0; term < 16; ++term) {
      const int place = term % 8 / 2;
      d[i] += half(words[i / 2 + term / 8 * 2][row * 4 + place], term) *
              half(words[4 + term / 8][column * 4 + place], term);
    }
  }
}
inline bool is_elected() { return emulated::meet(0) && emulated::self->index % 32 == 0; }
inline u32 broadcast(u32 value, int lane) { return (u32)emulated::meet(value)[lane]; }
inline int shift_up(int value, int distance) {
  const int lane = emulated::self->index % 32;
  return (int)emulated::meet((u32)value)[lane < distance ? lane : lane - distance];
}
inline u32 votes(bool vote) {
  const u64* all = emulated::meet(vote);
  u32 word = 0;
  for (int lane = 0; lane < 32; ++lane) word |= (u32)all[lane] << lane;
  return word;
}
inline int first_bit(u32 word) { return __builtin_ffs((int)word) - 1; }
inline int leading_zeros(u32 word) { return word ? __builtin_clz(word) : 32; }
inline u32 take_number(u32* counter, u32 last) {
  const u32 number = *counter;
  *counter = number >= last ? 0 : number + 1;
  return number;
}
inline void store_16_bytes(void* place, u32 a, u32 b, u32 c, u32 d) {
  const u32 words[4] = {a, b, c, d};
  emulated::check((uintptr_t)place % 16 == 0, "an unaligned store");
  memcpy(place, words, 16);
}
template <typename T>
T load_constant(const T* place) {
  return *place;
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float max(float a, float b) { return std::fmax(a, b); }
