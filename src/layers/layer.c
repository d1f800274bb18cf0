/* layer.c - options, parameters and forward of every kind, from the tables. */
#include "layers/layer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "base/util.h"
#include "io/json_write.h"
#include "layers/family.h"

static const struct {
    const char *name;
    const mn_layer_family *family;
} kinds[MN_LAYER_COUNT] = {
#define LAYER(kind, family) [MN_LAYER_##kind] = { #kind, &mn_family_##family },
#include "layers/all.def"
};

const char *mn_layer_kind_name(mn_layer_kind kind) {
    return kinds[kind].name;
}

static const struct {
    mn_layer_kind kind;
    const char *row;
} likes[] = {
#define LAYER_LIKE(kind, row) { MN_LAYER_##kind, #row },
#include "layers/all.def"
};

/* A kind without a row of its own takes that of its memory, under its own name. */
static bool find_like(mn_layer_kind *out, mn_mixer_info *info, const char *name) {
    for (size_t i = 0; i < MN_COUNTOF(likes); i++) {
        if (strcmp(kinds[likes[i].kind].name, name) != 0) continue;
        *out = likes[i].kind;
        if (mn_mixer_find(info, likes[i].row) != MN_OK) return false;
        info->name = kinds[likes[i].kind].name;
        return true;
    }
    return false;
}

mn_status mn_layer_kind_find(mn_layer_kind *out, bool *ccq, const char *name) {
    mn_mixer_info info;
    *ccq = false;
    if (find_like(out, &info, name)) return MN_OK;
    const mn_status st = mn_mixer_find(&info, name);    // knows aliases and names near misses
    if (st != MN_OK) return st;
    *ccq = info.ccq;
    for (int i = 0; i < MN_LAYER_COUNT; i++) {
        if (strcmp(kinds[i].name, info.name) != 0) continue;
        *out = (mn_layer_kind)i;
        return MN_OK;
    }
    return mn_fail(MN_ERR_UNSUPPORTED, "%s is no layer of models yet", name);
}

mn_status mn_layer_row(mn_mixer_info *out, mn_layer_kind kind) {
    mn_layer_kind same;
    const char *name = kinds[kind].name;
    return find_like(&same, out, name) ? MN_OK : mn_mixer_find(out, name);
}

bool mn_layer_takes_ccq(mn_layer_kind kind) {
    mn_layer_kind same;
    mn_mixer_info info;
    const char *name = kinds[kind].name;
    if (find_like(&same, &info, name) || mn_mixer_find(&info, name) != MN_OK) return false;
    if (!mn_mixer_has_matrix(&info)) return false;
    char full[MN_MIXER_NAME];
    mn_layer_config config;
    mn_layer layer;
    snprintf(full, sizeof full, "%.40s+ccq", name);
    mn_layer_defaults(&config, kind);    // a kind may still refuse it
    return mn_layer_create(&layer, full, &config, 64, 64, 1e-6) == MN_OK;
}

/* ---- groups ---------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    double lr;
    bool decays;
} groups[MN_GROUP_COUNT] = {
#define GROUP(id, name, lr, decays, about) [MN_GROUP_##id] = { name, lr, decays },
#include "layers/groups.def"
#undef GROUP
};

const char *mn_group_name(mn_group group) {
    return groups[group].name;
}

double mn_group_lr(mn_group group) {
    return groups[group].lr;
}

bool mn_group_decays(mn_group group) {
    return groups[group].decays;
}

/* ---- options --------------------------------------------------------------------------------- */

typedef struct option {
    const char *name;
    const char *choices;    // NULL: a real number; "": a whole one
    double least, most;     // of numbers
    size_t offset;
} option;

