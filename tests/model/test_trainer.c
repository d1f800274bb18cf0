/* test_trainer.c - training runs: the same bits after resuming and at any number of threads, sums
 * of batches, evaluation, patience, links and pruning, every kind of layer learns, memory stays
 * within what was predicted, and what a checkpoint refuses. */
// labels: sanitize
#define _XOPEN_SOURCE 700       // nftw, mkdtemp
#include <dirent.h>
#include <float.h>
#include <ftw.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/rng.h"
#include "base/util.h"
#include "io/file.h"
#include "support/check.h"
#include "train/run/run_folder.h"
#include "train/trainer_internal.h"

enum { PATH = MN_RUN_PATH, MAX_STEPS = 160, MAX_SETS = 24 };

/* ---- a folder with texts --------------------------------------------------------------------- */

static char work[64];

static const char *at(const char *name) {
    static char paths[8][PATH];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, PATH, "%s/%s", work, name);
    return path;
}

static int write_text(const char *name, int lines, const char *format) {
    FILE *file = fopen(at(name), "wb");
    if (!file) return -1;
    for (int i = 0; i < lines; i++) {
        fprintf(file, "%s%s", format, i % 3 ? " " : "\n\n");
        for (int k = 0; k < i % 7; k++) fprintf(file, "%c%d", 'a' + (i * 5 + k) % 9, i % 10);
        fputs(i % 4 ? ". " : ".\n\n", file);
    }
    return fclose(file);
}

static int set_up(void **state) {
    (void)state;
    /* every checkpoint is brought to the disk: many times faster where that is memory */
    const char *memory = "/dev/shm";
    snprintf(work, sizeof work, "%s/mneme-trainer-XXXXXX", access(memory, W_OK) ? "/tmp" : memory);
    if (!mkdtemp(work)) return -1;
    FILE *file = fopen(at("letters.txt"), "wb");
    if (!file) return -1;
    for (int i = 0; i < 400; i++) {
        const char letter = (char)('a' + mn_rng_bits(1, 2, (uint64_t)i) % 8);
        for (int k = 0; k < 6; k++) fprintf(file, "%c.", letter);
        fprintf(file, "%c\n\n", letter);
    }
    if (fclose(file) != 0 || mkdir(at("out"), 0777) != 0) return -1;
    return write_text("text.txt", 120, "the text") + write_text("other.txt", 120, "the next");
}

static int remove_one(const char *path, const struct stat *about, int kind, struct FTW *ftw) {
    (void)about;
    (void)kind;
    (void)ftw;
    return remove(path);
}

