/* longhorn_column_chunk.cu - longhorn_column in bf16 (see longhorn_column_chunk.cuh). Forward: what
 * keys say to
 * each other, all chunks at once, then the walk. Back: the same, with states and what tokens write
 * left for later instead of o; the walk back; dq and dk, all chunks at once:
 *
 *   dq_t = scale S do_t + sum over s <= t of scale (do_t.e_s) k_s             x_t = w_t y_t
 *   dk_t = D e_t - S x_t + sum over u >= t of scale (do_u.e_t) q_u
 *          - sum over s <= t of (x_t.e_s) k_s - sum over u >= t of (x_u.e_t) k_u
 *
 * where S is in front of the chunk and D behind it. What |k|^2 does through the gains is there: it
 * is -2 k_t (x_t.e_t), and both last sums have s = t. */
#include "kernels/cuda/longhorn/longhorn_column_chunk.h"
#include "kernels/cuda/delta/delta_grad.cuh"
#include "kernels/cuda/longhorn/longhorn_column_chunk.cuh"
#include "kernels/cuda/prim/device_props.h"

/* ---- forward --------------------------------------------------------------------------------- */

template <int KP>
struct alignas(128) ahead_stage {
    unsigned char k[mn_tile_bytes<KP>()], q[mn_tile_bytes<KP>()];
    unsigned char v[mn_tile_bytes<64>()], beta[mn_tile_bytes<64>()];
    mn_longhorn_record record;
};

template <int KP>
struct ahead_smem {
    ahead_stage<KP> stage[2];
    unsigned char o[mn_tile_bytes<64>()];    // or e
    unsigned char r[mn_tile_bytes<64>()], S[mn_tile_bytes<KP>()];
};

/* Chunk number `chunk` of the head, on its way. */
template <int KP, bool KEEPS>
__device__ static void load_ahead(ahead_stage<KP> &to, const mn_longhorn_job &job,
                                   const mn_longhorn_place &at, int chunk) {
    constexpr int hands = MN_LONGHORN_WALKERS;
    const mn_longhorn_column_args &p = job.p;
    const int64_t t = chunk * (int64_t)MN_DELTA_CHUNK, V = p.call.V;
    const int count = at.count(chunk), hand = threadIdx.x;
    mn_tile_load<KP, hands>(to.k, p.k, job.packed[MN_LONGHORN_K], at.span, at.h, t, count, 0,
                             p.call.K, hand);
    if (!KEEPS) {
        mn_tile_load<KP, hands>(to.q, p.q, job.packed[MN_LONGHORN_Q], at.span, at.h, t, count, 0,
                                 p.call.K, hand);
    }
    mn_tile_load<64, hands>(to.v, p.v, job.packed[MN_LONGHORN_V], at.span, at.h, t, count,
                             at.column0, V, hand);
    mn_tile_load<64, hands>(to.beta, p.beta, job.packed[MN_LONGHORN_BETA], at.span, at.h, t, count,
                             at.column0, V, hand);
    mn_copy_plain(&to.record, job.work.ahead + at.index(p.call, chunk), (int)sizeof to.record,
                  hands, hand);
}

/* A block of tokens, of which `found` has what they find in the state without the last block's
 * writes, `last`. Both become those of this block and the next. */
