/* sample.c - the next token from logits: penalty, temperature, three cuts, one draw.
 *
 * The most probable tokens come off a heap, so that a cut after m of V costs V + m log V. */
#include "infer/sample.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "base/status.h"
#include "base/util.h"

struct mn_sampler {
    int64_t capacity;
    double *z, *weight;     // logits; exp(z - max)
    int32_t *heap;          // ids, the largest logit on top
    uint8_t *kept;
};

mn_status mn_sampler_create(mn_sampler **out, int64_t most_tokens) {
    *out = NULL;
    size_t bytes;
    mn_sampler *s = NULL;
    if (most_tokens > 0 && mn_mul_size(&bytes, (size_t)most_tokens, sizeof(double))) {
        s = calloc(1, sizeof *s);
    }
    if (s) {
        s->capacity = most_tokens;
        s->z = malloc(bytes);
        s->weight = malloc(bytes);
        s->heap = malloc((size_t)most_tokens * sizeof *s->heap);
        s->kept = malloc((size_t)most_tokens);
    }
    if (!s || !s->z || !s->weight || !s->heap || !s->kept) {
        mn_sampler_destroy(s);
        return mn_fail(MN_ERR_MEMORY, "no memory to sample from %" PRId64 " tokens", most_tokens);
    }
    *out = s;
    return MN_OK;
}

void mn_sampler_destroy(mn_sampler *sampler) {
    if (!sampler) return;
    free(sampler->z);
    free(sampler->weight);
    free(sampler->heap);
    free(sampler->kept);
    free(sampler);
}

/* ---- fields ---------------------------------------------------------------------------------- */

static const mn_sampling_field fields[] = {
#define SAMPLING(field, kind, low, high, value, about)                                             \
    { #field, about, MN_SAMPLING_##kind, offsetof(mn_sampling, field), low, high, value },
#include "infer/sampling.def"
#undef SAMPLING
};

int mn_sampling_fields(const mn_sampling_field **out) {
    *out = fields;
    return (int)MN_COUNTOF(fields);
}

void mn_sampling_defaults(mn_sampling *how) {
    if (!how) return;
    *how = (mn_sampling){ 0 };
    for (size_t i = 0; i < MN_COUNTOF(fields); i++) {
        void *at = (char *)how + fields[i].offset;
        if (fields[i].kind == MN_SAMPLING_REAL) *(double *)at = fields[i].value;
        else *(int64_t *)at = (int64_t)fields[i].value;
    }
}

static mn_status out_of_range(const mn_sampling_field *f) {
    return mn_fail(MN_ERR_ARGUMENT, "%s takes %s from %g to %g", f->name,
                   f->kind == MN_SAMPLING_REAL ? "a number" : "a whole number", f->low, f->high);
}

mn_status mn_sampling_check(const mn_sampling *how) {
    for (size_t i = 0; i < MN_COUNTOF(fields); i++) {
        const mn_sampling_field *f = &fields[i];
        const void *at = (const char *)how + f->offset;
        if (f->kind == MN_SAMPLING_SEED) continue;
        const bool real = f->kind == MN_SAMPLING_REAL;
        const double value = real ? *(const double *)at : (double)*(const int64_t *)at;
        if (!(value >= f->low && value <= f->high)) return out_of_range(f);
    }
    return MN_OK;
}

mn_status mn_sampling_set(mn_sampling *how, const mn_sampling_field *field, const char *text) {
    void *at = (char *)how + field->offset;
    char *end = NULL;
    errno = 0;
    if (field->kind == MN_SAMPLING_SEED) {
        const unsigned long long seed = strtoull(text, &end, 10);
        if (end == text || *end || errno || *text == '-') {
            return mn_fail(MN_ERR_ARGUMENT, "%s takes a whole number from 0 to 2^64 - 1",
                           field->name);
        }
        *(uint64_t *)at = seed;
        return MN_OK;
    }
    const double value = strtod(text, &end);
    const bool whole = field->kind == MN_SAMPLING_REAL || value == floor(value);
    if (end == text || *end || !whole || !(value >= field->low && value <= field->high)) {
        return out_of_range(field);
    }
    if (field->kind == MN_SAMPLING_REAL) *(double *)at = value;
    else *(int64_t *)at = (int64_t)value;
    return MN_OK;
}

/* ---- logits ---------------------------------------------------------------------------------- */

/* Copies the logits, penalty included. Each penalised value is computed from the logit given, so a
 * token that occurs twice is penalised once. */
static mn_status take_logits(mn_sampler *s, const mn_sampling *how, const mn_draw *from) {
    for (int64_t i = 0; i < from->n; i++) {
        s->z[i] = from->logits[i];
        if (!isnan(s->z[i]) && s->z[i] < INFINITY) continue;
        return mn_fail(MN_ERR_NUMERIC, "the logit of token %" PRId64 " is %g: the model's weights "
                       "or its state are spoilt", i, s->z[i]);
    }
    const double r = how->repetition_penalty;
    if (r == 0.0 || r == 1.0) return MN_OK;
    const int64_t window = how->repetition_window ? how->repetition_window : from->n_recent;
    for (int64_t i = mn_max(0, from->n_recent - window); i < from->n_recent; i++) {
        const int32_t id = from->recent[i];
        if (id < 0 || id >= from->n) continue;
        const double z = from->logits[id];
        s->z[id] = z > 0.0 ? z / r : z * r;
    }
    return MN_OK;
}

static int64_t largest(const double *z, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++) {
        if (z[i] > z[best]) best = i;
    }
    return best;
}

