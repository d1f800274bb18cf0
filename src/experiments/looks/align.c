/* align.c - how far the keys of a needle lie off the directions in which keys vary most.
 *
 *   k_t      what the key projection gives for token t, a head at a time, at unit length
 *   C        covariance of all k_t of a prompt, U its `top` first eigenvectors
 *   a_t      |U'(k_t - mean)|^2 / |k_t - mean|^2, mean over heads
 *   gap      mean of a_t over the needle - mean over the other tokens before the question
 *
 * The needle's tokens are those of its sentence whose id occurs at most twice in the prompt;
 * "whole" takes the whole sentence. A negative gap says that needles lie where a
 * curvature-conditioned query keeps them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "experiments/looks/look.h"
#include "io/json_write.h"

enum { MOST_LAYERS = 512, SWEEPS = 30 };

/* ---- eigenvectors ---------------------------------------------------------------------------- */

/* Rotates rows and columns i, j of the symmetric a (n,n) so that a_ij becomes 0; v gathers the
 * rotations. */
static void rotate(double *a, double *v, int64_t n, int64_t i, int64_t j) {
    const double apart = (a[j * n + j] - a[i * n + i]) / (2.0 * a[i * n + j]);
    const double t = (apart >= 0.0 ? 1.0 : -1.0) / (fabs(apart) + sqrt(apart * apart + 1.0));
    const double c = 1.0 / sqrt(t * t + 1.0), s = t * c;
    for (int64_t k = 0; k < n; k++) {
        const double x = a[k * n + i], y = a[k * n + j];
        a[k * n + i] = c * x - s * y;
        a[k * n + j] = s * x + c * y;
    }
    for (int64_t k = 0; k < n; k++) {
        const double x = a[i * n + k], y = a[j * n + k];
        a[i * n + k] = c * x - s * y;
        a[j * n + k] = s * x + c * y;
    }
    for (int64_t k = 0; k < n; k++) {
        const double x = v[k * n + i], y = v[k * n + j];
        v[k * n + i] = c * x - s * y;
        v[k * n + j] = s * x + c * y;
    }
}

/* Jacobi's method: eigenvalues on the diagonal of a, eigenvectors in the columns of v. */
static void diagonalise(double *a, double *v, int64_t n) {
    for (int64_t i = 0; i < n * n; i++) v[i] = i % (n + 1) == 0 ? 1.0 : 0.0;
    for (int sweep = 0; sweep < SWEEPS; sweep++) {
        double off = 0.0, all = 0.0;
        for (int64_t i = 0; i < n * n; i++) {
            all += a[i] * a[i];
            off += i % (n + 1) == 0 ? 0.0 : a[i] * a[i];
        }
        if (off <= 1e-24 * all) return;
        for (int64_t i = 0; i < n; i++) {
            for (int64_t j = i + 1; j < n; j++) {
                if (a[i * n + j] * a[i * n + j] > 1e-30 * all) rotate(a, v, n, i, j);
            }
        }
    }
}

/* ---- one prompt ------------------------------------------------------------------------------ */

typedef struct layer_sums {
    int64_t n, n_rare;               // prompts; prompts with rare tokens
    double rare, whole, rest, gap, whole_gap, squares;
} layer_sums;

typedef struct alignment {
    const mn_model *model;
    const mn_needle *needle;
    int64_t top, n_layers;
    layer_sums *sums;                // by layer
    double *a;                       // of each token
    int8_t *part;                    // of each token, see below
    bool full;
} alignment;

enum { REST, SENTENCE, RARE, QUESTION };

static void name_parts(alignment *al) {
    const mn_needle *n = al->needle;
    for (int64_t t = 0; t < n->tokens.count; t++) {
        int64_t same = 0;
        al->part[t] = t >= n->asked ? QUESTION : t < n->first || t >= n->end ? REST : SENTENCE;
        if (al->part[t] != SENTENCE) continue;
        for (int64_t s = 0; s < n->tokens.count; s++) same += n->tokens.ids[s] == n->tokens.ids[t];
        if (same <= 2) al->part[t] = RARE;
    }
}

