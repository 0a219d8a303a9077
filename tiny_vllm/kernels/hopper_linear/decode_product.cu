// Products of some hundred rows: parts[s] = x W^T over part s of K; x [M, K], W [N, K] of one 16-bit type,
// parts [splits, M, N] FP32. GATED: W [2 N, K] (gate rows, then up rows), K whole, and y = silu(x Wg^T) * (x
// Wu^T) [M, N] of x's type.
//
// All blocks run at the same time, each with one tile: ROWS rows of x by COLUMNS rows of W (gated: half of
// them of gate, half of up), over one part of K. So the tile's size and the number of parts are chosen for as
// many tiles as there are multiprocessors. Rows of x are the operand of 64 rows, 64 for each of WARPGROUPS,
// because rows of W, the other operand, may then be any multiple of 8: matrices of 3,072 rows make 32 tiles
// of 96 and 64 of 48.
//
// One thread copies (TMA), 64 terms at a time, into a ring of STAGES. It fills the ring with W before it waits
// for the preceding kernel, which writes x.
//
// What limits such tiles is how fast operands come, more than arithmetic. So blocks of a cluster share them:
// ROW_BLOCKS of them have the same rows of W, COLUMN_BLOCKS the same rows of x. Each copies its share of both
// to all that need it: a stage is free when the warpgroups of all of these are done with it.
//
// Parts are sums in a fixed order, and so is the sum that the next kernel makes of them: results repeat.
// Blocks with SPLIT_BLOCKS parts of K of the same tile may also be one cluster. Then they sum these
// themselves, groups of 8 columns by turns, by way of the rings, which are no longer needed: fewer parts are
// written and read.
//
// Macros: HALF (float16 instead of bfloat16), GATED, WARPGROUPS, TILE_COLUMNS, ROW_BLOCKS, COLUMN_BLOCKS,
// SPLIT_BLOCKS, CLUSTER (their product), STAGES, WATCHDOG_NS.

constexpr int ROWS = WARPGROUPS * 64, TERMS = 64, HALVES = GATED ? 2 : 1;
constexpr int COLUMNS = TILE_COLUMNS;
constexpr int THREADS = (WARPGROUPS + 1) * 128;
constexpr int HALF_COLUMNS = COLUMNS / HALVES;  // of a tile of y
constexpr int X_SHARE = ROWS / COLUMN_BLOCKS,
              WEIGHT_SHARE = HALF_COLUMNS / ROW_BLOCKS;  // what a block copies
constexpr u32 X_BYTES = ROWS * TERMS * 2, STAGE_BYTES = X_BYTES + COLUMNS * TERMS * 2;
constexpr int SHARERS = ROW_BLOCKS + COLUMN_BLOCKS - 1;  // who copies to a block, itself among them
constexpr int GROUPS = HALF_COLUMNS / 8, OWN_GROUPS = (GROUPS + SPLIT_BLOCKS - 1) / SPLIT_BLOCKS;
static_assert(CLUSTER == ROW_BLOCKS * COLUMN_BLOCKS * SPLIT_BLOCKS && CLUSTER <= 8, "blocks of a cluster");
static_assert(SPLIT_BLOCKS == 1 ||
                  SPLIT_BLOCKS * HALVES * OWN_GROUPS * WARPGROUPS * 128 * 16 <= STAGES * STAGE_BYTES,
              "sums of a tile where the ring was");
static_assert(X_SHARE % 8 == 0 && WEIGHT_SHARE % 8 == 0, "shares begin where the permutation does");
static_assert(COLUMNS % (8 * HALVES) == 0 && COLUMNS <= 256, "columns of a product");

struct alignas(64) Params {
  TensorMap x, weight;  // boxes of 64 columns, X_SHARE and WEIGHT_SHARE rows
  void* y;              // parts or y
  int rows, width;      // M, N
  int steps, splits;    // K / 64; into so many it is split
  int column_clusters;  // clusters side by side
};

// Where things lie in shared memory.
struct Shared {
  u32 base;
  DEV Shared() : base((shared_base() + 1023) / 1024 * 1024) {}
  DEV u32 x(int stage) const { return base + stage * STAGE_BYTES; }
  DEV u32 weight(int stage) const { return x(stage) + X_BYTES; }
  DEV u32 full(int stage) const { return x(STAGES) + stage * 8; }
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

// What a block has to do: a tile and a part of K, in steps.
struct Work {
  int row_rank, column_rank, split_rank;  // within the cluster
  int row, column;                        // of y
  int part, begin, count;

