/* abstain.c - whether a model is likely to be right about what it would say next: entropy of its
 * prediction and a statistic of its posteriors through a fitted calibrator (eval/knowing.h). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/generate/generate.h"
#include "eval/knowing.h"

enum { PATH = 4096 };

static mn_status read_calibrator(mn_calibrator *out, const mn_posterior *posterior,
                                 const mn_generate_options *o) {
    char own[PATH];
    mn_json root = { 0 };
    if (snprintf(own, sizeof own, "%s/calibration.json", o->model) >= PATH) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", o->model);
    }
    const char *path = o->calibration ? o->calibration : own;
    mn_status st = mn_json_load(&root, path, MN_JSON_STANDARD);
    if (st != MN_OK) {
        return mn_fail(st, "--abstain: %s cannot be read; make it with mneme eval --model %s "
                       "--calibration --text FILE --save-calibration %s", path, o->model, path);
    }
    st = mn_calibrator_read(out, posterior, &root);
    mn_json_free(&root);
    return st;
}

/* A pass over all that was read and written, as one sequence that asks at its end. */
static mn_status ask(mn_doubts *d, mn_generator *g, mn_tape *tape, mn_posterior *posterior) {
    const int64_t T = g->seen.count;
    int64_t starts[2] = { 0, T };
    int32_t *targets = malloc((size_t)(T + 1) * sizeof *targets);
    if (!targets) return mn_fail(MN_ERR_MEMORY, "no memory to ask about %lld tokens", (long long)T);
    for (int64_t t = 0; t < T; t++) targets[t] = t + 1 == T ? 0 : -100;    // any token will do
    const mn_token_batch batch = { .rows = 1, .length = T, .tokens = g->seen.ids,
                                   .targets = targets, .starts = starts, .n_sequences = 1 };
    const mn_status st = mn_doubts_add(d, g->model, tape, posterior, &batch, NULL);
    free(targets);
    return st;
}

mn_status mn_generator_confidence(double *out, mn_generator *g) {
    mn_posterior *posterior = NULL;
    mn_tape *tape = NULL;
    mn_doubts d = { 0 };
    mn_calibrator calibrator;
    mn_status st = mn_posterior_create(&posterior, g->model);
    if (st == MN_OK) st = read_calibrator(&calibrator, posterior, g->options);
    if (st == MN_OK && g->seen.count == 0) {
        st = mn_fail(MN_ERR_ARGUMENT, "--abstain: nothing was asked; give a prompt");
    }
    if (st == MN_OK) st = mn_tape_create(&tape, g->context, mn_model_pass_dtype(g->model));
    if (st == MN_OK) st = ask(&d, g, tape, posterior);
    if (st == MN_OK) *out = 1.0 - mn_calibrator_doubt(&calibrator, d.entropy[0], d.value);
    mn_doubts_free(&d);
    mn_tape_destroy(tape);
    mn_posterior_destroy(posterior);
    return st;
}
