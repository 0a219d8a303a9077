// The instructions of Hopper that attention.cu is made of, one function each.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEV __device__ __forceinline__
#define NEG_INF (__int_as_float(0xff800000))

#if HALF
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

DEV int thread_index() { return threadIdx.x; }
// Read anew each time: nothing made of it is kept in registers meanwhile.
DEV int lane_index_again() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
DEV int block_index() { return blockIdx.x; }
DEV int num_blocks() { return gridDim.x; }

extern __shared__ u8 dynamic_shared[];

// The block's dynamic shared memory, as addresses in shared memory.
DEV u32 shared_base() { return (u32)__cvta_generic_to_shared(dynamic_shared); }
DEV void store_shared(u32 address, int value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
DEV int load_shared(u32 address) {
  int value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
DEV void store_shared_zeros(u32 address) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

DEV void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
DEV void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
DEV void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Wait until the phase of this parity is complete: a new barrier is in phase 0, and a phase before it is
// complete. A wait that lasts too long becomes an error for the host instead of a hang.
DEV void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .u64 start, now;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "mov.u64 start, %%globaltimer;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "mov.u64 now, %%globaltimer;\n"
      "sub.u64 now, now, start;\n"
      "setp.gt.u64 p, now, %2;\n"
      "@p trap;\n"
      "bra AGAIN;\n"
      "DONE:\n}" ::"r"(barrier),
      "r"(parity), "n"(WATCHDOG_NS)
      : "memory");
}

