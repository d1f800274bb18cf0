/* train.c - mneme train: from a configuration and text to a model that writes text. */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/command.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "cli/ranks.h"
#include "cli/bench/sgemm.h"
#include "cli/train/settings.h"
#include "data/hash.h"
#include "io/json_write.h"
#include "ops/context.h"
#include "train/cost.h"
#include "train/run/run_folder.h"
#include "train/run/run_log.h"
#include "train/run/run_read.h"
#include "train/trainer.h"

enum { PATH = MN_TRAIN_PATH, LAST_STEPS = 10 };

typedef struct options {
    mn_train_request request;
    const char *device, *transport;
    int threads, ranks;
    double rate, bandwidth, latency;  // of the cost model: 0: measured or usual
    bool overwrite, quiet, json, dry;
} options;

static void print_option(void *context, const char *key, const char *value, const char *about) {
    (void)context;
    printf("  %-27s %-10s %s\n", key, value[0] ? value : "\"\"", about);
}

static void print_help(void) {
    puts("usage: mneme train TEXT... [options]\n"
         "       mneme train CONFIG.json [--set key=value]... [options]\n"
         "       mneme train --resume RUN [--steps N] [--set key=value]...\n\n"
         "Trains a model on text and writes it to a folder: checkpoints last and best (model "
         "folders\n"
         "that generate and eval read), metrics.jsonl, event files for TensorBoard. Of a TEXT, a "
         "folder\n"
         "of texts or files of tokens, layers, size and settings are chosen where nothing says "
         "them, and\n"
         "said. Stopped by Ctrl-C or killed, a run goes on with --resume, bit for bit as if it had "
         "not\nstopped.\n\n"
         "  --layers L       layers of the model (default gdn): a name of mneme info, or a list "
         "such as\n"
         "                   \"attention*3, kla\"\n"
         "  --size N         parameters without embeddings: 1m, 10m, 50m, 1.5b (default: by text "
         "and machine)\n"
         "  --steps N        optimiser steps of the whole run\n"
         "  --lr X           peak learning rate\n"
         "  --batch N        rows of a batch\n"
         "  --context N      tokens of a row\n"
         "  --tokenizer T    bytes, chars, or a tokenizer.json or its folder\n"
         "  --valid PATH     text to measure on (default: the last tenth of the text)\n"
         "  --seed N         of initial values, batches and samples\n"
         "  --from DIR       begin with the weights and the tokenizer of a model or run\n"
         "  --out DIR        folder of the run (default: runs/NAME of the text)\n"
         "  --set K=V        change one value, such as --set train.warmup=50; may be repeated\n"
         "  --resume RUN     go on with a run's folder, or with one checkpoint of it\n"
         "  --overwrite      begin anew in a folder that holds a run\n"
         "  --device D       cpu (default), cuda or cuda:N: where steps are computed\n"
         "  --dtype T        f32, or bf16 on a GPU; the same as --set train.dtype=T\n"
         "  --threads N      threads (default: one per core)\n"
         "  --ranks N        processes on this machine that share each step, with the bits of one; "
         "with\n"
         "                   --device cuda a GPU each; mpirun, srun and torchrun --no-python start "
         "them on\n"
         "                   several machines\n"
         "  --transport T    how ranks talk: auto (default), tcp or mpi\n"
         "  --dry-run        say what would be trained and how much memory it takes, and stop\n"
         "  --rate X         TFLOP/s of a rank, for --dry-run with --ranks (default: half of sgemm "
         "here;\n"
         "                   GPU: 400)\n"
         "  --bandwidth X    GB/s a rank sends, for the same (default 1; GPU: 260)\n"
         "  --latency X      microseconds of a message, for the same (default 50; GPU: 30)\n"
         "  --quiet          no progress\n"
         "  --json           the result as one document\n\n"
         "  mneme train book.txt\n"
         "  mneme train book.txt --layers kla --size 10m --steps 5000\n"
         "  mneme train letters.txt --from runs/book\n"
         "  mneme train --resume runs/book --steps 8000\n\n"
         "model.layers, model.hidden_size .. are the keys of a model's config.json (mneme info "
         "lists the\n"
         "layers). The rest of --set and CONFIG.json, with defaults where no TEXT is given:\n");
    mn_train_options_list(print_option, NULL);
    puts("  data.train, data.valid                 files and folders\n"
         "  train.groups.NAME.lr, .decays          NAME: matrix, vector, state, embed, head\n"
         "  out                                    folder of the run (default: runs/LAYERS)");
}

static bool read_positive(void *to, const char *value) {
    char *end;
    *(double *)to = strtod(value, &end);
    return end != value && !*end && *(double *)to > 0.0 && isfinite(*(double *)to);
}

/* An option that is a setting by a shorter name. */
typedef struct shortcut {
    const char *name, *key;
    enum { NUMBER, WHOLE, TEXT_VALUE } kind;
} shortcut;

static const shortcut shortcuts[] = {
    { "--layers", "model.layers", TEXT_VALUE },    { "--steps", "train.steps", WHOLE },
    { "--lr", "train.lr", NUMBER },                { "--batch", "train.batch", WHOLE },
    { "--context", "train.context", WHOLE },       { "--out", "out", TEXT_VALUE },
    { "--tokenizer", "data.tokenizer", TEXT_VALUE }, { "--valid", "data.valid", TEXT_VALUE },
    { "--seed", "train.seed", WHOLE },             { "--dtype", "train.dtype", TEXT_VALUE },
};

