/* sequence_keys_device.c - keys and values of a sequence in parts, between GPUs.
 *
 *   forward    the tokens of the ranks before come into scratch memory, (B, (rank + 1) T, J, X)
 *   backward   they come once more, so that nothing is kept; gradients of others' tokens go where
 *              those are, and are added there, those of the next rank first
 *
 * All of it is on the stream. The operator's arguments stay as they were. */
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "kernels/adamw_all.h"
#include "ops/elementwise/elementwise.h"
#include "ranks/sequence_internal.h"

/* A gathered field: bytes of a number and a token, of all tokens up to this rank's end. */
typedef struct wide {
    const mn_field *field;
    mn_dtype dtype;
    int64_t heads, width;      // numbers of a head
    size_t item, token, all;
    char *keys, *grads, *got;  // got: gradients from the ranks behind, (ranks, B, T)
} wide;

typedef struct keys {
    cut_call c;
    unsigned char args[MN_MAX_ARGS_BYTES];
    wide of[CUT_KEYED];
    mn_transfer *transfers;
    int n_transfers;
} keys;

static mn_status take(const keys *k, char **out, size_t bytes) {
    *out = mn_device_bytes(k->c.device, mn_max(bytes, 1));
    if (*out) return MN_OK;
    return mn_fail(MN_ERR_MEMORY, "the GPU has no memory for %.1f MiB of keys; use more ranks or a "
                   "smaller train.batch", (double)bytes / 1048576.0);
}

static mn_status open_keys(keys *k, const cut_call *c, bool back) {
    const int64_t B = c->sizes->B, T = c->sizes->T;
    k->c = *c;
    memcpy(k->args, c->args, mn_op_describe(c->op)->args_bytes);
    k->c.args = k->args;
    k->c.sizes = (mn_call *)k->args;
    k->c.sizes->L = (c->rank + 1) * T;
    k->transfers = cut_zeros((size_t)(c->world * c->n_keys * B) * sizeof *k->transfers);
    mn_status st = k->transfers ? MN_OK : MN_ERR_MEMORY;
    for (int i = 0; st == MN_OK && i < c->n_keys; i++) {
        wide *w = &k->of[i];
        bool ok = true;
        w->field = c->keys[i];
        w->dtype = mn_field_dtype(w->field, c->sizes->dtype);
        w->item = mn_dtype_bytes(w->dtype);
        w->heads = mn_axis_size(k->c.sizes, w->field->axes[2], &ok);
        w->width = mn_axis_size(k->c.sizes, w->field->axes[3], &ok);
        w->token = (size_t)(w->heads * w->width) * w->item;
        w->all = (size_t)(B * k->c.sizes->L) * w->token;
        st = take(k, &w->keys, w->all);
        if (st == MN_OK && back) st = take(k, &w->grads, w->all);
        const size_t behind = (size_t)((c->world - 1 - c->rank) * B * T) * w->token;
        if (st == MN_OK && back) st = take(k, &w->got, behind);
    }
    return st;
}

/* Tokens of `rank` in row b of gathered memory. */
static char *part_of(const keys *k, const wide *w, char *all, int rank, int64_t b) {
    const int64_t T = k->c.sizes->T;
    return all + (size_t)(b * k->c.sizes->L + rank * T) * w->token;
}

/* The rank's own tokens between a view and their place in gathered memory. */
static mn_status copy_own(const keys *k, const wide *w, const mn_in *view, char *all, bool out) {
    const int64_t T = k->c.sizes->T, whole = w->heads * w->width;
    const int64_t head = view->stride[2] ? view->stride[2] : w->width;
    const int64_t token = view->stride[1] ? view->stride[1] : whole;
    const int64_t row = view->stride[0] ? view->stride[0] : T * whole;
    const bool together = head == w->width;
    const int64_t pieces = together ? 1 : w->heads;
    const size_t bytes = together ? w->token : (size_t)w->width * w->item;
    mn_status st = MN_OK;
    for (int64_t b = 0; b < k->c.sizes->B; b++) {
        for (int64_t h = 0; st == MN_OK && h < pieces; h++) {
            char *at = part_of(k, w, all, k->c.rank, b) + (size_t)h * bytes;
            char *in = (char *)view->data + (size_t)(b * row + h * head) * w->item;
            st = out ? mn_device_copy_rows(k->c.device, in, (size_t)token * w->item, at, w->token,
                                           bytes, T)
                     : mn_device_copy_rows(k->c.device, at, w->token, in, (size_t)token * w->item,
                                           bytes, T);
        }
    }
    return st;
}

static void list(keys *k, int peer, bool send, char *data, const wide *w) {
    const size_t bytes = (size_t)k->c.sizes->T * w->token;
    k->transfers[k->n_transfers++] = (mn_transfer){ peer, send, data, bytes };
}

