/* additive.cu - S = diag(exp g) S + k v';  o = scale S'q (see ref/additive.c).
 *
 * bf16 calls are scans over chunks on tensor cores (additive_mma.cuh says which); the rest and
 * decoding are the recurrence of matrix_state.cuh without its eraser: w = k, and the residual is v.
 * */
#include "kernels/cuda/additive/additive.cuh"

#include <math.h>

#include "kernels/cuda/prim/device_props.h"
#include "kernels/cuda/recurrent/matrix_state_step.cuh"

static mn_memory memory_of(const mn_additive_args *p) {
    mn_memory m = {};
    m.call = p->call, m.scale = (float)p->scale, m.decay = p->decay;
    m.q = p->q, m.w = p->k, m.v = p->v, m.g = p->g, m.state0 = p->state0;
    m.o = p->o, m.state = p->state, m.cot_o = p->cot.o, m.cot_state = p->cot.state;
    m.dq = p->grad.q, m.dw = p->grad.k, m.dv = p->grad.v, m.dg = p->grad.g;
    m.dstate0 = p->grad.state0;
    return m;
}

/* ---- which calls go over chunks -------------------------------------------------------------- */

int mn_additive_depth(int64_t width) {
    return width <= 64 ? 64 : width <= 128 ? 128 : 256;
}

int mn_additive_shared_limit(void) {
    return mn_device_props_current().shared_bytes;
}

static int chunk_of(const mn_additive_args *p, int64_t width) {
    const int depth = mn_additive_depth(width);
    return p->decay == MN_DECAY_CHANNEL ? mn_additive_channel_chunk(depth)
                                        : mn_additive_token_chunk(depth);
}

/* By its kind and sizes, never its length. In narrow memories tiles would be mostly padding, and
 * few columns average the roundings of P and S less. */
static bool goes_over_chunks(const mn_additive_args *p, bool backward) {
    const int64_t K = p->call.K, V = p->call.V;
    if (p->call.dtype != MN_BF16 || K < 16 || K > 256 || V <= 32) return false;
    if (backward && (V > 256 || !(fabs(p->scale) > 1e-20) || fabs(p->scale) > 1e20)) return false;
    return chunk_of(p, K) > 0 && (!backward || chunk_of(p, V) > 0);
}

/* ---- scans ----------------------------------------------------------------------------------- */

/* `turned`: the state's rows are V, its columns K. */
static mn_scan scan_of(const mn_additive_args *p, const mn_in &x, const mn_in &y, const mn_in &z,
                       const mn_out &out, bool turned, bool reverse) {
    mn_scan walk = {};
    const int64_t K = p->call.K, V = p->call.V;
    walk.x = x, walk.y = y, walk.z = z, walk.out = out;
    walk.depth = turned ? V : K, walk.width = turned ? K : V;
    walk.state_row = turned ? 1 : V, walk.state_column = turned ? V : 1;
    walk.scale = (float)p->scale;
    walk.into = reverse ? 1.0f / (float)p->scale : 1.0f;
    walk.from = reverse ? (float)p->scale : 1.0f;
    walk.state0 = reverse ? p->cot.state : p->state0;
    walk.reverse = reverse;
    return walk;
}

/* The scans of a pass, without work space; how many there are. dq comes first, dk last. */
static int forward_scans(mn_state_scans *out, const mn_additive_args *p) {
    *out = {};
    out->call = p->call, out->g = p->g;
    out->walk[0] = scan_of(p, p->q, p->k, p->v, p->o, false, false);
    out->walk[0].state = p->state;
    return 1;
}

static int backward_scans(mn_state_scans *out, const mn_additive_args *p) {
    const bool decay = p->grad.g.data;
    int n = 0;
    *out = {};
    out->call = p->call, out->g = p->g, out->dg = p->grad.g;
    if (p->grad.q.data || decay) {
        out->walk[n] = scan_of(p, p->cot.o, p->v, p->k, p->grad.q, true, false);
        out->walk[n++].beside = p->q;
    }
    if (p->grad.v.data || p->grad.state0.data) {
        out->walk[n] = scan_of(p, p->k, p->q, p->cot.o, p->grad.v, false, true);
        out->walk[n++].state = p->grad.state0;
    }
    if (p->grad.k.data || decay) {
        out->walk[n] = scan_of(p, p->v, p->cot.o, p->q, p->grad.k, true, true);
        out->walk[n++].beside = p->k;
    }
    return n;
}

