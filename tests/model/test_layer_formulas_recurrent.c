/* test_layer_formulas_recurrent.c - recurrent layers against their published equations, written out
 * here once more in plain loops over one sequence: the order of gates and norms, which head shares
 * what, where scales and biases sit. Nothing below uses the tape or an operator.
 *
 * Both sides compute in double, in different orders: rounding of some 1e-15 per sum, and the norms
 * may divide by numbers of 1e-2, which 1e-10 leaves room for. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/util.h"
#include "support/check.h"
#include "support/layer_case.h"

enum { T = 7, D = 8, WIDE = 96, HEADS = 4, NARROW = 40 };

/* T rows of some width. */
typedef struct rows {
    double at[T][WIDE];
} rows;

static const mn_param_info *info_of(const layer_case *c, const char *name, const double **value) {
    for (int i = 0; i < c->layer.n_params; i++) {
        if (strcmp(c->layer.params[i].name, name) != 0) continue;
        *value = c->params[i];
        return &c->layer.params[i];
    }
    *value = NULL;
    return NULL;
}

static const double *param(const layer_case *c, const char *name) {
    const double *value;
    CHECK(info_of(c, name, &value), "%s has no %s", c->layer.mixer.name, name);
    return value;
}

static double silu(double x) {
    return x / (1.0 + exp(-x));
}

static double sigmoid(double x) {
    return 1.0 / (1.0 + exp(-x));
}

static double softplus(double x) {
    return log1p(exp(x));
}

/* Columns [first, first + n) of x. */
static rows columns(const rows *x, int first, int n) {
    rows y = { 0 };
    for (int t = 0; t < T; t++) {
        for (int i = 0; i < n; i++) y.at[t][i] = x->at[t][first + i];
    }
    return y;
}

/* x W' + b; b may be NULL. */
static rows project(const layer_case *c, const rows *x, const char *weight, const char *bias) {
    const double *w, *b = bias ? param(c, bias) : NULL;
    const mn_param_info *info = info_of(c, weight, &w);
    rows y = { 0 };
    CHECK(info && info->shape[0] <= WIDE, "%s", weight);
    for (int t = 0; info && t < T; t++) {
        for (int64_t o = 0; o < info->shape[0]; o++) {
            double sum = b ? b[o] : 0.0;
            for (int64_t i = 0; i < info->shape[1]; i++) {
                sum += w[o * info->shape[1] + i] * x->at[t][i];
            }
            y.at[t][o] = sum;
        }
    }
    return y;
}

/* silu of the causal convolution: the last tap is the token itself. */
static rows convolve(const layer_case *c, const rows *x, const char *weight, const char *bias) {
    const double *w, *b = bias ? param(c, bias) : NULL;
    const mn_param_info *info = info_of(c, weight, &w);
    rows y = { 0 };
    for (int t = 0; info && t < T; t++) {
        for (int64_t i = 0; i < info->shape[0]; i++) {
            const int64_t W = info->shape[2];
            double sum = b ? b[i] : 0.0;
            for (int64_t tap = 0; tap < W; tap++) {
                const int64_t from = t - (W - 1) + tap;
                if (from >= 0) sum += w[i * W + tap] * x->at[from][i];
            }
            y.at[t][i] = silu(sum);
        }
    }
    return y;
}

static rows input(const layer_case *c) {
    rows x = { 0 };
    for (int t = 0; t < T; t++) memcpy(x.at[t], (double *)c->x + t * D, D * sizeof(double));
    return x;
}

/* o / sqrt(mean o^2 + 1e-5) w over each n of `heads n` numbers. */
static void norm(rows *o, int heads, int n, const double *w, bool w_per_head) {
    for (int t = 0; t < T; t++) {
        for (int h = 0; h < heads; h++) {
            double sum = 0.0, *at = o->at[t] + h * n;
            for (int j = 0; j < n; j++) sum += at[j] * at[j];
            for (int j = 0; j < n; j++) {
                at[j] *= w[w_per_head ? h * n + j : j] / sqrt(sum / n + 1e-5);
            }
        }
    }
}

