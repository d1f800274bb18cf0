/* help.c - mneme help: the help of a verb, its man page, and completion for shells.
 *
 * Names and kinds of options come from the tables that the verbs read their command lines by, the
 * sentences from what --help prints. */
#include "cli/help.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"

/* ---- what a verb says ------------------------------------------------------------------------ */

static mn_status read_all(mn_text *out, FILE *from) {
    char piece[4096];
    mn_status st = MN_OK;
    rewind(from);
    for (size_t n; st == MN_OK && (n = fread(piece, 1, sizeof piece, from)) > 0;) {
        st = mn_text_add(out, piece, n);
    }
    return st == MN_OK ? mn_text_add(out, "", 1) : st;
}

/* Runs the verb with standard output led into a file. */
mn_status mn_help_text(mn_text *out, const mn_command *command, const char *sub) {
    FILE *file = tmpfile();
    fflush(stdout);
    const int kept = dup(STDOUT_FILENO);
    if (!file || kept < 0 || dup2(fileno(file), STDOUT_FILENO) < 0) {
        if (file) fclose(file);
        if (kept >= 0) close(kept);
        return mn_fail(MN_ERR_IO, "cannot keep what a verb says: %s", strerror(errno));
    }
    char verb[MN_HELP_NAME], inner[MN_HELP_NAME], help[] = "--help";
    snprintf(verb, sizeof verb, "%s", command->verb);
    snprintf(inner, sizeof inner, "%s", sub ? sub : "");
    char *argv[] = { verb, sub ? inner : help, sub ? help : NULL, NULL };
    const int status = command->run(sub ? 3 : 2, argv);
    fflush(stdout);
    const bool back = dup2(kept, STDOUT_FILENO) >= 0;
    close(kept);
    mn_status st = read_all(out, file);
    fclose(file);
    if (st == MN_OK && status == 2) {
        st = mn_fail(MN_ERR_ARGUMENT, "mneme %s --help lists what there is", command->verb);
    } else if (st == MN_OK && (status != 0 || !back)) {
        st = mn_fail(MN_ERR_INTERNAL, "mneme %s --help failed", command->verb);
    }
    return st;
}

/* "  --name ...   what it does": the name and the text behind two blanks. */
static const char *about_of(const char *line, const char *name) {
    const size_t n = strlen(name);
    if (strncmp(line, "  -", 3) != 0) return NULL;
    const char *end = strchr(line, '\n');
    for (const char *at = line + 2; (at = strstr(at, name)) && (!end || at < end); at += n) {
        if (at[-1] != ' ' || !strchr(" ,\n", at[n])) continue;
        const char *gap = strstr(at, "  ");
        if (!gap || (end && gap > end)) return "";
        return gap + strspn(gap, " ");
    }
    return NULL;
}

static void fill_about(mn_help_option *row, const char *help) {
    for (const char *line = help, *end; line; line = end ? end + 1 : NULL) {
        end = strchr(line, '\n');
        const char *about = about_of(line, row->name);
        if (!about) continue;
        const size_t n = strcspn(about, "\n");
        snprintf(row->about, sizeof row->about, "%.*s", (int)mn_min(n, sizeof row->about - 1),
                 about);
        return;
    }
}

static void hear(void *context, const char *verb, const mn_option *option) {
    mn_help_options *all = context;
    if (!option->name || all->count == MN_HELP_OPTIONS) return;
    mn_help_option *row = &all->rows[all->count++];
    *row = (mn_help_option){ .flag = option->flag != NULL, .number = option->count != NULL };
    snprintf(row->verb, sizeof row->verb, "%s", verb);
    snprintf(row->name, sizeof row->name, "%s", option->name);
}

