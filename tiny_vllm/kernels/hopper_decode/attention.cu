// Decode attention for Hopper at large batches: what paged_decode_attention.py describes, with BF16 queries,
// keys and values in BF16 or FP8 (fp8_cache.py), and heads of 64 or 128. Memory-bound, so what matters is
// that every multiprocessor always has enough reads under way, and that all of them end at the same time.
//
// A pair is a sequence and a KV head; its context is read in pieces of PIECE positions, each a part of a
// page. All pieces of all pairs, one after another, are cut evenly among the blocks, whatever the lengths (a
// pair counts EXTRA_POSITIONS more than it has, for what beginning and ending one costs): a block begins and
// ends anywhere in a pair. What it has of a pair is a segment, and it reads a segment in tiles of TILE
// positions. Each warp works out by itself, from the context lengths, what its block has to do.
//
// Two warps copy keys and values (TMA) into a ring of STAGES tiles, without a break between pairs. They do
// not wait for the preceding kernel: of what it writes, only the newest token's key and value are read, and
// these come another way. A third warp waits, and then copies each segment's queries and its newest key and
// value into a slot. WARPS warps compute, each a whole tile on its own:
//
//     scores [TILE, 8 heads] = keys q^T     weights = 2^(scores - maximum)     output^T += values^T weights
//
// Positions, and then the values' columns, are the 16 rows of the tensor cores' products, and the up to 8
// query heads of the KV head are the 8 columns: nothing is padded with more than heads. Keys and values are
// left operands as they lie in shared memory (the copies permute 16-byte pieces of its rows of 128 bytes by
// the row, so that 8 rows are 8 different banks), and scores turn into right operands within registers.
//
// Outputs are joined in an order that depends on the lengths only. At a segment's end the warp of the last
// tile adds what the other warps have, and where a pair is shared among blocks, the first of them, whose last
// segment it is, adds what the others left in memory: it was their first segment, so it has been there for
// long, unless a context is so long that a block has no other. A flag says that a part is there. Its one
// reader puts it back to 0, so launches share the flags, one after another: they are raised only behind the
// wait for the preceding kernel, and that has waited for all before it.
//
// FP8: a tile's codes lie in shared memory as they do in the cache, in rows of 128 bytes (two positions with
// heads of 64), and their scales behind the tiles. A 16-bit unit of an `ldmatrix` is two codes, which one
// instruction turns into two FP16 numbers, exactly, so products are of FP16. What a lane gets of a block:
//
//     keys     four dimensions of a position. Which two are terms 2 c and 2 c + 1 of a product, and which 8
//              further, is free: queries are loaded in the same order.
//     values   two dimensions of two positions. Two bytes change places, and the pairs are of positions, as
//              terms must be: rows r and r + 8 of the product are dimensions 2 r and 2 r + 1.
//
// Scales belong to positions: those of keys multiply scores, those of values the weights, behind their sum.
// FP16's range is met by powers of two, which round nothing: a head's largest query lies in 2^14 to 2^15, and
// so does a weight of 1 at the largest scale so far (`unit`), which shrinks what was summed as the maximum
// does. So a weight has 11 bits down to 2^-28 of that, and a query down to 2^-29 of the largest.
//
// FROM_PARTS: the preceding kernel leaves the parts of a QKV product (rope_from_parts.py), and a slot's
// content is made here: the sum of a segment's heads over the parts, RMSNorm of each, rotation, one rounding.
// Where the segment has the newest token, its key and value go to their cell of the caches as well, where
// only later steps read them. A lane has LANE_DIMS neighbouring dimensions of each head, so a row is read and
// written without a gap, and what a dimension is turned with lies 16 lanes further. All values of two parts
// are asked for before the first is used; as that lasts longer than a short context, QUERY_WARPS warps take
// turns with segments. Ordinary stores fill a slot, and one arrival behind them all hands it over. A row whose
// cell is one of the null page is padding: it has no pieces and costs nothing, its output is 0.
//
// Macros: HEAD_DIM, GROUP, KV_HEADS, PAGE_SIZE, FP8 (0 or 1), HALF (of products: the same), TILE, STAGES,
// WARPS, QUERY_WARPS (1 if queries are given), BLOCKS (of a multiprocessor), EXTRA_POSITIONS (that a pair
// counts), SEQUENCES (at most), FROM_PARTS, BIAS and NORMS (of parts; 0 or 1), WATCHDOG_NS; TABLE and LENS
// are integer types.

