/* mixer.c - the generic step loop: predict, observe, read, one token at a time and one head
 * after the other, in double precision. This loop defines every row of layers/all.def.
 *
 * What a row takes and keeps follows from its operator in ops.def: inputs are the operator's
 * inputs at one token, parts of the state are its initial states for one sequence. */
#include "definition/mixer.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "definition/mixer_internal.h"

/* ---- create ---------------------------------------------------------------------------------- */

/* Product of the sizes of `axes`; fails when one is missing or the product overflows. */
static mn_status count_of(int64_t *count, const mn_mixer *m, const char *name, const char *axes) {
    bool ok = true;
    *count = 1;
    for (const char *letter = axes; *letter; letter++) {
        const int64_t size = mn_axis_size(&m->config.size, *letter, &ok);
        if (!ok || size < 1) {
            return mn_fail(MN_ERR_ARGUMENT,
                           "%s: %s has axes %s and %c is %" PRId64 ", it must be at least 1",
                           m->info.name, name, axes, *letter, size);
        }
        if (!mn_mul_i64(count, *count, size) || *count > INT64_MAX / 64) {
            return mn_fail(MN_ERR_MEMORY, "%s: the sizes of %s overflow", m->info.name, name);
        }
    }
    return MN_OK;
}

/* Distance between the rows of two heads in a tensor with these axes. */
static int64_t head_step(const mn_mixer *m, const char *axes, int64_t count) {
    if (axes[0] == 'H') return count / m->config.size.H;
    if (axes[0] == 'Q') return count / m->config.size.Q;
    if (axes[0] == 'J' && !mn_mixer_has_cache(&m->info)) return count / m->config.size.J;
    return 0;
}

static bool all_sizes_given(const mn_mixer *m, const char *axes) {
    bool ok = true;
    for (; *axes; axes++) {
        if (mn_axis_size(&m->config.size, *axes, &ok) < 1) return false;
    }
    return ok;
}

static mn_status add_part(mn_mixer *m, const char *name, const char *axes) {
    mn_part *part = &m->parts[m->n_parts];
    const mn_status st = count_of(&part->count, m, name, axes);
    if (st != MN_OK) return st;
    snprintf(part->name, sizeof part->name, "%s", name);
    part->head_step = head_step(m, axes, part->count);
    m->n_parts++;
    if (!mn_add_i64(&m->state_count, m->state_count, part->count)) {
        return mn_fail(MN_ERR_MEMORY, "%s: the size of its state overflows", m->info.name);
    }
    return MN_OK;
}

/* state0 of the operator is the part "state". */
static mn_status add_row_part(mn_mixer *m, const mn_field *field) {
    char name[16];
    snprintf(name, sizeof name, "%s", field->name);
    name[strlen(name) - 1] = '\0';
    if (strcmp(field->axes, "NVK") == 0) {
        m->key_step = 1;
        m->value_step = m->config.size.K;
    }
    m->n_row_parts++;
    return add_part(m, name, field->axes + 1);
}

static mn_status add_input(mn_mixer *m, const mn_field *field, const char *axes) {
    mn_token none;
    const bool over_time = axes[0] == 'B';
    const bool rotates = strcmp(field->name, "theta") == 0;
    const bool required = field->role == MN_ROLE_IN || strchr(field->axes, '|') || rotates ||
                          strcmp(field->name, "p0") == 0;
    const char *own = over_time ? axes + 2 : axes;
    if (rotates && m->info.transition != &mn_transition_rotation) return MN_OK;
    if (!required && !all_sizes_given(m, own)) return MN_OK;
    mn_bound *input = &m->inputs[m->n_inputs++];
    *input = (mn_bound) { .field = field, .required = required };
    input->slot = (size_t)((char *)mn_token_slot(&none, field->name) - (char *)&none);
    const mn_status st = count_of(&input->count, m, field->name, own);
    if (st == MN_OK) input->head_step = head_step(m, own, input->count);
    if (st == MN_OK && strncmp(axes, "BL", 2) == 0) {
        *(strcmp(field->name, "k") == 0 ? &m->cache.k_count : &m->cache.v_count) = input->count;
    }
    return st;
}

