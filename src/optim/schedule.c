/* schedule.c - learning rates as functions of the step. The rows are in schedules.def. */
#include <math.h>
#include <string.h>

#include "optim/optim.h"

static const char *const names[MN_SCHEDULE_COUNT] = {
#define SCHEDULE(id, name, about) [MN_SCHEDULE_##id] = name,
#include "optim/schedules.def"
#undef SCHEDULE
};

const char *mn_schedule_name(mn_schedule_kind kind) {
    return names[kind];
}

bool mn_schedule_parse(mn_schedule_kind *out, const char *name) {
    for (int kind = 0; kind < MN_SCHEDULE_COUNT; kind++) {
        if (strcmp(names[kind], name) != 0) continue;
        *out = (mn_schedule_kind)kind;
        return true;
    }
    return false;
}

/* How much of [first, steps) lies before `step`, 0 .. 1. */
static double part_done(double step, double first, double steps) {
    if (step <= first) return 0.0;
    return step >= steps ? 1.0 : (step - first) / (steps - first);
}

double mn_schedule_rate(const mn_schedule *schedule, int64_t step) {
    const mn_schedule *s = schedule;
    const double warmup = (double)s->warmup, steps = (double)s->steps;
    double at = (double)step;
    if (at >= warmup && s->hold > 1) at = fmax(at - (double)(step % s->hold), warmup);
    if (at < warmup) return s->peak * fmax(at + 1.0, 0.0) / (warmup + 1.0);
    const double fall = s->peak - s->floor;
    switch (s->kind) {
    case MN_SCHEDULE_COSINE: {
        const double turn = acos(-1.0) * part_done(at, warmup, steps);
        return s->floor + 0.5 * fall * (1.0 + cos(turn));
    }
    case MN_SCHEDULE_LINEAR: return s->floor + fall * (1.0 - part_done(at, warmup, steps));
    case MN_SCHEDULE_WSD: {
        const double stable = fmax(warmup, steps * (1.0 - s->decay_part));
        return s->floor + fall * (1.0 - part_done(at, stable, steps));
    }
    default: return s->peak;
    }
}
