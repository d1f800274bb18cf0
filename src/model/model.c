/* model.c - the parameters of a model: which there are, where they live, how they start. */
#include "model/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "model/folder/weights.h"
#include "model/model_internal.h"
#include "runtime/reserve.h"

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

/* Memory for `count` numbers, of a sketch addresses alone; NULL: none. */
static void *take(const mn_model *model, int64_t count) {
    size_t bytes;
    if (!mn_mul_size(&bytes, (size_t)count, mn_dtype_bytes(model->dtype)) ||
        !mn_add_size(&bytes, bytes, MN_ALIGN)) {
        return NULL;
    }
    return model->sketch ? mn_reserve_take(bytes)
                         : aligned_alloc(MN_ALIGN, bytes / MN_ALIGN * MN_ALIGN);
}

static void give(const mn_model *model, void *numbers, int64_t count) {
    if (model->sketch) {
        mn_reserve_give(numbers, (size_t)count * mn_dtype_bytes(model->dtype) + MN_ALIGN);
    } else {
        free(numbers);
    }
}

/* Adds a parameter and allocates it. `*index` is where it is. */
mn_status mn_model_add(mn_model *model, int *index, const char *name, const mn_param_info *info) {
    const mn_status st = grow(model);
    if (st != MN_OK) return st;
    mn_model_param *p = &model->params[model->n_params];
    *p = (mn_model_param){ .info = *info, .stored = -1, .stored_rank = -1, .rate = 1.0 };
    snprintf(p->name, sizeof p->name, "%s", name);
    if (!(p->value = take(model, info->count))) {
        return mn_fail(MN_ERR_MEMORY, "no memory for %s of %lld numbers; use a smaller model",
                       name, (long long)info->count);
    }
    *index = model->n_params++;
    return MN_OK;
}

mn_status mn_model_add_matrix(mn_model *model, int *index, const char *name, int64_t rows,
                              int64_t cols, mn_group group) {
    mn_param_info info = { .rank = 2, .shape = { rows, cols }, .init = MN_INIT_NORMAL,
                           .group = group };
    if (!mn_mul_i64(&info.count, rows, cols) || info.count > INT64_MAX / 64) {
        return mn_fail(MN_ERR_MEMORY, "%s: %lld x %lld numbers overflow", name, (long long)rows,
                       (long long)cols);
    }
    return mn_model_add(model, index, name, &info);
}

mn_status mn_model_add_vector(mn_model *model, int *index, const char *name, int64_t n,
                              mn_init init, mn_group group) {
    const mn_param_info info = { .rank = 1, .shape = { n }, .count = n, .init = init,
                                 .group = group };
    return mn_model_add(model, index, name, &info);
}

/* "NAME.weight", and right behind it "NAME.bias" where norms have one. */
mn_status mn_model_add_norm(mn_model *model, int *index, const char *name) {
    const mn_init start = model->config.norm_plus_one ? MN_INIT_ZEROS : MN_INIT_ONES;
    const int64_t D = model->config.hidden_size;
    char full[MN_PARAM_NAME];
    int bias;    // lies behind its weight
    snprintf(full, sizeof full, "%.80s.weight", name);
    mn_status st = mn_model_add_vector(model, index, full, D, start, MN_GROUP_VECTOR);
    if (st != MN_OK || !model->config.norm_bias) return st;
    snprintf(full, sizeof full, "%.80s.bias", name);
    return mn_model_add_vector(model, &bias, full, D, MN_INIT_ZEROS, MN_GROUP_VECTOR);
}

/* The parameters of a layer, those of block i, which begin with `prefix`. */
mn_status mn_model_add_layer(mn_model *model, const mn_layer *layer, int *first,
                             const char *prefix, int i) {
    *first = model->n_params;
    mn_status st = MN_OK;
    for (int p = 0; st == MN_OK && p < layer->n_params; p++) {
        int index;
        char full[MN_PARAM_NAME];
        snprintf(full, sizeof full, "model.layers.%d.%s.%.60s", i, prefix, layer->params[p].name);
        st = mn_model_add(model, &index, full, &layer->params[p]);
    }
    return st;
}

static mn_status add_beside(mn_model *model, mn_block *block, int i) {
    mn_model_config *c = &model->config;
    if (!c->block.beside_attention) return MN_OK;
    mn_status st = mn_layer_create(&block->beside, "attention", &c->beside[i], c->hidden_size,
                                   c->context, c->norm_eps);
    if (st == MN_OK) c->beside[i] = block->beside.config;
    return st == MN_OK ? mn_model_add_layer(model, &block->beside, &block->aside, "beside", i) : st;
}

