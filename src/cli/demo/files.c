/* files.c - what the demo leaves behind, in OUT:
 *
 *   NAME/{config.json, model.safetensors, tokenizer.json}, NAME/metrics.jsonl    a model each
 *   stories.txt               the stories held out
 *   loss.csv, recall.csv      what the figures show
 *   results.json              all numbers */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/demo/demo.h"
#include "cli/plot/gnuplot.h"
#include "io/file.h"
#include "io/json_write.h"
#include "model/checkpoint.h"
#include "train/run/run_log.h"

enum { PATH = 4096 };

static mn_status join(char path[PATH], const char *folder, const char *name) {
    if (snprintf(path, PATH, "%s/%s", folder, name) < PATH) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "%s/%s: the path is too long", folder, name);
}

/* ---- models ---------------------------------------------------------------------------------- */

/* As mneme train writes it, so that mneme plot draws it; losses in nats. */
static mn_status write_metrics(const mn_demo_model *m, const char *folder) {
    char path[PATH];
    mn_run_log *lines = NULL;
    mn_status st = join(path, folder, MN_RUN_METRICS);
    if (st != MN_OK) return st;
    unlink(path);    // of a demo before this one
    st = mn_run_log_open(&lines, folder, MN_RUN_NEW, false);
    for (int64_t i = 0; i < m->n_points && st == MN_OK; i++) {
        const mn_demo_point *p = &m->points[i];
        const mn_run_value values[] = { { "tokens", (double)p->tokens }, { "seconds", p->seconds },
                                        { "loss", p->loss * log(2.0) } };
        st = mn_run_log_write(lines, p->step, values, MN_COUNTOF(values));
    }
    const mn_status closed = mn_run_log_close(lines);
    return st == MN_OK ? closed : st;
}

static mn_status write_model(const mn_demo *demo, const mn_demo_model *m) {
    char folder[PATH], path[PATH];
    mn_status st = join(folder, demo->options->out, m->name);
    if (st == MN_OK) st = mn_make_folder(folder);
    if (st == MN_OK) st = mn_checkpoint_save(mn_trainer_model(m->trainer), folder);
    if (st == MN_OK) st = join(path, folder, "tokenizer.json");
    if (st == MN_OK) st = mn_tokenizer_save(demo->data.tokenizer, path);
    return st == MN_OK ? write_metrics(m, folder) : st;
}

static mn_status write_stories(const mn_demo *demo) {
    char path[PATH], *text;
    size_t size;
    const mn_stories *held = &demo->data.held;
    mn_status st = join(path, demo->options->out, "stories.txt");
    if (st != MN_OK) return st;
    st = mn_stories_text(&text, &size, held->tokens, held->n_tokens);
    if (st == MN_OK) st = mn_file_write_bytes(path, text, size);
    free(text);
    return st;
}

/* ---- tables ---------------------------------------------------------------------------------- */

static void put_loss(FILE *out, const mn_demo *demo) {
    fputs("step,tokens", out);
    for (int i = 0; i < demo->n_models; i++) fprintf(out, ",%s", demo->models[i].name);
    fputc('\n', out);
    int64_t n = demo->models[0].n_points;
    for (int i = 1; i < demo->n_models; i++) n = mn_min(n, demo->models[i].n_points);
    for (int64_t p = 0; p < n; p++) {
        const mn_demo_point *at = &demo->models[0].points[p];
        fprintf(out, "%" PRId64 ",%" PRId64, at->step, at->tokens);
        for (int i = 0; i < demo->n_models; i++) {
            fprintf(out, ",%.6f", demo->models[i].points[p].loss);
        }
        fputc('\n', out);
    }
}

static void put_recall(FILE *out, const mn_demo *demo) {
    fputs("kind,group,asked", out);
    for (int i = 0; i < demo->n_models; i++) {
        const char *name = demo->models[i].name;
        fprintf(out, ",%s,%s error,%s variance", name, name, name);
    }
    fputc('\n', out);
    for (int g = 0; g < MN_DEMO_GROUPS; g++) {
        fprintf(out, "%s,%s,%" PRId64, mn_demo_group_unit(g), mn_demo_group_name(g),
                demo->models[0].result.groups[g].asked);
        for (int i = 0; i < demo->n_models; i++) {
            const mn_demo_score *s = &demo->models[i].result.groups[g];
            fprintf(out, ",%.6f,%.6f,%.6g", mn_demo_share(s), mn_demo_share_error(s),
                    mn_demo_variance(s));
        }
        fputc('\n', out);
    }
}

static mn_status write_table(const mn_demo *demo, const char *name,
                             void (*put)(FILE *out, const mn_demo *demo)) {
    char path[PATH];
    const mn_status st = join(path, demo->options->out, name);
    if (st != MN_OK) return st;
    FILE *out = fopen(path, "w");
    if (!out) return mn_fail(MN_ERR_IO, "%s: cannot write: %s", path, strerror(errno));
    put(out, demo);
    const bool good = !ferror(out);
    if (fclose(out) == 0 && good) return MN_OK;
    return mn_fail(MN_ERR_IO, "%s: cannot write: %s", path, strerror(errno));
}

