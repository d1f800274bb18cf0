/* mlstm_chunk.cu - mLSTM over chunks in bf16: launches of mlstm_state_scan.cuh, and what lies
 * between
 * them.
 *
 * Forward: the gates of all tokens, one scan. Backward: the same scan without an output, which
 * leaves a and o.do of every token; e and the denominators; scans of dq, dv and dk; and
 *
 *   dipre = k.dk      dfpre = dlf sigmoid(-fpre)      dlf as a decay's in additive_decay_grad.cuh
 * */
#include "kernels/cuda/additive/additive.cuh"
#include "kernels/cuda/additive/additive_decay_grad.cuh"
#include "kernels/cuda/mlstm/mlstm.cuh"
#include "kernels/cuda/mlstm/mlstm_state_scan.cuh"

#include <math.h>

enum { MAX_CHUNK = 128 };

static int chunk_size(int64_t width) {
    const size_t limit = (size_t)mn_additive_smem_limit();
    const int depth = mn_additive_padded_depth(width);
    if (depth == 64) return sizeof(mn_mlstm_smem<64, 128>) <= limit ? 128 : 64;
    if (depth == 128 && sizeof(mn_mlstm_smem<128, 128>) <= limit) return 128;
    if (depth == 128) return sizeof(mn_mlstm_smem<128, 64>) <= limit ? 64 : 0;
    return depth == 256 && sizeof(mn_mlstm_smem<256, 64>) <= limit ? 64 : 0;
}

/* In narrow memories tiles would be mostly padding, and few columns average roundings less. */
bool mn_mlstm_uses_chunks(const mn_mlstm_args *p, bool backward) {
    const int64_t K = p->call.K, V = p->call.V;
    if (p->call.dtype != MN_BF16 || K < 16 || K > 256 || V < 32) return false;
    if (backward && (V > 256 || !(fabs(p->scale) > 1e-20) || fabs(p->scale) > 1e20)) return false;
    return chunk_size(K) > 0 && (!backward || chunk_size(V) > 0);
}

/* ---- between the scans ----------------------------------------------------------------------- */

/* Denominators and e of all tokens, from a and o.do in parts. */
__global__ void __launch_bounds__(256)
mlstm_denominators(const __grid_constant__ mn_mlstm_args p, mn_mlstm_tokens s,
                   mn_decay_partials inner) {
    const int64_t tokens = p.call.B * p.call.T, at = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (at >= tokens * p.call.H) return;
    const int64_t h = at / tokens, b = at % tokens / p.call.T, t = at % tokens % p.call.T;
    const float a = s.a[at], least = expf(-s.m[at]), den = fmaxf(fabsf(a), least);
    const float product = mn_decay_sum_partials(inner, inner.query, p.call, b, t, h);
    s.share[at] = den > 0.0f ? fmaxf(-log2f(den), -1000.0f) : -1000.0f;
    s.e[at] = !(fabsf(a) > least) ? 0.0f : a > 0.0f ? -product : product;
}

/* One block per chunk and head, one thread per token. */
__global__ void __launch_bounds__(MAX_CHUNK)
mlstm_gate_grads(const __grid_constant__ mn_mlstm_args p, mn_decay_partials parts) {
    __shared__ float smem[32];
    const int64_t h = blockIdx.x % p.call.H, slot = blockIdx.x / p.call.H;
    const mn_tile_span tile = mn_tile_at(p.call, blockDim.x, slot);
    const int64_t t = tile.span.t0 + tile.first + threadIdx.x, b = tile.span.b;
    const float to_f = mn_decay_grad(smem, parts, p.call, tile, slot, h);
    if (threadIdx.x >= tile.n_rows) return;
    mn_bf16 *dipre = mn_row<mn_bf16>(p.grad.ipre, b, t, h);
    mn_bf16 *dfpre = mn_row<mn_bf16>(p.grad.fpre, b, t, h);
    const float fpre = mn_float(*mn_row<mn_bf16>(p.fpre, b, t, h));
    if (dipre) mn_put(dipre, mn_decay_sum_partials(parts, parts.key, p.call, b, t, h));
    if (dfpre) mn_put(dfpre, to_f * expf(mn_log_sigmoid(-fpre)));
}

/* ---- workspace
 * ------------------------------------------------------------------------------ */

