/* dialect.c - keys and names of other software, by the rows of families.def. */
#include "model/families/dialect.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"

static const struct {
    const char *type, *layer, *class;
} families[] = {
#define FAMILY(type, layer, class) { type, layer, class },
#include "model/families/families.def"
};

static const struct {
    const char *type, *theirs, *ours;
} keys[] = {
#define KEY_OF(type, theirs, ours) { type, theirs, ours },
#include "model/families/families.def"
};

static const struct {
    const char *type, *ours, *json;
} fixed[] = {
#define FIXED(type, ours, json) { type, ours, json },
#include "model/families/families.def"
};

static const struct {
    const char *type, *theirs;
} unread[] = {
#define UNREAD(type, theirs) { type, theirs },
#include "model/families/families.def"
};

static const struct {
    const char *type, *ours, *json;
} only_ours[] = {
#define ONLY_OURS(type, ours, json) { type, ours, json },
#include "model/families/families.def"
};

static const struct {
    const char *type, *kind, *ours, *theirs;    // kind NULL: any
} tensors[] = {
#define TENSOR_OF(type, ours, theirs) { type, NULL, ours, theirs },
#define TENSOR_AT(type, kind, ours, theirs) { type, kind, ours, theirs },
#include "model/families/families.def"
};

static const struct {
    const char *type, *ours;
} turned[] = {
#define TRANSPOSED(type, ours) { type, ours },
#include "model/families/families.def"
};

static const struct {
    const char *type, *ours;
} joined[] = {
#define JOINED(type, ours) { type, ours },
#include "model/families/families.def"
};

static const struct {
    const char *type, *theirs, *ours;
} layer_types[] = {
#define LAYER_TYPE(type, theirs, ours) { type, theirs, ours },
#include "model/families/families.def"
};

static const struct {
    const char *type, *key, *listed, *others;
} layers_at[] = {
#define LAYERS_AT(type, key, listed, others) { type, key, listed, others },
#include "model/families/families.def"
};

static int row_at(const char *family) {
    for (size_t i = 0; i < MN_COUNTOF(layers_at); i++) {
        if (strcmp(layers_at[i].type, family) == 0) return (int)i;
    }
    return -1;
}

static const struct {
    const char *type, *member;
} nests[] = {
#define NESTED(type, member) { type, member },
#include "model/families/families.def"
};

bool mn_dialect_mixes(const char *family) {
    for (size_t i = 0; i < MN_COUNTOF(layer_types); i++) {
        if (strcmp(layer_types[i].type, family) == 0) return true;
    }
    return row_at(family) >= 0;
}

const char *mn_dialect_nested(const char *family) {
    for (size_t i = 0; i < MN_COUNTOF(nests); i++) {
        if (strcmp(nests[i].type, family) == 0) return nests[i].member;
    }
    return NULL;
}

const char *mn_dialect_find(const char *type) {
    for (size_t i = 0; i < MN_COUNTOF(families); i++) {
        if (strcmp(families[i].type, type) == 0) return families[i].type;
    }
    for (size_t i = 0; i < MN_COUNTOF(keys); i++) {
        if (strcmp(keys[i].type, type) == 0) return keys[i].type;
    }
    for (size_t i = 0; i < MN_COUNTOF(unread); i++) {
        if (strcmp(unread[i].type, type) == 0) return unread[i].type;
    }
    return NULL;
}

const char *mn_dialect_layer(const char *family) {
    for (size_t i = 0; i < MN_COUNTOF(families); i++) {
        if (strcmp(families[i].type, family) == 0) return families[i].layer;
    }
    return NULL;
}

const char *mn_dialect_class(const char *family) {
    for (size_t i = 0; i < MN_COUNTOF(families); i++) {
        if (strcmp(families[i].type, family) == 0) return families[i].class;
    }
    return NULL;
}

static const struct {
    const char *type, *ours, *theirs;
    int part, parts;
} stacks[] = {
#define STACKED(type, ours, theirs, part, parts) { type, ours, theirs, part, parts },
#include "model/families/families.def"
};

static const struct {
    const char *type, *prefix;
} towers[] = {
#define BESIDE(type, prefix) { type, prefix },
#include "model/families/families.def"
};

