// Prefill attention for Hopper: what prefill_attention.py describes, with 16-bit queries, keys and values in
// 16 bits or in FP8 (fp8_cache.py), and heads of 64 or 128.
//
// A block works through tiles of ROWS rows, a row being a query of one of a KV head's GROUP heads. Two
// warps copy (TMA): a tile's rows of q into one of two buffers, and its keys and values, BLOCK_N at a
// time, page by page, into two rings of STAGES. WARPGROUPS warpgroups compute, 64 rows each:
//
//     scores of keys j      tensor cores: queries and keys from shared memory
//     weights of keys j     exponents of 2, beside the next line's product of keys j - 1
//     output                tensor cores: weights from registers, values from shared memory
//
// So a warpgroup always has a product under way while it computes exponents, its own or that of the next
// warpgroup: they hand on a token for issuing products, so that they do not all want the same unit.
//
// Two more things keep the tensor cores busy:
//
// Tiles are joined. A tile's first product of scores is issued before the last product of the tile before is
// waited for, so that it runs beside that one and beside the outputs' way to memory. Keys behind all of a
// warpgroup's queries are passed over, and masks are for steps with keys that some query may not see.
//
// Without a window the maximum lags behind. Weights may refer to any number, as long as they and their sums
// fit into their types: to an older maximum, so that they begin as soon as scores are there, without a search
// through all of them. Where a sum shows that the maximum was far too low, the step's scores are multiplied
// again, as the weights took their place, and the maximum follows. A row of a window may not have seen a key
// yet and has no maximum to refer to: there, every step looks for it first. Only half of a step's weights are
// made beside the product of the older ones, which is over by then; the others are packed as they are made.
//
// Registers of a product [64, N]: warp w of the group holds rows 16 w .. 16 w + 15; of 8 columns 8 i .. 8
// i + 7 lane 4 r + c holds columns 2 c and 2 c + 1 of row r in [4 i] and [4 i + 1], and of row r + 8 in
// [4 i + 2] and [4 i + 3]. As the left operand of 16 terms, two such groups of columns are its four
// registers in this order.
//
// Shared memory holds 64 columns of a tile as rows of 128 bytes; heads of 128 are two such blocks ("spans").
//
// Nothing beyond a sequence's context reaches the result: pages without keys are not read, keys there get
// weight 0, and values there are overwritten with zeros, because 0 * NaN is NaN.
//
// FP8: one warp copies queries and, in units of UNIT rows, codes with their scales to a ring of SLOTS; three
// others make of them the 16-bit keys and values that the products read. Rows are scaled as they are decoded
// and rounded once, which is what a cache in FP8 stands for, so those who compute do nothing else than with
// 16 bits: scales applied to scores and weights would cost them a multiplication of each, where here one
// multiplies two values. A unit takes a warp 165 instructions with heads of 64 and 295 with 128, so a step's
// 16 units 2,600 and 4,700, beside the 1,536 cycles (three warpgroups) and 2,048 that its products take at
// least: 870 and 1,570 for each of three warps on schedulers of their own. Two would be too few. None of it
// is measured.
//
// Macros: HEAD_DIM, GROUP, KV_HEADS, PAGE_SIZE, HALF (float16 instead of bfloat16), WINDOWED, SINKS,
// WARPGROUPS, STAGES, SLOTS (0: caches are not in FP8), PRODUCER_REGISTERS, CONSUMER_REGISTERS, WATCHDOG_NS;
// TABLE, STARTS and LENS are integer types.

constexpr int BLOCK_N = 128;  // keys of a step
constexpr int ROWS = WARPGROUPS * 64;
constexpr int QUERIES = ROWS / GROUP;  // of a tile
constexpr int SPANS = HEAD_DIM / 64;
constexpr int PAGES = BLOCK_N / PAGE_SIZE;  // of BLOCK_N keys
constexpr u32 Q_BYTES = ROWS * HEAD_DIM * 2, KEY_BYTES = BLOCK_N * HEAD_DIM * 2;
constexpr u32 PAGE_BYTES = PAGE_SIZE * HEAD_DIM * 2;
constexpr int CONSUMER_WARPS = WARPGROUPS * 4;
constexpr bool FP8 = SLOTS > 0;
constexpr int UNIT = 16, UNITS = BLOCK_N / UNIT;  // rows of codes, and how many times that of a step's keys
constexpr u32 UNIT_BYTES = UNIT * HEAD_DIM, UNIT_SCALE_BYTES = UNIT * 2;
constexpr int CONVERTERS = 3;  // warps
constexpr int TURNS = 1;       // the first named barrier of the tokens; then one for each warpgroup's own use
constexpr int OWN = TURNS + WARPGROUPS;
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "spans of 64");
static_assert(BLOCK_N % PAGE_SIZE == 0 && PAGE_SIZE % 8 == 0 && PAGES <= 32, "pages, one a lane");
static_assert(GROUP <= 64, "rows");
static_assert(WARPGROUPS > 1, "they take turns");
static_assert(!FP8 || PAGE_SIZE % UNIT == 0, "a unit is of one page");
static_assert(2 * UNITS <= 32, "units' codes and scales, one a lane");
static_assert(!FP8 || SLOTS >= UNITS, "they are copied together");
// A wait cannot tell a phase from the one before the last: whoever waits for one must have seen the one
// before.
static_assert(SLOTS % CONVERTERS == 0 && UNITS >= CONVERTERS, "a slot belongs to one warp, a stage to all");
constexpr float HIGHEST_WEIGHT = HALF ? 1 << 14 : 1 << 30;  // of a float16, and of what sums can hold