/* Adds a_t of one head, whose unit keys are rows of k (T,K); `work` is 2 K K numbers. */
static void head_alignment(alignment *al, double *k, int64_t T, int64_t K, double share,
                           double *work) {
    double *cov = work, *v = work + K * K;
    for (int64_t i = 0; i < K; i++) {
        double mean = 0.0;
        for (int64_t t = 0; t < T; t++) mean += k[t * K + i] / (double)T;
        for (int64_t t = 0; t < T; t++) k[t * K + i] -= mean;
    }
    memset(cov, 0, (size_t)(K * K) * sizeof *cov);
    for (int64_t t = 0; t < T; t++) {
        for (int64_t i = 0; i < K; i++) {
            for (int64_t j = 0; j < K; j++) cov[i * K + j] += k[t * K + i] * k[t * K + j];
        }
    }
    diagonalise(cov, v, K);
    for (int64_t u = 0; u < mn_min(al->top, K); u++) {    // the largest of those left
        int64_t best = 0;
        for (int64_t i = 1; i < K; i++) best = cov[i * K + i] > cov[best * K + best] ? i : best;
        cov[best * K + best] = -1.0;
        for (int64_t t = 0; t < T; t++) {
            double along = 0.0, square = 0.0;
            for (int64_t i = 0; i < K; i++) {
                along += v[i * K + best] * k[t * K + i];
                square += k[t * K + i] * k[t * K + i];
            }
            if (square > 0.0) al->a[t] += share * along * along / square;
        }
    }
}

static double mean_over(const alignment *al, int64_t T, int first, int last) {
    double sum = 0.0;
    int64_t n = 0;
    for (int64_t t = 0; t < T; t++) {
        if (al->part[t] < first || al->part[t] > last) continue;
        sum += al->a[t];
        n++;
    }
    return n > 0 ? sum / (double)n : NAN;
}

static void add_layer(alignment *al, int layer, int64_t T) {
    layer_sums *s = &al->sums[layer];
    const double rest = mean_over(al, T, REST, REST), rare = mean_over(al, T, RARE, RARE);
    const double whole = mean_over(al, T, SENTENCE, RARE);
    s->n++;
    s->rest += rest;
    s->whole += whole;
    s->whole_gap += whole - rest;
    if (isnan(rare)) return;
    s->n_rare++;
    s->rare += rare;
    s->gap += rare - rest;
    s->squares += (rare - rest) * (rare - rest);
}

/* Unit keys of one head. */
static void take_head(double *to, const mn_tensor *x, int64_t head, int64_t T, int64_t K) {
    for (int64_t t = 0; t < T; t++) {
        const float *from = (const float *)x->data + t * x->stride[1] + head * K;
        double square = 0.0;
        for (int64_t i = 0; i < K; i++) square += (double)from[i] * from[i];
        const double scale = square > 0.0 ? 1.0 / sqrt(square) : 0.0;
        for (int64_t i = 0; i < K; i++) to[t * K + i] = scale * from[i];
    }
}

static void hear(void *context, int layer, const char *name, const mn_tensor *x) {
    alignment *al = context;
    if (strcmp(name, "k_proj.weight") != 0 || layer >= al->n_layers || x->shape[0] != 1) return;
    const int64_t T = x->shape[1], K = MN_SIZE(&mn_model_layer(al->model, layer)->sizes, 'K');
    if (K < 1 || x->shape[3] % K != 0 || T != al->needle->tokens.count) return;
    const int64_t heads = x->shape[3] / K;
    double *keys = calloc((size_t)(T * K), sizeof *keys);
    double *work = calloc((size_t)(2 * K * K), sizeof *work);
    if (!keys || !work) al->full = true;
    memset(al->a, 0, (size_t)T * sizeof *al->a);
    for (int64_t h = 0; !al->full && h < heads; h++) {
        take_head(keys, x, h, T, K);
        head_alignment(al, keys, T, K, 1.0 / (double)heads, work);
    }
    if (!al->full) add_layer(al, layer, T);
    free(keys);
    free(work);
}

