// A decoder's forward pass over few tokens in one launch; the host's side is megakernel.py.
//
// One block runs on every multiprocessor. All blocks go through the same phases, with a barrier over the grid after
// each:
//   embed    the tokens' embeddings become the residual stream x
//   qkv      norm of x, product with the query/key/value weights; without head norms also rotation, and keys and values to
//            their pages
//   heads    (HEAD_NORM) head norms, rotation, keys and values to their pages
//   attend   attention of every token to the positions of its row, in chunks at fixed positions
//   output   product with the output weights, added to x
//   gated    norm of x, products with gate and up, activation
//   down     product with the down weights, added to x
// The phases after the first repeat for every layer; a final phase writes the norm of x. What a phase reads that no other block
// writes (weights, keys and values of earlier passes) is copied to shared memory while the block waits at the barrier
// before it; weights of later phases are fetched into L2.
//
// Products. A tile is 16 rows of a weight matrix. The warps of a block divide the inputs of its tiles among them, 64 at
// a time, and their sums are added in the order of the warps. The order of every sum depends on the model's shape alone,
// so a token's result does not depend on the other tokens. The tensor cores' order of inputs is permuted, in weights and
// activations alike: of each block of 64 inputs, thread t of a quad holds inputs 8 t to 8 t + 7 and 32 + 8 t to 32 + 8 t +
// 7, and multiply j takes four of them. A tile of the query/key/value matrix holds eight features and their partners in
// rotation; a tile of gate and up eight rows of each.
//
// FP8 weights are widened to bfloat16 by moving bits: the result is the weight times 2^-120. Activations are multiplied
// by 2^60 so that products stay far from the smallest numbers; the sums are multiplied by 2^60. Activations are not
// rounded to FP8.
//
// int4 weights are widened to the codes less their zero points, which bfloat16 holds exactly. The sums of a group of
// inputs are multiplied by the group's scale. Which inputs a thread holds follows from the order of codes in a word
// (smc.model.linear).
//
// Norms of outputs (POST_NORM). `output` and `down` store their product, the branch. The phase after them adds its norm to
// x: every block does so for all tokens, in the warps that hold the inputs, and one of them stores the new x in the other
// of two buffers, because blocks may still read the old one.
//
// What one block writes and another reads goes through L2 (ld.global.cg, asynchronous copies), because L1 caches are not
// coherent. The copy engine moves rows of weights and activations to shared memory (cp.async.bulk).
//
// Constants from the host: GRID: number of blocks; HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, WINDOW (0: none);
// FP8, BIAS, HEAD_NORM, WHOLE_NORM (of all heads as one row), PRE_NORM and POST_NORM (of the inputs and of the outputs of
// attention and MLP), GELU, ZEROS (int4 groups have zero points), PROFILE (0 or 1); GROUP: inputs of an int4 group (0: not
// int4); SCALE: type of its scales (SCALE_FLOAT, SCALE_BF16 or SCALE_HALF); TILES: tiles of 8 tokens; WARPS of a block;
// ROOM: bytes of its shared memory; SPLIT: blocks of a cluster that divide the inputs of `down`; QKV_TILES, GATED_TILES: tiles
// that a block takes at a time; ATTEND_WARPS: warps that divide a chunk of positions; STEPS: groups of 16 positions that a
// warp takes of it; KEPT: units of attention whose pages a block keeps; CLOCKS: of a layer in a profile; ROOT_DIM: square
// root of HEAD_DIM; EPS, NORM_OFFSET (added to the weights of norms), RESIDUAL, EMBED_FACTOR.

#if PROFILE
#define CLOCK(i) if (threadIdx.x == 0) p.times[((u64)blockIdx.x * LAYERS + index) * CLOCKS + i] = clock64()
#else
#define CLOCK(i)
#endif

#define SCALE_FLOAT 0
#define SCALE_BF16 1
#define SCALE_HALF 2

struct Matrix {
    const char *weights;
    const char *scales;  // FP8: float [outputs]; int4: [groups][outputs]
#if ZEROS
    const int *zeros;  // [groups][outputs]
#endif
};

struct Layer {
    Matrix qkv, output, gate_up, down;
    const bf16 *qkv_bias, *attn_norm, *mlp_norm, *q_norm, *k_norm;
#if POST_NORM
    const bf16 *attn_out_norm, *mlp_out_norm;
#endif
    bf16 *keys, *values;
    const float *rope;
    u64 window;  // positions that a token sees, itself included; 0: all
};

struct Params {
    const Layer *layers;
    const long long *tokens;
    const bf16 *embed, *norm;
    bf16 *hidden;
    const int *table, *slot, *tail, *tail_start, *start, *count;
    u64 table_stride, tail_stride;
    int table_width, tail_width, rows, queries;
    bf16 *stream, *branch, *raw, *q, *attended, *inner;
    float *partial;
    int *merged;
    u64 *arrivals;
    int *failure;
    u64 limit_ns;
    long long *times;  // with PROFILE: [blocks][LAYERS][CLOCKS] clocks
};

constexpr int THREADS = WARPS * 32, TOKENS = TILES * 8, MOST_TOKENS = 64;
constexpr int QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM, HALF = HEAD_DIM / 2, EACH = HEADS / KV_HEADS;
constexpr int HEAD_TILES = HEAD_DIM / 16, QUERY_TILES = (EACH + 7) / 8, QUERIES = QUERY_TILES * 8, DIM_BLOCKS = HEAD_DIM / 64;
constexpr int BLOCKS = HIDDEN / 64, OWN = (BLOCKS + WARPS - 1) / WARPS;  // blocks of 64 inputs; those of a warp
constexpr int CHUNK = 16 * ATTEND_WARPS * STEPS;                         // positions of a chunk
constexpr int BYTES = FP8 ? 1 : 2;                                       // of a weight that is not int4
constexpr float UP = FP8 ? 1152921504606846976.0f : 1.0f;                // 2^60
constexpr float LOG2_E = 1.4426950408889634f, LOWEST = -1e30f;

__host__ __device__ constexpr int least(int a, int b) { return a < b ? a : b; }
// Distances between rows in shared memory, such that the threads of a warp read different banks.
__host__ __device__ constexpr int padded(int bytes, int more) { return bytes + (more + 128 - bytes % 128) % 128; }
__host__ __device__ constexpr int weight_row(int inputs) { return padded(inputs * BYTES, FP8 ? 32 : 64); }
__host__ __device__ constexpr int activation_row(int inputs) { return padded(inputs * 2, GROUP == 0 ? 64 : GROUP == 128 ? 32 : 16); }
// Bytes of a matrix of `rows` outputs, and of a tile in shared memory. A tile of int4 holds [groups][16 rows] words, scales
// and zero points, one after another.
constexpr int SCALE_BYTES = SCALE == SCALE_FLOAT ? 4 : 2, WORD_ROW = GROUP / 2;  // bytes; those of a row's words of a group
constexpr int GROUP_BLOCKS = GROUP > 64 ? GROUP / 64 : 1;
__host__ __device__ constexpr int groups_of(int inputs) { return inputs / (GROUP ? GROUP : 1); }
__host__ __device__ constexpr u64 matrix_bytes(u64 rows, int inputs) { return GROUP ? rows * inputs / 2 : rows * inputs * BYTES; }
__host__ __device__ constexpr u32 scale_bytes(int rows, int inputs) { return GROUP ? groups_of(inputs) * rows * SCALE_BYTES : FP8 ? rows * 4 : 0; }
__host__ __device__ constexpr int tile_bytes(int inputs) {
    return GROUP ? groups_of(inputs) * 16 * (WORD_ROW + SCALE_BYTES + 4 * ZEROS) : 16 * weight_row(inputs);
}

// Tiles of 8 tokens whose activations a warp holds at once, a power of two: as registers and the room for sums allow.
constexpr int held_tiles(int kept) {
    int held = 1;
    while (2 * held <= TILES && 2 * held * OWN <= 4 && kept * (tile_bytes(HIDDEN) + WARPS * 2 * held * 512) <= ROOM) held *= 2;
    return held;
}
constexpr int QKV_HELD = held_tiles(QKV_TILES), GATED_HELD = held_tiles(GATED_TILES);

