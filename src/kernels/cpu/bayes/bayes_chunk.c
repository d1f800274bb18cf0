/* bayes_chunk.c - one chunk of the Bayesian Layer in float32. Equations in bayes_chunk.h. */
#include "kernels/cpu/bayes/bayes_chunk.h"

#include <math.h>
#include <string.h>

#include "base/util.h"
#include "kernels/cpu/simd/row.h"
#include "kernels/cpu/simd/sincos.h"

/* a_t from la and theta, Phi_t = a_t Phi_{t-1}; padded channels get 0 */
static void load_transition(mn_bayes_chunk *c, int64_t t) {
    const int64_t K = c->p->call.K, Kp = c->Kp;
    const float *la = MN_ROW(float, c->p->la, c->b, c->t0 + t, c->h);
    const float *theta = MN_ROW(float, c->p->theta, c->b, c->t0 + t, c->h);
    float *a = c->a + t * c->R, *phi = c->phi + t * c->R;
    for (int64_t i = 0; i < Kp; i += MN_VW) {
        const int lanes = vf_lanes(K - i);
        const vf rho = vf_keep_first(vf_exp(vf_load_n(la + i, lanes)), lanes);
        vf_store(a + i, rho);
        if (!theta) continue;
        vf sine, cosine;
        vf_sincos(&sine, &cosine, vf_load_n(theta + i, lanes));
        vf_store(a + i, vf_mul(rho, cosine));
        vf_store(a + Kp + i, vf_mul(rho, sine));
    }
    if (t == 0) memcpy(phi, a, (size_t)c->R * sizeof *phi);
    else mn_bayes_turn(phi, a, phi - c->R, Kp, c->turns, false);
}

/* x padded, and Phi'x for x on the real rows */
static void load_row(float *x, float *turned, const float *from, const float *phi,
                     const mn_bayes_chunk *c) {
    const int64_t K = c->p->call.K, Kp = c->Kp;
    for (int64_t i = 0; i < Kp; i += MN_VW) {
        const vf v = from ? vf_load_n(from + i, vf_lanes(K - i)) : vf_zero();
        vf_store(x + i, v);
        vf_store(turned + i, vf_mul(vf_load(phi + i), v));
        if (c->turns) vf_store(turned + Kp + i, vf_neg(vf_mul(vf_load(phi + Kp + i), v)));
    }
}

/* N_t = a_t N_{t-1} a_t' + l2_t on the real rows */
static void load_noise(mn_bayes_chunk *c, int64_t t) {
    const int64_t Kp = c->Kp;
    const float *a = c->a + t * c->R, *before = c->noise + (t - 1) * c->noise_width;
    float *noise = c->noise + t * c->noise_width;
    for (int64_t i = 0; i < Kp; i += MN_VW) {
        const vf l2 = vf_keep_first(vf_set1(c->l2[t]), vf_lanes(c->p->call.K - i));
        if (!c->turns) {
            const vf ar = vf_load(a + i);
            const vf kept = t ? vf_mul(vf_mul(ar, ar), vf_load(before + i)) : vf_zero();
            vf_store(noise + i, vf_add(kept, l2));
            continue;
        }
        vf rr = vf_zero(), ri = vf_zero(), ii = vf_zero();
        if (t) {
            const vf ar = vf_load(a + i), ai = vf_load(a + Kp + i), xr = vf_load(before + i);
            const vf xi = vf_load(before + Kp + i), yi = vf_load(before + 2 * Kp + i);
            const vf left_r = vf_fnma(ai, xi, vf_mul(ar, xr));
            const vf left_i = vf_fnma(ai, yi, vf_mul(ar, xi));
            const vf low_r = vf_fma(ai, xr, vf_mul(ar, xi)), low_i = vf_fma(ai, xi, vf_mul(ar, yi));
            rr = vf_fnma(ai, left_i, vf_mul(ar, left_r));
            ri = vf_fma(ai, left_r, vf_mul(ar, left_i));
            ii = vf_fma(ai, low_r, vf_mul(ar, low_i));
        }
        vf_store(noise + i, vf_add(rr, l2));
        vf_store(noise + Kp + i, ri);
        vf_store(noise + 2 * Kp + i, ii);
    }
}

void MN_T(mn_bayes_load)(mn_bayes_chunk *c, int64_t t0, int64_t L) {
    const mn_bayes_args *p = c->p;
    c->t0 = t0;
    c->L = L;
    for (int64_t t = 0; t < L; t++) {
        const float *phi = c->phi + t * c->R;
        c->l2[t] = *MN_ROW(float, p->l2, c->b, t0 + t, c->h);
        c->r2[t] = MN_ROW(float, p->r2, c->b, t0 + t, c->h)[c->g];
        load_transition(c, t);
        load_noise(c, t);
        const float *k = MN_ROW(float, p->k, c->b, t0 + t, c->h);
        const float *q = MN_ROW(float, p->q, c->b, t0 + t, c->h);
        load_row(c->k + t * c->Kp, c->kt + t * c->R, k, phi, c);
        load_row(c->q + t * c->Kp, c->qt + t * c->R, q, phi, c);
    }
}