/* Counts of floats, of bf16 numbers for `kept`. */
struct extent {
    size_t heads, tokens;         // (N,H), (H, B T)
    size_t states, ones;
    size_t inner, products;       // o.do; q.dq, as many as k.dk
    int64_t slots, slices;        // chunks of the scans of dq and dk; slices of K
    int64_t inner_shares, shares;
    size_t met, kept_n, kept;
};

static bool get_sizes(extent *to, const mn_mlstm_args *p, bool backward) {
    const mn_call &c = p->call;
    *to = {};
    bool ok = mn_mul_size(&to->heads, (size_t)mn_n_spans(c), (size_t)c.H) &&
              mn_mul_size(&to->tokens, (size_t)c.B, (size_t)c.T) &&
              mn_mul_size(&to->tokens, to->tokens, (size_t)c.H) &&
              mn_mul_size(&to->ones, to->heads, (size_t)c.K) &&
              mn_mul_size(&to->states, to->ones, (size_t)c.V);
    if (!ok || !backward) return ok;
    size_t positions;
    const int chunk = chunk_size(c.V);
    to->slots = mn_tile_slots(c, chunk);
    to->slices = mn_ceil_div(c.K, MN_SCAN_WIDTH);
    to->shares = to->slices * (128 / chunk);
    to->inner_shares = mn_ceil_div(c.V, MN_SCAN_WIDTH) * (128 / chunk_size(c.K));
    return mn_mul_size(&to->inner, to->tokens, (size_t)to->inner_shares) &&
           mn_mul_size(&to->products, to->tokens, (size_t)to->shares) &&
           mn_mul_size(&positions, (size_t)to->slots, (size_t)c.H) &&
           mn_mul_size(&positions, positions, (size_t)to->slices) &&
           mn_mul_size(&to->met, positions, MN_SCAN_WARPS) &&
           mn_mul_size(&to->kept_n, positions, MN_SCAN_WIDTH) &&
           mn_mul_size(&to->kept, to->kept_n, (size_t)mn_additive_padded_depth(c.V));
}

struct workspace {
    mn_bf16 *kept;
    mn_mlstm_tokens tokens;
    mn_mlstm_states states;
    float *inner, *query, *key, *state_dots, *inside, *kept_n;
};

/* Parts of `at`, what is read by 16 bytes first; how many floats it took behind `kept`. */
static size_t carve_workspace(workspace *to, const extent &e, void *at, bool backward) {
    *to = {};
    to->kept = (mn_bf16 *)at;
    float *from = (float *)(to->kept + e.kept), *next = from;
    const auto take = [&](size_t count) { float *was = next; next += count; return was; };
    to->tokens.decay = take(e.tokens), to->tokens.write = take(e.tokens);
    to->tokens.m = take(e.tokens), to->states.last = take(e.heads);
    to->states.state = take(e.states), to->states.ones = take(e.ones);
    if (!backward) return (size_t)(next - from);
    to->tokens.a = take(e.tokens), to->tokens.share = take(e.tokens);
    to->tokens.e = take(e.tokens);
    to->states.dstate0 = take(e.states), to->states.dones0 = take(e.ones);
    to->inner = take(e.inner), to->query = take(e.products), to->key = take(e.products);
    to->state_dots = take(e.met), to->inside = take(e.met), to->kept_n = take(e.kept_n);
    return (size_t)(next - from);
}

bool mn_mlstm_chunk_plan(const mn_mlstm_args *p, bool backward, mn_plan *plan) {
    extent e;
    size_t floats = 0, bytes;
    if (!get_sizes(&e, p, backward)) return false;
    const size_t tokens = backward ? 6 : 3, states = backward ? 2 : 1;
    size_t part;
    bool ok = mn_mul_size(&floats, e.tokens, tokens) && mn_mul_size(&part, e.states, states) &&
              mn_add_size(&floats, floats, part) && mn_mul_size(&part, e.ones, states) &&
              mn_add_size(&floats, floats, part) && mn_add_size(&floats, floats, e.heads) &&
              mn_add_size(&floats, floats, e.inner) && mn_add_size(&floats, floats, e.kept_n);
    for (int twice = 0; twice < 2; twice++) {
        ok = ok && mn_add_size(&floats, floats, e.products) && mn_add_size(&floats, floats, e.met);
    }
    return ok && mn_mul_size(&floats, floats, sizeof(float)) &&
           mn_mul_size(&bytes, e.kept, sizeof(mn_bf16)) &&
           mn_add_size(&plan->shared_bytes, floats, bytes);
}

