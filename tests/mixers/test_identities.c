/* test_identities.c - what the papers say one layer is of another, on the step loops that define
 * them.
 *
 * All in double precision. Where the identity is exact the two differ by rounding only; where it
 * is a limit the remaining distance is stated and checked from both sides. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "definition/mixer.h"
#include "ops/run.h"

enum { T = 40, H = 2, K = 6, V = 5, HK = H * K, HV = H * V, SEED = 77 };

/* Rounding after T steps of well conditioned sums. */
static const double exact = 1e-11;

/* Inputs of T tokens, as rows of up to HK or HV numbers. */
static double q[T][HK], k[T][HK], v[T][HV], g_channel[T][HK], beta[T][H], prec[T][V];

static double draw(uint64_t stream, int64_t t, int64_t i) {
    return mn_rng_normal(SEED, stream, (uint64_t)(t * 100 + i));
}

/* Rows of k have length one per head. */
static void make_inputs(void) {
    for (int64_t t = 0; t < T; t++) {
        for (int64_t i = 0; i < HK; i++) {
            q[t][i] = draw(1, t, i);
            k[t][i] = draw(2, t, i);
            g_channel[t][i] = -0.3 * mn_rng_uniform(SEED, 3, (uint64_t)(t * 100 + i));
        }
        for (int64_t i = 0; i < HV; i++) v[t][i] = draw(4, t, i);
        for (int64_t i = 0; i < V; i++) prec[t][i] = exp(0.5 * draw(5, t, i));
        for (int64_t h = 0; h < H; h++) {
            double norm2 = 0.0;
            beta[t][h] = mn_rng_uniform(SEED, 6, (uint64_t)(t * 100 + h));
            for (int64_t i = 0; i < K; i++) norm2 += k[t][h * K + i] * k[t][h * K + i];
            for (int64_t i = 0; i < K; i++) k[t][h * K + i] /= sqrt(norm2);
        }
    }
}

static mn_mixer *open_mixer(const char *name) {
    const mn_mixer_config config = { .size = { .H = H, .K = K, .V = V } };
    mn_mixer *m = NULL;
    assert_int_equal(mn_mixer_create(&m, name, &config), MN_OK);
    return m;
}

/* What one side of an identity sees at token t. */
typedef void (*token_fn)(mn_token *token, int64_t t);

/* Outputs of layer `name` on tokens made by `fill`. */
static void run(double o[T][HV], const char *name, token_fn fill) {
    mn_mixer *m = open_mixer(name);
    for (int64_t t = 0; t < T; t++) {
        mn_token token = { .q = q[t], .k = k[t], .v = v[t], .beta = beta[t] };
        fill(&token, t);
        assert_int_equal(mn_mixer_step(m, &token, o[t], NULL), MN_OK);
    }
    mn_mixer_destroy(m);
}

static double distance(double x[T][HV], double y[T][HV], int64_t width) {
    double error2 = 0.0, norm2 = 0.0;
    for (int64_t t = 0; t < T; t++) {
        for (int64_t i = 0; i < width; i++) {
            error2 += (x[t][i] - y[t][i]) * (x[t][i] - y[t][i]);
            norm2 += y[t][i] * y[t][i];
        }
    }
    assert_true(norm2 > 0.0);
    return sqrt(error2 / norm2);
}

static void assert_same(const char *left, token_fn fill_left, const char *right,
                        token_fn fill_right) {
    static double x[T][HV], y[T][HV];
    run(x, left, fill_left);
    run(y, right, fill_right);
    const double apart = distance(x, y, HV);
    if (!(apart <= exact)) fail_msg("%s and %s are %g apart", left, right, apart);
}

/* ---- one transition is a case of another ----------------------------------------------------- */

static double zeros[HK], channels[HK];
static const double per_head[H] = { -0.05, -0.2 };

static void plain(mn_token *token, int64_t t) {
    (void)token, (void)t;
}

static void zero_decay(mn_token *token, int64_t t) {
    (void)t;
    token->g = zeros;
}

/* the decay of the token, one per head */
static void token_decay(mn_token *token, int64_t t) {
    token->g = g_channel[t];
}

/* the same on every channel of a head */
static void equal_channels(mn_token *token, int64_t t) {
    for (int64_t i = 0; i < HK; i++) channels[i] = g_channel[t][i / K];
    token->g = channels;
}

