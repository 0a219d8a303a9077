// One decode step of a Llama-like model as one persistent kernel: from the slots' last tokens to their next
// ones.
//
// CTAS blocks, one per SM, each own a fixed set of output rows of every matrix. Their weights lie on one
// "tape" in the order of use: per chunk, the blocks' pieces side by side. In each block one producer thread
// copies the block's pieces into a ring in shared memory. Ring space and a small window of copies in flight
// hold it back, never the computation's dependencies, so memory keeps streaming while the 16 consumer warps
// wait for other blocks' results.
//
// Products. A unit is 8 rows of a matrix; a chunk is one unit by CK columns. Chunk c of a phase goes to warp
// group c % 4, each of whose 4 warps takes a quarter of the columns, in two halves. One m16n8k16 product
// multiplies the unit's rows at 16 columns of the first half (operand rows 0-7) and at 16 of the second (rows
// 8-15) with 4 tokens at the first half's columns (operand columns 0-3) and the same tokens at the second's
// (4-7): two quadrants of the result are wanted. The order of k is permuted alike on both sides so that a
// lane's operands are 16 contiguous bytes. Partial sums of the column slices meet in shared memory and are
// added in a fixed order: results do not depend on timing.
//
// Exchange. Vectors are published as plain bf16; readers poll the data itself until no value is the mark
// EMPTY, a NaN that no conversion makes, so there are no flags. Each kind of vector has two buffers, used by
// turns of layers. A block empties its part of the other buffer in the middle of a layer, see Cleaner; it
// does so behind a fence before it publishes the layer's last vector, and only blocks that have taken that go
// on to fill the emptied buffer. Partial attention results and the draw's candidates, which not every step
// writes, carry an FP32 value and a 32-bit epoch instead. This goes beyond what the PTX memory model promises
// (16-bit stores are read by wider loads, and readers have no fence of their own): it relies on Hopper's L2
// being where relaxed stores become visible and relaxed loads look.
//
// Attention. (Token, KV head) pairs are spread evenly over the blocks. In a short context every block of a
// pair goes through all of it and keeps a part of the outputs; in a long one each takes a share of the
// context, and one more exchange combines. Scores and values are tensor-core products whose registers come
// straight from the pages or, in a longer one, through the ring: kv_stream.cu.
//
// Every wait for another block or for a copy gives up after WATCHDOG_NS with a trap: an error for the host
// instead of a hang.
// The geometry (HIDDEN ... HEAD_CK) comes as macros from layout.py.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEV __device__ __forceinline__

constexpr int CONSUMERS = 512;
constexpr int GROUP = HEADS / KV_HEADS;
// SPLITS: blocks per (token, KV head), a power of two.
constexpr int TOKEN_GROUPS = (TOKENS + 3) / 4;
// Whether a thread that waits for several pieces of a vector asks for all of them again: with fewer tokens a
// thread has one or two, and the next is there when the first is.
constexpr bool ASKS_TOGETHER = TOKENS > 4;
constexpr int POSITIONS = 16;  // of one attention tile
static_assert(GROUP <= 8 && PAGE_SIZE % POSITIONS == 0 && GROUP * HEAD_DIM % SPLITS == 0, "attention");
#define NEG_INF (__int_as_float(0xff800000))

// A phase's matrix as this block sees it. BY_UNIT: chunks go unit by unit; otherwise columns first.
template <int UNITS_, int KB_, int CK_, bool BY_UNIT_>
struct Matrix {
  static constexpr int UNITS = UNITS_, KB = KB_, CK = CK_, CHUNKS = UNITS * KB, BLOCKS = CK / 256,
                       BYTES = CK * 16;
  static constexpr bool BY_UNIT = BY_UNIT_;
  static constexpr int SLICES = BY_UNIT ? KB * 4 : 16;    // partial sums per row
  static constexpr int STRIDE = SLICES * TOKENS * 8 + 8;  // floats per unit; the 8 spread the banks
  static constexpr int FITTING = PART_FLOATS / STRIDE;
  static constexpr int ROUND =
      FITTING >= UNITS ? UNITS : FITTING / 4 * 4;  // units whose partial sums fit at a time
  static_assert(CK % 256 == 0 && BYTES <= CHUNK_BYTES, "chunk");
  static_assert(ROUND > 0, "partial sums do not fit");
};
using Qkv = Matrix<QKV_UNITS, QKV_KB, QKV_CK, true>;
using Out = Matrix<OUT_UNITS, OUT_KB, OUT_CK, true>;
using Up = Matrix<UP_UNITS, UP_KB, UP_CK, true>;
using Down = Matrix<DOWN_UNITS, DOWN_KB, DOWN_CK, false>;
using Head = Matrix<HEAD_UNITS, HEAD_KB, HEAD_CK, true>;
static_assert(Qkv::ROUND == Qkv::UNITS && Out::ROUND == Out::UNITS && Down::ROUND == Down::UNITS, "rounds");

constexpr int Q_SIZE = HEADS * HEAD_DIM, QKV_SIZE = Q_SIZE + 2 * KV_HEADS * HEAD_DIM;
constexpr int OWN_ROWS = OUT_UNITS * 8;  // of the hidden vector
constexpr int OWN_FF = UP_UNITS * 4;
constexpr int OWN_VOCAB = HEAD_UNITS * 8;

// Exchange: two buffers of vectors (offsets in values), then words with epochs. A vector consists of the
// blocks' segments. Segments lie 64 bytes apart or more: a line that many read while many write is slow to
// arrive.
template <int SEGMENT_, int SIZE_>
struct Vector {
  static constexpr int SEGMENT = SEGMENT_, SIZE = SIZE_;
  static constexpr int PITCH = (SEGMENT + 31) / 32 * 32;
  static constexpr int STRIDE =
      PITCH == SEGMENT ? SIZE : (SIZE + SEGMENT - 1) / SEGMENT * PITCH;  // per token
  static DEV int place(int i) { return PITCH == SEGMENT ? i : i / SEGMENT * PITCH + i % SEGMENT; }
};
constexpr int ATT_SEGMENT = (Q_SIZE / 8 + CTAS - 1) / CTAS * 8;
using QkvVector = Vector<QKV_UNITS * 8, QKV_SIZE>;
using AttVector = Vector<ATT_SEGMENT, Q_SIZE>;
using HiddenVector = Vector<OWN_ROWS, HIDDEN>;
using FfVector = Vector<(OWN_FF + 7) / 8 * 8 == OWN_FF ? OWN_FF : INTERMEDIATE, INTERMEDIATE>;
constexpr int X_QKV = 0, X_ATT = X_QKV + TOKENS * QkvVector::STRIDE,
              X_H1 = X_ATT + TOKENS * AttVector::STRIDE, X_H2 = X_H1 + TOKENS * HiddenVector::STRIDE,
              X_FF = X_H2 + TOKENS * HiddenVector::STRIDE,
              VECTOR_VALUES = (X_FF + TOKENS * FfVector::STRIDE + 7) / 8 * 8;
constexpr int X_PART = VECTOR_VALUES, X_ML = X_PART + 2 * TOKENS * KV_HEADS * SPLITS * GROUP * HEAD_DIM,
              X_BEST = X_ML + 4 * TOKENS * KV_HEADS * SPLITS * GROUP, X_END = X_BEST + 4 * TOKENS * CTAS;
static_assert(X_END <= EXCHANGE_WORDS && X_H1 % 8 == 0 && X_FF % 8 == 0, "exchange buffer");
constexpr u32 EMPTY = 0xffffu;

struct Params {
  const u8* tape;
  const u16* norms;        // bf16 [2 * LAYERS + 1][HIDDEN]
  const u16* qk_norms;     // bf16 [LAYERS][2][HEAD_DIM]
  const u16* qkv_bias;     // bf16 [LAYERS][QKV_SIZE]
  const u16* embedding;    // bf16 [VOCAB][HIDDEN]
  u16 *k_cache, *v_cache;  // bf16 [LAYERS][num_pages][KV_HEADS][PAGE_SIZE][HEAD_DIM]
  const float* cos_sin;    // [max_len][HEAD_DIM]
  const i64* page_table;   // [num_slots][table_width]
  i64 *computed_len, *last_token, *sample_position;
  const i64* stream;
  const float* temperature;
  const i64* slots;  // [TOKENS]; num_slots or more is padding
  u32* exchange;
  u32* epochs;    // [CTAS]
  float* logits;  // [TOKENS][VOCAB] or null
  i64* tokens;    // by row, none for padding; -1 where the logits are not finite; may be the host's memory
  i64 table_width, num_pages, num_slots;
  int kv_stream_limit, kv_window;        // see kv_stream.cu
  float eps, score_scale;                // score_scale: of the scores, times log2(e)
  int window, direct_limit, draw, zero;  // zero: 0
};

DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

struct Watch {
  u32 tries = 0;
  u64 start = 0;
  DEV void failed() {
    if ((++tries & 1023u) == 0) {
      const u64 t = now_ns();
      if (start == 0)
        start = t;
      else if (t - start > WATCHDOG_NS)
        __trap();
    }
  }
};

DEV void barrier_init(u32 b, u32 n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory");
}
DEV void barrier_expect(u32 b, u32 n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory");
}
DEV void barrier_arrive(u32 b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
}
DEV bool barrier_try(u32 b, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(b), "r"(parity)
      : "memory");
  return done;
}
DEV void barrier_wait(u32 b, u32 parity) {
  Watch watch;
  while (!barrier_try(b, parity)) watch.failed();
}
DEV void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
DEV void consumers_sync() { asm volatile("bar.sync 1, 512;" ::: "memory"); }

DEV uint4 load_words4(const u32* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEV u64 load_pair(const u32* p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEV void store_pair(u32* p, u32 low, u32 high) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(((u64)high << 32) | low) : "memory");
}
DEV void store_half(u16* p, u16 v) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory");
}
DEV bool has_empty(u32 v) { return (v & 0xffffu) == EMPTY || (v >> 16) == EMPTY; }
DEV bool has_empty(const uint4& a) {
  return has_empty(a.x) || has_empty(a.y) || has_empty(a.z) || has_empty(a.w);
}
// In five instructions; a value that is EMPTY is a NaN.
DEV bool has_nan(const uint4& a) {
  u32 is;
  asm("{\n.reg .b32 t, u;\n.reg .pred p, q;\nmax.NaN.bf16x2 t, %1, %2;\nmax.NaN.bf16x2 u, %3, %4;\n"
      "max.NaN.bf16x2 t, t, u;\nsetp.nan.bf16x2 p|q, t, t;\nor.pred p, p, q;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(is)
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w));
  return is;
}
DEV void settle(uint4& a, const u16* from) {
  Watch watch;
  while (has_empty(a)) {
    watch.failed();
    a = load_words4((const u32*)from);
  }
}
// What has not arrived is loaded again all at once: one after the other, each is a way to L2 and back.
template <int N>
DEV void settle(uint4 (&a)[N], const u16* const (&from)[N]) {
  Watch watch;
  while (true) {
    bool is_empty[N], is_any = false;
#pragma unroll
    for (int i = 0; i < N; i++) is_any |= is_empty[i] = has_nan(a[i]) && has_empty(a[i]);
    if (!is_any) return;
    watch.failed();
#pragma unroll
    for (int i = 0; i < N; i++)
      if (is_empty[i]) a[i] = load_words4((const u32*)from[i]);
  }
}
DEV bool has_empty(u64 v) { return has_empty((u32)v) || has_empty((u32)(v >> 32)); }
// Four values each from two places, whose loads overlap.
DEV void poll_twice4(const u16* p0, const u16* p1, uint2& v0, uint2& v1) {
  u64 a = load_pair((const u32*)p0), b = load_pair((const u32*)p1);
  Watch watch;
  while (has_empty(a) || has_empty(b)) {
    watch.failed();
    a = load_pair((const u32*)p0);
    b = load_pair((const u32*)p1);
  }
  v0 = make_uint2((u32)a, (u32)(a >> 32));
  v1 = make_uint2((u32)b, (u32)(b >> 32));
}
DEV u32 poll_pair(const u32* p, u32 epoch) {
  Watch watch;
  while (true) {
    const u64 a = load_pair(p);
    if ((u32)(a >> 32) == epoch) return (u32)a;
    watch.failed();
  }
}

