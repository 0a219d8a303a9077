// Keys and values of long contexts, which come through the ring as weights do (tape.cu includes this).
//
// Those of earlier tokens are known long before the layer's queries, so their chunks follow QKV's on the way
// into the ring: memory keeps streaming while the blocks exchange q, and no burst of loads competes with the
// window of copies in flight. A tile's keys are one run of bytes in a page, and so are its values. A chunk
// holds the next tile of each warp of a group: its keys, then its values. The producer's warp copies keys,
// the cleaner's values: a warp alone cannot issue such small copies as fast as memory has them. Which warp
// computes what, and in which order, is as in Consumer::attend, and so are the results, bit for bit.

constexpr int TILE_RUN = POSITIONS * HEAD_DIM * 2;  // bytes of a tile's keys, or of its values
constexpr int CHUNK_TILES = 4 / HALVES;
static_assert(CHUNK_TILES * 2 * TILE_RUN <= CHUNK_BYTES && CHUNK_TILES <= 32, "tiles of a chunk");
// With more in flight, a warp group could mistake an earlier use of a stage for the next one.
constexpr int MAX_KV_WINDOW = STAGES % 4 ? STAGES - 4 : STAGES;

// Chunks of the block that has this share of a context; 0: its keys and values do not come through the ring.
// Nor do they when few blocks have them nearly all: the window of copies in flight is made for memory that
// all blocks share, and alone a block gets more out of it by loads. total: of all rows' positions.
DEV int kv_chunks(const Params& p, int split, int position, int total) {
  if (!KV_STREAM || SPLITS == 1 || position < max(p.direct_limit, p.kv_stream_limit)) return 0;
  if (TOKENS > KV_SKEW && position > total / TOKENS * KV_SKEW) return 0;
  const int tiles = (position / POSITIONS + SPLITS - split) / SPLITS;
  return (tiles + CHUNK_TILES - 1) / CHUNK_TILES;
}

// A warp that copies keys or values. All its lanes take part; each has at most one copy per chunk.
template <bool VALUES>
struct KvSource {
  const Params& p;
  const i64* table;
  int lane, split, head, position, chunks;
  int first_page;  // of the block's tile `lane`

  DEV KvSource(const Params& p, int cta) : p(p) {
    const int pair = cta / SPLITS, token = pair / KV_HEADS;
    lane = threadIdx.x & 31;
    split = cta % SPLITS;
    head = pair % KV_HEADS;
    chunks = 0;
    if (!KV_STREAM || SPLITS == 1) return;
    // Each lane looks at one row.
    i64 slot = lane < TOKENS ? p.slots[lane] : -1;
    if (slot >= p.num_slots) slot = -1;
    position = slot >= 0 ? (int)p.computed_len[slot] : 0;
    const int total = __reduce_add_sync(~0u, position);
    slot = __shfl_sync(~0u, (int)slot, token % 32);
    position = __shfl_sync(~0u, position, token % 32);
    if (token < TOKENS) chunks = kv_chunks(p, split, position, total);
    table = p.page_table + max((int)slot, 0) * p.table_width;
    first_page = chunks > 0 ? page_of(lane) : 0;
  }

  DEV int start_of(int tile) const { return (tile * SPLITS + split) * POSITIONS; }  // the block's tile-th one
  DEV int page_of(int tile) const {
    return start_of(tile) < position ? (int)__ldg(table + start_of(tile) / PAGE_SIZE) : 0;
  }

