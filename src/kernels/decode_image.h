/* decode_image.h - a megakernel as its kernel reads it: what src/decode writes and
 * kernels/cuda/decode/megakernel.cu goes through.
 *
 * A block reads one instruction for each stage, which the host has written for it: the rows of
 * weights it multiplies and what becomes of the sums. Columns of a product are cut into column
 * tiles of eight; an output tile is a column tile, or two column tiles of the same columns of
 * two products, with all that follows from them.
 *
 * Numbers that later stages read travel as hand-off words: two of bf16, or one of float32,
 * stored at once. Who reads a word polls until it is no longer MN_DECODE_SENTINEL, which no two
 * results are: nothing else tells that they are there. There are two sets of words; a run makes
 * those of the next one sentinels. */
#ifndef MN_KERNELS_DECODE_IMAGE_H
#define MN_KERNELS_DECODE_IMAGE_H

#include "kernels/decode.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#define MN_DECODE_BOTH __host__ __device__
#define MN_DECODE_ALIGNAS alignas
typedef __nv_bfloat16 mn_decode_bf16;
#else
#define MN_DECODE_BOTH
#define MN_DECODE_ALIGNAS _Alignas
typedef uint16_t mn_decode_bf16;
#endif

enum {
    MN_DECODE_WARPS = 8,                                // that multiply; one more loads weights
    MN_DECODE_THREADS = 32 * MN_DECODE_WARPS,
    MN_DECODE_TILE_N = MN_DECODE_COL_TILE,              // columns of a column tile
    MN_DECODE_WARP_K = 128,                             // elements of a chunk that a warp has
    MN_DECODE_CHUNK = MN_DECODE_WARP_K * MN_DECODE_WARPS,    // elements of a row in a fragment
    MN_DECODE_CHUNKS = 4,
    MN_DECODE_COL_TILES = 8,                            // of a block in a stage
    MN_DECODE_INSTR_BYTES = 2560,
    MN_DECODE_STATE_ROWS = 32 * MN_DECODE_WARPS,        // rows of a matrix state, at most
    MN_DECODE_TILE_V = 8,                               // columns of a state that a block has
    MN_DECODE_PREFETCHED = 4,                           // inputs that a list loads ahead
    MN_DECODE_VALUES = 2 + MN_DECODE_EPILOGUES + MN_DECODE_PREFETCHED,
    MN_DECODE_NO_WORDS = -1,
    MN_DECODE_WORD_SETS = 2,                            // of this run, and of the next
    MN_DECODE_COPIES = 16,                              // of a block
    MN_DECODE_JOBS = 5,                                 // small works of an instruction
    MN_DECODE_JOB_BYTES = 432,
    MN_DECODE_ARGS_BYTES = 1280,                        // of a step's arguments, at most
    MN_DECODE_PUBLISHED = 6,                            // results of an instruction
    MN_DECODE_SCRATCH = 18432,                          // bytes of shared memory of a step
    MN_DECODE_ROOM = 163840,                            // of one that takes the ring of weights
};

#define MN_DECODE_SENTINEL 0xffffffffu    // results that are no number are 0x7fff here

/* Words are spread: the second cache serves a line to one reader after the other, and all blocks
 * poll the same words. 16 elements of bf16, or 8 of float32, are at the beginning of each line. */
enum { MN_DECODE_LINE = 128, MN_DECODE_PER_LINE = 16 };

/* Bytes from the first word, which begins a line, to that of element i. */
MN_DECODE_BOTH static inline int mn_decode_word_at(unsigned i) {
    return (int)(i / MN_DECODE_PER_LINE * MN_DECODE_LINE + i % MN_DECODE_PER_LINE / 2 * 4);
}

/* The same from the word of another element, at `at`. */
MN_DECODE_BOTH static inline int mn_decode_word_from(int at, unsigned i) {
    const unsigned before = (unsigned)at % MN_DECODE_LINE / 2;
    return at - (int)before * 2 + mn_decode_word_at(before + i);
}

typedef enum mn_decode_opcode {
    MN_DECODE_NOP,
    MN_DECODE_COPY,
    MN_DECODE_GEMM,
    MN_DECODE_RECURRENCE,
    MN_DECODE_SMALL,
    MN_DECODE_STEP,
    MN_DECODE_ATTEND,
    MN_DECODE_HYPER,
    MN_DECODE_PALIMPSA,
    MN_DECODE_KLA,
    MN_DECODE_BAYES,
    MN_DECODE_STREAM
} mn_decode_opcode;