extern __shared__ __align__(128) char room[];
__shared__ Layer layers[LAYERS];
__shared__ __align__(8) float squares[WARPS][TOKENS];
#if POST_NORM && PRE_NORM
__shared__ __align__(8) float branch_squares[WARPS][TOKENS];
#else
#define branch_squares squares  // those of x are not needed
#endif
__shared__ int position_of[TOKENS];           // -1: no token
__shared__ int row_of[TOKENS];
__shared__ int page_of[TOKENS];               // of a token's own position; 0: none
__shared__ int chunks_before[2][TOKENS + 1];  // [with the window][token]
__shared__ int pages[KEPT][CHUNK];            // of the positions of this block's first units of attention
__shared__ int flag;
__shared__ __align__(8) u64 arrived[2];       // barriers of copies: weights, and the other block's part of `down`
constexpr int WEIGHTS = 0, OTHER_PART = 1;
constexpr int FIRST_COPIER = 2, COPIERS = 4;  // warps that start copies of weights, which takes a thread after the other

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float number(bf16 value) { return __uint_as_float((u32)value << 16); }
__device__ __forceinline__ bf16 rounded(float value) { return (bf16)pack(value, 0.0f); }
__device__ __forceinline__ float round_to(float value) { return number(rounded(value)); }
__device__ __forceinline__ u32 word(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ float sum_of_rows(float v) {  // over the eight rows g of a tile
    v += __shfl_xor_sync(~0u, v, 4);
    v += __shfl_xor_sync(~0u, v, 8);
    return v + __shfl_xor_sync(~0u, v, 16);
}
__device__ __forceinline__ float max_of_rows(float v) {
    v = fmaxf(v, __shfl_xor_sync(~0u, v, 4));
    v = fmaxf(v, __shfl_xor_sync(~0u, v, 8));
    return fmaxf(v, __shfl_xor_sync(~0u, v, 16));
}
__device__ __forceinline__ float sum_of_quad(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}
// Copies by the copy engine, which reports to a barrier of this block. Every barrier is used by one set of copies after
// the other; `Uses` counts them.
struct Uses { u32 of[2]; };

__device__ __forceinline__ void expect(int barrier, u32 bytes) { expect_bytes(&arrived[barrier], bytes); }  // by one thread
__device__ __forceinline__ void copy_row(void *to, const void *from, u32 bytes) { copy_bytes(to, from, bytes, &arrived[WEIGHTS]); }
// Whether this warp starts copies; orders them after what has been done with the same shared memory before.
__device__ __forceinline__ bool is_copier() {
    if (threadIdx.x / 32 < FIRST_COPIER || threadIdx.x / 32 >= FIRST_COPIER + COPIERS) return false;
    order_copies();
    return true;
}
__device__ __forceinline__ void wait_for(const Params &p, int barrier, Uses &uses) {
    for (u32 tries = 0; !is_complete(&arrived[barrier], uses.of[barrier] & 1); tries++)
        if (tries % 1024 == 1023 && *(volatile int *)p.failure) break;
    uses.of[barrier]++;
}

// Numbers of a block of 64 inputs that this thread of a quad holds: eight pairs of neighbours. Multiply j takes pairs 2 j
// and 2 j + 1. `pair_input` is the first input of a pair.
__device__ __forceinline__ int pair_input(int pair) {
    const int t = threadIdx.x % 4, j = pair / 2, second = pair % 2;
    if (GROUP == 0) return pair / 4 * 32 + t * 8 + pair % 4 * 2;
    if (GROUP == 128) return j * 16 + t * 4 + second * 2;
    if (GROUP == 64) return second * 32 + j * 8 + t * 2;
    return j / 2 * 32 + t % 2 * 16 + j % 2 * 8 + second * 4 + t / 2 * 2;
}

struct FromL2 {
    static __device__ __forceinline__ uint4 four(const bf16 *at) { return load_shared(at); }
    static __device__ __forceinline__ uint2 two(const bf16 *at) { return load_shared_2(at); }
    static __device__ __forceinline__ u32 one(const bf16 *at) { return load_shared_1(at); }
};
struct FromWeights : FromL2 {
    static __device__ __forceinline__ uint4 four(const bf16 *at) { return load_weight(at); }
};
struct FromRoom {
    static __device__ __forceinline__ uint4 four(const bf16 *at) { return *(const uint4 *)at; }
    static __device__ __forceinline__ uint2 two(const bf16 *at) { return *(const uint2 *)at; }
    static __device__ __forceinline__ u32 one(const bf16 *at) { return *(const u32 *)at; }
};
// Reads the pairs of a block that begins at `block`.
template <class From>
__device__ __forceinline__ void read_pairs(const bf16 *block, u32 (&pairs)[8]) {
#if GROUP == 0
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint4 v = From::four(block + pair_input(4 * half));
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[4 * half + i] = word(v, i);
    }
#elif GROUP == 128
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint2 v = From::two(block + pair_input(2 * j));
        pairs[2 * j] = v.x, pairs[2 * j + 1] = v.y;
    }
#else
#pragma unroll
    for (int pair = 0; pair < 8; pair++) pairs[pair] = From::one(block + pair_input(pair));
#endif
}

// The weights of 16 inputs of a tile's two rows, which lie eight rows apart.
struct Piece {
#if GROUP
    static constexpr int SCALES = GROUP == 32 ? 2 : 1;  // groups of a block
    u32 row[2][2], zero[2][SCALES];                     // words; -(128 + zero point), twice
    float scale[2][SCALES];
#else
    u32 row[2][4 * BYTES];
#endif
};

#if GROUP
__device__ __forceinline__ float scale_at(const char *scales, int index) {
    if (SCALE == SCALE_FLOAT) return ((const float *)scales)[index];
    const bf16 bits = ((const bf16 *)scales)[index];
    return SCALE == SCALE_BF16 ? number(bits) : half_number(bits);
}
#endif

// Reads what is needed of a tile of INPUTS inputs in shared memory for a block of them.
template <int INPUTS>
__device__ __forceinline__ Piece read_piece(const char *tile, int block) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Piece piece;
#if GROUP
    constexpr int ROWS = groups_of(INPUTS) * 16;
    const char *scales = tile + ROWS * WORD_ROW;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const int index = block * 64 / GROUP * 16 + row * 8 + g;
        const char *at = tile + index * WORD_ROW;
#if GROUP == 128
        const uint4 v = *(const uint4 *)(at + t * 16);  // two words of each half of the group
        piece.row[row][0] = block % 2 ? v.y : v.x, piece.row[row][1] = block % 2 ? v.w : v.z;
#elif GROUP == 64
        const uint2 v = *(const uint2 *)(at + t * 8);
        piece.row[row][0] = v.x, piece.row[row][1] = v.y;
#else
        piece.row[row][0] = *(const u32 *)(at + t * 4), piece.row[row][1] = *(const u32 *)(at + 16 * WORD_ROW + t * 4);
#endif
#pragma unroll
        for (int i = 0; i < Piece::SCALES; i++) {
            piece.scale[row][i] = scale_at(scales, index + 16 * i);
#if ZEROS
            piece.zero[row][i] = (0xC300u | ((const u32 *)(scales + ROWS * SCALE_BYTES))[index + 16 * i]) * 0x10001u;
#else
            piece.zero[row][i] = 0xC308C308u;
#endif
        }
    }
#else
    const char *at = tile + g * weight_row(INPUTS) + (block * 64 + t * 8) * BYTES;
#pragma unroll
    for (int row = 0; row < 2; row++, at += 8 * weight_row(INPUTS))
#pragma unroll
        for (int half = 0; half < 2; half++) {
#if FP8
            const uint2 v = *(const uint2 *)(at + 32 * half);
            piece.row[row][2 * half] = v.x, piece.row[row][2 * half + 1] = v.y;
#else
            const uint4 v = *(const uint4 *)(at + 64 * half);
#pragma unroll
            for (int i = 0; i < 4; i++) piece.row[row][4 * half + i] = word(v, i);
#endif
        }
#endif
    return piece;
}

__device__ __forceinline__ u32 odd_bytes(u32 v) { return (v & 0x80008000u) | ((v >> 4) & 0x07f007f0u); }

// The two registers of a row (0 or 1) for multiply j.
__device__ __forceinline__ void unpack(const Piece &piece, int row, int j, u32 &first, u32 &second) {
#if GROUP
    // The bits of a code become the last bits of the mantissa of 128.
    constexpr bool SMALL = GROUP == 32;  // both pairs are of one word
    const int group = SMALL ? j / 2 : 0, run = SMALL ? j % 2 * 2 : j;
    const u32 lower = piece.row[row][group] >> 4 * run, zero = piece.zero[row][group];
    const u32 upper = piece.row[row][SMALL ? group : 1] >> 4 * (SMALL ? run + 1 : run);
    first = add_pairs((lower & 0x000F000Fu) | 0x43004300u, zero), second = add_pairs((upper & 0x000F000Fu) | 0x43004300u, zero);
#elif FP8
    first = odd_bytes(piece.row[row][j] << 8), second = odd_bytes(piece.row[row][j]);
#else
    first = piece.row[row][2 * j], second = piece.row[row][2 * j + 1];
#endif
}
// Four activations of a token as two registers, in the order of `unpack`.
__device__ __forceinline__ void pair_up(u32 lower, u32 upper, u32 &first, u32 &second) {
#if FP8
    first = __byte_perm(lower, upper, 0x5410), second = __byte_perm(lower, upper, 0x7632);
#else
    first = lower, second = upper;
#endif
}

