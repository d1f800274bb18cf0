/* text.c - curves as characters: fine dots in a terminal that can show them, else letters.
 *
 * A cell of a Braille character holds 2 x 4 dots, so that 67 x 17 cells show 134 x 68. Letters tell
 * curves apart where colours cannot. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/plot/plot.h"

enum { COLUMNS = 67, ROWS = 17, DOTS_X = 2, DOTS_Y = 4 };

typedef struct canvas {
    unsigned char dots[ROWS][COLUMNS];
    int curve[ROWS][COLUMNS];                // the last one that passed here
    const mn_plot *plot;
    double x0, x1, y0, y1;                   // borders; y is its logarithm with --log
    bool log, log_x, braille, color;
} canvas;

static const int ansi[] = { 34, 33, 32, 35, 36, 31, 94, 90 };

static bool shows_braille(void) {
    static const char *const settings[] = { "LC_ALL", "LC_CTYPE", "LANG" };
    for (int i = 0; i < 3; i++) {
        const char *value = getenv(settings[i]);
        if (!value || !*value) continue;
        return strstr(value, "UTF-8") || strstr(value, "utf8") || strstr(value, "UTF8");
    }
    return false;
}

/* ---- points ---------------------------------------------------------------------------------- */

static double height_of(const canvas *c, double y) {
    return c->log ? log10(y) : y;            // NaN or -inf where there is no logarithm
}

static double place_of(const canvas *c, double x) {
    return c->log_x ? log10(x) : x;
}

static int dot_at(double value, double from, double to, int n) {
    const double part = to > from ? (value - from) / (to - from) : 0.5;
    const int dot = (int)floor(part * (double)(n - 1) + 0.5);
    return dot < 0 ? 0 : dot >= n ? n - 1 : dot;
}

static void set_dot(canvas *c, int x, int y, int curve) {
    static const unsigned char bit[DOTS_Y][DOTS_X] = {
        { 1, 8 }, { 2, 16 }, { 4, 32 }, { 64, 128 },
    };
    const int down = ROWS * DOTS_Y - 1 - y;
    c->dots[down / DOTS_Y][x / DOTS_X] |= bit[down % DOTS_Y][x % DOTS_X];
    c->curve[down / DOTS_Y][x / DOTS_X] = curve;
}

/* The polyline, dot by dot. */
static void trace(canvas *c, const mn_plot_line *line, int curve) {
    bool before = false;
    int x0 = 0, y0 = 0;
    for (int64_t i = 0; i < line->n; i++) {
        const double height = height_of(c, line->y[i]);
        if (!isfinite(height)) {
            before = false;
            continue;
        }
        const int x = dot_at(place_of(c, line->x[i]), c->x0, c->x1, COLUMNS * DOTS_X);
        const int y = dot_at(height, c->y0, c->y1, ROWS * DOTS_Y);
        const int far = before ? (int)fmax(abs(x - x0), abs(y - y0)) : 0;
        for (int step = 0; step < far; step++) {
            set_dot(c, x0 + (x - x0) * step / far, y0 + (y - y0) * step / far, curve);
        }
        set_dot(c, x, y, curve);
        before = true;
        x0 = x;
        y0 = y;
    }
}

/* Borders around all curves of the panel; false when it has no point to show. */
static bool frame(canvas *c, const mn_plot *plot, int panel) {
    c->x0 = c->y0 = INFINITY;
    c->x1 = c->y1 = -INFINITY;
    bool shown = false;
    for (int i = 0; i < plot->n_curves; i++) {
        const mn_plot_line *line = &plot->curves[i].mean;
        for (int64_t p = 0; p < line->n; p++) {          // all panels show the same stretch
            c->x0 = fmin(c->x0, place_of(c, line->x[p]));
            c->x1 = fmax(c->x1, place_of(c, line->x[p]));
        }
        if (plot->panel[plot->curves[i].key] != panel) continue;
        for (int64_t p = 0; p < line->n; p++) {
            const double height = height_of(c, line->y[p]);
            if (!isfinite(height)) continue;
            shown = true;
            c->y0 = fmin(c->y0, height);
            c->y1 = fmax(c->y1, height);
        }
    }
    return shown;
}

/* ---- output ---------------------------------------------------------------------------------- */

