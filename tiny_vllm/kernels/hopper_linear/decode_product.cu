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
// One thread copies (TMA), 64 terms at a time, into a ring of STAGES. It fills the ring with W before it
// waits for the preceding kernel, which writes x. Of a tile that has fewer rows than ROWS, only these are
// copied; what products make of the others is not stored. Where one block alone has a row of W, it leaves the
// L2 cache first.
//
// What limits such tiles is how fast operands come, more than arithmetic. So x may be two tiles, whose
// blocks, a CLUSTER, share rows of W: each copies half of them to both, and a stage is free when the
// warpgroups of both are done with it.
//
// Parts are sums in a fixed order, and so is the sum that the next kernel makes of them: results repeat.
//
// Macros: HALF (float16 instead of bfloat16), GATED, WARPGROUPS, TILE_COLUMNS, CLUSTER (1 or 2 blocks),
// STAGES, WATCHDOG_NS.

constexpr int ROWS = WARPGROUPS * 64, TERMS = 64, HALVES = GATED ? 2 : 1;
constexpr int COLUMNS = TILE_COLUMNS;
constexpr int THREADS = (WARPGROUPS + 1) * 128;
constexpr int HALF_COLUMNS = COLUMNS / HALVES;        // of a tile of y
constexpr int WEIGHT_SHARE = HALF_COLUMNS / CLUSTER;  // what a block copies of W
constexpr u32 X_BYTES = ROWS * TERMS * 2, WEIGHT_BYTES = COLUMNS * TERMS * 2;
constexpr u32 STAGE_BYTES = X_BYTES + WEIGHT_BYTES;
constexpr int GROUPS = HALF_COLUMNS / 8;
static_assert(WEIGHT_SHARE % 8 == 0, "shares begin where the permutation does");
static_assert(COLUMNS % (8 * HALVES) == 0 && COLUMNS <= 256, "columns of a product");

struct alignas(64) Params {
  TensorMap x, weight;  // boxes of 64 columns, x_rows and WEIGHT_SHARE rows
  void* y;              // parts or y
  int rows, width;      // M, N
  int steps, splits;    // K / 64; into so many it is split
  int column_tiles;     // clusters side by side
  int x_rows;           // that are copied, a multiple of 8
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

// What a block has to do: a tile and a part of K, in steps.
struct Work {
  int rank;         // within the cluster
  int row, column;  // of y
  int part, begin, count;

  DEV explicit Work(const Params& p) {
    const int cluster = block_index() / CLUSTER;
    rank = CLUSTER == 1 ? 0 : cluster_rank();
    row = rank * ROWS;
    column = cluster % p.column_tiles * HALF_COLUMNS;
    part = cluster / p.column_tiles;
    begin = p.steps * part / p.splits;
    count = p.steps * (part + 1) / p.splits - begin;
  }
};

struct Producer {
  const Params& p;
  const Shared& shared;
  const Work& work;

  DEV int term(int step) const { return (work.begin + step) * TERMS; }
  DEV int weight_row(int half) const { return half * p.width + work.column + work.rank * WEIGHT_SHARE; }

  DEV void copy_weight(int step, int stage) const {
    const u32 full = shared.full(stage);
    arrive_expecting(full, p.x_rows * TERMS * 2 + WEIGHT_BYTES);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const u32 target = shared.weight(stage) + (half * HALF_COLUMNS + work.rank * WEIGHT_SHARE) * TERMS * 2;
      if (CLUSTER == 1)
        stream_box(target, p.weight, term(step), weight_row(half), full, streaming_policy());
      else
        copy_box_to_all(target, p.weight, term(step), weight_row(half), full);
    }
  }

  DEV void copy_x(int step, int stage) const {
    copy_box(shared.x(stage), p.x, term(step), work.row, shared.full(stage));
  }

  DEV void produce() const {
    const int first = min(work.count, STAGES);
    for (int step = 0; step < first; ++step) copy_weight(step, step);
    wait_for_predecessor();
    for (int step = 0; step < first; ++step) copy_x(step, step);
    Place place;
    for (int step = STAGES; step < work.count; ++step, place.advance()) {
      wait(shared.empty(place.stage), place.parity);
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
    if (lane >= CLUSTER) return;
    if (CLUSTER == 1)
      arrive(shared.empty(stage));
    else
      arrive_at(shared.empty(stage), lane);
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
      barrier_init(shared.empty(stage), CLUSTER * WARPGROUPS * 4);
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
    if (CLUSTER > 1) cluster_sync();
    return;
  }
  Consumer consumer(p, shared, work, warpgroup - 1, thread % 128);
  consumer.multiply();
  // The other block's last arrivals and copies come here: until then this memory must stay.
  if (CLUSTER > 1) cluster_arrive();
  consumer.store();
  if (CLUSTER > 1) cluster_wait();
}