/* z_s <- a_t z_s for s < t, with the sums c_ts = k_t'z_s and g_ts = q_t'z_s */
static void move_rows(mn_bayes_chunk *c, float *cts, float *gts, int64_t t) {
    const int64_t Kp = c->Kp, R = c->R;
    const float *a = c->a + t * R, *k = c->k + t * Kp, *q = c->q + t * Kp;
    for (int64_t s = 0; s < t; s++) {
        float *z = c->z + s * R;
        vf to_k = vf_zero(), to_q = vf_zero();
        for (int64_t i = 0; i < Kp; i += MN_VW) {
            const vf ar = vf_load(a + i), xr = vf_load(z + i);
            vf re = vf_mul(ar, xr);
            if (c->turns) {
                const vf ai = vf_load(a + Kp + i), xi = vf_load(z + Kp + i);
                re = vf_fnma(ai, xi, re);
                vf_store(z + Kp + i, vf_fma(ai, xr, vf_mul(ar, xi)));
            }
            vf_store(z + i, re);
            to_k = vf_fma(re, vf_load(k + i), to_k);
            to_q = vf_fma(re, vf_load(q + i), to_q);
        }
        cts[s] = vf_sum(to_k);
        gts[s] = vf_sum(to_q);
    }
}

/* row = Phi_t x + N_t k on every row, x = P0 Phi_t'k */
static void prior_row(float *row, const mn_bayes_chunk *c, const float *x, const float *k,
                      int64_t t) {
    const int64_t Kp = c->Kp;
    const float *noise = c->noise + t * c->noise_width;
    mn_bayes_turn(row, c->phi + t * c->R, x, Kp, c->turns, false);
    for (int64_t r = 0; r < c->R; r += MN_VW) {
        const int64_t i = r % Kp;
        vf_store(row + r, vf_fma(vf_load(noise + r), vf_load(k + i), vf_load(row + r)));
    }
}

/* row -= sum_{s<t} ell_ts z_s */
static void subtract_rows(float *row, const mn_bayes_chunk *c, int64_t t) {
    const float *ell = c->ell + t * MN_BAYES_CHUNK;
    for (int64_t r = 0; r < c->R; r += MN_VW) {
        const float *z = c->z + r;
        vf even = vf_load(row + r), odd = vf_zero();
        for (int64_t s = 0; s + 1 < t; s += 2) {
            even = vf_fnma(vf_set1(ell[s]), vf_load(z + s * c->R), even);
            odd = vf_fnma(vf_set1(ell[s + 1]), vf_load(z + (s + 1) * c->R), odd);
        }
        if (t % 2) even = vf_fnma(vf_set1(ell[t - 1]), vf_load(z + (t - 1) * c->R), even);
        vf_store(row + r, vf_add(even, odd));
    }
}

/* S: what k'Pbar k is rounded against, the prior variance of k as if P0 were its diagonal */
static float rounding_scale(const mn_bayes_chunk *c, int64_t t) {
    const int64_t Kp = c->Kp;
    const float *phi = c->phi + t * c->R, *k = c->k + t * Kp;
    const float *noise = c->noise + t * c->noise_width;
    vf sum = vf_zero();
    for (int64_t i = 0; i < Kp; i += MN_VW) {
        const vf pr = vf_load(phi + i), square = vf_mul(vf_load(k + i), vf_load(k + i));
        vf x = vf_fma(vf_mul(pr, pr), vf_load(c->diagonal + i), vf_load(noise + i));
        if (c->turns) {
            const vf pi = vf_load(phi + Kp + i);
            x = vf_fma(vf_mul(pi, pi), vf_load(c->diagonal + Kp + i), x);
        }
        sum = vf_fma(square, x, sum);
    }
    return vf_sum(sum);
}

/* q_t'P_t q_t from the prior and the writes up to t, never below 0, where only rounding leads */
static float read_variance(const mn_bayes_chunk *c, const float *gts, int64_t t) {
    const int64_t Kp = c->Kp;
    const float *q = c->q + t * Kp, *noise = c->noise + t * c->noise_width;
    vf sum = vf_zero();
    for (int64_t i = 0; i < Kp; i += MN_VW) {
        const vf x = vf_load(q + i);
        sum = vf_fma(vf_mul(x, x), vf_load(noise + i), sum);
    }
    float variance = vf_dot_whole(c->qt + t * c->R, c->qP + t * c->R, c->R) + vf_sum(sum);
    for (int64_t s = 0; s <= t; s++) variance -= gts[s] * (gts[s] / c->sigma[s]);
    return variance < 0.0f ? 0.0f : variance;
}