static void head_decay(mn_token *token, int64_t t) {
    (void)t;
    token->g = per_head;
}

static void decays_nest(void **state) {
    (void)state;
    assert_same("gla", equal_channels, "mamba2", token_decay);
    assert_same("mamba2", head_decay, "retnet", head_decay);
    assert_same("retnet", zero_decay, "linear", plain);
    assert_same("kda", equal_channels, "gdn", token_decay);
    assert_same("gdn", zero_decay, "delta", plain);
}

/* Gated DeltaNet-2 with both gates equal to beta is KDA. */
static void equal_gates(mn_token *token, int64_t t) {
    static double erase[HK], write[HV];
    equal_channels(token, t);
    for (int64_t i = 0; i < HK; i++) erase[i] = beta[t][i / K];
    for (int64_t i = 0; i < HV; i++) write[i] = beta[t][i / V];
    token->erase = erase;
    token->write = write;
}

/* Longhorn per column at gain eta is the delta rule with beta = eta: unit keys, beta_j = b / (1
 * - b). */
static void equal_columns(mn_token *token, int64_t t) {
    static double column[HV];
    for (int64_t i = 0; i < HV; i++) column[i] = beta[t][i / V] / (1.0 - beta[t][i / V]);
    token->beta = column;
}

static void delta_rules_meet(void **state) {
    (void)state;
    assert_same("gdn2", equal_gates, "kda", equal_channels);
    assert_same("longhorn_column", equal_columns, "delta", plain);
}

static const double half[H] = { 0.5, 0.5 };

static void ccq_strength(mn_token *token, int64_t t) {
    (void)t;
    token->ccq_gamma = zeros;
    token->g = zeros;
}

static void ccq_at_work(mn_token *token, int64_t t) {
    (void)t;
    token->ccq_gamma = half;
}

/* +ccq of strength 0 is the row itself, and of another strength is not. */
static void ccq_of_strength_zero_is_nothing(void **state) {
    (void)state;
    static double x[T][HV], y[T][HV];
    assert_same("gdn+ccq", ccq_strength, "gdn", zero_decay);
    run(x, "delta+ccq", ccq_at_work);
    run(y, "delta", plain);
    assert_true(distance(x, y, HV) > 1e-2);
}

/* ---- the Bayesian Layer ---------------------------------------------------------------------- */

static double p0[H] = { 3.0, 0.7 }, l2[H] = { 0.05, 0.4 }, r2[H] = { 0.05, 0.3 };

static void belief_inputs(mn_token *token, int64_t t) {
    token->la = g_channel[t];
    token->theta = zeros;
    token->l2 = l2;
    token->r2 = r2;
    token->p0 = p0;
}

static void still_belief(mn_token *token, int64_t t) {
    belief_inputs(token, t);
    token->la = zeros;
}

/* Proposition 2: with the predicted covariance reset to l2 I at each step, the Bayesian Layer is
 * the delta rule with beta = l2 / (l2 + r2) for keys of length one. */
static void covariance_reset_is_the_delta_rule(void **state) {
    (void)state;
    static double x[T][HV], y[T][HV], gain[H];
    mn_mixer *bayes = open_mixer("bayes"), *delta = open_mixer("delta");
    for (int64_t h = 0; h < H; h++) gain[h] = l2[h] / (l2[h] + r2[h]);
    for (int64_t t = 0; t < T; t++) {
        int64_t count;
        mn_token token = { .q = q[t], .k = k[t], .v = v[t], .beta = gain };
        still_belief(&token, t);
        assert_int_equal(mn_mixer_start(bayes, &token), MN_OK);
        double *P = mn_mixer_part(bayes, "P", &count);
        memset(P, 0, (size_t)count * sizeof *P);
        assert_int_equal(mn_mixer_step(bayes, &token, x[t], NULL), MN_OK);
        assert_int_equal(mn_mixer_step(delta, &token, y[t], NULL), MN_OK);
    }
    assert_true(distance(x, y, HV) <= exact);
    mn_mixer_destroy(bayes);
    mn_mixer_destroy(delta);
}

/* The same through the operators: riccati whose decay forgets the covariance, its gains into
 * delta. */
