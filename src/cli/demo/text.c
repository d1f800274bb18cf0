/* text.c - what mneme demo says: the stories, the table, and a story as a model tells it. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/demo/demo.h"
#include "cli/generate/generate.h"

enum { COLUMNS = 96, LABEL = 28, CELL = 15, VARIANCE = 20 };

/* ---- stories as text ------------------------------------------------------------------------- */

/* A text with a shade per byte, broken into lines at blanks. */
typedef struct page {
    char *text;
    uint8_t *shades;
    size_t size, capacity, column;
} page;

static mn_status add(page *p, const char *text, int shade) {
    const size_t n = strlen(text);
    if (p->size + n + 2 > p->capacity) {
        const size_t capacity = 2 * (p->capacity + n + 64);
        char *grown = realloc(p->text, capacity);
        if (grown) p->text = grown;
        uint8_t *shades = realloc(p->shades, capacity);
        if (shades) p->shades = shades;
        if (!grown || !shades) return mn_fail(MN_ERR_MEMORY, "no memory for a text");
        p->capacity = capacity;
    }
    memcpy(p->text + p->size, text, n + 1);
    memset(p->shades + p->size, shade, n);
    p->size += n;
    p->column += n;
    return MN_OK;
}

/* A word, behind a blank or on a new line. */
static mn_status add_word(page *p, const char *text, bool glued, int shade) {
    const bool breaks = !glued && p->column + 1 + strlen(text) + 1 > COLUMNS;
    mn_status st = MN_OK;
    if (breaks) {
        st = add(p, "\n  ", shade);
        p->column = 2;
    } else if (!glued) {
        st = add(p, " ", shade);
    }
    return st == MN_OK ? add(p, text, shade) : st;
}

static bool is_mark(const char *text) {
    return strcmp(text, ".") == 0 || strcmp(text, "?") == 0;
}

static void free_page(page *p) {
    free(p->text);
    free(p->shades);
}

/* Words with their shade, or with `lines` as "word(variance)". */
static mn_status add_words(page *p, const int32_t *tokens, const double *variance, int64_t n,
                           const mn_show *show) {
    mn_status st = MN_OK;
    for (int64_t t = 0; t < n && st == MN_OK; t++) {
        char text[64];
        const char *word = mn_stories_word(tokens[t]);
        const bool known = variance && !isnan(variance[t]);
        if (show->mode == MN_SHOW_LINES && known) {
            snprintf(text, sizeof text, "%s(%.3f)", word, variance[t]);
        } else {
            snprintf(text, sizeof text, "%s", word);
        }
        const int shade = known ? mn_show_shade(show, variance[t]) : 0;
        st = add_word(p, text, t == 0 || is_mark(word), shade);
    }
    return st;
}

/* Line by line, so that what is before and behind a line has no colour. */
static void print_page(const page *p, const mn_show *show) {
    for (size_t at = 0; at < p->size;) {
        const char *line = p->text + at, *end = strchr(line, '\n');
        const size_t n = end ? (size_t)(end - line) : p->size - at, indent = strspn(line, " ");
        printf("%*s", (int)indent, "");
        if (show->mode == MN_SHOW_COLOURS) {
            mn_show_text(show, line + indent, n - indent, p->shades + at + indent);
        } else {
            fwrite(line + indent, 1, n - indent, stdout);
        }
        putchar('\n');
        at += n + 1;
    }
}

static mn_status print_words(const int32_t *tokens, const double *variance, int64_t n,
                             const mn_show *show) {
    page p = { 0 };
    mn_status st = add(&p, "  ", 0);
    if (st == MN_OK) st = add_words(&p, tokens, variance, n, show);
    if (st == MN_OK) print_page(&p, show);
    free_page(&p);
    return st;
}

mn_status mn_demo_words(const int32_t *tokens, int64_t n) {
    const mn_show plain = { .mode = MN_SHOW_TEXT };
    return print_words(tokens, NULL, n, &plain);
}

mn_status mn_demo_introduce(const mn_demo *demo) {
    const mn_demo_data *d = &demo->data;
    const mn_stories_config *c = &d->source;
    printf("stories    %" PRId64 " names, %" PRId64 " objects, %" PRId64 " places; up to %" PRId64
           " objects at a time, which are moved again and again:\n\n",
           c->n_names, c->n_objects, c->n_places, c->n_cast);
    const int64_t n = mn_min(60, d->held.borders[1] - 1);
    const mn_status st = mn_demo_words(d->held.tokens, n);
    printf("  ...\n\nfloor      %.4f bits per token: the entropy of the source, exact. Nothing "
           "predicts better; answers\n           cost nothing to whoever remembers the latest "
           "place. Guessing, %.1f %% of them are right.\n", d->floor, 100.0 * mn_demo_chance(d));
    for (int i = 0; i < demo->n_models; i++) {
        printf("%-10s %s: layers \"%s\"\n", i == 0 ? "models" : "", demo->models[i].name,
               demo->models[i].layers);
    }
    printf("%-10s trained side by side, on the same batches\n", "");
    fflush(stdout);
    return st;
}

