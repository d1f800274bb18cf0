/* sequence.c - states, maps and keys between the ranks of a sequence. */
#include "ranks/sequence_internal.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "ops/run.h"

/* A pipeline of kla, or of Palimpsa, is the faster one from this many layers a rank on. */
enum { MOEBIUS_DEPTH = 3, DIAGONAL_DEPTH = 1 };

/* ---- taking apart ---------------------------------------------------------------------------- */

static cut_law law_of(mn_op_id op) {
    switch (op) {
#define COMPOSES(name, how) case MN_OP_##name: return CUT_##how;
#include "ranks/sequence.def"
#undef COMPOSES
    default: return CUT_PIPELINE;
    }
}

static const char *const states_names[MN_SEQUENCE_COUNT] = {
#define STATES(id, name, about) [MN_SEQUENCE_##id] = name,
#include "ranks/sequence_states.def"
#undef STATES
};

bool mn_sequence_states_find(mn_sequence_states *out, const char *name) {
    for (int i = 0; i < MN_SEQUENCE_COUNT; i++) {
        if (strcmp(states_names[i], name) != 0) continue;
        *out = (mn_sequence_states)i;
        return true;
    }
    return false;
}

/* Whether states cross from rank to rank though they have maps (docs/guide/scaling.md). */
static bool prefers_pipeline(cut_law law, mn_sequence_states states, int depth, int ranks) {
    if (law != CUT_AFFINE && law != CUT_MOEBIUS && law != CUT_DIAGONAL) return false;
    if (states != MN_SEQUENCE_AUTO) return states == MN_SEQUENCE_PIPELINE;
    if (law == CUT_AFFINE) return false;
    return depth >= (law == CUT_MOEBIUS ? MOEBIUS_DEPTH : DIAGONAL_DEPTH) * (ranks - 1);
}

static cut_law choose_law(mn_op_id op, mn_sequence_states states, int depth, int ranks,
                          bool device) {
    const cut_law law = law_of(op);
    return device || prefers_pipeline(law, states, depth, ranks) ? CUT_PIPELINE : law;
}

const char *mn_sequence_way(mn_op_id op, mn_sequence_states states, int depth, int ranks,
                            bool device) {
    static const char *const ways[] = { [CUT_PIPELINE] = "pipeline", [CUT_AFFINE] = "maps",
                                        [CUT_MOEBIUS] = "maps", [CUT_DIAGONAL] = "maps",
                                        [CUT_TAIL] = "tails" };
    int n;
    bool has_state = false;
    const mn_field *fields = mn_op_fields(op, &n);
    if (mn_op_traits_of(op)->keyed) return "keys";
    for (int i = 0; i < n; i++) {
        has_state |= fields[i].role == MN_ROLE_OPT && fields[i].axes[0] == 'N';
    }
    return has_state ? ways[choose_law(op, states, depth, ranks, device)] : NULL;
}

int64_t mn_cut_count(const cut_call *c, const char *axes) {
    bool ok = true;
    int64_t n = 1;
    for (; *axes; axes++) n *= mn_axis_size(c->sizes, *axes, &ok);
    return ok ? n : 0;
}

static const mn_field *named(const mn_field *fields, int n, const char *name, size_t length) {
    for (int i = 0; i < n; i++) {
        if (strlen(fields[i].name) == length && memcmp(fields[i].name, name, length) == 0) {
            return &fields[i];
        }
    }
    return NULL;
}

static void find_states(cut_call *c, const mn_field *fields, int n) {
    for (int i = 0; i < n; i++) {
        const mn_field *in = &fields[i];
        const size_t length = strlen(in->name);
        if (in->role != MN_ROLE_OPT || in->axes[0] != 'N' || in->name[length - 1] != '0') continue;
        const mn_field *out = named(fields, n, in->name, length - 1);
        if (!out || c->n_states == CUT_STATES) continue;
        cut_state *to = &c->states[c->n_states++];
        char sum[32];
        snprintf(sum, sizeof sum, "%.*ssum", (int)(length - 1), in->name);
        sum[0] = (char)tolower((unsigned char)sum[0]);
        *to = (cut_state){ in, out, NULL, 0 };
        if (out->role == MN_ROLE_AUX) to->sum = named(fields, n, sum, strlen(sum));
        to->bytes = (size_t)mn_cut_count(c, in->axes) *
                    mn_dtype_bytes(mn_field_dtype(in, c->sizes->dtype));
    }
}

