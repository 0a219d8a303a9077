// More instructions of Hopper, behind those of hopper_prefill: clusters of blocks, copies from shared memory.

#define CLUSTER_BLOCKS __cluster_dims__(CLUSTER, 1, 1)

// The block's number within its cluster, whose blocks have consecutive numbers.
DEV int cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return (int)rank;
}
// All threads of all blocks of the cluster meet; what they did to their barriers is seen by all.
DEV void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}
// Arrive at the barrier that lies at this address in the shared memory of a block of the cluster.
DEV void arrive_at(u32 barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// A box that nobody reads again.
DEV void stream_box(u32 target, const TensorMap& map, int x, int y, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(&map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
      : "memory");
}
// A box into the shared memory of all blocks of a cluster, at the same address; the barrier there counts it.
DEV void copy_box_to_all(u32 target, const TensorMap& map, int x, int y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"((u16)((1 << CLUSTER) - 1))
      : "memory");
}
// All of a thread's arrivals before the one are seen behind the other, by all blocks of the cluster.
DEV void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
DEV void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// A box from shared memory into a tensor; what lies beyond the tensor's end is left out.
DEV void store_box(const TensorMap& map, int x, int y, u32 source) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
               "r"(x), "r"(y), "r"(source)
               : "memory");
}
DEV void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until this thread's stores have read their sources.
DEV void stores_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Four matrices of 8 rows of 16 bytes: word m of lane 4 r + c is piece c of row r of matrix m. address: of
// row lane % 8 of matrix lane / 8.
DEV void store_matrices(u32 address, const u32 (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// NaN if one of them is.
DEV float max_or_nan(float a, float b) {
  float highest;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(highest) : "f"(a), "f"(b));
  return highest;
}

template <>
DEV void multiply_shared<256>(float (&d)[128], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE
      " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
      "%59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "
      "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, "
      "%97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, "
      "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, p, 1, 1, 0, 0;\n}"
      : REGISTERS_8(d, 0), REGISTERS_8(d, 8), REGISTERS_8(d, 16), REGISTERS_8(d, 24), REGISTERS_8(d, 32),
        REGISTERS_8(d, 40), REGISTERS_8(d, 48), REGISTERS_8(d, 56), REGISTERS_8(d, 64), REGISTERS_8(d, 72),
        REGISTERS_8(d, 80), REGISTERS_8(d, 88), REGISTERS_8(d, 96), REGISTERS_8(d, 104), REGISTERS_8(d, 112),
        REGISTERS_8(d, 120)
      : "l"(a), "l"(b), "r"(accumulate));
}
DEV void store_two_floats(float* place, float a, float b) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(place), "f"(a), "f"(b) : "memory");
}
// Off by at most 2^-22, or 2^-22 of the result where x is not within (1/2, 2).
DEV float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
