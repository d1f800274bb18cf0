/* collision.c - every number that Appendix E of the Bayesian Layer's paper prints,
 * computed again. The rows are in collision_printed.def; all presets are the same. */
#include "base/status.h"
#include "base/util.h"
#include "experiments/experiment_internal.h"

static const struct {
    const char *where, *what, *rule, *quantity;
    double overlap, c;
    int boost, write;
    const char *printed, *note;
} printed[] = {
#define PRINTED(where, what, rule, quantity, overlap, c, boost, write, printed, note)              \
    { where, what, rule, quantity, overlap, c, boost, write, printed, note },
#include "experiments/collision/collision_printed.def"
#undef PRINTED
};

static json_t *title_of(size_t i) {
    return json_sprintf("%s, %s", printed[i].where, printed[i].what);
}

static mn_status add_jobs(json_t *plan) {
    json_t *jobs = json_array();
    for (size_t i = 0; i < MN_COUNTOF(printed); i++) {
        json_array_append_new(
            jobs, json_pack("{s:s, s:s, s:s, s:f, s:f, s:i, s:i, s:{s:o, s:s}}", "kind",
                            "collision", "quantity", printed[i].quantity, "rule", printed[i].rule,
                            "overlap", printed[i].overlap, "c", printed[i].c, "boost",
                            printed[i].boost, "write", printed[i].write, "labels", "number",
                            title_of(i), "rule", printed[i].rule));
    }
    return json_object_set_new(plan, "grid", json_pack("{s:o}", "jobs", jobs)) == 0
               ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for the collision experiment");
}

static mn_status add_paper(json_t *numbers) {
    for (size_t i = 0; i < MN_COUNTOF(printed); i++) {
        const char *note = printed[i].note;
        json_array_append_new(
            numbers, json_pack("{s:i, s:o, s:s, s:s, s:o}", "table", 0, "row", title_of(i),
                               "column", printed[i].rule, "printed", printed[i].printed, "place",
                               json_sprintf("Appendix %s%s%s", printed[i].where, *note ? "; " : "",
                                            note)));
    }
    return MN_OK;
}

const mn_experiment_text mn_experiment_collision = {
    .common = MN_JSON_TEXT({
        "tables": [{ "title": "Numbers of Appendix E", "rows": "number", "columns": "rule",
                     "value": "score", "exact": true }]
    }),
    .notes = {
        "Where the paper's text and its tables belong to different settings, the place says which "
        "setting gives the printed number.",
        "mneme collide runs the same experiment on every layer that can take part.",
        NULL
    },
    .preset = { "{}", "{}", "{}" },
    .add = add_jobs,
    .add_paper = add_paper,
};
