/* quantize.c - mneme quantize: a model's folder to one whose weights take 8 or 4 bits. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/command.h"
#include "cli/options.h"
#include "data/corpus.h"
#include "io/file.h"
#include "io/folder.h"
#include "io/json_write.h"
#include "model/quant.h"
#include "train/run/run_folder.h"

enum { TOKENS = 65536, LENGTH = 512, PATH = MN_FOLDER_PATH };

typedef struct options {
    const char *folders[2];
    const char *calibrate;
    int n_folders, bits, group, tokens, length, n_threads;
    bool json, quiet;
} options;

static void print_help(void) {
    puts("usage: mneme quantize MODEL OUT --bits 8|4 [options]\n\n"
         "Writes the model of folder MODEL to folder OUT with its projections in 8 or 4 bits, its\n"
         "embedding and head in 8. Norms, convolutions and what sets how memories fade stay "
         "float32,\n"
         "and so do the states of sequences. Prints what each tensor becomes and its error.\n\n"
         "  --bits N            8 or 4 (default: 8)\n"
         "  --group N           inputs that share a scale: 32, 64, 128 or 256 (default: 128 for 8 "
         "bits,\n"
         "                      64 for 4)\n"
         "  --calibrate FILE    text or tokens that the model reads first, so that errors count "
         "by what\n"
         "                      its inputs are like; for 4 bits\n"
         "  --tokens N          tokens of that to read (default: 65536)\n"
         "  --length N          tokens of a sequence (default: 512)\n"
         "  --threads N         worker threads (default: one per core)\n"
         "  --quiet             the sums only\n"
         "  --json              the result as one document");
}

static int parse(options *o, int argc, char **argv) {
    o->bits = 8;
    o->tokens = TOKENS;
    o->length = LENGTH;
    const mn_option rows[] = {
        { "--bits", .count = &o->bits, .low = 4, .high = 8 },
        { "--group", .count = &o->group, .low = 32, .high = MN_QUANT_MAX_GROUP },
        { "--calibrate", .text = &o->calibrate },
        { "--tokens", .count = &o->tokens, .low = 1, .high = INT32_MAX },
        { "--length", .count = &o->length, .low = 1, .high = 1 << 20 },
        { "--threads", .count = &o->n_threads, .low = 1, .high = 1024 },
        { "--quiet", .flag = &o->quiet },
        { "--json", .flag = &o->json },
        { NULL, .list = o->folders, .n = &o->n_folders, .most = 2 },
    };
    const int status = mn_options_read(rows, MN_COUNTOF(rows), "quantize", argc, argv);
    if (status != 0) return status;
    if (o->n_folders < 2) {
        return mn_options_mistake("quantize", "", "name the model's folder and the one to write");
    }
    if (o->bits != 8 && o->bits != 4) {
        return mn_options_mistake("quantize", "--bits", "needs 8 or 4");
    }
    if (o->group != 0 && o->group != 32 && o->group != 64 && o->group != 128 && o->group != 256) {
        return mn_options_mistake("quantize", "--group", "needs 32, 64, 128 or 256");
    }
    return 0;
}

/* ---- files ----------------------------------------------------------------------------------- */

static mn_status join(char path[PATH], const char *folder, const char *name) {
    if (snprintf(path, PATH, "%s/%s", folder, name) < PATH) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "%s/%s: the path is too long", folder, name);
}

/* What goes with a model beside its weights and configuration, where it is there. */
static mn_status copy_beside(const char *to, const char *from) {
    static const char *const names[] = {
        "tokenizer.json", "tokenizer_config.json", "generation_config.json",
        "special_tokens_map.json", "chat_template.jinja", "calibration.json",
    };
    mn_status st = MN_OK;
    for (size_t i = 0; i < MN_COUNTOF(names) && st == MN_OK; i++) {
        char source[PATH], target[PATH];
        mn_file file;
        st = join(source, from, names[i]);
        if (st == MN_OK) st = join(target, to, names[i]);
        if (st != MN_OK || access(source, F_OK) != 0) continue;
        st = mn_file_map(&file, source);
        if (st == MN_OK) st = mn_file_write_bytes(target, file.bytes, file.size);
        mn_file_unmap(&file);
    }
    return st;
}

/* Nothing that is there already is written over: OUT could be the model itself. */
static mn_status check_out(const char *folder) {
    static const char *const names[] = { "config.json", "model.safetensors",
                                         "model.safetensors.index.json" };
    for (size_t i = 0; i < MN_COUNTOF(names); i++) {
        char path[PATH];
        const mn_status st = join(path, folder, names[i]);
        if (st != MN_OK) return st;
        if (access(path, F_OK) != 0) continue;
        return mn_fail(MN_ERR_ARGUMENT, "%s: there is a model already; name another folder, or "
                       "remove it", folder);
    }
    return MN_OK;
}