/* ---- the heap -------------------------------------------------------------------------------- */

static bool before(const double *z, int32_t a, int32_t b) {
    return z[a] > z[b] || (z[a] == z[b] && a < b);
}

static void sink(const double *z, int32_t *heap, int64_t n, int64_t at) {
    const int32_t id = heap[at];
    for (int64_t child = 2 * at + 1; child < n; child = 2 * at + 1) {
        if (child + 1 < n && before(z, heap[child + 1], heap[child])) child++;
        if (!before(z, heap[child], id)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = id;
}

static void make_heap(mn_sampler *s, int64_t n) {
    for (int64_t i = 0; i < n; i++) s->heap[i] = (int32_t)i;
    for (int64_t i = n / 2; i-- > 0;) sink(s->z, s->heap, n, i);
}

/* Takes the top off a heap of *n and puts it behind the rest, at heap[*n - 1]. */
static int32_t pop(mn_sampler *s, int64_t *n) {
    const int32_t top = s->heap[0];
    s->heap[0] = s->heap[--*n];
    s->heap[*n] = top;
    if (*n > 0) sink(s->z, s->heap, *n, 0);
    return top;
}

/* ---- cuts ------------------------------------------------------------------------------------ */

/* Marks what top_k and top_p leave. */
static void cut(mn_sampler *s, const mn_sampling *how, int64_t n) {
    const int64_t k = how->top_k > 0 && how->top_k < n ? how->top_k : n;
    const bool by_mass = how->top_p > 0.0 && how->top_p < 1.0;
    memset(s->kept, k == n && !by_mass, (size_t)n);
    if (k == n && !by_mass) return;
    make_heap(s, n);
    int64_t left = n;
    double mass = 0.0, sum = 0.0;
    if (k < n) {    // the k largest end up at heap[n-1], heap[n-2], ...
        for (int64_t i = 0; i < k; i++) mass += s->weight[pop(s, &left)];
    } else {
        for (int64_t i = 0; i < n; i++) mass += s->weight[i];
    }
    for (int64_t i = 0; i < k; i++) {
        const int32_t id = k < n ? s->heap[n - 1 - i] : pop(s, &left);
        s->kept[id] = 1;
        sum += s->weight[id];
        if (by_mass && sum >= how->top_p * mass) break;
    }
}

static int32_t draw(const mn_sampler *s, const mn_sampling *how, const mn_draw *from) {
    double mass = 0.0, sum = 0.0;
    for (int64_t i = 0; i < from->n; i++) {
        if (s->kept[i] && s->weight[i] >= how->min_p) mass += s->weight[i];
    }
    const double u = mn_rng_uniform(how->seed, how->stream, from->position);
    int64_t last = 0;
    for (int64_t i = 0; i < from->n; i++) {
        if (!s->kept[i] || s->weight[i] < how->min_p || s->weight[i] == 0.0) continue;
        last = i;
        sum += s->weight[i];
        if (sum > u * mass) break;
    }
    return (int32_t)last;
}

mn_status mn_sampler_pick(int32_t *token, mn_sampler *s, const mn_sampling *how,
                          const mn_draw *from) {
    if (from->n < 1 || from->n > s->capacity) {
        return mn_fail(MN_ERR_ARGUMENT, "sampling from %" PRId64 " tokens; it takes 1 to %" PRId64,
                       from->n, s->capacity);
    }
    mn_status st = mn_sampling_check(how);
    if (st == MN_OK) st = take_logits(s, how, from);
    if (st != MN_OK) return st;
    const int64_t best = largest(s->z, from->n);
    const double top = s->z[best];
    if (top == -INFINITY) return mn_fail(MN_ERR_NUMERIC, "every logit is -infinity");
    if (how->temperature == 0.0) {
        *token = (int32_t)best;
        return MN_OK;
    }
    for (int64_t i = 0; i < from->n; i++) s->weight[i] = exp((s->z[i] - top) / how->temperature);
    cut(s, how, from->n);
    *token = draw(s, how, from);
    return MN_OK;
}