static mn_status add_ccq(mn_mixer *m) {
    m->inputs[m->n_inputs++] = (mn_bound) {
        .slot = offsetof(mn_token, ccq_gamma), .count = m->heads, .head_step = 1, .required = true
    };
    mn_status st = add_part(m, "kk", m->heads > 1 ? "HKK" : "KK");
    if (st == MN_OK) st = add_part(m, "ks", m->heads > 1 ? "HK" : "K");
    return st;
}

/* Inputs and parts from the fields of the row's operator. */
static mn_status bind_fields(mn_mixer *m) {
    int count;
    const mn_field *fields = mn_op_fields(m->info.op, &count);
    mn_status st = MN_OK;
    for (int i = 0; i < count && st == MN_OK; i++) {
        char axes[MN_MAX_RANK + 1];
        if (fields[i].role > MN_ROLE_OPT) continue;
        if (!mn_field_axes(&fields[i], m->info.transition->decay, axes)) continue;
        st = axes[0] == 'N' ? add_row_part(m, &fields[i]) : add_input(m, &fields[i], axes);
    }
    if (st == MN_OK && m->info.ccq) st = add_ccq(m);
    return st;
}

/* Sizes that follow from others, and the sizes that have to fit together. */
static mn_status complete_config(mn_mixer *m) {
    mn_mixer_config *c = &m->config;
    const char *name = m->info.name;
    c->size.dtype = MN_F64;
    c->size.cu_seqlens = NULL;
    c->size.B = c->size.T = c->size.L = c->size.n_seqs = c->size.D = c->size.S = 0;
    if (c->scale == 0.0) c->scale = 1.0;
    if (c->eps == 0.0) c->eps = 1e-12;
    if (c->rope_base == 0.0) c->rope_base = 10000.0;
    if (c->size.G == 0) c->size.G = 1;
    /* rows that keep no past have queries and keys for every head */
    if (c->size.J == 0 || !mn_mixer_has_cache(&m->info)) c->size.J = c->size.H;
    if (m->info.belief == &mn_belief_covariance) {
        c->size.R = m->info.transition == &mn_transition_rotation ? 2 * c->size.K : c->size.K;
    }
    const bool branches = mn_op_has_axis(m->info.op, 'Q');
    if (branches && c->size.Q == 0) c->size.Q = c->size.H << m->info.read->kind;
    if (branches && c->size.Q != c->size.H << m->info.read->kind) {
        return mn_fail(MN_ERR_ARGUMENT,
                       "%s: Q = %" PRId64 " query branches for H = %" PRId64
                       " heads, it has %d per head",
                       name, c->size.Q, c->size.H, 1 << m->info.read->kind);
    }
    if (mn_mixer_has_cache(&m->info) && c->size.J > 0 && c->size.H % c->size.J != 0) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: H = %" PRId64 " is no multiple of J = %" PRId64, name,
                       c->size.H, c->size.J);
    }
    if (c->rope_kind != 0 && c->size.K % 2 != 0) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: rotary positions need an even K, not %" PRId64, name,
                       c->size.K);
    }
    return MN_OK;
}

/* Memory for the parts, and for one head: a contracted query, then what a belief or read needs. */
static mn_status take_memory(mn_mixer *m) {
    const mn_call *size = &m->config.size;
    int64_t square;
    if (!mn_mul_i64(&square, size->K, size->K) ||
        !mn_add_i64(&m->scratch_count, square, 2 * size->K) ||
        !mn_add_i64(&m->scratch_count, m->scratch_count, size->R + size->W)) {
        return mn_fail(MN_ERR_MEMORY, "%s: K = %" PRId64 " is too large", m->info.name, size->K);
    }
    m->state = calloc((size_t)m->state_count + 1, sizeof *m->state);
    m->scratch = calloc((size_t)m->scratch_count, sizeof *m->scratch);
    if (!m->state || !m->scratch) {
        return mn_fail(MN_ERR_MEMORY, "%s: no memory for a state of %" PRId64 " numbers",
                       m->info.name, m->state_count);
    }
    double *at = m->state;
    for (int n = 0; n < m->n_parts; n++) {
        m->parts[n].at = at;
        at += m->parts[n].count;
    }
    return MN_OK;
}