struct alignas(64) Params {
  TensorMap q, k, v;  // boxes: QUERIES queries of GROUP heads, and pages; of 64 columns
  void* output;
  const TABLE* page_table;  // [num_sequences][table_width]
  const STARTS* query_starts;
  const LENS* context_lens;
  const float* sinks;  // [KV_HEADS][GROUP]
  u32* counter;        // 0 before and after a launch
  float factor;        // of the scores, for base 2
  int table_width, num_sequences, window;
  // FP8 only, in the place of the maps of k and v: [pages][KV_HEADS][PAGE_SIZE], codes with HEAD_DIM.
  const u8 *k_codes, *v_codes;
  const u16 *k_scales, *v_scales;
};

struct Tile {
  int sequence, kv_head, first_query, query_end, context_len;
  int begin, end;  // in BLOCK_N keys; both 0: there are no more tiles
  DEV int position(int query) const { return context_len - query_end + min(query, query_end - 1); }
};

// Where things lie in shared memory.
struct Shared {
  u32 base;
  DEV Shared() : base((shared_base() + 1023) / 1024 * 1024) {}
  DEV u32 queries(int buffer) const { return base + buffer * Q_BYTES; }
  DEV u32 keys(int stage) const { return base + 2 * Q_BYTES + stage * KEY_BYTES; }
  DEV u32 values(int stage) const { return keys(STAGES + stage); }
  DEV u32 codes(int slot) const { return keys(2 * STAGES) + slot * UNIT_BYTES; }
  DEV u32 scales(int slot) const { return codes(SLOTS) + slot * UNIT_SCALE_BYTES; }
  // Barriers: "full" of q, keys and values, then "empty" of the same; then both of slots.
  DEV u32 barrier(int index) const { return scales(SLOTS) + index * 8; }
  DEV u32 q_full(int buffer) const { return barrier(buffer); }
  DEV u32 k_full(int stage) const { return barrier(2 + stage); }
  DEV u32 v_full(int stage) const { return barrier(2 + STAGES + stage); }
  DEV u32 q_empty(int buffer) const { return barrier(FULL + buffer); }
  DEV u32 k_empty(int stage) const { return barrier(FULL + 2 + stage); }
  DEV u32 v_empty(int stage) const { return barrier(FULL + 2 + STAGES + stage); }
  DEV u32 slot_full(int slot) const { return barrier(2 * FULL + slot); }
  DEV u32 slot_empty(int slot) const { return barrier(2 * FULL + SLOTS + slot); }
  DEV u32 scratch() const { return barrier(2 * FULL + 2 * SLOTS); }  // a word per thread of a warpgroup
  // What the queries in a buffer are, a `Tile`; filled and empty with the queries.
  DEV u32 tile(int buffer) const { return scratch() + 128 * 4 + buffer * (u32)sizeof(Tile); }
  DEV u32 factor() const { return tile(2); }
  static constexpr int FULL = 2 + 2 * STAGES;
};

// Where in a ring the thing of this number is, and the parity of the "full" barrier that it completes.
template <int SIZE>
struct Place {
  int stage;
  u32 parity;
  DEV explicit Place(u32 number) : stage(number % SIZE), parity(number / SIZE & 1) {}
};
using QueryPlace = Place<2>;
using KeyPlace = Place<STAGES>;  // of values, too
using CodePlace = Place<FP8 ? SLOTS : 1>;

DEV int count_tiles(const Params& p, int sequence) {
  const STARTS* starts = p.query_starts + sequence;
  return ((int)(load_constant(starts + 1) - load_constant(starts)) + QUERIES - 1) / QUERIES;
}

