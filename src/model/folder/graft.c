/* graft.c - new layers from the rows of old ones: by role and shape, heads repeated where there are
 * more, the rest as training would start it. */
#include "model/folder/graft.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "model/folder/roles.h"
#include "model/folder/same.h"

/* Of a chosen layer. */
typedef struct parts {
    int layer;
    int from_first, to_first;    // its parameters among the model's
    mn_roles from, to;
    bool *used;                  // of the spans of `from`
} parts;

struct mn_graft_parts {
    const mn_source *source;
    parts *list;
    int n;
    int loaded;                  // the source's parameter in `raw`; -1: none
    void *raw;
};

/* ---- the configuration ----------------------------------------------------------------------- */

static bool is_kind(const char *name, mn_layer_kind kind) {
    mn_layer_kind other;
    bool ccq;
    return mn_layer_kind_find(&other, &ccq, name) == MN_OK && other == kind;
}

/* Layers of one kind share their options: those of one that stays, if there is one. */
static const mn_layer_config *staying(const mn_model_config *c, const bool *chosen,
                                      mn_layer_kind kind) {
    for (int i = 0; i < c->n_layers; i++) {
        if (!chosen[i] && is_kind(c->names[i], kind)) return &c->options[i];
    }
    return NULL;
}

static mn_status lay_over(mn_layer_config *out, mn_layer_kind kind, const mn_json *options) {
    const char *keys[128];
    if (!options) return MN_OK;
    const int n = mn_layer_option_keys(kind, keys, MN_COUNTOF(keys));
    mn_status st = mn_json_expect_object(options);
    if (st == MN_OK) st = mn_json_unknown_key(options, keys, n);
    return st == MN_OK ? mn_layer_config_read(out, kind, options) : st;
}

static mn_status change_layer(mn_model_config *c, int i, const mn_model *source,
                              const mn_graft_request *r) {
    char name[2 * MN_MIXER_NAME];
    mn_layer_kind kind;
    bool ccq;
    const mn_layer *from = mn_model_layer(source, i);
    snprintf(name, sizeof name, "%s%s", r->to ? r->to : c->names[i],
             r->add_ccq && !from->ccq ? "+ccq" : "");
    mn_status st = strlen(name) < MN_MIXER_NAME ? mn_layer_kind_find(&kind, &ccq, name)
                                                : mn_fail(MN_ERR_ARGUMENT, "%s is no layer", name);
    if (st != MN_OK) return st;
    const mn_layer_config *other = staying(mn_model_describe(source), r->chosen, kind);
    if (other && kind != from->kind) c->options[i] = *other;
    else mn_options_after(&c->options[i], kind, from);
    strcpy(c->names[i], name);
    return lay_over(&c->options[i], kind, r->options);
}

/* The source's configuration with the chosen layers changed. */
static mn_status change(mn_model_config *out, const mn_source *source, const mn_graft_request *r) {
    char why[MN_SAME_WHY];
    const mn_model_config *before = mn_model_describe(source->model);
    mn_status st = mn_model_config_copy(out, before);
    for (int i = 0; i < before->n_layers && st == MN_OK; i++) {
        if (r->chosen[i]) st = change_layer(out, i, source->model, r);
    }
    if (st != MN_OK || mn_model_config_same(why, before, out)) return st;
    free(out->source);
    out->source = NULL;
    out->family = mn_model_type_known("mneme");
    return MN_OK;
}

/* ---- what comes from where ------------------------------------------------------------------- */

/* The row of the source's role that row `row` of `n` rows of the target's is: itself, or that of
 * the head that serves its head; -1: none. */
static int64_t source_row(const parts *p, const char *role, int64_t row, int64_t n,
                          bool *repeated) {
    int64_t width, wide;
    const int64_t have = mn_role_rows(&p->from, role, &width);
    mn_role_rows(&p->to, role, &wide);
    if (have == 0 || width != wide) return -1;
    if (have == n) return row;
    const int64_t theirs = mn_role_heads(&p->from, role);
    if (theirs == 0 || have % theirs != 0 || n <= have || n % have != 0) return -1;
    const int64_t each = have / theirs, heads = n / each;
    const int64_t known = mn_role_heads(&p->to, role);    // 0: the new kind has none
    if (known != 0 && known != heads) return -1;
    *repeated = true;
    return row / each / (heads / theirs) * each + row % each;
}

/* Counts what parameter `k` of the new layer takes over, and marks what of the old one it uses. */
static void count_kept(mn_graft_row *out, parts *p, int k) {
    const mn_param_info *info = &p->to.layer->params[k];
    const int64_t wide = info->count / (info->rank ? info->shape[0] : 1);
    for (int s = 0; s < p->to.n; s++) {
        const mn_role_span *span = &p->to.spans[s];
        if (span->param != k) continue;
        int64_t width;
        const int64_t n = mn_role_rows(&p->to, span->role, &width);
        for (int64_t r = 0; r < span->n; r++) {
            const int64_t at = source_row(p, span->role, span->row + r, n, &out->repeated);
            if (at < 0) break;
            const mn_role_span *from = mn_role_find(&p->from, span->role, at);
            if (!from) break;
            p->used[from - p->from.spans] = true;
            out->kept += wide;
        }
    }
}