mn_status mn_mixer_create(mn_mixer **out, const char *name, const mn_mixer_config *config) {
    mn_mixer *m = calloc(1, sizeof *m);
    if (!m) return mn_fail(MN_ERR_MEMORY, "no memory for a mixer");
    m->config = *config;
    mn_status st = mn_mixer_find(&m->info, name);
    if (st == MN_OK) st = complete_config(m);
    if (st == MN_OK) {
        m->key_step = m->config.size.V;
        m->value_step = 1;
        m->heads = mn_op_has_axis(m->info.op, 'H') ? m->config.size.H : 1;
        st = bind_fields(m);
    }
    if (st == MN_OK) st = take_memory(m);
    if (st != MN_OK) {
        mn_mixer_destroy(m);
        return st;
    }
    *out = m;
    return MN_OK;
}

void mn_mixer_destroy(mn_mixer *m) {
    if (!m) return;
    free(m->cache.k);
    free(m->cache.v);
    free(m->cache.scratch);
    free(m->state);
    free(m->scratch);
    free(m);
}

const mn_mixer_info *mn_mixer_describe(const mn_mixer *m) {
    return &m->info;
}

int64_t mn_mixer_width(const mn_mixer *m) {
    return m->heads * m->config.size.V;
}

/* ---- one token ------------------------------------------------------------------------------- */

static const double *input_at(const mn_token *token, const mn_bound *input) {
    return *(const double *const *)((const char *)token + input->slot);
}

static mn_status check_input(const mn_mixer *m, const mn_bound *input, const double *x) {
    const char *name = input->field ? input->field->name : "ccq_gamma";
    if (!x && !input->required) return MN_OK;
    if (!x) return mn_fail(MN_ERR_ARGUMENT, "%s: the token lacks %s", m->info.name, name);
    for (int64_t i = 0; input->field && input->field->law == MN_LAW_DECAY && i < input->count;
         i++) {
        if (!(x[i] <= 0.0)) {
            return mn_fail(MN_ERR_ARGUMENT, "%s: %s holds %g; a log decay is at most 0",
                           m->info.name, name, x[i]);
        }
    }
    return MN_OK;
}

/* Copies what the row takes of `token` to `own`, checked. */
static mn_status take_token(mn_token *own, const mn_mixer *m, const mn_token *token) {
    mn_status st = MN_OK;
    memset(own, 0, sizeof *own);
    for (int n = 0; n < m->n_inputs && st == MN_OK; n++) {
        const double *x = input_at(token, &m->inputs[n]);
        st = check_input(m, &m->inputs[n], x);
        *(const double **)((char *)own + m->inputs[n].slot) = x;
    }
    if (st == MN_OK &&
        ((own->U1 && !(own->c1 && own->Vt1)) || (own->U2 && !(own->c2 && own->Vt2)))) {
        st = mn_fail(MN_ERR_ARGUMENT, "%s: a mix over lags needs its c, U and Vt", m->info.name);
    }
    return st;
}

static void head_at(mn_head *head, mn_mixer *m, const mn_token *token, int64_t h) {
    *head = (mn_head) { .config = &m->config,
                        .size = &m->config.size,
                        .belief = m->info.belief,
                        .n_parts = m->n_row_parts,
                        .h = h,
                        .key_step = m->key_step,
                        .value_step = m->value_step,
                        .cache = &m->cache,
                        .token = token,
                        .scratch = m->scratch + m->config.size.K };
    for (int n = 0; n < m->n_inputs; n++) {
        const double *x = input_at(token, &m->inputs[n]);
        const double **slot = (const double **)((char *)&head->in + m->inputs[n].slot);
        if (x) *slot = x + h * m->inputs[n].head_step;
    }
    for (int n = 0; n < m->n_parts; n++) {
        const int64_t step = m->parts[n].head_step;
        head->part[n] = m->parts[n].at + h * step;
        head->count[n] = step > 0 ? step : m->parts[n].count;
    }
}

