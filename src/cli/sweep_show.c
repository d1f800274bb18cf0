/* sweep_show.c - what a user sees of a sweep: on a terminal a table that is redrawn, else lines. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/util.h"
#include "cli/plot/gnuplot.h"
#include "cli/sweep.h"

enum { MOST_ROWS = 24, TITLE = 200 };

static volatile sig_atomic_t stop_asked;

static void ask_stop(int number) {
    (void)number;
    stop_asked = 1;
}

void mn_sweep_stop_after(int minutes) {
    struct sigaction stop = { .sa_handler = ask_stop };
    sigaction(SIGALRM, &stop, NULL);
    alarm(60u * (unsigned)minutes);
}

typedef struct show {
    bool terminal, quiet;
    int rows, columns;           // rows: drawn, above the cursor
    double started, drawn_at;
} show;

/* "1:05" or "2:03:00" */
static void put_time(char *text, size_t size, double seconds) {
    const int64_t s = (int64_t)(seconds + 0.5);
    if (!(seconds >= 0.0 && seconds < 3.6e7)) snprintf(text, size, "-");
    else if (s < 3600) snprintf(text, size, "%" PRId64 ":%02d", s / 60, (int)(s % 60));
    else snprintf(text, size, "%" PRId64 ":%02d:%02d", s / 3600, (int)(s / 60 % 60), (int)(s % 60));
}

static void clear(show *s) {
    if (s->rows > 0) fprintf(stderr, "\033[%dA\033[J", s->rows);
    s->rows = 0;
}

static void put_line(show *s, const char *text) {
    fprintf(stderr, "%.*s\n", s->columns > 0 ? s->columns - 1 : 200, text);
    s->rows++;
}

static double left_of(const mn_sweep_lane *lane, double now) {
    if (lane->now.step <= 0) return NAN;
    return (now - lane->started) * (double)(lane->now.steps - lane->now.step) /
           (double)lane->now.step;
}

static void put_lane(show *s, const mn_sweep_lane *lane, double now) {
    char title[TITLE], left[24], score[16] = "-", line[2 * TITLE];
    mn_job_title(title, sizeof title, lane->job);
    put_time(left, sizeof left, left_of(lane, now));
    if (!isnan(lane->now.score)) snprintf(score, sizeof score, "%.1f %%", 100.0 * lane->now.score);
    snprintf(line, sizeof line, "  %-44.44s %9" PRId64 "/%-9" PRId64 " loss %-8.4f %8s  %s", title,
             lane->now.step, lane->now.steps, lane->now.loss, score, left);
    put_line(s, line);
}

static void draw(show *s, const mn_sweep_state *state) {
    const double now = mn_seconds();
    char spent[24], left[24], line[TITLE];
    struct winsize size = { 0 };
    s->columns = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
    clear(s);
    const int64_t here = state->done + state->failed - state->found;
    const int64_t to_do = state->jobs - state->done - state->failed;
    put_time(spent, sizeof spent, now - s->started);
    put_time(left, sizeof left, here > 0 ? (now - s->started) * (double)to_do / (double)here : NAN);
    snprintf(line, sizeof line, "%" PRId64 " of %" PRId64 " jobs done%s, %" PRId64 " failed; %s "
             "spent, about %s left%s", state->done, state->jobs,
             state->found > 0 ? " (some before)" : "", state->failed, spent, left,
             stop_asked ? "; stopping" : "");
    put_line(s, line);
    for (int i = 0; i < mn_min(state->n_lanes, MOST_ROWS); i++) {
        if (state->lanes[i].job) put_lane(s, &state->lanes[i], now);
    }
    s->drawn_at = now;
}

static void put_ended(show *s, const mn_sweep_state *state) {
    char title[TITLE], score[48] = "";
    const json_t *record = state->ended, *result = json_object_get(record, "result");
    mn_job_title(title, sizeof title, json_object_get(record, "job"));
    const json_t *value = json_object_get(result, "score");
    if (json_is_number(value)) {
        snprintf(score, sizeof score, "score %.4f, ", json_number_value(value));
    }
    clear(s);
    const char *error = json_string_value(json_object_get(record, "error"));
    const double seconds = json_number_value(json_object_get(record, "seconds"));
    if (error) fprintf(stderr, "failed: %s: %s\n", title, error);
    else if (!s->quiet) {
        fprintf(stderr, "%" PRId64 "/%" PRId64 "  %s: %s%.1f s\n", state->done, state->jobs, title,
                score, seconds);
    }
}

static void tell(void *context, const mn_sweep_state *state) {
    show *s = context;
    if (state->ended) put_ended(s, state);
    if (!s->terminal || s->quiet) return;
    if (state->ended || mn_seconds() - s->drawn_at > 0.2) draw(s, state);
}

int mn_sweep_show(const char *verb, const char *folder, const json_t *jobs, int processes,
                  const char *device, int shard, int shards, bool quiet) {
    char path[MN_SWEEP_PATH], name[64] = "results.jsonl";
    mn_sweep_state *state = calloc(1, sizeof *state);
    show s = { .terminal = isatty(STDERR_FILENO) != 0, .quiet = quiet, .started = mn_seconds() };
    const mn_sweep_options how = { .path = path, .processes = processes, .device = device,
                                   .shard = shard, .shards = shards, .stop = &stop_asked,
                                   .tell = tell, .context = &s };
    if (shards > 0) snprintf(name, sizeof name, "results-%d-of-%d.jsonl", shard, shards);
    struct sigaction stop = { .sa_handler = ask_stop, .sa_flags = (int)SA_RESETHAND };
    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGTERM, &stop, NULL);
    mn_status st = state ? mn_make_folder(folder) : MN_ERR_MEMORY;
    if (st == MN_OK && snprintf(path, sizeof path, "%s/%s", folder, name) >= MN_SWEEP_PATH) {
        fprintf(stderr, "mneme %s: %s: the path is too long\n", verb, folder);
        free(state);
        return 1;
    }
    if (st == MN_OK) st = mn_sweep_run(state, jobs, &how);
    clear(&s);
    if (st != MN_OK) fprintf(stderr, "mneme %s: %s\n", verb, mn_last_error());
    int status = st == MN_OK && state->failed == 0 ? 0 : 1;
    if (st == MN_OK && stop_asked) {
        fprintf(stderr, "stopped with %" PRId64 " of %" PRId64 " jobs done; the same command goes "
                "on\n", state->done, state->jobs);
        status = 130;
    } else if (st == MN_OK && state->failed > 0) {
        fprintf(stderr, "mneme %s: %" PRId64 " of %" PRId64 " jobs failed; %s says why\n", verb,
                state->failed, state->jobs, path);
    }
    free(state);
    return status;
}