/* ---- keys ------------------------------------------------------------------------------------ */

static mn_status no_memory(void) {
    return mn_fail(MN_ERR_MEMORY, "no memory for a configuration");
}

/* transformers 5 writes infinity as {"__float__": "Infinity"}, which bounds nothing, as null. */
static bool is_float(json_t *value) {
    return json_is_object(value) && json_object_get(value, "__float__");
}

/* Member or item `name` of `whole`; NULL: there is none, or null. */
static json_t *part_of(json_t *whole, const char *name) {
    json_t *part = json_is_array(whole) ? json_array_get(whole, (size_t)strtoul(name, NULL, 10))
                                        : json_object_get(whole, name);
    return json_is_null(part) || is_float(part) ? NULL : part;
}

enum { KEY_NAME = 96 };

/* "a.b" as its first part and what follows the dot, NULL without one. */
static const char *first_of(char name[KEY_NAME], const char *path) {
    const size_t n = strcspn(path, ".");
    snprintf(name, KEY_NAME, "%.*s", (int)n, path);
    return path[n] ? path + n + 1 : NULL;
}

/* Whether some row of the family reads, or passes over, member `name` of `outer`. */
static bool reads(const char *family, const char *outer, const char *name) {
    char path[2 * KEY_NAME];
    snprintf(path, sizeof path, "%s.%s", outer, name);
    for (size_t i = 0; i < MN_COUNTOF(keys); i++) {
        if (strcmp(keys[i].type, family) == 0 && strcmp(keys[i].theirs, path) == 0) return true;
    }
    for (size_t i = 0; i < MN_COUNTOF(unread); i++) {
        if (strcmp(unread[i].type, family) == 0 && strcmp(unread[i].theirs, path) == 0) return true;
    }
    return false;
}

/* Members of an object that rows read in parts are each read by one. */
static mn_status check_parts(const char *family, const mn_json *object, const char *outer) {
    const mn_json whole = mn_json_member(object, outer);
    if (!mn_json_given(&whole) || !json_is_object(whole.value)) return MN_OK;
    for (mn_json at = { 0 }; mn_json_next(&at, &whole);) {
        if (!mn_json_given(&at) || reads(family, outer, at.name)) continue;
        return mn_json_fail(&at, "is not understood for model_type \"%s\"", family);
    }
    return MN_OK;
}

/* Puts `value` where `path` says, making what is not there; lists grow by nulls. */
static mn_status put(json_t *object, const char *path, json_t *value) {
    char name[KEY_NAME];
    const char *rest = first_of(name, path);
    if (!rest) return json_object_set(object, name, value) == 0 ? MN_OK : no_memory();
    const bool list = rest[0] >= '0' && rest[0] <= '9';
    json_t *inner = json_object_get(object, name);
    if (!inner) {
        inner = list ? json_array() : json_object();
        if (json_object_set_new(object, name, inner) != 0) return no_memory();
    }
    if (!list) return put(inner, rest, value);
    const size_t at = (size_t)strtoul(rest, NULL, 10);
    while (json_array_size(inner) <= at) {
        if (json_array_append_new(inner, json_null()) != 0) return no_memory();
    }
    return json_array_set(inner, at, value) == 0 ? MN_OK : no_memory();
}

/* What is at "a.b.c"; NULL: nothing. */
static json_t *at_path(json_t *object, const char *path) {
    char name[KEY_NAME];
    const char *rest = first_of(name, path);
    json_t *inner = json_object_get(object, name);
    return rest && inner ? at_path(inner, rest) : inner;
}

static const char *ours_of(const char *family, const char *theirs) {
    for (size_t i = 0; i < MN_COUNTOF(layer_types); i++) {
        const bool same = strcmp(layer_types[i].type, family) == 0;
        if (same && strcmp(layer_types[i].theirs, theirs) == 0) return layer_types[i].ours;
    }
    return NULL;
}

