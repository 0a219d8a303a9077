// A mixture of experts in place of a layer's gate, up and down, for one token (tape.cu includes this).
//
// Experts stay where other kernels read them: gate and up [experts][2 * EXPERT_SIZE][HIDDEN], rows of gate
// first, and down [experts][HIDDEN][EXPERT_SIZE]. The producer copies the rows of the picked ones into the
// ring.
//
// Router. Each block has ROUTER_ROWS of its rows and multiplies them as the hidden vector arrives. The logits
// are exchanged as FP32 values with epochs. The producer's warp of every block takes them, picks for itself
// what all blocks pick, and goes on copying without another hop. While it waits, the first HELD chunks of the
// next layer's QKV arrive in stages of their own: the ring could not pass them.
//
// Work. The picked experts' rows of gate and up, one expert's after the other's, are dealt out evenly, so a
// block reads one run of rows or two. Of every picked expert's down a block reads the rows of the hidden
// values that it owns. Sums over the columns, then over the picks with their weights, run in a fixed order,
// in FP32.
//
// Products. A chunk is 2 * HALF rows, as they lie. Rows i and HALF + i share columns in one m16n8k16 product,
// in operand rows g and 8 + g with g % HALF = i; g / HALF says which segment of the columns. Operand column g
// has the input vector at row g's columns, so of the result the diagonal is wanted, and each row may take its
// columns in an order of its own. Odd rows take every two 64-byte pieces the other way round: rows lie 128
// bytes apart, or a multiple, and without that two of them would meet in the same banks.

static_assert(TOKENS == 1 && KV_STREAM, "one token; the producer is a warp");
constexpr int EXPERT_SIZE = INTERMEDIATE / PICKS;
constexpr i64 LAYER_BYTES = (i64)CTAS * (Qkv::CHUNKS * Qkv::BYTES + Out::CHUNKS * Out::BYTES);

// KB chunks of COLUMNS columns make whole rows.
template <int HALF_, int KB_, int COLUMNS_>
struct Rows {
  static constexpr int HALF = HALF_, KB = KB_, COLUMNS = COLUMNS_, SEGMENTS = 8 / HALF,
                       BLOCKS = COLUMNS / (SEGMENTS * 128),  // of 32 columns, per segment and warp
      ROW_BYTES = COLUMNS * 2, BYTES = 2 * HALF * ROW_BYTES;
  static constexpr int SLICES = 4 * SEGMENTS;  // partial sums per row and chunk
  static constexpr int HELD_CHUNKS = 0;
  static_assert(BLOCKS * SEGMENTS * 128 == COLUMNS && BLOCKS <= 4 && BYTES <= CHUNK_BYTES, "chunk");
  static DEV int block(int i, int g) { return (BLOCKS % 2 == 0) ? i ^ (g & 1) : (i + (g & 1)) % BLOCKS; }
};
// HALF rows of gate, and the rows of up that belong to them.
using Pairs = Rows<PAIRS_HALF, PAIRS_KB, PAIRS_CK>;
using Sums = Rows<4, SUMS_KB, SUMS_CK>;
constexpr int PAIRS_CHUNKS = OWN_FF / Pairs::HALF * Pairs::KB,
              PAIR_STRIDE = 2 * Pairs::HALF * Pairs::SLICES;  // floats per chunk
constexpr int SUMS_CHUNKS = PICKS * OUT_UNITS * Sums::KB, PICK_ITEMS = Sums::KB * Sums::SLICES,
              SUM_STRIDE = PICKS * PICK_ITEMS + 8;  // floats per row; the 8 spread the banks
static_assert(OWN_FF * CTAS == INTERMEDIATE && OWN_ROWS * CTAS == HIDDEN, "even shares");
static_assert(OWN_FF % Pairs::HALF == 0 && EXPERT_SIZE % Pairs::HALF == 0, "pairs of one expert");
static_assert(4 % Pairs::KB == 0, "a group's chunks have the same columns");
static_assert(PAIRS_CHUNKS * PAIR_STRIDE <= PART_FLOATS && OWN_ROWS * SUM_STRIDE <= PART_FLOATS, "sums");
static_assert(HIDDEN % 256 == 0 && HIDDEN / 8 <= CONSUMERS && INTERMEDIATE <= XS_COLUMNS, "vectors");
static_assert(HELD <= Qkv::CHUNKS, "held chunks");
static_assert(EXPERTS <= 512 && PICKS <= EXPERTS, "experts");

// ---------------------------------------------------------------- producer

