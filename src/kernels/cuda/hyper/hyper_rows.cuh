/* hyper_rows.cuh - rows of a strip of HyperMLP and HyperGLU: what kernels that mix them share. */
#ifndef MN_KERNELS_CUDA_HYPER_HYPER_ROWS_CUH
#define MN_KERNELS_CUDA_HYPER_HYPER_ROWS_CUH

#include "kernels/cuda/attention/attention_strip_mma.cuh"
#include "kernels/cuda/hyper/hyper_step.cuh"
#include "kernels/cuda/prim/fmax.cuh"

namespace mneme::hyper {

using namespace attention;

/* rows of a strip of HyperMLP / HyperGLU: mixes, activation and their way back
 * (equations in ref/hyper.c).
 *
 * A thread has lags (in layout position, keys) and goes over four rows with what the mixing
 * parameters have for a lag, so that these are read once for four rows. Contractions over lags sum
 * 16 ranks of four rows at a time. The parameters lie by lag, in float, ranks padded with zeros to
 * a multiple of 16, four of them side by side for each lag, so that lanes with neighbouring lags
 * read what lies side by side (`mn_hyper_place`):
 *
 *   U (ranks / 4, lags, 4)    Vt (ranks / 4, lags, 4), turned    d (lags)
 *
 * A row of a strip keeps two numbers and for each of its mixes h = z U, h c and y c.
 * Norm l2 divides x1 before the activation; relu and everything after it are homogeneous, so it is
 * applied to the output like out_scale. */

enum { MN_HYPER_ROWS = 4, MN_HYPER_RANKS = 16, MN_HYPER_LAGS = 4, MN_HYPER_THREADS = 128 };
enum {
    MN_HYPER_SUMS = MN_HYPER_ROWS * MN_HYPER_RANKS,
    MN_HYPER_STEP = MN_HYPER_LAGS * MN_HYPER_THREADS,
};
enum { MN_HYPER_SCALE, MN_HYPER_NORM, MN_HYPER_FIRST = 4 };    // of a row

/* A call at work. Mixes are counted: the first ones of branches 0 .. Q-1, then H second ones. */
struct mn_hyper_params {
    mn_hyper_args p;
    mn_q_block s;
    int64_t ranks, lags;              // padded ranks; P, or 0 without parameters
    bool has_params[2];                    // first mix, second mix
    float *params;                    // (Q + H, (2 ranks + 1) lags)
    uint4 *pieces;                    // the same as operands of products of 16 lags
    float *diagonal;                  // and 1 + d of these
    int64_t n_pieces;                 // 0: rows do not go by them
    float *z[2], *base, *w, *g[2];    // matrices of a strip; base may be z[0], w may be base
    float *rows;                      // (tiles, H, rows, row_floats)
    int64_t row_floats;
    int branches;
};

/* Parameters of 16 lags as operands of products (hyper_rows_mma.cu). */
enum { PIECE_LAGS = 16, PIECE_ROWS = 16 };
enum { PIECE_DOWN_U, PIECE_DOWN_VT, PIECE_UP_U, PIECE_UP_VT, PIECE_KINDS };
enum { PIECE_FLOATS = PIECE_KINDS * 32 * 4 + PIECE_LAGS };    // that they take

/* Lays them out, where rows go by them; and rows of a strip, forward or back. */
void mn_hyper_make_pieces(const mn_hyper_params &k, cudaStream_t stream);
void mn_hyper_rows_by_mma(const mn_hyper_params &k, bool backward, cudaStream_t stream);

/* Where rank a of a lag lies in U or Vt, or in sums of their gradients. */
__device__ inline int mn_hyper_place(const mn_hyper_params &k, int lag, int a) {
    return (a / 4 * (int)k.lags + lag) * 4 + a % 4;
}

/* One mix. */
struct mn_hyper_mix {
    const float *U, *Vt, *d;          // by lag or position; NULL where absent
};

__device__ inline mn_hyper_mix mn_hyper_mix_of(const mn_hyper_params &k, int64_t mix) {
    mn_hyper_mix m = {};
    if (!k.has_params[mix >= k.p.call.Q]) return m;
    m.U = k.params + mix * k.lags * (2 * k.ranks + 1);
    m.Vt = m.U + k.lags * k.ranks;
    m.d = m.Vt + k.lags * k.ranks;
    return m;
}

/* Index of the mix of branch 0 or 1 of a head; of branch 2 the second. */
__device__ inline int64_t mn_hyper_mix_index(const mn_hyper_params &k, int64_t head, int branch) {
    return head + (branch == 2 ? k.p.call.Q : branch * k.p.call.H);
}

/* Up to four, or by tensor cores 16, rows of a block. Rows that see many keys start first. */
struct mn_hyper_rows4 {
    mn_tile_span tile;
    int64_t head, first;              // first row in the tile
    int which;                        // tile of the strip
    int n, seen, max_tiles, end;           // rows; keys before the first; of the last; columns that
                                      // products read