typedef struct shortcut_value {
    options *o;
    const shortcut *which;
    char *set;               // "key=value", to be freed
} shortcut_value;

/* Texts are quoted, so that a folder called 5 stays one. */
static bool read_shortcut(void *to, const char *value) {
    shortcut_value *at = to;
    char *end;
    const double number = strtod(value, &end);
    const bool is_number = end != value && !*end && isfinite(number) && number >= 0.0;
    if (at->which->kind != TEXT_VALUE && !is_number) return false;
    if (at->which->kind == WHOLE && number != floor(number)) return false;
    json_t *quoted = at->which->kind == TEXT_VALUE ? json_string(value) : NULL;
    char *text = quoted ? json_dumps(quoted, JSON_ENCODE_ANY) : strdup(value);
    json_decref(quoted);
    const size_t size = text ? strlen(at->which->key) + strlen(text) + 2 : 0;
    free(at->set);
    at->set = text ? malloc(size) : NULL;
    if (at->set) snprintf(at->set, size, "%s=%s", at->which->key, text);
    free(text);
    return at->set != NULL;
}

static int check(const options *o) {
    const mn_train_request *r = &o->request;
    const bool config = mn_train_has_config(r);
    if (r->resume && r->n_inputs > 0) {
        return mn_options_mistake("train", r->inputs[0], "and --resume: a run has its own");
    }
    if (r->resume && o->overwrite) {
        return mn_options_mistake("train", "--overwrite", "and --resume: one of them");
    }
    if (r->resume && (r->from || r->choice.size > 0.0)) {
        return mn_options_mistake("train", r->from ? "--from" : "--size",
                                  "and --resume: a run has its model");
    }
    if (r->from && r->choice.size > 0.0) {
        return mn_options_mistake("train", "--size", "and --from: that model has its size");
    }
    if (config && r->n_inputs > 1) {
        return mn_options_mistake("train", r->inputs[1], "is one argument too many: texts go into "
                                  "data.train of the configuration");
    }
    return 0;
}

static int parse(options *o, shortcut_value values[], int argc, char **argv) {
    mn_train_request *r = &o->request;
    const mn_option fixed[] = {
        { "--size", .read = mn_choice_size, .to = &r->choice.size,
          .needs = "a number of parameters such as 300k, 10m or 1.5b" },
        { "--from", .text = &r->from },
        { "--set", .list = r->sets, .n = &r->n_sets,
          .most = MN_TRAIN_SETS - (int)MN_COUNTOF(shortcuts) },
        { "--resume", .text = &r->resume },
        { "--threads", .count = &o->threads, .low = 1, .high = 4096 },
        { "--device", .text = &o->device },
        { "--ranks", .count = &o->ranks, .low = 1, .high = MN_RANKS_MOST },
        { "--transport", .text = &o->transport },
        { "--rate", .read = read_positive, .to = &o->rate, .needs = "a positive number" },
        { "--bandwidth", .read = read_positive, .to = &o->bandwidth, .needs = "a positive number" },
        { "--latency", .read = read_positive, .to = &o->latency, .needs = "a positive number" },
        { "--overwrite", .flag = &o->overwrite },
        { "--dry-run", .flag = &o->dry },
        { "--quiet", .flag = &o->quiet },
        { "--json", .flag = &o->json },
        { NULL, .list = r->inputs, .n = &r->n_inputs, .most = MN_TRAIN_PATHS },
    };
    mn_option rows[MN_COUNTOF(fixed) + MN_COUNTOF(shortcuts)];
    static const char *const needs[] = { "a number", "a whole number", "valid UTF-8" };
    for (size_t i = 0; i < MN_COUNTOF(shortcuts); i++) {
        values[i] = (shortcut_value){ o, &shortcuts[i], NULL };
        rows[i] = (mn_option){ shortcuts[i].name, .read = read_shortcut, .to = &values[i],
                               .needs = needs[shortcuts[i].kind] };
    }
    memcpy(rows + MN_COUNTOF(shortcuts), fixed, sizeof fixed);
    const int status = mn_options_read(rows, MN_COUNTOF(rows), "train", argc, argv);
    if (status != 0) return status;
    for (size_t i = 0; i < MN_COUNTOF(shortcuts); i++) {
        if (values[i].set) r->sets[r->n_sets++] = values[i].set;
    }
    return check(o);
}

/* ---- the run --------------------------------------------------------------------------------- */

typedef struct run {
    const options *o;
    mn_cli_ranks *ranks;
    bool first;                  // rank 0, which writes and speaks for all
    mn_trainer *trainer;
    mn_run_log *log;
    int threads;
    int lock;                    // descriptor of the locked folder; -1: none
    int64_t from;                // steps done when this process began
    mn_progress bar;
    mn_train_memory memory;
    mn_device *device;           // NULL: the CPU
    double program;              // mebibytes it had before anything was read; 0 on a GPU
    double ceiling;              // operations a second of sgemm here; 0 where nobody is told
    double flops;                // of a step of training, per token
    double started, last_time;   // seconds
    double before;               // seconds of training in earlier processes
    int64_t tokens, last_tokens; // of this process; at the last line of the log
    bool stopped;                // some rank was asked to, with steps left
    double rate, loss, valid;    // tokens a second, loss of the last steps, of held-out data
    double losses[LAST_STEPS];   // of single steps
    int64_t n_losses;
} run;

