/* choose.c - sizes and settings for a text and a machine.
 *
 *   parameters  at most two for each character (0.9 M from 100 kB on, 0.3 M below), and so many
 *               that a run of four tokens a parameter takes the machine a few minutes at half of
 *               what its products of matrices reach
 *   tokens      four a parameter, at most eight passes through the text
 *   rate        2e-3 at a width of 128, falling with the 3/4th power of the width
 *
 * Measured: 0.9 M parameters of gdn reach 1.51 nats a character on tinyshakespeare in 2,000 steps
 * of 16 x 128 characters. */
#include "cli/train/choose.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "data/files.h"
#include "data/text.h"
#include "model/model.h"
#include "ops/matmul.h"

enum { MOST_LOOKED_AT = 1 << 26, PROBE_WIDTH = 512 };

static const double tokens_per_parameter = 4.0, most_epochs = 8.0, most_seconds = 480.0,
                    share_of_sgemm = 0.5;

/* ---- the machine ----------------------------------------------------------------------------- */

double mn_train_product_rate(mn_context *context) {
    enum { N = 768, RUNS = 3 };
    float *memory = malloc(3 * sizeof(float) * N * N);
    double best = INFINITY;
    for (int64_t i = 0; memory && i < 3 * N * N; i++) memory[i] = 0.1f * (float)(i % 7) - 0.3f;
    const mn_matmul_args args = { .dtype = MN_F32, .c = memory ? memory + 2 * N * N : NULL,
                                  .a = memory, .b = memory ? memory + N * N : NULL,
                                  .M = N, .N = N, .K = N };
    for (int run = -1; memory && run < RUNS; run++) {    // the first warms up
        const double start = mn_seconds();
        if (mn_matmul(context, &args) != MN_OK) break;
        if (run >= 0) best = fmin(best, mn_seconds() - start);
    }
    free(memory);
    return isfinite(best) ? 2.0 * N * N * N / best : NAN;
}

/* ---- sizes ----------------------------------------------------------------------------------- */

bool mn_choice_size(void *to, const char *value) {
    static const char suffixes[] = "kmb";
    char *end;
    double size = strtod(value, &end);
    if (end == value || !isfinite(size)) return false;
    const char letter = *end >= 'A' && *end <= 'Z' ? (char)(*end - 'A' + 'a') : *end;
    const char *suffix = letter ? strchr(suffixes, letter) : NULL;
    if (suffix) size *= pow(1e3, (double)(suffix - suffixes + 1));
    if (*end && (!suffix || end[1])) return false;
    *(double *)to = size;
    return size >= 1e3 && size <= 1e12;
}

/* Parameters of a block over the square of its width, and how many names `layers` repeats, from a
 * model whose numbers are never touched. */
static mn_status weigh(double *per_square, int *n_names, const mn_json *model) {
    mn_json probe = { .value = json_deep_copy(model->value), .name = "model" };
    if (!probe.value) return mn_fail(MN_ERR_MEMORY, "no memory to choose a size");
    json_object_set_new(probe.value, "hidden_size", json_integer(PROBE_WIDTH));
    json_object_set_new(probe.value, "vocab_size", json_integer(2));
    json_object_del(probe.value, "num_hidden_layers");
    const char *layers = "";
    mn_model_config config = { 0 };
    mn_model *built = NULL;
    mn_status st = mn_json_opt_text(&layers, &probe, "layers");
    if (st == MN_OK && !strpbrk(layers, "*,")) {
        json_object_set_new(probe.value, "num_hidden_layers", json_integer(1));
    }
    if (st == MN_OK) st = mn_model_config_read(&config, &probe);
    if (st == MN_OK) {
        config.vocab_size = 2;
        *n_names = config.n_layers;
        st = mn_model_create(&built, &config, MN_F32);
    }
    if (st == MN_OK) {
        *per_square = (double)mn_model_count_without_embeddings(built) / config.n_layers /
                      PROBE_WIDTH / PROBE_WIDTH;
    }
    mn_model_destroy(built);
    mn_model_config_free(&config);
    json_decref(probe.value);
    return st;
}

/* Width and layers of about `size` parameters, some 40 units of width to a layer. */
static void shape_of(int64_t *width, int64_t *layers, double size, double per_square, int names) {
    double best = INFINITY;
    for (int64_t D = 32; D <= 16384; D += D < 256 ? 32 : 64) {
        const double n = size / (per_square * (double)D * (double)D) / names;
        const double L = fmax(names == 1 ? 2.0 : 1.0, round(n)) * names;
        if (L > MN_MAX_LAYERS) continue;
        const double built = L * per_square * (double)D * (double)D;
        const double cost = 4.0 * fabs(log(built / size)) + fabs(log((double)D / L / 40.0));
        if (cost >= best) continue;
        best = cost;
        *width = D;
        *layers = (int64_t)L;
    }
}

