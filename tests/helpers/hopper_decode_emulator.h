// What hopper_decode/instructions.cu adds, for hopper_emulator.h, which stands before it. The instructions of a
// warp are computed by the last lane to come.
//
// What the preceding kernel writes is NaN until a thread of the block has waited for it.

#include <algorithm>

namespace emulated {

struct Written {
  u8* target;
  const u8* source;
  u64 bytes;
};
inline const Written* written;
inline int num_written;
inline bool predecessor_is_complete;
inline int predecessor_rounds;

inline void forget_predecessor() {
  predecessor_is_complete = false;
  predecessor_rounds = (int)(dice() % 400);
  for (int i = 0; i < num_written; ++i) memset(written[i].target, 0xff, written[i].bytes);
}

struct Blocks {
  u32* registers;
  u32 address;
};
inline u16 value_of(const u32* word, int half) { return (u16)(*word >> half * 16); }
inline void set_value(u32* word, int half, u16 value) {
  *word = (*word & (half ? 0xffffu : 0xffff0000u)) | (u32)value << half * 16;
}

inline void load_four_blocks(u32 (&blocks)[4], u32 address, bool is_transposed) {
  check(address % 16 == 0, "an unaligned row");
  Blocks own{blocks, address};
  meet((u64)&own, [is_transposed] {
    // The others' deposits, and this lane's, are complete when this runs.
    const u64* lanes = warps[self->index / 32].deposited;
    for (int block = 0; block < 4; ++block)
      for (int row = 0; row < 8; ++row) {
        const u32 from = ((const Blocks*)lanes[block * 8 + row])->address;
        for (int column = 0; column < 8; ++column) {
          u16 value;
          memcpy(&value, at(from + column * 2, 2), 2);
          const int r = is_transposed ? column : row, c = is_transposed ? row : column;
          set_value(((const Blocks*)lanes[r * 4 + c / 2])->registers + block, c % 2, value);
        }
      }
  });
}

struct Operands {
  float* d;
  const u32* a;
  u32 b[2];
};

}  // namespace emulated

inline void launch_dependents() {}
inline void wait_for_predecessor() {
  // It lasts a while: others may go on.
  for (int round = 0; round < emulated::predecessor_rounds; ++round) {
    int asked = 0;
    emulated::until([&asked] { return ++asked > 1; });
  }
  if (emulated::predecessor_is_complete) return;
  emulated::predecessor_is_complete = true;
  for (int i = 0; i < emulated::num_written; ++i) {
    const emulated::Written& part = emulated::written[i];
    memcpy(part.target, part.source, part.bytes);
  }
}
inline u64 streaming_policy() { return 0; }
inline void copy_box(u32 target, const TensorMap& map, int x, int y, int z, u32 barrier, u64) {
  emulated::enqueue(target, map, x, y, z, barrier);
}
inline void copy_run(u32 target, const void* source, u32 bytes, u32 barrier) {
  emulated::check(target % 16 == 0 && (uintptr_t)source % 16 == 0 && bytes % 16 == 0, "an unaligned copy");
  memset(emulated::at(target, bytes), 0xff, bytes);
  emulated::copies.push_back({target, {}, {}, barrier, (const u8*)source, bytes});
}
inline void warp_sync() { emulated::meet(0); }
inline void load_blocks(u32 (&blocks)[4], u32 address) { emulated::load_four_blocks(blocks, address, false); }
inline void load_blocks_transposed(u32 (&blocks)[4], u32 address) {
  emulated::load_four_blocks(blocks, address, true);
}
inline u32 transpose(u32 block) {
  const u64* lanes = emulated::meet(block);
  const int lane = emulated::self->index % 32, row = lane / 4, column = lane % 4 * 2;
  u32 transposed = 0;
  for (int half = 0; half < 2; ++half) {
    const u32 word = (u32)lanes[(column + half) * 4 + row / 2];
    emulated::set_value(&transposed, half, emulated::value_of(&word, row % 2));
  }
  return transposed;
}
inline void multiply_blocks(float (&d)[4], const u32 (&a)[4], u32 upper, u32 lower) {
  emulated::Operands own{d, a, {upper, lower}};
  emulated::meet((u64)&own, [] {
    using namespace emulated;
    const u64* lanes = warps[self->index / 32].deposited;
    auto of = [&](int lane) -> const Operands& { return *(const Operands*)lanes[lane]; };
    for (int row = 0; row < 16; ++row)
      for (int column = 0; column < 8; ++column) {
        float& sum = of(row % 8 * 4 + column / 2).d[row / 8 * 2 + column % 2];
        for (int term = 0; term < 16; ++term) {
          const int lane = term % 8 / 2;
          const u16 left = value_of(of(row % 8 * 4 + lane).a + row / 8 + term / 8 * 2, term % 2);
          const u16 right = value_of(of(column * 4 + lane).b + term / 8, term % 2);
          sum += widen(left) * widen(right);
        }
      }
  });
}

