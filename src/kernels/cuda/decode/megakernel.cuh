/* megakernel.cuh - what the blocks of a megakernel (kernels/decode.h) are told, and the shared
 * memory of one.
 *
 * A block reads one instr for each stage, which the host has written for it
 * (megakernel_build.cu): the rows of weights it multiplies and what becomes of the sums. Columns
 * of a product are cut into column tiles of eight; a out_tile is a column tile, or two column
 * tiles of the same columns of two gemms, with all that follows from them.
 *
 * Numbers that later stages read travel as words: two of bf16, written at once. Who reads them
 * looks until they are no longer MN_DECODE_SENTINEL, which no two elements are: nothing else
 * tells that they are there. There are two sets of words; a run makes those of the next one
 * sentinel. */
#ifndef MN_KERNELS_CUDA_DECODE_MEGAKERNEL_CUH
#define MN_KERNELS_CUDA_DECODE_MEGAKERNEL_CUH

#include "kernels/cuda/prim/tma.cuh"
#include "kernels/cuda/decode/decode_elementwise.cuh"

namespace mneme::decode {

enum {
    MN_DECODE_WARPS = 8,                                // that multiply; one more brings weights
    MN_DECODE_THREADS = 32 * MN_DECODE_WARPS,
    MN_DECODE_TILE_N = MN_DECODE_COL_TILE,                // of a column tile
    MN_DECODE_WARP_K = 128,                               // elements of a chunk that a warp has
    MN_DECODE_CHUNK = MN_DECODE_WARP_K * MN_DECODE_WARPS,       // elements of a row in a frag
    MN_DECODE_CHUNKS = 4,
    MN_DECODE_ROW_STRIDE = 2 * MN_DECODE_CHUNK + 64,              // bytes apart: other banks
    // a column tile's part of a chunk
    MN_DECODE_TILE_BYTES = MN_DECODE_TILE_N * MN_DECODE_ROW_STRIDE,
    MN_DECODE_SLOTS = 11,                               // pieces on their way or not used yet
    MN_DECODE_COL_TILES = 8,                               // of a block in a stage
    MN_DECODE_INSTRS = 6,                                // stages ahead of which a block knows
    MN_DECODE_INSTR_BYTES = 2560,
    MN_DECODE_STATE_ROWS = 32 * MN_DECODE_WARPS,             // rows of a memory, at most
    MN_DECODE_TILE_V = 8,                                 // columns of a memory that a block has
    MN_DECODE_PREFETCHED = 4,                                // elements that a list reads ahead
    MN_DECODE_VALUES = 2 + MN_DECODE_EPILOGUES + MN_DECODE_PREFETCHED,
    MN_DECODE_NO_WORDS = -1,
    // of words: of this run, and of the next
    MN_DECODE_WORD_SETS = 2,
};

static const uint32_t MN_DECODE_SENTINEL = 0xffffffffu;    // elements that are none are 0x7fff here

/* Words are spread: the second cache serves a line to one reader after the other, and all blocks
 * look for the same words. 16 elements are at the beginning of each line. */
enum { MN_DECODE_LINE = 128, MN_DECODE_PER_LINE = 16 };

/* Bytes from the first word, which begins a line, to that of number i. */
__host__ __device__ inline int mn_decode_word_at(unsigned i) {
    return (int)(i / MN_DECODE_PER_LINE * MN_DECODE_LINE + i % MN_DECODE_PER_LINE / 2 * 4);
}

/* The same from the word of another number, at `at`. */
__host__ __device__ inline int mn_decode_word_from(int at, unsigned i) {
    const unsigned before = (unsigned)at % MN_DECODE_LINE / 2;
    return at - (int)before * 2 + mn_decode_word_at(before + i);
}

enum mn_decode_opcode { MN_DECODE_NOP, MN_DECODE_COPY, MN_DECODE_GEMM, MN_DECODE_RECURRENCE };

/* How the row of a product comes: as it is, normalised, normalised in groups and gated. */
enum mn_decode_prologue { MN_DECODE_PLAIN, MN_DECODE_NORMED, MN_DECODE_GATED };

/* What becomes of a out_tile's sums: stored; added to something as well; f(first), times second if
 * there is one; a convolution of one token; stored in float32 as well; -exp(A) softplus(x + dt), of
 * which the list is kept; a list of small works. */
enum mn_decode_epilogue_form {
    MN_DECODE_EPI_STORE,
    MN_DECODE_EPI_ADD,
    MN_DECODE_EPI_ACT,
    MN_DECODE_EPI_CONV,
    MN_DECODE_EPI_F32,
    MN_DECODE_EPI_DECAY,
    MN_DECODE_EPI_LIST
};

/* Words of the megakernel, bytes from its beginning. What lies elsewhere is copied to words first.
 * */
struct mn_decode_source {
    int at;
    short step, odd;      // step: 0 where one number serves all; odd: the upper one of a word
};

struct mn_decode_col_tile {
    const char *rows;
    int step, n_rows;     // bytes from row to row
};

/* From its first column on. `to`: where the last result goes; its words are to_handoff bytes from
 * the beginning of the megakernel, or MN_DECODE_NO_WORDS. `c`: the gemms, unless the last result
 * is one. */
struct alignas(16) mn_decode_out_tile {
    unsigned char form, n_col_tiles, col_tile[2], n_rows, f;
    bool biased : 1, stores_c : 1;          // some bias; some product is stored as well
    unsigned char n_epis;
    int first_epi, to_handoff, N;          // N: of the product
    unsigned char prefetched_step[4], prefetched_wide[4];
    int prefetched_per[4];                    // columns that a number serves
    mn_bf16 *to, *c[2];
    const mn_bf16 *bias[2];
    mn_decode_source plus;
    union {
        struct {
            const mn_bf16 *taps, *taps_bias;
            const float *tail0;
            float *tail;
        };
        // what a list reads; bytes from column to column
        const char *prefetched[MN_DECODE_PREFETCHED];
    };
};

/* Input of a small work of a list: value `from` of the out_tile (gemms, results, what was read
 * prefetched), or where that is -1, words, of which one number serves `per` columns. */
struct mn_decode_epi_input {
    mn_decode_source source;
    int from, per;
};

struct alignas(16) mn_decode_epi_instr {
    short kind, f, narrow, wide;
    int per, to_handoff;    // columns of one result
    float scale, shift;
    char *to;
    mn_decode_epi_input in[2];
    int n_inputs;
};

struct alignas(16) mn_decode_gemm_instr {
    int K;
    unsigned char way, chunks;
    unsigned char group;               // warps whose elements are normalised together
    unsigned char sigmoid;             // the gate
    unsigned char n_col_tiles, n_out_tiles, none[2];
    int wrap;             // number k is weighted by number k & wrap
    float inverse_width, epsilon;
    int x, z;             // words of the row, and of its gate
    const mn_bf16 *weight;
    mn_bf16 *row;         // where the row, made, is stored; NULL: by another block, or not at all
    mn_decode_col_tile col_tile[MN_DECODE_COL_TILES];
    // and behind the last that is there the epis
    mn_decode_out_tile out_tile[MN_DECODE_COL_TILES];
};

/* A tile of a memory: eight columns of a head. */
struct alignas(16) mn_decode_recurrence_instr {
    int K, V, by_channel, delta_rule, has_beta, has_g, o_handoff;
    float scale;
    struct {
        int there;
        float plus, most;    // by 1 / sqrt(squares + plus), or `most` if that is less
        mn_bf16 *to;         // where the row, made, is stored; or NULL
    } front[MN_DECODE_QK_NORMS];
    mn_decode_source q, e, v, beta, g;
    float *state;
    mn_bf16 *o;
};

/* Numbers that are older than the megakernel, to words, and to memory where `to` is there. Those of
 * the megakernel's row of a table, where `row` is not 0. */
enum { MN_DECODE_COPIES = 16 };    // of a block
struct mn_decode_copy {
    const mn_bf16 *from;
    mn_bf16 *to;
    const int32_t *index;
    int64_t row;                // elements from row to row
    int words, count;           // up to MN_DECODE_CHUNK
};
struct alignas(16) mn_decode_copy_instr {
    int n;
    mn_decode_copy of[MN_DECODE_COPIES];
};

struct alignas(16) mn_decode_instr {
    int kind, next_bytes;    // of the instr behind this one
    int epis_at, pad;        // bytes from here to the epis
    union {
        mn_decode_gemm_instr gemms;
        mn_decode_recurrence_instr memory;
        mn_decode_copy_instr copy;
    };
};
static_assert(sizeof(mn_decode_instr) + MN_DECODE_EPILOGUES * sizeof(mn_decode_epi_instr) <=
              MN_DECODE_INSTR_BYTES,
              "a note");

/* In front of a megakernel. */
struct mn_decode_header {
    alignas(128) unsigned run;     // how often it has run
    int n_gather_blocks;                 // blocks, the first ones, that copy rows of a table
    const int32_t *index;          // of which this one
    alignas(128) unsigned left;    // blocks that have ended this time
};

/* Where a block's instrs begin, from the megakernel's beginning; and the bytes of the first. */
struct mn_decode_entry {
    int64_t at, bytes;
};

struct alignas(128) mn_decode_smem {
    unsigned char ring[MN_DECODE_SLOTS][MN_DECODE_TILE_BYTES];
    alignas(16) unsigned char instr[MN_DECODE_INSTRS][MN_DECODE_INSTR_BYTES];
    alignas(16) mn_bf16 row[MN_DECODE_CHUNKS * MN_DECODE_CHUNK];
    alignas(16) float sums[2][MN_DECODE_COL_TILES][MN_DECODE_TILE_N][MN_DECODE_WARPS + 2];
    alignas(16) float squares[2][MN_DECODE_WARPS];
    alignas(16) float2 columns[2][MN_DECODE_WARPS][MN_DECODE_TILE_V];
    alignas(16) float4 shared[2][MN_DECODE_WARPS];
    float values[MN_DECODE_COL_TILES][MN_DECODE_VALUES][MN_DECODE_TILE_N];
    uint64_t full[MN_DECODE_SLOTS], empty[MN_DECODE_SLOTS];
    uint64_t instr_full[MN_DECODE_INSTRS], instr_empty[MN_DECODE_INSTRS];
};

/* Where a warp stands: in the ring of weights, in that of instrs, in which buf of what is there
 * twice. */
struct mn_decode_pipe {
    int slot, instr, buf;
    unsigned phase, instr_phase;
    const char *words;    // from here instrs count bytes to words

