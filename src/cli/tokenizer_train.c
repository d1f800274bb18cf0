/* tokenizer_train.c - mneme tokenizer train: text files to a tokenizer.json. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "cli/progress.h"
#include "cli/tokenizer.h"
#include "io/file.h"
#include "io/folder.h"

static bool show(void *context, int64_t done, int64_t all) {
    (void)all;
    mn_progress_update(context, done, NULL);
    return true;
}

/* The files, mapped. */
typedef struct inputs {
    mn_file *files;
    const char **texts;
    size_t *sizes;
    size_t bytes;
} inputs;

static void close_inputs(inputs *in, int count) {
    for (int i = 0; in->files && i < count; i++) mn_file_unmap(&in->files[i]);
    free(in->files);
    free(in->texts);
    free(in->sizes);
}

static mn_status open_inputs(inputs *in, const mn_tokenizer_options *o) {
    const size_t count = (size_t)o->n_files + 1;
    in->files = calloc(count, sizeof *in->files);
    in->texts = calloc(count, sizeof *in->texts);
    in->sizes = calloc(count, sizeof *in->sizes);
    if (!in->files || !in->texts || !in->sizes) return mn_fail(MN_ERR_MEMORY, "no memory");
    mn_status st = MN_OK;
    for (int i = 0; i < o->n_files && st == MN_OK; i++) {
        st = mn_file_map(&in->files[i], o->files[i]);
        in->texts[i] = (const char *)in->files[i].bytes;
        in->sizes[i] = in->files[i].size;
        in->bytes += in->sizes[i];
    }
    return st;
}

static mn_status learn_chars(mn_tokenizer **out, const inputs *in, int n_files) {
    mn_text all = { 0 };
    mn_status st = MN_OK;
    for (int i = 0; i < n_files && st == MN_OK; i++) {
        st = mn_text_add(&all, in->texts[i], in->sizes[i]);
    }
    if (st == MN_OK) st = mn_tokenizer_chars(out, all.bytes, all.size);
    mn_text_free(&all);
    return st;
}

static mn_status learn_merges(mn_tokenizer **out, const inputs *in, const mn_tokenizer_options *o) {
    mn_progress bar = { 0 };
    const mn_tokenizer_training how = {
        .vocab_size = o->vocab_size, .min_count = o->min_count, .pattern = o->pattern,
        .special = o->special, .progress = show, .context = &bar,
    };
    if (o->vocab_size == 0) {
        return mn_fail(MN_ERR_ARGUMENT, "say how many tokens there shall be: --vocab-size 8192");
    }
    const int64_t n_merges = o->vocab_size - 256 - o->n_special;
    mn_progress_start(&bar, "merges", "merges", 0, n_merges > 0 ? n_merges : 0, o->quiet);
    const mn_status st = mn_tokenizer_train(out, &how, in->texts, in->sizes, o->n_files);
    if (st == MN_OK) mn_progress_finish(&bar, NULL);
    else mn_progress_clear(&bar);
    return st;
}

static mn_status learn(mn_tokenizer **out, const inputs *in, const mn_tokenizer_options *o) {
    const char *kind = o->kind ? o->kind : "bpe";
    const bool bytes = strcmp(kind, "bytes") == 0;
    if (bytes) return mn_tokenizer_bytes(out);
    if (o->n_files == 0) return mn_fail(MN_ERR_ARGUMENT, "name at least one text file");
    if (strcmp(kind, "chars") == 0) return learn_chars(out, in, o->n_files);
    if (strcmp(kind, "bpe") == 0) return learn_merges(out, in, o);
    return mn_fail(MN_ERR_ARGUMENT, "no kind is called \"%s\"; there are bpe, bytes, chars", kind);
}

mn_status mn_tokenizer_verb_train(const mn_tokenizer_options *o) {
    mn_tokenizer *tokenizer = NULL;
    inputs in = { 0 };
    if (!o->out) return mn_fail(MN_ERR_ARGUMENT, "say where to write: -o tokenizer.json");
    mn_status st = open_inputs(&in, o);
    if (st == MN_OK) st = learn(&tokenizer, &in, o);
    if (st == MN_OK) st = mn_folder_make_above(o->out);
    if (st == MN_OK) st = mn_tokenizer_save(tokenizer, o->out);
    if (st == MN_OK) {
        printf("%s: %" PRId64 " tokens (%s) from %zu bytes in %d files\n", o->out,
               mn_tokenizer_size(tokenizer), mn_tokenizer_kind(tokenizer), in.bytes, o->n_files);
        if (o->vocab_size > mn_tokenizer_size(tokenizer)) {
            printf("no more pairs occur often enough; --min-count 1 or more text gives more\n");
        }
    }
    mn_tokenizer_destroy(tokenizer);
    close_inputs(&in, o->n_files);
    return st;
}
