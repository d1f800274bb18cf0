/* task_run.c - a task as batches to train on and as questions to a model. */
#include "experiments/task_run.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "eval/answers.h"

/* One set of examples. */
typedef struct example_set {
    mn_task *task;
    mn_task_feed feed;
    mn_token_batch batch;          // what `fill` made last
} example_set;

typedef struct named_set {
    const char *name;        // borrowed from the job
    example_set set;
} named_set;

struct mn_task_run {
    example_set train, test;
    example_set *segments;   // training sets one after the other, in place of `train`
    int64_t n_segments;
    bool fresh;              // each pass over the segments draws new examples
    named_set *more;
    int64_t n_more;
    mn_evaluation how;
};

/* ---- sets ------------------------------------------------------------------------------------ */

static mn_status open_set(example_set *s, const char *name, const mn_json *options, mn_split split,
                          uint64_t seed, int64_t rows, int64_t examples) {
    mn_status st = mn_task_create(&s->task, name, options);
    if (st != MN_OK) return st;
    if (mn_task_shape_of(s->task).features > 0) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: its inputs are numbers, and models read tokens",
                       name);
    }
    if (rows < 1 || examples < 0) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: batches of %" PRId64 " rows, %" PRId64 " examples",
                       name, rows, examples);
    }
    s->feed = (mn_task_feed){ .split = split, .seed = seed, .rows = rows, .examples = examples,
                              .in_order = split == MN_SPLIT_TEST };
    return mn_task_batch_create(&s->batch, s->task, rows);
}

static void close_set(example_set *s) {
    mn_token_batch_free(&s->batch);
    mn_task_destroy(s->task);
}

static int64_t segments_epoch(const mn_task_run *run) {
    int64_t steps = 0;
    for (int64_t i = 0; i < run->n_segments; i++) {
        steps += mn_task_epoch(run->segments[i].task, &run->segments[i].feed);
    }
    return steps;
}

static int64_t longest_segment(const mn_task_run *run) {
    int64_t most = 0;
    for (int64_t i = 0; i < run->n_segments; i++) {
        most = mn_max(most, mn_task_shape_of(run->segments[i].task).length);
    }
    return most;
}

static mn_status fill(void *context, int64_t step, int64_t rows, int64_t length, int32_t *tokens,
                      int32_t *targets) {
    example_set *s = context;
    const mn_status st = mn_task_fill(&s->batch, NULL, s->task, &s->feed, step);
    if (st != MN_OK) return st;
    const size_t bytes = (size_t)(rows * length) * sizeof *tokens;
    memcpy(tokens, s->batch.tokens, bytes);
    memcpy(targets, s->batch.targets, bytes);
    return MN_OK;
}

/* A seed for each segment: else sample i of all would show the same keys and values, and a model
 * could learn by heart what it is shown in a tenth as many samples. */
static uint64_t segment_seed(uint64_t seed, int64_t i) {
    return seed + (uint64_t)(i + 1) * 0x9e3779b97f4a7c15u;
}

/* Segments one after the other, none mixed with the next: the same batches in every epoch, or with
 * `fresh` others. Rows of shorter ones ask for nothing behind their end. */
static mn_status fill_segment(void *context, int64_t step, int64_t rows, int64_t length,
                              int32_t *tokens, int32_t *targets) {
    mn_task_run *run = context;
    int64_t at = step % segments_epoch(run);
    for (int64_t i = 0; i < run->n_segments; i++) {
        example_set *s = &run->segments[i];
        const int64_t epoch = mn_task_epoch(s->task, &s->feed);
        if (at >= epoch) {
            at -= epoch;
            continue;
        }
        mn_task_feed feed = s->feed;
        if (run->fresh) {
            feed.examples = 0;
            at += step / segments_epoch(run) * epoch;
        }
        const mn_status st = mn_task_fill(&s->batch, NULL, s->task, &feed, at);
        const int64_t own = s->batch.length;
        for (int64_t r = 0; st == MN_OK && r < rows; r++) {
            memcpy(tokens + r * length, s->batch.tokens + r * own, (size_t)own * sizeof *tokens);
            memcpy(targets + r * length, s->batch.targets + r * own,
                   (size_t)own * sizeof *targets);
            for (int64_t t = own; t < length; t++) {
                tokens[r * length + t] = 0;
                targets[r * length + t] = MN_NO_TARGET;
            }
        }
        return st;
    }
    return mn_fail(MN_ERR_INTERNAL, "no segment of step %" PRId64, step);
}

static mn_source source_of(example_set *s) {
    return (mn_source){ .context = s, .fill = fill, .rows = s->feed.rows,
                        .length = mn_task_shape_of(s->task).length,
                        .epoch = mn_max(mn_task_epoch(s->task, &s->feed), 1) };
}