/* One head of a decaying sum: S = diag(e^g) S + k v', o = scale S'q. g (T,K). */
static void sum_head(double o[T][NARROW], double q[T][NARROW], double k[T][NARROW],
                     double v[T][NARROW], double g[T][NARROW], int K, int V, double scale) {
    double S[NARROW][NARROW] = { { 0 } };
    for (int t = 0; t < T; t++) {
        for (int j = 0; j < V; j++) o[t][j] = 0.0;
        for (int i = 0; i < K; i++) {
            for (int j = 0; j < V; j++) {
                S[i][j] = exp(g[t][i]) * S[i][j] + k[t][i] * v[t][j];
                o[t][j] += scale * q[t][i] * S[i][j];
            }
        }
    }
}

static void check_output(const layer_case *c, const char *json, const rows *want) {
    for (int t = 0; t < T; t++) {
        for (int i = 0; i < D; i++) {
            const double got = c->y[t * D + i], right = want->at[t][i];
            CHECK(fabs(got - right) <= 1e-10 * (1.0 + fabs(right)),
                  "%s %s: token %d, %d: %.12g for %.12g", c->layer.mixer.name, json, t, i, got,
                  right);
        }
    }
}

typedef rows formula(const layer_case *c);

static void compare(const char *name, const char *json, formula *f) {
    layer_case c;
    if (CHECK(layer_case_create(&c, name, json, MN_F64, 1, T, D, 11) == MN_OK, "%s %s: %s", name,
              json, mn_last_error()) &&
        CHECK(layer_case_forward(&c) == MN_OK, "%s %s: %s", name, json, mn_last_error())) {
        const rows want = f(&c);
        check_output(&c, json, &want);
    }
    layer_case_destroy(&c);
}

/* ---- gla, retnet, linear --------------------------------------------------------------------- */

/* Four query heads of width 2 on two key-value heads: head h reads h / 2. */
static rows gla(const layer_case *c) {
    enum { H = 4, G = 2, K = 2, V = 2 };
    const rows x = input(c);
    rows q = project(c, &x, "q_proj.weight", NULL), k = project(c, &x, "k_proj.weight", NULL);
    rows v = project(c, &x, "v_proj.weight", NULL), low = project(c, &x, "gk_proj.0.weight", NULL);
    const rows gk = project(c, &low, "gk_proj.1.weight", "gk_proj.1.bias");
    const rows gate = project(c, &x, "g_proj.weight", NULL);
    q = convolve(c, &q, "q_conv1d.weight", NULL);
    k = convolve(c, &k, "k_conv1d.weight", NULL);
    v = convolve(c, &v, "v_conv1d.weight", NULL);
    rows o = { 0 };
    for (int h = 0; h < H; h++) {
        double a[4][T][NARROW], out[T][NARROW];
        for (int t = 0; t < T; t++) {
            for (int i = 0; i < K; i++) {
                const int at = h / (H / G) * K + i;
                a[0][t][i] = q.at[t][h * K + i];
                a[1][t][i] = k.at[t][at];
                a[2][t][i] = v.at[t][at];
                a[3][t][i] = fmax(-softplus(-gk.at[t][at]) / 16.0, -0.045);
            }
        }
        sum_head(out, a[0], a[1], a[2], a[3], K, V, 1.0 / sqrt(K));
        for (int t = 0; t < T; t++) memcpy(o.at[t] + h * V, out[t], V * sizeof(double));
    }
    norm(&o, H, V, param(c, "g_norm_swish_gate.weight"), false);
    for (int t = 0; t < T; t++) {
        for (int j = 0; j < H * V; j++) o.at[t][j] *= silu(gate.at[t][j]);
    }
    return project(c, &o, "o_proj.weight", NULL);
}

