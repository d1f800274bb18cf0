/* describe_json.c - operators as JSON: what a binding needs to fill an argument struct without a
 * copy of ops.def. Offsets and sizes are in bytes, a view is a pointer and three strides. */
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "io/json_write.h"
#include "ops/describe.h"

static json_t *offset_json(size_t offset) {
    return offset == MN_NO_OFFSET ? json_null() : json_integer((json_int_t)offset);
}

/* `wide`: the tensor stays float32 in a call of bf16. */
static json_t *fields_json(mn_op_id op) {
    static const char *const roles[] = { "in", "opt", "raw", "out", "aux" };
    static const char *const laws[] = {
#define LAW(id, about) #id,
#include "ops/laws.def"
#undef LAW
    };
    json_t *list = json_array();
    int count;
    const mn_field *fields = mn_op_fields(op, &count);
    for (int i = 0; i < count; i++) {
        const mn_field *f = &fields[i];
        const bool wide = mn_field_dtype(f, MN_BF16) == MN_F32;
        json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:s, s:b, s:o, s:o}", "name",
                                              f->name, "role", roles[f->role], "axes", f->axes,
                                              "law", laws[f->law], "wide", (int)wide, "offset",
                                              offset_json(f->offset), "partner",
                                              offset_json(f->partner)));
    }
    return list;
}

static json_t *params_json(mn_op_id op) {
    static const char *const kinds[] = { "real", "int", "choice" };
    json_t *list = json_array();
    int count;
    const mn_param *params = mn_op_params(op, &count);
    for (int i = 0; i < count; i++) {
        const mn_param *p = &params[i];
        json_t *choices = p->choices ? json_string(p->choices) : json_null();
        json_array_append_new(list, json_pack("{s:s, s:s, s:o, s:o, s:o}", "name", p->name, "kind",
                                              kinds[p->kind], "default", mn_json_real(p->value),
                                              "choices", choices, "offset",
                                              offset_json(p->offset)));
    }
    return list;
}

/* Where `decay` lies in the arguments, null for operators without a choice of decays. */
static json_t *decay_json(mn_op_id op) {
    static _Alignas(16) unsigned char args[MN_MAX_ARGS_BYTES];
    const int *slot = mn_args_decay_slot(op, args);
    return slot ? json_integer((const unsigned char *)slot - args) : json_null();
}

/* Where `counts0` lies, a host array with one number per sequence. */
static json_t *counts_json(mn_op_id op) {
    static const struct {
        mn_op_id op;
        size_t offset;
    } counts[] = { { MN_OP_curvature, offsetof(mn_curvature_args, counts0) } };
    for (size_t i = 0; i < MN_COUNTOF(counts); i++) {
        if (counts[i].op == op) return json_integer((json_int_t)counts[i].offset);
    }
    return json_null();
}

static json_t *operator_json(mn_op_id op) {
    const mn_op_info *info = mn_op_describe(op);
    return json_pack("{s:s, s:s, s:s, s:I, s:o, s:o, s:o, s:o}", "name", info->name, "vector",
                     info->vector, "about", info->about, "bytes", (json_int_t)info->args_bytes,
                     "decay", decay_json(op), "counts0", counts_json(op), "fields",
                     fields_json(op), "params", params_json(op));
}

/* mn_call: where the size of each letter is, and the packing. */
static json_t *call_json(void) {
    static const char letters[] = "BTHKVGJLQPRWDS";
    json_t *sizes = json_object();
    mn_call call;
    for (const char *at = letters; *at; at++) {
        const char key[] = { *at, '\0' };
        const char *slot = (const char *)mn_axis_slot(&call, *at);
        json_object_set_new(sizes, key, json_integer(slot - (const char *)&call));
    }
    return json_pack("{s:I, s:I, s:I, s:I, s:o}", "bytes", (json_int_t)sizeof call, "dtype",
                     (json_int_t)offsetof(mn_call, dtype), "cu_seqlens",
                     (json_int_t)offsetof(mn_call, cu_seqlens), "n_seqs",
                     (json_int_t)offsetof(mn_call, n_seqs), "sizes", sizes);
}

mn_status mn_describe_operators(char **json) {
    if (!json) return mn_fail(MN_ERR_ARGUMENT, "describe: json is NULL");
    *json = NULL;
    json_t *list = json_array(), *dtypes = json_array();
    for (int i = 0; i < MN_DTYPE_COUNT; i++) {
        json_array_append_new(dtypes, json_string(mn_dtype_name((mn_dtype)i)));
    }
    for (int op = 0; op < MN_OP_COUNT; op++) {
        json_array_append_new(list, operator_json((mn_op_id)op));
    }
    json_t *root = json_pack("{s:s, s:o, s:o, s:o}", "version", MN_VERSION, "dtypes", dtypes,
                             "call", call_json(), "operators", list);
    const mn_status st = root ? mn_json_text(json, root, MN_JSON_COMPACT)
                              : mn_fail(MN_ERR_MEMORY, "no memory for a description");
    json_decref(root);
    return st;
}
