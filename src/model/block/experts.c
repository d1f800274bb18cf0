/* experts.c - a sparse MLP: a router chooses a few experts for each token.
 *
 *   s = softmax(n W') or sigmoid(n W')      chosen: the k largest of s (+ bias) of a token, from
 *                                           the groups whose two largest sum to the most
 *   w_e = s_e, over their sum with norm_topk_prob, times routed_scaling_factor
 *   y = sum over chosen e of w_e expert_e(n)  +  sigmoid(n g') shared(n), or shared(n)
 *
 * The choice is made on the host from the scores: on a GPU a pass waits for them. It is no function
 * with a gradient; the weights are. Each expert works on the rows of its tokens alone. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "model/model_internal.h"

/* Which experts serve which tokens. */
typedef struct routing {
    int64_t rows, E, k;
    int32_t *chosen;     // (rows, k)
    int32_t *tokens;     // (rows k): tokens of expert 0, then of expert 1 ..
    int32_t *weights;    // (rows k): token E + expert of the same
    int64_t *first;      // (E + 1): where an expert's begin
} routing;

/* The larger of two scores, the first expert of equal ones. */
static int64_t best_of(const float *score, const bool *open, int64_t E) {
    int64_t best = -1;
    for (int64_t e = 0; e < E; e++) {
        if (open[e] && (best < 0 || score[e] > score[best])) best = e;
    }
    return best;
}

/* Leaves open the experts of the chosen groups. */
static void close_groups(const mn_block_config *c, const float *score, bool *open) {
    const int64_t G = mn_max(c->n_group, 1), size = c->num_experts / G;
    const int64_t kept = c->topk_group ? c->topk_group : G;
    bool taken[4096] = { false };
    for (int64_t e = 0; e < c->num_experts; e++) open[e] = kept >= G;
    for (int64_t n = 0; n < kept && kept < G; n++) {
        int64_t best = -1;
        double most = 0.0;
        for (int64_t g = 0; g < G; g++) {
            double top = -INFINITY, second = -INFINITY;
            for (int64_t e = g * size; e < (g + 1) * size; e++) {
                if (score[e] > top) second = top, top = score[e];
                else if (score[e] > second) second = score[e];
            }
            if (!taken[g] && (best < 0 || top + second > most)) best = g, most = top + second;
        }
        taken[best] = true;
        for (int64_t e = best * size; e < (best + 1) * size; e++) open[e] = true;
    }
}

static void choose(routing *r, const mn_block_config *c, float *score, const float *bias) {
    bool open[4096];
    for (int64_t t = 0; t < r->rows; t++) {
        float *row = score + t * r->E;
        for (int64_t e = 0; bias && e < r->E; e++) row[e] += bias[e];
        close_groups(c, row, open);
        for (int64_t n = 0; n < r->k; n++) {
            const int64_t e = best_of(row, open, r->E);
            r->chosen[t * r->k + n] = (int32_t)mn_max(e, 0);
            if (e >= 0) open[e] = false;
        }
    }
}

/* The lists of tokens by expert. */
static void sort_tokens(routing *r) {
    memset(r->first, 0, (size_t)(r->E + 1) * sizeof *r->first);
    const int64_t n = r->rows * r->k;
    for (int64_t i = 0; i < n; i++) r->first[r->chosen[i] + 1]++;
    for (int64_t e = 0; e < r->E; e++) r->first[e + 1] += r->first[e];
    for (int64_t i = 0; i < n; i++) {
        const int64_t e = r->chosen[i], at = r->first[e]++;
        r->tokens[at] = (int32_t)(i / r->k);
        r->weights[at] = (int32_t)(i / r->k * r->E + e);
    }
    for (int64_t e = r->E; e > 0; e--) r->first[e] = r->first[e - 1];
    r->first[0] = 0;
}

/* Reads the scores and makes the lists, which live as long as the step. A plan has no scores: it
 * spreads the tokens evenly. */
static bool route(routing *r, const mn_model *model, const mn_block *block, mn_tape *tape,
                  const mn_tensor *scores) {
    const mn_block_config *c = &model->config.block;
    r->E = c->num_experts;
    r->k = c->num_experts_per_tok;
    r->rows = scores->shape[0] * scores->shape[1];
    const size_t n = (size_t)(r->rows * r->k);
    r->chosen = mn_tape_host(tape, n * sizeof *r->chosen);
    r->tokens = mn_tape_host(tape, n * sizeof *r->tokens);
    r->weights = mn_tape_host(tape, n * sizeof *r->weights);
    r->first = mn_tape_host(tape, (size_t)(r->E + 1) * sizeof *r->first);
    float *score = malloc((size_t)(r->rows * r->E) * sizeof *score);
    float *bias = block->router_bias < 0 ? NULL : malloc((size_t)r->E * sizeof *bias);
    mn_status st = score && r->first && (bias || block->router_bias < 0)
                       ? mn_tape_status(tape) : mn_fail(MN_ERR_MEMORY, "no memory to route tokens");
    if (st == MN_OK && mn_tape_plans(tape)) {
        for (size_t i = 0; i < n; i++) r->chosen[i] = (int32_t)(i % (size_t)r->E);
    } else {
        if (st == MN_OK) st = mn_tape_read(tape, scores, score);
        if (st == MN_OK && bias) {
            st = mn_tape_read(tape, model->leaves[block->router_bias], bias);
        }
        if (st == MN_OK) choose(r, c, score, bias);
    }
    if (st == MN_OK) sort_tokens(r);
    else mn_tape_fail(tape, st);
    free(score);
    free(bias);
    return st == MN_OK;
}

