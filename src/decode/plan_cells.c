/* plan_cells.c - the memories of Palimpsa, KLA and the Bayesian Layer, with the small works around
 * them (cells.h), as stages of a megakernel. All that this token has made comes as words; a block
 * has eight columns of a head, eight channels, or a noise group. */
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "decode/cells.h"
#include "decode/plan.h"

static const mn_decode_bf16 *element(const void *data, int64_t i) {
    return (const mn_decode_bf16 *)data + i;
}

static mn_decode_source no_source(void) {
    return (mn_decode_source){ 0 };
}

/* Columns from `first` on of a result whose words, if any, begin at `handoff`. */
static mn_decode_result_at result_from(const mn_decode_result_at *all, int64_t first) {
    mn_decode_result_at at = *all;
    if (at.to) at.to += first;
    if (at.handoff >= 0) at.handoff = mn_decode_word_from(at.handoff, (unsigned)first);
    return at;
}

static mn_decode_source columns_from(mn_decode_source source, int64_t first) {
    return mn_source_from(source, first);
}

/* A result of `count` numbers that others may read as words where it is `flagged`. */
static void writes_row(mn_stage_ranges *r, const void *data, int64_t count, bool flagged) {
    mn_stage_writes(r, data, count, sizeof(mn_decode_bf16), flagged);
}

static mn_decode_result_at result_of(const mn_stage_ranges *r, const void *data) {
    return (mn_decode_result_at){ (mn_decode_bf16 *)(uintptr_t)data, mn_stage_words(r, data), 0 };
}

/* Results of a work, if that is there. */
static mn_decode_result_at result_of_work(const mn_stage_ranges *r, const mn_decode_op *f) {
    if (!f) return (mn_decode_result_at){ NULL, MN_DECODE_NO_WORDS, 0 };
    return result_of(r, mn_decode_result(f)->data);
}

static void writes_work(mn_stage_ranges *r, const mn_decode_op *f, int64_t count, bool flagged) {
    if (f) writes_row(r, mn_decode_result(f)->data, count, flagged);
}

/* Pieces, one for each block from the next one on; the stage of the others is empty. */
static void deal(mn_megakernel *p, int64_t all, void (*write)(mn_megakernel *p, int block,
                                                              const void *context, int64_t i),
                 const void *context) {
    for (int64_t from = 0; from < all && !p->failed; from += p->n_blocks) {
        for (int block = 0; block < p->n_blocks && !p->failed; block++) {
            const int64_t i = from + (block - p->phase + p->n_blocks) % p->n_blocks;
            if (i >= all) mn_plan_rest(p, block);
            else write(p, block, context, i);
        }
        p->n_stages++;
    }
    p->phase = (int)((p->phase + all) % p->n_blocks);
}

/* ---- Palimpsa -------------------------------------------------------------------------------- */

typedef struct palimpsa_stage {
    const mn_palimpsa_works *works;
    mn_decode_palimpsa_instr *heads;    // what all tiles of a head have in common
    mn_decode_result_at gated, o, skipped, sum;
} palimpsa_stage;

static const void *raw_of(const mn_palimpsa_works *w) {
    return w->gate ? w->gate->at[0].data : w->args.v.data;
}

