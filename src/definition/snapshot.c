/* snapshot.c - the state of a mixer: sizes, parts, copies. */
#include "definition/mixer_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"

enum { N_SIZES = 9, N_OPTIONS = 5, FIRST_TOKENS = 16 };

/* What opens a snapshot. Up to n_tokens it says which mixers it fits. */
typedef struct header {
    char magic[8], name[MN_MIXER_NAME];
    int64_t size[N_SIZES], option[N_OPTIONS];
    double scale, eps, rope_base;
    int64_t n_tokens, started, length;
} header;

static void fill_header(header *out, const mn_mixer *m) {
    const mn_call *s = &m->config.size;
    const int64_t size[N_SIZES] = { s->H, s->K, s->V, s->G, s->J, s->Q, s->P, s->R, s->W };
    const int64_t option[N_OPTIONS] = { m->config.rope_kind, m->config.norm, m->config.from_prior,
                                        m->config.softplus, m->config.layout };
    memset(out, 0, sizeof *out);
    memcpy(out->magic, "mnstate1", sizeof out->magic);
    mn_mixer_full_name(out->name, &m->info);
    memcpy(out->size, size, sizeof size);
    memcpy(out->option, option, sizeof option);
    out->scale = m->config.scale;
    out->eps = m->config.eps;
    out->rope_base = m->config.rope_base;
    out->n_tokens = m->n_tokens;
    out->started = m->started;
    out->length = m->cache.length;
}

static bool grow(double **numbers, int64_t length, int64_t count) {
    int64_t all;
    size_t bytes;
    if (!mn_mul_i64(&all, length, count) || !mn_mul_size(&bytes, (size_t)all, sizeof **numbers)) {
        return false;
    }
    double *grown = realloc(*numbers, bytes > 0 ? bytes : 1);
    if (grown) *numbers = grown;
    return grown != NULL;
}

mn_status mn_cache_reserve(mn_cache *cache, int64_t length) {
    if (length <= cache->capacity) return MN_OK;
    int64_t room = cache->capacity > 0 ? cache->capacity : FIRST_TOKENS;
    while (room < length && room <= INT64_MAX / 2) room *= 2;
    if (!grow(&cache->k, room, cache->k_count) || !grow(&cache->v, room, cache->v_count) ||
        !grow(&cache->scratch, room, 3)) {
        return mn_fail(MN_ERR_MEMORY, "no memory for a cache of %" PRId64 " tokens", room);
    }
    cache->capacity = room;
    return MN_OK;
}

int64_t mn_mixer_tokens(const mn_mixer *m) {
    return m->n_tokens;
}

int64_t mn_mixer_state_floats(const mn_mixer *m) {
    const mn_cache *cache = &m->cache;
    return m->state_count + m->info.ccq + cache->length * (cache->k_count + cache->v_count);
}

double *mn_mixer_part(mn_mixer *m, const char *name, int64_t *count) {
    for (int n = 0; n < m->n_parts; n++) {
        if (strcmp(m->parts[n].name, name) != 0) continue;
        if (count) *count = m->parts[n].count;
        return m->parts[n].at;
    }
    return NULL;
}

void mn_mixer_reset(mn_mixer *m) {
    memset(m->state, 0, (size_t)m->state_count * sizeof *m->state);
    m->cache.length = 0;
    m->n_tokens = 0;
    m->started = false;
}

static size_t body_bytes(const mn_mixer *m, int64_t length) {
    const int64_t cached = length * (m->cache.k_count + m->cache.v_count);
    return (size_t)(m->state_count + cached) * sizeof(double);
}

size_t mn_mixer_snapshot_bytes(const mn_mixer *m) {
    return sizeof(header) + body_bytes(m, m->cache.length);
}

void mn_mixer_snapshot(void *bytes, const mn_mixer *m) {
    const mn_cache *cache = &m->cache;
    const size_t parts = (size_t)m->state_count * sizeof(double);
    const size_t keys = (size_t)(cache->length * cache->k_count) * sizeof(double);
    const size_t values = (size_t)(cache->length * cache->v_count) * sizeof(double);
    unsigned char *at = bytes;
    header head;
    fill_header(&head, m);
    memcpy(at, &head, sizeof head);
    memcpy(at + sizeof head, m->state, parts);
    if (keys > 0) memcpy(at + sizeof head + parts, cache->k, keys);
    if (values > 0) memcpy(at + sizeof head + parts + keys, cache->v, values);
}

/* The header at the front of `bytes`, if the rest is as long as it says and it fits `m`. */
static mn_status take_header(header *out, const mn_mixer *m, const void *bytes, size_t size) {
    header own;
    char name[MN_MIXER_NAME];
    fill_header(&own, m);
    mn_mixer_full_name(name, &m->info);
    if (size < sizeof *out) {
        return mn_fail(MN_ERR_FORMAT, "%s: a snapshot has at least %zu bytes, this has %zu", name,
                       sizeof *out, size);
    }
    memcpy(out, bytes, sizeof *out);
    if (memcmp(out, &own, offsetof(header, n_tokens)) != 0) {
        return mn_fail(MN_ERR_FORMAT, "%s: the snapshot is of another layer, size or option", name);
    }
    const int64_t per_token = m->cache.k_count + m->cache.v_count;
    const bool sound = out->n_tokens >= 0 && (out->started == 0 || out->started == 1) &&
                       out->length == (per_token > 0 ? out->n_tokens : 0) &&
                       (per_token == 0 || out->length <= INT64_MAX / 64 / per_token);
    if (!sound || size != sizeof *out + body_bytes(m, out->length)) {
        return mn_fail(MN_ERR_FORMAT, "%s: the snapshot is damaged", name);
    }
    return MN_OK;
}

mn_status mn_mixer_restore(mn_mixer *m, const void *bytes, size_t size) {
    header head;
    mn_cache *cache = &m->cache;
    mn_status st = take_header(&head, m, bytes, size);
    if (st == MN_OK) st = mn_cache_reserve(cache, head.length);
    if (st != MN_OK) return st;
    const unsigned char *at = (const unsigned char *)bytes + sizeof head;
    const size_t parts = (size_t)m->state_count * sizeof(double);
    const size_t keys = (size_t)(head.length * cache->k_count) * sizeof(double);
    const size_t values = (size_t)(head.length * cache->v_count) * sizeof(double);
    memcpy(m->state, at, parts);
    if (keys > 0) memcpy(cache->k, at + parts, keys);
    if (values > 0) memcpy(cache->v, at + parts + keys, values);
    cache->length = head.length;
    m->n_tokens = head.n_tokens;
    m->started = head.started != 0;
    return MN_OK;
}

mn_status mn_mixer_clone(mn_mixer **out, const mn_mixer *m) {
    char name[MN_MIXER_NAME];
    mn_mixer *copy = NULL;
    mn_mixer_full_name(name, &m->info);
    mn_status st = mn_mixer_create(&copy, name, &m->config);
    const size_t size = mn_mixer_snapshot_bytes(m);
    void *bytes = malloc(size);
    if (st == MN_OK && !bytes) {
        st = mn_fail(MN_ERR_MEMORY, "no memory for a snapshot of %zu bytes", size);
    }
    if (st == MN_OK) {
        mn_mixer_snapshot(bytes, m);
        st = mn_mixer_restore(copy, bytes, size);
    }
    free(bytes);
    if (st != MN_OK) {
        mn_mixer_destroy(copy);
        return st;
    }
    *out = copy;
    return MN_OK;
}
