/* model.c - the parameters of a model: which there are, where they live, how they start. */
#include "model/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "model/model_internal.h"

/* ---- building -------------------------------------------------------------------------------- */

static mn_status grow(mn_model *model) {
    if (model->n_params < model->capacity) return MN_OK;
    const int capacity = model->capacity ? 2 * model->capacity : 64;
    mn_model_param *grown = realloc(model->params, (size_t)capacity * sizeof *grown);
    if (!grown) return mn_fail(MN_ERR_MEMORY, "no memory for a model's parameters");
    model->params = grown;
    model->capacity = capacity;
    return MN_OK;
}

/* Adds a parameter and allocates it. `*index` is where it is. */
mn_status mn_model_add(mn_model *model, int *index, const char *name, const mn_param_info *info) {
    const mn_status st = grow(model);
    if (st != MN_OK) return st;
    mn_model_param *p = &model->params[model->n_params];
    *p = (mn_model_param){ .info = *info };
    snprintf(p->name, sizeof p->name, "%s", name);
    size_t bytes;
    if (!mn_mul_size(&bytes, (size_t)info->count, mn_dtype_bytes(model->dtype)) ||
        !mn_add_size(&bytes, bytes, MN_ALIGN) ||
        !(p->value = aligned_alloc(MN_ALIGN, bytes / MN_ALIGN * MN_ALIGN))) {
        return mn_fail(MN_ERR_MEMORY, "no memory for %s of %lld numbers; use a smaller model",
                       name, (long long)info->count);
    }
    *index = model->n_params++;
    return MN_OK;
}

static mn_status add_matrix(mn_model *model, int *index, const char *name, int64_t rows,
                            int64_t cols, mn_group group) {
    mn_param_info info = { .rank = 2, .shape = { rows, cols }, .init = MN_INIT_NORMAL,
                           .group = group };
    if (!mn_mul_i64(&info.count, rows, cols) || info.count > INT64_MAX / 64) {
        return mn_fail(MN_ERR_MEMORY, "%s: %lld x %lld numbers overflow", name, (long long)rows,
                       (long long)cols);
    }
    return mn_model_add(model, index, name, &info);
}

static mn_status add_bias(mn_model *model, int *index, const char *name, int64_t n) {
    const mn_param_info info = { .rank = 1, .shape = { n }, .count = n, .init = MN_INIT_ZEROS,
                                 .group = MN_GROUP_VECTOR };
    return mn_model_add(model, index, name, &info);
}

static mn_status add_norm(mn_model *model, int *index, const char *name) {
    const int64_t D = model->config.hidden_size;
    const mn_param_info info = { .rank = 1, .shape = { D }, .count = D,
                                 .init = model->config.norm_plus_one ? MN_INIT_ZEROS : MN_INIT_ONES,
                                 .group = MN_GROUP_VECTOR };
    const mn_status st = mn_model_add(model, index, name, &info);
    if (st != MN_OK || !model->config.norm_bias) return st;
    int bias;    // lies behind its weight
    char own[MN_PARAM_NAME];
    snprintf(own, sizeof own, "%.*sbias", (int)(strlen(name) - strlen("weight")), name);
    return add_bias(model, &bias, own, D);
}

/* x_k, key and value of a channel mix. */
static mn_status add_channel_mix(mn_model *model, mn_block *block, int i) {
    const int64_t D = model->config.hidden_size, F = model->config.intermediate_size;
    const mn_param_info shift = { .rank = 1, .shape = { D }, .count = D, .layer = i,
                                  .n_layers = model->config.n_layers,
                                  .init = MN_INIT_RWKV_SHIFT_MLP, .group = MN_GROUP_VECTOR };
    char name[MN_PARAM_NAME];
    snprintf(name, sizeof name, "model.layers.%d.mlp.x_k", i);
    mn_status st = mn_model_add(model, &block->mlp_shift, name, &shift);
    snprintf(name, sizeof name, "model.layers.%d.mlp.key.weight", i);
    if (st == MN_OK) st = add_matrix(model, &block->up, name, F, D, MN_GROUP_MATRIX);
    snprintf(name, sizeof name, "model.layers.%d.mlp.value.weight", i);
    return st == MN_OK ? add_matrix(model, &block->down, name, D, F, MN_GROUP_MATRIX) : st;
}

