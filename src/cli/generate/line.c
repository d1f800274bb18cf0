/* line.c - see line.h. Without libedit a terminal's own editing is what there is. */
#define _XOPEN_SOURCE 700       // getline, strdup under -std=c11
#include "cli/generate/line.h"

#include <locale.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "io/folder.h"

#if MN_HAVE_LIBEDIT
#include <histedit.h>
#endif

enum { MOST_HISTORY = 1000, PATH = MN_FOLDER_PATH };

struct mn_line_reader {
    bool terminal;
    const char *prompt;
    char *line;              // of getline, or a copy of libedit's
    size_t capacity;
#if MN_HAVE_LIBEDIT
    EditLine *edit;
    History *history;
    char path[PATH];         // of the history; "": kept nowhere
#endif
};

#if MN_HAVE_LIBEDIT

static void find_history(char path[PATH]) {
    const char *own = getenv("MNEME_HISTORY"), *state = getenv("XDG_STATE_HOME");
    const char *home = getenv("HOME");
    int n = 0;
    path[0] = '\0';
    if (own) n = snprintf(path, PATH, "%s", own);
    else if (state && *state) n = snprintf(path, PATH, "%s/mneme/history", state);
    else if (home && *home) n = snprintf(path, PATH, "%s/.local/state/mneme/history", home);
    if (n >= PATH) path[0] = '\0';
}

static char *prompt_of(EditLine *edit) {
    static char none[] = "";
    mn_line_reader *reader = NULL;
    if (el_get(edit, EL_CLIENTDATA, &reader) != 0 || !reader) return none;
    return (char *)(uintptr_t)reader->prompt;
}

static bool start_editing(mn_line_reader *r) {
    HistEvent event;
    setlocale(LC_CTYPE, "");    // letters beyond ASCII are moved over as one
    r->edit = el_init("mneme", stdin, stdout, stderr);
    r->history = history_init();
    if (!r->edit || !r->history) return false;
    el_set(r->edit, EL_CLIENTDATA, r);
    el_set(r->edit, EL_PROMPT, prompt_of);
    el_set(r->edit, EL_EDITOR, "emacs");
    el_source(r->edit, NULL);    // ~/.editrc
    history(r->history, &event, H_SETSIZE, MOST_HISTORY);
    history(r->history, &event, H_SETUNIQUE, 1);
    el_set(r->edit, EL_HIST, history, r->history);
    find_history(r->path);
    if (r->path[0]) history(r->history, &event, H_LOAD, r->path);
    return true;
}

static void forget_editing(mn_line_reader *r) {
    if (r->history) history_end(r->history);
    if (r->edit) el_end(r->edit);
    r->edit = NULL;
}

static void stop_editing(mn_line_reader *r) {
    HistEvent event;
    if (r->history && r->path[0] && mn_folder_make_above(r->path) == MN_OK) {
        const mode_t mask = umask(077);
        history(r->history, &event, H_SAVE, r->path);
        umask(mask);
    }
    forget_editing(r);
}

static ssize_t edited_line(mn_line_reader *r) {
    int n = 0;
    HistEvent event;
    const char *text = el_gets(r->edit, &n);
    if (!text || n <= 0) return -1;
    free(r->line);
    r->line = strdup(text);
    if (!r->line) return -1;
    if (r->line[n - 1] == '\n') r->line[--n] = '\0';
    if (n > 0) history(r->history, &event, H_ENTER, r->line);
    return n;
}

#else

static bool start_editing(mn_line_reader *r) {
    (void)r;
    return false;
}

static void forget_editing(mn_line_reader *r) {
    (void)r;
}

static void stop_editing(mn_line_reader *r) {
    (void)r;
}

static ssize_t edited_line(mn_line_reader *r) {
    (void)r;
    return -1;
}

#endif

static bool edits(const mn_line_reader *r) {
#if MN_HAVE_LIBEDIT
    return r->edit != NULL;
#else
    (void)r;
    return false;
#endif
}

mn_line_reader *mn_line_open(bool terminal) {
    mn_line_reader *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    r->terminal = terminal;
    if (terminal && !start_editing(r)) forget_editing(r);
    return r;
}

void mn_line_close(mn_line_reader *r) {
    if (!r) return;
    if (edits(r)) stop_editing(r);
    free(r->line);
    free(r);
}

ssize_t mn_line_next(char **line, mn_line_reader *r, const char *prompt) {
    ssize_t n;
    r->prompt = prompt;
    if (edits(r)) {
        fflush(stdout);
        n = edited_line(r);
    } else {
        if (r->terminal) fputs(prompt, stdout);
        fflush(stdout);
        n = getline(&r->line, &r->capacity, stdin);
        if (n > 0 && r->line[n - 1] == '\n') n--;
    }
    *line = r->line;
    return n;
}