static const option options[] = {
#define NUMBER(name, choices, least, most)                                                         \
    { #name, choices, least, most, offsetof(mn_layer_config, name) },
#define OPTION_INT(name, choices, about) NUMBER(name, choices, 0, 0)
#define OPTION_SIZE(name, least, most, about) NUMBER(name, "", least, most)
#define OPTION_RANK(name, least, most, about) NUMBER(name, "rank", least, most)
#define OPTION_REAL(name, least, most, about) NUMBER(name, NULL, least, most)
#include "layers/options.def"
};

static const struct {
    mn_layer_kind kind;
    const char *option;
    double value;
} takes[] = {
#define TAKES(kind, option, value) { MN_LAYER_##kind, #option, value },
#include "layers/all.def"
};

static const option *option_named(const char *name) {
    for (size_t i = 0; i < MN_COUNTOF(options); i++) {
        if (strcmp(options[i].name, name) == 0) return &options[i];
    }
    return NULL;
}

static void set_option(mn_layer_config *config, const option *o, double value) {
    void *at = (char *)config + o->offset;
    if (o->choices) *(int64_t *)at = (int64_t)value;
    else *(double *)at = value;
}

static int64_t whole_option(const mn_layer_config *config, const option *o) {
    return *(const int64_t *)((const char *)config + o->offset);
}

/* To compare: the largest whole numbers are rounded. */
static double get_option(const mn_layer_config *config, const option *o) {
    const void *at = (const char *)config + o->offset;
    return o->choices ? (double)whole_option(config, o) : *(const double *)at;
}

void mn_layer_defaults(mn_layer_config *config, mn_layer_kind kind) {
    memset(config, 0, sizeof *config);
    for (size_t i = 0; i < MN_COUNTOF(takes); i++) {
        if (takes[i].kind != kind) continue;
        set_option(config, option_named(takes[i].option), takes[i].value);
    }
}

int mn_layer_option_keys(mn_layer_kind kind, const char **keys, int capacity) {
    int n = 0;
    for (size_t i = 0; i < MN_COUNTOF(takes); i++) {
        if (takes[i].kind == kind && n < capacity) keys[n++] = takes[i].option;
    }
    return n;
}

/* Index of `text` among comma-separated names, -1 if it is none. */
static int64_t choice_of(const char *choices, const char *text) {
    const size_t size = strlen(text);
    int64_t index = 0;
    for (const char *at = choices;; index++) {
        const size_t n = strcspn(at, ",");
        if (n == size && strncmp(at, text, n) == 0) return index;
        if (at[n] == '\0') return -1;
        at += n + 1;
    }
}

/* "full", "conv", "dt" as 0, -1, -2; a number as itself. */
static mn_status read_rank(int64_t *out, const mn_json *at) {
    if (!json_is_string(at->value)) return mn_json_read_i64(out, at);
    const char *text;
    const mn_status st = mn_json_read_text(&text, at);
    if (st != MN_OK) return st;
    const int64_t index = choice_of("full,conv,dt", text);
    if (index < 0) return mn_json_fail(at, "\"%s\" is none of full, conv, dt or a number", text);
    *out = -index;
    return MN_OK;
}

static mn_status read_choice(int64_t *out, const mn_json *at, const char *choices) {
    const char *text;
    const mn_status st = mn_json_read_text(&text, at);
    if (st != MN_OK) return st;
    const int64_t index = choice_of(choices, text);
    if (index < 0) return mn_json_fail(at, "\"%s\" is none of %s", text, choices);
    *out = index;
    return MN_OK;
}

static mn_status read_number(void *to, const option *o, const mn_json *at) {
    mn_status st = !o->choices ? mn_json_read_f64(to, at)
                 : o->choices[0] ? read_rank(to, at) : mn_json_read_i64(to, at);
    if (st != MN_OK) return st;
    const double x = o->choices ? (double)*(int64_t *)to : *(double *)to;
    if (x >= o->least && x <= o->most) return MN_OK;
    return mn_json_fail(at, "must lie between %.10g and %.10g", o->least, o->most);
}

static mn_status read_option(mn_layer_config *config, const option *o, const mn_json *at) {
    void *to = (char *)config + o->offset;
    if (!o->choices || !o->choices[0] || strcmp(o->choices, "rank") == 0) {
        return read_number(to, o, at);
    }
    if (strcmp(o->choices, "bool") == 0) {
        bool on = false;
        const mn_status st = mn_json_read_bool(&on, at);
        if (st == MN_OK) *(int64_t *)to = on;
        return st;
    }
    return read_choice(to, at, o->choices);
}

mn_status mn_layer_config_read(mn_layer_config *config, mn_layer_kind kind, const mn_json *object) {
    for (size_t i = 0; i < MN_COUNTOF(takes); i++) {
        if (takes[i].kind != kind) continue;
        const mn_json at = mn_json_member(object, takes[i].option);
        if (!mn_json_given(&at)) continue;
        const mn_status st = read_option(config, option_named(takes[i].option), &at);
        if (st != MN_OK) return st;
    }
    return MN_OK;
}

/* A number that is 0 where 0 stands for nothing given is null, as other software writes it. */
static json_t *option_json(const option *o, const mn_layer_config *config, double standard) {
    const double value = get_option(config, o);
    const bool number = !o->choices || !o->choices[0];
    if (number && value == 0.0 && standard == 0.0) return json_null();
    if (!o->choices) return mn_json_real(value);
    if (strcmp(o->choices, "bool") == 0) return json_boolean(value != 0.0);
    const bool rank = strcmp(o->choices, "rank") == 0;
    if (!o->choices[0] || (rank && value > 0.0)) return json_integer(whole_option(config, o));
    const char *at = rank ? "full,conv,dt" : o->choices;
    for (int i = 0; i < (int)fabs(value); i++) at += strcspn(at, ",") + 1;
    if (value == 0.0 && standard == 0.0 && strncmp(at, "none,", 5) == 0) return json_null();
    return json_stringn(at, strcspn(at, ","));
}

mn_status mn_layer_config_write(json_t *object, const mn_layer_config *config, mn_layer_kind kind) {
    for (size_t i = 0; i < MN_COUNTOF(takes); i++) {
        if (takes[i].kind != kind) continue;
        const option *o = option_named(takes[i].option);
        json_t *value = option_json(o, config, takes[i].value);
        if (json_object_set_new(object, o->name, value) != 0) {
            return mn_fail(MN_ERR_MEMORY, "no memory for the options of a layer");
        }
    }
    return MN_OK;
}

/* ---- parameters ------------------------------------------------------------------------------ */

static const struct {
    mn_layer_kind kind;
    const char *name, *shape;
    mn_init init;
    mn_group group;
    const char *when;
} params[] = {
#define PARAM(kind, name, shape, init, group, when)                                                \
    { MN_LAYER_##kind, name, shape, MN_INIT_##init, MN_GROUP_##group, when },
#include "layers/all.def"
};

/* Most numbers of one parameter: what 512 layers of 40 such hold still counts in 64 bits. */
static const int64_t most_numbers = INT64_C(1) << 40;

/* "HK,1,W" with the sizes of the letters put in. */
static mn_status read_shape(mn_param_info *info, const char *shape, const mn_layer_sizes *sizes) {
    info->rank = 0;
    info->count = 1;
    for (int i = 0; i < MN_PARAM_RANK; i++) info->shape[i] = 1;
    for (const char *at = shape; *at;) {
        int64_t axis = 1;
        bool fits = true;
        for (; *at && *at != ','; at++) {
            const bool letter = *at >= 'A' && *at <= 'Z';
            const int64_t size = letter ? MN_SIZE(sizes, *at) : *at - '0';
            if (!mn_mul_i64(&axis, axis, size)) fits = false;
        }
        if (*at == ',') at++;
        if (!fits || axis < 1 || !mn_mul_i64(&info->count, info->count, axis) ||
            info->count > most_numbers) {
            return mn_fail(MN_ERR_ARGUMENT, "%s: the sizes %s of the model overflow or are 0",
                           info->name, shape);
        }
        info->shape[info->rank++] = axis;
    }
    return MN_OK;
}

/* One condition: "option", "!option", "option=choice", or a letter whose size is not 0. */
static bool term_holds(const mn_layer *layer, const char *term, size_t n) {
    if (n == 1 && term[0] >= 'A' && term[0] <= 'Z') return MN_SIZE(&layer->sizes, term[0]) != 0;
    const bool negated = term[0] == '!';
    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)n - negated, term + negated);
    char *choice = strchr(name, '=');
    if (choice) *choice++ = '\0';
    const option *o = option_named(name);
    if (!o || (choice && !o->choices)) return false;
    const double value = get_option(&layer->config, o);
    const bool on = choice ? value == (double)choice_of(o->choices, choice) : value != 0.0;
    return on != negated;
}