/* ---- results.json ---------------------------------------------------------------------------- */

static json_t *group_json(const mn_demo_result *r, int group) {
    const mn_demo_score *s = &r->groups[group];
    return json_pack("{s:s, s:s, s:I, s:I, s:o, s:o, s:o}", "name", mn_demo_group_name(group),
                     "unit", mn_demo_group_unit(group), "asked", (json_int_t)s->asked, "right",
                     (json_int_t)s->right, "share", mn_json_real(mn_demo_share(s)), "error",
                     mn_json_real(mn_demo_share_error(s)), "variance",
                     mn_json_real(mn_demo_variance(s)));
}

static json_t *model_json(const mn_demo_model *m) {
    const mn_demo_result *r = &m->result;
    json_t *groups = json_array(), *curve = json_array();
    for (int g = 0; g < MN_DEMO_GROUPS; g++) json_array_append_new(groups, group_json(r, g));
    for (int64_t i = 0; i < m->n_points; i++) {
        json_array_append_new(curve, json_pack("[I, I, o]", (json_int_t)m->points[i].step,
                                               (json_int_t)m->points[i].tokens,
                                               mn_json_real(m->points[i].loss)));
    }
    return json_pack("{s:s, s:s, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}",
                     "name", m->name, "layers", m->layers, "parameters",
                     (json_int_t)mn_model_count(mn_trainer_model(m->trainer)),
                     "steps", (json_int_t)m->points[m->n_points - 1].step,
                     "tokens", (json_int_t)m->points[m->n_points - 1].tokens,
                     "seconds", mn_json_real(m->seconds), "bits", mn_json_real(r->loss),
                     "bits_error", mn_json_real(r->loss_error), "floor", mn_json_real(r->floor),
                     "above_floor", mn_json_real(r->gap),
                     "above_floor_error", mn_json_real(r->gap_error), "questions", groups,
                     "curve", curve);
}

static json_t *sample_json(const mn_demo_sample *s) {
    json_t *words = json_array(), *variance = json_array();
    for (int64_t t = 0; t < s->n_tokens; t++) {
        json_array_append_new(words, json_string(mn_stories_word(s->tokens[t])));
        json_array_append_new(variance, mn_json_real(s->variance[t]));
    }
    return json_pack("{s:s, s:I, s:o, s:o, s:I, s:I}", "model", s->model->name, "given",
                     (json_int_t)s->n_given, "words", words, "variance", variance, "asked",
                     (json_int_t)s->asked, "right", (json_int_t)s->right);
}

json_t *mn_demo_results(const mn_demo *demo) {
    const mn_stories_config *c = &demo->data.source;
    json_t *models = json_array();
    for (int i = 0; i < demo->n_models; i++) {
        json_array_append_new(models, model_json(&demo->models[i]));
    }
    json_t *source = json_pack("{s:I, s:I, s:I, s:I}", "names", (json_int_t)c->n_names, "objects",
                               (json_int_t)c->n_objects, "places", (json_int_t)c->n_places,
                               "objects_at_a_time", (json_int_t)c->n_cast);
    return json_pack("{s:i, s:o, s:o, s:o, s:I, s:I, s:o, s:o, s:o}", "seed", demo->options->seed,
                     "source", source, "floor", mn_json_real(demo->data.floor), "guessing",
                     mn_json_real(mn_demo_chance(&demo->data)), "held_out_stories",
                     (json_int_t)demo->data.held.n_stories, "held_out_tokens",
                     (json_int_t)demo->data.held.n_tokens, "models", models, "sample",
                     sample_json(&demo->sample), "knowing",
                     mn_demo_knowing_json(&demo->knowing));
}

static mn_status write_results(const mn_demo *demo) {
    char path[PATH];
    mn_status st = join(path, demo->options->out, "results.json");
    if (st != MN_OK) return st;
    json_t *root = mn_demo_results(demo);
    if (!root) return mn_fail(MN_ERR_MEMORY, "%s: no memory", path);
    st = mn_json_save(path, root);
    json_decref(root);
    return st;
}

mn_status mn_demo_write(const mn_demo *demo) {
    mn_status st = MN_OK;
    for (int i = 0; i < demo->n_models && st == MN_OK; i++) {
        st = write_model(demo, &demo->models[i]);
    }
    if (st == MN_OK) st = write_stories(demo);
    if (st == MN_OK) st = write_table(demo, "loss.csv", put_loss);
    if (st == MN_OK) st = write_table(demo, "recall.csv", put_recall);
    return st == MN_OK ? write_results(demo) : st;
}