static int tear_down(void **state) {
    (void)state;
    return nftw(work, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* ---- a run ----------------------------------------------------------------------------------- */

typedef struct run {
    mn_context *context;
    mn_json root;
    mn_trainer *t;
    mn_train_memory memory;
} run;

static void finish(run *r) {
    mn_trainer_destroy(r->t);
    mn_context_destroy(r->context);
    mn_json_free(&r->root);
    memset(r, 0, sizeof *r);
}

/* A small run into OUT/`out` of the assignments in `sets`, which "|" separates. */
static mn_status open_run(run *r, const char *out, const char *sets, int threads) {
    char base[2 * PATH], rest[2048];
    memset(r, 0, sizeof *r);
    snprintf(base, sizeof base, "{\"model\": {\"hidden_size\": 16, \"intermediate_size\": 16}, "
             "\"data\": {\"train\": \"%s\", \"valid_part\": 0.2}, \"train\": {\"batch\": 2, "
             "\"context\": 12, \"steps\": 6, \"warmup\": 2, \"lr\": 0.01}, \"out\": \"%s\"}",
             at("text.txt"), at(out));
    mn_status st = mn_json_parse(&r->root, base, strlen(base), "test", MN_JSON_STANDARD);
    snprintf(rest, sizeof rest, "%s", sets);
    for (char *one = strtok(rest, "|"); one && st == MN_OK; one = strtok(NULL, "|")) {
        st = mn_train_set(&r->root, one);
    }
    const mn_context_options how = { .n_threads = threads };
    if (st == MN_OK) st = mn_context_create(&r->context, &how);
    if (st == MN_OK) st = mn_trainer_create(&r->t, &r->root, r->context);
    if (st == MN_OK) st = mn_trainer_predict(r->t, &r->memory);
    return st;
}

/* What a run went through. */
typedef struct record {
    mn_step_result steps[MAX_STEPS];
    double valid[MAX_STEPS];
    int skipped;
} record;

/* Goes on to `steps`, evaluating at each second step and saving at each `every`th. */
static mn_status go_on(run *r, record *into, int64_t steps, int64_t every) {
    mn_status st = MN_OK;
    while (st == MN_OK && mn_trainer_step_number(r->t) < steps) {
        const int64_t i = mn_trainer_step_number(r->t);
        bool best = false;
        st = mn_trainer_step(r->t, &into->steps[i]);
        if (st == MN_OK && i % 2) st = mn_trainer_evaluate(r->t, &into->valid[i], &best);
        if (st == MN_OK && (i + 1) % every == 0) st = mn_trainer_save(r->t, best);
        if (st == MN_OK) into->skipped += into->steps[i].skipped;
        const size_t bytes = mn_tape_bytes(r->t->tape);
        CHECK(bytes <= r->memory.activations, "step %lld takes %zu bytes, %zu were predicted",
              (long long)i, bytes, r->memory.activations);
    }
    return st;
}

static bool same_file(const char *a, const char *b, const char *name) {
    char one[PATH], two[PATH];
    mn_file x = { 0 }, y = { 0 };
    bool same = mn_run_join(one, a, name) == MN_OK && mn_run_join(two, b, name) == MN_OK &&
                mn_file_map(&x, one) == MN_OK && mn_file_map(&y, two) == MN_OK &&
                x.size == y.size && memcmp(x.bytes, y.bytes, x.size) == 0;
    mn_file_unmap(&x);
    mn_file_unmap(&y);
    return same;
}

/* Weights, moments and progress of two runs at a step, file by file. */
static void check_same_checkpoint(const char *a, const char *b, int64_t step, const char *what) {
    static const char *const files[] = { "config.json", "model.safetensors", "tokenizer.json",
                                         "optimizer.safetensors", "progress.json", "done" };
    char one[PATH], two[PATH];
    if (mn_run_checkpoint(one, at(a), step) != MN_OK) return;
    if (mn_run_checkpoint(two, at(b), step) != MN_OK) return;
    for (size_t i = 0; i < MN_COUNTOF(files); i++) {
        CHECK(same_file(one, two, files[i]), "%s: %s differs", what, files[i]);
    }
}

static void check_same_record(const record *a, const record *b, int64_t from, int64_t to,
                              const char *what) {
    for (int64_t i = from; i < to; i++) {
        const mn_step_result *x = &a->steps[i], *y = &b->steps[i];
        CHECK(x->loss == y->loss && x->grad_norm == y->grad_norm && x->lr == y->lr &&
                  x->skipped == y->skipped && x->tokens == y->tokens && x->step == y->step,
              "%s: step %lld has loss %.17g and not %.17g", what, (long long)i, y->loss, x->loss);
        CHECK(i % 2 == 0 || a->valid[i] == b->valid[i], "%s: validation at step %lld", what,
              (long long)i);
    }
}

/* ---- the same bits --------------------------------------------------------------------------- */

#define DOCUMENTS "data.cutting=documents|data.separator=\n\n|"

static const struct {
    const char *sets;
    int64_t steps, every;
    bool skips;
} cases[] = {
    { "model.layers=attention|train.accumulate=2|train.clip=0.5", 6, 2, false },
    { "model.layers=gdn, attention|train.schedule=linear|train.accumulate=2|" DOCUMENTS, 6, 2,
      false },
    { "model.layers=gdn, kla|train.mc_samples=3|train.schedule=warmup-stable-decay|"
      "train.accumulate=2|train.decay_part=0.5", 6, 2, false },
    { "model.layers=kla|train.schedule=constant|" DOCUMENTS, 4, 1, false },
    { "model.layers=palimpsa_code|train.clip=0.1|" DOCUMENTS, 6, 3, false },
    { "model.layers=bayes|train.z_loss=0.001|train.weight_decay=0.5", 4, 2, false },
    { "model.layers=hyperglu|train.clip=0|train.groups.matrix.lr=0.5", 6, 2, false },
    { "model.layers=gla+ccq|model.mlp=gelu|" DOCUMENTS "train.accumulate=3", 4, 1, false },
    { "model.layers=linear|model.mlp=none|train.spike_skip=0.8|train.context=6|train.batch=1|"
      "train.steps=160", 150, 45, true },
};

static void resume_gives_the_same_bits(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        static record whole, part;
        char sets[1024], what[160], out[32], folder[PATH];
        run r;
        snprintf(sets, sizeof sets, "%s|train.keep_every=%lld", cases[i].sets,
                 (long long)cases[i].every);
        snprintf(out, sizeof out, "out/resume%zu", i);
        memset(&whole, 0, sizeof whole);
        mn_status st = open_run(&r, out, sets, 2);
        if (st == MN_OK) st = go_on(&r, &whole, cases[i].steps, cases[i].every);
        if (st == MN_OK) st = mn_trainer_save(r.t, false);
        finish(&r);
        CHECK(st == MN_OK, "%s: %s", sets, mn_last_error());
        CHECK(!cases[i].skips || (whole.skipped > 0 && whole.skipped < 20), "%d steps skipped",
              whole.skipped);
        for (int64_t from = cases[i].every; from < cases[i].steps; from += cases[i].every) {
            char again[64];
            snprintf(what, sizeof what, "from %lld, %.120s", (long long)from, sets);
            snprintf(again, sizeof again, "%s-%lld", out, (long long)from);
            memset(&part, 0, sizeof part);
            st = open_run(&r, again, sets, 2);
            if (st == MN_OK) st = mn_run_checkpoint(folder, at(out), from);
            if (st == MN_OK) st = mn_trainer_resume(r.t, folder);
            CHECK(st == MN_OK && mn_trainer_step_number(r.t) == from, "%s: %s", what,
                  mn_last_error());
            if (st == MN_OK) st = go_on(&r, &part, cases[i].steps, cases[i].steps);
            if (st == MN_OK) st = mn_trainer_save(r.t, false);
            CHECK(st == MN_OK, "%s: %s", what, mn_last_error());
            finish(&r);
            check_same_record(&whole, &part, from, cases[i].steps, what);
            check_same_checkpoint(out, again, cases[i].steps, what);
        }
    }
    check_done();
}

static void threads_give_the_same_bits(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        static record one, other;
        const int64_t steps = mn_min(cases[i].steps, 8);
        for (int threads = 1; threads <= 3; threads++) {
            char out[48], first[48], what[160];
            record *into = threads == 1 ? &one : &other;
            run r;
            snprintf(first, sizeof first, "out/threads%zu-1", i);
            snprintf(out, sizeof out, "out/threads%zu-%d", i, threads);
            snprintf(what, sizeof what, "%d threads, %.120s", threads, cases[i].sets);
            memset(into, 0, sizeof *into);
            mn_status st = open_run(&r, out, cases[i].sets, threads);
            if (st == MN_OK) st = go_on(&r, into, steps, steps);
            CHECK(st == MN_OK, "%s: %s", what, mn_last_error());
            finish(&r);
            check_same_record(&one, into, 0, steps, what);
            check_same_checkpoint(first, out, steps, what);
        }
    }
    check_done();
}

