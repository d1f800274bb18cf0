/* show.c - tokens on the terminal, coloured by how sure the model's memory was.
 *
 * A variance has no scale of its own: its colour is its rank among the variances so far. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/generate/generate.h"

/* From certain to uncertain: blue, white, orange; people who do not tell red from green do tell
 * these. */
static const struct {
    int r, g, b, cube;
} colours[MN_SHADES] = {
    { 130, 185, 255, 111 }, { 165, 205, 255, 153 }, { 200, 222, 250, 189 }, { 232, 238, 242, 255 },
    { 250, 236, 215, 230 }, { 255, 214, 165, 223 }, { 255, 184, 112, 216 }, { 255, 148, 64, 209 },
};

mn_show_mode mn_show_choose(bool belief, bool json) {
    if (json) return MN_SHOW_NOTHING;
    if (!belief) return MN_SHOW_TEXT;
    const char *no_color = getenv("NO_COLOR");
    return isatty(STDOUT_FILENO) && !(no_color && *no_color) ? MN_SHOW_COLOURS : MN_SHOW_LINES;
}

void mn_show_start(mn_show *show, mn_show_mode mode) {
    const char *term = getenv("COLORTERM");
    *show = (mn_show){ .mode = mode };
    show->truecolor = term && (strcmp(term, "truecolor") == 0 || strcmp(term, "24bit") == 0);
}

void mn_show_free(mn_show *show) {
    free(show->sorted);
    *show = (mn_show){ 0 };
}

/* How many of the variances so far are below `variance`, or not above it. */
static int64_t count_below(const mn_show *show, double variance, bool or_equal) {
    int64_t low = 0, high = show->n;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        const double v = show->sorted[middle];
        if (v < variance || (or_equal && v == variance)) low = middle + 1;
        else high = middle;
    }
    return low;
}

mn_status mn_show_note(mn_show *show, double variance) {
    if (show->mode != MN_SHOW_COLOURS || isnan(variance)) return MN_OK;
    if (show->n == show->capacity) {
        const int64_t capacity = show->capacity ? 2 * show->capacity : 256;
        double *grown = realloc(show->sorted, (size_t)capacity * sizeof *grown);
        if (!grown) return mn_fail(MN_ERR_MEMORY, "no memory for the variances of tokens");
        show->sorted = grown;
        show->capacity = capacity;
    }
    const int64_t at = count_below(show, variance, false);
    memmove(show->sorted + at + 1, show->sorted + at,
            (size_t)(show->n++ - at) * sizeof *show->sorted);
    show->sorted[at] = variance;
    return MN_OK;
}

int mn_show_shade(const mn_show *show, double variance) {
    if (show->n == 0) return 0;
    const int64_t below = count_below(show, variance, false);
    const int64_t among = count_below(show, variance, true);
    const double rank = 0.5 * (double)(below + among) / (double)show->n;
    return (int)mn_min((int64_t)(rank * MN_SHADES), MN_SHADES - 1);
}

static void set_colour(const mn_show *show, int shade) {
    if (show->truecolor) {
        printf("\033[38;2;0;0;0;48;2;%d;%d;%dm", colours[shade].r, colours[shade].g,
               colours[shade].b);
    } else {
        printf("\033[38;5;16;48;5;%dm", colours[shade].cube);
    }
}

/* Runs of one shade; a line's end is never coloured, or the terminal fills the rest of the line. */
static void put_coloured(const mn_show *show, const char *text, size_t size,
                         const uint8_t *shades) {
    for (size_t at = 0; at < size;) {
        if (text[at] == '\n') {
            putchar(text[at++]);
            continue;
        }
        const size_t start = at;
        while (at < size && text[at] != '\n' && shades[at] == shades[start]) at++;
        set_colour(show, shades[start]);
        fwrite(text + start, 1, at - start, stdout);
        fputs("\033[0m", stdout);
    }
}

void mn_show_text(const mn_show *show, const char *text, size_t size, const uint8_t *shades) {
    if (size == 0) return;
    if (show->mode == MN_SHOW_TEXT) fwrite(text, 1, size, stdout);
    if (show->mode == MN_SHOW_COLOURS) put_coloured(show, text, size, shades);
    fflush(stdout);
}

void mn_show_line(const mn_show *show, const char *text, size_t size, double variance) {
    if (show->mode != MN_SHOW_LINES) return;
    for (size_t i = 0; i < size; i++) {
        const unsigned char c = (unsigned char)text[i];
        if (c == '\\') fputs("\\\\", stdout);
        else if (c == '\n') fputs("\\n", stdout);
        else if (c == '\t') fputs("\\t", stdout);
        else if (c < 32 || c == 127) printf("\\x%02x", c);
        else putchar(c);
    }
    printf("\t%.6g\n", variance);
    fflush(stdout);
}

void mn_show_legend(const mn_show *show, const char *layers) {
    if (show->mode != MN_SHOW_COLOURS) return;
    fputs("certain ", stdout);
    for (int i = 0; i < MN_SHADES; i++) {
        set_colour(show, i);
        fputs("  ", stdout);
    }
    printf("\033[0m uncertain   (variance of the read over that of any query, mean of layers %s; "
           "ranked among the tokens so far)\n", layers);
}
