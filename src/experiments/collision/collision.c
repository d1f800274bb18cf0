/* collision.c - the deterministic collision experiment, run by the step loops of the layers. */
#include "experiments/collision/collision.h"

#include <math.h>
#include <string.h>

#include "base/status.h"

enum { D = MN_COLLISION_D, M = MN_COLLISION_M, A = 0, B = 1 };

/* All a token can be given here. */
typedef struct world {
    const mn_collision_setup *setup;
    mn_token token;
    double keys[M][D], values[M][M];
    double w; // gain of the covariance reset
    double zeros[D * M], ones[D * M], value[M];
    double per_head[1], per_key[D], per_value[M], per_cell[D * M];
    double prior[1], process[1], observation[1], memory[1], rate[1], gamma[1], closed[1];
} world;

static void fill(double *x, int64_t n, double value) {
    for (int64_t i = 0; i < n; i++) x[i] = value;
}

/* ---- families: what the inputs other than key, value and query are --------------------------- */

static void gaussian(world *x) {
    x->token.la = x->token.theta = x->zeros;
    x->prior[0] = x->setup->p0;
    x->process[0] = x->setup->l2;
    x->token.p0 = x->prior;
    x->token.l2 = x->process;
    x->token.r2 = x->observation;
}

static void ridge(world *x) {
    x->per_head[0] = 1.0 / x->setup->r2;
    fill(x->per_key, D, 1.0 / x->setup->p0);
    x->token.g = x->zeros;
    x->token.beta = x->per_head;
    x->token.lam = x->per_key;
}

static void slots(world *x) {
    fill(x->per_value, M, 1.0 / x->setup->r2);
    fill(x->per_cell, D * M, x->setup->l2);
    x->token.a = x->ones;
    x->token.p = x->per_cell;
    x->token.prec = x->per_value;
}

/* The paper's variant gates the value itself; the code's takes it gated, see `write`. */
static void cells(world *x) {
    fill(x->per_value, M, 1.0 / x->setup->r2);
    x->prior[0] = 1.0 / x->setup->p0;
    x->token.beta = x->token.b = x->per_value;
    x->token.gamma = x->token.dt = x->zeros;
    x->token.n_mem = x->token.decay_rate = x->ones;
    x->token.ip = x->prior;
}

static void correct(world *x) {
    x->per_head[0] = x->w;
    fill(x->per_key, D, x->w);
    fill(x->per_value, M, x->w);
    x->token.g = x->zeros;
    x->token.beta = x->per_head;
    x->token.erase = x->per_key;
    x->token.write = x->per_value;
}

static void implicit(world *x) {
    fill(x->per_value, M, x->setup->c / x->setup->r2);
    x->token.beta = x->per_value;
}

static void add(world *x) {
    x->token.g = x->zeros;
}

static void scan(world *x) {
    fill(x->per_value, M, x->w);
    x->token.A = x->zeros;
    x->token.dt = x->per_value;
}

/* sigmoid(1000) is 1 in double precision */
static void gated(world *x) {
    x->per_head[0] = log(x->w);
    x->closed[0] = 1000.0;
    x->token.ipre = x->per_head;
    x->token.fpre = x->closed;
}

static void past(world *x) {
    (void)x;
}

/* ---- the table ------------------------------------------------------------------------------- */

typedef enum control { KEEP, RESET, DIAGONAL } control;

