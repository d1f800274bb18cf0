/* test_kalman.c - what a look inside tells: rows of Kalman attention give back what the layer read,
 * from the beginning and behind a state; heads and gains are those of memories of one number. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "model/kalman.h"
#include "model/posterior.h"
#include "support/check.h"
#include "support/model_case.h"

enum { T = 20, FIRST = 7, V = 11, MOST = 64, KINDS = 8 };

static const char *const kinds[KINDS] = { "k", "la", "l2", "r2", "p0", "prec", "a", "p" };

typedef struct pass {
    mn_model *model;
    mn_context *context;
    mn_tape *tape;
    mn_posterior *posterior;
    mn_kalman *kalman;
    mn_model_state state;
    const mn_tap *of_posterior, *of_kalman;
    int32_t tokens[T];
    float told[KINDS][T * MOST];     // of layer 0, in the last pass
} pass;

static void hear(void *context, int layer, const char *name, const mn_tensor *x) {
    pass *p = context;
    p->of_posterior->hear(p->of_posterior->context, layer, name, x);
    p->of_kalman->hear(p->of_kalman->context, layer, name, x);
    const int64_t n = x->shape[0] * x->shape[1] * x->shape[2] * x->shape[3];
    for (int i = 0; i < KINDS; i++) {
        const bool mine = layer == 0 && strcmp(kinds[i], name) == 0 && n <= (int64_t)T * MOST;
        if (mine && mn_tape_read(p->tape, x, p->told[i]) != MN_OK) check_fatal("%s", name);
    }
}

static void open_pass(pass *p, const char *json) {
    static const mn_context_options one = { .n_threads = 1 };
    memset(p, 0, sizeof *p);
    model_case_tokens(p->tokens, T, V, 5);
    mn_status st = model_case_create(&p->model, json, MN_F32, 0.3, 9);
    if (st == MN_OK) st = mn_context_create(&p->context, &one);
    if (st == MN_OK) st = mn_tape_create(&p->tape, p->context, MN_F32);
    if (st == MN_OK) st = mn_posterior_create(&p->posterior, p->model);
    if (st == MN_OK) st = mn_kalman_create(&p->kalman, p->model);
    if (st == MN_OK) st = mn_model_state_create(&p->state, p->model);
    if (st == MN_OK) st = mn_kalman_from(p->kalman, &p->state);
    if (st != MN_OK) check_fatal("%s: %s", json, mn_last_error());
}

static void close_pass(pass *p) {
    mn_model_state_free(&p->state);
    mn_kalman_destroy(p->kalman);
    mn_posterior_destroy(p->posterior);
    mn_tape_destroy(p->tape);
    mn_context_destroy(p->context);
    mn_model_destroy(p->model);
}

static void feed(pass *p, int from, int to) {
    mn_status st = mn_posterior_from(p->posterior, &p->state);
    if (st != MN_OK) check_fatal("%s", mn_last_error());
    p->of_posterior = mn_posterior_tap(p->posterior, p->tape);
    p->of_kalman = mn_kalman_tap(p->kalman, p->tape);
    const mn_tap tap = { hear, p };
    const mn_model_input in = { .tokens = p->tokens + from, .B = 1, .T = to - from,
                                .state = &p->state, .tap = &tap };
    mn_tape_start(p->tape, MN_TAPE_FORWARD);
    mn_model_hidden(p->model, p->tape, &in);
    st = mn_tape_status(p->tape);
    if (st == MN_OK) st = mn_kalman_status(p->kalman);
    if (st != MN_OK) check_fatal("%s", mn_last_error());
}

/* Values are read in float32 while rows are of doubles: five digits are left of seven. */
static void rows_are_what_is_read(void **state) {
    (void)state;
    static const char json[] = "{\"layers\": \"kla, gdn, kla\", \"hidden_size\": 8, "
                               "\"vocab_size\": 11, \"d_state\": 3}";
    pass p;
    double at_once[T], in_pieces[T];
    mn_kalman_row row = { .weights = at_once };
    open_pass(&p, json);
    feed(&p, 0, FIRST);
    feed(&p, FIRST, T);
    assert_int_equal(mn_kalman_layers(p.kalman), 2);
    assert_int_equal(mn_kalman_layer(p.kalman, 1), 2);
    for (int i = 0; i < 2; i++) {
        for (int t = 0; t < T; t++) {
            assert_int_equal(mn_kalman_read(&row, p.kalman, i, t), MN_OK);
            CHECK(row.digits > 5.0 && !(row.before > 0.0), "layer %d, token %d: %g digits, %g "
                  "before", i, t, row.digits, row.before);
        }
    }
    close_pass(&p);
    open_pass(&p, json);     // the first tokens are heard by nobody
    feed(&p, 0, FIRST);
    assert_int_equal(mn_kalman_from(p.kalman, &p.state), MN_OK);
    feed(&p, FIRST, T);
    row.weights = in_pieces;
    assert_int_equal(mn_kalman_read(&row, p.kalman, 1, T - 1 - FIRST), MN_OK);
    CHECK(row.digits > 5.0 && row.before > 0.0, "behind a state: %g digits, %g before", row.digits,
          row.before);
    for (int s = FIRST; s < T; s++) {
        CHECK(fabs(in_pieces[s - FIRST] - at_once[s]) <= 1e-5 * at_once[s], "weight of %d: %g, "
              "not %g", s, in_pieces[s - FIRST], at_once[s]);
    }
    close_pass(&p);
    check_done();
}

