/* tokenizer_use.c - mneme tokenizer encode, decode, info. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/status.h"
#include "cli/tokenizer.h"
#include "io/json.h"
#include "io/json_write.h"

static mn_status load(mn_tokenizer **out, const mn_tokenizer_options *o) {
    return mn_tokenizer_load(out, o->tokenizer ? o->tokenizer : "tokenizer.json");
}

static mn_status finish_output(mn_status st) {
    if (st == MN_OK && (fflush(stdout) != 0 || ferror(stdout))) {
        return mn_fail(MN_ERR_IO, "standard output: %s", strerror(errno));
    }
    return st;
}

/* ---- encode ---------------------------------------------------------------------------------- */

static void print_ids(const mn_token_list *list, const char *open, const char *between,
                      const char *close) {
    fputs(open, stdout);
    for (int64_t i = 0; i < list->count; i++) {
        printf("%s%d", i > 0 ? between : "", (int)list->ids[i]);
    }
    puts(close);
}

/* The text of one token as JSON; bytes that are no text by themselves show as U+FFFD. */
static json_t *token_text(const mn_tokenizer *t, int32_t id) {
    mn_text clean = { 0 };
    char *text = NULL;
    size_t size = 0;
    json_t *value = NULL;
    if (mn_tokenizer_decode(t, &id, 1, true, &text, &size) == MN_OK &&
        mn_text_add_utf8(&clean, text, size) == MN_OK) {
        value = json_stringn(clean.bytes ? clean.bytes : "", clean.size);
    }
    free(text);
    mn_text_free(&clean);
    return value ? value : json_null();
}

static mn_status print_json(const json_t *root) {
    char *text = NULL;
    const mn_status st = mn_json_text(&text, root, MN_JSON_PRETTY);
    if (st == MN_OK) puts(text);
    free(text);
    return st;
}

static mn_status encode_json(const mn_tokenizer *t, const mn_token_list *list, size_t bytes) {
    json_t *ids = json_array(), *texts = json_array();
    for (int64_t i = 0; i < list->count; i++) {
        json_array_append_new(ids, json_integer(list->ids[i]));
        json_array_append_new(texts, token_text(t, list->ids[i]));
    }
    json_t *root = json_pack("{s:I, s:I, s:o, s:o}", "bytes", (json_int_t)bytes, "count",
                             (json_int_t)list->count, "ids", ids, "tokens", texts);
    const mn_status st = root ? print_json(root) : mn_fail(MN_ERR_MEMORY, "no memory for JSON");
    json_decref(root);
    return st;
}

/* One JSON line: a text, or an object with "text". */
static mn_status encode_line(const mn_tokenizer *t, const char *line, size_t size, int64_t number,
                             bool special) {
    char name[40];
    mn_json root;
    mn_token_list list = { 0 };
    snprintf(name, sizeof name, "line %" PRId64, number);
    mn_status st = mn_json_parse(&root, line, size, name, MN_JSON_STANDARD);
    if (st != MN_OK) return st;
    const char *text = NULL;
    if (json_is_object(root.value)) st = mn_json_get_text(&text, &root, "text");
    else st = mn_json_read_text(&text, &root);
    if (st == MN_OK) st = mn_tokenizer_encode(t, text, strlen(text), special, &list);
    if (st == MN_OK) print_ids(&list, "[", ", ", "]");
    mn_token_list_free(&list);
    mn_json_free(&root);
    return st;
}

/* Calls for each line that is not empty. */
static mn_status each_line(const mn_text *in, const mn_tokenizer *t, bool flag,
                           mn_status (*use)(const mn_tokenizer *t, const char *line, size_t size,
                                            int64_t number, bool flag)) {
    mn_status st = MN_OK;
    int64_t number = 1;
    for (size_t at = 0; at < in->size && st == MN_OK; number++) {
        const char *end = memchr(in->bytes + at, '\n', in->size - at);
        const size_t size = end ? (size_t)(end - in->bytes) - at : in->size - at;
        if (size > 0) st = use(t, in->bytes + at, size, number, flag);
        at += size + 1;
    }
    return st;
}

mn_status mn_tokenizer_verb_encode(const mn_tokenizer_options *o) {
    mn_tokenizer *t = NULL;
    mn_text text = { 0 };
    mn_token_list list = { 0 };
    mn_status st = load(&t, o);
    if (st == MN_OK) st = mn_read_input(&text, o->files[0]);
    if (st == MN_OK && o->lines) {
        st = each_line(&text, t, !o->plain, encode_line);
    } else if (st == MN_OK) {
        const double start = mn_seconds();
        st = mn_tokenizer_encode(t, text.bytes, text.size, !o->plain, &list);
        const double seconds = mn_seconds() - start;
        if (st == MN_OK && o->count) {
            printf("%" PRId64 " tokens, %zu bytes, %.2f bytes per token, %.3f s, %.1f MB/s\n",
                   list.count, text.size, list.count ? (double)text.size / (double)list.count : 0,
                   seconds, seconds > 0 ? 1e-6 * (double)text.size / seconds : 0);
        } else if (st == MN_OK && o->json) {
            st = encode_json(t, &list, text.size);
        } else if (st == MN_OK) {
            print_ids(&list, "", " ", "");
        }
    }
    mn_token_list_free(&list);
    mn_text_free(&text);
    mn_tokenizer_destroy(t);
    return finish_output(st);
}

