// What `hopper.cuh` and CUDA C++ have, for a CPU: megakernel.cu compiled behind this file runs without a GPU.
//
// A block of the grid is a thread of the operating system, so `__shared__` variables are thread-local; its threads are
// coroutines that run in turn until they wait for each other. Instructions of a warp exchange their operands through
// memory. Asynchronous copies are done as late as the kernel's waits allow, or with EAGER at once, and shared memory
// starts with numbers that are not finite: a wait that is missing changes results.

#include <atomic>
#include <chrono>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <ucontext.h>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__ thread_local
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(threads, blocks)
#define __cluster_dims__(x, y, z)

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __uint_as_float(u32 bits) { float v; memcpy(&v, &bits, 4); return v; }
inline u32 __float_as_uint(float v) { u32 bits; memcpy(&bits, &v, 4); return bits; }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline long long clock64() { return 0; }
inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
    const u64 bytes = (u64)high << 32 | low;
    u32 made = 0;
    for (int i = 0; i < 4; i++) made |= (u32)(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return made;
}

namespace emulated {
constexpr int COUNT = WARPS * 32, STACK = 256 << 10;
constexpr double LIMIT = 120.0;  // seconds

struct Index { int x; };
struct Copy { void *to; const void *from; u32 bytes; u64 *barrier; };
struct Thread {
    Index index;
    jmp_buf at;
    ucontext_t begin;
    std::unique_ptr<char[]> stack;
    std::vector<Copy> copies;
    bool is_done, has_begun;
};
struct Warp {
    u32 operands[2][32][8];
    int arrived;
    u64 turn;
};
// Of a cluster: the barrier of its blocks, and where the first block has its shared memory.
struct Cluster {
    std::atomic<u64> arrived{0};
    char *room;
    u64 *barriers;
};
struct Block {
    Index index;
    Thread *threads;
    int current, at_barrier;
    u64 turn;
    Warp warps[WARPS];
    std::vector<Copy> bulk;
    Cluster *cluster;
    jmp_buf scheduler;
    std::chrono::steady_clock::time_point begun;
};
thread_local Block *block;
std::mutex barriers;  // of all blocks

inline Thread &now() { return block->threads[block->current]; }

// Lets the block's next thread run.
inline void yield() {
    if (!_setjmp(now().at)) _longjmp(block->scheduler, 1);
}
// As `yield`, where another block has to run first.
inline void wait_for_another() {
    yield();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
}
inline Warp &warp() { return block->warps[block->current / 32]; }

// All threads of a warp give operands; afterwards each may read those of all.
inline u32 (*exchange(std::initializer_list<u32> own))[8] {
    Warp &mine = warp();
    const u64 turn = mine.turn;
    u32(*operands)[8] = mine.operands[turn % 2];
    int i = 0;
    for (u32 value : own) operands[block->current % 32][i++] = value;
    if (++mine.arrived == 32)
        mine.arrived = 0, mine.turn++;
    else
        while (mine.turn == turn) yield();
    return operands;
}

// A barrier of the copy engine: the bytes that are missing, whether `expect_bytes` is, and its phase.
struct Barrier {
    int32_t bytes;
    uint16_t missing, phase;
    void advance() {
        if (!missing && !bytes) missing = 1, phase ^= 1;
    }
};
static_assert(sizeof(Barrier) == sizeof(u64), "a barrier is 8 bytes");
inline Barrier *barrier_at(u64 *barrier) { return (Barrier *)barrier; }
inline void aligned(const void *at, u32 bytes) {
    if ((uintptr_t)at % bytes) abort();
}
inline void do_copy(const Copy &one) {
    memcpy(one.to, one.from, one.bytes);
    if (!one.barrier) return;
    std::lock_guard<std::mutex> lock(barriers);
    barrier_at(one.barrier)->bytes -= one.bytes, barrier_at(one.barrier)->advance();
}
template <class T>
inline T load(const void *at) {
    aligned(at, sizeof(T));
    T v;
    memcpy(&v, at, sizeof(T));
    return v;
}
inline float widened(u32 pair, int half) { return __uint_as_float(half ? pair & 0xffff0000u : pair << 16); }
}  // namespace emulated

#define threadIdx (emulated::now().index)
#define blockIdx (emulated::block->index)

inline void __syncthreads() {
    emulated::Block &block = *emulated::block;
    const u64 turn = block.turn;
    if (++block.at_barrier == emulated::COUNT)
        block.at_barrier = 0, block.turn++;
    else
        while (block.turn == turn) emulated::yield();
}
template <class T>
inline T __shfl_sync(u32, T value, int lane) {
    u32 bits;
    memcpy(&bits, &value, 4);
    bits = emulated::exchange({bits})[lane & 31][0];
    memcpy(&value, &bits, 4);
    return value;
}
template <class T>
inline T __shfl_xor_sync(u32 mask, T value, int other) { return __shfl_sync(mask, value, emulated::block->current % 32 ^ other); }

