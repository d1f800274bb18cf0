/* collision_theory.c - the closed forms of the collision experiment (Appendix E of the paper).
 *
 * With x the predicted variance along k_A and y = k_B'Pbar k_A, a flood of A moves them by (34),
 * (35)
 *
 *   x <- r2 x / (r2 + x) + l2,   y - rho x <- r2 / (r2 + x) (y - rho x)
 *
 * and the answers by (53), (54): a <- a + (x / s) (v - a), b <- b + (y / s) (v - a), s = r2 + x. */
#include "experiments/collision/collision.h"

#include <math.h>

enum { A = 0, B = 1 };

static double softmax_of_b(const double b[2]) {
    return 1.0 / (1.0 + exp(b[A] - b[B]));
}

/* The series (57) from the state before the flood, until it no longer moves. */
static void bayes_limit(mn_collision_theory *out, const mn_collision_setup *s,
                        const mn_collision_point *before) {
    static const double v[2] = { 1.0, 0.0 };
    double a[2] = { before->a[A], before->a[B] }, b[2] = { before->b[A], before->b[B] };
    double x = before->var_a + s->l2, y = before->cov_ab + s->l2 * s->rho;
    for (int64_t n = 0; n < 1000000 && fabs(v[A] - a[A]) + fabs(v[B] - a[B]) > 1e-18; n++) {
        const double total = s->r2 + x;
        for (int i = 0; i < 2; i++) {
            b[i] += y / total * (v[i] - a[i]);
            a[i] += x / total * (v[i] - a[i]);
        }
        const double rest = s->r2 / total * (y - s->rho * x);
        x = s->r2 * x / total + s->l2;
        y = s->rho * x + rest;
    }
    out->bayes_b[A] = b[A];
    out->bayes_b[B] = b[B];
    out->bayes_p = softmax_of_b(b);
}

/* (52): b0 - rho (a0 - v_A) */
static void reset_limit(mn_collision_theory *out, const mn_collision_setup *s,
                        const mn_collision_point *before) {
    out->reset_b[A] = before->b[A] - s->rho * (before->a[A] - 1.0);
    out->reset_b[B] = before->b[B] - s->rho * before->a[B];
    out->reset_p = softmax_of_b(out->reset_b);
}

/* Every flood write adds rho w to b(A) and nothing to b(B). */
static void linear_end(mn_collision_theory *out, const mn_collision_setup *s,
                       const mn_collision_point *before) {
    const double w = s->c / (s->c + s->r2);
    out->linear_b[A] = before->b[A] + (double)s->n_flood * w * s->rho;
    out->linear_b[B] = before->b[B];
    out->linear_p = softmax_of_b(out->linear_b);
}

/* (40), (44) with the whole covariance before the flood in the plane of k_A and k_B: Pbar k_A
 * has the components x along k_A and z across it, in the direction of k_B's residual. */
static void flood_onset(mn_collision_theory *out, const mn_collision_setup *s,
                        const mn_collision_point *before) {
    const double x = before->var_a + s->l2, y = before->cov_ab + s->l2 * s->rho;
    const double z = (y - s->rho * x) / sqrt(1.0 - s->rho * s->rho);
    out->onset_gain = x / (s->r2 + x);
    out->onset_cosine = x / sqrt(x * x + z * z);
}

void mn_collision_predict(mn_collision_theory *out, const mn_collision_setup *s,
                          const mn_collision_point *bayes, const mn_collision_point *reset,
                          const mn_collision_point *linear) {
    static const mn_collision_point nothing;
    const int64_t n = s->n_seed * MN_COLLISION_M + s->n_boost; // writes before the flood
    const double predicted = 0.5 * (s->l2 + sqrt(s->l2 * s->l2 + 4.0 * s->r2 * s->l2));
    mn_collision_point prior = { .var_a = s->p0, .var_b = s->p0, .cov_ab = s->rho * s->p0 };
    out->boost_p = 1.0 / (1.0 + exp(-1.0));
    out->gain_floor = predicted / (s->r2 + predicted);
    out->var_a = predicted - s->l2;
    out->var_b_rate = (1.0 - s->rho * s->rho) * s->l2;
    out->cosine_limit = sqrt(1.0 - s->rho * s->rho);
    flood_onset(out, s, n > 0 ? &bayes[n - 1] : &prior);
    bayes_limit(out, s, n > 0 ? &bayes[n - 1] : &prior);
    reset_limit(out, s, n > 0 ? &reset[n - 1] : &nothing);
    linear_end(out, s, n > 0 ? &linear[n - 1] : &nothing);
}