DEV float low_half(u32 v) { return __uint_as_float(v << 16); }
DEV float high_half(u32 v) { return __uint_as_float(v & 0xffff0000u); }
DEV u32 pack_bf16(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEV u32 multiply_pair(u32 a, u32 b) {  // bf16, rounded once
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEV float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
// d[16 x 8] += a[16 x 16] b[16 x 8]
DEV void multiply_add(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The transpose of an 8 x 8 matrix of 16-bit values whose rows lie in groups of four lanes.
DEV u32 transpose8(u32 v) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}
DEV void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// log of an exponential arrival time, as in sampling_noise.py
DEV float log_race_time(u32 key_low, u32 key_high, u32 token) {
  u32 x = ((token + NOISE_GOLDEN) * (key_high | 1u)) ^ key_low;
  x = (x ^ (x >> 16)) * NOISE_MIX_A;
  x = (x ^ (x >> 15)) * NOISE_MIX_B;
  x = (x ^ (x >> 16)) & 0x7fffffffu;
  constexpr float UNIT = 4.656612595521636e-10f;  // slightly below 2^-31
  return logf(-log1pf(-((float)(int)x * UNIT + UNIT * 0.5f)));
}

constexpr int NORM_WARPS = (HIDDEN + 255) / 256;  // warps that take one token's hidden vector

struct Shared {  // behind the ring, the input vectors and the partial sums
  float sums_of_squares[TOKENS * NORM_WARPS];
  union {
    struct {                                       // attention
      alignas(16) u16 q[GROUP * (HEAD_DIM + 32)];  // rotated and scaled; the padding spreads the banks
      alignas(16) u16 k_new[HEAD_DIM], v_new[HEAD_DIM];
      float maxima[16 * GROUP * 2];  // per warp and head, maximum and sum
      float combine_ml[2 * SPLITS * GROUP];
    };
    struct {  // the draw
      float best_value[TOKENS * 16];
      u32 best_id[TOKENS * 16];
    };
  };
  float cos_sin[HEAD_DIM];
  float residual[TOKENS * OWN_ROWS];
  i64 slot[TOKENS];
  int position[TOKENS], token[TOKENS], page[TOKENS];
  int first_page[16];  // per warp, of its first tile in attention
  u32 key[TOKENS * 2];
  float temperature[TOKENS];
  u32 kv_index;         // in the ring, of a layer's first chunk of keys and values
  alignas(8) u64 full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) <= SMALL_BYTES, "layout.py counts too little");
constexpr int Q_STRIDE = HEAD_DIM + 32;
constexpr int XS_STRIDE = XS_COLUMNS * 2 + 64;  // bytes per token; the 64 spread the banks

// ---------------------------------------------------------------- producer

// A policy for copies: what they read is not read again.
DEV u64 evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

struct Producer {
  const Params& p;
  const u8* source;
  u32 index, ring, full, empty;
  u64 policy;
  int cta;

  template <class M>
  DEV void stream() {
    // The other lanes of the warp only count.
    if (KV_STREAM && (threadIdx.x & 31) != 0) {
      index += M::CHUNKS;
      return;
    }
#pragma unroll 1
    for (int c = 0; c < M::CHUNKS; c++, index++) {
      const u32 stage = index % STAGES;
      claim(p.window, M::BYTES);
      copy_bulk(ring + stage * CHUNK_BYTES, source + (i64)cta * M::BYTES, M::BYTES, full + 8 * stage, policy);
      source += (i64)CTAS * M::BYTES;
    }
  }

  DEV void await_stage() {
    if (index >= STAGES) barrier_wait(empty + 8 * (index % STAGES), ((index / STAGES) & 1) ^ 1);
  }

  // Waits until the next stage is free and few enough copies are in flight, and announces its bytes.
  DEV void claim(u32 window, u32 bytes) {
    await_stage();
    // A deeper queue only delays the exchange and makes the SMs' shares of the bandwidth unequal.
    if (index >= window) {
      const u32 q = index - window;
      barrier_wait(full + 8 * (q % STAGES), (q / STAGES) & 1);
    }
    barrier_expect(full + 8 * (index % STAGES), bytes);
  }
};

// ---------------------------------------------------------------- cleaner

// Once a layer, one warp empties the block's part of the next layer's buffer. By then every block has read
// it: each has published a part of X_H1 since.
struct Cleaner {
  u16* vectors;
  u32 epoch;
  int lane, cta;

  template <class V, int COUNT>  // values per token, a multiple of 4
  DEV void clear(u16* start) {
    const int first = cta * COUNT;
    for (int i = lane; i < TOKENS * (COUNT / 4); i += 32) {
      const int token = i / (COUNT / 4), value = first + i % (COUNT / 4) * 4;
      if (value < V::SIZE)
        store_pair((u32*)(start + token * V::STRIDE + V::place(value)), 0xffffffffu, 0xffffffffu);
    }
  }

  DEV void clean() {
    epoch++;
    asm volatile("bar.sync 2, 544;" ::: "memory");  // the consumers have X_H1
    u16* const next = vectors + ((epoch + 1) & 1) * VECTOR_VALUES;
    clear<QkvVector, Qkv::UNITS * 8>(next + X_QKV);
    clear<AttVector, ATT_SEGMENT>(next + X_ATT);
    clear<HiddenVector, OWN_ROWS>(next + X_H1);
    clear<HiddenVector, OWN_ROWS>(next + X_H2);
    clear<FfVector, OWN_FF>(next + X_FF);
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    asm volatile("bar.arrive 3, 544;" ::: "memory");  // the consumers may publish X_H2
  }
};

// ---------------------------------------------------------------- consumers

struct Consumer {
  const Params& p;
  u8* ring;
  u8* xs;       // the phase's input vectors, bf16, XS_STRIDE bytes per token
  float* part;  // partial sums, or attention's scratch
  Shared& s;
  u32 full, empty;
  int cta;
  u32 epoch;
  u32 base;                                 // ring index of the phase's first chunk
  int t, warp, lane, group, quarter, g, q;  // g, q: row and column of this lane in a tensor-core fragment
  uint4 v[8];                               // the lane's part of a chunk
  uint4 x[TOKEN_GROUPS][4];                 // the lane's part of the input vectors

  // Re-reading the thread id at each phase keeps the compiler from holding dozens of addresses in registers.
  DEV void refresh() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    warp = t >> 5;
    lane = t & 31;
    group = warp >> 2;
    quarter = warp & 3;
    g = lane >> 2;
    q = lane & 3;
  }

  template <class M>
  DEV void load_chunk(int chunk) {
    const u32 index = base + chunk, stage = index % STAGES;
    barrier_wait(full + 8 * stage, (index / STAGES) & 1);
    __syncwarp();
    const uint4* from = (const uint4*)(ring + stage * CHUNK_BYTES + quarter * (M::BLOCKS * 1024)) + lane;
#pragma unroll
    for (int i = 0; i < M::BLOCKS * 2; i++) v[i] = from[i * 32];
    __syncwarp();
  }

  // Frees the chunk's stage. It may be refilled only once the loads have returned, and an arrival alone does
  // not wait for them: behind a queue of other loads they can be late by more than a refill. So the arrival's
  // address is made of them (p.zero is 0).
  template <class M>
  DEV void release_chunk(int chunk) {
    u32 mixed = 0;
#pragma unroll
    for (int i = 0; i < M::BLOCKS * 2; i++) mixed ^= v[i].x;
    if (lane == 0) barrier_arrive(empty + 8 * ((base + chunk) % STAGES) + mixed * p.zero);
  }

  // The first chunk of a round, taken into registers before the phase's wait: four more free stages
  // meanwhile. A group without one clears its registers, so that they hold nothing from one phase to the
  // next.
  template <class M>
  DEV void load_first(int first, int end) {
    if (first + group < end)
      load_chunk<M>(first + group);
    else {
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = make_uint4(0, 0, 0, 0);
    }
  }
  template <class M>
  DEV void release_first(int first, int end) {
    if (first + group < end) release_chunk<M>(first + group);
  }

  // The lane's part of four tokens' input vectors at a chunk's columns; column: the first of them within xs.
  template <class M>
  DEV void load_x(uint4 (&to)[4], int tokens, int column) {
    const int half = g >> 2;
    const u8* from =
        xs + (tokens * 4 + (g & 3)) * XS_STRIDE + (column + (quarter * 2 + half) * (M::CK / 8)) * 2 + q * 16;
#pragma unroll
    for (int b = 0; b < M::BLOCKS; b++)
      to[b] = tokens * 4 + (g & 3) < TOKENS ? *(const uint4*)(from + b * 64) : make_uint4(0, 0, 0, 0);
  }

  // For a phase in which this group's chunks all have the same columns.
  template <class M>
  DEV void keep_x() {
#pragma unroll
    for (int i = 0; i < TOKEN_GROUPS; i++) load_x<M>(x[i], i, group % M::KB * M::CK);
  }

  // This warp's share of the sums of row g, put into the partial sums or added to them.
  template <class M, bool ADDS, bool KEPT>
  DEV void multiply(int unit, int slice, int column) {
#pragma unroll
    for (int i = 0; i < TOKEN_GROUPS; i++) {
      if (!KEPT) load_x<M>(x[0], i, column);
      const uint4(&y)[4] = x[KEPT ? i : 0];
      float d[2][4];  // two chains
#pragma unroll
      for (int j = 0; j < 2; j++) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.f;
#pragma unroll
      for (int b = 0; b < M::BLOCKS; b++) {
        multiply_add(d[0], v[2 * b].x, v[2 * b].y, v[2 * b].z, v[2 * b].w, y[b].x, y[b].y);
        multiply_add(d[1], v[2 * b + 1].x, v[2 * b + 1].y, v[2 * b + 1].z, v[2 * b + 1].w, y[b].z, y[b].w);
      }
      // Lanes 0 and 1 of four have the first half's sums, lanes 2 and 3 the second half's.
      const float even = (d[0][0] + d[1][0]) + __shfl_xor_sync(~0u, d[0][2] + d[1][2], 2);
      const float odd = (d[0][1] + d[1][1]) + __shfl_xor_sync(~0u, d[0][3] + d[1][3], 2);
      float* to = part_of<M>(unit, slice) + (i * 4 + q * 2) * 8;
      if (q < 2 && i * 4 + q * 2 < TOKENS) to[0] = ADDS ? to[0] + even : even;
      if (q < 2 && i * 4 + q * 2 + 1 < TOKENS) to[8] = ADDS ? to[8] + odd : odd;
    }
  }

  template <class M>
  DEV float* part_of(int unit, int slice) {
    return part + unit * M::STRIDE + slice * TOKENS * 8 + g;
  }

  // Units first ... first + count of a matrix whose chunks go unit by unit. The caller has loaded chunk
  // `group` of the round, and has kept x if 4 % KB == 0.
  template <class M>
  DEV void multiply_round(int first, int count) {
    const int end = (first + count) * M::KB;
#pragma unroll 1
    for (int c = first * M::KB + group; c < end; c += 4) {
      if (c != first * M::KB + group) {
        load_chunk<M>(c);
        release_chunk<M>(c);
      }
      const int unit = c / M::KB, kb = c % M::KB;
      multiply<M, false, 4 % M::KB == 0>(unit - first, kb * 4 + quarter, kb * M::CK);
    }
  }

  template <class M>
  DEV float total(int row, int token) {
    const float* from = part + (row >> 3) * M::STRIDE + token * 8 + (row & 7);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < M::SLICES; i++) sum += from[i * TOKENS * 8];
    return sum;
  }

  // This layer's buffer.
  DEV u16* vectors() { return (u16*)p.exchange + (epoch & 1) * VECTOR_VALUES; }

  // start: one of X_QKV ...
  template <class V>
  DEV void publish(int start, int token, int i, float value) {
    store_half(vectors() + start + token * V::STRIDE + V::place(i), (u16)pack_bf16(value, 0.f));
  }

  DEV float inverse_rms(int token) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < NORM_WARPS; i++) sum += s.sums_of_squares[token * NORM_WARPS + i];
    return rsqrtf(sum * (1.f / HIDDEN) + p.eps);
  }

  // How the 512 threads share TOKENS vectors of K values, 8 at a time: whole warps per token.
  template <int K>
  struct Share {
    static constexpr int PER_TOKEN = (K + 255) / 256 * 32,
                         TURNS = (TOKENS * PER_TOKEN + CONSUMERS - 1) / CONSUMERS;
  };

  // The thread's i-th eight values, in units of eight: those of token `token` from value 8 * k8 on.
  template <int K>
  DEV bool share_of(int i, int columns, int& token, int& k8) {
    constexpr int PER_TOKEN = Share<K>::PER_TOKEN;
    constexpr bool IS_WHOLE = CONSUMERS % PER_TOKEN == 0;  // the same part of one token or another
    const int place = IS_WHOLE ? t : t + i * CONSUMERS;
    token = place / PER_TOKEN + (IS_WHOLE ? i * (CONSUMERS / PER_TOKEN) : 0);
    k8 = place % PER_TOKEN;
    return token < TOKENS && k8 * 8 < min(K, columns);
  }

  // Eight values of a vector, times the norm's weights if wanted, into xs; returns their sum of squares.
  template <bool NORMED>
  DEV float put8(int token, int k8, uint4 a, uint4 weights) {
    uint4* to = (uint4*)(xs + token * XS_STRIDE) + k8;
    if (!NORMED) {
      *to = a;
      return 0.f;
    }
    float squares = 0.f;
    const u32 values[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float low = low_half(values[i]), high = high_half(values[i]);
      squares += low * low + high * high;
    }
    *to = make_uint4(multiply_pair(a.x, weights.x), multiply_pair(a.y, weights.y),
                     multiply_pair(a.z, weights.z), multiply_pair(a.w, weights.w));
    return squares;
  }

  // A `take` of X_FF in two parts: the loads, then the waiting. columns: valid ones from `first` on.
  template <int K>
  DEV void ask(uint4 (&a)[Share<K>::TURNS], const u16* start, int first, int columns) {
#pragma unroll
    for (int j = 0; j < Share<K>::TURNS; j++) {
      int token, k8;
      a[j] = make_uint4(0, 0, 0, 0);
      if (share_of<K>(j, columns, token, k8))
        a[j] = load_words4((const u32*)(start + token * FfVector::STRIDE + FfVector::place(first + k8 * 8)));
    }
  }
  template <int K>
  DEV void receive(uint4 (&a)[Share<K>::TURNS], const u16* start, int first, int columns) {
    constexpr int TURNS = Share<K>::TURNS;
    const u16* from[TURNS];
    int token, k8;
#pragma unroll
    for (int j = 0; j < TURNS; j++) {
      share_of<K>(j, columns, token, k8);
      from[j] = start + token * FfVector::STRIDE + FfVector::place(first + k8 * 8);
    }
    if (ASKS_TOGETHER) settle(a, from);
#pragma unroll
    for (int j = 0; j < TURNS; j++)
      if (share_of<K>(j, columns, token, k8)) {
        if (!ASKS_TOGETHER) settle(a[j], from[j]);
        put8<false>(token, k8, a[j], a[j]);
      }
    consumers_sync();
  }

  // K values per token from value `first` of a vector on (they are waited for), or rows of the embedding, into
  // xs, and their sums of squares; returns when all threads' are there. columns: valid ones from there on.
  // `between` runs while the first loads are under way.
  template <class V, int K, bool NORMED, bool EMBEDDING, class Between>
  DEV void take(const u16* start, int first, const u16* norm, int columns, const Between& between) {
    constexpr int TURNS = Share<K>::TURNS, BATCH = TURNS < 4 ? TURNS : 4;  // loads in flight
    int token, k8;
#pragma unroll
    for (int turn = 0; turn < TURNS; turn += BATCH) {
      uint4 a[BATCH], weights[NORMED ? BATCH : 1];
      const u16* from[BATCH];
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
        a[j] = make_uint4(0, 0, 0, 0);
        if (NORMED) weights[j] = make_uint4(0, 0, 0, 0);
        const bool is_mine = share_of<K>(turn + j, columns, token, k8);
        from[j] = EMBEDDING ? start + (i64)s.token[token] * HIDDEN + k8 * 8
                            : start + token * V::STRIDE + V::place(first + k8 * 8);
        if (is_mine) {
          if (NORMED) weights[j] = __ldg((const uint4*)norm + k8);
          a[j] = EMBEDDING ? __ldg((const uint4*)from[j]) : load_words4((const u32*)from[j]);
        }
      }
      if (turn == 0) between();
      if (ASKS_TOGETHER && !EMBEDDING) settle(a, from);
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
        float squares = 0.f;
        if (share_of<K>(turn + j, columns, token, k8)) {
          if (!ASKS_TOGETHER && !EMBEDDING) settle(a[j], from[j]);
          squares = put8<NORMED>(token, k8, a[j], weights[NORMED ? j : 0]);
        }
        if (NORMED && token < TOKENS) {
          squares = warp_sum(squares);
          if (lane == 0) s.sums_of_squares[token * NORM_WARPS + k8 / 32] = squares;
        }
      }
    }
    consumers_sync();
  }

  // ------------------------------------------------------------ attention

  // DP: columns of V per warp.
  template <int DP>
  struct Tile {
    static constexpr int VW = DP / 8;  // columns per lane
    static constexpr int VR = VW / 2;  // registers per row
    uint4 k[2][HEAD_DIM / 32];
    u32 v[4][VR];
    // The outputs, transposed: o[r] holds columns 2r and 2r + 1 of this lane's, each for heads 2q and 2q + 1.
    float o[VR][4];
    float maximum[2], sum[2];  // of heads 2q and 2q + 1; the sum is this lane's part
  };

  DEV const u16* page_rows(const u16* cache, int layer, int page, int kv_head, int position) {
    return cache +
           ((((i64)layer * p.num_pages + page) * KV_HEADS + kv_head) * PAGE_SIZE + position % PAGE_SIZE) *
               HEAD_DIM;
  }

  template <int DP>
  DEV void load_k(Tile<DP>& a, const u16* rows, int start, int position) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int b = 0; b < HEAD_DIM / 32; b++) {
        a.k[i][b] = make_uint4(0, 0, 0, 0);
        if (start + i * 8 + g < position)
          a.k[i][b] = __ldcg((const uint4*)(rows + (i * 8 + g) * HEAD_DIM + b * 32 + q * 8));
      }
  }

  static DEV int v_row(int i, int q) { return (i >> 1) * 8 + q * 2 + (i & 1); }

  template <int DP>
  DEV void load_v(Tile<DP>& a, const u16* rows, int start, int position, int column) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = v_row(i, q);