static mn_status take_apart(cut_call *c, const mn_sequence *s, mn_op_id op, void *args) {
    int n;
    const mn_field *fields = mn_op_fields(op, &n);
    *c = (cut_call){ .s = s, .op = op, .args = args, .sizes = args,
                 .rank = mn_comm_rank(s->comm), .world = mn_comm_world(s->comm),
                 .device = s->context->device };
    c->law = choose_law(op, s->states, s->depth, c->world, c->device != NULL);
    c->item = mn_dtype_bytes(c->sizes->dtype);
    if (c->sizes->J == 0) c->sizes->J = c->sizes->H;
    const size_t theta = mn_op_traits_of(op)->theta;
    if (theta) c->sizes->R = c->sizes->K << (((const mn_in *)(c->args + theta))->data != NULL);
    if (c->sizes->cu_seqlens && c->device) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: packed sequences are cut over ranks in the host's "
                       "memory only; leave out --device, or use data.cutting=windows",
                       mn_op_describe(op)->name);
    }
    find_states(c, fields, n);
    for (int i = 0; i < n && mn_op_traits_of(op)->keyed; i++) {
        if (strncmp(fields[i].axes, "BL", 2) != 0) continue;
        if (c->n_keys == CUT_KEYED) return mn_fail(MN_ERR_INTERNAL, "too many keys to gather");
        c->keys[c->n_keys++] = &fields[i];
    }
    return MN_OK;
}

/* Operators that look at one token at a time. */
static bool is_local(const cut_call *c) {
    return c->n_states == 0 && c->n_keys == 0;
}

/* `before` more tokens come before the call's first one, for what an operator counts itself. */
void mn_cut_set_positions(const cut_call *c, int64_t before) {
    int n;
    const mn_param *params = mn_op_params(c->op, &n);
    for (int i = 0; i < n; i++) {
        if (params[i].kind != MN_PARAM_INT) continue;
        if (strcmp(params[i].name, "pos0") != 0 && strcmp(params[i].name, "n0") != 0) continue;
        *(int64_t *)(c->args + params[i].offset) += before;
    }
}

mn_status mn_cut_run(const cut_call *c, mn_pass pass, const void *args) {
    return mn_op_run(c->s->context, c->op, pass, args);
}

/* Memory for the length of a call: on a GPU in the order of its stream, and not of zeros. */
static void *take(const cut_call *c, size_t bytes) {
    if (!c->device) return cut_zeros(bytes);
    void *memory = mn_device_bytes(c->device, bytes);
    if (!memory) mn_fail(MN_ERR_MEMORY, "the GPU has no memory for %zu bytes of states", bytes);
    return memory;
}

static void give(const cut_call *c, void *memory) {
    if (!c->device) free(memory);
}

/* Messages to and from the ranks of the sequence. */
mn_status mn_cut_exchange(const cut_call *c, const mn_transfer *t, int n) {
    if (!c->device) return mn_comm_exchange(c->s->comm, t, n);
    const mn_status st = mn_device_use(c->device);
    if (st != MN_OK) return st;
    return mn_nccl_exchange(c->s->nccl, t, n, c->s->first, mn_device_stream(c->device));
}

/* ---- keys ------------------------------------------------------------------------------------ */

/* Sizes of a keyed field: (B, T, H, X) with the strides of the view, 0 for contiguous. */
typedef struct box {
    int64_t n[4], stride[3];
} box;

static box box_of(const cut_call *c, const mn_field *f, const int64_t stride[3], int64_t length) {
    bool ok = true;
    box b = { { c->sizes->B, length, mn_axis_size(c->sizes, f->axes[2], &ok),
                mn_axis_size(c->sizes, f->axes[3], &ok) }, { 0 } };
    b.stride[2] = stride[2] ? stride[2] : b.n[3];
    b.stride[1] = stride[1] ? stride[1] : b.n[2] * b.n[3];
    b.stride[0] = stride[0] ? stride[0] : b.n[1] * b.n[2] * b.n[3];
    return b;
}