// The sum up to this lane's value, and with it.
DEV int sum_up(int value, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = shift_up(value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// How many sequences a lane answers for.
DEV int share_of(const Params& p) { return (p.num_sequences + 31) / 32; }

// What a lane knows of all tiles: how many there are before those of its sequences, and in all.
struct Schedule {
  int before, count;
  DEV Schedule(const Params& p, int lane) {
    const int share = share_of(p);
    int own = 0;
    for (int s = lane * share; s < min((lane + 1) * share, p.num_sequences); ++s) own += count_tiles(p, s);
    const int with = sum_up(own, lane);
    before = with - own;
    count = (int)broadcast(with, 31) * KV_HEADS;
  }
};

// By a whole warp. Tiles are numbered through all sequences; the last of a sequence have the most keys and
// come first, for all heads. Without a tile of this number, begin and end are 0.
DEV Tile find_tile(const Params& p, const Schedule& schedule, int number, int lane) {
  Tile tile = {};
  if (number >= schedule.count) return tile;
  int left = (schedule.count - 1 - number) / KV_HEADS;
  // The last lane that does not begin behind it: one without tiles begins where the next one does.
  int holder = 31 - leading_zeros(votes(left >= schedule.before));
  left -= (int)broadcast(schedule.before, holder);
  const int share = share_of(p);
  tile.sequence = holder * share;
  if (share > 1) {
    const int end = min(tile.sequence + share, p.num_sequences);
    for (;; tile.sequence += 32) {
      const int s = tile.sequence + lane;
      const int tiles = s < end ? count_tiles(p, s) : 0;
      const int sum = sum_up(tiles, lane);
      const u32 found = votes(left < sum);
      holder = found ? first_bit(found) : 31;
      left -= (int)broadcast(found ? sum - tiles : sum, holder);
      if (found) break;
    }
    tile.sequence += holder;
  }
  tile.kv_head = number % KV_HEADS;
  tile.first_query = (int)load_constant(p.query_starts + tile.sequence) + left * QUERIES;
  tile.query_end = (int)load_constant(p.query_starts + tile.sequence + 1);
  tile.context_len = (int)load_constant(p.context_lens + tile.sequence);
  tile.begin = WINDOWED ? max(tile.position(tile.first_query) - p.window + 1, 0) / BLOCK_N : 0;
  tile.end = tile.position(tile.first_query + QUERIES - 1) / BLOCK_N + 1;
  return tile;
}

DEV void store_tile(u32 target, const Tile& tile) {
#pragma unroll
  for (int i = 0; i < (int)sizeof(Tile) / 4; ++i) store_shared(target + i * 4, ((const int*)&tile)[i]);
}
DEV Tile load_tile(u32 source) {
  Tile tile;
#pragma unroll
  for (int i = 0; i < (int)sizeof(Tile) / 4; ++i) ((int*)&tile)[i] = load_shared(source + i * 4);
  return tile;
}

// The numbers of PAGES pages from this one on, of which `left` are there; the last one's for the rest.
DEV void load_pages(const TABLE* table, u32 page, int left, u32 (&pages)[PAGES]) {
#pragma unroll
  for (int i = 0; i < PAGES; ++i) pages[i] = (u32)load_constant(table + (page + min(i, left - 1)));
}

// By one thread: pages of keys or values into a stage of shared memory.
DEV void copy_pages(const TensorMap& map, u32 target, u32 full, const u32 (&pages)[PAGES], int count,
                    int kv_head) {
  arrive_expecting(full, count * PAGE_BYTES);
#pragma unroll
  for (int i = 0; i < PAGES; ++i)
    if (i < count) {
      const int row = (int)((pages[i] * KV_HEADS + kv_head) * PAGE_SIZE);
#pragma unroll
      for (int span = 0; span < SPANS; ++span)
        copy_box(target + (span * BLOCK_N + i * PAGE_SIZE) * 128, map, span * 64, row, full);
    }
}

// By one thread: all keys or values of a tile. number: how many times BLOCK_N of them came before; it counts
// on.
template <bool KEYS>
DEV void copy_tile(const Params& p, const Shared& shared, const Tile& tile, u32& number) {
  u32 page = tile.sequence * p.table_width + tile.begin * PAGES;  // of the table
  int left = (tile.context_len + PAGE_SIZE - 1) / PAGE_SIZE - tile.begin * PAGES;
  for (int j = tile.begin; j < tile.end; ++j, ++number) {
    const KeyPlace place(number);
    u32 pages[PAGES];
    load_pages(p.page_table, page, left, pages);
    wait(KEYS ? shared.k_empty(place.stage) : shared.v_empty(place.stage), place.parity ^ 1);
    copy_pages(KEYS ? p.k : p.v, KEYS ? shared.keys(place.stage) : shared.values(place.stage),
               KEYS ? shared.k_full(place.stage) : shared.v_full(place.stage), pages, min(left, PAGES),
               tile.kv_head);
    page += PAGES, left -= PAGES;
  }
}

// By a whole warp, FP8: the codes and scales of a tile, a step's keys and then its values. number: how many
// times UNITS units came before; it counts on. A lane copies a unit's codes, or its scales. Units behind the
// context are full without a copy.
DEV void copy_codes(const Params& p, const Shared& shared, const Tile& tile, u32& number) {
#pragma unroll 1
  for (int half = tile.begin * 2; half < tile.end * 2; ++half, ++number) {
    // What is made of the lane is not kept from one to the next: there are few registers.
    const int lane = lane_index_again();
    if (lane < 2 * UNITS) {
      const int unit = lane % UNITS, position = half / 2 * BLOCK_N + unit * UNIT;
      const bool is_code = lane < UNITS, is_there = position < tile.context_len;
      u32 row = 0;
      if (is_there) {
        const TABLE* page = p.page_table + (u32)(tile.sequence * p.table_width + position / PAGE_SIZE);
        row = ((u32)load_constant(page) * KV_HEADS + tile.kv_head) * PAGE_SIZE + position % PAGE_SIZE;
      }
      const CodePlace place(number * UNITS + unit);
      const u32 full = shared.slot_full(place.stage);
      wait(shared.slot_empty(place.stage), place.parity ^ 1);
      if (is_code) {
        if (is_there)
          arrive_expecting(full, UNIT_BYTES + UNIT_SCALE_BYTES);
        else
          arrive(full);
      }
      if (is_there) {
        const u8* codes = half % 2 == 0 ? p.k_codes : p.v_codes;
        const u16* scales = half % 2 == 0 ? p.k_scales : p.v_scales;
        copy_bytes(is_code ? shared.codes(place.stage) : shared.scales(place.stage),
                   is_code ? codes + (u64)row * HEAD_DIM : (const u8*)(scales + row),
                   is_code ? UNIT_BYTES : UNIT_SCALE_BYTES, full);
      }
    }
    join_lanes();
  }
}

// A warp takes tiles and copies their queries and keys, another copies their values: a copy of a page is many
// instructions that wait for each other. One thread of each does it, and the compiler knows that by
// `is_elected`; for any other test it writes a loop round every copy.
//
// A block begins with the tile of its own number and takes the others one by one from a counter. In all the
// counter is asked once for every tile: each block that has had a tile is refused once.
DEV void produce_keys(const Params& p, const Shared& shared, int lane) {
  const Schedule schedule(p, lane);
  int number = block_index();
  u32 loaded = 0;
  for (int round = 0;; ++round) {
    const Tile tile = find_tile(p, schedule, number, lane);
    const QueryPlace q(round);
    if (is_elected()) {
      wait(shared.q_empty(q.stage), q.parity ^ 1);
      store_tile(shared.tile(q.stage), tile);
      if (tile.end == 0) {
        arrive(shared.q_full(q.stage));
      } else {
        arrive_expecting(shared.q_full(q.stage), QUERIES * GROUP * HEAD_DIM * 2);
#pragma unroll
        for (int span = 0; span < SPANS; ++span)
          copy_box(shared.queries(q.stage) + span * ROWS * 128, p.q, span * 64, tile.kv_head * GROUP,
                   tile.first_query, shared.q_full(q.stage));
        if (!FP8) copy_tile<true>(p, shared, tile, loaded);
      }
    }
    if (FP8) copy_codes(p, shared, tile, loaded);
    if (tile.end == 0) break;
    number = num_blocks() + (int)broadcast(lane == 0 ? take_number(p.counter, schedule.count - 1) : 0, 0);
  }
}

DEV void produce_values(const Params& p, const Shared& shared) {
  if (!is_elected()) return;
  u32 loaded = 0;
  for (int round = 0;; ++round) {
    const QueryPlace q(round);
    wait(shared.q_full(q.stage), q.parity);
    const Tile tile = load_tile(shared.tile(q.stage));
    arrive(shared.q_empty(q.stage));
    if (tile.end == 0) break;
    copy_tile<false>(p, shared, tile, loaded);
  }
}

// Where 16 bytes of a row begin in shared memory.
DEV u32 piece_of(u32 row, u32 column) { return row * 128 + (column ^ row % 8 * 16); }

// A unit's rows from this one of a stage on. Of eight rows, a lane has 16 codes of one; of two neighbouring
// rows, lanes have different spans at a time: they are in different banks, as codes and as values.
DEV void decode_unit(u32 target, u32 codes, u32 scales) {
  // Places made of the lane are not kept between units, they would take too many registers.
  const int lane = lane_index_again();
#pragma unroll
  for (int i = 0; i < UNIT / 8 * SPANS; ++i) {
    const u32 row = i / SPANS * 8 + lane / 4, span = (lane / 4 + i) % SPANS, piece = lane % 4;
    u32 own[4], values[8];
    load_codes(own, codes + row * HEAD_DIM + span * 64 + piece * 16);
    const float scale = load_scale(scales + row * 2);
#pragma unroll
    for (int word = 0; word < 4; ++word)
      decode_codes(values[2 * word], values[2 * word + 1], own[word], scale);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      store_shared_16_bytes(target + span * BLOCK_N * 128 + piece_of(row, piece * 32 + half * 16),
                            values[half * 4], values[half * 4 + 1], values[half * 4 + 2],
                            values[half * 4 + 3]);
  }
}

// By a whole warp, FP8: every CONVERTERS-th unit of all tiles.
DEV void convert_codes(const Shared& shared, int converter, int lane) {
  u32 next = converter, number = 0;  // in units, in all tiles, and in steps
  for (int round = 0;; ++round) {
    const QueryPlace q(round);
    wait(shared.q_full(q.stage), q.parity);
    // Those who compute release it: behind its last unit.
    const Tile tile = load_tile(shared.tile(q.stage));
    if (tile.end == 0) break;
    int left = tile.context_len - tile.begin * BLOCK_N;
    for (const u32 end = number + tile.end - tile.begin; number != end; ++number, left -= BLOCK_N) {
      const KeyPlace place(number);
#pragma unroll 1
      for (; next < (number + 1) * 2 * UNITS; next += CONVERTERS) {
        const CodePlace slot(next);
        const bool is_key = next % (2 * UNITS) < UNITS;
        const int first = next % UNITS * UNIT;
        wait(is_key ? shared.k_empty(place.stage) : shared.v_empty(place.stage), place.parity ^ 1);
        wait(shared.slot_full(slot.stage), slot.parity);
        if (first < left)
          decode_unit((is_key ? shared.keys(place.stage) : shared.values(place.stage)) + first * 128,
                      shared.codes(slot.stage), shared.scales(slot.stage));
        fence_shared();
        join_lanes();
        if (lane == 0) {
          arrive(is_key ? shared.k_full(place.stage) : shared.v_full(place.stage));
          arrive(shared.slot_empty(slot.stage));
        }
      }
    }
  }
}

// What a thread knows of its two rows: row r of a warp's rows, and row r + 8.
struct Rows {
  float maximum[2], total[2];  // the maximum of raw scores; this thread's part of the sum of weights
  float shrink[2];             // what the last maximum makes of what was summed before
};

// Scores of keys 8 FIRST .. 8 LAST - 1 become weights, in place, and are added to sums of columns' parity.
template <int FIRST, int LAST>
DEV void exponentiate(float (&scores)[BLOCK_N / 2], const Rows& rows, float factor, float (&sums)[2][2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float base = rows.maximum[half] * factor;
    // A window may hide all keys so far from a row; -inf - -inf would be NaN.
    if (WINDOWED && rows.maximum[half] == NEG_INF) base = 0;
#pragma unroll
    for (int i = FIRST; i < LAST; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& score = scores[i * 4 + half * 2 + c];
        score = exp2_fast(multiply_add(score, factor, -base));
        sums[half][c] += score;
      }
  }
}

// Scores become weights, in place, once the maximum knows them.
DEV void weigh(float (&scores)[BLOCK_N / 2], Rows& rows, const Params& p) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float highest = rows.maximum[half];
#pragma unroll
    for (int i = 0; i < BLOCK_N / 8; ++i)
      highest = max(highest, max(scores[i * 4 + half * 2], scores[i * 4 + half * 2 + 1]));
    highest = max(highest, exchange(highest, 1));
    highest = max(highest, exchange(highest, 2));
    float base = highest * p.factor;
    if (WINDOWED && highest == NEG_INF) base = 0;
    rows.shrink[half] = exp2_fast(multiply_add(rows.maximum[half], p.factor, -base));
    rows.maximum[half] = highest;
  }
  float sums[2][2] = {};
  exponentiate<0, BLOCK_N / 8>(scores, rows, p.factor, sums);
#pragma unroll
  for (int half = 0; half < 2; ++half)
    rows.total[half] = multiply_add(rows.total[half], rows.shrink[half], sums[half][0] + sums[half][1]);
}

