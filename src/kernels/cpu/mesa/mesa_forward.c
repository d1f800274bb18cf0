/* mesa_forward.c - outputs and states of mesa, chunk after chunk. */
#include "kernels/cpu/mesa/mesa.h"

/* o = diag(first) X Hkv + (W.(X K')) diag(beta) V */
static void write_outputs(const mn_mesa_args *p, mn_mesa_chunk *c, const float *X,
                          mn_mesa_state S) {
    const int64_t K = p->call.K, V = p->call.V;
    const mn_mat o = mn_mat_rows_out(p->o, c->b, c->t0, c->h), x = mn_mat_of(X, K);
    mn_gemm_args g = mn_product(o, x, mn_mat_of(S.kv, V), (mn_dims){ c->L, V, K });
    MN_T(mn_gemm)(&g);
    MN_T(mn_stat_scores)(c->P, x, c->k, c->L, K);
    MN_T(mn_stat_weigh)(c->P, c->P, c->Wb, c->L);
    g = mn_product(o, mn_mat_of(c->P, MN_STAT_CHUNK), c->v, (mn_dims){ c->L, V, c->L });
    g.base = MN_GEMM_SCALE;
    g.c_scale = c->first;
    g.shape = MN_GEMM_A_LOWER;
    MN_T(mn_gemm)(&g);
}

/* Solver, chunk, state, and the rows x; or the room of a step. */
bool MN_T(mn_mesa_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t state, count, rows;
    size_t solver, others, all;
    if (!MN_T(mn_mesa_token_plan)(args, plan)) return false;
    plan->items[0] = mn_n_sequences(c) * c->H;
    const bool ok = MN_T(mn_mesa_state_floats)(&state, c) &&
                    MN_T(mn_mesa_chunk_floats)(&count, c) &&
                    mn_mul_i64(&rows, c->K, MN_STAT_CHUNK) && mn_add_i64(&count, count, state) &&
                    mn_add_i64(&count, count, rows) && MN_T(mn_mesa_solver_bytes)(&solver, c) &&
                    mn_mul_size(&others, (size_t)count, sizeof(float)) &&
                    mn_add_size(&all, solver, others);
    if (ok && all > plan->scratch_bytes) plan->scratch_bytes = all;
    return ok;
}

void MN_T(mn_mesa_forward_run)(const void *args, int phase, int64_t item, void *shared,
                               void *scratch) {
    (void)phase, (void)shared;
    const mn_mesa_args *p = args;
    const int64_t K = p->call.K, n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    if (seq.length == 1 && p->steps == 0) {
        MN_T(mn_mesa_token)(p, &seq, n, h, NULL, scratch);
        return;
    }
    size_t solver_bytes;
    int64_t state_floats;
    mn_mesa_solver solver;
    mn_mesa_chunk c;
    (void)MN_T(mn_mesa_solver_bytes)(&solver_bytes, &p->call);
    (void)MN_T(mn_mesa_state_floats)(&state_floats, &p->call);
    MN_T(mn_mesa_solver_place)(&solver, scratch, K, MN_ROW(float, p->lam, 0, 0, h));
    solver.steps = p->steps;
    float *at = (float *)(void *)((unsigned char *)scratch + solver_bytes);
    at = MN_T(mn_mesa_chunk_place)(&c, at, &p->call);
    const mn_mesa_state S = MN_T(mn_mesa_state_at)(at, &p->call);
    float *X = at + state_floats;
    MN_T(mn_mesa_state_load)(S, p, n, h);
    for (int64_t start = 0; start < seq.length; start += MN_STAT_CHUNK) {
        MN_T(mn_mesa_prepare)(&c, p, &seq, h, start, p->o.data);
        if (p->o.data) {
            for (int64_t t = 0; t < c.L; t++) {
                const float *q = MN_ROW(float, p->q, c.b, c.t0 + t, h);
                mn_scale(X + t * K, (float)p->scale, q, K);
            }
            MN_T(mn_mesa_solve)(&X, 1, &solver, &c, S.kk);
            write_outputs(p, &c, X, S);
        }
        MN_T(mn_mesa_advance)(S, &c, &p->call);
    }
    MN_T(mn_stat_store)(MN_ROW_OUT(float, p->hkk, n, 0, h), S.kk, K * K);
    MN_T(mn_stat_store)(MN_ROW_OUT(float, p->hkv, n, 0, h), S.kv, K * p->call.V);
}
