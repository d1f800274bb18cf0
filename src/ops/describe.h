/* describe.h - operators as data: what they take and give, for whatever walks them all. */
#ifndef MN_OPS_DESCRIBE_H
#define MN_OPS_DESCRIBE_H

#include "mneme.h"

typedef enum mn_op_id {
#define OP_ID(name) MN_OP_##name,
    MN_OPS(OP_ID)
#undef OP_ID
    MN_OP_COUNT
} mn_op_id;

typedef enum mn_law {
#define LAW(id, about) MN_LAW_##id,
#include "ops/laws.def"
#undef LAW
    MN_LAW_COUNT
} mn_law;

typedef enum mn_role { MN_ROLE_IN, MN_ROLE_OPT, MN_ROLE_RAW, MN_ROLE_OUT, MN_ROLE_AUX } mn_role;

#define MN_NO_OFFSET ((size_t)-1)

/* One tensor of an operator. `offset` finds its view in the argument struct, `partner` that of its
 * gradient (inputs) or cotangent (results), MN_NO_OFFSET where there is none. */
typedef struct mn_field {
    mn_op_id op;
    mn_role role;
    const char *name;
    const char *axes;
    mn_law law;
    size_t offset, partner;
} mn_field;

typedef enum mn_param_kind { MN_PARAM_REAL, MN_PARAM_INT, MN_PARAM_CHOICE } mn_param_kind;

/* One number of an operator: a double, an int64_t, or an int that indexes the comma-separated
 * names. */
typedef struct mn_param {
    mn_op_id op;
    mn_param_kind kind;
    const char *name;
    double value;          // default
    const char *choices;
    size_t offset;
} mn_param;

typedef struct mn_op_info {
    const char *name;
    const char *vector;    // name in golden vectors
    const char *about;
    size_t args_bytes;
} mn_op_info;

/* What some operators have besides tensors and numbers: columns of ops.def, which explains them.
 * Offsets into the argument struct are 0 where an operator has nothing of the kind. */
typedef struct mn_op_traits {
    bool keyed, grouped, groups, rounds_between;
    const char *forward_only;    // why; NULL where there is a backward pass
    size_t decay, n0, counts0, theta, ignores, cpu_choice;
    size_t pairs;                // MN_NO_OFFSET: always
    mn_status (*check)(const void *args);
} mn_op_traits;

enum { MN_MAX_ARGS_BYTES = 4096, MN_MAX_RANK = 6 };

const mn_op_traits *mn_op_traits_of(mn_op_id op);

/* Whether a tensor of the operator has the axis `letter`. */
bool mn_op_has_axis(mn_op_id op, char letter);

/* The choice called `name` of a call, an index into its names; NULL where there is none. */
int *mn_args_choice_slot(mn_op_id op, void *args, const char *name);

const mn_op_info *mn_op_describe(mn_op_id op);

/* The op whose golden vectors are called `name`; false if none is. */
bool mn_op_find(mn_op_id *out, const char *name);

/* All rows of ops.def; those of one op are consecutive. */
const mn_field *mn_op_fields(mn_op_id op, int *count);
const mn_param *mn_op_params(mn_op_id op, int *count);

/* Which of the alternatives in `axes` is in force, as text without bars. For a log decay that is
 * given by `decay`; NULL when decay is MN_DECAY_NONE. Copies into `out`. */
const char *mn_field_axes(const mn_field *field, int decay, char out[MN_MAX_RANK + 1]);

/* The type in which a call of `dtype` holds the tensor, its gradient and its cotangent. */
mn_dtype mn_field_dtype(const mn_field *field, mn_dtype dtype);

/* Size of the axis called `letter`; *ok turns false for a letter that has none. */
int64_t mn_axis_size(const mn_call *call, char letter, bool *ok);

/* Where the size called `letter` is stored in `call`; NULL for N, M, 1. '*' is B. */
int64_t *mn_axis_slot(mn_call *call, char letter);

/* The `int decay` of an argument struct, MN_DECAY_NONE when it has none; and where it is, or NULL.
 */
int mn_args_decay(mn_op_id op, const void *args);
int *mn_args_decay_slot(mn_op_id op, void *args);

#endif
