/* transition_rotation.c - damped rotations with process noise: rows 2i and 2i+1 of the memory
 * are the real and imaginary part of x_i, and x~_i = exp(la_i + i theta_i) x_i. Noise enters the
 * real rows, which are the only ones that keys and queries touch.
 *
 *   M~ = A M,   P~ = A P A' + l2 diag(1,0,1,0 ...)
 *
 * Belief parts: mean (2K,V), covariance of each noise group (G,2K,2K). */
#include "definition/axes.h"

#include <math.h>

/* Turns and damps the pairs (x[0], x[step]), (x[2 step], x[3 step]) ... */
static void turn(double *x, int64_t step, const mn_head *head) {
    for (int64_t i = 0; i < head->size->K; i++) {
        const double radius = exp(head->in.la[i]);
        const double c = radius * cos(head->in.theta[i]), s = radius * sin(head->in.theta[i]);
        double *re = x + 2 * i * step, *im = re + step;
        const double was = *re;
        *re = c * was - s * *im;
        *im = s * was + c * *im;
    }
}

static void predict(mn_head *head) {
    const int64_t K = head->size->K, V = head->size->V, R = 2 * K;
    for (int64_t j = 0; j < V; j++) turn(head->part[0] + j, V, head);
    for (int64_t g = 0; g < head->size->G; g++) {
        double *P = head->part[1] + g * R * R;
        for (int64_t j = 0; j < R; j++) turn(P + j, R, head);
        for (int64_t i = 0; i < R; i++) turn(P + i * R, 1, head);
        for (int64_t i = 0; i < R; i += 2) P[i * R + i] += head->in.l2[0];
    }
}

const mn_transition mn_transition_rotation = {
    .name = "damped rotation, noise",
    .equation = "M~ = A M, P~ = A P A' + l2 diag(1,0,1,0..)",
    .predict = predict,
};
