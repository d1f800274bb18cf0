/* longhorn_column_backward.c - gradients of per-column Longhorn, chunk after chunk from the end.
 *
 * With S the state before a chunk, D the adjoint of the state behind it, do scaled, and y_t =
 * D_t'k_t for the adjoint D_t of S_t:
 *
 *   y_t = D'k_t + sum_{s>=t} (q_s.k_t) do_s - sum_{s>t} (k_s.k_t) z_s      z_t = w_t . y_t
 *   G[t,s] = do_t.u_s  s <= t      H[t,s] = z_t.u_s  s < t
 *   dv = Z      dbeta = rest^2 . y . r      x_t = sum_j w^2 y r
 *   dQ = dO S' + G K      dK = U D' - Z S' + G'Q - (H + H')K - 2 diag(x) K
 *   D <- D + Q'dO - K'Z
 *
 * One item is some value columns of one head of one sequence, all of them when there are eight
 * heads or more. Otherwise dq and dk are sums over items: the parts wait in shared memory and a
 * second phase adds them in the order of the columns. */
#include <string.h>

#include "base/checked.h"
#include "kernels/cpu/longhorn/longhorn_column.h"
#include "kernels/cpu/chunk/replay.h"

enum { CHUNK = MN_COLUMN_CHUNK };

typedef struct item_state {
    const mn_longhorn_column_args *p;
    mn_column_tile tile;
    mn_sequence seq;
    mn_column_chunk chunk;
    float *D;                  // (K,width)
    float *doz;                // dO, then Z: (L,width) each
    float *y;                  // (L,width)
    float *G, *H;              // (L,L)
    float *Xs;                 // dO S', then Z S': (L,K) each
    float *dq, *dk;            // (L,K)
    float *dq_parts, *dk_parts;    // (B,T,H,K) of this tile in shared memory; NULL: no parts
} item_state;

static int64_t tiles_of(const mn_call *c) {
    return mn_ceil_div(c->V, mn_column_tile_width(c));
}

bool MN_T(mn_longhorn_column_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    if (!mn_cells_fit(c)) return false;
    const int64_t width = mn_column_tile_width(c), tiles = tiles_of(c);
    const int64_t work = MN_T(mn_column_chunk_floats)(c->K, width) +
                         CHUNK * (3 * width + 4 * c->K) + 2 * CHUNK * CHUNK + 16 * 8;
    int64_t state, floats, shared = 0;
    plan->n_phases = 2;
    plan->items[0] = mn_n_sequences(c) * c->H * tiles;
    plan->items[1] = tiles > 1 ? c->B * mn_ceil_div(c->T, 64) : 0;
    return mn_mul_i64(&state, c->K, width) &&
           mn_replay_floats(&floats, mn_longest_sequence(c), CHUNK, state) &&
           mn_add_i64(&floats, floats, state + work) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)floats, sizeof(float)) &&
           mn_add_size(&plan->scratch_bytes, plan->scratch_bytes, sizeof(item_state) + 64) &&
           (tiles == 1 || mn_mul_i64(&shared, c->B * c->T * c->H * c->K, 2 * tiles)) &&
           mn_mul_size(&plan->shared_bytes, (size_t)shared, sizeof(float));
}

static void advance(void *context, float *S, int64_t t, int64_t n) {
    item_state *s = context;
    const int64_t t0 = s->seq.t0 + t;
    MN_T(mn_column_chunk_prepare)(&s->chunk, s->p, &s->tile, s->seq.b, t0, n, false);
    MN_T(mn_column_chunk_solve)(&s->chunk, s->p, &s->tile, s->seq.b, t0, S);
    MN_T(mn_column_chunk_advance)(S, &s->chunk, s->p->call.K, s->tile.width);
}

static void turn(void *context, const float *S) {
    (void)S;
    item_state *s = context;
    MN_T(mn_column_state_load)(s->D, s->p->cot.state, &s->tile, s->p->call.K, s->p->call.V);
}

