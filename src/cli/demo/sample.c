/* sample.c - a story that the source begins and a model continues. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/demo/demo.h"
#include "infer/session.h"

enum { GIVEN_SENTENCES = 4, MOST_TOKENS = 120 };

/* ---- reading a story ------------------------------------------------------------------------- */

static int32_t word(const char *text) {
    return mn_stories_find(text, strlen(text));
}

/* Where each object was said to be last; 0 (the end of a story): nowhere yet. */
typedef struct places {
    int32_t *of;    // by word id
    int32_t to, in, the, where;
} places;

/* Takes note of "OBJECT in|to the PLACE" where it ends at token t. */
static void note_place(places *p, const int32_t *tokens, int64_t t) {
    if (t < 3 || tokens[t - 1] != p->the) return;
    if (tokens[t - 2] == p->in || tokens[t - 2] == p->to) p->of[tokens[t - 3]] = tokens[t];
}

/* Counts the questions "where is the OBJECT ? PLACE" whose answer the model gave, and those where
 * it is what the story says. */
static mn_status count_answers(mn_demo_sample *s) {
    places p = { calloc((size_t)mn_stories_words(), sizeof *p.of), word("to"), word("in"),
                 word("the"), word("where") };
    if (!p.of) return mn_fail(MN_ERR_MEMORY, "no memory to read a story");
    for (int64_t t = 0; t < s->n_tokens; t++) {
        const bool asked = t >= 5 && s->tokens[t - 5] == p.where && t >= s->n_given;
        note_place(&p, s->tokens, t);
        s->asked += asked;
        s->right += asked && p.of[s->tokens[t - 2]] == s->tokens[t];
    }
    free(p.of);
    return MN_OK;
}

/* ---- writing one ----------------------------------------------------------------------------- */

/* The first sentences of the first story held out that is longer than them. */
static mn_status begin(mn_demo_sample *s, const mn_stories *held) {
    const int32_t dot = word(".");
    for (int64_t i = 0; i < held->n_stories; i++) {
        int64_t n = 0, t = held->borders[i];
        for (; t < held->borders[i + 1] && n < GIVEN_SENTENCES; t++) n += held->tokens[t] == dot;
        if (n < GIVEN_SENTENCES || t + 1 >= held->borders[i + 1]) continue;
        s->n_given = t - held->borders[i];
        const int64_t room = s->n_given + MOST_TOKENS;
        s->tokens = malloc((size_t)room * sizeof *s->tokens);
        s->variance = malloc((size_t)room * sizeof *s->variance);
        if (!s->tokens || !s->variance) return mn_fail(MN_ERR_MEMORY, "no memory for a story");
        memcpy(s->tokens, held->tokens + held->borders[i], (size_t)s->n_given * sizeof *s->tokens);
        return MN_OK;
    }
    return mn_fail(MN_ERR_INTERNAL, "no story is long enough to be continued");
}

/* The posterior statistic of mn_posterior_doubt at the last token, mean over layers. */
static double variance_of(const mn_session *session) {
    const int n = mn_session_beliefs(session);
    double sum = 0.0;
    for (int i = 0; i < n; i++) {
        const float *variance;
        const int64_t count = mn_session_belief(&variance, session, i);
        if (count < 1) return NAN;
        sum += (double)variance[count - 1];
    }
    return n > 0 ? sum / n : NAN;
}

static mn_status write(mn_demo_sample *s, mn_session *session, uint64_t seed) {
    const mn_sampling how = { .temperature = 1.0, .seed = seed };
    const int64_t most = s->n_given + MOST_TOKENS;
    const int32_t end = mn_stories_first(MN_STORIES_GLUE);
    mn_status st = mn_session_step(session, end);
    for (int64_t t = 0; st == MN_OK && t < most; t++) {
        if (t >= s->n_given) {
            st = mn_session_sample_below(&s->tokens[t], session, &how, NULL, 0,
                                         mn_stories_words());
            if (st != MN_OK || s->tokens[t] == end) break;
        }
        st = mn_session_step(session, s->tokens[t]);
        s->variance[t] = variance_of(session);
        s->n_tokens = t + 1;
    }
    return st;
}

mn_status mn_demo_sample_make(mn_demo *demo) {
    mn_demo_sample *s = &demo->sample;
    mn_demo_model *m = &demo->models[0];
    for (int i = demo->n_models - 1; i >= 0; i--) {
        if (mn_model_beliefs(mn_trainer_model(demo->models[i].trainer)) > 0) m = &demo->models[i];
    }
    const mn_session_options how = { .belief = true, .relative = true };
    mn_session *session = NULL;
    *s = (mn_demo_sample){ .model = m };
    mn_status st = begin(s, &demo->data.held);
    if (st == MN_OK) {
        st = mn_session_create(&session, m->context, mn_trainer_model(m->trainer), &how);
    }
    if (st == MN_OK) st = write(s, session, (uint64_t)demo->options->seed);
    if (st == MN_OK) st = count_answers(s);
    mn_session_destroy(session);
    return st;
}

void mn_demo_sample_free(mn_demo_sample *sample) {
    free(sample->tokens);
    free(sample->variance);
    *sample = (mn_demo_sample){ 0 };
}