template <int KP, bool KEEPS>
__device__ __forceinline__ void step_ahead(mn_longhorn_state<KP> &S, float (&found)[2][2][4],
                                           unsigned (&last)[4], ahead_smem<KP> &room,
                                           const ahead_stage<KP> &stage, int column, int block,
                                           float scale) {
    constexpr int parts = KP / 16;
    const int token0 = MN_LONGHORN_BLOCK * block;
    const int before = max(token0 - MN_LONGHORN_BLOCK, 0);
    const int next = min(token0 + MN_LONGHORN_BLOCK, MN_DELTA_CHUNK - MN_LONGHORN_BLOCK);
    const unsigned k = mn_shared(stage.k), q = mn_shared(stage.q);
    float o[2][4] = {}, written[2][4] = {}, ahead[2][2][4] = {};
    unsigned v[4], beta[4];
    mn_longhorn_cells r, e, w, u;
    mn_longhorn_multiply(written, last, stage.record.across[block][threadIdx.x % 32]);
    mn_left_transposed(v, mn_shared(stage.v), column, token0);
    mn_left_transposed(beta, mn_shared(stage.beta), column, token0);
    mn_longhorn_gains(w, u, beta, stage.record.norm + token0);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int m = i / 4, n = i % 4 / 2, c = 2 * m + i % 2;
        const float value = i % 2 ? mn_high(v[2 * n + m]) : mn_low(v[2 * n + m]);
        r[m][i % 4] = value - (found[0][n][c] + found[1][n][c]) - written[n][c];
    }
    const auto look_up = [&](int c) {
        S.find(ahead[c % 2], c, k, next);
        if (!KEEPS) S.find(o, c, q, token0);
    };
    mn_longhorn_solve<false>(r, w, stage.record.below[block], [&](int step) {
        if (step < parts) S.take(last, step, k, before);
        if (step > 0 && step <= parts) look_up(step - 1);
    });
    if (parts == 8) look_up(7);
#pragma unroll
    for (int i = 0; i < 8; i++) e[i / 4][i % 4] = w[i / 4][i % 4] * r[i / 4][i % 4];
    mn_longhorn_left(last, e);
#pragma unroll
    for (int i = 0; i < 16; i++) found[i / 8][i / 4 % 2][i % 4] = ahead[i / 8][i / 4 % 2][i % 4];
    unsigned out[4];
    if constexpr (KEEPS) {
        mn_longhorn_left(out, r);
        mn_longhorn_lay(room.o, last, column, token0);
        mn_longhorn_lay(room.r, out, column, token0);
    } else {
#pragma unroll
        for (int c = 0; c < 8; c++) o[c / 4][c % 4] *= scale;
        mn_longhorn_multiply(o, last, stage.record.pairs[block][threadIdx.x % 32]);
        mn_left_of(out, o[0], o[1]);
        mn_longhorn_lay_transposed(room.o, out, column, token0);
    }
}

/* A chunk, of which `blocks` have tokens. */
template <int KP, bool KEEPS>
__device__ __forceinline__ void scan_ahead(mn_longhorn_state<KP> &S, ahead_smem<KP> &room,
                                           const ahead_stage<KP> &stage, int column, int blocks,
                                           float scale) {
    const unsigned k = mn_shared(stage.k);
    float found[2][2][4] = {};
    unsigned last[4] = {};
#pragma unroll
    for (int c = 0; c < KP / 16; c++) S.find(found[c % 2], c, k, 0);
#pragma unroll 1
    for (int block = 0; block < blocks; block++) {
        step_ahead<KP, KEEPS>(S, found, last, room, stage, column, block, scale);
    }
#pragma unroll
    for (int c = 0; c < KP / 16; c++) S.take(last, c, k, MN_LONGHORN_BLOCK * (blocks - 1));
}

