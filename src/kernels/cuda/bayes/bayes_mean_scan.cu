/* bayes_mean_scan.cu - means and what is read from them, chunk after chunk, from what the scan over
 * covariances leaves; bayes_fwd_chunk.cuh.
 *
 * A block has a slice of 32 value columns of a group. Of its four warps each has 16 of these, which
 * are rows of Mh', and half of the state's rows:
 *
 *   E = kh Mh - v    O = qh Mh    W = qh z'    e' = - E'L^-T / sigma    o = O + W e    Mh' + e'z
 *
 * What two warps have of a sum is exchanged once, between two barriers of which one is the next
 * chunk's. A block starts beside a block of the covariance scan on the same processor, and
 * follows that scan chunk by chunk. */
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/bayes/bayes_fwd_chunk.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::bayes {

enum {
    WARPS = 4, THREADS = 32 * WARPS, SLICE = MN_SCAN_SLICE, CHUNK = MN_SCAN_CHUNK,
    HALVES = 2,                     // warps that share value columns
    KEYS = 0, WRITES = 1,           // the warps that issue their loads
};

/* What the covariance scan leaves of a chunk. */
template <int RP>
struct alignas(16) writes {
    double z[8][2 * RP + 2];
    double undo[CHUNK][CHUNK + 4];    // L^-1
    double phi[RP], inverse[CHUNK];
};

/* What warps have of sums: E' by values and tokens; by fragments, pairs of numbers of each lane,
 * O of eight value columns that the other warp reads, and W of eight s. */
struct alignas(16) shares {
    double e[WARPS][16][CHUNK + 4], o[WARPS][2][64], w[WARPS][2][64];
};

template <int RP>
struct alignas(16) smem {
    double keys[8][2 * RP + 2], queries[8][2 * RP + 2];
    writes<RP> in[2];
    shares share[2];                    // of steps in turn
    uint64_t arrived[2];                // keys and queries, writes
};

/* Where a block is, and which tokens [low, high) of the chunk at `place` it works on. */
struct ctx {
    int64_t scan, n, h, g, place, group, t;    // group: place * G + g; t: the chunk's first token
    int first, columns;                  // value columns
    int low, high;
    unsigned step;                       // a chunk, or a token of a steep one
    mn_span span;
};

template <typename T, int RP>
struct worker {
    static constexpr int TILES = RP / 16;
    double M[TILES][2][2];
    int index, lane, value, part;    // own warp; first column of the slice; half of the rows

    __device__ worker(void) {
        index = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
        value = index / HALVES * 16, part = index % HALVES;
    }

    __device__ int row(int b) const { return part * (RP / 2) + 8 * b; }

    __device__ void put_share(double (&to)[64], const double (&x)[2]) const {
        *(double2 *)&to[2 * lane] = make_double2(x[0], x[1]);
    }

    __device__ void add_share(double (&x)[2], const double (&from)[64]) const {
        const double2 pair = *(const double2 *)&from[2 * lane];
        x[0] += pair.x, x[1] += pair.y;
    }

    /* Parts of E, which begins with - v, and O over these rows, left for the others; `own` has O of
     * the value columns that this warp reads. */
    __device__ void read(double (&own)[2][2], double (&e)[2][2][2], smem<RP> &m, shares &share,
                         bool reads) const {
        const int j = lane / 4, pair = 2 * (lane % 4);
        double o[2][2][2] = {};
#pragma unroll
        for (int b = 0; b < TILES; b++) {
            double a[4];
            mn_state_scan_left(a, &m.keys[j][2 * (row(b) + pair)]);
            mn_mma_f64_k8(e[0], a, M[b][0]);
            mn_mma_f64_k8(e[1], a, M[b][1]);
            if (!reads) continue;
            mn_state_scan_left(a, &m.queries[j][2 * (row(b) + pair)]);
            mn_mma_f64_k8(o[0], a, M[b][0]);
            mn_mma_f64_k8(o[1], a, M[b][1]);
        }
#pragma unroll
        for (int x = 0; x < 8; x++) {
            share.e[index][8 * (x / 4) + pair + x % 2][8 * (x / 2 % 2) + j] =
                e[x / 4][x / 2 % 2][x % 2];
        }
#pragma unroll
        for (int f = 0; f < 2 && reads; f++) {
            double others[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                others[i] = part ? o[0][f][i] : o[1][f][i];
                own[f][i] = part ? o[1][f][i] : o[0][f][i];
            }
            put_share(share.o[index][f], others);
        }
    }

    /* Its part of W: s in the half that this warp's value columns say. */
    __device__ void weigh(const smem<RP> &m, const writes<RP> &in, shares &share) const {
        double w[2][2][2] = {};
        const int j = lane / 4, pair = 2 * (lane % 4), half = value / 16;
#pragma unroll
        for (int b = 0; b < TILES; b++) {
            double a[4], z[2];
            mn_state_scan_left(a, &m.queries[j][2 * (row(b) + pair)]);
            mn_state_scan_right(z, &in.z[j][2 * (row(b) + pair)], half);
            mn_mma_f64_k8(w[b % 2], a, z);
        }
#pragma unroll
        for (int f = 0; f < 2; f++) {
            const double both[2] = { w[0][f][0] + w[1][f][0], w[0][f][1] + w[1][f][1] };
            put_share(share.w[index][f], both);
        }
    }

    /* Column x of the four that this lane has of E and O, x / 2 being the block. */
    __device__ int column(int x) const { return value + 8 * (x / 2) + 2 * (lane % 4) + x % 2; }

    /* Its values of the chunk that begins at token t, as bits: the first eight tokens for one of
     * the warps that share them, the others for the other one. Tokens behind the last one get its
     * values. Columns are hidden from the compiler, which has no registers to keep addresses in. */
    __device__ void values(unsigned (&v)[4], const mn_state_scan_job &job, const ctx &s,
                           int64_t t) const {
        int own = column(0);
        asm volatile("" : "+r"(own));
        const int64_t token = min(t + 8 * part + lane / 4, s.span.length - 1);
        const T *from = mn_row<T>(job.p.v, s.span.b, s.span.t0 + token, s.h) + s.first;
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const T *at = from + min(own + 8 * (x / 2) + x % 2, s.columns - 1);
            v[x] = sizeof(T) == 2 ? *(const uint16_t *)at : *(const unsigned *)at;
        }
    }

    /* Prefetches those of the chunk that begins at token t into L2; there are no registers to keep
     * them in. */
    __device__ void expect_values(const mn_state_scan_job &job, const ctx &s, int64_t t) const {
        const int64_t token = min(t + 8 * part + lane / 4, s.span.length - 1);
        const T *from = mn_row<T>(job.p.v, s.span.b, s.span.t0 + token, s.h) + s.first;
        mn_prefetch_l2(from + min(value, s.columns - 1));
    }

    /* - v where this warp has it, zeros elsewhere. */
    __device__ void begin(double (&e)[2][2][2], const unsigned (&v)[4]) const {
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const double less = -(double)__uint_as_float(sizeof(T) == 2 ? v[x] << 16 : v[x]);
            e[x / 2][0][x % 2] = part ? 0.0 : less;
            e[x / 2][1][x % 2] = part ? less : 0.0;
        }
    }

    /* e' / sigma from E's parts: rows are values, e[half] has tokens [8 half, 8 half + 8). */
    __device__ void solve(double (&e)[2][2][2], const writes<RP> &in, const shares &share) const {
        const int i = 2 * (lane % 4), j = lane / 4;
        double a[8];
#pragma unroll
        for (int f = 0; f < 4; f++) {    // rows 8 (f % 2) on, tokens 8 (f / 2) on
            const double2 mine =
                *(const double2 *)&share.e[index][8 * (f % 2) + j][8 * (f / 2) + i];
            const double2 other =
                *(const double2 *)&share.e[index ^ 1][8 * (f % 2) + j][8 * (f / 2) + i];
            double *to = &a[4 * (f / 2) + f % 2];
            to[0] = mine.x + other.x, to[2] = mine.y + other.y;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const double2 low = *(const double2 *)&in.undo[8 * half + j][i];
            const double2 high = *(const double2 *)&in.undo[8 * half + j][8 + i];
            const double b[4] = { low.x, low.y, high.x, high.y };
            e[half][0][0] = e[half][0][1] = e[half][1][0] = e[half][1][1] = 0.0;
            mn_mma_f64_k16(e[half], a, b);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const double2 scale = *(const double2 *)&in.inverse[8 * half + i];
#pragma unroll
            for (int m = 0; m < 2; m++) e[half][m][0] *= -scale.x, e[half][m][1] *= -scale.y;
        }
    }

    /* M <- (M + z e' / sigma) Phi' */
    __device__ void write(const writes<RP> &in, const double (&e)[2][2][2], bool turns) {
        const int i = lane % 4, j = lane / 4;
        double a[8];
#pragma unroll
        for (int k = 0; k < 8; k++) a[k] = e[k / 4][k % 2][k / 2 % 2];
#pragma unroll
        for (int b = 0; b < TILES; b++) {
            const double2 one = *(const double2 *)&in.z[2 * i][2 * (row(b) + j)];
            const double2 two = *(const double2 *)&in.z[2 * i + 1][2 * (row(b) + j)];
            const double z[4] = { one.x, two.x, one.y, two.y };
            mn_mma_f64_k16(M[b], a, z);
        }
#pragma unroll
        for (int b = 0; b < TILES; b++) {
            const double2 phi = *(const double2 *)&in.phi[row(b) + 2 * i];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const double x = M[b][half][0], y = M[b][half][1];
                M[b][half][0] = turns ? phi.x * x - phi.y * y : phi.x * x;
                M[b][half][1] = turns ? phi.y * x + phi.x * y : phi.y * y;
            }
        }
    }

    /* o of eight value columns, `part` says which of two blocks. */
    __device__ void put(double (&c)[2][2], const double (&e)[2][2][2], const shares &share,
                        const mn_state_scan_job &job, const ctx &s) const {
        const int pair = 2 * (lane % 4), j = lane / 4;
        double a[8], b[4];
#pragma unroll
        for (int m = 0; m < 2; m++) add_share(c[m], share.o[index ^ 1][m]);
#pragma unroll
        for (int f = 0; f < 4; f++) {    // tokens t 8 (f % 2) on, s 8 (f / 2) on
            double w[2] = { 0.0, 0.0 };
            add_share(w, share.w[HALVES * (f / 2)][f % 2]);
            add_share(w, share.w[HALVES * (f / 2) + 1][f % 2]);
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const bool before = 8 * (f / 2) + pair + x <= 8 * (f % 2) + j;
                a[4 * (f / 2) + f % 2 + 2 * x] = before ? w[x] : 0.0;
            }
        }
