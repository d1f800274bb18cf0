/* test_layer_formulas.c - layers of beliefs and caches against their equations, written out in
 * plain loops over one sequence: each projection, activation, norm and gate is where it belongs.
 *
 * Both sides compute in double and differ by rounding: sums of some tens of products and a few
 * recurrent steps, far below 1e-11 of the largest output. */
#include <math.h>
#include <string.h>

#include "base/util.h"
#include "support/check.h"
#include "support/layer_case.h"

enum { T = 7, D = 8, POOL = 1 << 16 };

static double pool[POOL];
static int64_t used;

/* n zeros that live until the next case. */
static double *take(int64_t n) {
    if (used + n > POOL) check_fatal("the pool is too small");
    double *at = pool + used;
    used += n;
    memset(at, 0, (size_t)n * sizeof *at);
    return at;
}

static double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
static double silu(double x) { return x * sigmoid(x); }
static double softplus(double x) { return log1p(exp(x)); }

static const double *param(const layer_case *c, const char *name) {
    for (int i = 0; i < c->layer.n_params; i++) {
        if (strcmp(c->layer.params[i].name, name) == 0) return c->params[i];
    }
    check_fatal("%s has no parameter %s", c->layer.mixer.name, name);
}

static int64_t size_of(const layer_case *c, char letter) {
    return MN_SIZE(&c->layer.sizes, letter);
}

/* (T,n) = x (T,m) W' + b */
static double *project(const double *x, int64_t m, const double *weight, const double *bias,
                       int64_t n) {
    double *y = take(T * n);
    for (int64_t t = 0; t < T; t++) {
        for (int64_t i = 0; i < n; i++) {
            y[t * n + i] = bias ? bias[i] : 0.0;
            for (int64_t j = 0; j < m; j++) y[t * n + i] += weight[i * m + j] * x[t * m + j];
        }
    }
    return y;
}

/* silu of a causal convolution with 4 taps, the last of which meets the current token. */
static double *convolve(const double *x, int64_t n, const double *taps, const double *bias) {
    double *y = take(T * n);
    for (int64_t t = 0; t < T; t++) {
        for (int64_t i = 0; i < n; i++) {
            double sum = bias ? bias[i] : 0.0;
            for (int64_t w = 0; w < 4; w++) {
                if (t + w >= 3) sum += taps[i * 4 + w] * x[(t + w - 3) * n + i];
            }
            y[t * n + i] = silu(sum);
        }
    }
    return y;
}

static double *each(double *x, int64_t n, double (*f)(double)) {
    for (int64_t i = 0; i < T * n; i++) x[i] = f(x[i]);
    return x;
}

/* Rows of K numbers to unit length: x / max(|x|, eps), or x / sqrt(|x|^2 + eps). */
static double *unit(double *x, int64_t rows, int64_t K, bool root, double eps) {
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0.0;
        for (int64_t i = 0; i < K; i++) sum += x[r * K + i] * x[r * K + i];
        const double length = root ? sqrt(sum + eps) : fmax(sqrt(sum), eps);
        for (int64_t i = 0; i < K; i++) x[r * K + i] /= length;
    }
    return x;
}

/* (rms(o) silu(gate)) W_o' */
static double *finish(const layer_case *c, double *o, const double *gate) {
    const int64_t H = size_of(c, 'H'), V = size_of(c, 'V');
    const double *norm = param(c, "o_norm.weight");
    for (int64_t r = 0; r < T * H; r++) {
        double sum = 0.0;
        for (int64_t j = 0; j < V; j++) sum += o[r * V + j] * o[r * V + j];
        const double scale = 1.0 / sqrt(sum / (double)V + c->layer.norm_eps);
        for (int64_t j = 0; j < V; j++) o[r * V + j] *= scale * norm[j] * silu(gate[r * V + j]);
    }
    return project(o, H * V, param(c, "o_proj.weight"), NULL, D);
}

/* What every formula gives: the output (T,D), and the variance per token or NULL. */
typedef struct expected {
    const double *y, *variance;
} expected;

/* Projection, convolution, silu: of queries, keys and values. */
static double *project_conv(const layer_case *c, const char *weight, const char *taps, int64_t n) {
    return convolve(project(c->x, D, param(c, weight), NULL, n), n, param(c, taps), NULL);
}

