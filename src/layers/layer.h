/* layer.h - a row of the mixer table as a layer of a model: options, parameters, forward.
 *
 *   options   options.def   what a user may set, and which kinds take it
 *   params    FAMILY.def    names, shapes, initial values and groups, as in checkpoints
 *   forward   layer_*.c           one file per family, on the tape
 *
 * The same forward serves training (no state), prefill and decoding (with a state): one definition
 * of each layer. Residuals and norms around it belong to the model's block. */
#ifndef MN_LAYERS_LAYER_H
#define MN_LAYERS_LAYER_H

#include "io/json.h"
#include "layers/state.h"
#include "definition/mixer.h"
#include "tape/tape.h"

/* ---- kinds ----------------------------------------------------------------------------------- */

typedef enum mn_layer_kind {
#define LAYER(kind, family) MN_LAYER_##kind,
#include "layers/all.def"
    MN_LAYER_COUNT
} mn_layer_kind;

const char *mn_layer_kind_name(mn_layer_kind kind);

/* ---- options --------------------------------------------------------------------------------- */

/* Every option of every kind; a kind looks only at those it takes. 0 in a size means: choose by
 * the width of the model. */
typedef struct mn_layer_config {
#define OPTION_INT(name, choices, about) int64_t name;
#define OPTION_SIZE(name, least, most, about) int64_t name;
#define OPTION_RANK(name, least, most, about) int64_t name;
#define OPTION_REAL(name, least, most, about) double name;
#include "layers/options.def"
} mn_layer_config;

/* Defaults of `kind`, and the options in `object` that it takes laid over them. Wrong types and
 * values fail and are named; keys it does not take are left to the caller. */
void mn_layer_defaults(mn_layer_config *config, mn_layer_kind kind);
mn_status mn_layer_config_read(mn_layer_config *config, mn_layer_kind kind, const mn_json *object);

/* Sets each option of the kind in `object`. */
mn_status mn_layer_config_write(json_t *object, const mn_layer_config *config, mn_layer_kind kind);

/* Keys of the options that `kind` takes, at most `capacity`; returns how many. */
int mn_layer_option_keys(mn_layer_kind kind, const char **keys, int capacity);

/* ---- parameters ------------------------------------------------------------------------------ */

/* How numbers start. NORMAL uses the model's initializer_range. */
typedef enum mn_init {
#define INIT(id, about) MN_INIT_##id,
#include "layers/inits.def"
#undef INIT
    MN_INIT_COUNT
} mn_init;

/* What learning rate and weight decay a parameter gets. */
typedef enum mn_group {
#define GROUP(id, name, lr, decays, about) MN_GROUP_##id,
#include "layers/groups.def"
#undef GROUP
    MN_GROUP_COUNT
} mn_group;

const char *mn_group_name(mn_group group);
double mn_group_lr(mn_group group);
bool mn_group_decays(mn_group group);

enum { MN_PARAM_RANK = 4, MN_PARAM_NAME = 96, MN_LAYER_PARAMS = 40 };

/* One parameter tensor. */
typedef struct mn_param_info {
    char name[MN_PARAM_NAME];     // within the layer: "q_proj.weight"
    int rank;                     // 0: a single number
    int64_t shape[MN_PARAM_RANK]; // 1 beyond the rank
    int64_t count;
    mn_init init;
    mn_group group;
    int layer, n_layers;          // where it is in its model, and the width of a head: some laws
    int64_t head;                 //   depend on them
} mn_param_info;

/* Fills `value` with numbers [first, first + count) of a parameter, each a function of (seed,
 * stream) and its place. `range` is the standard deviation of NORMAL. */
void mn_param_start(void *value, mn_dtype dtype, const mn_param_info *info, double range,
                    uint64_t seed, uint64_t stream, int64_t first, int64_t count);

/* ---- one layer ------------------------------------------------------------------------------- */

