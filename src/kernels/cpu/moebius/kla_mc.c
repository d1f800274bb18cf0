/* kla_mc.c - KLA+ loss: marginal likelihood under S draws; equations in ref/kla_mc.c.
 *
 * A block of tokens gives ROWS or so feature rows, one per token and draw. Logits are never kept:
 * they are made panel by panel of the vocabulary, once for the log-normaliser of each row, and
 * again where log-probabilities or gradients need them. Backward, phase 0 goes over blocks of
 * tokens (weights, normalisers, gradients of the features), phase 1 over panels of head rows, which
 * recompute features and logits, and phase 2 adds the blocks' shares of the gradient of norm. */
#include "base/checked.h"
#include "kernels/access.h"
#include "kernels/kernel.h"
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/simd/lanes.h"

#include <math.h>
#include <string.h>

enum { ROWS = 64, PANEL = 128 };

/* Scratch of an item. Rows are (token of the block, draw). */
typedef struct work {
    const mn_kla_mc_args *args;
    int64_t first, n_tokens, n_rows;
    float *h, *scaled;          // [rows][D] features; x / rms
    float *r;                   // [rows] 1 / rms
    float *top, *sum, *hit; // [rows] largest logit so far, sum of exp below it, logit of the target
    float *weight, *lse;        // [rows] g w_s, log-normaliser
    float *logits;              // [rows][PANEL]
    float *dh;                  // [rows][D]
    float *dmu, *dvar;          // [D]
} work;

static int64_t tokens_of_block(const mn_call *call) {
    return mn_max(1, ROWS / mn_max(1, call->S));
}

static int64_t n_blocks(const mn_call *call) {
    return mn_ceil_div(call->B * call->T, tokens_of_block(call));
}

static bool scratch_bytes(size_t *bytes, const mn_call *call) {
    int64_t rows, floats;
    return mn_mul_i64(&rows, tokens_of_block(call), call->S) && mn_mul_i64(&floats, call->D, 3) &&
           mn_add_i64(&floats, floats, PANEL + 6) && mn_mul_i64(&floats, floats, rows) &&
           mn_add_i64(&floats, floats, 2 * call->D) &&
           mn_mul_size(bytes, (size_t)floats, sizeof(float));
}

static void open_work(work *w, const mn_kla_mc_args *args, float *memory) {
    const int64_t D = args->call.D, rows = tokens_of_block(&args->call) * args->call.S;
    *w = (work){ .args = args };
    float **of_features[] = { &w->h, &w->scaled, &w->dh };
    float **of_rows[] = { &w->r, &w->top, &w->sum, &w->hit, &w->weight, &w->lse };
    for (size_t i = 0; i < MN_COUNTOF(of_features); i++, memory += rows * D) {
        *of_features[i] = memory;
    }
    for (size_t i = 0; i < MN_COUNTOF(of_rows); i++, memory += rows) *of_rows[i] = memory;
    w->logits = memory;
    w->dmu = w->logits + rows * PANEL;
    w->dvar = w->dmu + D;
}

/* ---- features -------------------------------------------------------------------------------- */

static const float *noise_row(const mn_kla_mc_args *p, int64_t token, int64_t draw) {
    return (const float *)p->noise.data + (draw * p->call.B * p->call.T + token) * p->call.D;
}

/* Class of a token; -1 where it is none. */
static int64_t target_of(const mn_kla_mc_args *p, int64_t token) {
    const float x = *MN_ROW(float, p->target, token / p->call.T, token % p->call.T, 0);
    return x >= 0.0f && x < (float)p->call.V ? (int64_t)x : -1;
}

/* Of NaN it is NaN: vf_max takes its second argument then. */
static inline vf deviation(const float *var, int n) {
    return vf_sqrt(vf_max(vf_set1(1e-12f), vf_load_n(var, n)));
}