/* ---- attention ------------------------------------------------------------------------------- */

/* Channel i turns with channel i + K/2 by t theta^(-2i/K). */
static void turn(double *x, int64_t heads, int64_t K, double theta) {
    for (int64_t r = 0; r < T * heads; r++) {
        for (int64_t i = 0; i < K / 2; i++) {
            const double angle = (double)(r / heads) * pow(theta, -2.0 * (double)i / (double)K);
            const double a = x[r * K + i], b = x[r * K + i + K / 2];
            x[r * K + i] = a * cos(angle) - b * sin(angle);
            x[r * K + i + K / 2] = a * sin(angle) + b * cos(angle);
        }
    }
}

static expected attention(const layer_case *c) {
    const int64_t H = size_of(c, 'H'), J = size_of(c, 'J'), K = size_of(c, 'K');
    const bool softmax = c->layer.kind == MN_LAYER_attention;
    double *q = project(c->x, D, param(c, "q_proj.weight"), param(c, "q_proj.bias"), H * K);
    double *k = project(c->x, D, param(c, "k_proj.weight"), param(c, "k_proj.bias"), J * K);
    double *v = project(c->x, D, param(c, "v_proj.weight"), param(c, "v_proj.bias"), J * K);
    double *o = take(T * H * K);
    turn(q, H, K, c->layer.config.rope_theta);
    turn(k, J, K, c->layer.config.rope_theta);
    for (int64_t t = 0; t < T; t++) {
        for (int64_t h = 0; h < H; h++) {
            const int64_t j = h * J / H;
            double w[T], sum = 0.0;
            for (int64_t s = 0; s <= t; s++) {
                w[s] = 0.0;
                const double *query = q + (t * H + h) * K, *key = k + (s * J + j) * K;
                for (int64_t i = 0; i < K; i++) w[s] += query[i] * key[i];
                w[s] /= sqrt((double)K);
                sum += softmax ? exp(w[s]) : w[s] * w[s];
            }
            for (int64_t s = 0; s <= t; s++) {
                const double weight = softmax ? exp(w[s]) / sum : fmax(w[s], 0.0) / sqrt(sum);
                for (int64_t i = 0; i < K; i++) {
                    o[(t * H + h) * K + i] += weight * v[(s * J + j) * K + i];
                }
            }
        }
    }
    return (expected){ project(o, H * K, param(c, "o_proj.weight"), NULL, D), NULL };
}

/* ---- kla ------------------------------------------------------------------------------------- */

/* One channel m through time: y and the variance of y, (T,V). */
static void kla_channel(const layer_case *c, int64_t m, const double *v, const double *var,
                        const double *k, const double *q, double *y, double *yvar) {
    const int64_t V = size_of(c, 'V'), K = size_of(c, 'K');
    for (int64_t s = 0; s < K; s++) {
        const double step = softplus(param(c, "delta")[m * K + s]) + 1e-7;
        const double rate = exp(param(c, "lambda_log")[m * K + s]);
        const double noise = fmax(param(c, "process_noise")[m * K + s], 1e-7);
        const double a = exp(-rate * step), p = noise / (2 * rate) * (1 - exp(-2 * rate * step));
        double lam = 1.0, eta = 0.0;
        for (int64_t t = 0; t < T; t++) {
            const double prec = 1.0 / var[t * V + m], key = k[t * K + s], query = q[t * K + s];
            const double den = a * a + p * lam;
            lam = lam / den + prec * key * key;
            eta = a / den * eta + prec * v[t * V + m] * key;
            y[t * V + m] += query * eta / lam;
            yvar[t * V + m] += query * query / lam;
        }
    }
}