static mn_status add_block(mn_model *model, int i) {
    const mn_model_config *c = &model->config;
    mn_block *block = &model->blocks[i];
    block->attn_norm = block->aside = block->turn.out = block->pre_norm = -1;
    block->first = model->n_params;
    mn_status st = mn_layer_create_at(&block->layer, c->names[i], &c->options[i], c->hidden_size,
                                      c->context, c->norm_eps, i, c->n_layers);
    if (st != MN_OK) return st;
    model->config.options[i] = block->layer.config;    // sizes that were chosen
    const bool caches = mn_mixer_has_cache(&block->layer.mixer);
    block->norms_after = c->block.norms_after == 2 || (c->block.norms_after == 1 && caches);
    char name[MN_PARAM_NAME];
    if (c->norm_first && i == 0) {
        st = mn_model_add_norm(model, &block->pre_norm, "model.layers.0.pre_norm");
    }
    snprintf(name, sizeof name, "model.layers.%d.attn_norm", i);
    if (st == MN_OK && c->halves[i] == MN_MLP_SHARED) st = mn_model_add_shared(model, i);
    if (st == MN_OK && block->layer.kind != MN_LAYER_none) {
        st = mn_model_add_norm(model, &block->attn_norm, name);
    }
    if (st == MN_OK) st = mn_model_add_layer(model, &block->layer, &block->mixer, "attn", i);
    if (st == MN_OK) st = add_beside(model, block, i);
    return st == MN_OK ? mn_model_add_half(model, block, i) : st;
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
        st = mn_model_add_norm(model, &at[0], NAMED("norm"));
        if (st == MN_OK) {
            st = mn_model_add_matrix(model, &at[1], NAMED("linear.weight"), D, D, MN_GROUP_MATRIX);
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
    mn_status st = mn_model_add_matrix(model, &model->embed, "model.embeddings.weight",
                                       c->vocab_size, c->hidden_size, MN_GROUP_EMBED);
    model->positions = -1;
    if (st == MN_OK && c->block.learned_positions > 0) {
        st = mn_model_add_matrix(model, &model->positions, "model.positions.weight",
                                 c->block.learned_positions, c->hidden_size, MN_GROUP_EMBED);
    }
    for (int i = 0; st == MN_OK && i < c->n_layers; i++) {
        st = add_block(model, i);
        model->blocks[i].end = model->n_params;
    }
    model->bounds = -1;
    for (int i = 0; i < MN_MAX_LAYERS; i++) model->rows[i] = i;
    for (int i = 0; st == MN_OK && i < c->n_layers && model->bounds < 0; i++) {
        const mn_layer *layer = &model->blocks[i].layer;
        if (layer->config.use_lower_bound) st = add_bounds(model, layer);
    }
    if (st == MN_OK && c->decoder == MN_DECODER_PLACES) st = add_decoder(model);
    if (st == MN_OK) st = mn_model_add_norm(model, &model->norm, "model.norm");
    model->head = model->embed;
    if (st == MN_OK && !c->tied) {
        st = mn_model_add_matrix(model, &model->head, "lm_head.weight", c->vocab_size,
                                 c->hidden_size, MN_GROUP_HEAD);
    }
    if (st != MN_OK) return st;
    model->leaves = calloc((size_t)model->n_params, sizeof *model->leaves);
    return model->leaves ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a model");
}

static mn_status create(mn_model **out, const mn_model_config *config, mn_dtype dtype,
                        bool sketch) {
    *out = NULL;
    if (config->vocab_size < 1) {
        return mn_fail(MN_ERR_ARGUMENT, "a model needs a vocab_size of at least 1");
    }
    mn_model *model = calloc(1, sizeof *model);
    if (!model) return mn_fail(MN_ERR_MEMORY, "no memory for a model");
    model->dtype = dtype;
    model->sketch = sketch;
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

mn_status mn_model_create(mn_model **out, const mn_model_config *config, mn_dtype dtype) {
    return create(out, config, dtype, false);
}

mn_status mn_model_sketch(mn_model **out, const mn_model_config *config) {
    return create(out, config, MN_F32, true);
}

void mn_model_drop_value(const mn_model *model, mn_model_param *p) {
    give(model, p->value, p->info.count);
    p->value = NULL;
}

void mn_model_destroy(mn_model *model) {
    if (!model) return;
    if (model->device) mn_model_unplace(model);
    for (int i = 0; i < model->n_params; i++) {
        mn_model_drop_value(model, &model->params[i]);
        give(model, model->params[i].grad, model->params[i].info.count);
        mn_quant_free(model->params[i].quant);
    }
    mn_weights_close(model->beside);
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
        if (!(p->grad = take(model, p->info.count))) {
            return mn_fail(MN_ERR_MEMORY, "no memory for the gradient of %s", p->name);
        }
        if (zero) memset(p->grad, 0, (size_t)p->info.count * mn_dtype_bytes(model->dtype));
    }
    return MN_OK;
}

mn_status mn_model_want_gradients(mn_model *model) {
    if (model->config.quant_bits) {
        return mn_fail(MN_ERR_UNSUPPORTED, "weights of %d bits cannot be trained; take the model "
                       "that was quantised", model->config.quant_bits);
    }
    return model->device ? mn_model_place_gradients(model) : take_gradients(model, !model->sketch);
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

/* Weights of experts that do not serve a token. */
static double idle_weights(const mn_model *model) {
    const mn_block_config *c = &model->config.block;
    double weights = 0.0;
    for (int i = 0; i < model->config.n_layers; i++) {
        const mn_block *block = &model->blocks[i];
        if (model->config.halves[i] != MN_MLP_SPARSE) continue;
        const double each = (double)model->params[block->experts].info.count * block->expert_params;
        weights += each * (double)(c->num_experts - c->num_experts_per_tok);
    }
    return weights;
}

int64_t mn_model_count_active(const mn_model *model) {
    return mn_model_count(model) - (int64_t)idle_weights(model);
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
    weights -= idle_weights(model);
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

void mn_model_block_params(const mn_model *model, int i, int *first, int *end) {
    *first = model->blocks[i].first;
    *end = model->blocks[i].end;
}

void mn_model_parts(const mn_model *model, int64_t *outside, int64_t *block) {
    *outside = mn_model_count(model);
    *block = 0;
    for (int i = 0; i < model->config.n_layers; i++) {
        int64_t own = 0;
        for (int p = model->blocks[i].first; p < model->blocks[i].end; p++) {
            own += model->params[p].info.count;
        }
        *outside -= own;
        *block = mn_max(*block, own);
    }
}

void mn_model_settle_gradients(mn_model *model) {
    mn_model_settle_some(model, 0, model->n_params);
}

void mn_model_settle_some(mn_model *model, int first, int end) {
    mn_device *device = model->tape ? mn_tape_context(model->tape)->device : NULL;
    for (int i = first; i < end; i++) {
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