/* ---- the table ------------------------------------------------------------------------------- */

static void print_label(const char *label) {
    printf("%-*s", LABEL, label);
}

/* "99.3 ± 0.4", right-aligned; the sign has two bytes and one column. */
static void print_share(const mn_demo_score *s, int cell) {
    char text[32];
    if (s->asked == 0) snprintf(text, sizeof text, "-");
    else snprintf(text, sizeof text, "%.1f ± %.1f", 100.0 * mn_demo_share(s),
                  100.0 * mn_demo_share_error(s));
    printf("%*s", cell + (s->asked > 0), text);
}

/* Columns of a model: two blanks beside the longest name at least. */
static int cell_of(const mn_demo *demo) {
    int width = CELL;
    for (int i = 0; i < demo->n_models; i++) {
        width = (int)mn_max(width, (int)strlen(demo->models[i].name) + 2);
    }
    return width;
}

static void print_names(const mn_demo *demo, int cell) {
    for (int i = 0; i < demo->n_models; i++) printf("%*s", cell, demo->models[i].name);
}

static void print_numbers(const mn_demo *demo) {
    const int cell = cell_of(demo);
    print_label("");
    print_names(demo, cell);
    putchar('\n');
    print_label("parameters");
    for (int i = 0; i < demo->n_models; i++) {
        printf("%*" PRId64, cell, mn_model_count(mn_trainer_model(demo->models[i].trainer)));
    }
    putchar('\n');
    print_label("tokens of training");
    for (int i = 0; i < demo->n_models; i++) {
        const mn_demo_model *m = &demo->models[i];
        printf("%*" PRId64, cell, m->points[m->n_points - 1].tokens);
    }
    putchar('\n');
    print_label("bits per token");
    for (int i = 0; i < demo->n_models; i++) printf("%*.4f", cell, demo->models[i].result.loss);
    char label[64];
    snprintf(label, sizeof label, "\n  above the floor, %.4f", demo->models[0].result.floor);
    printf("%-*s", LABEL + 1, label);
    for (int i = 0; i < demo->n_models; i++) printf("%*.4f", cell, demo->models[i].result.gap);
    putchar('\n');
    print_label("  standard error");
    for (int i = 0; i < demo->n_models; i++) {
        printf("%*.4f", cell, demo->models[i].result.gap_error);
    }
    putchar('\n');
}

static void group_label(char *out, size_t size, int group, const mn_demo_score *score) {
    const char *unit = mn_demo_group_unit(group);
    snprintf(out, size, "  %s%s%s (%" PRId64 ")", mn_demo_group_name(group), *unit ? " " : "", unit,
             score->asked);
}

static bool tells(const mn_demo_model *model) {
    return !isnan(mn_demo_variance(&model->result.groups[0]));
}

/* Whether the variances fit beside the answers. */
static bool fits_beside(const mn_demo *demo, int cell) {
    int width = LABEL + cell * demo->n_models;
    for (int i = 0; i < demo->n_models; i++) {
        if (tells(&demo->models[i])) width += VARIANCE + (int)strlen(demo->models[i].name);
    }
    return width <= COLUMNS;
}

static void print_variances(const mn_demo *demo, int group, int cell, bool beside) {
    for (int i = 0; i < demo->n_models; i++) {
        const mn_demo_model *m = &demo->models[i];
        const double v = mn_demo_variance(&m->result.groups[group]);
        const int width = beside ? VARIANCE + (int)strlen(m->name) : cell;
        if (!isnan(v)) printf("%*.4f", width, v);
        else if (!beside) printf("%*s", width, "-");
    }
}

static void print_rows(const mn_demo *demo, bool answers, bool variances, int cell) {
    for (int g = 0; g < MN_DEMO_GROUPS; g++) {
        char label[64];
        group_label(label, sizeof label, g, &demo->models[0].result.groups[g]);
        if (g == 1 || g == 1 + MN_DEMO_DISTANCES) putchar('\n');
        print_label(label);
        for (int i = 0; i < demo->n_models && answers; i++) {
            print_share(&demo->models[i].result.groups[g], cell);
        }
        if (variances) print_variances(demo, g, cell, answers);
        putchar('\n');
    }
}

static void print_groups(const mn_demo *demo) {
    const int cell = cell_of(demo);
    const bool beside = fits_beside(demo, cell);
    bool any = false;
    printf("\n%-*s", LABEL, "questions answered, %");
    print_names(demo, cell);
    for (int i = 0; i < demo->n_models; i++) {
        any |= tells(&demo->models[i]);
        if (beside && tells(&demo->models[i])) {
            printf("   variance read by %s", demo->models[i].name);
        }
    }
    putchar('\n');
    print_rows(demo, true, beside, cell);
    if (!any || beside) return;
    printf("\n%-*s", LABEL, "variance read");
    print_names(demo, cell);
    putchar('\n');
    print_rows(demo, false, true, cell);
}