static int first_of_mixer(const mn_model *model, int layer) {
    const mn_layer *l = mn_model_layer(model, layer);
    char name[MN_PARAM_NAME];
    if (l->n_params == 0) return -1;
    snprintf(name, sizeof name, "model.layers.%d.attn.%.60s", layer, l->params[0].name);
    mn_model *m = (mn_model *)model;
    return (int)(mn_model_param_named(m, name) - mn_model_param_at(m, 0));
}

static mn_status make_parts(parts *p, int layer, const mn_model *from, const mn_model *to) {
    p->layer = layer;
    p->from_first = first_of_mixer(from, layer);
    p->to_first = first_of_mixer(to, layer);
    mn_status st = mn_roles_make(&p->from, mn_model_layer(from, layer));
    if (st == MN_OK) st = mn_roles_make(&p->to, mn_model_layer(to, layer));
    if (st != MN_OK) return st;
    p->used = calloc((size_t)p->from.n + 1, sizeof *p->used);
    return p->used ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for the parts of a layer");
}

/* The report's rows of one layer: what the new one has, then what is left of the old one. */
static void report(mn_graft *g, parts *p) {
    for (int k = 0; k < p->to.layer->n_params; k++) {
        mn_graft_row *row = &g->rows[g->n_rows++];
        row->layer = p->layer;
        row->count = p->to.layer->params[k].count;
        snprintf(row->name, sizeof row->name, "%s", p->to.layer->params[k].name);
        count_kept(row, p, k);
    }
    for (int k = 0; k < p->from.layer->n_params; k++) {
        const mn_param_info *info = &p->from.layer->params[k];
        mn_graft_row row = { .layer = p->layer, .dropped = true };
        for (int s = 0; s < p->from.n; s++) {
            const mn_role_span *span = &p->from.spans[s];
            if (span->param != k || p->used[s]) continue;
            row.count += span->n * (info->count / (info->rank ? info->shape[0] : 1));
        }
        snprintf(row.name, sizeof row.name, "%s", info->name);
        if (row.count > 0) g->rows[g->n_rows++] = row;
    }
}

/* ---- numbers --------------------------------------------------------------------------------- */

static parts *parts_of(struct mn_graft_parts *all, int param) {
    for (int i = 0; i < all->n; i++) {
        const int first = all->list[i].to_first;
        if (param >= first && param < first + all->list[i].to.layer->n_params) {
            return &all->list[i];
        }
    }
    return NULL;
}

/* The source's parameter, kept until another is asked for. */
static mn_status load(struct mn_graft_parts *all, int param) {
    const mn_source *s = all->source;
    if (all->loaded == param) return MN_OK;
    const mn_model_param *p = mn_model_param_at(s->model, param);
    const mn_stored_dtype dtype = mn_weights_dtype(s->weights, s->model, p->name);
    free(all->raw);
    all->loaded = -1;
    all->raw = malloc((size_t)p->info.count * mn_stored_dtype_bytes(dtype) + 1);
    if (!all->raw) return mn_fail(MN_ERR_MEMORY, "no memory to read %s", p->name);
    const mn_status st = mn_weights_raw(all->raw, s->model, s->weights, param);
    if (st == MN_OK) all->loaded = param;
    return st;
}

/* One row of the source as row `to` of the new parameter. */
static mn_status copy_row(void *raw, mn_stored_dtype dtype, struct mn_graft_parts *all,
                          const parts *p, const mn_role_span *from, int64_t row, int64_t to,
                          int64_t width) {
    int64_t lost;
    const int param = p->from_first + from->param;
    const mn_status st = load(all, param);
    if (st != MN_OK) return st;
    const char *name = mn_model_param_at(all->source->model, param)->name;
    const mn_stored_dtype theirs = mn_weights_dtype(all->source->weights, all->source->model, name);
    const size_t at = (size_t)((from->at + row - from->row) * width);
    return mn_stored_convert((char *)raw + (size_t)(to * width) * mn_stored_dtype_bytes(dtype),
                             dtype, (const char *)all->raw + at * mn_stored_dtype_bytes(theirs),
                             theirs, width, &lost);
}

static mn_status overlay(void *raw, mn_stored_dtype dtype, struct mn_graft_parts *all, parts *p,
                         int k) {
    const mn_param_info *info = &p->to.layer->params[k];
    const int64_t wide = info->count / (info->rank ? info->shape[0] : 1);
    mn_status st = MN_OK;
    for (int s = 0; s < p->to.n && st == MN_OK; s++) {
        const mn_role_span *span = &p->to.spans[s];
        if (span->param != k) continue;
        int64_t width;
        bool repeated;
        const int64_t n = mn_role_rows(&p->to, span->role, &width);
        for (int64_t r = 0; r < span->n && st == MN_OK; r++) {
            const int64_t row = source_row(p, span->role, span->row + r, n, &repeated);
            const mn_role_span *from = row < 0 ? NULL : mn_role_find(&p->from, span->role, row);
            if (!from) break;
            st = copy_row(raw, dtype, all, p, from, row, span->at + r, wide);
        }
    }
    return st;
}

