/* test_posterior.c - posteriors at the places of questions: their variance is the one that layers
 * tell themselves, and the other statistics of a small memory are what they are by hand. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "eval/doubt.h"
#include "infer/session.h"
#include "support/check.h"
#include "support/model_case.h"

enum { B = 2, T = 12, V = 11, PLACES = 5 };

static const int32_t places[PLACES] = { 0, 3, 11, 14, 23 };

typedef struct pass {
    mn_model *model;
    mn_context *context;
    mn_tape *tape;
    mn_posterior *posterior;
    float *value;                // (PLACES, features)
    float variance[4 * B * T];
} pass;

static void open_pass(pass *p, const char *json) {
    static const mn_context_options one = { .n_threads = 1 };
    int32_t tokens[B * T];
    *p = (pass){ 0 };
    model_case_tokens(tokens, B * T, V, 5);
    mn_status st = model_case_create(&p->model, json, MN_F32, 0.3, 9);
    if (st == MN_OK) st = mn_context_create(&p->context, &one);
    if (st == MN_OK) st = mn_tape_create(&p->tape, p->context, MN_F32);
    if (st == MN_OK) st = mn_posterior_create(&p->posterior, p->model);
    if (st != MN_OK) check_fatal("%s", mn_last_error());
    const mn_model_input in = { .tokens = tokens, .B = B, .T = T, .variance = p->variance,
                                .tap = mn_posterior_tap(p->posterior, p->tape) };
    const int n = mn_posterior_features(p->posterior);
    p->value = calloc((size_t)(PLACES * n + 1), sizeof *p->value);
    mn_tape_start(p->tape, MN_TAPE_FORWARD);
    mn_model_hidden(p->model, p->tape, &in);
    st = mn_tape_status(p->tape);
    if (st == MN_OK) st = mn_posterior_read(p->posterior, B, T, places, PLACES, p->value);
    if (st != MN_OK) check_fatal("%s: %s", json, mn_last_error());
}

static void close_pass(pass *p) {
    mn_posterior_destroy(p->posterior);
    mn_tape_destroy(p->tape);
    mn_context_destroy(p->context);
    mn_model_destroy(p->model);
    free(p->value);
}

/* The feature of this name; fails the test where there is none. */
static int feature_of(const pass *p, mn_statistic statistic, const char *name) {
    for (int f = 0; f < mn_posterior_features(p->posterior); f++) {
        mn_statistic of;
        char own[64];
        mn_posterior_feature(p->posterior, f, &of, own, sizeof own);
        if (of == statistic && strcmp(own, name) == 0) return f;
    }
    check_fatal("no %s of %s", mn_statistic_name(statistic), name);
    return -1;
}

static double value_of(const pass *p, int place, mn_statistic statistic, const char *name) {
    const int n = mn_posterior_features(p->posterior);
    return p->value[place * n + feature_of(p, statistic, name)];
}

static const char *const models[] = {
    "{\"layers\": \"bayes\", \"num_hidden_layers\": 2, \"hidden_size\": 8, \"vocab_size\": 11, "
    "\"num_heads\": 2, \"expand_v\": 2, \"noise_groups\": 2, \"learn_prior\": true}",
    "{\"layers\": \"bayes\", \"num_hidden_layers\": 1, \"hidden_size\": 8, \"vocab_size\": 11, "
    "\"num_heads\": 1, \"noise_groups\": 1, \"transition\": \"identity\", \"use_gate\": false}",
    "{\"layers\": \"kla\", \"num_hidden_layers\": 2, \"hidden_size\": 8, \"vocab_size\": 11, "
    "\"d_state\": 3}",
    "{\"layers\": \"palimpsa_code\", \"num_hidden_layers\": 2, \"hidden_size\": 8, "
    "\"vocab_size\": 11, \"num_heads\": 2}",
    "{\"layers\": \"palimpsa_paper\", \"num_hidden_layers\": 2, \"hidden_size\": 8, "
    "\"vocab_size\": 11, \"num_heads\": 2}",
};

