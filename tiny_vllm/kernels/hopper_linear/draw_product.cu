// The LM head of 9 to 256 rows, whose tiles draw: logits = x W^T are sums in registers and never written. Of
// each row of a tile: the largest logit, NaN if there is a NaN, the token that wins the tile and its logit,
// as `draw_tokens.draw_from_tile` has them. x [M, K], W [V, K] of one 16-bit type; results [M, tiles].
//
// One block per multiprocessor takes tiles of ROWS rows of x by 256 rows of W, one after the other. One
// thread copies (TMA), 64 terms at a time, into a ring of STAGES. It fills the ring with W before it waits
// for the preceding kernel, which writes x, and runs ahead into the next tile while others draw.
// Temperatures, keys and slots are complete before that kernel starts.
//
// Up to 64 rows: two warpgroups with ALTERNATE tiles, so that W, which is all that takes time there, never
// waits for a draw. A warpgroup waits for its turn before it looks at the ring: barriers tell one lap from
// the next, but not from the one behind it.
// Up to 128 rows: two warpgroups of 64 rows and the same tile. More rows: a CLUSTER of two blocks with other
// rows of x and the same rows of W, of which each copies half to both; a stage is free when the warpgroups of
// both are done with it.
//
// Lanes 4 r .. 4 r + 3 of a warp have rows r and r + 8: lane 4 r + c has columns 8 g + 2 c and the next, row
// r in sums[4 g], [4 g + 1], row r + 8 in [4 g + 2], [4 g + 3]. A row's race runs on rough times. Where its
// first two come in close together, its logits go through shared memory to all lanes, for the exact times.
//
// Macros: HALF (float16 instead of bfloat16), ALTERNATE, CLUSTER (1 or 2 blocks), STAGES, PRODUCER_REGISTERS,
// CONSUMER_REGISTERS, WATCHDOG_NS.

constexpr int WARPGROUPS = 2, ROWS = ALTERNATE ? 64 : 128, COLUMNS = 256, TERMS = 64;
constexpr int THREADS = (WARPGROUPS + 1) * 128;
constexpr int WEIGHT_SHARE = COLUMNS / CLUSTER;  // what a block copies of W
constexpr u32 X_BYTES = ROWS * TERMS * 2, STAGE_BYTES = X_BYTES + COLUMNS * TERMS * 2;
constexpr u32 ROW_BYTES = COLUMNS * 4;  // logits of a row
constexpr int GROUPS = COLUMNS / 8;
constexpr int TURN = 1;  // the first of two named barriers
static_assert(!ALTERNATE || CLUSTER == 1, "what alternates has all rows");

// Of sampling_noise.py and draw_tokens.py.
constexpr u32 GOLDEN = 0x9E3779B1, MIX_A = 0x7FEB352D, MIX_B = 0x846CA68B;
constexpr float NOISE_UNIT = 0x1.fffffep-32f;
constexpr float INVERSE_LOG_2 = 1.4426950408889634f, MAX_SHARPNESS = 3e38f;
constexpr float ROUGH_LOSS = 0x1p-21f, ROUGHNESS = 0x1p-12f;

struct alignas(64) Params {
  TensorMap x, weight;  // boxes of 64 columns, ROWS and WEIGHT_SHARE rows
  float *maxima, *logits_won;
  int* winners;
  const float* temperature;  // [num_slots]
  const int* keys;           // [rows, 2]
  const i64* slots;          // or null: rows are slots
  int rows, num_slots;
  int vocabulary;
  int steps;  // K / 64
  int tiles;
};

// Where things lie in shared memory.
struct Shared {
  u32 base;
  DEV Shared() : base((shared_base() + 1023) / 1024 * 1024) {}
  DEV u32 x(int stage) const { return base + stage * STAGE_BYTES; }
  DEV u32 weight(int stage) const { return x(stage) + X_BYTES; }
  DEV u32 logits(int warp) const { return x(STAGES) + warp * ROW_BYTES; }
  DEV u32 full(int stage) const { return logits(WARPGROUPS * 4) + stage * 8; }
  DEV u32 empty(int stage) const { return full(STAGES + stage); }
};

// The block's tile of a round; beyond the last one: no more.
DEV int tile_of(int round) { return (block_index() + round * num_blocks()) / CLUSTER; }