/* A block has 64 value columns of a head of a sequence, a warp sixteen of them. */
template <int KP, bool KEEPS>
__global__ void __launch_bounds__(MN_LONGHORN_WALKERS, 1)
ahead_kernel(const __grid_constant__ mn_longhorn_job job) {
    extern __shared__ __align__(128) unsigned char bytes[];
    ahead_smem<KP> &room = *(ahead_smem<KP> *)bytes;
    const mn_longhorn_column_args &p = job.p;
    const mn_longhorn_place at = mn_longhorn_here(job);
    mn_longhorn_state<KP> S;
    if (at.n_chunks > 0) load_ahead<KP, KEEPS>(room.stage[0], job, at, 0);
    mn_copy_commit();
    S.load(p.call, at, (const float *)p.state0.data);
#pragma unroll 1
    for (int chunk = 0; chunk < at.n_chunks; chunk++) {
        const ahead_stage<KP> &stage = room.stage[chunk % 2];
        const int64_t index = at.index(p.call, chunk);
        const int blocks = KEEPS ? MN_LONGHORN_BLOCKS
                                 : (at.count(chunk) + MN_LONGHORN_BLOCK - 1) / MN_LONGHORN_BLOCK;
        if (chunk + 1 < at.n_chunks) {
            load_ahead<KP, KEEPS>(room.stage[(chunk + 1) % 2], job, at, chunk + 1);
        }
        mn_copy_commit();
        mn_copy_wait<1>();
        __syncthreads();
        if (KEEPS) S.keep(job.work.S + index * job.wide_v * KP, room.S, at);
        scan_ahead<KP, KEEPS>(S, room, stage, at.column, blocks, job.scale);
        __syncwarp();
        if (KEEPS) {
            const int64_t record = index * job.wide_v * MN_DELTA_CHUNK;
            mn_longhorn_keep<MN_DELTA_CHUNK>(job.work.e + record, room.o, at);
            mn_longhorn_keep<MN_DELTA_CHUNK>(job.work.r + record, room.r, at);
        } else {
            mn_longhorn_put(p.o, job.packed[MN_LONGHORN_O], room.o, at, p.call.V, chunk);
        }
        __syncthreads();
    }
    if (!KEEPS) S.store(p.call, at, (float *)p.state.data);
}

/* ---- back ------------------------------------------------------------------------------------ */

template <int KP>
struct alignas(128) back_stage {
    unsigned char k[mn_tile_bytes<KP>()], q[mn_tile_bytes<KP>()];
    unsigned char cot[mn_tile_bytes<64>()], beta[mn_tile_bytes<64>()], r[mn_tile_bytes<64>()];
    mn_longhorn_record record;
};

template <int KP>
struct back_smem {
    back_stage<KP> stage[2];
    unsigned char dr[mn_tile_bytes<64>()], dv[mn_tile_bytes<64>()], dbeta[mn_tile_bytes<64>()];
    unsigned char D[mn_tile_bytes<KP>()];
};

template <int KP>
__device__ static void load_back(back_stage<KP> &to, const mn_longhorn_job &job,
                                  const mn_longhorn_place &at, int chunk) {
    constexpr int hands = MN_LONGHORN_WALKERS;
    const mn_longhorn_column_args &p = job.p;
    const int64_t t = chunk * (int64_t)MN_DELTA_CHUNK, V = p.call.V;
    const int64_t index = at.index(p.call, chunk);
    const int count = at.count(chunk), hand = threadIdx.x;
    mn_tile_load<KP, hands>(to.k, p.k, job.packed[MN_LONGHORN_K], at.span, at.h, t, count, 0,
                             p.call.K, hand);
    mn_tile_load<KP, hands>(to.q, p.q, job.packed[MN_LONGHORN_Q], at.span, at.h, t, count, 0,
                             p.call.K, hand);
    mn_tile_load<64, hands>(to.cot, p.cot.o, job.packed[MN_LONGHORN_COT], at.span, at.h, t, count,
                             at.column0, V, hand);
    mn_tile_load<64, hands>(to.beta, p.beta, job.packed[MN_LONGHORN_BETA], at.span, at.h, t, count,
                             at.column0, V, hand);
    mn_tile_recall<64, hands>(to.r, job.work.r + (index * job.wide_v + at.column0) * MN_DELTA_CHUNK,
                              MN_DELTA_CHUNK, hand);
    mn_copy_plain(&to.record, job.work.back + index, (int)sizeof to.record, hands, hand);
}

/* A block of tokens, of which `found` has what they find in the adjoint without what the block
 * behind wrote, -`last`. Both become those of this block and the one in front. */
