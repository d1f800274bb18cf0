/* mlstm_chunk.cu - mLSTM over chunks in bf16: launches of mlstm_state_scan.cuh, and what lies
 * between
 * them.
 *
 * Forward: the gates of all tokens, one walk. Backward: the same walk without an output, which
 * leaves a and o.do of every token; e and the denominators; scans of dq, dv and dk; and
 *
 *   dipre = k.dk      dfpre = dlf sigmoid(-fpre)      dlf as a decay's in additive_decay_grad.cuh
 * */
#include "kernels/cuda/additive/additive.cuh"
#include "kernels/cuda/additive/additive_decay_grad.cuh"
#include "kernels/cuda/mlstm/mlstm.cuh"
#include "kernels/cuda/mlstm/mlstm_state_scan.cuh"

#include <math.h>

enum { MOST_CHUNK = 128 };

static int chunk_of(int64_t width) {
    const size_t limit = (size_t)mn_additive_shared_limit();
    const int depth = mn_additive_depth(width);
    if (depth == 64) return sizeof(mn_mlstm_smem<64, 128>) <= limit ? 128 : 64;
    if (depth == 128 && sizeof(mn_mlstm_smem<128, 128>) <= limit) return 128;
    if (depth == 128) return sizeof(mn_mlstm_smem<128, 64>) <= limit ? 64 : 0;
    return depth == 256 && sizeof(mn_mlstm_smem<256, 64>) <= limit ? 64 : 0;
}

/* In narrow memories tiles would be mostly padding, and few columns average roundings less. */
bool mn_mlstm_goes_over_chunks(const mn_mlstm_args *p, bool backward) {
    const int64_t K = p->call.K, V = p->call.V;
    if (p->call.dtype != MN_BF16 || K < 16 || K > 256 || V < 32) return false;
    if (backward && (V > 256 || !(fabs(p->scale) > 1e-20) || fabs(p->scale) > 1e20)) return false;
    return chunk_of(K) > 0 && (!backward || chunk_of(V) > 0);
}

/* ---- between the scans ----------------------------------------------------------------------- */

/* Denominators and e of all tokens, from a and o.do in parts. */
__global__ void __launch_bounds__(256)
quotient_kernel(const __grid_constant__ mn_mlstm_args p, mn_mlstm_tokens s, mn_decay_parts inner) {
    const int64_t tokens = p.call.B * p.call.T, at = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (at >= tokens * p.call.H) return;
    const int64_t h = at / tokens, b = at % tokens / p.call.T, t = at % tokens % p.call.T;
    const float a = s.a[at], least = expf(-s.m[at]), den = fmaxf(fabsf(a), least);
    const float product = mn_decay_shares(inner, inner.query, p.call, b, t, h);
    s.share[at] = den > 0.0f ? fmaxf(-log2f(den), -1000.0f) : -1000.0f;
    s.e[at] = !(fabsf(a) > least) ? 0.0f : a > 0.0f ? -product : product;
}

/* One block per chunk and head, one thread per token. */
__global__ void __launch_bounds__(MOST_CHUNK)
gate_gradients_kernel(const __grid_constant__ mn_mlstm_args p, mn_decay_parts parts) {
    __shared__ float room[32];
    const int64_t h = blockIdx.x % p.call.H, slot = blockIdx.x / p.call.H;
    const mn_tile_span tile = mn_tile_at(p.call, blockDim.x, slot);
    const int64_t t = tile.span.t0 + tile.first + threadIdx.x, b = tile.span.b;
    const float to_f = mn_decay_of(room, parts, p.call, tile, slot, h);
    if (threadIdx.x >= tile.n_rows) return;
    mn_bf16 *dipre = mn_row<mn_bf16>(p.grad.ipre, b, t, h);
    mn_bf16 *dfpre = mn_row<mn_bf16>(p.grad.fpre, b, t, h);
    const float fpre = mn_float(*mn_row<mn_bf16>(p.fpre, b, t, h));
    if (dipre) mn_put(dipre, mn_decay_shares(parts, parts.key, p.call, b, t, h));
    if (dfpre) mn_put(dfpre, to_f * expf(mn_log_sigmoid(-fpre)));
}

/* ---- work space ------------------------------------------------------------------------------ */

/* Counts of floats, of bf16 numbers for `kept`. */
struct extent {
    size_t heads, tokens;         // (N,H), (H, B T)
    size_t states, ones;
    size_t inner, products;       // o.do; q.dq, as many as k.dk
    int64_t slots, slices;        // chunks of the scans of dq and dk; slices of K
    int64_t inner_shares, shares;
    size_t met, kept_n, kept;
};