template <int HELD>
__device__ __forceinline__ void multiply_block(float (&sum)[HELD][4], const Piece &piece, const u32 (&held)[HELD][8]) {
#if GROUP
    constexpr int EACH_GROUP = 4 / Piece::SCALES;  // multiplies of a group
#pragma unroll
    for (int group = 0; group < Piece::SCALES; group++) {
        float part[HELD][4] = {};
#pragma unroll
        for (int j = group * EACH_GROUP; j < (group + 1) * EACH_GROUP; j++) {
            u32 a0, a1, a2, a3;
            unpack(piece, 0, j, a0, a2);
            unpack(piece, 1, j, a1, a3);
#pragma unroll
            for (int n = 0; n < HELD; n++) multiply(part[n], a0, a1, a2, a3, held[n][2 * j], held[n][2 * j + 1]);
        }
#pragma unroll
        for (int n = 0; n < HELD; n++)
#pragma unroll
            for (int k = 0; k < 4; k++) sum[n][k] = fmaf(part[n][k], piece.scale[k / 2][group], sum[n][k]);
    }
#else
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 a0, a1, a2, a3;
        unpack(piece, 0, j, a0, a2);
        unpack(piece, 1, j, a1, a3);
#pragma unroll
        for (int n = 0; n < HELD; n++) multiply(sum[n], a0, a1, a2, a3, held[n][2 * j], held[n][2 * j + 1]);
    }
#endif
}

// Starts copies of a row or, in int4, of 8 rows of a group and their scales and zero points: part `part` of a tile of INPUTS
// inputs whose halves of 8 rows begin at `upper` and `lower`. `begin`: first of these inputs in the matrix, which has
// `outputs` rows of `all` inputs; `inputs`: how many are copied.
template <int INPUTS>
__device__ __forceinline__ void copy_part(char *tile, const Matrix &matrix, int part, int upper, int lower, int begin, int inputs,
                                          int outputs, int all) {
#if GROUP
    constexpr int ROWS = groups_of(INPUTS) * 16;
    const int to = part * 8;  // row of the tile, groups one after another
    const u64 from = (u64)(begin / GROUP + part / 2) * outputs + (part % 2 ? lower : upper);
    copy_row(tile + to * WORD_ROW, matrix.weights + from * WORD_ROW, 8 * WORD_ROW);
    copy_row(tile + ROWS * WORD_ROW + to * SCALE_BYTES, matrix.scales + from * SCALE_BYTES, 8 * SCALE_BYTES);
#if ZEROS
    copy_row(tile + ROWS * (WORD_ROW + SCALE_BYTES) + to * 4, matrix.zeros + from, 32);
#endif
#else
    const int row = part % 16 < 8 ? upper + part % 8 : lower + part % 8;
    copy_row(tile + part * weight_row(INPUTS), matrix.weights + ((u64)row * all + begin) * BYTES, inputs * BYTES);
#endif
}
__device__ __forceinline__ int copied_parts(int inputs) { return GROUP ? groups_of(inputs) * 2 : 16; }
__device__ __forceinline__ u32 copied_bytes(int inputs) { return GROUP ? tile_bytes(inputs) : 16 * inputs * BYTES; }

struct Grid {
    const Params &p;
    u64 goal;

    // A barrier over all blocks; between arriving and waiting, a block does `meanwhile`. Returns false if another block
    // did not arrive in time.
    template <class Meanwhile>
    __device__ __forceinline__ bool sync(Meanwhile meanwhile) {
        __syncthreads();
        u64 seen = 0;
        if (threadIdx.x == 0) seen = arrive(p.arrivals);
        meanwhile();
        return wait(seen);
    }

    __device__ __forceinline__ bool wait(u64 seen) {
        if (threadIdx.x == 0) {
            goal = goal ? goal + GRID : (seen / GRID + 1) * GRID;
            u64 begun = 0, now;
            int ok = 1;
            for (u32 spins = 0;; spins++) {
                seen = arrived_at(p.arrivals);
                if (seen >= goal) break;
                if (spins % 1024 != 1023) continue;
                now = nanoseconds();
                if (!begun) begun = now;
                if (now - begun > p.limit_ns || *(volatile int *)p.failure) {
                    *(volatile int *)p.failure = 1;
                    ok = 0;
                    break;
                }
            }
            flag = ok;
        }
        __syncthreads();
        return flag;
    }
};

// Every block fetches its share of a matrix of SIZE bytes into L2.
template <u64 SIZE>
__device__ __forceinline__ void prefetch(const char *matrix) {
    constexpr u32 SHARE = (u32)((SIZE / GRID / WARPS + 127) / 128 * 128);
    const u64 at = (u64)(blockIdx.x * WARPS + threadIdx.x / 32) * SHARE;
    if (threadIdx.x % 32 || at >= SIZE) return;
    const u32 size = SIZE - at < SHARE ? (u32)(SIZE - at) & ~15u : SHARE;
    if (size) prefetch_bytes(matrix + at, size);
}
constexpr u64 QKV_BYTES = matrix_bytes(QKV, HIDDEN), OUTPUT_BYTES = matrix_bytes(HIDDEN, HEADS * HEAD_DIM);
constexpr u64 DOWN_BYTES = matrix_bytes(HIDDEN, INNER), GATE_UP_BYTES = 2 * DOWN_BYTES;

// One block fetches a layer's scales, bias and norms.
__device__ __forceinline__ void prefetch_vectors(const Layer &layer) {
    if (blockIdx.x != GRID - 1 || threadIdx.x != 32) return;
    const void *vectors[] = {layer.qkv.scales, layer.output.scales, layer.gate_up.scales, layer.down.scales, layer.qkv_bias,
                             layer.attn_norm, layer.mlp_norm,
#if POST_NORM
                             layer.attn_out_norm, layer.mlp_out_norm,
#endif
#if ZEROS
                             layer.qkv.zeros, layer.output.zeros, layer.gate_up.zeros, layer.down.zeros,
#endif
    };
    const u32 bytes[] = {scale_bytes(QKV, HIDDEN), scale_bytes(HIDDEN, HEADS * HEAD_DIM), scale_bytes(2 * INNER, HIDDEN),
                         scale_bytes(HIDDEN, INNER), QKV * 2, HIDDEN * 2, HIDDEN * 2,
#if POST_NORM
                         HIDDEN * 2, HIDDEN * 2,
#endif
#if ZEROS
                         QKV * groups_of(HIDDEN) * 4u, HIDDEN * groups_of(HEADS * HEAD_DIM) * 4u, 2 * INNER * groups_of(HIDDEN) * 4u,
                         HIDDEN * groups_of(INNER) * 4u,
#endif
    };
#pragma unroll
    for (int i = 0; i < (int)(sizeof(bytes) / sizeof(u32)); i++)
        if (vectors[i]) prefetch_bytes(vectors[i], bytes[i]);
}

// The residual stream as a phase reads it: x and, with POST_NORM, the weights of the norm of the branch that is added to it
// (null: none) and where the sum is stored.
struct Stream {
    const bf16 *x, *branch_norm;
    bf16 *joined;
};

__device__ __forceinline__ float norm_weight(float weight) { return weight + NORM_OFFSET; }

#if POST_NORM
// Adds the norm of the branch to this warp's inputs of HELD tiles of tokens; one block stores the sums.
template <int HELD>
__device__ __forceinline__ void join_branch(const Params &p, const Stream &stream, int first, u32 (&x)[OWN][HELD][8]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 added[OWN][HELD][8];
#pragma unroll
    for (int i = 0; i < OWN; i++)
#pragma unroll
        for (int n = 0; n < HELD; n++)
            read_pairs<FromL2>(p.branch + ((first + n) * 8 + g) * HIDDEN + least(warp + i * WARPS, BLOCKS - 1) * 64, added[i][n]);
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            float own = 0.0f;
#pragma unroll
            for (int k = 0; k < 8; k++) own = fmaf(high(added[i][n][k]), high(added[i][n][k]), fmaf(low(added[i][n][k]), low(added[i][n][k]), own));
            if (warp + i * WARPS < BLOCKS) sum += own;
        }
        sum = sum_of_quad(sum);
        if (t == 0) branch_squares[warp][(first + n) * 8 + g] = sum;
    }
    __syncthreads();
    float factor[HELD] = {};