static expected kla(const layer_case *c) {
    const int64_t V = size_of(c, 'V'), K = size_of(c, 'K'), R = size_of(c, 'R');
    const bool own_value = c->layer.config.value_rank != -1;
    const int64_t wv = own_value ? (R ? R : V) : 0, wl = size_of(c, 'Q') ? size_of(c, 'Q') : V;
    const int64_t all = wv + wl + 2 * K;
    double *both = project(c->x, D, param(c, "in_proj.weight"), NULL, 2 * V), *raw = take(T * V);
    double *v = take(T * V), *k = take(T * K), *q = take(T * K), *log_var = take(T * wl);
    for (int64_t i = 0; i < T * V; i++) raw[i] = both[i / V * 2 * V + i % V];
    const double *z = convolve(raw, V, param(c, "conv.weight"), param(c, "conv.bias"));
    double *code = project(z, V, param(c, "sensor_proj.weight"), NULL, all);
    for (int64_t t = 0; t < T; t++) {
        for (int64_t i = 0; i < V; i++) v[t * V + i] = own_value ? code[t * all + i] : z[t * V + i];
        for (int64_t i = 0; i < wl; i++) log_var[t * wl + i] = code[t * all + wv + i];
        for (int64_t i = 0; i < K; i++) k[t * K + i] = code[t * all + wv + wl + i];
        for (int64_t i = 0; i < K; i++) q[t * K + i] = code[t * all + wv + wl + K + i];
    }
    double *var = wl == V ? log_var : project(log_var, wl, param(c, "var_expand.weight"), NULL, V);
    each(var, V, softplus);
    for (int64_t i = 0; i < T * V; i++) var[i] += c->layer.config.obs_var_min;
    unit(k, T, K, false, 1e-12);
    unit(q, T, K, false, 1e-12);
    double *y = take(T * V), *yvar = take(T * V), *variance = take(T);
    for (int64_t m = 0; m < V; m++) kla_channel(c, m, v, var, k, q, y, yvar);
    for (int64_t i = 0; i < T * V; i++) {
        variance[i / V] += yvar[i] / (double)V;
        y[i] = (y[i] + *param(c, "lambda_skip") * z[i]) * silu(both[i / V * 2 * V + V + i % V]);
    }
    return (expected){ project(y, V, param(c, "out_proj.weight"), NULL, D), variance };
}

/* ---- palimpsa -------------------------------------------------------------------------------- */

/* What the two gatings make of a token of one head: decay a, value w and importance b, (V). */
typedef struct gates {
    double a;
    const double *w, *b;
} gates;

static gates code_gates(const layer_case *c, const double *v, const double *const raw[3], int64_t t,
                        int64_t h) {
    const int64_t H = size_of(c, 'H'), V = size_of(c, 'V');
    double *w = take(V), *b = take(V);
    const double step = softplus(raw[0][t * H + h] + param(c, "dt_bias")[h]);
    const double write = sigmoid(raw[1][t * H + h]);
    for (int64_t j = 0; j < V; j++) {
        w[j] = v[j] * write;
        b[j] = sigmoid(raw[2][(t * H + h) * V + j]) * softplus(param(c, "b_scale")[h]) * write;
    }
    return (gates){ exp(-step * exp(param(c, "A_log")[h])), w, b };
}

static gates paper_gates(const layer_case *c, const double *v, const double *const raw[3],
                         int64_t t, int64_t h) {
    const int64_t H = size_of(c, 'H'), V = size_of(c, 'V');
    double *w = take(V), *b = take(V);
    const double gamma = sigmoid(raw[0][t * H + h]);
    for (int64_t j = 0; j < V; j++) {
        b[j] = gamma * sigmoid(raw[1][(t * H + h) * V + j]);
        w[j] = b[j] * v[j];
    }
    return (gates){ 1.0 - gamma / (c->layer.config.n_init * exp(param(c, "logN")[h])), w, b };
}