/* Copies tokens [first, first + n) of a box to or from contiguous memory (B, n, H, X). */
static void pack(const cut_call *c, const box *b, char *view, char *packed, int64_t first,
                 int64_t n, bool to_packed) {
    const size_t row = (size_t)b->n[3] * c->item;
    for (int64_t i = 0; i < b->n[0]; i++) {
        for (int64_t t = first; t < first + n; t++) {
            for (int64_t h = 0; h < b->n[2]; h++, packed += row) {
                char *at = view + (size_t)(i * b->stride[0] + t * b->stride[1] +
                                           h * b->stride[2]) * c->item;
                memcpy(to_packed ? packed : at, to_packed ? at : packed, row);
            }
        }
    }
}

/* Puts all tokens up to this rank's end into `whole`, (B, (rank + 1) T, H, X). */
static mn_status gather_field(cut_call *c, const mn_field *f, char *whole) {
    const int64_t T = c->sizes->T, none[3] = { 0 };
    mn_in *view = cut_in(c, f);
    const box local = box_of(c, f, view->stride, T);
    const box all = box_of(c, f, none, (c->rank + 1) * T);
    const size_t bytes = (size_t)(local.n[0] * T * local.n[2] * local.n[3]) * c->item;
    char *parts = cut_zeros((size_t)c->world * bytes);
    if (!parts) return MN_ERR_MEMORY;
    pack(c, &local, (char *)view->data, parts + (size_t)c->rank * bytes, 0, T, true);
    mn_status st = mn_comm_all_gather(c->s->comm, parts, parts + (size_t)c->rank * bytes, bytes);
    for (int r = 0; st == MN_OK && r <= c->rank; r++) {
        pack(c, &all, whole, parts + (size_t)r * bytes, r * T, T, false);
    }
    free(parts);
    *view = (mn_in){ whole, { 0 } };
    return st;
}

static mn_status forward_keys(cut_call *c, bool plan) {
    mn_status st = MN_OK;
    const int64_t T = c->sizes->T;
    if (c->sizes->L != 0 && c->sizes->L != T) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: a cache of keys cannot be cut over ranks",
                       mn_op_describe(c->op)->name);
    }
    if (c->device) return plan ? MN_OK : mn_cut_forward_keys_device(c);
    for (int i = 0; st == MN_OK && i < c->n_keys; i++) {
        c->sizes->L = (c->rank + 1) * T;
        const size_t bytes = (size_t)mn_cut_count(c, c->keys[i]->axes) * c->item;
        char *whole = c->s->keep(c->s->owner, bytes, plan);
        if (!whole) return MN_ERR_MEMORY;
        if (plan) cut_in(c, c->keys[i])->data = whole;
        else st = gather_field(c, c->keys[i], whole);
    }
    c->sizes->L = (c->rank + 1) * T;
    return st == MN_OK && !plan ? mn_cut_run(c, MN_FORWARD, c->args) : st;
}

/* Adds b to a. */
void mn_cut_add(const cut_call *c, void *a, const void *b, int64_t n) {
    if (c->sizes->dtype == MN_F64) {
        for (int64_t i = 0; i < n; i++) ((double *)a)[i] += ((const double *)b)[i];
    } else {
        for (int64_t i = 0; i < n; i++) ((float *)a)[i] += ((const float *)b)[i];
    }
}

