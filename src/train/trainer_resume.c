/* trainer_resume.c - takes up a checkpoint that trainer_save.c wrote.
 *
 * Everything is checked before anything is taken over: the bytes against their seal, the data, the
 * seed and the model against those of the run. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/status.h"
#include "base/util.h"
#include "model/checkpoint.h"
#include "train/run/run_folder.h"
#include "train/trainer_internal.h"

enum { PATH = MN_RUN_PATH };

/* ---- progress -------------------------------------------------------------------------------- */

/* What progress.json says. */
typedef struct progress {
    int64_t step, tokens, best_step, worse, n_recent, seed;
    double best, recent[MN_SPIKE_WINDOW];
    uint64_t data, valid, tokenizer;
} progress;

static mn_status get_hash(uint64_t *out, const mn_json *root, const char *key) {
    const char *text;
    char *end;
    const mn_status st = mn_json_get_text(&text, root, key);
    if (st != MN_OK) return st;
    *out = strtoull(text, &end, 16);
    const mn_json at = mn_json_member(root, key);
    return *text && !*end ? MN_OK : mn_json_fail(&at, "\"%s\" is no hash", text);
}

static mn_status get_count(int64_t *out, const mn_json *root, const char *key) {
    const mn_status st = mn_json_get_i64(out, root, key);
    const mn_json at = mn_json_member(root, key);
    return st == MN_OK && *out < 0 ? mn_json_fail(&at, "must not be negative") : st;
}

static mn_status parse_progress(progress *p, const mn_json *root) {
    mn_status st = get_count(&p->step, root, "step");
    if (st == MN_OK) st = get_count(&p->tokens, root, "tokens");
    if (st == MN_OK) st = mn_json_opt_f64(&p->best, root, "best_loss");
    if (st == MN_OK) st = get_count(&p->best_step, root, "best_step");
    if (st == MN_OK) st = get_count(&p->worse, root, "worse");
    if (st == MN_OK) st = get_count(&p->n_recent, root, "n_recent");
    if (st == MN_OK) st = get_count(&p->seed, root, "seed");
    if (st == MN_OK) st = get_hash(&p->data, root, "data");
    if (st == MN_OK) st = get_hash(&p->valid, root, "valid");
    if (st == MN_OK) st = get_hash(&p->tokenizer, root, "tokenizer");
    const mn_json recent = mn_json_member(root, "recent");
    const int64_t n = mn_min(p->n_recent, MN_SPIKE_WINDOW);
    if (st == MN_OK && mn_json_count(&recent) != n) {
        st = mn_json_fail(&recent, "expected %lld losses", (long long)n);
    }
    for (int64_t i = 0; st == MN_OK && i < n; i++) {
        const mn_json item = mn_json_item(&recent, i);
        st = mn_json_read_f64(&p->recent[i], &item);
    }
    return st;
}

/* Data and seed decide what each step sees: another one would be another run. */
static mn_status same_run(const mn_trainer *t, const progress *p, const char *path) {
    if (p->data != (t->train ? mn_corpus_fingerprint(t->train) : 0)) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: the run was trained on other data, or with another "
                       "tokenizer or split; start a new run for these", path);
    }
    if (p->tokenizer != mn_trainer_tokenizer_mark(t)) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: the run has another tokenizer; give that one as "
                       "data.tokenizer, or start a new run", path);
    }
    if (p->seed == t->options.seed) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "%s: the run has train.seed %lld, not %lld; start a new run "
                   "for another seed", path, (long long)p->seed, (long long)t->options.seed);
}

static mn_status load_progress(progress *p, const mn_trainer *t, const char *folder) {
    char path[PATH];
    mn_json root = { 0 };
    *p = (progress){ .best = NAN };
    mn_status st = mn_run_join(path, folder, "progress.json");
    if (st == MN_OK) st = mn_json_load(&root, path, MN_JSON_STANDARD);
    if (st == MN_OK) st = parse_progress(p, &root);
    if (st == MN_OK) st = same_run(t, p, path);
    mn_json_free(&root);
    return st;
}

static void take_progress(mn_trainer *t, const progress *p) {
    t->step = p->step;
    t->tokens = p->tokens;
    t->n_recent = p->n_recent;
    memcpy(t->recent, p->recent, sizeof t->recent);
    /* losses on other validation data do not compare */
    const bool comparable = t->valid && p->valid == mn_corpus_fingerprint(t->valid);
    t->best = comparable ? p->best : NAN;
    t->best_step = comparable ? p->best_step : 0;
    t->worse = comparable ? p->worse : 0;
}

