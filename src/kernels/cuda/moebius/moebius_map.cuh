/* moebius_map.cuh - Kalman Linear Attention's chunks as maps of adjoints.
 *
 * The adjoint (dlam0, deta0) of a cell's state in front of a chunk is linear in the one behind it.
 * With lam, eta and the reads' means and variances as functions of lam0 and eta0,
 *
 *   dlam0 = dlam lam' + deta eta' + sum_t gm_t mean'_t + gv_t var'_t       ' for d / d lam0
 *   deta0 =             deta eta* + sum_t gm_t mean*_t                     * for d / d eta0
 *
 * are five numbers, which the walk through the states finds as it goes (moebius_state_scan.cuh): no
 * walk
 * against time is needed. By rays eta0 adds f to e, with f <- a f, and the determinant of a token's
 * step of (n, d) is a^2, so that derivatives need no differences of large numbers:
 *
 *   mean* = f / n =: s        var' = -s^2        mean' = s r
 *   r <- r - (v - k mean) prec k a s_before,     r = -mean in front of the first token */
#ifndef MN_KERNELS_CUDA_MOEBIUS_MOEBIUS_MAP_CUH
#define MN_KERNELS_CUDA_MOEBIUS_MOEBIUS_MAP_CUH

#include "kernels/cuda/moebius/moebius.cuh"

namespace moebius {

/* What a token reads and says: cotangents of its mean and its variance. */
struct read_cots {
    float mean, var;

    /* FULL: with cotangents gw of yvar, or a read from the prior. */
    template <bool FULL>
    __device__ __forceinline__ static read_cots of(float q, float gy, float gw, float a, float a2,
                                                   bool prior) {
        if (!FULL) return { gy * q, 0.0f };
        const float of_var = gw * q * q;
        return prior ? read_cots{ gy * q * a, of_var * a2 } : read_cots{ gy * q, of_var };
    }
};

/* Some tokens as a map of adjoints. */
struct cell_map {
    float lam, cross, eta;       // d lam / d lam0, d eta / d lam0, d eta / d eta0
    float to_lam, to_eta;        // what the reads say to lam0 and eta0

    __device__ static cell_map none() {
        return { 1.0f, 0.0f, 1.0f, 0.0f, 0.0f };
    }

    /* With the tokens of `next` behind them. */
    __device__ __forceinline__ void append(const cell_map &next) {
        to_lam = fmaf(lam, next.to_lam, fmaf(cross, next.to_eta, to_lam));
        to_eta = fmaf(eta, next.to_eta, to_eta);
        cross = fmaf(next.eta, cross, next.cross * lam);
        lam *= next.lam;
        eta *= next.eta;
    }

    /* The adjoint from behind to in front. */
    __device__ __forceinline__ void pull(float &dlam, float &deta) const {
        dlam = fmaf(lam, dlam, fmaf(cross, deta, to_lam));
        deta = fmaf(eta, deta, to_eta);
    }

    __device__ __forceinline__ void store(float *to, int64_t set) const {
        to[0] = lam, to[set] = cross, to[2 * set] = eta;
        to[3 * set] = to_lam, to[4 * set] = to_eta;
    }

    __device__ __forceinline__ static cell_map load(const float *from, int64_t set) {
        return { from[0], from[set], from[2 * set], from[3 * set], from[4 * set] };
    }
};

enum { MAP_NUMBERS = 5 };

/* The same of a few tokens as rays give it: the names of the equations above. */
struct ray_map {
    float f, s, r, mean;
    float to_lam, to_eta;

    /* In front of the first token, where the ray is x. */
    __device__ __forceinline__ static ray_map from(const ray &x) {
        const float by = mn_inverse(x.n), mean = x.e * by;
        return { x.d, x.d * by, -mean, mean, 0.0f, 0.0f };
    }

    /* Of no tokens, whatever x may be. */
    __device__ __forceinline__ static ray_map none(const ray &x) {
        return { x.d, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f };
    }

    /* One token more, behind which the ray is x; g is what its read says. */
    template <bool FULL>
    __device__ __forceinline__ void advance(const ray &x, float a, float pk, float k, float v,
                                            const read_cots &g) {
        const float by = mn_inverse(x.n), push = pk * (a * s);
        mean = x.e * by;
        f *= a;
        s = f * by;
        r = fmaf(-fmaf(-mean, k, v), push, r);
        const float pull = g.mean * s;
        to_eta += pull;
        to_lam = fmaf(pull, r, to_lam);
        if (FULL) to_lam = fmaf(-(g.var * s), s, to_lam);
    }

    /* Behind the last one, by = 1 / d there. */
    __device__ __forceinline__ cell_map map(float by) const {
        const float eta = f * by;
        return { eta * eta, eta * fmaf(mean, eta, r), eta, to_lam, to_eta };
    }
};

}    // namespace moebius

#endif