/* Whether a stage reads and writes memory as launches of their own do (mn_decode_work_instr). */
MN_DECODE_BOTH static inline bool mn_decode_is_work(int kind) {
    return kind >= MN_DECODE_SMALL && kind <= MN_DECODE_HYPER;
}

/* How the row of a product comes: as it is, normalised, normalised in groups and gated. */
typedef enum mn_decode_prologue {
    MN_DECODE_PLAIN,
    MN_DECODE_NORMED,
    MN_DECODE_GATED
} mn_decode_prologue;

/* What becomes of an output tile's sums: stored, perhaps in two places; added to something as
 * well; f(first), times second if there is one; a convolution of one token; stored in float32 as
 * well; -exp(A) softplus(x + dt), of which the list is kept; a list of small works, which may
 * stand without any sums. */
typedef enum mn_decode_epilogue_form {
    MN_DECODE_EPI_STORE,
    MN_DECODE_EPI_ADD,
    MN_DECODE_EPI_ACT,
    MN_DECODE_EPI_CONV,
    MN_DECODE_EPI_F32,
    MN_DECODE_EPI_DECAY,
    MN_DECODE_EPI_LIST
} mn_decode_epilogue_form;

/* Words of the megakernel, bytes from its beginning. What lies elsewhere is copied to words
 * first. */
typedef struct mn_decode_source {
    int at;
    short step, odd;      // step: 0 where one element serves all; odd: the upper one of a word
} mn_decode_source;

typedef struct mn_decode_col_tile {
    const char *rows;
    int step, n_rows;     // bytes from row to row
} mn_decode_col_tile;

/* From its first column on. `to`: where the last result goes; its words are to_handoff bytes from
 * the beginning of the megakernel, or MN_DECODE_NO_WORDS. `c`: the products, unless the last result
 * is one. */
typedef struct mn_decode_out_tile {
    MN_DECODE_ALIGNAS(16) unsigned char form;
    unsigned char n_col_tiles, col_tile[2], n_rows, f;
    unsigned char biased : 1, stores_c : 1;    // some bias; some product is stored as well
    unsigned char n_epis;
    int first_epi, to_handoff, N;              // N: of the product
    unsigned char prefetched_step[4], prefetched_wide[4];
    int prefetched_per[4];                     // columns that an element serves
    mn_decode_bf16 *to, *c[2];
    const mn_decode_bf16 *bias[2];
    const float *wide_bias[2];                 // of which `bias` is made, or NULL
    mn_decode_source plus;
    union {
        struct {
            const mn_decode_bf16 *taps, *taps_bias;
            const float *tail0;
            float *tail;
        };
        const char *prefetched[MN_DECODE_PREFETCHED];    // what a list reads
    };
} mn_decode_out_tile;

/* Input of a small work of a list: value `from` of the output tile (products, results, what was
 * loaded ahead), or where that is -1, words, of which one element serves `per` columns. */
typedef struct mn_decode_epi_input {
    mn_decode_source source;
    int from, per;
} mn_decode_epi_input;

typedef struct mn_decode_epi_instr {
    MN_DECODE_ALIGNAS(16) short kind;
    short f, narrow, wide;
    int per, to_handoff;    // columns of one result
    float scale, shift;
    char *to;
    mn_decode_epi_input in[2];
    int n_inputs;
} mn_decode_epi_instr;

typedef struct mn_decode_gemm_instr {
    MN_DECODE_ALIGNAS(16) int K;
    unsigned char way, chunks;
    unsigned char group;               // warps whose elements are normalised together; 0: none are,
                                       // or parts of warps
    unsigned char sigmoid;             // the gate
    unsigned char n_col_tiles, n_out_tiles;
    unsigned char gate_first;          // the norm is of what has been gated
    unsigned char lanes;               // threads of a group that is less than a warp; or 0
    int wrap;             // element k is weighted by element k & wrap
    float inverse_width, epsilon;
    int x, z;             // words of the row, and of its gate
    const mn_decode_bf16 *weight;
    mn_decode_bf16 *row;  // where the row, made, is stored; NULL: by another block, or not at all
    int row_handoff;      // its words, or MN_DECODE_NO_WORDS
    mn_decode_col_tile col_tile[MN_DECODE_COL_TILES];
    mn_decode_out_tile out_tile[MN_DECODE_COL_TILES];    // behind the last that is there: the list
} mn_decode_gemm_instr;

