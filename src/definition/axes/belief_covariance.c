/* belief_covariance.c - a Gaussian whose memory rows have a dense covariance P, one per noise
 * group:
 *
 *   u = P~ k;  s = r2 + k'u;  P = P~ - u u' / s;  M_:j = M~_:j + (u / s) (v_j - k'M~_:j)
 *
 * Value column j belongs to group floor(j G / V). R rows: K, or 2K when the memory rotates; then
 * k and q touch the even ones. Parts: M (R,V), P (G,R,R). Fresh: M = 0, P = p0 I. */
#include "definition/axes.h"

static int64_t row_of(const mn_head *head, int64_t i) {
    return i * (head->size->R / head->size->K);
}

static void start(mn_head *head) {
    const int64_t R = head->size->R;
    for (int64_t g = 0; g < head->size->G; g++) {
        for (int64_t i = 0; i < R; i++) head->part[1][(g * R + i) * R + i] = head->in.p0[0];
    }
}

/* y = P x with x given on the rows that keys touch; returns x'y */
static double times_covariance(double *y, const double *P, const double *x, const mn_head *head) {
    const int64_t R = head->size->R, K = head->size->K;
    double along = 0.0;
    for (int64_t r = 0; r < R; r++) {
        y[r] = 0.0;
        for (int64_t i = 0; i < K; i++) y[r] += P[r * R + row_of(head, i)] * x[i];
    }
    for (int64_t i = 0; i < K; i++) along += x[i] * y[row_of(head, i)];
    return along;
}

static void correct_column(mn_head *head, const double *u, double s, int64_t j) {
    const int64_t V = head->size->V;
    double *M = head->part[0], missing = head->in.v[j];
    for (int64_t i = 0; i < head->size->K; i++) {
        missing -= head->in.k[i] * M[row_of(head, i) * V + j];
    }
    for (int64_t r = 0; r < head->size->R; r++) M[r * V + j] += u[r] / s * missing;
}

static void observe(mn_head *head) {
    const int64_t R = head->size->R, V = head->size->V, G = head->size->G;
    double *u = head->scratch;
    for (int64_t g = 0; g < G; g++) {
        double *P = head->part[1] + g * R * R;
        const double s = head->in.r2[g] + times_covariance(u, P, head->in.k, head);
        for (int64_t j = 0; j < V; j++) {
            if (j * G / V == g) correct_column(head, u, s, j);
        }
        for (int64_t r = 0; r < R; r++) {
            for (int64_t c = 0; c < R; c++) P[r * R + c] -= u[r] * u[c] / s;
        }
    }
}

static double mean(const mn_head *head, int64_t i, int64_t j) {
    return head->part[0][row_of(head, i) * head->size->V + j];
}

/* scale^2 q'P_g q, the same for all columns of a group */
static void variance(double *out, const mn_head *head) {
    const int64_t R = head->size->R, V = head->size->V, G = head->size->G;
    const double scale2 = head->config->scale * head->config->scale;
    for (int64_t g = 0; g < G; g++) {
        const double *P = head->part[1] + g * R * R;
        const double along = times_covariance(head->scratch, P, head->in.q, head);
        for (int64_t j = 0; j < V; j++) {
            if (j * G / V == g) out[j] = scale2 * along;
        }
    }
}

const mn_belief mn_belief_covariance = {
    .name = "dense covariance",
    .equation = "u = P~ k, s = r2 + k'u, P = P~ - u u'/s, M = M~ + u (v - M~'k)'/s",
    .matrix = true,
    .start = start,
    .observe = observe,
    .mean = mean,
    .variance = variance,
};
