/* train.c - trains the models of the demo side by side, one thread and one share of the cores
 * for each, on the same batches.
 *
 * A few steps of throw-away runs tell how many steps the time allows. All models make as many: none
 * runs far ahead, so that when the machine becomes slower all can end early at the same step. Where
 * the time suffices for the steps asked for, the numbers do not depend on it. */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/demo/demo.h"
#include "cli/progress.h"

enum { POINTS = 100, TRIAL_STEPS = 20, AHEAD = 20 };

/* What the threads share. */
typedef struct race {
    mn_demo *demo;
    bool trial;
    double started;              // seconds
    pthread_mutex_t lock;
    pthread_cond_t moved;        // a model made a step
    mn_progress bar;             // under the lock, like what follows
    int64_t steps[MN_DEMO_MODELS], last;    // that each made; no model makes more than `last`
    double loss[MN_DEMO_MODELS];
} race;

typedef struct lane {
    race *race;
    mn_demo_model *model;
    pthread_t thread;
    bool started;
} lane;

/* ---- configuration --------------------------------------------------------------------------- */

/* The same for all models. */
static const char base_config[] =
    "{\"model\": {\"hidden_size\": 64},"
    " \"data\": {\"cutting\": \"documents\"},"
    " \"train\": {\"batch\": 2, \"context\": 512, \"lr\": 0.002, \"min_lr\": 0.0002,"
    " \"warmup\": 50, \"weight_decay\": 0.01, \"tensorboard\": false}}";

/* Stories are short: narrow heads learn them sooner, and so do high frequencies of positions. */
static const struct {
    const char *layer, *option;
    int value;
} layer_options[] = {
    { "bayes", "num_heads", 4 }, { "bayes", "head_dim", 16 }, { "attention", "num_heads", 4 },
    { "attention", "head_dim", 16 }, { "attention", "rope_theta", 100 },
};

/* Whether all layers of a model are of one kind: "bayes*2". */
static bool is_all(const char *layers, const char *kind) {
    const size_t n = strlen(kind);
    return strncmp(layers, kind, n) == 0 && layers[n] == '*' && !strchr(layers, ' ');
}

/* The document of a run: the above, what the model is made of, and --set over it. */
static mn_status make_config(mn_json *root, const mn_demo *demo, const mn_demo_model *m) {
    const mn_demo_options *o = demo->options;
    mn_status st = mn_json_parse(root, base_config, sizeof base_config - 1, "the demo",
                                 MN_JSON_STANDARD);
    if (st != MN_OK) return st;
    json_t *model = json_object_get(root->value, "model");
    json_object_set_new(model, "layers", json_string(m->layers));
    for (size_t i = 0; i < MN_COUNTOF(layer_options); i++) {
        if (!is_all(m->layers, layer_options[i].layer)) continue;
        json_object_set_new(model, layer_options[i].option, json_integer(layer_options[i].value));
    }
    json_t *train = json_object_get(root->value, "train");
    json_object_set_new(train, "seed", json_integer(o->seed));
    for (int i = 0; i < o->n_sets && st == MN_OK; i++) st = mn_train_set(root, o->sets[i]);
    train = json_object_get(root->value, "train");
    if (st == MN_OK) json_object_set_new(train, "steps", json_integer(demo->steps));
    return st;
}

static mn_status make_trainer(mn_demo *demo, mn_demo_model *m) {
    const mn_train_data data = { .train = demo->data.train, .tokenizer = demo->data.tokenizer };
    mn_json root = { 0 };
    mn_trainer_destroy(m->trainer);
    m->trainer = NULL;
    mn_status st = make_config(&root, demo, m);
    if (st == MN_OK) st = mn_trainer_create_from(&m->trainer, &root, &data, m->context);
    mn_json_free(&root);
    return st;
}

/* ---- one model ------------------------------------------------------------------------------- */

/* Steps in all, of the model that made the fewest and of the one that made the most. */
static int64_t count_steps(const race *r, int64_t *fewest, int64_t *most) {
    int64_t sum = *fewest = *most = r->steps[0];
    for (int i = 1; i < r->demo->n_models; i++) {
        sum += r->steps[i];
        *fewest = mn_min(*fewest, r->steps[i]);
        *most = mn_max(*most, r->steps[i]);
    }
    return sum;
}

static void show(race *r, int64_t sum) {
    const mn_demo *demo = r->demo;
    char extra[80] = "";
    for (int i = 0; i < demo->n_models; i++) {
        const size_t n = strlen(extra);
        if (isnan(r->loss[i])) continue;
        snprintf(extra + n, sizeof extra - n, "%s%s %.3f", n > 0 ? "  " : "", demo->models[i].name,
                 r->loss[i] / log(2.0));
    }
    mn_progress_update(&r->bar, sum, extra);
}

/* Counts a step, and waits for models far behind; false when the model is to stop. */
static bool count_step(lane *l, const mn_step_result *s) {
    race *r = l->race;
    const int64_t own = l->model - r->demo->models;
    int64_t fewest, most;
    pthread_mutex_lock(&r->lock);
    r->steps[own] = s->step + 1;
    double *loss = &r->loss[own];
    *loss = isnan(*loss) ? s->loss : 0.95 * *loss + 0.05 * s->loss;
    show(r, count_steps(r, &fewest, &most));
    const bool late = mn_seconds() - r->started > 1.25 * r->demo->options->seconds;
    if (late && !r->trial) r->last = mn_min(r->last, most);
    pthread_cond_broadcast(&r->moved);
    while (count_steps(r, &fewest, &most), s->step + 1 < r->last && s->step + 1 > fewest + AHEAD) {
        pthread_cond_wait(&r->moved, &r->lock);
    }
    const bool goes_on = s->step + 1 < r->last;
    pthread_mutex_unlock(&r->lock);
    return goes_on;
}

