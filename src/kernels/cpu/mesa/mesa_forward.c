/* mesa_forward.c - outputs and states of mesa, chunk after chunk. One item is one head of one
 * sequence, or a segment of it (mesa.h). */
#include <string.h>

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
    const int64_t heads = mn_n_sequences(c) * c->H;
    int64_t kept;
    plan->n_phases = 2;
    plan->items[0] = mn_mesa_is_cut(c) ? heads : 0;
    plan->items[1] = heads * mn_mesa_segments(c);
    const bool ok = MN_T(mn_mesa_state_floats)(&state, c) &&
                    mn_mul_i64(&kept, state, mn_mesa_is_cut(c) ? plan->items[1] : 0) &&
                    mn_mul_size(&plan->shared_bytes, (size_t)kept, sizeof(float)) &&
                    MN_T(mn_mesa_chunk_floats)(&count, c) &&
                    mn_mul_i64(&rows, c->K, MN_STAT_CHUNK) && mn_add_i64(&count, count, state) &&
                    mn_add_i64(&count, count, rows) && MN_T(mn_mesa_solver_bytes)(&solver, c) &&
                    mn_mul_size(&others, (size_t)count, sizeof(float)) &&
                    mn_add_size(&all, solver, others);
    if (ok && all > plan->scratch_bytes) plan->scratch_bytes = all;
    return ok;
}

/* Work space of an item: what is at hand, and rows x. */
typedef struct work {
    mn_mesa_solver solver;
    mn_mesa_chunk c;
    mn_mesa_state S;
    int64_t size;    // floats of a state
    float *X;
} work;

static void place(work *w, const mn_mesa_args *p, int64_t h, void *scratch) {
    size_t solver_bytes;
    (void)MN_T(mn_mesa_solver_bytes)(&solver_bytes, &p->call);
    (void)MN_T(mn_mesa_state_floats)(&w->size, &p->call);
    MN_T(mn_mesa_solver_place)(&w->solver, scratch, p->call.K, MN_ROW(float, p->lam, 0, 0, h));
    w->solver.steps = p->steps;
    float *at = (float *)(void *)((unsigned char *)scratch + solver_bytes);
    at = MN_T(mn_mesa_chunk_place)(&w->c, at, &p->call);
    w->S = MN_T(mn_mesa_state_at)(at, &p->call);
    w->X = at + w->size;
}

static void store_state(const mn_mesa_args *p, mn_mesa_state S, int64_t n, int64_t h) {
    const int64_t K = p->call.K;
    MN_T(mn_stat_store)(MN_ROW_OUT(float, p->hkk, n, 0, h), S.kk, K * K);
    MN_T(mn_stat_store)(MN_ROW_OUT(float, p->hkv, n, 0, h), S.kv, K * p->call.V);
}

/* Chunks [first, end) of the sequence, from the state in w->S. */
static void run_chunks(work *w, const mn_mesa_args *p, const mn_sequence *seq, int64_t h,
                       int64_t first, int64_t end) {
    const int64_t K = p->call.K;
    mn_mesa_chunk *c = &w->c;
    for (int64_t i = first; i < end; i++) {
        MN_T(mn_mesa_prepare)(c, p, seq, h, i * MN_STAT_CHUNK, p->o.data);
        if (p->o.data) {
            for (int64_t t = 0; t < c->L; t++) {
                const float *q = MN_ROW(float, p->q, c->b, c->t0 + t, h);
                mn_scale(w->X + t * K, (float)p->scale, q, K);
            }
            MN_T(mn_mesa_solve)(&w->X, 1, &w->solver, c, w->S.kk);
            write_outputs(p, c, w->X, w->S);
        }
        MN_T(mn_mesa_advance)(w->S, c, &p->call);
    }
}

void MN_T(mn_mesa_keep)(float *kept, mn_mesa_state S, mn_mesa_chunk *c, const mn_mesa_args *p,
                        const mn_sequence *seq, int64_t n, int64_t h, int64_t every) {
    int64_t size;
    (void)MN_T(mn_mesa_state_floats)(&size, &p->call);
    MN_T(mn_mesa_state_load)(S, p, n, h);
    for (int64_t i = 0; i * MN_STAT_CHUNK < seq->length; i++) {
        if (i % every == 0) memcpy(kept + i / every * size, S.kk, (size_t)size * sizeof *kept);
        MN_T(mn_mesa_prepare)(c, p, seq, h, i * MN_STAT_CHUNK, false);
        MN_T(mn_mesa_advance)(S, c, &p->call);
    }
}

void MN_T(mn_mesa_forward_run)(const void *args, int phase, int64_t item, void *shared,
                               void *scratch) {
    const mn_mesa_args *p = args;
    const int64_t segments = mn_mesa_segments(&p->call), head = phase ? item / segments : item;
    const int64_t n = head / p->call.H, h = head % p->call.H, segment = phase ? item % segments : 0;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    const int64_t chunks = mn_ceil_div(seq.length, MN_STAT_CHUNK);
    const bool cut = mn_mesa_is_cut(&p->call);
    if (seq.length == 1 && p->steps == 0) {
        if (phase && segment == 0) MN_T(mn_mesa_token)(p, &seq, n, h, NULL, scratch);
        return;
    }
    work w;
    place(&w, p, h, scratch);
    float *kept = cut ? (float *)shared + head * segments * w.size : NULL;
    const int64_t first = segment * MN_MESA_SEGMENT;
    if (phase == 0) {
        MN_T(mn_mesa_keep)(kept, w.S, &w.c, p, &seq, n, h, MN_MESA_SEGMENT);
        store_state(p, w.S, n, h);
    } else if (!cut) {
        MN_T(mn_mesa_state_load)(w.S, p, n, h);
        run_chunks(&w, p, &seq, h, 0, chunks);
        store_state(p, w.S, n, h);
    } else if (first < chunks && p->o.data) {
        memcpy(w.S.kk, kept + segment * w.size, (size_t)w.size * sizeof *kept);
        run_chunks(&w, p, &seq, h, first, mn_min(chunks, first + MN_MESA_SEGMENT));
    }
}
