/* metric.c - how many answers are right, counted in the ways the papers count. */
#include "tasks/metric.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "tasks/task.h"

typedef struct tally {
    int64_t right, missed, wrong;    // tp, fn, fp
} tally;

typedef struct group_count {
    int64_t right, answers;
} group_count;

struct mn_metric {
    int64_t n_classes;
    int n_groups;
    tally *classes;                  // of the batch being counted
    group_count *groups;
    int64_t answers, right;
    int64_t sequences, all_right;
    double examples;                 // sum over sequences of the part that is right
    int64_t batches;
    double macro;                    // sum over batches
};

mn_status mn_metric_create(mn_metric **out, int64_t n_classes, int n_groups) {
    *out = NULL;
    if (n_classes < 1 || n_groups < 0 || n_groups > INT8_MAX) {
        return mn_fail(MN_ERR_ARGUMENT, "a metric of %" PRId64 " classes and %d groups: at least 1 "
                       "class and at most %d groups are possible", n_classes, n_groups, INT8_MAX);
    }
    mn_metric *m = calloc(1, sizeof *m);
    if (m) {
        m->n_classes = n_classes;
        m->n_groups = n_groups;
        m->classes = calloc((size_t)n_classes, sizeof *m->classes);
        m->groups = calloc((size_t)n_groups + 1, sizeof *m->groups);
    }
    if (m && m->classes && m->groups) {
        *out = m;
        return MN_OK;
    }
    mn_metric_destroy(m);
    return mn_fail(MN_ERR_MEMORY, "no memory to count %" PRId64 " classes", n_classes);
}

void mn_metric_destroy(mn_metric *metric) {
    if (!metric) return;
    free(metric->classes);
    free(metric->groups);
    free(metric);
}

static mn_status check_batch(const mn_metric *m, const int32_t *predictions,
                             const int32_t *targets, const int8_t *groups, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (targets[i] == MN_NO_TARGET) continue;
        const bool known = targets[i] >= 0 && targets[i] < m->n_classes;
        if (!known || predictions[i] < 0 || predictions[i] >= m->n_classes) {
            return mn_fail(MN_ERR_ARGUMENT, "place %" PRId64 " has target %" PRId32
                           " and prediction %" PRId32 ", classes are 0 to %" PRId64, i, targets[i],
                           predictions[i], m->n_classes - 1);
        }
        if (groups && groups[i] >= m->n_groups) {
            return mn_fail(MN_ERR_ARGUMENT, "place %" PRId64 " has group %d, there are %d", i,
                           groups[i], m->n_groups);
        }
    }
    return MN_OK;
}

static void add_sequence(mn_metric *m, const int32_t *predictions, const int32_t *targets,
                         const int8_t *groups, int64_t length) {
    int64_t answers = 0, right = 0;
    for (int64_t t = 0; t < length; t++) {
        if (targets[t] == MN_NO_TARGET) continue;
        const bool hit = predictions[t] == targets[t];
        answers++;
        right += hit;
        m->classes[targets[t]].right += hit;
        m->classes[targets[t]].missed += !hit;
        m->classes[predictions[t]].wrong += !hit;
        if (groups && groups[t] >= 0) {
            m->groups[groups[t]].answers++;
            m->groups[groups[t]].right += hit;
        }
    }
    if (answers == 0) return;
    m->answers += answers;
    m->right += right;
    m->sequences++;
    m->all_right += right == answers;
    m->examples += (double)right / (double)answers;
}

mn_status mn_metric_add(mn_metric *metric, const int32_t *predictions, const int32_t *targets,
                        const int8_t *groups, int64_t rows, int64_t length) {
    mn_metric *m = metric;
    const mn_status st = check_batch(m, predictions, targets, groups, rows * length);
    if (st != MN_OK) return st;
    memset(m->classes, 0, (size_t)m->n_classes * sizeof *m->classes);
    const int64_t before = m->answers;
    for (int64_t r = 0; r < rows; r++) {
        add_sequence(m, predictions + r * length, targets + r * length,
                     groups ? groups + r * length : NULL, length);
    }
    if (m->answers == before) return MN_OK;
    double recall = 0.0;
    int64_t present = 0;
    for (int64_t c = 0; c < m->n_classes; c++) {
        const tally *k = &m->classes[c];
        const int64_t asked = k->right + k->missed;
        present += asked + k->wrong > 0;
        if (asked > 0) recall += (double)k->right / (double)asked;
    }
    m->macro += recall / (double)present;
    m->batches++;
    return MN_OK;
}

static double share(double part, int64_t whole) {
    return whole > 0 ? part / (double)whole : NAN;
}

mn_metric_result mn_metric_read(const mn_metric *m) {
    return (mn_metric_result){
        .token = share((double)m->right, m->answers),
        .macro = share(m->macro, m->batches),
        .example = share(m->examples, m->sequences),
        .sequence = share((double)m->all_right, m->sequences),
        .answers = m->answers,
        .right = m->right,
        .sequences = m->sequences,
        .batches = m->batches,
    };
}

void mn_metric_reset(mn_metric *m) {
    memset(m->groups, 0, ((size_t)m->n_groups + 1) * sizeof *m->groups);
    m->answers = m->right = m->sequences = m->all_right = m->batches = 0;
    m->examples = m->macro = 0.0;
}

double mn_metric_group(const mn_metric *m, int group) {
    if (group < 0 || group >= m->n_groups) return NAN;
    return share((double)m->groups[group].right, m->groups[group].answers);
}
