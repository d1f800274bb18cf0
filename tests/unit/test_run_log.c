/* test_run_log.c - metrics.jsonl and event files: read back by a second reader of frames and
 * messages, cut at resume, refused when broken. */
// labels: sanitize
#define _XOPEN_SOURCE 700       // truncate under -std=c11
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <glob.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/util.h"
#include "io/crc32c.h"
#include "io/file.h"
#include "support/check.h"
#include "support/folder.h"
#include "train/run/event_file.h"
#include "train/run/run_log.h"
#include "train/run/run_read.h"

/* A fresh folder of the given name. */
static const char *new_folder(const char *name) {
    const char *path = in_folder(name);
    assert_int_equal(mkdir(path, 0777), 0);
    return path;
}

static const char *metrics_of(const char *folder) {
    static char path[600];
    snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
    return path;
}

static void assert_text(const char *path, const char *text) {
    mn_file file;
    assert_int_equal(mn_file_map(&file, path), MN_OK);
    if (file.size != strlen(text) || memcmp(file.bytes, text, file.size) != 0) {
        fail_msg("%s is \"%.*s\", not \"%s\"", path, (int)file.size, (const char *)file.bytes,
                 text);
    }
    mn_file_unmap(&file);
}

static void forget(const char *folder, const char *events) {
    unlink(metrics_of(folder));
    if (events) unlink(events);
    assert_int_equal(rmdir(folder), 0);
}

/* ---- checksum -------------------------------------------------------------------------------- */

static void checksums_are_those_published(void **state) {
    (void)state;
    uint8_t bytes[32];                                     // RFC 3720, B.4
    memset(bytes, 0, sizeof bytes);
    assert_int_equal(mn_crc32c(bytes, 32), 0x8A9136AA);
    memset(bytes, 0xFF, sizeof bytes);
    assert_int_equal(mn_crc32c(bytes, 32), 0x62A8AB43);
    for (int i = 0; i < 32; i++) bytes[i] = (uint8_t)i;
    assert_int_equal(mn_crc32c(bytes, 32), 0x46DD794E);
    for (int i = 0; i < 32; i++) bytes[i] = (uint8_t)(31 - i);
    assert_int_equal(mn_crc32c(bytes, 32), 0x113FDB5C);
    assert_int_equal(mn_crc32c("123456789", 9), 0xE3069283);
    assert_int_equal(mn_crc32c("", 0), 0);
    const uint8_t length[8] = { 24 };                      // how every event file begins
    assert_int_equal(mn_crc32c_masked(length, 8), 0x224B7FA3);
}

/* ---- a second reader of event files ---------------------------------------------------------- */

typedef struct view {
    const uint8_t *at, *end;
} view;

static uint64_t little(view *in, int n) {
    uint64_t value = 0;
    if (in->end - in->at < n) check_fatal("a record is cut short");
    for (int i = n - 1; i >= 0; i--) value = value << 8 | in->at[i];
    in->at += n;
    return value;
}

static uint64_t varint(view *in) {
    uint64_t value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
        const uint64_t byte = little(in, 1);
        value |= (byte & 0x7F) << shift;
        if (byte < 0x80) return value;
    }
    check_fatal("a varint without end");
}

static view block(view *in, uint64_t n) {
    if ((uint64_t)(in->end - in->at) < n) check_fatal("a field is cut short");
    const view out = { in->at, in->at + n };
    in->at += n;
    return out;
}

/* What one event says. */
typedef struct event {
    double wall_time;
    int64_t step, n_values, session;
    char version[32], tags[8][32];
    float values[8];
} event;

static void keep_text(char out[32], view text) {
    const size_t n = (size_t)(text.end - text.at);
    assert_true(n < 32);
    memcpy(out, text.at, n);
    out[n] = '\0';
}