/* Two heads of width 4, turned in halves; decays 1 - 2^-5 and 1 - 2^-6; values twice as wide. */
static rows retnet(const layer_case *c) {
    enum { H = 2, K = 4, V = 8 };
    const rows x = input(c), gate = project(c, &x, "g_proj.weight", NULL);
    const rows q = project(c, &x, "q_proj.weight", NULL), k = project(c, &x, "k_proj.weight", NULL);
    const rows v = project(c, &x, "v_proj.weight", NULL);
    rows o = { 0 };
    for (int h = 0; h < H; h++) {
        double a[4][T][NARROW], out[T][NARROW];
        for (int t = 0; t < T; t++) {
            for (int i = 0; i < K; i++) {
                const int pair = i % (K / 2), first = h * K + pair, second = first + K / 2;
                const double angle = t * pow(10000.0, -2.0 * pair / K);
                const double s = sin(angle), co = cos(angle);
                a[0][t][i] = i < K / 2 ? q.at[t][first] * co - q.at[t][second] * s
                                       : q.at[t][second] * co + q.at[t][first] * s;
                a[1][t][i] = i < K / 2 ? k.at[t][first] * co - k.at[t][second] * s
                                       : k.at[t][second] * co + k.at[t][first] * s;
                a[3][t][i] = log(1.0 - pow(2.0, -5.0 - h));
            }
            for (int j = 0; j < V; j++) a[2][t][j] = v.at[t][h * V + j];
        }
        sum_head(out, a[0], a[1], a[2], a[3], K, V, 1.0 / sqrt(K));
        for (int t = 0; t < T; t++) memcpy(o.at[t] + h * V, out[t], V * sizeof(double));
    }
    norm(&o, H, V, param(c, "g_norm_swish_gate.weight"), false);
    for (int t = 0; t < T; t++) {
        for (int j = 0; j < H * V; j++) o.at[t][j] *= silu(gate.at[t][j]);
    }
    return project(c, &o, "o_proj.weight", NULL);
}

/* What linear attention does after its map, two heads of width 4 and features F. */
static rows linear_read(const layer_case *c, double phi[2][2][T][NARROW], int F, bool divides) {
    enum { H = 2, V = 4 };
    const rows x = input(c), v = project(c, &x, "v_proj.weight", NULL);
    rows o = { 0 };
    for (int h = 0; h < H; h++) {
        double values[T][NARROW], none[T][NARROW] = { { 0 } }, out[T][NARROW];
        for (int t = 0; t < T; t++) {
            for (int j = 0; j < V; j++) values[t][j] = v.at[t][h * V + j];
            values[t][V] = 1.0;
        }
        sum_head(out, phi[0][h], phi[1][h], values, none, F, V + 1, 1.0 / sqrt(F));
        for (int t = 0; t < T; t++) {
            const double below = divides ? out[t][V] + 1e-10 : 1.0;
            for (int j = 0; j < V; j++) o.at[t][h * V + j] = out[t][j] / below;
        }
    }
    norm(&o, H, V, param(c, "norm.weight"), false);
    return project(c, &o, "o_proj.weight", NULL);
}

static rows map_of(const layer_case *c, const rows *head, char which, const char *part) {
    char weight[64], bias[64];
    snprintf(weight, sizeof weight, "feature_map_%c.%s.weight", which, part);
    snprintf(bias, sizeof bias, "feature_map_%c.%s.bias", which, part);
    return project(c, head, weight, bias);
}

static rows linear_product(const layer_case *c) {
    static double phi[2][2][T][NARROW];
    const rows x = input(c);
    for (int which = 0; which < 2; which++) {
        const rows p = project(c, &x, which ? "k_proj.weight" : "q_proj.weight", NULL);
        for (int h = 0; h < 2; h++) {
            const rows head = columns(&p, h * 4, 4);
            const rows one = map_of(c, &head, which ? 'k' : 'q', "layer1");
            const rows two = map_of(c, &head, which ? 'k' : 'q', "layer2");
            for (int t = 0; t < T; t++) {
                for (int i = 0; i < 4; i++) phi[which][h][t][i] = one.at[t][i] * two.at[t][i];
            }
        }
    }
    return linear_read(c, phi, 4, false);
}