#pragma unroll
      for (int r = 0; r < Tile<DP>::VR; r++) a.v[i][r] = 0;
      if (start + row < position) copy_v<DP>(a.v[i], rows + row * HEAD_DIM + column + g * Tile<DP>::VW);
    }
  }
  template <int DP>
  DEV void copy_v(u32 (&to)[Tile<DP>::VR], const u16* from) {
    if (DP == 16)
      to[0] = __ldcg((const u32*)from);
    else if (DP == 32) {
      const uint2 a = __ldcg((const uint2*)from);
      to[0] = a.x;
      to[1 % Tile<DP>::VR] = a.y;
    } else {
#pragma unroll
      for (int r = 0; r < Tile<DP>::VR; r += 4) {
        const uint4 a = __ldcg((const uint4*)from + r / 4);
        to[r] = a.x;
        to[(r + 1) % Tile<DP>::VR] = a.y;
        to[(r + 2) % Tile<DP>::VR] = a.z;
        to[(r + 3) % Tile<DP>::VR] = a.w;
      }
    }
  }

  // The new token's row is not in the cache yet.
  template <int DP>
  DEV void substitute(Tile<DP>& a, int start, int position, int column) {
    if (start + POSITIONS <= position) return;
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (start + i * 8 + g == position)
#pragma unroll
        for (int b = 0; b < HEAD_DIM / 32; b++) a.k[i][b] = *(const uint4*)(s.k_new + b * 32 + q * 8);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (start + v_row(i, q) == position)
#pragma unroll
        for (int r = 0; r < Tile<DP>::VR; r++)
          a.v[i][r] = ((const u32*)(s.v_new + column + g * Tile<DP>::VW))[r];
  }

  // Scores of a tile: position g of heads 2q and 2q + 1, position 8 + g of the same.
  template <int DP>
  DEV void multiply_qk(const Tile<DP>& a, float (&d)[4]) {
    float e[4] = {0.f, 0.f, 0.f, 0.f};
    d[0] = d[1] = d[2] = d[3] = 0.f;
#pragma unroll
    for (int b = 0; b < HEAD_DIM / 32; b++) {
      uint4 query = make_uint4(0, 0, 0, 0);
      if (g < GROUP) query = *(const uint4*)(s.q + g * Q_STRIDE + b * 32 + q * 8);
      const uint4 &k0 = a.k[0][b], &k1 = a.k[1][b];
      multiply_add(d, k0.x, k1.x, k0.y, k1.y, query.x, query.y);
      multiply_add(e, k0.z, k1.z, k0.w, k1.w, query.z, query.w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) d[i] += e[i];
  }

  // Probabilities of the tile, relative to the running maximum, as the second operand of a product over
  // positions: weights[0] holds positions 2q and 2q + 1 for head g, weights[1] the positions 8 further on.
  template <int DP>
  DEV void score(Tile<DP>& a, float (&d)[4], int start, int position, u32 (&weights)[2]) {
    if (start + g > position) d[0] = d[1] = NEG_INF;
    if (start + 8 + g > position) d[2] = d[3] = NEG_INF;
    float correction[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float highest = fmaxf(d[i], d[2 + i]);
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, o));
      // A tile has at least one position of the context, so the maximum is finite unless a score is not.
      highest = fmaxf(highest, a.maximum[i]);
      correction[i] = exp2_fast(a.maximum[i] - highest);
      a.maximum[i] = highest;
      d[i] = exp2_fast(d[i] - highest);
      d[2 + i] = exp2_fast(d[2 + i] - highest);
      a.sum[i] = a.sum[i] * correction[i] + (d[i] + d[2 + i]);
    }
    weights[0] = transpose8(pack_bf16(d[0], d[1]));
    weights[1] = transpose8(pack_bf16(d[2], d[3]));