struct Producer {
  const Params& p;
  const Shared& shared;
  const int rank;  // within the cluster

  DEV void copy_weight(int tile, int k, int stage) const {
    const u32 target = shared.weight(stage) + rank * WEIGHT_SHARE * TERMS * 2, full = shared.full(stage);
    const int row = tile * COLUMNS + rank * WEIGHT_SHARE;
    arrive_expecting(full, STAGE_BYTES);
    if (CLUSTER == 1)
      copy_box(target, p.weight, k * TERMS, row, full);
    else
      copy_box_to_all(target, p.weight, k * TERMS, row, full);
  }

  DEV void produce() const {
    const int first = min(p.steps, STAGES);
    for (int k = 0; k < first; ++k) copy_weight(tile_of(0), k, k);
    wait_for_predecessor();
    Place place;
    for (int round = 0; tile_of(round) < p.tiles; ++round)
      for (int k = 0; k < p.steps; ++k, place.advance()) {
        if (round > 0 || k >= first) {
          wait(shared.empty(place.stage), place.parity ^ 1);
          copy_weight(tile_of(round), k, place.stage);
        }
        copy_box(shared.x(place.stage), p.x, k * TERMS, rank * ROWS, shared.full(place.stage));
      }
  }
};

// u in (0, 1), from a token's place in the stream of a key.
DEV float uniform(u32 x, u32 key_low) {
  x ^= key_low;
  x = (x ^ x >> 16) * MIX_A;
  x = (x ^ x >> 15) * MIX_B;
  x = (x ^ x >> 16) & 0x7FFFFFFF;
  return multiply_add((float)(int)x, NOISE_UNIT, NOISE_UNIT / 2);
}
DEV u32 place_of(int token, u32 key_high) { return ((u32)token + GOLDEN) * (key_high | 1); }

// log(E) for E = -log1p(-u), and log2(E / log(2)), see draw_tokens.py.
DEV float log_of_time(float u) {
  const float rest = 1 - u;
  return logf(rest == 1 ? u : -logf(rest) * (u / (1 - rest)));
}
DEV float rough_log2_of_time(float u) {
  constexpr float second = INVERSE_LOG_2 / 2, third = INVERSE_LOG_2 / 3;
  const float series = u * multiply_add(u, multiply_add(u, third, second), INVERSE_LOG_2);
  return log2_fast(fmaxf(series, -ROUGH_LOSS - log2_fast(1 - u)));
}

// A row of x, and what it has in a tile.
struct Row {
  int index;
  float temperature;  // 0 for those beyond the last one, too
  u32 key_low, key_high;

  float maximum, logit;
  int winner;

  DEV Row(const Params& p, int index) : index(index), temperature(0), key_low(0), key_high(0) {
    if (index >= p.rows) return;
    const i64 entry = p.slots ? load_constant(p.slots + index) : index;
    if (entry < p.num_slots) temperature = load_constant(p.temperature + entry);
    key_low = load_constant(p.keys + index * 2);
    key_high = load_constant(p.keys + index * 2 + 1);
  }
  DEV bool is_random() const { return temperature > 0; }
  // What scores are relative to.
  DEV float base() const { return maximum - maximum == 0 ? maximum : 0; }
};

struct Consumer {
  const Params& p;
  const Shared& shared;
  const int warpgroup, lane;
  const u32 scratch;        // a row of the warp's own
  const Operand x, weight;  // of the first stage
  Place place;
  float sums[COLUMNS / 2];
  Row rows[2];

  DEV Consumer(const Params& p, const Shared& shared, int rank, int warp, int lane)
      : p(p),
        shared(shared),
        warpgroup(warp / 4),
        lane(lane),
        scratch(shared.logits(warp)),
        x(shared.x(0) + (ALTERNATE ? 0 : warpgroup * 64 * TERMS * 2), 0),
        weight(shared.weight(0), 0),
        rows{Row(p, rank * ROWS + (ALTERNATE ? warp % 4 : warp) * 16 + lane / 4),
             Row(p, rank * ROWS + (ALTERNATE ? warp % 4 : warp) * 16 + lane / 4 + 8)} {}

