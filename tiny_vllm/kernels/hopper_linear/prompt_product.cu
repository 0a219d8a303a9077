// Products of prompts: y = x W^T, y = residual + x W^T, or GATED y = silu(x Wg^T) * (x Wu^T); x [M, K], W [N,
// K] (gated: [2 N, K], gate rows, then up rows), residual and y [M, N], which may be the same, all of one
// 16-bit type. Sums are FP32, and y is rounded once.
//
// A block computes tiles of y of 128 rows, one after the other, each with TILE_COLUMNS rows of W (gated: half
// of them of gate, half of up). One thread copies (TMA): rows of x and of W, 64 terms at a time, into a ring
// of STAGES. Two warpgroups compute, 64 rows each. Rows of gate and of up lie one behind the other in shared
// memory: they are the columns of one product, and a thread gets column n of gate in [i] and column n of up
// in [64 + i] (attention.cu has the layout).
//
// The copying thread runs ahead into the next tile while results are computed and stored. The warpgroups may
// be some stages apart: then one multiplies while the other stores, or computes exponents. Forcing that
// gained nothing.
//
// A tile's residual comes through the ring, behind its terms: it is there when the last product is.
//
// The two blocks of a CLUSTER have tiles one below the other. Both need the same rows of W: each copies half
// of them to both, gated one those of gate and the other those of up. So a stage is free when the warpgroups
// of both are done with it.
//
// Where few tiles are left for the last round, they are halved, so that it takes half the time: the blocks of
// a cluster have 64 rows each, and only the first warpgroup computes.
//
// Tiles are taken in groups of GROUP rows of tiles, column by column, so that what is computed at the same
// time has few different rows of x and W, which stay in the L2 cache.
//
// Dependent launch (see triton_support.py): a block has a multiprocessor for itself, so a dependent's blocks
// come when blocks end, and asking for them at the start delays nothing. The ring is filled with W, which no
// predecessor writes, before the predecessor is waited for. y is written after that: its sums are of x.
//
// Macros: KERNEL (its name), HALF (float16 instead of bfloat16), GATED, ADDS (a residual), TILE_COLUMNS,
// CLUSTER (2), GROUP, STAGES, PRODUCER_REGISTERS, CONSUMER_REGISTERS, WATCHDOG_NS.

constexpr int ROWS = 128, TERMS = 64;
constexpr int COLUMNS = GATED ? TILE_COLUMNS / 2 : TILE_COLUMNS;  // of y
constexpr int SHARE = TILE_COLUMNS / CLUSTER;                     // rows of W that a block copies
constexpr int PASS = COLUMNS % 128 == 0 ? 128 : 64;               // columns of y that are stored at a time
constexpr int WARPGROUPS = 2, THREADS = (WARPGROUPS + 1) * 128;
constexpr u32 X_BYTES = ROWS * TERMS * 2, SHARE_BYTES = SHARE * TERMS * 2;
constexpr u32 STAGE_BYTES = X_BYTES + CLUSTER * SHARE_BYTES;
constexpr u32 SPAN_BYTES = 64 * 128;                  // 64 rows of 64 columns of y
constexpr u32 Y_BYTES = PASS / 64 * SPAN_BYTES;       // of a warpgroup
constexpr u32 RESIDUAL_BYTES = WARPGROUPS * Y_BYTES;  // of a pass
constexpr int OWN = 1;                                // the first named barrier of the warpgroups' own use
static_assert(CLUSTER == 2, "a block copies one half of W's rows");
static_assert(COLUMNS % PASS == 0 && TILE_COLUMNS <= 256, "columns of a product, and whole passes");
static_assert(RESIDUAL_BYTES <= STAGE_BYTES, "a pass of the residual takes a stage");
static_assert(!(GATED && ADDS), "no model has that");

struct alignas(64) Params {
  TensorMap x, weight, y, residual;  // boxes of 64 columns: ROWS rows of x and residual, SHARE of W, 64 of y
  int width;                         // N
  int steps;                         // K / 64
  int row_tiles;                     // of CLUSTER * ROWS rows
  int column_tiles;
  int whole_tiles;  // those behind are halved
};

