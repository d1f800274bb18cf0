/* bayes_careful.c - a chunk of the Bayesian Layer in double, where float32 would spoil P:
 * exact writes, keys repeated without process noise, ranges over many decades.
 *
 * The state stays float32. Its rounding when a chunk is done is relative to the covariance as it is
 * then; float32 sums inside the chunk would leave errors relative to the covariance as it was
 * before, and once the writes have shrunk it, those make it indefinite for good.
 *
 * The stored P is itself rounded, and may be indefinite by as much. Where a key meets that, and
 * neither the write's noise nor the process noise of the chunk hides it, the chunk starts from P
 * with its diagonal raised by a few roundings: the least noise that makes it a covariance. */
#include "kernels/cpu/bayes/bayes_chunk.h"

#include <math.h>
#include <string.h>

#include "base/util.h"

/* Double's own rounding, with room for the length of the sums. */
static const double wide_rounding = 64 * 0x1p-53;

typedef struct wide {
    double *phi, *raise, *kt, *row_re, *row_im;    // [R]
    double *kP, *qP, *z;                           // CHUNK rows [R]
    double *noise;                                 // rr, ri, ii [Kp]
    double *sigma;                                 // CHUNK
} wide;

int64_t MN_T(mn_bayes_careful_doubles)(const mn_bayes_chunk *c) {
    return c->R * (5 + 3 * MN_BAYES_CHUNK) + 3 * c->Kp + MN_BAYES_CHUNK;
}

static wide wide_of(const mn_bayes_chunk *c) {
    const int64_t R = c->R;
    double *at = c->wide;
    wide w = { .phi = at, .raise = at + R, .kt = at + 2 * R };
    w.row_re = at + 3 * R;
    w.row_im = at + 4 * R;
    w.kP = at + 5 * R;
    w.qP = w.kP + MN_BAYES_CHUNK * R;
    w.z = w.qP + MN_BAYES_CHUNK * R;
    w.noise = w.z + MN_BAYES_CHUNK * R;
    w.sigma = w.noise + 3 * c->Kp;
    return w;
}

/* x <- a x on one row */
static void turn(double *x, const float *a, const mn_bayes_chunk *c) {
    const int64_t Kp = c->Kp;
    for (int64_t i = 0; i < Kp; i++) {
        const double re = x[i];
        x[i] = a[i] * re;
        if (!c->turns) continue;
        x[i] -= a[Kp + i] * x[Kp + i];
        x[Kp + i] = a[i] * x[Kp + i] + a[Kp + i] * re;
    }
}

/* out = (P + raise) Phi'x, x on the real rows */
static void through_covariance(double *out, const wide *w, const mn_bayes_chunk *c, const float *P,
                               const float *x) {
    const int64_t Kp = c->Kp, R = c->R;
    for (int64_t i = 0; i < Kp; i++) {
        w->kt[i] = w->phi[i] * x[i];
        if (c->turns) w->kt[Kp + i] = -w->phi[Kp + i] * x[i];
    }
    for (int64_t r = 0; r < R; r++) out[r] = w->raise[r] * w->kt[r];
    for (int64_t r = 0; r < R; r++) {
        const double factor = w->kt[r];
        const float *row = P + r * R;
        for (int64_t j = 0; factor != 0.0 && j < R; j++) out[j] += factor * row[j];
    }
}

/* Phi_t from Phi_{t-1}, and P0 Phi_t'k_t and P0 Phi_t'q_t, for all tokens */
static void products(const wide *w, const mn_bayes_chunk *c, const float *P) {
    const int64_t Kp = c->Kp, R = c->R;
    for (int64_t r = 0; r < R; r++) w->phi[r] = r < Kp ? 1.0 : 0.0;
    for (int64_t t = 0; t < c->L; t++) {
        turn(w->phi, c->a + t * R, c);
        through_covariance(w->kP + t * R, w, c, P, c->k + t * Kp);
        if (c->reads_variance) through_covariance(w->qP + t * R, w, c, P, c->q + t * Kp);
        for (int64_t r = 0; r < R; r++) {
            c->kP[t * R + r] = (float)w->kP[t * R + r];
            if (c->reads_variance) c->qP[t * R + r] = (float)w->qP[t * R + r];
        }
    }
}