/* ---- the model ------------------------------------------------------------------------------- */

/* The first thing in which two models differ that shapes of weights need not show, or NULL. */
static const char *difference(const mn_model_config *a, const mn_model_config *b) {
    if (a->vocab_size != b->vocab_size) return "vocab_size";
    if (a->hidden_size != b->hidden_size) return "hidden_size";
    if (a->mlp != b->mlp) return "mlp";
    if (memcmp(&a->block, &b->block, sizeof a->block) != 0) return "a setting of its blocks";
    if (a->decoder != b->decoder) return "decoder";
    if (a->intermediate_size != b->intermediate_size) return "intermediate_size";
    if (a->tied != b->tied) return "tie_word_embeddings";
    if (a->norm_eps != b->norm_eps) return "norm_eps";
    if (a->n_layers != b->n_layers) return "num_hidden_layers";
    for (int i = 0; i < a->n_layers; i++) {
        if (strcmp(a->names[i], b->names[i]) != 0) return "layers";
        if (memcmp(&a->options[i], &b->options[i], sizeof *a->options) != 0) {
            return "the options of a layer";
        }
    }
    return a->logit_softcap != b->logit_softcap ? "logit_softcap" : NULL;
}

static mn_status same_model(const mn_trainer *t, const char *folder) {
    char path[PATH];
    mn_json root = { 0 };
    mn_model_config config = { 0 };
    mn_status st = mn_run_join(path, folder, "config.json");
    if (st == MN_OK) st = mn_json_load(&root, path, MN_JSON_PYTHON);
    if (st == MN_OK) st = mn_model_config_read(&config, &root);
    mn_json_free(&root);
    if (st != MN_OK) return st;
    const char *differs = difference(&config, mn_model_describe(t->model));
    mn_model_config_free(&config);
    if (!differs) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "%s: the run's model differs from the configuration's in %s; "
                   "start a new run for another model", path, differs);
}

static mn_status load_weights(mn_trainer *t, const char *folder) {
    mn_status st = mn_trainer_load_moments(t, folder, false);
    if (st == MN_OK) st = mn_checkpoint_read_weights(t->model, folder);
    return st == MN_OK ? mn_trainer_load_moments(t, folder, true) : st;
}

/* ---- public ---------------------------------------------------------------------------------- */

static mn_status check_bytes(const char *folder) {
    const mn_status st = mn_run_check_seal(folder, false);
    if (st == MN_OK) return st;
    char why[1024];
    snprintf(why, sizeof why, "%s", mn_last_error());
    return mn_fail(st, "%s; another checkpoint of the run, such as its best, can be given to "
                   "--resume", why);
}

/* Whether the folder is OUT's own checkpoint of this step. */
static bool is_own(const mn_trainer *t, const char *folder) {
    char path[PATH];
    struct stat a, b;
    return mn_run_checkpoint(path, t->options.out, t->step) == MN_OK && stat(path, &a) == 0 &&
           stat(folder, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

mn_status mn_trainer_begin(mn_trainer *t) {
    if (t->step > 0 || !t->options.from[0]) return MN_OK;
    return mn_checkpoint_read_weights(t->model, t->options.from);
}

mn_status mn_trainer_resume(mn_trainer *t, const char *path) {
    char folder[PATH];
    progress p;
    mn_status st = path ? (snprintf(folder, PATH, "%s", path) < PATH
                               ? MN_OK : mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", path))
                        : mn_run_join(folder, t->options.out, "last");
    if (st == MN_OK) st = check_bytes(folder);
    if (st == MN_OK) st = load_progress(&p, t, folder);
    if (st == MN_OK) st = same_model(t, folder);
    if (st == MN_OK) st = load_weights(t, folder);
    st = mn_comm_agree(t->comm, st);
    if (st == MN_OK) st = mn_comm_same(t->comm, "step of the checkpoint", (uint64_t)p.step);
    if (st != MN_OK) return st;
    take_progress(t, &p);
    if (!is_own(t, folder)) return MN_OK;
    t->saved = t->step;
    if (mn_comm_rank(t->comm) > 0) return MN_OK;
    return mn_run_go_back(t->options.out, t->step, isnan(t->best) ? INT64_MAX : t->best_step);
}