static const struct {
    const char *name, *settings;
    control control;
    void (*family)(world *x);
} rules[MN_COLLISION_RULES] = {
#define RULE(id, name, control, family, settings)                                                  \
    [MN_COLLISION_##id] = { name, settings, control, family },
#include "experiments/collision/collision.def"
};

static const struct {
    const char *row, *why;
} absent[] = {
#define CANNOT(row, why) { #row, why },
#include "experiments/collision/collision.def"
    { NULL, NULL },
};

const char *mn_collision_name(mn_collision_rule rule) {
    return rules[rule].name;
}

const char *mn_collision_settings(mn_collision_rule rule) {
    return rules[rule].settings;
}

bool mn_collision_absent(int index, const char **row, const char **why) {
    *row = absent[index].row;
    *why = absent[index].why;
    return *row != NULL;
}

mn_collision_setup mn_collision_default(void) {
    return (mn_collision_setup) { .n_seed = 2,
                                  .n_boost = 40,
                                  .n_flood = 60,
                                  .rho = 0.92,
                                  .p0 = 3.0,
                                  .l2 = 0.05,
                                  .r2 = 0.05,
                                  .c = 0.05,
                                  .gamma = 0.5 };
}

int64_t mn_collision_length(const mn_collision_setup *s) {
    return s->n_seed * M + s->n_boost + s->n_flood;
}

/* ---- one run --------------------------------------------------------------------------------- */

static void build(world *x, mn_collision_rule rule, const mn_collision_setup *s) {
    memset(x, 0, sizeof *x);
    x->setup = s;
    x->w = s->c / (s->c + s->r2);
    x->keys[A][0] = 1.0;
    x->keys[B][0] = s->rho;
    x->keys[B][1] = sqrt(1.0 - s->rho * s->rho);
    for (int i = 2; i < M; i++) x->keys[i][i] = 1.0;
    for (int i = 0; i < M; i++) x->values[i][i] = 1.0;
    fill(x->ones, D * M, 1.0);
    x->observation[0] = s->r2;
    x->gamma[0] = s->gamma;
    x->token.ccq_gamma = x->gamma;
    rules[rule].family(x);
    if (rules[rule].control == RESET) x->process[0] = s->c;
}

static int64_t identity_at(const mn_collision_setup *s, int64_t t) {
    if (t < s->n_seed * M) return t % M;
    return t < s->n_seed * M + s->n_boost ? B : A;
}

/* What the layer takes for value v: some rows want it weighed by the caller. */
static void choose_value(world *x, mn_collision_rule rule, int64_t identity) {
    double weight = 1.0;
    if (rules[rule].family == add) weight = x->w;
    if (rule == MN_COLLISION_PALIMPSA_CODE) weight = 1.0 / x->setup->r2;
    for (int i = 0; i < M; i++) x->value[i] = weight * x->values[identity][i];
    x->token.v = x->value;
    x->token.k = x->token.q = x->keys[identity];
}

/* Before a step: the covariance as the control has it. With P = 0 the prediction is l2 I, and l2
 * is c. */
static void apply_control(double *P, control how) {
    for (int64_t i = 0; P && how != KEEP && i < D * D; i++) {
        if (how == RESET || i / D != i % D) P[i] = 0.0;
    }
}

/* x'Py on the rows that keys touch: every one, or every second when the memory rotates */
static double along(const double *x, const double *P, int64_t R, const double *y) {
    const int64_t step = R / D;
    double sum = 0.0;
    for (int64_t i = 0; i < D; i++) {
        for (int64_t j = 0; j < D; j++) sum += x[i] * P[i * step * R + j * step] * y[j];
    }
    return sum;
}

/* The write that k is about to make, from the covariance P before its prediction. */
static void measure_write(mn_collision_point *point, const world *x, const double *P, int64_t R) {
    const double *k = x->token.k;
    double norm2 = 0.0, ku = 0.0;
    for (int64_t i = 0; i < D; i++) {
        double unit[D] = { 0 };
        unit[i] = 1.0;
        const double u = x->process[0] * k[i] + along(unit, P, R, k);
        norm2 += u * u;
        ku += k[i] * u;
    }
    const double beta = 1.0 / (x->setup->r2 + ku);
    point->gain = beta * ku;
    point->gain_norm = beta * sqrt(norm2);
    point->cosine = ku / sqrt(norm2);
}

/* Rows without covariance: the fixed weight of a write, where there is one. */
static void fixed_write(mn_collision_point *point, const world *x, mn_collision_rule rule) {
    void (*const family)(world *) = rules[rule].family;
    const bool fixed = family == correct || family == add || family == scan || family == implicit;
    *point = (mn_collision_point) { .gain = fixed ? x->w : NAN,
                                    .gain_norm = fixed ? x->w : NAN,
                                    .cosine = fixed ? 1.0 : NAN,
                                    .var_a = NAN,
                                    .var_b = NAN,
                                    .cov_ab = NAN };
}

static mn_status ask(double answer[2], double *variance, mn_mixer *m, const world *x, int address) {
    double o[M], var[M];
    mn_token token = x->token;
    token.q = x->keys[address];
    const bool sure = mn_mixer_has_variance(mn_mixer_describe(m));
    const mn_status st = mn_mixer_read(m, &token, o, sure ? var : NULL);
    answer[A] = o[A];
    answer[B] = o[B];
    if (sure) *variance = var[address];
    return st;
}

static mn_status write_once(mn_collision_point *point, mn_mixer *m, world *x,
                            mn_collision_rule rule) {
    int64_t count = 0;
    double *P = mn_mixer_part(m, "P", &count);
    const int64_t R = count > D * D ? 2 * D : D;
    fixed_write(point, x, rule);
    apply_control(P, rules[rule].control);
    if (P) measure_write(point, x, P, R);
    mn_status st = mn_mixer_step(m, &x->token, NULL, NULL);
    if (st == MN_OK) st = ask(point->a, &point->var_a, m, x, A);
    if (st == MN_OK) st = ask(point->b, &point->var_b, m, x, B);
    if (P) point->cov_ab = along(x->keys[A], P, R, x->keys[B]);
    point->p = 1.0 / (1.0 + exp(point->b[A] - point->b[B]));
    point->margin = 2.0 * point->p - 1.0;
    return st;
}

static mn_status check_setup(const mn_collision_setup *s) {
    if (!(fabs(s->rho) < 1.0)) {
        return mn_fail(MN_ERR_ARGUMENT, "collision: the overlap is %g, it must be inside (-1, 1)",
                       s->rho);
    }
    if (!(s->p0 > 0.0 && s->l2 >= 0.0 && s->r2 > 0.0 && s->c > 0.0)) {
        return mn_fail(MN_ERR_ARGUMENT,
                       "collision: p0, r2 and c must be above 0 and l2 at least 0");
    }
    const int64_t most = 1 << 20;
    if (s->n_seed < 0 || s->n_boost < 0 || s->n_flood < 0 || s->n_seed > most ||
        s->n_boost > most || s->n_flood > most || mn_collision_length(s) < 1) {
        return mn_fail(MN_ERR_ARGUMENT,
                       "collision: writes are counted from 0 to %lld and at least one "
                       "is needed",
                       (long long)most);
    }
    return MN_OK;
}

mn_status mn_collision_run(mn_collision_point *points, mn_collision_rule rule,
                           const mn_collision_setup *s) {
    const mn_mixer_config config = { .size = { .H = 1, .K = D, .V = M } };
    const char *layer = rules[rule].control == KEEP ? rules[rule].name : "bayes";
    world x;
    mn_mixer *m = NULL;
    mn_status st = check_setup(s);
    if (st == MN_OK) st = mn_mixer_create(&m, layer, &config);
    if (st == MN_OK) {
        build(&x, rule, s);
        choose_value(&x, rule, A);
        st = mn_mixer_start(m, &x.token);
    }
    double *lam = st == MN_OK && rule == MN_COLLISION_KLA ? mn_mixer_part(m, "lam", NULL) : NULL;
    if (lam) fill(lam, D * M, 1.0 / s->p0);
    for (int64_t t = 0; st == MN_OK && t < mn_collision_length(s); t++) {
        choose_value(&x, rule, identity_at(s, t));
        st = write_once(&points[t], m, &x, rule);
    }
    mn_mixer_destroy(m);
    return st;
}

int64_t mn_collision_crossing(const mn_collision_point *points, const mn_collision_setup *s) {
    for (int64_t t = s->n_seed * M + s->n_boost; t < mn_collision_length(s); t++) {
        if (points[t].margin < 0.0) return t + 1;
    }
    return 0;
}