inline u32 pack_bf16(float low, float high) {
  u32 both = 0;
  for (int half = 0; half < 2; ++half) {
    const float value = half ? high : low;
    u32 word;
    memcpy(&word, &value, 4);
    const u32 rounded = value != value ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
    both |= rounded << half * 16;
  }
  return both;
}
inline void unpack_codes(u32& low, u32& high, u32 codes) {
#if FP8
  u32* words[2] = {&low, &high};
  for (int i = 0; i < 4; ++i) {
    const int code = codes >> i * 8 & 0xff, exponent = code >> 3 & 15, mantissa = code & 7;
    float value = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
    if ((code & 0x7f) == 0x7f) value = NAN;
    emulated::set_value(words[i / 2], i % 2, emulated::narrow(code & 0x80 ? -value : value));
  }
#endif
}
inline u32 swap_middle_bytes(u32 word) {
  return (word & 0xff0000ffu) | (word & 0xff00) << 8 | (word >> 8 & 0xff00);
}
inline u32 max_of_halves(u32 a, u32 b) {
  u32 both = 0;
  for (int half = 0; half < 2; ++half)
    emulated::set_value(&both, half, std::max(emulated::value_of(&a, half), emulated::value_of(&b, half)));
  return both;
}
inline u32 max_of_lanes(u32 value) {
  const u64* lanes = emulated::meet(value);
  return (u32)*std::max_element(lanes, lanes + 32);
}

inline void store_shared_half(u32 address, u32 half) { memcpy(emulated::at(address, 2), &half, 2); }
inline u32 load_shared_half(u32 address) {
  u16 half;
  memcpy(&half, emulated::at(address, 2), 2);
  return half;
}
inline void load_shared_words(u32 (&words)[2], u32 address) {
  emulated::check(address % 8 == 0, "an unaligned load");
  memcpy(words, emulated::at(address, 8), 8);
}
inline void store_shared_floats(u32 address, const float (&values)[4]) {
  emulated::check(address % 16 == 0, "an unaligned store");
  memcpy(emulated::at(address, 16), values, 16);
}
inline void load_shared_floats(float (&values)[4], u32 address) {
  emulated::check(address % 16 == 0, "an unaligned load");
  memcpy(values, emulated::at(address, 16), 16);
}
inline void store_floats(float* place, const float (&values)[4]) { memcpy(place, values, 16); }
inline void load_floats(float (&values)[4], const float* place) { memcpy(values, place, 16); }
inline void load_floats(float (&values)[2], const float* place) { memcpy(values, place, 8); }
template <size_t COUNT>
void store_shared_words(u32 address, const u32 (&words)[COUNT]) {
  emulated::check(address % sizeof words == 0, "an unaligned store");
  memcpy(emulated::at(address, sizeof words), words, sizeof words);
}
namespace emulated {
inline u64 words_stored;
}
inline void store_word(void* place, u32 word) {
  ++emulated::words_stored;
  emulated::check(emulated::predecessor_is_complete, "a store before the preceding kernel is complete");
  memcpy(place, &word, 4);
}
template <size_t COUNT>
void store_words(void* place, const u32 (&words)[COUNT]) {
  emulated::check((uintptr_t)place % sizeof words == 0, "an unaligned store");
  for (size_t i = 0; i < COUNT; ++i) store_word((u32*)place + i, words[i]);
}
inline float reciprocal_root(float x) { return 1 / std::sqrt(x); }
inline void publish() {}
inline void raise_flag(u32* flag) {
  emulated::check(emulated::predecessor_is_complete, "a flag before the preceding kernel is complete");
  *flag = 1;
}
inline void lower_flag(u32* flag) { *flag = 0; }
inline void wait_for_flag(const u32* flag) {
  emulated::until([flag] { return *flag != 0; });
}