static void move_noise(double *noise, const mn_bayes_chunk *c, int64_t t) {
    const int64_t Kp = c->Kp;
    const float *a = c->a + t * c->R;
    for (int64_t i = 0; i < c->p->call.K; i++) {
        const double ar = a[i], rr = noise[i];
        noise[i] = ar * ar * rr + c->l2[t];
        if (!c->turns) continue;
        const double ai = a[Kp + i], ri = noise[Kp + i], ii = noise[2 * Kp + i];
        noise[i] += ai * (ai * ii - 2.0 * ar * ri);
        noise[Kp + i] = ar * ai * (rr - ii) + (ar * ar - ai * ai) * ri;
        noise[2 * Kp + i] = ai * ai * rr + 2.0 * ar * ai * ri + ar * ar * ii;
    }
}

/* row = Phi_t x + N_t k, and from that the sum over s < t of coefficient_s z_s */
static void written_row(double *row, const wide *w, const mn_bayes_chunk *c, const double *x,
                        const float *k, const double *coefficient, int64_t t) {
    const int64_t Kp = c->Kp, R = c->R;
    for (int64_t i = 0; i < Kp; i++) {
        row[i] = w->phi[i] * x[i] + w->noise[i] * k[i];
        if (!c->turns) continue;
        row[i] -= w->phi[Kp + i] * x[Kp + i];
        row[Kp + i] = w->phi[i] * x[Kp + i] + w->phi[Kp + i] * x[i] + w->noise[Kp + i] * k[i];
    }
    for (int64_t s = 0; s < t; s++) {
        const double *z = w->z + s * R;
        for (int64_t r = 0; r < R; r++) row[r] -= coefficient[s] * z[r];
    }
}

static double not_below_zero(double x) {
    return x < 0.0 ? 0.0 : x;    // NaN stays
}

