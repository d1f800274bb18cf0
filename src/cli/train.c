/* train.c - mneme train: from a configuration and text to a model that writes text. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
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
#include "data/hash.h"
#include "io/json_write.h"
#include "ops/context.h"
#include "train/cost.h"
#include "train/run_folder.h"
#include "train/run_log.h"
#include "train/run_read.h"
#include "train/trainer.h"

enum { PATH = 4096, MAX_SETS = 256 };

typedef struct options {
    const char *config, *from;       // --resume's folder
    const char *device, *transport;
    const char *sets[MAX_SETS];
    int n_sets, threads, ranks;
    double rate, bandwidth, latency;  // of the cost model: 0: measured or usual
    char dtype[64];                  // --dtype as a setting
    bool resume, overwrite, quiet, json, dry;
} options;

static void print_option(void *context, const char *key, const char *value, const char *about) {
    (void)context;
    printf("  %-24s %-10s %s\n", key, value[0] ? value : "\"\"", about);
}

static void print_help(void) {
    puts("usage: mneme train [CONFIG.json] [--set key=value]... [options]\n"
         "       mneme train --resume RUN [--set key=value]...\n\n"
         "Trains a model on text and writes it to a folder: checkpoints last and best (model "
         "folders\n"
         "that generate and eval read), metrics.jsonl, event files for TensorBoard. Stopped by "
         "Ctrl-C or\n"
         "killed, a run goes on with --resume, bit for bit as if it had not stopped.\n\n"
         "  --set K=V        change one value, such as --set model.layers=gdn; may be repeated\n"
         "  --resume RUN     go on with a run's folder, or with one checkpoint of it\n"
         "  --overwrite      begin anew in a folder that holds a run\n"
         "  --device D       cpu (default), cuda or cuda:N: where steps are computed\n"
         "  --dtype T        f32, or bf16 on a GPU; the same as --set train.dtype=T\n"
         "  --threads N      threads (default: one per core)\n"
         "  --ranks N        processes on this machine that share each step, with the bits of one; "
         "mpirun, srun\n"
         "                   and torchrun --no-python start them on several machines\n"
         "  --transport T    how ranks talk: auto (default), tcp or mpi\n"
         "  --dry-run        say what would be trained and how much memory it takes, and stop\n"
         "  --rate X         of --dry-run with --ranks: TFLOP/s of a rank (default: half of sgemm "
         "here),\n"
         "  --bandwidth X    GB/s a rank sends (default 1), and\n"
         "  --latency X      microseconds of a message (default 50)\n"
         "  --quiet          no progress\n"
         "  --json           the result as one document\n\n"
         "Example: mneme train --set data.train=book.txt --set model.layers=gdn \\\n"
         "             --set model.hidden_size=128 --set model.num_hidden_layers=4 --set "
         "out=runs/gdn\n\n"
         "model.layers, model.hidden_size .. are the keys of a model's config.json (mneme info "
         "lists the\n"
         "layers). The rest, with defaults:\n");
    mn_train_options_list(print_option, NULL);
    puts("  data.train, data.valid              files and folders\n"
         "  train.groups.NAME.lr, .decays       NAME: matrix, vector, state, embed, head\n"
         "  out                                 folder of the run (default: runs/LAYERS)");
}

static bool read_positive(void *to, const char *value) {
    char *end;
    *(double *)to = strtod(value, &end);
    return end != value && !*end && *(double *)to > 0.0 && isfinite(*(double *)to);
}

static int parse(options *o, int argc, char **argv) {
    const char *dtype = NULL;
    const mn_option rows[] = {
        { "--set", .list = o->sets, .n = &o->n_sets, .most = MAX_SETS - 1 },
        { "--resume", .text = &o->from },
        { "--threads", .count = &o->threads, .low = 1, .high = 4096 },
        { "--device", .text = &o->device },
        { "--ranks", .count = &o->ranks, .low = 1, .high = MN_RANKS_MOST },
        { "--transport", .text = &o->transport },
        { "--dtype", .text = &dtype },
        { "--rate", .read = read_positive, .to = &o->rate, .needs = "a positive number" },
        { "--bandwidth", .read = read_positive, .to = &o->bandwidth, .needs = "a positive number" },
        { "--latency", .read = read_positive, .to = &o->latency, .needs = "a positive number" },
        { "--overwrite", .flag = &o->overwrite },
        { "--dry-run", .flag = &o->dry },
        { "--quiet", .flag = &o->quiet },
        { "--json", .flag = &o->json },
        { NULL, .text = &o->config },
    };
    const int status = mn_options_read(rows, MN_COUNTOF(rows), "train", argc, argv);
    if (status != 0) return status;
    if (dtype) {
        snprintf(o->dtype, sizeof o->dtype, "train.dtype=%s", dtype);
        o->sets[o->n_sets++] = o->dtype;
    }
    o->resume = o->from != NULL;
    if (o->resume && o->config) {
        return mn_options_mistake("train", o->config, "and --resume: a run has its own");
    }
    if (o->resume && o->overwrite) {
        return mn_options_mistake("train", "--overwrite", "and --resume: one of them");
    }
    return 0;
}

/* ---- configuration --------------------------------------------------------------------------- */

