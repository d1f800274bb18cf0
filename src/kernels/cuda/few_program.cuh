/* few_program.cuh - what the blocks of a program (kernels/few.h) are told, and the shared memory of
 * one.
 *
 * A block reads one note for each stage, which the host has written for it (few_build.cu): the
 * rows of weights it multiplies and what becomes of the sums. Columns of a product are cut into
 * strips of eight; a unit is a strip, or two strips of the same columns of two products, with all
 * that follows from them.
 *
 * Numbers that later stages read travel as flagged words: two of bf16 and the number of the run, in
 * eight bytes that are written at once. Who reads them looks until the run is right: nothing else
 * tells that they are there. */
#ifndef MN_KERNELS_CUDA_FEW_PROGRAM_CUH
#define MN_KERNELS_CUDA_FEW_PROGRAM_CUH

#include "kernels/cuda/few_work.cuh"

enum {
    MN_FEW_WARPS = 8,                                // that multiply; one more brings weights
    MN_FEW_THREADS = 32 * MN_FEW_WARPS,
    MN_FEW_COLUMNS = MN_FEW_TOGETHER,                // of a strip
    MN_FEW_SPAN = 128,                               // numbers of a chunk that a warp has
    MN_FEW_CHUNK = MN_FEW_SPAN * MN_FEW_WARPS,       // numbers of a row in a piece
    MN_FEW_CHUNKS = 4,
    MN_FEW_ROW = 2 * MN_FEW_CHUNK + 64,              // bytes apart: other banks
    MN_FEW_PIECE = MN_FEW_COLUMNS * MN_FEW_ROW,      // a strip's part of a chunk
    MN_FEW_SLOTS = 11,                               // pieces on their way or not used yet
    MN_FEW_STRIPS = 8,                               // of a block in a stage
    MN_FEW_NOTES = 6,                                // stages ahead of which a block knows
    MN_FEW_NOTE_BYTES = 2560,
    MN_FEW_RECALLED = 32 * MN_FEW_WARPS,             // rows of a memory, at most
    MN_FEW_TILE = 8,                                 // columns of a memory that a block has
    MN_FEW_NOWHERE = -1,
};

enum mn_few_stage_kind { MN_FEW_REST, MN_FEW_MULTIPLY, MN_FEW_RECALL };

/* How the row of a product comes: as it is, normalised, normalised in groups and gated. */
enum mn_few_way { MN_FEW_AS_IT_IS, MN_FEW_NORMALISED, MN_FEW_GATED };

/* What becomes of a unit's sums: stored; added to something as well; f(first) times second; a
 * convolution of one token; a list of small works. */
enum mn_few_form { MN_FEW_STORED, MN_FEW_ADDED, MN_FEW_FUNCTION, MN_FEW_CONVOLVED, MN_FEW_LISTED };

/* Numbers of bf16 in memory, or, where `flagged`, words of this program, `at` bytes from its
 * beginning. */
struct mn_few_source {
    int64_t at;
    int flagged;
    short step, odd;      // step: 0 where one number serves all; odd: the upper one of a word
};

struct mn_few_strip {
    const char *rows;
    int step, n_rows;     // bytes from row to row
};

/* From its first column on. Words: bytes from the beginning of the program, or MN_FEW_NOWHERE. */
struct alignas(16) mn_few_unit {
    unsigned char form, n_strips, strip[2], n_rows, f, narrow, n_ends;
    int first_end, to_words, c_words[2];
    int N;                // of the product
    mn_bf16 *c[2];
    const mn_bf16 *bias[2];
    mn_bf16 *to;          // of form ADDED, FUNCTION, CONVOLVED
    mn_few_source plus;
    const char *taps;
    const char *taps_bias;
    const float *tail0;
    float *tail;
    int wide_taps, wide_bias;
};

/* Input of a small work of a list: value `from` of the unit, or where that is -1, memory, of which
 * one number serves `per` columns. */
struct mn_few_input {
    mn_few_source source;
    short from, wide;
    int per;
};