#pragma unroll
    for (int n = 0; n < HELD; n++) {
#pragma unroll
        for (int w = 0; w < WARPS; w++) factor[n] += branch_squares[w][(first + n) * 8 + g];
        factor[n] = rsqrtf(factor[n] / HIDDEN + EPS);
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int block = least(warp + i * WARPS, BLOCKS - 1);
        u32 weight[8];
        read_pairs<FromWeights>(stream.branch_norm + block * 64, weight);
#pragma unroll
        for (int n = 0; n < HELD; n++)
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const float a = round_to(low(added[i][n][k]) * factor[n] * norm_weight(low(weight[k])));
                const float b = round_to(high(added[i][n][k]) * factor[n] * norm_weight(high(weight[k])));
                x[i][n][k] = pack(fmaf(RESIDUAL, a, low(x[i][n][k])), fmaf(RESIDUAL, b, high(x[i][n][k])));
                if (block % GRID == blockIdx.x && warp + i * WARPS < BLOCKS)
                    *(u32 *)(stream.joined + ((first + n) * 8 + g) * HIDDEN + block * 64 + pair_input(k)) = x[i][n][k];
            }
    }
}
#endif

// This warp's inputs of HELD tiles of tokens from `first` on, times the norm's weights, as operands; their squares go to
// `squares`.
template <int HELD>
__device__ __forceinline__ void load_normed(const Params &p, const Stream &stream, const bf16 *norm, int first, u32 (&held)[OWN][HELD][8]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 x[OWN][HELD][8], weight[OWN][8];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int at = least(warp + i * WARPS, BLOCKS - 1) * 64;
        if (PRE_NORM) read_pairs<FromWeights>(norm + at, weight[i]);
#pragma unroll
        for (int n = 0; n < HELD; n++) read_pairs<FromL2>(stream.x + ((first + n) * 8 + g) * HIDDEN + at, x[i][n]);
    }
#if POST_NORM
    if (stream.branch_norm) join_branch<HELD>(p, stream, first, x);
#endif
    float sum[HELD] = {};
#pragma unroll
    for (int i = 0; i < OWN; i++)
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            u32 packed[8];
            float own = 0.0f;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const float a = low(x[i][n][k]), b = high(x[i][n][k]);
                own += a * a + b * b;
                if (PRE_NORM)
                    packed[k] = pack(a * norm_weight(low(weight[i][k])) * UP, b * norm_weight(high(weight[i][k])) * UP);
                else
                    packed[k] = pack(a * UP, b * UP);
            }
            if (warp + i * WARPS < BLOCKS) sum[n] += own;
#pragma unroll
            for (int j = 0; j < 4; j++)
                pair_up(packed[2 * j], packed[2 * j + 1], held[i][n][2 * j], held[i][n][2 * j + 1]);
        }
    if (!PRE_NORM) return;
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        const float all = sum_of_quad(sum[n]);
        if (t == 0) squares[warp][(first + n) * 8 + g] = all;
    }
}

// Starts copies of the weights of the tiles [begin, end), of at most MOST, of a matrix of `outputs` rows: a part for each
// thread.
template <int MOST, class Rows>
__device__ __forceinline__ void copy_tiles(const Matrix &matrix, int outputs, int begin, int end, Rows rows) {
    const int tiles = least(MOST, end - begin);
    if (tiles <= 0) return;
    if (!is_copier()) return;
    const int copier = threadIdx.x / 32 - FIRST_COPIER + threadIdx.x % 32 * COPIERS, parts = copied_parts(HIDDEN);
    if (!copier) expect(WEIGHTS, tiles * copied_bytes(HIDDEN));
#pragma unroll 1
    for (int part = copier; part < tiles * parts; part += COPIERS * 32) {
        int upper, lower;
        rows(begin + part / parts, 0, upper, lower);
        copy_part<HIDDEN>(room + part / parts * tile_bytes(HIDDEN), matrix, part % parts, upper, lower, 0, HIDDEN, outputs, HIDDEN);
    }
}

// Products of normed x with the tiles [begin, end) of a matrix, MOST at a time; copies of the first MOST have started.
// `rows(tile, g, upper, lower)` names the two weight rows of a thread; `finish` takes the sums of a tile.
template <int HELD, int MOST, class Rows, class Finish>
__device__ __forceinline__ void normed_product(const Params &p, const Stream &stream, const Matrix &matrix, int outputs,
                                               const bf16 *norm, int begin, int end, Uses &uses, Rows rows, Finish finish) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4, tokens = p.rows * p.queries;
    float4 *sums = (float4 *)(room + MOST * tile_bytes(HIDDEN));  // [WARPS][MOST][HELD][32]
#pragma unroll 1
    // A block without tiles may have to store x.
    for (int tile = begin; tile < end || (POST_NORM && tile == begin); tile += MOST) {
        if (tile > begin) copy_tiles<MOST>(matrix, outputs, tile, end, rows);
        const int here = least(MOST, end - tile);
#pragma unroll 1
        for (int first = 0; first * 8 < tokens; first += HELD) {
            // What the first job needs besides the sums is on its way first.
            int mine = warp / HELD, n = warp % HELD;
            typename Finish::Ready ready;
            if (mine < here) ready = finish.ready(tile + mine, (first + n) * 8 + 2 * t);
            u32 held[OWN][HELD][8];
            load_normed<HELD>(p, stream, norm, first, held);
            if (!first && here > 0) wait_for(p, WEIGHTS, uses);
#pragma unroll (HELD == 1 && OWN == 1 ? 3 : 1)
            for (int i = 0; i < here; i++) {
                float sum[HELD][4] = {};
#pragma unroll
                for (int own = 0; own < OWN; own++)
                    if (warp + own * WARPS < BLOCKS)
                        multiply_block<HELD>(sum, read_piece<HIDDEN>(room + i * tile_bytes(HIDDEN), warp + own * WARPS), held[own]);
#pragma unroll
                for (int n = 0; n < HELD; n++)
                    sums[((warp * MOST + i) * HELD + n) * 32 + lane] = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
            }
            __syncthreads();
#pragma unroll 1
            for (int job = warp; mine < here;) {
                const int token = (first + n) * 8 + 2 * t;
                float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
                for (int w = 0; w < WARPS; w++) {
                    const float4 part = sums[((w * MOST + mine) * HELD + n) * 32 + lane];
                    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
                }
                float2 norms = make_float2(1.0f, 1.0f);
                if (PRE_NORM) {
                    float2 square = make_float2(0.0f, 0.0f);
#pragma unroll
                    for (int w = 0; w < WARPS; w++) {
                        const float2 part = *(const float2 *)&squares[w][token];
                        square.x += part.x, square.y += part.y;
                    }
                    norms = make_float2(rsqrtf(square.x / HIDDEN + EPS), rsqrtf(square.y / HIDDEN + EPS));
                }
                finish(ready, tile + mine, token, norms.x, norms.y, sum);
                job += WARPS, mine = job / HELD, n = job % HELD;
                if (mine < here) ready = finish.ready(tile + mine, (first + n) * 8 + 2 * t);
            }
            __syncthreads();
        }
    }
}

// Product of `activations` [tokens, INPUTS] with a matrix [HIDDEN, INPUTS], added to x or, with POST_NORM, stored as the
// branch. PARTS blocks of a cluster divide the inputs. Weights and activations are copied TURN blocks of 64 inputs at a time; the copy of the
// first weights starts before the activations are there.
template <int INPUTS, int PARTS>
struct Residual {
    static constexpr int ALL = INPUTS / 64, TAKEN = least(TILES, 4);
    static constexpr int SHARE = (ALL + PARTS * GROUP_BLOCKS - 1) / (PARTS * GROUP_BLOCKS) * GROUP_BLOCKS;  // whole groups
    static constexpr int STEP = WARPS % GROUP_BLOCKS ? WARPS * GROUP_BLOCKS : WARPS;
    static constexpr int OTHERS = TILES * 512, TEAM_TILES = HIDDEN / 16, TEAMS = GRID / PARTS, JOBS = (TILES + WARPS - 1) / WARPS;
    static constexpr bool fits(int turn) {
        return tile_bytes(turn * 64) + TOKENS * activation_row(turn * 64) + OTHERS <= ROOM;
    }
    // The inputs of a turn: all, or a multiple of WARPS blocks, so that each block of inputs belongs to the same warp
    // whatever the number of tokens.
    static constexpr int longest_turn() {
        if (fits(SHARE)) return SHARE;
        int turn = SHARE / STEP * STEP;
        while (turn > STEP && !fits(turn)) turn -= STEP;
        return turn;
    }
    static constexpr int TURN = longest_turn(), TURNS = (SHARE + TURN - 1) / TURN;
    static constexpr int TILE = tile_bytes(TURN * 64), ROW = activation_row(TURN * 64);
    static_assert(fits(TURN) && WARPS * OTHERS <= ROOM - OTHERS, "shared memory");
    static_assert(TURN == SHARE || TURN % STEP == 0, "the order of sums");