  // To those who copy to this block.
  DEV void release(int stage) const {
    if (lane >= CLUSTER) return;
    if (CLUSTER == 1)
      arrive(shared.empty(stage));
    else
      arrive_at(shared.empty(stage), lane);
  }

  // The tile's sums. The product of a step is under way while the next one is issued. Without the zeros the
  // compiler would take what `cut` writes for input of the next tile, and make products wait for one another.
  DEV void multiply(int round) {
    if (ALTERNATE && round > 0) named_sync(TURN + warpgroup, 2 * 128);
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = 0;
    int older = 0;
    for (int k = 0; k < p.steps; ++k) {
      wait(shared.full(place.stage), place.parity);
      products_begin();
#pragma unroll
      for (int i = 0; i < TERMS / 16; ++i) {
        const u32 behind = place.stage * STAGE_BYTES + i * 32;
        multiply_shared<COLUMNS>(sums, x.behind(behind), weight.behind(behind), true);
      }
      products_commit();
      products_wait<1>();
      if (k > 0) release(older);
      older = place.stage;
      place.advance();
    }
    if (ALTERNATE && tile_of(round + 1) < p.tiles) named_arrive(TURN + (warpgroup ^ 1), 2 * 128);
    products_wait<0>();
    hold(sums);
    release(older);
    if (ALTERNATE) place.skip(p.steps);
  }

  // Columns beyond the vocabulary lose. first: token of the thread's first column.
  DEV void cut(int first) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i)
      if (first + i / 4 * 8 + i % 2 >= p.vocabulary) sums[i] = NEG_INF;
  }

  template <int BELOW>
  DEV void find_maximum() {
    float even = NEG_INF, odd = NEG_INF;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      even = max_or_nan(even, sums[group * 4 + BELOW * 2]);
      odd = max_or_nan(odd, sums[group * 4 + BELOW * 2 + 1]);
    }
    float maximum = max_or_nan(even, odd);
    maximum = max_or_nan(maximum, exchange(maximum, 1));
    rows[BELOW].maximum = max_or_nan(maximum, exchange(maximum, 2));
  }

  // The lowest of those that have the largest logit.
  template <int BELOW>
  DEV void choose(int first) {
    const float maximum = rows[BELOW].maximum;
    int column = COLUMNS;
#pragma unroll
    for (int i = COLUMNS / 4 - 1; i >= 0; --i)
      if (sums[i / 2 * 4 + BELOW * 2 + i % 2] == maximum) column = i / 2 * 8 + i % 2;
    int winner = first + column;
    winner = min(winner, exchange(winner, 1));
    rows[BELOW].winner = min(winner, exchange(winner, 2));
    rows[BELOW].logit = maximum;
  }

  // The row's race. True: it must be run by exact times.
  template <int BELOW>
  DEV bool race(int first) {
    Row& row = rows[BELOW];
    const float base = row.base(), sharpness = fminf(INVERSE_LOG_2 / row.temperature, MAX_SHARPNESS);
    const u32 factor = row.key_high | 1;
    u32 place = place_of(first, row.key_high);
    float best = NEG_INF, next = NEG_INF, logit = NEG_INF;
    int column = 0;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group, place += factor * 8)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const float own = sums[group * 4 + BELOW * 2 + odd];
        const float time = rough_log2_of_time(uniform(place + odd * factor, row.key_low));
        const float score = multiply_add(own - base, sharpness, -time);
        const bool is_ahead = score > best;
        next = fmaxf(next, fminf(best, score));
        best = fmaxf(best, score);
        logit = is_ahead ? own : logit;
        column = is_ahead ? group * 8 + odd : column;
      }
    int winner = first + column;