static void feature_row(work *w, int64_t row, int64_t token, int64_t draw) {
    const mn_kla_mc_args *p = w->args;
    const int64_t D = p->call.D, b = token / p->call.T, t = token % p->call.T;
    const float *mu = MN_ROW(float, p->mu, b, t, 0), *var = MN_ROW(float, p->var, b, t, 0);
    const float *noise = noise_row(p, token, draw), *norm = p->norm.data;
    float *h = w->h + row * D, *scaled = w->scaled + row * D;
    vf square = vf_zero();
    for (int64_t i = 0; i < D; i += MN_VW) {
        const int n = vf_lanes(D - i);
        vf x = vf_fma(deviation(var + i, n), vf_load_n(noise + i, n), vf_load_n(mu + i, n));
        x = vf_keep_first(x, n);
        vf_store_n(h + i, x, n);
        square = vf_fma(x, x, square);
    }
    if (!norm) return;
    w->r[row] = 1.0f / sqrtf(vf_sum(square) / (float)D + (float)p->norm_eps);
    const vf r = vf_set1(w->r[row]);
    for (int64_t i = 0; i < D; i += MN_VW) {
        const int n = vf_lanes(D - i);
        const vf x = vf_mul(vf_load_n(h + i, n), r);
        vf_store_n(scaled + i, x, n);
        vf_store_n(h + i, vf_mul(x, vf_load_n(norm + i, n)), n);
    }
}

/* Takes block `block` of tokens. */
static void features(work *w, int64_t block) {
    const mn_call *call = &w->args->call;
    const int64_t S = call->S;
    w->first = block * tokens_of_block(call);
    w->n_tokens = mn_min(tokens_of_block(call), call->B * call->T - w->first);
    w->n_rows = w->n_tokens * S;
    for (int64_t row = 0; row < w->n_rows; row++) feature_row(w, row, w->first + row / S, row % S);
}

/* ---- logits ---------------------------------------------------------------------------------- */

/* Logits of classes [v0, v0 + n). */
static void panel_logits(const work *w, int64_t v0, int64_t n) {
    const int64_t D = w->args->call.D;
    const mn_gemm_args product = {
        .c = w->logits, .c_row = PANEL, .a = w->h, .a_row = D, .a_col = 1,
        .b = (const float *)w->args->head.data + v0 * D, .b_row = D,
        .M = w->n_rows, .N = n, .K = D, .alpha = 1.0f,
    };
    MN_T(mn_gemm_nt)(&product);
}

/* Largest of n numbers and `top`, and the sum of exp(x - largest) with the sum so far. */
static void extend_sum(float *top, float *sum, const float *x, int64_t n) {
    vf most = vf_set1(*top), total = vf_zero();
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        most = vf_max(most, vf_select(vm_first(lanes), vf_load_n(x + i, lanes), most));
    }
    const float now = vf_max_lanes(most);
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        total = vf_add(total,
                       vf_keep_first(vf_exp(vf_sub(vf_load_n(x + i, lanes), vf_set1(now))), lanes));
    }
    *sum = *sum * expf(*top - now) + vf_sum(total);
    *top = now;
}

/* Log-normalisers of all rows and the logits of their targets. */
static void normalise(work *w) {
    const mn_call *call = &w->args->call;
    for (int64_t row = 0; row < w->n_rows; row++) {
        w->top[row] = -INFINITY;
        w->sum[row] = 0.0f;
        w->hit[row] = -INFINITY;
    }
    for (int64_t v0 = 0; v0 < call->V; v0 += PANEL) {
        const int64_t n = mn_min(PANEL, call->V - v0);
        panel_logits(w, v0, n);
        for (int64_t row = 0; row < w->n_rows; row++) {
            const int64_t at = target_of(w->args, w->first + row / call->S) - v0;
            if (at >= 0 && at < n) w->hit[row] = w->logits[row * PANEL + at];
            extend_sum(&w->top[row], &w->sum[row], w->logits + row * PANEL, n);
        }
    }
    for (int64_t row = 0; row < w->n_rows; row++) w->lse[row] = w->top[row] + logf(w->sum[row]);
}