static void read_value(event *out, view in) {
    assert_true(out->n_values < 8);
    while (in.at < in.end) {
        const uint64_t key = varint(&in);
        if (key == (1 << 3 | 2)) {
            keep_text(out->tags[out->n_values], block(&in, varint(&in)));
        } else if (key == (2 << 3 | 5)) {
            const uint32_t bits = (uint32_t)little(&in, 4);
            memcpy(&out->values[out->n_values], &bits, sizeof bits);
        } else {
            check_fatal("a Value has field key %d", (int)key);
        }
    }
    out->n_values++;
}

static event read_event(view in) {
    event out = { .session = -1 };
    while (in.at < in.end) {
        const uint64_t key = varint(&in);
        if (key == (1 << 3 | 1)) {
            const uint64_t bits = little(&in, 8);
            memcpy(&out.wall_time, &bits, sizeof bits);
        } else if (key == (2 << 3 | 0)) {
            out.step = (int64_t)varint(&in);
        } else if (key == (3 << 3 | 2)) {
            keep_text(out.version, block(&in, varint(&in)));
        } else if (key == (5 << 3 | 2)) {
            view summary = block(&in, varint(&in));
            while (summary.at < summary.end) {
                assert_int_equal(varint(&summary), 1 << 3 | 2);
                read_value(&out, block(&summary, varint(&summary)));
            }
        } else if (key == (7 << 3 | 2)) {
            view session = block(&in, varint(&in));
            assert_int_equal(varint(&session), 1 << 3 | 0);
            out.session = (int64_t)varint(&session);
            assert_ptr_equal(session.at, session.end);
        } else {
            check_fatal("an Event has field key %d", (int)key);
        }
    }
    return out;
}

/* CRC-32C as a remainder of polynomials over bits, highest power first, bits of a byte from the
 * lowest: the definition, sharing nothing with crc32c.c. */
static uint32_t remainder_of(view in) {
    uint64_t rest = 0;
    const int64_t n_bits = 8 * (in.end - in.at);
    for (int64_t i = 0; i < n_bits + 32; i++) {
        uint64_t bit = i < n_bits ? in.at[i / 8] >> i % 8 & 1 : 0;
        if (i < 32) bit ^= 1;                              // starts from all ones
        rest = rest << 1 | bit;
        if (rest >> 32) rest ^= UINT64_C(0x11EDC6F41);
    }
    uint32_t out = 0;
    for (int i = 0; i < 32; i++) out |= (uint32_t)(rest >> i & 1) << (31 - i);
    return ~out;
}

static uint32_t unmask(uint64_t masked) {
    const uint32_t turned = (uint32_t)masked - 0xA282EAD8u;
    return turned >> 17 | turned << 15;
}

/* All events of the file; returns how many. */
static int64_t read_events(event *out, int64_t most, const char *path) {
    mn_file file;
    assert_int_equal(mn_file_map(&file, path), MN_OK);
    view in = { file.bytes, file.bytes + file.size };
    int64_t n = 0;
    for (; in.at < in.end; n++) {
        assert_true(n < most);
        view head = { in.at, in.at + 8 };
        const uint64_t length = little(&in, 8);
        assert_int_equal(unmask(little(&in, 4)), remainder_of(head));
        const view message = block(&in, length);
        assert_int_equal(unmask(little(&in, 4)), remainder_of(message));
        out[n] = read_event(message);
    }
    mn_file_unmap(&file);
    return n;
}