/* Computed again going back: the bits of what is kept, from less memory. */
static void recomputing_gives_the_same_bits(void **state) {
    (void)state;
    static const char more[] = "model.num_hidden_layers=4|";
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        static const char *const names[] = { "none", "light", "mlp", "layer" };
        static record kept, again;
        size_t bytes[4] = { 0 };
        const int64_t steps = mn_min(cases[i].steps, 8);
        char sets[1024], out[4][48], what[160];
        snprintf(what, sizeof what, "recomputed, %.120s", cases[i].sets);
        for (int how = 0; how < 4; how++) {
            record *into = how ? &again : &kept;
            run r;
            snprintf(out[how], sizeof out[how], "out/again%zu-%d", i, how);
            snprintf(sets, sizeof sets, "%s%s|train.recompute=%s", more, cases[i].sets,
                     names[how]);
            memset(into, 0, sizeof *into);
            mn_status st = open_run(&r, out[how], sets, 2);
            bytes[how] = r.memory.activations;
            if (st == MN_OK) st = go_on(&r, into, steps, steps);
            CHECK(st == MN_OK, "%s: %s", what, mn_last_error());
            finish(&r);
            check_same_record(&kept, into, 0, steps, what);
            check_same_checkpoint(out[0], out[how], steps, what);
        }
        CHECK(bytes[3] < bytes[2] && bytes[2] <= bytes[0] && bytes[1] < bytes[0],
              "%s: %zu bytes, %zu, %zu and %zu kept", what, bytes[3], bytes[2], bytes[1],
              bytes[0]);
    }
    check_done();
}

/* ---- sums ------------------------------------------------------------------------------------ */

/* Gradients of the first step, one after the other; to be freed. */
static float *first_gradients(const char *sets, int64_t *count, double *loss) {
    run r;
    mn_step_result step = { 0 };
    float *all = NULL;
    mn_status st = open_run(&r, "out/sums", sets, 1);
    if (st == MN_OK) st = mn_trainer_step(r.t, &step);
    CHECK(st == MN_OK, "%s: %s", sets, mn_last_error());
    *loss = step.loss;
    *count = st == MN_OK ? mn_model_count(r.t->model) : 0;
    all = calloc((size_t)*count + 1, sizeof *all);
    int64_t n = 0;
    for (int i = 0; all && st == MN_OK && i < mn_model_params(r.t->model); i++) {
        const mn_model_param *p = mn_model_param_at(r.t->model, i);
        memcpy(all + n, p->grad, (size_t)p->info.count * sizeof(float));
        n += p->info.count;
    }
    finish(&r);
    return all;
}

/* Batches packed from documents take places in order, so two of 2 rows are one of 4. Each gradient
 * is a sum over the 48 places, in another order: each sum is off by at most 48 roundings of terms
 * that are no larger than the norm of the gradient, and what enters a term has passed through ten
 * or so such sums. */