static mn_decode_palimpsa_instr palimpsa_head(mn_stage_ranges *r, const mn_palimpsa_works *w,
                                              int64_t h) {
    const mn_importance_args *p = &w->args;
    const int64_t K = p->call.K, V = p->call.V, H = p->call.H;
    const mn_view *prior = &w->exp->at[0];
    mn_decode_palimpsa_instr to = { .K = (int)K, .V = (int)V, .head = (int)h,
                                    .scale = (float)p->scale, .has_by = w->gate != NULL,
                                    .prior_wide = prior->dtype == MN_F32 };
    for (int i = 0; i < MN_DECODE_QK_NORMS; i++) {
        const void *from = w->norm[i] ? w->norm[i]->at[0].data : i ? p->k.data : p->q.data;
        const mn_decode_source row = mn_stage_source(r, element(from, h * K), K, 8);
        mn_plan_fill_norm(&to.front[i], w->norm[i]);
        if (i == 0) to.q = row;
        else to.k = row;
    }
    to.v = mn_stage_source(r, element(raw_of(w), h * V), V, MN_DECODE_TILE_V);
    to.b = mn_stage_source(r, element(p->b.data, h * V), V, MN_DECODE_TILE_V);
    if (w->gate) {
        const mn_view *by = &w->gate->at[1];
        to.by = mn_stage_source(r, element(by->data, H > 1 ? h * by->stride[2] : 0), 1, 1);
    }
    to.g = mn_stage_source(r, element(p->g.data, 2 * h), 2, 2);    // a word
    to.mean = (float *)p->mu.data + h * K * V;
    to.importance = (float *)p->imp.data + h * K * V;
    to.prior = (const char *)prior->data + h * (int64_t)mn_dtype_bytes(prior->dtype);
    if (w->skip) to.skip = element(w->skip->at[1].data, H > 1 ? h * w->skip->at[1].stride[2] : 0);
    to.exp_prior = (mn_decode_bf16 *)w->exp->at[2].data + h;
    to.wide_prior = (float *)w->wide->at[1].data + h;
    return to;
}

/* What the stage reads and writes; heads[h] becomes what the tiles of head h have in common. */
static bool gather_palimpsa(mn_stage_ranges *r, mn_decode_palimpsa_instr *heads,
                            const mn_palimpsa_works *w) {
    const mn_importance_args *p = &w->args;
    const int64_t K = p->call.K, H = p->call.H, HV = H * p->call.V;
    const mn_view *prior = &w->exp->at[0];
    r->fits = r->fits && mn_stage_is_written(r, p->g.data, H * 4);    // it has words
    for (int64_t h = 0; h < H && r->fits; h++) heads[h] = palimpsa_head(r, w, h);
    mn_stage_reads(r, prior->data, H, mn_dtype_bytes(prior->dtype));
    if (w->skip) {
        mn_stage_reads(r, w->skip->at[1].data, H, sizeof(mn_decode_bf16));
        writes_work(r, w->skip, HV, false);
        writes_work(r, w->sum, HV, true);
    }
    for (int i = 0; i < MN_DECODE_QK_NORMS; i++) writes_work(r, w->norm[i], H * K, false);
    writes_work(r, w->gate, HV, false);
    writes_work(r, w->exp, H, false);
    mn_stage_writes(r, w->wide->at[1].data, H, sizeof(float), false);
    mn_stage_writes(r, p->mu.data, HV * K, sizeof(float), false);
    mn_stage_writes(r, p->imp.data, HV * K, sizeof(float), false);
    writes_row(r, p->o.data, HV, true);
    return mn_stage_close(r);
}

static void write_palimpsa(mn_megakernel *p, int block, const void *context, int64_t tile) {
    const palimpsa_stage *s = context;
    const mn_call *c = &s->works->args.call;
    const int64_t tiles = c->V / MN_DECODE_TILE_V, h = tile / tiles;
    const int64_t column = tile % tiles * MN_DECODE_TILE_V, first = h * c->V + column;
    mn_decode_instr *instr = mn_plan_add_instr(p, block);
    if (!instr) return;
    mn_decode_palimpsa_instr *to = &instr->palimpsa;
    instr->kind = MN_DECODE_PALIMPSA;
    *to = s->heads[h];
    to->column = (int)column;
    to->v = columns_from(to->v, column);
    to->b = columns_from(to->b, column);
    to->mean += column;
    to->importance += column;
    to->gated = result_from(&s->gated, first);
    to->o = result_from(&s->o, first);
    to->skipped = result_from(&s->skipped, first);
    to->sum = result_from(&s->sum, first);
    for (int i = 0; i < MN_DECODE_QK_NORMS; i++) {
        if (to->front[i].to) to->front[i].to += h * c->K;
        if (column > 0) to->front[i].to = NULL;
    }
    if (column > 0) to->exp_prior = NULL, to->wide_prior = NULL;
    mn_plan_end_instr(p, block, offsetof(mn_decode_instr, palimpsa) + sizeof *to);
}