static void events_read_back(void **state) {
    (void)state;
    mn_event_file *file;
    event events[16];
    char path[600];
    const double before = (double)time(NULL);
    assert_int_equal(mn_event_file_create(&file, in_folder(""), MN_RUN_NEW), MN_OK);
    snprintf(path, sizeof path, "%s", mn_event_file_path(file));
    const mn_run_value first[] = { { "loss", 2.5 }, { "lr", 1e-3 }, { "grad_norm", NAN } };
    const mn_run_value second[] = { { "loss", -0.0 }, { "tokens", 1e12 } };
    assert_int_equal(mn_event_file_write(file, 0, first, 3), MN_OK);
    assert_int_equal(mn_event_file_write(file, 300, second, 2), MN_OK);
    assert_int_equal(mn_event_file_write(file, INT64_MAX, second, 0), MN_OK);
    assert_int_equal(read_events(events, 16, path), 4);    // before it is closed
    assert_int_equal(mn_event_file_close(file), MN_OK);

    assert_string_equal(events[0].version, "brain.Event:2");
    assert_int_equal(events[0].n_values, 0);
    for (int i = 0; i < 4; i++) assert_true(events[i].wall_time >= before);
    assert_true(events[3].wall_time < before + 600.0);
    assert_int_equal(events[1].step, 0);
    assert_int_equal(events[1].n_values, 3);
    assert_string_equal(events[1].tags[0], "loss");
    assert_string_equal(events[1].tags[1], "lr");
    assert_string_equal(events[1].tags[2], "grad_norm");
    assert_true(events[1].values[0] == 2.5f && events[1].values[1] == 1e-3f);
    assert_true(isnan(events[1].values[2]));
    assert_int_equal(events[2].step, 300);
    assert_true(events[2].values[0] == 0.0f && signbit(events[2].values[0]));
    assert_true(events[2].values[1] == 1e12f);
    assert_int_equal(events[3].step, INT64_MAX);
    for (int i = 0; i < 4; i++) assert_int_equal(events[i].session, -1);

    static const char start[] = "events.out.tfevents.";
    const char *name = strrchr(path, '/') + 1;
    char *host;
    assert_memory_equal(name, start, strlen(start));
    const double made = (double)strtoll(name + strlen(start), &host, 10);
    assert_true(made >= before && made < before + 600.0);
    assert_true(host[0] == '.' && host[1] != '\0');
    unlink(path);
}

static void resumed_events_void_later_ones(void **state) {
    (void)state;
    mn_event_file *file[3];
    event events[4];
    for (int i = 0; i < 3; i++) {                          // in one second, all under other names
        assert_int_equal(mn_event_file_create(&file[i], in_folder(""), 40), MN_OK);
        assert_int_equal(read_events(events, 4, mn_event_file_path(file[i])), 2);
        assert_int_equal(events[1].step, 41);
        assert_int_equal(events[1].session, 1);
    }
    assert_int_equal(files_in_folder(), 3);
    for (int i = 0; i < 3; i++) {
        unlink(mn_event_file_path(file[i]));
        assert_int_equal(mn_event_file_close(file[i]), MN_OK);
    }
    assert_fails(mn_event_file_create(&file[0], in_folder("absent"), 0), MN_ERR_IO, "absent",
                 "No such file");
    assert_null(file[0]);
}

/* ---- metrics.jsonl --------------------------------------------------------------------------- */

/* Writes steps [from, to], a training line each and a validation line at even ones. */
static void write_steps(mn_run_log *log, int64_t from, int64_t to, double loss) {
    for (int64_t step = from; step <= to; step++) {
        const mn_run_value train[] = { { "loss", loss + (double)step / 8.0 },
                                       { "tokens", 1e15 * (double)step } };
        const mn_run_value valid[] = { { "valid_loss", 1.0 / 3.0 } };
        assert_int_equal(mn_run_log_write(log, step, train, 2), MN_OK);
        if (step % 2 == 0) assert_int_equal(mn_run_log_write(log, step, valid, 1), MN_OK);
    }
}

