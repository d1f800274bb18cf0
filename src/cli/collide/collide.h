/* collide.h - the parts of mneme collide: everything computed once, then told in four ways. */
#ifndef MN_CLI_COLLIDE_COLLIDE_H
#define MN_CLI_COLLIDE_COLLIDE_H

#include <stdio.h>

#include "experiments/collision/collision.h"

enum { MN_COLLIDE_OVERLAPS = 10, MN_COLLIDE_PRIORS = 6, MN_COLLIDE_CURVE = 100 };

/* A covariance reset to c I, at the overlap asked for and at 0.99. */
typedef struct mn_collide_prior {
    double c, gain, margin[2];
    int64_t crossing[2];
} mn_collide_prior;

typedef struct mn_collide {
    mn_collision_setup setup;
    int64_t length, boost_end;                            // tokens in all, before the flood
    mn_collision_point *points[MN_COLLISION_RULES];       // `length` each
    mn_collision_rule same_as[MN_COLLISION_RULES];        // the first rule with the same answers
    mn_collision_theory theory;
    double overlap[MN_COLLIDE_OVERLAPS];
    double sweep[MN_COLLIDE_OVERLAPS][MN_COLLISION_RULES];    // margin at the end
    double curve_overlap[MN_COLLIDE_CURVE];
    double curve[MN_COLLIDE_CURVE][MN_COLLISION_RULES];       // p at the end
    mn_collide_prior prior[MN_COLLIDE_PRIORS];
    double bayes_margin[2];                               // beside the priors
} mn_collide;

/* One closed form beside what the run shows; measured is NaN where a finite run shows no such
 * thing. */
typedef struct mn_collide_check {
    const char *what, *where;
    double predicted, measured;
    int64_t t;    // where it was measured, 0: nowhere
} mn_collide_check;

enum { MN_COLLIDE_CHECKS = 17 };
int mn_collide_checks(mn_collide_check out[MN_COLLIDE_CHECKS], const mn_collide *c);

/* What the paper's tables say at which overlap, in sentences; NULL after the last. */
const char *mn_collide_note(int index);

/* Runs everything for c->setup; `with_curve` fills curve too, which figures need. Free with
 * mn_collide_free, also after a failure. */
mn_status mn_collide_compute(mn_collide *c, bool with_curve);
void mn_collide_free(mn_collide *c);

void mn_collide_print(const mn_collide *c);
mn_status mn_collide_print_json(const mn_collide *c);

/* Fills an open file. */
typedef void (*mn_collide_fill)(FILE *out, const mn_collide *c);

/* Writes FOLDER/NAME as `fill` has it. */
mn_status mn_collide_write_file(const mn_collide *c, const char *folder, const char *name,
                                mn_collide_fill fill);

/* Writes retrieval.csv, gain.csv, variance.csv, overlap.csv, prior.csv and theory.csv into
 * `folder`. */
mn_status mn_collide_write_csv(const mn_collide *c, const char *folder);

/* Writes the two figures of the paper as gnuplot scripts beside those files, and runs gnuplot. */
mn_status mn_collide_write_figures(const mn_collide *c, const char *folder);

#endif