/* ---- scans ----------------------------------------------------------------------------------- */

static mn_in as_input(const float *data, const mn_call &c) {
    mn_in view = {};
    view.data = data;
    view.stride[0] = c.H * c.K * c.V, view.stride[2] = c.K * c.V;
    return view;
}

static mn_out as_output(float *data, const mn_call &c) {
    mn_out view = {};
    view.data = data;
    view.stride[0] = c.H * c.K * c.V, view.stride[2] = c.K * c.V;
    return view;
}

static mn_chunk_scan make_scan(const mn_mlstm_args *p, mn_mlstm_mode mode) {
    mn_chunk_scan scan = {};
    const int64_t K = p->call.K, V = p->call.V;
    const bool transposed = mode == MN_MLSTM_DQ || mode == MN_MLSTM_DK;
    scan.reverse = mode == MN_MLSTM_DV || mode == MN_MLSTM_DK;
    scan.depth = transposed ? V : K, scan.width = transposed ? K : V;
    scan.state_row = transposed ? 1 : V, scan.state_column = transposed ? V : 1;
    scan.scale = (float)p->scale;
    scan.into = scan.reverse ? 1.0f / (float)p->scale : 1.0f;
    scan.from = scan.reverse ? (float)p->scale : 1.0f;
    scan.segment = MN_SCAN_SEG_ALIGN;
    if (!scan.reverse) scan.state0 = p->C0;
    return scan;
}

static mn_chunk_scan make_grad_scan(const mn_mlstm_args *p, mn_mlstm_mode mode,
                                    const workspace &w) {
    mn_chunk_scan scan = make_scan(p, mode);
    if (mode == MN_MLSTM_DQ) {
        scan.x = p->cot.o, scan.y = p->v, scan.z = p->k, scan.paired = p->q;
        scan.out = p->grad.q, scan.mode = MN_SCAN_SAVE_STATE, scan.products = w.query;
    } else if (mode == MN_MLSTM_DV) {
        scan.x = p->k, scan.y = p->q, scan.z = p->cot.o, scan.out = p->grad.v;
        scan.state = as_output(w.states.dstate0, p->call);
    } else {
        scan.x = p->v, scan.y = p->cot.o, scan.z = p->q, scan.paired = p->k;
        scan.out = p->grad.k, scan.mode = MN_SCAN_DOT_STATE, scan.products = w.key;
    }
    scan.kept = w.kept, scan.inside = w.inside, scan.state_dots = w.state_dots;
    if (scan.reverse && mn_mlstm_wants_states(p, true)) {
        scan.state0 = as_input(w.states.state, p->call);
    }
    return scan;
}