static void start_heads(mn_mixer *m, const mn_token *own) {
    for (int64_t h = 0; m->info.belief->start && h < m->heads; h++) {
        mn_head head;
        head_at(&head, m, own, h);
        m->info.belief->start(&head);
    }
    m->started = true;
}

static mn_status append(mn_mixer *m, const mn_token *own) {
    mn_cache *cache = &m->cache;
    const mn_call *size = &m->config.size;
    if ((own->U1 || own->U2) && cache->length >= size->P) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: its mixing parameters end at P = %" PRId64 " tokens",
                       m->info.name, size->P);
    }
    const mn_status st = mn_cache_reserve(cache, cache->length + 1);
    if (st != MN_OK) return st;
    double *k = cache->k + cache->length * cache->k_count;
    memcpy(k, own->k, (size_t)cache->k_count * sizeof *k);
    memcpy(cache->v + cache->length * cache->v_count, own->v, (size_t)cache->v_count * sizeof *k);
    for (int64_t at = 0; at < cache->k_count; at += size->K) {
        mn_turn_row(k + at, size->K, cache->length, m->config.rope_kind, m->config.rope_base);
    }
    cache->length++;
    return MN_OK;
}

static void read_heads(mn_mixer *m, const mn_token *own, double *o, double *variance) {
    const int64_t K = m->config.size.K, V = m->config.size.V;
    const int kk = m->n_row_parts, ks = kk + 1;
    for (int64_t h = 0; h < m->heads; h++) {
        mn_head head;
        head_at(&head, m, own, h);
        if (m->info.ccq) {
            mn_curvature_contract(m->scratch, head.in.q, head.in.ccq_gamma[0], head.part[kk],
                                  head.part[ks], m->n_tokens, K);
            head.in.q = m->scratch;
        }
        if (o) m->info.read->run(o + h * V, &head);
        if (variance) m->info.belief->variance(variance + h * V, &head);
    }
}

static mn_status check_variance(const mn_mixer *m, const double *variance) {
    if (!variance || mn_mixer_has_variance(&m->info)) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "%s knows no variance of its reads", m->info.name);
}

mn_status mn_mixer_start(mn_mixer *m, const mn_token *token) {
    mn_token own;
    const mn_status st = take_token(&own, m, token);
    if (st == MN_OK && !m->started) start_heads(m, &own);
    return st;
}

mn_status mn_mixer_step(mn_mixer *m, const mn_token *token, double *o, double *variance) {
    mn_token own;
    mn_status st = check_variance(m, variance);
    if (st == MN_OK) st = take_token(&own, m, token);
    if (st == MN_OK && mn_mixer_has_cache(&m->info)) st = append(m, &own);
    if (st != MN_OK) return st;
    if (!m->started) start_heads(m, &own);
    for (int64_t h = 0; h < m->heads; h++) {
        mn_head head;
        head_at(&head, m, &own, h);
        m->info.transition->predict(&head);
        if (m->info.belief->observe) m->info.belief->observe(&head);
        const int kk = m->n_row_parts;
        if (m->info.ccq) {
            mn_curvature_observe(head.part[kk], head.part[kk + 1], head.in.k, m->config.size.K);
        }
    }
    m->n_tokens++;
    read_heads(m, &own, o, variance);
    return MN_OK;
}

mn_status mn_mixer_read(mn_mixer *m, const mn_token *token, double *o, double *variance) {
    mn_token own;
    mn_status st = check_variance(m, variance);
    if (st == MN_OK) st = take_token(&own, m, token);
    if (st != MN_OK) return st;
    if (!m->started) start_heads(m, &own);
    read_heads(m, &own, o, variance);
    return MN_OK;
}