/* ---- what the text is ------------------------------------------------------------------------ */

typedef struct text_facts {
    int64_t bytes;            // of all files
    bool text, ascii;         // ascii: a byte is a character
} text_facts;

static mn_status list_files(mn_data_files *files, const mn_json *root) {
    const mn_json data = mn_json_member(root, "data"), at = mn_json_member(&data, "train");
    const char *paths[256];
    int64_t n = 0;
    mn_status st = MN_OK;
    if (json_is_string(at.value)) st = mn_json_read_text(&paths[n++], &at);
    for (; st == MN_OK && n < mn_json_count(&at) && n < 256; n++) {
        const mn_json item = mn_json_item(&at, n);
        st = mn_json_read_text(&paths[n], &item);
    }
    return st == MN_OK ? mn_data_files_list(files, paths, n, MN_CORPUS_AUTO) : st;
}

static mn_status look_for_ascii(text_facts *facts, const mn_data_files *files) {
    mn_text_plan plan = { 0 };
    char *alphabet = NULL;
    size_t size = 0;
    mn_status st = mn_text_plan_make(&plan, files, "text", NULL, 0.0, NULL);
    if (st == MN_OK) st = mn_text_alphabet(&alphabet, &size, &plan, NULL, NULL);
    facts->ascii = st == MN_OK;
    for (size_t at = 0; st == MN_OK && at < size; at++) facts->ascii &= (uint8_t)alphabet[at] < 128;
    free(alphabet);
    mn_text_plan_free(&plan);
    return st;
}

static mn_status look_at(text_facts *facts, const mn_json *root) {
    mn_data_files files = { 0 };
    *facts = (text_facts){ 0 };
    mn_status st = list_files(&files, root);
    for (int64_t i = 0; st == MN_OK && i < files.count; i++) {
        facts->bytes += files.items[i].bytes;
        facts->text |= files.items[i].format == MN_CORPUS_TEXT ||
                       files.items[i].format == MN_CORPUS_JSONL;
    }
    if (st == MN_OK && facts->text && facts->bytes <= MOST_LOOKED_AT) {
        st = look_for_ascii(facts, &files);
    }
    mn_data_files_free(&files);
    return st;
}

/* ---- filling in ------------------------------------------------------------------------------ */

static json_t *section(mn_json *root, const char *name) {
    json_t *at = json_object_get(root->value, name);
    if (at) return at;
    json_object_set_new(root->value, name, json_object());
    return json_object_get(root->value, name);
}

/* The number at a key, set to `value` if there is none. */
static double fill(json_t *object, const char *key, double value, bool whole) {
    const json_t *at = json_object_get(object, key);
    if (json_is_number(at)) return json_number_value(at);
    if (!at) {
        json_object_set_new(object, key, whole ? json_integer((json_int_t)value)
                                               : json_real(value));
    }
    return value;
}

static int64_t power_of_two(double value, int64_t least, int64_t most) {
    int64_t n = least;
    while (n < most && (double)(2 * n) <= value) n *= 2;
    return n;
}

/* Two digits: a learning rate that can be read. */
static double rounded(double value) {
    char text[32];
    snprintf(text, sizeof text, "%.1e", value);
    return strtod(text, NULL);
}

static double size_for(const mn_choice *choice, double bytes) {
    if (choice->size > 0.0) return choice->size;
    /* 6 operations a parameter and token, four tokens a parameter */
    const double rate = choice->flops > 0.0 ? share_of_sgemm * choice->flops : 0.0;
    const double most = sqrt(most_seconds * rate / (6.0 * tokens_per_parameter));
    static const double sizes[] = { 0.3e6, 0.9e6, 3e6, 10e6, 25e6, 50e6 };
    int i = bytes < 100e3 ? 0 : 1;
    while (i + 1 < (int)MN_COUNTOF(sizes) && sizes[i + 1] <= fmin(most, 2.0 * bytes)) i++;
    return sizes[i];
}