template <int KP>
__device__ __forceinline__ void step_back(mn_longhorn_state<KP> &D, float (&found)[2][2][4],
                                          unsigned (&last)[4], back_smem<KP> &room,
                                          const back_stage<KP> &stage, int column, int block,
                                          float scale) {
    constexpr int parts = KP / 16;
    const int token0 = MN_LONGHORN_BLOCK * block;
    const int behind = min(token0 + MN_LONGHORN_BLOCK, MN_DELTA_CHUNK - MN_LONGHORN_BLOCK);
    const int next = max(token0 - MN_LONGHORN_BLOCK, 0);
    const unsigned k = mn_shared(stage.k), q = mn_shared(stage.q);
    float written[2][4] = {}, ahead[2][2][4] = {};
    unsigned cot[4], beta[4], rest[4], out[4];
    mn_longhorn_cells y, w, u, x;
    mn_longhorn_multiply(written, last, stage.record.across[block][threadIdx.x % 32]);
    mn_left_transposed(cot, mn_shared(stage.cot), column, token0);
    mn_left_transposed(beta, mn_shared(stage.beta), column, token0);
    mn_left(rest, mn_shared(stage.r), column, token0);
    mn_longhorn_multiply(found[0], cot, stage.record.pairs[block][threadIdx.x % 32]);
    mn_longhorn_gains(w, u, beta, stage.record.norm + token0);
#pragma unroll
    for (int i = 0; i < 4; i++) cot[i] = mn_pair(scale * mn_low(cot[i]), scale * mn_high(cot[i]));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int m = i / 4, n = i % 4 / 2, c = 2 * m + i % 2;
        y[m][i % 4] = found[0][n][c] + found[1][n][c] + written[n][c];
    }
    mn_longhorn_solve<true>(y, w, stage.record.below[block], [&](int step) {
        if (step < parts) D.take(last, step, k, behind), D.take(cot, step, q, token0);
        if (step > 0 && step <= parts) D.find(ahead[step % 2], step - 1, k, next);
    });
    if (parts == 8) D.find(ahead[0], 7, k, next);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int m = i / 4, n = i % 4 / 2;
        const float r = i % 2 ? mn_high(rest[2 * n + m]) : mn_low(rest[2 * n + m]);
        x[m][i % 4] = w[m][i % 4] * y[m][i % 4];
        y[m][i % 4] *= r * u[m][i % 4] * u[m][i % 4];
    }
#pragma unroll
    for (int i = 0; i < 16; i++) found[i / 8][i / 4 % 2][i % 4] = ahead[i / 8][i / 4 % 2][i % 4];
    mn_longhorn_left(last, x);
    mn_longhorn_lay(room.dr, last, column, token0);
    mn_longhorn_lay_transposed(room.dv, last, column, token0);
    mn_longhorn_left(out, y);
    mn_longhorn_lay_transposed(room.dbeta, out, column, token0);
#pragma unroll
    for (int i = 0; i < 4; i++) last[i] ^= 0x80008000u;
}

template <int KP>
__device__ __forceinline__ void scan_back(mn_longhorn_state<KP> &D, back_smem<KP> &room,
                                          const back_stage<KP> &stage, int column, float scale) {
    const unsigned k = mn_shared(stage.k);
    float found[2][2][4] = {};
    unsigned last[4] = {};
#pragma unroll
    for (int c = 0; c < KP / 16; c++) {
        D.find(found[c % 2], c, k, MN_DELTA_CHUNK - MN_LONGHORN_BLOCK);
    }
#pragma unroll 1
    for (int block = MN_LONGHORN_BLOCKS - 1; block >= 0; block--) {
        step_back<KP>(D, found, last, room, stage, column, block, scale);
    }
#pragma unroll
    for (int c = 0; c < KP / 16; c++) D.take(last, c, k, 0);
}