static void covariance_reset_of_the_operators(void **state) {
    (void)state;
    static double la[T][HK], gainvec[T][HK], noise[T][H], observed[T][H], strength[T][H];
    static double x[T][HV], y[T][HV];
    mn_context *context;
    const mn_context_options options = { .n_threads = 1, .target = "ref" };
    assert_int_equal(mn_context_create(&context, &options), MN_OK);
    for (int64_t t = 0; t < T; t++) {
        for (int64_t i = 0; i < HK; i++) la[t][i] = -1000.0;
        for (int64_t h = 0; h < H; h++) {
            noise[t][h] = l2[h];
            observed[t][h] = r2[h];
            strength[t][h] = l2[h] / (l2[h] + r2[h]);
        }
    }
    const mn_call call = { .dtype = MN_F64, .B = 1, .T = T, .H = H, .K = K, .V = V, .G = 1 };
    const mn_riccati_args covariance = { .call = call,
                                         .scale = 1,
                                         .k = { .data = k },
                                         .la = { .data = la },
                                         .l2 = { .data = noise },
                                         .r2 = { .data = observed },
                                         .p0 = { .data = p0 },
                                         .gainvec = { .data = gainvec } };
    const mn_delta_args mean = { .call = call,
                                 .scale = 1,
                                 .q = { .data = q },
                                 .e = { .data = k },
                                 .w = { .data = gainvec },
                                 .v = { .data = v },
                                 .o = { .data = x } };
    const mn_delta_net_args rule = { .call = call,
                                     .scale = 1,
                                     .q = { .data = q },
                                     .k = { .data = k },
                                     .v = { .data = v },
                                     .beta = { .data = strength },
                                     .o = { .data = y } };
    assert_int_equal(mn_op_riccati(context, &covariance), MN_OK);
    assert_int_equal(mn_op_delta(context, &mean), MN_OK);
    assert_int_equal(mn_op_delta_net(context, &rule), MN_OK);
    assert_true(distance(x, y, HV) <= exact);
    mn_context_destroy(context);
}

static double no_noise[H], weight[H], ridge[HK];

static void no_process_noise(mn_token *token, int64_t t) {
    still_belief(token, t);
    token->l2 = no_noise;
}

static void regression(mn_token *token, int64_t t) {
    (void)t;
    for (int64_t i = 0; i < HK; i++) ridge[i] = 1.0 / p0[i / K];
    for (int64_t h = 0; h < H; h++) weight[h] = 1.0 / r2[h];
    token->g = zeros;
    token->beta = weight;
    token->lam = ridge;
}

static void no_process_noise_ccq(mn_token *token, int64_t t) {
    no_process_noise(token, t);
    ccq_at_work(token, t);
}

static void regression_ccq(mn_token *token, int64_t t) {
    regression(token, t);
    ccq_at_work(token, t);
}

/* A = I and l2 = 0 is recursive least squares: P = (I / p0 + sum k k' / r2)^-1 and M = P sum k
 * v' / r2, which mesa solves anew at each read with beta = 1 / r2 and lam = 1 / p0. */
static void no_process_noise_is_least_squares(void **state) {
    (void)state;
    assert_same("bayes", no_process_noise, "mesa", regression);
    assert_same("bayes+ccq", no_process_noise_ccq, "mesa+ccq", regression_ccq);
}

/* Rotations by angle 0 never reach the imaginary rows. */
static void rotation_by_zero_is_diagonal(void **state) {
    (void)state;
    assert_same("bayes_rotation", belief_inputs, "bayes", belief_inputs);
}

/* ---- limits of the diagonal beliefs ---------------------------------------------------------- */

static double prior[H], log_decay[T][H], importance[HV], zero_gate[HV];
static double scaled[HV];
static double prior_precision;

static void huge_prior(mn_token *token, int64_t t) {
    static double rate[H] = { 1.0, 1.0 }, dt[H];
    for (int64_t h = 0; h < H; h++) {
        prior[h] = prior_precision;
        dt[h] = -log_decay[t][h];
    }
    for (int64_t i = 0; i < HV; i++) {
        scaled[i] = prior_precision * v[t][i];
        importance[i] = 1.0;
    }
    token->v = scaled;
    token->b = importance;
    token->dt = dt;
    token->decay_rate = rate;
    token->ip = prior;
}

static void same_decay(mn_token *token, int64_t t) {
    token->g = log_decay[t];
}