/* Tied hedgehog maps, divided by the query's product with the sum of the keys. */
static rows linear_hedgehog(const layer_case *c) {
    static double phi[2][2][T][NARROW];
    const rows x = input(c);
    for (int which = 0; which < 2; which++) {
        const rows p = project(c, &x, which ? "k_proj.weight" : "q_proj.weight", NULL);
        for (int h = 0; h < 2; h++) {
            const rows head = columns(&p, h * 4, 4);
            const rows y = map_of(c, &head, 'q', "layer");
            for (int t = 0; t < T; t++) {
                double sum = 0.0;
                for (int i = 0; i < 4; i++) sum += exp(2 * y.at[t][i]) + exp(-2 * y.at[t][i]);
                for (int i = 0; i < 4; i++) {
                    phi[which][h][t][i] = exp(2 * y.at[t][i]) / sum;
                    phi[which][h][t][4 + i] = exp(-2 * y.at[t][i]) / sum;
                }
            }
        }
    }
    return linear_read(c, phi, 8, true);
}

/* dpfp with queries and keys divided by their sums. */
static rows linear_dpfp(const layer_case *c) {
    static double phi[2][2][T][NARROW];
    const rows x = input(c);
    for (int which = 0; which < 2; which++) {
        const rows p = project(c, &x, which ? "k_proj.weight" : "q_proj.weight", NULL);
        for (int h = 0; h < 2; h++) {
            for (int t = 0; t < T; t++) {
                double r[8], sum = 0.0;
                for (int i = 0; i < 8; i++) {
                    r[i] = fmax(p.at[t][h * 4 + i % 4], 0.0) * (i < 4 ? 1.0 : -1.0);
                }
                for (int i = 0; i < 32; i++) {
                    phi[which][h][t][i] = r[i % 8] * r[(i % 8 - (i / 8 + 1) + 8) % 8];
                    sum += phi[which][h][t][i];
                }
                for (int i = 0; i < 32; i++) phi[which][h][t][i] /= sum + 1e-4;
            }
        }
    }
    return linear_read(c, phi, 32, false);
}

static void sums(void **state) {
    (void)state;
    compare("gla", "{\"num_heads\": 4, \"num_kv_heads\": 2, \"expand_k\": 1, "
            "\"use_short_conv\": true, \"clamp_min\": -0.045}", gla);
    compare("retnet", "{\"num_heads\": 2}", retnet);
    compare("linear", "{\"num_heads\": 2}", linear_product);
    compare("linear", "{\"num_heads\": 2, \"feature_map\": \"hedgehog\", "
            "\"norm_feature_map\": true, \"tie_feature_map_qk\": true}", linear_hedgehog);
    compare("linear", "{\"num_heads\": 2, \"feature_map\": \"dpfp\", \"norm_q\": true, "
            "\"norm_k\": true}", linear_dpfp);
    check_done();
}

/* ---- mesa ------------------------------------------------------------------------------------ */

/* x <- M^-1 x, n unknowns, by elimination; M is positive definite. */
static void eliminate(double M[NARROW][NARROW], double *x, int n) {
    for (int p = 0; p < n; p++) {
        for (int row = p + 1; row < n; row++) {
            const double times = M[row][p] / M[p][p];
            for (int i = p; i < n; i++) M[row][i] -= times * M[p][i];
            x[row] -= times * x[p];
        }
    }
    for (int row = n - 1; row >= 0; row--) {
        for (int i = row + 1; i < n; i++) x[row] -= M[row][i] * x[i];
        x[row] /= M[row][row];
    }
}

static void unit(double *x, int n) {
    double sum = 1e-6;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    for (int i = 0; i < n; i++) x[i] /= sqrt(sum);
}

