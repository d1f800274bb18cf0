/* attack_api.c - every call of mneme.h that is no operator, with each argument wrong in turn and
 * with every two of them wrong at once: attack_api.
 *
 * The calls are read from the header (api_calls.awk); here are the values of their arguments, the
 * right one first. With all of them right a call succeeds. Else it is refused in words or does what
 * it says, and where it fails what it should have made is NULL. */
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "attack/batch.h"
#include "base/status.h"
#include "base/util.h"

typedef struct api_call {
    const char *name;
    int n;                                     // arguments
    bool fails;                                // returns mn_status
    const char *(*run)(const int *pick);       // NULL, or what is wrong with what it did
    int (*const *counts)(void);                // of the values of each
} api_call;

enum { MOST_ARGUMENTS = 10, NUMBERS = 1 << 16, THREE = 3 };

/* ---- what calls are given -------------------------------------------------------------------- */

static const char config[] =
    "{\"model\": {\"layers\": \"kla\", \"num_hidden_layers\": 1, \"hidden_size\": 16, "
    "\"d_state\": 4}, \"data\": {\"train\": \"t.txt\", \"tokenizer\": \"bytes\"}, "
    "\"train\": {\"steps\": 3, \"batch\": 2, \"context\": 16, \"warmup\": 1, \"eval_batches\": 1, "
    "\"tensorboard\": false}, \"out\": \"run\"}";
static const char config_from[] =
    "{\"model\": {\"layers\": \"gdn\", \"num_hidden_layers\": 1, \"hidden_size\": 16, "
    "\"num_heads\": 2, \"vocab_size\": 11}, \"train\": {\"steps\": 3, \"batch\": 2, "
    "\"context\": 8, \"warmup\": 1, \"tensorboard\": false}, \"out\": \"from\"}";

static char junk[64];
static void *const poison = junk;

/* Made when first asked for, in each child. */
static mn_context *context;
static mn_model *model, *other_model;
static mn_session *session, *second, *other;
static mn_snapshot *snapshot, *other_snapshot;
static mn_batch *batch;
static mn_train *train;
static mn_task *task;
static mn_tokenizer *tokenizer;
static int32_t ints[NUMBERS], made_token;
static float floats[NUMBERS];
static double doubles[THREE];

/* One of them is gone, so none of the others is used again. */
static void forget_all(void) {
    context = NULL;
    model = other_model = NULL;
    session = second = other = NULL;
    snapshot = other_snapshot = NULL;
    batch = NULL;
    train = NULL;
    task = NULL;
    tokenizer = NULL;
}

static void need(mn_status st) {
    if (st == MN_OK) return;
    fprintf(stderr, "attack_api: what calls are given: %s\n", mn_last_error());
    abort();
}

static mn_context *a_context(void) {
    const mn_context_options options = { .n_threads = 1 };
    if (!context) need(mn_context_create(&context, &options));
    return context;
}

static mn_model *a_model(mn_model **which) {
    if (!*which) need(mn_model_open(which, "run/last"));
    return *which;
}

/* One that has read two tokens. */
static mn_session *a_session(mn_session **which, mn_model **on) {
    static const int32_t tokens[] = { 97, 98 };
    const mn_session_options options = { .belief = true };
    if (!*which) need(mn_session_create(which, a_context(), a_model(on), &options));
    need(mn_session_reset(*which));
    need(mn_session_feed(*which, tokens, MN_COUNTOF(tokens)));
    return *which;
}

static mn_snapshot *a_snapshot(mn_snapshot **which, mn_session **of, mn_model **on) {
    if (!*which) need(mn_session_snapshot(which, a_session(of, on)));
    return *which;
}

static mn_batch *a_batch(void) {
    if (!batch) need(mn_batch_create(&batch, a_context(), a_model(&model)));
    return batch;
}

static mn_train *a_train(void) {
    if (!train) need(mn_train_create(&train, a_context(), config));
    return train;
}

static mn_task *a_task(void) {
    if (!task) need(mn_task_open(&task, "mqar", NULL));
    return task;
}

static mn_tokenizer *a_tokenizer(void) {
    if (!tokenizer) need(mn_tokenizer_load(&tokenizer, "run/last"));
    return tokenizer;
}

static mn_session *const *some_sessions(mn_session *first, mn_session *next) {
    static mn_session *lists[8][2];
    static int at;
    at = (at + 1) % 8;
    lists[at][0] = first;
    lists[at][1] = next;
    return lists[at];
}