template <int KP>
__global__ void __launch_bounds__(MN_LONGHORN_WALKERS, 1)
back_kernel(const __grid_constant__ mn_longhorn_job job) {
    extern __shared__ __align__(128) unsigned char bytes[];
    back_smem<KP> &room = *(back_smem<KP> *)bytes;
    const mn_longhorn_column_args &p = job.p;
    const mn_longhorn_place at = mn_longhorn_here(job);
    mn_longhorn_state<KP> D;
    if (at.n_chunks > 0) load_back<KP>(room.stage[0], job, at, at.n_chunks - 1);
    mn_copy_commit();
    D.load(p.call, at, (const float *)p.cot.state.data);
#pragma unroll 1
    for (int turn = 0; turn < at.n_chunks; turn++) {
        const int chunk = at.n_chunks - 1 - turn;
        const back_stage<KP> &stage = room.stage[turn % 2];
        const int64_t index = at.index(p.call, chunk);
        if (chunk > 0) load_back<KP>(room.stage[(turn + 1) % 2], job, at, chunk - 1);
        mn_copy_commit();
        mn_copy_wait<1>();
        __syncthreads();
        D.keep(job.work.D + index * job.wide_v * KP, room.D, at);
        scan_back<KP>(D, room, stage, at.column, job.scale);
        __syncwarp();
        mn_longhorn_keep<MN_DELTA_CHUNK>(job.work.dr + index * job.wide_v * MN_DELTA_CHUNK, room.dr,
                                         at);
        mn_longhorn_put(p.grad.v, job.packed[MN_LONGHORN_DV], room.dv, at, p.call.V, chunk);
        mn_longhorn_put(p.grad.beta, job.packed[MN_LONGHORN_DBETA], room.dbeta, at, p.call.V,
                        chunk);
        __syncthreads();
    }
    D.store(p.call, at, (float *)p.grad.state0.data);
}

/* ---- dq and dk ------------------------------------------------------------------------------- */

/* Products of what tokens say and write as delta_grad.cuh wants them for what passes between
 * tokens: scaled, with their signs, zero where s > t. */
template <int KT>
__device__ static void leave_squares(mn_grade_squares &to, const mn_grade_tile<KT> &sum,
                                     float scale, const mn_grade_place &at) {
    const int lane = threadIdx.x % 32;
    if (at.quarter > at.block) return;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int n = i / 2, c = i % 2 * 2;
        const int t = at.block * 16 + lane / 4 + 8 * (i % 2);
        const int s = at.quarter * 16 + n * 8 + lane % 4 * 2;
        const bool first = s <= t, second = s < t;
        const unsigned P = mn_pair(first ? scale * sum.P[n][c] : 0.0f,
                                   second ? scale * sum.P[n][c + 1] : 0.0f);
        const unsigned A = mn_pair(first ? -sum.A[n][c] : 0.0f, second ? -sum.A[n][c + 1] : 0.0f);
        const unsigned place = mn_tile_place(t, s / 8) + lane % 4 * 4;
        *(unsigned *)(to.P + place) = *(unsigned *)(to.P_beta + place) = P;
        *(unsigned *)(to.A + place) = *(unsigned *)(to.A_beta + place) = A;
    }
}

/* A block has a chunk of a head. */
template <int KT>
__global__ void __launch_bounds__(MN_DELTA_GRADERS)
keys_kernel(const __grid_constant__ mn_delta_job job) {
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_grade_smem<KT> &room = *(mn_grade_smem<KT> *)bytes;
    const mn_grade_place at = mn_grade_here(job, KT, KT);
    const int64_t K = job.p.call.K;
    if (at.count == 0) return;
    mn_grade_tile<KT> sum;
    mn_grade_all_values<KT>(sum, room, job, at);
    __syncthreads();    // nobody copies or reads where squares go
    leave_squares<KT>(room.squares, sum, job.scale, at);
#pragma unroll
    for (int c = 0; c < 4 * mn_grade_tile<KT>::N; c++) {
        sum.q[c / 4][c % 4] *= job.scale, sum.e[c / 4][c % 4] *= -1.0f;
    }
    __syncthreads();
    mn_grade_inside<KT>(room, sum, mn_shared(room.keys.e), at);
#pragma unroll
    for (int c = 0; c < 4 * mn_grade_tile<KT>::N; c++) {
        sum.e[c / 4][c % 4] += sum.w[c / 4][c % 4];
    }
    __syncthreads();
    mn_grade_put<KT>(job.p.grad.q, job.packed[MN_DELTA_DQ], at, K, room.keys.q, sum.q);
    mn_grade_put<KT>(job.p.grad.e, job.packed[MN_DELTA_DE], at, K, room.keys.e, sum.e);
}

