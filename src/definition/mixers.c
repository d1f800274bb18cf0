/* mixers.c - the MIXER rows of the layers as data, and finding them by name. */
#include "definition/axes.h"

#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "io/closest.h"

static const mn_mixer_info rows[] = {
#define MIXER(name, transition, belief, read, op)                                                  \
    { #name, &mn_transition_##transition, &mn_belief_##belief, &mn_read_##read, MN_OP_##op, false },
#include "layers/all.def"
};

static const struct {
    const char *name, *row;
} aliases[] = {
#define MIXER_ALIAS(name, row) { #name, #row },
#include "layers/all.def"
};

static const struct {
    const char *name;
    size_t offset;
} slots[] = {
#define INPUT(name, about) { #name, offsetof(mn_token, name) },
#include "definition/inputs.def"
#define INPUT_ALIAS(name, slot) { #name, offsetof(mn_token, slot) },
#include "definition/inputs.def"
};

enum { N_NAMES = MN_COUNTOF(rows) + MN_COUNTOF(aliases) };

int mn_mixer_count(void) {
    return (int)MN_COUNTOF(rows);
}

const mn_mixer_info *mn_mixer_row(int index) {
    return &rows[index];
}

static const mn_mixer_info *row_called(const char *name) {
    for (size_t i = 0; i < MN_COUNTOF(aliases); i++) {
        if (strcmp(aliases[i].name, name) == 0) name = aliases[i].row;
    }
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) {
        if (strcmp(rows[i].name, name) == 0) return &rows[i];
    }
    return NULL;
}

static mn_status no_such_row(const char *name) {
    const char *names[N_NAMES];
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) names[i] = rows[i].name;
    for (size_t i = 0; i < MN_COUNTOF(aliases); i++) names[MN_COUNTOF(rows) + i] = aliases[i].name;
    const char *near = mn_closest(name, names, N_NAMES);
    if (near) {
        return mn_fail(MN_ERR_ARGUMENT, "no mixer is called \"%s\", did you mean \"%s\"?", name,
                       near);
    }
    return mn_fail(MN_ERR_ARGUMENT, "no mixer is called \"%s\"; mneme info lists them", name);
}

mn_status mn_mixer_find(mn_mixer_info *out, const char *name) {
    const size_t length = strcspn(name, "+");
    const char *addition = name + length;
    char row[MN_MIXER_NAME];
    snprintf(row, sizeof row, "%.*s", (int)length, name);
    const mn_mixer_info *found = row_called(row);
    if (!found) return no_such_row(row);
    if (*addition && strcmp(addition, "+ccq") != 0) {
        return mn_fail(MN_ERR_ARGUMENT, "mixer \"%s\": \"%s\" is no addition, there is \"+ccq\"",
                       name, addition);
    }
    if (*addition && !found->belief->matrix) {
        return mn_fail(MN_ERR_ARGUMENT,
                       "mixer \"%s\": %s keeps no memory matrix, \"+ccq\" needs one", name,
                       found->name);
    }
    *out = *found;
    out->ccq = *addition != '\0';
    return MN_OK;
}

const char *mn_mixer_transition_name(const mn_mixer_info *info) {
    return info->transition->name;
}

const char *mn_mixer_belief_name(const mn_mixer_info *info) {
    return info->belief->name;
}

const char *mn_mixer_read_name(const mn_mixer_info *info) {
    return info->read->name;
}

const char *mn_mixer_transition_equation(const mn_mixer_info *info) {
    return info->transition->equation;
}

const char *mn_mixer_belief_equation(const mn_mixer_info *info) {
    return info->belief->equation;
}

const char *mn_mixer_read_equation(const mn_mixer_info *info) {
    return info->read->equation;
}

bool mn_mixer_has_matrix(const mn_mixer_info *info) {
    return info->belief->matrix;
}

bool mn_mixer_has_variance(const mn_mixer_info *info) {
    return info->read->variance && info->belief->variance;
}

bool mn_mixer_has_cache(const mn_mixer_info *info) {
    return info->belief == &mn_belief_cache;
}

void mn_mixer_full_name(char out[MN_MIXER_NAME], const mn_mixer_info *info) {
    snprintf(out, MN_MIXER_NAME, "%s%s", info->name, info->ccq ? "+ccq" : "");
}

/* Appends the letters of `axes` as a product: "H K V"; R is the K or 2K rows of a covariance. */
static void append_product(char out[MN_MIXER_FORMULA], const mn_mixer_info *info,
                           const char *axes) {
    size_t used = strlen(out);
    if (used > 0) used += (size_t)snprintf(out + used, MN_MIXER_FORMULA - used, " + ");
    for (const char *letter = axes; *letter && used < MN_MIXER_FORMULA; letter++) {
        const bool rows_of_belief = *letter == 'R' && info->belief == &mn_belief_covariance;
        const bool twice = rows_of_belief && info->transition == &mn_transition_rotation;
        used += (size_t)snprintf(out + used, MN_MIXER_FORMULA - used, "%s%s%c",
                                 letter > axes ? " " : "", twice ? "2" : "",
                                 rows_of_belief ? 'K' : *letter);
    }
}

void mn_mixer_state_formula(char out[MN_MIXER_FORMULA], const mn_mixer_info *info) {
    int count;
    const mn_field *fields = mn_op_fields(info->op, &count);
    const bool cache = mn_mixer_has_cache(info);
    out[0] = '\0';
    for (int i = 0; i < count; i++) {
        const bool part = fields[i].role == MN_ROLE_OPT && fields[i].axes[0] == 'N';
        const bool kept = fields[i].role == MN_ROLE_IN && strncmp(fields[i].axes, "BL", 2) == 0;
        if (!cache && part) append_product(out, info, fields[i].axes + 1);
        if (cache && kept) append_product(out, info, fields[i].axes + 1);
    }
    const bool heads = strchr(out, 'H') != NULL;
    if (!info->ccq) return;
    append_product(out, info, heads ? "HKK" : "KK");
    append_product(out, info, heads ? "HK" : "K");
    append_product(out, info, "1");
}

void mn_mixer_set_args(const mn_mixer_info *info, void *args) {
    int *decay = mn_args_decay_slot(info->op, args);
    if (decay) *decay = info->transition->decay;
    int *kind = mn_args_choice_slot(info->op, args, "kind");
    if (kind) *kind = info->read->kind;
}

const double **mn_token_slot(mn_token *token, const char *name) {
    for (size_t i = 0; i < MN_COUNTOF(slots); i++) {
        if (strcmp(slots[i].name, name) == 0) {
            return (const double **)((char *)token + slots[i].offset);
        }
    }
    return NULL;
}