    __device__ void next_slot(void) {
        if (++slot == MN_DECODE_SLOTS) slot = 0, phase ^= 1;
    }

    __device__ void next_instr(void) {
        if (++instr == MN_DECODE_INSTRS) instr = 0, instr_phase ^= 1;
    }
};

#if __CUDA_ARCH__ >= 900

/* What is not read again in this run: the second cache stores_c the rest of the megakernel instead.
 * */
__device__ inline void mn_decode_tma_load_once(void *to, const void *from, int bytes,
                                         uint64_t *barrier) {
    asm volatile("{\n\t.reg .b64 once;\n"
                 "\tcreatepolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
                 "\tcp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %2, [%3], once;\n\t}"
                 ::"r"(mn_smem_addr(to)), "l"(from), "r"(bytes),
                 "r"(mn_smem_addr(barrier)) : "memory");
}

/* What all lanes of a warp have: known to be the same, so that branches by it go one way. */
__device__ inline unsigned mn_decode_uniform(unsigned x) {
    return __reduce_or_sync(0xffffffffu, x);
}

/* A place in shared memory that is worked out here, and not where it is used. */
__device__ inline uint32_t mn_decode_materialize(uint32_t place) {
    asm volatile("" : "+r"(place));
    return place;
}

__device__ inline uint2 mn_decode_load_shared(uint32_t place) {
    uint2 two;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(two.x), "=r"(two.y) : "r"(place)
                 : "memory");
    return two;
}