// A warp, whose first lane copies.
struct ExpertProducer : Producer {
  static constexpr int PER_LANE = (EXPERTS + 31) / 32, PICK_TURNS = (PICKS + 31) / 32;
  static constexpr int NOTHING = -0x7fffffff - 1;  // less than any logit's order
  // A group must not mistake an earlier use of a stage for the next one, see plan_block in layout.py.
  static constexpr u32 MAX_WINDOW = STAGES % 4 == 0 ? STAGES - 1 : STAGES - 4;

  Shared& s;
  int lane;
  float logit[PER_LANE];  // of experts PER_LANE * lane ...
  float highest_logit;

  template <class R>
  DEV u32 window() {
    return min(p.window * (u32)CHUNK_BYTES / R::BYTES, MAX_WINDOW);
  }

  // The next stage of the ring.
  template <class R>
  DEV u32 next_stage() {
    const u32 stage = index % STAGES;
    claim(window<R>(), R::BYTES);
    index++;
    return stage;
  }

  template <class R, int COUNT>
  DEV void copy_rows(u32 to, const u16* from, u32 stage) {
    if (R::KB == 1)
      copy_bulk(to, from, COUNT * R::ROW_BYTES, full + 8 * stage, policy);
    else
#pragma unroll 1
      for (int i = 0; i < COUNT; i++)
        copy_bulk(to + i * R::ROW_BYTES, from + i * (R::KB * R::COLUMNS), R::ROW_BYTES, full + 8 * stage,
                  policy);
  }

  // The first chunks of a layer's QKV.
  DEV void hold(int layer) {
#pragma unroll 1
    for (int c = 0; c < HELD; c++) {
      const u32 stage = STAGES + c, w = window<Qkv>();
      if (layer > 0) barrier_wait(empty + 8 * stage, (layer - 1) & 1);
      if (c >= w)
        barrier_wait(full + 8 * (stage - w), layer & 1);
      else if (index + c >= w) {
        const u32 q = index + c - w;
        barrier_wait(full + 8 * (q % STAGES), (q / STAGES) & 1);
      }
      barrier_expect(full + 8 * stage, Qkv::BYTES);
      copy_bulk(ring + stage * CHUNK_BYTES, p.tape + layer * LAYER_BYTES + (i64)(c * CTAS + cta) * Qkv::BYTES,
                Qkv::BYTES, full + 8 * stage, policy);
    }
  }

  DEV void stream_pairs(const u16* matrix) {
    if (lane != 0) {
      index += PAIRS_CHUNKS;
      return;
    }
#pragma unroll 1
    for (int c = 0; c < PAIRS_CHUNKS; c++) {
      const int pair = cta * OWN_FF + c / Pairs::KB * Pairs::HALF, row = pair % EXPERT_SIZE;
      const u16* gate = matrix + ((i64)s.picks[pair / EXPERT_SIZE] * (2 * EXPERT_SIZE) + row) * HIDDEN +
                        c % Pairs::KB * Pairs::COLUMNS;
      const u32 stage = next_stage<Pairs>(), to = ring + stage * CHUNK_BYTES;
      copy_rows<Pairs, Pairs::HALF>(to, gate, stage);
      copy_rows<Pairs, Pairs::HALF>(to + Pairs::BYTES / 2, gate + (i64)EXPERT_SIZE * HIDDEN, stage);
    }
  }

  DEV void stream_sums(const u16* matrix) {
    if (lane != 0) {
      index += SUMS_CHUNKS;
      return;
    }
#pragma unroll 1
    for (int c = 0; c < SUMS_CHUNKS; c++) {
      const int unit = c / Sums::KB % OUT_UNITS, row = cta * OWN_ROWS + unit * 8;
      const u16* from = matrix + ((i64)s.picks[c / (OUT_UNITS * Sums::KB)] * HIDDEN + row) * EXPERT_SIZE +
                        c % Sums::KB * Sums::COLUMNS;
      const u32 stage = next_stage<Sums>();
      copy_rows<Sums, 8>(ring + stage * CHUNK_BYTES, from, stage);
    }
  }

  // Waits for the logits. Equal ones favour the lower expert; what is no number comes last: see
  // pick_experts.py.
  DEV void pick(u32 epoch) {
    u64 word[PER_LANE];
    Watch watch;
    while (true) {
      bool has_all = true;
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        word[i] = load_pair(p.exchange + X_LOGITS + LOGIT_WORDS * min(lane * PER_LANE + i, EXPERTS - 1));
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) has_all &= (u32)(word[i] >> 32) == epoch;
      if (has_all) break;
      watch.failed();
    }
    __syncwarp();
    int order[PER_LANE], expert[PER_LANE];  // order: an integer, greater where the logit is
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      expert[i] = lane * PER_LANE + i;
      const bool is_expert = expert[i] < EXPERTS;
      logit[i] = is_expert ? __uint_as_float((u32)word[i]) : NEG_INF;
      const int bits = (int)__float_as_uint(logit[i] + 0.f);  // minus zero equals zero
      order[i] = bits < 0 ? bits ^ 0x7fffffff : bits;
      if (logit[i] != logit[i]) order[i] = NOTHING + 1;
      if (!is_expert) order[i] = NOTHING;
    }
    // The lane's own in falling order, so that only the first is compared with other lanes'.
