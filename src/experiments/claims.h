/* claims.h - what a paper says of its numbers, held against ours.
 *
 *   claim   {"says": sentence, "table": number, "cell": [row, column], "less": [row, column],
 *            "above": x, "best": true, "learned": y} or "below" in place of above
 *
 * The value is the cell, less the other one where there is one; with "best" that of its best
 * seed. Where neither cell reaches what "learned" says, rows that know nothing are compared, and
 * the claim is undecided. */
#ifndef MN_EXPERIMENTS_CLAIMS_H
#define MN_EXPERIMENTS_CLAIMS_H

#include "io/json.h"
#include "mneme.h"

typedef enum mn_verdict { MN_CLAIM_OPEN, MN_CLAIM_HOLDS, MN_CLAIM_FAILS } mn_verdict;

/* The rule of verdicts, printed with every report. */
#define MN_CLAIM_RULE                                                                              \
    "Rule: reproduced where two seeds or more of the full size are beyond what is asked by more "  \
    "than two standard errors, and at reduced size where those of a smaller preset are; refuted "  \
    "where they are as far on the other side; undecided else, as where no row has learned the "    \
    "task. Exact numbers and the best of the seeds have no error and go by themselves."

typedef struct mn_claim {
    const char *says;            // borrowed from the results
    mn_verdict verdict;          // open: a cell has no number yet
    bool percent, below;
    bool close;                  // within two standard errors of its bound: more seeds may turn it
    bool idle;                   // neither cell has learned the task
    bool sure;                   // has no error: an exact number, or the best of the seeds
    int64_t seeds;               // of the cell with fewer
    double value, se, bound;     // se of the value: NAN when a cell has one seed
} mn_claim;

/* Claim `i` of a results.json. */
mn_status mn_claim_judge(mn_claim *out, const mn_json *results, int64_t i);
int64_t mn_claim_count(const mn_json *results);

/* "reproduced", "at reduced size", "refuted", "undecided" or "not run", by the rule. */
const char *mn_claim_word(const mn_claim *claim, bool full_size);

#endif