constexpr int PIECES_OF_32 = PAGE_SIZE % 32 == 0 ? 32 : 16;
constexpr int PIECE = PAGE_SIZE % 64 == 0 && TILE % 64 == 0 ? 64 : PIECES_OF_32;
constexpr int PIECES = TILE / PIECE;  // of a tile
constexpr int EXTRA = EXTRA_POSITIONS / PIECE;
constexpr int PAGE_PIECES = PAGE_SIZE / PIECE;     // of a page
constexpr int SPANS = FP8 ? 1 : HEAD_DIM / 64;     // of 128 bytes, next to each other in a row
constexpr int SHARING = FP8 ? 128 / HEAD_DIM : 1;  // rows in 128 bytes
constexpr int STEPS = HEAD_DIM / 16;               // of a product over a head
constexpr int BLOCKS_OF_16 = TILE / 16;
constexpr int PRODUCING_WARPS = 2 + QUERY_WARPS, SLOTS = 4;
constexpr int THREADS = (WARPS + PRODUCING_WARPS) * 32;
constexpr u32 QUERY_ROW_BYTES = HEAD_DIM * 2, ROW_BYTES = HEAD_DIM * (FP8 ? 1 : 2);
constexpr u32 PIECE_BYTES = PIECE * ROW_BYTES, TILE_BYTES = TILE * ROW_BYTES;
constexpr u32 SCALE_BYTES = FP8 ? TILE * 2 : 0;  // of a tile
// A row's scale comes with its neighbours: copies are of 16 bytes.
constexpr u32 SCALE_COPY = FP8 ? 16 : 0;
constexpr u32 QUERY_BYTES = GROUP * QUERY_ROW_BYTES;
constexpr u32 SLOT_BYTES = QUERY_BYTES + 2 * ROW_BYTES + 2 * SCALE_COPY;
// Of a warp's or a block's part of an output: STEPS times four floats of each lane, maxima and sums.
constexpr int PART_FLOATS = (STEPS + 1) * 32 * 4;
// Of parts: a row, what a lane has of a head, and how many parts are loaded before they are added. Large
// batches have one or two, and registers do not allow more.
constexpr int COLUMNS = (GROUP + 2) * KV_HEADS * HEAD_DIM, LANE_DIMS = HEAD_DIM / 32, PARTS_AT_ONCE = 2;
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "spans of 64");
static_assert(TILE % 32 == 0 && TILE <= 128 && PAGE_SIZE % 16 == 0, "whole pieces");
static_assert(GROUP <= 8, "columns of a product");
static_assert((WARPS & (WARPS - 1)) == 0, "warps take turns");
// A wait cannot tell a phase from the one before the last: whoever waits for one must have seen the one
// before.
static_assert(STAGES % WARPS == 0, "a stage belongs to one warp");
static_assert(SLOTS % QUERY_WARPS == 0, "a slot belongs to one warp");
static_assert(FROM_PARTS ? !FP8 : QUERY_WARPS == 1, "16-bit caches only; one thread copies queries");

struct alignas(64) Params {
  TensorMap k, v;  // boxes: 64 columns of 16 bits, PIECE / SHARING rows, SPANS
  const u16* q;    // [num_sequences][KV_HEADS][GROUP][HEAD_DIM], unless FROM_PARTS
  u16* output;     // the same
  u8 *k_cache, *v_cache;
  const u16 *k_scales, *v_scales;  // FP8 only: [pages][KV_HEADS][PAGE_SIZE]
  const TABLE* page_table;         // [rows][table_width]
  const LENS* context_lens;        // [num_sequences]
  const LENS* table_rows;          // [num_sequences], or null: 0, 1, 2, ..
  float* parts;                    // [blocks][PART_FLOATS]
  u32* flags;                      // [blocks], 0 before and after
  // FROM_PARTS only.
  const float* qkv_parts;        // [num_qkv_parts][num_sequences][COLUMNS]: queries, keys, values
  const u16* bias;               // [COLUMNS]
  const float* cos_sin;          // [positions][HEAD_DIM]: cosines, sines
  const i64* cells;              // [num_sequences], of the newest tokens
  const float *q_norm, *k_norm;  // [HEAD_DIM]
  float factor;                  // of the scores, for base 2
  float eps;
  int table_width, num_sequences, num_qkv_parts;
};

// Where things lie in shared memory.
struct Shared {
  u32 base;
  DEV Shared() : base((shared_base() + 1023) / 1024 * 1024) {}
  DEV u32 keys(int stage) const { return base + stage * TILE_BYTES; }
  DEV u32 values(int stage) const { return keys(STAGES + stage); }
  DEV u32 key_scales(int stage) const { return keys(2 * STAGES) + stage * SCALE_BYTES; }
  DEV u32 value_scales(int stage) const { return key_scales(STAGES + stage); }
  // A segment's queries, its newest key, its newest value, and in FP8 what holds the scales of both.
  DEV u32 slot(int index) const { return key_scales(2 * STAGES) + index * SLOT_BYTES; }
  DEV u32 part(int warp) const { return slot(SLOTS) + warp * PART_FLOATS * 4; }
  DEV u32 context_len(int sequence) const { return part(WARPS) + sequence * 4; }
  DEV u32 table_row(int sequence) const { return context_len(SEQUENCES + sequence); }
  DEV u32 barrier(int index) const { return context_len(2 * SEQUENCES) + index * 8; }
  DEV u32 full(int stage) const { return barrier(stage); }
  DEV u32 empty(int stage) const { return barrier(STAGES + stage); }
  DEV u32 slot_full(int index) const { return barrier(2 * STAGES + index); }
  DEV u32 slot_empty(int index) const { return barrier(2 * STAGES + SLOTS + index); }
  DEV u32 parts_full(int index) const { return barrier(2 * STAGES + 2 * SLOTS + index); }
  DEV u32 part_empty(int warp) const { return barrier(2 * STAGES + 3 * SLOTS + warp); }
};

// Where in a ring the thing of this number is, and the parity of the "full" barrier that it completes.
template <int SIZE>
struct Place {
  int index;
  u32 parity;
  DEV explicit Place(u32 number) : index(number % SIZE), parity(number / SIZE & 1) {}
};

// A block's share of a pair, in pieces; count: of the pair.
struct Segment {
  int sequence, kv_head, context_len, begin, end, count;
  DEV int num_tiles() const { return (end - begin + PIECES - 1) / PIECES; }
  DEV bool has_newest() const { return end == count; }
};