static rows mesa(const layer_case *c) {
    enum { H = 2, K = 4 };
    const rows x = input(c), v = project(c, &x, "v_proj.weight", NULL);
    const rows a = project(c, &x, "a_proj.weight", "a_proj.bias");
    const rows b = project(c, &x, "b_proj.weight", "b_proj.bias");
    rows q = project(c, &x, "q_proj.weight", NULL), k = project(c, &x, "k_proj.weight", NULL);
    rows o = { 0 };
    q = convolve(c, &q, "q_conv1d.weight", NULL);
    k = convolve(c, &k, "k_conv1d.weight", NULL);
    const double *lambda = param(c, "lambda_params");
    for (int h = 0; h < H; h++) {
        double kk[K][K] = { { 0 } }, kv[K][K] = { { 0 } };
        for (int t = 0; t < T; t++) {
            double *key = k.at[t] + h * K, *query = q.at[t] + h * K, M[NARROW][NARROW];
            const double *value = v.at[t] + h * K;
            const double stays = sigmoid(a.at[t][h]), beta = sigmoid(b.at[t][h]);
            unit(key, K);
            unit(query, K);
            for (int i = 0; i < K; i++) {
                for (int j = 0; j < K; j++) {
                    kk[i][j] = stays * kk[i][j] + beta * key[i] * key[j];
                    kv[i][j] = stays * kv[i][j] + beta * key[i] * value[j];
                    M[i][j] = kk[i][j] + (i == j ? softplus(lambda[h * K + i]) + 0.25 : 0.0);
                }
            }
            eliminate(M, query, K);
            for (int j = 0; j < K; j++) {
                for (int i = 0; i < K; i++) o.at[t][h * K + j] += kv[i][j] * query[i];
            }
        }
    }
    norm(&o, H, K, param(c, "o_norm.weight"), false);
    return project(c, &o, "o_proj.weight", NULL);
}

static void regression(void **state) {
    (void)state;
    compare("mesa", "{\"num_heads\": 2}", mesa);
    check_done();
}

/* ---- mamba ----------------------------------------------------------------------------------- */

/* 16 channels in four heads of 4, two groups of three states: heads 0 and 1 use group 0. The gate
 * comes before a norm over each group's 8 channels. */
static rows mamba2(const layer_case *c) {
    enum { H = 4, P = 4, G = 2, N = 3, I = 16 };
    const rows x = input(c), wide = project(c, &x, "in_proj.weight", NULL);
    const rows z = columns(&wide, 0, I), raw = columns(&wide, I, I + 2 * G * N);
    const rows dt = columns(&wide, 2 * I + 2 * G * N, H);
    const rows xbc = convolve(c, &raw, "conv1d.weight", "conv1d.bias");
    const double *A_log = param(c, "A_log"), *skip = param(c, "D"), *bias = param(c, "dt_bias");
    rows o = { 0 };
    for (int h = 0; h < H; h++) {
        double a[4][T][NARROW], out[T][NARROW];
        for (int t = 0; t < T; t++) {
            const double d = softplus(dt.at[t][h] + bias[h]);
            const double *at = xbc.at[t] + I + h / (H / G) * N;
            for (int i = 0; i < N; i++) {
                a[0][t][i] = at[G * N + i];
                a[1][t][i] = at[i];
                a[3][t][i] = -exp(A_log[h]) * d;
            }
            for (int j = 0; j < P; j++) a[2][t][j] = d * xbc.at[t][h * P + j];
        }
        sum_head(out, a[0], a[1], a[2], a[3], N, P, 1.0);
        for (int t = 0; t < T; t++) {
            for (int j = 0; j < P; j++) {
                const int at = h * P + j;
                o.at[t][at] = (out[t][j] + skip[h] * xbc.at[t][at]) * silu(z.at[t][at]);
            }
        }
    }
    norm(&o, G, I / G, param(c, "norm.weight"), true);
    return project(c, &o, "out_proj.weight", NULL);
}

