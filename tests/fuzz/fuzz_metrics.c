/* fuzz_metrics.c - lines of a run: what parses has a column of steps, and a cut at any step keeps a
 * prefix that parses to the rows up to there. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "train/run/run_read.h"

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) abort();                                                                 \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    mn_run_table table, before;
    int64_t n_lines;
    size_t kept;
    if (mn_run_table_parse(&table, bytes, size, "fuzz") != MN_OK) {
        REQUIRE(!table.names && !table.values);
        return 0;
    }
    const double *step = mn_run_table_column(&table, "step");
    REQUIRE(table.n_rows == 0 || step);
    for (int64_t row = 0; row < table.n_rows && row < 8; row++) {
        REQUIRE(!isnan(step[row]));
        const int64_t last = fabs(step[row]) < 9e15 ? (int64_t)step[row] : 0;
        REQUIRE(mn_run_lines_until(&n_lines, &kept, last, bytes, size, "fuzz") == MN_OK);
        REQUIRE(kept <= size && n_lines <= table.n_rows);
        REQUIRE(mn_run_table_parse(&before, bytes, kept, "fuzz") == MN_OK);
        REQUIRE(before.n_rows == n_lines);
        const double *steps = mn_run_table_column(&before, "step");
        for (int64_t i = 0; i < n_lines; i++) REQUIRE(steps[i] <= (double)last);
        mn_run_table_free(&before);
    }
    mn_run_table_free(&table);
    return 0;
}