static void halves_make_a_whole(void **state) {
    (void)state;
    static const char *const layers[] = { "attention", "gdn", "kla", "palimpsa_code", "bayes",
                                          "hyperglu" };
    for (size_t i = 0; i < MN_COUNTOF(layers); i++) {
        char sets[512];
        double whole_loss, loss;
        int64_t n, m;
        snprintf(sets, sizeof sets, DOCUMENTS "model.layers=%s|train.batch=4", layers[i]);
        float *whole = first_gradients(sets, &n, &whole_loss);
        for (int64_t parts = 2; parts <= 4; parts += 2) {
            snprintf(sets, sizeof sets, DOCUMENTS "model.layers=%s|train.batch=%lld|"
                     "train.accumulate=%lld", layers[i], 4 / (long long)parts, (long long)parts);
            float *sum = first_gradients(sets, &m, &loss);
            double norm = 0.0, worst = 0.0;
            for (int64_t k = 0; k < n && whole && sum && m == n; k++) {
                norm += (double)whole[k] * whole[k];
                worst = fmax(worst, fabs((double)whole[k] - sum[k]));
            }
            CHECK(n == m && worst <= 48 * FLT_EPSILON * sqrt(norm) && norm > 0.0,
                  "%s in %lld parts: off by %g at norm %g", layers[i], (long long)parts, worst,
                  sqrt(norm));
            CHECK(fabs(loss - whole_loss) <= 10 * FLT_EPSILON * whole_loss,
                  "%s in %lld parts: loss %.9g and not %.9g", layers[i], (long long)parts, loss,
                  whole_loss);
            free(sum);
        }
        free(whole);
    }
    check_done();
}

/* ---- evaluation ------------------------------------------------------------------------------ */

/* -log p(target) of each of `length` tokens behind `tokens`, fed one by one through a state. */
static double direct_loss(run *r, const int32_t *tokens, int64_t length) {
    mn_model_state state;
    double sum = 0.0;
    const int64_t vocabulary = mn_model_describe(r->t->model)->vocab_size;
    CHECK(mn_model_state_create(&state, r->t->model) == MN_OK, "%s", mn_last_error());
    for (int64_t i = 0; i < length; i++) {
        const mn_model_input in = { .tokens = tokens + i, .B = 1, .T = 1, .state = &state };
        mn_tape_start(r->t->tape, MN_TAPE_FORWARD);
        mn_tensor *hidden = mn_model_hidden(r->t->model, r->t->tape, &in);
        const mn_tensor *logits = mn_model_logits(r->t->model, r->t->tape, hidden);
        if (!CHECK(logits != NULL, "%s", mn_last_error())) break;
        double total = 0.0;
        for (int64_t v = 0; v < vocabulary; v++) total += exp(((float *)logits->data)[v]);
        sum += log(total) - ((float *)logits->data)[tokens[i + 1]];
    }
    mn_model_state_free(&state);
    return sum;
}

/* Windows that follow one another over the last fifth of the tokens, the rest left out. */
static void evaluation_is_the_mean_over_the_held_out_part(void **state) {
    (void)state;
    enum { T = 12, ROWS = 2 };
    for (int64_t batches = 0; batches <= 2; batches++) {
        char sets[128];
        run r;
        record into;
        double loss = NAN;
        bool best = false;
        snprintf(sets, sizeof sets, "model.layers=gdn|train.eval_batches=%lld", (long long)batches);
        mn_status st = open_run(&r, "out/eval", sets, 1);
        if (st == MN_OK) st = go_on(&r, &into, 3, 10);
        if (st == MN_OK) st = mn_trainer_evaluate(r.t, &loss, &best);
        CHECK(st == MN_OK, "%s", mn_last_error());
        const int64_t all = st == MN_OK ? mn_trainer_tokens(r.t, true) : 0;
        int64_t windows = (all - 1) / T;
        if (batches > 0) windows = mn_min(windows, batches * ROWS);
        int32_t *tokens = calloc((size_t)all + 1, sizeof *tokens);
        if (st == MN_OK) st = mn_corpus_read(r.t->all, mn_trainer_tokens(r.t, false), all, tokens);
        CHECK(st == MN_OK && windows > 1, "%s", mn_last_error());
        double sum = 0.0;
        for (int64_t w = 0; st == MN_OK && w < windows; w++) {
            sum += direct_loss(&r, tokens + w * T, T);
        }
        /* float32 logits of about 1 through some twenty operations */
        const double want = sum / (double)(windows * T);
        CHECK(fabs(loss - want) <= 20 * FLT_EPSILON * want, "%.9g, directly %.9g", loss, want);
        free(tokens);
        finish(&r);
    }
    check_done();
}

static int checkpoints_in(const char *out) {
    char folder[PATH];
    int n = 0;
    DIR *dir = mn_run_join(folder, at(out), "checkpoints") == MN_OK ? opendir(folder) : NULL;
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        n += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    }
    if (dir) closedir(dir);
    return n;
}