#pragma unroll
    for (int mask = 1; mask <= 2; mask *= 2) {
      const float other = exchange(best, mask), other_logit = exchange(logit, mask);
      const int other_winner = exchange(winner, mask);
      next = fmaxf(fmaxf(next, exchange(next, mask)), fminf(best, other));
      if (other > best) best = other, logit = other_logit, winner = other_winner;
    }
    if (row.is_random()) row.winner = winner, row.logit = logit;
    return row.is_random() && !(next < best - ROUGHNESS);
  }

  // The race of the row that lanes `leader` .. `leader` + 3 have, by exact times.
  template <int BELOW>
  DEV void run_exactly(int first, int leader) {
    Row& row = rows[BELOW];
    const bool is_own = (lane & ~3) == leader;
    warp_sync();  // with the row before
    if (is_own) {
#pragma unroll
      for (int i = 0; i < COLUMNS / 4; ++i)
        store_shared(scratch + (lane % 4 * 2 + i / 2 * 8 + i % 2) * 4,
                     bits_of(sums[i / 2 * 4 + BELOW * 2 + i % 2]));
    }
    warp_sync();
    const int start = broadcast(first, leader);  // the tile's
    const float base = float_of(broadcast(bits_of(row.base()), leader));
    const float temperature = float_of(broadcast(bits_of(row.temperature), leader));
    const u32 key_low = broadcast(row.key_low, leader), key_high = broadcast(row.key_high, leader);
    float best = NEG_INF, logit = NEG_INF;
    int winner = start;
    for (int column = lane; column < COLUMNS; column += 32) {
      const float own = float_of(load_shared(scratch + column * 4));
      const float u = uniform(place_of(start + column, key_high), key_low);
      const float score = (own - base) / temperature - log_of_time(u);
      if (score > best) best = score, logit = own, winner = start + column;
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) {
      const float other = exchange(best, mask), other_logit = exchange(logit, mask);
      const int other_winner = exchange(winner, mask);
      if (other > best || (other == best && other_winner < winner))
        best = other, logit = other_logit, winner = other_winner;
    }
    if (is_own) row.winner = winner, row.logit = logit;
  }

  template <int BELOW>
  DEV void draw_row(int tile, int first) {
    const Row& row = rows[BELOW];
    const u32 random = votes(row.is_random());
    find_maximum<BELOW>();
    if (random != ~0u) choose<BELOW>(first);
    if (random) {
      u32 open = votes(race<BELOW>(first));
      while (open) {
        const int leader = first_bit(open);
        run_exactly<BELOW>(first, leader);
        open &= ~(15u << leader);
      }
    }
    if (lane % 4 > 0 || row.index >= p.rows) return;
    const i64 place = (i64)row.index * p.tiles + tile;
    store_word(p.maxima + place, bits_of(row.maximum));
    store_word(p.logits_won + place, bits_of(row.logit));
    store_word(p.winners + place, min(row.winner, p.vocabulary - 1));
  }

  DEV void consume() {
    const int step = ALTERNATE ? 2 : 1;
    if (ALTERNATE && warpgroup == 1) place.skip(p.steps);
    for (int round = ALTERNATE ? warpgroup : 0; tile_of(round) < p.tiles; round += step) {
      multiply(round);
      const int tile = tile_of(round), first = tile * COLUMNS + lane % 4 * 2;
      // Of a warp without rows nobody wants to know.
      if (votes(rows[0].index < p.rows) == 0) continue;
      if ((tile + 1) * COLUMNS > p.vocabulary) cut(first);
      draw_row<0>(tile, first);
      draw_row<1>(tile, first);
    }
  }
};

// Grid: at most one block per multiprocessor, whole clusters, no more than there are tiles. Threads: a
// warpgroup of which one copies, then those that compute.
extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTER_BLOCKS
    draw_rows(const __grid_constant__ Params p) {
  launch_dependents();
  const Shared shared;
  const int thread = thread_index();
  if (thread == 0) {
    fetch_map(p.x), fetch_map(p.weight);
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.empty(stage), CLUSTER * (ALTERNATE ? 1 : WARPGROUPS) * 4);
    }
    publish_barriers();
  }
  if (CLUSTER == 1)
    named_sync(0, THREADS);
  else
    cluster_sync();
  const int rank = CLUSTER == 1 ? 0 : cluster_rank(), warp = broadcast(thread / 32, 0);
  if (warp < 4) {
    release_registers<PRODUCER_REGISTERS>();
    if (thread == 0) Producer{p, shared, rank}.produce();
    warp_sync();
  } else {
    claim_registers<CONSUMER_REGISTERS>();
    Consumer(p, shared, rank, warp - 4, thread % 32).consume();
  }
  // The other block's last arrivals come here: until then this memory must stay.
  if (CLUSTER > 1) cluster_sync();
}