    static __device__ __forceinline__ int part() { return PARTS == 1 ? 0 : blockIdx.x % PARTS; }
    static __device__ __forceinline__ int begin_of(int turn) { return part() * SHARE + turn * TURN; }
    static __device__ __forceinline__ int blocks_of(int turn) {
        const int left = least(ALL, (part() + 1) * SHARE) - begin_of(turn);
        return left < 0 ? 0 : least(left, TURN);
    }
    static __device__ __forceinline__ void copy_weights(const Matrix &matrix, int tile, int turn) {
        const int inputs = blocks_of(turn) * 64, parts = copied_parts(inputs);
        if (!is_copier()) return;
        const int copier = threadIdx.x / 32 - FIRST_COPIER + threadIdx.x % 32 * COPIERS;
        if (!copier) expect(WEIGHTS, copied_bytes(inputs));
        if (!inputs) return;
#pragma unroll 1
        for (int part = copier; part < parts; part += COPIERS * 32)
            copy_part<TURN * 64>(room, matrix, part, tile * 16, tile * 16 + 8, begin_of(turn) * 64, inputs, HIDDEN, INPUTS);
    }
    static __device__ __forceinline__ void copy_activations(const Params &p, const bf16 *activations, int turn) {
        const int vectors = blocks_of(turn) * 8, all = p.rows * p.queries * vectors;
        activations += begin_of(turn) * 64;
#pragma unroll 4
        for (int i = threadIdx.x; i < all; i += THREADS) {
            const int token = i / vectors, vector = i - token * vectors;
            copy(room + TILE + token * ROW + vector * 16, activations + (u64)token * INPUTS + vector * 8);
        }
        close_group();
    }
    static __device__ __forceinline__ void begin(const Matrix &matrix) {
        if (blockIdx.x / PARTS < TEAM_TILES) copy_weights(matrix, blockIdx.x / PARTS, 0);
    }

    static __device__ __forceinline__ void multiply_turn(int block, int tiles, float (&sum)[TILES][4]) {
        const int lane = threadIdx.x % 32;
        const Piece piece = read_piece<TURN * 64>(room, block);
        const char *at = room + TILE + lane / 4 * ROW + block * 128;
#pragma unroll
        for (int n0 = 0; n0 < TILES; n0 += TAKEN) {
            if (n0 >= tiles) break;
            u32 held[TAKEN][8];
#pragma unroll
            for (int n = 0; n < TAKEN; n++) {
                u32 pairs[8];
                read_pairs<FromRoom>((const bf16 *)(at + (n0 + n) * 8 * ROW), pairs);
#pragma unroll
                for (int j = 0; j < 4; j++) pair_up(pairs[2 * j], pairs[2 * j + 1], held[n][2 * j], held[n][2 * j + 1]);
            }
            multiply_block<TAKEN>(*(float(*)[TAKEN][4])(sum + n0), piece, held);
        }
    }

    static __device__ __forceinline__ void run(const Params &p, const bf16 *activations, const Matrix &matrix, bf16 *stream,
                                               Uses &uses) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, tokens = p.rows * p.queries;
        float4 *sums = (float4 *)room, *others = (float4 *)(room + ROOM - OTHERS);
#pragma unroll 1
        for (int tile = blockIdx.x / PARTS; tile < TEAM_TILES; tile += TEAMS) {
            copy_activations(p, activations, 0);
            if (TEAM_TILES > TEAMS && tile >= TEAMS) copy_weights(matrix, tile, 0);
            const int upper = tile * 16 + g, lower = upper + 8;
            float by = 1.0f, below = 1.0f, before[4] = {}, sum[TILES][4] = {};
            if (warp < TILES && part() == 0) {
                const float *scale = (const float *)matrix.scales;
                if (FP8) by = load_float(scale + upper), below = load_float(scale + lower);
#pragma unroll
                for (int k = 0; k < 4 && !POST_NORM; k++)
                    before[k] = number(load_one(stream + (warp * 8 + 2 * t + k % 2) * HIDDEN + (k < 2 ? upper : lower)));
            }
            if (PARTS > 1 && !part() && threadIdx.x == 0) expect(OTHER_PART, OTHERS);
#pragma unroll 1
            for (int turn = 0; turn < TURNS; turn++) {
                if (turn) copy_weights(matrix, tile, turn), copy_activations(p, activations, turn);
                wait_for(p, WEIGHTS, uses);
                wait_for_copies();
                __syncthreads();
#pragma unroll 1
                for (int block = warp; block < blocks_of(turn); block += WARPS) multiply_turn(block, (tokens + 7) / 8, sum);
                __syncthreads();
            }
#pragma unroll
            for (int n = 0; n < TILES; n++)
                sums[(warp * TILES + n) * 32 + lane] = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
            __syncthreads();
            if (PARTS > 1 && !part() && warp < TILES) wait_for(p, OTHER_PART, uses);
#pragma unroll
            for (int i = 0; i < JOBS; i++) {
                const int n = warp + i * WARPS;
                float4 all = make_float4(0, 0, 0, 0);
                if (n >= TILES) continue;
#pragma unroll
                for (int w = 0; w < WARPS; w++) {
                    const float4 one = sums[(w * TILES + n) * 32 + lane];
                    all.x += one.x, all.y += one.y, all.z += one.z, all.w += one.w;
                }
                if (PARTS > 1 && part()) {
                    store_in_first_block(others + n * 32 + lane, all, &arrived[OTHER_PART]);
                    continue;
                }
                if (PARTS > 1) {
                    const float4 other = others[n * 32 + lane];
                    all.x += other.x, all.y += other.y, all.z += other.z, all.w += other.w;
                }
                const float value[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const int token = n * 8 + 2 * t + k % 2, at = token * HIDDEN + (k < 2 ? upper : lower);
                    if (token >= tokens) continue;
                    const float scaled = FP8 ? value[k] * (k < 2 ? by : below) * UP : value[k];
                    if (POST_NORM)
                        p.branch[at] = rounded(scaled);
                    else
                        stream[at] = rounded((i ? number(load_one(stream + at)) : before[k]) + RESIDUAL * round_to(scaled));
                }
            }
            if (tile + TEAMS >= TEAM_TILES) break;  // The room is not used again before a barrier of the grid.
            if (PARTS > 1)
                cluster_barrier();
            else
                __syncthreads();
        }
    }
};
typedef Residual<HEADS * HEAD_DIM, 1> Output;
typedef Residual<INNER, SPLIT> Down;

struct QkvRows {
    __device__ __forceinline__ void operator()(int tile, int g, int &upper, int &lower) const {
        upper = tile / HEAD_TILES * HEAD_DIM + tile % HEAD_TILES * 8 + g, lower = upper + HALF;
    }
};

// Adds the bias. Without head norms, rotates and stores: a query for the attend phase, a key or value in its page.
// Otherwise leaves that to `finish_heads`.
struct QkvFinish {
    const Params &p;
    const Layer &layer;

    struct Ready {
        float scale[2], cosine[2], sine[2];
        bf16 bias[2];
    };

    __device__ __forceinline__ Ready ready(int tile, int token) const {
        const int g = threadIdx.x % 32 / 4;
        Ready made;
        int rows[2];
        QkvRows()(tile, g, rows[0], rows[1]);
        const int feature = tile % HEAD_TILES * 8 + g;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            made.scale[k] = FP8 ? load_float((const float *)layer.qkv.scales + rows[k]) : 1.0f;
            made.bias[k] = BIAS ? load_one(layer.qkv_bias + rows[k]) : 0;
            if (HEAD_NORM) continue;
            const int position = position_of[token + k];
            const float *angle = layer.rope + (u64)(position < 0 ? 0 : position) * HEAD_DIM + feature;
            made.cosine[k] = load_float(angle), made.sine[k] = load_float(angle + HALF);
        }
        return made;
    }

    __device__ __forceinline__ void operator()(const Ready &ready, int tile, int token, float first_norm, float second_norm,
                                               const float4 &sum) const {
        const int g = threadIdx.x % 32 / 4;
        const float raw[4] = {sum.x, sum.y, sum.z, sum.w}, norms[2] = {first_norm, second_norm};
        float value[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            value[k] = round_to(raw[k] * norms[k % 2] * (ready.scale[k / 2] * UP) + number(ready.bias[k / 2]));
#if HEAD_NORM
        int rows[2];
        QkvRows()(tile, g, rows[0], rows[1]);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (token + k % 2 < p.rows * p.queries) p.raw[(token + k % 2) * QKV + rows[k / 2]] = rounded(value[k]);
#else
        const int head = tile / HEAD_TILES, feature = tile % HEAD_TILES * 8 + g;
        const bool is_query = head < HEADS, is_key = !is_query && head < HEADS + KV_HEADS;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int page = page_of[token + k];
            if (token + k >= p.rows * p.queries || (!is_query && !page)) continue;
            bf16 *to = is_query ? p.q + ((token + k) * HEADS + head) * HEAD_DIM
                                : (is_key ? layer.keys : layer.values) +
                                      ((u64)page * KV_HEADS + (head - HEADS) % KV_HEADS) * HEAD_DIM;
            float a = value[k], b = value[k + 2];
            if (is_query || is_key) {
                const float turned = a * ready.cosine[k] - b * ready.sine[k];
                b = b * ready.cosine[k] + a * ready.sine[k], a = turned;
            }
            to[feature] = rounded(a), to[feature + HALF] = rounded(b);
        }
#endif
    }
};