// Where things lie in shared memory.
struct Shared {
  u32 base;
  DEV Shared() : base((shared_base() + 1023) / 1024 * 1024) {}
  DEV u32 x(int stage) const { return base + stage * STAGE_BYTES; }
  DEV u32 weight(int stage) const { return x(stage) + X_BYTES; }
  // 64 columns of the residual, in the place of x and W.
  DEV u32 residual(int stage, int span) const { return x(stage) + span * WARPGROUPS * SPAN_BYTES; }
  DEV u32 y(int warpgroup) const { return x(STAGES) + warpgroup * Y_BYTES; }
  DEV u32 full(int stage) const { return y(WARPGROUPS) + stage * 8; }
  DEV u32 empty(int stage) const { return full(STAGES + stage); }
};

// The stage of the ring that is next, and the parity of the "full" barrier that it completes.
struct Place {
  int stage = 0;
  u32 parity = 0;
  DEV void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

struct Tile {
  int row, column;
  bool is_half;
};

// The block's tile of a round. False: no tile in this round, and none in later ones.
DEV bool find_tile(const Params& p, int round, Tile& tile) {
  int place = (block_index() + round * num_blocks()) / CLUSTER;
  const int beyond = place - p.whole_tiles;
  tile.is_half = beyond >= 0;
  if (tile.is_half) place = p.whole_tiles + beyond / 2;
  if (place >= p.row_tiles * p.column_tiles) return false;
  const int group = place / (GROUP * p.column_tiles), within = place % (GROUP * p.column_tiles);
  const int height = min(p.row_tiles - group * GROUP, GROUP);
  tile.row = (group * GROUP + within % height) * CLUSTER * ROWS;
  tile.row += tile.is_half ? (beyond % 2 * CLUSTER + cluster_rank()) * 64 : cluster_rank() * ROWS;
  tile.column = within / height * COLUMNS;
  return true;
}

// Begins a stage: the block's share of W's rows, to both blocks.
DEV void copy_weight(const Params& p, const Shared& shared, const Tile& tile, int k, int stage) {
  const int rank = cluster_rank(), row = tile.column + rank * (GATED ? p.width : SHARE);
  const u32 full = shared.full(stage);
  arrive_expecting(full, STAGE_BYTES);
  copy_box_to_all(shared.weight(stage) + rank * SHARE_BYTES, p.weight, k * TERMS, row, full);
}

// A pass of the residual's rows.
DEV void copy_residual(const Params& p, const Shared& shared, const Tile& tile, int pass, int stage) {
  const u32 full = shared.full(stage);
  arrive_expecting(full, RESIDUAL_BYTES);
#pragma unroll
  for (int span = 0; span < PASS / 64; ++span)
    copy_box(shared.residual(stage, span), p.residual, tile.column + pass * PASS + span * 64, tile.row, full);
}

// By one thread: others could miss a phase that they wait for.
DEV void produce(const Params& p, const Shared& shared) {
  const int early = min(p.steps, STAGES);
  Tile tile;
  Place place;
  for (int round = 0; find_tile(p, round, tile); ++round) {
    if (round == 0) {
#pragma unroll 1
      for (int k = 0; k < early; ++k) copy_weight(p, shared, tile, k, k);
      wait_for_predecessor();
    }
    for (int k = 0; k < p.steps; ++k, place.advance()) {
      wait(shared.empty(place.stage), place.parity ^ 1);
      if (round > 0 || k >= early) copy_weight(p, shared, tile, k, place.stage);
      copy_box(shared.x(place.stage), p.x, k * TERMS, tile.row, shared.full(place.stage));
    }
    for (int pass = 0; ADDS && pass < COLUMNS / PASS; ++pass, place.advance()) {
      wait(shared.empty(place.stage), place.parity ^ 1);
      copy_residual(p, shared, tile, pass, place.stage);
    }
  }
}

struct Consumer {
  const Params& p;
  const Shared& shared;
  const int warpgroup, thread, lane;  // thread: of the warpgroup
  const Operand x, weight;            // of the first stage
  Place place;
  float sums[TILE_COLUMNS / 2];

  DEV Consumer(const Params& p, const Shared& shared, int warpgroup, int thread)
      : p(p),
        shared(shared),
        warpgroup(warpgroup),
        thread(thread),
        lane(thread % 32),
        x(shared.x(0) + warpgroup * 64 * 128, 0),
        weight(shared.weight(0), 0) {}

  DEV void release(int stage) {
    if (lane < CLUSTER) arrive_at(shared.empty(stage), lane);
  }

