/* options.c - reads a command line by a table, see options.h. */
#include "cli/options.h"

#include <stdio.h>
#include <string.h>

#include "base/util.h"
#include "cli/number.h"
#include "io/closest.h"
#include "mneme.h"

enum { SENTENCE = 256, MOST_NAMES = 128 };

typedef struct reader {
    const mn_option *rows;
    int n_rows;
    const char *verb;
} reader;

static const mn_option_listener *listener;

void mn_options_listen(const mn_option_listener *to) {
    listener = to;
}

bool mn_options_heard(void) {
    return listener != NULL;
}

int mn_options_mistake(const char *verb, const char *option, const char *what) {
    if (listener) return 2;
    fprintf(stderr, "mneme %s: %s%s%s; mneme %s --help lists the options\n", verb, option,
            option[0] && what[0] ? " " : "", what, verb);
    return 2;
}

/* `value` may be NULL: there was none. */
static int needs(const reader *r, const char *option, const char *what, const char *value) {
    char text[SENTENCE];
    if (value) snprintf(text, sizeof text, "needs %s, not \"%s\"", what, value);
    else snprintf(text, sizeof text, "needs %s", what);
    return mn_options_mistake(r->verb, option, text);
}

static const mn_option *find(const reader *r, const char *name) {
    for (int i = 0; i < r->n_rows; i++) {
        const char *known = r->rows[i].name;
        if (name ? known && strcmp(known, name) == 0 : !known) return &r->rows[i];
    }
    return NULL;
}

/* "is no option", and which one may have been meant. */
static int unknown(const reader *r, const char *name) {
    const char *known[MOST_NAMES] = { "--help" };
    char what[SENTENCE] = "is no option";
    int n = 1;
    for (int i = 0; i < r->n_rows && n < MOST_NAMES; i++) {
        if (r->rows[i].name) known[n++] = r->rows[i].name;
    }
    const char *meant = mn_closest(name, known, n);
    if (meant) snprintf(what, sizeof what, "is no option, did you mean %s?", meant);
    return mn_options_mistake(r->verb, name, what);
}

static int take_count(const reader *r, const mn_option *row, const char *value) {
    char what[64];
    if (mn_parse_count(row->count, value, row->low, row->high)) return 0;
    snprintf(what, sizeof what, "a whole number from %d to %d", row->low, row->high);
    return needs(r, row->name, what, value);
}

static int take_read(const reader *r, const mn_option *row, const char *value) {
    if (row->read(row->to, value)) return 0;
    if (row->needs) return needs(r, row->name, row->needs, value);
    fprintf(stderr, "mneme %s: %s: %s\n", r->verb, row->name, mn_last_error());
    return 2;
}

static int take(const reader *r, const mn_option *row, const char *value) {
    if (row->text) *row->text = value;
    else if (row->count) return take_count(r, row, value);
    else if (row->read) return take_read(r, row, value);
    else if (*row->n == row->most) return mn_options_mistake(r->verb, row->name,
                                                             "is given too often");
    else row->list[(*row->n)++] = value;
    return 0;
}

/* An argument that belongs to no option. */
static int take_argument(const reader *r, const char *argument) {
    const mn_option *row = find(r, NULL);
    if (!row) return mn_options_mistake(r->verb, argument, "is one argument too many");
    if (row->text && *row->text) {
        return mn_options_mistake(r->verb, argument, "is one argument too many");
    }
    if (row->list && *row->n == row->most) {
        return mn_options_mistake(r->verb, argument, "is one argument too many");
    }
    return take(r, row, argument);
}

static bool is_option(const char *argument) {
    return argument[0] == '-' && argument[1];    // "-" is standard input
}

/* Takes the values behind argv[at]; *used is how many. */
static int take_values(const reader *r, int at, int argc, char **argv, int *used) {
    const mn_option *row = find(r, argv[at]);
    *used = 0;
    if (!row) return unknown(r, argv[at]);
    if (row->flag) {
        *row->flag = true;
        return 0;
    }
    int status = 0;
    do {
        if (at + 1 + *used >= argc) break;
        if (row->several && is_option(argv[at + 1 + *used])) break;
        status = take(r, row, argv[at + 1 + *used]);
        ++*used;
    } while (status == 0 && row->several);
    if (*used > 0) return status;
    return needs(r, argv[at], row->several ? "at least one value" : "a value", NULL);
}

/* "--name=value" */
static int take_joined(const reader *r, const char *argument, const char *equals) {
    char name[64];
    const size_t n = (size_t)(equals - argument);
    snprintf(name, sizeof name, "%.*s", (int)mn_min(n, sizeof name - 1), argument);
    const mn_option *row = find(r, name);
    if (!row) return unknown(r, name);
    if (row->flag) return mn_options_mistake(r->verb, name, "takes no value");
    return take(r, row, equals + 1);
}

bool mn_options_device(void *to, const char *value) {
    *(const char **)to = strcmp(value, "cpu") == 0 ? NULL : value;
    return true;
}

int mn_options_read(const mn_option *rows, int n_rows, const char *verb, int argc, char **argv) {
    const reader r = { rows, n_rows, verb };
    bool options = true;
    for (int i = 0; listener && i < n_rows; i++) listener->hear(listener->context, verb, &rows[i]);
    if (listener) return 2;
    for (int i = 1; i < argc; i++) {
        int used = 0, status;
        const char *equals = strncmp(argv[i], "--", 2) == 0 ? strchr(argv[i], '=') : NULL;
        if (options && (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)) return -1;
        if (options && strcmp(argv[i], "--") == 0) {
            options = false;
            continue;
        }
        if (options && equals) status = take_joined(&r, argv[i], equals);
        else if (options && is_option(argv[i])) status = take_values(&r, i, argc, argv, &used);
        else status = take_argument(&r, argv[i]);
        if (status != 0) return status;
        i += used;
    }
    return 0;
}
