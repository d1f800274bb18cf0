/* config.h - what a model is: sizes, one layer name per block, and the options of each layer.
 *
 * Read from the config.json of a model folder or the "model" object of a training configuration.
 * Folders of flash-linear-attention models are understood as they are: MODEL_TYPE
 * rows of layers. */
#ifndef MN_MODEL_CONFIG_H
#define MN_MODEL_CONFIG_H

#include "layers/layer.h"

enum { MN_MAX_LAYERS = 512 };

typedef enum mn_mlp {
#define MLP(id, name, about) MN_MLP_##id,
#include "model/mlps.def"
#undef MLP
    MN_MLP_COUNT
} mn_mlp;

typedef enum mn_decoder {
#define DECODER(id, name, about) MN_DECODER_##id,
#include "model/decoders.def"
#undef DECODER
    MN_DECODER_COUNT
} mn_decoder;

/* Settings of blocks.def. Whole and real ones are of one size: nothing lies between them. */
typedef struct mn_block_config {
#define BLOCK_INT(name, choices, value, about) int64_t name;
#define BLOCK_REAL(name, value, about) double name;
#include "model/blocks.def"
#undef BLOCK_INT
#undef BLOCK_REAL
} mn_block_config;

/* What the second half of a block is. */
typedef enum mn_mlp_half {
    MN_MLP_DENSE,
    MN_MLP_SPARSE,
    MN_MLP_ABSENT,
    MN_MLP_SHARED,    // absent, and a shared block before the mixer
} mn_mlp_half;

typedef struct mn_model_config {
    int64_t vocab_size, hidden_size, intermediate_size;
    int64_t context;             // tokens a sequence may have where a layer is limited (hyper)
    double norm_eps, initializer_range, logit_softcap;
    mn_mlp mlp;
    mn_decoder decoder;
    const char *family;          // of families.def, of which a folder was read; NULL: none
    bool tied, mlp_bias, norm_plus_one;
    bool layer_norm, norm_bias;  // norms take off the mean, and add a bias
    bool norm_first;             // the embeddings are normed
    int n_layers;
    char (*names)[MN_MIXER_NAME];      // n_layers
    mn_layer_config *options;          // n_layers
    mn_layer_config *beside;           // n_layers: of the attention beside each mixer or in the
                                       // shared blocks, if any
    unsigned char *halves;             // n_layers of mn_mlp_half
    mn_block_config block;
    int quant_bits;                    // of quantised projections, 8 or 4; 0: numbers as they are
    int64_t quant_group;               // inputs that share a scale
    char *source;                      // JSON that it was read from, of other software; NULL: none
} mn_model_config;

/* Reads a model from JSON. Unknown keys fail with the nearest known one; keys other software
 * writes and that change nothing here are passed over. On failure `*out` is all zeros. */
mn_status mn_model_config_read(mn_model_config *out, const mn_json *object);

/* The JSON of a model, in memory the caller frees. Models that flash-linear-attention has too get
 * its model_type and keys. */
mn_status mn_model_config_write(char **text, size_t *size, const mn_model_config *config);

/* The family (dialect.h) whose names the files of such a model carry; NULL: ours. */
const char *mn_model_config_family(const mn_model_config *config);

/* The model_type of that name, a text that stays, "mneme" among them; NULL: none is read. A
 * configuration without source whose family it is set as is written as that type, where that can be
 * said. */
const char *mn_model_type_known(const char *type);

/* block_config.c: defaults; what `object` says; keys; what is not as by default, as JSON. */
void mn_block_defaults(mn_block_config *out);
mn_status mn_block_read(mn_block_config *out, const mn_json *object);
mn_status mn_block_read_halves(unsigned char *out, int n, const mn_block_config *c,
                               const mn_json *object);
int mn_block_keys(const char **keys, int capacity);
bool mn_block_is_plain(const mn_block_config *c, const unsigned char *of_layers, int n);
mn_status mn_block_write(json_t *object, const mn_block_config *c, const unsigned char *of_layers,
                         int n);

mn_status mn_model_config_copy(mn_model_config *out, const mn_model_config *from);
void mn_model_config_free(mn_model_config *config);    // all zeros is fine

/* "attention*11, kla" as one name per layer; n_layers 0: as many as it names, else it is repeated
 * to fill them. */
mn_status mn_layers_expand(char (**names)[MN_MIXER_NAME], int *count, const char *text,
                           int64_t n_layers);

/* The same the other way, "gdn" for equal layers; into `text` of `size` bytes, cut if need be. */
void mn_layers_describe(char *text, size_t size, const mn_model_config *config);

#endif
