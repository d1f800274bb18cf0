/* test_optim.c - the optimiser against AdamW written down in double, its groups, clipping, bits at
 * any number of threads, refusals; schedules at points computed by hand. */
#include "optim/optim.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "base/util.h"

/* Sizes around a vector and around a piece, and none at all. */
static const int64_t counts[] = { 1, 15, 16, 17, 0, 384, 16383, 16384, 16385, 50001 };
enum { N_PARAMS = MN_COUNTOF(counts), GUARD = 16, STEPS = 5 };

typedef struct model {
    mn_optim_param params[N_PARAMS];
    float *memory[2 * N_PARAMS];    // values and gradients, GUARD floats behind each
} model;

static const float guard = 12345.0f;

static float *with_guard(int64_t count) {
    float *x = malloc((size_t)(count + GUARD) * sizeof *x);
    assert_non_null(x);
    for (int64_t i = count; i < count + GUARD; i++) x[i] = guard;
    return x;
}

static void check_guards(const model *m) {
    for (int i = 0; i < 2 * N_PARAMS; i++) {
        for (int64_t k = 0; k < GUARD; k++) {
            assert_true(m->memory[i][counts[i / 2] + k] == guard);
        }
    }
}

/* Every third parameter keeps its weights, and learning rates differ. */
static void open_model(model *m) {
    for (int i = 0; i < N_PARAMS; i++) {
        float *value = with_guard(counts[i]), *grad = with_guard(counts[i]);
        for (int64_t k = 0; k < counts[i]; k++) {
            value[k] = (float)mn_rng_normal(1, (uint64_t)i, (uint64_t)k);
        }
        m->memory[2 * i] = value;
        m->memory[2 * i + 1] = grad;
        m->params[i] = (mn_optim_param){ "p", value, grad, counts[i], 1.0 + 0.5 * (i % 4), i % 3,
                                          NULL };
    }
}

static void close_model(model *m) {
    check_guards(m);
    for (int i = 0; i < 2 * N_PARAMS; i++) free(m->memory[i]);
}

/* Gradients of a step, some of them exactly 0 and some tiny. */
static void draw_gradients(model *m, int step) {
    for (int i = 0; i < N_PARAMS; i++) {
        for (int64_t k = 0; k < counts[i]; k++) {
            const double x = mn_rng_normal(2 + (uint64_t)step, (uint64_t)i, (uint64_t)k);
            m->params[i].grad[k] = (float)(k % 7 == 0 ? 0.0 : k % 7 == 1 ? 1e-12 * x : x);
        }
    }
}

static mn_context *open_context(mn_target_id target, int n_threads) {
    mn_context *context = NULL;
    const mn_context_options options = { .n_threads = n_threads, .target = mn_target_name(target) };
    assert_int_equal(mn_context_create(&context, &options), MN_OK);
    return context;
}

static const mn_adamw_options usual = { 0.9, 0.95, 1e-8, 0.1 };

static mn_optimizer *open_optimizer(const model *m) {
    mn_optimizer *o = NULL;
    assert_int_equal(mn_optimizer_create(&o, m->params, N_PARAMS, &usual), MN_OK);
    return o;
}

static double rate_at(int step) {
    return 1e-2 / (1 + step);
}

static double scale_at(int step) {
    return step % 2 ? 0.25 : 1.0;
}

/* The equations of Loshchilov and Hutter in double, for one number over all steps. */
typedef struct number {
    double p, m, v;
} number;

static void plain_adamw(number *x, double g, int step, const mn_optim_param *param) {
    const double lr = rate_at(step) * param->lr_scale;
    const double decay = param->decays ? usual.weight_decay : 0.0;
    x->m = usual.beta1 * x->m + (1.0 - usual.beta1) * g;
    x->v = usual.beta2 * x->v + (1.0 - usual.beta2) * g * g;
    const double m = x->m / (1.0 - pow(usual.beta1, step + 1));
    const double v = x->v / (1.0 - pow(usual.beta2, step + 1));
    x->p -= lr * (m / (sqrt(v) + usual.eps) + decay * x->p);
}

/* m, v and p are rounded some four times a step. The ratio m / sqrt(v) is at most
 * (1 - b1) / sqrt(1 - b2) over few steps, below 1.5 corrected, but its m may be a difference of
 * larger terms: its error is 8 u times the magnitudes summed, bounded by the same 1.5. Together, a
 * step adds at most lr (16 u) 1.5 + 4 u |p|. */