static expected palimpsa(const layer_case *c) {
    const int64_t H = size_of(c, 'H'), K = size_of(c, 'K'), V = size_of(c, 'V');
    const int64_t R = size_of(c, 'R');
    const bool code = c->layer.kind == MN_LAYER_palimpsa_code;
    const double *q = unit(project_conv(c, "q_proj.weight", "q_conv1d.weight", H * K), T * H, K,
                           false, 1e-12);
    const double *k = unit(project_conv(c, "k_proj.weight", "k_conv1d.weight", H * K), T * H, K,
                           false, 1e-12);
    const double *v = project_conv(c, "v_proj.weight", "v_conv1d.weight", H * V), *raw[3] = { 0 };
    raw[0] = project(c->x, D, param(c, code ? "dt_proj.weight" : "gamma_proj.weight"), NULL, H);
    raw[1] = code ? project(c->x, D, param(c, "bs_proj.weight"), NULL, H)
                  : project(c->x, D, param(c, "beta_proj.weight"), NULL, H * V);
    if (code) {
        raw[2] = project(project(c->x, D, param(c, "b_rank_proj.weight"), NULL, R), R,
                         param(c, "b_proj.weight"), NULL, H * V);
    }
    double *o = take(T * H * V), *variance = take(T), *mu = take(H * K * V), *imp = take(H * K * V);
    for (int64_t h = 0; h < H; h++) {
        const double prior = exp(param(c, "Ip_log")[h]);
        for (int64_t i = 0; i < K * V; i++) imp[h * K * V + i] = prior;
        for (int64_t t = 0; t < T; t++) {
            const double *value = v + (t * H + h) * V;
            const gates g = code ? code_gates(c, value, raw, t, h)
                                 : paper_gates(c, value, raw, t, h);
            for (int64_t i = 0; i < K * V; i++) {
                const double key = k[(t * H + h) * K + i / V], now = imp[h * K * V + i];
                const double query = q[(t * H + h) * K + i / V] / sqrt((double)K);
                const double next = g.a * now + (1 - g.a) * prior + key * key * g.b[i % V];
                mu[h * K * V + i] = (g.a * now * mu[h * K * V + i] + key * g.w[i % V]) / next;
                imp[h * K * V + i] = next;
                o[(t * H + h) * V + i % V] += query * mu[h * K * V + i];
                variance[t] += query * query / next / (double)(H * V);
            }
            for (int64_t j = 0; code && j < V; j++) {
                o[(t * H + h) * V + j] += param(c, "D")[h] * value[j];
            }
        }
    }
    return (expected){ finish(c, o, project(c->x, D, param(c, "g_proj.weight"), NULL, H * V)),
                       variance };
}

/* ---- bayes ----------------------------------------------------------------------------------- */

/* P = A P A' + l2 N or M = A M, for rows that are real or pairs. */
static void move(double *to, int64_t rows, int64_t cols, double radius, const double *theta) {
    for (int64_t j = 0; j < cols; j++) {
        for (int64_t i = 0; i < rows; i += theta ? 2 : 1) {
            double *x = to + i * cols + j;
            if (!theta) {
                *x *= radius;
                continue;
            }
            const double re = x[0], im = x[cols], angle = theta[i / 2];
            x[0] = radius * (cos(angle) * re - sin(angle) * im);
            x[cols] = radius * (sin(angle) * re + cos(angle) * im);
        }
    }
}

static void transpose(double *P, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < i; j++) {
            const double x = P[i * n + j];
            P[i * n + j] = P[j * n + i];
            P[j * n + i] = x;
        }
    }
}

/* One token of one head and noise group: updates P and the group's columns of M (R,V), reads both.
 * k and q have R rows, zero where they do not act. */
static double bayes_token(double *P, double *M, double *o, int64_t R, int64_t V, int64_t first,
                          int64_t n, const double *k, const double *q, const double *v, double r2) {
    double *u = take(R), spread = r2, variance = 0.0;
    for (int64_t i = 0; i < R; i++) {
        for (int64_t j = 0; j < R; j++) u[i] += P[i * R + j] * k[j];
    }
    for (int64_t i = 0; i < R; i++) spread += k[i] * u[i];
    for (int64_t i = 0; i < R * R; i++) P[i] -= u[i / R] * u[i % R] / spread;
    for (int64_t j = first; j < first + n; j++) {
        double error = v[j];
        for (int64_t i = 0; i < R; i++) error -= M[i * V + j] * k[i];
        for (int64_t i = 0; i < R; i++) M[i * V + j] += u[i] / spread * error;
        for (int64_t i = 0; i < R; i++) o[j] += M[i * V + j] * q[i];
    }
    for (int64_t i = 0; i < R * R; i++) variance += q[i / R] * P[i] * q[i % R];
    return variance;
}

typedef struct bayes_inputs {
    const double *q, *k, *v, *a, *l, *r, *angle;
} bayes_inputs;