static void variances_are_the_layers_own(void **state) {
    (void)state;
    for (size_t m = 0; m < MN_COUNTOF(models); m++) {
        pass p;
        open_pass(&p, models[m]);
        for (int l = 0; l < mn_model_describe(p.model)->n_layers; l++) {
            char name[32];
            snprintf(name, sizeof name, "layer %d mean", l);
            for (int i = 0; i < PLACES; i++) {
                const double own = p.variance[l * B * T + places[i]];
                const double got = exp(value_of(&p, i, MN_STATISTIC_VARIANCE, name));
                CHECK(fabs(got - own) < 2e-4 * own, "model %d, %s, place %d: %.7g, not %.7g",
                      (int)m, name, i, got, own);
            }
        }
        close_pass(&p);
    }
    check_done();
}

/* What holds of every posterior: the least unit is the least, and all numbers are finite. */
static void features_fit_together(void **state) {
    (void)state;
    for (size_t m = 0; m < MN_COUNTOF(models); m++) {
        pass p;
        open_pass(&p, models[m]);
        for (int i = 0; i < PLACES; i++) {
            for (int s = 0; s < MN_STATISTICS; s++) {
                const mn_statistic of = (mn_statistic)s;
                const double least = value_of(&p, i, of, "layer 0 least");
                const double mean = value_of(&p, i, of, "layer 0 mean");
                const double largest = value_of(&p, i, of, "layer 0 largest");
                CHECK(least <= mean + 1e-5 && mean <= largest + 1e-5, "model %d: %s is %g, %g, %g",
                      (int)m, mn_statistic_name(of), least, mean, largest);
                CHECK(isfinite(largest), "model %d: %s", (int)m, mn_statistic_name(of));
            }
        }
        CHECK(mn_posterior_features(p.posterior) % MN_STATISTICS == 0, "features");
        close_pass(&p);
    }
    check_done();
}

/* A head of one dimension: the covariance is a number, so that the queried direction is the only
 * one, and log |P / p0| is the log of the variance over the prior's. */
static void one_dimension_by_hand(void **state) {
    (void)state;
    pass p;
    open_pass(&p, "{\"layers\": \"bayes\", \"num_hidden_layers\": 1, \"hidden_size\": 4, "
                  "\"vocab_size\": 11, \"num_heads\": 4, \"head_dim\": 1, \"noise_groups\": 1}");
    for (int i = 0; i < PLACES; i++) {
        const double direction = value_of(&p, i, MN_STATISTIC_DIRECTION, "layer 0 head 2");
        const double logdet = value_of(&p, i, MN_STATISTIC_LOGDET, "layer 0 head 2");
        const double prior = value_of(&p, i, MN_STATISTIC_PRIOR, "layer 0 head 2");
        const double variance = value_of(&p, i, MN_STATISTIC_VARIANCE, "layer 0 head 2");
        CHECK(fabs(direction) < 1e-5, "the only direction: %g", direction);
        CHECK(fabs(logdet - prior) < 1e-4, "log-determinant %g, log of the variance %g", logdet,
              prior);
        CHECK(fabs(variance - prior - log(3.0)) < 1e-3, "a prior of %g", exp(variance - prior));
    }
    close_pass(&p);
    check_done();
}

/* What a pass of a model of one kla layer without state tells, by name. */
typedef struct heard_kla {
    mn_tape *tape;
    float v[B * T * 16], prec[B * T * 16], gate[B * T * 16], k[B * T * 3], q[B * T * 3];
    float a[16 * 3], p[16 * 3];
    int n;
} heard_kla;

static void hear_kla(void *context, int layer, const char *name, const mn_tensor *x) {
    heard_kla *t = context;
    const struct {
        const char *name;
        float *to;
    } wanted[] = { { "v", t->v }, { "prec", t->prec }, { "gate", t->gate }, { "k", t->k },
                   { "q", t->q }, { "a", t->a }, { "p", t->p } };
    for (size_t i = 0; layer == 0 && i < MN_COUNTOF(wanted); i++) {
        if (strcmp(name, wanted[i].name) != 0) continue;
        assert_int_equal(mn_tape_read(t->tape, x, wanted[i].to), MN_OK);
        t->n++;
    }
}