/* ---- launches -------------------------------------------------------------------------------- */

static int64_t wide_k(const mn_call &call) {
    return call.K <= 64 ? 64 : 128;
}

static int64_t wide_v(const mn_call &call) {
    return mn_ceil_div(call.V, MN_LONGHORN_WIDTH) * MN_LONGHORN_WIDTH;
}

static int64_t records_of(const mn_call &call) {
    return mn_tile_slots(call, MN_DELTA_CHUNK) * call.H;
}

/* Lays out the work space that starts at `base` (NULL: only counts it); false when sizes
 * overflow. */
static bool lay_out(mn_longhorn_work *work, size_t *bytes, const mn_call &call, char *base,
                    bool back) {
    const int64_t records = records_of(call), V = wide_v(call);
    bool ok = true;
    const auto take = [&](auto *&to, int64_t each) {
        size_t size;
        ok = ok && mn_mul_size(&size, (size_t)records, (size_t)each) &&
             mn_mul_size(&size, size, sizeof *to);
        to = decltype(to + 0)(ok && base ? base + *bytes : nullptr);
        ok = ok && mn_add_size(bytes, *bytes, size);
    };
    *work = {}, *bytes = 0;
    take(work->ahead, 1);
    if (!back) return ok;
    take(work->back, 1);
    take(work->S, V * wide_k(call)), take(work->D, V * wide_k(call));
    take(work->e, V * MN_DELTA_CHUNK), take(work->r, V * MN_DELTA_CHUNK);
    take(work->dr, V * MN_DELTA_CHUNK);
    return ok;
}

/* Whether rows of a view come in packs of eight. */
template <typename View>
static bool comes_packed(const View &view, int64_t width) {
    bool whole = (uintptr_t)view.data % 16 == 0 && width % 8 == 0;
    for (int axis = 0; axis < 3; axis++) whole = whole && view.stride[axis] % 8 == 0;
    return whole;
}

static bool job_of(mn_longhorn_job *job, const mn_longhorn_column_args *p, void *shared,
                   bool back) {
    const int64_t K = p->call.K, V = p->call.V;
    size_t bytes;
    *job = {};
    job->p = *p, job->scale = (float)p->scale, job->wide_v = wide_v(p->call);
    job->packed[MN_LONGHORN_Q] = comes_packed(p->q, K);
    job->packed[MN_LONGHORN_K] = comes_packed(p->k, K);
    job->packed[MN_LONGHORN_V] = comes_packed(p->v, V);
    job->packed[MN_LONGHORN_BETA] = comes_packed(p->beta, V);
    job->packed[MN_LONGHORN_O] = comes_packed(p->o, V);
    job->packed[MN_LONGHORN_COT] = comes_packed(p->cot.o, V);
    job->packed[MN_LONGHORN_DV] = comes_packed(p->grad.v, V);
    job->packed[MN_LONGHORN_DBETA] = comes_packed(p->grad.beta, V);
    return lay_out(&job->work, &bytes, p->call, (char *)shared, back);
}