static mn_status fill(void *given, int64_t step, int64_t rows, int64_t length, int32_t *tokens,
                      int32_t *targets) {
    const int32_t token = given ? *(const int32_t *)given : (int32_t)(step % 11);
    for (int64_t i = 0; i < rows * length; i++) tokens[i] = targets[i] = token;
    return MN_OK;
}

static mn_status fill_not(void *given, int64_t step, int64_t rows, int64_t length, int32_t *tokens,
                          int32_t *targets) {
    (void)given, (void)step, (void)rows, (void)length, (void)tokens, (void)targets;
    return mn_fail(MN_ERR_IO, "no batch");
}

static int32_t below = -1, beyond = INT32_MAX;
static const mn_train_batches batches[] = {
    { .fill = fill }, { .fill = NULL }, { .fill = fill_not }, { .fill = fill, .epoch = -1 },
    { .fill = fill, .context = &below }, { .fill = fill, .context = &beyond },
};
static void *allocate(void *owner, size_t bytes) {
    (void)owner;
    return malloc(bytes);
}
static const mn_context_options contexts[] = {
    { .n_threads = 1 }, { .n_threads = -1 }, { .n_threads = INT_MAX }, { .n_threads = INT_MIN },
    { .n_threads = 1, .target = "none such" }, { .n_threads = 1, .target = "" },
    { .n_threads = 1, .device = "none such" }, { .n_threads = 1, .device = "cuda:99" },
    { .n_threads = 1, .device = "cuda:-1" }, { .n_threads = 1, .device = "" },
    { .n_threads = 1, .stream = junk }, { .n_threads = 1, .allocate = allocate },
};
static const mn_session_options sessions[] = {
    { .belief = true }, { .prefill_chunk = -1 }, { .prefill_chunk = INT64_MIN },
    { .prefill_chunk = INT64_MAX }, { .dtype = (mn_dtype)99 }, { .dtype = (mn_dtype)-1 },
    { .dtype = MN_BF16 }, { .dtype = MN_F64 }, { .relative = true },
};
static mn_sampling samplings[] = {
    { .temperature = 1.0 }, { .temperature = NAN }, { .temperature = -1.0 },
    { .temperature = INFINITY }, { .temperature = 1e-320 }, { .temperature = 1.0, .top_k = -1 },
    { .temperature = 1.0, .top_k = INT64_MAX }, { .temperature = 1.0, .top_p = -1.0 },
    { .temperature = 1.0, .top_p = NAN }, { .temperature = 1.0, .min_p = 2.0 },
    { .temperature = 1.0, .min_p = NAN }, { .repetition_penalty = -1.0 },
    { .repetition_penalty = 1e300, .temperature = 1.0 },
    { .repetition_penalty = 2.0, .repetition_window = -1 },
};
static const int32_t right_tokens[] = { 97, 98, 99 }, low_tokens[] = { 97, -1, 99 },
                     high_tokens[] = { 97, 98, INT32_MAX };
static const int32_t *const right_rows[] = { right_tokens, right_tokens };
static const int32_t *const low_rows[] = { right_tokens, low_tokens };
static const int32_t *const no_rows[] = { right_tokens, NULL };
static const int64_t right_counts[] = { 2, 3 }, zero_counts[] = { 2, 0 },
                     low_counts[] = { 2, INT64_MIN }, one_counts[] = { 1, 3 };
static int64_t sizes[4];
static size_t bytes;
static double loss;
static const float *variance;
static mn_train_result result;

/* ---- their values ---------------------------------------------------------------------------- */

#define VALUES(kind, type, ...)                                                                    \
    static type value_##kind(int pick) {                                                           \
        type const all[] = { __VA_ARGS__ };                                                        \
        return all[pick];                                                                          \
    }                                                                                              \
    static int count_##kind(void) {                                                                \
        return (int)(sizeof((type[]){ __VA_ARGS__ }) / sizeof(type));                              \
    }

static int count_made(void) {
    return 2;
}

VALUES(mn_context_p, mn_context *, a_context(), NULL)
VALUES(mn_model_p, mn_model *, a_model(&model), NULL)
VALUES(mn_session_p, mn_session *, a_session(&session, &model), NULL,
       a_session(&other, &other_model))
VALUES(mn_snapshot_p, mn_snapshot *, a_snapshot(&snapshot, &session, &model), NULL,
       a_snapshot(&other_snapshot, &other, &other_model))