static mn_status add_mlp(mn_model *model, mn_block *block, int i) {
    const mn_model_config *c = &model->config;
    if (c->mlp == MN_MLP_NONE) return MN_OK;
    const int64_t D = c->hidden_size, F = c->intermediate_size;
    char name[MN_PARAM_NAME];
#define NAMED(suffix) (snprintf(name, sizeof name, "model.layers.%d." suffix, i), name)
    mn_status st = add_norm(model, &block->mlp_norm, NAMED("mlp_norm.weight"));
    if (c->mlp == MN_MLP_RWKV7) return st == MN_OK ? add_channel_mix(model, block, i) : st;
    if (st == MN_OK && c->mlp == MN_MLP_SWIGLU) {
        st = add_matrix(model, &block->gate, NAMED("mlp.gate_proj.weight"), F, D, MN_GROUP_MATRIX);
    }
    if (st == MN_OK) {
        st = add_matrix(model, &block->up, NAMED("mlp.up_proj.weight"), F, D, MN_GROUP_MATRIX);
    }
    if (st == MN_OK) {
        st = add_matrix(model, &block->down, NAMED("mlp.down_proj.weight"), D, F, MN_GROUP_MATRIX);
    }
    if (!c->mlp_bias) return st;
    if (st == MN_OK && c->mlp == MN_MLP_SWIGLU) {
        st = add_bias(model, &block->gate_bias, NAMED("mlp.gate_proj.bias"), F);
    }
    if (st == MN_OK) st = add_bias(model, &block->up_bias, NAMED("mlp.up_proj.bias"), F);
    if (st == MN_OK) st = add_bias(model, &block->down_bias, NAMED("mlp.down_proj.bias"), D);
    return st;
}

static mn_status add_block(mn_model *model, int i) {
    const mn_model_config *c = &model->config;
    mn_block *block = &model->blocks[i];
    block->attn_norm = block->mixer = block->mlp_norm = block->gate = block->up = block->down = -1;
    block->gate_bias = block->up_bias = block->down_bias = -1;
    block->mlp_shift = block->pre_norm = -1;
    mn_status st = mn_layer_create_at(&block->layer, c->names[i], &c->options[i], c->hidden_size,
                                      c->context, c->norm_eps, i, c->n_layers);
    if (st == MN_OK) model->config.options[i] = block->layer.config;    // sizes that were chosen
    char name[MN_PARAM_NAME];
    if (st == MN_OK && c->norm_first && i == 0) {
        st = add_norm(model, &block->pre_norm, NAMED("pre_norm.weight"));
    }
    if (st == MN_OK) st = add_norm(model, &block->attn_norm, NAMED("attn_norm.weight"));
    block->mixer = model->n_params;
    for (int p = 0; st == MN_OK && p < block->layer.n_params; p++) {
        int index;
        char full[MN_PARAM_NAME];
        snprintf(full, sizeof full, "model.layers.%d.attn.%.60s", i, block->layer.params[p].name);
        st = mn_model_add(model, &index, full, &block->layer.params[p]);
    }
    return st == MN_OK ? add_mlp(model, block, i) : st;
#undef NAMED
}

static mn_status add_decoder(mn_model *model) {
    const int64_t D = model->config.hidden_size;
    const mn_param_info bias = { .rank = 1, .shape = { D }, .count = D, .init = MN_INIT_ZEROS,
                                 .group = MN_GROUP_VECTOR };
    mn_status st = MN_OK;
    char name[MN_PARAM_NAME];
#define NAMED(suffix) (snprintf(name, sizeof name, "model.decoder.%d." suffix, i), name)
    for (int i = 0; st == MN_OK && i < MN_DECODER_STAGES; i++) {
        int *at = model->decoder[i];
        st = add_norm(model, &at[0], NAMED("norm.weight"));
        if (st == MN_OK) {
            st = add_matrix(model, &at[1], NAMED("linear.weight"), D, D, MN_GROUP_MATRIX);
        }
        if (st == MN_OK) st = mn_model_add(model, &at[2], NAMED("linear.bias"), &bias);
    }
#undef NAMED
    return st;
}