static uint64_t add_palimpsa(mn_megakernel *p, const mn_palimpsa_works *works) {
    const mn_call *c = &works->args.call;
    palimpsa_stage s = { .works = works };
    mn_stage_ranges r;
    s.heads = calloc((size_t)c->H, sizeof *s.heads);
    mn_stage_open(&r, p);
    if (!s.heads || !gather_palimpsa(&r, s.heads, works)) {
        free(s.heads);
        return 0;
    }
    s.gated = result_of_work(&r, works->gate);
    s.o = result_of(&r, works->args.o.data);
    s.skipped = result_of_work(&r, works->skip);
    s.sum = result_of_work(&r, works->sum);
    deal(p, c->H * (c->V / MN_DECODE_TILE_V), write_palimpsa, &s);
    p->steps |= 1u << MN_DECODE_STEP_importance;
    free(s.heads);
    return works->taken;
}

/* ---- Kalman Linear Attention ----------------------------------------------------------------- */

typedef struct kla_stage {
    const mn_kla_works *works;
    mn_decode_kla_instr all;    // of the first channels
} kla_stage;

/* What words the stage reads. */
static void fill_kla_sources(mn_decode_kla_instr *to, mn_stage_ranges *r, const mn_kla_works *w) {
    const mn_moebius_args *p = &w->args;
    const int64_t K = p->call.K, V = p->call.V;
    const void *q = w->norm[0] ? w->norm[0]->at[0].data : p->q.data;
    const void *k = w->norm[1] ? w->norm[1]->at[0].data : p->k.data;
    to->q = mn_stage_source(r, q, K, 2);
    to->k = mn_stage_source(r, k, K, 2);
    to->v = mn_stage_source(r, p->v.data, V, MN_DECODE_KLA_COLUMNS);
    to->prec = mn_stage_source(r, p->prec.data, V, MN_DECODE_KLA_COLUMNS);
    to->z = to->gate = no_source();
    if (w->weighted) {
        to->z = mn_stage_source(r, w->weighted->at[0].data, V, MN_DECODE_KLA_COLUMNS);
    }
    if (w->gate) to->gate = mn_stage_source(r, w->gate->at[1].data, V, MN_DECODE_KLA_COLUMNS);
}

/* The dynamics, and the states. */
static void fill_kla_cells(mn_decode_kla_instr *to, mn_stage_ranges *r, const mn_kla_works *w) {
    const int64_t cells = w->args.call.V * w->args.call.K;
    float *states[] = { (float *)w->dynamics.abar.data, (float *)w->dynamics.pbar.data,
                        (float *)w->args.lam.data, (float *)w->args.eta.data };
    for (int i = 0; i < MN_DECODE_KLA_DYNAMICS; i++) {
        to->dynamics[i] = w->rounded[i]->at[0].data;
        to->rounded[i] = w->rounded[i]->at[1].data;
        mn_stage_loads(r, to->dynamics[i], cells, sizeof(float));
        writes_work(r, w->rounded[i], cells, false);
    }
    for (size_t i = 0; i < sizeof states / sizeof *states; i++) {
        mn_stage_writes(r, states[i], cells, sizeof(float), false);
    }
    to->a = states[0], to->p = states[1], to->lam = states[2], to->eta = states[3];
}

static bool gather_kla(mn_stage_ranges *r, mn_decode_kla_instr *to, const mn_kla_works *w) {
    const mn_moebius_args *p = &w->args;
    const int64_t V = p->call.V, K = p->call.K;
    *to = (mn_decode_kla_instr){ .K = (int)K, .from_prior = p->from_prior,
                                 .mode = w->dynamics.mode, .has_gate = w->gate != NULL };
    for (int i = 0; i < MN_DECODE_QK_NORMS; i++) mn_plan_fill_norm(&to->front[i], w->norm[i]);
    fill_kla_sources(to, r, w);
    fill_kla_cells(to, r, w);
    if (w->weighted) {
        const mn_view *weight = &w->weighted->at[1];
        to->weight = weight->data;
        to->weight_step = weight->stride[3] != 0;
        to->weight_wide = weight->dtype == MN_F32;
        mn_stage_reads(r, weight->data, to->weight_step ? V : 1, mn_dtype_bytes(weight->dtype));
    }
    for (int i = 0; i < MN_DECODE_QK_NORMS; i++) writes_work(r, w->norm[i], K, false);
    writes_row(r, p->y.data, V, true);
    writes_work(r, w->weighted, V, false);
    writes_work(r, w->sum, V, true);
    writes_work(r, w->gate, V, true);
    return mn_stage_close(r);
}

