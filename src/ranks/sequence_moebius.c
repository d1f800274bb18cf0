/* sequence_moebius.c - KLA's state over ranks that share a sequence, by composing.
 *
 *   forward    the tokens of a rank are a map of (n, d, e), lam = n / d, eta = e / d; one gather of
 *              maps gives every rank its initial state, from which it runs as for itself
 *   backward   they take the gradient (om, mu) of (1 / lam, eta / lam) at their end affinely to
 *              that at their start; one gather gives every rank the cotangent of its final state
 *
 * All ranks work at once, where a pipeline has them wait for each other. Maps are composed in
 * double, rank after rank, with the common factor of a state taken out as a power of two, so that
 * nothing overflows. A rank whose tokens have no map (inputs without a projective form, precisions
 * at their floor) says so in the gather, and all of them pass states on instead.
 * Equations: docs/math/precision.md, "Over ranks". */
#include <math.h>
#include <string.h>

#include "ops/run.h"
#include "ranks/sequence_internal.h"

/* What a rank puts into a gather: `planes` numbers of every cell (N, planes, V, K), and before them
 * whether they are good. */
enum { HEAD = 8, BACK_W = MN_ADJOINT_ENTRIES, BACK_M, BACK_PLANES };

typedef struct gathered {
    char *all;
    size_t each;
    int64_t sequences, cells;    // cells of a sequence
    int planes;
} gathered;

static mn_moebius_args *args_of(const cut_call *c) {
    return (mn_moebius_args *)c->args;
}

static double number(const cut_call *c, const void *data, int64_t at) {
    return c->item == sizeof(double) ? ((const double *)data)[at] : ((const float *)data)[at];
}

static void set_number(const cut_call *c, void *data, int64_t at, double x) {
    if (c->item == sizeof(double)) ((double *)data)[at] = x;
    else ((float *)data)[at] = (float)x;
}

/* State `at` of an initial state, or what a fresh one is. */
static double initial(const cut_call *c, const mn_in *state, int64_t at, double fresh) {
    return state->data ? number(c, state->data, at) : fresh;
}

/* ---- gathering ------------------------------------------------------------------------------- */

static mn_status open_gather(gathered *g, const cut_call *c, int64_t sequences, int planes) {
    const mn_call *sizes = c->sizes;
    *g = (gathered){ .sequences = sequences, .cells = sizes->V * sizes->K, .planes = planes };
    g->each = HEAD + (size_t)(g->sequences * planes * g->cells) * c->item;
    g->all = cut_zeros((size_t)c->world * g->each);
    return g->all ? MN_OK : MN_ERR_MEMORY;
}

static void *plane_of(const gathered *g, const cut_call *c, int rank, int64_t n, int plane) {
    return g->all + (size_t)rank * g->each + HEAD +
           (size_t)((n * g->planes + plane) * g->cells) * c->item;
}

/* Sends this rank's planes to all; *good: those of all ranks are. */
static mn_status gather(gathered *g, const cut_call *c, bool own, bool *good) {
    char *mine = g->all + (size_t)c->rank * g->each;
    mine[0] = own;
    const mn_status st = mn_comm_all_gather(c->s->comm, g->all, mine, g->each);
    *good = true;
    for (int r = 0; st == MN_OK && r < c->world; r++) *good &= g->all[(size_t)r * g->each] != 0;
    return st;
}

static bool all_finite(const gathered *g, const cut_call *c) {
    const void *own = plane_of(g, c, c->rank, 0, 0);
    for (int64_t i = 0; i < g->sequences * g->planes * g->cells; i++) {
        if (!isfinite(number(c, own, i))) return false;
    }
    return true;
}

/* Finds the summary of the tokens of a call: `entries` of the planes of each of its sequences,
 * which are those from `first` on. */
static mn_status summarise(const gathered *g, const cut_call *c, mn_span_id id, int entries,
                           int64_t first, bool *good) {
    const mn_moebius_args *args = args_of(c);
    const int64_t sequences = args->call.B, part = entries * g->cells;
    const int64_t rows = sequences * args->call.V;
    char *out = cut_zeros((size_t)(sequences * part) * c->item);
    unsigned char *marks = cut_zeros((size_t)rows);
    const mn_moebius_span_args span = { .op = *args, .out = out, .good = marks };
    mn_status st = out && marks ? mn_op_run_span(c->s->context, id, &span) : MN_ERR_MEMORY;
    for (int64_t n = 0; st == MN_OK && n < sequences; n++) {
        memcpy(plane_of(g, c, c->rank, first + n, 0), out + (size_t)(n * part) * c->item,
               (size_t)part * c->item);
    }
    *good = st == MN_OK;
    for (int64_t i = 0; *good && i < rows; i++) *good = marks[i] != 0;
    free(out);
    free(marks);
    return st;
}