#if HEAD_NORM
// Normalises heads, or all heads of a token together, and rotates and stores them, as `QkvFinish` does without norms: a head
// for a warp.
__device__ __forceinline__ void finish_heads(const Params &p, const Layer &layer) {
    constexpr int ALL = HEADS + 2 * KV_HEADS, PAIRS = (HALF + 31) / 32;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int job = blockIdx.x + threadIdx.x / 32 * GRID; job < p.rows * p.queries * ALL; job += GRID * WARPS) {
        const int token = job / ALL, head = job % ALL, page = page_of[token], position = position_of[token];
        const bool is_query = head < HEADS, is_key = !is_query && head < HEADS + KV_HEADS;
        if (!is_query && !page) continue;
        const bf16 *from = p.raw + token * QKV + head * HEAD_DIM;
        float a[PAIRS], b[PAIRS], sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const bool is_there = lane + i * 32 < HALF;
            a[i] = is_there ? number(load_one(from + lane + i * 32)) : 0.0f;
            b[i] = is_there ? number(load_one(from + lane + i * 32 + HALF)) : 0.0f;
            sum = fmaf(a[i], a[i], fmaf(b[i], b[i], sum));
        }
        if (is_query || is_key) {
            const int before = WHOLE_NORM ? (is_query ? head : head - HEADS) * HEAD_DIM : 0;  // features of the norm
            const int width = (WHOLE_NORM ? is_query ? HEADS : KV_HEADS : 1) * HEAD_DIM;
            if (WHOLE_NORM) {
                sum = 0.0f;
#pragma unroll 1
                for (int i = lane * 8; i < width; i += 256) {
                    const uint4 v = load_shared(from - before + i);
#pragma unroll
                    for (int k = 0; k < 4; k++) sum = fmaf(low(word(v, k)), low(word(v, k)), fmaf(high(word(v, k)), high(word(v, k)), sum));
                }
            }
#pragma unroll
            for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
            const float by = rsqrtf(sum / width + EPS);
            const bf16 *weights = (is_query ? layer.q_norm : layer.k_norm) + before;
            const float *angle = layer.rope + (u64)(position < 0 ? 0 : position) * HEAD_DIM;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const int feature = least(lane + i * 32, HALF - 1);
                const float cosine = load_float(angle + feature), sine = load_float(angle + feature + HALF);
                float upper = a[i], lower = b[i];
                upper *= by * norm_weight(number(weights[feature])), lower *= by * norm_weight(number(weights[feature + HALF]));
                // Heads that are normalised together are rounded, as where they are normalised apart from the rotation.
                if (WHOLE_NORM) upper = round_to(upper), lower = round_to(lower);
                a[i] = upper * cosine - lower * sine, b[i] = lower * cosine + upper * sine;
            }
        }
        bf16 *to = is_query ? p.q + (token * HEADS + head) * HEAD_DIM
                            : (is_key ? layer.keys : layer.values) + ((u64)page * KV_HEADS + (head - HEADS) % KV_HEADS) * HEAD_DIM;
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
            if (lane + i * 32 < HALF) to[lane + i * 32] = rounded(a[i]), to[lane + i * 32 + HALF] = rounded(b[i]);
    }
}
#endif

struct GatedRows {
    __device__ __forceinline__ void operator()(int tile, int g, int &upper, int &lower) const {
        upper = tile * 8 + g, lower = upper + INNER;
    }
};

struct GatedFinish {
    const Params &p;
    const Layer &layer;

    struct Ready {
        float gate, up;
    };

    __device__ __forceinline__ Ready ready(int tile, int token) const {
        const int row = tile * 8 + threadIdx.x % 32 / 4;
        const float *scale = (const float *)layer.gate_up.scales + row;
        return {FP8 ? load_float(scale) : 1.0f, FP8 ? load_float(scale + INNER) : 1.0f};
    }

    __device__ __forceinline__ void operator()(const Ready &ready, int tile, int token, float first_norm, float second_norm,
                                               const float4 &sum) const {
        const int row = tile * 8 + threadIdx.x % 32 / 4;
        const float gates[2] = {sum.x, sum.y}, ups[2] = {sum.z, sum.w}, norms[2] = {first_norm, second_norm};
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const float gate = gates[k] * (ready.gate * UP) * norms[k], up = ups[k] * (ready.up * UP) * norms[k];
            // 1 + tanh(u), of GELU, is 2 sigmoid(2 u).
            const float inside = GELU ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : gate;
            const float active = gate / (1.0f + exp2_of(-LOG2_E * inside));
            if (token + k < p.rows * p.queries) p.inner[(token + k) * INNER + row] = rounded(active * up * UP);
        }
    }
};

// The page of a row's position; 0 where there is none.
__device__ __forceinline__ int page_at(const Params &p, int row, int position) {
    const int own = position - (p.tail_start ? p.tail_start[row] : 1 << 30);
    if (own < 0) return position < p.table_width ? p.table[p.slot[row] * p.table_stride + position] : 0;
    return own < p.tail_width ? p.tail[row * p.tail_stride + own] : 0;
}

// The token, key/value head and positions [begin, end) of a unit of attention. Block b has the units b, b + blocks, and so
// on. The first ones and their pages are found once, because they are the same in every layer; with windows they are not.
struct Chunk {
    int token, head, chunks, first, begin, end, start, row;

    __device__ __forceinline__ int page(const Params &p, int index, int position) const {
        if (position < begin || position >= end) return 0;
        return !WINDOW && index < KEPT ? pages[index][position - first] : page_at(p, row, position);
    }
};
__shared__ Chunk chunks_kept[KEPT];

__device__ __forceinline__ Chunk find_chunk(int tokens, int queries, int window, int index) {
    const int *before = chunks_before[window > 0], unit = blockIdx.x + index * GRID, place = unit / KV_HEADS;
    int token = 0;
#pragma unroll 1
    for (int step = TOKENS / 2; step; step /= 2)
        if (token + step < tokens && before[token + step] <= place) token += step;
    const int position = position_of[token];
    const int seen = window && position >= window ? position - window + 1 : 0, first = (seen / CHUNK + place - before[token]) * CHUNK;
    return {token, unit % KV_HEADS, before[token + 1] - before[token], first, seen > first ? seen : first,
            least(position + 1, first + CHUNK), position - token % queries, row_of[token]};
}
__device__ __forceinline__ Chunk chunk_of(const Params &p, int window, int index) {
    return !WINDOW && index < KEPT ? chunks_kept[index] : find_chunk(p.rows * p.queries, p.queries, window, index);
}

__device__ __forceinline__ int attention_units(const Params &p, int window) {
    return chunks_before[window > 0][p.rows * p.queries] * KV_HEADS;
}

// Fetches the keys and values of this block's units into L2.
__device__ __forceinline__ void prefetch_chunks(const Params &p, const Layer &layer) {
    const int window = (int)layer.window, units = attention_units(p, window);
#pragma unroll 1
    for (int index = 0; blockIdx.x + index * GRID < units; index++) {
        const Chunk chunk = chunk_of(p, window, index);
#pragma unroll 1
        for (int at = chunk.begin + threadIdx.x; at < least(chunk.end, chunk.start); at += THREADS) {
            const u64 from = ((u64)chunk.page(p, index, at) * KV_HEADS + chunk.head) * HEAD_DIM;
#pragma unroll
            for (int line = 0; line < HEAD_DIM; line += 64) {
                prefetch_line(layer.keys + from + line);
                prefetch_line(layer.values + from + line);
            }
        }
    }
}