static void check_param(mn_optimizer *o, const mn_optim_param *param, int i, const float *start,
                        float *const grads[STEPS]) {
    for (int64_t k = 0; k < param->count; k++) {
        number x = { start[k], 0.0, 0.0 };
        double lr_sum = 0.0, largest = fabs(x.p), g_most = 0.0;
        for (int s = 0; s < STEPS; s++) {
            const double g = scale_at(s) * grads[s][k];
            plain_adamw(&x, g, s, param);
            lr_sum += rate_at(s) * param->lr_scale;
            largest = fmax(largest, fabs(x.p));
            g_most = fmax(g_most, fabs(g));
        }
        const double u = FLT_EPSILON, steps = STEPS;
        const double slack = 24.0 * u * lr_sum + 4.0 * steps * u * largest;
        if (!(fabs(param->value[k] - x.p) <= slack)) {
            fail_msg("parameter %d, number %d: %.9g, not %.9g, apart by %.1e (%.1e allowed)", i,
                     (int)k, (double)param->value[k], x.p, param->value[k] - x.p, slack);
        }
        assert_true(fabs(mn_optimizer_first(o, i)[k] - x.m) <= 4.0 * steps * u * g_most);
        assert_true(fabs(mn_optimizer_second(o, i)[k] - x.v) <= 6.0 * steps * u * x.v + FLT_MIN);
    }
}

static void steps_are_adamw(void **state) {
    (void)state;
    for (int target = 0; target < MN_TARGET_COUNT; target++) {
        if (!mn_target_available((mn_target_id)target)) continue;
        mn_context *context = open_context((mn_target_id)target, 2);
        model m;
        open_model(&m);
        mn_optimizer *o = open_optimizer(&m);
        float *start[N_PARAMS], *grads[N_PARAMS][STEPS];
        for (int i = 0; i < N_PARAMS; i++) {
            const size_t bytes = (size_t)counts[i] * sizeof(float);
            start[i] = memcpy(malloc(bytes + 1), m.params[i].value, bytes);
        }
        for (int s = 0; s < STEPS; s++) {
            draw_gradients(&m, s);
            for (int i = 0; i < N_PARAMS; i++) {
                const size_t bytes = (size_t)counts[i] * sizeof(float);
                grads[i][s] = memcpy(malloc(bytes + 1), m.params[i].grad, bytes);
            }
            assert_int_equal(mn_optimizer_step(o, context, s, rate_at(s), scale_at(s)), MN_OK);
        }
        for (int i = 0; i < N_PARAMS; i++) {
            check_param(o, &m.params[i], i, start[i], grads[i]);
            for (int s = 0; s < STEPS; s++) {
                free(grads[i][s]);
            }
            free(start[i]);
        }
        mn_optimizer_destroy(o);
        close_model(&m);
        mn_context_destroy(context);
    }
}

static void norm_is_the_sum_of_squares(void **state) {
    (void)state;
    for (int target = 0; target < MN_TARGET_COUNT; target++) {
        if (!mn_target_available((mn_target_id)target)) continue;
        mn_context *context = open_context((mn_target_id)target, 3);
        model m;
        open_model(&m);
        draw_gradients(&m, 0);
        mn_optimizer *o = open_optimizer(&m);
        double sum = 0.0;
        int64_t n = 0;
        for (int i = 0; i < N_PARAMS; i++) {
            for (int64_t k = 0; k < counts[i]; k++, n++) {
                sum += (double)m.params[i].grad[k] * m.params[i].grad[k];
            }
        }
        const double want = sqrt(sum);
        const double got = mn_optimizer_grad_norm(o, context);
        assert_true(fabs(got - want) <= (double)n * DBL_EPSILON * want);
        m.params[3].grad[2] = NAN;
        assert_true(isnan(mn_optimizer_grad_norm(o, context)));
        mn_optimizer_destroy(o);
        close_model(&m);
        mn_context_destroy(context);
    }
}