/* The chunk in float32; how many tokens until a variance drowns in rounding. */
static int64_t fast_gains(mn_bayes_chunk *c) {
    float cts[MN_BAYES_CHUNK], gts[MN_BAYES_CHUNK];
    for (int64_t t = 0; t < c->L; t++) {
        const float *k = c->k + t * c->Kp;
        float *u = c->u + t * c->R, *ell = c->ell + t * MN_BAYES_CHUNK;
        float *g_sigma = c->g_sigma + t * MN_BAYES_CHUNK;
        move_rows(c, cts, gts, t);
        for (int64_t s = 0; s < t; s++) ell[s] = cts[s] / c->sigma[s];
        prior_row(u, c, c->kP + t * c->R, k, t);
        subtract_rows(u, c, t);
        c->kvar[t] = vf_dot_whole(k, u, c->Kp);
        if (!mn_bayes_sound(c->kvar[t], c->r2[t], rounding_scale(c, t))) return t;
        c->sigma[t] = c->r2[t] + c->kvar[t];
        gts[t] = vf_dot_whole(c->q + t * c->Kp, u, c->Kp);
        for (int64_t s = 0; s <= t; s++) g_sigma[s] = gts[s] / c->sigma[s];
        if (c->reads_variance) c->qvar[t] = read_variance(c, gts, t);
        memcpy(c->z + t * c->R, u, (size_t)c->R * sizeof *u);
    }
    return c->L;
}

void MN_T(mn_bayes_gains)(mn_bayes_chunk *c, const float *P) {
    const int64_t R = c->R, square = MN_BAYES_CHUNK * MN_BAYES_CHUNK;
    mn_gemm_args product = { .c = c->kP, .c_row = R, .a = c->kt, .a_row = R, .a_col = 1, .b = P,
                             .b_row = R, .M = c->L, .N = R, .K = R, .alpha = 1.0f };
    MN_T(mn_gemm)(&product);
    product.c = c->qP;
    product.a = c->qt;
    if (c->reads_variance) MN_T(mn_gemm)(&product);
    for (int64_t r = 0; r < R; r++) c->diagonal[r] = P[r * (R + 1)];
    memset(c->ell, 0, (size_t)square * sizeof *c->ell);
    memset(c->g_sigma, 0, (size_t)square * sizeof *c->g_sigma);
    const int64_t sound = fast_gains(c);
    c->careful = sound < c->L;
    if (c->careful) MN_T(mn_bayes_careful_gains)(c, P, sound);
}

void MN_T(mn_bayes_residuals)(mn_bayes_chunk *c, const float *M) {
    const int64_t Vp = c->Vp;
    MN_T(mn_bayes_load_values)(c->eps, c, c->p->v);
    MN_T(mn_gemm)(&(mn_gemm_args){ .c = c->eps, .c_row = Vp, .a = c->kt, .a_row = c->R, .a_col = 1,
                                   .b = M, .b_row = Vp, .M = c->L, .N = Vp, .K = c->R,
                                   .alpha = -1.0f, .base = MN_GEMM_ADD });
    for (int64_t t = 1; t < c->L; t++) {
        const float *ell = c->ell + t * MN_BAYES_CHUNK;
        for (int64_t j = 0; j < Vp; j += MN_VW) {
            vf sum = vf_load(c->eps + t * Vp + j);
            for (int64_t s = 0; s < t; s++) {
                sum = vf_fnma(vf_set1(ell[s]), vf_load(c->eps + s * Vp + j), sum);
            }
            vf_store(c->eps + t * Vp + j, sum);
        }
    }
}

/* P <- Phi P Phi', where Phi is the whole chunk's; without rotation the lower triangle only */
static void move_covariance(float *P, const mn_bayes_chunk *c) {
    const int64_t Kp = c->Kp, R = c->R;
    const float *phi = c->phi + (c->L - 1) * R;
    for (int64_t i = 0; i < Kp; i++) {
        float *re = P + i * R, *im = P + (Kp + i) * R;
        const vf pr = vf_set1(phi[i]);
        for (int64_t j = 0; !c->turns && j <= i; j += MN_VW) {
            vf_store(re + j, vf_mul(vf_mul(pr, vf_load(phi + j)), vf_load(re + j)));
        }
        if (!c->turns) continue;
        const vf pi = vf_set1(phi[Kp + i]);
        for (int64_t j = 0; j < Kp; j += MN_VW) {
            const vf xr = vf_load(re + j), xi = vf_load(re + Kp + j);
            const vf yr = vf_load(im + j), yi = vf_load(im + Kp + j);
            const vf ar = vf_load(phi + j), ai = vf_load(phi + Kp + j);
            const vf top_r = vf_fnma(pi, yr, vf_mul(pr, xr));
            const vf top_i = vf_fnma(pi, yi, vf_mul(pr, xi));
            const vf low_r = vf_fma(pi, xr, vf_mul(pr, yr)), low_i = vf_fma(pi, xi, vf_mul(pr, yi));
            vf_store(re + j, vf_fnma(top_i, ai, vf_mul(top_r, ar)));
            vf_store(re + Kp + j, vf_fma(top_r, ai, vf_mul(top_i, ar)));
            vf_store(im + j, vf_fnma(low_i, ai, vf_mul(low_r, ar)));
            vf_store(im + Kp + j, vf_fma(low_r, ai, vf_mul(low_i, ar)));
        }
    }
}

