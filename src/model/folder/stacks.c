/* stacks.c - see stacks.h. */
#include "model/folder/stacks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"

static mn_status no_memory(const mn_stacked *at) {
    return mn_fail(MN_ERR_MEMORY, "no memory to save %s", at->name);
}

/* The tensor called so among the first n, -1 if none is. */
static int find(const mn_stack_list *list, int n, const char *name) {
    for (int i = n - 1; i >= 0; i--) {
        if (strcmp(list->names[i], name) == 0) return i;
    }
    return -1;
}

/* Room for the whole in place of its first matrix, of `wide` numbers. */
static mn_status begin(mn_stack_list *list, int i, const mn_stacked *at, int64_t E,
                       mn_stored_dtype wide) {
    mn_stored_tensor *t = &list->tensors[i];
    const int64_t rows = t->shape[0] * at->parts, cols = t->shape[1];
    int64_t count;
    size_t bytes;
    if (!mn_mul_i64(&count, E, rows) || !mn_mul_i64(&count, count, cols) ||
        !mn_mul_size(&bytes, (size_t)count, mn_stored_dtype_bytes(wide))) {
        return no_memory(at);
    }
    void *whole = malloc(bytes);
    if (!whole) return no_memory(at);
    free(list->copies[i]);
    list->copies[i] = whole;
    snprintf(list->names[i], MN_PARAM_NAME, "%s", at->name);
    *t = (mn_stored_tensor){ .name = list->names[i], .dtype = t->dtype, .rank = 3,
                             .shape = { E, rows, cols }, .data = whole,
                             .bytes = (size_t)count * mn_stored_dtype_bytes(t->dtype) };
    return MN_OK;
}

/* Makes the numbers of the whole `wide`. */
static mn_status widen(mn_stored_tensor *t, void *whole, const mn_stacked *at,
                       mn_stored_dtype wide) {
    const int64_t count = mn_stored_elements(t);
    int64_t lost;
    void *narrow = malloc(t->bytes);
    if (!narrow) return no_memory(at);
    memcpy(narrow, whole, t->bytes);
    const mn_status st = mn_stored_convert(whole, wide, narrow, t->dtype, count, &lost);
    free(narrow);
    t->dtype = wide;
    t->bytes = (size_t)count * mn_stored_dtype_bytes(wide);
    return st;
}

mn_status mn_stack_add(mn_stack_list *list, const mn_stacked *at, int64_t E,
                       mn_stored_dtype wide) {
    const int last = list->n - 1;
    const mn_stored_tensor piece = list->tensors[last];
    void *held = list->copies[last];
    int i = find(list, last, at->name);
    mn_status st = MN_OK;
    list->copies[last] = NULL;
    if (i < 0) st = begin(list, i = last, at, E, wide);
    else list->n--;
    mn_stored_tensor *t = &list->tensors[i];
    if (st == MN_OK && t->dtype != wide && t->dtype != piece.dtype) {
        st = widen(t, list->copies[i], at, wide);
    }
    if (st == MN_OK) {
        const int64_t count = piece.shape[0] * piece.shape[1];
        const size_t each = (size_t)count * mn_stored_dtype_bytes(t->dtype);
        const size_t place = (size_t)(at->expert * at->parts + at->part);
        int64_t lost;
        st = mn_stored_convert((char *)list->copies[i] + place * each, t->dtype, piece.data,
                               piece.dtype, count, &lost);
    }
    free(held);
    return st;
}
