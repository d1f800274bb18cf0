/* roles.h - what the rows of a layer's parameters are for, whatever they are called and however
 * they are packed: queries, keys, values, gates. */
#ifndef MN_MODEL_FOLDER_ROLES_H
#define MN_MODEL_FOLDER_ROLES_H

#include "layers/layer.h"

/* Rows [at, at + n) of parameter `param` of the layer are rows [row, row + n) of `role`. */
typedef struct mn_role_span {
    const char *role;          // such as "q_proj.weight"; of a table, or of the layer
    int param;
    int64_t at, row, n;
} mn_role_span;

typedef struct mn_roles {
    const mn_layer *layer;     // borrowed
    mn_role_span *spans;
    int n, capacity;
} mn_roles;

/* Every row of every parameter is in one span. */
mn_status mn_roles_make(mn_roles *out, const mn_layer *layer);
void mn_roles_free(mn_roles *roles);    // all zeros is fine

/* Rows of a role, 0: the layer has none; numbers in each; heads they are of. */
int64_t mn_role_rows(const mn_roles *roles, const char *role, int64_t *width);
int64_t mn_role_heads(const mn_roles *roles, const char *role);

/* The span that row `row` of a role is in; NULL: none. */
const mn_role_span *mn_role_find(const mn_roles *roles, const char *role, int64_t row);

/* Heads and widths as options say them: of queries, of keys and of values, and both widths. */
typedef struct mn_heads {
    int64_t queries, keys, values, key_width, value_width;
} mn_heads;

mn_heads mn_heads_of(const mn_layer *layer);

/* Options of `kind` for a layer in the place of `from`: what both take as it is there, heads and
 * widths as there, the rest by default. */
void mn_options_after(mn_layer_config *out, mn_layer_kind kind, const mn_layer *from);

#endif