/* s where chosen, else 0; over their sum if asked, times the factor: (B,T,1,E). */
static mn_tensor *weights_of(const mn_model *model, mn_tape *tape, mn_tensor *scores,
                             const routing *r) {
    const mn_block_config *c = &model->config.block;
    double *mask = calloc((size_t)(r->rows * r->E), sizeof *mask);
    if (!mask) return mn_tape_fail(tape, mn_fail(MN_ERR_MEMORY, "no memory to route tokens"));
    for (int64_t i = 0; i < r->rows * r->k; i++) mask[r->weights[i]] = 1.0;
    mn_tensor *w = mn_tape_multiply(tape, scores, mn_tape_constant(tape, scores->shape, mask));
    free(mask);
    if (c->norm_topk_prob) {
        mn_tensor *ones = mn_tape_filled(tape, (int64_t[]){ 1, 1, 1, r->E }, 1.0);
        mn_tensor *sum = mn_tape_affine(tape, mn_tape_linear(tape, w, ones, NULL), 1.0, 1e-20);
        w = mn_tape_multiply(tape, w, mn_tape_unary(tape, MN_UNARY_RECIPROCAL, sum));
    }
    if (c->routed_scaling_factor != 1.0) w = mn_tape_affine(tape, w, c->routed_scaling_factor, 0.0);
    return mn_tape_shaped(tape, w, (int64_t[]){ 1, r->rows * r->E, 1, 1 });
}

/* Where expert e's matrices are. */
static mn_mlp_at expert_at(const mn_block *block, int64_t e) {
    const int first = block->experts + (int)e * block->expert_params;
    const bool gates = block->expert_params == 3;
    return (mn_mlp_at){ .gate = gates ? first : -1, .down = first + gates,
                        .up = first + gates + 1, .gate_bias = -1, .up_bias = -1,
                        .down_bias = -1 };
}

static mn_tensor *shared(mn_model *model, const mn_block *block, mn_tape *tape, mn_tensor *n) {
    if (block->shared.down < 0) return NULL;
    mn_tensor *y = mn_mlp_of(model, tape, &block->shared, NULL, n);
    if (block->shared_gate < 0) return y;
    mn_tensor *gate = mn_tape_linear(tape, n, model->leaves[block->shared_gate], NULL);
    return mn_tape_multiply(tape, y, mn_tape_unary(tape, MN_UNARY_SIGMOID, gate));
}

mn_tensor *mn_mlp_experts(mn_model *model, const mn_block *block, mn_tape *tape, mn_tensor *n) {
    if (!n) return NULL;
    routing r = { 0 };
    mn_tensor *scores = mn_tape_linear(tape, n, model->leaves[block->router], NULL);
    scores = model->config.block.router == 1 ? mn_tape_unary(tape, MN_UNARY_SIGMOID, scores)
                                             : mn_tape_softmax(tape, scores);
    if (!scores || !route(&r, model, block, tape, scores)) return NULL;
    mn_tensor *w = weights_of(model, tape, scores, &r);
    mn_tensor **parts = mn_tape_host(tape, (size_t)r.E * sizeof *parts);
    const int32_t **places = mn_tape_host(tape, (size_t)r.E * sizeof *places);
    int64_t *counts = mn_tape_host(tape, (size_t)r.E * sizeof *counts);
    if (!parts || !places || !counts) return NULL;
    int64_t used = 0;
    for (int64_t e = 0; e < r.E; e++) {
        const int64_t count = r.first[e + 1] - r.first[e];
        if (count == 0) continue;
        const mn_mlp_at at = expert_at(block, e);
        mn_tensor *x = mn_tape_pick(tape, n, r.tokens + r.first[e], count);
        mn_tensor *of = mn_tape_pick(tape, w, r.weights + r.first[e], count);
        parts[used] = mn_tape_multiply(tape, mn_mlp_of(model, tape, &at, NULL, x), of);
        places[used] = r.tokens + r.first[e];
        counts[used++] = count;
    }
    mn_tensor *y = mn_tape_place(tape, parts, places, counts, used, n->shape);
    mn_tensor *all = shared(model, block, tape, n);
    return all ? mn_tape_add(tape, y, all) : y;
}