/* A number for each layer and gate of a model whose gates have least values. */
static mn_status add_bounds(mn_model *model, const mn_layer *layer) {
    const int64_t gates = MN_SIZE(&layer->sizes, 'H') * MN_SIZE(&layer->sizes, 'K');
    const mn_param_info info = { .rank = 2, .shape = { model->config.n_layers, gates },
                                 .count = model->config.n_layers * gates,
                                 .init = MN_INIT_ZEROS, .group = MN_GROUP_VECTOR };
    return mn_model_add(model, &model->bounds, "model.lower_bounds", &info);
}

static mn_status build(mn_model *model) {
    const mn_model_config *c = &model->config;
    mn_status st = add_matrix(model, &model->embed, "model.embeddings.weight", c->vocab_size,
                              c->hidden_size, MN_GROUP_EMBED);
    for (int i = 0; st == MN_OK && i < c->n_layers; i++) st = add_block(model, i);
    model->bounds = -1;
    for (int i = 0; i < MN_MAX_LAYERS; i++) model->rows[i] = i;
    for (int i = 0; st == MN_OK && i < c->n_layers && model->bounds < 0; i++) {
        const mn_layer *layer = &model->blocks[i].layer;
        if (layer->config.use_lower_bound) st = add_bounds(model, layer);
    }
    if (st == MN_OK && c->decoder == MN_DECODER_PLACES) st = add_decoder(model);
    if (st == MN_OK) st = add_norm(model, &model->norm, "model.norm.weight");
    model->head = model->embed;
    if (st == MN_OK && !c->tied) {
        st = add_matrix(model, &model->head, "lm_head.weight", c->vocab_size, c->hidden_size,
                        MN_GROUP_HEAD);
    }
    if (st != MN_OK) return st;
    model->leaves = calloc((size_t)model->n_params, sizeof *model->leaves);
    return model->leaves ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a model");
}

mn_status mn_model_create(mn_model **out, const mn_model_config *config, mn_dtype dtype) {
    *out = NULL;
    if (config->vocab_size < 1) {
        return mn_fail(MN_ERR_ARGUMENT, "a model needs a vocab_size of at least 1");
    }
    mn_model *model = calloc(1, sizeof *model);
    if (!model) return mn_fail(MN_ERR_MEMORY, "no memory for a model");
    model->dtype = dtype;
    mn_status st = mn_model_config_copy(&model->config, config);
    if (st == MN_OK) {
        model->blocks = calloc((size_t)config->n_layers, sizeof *model->blocks);
        st = model->blocks ? build(model) : mn_fail(MN_ERR_MEMORY, "no memory for a model");
    }
    if (st != MN_OK) {
        mn_model_destroy(model);
        return st;
    }
    *out = model;
    return MN_OK;
}

void mn_model_destroy(mn_model *model) {
    if (!model) return;
    if (model->device) mn_model_unplace(model);
    for (int i = 0; i < model->n_params; i++) {
        free(model->params[i].value);
        free(model->params[i].grad);
    }
    free(model->params);
    free(model->leaves);
    free(model->ends);
    free(model->blocks);
    mn_model_config_free(&model->config);
    free(model);
}

static mn_status take_gradients(mn_model *model, bool zero) {
    for (int i = 0; i < model->n_params; i++) {
        mn_model_param *p = &model->params[i];
        if (p->grad) continue;
        size_t bytes;
        if (!mn_mul_size(&bytes, (size_t)p->info.count, mn_dtype_bytes(model->dtype)) ||
            !(p->grad = aligned_alloc(MN_ALIGN, (bytes + MN_ALIGN) / MN_ALIGN * MN_ALIGN))) {
            return mn_fail(MN_ERR_MEMORY, "no memory for the gradient of %s", p->name);
        }
        if (zero) memset(p->grad, 0, bytes);
    }
    return MN_OK;
}

mn_status mn_model_want_gradients(mn_model *model) {
    return model->device ? mn_model_place_gradients(model) : take_gradients(model, true);
}

mn_status mn_model_reserve_gradients(mn_model *model) {
    return take_gradients(model, false);
}

/* ---- looking --------------------------------------------------------------------------------- */

const mn_model_config *mn_model_describe(const mn_model *model) {
    return &model->config;
}