static void paint(const canvas *c, int curve, const char *text) {
    const size_t run = (size_t)c->plot->colour[c->plot->curves[curve].run];
    const size_t colour = c->plot->sweep ? run : (size_t)curve;
    if (c->color) printf("\033[%dm%s\033[0m", ansi[colour % MN_COUNTOF(ansi)], text);
    else fputs(text, stdout);
}

static void letter_of(char out[2], int curve) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    out[0] = letters[(size_t)curve % (sizeof letters - 1)];
    out[1] = '\0';
}

static void print_cell(const canvas *c, int row, int column) {
    char text[4];
    const unsigned char dots = c->dots[row][column];
    if (!dots) {
        putchar(' ');
        return;
    }
    if (c->braille) {                        // U+2800 + dots, in UTF-8
        text[0] = (char)0xE2;
        text[1] = (char)(0xA0 | dots >> 6);
        text[2] = (char)(0x80 | (dots & 0x3F));
        text[3] = '\0';
    } else {
        letter_of(text, c->curve[row][column]);
    }
    paint(c, c->curve[row][column], text);
}

static void print_row(const canvas *c, int row) {
    const bool labelled = row % (ROWS / 4) == 0;      // top, bottom and quarters between
    const double height = c->y1 - (c->y1 - c->y0) * row / (ROWS - 1);
    if (labelled) printf("%10.4g |", c->log ? pow(10.0, height) : height);
    else printf("%10s |", "");
    int last = COLUMNS - 1;
    while (last >= 0 && !c->dots[row][last]) last--;
    for (int column = 0; column <= last; column++) print_cell(c, row, column);
    putchar('\n');
}

static void print_axis(const canvas *c, const mn_plot *plot) {
    char from[32], to[32];
    const double low = c->log_x ? pow(10.0, c->x0) : c->x0;
    const double high = c->log_x ? pow(10.0, c->x1) : c->x1;
    const int n = snprintf(from, sizeof from, "%.6g", plot->x_scale * low);
    const int m = snprintf(to, sizeof to, "%.6g", plot->x_scale * high);
    const int most = COLUMNS - n - m - 2;
    const int room = COLUMNS - n - m - (int)strnlen(plot->x_label, (size_t)most), left = room / 2;
    printf("%10s +", "");
    for (int i = 0; i < COLUMNS; i++) putchar('-');
    printf("\n%10s  %s%*s%.*s%*s%s\n", "", from, left, "", most, plot->x_label, room - left, "",
           to);
}

static void print_panel(canvas *c, const mn_plot *plot, int panel) {
    int n_shown = 0;
    for (int i = 0; i < plot->n_curves; i++) n_shown += plot->panel[plot->curves[i].key] ==
        panel;
    c->braille = shows_braille() && (n_shown == 1 || c->color);
    for (int i = 0; i < plot->n_curves; i++) {
        const mn_plot_curve *curve = &plot->curves[i];
        if (plot->panel[curve->key] == panel) trace(c, &curve->mean, i);
    }
    for (int row = 0; row < ROWS; row++) print_row(c, row);
    print_axis(c, plot);
    for (int i = 0; i < plot->n_curves; i++) {
        const mn_plot_curve *curve = &plot->curves[i];
        if (plot->panel[curve->key] != panel) continue;
        char mark[4];
        letter_of(mark, i);
        printf("%12s", "");
        paint(c, i, c->braille ? "\xE2\xA0\x92" : mark);
        printf("  %s  %s  (last %.4g", plot->names[curve->run], plot->keys[curve->key],
               curve->mean.y[curve->mean.n - 1]);
        if (curve->banded) printf(" \xC2\xB1 %.2g", curve->half[curve->mean.n - 1]);
        puts(")");
    }
}

mn_status mn_plot_print(const mn_plot *plot) {
    const char *plain = getenv("NO_COLOR");
    const bool color = isatty(STDOUT_FILENO) && !(plain && *plain);
    for (int panel = 0; panel < plot->n_panels; panel++) {
        canvas c = { .log = plot->log, .log_x = plot->log_x, .plot = plot, .color = color };
        if (panel > 0) putchar('\n');
        if (frame(&c, plot, panel)) print_panel(&c, plot, panel);
        else puts("(nothing to draw: no number above 0)");
    }
    if (fflush(stdout) == 0) return MN_OK;
    return mn_fail(MN_ERR_IO, "standard output: cannot write");
}