/* What is held over what is read of row `row` up to token `last`, by plain loops. */
static double content_of(const heard_kla *d, int row, int last) {
    double read = 0.0, held = 0.0;
    for (int c = 0; c < 16; c++) {
        double lam[3] = { 1.0, 1.0, 1.0 }, eta[3] = { 0.0 }, y = 0.0, square = 0.0, length = 0.0;
        for (int t = row * T; t <= row * T + last; t++) {
            for (int s = 0; s < 3; s++) {
                const double a = d->a[c * 3 + s], prec = d->prec[t * 16 + c], k = d->k[t * 3 + s];
                const double den = a * a + d->p[c * 3 + s] * lam[s];
                lam[s] = lam[s] / den + prec * k * k;
                eta[s] = a * eta[s] / den + prec * d->v[t * 16 + c] * k;
            }
        }
        const int at = row * T + last;
        const double gate = d->gate[at * 16 + c], open = gate / (1.0 + exp(-gate));
        for (int s = 0; s < 3; s++) {
            y += d->q[at * 3 + s] * eta[s] / lam[s];
            square += eta[s] / lam[s] * eta[s] / lam[s] / 3.0;
            length += (double)d->q[at * 3 + s] * d->q[at * 3 + s];
        }
        read += open * open * y * y;
        held += open * open * length * square;
    }
    return log(held / read);
}

static void content_by_hand(void **state) {
    (void)state;
    static heard_kla d;
    pass p;
    int32_t tokens[B * T];
    open_pass(&p, "{\"layers\": \"kla\", \"num_hidden_layers\": 1, \"hidden_size\": 8, "
                  "\"vocab_size\": 11, \"d_state\": 3}");
    model_case_tokens(tokens, B * T, V, 5);
    d.tape = p.tape;
    const mn_tap tap = { hear_kla, &d };
    const mn_model_input in = { .tokens = tokens, .B = B, .T = T, .tap = &tap };
    mn_tape_start(p.tape, MN_TAPE_FORWARD);
    mn_model_hidden(p.model, p.tape, &in);
    assert_int_equal(d.n, 7);
    for (int i = 0; i < PLACES; i++) {
        const double want = content_of(&d, places[i] / T, places[i] % T);
        const double got = value_of(&p, i, MN_STATISTIC_CONTENT, "layer 0 mean");
        CHECK(fabs(got - want) < 1e-4, "place %d: %.7g, not %.7g", i, got, want);
    }
    close_pass(&p);
    check_done();
}

/* In one dimension all that is held is read, whatever it is. */
static void one_dimension_reads_all(void **state) {
    (void)state;
    static const char *const narrow[] = {
        "{\"layers\": \"bayes\", \"num_hidden_layers\": 1, \"hidden_size\": 4, "
        "\"vocab_size\": 11, \"num_heads\": 4, \"head_dim\": 1, \"noise_groups\": 1}",
        "{\"layers\": \"kla\", \"num_hidden_layers\": 1, \"hidden_size\": 8, "
        "\"vocab_size\": 11, \"d_state\": 1}",
        "{\"layers\": \"palimpsa_code\", \"num_hidden_layers\": 1, \"hidden_size\": 4, "
        "\"vocab_size\": 11, \"num_heads\": 4, \"head_dim\": 1}",
        "{\"layers\": \"palimpsa_paper\", \"num_hidden_layers\": 1, \"hidden_size\": 4, "
        "\"vocab_size\": 11, \"num_heads\": 4, \"head_dim\": 1}",
    };
    for (size_t m = 0; m < MN_COUNTOF(narrow); m++) {
        pass p;
        open_pass(&p, narrow[m]);
        for (int i = 0; i < PLACES; i++) {
            const double content = value_of(&p, i, MN_STATISTIC_CONTENT, "layer 0 mean");
            CHECK(fabs(content) < 1e-6, "model %d, place %d: %g", (int)m, i, content);
        }
        close_pass(&p);
    }
    check_done();
}

/* A session that reads in pieces goes on from its state: it tells what tells doubt in one pass over
 * everything. */
