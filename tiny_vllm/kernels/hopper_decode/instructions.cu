// What attention.cu needs beyond the instructions of hopper_prefill, one function each.

// The chain of kernels, see triton_support.py.
DEV void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEV void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// For what is read once: it leaves the L2 cache before anything else does.
DEV u64 streaming_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEV void copy_box(u32 target, const TensorMap& map, int x, int y, int z, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(target),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
      : "memory");
}
// A run of memory as it is. Both addresses and the number of bytes are multiples of 16.
DEV void copy_run(u32 target, const void* source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

DEV void warp_sync() { __syncwarp(); }

// Four blocks of 8 x 8 values of 16 bits: lanes 8 i .. 8 i + 7 say where the rows of block i are. Lane 4 r +
// c gets values 2 c and 2 c + 1 of row r (or, transposed, of column r) of each.
DEV void load_blocks(u32 (&blocks)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
               : "r"(address)
               : "memory");
}
DEV void load_blocks_transposed(u32 (&blocks)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
               : "r"(address)
               : "memory");
}
// A block of 8 x 8 that lies in registers as above.
DEV u32 transpose(u32 block) {
  u32 transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(block));
  return transposed;
}
// d [16, 8] += a [16, 16] b [16, 8]. Lane 4 r + c has columns 2 c and 2 c + 1 of rows r and r + 8 of d; a as
// four blocks: above each other, then to the right; b as columns of two blocks above each other.
DEV void multiply_blocks(float (&d)[4], const u32 (&a)[4], u32 upper, u32 lower) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(upper), "r"(lower));
}

// Two values rounded to BF16, the first in the low half.
DEV u32 pack_bf16(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
// Four e4m3 numbers as FP16, which holds them all: the lower two, the upper two.
DEV void unpack_codes(u32& low, u32& high, u32 codes) {
  asm("{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}
DEV u32 swap_middle_bytes(u32 word) { return __byte_perm(word, 0, 0x3120); }
DEV u32 max_of_halves(u32 a, u32 b) { return __vmaxu2(a, b); }
DEV u32 max_of_lanes(u32 value) { return __reduce_max_sync(~0u, value); }

DEV void store_shared_half(u32 address, u32 half) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"((u16)half) : "memory");
}
DEV u32 load_shared_half(u32 address) {
  u16 half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(address) : "memory");
  return half;
}
DEV void load_shared_words(u32 (&words)[2], u32 address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address) : "memory");
}
DEV void store_shared_floats(u32 address, const float (&values)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(values[0]), "f"(values[1]),
               "f"(values[2]), "f"(values[3])
               : "memory");
}
DEV void load_shared_floats(float (&values)[4], u32 address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
               : "r"(address)
               : "memory");
}
DEV void store_floats(float* place, const float (&values)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(place), "f"(values[0]), "f"(values[1]),
               "f"(values[2]), "f"(values[3])
               : "memory");
}
// Of another block: not from this multiprocessor's cache.
DEV void load_floats(float (&values)[4], const float* place) {
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
               : "l"(place)
               : "memory");
}
DEV void load_floats(float (&values)[2], const float* place) {
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
               : "=f"(values[0]), "=f"(values[1])
               : "l"(place)
               : "memory");
}
DEV void store_shared_words(u32 address, const u32 (&words)[1]) { store_shared(address, (int)words[0]); }
DEV void store_shared_words(u32 address, const u32 (&words)[2]) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(words[0]), "r"(words[1]) : "memory");
}
DEV void store_word(void* place, u32 word) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(place), "r"(word) : "memory");
}

DEV void store_words(void* place, const u32 (&words)[1]) { store_word(place, words[0]); }
DEV void store_words(void* place, const u32 (&words)[2]) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(place), "r"(words[0]), "r"(words[1]) : "memory");
}
DEV float reciprocal_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What a thread stored before `raise_flag`, and those it has met before, is there behind `wait_for_flag`.
DEV void publish() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEV void raise_flag(u32* flag) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(flag), "r"(1) : "memory");
}
// For the next launch.
DEV void lower_flag(u32* flag) { asm volatile("st.global.b32 [%0], %1;" ::"l"(flag), "r"(0) : "memory"); }
// As `wait`, an error for the host instead of a hang.
DEV void wait_for_flag(const u32* flag) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .u32 value;\n.reg .u64 start, now;\n"
      "mov.u64 start, %%globaltimer;\n"
      "AGAIN:\n"
      "ld.acquire.gpu.global.b32 value, [%0];\n"
      "setp.ne.u32 p, value, 0;\n"
      "@p bra DONE;\n"
      "mov.u64 now, %%globaltimer;\n"
      "sub.u64 now, now, start;\n"
      "setp.gt.u64 p, now, %1;\n"
      "@p trap;\n"
      "bra AGAIN;\n"
      "DONE:\n}" ::"l"(flag),
      "n"(WATCHDOG_NS)
      : "memory");
}
