/* talk.c - a conversation with a model: lines to read and continue, and commands. What was
 * read and written stays in the session from line to line. */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/generate/generate.h"
#include "cli/generate/line.h"
#include "cli/number.h"
#include "io/closest.h"
#include "io/folder.h"

static volatile int interrupted;

static void on_interrupt(int signal_number) {
    (void)signal_number;
    interrupted = 1;
}

typedef struct talk {
    mn_generator *g;
    bool terminal, over;
    mn_line_reader *lines;
    mn_text text;                   // lines joined
} talk;

/* ---- commands -------------------------------------------------------------------------------- */

static mn_status no_argument(const char *command, const char *what) {
    return mn_fail(MN_ERR_ARGUMENT, "%s needs %s", command, what);
}

static mn_status write_on(talk *t) {
    mn_continuation c;
    interrupted = 0;
    const mn_status st = mn_generator_write(&c, t->g, t->g->session, 0);
    if (t->g->show.mode != MN_SHOW_LINES) putchar('\n');
    mn_continuation_free(&c);
    return st;
}

static mn_status run_fork(talk *t, const char *argument) {
    int n = 2;
    if (*argument && !mn_parse_count(&n, argument, 1, 1000)) {
        return no_argument("/fork", "a whole number from 1 to 1000");
    }
    mn_continuation *all = calloc((size_t)n, sizeof *all);
    if (!all) return mn_fail(MN_ERR_MEMORY, "no memory for %d continuations", n);
    interrupted = 0;
    const mn_status st = mn_generator_fork(all, t->g, n, true);
    putchar('\n');
    for (int i = 0; i < n; i++) mn_continuation_free(&all[i]);
    free(all);
    return st;
}

static mn_status run_set(talk *t, const char *argument) {
    const mn_sampling_field *fields;
    const int n = mn_sampling_fields(&fields);
    const size_t name = strcspn(argument, " ");
    for (int i = 0; i < n; i++) {
        if (strlen(fields[i].name) != name || memcmp(fields[i].name, argument, name) != 0) continue;
        return mn_sampling_set(&t->g->sampling, &fields[i], argument + name +
                               strspn(argument + name, " "));
    }
    char known[256] = "";
    for (int i = 0; i < n; i++) {
        const size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", fields[i].name);
    }
    return mn_fail(MN_ERR_ARGUMENT, "/set takes one of %s, and a value", known);
}

static mn_status run_save(talk *t, const char *argument) {
    if (!*argument) return no_argument("/save", "the name of a file");
    mn_status st = mn_folder_make_above(argument);
    if (st == MN_OK) st = mn_session_save(t->g->session, argument);
    if (st == MN_OK) {
        printf("wrote %s: %" PRId64 " tokens in %zu bytes\n", argument,
               mn_session_position(t->g->session), mn_session_bytes(t->g->session));
    }
    return st;
}

static mn_status run_load(talk *t, const char *argument) {
    if (!*argument) return no_argument("/load", "the name of a file");
    const mn_status st = mn_generator_load(t->g, argument);
    if (st == MN_OK) printf("%" PRId64 " tokens read\n", mn_session_position(t->g->session));
    return st;
}

static mn_status run_reset(talk *t, const char *argument) {
    (void)argument;
    mn_conversation *c = t->g->conversation;
    if (c) {
        const mn_generate_options *o = t->g->options;
        mn_conversation_free(c);
        const mn_status st = mn_conversation_open(c, o);
        if (st != MN_OK) return st;
    }
    return mn_generator_reset(t->g);
}

static mn_status run_quit(talk *t, const char *argument) {
    (void)argument;
    t->over = true;
    return MN_OK;
}

static mn_status run_help(talk *t, const char *argument);

static const struct {
    const char *name, *argument, *about;
    mn_status (*run)(talk *t, const char *argument);
} commands[] = {
#define TALK(name, argument, about) { "/" #name, argument, about, run_##name },
#include "cli/generate/talk.def"
#undef TALK
};

static mn_status run_help(talk *t, const char *argument) {
    (void)t, (void)argument;
    puts("A line is read and continued; an empty line continues. A line that ends in \\ goes on\n"
         "in the next. Arrows and Ctrl-R find earlier lines. Ctrl-C stops the writing, or ends.\n"
         "What was read stays until /reset.");
    for (size_t i = 0; i < MN_COUNTOF(commands); i++) {
        printf("  %-7s %-12s %s\n", commands[i].name, commands[i].argument, commands[i].about);
    }
    return MN_OK;
}