struct alignas(16) mn_few_end {
    short kind, f, narrow, wide;
    int per, to_words;    // columns of one result
    float scale, shift;
    char *to;
    mn_few_input in[2];
    int n_inputs;
};

struct alignas(16) mn_few_products_note {
    int K, chunks, n_strips, n_units, way;
    int group;            // warps whose numbers are normalised together
    int sigmoid;          // the gate
    int wrap;             // number k is weighted by number k & wrap
    float inverse_width, epsilon;
    mn_few_source x, z;
    const mn_bf16 *weight;
    mn_bf16 *row;         // where the row, made, is stored; NULL: by another block, or not at all
    mn_few_strip strip[MN_FEW_STRIPS];
    mn_few_unit unit[MN_FEW_STRIPS];    // and behind the last that is there the ends
};

/* A tile of a memory: eight columns of a head. */
struct alignas(16) mn_few_memory_note {
    int K, V, by_channel, erases, has_w, has_beta, has_g, o_words;
    float scale;
    struct {
        int there, is_l2, root;
        float epsilon;
        const mn_bf16 *weight;
        mn_bf16 *to;      // where the row, made, is stored; or NULL
    } front[MN_FEW_FRONTS];
    mn_few_source q, e, w, v, beta, g;
    float *state;
    mn_bf16 *o;
};

struct alignas(16) mn_few_note {
    int kind, next_bytes;    // of the note behind this one
    int ends_at, pad;        // bytes from here to the ends
    union {
        mn_few_products_note products;
        mn_few_memory_note memory;
    };
};
static_assert(sizeof(mn_few_note) + MN_FEW_ENDINGS * sizeof(mn_few_end) <= MN_FEW_NOTE_BYTES,
              "a note");

/* In front of a program. */
struct mn_few_head {
    alignas(128) unsigned run;     // how often it has run
    alignas(128) unsigned left;    // blocks that have ended this time
};

/* Where a block's notes begin, from the program's beginning; and the bytes of the first. */
struct mn_few_start {
    int64_t at, bytes;
};

struct alignas(128) mn_few_block {
    unsigned char ring[MN_FEW_SLOTS][MN_FEW_PIECE];
    alignas(16) unsigned char note[MN_FEW_NOTES][MN_FEW_NOTE_BYTES];
    alignas(16) mn_bf16 row[MN_FEW_CHUNKS * MN_FEW_CHUNK];
    alignas(16) float sums[2][MN_FEW_STRIPS][MN_FEW_COLUMNS][MN_FEW_WARPS + 2];
    float squares[2][MN_FEW_WARPS];
    alignas(16) float2 columns[2][MN_FEW_WARPS][MN_FEW_TILE];
    alignas(16) float4 shared[2][MN_FEW_WARPS];
    float values[MN_FEW_WARPS][2 + MN_FEW_ENDINGS][MN_FEW_COLUMNS];
    uint64_t full[MN_FEW_SLOTS], empty[MN_FEW_SLOTS];
    uint64_t note_full[MN_FEW_NOTES], note_empty[MN_FEW_NOTES];
};

/* Where a warp stands: in the ring of weights, in that of notes, in which half of what is there
 * twice. */
struct mn_few_place {
    int slot, note, half;
    unsigned turn, note_turn, run;
    const char *program;

    __device__ void next_slot(void) {
        if (++slot == MN_FEW_SLOTS) slot = 0, turn ^= 1;
    }

    __device__ void next_note(void) {
        if (++note == MN_FEW_NOTES) note = 0, note_turn ^= 1;
    }
};

/* ---- barriers of shared memory --------------------------------------------------------------- */

__device__ inline uint32_t mn_few_shared_at(const void *at) {
    return (uint32_t)__cvta_generic_to_shared(at);
}

#if __CUDA_ARCH__ >= 900

__device__ inline void mn_few_open(uint64_t *barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(mn_few_shared_at(barrier)), "r"(count)
                 : "memory");
}

__device__ inline void mn_few_wait(uint64_t *barrier, unsigned turn) {
    asm volatile("{\n\t.reg .pred there;\n"
                 "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n"
                 "\t@!there bra again;\n\t}"
                 ::"r"(mn_few_shared_at(barrier)), "r"(turn) : "memory");
}