static void by_head(pass *p, float *variance, float *gain) {
    feed(p, 0, T);
    if (mn_posterior_by_head(p->posterior, T, variance, gain) != MN_OK) {
        check_fatal("%s", mn_last_error());
    }
}

/* A covariance that is a number: the gain is k^2 P / (r2 + k^2 P). */
static void gains_of_bayes_by_hand(void **state) {
    (void)state;
    enum { H = 4 };
    float variance[T * H], gain[T * H];
    pass p;
    open_pass(&p, "{\"layers\": \"bayes\", \"num_hidden_layers\": 1, \"hidden_size\": 4, "
                  "\"vocab_size\": 11, \"num_heads\": 4, \"head_dim\": 1, \"noise_groups\": 1}");
    assert_int_equal(mn_posterior_heads(p.posterior), H);
    by_head(&p, variance, gain);
    for (int h = 0; h < H; h++) {
        double P = p.told[4][h];
        for (int t = 0; t < T; t++) {
            const double k = p.told[0][t * H + h], la = p.told[1][t * H + h];
            P = P * exp(2.0 * la) + p.told[2][t * H + h];
            const double want = k * k * P / (p.told[3][t * H + h] + k * k * P);
            P -= want * P;
            CHECK(fabs(gain[t * H + h] - want) < 1e-5, "head %d, token %d: a gain of %g, not %g", h,
                  t, gain[t * H + h], want);
            CHECK(variance[t * H + h] > 0.0f, "head %d, token %d: variance", h, t);
        }
    }
    close_pass(&p);
    check_done();
}

/* A channel of one slot: the gain is prec k^2 / lam. */
static void gains_of_kla_by_hand(void **state) {
    (void)state;
    float variance[T], gain[T];
    double want[T] = { 0 };
    pass p;
    int layer, head;
    open_pass(&p, "{\"layers\": \"kla\", \"num_hidden_layers\": 1, \"hidden_size\": 8, "
                  "\"vocab_size\": 11, \"d_state\": 1}");
    assert_int_equal(mn_posterior_heads(p.posterior), 1);
    mn_posterior_head(p.posterior, 0, &layer, &head);
    assert_int_equal(layer, 0);
    assert_int_equal(head, 0);
    by_head(&p, variance, gain);
    const int64_t M = MN_SIZE(&mn_model_layer(p.model, 0)->sizes, 'V');
    for (int64_t c = 0; c < M; c++) {
        const double a = p.told[6][c], pbar = p.told[7][c];
        double lam = 1.0;
        for (int t = 0; t < T; t++) {
            const double k = p.told[0][t], prec = p.told[5][t * M + c];
            lam = lam / (a * a + pbar * lam) + prec * k * k;
            want[t] += prec * k * k / lam / (double)M;
        }
    }
    for (int t = 0; t < T; t++) {
        CHECK(fabs(gain[t] - want[t]) < 1e-5, "token %d: a gain of %g, not %g", t, gain[t],
              want[t]);
    }
    close_pass(&p);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_what_is_read),
        cmocka_unit_test(gains_of_bayes_by_hand),
        cmocka_unit_test(gains_of_kla_by_hand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
