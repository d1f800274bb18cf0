/* job_alignment.c - a job that asks a checkpoint, with its own tokenizer, how far the keys of
 * needles lie off the directions in which keys vary most: align.c with the prompts of
 * needle_texts.def.
 *
 *   checkpoint   a model folder with tokenizer.json
 *   fillers (120), prompts (6), top (16)
 *   stamp        set here: size and time of the weights, so that other weights are another job */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/status.h"
#include "base/util.h"
#include "experiments/job_internal.h"
#include "experiments/looks/look.h"
#include "io/text.h"
#include "model/checkpoint.h"

enum { MOST_PROMPTS = 256, MOST_FILLERS = 100000, PATH = 4096 };

typedef struct settings {
    const char *checkpoint;
    int64_t fillers, prompts, top;
} settings;

static mn_status read_settings(settings *s, const mn_json *job) {
    static const char *const keys[] = { "kind", "checkpoint", "fillers", "prompts", "top", "stamp",
                                        "seed", "labels", "steps_at_most" };
    *s = (settings){ .fillers = 120, .prompts = 6, .top = 16 };
    mn_status st = mn_json_unknown_key(job, keys, MN_COUNTOF(keys));
    if (st == MN_OK) st = mn_json_get_text(&s->checkpoint, job, "checkpoint");
    if (st == MN_OK) st = mn_json_opt_i64(&s->fillers, job, "fillers");
    if (st == MN_OK) st = mn_json_opt_i64(&s->prompts, job, "prompts");
    if (st == MN_OK) st = mn_json_opt_i64(&s->top, job, "top");
    if (st != MN_OK) return st;
    const bool fine = s->fillers >= 2 && s->fillers <= MOST_FILLERS && s->prompts >= 1 &&
                      s->prompts <= MOST_PROMPTS && s->top >= 1;
    return fine ? MN_OK : mn_json_fail(job, "fillers are 2 to %d, prompts 1 to %d, top 1 or more",
                                       MOST_FILLERS, MOST_PROMPTS);
}

static mn_status complete(mn_json *job) {
    settings s;
    struct stat about;
    char path[PATH];
    const mn_status st = read_settings(&s, job);
    if (st != MN_OK) return st;
    snprintf(path, sizeof path, "%s/model.safetensors", s.checkpoint);
    if (stat(path, &about) != 0) {    // in several files: their index
        snprintf(path, sizeof path, "%s/model.safetensors.index.json", s.checkpoint);
    }
    if (stat(path, &about) != 0) {
        return mn_fail(MN_ERR_IO, "%s: there is no model.safetensors; give the folder of a model",
                       s.checkpoint);
    }
    json_object_del(job->value, "steps_at_most");    // nothing is trained
    return mn_spec_set(job->value, "stamp",
                       json_sprintf("%lld %lld", (long long)about.st_size,
                                    (long long)about.st_mtime));
}

static mn_status run(json_t **result, const mn_json *job, const mn_job_call *call) {
    settings s;
    const mn_context_options one = { .n_threads = 1 };
    mn_context *context = NULL;
    mn_model *model = NULL;
    mn_tokenizer *tokenizer = NULL;
    mn_needle *needles = NULL;
    (void)call;
    mn_status st = read_settings(&s, job);
    if (st == MN_OK) st = mn_context_create(&context, &one);
    if (st == MN_OK) st = mn_tokenizer_load(&tokenizer, s.checkpoint);
    if (st == MN_OK) st = mn_checkpoint_load(&model, s.checkpoint, MN_F32);
    if (st == MN_OK) {
        needles = calloc((size_t)s.prompts, sizeof *needles);
        if (!needles) st = mn_fail(MN_ERR_MEMORY, "no memory for prompts");
    }
    for (int64_t i = 0; st == MN_OK && i < s.prompts; i++) {
        st = mn_needle_prompt(&needles[i], tokenizer, i, s.fillers);
    }
    json_t *found = json_object();
    if (st == MN_OK) st = mn_align(found, context, model, needles, s.prompts, s.top);
    if (st == MN_OK) *result = json_incref(found);
    json_decref(found);
    for (int64_t i = 0; needles && i < s.prompts; i++) mn_token_list_free(&needles[i].tokens);
    free(needles);
    mn_model_destroy(model);
    mn_tokenizer_destroy(tokenizer);
    mn_context_destroy(context);
    return st;
}

const mn_job_kind mn_job_alignment = { complete, run };
