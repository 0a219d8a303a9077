// What attention.cu needs beyond instructions.cu for caches in FP8, one function each.

// Memory as it is. Both addresses and the number of bytes are multiples of 16.
DEV void copy_bytes(u32 target, const void* source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}
// What the lanes of a warp did before is done for all of them.
DEV void join_lanes() { __syncwarp(); }

DEV void load_codes(u32 (&codes)[4], u32 address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(codes[0]), "=r"(codes[1]), "=r"(codes[2]), "=r"(codes[3])
               : "r"(address)
               : "memory");
}
DEV float load_scale(u32 address) {
  u16 scale;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(scale) : "r"(address) : "memory");
  return __uint_as_float((u32)scale << 16);
}
DEV void store_shared_16_bytes(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
// Two FP16 numbers that are e4m3 ones, times a BF16 scale, each product rounded once.
DEV u32 scale_two(u32 pair, float scale) {
  float low, high;
  asm("{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n}"
      : "=f"(low), "=f"(high)
      : "r"(pair));
#if HALF
  return pack(low * scale, high * scale);
#else
  // BF16 holds the numbers, and one instruction multiplies both.
  u32 scaled;
  asm("mul.rn.bf16x2 %0, %1, %2;"
      : "=r"(scaled)
      : "r"(pack(low, high)), "r"(__byte_perm(__float_as_uint(scale), 0, 0x3232)));
  return scaled;
#endif
}
// Four e4m3 numbers times a scale, as 16 bits: the lower two, the upper two.
DEV void decode_codes(u32& low, u32& high, u32 codes, float scale) {
  u32 first, second;
  asm("{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(first), "=r"(second)
      : "r"(codes));
  low = scale_two(first, scale), high = scale_two(second, scale);
}