#pragma unroll
        for (int x = 0; x < 4; x++) b[x] = part ? e[x / 2][1][x % 2] : e[x / 2][0][x % 2];
        mn_mma_f64_k16(c, a, b);
        int own = column(0);
        asm volatile("" : "+r"(own));
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int t = 8 * m + j;
            T *out = mn_row<T>(job.p.o, s.span.b, s.span.t0 + s.t + t, s.h) + s.first;
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const int at = own + x + 8 * part;
                if (t < s.low || t >= s.high || at >= s.columns) continue;
                mn_put(out + at, (float)(job.p.scale * c[m][x]));
            }
        }
    }

    /* use(number, row, column of V) for what this lane has of M */
    template <typename F>
    __device__ void each(const mn_state_scan_job &job, const ctx &s, F use) {
#pragma unroll
        for (int x = 0; x < TILES * 4; x++) {
            const int r = row(x / 4) + 2 * (lane % 4) + x % 2;
            const int column = value + 8 * (x / 2 % 2) + lane / 4;
            if (r < job.p.call.R && column < s.columns) {
                use(M[x / 4][x / 2 % 2][x % 2], r, s.first + column);
            } else {
                M[x / 4][x / 2 % 2][x % 2] = 0.0;
            }
        }
    }
};

/* Issues the loads of kh and qh (16,RP) of the chunk at `place`, by one warp. */
template <int RP>
__device__ static void request_keys(smem<RP> &m, const mn_state_scan_job &job, unsigned place) {
    constexpr int SIZE = mn_state_scan_smem_tile(RP);
    if (threadIdx.x % 32 == 0) mn_state_scan_expect(&m.arrived[0], (job.reads ? 2 : 1) * SIZE);
    __syncwarp();
    mn_state_scan_load<SIZE>(m.keys[0], job.work.keys + (uint64_t)place * SIZE, &m.arrived[0]);
    if (!job.reads) return;
    mn_state_scan_load<SIZE>(m.queries[0], job.work.queries + (uint64_t)place * SIZE,
                             &m.arrived[0]);
}