/* What a norm of queries or keys divides by: 1 / sqrt(squares + plus), or `most` if that is
 * less. */
typedef struct mn_decode_qk_norm {
    int there;
    float plus, most;
    mn_decode_bf16 *to;    // where the row, made, is stored; or NULL
} mn_decode_qk_norm;

/* A result of a column, number by number: where it goes, and the words that others read, or
 * MN_DECODE_NO_WORDS. */
typedef struct mn_decode_result_at {
    mn_decode_bf16 *to;    // NULL: it is none
    int handoff, none;
} mn_decode_result_at;

/* A tile of a matrix state: eight columns of a head. */
typedef struct mn_decode_recurrence_instr {
    MN_DECODE_ALIGNAS(16) int K;
    int V, by_channel, delta_rule, has_beta, has_g, o_handoff;
    float scale;
    mn_decode_qk_norm front[MN_DECODE_QK_NORMS];
    mn_decode_source q, e, v, beta, g, plus;
    float *state;
    mn_decode_bf16 *o;
    mn_decode_result_at sum;    // o + plus
} mn_decode_recurrence_instr;

/* A tile of Palimpsa's memory with what is around it: eight columns of a head.
 *
 *   q, k to unit length    v = raw `by`    ip = exp prior
 *   I = a I + (1 - a) ip + k^2 b    mu = (a I mu + k v) / I    o = scale mu'q    sum = o + skip raw
 *
 * `v`: raw. Without `by` v is raw, without `skip` there is no sum. */
typedef struct mn_decode_palimpsa_instr {
    MN_DECODE_ALIGNAS(16) int K;
    int V, head, column;
    float scale;
    int has_by, prior_wide, none;
    mn_decode_qk_norm front[MN_DECODE_QK_NORMS];
    mn_decode_source q, k, v, by, b, g;        // g: of float32
    float *mean, *importance;                  // of the first column
    const void *prior;                         // of the head: float32 where it is `prior_wide`
    mn_decode_bf16 *exp_prior;                 // where ip is stored in both types; or NULL
    float *wide_prior;
    const mn_decode_bf16 *skip;                // of the head; or NULL
    mn_decode_result_at gated, o, skipped, sum;
} mn_decode_palimpsa_instr;

enum {
    MN_DECODE_KLA_COLUMNS = 8,                 // channels of a block
    MN_DECODE_KLA_LANES = 16,                  // of a channel
    MN_DECODE_KLA_SLOTS = 2,                   // of a lane, at most
    MN_DECODE_KLA_DYNAMICS = 3,                // delta, lambda_log, process_noise
};

/* Eight channels of Kalman Linear Attention with what is around them.
 *
 *   k, q to unit length    a, p from three parameters (ref/kla_discretise.c)
 *   lam = lam / den + prec k^2    eta = a eta / den + prec v k    y = sum_s q eta / lam
 *   sum = y + weight z    out = sum gate
 *
 * Without `weight` there is no sum, without a gate nothing behind it. */
typedef struct mn_decode_kla_instr {
    MN_DECODE_ALIGNAS(16) int K;
    int column, from_prior, mode;
    int has_gate, weight_step, weight_wide, none;
    mn_decode_qk_norm front[MN_DECODE_QK_NORMS];    // of q, of k
    mn_decode_source q, k, v, prec, z, gate;
    const float *dynamics[MN_DECODE_KLA_DYNAMICS];  // of the first channel, as are those below
    mn_decode_bf16 *rounded[MN_DECODE_KLA_DYNAMICS];
    float *a, *p, *lam, *eta;
    const void *weight;                        // of z; or NULL
    mn_decode_result_at y, weighted, sum, out;
} mn_decode_kla_instr;

enum { MN_DECODE_BAYES_WIDEST = 128 };         // channels, and columns of a group

/* A noise group of a head of the Bayesian Layer with what is around it: q and k normalised, a decay
 * that all channels of the head share, a constant p0. V: columns of the group. */
typedef struct mn_decode_bayes_instr {
    MN_DECODE_ALIGNAS(16) int K;
    int V, head, group;
    float p0;
    int first, none[2];                        // first: column of the group, of the head
    mn_decode_qk_norm front[MN_DECODE_QK_NORMS];
    mn_decode_source q, k, v, la, l2, r2;
    mn_decode_bf16 *la_to, *p0_to;             // of the head: K of them, and one; or NULL
    mn_decode_result_at o;                     // of the group's columns
    MN_DECODE_ALIGNAS(16) unsigned char args[MN_DECODE_ARGS_BYTES];    // mn_bayes_args
} mn_decode_bayes_instr;