static mn_status run_command(talk *t, const char *line) {
    const size_t name = strcspn(line, " ");
    const char *argument = line + name + strspn(line + name, " ");
    for (size_t i = 0; i < MN_COUNTOF(commands); i++) {
        if (strlen(commands[i].name) == name && memcmp(commands[i].name, line, name) == 0) {
            return commands[i].run(t, argument);
        }
    }
    const char *names[MN_COUNTOF(commands)], *meant;
    char given[32];
    for (size_t i = 0; i < MN_COUNTOF(commands); i++) names[i] = commands[i].name;
    snprintf(given, sizeof given, "%.*s", (int)mn_min(name, sizeof given - 1), line);
    meant = mn_closest(given, names, MN_COUNTOF(names));
    return mn_fail(MN_ERR_ARGUMENT, "there is no %s%s%s%s; /help lists what there is", given,
                   meant ? ", did you mean " : "", meant ? meant : "", meant ? "?" : "");
}

/* ---- lines ----------------------------------------------------------------------------------- */

/* The next line, with those it goes on in; false at the end of the input. */
static bool next_line(talk *t) {
    t->text.size = 0;
    for (const char *prompt = "> ";; prompt = "  ") {
        char *line;
        const ssize_t n = mn_line_next(&line, t->lines, prompt);
        if (n < 0) return t->text.size > 0 && !ferror(stdin);
        const bool more = n > 0 && line[n - 1] == '\\';
        if (more) line[n - 1] = '\n';
        if (mn_text_add(&t->text, line, (size_t)n) != MN_OK) return false;
        if (!more) return true;
    }
}

/* One turn: what the user says, the prompt of all, the answer as a message. */
static mn_status take_turn(talk *t) {
    mn_conversation *conversation = t->g->conversation;
    mn_text prompt = { 0 };
    mn_continuation c = { 0 };
    interrupted = 0;
    mn_status st = mn_conversation_add(conversation, "user", t->text.bytes, t->text.size);
    if (st != MN_OK) return st;
    st = mn_conversation_prompt(&prompt, conversation);
    if (st == MN_OK) {
        st = mn_generator_read_chat(t->g, prompt.bytes ? prompt.bytes : "", prompt.size);
    }
    if (st == MN_OK) st = mn_generator_write(&c, t->g, t->g->session, 0);
    if (st == MN_OK) {
        putchar('\n');
        st = mn_conversation_add(conversation, "assistant", c.text.bytes ? c.text.bytes : "",
                                 c.text.size);
    } else {    // the turn that failed is as if it had not been
        json_array_remove(conversation->messages, json_array_size(conversation->messages) - 1);
    }
    mn_continuation_free(&c);
    mn_text_free(&prompt);
    return st;
}

static mn_status take_line(talk *t) {
    if (t->text.size > 0 && t->text.bytes[0] == '/') {
        const mn_status st = mn_text_add(&t->text, "", 1);
        return st == MN_OK ? run_command(t, t->text.bytes) : st;
    }
    if (t->g->conversation) return t->text.size ? take_turn(t) : MN_OK;
    const bool empty = t->text.size == 0, fresh = mn_session_position(t->g->session) == 0;
    mn_status st = MN_OK;
    if (!empty || fresh) st = mn_generator_read(t->g, empty ? "" : t->text.bytes, t->text.size);
    return st == MN_OK ? write_on(t) : st;
}

mn_status mn_generate_talk(mn_generator *g) {
    talk t = { .g = g, .terminal = isatty(STDIN_FILENO) != 0 };
    struct sigaction action = { .sa_handler = on_interrupt }, before;    // ends waiting for a line
    t.lines = mn_line_open(t.terminal);
    if (!t.lines) return mn_fail(MN_ERR_MEMORY, "no memory to read lines");
    sigaction(SIGINT, &action, &before);
    g->interrupted = &interrupted;
    if (t.terminal) puts("/help lists commands, /quit ends.");
    while (!t.over && next_line(&t)) {
        if (take_line(&t) == MN_OK) continue;
        fflush(stdout);    // a mistake in one line is no reason to lose the conversation
        fprintf(stderr, "mneme generate: %s\n", mn_last_error());
    }
    if (t.terminal && !t.over) putchar('\n');
    sigaction(SIGINT, &before, NULL);
    g->interrupted = NULL;
    mn_line_close(t.lines);
    mn_text_free(&t.text);
    return MN_OK;
}
