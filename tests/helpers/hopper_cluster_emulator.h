// What hopper_linear/instructions.cu adds to hopper_emulator.h, which it includes. The blocks of a cluster
// are emulated as one block there, with the threads and the shared memory of all: what a block knows of
// itself has another name there than here.
//
// Stores to shared memory reach the copy engine at the fence. The copy engine reads what it stores at once or
// when it is waited for.

#define thread_index thread_of_cluster
#define block_index cluster_index
#define num_blocks num_clusters
#define shared_base base_of_cluster
#define named_sync sync_in_cluster
#define fence_shared fence_zeros
#include "hopper_emulator.h"
#undef thread_index
#undef block_index
#undef num_blocks
#undef shared_base
#undef named_sync
#undef fence_shared

#define CLUSTER_BLOCKS

namespace emulated {

inline u32 block_bytes;  // of a block's shared memory
inline int block_threads;
struct Piece {
  u32 address;
  u32 words[4];
};
struct Store {
  TensorMap map;
  int x, y;
  u32 source;
};
inline std::map<int, std::vector<Piece>> pieces;               // of a thread, before its fence
inline std::map<int, std::vector<Store>> stores, open_stores;  // of a thread

inline std::map<int, int> cluster_generations;  // of a thread, at its arrival

inline int rank_of(const Thread& thread) { return thread.index / block_threads; }

inline void run_stores() {
  for (const Store& store : stores[self->index]) {
    const u64* words = store.map.words;
    const u64 *sizes = words + 2, *steps = words + 5, *box = words + 8;
    check(store.source % 1024 == 0 && box[0] == 64, "a box begins where the permutation does");
    for (u64 y = 0; y < box[1]; ++y)
      for (u64 x = 0; x < 64; ++x) {
        const u64 row = store.y + y, column = store.x + x;
        if (row < sizes[1] && column < sizes[0])
          memcpy((u8*)words[0] + row * steps[1] + column * 2,
                 at(permuted(store.source + (u32)(y * 128 + x * 2)), 2), 2);
      }
  }
  stores[self->index].clear();
}

// As run_block, for a cluster.
inline void run_cluster(int threads_of_block, u32 shared_bytes) {
  // Boxes begin at multiples of 1024 in every block.
  block_threads = threads_of_block, block_bytes = (shared_bytes + 1023) / 1024 * 1024;
  pieces.clear(), stores.clear(), open_stores.clear();
  run_block(CLUSTER * block_threads, CLUSTER * block_bytes);
  for (const auto& [thread, left] : stores)
    if (failure.empty() && !left.empty()) failure = "a store that nobody has waited for";
}

}  // namespace emulated

inline int cluster_rank() { return emulated::rank_of(*emulated::self); }
inline int thread_index() { return emulated::self->index % emulated::block_threads; }
inline int block_index() { return emulated::block * CLUSTER + cluster_rank(); }
inline int num_blocks() { return emulated::blocks * CLUSTER; }
inline u32 shared_base() { return emulated::BASE + cluster_rank() * emulated::block_bytes; }
inline void named_sync(u32 barrier, u32 count) { sync_in_cluster(barrier * CLUSTER + cluster_rank(), count); }
inline void cluster_sync() { sync_in_cluster(15, CLUSTER * emulated::block_threads); }
inline void arrive_at(u32 barrier, int rank) {
  const auto& first = emulated::threads[rank * emulated::block_threads];
  emulated::check(!first->done, "a block has ended before the last arrival in it");
  arrive(barrier + (rank - cluster_rank()) * emulated::block_bytes);
}
inline void cluster_arrive() {
  const u32 all = CLUSTER * emulated::block_threads;
  emulated::cluster_generations[emulated::self->index] = emulated::named[15].generation;
  named_arrive(15, all);
}
inline void cluster_wait() {
  const int generation = emulated::cluster_generations[emulated::self->index];
  emulated::until([generation] { return emulated::named[15].generation != generation; });
}
inline void copy_box_to_all(u32 target, const TensorMap& map, int x, int y, u32 barrier) {
  for (int rank = 0; rank < CLUSTER; ++rank) {
    const u32 away = (rank - cluster_rank()) * emulated::block_bytes;
    copy_box(target + away, map, x, y, barrier + away);
  }
}
inline void stream_box(u32 target, const TensorMap& map, int x, int y, u32 barrier, u64) {
  copy_box(target, map, x, y, barrier);
}
inline void fence_shared() {
  for (const emulated::Piece& piece : emulated::pieces[emulated::self->index])
    memcpy(emulated::at(piece.address, 16), piece.words, 16);
  emulated::pieces[emulated::self->index].clear();
}
inline void store_box(const TensorMap& map, int x, int y, u32 source) {
  emulated::open_stores[emulated::self->index].push_back({map, x, y, source});
}
inline void stores_commit() {
  auto& open = emulated::open_stores[emulated::self->index];
  auto& stores = emulated::stores[emulated::self->index];
  stores.insert(stores.end(), open.begin(), open.end());
  open.clear();
  if (emulated::dice() % 2) emulated::run_stores();
}
inline void stores_wait() { emulated::run_stores(); }
inline void store_matrices(u32 address, const u32 (&words)[4]) {
  const int lane = emulated::self->index % 32;
  emulated::Piece piece{address, {}};
  for (int matrix = 0; matrix < 4; ++matrix) {
    const u64* all = emulated::meet(words[matrix]);
    if (lane / 8 == matrix)
      for (int c = 0; c < 4; ++c) piece.words[c] = (u32)all[lane % 8 * 4 + c];
  }
  emulated::pieces[emulated::self->index].push_back(piece);
}
inline float max_or_nan(float a, float b) { return a != a ? a : b != b ? b : std::fmax(a, b); }
inline void store_two_floats(float* place, float a, float b) {
  emulated::check((uintptr_t)place % 8 == 0, "an unaligned store");
  place[0] = a, place[1] = b;
}
// Off by as much as on the device, up or down as the number's bits have it.
inline float log2_fast(float x) {
  const double exact = std::log2((double)x), error = std::ldexp(std::fmax(std::fabs(exact), 1.0), -22);
  return (float)(bits_of(x) * 0x9E3779B1u >> 31 ? exact + error : exact - error);
}