static volatile sig_atomic_t stop_asked;

static void ask_stop(int signal) {
    (void)signal;
    stop_asked = 1;
}

static double mebibytes(size_t bytes) {
    return (double)bytes / 1048576.0;
}

/* The most this process has had in memory; or on the GPU, where what was taken is kept. */
static double peak_mebibytes(const mn_device *device) {
    struct rusage use;
    size_t bytes = 0;
    if (device) {
        mn_device_used(device, &bytes);
        return mebibytes(bytes);
    }
    getrusage(RUSAGE_SELF, &use);
    return (double)use.ru_maxrss / 1024.0;
}

/* How long the steps that are left will take, at the share of sgemm that training reaches. */
static void put_time_left(char text[64], const run *r) {
    const mn_train_options *o = mn_trainer_options(r->trainer);
    const double steps = (double)(o->steps - mn_trainer_step_number(r->trainer));
    const double tokens = steps * (double)(o->batch * o->accumulate * o->context);
    const double minutes = tokens * r->flops / (0.6 * r->o->request.choice.flops) / 60.0;
    text[0] = '\0';
    if (r->device || !(minutes > 0.0) || !isfinite(minutes)) return;
    if (minutes < 1.5) snprintf(text, 64, ", about a minute");
    else if (minutes < 90.0) snprintf(text, 64, ", about %.0f minutes", minutes);
    else snprintf(text, 64, ", about %.1f hours", minutes / 60.0);
}

static void introduce(run *r) {
    const mn_train_options *o = mn_trainer_options(r->trainer);
    const mn_model *model = mn_trainer_model(r->trainer);
    char layers[512], left[64];
    put_time_left(left, r);
    fputs(r->o->request.choice.said, stderr);
    mn_layers_describe(layers, sizeof layers, mn_model_describe(model));
    fprintf(stderr, "model      %d x %s, width %" PRId64 ", vocabulary %" PRId64 ": %" PRId64
            " parameters (%" PRId64 " without embeddings)\n", mn_model_describe(model)->n_layers,
            layers, mn_model_describe(model)->hidden_size, mn_model_describe(model)->vocab_size,
            mn_model_count(model), mn_model_count_without_embeddings(model));
    fprintf(stderr, "data       %" PRId64 " tokens to train on, %" PRId64 " held out, %s\n",
            mn_trainer_tokens(r->trainer, false), mn_trainer_tokens(r->trainer, true),
            mn_trainer_tokenizer(r->trainer) ? mn_tokenizer_kind(mn_trainer_tokenizer(r->trainer))
                                             : "no tokenizer");
    fprintf(stderr, "run        %" PRId64 " steps of %" PRId64 " x %" PRId64 " tokens%s, to %s\n",
            o->steps, o->batch * o->accumulate, o->context, left, o->out);
    if (r->ranks->comm) {
        fprintf(stderr, "ranks      %d over %s%s, %s shared out\n", r->ranks->world,
                mn_transport_name(mn_comm_transport(r->ranks->comm)),
                r->device ? " and NCCL" : "",
                strcmp(o->shard, "parameters") == 0  ? "optimiser states, gradients and parameters"
                : strcmp(o->shard, "gradients") == 0 ? "optimiser states and gradients"
                                                     : "optimiser states");
    }
    if (r->device) {
        const mn_device_info *gpu = mn_device_facts(r->device);
        fprintf(stderr, "device     %s, passes in %s\n", gpu->name, o->dtype);
        fprintf(stderr, "memory     %.0f MiB of %.0f predicted: %.0f parameters and optimiser, "
                "%.0f step, %.0f work space\n", mebibytes(r->memory.total), mebibytes(gpu->bytes),
                mebibytes(r->memory.parameters), mebibytes(r->memory.activations),
                mebibytes(r->memory.work));
        return;
    }
    fprintf(stderr, "memory     %.0f MiB predicted: %.0f parameters and optimiser, %.0f step, %.0f "
            "work space, %.0f data, %.0f program\n", mebibytes(r->memory.total) + r->program,
            mebibytes(r->memory.parameters), mebibytes(r->memory.activations),
            mebibytes(r->memory.work), mebibytes(r->memory.data), r->program);
}

enum { EXTRA = 80 };

/* "loss 1.2345 valid 1.3456" */
static void put_losses(char extra[EXTRA], const run *r) {
    char valid[24] = "";
    if (!isnan(r->valid)) snprintf(valid, sizeof valid, " valid %.4f", r->valid);
    snprintf(extra, EXTRA, "loss %.4f%s", r->loss, valid);
}