/* Every rank's gradient of its own keys: the sum over the ranks that saw them, first to last. */
static mn_status scatter_field(cut_call *c, const mn_field *f, char *whole, const mn_in *to) {
    const int64_t T = c->sizes->T, none[3] = { 0 };
    const box all = box_of(c, f, none, (c->rank + 1) * T), local = box_of(c, f, to->stride, T);
    const int64_t count = local.n[0] * T * local.n[2] * local.n[3];
    const size_t bytes = (size_t)count * c->item;
    char *out = cut_zeros((size_t)c->world * bytes), *in = cut_zeros((size_t)c->world * bytes);
    mn_transfer *t = calloc(2 * (size_t)c->world, sizeof *t);
    int n = 0;
    for (int r = 0; out && in && t && r < c->world; r++) {
        char *sent = out + (size_t)r * bytes, *got = in + (size_t)r * bytes;
        if (r <= c->rank) {
            pack(c, &all, whole, sent, r * T, T, true);
            t[n++] = (mn_transfer){ r, true, sent, bytes };
        }
        if (r >= c->rank) t[n++] = (mn_transfer){ r, false, got, bytes };
    }
    mn_status st = out && in && t ? mn_comm_exchange(c->s->comm, t, n)
                                  : mn_fail(MN_ERR_MEMORY, "no memory for gradients of keys");
    free(t);
    char *sum = in + (size_t)c->rank * bytes;
    for (int r = c->rank + 1; st == MN_OK && r < c->world; r++) {
        mn_cut_add(c, sum, in + (size_t)r * bytes, count);
    }
    if (st == MN_OK) pack(c, &local, (char *)to->data, sum, 0, T, false);
    free(out);
    free(in);
    return st;
}

static mn_status backward_keys(cut_call *c) {
    mn_in to[CUT_KEYED];
    char *whole[CUT_KEYED] = { NULL };
    mn_status st = MN_OK;
    for (int i = 0; st == MN_OK && i < c->n_keys; i++) {
        to[i] = *cut_partner(c, c->keys[i]);
        whole[i] = cut_zeros((size_t)mn_cut_count(c, c->keys[i]->axes) * c->item);
        if (!whole[i]) st = MN_ERR_MEMORY;
        *cut_partner(c, c->keys[i]) = (mn_in){ whole[i], { 0 } };
    }
    if (st == MN_OK) st = mn_cut_run(c, MN_BACKWARD, c->args);
    for (int i = 0; st == MN_OK && i < c->n_keys; i++) {
        mn_in *partner = cut_partner(c, c->keys[i]);
        *partner = to[i];
        if (to[i].data) {
            st = scatter_field(c, c->keys[i], whole[i], &to[i]);
        } else {    // a gradient that nobody wants, but others may want theirs
            char *own = cut_zeros((size_t)mn_cut_count(c, c->keys[i]->axes) * c->item);
            const mn_in nowhere = { own, { 0 } };
            st = own ? scatter_field(c, c->keys[i], whole[i], &nowhere) : MN_ERR_MEMORY;
            free(own);
        }
    }
    for (int i = 0; i < c->n_keys; i++) free(whole[i]);
    return st;
}

/* ---- states from rank to rank ---------------------------------------------------------------- */

/* Memory for initial states, filled by who comes next; on rank 0 only where maps need them. */
static mn_status keep_states(cut_call *c, bool plan) {
    for (int i = 0; i < c->n_states && c->rank > 0; i++) {
        void *memory = c->s->keep(c->s->owner, c->states[i].bytes, plan);
        if (!memory) return MN_ERR_MEMORY;
        *cut_in(c, c->states[i].in) = (mn_in){ memory, { 0 } };
    }
    return MN_OK;
}

/* Final states that the caller does not ask for get memory of their own. */
mn_status mn_cut_lend_finals(cut_call *c, void **lent) {
    for (int i = 0; i < c->n_states; i++) {
        mn_in *out = cut_in(c, c->states[i].out);
        lent[i] = NULL;
        if (out->data) continue;
        lent[i] = take(c, c->states[i].bytes);
        if (!lent[i]) return MN_ERR_MEMORY;
        out->data = lent[i];
    }
    return MN_OK;
}

void mn_cut_return_finals(cut_call *c, void **lent) {
    for (int i = 0; i < c->n_states; i++) {
        if (lent[i]) cut_in(c, c->states[i].out)->data = NULL;
        give(c, lent[i]);
        lent[i] = NULL;
    }
}

static mn_status receive_states(cut_call *c) {
    mn_transfer t[CUT_STATES] = { { 0 } };
    int n = 0;
    for (int i = 0; i < c->n_states && c->rank > 0; i++) {
        t[n++] = (mn_transfer){ c->rank - 1, false, (void *)cut_in(c, c->states[i].in)->data,
                                c->states[i].bytes };
    }
    return mn_cut_exchange(c, t, n);
}