static void no_importance(mn_token *token, int64_t t) {
    huge_prior(token, t);
    token->b = zero_gate;
}

/* With an importance that no evidence can move, mu = a mu + k v / ip: Mamba-2 on values v / ip.
 * It is exact for b = 0; otherwise the distance falls as 1 / ip, at most T of evidence against
 * ip. */
static void huge_prior_is_mamba2(void **state) {
    (void)state;
    static double x[T][HV], y[T][HV];
    for (int64_t t = 0; t < T; t++) {
        for (int64_t h = 0; h < H; h++) log_decay[t][h] = g_channel[t][h];
    }
    run(y, "mamba2", same_decay);
    prior_precision = 2.0;
    run(x, "palimpsa_code", no_importance);
    assert_true(distance(x, y, HV) <= exact);
    prior_precision = 1e2;
    run(x, "palimpsa_code", huge_prior);
    assert_true(distance(x, y, HV) > 1e-4);
    for (prior_precision = 1e4; prior_precision < 1e9; prior_precision *= 100) {
        run(x, "palimpsa_code", huge_prior);
        assert_true(distance(x, y, HV) <= T / prior_precision);
    }
}

/* One KLA sequence: dynamics a, p on all cells, fresh precision lam0. */
static void run_kla(double o[T][HV], double a, double p, double lam0) {
    static double all_a[V * K], all_p[V * K];
    mn_mixer *m = open_mixer("kla");
    for (int64_t i = 0; i < V * K; i++) {
        all_a[i] = a;
        all_p[i] = p;
    }
    for (int64_t t = 0; t < T; t++) {
        const mn_token token = {
            .q = q[t], .k = k[t], .v = v[t], .prec = prec[t], .a = all_a, .p = all_p
        };
        assert_int_equal(mn_mixer_start(m, &token), MN_OK);
        for (int64_t i = 0; t == 0 && i < V * K; i++) mn_mixer_part(m, "lam", NULL)[i] = lam0;
        assert_int_equal(mn_mixer_step(m, &token, o[t], NULL), MN_OK);
    }
    mn_mixer_destroy(m);
}

/* Without process noise precision and information are causal convolutions with fixed kernels,
 *   lam_t = a^-2(t+1) lam0 + sum_s a^-2(t-s) prec k^2,   eta_t = sum_s a^-(t-s) prec v k,
 * whatever the input. The floor of p, 1e-12, is what is left of the noise: den is off by 1e-12 lam,
 * which ends at a^-2T = 5e3 and adds up to 3e-8 over the steps. */
static void no_noise_is_a_convolution(void **state) {
    (void)state;
    static double x[T][HV], y[T][HV];
    const double a = 0.9;
    run_kla(x, a, 0.0, 1.0);
    for (int64_t t = 0; t < T; t++) {
        for (int64_t j = 0; j < V; j++) {
            y[t][j] = 0.0;
            for (int64_t i = 0; i < K; i++) {
                double lam = pow(a, -2.0 * (double)(t + 1)), eta = 0.0;
                for (int64_t s = 0; s <= t; s++) {
                    lam += pow(a, -2.0 * (double)(t - s)) * prec[s][j] * k[s][i] * k[s][i];
                    eta += pow(a, -(double)(t - s)) * prec[s][j] * v[s][j] * k[s][i];
                }
                y[t][j] += q[t][i] * eta / lam;
            }
        }
    }
    assert_true(distance(x, y, V) <= 1e-7);
}

/* A prior precision at its fixed point under the noise, p = (1 - a^2) / lam0, stays there when
 * it is huge: mean = a mean + prec v k / lam0, a decaying sum with one constant decay. */
static void huge_kla_prior_is_a_decaying_sum(void **state) {
    (void)state;
    static double x[T][HV], y[T][HV];
    const double a = 0.9;
    for (double lam0 = 1e4; lam0 < 1e9; lam0 *= 100) {
        run_kla(x, a, (1.0 - a * a) / lam0, lam0);
        for (int64_t t = 0; t < T; t++) {
            for (int64_t j = 0; j < V; j++) {
                y[t][j] = 0.0;
                for (int64_t s = 0; s <= t; s++) {
                    double along = 0.0;
                    for (int64_t i = 0; i < K; i++) along += q[t][i] * k[s][i];
                    y[t][j] += pow(a, (double)(t - s)) * along * prec[s][j] * v[s][j] / lam0;
                }
            }
        }
        assert_true(distance(x, y, V) <= 100.0 / lam0);
    }
}

