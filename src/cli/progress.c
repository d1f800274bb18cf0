/* progress.c - how far a long command is: a bar on a terminal, plain lines when piped.
 *
 * rate = units since the start / seconds since the start, time left = units left / rate. */
#include "cli/progress.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/util.h"

enum { BAR_CELLS = 24, LINE_BYTES = 320 };

static const double redraw_seconds = 0.1, tenth_seconds = 1.0, line_seconds = 10.0;

/* A count in at most five characters and a suffix; below 10000 as it is. */
static void put_count(char *out, size_t size, double count) {
    static const char suffix[] = "kMGTP";
    size_t i = 0;
    for (; i < strlen(suffix) && count >= (i == 0 ? 9999.5 : 999.5); i++) count /= 1000.0;
    const bool whole = count >= 99.95 || (i == 0 && count == (double)(int64_t)count);
    snprintf(out, size, "%.*f%.1s", whole ? 0 : 1, count, i == 0 ? "" : suffix + i - 1);
}

/* The same for bytes, with their unit. */
static void put_bytes(char *out, size_t size, double bytes) {
    static const char *const unit[] = { "B", "kB", "MB", "GB", "TB", "PB" };
    size_t i = 0;
    for (; bytes >= 999.5 && i + 1 < MN_COUNTOF(unit); i++) bytes /= 1000.0;
    snprintf(out, size, "%.*f %s", i > 0 && bytes < 99.95 ? 1 : 0, bytes, unit[i]);
}

/* 0:07, 12:34, 5:06:07, 3 d 4:05:06 */
static void put_time(char *out, size_t size, double seconds) {
    const int64_t s = (int64_t)(seconds + 0.5);
    const int minutes = (int)(s / 60 % 60), rest = (int)(s % 60), hours = (int)(s / 3600 % 24);
    if (s >= 86400) {
        snprintf(out, size, "%" PRId64 " d %d:%02d:%02d", s / 86400, hours, minutes, rest);
    } else if (s >= 3600) {
        snprintf(out, size, "%d:%02d:%02d", hours, minutes, rest);
    } else {
        snprintf(out, size, "%d:%02d", minutes, rest);
    }
}

static double rate_of(const mn_progress *bar, double now) {
    const double seconds = now - bar->started;
    return seconds > 0 ? (double)(bar->done - bar->first) / seconds : 0;
}

static double share_of(const mn_progress *bar) {
    if (bar->all <= 0) return 0;
    const double share = (double)bar->done / (double)bar->all;
    return share < 0 ? 0 : share > 1 ? 1 : share;
}

/* "1.2M of 3.4M tokens" or "1.2 MB of 3.4 MB" */
static void put_amount(char *out, size_t size, const mn_progress *bar, bool both) {
    const bool bytes = strcmp(bar->unit, "bytes") == 0;
    char done[32], all[32];
    (bytes ? put_bytes : put_count)(done, sizeof done, (double)bar->done);
    (bytes ? put_bytes : put_count)(all, sizeof all, (double)bar->all);
    snprintf(out, size, "%s%s%s%s%s", done, both ? " of " : "", both ? all : "",
             bytes ? "" : " ", bytes ? "" : bar->unit);
}

static void put_rate(char *out, size_t size, const mn_progress *bar, double now) {
    const bool bytes = strcmp(bar->unit, "bytes") == 0;
    char rate[32];
    (bytes ? put_bytes : put_count)(rate, sizeof rate, rate_of(bar, now));
    snprintf(out, size, "%s%s%s/s", rate, bytes ? "" : " ", bytes ? "" : bar->unit);
}

void mn_progress_text(char *out, size_t size, const mn_progress *bar, double now, bool finished) {
    char amount[80], rate[64] = "", left[48] = "", cells[BAR_CELLS + 8] = "";
    const double share = share_of(bar), per_second = rate_of(bar, now);
    put_amount(amount, sizeof amount, bar, bar->all > 0 && !finished);
    if (per_second > 0) put_rate(rate, sizeof rate, bar, now);
    if (finished) {
        put_time(left, sizeof left, now - bar->started);
    } else if (per_second > 0 && bar->all > bar->done) {
        put_time(left, sizeof left, (double)(bar->all - bar->done) / per_second);
    }
    if (bar->all > 0 && bar->terminal && !finished) {
        const int full = (int)(share * BAR_CELLS);
        cells[0] = '[';
        for (int i = 0; i < BAR_CELLS; i++) cells[1 + i] = i < full ? '#' : '-';
        strcpy(cells + 1 + BAR_CELLS, "] ");
    }
    char percent[16] = "";
    if (bar->all > 0 && !finished) {
        snprintf(percent, sizeof percent, "%*d %%, ", bar->terminal ? 3 : 1,
                 (int)(share * 100));
    }
    snprintf(out, size, "%s: %s%s%s%s%s%s%s%s%s%s", bar->title, cells, percent, amount,
             *left && finished ? " in " : "", finished ? left : "", *rate ? ", " : "", rate,
             *left && !finished ? ", " : "", finished ? "" : left,
             *left && !finished ? " left" : "");
    const size_t n = strlen(out);
    if (*bar->extra && n < size) snprintf(out + n, size - n, ", %s", bar->extra);
}