static mn_status send_states(cut_call *c) {
    mn_transfer t[CUT_STATES] = { { 0 } };
    int n = 0;
    for (int i = 0; i < c->n_states && c->rank + 1 < c->world; i++) {
        t[n++] = (mn_transfer){ c->rank + 1, true, (void *)cut_in(c, c->states[i].out)->data,
                                c->states[i].bytes };
    }
    return mn_cut_exchange(c, t, n);
}

mn_status mn_cut_forward_pipeline(cut_call *c) {
    void *lent[CUT_STATES] = { NULL };
    if (c->s->again) return mn_cut_run(c, MN_FORWARD, c->args);
    mn_status st = mn_cut_lend_finals(c, lent);
    if (st == MN_OK) st = receive_states(c);
    if (st == MN_OK) st = mn_cut_run(c, MN_FORWARD, c->args);
    if (st == MN_OK) st = send_states(c);
    mn_cut_return_finals(c, lent);
    return st;
}

/* A rank's last W - 1 tokens are all that the next one needs: everybody sends at once. The tail of
 * a pass without those before is right as long as there are W - 1 tokens. */
static mn_status forward_tail(cut_call *c) {
    void *lent[CUT_STATES] = { NULL };
    mn_transfer t[2 * CUT_STATES];
    int n = 0;
    if (c->sizes->T < c->sizes->W - 1) return mn_cut_forward_pipeline(c);
    unsigned char first[MN_MAX_ARGS_BYTES];
    mn_status st = mn_cut_lend_finals(c, lent);
    memcpy(first, c->args, mn_op_describe(c->op)->args_bytes);
    for (int i = 0; i < c->n_states && c->rank > 0; i++) {
        ((mn_in *)(first + c->states[i].in->offset))->data = NULL;
    }
    if (st == MN_OK) st = mn_cut_run(c, MN_FORWARD, first);
    for (int i = 0; i < c->n_states; i++) {
        const cut_state *of = &c->states[i];
        if (c->rank + 1 < c->world) {
            t[n++] = (mn_transfer){ c->rank + 1, true, (void *)cut_in(c, of->out)->data,
                                    of->bytes };
        }
        if (c->rank > 0) {
            t[n++] = (mn_transfer){ c->rank - 1, false, (void *)cut_in(c, of->in)->data,
                                    of->bytes };
        }
    }
    if (st == MN_OK) st = mn_comm_exchange(c->s->comm, t, n);
    if (st == MN_OK && c->rank > 0) st = mn_cut_run(c, MN_FORWARD, c->args);
    mn_cut_return_finals(c, lent);
    return st;
}

/* The next rank's gradient of its initial state is the cotangent of the final one here. A state
 * that is kept as C and a logarithm m (mlstm) has its cotangent at C e^m: dC0 e^-m0 is sent. */
void mn_cut_scale_sums(const cut_call *c, const cut_state *of, void *gradient) {
    if (!of->sum) return;
    int n;
    const mn_field *fields = mn_op_fields(c->op, &n), *m = named(fields, n, "m0", 2);
    if (!m) return;
    const int64_t heads = mn_cut_count(c, m->axes), each = mn_cut_count(c, of->in->axes) / heads;
    const mn_in *scale = cut_in(c, m);
    for (int64_t h = 0; h < heads; h++) {
        for (int64_t i = h * each; i < (h + 1) * each; i++) {
            if (c->sizes->dtype == MN_F64) {
                ((double *)gradient)[i] *= exp(-((const double *)scale->data)[h]);
            } else {
                ((float *)gradient)[i] *= expf(-((const float *)scale->data)[h]);
            }
        }
    }
}

/* The field whose partner takes the cotangent of the final state; NULL: it has none. */
const mn_field *mn_cut_taker(const cut_state *of) {
    const mn_field *f = of->sum ? of->sum : of->out;
    return f->partner == MN_NO_OFFSET ? NULL : f;
}

/* Cotangents of the final states come from the next rank, and gradients of the initial ones get
 * memory. */