/* ---- HyperMLP -------------------------------------------------------------------------------- */

enum { P_LONG = 64, RANK = 3 };

/* Parameters of a mix for P lags, cut from those for P_LONG: the last P entries, since lag l is
 * entry P - 1 - l. */
typedef struct lag_mix {
    double U[2 * H * P_LONG * RANK], Vt[2 * H * P_LONG * RANK], d[2 * H * P_LONG];
} lag_mix;

static void make_mix(lag_mix *mix, int64_t P, uint64_t stream) {
    const int64_t first = P_LONG - P;
    for (int64_t n = 0; n < 2 * H; n++) {
        for (int64_t i = 0; i < P; i++) {
            mix->d[n * P + i] = 0.3 * draw(stream, n, first + i);
            for (int64_t r = 0; r < RANK; r++) {
                const int64_t from = (first + i) * RANK + r;
                mix->U[(n * P + i) * RANK + r] = 0.3 * mn_rng_normal(SEED + n, stream + 1, from);
                mix->Vt[(n * RANK + r) * P + i] = 0.3 * mn_rng_normal(SEED + n, stream + 2, from);
            }
        }
    }
}

static void run_hyper(double o[T][HV], const char *name, int64_t P) {
    static lag_mix before, after;
    static double queries[2 * HK], keys[2 * HK], controls[2 * H * RANK], gate[HV];
    const mn_mixer_config config = { .size = {
                                         .H = H, .K = K, .V = V, .P = P, .R = RANK, .W = RANK } };
    mn_mixer *m = NULL;
    assert_int_equal(mn_mixer_create(&m, name, &config), MN_OK);
    make_mix(&before, P, 20);
    make_mix(&after, P, 30);
    for (int64_t t = 0; t < T; t++) {
        for (int64_t i = 0; i < 2 * HK; i++) {
            queries[i] = draw(40, t, i);
            keys[i] = draw(41, t, i);
        }
        for (int64_t i = 0; i < 2 * H * RANK; i++) controls[i] = 0.5 + 0.1 * draw(42, t, i);
        for (int64_t i = 0; i < HV; i++) gate[i] = 0.5;
        const mn_token token = { .q = queries,
                                 .k = keys,
                                 .v = v[t],
                                 .gv = gate,
                                 .c1 = controls,
                                 .U1 = before.U,
                                 .Vt1 = before.Vt,
                                 .d1 = before.d,
                                 .c2 = controls,
                                 .U2 = after.U,
                                 .Vt2 = after.Vt,
                                 .d2 = after.d };
        assert_int_equal(mn_mixer_step(m, &token, o[t], NULL), MN_OK);
    }
    mn_mixer_destroy(m);
}

/* Mixing parameters for lags beyond the past are never met. */
static void lag_truncation_changes_nothing(void **state) {
    (void)state;
    static double x[T][HV], y[T][HV];
    static const char *const names[] = { "hypermlp", "hyperglu" };
    for (int i = 0; i < 2; i++) {
        run_hyper(x, names[i], P_LONG);
        run_hyper(y, names[i], T);
        assert_memory_equal(x, y, sizeof x);
    }
}

/* Without mixing HyperMLP is ReLU attention. */
static void unmixed_hypermlp_is_relu_attention(void **state) {
    (void)state;
    assert_same("hypermlp", plain, "relu_attention", plain);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decays_nest),
        cmocka_unit_test(delta_rules_meet),
        cmocka_unit_test(ccq_of_strength_zero_is_nothing),
        cmocka_unit_test(covariance_reset_is_the_delta_rule),
        cmocka_unit_test(covariance_reset_of_the_operators),
        cmocka_unit_test(no_process_noise_is_least_squares),
        cmocka_unit_test(rotation_by_zero_is_diagonal),
        cmocka_unit_test(huge_prior_is_mamba2),
        cmocka_unit_test(no_noise_is_a_convolution),
        cmocka_unit_test(huge_kla_prior_is_a_decaying_sum),
        cmocka_unit_test(lag_truncation_changes_nothing),
        cmocka_unit_test(unmixed_hypermlp_is_relu_attention),
    };
    make_inputs();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