static void load_cotangents(item_state *s, int64_t t0) {
    const vf scale = vf_set1((float)s->p->scale);
    for (int64_t t = 0; t < s->chunk.L; t++) {
        const float *d_o = MN_ROW(float, s->p->cot.o, s->seq.b, t0 + t, s->tile.h);
        for (int64_t j = 0; j < s->tile.width; j += MN_VW) {
            const int lanes = vf_lanes(s->tile.n - j);
            const vf x = d_o ? vf_load_row(d_o + s->tile.j0 + j, lanes) : vf_zero();
            vf_store(s->doz + t * s->tile.width + j, vf_mul(scale, x));
        }
    }
}

/* y_t -= sum_{s>t} A[s,t] z_s and z_t = w_t . y_t, from the last token to the first */
static void solve_back(item_state *s, float *z) {
    const mn_column_chunk *c = &s->chunk;
    const int64_t width = s->tile.width;
    for (int64_t t = c->L - 1; t >= 0; t--) {
        for (int64_t j = 0; j < width; j += MN_VW) {
            vf y = vf_load(s->y + t * width + j);
            for (int64_t later = t + 1; later < c->L; later++) {
                const vf a = vf_set1(c->A[later * c->L + t]);
                y = vf_fnma(a, vf_load(z + later * width + j), y);
            }
            vf_store(s->y + t * width + j, y);
            vf_store(z + t * width + j, vf_mul(vf_load(c->w + t * width + j), y));
        }
    }
}

/* y = K D + P'dO, then solved; Z behind dO */
static void adjoint_residuals(item_state *s) {
    const mn_column_chunk *c = &s->chunk;
    const int64_t K = s->p->call.K, width = s->tile.width, L = c->L;
    mn_gemm_args product = { .c = s->y,
                             .c_row = width,
                             .a = c->k,
                             .a_row = K,
                             .a_col = 1,
                             .b = s->D,
                             .b_row = width,
                             .M = L,
                             .N = width,
                             .K = K,
                             .alpha = 1.0f,
                             .base = MN_GEMM_SET };
    MN_T(mn_gemm)(&product);
    product.a = c->P, product.a_row = 1, product.a_col = L, product.shape = MN_GEMM_A_UPPER;
    product.b = s->doz, product.K = L, product.base = MN_GEMM_ADD;
    MN_T(mn_gemm)(&product);
    solve_back(s, s->doz + L * width);
}

/* dv and dbeta; dk = -2 diag(x) K to begin with */
static void write_values(item_state *s, int64_t t0) {
    const mn_longhorn_column_args *p = s->p;
    const mn_column_chunk *c = &s->chunk;
    const int64_t width = s->tile.width, K = p->call.K;
    const float *z = s->doz + c->L * width;
    for (int64_t t = 0; t < c->L; t++) {
        float *dv = MN_ROW_OUT(float, p->grad.v, s->seq.b, t0 + t, s->tile.h);
        float *dbeta = MN_ROW_OUT(float, p->grad.beta, s->seq.b, t0 + t, s->tile.h);
        vf x = vf_zero();
        for (int64_t j = 0; j < width; j += MN_VW) {
            const int lanes = vf_lanes(s->tile.n - j);
            const int64_t at = t * width + j, to = s->tile.j0 + j;
            const vf rest = vf_load(c->rest + at);
            const vf yr = vf_mul(vf_load(s->y + at), vf_load(c->r + at));
            if (dv) vf_store_row(dv + to, vf_load(z + at), lanes);
            if (dbeta) vf_store_row(dbeta + to, vf_mul(vf_mul(rest, rest), yr), lanes);
            x = vf_fma(vf_load(z + at), vf_load(c->u + at), x);
        }
        const float factor = -2.0f * vf_sum(x);
        for (int64_t i = 0; i < K; i++) s->dk[t * K + i] = factor * c->k[t * K + i];
    }
}

