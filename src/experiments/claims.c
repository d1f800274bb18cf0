/* claims.c - claims as differences of cells. */
#include "experiments/claims.h"

#include <math.h>

#include "base/status.h"
#include "base/util.h"
#include "experiments/cells.h"

int64_t mn_claim_count(const mn_json *results) {
    const mn_json claims = mn_json_member(results, "claims");
    return mn_json_count(&claims);
}

/* The cell that a claim names under `key`, NULL where it names none or there is none. */
static const mn_cell *cell_of(const mn_cells *cells, const mn_json *claim, const char *key) {
    const json_t *at = json_object_get(claim->value, key);
    const char *row = json_string_value(json_array_get(at, 0));
    const char *column = json_string_value(json_array_get(at, 1));
    return row && column ? mn_cells_at(cells, row, column) : NULL;
}

static void judge(mn_claim *out, const mn_cell *cell, const mn_cell *less, bool differs,
                  bool best, double learned) {
    if (!cell || cell->n == 0 || (differs && (!less || less->n == 0))) return;
    const double own = best ? cell->most : cell->mean;
    out->value = own - (differs ? best ? less->most : less->mean : 0.0);
    out->seeds = differs ? mn_min(cell->n, less->n) : cell->n;
    out->se = differs ? sqrt(cell->se * cell->se + less->se * less->se) : cell->se;
    out->idle = fmax(cell->mean, differs ? less->mean : cell->mean) < learned;
    const bool holds = out->below ? out->value < out->bound : out->value > out->bound;
    out->verdict = holds ? MN_CLAIM_HOLDS : MN_CLAIM_FAILS;
}

mn_status mn_claim_judge(mn_claim *out, const mn_json *results, int64_t i) {
    static const char *const keys[] = { "says", "table", "cell", "less", "above", "below",
                                        "best", "learned" };
    const mn_json claims = mn_json_member(results, "claims"), claim = mn_json_item(&claims, i);
    const mn_json below = mn_json_member(&claim, "below");
    int64_t table = 0;
    bool best = false;
    double learned = -INFINITY;
    mn_cells cells;
    *out = (mn_claim){ .value = NAN, .se = NAN, .below = mn_json_given(&below) };
    mn_status st = mn_json_expect_object(&claim);
    if (st == MN_OK) st = mn_json_unknown_key(&claim, keys, MN_COUNTOF(keys));
    if (st == MN_OK) st = mn_json_get_text(&out->says, &claim, "says");
    if (st == MN_OK) st = mn_json_opt_i64(&table, &claim, "table");
    if (st == MN_OK) st = mn_json_opt_f64(&out->bound, &claim, out->below ? "below" : "above");
    if (st == MN_OK) st = mn_json_opt_bool(&best, &claim, "best");
    if (st == MN_OK) st = mn_json_opt_f64(&learned, &claim, "learned");
    if (st == MN_OK) st = mn_cells_make(&cells, results, table);
    if (st != MN_OK) return st;
    out->percent = cells.percent;
    judge(out, cell_of(&cells, &claim, "cell"), cell_of(&cells, &claim, "less"),
          json_object_get(claim.value, "less") != NULL, best, learned);
    if (best) out->se = NAN;
    out->sure = best || cells.exact;
    out->close = fabs(out->value - out->bound) < 2.0 * out->se;    // no, where there is none
    mn_cells_free(&cells);
    return MN_OK;
}

const char *mn_claim_word(const mn_claim *claim, bool full_size) {
    const bool counted = claim->sure || (claim->seeds > 1 && !isnan(claim->se) && !claim->close);
    if (claim->verdict == MN_CLAIM_OPEN) return "not run";
    if (!counted || claim->idle) return "undecided";
    if (claim->verdict == MN_CLAIM_FAILS) return "refuted";
    return full_size ? "reproduced" : "at reduced size";
}