  DEV explicit Work(const Params& p) {
    const int rank = CLUSTER == 1 ? 0 : cluster_rank(), cluster = block_index() / CLUSTER;
    row_rank = rank % ROW_BLOCKS, column_rank = rank / ROW_BLOCKS % COLUMN_BLOCKS;
    split_rank = rank / (ROW_BLOCKS * COLUMN_BLOCKS);
    const int others = cluster / p.column_clusters, parts = p.splits / SPLIT_BLOCKS;
    column = (cluster % p.column_clusters * COLUMN_BLOCKS + column_rank) * HALF_COLUMNS;
    part = others % parts;
    row = (others / parts * ROW_BLOCKS + row_rank) * ROWS;
    const int split = part * SPLIT_BLOCKS + split_rank;
    begin = p.steps * split / p.splits;
    count = p.steps * (split + 1) / p.splits - begin;
  }
};

DEV int rank_of(int row_rank, int column_rank, int split_rank) {
  return (split_rank * COLUMN_BLOCKS + column_rank) * ROW_BLOCKS + row_rank;
}
// The blocks that share a tile's rows of W, those that share its rows of x.
DEV u16 sharers_of_weight(const Work& work) {
  return ((1 << ROW_BLOCKS) - 1) << rank_of(0, work.column_rank, work.split_rank);
}
DEV u16 sharers_of_x(const Work& work) {
  int blocks = 0;
#pragma unroll
  for (int i = 0; i < COLUMN_BLOCKS; ++i) blocks |= 1 << rank_of(work.row_rank, i, work.split_rank);
  return blocks;
}

struct Producer {
  const Params& p;
  const Shared& shared;
  const Work& work;

  DEV int term(int step) const { return (work.begin + step) * TERMS; }
  DEV int weight_row(int half) const { return half * p.width + work.column + work.row_rank * WEIGHT_SHARE; }

  DEV void copy_weight(int step, int stage) const {
    const u32 full = shared.full(stage);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const u32 target =
          shared.weight(stage) + (half * HALF_COLUMNS + work.row_rank * WEIGHT_SHARE) * TERMS * 2;
      if (ROW_BLOCKS == 1)
        copy_box(target, p.weight, term(step), weight_row(half), full);
      else
        copy_box_to(sharers_of_weight(work), target, p.weight, term(step), weight_row(half), full);
    }
  }

  DEV void copy_x(int step, int stage) const {
    const int share = work.column_rank * X_SHARE;
    const u32 target = shared.x(stage) + share * TERMS * 2, full = shared.full(stage);
    if (COLUMN_BLOCKS == 1)
      copy_box(target, p.x, term(step), work.row, full);
    else
      copy_box_to(sharers_of_x(work), target, p.x, term(step), work.row + share, full);
  }

  DEV void produce() const {
    const int first = min(work.count, STAGES);
    for (int step = 0; step < first; ++step) {
      arrive_expecting(shared.full(step), STAGE_BYTES);
      copy_weight(step, step);
    }
    wait_for_predecessor();
    for (int step = 0; step < first; ++step) copy_x(step, step);
    Place place;
    for (int step = STAGES; step < work.count; ++step, place.advance()) {
      wait(shared.empty(place.stage), place.parity);
      arrive_expecting(shared.full(place.stage), STAGE_BYTES);
      copy_weight(step, place.stage);
      copy_x(step, place.stage);
    }
  }
};

struct Consumer {
  const Params& p;
  const Shared& shared;
  const Work& work;
  const int warpgroup, thread, lane;  // thread: of the warpgroup
  float sums[COLUMNS / 2];

  DEV Consumer(const Params& p, const Shared& shared, const Work& work, int warpgroup, int thread)
      : p(p), shared(shared), work(work), warpgroup(warpgroup), thread(thread), lane(thread % 32) {}

  // To those who copy to this block.
  DEV void release(int stage) const {
    if (lane >= SHARERS) return;
    if (CLUSTER == 1) {
      arrive(shared.empty(stage));
    } else if (lane < ROW_BLOCKS) {
      arrive_at(shared.empty(stage), rank_of(lane, work.column_rank, work.split_rank));
    } else {
      const int other = lane - ROW_BLOCKS, column_rank = other + (other >= work.column_rank);
      arrive_at(shared.empty(stage), rank_of(work.row_rank, column_rank, work.split_rank));
    }
  }