#pragma unroll
    for (int r = 0; r < Tile<DP>::VR; r++) {
      a.o[r][0] *= correction[0];
      a.o[r][1] *= correction[1];
      a.o[r][2] *= correction[0];
      a.o[r][3] *= correction[1];
    }
  }

  template <int DP>
  DEV void add_values(Tile<DP>& a, const u32 (&weights)[2]) {
#pragma unroll
    for (int r = 0; r < Tile<DP>::VR; r++) {
      const u32 *v0 = a.v[0], *v1 = a.v[1], *v2 = a.v[2], *v3 = a.v[3];
      multiply_add(a.o[r], __byte_perm(v0[r], v1[r], 0x5410), __byte_perm(v0[r], v1[r], 0x7632),
                   __byte_perm(v2[r], v3[r], 0x5410), __byte_perm(v2[r], v3[r], 0x7632), weights[0],
                   weights[1]);
    }
  }

  // Where a (warp, head)'s column lies in the scratch; turned by 4 per head to spread the banks.
  template <int DP>
  DEV float* scratch(int place, int head, int column) {
    return part + place * DP + (column + head * 4) % DP;
  }

  // Brings a tile's keys and values (64 columns from `column` on) into L2.
  DEV void prefetch_tile(int layer, int page, int kv_head, int start, int position, int column) {
    const int row = lane & 15;
    const u16* rows = page_rows(lane < 16 ? p.k_cache : p.v_cache, layer, page, kv_head, start);
    if (start + row < position) prefetch_l2(rows + row * HEAD_DIM + column);
  }

  template <int DP>
  DEV void begin(Tile<DP>& a) {
    a.maximum[0] = a.maximum[1] = NEG_INF;
    a.sum[0] = a.sum[1] = 0.f;
#pragma unroll
    for (int r = 0; r < Tile<DP>::VR; r++) a.o[r][0] = a.o[r][1] = a.o[r][2] = a.o[r][3] = 0.f;
  }

  // One warp's share: tiles first, first + step, ... below count. DP columns of V from `column` on. The
  // results go to part[warp][head][DP] and maxima. IS_LONG: the next tile is brought into L2. EARLY_V: V is
  // loaded with K, where registers allow it.
  template <int DP, bool EARLY_V, bool IS_LONG, class Arrive>
  DEV void attend(int layer, int kv_head, int token, int first, int step, int column, const Arrive& arrive) {
    Tile<DP> a;
    begin(a);
    const int position = s.position[token], count = position / POSITIONS + 1;
    const i64* table = p.page_table + s.slot[token] * p.table_width;
    int page = s.first_page[warp];
    // Without a tile nothing is loaded, but the registers are set: else they would hold their values all the
    // time.
    load_k(a, page_rows(p.k_cache, layer, page, kv_head, first * POSITIONS), first * POSITIONS, position);
    if (EARLY_V)
      load_v(a, page_rows(p.v_cache, layer, page, kv_head, first * POSITIONS), first * POSITIONS, position,
             column);
    auto page_of = [&](int tile) {
      return tile < count ? (int)__ldg(table + tile * POSITIONS / PAGE_SIZE) : 0;
    };
    int next_page = page_of(first + step);
    arrive();
#pragma unroll 1
    for (int tile = first; tile < count; tile += step) {
      const int start = tile * POSITIONS, next = start + step * POSITIONS;
      if (!EARLY_V) load_v(a, page_rows(p.v_cache, layer, page, kv_head, start), start, position, column);
      substitute(a, start, position, column);
      float d[4];
      multiply_qk(a, d);
      page = next_page;
      if (next <= position) load_k(a, page_rows(p.k_cache, layer, page, kv_head, next), next, position);
      next_page = page_of(tile + 2 * step);
      u32 weights[2];
      score(a, d, start, position, weights);
      add_values(a, weights);
      if (EARLY_V && next <= position)
        load_v(a, page_rows(p.v_cache, layer, page, kv_head, next), next, position, column);
      if (IS_LONG) prefetch_tile(layer, next_page, kv_head, next + step * POSITIONS, position, column);
    }
    put(a);
  }

  // A warp's results, see `attend`.
  template <int DP>
  DEV void put(Tile<DP>& a) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) a.sum[i] += __shfl_xor_sync(~0u, a.sum[i], o);
      const int head = q * 2 + i;
      if (head < GROUP && g == 0) {
        s.maxima[(warp * GROUP + head) * 2] = a.maximum[i];
        s.maxima[(warp * GROUP + head) * 2 + 1] = a.sum[i];
      }
      if (head < GROUP)
#pragma unroll
        for (int r = 0; r < Tile<DP>::VR; r++) {
          float* to = scratch<DP>(warp * GROUP + head, head, g * Tile<DP>::VW + r * 2);
          to[0] = a.o[r][i];
          to[1] = a.o[r][2 + i];
        }
    }
  }

  // Takes the pair's new q, k and v, normalises, rotates and scales them into shared memory, and stores k and
  // v.
  DEV void take_qkv(int layer, int kv_head, int token, bool stores) {
    constexpr int LANES = HEAD_DIM / 8, ROTATING = (GROUP + 1) * LANES, V_START = (ROTATING + 31) / 32 * 32;
    const u16* vector = vectors() + X_QKV + token * QkvVector::STRIDE;
    auto at = [&](int i) { return vector + QkvVector::place(i); };
    u16* k_to = (u16*)page_rows(p.k_cache, layer, s.page[token], kv_head, s.position[token]);
    u16* v_to = (u16*)page_rows(p.v_cache, layer, s.page[token], kv_head, s.position[token]);
    if (t < V_START) {
      const int head = min(t / LANES, GROUP), j = t % LANES;  // the last head is k's
      const int from =
          (head < GROUP ? (kv_head * GROUP + head) * HEAD_DIM : Q_SIZE + kv_head * HEAD_DIM) + j * 4;
      uint2 lo, hi;
      poll_twice4(at(from), at(from + HEAD_DIM / 2), lo, hi);
      float a[4] = {low_half(lo.x), high_half(lo.x), low_half(lo.y), high_half(lo.y)};
      float b[4] = {low_half(hi.x), high_half(hi.x), low_half(hi.y), high_half(hi.y)};
#if QK_NORM
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < 4; i++) sum += a[i] * a[i] + b[i] * b[i];
#pragma unroll
      for (int o = 1; o < LANES; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
      const float r = rsqrtf(sum * (1.f / HEAD_DIM) + p.eps);
      const u16* weights = p.qk_norms + (layer * 2 + (head == GROUP)) * HEAD_DIM + j * 4;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        a[i] *= r * __uint_as_float((u32)weights[i] << 16);
        b[i] *= r * __uint_as_float((u32)weights[HEAD_DIM / 2 + i] << 16);
      }
#endif
      const float scale = head < GROUP ? p.score_scale : 1.f;
      float c[4], d[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float cosine = s.cos_sin[j * 4 + i], sine = s.cos_sin[HEAD_DIM / 2 + j * 4 + i];
        c[i] = (a[i] * cosine - b[i] * sine) * scale;
        d[i] = (b[i] * cosine + a[i] * sine) * scale;
      }
      const uint2 first = make_uint2(pack_bf16(c[0], c[1]), pack_bf16(c[2], c[3])),
                  second = make_uint2(pack_bf16(d[0], d[1]), pack_bf16(d[2], d[3]));
      if (t < ROTATING) {
        u16* to = head < GROUP ? s.q + head * Q_STRIDE : s.k_new;
        *(uint2*)(to + j * 4) = first;
        *(uint2*)(to + HEAD_DIM / 2 + j * 4) = second;
        if (head == GROUP && stores) {
          *(uint2*)(k_to + j * 4) = first;
          *(uint2*)(k_to + HEAD_DIM / 2 + j * 4) = second;
        }
      }
    } else if (t < V_START + LANES) {
      const int j = t - V_START;
      const int from = Q_SIZE + (KV_HEADS + kv_head) * HEAD_DIM + j * 4;
      uint2 first, second;
      poll_twice4(at(from), at(from + HEAD_DIM / 2), first, second);
      *(uint2*)(s.v_new + j * 4) = first;
      *(uint2*)(s.v_new + HEAD_DIM / 2 + j * 4) = second;
      if (stores) {
        *(uint2*)(v_to + j * 4) = first;
        *(uint2*)(v_to + HEAD_DIM / 2 + j * 4) = second;
      }
    }
  }
};