static mn_status take_cotangents(cut_call *c, void **cotangent, void **gradient) {
    mn_transfer t[CUT_STATES] = { { 0 } };
    int n = 0;
    for (int i = 0; i < c->n_states; i++) {
        const cut_state *of = &c->states[i];
        const mn_field *takes = mn_cut_taker(of);
        if (!takes || of->in->partner == MN_NO_OFFSET) continue;
        if (c->rank + 1 < c->world) {
            cotangent[i] = take(c, of->bytes);
            if (!cotangent[i]) return MN_ERR_MEMORY;
            t[n++] = (mn_transfer){ c->rank + 1, false, cotangent[i], of->bytes };
            *cut_partner(c, takes) = (mn_in){ cotangent[i], { 0 } };
        }
        if (c->rank > 0) {
            gradient[i] = take(c, of->bytes);
            if (!gradient[i]) return MN_ERR_MEMORY;
            *cut_partner(c, of->in) = (mn_in){ gradient[i], { 0 } };
        }
    }
    return mn_cut_exchange(c, t, n);
}

static mn_status send_gradients(cut_call *c, void **gradient) {
    mn_transfer t[CUT_STATES] = { { 0 } };
    int n = 0;
    for (int i = 0; i < c->n_states && c->rank > 0; i++) {
        if (!gradient[i]) continue;
        mn_cut_scale_sums(c, &c->states[i], gradient[i]);
        t[n++] = (mn_transfer){ c->rank - 1, true, gradient[i], c->states[i].bytes };
    }
    return mn_cut_exchange(c, t, n);
}

mn_status mn_cut_backward_pipeline(cut_call *c) {
    void *cotangent[CUT_STATES] = { NULL }, *gradient[CUT_STATES] = { NULL };
    for (int i = 0; i < c->n_states && c->device; i++) {
        if (!c->states[i].sum) continue;
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: its states cross ranks in the host's memory only; "
                       "leave out --device or train.sequence_ranks", mn_op_describe(c->op)->name);
    }
    mn_status st = take_cotangents(c, cotangent, gradient);
    if (st == MN_OK) st = mn_cut_run(c, MN_BACKWARD, c->args);
    if (st == MN_OK) st = send_gradients(c, gradient);
    for (int i = 0; i < c->n_states; i++) {
        give(c, cotangent[i]);
        give(c, gradient[i]);
    }
    return st;
}

/* ---- affine maps ----------------------------------------------------------------------------- */

/* out = a b + out, or a' b + out: (K,K) times (K,V), for every sequence and head. */
void mn_cut_apply_map(const cut_call *c, void *out, const void *a, const void *b,
                      bool transposed) {
    const int64_t K = c->sizes->K, V = c->sizes->V, n = mn_cut_count(c, "NH");
    for (int64_t h = 0; h < n; h++) {
        for (int64_t i = 0; i < K; i++) {
            for (int64_t j = 0; j < K; j++) {
                const int64_t at = h * K * K + (transposed ? j * K + i : i * K + j);
                for (int64_t v = 0; v < V; v++) {
                    const int64_t to = (h * K + i) * V + v, from = (h * K + j) * V + v;
                    if (c->sizes->dtype == MN_F64) {
                        ((double *)out)[to] += ((const double *)a)[at] * ((const double *)b)[from];
                    } else {
                        ((float *)out)[to] += ((const float *)a)[at] * ((const float *)b)[from];
                    }
                }
            }
        }
    }
}

size_t mn_cut_map_bytes(const cut_call *c) {
    return (size_t)mn_cut_count(c, "NHKK") * c->item;
}

/* The map of the rank's tokens: what becomes of an identity, of V = K columns, when nothing is
 * written. */