static bool measure(extent *to, const mn_mlstm_args *p, bool backward) {
    const mn_call &c = p->call;
    *to = {};
    bool ok = mn_mul_size(&to->heads, (size_t)mn_n_spans(c), (size_t)c.H) &&
              mn_mul_size(&to->tokens, (size_t)c.B, (size_t)c.T) &&
              mn_mul_size(&to->tokens, to->tokens, (size_t)c.H) &&
              mn_mul_size(&to->ones, to->heads, (size_t)c.K) &&
              mn_mul_size(&to->states, to->ones, (size_t)c.V);
    if (!ok || !backward) return ok;
    size_t places;
    const int chunk = chunk_of(c.V);
    to->slots = mn_tile_slots(c, chunk);
    to->slices = mn_ceil_div(c.K, MN_SCAN_WIDTH);
    to->shares = to->slices * (128 / chunk);
    to->inner_shares = mn_ceil_div(c.V, MN_SCAN_WIDTH) * (128 / chunk_of(c.K));
    return mn_mul_size(&to->inner, to->tokens, (size_t)to->inner_shares) &&
           mn_mul_size(&to->products, to->tokens, (size_t)to->shares) &&
           mn_mul_size(&places, (size_t)to->slots, (size_t)c.H) &&
           mn_mul_size(&places, places, (size_t)to->slices) &&
           mn_mul_size(&to->met, places, MN_SCAN_WARPS) &&
           mn_mul_size(&to->kept_n, places, MN_SCAN_WIDTH) &&
           mn_mul_size(&to->kept, to->kept_n, (size_t)mn_additive_depth(c.V));
}

struct work {
    mn_bf16 *kept;
    mn_mlstm_tokens tokens;
    mn_mlstm_states states;
    float *inner, *query, *key, *meetings, *inside, *kept_n;
};

/* Parts of `at`, what is read by 16 bytes first; how many floats it took behind `kept`. */
static size_t place(work *to, const extent &e, void *at, bool backward) {
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
    to->meetings = take(e.met), to->inside = take(e.met), to->kept_n = take(e.kept_n);
    return (size_t)(next - from);
}