inline u32 pack(float first, float second) {
    const float values[2] = {first, second};
    u32 pair = 0;
    for (int i = 0; i < 2; i++) {
        u32 bits = __float_as_uint(values[i]);
        bits = std::isnan(values[i]) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        pair |= bits << 16 * i;
    }
    return pair;
}
inline u32 add_pairs(u32 pair, u32 other) {
    using emulated::widened;
    return pack(widened(pair, 0) + widened(other, 0), widened(pair, 1) + widened(other, 1));
}
inline float half_number(unsigned short half) {
    const int exponent = half >> 10 & 31, mantissa = half & 1023;
    const float size = exponent ? std::ldexp(1024.0f + mantissa, exponent - 25) : std::ldexp((float)mantissa, -24);
    return exponent == 31 ? NAN : half >> 15 ? -size : size;
}
inline float exp2_of(float v) { return std::exp2(v); }
inline uint4 load_shared(const void *at) { return emulated::load<uint4>(at); }
inline uint2 load_shared_2(const void *at) { return emulated::load<uint2>(at); }
inline u32 load_shared_1(const void *at) { return emulated::load<u32>(at); }
inline uint4 load_weight(const void *at) { return emulated::load<uint4>(at); }
inline bf16 load_one(const bf16 *at) { return *at; }
inline float load_float(const float *at) { return *at; }

inline void copy(void *to, const void *from) {
    emulated::aligned(to, 16), emulated::aligned(from, 16);
    const emulated::Copy one{to, from, 16, nullptr};
    if (EAGER) emulated::do_copy(one);
    else emulated::now().copies.push_back(one);
}
inline void close_group() {}
inline void wait_for_copies() {
    for (const emulated::Copy &one : emulated::now().copies) emulated::do_copy(one);
    emulated::now().copies.clear();
}
inline void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const u32(*all)[8] = emulated::exchange({a0, a1, a2, a3, b0, b1});
    const int lane = emulated::block->current % 32, g = lane / 4, t = lane % 4;
    for (int k = 0; k < 4; k++) {
        const int row = k / 2, column = 2 * t + k % 2;
        float total = 0.0f;
        for (int quad = 0; quad < 4; quad++)
            for (int half = 0; half < 2; half++) {
                const u32 *a = all[g * 4 + quad], *b = all[column * 4 + quad];
                total += emulated::widened(a[row], half) * emulated::widened(b[4], half);
                total += emulated::widened(a[row + 2], half) * emulated::widened(b[5], half);
            }
        sum[k] += total;
    }
}
inline void transpose(u32 &pair) {
    const u32(*all)[8] = emulated::exchange({pair});
    const int lane = emulated::block->current % 32, g = lane / 4, t = lane % 4;
    u32 made = 0;
    for (int i = 0; i < 2; i++) made |= (all[(2 * t + i) * 4 + g / 2][0] >> 16 * (g % 2) & 0xffff) << 16 * i;
    pair = made;
}
inline void begin_barriers(u64 *barriers, int count) {
    for (int i = 0; i < count; i++) *emulated::barrier_at(barriers + i) = {0, 1, 0};
}
inline void expect_bytes(u64 *barrier, u32 bytes) {
    std::lock_guard<std::mutex> lock(emulated::barriers);
    emulated::Barrier *at = emulated::barrier_at(barrier);
    at->bytes += bytes, at->missing = 0, at->advance();
}
inline void copy_bytes(void *to, const void *from, u32 bytes, u64 *barrier) {
    emulated::aligned(to, 16), emulated::aligned(from, 16), emulated::aligned((void *)(uintptr_t)bytes, 16);
    const emulated::Copy one{to, from, bytes, barrier};
    if (EAGER) emulated::do_copy(one);
    else emulated::block->bulk.push_back(one);
}
inline void order_copies() {}
inline bool is_complete(u64 *barrier, u32 parity) {
    if (!emulated::block->bulk.empty()) {
        std::vector<emulated::Copy> others;
        for (const emulated::Copy &one : emulated::block->bulk)
        if (one.barrier == barrier) emulated::do_copy(one);
            else others.push_back(one);
        emulated::block->bulk = others;
    }
    {
        std::lock_guard<std::mutex> lock(emulated::barriers);
        if (emulated::barrier_at(barrier)->phase != parity) return true;
    }
    emulated::yield();
    return false;
}
inline u64 arrive(u64 *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_SEQ_CST); }
inline u64 arrived_at(const u64 *counter) {
    const u64 seen = __atomic_load_n(counter, __ATOMIC_SEQ_CST);
    if (seen % GRID) emulated::wait_for_another();
    return __atomic_load_n(counter, __ATOMIC_SEQ_CST);
}
inline u32 count_up(int *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_SEQ_CST); }
inline u64 nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
inline void prefetch_bytes(const void *, u32 bytes) { emulated::aligned((void *)(uintptr_t)bytes, 16); }
inline void prefetch_line(const void *) {}

void cluster_barrier();
void store_in_first_block(float4 *to, float4 value, u64 *barrier);