/* log sum_s p_s[target] of the token whose rows start at `row` */
static float log_hits(const work *w, int64_t row) {
    const int64_t S = w->args->call.S;
    float top = -INFINITY, sum = 0.0f;
    for (int64_t s = row; s < row + S; s++) top = fmaxf(top, w->hit[s] - w->lse[s]);
    for (int64_t s = row; s < row + S; s++) sum += expf(w->hit[s] - w->lse[s] - top);
    return top + logf(sum);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* logprob of classes [v0, v0 + n) of one token: a logsumexp over its draws */
static void log_probabilities(float *out, const work *w, int64_t row, int64_t n) {
    const int64_t S = w->args->call.S;
    const vf log_s = vf_set1(logf((float)S));
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        vf top = vf_set1(-INFINITY), sum = vf_zero();
        for (int64_t s = row; s < row + S; s++) {
            const vf x = vf_load_n(w->logits + s * PANEL + i, lanes);
            top = vf_max(top, vf_sub(x, vf_set1(w->lse[s])));
        }
        for (int64_t s = row; s < row + S; s++) {
            const vf x = vf_load_n(w->logits + s * PANEL + i, lanes);
            sum = vf_add(sum, vf_exp(vf_sub(vf_sub(x, vf_set1(w->lse[s])), top)));
        }
        vf_store_n(out + i, vf_sub(vf_add(top, vf_log(sum)), log_s), lanes);
    }
}

bool MN_T(mn_kla_mc_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    plan->n_phases = 1;
    plan->items[0] = n_blocks(c);
    return scratch_bytes(&plan->scratch_bytes, c);
}