  // The tile's sums. The product of a step is under way while the next one is issued.
  DEV void multiply() {
    const Operand x(shared.x(0) + warpgroup * 64 * TERMS * 2, 0), weight(shared.weight(0), 0);
    Place place;
    int older = 0;
    for (int step = 0; step < work.count; ++step) {
      wait(shared.full(place.stage), place.parity);
      products_begin();
#pragma unroll
      for (int i = 0; i < TERMS / 16; ++i) {
        const u32 behind = place.stage * STAGE_BYTES + i * 32;
        multiply_shared<COLUMNS>(sums, x.behind(behind), weight.behind(behind), step + i > 0);
      }
      products_commit();
      products_wait<1>();
      if (step > 0) release(older);
      older = place.stage;
      place.advance();
    }
    products_wait<0>();
    hold(sums);
    release(older);
  }

  // A thread's four sums of a group of columns, from one of the blocks.
  DEV u32 place_of(int split_rank, int half, int group) const {
    const int index = (split_rank * HALVES + half) * OWN_GROUPS + group / SPLIT_BLOCKS;
    return shared.base + ((index * WARPGROUPS + warpgroup) * 128 + thread) * 16;
  }

  // To the blocks that sum them.
  DEV void send() const {
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
      for (int group = 0; group < GROUPS; ++group)
        store_floats_at(place_of(work.split_rank, half, group),
                        rank_of(work.row_rank, work.column_rank, group % SPLIT_BLOCKS),
                        sums + (half * GROUPS + group) * 4);
  }

  DEV bool is_own(int group) const { return SPLIT_BLOCKS == 1 || group % SPLIT_BLOCKS == work.split_rank; }

  DEV void collect() {
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {
        if (!is_own(group)) continue;
        float* total = sums + (half * GROUPS + group) * 4;
#pragma unroll
        for (int split_rank = 0; split_rank < SPLIT_BLOCKS; ++split_rank) {
          float four[4];
          load_shared_floats(four, place_of(split_rank, half, group));
#pragma unroll
          for (int i = 0; i < 4; ++i) total[i] = split_rank == 0 ? four[i] : total[i] + four[i];
        }
      }
  }

  // Columns 8 i + 2 c and the next of rows r and r + 8 of a warp's 16, for lane 4 r + c. N is a multiple
  // of 8.
  DEV void store() const {
    const int column = work.column + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = work.row + warpgroup * 64 + thread / 32 * 16 + half * 8 + lane / 4;
      if (row >= p.rows) continue;
      const i64 place = ((i64)work.part * p.rows + row) * p.width + column;
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {
        if (work.column + group * 8 >= p.width) break;
        if (!is_own(group)) continue;
        const float* two = sums + group * 4 + half * 2;
#if GATED
        const float* up = two + GROUPS * 4;
        store_word((u16*)p.y + place + group * 8, gate_two(two[0], two[1], up[0], up[1]));
#else
        store_two_floats((float*)p.y + place + group * 8, two[0], two[1]);
#endif
      }
    }
  }
};

// Grid: a block for each tile and part of K, whole clusters. Threads: a warpgroup of which one copies, then
// those that compute.
extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTER_BLOCKS
    multiply_rows(const __grid_constant__ Params p) {
  launch_dependents();
  const Shared shared;
  const int thread = thread_index();
  if (thread == 0) {
    fetch_map(p.x), fetch_map(p.weight);
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.empty(stage), SHARERS * WARPGROUPS * 4);
    }
    publish_barriers();
  }
  if (CLUSTER == 1)
    named_sync(0, THREADS);
  else
    cluster_sync();
  const Work work(p);
  const int warpgroup = broadcast(thread / 128, 0);
  if (warpgroup == 0) {
    if (thread == 0) Producer{p, shared, work}.produce();
    warp_sync();
    // As often as those that compute.
    if (CLUSTER > 1) cluster_sync();
    if (SPLIT_BLOCKS > 1) cluster_sync();
    return;
  }
  Consumer consumer(p, shared, work, warpgroup - 1, thread % 128);
  consumer.multiply();
  if (SPLIT_BLOCKS > 1) {
    cluster_sync();
    consumer.send();
    cluster_sync();
    consumer.collect();
    consumer.store();
    return;
  }
  // Other blocks' last arrivals and copies come here: until then this memory must stay.
  if (CLUSTER > 1) cluster_arrive();
  consumer.store();
  if (CLUSTER > 1) cluster_wait();
}