static void write_kla(mn_megakernel *p, int block, const void *context, int64_t tile) {
    const kla_stage *s = context;
    const int64_t first = tile * MN_DECODE_KLA_COLUMNS, cell = first * s->all.K;
    mn_decode_instr *instr = mn_plan_add_instr(p, block);
    if (!instr) return;
    mn_decode_kla_instr *to = &instr->kla;
    instr->kind = MN_DECODE_KLA;
    *to = s->all;
    to->column = (int)first;
    to->v = columns_from(to->v, first);
    to->prec = columns_from(to->prec, first);
    if (to->weight) to->z = columns_from(to->z, first);
    if (to->has_gate) to->gate = columns_from(to->gate, first);
    for (int i = 0; i < MN_DECODE_KLA_DYNAMICS; i++) {
        to->dynamics[i] += cell;
        to->rounded[i] += cell;
    }
    to->a += cell, to->p += cell, to->lam += cell, to->eta += cell;
    if (to->weight) {
        to->weight = (const char *)to->weight + first * to->weight_step *
                                                    (to->weight_wide ? 4 : 2);
    }
    to->y = result_from(&s->all.y, first);
    to->weighted = result_from(&s->all.weighted, first);
    to->sum = result_from(&s->all.sum, first);
    to->out = result_from(&s->all.out, first);
    for (int i = 0; i < MN_DECODE_QK_NORMS && first > 0; i++) to->front[i].to = NULL;
    mn_plan_end_instr(p, block, offsetof(mn_decode_instr, kla) + sizeof *to);
}

static uint64_t add_kla(mn_megakernel *p, const mn_kla_works *works) {
    kla_stage s = { .works = works };
    mn_stage_ranges r;
    mn_stage_open(&r, p);
    if (!gather_kla(&r, &s.all, works)) return 0;
    s.all.y = result_of(&r, works->args.y.data);
    s.all.weighted = result_of_work(&r, works->weighted);
    s.all.sum = result_of_work(&r, works->sum);
    s.all.out = result_of_work(&r, works->gate);
    deal(p, works->args.call.V / MN_DECODE_KLA_COLUMNS, write_kla, &s);
    p->steps |= 1u << MN_DECODE_STEP_moebius;
    return works->taken;
}

/* ---- the Bayesian Layer ---------------------------------------------------------------------- */

typedef struct bayes_stage {
    const mn_bayes_works *works;
    mn_decode_bayes_instr *heads;    // the first group of each
    mn_decode_source *r2;            // of each group
    mn_decode_result_at o;
} bayes_stage;

static int64_t groups_of(const mn_bayes_works *w) {
    return mn_max(w->args.call.G, 1);
}

static mn_decode_bayes_instr bayes_head(mn_stage_ranges *r, const mn_bayes_works *w, int64_t h) {
    const mn_bayes_args *p = &w->args;
    const int64_t K = p->call.K, V = p->call.V;
    mn_decode_bayes_instr to = { .K = (int)K, .V = (int)(V / groups_of(w)), .head = (int)h,
                                 .p0 = (float)w->prior->shift };
    for (int i = 0; i < MN_DECODE_QK_NORMS; i++) {
        const void *from = w->norm[i] ? w->norm[i]->at[0].data : i ? p->k.data : p->q.data;
        const mn_decode_source row = mn_stage_source(r, element(from, h * K), K, 8);
        mn_plan_fill_norm(&to.front[i], w->norm[i]);
        if (to.front[i].to) to.front[i].to += h * K;
        if (i == 0) to.q = row;
        else to.k = row;
    }
    to.v = mn_stage_source(r, element(p->v.data, h * V), V, 8);
    const mn_view *la = &w->decay->at[0];
    to.la = mn_stage_source(r, element(la->data, p->call.H > 1 ? h * la->stride[2] : 0), 1, 1);
    to.la_to = (mn_decode_bf16 *)w->decay->at[1].data + h * K;
    to.l2 = mn_stage_source(r, element(p->l2.data, h), 1, 1);
    to.p0_to = (mn_decode_bf16 *)w->prior->at[0].data + h;
    memcpy(to.args, p, sizeof *p);
    return to;
}