static void show(run *r, int64_t done) {
    char extra[EXTRA];
    put_losses(extra, r);
    const size_t n = strlen(extra);
    if (isnan(r->rate)) {    // before the first line of the log
        mn_progress_update(&r->bar, done, extra);
        return;
    }
    if (r->device) {
        snprintf(extra + n, EXTRA - n, " %.0f tokens/s %.1f TFLOP/s", r->rate,
                 r->rate * r->flops * 1e-12);
    } else {
        snprintf(extra + n, EXTRA - n, " %.0f tokens/s %.0f%% of sgemm", r->rate,
                 100.0 * r->rate * r->flops / r->ceiling);
    }
    mn_progress_update(&r->bar, done, extra);
}

static mn_status log_step(run *r, const mn_step_result *s) {
    const double now = mn_seconds();
    r->rate = (double)(r->tokens - r->last_tokens) / fmax(now - r->last_time, 1e-9);
    r->last_time = now;
    r->last_tokens = r->tokens;
    const mn_run_value values[] = {
        { "tokens", (double)mn_trainer_seen(r->trainer) },
        { "seconds", r->before + now - r->started },
        { "loss", s->loss }, { "lr", s->lr }, { "grad_norm", s->grad_norm },
        { "tokens_per_second", r->rate }, { "skipped", s->skipped },
        /* of several ranks */
        { "compute_seconds", s->compute }, { "communicate_seconds", s->communicate },
        { "wait_seconds", s->wait }, { "slowest_rank", s->slowest },
    };
    if (!r->first) return MN_OK;
    const int n = MN_COUNTOF(values);
    return mn_run_log_write(r->log, s->step + 1, values, r->ranks->world > 1 ? n : n - 4);
}

static mn_status evaluate_and_save(run *r, bool evaluate, bool save) {
    double loss = NAN;
    bool best = false;
    mn_status st = evaluate ? mn_trainer_evaluate(r->trainer, &loss, &best) : MN_OK;
    if (st == MN_OK && evaluate && mn_trainer_tokens(r->trainer, true) > 0) {
        r->valid = loss;
        const mn_run_value value = { "valid_loss", loss };
        if (r->first) st = mn_run_log_write(r->log, mn_trainer_step_number(r->trainer), &value, 1);
    }
    if (st == MN_OK && (save || best)) st = mn_trainer_save(r->trainer, best);
    /* time spent here is no time of training */
    r->last_time = mn_seconds();
    r->last_tokens = r->tokens;
    return st;
}

static mn_status print_sample(run *r) {
    char *text;
    mn_status st = mn_trainer_whole(r->trainer);
    if (st != MN_OK || !r->first) return st;
    st = mn_trainer_sample(r->trainer, &text);
    if (st != MN_OK) return st;
    mn_progress_clear(&r->bar);
    fprintf(stderr, "---- step %" PRId64 "\n%s\n----\n", mn_trainer_step_number(r->trainer), text);
    free(text);
    return MN_OK;
}

static bool every(int64_t step, int64_t n) {
    return n > 0 && step % n == 0;
}

/* A GPU whose memory is full still has the parameters of the last step: they are saved, so that the
 * run can go on with a smaller batch or on another device. One that fails has nothing that could be
 * trusted. */
static mn_status keep_going_possible(run *r, mn_status failure) {
    const char *out = mn_trainer_options(r->trainer)->out;
    char why[1024];
    snprintf(why, sizeof why, "%s", mn_last_error());
    const bool alone = r->ranks->world == 1;    // others have not failed
    if (failure != MN_ERR_MEMORY || !alone || mn_trainer_save(r->trainer, false) != MN_OK) {
        const int64_t last = mn_run_latest(out);
        if (last < 0) return mn_fail(failure, "%s. There is no checkpoint yet", why);
        return mn_fail(failure, "%s. The checkpoint of step %" PRId64 " is as it was: --resume %s "
                       "goes on from there", why, last, out);
    }
    return mn_fail(failure, "%s. Step %" PRId64 " is saved: go on with --resume and a smaller "
                   "train.batch, train.recompute=layer or another --device", why,
                   mn_trainer_step_number(r->trainer));
}

/* The loss that is shown is the mean of the last steps. */
static void hear_loss(run *r, double loss) {
    r->losses[r->n_losses++ % LAST_STEPS] = loss;
    const int64_t n = mn_min(r->n_losses, LAST_STEPS);
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += r->losses[i];
    r->loss = sum / (double)n;
}

static mn_status train(run *r) {
    const mn_train_options *o = mn_trainer_options(r->trainer);
    mn_status st = MN_OK;
    while (st == MN_OK && mn_trainer_step_number(r->trainer) < o->steps && !r->stopped &&
           !mn_trainer_exhausted(r->trainer)) {
        mn_step_result s;
        if (stop_asked) mn_trainer_ask_stop(r->trainer);
        st = mn_trainer_step(r->trainer, &s);
        if (st != MN_OK) break;
        r->stopped = s.stop || (stop_asked && r->ranks->world == 1);
        const int64_t done = s.step + 1;
        r->tokens += s.tokens;
        hear_loss(r, s.loss);
        if (every(done, o->log_every)) st = log_step(r, &s);
        show(r, done);
        const bool end = done == o->steps;
        const bool evaluates = every(done, o->eval_every) || end;
        const bool saves = every(done, o->checkpoint_every) || end;
        if (st == MN_OK && (evaluates || saves)) st = evaluate_and_save(r, evaluates, saves);
        if (st == MN_OK && every(done, o->sample_every)) st = print_sample(r);
    }
    const bool fails = st == MN_ERR_MEMORY || st == MN_ERR_INTERNAL;
    if (fails && r->device) return keep_going_possible(r, st);
    /* stopped between two checkpoints, by hand or for lack of patience */
    if (st == MN_OK && mn_trainer_step_number(r->trainer) > r->from) {
        st = mn_trainer_save(r->trainer, false);
    }
    return st;
}