/* ---- opening --------------------------------------------------------------------------------- */

static mn_status read_evaluation(mn_evaluation *how, const mn_json *job) {
    static const char *const keys[] = { "every", "metric", "select", "stop_at", "patience",
                                        "batch" };
    static const char *const metrics[] = { "token", "macro", "example", "sequence" };
    const mn_json at = mn_json_member(job, "evaluate");
    const char *select = "last";
    *how = (mn_evaluation){ .metric = "token", .batch = 128 };
    mn_status st = mn_json_expect_object(&at);
    if (st == MN_OK) st = mn_json_unknown_key(&at, keys, MN_COUNTOF(keys));
    if (st == MN_OK) st = mn_json_opt_i64(&how->every, &at, "every");
    if (st == MN_OK) st = mn_json_opt_i64(&how->patience, &at, "patience");
    if (st == MN_OK) st = mn_json_opt_i64(&how->batch, &at, "batch");
    if (st == MN_OK) st = mn_json_opt_f64(&how->stop_at, &at, "stop_at");
    if (st == MN_OK) st = mn_json_opt_text(&how->metric, &at, "metric");
    if (st == MN_OK) st = mn_json_opt_text(&select, &at, "select");
    if (st != MN_OK) return st;
    how->by_loss = strcmp(select, "loss") == 0;
    bool known = false;
    for (size_t i = 0; i < MN_COUNTOF(metrics); i++) known |= strcmp(metrics[i], how->metric) == 0;
    if (!known) return mn_json_fail(&at, "metric is token, macro, example or sequence");
    if (!how->by_loss && strcmp(select, "last") != 0) {
        return mn_json_fail(&at, "select is last or loss");
    }
    if (how->every < 0 || how->patience < 0 || !(how->stop_at >= 0.0)) {
        return mn_json_fail(&at, "every, patience and stop_at are 0 or more");
    }
    return MN_OK;
}

static mn_status open_more(mn_task_run *run, const mn_json *job, const char *name, uint64_t seed,
                           int64_t test) {
    const mn_json tests = mn_json_member(job, "tests");
    static const char *const keys[] = { "options", "test" };
    const int64_t n = mn_json_count(&tests);
    if (n == 0) return MN_OK;
    if (run->how.by_loss) {
        return mn_json_fail(&tests, "further tests ask the last model: evaluate.select has to be "
                            "last");
    }
    run->more = calloc((size_t)n, sizeof *run->more);
    if (!run->more) return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " tests", n);
    mn_status st = MN_OK;
    for (mn_json m = { 0 }; st == MN_OK && mn_json_next(&m, &tests);) {
        named_set *set = &run->more[run->n_more++];
        int64_t examples = test;
        const mn_json options = mn_json_member(&m, "options");
        set->name = m.name;
        st = mn_json_unknown_key(&m, keys, MN_COUNTOF(keys));
        if (st == MN_OK) st = mn_json_opt_i64(&examples, &m, "test");
        if (st == MN_OK) {
            st = open_set(&set->set, name, &options, MN_SPLIT_TEST, seed, run->how.batch, examples);
        }
    }
    return st;
}

/* "segments" of the task: [{options, train}]. */
static mn_status open_segments(mn_task_run *run, const mn_json *task, const char *name,
                               uint64_t seed, int64_t rows) {
    static const char *const keys[] = { "options", "train" };
    const mn_json list = mn_json_member(task, "segments");
    if (!mn_json_given(&list)) return MN_OK;
    mn_status st = mn_json_expect_list(&list);
    const int64_t n = mn_json_count(&list);
    if (st == MN_OK && n == 0) st = mn_json_fail(&list, "there is no segment in it");
    if (st != MN_OK) return st;
    run->segments = calloc((size_t)n, sizeof *run->segments);
    if (!run->segments) return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " segments", n);
    for (int64_t i = 0; st == MN_OK && i < n; i++) {
        const mn_json one = mn_json_item(&list, i), options = mn_json_member(&one, "options");
        example_set *set = &run->segments[run->n_segments++];
        int64_t train = 0;
        st = mn_json_unknown_key(&one, keys, MN_COUNTOF(keys));
        if (st == MN_OK) st = mn_json_get_i64(&train, &one, "train");
        if (st == MN_OK && train < 1) st = mn_json_fail(&one, "train has to be 1 or more");
        if (st == MN_OK) {
            st = open_set(set, name, &options, MN_SPLIT_TRAIN, segment_seed(seed, i), rows, train);
        }
        set->feed.in_order = true;
    }
    return st == MN_OK ? mn_json_opt_bool(&run->fresh, task, "fresh") : st;
}

