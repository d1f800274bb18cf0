/* normalise.c - the "normalizer" of a tokenizer.json: text to text, step by step.
 *
 * The rows of normalisers.def name the types; "Sequence" is flattened while reading. */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "tokenizer/tokenizer_internal.h"
#include "tokenizer/unicode/unicode.h"
#include "base/utf8.h"

/* ---- what the steps do ----------------------------------------------------------------------- */

static mn_status apply_form(mn_text *out, const mn_normal_step *step, const char *text,
                            size_t size) {
    return mn_unicode_normalise(out, text, size, (mn_normal_form)step->form);
}

static mn_status apply_lower(mn_text *out, const mn_normal_step *step, const char *text,
                             size_t size) {
    (void)step;
    return mn_unicode_lower(out, text, size);
}

static mn_status apply_prepend(mn_text *out, const mn_normal_step *step, const char *text,
                               size_t size) {
    mn_status st = MN_OK;
    if (size > 0) st = mn_text_add(out, step->content, strlen(step->content));
    return st == MN_OK ? mn_text_add(out, text, size) : st;
}

static mn_status apply_replace(mn_text *out, const mn_normal_step *step, const char *text,
                               size_t size) {
    return mn_pattern_replace(out, &step->pattern, step->content, text, size);
}

static mn_status apply_strip(mn_text *out, const mn_normal_step *step, const char *text,
                             size_t size) {
    uint32_t point;
    while (step->left && size > 0) {
        const size_t length = (size_t)mn_utf8_take(text, size, &point);
        if (!mn_unicode_is_space(point)) break;
        text += length;
        size -= length;
    }
    while (step->right && size > 0) {
        size_t at = size - 1;
        while (at > 0 && ((uint8_t)text[at] & 0xC0) == 0x80) at--;
        mn_utf8_take(text + at, size - at, &point);
        if (!mn_unicode_is_space(point)) break;
        size = at;
    }
    return mn_text_add(out, text, size);
}

static mn_status apply_accents(mn_text *out, const mn_normal_step *step, const char *text,
                               size_t size) {
    (void)step;
    return mn_strip_accents(out, text, size);
}

static mn_status apply_bert(mn_text *out, const mn_normal_step *step, const char *text,
                            size_t size) {
    mn_text between = { 0 };
    const mn_status st = mn_bert_normalise(out, &between, text, size, &step->bert);
    mn_text_free(&between);
    return st;
}

/* ---- reading --------------------------------------------------------------------------------- */

static mn_status copy_text(char **out, const mn_json *at, const char *key) {
    const char *text = NULL;
    const mn_status st = mn_json_get_text(&text, at, key);
    if (st != MN_OK) return st;
    *out = strdup(text);
    return *out ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a normalizer");
}

static mn_status read_form(mn_normal_step *step, const mn_json *at, const char *type) {
    static const char *const names[] = { [MN_NFC] = "NFC", [MN_NFD] = "NFD", [MN_NFKC] = "NFKC",
                                         [MN_NFKD] = "NFKD" };
    (void)at;
    for (int i = 0; i < (int)MN_COUNTOF(names); i++) {
        if (strcmp(names[i], type) == 0) step->form = i;
    }
    return MN_OK;
}

static mn_status read_lower(mn_normal_step *step, const mn_json *at, const char *type) {
    (void)step, (void)at, (void)type;
    return MN_OK;
}

static mn_status read_prepend(mn_normal_step *step, const mn_json *at, const char *type) {
    (void)type;
    return copy_text(&step->content, at, "prepend");
}

static mn_status read_replace(mn_normal_step *step, const mn_json *at, const char *type) {
    const mn_json pattern = mn_json_member(at, "pattern");
    const mn_status st = mn_pattern_read(&step->pattern, &pattern);
    (void)type;
    return st == MN_OK ? copy_text(&step->content, at, "content") : st;
}