/* ---- before and after ------------------------------------------------------------------------ */

/* Before anything is read: does the folder hold another run? */
static mn_status refuse_other_run(const options *o, const mn_json *root) {
    const char *out = "";
    const mn_status st = mn_json_opt_text(&out, root, "out");
    if (st != MN_OK || o->request.resume || o->overwrite || o->dry) return st;
    if (!mn_train_holds_run(out)) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "%s holds a run; --resume %s goes on with it, --overwrite "
                   "begins anew, out=... names another folder", out, out);
}

/* Two processes that write one run would remove each other's checkpoints. The lock ends with the
 * process, however that ends. */
static mn_status lock(int *fd, const char *out) {
    *fd = open(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (*fd < 0) return mn_fail(MN_ERR_IO, "%s: cannot open: %s", out, strerror(errno));
    if (flock(*fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return MN_OK;
    return mn_fail(MN_ERR_IO, "%s: another process trains this run; wait for it or stop it", out);
}

/* Goes on from `checkpoint`, or from the last one; a run that has none yet begins at its start. */
static mn_status resume(run *r, const char *out, const char *checkpoint) {
    char path[PATH];
    struct stat about;
    if (checkpoint[0]) return mn_trainer_resume(r->trainer, checkpoint);
    mn_status st = mn_run_join(path, out, "last");
    if (st != MN_OK || lstat(path, &about) == 0) {
        return st == MN_OK ? mn_trainer_resume(r->trainer, NULL) : st;
    }
    const int64_t step = mn_run_latest(out);    // written, but killed before the link was made
    if (step < 0) return MN_OK;
    st = mn_run_checkpoint(path, out, step);
    return st == MN_OK ? mn_trainer_resume(r->trainer, path) : st;
}

/* A folder that is this process's own, with the state to begin from in the trainer. */
static mn_status prepare_out(run *r, const char *checkpoint) {
    const char *out = mn_trainer_options(r->trainer)->out;
    mn_status st = r->first ? mn_run_make_folders(out) : MN_OK;
    if (st == MN_OK && r->first) st = lock(&r->lock, out);
    st = mn_comm_agree(r->ranks->comm, st);
    if (st == MN_OK && r->o->request.resume) st = resume(r, out, checkpoint);
    if (st == MN_OK && r->o->overwrite && r->first) st = mn_run_clear(out);
    return st;
}

/* Ranks that were given other configurations or other data would compute something else. */
static mn_status same_run(const run *r, const mn_json *root) {
    char *text = NULL;
    mn_hash hash = { 0 };
    mn_status st = mn_json_text(&text, root->value, MN_JSON_COMPACT);
    if (st != MN_OK) return st;
    mn_hash_add(&hash, text, strlen(text));
    mn_hash_add(&hash, MN_VERSION, sizeof MN_VERSION);
    free(text);
    st = mn_comm_same(r->ranks->comm, "configuration or the version of mneme",
                      mn_hash_value(&hash));
    if (st != MN_OK) return st;
    return mn_comm_same(r->ranks->comm, "training data", mn_trainer_data_mark(r->trainer));
}

/* The configuration beside the run. A resumed run keeps what --set changed, so that going on once
 * more goes on with it. */
static mn_status save_config(const run *r, const mn_json *root) {
    char path[PATH];
    if (r->o->request.resume && r->o->request.n_sets == 0) return MN_OK;
    const mn_status st = mn_run_join(path, mn_trainer_options(r->trainer)->out, "train.json");
    return st == MN_OK ? mn_json_save(path, root->value) : st;
}

/* Seconds of training that the log tells of. */
static mn_status seconds_before(double *seconds, const char *out) {
    char path[PATH];
    mn_run_table table = { 0 };
    *seconds = 0.0;
    mn_status st = mn_run_join(path, out, MN_RUN_METRICS);
    if (st == MN_OK) st = mn_run_table_load(&table, path);
    const double *column = st == MN_OK ? mn_run_table_column(&table, "seconds") : NULL;
    for (int64_t i = 0; column && i < table.n_rows; i++) {
        if (!isnan(column[i])) *seconds = column[i];
    }
    mn_run_table_free(&table);
    return st;
}

/* GPUs of the H100's kind with NVLink: TFLOP/s of a whole step in bf16 (gdn of 400M parameters),
 * GB/s that one sends to others, microseconds of a message. */
static const double gpu_rate = 400.0, gpu_bandwidth = 260.0, gpu_latency = 30.0;

/* What a step would cost on several ranks. */
static mn_cost_input cost_input(const run *r) {
    const mn_train_options *o = mn_trainer_options(r->trainer);
    const bool device = r->device != NULL, bf16 = device && strcmp(o->dtype, "bf16") == 0;
    const double here = device ? 1e12 * (bf16 ? gpu_rate : 0.1 * gpu_rate)
                               : 0.5 * mn_sgemm_rate(r->o->threads > 0 ? r->o->threads : 1);
    const double usual = device ? gpu_bandwidth : 1.0, message = device ? gpu_latency : 50.0;
    int64_t outside, block;
    mn_model_parts(mn_trainer_model(r->trainer), &outside, &block);
    return (mn_cost_input){
        .parameters = mn_model_count(mn_trainer_model(r->trainer)), .batches = o->accumulate,
        .tokens = o->batch * o->context, .flops = r->flops,
        .activations = r->memory.activations + r->memory.work + r->memory.data,
        .shards_gradients = strcmp(o->shard, "optimizer") != 0,
        .shards_parameters = strcmp(o->shard, "parameters") == 0, .outside = outside,
        .block = block, .blocks = mn_model_describe(mn_trainer_model(r->trainer))->n_layers,
        .device = device, .shadow = bf16 ? 2 : 0,
        .rate = r->o->rate > 0.0 ? 1e12 * r->o->rate : here,
        .bandwidth = 1e9 * (r->o->bandwidth > 0.0 ? r->o->bandwidth : usual),
        .latency = 1e-6 * (r->o->latency > 0.0 ? r->o->latency : message),
    };
}

/* Numbers of ranks worth a line: powers of two up to the one asked for. */
static json_t *print_costs(const run *r) {
    const mn_cost_input in = cost_input(r);
    json_t *list = json_array();
    const bool lines = !r->o->json;
    if (lines) {
        printf("one rank: %.3g TFLOP/s, sends %.3g GB/s, %.3g us a message; a step of %" PRId64
               " batches of %" PRId64 " tokens\n", in.rate * 1e-12, in.bandwidth * 1e-9,
               in.latency * 1e6, in.batches, in.tokens);
        printf("%6s %12s %12s %10s %10s %12s %10s\n", "ranks", "MiB a rank", "MiB a step",
               "compute s", "messages s", "tokens/s", "efficiency");
    }
    for (int64_t n = 1; n <= r->o->ranks; n = n < r->o->ranks && 2 * n > r->o->ranks ? r->o->ranks
                                                                                     : 2 * n) {
        const mn_cost c = mn_train_cost(&in, n);
        if (lines) {
            printf("%6" PRId64 " %12.0f %12.2f %10.4f %10.4f %12.0f %9.0f%%\n", n,
                   mebibytes(c.bytes), c.sent / 1048576.0, c.compute, c.communicate,
                   c.tokens_per_second, 100.0 * c.efficiency);
        }
        json_array_append_new(list, json_pack("{s:I, s:o, s:o, s:o, s:o, s:o, s:o}",
            "ranks", (json_int_t)n, "mebibytes", mn_json_real(mebibytes(c.bytes)),
            "bytes_sent", mn_json_real(c.sent), "compute_seconds", mn_json_real(c.compute),
            "communicate_seconds", mn_json_real(c.communicate),
            "tokens_per_second", mn_json_real(c.tokens_per_second),
            "efficiency", mn_json_real(c.efficiency)));
    }
    return list;
}

static void add_way(void *context, const char *op, const char *way) {
    json_object_set_new(context, op, json_string(way));
}

/* How the operators of a model cross the ranks that share a sequence. */
static mn_status print_ways(run *r, json_t **ways) {
    const char *op;
    json_t *way;
    *ways = json_object();
    const mn_status st = mn_trainer_sequence_ways(r->trainer, add_way, *ways);
    if (st != MN_OK || r->o->json || json_object_size(*ways) == 0) return st;
    printf("sequences over %" PRId64 " ranks (train.sequence_states=%s):",
           mn_trainer_options(r->trainer)->sequence_ranks,
           mn_trainer_options(r->trainer)->sequence_states);
    const char *between = " ";
    json_object_foreach(*ways, op, way) {
        printf("%s%s by %s", between, op, json_string_value(way));
        between = ", ";
    }
    puts("");
    return MN_OK;
}

/* What a dry run says to programs. */
static void print_plan(run *r, json_t *costs, json_t *ways) {
    const mn_model *model = mn_trainer_model(r->trainer);
    json_t *root = json_pack("{s:I, s:I, s:o, s:o}",
        "parameters", (json_int_t)mn_model_count(model),
        "parameters_without_embeddings", (json_int_t)mn_model_count_without_embeddings(model),
        "predicted_mebibytes", mn_json_real(mebibytes(r->memory.total)),
        "flops_per_token", mn_json_real(r->flops));
    if (costs) json_object_set(root, "ranks", costs);
    if (json_object_size(ways) > 0) json_object_set(root, "sequence_ways", ways);
    char *text = NULL;
    if (mn_json_text(&text, root, MN_JSON_PRETTY) == MN_OK) puts(text);
    free(text);
    json_decref(root);
}

/* "nats a character" where each token is one. */
static const char *unit_of(const run *r) {
    const mn_tokenizer *t = mn_trainer_tokenizer(r->trainer);
    const char *kind = t ? mn_tokenizer_kind(t) : "";
    const bool bytes = strcmp(kind, "bytes") == 0;
    const bool each = bytes && r->o->request.choice.per_character;
    if (strcmp(kind, "chars") == 0 || each) return "nats a character";
    return bytes ? "nats a byte" : "nats a token";
}

static void put_command(const char *about, const char *format, ...) {
    char text[PATH + 128];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    printf("  %-48s  %s\n", text, about);
}

/* How to go on from here. */
static void print_next(const run *r, const char *out) {
    const int64_t steps = mn_trainer_options(r->trainer)->steps;
    const bool best = mn_run_pointed(out, "best") >= 0;
    printf("the model is in %s%s%s%s\n\n", best ? out : "",
           best ? "/best (lowest held-out loss) and " : "", out, "/last");
    put_command("write", "mneme generate --model %s \"...\"", out);
    put_command("see its curves", "mneme plot %s --text", out);
    put_command("train on", "mneme train --resume %s --steps %" PRId64, out, 2 * steps);
    put_command("the same model on another text", "mneme train OTHER.txt --from %s", out);
}

static void report(const run *r, double seconds) {
    const double peak = peak_mebibytes(r->device), best = mn_trainer_best(r->trainer);
    const char *out = mn_trainer_options(r->trainer)->out;
    const double rate = (double)r->tokens / fmax(seconds, 1e-9);
    if (r->o->json) {
        json_t *root = json_pack("{s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:I, s:s}",
            "steps", (json_int_t)mn_trainer_step_number(r->trainer), "loss", mn_json_real(r->loss),
            "best_valid_loss", mn_json_real(best), "valid_loss", mn_json_real(r->valid),
            "seconds", mn_json_real(seconds), "tokens_per_second", mn_json_real(rate),
            "share_of_sgemm", mn_json_real(r->device ? NAN : rate * r->flops / r->ceiling),
            "peak_mebibytes", mn_json_real(peak),
            "parameters", (json_int_t)mn_model_count(mn_trainer_model(r->trainer)), "out", out);
        char *text = NULL;
        if (mn_json_text(&text, root, MN_JSON_PRETTY) == MN_OK) puts(text);
        free(text);
        json_decref(root);
        return;
    }
    if (isnan(r->loss)) {
        printf("%s has all its %" PRId64 " steps, or no patience left; --set train.steps=N or "
               "train.patience=N goes on\n", out, mn_trainer_step_number(r->trainer));
        return;
    }
    printf("loss %.4f", r->loss);
    if (!isnan(best)) printf(", best on held-out data %.4f %s", best, unit_of(r));
    printf("; %" PRId64 " steps, %.1f s, %.0f tokens/s; memory %.0f MiB (predicted %.0f)\n",
           mn_trainer_step_number(r->trainer), seconds, rate, peak,
           mebibytes(r->memory.total) + r->program);
    print_next(r, out);
}

/* What the signals do: ask once for a checkpoint and an end; a second Ctrl-C ends at once. A file
 * that may not grow is to fail as a full disk does, with a message. */
static void catch_signals(void) {
    struct sigaction stop = { .sa_handler = ask_stop, .sa_flags = (int)SA_RESETHAND | SA_RESTART };
    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGTERM, &stop, NULL);
    signal(SIGXFSZ, SIG_IGN);
}

/* What rank 0 keeps of the run beside its checkpoints. */
static mn_status open_records(run *r, const mn_json *root) {
    const mn_train_options *t = mn_trainer_options(r->trainer);
    const int64_t from = r->o->request.resume ? r->from : MN_RUN_NEW;
    mn_status st = mn_run_log_open(&r->log, t->out, from, t->tensorboard);
    if (st == MN_OK) st = save_config(r, root);
    if (st == MN_OK) st = mn_train_settings_save(r->trainer, r->o->device, r->threads);
    return st == MN_OK && r->o->request.resume ? seconds_before(&r->before, t->out) : st;
}

static mn_status start(run *r, const mn_json *root, const char *checkpoint) {
    mn_status st = same_run(r, root);
    if (st == MN_OK) st = prepare_out(r, checkpoint);
    if (st != MN_OK) return st;
    const mn_train_options *t = mn_trainer_options(r->trainer);
    r->from = mn_trainer_step_number(r->trainer);
    if (r->first) st = open_records(r, root);
    if (st == MN_OK) st = mn_trainer_begin(r->trainer);
    if (st != MN_OK) return st;
    r->loss = r->valid = NAN;
    r->started = r->last_time = mn_seconds();
    mn_progress_start(&r->bar, "training", "steps", r->from, t->steps, r->o->quiet || !r->first);
    return MN_OK;
}

/* Whether anybody is told what share of sgemm's speed training reaches. */
static bool tells_share(const run *r) {
    return r->first && !r->o->dry && !r->device && (!r->o->quiet || r->o->json);
}

static mn_status execute(run *r, const mn_json *root, const char *checkpoint, mn_context *context) {
    assert(context);    // made, on all ranks
    r->device = context->device;
    r->threads = mn_context_threads(context);
    if (tells_share(r)) r->ceiling = mn_sgemm_rate(r->threads);
    if (!r->device) r->program = peak_mebibytes(NULL);
    mn_status st = r->o->dry ? mn_trainer_create_dry(&r->trainer, root, context)
                             : mn_trainer_create_rank(&r->trainer, root, NULL, r->ranks->comm,
                                                      context);
    if (st == MN_OK) st = mn_trainer_predict(r->trainer, &r->memory);
    if (st != MN_OK) return st;
    const int64_t length = mn_trainer_options(r->trainer)->context;
    r->flops = mn_model_flops(mn_trainer_model(r->trainer), length);
    if (r->first && (!r->o->quiet || r->o->dry)) introduce(r);
    if (r->o->dry) {
        json_t *costs = r->o->ranks > 1 ? print_costs(r) : NULL, *ways = NULL;
        st = print_ways(r, &ways);
        if (r->o->json && st == MN_OK) print_plan(r, costs, ways);
        json_decref(costs);
        json_decref(ways);
        return st;
    }
    catch_signals();
    st = start(r, root, checkpoint);
    if (st == MN_OK) st = train(r);
    char extra[EXTRA];
    put_losses(extra, r);
    if (st == MN_OK && !isnan(r->loss)) mn_progress_finish(&r->bar, extra);
    else mn_progress_clear(&r->bar);
    const mn_status closed = mn_run_log_close(r->log);
    if (st == MN_OK) st = closed;
    if (st == MN_OK && r->first) report(r, mn_seconds() - r->started);
    return st;
}

/* The speed of the machine, which sizes are chosen by and the time left is told by: that of rank 0
 * for all; 0 where neither is asked for. */
static mn_status measure_speed(run *r, options *o, mn_context *context) {
    double *flops = &o->request.choice.flops;
    assert(context);
    if (r->first && (!o->quiet || o->dry || mn_train_chooses_size(&o->request))) {
        *flops = context->device ? 1e14    // what a GPU makes of small models at least
                                 : mn_train_product_rate(context);
    }
    mn_comm *comm = r->ranks->comm;
    return comm ? mn_comm_broadcast(comm, 0, flops, sizeof *flops) : MN_OK;
}

static mn_status train_as_asked(run *r, options *o) {
    mn_json root = { 0 };
    char checkpoint[PATH];
    mn_context *context = NULL;
    mn_cli_ranks *ranks = r->ranks;
    mn_context_options how = { .n_threads = mn_cli_ranks_threads(ranks, o->threads) };
    mn_status st = mn_cli_ranks_meet(ranks, o->transport);
    if (st == MN_OK) st = mn_cli_ranks_device(ranks, &how.device, o->device);
    if (st == MN_OK) st = mn_context_create(&context, &how);
    if (ranks->comm) st = mn_comm_agree(ranks->comm, st);
    if (st == MN_OK) st = measure_speed(r, o, context);
    if (st == MN_OK) st = mn_train_settings(&root, &o->request, checkpoint);
    if (st == MN_OK && r->first) st = refuse_other_run(o, &root);
    if (ranks->comm) st = mn_comm_agree(ranks->comm, st);
    if (st == MN_OK) st = execute(r, &root, checkpoint, context);
    if (st != MN_OK) mn_cli_ranks_fail(ranks);
    r->stopped = st == MN_OK && r->stopped && r->trainer &&
                 mn_trainer_step_number(r->trainer) < mn_trainer_options(r->trainer)->steps;
    if (r->stopped && r->first) {
        fprintf(stderr, "stopped; mneme train --resume %s goes on\n",
                mn_trainer_options(r->trainer)->out);
    }
    mn_trainer_destroy(r->trainer);
    mn_comm_destroy(ranks->comm);
    mn_context_destroy(context);
    mn_json_free(&root);
    if (r->lock >= 0) close(r->lock);
    return st;
}

/* On as many ranks as asked for, of which this process may be one or their parent; the exit
 * status. */
static int train_on_ranks(options *o) {
    mn_cli_ranks ranks;
    bool ended;
    int status;
    const int wanted = o->dry ? 0 : o->ranks;
    if (mn_cli_ranks_start(&ranks, "train", wanted, o->transport, &ended, &status) != MN_OK) {
        fprintf(stderr, "mneme train: %s\n", mn_last_error());
        return 1;
    }
    if (ended) return status;
    run r = { .o = o, .lock = -1, .rate = NAN, .loss = NAN, .valid = NAN, .ranks = &ranks,
              .first = ranks.rank == 0 };
    const mn_status st = train_as_asked(&r, o);
    return st != MN_OK ? 1 : r.stopped ? 130 : 0;
}

int mn_command_train(int argc, char **argv) {
    options o = { .request.from = NULL };
    shortcut_value values[MN_COUNTOF(shortcuts)];
    int status = parse(&o, values, argc, argv);
    if (status == 0 && argc == 1) {
        status = mn_options_mistake("train", "", "a text, a configuration, --set or --resume is "
                                    "needed, such as mneme train book.txt");
    }
    if (status < 0) print_help();
    if (status == 0) status = train_on_ranks(&o);
    else if (status < 0) status = 0;
    for (size_t i = 0; i < MN_COUNTOF(shortcuts); i++) free(values[i].set);
    return status;
}