DEV void pack_weights(const float (&scores)[BLOCK_N / 2], u32 (&weights)[BLOCK_N / 16][4]) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 4; ++i) weights[i / 4][i % 4] = pack(scores[2 * i], scores[2 * i + 1]);
}

DEV void shrink_output(float (&output)[HEAD_DIM / 2], const Rows& rows) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; ++i) output[i] *= rows.shrink[i / 2 % 2];
}

// The scores of a warp's own 16 queries again, without the other warps.
DEV void multiply_again(float (&scores)[BLOCK_N / 2], u32 queries, u32 keys) {
  // It is rare: it takes no registers from what is not.
  const int lane = lane_index_again();
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; ++i) scores[i] = 0;
#pragma unroll 1
  for (u32 term = 0; term < HEAD_DIM; term += 16) {
    const u32 span = term / 64, column = term % 64 * 2;
    const u32 own_keys =
        keys + span * BLOCK_N * 128 + piece_of(lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * 16);
    u32 a[4], b[4];
    load_matrices(a, queries + span * ROWS * 128 + piece_of(lane % 16, column + lane / 16 * 16));
#pragma unroll
    for (int i = 0; i < BLOCK_N / 16; ++i) {
      load_matrices(b, own_keys + i * 16 * 128);
      multiply_warp(scores + i * 8, a, b[0], b[1]);
      multiply_warp(scores + i * 8 + 4, a, b[2], b[3]);
    }
  }
}

