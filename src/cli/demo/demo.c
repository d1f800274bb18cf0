/* demo.c - mneme demo: two small models learn to remember, and are asked. */
#include <ctype.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/command.h"
#include "cli/demo/demo.h"
#include "cli/plot/gnuplot.h"
#include "cli/options.h"
#include "io/json_write.h"

enum { STEPS = 2500, SECONDS = 120, MOST = 10000000 };

static void print_help(void) {
    printf("usage: mneme demo [options]\n\n"
           "Trains small models side by side on stories about where things are, and asks them: a\n"
           "layer that keeps a belief (bayes) and softmax attention. Shows their loss against the\n"
           "exact entropy of the stories, the answers they give by distance and by number of\n"
           "updates, and a story as the first of them goes on with it.\n\n"
           "  --out DIR       models, figures, results.json (default runs/demo)\n"
           "  --layers A,B    models, %d at most (default bayes,attention); * and / make several\n"
           "                  layers, as in gdn*3,bayes/attention; a single name counts twice\n"
           "  --steps N       of training (default %d)\n"
           "  --seconds N     train for so long at most, with fewer steps on slow machines\n"
           "                  (default %d); the steps made are the same for all models\n"
           "  --seed S        of stories, initial values and batches (default 1)\n"
           "  --set K=V       change a value of the configuration of all models, such as\n"
           "                  --set train.lr=0.01; see mneme train --help\n"
           "  --json          results.json on standard output instead of tables\n"
           "  --quiet         no progress\n", MN_DEMO_MODELS, STEPS, SECONDS);
}

static int parse(mn_demo_options *o, int argc, char **argv) {
    const mn_option rows[] = {
        { "--out", .text = &o->out },
        { "--layers", .text = &o->layers },
        { "--steps", .count = &o->steps, .low = 1, .high = MOST },
        { "--seconds", .count = &o->seconds, .low = 1, .high = MOST },
        { "--seed", .count = &o->seed, .low = 0, .high = MOST },
        { "--set", .list = o->sets, .n = &o->n_sets, .most = MN_DEMO_SETS },
        { "--json", .flag = &o->json },
        { "--quiet", .flag = &o->quiet },
    };
    return mn_options_read(rows, MN_COUNTOF(rows), "demo", argc, argv);
}

/* ---- models ---------------------------------------------------------------------------------- */

/* "gdn*3" as it is, "gdn/attention" as "gdn, attention", "gdn" as "gdn*2". */
static mn_status add_model(mn_demo *demo, const char *text, size_t size) {
    if (demo->n_models == MN_DEMO_MODELS) {
        return mn_fail(MN_ERR_ARGUMENT, "--layers names more than %d models", MN_DEMO_MODELS);
    }
    if (size == 0 || size > MN_DEMO_NAME / 2) {
        return mn_fail(MN_ERR_ARGUMENT, "--layers %s: write models between commas, such as "
                       "bayes,attention", demo->options->layers);
    }
    mn_demo_model *m = &demo->models[demo->n_models];
    size_t layers = 0, name = 0;
    bool single = true;
    for (size_t i = 0; i < size; i++) {
        const bool plain = isalnum((unsigned char)text[i]) || strchr("_+", text[i]);
        if (text[i] != '/') m->layers[layers++] = text[i];
        else layers += (size_t)snprintf(m->layers + layers, 3, ", ");
        m->name[name++] = plain ? text[i] : '-';
        single = single && plain;
    }
    if (single) snprintf(m->layers + layers, 3, "*2");
    for (int i = 0; i < demo->n_models; i++) {
        if (strcmp(demo->models[i].name, m->name) == 0) {
            return mn_fail(MN_ERR_ARGUMENT, "--layers names %s twice", m->name);
        }
    }
    demo->n_models++;
    return MN_OK;
}

static mn_status add_models(mn_demo *demo) {
    mn_status st = MN_OK;
    const char *at = demo->options->layers;
    for (bool more = true; more && st == MN_OK;) {
        const size_t n = strcspn(at, ",");
        st = add_model(demo, at, n);
        more = at[n] == ',';
        at += n + more;
    }
    return st;
}

/* ---- the demo -------------------------------------------------------------------------------- */

/* Without gnuplot there are no figures, and a sentence says so. */
static mn_status draw(mn_demo *demo) {
    const mn_status st = mn_demo_draw(demo);
    demo->figures = st == MN_OK;
    if (st != MN_ERR_UNSUPPORTED) return st;
    fprintf(stderr, "no figures: %s\n", mn_last_error());
    return MN_OK;
}

static mn_status print_json(const mn_demo *demo) {
    char *text = NULL;
    json_t *root = mn_demo_results(demo);
    if (!root) return mn_fail(MN_ERR_MEMORY, "no memory for the results");
    const mn_status st = mn_json_text(&text, root, MN_JSON_PRETTY);
    if (st == MN_OK) puts(text);
    free(text);
    json_decref(root);
    return st;
}

static mn_status execute(mn_demo *demo) {
    const mn_demo_options *o = demo->options;
    mn_status st = add_models(demo);
    if (st == MN_OK) st = mn_make_folder(o->out);
    if (st == MN_OK) st = mn_demo_data_make(&demo->data, (uint64_t)o->seed);
    if (st == MN_OK && !o->json) st = mn_demo_introduce(demo);
    if (st == MN_OK) st = mn_demo_train(demo);
    if (st == MN_OK) st = mn_demo_sample_make(demo);
    if (st == MN_OK) st = mn_demo_knowing_make(demo);
    if (st == MN_OK) st = mn_demo_write(demo);
    if (st == MN_OK) st = draw(demo);
    if (st != MN_OK) return st;
    return o->json ? print_json(demo) : mn_demo_print(demo);
}

int mn_command_demo(int argc, char **argv) {
    mn_demo_options o = { .out = "runs/demo", .layers = "bayes,attention", .steps = STEPS,
                          .seconds = SECONDS, .seed = 1 };
    const int mistake = parse(&o, argc, argv);
    if (mistake < 0) print_help();
    if (mistake != 0) return mistake < 0 ? 0 : mistake;
    mn_demo *demo = calloc(1, sizeof *demo);
    mn_status st = demo ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory");
    if (demo) demo->options = &o;
    if (st == MN_OK) st = execute(demo);
    if (st != MN_OK) fprintf(stderr, "mneme demo: %s\n", mn_last_error());
    for (int i = 0; demo && i < MN_DEMO_MODELS; i++) {
        mn_trainer_destroy(demo->models[i].trainer);
        mn_context_destroy(demo->models[i].context);
        free(demo->models[i].points);
    }
    if (demo) mn_demo_sample_free(&demo->sample);
    if (demo) mn_demo_data_free(&demo->data);
    free(demo);
    return st == MN_OK ? 0 : 1;
}