/* "layers" from a list of those that differ from the others. */
static mn_status take_listed(json_t *out, int row, const mn_json *object) {
    const mn_json list = mn_json_member(object, layers_at[row].key);
    int64_t n = 0;
    mn_status st = mn_json_get_i64(&n, object, "num_hidden_layers");
    if (st == MN_OK) st = mn_json_expect_list(&list);
    if (st != MN_OK || n < 1 || n > 65536) return st;
    char *text = calloc((size_t)n, MN_MIXER_NAME + 2);
    if (!text) return no_memory();
    size_t used = 0;
    for (int64_t i = 0; i < n && st == MN_OK; i++) {
        bool listed = false;
        for (int64_t k = 0; k < mn_json_count(&list) && st == MN_OK; k++) {
            const mn_json item = mn_json_item(&list, k);
            int64_t at = -1;
            st = mn_json_read_i64(&at, &item);
            if (st == MN_OK && (at < 0 || at >= n)) {
                st = mn_json_fail(&item, "there is no such layer");
            }
            listed |= at == i;
        }
        const char *name = listed ? layers_at[row].listed : layers_at[row].others;
        used += (size_t)sprintf(text + used, "%s%s", i ? ", " : "", name);
    }
    json_object_del(out, layers_at[row].key);
    if (st == MN_OK && json_object_set_new(out, "layers", json_string(text)) != 0) st = no_memory();
    free(text);
    return st;
}

/* "layers" from the list that says what each layer is. */
static mn_status take_layers(json_t *out, const char *family, const mn_json *object) {
    const int row = row_at(family);
    if (row >= 0) return take_listed(out, row, object);
    const mn_json list = mn_json_member(object, "layer_types");
    if (!mn_json_given(&list) && mn_dialect_derive(family)) return MN_OK;    // said otherwise
    mn_status st = mn_json_expect_list(&list);
    const int64_t n = st == MN_OK ? mn_json_count(&list) : 0;
    char *text = calloc((size_t)n + 1, MN_MIXER_NAME + 2);
    if (!text) return no_memory();
    for (int64_t i = 0; i < n && st == MN_OK; i++) {
        const mn_json at = mn_json_item(&list, i);
        const char *theirs = "";
        st = mn_json_read_text(&theirs, &at);
        const char *ours = ours_of(family, theirs);
        if (st == MN_OK && !ours) {
            st = mn_json_fail(&at, "\"%s\" is no layer of %s", theirs, family);
        }
        if (st == MN_OK) sprintf(text + strlen(text), "%s%s", i ? ", " : "", ours);
    }
    json_object_del(out, "layer_types");
    if (st == MN_OK && json_object_set_new(out, "layers", json_string(text)) != 0) st = no_memory();
    free(text);
    return st;
}

static mn_status take_key(json_t *out, const char *family, const mn_json *object,
                          const char *theirs, const char *ours) {
    char name[KEY_NAME];
    const char *rest = first_of(name, theirs);
    json_t *value = json_object_get(object->value, name);
    if (rest) {
        const mn_status st = check_parts(family, object, name);
        if (st != MN_OK) return st;
        value = part_of(value, rest);
    }
    if (!value || json_is_null(value)) return MN_OK;
    json_t *before = at_path(out, ours);
    if (before && !json_is_null(before) && !json_equal(before, value)) {
        const mn_json at = mn_json_member(object, name);
        return mn_json_fail(&at, "contradicts another key that says the same (%s)", ours);
    }
    return put(out, ours, value);
}

/* Drops what rows of the family have read under their names. */
static void drop_theirs(json_t *out, const char *family) {
    char name[KEY_NAME];
    for (size_t i = 0; i < MN_COUNTOF(keys); i++) {
        if (strcmp(keys[i].type, family) != 0) continue;
        first_of(name, keys[i].theirs);
        json_object_del(out, name);
    }
    for (size_t i = 0; i < MN_COUNTOF(unread); i++) {
        if (strcmp(unread[i].type, family) == 0) json_object_del(out, unread[i].theirs);
    }
}

/* Whether what a class does without saying so is what the model does; 1 and 1.0 are the same. */
static bool same_value(const json_t *a, const json_t *b) {
    if (json_is_number(a) && json_is_number(b)) {
        return json_number_value(a) == json_number_value(b);
    }
    return json_equal(a, b);
}

