/* asked.c - see asked.h. */
#include "train/asked.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/status.h"

enum { NO_TARGET = -100 };

mn_status mn_asked_create(mn_asked *out, int64_t most, int64_t rows, int64_t length) {
    *out = (mn_asked){ 0 };
    if (most <= 0 || 2 * most > rows * length) return MN_OK;
    out->places = calloc((size_t)most, sizeof *out->places);
    out->targets = calloc((size_t)most, sizeof *out->targets);
    if (!out->places || !out->targets) {
        mn_asked_free(out);
        return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " targets", most);
    }
    out->n = most;
    for (int64_t i = 0; i < most; i++) {
        out->places[i] = (int32_t)i;    // what a plan picks, before there is a batch
        out->targets[i] = NO_TARGET;
    }
    return MN_OK;
}

void mn_asked_free(mn_asked *asked) {
    free(asked->places);
    free(asked->targets);
    *asked = (mn_asked){ 0 };
}

mn_status mn_asked_list(mn_asked *asked, const mn_token_batch *batch) {
    const int64_t tokens = batch->rows * batch->length;
    int64_t counted = 0, n = 0;
    for (int64_t i = 0; i < tokens; i++) counted += batch->targets[i] >= 0;
    if (counted > asked->n) {
        return mn_fail(MN_ERR_INTERNAL, "a batch asks for %" PRId64 " tokens, and its source said "
                       "%" PRId64 " at most", counted, asked->n);
    }
    for (int without = 0; without < 2; without++) {
        for (int64_t i = 0; i < tokens && n < asked->n; i++) {
            if ((batch->targets[i] < 0) != (without == 1)) continue;
            asked->places[n] = (int32_t)i;
            asked->targets[n++] = without ? NO_TARGET : batch->targets[i];
        }
    }
    return MN_OK;
}