/* ---- decode ---------------------------------------------------------------------------------- */

static mn_status read_ids(mn_token_list *out, const char *text, size_t size) {
    mn_status st = MN_OK;
    for (size_t at = 0; at < size && st == MN_OK;) {
        if (strchr(" \t\r\n,[]", text[at]) && text[at]) {
            at++;
            continue;
        }
        int64_t id = 0;
        const size_t start = at;
        while (at < size && text[at] >= '0' && text[at] <= '9' && id < INT32_MAX / 10) {
            id = 10 * id + (text[at++] - '0');
        }
        if (at == start || (at < size && !strchr(" \t\r\n,[]", text[at]))) {
            return mn_fail(MN_ERR_FORMAT, "byte %zu: expected numbers of tokens, found \"%.*s\"",
                           start, (int)(size - start < 12 ? size - start : 12), text + start);
        }
        st = mn_token_list_add(out, (int32_t)id);
    }
    return st;
}

/* A JSON string, in which bytes that are no text have to show as U+FFFD. */
static mn_status decode_line(const mn_tokenizer *t, const char *line, size_t size, int64_t number,
                             bool special) {
    mn_token_list list = { 0 };
    mn_text clean = { 0 };
    char *text = NULL, *json = NULL;
    size_t text_size = 0;
    mn_status st = read_ids(&list, line, size);
    (void)number;
    if (st == MN_OK) st = mn_tokenizer_decode(t, list.ids, list.count, special, &text, &text_size);
    if (st == MN_OK) st = mn_text_add_utf8(&clean, text, text_size);
    json_t *value = st == MN_OK ? json_stringn(clean.bytes ? clean.bytes : "", clean.size) : NULL;
    if (st == MN_OK && !value) st = mn_fail(MN_ERR_MEMORY, "no memory for JSON");
    if (st == MN_OK) st = mn_json_text(&json, value, MN_JSON_COMPACT);
    if (st == MN_OK) puts(json);
    json_decref(value);
    free(json);
    free(text);
    mn_text_free(&clean);
    mn_token_list_free(&list);
    return st;
}

mn_status mn_tokenizer_verb_decode(const mn_tokenizer_options *o) {
    mn_tokenizer *t = NULL;
    mn_text in = { 0 };
    mn_token_list list = { 0 };
    char *text = NULL;
    size_t size = 0;
    mn_status st = load(&t, o);
    if (st == MN_OK) st = mn_read_input(&in, o->files[0]);
    if (st == MN_OK && o->lines) {
        st = each_line(&in, t, o->keep_special, decode_line);
    } else if (st == MN_OK) {
        st = read_ids(&list, in.bytes, in.size);
        if (st == MN_OK) {
            st = mn_tokenizer_decode(t, list.ids, list.count, o->keep_special, &text, &size);
        }
        if (st == MN_OK && size > 0) fwrite(text, 1, size, stdout);
    }
    free(text);
    mn_token_list_free(&list);
    mn_text_free(&in);
    mn_tokenizer_destroy(t);
    return finish_output(st);
}

/* ---- info ------------------------------------------------------------------------------------ */

static json_t *token_json(const mn_tokenizer *t, int32_t id) {
    if (id < 0) return json_null();
    return json_pack("{s:i, s:o}", "id", (int)id, "text", token_text(t, id));
}

static void print_end(const mn_tokenizer *t, const char *what, int32_t id) {
    char *text = NULL;
    size_t size = 0;
    if (id < 0) printf("%-12s none\n", what);
    else if (mn_tokenizer_decode(t, &id, 1, true, &text, &size) == MN_OK) {
        printf("%-12s %d %s\n", what, (int)id, text);
    }
    free(text);
}

mn_status mn_tokenizer_verb_info(const mn_tokenizer_options *o) {
    mn_tokenizer *t = NULL;
    mn_tokenizer_options own = *o;
    if (o->n_files > 0) own.tokenizer = o->files[0];
    mn_status st = load(&t, &own);
    if (st != MN_OK) return st;
    const int64_t size = mn_tokenizer_size(t);
    char fingerprint[24];
    snprintf(fingerprint, sizeof fingerprint, "%016" PRIx64, mn_tokenizer_fingerprint(t));
    if (o->json) {
        json_t *root = json_pack("{s:s, s:I, s:o, s:o, s:s}", "kind", mn_tokenizer_kind(t), "size",
                                 (json_int_t)size, "bos", token_json(t, mn_tokenizer_bos(t)), "eos",
                                 token_json(t, mn_tokenizer_eos(t)), "fingerprint", fingerprint);
        st = root ? print_json(root) : mn_fail(MN_ERR_MEMORY, "no memory for JSON");
        json_decref(root);
    } else {
        printf("%-12s %s\n%-12s %" PRId64 "\n", "kind", mn_tokenizer_kind(t), "size", size);
        print_end(t, "begin", mn_tokenizer_bos(t));
        print_end(t, "end", mn_tokenizer_eos(t));
        printf("%-12s %s\n", "fingerprint", fingerprint);
    }
    mn_tokenizer_destroy(t);
    return finish_output(st);
}