static void bayes_head(const layer_case *c, const bayes_inputs *in, int64_t h, double *o,
                       double *variance) {
    const int64_t H = size_of(c, 'H'), K = size_of(c, 'K'), V = size_of(c, 'V');
    const int64_t G = size_of(c, 'G'), step = in->angle ? 2 : 1, R = step * K;
    double *P = take(G * R * R), *M = take(R * V);
    for (int64_t i = 0; i < G * R; i++) {
        P[i / R * R * R + i % R * (R + 1)] = 3.0 * exp(param(c, "p0_log")[h]);
    }
    for (int64_t t = 0; t < T; t++) {
        double *k = take(R), *q = take(R), *theta = take(K);
        for (int64_t i = 0; i < K; i++) {
            k[i * step] = in->k[(t * H + h) * K + i];
            q[i * step] = in->q[(t * H + h) * K + i];
            if (!in->angle) continue;
            theta[i] = in->angle[(t * H + h) * K + i] + param(c, "A_angle")[h * K + i];
        }
        const double rate = exp(param(c, "A_log")[h]);
        const double radius = exp(-rate * softplus(in->a[t * H + h] + param(c, "dt_bias")[h]));
        move(M, R, V, radius, in->angle ? theta : NULL);
        for (int64_t g = 0; g < G; g++) {
            double *Pg = P + g * R * R;
            for (int twice = 0; twice < 2; twice++) {
                move(Pg, R, R, radius, in->angle ? theta : NULL);
                transpose(Pg, R);
            }
            const double l2 = softplus(in->l[t * H + h]) + 1e-6;
            for (int64_t i = 0; i < R; i += step) Pg[i * (R + 1)] += l2;
            const double r2 = softplus(in->r[(t * H + h) * G + g]) + 1e-6;
            const double read = bayes_token(Pg, M, o + (t * H + h) * V, R, V, g * V / G, V / G, k,
                                            q, in->v + (t * H + h) * V, r2);
            variance[t] += read / (double)(H * G);
        }
    }
}

static expected bayes(const layer_case *c) {
    const int64_t H = size_of(c, 'H'), K = size_of(c, 'K'), V = size_of(c, 'V');
    bayes_inputs in = { .angle = NULL };
    in.q = unit(project_conv(c, "q_proj.weight", "q_conv1d.weight", H * K), T * H, K, true, 1e-6);
    in.k = unit(project_conv(c, "k_proj.weight", "k_conv1d.weight", H * K), T * H, K, true, 1e-6);
    in.v = project_conv(c, "v_proj.weight", "v_conv1d.weight", H * V);
    in.a = project(c->x, D, param(c, "a_proj.weight"), NULL, H);
    in.l = project(c->x, D, param(c, "l_proj.weight"), param(c, "l_proj.bias"), H);
    in.r = project(c->x, D, param(c, "r_proj.weight"), param(c, "r_proj.bias"),
                   H * size_of(c, 'G'));
    if (c->layer.kind == MN_LAYER_bayes_rotation) {
        in.angle = project(c->x, D, param(c, "angle_proj.weight"), NULL, H * K);
    }
    double *o = take(T * H * V), *variance = take(T);
    for (int64_t h = 0; h < H; h++) bayes_head(c, &in, h, o, variance);
    return (expected){ finish(c, o, project(c->x, D, param(c, "g_proj.weight"), NULL, H * V)),
                       variance };
}

/* ---- hyper: the operator of the whole module ------------------------------------------------- */

static expected hyper(const layer_case *c) {
    double *y = take(T * D);
    mn_hyper_layer_args args = {
        .call = { .dtype = MN_F64, .B = 1, .T = T, .D = D, .H = size_of(c, 'H'),
                  .Q = size_of(c, 'Q'), .K = size_of(c, 'Q') * size_of(c, 'K'),
                  .V = size_of(c, 'H') * size_of(c, 'V'), .P = size_of(c, 'P'),
                  .R = size_of(c, 'R'), .S = size_of(c, 'S'), .W = size_of(c, 'W'),
                  .J = size_of(c, 'Q') * size_of(c, 'R'), .L = size_of(c, 'H') * size_of(c, 'S') },
        .eps = 1e-12, .kind = c->layer.kind == MN_LAYER_hyperglu,
        .norm = (int)c->layer.config.attn_norm, .x.data = c->x, .y.data = y,
        .q_weight.data = param(c, "q.weight"), .k_weight.data = param(c, "k.weight"),
        .v_weight.data = param(c, "v.weight"), .c_proj_weight.data = param(c, "c_proj.weight"),
        .left_gate_weight.data = param(c, "left_gate.weight"),
        .left_gate_bias.data = param(c, "left_gate.bias"),
        .right_gate_weight.data = param(c, "right_gate.weight"),
        .right_gate_bias.data = param(c, "right_gate.bias"),
        .control1_weight.data = param(c, "control1.weight"),
        .control1_bias.data = param(c, "control1.bias"),
        .control2_weight.data = param(c, "control2.weight"),
        .control2_bias.data = param(c, "control2.bias"),
        .conv1_conv_weight.data = param(c, "conv1.conv.weight"),
        .conv2_conv_weight.data = param(c, "conv2.conv.weight"),
        .op_mix_U.data = param(c, "op.mix.U"), .op_mix_Vt.data = param(c, "op.mix.Vt"),
        .op_mix_d.data = param(c, "op.mix.d"), .op2_mix_U.data = param(c, "op2.mix.U"),
        .op2_mix_Vt.data = param(c, "op2.mix.Vt"), .op2_mix_d.data = param(c, "op2.mix.d"),
    };
    const mn_status st = mn_op_hyper_layer(c->context, &args);
    CHECK(st == MN_OK, "hyper_layer: %s", mn_last_error());
    return (expected){ y, NULL };
}