static void sessions_go_on(void **state) {
    (void)state;
    for (size_t m = 0; m < MN_COUNTOF(models); m++) {
        pass p;
        mn_session *session;
        int32_t tokens[B * T];
        const mn_session_options how = { .belief = true, .relative = true, .prefill_chunk = 4 };
        open_pass(&p, models[m]);
        model_case_tokens(tokens, B * T, V, 5);      // row 0 is what open_pass read there
        mn_status st = mn_session_create(&session, p.context, p.model, &how);
        if (st == MN_OK) st = mn_session_feed(session, tokens, T - 1);
        if (st == MN_OK) st = mn_session_step(session, tokens[T - 1]);
        if (st != MN_OK) check_fatal("%s", mn_last_error());
        const bool is_kla = strstr(models[m], "\"kla\"") != NULL;
        const mn_statistic doubt = is_kla ? MN_STATISTIC_CONTENT : MN_STATISTIC_DIRECTION;
        for (int i = 0; i < mn_session_beliefs(session); i++) {
            const float *told;
            char name[32];
            snprintf(name, sizeof name, "layer %d mean", mn_session_belief_layer(session, i));
            assert_int_equal(mn_session_belief(&told, session, i), 1);
            const double want = exp(value_of(&p, 2, doubt, name));
            CHECK(fabs(told[0] - want) < 1e-3 * want, "model %d, %s: %.7g, not %.7g", (int)m, name,
                  told[0], want);
        }
        mn_session_destroy(session);
        close_pass(&p);
    }
    check_done();
}

static void others_have_none(void **state) {
    (void)state;
    pass p;
    open_pass(&p, "{\"layers\": \"gdn\", \"num_hidden_layers\": 1, \"hidden_size\": 8, "
                  "\"vocab_size\": 11}");
    assert_int_equal(mn_posterior_features(p.posterior), 0);
    close_pass(&p);
}

/* Entropy, confidence and wrong answers against logits. */
static void doubts_follow_from_logits(void **state) {
    (void)state;
    pass p;
    mn_doubts d = { 0 };
    int32_t tokens[B * T], targets[B * T];
    int64_t starts[B + 1] = { 0, T, 2 * T };
    int8_t kinds[B * T];
    open_pass(&p, models[0]);
    model_case_tokens(tokens, B * T, V, 5);
    for (int i = 0; i < B * T; i++) {
        targets[i] = i % 4 == 3 ? i % V : -100;
        kinds[i] = (int8_t)(i % 3);
    }
    const mn_token_batch batch = { .rows = B, .length = T, .tokens = tokens, .targets = targets,
                                   .starts = starts, .n_sequences = B };
    for (int twice = 0; twice < 2; twice++) {
        if (mn_doubts_add(&d, p.model, p.tape, p.posterior, &batch, kinds) != MN_OK) {
            check_fatal("%s", mn_last_error());
        }
    }
    assert_int_equal(d.n, 12);
    const mn_model_input in = { .tokens = tokens, .B = B, .T = T };
    mn_tape_start(p.tape, MN_TAPE_FORWARD);
    const mn_tensor *logits = mn_model_logits(p.model, p.tape,
                                              mn_model_hidden(p.model, p.tape, &in));
    for (int i = 0; i < 6; i++) {
        const float *row = (const float *)logits->data + (int64_t)(4 * i + 3) * V;
        double sum = 0.0, entropy = 0.0;
        int best = 0;
        for (int v = 0; v < V; v++) sum += exp(row[v]);
        for (int v = 0; v < V; v++) {
            entropy -= exp(row[v]) / sum * log(exp(row[v]) / sum);
            best = row[v] > row[best] ? v : best;
        }
        CHECK(fabs(d.entropy[i] - entropy) < 1e-5, "entropy %g, not %g", d.entropy[i], entropy);
        CHECK(fabs(d.confidence[i] - exp(row[best]) / sum) < 1e-5, "confidence");
        CHECK(fabs(d.chance[i] - exp(row[(4 * i + 3) % V]) / sum) < 1e-5, "chance");
        CHECK(d.wrong[i] == (best != (4 * i + 3) % V), "answer %d", i);
        CHECK(d.kind[i] == (4 * i + 3) % 3 && d.entropy[i + 6] == d.entropy[i], "place %d", i);
    }
    mn_doubts_free(&d);
    close_pass(&p);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(variances_are_the_layers_own),
        cmocka_unit_test(features_fit_together),
        cmocka_unit_test(one_dimension_by_hand),
        cmocka_unit_test(content_by_hand),
        cmocka_unit_test(one_dimension_reads_all),
        cmocka_unit_test(sessions_go_on),
        cmocka_unit_test(others_have_none),
        cmocka_unit_test(doubts_follow_from_logits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