/* C (L,L) = X U', lower triangle; the diagonal stays only `with_diagonal` */
static void lower_with_u(item_state *s, float *C, const float *X, bool with_diagonal) {
    const int64_t L = s->chunk.L, width = s->tile.width;
    const mn_gemm_args product = { .c = C, .c_row = L, .a = X, .a_row = width, .a_col = 1,
                                   .b = s->chunk.u, .b_row = width, .M = L, .N = L, .K = width,
                                   .alpha = 1.0f, .base = MN_GEMM_SET, .shape = MN_GEMM_C_LOWER };
    MN_T(mn_gemm_nt)(&product);
    for (int64_t t = 0; t < L; t++) {
        for (int64_t r = with_diagonal ? t + 1 : t; r < L; r++) C[t * L + r] = 0.0f;
    }
}

/* to (L,K) += alpha C X or alpha C'X, X (L,K), C lower */
static void add_lower(float *to, const float *C, bool transposed, const float *X, int64_t L,
                      int64_t K, float alpha) {
    const mn_gemm_args product = { .c = to, .c_row = K, .a = C, .a_row = transposed ? 1 : L,
                                   .a_col = transposed ? L : 1, .b = X, .b_row = K, .M = L, .N = K,
                                   .K = L, .alpha = alpha, .base = MN_GEMM_ADD,
                                   .shape = transposed ? MN_GEMM_A_UPPER : MN_GEMM_A_LOWER };
    MN_T(mn_gemm)(&product);
}

static void key_gradients(item_state *s, const float *S) {
    const mn_column_chunk *c = &s->chunk;
    const int64_t K = s->p->call.K, width = s->tile.width, L = c->L;
    const float *z = s->doz + L * width;
    /* dO S' and Z S' are one product over the stacked rows. */
    mn_gemm_args product = { .c = s->Xs,
                             .c_row = K,
                             .a = s->doz,
                             .a_row = width,
                             .a_col = 1,
                             .b = S,
                             .b_row = width,
                             .M = 2 * L,
                             .N = K,
                             .K = width,
                             .alpha = 1.0f,
                             .base = MN_GEMM_SET };
    MN_T(mn_gemm_nt)(&product);
    product.c = s->dk, product.a = c->u, product.b = s->D, product.M = L,
    product.base = MN_GEMM_ADD;
    MN_T(mn_gemm_nt)(&product);
    lower_with_u(s, s->G, s->doz, true);
    lower_with_u(s, s->H, z, false);
    for (int64_t i = 0; i < L * K; i++) {
        s->dq[i] = s->Xs[i];
        s->dk[i] -= s->Xs[L * K + i];
    }
    add_lower(s->dq, s->G, false, c->k, L, K, 1.0f);
    add_lower(s->dk, s->G, true, c->q, L, K, 1.0f);
    add_lower(s->dk, s->H, false, c->k, L, K, -1.0f);
    add_lower(s->dk, s->H, true, c->k, L, K, -1.0f);
}

/* D <- D + Q'dO - K'Z */
static void move_adjoint(item_state *s) {
    const mn_column_chunk *c = &s->chunk;
    const int64_t K = s->p->call.K, width = s->tile.width;
    mn_gemm_args product = { .c = s->D, .c_row = width, .a = c->q, .a_row = 1, .a_col = K,
                             .b = s->doz, .b_row = width, .M = K, .N = width, .K = c->L,
                             .alpha = 1.0f, .base = MN_GEMM_ADD };
    MN_T(mn_gemm)(&product);
    product.a = c->k, product.b = s->doz + c->L * width, product.alpha = -1.0f;
    MN_T(mn_gemm)(&product);
}

static void write_keys(const item_state *s, int64_t t0) {
    const mn_call *c = &s->p->call;
    const size_t bytes = (size_t)c->K * sizeof(float);
    for (int64_t t = 0; t < s->chunk.L; t++) {
        const int64_t at = ((s->seq.b * c->T + t0 + t) * c->H + s->tile.h) * c->K;
        float *dq = MN_ROW_OUT(float, s->p->grad.q, s->seq.b, t0 + t, s->tile.h);
        float *dk = MN_ROW_OUT(float, s->p->grad.k, s->seq.b, t0 + t, s->tile.h);
        if (s->dq_parts) dq = s->dq_parts + at, dk = s->dk_parts + at;
        if (dq) memcpy(dq, s->dq + t * c->K, bytes);
        if (dk) memcpy(dk, s->dk + t * c->K, bytes);
    }
}