// scores = 64 queries times BLOCK_N keys, HEAD_DIM terms.
DEV void begin_scores(float (&scores)[BLOCK_N / 2], Operand queries, Operand keys) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; ++i)
    multiply_shared<BLOCK_N>(scores, queries.behind(i / 4 * ROWS * 128 + i % 4 * 32),
                             keys.behind(i / 4 * BLOCK_N * 128 + i % 4 * 32), i > 0);
  products_commit();
}

// output += weights times values, BLOCK_N terms.
DEV void begin_output(float (&output)[HEAD_DIM / 2], const u32 (&weights)[BLOCK_N / 16][4], Operand values) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 16; ++i)
    multiply_registers<HEAD_DIM>(output, weights[i], values.behind(i * 16 * 128));
  products_commit();
}

// Zeros for the values behind the context. Every warpgroup writes them for itself: the same zeros.
DEV void clear_values(u32 values, int first, int thread, int warpgroup) {
  for (int start = first * 8; start < BLOCK_N * 8; start += 128)
    if (const int piece = start + thread; piece < BLOCK_N * 8)
#pragma unroll
      for (int span = 0; span < SPANS; ++span) store_shared_zeros(values + span * BLOCK_N * 128 + piece * 16);
  fence_shared();
  named_sync(OWN + warpgroup, 128);
}