static mn_status open_sets(mn_task_run *run, const mn_json *job) {
    const mn_json task = mn_json_member(job, "task"), train = mn_json_member(job, "train");
    const mn_json options = mn_json_member(&task, "options");
    const char *name = NULL;
    int64_t n_train = 0, n_test = 0, rows = 32, seed = 0;
    mn_status st = mn_json_get_text(&name, &task, "name");
    if (st == MN_OK) st = mn_json_opt_i64(&n_train, &task, "train");
    if (st == MN_OK) st = mn_json_opt_i64(&n_test, &task, "test");
    if (st == MN_OK) st = mn_json_opt_i64(&rows, &train, "batch");
    if (st == MN_OK) st = mn_json_opt_i64(&seed, job, "seed");
    if (st == MN_OK && n_test < 1) st = mn_json_fail(&task, "test has to be 1 or more");
    const uint64_t draw = (uint64_t)seed;
    if (st == MN_OK) {
        st = open_set(&run->train, name, &options, MN_SPLIT_TRAIN, draw, rows, n_train);
    }
    if (st == MN_OK) st = open_segments(run, &task, name, draw, rows);
    if (st == MN_OK) {
        st = open_set(&run->test, name, &options, MN_SPLIT_TEST, draw, run->how.batch, n_test);
    }
    return st == MN_OK ? open_more(run, job, name, draw, n_test) : st;
}

mn_status mn_task_run_open(mn_task_run **out, const mn_json *job) {
    *out = NULL;
    mn_task_run *run = calloc(1, sizeof *run);
    if (!run) return mn_fail(MN_ERR_MEMORY, "no memory for a task");
    mn_status st = read_evaluation(&run->how, job);
    if (st == MN_OK) st = open_sets(run, job);
    if (st == MN_OK && run->how.every == 0) run->how.every = mn_task_run_epoch(run);
    if (st == MN_OK) *out = run;
    else mn_task_run_close(run);
    return st;
}

void mn_task_run_close(mn_task_run *run) {
    if (!run) return;
    for (int64_t i = 0; i < run->n_more; i++) close_set(&run->more[i].set);
    for (int64_t i = 0; i < run->n_segments; i++) close_set(&run->segments[i]);
    free(run->segments);
    close_set(&run->train);
    close_set(&run->test);
    free(run->more);
    free(run);
}

int64_t mn_task_run_epoch(const mn_task_run *run) {
    return run->n_segments > 0 ? segments_epoch(run)
                               : mn_task_epoch(run->train.task, &run->train.feed);
}

int64_t mn_task_run_vocab(const mn_task_run *run) {
    int64_t most = 0;
    for (int64_t i = -1 - run->n_segments; i < run->n_more; i++) {
        const example_set *set = i < -1 ? &run->segments[-2 - i]
                                        : i < 0 ? &run->train : &run->more[i].set;
        const mn_task_shape shape = mn_task_shape_of(set->task);
        most = mn_max(most, mn_max(shape.vocab, shape.classes));
    }
    return most;
}

int64_t mn_task_run_longest(const mn_task_run *run) {
    int64_t most = mn_max(mn_task_shape_of(run->train.task).length, longest_segment(run));
    for (int64_t i = 0; i < run->n_more; i++) {
        most = mn_max(most, mn_task_shape_of(run->more[i].set.task).length);
    }
    return most;
}

const mn_evaluation *mn_task_run_evaluation(const mn_task_run *run) {
    return &run->how;
}

mn_status mn_task_run_example(mn_task_run *run, int64_t index, int32_t *tokens, int32_t *targets,
                              int64_t *length, mn_task_text *text) {
    mn_task *task = run->test.task;
    const uint64_t seed = run->test.feed.seed;
    mn_status st = mn_task_sample(task, seed, MN_SPLIT_TEST, index, tokens, targets);
    *length = mn_task_used(task);
    if (st == MN_OK && text && mn_task_has_text(task)) {
        st = mn_task_text_of(task, seed, MN_SPLIT_TEST, index, text);
    }
    return st;
}

mn_task *mn_task_run_asked(mn_task_run *run, uint64_t *seed) {
    *seed = run->test.feed.seed;
    return run->test.task;
}

mn_source mn_task_run_source(mn_task_run *run) {
    if (run->n_segments == 0) return source_of(&run->train);
    return (mn_source){ .context = run, .fill = fill_segment, .rows = run->train.feed.rows,
                        .length = longest_segment(run), .epoch = segments_epoch(run) };
}

/* ---- asking ---------------------------------------------------------------------------------- */