void MN_T(mn_kla_mc_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                 void *scratch) {
    (void)phase, (void)shared;
    const mn_kla_mc_args *p = args;
    const int64_t T = p->call.T, S = p->call.S, V = p->call.V;
    work w;
    open_work(&w, p, scratch);
    features(&w, item);
    normalise(&w);
    for (int64_t i = 0; p->nll.data && i < w.n_tokens; i++) {
        const int64_t token = w.first + i;
        const bool counts = target_of(p, token) >= 0;
        *MN_ROW_OUT(float, p->nll, token / T, token % T, 0) =
            counts ? logf((float)S) - log_hits(&w, i * S) : 0.0f;
    }
    for (int64_t v0 = 0; p->logprob.data && v0 < V; v0 += PANEL) {
        const int64_t n = mn_min(PANEL, V - v0);
        panel_logits(&w, v0, n);
        for (int64_t i = 0; i < w.n_tokens; i++) {
            const int64_t token = w.first + i;
            float *row = MN_ROW_OUT(float, p->logprob, token / T, token % T, 0);
            log_probabilities(row + v0, &w, i * S, n);
        }
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Shared: weight and log-normaliser of every row, (tokens, S) each, then a share of dnorm per
 * block. */
static float *shared_weights(const mn_call *call, float *shared, int64_t token) {
    return shared + token * call->S;
}

static float *shared_lse(const mn_call *call, float *shared, int64_t token) {
    return shared + (call->B * call->T + token) * call->S;
}

static float *shared_norm(const mn_call *call, float *shared, int64_t block) {
    return shared + 2 * call->B * call->T * call->S + block * call->D;
}

bool MN_T(mn_kla_mc_backward_plan)(const void *args, mn_plan *plan) {
    const mn_kla_mc_args *p = args;
    const mn_call *c = args;
    int64_t rows, norms;
    const bool ok = mn_mul_i64(&rows, c->B, c->T) && mn_mul_i64(&rows, rows, c->S) &&
                    mn_mul_i64(&rows, rows, 2) && mn_mul_i64(&norms, n_blocks(c), c->D) &&
                    mn_add_i64(&rows, rows, norms) &&
                    mn_mul_size(&plan->shared_bytes, (size_t)rows, sizeof(float)) &&
                    scratch_bytes(&plan->scratch_bytes, c);
    plan->n_phases = 3;
    plan->items[0] = n_blocks(c);
    plan->items[1] = p->grad.head.data ? mn_ceil_div(c->V, PANEL) : 0;
    plan->items[2] = p->grad.norm.data ? 1 : 0;
    return ok;
}

/* Turns the logits of a panel into their gradients, g w_s (softmax - onehot). */
static void panel_gradients(const work *w, int64_t v0, int64_t n) {
    for (int64_t row = 0; row < w->n_rows; row++) {
        float *x = w->logits + row * PANEL;
        const vf lse = vf_set1(w->lse[row]), weight = vf_set1(w->weight[row]);
        for (int64_t i = 0; i < n; i += MN_VW) {
            const int lanes = vf_lanes(n - i);
            const vf softmax = vf_exp(vf_sub(vf_load_n(x + i, lanes), lse));
            vf_store_n(x + i, vf_mul(weight, softmax), lanes);
        }
        const int64_t at = target_of(w->args, w->first + row / w->args->call.S) - v0;
        if (at >= 0 && at < n) x[at] -= w->weight[row];
    }
}

/* w_s g of all rows from the normalisers; kept for phase 1. */
static void weigh_rows(work *w, float *shared) {
    const mn_kla_mc_args *p = w->args;
    const int64_t S = p->call.S, T = p->call.T;
    for (int64_t i = 0; i < w->n_tokens; i++) {
        const int64_t token = w->first + i;
        const float *cot = MN_ROW(float, p->cot.nll, token / T, token % T, 0);
        const bool counts = cot && target_of(p, token) >= 0;
        const float all = counts ? log_hits(w, i * S) : 0.0f;
        for (int64_t s = i * S; s < (i + 1) * S; s++) {
            w->weight[s] = counts ? *cot * expf(w->hit[s] - w->lse[s] - all) : 0.0f;
        }
    }
    const size_t bytes = (size_t)w->n_rows * sizeof(float);
    memcpy(shared_weights(&p->call, shared, w->first), w->weight, bytes);
    memcpy(shared_lse(&p->call, shared, w->first), w->lse, bytes);
}

/* Through the norm of one row, dh becoming dx; adds the row to the block's share of dnorm. */
static void norm_backward(const work *w, float *dnorm, int64_t row) {
    const int64_t D = w->args->call.D;
    const float *norm = w->args->norm.data, *scaled = w->scaled + row * D;
    float *dh = w->dh + row * D;
    if (!norm) return;
    vf dot = vf_zero();
    for (int64_t i = 0; i < D; i += MN_VW) {
        const int n = vf_lanes(D - i);
        const vf x = vf_load_n(scaled + i, n), g = vf_load_n(dh + i, n);
        vf_store_n(dnorm + i, vf_fma(g, x, vf_load_n(dnorm + i, n)), n);
        const vf through = vf_mul(g, vf_load_n(norm + i, n));
        vf_store_n(dh + i, through, n);
        dot = vf_fma(through, x, dot);
    }
    const vf mean = vf_set1(vf_sum(dot) / (float)D), r = vf_set1(w->r[row]);
    for (int64_t i = 0; i < D; i += MN_VW) {
        const int n = vf_lanes(D - i);
        const vf x = vf_load_n(scaled + i, n);
        vf_store_n(dh + i, vf_mul(r, vf_fnma(x, mean, vf_load_n(dh + i, n))), n);
    }
}

/* dmu, dvar and dnoise of one token from dx of its draws, in the rows from `row` on. */
static void token_gradients(const work *w, int64_t token, int64_t row) {
    const mn_kla_mc_args *p = w->args;
    const int64_t D = p->call.D, b = token / p->call.T, t = token % p->call.T;
    const float *var = MN_ROW(float, p->var, b, t, 0);
    float *to_mu = MN_ROW_OUT(float, p->grad.mu, b, t, 0);
    float *to_var = MN_ROW_OUT(float, p->grad.var, b, t, 0);
    float *to_noise = p->grad.noise.data;
    for (int64_t i = 0; i < D; i += MN_VW) {
        const int n = vf_lanes(D - i);
        const vf std = deviation(var + i, n);
        vf dmu = vf_zero(), dstd = vf_zero();
        for (int64_t s = 0; s < p->call.S; s++) {
            const vf dx = vf_load_n(w->dh + (row + s) * D + i, n);
            const float *noise = noise_row(p, token, s) + i;
            dmu = vf_add(dmu, dx);
            dstd = vf_fma(dx, vf_load_n(noise, n), dstd);
            if (to_noise) {
                vf_store_n(to_noise + (noise - (const float *)p->noise.data), vf_mul(dx, std), n);
            }
        }
        const vm live = vf_ge(vf_load_n(var + i, n), vf_set1(1e-12f));
        const vf dvar = vf_select(live, vf_div(dstd, vf_add(std, std)), vf_zero());
        if (to_mu) vf_store_n(to_mu + i, dmu, n);
        if (to_var) vf_store_n(to_var + i, dvar, n);
    }
}

static void block_backward(work *w, int64_t block, float *shared) {
    const mn_call *call = &w->args->call;
    const int64_t D = call->D;
    float *dnorm = shared_norm(call, shared, block);
    features(w, block);
    normalise(w);
    weigh_rows(w, shared);
    for (int64_t v0 = 0; v0 < call->V; v0 += PANEL) {
        const int64_t n = mn_min(PANEL, call->V - v0);
        panel_logits(w, v0, n);
        panel_gradients(w, v0, n);
        const mn_gemm_args product = {
            .c = w->dh, .c_row = D, .a = w->logits, .a_row = PANEL, .a_col = 1,
            .b = (const float *)w->args->head.data + v0 * D, .b_row = D,
            .M = w->n_rows, .N = D, .K = n, .alpha = 1.0f, .base = v0 ? MN_GEMM_ADD : MN_GEMM_SET,
        };
        MN_T(mn_gemm)(&product);
    }
    memset(dnorm, 0, (size_t)D * sizeof *dnorm);
    for (int64_t row = 0; row < w->n_rows; row++) norm_backward(w, dnorm, row);
    for (int64_t i = 0; i < w->n_tokens; i++) token_gradients(w, w->first + i, i * call->S);
}

/* Rows [v0, v0 + PANEL) of dhead: sum over blocks of dlogits' h */
static void head_backward(work *w, int64_t v0, float *shared) {
    const mn_call *call = &w->args->call;
    const int64_t D = call->D, n = mn_min(PANEL, call->V - v0);
    float *out = (float *)w->args->grad.head.data + v0 * D;
    memset(out, 0, (size_t)(n * D) * sizeof *out);
    for (int64_t block = 0; block < n_blocks(call); block++) {
        features(w, block);
        const size_t bytes = (size_t)w->n_rows * sizeof(float);
        memcpy(w->weight, shared_weights(call, shared, w->first), bytes);
        memcpy(w->lse, shared_lse(call, shared, w->first), bytes);
        panel_logits(w, v0, n);
        panel_gradients(w, v0, n);
        const mn_gemm_args product = {
            .c = out, .c_row = D, .a = w->logits, .a_row = 1, .a_col = PANEL, .b = w->h, .b_row = D,
            .M = n, .N = D, .K = w->n_rows, .alpha = 1.0f, .base = MN_GEMM_ADD,
        };
        MN_T(mn_gemm)(&product);
    }
}

void MN_T(mn_kla_mc_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                  void *scratch) {
    const mn_kla_mc_args *p = args;
    const int64_t D = p->call.D;
    work w;
    open_work(&w, p, scratch);
    if (phase == 0) {
        block_backward(&w, item, shared);
    } else if (phase == 1) {
        head_backward(&w, item * PANEL, shared);
    } else {
        float *out = p->grad.norm.data;
        memset(out, 0, (size_t)D * sizeof *out);
        for (int64_t block = 0; block < n_blocks(&p->call); block++) {
            const float *share = shared_norm(&p->call, shared, block);
            for (int64_t i = 0; i < D; i++) out[i] += share[i];
        }
    }
}
