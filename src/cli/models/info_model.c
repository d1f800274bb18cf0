/* info_model.c - what a model is and what it takes: layers, parameters, states, memory. */
#include "cli/models/info_model.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "io/json_write.h"
#include "model/families/dialect.h"
#include "model/folder/source.h"
#include "runtime/reserve.h"

enum { MOST_UNKNOWN = 8 };    // names that are told

/* Tensors of the files. */
typedef struct files {
    int64_t tensors, bytes, of[MN_STORED_COUNT];    // numbers of each type
    int64_t n_unknown;
    const char *unknown[MOST_UNKNOWN];
} files;

typedef struct facts {
    const mn_source *source;
    const mn_model_config *c;
    int batch;
    int64_t context, pass_tokens;
    files files;
    char wrong[512];                  // why the weights cannot be read; "": they can
    size_t fixed[MN_MAX_LAYERS], token[MN_MAX_LAYERS], state, cache;
    size_t weights, run_work, step;
    char no_run[512], no_train[512];    // why a plan fails
} facts;

/* ---- finding out ----------------------------------------------------------------------------- */

static int compare(const void *a, const void *b) {
    const void *const *x = a, *const *y = b;
    return *x < *y ? -1 : *x > *y;
}

static mn_status look_at_files(files *f, const mn_source *s) {
    const size_t n = (size_t)mn_model_params(s->model);
    const mn_stored_tensor **used = calloc(n, sizeof(*used));
    if (!used) return mn_fail(MN_ERR_MEMORY, "no memory to look at %s", s->folder);
    for (size_t i = 0; i < n; i++) {
        const char *name = mn_model_param_at(s->model, (int)i)->name;
        used[i] = mn_weights_whole(s->weights, mn_weights_find(s->weights, s->model, name));
    }
    qsort(used, n, sizeof *used, compare);
    for (int i = 0; i < mn_weights_files(s->weights); i++) {
        const mn_safetensors *file = mn_weights_file(s->weights, i);
        for (int64_t k = 0; k < mn_safetensors_count(file); k++) {
            const mn_stored_tensor *t = mn_safetensors_at(file, k);
            f->tensors++;
            f->bytes += (int64_t)t->bytes;
            f->of[t->dtype] += mn_stored_elements(t);
            if (bsearch(&t, used, n, sizeof *used, compare)) continue;
            if (f->n_unknown < MOST_UNKNOWN) f->unknown[f->n_unknown] = t->name;
            f->n_unknown++;
        }
    }
    free(used);
    return MN_OK;
}

static void keep_reason(char reason[512]) {
    snprintf(reason, 512, "%s", mn_last_error());
}

enum { PASS = 512, LONGEST = 4096 };    // tokens of a prefill pass; of a sequence unless asked for

static mn_status find_out(facts *f, mn_context *machine, int context) {
    mn_model *model = f->source->model;
    f->context = context ? context : mn_min(f->c->context, LONGEST);
    f->pass_tokens = mn_min(f->context, PASS);
    mn_status st = MN_OK;
    if (f->source->weights) {
        st = look_at_files(&f->files, f->source);
        if (st != MN_OK) return st;
        if (mn_weights_check(model, f->source->weights) != MN_OK) keep_reason(f->wrong);
    }
    f->weights = (size_t)mn_model_count(model) * sizeof(float);
    st = mn_sketch_state(f->fixed, f->token, model, machine);
    if (st == MN_OK) {
        st = mn_sketch_pass(&f->run_work, model, machine, f->batch, f->pass_tokens, false);
    }
    if (st != MN_OK) keep_reason(f->no_run);
    for (int i = 0; st == MN_OK && i < f->c->n_layers; i++) {
        f->state += f->fixed[i];
        f->cache += f->token[i];
    }
    st = mn_sketch_pass(&f->step, model, machine, f->batch, f->context, true);
    if (st != MN_OK) keep_reason(f->no_train);
    return MN_OK;
}

static size_t memory_to_run(const facts *f) {
    const size_t one = f->state + f->cache * (size_t)f->context;
    return f->weights + (size_t)f->batch * one + f->run_work;
}

static size_t memory_to_train(const facts *f) {
    return 4 * f->weights + f->step;    // parameters, gradients and two moments
}

/* ---- text ------------------------------------------------------------------------------------ */

enum { SHORT = 32 };

static const char *bytes_text(char out[SHORT], double bytes) {
    static const char *const units[] = { "B", "kB", "MB", "GB", "TB" };
    int unit = 0;
    for (; bytes >= 1000.0 && unit < 4; unit++) bytes /= 1000.0;
    snprintf(out, SHORT, unit ? "%.2f %s" : "%.0f %s", bytes, units[unit]);
    return out;
}

static const char *count_text(char out[SHORT], int64_t n) {
    if (n >= 1000000000) snprintf(out, SHORT, "%.2f B", (double)n / 1e9);
    else if (n >= 1000000) snprintf(out, SHORT, "%.2f M", (double)n / 1e6);
    else snprintf(out, SHORT, "%" PRId64, n);
    return out;
}

