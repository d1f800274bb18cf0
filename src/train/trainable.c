/* trainable.c - patterns of parameter names, each with a rate of learning. */
#include "train/trainable.h"

#include <fnmatch.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"

enum { PATTERN = 256 };

/* Sets the rate of the parameters that match and have none yet; returns how many match. */
static int set_rate(mn_model *model, const char *pattern, double rate) {
    int n = 0;
    for (int i = 0; i < mn_model_params(model); i++) {
        mn_model_param *p = mn_model_param_at(model, i);
        if (fnmatch(pattern, p->name, 0) != 0) continue;
        n++;
        if (p->rate < 0.0) p->rate = rate;
    }
    return n;
}

/* What a replaced layer brings, and the ends of the MLP behind it. */
static int set_mixers(mn_model *model, const bool *of) {
    static const struct {
        const char *rest;
        double rate;
    } parts[] = { { "attn.*", 1.0 }, { "mlp.gate_proj.*", 0.1 }, { "mlp.down_proj.*", 0.1 } };
    int n = 0;
    for (int i = 0; i < mn_model_describe(model)->n_layers; i++) {
        for (size_t k = 0; of[i] && k < sizeof parts / sizeof *parts; k++) {
            char pattern[PATTERN];
            snprintf(pattern, sizeof pattern, "model.layers.%d.%s", i, parts[k].rest);
            n += set_rate(model, pattern, parts[k].rate);
        }
    }
    return n;
}

static mn_status apply_one(mn_model *model, const char *item, size_t length, const bool *of) {
    char pattern[PATTERN], *end;
    double rate = 1.0;
    if (length >= sizeof pattern) {
        return mn_fail(MN_ERR_ARGUMENT, "train.trainable: a pattern of %zu characters", length);
    }
    snprintf(pattern, sizeof pattern, "%.*s", (int)length, item);
    char *equals = strchr(pattern, '=');
    if (equals) {
        rate = strtod(equals + 1, &end);
        if (end == equals + 1 || *end || !(rate >= 0.0 && rate <= 1e6)) {
            return mn_fail(MN_ERR_ARGUMENT, "train.trainable: \"%s\": write PATTERN=RATE, the rate "
                           "from 0 to 1e6", pattern);
        }
        *equals = '\0';
    }
    const bool mixers = strcmp(pattern, "mixers") == 0;
    const int n = mixers ? set_mixers(model, of) : set_rate(model, pattern, rate);
    if (n > 0) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, mixers ? "train.trainable: mixers needs train.distill_layers, "
                   "or a train.teacher with other layers" : "train.trainable: no parameter is "
                   "called \"%s\"; mneme info MODEL lists them", pattern);
}

mn_status mn_trainable_apply(mn_model *model, const char *list, const bool of[MN_MAX_LAYERS]) {
    mn_status st = MN_OK;
    if (!list[strspn(list, ", ")]) return MN_OK;
    for (int i = 0; i < mn_model_params(model); i++) mn_model_param_at(model, i)->rate = -1.0;
    while (st == MN_OK && *(list += strspn(list, ", "))) {
        const size_t length = strcspn(list, ", ");
        st = apply_one(model, list, length, of);
        list += length;
    }
    for (int i = 0; i < mn_model_params(model); i++) {
        mn_model_param *p = mn_model_param_at(model, i);
        p->rate = fmax(p->rate, 0.0);
    }
    return st;
}