/* At a learning rate of 0 nothing gets better: the first evaluation stays the best. */
static void patience_links_and_pruning(void **state) {
    (void)state;
    static const char out[] = "out/patience";
    run r;
    mn_status st = open_run(&r, out, "model.layers=gdn|train.lr=0|train.min_lr=0|train.patience=3|"
                            "train.keep_every=4|train.weight_decay=0", 1);
    for (int64_t step = 1; st == MN_OK && step <= 5; step++) {
        mn_step_result result;
        double loss;
        bool best;
        CHECK(!mn_trainer_exhausted(r.t), "out of patience before step %lld", (long long)step);
        st = mn_trainer_step(r.t, &result);
        if (st == MN_OK && step >= 2) {
            st = mn_trainer_evaluate(r.t, &loss, &best);
            CHECK(best == (step == 2), "step %lld is best or is not", (long long)step);
            if (st == MN_OK) st = mn_trainer_save(r.t, best);
        }
    }
    CHECK(st == MN_OK, "%s", mn_last_error());
    CHECK(st == MN_OK && mn_trainer_exhausted(r.t), "three evaluations without a better one");
    CHECK(mn_run_pointed(at(out), "best") == 2, "best is %lld",
          (long long)mn_run_pointed(at(out), "best"));
    CHECK(mn_run_pointed(at(out), "last") == 5, "last is %lld",
          (long long)mn_run_pointed(at(out), "last"));
    CHECK(mn_run_has(at(out), 2) && mn_run_has(at(out), 4) && mn_run_has(at(out), 5) &&
              checkpoints_in(out) == 3, "%d checkpoints", checkpoints_in(out));
    finish(&r);
    check_done();
}

/* Taken up at an earlier step, a run makes what comes behind it anew. */
static void going_back(void **state) {
    (void)state;
    static const char out[] = "out/back";
    static record into;
    char folder[PATH];
    run r;
    mn_status st = open_run(&r, out, "model.layers=gdn|train.keep_every=2", 1);
    if (st == MN_OK) st = go_on(&r, &into, 6, 2);
    finish(&r);
    CHECK(st == MN_OK && checkpoints_in(out) == 3, "%s", mn_last_error());
    if (st == MN_OK) st = open_run(&r, out, "model.layers=gdn|train.keep_every=2|train.lr=0.5", 1);
    if (st == MN_OK) st = mn_run_checkpoint(folder, at(out), 2);
    if (st == MN_OK) st = mn_trainer_resume(r.t, folder);
    CHECK(st == MN_OK, "%s", mn_last_error());
    CHECK(mn_run_pointed(at(out), "last") == 2 && checkpoints_in(out) == 1, "%d checkpoints left",
          checkpoints_in(out));
    CHECK(mn_run_pointed(at(out), "best") <= 2, "best points to a step that is gone");
    if (st == MN_OK) st = go_on(&r, &into, 4, 2);
    CHECK(st == MN_OK, "%s", mn_last_error());
    run s;
    if (st == MN_OK) st = open_run(&s, out, "model.layers=gdn", 1);
    if (st == MN_OK) st = mn_trainer_resume(s.t, NULL);
    CHECK(st == MN_OK && mn_trainer_step_number(s.t) == 4, "%s", mn_last_error());
    for (int i = 0; st == MN_OK && i < mn_model_params(s.t->model); i++) {
        const mn_model_param *p = mn_model_param_at(r.t->model, i);
        const mn_model_param *q = mn_model_param_at(s.t->model, i);
        CHECK(memcmp(p->value, q->value, (size_t)p->info.count * sizeof(float)) == 0,
              "%s is that of the abandoned run", p->name);
    }
    finish(&s);
    finish(&r);
    check_done();
}

/* ---- every kind ------------------------------------------------------------------------------ */

/* An arena takes a mebibyte at least. */
static size_t most_work(const run *r) {
    return r->memory.work > (1 << 20) ? r->memory.work : 1 << 20;
}

static double *start_values(run *r) {
    double *sums = calloc((size_t)mn_model_params(r->t->model), sizeof *sums);
    for (int i = 0; sums && i < mn_model_params(r->t->model); i++) {
        const mn_model_param *p = mn_model_param_at(r->t->model, i);
        for (int64_t k = 0; k < p->info.count; k++) {
            sums[i] += ((float *)p->value)[k] * (double)(k % 7 + 1);
        }
    }
    return sums;
}

/* Documents are "c.c.c.c", with one of eight letters: what follows a "." has been read before. A
 * layer without memory stays above log(8) / 2 = 1.04, and "none" is one. Without weight decay a
 * parameter moves only if a gradient reaches it; what bounds the gates of hgrn2 needs a layer whose
 * gates it bounds, the second. */
static void check_kind(const char *name) {
    const bool remembers = strcmp(name, "none") != 0, pair = strncmp(name, "hgrn2", 5) == 0;
    const char *sizes = "";    // where the usual ones are those of wide models
    if (strcmp(name, "mla") == 0) {
        sizes = "|model.kv_lora_rank=16|model.qk_nope_head_dim=16|model.qk_rope_head_dim=16"
                "|model.v_head_dim=32";
    }
    if (pair) sizes = "|model.expand_ratio=16";
    char layers[256];
    snprintf(layers, sizeof layers, pair ? "%s*2%s" : "%s%s", name, sizes);
    static record into;
    char sets[512];
    run r;
    snprintf(sets, sizeof sets, DOCUMENTS "model.layers=%s|model.hidden_size=32|"
             "model.mlp=none|data.train=%s|train.steps=60|train.context=12|train.batch=8|"
             "train.warmup=5|train.lr=0.02|train.weight_decay=0", layers, at("letters.txt"));
    mn_status st = open_run(&r, "out/kinds", sets, 1);
    double *before = st == MN_OK ? start_values(&r) : NULL;
    if (st == MN_OK) st = go_on(&r, &into, 60, 100);
    double *after = st == MN_OK ? start_values(&r) : NULL;
    double loss = NAN;
    bool best;
    if (st == MN_OK) st = mn_trainer_evaluate(r.t, &loss, &best);
    CHECK(st == MN_OK && (loss < 0.7) == remembers, "%s: loss %.4f after 60 steps %s", name, loss,
          st == MN_OK ? "" : mn_last_error());
    for (int i = 0; before && after && i < mn_model_params(r.t->model); i++) {
        const mn_model_param *p = mn_model_param_at(r.t->model, i);
        const bool frozen = p->info.group == MN_GROUP_FROZEN;
        CHECK((before[i] != after[i]) == !frozen, "%s: %s %s", name, p->name,
              frozen ? "moved" : "did not move");
    }
    const size_t held = mn_arena_held(r.context->arena);
    CHECK(held <= most_work(&r), "%s: %zu bytes of work space, %zu were predicted", name, held,
          r.memory.work);
    free(before);
    free(after);
    finish(&r);
}

