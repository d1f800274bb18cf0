/* graft.h - replaces chosen layers of a model by another kind, keeping what both have. */
#ifndef MN_MODEL_FOLDER_GRAFT_H
#define MN_MODEL_FOLDER_GRAFT_H

#include "model/folder/transfer.h"

typedef struct mn_graft_request {
    const bool *chosen;        // of each layer of the source
    const char *to;            // a layer, such as "bayes" or "gdn+ccq"; NULL: what is there
    bool add_ccq;              // "+ccq" behind it
    const mn_json *options;    // of the new kind, laid over what follows from the old; NULL: none
    uint64_t seed;             // of what is made
} mn_graft_request;

/* What became of a parameter of a chosen layer. */
typedef struct mn_graft_row {
    char name[MN_PARAM_NAME];
    int layer;
    int64_t count, kept;       // numbers in all, and taken over from the source
    bool repeated;             // heads are there several times
    bool dropped;              // of the source, and in no parameter of the new layer
} mn_graft_row;

typedef struct mn_graft {
    mn_transfer *transfer;
    mn_graft_row *rows;
    int n_rows;
    struct mn_graft_parts *parts;
    uint64_t seed;
} mn_graft;

/* `source` must outlive it and have passed mn_weights_check. A graft that changes nothing keeps the
 * family and the configuration. */
mn_status mn_graft_create(mn_graft **out, const mn_source *source,
                          const mn_graft_request *request);
void mn_graft_destroy(mn_graft *graft);    // NULL accepted

#endif