static rows mamba1(const layer_case *c) {
    enum { I = 16, N = 16, R = 1 };
    const rows x = input(c), wide = project(c, &x, "in_proj.weight", NULL);
    const rows raw = columns(&wide, 0, I), z = columns(&wide, I, I);
    const rows u = convolve(c, &raw, "conv1d.weight", "conv1d.bias");
    const rows narrow = project(c, &u, "x_proj.weight", NULL), low = columns(&narrow, 0, R);
    const rows dt = project(c, &low, "dt_proj.weight", "dt_proj.bias");
    const double *A_log = param(c, "A_log"), *skip = param(c, "D");
    rows y = { 0 };
    for (int i = 0; i < I; i++) {
        double h[N] = { 0 };
        for (int t = 0; t < T; t++) {
            const double d = softplus(dt.at[t][i]);
            double sum = skip[i] * u.at[t][i];
            for (int s = 0; s < N; s++) {
                h[s] = exp(-exp(A_log[i * N + s]) * d) * h[s] +
                       d * narrow.at[t][R + s] * u.at[t][i];
                sum += h[s] * narrow.at[t][R + N + s];
            }
            y.at[t][i] = sum * silu(z.at[t][i]);
        }
    }
    return project(c, &y, "out_proj.weight", NULL);
}

static void state_spaces(void **state) {
    (void)state;
    compare("mamba2", "{\"head_dim\": 4, \"state_size\": 3, \"n_groups\": 2}", mamba2);
    compare("mamba1", "{}", mamba1);
    check_done();
}

/* ---- longhorn -------------------------------------------------------------------------------- */

static rows longhorn(const layer_case *c) {
    enum { I = 16, N = 5, R = 1 };
    const bool diagonal = c->layer.kind == MN_LAYER_longhorn;
    const rows x = input(c), wide = project(c, &x, "in_proj.weight", NULL);
    const rows raw = columns(&wide, 0, I), z = columns(&wide, I, I);
    const rows u = convolve(c, &raw, "conv1d.weight", "conv1d.bias");
    const rows narrow = project(c, &u, "x_proj.weight", NULL), low = columns(&narrow, 0, R);
    const rows raw_beta = project(c, &low, "dt_head.weight", "dt_head.bias");
    const double *skip = param(c, "D");
    rows y = { 0 };
    for (int j = 0; j < I; j++) {
        double S[N] = { 0 };
        for (int t = 0; t < T; t++) {
            const double *k = narrow.at[t] + R, *q = k + N, beta = sigmoid(raw_beta.at[t][j]);
            double length = 0.0, guess = 0.0, sum = skip[j] * u.at[t][j];
            for (int i = 0; i < N; i++) {
                length += k[i] * k[i];
                guess += k[i] * S[i];
            }
            const double w = beta / (1.0 + beta * length);
            for (int i = 0; i < N; i++) {
                S[i] += w * k[i] * (u.at[t][j] - (diagonal ? k[i] * S[i] : guess));
                sum += S[i] * q[i];
            }
            y.at[t][j] = sum * silu(z.at[t][j]);
        }
    }
    return project(c, &y, "out_proj.weight", NULL);
}

static void online_regression(void **state) {
    (void)state;
    compare("longhorn", "{\"state_size\": 5}", longhorn);
    compare("longhorn_column", "{\"state_size\": 5}", longhorn);
    check_done();
}

/* ---- mlstm ----------------------------------------------------------------------------------- */