/* ---- how to read it -------------------------------------------------------------------------- */

static const mn_demo_model *model_with(const mn_demo *demo, bool belief) {
    for (int i = 0; i < demo->n_models; i++) {
        const mn_demo_model *m = &demo->models[i];
        const bool believes = mn_model_beliefs(mn_trainer_model(m->trainer)) > 0;
        if (belief ? believes : strncmp(m->layers, "attention", 9) == 0) return m;
    }
    return NULL;
}

static void explain(const mn_demo *demo) {
    const mn_demo_model *belief = model_with(demo, true), *attention = model_with(demo, false);
    printf("\nhow to read it\n"
           "  floors    two, both exact: %.4f bits is the entropy of the source, what the best\n"
           "            predictor pays in the long run; %.4f is what the source itself pays on\n"
           "            these held-out stories, a little more or less by their draw. Models are\n"
           "            held against the second, story by story, so the draw cancels.\n",
           demo->data.floor, demo->models[0].result.floor);
    if (belief && attention) {
        printf("  memory    each move makes the place said before it wrong. %s writes the new\n"
               "            place over the old one, so one read finds the latest, however far\n"
               "            back. %s keeps all sentences alike and has to learn which of\n"
               "            several places of an object came last: in this little training it\n"
               "            does for near ones. With more of it the difference shrinks; it is how\n"
               "            soon each learns, not what it could learn.\n", belief->name,
               attention->name);
    }
    if (!belief) return;
    printf("  variance  how unsure %s was of what it read at the question mark: its prior for\n"
           "            what was never written, less the more was written under that key lately.\n"
           "            So it falls with the updates of an object, and with all else that is\n"
           "            read: by itself it foretells no mistakes. Over its mean over all\n"
           "            queries it tells what was never written: below, with the AUROC of that.\n",
           belief->name);
}

/* ---- the sample ------------------------------------------------------------------------------ */

static void layers_of(char *out, size_t size, mn_model *model) {
    out[0] = '\0';
    const int n = mn_model_describe(model)->n_layers;
    for (int i = 0; i < n; i++) {
        const size_t used = strlen(out);
        if (!mn_layer_has_variance(mn_model_layer(model, i))) continue;
        snprintf(out + used, size - used, "%s%d", used ? ", " : "", i);
    }
}

static mn_status print_sample(const mn_demo *demo) {
    const mn_demo_sample *s = &demo->sample;
    mn_model *model = mn_trainer_model(s->model->trainer);
    const bool believes = mn_model_beliefs(model) > 0;
    mn_show show;
    char layers[256];
    mn_show_start(&show, mn_show_choose(believes, false));
    mn_status st = MN_OK;
    for (int64_t t = 0; t < s->n_tokens && st == MN_OK; t++) {
        st = mn_show_note(&show, s->variance[t]);
    }
    printf("\na story begun ...\n");
    if (st == MN_OK) st = print_words(s->tokens, s->variance, s->n_given, &show);
    printf("... and continued by %s\n", s->model->name);
    const int64_t n = s->n_given;
    if (st == MN_OK) st = print_words(s->tokens + n, s->variance + n, s->n_tokens - n, &show);
    layers_of(layers, sizeof layers, model);
    if (show.mode == MN_SHOW_COLOURS) mn_show_legend(&show, layers);
    if (show.mode == MN_SHOW_LINES) {
        printf("in brackets: how unsure its memory was, the variance of what was read with each "
               "word over\nthat of any query (mean of layers %s)\n", layers);
    }
    printf("it asked %" PRId64 " questions of its own and answered %" PRId64 " of them as its "
           "story has it\n", s->asked, s->right);
    mn_show_free(&show);
    return st;
}

static void print_ends(const mn_demo *demo) {
    const char *out = demo->options->out;
    char seconds[128] = "";
    for (int i = 0; i < demo->n_models; i++) {
        const size_t n = strlen(seconds);
        snprintf(seconds + n, sizeof seconds - n, "%s%s %.0f s", n ? ", " : "",
                 demo->models[i].name, demo->models[i].seconds);
    }
    printf("\ntrained in   %s\n", seconds);
    if (demo->figures) {
        printf("figures      %s/loss.svg, %s/recall.svg and the same as .png\n", out, out);
    }
    printf("results      %s/results.json\n", out);
    printf("go on with   mneme generate --model %s/%s --tokens 2 \\\n"
           "                 \"anna puts the lamp in the mill. ben takes the lamp to the barn. "
           "where is the lamp?\"\n", out, demo->sample.model->name);
    printf("             mneme plot %s/%s --text\n", out, demo->models[0].name);
}

mn_status mn_demo_print(const mn_demo *demo) {
    putchar('\n');
    print_numbers(demo);
    print_groups(demo);
    explain(demo);
    const mn_status st = print_sample(demo);
    mn_demo_knowing_print(&demo->knowing);
    print_ends(demo);
    return st;
}