    /* Keys that row r sees, 0 where there is no such row. */
    __device__ int keys(int r) const {
        return r < n ? seen + r + 1 : 0;
    }

    __device__ int64_t token(int r) const {
        return tile.span.t0 + tile.first + first + r;
    }
};

__device__ inline bool mn_hyper_rows4_of(mn_hyper_rows4 *f, const mn_hyper_params &k,
                                         int64_t rows = MN_HYPER_ROWS) {
    f->which = (int)k.s.n_tiles - 1 - (int)blockIdx.z;
    f->tile = mn_tile_at(k.s.call, MN_Q_BLOCK_ROWS, k.s.first + f->which);
    f->head = blockIdx.y, f->first = (int64_t)blockIdx.x * rows;
    const int64_t seen = mn_keys_before(k.s.call) + f->tile.first;
    f->n = (int)max(min(rows, f->tile.n_rows - f->first), (int64_t)0);
    f->seen = (int)(seen + f->first);
    f->max_tiles = f->seen + f->n;
    f->end = (int)((seen + f->tile.n_rows + 63) / 64 * 64);
    return f->n > 0;
}

/* Numbers of a row are counted as the parameters are entered: by lag, from the row's own key back,
 * or, in layout position, by key from the first on. Row r has numbers 0 to keys(r) - 1. */
__device__ inline bool mn_hyper_by_position(const mn_hyper_params &k) {
    return k.p.layout == 1;
}

/* Entry of the parameters that number j meets; a parameter of theirs is the same way round. */
__device__ inline int64_t mn_hyper_entry(const mn_hyper_params &k, int64_t j) {
    return mn_hyper_by_position(k) ? j : k.p.call.P - 1 - j;
}

/* Where the first of four rows of a matrix has number 0. */
__device__ inline float *mn_hyper_lag0(const mn_hyper_params &k, float *matrix,
                                         const mn_hyper_rows4 &f) {
    return matrix + mn_q_block_offset(k.s, f.which, f.head, f.first) +
           (mn_hyper_by_position(k) ? 0 : f.seen);
}

/* How far on number j of row r lies: each row sees a key more, so lag 0 moves with the rows. */
__device__ inline int mn_hyper_lag_offset(const mn_hyper_params &k, int r, int j) {
    return mn_hyper_by_position(k) ? r * (int)k.s.row + j : r * ((int)k.s.row + 1) - j;
}

__device__ inline float *mn_hyper_saved_row(const mn_hyper_params &k, int64_t tile, int64_t head,
                                            int64_t r) {
    return k.rows + ((tile * k.s.heads + head) * k.s.rows + r) * k.row_floats;
}

enum { MN_HYPER_H, MN_HYPER_HC, MN_HYPER_YC };

__device__ inline float *mn_hyper_saved_ranks(const mn_hyper_params &k, float *saved_row,
                                              int branch, int what) {
    return saved_row + MN_HYPER_FIRST + (branch * 3 + what) * k.ranks;
}

/* Controls of a rank, 1 where the mix has none; 0 for padding. */
template <typename T>
__device__ inline float mn_hyper_rank_gate(const mn_hyper_params &k, const mn_hyper_rows4 &f,
                                           int branch,
                                         int r, int64_t a) {
    const mn_call &c = k.p.call;
    const bool second = branch == 2;
    if (a >= (second ? c.W : c.R)) return 0.0f;
    const int64_t which = second ? f.head : f.head + branch * c.H;
    const T *row = mn_row<T>(second ? k.p.c2 : k.p.c1, f.tile.span.b, f.token(r), which);
    return row ? mn_float(row[a]) : 1.0f;
}

/* Zeros where products read beyond a row's keys. */
__device__ inline void mn_hyper_zero_tail(const mn_hyper_params &k, const mn_hyper_rows4 &f,
                                          float *matrix) {
    for (int r = 0; r < f.n; r++) {
        float *line = matrix + mn_q_block_offset(k.s, f.which, f.head, f.first + r);
        for (int i = f.keys(r) + threadIdx.x; i < f.end; i += blockDim.x) line[i] = 0.0f;
    }
}

}    // namespace mneme::hyper

#endif
