/* delta_smem.cuh - what delta's chunk kernels share: tiles of 64 rows of bf16 in shared memory,
 * their way into the registers of tensor cores, and the workspace of a call.
 *
 * A tile is stored in pieces of 64 columns: eight 16-byte vectors (vec16) for each row, vec16 o of
 * row r at position o ^ (r % 8), so that eight rows of one vec16, or eight vec16s of one row, meet
 * in no bank.
 *
 * Chunks are 64 tokens, numbered by the slots of mn_tile_slots; records of a chunk and head lie at
 * slot * H + h. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_SMEM_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_SMEM_CUH

#include "kernels/cuda/prim/common.cuh"

namespace mneme::delta {

enum { MN_DELTA_CHUNK = 64, MN_DELTA_MATRIX = MN_DELTA_CHUNK * MN_DELTA_CHUNK };

/* A sum of log decays: 2^-7 of it, as a number of float32 and what that leaves, so that a small
 * decay behind a large one still counts. Differences take no float64, whose units are those of
 * products: where tensor cores are busy, an instruction of theirs waits for all that are under
 * way. The factor keeps sums of 64 finite numbers of bf16 finite. */
struct alignas(8) mn_log_sum {
    float high, low;
};

__device__ inline mn_log_sum mn_log_sum_of(double x) {
    const float high = (float)(x * 0x1p-7);
    return { high, isfinite(high) ? (float)(x * 0x1p-7 - (double)high) : 0.0f };
}

/* x - y in float32. */
__device__ inline float mn_log_between(const mn_log_sum &x, const mn_log_sum &y) {
    return 0x1p7f * (x.high - y.high + (x.low - y.low));
}

/* Decays of a chunk where channels share them: G_t, the sum of g from the chunk's start; gamma_t =
 * exp(G_t); write_t = beta_t exp(G_63 - G_t); beta. Behind the last token G stays, beta is 0. */
struct mn_delta_log_decays {
    mn_log_sum G[MN_DELTA_CHUNK];
    float gamma[MN_DELTA_CHUNK], write[MN_DELTA_CHUNK], beta[MN_DELTA_CHUNK];
};

/* The workspace of a call, a record for each chunk and head at slot * H + h. Matrices T, P, A are
 * [64][64]; rows of keys [64][KP], KP being K rounded up to 64, 128 or 256; states are transposed,
 * [padded_v][KP], residuals too, [padded_v][64]. */
struct mn_delta_workspace {
    mn_delta_log_decays *log_decays;
    mn_bf16 *T, *P, *A;
    mn_bf16 *q, *e, *w;          // decayed rows, where each channel has a decay of its own
    float *cum_decay;            // [KP], of the whole chunk, likewise
    mn_bf16 *S, *D, *R, *dX;     // on the way back
    float *parts;                // [K tile][slot * H + h] of mn_delta_partial (delta_grad.cuh)
    float *whole;                // dg of a chunk, for a decay per head
    int *cuts;                   // [n * H + h] (delta_redo.cuh)
    float *segment_maps, *segment_states;    // of long sequences (delta_segments.cuh)
    float *segment_matrices;                 // the maps whose matrices the states take
    float *back_maps, *back_states;          // the same of the scan back, which may run beside
};

/* Which segments of long sequences a launch of a scan has (delta_segments.cuh): that with which the
 * scan begins, the maps of those between it and the last, those behind the first. */
enum {
    MN_DELTA_WHOLE = 0,    // sequences as they are
    MN_DELTA_SEGMENT_FIRST = 1,
    MN_DELTA_SEGMENT_MAPS = 2,
    MN_DELTA_SEGMENT_REST = 4,
};

struct mn_delta_segments {
    int64_t least;    // tokens of a sequence that is cut
    int count;        // into so many segments; 1: none is long enough
    int ends;         // the first and the last have so many times the rows of those between
    int part, first;  // of a launch: which, and its first segment but for those that begin a scan
};

/* Tensors by the views that kernels read and write in 16-byte vectors where they can. */
enum mn_delta_tensor {
    MN_DELTA_Q, MN_DELTA_E, MN_DELTA_W, MN_DELTA_V, MN_DELTA_G, MN_DELTA_O, MN_DELTA_COT,
    MN_DELTA_DQ, MN_DELTA_DE, MN_DELTA_DW, MN_DELTA_DV, MN_DELTA_TENSORS
};

