/* json.c - the collision experiment as JSON. */
#include <math.h>
#include <stdlib.h>

#include "base/status.h"
#include "cli/collide/collide.h"
#include "io/json_write.h"

/* The field at `offset` of every point, as a list. */
static json_t *series(const mn_collide *c, int rule, size_t offset) {
    json_t *list = json_array();
    for (int64_t t = 0; t < c->length; t++) {
        const char *point = (const char *)&c->points[rule][t];
        json_array_append_new(list, mn_json_real(*(const double *)(point + offset)));
    }
    return list;
}

static json_t *crossing_json(int64_t t) {
    return t > 0 ? json_integer(t) : json_null();
}

static json_t *rule_json(const mn_collide *c, int rule) {
    static const struct {
        const char *name;
        size_t offset;
    } fields[] = {
        { "p", offsetof(mn_collision_point, p) },
        { "margin", offsetof(mn_collision_point, margin) },
        { "b_A", offsetof(mn_collision_point, b) },
        { "b_B", offsetof(mn_collision_point, b) + sizeof(double) },
        { "a_A", offsetof(mn_collision_point, a) },
        { "a_B", offsetof(mn_collision_point, a) + sizeof(double) },
        { "gain", offsetof(mn_collision_point, gain) },
        { "gain_norm", offsetof(mn_collision_point, gain_norm) },
        { "cos", offsetof(mn_collision_point, cosine) },
        { "var_a", offsetof(mn_collision_point, var_a) },
        { "var_b", offsetof(mn_collision_point, var_b) },
    };
    const mn_collision_point *x = c->points[rule];
    json_t *all = json_object();
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        json_object_set_new(all, fields[i].name, series(c, rule, fields[i].offset));
    }
    return json_pack("{s:s, s:s, s:s, s:o, s:o, s:o, s:o, s:o}", "rule",
                     mn_collision_name((mn_collision_rule)rule), "settings",
                     mn_collision_settings((mn_collision_rule)rule), "same_as",
                     mn_collision_name(c->same_as[rule]), "p_boost",
                     mn_json_real(c->boost_end > 0 ? x[c->boost_end - 1].p : NAN), "p_flood",
                     mn_json_real(x[c->length - 1].p), "margin",
                     mn_json_real(x[c->length - 1].margin), "lost",
                     crossing_json(mn_collision_crossing(x, &c->setup)), "series", all);
}

static json_t *setup_json(const mn_collide *c) {
    const mn_collision_setup *s = &c->setup;
    return json_pack("{s:i, s:i, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o}", "D", MN_COLLISION_D,
                     "m", MN_COLLISION_M, "seed_passes", (json_int_t)s->n_seed, "boost",
                     (json_int_t)s->n_boost, "flood", (json_int_t)s->n_flood, "rho",
                     mn_json_real(s->rho), "p0", mn_json_real(s->p0), "l2", mn_json_real(s->l2),
                     "r2", mn_json_real(s->r2), "c", mn_json_real(s->c), "gamma",
                     mn_json_real(s->gamma));
}

static json_t *theory_json(const mn_collide *c) {
    mn_collide_check checks[MN_COLLIDE_CHECKS];
    const int n = mn_collide_checks(checks, c);
    json_t *list = json_array();
    for (int i = 0; i < n; i++) {
        json_array_append_new(list, json_pack("{s:s, s:s, s:o, s:o, s:I}", "what", checks[i].what,
                                              "where", checks[i].where, "predicted",
                                              mn_json_real(checks[i].predicted), "measured",
                                              mn_json_real(checks[i].measured), "t",
                                              (json_int_t)checks[i].t));
    }
    return list;
}

static json_t *sweep_json(const mn_collide *c) {
    json_t *list = json_array();
    for (int i = 0; i < MN_COLLIDE_OVERLAPS; i++) {
        json_t *margins = json_object();
        for (int rule = 0; rule < MN_COLLISION_RULES; rule++) {
            json_object_set_new(margins, mn_collision_name((mn_collision_rule)rule),
                                mn_json_real(c->sweep[i][rule]));
        }
        json_array_append_new(
            list, json_pack("{s:o, s:o}", "rho", mn_json_real(c->overlap[i]), "margin", margins));
    }
    return list;
}

static json_t *priors_json(const mn_collide *c) {
    json_t *list = json_array();
    for (int i = 0; i < MN_COLLIDE_PRIORS; i++) {
        const mn_collide_prior *x = &c->prior[i];
        json_array_append_new(list, json_pack("{s:o, s:o, s:o, s:o, s:o, s:o}", "c",
                                              mn_json_real(x->c), "gain", mn_json_real(x->gain),
                                              "margin", mn_json_real(x->margin[0]), "lost",
                                              crossing_json(x->crossing[0]), "margin_at_0.99",
                                              mn_json_real(x->margin[1]), "lost_at_0.99",
                                              crossing_json(x->crossing[1])));
    }
    return list;
}

static json_t *absent_json(void) {
    json_t *all = json_object();
    const char *row, *why;
    for (int i = 0; mn_collision_absent(i, &row, &why); i++) {
        json_object_set_new(all, row, json_string(why));
    }
    return all;
}

mn_status mn_collide_print_json(const mn_collide *c) {
    json_t *rules = json_array(), *notes = json_array();
    char *text = NULL;
    for (int rule = 0; rule < MN_COLLISION_RULES; rule++) {
        json_array_append_new(rules, rule_json(c, rule));
    }
    for (int i = 0; mn_collide_note(i); i++) {
        json_array_append_new(notes, json_string(mn_collide_note(i)));
    }
    json_t *root = json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "setup", setup_json(c), "rules",
                             rules, "cannot", absent_json(), "theory", theory_json(c), "overlap",
                             sweep_json(c), "fixed_prior", priors_json(c), "notes", notes);
    if (!root) return mn_fail(MN_ERR_MEMORY, "no memory for the answer");
    const mn_status st = mn_json_text(&text, root, MN_JSON_PRETTY);
    if (st == MN_OK) puts(text);
    free(text);
    json_decref(root);
    return st;
}
