/* describe.c - operators as data, expanded from ops.def. */
#include "ops/describe.h"

#include <string.h>

#include "base/util.h"
#include "ops/check.h"

static const mn_field fields[] = {
#define FIELD(op, role, name, axes, law, partner)                                                  \
    {                                                                                              \
        MN_OP_##op, MN_ROLE_##role, #name, axes, MN_LAW_##law, offsetof(mn_##op##_args, name),     \
        partner                                                                                    \
    },
#define IN(op, name, axes, law) FIELD(op, IN, name, axes, law, offsetof(mn_##op##_args, grad.name))
#define OPT(op, name, axes, law)                                                                   \
    FIELD(op, OPT, name, axes, law, offsetof(mn_##op##_args, grad.name))
#define RAW(op, name, axes, law) FIELD(op, RAW, name, axes, law, MN_NO_OFFSET)
#define OUT(op, name, axes) FIELD(op, OUT, name, axes, NORMAL, offsetof(mn_##op##_args, cot.name))
#define AUX(op, name, axes) FIELD(op, AUX, name, axes, NORMAL, MN_NO_OFFSET)
#include "ops/ops.def"
#undef FIELD
};

static const mn_param params[] = {
#define PARAM(op, kind, name, value, names)                                                        \
    { MN_OP_##op, MN_PARAM_##kind, #name, value, names, offsetof(mn_##op##_args, name) },
#define REAL_PARAM(op, name, value) PARAM(op, REAL, name, value, NULL)
#define INT_PARAM(op, name, value) PARAM(op, INT, name, value, NULL)
#define CHOICE(op, name, names) PARAM(op, CHOICE, name, 0, names)
#include "ops/ops.def"
#undef PARAM
};

static const mn_op_info infos[MN_OP_COUNT] = {
#define OP(name, vector, about)                                                                    \
    [MN_OP_##name] = { #name, vector, about, sizeof(mn_##name##_args) },
#include "ops/ops.def"
};

#define TRAIT(op, member, value) [MN_OP_##op].member = value,
static const mn_op_traits traits[MN_OP_COUNT] = {
#define DECAYS(op) TRAIT(op, decay, offsetof(mn_##op##_args, decay))
#define KEYED(op, grouped_) TRAIT(op, keyed, true) TRAIT(op, grouped, grouped_)
#define COUNTS(op, n0_, counts0_)                                                                  \
    TRAIT(op, n0, offsetof(mn_##op##_args, n0_)) TRAIT(op, counts0, counts0_)
#define PAIRS(op, kind) TRAIT(op, pairs, kind)
#define TURNS_NOISE(op, theta_) TRAIT(op, theta, offsetof(mn_##op##_args, theta_))
#define IGNORES(op, class) TRAIT(op, ignores, offsetof(mn_##op##_args, class))
#define GROUPS(op) TRAIT(op, groups, true) TRAIT(op, grouped, true)
#define CHECKED(op) TRAIT(op, check, mn_check_##op)
#define CPU_CHOICE(op, choice) TRAIT(op, cpu_choice, offsetof(mn_##op##_args, choice))
#define FORWARD_ONLY(op, why) TRAIT(op, forward_only, why)
#define ROUNDS_BETWEEN(op) TRAIT(op, rounds_between, true)
#include "ops/ops.def"
};
#undef TRAIT

const mn_op_traits *mn_op_traits_of(mn_op_id op) {
    return &traits[op];
}

const mn_op_info *mn_op_describe(mn_op_id op) {
    return &infos[op];
}

bool mn_op_find(mn_op_id *out, const char *name) {
    for (int i = 0; i < MN_OP_COUNT; i++) {
        if (strcmp(infos[i].vector, name) == 0) {
            *out = (mn_op_id)i;
            return true;
        }
    }
    return false;
}

const mn_field *mn_op_fields(mn_op_id op, int *count) {
    size_t first = 0;
    while (first < MN_COUNTOF(fields) && fields[first].op != op) first++;
    size_t end = first;
    while (end < MN_COUNTOF(fields) && fields[end].op == op) end++;
    *count = (int)(end - first);
    return fields + first;
}

const mn_param *mn_op_params(mn_op_id op, int *count) {
    size_t first = 0;
    while (first < MN_COUNTOF(params) && params[first].op != op) first++;
    size_t end = first;
    while (end < MN_COUNTOF(params) && params[end].op == op) end++;
    *count = (int)(end - first);
    return params + first;
}

const char *mn_field_axes(const mn_field *field, int decay, char out[MN_MAX_RANK + 1]) {
    const char *from = field->axes;
    if (strchr(from, '|')) {
        if (decay == MN_DECAY_NONE) return NULL;
        for (int skip = decay - MN_DECAY_HEAD; skip > 0; skip--) from = strchr(from, '|') + 1;
    }
    size_t length = strcspn(from, "|");
    memcpy(out, from, length);
    out[length] = '\0';
    return out;
}

mn_dtype mn_field_dtype(const mn_field *field, mn_dtype dtype) {
    static const size_t wide[][2] = {
#define WIDE(op, name) { MN_OP_##op, offsetof(mn_##op##_args, name) },
#include "ops/ops.def"
    };
    if (dtype != MN_BF16) return dtype;
    for (size_t i = 0; i < MN_COUNTOF(wide); i++) {
        if (wide[i][0] == field->op && wide[i][1] == field->offset) return MN_F32;
    }
    return field->axes[0] == 'N' ? MN_F32 : MN_BF16;
}

int64_t *mn_axis_slot(mn_call *call, char letter) {
    switch (letter) {
    case '*':
    case 'B': return &call->B;
#define SLOT(letter, field)                                                                        \
    case letter: return &call->field;
    SLOT('T', T) SLOT('H', H) SLOT('K', K) SLOT('V', V) SLOT('G', G) SLOT('J', J) SLOT('L', L)
    SLOT('Q', Q) SLOT('P', P) SLOT('R', R) SLOT('W', W) SLOT('D', D) SLOT('S', S)
#undef SLOT
    default: return NULL;
    }
}

int64_t mn_axis_size(const mn_call *call, char letter, bool *ok) {
    const int64_t *slot = mn_axis_slot((mn_call *)call, letter);    // only looked at
    if (slot) return *slot;
    if (letter == 'N') return call->cu_seqlens ? call->n_seqs : call->B;
    if (letter == 'M') return call->W - 1;
    if (letter != '1') *ok = false;
    return 1;
}

bool mn_op_has_axis(mn_op_id op, char letter) {
    int count;
    const mn_field *of = mn_op_fields(op, &count);
    for (int i = 0; i < count; i++) {
        if (strchr(of[i].axes, letter)) return true;
    }
    return false;
}

int *mn_args_choice_slot(mn_op_id op, void *args, const char *name) {
    int count;
    const mn_param *of = mn_op_params(op, &count);
    for (int i = 0; i < count; i++) {
        const bool found = of[i].kind == MN_PARAM_CHOICE && strcmp(of[i].name, name) == 0;
        if (found) return (int *)((char *)args + of[i].offset);
    }
    return NULL;
}

int *mn_args_decay_slot(mn_op_id op, void *args) {
    return traits[op].decay ? (int *)((char *)args + traits[op].decay) : NULL;
}

int mn_args_decay(mn_op_id op, const void *args) {
    const int *slot = mn_args_decay_slot(op, (void *)args);
    return slot ? *slot : MN_DECAY_NONE;
}
