/* sequence_diagonal.c - Palimpsa's state over ranks that share a sequence, by composing.
 *
 *   I_T = I'_T + A (I_0 - ip)      M_T = M'_T + A M_0      M = mu I,  A = prod a_t of each head
 *
 * exactly, I' and M' being what the tokens of a rank make of a fresh state (ip, 0). One gather of
 * (M', I', A) gives every rank its initial state. Going back, with the adjoints of M and I,
 *
 *   dM_0 = dM'_0 + A dM_T          dI_0 = dI'_0 + A dI_T
 *
 * and dmu = dM I, dimp = dI + dM mu turn them into cotangents of the final mean and importance. A
 * rank runs its tokens twice, forward and back; states are composed in double. */
#include <math.h>
#include <string.h>

#include "base/util.h"
#include "ranks/sequence_internal.h"

/* What a rank puts into a gather: planes (N,H,K,V), and A (N,H), all in double. */
enum { MEAN, IMPORTANCE, MEAN0, IMPORTANCE0, PLANES };

typedef struct gathered {
    double *all;
    int64_t heads, cells, each;    // of all sequences; cells of a head; doubles of a rank
} gathered;

static mn_status open_gather(gathered *g, const cut_call *c) {
    g->heads = mn_cut_count(c, "NH");
    g->cells = c->sizes->K * c->sizes->V;
    g->each = g->heads * (PLANES * g->cells + 1);
    g->all = cut_zeros((size_t)(c->world * g->each) * sizeof *g->all);
    return g->all ? MN_OK : MN_ERR_MEMORY;
}

static double *plane_of(const gathered *g, int rank, int plane) {
    return g->all + rank * g->each + plane * g->heads * g->cells;
}

static double *decay_of(const gathered *g, int rank) {
    return plane_of(g, rank, PLANES);
}

static mn_status gather(gathered *g, const cut_call *c) {
    const double *own = g->all + c->rank * g->each;
    return mn_comm_all_gather(c->s->comm, g->all, own, (size_t)g->each * sizeof *own);
}

static double number(const cut_call *c, const void *data, int64_t at) {
    return c->item == sizeof(double) ? ((const double *)data)[at] : ((const float *)data)[at];
}

static void set_number(const cut_call *c, void *data, int64_t at, double x) {
    if (c->item == sizeof(double)) ((double *)data)[at] = x;
    else ((float *)data)[at] = (float)x;
}

/* State i is the mean or the importance. */
static const cut_state *state_of(const cut_call *c, bool mean) {
    const bool first = strcmp(c->states[0].in->name, "mu0") == 0;
    return &c->states[first == mean ? 0 : 1];
}

/* ---- decays ---------------------------------------------------------------------------------- */

static double at(const cut_call *c, const mn_in *view, int64_t b, int64_t t, int64_t h) {
    const int64_t H = c->sizes->H, step = view->stride[1] ? view->stride[1] : H;
    const int64_t row = view->stride[0] ? view->stride[0] : c->sizes->T * H;
    return number(c, view->data, b * row + t * step + h);
}

/* log a of a token, for each operator. */
static double importance_decay(const cut_call *c, int64_t b, int64_t t, int64_t h) {
    return at(c, &((const mn_importance_args *)c->args)->g, b, t, h);
}

static double paper_decay(const cut_call *c, int64_t b, int64_t t, int64_t h) {
    const mn_palimpsa_paper_args *p = (const mn_palimpsa_paper_args *)c->args;
    return log1p(-at(c, &p->gamma, b, t, h) / number(c, p->n_mem.data, h));
}

static double code_decay(const cut_call *c, int64_t b, int64_t t, int64_t h) {
    const mn_palimpsa_code_args *p = (const mn_palimpsa_code_args *)c->args;
    return -at(c, &p->dt, b, t, h) * number(c, p->decay_rate.data, h);
}

typedef struct gating {
    mn_op_id op;
    double (*log_decay)(const cut_call *c, int64_t b, int64_t t, int64_t h);
    size_t ip;
} gating;