static void reverse(void *context, const float *S, int64_t t, int64_t n) {
    item_state *s = context;
    const int64_t t0 = s->seq.t0 + t;
    MN_T(mn_column_chunk_prepare)(&s->chunk, s->p, &s->tile, s->seq.b, t0, n, true);
    MN_T(mn_column_chunk_solve)(&s->chunk, s->p, &s->tile, s->seq.b, t0, S);
    load_cotangents(s, t0);
    adjoint_residuals(s);
    write_values(s, t0);
    key_gradients(s, S);
    write_keys(s, t0);
    move_adjoint(s);
}

static float *take(float **at, int64_t n) {
    float *here = *at;
    *at += mn_ceil_div(n, 16) * 16;
    return here;
}

static void run_item(const mn_longhorn_column_args *p, int64_t item, float *parts, void *scratch) {
    const mn_call *call = &p->call;
    const int64_t K = call->K, tiles = tiles_of(call), rows = call->B * call->T * call->H * K;
    item_state s = { .p = p, .tile = mn_column_tile_at(call, item) };
    const int64_t width = s.tile.width;
    s.seq = mn_sequence_at(call, s.tile.sequence);
    float *memory = MN_T(mn_column_chunk_place)(&s.chunk, scratch, K, width);
    s.D = take(&memory, K * width), s.doz = take(&memory, 2 * CHUNK * width);
    s.y = take(&memory, CHUNK * width);
    s.G = take(&memory, CHUNK * CHUNK), s.H = take(&memory, CHUNK * CHUNK);
    s.Xs = take(&memory, 2 * CHUNK * K);
    s.dq = take(&memory, CHUNK * K), s.dk = take(&memory, CHUNK * K);
    if (tiles > 1) {
        s.dq_parts = parts + item % tiles * rows;
        s.dk_parts = parts + (tiles + item % tiles) * rows;
    }
    MN_T(mn_column_state_load)(memory, p->state0, &s.tile, K, call->V);
    const mn_replay replay = { .T = s.seq.length,
                               .block = CHUNK,
                               .floats = K * width,
                               .context = &s,
                               .advance = advance,
                               .turn = turn,
                               .reverse = reverse };
    mn_replay_run(&replay, memory);
    MN_T(mn_column_state_store)(p->grad.state0, s.D, &s.tile, K, call->V);
}

/* to = sum of the parts, n numbers each, in the order of the tiles */
static void add_parts(float *to, const float *from, int64_t tiles, int64_t step, int64_t n) {
    for (int64_t i = 0; to && i < n; i++) {
        float sum = from[i];
        for (int64_t tile = 1; tile < tiles; tile++) sum += from[tile * step + i];
        to[i] = sum;
    }
}

/* 64 tokens of one batch row */
static void add_tokens(const mn_longhorn_column_args *p, int64_t item, const float *parts) {
    const mn_call *c = &p->call;
    const int64_t blocks = mn_ceil_div(c->T, 64), b = item / blocks, t0 = item % blocks * 64;
    const int64_t tiles = tiles_of(c), rows = c->B * c->T * c->H * c->K;
    for (int64_t t = t0; t < mn_min(t0 + 64, c->T); t++) {
        for (int64_t h = 0; h < c->H; h++) {
            const float *dq = parts + ((b * c->T + t) * c->H + h) * c->K, *dk = dq + tiles * rows;
            add_parts(MN_ROW_OUT(float, p->grad.q, b, t, h), dq, tiles, rows, c->K);
            add_parts(MN_ROW_OUT(float, p->grad.k, b, t, h), dk, tiles, rows, c->K);
        }
    }
}

void MN_T(mn_longhorn_column_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                           void *scratch) {
    const mn_longhorn_column_args *p = args;
    if (phase == 0) run_item(p, item, shared, scratch);
    else add_tokens(p, item, shared);
}
