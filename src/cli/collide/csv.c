/* csv.c - the collision experiment as CSV files: one line per write or overlap, one
 * column per rule, empty where a rule has no such number. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "cli/collide/collide.h"
#include "cli/plot/gnuplot.h"
#include "io/file.h"

enum { MAX_PATH = 4096 };

static void put(FILE *out, double x) {
    if (isnan(x)) fputc(',', out);
    else fprintf(out, ",%.10g", x);
}

static void put_names(FILE *out, const char *first) {
    fputs(first, out);
    for (int rule = 0; rule < MN_COLLISION_RULES; rule++) {
        fprintf(out, ",%s", mn_collision_name((mn_collision_rule)rule));
    }
    fputc('\n', out);
}

/* One line per write of the point's number at `offset`. */
static void put_series(FILE *out, const mn_collide *c, size_t offset) {
    put_names(out, "t");
    for (int64_t t = 0; t < c->length; t++) {
        fprintf(out, "%lld", (long long)t + 1);
        for (int rule = 0; rule < MN_COLLISION_RULES; rule++) {
            put(out, *(const double *)((const char *)&c->points[rule][t] + offset));
        }
        fputc('\n', out);
    }
}

static void retrieval(FILE *out, const mn_collide *c) {
    put_series(out, c, offsetof(mn_collision_point, p));
}

static void gain(FILE *out, const mn_collide *c) {
    put_series(out, c, offsetof(mn_collision_point, gain));
}

static void variance_a(FILE *out, const mn_collide *c) {
    put_series(out, c, offsetof(mn_collision_point, var_a));
}

static void variance_b(FILE *out, const mn_collide *c) {
    put_series(out, c, offsetof(mn_collision_point, var_b));
}

static void overlap(FILE *out, const mn_collide *c) {
    put_names(out, "rho");
    for (int i = 0; i < MN_COLLIDE_OVERLAPS; i++) {
        fprintf(out, "%.2f", c->overlap[i]);
        for (int rule = 0; rule < MN_COLLISION_RULES; rule++) put(out, c->sweep[i][rule]);
        fputc('\n', out);
    }
}

static void prior(FILE *out, const mn_collide *c) {
    fputs("c,gain,margin,lost,margin_at_0.99,lost_at_0.99\n", out);
    for (int i = 0; i < MN_COLLIDE_PRIORS; i++) {
        const mn_collide_prior *x = &c->prior[i];
        fprintf(out, "%g", x->c);
        put(out, x->gain);
        put(out, x->margin[0]);
        put(out, x->crossing[0] > 0 ? (double)x->crossing[0] : NAN);
        put(out, x->margin[1]);
        put(out, x->crossing[1] > 0 ? (double)x->crossing[1] : NAN);
        fputc('\n', out);
    }
}

static void theory(FILE *out, const mn_collide *c) {
    mn_collide_check checks[MN_COLLIDE_CHECKS];
    const int n = mn_collide_checks(checks, c);
    fputs("what,where,predicted,measured\n", out);
    for (int i = 0; i < n; i++) {
        fprintf(out, "%s,%s", checks[i].what, checks[i].where);
        put(out, checks[i].predicted);
        put(out, checks[i].measured);
        fputc('\n', out);
    }
}

mn_status mn_collide_write_file(const mn_collide *c, const char *folder, const char *name,
                                mn_collide_fill fill) {
    char path[MAX_PATH], *text = NULL;
    size_t size = 0;
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= MAX_PATH) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", folder);
    }
    FILE *out = open_memstream(&text, &size);
    if (!out) return mn_fail(MN_ERR_MEMORY, "no memory for %s", name);
    fill(out, c);
    const bool ok = fclose(out) == 0;
    const mn_status st = ok ? mn_file_write_bytes(path, text, size)
                            : mn_fail(MN_ERR_MEMORY, "no memory for %s", name);
    free(text);
    return st;
}

mn_status mn_collide_write_csv(const mn_collide *c, const char *folder) {
    static const struct {
        const char *name;
        mn_collide_fill fill;
    } files[] = {
        { "retrieval.csv", retrieval },   { "gain.csv", gain },
        { "variance_a.csv", variance_a }, { "variance_b.csv", variance_b },
        { "overlap.csv", overlap },       { "prior.csv", prior },
        { "theory.csv", theory },
    };
    mn_status st = mn_make_folder(folder);
    for (size_t i = 0; i < sizeof files / sizeof *files && st == MN_OK; i++) {
        st = mn_collide_write_file(c, folder, files[i].name, files[i].fill);
    }
    return st;
}