/* Two heads, keys of 2 and values of 4; the sums themselves, without the unit e^m. */
static rows mlstm(const layer_case *c) {
    enum { H = 2, K = 2, V = 4 };
    const rows x = input(c), gate = project(c, &x, "g_proj.weight", NULL);
    rows q = project(c, &x, "q_proj.weight", NULL), k = project(c, &x, "k_proj.weight", NULL);
    rows v = project(c, &x, "v_proj.weight", NULL), o = { 0 };
    q = convolve(c, &q, "q_conv1d.weight", NULL);
    k = convolve(c, &k, "k_conv1d.weight", NULL);
    v = convolve(c, &v, "v_conv1d.weight", NULL);
    const rows in = project(c, &x, "i_proj.weight", "i_proj.bias");
    const rows stays = project(c, &x, "f_proj.weight", "f_proj.bias");
    for (int h = 0; h < H; h++) {
        double C[K][V] = { { 0 } }, n[K] = { 0 };
        for (int t = 0; t < T; t++) {
            const double f = sigmoid(15.0 * tanh(stays.at[t][h] / 15.0));
            const double i = exp(15.0 * tanh(in.at[t][h] / 15.0));
            double along = 0.0;
            for (int s = 0; s < K; s++) {
                n[s] = f * n[s] + i * k.at[t][h * K + s];
                along += n[s] * q.at[t][h * K + s] / sqrt(K);
                for (int j = 0; j < V; j++) {
                    C[s][j] = f * C[s][j] + i * k.at[t][h * K + s] * v.at[t][h * V + j];
                    o.at[t][h * V + j] += C[s][j] * q.at[t][h * K + s] / sqrt(K);
                }
            }
            for (int j = 0; j < V; j++) o.at[t][h * V + j] /= fmax(fabs(along), 1.0);
        }
    }
    norm(&o, H, V, param(c, "o_norm.weight"), false);
    for (int t = 0; t < T; t++) {
        for (int j = 0; j < H * V; j++) o.at[t][j] *= sigmoid(gate.at[t][j]);
    }
    return project(c, &o, "o_proj.weight", NULL);
}

/* ---- rg_lru ---------------------------------------------------------------------------------- */

/* Two blocks of six channels; h = i u at the first token. */
static rows gated_units(const layer_case *c) {
    enum { E = 12, H = 2, K = 6, W = 3 };
    const rows x = input(c), gate = project(c, &x, "linear_y.weight", "linear_y.bias");
    const rows in = project(c, &x, "linear_x.weight", "linear_x.bias");
    const double *taps = param(c, "conv_1d.weight"), *shift = param(c, "conv_1d.bias");
    const double *wi = param(c, "rg_lru.input_gate_weight");
    const double *bi = param(c, "rg_lru.input_gate_bias");
    const double *wr = param(c, "rg_lru.recurrent_gate_weight");
    const double *br = param(c, "rg_lru.recurrent_gate_bias");
    const double *rate = param(c, "rg_lru.recurrent_param");
    double h[E] = { 0 };
    rows o = { 0 };
    for (int t = 0; t < T; t++) {
        double u[E];
        for (int e = 0; e < E; e++) {
            u[e] = shift[e];
            for (int w = 0; w < W; w++) {
                if (t - W + 1 + w >= 0) u[e] += taps[e * W + w] * in.at[t - W + 1 + w][e];
            }
        }
        for (int e = 0; e < E; e++) {
            double i = bi[e], r = br[e];
            for (int k = 0; k < K; k++) {
                i += u[e / K * K + k] * wi[(e / K * K + k) * K + e % K];
                r += u[e / K * K + k] * wr[(e / K * K + k) * K + e % K];
            }
            const double a = t ? exp(-8.0 * sigmoid(r) * softplus(rate[e])) : 0.0;
            h[e] = a * h[e] + sqrt(1.0 - a * a) * sigmoid(i) * u[e];
            const double y = gate.at[t][e];
            const double inner = sqrt(2.0 / acos(-1.0)) * (y + 0.044715 * y * y * y);
            o.at[t][e] = 0.5 * y * (1.0 + tanh(inner)) * h[e];
        }
    }
    return project(c, &o, "linear_out.weight", "linear_out.bias");
}

static void gated_recurrence(void **state) {
    (void)state;
    compare("rg_lru", "{\"num_heads\": 2, \"lru_width\": 12, \"conv_size\": 3}", gated_units);
    check_done();
}

static void exponential_gates(void **state) {
    (void)state;
    compare("mlstm", "{\"num_heads\": 2}", mlstm);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums),
        cmocka_unit_test(regression),
        cmocka_unit_test(state_spaces),
        cmocka_unit_test(online_regression),
        cmocka_unit_test(exponential_gates),
        cmocka_unit_test(gated_recurrence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