#pragma unroll
    for (int end = PER_LANE - 1; end > 0; end--)
#pragma unroll
      for (int i = 0; i < end; i++) {
        const bool swaps = order[i] < order[i + 1];
        const int a = order[i], b = expert[i];
        order[i] = swaps ? order[i + 1] : a;
        expert[i] = swaps ? expert[i + 1] : b;
        order[i + 1] = swaps ? a : order[i + 1];
        expert[i + 1] = swaps ? b : expert[i + 1];
      }
    int highest = NOTHING;
#pragma unroll 1
    for (int n = 0; n < PICKS; n++) {
      const int found = __reduce_max_sync(~0u, order[0]);
      const u32 lanes = __ballot_sync(~0u, order[0] == found);
      if (n == 0) highest = found;
      const bool is_mine = lane == __ffs((int)lanes) - 1;
      if (is_mine) {
        s.picks[n] = expert[0];
        s.pick_weights[n] = value_of(found);
      }
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) {
        order[i] = !is_mine ? order[i] : i + 1 < PER_LANE ? order[(i + 1) % PER_LANE] : NOTHING;
        expert[i] = is_mine ? expert[(i + 1) % PER_LANE] : expert[i];
      }
    }
    const float top = value_of(highest);
    highest_logit = top > NEG_INF ? top : 0.f;
    __syncwarp();
  }

  // The logit of an order.
  static DEV float value_of(int order) {
    return __uint_as_float((u32)(order < 0 ? order ^ 0x7fffffff : order));
  }

  // Makes the picks' logits their weights. Logits that are no numbers make all weights none, too.
  DEV void weigh() {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const float share = __expf(logit[i] - highest_logit);
      if (!NORMALIZE || share != share) total += share;
    }
    float share[PICK_TURNS];
#pragma unroll
    for (int i = 0; i < PICK_TURNS; i++) {
      const int n = i * 32 + lane;
      share[i] = n < PICKS ? __expf(s.pick_weights[n] - highest_logit) : 0.f;
      if (NORMALIZE) total += share[i];
    }
    total = warp_sum(total);
#pragma unroll
    for (int i = 0; i < PICK_TURNS; i++)
      if (i * 32 + lane < PICKS) s.pick_weights[i * 32 + lane] = share[i] / total;
    __syncwarp();
  }
};

DEV void produce_with_experts(const Params& p, u32 ring, u32 full, u32 empty, Shared& s) {
  const int lane = threadIdx.x & 31, cta = blockIdx.x;
  ExpertProducer producer{{p, p.tape, 0, ring, full, empty, evict_first(), cta}, s, lane};
  const u32 epoch = p.epochs[cta];
  if (lane == 0) producer.hold(0);
  const KvSource<false> keys(p, cta);
#pragma unroll 1
  for (int layer = 0; layer < LAYERS; layer++) {
    const u16 *gate_up = (const u16*)p.experts[layer * 2], *down = (const u16*)p.experts[layer * 2 + 1];
    producer.source = p.tape + layer * LAYER_BYTES + (i64)HELD * CTAS * Qkv::BYTES;
    producer.template stream<Qkv, HELD>();
    if (keys.chunks > 0) keys.stream(producer, s, layer);
    producer.template stream<Out>();
    if (lane == 0 && layer + 1 < LAYERS) producer.hold(layer + 1);
    __syncwarp();
    producer.pick(epoch + layer + 1);
    producer.stream_pairs(gate_up);
    __syncwarp();
    producer.weigh();
    producer.stream_sums(down);
    __syncwarp();
  }
  producer.source = p.tape + LAYERS * LAYER_BYTES;
  producer.template stream<Head>();
}

// ---------------------------------------------------------------- consumers

DEV const u16* router_row(const Params& p, int layer, int expert) {
  return p.routers + ((i64)layer * EXPERTS + expert) * HIDDEN;
}