mn_status mn_dialect_read(json_t **out, const char *family, const mn_json *object) {
    *out = json_deep_copy(object->value);
    if (!*out) return no_memory();
    drop_theirs(*out, family);
    mn_status st = mn_dialect_mixes(family) ? take_layers(*out, family, object) : MN_OK;
    for (size_t i = 0; i < MN_COUNTOF(keys) && st == MN_OK; i++) {
        if (strcmp(keys[i].type, family) != 0) continue;
        st = take_key(*out, family, object, keys[i].theirs, keys[i].ours);
    }
    const mn_derive_fn derive = mn_dialect_derive(family);
    if (st == MN_OK && derive) st = derive(*out, object);
    for (size_t i = 0; i < MN_COUNTOF(fixed) && st == MN_OK; i++) {
        const bool said = at_path(*out, fixed[i].ours) != NULL;    // ours, where it is otherwise
        if (strcmp(fixed[i].type, family) != 0 || said) continue;
        json_t *value = json_loads(fixed[i].json, JSON_DECODE_ANY, NULL);
        st = value ? put(*out, fixed[i].ours, value) : no_memory();
        json_decref(value);
    }
    if (st != MN_OK) {
        json_decref(*out);
        *out = NULL;
    }
    return st;
}

/* The first row that says `ours` is what is written. */
static bool said_before(size_t row) {
    for (size_t i = 0; i < row; i++) {
        const bool same = strcmp(keys[i].type, keys[row].type) == 0;
        if (same && strcmp(keys[i].ours, keys[row].ours) == 0) return true;
    }
    return false;
}

/* layer_types, the other way. */
static mn_status put_layers(json_t *object, const char *family, char (*layers)[MN_MIXER_NAME],
                            int n) {
    json_t *list = json_array();
    const int row = row_at(family);
    const char *key = row < 0 ? "layer_types" : layers_at[row].key;
    bool failed = json_object_set_new(object, key, list) != 0;
    for (int i = 0; i < n && !failed; i++) {
        if (row >= 0 && strcmp(layers_at[row].listed, layers[i]) == 0) {
            failed |= json_array_append_new(list, json_integer(i)) != 0;
        }
        for (size_t k = 0; k < MN_COUNTOF(layer_types); k++) {
            if (strcmp(layer_types[k].type, family) != 0) continue;
            if (strcmp(layer_types[k].ours, layers[i]) != 0) continue;
            failed |= json_array_append_new(list, json_string(layer_types[k].theirs)) != 0;
        }
    }
    json_object_del(object, "mixers");
    return failed ? no_memory() : MN_OK;
}

/* Puts all settings of a text model where its family has them. */
static mn_status nest(json_t *object, const char *member) {
    json_t *inner = json_copy(object);
    if (!inner) return no_memory();
    json_object_del(inner, "architectures");
    static const char *const outer[] = { "model_type", "architectures", "mneme_version",
                                         "tie_word_embeddings" };
    const char *key;
    json_t *value;
    void *next;
    json_object_foreach_safe(object, next, key, value) {
        bool stays = false;
        for (size_t i = 0; i < MN_COUNTOF(outer); i++) stays |= strcmp(outer[i], key) == 0;
        if (!stays) json_object_del(object, key);
    }
    return json_object_set_new(object, member, inner) == 0 ? MN_OK : no_memory();
}

/* Whether `ours` has a value for which the family has no word. */
static bool is_only_ours(json_t *object, const char *family, const char *ours) {
    for (size_t i = 0; i < MN_COUNTOF(only_ours); i++) {
        const bool type = strcmp(only_ours[i].type, family) == 0;
        const bool same = type && strcmp(only_ours[i].ours, ours) == 0;
        json_t *value = same ? json_loads(only_ours[i].json, JSON_DECODE_ANY, NULL) : NULL;
        const json_t *given = json_object_get(object, ours);
        const bool is = value && given && same_value(given, value);
        json_decref(value);
        if (is) return true;
    }
    return false;
}