// Starts copies of a chunk's keys and values: of the steps that hold a position of this pass (`is_new`), or of the others,
// which are there before the pass. A step's 16 positions are copied by the warp that takes them. Thread (g, t) copies what
// it needs: 16 features of the keys of positions g and g + 8, and 8 features of the values of positions 2t, 2t + 1, 2t + 8
// and 2t + 9.
__device__ __forceinline__ void copy_chunk(const Params &p, const Layer &layer, const Chunk &chunk, int index, bool is_new) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bf16 *keys = layer.keys + chunk.head * HEAD_DIM + t * 8, *values = layer.values + chunk.head * HEAD_DIM + g * 8;
#pragma unroll 1
    for (int step = 0; step < (warp < ATTEND_WARPS ? STEPS : 0); step++) {
        const int base = chunk.first + (step * ATTEND_WARPS + warp) * 16;
        if (base >= chunk.end || base + 16 <= chunk.begin || is_new != (base + 16 > chunk.start)) continue;
        const int page = chunk.page(p, index, base + lane % 16);
        char *to = room + (warp * STEPS + step) * DIM_BLOCKS * 4096 + lane * 16;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const bf16 *key = keys + (u64)__shfl_sync(~0u, page, g + k / 2 * 8) * (KV_HEADS * HEAD_DIM) + k % 2 * 32;
            const bf16 *value = values + (u64)__shfl_sync(~0u, page, 2 * t + k % 2 + k / 2 * 8) * (KV_HEADS * HEAD_DIM);
#pragma unroll
            for (int d = 0; d < DIM_BLOCKS; d++) copy(to + (d * 8 + k) * 512, key + d * 64), copy(to + (d * 8 + 4 + k) * 512, value + d * 64);
        }
    }
    close_group();
}

// Attention of one token and key/value head to one chunk of positions. The last chunk of several to be done adds all.
__device__ __forceinline__ void attend(const Params &p, const Layer &layer, int index) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const Chunk chunk = chunk_of(p, (int)layer.window, index);
    const bool takes = warp < ATTEND_WARPS;
    const int token = chunk.token, head = chunk.head, chunks = chunk.chunks, begin = chunk.begin, end = chunk.end;
#pragma unroll 1
    for (int is_new = index ? 0 : 1; is_new < 2; is_new++) copy_chunk(p, layer, chunk, index, is_new);
    u32 query[QUERY_TILES][DIM_BLOCKS][8];
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int d = 0; d < DIM_BLOCKS; d++) {
            const int each = n * 8 + g;
            const bf16 *at = p.q + (token * HEADS + head * EACH + (each < EACH ? each : 0)) * HEAD_DIM + d * 64 + t * 8;
            const uint4 v[2] = {load_shared(at), load_shared(at + 32)};
#pragma unroll
            for (int k = 0; k < 8; k++) query[n][d][k] = each < EACH ? word(v[k / 4], k % 4) : 0;
        }
    float most[QUERY_TILES][2], all[QUERY_TILES][2] = {}, out[QUERY_TILES][HEAD_DIM / 16][4] = {};
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) most[n][0] = most[n][1] = LOWEST;
    wait_for_copies();
#pragma unroll 1
    for (int step = 0; step < (takes ? STEPS : 0); step++) {
        const int base = chunk.first + (step * ATTEND_WARPS + warp) * 16;
        if (base >= end || base + 16 <= begin) continue;
        const uint4 *copied = (const uint4 *)room + (warp * STEPS + step) * DIM_BLOCKS * 256 + lane;
        const bool is_upper = base + g >= begin && base + g < end, is_lower = base + g + 8 >= begin && base + g + 8 < end;
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            float score[4] = {};
#pragma unroll
            for (int d = 0; d < DIM_BLOCKS; d++) {
                const uint4 key[4] = {copied[d * 256], copied[d * 256 + 32], copied[d * 256 + 64], copied[d * 256 + 96]};
#pragma unroll
                for (int j = 0; j < 4; j++)
                    multiply(score, word(key[j / 2], 2 * j % 4), word(key[2 + j / 2], 2 * j % 4), word(key[j / 2], 2 * j % 4 + 1),
                             word(key[2 + j / 2], 2 * j % 4 + 1), query[n][d][2 * j], query[n][d][2 * j + 1]);
            }
            float factor[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const float upper = is_upper ? score[k] * (LOG2_E / ROOT_DIM) : LOWEST;
                const float lower = is_lower ? score[k + 2] * (LOG2_E / ROOT_DIM) : LOWEST;
                const float now = fmaxf(most[n][k], max_of_rows(fmaxf(upper, lower)));
                factor[k] = exp2_of(most[n][k] - now), most[n][k] = now;
                score[k] = is_upper ? exp2_of(upper - now) : 0.0f, score[k + 2] = is_lower ? exp2_of(lower - now) : 0.0f;
                all[n][k] = all[n][k] * factor[k] + score[k] + score[k + 2];
            }
            u32 first = pack(score[0], score[1]), second = pack(score[2], score[3]);
            transpose(first);
            transpose(second);
#pragma unroll
            for (int d = 0; d < DIM_BLOCKS; d++) {
                const uint4 value[4] = {copied[d * 256 + 128], copied[d * 256 + 160], copied[d * 256 + 192], copied[d * 256 + 224]};
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    float(&sum)[4] = out[n][d * 4 + m];
                    sum[0] *= factor[0], sum[1] *= factor[1], sum[2] *= factor[0], sum[3] *= factor[1];
                    const u32 a = word(value[0], m), b = word(value[1], m), c = word(value[2], m), e = word(value[3], m);
                    multiply(sum, __byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, e, 0x5410),
                             __byte_perm(c, e, 0x7632), first, second);
                }
            }
        }
    }
    // [ATTEND_WARPS][QUERIES] maxima and sums, [ATTEND_WARPS][QUERIES][HEAD_DIM] outputs.
    float *maxima = (float *)(room + ATTEND_WARPS * STEPS * DIM_BLOCKS * 4096), *totals = maxima + ATTEND_WARPS * QUERIES;
    float *outputs = totals + ATTEND_WARPS * QUERIES;
#pragma unroll
    for (int n = 0; n < (takes ? QUERY_TILES : 0); n++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const float total = sum_of_rows(all[n][k]);
            const int each = warp * QUERIES + n * 8 + 2 * t + k;
            if (g == 0) maxima[each] = most[n][k], totals[each] = total;
#pragma unroll
            for (int m = 0; m < HEAD_DIM / 16; m++)
                *(float2 *)(outputs + each * HEAD_DIM + m / 4 * 64 + g * 8 + m % 4 * 2) = make_float2(out[n][m][k], out[n][m][k + 2]);
        }
    __syncthreads();
    // A chunk's part: EACH rows of HEAD_DIM sums, then EACH maxima and EACH totals.
    constexpr int PART = EACH * (HEAD_DIM + 2);
    const int unit = blockIdx.x + index * GRID;
    float *part = p.partial + (u64)unit * PART;
    bf16 *attended = p.attended + (token * HEADS + head * EACH) * HEAD_DIM;
#pragma unroll 1
    for (int job = threadIdx.x; job < EACH * HEAD_DIM; job += THREADS) {
        const int each = job / HEAD_DIM, dim = job % HEAD_DIM;
        // Lane w has the weight of warp w; all jobs of a warp are of one query.
        const float maximum = lane < ATTEND_WARPS ? maxima[lane * QUERIES + each] : LOWEST;
        float highest = maximum, sum = 0.0f;
#pragma unroll
        for (int i = 1; i < 32; i *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, i));
        const float weight = exp2_of(maximum - highest);
        float total = lane < ATTEND_WARPS ? weight * totals[lane * QUERIES + each] : 0.0f;
#pragma unroll
        for (int i = 1; i < 32; i *= 2) total += __shfl_xor_sync(~0u, total, i);
#pragma unroll
        for (int w = 0; w < ATTEND_WARPS; w++) sum += __shfl_sync(~0u, weight, w) * outputs[(w * QUERIES + each) * HEAD_DIM + dim];
        if (chunks == 1)
            attended[job] = rounded(total > 0.0f ? sum / total * UP : 0.0f);
        else {
            part[job] = sum;
            if (!dim) part[EACH * HEAD_DIM + each] = highest, part[EACH * (HEAD_DIM + 1) + each] = total;
        }
    }
    if (chunks > 1) {
        __syncthreads();
        if (threadIdx.x == 0) {
            flag = count_up(p.merged + token * KV_HEADS + head) == (u32)(chunks - 1);
        }
        __syncthreads();
        if (flag) {
            const float *parts = p.partial + ((u64)chunks_before[layer.window > 0][token] * KV_HEADS + head) * PART;
            constexpr int STRIDE = KV_HEADS * PART;
#pragma unroll 1
            for (int job = threadIdx.x; job < EACH * HEAD_DIM; job += THREADS) {
                const int maximum = EACH * HEAD_DIM + job / HEAD_DIM;
                float highest = LOWEST, sum = 0.0f, total = 0.0f;
#pragma unroll 4
                for (int c = 0; c < chunks; c++) highest = fmaxf(highest, load_float(parts + c * STRIDE + maximum));
#pragma unroll 4
                for (int c = 0; c < chunks; c++) {
                    const float by = exp2_of(load_float(parts + c * STRIDE + maximum) - highest);
                    sum += by * load_float(parts + c * STRIDE + job), total += by * load_float(parts + c * STRIDE + maximum + EACH);
                }
                attended[job] = rounded(sum / total * UP);
            }
            if (threadIdx.x == 0) p.merged[token * KV_HEADS + head] = 0;
        }
    }
    __syncthreads();
}