// ---------------------------------------------------------------- the step

constexpr int DIRECT_PARTS =
    SPLITS < HEAD_DIM / 16 ? SPLITS : HEAD_DIM / 16;  // parts of the columns in a short context
constexpr int DIRECT_DP = HEAD_DIM / DIRECT_PARTS;
constexpr int HEAD_PARTS = SPLITS / DIRECT_PARTS < GROUP ? SPLITS / DIRECT_PARTS : GROUP;
constexpr int PART_HEADS = (GROUP + HEAD_PARTS - 1) / HEAD_PARTS;
static_assert(DIRECT_DP == 16 || DIRECT_DP == 32 || DIRECT_DP == 64, "columns of a short context");
constexpr int SPLIT_DP = 64, HALVES = HEAD_DIM / SPLIT_DP, SPLIT_TILES = 16 / HALVES;
constexpr int PAIR_OUTPUTS = GROUP * HEAD_DIM, SPLIT_OUTPUTS = (PAIR_OUTPUTS + SPLITS - 1) / SPLITS;
static_assert(16 * GROUP * SPLIT_DP <= PART_FLOATS && PAIR_OUTPUTS <= PART_FLOATS, "attention's scratch");

// This block's (token, KV head) pair and its place among the pair's blocks. Worked out anew where it is
// needed, which costs less than registers.
struct Pair {
  int split, head, token, position;
  int first;  // of its blocks
  bool exists, is_direct;

  DEV Pair(const Shared& s, int direct_limit) {
    u32 cta;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(cta));
    const int pair = cta / SPLITS;
    split = cta % SPLITS;
    first = cta - split;
    head = pair % KV_HEADS;
    token = pair / KV_HEADS;
    exists = token < TOKENS;
    position = exists ? s.position[token] : 0;
    is_direct = SPLITS == 1 || position < direct_limit;
  }
  DEV int first_tile(int warp) const { return is_direct ? warp : warp / HALVES * SPLITS + split; }
};

#include "kv_stream.cu"