template <int DEPTH, int CHUNK, typename N>
static int launch_of(const mn_mlstm_scans &scans, int count, cudaStream_t on) {
    int64_t blocks = 0;
    for (int i = 0; i < count; i++) blocks =
        mn_max(blocks, mn_scan_slices(scans.all.scan[i]));
    blocks *= scans.all.call.H * mn_n_spans(scans.all.call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const dim3 grid((unsigned)blocks, (unsigned)count);
    return mn_launch_smem(mlstm_state_scan_kernel<DEPTH, CHUNK, N>, grid,
                               mn_scan_sizes<DEPTH, CHUNK>::threads,
                               sizeof(mn_mlstm_smem<DEPTH, CHUNK>), on, scans);
}

template <template <int, int> class N>
static int launch(const mn_mlstm_scans &scans, int count, cudaStream_t on) {
    const int64_t width = scans.all.scan[0].depth;
    const int depth = mn_additive_padded_depth(width);
    const bool wide = chunk_size(width) == 128;
    if (depth == 64 && wide) return launch_of<64, 128, N<64, 128>>(scans, count, on);
    if (depth == 64) return launch_of<64, 64, N<64, 64>>(scans, count, on);
    if (depth == 128 && wide) return launch_of<128, 128, N<128, 128>>(scans, count, on);
    if (depth == 128) return launch_of<128, 64, N<128, 64>>(scans, count, on);
    return launch_of<256, 64, N<256, 64>>(scans, count, on);
}

static int forward(const mn_mlstm_args *p, const extent &e, const workspace &w, bool backward,
                   cudaStream_t on) {
    mn_mlstm_scans scans = {};
    mn_chunk_scan scan = make_scan(p, MN_MLSTM_O);
    const bool states = !backward && mn_mlstm_wants_states(p, false);
    scan.x = p->q, scan.y = p->k, scan.z = p->v;
    if (backward) scan.paired = p->cot.o, scan.mode = MN_SCAN_DOT_OUT, scan.products = w.inner;
    else scan.out = p->o;
    if (states) scan.state = as_output(w.states.state, p->call), scans.last[0] = w.states.ones;
    scans.all.call = p->call, scans.all.scan[0] = scan, scans.mode[0] = MN_MLSTM_O;
    scans.first[0] = (const float *)p->n0.data;
    scans.tokens = w.tokens;
    mlstm_gates<mn_bf16, true><<<(unsigned)e.heads, MN_GATE_THREADS, 0, on>>>(
        *p, w.tokens.decay, w.tokens.write, w.tokens.m, w.states.last);
    int code = mn_launch_status();
    if (code == cudaSuccess && (backward || p->o.data || states)) {
        code = launch<mn_mlstm_n_column>(scans, 1, on);
    }
    if (code != cudaSuccess || !states) return code;
    return mn_mlstm_store_states(p, w.states, (int64_t)e.heads, false, on);
}

/* The three gradients; dk's scan meets what dq's kept. */
static int gradients(const mn_mlstm_args *p, const workspace &w, cudaStream_t on) {
    mn_mlstm_scans scans = {};
    scans.all.call = p->call, scans.tokens = w.tokens, scans.kept_n = w.kept_n;
    int code = cudaSuccess;
    for (int mode = MN_MLSTM_DQ; mode <= MN_MLSTM_DK && code == cudaSuccess; mode++) {
        const bool transposed = mode != MN_MLSTM_DV;
        scans.mode[0] = (mn_mlstm_mode)mode;
        scans.all.scan[0] = make_grad_scan(p, scans.mode[0], w);
        scans.first[0] = mode == MN_MLSTM_DQ ? (const float *)p->n0.data : NULL;
        scans.last[0] = mode == MN_MLSTM_DK ? w.states.dones0 : NULL;
        if (scans.all.scan[0].reverse && transposed && mn_mlstm_wants_states(p, true)) {
            scans.first[0] = w.states.ones;
        }
        code = launch<mn_mlstm_n_row>(scans, 1, on);
    }
    return code;
}

int mn_mlstm_chunk_run(const mn_mlstm_args *p, void *shared, bool backward, cudaStream_t on) {
    extent e;
    workspace w;
    if (!get_sizes(&e, p, backward)) return cudaErrorNotSupported;
    if (e.heads == 0) return cudaSuccess;
    carve_workspace(&w, e, shared, backward);
    const int64_t heads = (int64_t)e.heads, tokens = (int64_t)e.tokens;
    const int64_t blocks = e.slots * p->call.H;
    if (heads > INT32_MAX || blocks > INT32_MAX) return cudaErrorNotSupported;
    int code = forward(p, e, w, backward, on);
    if (code != cudaSuccess || !backward) return code;
    if (mn_mlstm_wants_states(p, true)) code = mn_mlstm_store_states(p, w.states, heads, true, on);
    if (code != cudaSuccess) return code;
    const mn_decay_partials inner = { w.inner, NULL, NULL, NULL, e.inner_shares, 0 };
    if (tokens > 0) {
        mlstm_denominators<<<mn_blocks(tokens, 256), 256, 0, on>>>(*p, w.tokens, inner);
    }
    code = gradients(p, w, on);
    if (code != cudaSuccess) return code;
    const mn_decay_partials parts = { w.query, w.key, w.state_dots, w.inside, e.shares,
                                   (int)e.slices * MN_SCAN_WARPS };
    if (blocks > 0) {
        mlstm_gate_grads<<<(unsigned)blocks, chunk_size(p->call.V), 0, on>>>(*p, parts);
    }
    return mn_mlstm_store_state0_grads(p, w.states, heads, on);
}