static void lines_are_there_at_once(void **state) {
    (void)state;
    const char *folder = new_folder("run");
    mn_run_log *log;
    assert_int_equal(mn_run_log_open(&log, folder, MN_RUN_NEW, false), MN_OK);
    assert_text(metrics_of(folder), "");
    write_steps(log, 1, 2, 4.0);
    assert_text(metrics_of(folder),
                "{\"step\":1,\"loss\":4.125,\"tokens\":1000000000000000}\n"
                "{\"step\":2,\"loss\":4.25,\"tokens\":2000000000000000}\n"
                "{\"step\":2,\"valid_loss\":0.3333333333333333}\n");
    const mn_run_value odd[] = { { "loss", NAN }, { "lr", INFINITY }, { "a\n\"b", 1e-300 } };
    assert_int_equal(mn_run_log_write(log, 3, odd, 3), MN_OK);
    assert_fails(mn_run_log_write(log, 2, odd, 1), MN_ERR_ARGUMENT, "step 2", "step 3");
    const mn_run_value twice[] = { { "loss", 1.0 }, { "loss", 2.0 } };
    assert_fails(mn_run_log_write(log, 4, twice, 2), MN_ERR_ARGUMENT, "loss", "twice");
    assert_int_equal(mn_run_log_close(log), MN_OK);
    mn_file file;
    assert_int_equal(mn_file_map(&file, metrics_of(folder)), MN_OK);
    const char last[] = "{\"step\":3,\"loss\":null,\"lr\":null,\"a\\n\\\"b\":1e-300}\n";
    assert_true(file.size > strlen(last));
    assert_memory_equal(file.bytes + file.size - strlen(last), last, strlen(last));
    mn_file_unmap(&file);

    assert_fails(mn_run_log_open(&log, folder, MN_RUN_NEW, false), MN_ERR_ARGUMENT, "another run",
                 "metrics.jsonl");
    assert_null(log);
    assert_int_equal(mn_run_log_close(NULL), MN_OK);
    forget(folder, NULL);
    assert_fails(mn_run_log_open(&log, folder, MN_RUN_NEW, false), MN_ERR_IO, "run/metrics.jsonl",
                 "No such file");
}

static void a_resumed_run_repeats_no_line(void **state) {
    (void)state;
    const char *folder = new_folder("resumed");
    mn_run_log *log;
    mn_file whole;
    assert_int_equal(mn_run_log_open(&log, folder, MN_RUN_NEW, false), MN_OK);
    write_steps(log, 1, 9, 4.0);
    assert_int_equal(mn_run_log_close(log), MN_OK);
    assert_int_equal(mn_file_map(&whole, metrics_of(folder)), MN_OK);
    char *want = calloc(whole.size + 1, 1);
    memcpy(want, whole.bytes, whole.size);
    mn_file_unmap(&whole);
    for (int64_t at = 0; at <= 9; at++) {
        /* Cut somewhere behind step `at`, inside a line: what a killed run leaves. */
        char start[32];
        snprintf(start, sizeof start, "{\"step\":%d,", (int)at + 1);
        char *const later = strstr(want, start);
        write_file(metrics_of(folder), want, later ? (size_t)(later - want) + 9 : strlen(want));
        assert_int_equal(mn_run_log_open(&log, folder, at, false), MN_OK);
        write_steps(log, at + 1, 9, 4.0);
        assert_int_equal(mn_run_log_close(log), MN_OK);
        assert_text(metrics_of(folder), want);
        /* And with all nine steps still there. */
        assert_int_equal(mn_run_log_open(&log, folder, at, false), MN_OK);
        write_steps(log, at + 1, 9, 4.0);
        assert_int_equal(mn_run_log_close(log), MN_OK);
        assert_text(metrics_of(folder), want);
    }
    free(want);
    forget(folder, NULL);
}

static void broken_metrics_stay_as_they_are(void **state) {
    (void)state;
    static const struct {
        const char *text, *piece;
    } broken[] = {
        { "{\"step\":1}\nnonsense\n{\"step\":2}\n", "line 2" },
        { "{\"step\":1}\n\n{\"loss\":2}\n", "line 3" },
        { "{\"step\":\"one\"}\n", "whole number" },
        { "[1]\n", "object" },
        { "{\"step\":1,\"step\":2}\n", "duplicate" },
    };
    const char *folder = new_folder("broken");
    mn_run_log *log;
    mn_run_table table;
    for (size_t i = 0; i < MN_COUNTOF(broken); i++) {
        write_file(metrics_of(folder), broken[i].text, strlen(broken[i].text));
        assert_fails(mn_run_log_open(&log, folder, 5, false), MN_ERR_FORMAT, "broken/metrics.jsonl",
                     broken[i].piece);
        assert_text(metrics_of(folder), broken[i].text);
        assert_fails(mn_run_table_load(&table, metrics_of(folder)), MN_ERR_FORMAT,
                     "broken/metrics.jsonl", broken[i].piece);
        assert_null(table.values);
    }
    forget(folder, NULL);
}