mn_dtype mn_model_dtype(const mn_model *model) {
    return model->dtype;
}

int mn_model_params(const mn_model *model) {
    return model->n_params;
}

mn_model_param *mn_model_param_at(mn_model *model, int i) {
    return &model->params[i];
}

mn_model_param *mn_model_param_named(mn_model *model, const char *name) {
    for (int i = 0; i < model->n_params; i++) {
        if (strcmp(model->params[i].name, name) == 0) return &model->params[i];
    }
    return NULL;
}

int64_t mn_model_count(const mn_model *model) {
    int64_t count = 0;
    for (int i = 0; i < model->n_params; i++) count += model->params[i].info.count;
    return count;
}

int64_t mn_model_count_without_embeddings(const mn_model *model) {
    int64_t count = mn_model_count(model) - model->params[model->embed].info.count;
    if (model->head != model->embed) count -= model->params[model->head].info.count;
    return count;
}

const mn_layer *mn_model_layer(const mn_model *model, int i) {
    return &model->blocks[i].layer;
}

int mn_model_beliefs(const mn_model *model) {
    int n = 0;
    for (int i = 0; i < model->config.n_layers; i++) {
        n += mn_layer_has_variance(&model->blocks[i].layer);
    }
    return n;
}

/* Matrix products cost 2 operations per weight and token forward, twice that backward. Attention
 * adds q k' and p v over half of the length on average. Recurrences are not counted. */
double mn_model_flops(const mn_model *model, int64_t length) {
    double weights = (double)model->params[model->head].info.count, caches = 0.0;
    for (int i = 0; i < model->n_params; i++) {
        const mn_param_info *info = &model->params[i].info;
        const bool table = i == model->embed || i == model->head;
        if (!table && info->rank == 2) weights += (double)info->count;
    }
    for (int i = 0; i < model->config.n_layers; i++) {
        const mn_layer *layer = &model->blocks[i].layer;
        if (!mn_mixer_has_cache(&layer->mixer)) continue;
        const double H = (double)MN_SIZE(&layer->sizes, 'H');
        caches += H * (double)(MN_SIZE(&layer->sizes, 'K') + MN_SIZE(&layer->sizes, 'V'));
    }
    return 3.0 * (2.0 * weights + 2.0 * caches * (double)length / 2.0);
}

/* ---- initial values -------------------------------------------------------------------------- */

enum { START_PIECE = 1 << 16 };    // numbers a thread draws at a time: a millisecond or two

typedef struct starting {
    mn_model *model;
    uint64_t seed;
    int64_t param;
} starting;

static void start_piece(void *context, int64_t item, int worker) {
    (void)worker;
    const starting *s = context;
    const mn_model *model = s->model;
    const mn_model_param *p = &model->params[s->param];
    const int64_t first = item * START_PIECE, n = mn_min(START_PIECE, p->info.count - first);
    mn_param_start((char *)p->value + (size_t)first * mn_dtype_bytes(model->dtype), model->dtype,
                   &p->info, model->config.initializer_range, s->seed, (uint64_t)s->param, first,
                   n);
}

void mn_model_start(mn_model *model, mn_context *context, uint64_t seed) {
    for (int i = 0; i < model->n_params; i++) {
        starting s = { .model = model, .seed = seed, .param = i };
        const int64_t pieces = mn_ceil_div(model->params[i].info.count, START_PIECE);
        if (context) {
            mn_threads_run(context->threads, pieces, start_piece, &s);
            continue;
        }
        for (int64_t item = 0; item < pieces; item++) start_piece(&s, item, 0);
    }
}

void mn_model_settle_gradients(mn_model *model) {
    mn_device *device = model->tape ? mn_tape_context(model->tape)->device : NULL;
    for (int i = 0; i < model->n_params; i++) {
        mn_model_param *p = &model->params[i];
        if (!p->grad || !model->leaves[i] || !mn_tape_untouched(model->leaves[i])) continue;
        const size_t bytes = (size_t)p->info.count * mn_dtype_bytes(model->dtype);
        if (!device) {
            memset(p->grad, 0, bytes);
        } else {
            const mn_status st = mn_device_fill(device, p->grad, 0, bytes);
            if (st != MN_OK) mn_tape_fail(model->tape, st);
        }
    }
}