mn_status mn_help_collect(mn_help_options *out) {
    int n;
    const mn_command *commands = mn_commands(&n);
    const mn_option_listener listener = { hear, out };
    mn_text help = { 0 };
    mn_status st = MN_OK;
    out->count = 0;
    mn_options_listen(&listener);
    for (int i = 0; i < n; i++) {
        char verb[MN_HELP_NAME];
        snprintf(verb, sizeof verb, "%s", commands[i].verb);
        char *argv[] = { verb, NULL };
        commands[i].run(1, argv);
    }
    mn_options_listen(NULL);
    char shown[MN_HELP_NAME] = "";
    for (int i = 0; i < out->count && st == MN_OK; i++) {
        char verb[MN_HELP_NAME];
        snprintf(verb, sizeof verb, "%s", out->rows[i].verb);
        if (strcmp(verb, shown) != 0) {
            strcpy(shown, verb);
            char *sub = strchr(verb, ' ');
            if (sub) *sub++ = '\0';
            help.size = 0;
            st = mn_help_text(&help, mn_command_find(verb), sub);
        }
        if (st == MN_OK) fill_about(&out->rows[i], help.bytes);
    }
    mn_text_free(&help);
    return st;
}

/* ---- the verb -------------------------------------------------------------------------------- */

static void print_help(void) {
    puts("usage: mneme help [VERB]\n"
         "       mneme help --man [VERB]\n"
         "       mneme help --completion SHELL\n"
         "       mneme help --options VERB\n\n"
         "Says what a verb does and takes, as mneme VERB --help does.\n\n"
         "  --man               the manual page of the verb, or of mneme, for man -l\n"
         "  --completion SHELL  names of verbs and options for bash, zsh or fish\n"
         "  --options           the options of the verb, one a line with what they take\n\n"
         "  mneme help train\n"
         "  mneme help --man train | man -l -\n"
         "  source <(mneme help --completion bash)");
}

static mn_status print_options(const char *verb) {
    mn_help_options *all = calloc(1, sizeof *all);
    mn_status st = all ? mn_help_collect(all) : mn_fail(MN_ERR_MEMORY, "no memory for options");
    const size_t n = strlen(verb);
    for (int i = 0; st == MN_OK && i < all->count; i++) {
        const mn_help_option *row = &all->rows[i];
        if (strncmp(row->verb, verb, n) != 0 || (row->verb[n] && row->verb[n] != ' ')) continue;
        printf("%s\t%s\t%s\n", row->name, row->flag ? "flag" : row->number ? "number" : "text",
               row->about);
    }
    free(all);
    return st;
}

/* `mneme help tokenizer train` */
static mn_status print_verb(const mn_command *command, const char *sub) {
    mn_text help = { 0 };
    const mn_status st = mn_help_text(&help, command, sub);
    if (st == MN_OK) fputs(help.bytes, stdout);
    mn_text_free(&help);
    return st;
}

int mn_command_help(int argc, char **argv) {
    const char *words[2] = { NULL }, *shell = NULL;
    bool man = false, options = false;
    int n = 0;
    const mn_option rows[] = {
        { "--man", .flag = &man },
        { "--completion", .text = &shell },
        { "--options", .flag = &options },
        { NULL, .list = words, .n = &n, .most = 2 },
    };
    const int status = mn_options_read(rows, MN_COUNTOF(rows), "help", argc, argv);
    if (status < 0) print_help();
    if (status != 0) return status < 0 ? 0 : status;
    const mn_command *command = n > 0 ? mn_command_find(words[0]) : NULL;
    if (n > 0 && !command) return mn_command_unknown(words[0]);
    if (options && n == 0) return mn_options_mistake("help", "--options", "needs a verb");
    mn_status st = MN_OK;
    if (shell) st = mn_help_completion(shell);
    else if (man) st = mn_help_man(n > 0 ? words[0] : NULL);
    else if (options) st = print_options(words[0]);
    else if (n > 0) st = print_verb(command, n > 1 ? words[1] : NULL);
    else mn_commands_print();
    if (st == MN_OK && (fflush(stdout) != 0 || ferror(stdout))) {
        st = mn_fail(MN_ERR_IO, "standard output cannot be written");
    }
    if (st != MN_OK) fprintf(stderr, "mneme help: %s\n", mn_last_error());
    return st == MN_OK ? 0 : 1;
}