/* ---- forward --------------------------------------------------------------------------------- */

/* (n, d, e) of a cell, up to a common factor. */
typedef struct cell {
    double n, d, e;
} cell;

/* Takes a power of two out: n or d lies in [1/2, 1) then. */
static void rescale(cell *x) {
    int exponent;
    frexp(fmax(x->n, x->d), &exponent);
    *x = (cell){ ldexp(x->n, -exponent), ldexp(x->d, -exponent), ldexp(x->e, -exponent) };
}

/* What the tokens of `rank` make of a cell of sequence n. */
static void apply_map(cell *x, const gathered *g, const cut_call *c, int rank, int64_t n,
                      int64_t at) {
    double m[MN_MAP_ENTRIES];
    for (int i = 0; i < MN_MAP_ENTRIES; i++) m[i] = number(c, plane_of(g, c, rank, n, i), at);
    *x = (cell){ m[MN_MAP_A] * x->n + m[MN_MAP_B] * x->d, m[MN_MAP_C] * x->n + m[MN_MAP_D] * x->d,
                 m[MN_MAP_X] * x->n + m[MN_MAP_Y] * x->d + m[MN_MAP_E] * x->e };
    rescale(x);
}

/* Rank 0 puts the state behind its tokens where others have a map: (n, d, e) in A, C and X. */
static bool put_first_state(const gathered *g, const cut_call *c) {
    const mn_moebius_args *args = args_of(c);
    for (int64_t n = 0; n < g->sequences; n++) {
        for (int64_t at = 0; at < g->cells; at++) {
            const int64_t i = n * g->cells + at;
            cell x = { initial(c, &args->lam0, i, 1.0), 1.0, initial(c, &args->eta0, i, 0.0) };
            if (!(x.n >= 0.0) || !isfinite(x.n) || !isfinite(x.e)) return false;
            apply_map(&x, g, c, 0, n, at);
            set_number(c, plane_of(g, c, 0, n, MN_MAP_A), at, x.n);
            set_number(c, plane_of(g, c, 0, n, MN_MAP_C), at, x.d);
            set_number(c, plane_of(g, c, 0, n, MN_MAP_X), at, x.e);
        }
    }
    return true;
}

static double plane_number(const gathered *g, const cut_call *c, int rank, int64_t n, int plane,
                           int64_t at) {
    return number(c, plane_of(g, c, rank, n, plane), at);
}

/* Strings the maps of the ranks before this one together. */
static void put_initial_states(const gathered *g, const cut_call *c) {
    const mn_moebius_args *args = args_of(c);
    void *lam0 = (void *)args->lam0.data, *eta0 = (void *)args->eta0.data;
    for (int64_t n = 0; n < g->sequences; n++) {
        for (int64_t at = 0; at < g->cells; at++) {
            cell x = { plane_number(g, c, 0, n, MN_MAP_A, at),
                       plane_number(g, c, 0, n, MN_MAP_C, at),
                       plane_number(g, c, 0, n, MN_MAP_X, at) };
            for (int r = 1; r < c->rank; r++) apply_map(&x, g, c, r, n, at);
            set_number(c, lam0, n * g->cells + at, x.n / x.d);
            set_number(c, eta0, n * g->cells + at, x.e / x.d);
        }
    }
}