// The sum up to this lane's value, and with it.
DEV int sum_up(int value, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = shift_up(value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

DEV int count_pieces(int context_len) { return (context_len + PIECE - 1) / PIECE; }

// What a pair counts when work is shared out: a short one costs more than its bytes. The units behind its
// pieces are nobody's work.
DEV int count_units(int context_len) { return context_len == 0 ? 0 : count_pieces(context_len) + EXTRA; }

// The first of a block's units.
DEV int first_unit(int total, int block) {
  // total * block / blocks, which might not fit.
  return total / num_blocks() * block + total % num_blocks() * block / num_blocks();
}

// The segments of a block in order, each warp for itself.
struct Walk {
  const Shared& shared;
  int total = 0, left = 0;  // units of all blocks, of this one
  int sequence = 0, kv_head = 0, begin = 0;

  DEV Walk(const Params& p, const Shared& shared, int lane) : shared(shared) {
    const int share = (p.num_sequences + 31) / 32;
    int own = 0;
    for (int s = lane * share; s < min((lane + 1) * share, p.num_sequences); ++s)
      own += count_units(load_shared(shared.context_len(s)));
    const int with = sum_up(own, lane), before = with - own;
    total = (int)broadcast(with, 31) * KV_HEADS;
    const int first = first_unit(total, block_index());
    left = first_unit(total, block_index() + 1) - first;
    if (left == 0) return;
    // In units of one head.
    int unit = first / KV_HEADS;
    const int holder = 31 - leading_zeros(votes(unit >= before));
    unit -= (int)broadcast(before, holder);
    sequence = holder * share;
    int count = count_units(load_shared(shared.context_len(sequence)));
    while (unit >= count) {
      unit -= count;
      count = count_units(load_shared(shared.context_len(++sequence)));
    }
    const int rest = first - (first / KV_HEADS - unit) * KV_HEADS;
    kv_head = rest / count;
    begin = rest % count;
  }

  DEV bool next(Segment& segment) {
    while (left > 0) {
      segment.sequence = sequence, segment.kv_head = kv_head;
      segment.context_len = load_shared(shared.context_len(sequence));
      segment.count = count_pieces(segment.context_len);
      const int units = min(count_units(segment.context_len) - begin, left);
      segment.begin = begin, segment.end = min(segment.count, begin + units);
      left -= units;
      begin = 0;
      if (++kv_head == KV_HEADS) kv_head = 0, ++sequence;
      if (segment.begin < segment.end) return true;
    }
    return false;
  }
};

DEV const TABLE* pages_of(const Params& p, const Shared& shared, int sequence) {
  return p.page_table + (i64)load_shared(shared.table_row(sequence)) * p.table_width;
}

// Up to 32 pieces of a segment, one a lane. The page is loaded long before it is needed.
struct Batch {
  TABLE page;
  int row, count;  // the piece's first row in the page, of all heads

  DEV Batch(const Params& p, Walk& walk, Segment& segment, int lane) : page(0), row(0), count(0) {
    if (segment.begin == segment.end && !walk.next(segment)) return;
    count = min(segment.end - segment.begin, 32);
    const int piece = segment.begin + min(lane, count - 1);
    page = load_constant(pages_of(p, walk.shared, segment.sequence) + piece / PAGE_PIECES);
    row = segment.kv_head * PAGE_SIZE + piece % PAGE_PIECES * PIECE;
    segment.begin += count;
  }
};

// All keys or all values of a block. One thread copies, and the compiler knows that by `is_elected`.
template <bool KEYS>
DEV void produce_tiles(const Params& p, const Shared& shared, int lane) {
  Walk walk(p, shared, lane);
  Segment segment = {};
  const u64 policy = streaming_policy();
  u32 number = 0;
  Batch batch(p, walk, segment, lane);
  while (batch.count > 0) {
    const Batch next(p, walk, segment, lane);
    const int row = (int)batch.page * (KV_HEADS * PAGE_SIZE) + batch.row;
    for (int first = 0; first < batch.count; first += PIECES, ++number) {
      const Place<STAGES> place(number);
      int rows[PIECES];
#pragma unroll
      for (int i = 0; i < PIECES; ++i) rows[i] = (int)broadcast(row, first + i);
      if (is_elected()) {
        const int count = min(batch.count - first, PIECES);
        const u32 full = shared.full(place.index);
        const u32 target = KEYS ? shared.keys(place.index) : shared.values(place.index);
        wait(shared.empty(place.index), place.parity ^ 1);
        arrive_expecting(full, count * (PIECE_BYTES + SCALE_BYTES / PIECES));
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
          if (i < count) {
            copy_box(target + i * PIECE_BYTES, KEYS ? p.k : p.v, 0, rows[i] / SHARING, 0, full, policy);
            if constexpr (FP8)
              copy_run(
                  (KEYS ? shared.key_scales(place.index) : shared.value_scales(place.index)) + i * PIECE * 2,
                  (KEYS ? p.k_scales : p.v_scales) + rows[i], PIECE * 2, full);
          }
      }
    }
    batch = next;
  }
}

// BF16 numbers as FP32: the first of two, and the second.
DEV float lower_half(u32 both) { return float_of(both << 16); }
DEV float upper_half(u32 both) { return float_of(both & 0xffff0000u); }

DEV TABLE page_of_newest(const Params& p, const Shared& shared, const Segment& segment) {
  return load_constant(pages_of(p, shared, segment.sequence) + (segment.context_len - 1) / PAGE_SIZE);
}

// What the preceding kernel wrote. Pages are loaded a segment ahead.
DEV void copy_queries(const Params& p, const Shared& shared, int lane) {
  Walk walk(p, shared, lane);
  Segment segment, next;
  bool has_segment = walk.next(segment);
  TABLE page = has_segment ? page_of_newest(p, shared, segment) : 0;
  wait_for_predecessor();
  for (u32 round = 0; has_segment; ++round) {
    has_segment = walk.next(next);
    const TABLE next_page = has_segment ? page_of_newest(p, shared, next) : 0;
    if (is_elected()) {
      const Place<SLOTS> place(round);
      const u32 slot = shared.slot(place.index), full = shared.slot_full(place.index);
      const i64 pair = (i64)segment.sequence * KV_HEADS + segment.kv_head;
      const i64 row =
          ((i64)page * KV_HEADS + segment.kv_head) * PAGE_SIZE + (segment.context_len - 1) % PAGE_SIZE;
      wait(shared.slot_empty(place.index), place.parity ^ 1);
      arrive_expecting(full, segment.has_newest() ? SLOT_BYTES : QUERY_BYTES);
      copy_run(slot, p.q + pair * (GROUP * HEAD_DIM), QUERY_BYTES, full);
      if (segment.has_newest()) {
        const u32 newest = slot + QUERY_BYTES;
        copy_run(newest, p.k_cache + row * ROW_BYTES, ROW_BYTES, full);
        copy_run(newest + ROW_BYTES, p.v_cache + row * ROW_BYTES, ROW_BYTES, full);
        if constexpr (FP8) {
          copy_run(newest + 2 * ROW_BYTES, p.k_scales + row / 8 * 8, SCALE_COPY, full);
          copy_run(newest + 2 * ROW_BYTES + SCALE_COPY, p.v_scales + row / 8 * 8, SCALE_COPY, full);
        }
      }
    }
    segment = next, page = next_page;
  }
}

// What makes a segment's slot of parts.
struct Maker {
  const Params& p;
  const int lane;
  // Of the lane's dimensions.
  float cosines[LANE_DIMS], sines[LANE_DIMS], q_norm[LANE_DIMS], k_norm[LANE_DIMS];
  int cell;
  float heads[GROUP + 2][LANE_DIMS];  // queries, newest key and value

  DEV Maker(const Params& p, int lane) : p(p), lane(lane) {
    if constexpr (NORMS)
      load_floats(q_norm, p.q_norm + lane * LANE_DIMS), load_floats(k_norm, p.k_norm + lane * LANE_DIMS);
  }

  // What no preceding kernel of the chain writes.
  DEV void load_place(const Segment& segment) {
    const float* row = p.cos_sin + (i64)(segment.context_len - 1) * HEAD_DIM + lane % 16 * LANE_DIMS;
    load_floats(cosines, row), load_floats(sines, row + HEAD_DIM / 2);
    cell = (int)load_constant(p.cells + segment.sequence);
  }

  DEV void add_parts(const Segment& segment) {
    const int count = segment.has_newest() ? GROUP + 2 : GROUP;
    const int queries = segment.kv_head * GROUP * HEAD_DIM + lane * LANE_DIMS;
    const int newest = segment.kv_head * HEAD_DIM + lane * LANE_DIMS;
    const auto place = [&](const auto* row, int head) {
      return head < GROUP ? row + queries + head * HEAD_DIM : row + newest + head * KV_HEADS * HEAD_DIM;
    };
#pragma unroll
    for (int head = 0; head < GROUP + 2; ++head)
#pragma unroll
      for (int i = 0; i < LANE_DIMS; i += 2) {
        const u32 both = BIAS ? load_constant((const u32*)(place(p.bias, head) + i)) : 0;
        heads[head][i] = lower_half(both), heads[head][i + 1] = upper_half(both);
      }
    const float* part = p.qkv_parts + (i64)segment.sequence * COLUMNS;
    const i64 step = (i64)p.num_sequences * COLUMNS;
    for (int left = p.num_qkv_parts; left > 0; left -= PARTS_AT_ONCE) {
      float values[PARTS_AT_ONCE][GROUP + 2][LANE_DIMS];
#pragma unroll
      for (int i = 0; i < PARTS_AT_ONCE; ++i, part += step)
#pragma unroll
        for (int head = 0; head < GROUP + 2; ++head)
          if (i < left && head < count) load_floats(values[i][head], place(part, head));
#pragma unroll
      for (int i = 0; i < PARTS_AT_ONCE; ++i)
#pragma unroll
        for (int head = 0; head < GROUP + 2; ++head)
          if (i < left && head < count)
#pragma unroll
            for (int j = 0; j < LANE_DIMS; ++j) heads[head][j] += values[i][head][j];
    }
  }

  // Queries and the key.
  DEV void norm_and_turn() {
    if constexpr (NORMS) {
      float squares[GROUP + 1];
#pragma unroll
      for (int head = 0; head <= GROUP; ++head) {
        squares[head] = 0;
#pragma unroll
        for (int i = 0; i < LANE_DIMS; ++i)
          squares[head] = multiply_add(heads[head][i], heads[head][i], squares[head]);
      }
#pragma unroll
      for (int bit = 1; bit < 32; bit *= 2)
#pragma unroll
        for (int head = 0; head <= GROUP; ++head) squares[head] += exchange(squares[head], bit);
#pragma unroll
      for (int head = 0; head <= GROUP; ++head) {
        const float scale = reciprocal_root(multiply_add(squares[head], 1.f / HEAD_DIM, p.eps));
#pragma unroll
        for (int i = 0; i < LANE_DIMS; ++i) heads[head][i] *= scale * (head < GROUP ? q_norm[i] : k_norm[i]);
      }
    }
#pragma unroll
    for (int head = 0; head <= GROUP; ++head)
#pragma unroll
      for (int i = 0; i < LANE_DIMS; ++i) {
        const float partner = exchange(heads[head][i], 16), sine = lane < 16 ? -sines[i] : sines[i];
        heads[head][i] = multiply_add(partner, sine, heads[head][i] * cosines[i]);
      }
  }

  DEV void store(const Segment& segment, u32 slot) {
    const int row = (cell / PAGE_SIZE * KV_HEADS + segment.kv_head) * PAGE_SIZE + cell % PAGE_SIZE;
#pragma unroll
    for (int head = 0; head < GROUP + 2; ++head) {
      if (head == GROUP && !segment.has_newest()) break;
      u32 words[LANE_DIMS / 2];
#pragma unroll
      for (int i = 0; i < LANE_DIMS; i += 2) words[i / 2] = pack_bf16(heads[head][i], heads[head][i + 1]);
      const u32 own = lane * LANE_DIMS * 2;
      store_shared_words(slot + head * ROW_BYTES + own, words);
      if (head >= GROUP)
        store_words((head == GROUP ? p.k_cache : p.v_cache) + (i64)row * ROW_BYTES + own, words);
    }
  }
};

// Every QUERY_WARPS-th segment is this warp's, from that of number `first` on.
DEV void make_queries(const Params& p, const Shared& shared, int first, int lane) {
  Walk walk(p, shared, lane);
  Segment segment;
  const auto skip = [&](int count) {
    bool has_segment = false;
    for (int i = 0; i < count; ++i) has_segment = walk.next(segment);
    return has_segment;
  };
  bool has_segment = skip(first + 1);
  Maker maker(p, lane);
  if (has_segment) maker.load_place(segment);
  wait_for_predecessor();
  for (u32 round = first; has_segment; round += QUERY_WARPS) {
    const Place<SLOTS> place(round);
    maker.add_parts(segment);
    maker.norm_and_turn();
    wait(shared.slot_empty(place.index), place.parity ^ 1);
    maker.store(segment, shared.slot(place.index));
    warp_sync();
    if (lane == 0) arrive(shared.slot_full(place.index));
    has_segment = skip(QUERY_WARPS);
    if (has_segment) maker.load_place(segment);
  }
  // The kernels behind compute with rows of padding, too.
  constexpr int WIDTH = KV_HEADS * GROUP * HEAD_DIM;
  for (int i = block_index() * QUERY_WARPS + first; i < p.num_sequences; i += num_blocks() * QUERY_WARPS)
    if (load_shared(shared.context_len(i)) == 0)
      for (int column = lane * 2; column < WIDTH; column += 64)
        store_word(p.output + (i64)i * WIDTH + column, 0);
}

DEV void produce_queries(const Params& p, const Shared& shared, int index, int lane) {
  if constexpr (FROM_PARTS)
    make_queries(p, shared, index, lane);
  else
    copy_queries(p, shared, lane);
}

// Where a row of a tile lies, and its 128 bytes of a span.
DEV constexpr u32 row_place(int position, int span) {
  return position / PIECE * PIECE_BYTES + span * PIECE * 128 + position % PIECE * 128;
}

// Where 16 bytes of a position's row lie in a tile.
DEV constexpr u32 part_place(int position, int part) {
  if (!FP8) return row_place(position, part / 8) + (part ^ position) % 8 * 16;
  const u32 place = position * ROW_BYTES + part * 16;
  return place ^ place / 128 % 8 * 16;
}

// 2 to the power of `exponent` - 127.
DEV float power_of_2(int exponent) { return float_of((u32)exponent << 23); }

// FP8's limits of exponents: with these, powers of two that undo each other are numbers.
constexpr int LOWEST = 15, HIGHEST = 255;

struct Consumer {
  const Params& p;
  const Shared& shared;
  const int warp, lane;
  u32 given = 0;  // parts that other warps have added
  u32 queries[STEPS][2];
  // Of heads 2 c and 2 c + 1 for lane 4 r + c: maximum of raw scores, and this lane's part of the weights'
  // sum.
  float maximum[2], total[2];
  // Columns 16 i + r and 16 i + 8 + r (FP8: 16 i + 2 r and the next), both for these two heads.
  float output[STEPS][4];
  // FP8. Of these heads' queries: p.factor, and what their scale takes back. unit: outputs are multiples of
  // 2^(unit - 127 - 14), a weight of 1 at a scale of 2^(unit - 127) is 2^14.
  float factors[2];
  int unit;

  DEV Consumer(const Params& p, const Shared& shared, int warp, int lane)
      : p(p), shared(shared), warp(warp), lane(lane) {}

  // The warp is done with something.
  DEV void release(u32 barrier) {
    warp_sync();
    if (lane == 0) arrive(barrier);
  }

  DEV float factor(int head) const { return FP8 ? factors[head] : p.factor; }

  DEV void load_queries(u32 slot) {
#pragma unroll
    for (int step = 0; step < STEPS; step += 2) {
      u32 blocks[4];
      // Heads that are not there compute what head 0 does, and nobody reads it.
      const int head = lane % 8 < GROUP ? lane % 8 : 0;
      load_blocks(blocks, slot + head * QUERY_ROW_BYTES + step * 32 + lane / 8 * 16);
      queries[step][0] = blocks[0], queries[step][1] = blocks[1];
      queries[step + 1][0] = blocks[2], queries[step + 1][1] = blocks[3];
    }
  }

  // Lane 4 r + c: dimensions 4 c to 4 c + 3 of each 16 of head r, in FP16.
  DEV void load_scaled_queries(u32 slot) {
    const int head = lane / 4 < GROUP ? lane / 4 : 0;
    u32 largest = 0;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      load_shared_words(queries[step], slot + head * QUERY_ROW_BYTES + step * 32 + lane % 4 * 8);
#pragma unroll
      for (int i = 0; i < 2; ++i) largest = max_of_halves(largest, queries[step][i] & 0x7fff7fffu);
    }
    int exponent = max((int)(largest & 0xffff), (int)(largest >> 16)) >> 7;
    exponent = max(exponent, exchange(exponent, 1));
    exponent = max(max(exponent, exchange(exponent, 2)), LOWEST);
    const float scale = power_of_2(127 + 127 + 14 - exponent);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 both = queries[step][i];
        queries[step][i] = pack(lower_half(both) * scale, upper_half(both) * scale);
      }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      factors[i] = p.factor * power_of_2((int)broadcast(exponent, (lane % 4 * 2 + i) * 4) - 14);
  }

  DEV void begin(u32 slot) {
    if constexpr (FP8)
      load_scaled_queries(slot), unit = LOWEST;
    else
      load_queries(slot);
    maximum[0] = maximum[1] = NEG_INF;
    total[0] = total[1] = 0;
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) output[i][j] = 0;
  }

  // Zeros for the values from position `valid` on: weight 0 times NaN would be NaN.
  DEV void clear_values(int stage, int valid) {
    constexpr int PARTS = ROW_BYTES / 16;
    for (int i = lane; i < (TILE - valid) * PARTS; i += 32)
      store_shared_zeros(shared.values(stage) + part_place(valid + i / PARTS, i % PARTS));
    if constexpr (FP8)
      for (int i = valid + lane; i < TILE; i += 32) store_shared_half(shared.value_scales(stage) + i * 2, 0);
  }

  // The newest token's key and value, which may have been written after they were copied.
  DEV void put_newest(int stage, int position, u32 newest, int context_len) {
    constexpr int PARTS = ROW_BYTES / 16;
    if (lane < 2 * PARTS) {
      const u32 tile = lane < PARTS ? shared.keys(stage) : shared.values(stage);
      float words[4];
      load_shared_floats(words, newest + lane * 16);
      store_shared_floats(tile + part_place(position, lane % PARTS), words);
    }
    if constexpr (FP8)
      if (lane < 2) {
        const u32 scales = lane ? shared.value_scales(stage) : shared.key_scales(stage);
        const u32 own = newest + 2 * ROW_BYTES + lane * SCALE_COPY + (context_len - 1) % 8 * 2;
        store_shared_half(scales + position * 2, load_shared_half(own));
      }
  }

  DEV void score(float (&scores)[BLOCKS_OF_16][4], u32 keys) {
    const u32 own = keys + (lane % 16) * 128 + ((lane / 16) ^ (lane % 8)) * 16;
#pragma unroll
    for (int i = 0; i < BLOCKS_OF_16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[i][j] = 0;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        u32 blocks[4];
        load_blocks(blocks, (own ^ step % 4 * 32) + row_place(i * 16, step / 4));
        multiply_blocks(scores[i], blocks, queries[step][0], queries[step][1]);
      }
    }
  }

  DEV void score_codes(float (&scores)[BLOCKS_OF_16][4], u32 keys) {
    const u32 own = keys + part_place(lane % 16, lane / 16);
#pragma unroll
    for (int i = 0; i < BLOCKS_OF_16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[i][j] = 0;
#pragma unroll
      for (int step = 0; step < STEPS; step += 2) {
        u32 codes[4];
        load_blocks(codes, (own ^ step * 16) + i * 16 * ROW_BYTES);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          u32 blocks[4];
          unpack_codes(blocks[0], blocks[2], codes[half * 2]);
          unpack_codes(blocks[1], blocks[3], codes[half * 2 + 1]);
          multiply_blocks(scores[i], blocks, queries[step + half][0], queries[step + half][1]);
        }
      }
    }
  }

  // BF16 scales of positions 16 i + r and 16 i + 8 + r: transposed, a block's rows 2 c and 2 c + 1 are these
  // 8 positions and those.
  DEV void load_scales(u32 (&scales)[BLOCKS_OF_16], u32 place) {
#pragma unroll
    for (int i = 0; i < BLOCKS_OF_16; i += 4) {
      u32 blocks[4];
      const int block = min(i + lane / 8, BLOCKS_OF_16 - 1);
      load_blocks_transposed(blocks, place + block * 32 + lane % 2 * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (i + j < BLOCKS_OF_16) scales[i + j] = blocks[j];
    }
  }

  // Both heads' numbers at each position, times a scale.
  DEV void multiply_scales(float (&numbers)[BLOCKS_OF_16][4], const u32 (&scales)[BLOCKS_OF_16], float by) {
#pragma unroll
    for (int i = 0; i < BLOCKS_OF_16; ++i) {
      const float upper = lower_half(scales[i]) * by, lower = upper_half(scales[i]) * by;
      numbers[i][0] *= upper, numbers[i][1] *= upper;
      numbers[i][2] *= lower, numbers[i][3] *= lower;
    }
  }

  // Let outputs have a unit that these scales fit. Returns what that multiplies those so far with.
  DEV float raise_unit(const u32 (&scales)[BLOCKS_OF_16]) {
    u32 largest = scales[0];
#pragma unroll
    for (int i = 1; i < BLOCKS_OF_16; ++i) largest = max_of_halves(largest, scales[i]);
    largest = max_of_lanes(max((int)(largest & 0xffff), (int)(largest >> 16)));
    const int last = unit;
    // NaN may have a sign.
    unit = max(unit, min((int)(largest >> 7), HIGHEST));
    return power_of_2(max(127 + last - unit, 0));
  }

  // Of a segment: outputs without a unit.
  DEV void drop_unit() {
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) output[i][j] *= power_of_2(unit - 14);
  }

  // Scores become weights, and what was summed before shrinks, outputs by `rescale`, too. MASKED: only
  // `valid` positions are there.
  template <bool MASKED>
  DEV void weigh(float (&scores)[BLOCKS_OF_16][4], int valid, float rescale) {
    if constexpr (MASKED)
#pragma unroll
      for (int i = 0; i < BLOCKS_OF_16; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          // They may be NaN: they are replaced, not added to.
          scores[i][j] = i * 16 + j / 2 * 8 + lane / 4 < valid ? scores[i][j] : NEG_INF;
    float shrink[2];
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      float highest = max(scores[0][head], scores[0][2 + head]);
#pragma unroll
      for (int i = 1; i < BLOCKS_OF_16; ++i)
        highest = max(highest, max(scores[i][head], scores[i][2 + head]));
#pragma unroll
      for (int bit = 4; bit < 32; bit *= 2) highest = max(highest, exchange(highest, bit));
      // There is a position in every tile, so this is finite unless a score is not.
      highest = max(highest, maximum[head]);
      const float base = highest * factor(head);
      shrink[head] = exp2_fast(multiply_add(maximum[head], factor(head), -base));
      maximum[head] = highest;
      float sums[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < BLOCKS_OF_16; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& score = scores[i][half * 2 + head];
          score = exp2_fast(multiply_add(score, factor(head), -base));
          sums[half] += score;
        }
      total[head] = multiply_add(total[head], shrink[head], sums[0] + sums[1]);
      if constexpr (FP8) shrink[head] *= rescale;
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) output[i][j] *= shrink[j % 2];
  }

  DEV void add_values(const float (&weights)[BLOCKS_OF_16][4], u32 values) {
    const u32 own = values + (lane % 8 + lane / 16 * 8) * 128 + ((lane / 8 % 2) ^ (lane % 8)) * 16;
#pragma unroll
    for (int i = 0; i < BLOCKS_OF_16; ++i) {
      const u32 upper = transpose(pack(weights[i][0], weights[i][1]));
      const u32 lower = transpose(pack(weights[i][2], weights[i][3]));
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        u32 blocks[4];
        load_blocks_transposed(blocks, (own ^ step % 4 * 32) + row_place(i * 16, step / 4));
        multiply_blocks(output[step], blocks, upper, lower);
      }
    }
  }

  DEV void add_value_codes(const float (&weights)[BLOCKS_OF_16][4], u32 values) {
    const u32 own = values + part_place(lane % 16, lane / 16);
#pragma unroll
    for (int i = 0; i < BLOCKS_OF_16; ++i) {
      const u32 upper = transpose(pack(weights[i][0], weights[i][1]));
      const u32 lower = transpose(pack(weights[i][2], weights[i][3]));
#pragma unroll
      for (int step = 0; step < STEPS; step += 2) {
        u32 codes[4];
        load_blocks_transposed(codes, (own ^ step * 16) + i * 16 * ROW_BYTES);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          u32 blocks[4];
          unpack_codes(blocks[0], blocks[1], swap_middle_bytes(codes[half * 2]));
          unpack_codes(blocks[2], blocks[3], swap_middle_bytes(codes[half * 2 + 1]));
          multiply_blocks(output[step + half], blocks, upper, lower);
        }
      }
    }
  }

  template <bool MASKED>
  DEV void add_tile(int stage, int valid) {
    float scores[BLOCKS_OF_16][4];
    if constexpr (FP8) {
      u32 scales[BLOCKS_OF_16];
      load_scales(scales, shared.key_scales(stage));
      score_codes(scores, shared.keys(stage));
      multiply_scales(scores, scales, 1);
      load_scales(scales, shared.value_scales(stage));
      const float rescale = raise_unit(scales);
      weigh<MASKED>(scores, valid, rescale);
      multiply_scales(scores, scales, power_of_2(127 + 127 + 14 - unit));
      add_value_codes(scores, shared.values(stage));
    } else {
      score(scores, shared.keys(stage));
      weigh<MASKED>(scores, valid, 1);
      add_values(scores, shared.values(stage));
    }
  }

  // One tile of the segment whose first position is `start`. slot: the segment's.
  DEV void take_tile(const Segment& segment, u32 number, int start, u32 slot) {
    const Place<STAGES> place(number);
    const int stage = place.index;
    const int valid = min(segment.context_len, segment.end * PIECE) - start;
    wait(shared.full(stage), place.parity);
    if (valid > TILE || (valid == TILE && !segment.has_newest())) {
      add_tile<false>(stage, TILE);
    } else {
      clear_values(stage, valid);
      if (segment.has_newest()) put_newest(stage, valid - 1, slot + QUERY_BYTES, segment.context_len);
      fence_shared();
      warp_sync();
      add_tile<true>(stage, valid);
    }
    release(shared.empty(stage));
  }

  DEV void save_part(u32 place) {
    const u32 own = place + lane * 16;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) store_shared_floats(own + i * 512, output[i]);
    const float sums[4] = {maximum[0], maximum[1], total[0], total[1]};
    store_shared_floats(own + STEPS * 512, sums);
  }
  DEV void save_part(float* place) {
    float* own = place + lane_index_again() * 4;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) store_floats(own + i * 128, output[i]);
    const float sums[4] = {maximum[0], maximum[1], total[0], total[1]};
    store_floats(own + STEPS * 128, sums);
  }

  // load(i, values): four floats of a part.
  template <class Load>
  DEV void add_part(const Load& load) {
    float sums[4], own[2], others[2];
    load(STEPS, sums);
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      const float base = max(maximum[head], sums[head]) * factor(head);
      own[head] = exp2_fast(multiply_add(maximum[head], factor(head), -base));
      others[head] = exp2_fast(multiply_add(sums[head], factor(head), -base));
      maximum[head] = max(maximum[head], sums[head]);
      total[head] = multiply_add(total[head], own[head], sums[2 + head] * others[head]);
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      float values[4];
      load(i, values);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        output[i][j] = multiply_add(output[i][j], own[j % 2], values[j] * others[j % 2]);
    }
  }

  DEV void store_output(const Segment& segment) {
    float inverse[2];
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      float sum = total[head];
#pragma unroll
      for (int bit = 4; bit < 32; bit *= 2) sum += exchange(sum, bit);
      inverse[head] = reciprocal(sum);
    }
    const int pair = segment.sequence * KV_HEADS + segment.kv_head;
    const int lane = lane_index_again();
    u16* row = p.output + (pair * GROUP + lane / 4) * HEAD_DIM + lane % 4 * (FP8 ? 4 : 2);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const u32 left = transpose(pack_bf16(output[i][0] * inverse[0], output[i][1] * inverse[1]));
      const u32 right = transpose(pack_bf16(output[i][2] * inverse[0], output[i][3] * inverse[1]));
      // FP8: left has the even ones of four columns, right the odd ones.
      const u32 first = FP8 ? (left & 0xffff) | right << 16 : left;
      const u32 second = FP8 ? left >> 16 | (right & 0xffff0000u) : right;
      if (lane / 4 < GROUP) store_word(row + i * 16, first), store_word(row + i * 16 + (FP8 ? 2 : 8), second);
    }
  }

  // What other blocks have of a pair that begins here.
  DEV void add_blocks(const Segment& segment, int total_units) {
    const int end = first_unit(total_units, block_index() + 1) - segment.end + segment.count;
    for (int block = block_index() + 1, first; (first = first_unit(total_units, block)) < end; ++block) {
      if (first == first_unit(total_units, block + 1)) continue;
      wait_for_flag(p.flags + block);
      const float* part = p.parts + (i64)block * PART_FLOATS + lane * 4;
      add_part([&](int i, float(&values)[4]) { load_floats(values, part + i * 128); });
      warp_sync();
      if (lane == 0) lower_flag(p.flags + block);
    }
  }

  DEV void finish(const Segment& segment, int total_units) {
    if (segment.begin == 0) {
      if (segment.end < segment.count) add_blocks(segment, total_units);
      store_output(segment);
    } else {
      save_part(p.parts + (i64)block_index() * PART_FLOATS);
      publish();
      warp_sync();
      if (lane == 0) raise_flag(p.flags + block_index());
    }
  }

  DEV void consume() {
    Walk walk(p, shared, lane);
    Segment segment;
    u32 number = 0;
    for (u32 round = 0; walk.next(segment); ++round) {
      const Place<SLOTS> place(round);
      const u32 slot = shared.slot(place.index);
      const int tiles = segment.num_tiles(), first = (warp - number) % WARPS;
      const int last = (number + tiles - 1) % WARPS;  // the warp that joins
      // Also without a tile: a warp that runs ahead would count twice among those that are done with a slot.
      wait(shared.slot_full(place.index), place.parity);
      if (first < tiles) {
        begin(slot);
        for (int i = first; i < tiles; i += WARPS)
          take_tile(segment, number + i, segment.begin * PIECE + i * TILE, slot);
        if constexpr (FP8) drop_unit();
        if (warp != last) {
          wait(shared.part_empty(warp), (given++ & 1) ^ 1);
          save_part(shared.part(warp));
        }
      }
      release(shared.parts_full(place.index));
      if (warp == last) {
        wait(shared.parts_full(place.index), place.parity);
        for (int i = 0; i < min(tiles, WARPS); ++i) {
          const int other = (number + i) % WARPS;
          if (other == warp) continue;
          const u32 part = shared.part(other) + lane * 16;
          add_part([&](int i, float(&values)[4]) { load_shared_floats(values, part + i * 512); });
        }
        finish(segment, walk.total);
        // An arrival does not wait for loads; here they have been used.
        for (int i = 0; i < min(tiles, WARPS); ++i) {
          const int other = (number + i) % WARPS;
          if (other != warp) release(shared.part_empty(other));
        }
      }
      release(shared.slot_empty(place.index));
      number += tiles;
    }
  }
};