/* Adds what the gradient of the decay takes to the first and the last of `count` scans. */
static void equip(mn_state_scans *scans, int count, const mn_additive_work *work) {
    mn_scan *query = &scans->walk[0], *key = &scans->walk[count - 1];
    query->duty = MN_SCAN_KEEPS, key->duty = MN_SCAN_MEETS;
    query->products = work->query, key->products = work->key;
    query->kept = key->kept = work->kept;
    key->meetings = work->meetings;
    query->inside = key->inside = work->inside;
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Least tokens of a segment: so many that the blocks of one long sequence fill a GPU. By sizes that
 * a sequence shares with all others. */
static int64_t segment_of(const mn_additive_args *p) {
    const int64_t slices = mn_ceil_div(mn_min(p->call.K, p->call.V), MN_SCAN_WIDTH);
    const int64_t grains = mn_max(mn_min(slices * p->call.H, 32), 8);
    return grains * MN_SCAN_GRAIN;
}

static int launch_some(const mn_additive_args *p, const mn_state_scans *some, int n,
                       int64_t segments,
                       cudaStream_t stream) {
    if (p->decay == MN_DECAY_CHANNEL) {
        return mn_additive_channel_launch(some, segments, some->walk[0].state_row == 1, stream);
    }
    return mn_additive_token_launch(some, n, segments, p->decay != MN_DECAY_NONE, stream);
}

/* Walks [from, to), those of one kind and depth together; long sequences in two steps. */
static int launch_scans(const mn_additive_args *p, const mn_state_scans *scans, int from, int to,
                        int64_t segments, cudaStream_t stream) {
    while (from < to) {
        const int depth = mn_additive_depth(scans->walk[from].depth);
        mn_state_scans some = *scans;
        int n = 0, code = cudaSuccess;
        for (; from < to && (n == 0 || p->decay != MN_DECAY_CHANNEL) &&
               mn_additive_depth(scans->walk[from].depth) == depth;
             from++) {
            some.walk[n++] = scans->walk[from];
        }
        if (segments > 1) {
            for (int i = 0; i < n; i++) some.walk[i].gathers = true;
            code = launch_some(p, &some, n, segments, stream);
            for (int i = 0; i < n; i++) some.walk[i].gathers = false;
        }
        if (code == cudaSuccess) code = launch_some(p, &some, n, segments, stream);
        if (code != cudaSuccess) return code;
    }
    return cudaSuccess;
}

/* What segments take, for each walk. */
static bool measure_segments(mn_additive_extent *to, const mn_additive_args *p) {
    const int64_t segment = segment_of(p), widest = mn_max(p->call.K, p->call.V);
    to->segments = mn_max(mn_min(mn_ceil_div(p->call.T, segment), MN_SCAN_SEGMENTS), 1);
    if (to->segments == 1) return true;
    const size_t slices = (size_t)mn_ceil_div(widest, MN_SCAN_WIDTH);
    const size_t state = (size_t)mn_additive_depth(mn_min(widest, 256)) * MN_SCAN_WIDTH;
    size_t count;
    return mn_mul_size(&count, (size_t)mn_tile_slots(p->call, segment), (size_t)p->call.H) &&
           mn_mul_size(&count, count, slices) && mn_mul_size(&to->sums, count, state) &&
           mn_mul_size(&to->falls, count, MN_SCAN_FALLS);
}

/* What the gradient of a decay takes. */
static bool measure_decay(mn_additive_extent *to, const mn_additive_args *p) {
    const int chunk = chunk_of(p, p->call.V);
    const bool channel = p->decay == MN_DECAY_CHANNEL;
    size_t heads;
    to->slots = mn_tile_slots(p->call, chunk);
    to->slices = mn_ceil_div(p->call.K, MN_SCAN_WIDTH);
    const int64_t halves = to->slices * (128 / chunk);
    if (!p->grad.g.data) return true;
    bool ok = mn_mul_size(&heads, (size_t)to->slots, (size_t)p->call.H);
    ok = ok && mn_mul_size(&to->kept, heads, (size_t)(to->slices * MN_SCAN_WIDTH)) &&
         mn_mul_size(&to->kept, to->kept, (size_t)mn_additive_depth(p->call.V));
    ok = ok && mn_mul_size(&to->query, (size_t)p->call.B, (size_t)p->call.T) &&
         mn_mul_size(&to->query, to->query, (size_t)p->call.H) &&
         mn_mul_size(&to->query, to->query, (size_t)(channel ? p->call.K : halves));
    to->key = channel ? 0 : to->query;
    to->whole = heads;
    return ok && mn_mul_size(&to->meetings, heads, (size_t)(to->slices * MN_SCAN_WIDTH));
}

static bool plan_bytes(mn_plan *plan, const mn_additive_extent *extent, size_t scans) {
    size_t bytes, floats, sums;
    return mn_add_size(&sums, extent->sums, extent->falls) && mn_mul_size(&sums, sums, scans) &&
           mn_add_size(&floats, extent->query, extent->key) &&
           mn_add_size(&floats, floats, extent->meetings) &&
           mn_add_size(&floats, floats, extent->meetings) &&
           mn_add_size(&floats, floats, extent->whole) && mn_add_size(&floats, floats, sums) &&
           mn_mul_size(&floats, floats, sizeof(float)) &&
           mn_mul_size(&bytes, extent->kept, sizeof(mn_bf16)) &&
           mn_add_size(&plan->shared_bytes, floats, bytes);
}

/* The work space: what is read by 16 bytes first. */
static mn_additive_work place(const mn_additive_extent *extent, size_t scans, void *shared) {
    mn_additive_work work = {};
    work.kept = (mn_bf16 *)shared;
    work.sums = (float *)(work.kept + extent->kept);
    work.falls = work.sums + scans * extent->sums;
    work.query = work.falls + scans * extent->falls;
    work.key = extent->key ? work.query + extent->query : work.query;
    work.meetings = work.query + extent->query + extent->key;
    work.inside = work.meetings + extent->meetings;
    work.whole = work.inside + extent->meetings;
    return work;
}

static void cut_scans(mn_state_scans *scans, int count, const mn_additive_args *p,
                      const mn_additive_extent *extent, const mn_additive_work *work) {
    for (int i = 0; i < count; i++) {
        scans->walk[i].segment = segment_of(p);
        scans->walk[i].sums = work->sums + i * extent->sums;
        scans->walk[i].falls = work->falls + i * extent->falls;
    }
}

/* ---- gradients from kept states (additive_channel_chunk_sm90.cu)
 * ------------------------------------------ */

/* Whether all gradients are wanted that they have. */
static bool goes_gated(const mn_additive_args *p) {
    return p->decay == MN_DECAY_CHANNEL && p->call.K <= 128 && p->call.V <= 128 &&
           p->grad.q.data && p->grad.k.data && p->grad.v.data && p->grad.g.data;
}

/* Numbers of a kept state of all chunks: two are kept. */
static bool measure_kept(size_t *count, const mn_additive_args *p) {
    return mn_mul_size(count, (size_t)mn_tile_slots(p->call, 64), (size_t)p->call.H) &&
           mn_mul_size(count, *count, (size_t)mn_additive_depth(p->call.K)) &&
           mn_mul_size(count, *count, (size_t)mn_additive_depth(p->call.V));
}

static bool plan_gated(mn_plan *plan, const mn_additive_args *p, const mn_additive_extent *extent) {
    size_t kept, floats, bytes;
    const bool ok = measure_kept(&kept, p) && mn_mul_size(&kept, kept, 2 * sizeof(mn_bf16)) &&
                    mn_add_size(&floats, extent->sums, extent->falls) &&
                    mn_mul_size(&floats, floats, 2 * sizeof(float)) &&
                    mn_add_size(&bytes, kept, floats);
    if (ok && bytes > plan->shared_bytes) plan->shared_bytes = bytes;
    return ok;
}

static int launch_gated(const mn_additive_args *p, const mn_additive_extent *extent, void *shared,
                        cudaStream_t stream) {
    mn_state_scans there, back;
    size_t kept;
    if (!goes_gated(p) || !measure_kept(&kept, p)) return cudaErrorNotSupported;
    (void)forward_scans(&there, p);
    back = there;
    back.walk[0] = scan_of(p, p->k, p->q, p->cot.o, p->grad.v, false, true);
    back.walk[0].state = p->grad.state0;
    mn_scan *scans[2] = { &there.walk[0], &back.walk[0] };
    float *sums = (float *)((mn_bf16 *)shared + 2 * kept);
    there.walk[0].out = {}, there.walk[0].state = {};
    for (int i = 0; i < 2; i++) {
        scans[i]->segment = segment_of(p);
        scans[i]->kept = (mn_bf16 *)shared + i * kept;
        scans[i]->sums = sums + i * extent->sums;
        scans[i]->falls = sums + 2 * extent->sums + i * extent->falls;
    }
    return mn_additive_gated_backward(p, &there, &back, extent->segments, stream);
}

/* ---- calls ----------------------------------------------------------------------------------- */

MN_CUDA_PLAN(additive_forward) {
    const mn_additive_args *p = (const mn_additive_args *)args;
    mn_additive_extent extent = {};
    if (!goes_over_chunks(p, false)) return true;
    return measure_segments(&extent, p) && plan_bytes(plan, &extent, 1);
}

MN_CUDA_LAUNCH(additive_forward) {
    const mn_additive_args *p = (const mn_additive_args *)args;
    mn_additive_extent extent = {};
    if (!goes_over_chunks(p, false)) return mn_memory_forward<false>(memory_of(p), stream);
    if (!measure_segments(&extent, p)) return cudaErrorNotSupported;
    const mn_additive_work work = place(&extent, 1, shared);
    mn_state_scans scans;
    const int n = forward_scans(&scans, p);
    cut_scans(&scans, n, p, &extent, &work);
    return launch_scans(p, &scans, 0, n, extent.segments, (cudaStream_t)stream);
}

MN_CUDA_PLAN(additive_step) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(additive_step) {
    (void)shared;
    return mn_memory_step<false>(memory_of((const mn_additive_args *)args), stream);
}

MN_CUDA_PLAN(additive_backward) {
    const mn_additive_args *p = (const mn_additive_args *)args;
    if (!goes_over_chunks(p, true)) return mn_memory_backward_plan(plan, p->call);
    mn_additive_extent extent = {};
    return measure_segments(&extent, p) && measure_decay(&extent, p) &&
           plan_bytes(plan, &extent, MN_SCAN_MOST) &&
           (!goes_gated(p) || plan_gated(plan, p, &extent));
}

MN_CUDA_LAUNCH(additive_backward) {
    const mn_additive_args *p = (const mn_additive_args *)args;
    const cudaStream_t on = (cudaStream_t)stream;
    if (!goes_over_chunks(p, true)) return mn_memory_backward<false>(memory_of(p), shared, stream);
    mn_additive_extent extent = {};
    if (!measure_segments(&extent, p) || !measure_decay(&extent, p)) return cudaErrorNotSupported;
    int code = launch_gated(p, &extent, shared, on);
    if (code != cudaErrorNotSupported) return code;
    const mn_additive_work work = place(&extent, MN_SCAN_MOST, shared);
    mn_state_scans scans;
    const int n = backward_scans(&scans, p);
    cut_scans(&scans, n, p, &extent, &work);
    if (!p->grad.g.data || p->decay == MN_DECAY_NONE) {
        return launch_scans(p, &scans, 0, n, extent.segments, on);
    }
    equip(&scans, n, &work);
    code = launch_scans(p, &scans, 0, n - 1, extent.segments, on);
    if (code == cudaSuccess) code = launch_scans(p, &scans, n - 1, n, extent.segments, on);
    if (code != cudaSuccess || p->decay == MN_DECAY_CHANNEL) return code;
    return mn_additive_token_decay(p, &extent, &work, on);
}