// By one warp, long before the layer.
DEV void prefetch_router(const Params& p, int layer) {
  for (int i = threadIdx.x & 31; i < ROUTER_ROWS * (HIDDEN / 64); i += 32) {
    const int expert = blockIdx.x * ROUTER_ROWS + i / (HIDDEN / 64);
    if (expert < EXPERTS) prefetch_l2(router_row(p, layer, expert) + i % (HIDDEN / 64) * 64);
  }
}

// Eight terms of a row's product with the hidden vector times the norm's weights.
DEV float route8(const uint4& x, const uint4& norm, const uint4& row) {
  const u32 a[4] = {x.x, x.y, x.z, x.w}, b[4] = {norm.x, norm.y, norm.z, norm.w},
            c[4] = {row.x, row.y, row.z, row.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum = fmaf(low_half(a[i]) * low_half(b[i]), low_half(c[i]), sum);
    sum = fmaf(high_half(a[i]) * high_half(b[i]), high_half(c[i]), sum);
  }
  return sum;
}

// As `take` of X_H1, and this block's rows of the router, whose logits are published. Tells the cleaner.
DEV void take_and_route(Consumer& c, int layer) {
  const Params& p = c.p;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  uint4 x = zero, norm = zero, rows[ROUTER_ROWS];
  const int first = c.cta * ROUTER_ROWS;
  const bool is_mine = c.t < HIDDEN / 8;
#pragma unroll
  for (int i = 0; i < ROUTER_ROWS; i++) {
    rows[i] = zero;
    if (is_mine && first + i < EXPERTS) rows[i] = __ldg((const uint4*)router_row(p, layer, first + i) + c.t);
  }
  float squares = 0.f;
  if (is_mine) {
    const u16* from = c.vectors() + X_H1 + HiddenVector::place(c.t * 8);
    norm = __ldg((const uint4*)(p.norms + (2 * layer + 1) * HIDDEN) + c.t);
    x = load_words4((const u32*)from);
    settle(x, from);
    squares = c.put8<true>(0, c.t, x, norm);
  }
  if (c.warp < NORM_WARPS) {
    squares = warp_sum(squares);
    if (c.lane == 0) c.s.sums_of_squares[c.warp] = squares;
#pragma unroll
    for (int i = 0; i < ROUTER_ROWS; i++) {
      const float sum = warp_sum(route8(x, norm, rows[i]));
      if (c.lane == 0) c.s.router_sums[i * NORM_WARPS + c.warp] = sum;
    }
  }
  consumers_sync();
  asm volatile("bar.arrive 2, 544;" ::: "memory");
  if (c.t < ROUTER_ROWS && first + c.t < EXPERTS) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < NORM_WARPS; i++) sum += c.s.router_sums[c.t * NORM_WARPS + i];
    store_pair(p.exchange + X_LOGITS + LOGIT_WORDS * (first + c.t), __float_as_uint(sum * c.inverse_rms(0)),
               c.epoch);
  }
}

template <class R>
DEV void load_rows(Consumer& c, int chunk) {
  const u32 index = c.base + chunk, stage = index % STAGES;
  barrier_wait(c.full + 8 * stage, (index / STAGES) & 1);
  __syncwarp();
  const u8* from = c.ring + stage * CHUNK_BYTES + c.g % R::HALF * R::ROW_BYTES +
                   (c.g / R::HALF * 4 + c.quarter) * (R::BLOCKS * 64) + c.q * 16;
#pragma unroll
  for (int i = 0; i < R::BLOCKS; i++) {
    const u8* piece = from + R::block(i, c.g) * 64;
    c.v[2 * i] = *(const uint4*)piece;
    c.v[2 * i + 1] = *(const uint4*)(piece + R::BYTES / 2);
  }
  __syncwarp();
}

// The lane's part of the input vector from value `column` of xs on.
template <class R>
DEV void load_input(Consumer& c, int column) {
  const u8* from = c.xs + column * 2 + (c.g / R::HALF * 4 + c.quarter) * (R::BLOCKS * 64) + c.q * 16;
#pragma unroll
  for (int i = 0; i < R::BLOCKS; i++) c.x[0][i] = *(const uint4*)(from + R::block(i, c.g) * 64);
}

// This warp's share of the sums of a chunk's rows, put down `stride` floats apart.
template <class R>
DEV void multiply_rows(Consumer& c, float* to, int stride) {
  float d[2][4];  // two chains
#pragma unroll
  for (int j = 0; j < 2; j++) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.f;
#pragma unroll
  for (int i = 0; i < R::BLOCKS; i++) {
    const uint4 &a = c.v[2 * i], &b = c.v[2 * i + 1], &y = c.x[0][i];
    multiply_add(d[0], a.x, b.x, a.y, b.y, y.x, y.y);
    multiply_add(d[1], a.z, b.z, a.w, b.w, y.z, y.w);
  }
  if (c.q != c.g >> 1) return;
  const bool is_odd = c.g & 1;
  to += c.g % R::HALF * stride + c.quarter * R::SEGMENTS + c.g / R::HALF;
  to[0] = is_odd ? d[0][1] + d[1][1] : d[0][0] + d[1][0];
  to[R::HALF * stride] = is_odd ? d[0][3] + d[1][3] : d[0][2] + d[1][2];
}

