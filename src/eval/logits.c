/* logits.c - logits of rows of tokens as a file. */
#include "eval/logits.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "data/corpus.h"
#include "io/file.h"
#include "io/json.h"
#include "io/safetensors.h"
#include "model/pass.h"

/* ---- ids ------------------------------------------------------------------------------------- */

static mn_status add_id(mn_token_list *out, int64_t id, int64_t vocabulary, const char *path) {
    if (id >= 0 && id < vocabulary) return mn_token_list_add(out, (int32_t)id);
    return mn_fail(MN_ERR_ARGUMENT, "%s: id %" PRId64 " at %" PRId64 " is outside the model's "
                   "vocabulary of %" PRId64, path, id, out->count, vocabulary);
}

static mn_status read_bin(mn_token_list *out, const char *path, int64_t vocabulary) {
    const mn_corpus_options how = { .paths = &path, .n_paths = 1, .vocab_size = vocabulary,
                                    .document_end = MN_DOCUMENT_END_NONE };
    mn_corpus *corpus = NULL;
    mn_status st = mn_corpus_open(&corpus, &how, NULL);
    if (st != MN_OK) return st;
    const int64_t n = mn_corpus_tokens(corpus);
    out->ids = malloc((size_t)(n + 1) * sizeof *out->ids);
    if (!out->ids) st = mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " tokens", n);
    if (st == MN_OK) st = mn_corpus_read(corpus, 0, n, out->ids);
    out->count = out->capacity = n;
    mn_corpus_destroy(corpus);
    return st;
}

static mn_status read_row(mn_token_list *out, const mn_json *row, const char *path,
                          int64_t vocabulary) {
    mn_status st = mn_json_expect_list(row);
    for (int64_t i = 0; st == MN_OK && i < mn_json_count(row); i++) {
        const mn_json item = mn_json_item(row, i);
        int64_t id = -1;
        st = mn_json_read_i64(&id, &item);
        if (st == MN_OK) st = add_id(out, id, vocabulary, path);
    }
    return st;
}