// Barriers of several warps: 0 is __syncthreads.
DEV void named_sync(u32 barrier, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
DEV void named_arrive(u32 barrier, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Ordinary stores to shared memory, seen by the copy engine and the tensor cores.
DEV void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// True in one lane of a whole warp, the same each time.
DEV bool is_elected() {
  u32 elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, -1;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected;
}
DEV u32 broadcast(u32 value, int lane) { return __shfl_sync(~0u, value, lane); }

struct alignas(64) TensorMap {
  u64 words[16];
};
// Boxes of a tensor into shared memory; the barrier counts the bytes, also those beyond the tensor's end,
// which are zeros. Coordinates from the fastest dimension on.
DEV void copy_box(u32 target, const TensorMap& map, int x, int y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%2, %3}], [%4];" ::"r"(target),
      "l"(&map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
DEV void copy_box(u32 target, const TensorMap& map, int x, int y, int z, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
      "%4}], [%5];" ::"r"(target),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
DEV void fetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

template <int COUNT>
DEV void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
DEV void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Products of a warpgroup. They run behind the instructions that follow; `hold` keeps the compiler from
// touching registers that they may still read or write.
DEV void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEV void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
template <int COUNT>
DEV void hold(float (&values)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
template <int ROWS, int COLUMNS>
DEV void hold(u32 (&values)[ROWS][COLUMNS]) {
#pragma unroll
  for (int i = 0; i < ROWS * COLUMNS; ++i)
    asm volatile("" : "+r"(values[i / COLUMNS][i % COLUMNS])::"memory");
}

// Operands in shared memory, rows of 128 bytes whose 16-byte pieces are permuted as tensor maps with
// SWIZZLE_128B do: groups of 8 rows lie 1024 bytes apart. across: bytes to the next 64 columns, where columns
// are the product's own dimension (values); anything where they are summed over (queries and keys).
// behind: the operand that begins so many bytes further.
// The maximum over the lanes, all of which have the same, tells the compiler so: its sums are uniform, too.
struct Operand {
  u32 low;
  DEV Operand(u32 address, u32 across) : low(__reduce_max_sync(~0u, across >> 4 << 16 | address >> 4)) {}
  DEV u64 behind(u32 bytes) const { return (u64)(1 << 30 | 1024 >> 4) << 32 | (low + (bytes >> 4)); }
};

// d += a b over 16 terms, d [64, N] FP32, see attention.cu for its registers. a: rows of shared memory, or
// registers; b [N, 16] rows of N (multiply_shared) or [16, N] rows of the 16 (multiply_registers).
template <int N>
DEV void multiply_shared(float (&d)[N / 2], u64 a, u64 b, int accumulate);
template <int N>
DEV void multiply_registers(float (&d)[N / 2], const u32 (&a)[4], u64 b);

#define REGISTERS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define REGISTERS_8(d, i) REGISTERS_4(d, i), REGISTERS_4(d, i + 4)
template <>
DEV void multiply_shared<64>(float (&d)[32], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;\n}"
      : REGISTERS_8(d, 0), REGISTERS_8(d, 8), REGISTERS_8(d, 16), REGISTERS_8(d, 24)
      : "l"(a), "l"(b), "r"(accumulate));
}
template <>
DEV void multiply_registers<64>(float (&d)[32], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
      : REGISTERS_8(d, 0), REGISTERS_8(d, 8), REGISTERS_8(d, 16), REGISTERS_8(d, 24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
DEV void multiply_shared<128>(float (&d)[64], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "
      "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, 0, 0;\n}"
      : REGISTERS_8(d, 0), REGISTERS_8(d, 8), REGISTERS_8(d, 16), REGISTERS_8(d, 24),
        REGISTERS_8(d, 32), REGISTERS_8(d, 40), REGISTERS_8(d, 48), REGISTERS_8(d, 56)
      : "l"(a), "l"(b), "r"(accumulate));
}
template <>
DEV void multiply_registers<128>(float (&d)[64], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "
      "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
      : REGISTERS_8(d, 0), REGISTERS_8(d, 8), REGISTERS_8(d, 16), REGISTERS_8(d, 24),
        REGISTERS_8(d, 32), REGISTERS_8(d, 40), REGISTERS_8(d, 48), REGISTERS_8(d, 56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Products of a warp alone, which nothing else runs beside. Four matrices of 8 rows of 16 bytes, whose rows
// begin where lanes 0 .. 7, 8 .. 15 and so on say: lane 4 r + c gets words c of rows r.
DEV void load_matrices(u32 (&words)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row)
               : "memory");
}
// d += a b, d [16, 8], 16 terms. a: matrices (rows 0 .. 7, terms 0 .. 7), (rows 8 .. 15, terms 0 .. 7), (rows
// 0 .. 7, terms 8 .. 15), (rows 8 .. 15, terms 8 .. 15); b: rows of terms, 0 .. 7 and 8 .. 15.
DEV void multiply_warp(float* d, const u32 (&a)[4], u32 b_first, u32 b_last) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_first), "r"(b_last));
}

// Keeps the assembler from computing a value only after a wait that follows: it stores it, for nobody.
DEV void stay_before(float value, u32 scratch) {
  asm volatile("st.volatile.shared.f32 [%0], %1;" ::"r"(scratch), "f"(value) : "memory");
}
DEV float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEV u32 bits_of(float value) { return __float_as_uint(value); }
DEV float float_of(u32 bits) { return __uint_as_float(bits); }
// Two values rounded to 16 bits, the first in the low half.
DEV u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
template <typename T>
DEV T exchange(T value, int lane_mask) {
  return __shfl_xor_sync(~0u, value, lane_mask);
}
// The value of the lane so far below; the lowest lanes get their own.
DEV int shift_up(int value, int distance) { return __shfl_up_sync(~0u, value, distance); }
DEV u32 votes(bool vote) { return __ballot_sync(~0u, vote); }
DEV int first_bit(u32 word) { return __ffs(word) - 1; }
DEV int leading_zeros(u32 word) { return __clz(word); }
// Counts from 0 to `last` and begins anew.
DEV u32 take_number(u32* counter, u32 last) { return atomicInc(counter, last); }
DEV void store_16_bytes(void* place, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(place), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
template <typename T>
DEV T load_constant(const T* place) {
  return __ldg(place);
}