static bool holds(const mn_layer *layer, const char *when) {
    for (const char *at = when; *at;) {
        const size_t n = strcspn(at, ",");
        if (!term_holds(layer, at, n)) return false;
        at += n + (at[n] == ',');
    }
    return true;
}

static mn_status add_param(mn_layer *layer, const char *name, const char *shape, mn_init init,
                           mn_group group) {
    if (layer->n_params == MN_LAYER_PARAMS) {
        return mn_fail(MN_ERR_INTERNAL, "%s has too many parameters", layer->mixer.name);
    }
    mn_param_info *info = &layer->params[layer->n_params++];
    *info = (mn_param_info){ .init = init, .group = group, .layer = layer->index,
                             .n_layers = layer->n_layers, .head = MN_SIZE(&layer->sizes, 'K') };
    snprintf(info->name, sizeof info->name, "%s", name);
    return read_shape(info, shape, &layer->sizes);
}

/* Options that the kind does not take are 0, whatever a family shares with others. Whole and real
 * ones are of one size. */
_Static_assert(sizeof(int64_t) == sizeof(double), "options are copied as they are");
static void keep_taken(mn_layer_config *config, mn_layer_kind kind) {
    const mn_layer_config all = *config;
    memset(config, 0, sizeof *config);
    for (size_t i = 0; i < MN_COUNTOF(takes); i++) {
        if (takes[i].kind != kind) continue;
        const size_t at = option_named(takes[i].option)->offset;
        memcpy((char *)config + at, (const char *)&all + at, sizeof(double));
    }
}

