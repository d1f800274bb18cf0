/* moebius_projective.cuh - Kalman Linear Attention without a division per token: cells by rays.
 *
 * A state is kept up to a factor, lam = n / d and eta = e / d. A token is linear then,
 *
 *   d <- a^2 d + p n      g = prec k d      n <- n + k g      e <- a e + v g
 *
 * and reads e / n. With lam, prec >= 0 all of n and d are sums of positive numbers. A ray starts
 * from d = 1 and is used for a few tokens, so that nothing leaves float's range; callers fall back
 * on lam and eta where ray_sound says no. Adjoints of (n, d, e) follow by the chain rule; that the
 * factor has no meaning, n n' + d d' + e e' = 0, makes one of them from two at a ray's end. */
#ifndef MN_KERNELS_CUDA_MOEBIUS_MOEBIUS_PROJECTIVE_CUH
#define MN_KERNELS_CUDA_MOEBIUS_MOEBIUS_PROJECTIVE_CUH

namespace moebius {

struct ray {
    float n, d, e;
};

__device__ __forceinline__ ray ray_after(const ray &x, float a, float a2, float p, float pk,
                                         float k, float v) {
    ray y;
    y.d = fmaf(p, x.n, a2 * x.d);
    const float gain = pk * y.d;
    y.n = fmaf(k, gain, x.n);
    y.e = fmaf(v, gain, a * x.e);
    return y;
}

/* How far down lam may be in front of 4 or 8 tokens for none of their n to lie below 1e-12 d, where
 * a floor would bind: n never falls, and d is at most the larger of 1 and (a^2)^tokens times 1 +
 * tokens p n. */
struct ray_edge {
    float by_n, least;

    __device__ static ray_edge of(float a2, float p, int tokens) {
        const float grown = fmaxf(a2, 1.0f), four = grown * grown * grown * grown;
        const float most = tokens == 4 ? four : four * four;
        return { fmaxf(2e-12f * (float)tokens * most * p, 1e-20f), 2e-12f * most };
    }

    /* Of two cells at once. */
    __device__ ray_edge with(const ray_edge &other) const {
        return { fmaxf(by_n, other.by_n), fmaxf(least, other.least) };
    }

    /* From lam in front of the tokens and n after them; false for what is no number. */
    __device__ bool holds(float lam, float n) const {
        return fmaf(by_n, n, least) <= lam;
    }
};

/* The adjoint of a ray (n, d, e) behind which lam and eta have the adjoints dlam and deta; by =
 * 1 / d, lam and eta as they are there. */
__device__ __forceinline__ ray pull_behind(float lam, float eta, float by, float dlam, float deta) {
    ray w;
    w.n = dlam * by;
    w.e = deta * by;
    w.d = -fmaf(w.n, lam, w.e * eta);
    return w;
}

/* What one token of one cell adds to the gradients of its inputs and of the dynamics. */
struct ray_cots {
    float k, v, prec, a, a2, p;
};

/* The adjoint w from behind the token that leads from x to y to in front of it. `to` adds up but
 * for k. */
__device__ __forceinline__ void pull_through(ray &w, ray_cots &to, const ray &x, const ray &y,
                                             float a, float a2, float p, float prec, float k,
                                             float v) {
    const float pk = prec * k, gain = pk * y.d, to_gain = fmaf(k, w.n, v * w.e);
    const float to_pk = y.d * to_gain;
    to.v = fmaf(gain, w.e, to.v);
    to.prec = fmaf(k, to_pk, to.prec);
    to.k = fmaf(prec, to_pk, gain * w.n);
    w.d = fmaf(pk, to_gain, w.d);
    w.n = fmaf(p, w.d, w.n);
    to.a = fmaf(x.e, w.e, to.a);
    to.a2 = fmaf(x.d, w.d, to.a2);
    to.p = fmaf(x.n, w.d, to.p);
    w.d *= a2;
    w.e *= a;
}

/* The same of the adjoint alone. */
__device__ __forceinline__ void pull_back(ray &w, float a, float a2, float p, float prec, float k,
                                          float v) {
    w.d = fmaf(prec * k, fmaf(k, w.n, v * w.e), w.d);
    w.n = fmaf(p, w.d, w.n);
    w.d *= a2;
    w.e *= a;
}

}    // namespace moebius

#endif