DEV void mix_experts(Consumer& c, int layer) {
  float* const part = c.part;
  Shared& s = c.s;

  // ---- norm and router
  c.refresh();
  take_and_route(c, layer);

  // ---- gate and up
  const float r = c.inverse_rms(0);
  load_input<Pairs>(c, c.group % Pairs::KB * Pairs::COLUMNS);
#pragma unroll 1
  for (int i = c.group; i < PAIRS_CHUNKS; i += 4) {
    load_rows<Pairs>(c, i);
    c.release_chunk<Pairs>(i);
    multiply_rows<Pairs>(c, part + i * PAIR_STRIDE, Pairs::SLICES);
  }
  c.base += PAIRS_CHUNKS;
  consumers_sync();
  // Eight lanes add a pair's partial sums.
  c.refresh();
#pragma unroll 1
  for (int i = c.t; i < (OWN_FF + 3) / 4 * 32; i += CONSUMERS) {
    const int pair = i / 8, unit = pair / Pairs::HALF, row = pair % Pairs::HALF;
    float gate = 0.f, up = 0.f;
    if (pair < OWN_FF) {
#pragma unroll
      for (int j = 0; j < Pairs::KB * Pairs::SLICES / 8; j++) {
        const int slice = j * 8 + i % 8;
        const float* from = part + (unit * Pairs::KB + slice / Pairs::SLICES) * PAIR_STRIDE +
                            row * Pairs::SLICES + slice % Pairs::SLICES;
        gate += from[0];
        up += from[Pairs::HALF * Pairs::SLICES];
      }
    }
#pragma unroll
    for (int o = 4; o; o >>= 1) {
      gate += __shfl_xor_sync(~0u, gate, o);
      up += __shfl_xor_sync(~0u, up, o);
    }
    if (i % 8 == 0 && pair < OWN_FF) {
      gate *= r;
      c.publish<FfVector>(X_FF, 0, c.cta * OWN_FF + pair, gate / (1.f + __expf(-gate)) * (up * r));
    }
  }

  // ---- down + residual
  c.refresh();
  // A group without a chunk clears its registers, so that they hold nothing from one phase to the next.
  if (c.group < SUMS_CHUNKS)
    load_rows<Sums>(c, c.group);
  else {
#pragma unroll
    for (int i = 0; i < 8; i++) c.v[i] = make_uint4(0, 0, 0, 0);
  }
  c.take<FfVector, INTERMEDIATE, false, false>(c.vectors() + X_FF, 0, nullptr, INTERMEDIATE, [&]() {
    if (c.group < SUMS_CHUNKS) c.release_chunk<Sums>(c.group);
  });
#pragma unroll 1
  for (int i = c.group; i < SUMS_CHUNKS; i += 4) {
    if (i != c.group) {
      load_rows<Sums>(c, i);
      c.release_chunk<Sums>(i);
    }
    const int pick = i / (OUT_UNITS * Sums::KB), unit = i / Sums::KB % OUT_UNITS, kb = i % Sums::KB;
    load_input<Sums>(c, pick * EXPERT_SIZE + kb * Sums::COLUMNS);
    multiply_rows<Sums>(c, part + unit * 8 * SUM_STRIDE + pick * PICK_ITEMS + kb * Sums::SLICES, SUM_STRIDE);
  }
  c.base += SUMS_CHUNKS;
  asm volatile("bar.sync 3, 544;" ::: "memory");
  // A warp per row.
#pragma unroll 1
  for (int row = c.warp; row < OWN_ROWS; row += CONSUMERS / 32) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < PICKS * PICK_ITEMS; i += 32) {
      const int item = i + c.lane;
      if (item < PICKS * PICK_ITEMS)
        sum = fmaf(part[row * SUM_STRIDE + item], s.pick_weights[item / PICK_ITEMS], sum);
    }
    sum = warp_sum(sum);
    if (c.lane == 0) {
      const float value = s.residual[row] + sum;
      s.residual[row] = value;
      c.publish<HiddenVector>(X_H2, 0, c.cta * OWN_ROWS + row, value);
    }
  }
}
