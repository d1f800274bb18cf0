/* ids.c - the tokens of a text as plain memory, for callers without token lists. */
#include <stdlib.h>

#include "base/status.h"
#include "tokenizer/tokenizer.h"

mn_status mn_tokenizer_ids(int32_t **ids, int64_t *count, const mn_tokenizer *tokenizer,
                           const char *text, size_t size, bool special) {
    mn_token_list list = { 0 };
    if (ids) *ids = NULL;
    if (!ids || !count || !tokenizer || (size > 0 && !text)) {
        return mn_fail(MN_ERR_ARGUMENT, "mn_tokenizer_ids: an argument is NULL");
    }
    *count = 0;
    mn_status st = mn_tokenizer_encode(tokenizer, text, size, special, &list);
    if (st == MN_OK && !list.ids) list.ids = malloc(sizeof *list.ids);    // never NULL on success
    if (st == MN_OK && !list.ids) st = mn_fail(MN_ERR_MEMORY, "no memory for tokens");
    if (st != MN_OK) {
        mn_token_list_free(&list);
        return st;
    }
    *ids = list.ids;
    *count = list.count;
    return MN_OK;
}