VALUES(mn_batch_p, mn_batch *, a_batch(), NULL)
VALUES(mn_train_p, mn_train *, a_train(), NULL)
VALUES(mn_task_p, mn_task *, a_task(), NULL)
VALUES(mn_tokenizer_p, mn_tokenizer *, a_tokenizer(), NULL)
VALUES(mn_session_pconst_p__sessions, mn_session *const *,
       some_sessions(a_session(&session, &model), a_session(&second, &model)), NULL,
       some_sessions(a_session(&session, &model), NULL), some_sessions(NULL, NULL),
       some_sessions(a_session(&session, &model), session),
       some_sessions(a_session(&session, &model), a_session(&other, &other_model)))
VALUES(mn_train_batches_p, const mn_train_batches *, batches, NULL, batches + 1, batches + 2,
       batches + 3, batches + 4, batches + 5)
VALUES(mn_context_options_p, const mn_context_options *, contexts, NULL, contexts + 1, contexts + 2,
       contexts + 3, contexts + 4, contexts + 5, contexts + 6, contexts + 7, contexts + 8,
       contexts + 9, contexts + 10, contexts + 11)
VALUES(mn_session_options_p, const mn_session_options *, sessions, NULL, sessions + 1, sessions + 2,
       sessions + 3, sessions + 4, sessions + 5, sessions + 6, sessions + 7, sessions + 8)
VALUES(mn_sampling_p, mn_sampling *, samplings, NULL, samplings + 1, samplings + 2, samplings + 3,
       samplings + 4, samplings + 5, samplings + 6, samplings + 7, samplings + 8, samplings + 9,
       samplings + 10, samplings + 11, samplings + 12, samplings + 13)
VALUES(mn_train_result_p, mn_train_result *, &result, NULL)
VALUES(mn_status__status, mn_status, MN_OK, (mn_status)-1, (mn_status)99, (mn_status)INT_MAX,
       (mn_status)INT_MIN)

VALUES(mn_tokenizer_load__path, const char *, "run/last", NULL, "", "/nowhere", ".", "t.txt",
       "/dev/null")
VALUES(mn_tokenizer_ids__text, const char *, "text", NULL, "\xff\xfe\xc0\x80")
VALUES(mn_train_create__config, const char *, config, NULL, "", "{", "[]", "null", "{}",
       "{\"out\": 7}", "{\"data\": {\"train\": \"/nowhere\"}, \"out\": \"x\"}", config_from)
VALUES(mn_train_create_from__config, const char *, config_from, NULL, "", "{", "[]", "null", "{}",
       "{\"model\": {\"layers\": \"gdn\", \"vocab_size\": -5}}", config)
VALUES(mn_train_resume__checkpoint, const char *, "run/last", NULL, "", "/nowhere", ".", "t.txt")
VALUES(mn_model_open__folder, const char *, "run/last", NULL, "", "/nowhere", ".", "t.txt",
       "/dev/null")
VALUES(mn_session_save__path, const char *, "s.state", NULL, "", "/nowhere/s", ".", "/dev/full")
VALUES(mn_session_load__path, const char *, "first.state", NULL, "", "/nowhere", ".", "t.txt",
       "/dev/null", "run/last/model.safetensors")
VALUES(mn_task_open__name, const char *, "mqar", NULL, "", "none such")
VALUES(mn_task_open__options, const char *, NULL, "", "{", "[]", "7", "{\"none\": 1}",
       "{\"length\": -1}", "{\"length\": 9223372036854775807}", "{\"vocab\": 0}")
VALUES(mn_task_draw__split, const char *, "train", NULL, "", "none such")
#define LAYERS                                                                                     \
    "attention", "mla", "diff_attention", "relu_attention", "hypermlp", "mamba1", "mamba2",        \
    "rg_lru", "mlstm", "gla+ccq", "gsa", "hgrn2", "rwkv7", "comba", "gated_deltaproduct",          \
    "longhorn", "mesa", "palimpsa", "kla", "bayes", "bayes_rotation"
VALUES(mn_describe_layer__name, const char *, "gdn", NULL, "", "none such", "+ccq", "gdn+gdn",
       LAYERS)
VALUES(mn_describe_layer__options, const char *, NULL, "", "{", "[]", "{\"none\": 1}",
       "{\"num_heads\": 0}", "{\"num_heads\": 4611686018427387904}", "{\"index\": -1}")