static mn_status make(void *raw, void *context, int i) {
    mn_graft *g = context;
    const mn_model *target = g->transfer->target;
    const mn_model_param *p = mn_model_param_at(g->transfer->target, i);
    const mn_stored_dtype dtype = g->transfer->dtypes[i];
    float *start = malloc((size_t)p->info.count * sizeof *start);
    if (!start) return mn_fail(MN_ERR_MEMORY, "no memory to make %s", p->name);
    int64_t lost;
    mn_param_start(start, MN_F32, &p->info, mn_model_describe(target)->initializer_range, g->seed,
                   (uint64_t)i, 0, p->info.count);
    mn_status st = mn_stored_convert(raw, dtype, start, MN_STORED_F32, p->info.count, &lost);
    free(start);
    parts *own = parts_of(g->parts, i);
    return st == MN_OK ? overlay(raw, dtype, g->parts, own, i - own->to_first) : st;
}

/* The type of what is made in a layer: that of the old one's first matrix, or the embeddings'. */
static mn_stored_dtype dtype_in(const mn_source *s, const parts *p) {
    const int at = p->from_first < 0 ? 0 : p->from_first;
    return mn_weights_dtype(s->weights, s->model, mn_model_param_at(s->model, at)->name);
}

static mn_status plan(mn_graft *g, const mn_source *source, mn_model *target) {
    const int n = mn_model_params(target);
    bool *is_made = calloc((size_t)n, sizeof *is_made);
    mn_stored_dtype *made = calloc((size_t)n, sizeof *made);
    char why[MN_SAME_WHY];
    mn_status st = is_made && made ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory to plan a graft");
    const bool same = mn_model_config_same(why, mn_model_describe(source->model),
                                           mn_model_describe(target));
    for (int i = 0; i < g->parts->n && st == MN_OK && !same; i++) {
        const parts *p = &g->parts->list[i];
        for (int k = 0; k < p->to.layer->n_params; k++) {
            is_made[p->to_first + k] = true;
            made[p->to_first + k] = dtype_in(source, p);
        }
    }
    if (st == MN_OK) {
        st = mn_transfer_create(&g->transfer, source, target, MN_STORED_COUNT, is_made, made);
    } else {
        mn_model_destroy(target);
    }
    free(is_made);
    free(made);
    return st;
}

static mn_status make_all_parts(mn_graft *g, const mn_source *source, const mn_model *target,
                                const mn_graft_request *r) {
    const mn_model_config *c = mn_model_describe(source->model);
    int64_t rows = 0;
    mn_status st = MN_OK;
    for (int i = 0; i < c->n_layers && st == MN_OK; i++) {
        if (!r->chosen[i]) continue;
        parts *p = &g->parts->list[g->parts->n++];
        st = make_parts(p, i, source->model, target);
        rows += st == MN_OK ? p->from.layer->n_params + p->to.layer->n_params : 0;
    }
    if (st != MN_OK) return st;
    g->rows = calloc((size_t)rows + 1, sizeof *g->rows);
    if (!g->rows) return mn_fail(MN_ERR_MEMORY, "no memory for the report of a graft");
    for (int i = 0; i < g->parts->n; i++) report(g, &g->parts->list[i]);
    return MN_OK;
}

mn_status mn_graft_create(mn_graft **out, const mn_source *source, const mn_graft_request *r) {
    mn_model_config config = { 0 };
    mn_model *target = NULL;
    mn_graft *g = calloc(1, sizeof *g);
    *out = NULL;
    mn_status st = g ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory to graft");
    if (st == MN_OK) st = change(&config, source, r);
    if (st == MN_OK) st = mn_transfer_target(&target, &config);
    mn_model_config_free(&config);
    if (st == MN_OK) {
        g->seed = r->seed;
        g->parts = calloc(1, sizeof *g->parts);
        if (g->parts) g->parts->list = calloc(MN_MAX_LAYERS, sizeof *g->parts->list);
        if (!g->parts || !g->parts->list) st = mn_fail(MN_ERR_MEMORY, "no memory to graft");
    }
    if (st == MN_OK) {
        g->parts->source = source;
        g->parts->loaded = -1;
        st = make_all_parts(g, source, target, r);
    }
    if (st == MN_OK) st = plan(g, source, target);    // takes over the target
    else mn_model_destroy(target);
    if (st == MN_OK) {
        g->transfer->make = make;
        g->transfer->context = g;
        *out = g;
    } else {
        mn_graft_destroy(g);
    }
    return st;
}

void mn_graft_destroy(mn_graft *g) {
    if (!g) return;
    for (int i = 0; g->parts && g->parts->list && i < g->parts->n; i++) {
        mn_roles_free(&g->parts->list[i].from);
        mn_roles_free(&g->parts->list[i].to);
        free(g->parts->list[i].used);
    }
    if (g->parts) {
        free(g->parts->list);
        free(g->parts->raw);
    }
    free(g->parts);
    free(g->rows);
    mn_transfer_destroy(g->transfer);
    free(g);
}