/* `chunk` is the sequence's first, second, ... at `place`. Issues the loads of z (16,RP), L^-1
 * (16,16), Phi (RP) and 1 / sigma (16) once all blocks of the covariance have counted the chunk in
 * work.done; the first `known` chunks are known to be counted. By one warp. */
template <int RP>
__device__ static void request_writes(smem<RP> &m, int &known, const mn_state_scan_job &job,
                                      const ctx &s,
                                  unsigned place, int chunk) {
    const uint64_t group = place * (unsigned)job.p.call.G + (unsigned)s.g;
    const mn_state_scan_work &work = job.work;
    constexpr int SIZE = mn_state_scan_smem_tile(RP);
    writes<RP> &in = m.in[chunk % 2];
    const int *done = work.done + s.scan * MN_SCAN_BLOCKS + (int)threadIdx.x % job.blocks;
    if (known <= chunk) {    // alike in all lanes, of which each looks after one block
        do {
            int there;
            there = mn_load_acquire(done);
            known = __reduce_min_sync(0xffffffffu, there);
        } while (known <= chunk);
        mn_state_scan_before_copies();
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        mn_state_scan_expect(&m.arrived[1], SIZE + MN_SCAN_UNDO + RP + CHUNK);
    }
    __syncwarp();
    mn_state_scan_load<SIZE>(in.z[0], work.z + group * SIZE, &m.arrived[1]);
    mn_state_scan_load<MN_SCAN_UNDO>(in.undo[0], work.undo + group * MN_SCAN_UNDO, &m.arrived[1]);
    mn_state_scan_load<RP>(in.phi, work.ends + (uint64_t)place * (3 * RP), &m.arrived[1]);
    mn_state_scan_load<CHUNK>(in.inverse, work.inverse + group * CHUNK, &m.arrived[1]);
}