struct mn_delta_params {
    mn_delta_args p;
    mn_delta_workspace workspace;
    float scale;
    bool packed[MN_DELTA_TENSORS];    // rows can be read in 16-byte vectors
    int64_t padded_v;                 // V rounded up to 64
    mn_delta_segments segments;
    bool T_tiled;        // workspace.T has swizzled tiles
    bool tight;          // a scan's shared memory holds less of the next chunk
    bool dX_is_dv;       // the scan back leaves dX in grad.v alone
    int *cuts;           // NULL, or a redo's: where [n * H + h] ends (delta_redo.cuh)
    bool pairs;          // two rows a token: p.e is a, p.w b, and odd rows write these
    mn_in odd_w;
    mn_out odd_dw;
};

/* ---- tiles ----------------------------------------------------------------------------------- */

template <int COLUMNS>
__host__ __device__ constexpr int mn_tile_bytes() {
    return MN_DELTA_CHUNK * COLUMNS * (int)sizeof(mn_bf16);
}

__device__ inline unsigned mn_tile_swizzle(int row, int vec16) {
    return (unsigned)(((vec16 >> 3) * MN_DELTA_CHUNK + row) * 128 + (((vec16 ^ row) & 7) << 4));
}

__device__ inline unsigned mn_shared_u32(const void *memory) {
    return (unsigned)__cvta_generic_to_shared(memory);
}

