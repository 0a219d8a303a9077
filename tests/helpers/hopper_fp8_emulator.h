// What hopper_prefill/fp8_instructions.cu adds, for hopper_emulator.h, which stands before it.

inline void copy_bytes(u32 target, const void* source, u32 bytes, u32 barrier) {
  emulated::check(target % 16 == 0 && (uintptr_t)source % 16 == 0 && bytes % 16 == 0, "an unaligned copy");
  memset(emulated::at(target, bytes), 0xff, bytes);
  emulated::copies.push_back({target, {}, {}, barrier, (const u8*)source, bytes});
}
inline void join_lanes() { emulated::meet(0); }
inline void load_codes(u32 (&codes)[4], u32 address) {
  emulated::check(address % 16 == 0, "an unaligned load");
  memcpy(codes, emulated::at(address, 16), 16);
}
inline float load_scale(u32 address) {
  u16 scale;
  memcpy(&scale, emulated::at(address, 2), 2);
  return float_of((u32)scale << 16);
}
inline void decode_codes(u32& low, u32& high, u32 codes, float scale) {
  u16 values[4];
  for (int i = 0; i < 4; ++i) {
    const int code = codes >> i * 8 & 0xff, exponent = code >> 3 & 15, mantissa = code & 7;
    float value = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
    if ((code & 0x7f) == 0x7f) value = NAN;
    values[i] = emulated::narrow((code & 0x80 ? -value : value) * scale);
  }
  low = values[0] | (u32)values[1] << 16, high = values[2] | (u32)values[3] << 16;
}