static const gating *gating_of(const cut_call *c) {
    static const gating all[] = {
        { MN_OP_importance, importance_decay, offsetof(mn_importance_args, ip) },
        { MN_OP_palimpsa_paper, paper_decay, offsetof(mn_palimpsa_paper_args, ip) },
        { MN_OP_palimpsa_code, code_decay, offsetof(mn_palimpsa_code_args, ip) },
    };
    const gating *of = all;
    while (of->op != c->op) of++;    // sequence.def lists these
    return of;
}

static void put_decays(const gathered *g, const cut_call *c) {
    const gating *of = gating_of(c);
    for (int64_t n = 0; n < g->heads; n++) {
        double sum = 0.0;
        for (int64_t t = 0; t < c->sizes->T; t++) {
            sum += of->log_decay(c, n / c->sizes->H, t, n % c->sizes->H);
        }
        decay_of(g, c->rank)[n] = exp(sum);
    }
}

static double prior(const cut_call *c, int64_t head) {
    const mn_in *ip = (const mn_in *)(c->args + gating_of(c)->ip);
    return number(c, ip->data, head % c->sizes->H);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* The tokens from a fresh state; on rank 0 from the one it is given, which is their end already. */
static mn_status run_alone(const cut_call *c) {
    unsigned char args[MN_MAX_ARGS_BYTES];
    memcpy(args, c->args, mn_op_describe(c->op)->args_bytes);
    for (int i = 0; i < c->n_states && c->rank > 0; i++) {
        ((mn_in *)(args + c->states[i].in->offset))->data = NULL;
    }
    return mn_cut_run(c, MN_FORWARD, args);
}

static void put_finals(const gathered *g, const cut_call *c) {
    const void *mu = cut_in(c, state_of(c, true)->out)->data;
    const void *imp = cut_in(c, state_of(c, false)->out)->data;
    for (int64_t i = 0; i < g->heads * g->cells; i++) {
        plane_of(g, c->rank, IMPORTANCE)[i] = number(c, imp, i);
        plane_of(g, c->rank, MEAN)[i] = number(c, mu, i) * number(c, imp, i);
    }
}

static void put_initial_states(const gathered *g, const cut_call *c) {
    void *mu0 = (void *)cut_in(c, state_of(c, true)->in)->data;
    void *imp0 = (void *)cut_in(c, state_of(c, false)->in)->data;
    for (int64_t i = 0; i < g->heads * g->cells; i++) {
        const int64_t head = i / g->cells;
        const double ip = prior(c, head);
        double mean = plane_of(g, 0, MEAN)[i], importance = plane_of(g, 0, IMPORTANCE)[i];
        for (int r = 1; r < c->rank; r++) {
            const double a = decay_of(g, r)[head];
            mean = plane_of(g, r, MEAN)[i] + a * mean;
            importance = plane_of(g, r, IMPORTANCE)[i] + a * (importance - ip);
        }
        set_number(c, mu0, i, mean / importance);
        set_number(c, imp0, i, importance);
    }
}

mn_status mn_cut_forward_diagonal(cut_call *c) {
    void *lent[CUT_STATES] = { NULL };
    gathered g;
    mn_status st = open_gather(&g, c);
    if (st == MN_OK) st = mn_cut_lend_finals(c, lent);
    if (st == MN_OK && c->rank + 1 < c->world) st = run_alone(c);
    if (st == MN_OK && c->rank + 1 < c->world) {
        put_finals(&g, c);
        put_decays(&g, c);
    }
    if (st == MN_OK) st = gather(&g, c);
    if (st == MN_OK && c->rank > 0) put_initial_states(&g, c);
    if (st == MN_OK && c->rank > 0) st = mn_cut_run(c, MN_FORWARD, c->args);
    mn_cut_return_finals(c, lent);
    free(g.all);
    return st;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* The gradient of the initial state from this rank's results alone. */
static mn_status put_own(const gathered *g, const cut_call *c) {
    unsigned char args[MN_MAX_ARGS_BYTES];
    int n;
    const mn_field *fields = mn_op_fields(c->op, &n);
    const cut_state *mean = state_of(c, true), *importance = state_of(c, false);
    void *dmu = cut_zeros(mean->bytes), *dimp = cut_zeros(importance->bytes);
    mn_status st = dmu && dimp ? MN_OK : MN_ERR_MEMORY;
    memcpy(args, c->args, mn_op_describe(c->op)->args_bytes);
    for (int i = 0; i < n; i++) {
        if (fields[i].role > MN_ROLE_OPT || fields[i].partner == MN_NO_OFFSET) continue;
        ((mn_in *)(args + fields[i].partner))->data = NULL;
    }
    *(mn_in *)(args + mean->in->partner) = (mn_in){ dmu, { 0 } };
    *(mn_in *)(args + importance->in->partner) = (mn_in){ dimp, { 0 } };
    for (int i = 0; i < c->n_states && c->rank + 1 < c->world; i++) {
        ((mn_in *)(args + c->states[i].out->partner))->data = NULL;
    }
    if (st == MN_OK) st = mn_cut_run(c, MN_BACKWARD, args);
    const void *mu0 = cut_in(c, mean->in)->data, *imp0 = cut_in(c, importance->in)->data;
    for (int64_t i = 0; st == MN_OK && i < g->heads * g->cells; i++) {
        const double I = number(c, imp0, i), mu = number(c, mu0, i), dM = number(c, dmu, i) / I;
        plane_of(g, c->rank, MEAN)[i] = dM;
        plane_of(g, c->rank, IMPORTANCE)[i] = number(c, dimp, i) - dM * mu;
        plane_of(g, c->rank, MEAN0)[i] = mu;
        plane_of(g, c->rank, IMPORTANCE0)[i] = I;
    }
    free(dmu);
    free(dimp);
    return st;
}

/* What the ranks behind this one want of its final state. */
static void put_cotangents(const gathered *g, const cut_call *c, void *dmu, void *dimp) {
    for (int64_t i = 0; i < g->heads * g->cells; i++) {
        double dM = 0.0, dI = 0.0;
        for (int r = c->world - 1; r > c->rank; r--) {
            const double a = decay_of(g, r)[i / g->cells];
            dM = plane_of(g, r, MEAN)[i] + a * dM;
            dI = plane_of(g, r, IMPORTANCE)[i] + a * dI;
        }
        set_number(c, dmu, i, dM * plane_of(g, c->rank + 1, IMPORTANCE0)[i]);
        set_number(c, dimp, i, dI + dM * plane_of(g, c->rank + 1, MEAN0)[i]);
    }
}

mn_status mn_cut_backward_diagonal(cut_call *c) {
    const cut_state *mean = state_of(c, true), *importance = state_of(c, false);
    void *dmu = cut_zeros(mean->bytes), *dimp = cut_zeros(importance->bytes);
    gathered g;
    mn_status st = open_gather(&g, c);
    if (!dmu || !dimp) st = MN_ERR_MEMORY;
    if (st == MN_OK && c->rank > 0) {
        put_decays(&g, c);
        st = put_own(&g, c);
    }
    if (st == MN_OK) st = gather(&g, c);
    if (st == MN_OK && c->rank + 1 < c->world) {
        put_cotangents(&g, c, dmu, dimp);
        *cut_partner(c, mean->out) = (mn_in){ dmu, { 0 } };
        *cut_partner(c, importance->out) = (mn_in){ dimp, { 0 } };
    }
    for (int i = 0; i < c->n_states && c->rank > 0; i++) {
        *cut_partner(c, c->states[i].in) = (mn_in){ NULL, { 0 } };
    }
    if (st == MN_OK) st = mn_cut_run(c, MN_BACKWARD, c->args);
    free(g.all);
    free(dmu);
    free(dimp);
    return st;
}