/* A model that failed is waited for no longer, and no model needs to go on. */
static void give_up(lane *l) {
    race *r = l->race;
    pthread_mutex_lock(&r->lock);
    r->last = 0;
    pthread_cond_broadcast(&r->moved);
    pthread_mutex_unlock(&r->lock);
}

static mn_status train(lane *l) {
    mn_demo_model *m = l->model;
    const int64_t every = mn_max(l->race->demo->steps / POINTS, 1);
    double loss = 0.0;
    int64_t tokens = 0, since = 0;
    mn_step_result s;
    mn_status st;
    bool goes_on;
    m->n_points = 0;
    m->seconds = 0.0;
    do {
        const double start = mn_seconds();
        st = mn_trainer_step(m->trainer, &s);
        if (st != MN_OK) return st;
        tokens += s.tokens;
        loss += s.loss / log(2.0);
        since++;
        m->seconds += mn_seconds() - start;
        goes_on = count_step(l, &s);
        if (since < every && goes_on) continue;
        m->points[m->n_points++] = (mn_demo_point){ s.step + 1, tokens, m->seconds,
                                                    loss / (double)since };
        loss = 0.0;
        since = 0;
    } while (goes_on);
    return MN_OK;
}

static void *run_lane(void *context) {
    lane *l = context;
    mn_demo_model *m = l->model;
    m->status = train(l);
    if (m->status != MN_OK) give_up(l);
    if (m->status == MN_OK && !l->race->trial) m->status = mn_demo_measure(m, &l->race->demo->data);
    if (m->status != MN_OK) snprintf(m->error, sizeof m->error, "%s: %s", m->name, mn_last_error());
    return NULL;
}

/* ---- all of them ----------------------------------------------------------------------------- */

/* One thread for each model; waits for all. */
static mn_status run_lanes(race *r) {
    mn_demo *demo = r->demo;
    lane lanes[MN_DEMO_MODELS] = { 0 };
    mn_status st = MN_OK;
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->moved, NULL);
    r->started = mn_seconds();
    for (int i = 0; i < demo->n_models; i++) r->loss[i] = NAN;
    for (int i = 0; i < demo->n_models; i++) {
        lanes[i] = (lane){ .race = r, .model = &demo->models[i] };
        lanes[i].started = pthread_create(&lanes[i].thread, NULL, run_lane, &lanes[i]) == 0;
        if (lanes[i].started) continue;
        give_up(&lanes[i]);
        st = mn_fail(MN_ERR_MEMORY, "cannot start a thread for a model");
    }
    for (int i = 0; i < demo->n_models; i++) {
        if (lanes[i].started) pthread_join(lanes[i].thread, NULL);
    }
    pthread_cond_destroy(&r->moved);
    pthread_mutex_destroy(&r->lock);
    for (int i = 0; i < demo->n_models && st == MN_OK; i++) {
        if (demo->models[i].status != MN_OK) st = mn_fail(demo->models[i].status, "%s",
                                                          demo->models[i].error);
    }
    return st;
}

static mn_status make_trainers(mn_demo *demo) {
    mn_status st = MN_OK;
    for (int i = 0; i < demo->n_models && st == MN_OK; i++) {
        st = make_trainer(demo, &demo->models[i]);
    }
    return st;
}

/* A few steps of all at once: how many of them the seconds allow. Says so when they are fewer. */
static mn_status try_speed(mn_demo *demo) {
    race r = { .demo = demo, .trial = true, .last = mn_min(TRIAL_STEPS, demo->options->steps) };
    demo->steps = demo->options->steps;
    mn_status st = make_trainers(demo);
    if (st == MN_OK) st = run_lanes(&r);
    for (int i = 0; i < demo->n_models && st == MN_OK; i++) {
        const mn_demo_model *m = &demo->models[i];
        const mn_demo_point *last = &m->points[m->n_points - 1];
        const double step = m->seconds / (double)last->step;
        demo->steps = mn_min(demo->steps, mn_max(1, (int64_t)(demo->options->seconds / step)));
    }
    if (st == MN_OK && demo->steps < demo->options->steps) {
        fprintf(stderr, "%d seconds are enough for %" PRId64 " of %d steps here; --seconds N gives "
                "them more\n", demo->options->seconds, demo->steps, demo->options->steps);
    }
    return st;
}

static mn_status open_models(mn_demo *demo) {
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    const mn_context_options how = { .n_threads = (int)mn_max(cores / demo->n_models, 1) };
    mn_status st = MN_OK;
    for (int i = 0; i < demo->n_models && st == MN_OK; i++) {
        mn_demo_model *m = &demo->models[i];
        m->points = calloc((size_t)2 * POINTS + 2, sizeof *m->points);
        if (!m->points) return mn_fail(MN_ERR_MEMORY, "no memory for a curve");
        st = mn_context_create(&m->context, &how);
    }
    return st;
}

mn_status mn_demo_train(mn_demo *demo) {
    race r = { .demo = demo };
    mn_status st = open_models(demo);
    if (st == MN_OK) st = try_speed(demo);
    if (st == MN_OK) st = make_trainers(demo);
    if (st != MN_OK) return st;
    r.last = demo->steps;
    mn_progress_start(&r.bar, "training", "steps", 0, demo->steps * demo->n_models,
                      demo->options->quiet);
    st = run_lanes(&r);
    if (st == MN_OK) mn_progress_finish(&r.bar, NULL);
    else mn_progress_clear(&r.bar);
    if (st == MN_OK && r.last < demo->steps) {
        fprintf(stderr, "the machine became slower: ended after %" PRId64 " of %" PRId64 " steps\n",
                r.last, demo->steps);
    }
    return st;
}