static mn_status run_prompt(alignment *al, mn_context *context, mn_model *model) {
    const mn_tap tap = { hear, al };
    const mn_token_list *tokens = &al->needle->tokens;
    const mn_model_input in = { .tokens = tokens->ids, .B = 1, .T = tokens->count, .tap = &tap };
    mn_tape *tape = NULL;
    al->a = calloc((size_t)tokens->count, sizeof *al->a);
    al->part = calloc((size_t)tokens->count, sizeof *al->part);
    mn_status st = al->a && al->part ? mn_tape_create(&tape, context, MN_F32)
                                     : mn_fail(MN_ERR_MEMORY, "no memory for a prompt");
    if (st == MN_OK) {
        name_parts(al);
        mn_tape_start(tape, MN_TAPE_FORWARD);
        mn_model_hidden(model, tape, &in);
        st = mn_tape_status(tape);
    }
    if (st == MN_OK && al->full) st = mn_fail(MN_ERR_MEMORY, "no memory for the keys of a prompt");
    mn_tape_destroy(tape);
    free(al->a);
    free(al->part);
    al->a = NULL;
    al->part = NULL;
    return st;
}

/* ---- all prompts ----------------------------------------------------------------------------- */

static json_t *tell_layer(const layer_sums *s, int64_t layer) {
    const double n = (double)s->n, r = s->n_rare > 0 ? (double)s->n_rare : NAN;
    const double mean = s->gap / r, variance = (s->squares - r * mean * mean) / (r - 1.0);
    return json_pack("{s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:I}", "layer", (json_int_t)layer,
                     "needle", mn_json_real(s->rare / r), "whole", mn_json_real(s->whole / n),
                     "rest", mn_json_real(s->rest / n), "gap", mn_json_real(mean), "gap_deviation",
                     mn_json_real(s->n_rare > 1 ? sqrt(fmax(variance, 0.0)) : NAN), "whole_gap",
                     mn_json_real(s->whole_gap / n), "prompts", (json_int_t)s->n);
}

static mn_status tell(json_t *result, const alignment *al) {
    json_t *layers = json_array();
    double gap = 0.0, whole = 0.0;
    int64_t n = 0, negative = 0;
    for (int64_t i = 0; i < al->n_layers; i++) {
        const layer_sums *s = &al->sums[i];
        if (s->n == 0) continue;
        json_array_append_new(layers, tell_layer(s, i));
        const double here = s->n_rare > 0 ? s->gap / (double)s->n_rare : NAN;
        n++;
        gap += here;
        whole += s->whole_gap / (double)s->n;
        negative += here < 0.0;
    }
    if (n == 0) {
        json_decref(layers);
        return mn_fail(MN_ERR_ARGUMENT, "no layer of this model has keys (k_proj) to look at");
    }
    json_t *out = json_pack("{s:o, s:o, s:o, s:o, s:I}", "layers", layers, "gap",
                            mn_json_real(gap / (double)n), "whole_gap",
                            mn_json_real(whole / (double)n), "negative",
                            mn_json_real((double)negative / (double)n), "top",
                            (json_int_t)al->top);
    return json_object_set_new(result, "alignment", out) == 0
               ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a diagnostic");
}

mn_status mn_align(json_t *result, mn_context *context, mn_model *model, const mn_needle *needles,
                   int64_t n_needles, int64_t top) {
    alignment al = { .model = model, .top = top };
    al.n_layers = mn_min(mn_model_describe(model)->n_layers, MOST_LAYERS);
    al.sums = calloc((size_t)al.n_layers + 1, sizeof *al.sums);
    mn_status st = al.sums ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a diagnostic");
    for (int64_t i = 0; st == MN_OK && i < n_needles; i++) {
        al.needle = &needles[i];
        st = run_prompt(&al, context, model);
    }
    if (st == MN_OK) st = tell(result, &al);
    free(al.sums);
    return st;
}
