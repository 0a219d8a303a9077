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
// Four e4m3 numbers times a scale, each rounded once to 16 bits: the lower two, the upper two.
DEV void decode_codes(u32& low, u32& high, u32 codes, float scale) {
  asm("{\n.reg .b16 c<2>, h<4>;\n.reg .b32 pair<2>;\n.reg .f32 x<4>;\n"
      "mov.b32 {c0, c1}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 pair0, c0;\n"
      "cvt.rn.f16x2.e4m3x2 pair1, c1;\n"
      "mov.b32 {h0, h1}, pair0;\n"
      "mov.b32 {h2, h3}, pair1;\n"
      "cvt.f32.f16 x0, h0;\ncvt.f32.f16 x1, h1;\ncvt.f32.f16 x2, h2;\ncvt.f32.f16 x3, h3;\n"
      "mul.f32 x0, x0, %3;\nmul.f32 x1, x1, %3;\nmul.f32 x2, x2, %3;\nmul.f32 x3, x3, %3;\n"
      "cvt.rn." TYPE "x2.f32 %0, x1, x0;\n"
      "cvt.rn." TYPE "x2.f32 %1, x3, x2;\n}"
      : "=r"(low), "=r"(high)
      : "r"(codes), "f"(scale));
}
