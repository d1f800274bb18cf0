/* dialect.h - configurations and files of other software in our words: families.def. */
#ifndef MN_MODEL_DIALECT_H
#define MN_MODEL_DIALECT_H

#include "io/json.h"
#include "layers/layer.h"

/* The family whose model_type this is, for the functions below: one text for each, not to be freed.
 * NULL: `type` is none, or is read as it is. */
const char *mn_dialect_find(const char *type);

/* What layers and class a family has; NULL: those of its MODEL_TYPE row. */
const char *mn_dialect_layer(const char *family);
const char *mn_dialect_class(const char *family);

/* Whether the layers of a family are of several kinds, and the member that holds the settings of
 * its text model; NULL: it is all settings. */
bool mn_dialect_mixes(const char *family);
const char *mn_dialect_nested(const char *family);

/* A copy of a configuration with the keys of its family renamed to ours; to be released by
 * json_decref. Two keys that contradict each other fail by name. */
mn_status mn_dialect_read(json_t **out, const char *family, const mn_json *object);

/* The other way: renames our keys in `object` to those of the family, and says what each of n
 * layers of these names is where the family does. */
mn_status mn_dialect_write(json_t *object, const char *family, char (*layers)[MN_MIXER_NAME],
                           int n);

/* What the family's files call parameter `name`, in a layer of this kind (NULL: in none). */
void mn_dialect_name(char out[MN_PARAM_NAME], const char *family, const char *kind,
                     const char *name);

/* Whether they hold that matrix the other way round. */
bool mn_dialect_transposed(const char *family, const char *name);

/* Whether it is one of three, .q_ .k_ and .v_, that files hold one after the other and may cut
 * elsewhere. */
bool mn_dialect_joined(const char *family, const char *name);

/* Where files keep a matrix of expert `expert`: part `part` of the `parts` equal parts of rows that
 * the expert has in tensor `name`, whose first axis counts experts. */
typedef struct mn_stacked {
    char name[MN_PARAM_NAME];
    int64_t expert;
    int part, parts;
} mn_stacked;

/* False for a parameter that has a tensor of its own. */
bool mn_dialect_stacked(mn_stacked *out, const char *family, const char *kind, const char *name);

/* Whether a tensor called so is of what is beside the text model of the family. */
bool mn_dialect_beside(const char *family, const char *name);

/* What rows of families.def cannot say, dialect_derive.c: works on `out`, a configuration in our
 * words, from `object`, the same in theirs. NULL: the family has nothing of that kind. */
typedef mn_status (*mn_derive_fn)(json_t *out, const mn_json *object);
mn_derive_fn mn_dialect_derive(const char *family);

#endif