mn_status mn_layer_create(mn_layer *out, const char *name, const mn_layer_config *config, int64_t D,
                          int64_t context, double norm_eps) {
    return mn_layer_create_at(out, name, config, D, context, norm_eps, 0, 1);
}

mn_status mn_layer_create_at(mn_layer *out, const char *name, const mn_layer_config *config,
                             int64_t D, int64_t context, double norm_eps, int index, int n_layers) {
    memset(out, 0, sizeof *out);
    out->index = index;
    out->n_layers = n_layers;
    out->config = *config;
    out->width = D;
    out->norm_eps = norm_eps;
    MN_SIZE(&out->sizes, 'D') = D;
    mn_status st = mn_layer_kind_find(&out->kind, &out->ccq, name);
    if (st == MN_OK && !find_like(&out->kind, &out->mixer, name)) {
        st = mn_mixer_find(&out->mixer, name);
    }
    if (st == MN_OK) st = kinds[out->kind].family->derive(out, context);
    keep_taken(&out->config, out->kind);
    for (size_t i = 0; i < MN_COUNTOF(params) && st == MN_OK; i++) {
        if (params[i].kind != out->kind || !holds(out, params[i].when)) continue;
        st = add_param(out, params[i].name, params[i].shape, params[i].init, params[i].group);
    }
    if (st == MN_OK && out->ccq) {
        st = add_param(out, "ccq_gamma.weight", "H,D", MN_INIT_ZEROS, MN_GROUP_MATRIX);
    }
    if (st == MN_OK && out->ccq) {
        st = add_param(out, "ccq_gamma.bias", "H", MN_INIT_CCQ_BIAS, MN_GROUP_VECTOR);
    }
    return st;
}

/* ---- initial values -------------------------------------------------------------------------- */

static double inverse_softplus(double x) {
    return x + log(-expm1(-x));
}

/* Rate at which a head of lightning forgets: slower from layer to layer, hardly in the last. */
static double slope_of(const mn_param_info *info, int64_t head, int64_t heads) {
    const double last = (double)mn_max(info->n_layers - 1, 0) + 1e-5;
    const double left = 1.0 - (double)info->layer / last + 1e-5;
    return exp2(-8.0 * (double)(head + 1) / (double)heads) * left;
}

/* Decays of lightning by their slope: e^-(slope n). */
static double block_decay(const mn_param_info *info, int64_t i) {
    const int64_t P = info->shape[info->init == MN_INIT_BLOCK_DECAY ? 2 : 1];
    const int64_t heads = info->shape[info->init == MN_INIT_BLOCK_DECAY];
    const int64_t t = i % P;
    int64_t head = i / P, n = t + 1;
    if (info->init == MN_INIT_KEY_DECAY) n = P - t - 1;
    if (info->init == MN_INIT_BLOCK_DECAY) {
        head = i / (P * P);
        n = i / P % P - t;
    }
    return n < 0 ? 0.0 : exp(-slope_of(info, head, heads) * (double)n);
}