/* A row, or a list of rows. */
static mn_status read_list(mn_token_list *out, mn_token_list *ends, const mn_file *file,
                           const char *path, int64_t vocabulary) {
    mn_json root = { 0 };
    mn_status st = mn_json_parse(&root, file->bytes, file->size, path, MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_json_expect_list(&root);
    const int64_t n = st == MN_OK ? mn_json_count(&root) : 0;
    const mn_json first = n ? mn_json_item(&root, 0) : root;
    if (st == MN_OK && n && mn_json_expect_list(&first) == MN_OK) {
        for (int64_t i = 0; st == MN_OK && i < n; i++) {
            const mn_json row = mn_json_item(&root, i);
            const int64_t start = out->count;
            st = read_row(out, &row, path, vocabulary);
            if (st == MN_OK && out->count == start) {
                st = mn_fail(MN_ERR_FORMAT, "%s: row %" PRId64 " holds no tokens", path, i);
            }
            if (st == MN_OK) st = mn_token_list_add(ends, (int32_t)out->count);
        }
    } else if (st == MN_OK) {
        st = read_row(out, &root, path, vocabulary);
    }
    mn_json_free(&root);
    return st;
}

static mn_status read_numbers(mn_token_list *out, const mn_file *file, const char *path,
                              int64_t vocabulary) {
    mn_status st = MN_OK;
    for (size_t at = 0; at < file->size && st == MN_OK;) {
        const unsigned char c = file->bytes[at];
        if (isspace(c) || c == ',') {
            at++;
            continue;
        }
        int64_t id = 0;
        const size_t start = at;
        for (; at < file->size && isdigit(file->bytes[at]) && at - start < 18; at++) {
            id = 10 * id + (file->bytes[at] - '0');
        }
        const bool ends = at == file->size || isspace(file->bytes[at]) || file->bytes[at] == ',';
        if (at == start || !ends) {
            return mn_fail(MN_ERR_FORMAT, "%s: what stands at byte %zu is no token id; give whole "
                           "numbers, a JSON list, or a file that ends in .bin", path, start);
        }
        st = add_id(out, id, vocabulary, path);
    }
    return st;
}

mn_status mn_logits_read_ids(mn_token_list *out, mn_token_list *ends, const char *path,
                             int64_t vocabulary) {
    mn_file file = { 0 };
    const size_t n = strlen(path);
    *out = *ends = (mn_token_list){ 0 };
    mn_status st;
    if (n > 4 && strcmp(path + n - 4, ".bin") == 0) {
        st = read_bin(out, path, vocabulary);
    } else {
        st = mn_file_map(&file, path);
        size_t at = 0;
        while (st == MN_OK && at < file.size && isspace(file.bytes[at])) at++;
        const bool list = st == MN_OK && at < file.size && file.bytes[at] == '[';
        if (list) st = read_list(out, ends, &file, path, vocabulary);
        else if (st == MN_OK) st = read_numbers(out, &file, path, vocabulary);
    }
    if (st == MN_OK && out->count == 0) st = mn_fail(MN_ERR_FORMAT, "%s holds no tokens", path);
    if (st == MN_OK && ends->count == 0) st = mn_token_list_add(ends, (int32_t)out->count);
    mn_file_unmap(&file);
    if (st != MN_OK) mn_token_list_free(out), mn_token_list_free(ends);
    return st;
}

/* ---- logits ---------------------------------------------------------------------------------- */

enum { LEAST_CHUNK = 16 };
static const size_t budget = (size_t)1 << 30;

typedef struct results {
    char *logits;              // (T, vocabulary)
    float *variance;           // (beliefs, T), and room for one pass behind it
    size_t row_bytes;
    int n_beliefs;
} results;

static mn_status make_room(results *r, const mn_model *model, int64_t T, int64_t chunk) {
    size_t bytes = 0, variances = 0;
    const int64_t V = mn_model_describe(model)->vocab_size;
    r->n_beliefs = mn_model_beliefs(model);
    const bool fits =
        mn_mul_size(&r->row_bytes, (size_t)V, mn_dtype_bytes(mn_model_dtype(model))) &&
        mn_mul_size(&bytes, r->row_bytes, (size_t)T) &&
        mn_mul_size(&variances, (size_t)r->n_beliefs * sizeof *r->variance, (size_t)(T + chunk));
    if (fits) {
        r->logits = malloc(bytes);
        r->variance = malloc(variances + 1);
    }
    if (r->logits && r->variance) return MN_OK;
    return mn_fail(MN_ERR_MEMORY, "no memory for the logits of %" PRId64 " tokens; take fewer", T);
}

static mn_status pass(results *r, mn_model *model, mn_tape *tape, mn_model_state *state,
                      const mn_token_list *tokens, int64_t at, int64_t n) {
    float *fresh = r->n_beliefs ? r->variance + r->n_beliefs * tokens->count : NULL;
    const mn_model_input in = { .tokens = tokens->ids + at, .B = 1, .T = n, .state = state,
                                .variance = fresh };
    mn_tape_start(tape, MN_TAPE_FORWARD);
    const mn_tensor *logits = mn_model_logits(model, tape, mn_model_hidden(model, tape, &in));
    if (mn_tape_status(tape) != MN_OK) return mn_tape_status(tape);
    char *to = r->logits + r->row_bytes * (size_t)at;
    if (mn_model_dtype(model) == MN_F64) {
        memcpy(to, logits->data, r->row_bytes * (size_t)n);
    } else {
        const mn_status st = mn_tape_read(tape, logits, (float *)to);
        if (st != MN_OK) return st;
    }
    for (int i = 0; i < r->n_beliefs; i++) {
        memcpy(r->variance + i * tokens->count + at, fresh + i * n, (size_t)n * sizeof *fresh);
    }
    return MN_OK;
}

static mn_status save(const results *r, const char *path, const mn_model *model,
                      const mn_token_list *tokens) {
    const int64_t T = tokens->count, V = mn_model_describe(model)->vocab_size;
    const bool f64 = mn_model_dtype(model) == MN_F64;
    const mn_stored_tensor tensors[] = {
        { .name = "logits", .dtype = f64 ? MN_STORED_F64 : MN_STORED_F32, .rank = 2,
          .shape = { T, V }, .data = r->logits, .bytes = r->row_bytes * (size_t)T },
        { .name = "tokens", .dtype = MN_STORED_I32, .rank = 1, .shape = { T },
          .data = tokens->ids, .bytes = (size_t)T * sizeof *tokens->ids },
        { .name = "variance", .dtype = MN_STORED_F32, .rank = 2, .shape = { r->n_beliefs, T },
          .data = r->variance, .bytes = (size_t)(r->n_beliefs * T) * sizeof *r->variance },
    };
    return mn_safetensors_write(path, tensors, r->n_beliefs ? 3 : 2, NULL, 0);
}

/* Tokens [from, to) as a sequence of its own, `chunk` at a time. */
static mn_status row_logits(results *r, mn_model *model, mn_tape *tape,
                            const mn_token_list *tokens, int64_t from, int64_t to,
                            int64_t chunk) {
    mn_model_state state = { 0 };
    const bool cut = chunk < to - from;
    mn_status st = cut ? mn_model_state_create(&state, model) : MN_OK;
    for (int64_t at = from; at < to && st == MN_OK; at += chunk) {
        st = pass(r, model, tape, cut ? &state : NULL, tokens, at, mn_min(chunk, to - at));
    }
    mn_model_state_free(&state);
    return st;
}

static int64_t row_start(const mn_token_list *ends, int64_t i) {
    return i ? ends->ids[i - 1] : 0;
}

mn_status mn_logits_write(const char *path, mn_context *context, mn_model *model,
                          const mn_token_list *tokens, const mn_token_list *ends,
                          int64_t per_pass) {
    results r = { 0 };
    mn_tape *tape = NULL;
    int64_t T = 0;
    for (int64_t i = 0; i < ends->count; i++) T = mn_max(T, ends->ids[i] - row_start(ends, i));
    int64_t chunk = per_pass ? mn_min(per_pass, T) : T;
    mn_status st = mn_model_place(model, context, mn_model_pass_dtype(model));
    if (st == MN_OK) st = mn_tape_create(&tape, context, mn_model_pass_dtype(model));
    if (st == MN_OK && per_pass == 0) {
        st = mn_pass_tokens(&chunk, model, tape, 1, mn_min(LEAST_CHUNK, T), T, budget);
    }
    if (st == MN_OK) st = make_room(&r, model, tokens->count, chunk);
    for (int64_t i = 0; i < ends->count && st == MN_OK; i++) {
        st = row_logits(&r, model, tape, tokens, row_start(ends, i), ends->ids[i], chunk);
    }
    if (st == MN_OK) st = save(&r, path, model, tokens);
    mn_tape_destroy(tape);
    free(r.logits);
    free(r.variance);
    return st;
}
