/* few_stage.cuh - stages of a program (kernels/few.h) as its kernel reads them, and the shared
 * memory of a block.
 *
 * All blocks go through all stages together. The columns of a product are cut into strips of eight;
 * strip i of a product is block (begin + i) mod blocks' one, so that the strips of products that
 * begin at the same place fall to the same blocks. */
#ifndef MN_KERNELS_CUDA_FEW_STAGE_CUH
#define MN_KERNELS_CUDA_FEW_STAGE_CUH

#include "kernels/cuda/few_work.cuh"

enum {
    MN_FEW_WARPS = 8,
    MN_FEW_THREADS = 32 * MN_FEW_WARPS,
    MN_FEW_COLUMNS = 8,             // of a strip
    MN_FEW_SLOTS = 6,               // pieces of weights on their way to a block
    MN_FEW_PACKS = 4,               // of 16 bytes, of a thread in a piece
    MN_FEW_BATCH = 8,               // rows of strips whose sums wait for each other
    MN_FEW_STRIPS = 136,            // of a block in a stage
    MN_FEW_TURNS = 8,               // strips of a block of one product with endings
    MN_FEW_OPERANDS = 12,           // numbers a column that endings read from memory
    MN_FEW_EARLY = 4,               // of them for one product
    MN_FEW_VALUES = MN_FEW_PRODUCTS + MN_FEW_ENDINGS,
    MN_FEW_ROWS_BYTES = 20 << 10,   // of inputs in shared memory
    MN_FEW_ROW_PAD = 8,
    MN_FEW_TILE = 8,                // columns of a memory that a block has
    MN_FEW_LONGEST = 4096,          // row that warps bring by parts
    MN_FEW_DEEP = 8,                // rows of a memory, of a thread
    MN_FEW_KNOWN = 5,               // stages that a block has in shared memory
};

enum mn_few_stage_kind { MN_FEW_PARTS_STAGE, MN_FEW_PRODUCTS_STAGE, MN_FEW_MEMORY_STAGE };

/* How rows of a come to shared memory: by all threads, or each warp its part of a single row. */
enum mn_few_way { MN_FEW_BY_BLOCK, MN_FEW_OWN_COPY, MN_FEW_OWN_NORM };

/* Where an ending finds an input: value `from`; memory (-1); operand -2 - from of its product. */
struct mn_few_source {
    char *data;
    int from, step;    // numbers from column to column: 1 or 0
    bool wide;
};

struct mn_few_end {
    int kind, f, product, taps, value;    // number of its result
    float scale, shift;
    bool narrow;
    mn_few_source in[4], out, tail;       // of a convolution: x, w, bias, tail0; y; tail
};

struct mn_few_operand {
    const char *data;
    int step;
    bool wide;
};

struct mn_few_weight {
    const void *b, *bias, *plus;
    void *c, *sum;
    int64_t b_row;
    int N, begin, first_operand, n_operands, conv;    // its ending that is a convolution; -1: none
    int turns, rest;    // strips of each block; blocks from `begin` on that have one more
};

struct alignas(16) mn_few_products_at {
    int kind, wide, M, K, step, n, n_ends, way, has_first, settled;
    mn_divisor by_width;    // of a norm in front
    float inverse_width;
    int64_t a_row;
    const void *a;
    mn_few_weight of[MN_FEW_PRODUCTS];
    mn_few_operand operand[MN_FEW_OPERANDS];
    mn_few_job first;
    mn_few_end end[MN_FEW_ENDINGS];
};

struct alignas(16) mn_few_parts_at {
    int kind, n_parts, first[MN_FEW_WORKS + 1];
    mn_few_job job[MN_FEW_WORKS];
};

struct alignas(16) mn_few_memory_at {
    int kind, wide, B, H, K, V, decay, settled, erases, fronts;    // fronts: bits
    float scale;
    mn_in q, e, w, v, beta, g, state0;
    mn_out o, state;
    mn_few_job front[MN_FEW_FRONTS];
};

union mn_few_stage_at {
    int kind;
    mn_few_products_at products;
    mn_few_parts_at parts;
    mn_few_memory_at memory;
    mn_few_stage bytes;

    __device__ mn_few_stage_at() {}
};
static_assert(sizeof(mn_few_products_at) <= MN_FEW_STAGE_BYTES, "a stage");
static_assert(sizeof(mn_few_parts_at) <= MN_FEW_STAGE_BYTES, "a stage");
static_assert(sizeof(mn_few_memory_at) <= MN_FEW_STAGE_BYTES, "a stage");
static_assert(sizeof(mn_few_stage_at) == MN_FEW_STAGE_BYTES, "a stage");

/* A block's strips of a stage, in the order of the products: its rows of weights, `step` bytes
 * apart. `turn`: among the strips of its product. */
struct alignas(8) mn_few_strip {
    const char *rows;
    int step, column;
    short product, turn, n_rows;
};

struct mn_few_table {
    int n;
    mn_few_strip at[MN_FEW_STRIPS];
};

struct alignas(16) mn_few_block {
    uint4 ring[MN_FEW_SLOTS][MN_FEW_PACKS][MN_FEW_THREADS];    // a thread's own packs
    unsigned char rows[MN_FEW_ROWS_BYTES];
    mn_few_stage_at stage[MN_FEW_KNOWN];
    mn_few_table table[MN_FEW_KNOWN - 1];
    float sums[MN_FEW_BATCH * MN_FEW_COLUMNS][MN_FEW_WARPS + 1];
    float values[MN_FEW_VALUES][MN_FEW_TURNS * MN_FEW_COLUMNS];
    float gathered[MN_FEW_WARPS + 1][2][9];
    float room[32];
    alignas(16) float squares[MN_FEW_LONGEST / 32];
};

/* ---- copies on their way --------------------------------------------------------------------- */

/* Sixteen bytes on their way to shared memory; zeros where `there` is false. */
__device__ inline void mn_few_bring(void *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
                 :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}

__device__ inline void mn_few_commit(void) {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

/* Until at most `LEFT` of the youngest groups are still on their way. */
template <int LEFT>
__device__ inline void mn_few_arrived(void) {
    asm volatile("cp.async.wait_group %0;\n" :: "n"(LEFT) : "memory");
}

/* Asks the second cache for the line of an address. */
__device__ inline void mn_few_ask_line(const void *from) {
    asm volatile("prefetch.global.L2 [%0];" :: "l"(from));
}

#endif