static bool exists(const char *path) {
    struct stat about;
    return stat(path, &about) == 0;
}

static bool holds_run(const char *folder) {
    char path[PATH];
    return snprintf(path, PATH, "%s/train.json", folder) < PATH && exists(path);
}

/* A run's folder, or a checkpoint inside one: RUN/train.json lies in it or two folders up. Links
 * (last, best) are followed first, as they will point elsewhere when the run goes on. */
static mn_status find_run(char run[PATH], char checkpoint[PATH], const char *from) {
    checkpoint[0] = '\0';
    if (snprintf(run, PATH, "%s", from) >= PATH) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", from);
    }
    if (holds_run(from)) return MN_OK;
    char *real = realpath(from, NULL);
    if (!real) return mn_fail(MN_ERR_IO, "%s: %s", from, strerror(errno));
    bool found = snprintf(checkpoint, PATH, "%s", real) < PATH &&
                 snprintf(run, PATH, "%s", real) < PATH;
    free(real);
    for (int up = 0; found && up < 2; up++) {
        char *slash = strrchr(run, '/');
        if (slash) *slash = '\0';
    }
    if (found && holds_run(run)) return MN_OK;
    return mn_fail(MN_ERR_IO, "%s is no folder of a run: no train.json in it or two folders up",
                   from);
}

static mn_status default_out(mn_json *root) {
    if (json_object_get(root->value, "out")) return MN_OK;
    const mn_json model = mn_json_member(root, "model");
    const char *layers = "model";
    mn_status st = mn_json_opt_text(&layers, &model, "layers");
    char out[256] = "runs/";
    for (size_t n = 5; st == MN_OK && *layers && n < sizeof out - 1; layers++) {
        if (*layers == ' ' || *layers == '/') continue;
        out[n++] = *layers;
    }
    json_object_set_new(root->value, "out", json_string(out));
    return st;
}

/* A resumed run stays where it is, also when its folder was moved since. */
static mn_status keep_out(mn_json *root, const options *o, const char *run) {
    for (int i = 0; i < o->n_sets; i++) {
        if (strncmp(o->sets[i], "out=", 4) != 0) continue;
        return mn_fail(MN_ERR_ARGUMENT, "--set %s: a resumed run stays in its folder; copy the "
                       "folder and resume the copy", o->sets[i]);
    }
    if (json_object_set_new(root->value, "out", json_string(run)) == 0) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "%s: the name is not valid UTF-8", run);
}

static mn_status load_config(mn_json *root, const options *o, char checkpoint[PATH]) {
    char run[PATH], path[PATH];
    mn_status st = MN_OK;
    checkpoint[0] = '\0';
    if (o->resume) {
        st = find_run(run, checkpoint, o->from);
        if (st == MN_OK && snprintf(path, PATH, "%s/train.json", run) >= PATH) {
            st = mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", run);
        }
        if (st == MN_OK) st = mn_json_load(root, path, MN_JSON_STANDARD);
    } else if (o->config) {
        st = mn_json_load(root, o->config, MN_JSON_STANDARD);
    } else {
        st = mn_json_parse(root, "{}", 2, "--set", MN_JSON_STANDARD);
    }
    if (st == MN_OK) st = mn_json_expect_object(root);
    for (int i = 0; st == MN_OK && i < o->n_sets; i++) st = mn_train_set(root, o->sets[i]);
    if (st == MN_OK && o->resume) st = keep_out(root, o, run);
    return st == MN_OK ? default_out(root) : st;
}

/* ---- the run --------------------------------------------------------------------------------- */