  DEV void stream(Producer& producer, Shared& s, int layer) const {
    const u32 window = min(p.kv_window, MAX_KV_WINDOW);
    const u8* const cache = (const u8*)(VALUES ? p.v_cache : p.k_cache) +
                            ((i64)layer * p.num_pages * KV_HEADS + head) * (PAGE_SIZE * HEAD_DIM * 2);
    // Values wait for keys to get here: earlier, a stage's parity might be that of an earlier use. Behind
    // that they only look at stages that need them to go on.
    if (!VALUES && lane == 0) s.kv_index = producer.index;
    __syncwarp();
    if (VALUES) {
      asm volatile("bar.sync 4, 64;" ::: "memory");
      producer.index = s.kv_index;
    } else
      asm volatile("bar.arrive 4, 64;" ::: "memory");
    int pages = first_page, coming = 0;  // of 32 tiles, and of the 32 behind them
#pragma unroll 1
    for (int c = 0; c < chunks; c++, producer.index++) {
      const int tile = c * CHUNK_TILES;
      if (tile % 32 == 0) {
        if (c > 0) pages = coming;
        coming = page_of(tile + 32 + lane);
      }
      const i64 page = __shfl_sync(~0u, pages, (tile + lane) % 32);
      const int start = start_of(tile + lane);
      // The new token's row is being written by some block.
      const int rows = lane < CHUNK_TILES ? max(0, min(position - start, POSITIONS)) : 0;
      const int bytes = rows * (HEAD_DIM * 2), all_bytes = __reduce_add_sync(~0u, bytes);
      const u32 stage = producer.index % STAGES;
      // A last chunk with nothing but the new token is full without the values' warp, and may be gone
      // already.
      if (VALUES && all_bytes == 0) continue;
      if (lane == 0) {
        if (VALUES)
          producer.await_stage();
        else
          producer.claim(window, 2 * all_bytes);
      }
      __syncwarp();
      if (bytes > 0)
        copy_bulk(producer.ring + stage * CHUNK_BYTES + (lane * 2 + VALUES) * TILE_RUN,
                  cache + page * (KV_HEADS * PAGE_SIZE * HEAD_DIM * 2) + start % PAGE_SIZE * (HEAD_DIM * 2),
                  bytes, producer.full + 8 * stage, producer.policy);
    }
  }
};

// Consumer::attend for the tiles of `chunks` chunks. The first chunk of each group is taken into registers
// before `arrive` waits for the queries.
template <class Arrive>
DEV void attend_streamed(Consumer& c, int token, int split, int chunks, const Arrive& arrive) {
  Consumer::Tile<SPLIT_DP> a;
  c.begin(a);
  const int position = c.s.position[token], column = c.quarter % HALVES * SPLIT_DP;
  auto take = [&](int chunk) {
    const u32 index = c.base + chunk, stage = index % STAGES;
    barrier_wait(c.full + 8 * stage, (index / STAGES) & 1);
    __syncwarp();
    const u16* keys = (const u16*)(c.ring + stage * CHUNK_BYTES + c.quarter / HALVES * (2 * TILE_RUN));
    const u16* values = keys + TILE_RUN / 2 + column + c.g * Consumer::Tile<SPLIT_DP>::VW;
    u32 mixed = 0;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int b = 0; b < HEAD_DIM / 32; b++) {
        a.k[i][b] = *(const uint4*)(keys + (i * 8 + c.g) * HEAD_DIM + b * 32 + c.q * 8);
        mixed ^= a.k[i][b].x;
      }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 value = *(const uint4*)(values + Consumer::v_row(i, c.q) * HEAD_DIM);
      a.v[i][0] = value.x;
      a.v[i][1] = value.y;
      a.v[i][2] = value.z;
      a.v[i][3] = value.w;
      mixed ^= value.x;
    }
    __syncwarp();
    if (c.lane == 0) barrier_arrive(c.empty + 8 * stage + mixed * c.p.zero);  // see release_chunk
  };
  if (c.group < chunks)
    take(c.group);
  else {
    // Else the registers would hold their values from layer to layer.
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int b = 0; b < HEAD_DIM / 32; b++) a.k[i][b] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 4; i++) a.v[i][0] = a.v[i][1] = a.v[i][2] = a.v[i][3] = 0;
  }
  arrive();
  int start = ((c.warp / HALVES) * SPLITS + split) * POSITIONS;
#pragma unroll 1
  for (int chunk = c.group; chunk < chunks; chunk += 4, start += SPLIT_TILES * SPLITS * POSITIONS) {
    if (start <= position) {
      if (start + POSITIONS > position) {
        // Nothing has been copied behind the context.
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (start + Consumer::v_row(i, c.q) > position) a.v[i][0] = a.v[i][1] = a.v[i][2] = a.v[i][3] = 0;
        c.substitute(a, start, position, column);
      }
      float d[4];
      u32 weights[2];
      c.multiply_qk(a, d);
      c.score(a, d, start, position, weights);
      c.add_values(a, weights);
    }
    if (chunk + 4 < chunks) take(chunk + 4);
  }
  c.put(a);
}
