/* help_completion.c - completion for bash, zsh and fish from the tables of options. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/help.h"

/* "tokenizer train": the words behind which the options of a row stand. */
static bool same_verb(const mn_help_option *a, const mn_help_option *b) {
    return strcmp(a->verb, b->verb) == 0;
}

static void put_verbs(void) {
    int n;
    const mn_command *commands = mn_commands(&n);
    for (int i = 0; i < n; i++) printf("%s%s", i ? " " : "", commands[i].verb);
}

/* Options that stand behind a verb of their own: "tokenizer train" before "tokenizer". */
static void bash(const mn_help_options *all) {
    fputs("# bash completion of mneme; mneme help --completion bash writes it\n"
          "_mneme() {\n"
          "    local cur=${COMP_WORDS[COMP_CWORD]} verb=${COMP_WORDS[1]-} sub=${COMP_WORDS[2]-}\n"
          "    local options=\n"
          "    if [ \"$COMP_CWORD\" -eq 1 ]; then\n"
          "        COMPREPLY=($(compgen -W '", stdout);
    put_verbs();
    puts(" --help --version' -- \"$cur\"))\n"
         "        return\n"
         "    fi\n"
         "    if [ \"$verb\" = help ] && [[ $cur != -* ]]; then");
    fputs("        COMPREPLY=($(compgen -W '", stdout);
    put_verbs();
    puts("' -- \"$cur\"))\n"
         "        return\n"
         "    fi\n"
         "    if [ \"$verb\" = tokenizer ] && [ \"$COMP_CWORD\" -eq 2 ]; then\n"
         "        COMPREPLY=($(compgen -W 'train encode decode info --help' -- \"$cur\"))\n"
         "        return\n"
         "    fi\n"
         "    case \"$verb $sub\" in");
    for (int i = 0; i < all->count; i++) {
        const mn_help_option *row = &all->rows[i];
        if (i == 0 || !same_verb(row, row - 1)) {
            printf("    \"%s%s options='--help", row->verb,
                   strchr(row->verb, ' ') ? "\")" : " \"*)");
        }
        printf(" %s", row->name);
        if (i + 1 == all->count || !same_verb(row, row + 1)) puts("' ;;");
    }
    puts("    esac\n"
         "    if [[ $cur == -* ]]; then\n"
         "        COMPREPLY=($(compgen -W \"$options\" -- \"$cur\"))\n"
         "    else\n"
         "        COMPREPLY=($(compgen -f -- \"$cur\"))\n"
         "    fi\n"
         "}\n"
         "complete -o filenames -F _mneme mneme");
}

/* Text inside of single quotes and of brackets of zsh. */
static void put_zsh(const char *text) {
    for (; *text; text++) {
        if (*text == '\'') fputs("'\\''", stdout);
        else if (strchr("[]:\\", *text)) printf("\\%c", *text);
        else putchar(*text);
    }
}

static void zsh(const mn_help_options *all) {
    int n;
    const mn_command *commands = mn_commands(&n);
    puts("#compdef mneme\n"
         "# zsh completion of mneme; mneme help --completion zsh writes it\n"
         "_mneme() {\n"
         "    local -a verbs\n"
         "    verbs=(");
    for (int i = 0; i < n; i++) {
        printf("        '%s:", commands[i].verb);
        put_zsh(commands[i].about);
        puts("'");
    }
    puts("    )\n"
         "    if (( CURRENT == 2 )); then\n"
         "        _describe verb verbs\n"
         "        return\n"
         "    fi\n"
         "    if [[ $words[2] == help ]]; then\n"
         "        _describe verb verbs\n"
         "        return\n"
         "    fi\n"
         "    if [[ $words[2] == tokenizer ]] && (( CURRENT == 3 )); then\n"
         "        compadd train encode decode info\n"
         "        return\n"
         "    fi\n"
         "    case \"$words[2] $words[3]\" in");
    for (int i = 0; i < all->count; i++) {
        const mn_help_option *row = &all->rows[i];
        if (i == 0 || !same_verb(row, row - 1)) {
            printf("    \"%s%s\n        _arguments \\\n", row->verb,
                   strchr(row->verb, ' ') ? "\"*)" : " \"*)");
        }
        printf("            '*%s[", row->name);
        put_zsh(row->about);
        puts(row->flag ? "]' \\" : row->number ? "]:number:' \\" : "]:value:_files' \\");
        if (i + 1 == all->count || !same_verb(row, row + 1)) {
            puts("            '--help[what it does and takes]' '*:file:_files' ;;");
        }
    }
    puts("    esac\n"
         "}\n"
         "if [[ $funcstack[1] == _mneme ]]; then _mneme \"$@\"; else compdef _mneme mneme; fi");
}

static void put_fish(const char *text) {
    for (; *text; text++) {
        if (*text == '\'' || *text == '\\') putchar('\\');
        putchar(*text);
    }
}

static void fish(const mn_help_options *all) {
    int n;
    const mn_command *commands = mn_commands(&n);
    puts("# fish completion of mneme; mneme help --completion fish writes it");
    for (int i = 0; i < n; i++) {
        printf("complete -c mneme -n __fish_use_subcommand -f -a %s -d '", commands[i].verb);
        put_fish(commands[i].about);
        puts("'");
    }
    fputs("complete -c mneme -n '__fish_seen_subcommand_from help' -f -a '", stdout);
    put_verbs();
    puts("'");
    puts("complete -c mneme -n '__fish_seen_subcommand_from tokenizer' "
         "-a 'train encode decode info'");
    for (int i = 0; i < all->count; i++) {
        const mn_help_option *row = &all->rows[i];
        char verb[MN_HELP_NAME];
        snprintf(verb, sizeof verb, "%s", row->verb);
        char *sub = strchr(verb, ' ');
        if (sub) *sub++ = '\0';
        printf("complete -c mneme -n '__fish_seen_subcommand_from %s", verb);
        if (sub) printf("; and __fish_seen_subcommand_from %s", sub);
        const bool is_long = row->name[1] == '-';
        printf("' -%s %s%s -d '", is_long ? "l" : "s", row->name + (is_long ? 2 : 1),
               row->flag ? "" : row->number ? " -x" : " -r");
        put_fish(row->about);
        puts("'");
    }
}

mn_status mn_help_completion(const char *shell) {
    static const struct {
        const char *name;
        void (*write)(const mn_help_options *all);
    } shells[] = { { "bash", bash }, { "zsh", zsh }, { "fish", fish } };
    for (size_t i = 0; i < MN_COUNTOF(shells); i++) {
        if (strcmp(shells[i].name, shell) != 0) continue;
        mn_help_options *all = calloc(1, sizeof *all);
        const mn_status st = all ? mn_help_collect(all)
                                 : mn_fail(MN_ERR_MEMORY, "no memory for options");
        if (st == MN_OK) shells[i].write(all);
        free(all);
        return st;
    }
    return mn_fail(MN_ERR_ARGUMENT, "--completion: \"%s\" is none of bash, zsh, fish", shell);
}