// Finds positions, rows and chunks of all tokens, and the pages of this block's first units of attention.
__device__ __forceinline__ void lay_out(const Params &p) {
    const int tokens = p.rows * p.queries;
    for (int i = threadIdx.x; i < LAYERS * (int)(sizeof(Layer) / 8); i += THREADS) ((u64 *)layers)[i] = ((const u64 *)p.layers)[i];
    for (int token = threadIdx.x; token < TOKENS; token += THREADS) {
        const int row = token < tokens ? token / p.queries : 0, query = token % p.queries;
        const int position = token < tokens && query < p.count[row] ? p.start[row] + query : -1;
        row_of[token] = row, position_of[token] = position, page_of[token] = position < 0 ? 0 : page_at(p, row, position);
    }
    __syncthreads();
    if (threadIdx.x < 2) {
        int *before = chunks_before[threadIdx.x], sum = 0;
#pragma unroll 1
        for (int token = 0; token < tokens; token++) {
            const int position = position_of[token];
            const int seen = threadIdx.x && position >= WINDOW ? position - WINDOW + 1 : 0;
            before[token] = sum;
            sum += position < 0 ? 1 : position / CHUNK - seen / CHUNK + 1;
        }
        before[tokens] = sum;
    }
    __syncthreads();
    if (WINDOW) return;
    for (int turn = 0; turn < KEPT && blockIdx.x + turn * GRID < attention_units(p, 0); turn++) {
        const Chunk chunk = find_chunk(tokens, p.queries, 0, turn);
        if (threadIdx.x == 0) chunks_kept[turn] = chunk;
        for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
            const int position = chunk.first + i;
            pages[turn][i] = position >= chunk.begin && position < chunk.end ? page_at(p, chunk.row, position) : 0;
        }
    }
    __syncthreads();
}

// The sum over all threads of a block.
__device__ __forceinline__ float block_sum(float sum) {
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32][0] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int w = 0; w < WARPS; w++) sum += squares[w][0];
    return sum;
}

// Writes the norm of x, one token for each block.
__device__ __forceinline__ void write_hidden(const Params &p, const Stream &stream) {
    float *value = (float *)room;
#pragma unroll 1
    for (int token = blockIdx.x; token < p.rows * p.queries; token += GRID) {
        float sum = 0.0f, branch = 0.0f;
        if (POST_NORM) {
            for (int i = threadIdx.x; i < HIDDEN; i += THREADS) {
                const float v = number(load_one(p.branch + token * HIDDEN + i));
                branch = fmaf(v, v, branch);
            }
            branch = rsqrtf(block_sum(branch) / HIDDEN + EPS);
        }
        for (int i = threadIdx.x; i < HIDDEN; i += THREADS) {
            float v = number(load_one(stream.x + token * HIDDEN + i));
            if (POST_NORM) {
                const float added = number(load_one(p.branch + token * HIDDEN + i)) * branch;
                v = round_to(fmaf(RESIDUAL, round_to(added * norm_weight(number(stream.branch_norm[i]))), v));
            }
            value[i] = v, sum += v * v;
        }
        const float factor = rsqrtf(block_sum(sum) / HIDDEN + EPS);
        for (int i = threadIdx.x; i < HIDDEN; i += THREADS)
            p.hidden[token * HIDDEN + i] = position_of[token] < 0 ? 0 : rounded(value[i] * factor * norm_weight(number(p.norm[i])));
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if SPLIT > 1
    __cluster_dims__(SPLIT, 1, 1)
#endif
        step(const __grid_constant__ Params p) {
    Grid grid{p, 0};
    Uses uses{};
    if (threadIdx.x == 0) {
        begin_barriers(arrived, 2);
    }
    if (SPLIT > 1) cluster_barrier();
    const int tokens = p.rows * p.queries;
    lay_out(p);
    prefetch<QKV_BYTES>(layers[0].qkv.weights);
    prefetch<OUTPUT_BYTES>(layers[0].output.weights);
    prefetch_vectors(layers[0]);
    prefetch_chunks(p, layers[0]);
    for (int token = blockIdx.x; token < tokens; token += GRID)
        for (int i = threadIdx.x; i < HIDDEN; i += THREADS)
            p.stream[token * HIDDEN + i] = rounded(number(p.embed[p.tokens[token] * HIDDEN + i]) * EMBED_FACTOR);
    const int qkv_begin = blockIdx.x * (QKV / 16) / GRID, gated_begin = blockIdx.x * (INNER / 8) / GRID;
    const int qkv_end = (blockIdx.x + 1) * (QKV / 16) / GRID, gated_end = (blockIdx.x + 1) * (INNER / 8) / GRID;
    if (!grid.sync([&] {
            copy_tiles<QKV_TILES>(layers[0].qkv, QKV, qkv_begin, qkv_end, QkvRows());
            prefetch<GATE_UP_BYTES>(layers[0].gate_up.weights);
        })) return;
    Stream stream{p.stream, nullptr, nullptr};
    bf16 *const other = p.stream + MOST_TOKENS * HIDDEN;
#pragma unroll 1
    for (int index = 0; index < LAYERS; index++) {
        const Layer &layer = layers[index];
        const int window = (int)layer.window, units = attention_units(p, window);
        CLOCK(0);
        normed_product<QKV_HELD, QKV_TILES>(p, stream, layer.qkv, QKV, layer.attn_norm, qkv_begin, qkv_end, uses, QkvRows(), QkvFinish{p, layer});
        CLOCK(1);
#if HEAD_NORM
        if (!grid.sync([] {})) return;
        CLOCK(2);
        finish_heads(p, layer);
        CLOCK(3);
#endif
        if (!grid.sync([&] {
                if (blockIdx.x < units) copy_chunk(p, layer, chunk_of(p, window, 0), 0, false);
                prefetch<DOWN_BYTES>(layer.down.weights);
            })) return;
        CLOCK(2 + 2 * HEAD_NORM);
#pragma unroll 1
        for (int turn = 0; blockIdx.x + turn * GRID < units; turn++) attend(p, layer, turn);
        CLOCK(3 + 2 * HEAD_NORM);
        if (!grid.sync([&] { Output::begin(layer.output); })) return;
        CLOCK(4 + 2 * HEAD_NORM);
        Output::run(p, p.attended, layer.output, p.stream, uses);
        CLOCK(5 + 2 * HEAD_NORM);
        if (!grid.sync([&] {
                copy_tiles<GATED_TILES>(layer.gate_up, 2 * INNER, gated_begin, gated_end, GatedRows());
                if (index + 1 == LAYERS) return;
                prefetch<QKV_BYTES>(layers[index + 1].qkv.weights);
                prefetch<OUTPUT_BYTES>(layers[index + 1].output.weights);
                prefetch_vectors(layers[index + 1]);
                prefetch_chunks(p, layers[index + 1]);
            })) return;
        CLOCK(6 + 2 * HEAD_NORM);
#if POST_NORM
        stream = {p.stream, layer.attn_out_norm, other};
#endif
        normed_product<GATED_HELD, GATED_TILES>(p, stream, layer.gate_up, 2 * INNER, layer.mlp_norm, gated_begin, gated_end, uses, GatedRows(), GatedFinish{p, layer});
        CLOCK(7 + 2 * HEAD_NORM);
        if (!grid.sync([&] {
                Down::begin(layer.down);
                if (index + 1 < LAYERS) prefetch<GATE_UP_BYTES>(layers[index + 1].gate_up.weights);
            })) return;
        CLOCK(8 + 2 * HEAD_NORM);
        Down::run(p, p.inner, layer.down, p.stream, uses);
        CLOCK(9 + 2 * HEAD_NORM);
#if POST_NORM
        stream = {other, layer.mlp_out_norm, p.stream};
#endif
        if (!grid.sync([&] {
                if (index + 1 < LAYERS) copy_tiles<QKV_TILES>(layers[index + 1].qkv, QKV, qkv_begin, qkv_end, QkvRows());
            })) return;
    }
    wait_for_copies();
    write_hidden(p, stream);
}
