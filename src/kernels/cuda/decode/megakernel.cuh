/* megakernel.cuh - what the blocks of a program (kernels/decode.h) are told, and the shared memory
 * of
 * one.
 *
 * A block reads one note for each stage, which the host has written for it (megakernel_build.cu):
 * the
 * rows of weights it multiplies and what becomes of the sums. Columns of a product are cut into
 * strips of eight; a unit is a strip, or two strips of the same columns of two products, with all
 * that follows from them.
 *
 * Numbers that later stages read travel as words: two of bf16, written at once. Who reads them
 * looks until they are no longer MN_FEW_UNSAID, which no two numbers are: nothing else tells that
 * they are there. There are two sets of words; a run makes those of the next one unsaid. */
#ifndef MN_KERNELS_CUDA_DECODE_MEGAKERNEL_CUH
#define MN_KERNELS_CUDA_DECODE_MEGAKERNEL_CUH

#include "kernels/cuda/prim/tma.cuh"
#include "kernels/cuda/decode/decode_elementwise.cuh"

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
    MN_FEW_EARLY = 4,                                // numbers that a list reads ahead
    MN_FEW_VALUES = 2 + MN_FEW_ENDINGS + MN_FEW_EARLY,
    MN_FEW_NOWHERE = -1,
    MN_FEW_SETS = 2,                                 // of words: of this run, and of the next
};

static const uint32_t MN_FEW_UNSAID = 0xffffffffu;    // numbers that are none are 0x7fff here

/* Words are spread: the second cache serves a line to one reader after the other, and all blocks
 * look for the same words. 16 numbers are at the beginning of each line. */
enum { MN_FEW_LINE = 128, MN_FEW_OF_LINE = 16 };

/* Bytes from the first word, which begins a line, to that of number i. */
__host__ __device__ inline int mn_few_word(unsigned i) {
    return (int)(i / MN_FEW_OF_LINE * MN_FEW_LINE + i % MN_FEW_OF_LINE / 2 * 4);
}

/* The same from the word of another number, at `at`. */
__host__ __device__ inline int mn_few_word_from(int at, unsigned i) {
    const unsigned before = (unsigned)at % MN_FEW_LINE / 2;
    return at - (int)before * 2 + mn_few_word(before + i);
}

enum mn_few_stage_kind { MN_FEW_REST, MN_FEW_COPY, MN_FEW_MULTIPLY, MN_FEW_RECALL };

/* How the row of a product comes: as it is, normalised, normalised in groups and gated. */
enum mn_few_way { MN_FEW_AS_IT_IS, MN_FEW_NORMALISED, MN_FEW_GATED };

/* What becomes of a unit's sums: stored; added to something as well; f(first), times second if
 * there is one; a convolution of one token; stored in float32 as well; -exp(A) softplus(x + dt), of
 * which the list is kept; a list of small works. */
enum mn_few_form {
    MN_FEW_STORED,
    MN_FEW_ADDED,
    MN_FEW_FUNCTION,
    MN_FEW_CONVOLVED,
    MN_FEW_WIDENED,
    MN_FEW_DECAYED,
    MN_FEW_LISTED
};

/* Words of the program, bytes from its beginning. What lies elsewhere is copied to words first. */
struct mn_few_source {
    int at;
    short step, odd;      // step: 0 where one number serves all; odd: the upper one of a word
};

struct mn_few_strip {
    const char *rows;
    int step, n_rows;     // bytes from row to row
};

/* From its first column on. `to`: where the last result goes; its words are to_words bytes from the
 * beginning of the program, or MN_FEW_NOWHERE. `c`: the products, unless the last result is one. */
struct alignas(16) mn_few_unit {
    unsigned char form, n_strips, strip[2], n_rows, f;
    bool biased : 1, keeps : 1;          // some bias; some product is stored as well
    unsigned char n_ends;
    int first_end, to_words, N;          // N: of the product
    unsigned char early_step[4], early_wide[4];
    int early_per[4];                    // columns that a number serves
    mn_bf16 *to, *c[2];
    const mn_bf16 *bias[2];
    mn_few_source plus;
    union {
        struct {
            const mn_bf16 *taps, *taps_bias;
            const float *tail0;
            float *tail;
        };
        const char *early[MN_FEW_EARLY];    // what a list reads; bytes from column to column
    };
};

/* Input of a small work of a list: value `from` of the unit (products, results, what was read
 * early), or where that is -1, words, of which one number serves `per` columns. */
struct mn_few_input {
    mn_few_source source;
    int from, per;
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
    int K;
    unsigned char way, chunks;
    unsigned char group;               // warps whose numbers are normalised together
    unsigned char sigmoid;             // the gate
    unsigned char n_strips, n_units, none[2];
    int wrap;             // number k is weighted by number k & wrap
    float inverse_width, epsilon;
    int x, z;             // words of the row, and of its gate
    const mn_bf16 *weight;
    mn_bf16 *row;         // where the row, made, is stored; NULL: by another block, or not at all
    mn_few_strip strip[MN_FEW_STRIPS];
    mn_few_unit unit[MN_FEW_STRIPS];    // and behind the last that is there the ends
};

/* A tile of a memory: eight columns of a head. */
struct alignas(16) mn_few_memory_note {
    int K, V, by_channel, erases, has_beta, has_g, o_words;
    float scale;
    struct {
        int there;
        float plus, most;    // by 1 / sqrt(squares + plus), or `most` if that is less
        mn_bf16 *to;         // where the row, made, is stored; or NULL
    } front[MN_FEW_FRONTS];
    mn_few_source q, e, v, beta, g;
    float *state;
    mn_bf16 *o;
};

