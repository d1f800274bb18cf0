/* task.c - mneme task: lists the synthetic tasks, describes one, prints samples of it. */
#include "tasks/task.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/command.h"
#include "cli/options.h"
#include "io/json_write.h"

typedef struct options {
    const char *name, *setting;
    mn_json changes;             // {} and what --set says
    int dump, first;
    uint64_t seed;
    mn_split split;
    bool json, speed;
} options;

static void print_help(void) {
    puts("usage: mneme task                      list the tasks\n"
         "       mneme task NAME [options]       describe one: law, options, published settings\n"
         "       mneme task NAME --dump N        print samples of it\n\n"
         "A sample is a function of options, seed, split and index. A target of -100 asks for "
         "nothing.\n"
         "Samples are printed one a line as {\"index\", \"input\", \"target\"}, and with "
         "\"prompt\" and\n"
         "\"answers\" where the task is text; with --json as one document, under \"samples\".\n\n"
         "  --dump N            print N samples\n"
         "  --first I           from sample I on (default: 0)\n"
         "  --seed S            of the samples (default: 0)\n"
         "  --split NAME        train, valid or test (default: test)\n"
         "  --setting NAME      a published setting of the task\n"
         "  --set KEY=VALUE     an option of the task; may be repeated\n"
         "  --speed             how many tokens a second one thread makes\n"
         "  --json              one JSON document");
}

static int failed(void) {
    fprintf(stderr, "mneme task: %s\n", mn_last_error());
    return 1;
}

/* ---- options --------------------------------------------------------------------------------- */

static bool read_seed(void *to, const char *text) {
    uint64_t *out = to;
    char *end;
    if (*text < '0' || *text > '9') return false;
    *out = strtoull(text, &end, 10);
    return *end == '\0';
}

static bool read_split(void *to, const char *value) {
    return mn_split_find(to, value);
}

static bool read_change(void *to, const char *value) {
    return mn_task_set(to, value) == MN_OK;
}

static int parse(options *o, int argc, char **argv) {
    const mn_option rows[] = {
        { "--dump", .count = &o->dump, .low = 1, .high = INT32_MAX },
        { "--first", .count = &o->first, .low = 0, .high = INT32_MAX },
        { "--seed", .read = read_seed, .to = &o->seed, .needs = "a whole number" },
        { "--split", .read = read_split, .to = &o->split, .needs = "train, valid or test" },
        { "--setting", .text = &o->setting },
        { "--set", .read = read_change, .to = &o->changes, .needs = "KEY=VALUE" },
        { "--json", .flag = &o->json },
        { "--speed", .flag = &o->speed },
        { NULL, .text = &o->name },
    };
    const int status = mn_options_read(rows, MN_COUNTOF(rows), "task", argc, argv);
    if (status != 0 || o->name || !(o->dump || o->speed)) return status;
    return mn_options_mistake("task", "", "name a task");
}

/* The options of the published setting under what --set says. */
static mn_status lay_setting(options *o) {
    if (!o->setting) return MN_OK;
    for (int i = 0; i < mn_task_setting_count(); i++) {
        const mn_task_setting s = mn_task_setting_row(i);
        if (strcmp(s.task, o->name) != 0 || strcmp(s.name, o->setting) != 0) continue;
        json_t *said = json_copy(o->changes.value);
        mn_status st = mn_task_apply(&o->changes, s.changes);
        if (!said || json_object_update(o->changes.value, said) != 0) {
            st = mn_fail(MN_ERR_MEMORY, "no memory for options");
        }
        json_decref(said);
        return st;
    }
    return mn_fail(MN_ERR_ARGUMENT, "%s: there is no setting \"%s\"; mneme task %s lists them",
                   o->name, o->setting, o->name);
}

/* ---- the list -------------------------------------------------------------------------------- */

/* Prints `root` and lets go of it; the exit status. */
static int print_json(json_t *root) {
    char *text = NULL;
    const mn_status st = root ? mn_json_text(&text, root, MN_JSON_PRETTY)
                              : mn_fail(MN_ERR_MEMORY, "no memory for the result");
    if (st == MN_OK) puts(text);
    free(text);
    json_decref(root);
    return st == MN_OK ? 0 : failed();
}

static int list_tasks(const options *o) {
    if (o->json) {
        json_t *list = json_array();
        for (int i = 0; i < mn_task_count(); i++) json_array_append_new(list, mn_task_json(i));
        return print_json(json_pack("{s:o}", "tasks", list));
    }
    for (int i = 0; i < mn_task_count(); i++) {
        printf("  %-16s %s\n", mn_task_row(i).name, mn_task_row(i).about);
    }
    return 0;
}

/* ---- one task -------------------------------------------------------------------------------- */