static bool gather_bayes(mn_stage_ranges *r, bayes_stage *s) {
    const mn_bayes_works *w = s->works;
    const mn_bayes_args *p = &w->args;
    const mn_call *c = &p->call;
    const int64_t G = groups_of(w);
    for (int64_t h = 0; h < c->H && r->fits; h++) s->heads[h] = bayes_head(r, w, h);
    for (int64_t i = 0; i < c->H * G && r->fits; i++) {
        s->r2[i] = mn_stage_source(r, element(p->r2.data, i), 1, 1);
    }
    for (int i = 0; i < MN_DECODE_QK_NORMS; i++) writes_work(r, w->norm[i], c->H * c->K, false);
    writes_work(r, w->decay, c->H * c->K, false);
    writes_work(r, w->prior, c->H, false);
    mn_stage_writes(r, p->M.data, c->H * c->K * c->V, sizeof(float), false);
    mn_stage_writes(r, p->P.data, c->H * G * c->K * c->K, sizeof(float), false);
    writes_row(r, p->o.data, c->H * c->V, true);
    return mn_stage_close(r);
}

static void write_bayes(mn_megakernel *p, int block, const void *context, int64_t i) {
    const bayes_stage *s = context;
    const int64_t G = groups_of(s->works), h = i / G, g = i % G;
    mn_decode_instr *instr = mn_plan_add_instr(p, block);
    if (!instr) return;
    mn_decode_bayes_instr *to = &instr->bayes;
    instr->kind = MN_DECODE_BAYES;
    *to = s->heads[h];
    to->group = (int)g;
    to->first = (int)g * to->V;
    to->v = columns_from(to->v, to->first);
    to->r2 = s->r2[i];
    to->o = result_from(&s->o, h * s->works->args.call.V + to->first);
    if (g > 0) to->la_to = to->p0_to = to->front[0].to = to->front[1].to = NULL;
    mn_plan_end_instr(p, block, offsetof(mn_decode_instr, bayes.args) + sizeof(mn_bayes_args));
}

static uint64_t add_bayes(mn_megakernel *p, const mn_bayes_works *works) {
    const int64_t H = works->args.call.H, groups = H * groups_of(works);
    bayes_stage s = { .works = works };
    mn_stage_ranges r;
    uint64_t taken = 0;
    s.heads = calloc((size_t)H, sizeof *s.heads);
    s.r2 = calloc((size_t)groups, sizeof *s.r2);
    mn_stage_open(&r, p);
    if (s.heads && s.r2 && gather_bayes(&r, &s)) {
        s.o = result_of(&r, works->args.o.data);
        deal(p, groups, write_bayes, &s);
        p->steps |= 1u << MN_DECODE_STEP_bayes;
        taken = works->taken;
    }
    free(s.heads);
    free(s.r2);
    return taken;
}

_Static_assert(sizeof(mn_bayes_args) <= MN_DECODE_ARGS_BYTES, "arguments of bayes");

uint64_t mn_megakernel_add_cells(mn_megakernel *p, const mn_defer *all, int i) {
    union {
        mn_palimpsa_works palimpsa;
        mn_kla_works kla;
        mn_bayes_works bayes;
    } works;
    if (p->failed || all->done & mn_bit(i)) return 0;
    if (mn_palimpsa_find(&works.palimpsa, all, i)) return add_palimpsa(p, &works.palimpsa);
    if (mn_kla_find(&works.kla, all, i, true)) return add_kla(p, &works.kla);
    if (mn_bayes_find(&works.bayes, all, i)) return add_bayes(p, &works.bayes);
    return 0;
}