__device__ inline void mn_few_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(mn_few_shared_at(barrier)) : "memory");
}

/* Arrives at a barrier whose phase ends when `bytes` have come, too. */
__device__ inline void mn_few_expect(uint64_t *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                 ::"r"(mn_few_shared_at(barrier)), "r"(bytes) : "memory");
}

__device__ inline void mn_few_bring(void *to, const void *from, int bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(mn_few_shared_at(to)), "l"(from), "r"(bytes),
                 "r"(mn_few_shared_at(barrier)) : "memory");
}

/* All warps that multiply. */
__device__ inline void mn_few_meet(void) {
    asm volatile("bar.sync 1, %0;" ::"n"((int)MN_FEW_THREADS) : "memory");
}

/* ---- flagged words --------------------------------------------------------------------------- */

__device__ inline void mn_few_say(char *word, uint32_t two, unsigned run) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word),
                 "l"((uint64_t)run << 32 | two) : "memory");
}

/* Four neighbours as they were found: a pack of bf16, or two words. */
struct mn_few_four {
    uint64_t a, b;

    /* From number i on, a multiple of four. Nothing waits for it here. */
    __device__ void ask(const mn_few_source &from, const char *program, int i) {
        const char *at = (from.flagged ? program : nullptr) + from.at;
        at += (int64_t)i << (1 + from.flagged);
        b = 0;
        asm volatile("{\n\t.reg .pred words;\n\tsetp.ne.s32 words, %3, 0;\n"
                     "\t@words ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];\n"
                     "\t@!words ld.relaxed.gpu.global.u64 %0, [%2];\n\t}"
                     : "=l"(a), "+l"(b) : "l"(at), "r"(from.flagged) : "memory");
    }

    __device__ bool there(const mn_few_source &from, unsigned run) const {
        return !from.flagged || ((uint32_t)(a >> 32) == run && (uint32_t)(b >> 32) == run);
    }

    __device__ uint2 numbers(const mn_few_source &from) const {
        return make_uint2((uint32_t)a, from.flagged ? (uint32_t)b : (uint32_t)(a >> 32));
    }
};

/* Number i alone. */
struct mn_few_one {
    uint64_t a;

    __device__ void ask(const mn_few_source &from, const char *program, int i) {
        const char *at = from.flagged ? program + from.at + i / 2 * 8
                                      : (const char *)from.at + (int64_t)i * 2;
        asm volatile("{\n\t.reg .pred words;\n\t.reg .b16 one;\n\tsetp.ne.s32 words, %2, 0;\n"
                     "\tmov.b16 one, 0;\n"
                     "\t@words ld.relaxed.gpu.global.u64 %0, [%1];\n"
                     "\t@!words ld.relaxed.gpu.global.b16 one, [%1];\n"
                     "\t@!words cvt.u64.u16 %0, one;\n\t}"
                     : "=l"(a) : "l"(at), "r"(from.flagged) : "memory");
    }

    __device__ bool there(const mn_few_source &from, unsigned run) const {
        return !from.flagged || (uint32_t)(a >> 32) == run;
    }

    __device__ float number(const mn_few_source &from, int i) const {
        const uint32_t two = (uint32_t)a;
        return __uint_as_float(from.flagged && i % 2 ? two & 0xffff0000u : two << 16);
    }
};

#endif

/* ---- numbers of bf16 ------------------------------------------------------------------------- */

__device__ inline float mn_few_low(uint32_t two) {
    return __uint_as_float(two << 16);
}

__device__ inline float mn_few_high(uint32_t two) {
    return __uint_as_float(two & 0xffff0000u);
}

__device__ inline uint32_t mn_few_bits(float x) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

__device__ inline float mn_few_round(float x) {
    return __bfloat162float(__float2bfloat16_rn(x));
}

__device__ inline uint32_t mn_few_two(float low, float high) {
    return mn_few_bits(low) | mn_few_bits(high) << 16;
}

#endif
