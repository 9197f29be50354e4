// Instructions of compute capability 9.0 that CUDA C++ has no name for, as functions. megakernel.py puts this file before
// megakernel.cu. tests/kernels/emulated_gpu.h has the same functions for a CPU.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

__device__ __forceinline__ u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }

// Two numbers rounded to bfloat16, the first in the lower bits.
__device__ __forceinline__ u32 pack(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
// The sum of two pairs of bfloat16.
__device__ __forceinline__ u32 add_pairs(u32 pair, u32 other) {
    u32 sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(pair), "r"(0x3F803F80u), "r"(other));
    return sum;
}
__device__ __forceinline__ float half_number(unsigned short half) {
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(half));
    return number;
}
__device__ __forceinline__ float exp2_of(float v) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}

// Loads through L2 of what other blocks write, and of weights.
__device__ __forceinline__ uint4 load_shared(const void *at) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
__device__ __forceinline__ uint2 load_shared_2(const void *at) {
    uint2 v;
    asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}
__device__ __forceinline__ u32 load_shared_1(const void *at) {
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}
__device__ __forceinline__ uint4 load_weight(const void *at) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
__device__ __forceinline__ bf16 load_one(const bf16 *at) {
    bf16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(at));
    return v;
}
__device__ __forceinline__ float load_float(const float *at) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(at));
    return v;
}

// Copies 16 bytes from L2 to shared memory in the background.
__device__ __forceinline__ void copy(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Adds the product of a tile of 16 rows (a) with 8 tokens (b), over 16 inputs.
__device__ __forceinline__ void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Transposes a matrix of 8 x 8 numbers of 16 bits, of which each thread of a warp holds two of a row.
__device__ __forceinline__ void transpose(u32 &pair) {
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(pair));
}
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Copies by the copy engine, which report to a barrier in shared memory.
__device__ __forceinline__ void begin_barriers(u64 *barriers, int count) {
    for (int i = 0; i < count; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers + i)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void expect_bytes(u64 *barrier, u32 bytes) {  // by one thread
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_bytes(void *to, const void *from, u32 bytes, u64 *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
// Orders copies after what has been done with the same shared memory before.
__device__ __forceinline__ void order_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }
// Whether the barrier's phase of this parity is complete; waits for a while.
__device__ __forceinline__ bool is_complete(u64 *barrier, u32 parity) {
    u32 done;
    asm volatile("{\n.reg .pred there;\nmbarrier.try_wait.parity.shared::cta.b64 there, [%1], %2;\nselp.u32 %0, 1, 0, there;\n}"
                 : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    return done;
}
// Stores to the shared memory of the cluster's first block and reports to its barrier; addresses as in this block.
__device__ __forceinline__ void store_in_first_block(float4 *to, float4 value, u64 *barrier) {
    u32 there, at;
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(shared_address(to)));
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(at) : "r"(shared_address(barrier)));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(there),
                 "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(at) : "memory");
}

// Counters that blocks share.
__device__ __forceinline__ u64 arrive(u64 *counter) {
    u64 before;
    asm volatile("atom.add.release.gpu.global.u64 %0, [%1], 1;" : "=l"(before) : "l"(counter) : "memory");
    return before;
}
__device__ __forceinline__ u64 arrived_at(const u64 *counter) {
    u64 now;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(counter) : "memory");
    return now;
}
__device__ __forceinline__ u32 count_up(int *counter) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}
__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Fetches into L2: bytes, a multiple of 16; and a line.
__device__ __forceinline__ void prefetch_bytes(const void *from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void prefetch_line(const void *from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
