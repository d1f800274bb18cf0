/* inside.h - what layers with a belief say of each token as they read it: the variance that heads
 * read and their gains, and rows of Kalman attention. */
#ifndef MN_SERVER_INSIDE_H
#define MN_SERVER_INSIDE_H

#include "infer/session.h"
#include "io/json.h"

enum {
    MN_INSIDE_ROWS = 16,        // of Kalman attention in one answer, at most
    MN_INSIDE_TOKENS = 4096,    // that one answer tells of, at most
};

typedef struct mn_inside mn_inside;

/* To hear what `session` reads next, about `count` tokens; `n_rows`: rows that will be wanted. */
mn_status mn_inside_create(mn_inside **out, mn_session *session, int64_t count, int n_rows);
void mn_inside_destroy(mn_inside *inside);    // NULL accepted

/* Reads tokens into the session, in one pass. */
mn_status mn_inside_feed(mn_inside *inside, const int32_t *tokens, int64_t count);

/* Read variances of the tokens of the last pass in the i-th layer that tells one. */
const float *mn_inside_variance(const mn_inside *inside, int i);

/* Adds heads, head_variance, gain and attention to `body`; tokens of rows count from the first that
 * was fed, those below 0 from the end. */
mn_status mn_inside_tell(json_t *body, const mn_inside *inside, const int64_t *rows, int n_rows);

#endif