// 16-byte stores of a row's outputs: the four lanes of a row trade places.
DEV void store_row(u8* row, const float (&output)[HEAD_DIM / 2], int half, float inverse, int lane,
                   bool stores) {
#pragma unroll
  for (int group = 0; group < HEAD_DIM / 32; ++group) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = (group * 4 + i) * 4 + half * 2;
      words[i] = pack(output[first] * inverse, output[first + 1] * inverse);
    }
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
      const bool upper = lane & bit;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!(i & bit)) {
          const u32 other = exchange(upper ? words[i] : words[i | bit], bit);
          if (upper)
            words[i] = other;
          else
            words[i | bit] = other;
        }
    }
    if (stores) store_16_bytes(row + (group * 4 + lane % 4) * 16, words[0], words[1], words[2], words[3]);
  }
}

struct Consumer {
  const Params& p;
  const Shared& shared;
  const int warpgroup, thread, lane;  // thread: of the warpgroup
  u32 done = 0;                       // products of scores, in all tiles
  Rows rows;
  float scores[BLOCK_N / 2], output[HEAD_DIM / 2];
  u32 weights[BLOCK_N / 16][4];

  DEV Consumer(const Params& p, const Shared& shared, int warpgroup, int thread)
      : p(p), shared(shared), warpgroup(warpgroup), thread(thread), lane(thread % 32) {}

  DEV void release(u32 empty) {
    if (lane == 0) arrive(empty);
  }
  DEV Operand queries(QueryPlace q) const { return {shared.queries(q.stage) + warpgroup * 64 * 128, 0}; }
  DEV Operand keys(KeyPlace k) const { return {shared.keys(k.stage), 0}; }
  DEV Operand values(KeyPlace v) const { return {shared.values(v.stage), BLOCK_N * 128}; }
  DEV void take_turn() { named_sync(TURNS + warpgroup, 256); }
  DEV void pass_turn() { named_arrive(TURNS + (warpgroup + 1) % WARPGROUPS, 256); }