typedef struct inquiry {
    example_set *set;
    mn_metric *metric;
    int32_t *answers;
    int8_t *groups;          // NULL: the task has none
} inquiry;

static void keep_answer(void *context, int64_t place, int32_t target, int32_t answer) {
    (void)target;
    ((int32_t *)context)[place] = answer;
}

static mn_status count_batch(const inquiry *q) {
    const mn_token_batch *b = &q->set->batch;
    for (int64_t row = 0; q->groups && row < b->rows; row++) {
        const int64_t at = row * b->length;
        mn_task_group(q->set->task, b->tokens + at, b->targets + at, q->groups + at);
    }
    return mn_metric_add(q->metric, q->answers, b->targets, q->groups, b->rows, b->length);
}

static mn_status open_inquiry(inquiry *q, example_set *set, int64_t classes) {
    const size_t n = (size_t)(set->batch.rows * set->batch.length);
    const int groups = mn_task_groups(set->task);
    *q = (inquiry){ .set = set, .answers = calloc(n, sizeof *q->answers),
                    .groups = groups > 0 ? calloc(n, sizeof *q->groups) : NULL };
    if (!q->answers || (groups > 0 && !q->groups)) {
        return mn_fail(MN_ERR_MEMORY, "no memory for the answers of %zu places", n);
    }
    return mn_metric_create(&q->metric, classes, groups);
}

static void close_inquiry(inquiry *q) {
    mn_metric_destroy(q->metric);
    free(q->answers);
    free(q->groups);
}

static json_t *tell(const inquiry *q, double loss) {
    const mn_metric_result r = mn_metric_read(q->metric);
    json_t *out = json_pack("{s:o, s:o, s:o, s:o, s:o, s:I}", "loss", mn_json_real(loss), "token",
                            mn_json_real(r.token), "macro", mn_json_real(r.macro), "example",
                            mn_json_real(r.example), "sequence", mn_json_real(r.sequence),
                            "answers", (json_int_t)r.answers);
    if (!q->groups) return out;
    json_t *groups = json_object();
    for (int i = 0; i < mn_task_groups(q->set->task); i++) {
        json_object_set_new(groups, mn_task_group_name(q->set->task, i),
                            mn_json_real(mn_metric_group(q->metric, i)));
    }
    json_object_set_new(out, "groups", groups);
    return out;
}

static mn_status ask(json_t **answers, double *loss, example_set *set, mn_tape *tape,
                     mn_model *model) {
    inquiry q;
    mn_loader *loader = NULL;
    const mn_source source = source_of(set);
    double sum = 0.0;
    int64_t counted = 0;
    mn_status st = open_inquiry(&q, set, mn_model_describe(model)->vocab_size);
    if (st == MN_OK) st = mn_loader_from_source(&loader, &source);
    for (int64_t i = 0; st == MN_OK && i < source.epoch; i++) {
        double mean = 0.0;
        const int64_t before = mn_metric_read(q.metric).answers;
        st = mn_answers(model, tape, loader, i, 1, keep_answer, q.answers, &mean);
        if (st == MN_OK) st = count_batch(&q);
        const int64_t here = mn_metric_read(q.metric).answers - before;
        sum += mean * (double)here;
        counted += here;
    }
    *loss = sum / (double)mn_max(counted, 1);
    if (st == MN_OK) *answers = tell(&q, *loss);
    if (st == MN_OK && !*answers) st = mn_fail(MN_ERR_MEMORY, "no memory for answers");
    mn_loader_destroy(loader);
    close_inquiry(&q);
    return st;
}

mn_status mn_task_run_ask(json_t **answers, double *loss, double *score, mn_task_run *run,
                          mn_tape *tape, mn_model *model) {
    const mn_status st = ask(answers, loss, &run->test, tape, model);
    *score = NAN;
    if (st != MN_OK) return st;
    const json_t *value = json_object_get(*answers, run->how.metric);
    if (json_is_number(value)) *score = json_number_value(value);
    return json_object_set_new(*answers, "score", mn_json_real(*score)) == 0
               ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for answers");
}

mn_status mn_task_run_tests(json_t **answers, mn_task_run *run, mn_tape *tape, mn_model *model) {
    mn_status st = MN_OK;
    *answers = NULL;
    if (run->n_more == 0) return MN_OK;
    *answers = json_object();
    for (int64_t i = 0; st == MN_OK && i < run->n_more; i++) {
        json_t *one = NULL;
        double loss;
        st = ask(&one, &loss, &run->more[i].set, tape, model);
        if (one) json_object_set_new(*answers, run->more[i].name, one);
    }
    return st;
}
