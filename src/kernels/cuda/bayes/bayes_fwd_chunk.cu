/* bayes_fwd_chunk.cu - the Bayesian Layer and its covariances alone, forward: the kernels of
 * bayes_fwd_chunk.cuh, or that of bayes_fwd_wide.cu for states that these do not hold. */
#include "kernels/cuda/bayes/bayes_fwd_chunk.cuh"
#include "kernels/cuda/bayes/bayes_fwd_wide.h"
#include "kernels/riccati_args.h"

namespace mneme::bayes {

/* False where the scan has no room for the state. */
static bool job_of(mn_state_scan_job *job, const mn_bayes_args *p) {
    const int64_t R = p->call.K * (p->theta.data ? 2 : 1);
    job->p = *p;
    job->p.call.R = R;
    job->redo = false;
    job->rows = 32;
    while (job->rows < R) job->rows *= 2;
    job->step = p->theta.data ? 2 : 1;
    job->spreads = p->qvar.data && p->q.data;
    job->reads = job->spreads || (p->o.data && p->q.data);
    job->blocks = mn_state_scan_blocks(job);
    return R <= MN_SCAN_WIDEST && mn_state_scan_covariance_fits(job);
}

/* Takes `count` times `each` doubles from `*bytes` on, and moves `*bytes` behind them. */
static bool take(size_t *bytes, int64_t count, int64_t each) {
    size_t more;
    return mn_mul_size(&more, (size_t)count, (size_t)each * sizeof(double)) &&
           mn_add_size(bytes, *bytes, more);
}

/* Bytes of the work space, and where its parts are from `memory` on. */
static bool place_work(mn_state_scan_job *job, unsigned char *memory, size_t *bytes) {
    const mn_call &call = job->p.call;
    const int64_t places = mn_tile_slots(call, MN_SCAN_CHUNK) * call.H, groups = places * call.G;
    const int64_t chunk = MN_SCAN_CHUNK, smem_tile = mn_state_scan_smem_tile(job->rows);
    const int64_t scans = mn_n_spans(call) * call.H * call.G;
    const struct {
        double **at;
        int64_t count, each;
    } parts[] = {
        { &job->work.keys, places, smem_tile },
        { &job->work.queries, job->reads ? places : 0, smem_tile },
        { &job->work.noised, places, mn_state_scan_noised(job->rows) },
        { &job->work.ends, places, 3 * job->rows },
        { &job->work.z, groups, smem_tile },
        { &job->work.undo, groups, MN_SCAN_UNDO },
        { &job->work.inverse, groups, chunk },
        { &job->work.variance, groups, chunk },
        { &job->work.spread, job->spreads ? groups : 0, MN_SCAN_SUMS * chunk },
        { &job->work.r2, groups, chunk },
        { (double **)&job->work.steep, mn_ceil_div(places, 2), 1 },
        { (double **)&job->work.done, scans, MN_SCAN_BLOCKS / 2 },
        { (double **)&job->work.cuts, mn_ceil_div(scans, 2), 1 },
    };
    bool ok = true;
    *bytes = 0;
    for (const auto &part : parts) {
        *part.at = (double *)(memory + *bytes);
        ok = ok && take(bytes, part.count, part.each);
    }
    return ok;
}

static bool forward_plan(const mn_bayes_args *p, mn_plan *plan) {
    mn_state_scan_job job;
    if (!job_of(&job, p)) return mn_bayes_wide_plan(p, plan);
    return place_work(&job, NULL, &plan->shared_bytes);
}

static int launch(const mn_state_scan_job *job, cudaStream_t on) {
    const mn_bayes_args *p = &job->p;
    const bool places = mn_tile_slots(p->call, MN_SCAN_CHUNK) * p->call.H > 0;
    const bool results = p->gain.data || p->gainvec.data || p->kvar.data || p->qvar.data;
    int code = places ? mn_state_scan_prepare(job, on) : cudaSuccess;
    if (code == cudaSuccess) code = mn_state_scan_covariance(job, on);
    if (code == cudaSuccess && (p->o.data || p->M.data)) code = mn_state_scan_mean(job, on);
    if (code == cudaSuccess && results && places) code = mn_state_scan_results(job, on);
    return code;
}

/* Whether rows in front of numbers that are not finite are made again. */
static const bool redoes_results = true;

/* Rows of a call that has run. */
static int redo(const mn_state_scan_job *job, cudaStream_t on) {
    const mn_bayes_args &p = job->p;
    mn_state_scan_job again = *job;
    const bool shows = p.o.data || p.gain.data || p.gainvec.data || p.kvar.data || p.qvar.data;
    if (!redoes_results || !shows || p.call.T < 2) return cudaSuccess;
    again.redo = true, again.p.P = {}, again.p.M = {};
    return launch(&again, on);
}

static int forward(const mn_bayes_args *p, void *shared, void *stream) {
    mn_state_scan_job job;
    size_t bytes;
    const cudaStream_t on = (cudaStream_t)stream;
    const int64_t scans = mn_n_spans(p->call) * p->call.H * p->call.G;
    if (scans == 0) return cudaSuccess;
    if (!job_of(&job, p)) return mn_bayes_wide(p, shared, on);
    place_work(&job, (unsigned char *)shared, &bytes);
    const int64_t places = mn_tile_slots(p->call, MN_SCAN_CHUNK) * p->call.H;
    if (places > INT32_MAX || scans * mn_max(p->call.V, 4) > INT32_MAX) {
        return cudaErrorNotSupported;
    }
    const int code = launch(&job, on);
    return code == cudaSuccess ? redo(&job, on) : code;
}

MN_CUDA_PLAN(bayes_forward) {
    return forward_plan((const mn_bayes_args *)args, plan);
}

MN_CUDA_LAUNCH(bayes_forward) {
    return forward((const mn_bayes_args *)args, shared, stream);
}

MN_CUDA_PLAN(riccati_forward) {
    const mn_bayes_args p = mn_riccati_as_bayes((const mn_riccati_args *)args);
    return forward_plan(&p, plan);
}

MN_CUDA_LAUNCH(riccati_forward) {
    const mn_bayes_args p = mn_riccati_as_bayes((const mn_riccati_args *)args);
    return forward(&p, shared, stream);
}

}    // namespace mneme::bayes