static void both_logs_tell_the_same(void **state) {
    (void)state;
    const char *folder = new_folder("both");
    char path[600];
    mn_run_log *log;
    event events[16];
    assert_int_equal(mn_run_log_open(&log, folder, 4, true), MN_OK);
    write_steps(log, 5, 6, 1.0);
    assert_int_equal(mn_run_log_close(log), MN_OK);
    glob_t found;
    char pattern[700];
    snprintf(pattern, sizeof pattern, "%s/events.out.tfevents.*", folder);
    assert_int_equal(glob(pattern, 0, NULL, &found), 0);
    assert_int_equal(found.gl_pathc, 1);
    snprintf(path, sizeof path, "%s", found.gl_pathv[0]);
    globfree(&found);
    assert_int_equal(read_events(events, 16, path), 5);
    assert_int_equal(events[1].session, 1);
    assert_int_equal(events[1].step, 5);
    assert_int_equal(events[2].step, 5);
    assert_true(events[2].values[0] == 1.625f);
    assert_string_equal(events[4].tags[0], "valid_loss");
    assert_true(events[4].values[0] == (float)(1.0 / 3.0));
    assert_text(metrics_of(folder), "{\"step\":5,\"loss\":1.625,\"tokens\":5000000000000000}\n"
                                    "{\"step\":6,\"loss\":1.75,\"tokens\":6000000000000000}\n"
                                    "{\"step\":6,\"valid_loss\":0.3333333333333333}\n");
    forget(folder, path);
}

static void columns_are_gathered(void **state) {
    (void)state;
    const char text[] = "{\"step\": 1, \"loss\": 2.5, \"note\": \"warm\"}\n \n"
                        "{\"step\": 2, \"valid_loss\": 3}\n"
                        "{\"step\": 3, \"loss\": NaN, \"valid_loss\": null}\n"
                        "{\"step\": 4, \"loss\": 1e-3}\n"
                        "{\"step\": 5, \"lo";
    mn_run_table table;
    assert_int_equal(mn_run_table_parse(&table, text, strlen(text), "text"), MN_OK);
    assert_int_equal(table.n_rows, 4);
    assert_int_equal(table.n_columns, 3);
    const double *loss = mn_run_table_column(&table, "loss");
    const double *valid = mn_run_table_column(&table, "valid_loss");
    const double *step = mn_run_table_column(&table, "step");
    assert_null(mn_run_table_column(&table, "note"));
    assert_true(loss[0] == 2.5 && isnan(loss[1]) && isnan(loss[2]) && loss[3] == 1e-3);
    assert_true(isnan(valid[0]) && valid[1] == 3.0 && isnan(valid[2]) && isnan(valid[3]));
    for (int i = 0; i < 4; i++) assert_true(step[i] == i + 1.0);
    mn_run_table_free(&table);
    assert_int_equal(mn_run_table_parse(&table, "", 0, "text"), MN_OK);
    assert_int_equal(table.n_rows, 0);
    mn_run_table_free(&table);
    mn_run_table_free(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(checksums_are_those_published),
        cmocka_unit_test(events_read_back),
        cmocka_unit_test(resumed_events_void_later_ones),
        cmocka_unit_test(lines_are_there_at_once),
        cmocka_unit_test(a_resumed_run_repeats_no_line),
        cmocka_unit_test(broken_metrics_stay_as_they_are),
        cmocka_unit_test(both_logs_tell_the_same),
        cmocka_unit_test(columns_are_gathered),
    };
    return cmocka_run_group_tests_name("run_log", tests, make_folder, remove_folder);
}
