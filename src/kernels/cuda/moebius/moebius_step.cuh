/* moebius_step.cuh - one token of Kalman Linear Attention (see ref/moebius.c), states in place,
 * and its dynamics from parameters (see ref/kla_discretise.c).
 *
 *   den = a^2 + p lam      lam <- lam / den + prec k^2      eta <- a / den eta + prec v k
 *   y = sum_s q eta / lam  yvar = sum_s q^2 / lam
 *
 * A warp has a channel, a lane every 32nd slot of it. */
#ifndef MN_KERNELS_CUDA_MOEBIUS_MOEBIUS_STEP_CUH
#define MN_KERNELS_CUDA_MOEBIUS_MOEBIUS_STEP_CUH

#include "kernels/cuda/prim/activation.cuh"
#include "kernels/cuda/prim/block.cuh"
#include "kernels/cuda/recurrent/cell_state.cuh"

namespace mneme::moebius {

enum { STEP_COLUMNS = 8, STEP_THREADS = 32 * STEP_COLUMNS };

static __device__ const float least_precision = 1e-12f, min_noise = 1e-7f;

/* What the token brings to a slot: its dynamics, the key and query, the channel's observation. */
struct step_inputs {
    float a, p, k, q, v, prec;
};

/* A slot after the token; adds to what y and yvar read. */
__device__ inline void moebius_step_slot(float *y, float *yvar, float &lam, float &eta,
                                         const step_inputs &x, bool from_prior) {
    using recurrent::mn_rcp_ftz;
    const float a2 = fmaxf(x.a * x.a, least_precision), noise = fmaxf(x.p, least_precision);
    const float g = mn_rcp_ftz(fmaxf(fmaf(noise, lam, a2), least_precision)), pk = x.prec * x.k;
    lam = fmaf(lam, g, pk * x.k);
    eta = fmaf(x.a * g, eta, pk * x.v);
    const float var = mn_rcp_ftz(fmaxf(lam, least_precision));
    *y = fmaf((from_prior ? x.q * x.a : x.q) * eta, var, *y);
    *yvar = fmaf(x.q * x.q, from_prior ? fmaf(a2, var, noise) : var, *yvar);
}

/* Slot s of channel m. */
template <typename T>
__device__ inline void moebius_step_cell(float *y, float *yvar, const mn_moebius_args &p, int64_t n,
                                         int64_t m, int64_t s, float v, float prec) {
    const int64_t at = m * p.call.K + s;
    const float *lam0 = mn_row<float>(p.lam0, n, 0, 0), *eta0 = mn_row<float>(p.eta0, n, 0, 0);
    float *to_lam = mn_row<float>(p.lam, n, 0, 0), *to_eta = mn_row<float>(p.eta, n, 0, 0);
    const step_inputs x = { ((const float *)p.a.data)[at], ((const float *)p.p.data)[at],
                            mn_float(mn_row<T>(p.k, n, 0, 0)[s]),
                            mn_float(mn_row<T>(p.q, n, 0, 0)[s]), v, prec };
    float lam = lam0 ? lam0[at] : 1.0f, eta = eta0 ? eta0[at] : 0.0f;
    moebius_step_slot(y, yvar, lam, eta, x, p.from_prior);
    if (to_lam) to_lam[at] = lam;
    if (to_eta) to_eta[at] = eta;
}

/* Channels from `column` on of sequence n. */
template <typename T, typename Block>
__device__ inline void moebius_step(const mn_moebius_args &p, int64_t n, int64_t, int64_t column,
                                    unsigned char *) {
    static_assert(Block::size == STEP_THREADS, "a step's threads");
    const int64_t m = column + threadIdx.x / 32;
    if (m >= p.call.V) return;
    const float v = mn_float(mn_row<T>(p.v, n, 0, 0)[m]);
    const float prec = mn_float(mn_row<T>(p.prec, n, 0, 0)[m]);
    T *to_y = mn_row<T>(p.y, n, 0, 0), *to_yvar = mn_row<T>(p.yvar, n, 0, 0);
    float y = 0.0f, yvar = 0.0f;
    for (int64_t s = threadIdx.x % 32; s < p.call.K; s += 32) {
        moebius_step_cell<T>(&y, &yvar, p, n, m, s, v, prec);
    }
    __syncwarp();
    y = mn_warp_sum(y), yvar = mn_warp_sum(yvar);
    if (threadIdx.x % 32 > 0) return;
    if (to_y) mn_put(to_y + m, y);
    if (to_yvar) mn_put(to_yvar + m, yvar);
}

inline bool moebius_step_supported(const mn_moebius_args *p) {
    return p->a.data && p->p.data;
}

/* ---- dynamics -------------------------------------------------------------------------------- */

/* (1 - e^-x) / x, x >= 0; 1 at 0 */
__device__ inline float weight(float x) {
    return x > 0.0f ? -expm1f(-x) / x : 1.0f;
}

/* a and p of a cell. */
__device__ inline float2 discretise(float delta, float lambda_log, float process_noise, int mode) {
    const float dt = mn_softplus(delta) + 1e-7f, c = expf(lambda_log);
    const float noise = fmaxf(process_noise, min_noise);
    return make_float2(expf(-c * dt), noise * dt * (mode == 0 ? weight(2.0f * c * dt) : 1.0f));
}

template <typename T>
__device__ inline void discretise_cell(const mn_kla_discretise_args &p, int64_t i) {
    const float2 made = discretise(mn_float(((const T *)p.delta.data)[i]),
                                   mn_float(((const T *)p.lambda_log.data)[i]),
                                   mn_float(((const T *)p.process_noise.data)[i]), p.mode);
    float *abar = (float *)p.abar.data, *pbar = (float *)p.pbar.data;
    if (abar) abar[i] = made.x;
    if (pbar) pbar[i] = made.y;
}

/* All slots of channels from `column` on. */
template <typename T, typename Block>
__device__ inline void kla_discretise_step(const mn_kla_discretise_args &p, int64_t, int64_t,
                                           int64_t column, unsigned char *) {
    const int64_t end = min(column + STEP_COLUMNS, p.call.V) * p.call.K;
    for (int64_t i = column * p.call.K + threadIdx.x; i < end; i += Block::size) {
        discretise_cell<T>(p, i);
    }
}

inline bool kla_discretise_step_supported(const mn_kla_discretise_args *) {
    return true;
}

}    // namespace mneme::moebius

#endif