/* One step of a steep chunk. */
template <int RP>
__device__ static void fill_steep(smem<RP> &m, writes<RP> &in, const mn_state_scan_job &job,
                                  const ctx &s, const mn_state_scan_steep_step &step) {
    const double *keys = job.work.keys + s.place * mn_state_scan_smem_tile(RP);
    const double *queries = job.work.queries + s.place * mn_state_scan_smem_tile(RP);
    const double *z = job.work.z + s.group * mn_state_scan_smem_tile(RP);
#pragma unroll 1
    for (int e = threadIdx.x; e < CHUNK * RP; e += THREADS) {
        const int t = e / RP, r = e % RP;
        const int at = mn_state_scan_smem_tile_at(t, r, RP);
        m.keys[0][at] = step.has(t) ? keys[at] : 0.0;
        if (job.reads) m.queries[0][at] = step.has(t) ? queries[at] : 0.0;
        in.z[0][at] = step.has(t) ? z[at] : 0.0;
    }
    const int t = (int)threadIdx.x;
    if (t < CHUNK) in.inverse[t] = step.has(t) ? job.work.inverse[s.group * CHUNK + t] : 0.0;
    mn_state_scan_steep_phi<RP, THREADS>(in.phi, job.work.ends + s.place * 3 * RP,
                                         job.work.noised + s.place * mn_state_scan_noised(RP),
                                         step, t);
    mn_state_scan_before_copies();
}

/* Waits until the copies that one of the block's warps has issued have arrived. */
__device__ static void await_copies(uint64_t *arrived, unsigned turn) {
    mn_state_scan_await(arrived, turn);
#if __CUDA_ARCH__ < 900
    __syncthreads();
#endif
}

/* The sequence, head and slice of a block. */
template <typename T, int RP>
__device__ static void state_scan(const mn_state_scan_job &job, ctx &s) {
    extern __shared__ __align__(16) unsigned char memory[];
    smem<RP> &m = *(smem<RP> *)memory;
    const mn_call &call = job.p.call;
    const int64_t slot = mn_state_scan_slot(call, s.n),
        chunks = (s.span.length + CHUNK - 1) / CHUNK;
    worker<T, RP> mine;
    const float *given = mn_row<float>(job.p.M0, s.n, 0, s.h);
    mine.each(job, s, [&](double &x, int r, int column) {
        x = given ? (double)given[r * call.V + column] : 0.0;
    });
    int known = 0;    // chunks whose writes are there
    s.place = slot * call.H + s.h, s.step = 0;
    if (threadIdx.x == 0) mn_state_scan_open(&m.arrived[0]), mn_state_scan_open(&m.arrived[1]);
    __syncthreads();
    if (chunks > 0) {
        mn_state_scan_before_copies();
        if (mine.index == KEYS) request_keys(m, job, (unsigned)s.place);
        if (mine.index == WRITES) request_writes(m, known, job, s, (unsigned)s.place, 0);
    }
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        writes<RP> &in = m.in[chunk % 2];
        const int64_t next = (slot + chunk + 1) * call.H + s.h;
        const bool last = chunk + 1 == chunks;
        s.place = (slot + chunk) * call.H + s.h, s.group = s.place * call.G + s.g;
        s.t = chunk * CHUNK;
        const int count = (int)min((int64_t)CHUNK, s.span.length - s.t);
        await_copies(&m.arrived[0], (unsigned)chunk);
        const bool steep = mn_state_scan_is_steep(m.keys[0], RP);
        const int begin = steep ? mn_state_scan_steep_begin(m.keys[0], RP) : 1;
        const int end = steep ? count : 1;
        bool asked = last;
        for (int token = begin - 1; token < end; token++, s.step++) {
            const mn_state_scan_steep_step step = { token, job.step, token < begin };
            const bool ends = token + 1 == end;
            shares &share = m.share[s.step % 2];
            double e[2][2][2], o[2][2];
            unsigned v[4];
            mine.values(v, job, s, s.t);
            s.low = 0, s.high = count;
            if (steep) {
                s.low = step.front ? 0 : token, s.high = token + 1;
                if (step.front) await_copies(&m.arrived[1], (unsigned)chunk);
                __syncthreads();
                fill_steep(m, in, job, s, step);
                __syncthreads();
            }
            mine.begin(e, v);
            mine.read(o, e, m, share, job.reads);
            if (!steep) await_copies(&m.arrived[1], (unsigned)chunk);
            if (job.reads) mine.weigh(m, in, share);
            __syncthreads();
            if (ends) mine.expect_values(job, s, s.t + CHUNK);
            if (mine.index == KEYS && ends && !last) request_keys(m, job, (unsigned)next);
            if (mine.index == WRITES && ends && !asked && known > chunk + 1) {
                request_writes(m, known, job, s, (unsigned)next, (int)chunk + 1), asked = true;
            }
            mine.solve(e, in, share);
            if (job.p.o.data && job.reads) mine.put(o, e, share, job, s);
            mine.write(in, e, job.step == 2);
        }
        if (mine.index == WRITES && !asked) {
            request_writes(m, known, job, s, (unsigned)next, (int)chunk + 1);
        }
    }
    float *mean = mn_row<float>(job.p.M, s.n, 0, s.h);
    if (!mean) return;
    mine.each(job, s, [&](double &x, int r, int column) { mean[r * call.V + column] = (float)x; });
}

