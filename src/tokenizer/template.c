/* template.c - the "post_processor" of a tokenizer.json: tokens put around a text.
 *
 * Whatever the types say comes down to a list in front and a list behind. Only the template of a
 * single text is read; ByteLevel moves offsets, which there are none of here. */
#include <inttypes.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "tokenizer/tokenizer_internal.h"

static mn_status check_id(int64_t id, int64_t n_ids, const mn_json *at) {
    if (id >= 0 && id < n_ids) return MN_OK;
    return mn_json_fail(at, "id %" PRId64 " is outside the vocabulary of %" PRId64, id, n_ids);
}

/* Puts `add` in front of `list`. */
static mn_status put_before(mn_token_list *list, const mn_token_list *add) {
    mn_status st = MN_OK;
    for (int64_t i = 0; i < add->count && st == MN_OK; i++) st = mn_token_list_add(list, 0);
    if (st != MN_OK || add->count == 0) return st;
    memmove(list->ids + add->count, list->ids,
            (size_t)(list->count - add->count) * sizeof *list->ids);
    memcpy(list->ids, add->ids, (size_t)add->count * sizeof *list->ids);
    return MN_OK;
}

static mn_status put_behind(mn_token_list *list, const mn_token_list *add) {
    mn_status st = MN_OK;
    for (int64_t i = 0; i < add->count && st == MN_OK; i++) {
        st = mn_token_list_add(list, add->ids[i]);
    }
    return st;
}

static mn_status wrap(mn_template *out, const mn_template *around) {
    const mn_status st = put_before(&out->before, &around->before);
    return st == MN_OK ? put_behind(&out->after, &around->after) : st;
}

/* {"SpecialToken": {"id": NAME}}: the ids that special_tokens gives for NAME. */
static mn_status read_special(mn_token_list *out, const mn_json *special, const mn_json *names,
                              int64_t n_ids) {
    const char *name = NULL;
    mn_status st = mn_json_get_text(&name, special, "id");
    if (st != MN_OK) return st;
    const mn_json entry = mn_json_member(names, name), ids = mn_json_member(&entry, "ids");
    st = mn_json_expect_list(&ids);
    for (int64_t i = 0; i < mn_json_count(&ids) && st == MN_OK; i++) {
        const mn_json item = mn_json_item(&ids, i);
        int64_t id = -1;
        st = mn_json_read_i64(&id, &item);
        if (st == MN_OK) st = check_id(id, n_ids, &item);
        if (st == MN_OK) st = mn_token_list_add(out, (int32_t)id);
    }
    return st;
}

static mn_status read_template(mn_template *out, const mn_json *at, int64_t n_ids) {
    const mn_json single = mn_json_member(at, "single");
    const mn_json names = mn_json_member(at, "special_tokens");
    mn_status st = mn_json_expect_list(&single);
    int64_t n_texts = 0;
    for (int64_t i = 0; i < mn_json_count(&single) && st == MN_OK; i++) {
        const mn_json item = mn_json_item(&single, i);
        const mn_json special = mn_json_member(&item, "SpecialToken");
        const mn_json sequence = mn_json_member(&item, "Sequence");
        if (mn_json_given(&sequence)) n_texts++;
        else st = read_special(n_texts ? &out->after : &out->before, &special, &names, n_ids);
    }
    if (st == MN_OK && n_texts != 1) {
        st = mn_json_fail(&single, "expected the text once, found it %" PRId64 " times", n_texts);
    }
    return st;
}

/* ["</s>", 2] */
static mn_status read_pair(mn_token_list *out, const mn_json *at, const char *key, int64_t n_ids) {
    const mn_json pair = mn_json_member(at, key), number = mn_json_item(&pair, 1);
    int64_t id = -1;
    mn_status st = mn_json_read_i64(&id, &number);
    if (st == MN_OK) st = check_id(id, n_ids, &number);
    return st == MN_OK ? mn_token_list_add(out, (int32_t)id) : st;
}

static mn_status read_roberta(mn_template *out, const mn_json *at, int64_t n_ids) {
    const mn_status st = read_pair(&out->before, at, "cls", n_ids);
    return st == MN_OK ? read_pair(&out->after, at, "sep", n_ids) : st;
}

static mn_status read_nothing(mn_template *out, const mn_json *at, int64_t n_ids) {
    (void)out, (void)at, (void)n_ids;
    return MN_OK;
}

static const struct {
    const char *type;
    mn_status (*read)(mn_template *out, const mn_json *at, int64_t n_ids);
} kinds[] = {
    { "ByteLevel", read_nothing },
    { "TemplateProcessing", read_template },
    { "RobertaProcessing", read_roberta },
    { "BertProcessing", read_roberta },
};

mn_status mn_template_read(mn_template *out, const mn_json *at, int64_t n_ids) {
    const char *type = NULL;
    if (!mn_json_given(at)) return MN_OK;
    mn_status st = mn_json_get_text(&type, at, "type");
    if (st == MN_OK && strcmp(type, "Sequence") == 0) {
        const mn_json list = mn_json_member(at, "processors");
        st = mn_json_expect_list(&list);
        for (int64_t i = 0; i < mn_json_count(&list) && st == MN_OK; i++) {
            const mn_json item = mn_json_item(&list, i);
            st = mn_template_read(out, &item, n_ids);
        }
        return st;
    }
    for (size_t i = 0; i < MN_COUNTOF(kinds) && st == MN_OK; i++) {
        if (strcmp(kinds[i].type, type) != 0) continue;
        mn_template around = { 0 };
        st = kinds[i].read(&around, at, n_ids);
        if (st == MN_OK) st = wrap(out, &around);
        mn_template_free(&around);
        return st;
    }
    if (st != MN_OK) return st;
    return mn_json_fail(at, "post_processor type \"%s\" is not supported; there are ByteLevel, "
                        "TemplateProcessing, RobertaProcessing, BertProcessing, Sequence", type);
}

void mn_template_free(mn_template *out) {
    mn_token_list_free(&out->before);
    mn_token_list_free(&out->after);
}