  // Scores and weights of keys j, and the product of the older weights with the values before.
  template <bool MASKED>
  DEV void step(int round, int j) {
    const KeyPlace k(done), v(done - 1);
    wait(shared.k_full(k.stage), k.parity);
    take_turn();
    hold(scores), hold(output), hold(weights);
    products_begin();
    begin_scores(scores, queries(QueryPlace(round)), keys(k));
    wait(shared.v_full(v.stage), v.parity);
    hold(output), hold(weights);
    products_begin();
    begin_output(output, weights, values(v));
    pass_turn();
    products_wait<1>();
    hold(scores);
    if constexpr (WINDOWED)
      weigh_exactly<MASKED>(QueryPlace(round), k, v, j);
    else
      weigh_lazily<MASKED>(QueryPlace(round), k, v, j);
    ++done;
  }

  // The rest of a step whose weights refer to the maximum up to its keys.
  template <bool MASKED>
  DEV void weigh_exactly(QueryPlace q, KeyPlace k, KeyPlace v, int j) {
    release(shared.k_empty(k.stage));
    if (MASKED) hide(q, j);
    weigh(scores, rows, p);
    // The weights belong beside the product of the older ones, not behind it.
    stay_before(rows.total[0] + rows.total[1], shared.scratch() + thread * 4);
    products_wait<0>();
    hold(output), hold(weights), hold(scores);
    release(shared.v_empty(v.stage));
    shrink_output(output, rows);
    pack_weights(scores, weights);
  }

  // The rest of a step whose weights refer to the maximum of older keys, unless that is far too low.
  template <bool MASKED>
  DEV void weigh_lazily(QueryPlace q, KeyPlace k, KeyPlace v, int j) {
    constexpr int EARLY = BLOCK_N / 8 / 2;
    if (MASKED) hide(q, j);
    float sums[2][2] = {};
    exponentiate<0, EARLY>(scores, rows, p.factor, sums);
    stay_before(sums[0][0] + sums[0][1] + sums[1][0] + sums[1][1], shared.scratch() + thread * 4);
    products_wait<0>();
    hold(output), hold(weights), hold(scores);
    release(shared.v_empty(v.stage));
    // Read only here: the assembler would make these weights before the wait, and pack all of them behind it.
    const float factor = float_of(load_shared(shared.factor()));
    exponentiate<EARLY, BLOCK_N / 8>(scores, rows, factor, sums);
    pack_weights(scores, weights);
    const float totals[2] = {sums[0][0] + sums[0][1], sums[1][0] + sums[1][1]};
    if (votes(max(totals[0], totals[1]) > HIGHEST_WEIGHT)) {
      multiply_again(scores, shared.queries(q.stage) + (warpgroup * 64 + thread / 32 * 16) * 128,
                     shared.keys(k.stage));
      if (MASKED) hide(q, j);
      weigh(scores, rows, p);
      shrink_output(output, rows);
      pack_weights(scores, weights);
    } else {
      rows.total[0] += totals[0], rows.total[1] += totals[1];
    }
    release(shared.k_empty(k.stage));
  }