  // The tile's sums. The product of a step is under way while the next one is issued.
  DEV void multiply() {
    int older = 0;
    for (int k = 0; k < p.steps; ++k) {
      wait(shared.full(place.stage), place.parity);
      products_begin();
#pragma unroll
      for (int i = 0; i < TERMS / 16; ++i) {
        const u32 behind = place.stage * STAGE_BYTES + i * 32;
        multiply_shared<TILE_COLUMNS>(sums, x.behind(behind), weight.behind(behind), k + i > 0);
      }
      products_commit();
      products_wait<1>();
      if (k > 0) release(older);
      older = place.stage;
      place.advance();
    }
    products_wait<0>();
    hold(sums);
    release(older);
  }

  // A tile's stages pass without products.
  DEV void skip() {
    const int stages = p.steps + (ADDS ? COLUMNS / PASS : 0);
    for (int i = 0; i < stages; ++i, place.advance()) {
      wait(shared.full(place.stage), place.parity);
      release(place.stage);
    }
  }

  // Two values of y, from the first one's sum on. addend: of the residual.
  DEV u32 finish(const float* two, u32 addend) const {
    if (GATED) return gate_two(two[0], two[1], two[COLUMNS / 2], two[COLUMNS / 2 + 1]);
    if (ADDS) return pack(two[0] + first_of(addend), two[1] + second_of(addend));
    return pack(two[0], two[1]);
  }

  // 64 rows of y, by way of shared memory. A pass has matrices of 8 rows in fours, which lie side by side:
  // those of spans, of their left and right halves, and of a warp's upper and lower rows.
  DEV void store(const Tile& tile) {
    constexpr int FOURS = PASS / 64 * 4;
    const int row = lane % 8;
    const u32 own_row = (thread / 32 * 16 + row) * 128;
    // Pieces of 16 bytes are permuted as copies expect and leave them.
    const auto place_of = [&](int four) {
      return own_row + four % 2 * 8 * 128 + ((four / 2 % 2 * 4 + lane / 8) ^ row) * 16;
    };
#pragma unroll
    for (int pass = 0; pass < COLUMNS / PASS; ++pass) {
      u32 addends[FOURS][4];
      if (ADDS) {
        wait(shared.full(place.stage), place.parity);
#pragma unroll
        for (int four = 0; four < FOURS; ++four)
          load_matrices(addends[four],
                        shared.residual(place.stage, four / 4) + warpgroup * SPAN_BYTES + place_of(four));
      }
      if (thread == 0) stores_wait();
      named_sync(OWN + warpgroup, 128);
#pragma unroll
      for (int four = 0; four < FOURS; ++four) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int eight = (pass * FOURS / 4 + four / 4) * 8 + four / 2 % 2 * 4 + i;  // columns
          words[i] = finish(sums + eight * 4 + four % 2 * 2, addends[four][i]);
        }
        store_matrices(shared.y(warpgroup) + four / 4 * SPAN_BYTES + place_of(four), words);
      }
      fence_shared();
      named_sync(OWN + warpgroup, 128);
      if (ADDS) {
        // Only now: an arrival does not wait for loads, but what was stored is made of them.
        release(place.stage);
        place.advance();
      }
      if (thread == 0) {
#pragma unroll
        for (int span = 0; span < PASS / 64; ++span)
          store_box(p.y, tile.column + pass * PASS + span * 64, tile.row + warpgroup * 64,
                    shared.y(warpgroup) + span * SPAN_BYTES);
        stores_commit();
      }
    }
  }

  DEV void consume() {
    Tile tile;
    for (int round = 0; find_tile(p, round, tile); ++round) {
      if (tile.is_half && warpgroup == 1) {
        skip();
      } else {
        multiply();
        store(tile);
      }
    }
    if (thread == 0) stores_wait();
  }
};

// Grid: at most one block per multiprocessor, whole clusters. Threads: a warpgroup that copies, then those
// that compute.
extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTER_BLOCKS
    KERNEL(const __grid_constant__ Params p) {
  launch_dependents();
  const Shared shared;
  const int thread = thread_index();
  if (thread == 0) {
    fetch_map(p.x), fetch_map(p.weight), fetch_map(p.y);
    if (ADDS) fetch_map(p.residual);
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.empty(stage), CLUSTER * WARPGROUPS * 4);
    }
    publish_barriers();
  }
  cluster_sync();
  const int warpgroup = broadcast(thread / 128, 0);
  if (warpgroup == 0) {
    release_registers<PRODUCER_REGISTERS>();
    if (thread == 0) produce(p, shared);
    warp_sync();
  } else {
    claim_registers<CONSUMER_REGISTERS>();
    Consumer(p, shared, warpgroup - 1, thread % 128).consume();
  }
  // The other block's last arrivals come here: until then this memory must stay.
  cluster_sync();
}
