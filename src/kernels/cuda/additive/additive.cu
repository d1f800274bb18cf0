/* additive.cu - S = diag(exp g) S + k v';  o = scale S'q (see ref/additive.c).
 *
 * bf16 calls are scans over chunks on tensor cores (additive_mma.cuh says which); the rest and
 * decoding are the recurrence of matrix_state.cuh without its eraser: w = k, and the residual is v.
 * */
#include "kernels/cuda/additive/additive.cuh"

#include <math.h>

#include "kernels/cuda/prim/device_props.h"
#include "kernels/cuda/prim/mbarrier.cuh"
#include "kernels/cuda/recurrent/matrix_state.cuh"

namespace mneme::additive {

using namespace recurrent;

static mn_matrix_params memory_of(const mn_additive_args *p) {
    mn_matrix_params m = {};
    m.call = p->call, m.scale = (float)p->scale, m.decay = p->decay;
    m.q = p->q, m.w = p->k, m.v = p->v, m.g = p->g, m.state0 = p->state0;
    m.o = p->o, m.state = p->state, m.cot_o = p->cot.o, m.cot_state = p->cot.state;
    m.dq = p->grad.q, m.dw = p->grad.k, m.dv = p->grad.v, m.dg = p->grad.g;
    m.dstate0 = p->grad.state0;
    return m;
}

/* ---- which calls go over chunks -------------------------------------------------------------- */

int mn_additive_padded_depth(int64_t width) {
    return width <= 64 ? 64 : width <= 128 ? 128 : 256;
}

int mn_additive_smem_limit(void) {
    return mn_device_props_current().shared_bytes;
}

static int chunk_size(const mn_additive_args *p, int64_t width) {
    const int depth = mn_additive_padded_depth(width);
    return p->decay == MN_DECAY_CHANNEL ? mn_additive_channel_chunk(depth)
                                        : mn_additive_token_chunk(depth);
}

/* By its kind and sizes, never its length. In narrow memories tiles would be mostly padding, and
 * few columns average the roundings of P and S less. */
static bool uses_chunks(const mn_additive_args *p, bool backward) {
    const int64_t K = p->call.K, V = p->call.V;
    if (p->call.dtype != MN_BF16 || K < 16 || K > 256 || V <= 32) return false;
    if (backward && (V > 256 || !(fabs(p->scale) > 1e-20) || fabs(p->scale) > 1e20)) return false;
    return chunk_size(p, K) > 0 && (!backward || chunk_size(p, V) > 0);
}

/* ---- scans ----------------------------------------------------------------------------------- */

/* `transposed`: the state's rows are V, its columns K. */
static mn_chunk_scan make_scan(const mn_additive_args *p, const mn_in &x, const mn_in &y,
                               const mn_in &z,
                       const mn_out &out, bool transposed, bool reverse) {
    mn_chunk_scan scan = {};
    const int64_t K = p->call.K, V = p->call.V;
    scan.x = x, scan.y = y, scan.z = z, scan.out = out;
    scan.depth = transposed ? V : K, scan.width = transposed ? K : V;
    scan.state_row = transposed ? 1 : V, scan.state_column = transposed ? V : 1;
    scan.scale = (float)p->scale;
    scan.into = reverse ? 1.0f / (float)p->scale : 1.0f;
    scan.from = reverse ? (float)p->scale : 1.0f;
    scan.state0 = reverse ? p->cot.state : p->state0;
    scan.reverse = reverse;
    scan.transposed = transposed;
    return scan;
}

/* The scans of a pass, without workspace; how many there are. dq comes first, dk last. */
static int forward_scans(mn_chunk_scans *out, const mn_additive_args *p) {
    *out = {};
    out->call = p->call, out->g = p->g;
    out->scan[0] = make_scan(p, p->q, p->k, p->v, p->o, false, false);
    out->scan[0].state = p->state;
    return 1;
}

static int backward_scans(mn_chunk_scans *out, const mn_additive_args *p) {
    const bool decay = p->grad.g.data;
    int n = 0;
    *out = {};
    out->call = p->call, out->g = p->g, out->dg = p->grad.g;
    if (p->grad.q.data || decay) {
        out->scan[n] = make_scan(p, p->cot.o, p->v, p->k, p->grad.q, true, false);
        out->scan[n++].paired = p->q;
    }
    if (p->grad.v.data || p->grad.state0.data) {
        out->scan[n] = make_scan(p, p->k, p->q, p->cot.o, p->grad.v, false, true);
        out->scan[n++].state = p->grad.state0;
    }
    if (p->grad.k.data || decay) {
        out->scan[n] = make_scan(p, p->v, p->cot.o, p->q, p->grad.k, true, true);
        out->scan[n++].paired = p->k;
    }
    return n;
}

/* Adds what the gradient of the decay takes to the first and the last of `count` scans. */
static void add_decay_grad(mn_chunk_scans *scans, int count,
                           const mn_additive_workspace *workspace, bool by_warpgroups) {
    mn_chunk_scan *query = &scans->scan[0], *key = &scans->scan[count - 1];
    query->mode = MN_SCAN_SAVE_STATE, key->mode = MN_SCAN_DOT_STATE;
    query->products = workspace->query, key->products = workspace->key;
    query->kept = key->kept = workspace->kept;
    key->state_dots = workspace->state_dots;
    query->inside = key->inside = workspace->inside;
    query->by_warpgroups = key->by_warpgroups = by_warpgroups;
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Least tokens of a segment: so many that the blocks of one long sequence fill a GPU. By sizes that
 * a sequence shares with all others. */
static int64_t segment_size(const mn_additive_args *p) {
    const int64_t slices = mn_ceil_div(mn_min(p->call.K, p->call.V), MN_SCAN_WIDTH);
    const int64_t grains = mn_max(mn_min(slices * p->call.H, 32), 8);
    return grains * MN_SCAN_SEG_ALIGN;
}

static int launch_batch(const mn_additive_args *p, const mn_chunk_scans *some, int n,
                       int64_t segments,
                       cudaStream_t stream) {
    if (p->decay == MN_DECAY_CHANNEL) {
        return mn_additive_channel_launch(some, segments, some->scan[0].state_row == 1, stream);
    }
    return mn_additive_token_launch(some, n, segments, p->decay != MN_DECAY_NONE, stream);
}

/* Whether a scan that leaves nothing for the gradient of a decay goes by itself where one beside it
 * does: it has four chunks under way then, not three (additive_token_chunk_sm90.cu). */
static constexpr bool plain_scans_apart = true;

static bool goes_with(const mn_chunk_scan &first, const mn_chunk_scan &next) {
    const bool apart = plain_scans_apart && (first.by_warpgroups || next.by_warpgroups);
    return !apart || (first.mode == MN_SCAN_PLAIN) == (next.mode == MN_SCAN_PLAIN);
}

/* Walks [from, to), those of one kind and depth together; long sequences in two steps. */
static int launch_scans(const mn_additive_args *p, const mn_chunk_scans *scans, int from, int to,
                        int64_t segments, cudaStream_t stream) {
    while (from < to) {
        const int depth = mn_additive_padded_depth(scans->scan[from].depth);
        mn_chunk_scans some = *scans;
        int n = 0, code = cudaSuccess;
        for (; from < to && (n == 0 || (p->decay != MN_DECAY_CHANNEL &&
                                        goes_with(some.scan[0], scans->scan[from]))) &&
               mn_additive_padded_depth(scans->scan[from].depth) == depth;
             from++) {
            some.scan[n++] = scans->scan[from];
        }
        if (segments > 1) {
            for (int i = 0; i < n; i++) some.scan[i].reduce_pass = true;
            code = launch_batch(p, &some, n, segments, stream);
            for (int i = 0; i < n; i++) some.scan[i].reduce_pass = false;
        }
        if (code == cudaSuccess) code = launch_batch(p, &some, n, segments, stream);
        if (code != cudaSuccess) return code;
    }
    return cudaSuccess;
}

/* What segments take, for each scan. */
static bool size_segments(mn_additive_extent *to, const mn_additive_args *p) {
    const int64_t segment = segment_size(p), widest = mn_max(p->call.K, p->call.V);
    to->segments = mn_max(mn_min(mn_ceil_div(p->call.T, segment), MN_SCAN_SEGMENTS), 1);
    if (to->segments == 1) return true;
    const size_t slices = (size_t)mn_ceil_div(widest, MN_SCAN_WIDTH);
    const size_t state = (size_t)mn_additive_padded_depth(mn_min(widest, 256)) * MN_SCAN_WIDTH;
    size_t count;
    return mn_mul_size(&count, (size_t)mn_tile_slots(p->call, segment), (size_t)p->call.H) &&
           mn_mul_size(&count, count, slices) && mn_mul_size(&to->sums, count, state) &&
           mn_mul_size(&to->cum_decays, count, MN_SCAN_DECAYS);
}

/* Whether additive_token_chunk_sm90.cu may serve all scans of a backward pass with decays: by its
 * kind and sizes; rows are looked at when it is launched. */
static bool may_go_by_warpgroups(const mn_additive_args *p) {
    const bool decays = p->decay == MN_DECAY_HEAD || p->decay == MN_DECAY_TOKEN;
    return decays && p->call.K <= 128 && p->call.V <= 128 &&
           p->grad.q.data && p->grad.k.data && p->grad.g.data && mn_device_is_sm90();
}

/* What the gradient of a decay takes. */
static bool size_decay_grad(mn_additive_extent *to, const mn_additive_args *p,
                            bool by_warpgroups) {
    const int chunk = by_warpgroups ? (int)MN_SCAN_BY_WARPGROUPS : chunk_size(p, p->call.V);
    const bool channel = p->decay == MN_DECAY_CHANNEL;
    size_t heads;
    to->slots = mn_tile_slots(p->call, chunk);
    to->slices = mn_ceil_div(p->call.K, MN_SCAN_WIDTH);
    const int64_t halves = to->slices * (128 / chunk);
    to->by_warpgroups = by_warpgroups;
    if (!p->grad.g.data) return true;
    bool ok = mn_mul_size(&heads, (size_t)to->slots, (size_t)p->call.H);
    ok = ok && mn_mul_size(&to->kept, heads, (size_t)(to->slices * MN_SCAN_WIDTH)) &&
         mn_mul_size(&to->kept, to->kept, (size_t)mn_additive_padded_depth(p->call.V));
    ok = ok && mn_mul_size(&to->query, (size_t)p->call.B, (size_t)p->call.T) &&
         mn_mul_size(&to->query, to->query, (size_t)p->call.H) &&
         mn_mul_size(&to->query, to->query, (size_t)(channel ? p->call.K : halves));
    if (by_warpgroups) {
        ok = ok && mn_mul_size(&to->query, heads, (size_t)(to->slices * MN_SCAN_BY_WARPGROUPS));
    }
    to->key = channel ? 0 : to->query;
    to->whole = heads;
    return ok && mn_mul_size(&to->state_dots, heads, (size_t)(to->slices * MN_SCAN_WIDTH));
}

static bool plan_workspace(mn_plan *plan, const mn_additive_extent *extent, size_t scans) {
    size_t bytes, floats, sums, all;
    const bool ok =
        mn_add_size(&sums, extent->sums, extent->cum_decays) && mn_mul_size(&sums, sums, scans) &&
        mn_add_size(&floats, extent->query, extent->key) &&
        mn_add_size(&floats, floats, extent->state_dots) &&
        mn_add_size(&floats, floats, extent->state_dots) &&
        mn_add_size(&floats, floats, extent->whole) && mn_add_size(&floats, floats, sums) &&
        mn_mul_size(&floats, floats, sizeof(float)) &&
        mn_mul_size(&bytes, extent->kept, sizeof(mn_bf16)) && mn_add_size(&all, floats, bytes);
    if (ok && all > plan->shared_bytes) plan->shared_bytes = all;
    return ok;
}

/* The workspace: what is read by 16 bytes first. */
static mn_additive_workspace carve_workspace(const mn_additive_extent *extent, size_t scans,
                                             void *shared) {
    mn_additive_workspace workspace = {};
    workspace.kept = (mn_bf16 *)shared;
    workspace.sums = (float *)(workspace.kept + extent->kept);
    workspace.cum_decays = workspace.sums + scans * extent->sums;
    workspace.query = workspace.cum_decays + scans * extent->cum_decays;
    workspace.key = extent->key ? workspace.query + extent->query : workspace.query;
    workspace.state_dots = workspace.query + extent->query + extent->key;
    workspace.inside = workspace.state_dots + extent->state_dots;
    workspace.whole = workspace.inside + extent->state_dots;
    return workspace;
}

static void split_scans(mn_chunk_scans *scans, int count, const mn_additive_args *p,
                      const mn_additive_extent *extent, const mn_additive_workspace *workspace) {
    for (int i = 0; i < count; i++) {
        scans->scan[i].segment = segment_size(p);
        scans->scan[i].sums = workspace->sums + i * extent->sums;
        scans->scan[i].cum_decays = workspace->cum_decays + i * extent->cum_decays;
    }
}

/* ---- gradients from kept states (additive_channel_chunk_sm90.cu) ----------------------------- */

/* Whether all gradients are wanted that they have. */
static bool uses_gated_sm90(const mn_additive_args *p) {
    return p->decay == MN_DECAY_CHANNEL && p->call.K <= 128 && p->call.V <= 128 &&
           p->grad.q.data && p->grad.k.data && p->grad.v.data && p->grad.g.data;
}

/* Numbers of a kept state of all chunks: two are kept. */
static bool size_saved_states(size_t *count, const mn_additive_args *p) {
    return mn_mul_size(count, (size_t)mn_tile_slots(p->call, 64), (size_t)p->call.H) &&
           mn_mul_size(count, *count, (size_t)mn_additive_padded_depth(p->call.K)) &&
           mn_mul_size(count, *count, (size_t)mn_additive_padded_depth(p->call.V));
}

static bool plan_gated(mn_plan *plan, const mn_additive_args *p, const mn_additive_extent *extent) {
    size_t kept, floats, bytes;
    const bool ok = size_saved_states(&kept, p) && mn_mul_size(&kept, kept, 2 * sizeof(mn_bf16)) &&
                    mn_add_size(&floats, extent->sums, extent->cum_decays) &&
                    mn_mul_size(&floats, floats, 2 * sizeof(float)) &&
                    mn_add_size(&bytes, kept, floats);
    if (ok && bytes > plan->shared_bytes) plan->shared_bytes = bytes;
    return ok;
}

static int launch_gated(const mn_additive_args *p, const mn_additive_extent *extent, void *shared,
                        bool contain, cudaStream_t stream) {
    mn_chunk_scans fwd, bwd;
    size_t kept;
    if (!uses_gated_sm90(p) || !size_saved_states(&kept, p)) return cudaErrorNotSupported;
    (void)forward_scans(&fwd, p);
    bwd = fwd;
    bwd.scan[0] = make_scan(p, p->k, p->q, p->cot.o, p->grad.v, false, true);
    bwd.scan[0].state = p->grad.state0;
    mn_chunk_scan *scans[2] = { &fwd.scan[0], &bwd.scan[0] };
    float *sums = (float *)((mn_bf16 *)shared + 2 * kept);
    fwd.scan[0].out = {}, fwd.scan[0].state = {};
    for (int i = 0; i < 2; i++) {
        scans[i]->segment = segment_size(p);
        scans[i]->kept = (mn_bf16 *)shared + i * kept;
        scans[i]->sums = sums + i * extent->sums;
        scans[i]->cum_decays = sums + 2 * extent->sums + i * extent->cum_decays;
    }
    return mn_additive_gated_backward(p, &fwd, &bwd, extent->segments, contain, stream);
}

/* ---- calls ----------------------------------------------------------------------------------- */

MN_CUDA_PLAN(additive_forward) {
    const mn_additive_args *p = (const mn_additive_args *)args;
    mn_additive_extent extent = {};
    if (!uses_chunks(p, false)) return true;
    return size_segments(&extent, p) && plan_workspace(plan, &extent, 1);
}

MN_CUDA_LAUNCH(additive_forward) {
    const mn_additive_args *p = (const mn_additive_args *)args;
    mn_additive_extent extent = {};
    if (!uses_chunks(p, false)) return mn_matrix_forward<false>(memory_of(p), stream);
    if (!size_segments(&extent, p)) return cudaErrorNotSupported;
    const mn_additive_workspace workspace = carve_workspace(&extent, 1, shared);
    mn_chunk_scans scans;
    const int n = forward_scans(&scans, p);
    split_scans(&scans, n, p, &extent, &workspace);
    return launch_scans(p, &scans, 0, n, extent.segments, (cudaStream_t)stream);
}

MN_CUDA_PLAN(additive_step) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(additive_step) {
    (void)shared;
    return mn_matrix_step<false>(memory_of((const mn_additive_args *)args), stream);
}

MN_CUDA_PLAN(additive_backward) {
    const mn_additive_args *p = (const mn_additive_args *)args;
    if (!uses_chunks(p, true)) return mn_matrix_backward_plan(plan, p->call);
    mn_additive_extent extent = {};
    if (!size_segments(&extent, p)) return false;
    if (may_go_by_warpgroups(p)) {
        if (!size_decay_grad(&extent, p, true) || !plan_workspace(plan, &extent, MN_SCAN_MAX)) {
            return false;
        }
    }
    return size_decay_grad(&extent, p, false) && plan_workspace(plan, &extent, MN_SCAN_MAX) &&
           (!uses_gated_sm90(p) || plan_gated(plan, p, &extent));
}

int mn_additive_backward_launch(const mn_additive_args *p, void *shared, bool contain,
                                cudaStream_t on) {
    if (!uses_chunks(p, true)) return mn_matrix_backward<false>(memory_of(p), shared, on);
    mn_additive_extent extent = {};
    mn_chunk_scans scans;
    const int n = backward_scans(&scans, p);
    const bool by_warpgroups = may_go_by_warpgroups(p) &&
                               mn_additive_token_supported_sm90(&scans, n);
    if (!size_segments(&extent, p) || !size_decay_grad(&extent, p, by_warpgroups)) {
        return cudaErrorNotSupported;
    }
    int code = launch_gated(p, &extent, shared, contain, on);
    if (code != cudaErrorNotSupported) return code;
    const mn_additive_workspace workspace = carve_workspace(&extent, MN_SCAN_MAX, shared);
    split_scans(&scans, n, p, &extent, &workspace);
    if (!p->grad.g.data || p->decay == MN_DECAY_NONE) {
        return launch_scans(p, &scans, 0, n, extent.segments, on);
    }
    add_decay_grad(&scans, n, &workspace, by_warpgroups);
    code = launch_scans(p, &scans, 0, n - 1, extent.segments, on);
    if (code == cudaSuccess) code = launch_scans(p, &scans, n - 1, n, extent.segments, on);
    if (code != cudaSuccess || p->decay == MN_DECAY_CHANNEL) return code;
    return mn_additive_token_decay_grad(p, &extent, &workspace, on);
}

MN_CUDA_LAUNCH(additive_backward) {
    return mn_additive_backward_launch((const mn_additive_args *)args, shared, false,
                                       (cudaStream_t)stream);
}

/* ---- additive_column ------------------------------------------------------------------------- */

bool mn_additive_query_chunks(const mn_additive_args *p) {
    return uses_chunks(p, true);
}

bool mn_additive_query_plan(mn_plan *plan, const mn_additive_args *p) {
    mn_additive_extent extent = {};
    return size_segments(&extent, p) && plan_workspace(plan, &extent, 1) &&
           (p->call.K > 128 || p->call.V > 128 || plan_gated(plan, p, &extent));
}

/* From the states that a scan keeps (additive_channel_chunk_sm90.cu). */
static int launch_gated_query(const mn_additive_args *p, const mn_additive_extent *extent,
                              void *shared, cudaStream_t stream) {
    mn_chunk_scans fwd;
    size_t kept;
    if (p->call.K > 128 || p->call.V > 128 || !size_saved_states(&kept, p)) {
        return cudaErrorNotSupported;
    }
    /* its queries are read by nothing: keys stand for them */
    mn_additive_args states = *p;
    states.q = p->k, states.o = {};
    (void)forward_scans(&fwd, &states);
    fwd.scan[0].segment = segment_size(p);
    fwd.scan[0].kept = (mn_bf16 *)shared;
    fwd.scan[0].sums = (float *)((mn_bf16 *)shared + kept);
    fwd.scan[0].cum_decays = fwd.scan[0].sums + extent->sums;
    return mn_additive_gated_query(p, &fwd, extent->segments, stream);
}

int mn_additive_query_launch(const mn_additive_args *p, void *shared, cudaStream_t stream) {
    mn_additive_extent extent = {};
    mn_chunk_scans scans = {};
    if (!size_segments(&extent, p)) return cudaErrorNotSupported;
    const int code = launch_gated_query(p, &extent, shared, stream);
    if (code != cudaErrorNotSupported) return code;
    const mn_additive_workspace workspace = carve_workspace(&extent, 1, shared);
    scans.call = p->call, scans.g = p->g;
    scans.scan[0] = make_scan(p, p->cot.o, p->v, p->k, p->grad.q, true, false);
    scans.scan[0].state = p->state;
    split_scans(&scans, 1, p, &extent, &workspace);
    return launch_scans(p, &scans, 0, 1, extent.segments, stream);
}

}    // namespace mneme::additive
