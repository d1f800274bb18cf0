/* help_man.c - manual pages from what --help prints: usage, paragraphs, options, examples.
 *
 *   usage: ...             SYNOPSIS, with the lines below it that are set in
 *     --name VALUE  text   an option; lines set in further go on with it
 *     mneme ...            an example
 *   text                   a paragraph */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "cli/help.h"
#include "mneme.h"

/* A stretch of text as roff: hyphens, backslashes, and a dot or quote at the start of a line. */
static void put(const char *text, size_t n) {
    if (n > 0 && (text[0] == '.' || text[0] == '\'')) fputs("\\&", stdout);
    for (size_t i = 0; i < n; i++) {
        if (text[i] == '\\') fputs("\\e", stdout);
        else if (text[i] == '-') fputs("\\-", stdout);
        else putchar(text[i]);
    }
}

static size_t blanks(const char *line) {
    return strspn(line, " ");
}

typedef enum part { PARAGRAPH, SYNOPSIS, OPTION, VERBATIM } part;

typedef struct page {
    part at;
    bool gap;                // an empty line inside what is set as it stands
    const char *heading;     // the last one
} page;

static void head(page *p, const char *name) {
    if (p->heading && strcmp(p->heading, name) == 0) return;
    printf(".SH %s\n", name);
    p->heading = name;
}

static void leave(page *p, part next) {
    if (p->at == VERBATIM && next != VERBATIM) puts(".fi\n.RE");
    p->at = next;
}

static void put_synopsis(page *p, const char *line, size_t n) {
    leave(p, SYNOPSIS);
    head(p, "SYNOPSIS");
    const size_t skip = strncmp(line, "usage: ", 7) == 0 ? 7 : blanks(line);
    put(line + skip, n - skip);
    puts("\n.br");
}

static void put_option(page *p, const char *line, size_t n) {
    leave(p, OPTION);
    head(p, "OPTIONS");
    const char *gap = strstr(line + 2, "  ");
    const size_t name = gap && gap < line + n ? (size_t)(gap - line) : n;
    fputs(".TP\n.B ", stdout);
    put(line + 2, name - 2);
    putchar('\n');
    const size_t text = name + (name < n ? blanks(line + name) : 0);
    put(line + text, n - text);
    putchar('\n');
}

static void put_verbatim(page *p, const char *line, size_t n) {
    const bool example = strncmp(line, "  mneme ", 8) == 0;
    const bool anew = p->gap && example && strcmp(p->heading, "EXAMPLES") != 0;
    if (p->at == VERBATIM && p->gap && !anew) putchar('\n');
    p->gap = false;
    if (p->at != VERBATIM || anew) {
        leave(p, PARAGRAPH);
        if (example) head(p, "EXAMPLES");
        puts(".PP\n.RS 4\n.nf");
        p->at = VERBATIM;
    }
    put(line + 2, n - 2);
    putchar('\n');
}

static void put_line(page *p, const char *line, size_t n) {
    const size_t in = blanks(line);
    if (n == 0) {
        if (p->at == SYNOPSIS || p->at == OPTION) leave(p, PARAGRAPH);
        if (p->at != VERBATIM) puts(".PP");
        p->gap = p->at == VERBATIM;
    } else if (strncmp(line, "usage: ", 7) == 0 || (p->at == SYNOPSIS && in >= 7)) {
        put_synopsis(p, line, n);
    } else if (in == 2 && line[2] == '-') {
        put_option(p, line, n);
    } else if (p->at == OPTION && in > 4) {
        put(line + in, n - in);
        putchar('\n');
    } else if (in >= 2) {
        put_verbatim(p, line, n);
    } else {
        const char *under = p->heading ? p->heading : "SYNOPSIS";
        leave(p, PARAGRAPH);
        if (strcmp(under, "SYNOPSIS") == 0) under = "DESCRIPTION";
        head(p, strcmp(under, "EXAMPLES") == 0 ? "NOTES" : under);
        put(line, n);
        putchar('\n');
    }
}

static void put_help(const char *text) {
    page p = { PARAGRAPH, false, NULL };
    for (const char *line = text; *line;) {
        const size_t n = strcspn(line, "\n");
        put_line(&p, line, n);
        line += n + (line[n] == '\n');
    }
    leave(&p, PARAGRAPH);
}

/* mneme(1): the verbs. */
static void put_program(void) {
    int n;
    const mn_command *commands = mn_commands(&n);
    printf(".TH MNEME 1 \"\" \"mneme %s\" \"User Commands\"\n.SH NAME\nmneme \\- sequence memory: "
           "train, inspect and measure layers that keep a belief\n.SH SYNOPSIS\n"
           "mneme VERB [options]\n.SH DESCRIPTION\n", mn_version());
    puts("Trains sequence models whose layers keep a belief about what they have read, writes text "
         "with\nthem, serves and measures them. A text file is enough to begin:\n.PP\n.RS 4\n.nf\n"
         "mneme train book.txt\nmneme generate \\-\\-model runs/book \"Once upon\"\n.fi\n.RE\n"
         ".SH VERBS");
    for (int i = 0; i < n; i++) {
        fputs(".TP\n.B ", stdout);
        put(commands[i].verb, strlen(commands[i].verb));
        putchar('\n');
        put(commands[i].about, strlen(commands[i].about));
        printf(". See\n.BR mneme\\-%s (1).\n", commands[i].verb);
    }
    puts(".SH EXIT STATUS\n0 only when the thing asked for was done; 2 for a mistake on the "
         "command line.");
}

static mn_status put_verb(const char *verb) {
    static const char *const subs[] = { "train", "encode", "decode", "info" };
    const mn_command *command = mn_command_find(verb);
    char upper[MN_HELP_NAME];
    mn_text help = { 0 };
    const bool nested = strcmp(verb, "tokenizer") == 0;
    snprintf(upper, sizeof upper, "%s", verb);
    for (char *c = upper; *c; c++) *c = *c >= 'a' && *c <= 'z' ? (char)(*c - 'a' + 'A') : *c;
    printf(".TH MNEME\\-%s 1 \"\" \"mneme %s\" \"User Commands\"\n.SH NAME\nmneme\\-%s \\- ", upper,
           mn_version(), verb);
    put(command->about, strlen(command->about));
    putchar('\n');
    mn_status st = mn_help_text(&help, command, NULL);
    if (st == MN_OK) put_help(help.bytes);
    for (int i = 0; st == MN_OK && nested && i < 4; i++) {
        help.size = 0;
        st = mn_help_text(&help, command, subs[i]);
        if (st == MN_OK) put_help(help.bytes);
    }
    if (st == MN_OK) puts(".SH SEE ALSO\n.BR mneme (1)");
    mn_text_free(&help);
    return st;
}

mn_status mn_help_man(const char *verb) {
    if (verb) return put_verb(verb);
    put_program();
    return MN_OK;
}