  // Scores of keys j that a row may not see become -inf. Where the rows are is found again: kept, it would
  // take registers from the steps without masks.
  DEV void hide(QueryPlace q, int j) {
    const Tile tile = load_tile(shared.tile(q.stage));
    const u32 row = warpgroup * 64 + thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = tile.position(tile.first_query + (row + half * 8) / GROUP);
      const int last = position - j * BLOCK_N - lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < BLOCK_N / 8; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int key = i * 8 + c;
          const bool seen = key <= last && (!WINDOWED || key > last - p.window);
          float& score = scores[i * 4 + half * 2 + c];
          // Keys beyond the context may be NaN: they are replaced, not added to.
          score = seen ? score : NEG_INF;
        }
    }
  }

  // A step without keys for this warpgroup.
  DEV void pass_over() {
    const KeyPlace place(done);
    wait(shared.k_full(place.stage), place.parity);
    release(shared.k_empty(place.stage));
    take_turn();
    pass_turn();
    wait(shared.v_full(place.stage), place.parity);
    release(shared.v_empty(place.stage));
    ++done;
  }

  // The first scores of a tile, beside what is left to do for the one before. Where there is none they are
  // of anything. Returns the tile's end.
  DEV int begin_tile(int round) {
    const QueryPlace q(round);
    const KeyPlace k(done);
    wait(shared.q_full(q.stage), q.parity);
    const int end = load_tile(shared.tile(q.stage)).end;
    if (end != 0) wait(shared.k_full(k.stage), k.parity);
    hold(scores);
    products_begin();
    begin_scores(scores, queries(q), keys(k));
    return end;
  }

  // The rest of a tile. Begins the next one and returns its end.
  DEV int attend(int round, Tile tile) {
    // The first row's and last row's positions of the warpgroup say where masks are needed.
    const u32 row = warpgroup * 64 + thread / 32 * 16 + lane / 4;
    const int first_position = tile.position(tile.first_query + warpgroup * 64 / GROUP);
    const int last_position = tile.position(tile.first_query + (warpgroup * 64 + 63) / GROUP);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.maximum[half] = NEG_INF, rows.total[half] = 0;
      if (SINKS) {
        const int head = tile.kv_head * GROUP + (row + half * 8) % GROUP;
        rows.maximum[half] = load_constant(p.sinks + head) * 1.4426950408889634f / p.factor;
        rows.total[half] = lane % 4 == 0;
      }
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) output[i] = 0;

    const QueryPlace q(round);
    const KeyPlace k(done);
    products_wait<0>();
    hold(scores);
    release(shared.k_empty(k.stage));
    ++done;
    const auto is_masked = [&](int j) {
      return (j + 1) * BLOCK_N > first_position + 1 || (WINDOWED && j * BLOCK_N <= last_position - p.window);
    };
    if (is_masked(tile.begin)) hide(q, tile.begin);
    weigh(scores, rows, p);
    pack_weights(scores, weights);

    // The tile's last keys may be behind all of this warpgroup's queries.
    const int own_end = last_position / BLOCK_N + 1;
    for (int j = tile.begin + 1; j < own_end; ++j) {
      if (is_masked(j))
        step<true>(round, j);
      else
        step<false>(round, j);
    }
    // Read again, so that it needs no registers meanwhile.
    tile = load_tile(shared.tile(q.stage));

    const KeyPlace v(done - 1);
    wait(shared.v_full(v.stage), v.parity);
    const int left = tile.context_len - (own_end - 1) * BLOCK_N;
    if (left < BLOCK_N) clear_values(shared.values(v.stage), left, thread, warpgroup);
    hold(output), hold(weights);
    products_begin();
    begin_output(output, weights, values(v));
#pragma unroll 1
    for (int j = own_end; j < tile.end; ++j) pass_over();
    const int end = begin_tile(round + 1);
    products_wait<1>();
    hold(output), hold(weights);
    release(shared.v_empty(v.stage));

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = rows.total[half];
      total += exchange(total, 1);
      total += exchange(total, 2);
      const u32 own = row + half * 8;
      const int query = tile.first_query + own / GROUP;
      const i64 head = ((i64)query * KV_HEADS + tile.kv_head) * GROUP + own % GROUP;
      store_row((u8*)p.output + head * HEAD_DIM * 2, output, half, reciprocal(total), lane,
                own < QUERIES * GROUP && query < tile.query_end);
    }
    release(shared.q_empty(q.stage));
    return end;
  }

  DEV void consume() {
    if (warpgroup == WARPGROUPS - 1) pass_turn();
    int round = 0;
    for (int end = begin_tile(0); end != 0; ++round)
      end = attend(round, load_tile(shared.tile(QueryPlace(round).stage)));
    products_wait<0>();
    hold(scores);
    // The last token.
    if (warpgroup == 0) take_turn();
  }
};

// Grid: at most one block per multiprocessor. Threads: a warpgroup that copies, then those that compute.
extern "C" __global__ void __launch_bounds__((WARPGROUPS + 1) * 128, 1)
    attend_chunks(const __grid_constant__ Params p) {
  const Shared shared;
  const int thread = thread_index(), lane = thread % 32;
  if (thread == 0) {
    fetch_map(p.q);
    if (!FP8) fetch_map(p.k), fetch_map(p.v);
    for (int i = 0; i < Shared::FULL; ++i) {
      barrier_init(shared.barrier(i), FP8 && i >= 2 ? UNITS : 1);
      // What is said of a tile's queries is read by the warp of the values, too.
      barrier_init(shared.barrier(Shared::FULL + i), CONSUMER_WARPS + (!FP8 && i < 2));
    }
    for (int i = 0; i < 2 * SLOTS; ++i) barrier_init(shared.slot_full(i), 1);
    store_shared(shared.factor(), bits_of(p.factor));
    publish_barriers();
  }
  named_sync(0, (WARPGROUPS + 1) * 128);
  const int warpgroup = broadcast(thread / 128, 0);
  if (warpgroup == 0) {
    release_registers<PRODUCER_REGISTERS>();
    if (thread < 32)
      produce_keys(p, shared, lane);
    else if (FP8)
      convert_codes(shared, (int)broadcast(thread / 32, 0) - 1, lane);
    else if (thread < 64)
      produce_values(p, shared);
  } else {
    claim_registers<CONSUMER_REGISTERS>();
    Consumer(p, shared, warpgroup - 1, thread % 128).consume();
  }
}