static mn_status read_strip(mn_normal_step *step, const mn_json *at, const char *type) {
    const mn_status st = mn_json_get_bool(&step->left, at, "strip_left");
    (void)type;
    return st == MN_OK ? mn_json_get_bool(&step->right, at, "strip_right") : st;
}

static mn_status read_accents(mn_normal_step *step, const mn_json *at, const char *type) {
    (void)step, (void)at, (void)type;
    return MN_OK;
}

/* Without a word on accents they go where letters become small. */
static mn_status read_bert(mn_normal_step *step, const mn_json *at, const char *type) {
    mn_bert_rules *rules = &step->bert;
    *rules = (mn_bert_rules){ .clean = true, .chinese = true, .lower = true };
    (void)type;
    mn_status st = mn_json_opt_bool(&rules->clean, at, "clean_text");
    if (st == MN_OK) st = mn_json_opt_bool(&rules->chinese, at, "handle_chinese_chars");
    if (st == MN_OK) st = mn_json_opt_bool(&rules->lower, at, "lowercase");
    rules->accents = rules->lower;
    return st == MN_OK ? mn_json_opt_bool(&rules->accents, at, "strip_accents") : st;
}

static const struct {
    const char *type;
    mn_status (*read)(mn_normal_step *step, const mn_json *at, const char *type);
    mn_status (*apply)(mn_text *out, const mn_normal_step *step, const char *text, size_t size);
} kinds[] = {
#define NORMALISER(type, what) { #type, read_##what, apply_##what },
#include "tokenizer/normalisers.def"
#undef NORMALISER
};

static mn_status read_step(mn_normaliser *out, const mn_json *at, const char *type) {
    size_t kind = 0;
    while (kind < MN_COUNTOF(kinds) && strcmp(kinds[kind].type, type) != 0) kind++;
    if (kind == MN_COUNTOF(kinds)) {
        return mn_unknown_type(at, "normalizer", type, &kinds[0].type, MN_COUNTOF(kinds),
                               sizeof kinds[0]);
    }
    mn_normal_step *steps = realloc(out->steps, (size_t)(out->count + 1) * sizeof *steps);
    if (!steps) return mn_fail(MN_ERR_MEMORY, "no memory for a normalizer");
    out->steps = steps;
    mn_normal_step *step = &steps[out->count++];
    *step = (mn_normal_step){ .apply = kinds[kind].apply };
    return kinds[kind].read(step, at, type);
}

mn_status mn_normaliser_read(mn_normaliser *out, const mn_json *at) {
    const char *type = NULL;
    if (!mn_json_given(at)) return MN_OK;
    mn_status st = mn_json_get_text(&type, at, "type");
    if (st != MN_OK) return st;
    if (strcmp(type, "Sequence") != 0) return read_step(out, at, type);
    const mn_json list = mn_json_member(at, "normalizers");
    st = mn_json_expect_list(&list);
    for (int64_t i = 0; i < mn_json_count(&list) && st == MN_OK; i++) {
        const mn_json item = mn_json_item(&list, i);
        st = mn_normaliser_read(out, &item);
    }
    return st;
}

void mn_normaliser_free(mn_normaliser *normaliser) {
    for (int64_t i = 0; i < normaliser->count; i++) {
        mn_pattern_free(&normaliser->steps[i].pattern);
        free(normaliser->steps[i].content);
    }
    free(normaliser->steps);
    *normaliser = (mn_normaliser){ 0 };
}

mn_status mn_normalise(const mn_normaliser *normaliser, mn_text *a, mn_text *b, mn_span text,
                       mn_span *result) {
    mn_status st = MN_OK;
    for (int64_t i = 0; i < normaliser->count && st == MN_OK; i++) {
        mn_text *out = i % 2 == 0 ? a : b;
        out->size = 0;
        st = mn_text_reserve(out, 1);
        const mn_normal_step *step = &normaliser->steps[i];
        if (st == MN_OK) st = step->apply(out, step, text.bytes, text.size);
        text = (mn_span){ out->bytes, out->size };
    }
    *result = text;
    return st;
}