static double dot(const float *x, const double *y, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

/* S of bayes_chunk.h with raise, and the part that process noise gives */
static double rounding_scale(double *from_noise, const wide *w, const mn_bayes_chunk *c,
                             const float *k) {
    const int64_t Kp = c->Kp;
    double all = 0.0, noise = 0.0;
    for (int64_t i = 0; i < c->p->call.K; i++) {
        const double square = (double)k[i] * k[i];
        const double pr = w->phi[i], pi = c->turns ? w->phi[Kp + i] : 0.0;
        double x = pr * pr * (c->diagonal[i] + w->raise[i]);
        if (c->turns) x += pi * pi * (c->diagonal[Kp + i] + w->raise[Kp + i]);
        all += square * (fmax(x, 0.0) + w->noise[i]);
        noise += square * w->noise[i];
    }
    *from_noise = noise;
    return all;
}

/* q_t'P_t q_t, which only rounding could make negative */
static double read_variance(const wide *w, const mn_bayes_chunk *c, const double *gts, int64_t t) {
    const int64_t Kp = c->Kp;
    const float *q = c->q + t * Kp;
    const double *qP = w->qP + t * c->R;
    double sum = 0.0;
    for (int64_t i = 0; i < Kp; i++) {
        sum += w->phi[i] * q[i] * qP[i] + w->noise[i] * q[i] * q[i];
        if (c->turns) sum -= w->phi[Kp + i] * q[i] * qP[Kp + i];
    }
    for (int64_t s = 0; s <= t; s++) sum -= gts[s] * (gts[s] / w->sigma[s]);
    return not_below_zero(sum);
}

static void narrow(float *to, const double *from, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = (float)from[i];
}

/* One token, its results only from token `first` on; false where the rounding of P0 shows. w->phi
 * is Phi_t. */
static bool token(const wide *w, mn_bayes_chunk *c, int64_t t, int64_t first) {
    const int64_t Kp = c->Kp, R = c->R;
    const float *k = c->k + t * Kp, *q = c->q + t * Kp;
    double ell[MN_BAYES_CHUNK], gts[MN_BAYES_CHUNK], noise, *u = w->z + t * R;
    turn(w->phi, c->a + t * R, c);
    move_noise(w->noise, c, t);
    for (int64_t s = 0; s < t; s++) {
        double *z = w->z + s * R;
        turn(z, c->a + t * R, c);
        ell[s] = dot(k, z, Kp) / w->sigma[s];
        gts[s] = dot(q, z, Kp);
    }
    written_row(u, w, c, w->kP + t * R, k, ell, t);
    gts[t] = dot(q, u, Kp);
    const double S = rounding_scale(&noise, w, c, k), variance = dot(k, u, Kp), r2 = c->r2[t];
    const double shows = MN_BAYES_HIDDEN * MN_BAYES_ROUNDING * S;
    const bool sound = fmin(variance, r2) >= shows || noise >= shows;
    w->sigma[t] = not_below_zero(variance) + (r2 < wide_rounding * S ? wide_rounding * S : r2);
    if (t < first) return sound;
    c->kvar[t] = (float)not_below_zero(variance);
    c->sigma[t] = (float)w->sigma[t];
    if (c->reads_variance) c->qvar[t] = (float)read_variance(w, c, gts, t);
    narrow(c->u + t * R, u, R);
    narrow(c->ell + t * MN_BAYES_CHUNK, ell, t);
    for (int64_t s = 0; s <= t; s++) {
        c->g_sigma[t * MN_BAYES_CHUNK + s] = (float)(gts[s] / w->sigma[s]);
    }
    return sound;
}

/* Results of tokens from `first` on. The token at which the rounding of P0 shows, if `inflation` is
 * still 0 and it is one of these; else L. */
static int64_t attempt(mn_bayes_chunk *c, const float *P, float inflation, int64_t first) {
    const wide w = wide_of(c);
    const int64_t R = c->R;
    for (int64_t r = 0; r < R; r++) w.raise[r] = inflation * fmax(c->diagonal[r], 0.0);
    products(&w, c, P);
    for (int64_t r = 0; r < R; r++) w.phi[r] = r < c->Kp ? 1.0 : 0.0;
    memset(w.noise, 0, (size_t)(3 * c->Kp) * sizeof *w.noise);
    for (int64_t t = 0; t < c->L; t++) {
        const bool sound = token(&w, c, t, first);
        if (!sound && t >= first && inflation == 0.0f) return t;
    }
    narrow(c->z, w.z, c->L * R);
    return c->L;
}

void MN_T(mn_bayes_careful_gains)(mn_bayes_chunk *c, const float *P, int64_t first) {
    const int64_t shows = attempt(c, P, 0.0f, first);
    if (shows < c->L) attempt(c, P, MN_BAYES_RAISE * MN_BAYES_ROUNDING, shows);
}

/* out = row r of P0 + raise, over all columns times Phi' from the right */
static void row_times_phi(double *out, const wide *w, const mn_bayes_chunk *c, const float *P,
                          int64_t r) {
    const int64_t Kp = c->Kp, R = c->R;
    for (int64_t j = 0; j < R; j++) out[j] = P[r * R + j];
    out[r] += w->raise[r];
    for (int64_t j = 0; j < Kp; j++) {
        const double re = out[j];
        out[j] = w->phi[j] * re;
        if (!c->turns) continue;
        out[j] -= w->phi[Kp + j] * out[Kp + j];
        out[Kp + j] = w->phi[j] * out[Kp + j] + w->phi[Kp + j] * re;
    }
}

/* row r of P = moved - sum_s z_s z_s' / sigma_s */
static void write_row(float *P, const wide *w, const mn_bayes_chunk *c, double *moved, int64_t r) {
    const int64_t R = c->R;
    for (int64_t s = 0; s < c->L; s++) {
        const double *z = w->z + s * R, factor = z[r] / w->sigma[s];
        for (int64_t j = 0; j < R; j++) moved[j] -= factor * z[j];
    }
    narrow(P + r * R, moved, R);
}

void MN_T(mn_bayes_careful_advance)(mn_bayes_chunk *c, float *P) {
    const wide w = wide_of(c);
    const int64_t Kp = c->Kp, R = c->R;
    for (int64_t i = 0; i < Kp; i++) {
        const double pr = w.phi[i], pi = c->turns ? w.phi[Kp + i] : 0.0;
        row_times_phi(w.row_re, &w, c, P, i);
        if (c->turns) row_times_phi(w.row_im, &w, c, P, Kp + i);
        for (int64_t j = 0; j < R; j++) {
            const double x = w.row_re[j], y = c->turns ? w.row_im[j] : 0.0;
            w.row_re[j] = pr * x - pi * y;
            w.row_im[j] = pi * x + pr * y;
        }
        w.row_re[i] += w.noise[i];
        if (c->turns) {
            w.row_im[i] += w.noise[Kp + i];
            w.row_im[Kp + i] += w.noise[2 * Kp + i];
            write_row(P, &w, c, w.row_im, Kp + i);
        }
        write_row(P, &w, c, w.row_re, i);
    }
    MN_T(mn_bayes_mirror)(P, R);
}