static void print_option(void *context, const char *key, const char *value, const char *about) {
    (void)context;
    printf("  %-14s %-12s %s\n", key, *value ? value : "-", about);
}

static void print_shape(const mn_task *task) {
    const mn_task_shape s = mn_task_shape_of(task);
    if (s.features > 0) printf("input    %" PRId64 " numbers", s.features);
    else printf("input    %" PRId64 " tokens", s.vocab);
    printf(", target %" PRId64 " classes, %" PRId64 " places\n", s.classes, s.length);
}

static void print_settings(const char *name) {
    bool any = false;
    for (int k = 0; k < mn_task_setting_count(); k++) {
        const mn_task_setting s = mn_task_setting_row(k);
        if (strcmp(s.task, name) != 0) continue;
        if (!any) printf("\nsettings\n");
        any = true;
        printf("  %-18s %-14s train %-7" PRId64 " test %-7" PRId64 " %s\n", s.suite, s.name,
               s.train, s.test, s.changes);
    }
}

static int describe(const options *o) {
    const int row = mn_task_find(o->name);
    mn_task *task;
    const mn_status st = mn_task_create(&task, o->name, &o->changes);
    /* A task that needs to be told more, such as a folder, can still be described. */
    if (st != MN_OK && (row < 0 || json_object_size(o->changes.value) > 0)) return failed();
    if (o->json) {
        json_t *root = mn_task_json(row);
        const mn_task_shape s = task ? mn_task_shape_of(task) : (mn_task_shape){ 0 };
        if (task) {
            json_object_set_new(root, "shape", json_pack("{s:I, s:I, s:I, s:I}", "vocab",
                                (json_int_t)s.vocab, "classes", (json_int_t)s.classes, "features",
                                (json_int_t)s.features, "length", (json_int_t)s.length));
        }
        mn_task_destroy(task);
        return print_json(root);
    }
    printf("%s - %s\n\n", o->name, mn_task_row(row).about);
    if (task) print_shape(task);
    else printf("input    %s\n", mn_last_error());
    printf("metric   %s\n\noptions\n", mn_task_row(row).metric);
    mn_task_options_list(row, print_option, NULL);
    print_settings(o->name);
    mn_task_destroy(task);
    return 0;
}

/* ---- samples --------------------------------------------------------------------------------- */

typedef struct room {
    int32_t *input, *target;
    float *features;
} room;

static mn_status make_room(room *out, const mn_task *task) {
    const mn_task_shape s = mn_task_shape_of(task);
    const size_t n = (size_t)s.length, width = (size_t)s.features;
    *out = (room){ .input = calloc(n, sizeof *out->input),
                   .target = calloc(n, sizeof *out->target) };
    if (width > 0 && n <= SIZE_MAX / width) out->features = calloc(n * width, sizeof(float));
    if (out->input && out->target && (width == 0 || out->features)) return MN_OK;
    return mn_fail(MN_ERR_MEMORY, "no memory for a sample of %" PRId64 " tokens", s.length);
}

static void free_room(room *r) {
    free(r->input);
    free(r->target);
    free(r->features);
}

static mn_status make_sample(room *to, mn_task *task, const options *o, int64_t index) {
    if (to->features) {
        return mn_task_vectors(task, o->seed, o->split, index, to->features, to->target);
    }
    return mn_task_sample(task, o->seed, o->split, index, to->input, to->target);
}

static void print_ids(const char *name, const int32_t *ids, int64_t n) {
    printf("\"%s\": [", name);
    for (int64_t i = 0; i < n; i++) printf(i > 0 ? ", %" PRId32 : "%" PRId32, ids[i]);
    putchar(']');
}

static void print_vectors(const char *name, const float *x, int64_t n, int64_t width) {
    printf("\"%s\": [", name);
    for (int64_t i = 0; i < n; i++) {
        for (int64_t k = 0; k < width; k++) {
            printf("%s%.9g", k > 0 ? ", " : i > 0 ? "], [" : "[", (double)x[i * width + k]);
        }
    }
    printf("%s]", n > 0 ? "]" : "");
}

