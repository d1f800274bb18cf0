/* dict.c - members in order, found by an open hash table once there are more than a few. */
#include <math.h>
#include <string.h>

#include "template/state.h"

enum { FEW = 8 };

static uint64_t hash_bytes(const char *bytes, size_t size) {
    uint64_t h = 0xCBF29CE484222325u;
    for (size_t i = 0; i < size; i++) h = (h ^ (uint8_t)bytes[i]) * 0x100000001B3u;
    return h;
}

/* Equal values have equal hashes: 1, 1.0 and True are one key. */
static uint64_t hash_of(const value *v) {
    int64_t whole;
    switch (v->kind) {
    case K_STRING: return hash_bytes(v->text.bytes, v->text.size);
    case K_BOOL:
    case K_INT:
        whole_of(v, &whole);
        return (uint64_t)whole * 0x9E3779B97F4A7C15u;
    case K_FLOAT:
        if (v->real == floor(v->real) && fabs(v->real) < 9e18) {
            return (uint64_t)(int64_t)v->real * 0x9E3779B97F4A7C15u;
        }
        return hash_bytes((const char *)&v->real, sizeof v->real);
    case K_TUPLE: {
        uint64_t h = 17;
        for (int64_t i = 0; i < v->list.n; i++) h = h * 31 + hash_of(v->list.at[i]);
        return h;
    }
    default: return (uint64_t)v->kind;
    }
}

bool hashable(const value *v) {
    if (v->kind == K_TUPLE) {
        for (int64_t i = 0; i < v->list.n; i++) {
            if (!hashable(v->list.at[i])) return false;
        }
    }
    return v->kind != K_LIST && v->kind != K_DICT;
}

value *new_dict(state *s) {
    value *v = new_value(s, K_DICT);
    if (v && !(v->members = take(s, sizeof *v->members))) return NULL;
    return v;
}

static void note(dict *d, int64_t i) {
    uint64_t at = d->slots[i].hash & (uint64_t)(d->table_size - 1);
    while (d->table[at] >= 0) at = (at + 1) & (uint64_t)(d->table_size - 1);
    d->table[at] = (int32_t)i;
}

static bool grow(state *s, dict *d) {
    const int64_t room = d->room ? 2 * d->room : 4;
    dict_slot *grown = take(s, (size_t)room * sizeof *grown);
    if (!grown) return false;
    if (d->n) memcpy(grown, d->slots, (size_t)d->n * sizeof *grown);
    d->slots = grown;
    d->room = room;
    if (room <= FEW) return true;
    d->table_size = 4 * room;
    d->table = take(s, (size_t)d->table_size * sizeof *d->table);
    if (!d->table) return false;
    for (int64_t i = 0; i < d->table_size; i++) d->table[i] = -1;
    for (int64_t i = 0; i < d->n; i++) note(d, i);
    return true;
}

static int64_t find(state *s, const dict *d, const value *key, uint64_t hash) {
    if (!d->table) {
        for (int64_t i = 0; i < d->n; i++) {
            if (d->slots[i].hash == hash && equal(s, d->slots[i].key, key)) return i;
        }
        return -1;
    }
    uint64_t at = hash & (uint64_t)(d->table_size - 1);
    for (; d->table[at] >= 0; at = (at + 1) & (uint64_t)(d->table_size - 1)) {
        const dict_slot *slot = &d->slots[d->table[at]];
        if (slot->hash == hash && equal(s, slot->key, key)) return d->table[at];
        if (s && !spend(s, 1)) return -1;
    }
    return -1;
}

bool dict_set(state *s, dict *d, value *key, value *item) {
    if (!key || !item) return false;
    if (!hashable(key)) {
        fail(s, "unhashable type: '%s'", type_name(key));
        return false;
    }
    const uint64_t hash = hash_of(key);
    const int64_t at = find(s, d, key, hash);
    if (at >= 0) {
        d->slots[at].item = item;
        return true;
    }
    if (d->n == d->room && !grow(s, d)) return false;
    d->slots[d->n] = (dict_slot){ key, item, hash };
    if (d->table) note(d, d->n);
    d->n++;
    return true;
}

bool dict_set_text(state *s, dict *d, const char *key, value *item) {
    return dict_set(s, d, new_text(s, key), item);
}

value *dict_get(state *s, const dict *d, value *key) {
    if (!hashable(key)) return fail(s, "unhashable type: '%s'", type_name(key));
    const int64_t at = find(s, d, key, hash_of(key));
    return at < 0 ? NULL : d->slots[at].item;
}

value *dict_get_text(const dict *d, const char *key, size_t size) {
    const value name = { .kind = K_STRING, .text = { key, size, -1 } };
    const int64_t at = find(NULL, d, &name, hash_bytes(key, size));
    return at < 0 ? NULL : d->slots[at].item;
}