/* Sixteen bytes from memory, of which those beyond `bytes` become zeros. */
__device__ inline void mn_cp_async_vec16(unsigned to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

__device__ inline void mn_cp_async_commit(void) {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

/* Waits until all but the last N groups of this thread's copies have arrived. */
template <int N>
__device__ inline void mn_cp_async_wait(void) {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

/* `count` rows of a view from token t on, COLUMNS of them from column0 on; zeros beyond `width`
 * and where the tensor is absent. N_THREADS threads share it, of which this is number `tid`: each
 * has one vec16 of every few rows, so that addresses advance by constants. */
template <int COLUMNS, int N_THREADS>
__device__ inline void mn_tile_load(unsigned char *tile, const mn_in &view, bool packed,
                                     const mn_span &span, int64_t h, int64_t t, int count,
                                     int64_t column0, int64_t width, int tid) {
    constexpr int vec16s = COLUMNS / 8, step = N_THREADS / vec16s;
    const int row0 = tid / vec16s, vec16 = tid % vec16s;
    const int64_t j = column0 + 8 * vec16;
    const int n_rows = view.data && j < width ? count : 0;
    const mn_bf16 *at = mn_row<mn_bf16>(view, span.b, span.t0 + t + row0, h) + j;
    if (packed && view.data) {
        const unsigned to = mn_shared_u32(tile);
#pragma unroll
        for (int row = row0, i = 0; i < MN_DELTA_CHUNK / step; i++, row += step) {
            const bool inside = row < n_rows;
            mn_cp_async_vec16(to + mn_tile_swizzle(row, vec16), inside ? at : view.data,
                          inside ? 16 : 0);
            at += step * view.stride[1];
        }
        return;
    }
    for (int row = row0; row < MN_DELTA_CHUNK; row += step) {
        mn_vec<mn_bf16, 8> pack = {};
        for (int i = 0; i < 8; i++) {
            if (row < n_rows && j + i < width) pack.at[i] = at[i];
        }
        *(mn_vec<mn_bf16, 8> *)(tile + mn_tile_swizzle(row, vec16)) = pack;
        at += step * view.stride[1];
    }
}

/* 64 rows of COLUMNS from workspace, which are `stride` apart, likewise. */
template <int COLUMNS, int N_THREADS>
__device__ inline void mn_tile_reload(unsigned char *tile, const mn_bf16 *from, int stride,
                                      int tid) {
    constexpr int vec16s = COLUMNS / 8, step = N_THREADS / vec16s;
    const int row0 = tid / vec16s, vec16 = tid % vec16s;
    const mn_bf16 *at = from + row0 * stride + 8 * vec16;
    const unsigned to = mn_shared_u32(tile);
#pragma unroll
    for (int i = 0; i < MN_DELTA_CHUNK / step; i++) {
        mn_cp_async_vec16(to + mn_tile_swizzle(row0 + i * step, vec16), at, 16);
        at += step * stride;
    }
}

/* `bytes`, a multiple of 16, as they lie. */
__device__ inline void mn_cp_async_raw(void *to, const void *from, int bytes, int n_threads,
                                     int tid) {
    for (int k = tid * 16; k < bytes; k += n_threads * 16) {
        mn_cp_async_vec16(mn_shared_u32(to) + k, (const char *)from + k, 16);
    }
}

/* ---- fragments ------------------------------------------------------------------------------- */

__device__ inline void mn_ldmatrix_x4(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ inline void mn_ldmatrix_x4_trans(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* Where lane l of a warp points in 16 rows and 16 columns of a tile: matrices run down the rows
 * first, or along the columns first. */
__device__ inline unsigned mn_lane_addr_rows(unsigned tile, int row0, int column0) {
    const int l = threadIdx.x % 32;
    return tile + mn_tile_swizzle(row0 + (l & 15), column0 / 8 + (l >> 4));
}

__device__ inline unsigned mn_lane_addr_cols(unsigned tile, int row0, int column0) {
    const int l = threadIdx.x % 32;
    return tile + mn_tile_swizzle(row0 + (l & 7) + (l >> 4) * 8, column0 / 8 + (l >> 3 & 1));
}

/* A 16 x 16 left operand from a tile with its rows, or with its columns, as rows. */
__device__ inline void mn_frag_a(unsigned (&a)[4], unsigned tile, int m0, int k0) {
    mn_ldmatrix_x4(a, mn_lane_addr_rows(tile, m0, k0));
}

__device__ inline void mn_frag_a_trans(unsigned (&a)[4], unsigned tile, int m0, int k0) {
    mn_ldmatrix_x4_trans(a, mn_lane_addr_cols(tile, k0, m0));
}

/* Two 16 x 8 right operands: numbers 0, 1 of columns n0, 2, 3 of columns n0 + 8. The tile's rows
 * are the operand's columns, or its rows. */
__device__ inline void mn_frag_b(unsigned (&b)[4], unsigned tile, int k0, int n0) {
    mn_ldmatrix_x4(b, mn_lane_addr_cols(tile, n0, k0));
}

__device__ inline void mn_frag_b_trans(unsigned (&b)[4], unsigned tile, int k0, int n0) {
    mn_ldmatrix_x4_trans(b, mn_lane_addr_rows(tile, k0, n0));
}

/* c += a b */
__device__ inline void mn_mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Two neighbours, the first in the low half. */
__device__ inline unsigned mn_bf16x2(float x, float y) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

__device__ inline float mn_bf16_lo(unsigned pair) {
    return __uint_as_float(pair << 16);
}

__device__ inline float mn_bf16_hi(unsigned pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

/* Sums of two neighbouring column tiles as a left operand. */
__device__ inline void mn_frag_a_of(unsigned (&a)[4], const float (&c0)[4], const float (&c1)[4]) {
    a[0] = mn_bf16x2(c0[0], c0[1]), a[1] = mn_bf16x2(c0[2], c0[3]);
    a[2] = mn_bf16x2(c1[0], c1[1]), a[3] = mn_bf16x2(c1[2], c1[3]);
}

/* An 8 x 8 matrix spread over the warp, transposed. */
__device__ inline unsigned mn_movmatrix_trans(unsigned pair) {
    unsigned transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(transposed) : "r"(pair));
    return transposed;
}

/* The sum over the four lanes that share a row of sums, or over the eight that share a column. */
__device__ inline float mn_row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ inline float mn_col_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 4);
    x += __shfl_xor_sync(0xffffffffu, x, 8);
    return x + __shfl_xor_sync(0xffffffffu, x, 16);
}

/* ---- chunks ---------------------------------------------------------------------------------- */

/* Tokens of a chunk's 64 rows (delta_pairs.cuh). */
__host__ __device__ constexpr int mn_delta_chunk_tokens(bool pairs) {
    return pairs ? MN_DELTA_CHUNK / 2 : MN_DELTA_CHUNK;
}

/* The first slot of a sequence, of chunks of `tokens`. */
__device__ inline int64_t mn_delta_first_slot(const mn_call &call, int64_t n,
                                              int tokens = MN_DELTA_CHUNK) {
    if (call.cu_seqlens) return call.cu_seqlens[n] / tokens + n;
    return n * ((call.T + tokens - 1) / tokens);
}

}    // namespace mneme::delta

#endif