static mn_status read_tokens(int32_t **tokens, int64_t *n, const options *o, const char *folder) {
    mn_tokenizer *tokenizer = NULL;
    mn_corpus *corpus = NULL;
    const mn_corpus_options how = { .paths = &o->calibrate, .n_paths = 1,
                                    .document_end = MN_DOCUMENT_END_OWN };
    mn_status st = mn_tokenizer_load(&tokenizer, folder);
    if (st == MN_OK) st = mn_corpus_open(&corpus, &how, tokenizer);
    if (st == MN_OK) {
        *n = mn_min(o->tokens, mn_corpus_tokens(corpus));
        *tokens = malloc((size_t)*n * sizeof **tokens);
        if (*tokens) st = mn_corpus_read(corpus, 0, *n, *tokens);
        else st = mn_fail(MN_ERR_MEMORY, "no memory for the tokens of %s", o->calibrate);
    }
    mn_corpus_destroy(corpus);
    mn_tokenizer_destroy(tokenizer);
    return st;
}

/* ---- telling --------------------------------------------------------------------------------- */

typedef struct telling {
    const options *o;
    json_t *tensors;
    size_t before, after;
    int n_quantized;
} telling;

static mn_status tell(void *context, const mn_quant_report *r) {
    telling *t = context;
    t->before += r->bytes_before;
    t->after += r->bytes_after;
    t->n_quantized += r->bits != 32;
    if (t->o->json) {
        json_t *row = json_pack("{s:s, s:i, s:o, s:I, s:I}", "name", r->param->name, "bits",
                                r->bits, "error", mn_json_real(r->error), "bytes_before",
                                (json_int_t)r->bytes_before, "bytes_after",
                                (json_int_t)r->bytes_after);
        if (json_array_append_new(t->tensors, row) == 0) return MN_OK;
        return mn_fail(MN_ERR_MEMORY, "no memory for the result");
    }
    if (t->o->quiet || r->bits == 32) return MN_OK;
    printf("%-48s %d bits  error %.4f  %10zu -> %zu bytes\n", r->param->name, r->bits, r->error,
           r->bytes_before, r->bytes_after);
    return MN_OK;
}

static mn_status print_json(telling *t, const mn_quant_options *how) {
    char *text = NULL;
    json_t *root = json_pack("{s:s, s:s, s:i, s:O, s:I, s:I}", "model", t->o->folders[0], "out",
                             t->o->folders[1], "bits", how->bits, "tensors", t->tensors,
                             "bytes_before", (json_int_t)t->before, "bytes_after",
                             (json_int_t)t->after);
    const mn_status st = root ? mn_json_text(&text, root, MN_JSON_PRETTY)
                              : mn_fail(MN_ERR_MEMORY, "no memory for the result");
    if (st == MN_OK) puts(text);
    free(text);
    json_decref(root);
    return st;
}

static mn_status tell_sums(telling *t, const mn_quant_options *how) {
    if (t->o->json) return print_json(t, how);
    printf("%s: %d tensors in %d bits or 8, %.1f -> %.1f MB, %.2f of it\n", t->o->folders[1],
           t->n_quantized, how->bits, (double)t->before / 1e6, (double)t->after / 1e6,
           t->before ? (double)t->after / (double)t->before : 0.0);
    return MN_OK;
}

static mn_status quantize(const options *o) {
    const char *to = o->folders[1];
    char from[MN_FOLDER_PATH];
    int32_t *tokens = NULL;
    mn_context *context = NULL;
    telling t = { .o = o, .tensors = json_array() };
    mn_quant_options how = { .bits = o->bits, .group = o->group, .length = o->length,
                             .progress = tell, .progress_context = &t };
    mn_status st = mn_folder_of_model(from, o->folders[0]);
    if (st == MN_OK) st = mn_run_check_model(o->folders[0], false);
    if (st == MN_OK) st = check_out(to);
    if (st == MN_OK && o->calibrate) st = read_tokens(&tokens, &how.n_tokens, o, from);
    how.tokens = tokens;
    if (st == MN_OK) st = mn_context_create(&context, &(mn_context_options){
        .n_threads = o->n_threads });
    if (st == MN_OK) st = mn_folder_make(to);
    if (st == MN_OK) st = mn_model_quantize_folder(to, from, context, &how);
    if (st == MN_OK) st = copy_beside(to, from);
    if (st == MN_OK) st = tell_sums(&t, &how);
    if (st == MN_OK && (fflush(stdout) != 0 || ferror(stdout))) {
        st = mn_fail(MN_ERR_IO, "standard output cannot be written");
    }
    json_decref(t.tensors);
    mn_context_destroy(context);
    free(tokens);
    return st;
}

int mn_command_quantize(int argc, char **argv) {
    options o = { 0 };
    const int status = parse(&o, argc, argv);
    if (status < 0) {
        print_help();
        return 0;
    }
    if (status != 0) return status;
    if (quantize(&o) == MN_OK) return 0;
    fprintf(stderr, "mneme quantize: %s\n", mn_last_error());
    return 1;
}
