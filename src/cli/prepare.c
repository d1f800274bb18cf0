/* prepare.c - mneme prepare: text as files of tokens, made once and checked at will. */
#include "data/prepare.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/command.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "io/json_write.h"

typedef struct options {
    mn_prepare_options prepare;
    const char **inputs;     // argc of them at most
    const char *tokenizer, *separator, *document_end, *format, *valid, *check;
    int jobs, shard_tokens;
    bool json, quiet;
} options;

static void print_help(void) {
    puts("usage: mneme prepare IN... -o FOLDER --tokenizer FILE|bytes|chars [options]\n"
         "       mneme prepare --check FOLDER\n\n"
         "Turns text files, folders of them and JSON lines into tokens on the disk: shards with "
         "the\n"
         "header of llm.c, the ends of documents, the tokenizer, and an index with counts and "
         "hashes.\n"
         "A run that was stopped goes on when it is started again. The result does not depend on "
         "--jobs.\n\n"
         "  -o, --out FOLDER    where to; made if it is not there\n"
         "  --tokenizer T       a tokenizer.json or its folder, bytes (one token per byte), or "
         "chars\n"
         "                      (one per character of the text)\n"
         "  --valid FRACTION    hold out the last part of the input for validation (default: 0)\n"
         "  --separator S       split texts into documents at S; \\n and \\t are understood\n"
         "  --text-key K        where JSON lines have their text (default: text)\n"
         "  --document-end T    token after each document, or none (default: the tokenizer's "
         "own)\n"
         "  --format F          auto, text or jsonl (default: auto, by name and first bytes)\n"
         "  --shard-tokens N    tokens of a file (default: 33554432)\n"
         "  --jobs N            threads (default: one per core)\n"
         "  --check FOLDER      read a prepared folder again and compare it with its index\n"
         "  --quiet             no progress\n"
         "  --json              the result as one document");
}

static int parse(options *o, int argc, char **argv) {
    int n_inputs = 0;
    const mn_option rows[] = {
        { "-o", .text = &o->prepare.folder },
        { "--out", .text = &o->prepare.folder },
        { "--tokenizer", .text = &o->tokenizer },
        { "--valid", .text = &o->valid },
        { "--separator", .text = &o->separator },
        { "--text-key", .text = &o->prepare.input.text_key },
        { "--document-end", .text = &o->document_end },
        { "--format", .text = &o->format },
        { "--check", .text = &o->check },
        { "--jobs", .count = &o->jobs, .low = 1, .high = 256 },
        { "--shard-tokens", .count = &o->shard_tokens, .low = 1, .high = INT32_MAX },
        { "--json", .flag = &o->json },
        { "--quiet", .flag = &o->quiet },
        { NULL, .list = o->inputs, .n = &n_inputs, .most = argc },
    };
    const int status = mn_options_read(rows, MN_COUNTOF(rows), "prepare", argc, argv);
    o->prepare.input.n_paths = n_inputs;
    return status;
}

/* Replaces \n, \t, \r and \\ by what they stand for; false for other escapes. */
static bool unescape(char *out, const char *text) {
    static const char letters[] = "ntr\\", meant[] = "\n\t\r\\";
    for (; *text; text++) {
        if (*text != '\\') {
            *out++ = *text;
            continue;
        }
        const char *found = text[1] ? strchr(letters, text[1]) : NULL;
        if (!found) return false;
        *out++ = meant[found - letters];
        text++;
    }
    *out = '\0';
    return true;
}

static int mistake(const char *option, const char *what) {
    return mn_options_mistake("prepare", option, what);
}

static int settle(options *o, char *separator) {
    static const struct {
        const char *name;
        mn_corpus_format format;
    } formats[] = { { "auto", MN_CORPUS_AUTO }, { "text", MN_CORPUS_TEXT },
                    { "jsonl", MN_CORPUS_JSONL } };
    mn_prepare_options *p = &o->prepare;
    if (p->input.n_paths == 0) return mistake("", "name the files or folders to prepare");
    if (!p->folder) return mistake("-o", "FOLDER is missing: where the result goes");
    if (!o->tokenizer) {
        return mistake("--tokenizer", "is missing: a tokenizer.json, bytes or chars");
    }
    bool known = !o->format;
    for (size_t i = 0; o->format && i < MN_COUNTOF(formats); i++) {
        if (strcmp(formats[i].name, o->format) != 0) continue;
        p->input.format = formats[i].format;
        known = true;
    }
    if (!known) return mistake("--format", "needs auto, text or jsonl");
    if (o->valid) {
        char *end;
        p->valid = strtod(o->valid, &end);
        if (end == o->valid || *end || !(p->valid >= 0 && p->valid < 1)) {
            return mistake("--valid", "needs a number from 0 to below 1");
        }
    }
    if (o->separator && !unescape(separator, o->separator)) {
        return mistake("--separator", "knows \\n, \\t, \\r and \\\\ only");
    }
    p->input.separator = separator;
    p->input.paths = o->inputs;
    p->n_threads = o->jobs;
    p->shard_tokens = o->shard_tokens;
    return 0;
}

/* ---- running --------------------------------------------------------------------------------- */