// Grid: no more blocks than run at the same time, because they wait for each other.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attend_decodes(const __grid_constant__ Params p) {
  launch_dependents();
  const Shared shared;
  const int thread = thread_index(), lane = thread % 32;
  if (thread == 0) {
    fetch_map(p.k), fetch_map(p.v);
    for (int i = 0; i < STAGES; ++i) barrier_init(shared.full(i), 2), barrier_init(shared.empty(i), 1);
    for (int i = 0; i < SLOTS; ++i) {
      barrier_init(shared.slot_full(i), 1), barrier_init(shared.slot_empty(i), WARPS);
      barrier_init(shared.parts_full(i), WARPS);
    }
    for (int i = 0; i < WARPS; ++i) barrier_init(shared.part_empty(i), 1);
    publish_barriers();
  }
  for (int i = thread; i < p.num_sequences; i += THREADS) {
    const int row = p.table_rows == nullptr ? i : (int)load_constant(p.table_rows + i);
    const bool is_padding = FROM_PARTS && load_constant(p.cells + i) < PAGE_SIZE;
    store_shared(shared.context_len(i), is_padding ? 0 : (int)load_constant(p.context_lens + i));
    store_shared(shared.table_row(i), row);
  }
  named_sync(0, THREADS);
  const int warp = (int)broadcast(thread / 32, 0);
  if (warp == 0)
    produce_tiles<true>(p, shared, lane);
  else if (warp == 1)
    produce_tiles<false>(p, shared, lane);
  else if (warp < PRODUCING_WARPS)
    produce_queries(p, shared, warp - 2, lane);
  else
    Consumer(p, shared, warp - PRODUCING_WARPS, lane).consume();
}