static mn_status choose_model(double *size, mn_json *root, const mn_choice *choice, double bytes) {
    json_t *model = section(root, "model");
    if (!json_object_get(model, "layers") && !json_object_get(model, "model_type")) {
        json_object_set_new(model, "layers", json_string("gdn"));
    }
    const json_t *width = json_object_get(model, "hidden_size");
    const json_t *layers = json_object_get(model, "num_hidden_layers");
    const mn_json at = mn_json_member(root, "model");
    double per_square = 14.0;
    int names = 1;
    mn_status st = choice->from ? MN_OK : weigh(&per_square, &names, &at);
    if (st != MN_OK) return st;
    *size = size_for(choice, bytes);
    int64_t D = 128, L = 4;
    shape_of(&D, &L, *size, per_square, names);
    if (!choice->from) {
        if (json_is_integer(width)) D = json_integer_value(width);
        fill(model, "hidden_size", (double)D, true);
        if (!layers) json_object_set_new(model, "num_hidden_layers", json_integer((json_int_t)L));
    }
    if (json_is_integer(layers)) L = json_integer_value(layers);
    if (json_is_integer(json_object_get(model, "hidden_size"))) {
        D = json_integer_value(json_object_get(model, "hidden_size"));
    }
    *size = per_square * (double)D * (double)D * (double)L;
    return MN_OK;
}

static void choose_training(mn_json *root, const mn_choice *choice, double size, double tokens) {
    json_t *train = section(root, "train"), *data = section(root, "data");
    const json_t *width = json_object_get(section(root, "model"), "hidden_size");
    const double D = json_is_number(width) ? json_number_value(width) : 512.0;
    const double part = fill(data, "valid_part", 0.1, false);
    const double held = json_object_get(data, "valid") ? tokens : tokens * part;
    const json_t *limit = json_object_get(section(root, "model"), "max_position_embeddings");
    int64_t wanted = size < 5e6 ? 128 : size < 40e6 ? 256 : 512;
    if (choice->from && json_is_integer(limit) && json_integer_value(limit) > 0) {
        wanted = mn_min(wanted, json_integer_value(limit));
    }
    const double context = fill(train, "context",
                                (double)power_of_two(fmin((double)wanted, held / 4.0),
                                                     mn_min(wanted, 16), wanted), true);
    const int64_t rows = size < 5e6 ? 16 : 32;
    const double batch = fill(train, "batch",
                              (double)power_of_two(fmin((double)rows, tokens / context / 8.0), 1,
                                                   rows), true);
    const double all = fmin(tokens_per_parameter * size, most_epochs * tokens);
    const double steps = fill(train, "steps", fmax(200.0, round(all / (batch * context) / 100.0) *
                                                              100.0), true);
    const double rate = 2e-3 * pow(128.0 / D, 0.75) * (choice->from ? 0.3 : 1.0);
    const double lr = fill(train, "lr", rounded(fmin(rate, 4e-3)), false);
    fill(train, "min_lr", rounded(lr / 20.0), false);
    fill(train, "warmup", fmin(100.0, round(steps / 10.0)), true);
    fill(train, "eval_every", fmax(50.0, ceil(steps / 8.0)), true);
    fill(train, "checkpoint_every", fmax(50.0, ceil(steps / 8.0)), true);
    const double batches = held / (batch * context);
    fill(train, "eval_batches", batches > 200.0 ? 200.0 : 0.0, true);
}

bool mn_train_per_character(const mn_json *root) {
    text_facts facts;
    return look_at(&facts, root) == MN_OK && facts.text && facts.ascii;
}

mn_status mn_train_choose(mn_json *root, mn_choice *choice) {
    text_facts facts;
    double size = 0.0;
    mn_status st = look_at(&facts, root);
    if (st != MN_OK) return st;
    /* tokens of .bin files have two bytes at least */
    const double tokens = facts.text ? (double)facts.bytes : (double)facts.bytes / 2.0;
    json_t *data = section(root, "data");
    if (facts.text && !json_object_get(data, "tokenizer")) {
        json_object_set_new(data, "tokenizer", json_string("bytes"));
    }
    choice->per_character = facts.text && facts.ascii;
    st = choose_model(&size, root, choice, tokens);
    if (st != MN_OK) return st;
    choose_training(root, choice, size, tokens);
    const bool small = facts.bytes < 1000000;
    snprintf(choice->said, sizeof choice->said,
             "chosen     for %.*f %s of %s%s; --layers, --size 1m|10m|50m, --context, --batch, "
             "--steps\n           and --lr change it, mneme train --help has the rest\n",
             small ? 0 : 1, (double)facts.bytes / (small ? 1e3 : 1e6), small ? "kB" : "MB",
             facts.text ? "text" : "tokens",
             choice->size > 0.0 || choice->from ? "" : " and this machine");
    return MN_OK;
}