/* Values and moments after a few steps, and the last norm, on `n_threads` threads. */
static double run_steps(model *m, mn_optimizer *o, mn_target_id target, int n_threads) {
    mn_context *context = open_context(target, n_threads);
    double norm = 0.0;
    for (int s = 0; s < STEPS; s++) {
        draw_gradients(m, s);
        norm = mn_optimizer_grad_norm(o, context);
        assert_int_equal(mn_optimizer_step(o, context, s, rate_at(s), 1.0 / norm), MN_OK);
    }
    mn_context_destroy(context);
    return norm;
}

static void threads_do_not_show(void **state) {
    (void)state;
    for (int target = 0; target < MN_TARGET_COUNT; target++) {
        if (!mn_target_available((mn_target_id)target)) continue;
        model one, many;
        open_model(&one);
        open_model(&many);
        mn_optimizer *o = open_optimizer(&one), *p = open_optimizer(&many);
        const double a = run_steps(&one, o, (mn_target_id)target, 1);
        const double b = run_steps(&many, p, (mn_target_id)target, 5);
        assert_memory_equal(&a, &b, sizeof a);
        for (int i = 0; i < N_PARAMS; i++) {
            const size_t bytes = (size_t)counts[i] * sizeof(float);
            assert_memory_equal(one.params[i].value, many.params[i].value, bytes);
            assert_memory_equal(mn_optimizer_first(o, i), mn_optimizer_first(p, i), bytes);
            assert_memory_equal(mn_optimizer_second(o, i), mn_optimizer_second(p, i), bytes);
        }
        mn_optimizer_destroy(o);
        mn_optimizer_destroy(p);
        close_model(&one);
        close_model(&many);
    }
}

static void mistakes_are_refused(void **state) {
    (void)state;
    mn_optimizer *o = NULL;
    float x[2] = { 1.0f, 2.0f };
    const mn_optim_param good = { "w", x, x, 2, 1.0, true, NULL };
    static const mn_adamw_options bad[] = {
        { 1.0, 0.95, 1e-8, 0.0 },  { 0.9, -0.1, 1e-8, 0.0 }, { 0.9, 0.95, 0.0, 0.0 },
        { 0.9, 0.95, 1e-8, -1.0 }, { NAN, 0.95, 1e-8, 0.0 }, { 0.9, 0.95, INFINITY, 0.0 },
    };
    for (size_t i = 0; i < MN_COUNTOF(bad); i++) {
        assert_int_equal(mn_optimizer_create(&o, &good, 1, &bad[i]), MN_ERR_ARGUMENT);
    }
    mn_optim_param p = good;
    p.grad = NULL;
    assert_int_equal(mn_optimizer_create(&o, &p, 1, &usual), MN_ERR_ARGUMENT);
    p = good;
    p.count = -1;
    assert_int_equal(mn_optimizer_create(&o, &p, 1, &usual), MN_ERR_ARGUMENT);
    p = good;
    p.lr_scale = NAN;
    assert_int_equal(mn_optimizer_create(&o, &p, 1, &usual), MN_ERR_ARGUMENT);
    assert_non_null(strstr(mn_last_error(), "(w)"));
    p = good;
    p.count = INT64_MAX / 4;    // moments of 2^64 bytes
    assert_int_equal(mn_optimizer_create(&o, &p, 1, &usual), MN_ERR_MEMORY);
    assert_null(o);
    mn_optimizer_destroy(NULL);

    mn_context *context = open_context(MN_TARGET_REF, 1);
    assert_int_equal(mn_optimizer_create(&o, &good, 1, &usual), MN_OK);
    assert_int_equal(mn_optimizer_step(o, context, -1, 0.1, 1.0), MN_ERR_ARGUMENT);
    assert_int_equal(mn_optimizer_step(o, context, 0, NAN, 1.0), MN_ERR_ARGUMENT);
    assert_int_equal(mn_optimizer_step(o, context, 0, -0.1, 1.0), MN_ERR_ARGUMENT);
    assert_int_equal(mn_optimizer_step(o, context, 0, 0.1, INFINITY), MN_ERR_ARGUMENT);
    assert_true(x[0] == 1.0f && x[1] == 2.0f);
    mn_optimizer_destroy(o);
    mn_context_destroy(context);
}

/* ---- schedules ------------------------------------------------------------------------------- */