static int64_t params_of_block(const mn_model *model, int i) {
    int first, end;
    int64_t count = 0;
    mn_model_block_params(model, i, &first, &end);
    for (int k = first; k < end; k++) count += mn_model_param_at((mn_model *)model, k)->info.count;
    return count;
}

static const char *family_of(const facts *f) {
    const mn_json type = mn_json_member(&f->source->config, "model_type");
    const char *name = json_string_value(type.value);
    return name ? name : "mneme";
}

static void print_layers(const facts *f) {
    char a[SHORT], b[SHORT], c[SHORT];
    printf("\n  %-22s %7s %14s %16s %16s\n", "layers", "blocks", "parameters", "state",
           "of a token");
    for (int i = 0; i < f->c->n_layers; i++) {
        int64_t count = 0;
        size_t fixed = 0, token = 0;
        int n = 0;
        bool seen = false;
        for (int k = 0; k < f->c->n_layers; k++) {
            if (strcmp(f->c->names[k], f->c->names[i]) != 0) continue;
            seen |= k < i;
            n++;
            count += params_of_block(f->source->model, k);
            fixed += f->fixed[k];
            token += f->token[k];
        }
        if (seen) continue;
        printf("  %-22s %7d %14s %16s %16s\n", f->c->names[i], n, count_text(a, count),
               fixed ? bytes_text(b, (double)fixed) : "-",
               token ? bytes_text(c, (double)token) : "-");
    }
}

static void print_files(const facts *f) {
    char text[SHORT];
    const files *s = &f->files;
    if (!f->source->weights) {
        printf("  not readable %s\n", f->wrong);
        return;
    }
    printf("  files        %d, %s in %" PRId64 " tensors:", mn_weights_files(f->source->weights),
           bytes_text(text, (double)s->bytes), s->tensors);
    for (int i = 0, n = 0; i < MN_STORED_COUNT; i++) {
        if (!s->of[i]) continue;
        printf("%s %s %s", n++ ? "," : "", count_text(text, s->of[i]),
               mn_stored_dtype_name((mn_stored_dtype)i));
    }
    putchar('\n');
    if (f->wrong[0]) printf("  not readable %s\n", f->wrong);
    if (!s->n_unknown) return;
    printf("  not read     %" PRId64 " tensors that no parameter is made from:", s->n_unknown);
    for (int64_t i = 0; i < mn_min(s->n_unknown, MOST_UNKNOWN); i++) printf(" %s", s->unknown[i]);
    puts(s->n_unknown > MOST_UNKNOWN ? " ..." : "");
}

static void print_memory(const facts *f) {
    char a[SHORT], b[SHORT], c[SHORT], d[SHORT];
    size_t room = 0;
    printf("\n  state of a sequence    %s", bytes_text(a, (double)f->state));
    if (f->cache) {
        printf(" and %s a token: %s at %" PRId64, bytes_text(a, (double)f->cache),
               bytes_text(b, (double)(f->state + f->cache * (size_t)f->context)), f->context);
    }
    printf("\n  to run on a CPU        ");
    if (f->no_run[0]) puts(f->no_run);
    else {
        printf("%s: %s float32 weights, %s states of %d x %" PRId64 " tokens, %s work space\n",
               bytes_text(a, (double)memory_to_run(f)), bytes_text(b, (double)f->weights),
               bytes_text(c, (double)f->batch * (double)(f->state +
                                                         f->cache * (size_t)f->context)),
               f->batch, f->context, bytes_text(d, (double)f->run_work));
        printf("  on a GPU in bf16       %s more for bf16 weights; caches take half\n",
               bytes_text(a, (double)f->weights / 2.0));
    }
    printf("  to train               ");
    if (f->no_train[0]) puts(f->no_train);
    else {
        printf("%s: %s parameters, %s gradients, %s AdamW moments, %s activations of %d x %" PRId64
               " tokens\n", bytes_text(a, (double)memory_to_train(f)),
               bytes_text(b, (double)f->weights), bytes_text(c, (double)f->weights),
               bytes_text(d, 2.0 * (double)f->weights), bytes_text((char[SHORT]){ 0 },
                                                                   (double)f->step),
               f->batch, f->context);
    }
    if (mn_memory_available(&room) == MN_OK) {
        printf("  available here         %s\n", bytes_text(a, (double)room));
    }
}