mn_status mn_dialect_write(json_t *object, const char *family, char (*layers)[MN_MIXER_NAME],
                           int n) {
    mn_status st = MN_OK;
    for (size_t i = 0; i < MN_COUNTOF(keys) && st == MN_OK; i++) {
        json_t *value = at_path(object, keys[i].ours);
        if (strcmp(keys[i].type, family) != 0 || !value || said_before(i)) continue;
        if (is_only_ours(object, family, keys[i].ours)) continue;
        if (!json_is_null(value)) st = put(object, keys[i].theirs, value);
    }
    for (size_t i = 0; i < MN_COUNTOF(keys); i++) {
        const bool own = strcmp(keys[i].ours, keys[i].theirs) == 0 ||
                         is_only_ours(object, family, keys[i].ours);
        if (strcmp(keys[i].type, family) == 0 && !own) json_object_del(object, keys[i].ours);
    }
    for (size_t i = 0; i < MN_COUNTOF(fixed); i++) {
        if (strcmp(fixed[i].type, family) != 0) continue;
        json_t *value = json_loads(fixed[i].json, JSON_DECODE_ANY, NULL);
        const json_t *ours = json_object_get(object, fixed[i].ours);
        if (ours && same_value(ours, value)) json_object_del(object, fixed[i].ours);
        json_decref(value);
    }
    if (st == MN_OK && mn_dialect_mixes(family)) st = put_layers(object, family, layers, n);
    const char *inner = mn_dialect_nested(family);
    if (st == MN_OK && inner) st = nest(object, inner);
    return st;
}

/* ---- names ----------------------------------------------------------------------------------- */

bool mn_dialect_transposed(const char *family, const char *name) {
    for (size_t i = 0; family && i < MN_COUNTOF(turned); i++) {
        if (strcmp(turned[i].type, family) == 0 && strstr(name, turned[i].ours)) return true;
    }
    return false;
}

bool mn_dialect_joined(const char *family, const char *name) {
    for (size_t i = 0; family && i < MN_COUNTOF(joined); i++) {
        if (strcmp(joined[i].type, family) == 0 && strstr(name, joined[i].ours)) return true;
    }
    return false;
}

void mn_dialect_name(char out[MN_PARAM_NAME], const char *family, const char *kind,
                     const char *name) {
    snprintf(out, MN_PARAM_NAME, "%s", name);
    for (size_t i = 0; family && i < MN_COUNTOF(tensors); i++) {
        const char *at = strstr(out, tensors[i].ours);
        if (strcmp(tensors[i].type, family) != 0 || !at) continue;
        if (tensors[i].kind && (!kind || strcmp(tensors[i].kind, kind) != 0)) continue;
        char changed[2 * MN_PARAM_NAME];
        snprintf(changed, sizeof changed, "%.*s%s%s", (int)(at - out), out, tensors[i].theirs,
                 at + strlen(tensors[i].ours));
        snprintf(out, MN_PARAM_NAME, "%.*s", MN_PARAM_NAME - 1, changed);
    }
}

bool mn_dialect_stacked(mn_stacked *out, const char *family, const char *kind, const char *name) {
    int block = 0, end = 0;
    long long expert = 0;
    char matrix[3] = "";
    const int found = sscanf(name, "model.layers.%d.mlp.experts.%lld.%2[w123].weight%n", &block,
                             &expert, matrix, &end);
    if (!family || found != 3 || end == 0 || name[end]) return false;
    for (size_t i = 0; i < MN_COUNTOF(stacks); i++) {
        if (strcmp(stacks[i].type, family) != 0 || strcmp(stacks[i].ours, matrix) != 0) continue;
        char whole[MN_PARAM_NAME];
        snprintf(whole, sizeof whole, "model.layers.%d%s", block, stacks[i].theirs);
        *out = (mn_stacked){ .expert = expert, .part = stacks[i].part, .parts = stacks[i].parts };
        mn_dialect_name(out->name, family, kind, whole);
        return true;
    }
    return false;
}

bool mn_dialect_beside(const char *family, const char *name) {
    for (size_t i = 0; family && i < MN_COUNTOF(towers); i++) {
        const size_t n = strlen(towers[i].prefix);
        if (strcmp(towers[i].type, family) == 0 && strncmp(towers[i].prefix, name, n) == 0) {
            return true;
        }
    }
    return false;
}