void MN_T(mn_bayes_mirror)(float *P, int64_t R) {
    _Alignas(64) float block[MN_VW * MN_VW];
    for (int64_t i = 0; i < R; i += MN_VW) {
        MN_T(mn_transpose)(P + i, R, P + i * R, R, MN_VW, i);
        MN_T(mn_transpose)(block, MN_VW, P + i * (R + 1), R, MN_VW, MN_VW);
        for (int64_t r = 0; r < MN_VW; r++) {
            float *row = P + (i + r) * R + i;
            const vf turned = vf_load(block + r * MN_VW);
            vf_store(row, vf_select(vm_first((int)r + 1), vf_load(row), turned));
        }
    }
}

static void advance_covariance(mn_bayes_chunk *c, float *P) {
    const int64_t Kp = c->Kp, R = c->R;
    const float *noise = c->noise + (c->L - 1) * c->noise_width;
    for (int64_t s = 0; s < c->L; s++) {
        const vf root = vf_set1(1.0f / sqrtf(c->sigma[s]));
        for (int64_t r = 0; r < R; r += MN_VW) {
            vf_store(c->w + s * R + r, vf_mul(root, vf_load(c->z + s * R + r)));
        }
    }
    move_covariance(P, c);
    MN_T(mn_gemm)(&(mn_gemm_args){ .c = P, .c_row = R, .a = c->w, .a_row = 1, .a_col = R, .b = c->w,
                                   .b_row = R, .M = R, .N = R, .K = c->L, .alpha = -1.0f,
                                   .base = MN_GEMM_ADD, .shape = MN_GEMM_C_LOWER });
    for (int64_t i = 0; i < Kp; i++) {
        P[i * (R + 1)] += noise[i];
        if (!c->turns) continue;
        P[(Kp + i) * R + i] += noise[Kp + i];
        P[(Kp + i) * (R + 1)] += noise[2 * Kp + i];
    }
    MN_T(mn_bayes_mirror)(P, R);
}

/* M <- Phi M + sum_s z_s eps_s' / sigma_s */
static void advance_mean(mn_bayes_chunk *c, float *M) {
    const int64_t Kp = c->Kp, R = c->R, Vp = c->Vp;
    const float *phi = c->phi + (c->L - 1) * R;
    for (int64_t i = 0; c->turns && i < Kp; i++) {
        const vf pr = vf_set1(phi[i]), pi = vf_set1(phi[Kp + i]);
        float *re = M + i * Vp, *im = M + (Kp + i) * Vp;
        for (int64_t j = 0; j < Vp; j += MN_VW) {
            const vf x = vf_load(re + j), y = vf_load(im + j);
            vf_store(re + j, vf_fnma(pi, y, vf_mul(pr, x)));
            vf_store(im + j, vf_fma(pi, x, vf_mul(pr, y)));
        }
    }
    for (int64_t s = 0; s < c->L; s++) {
        const vf factor = vf_set1(1.0f / c->sigma[s]);
        for (int64_t j = 0; j < Vp; j += MN_VW) {
            vf_store(c->out + s * Vp + j, vf_mul(factor, vf_load(c->eps + s * Vp + j)));
        }
    }
    MN_T(mn_gemm)(&(mn_gemm_args){ .c = M, .c_row = Vp, .a = c->z, .a_row = 1, .a_col = R,
                                   .b = c->out, .b_row = Vp, .M = R, .N = Vp, .K = c->L,
                                   .alpha = 1.0f, .base = c->turns ? MN_GEMM_ADD : MN_GEMM_SCALE,
                                   .c_scale = phi });
}

void MN_T(mn_bayes_advance)(mn_bayes_chunk *c, float *P, float *M) {
    if (c->careful) MN_T(mn_bayes_careful_advance)(c, P);
    else advance_covariance(c, P);
    if (c->columns) advance_mean(c, M);
}