/* The same as a call of delta without decays, for dq and dk. */
static mn_delta_job keys_job(const mn_longhorn_job &from) {
    const mn_longhorn_column_args &p = from.p;
    mn_delta_job job = {};
    job.p.call = p.call, job.scale = from.scale, job.wide_v = from.wide_v;
    job.p.q = p.q, job.p.e = p.k, job.p.cot.o = p.cot.o;
    job.p.grad.q = p.grad.q, job.p.grad.e = p.grad.k;
    job.work.S = from.work.S, job.work.D = from.work.D;
    job.work.R = from.work.e, job.work.dX = from.work.dr;
    job.packed[MN_DELTA_Q] = from.packed[MN_LONGHORN_Q];
    job.packed[MN_DELTA_E] = from.packed[MN_LONGHORN_K];
    job.packed[MN_DELTA_COT] = from.packed[MN_LONGHORN_COT];
    job.packed[MN_DELTA_DQ] = comes_packed(p.grad.q, p.call.K);
    job.packed[MN_DELTA_DE] = comes_packed(p.grad.k, p.call.K);
    return job;
}

template <int KP, bool BACK>
static int prepare(const mn_longhorn_job &job, cudaStream_t on) {
    const int64_t records = records_of(job.p.call);
    if (records == 0) return cudaSuccess;
    if (records > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem(mn_longhorn_prepare_kernel<KP, BACK>, dim3((unsigned)records),
                               MN_LONGHORN_PREPARERS, sizeof(mn_longhorn_keys<KP>), on, job);
}

/* A walk of either kind. */
static int walk(void (*kernel)(mn_longhorn_job), size_t room, const mn_longhorn_job &job,
                cudaStream_t on) {
    const int64_t heads = mn_n_spans(job.p.call) * job.p.call.H;
    const int64_t blocks = job.wide_v / MN_LONGHORN_WIDTH * heads;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem(kernel, dim3((unsigned)blocks), MN_LONGHORN_WALKERS, room, on, job);
}

template <int KP>
static int forward(const mn_longhorn_job &job, cudaStream_t on) {
    const int code = prepare<KP, false>(job, on);
    if (code != cudaSuccess) return code;
    return walk(ahead_kernel<KP, false>, sizeof(ahead_smem<KP>), job, on);
}

template <int KP>
static int backward(const mn_longhorn_job &job, cudaStream_t on) {
    const int64_t records = records_of(job.p.call);
    int code = prepare<KP, true>(job, on);
    if (code == cudaSuccess) {
        code = walk(ahead_kernel<KP, true>, sizeof(ahead_smem<KP>), job, on);
    }
    if (code == cudaSuccess) code = walk(back_kernel<KP>, sizeof(back_smem<KP>), job, on);
    if (code != cudaSuccess || records == 0) return code;
    return mn_launch_smem(keys_kernel<KP>, dim3((unsigned)records), MN_DELTA_GRADERS,
                               sizeof(mn_grade_smem<KP>), on, keys_job(job));
}

/* Narrow memories would lose more than twice what storing in bf16 does, as for delta. */
bool mn_longhorn_chunks(const mn_call *call) {
    return call->dtype == MN_BF16 && call->K >= 32 && call->K <= 128 && call->V > 32 &&
           mn_device_props_current().shared_bytes >= (int)sizeof(back_smem<128>);
}

bool mn_longhorn_chunk_plan(mn_plan *plan, const mn_call *call, bool back) {
    mn_longhorn_work work;
    return lay_out(&work, &plan->shared_bytes, *call, nullptr, back);
}

int mn_longhorn_chunk_forward(const mn_longhorn_column_args *p, void *shared, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    mn_longhorn_job job;
    if (!job_of(&job, p, shared, false)) return cudaErrorNotSupported;
    return wide_k(p->call) == 64 ? forward<64>(job, on) : forward<128>(job, on);
}

int mn_longhorn_chunk_backward(const mn_longhorn_column_args *p, void *shared, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    mn_longhorn_job job;
    if (!job_of(&job, p, shared, true)) return cudaErrorNotSupported;
    return wide_k(p->call) == 64 ? backward<64>(job, on) : backward<128>(job, on);
}
