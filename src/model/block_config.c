/* block_config.c - the rows of blocks.def as settings, and what the second half of each block is. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "io/json_write.h"
#include "model/config.h"

static const struct {
    const char *name, *choices;    // choices NULL: a real number
    size_t offset;
    double value;
} rows[] = {
#define BLOCK_INT(name, choices, value, about)                                                     \
    { #name, choices, offsetof(mn_block_config, name), value },
#define BLOCK_REAL(name, value, about) { #name, NULL, offsetof(mn_block_config, name), value },
#include "model/blocks.def"
#undef BLOCK_INT
#undef BLOCK_REAL
};

static const char *const halves[] = {
    [MN_MLP_DENSE] = "dense", [MN_MLP_SPARSE] = "sparse", [MN_MLP_ABSENT] = "none",
    [MN_MLP_SHARED] = "shared",
};

void mn_block_defaults(mn_block_config *out) {
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) {
        void *at = (char *)out + rows[i].offset;
        if (rows[i].choices) *(int64_t *)at = (int64_t)rows[i].value;
        else *(double *)at = rows[i].value;
    }
}

int mn_block_keys(const char **keys, int capacity) {
    int n = 0;
    for (size_t i = 0; i < MN_COUNTOF(rows) && n < capacity; i++) keys[n++] = rows[i].name;
    return n;
}

static mn_status read_choice(int64_t *out, const mn_json *at, const char *choices) {
    const char *text;
    const mn_status st = mn_json_read_text(&text, at);
    if (st != MN_OK) return st;
    int64_t index = 0;
    for (const char *c = choices; *c; index++) {
        const size_t n = strcspn(c, ",");
        if (strlen(text) == n && strncmp(c, text, n) == 0) {
            *out = index;
            return MN_OK;
        }
        c += n + (c[n] == ',');
    }
    return mn_json_fail(at, "\"%s\" is none of %s", text, choices);
}

static mn_status read_row(mn_block_config *out, size_t i, const mn_json *at) {
    void *to = (char *)out + rows[i].offset;
    const char *choices = rows[i].choices;
    if (!choices) return mn_json_read_f64(to, at);
    if (choices[0] == '\0') {
        const mn_status st = mn_json_read_i64(to, at);
        if (st == MN_OK && (*(int64_t *)to < 0 || *(int64_t *)to > INT64_C(1) << 24)) {
            return mn_json_fail(at, "must lie between 0 and 16777216");
        }
        return st;
    }
    if (strcmp(choices, "bool") != 0) return read_choice(to, at, choices);
    bool on = false;
    const mn_status st = mn_json_read_bool(&on, at);
    if (st == MN_OK) *(int64_t *)to = on;
    return st;
}

static mn_status check_experts(const mn_block_config *c, const mn_json *object) {
    const int64_t G = mn_max(c->n_group, 1), chosen = c->topk_group ? c->topk_group : G;
    const mn_json at = mn_json_member(object, "num_experts");
    if (c->num_experts == 0) return MN_OK;
    if (c->num_experts_per_tok < 1 || c->num_experts_per_tok > c->num_experts) {
        return mn_json_fail(&at, "num_experts_per_tok must lie between 1 and num_experts");
    }
    if (c->moe_intermediate_size < 1) return mn_json_fail(&at, "needs moe_intermediate_size");
    if (c->num_experts > 4096) return mn_json_fail(&at, "at most 4096 experts are built");
    if (c->num_experts % G != 0 || chosen > G ||
        c->num_experts / G * chosen < c->num_experts_per_tok || (G > 1 && c->num_experts / G < 2)) {
        return mn_json_fail(&at, "does not go with n_group and topk_group");
    }
    return MN_OK;
}

mn_status mn_block_read(mn_block_config *out, const mn_json *object) {
    mn_status st = MN_OK;
    for (size_t i = 0; i < MN_COUNTOF(rows) && st == MN_OK; i++) {
        const mn_json at = mn_json_member(object, rows[i].name);
        if (mn_json_given(&at)) st = read_row(out, i, &at);
    }
    return st == MN_OK ? check_experts(out, object) : st;
}

/* "mlp_layer_types": what the second half of each block is. Without it all are sparse where there
 * are experts, and all dense where there are none. */
mn_status mn_block_read_halves(unsigned char *out, int n, const mn_block_config *c,
                               const mn_json *object) {
    memset(out, c->num_experts > 0 ? MN_MLP_SPARSE : MN_MLP_DENSE, (size_t)n);
    const mn_json list = mn_json_member(object, "mlp_layer_types");
    if (!mn_json_given(&list)) return MN_OK;
    mn_status st = mn_json_expect_list(&list);
    if (st == MN_OK && mn_json_count(&list) != n) {
        return mn_json_fail(&list, "names %" PRId64 " of %d layers", mn_json_count(&list), n);
    }
    for (int i = 0; i < n && st == MN_OK; i++) {
        const mn_json at = mn_json_item(&list, i);
        int64_t which = 0;
        st = read_choice(&which, &at, "dense,sparse,none,shared");
        if (st == MN_OK && which == MN_MLP_SPARSE && c->num_experts == 0) {
            st = mn_json_fail(&at, "sparse, and there is no num_experts");
        }
        if (st == MN_OK && which == MN_MLP_SHARED &&
            (c->shared_blocks == 0 || c->adapter_rank == 0)) {
            st = mn_json_fail(&at, "shared, and there is no shared_blocks or no adapter_rank");
        }
        out[i] = (unsigned char)which;
    }
    return st;
}

static json_t *row_json(const mn_block_config *c, size_t i) {
    const void *at = (const char *)c + rows[i].offset;
    const char *choices = rows[i].choices;
    if (!choices) return mn_json_real(*(const double *)at);
    const int64_t value = *(const int64_t *)at;
    if (choices[0] == '\0') return json_integer(value);
    if (strcmp(choices, "bool") == 0) return json_boolean(value != 0);
    for (int64_t k = 0; k < value; k++) choices += strcspn(choices, ",") + 1;
    return json_stringn(choices, strcspn(choices, ","));
}

/* Whether row i is other than its default. */
static bool differs(const mn_block_config *c, size_t i) {
    const void *at = (const char *)c + rows[i].offset;
    return rows[i].choices ? (double)*(const int64_t *)at != rows[i].value
                           : *(const double *)at != rows[i].value;
}

bool mn_block_is_plain(const mn_block_config *c, const unsigned char *of_layers, int n) {
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) {
        if (differs(c, i)) return false;
    }
    for (int i = 0; i < n; i++) {
        if (of_layers[i] != MN_MLP_DENSE) return false;
    }
    return true;
}

mn_status mn_block_write(json_t *object, const mn_block_config *c, const unsigned char *of_layers,
                         int n) {
    bool failed = false, told = false;
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) {
        if (!differs(c, i)) continue;
        failed |= json_object_set_new(object, rows[i].name, row_json(c, i)) != 0;
    }
    const int usual = c->num_experts > 0 ? MN_MLP_SPARSE : MN_MLP_DENSE;
    for (int i = 0; i < n; i++) told |= of_layers[i] != usual;
    if (told) {
        json_t *list = json_array();
        for (int i = 0; i < n; i++) {
            failed |= json_array_append_new(list, json_string(halves[of_layers[i]])) != 0;
        }
        failed |= json_object_set_new(object, "mlp_layer_types", list) != 0;
    }
    return failed ? mn_fail(MN_ERR_MEMORY, "no memory for a configuration") : MN_OK;
}