mn_status mn_cut_find_map(const cut_call *c, void *map) {
    unsigned char args[MN_MAX_ARGS_BYTES];
    int n;
    const mn_field *fields = mn_op_fields(c->op, &n);
    memcpy(args, c->args, mn_op_describe(c->op)->args_bytes);
    mn_call *sizes = (mn_call *)args;
    const int64_t K = sizes->K, heads = mn_cut_count(c, "NH");
    sizes->V = K;
    char *nothing = cut_zeros((size_t)mn_cut_count(c, "BTHK") * c->item);
    char *results = cut_zeros((size_t)mn_cut_count(c, "BTHK") * c->item);
    char *one = cut_zeros(mn_cut_map_bytes(c));
    mn_status st = nothing && results && one ? MN_OK : MN_ERR_MEMORY;
    for (int64_t i = 0; st == MN_OK && i < heads * K; i++) {
        const int64_t at = i / K * K * K + i % K * (K + 1);
        if (c->sizes->dtype == MN_F64) ((double *)one)[at] = 1.0;
        else ((float *)one)[at] = 1.0f;
    }
    for (int i = 0; st == MN_OK && i < n; i++) {
        mn_in *view = (mn_in *)(args + fields[i].offset);
        if (!strchr(fields[i].axes, 'V') || !view->data) continue;
        const bool result = fields[i].role == MN_ROLE_OUT || fields[i].role == MN_ROLE_AUX;
        *view = (mn_in){ result ? results : nothing, { 0 } };
    }
    *(mn_in *)(args + c->states[0].in->offset) = (mn_in){ one, { 0 } };
    *(mn_in *)(args + c->states[0].out->offset) = (mn_in){ map, { 0 } };
    if (st == MN_OK) st = mn_cut_run(c, MN_FORWARD, args);
    free(nothing);
    free(results);
    free(one);
    return st;
}

/* Gathers each rank's map and vector b; `x` becomes what the ranks before this one (or, transposed,
 * those behind it, from the last on) make of zeros. */
static mn_status compose(const cut_call *c, void *x, const void *map, const void *b, bool back) {
    const size_t of_map = mn_cut_map_bytes(c), of_b = c->states[0].bytes, each = of_map + of_b;
    char *all = cut_zeros((size_t)c->world * each), *next = cut_zeros(of_b);
    mn_status st = all && next ? MN_OK : MN_ERR_MEMORY;
    if (st == MN_OK) {
        char *own = all + (size_t)c->rank * each;
        memcpy(own, map, of_map);
        memcpy(own + of_map, b, of_b);
        st = mn_comm_all_gather(c->s->comm, all, own, each);
        memset(x, 0, of_b);
    }
    const int step = back ? -1 : 1;
    for (int r = back ? c->world - 1 : 0; st == MN_OK && r != c->rank; r += step) {
        memcpy(next, all + (size_t)r * each + of_map, of_b);
        mn_cut_apply_map(c, next, all + (size_t)r * each, x, back);
        memcpy(x, next, of_b);
    }
    free(all);
    free(next);
    return st;
}

/* The map is kept behind the rank's initial state. */
static void *kept_map(const cut_call *c) {
    return (char *)cut_in(c, c->states[0].in)->data + c->states[0].bytes;
}

static mn_status keep_affine(cut_call *c, bool plan) {
    char *memory = c->s->keep(c->s->owner, c->states[0].bytes + mn_cut_map_bytes(c), plan);
    if (!memory) return MN_ERR_MEMORY;
    mn_in *state0 = cut_in(c, c->states[0].in);
    if (!plan && c->rank == 0 && state0->data) memcpy(memory, state0->data, c->states[0].bytes);
    else if (!plan) memset(memory, 0, c->states[0].bytes);
    *state0 = (mn_in){ memory, { 0 } };
    return MN_OK;
}

static mn_status forward_affine(cut_call *c) {
    void *lent[CUT_STATES] = { NULL };
    mn_in *state0 = cut_in(c, c->states[0].in);
    const mn_in kept = *state0;
    mn_status st = mn_cut_find_map(c, kept_map(c));
    if (st == MN_OK) st = mn_cut_lend_finals(c, lent);
    if (st == MN_OK) st = mn_cut_run(c, MN_FORWARD, c->args);
    char *before = cut_zeros(c->states[0].bytes);
    if (!before) st = MN_ERR_MEMORY;
    if (st == MN_OK) {
        st = compose(c, before, kept_map(c), cut_in(c, c->states[0].out)->data, false);
    }
    if (st == MN_OK && c->rank > 0) memcpy((void *)kept.data, before, c->states[0].bytes);
    free(before);
    if (st == MN_OK && c->rank > 0) st = mn_cut_run(c, MN_FORWARD, c->args);
    mn_cut_return_finals(c, lent);
    return st;
}

