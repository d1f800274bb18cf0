/* needle_prompt.c - prompts of the alignment diagnostic: plain sentences, turned on from variant to
 * variant, with the needle in the middle and its question at the end. */
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "experiments/looks/look.h"
#include "io/text.h"

static const struct {
    const char *sentence, *question;
} variants[] = {
#define VARIANT(sentence, question) { sentence, question },
#include "experiments/looks/needle_texts.def"
};

static const char *const fillers[] = {
#define FILLER(sentence) sentence,
#include "experiments/looks/needle_texts.def"
};

int64_t mn_needle_variants(void) {
    return (int64_t)MN_COUNTOF(variants);
}

static mn_status add_fillers(mn_text *text, int64_t from, int64_t n) {
    mn_status st = MN_OK;
    for (int64_t i = 0; st == MN_OK && i < n; i++) {
        const char *sentence = fillers[(size_t)(from + i) % MN_COUNTOF(fillers)];
        st = mn_text_add(text, sentence, strlen(sentence));
        if (st == MN_OK) st = mn_text_add(text, " ", 1);
    }
    return st;
}

/* Tokens so far. */
static mn_status count_tokens(int64_t *count, const mn_tokenizer *tokenizer, const mn_text *text) {
    mn_token_list list = { 0 };
    const mn_status st = mn_tokenizer_encode(tokenizer, text->bytes, text->size, false, &list);
    *count = list.count;
    mn_token_list_free(&list);
    return st;
}

mn_status mn_needle_prompt(mn_needle *out, const mn_tokenizer *tokenizer, int64_t index,
                           int64_t n_fillers) {
    const size_t which = (size_t)index % MN_COUNTOF(variants);
    const char *sentence = variants[which].sentence, *question = variants[which].question;
    const int64_t from = 7 * index, before = n_fillers / 2;
    mn_text text = { 0 };
    *out = (mn_needle){ 0 };
    mn_status st = add_fillers(&text, from, before);
    if (st == MN_OK) st = count_tokens(&out->first, tokenizer, &text);
    if (st == MN_OK) st = mn_text_add(&text, sentence, strlen(sentence));
    if (st == MN_OK) st = count_tokens(&out->end, tokenizer, &text);
    if (st == MN_OK) st = mn_text_add(&text, " ", 1);
    if (st == MN_OK) st = add_fillers(&text, from + before, n_fillers - before);
    if (st == MN_OK) st = count_tokens(&out->asked, tokenizer, &text);
    if (st == MN_OK) st = mn_text_add(&text, question, strlen(question));
    if (st == MN_OK) {
        st = mn_tokenizer_encode(tokenizer, text.bytes, text.size, false, &out->tokens);
    }
    mn_text_free(&text);
    return st;
}