static void print_text(const facts *f) {
    const mn_model *model = f->source->model;
    char layers[MN_MAX_LAYERS], a[SHORT], b[SHORT], c[SHORT];
    mn_layers_describe(layers, sizeof layers, f->c);
    printf("%s\n\n  family       %s\n", f->source->folder, family_of(f));
    printf("  layers       %d: %s\n", f->c->n_layers, layers);
    printf("  sizes        width %" PRId64 ", MLP %" PRId64 ", vocabulary %" PRId64
           ", context %" PRId64 "\n", f->c->hidden_size, f->c->intermediate_size,
           f->c->vocab_size, f->c->context);
    const int64_t all = mn_model_count(model), active = mn_model_count_active(model);
    printf("  parameters   %s (%" PRId64 "), %s without embeddings%s", count_text(a, all), all,
           count_text(b, mn_model_count_without_embeddings(model)),
           f->c->tied ? ", which are tied" : "");
    if (active != all) printf(", %s active in a token", count_text(c, active));
    putchar('\n');
    print_files(f);
    print_layers(f);
    print_memory(f);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static json_t *reason_or(const char *reason, json_t *value) {
    if (!reason[0]) return value;
    json_decref(value);
    return json_pack("{s:s}", "unknown", reason);
}

static json_t *layers_json(const facts *f) {
    json_t *list = json_array();
    for (int i = 0; i < f->c->n_layers; i++) {
        json_array_append_new(
            list, json_pack("{s:i, s:s, s:I, s:I, s:I}", "layer", i, "kind", f->c->names[i],
                            "parameters", (json_int_t)params_of_block(f->source->model, i),
                            "state_bytes", (json_int_t)f->fixed[i], "bytes_per_token",
                            (json_int_t)f->token[i]));
    }
    return list;
}

static json_t *files_json(const facts *f) {
    json_t *types = json_object(), *unknown = json_array();
    for (int i = 0; i < MN_STORED_COUNT; i++) {
        if (!f->files.of[i]) continue;
        json_object_set_new(types, mn_stored_dtype_name((mn_stored_dtype)i),
                            json_integer(f->files.of[i]));
    }
    for (int64_t i = 0; i < mn_min(f->files.n_unknown, MOST_UNKNOWN); i++) {
        json_array_append_new(unknown, json_string(f->files.unknown[i]));
    }
    return json_pack("{s:i, s:I, s:I, s:o, s:I, s:o, s:o}", "files",
                     f->source->weights ? mn_weights_files(f->source->weights) : 0, "tensors",
                     (json_int_t)f->files.tensors,
                     "bytes", (json_int_t)f->files.bytes, "numbers", types, "not_read",
                     (json_int_t)f->files.n_unknown, "not_read_names", unknown, "wrong",
                     f->wrong[0] ? json_string(f->wrong) : json_null());
}

static json_t *parameters_json(const mn_model *model, bool tied) {
    return json_pack("{s:I, s:I, s:I, s:b}", "total", (json_int_t)mn_model_count(model),
                     "without_embeddings", (json_int_t)mn_model_count_without_embeddings(model),
                     "active", (json_int_t)mn_model_count_active(model), "tied", (int)tied);
}

static mn_status print_json(const facts *f) {
    const mn_model_config *c = f->c;
    const size_t states = (size_t)f->batch * (f->state + f->cache * (size_t)f->context);
    json_t *run = json_pack("{s:I, s:I, s:I, s:I}", "bytes", (json_int_t)memory_to_run(f),
                            "weights", (json_int_t)f->weights, "states", (json_int_t)states,
                            "work", (json_int_t)f->run_work);
    json_t *train = json_pack("{s:I, s:I, s:I, s:I, s:I}", "bytes", (json_int_t)memory_to_train(f),
                              "parameters", (json_int_t)f->weights, "gradients",
                              (json_int_t)f->weights, "optimizer", 2 * (json_int_t)f->weights,
                              "activations", (json_int_t)f->step);
    json_t *root = json_pack(
        "{s:s, s:s, s:o, s:I, s:I, s:I, s:I, s:o, s:o, s:I, s:I, s:i, s:I, s:o, s:o}", "folder",
        f->source->folder, "family", family_of(f), "layers", layers_json(f), "hidden_size",
        (json_int_t)c->hidden_size, "intermediate_size", (json_int_t)c->intermediate_size,
        "vocab_size", (json_int_t)c->vocab_size, "max_position_embeddings", (json_int_t)c->context,
        "parameters", parameters_json(f->source->model, c->tied), "weights", files_json(f),
        "state_bytes", (json_int_t)f->state, "bytes_per_token", (json_int_t)f->cache, "batch",
        f->batch, "context", (json_int_t)f->context, "run", reason_or(f->no_run, run), "train",
        reason_or(f->no_train, train));
    char *text = NULL;
    if (!root) return mn_fail(MN_ERR_MEMORY, "no memory for the answer");
    const mn_status st = mn_json_text(&text, root, MN_JSON_PRETTY);
    if (st == MN_OK) puts(text);
    free(text);
    json_decref(root);
    return st;
}

mn_status mn_info_model(const char *given, int batch, int context, bool json,
                        mn_context *machine) {
    mn_source source;
    facts *f = calloc(1, sizeof *f);
    mn_status st = f ? mn_source_open_config(&source, given)
                     : mn_fail(MN_ERR_MEMORY, "no memory to look at %s", given);
    if (st == MN_OK) {
        st = mn_weights_open(&source.weights, source.folder, source.model);
        if (st != MN_OK) keep_reason(f->wrong);
        f->source = &source;
        f->c = mn_model_describe(source.model);
        f->batch = batch;
        st = find_out(f, machine, context);
        if (st == MN_OK && json) st = print_json(f);
        else if (st == MN_OK) print_text(f);
        mn_source_close(&source);
    }
    free(f);
    return st;
}