static void every_kind_learns(void **state) {
    (void)state;
    for (int kind = 0; kind < MN_LAYER_COUNT; kind++) {
        const char *name = mn_layer_kind_name((mn_layer_kind)kind);
        char ccq[64];
        check_kind(name);
        snprintf(ccq, sizeof ccq, "%s+ccq", name);
        if (mn_layer_takes_ccq((mn_layer_kind)kind)) check_kind(ccq);
    }
    check_done();
}

/* Packed documents of any length take no more than what was predicted for one long sequence. */
static void packed_memory_is_predicted(void **state) {
    (void)state;
    static record into;
    for (int kind = 0; kind < MN_LAYER_COUNT; kind++) {
        char sets[512];
        run r;
        const char *name = mn_layer_kind_name((mn_layer_kind)kind);
        snprintf(sets, sizeof sets, DOCUMENTS "model.layers=%s|train.context=96|train.batch=3",
                 name);
        mn_status st = open_run(&r, "out/packed", sets, 1);
        if (st == MN_OK) st = go_on(&r, &into, 3, 10);
        CHECK(st == MN_OK, "%s: %s", name, mn_last_error());
        if (st == MN_OK) {
            const size_t held = mn_arena_held(r.context->arena);
            CHECK(held <= most_work(&r), "%s: %zu bytes of work space, %zu were "
                  "predicted", name, held, r.memory.work);
        }
        finish(&r);
    }
    check_done();
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void spoil(const char *path, size_t keep, bool zero) {
    mn_file file;
    if (!CHECK(mn_file_map(&file, path) == MN_OK, "%s", mn_last_error())) return;
    char *bytes = calloc(file.size + 1, 1);
    const size_t size = zero ? file.size : keep < file.size ? keep : file.size / 2;
    if (bytes && !zero) memcpy(bytes, file.bytes, size);
    mn_file_unmap(&file);
    CHECK(mn_file_write_bytes(path, bytes, size) == MN_OK, "%s", mn_last_error());
    free(bytes);
}

/* Each file of a checkpoint cut short, zeroed, missing: the file is named and nothing is taken. */
static void damage_is_found(void **state) {
    (void)state;
    static const char *const files[] = { "config.json", "model.safetensors", "tokenizer.json",
                                         "optimizer.safetensors", "progress.json", "done" };
    static record into;
    for (size_t i = 0; i < MN_COUNTOF(files); i++) {
        for (int how = 0; how < 4; how++) {
            char folder[PATH], path[PATH], out[32];
            run r;
            snprintf(out, sizeof out, "out/damage%zu-%d", i, how);
            mn_status st = open_run(&r, out, "model.layers=gdn", 1);
            if (st == MN_OK) st = go_on(&r, &into, 2, 2);
            if (st == MN_OK) st = mn_run_checkpoint(folder, at(out), 2);
            if (st == MN_OK) st = mn_run_join(path, folder, files[i]);
            CHECK(st == MN_OK, "%s", mn_last_error());
            finish(&r);
            if (how == 3) remove(path);
            else spoil(path, how == 0 ? 0 : 9, how == 2);
            st = open_run(&r, out, "model.layers=gdn", 1);
            const float first = st == MN_OK ? *(float *)mn_model_param_at(r.t->model, 0)->value : 0;
            CHECK(st == MN_OK && mn_trainer_resume(r.t, NULL) != MN_OK, "%s damaged, way %d: "
                  "resumed", files[i], how);
            const bool named = strstr(mn_last_error(), files[i]) ||
                               strstr(mn_last_error(), "no complete checkpoint");
            CHECK(named, "%s: %s", files[i], mn_last_error());
            CHECK(st == MN_OK && *(float *)mn_model_param_at(r.t->model, 0)->value == first &&
                      mn_trainer_step_number(r.t) == 0, "half of the checkpoint was taken over");
            finish(&r);
        }
    }
    check_done();
}

static void another_run_is_refused(void **state) {
    (void)state;
    static record into;
    static const struct {
        const char *sets, *says;
    } wrong[] = {
        { "model.layers=kla", "layers" },
        { "model.layers=gdn|model.num_hidden_layers=2", "num_hidden_layers" },
        { "model.layers=gdn|model.intermediate_size=24", "intermediate_size" },
        { "model.layers=gdn|model.norm_eps=0.001", "norm_eps" },
        { "model.layers=gdn|model.num_heads=2", "options of a layer" },
        { "model.layers=gdn|model.tie_word_embeddings=true", "tie_word_embeddings" },
        { "model.layers=gdn|train.seed=5", "train.seed 1337, not 5" },
        { "model.layers=gdn|data.valid_part=0.3", "other data" },
        { "model.layers=gdn|data.tokenizer=bytes", "other data" },
    };
    char folder[PATH], other[PATH + 64];
    run r;
    mn_status st = open_run(&r, "out/first", "model.layers=gdn", 1);
    if (st == MN_OK) st = go_on(&r, &into, 2, 2);
    if (st == MN_OK) st = mn_run_checkpoint(folder, at("out/first"), 2);
    CHECK(st == MN_OK, "%s", mn_last_error());
    finish(&r);
    for (size_t i = 0; i < MN_COUNTOF(wrong); i++) {
        st = open_run(&r, "out/first", wrong[i].sets, 1);
        CHECK(st == MN_OK, "%s: %s", wrong[i].sets, mn_last_error());
        CHECK(st == MN_OK && mn_trainer_resume(r.t, folder) != MN_OK, "%s: resumed",
              wrong[i].sets);
        CHECK(strstr(mn_last_error(), wrong[i].says), "%s: %s", wrong[i].sets, mn_last_error());
        finish(&r);
    }
    snprintf(other, sizeof other, "model.layers=gdn|data.train=%s", at("other.txt"));
    st = open_run(&r, "out/first", other, 1);
    CHECK(st == MN_OK && mn_trainer_resume(r.t, folder) != MN_OK, "other data: resumed");
    CHECK(strstr(mn_last_error(), "other data"), "%s", mn_last_error());
    finish(&r);
    check_done();
}

/* Losses on other validation data do not compare: the best so far is forgotten. */
static void other_validation_data(void **state) {
    (void)state;
    static record into;
    char sets[PATH + 64], folder[PATH];
    run r;
    snprintf(sets, sizeof sets, "model.layers=gdn|data.valid=%s", at("text.txt"));
    mn_status st = open_run(&r, "out/valid", sets, 1);
    if (st == MN_OK) st = go_on(&r, &into, 2, 2);
    CHECK(st == MN_OK && !isnan(mn_trainer_best(r.t)), "%s", mn_last_error());
    if (st == MN_OK) st = mn_run_checkpoint(folder, at("out/valid"), 2);
    finish(&r);
    snprintf(sets, sizeof sets, "model.layers=gdn|data.valid=%s|data.tokenizer=chars",
             at("letters.txt"));
    if (st == MN_OK) st = open_run(&r, "out/valid", sets, 1);
    if (st == MN_OK) st = mn_trainer_resume(r.t, folder);
    CHECK(st == MN_OK && isnan(mn_trainer_best(r.t)), "%s", mn_last_error());
    finish(&r);
    check_done();
}

static void wrong_settings(void **state) {
    (void)state;
    char tokens[PATH + 64], valid[PATH + 64], large[PATH + 128];
    static const uint16_t ids[200] = { 1, 2, 3, 299, 5 };
    FILE *file = fopen(at("ids.bin"), "wb");
    if (!CHECK(file && fwrite(ids, 2, 200, file) == 200 && fclose(file) == 0, "ids.bin")) return;
    snprintf(tokens, sizeof tokens, "model.layers=gdn|data.train=%s", at("ids.bin"));
    snprintf(valid, sizeof valid, "model.layers=gdn|model.vocab_size=40|data.valid=%s",
             at("ids.bin"));
    snprintf(large, sizeof large, "%s|model.vocab_size=299", tokens);
    char sampling[PATH + 128];
    snprintf(sampling, sizeof sampling, "%s|model.vocab_size=300|train.sample_every=5", tokens);
    const struct {
        const char *sets, *says[2];
    } wrong[] = {
        { "model.layers=gdn|train.stepz=5", { "stepz", "steps" } },
        { "model.layers=gdn|train.lr=fast", { "train.lr", "string" } },
        { "model.layers=gdn|train.batch=0", { "train.batch", "1" } },
        { "model.layers=gdn|train.batch=16777216|train.context=1024", { "train.batch", "2^31" } },
        { "model.layers=gdn|train.steps=9223372036854775807", { "train.steps", "" } },
        { "model.layers=gdn|train.min_lr=1", { "train.min_lr", "train.lr" } },
        { "model.layers=gdn|train.schedule=cosinus", { "train.schedule", "cosine" } },
        { "model.layers=gdn|data.cutting=rows", { "data.cutting", "documents" } },
        { "model.layers=gdn|data.format=csv", { "data.format", "jsonl" } },
        { "model.layers=gdn|data.valid_part=1", { "data.valid_part", "0.999" } },
        { "model.layers=gdn|train.context=4000", { "data.train", "smaller length" } },
        { "model.layers=gdn|data.valid_part=0.001", { "data.valid_part", "tokens" } },
        { "model.layers=gdn|train.mc_samples=2", { "mc_samples", "kla" } },
        { "model.layers=gdn|train.mc_samples=65", { "mc_samples", "64" } },
        { "model.layers=gdn|model.vocab_size=5", { "vocab_size", "5" } },
        { "model.layers=gdn|train.groups.matrix=5", { "train.groups.matrix", "" } },
        { "model.layers=gdn|train.groups.matrics.lr=5", { "matrics", "matrix" } },
        { "model.layers=gdn|data.train=[]", { "data.train", "no file" } },
        { "model.layers=gdn|train.beta1=0", { "beta1", "0" } },
        { tokens, { "vocab_size", "" } },
        { large, { "ids.bin", "299" } },
        { valid, { "", "" } },
        { sampling, { "train.sample_every", "tokenizer" } },
    };
    for (size_t i = 0; i < MN_COUNTOF(wrong); i++) {
        run r;
        const mn_status st = open_run(&r, "out/wrong", wrong[i].sets, 1);
        CHECK(st != MN_OK, "%s is taken", wrong[i].sets);
        CHECK(strstr(mn_last_error(), wrong[i].says[0]) &&
                  strstr(mn_last_error(), wrong[i].says[1]), "%s: %s", wrong[i].sets,
              mn_last_error());
        finish(&r);
    }
    check_done();
}

/* A batch with more rows than there are windows, no held-out part, and one token of context. */
static void odd_sizes(void **state) {
    (void)state;
    static const char *const sets[] = {
        "model.layers=gdn|train.batch=300", "model.layers=gdn|data.valid_part=0",
        "model.layers=gdn|train.context=1", DOCUMENTS "model.layers=attention|train.batch=100",
        "model.layers=gdn|train.eval_batches=1000000",
    };
    for (size_t i = 0; i < MN_COUNTOF(sets); i++) {
        static record into;
        run r;
        mn_status st = open_run(&r, "out/odd", sets[i], 2);
        if (st == MN_OK) st = go_on(&r, &into, 2, 2);
        CHECK(st == MN_OK, "%s: %s", sets[i], mn_last_error());
        const bool none = strstr(sets[i], "valid_part=0") != NULL;
        CHECK(isnan(into.valid[1]) == none, "%s: validation loss %g", sets[i], into.valid[1]);
        finish(&r);
    }
    check_done();
}

/* A loss that is not finite names what went wrong first, and changes nothing. */
static void not_finite(void **state) {
    (void)state;
    run r;
    mn_step_result result;
    mn_status st = open_run(&r, "out/nan", "model.layers=gdn", 1);
    if (st == MN_OK) st = mn_trainer_step(r.t, &result);
    CHECK(st == MN_OK, "%s", mn_last_error());
    mn_model_param *p = st == MN_OK ? mn_model_param_named(r.t->model, "lm_head.weight") : NULL;
    if (!CHECK(p != NULL, "no head")) check_done();
    const float before = ((float *)mn_model_param_at(r.t->model, 0)->value)[0];
    ((float *)p->value)[3] = NAN;
    st = mn_trainer_step(r.t, &result);
    CHECK(st == MN_ERR_NUMERIC && strstr(mn_last_error(), "lm_head.weight") &&
              strstr(mn_last_error(), "step 1"), "%s", mn_last_error());
    ((float *)p->value)[3] = 3e38f;
    ((float *)p->value)[4] = -3e38f;
    st = mn_trainer_step(r.t, &result);
    CHECK(st == MN_ERR_NUMERIC && strstr(mn_last_error(), "lm_head") &&
              strstr(mn_last_error(), "batch 1"), "%s", mn_last_error());
    CHECK(((float *)mn_model_param_at(r.t->model, 0)->value)[0] == before &&
              mn_trainer_step_number(r.t) == 1, "the failing step changed something");
    double loss = 0.0;
    bool best = true;
    CHECK(mn_trainer_evaluate(r.t, &loss, &best) == MN_OK && !isfinite(loss) && !best,
          "loss %g is the best so far", loss);
    finish(&r);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(resume_gives_the_same_bits),
        cmocka_unit_test(threads_give_the_same_bits),
        cmocka_unit_test(recomputing_gives_the_same_bits),
        cmocka_unit_test(halves_make_a_whole),
        cmocka_unit_test(evaluation_is_the_mean_over_the_held_out_part),
        cmocka_unit_test(patience_links_and_pruning),
        cmocka_unit_test(going_back),
        cmocka_unit_test(every_kind_learns),
        cmocka_unit_test(packed_memory_is_predicted),
        cmocka_unit_test(damage_is_found),
        cmocka_unit_test(another_run_is_refused),
        cmocka_unit_test(other_validation_data),
        cmocka_unit_test(wrong_settings),
        cmocka_unit_test(odd_sizes),
        cmocka_unit_test(not_finite),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