/* Number i of a law that needs one uniform number, or none. */
static double start_value(const mn_param_info *info, uint64_t seed, uint64_t stream, int64_t i) {
    const double u = mn_rng_uniform(seed, stream, (uint64_t)i);
    const int64_t last = info->rank ? info->shape[info->rank - 1] : 1;
    const double fan = 1.0 / sqrt((double)last);
    switch (info->init) {
    case MN_INIT_CONV:
    case MN_INIT_FAN_IN: return fan * (2.0 * u - 1.0);
    case MN_INIT_ONES: return 1.0;
    case MN_INIT_A_LOG: return log(fmax(16.0 * u, 1e-8));
    case MN_INIT_DT_BIAS: {
        const double dt = exp(log(0.001) + u * (log(0.1) - log(0.001)));
        return inverse_softplus(fmax(dt, 1e-4));
    }
    case MN_INIT_HUNDREDTH: return 0.01;
    case MN_INIT_MINUS_ONE: return -1.0;
    case MN_INIT_CCQ_BIAS: return -2.2;
    case MN_INIT_S4D_REAL: return log((double)(i % last + 1));
    case MN_INIT_NOISE_BIAS: return inverse_softplus(0.05);
    case MN_INIT_ANGLE: return exp(log(1e-3) + u * (log(acos(-1.0) / 10.0) - log(1e-3)));
    case MN_INIT_N_LOG: return log(4.0) * (2.0 * u - 1.0);
    case MN_INIT_FORGET_BIAS:
        return 3.0 + 3.0 * (double)(i % last) / (double)(last > 1 ? last - 1 : 1);
    case MN_INIT_A_LOG_ONE: return log(1.0 + 15.0 * u);
    case MN_INIT_EYE: return i / last == i % last ? 1.0 : 0.0;
    case MN_INIT_SLOPES: return slope_of(info, i, info->shape[0]);
    case MN_INIT_QUERY_DECAY:
    case MN_INIT_KEY_DECAY:
    case MN_INIT_BLOCK_DECAY: return block_decay(info, i);
    case MN_INIT_LRU_RING:
        return inverse_softplus(-0.5 * log(0.81 + u * (0.998001 - 0.81)));
    case MN_INIT_RIDGE: return inverse_softplus(0.75);
    case MN_INIT_HALF_FAN: return 0.5 * fan * (2.0 * u - 1.0);
    case MN_INIT_TWENTIETH_FAN: return 0.05 * fan * (2.0 * u - 1.0);
    default: return mn_rwkv7_start(info, i);
    }
}

/* Of the laws that are normal; of the others -1. */
static double deviation_of(const mn_param_info *info, double range) {
    const double last = info->rank ? (double)info->shape[info->rank - 1] : 1.0;
    switch (info->init) {
    case MN_INIT_NORMAL: return range;
    case MN_INIT_NORMAL_02: return 0.02;
    case MN_INIT_NORMAL_01: return 0.1;
    case MN_INIT_NORMAL_TENTH: return 0.1 / sqrt((double)info->shape[0]);
    case MN_INIT_NORMAL_FAN: return 1.0 / sqrt(last);
    case MN_INIT_NORMAL_FAN_OUT: return sqrt(2.0 / (last * (double)mn_max(info->n_layers, 1)));
    case MN_INIT_NORMAL_TAPS: return 0.1 / sqrt(last);
    default: return -1.0;
    }
}

void mn_param_start(void *value, mn_dtype dtype, const mn_param_info *info, double range,
                    uint64_t seed, uint64_t stream, int64_t first, int64_t count) {
    const double deviation = deviation_of(info, range);
    const bool normal = deviation >= 0.0;
    for (int64_t k = 0; k < count; k++) {
        const int64_t i = first + k;
        const double x = normal ? deviation * mn_rng_normal(seed, stream, (uint64_t)i)
                                : start_value(info, seed, stream, i);
        if (dtype == MN_F64) ((double *)value)[k] = x;
        else ((float *)value)[k] = (float)x;
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

mn_tensor *mn_layer_forward(mn_forward *f, mn_tensor *x) {
    f->output_variance = NULL;
    f->ahead.n = 0;
    if (!x || mn_tape_status(f->tape) != MN_OK) return NULL;
    return kinds[f->layer->kind].family->forward(f, x);
}

bool mn_layer_has_variance(const mn_layer *layer) {
    return mn_mixer_has_variance(&layer->mixer);
}