/* Numbers that are older than the megakernel, to words, and to memory where `to` is there. Those of
 * the megakernel's row of a table, where `row` is not 0. */
typedef struct mn_decode_copy {
    const mn_decode_bf16 *from;
    mn_decode_bf16 *to;
    const int32_t *index;
    int64_t row;                // elements from row to row
    int words, count;           // up to MN_DECODE_CHUNK
} mn_decode_copy;

typedef struct mn_decode_copy_instr {
    MN_DECODE_ALIGNAS(16) int n;
    mn_decode_copy of[MN_DECODE_COPIES];
} mn_decode_copy_instr;

/* Results in memory that later stages read as words: `count` elements from an even one on. */
typedef struct mn_decode_publication {
    const mn_decode_bf16 *from;
    int words, count;
} mn_decode_publication;

/* Small works, one after the other, each as the kernel knows it: with pointers, so aligned. */
typedef struct mn_decode_small_instr {
    MN_DECODE_ALIGNAS(16) int n;
    MN_DECODE_ALIGNAS(16) unsigned char job[MN_DECODE_JOBS][MN_DECODE_JOB_BYTES];
} mn_decode_small_instr;

/* A token's step of an operator: columns from `column` on of a head, by the arguments of
 * mneme.h. */
typedef struct mn_decode_step_instr {
    MN_DECODE_ALIGNAS(16) int step;    // a row of decode_steps.def
    int head, column, none;
    unsigned char args[MN_DECODE_ARGS_BYTES];
} mn_decode_step_instr;

/* Parts slot, slot + n_slots, ... of key-value head `head`, of the token's attention; or where
 * n_slots is 0 the sum of the parts of query head `head`. Where they come `by_words`, q (all query
 * heads of the key-value head), k and v are read as such, without a barrier in front. */
typedef struct mn_decode_attend_instr {
    MN_DECODE_ALIGNAS(16) int head;
    int slot, n_slots, by_words;
    mn_decode_source q, k, v;
    mn_decode_attention of;
} mn_decode_attend_instr;

/* The keys of an attention cut into `n_splits` splits a head, whatever their number; whether the
 * ring of weights brings them (mn_decode_stream_instr). */
enum {
    MN_DECODE_STREAMS = 1,
    MN_DECODE_STREAM_WIDEST = 128,    // channels of a head
    MN_DECODE_STREAM_HEADS = 4,       // query heads of a key-value head
    MN_DECODE_SPLITS = 32,            // of a head, at most
};

/* Splits of a head: those of all J heads keep the blocks of a large machine busy. By J alone, so
 * that the order of sums does not go by the machine. */
MN_DECODE_BOTH static inline int64_t mn_decode_splits(int64_t J) {
    const int64_t n = 128 / J, most = MN_DECODE_SPLITS;
    return n > most ? most : n < 4 ? 4 : n;
}

/* Numbers from a split's result to that of the next: V sums, the largest score, the sum of weights;
 * and so many bytes of words have all of them. */
MN_DECODE_BOTH static inline int64_t mn_decode_split_row(int64_t V) {
    return V + 4;
}

MN_DECODE_BOTH static inline int64_t mn_decode_splits_bytes(int64_t H, int64_t J, int64_t V) {
    const int64_t bytes = 4 * H * mn_decode_splits(J) * mn_decode_split_row(V);
    return (bytes + MN_DECODE_LINE - 1) / MN_DECODE_LINE * MN_DECODE_LINE;
}

/* Splits slot, slot + n_slots, ... of key-value head `head`, for all its query heads: keys and
 * values older than the token come through the ring, and results (H, n_splits, V + 4) become words
 * of float32, one behind the other from `splits` on. Or where n_slots is 0 the sum of the splits of
 * query head `head`, to words at `o_handoff` and memory. No barrier stands in front of either. */
typedef struct mn_decode_stream_instr {
    MN_DECODE_ALIGNAS(16) int head;
    int slot, n_slots, n_splits, splits, o_handoff, group;    // group: query heads of each
    mn_decode_source q, k, v;
    mn_decode_attention of;
} mn_decode_stream_instr;

/* Parts slot, slot + n_slots, ... of a branch or head, in a phase of HyperMLP; or its output. */
typedef struct mn_decode_hyper_instr {
    MN_DECODE_ALIGNAS(16) int phase;
    int head, slot, n_slots;
    mn_decode_hyper of;
} mn_decode_hyper_instr;