VALUES(mn_describe_model__config, const char *, "{\"layers\": \"gdn\", \"hidden_size\": 16}", NULL,
       "", "{", "[]", "{}", "{\"model_type\": 7}", "{\"layers\": \"none such\"}")
VALUES(mn_layer_start__name, const char *, "gdn", NULL, "", "none such", "+ccq", LAYERS)
VALUES(mn_layer_start__options, const char *, NULL, "", "{", "[]", "{\"none\": 1}",
       "{\"num_heads\": 0}", "{\"num_heads\": 4611686018427387904}", "{\"index\": -1}")
VALUES(mn_layer_start__parameter, const char *, "q_proj.weight", NULL, "", "none such")

VALUES(bool__special, bool, false, true)
VALUES(const_float_pp__variance, const float **, &variance, NULL)
VALUES(const_int32_t_p__ids, const int32_t *, right_tokens, NULL, low_tokens, high_tokens)
VALUES(const_int32_t_p__recent, const int32_t *, right_tokens, NULL, low_tokens, high_tokens)
VALUES(const_int32_t_p__tokens, const int32_t *, right_tokens, NULL, low_tokens, high_tokens)
VALUES(const_int32_t_pconst_p__tokens, const int32_t *const *, right_rows, NULL, low_rows, no_rows)
VALUES(const_int64_t_p__counts, const int64_t *, right_counts, NULL, zero_counts, low_counts,
       one_counts)
VALUES(double__range, double, 0.02, NAN, INFINITY, -1.0, 1e300)
VALUES(double_p__log_probabilities, double *, doubles, NULL)
VALUES(double_p__loss, double *, &loss, NULL)
VALUES(float_p__features, float *, NULL, floats)
VALUES(float_p__values, float *, floats, NULL)
VALUES(int32_t__token, int32_t, 97, -1, 256, INT32_MAX, INT32_MIN)
VALUES(int32_t_p__targets, int32_t *, ints + NUMBERS / 2, NULL)
VALUES(int32_t_p__token, int32_t *, &made_token, NULL)
VALUES(int32_t_p__tokens, int32_t *, ints, NULL)
VALUES(int64_t__D, int64_t, 16, 0, -1, INT64_MIN, INT64_MAX, INT64_C(1) << 62, INT64_C(1) << 59)
VALUES(int64_t__context, int64_t, 16, 0, -1, INT64_MIN, INT64_MAX, INT64_C(1) << 62)
VALUES(int64_t__count, int64_t, 3, 0, -1, INT64_MIN)
VALUES(int64_t__first, int64_t, 0, -1, INT64_MIN, INT64_MAX, INT64_C(1) << 62)
VALUES(int64_t__n, int64_t, 2, 0, -1, INT64_MIN)
VALUES(int64_t__n_recent, int64_t, 3, 0, -1, INT64_MIN)
VALUES(int64_t_p__classes, int64_t *, sizes, NULL)
VALUES(int64_t_p__count, int64_t *, sizes, NULL)
VALUES(int64_t_p__features, int64_t *, sizes + 1, NULL)
VALUES(int64_t_p__length, int64_t *, sizes + 2, NULL)
VALUES(int64_t_p__vocabulary, int64_t *, sizes + 3, NULL)
VALUES(int__i, int, 0, -1, 99, INT_MAX, INT_MIN)
VALUES(size_t__size, size_t, 4, 0)
VALUES(size_t_p__size, size_t *, &bytes, NULL)
VALUES(uint64_t__seed, uint64_t, 1, UINT64_MAX)
VALUES(uint64_t__stream, uint64_t, 1, UINT64_MAX)
VALUES(void_p__stream, void *, NULL)

/* ---- calls ----------------------------------------------------------------------------------- */

static const char marker[] = "nothing has failed yet";
static mn_status returned;    // by the last call

static const char *said(mn_status st) {
    returned = st;
    if (st < MN_OK || st >= MN_STATUS_COUNT) return "returns no status";
    if (st == MN_ERR_INTERNAL) return "says that the library is wrong";
    return st != MN_OK && strcmp(mn_last_error(), marker) == 0 ? "fails without a word" : NULL;
}

/* `made` is what a call stored, where it was told where (`nowhere`: it was not). */
static const char *judge(mn_status st, const void *made, bool nowhere) {
    returned = st;
    if (nowhere) return st == MN_OK ? "succeeds without a place for its result" : said(st);
    if (st == MN_OK) return made && made != poison ? NULL : "succeeds and makes nothing";
    return made ? "leaves something where its result belongs" : said(st);
}