/* ---- all of them ----------------------------------------------------------------------------- */

static const struct {
    const char *name, *json;
    expected (*formula)(const layer_case *c);
} cases[] = {
    { "attention", "{\"num_heads\": 4, \"num_kv_heads\": 2, \"qkv_bias\": true}", attention },
    { "relu_attention", "{\"num_heads\": 2, \"qkv_bias\": true, \"rope_theta\": 50}", attention },
    { "kla", "{\"d_state\": 3}", kla },
    { "kla", "{\"d_state\": 5, \"expand\": 1.5, \"value_rank\": \"conv\", \"var_rank\": \"dt\"}",
      kla },
    { "palimpsa_code", "{\"num_heads\": 2}", palimpsa },
    { "palimpsa_paper", "{\"num_heads\": 2, \"head_dim\": 3, \"expand_v\": 2}", palimpsa },
    { "bayes", "{\"num_heads\": 2, \"learn_prior\": true}", bayes },
    { "bayes_rotation", "{\"num_heads\": 2, \"head_dim\": 3, \"expand_v\": 2, \"noise_groups\": 3, "
      "\"learn_prior\": true, \"input_angle\": true}", bayes },
    { "hypermlp", "{\"op1_rank\": 2, \"op2_rank\": 3, \"block_size\": 9}", hyper },
    { "hyperglu", "{\"qk_rank\": 8, \"op1_rank\": 3, \"op2_rank\": 2}", hyper },
    { "hyperglu", "{\"qk_rank\": 4, \"op1_rank\": 1, \"op2_rank\": 1, \"attn_norm\": \"none\"}",
      hyper },
};

static void layers_are_their_formulas(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        layer_case c;
        used = 0;
        const mn_status st = layer_case_create(&c, cases[i].name, cases[i].json, MN_F64, 1, T, D,
                                               11);
        if (CHECK(st == MN_OK && layer_case_forward(&c) == MN_OK, "%s %s: %s", cases[i].name,
                  cases[i].json, mn_last_error())) {
            const expected want = cases[i].formula(&c);
            double top = 0.0;
            for (int64_t k = 0; k < T * D; k++) top = fmax(top, fabs(want.y[k]));
            CHECK(top > 1e-3, "%s: outputs of %g only", cases[i].name, top);
            for (int64_t k = 0; k < T * D; k++) {
                CHECK(fabs(c.y[k] - want.y[k]) <= 1e-11 * top, "%s %s: %.15g for %.15g at %lld",
                      cases[i].name, cases[i].json, c.y[k], want.y[k], (long long)k);
            }
            for (int64_t t = 0; want.variance && t < T; t++) {    // told in float
                CHECK(fabs(c.variance[t] - want.variance[t]) <= 1e-6 * want.variance[t],
                      "%s %s: variance %.9g for %.9g at %lld", cases[i].name, cases[i].json,
                      (double)c.variance[t], want.variance[t], (long long)t);
            }
            CHECK(mn_layer_has_variance(&c.layer) == (want.variance != NULL), "%s", cases[i].name);
        }
        layer_case_destroy(&c);
    }
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(layers_are_their_formulas) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