/* Numbers that are older than the program, to words, and to memory where `to` is there. Those of
 * the program's row of a table, where `row` is not 0. */
enum { MN_FEW_COPIES = 16 };    // of a block
struct mn_few_copy {
    const mn_bf16 *from;
    mn_bf16 *to;
    const int32_t *index;
    int64_t row;                // numbers from row to row
    int words, count;           // up to MN_FEW_CHUNK
};
struct alignas(16) mn_few_copy_note {
    int n;
    mn_few_copy of[MN_FEW_COPIES];
};

struct alignas(16) mn_few_note {
    int kind, next_bytes;    // of the note behind this one
    int ends_at, pad;        // bytes from here to the ends
    union {
        mn_few_products_note products;
        mn_few_memory_note memory;
        mn_few_copy_note copy;
    };
};
static_assert(sizeof(mn_few_note) + MN_FEW_ENDINGS * sizeof(mn_few_end) <= MN_FEW_NOTE_BYTES,
              "a note");

/* In front of a program. */
struct mn_few_head {
    alignas(128) unsigned run;     // how often it has run
    int n_picking;                 // blocks, the first ones, that copy rows of a table
    const int32_t *index;          // of which this one
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
    alignas(16) float squares[2][MN_FEW_WARPS];
    alignas(16) float2 columns[2][MN_FEW_WARPS][MN_FEW_TILE];
    alignas(16) float4 shared[2][MN_FEW_WARPS];
    float values[MN_FEW_STRIPS][MN_FEW_VALUES][MN_FEW_COLUMNS];
    uint64_t full[MN_FEW_SLOTS], empty[MN_FEW_SLOTS];
    uint64_t note_full[MN_FEW_NOTES], note_empty[MN_FEW_NOTES];
};

/* Where a warp stands: in the ring of weights, in that of notes, in which half of what is there
 * twice. */
struct mn_few_place {
    int slot, note, half;
    unsigned turn, note_turn;
    const char *words;    // from here notes count bytes to words

    __device__ void next_slot(void) {
        if (++slot == MN_FEW_SLOTS) slot = 0, turn ^= 1;
    }

    __device__ void next_note(void) {
        if (++note == MN_FEW_NOTES) note = 0, note_turn ^= 1;
    }
};

#if __CUDA_ARCH__ >= 900

/* What is not read again in this run: the second cache keeps the rest of the program instead. */
__device__ inline void mn_few_bring_once(void *to, const void *from, int bytes,
                                         uint64_t *barrier) {
    asm volatile("{\n\t.reg .b64 once;\n"
                 "\tcreatepolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
                 "\tcp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %2, [%3], once;\n\t}"
                 ::"r"(mn_shared_at(to)), "l"(from), "r"(bytes),
                 "r"(mn_shared_at(barrier)) : "memory");
}

/* What all lanes of a warp have: known to be the same, so that branches by it go one way. */
__device__ inline unsigned mn_few_even(unsigned x) {
    return __reduce_or_sync(0xffffffffu, x);
}

/* A place in shared memory that is worked out here, and not where it is used. */
__device__ inline uint32_t mn_few_here(uint32_t place) {
    asm volatile("" : "+r"(place));
    return place;
}

__device__ inline uint2 mn_few_find(uint32_t place) {
    uint2 two;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(two.x), "=r"(two.y) : "r"(place)
                 : "memory");
    return two;
}

/* All warps that multiply. */
__device__ inline void mn_few_meet(void) {
    asm volatile("bar.sync 1, %0;" ::"n"((int)MN_FEW_THREADS) : "memory");
}

/* ---- words ----------------------------------------------------------------------------------- */

__device__ inline void mn_few_say(const mn_few_place &place, int word, uint32_t two) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(place.words + word), "r"(two)
                 : "memory");
}

/* Four neighbours: two words, as they were found. */
struct mn_few_four {
    uint32_t a, b;

    /* As if they had been found, whatever they are. */
    __device__ void none(void) {
        a = b = 0;
    }

    /* Nothing waits for them here. */
    __device__ void ask(const char *words) {
        asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
                     : "=r"(a), "=r"(b) : "l"(words) : "memory");
    }

    /* MN_FEW_UNSAID: one of them is not there. */
    __device__ uint32_t most(void) const {
        return max(a, b);
    }

    __device__ uint2 numbers(void) const {
        return make_uint2(a, b);
    }
};

/* The word of one number. */
struct mn_few_one {
    uint32_t a;

    __device__ void none(void) {
        a = 0;
    }

    __device__ void ask(const char *word) {
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

/* ---- numbers of bf16 ------------------------------------------------------------------------- */

__device__ inline float mn_few_low(uint32_t two) {
    return __uint_as_float(two << 16);
}

__device__ inline float mn_few_high(uint32_t two) {
    return __uint_as_float(two & 0xffff0000u);
}

__device__ inline uint32_t mn_few_two(float low, float high) {
    uint32_t two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}

__device__ inline float mn_few_round(float x) {
    return mn_few_low(mn_few_two(x, 0.0f));
}

/* Two instructions: off by |x| 2^-24 of itself; below the smallest normal float 0. */
__device__ inline float mn_few_exp(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.44269504f * x));
    return y;
}

/* One instruction: off by 2^-22 of itself. */
__device__ inline float mn_few_rsqrt(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