/* On a narrow terminal the extra, such as a loss, stays: "training:  12 %, 3:08 left, loss 1.23" */
static void put_narrow(char *text, size_t size, const mn_progress *bar, double now) {
    char left[48] = "", percent[16] = "";
    const double per_second = rate_of(bar, now);
    if (per_second > 0 && bar->all > bar->done) {
        put_time(left, sizeof left, (double)(bar->all - bar->done) / per_second);
    }
    if (bar->all > 0) snprintf(percent, sizeof percent, " %3d %%,", (int)(share_of(bar) * 100));
    snprintf(text, size, "%s:%s%s%s%s %s", bar->title, percent, *left ? " " : "", left,
             *left ? " left," : "", bar->extra);
}

/* The line on the terminal, cut to its width; bar cells in green. */
static void draw(mn_progress *bar, double now) {
    char text[LINE_BYTES];
    mn_progress_text(text, sizeof text, bar, now, false);
    const bool wide = bar->columns > 1 && strlen(text) >= (size_t)bar->columns;
    if (wide && *bar->extra) put_narrow(text, sizeof text, bar, now);
    if (bar->columns > 1 && strlen(text) >= (size_t)bar->columns) text[bar->columns - 1] = '\0';
    char *open = strchr(text, '['), *close = open ? strchr(open, ']') : NULL;
    if (bar->colour && close) {
        const size_t full = strspn(open + 1, "#");
        fprintf(bar->out, "\r\033[K%.*s\033[32m%.*s\033[0m%s", (int)(open + 1 - text), text,
                (int)full, open + 1, open + 1 + full);
    } else {
        fprintf(bar->out, "\r\033[K%s", text);
    }
    fflush(bar->out);
    bar->drawn = true;
}

static void print_line(mn_progress *bar, double now, bool finished) {
    char text[LINE_BYTES];
    mn_progress_text(text, sizeof text, bar, now, finished);
    mn_progress_clear(bar);
    fprintf(bar->out, "%s\n", text);
    fflush(bar->out);
}

static void look_at_terminal(mn_progress *bar) {
    const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR");
    struct winsize window = { 0 };
    bar->terminal = isatty(fileno(bar->out)) && term && strcmp(term, "dumb") != 0;
    bar->colour = bar->terminal && !(no_color && *no_color);
    if (bar->terminal && ioctl(fileno(bar->out), TIOCGWINSZ, &window) == 0) {
        bar->columns = window.ws_col;
    }
}

void mn_progress_start(mn_progress *bar, const char *title, const char *unit, int64_t done,
                       int64_t all, bool quiet) {
    *bar = (mn_progress){ .title = title, .unit = unit, .first = done, .done = done, .all = all };
    if (quiet) return;
    bar->out = stderr;
    bar->shown = done;
    bar->started = bar->shown_at = mn_seconds();
    look_at_terminal(bar);
    if (bar->terminal) draw(bar, bar->started);
}

void mn_progress_update(mn_progress *bar, int64_t done, const char *extra) {
    if (!bar->out) return;
    bar->done = done;
    const double now = mn_seconds(), since = now - bar->shown_at;
    const bool tenth = bar->all > done && since >= tenth_seconds &&
                       (double)(done - bar->shown) >= (double)bar->all / 10.0;
    if (bar->terminal ? since < redraw_seconds && bar->drawn : since < line_seconds && !tenth) {
        return;
    }
    snprintf(bar->extra, sizeof bar->extra, "%s", extra ? extra : "");
    if (bar->terminal) draw(bar, now);
    else print_line(bar, now, false);
    bar->shown_at = now;
    bar->shown = done;
}

void mn_progress_clear(mn_progress *bar) {
    if (!bar->drawn) return;
    fputs("\r\033[K", bar->out);
    fflush(bar->out);
    bar->drawn = false;
}

void mn_progress_finish(mn_progress *bar, const char *extra) {
    if (!bar->out) return;
    snprintf(bar->extra, sizeof bar->extra, "%s", extra ? extra : "");
    print_line(bar, mn_seconds(), true);
    bar->out = NULL;
}