typedef struct run {
    const options *o;
    mn_cli_ranks *ranks;
    bool first;                  // rank 0, which writes and speaks for all
    bool stopped;                // some rank was asked to
    mn_trainer *trainer;
    mn_run_log *log;
    int lock;                    // descriptor of the locked folder; -1: none
    int64_t from;                // steps done when this process began
    mn_progress bar;
    mn_train_memory memory;
    mn_device *device;           // NULL: the CPU
    double program;              // mebibytes it had before anything was read; 0 on a GPU
    double ceiling;              // floating-point operations a second of sgemm here; 0 on a GPU
    double flops;                // of a step of training, per token
    double started, last_time;   // seconds
    double before;               // seconds of training in earlier processes
    int64_t tokens, last_tokens; // of this process; at the last line of the log
    double rate, loss, valid;    // tokens a second, smoothed loss, last validation loss
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

static void introduce(run *r) {
    const mn_train_options *o = mn_trainer_options(r->trainer);
    const mn_model *model = mn_trainer_model(r->trainer);
    char layers[512];
    mn_layers_describe(layers, sizeof layers, mn_model_describe(model));
    fprintf(stderr, "model      %d x %s, width %" PRId64 ", vocabulary %" PRId64 ": %" PRId64
            " parameters (%" PRId64 " without embeddings)\n", mn_model_describe(model)->n_layers,
            layers, mn_model_describe(model)->hidden_size, mn_model_describe(model)->vocab_size,
            mn_model_count(model), mn_model_count_without_embeddings(model));
    fprintf(stderr, "data       %" PRId64 " tokens to train on, %" PRId64 " held out, %s\n",
            mn_trainer_tokens(r->trainer, false), mn_trainer_tokens(r->trainer, true),
            mn_trainer_tokenizer(r->trainer) ? mn_tokenizer_kind(mn_trainer_tokenizer(r->trainer))
                                             : "no tokenizer");
    fprintf(stderr, "run        %" PRId64 " steps of %" PRId64 " x %" PRId64 " tokens, to %s\n",
            o->steps, o->batch * o->accumulate, o->context, o->out);
    if (r->ranks->comm) {
        fprintf(stderr, "ranks      %d over %s, %s shared out\n", r->ranks->world,
                mn_transport_name(mn_comm_transport(r->ranks->comm)),
                strcmp(o->shard, "gradients") == 0 ? "optimiser states and gradients"
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
    if (!r->first) return MN_OK;
    const mn_status st = mn_trainer_sample(r->trainer, &text);
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
    if (failure != MN_ERR_MEMORY || mn_trainer_save(r->trainer, false) != MN_OK) {
        const int64_t last = mn_run_latest(out);
        if (last < 0) return mn_fail(failure, "%s. There is no checkpoint yet", why);
        return mn_fail(failure, "%s. The checkpoint of step %" PRId64 " is as it was: --resume %s "
                       "goes on from there", why, last, out);
    }
    return mn_fail(failure, "%s. Step %" PRId64 " is saved: go on with --resume and a smaller "
                   "train.batch, train.recompute=layer or another --device", why,
                   mn_trainer_step_number(r->trainer));
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
        r->loss = isnan(r->loss) ? s.loss : 0.95 * r->loss + 0.05 * s.loss;
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
    if (st != MN_OK || o->resume || o->overwrite || o->dry || !holds_run(out)) return st;
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
    if (st == MN_OK && r->o->resume) st = resume(r, out, checkpoint);
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
    if (r->o->resume && r->o->n_sets == 0) return MN_OK;
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

/* What a step would cost on several ranks. */
static mn_cost_input cost_input(const run *r) {
    const mn_train_options *o = mn_trainer_options(r->trainer);
    const double here = 0.5 * mn_sgemm_rate(r->o->threads > 0 ? r->o->threads : 1);
    return (mn_cost_input){
        .parameters = mn_model_count(mn_trainer_model(r->trainer)), .batches = o->accumulate,
        .tokens = o->batch * o->context, .flops = r->flops,
        .activations = r->memory.activations + r->memory.work + r->memory.data,
        .shards_gradients = strcmp(o->shard, "gradients") == 0,
        .rate = r->o->rate > 0.0 ? 1e12 * r->o->rate : here,
        .bandwidth = 1e9 * (r->o->bandwidth > 0.0 ? r->o->bandwidth : 1.0),
        .latency = 1e-6 * (r->o->latency > 0.0 ? r->o->latency : 50.0),
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

/* What a dry run says to programs. */
static void print_plan(run *r, json_t *costs) {
    const mn_model *model = mn_trainer_model(r->trainer);
    json_t *root = json_pack("{s:I, s:I, s:o, s:o}",
        "parameters", (json_int_t)mn_model_count(model),
        "parameters_without_embeddings", (json_int_t)mn_model_count_without_embeddings(model),
        "predicted_mebibytes", mn_json_real(mebibytes(r->memory.total)),
        "flops_per_token", mn_json_real(r->flops));
    if (costs) json_object_set(root, "ranks", costs);
    char *text = NULL;
    if (mn_json_text(&text, root, MN_JSON_PRETTY) == MN_OK) puts(text);
    free(text);
    json_decref(root);
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
    if (!isnan(best)) printf(", best on held-out data %.4f", best);
    printf("; %" PRId64 " steps, %.1f s, %.0f tokens/s; memory %.0f MiB (predicted %.0f)\n",
           mn_trainer_step_number(r->trainer), seconds, rate, peak,
           mebibytes(r->memory.total) + r->program);
    const bool has_best = mn_run_pointed(out, "best") >= 0;
    printf("%s/last%s%s%s the model%s: mneme generate --model %s/last\n", out,
           has_best ? " and " : "", has_best ? out : "", has_best ? "/best are" : " is",
           has_best ? "s" : "", out);
}

/* What the signals do: ask once for a checkpoint and an end; a second Ctrl-C ends at once. A file
 * that may not grow is to fail as a full disk does, with a message. */
static void catch_signals(void) {
    struct sigaction stop = { .sa_handler = ask_stop, .sa_flags = (int)SA_RESETHAND | SA_RESTART };
    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGTERM, &stop, NULL);
    signal(SIGXFSZ, SIG_IGN);
}

static mn_status start(run *r, const mn_json *root, const char *checkpoint) {
    mn_status st = same_run(r, root);
    if (st == MN_OK) st = prepare_out(r, checkpoint);
    if (st != MN_OK) return st;
    const mn_train_options *t = mn_trainer_options(r->trainer);
    r->from = mn_trainer_step_number(r->trainer);
    r->loss = r->valid = NAN;
    r->started = r->last_time = mn_seconds();
    mn_progress_start(&r->bar, "training", "steps", r->from, t->steps, r->o->quiet || !r->first);
    if (!r->first) return MN_OK;
    st = mn_run_log_open(&r->log, t->out, r->o->resume ? r->from : MN_RUN_NEW, t->tensorboard);
    if (st == MN_OK) st = save_config(r, root);
    return st == MN_OK && r->o->resume ? seconds_before(&r->before, t->out) : st;
}

static mn_status execute(run *r, const mn_json *root, const char *checkpoint, mn_context *context) {
    r->device = context->device;
    if (!r->o->dry && !r->device) r->ceiling = mn_sgemm_rate(mn_context_threads(context));
    if (!r->device) r->program = peak_mebibytes(NULL);
    mn_status st = mn_trainer_create_rank(&r->trainer, root, NULL, r->ranks->comm, context);
    if (st == MN_OK) st = mn_trainer_predict(r->trainer, &r->memory);
    if (st != MN_OK) return st;
    const int64_t length = mn_trainer_options(r->trainer)->context;
    r->flops = mn_model_flops(mn_trainer_model(r->trainer), length);
    if (r->first && (!r->o->quiet || r->o->dry)) introduce(r);
    if (r->o->dry) {
        json_t *costs = r->o->ranks > 1 ? print_costs(r) : NULL;
        if (r->o->json) print_plan(r, costs);
        json_decref(costs);
        return MN_OK;
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

/* The whole run as this rank has it; the exit status. */
static int run_rank(const options *o, mn_cli_ranks *ranks) {
    mn_json root = { 0 };
    char checkpoint[PATH];
    mn_context *context = NULL;
    run r = { .o = o, .lock = -1, .loss = NAN, .valid = NAN, .ranks = ranks,
              .first = ranks->rank == 0 };
    mn_status st = load_config(&root, o, checkpoint);
    if (st == MN_OK) st = mn_cli_ranks_meet(ranks, o->transport);
    if (st == MN_OK && r.first) st = refuse_other_run(o, &root);
    if (ranks->comm) st = mn_comm_agree(ranks->comm, st);
    const mn_context_options how = { .n_threads = mn_cli_ranks_threads(ranks, o->threads),
                                     .device = o->device };
    if (st == MN_OK) st = mn_context_create(&context, &how);
    if (st == MN_OK) st = execute(&r, &root, checkpoint, context);
    if (st != MN_OK) mn_cli_ranks_fail(ranks);
    const bool stopped = r.stopped && r.trainer &&
                         mn_trainer_step_number(r.trainer) < mn_trainer_options(r.trainer)->steps;
    mn_trainer_destroy(r.trainer);
    mn_comm_destroy(ranks->comm);
    mn_context_destroy(context);
    mn_json_free(&root);
    if (r.lock >= 0) close(r.lock);
    if (st == MN_OK && stopped) {
        if (r.first) fprintf(stderr, "stopped; --resume goes on\n");
        return 130;
    }
    return st == MN_OK ? 0 : 1;
}

int mn_command_train(int argc, char **argv) {
    options o = { 0 };
    const int mistake = parse(&o, argc, argv);
    if (mistake < 0) print_help();
    if (mistake != 0) return mistake < 0 ? 0 : mistake;
    if (argc == 1) {
        return mn_options_mistake("train", "", "a configuration, --set or --resume is needed");
    }
    mn_cli_ranks ranks;
    bool ended;
    int status;
    const int wanted = o.dry ? 0 : o.ranks;
    if (mn_cli_ranks_start(&ranks, "train", wanted, o.transport, &ended, &status) != MN_OK) {
        fprintf(stderr, "mneme train: %s\n", mn_last_error());
        return 1;
    }
    return ended ? status : run_rank(&o, &ranks);
}
