/* tokenizer.c - mneme tokenizer VERB: train, encode, decode, info. */
#include "cli/tokenizer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/command.h"
#include "cli/options.h"
#include "io/closest.h"

typedef struct verb {
    const char *name;
    mn_status (*run)(const mn_tokenizer_options *o);
    int files_min, files_max;
    const char *options;         // those it takes, each with a blank on both sides
    const char *help;
} verb;

static const verb verbs[] = {
    { "train", mn_tokenizer_verb_train, 0, 1 << 20,
      " --vocab-size --min-count --pattern --kind --special --out -o --quiet ",
      "usage: mneme tokenizer train FILE... --vocab-size N -o OUT.json [options]\n\n"
      "Learns byte-level BPE from text files and writes a tokenizer.json. The same files give\n"
      "the same tokenizer.\n\n"
      "  --vocab-size N    tokens in all: 256 bytes, special tokens, merges\n"
      "  --pattern NAME    how text is cut before merging: gpt2 (default), llama3, qwen2\n"
      "  --special TOKEN   a token that stays whole, such as '<|endoftext|>'; may be repeated\n"
      "  --min-count N     pairs seen less often are not merged (default 2)\n"
      "  --kind KIND       bpe (default); bytes: 256 tokens, no files needed; chars: one token\n"
      "                    per character of the files\n"
      "  -o, --out FILE    where to write\n"
      "  --quiet           no progress\n\n"
      "  mneme tokenizer train books/*.txt --vocab-size 8192 --special '<|endoftext|>' \\\n"
      "      -o tokenizer.json\n"
      "  mneme tokenizer train shakespeare.txt --kind chars -o chars.json\n" },
    { "encode", mn_tokenizer_verb_encode, 1, 1, " --tokenizer --json --lines --plain --count ",
      "usage: mneme tokenizer encode [options] FILE|-\n\n"
      "Writes the tokens of a text, of standard input for \"-\".\n\n"
      "  --tokenizer PATH  tokenizer.json or its folder (default: ./tokenizer.json)\n"
      "  --plain           special tokens in the text are plain text, and none are put around it\n"
      "  --json            one JSON document with ids and texts of the tokens\n"
      "  --lines           FILE holds JSON lines, each a text or an object with \"text\"; a list\n"
      "                    of ids per line\n"
      "  --count           only how many tokens there are, and how long it took\n\n"
      "  echo hello | mneme tokenizer encode --tokenizer gpt2/ -\n"
      "  mneme tokenizer encode --tokenizer gpt2/ --count book.txt\n" },
    { "decode", mn_tokenizer_verb_decode, 1, 1, " --tokenizer --lines --special ",
      "usage: mneme tokenizer decode [options] FILE|-\n\n"
      "Writes the text of tokens: numbers between blanks, commas or brackets.\n\n"
      "  --tokenizer PATH  tokenizer.json or its folder (default: ./tokenizer.json)\n"
      "  --special         write special tokens too\n"
      "  --lines           each line is a text of its own; one JSON string per line\n\n"
      "  echo 15496 995 | mneme tokenizer decode --tokenizer gpt2/ -\n" },
    { "info", mn_tokenizer_verb_info, 0, 1, " --tokenizer --json ",
      "usage: mneme tokenizer info [--json] [PATH]\n\n"
      "Says what a tokenizer is: kind, size, begin and end of text, fingerprint.\n\n"
      "  PATH              tokenizer.json or its folder (default: ./tokenizer.json)\n\n"
      "  mneme tokenizer info gpt2/tokenizer.json\n" },
};

static void print_help(FILE *out) {
    fputs("usage: mneme tokenizer VERB [options]      mneme tokenizer VERB --help\n\n"
          "Tokenizers are files as Hugging Face writes them (tokenizer.json): BPE, Unigram\n"
          "or WordPiece.\n\n"
          "  train    learn one from text files\n"
          "  encode   text to tokens\n"
          "  decode   tokens to text\n"
          "  info     what a tokenizer is\n\n"
          "  mneme tokenizer train books/*.txt --vocab-size 8192 -o tokenizer.json\n"
          "  mneme tokenizer encode --tokenizer tokenizer.json book.txt\n", out);
}