extern "C" __global__ void __launch_bounds__(CONSUMERS + 64, 1) tape_step(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 memory[];
  u8* const xs = memory + STAGES * CHUNK_BYTES;
  float* const part = (float*)(xs + TOKENS * XS_STRIDE);
  Shared& s = *(Shared*)(part + PART_FLOATS);
  const int tid = threadIdx.x, cta = blockIdx.x;
  const u32 full = shared_address(s.full), empty = shared_address(s.empty);
  if (tid == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (tid >= CONSUMERS) {
    if (tid >= CONSUMERS + 32) {
      Cleaner cleaner{(u16*)p.exchange, p.epochs[cta], tid & 31, cta};
      // Besides, the warp copies values into the ring.
      Producer copier{p, nullptr, 0, shared_address(memory), full, empty, evict_first(), cta};
      const KvSource<true> values(p, cta);
#pragma unroll 1
      for (int layer = 0; layer < LAYERS; layer++) {
        if (values.chunks > 0) values.stream(copier, s, layer);
        cleaner.clean();
      }
    } else if (KV_STREAM || tid == CONSUMERS) {
      Producer producer{p, p.tape, 0, shared_address(memory), full, empty, evict_first(), cta};
      producer.stream<Qkv>();
      // What this loads is waited for while copies are in flight.
      const KvSource<false> keys(p, cta);
#pragma unroll 1
      for (int layer = 0; layer < LAYERS; layer++) {
        if (layer > 0) producer.stream<Qkv>();
        if (keys.chunks > 0) keys.stream(producer, s, layer);
        producer.stream<Out>();
        producer.stream<Up>();
        producer.stream<Down>();
      }
      producer.stream<Head>();
    }
    return;
  }

  Consumer c{p, memory, xs, part, s, full, empty, cta, 0u, 0u};
  c.refresh();
  // A padding row computes token 0 at position 0 of the null page.
  if (tid < TOKENS) {
    const i64 slot = p.slots[tid];
    const bool is_real = slot >= 0 && slot < p.num_slots;
    const i64 position = is_real ? p.computed_len[slot] : 0;
    s.slot[tid] = is_real ? slot : 0;
    s.position[tid] = (int)position;
    s.token[tid] = is_real ? (int)p.last_token[slot] : 0;
    s.page[tid] = is_real ? (int)p.page_table[slot * p.table_width + position / PAGE_SIZE] : 0;
    s.temperature[tid] = is_real ? p.temperature[slot] : 0.f;
    u64 z = is_real ? (u64)p.stream[slot] + (u64)p.sample_position[slot] * 0x9E3779B97F4A7C15ull : 0;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z = z ^ (z >> 31);
    s.key[tid * 2] = (u32)z;
    s.key[tid * 2 + 1] = (u32)(z >> 32);
  }
  for (int i = tid; i < TOKENS * XS_STRIDE / 16; i += CONSUMERS) ((uint4*)xs)[i] = make_uint4(0, 0, 0, 0);
  c.epoch = p.epochs[cta];
  consumers_sync();

  const int warp = tid >> 5;
  if (const Pair pair(s, p.direct_limit); pair.exists) {
    const int position = pair.position, pair_token = pair.token, first_tile = pair.first_tile(warp);
    if (tid < HEAD_DIM) s.cos_sin[tid] = p.cos_sin[(i64)position * HEAD_DIM + tid];
    if ((tid & 31) == 0) {
      // The null page, too, is page 0: a padding row must not look into a slot's pages.
      int page = 0;
      if (first_tile * POSITIONS <= position)
        page =
            position < PAGE_SIZE
                ? s.page[pair_token]
                : (int)p.page_table[s.slot[pair_token] * p.table_width + first_tile * POSITIONS / PAGE_SIZE];
      s.first_page[warp] = page;
    }
  }
  // Thread i keeps the residual of row i % OWN_ROWS of this block, token i / OWN_ROWS, in shared memory.
  auto owns = [&](int i) { return i < OWN_ROWS * TOKENS && cta * OWN_ROWS + i % OWN_ROWS < HIDDEN; };
  static_assert(OWN_ROWS * TOKENS <= CONSUMERS, "a thread keeps one residual");
  if (owns(tid))
    s.residual[tid] = __uint_as_float(
        (u32)p.embedding[(i64)s.token[tid / OWN_ROWS] * HIDDEN + cta * OWN_ROWS + tid % OWN_ROWS] << 16);

#pragma unroll 1
  for (int layer = 0; layer < LAYERS; layer++) {
    // ---- QKV
    c.refresh();
    c.load_first<Qkv>(0, Qkv::CHUNKS);
    const u16* norm = p.norms + 2 * layer * HIDDEN;
    auto release = [&]() { c.release_first<Qkv>(0, Qkv::CHUNKS); };
    if (layer > 0)
      c.take<HiddenVector, HIDDEN, true, false>(c.vectors() + X_H2, 0, norm, HIDDEN, release);
    else
      c.take<HiddenVector, HIDDEN, true, true>(p.embedding, 0, norm, HIDDEN, release);
    c.epoch++;
    if (4 % Qkv::KB == 0) c.keep_x<Qkv>();
    c.multiply_round<Qkv>(0, Qkv::UNITS);
    c.base += Qkv::CHUNKS;
    consumers_sync();
#pragma unroll 1
    for (int i = c.t; i < Qkv::UNITS * 8 * TOKENS; i += CONSUMERS) {
      const int token = i / (Qkv::UNITS * 8), local = i % (Qkv::UNITS * 8),
                row = cta * Qkv::UNITS * 8 + local;
      if (row < QKV_SIZE) {
        float value = c.total<Qkv>(local, token) * c.inverse_rms(token);
#if QKV_BIAS
        value += __uint_as_float((u32)p.qkv_bias[layer * QKV_SIZE + row] << 16);
#endif
        c.publish<QkvVector>(X_QKV, token, row, value);
      }
    }

    // ---- attention
    c.refresh();
    if (const Pair pair(s, p.direct_limit); pair.exists) {
      const int split = pair.split, kv_head = pair.head, pair_token = pair.token, position = pair.position;
      const bool is_direct = pair.is_direct;
      const bool stores = is_direct ? split == 0 : (position / POSITIONS) % SPLITS == split;
      auto arrive = [&]() {
        c.take_qkv(layer, kv_head, pair_token, stores);
        consumers_sync();
      };
      if (is_direct) {
        const int part_index = split % DIRECT_PARTS, head_part = split / DIRECT_PARTS;
        c.attend<DIRECT_DP, true, false>(layer, kv_head, pair_token, c.warp, 16, part_index * DIRECT_DP,
                                         arrive);
        consumers_sync();
        const int head = head_part * PART_HEADS + c.t / DIRECT_DP, d = c.t % DIRECT_DP;
        if (c.t < PART_HEADS * DIRECT_DP && head < GROUP) {
          float highest = NEG_INF, sum = 0.f, value = 0.f;
#pragma unroll
          for (int w = 0; w < 16; w++) highest = fmaxf(highest, s.maxima[(w * GROUP + head) * 2]);
#pragma unroll
          for (int w = 0; w < 16; w++) {
            const float f = exp2_fast(s.maxima[(w * GROUP + head) * 2] - highest);
            value = fmaf(f, *c.scratch<DIRECT_DP>(w * GROUP + head, head, d), value);
            sum = fmaf(f, s.maxima[(w * GROUP + head) * 2 + 1], sum);
          }
          c.publish<AttVector>(X_ATT, pair_token,
                               (kv_head * GROUP + head) * HEAD_DIM + part_index * DIRECT_DP + d, value / sum);
        }
      } else if (SPLITS > 1) {
        const int half = c.warp % HALVES;
        int total = 0;
#pragma unroll
        for (int i = 0; i < TOKENS; i++) total += s.position[i];
        if (const int chunks = kv_chunks(p, split, position, total); chunks > 0) {
          attend_streamed(c, pair_token, split, chunks, arrive);
          c.base += chunks;
        } else
          c.attend<SPLIT_DP, HEAD_DIM == 64, true>(layer, kv_head, pair_token,
                                                   (c.warp / HALVES) * SPLITS + split, SPLIT_TILES * SPLITS,
                                                   half * SPLIT_DP, arrive);
        consumers_sync();
        for (int i = c.t; i < PAIR_OUTPUTS; i += CONSUMERS) {
          const int head = i / HEAD_DIM, d = i % HEAD_DIM, w0 = d / SPLIT_DP;
          float highest = NEG_INF, sum = 0.f, value = 0.f;
#pragma unroll
          for (int w = 0; w < SPLIT_TILES; w++)
            highest = fmaxf(highest, s.maxima[((w * HALVES + w0) * GROUP + head) * 2]);
          if (highest > NEG_INF) {
#pragma unroll
            for (int w = 0; w < SPLIT_TILES; w++) {
              const int from = (w * HALVES + w0) * GROUP + head;
              const float f = exp2_fast(s.maxima[from * 2] - highest);
              value = fmaf(f, *c.scratch<SPLIT_DP>(from, head, d % SPLIT_DP), value);
              sum = fmaf(f, s.maxima[from * 2 + 1], sum);
            }
          }
          const int to = i / SPLIT_OUTPUTS;
          store_pair(p.exchange + X_PART +
                         2 * (((pair.first + to) * SPLITS + split) * SPLIT_OUTPUTS + i % SPLIT_OUTPUTS),
                     __float_as_uint(value), c.epoch);
          if (d < 2)
            store_pair(p.exchange + X_ML + 2 * (((pair.first + split) * GROUP + head) * 2 + d),
                       __float_as_uint(d ? sum : highest), c.epoch);
        }
        consumers_sync();  // part is written again below
        for (int i = c.t; i < SPLITS * SPLIT_OUTPUTS + 2 * SPLITS * GROUP; i += CONSUMERS) {
          if (i < SPLITS * SPLIT_OUTPUTS)
            part[i] = __uint_as_float(poll_pair(
                p.exchange + X_PART + 2 * ((pair.first + split) * SPLITS * SPLIT_OUTPUTS + i), c.epoch));
          else {
            const int j = i - SPLITS * SPLIT_OUTPUTS;
            s.combine_ml[j] =
                __uint_as_float(poll_pair(p.exchange + X_ML + 2 * (pair.first * GROUP * 2 + j), c.epoch));
          }
        }
        consumers_sync();
        if (c.t < SPLIT_OUTPUTS) {
          const int output = split * SPLIT_OUTPUTS + c.t, head = output / HEAD_DIM;
          float highest = NEG_INF, sum = 0.f, value = 0.f;
#pragma unroll
          for (int i = 0; i < SPLITS; i++) highest = fmaxf(highest, s.combine_ml[(i * GROUP + head) * 2]);
#pragma unroll
          for (int i = 0; i < SPLITS; i++) {
            const float f = exp2_fast(s.combine_ml[(i * GROUP + head) * 2] - highest);
            value = fmaf(f, part[i * SPLIT_OUTPUTS + c.t], value);
            sum = fmaf(f, s.combine_ml[(i * GROUP + head) * 2 + 1], sum);
          }
          c.publish<AttVector>(X_ATT, pair_token, kv_head * GROUP * HEAD_DIM + output, value / sum);
        }
      }
    }

    // ---- output projection + residual
    c.refresh();
    c.load_first<Out>(0, Out::CHUNKS);
    c.take<AttVector, Q_SIZE, false, false>(c.vectors() + X_ATT, 0, nullptr, Q_SIZE,
                                            [&]() { c.release_first<Out>(0, Out::CHUNKS); });
    if (4 % Out::KB == 0) c.keep_x<Out>();
    c.multiply_round<Out>(0, Out::UNITS);
    c.base += Out::CHUNKS;
    consumers_sync();
    if (owns(c.t)) {
      const float value = s.residual[c.t] + c.total<Out>(c.t % OWN_ROWS, c.t / OWN_ROWS);
      s.residual[c.t] = value;
      c.publish<HiddenVector>(X_H1, c.t / OWN_ROWS, cta * OWN_ROWS + c.t % OWN_ROWS, value);
    }

    // ---- gate and up
    c.refresh();
    c.load_first<Up>(0, Up::CHUNKS);
    c.take<HiddenVector, HIDDEN, true, false>(c.vectors() + X_H1, 0, p.norms + (2 * layer + 1) * HIDDEN,
                                              HIDDEN, [&]() { c.release_first<Up>(0, Up::CHUNKS); });
    asm volatile("bar.arrive 2, 544;" ::: "memory");
    if (4 % Up::KB == 0) c.keep_x<Up>();
#pragma unroll 1
    for (int first = 0; first < Up::UNITS; first += Up::ROUND) {
      const int count = min(Up::ROUND, Up::UNITS - first);
      if (first > 0) {
        consumers_sync();
        c.load_first<Up>(first * Up::KB, (first + count) * Up::KB);
        c.release_first<Up>(first * Up::KB, (first + count) * Up::KB);
      }
      c.multiply_round<Up>(first, count);
      consumers_sync();
#pragma unroll 1
      for (int i = c.t; i < count * 4 * TOKENS; i += CONSUMERS) {
        const int token = i / (count * 4), local = i % (count * 4), row = (local >> 2) * 8 + (local & 3);
        const int column = cta * OWN_FF + first * 4 + local;
        const float r = c.inverse_rms(token), gate = c.total<Up>(row, token) * r,
                    up = c.total<Up>(row + 4, token) * r;
        if (column < INTERMEDIATE)
          c.publish<FfVector>(X_FF, token, column, gate / (1.f + __expf(-gate)) * up);
      }
    }
    c.base += Up::CHUNKS;

    // ---- down + residual
    c.refresh();
    c.load_first<Down>(0, Down::CHUNKS);
    consumers_sync();  // the sums above are read
#pragma unroll
    for (int unit = 0; unit < Down::UNITS; unit++)
#pragma unroll
      for (int m = c.q; m < TOKENS; m += 4) c.part_of<Down>(unit, c.warp)[m * 8] = 0.f;
    __syncwarp();
    constexpr int PASS_KB = XS_COLUMNS / DOWN_CK < DOWN_KB ? XS_COLUMNS / DOWN_CK : DOWN_KB,
                  PASSES = (DOWN_KB + PASS_KB - 1) / PASS_KB;
    constexpr int PASS_COLUMNS = PASS_KB * DOWN_CK;
    static_assert(INTERMEDIATE > (PASSES - 1) * PASS_COLUMNS && INTERMEDIATE % 8 == 0, "passes");
    static_assert(PASSES == 1 || PASS_KB * DOWN_UNITS % 4 == 0, "a pass must keep chunks with their groups");
    // The loads of a pass are in flight during the products of the one before, if they fit into registers.
    constexpr int PASS_TURNS = Consumer::Share<PASS_COLUMNS>::TURNS;
    constexpr bool AHEAD = PASSES > 1 && PASS_TURNS <= 4;
    const u16* const ff = c.vectors() + X_FF;
    uint4 coming[PASS_TURNS];
    auto release_down = [&]() { c.release_first<Down>(0, Down::CHUNKS); };
    if constexpr (AHEAD) {
      c.ask<PASS_COLUMNS>(coming, ff, 0, INTERMEDIATE);
      release_down();
    }
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass++) {
      const int from = pass * PASS_COLUMNS, columns = INTERMEDIATE - from;
      if (pass > 0) consumers_sync();
      if constexpr (AHEAD)
        c.receive<PASS_COLUMNS>(coming, ff, from, columns);
      else
        c.take<FfVector, PASS_COLUMNS, false, false>(ff, from, nullptr, columns, [&]() {
          if (pass == 0) release_down();
        });
      if (AHEAD && pass + 1 < PASSES)
        c.ask<PASS_COLUMNS>(coming, ff, from + PASS_COLUMNS, columns - PASS_COLUMNS);
      const int end = min((pass + 1) * PASS_KB, DOWN_KB) * DOWN_UNITS;
#pragma unroll 1
      for (int i = pass * PASS_KB * DOWN_UNITS + c.group; i < end; i += 4) {
        if (i != c.group) {
          c.load_chunk<Down>(i);
          c.release_chunk<Down>(i);
        }
        c.multiply<Down, true, false>(i % DOWN_UNITS, c.warp, (i / DOWN_UNITS - pass * PASS_KB) * DOWN_CK);
      }
    }
    c.base += Down::CHUNKS;
    asm volatile("bar.sync 3, 544;" ::: "memory");
    if (owns(c.t)) {
      const float value = s.residual[c.t] + c.total<Down>(c.t % OWN_ROWS, c.t / OWN_ROWS);
      s.residual[c.t] = value;
      c.publish<HiddenVector>(X_H2, c.t / OWN_ROWS, cta * OWN_ROWS + c.t % OWN_ROWS, value);
    }
  }

  // ---- LM head and draw
  c.refresh();
  c.load_first<Head>(0, Head::CHUNKS);
  c.take<HiddenVector, HIDDEN, true, false>(c.vectors() + X_H2, 0, p.norms + 2 * LAYERS * HIDDEN, HIDDEN,
                                            [&]() { c.release_first<Head>(0, Head::CHUNKS); });
  if (4 % Head::KB == 0) c.keep_x<Head>();
  const int token = c.t % TOKENS;
  const float r = c.inverse_rms(token), temperature = s.temperature[token];
  const float sharpness = temperature > 0.f ? 1.f / fmaxf(temperature, 1e-5f) : 1.f;
  float best = NEG_INF;
  u32 best_id = 0x7fffffffu, is_bad = 0;
#pragma unroll 1
  for (int first = 0; first < Head::UNITS; first += Head::ROUND) {
    const int count = min(Head::ROUND, Head::UNITS - first);
    if (first > 0) {
      consumers_sync();
      c.load_first<Head>(first * Head::KB, (first + count) * Head::KB);
      c.release_first<Head>(first * Head::KB, (first + count) * Head::KB);
    }
    c.multiply_round<Head>(first, count);
    consumers_sync();
#pragma unroll 1
    for (int local = c.t / TOKENS; local < count * 8; local += CONSUMERS / TOKENS) {
      const int row = cta * OWN_VOCAB + first * 8 + local;
      if (row < VOCAB) {
        const float logit = c.total<Head>(local, token) * r;
        if (p.logits) p.logits[(i64)token * VOCAB + row] = logit;
        if (p.draw) {
          if (!(logit < __int_as_float(0x7f800000))) is_bad = 0x80000000u;
          float value = logit * sharpness;
          if (temperature > 0.f) value -= log_race_time(s.key[token * 2], s.key[token * 2 + 1], row);
          if (value > best) {
            best = value;
            best_id = row;
          }
        }
      }
    }
  }
  if (c.t == 0) p.epochs[cta] = c.epoch;
  if (!p.draw) return;
  c.epoch++;

  // The best of this block's rows, then of all blocks'; the lowest id among equals.
  auto better = [&](float value, u32 id) {
    is_bad |= id & 0x80000000u;
    id &= 0x7fffffffu;
    if (value > best || (value == best && id < best_id)) {
      best = value;
      best_id = id;
    }
  };
#pragma unroll
  for (int o = 16; o >= TOKENS; o >>= 1) {
    const float value = __shfl_xor_sync(~0u, best, o);
    const u32 id = __shfl_xor_sync(~0u, best_id | is_bad, o);
    better(value, id);
  }
  if (c.lane < TOKENS) {
    s.best_value[c.lane * 16 + c.warp] = best;
    s.best_id[c.lane * 16 + c.warp] = best_id | is_bad;
  }
  consumers_sync();
  if (c.t < TOKENS) {
    best = NEG_INF;
    best_id = 0x7fffffffu;
    is_bad = 0;
    for (int w = 0; w < 16; w++) better(s.best_value[c.t * 16 + w], s.best_id[c.t * 16 + w]);
    u32* to = p.exchange + X_BEST + (c.t * CTAS + cta) * 4;
    store_pair(to, __float_as_uint(best), c.epoch);
    store_pair(to + 2, best_id | is_bad, c.epoch);
  }
  if (cta != 0) return;
  // Warp m finishes token m.
  if (c.warp < TOKENS) {
    best = NEG_INF;
    best_id = 0x7fffffffu;
    is_bad = 0;
    for (int i = c.lane; i < CTAS; i += 32) {
      const u32* from = p.exchange + X_BEST + (c.warp * CTAS + i) * 4;
      const float value = __uint_as_float(poll_pair(from, c.epoch));
      better(value, poll_pair(from + 2, c.epoch));
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) {
      const float value = __shfl_xor_sync(~0u, best, o);
      const u32 id = __shfl_xor_sync(~0u, best_id | is_bad, o);
      better(value, id);
    }
    if (c.lane == 0) {
      const bool is_valid = !is_bad && best > NEG_INF;
      const i64 next = is_valid ? (i64)best_id : 0, slot = p.slots[c.warp];
      if (slot >= 0 && slot < p.num_slots) {
        p.tokens[c.warp] = is_valid ? next : -1;
        p.last_token[slot] = next;
        p.computed_len[slot] = s.position[c.warp] + 1;
        p.sample_position[slot] += 1;
      }
    }
  }
}