/* First the gradient of the initial state from this rank's results alone, then with what the ranks
 * behind it add. */
static mn_status backward_affine(cut_call *c) {
    unsigned char args[MN_MAX_ARGS_BYTES];
    int n;
    const mn_field *fields = mn_op_fields(c->op, &n);
    const cut_state *of = &c->states[0];
    char *own = cut_zeros(of->bytes), *cotangent = cut_zeros(of->bytes);
    mn_status st = own && cotangent ? MN_OK : MN_ERR_MEMORY;
    memcpy(args, c->args, mn_op_describe(c->op)->args_bytes);
    for (int i = 0; i < n; i++) {
        if (fields[i].role > MN_ROLE_OPT || fields[i].partner == MN_NO_OFFSET) continue;
        ((mn_in *)(args + fields[i].partner))->data = NULL;
    }
    *(mn_in *)(args + of->in->partner) = (mn_in){ own, { 0 } };
    if (c->rank + 1 < c->world) ((mn_in *)(args + of->out->partner))->data = NULL;
    if (st == MN_OK) st = mn_cut_run(c, MN_BACKWARD, args);
    if (st == MN_OK) st = compose(c, cotangent, kept_map(c), own, true);
    if (c->rank + 1 < c->world) *cut_partner(c, of->out) = (mn_in){ cotangent, { 0 } };
    if (c->rank > 0) *cut_partner(c, of->in) = (mn_in){ NULL, { 0 } };
    if (st == MN_OK) st = mn_cut_run(c, MN_BACKWARD, c->args);
    free(own);
    free(cotangent);
    return st;
}

/* ---- public ---------------------------------------------------------------------------------- */

static mn_status forward(cut_call *c, bool plan) {
    if (c->sizes->cu_seqlens) return mn_cut_forward_packed(c, plan);
    mn_cut_set_positions(c, c->rank * c->sizes->T);
    if (c->n_keys > 0) return forward_keys(c, plan);
    if (is_local(c)) return plan ? MN_OK : mn_cut_run(c, MN_FORWARD, c->args);
    const mn_status st = c->law == CUT_AFFINE ? keep_affine(c, plan) : keep_states(c, plan);
    if (st != MN_OK || plan) return st;
    if (c->law == CUT_AFFINE) return forward_affine(c);
    if (c->law == CUT_MOEBIUS) return mn_cut_forward_moebius(c);
    if (c->law == CUT_DIAGONAL) return mn_cut_forward_diagonal(c);
    return c->law == CUT_TAIL ? forward_tail(c) : mn_cut_forward_pipeline(c);
}

static mn_status backward(cut_call *c) {
    if (c->sizes->cu_seqlens) return mn_cut_backward_packed(c);
    if (c->n_keys > 0 && c->device) return mn_cut_backward_keys_device(c);
    if (c->n_keys > 0) return backward_keys(c);
    if (is_local(c)) return mn_cut_run(c, MN_BACKWARD, c->args);
    if (c->law == CUT_MOEBIUS) return mn_cut_backward_moebius(c);
    if (c->law == CUT_DIAGONAL) return mn_cut_backward_diagonal(c);
    return c->law == CUT_AFFINE ? backward_affine(c) : mn_cut_backward_pipeline(c);
}

mn_status mn_sequence_forward(const mn_sequence *s, mn_op_id op, void *args, bool plan) {
    cut_call c;
    mn_status st = take_apart(&c, s, op, args);
    if (st != MN_OK) return st;
    const mn_mark mark = c.device ? mn_device_mark(c.device) : (mn_mark){ 0 };
    st = forward(&c, plan);
    if (c.device) mn_device_release(c.device, mark);
    return st;
}

mn_status mn_sequence_backward(const mn_sequence *s, mn_op_id op, void *args, bool plan) {
    cut_call c;
    mn_status st = take_apart(&c, s, op, args);
    if (st != MN_OK || plan) return st;
    const mn_mark mark = c.device ? mn_device_mark(c.device) : (mn_mark){ 0 };
    st = backward(&c);
    if (c.device) mn_device_release(c.device, mark);
    return st;
}