mn_status mn_cut_forward_moebius(cut_call *c) {
    gathered g;
    bool good = true, all_good = false;
    mn_status st = open_gather(&g, c, c->sizes->B, MN_MAP_ENTRIES);
    if (st == MN_OK && c->rank + 1 < c->world) {    // what the last one does nobody needs
        st = summarise(&g, c, MN_SPAN_moebius_map, MN_MAP_ENTRIES, 0, &good);
        if (st == MN_OK && c->rank == 0) good = good && put_first_state(&g, c);
        good = good && all_finite(&g, c);
    }
    if (st == MN_OK) st = gather(&g, c, good, &all_good);
    if (st == MN_OK && all_good && c->rank > 0) put_initial_states(&g, c);
    free(g.all);
    if (st != MN_OK) return st;
    if (!all_good) return mn_cut_forward_pipeline(c);
    return mn_op_run(c->s->context, c->op, MN_FORWARD, c->args);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* w and m in front of the tokens of a call, whose sequences are those from `first` on. */
static bool put_moments(const gathered *g, const cut_call *c, int64_t first) {
    const mn_moebius_args *args = args_of(c);
    for (int64_t n = 0; n < args->call.B; n++) {
        for (int64_t at = 0; at < g->cells; at++) {
            const int64_t i = n * g->cells + at;
            const double lam = initial(c, &args->lam0, i, 1.0);
            if (!(lam > 0.0)) return false;
            set_number(c, plane_of(g, c, c->rank, first + n, BACK_W), at, 1.0 / lam);
            set_number(c, plane_of(g, c, c->rank, first + n, BACK_M), at,
                       initial(c, &args->eta0, i, 0.0) / lam);
        }
    }
    return true;
}

/* The gradient in front of the tokens of the next rank, as cotangents of lam and eta here. */
static void put_cotangents(const gathered *g, const cut_call *c, void *dlam, void *deta) {
    for (int64_t n = 0; n < g->sequences; n++) {
        for (int64_t at = 0; at < g->cells; at++) {
            double om = 0.0, mu = 0.0, x[BACK_PLANES] = { 0 };
            for (int r = c->world - 1; r > c->rank; r--) {
                for (int i = 0; i < BACK_PLANES; i++) x[i] = plane_number(g, c, r, n, i, at);
                om = x[MN_ADJOINT_GAMMA] * om + x[MN_ADJOINT_DELTA] * mu + x[MN_ADJOINT_EPS];
                mu = x[MN_ADJOINT_ALPHA] * mu + x[MN_ADJOINT_BETA];
            }
            const double w = x[BACK_W];
            set_number(c, dlam, n * g->cells + at, -w * (om * w + mu * x[BACK_M]));
            set_number(c, deta, n * g->cells + at, mu * w);
        }
    }
}

/* With the cotangents of all ranks behind this one. */
static mn_status run_backward(const gathered *g, cut_call *c) {
    mn_moebius_args *args = args_of(c);
    const size_t bytes = (size_t)(g->sequences * g->cells) * c->item;
    void *dlam = cut_zeros(bytes), *deta = cut_zeros(bytes);
    mn_status st = dlam && deta ? MN_OK : MN_ERR_MEMORY;
    if (st == MN_OK && c->rank + 1 < c->world) {
        put_cotangents(g, c, dlam, deta);
        args->cot.lam = (mn_in){ dlam, { 0 } };
        args->cot.eta = (mn_in){ deta, { 0 } };
    }
    if (c->rank > 0) args->grad.lam0.data = args->grad.eta0.data = NULL;
    if (st == MN_OK) st = mn_op_run(c->s->context, c->op, MN_BACKWARD, args);
    if (c->rank + 1 < c->world) args->cot.lam.data = args->cot.eta.data = NULL;
    free(dlam);
    free(deta);
    return st;
}

mn_status mn_cut_backward_moebius(cut_call *c) {
    mn_moebius_args *args = args_of(c);
    gathered g;
    bool good = true, all_good = false;
    if (c->rank + 1 < c->world) args->cot.lam.data = args->cot.eta.data = NULL;
    mn_status st = open_gather(&g, c, c->sizes->B, BACK_PLANES);
    if (st == MN_OK && c->rank > 0) {
        st = summarise(&g, c, MN_SPAN_moebius_adjoint, MN_ADJOINT_ENTRIES, 0, &good);
        good = good && put_moments(&g, c, 0) && all_finite(&g, c);
    }
    if (st == MN_OK) st = gather(&g, c, good, &all_good);
    if (st == MN_OK) st = all_good ? run_backward(&g, c) : mn_cut_backward_pipeline(c);
    free(g.all);
    return st;
}

/* ---- packed ---------------------------------------------------------------------------------- */

/* The sequence that crosses the border in front of `rank` in row b goes through all of its part. */
static bool goes_through(const cut_packed *p, int rank, int64_t b) {
    const int64_t *before = p->c.s->before + rank * p->n_rows + b;
    return rank + 1 < p->c.world && before[0] > 0 && before[p->n_rows] == before[0] + p->length;
}

/* A part that begins anew has the same state behind it whatever came before: n' = lam d. */
static bool put_constant(const gathered *g, const cut_packed *p, int64_t b) {
    const cut_call *c = &p->c;
    const int64_t last = p->rows[b].last;
    const void *lam = mn_cut_final(p, 0, last), *eta = mn_cut_final(p, 1, last);
    for (int64_t at = 0; at < g->cells; at++) {
        const double x = number(c, lam, at);
        if (!(x >= 0.0) || !isfinite(x)) return false;
        set_number(c, plane_of(g, c, c->rank, b, MN_MAP_B), at, x);
        set_number(c, plane_of(g, c, c->rank, b, MN_MAP_D), at, 1.0);
        set_number(c, plane_of(g, c, c->rank, b, MN_MAP_Y), at, number(c, eta, at));
    }
    return true;
}

static void put_head_states(const gathered *g, const cut_packed *p, int64_t b) {
    const cut_call *c = &p->c;
    const mn_moebius_args *args = args_of(&p->rows[b].head);
    void *lam0 = (void *)args->lam0.data, *eta0 = (void *)args->eta0.data;
    int from = c->rank - 1;    // where the sequence began
    while (goes_through(p, from, b)) from--;
    for (int64_t at = 0; at < g->cells; at++) {
        cell x = { 1.0, 1.0, 0.0 };
        for (int r = from; r < c->rank; r++) apply_map(&x, g, c, r, b, at);
        set_number(c, lam0, at, x.n / x.d);
        set_number(c, eta0, at, x.e / x.d);
    }
}

mn_status mn_cut_packed_moebius_forward(cut_packed *p, bool *done) {
    gathered g;
    bool good = true;
    mn_status st = open_gather(&g, &p->c, p->n_rows, MN_MAP_ENTRIES);
    for (int64_t b = 0; st == MN_OK && b < p->n_rows; b++) {
        cut_row *row = &p->rows[b];
        bool own = true;
        if (row->through) {
            st = summarise(&g, &row->head, MN_SPAN_moebius_map, MN_MAP_ENTRIES, b, &own);
        }
        if (st == MN_OK) st = mn_cut_run_fresh(p, row, MN_FORWARD);
        if (st == MN_OK && row->goes_on && !row->through) own = put_constant(&g, p, b);
        good = good && own;
    }
    if (st == MN_OK) st = gather(&g, &p->c, good && all_finite(&g, &p->c), done);
    for (int64_t b = 0; st == MN_OK && *done && b < p->n_rows; b++) {
        if (!p->rows[b].has_head) continue;
        put_head_states(&g, p, b);
        st = mn_cut_run_head(p, &p->rows[b], MN_FORWARD);
    }
    free(g.all);
    return st;
}

/* What comes back to the last sequence of row b, of ranks behind this one. */
static void put_row_cotangents(const gathered *g, const cut_packed *p, int64_t b) {
    const cut_call *c = &p->c;
    const size_t last = (size_t)p->rows[b].last;
    char *dlam = (char *)p->cotangent[0] + last * p->each[0];
    char *deta = (char *)p->cotangent[1] + last * p->each[1];
    int end = c->rank + 1;    // where the sequence ends
    while (goes_through(p, end, b)) end++;
    for (int64_t at = 0; at < g->cells; at++) {
        double om = 0.0, mu = 0.0, x[BACK_PLANES] = { 0 };
        for (int r = end; r > c->rank; r--) {
            for (int i = 0; i < BACK_PLANES; i++) x[i] = plane_number(g, c, r, b, i, at);
            om = x[MN_ADJOINT_GAMMA] * om + x[MN_ADJOINT_DELTA] * mu + x[MN_ADJOINT_EPS];
            mu = x[MN_ADJOINT_ALPHA] * mu + x[MN_ADJOINT_BETA];
        }
        const double w = x[BACK_W];
        set_number(c, dlam, at, -w * (om * w + mu * x[BACK_M]));
        set_number(c, deta, at, mu * w);
    }
}

mn_status mn_cut_packed_moebius_backward(cut_packed *p, bool *done) {
    gathered g;
    bool good = true;
    mn_status st = open_gather(&g, &p->c, p->n_rows, BACK_PLANES);
    for (int64_t b = 0; st == MN_OK && b < p->n_rows; b++) {
        cut_row *row = &p->rows[b];
        bool own = true;
        if (!row->has_head) continue;
        st = summarise(&g, &row->head, MN_SPAN_moebius_adjoint, MN_ADJOINT_ENTRIES, b, &own);
        good = good && own && put_moments(&g, &row->head, b);
    }
    if (st == MN_OK) st = gather(&g, &p->c, good && all_finite(&g, &p->c), done);
    for (int64_t b = 0; st == MN_OK && *done && b < p->n_rows; b++) {
        if (p->rows[b].goes_on) put_row_cotangents(&g, p, b);
        st = mn_cut_run_head(p, &p->rows[b], MN_BACKWARD);
        if (st == MN_OK) st = mn_cut_run_fresh(p, &p->rows[b], MN_BACKWARD);
    }
    free(g.all);
    return st;
}