static mn_status print_texts(mn_task *task, const options *o, int64_t index) {
    mn_task_text text;
    mn_status st = mn_task_text_of(task, o->seed, o->split, index, &text);
    if (st != MN_OK) return st;
    json_t *answers = json_array();
    for (int i = 0; i < text.n_answers; i++) {
        json_array_append_new(answers, json_string(text.answers[i]));
    }
    json_t *prompt = json_string(text.prompt);
    char *list = answers ? json_dumps(answers, 0) : NULL;
    char *quoted = prompt ? json_dumps(prompt, JSON_ENCODE_ANY) : NULL;
    if (list && quoted) {
        printf(", \"prompt\": %s, \"answers\": %s, \"answer\": \"", quoted, list);
        for (int i = 0; i < text.n_answers; i++) printf("%s%s", i ? ", " : "", text.answers[i]);
        printf("\", \"answer_token\": [");
        for (int i = 0; i < text.n_answers; i++) {
            printf("%s%" PRId64, i ? ", " : "", text.answer_token[i]);
        }
        printf("], \"prompt_tokens\": %" PRId64, text.prompt_tokens);
    } else {
        st = mn_fail(MN_ERR_FORMAT, "%s: a prompt that is not UTF-8", o->name);
    }
    free(list);
    free(quoted);
    json_decref(answers);
    json_decref(prompt);
    return st;
}

static mn_status print_sample(mn_task *task, room *r, const options *o, int64_t index) {
    mn_status st = make_sample(r, task, o, index);
    if (st != MN_OK) return st;
    const int64_t n = mn_task_used(task), width = mn_task_shape_of(task).features;
    printf("{\"index\": %" PRId64 ", ", index);
    if (r->features) print_vectors("input", r->features, n, width);
    else print_ids("input", r->input, n);
    printf(", ");
    print_ids("target", r->target, n);
    if (mn_task_has_text(task)) st = print_texts(task, o, index);
    putchar('}');
    return st;
}

/* Says where a split of finite size begins anew. */
static void tell_end(const mn_task *task, const options *o) {
    const int64_t all = mn_task_examples(task, o->split);
    if (all == 0 || (int64_t)o->first + o->dump <= all) return;
    fprintf(stderr, "mneme task: the split %s of %s has %" PRId64 " samples: those from %" PRId64
            " on are the first ones again\n", mn_split_name(o->split), o->name, all, all);
}

static mn_status dump(mn_task *task, const options *o) {
    tell_end(task, o);
    const mn_task_shape s = mn_task_shape_of(task);
    room r;
    mn_status st = make_room(&r, task);
    if (st == MN_OK && o->json) {
        printf("{\"task\": \"%s\", \"seed\": %" PRIu64 ", \"split\": \"%s\", \"vocab\": %" PRId64
               ", \"classes\": %" PRId64 ", \"features\": %" PRId64 ", \"length\": %" PRId64
               ", \"samples\": [\n", o->name, o->seed, mn_split_name(o->split), s.vocab, s.classes,
               s.features, s.length);
    }
    for (int64_t i = 0; i < o->dump && st == MN_OK; i++) {
        st = print_sample(task, &r, o, o->first + i);
        puts(o->json && i + 1 < o->dump ? "," : "");
    }
    if (st == MN_OK && o->json) puts("]}");
    free_room(&r);
    if (st == MN_OK && (fflush(stdout) != 0 || ferror(stdout))) {
        st = mn_fail(MN_ERR_IO, "the samples could not be written");
    }
    return st;
}

/* Samples for a second, after the first of them. */
static mn_status measure(mn_task *task, const options *o) {
    room r;
    mn_status st = make_room(&r, task);
    double seconds = 0.0;
    int64_t tokens = 0, samples = 0;
    if (st == MN_OK) st = make_sample(&r, task, o, 0);
    const double begin = mn_seconds();
    while (st == MN_OK && seconds < 1.0) {
        st = make_sample(&r, task, o, ++samples);
        tokens += mn_task_used(task);
        seconds = mn_seconds() - begin;
    }
    free_room(&r);
    if (st != MN_OK) return st;
    const double rate = (double)tokens / seconds;
    if (o->json) {
        printf("{\"task\": \"%s\", \"tokens_per_second\": %.0f, \"samples_per_second\": %.0f}\n",
               o->name, rate, (double)samples / seconds);
    } else {
        printf("%s: %.2f million tokens a second, %.0f samples a second\n", o->name, rate / 1e6,
               (double)samples / seconds);
    }
    return MN_OK;
}

static int run(options *o) {
    if (!o->name) return list_tasks(o);
    if (lay_setting(o) != MN_OK) return failed();
    if (o->dump == 0 && !o->speed) return describe(o);
    mn_task *task;
    mn_status st = mn_task_create(&task, o->name, &o->changes);
    if (st == MN_OK) st = o->dump > 0 ? dump(task, o) : measure(task, o);
    mn_task_destroy(task);
    return st == MN_OK ? 0 : failed();
}

int mn_command_task(int argc, char **argv) {
    options o = { .changes = { .value = json_object(), .name = "--set" }, .split = MN_SPLIT_TEST };
    if (!o.changes.value) return 1;
    int status = parse(&o, argc, argv);
    if (status < 0) print_help();
    if (status == 0) status = run(&o);
    json_decref(o.changes.value);
    return status < 0 ? 0 : status;
}