mn_status mn_read_input(mn_text *out, const char *path) {
    const bool standard = strcmp(path, "-") == 0;
    FILE *in = standard ? stdin : fopen(path, "rb");
    if (!in) return mn_fail(MN_ERR_IO, "%s: %s", path, strerror(errno));
    mn_status st = MN_OK;
    for (size_t n = 1; n > 0 && st == MN_OK;) {
        st = mn_text_reserve(out, 1 << 16);
        if (st != MN_OK) break;
        n = fread(out->bytes + out->size, 1, 1 << 16, in);
        out->size += n;
    }
    if (st == MN_OK && ferror(in)) st = mn_fail(MN_ERR_IO, "%s: %s", path, strerror(errno));
    if (!standard) fclose(in);
    return st;
}

static bool takes(const verb *v, const char *option) {
    char wanted[40];
    snprintf(wanted, sizeof wanted, " %s ", option);
    return !option[0] || strstr(v->options, wanted);
}

/* Those options of all verbs that this one takes. */
static int parse(mn_tokenizer_options *o, const verb *v, int argc, char **argv) {
    const bool decodes = v->run == mn_tokenizer_verb_decode;
    const mn_option all[] = {
        { "--tokenizer", .text = &o->tokenizer },
        { "--out", .text = &o->out },
        { "-o", .text = &o->out },
        { "--pattern", .text = &o->pattern },
        { "--kind", .text = &o->kind },
        { "--vocab-size", .count = &o->vocab_size, .low = 1, .high = 1 << 22 },
        { "--min-count", .count = &o->min_count, .low = 1, .high = 1 << 22 },
        { "--special", .flag = decodes ? &o->keep_special : NULL,
          .list = o->special, .n = &o->n_special, .most = argc },
        { "--json", .flag = &o->json },
        { "--lines", .flag = &o->lines },
        { "--plain", .flag = &o->plain },
        { "--count", .flag = &o->count },
        { "--quiet", .flag = &o->quiet },
        { NULL, .list = o->files, .n = &o->n_files, .most = argc },
    };
    mn_option rows[MN_COUNTOF(all)];
    char name[32];
    int n = 0;
    for (size_t i = 0; i < MN_COUNTOF(all); i++) {
        if (takes(v, all[i].name ? all[i].name : "")) rows[n++] = all[i];
    }
    snprintf(name, sizeof name, "tokenizer %s", v->name);
    const int status = mn_options_read(rows, n, name, argc, argv);
    if (status != 0 || (o->n_files >= v->files_min && o->n_files <= v->files_max)) return status;
    return mn_options_mistake(name, "", v->files_max > 1 ? "name at least one file"
                                        : "name one file, or - for standard input");
}

/* For completion: the options of each verb. */
static int name_options(int argc, char **argv) {
    for (size_t i = 0; i < MN_COUNTOF(verbs); i++) {
        mn_tokenizer_options o = { 0 };
        parse(&o, &verbs[i], argc, argv);
    }
    return 2;
}

int mn_command_tokenizer(int argc, char **argv) {
    const verb *v = NULL;
    if (mn_options_heard()) return name_options(argc, argv);
    if (argc < 2 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        print_help(argc < 2 ? stderr : stdout);
        return argc < 2 ? 2 : 0;
    }
    for (size_t i = 0; i < MN_COUNTOF(verbs); i++) {
        if (strcmp(verbs[i].name, argv[1]) == 0) v = &verbs[i];
    }
    if (!v) {
        const char *names[MN_COUNTOF(verbs)];
        for (size_t i = 0; i < MN_COUNTOF(verbs); i++) names[i] = verbs[i].name;
        const char *meant = mn_closest(argv[1], names, MN_COUNTOF(names));
        fprintf(stderr, "mneme tokenizer: there is no verb \"%s\"%s%s%s; there are train, encode, "
                "decode, info\n", argv[1], meant ? ", did you mean \"" : "", meant ? meant : "",
                meant ? "\"?" : "");
        return 2;
    }
    mn_tokenizer_options o = { .special = calloc((size_t)argc + 1, sizeof *o.special),
                               .files = calloc((size_t)argc + 1, sizeof *o.files) };
    int status = o.special && o.files ? parse(&o, v, argc - 1, argv + 1) : 2;
    if (status < 0) fputs(v->help, stdout);
    if (status == 0 && v->run(&o) != MN_OK) {
        fprintf(stderr, "mneme tokenizer %s: %s\n", v->name, mn_last_error());
        status = 1;
    }
    free(o.special);
    free(o.files);
    return status < 0 ? 0 : status;
}