/* Grid: slices blocks of 128 threads for each group g of a head h of a sequence n, 32 value columns
 * each.
 * Loads   M0 (R, 32 columns) at the start; for each chunk kh, qh (16,R), v (16, 32 columns), and z
 *         (16,R), L^-1 (16,16), Phi (R) and 1 / sigma (16) of the covariance scan.
 * Stores  o (16, 32 columns) of each chunk where given; M at the end.
 * REGISTERS: what two blocks of a covariance leave, or all there are. */
template <typename T, int RP, int REGISTERS>
__global__ void __maxnreg__(REGISTERS)
mean_kernel(const __grid_constant__ mn_state_scan_job job, int slices) {
    const mn_call &call = job.p.call;
    ctx s;
    s.scan = blockIdx.x / slices;
    s.g = s.scan % call.G, s.h = s.scan / call.G % call.H, s.n = s.scan / call.G / call.H;
    const mn_state_scan_columns columns = mn_state_scan_columns_of(call, s.g);
    const int skipped = (int)(blockIdx.x % slices) * SLICE;
    s.first = columns.first + skipped, s.columns = min(columns.count - skipped, (int)SLICE);
    s.span = mn_span_at(call, s.n), s.span.length = mn_state_scan_length(job, s.n, s.h);
    if (s.columns > 0) state_scan<T, RP>(job, s);
    mn_pdl_wait();
}

/* ---- launches -------------------------------------------------------------------------------- */

template <typename T, int RP, int REGISTERS = (RP < 128 ? 168 : 255)>
static int start(const mn_state_scan_job *job, cudaStream_t stream) {
    const mn_call &call = job->p.call;
    const int64_t columns = mn_ceil_div(call.V, call.G), slices = mn_ceil_div(columns, SLICE);
    const int64_t blocks = mn_n_spans(call) * call.H * call.G * slices;
    const auto kernel = mean_kernel<T, RP, REGISTERS>;
    const cudaError_t code = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(smem<RP>));
    if (code != cudaSuccess) return code;
    return mn_launch_pdl(kernel, dim3((unsigned)blocks), THREADS, sizeof(smem<RP>), stream, *job,
                           (int)slices);
}

template <typename T>
static int mean(const mn_state_scan_job *job, cudaStream_t stream) {
    if (job->rows == 32) return start<T, 32>(job, stream);
    if (job->rows == 64) return start<T, 64>(job, stream);
    if (job->rows == 128 && job->blocks == 2) return start<T, 128, 152>(job, stream);
    if (job->rows == 128) return start<T, 128>(job, stream);
    return start<T, 256>(job, stream);
}

int mn_state_scan_mean(const mn_state_scan_job *job, cudaStream_t stream) {
    return job->p.call.dtype == MN_BF16 ? mean<mn_bf16>(job, stream) : mean<float>(job, stream);
}

}    // namespace mneme::bayes