/* Keys from the ranks before, this rank's to those behind. */
static mn_status gather(keys *k) {
    const int rank = k->c.rank;
    mn_status st = MN_OK;
    k->n_transfers = 0;
    for (int i = 0; st == MN_OK && i < k->c.n_keys; i++) {
        st = copy_own(k, &k->of[i], cut_in(&k->c, k->of[i].field), k->of[i].keys, false);
    }
    for (int r = 0; r < k->c.world; r++) {
        for (int i = 0; r != rank && i < k->c.n_keys; i++) {
            const wide *w = &k->of[i];
            for (int64_t b = 0; b < k->c.sizes->B; b++) {
                list(k, r, r > rank, part_of(k, w, w->keys, r > rank ? rank : r, b), w);
            }
        }
    }
    if (st == MN_OK) st = mn_cut_exchange(&k->c, k->transfers, k->n_transfers);
    for (int i = 0; i < k->c.n_keys; i++) {
        *cut_in(&k->c, k->of[i].field) = (mn_in){ k->of[i].keys, { 0 } };
    }
    return st;
}

/* Gradients that rank r has of this rank's tokens in row b. */
static char *got_from(const keys *k, const wide *w, int r, int64_t b) {
    return w->got + (size_t)((r - k->c.rank - 1) * k->c.sizes->B + b) *
                    (size_t)k->c.sizes->T * w->token;
}

static mn_status add(const keys *k, const wide *w, char *to, char *other) {
    const int64_t T = k->c.sizes->T, n = w->heads * w->width, contiguous[3] = { 0 };
    if (w->dtype == MN_F32) {
        const mn_status st = mn_device_use(k->c.device);
        if (st != MN_OK) return st;
        const int code = mn_add_cuda((float *)to, (float *)to, (float *)other, T * n,
                                     mn_device_stream(k->c.device));
        return mn_device_check(k->c.device, code, "gradients of keys");
    }
    mn_pair_params job = { .kind = MN_PAIR_ADD, .shape = { 1, T, 1, n } };
    job.a = job.y = mn_view_of(to, contiguous, w->dtype);
    job.b = mn_view_of(other, contiguous, w->dtype);
    job.a.stride[1] = job.b.stride[1] = job.y.stride[1] = n;
    return mn_elementwise_run(k->c.s->context, MN_ELEMENTWISE_PAIR, &job);
}

/* Gradients of others' tokens to them, and the sum of what all have of this rank's. */
static mn_status scatter(keys *k) {
    const int rank = k->c.rank;
    k->n_transfers = 0;
    for (int r = 0; r < k->c.world; r++) {
        for (int i = 0; r != rank && i < k->c.n_keys; i++) {
            const wide *w = &k->of[i];
            for (int64_t b = 0; b < k->c.sizes->B; b++) {
                list(k, r, r < rank,
                     r < rank ? part_of(k, w, w->grads, r, b) : got_from(k, w, r, b), w);
            }
        }
    }
    mn_status st = mn_cut_exchange(&k->c, k->transfers, k->n_transfers);
    for (int r = rank + 1; r < k->c.world; r++) {
        for (int i = 0; i < k->c.n_keys; i++) {
            const wide *w = &k->of[i];
            for (int64_t b = 0; st == MN_OK && b < k->c.sizes->B; b++) {
                st = add(k, w, part_of(k, w, w->grads, rank, b), got_from(k, w, r, b));
            }
        }
    }
    return st;
}

mn_status mn_cut_forward_keys_device(cut_call *c) {
    keys k = { .n_transfers = 0 };
    mn_status st = open_keys(&k, c, false);
    if (st == MN_OK) st = gather(&k);
    if (st == MN_OK) st = mn_cut_run(&k.c, MN_FORWARD, k.args);
    free(k.transfers);
    return st;
}

mn_status mn_cut_backward_keys_device(cut_call *c) {
    keys k = { .n_transfers = 0 };
    mn_in to[CUT_KEYED];
    mn_status st = open_keys(&k, c, true);
    if (st == MN_OK) st = gather(&k);
    for (int i = 0; st == MN_OK && i < c->n_keys; i++) {
        to[i] = *cut_partner(&k.c, k.of[i].field);
        *cut_partner(&k.c, k.of[i].field) = (mn_in){ k.of[i].grads, { 0 } };
    }
    if (st == MN_OK) st = mn_cut_run(&k.c, MN_BACKWARD, k.args);
    if (st == MN_OK) st = scatter(&k);
    for (int i = 0; st == MN_OK && i < c->n_keys; i++) {
        if (to[i].data) st = copy_own(&k, &k.of[i], &to[i], k.of[i].grads, true);
    }
    free(k.transfers);
    return st;
}