/* Sizes by the letters of PARAM rows: sizes.of['K' - 'A']. */
typedef struct mn_layer_sizes {
    int64_t of[26];
} mn_layer_sizes;
#define MN_SIZE(sizes, letter) ((sizes)->of[(letter) - 'A'])

typedef struct mn_layer {
    mn_layer_kind kind;
    bool ccq;
    mn_mixer_info mixer;          // its row of the mixer table
    mn_layer_config config;
    mn_layer_sizes sizes;
    int64_t width;                // D
    double norm_eps;              // of the model
    int index, n_layers;          // which of its model's layers it is
    int n_params;
    mn_param_info params[MN_LAYER_PARAMS];
} mn_layer;

/* Works out sizes and parameters of layer `name` ("gdn", "gla+ccq") for a model of width D, whose
 * sequences have at most `context` tokens. Fails with a message that names the option when sizes
 * do not fit together. */
mn_status mn_layer_create(mn_layer *out, const char *name, const mn_layer_config *config, int64_t D,
                          int64_t context, double norm_eps);

/* The same for layer `index` of `n_layers`; the above is the only one of its model. */
mn_status mn_layer_create_at(mn_layer *out, const char *name, const mn_layer_config *config,
                             int64_t D, int64_t context, double norm_eps, int index, int n_layers);

/* The row of the mixer table that says what a kind keeps, under the kind's name. */
mn_status mn_layer_row(mn_mixer_info *out, mn_layer_kind kind);

/* Whether "+ccq" may follow the kind's name. */
bool mn_layer_takes_ccq(mn_layer_kind kind);

/* Which of a model's kinds `name` is, without "+ccq". */
mn_status mn_layer_kind_find(mn_layer_kind *out, bool *ccq, const char *name);

/* ---- forward --------------------------------------------------------------------------------- */

/* Hears numbers of a pass as they are made, for experiments that look inside: projections under
 * the names of their weights, and what a kind tells besides (kla: v, prec, k, q, a, p, y, gate;
 * bayes and palimpsa what their posterior follows from, see model/posterior.c). `x` is valid during
 * the call. */
typedef struct mn_tap {
    void (*hear)(void *context, int layer, const char *name, const mn_tensor *x);
    void *context;
} mn_tap;

/* Projections of one tensor that were made together, by the names of their weights. */
typedef struct mn_ahead {
    const mn_tensor *of;
    int n;
    const char *names[8];
    mn_tensor *results[8];
} mn_ahead;

/* What the layers of a model share in a pass. */
typedef struct mn_shared {
    mn_tensor *first_value;       // values of the first layer that has some (rwkv7); NULL: none yet
} mn_shared;

/* One pass over one layer. */
typedef struct mn_forward {
    mn_tape *tape;
    const mn_layer *layer;
    mn_tensor *const *params;     // of the layer, in its order
    mn_tensor *onto;              // what the result is added to, of which x was made; NULL: nothing
    mn_tensor *first;             // the stream before the first block
    mn_layer_state *state;        // NULL: sequences begin and end within this pass
    int64_t position;             // tokens of the sequence before this pass
    float *variance;              // (B,T): read variance averaged over heads; NULL: not wanted
    mn_shared *shared;            // NULL: the layer is by itself
    mn_tensor *bound;             // (1,1,1,n): log odds of its least gates (hgrn2); NULL: 0
    const mn_tap *tap;            // NULL: nobody listens
    int index;                    // of the layer in its model, for the tap
    mn_tensor **branch;           // gets the result without `onto`; NULL: not wanted
    mn_ahead ahead;               // of the layer itself
    bool wants_output_variance;   // ask for `output_variance`, where the kind can (kla)
    mn_tensor *output_variance;   // (B,T,1,D), with gradient; NULL if the kind has none
} mn_forward;

/* (B,T,1,D) -> (B,T,1,D), added to f->onto. NULL after a failure, which the tape tells. */
mn_tensor *mn_layer_forward(mn_forward *f, mn_tensor *x);

/* Whether mn_forward.variance is filled by this layer. */
bool mn_layer_has_variance(const mn_layer *layer);

#endif