/* All warps that multiply. */
__device__ inline void mn_decode_consumer_sync(void) {
    asm volatile("bar.sync 1, %0;" ::"n"((int)MN_DECODE_THREADS) : "memory");
}

/* ---- words ----------------------------------------------------------------------------------- */

__device__ inline void mn_decode_store_word(const mn_decode_pipe &place, int word, uint32_t two) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(place.words + word), "r"(two)
                 : "memory");
}

/* Four neighbours: two words, as they were found. */
struct mn_decode_word2 {
    uint32_t a, b;

    /* As if they had been found, whatever they are. */
    __device__ void none(void) {
        a = b = 0;
    }

    /* Nothing waits for them here. */
    __device__ void fetch(const char *words) {
        asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
                     : "=r"(a), "=r"(b) : "l"(words) : "memory");
    }

    /* MN_DECODE_SENTINEL: one of them is not there. */
    __device__ uint32_t most(void) const {
        return max(a, b);
    }

    __device__ uint2 elements(void) const {
        return make_uint2(a, b);
    }
};

/* The word of one number. */
struct mn_decode_word1 {
    uint32_t a;

    __device__ void none(void) {
        a = 0;
    }

    __device__ void fetch(const char *word) {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(a) : "l"(word) : "memory");
    }

    __device__ uint32_t most(void) const {
        return a;
    }

    __device__ float number(int odd) const {
        return __uint_as_float(odd ? a & 0xffff0000u : a << 16);
    }
};

#endif

/* ---- elements of bf16 -------------------------------------------------------------------------
 * */

__device__ inline float mn_bf16_low(uint32_t two) {
    return __uint_as_float(two << 16);
}

__device__ inline float mn_bf16_high(uint32_t two) {
    return __uint_as_float(two & 0xffff0000u);
}

__device__ inline uint32_t mn_bf16_pack2(float low, float high) {
    uint32_t two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}

__device__ inline float mn_bf16_rounded(float x) {
    return mn_bf16_low(mn_bf16_pack2(x, 0.0f));
}

/* Two instructions: off by |x| 2^-24 of itself; below the smallest normal float 0. */
__device__ inline float mn_decode_exp(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.44269504f * x));
    return y;
}

/* One instruction: off by 2^-22 of itself. */
__device__ inline float mn_decode_rsqrt(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}    // namespace mneme::decode

#endif
