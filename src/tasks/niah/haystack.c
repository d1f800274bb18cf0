/* haystack.c - long English prose as words and sentences, from a file or folder of text. */
#include "tasks/niah/haystack.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "data/text.h"

/* ---- words ----------------------------------------------------------------------------------- */

/* Bytes of the blank at `text`, 0 when there is none: ASCII's and Unicode's. */
static size_t blank_at(const char *text, size_t left) {
    static const char *const wide[] = {
        "\xC2\x85", "\xC2\xA0", "\xE1\x9A\x80", "\xE2\x80\xA8", "\xE2\x80\xA9", "\xE2\x80\xAF",
        "\xE2\x81\x9F", "\xE3\x80\x80",
    };
    const unsigned char c = (unsigned char)*text;
    if (c == ' ' || (c >= '\t' && c <= '\r') || (c >= 0x1C && c <= 0x1F) || c == 0) return 1;
    if (c < 0x80) return 0;
    if (left >= 3 && memcmp(text, "\xE2\x80", 2) == 0 && (unsigned char)text[2] >= 0x80 &&
        (unsigned char)text[2] <= 0x8A) {
        return 3;
    }
    for (size_t i = 0; i < MN_COUNTOF(wide); i++) {
        const size_t size = strlen(wide[i]);
        if (size <= left && memcmp(text, wide[i], size) == 0) return size;
    }
    return 0;
}

/* ---- sentences ------------------------------------------------------------------------------- */

typedef struct word {
    const char *text;
    size_t size;
} word;

/* Quotes and brackets, of one byte or of three. */
static size_t mark_at(const char *text, size_t size, bool last) {
    const char *at = last ? text + size - 1 : text;
    if (size >= 1 && *at && strchr("\"')]}([{*_", *at)) return 1;
    if (size < 3) return 0;
    at = last ? text + size - 3 : text;
    return memcmp(at, "\xE2\x80", 2) == 0 && (unsigned char)at[2] >= 0x98 &&
           (unsigned char)at[2] <= 0x9F ? 3 : 0;
}

static word without_closing(word w) {
    for (size_t n; (n = mark_at(w.text, w.size, true)) > 0;) w.size -= n;
    return w;
}

static word without_opening(word w) {
    for (size_t n; (n = mark_at(w.text, w.size, false)) > 0;) {
        w.text += n;
        w.size -= n;
    }
    return w;
}

static bool is_letter(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/* Words whose full stop ends no sentence; `w` is without it. */
static bool is_abbreviation(word w) {
    static const char *const known[] = {
        "mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "etc", "e.g", "i.e", "cf", "al",
        "no", "vol", "pp", "fig", "gen", "col", "lt", "sen", "rep", "gov", "capt", "inc", "ltd",
        "co", "corp", "jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov",
        "dec", "u.s", "u.k", "ph.d", "a.m", "p.m",
    };
    if (w.size == 1 && is_letter(*w.text)) return *w.text != 'I';
    for (size_t i = 0; i < MN_COUNTOF(known); i++) {
        if (strlen(known[i]) != w.size) continue;
        size_t same = 0;
        while (same < w.size && (w.text[same] | 0x20) == (known[i][same] | 0x20)) same++;
        if (same == w.size) return true;
    }
    return false;
}

static bool ends_sentence(word w, word next) {
    w = without_closing(w);
    if (w.size == 0) return false;
    const char mark = w.text[w.size - 1];
    if (mark == '?' || mark == '!') return true;
    if (mark != '.') return false;
    next = without_opening(next);
    if (next.size > 0 && *next.text >= 'a' && *next.text <= 'z') return false;
    w.size--;
    return !is_abbreviation(without_opening(w));
}

/* ---- public ---------------------------------------------------------------------------------- */

static word word_at(const mn_haystack *h, int64_t i) {
    i %= h->n_words;
    return (word){ h->text + h->start[i], (size_t)(h->start[i + 1] - h->start[i] - 1) };
}

/* Copies the words with one blank behind each, and notes where they begin. */
static void collapse(mn_haystack *out, const char *text, size_t size) {
    size_t used = 0;
    for (size_t at = 0; at < size;) {
        const size_t blank = blank_at(text + at, size - at);
        if (blank > 0) {
            at += blank;
            continue;
        }
        out->start[out->n_words++] = (int64_t)used;
        while (at < size && blank_at(text + at, size - at) == 0) out->text[used++] = text[at++];
        out->text[used++] = ' ';
    }
    out->start[out->n_words] = (int64_t)used;
}

mn_status mn_haystack_make(mn_haystack *out, const char *text, size_t size) {
    *out = (mn_haystack){ 0 };
    if (size > SIZE_MAX / 16) return mn_fail(MN_ERR_MEMORY, "the essays are too long");
    out->text = malloc(size + 2);
    out->start = malloc((size / 2 + 2) * sizeof *out->start);
    if (out->text && out->start) collapse(out, text, size);
    if (out->start) out->ends = malloc((size_t)out->n_words + 1);
    if (!out->text || !out->start || !out->ends) {
        mn_haystack_free(out);
        return mn_fail(MN_ERR_MEMORY, "no memory for essays of %zu bytes", size);
    }
    if (out->n_words == 0) {
        mn_haystack_free(out);
        return mn_fail(MN_ERR_ARGUMENT, "the essays hold no words");
    }
    for (int64_t i = 0; i < out->n_words; i++) {
        out->ends[i] = ends_sentence(word_at(out, i), word_at(out, i + 1));
    }
    return MN_OK;
}

static mn_status add_piece(void *context, const char *text, size_t size, bool closes) {
    const mn_status st = mn_text_add(context, text, size);
    return st == MN_OK && closes ? mn_text_add(context, "\n", 1) : st;
}

mn_status mn_haystack_load(mn_haystack *out, const char *path) {
    *out = (mn_haystack){ 0 };
    mn_data_files files = { 0 };
    mn_text_plan plan = { 0 };
    mn_text_buffer buffer = { 0 };
    mn_text all = { 0 };
    mn_status st = mn_data_files_list(&files, &path, 1, MN_CORPUS_AUTO);
    for (int64_t i = 0; st == MN_OK && i < files.count; i++) {
        const mn_corpus_format format = files.items[i].format;
        if (format == MN_CORPUS_TEXT || format == MN_CORPUS_JSONL) continue;
        st = mn_fail(MN_ERR_FORMAT, "%s: tokens; essays are to be text or JSON lines",
                     files.items[i].path);
    }
    if (st == MN_OK) st = mn_text_plan_make(&plan, &files, "text", NULL, 0.0, NULL);
    for (int64_t i = 0; st == MN_OK && i < plan.n_pieces; i++) {
        st = mn_text_visit(&plan, i, &buffer, add_piece, &all);
    }
    if (st == MN_OK) st = mn_haystack_make(out, all.bytes ? all.bytes : "", all.size);
    free(buffer.bytes);
    mn_text_free(&all);
    mn_text_plan_free(&plan);
    mn_data_files_free(&files);
    return st;
}

void mn_haystack_free(mn_haystack *haystack) {
    free(haystack->text);
    free(haystack->start);
    free(haystack->ends);
    *haystack = (mn_haystack){ 0 };
}

int64_t mn_haystack_sentences(const mn_haystack *haystack, int64_t n) {
    int64_t sentences = n > 0;
    for (int64_t i = 0; i + 1 < n; i++) sentences += mn_haystack_ends(haystack, i);
    return sentences;
}

mn_status mn_haystack_word(mn_text *out, const mn_haystack *haystack, int64_t i) {
    const word w = word_at(haystack, i);
    return mn_text_add(out, w.text, w.size);
}