static void rates_at_known_points(void **state) {
    (void)state;
    typedef struct point {
        mn_schedule_kind kind;
        int64_t step;
        double rate;
    } point;
    /* peak 8, floor 2, warmup 3, 103 steps, the last 0.2 of them (from 82.4) fall in wsd */
    static const point points[] = {
        { MN_SCHEDULE_CONSTANT, 0, 2.0 },  { MN_SCHEDULE_CONSTANT, 1, 4.0 },
        { MN_SCHEDULE_CONSTANT, 2, 6.0 },  { MN_SCHEDULE_CONSTANT, 3, 8.0 },
        { MN_SCHEDULE_CONSTANT, 102, 8.0 }, { MN_SCHEDULE_COSINE, 2, 6.0 },
        { MN_SCHEDULE_COSINE, 3, 8.0 },    { MN_SCHEDULE_COSINE, 53, 5.0 },
        { MN_SCHEDULE_COSINE, 28, 5.0 + 3.0 * 0.70710678118654752 },
        { MN_SCHEDULE_COSINE, 103, 2.0 },  { MN_SCHEDULE_COSINE, 500, 2.0 },
        { MN_SCHEDULE_LINEAR, 3, 8.0 },    { MN_SCHEDULE_LINEAR, 28, 6.5 },
        { MN_SCHEDULE_LINEAR, 53, 5.0 },   { MN_SCHEDULE_LINEAR, 103, 2.0 },
        { MN_SCHEDULE_WSD, 0, 2.0 },       { MN_SCHEDULE_WSD, 3, 8.0 },
        { MN_SCHEDULE_WSD, 82, 8.0 },      { MN_SCHEDULE_WSD, 83, 8.0 - 6.0 * 0.6 / 20.6 },
        { MN_SCHEDULE_WSD, 103, 2.0 },
    };
    for (size_t i = 0; i < MN_COUNTOF(points); i++) {
        const mn_schedule s = { points[i].kind, 8.0, 2.0, 3, 103, 0.2, 0 };
        const double got = mn_schedule_rate(&s, points[i].step);
        if (fabs(got - points[i].rate) > 1e-13) {
            fail_msg("%s at %d: %.17g, not %.17g", mn_schedule_name(points[i].kind),
                     (int)points[i].step, got, points[i].rate);
        }
    }
}

/* Warmups as long as the run or longer, none, and a decay that would begin inside the warmup. */
static void odd_schedules_stay_in_bounds(void **state) {
    (void)state;
    for (int kind = 0; kind < MN_SCHEDULE_COUNT; kind++) {
        for (int64_t warmup = 0; warmup < 15; warmup += 5) {
            const mn_schedule s = { (mn_schedule_kind)kind, 1.0, 0.1, warmup, 10, 0.9, 0 };
            double before = 0.0;
            for (int64_t step = 0; step < 12; step++) {
                const double rate = mn_schedule_rate(&s, step);
                assert_true(rate > 0.0 && rate <= 1.0);
                assert_true(step >= warmup ? rate >= 0.1 : rate > before);
                before = rate;
            }
        }
    }
}

static void held_schedules_move_by_epochs(void **state) {
    (void)state;
    const mn_schedule held = { MN_SCHEDULE_COSINE, 1.0, 0.0, 0, 40, 0.0, 10 };
    const mn_schedule each = { MN_SCHEDULE_COSINE, 1.0, 0.0, 0, 40, 0.0, 1 };
    for (int64_t step = 0; step < 40; step++) {
        const double rate = mn_schedule_rate(&held, step);
        if (rate != mn_schedule_rate(&each, step - step % 10)) {
            fail_msg("step %d has a rate of its own: %g", (int)step, rate);
        }
    }
}

static void schedules_have_names(void **state) {
    (void)state;
    mn_schedule_kind kind;
    for (int i = 0; i < MN_SCHEDULE_COUNT; i++) {
        assert_true(mn_schedule_parse(&kind, mn_schedule_name((mn_schedule_kind)i)));
        assert_int_equal(kind, i);
    }
    assert_false(mn_schedule_parse(&kind, "sine"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_are_adamw),
        cmocka_unit_test(norm_is_the_sum_of_squares),
        cmocka_unit_test(threads_do_not_show),
        cmocka_unit_test(mistakes_are_refused),
        cmocka_unit_test(rates_at_known_points),
        cmocka_unit_test(odd_schedules_stay_in_bounds),
        cmocka_unit_test(held_schedules_move_by_epochs),
        cmocka_unit_test(schedules_have_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