/* All read and write memory as launches of their own do, and then publish results. */
typedef struct mn_decode_work_instr {
    MN_DECODE_ALIGNAS(16) int n_published;
    mn_decode_publication published[MN_DECODE_PUBLISHED];
    union {
        mn_decode_small_instr small;
        mn_decode_step_instr step;
        mn_decode_attend_instr attend;
        mn_decode_hyper_instr hyper;
    };
} mn_decode_work_instr;

typedef struct mn_decode_instr {
    MN_DECODE_ALIGNAS(16) int kind;
    int next_bytes;         // of the instruction behind this one
    int epis_at;            // bytes from here to the lists of small works
    unsigned sync;          // the grid-wide barrier in front, counted from 1; 0: none
    union {
        mn_decode_gemm_instr gemms;
        mn_decode_recurrence_instr memory;
        mn_decode_palimpsa_instr palimpsa;
        mn_decode_kla_instr kla;
        mn_decode_bayes_instr bayes;
        mn_decode_stream_instr stream;
        mn_decode_copy_instr copy;
        mn_decode_work_instr work;
    };
} mn_decode_instr;

/* In front of a megakernel. */
typedef struct mn_decode_header {
    MN_DECODE_ALIGNAS(128) unsigned run;     // how often it has run
    int n_gather_blocks;           // blocks, the first ones, that copy rows of a table
    const int32_t *index;          // of which this one
    MN_DECODE_ALIGNAS(128) unsigned left;    // blocks that have ended this time
    MN_DECODE_ALIGNAS(128) unsigned arrived; // at barriers of the grid, this time
} mn_decode_header;

/* Where a block's instructions begin, from the megakernel's beginning; and the bytes of the
 * first. */
typedef struct mn_decode_entry {
    int64_t at, bytes;
} mn_decode_entry;

/* What a launch of a megakernel is told. */
typedef struct mn_decode_launch_args {
    int n_stages;
    int handoff_at, words;    // where words begin, and how many bytes of them a run has
    int ragged;               // a row's last chunk is not whole
    int works;                // there are stages of small works, steps of operators or over caches
    int attends, hyper;       // there is attention behind barriers; there is HyperMLP
    int streams;              // there is attention without
    int small;                // there are small works that are a stage
    unsigned steps;           // bits of the rows of decode_steps.def that there are steps of
} mn_decode_launch_args;

/* Bytes of shared memory that parts of attention over keys of K channels take: turns, weights of
 * four heads, sums, the four heads' queries (attention/attention_step.cuh). */
MN_DECODE_BOTH static inline int64_t mn_decode_attend_bytes(int64_t K) {
    enum { HEADS = 4, COLUMNS = 8 };
    const int64_t numbers = MN_DECODE_ATTEND_WIDEST + HEADS * MN_DECODE_ATTEND_KEYS +
                            COLUMNS * MN_DECODE_THREADS + MN_DECODE_WARPS + 2 + HEADS * K;
    return (4 * numbers + 15) / 16 * 16;
}

/* A step that stages know: the operator, and the columns of a head that a block has at once; 0: it
 * has a whole group of a head. */
typedef enum mn_decode_step_kind {
#define DECODE_STEP(op, folder, columns, results, memory) MN_DECODE_STEP_##op,
#include "kernels/decode_steps.def"
#undef DECODE_STEP
    MN_DECODE_STEPS
} mn_decode_step_kind;

#ifdef __cplusplus
extern "C" {
#endif

/* Blocks of a megakernel on the machine in use; 0: it runs none. */
int mn_megakernel_blocks(void);

/* Whether stages can make this step, from arguments whose strides are filled in. */
bool mn_megakernel_takes_step(mn_decode_step_kind step, const void *args);

/* [begin, end) of a small work as the kernel knows it, MN_DECODE_JOB_BYTES from `to` on:
 * elements, channels of a convolution or rows of a norm. Elements begin at a multiple of four.
 * `turn`: the thread that has the first, a multiple of 32; `waits`: for works of the instruction
 * in front of it. */
void mn_megakernel_fill_job(void *to, const mn_decode_op *work, int64_t begin, int64_t end,
                            int turn, bool waits);

/* Launches a megakernel that lies at `image` in the device's memory; 0 or a cudaError_t. */
int mn_megakernel_start(const mn_decode_launch_args *given, void *image, void *stream);

#ifdef __cplusplus
}
#endif

#endif