static void drop_mn_context(mn_context *made) {
    mn_context_destroy(made);
}
static void drop_mn_model(mn_model *made) {
    mn_model_close(made);
}
static void drop_mn_session(mn_session *made) {
    (void)mn_session_step(made, 97);
    mn_session_destroy(made);
}
static void drop_mn_snapshot(mn_snapshot *made) {
    mn_snapshot_destroy(made);
}
static void drop_mn_batch(mn_batch *made) {
    mn_batch_destroy(made);
}
static void drop_mn_train(mn_train *made) {
    (void)mn_train_step(made, NULL);
    mn_train_destroy(made);
}
static void drop_mn_task(mn_task *made) {
    mn_task_close(made);
}
static void drop_mn_tokenizer(mn_tokenizer *made) {
    mn_tokenizer_destroy(made);
}
static void drop_char(char *made) {
    free(made);
}
static void drop_int32_t(int32_t *made) {
    free(made);
}

#include "api_calls.inc"

/* ---- cases ----------------------------------------------------------------------------------- */

typedef struct wrong_call {
    int call, pick[MOST_ARGUMENTS];
} wrong_call;

enum { MOST_CASES = 1 << 15 };
static wrong_call cases[MOST_CASES];
static int64_t n_cases;

static void add(const wrong_call *one) {
    if (n_cases < MOST_CASES) cases[n_cases++] = *one;
}

static void list_cases(void) {
    for (int call = 0; call < (int)MN_COUNTOF(api_calls); call++) {
        const api_call *c = &api_calls[call];
        wrong_call one = { .call = call };
        add(&one);    // all arguments right
        for (int i = 0; i < c->n; i++) {
            for (one.pick[i] = 1; one.pick[i] < c->counts[i](); one.pick[i]++) {
                add(&one);
                for (int k = i + 1; k < c->n; k++) {
                    for (one.pick[k] = 1; one.pick[k] < c->counts[k](); one.pick[k]++) add(&one);
                    one.pick[k] = 0;
                }
            }
            one.pick[i] = 0;
        }
    }
}

static void print_case(FILE *to, int64_t at, const char *wrong) {
    const api_call *c = &api_calls[cases[at].call];
    fprintf(to, "%s, values", c->name);
    for (int i = 0; i < c->n; i++) fprintf(to, " %d", cases[at].pick[i]);
    fprintf(to, "%s%s\n", *wrong ? ": " : "", wrong);
}

static void tell(int64_t at) {
    print_case(stdout, at, "");
}

static void try(int64_t at) {
    const api_call *c = &api_calls[cases[at].call];
    bool right = strcmp(c->name, "mn_context_use_stream") != 0;    // which a CPU has not
    for (int i = 0; i < c->n; i++) right = right && cases[at].pick[i] == 0;
    (void)mn_fail(MN_OK, "%s", marker);
    const char *wrong = c->run(cases[at].pick);
    if (!wrong && right && c->fails && returned != MN_OK) {
        wrong = "fails with every argument right";
        fprintf(stderr, "%s\n", mn_last_error());
    }
    if (!wrong) return;
    print_case(stderr, at, wrong);
    _exit(1);
}

/* A run of three steps: the model, tokenizer and state that calls are given. */
static void make_files(void) {
    FILE *text = fopen("t.txt", "w");
    for (int i = 0; text && i < 200; i++) fprintf(text, "line %d\n", i * 7919 % 1009);
    if (!text || fclose(text) != 0) need(mn_fail(MN_ERR_IO, "t.txt cannot be written"));
    for (int i = 0; i < THREE; i++) need(mn_train_step(a_train(), NULL));
    need(mn_train_save(a_train()));
    need(mn_session_save(a_session(&session, &model), "first.state"));
    mn_session_destroy(session);
    mn_model_close(model);
    mn_train_destroy(train);
    mn_context_destroy(context);
    forget_all();
}

int main(void) {
    char folder[] = "attack_api_XXXXXX", remove[64];
    if (!mkdtemp(folder) || chdir(folder) != 0) {
        perror(folder);
        return 2;
    }
    make_files();
    list_cases();
    const int64_t broken = attack_all(n_cases, 100, try, tell);
    snprintf(remove, sizeof remove, "rm -rf ../%s", folder);
    if (system(remove) != 0) return 2;
    printf("%zu calls, %" PRId64 " wrong ones, %" PRId64 " broke something\n",
           MN_COUNTOF(api_calls), n_cases, broken);
    return broken > 0;
}
