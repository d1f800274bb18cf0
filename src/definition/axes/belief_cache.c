/* belief_cache.c - the whole past: keys and values as they came. mixer.c appends them. */
#include "definition/axes.h"

const mn_belief mn_belief_cache = {
    .name = "cache",
    .equation = "all (k, v) so far",
};