bool mn_mlstm_chunk_plan(const mn_mlstm_args *p, bool backward, mn_plan *plan) {
    extent e;
    size_t floats = 0, bytes;
    if (!measure(&e, p, backward)) return false;
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

static mn_scan scan_of(const mn_mlstm_args *p, mn_mlstm_duty duty) {
    mn_scan walk = {};
    const int64_t K = p->call.K, V = p->call.V;
    const bool turned = duty == MN_MLSTM_DQ || duty == MN_MLSTM_DK;
    walk.reverse = duty == MN_MLSTM_DV || duty == MN_MLSTM_DK;
    walk.depth = turned ? V : K, walk.width = turned ? K : V;
    walk.state_row = turned ? 1 : V, walk.state_column = turned ? V : 1;
    walk.scale = (float)p->scale;
    walk.into = walk.reverse ? 1.0f / (float)p->scale : 1.0f;
    walk.from = walk.reverse ? (float)p->scale : 1.0f;
    walk.segment = MN_SCAN_GRAIN;
    if (!walk.reverse) walk.state0 = p->C0;
    return walk;
}

static mn_scan gradient_of(const mn_mlstm_args *p, mn_mlstm_duty duty, const work &w) {
    mn_scan walk = scan_of(p, duty);
    if (duty == MN_MLSTM_DQ) {
        walk.x = p->cot.o, walk.y = p->v, walk.z = p->k, walk.beside = p->q;
        walk.out = p->grad.q, walk.duty = MN_SCAN_KEEPS, walk.products = w.query;
    } else if (duty == MN_MLSTM_DV) {
        walk.x = p->k, walk.y = p->q, walk.z = p->cot.o, walk.out = p->grad.v;
        walk.state = as_output(w.states.dstate0, p->call);
    } else {
        walk.x = p->v, walk.y = p->cot.o, walk.z = p->q, walk.beside = p->k;
        walk.out = p->grad.k, walk.duty = MN_SCAN_MEETS, walk.products = w.key;
    }
    walk.kept = w.kept, walk.inside = w.inside, walk.meetings = w.meetings;
    if (walk.reverse && mn_mlstm_wants_states(p, true)) {
        walk.state0 = as_input(w.states.state, p->call);
    }
    return walk;
}

template <int DEPTH, int CHUNK, typename N>
static int launch_of(const mn_mlstm_scans &scans, int count, cudaStream_t on) {
    int64_t blocks = 0;
    for (int i = 0; i < count; i++) blocks =
        mn_max(blocks, mn_state_scan_slices(scans.all.walk[i]));
    blocks *= scans.all.call.H * mn_n_spans(scans.all.call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const dim3 grid((unsigned)blocks, (unsigned)count);
    return mn_launch_smem(mn_mlstm_kernel<DEPTH, CHUNK, N>, grid,
                               mn_state_scan_sizes<DEPTH, CHUNK>::threads,
                               sizeof(mn_mlstm_smem<DEPTH, CHUNK>), on, scans);
}

template <template <int, int> class N>
static int launch(const mn_mlstm_scans &scans, int count, cudaStream_t on) {
    const int64_t width = scans.all.walk[0].depth;
    const int depth = mn_additive_depth(width);
    const bool wide = chunk_of(width) == 128;
    if (depth == 64 && wide) return launch_of<64, 128, N<64, 128>>(scans, count, on);
    if (depth == 64) return launch_of<64, 64, N<64, 64>>(scans, count, on);
    if (depth == 128 && wide) return launch_of<128, 128, N<128, 128>>(scans, count, on);
    if (depth == 128) return launch_of<128, 64, N<128, 64>>(scans, count, on);
    return launch_of<256, 64, N<256, 64>>(scans, count, on);
}

static int forward(const mn_mlstm_args *p, const extent &e, const work &w, bool backward,
                   cudaStream_t on) {
    mn_mlstm_scans scans = {};
    mn_scan walk = scan_of(p, MN_MLSTM_O);
    const bool states = !backward && mn_mlstm_wants_states(p, false);
    walk.x = p->q, walk.y = p->k, walk.z = p->v;
    if (backward) walk.beside = p->cot.o, walk.duty = MN_SCAN_MULTIPLIES, walk.products = w.inner;
    else walk.out = p->o;
    if (states) walk.state = as_output(w.states.state, p->call), scans.last[0] = w.states.ones;
    scans.all.call = p->call, scans.all.walk[0] = walk, scans.duty[0] = MN_MLSTM_O;
    scans.first[0] = (const float *)p->n0.data;
    scans.tokens = w.tokens;
    mn_mlstm_gates_kernel<mn_bf16, true><<<(unsigned)e.heads, MN_GATE_THREADS, 0, on>>>(
        *p, w.tokens.decay, w.tokens.write, w.tokens.m, w.states.last);
    int code = mn_launch_status();
    if (code == cudaSuccess && (backward || p->o.data || states)) {
        code = launch<mn_mlstm_column>(scans, 1, on);
    }
    if (code != cudaSuccess || !states) return code;
    return mn_mlstm_put_states(p, w.states, (int64_t)e.heads, false, on);
}

/* The three gradients; dk's walk meets what dq's kept. */
static int gradients(const mn_mlstm_args *p, const work &w, cudaStream_t on) {
    mn_mlstm_scans scans = {};
    scans.all.call = p->call, scans.tokens = w.tokens, scans.kept_n = w.kept_n;
    int code = cudaSuccess;
    for (int duty = MN_MLSTM_DQ; duty <= MN_MLSTM_DK && code == cudaSuccess; duty++) {
        const bool turned = duty != MN_MLSTM_DV;
        scans.duty[0] = (mn_mlstm_duty)duty;
        scans.all.walk[0] = gradient_of(p, scans.duty[0], w);
        scans.first[0] = duty == MN_MLSTM_DQ ? (const float *)p->n0.data : NULL;
        scans.last[0] = duty == MN_MLSTM_DK ? w.states.dones0 : NULL;
        if (scans.all.walk[0].reverse && turned && mn_mlstm_wants_states(p, true)) {
            scans.first[0] = w.states.ones;
        }
        code = launch<mn_mlstm_row>(scans, 1, on);
    }
    return code;
}

int mn_mlstm_chunk_run(const mn_mlstm_args *p, void *shared, bool backward, cudaStream_t on) {
    extent e;
    work w;
    if (!measure(&e, p, backward)) return cudaErrorNotSupported;
    if (e.heads == 0) return cudaSuccess;
    place(&w, e, shared, backward);
    const int64_t heads = (int64_t)e.heads, tokens = (int64_t)e.tokens;
    const int64_t blocks = e.slots * p->call.H;
    if (heads > INT32_MAX || blocks > INT32_MAX) return cudaErrorNotSupported;
    int code = forward(p, e, w, backward, on);
    if (code != cudaSuccess || !backward) return code;
    if (mn_mlstm_wants_states(p, true)) code = mn_mlstm_put_states(p, w.states, heads, true, on);
    if (code != cudaSuccess) return code;
    const mn_decay_parts inner = { w.inner, NULL, NULL, NULL, e.inner_shares, 0 };
    if (tokens > 0) {
        quotient_kernel<<<mn_blocks(tokens, 256), 256, 0, on>>>(*p, w.tokens, inner);
    }
    code = gradients(p, w, on);
    if (code != cudaSuccess) return code;
    const mn_decay_parts parts = { w.query, w.key, w.meetings, w.inside, e.shares,
                                   (int)e.slices * MN_SCAN_WARPS };
    if (blocks > 0) {
        gate_gradients_kernel<<<(unsigned)blocks, chunk_of(p->call.V), 0, on>>>(*p, parts);
    }
    return mn_mlstm_put_first(p, w.states, heads, on);
}
