// Gate and up with SiLU as one product: y = silu(x Wg^T) * (x Wu^T); x [M, K], W [2 N, K] (gate rows, then up
// rows), y [M, N], all of one 16-bit type. Sums are FP32, and y is rounded once.
//
// A block computes tiles of 128 rows by 128 columns of y, one after the other. One thread copies (TMA): 128
// rows of x, of gate and of up, 64 terms at a time, into a ring of STAGES. Two warpgroups compute, 64 rows
// each. Rows of gate and of up lie one behind the other in shared memory: they are the 256 columns of one
// product, and a thread gets column n of gate in [i] and column n of up in [64 + i] (attention.cu has the
// layout).
//
// The copying thread runs ahead into the next tile while results are computed and stored. The warpgroups may
// be some stages apart: then one multiplies while the other computes exponents. Forcing that gained nothing.
//
// The two blocks of a CLUSTER have tiles one below the other. Both need the same rows of W: one copies those
// of gate to both, the other those of up. So a stage is free when the warpgroups of both are done with it.
//
// Where few tiles are left for the last round, they are halved, so that it takes half the time: the blocks of
// a cluster have 64 rows each, and only the first warpgroup computes.
//
// Tiles are taken in groups of GROUP rows of tiles, column by column, so that what is computed at the same
// time has few different rows of x and W, which stay in the L2 cache.
//
// Macros: HALF (float16 instead of bfloat16), CLUSTER (2), GROUP, STAGES, PRODUCER_REGISTERS,
// CONSUMER_REGISTERS, WATCHDOG_NS.

constexpr int ROWS = 128, COLUMNS = 128, TERMS = 64;
constexpr int WARPGROUPS = 2, THREADS = (WARPGROUPS + 1) * 128;
constexpr u32 X_BYTES = ROWS * TERMS * 2, HALF_BYTES = COLUMNS * TERMS * 2;
constexpr u32 STAGE_BYTES = X_BYTES + 2 * HALF_BYTES;
constexpr u32 SPAN_BYTES = 64 * 128;                // 64 rows of 64 columns of y
constexpr u32 Y_BYTES = COLUMNS / 64 * SPAN_BYTES;  // of a warpgroup
constexpr int OWN = 1;                              // the first named barrier of the warpgroups' own use
static_assert(CLUSTER == 2, "a block copies one half of W's rows");

struct alignas(64) Params {
  TensorMap x, weight, y;  // boxes of 64 columns: 128 rows of x and W, 64 rows of y
  int width;               // N
  int steps;               // K / 64
  int row_tiles;           // of CLUSTER * ROWS rows
  int column_tiles;
  int whole_tiles;  // those behind are halved
};

// Where things lie in shared memory.
struct Shared {
  u32 base;
  DEV Shared() : base((shared_base() + 1023) / 1024 * 1024) {}
  DEV u32 x(int stage) const { return base + stage * STAGE_BYTES; }
  DEV u32 weight(int stage) const { return x(stage) + X_BYTES; }
  DEV u32 y(int warpgroup) const { return x(STAGES) + warpgroup * Y_BYTES; }
  DEV u32 full(int stage) const { return y(WARPGROUPS) + stage * 8; }
  DEV u32 empty(int stage) const { return full(STAGES + stage); }
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

// By one thread: others could miss a phase that they wait for.
DEV void produce(const Params& p, const Shared& shared) {
  const int half = cluster_rank();  // of W's rows
  Tile tile;
  Place place;
  for (int round = 0; find_tile(p, round, tile); ++round)
    for (int k = 0; k < p.steps; ++k, place.advance()) {
      const u32 full = shared.full(place.stage), weight = shared.weight(place.stage) + half * HALF_BYTES;
      wait(shared.empty(place.stage), place.parity ^ 1);
      arrive_expecting(full, STAGE_BYTES);
      copy_box(shared.x(place.stage), p.x, k * TERMS, tile.row, full);
      copy_box_to_all(weight, p.weight, k * TERMS, tile.column + half * p.width, full);
    }
}

struct Consumer {
  const Params& p;
  const Shared& shared;
  const int warpgroup, thread, lane;  // thread: of the warpgroup
  const Operand x, weight;            // of the first stage
  Place place;
  float sums[2 * COLUMNS / 2];

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
        multiply_shared<2 * COLUMNS>(sums, x.behind(behind), weight.behind(behind), k + i > 0);
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
    for (int k = 0; k < p.steps; ++k, place.advance()) {
      wait(shared.full(place.stage), place.parity);
      release(place.stage);
    }
  }

  // 64 rows by 128 columns of y, by way of shared memory.
  DEV void store(const Tile& tile) {
    if (thread == 0) stores_wait();
    named_sync(OWN + warpgroup, 128);
    const int row = lane % 8;
    const u32 target = shared.y(warpgroup) + (thread / 32 * 16 + row) * 128;
#pragma unroll
    for (int span = 0; span < COLUMNS / 64; ++span)
#pragma unroll
      for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          u32 words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int first = (span * 8 + part * 4 + i) * 4 + half * 2;
            words[i] = gate_two(sums[first], sums[first + 1], sums[COLUMNS / 2 + first],
                                sums[COLUMNS / 2 + first + 1]);
          }
          // Pieces of 16 bytes are permuted as the copy expects them.
          const int piece = (part * 4 + lane / 8) ^ row;
          store_matrices(target + span * SPAN_BYTES + half * 8 * 128 + piece * 16, words);
        }
    fence_shared();
    named_sync(OWN + warpgroup, 128);
    if (thread == 0) {
#pragma unroll
      for (int span = 0; span < COLUMNS / 64; ++span)
        store_box(p.y, tile.column + span * 64, tile.row + warpgroup * 64,
                  shared.y(warpgroup) + span * SPAN_BYTES);
      stores_commit();
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
    multiply_gated(const __grid_constant__ Params p) {
  const Shared shared;
  const int thread = thread_index();
  if (thread == 0) {
    fetch_map(p.x), fetch_map(p.weight), fetch_map(p.y);
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
