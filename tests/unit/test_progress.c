/* test_progress.c - the line of a progress bar, and when lines are printed without a terminal. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>

#include "cli/progress.c"    // the program's files are in no library

static const char *text_of(const mn_progress *bar, double now, bool finished) {
    static char text[400];
    mn_progress_text(text, sizeof text, bar, now, finished);
    return text;
}

static void line_says_share_rate_and_time_left(void **state) {
    (void)state;
    mn_progress bar = { .title = "train", .unit = "steps", .done = 450, .all = 1000 };
    assert_string_equal(text_of(&bar, 9.0, false),
                        "train: 45 %, 450 of 1000 steps, 50 steps/s, 0:11 left");
    snprintf(bar.extra, sizeof bar.extra, "loss 2.50");
    assert_string_equal(text_of(&bar, 9.0, true),
                        "train: 450 steps in 0:09, 50 steps/s, loss 2.50");
    bar.terminal = true;
    assert_string_equal(text_of(&bar, 9.0, false),
                        "train: [##########--------------]  45 %, 450 of 1000 steps, 50 steps/s, "
                        "0:11 left, loss 2.50");
}

static void resumed_work_does_not_count_in_the_rate(void **state) {
    (void)state;
    const mn_progress bar = { .title = "x", .unit = "steps", .first = 400, .done = 500,
                              .all = 1000 };
    assert_string_equal(text_of(&bar, 10.0, false),
                        "x: 50 %, 500 of 1000 steps, 10 steps/s, 0:50 left");
}

static void unknown_ends_and_rates_are_left_out(void **state) {
    (void)state;
    mn_progress bar = { .title = "x", .unit = "tokens", .done = 12345678 };
    assert_string_equal(text_of(&bar, 100.0, false), "x: 12.3M tokens, 123k tokens/s");
    bar.done = 0;
    bar.all = 7;
    assert_string_equal(text_of(&bar, 100.0, false), "x: 0 %, 0 of 7 tokens");
    bar.done = 9;    // more than was announced
    assert_string_equal(text_of(&bar, 3.0, false), "x: 100 %, 9 of 7 tokens, 3 tokens/s");
}

static void counts_and_times_are_short(void **state) {
    (void)state;
    static const struct {
        double count;
        const char *text;
    } counts[] = { { 0, "0" }, { 9999, "9999" }, { 9999.6, "10.0k" }, { 0.25, "0.2" },
                   { 99949, "99.9k" }, { 99951, "100k" }, { 999499, "999k" }, { 1e6, "1.0M" },
                   { 9.2e18, "9200P" } };
    static const struct {
        double seconds;
        const char *text;
    } times[] = { { 0, "0:00" }, { 59.6, "1:00" }, { 3599, "59:59" }, { 3600, "1:00:00" },
                  { 90061, "1 d 1:01:01" } };
    char text[64];
    for (size_t i = 0; i < MN_COUNTOF(counts); i++) {
        put_count(text, sizeof text, counts[i].count);
        assert_string_equal(text, counts[i].text);
    }
    for (size_t i = 0; i < MN_COUNTOF(times); i++) {
        put_time(text, sizeof text, times[i].seconds);
        assert_string_equal(text, times[i].text);
    }
    put_bytes(text, sizeof text, 999);
    assert_string_equal(text, "999 B");
    put_bytes(text, sizeof text, 1234567);
    assert_string_equal(text, "1.2 MB");
}

/* The lines that a thousand updates print when each takes `seconds` on the bar's clock. */
static int plain_lines(double seconds) {
    mn_progress bar;
    mn_progress_start(&bar, "count", "steps", 0, 1000, true);
    FILE *out = tmpfile();
    assert_non_null(out);
    bar.out = out;
    bar.shown_at = mn_seconds();
    for (int64_t i = 1; i <= 1000; i++) {
        bar.shown_at -= seconds;
        mn_progress_update(&bar, i, NULL);
    }
    mn_progress_finish(&bar, "done");
    int lines = 0, escapes = 0;
    rewind(out);
    for (int c; (c = getc(out)) != EOF;) {
        lines += c == '\n';
        escapes += c == '\r' || c == '\033';
    }
    fclose(out);
    assert_int_equal(escapes, 0);
    return lines;
}

static void plain_lines_are_few(void **state) {
    (void)state;
    assert_in_range(plain_lines(0), 1, 2);         // over at once: the closing line
    assert_int_equal(plain_lines(0.02), 10);       // nine tenths and the closing line
    assert_in_range(plain_lines(1.001), 99, 101);  // every ten seconds
    assert_int_equal(plain_lines(20), 1001);       // slow: each one, and the closing line
}

/* On a terminal a line is redrawn ten times a second and cut to the width. */
static void terminal_line_is_redrawn_in_place(void **state) {
    (void)state;
    mn_progress bar = { .title = "count", .unit = "steps", .all = 1000, .terminal = true,
                        .columns = 40, .out = tmpfile() };
    assert_non_null(bar.out);
    bar.started = bar.shown_at = mn_seconds();
    FILE *out = bar.out;
    for (int64_t i = 0; i < 1000; i++) mn_progress_update(&bar, i, NULL);
    mn_progress_clear(&bar);
    char text[4096];
    rewind(out);
    text[fread(text, 1, sizeof text - 1, out)] = '\0';
    fclose(out);
    assert_null(strchr(text, '\n'));
    int redrawn = 0;
    size_t longest = 0;
    for (char *line = strtok(text, "\r"); line; line = strtok(NULL, "\r")) {
        const size_t n = strlen(line) - strlen("\033[K");
        longest = n > longest ? n : longest;
        redrawn++;
    }
    assert_in_range(redrawn, 2, 20);    // one drawing, one erasing, more on a stalled machine
    assert_true(longest < 40);
}

static void quiet_bar_does_nothing(void **state) {
    (void)state;
    mn_progress bar, none = { 0 };
    mn_progress_start(&bar, "x", "steps", 0, 10, true);
    mn_progress_update(&bar, 5, "extra");
    mn_progress_finish(&bar, NULL);
    assert_null(bar.out);
    mn_progress_update(&none, 5, "extra");
    mn_progress_clear(&none);
    mn_progress_finish(&none, NULL);
    assert_int_equal(none.done, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(line_says_share_rate_and_time_left),
        cmocka_unit_test(resumed_work_does_not_count_in_the_rate),
        cmocka_unit_test(unknown_ends_and_rates_are_left_out),
        cmocka_unit_test(counts_and_times_are_short),
        cmocka_unit_test(plain_lines_are_few),
        cmocka_unit_test(terminal_line_is_redrawn_in_place),
        cmocka_unit_test(quiet_bar_does_nothing),
    };
    return cmocka_run_group_tests_name("progress", tests, NULL, NULL);
}