static bool show(void *context, int64_t done, int64_t all, int64_t tokens) {
    mn_progress *bar = context;
    char extra[48];
    if (bar->all == 0) bar->all = all;
    snprintf(extra, sizeof extra, "%" PRId64 " tokens", tokens);
    mn_progress_update(bar, done, extra);
    return true;
}

static mn_status load_tokenizer(mn_tokenizer **out, options *o) {
    *out = NULL;
    o->prepare.input.document_end = MN_DOCUMENT_END_OWN;
    const bool chars = strcmp(o->tokenizer, "chars") == 0;
    mn_status st = MN_OK;
    if (!chars) st = mn_tokenizer_open(out, o->tokenizer);
    if (st != MN_OK || !o->document_end) return st;
    if (strcmp(o->document_end, "none") == 0) {
        o->prepare.input.document_end = MN_DOCUMENT_END_NONE;
        return MN_OK;
    }
    const int32_t id = *out ? mn_tokenizer_find(*out, o->document_end) : -1;
    if (id < 0) {
        return mn_fail(MN_ERR_ARGUMENT, "--document-end: \"%s\" is no token of the tokenizer %s",
                       o->document_end, o->tokenizer);
    }
    o->prepare.input.document_end = id;
    return MN_OK;
}

static void print_part(const char *name, const mn_prepare_result *r, int part) {
    if (r->shards[part] == 0) return;
    printf("%s: %" PRId64 " tokens, %" PRId64 " document%s, %" PRId64 " shard%s\n", name,
           r->tokens[part], r->documents[part], r->documents[part] == 1 ? "" : "s",
           r->shards[part], r->shards[part] == 1 ? "" : "s");
}

static mn_status print_json(const mn_prepare_result *r, const char *folder) {
    char *text = NULL;
    json_t *root = json_pack(
        "{s:s, s:{s:I, s:I, s:I}, s:{s:I, s:I, s:I}, s:i, s:I, s:b}", "folder", folder, "train",
        "tokens", (json_int_t)r->tokens[0], "documents", (json_int_t)r->documents[0], "shards",
        (json_int_t)r->shards[0], "valid", "tokens", (json_int_t)r->tokens[1], "documents",
        (json_int_t)r->documents[1], "shards", (json_int_t)r->shards[1], "token_bytes",
        r->token_bytes, "kept_shards", (json_int_t)r->kept, "was_complete", (int)r->was_complete);
    mn_status st = root ? mn_json_text(&text, root, MN_JSON_PRETTY)
                        : mn_fail(MN_ERR_MEMORY, "no memory for the result");
    if (st == MN_OK) puts(text);
    free(text);
    json_decref(root);
    return st;
}

static mn_status tell(const mn_prepare_result *r, const options *o, const char *folder) {
    if (o->json) return print_json(r, folder);
    print_part("train", r, 0);
    print_part("valid", r, 1);
    if (o->check) printf("%s: as it was written\n", folder);
    else if (r->was_complete) printf("%s: was complete, nothing to do\n", folder);
    else if (r->kept > 0) printf("%s: went on behind %" PRId64 " shards\n", folder, r->kept);
    return MN_OK;
}

static int finish(mn_status st, mn_progress *bar, const mn_prepare_result *result,
                  const options *o, const char *folder) {
    mn_progress_clear(bar);
    if (st == MN_OK) st = tell(result, o, folder);
    if (st == MN_OK) return 0;
    fprintf(stderr, "mneme prepare: %s\n", mn_last_error());
    return 1;
}

static int run_check(const options *o) {
    mn_prepare_result result;
    mn_progress bar;
    mn_progress_start(&bar, "check", "tokens", 0, 0, o->quiet);
    const mn_status st = mn_prepare_check(&result, o->check, show, &bar);
    return finish(st, &bar, &result, o, o->check);
}

static int run_prepare(options *o) {
    mn_prepare_result result = { 0 };
    mn_tokenizer *tokenizer;
    mn_progress bar;
    mn_progress_start(&bar, "prepare", "bytes", 0, 0, o->quiet);
    o->prepare.progress = show;
    o->prepare.context = &bar;
    mn_status st = load_tokenizer(&tokenizer, o);
    if (st == MN_OK) st = mn_prepare(&result, &o->prepare, tokenizer);
    o->prepare.context = NULL;
    if (st == MN_OK && !result.was_complete) {
        bar.done = bar.all;
        mn_progress_finish(&bar, NULL);
    }
    mn_tokenizer_destroy(tokenizer);
    return finish(st, &bar, &result, o, o->prepare.folder);
}

int mn_command_prepare(int argc, char **argv) {
    options o = { 0 };
    o.inputs = calloc((size_t)argc, sizeof *o.inputs);
    if (!o.inputs) return 1;
    int status = parse(&o, argc, argv);
    if (status < 0) print_help();
    char *separator = calloc(o.separator ? strlen(o.separator) + 1 : 1, 1);
    if (status == 0 && o.check) status = run_check(&o);
    else if (status == 0) {
        status = separator ? settle(&o, separator) : 1;
        if (status == 0) status = run_prepare(&o);
    }
    free(separator);
    free(o.inputs);
    return status < 0 ? 0 : status;
}
