/* mixer_internal.h - what a mixer is made of; for mixer.c and snapshot.c only. */
#ifndef MN_DEFINITION_MIXER_INTERNAL_H
#define MN_DEFINITION_MIXER_INTERNAL_H

#include "definition/axes.h"

enum { MN_MIXER_INPUTS = 32 };

/* An input that the row takes. Head h finds its row at h * head_step. */
typedef struct mn_bound {
    const mn_field *field;    // NULL: ccq_gamma
    size_t slot;              // offset in mn_token
    int64_t count, head_step;
    bool required;
} mn_bound;

/* A part of the state: `count` numbers, those of head h from h * head_step. */
typedef struct mn_part {
    char name[16];
    int64_t count, head_step;
    double *at;
} mn_part;

struct mn_mixer {
    mn_mixer_info info;
    mn_mixer_config config;
    int64_t heads, n_tokens;
    bool started;                  // the prior is in the state
    int n_inputs, n_parts, n_row_parts;    // the row's parts come first, then kk and ks
    mn_bound inputs[MN_MIXER_INPUTS];
    mn_part parts[MN_MIXER_PARTS];
    mn_cache cache;
    int64_t state_count, scratch_count;
    double *state, *scratch;       // all parts; scratch of one head
    int64_t key_step, value_step;
};

/* Makes room for `length` tokens in the cache. */
mn_status mn_cache_reserve(mn_cache *cache, int64_t length);

#endif
