/* delta_pairs.cuh - chunks whose 64 rows are 32 tokens, two rows each: dplr by delta's kernels.
 *
 *   row 2t       reads a of the state before its decay, writes b times what it read
 *   row 2t + 1   has no decay, erases nothing, writes k v' and is read by q
 *
 * In delta's terms e is -a in even rows and zeros in odd ones. Reads of a row meet the state before
 * the row's own decay, which for odd rows is no difference.
 *
 * Half of what these rows make is zeros, and there goes what rounding to bf16 leaves, x - bf16(x):
 * gradients of a, a product of as many rounded numbers one behind the other as there are, would be
 * off by more than twice a rounding otherwise.
 *
 *   q and a     are one operand, row 2t a_t, row 2t + 1 q_t: three products of it with w, both in
 *               two parts, make the scores of two
 *   q and a     likewise decayed: one read of a state gives E S in even rows and Q S in odd ones,
 *               one product Q'dO - E'dX, of rows -dX and do in turn
 *   P           has rows for q alone, 2t + 1; row 2t is what rounding left of it. O = Q S + P R is
 *               o in both rows together, and P'dO meets do_t in both
 *   dX          is read in rows 2t alone; row 2t + 1 of the record is what rounding left
 *   dX = T'dR   the diagonal of T is ones: what rounding leaves of dR is added as it is */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_PAIRS_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_PAIRS_CUH

#include "kernels/cuda/delta/delta_smem.cuh"
#include "kernels/cuda/prim/tma.cuh"

namespace mneme::delta {

/* What a kernel's parameter CHANNEL may be beside false and true: each channel has a decay, and a
 * token is two rows. */
enum { MN_DELTA_PAIRS = 2 };

/* Whether rows of a and q are one tile; else there are two with zeros in every other row. */
constexpr bool mn_joins_rows = true;

template <int CHANNEL>
constexpr bool mn_rows_joined = mn_joins_rows && CHANNEL == MN_DELTA_PAIRS;

/* Two neighbours, and what rounding them to `whole` leaves. */
__device__ inline unsigned mn_bf16x2_rest(float x, float y, unsigned whole) {
    return mn_bf16x2(x - mn_bf16_lo(whole), y - mn_bf16_hi(whole));
}

/* Rows of two views in turn, `count` of both together from token t on, likewise; either may be
 * absent. A thread's rows are of one of them. */
template <int COLUMNS, int N_THREADS>
__device__ inline void mn_tile_load_pairs(unsigned char *tile, const mn_in &even, const mn_in &odd,
                                          bool packed, const mn_span &span, int64_t h, int64_t t,
                                          int count, int64_t column0, int64_t width, int tid) {
    constexpr int vec16s = COLUMNS / 8, step = N_THREADS / vec16s;
    static_assert(step % 2 == 0, "rows of a thread would be of both views");
    const int row0 = tid / vec16s, vec16 = tid % vec16s;
    const bool second = row0 % 2 != 0;
    const mn_bf16 *at = (const mn_bf16 *)(second ? odd.data : even.data);
    const void *any = odd.data ? odd.data : even.data;
    const int64_t j = column0 + 8 * vec16, stride = second ? odd.stride[1] : even.stride[1];
    const int n_rows = at && j < width ? count : 0;
    at += span.b * (second ? odd.stride[0] : even.stride[0]) + (span.t0 + t + row0 / 2) * stride +
          h * (second ? odd.stride[2] : even.stride[2]) + j;
    for (int row = row0; row < MN_DELTA_CHUNK; row += step, at += step / 2 * stride) {
        const bool inside = row < n_rows;
        if (packed && any) {
            mn_cp_async_vec16(mn_shared_u32(tile) + mn_tile_swizzle(row, vec16),
                              inside ? (const void *)at : any, inside ? 16 : 0);
            continue;
        }
        mn_vec<mn_bf16, 8> pack = {};
        for (int i = 0; i < 8; i++) {
            if (inside && j + i < width) pack.at[i] = at[i];
        }
        *(mn_vec<mn_bf16, 8> *)(tile + mn_tile_swizzle(row, vec16)) = pack;
    }
}

/* Rows of a chunk: of a view, which is `odd`, or of two in turn. */
template <int CHANNEL, int COLUMNS, int N_THREADS>
__device__ inline void mn_chunk_load(unsigned char *tile, const mn_in &even, const mn_in &odd,
                                     bool packed, const mn_span &span, int64_t h, int64_t t,
                                     int count, int64_t column0, int64_t width, int tid) {
    if constexpr (CHANNEL == MN_DELTA_PAIRS) {
        mn_tile_load_pairs<COLUMNS, N_THREADS>(tile, even, odd, packed, span, h, t, count, column0,
                                               width, tid);
    } else {
        mn_tile_load<COLUMNS, N_THREADS>(tile, odd, packed, span, h, t, count, column0, width,
                                         tid);
    }
}

/* Likewise tiles of 2 `tokens` rows, every other of which is zeros, the first of them: an axis of
 * one row whose tiles begin in front of it. */
template <typename View>
inline bool mn_tma_map_pairs(CUtensorMap *map, const View &view, const mn_call &call,
                             int64_t columns, int tokens) {
    static const mn_tma_encode_fn encode = mn_tma_encoder();
    if (!encode || !view.data || call.T == 0) return false;
    const cuuint64_t sizes[5] = { (cuuint64_t)columns, (cuuint64_t)call.H, 1, (cuuint64_t)call.T,
                                  (cuuint64_t)call.B };
    const cuuint64_t row = (cuuint64_t)view.stride[1] * 2;
    const cuuint64_t strides[4] = { (cuuint64_t)view.stride[2] * 2, row, row,
                                    (cuuint64_t)view.stride[0] * 2 };
    const cuuint32_t box[5] = { 64, 1, 2, (cuuint32_t)tokens, 1 }, steps[5] = { 1, 1, 1, 1, 1 };
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, (void *)view.data, sizes, strides, box,
                  steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

#if __CUDA_ARCH__ >= 900

/* Asks for the rows of tokens from t on, each behind a row of zeros (mn_tma_map_pairs). */
__device__ inline void mn_tma_load_pairs(void *to, const CUtensorMap &map, uint64_t *mbar,
                                         int column, int h, int t, int b) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(mn_smem_addr(to)), "l"(&map),
                 "r"(column), "r"(h), "r"(-1), "r"(t), "r"(b), "r"(mn_smem_addr(mbar)) : "memory");
}

#endif

}    // namespace mneme::delta

#endif
