/* bayes_mean.cu - means and what is read from them, chunk after chunk, from what the walk over
 * covariances has left; bayes_walk.cuh.
 *
 * A block has a slice of 32 value columns of a group. Of its eight warps each has 16 of these,
 * which are rows of Mh', and a quarter of the state's rows. Three barriers a chunk. */
#include "kernels/cuda/bayes_walk.cuh"

enum {
    WARPS = 8, THREADS = 32 * WARPS, SLICE = MN_WALK_SLICE, CHUNK = MN_WALK_CHUNK,
    QUARTERS = 4,    // warps that share value columns
};

/* A chunk's inputs in shared memory. */
template <int RP>
struct alignas(16) inputs {
    double keys[CHUNK][RP + 8], queries[CHUNK][RP + 8], z[CHUNK][RP + 2];
    double ends[3][RP];
    double undo[CHUNK][CHUNK + 4];
    double inverse[CHUNK];
};

/* Chunks of 256 rows leave no room for two of them. */
template <int RP>
struct alignas(16) room {
    static constexpr int STAGES = RP < 256 ? 2 : 1;
    inputs<RP> in[STAGES];
    double parts[WARPS][2][256];        // kh Mh and qh Mh, by fragments
    double scores[WARPS][128];          // z qh', the same
    double e[SLICE][CHUNK + 4], o[SLICE][CHUNK + 4];    // v - kh Mh, qh Mh
    double weights[CHUNK][CHUNK + 2];   // z_s.qh_t / sigma_s
};

/* Where a block is, and which tokens [low, high) of the chunk at `place` it works on. */
struct scene {
    int64_t n, h, g, place, group, t;    // group: place * G + g; t: the chunk's first token
    int first, columns;                  // value columns
    int low, high;
    mn_span span;
};

template <typename T, int RP>
struct worker {
    static constexpr int TILES = RP / 32;
    double M[TILES][2][2];
    int index, lane, value, quarter;    // own warp; first column of the slice; quarter of the rows

    __device__ worker(void) {
        index = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
        value = index / QUARTERS * 16, quarter = index % QUARTERS;
    }

    __device__ int row(int b) const { return quarter * (RP / 4) + 8 * b; }

    /* Parts of kh Mh, qh Mh and z qh' over these rows. */
    __device__ void read(room<RP> &m, const inputs<RP> &in, bool reads) {
        double e[2][2][2] = {}, o[2][2][2] = {}, s[2][2] = {};
        const int j = lane / 4, pair = 2 * (lane % 4), half = value / 16;
#pragma unroll
        for (int b = 0; b < TILES; b++) {
            const int r = row(b) + pair;
            const double2 upper = *(const double2 *)&in.keys[j][r];
            const double2 lower = *(const double2 *)&in.keys[8 + j][r];
            const double k[4] = { upper.x, lower.x, upper.y, lower.y };
            mn_dmma_8(e[0], k, M[b][0]);
            mn_dmma_8(e[1], k, M[b][1]);
            if (!reads) continue;
            const double2 above = *(const double2 *)&in.queries[j][r];
            const double2 below = *(const double2 *)&in.queries[8 + j][r];
            const double q[4] = { above.x, below.x, above.y, below.y };
            mn_dmma_8(o[0], q, M[b][0]);
            mn_dmma_8(o[1], q, M[b][1]);
            const double2 early = *(const double2 *)&in.z[j][r];
            const double2 late = *(const double2 *)&in.z[8 + j][r];
            const double z[4] = { early.x, late.x, early.y, late.y };
            const double right[2] = { half ? below.x : above.x, half ? below.y : above.y };
            mn_dmma_8(s, z, right);
        }
#pragma unroll
        for (int f = 0; f < 4; f++) {
            const double (&x)[2] = e[f / 2][f % 2], (&y)[2] = o[f / 2][f % 2];
            *(double2 *)&m.parts[index][0][64 * f + 2 * lane] = make_double2(x[0], x[1]);
            if (reads) *(double2 *)&m.parts[index][1][64 * f + 2 * lane] = make_double2(y[0], y[1]);
        }
#pragma unroll
        for (int f = 0; f < 2 && reads; f++) {
            *(double2 *)&m.scores[index][64 * f + 2 * lane] = make_double2(s[f][0], s[f][1]);
        }
    }

    /* The parts added up: e in front of the chunk's own writes, o, weights. */
    __device__ void gather(room<RP> &m, const inputs<RP> &in, const float (&v)[2],
                           bool reads) const {
        const int i = (int)threadIdx.x, f = i / 64, l = i % 64 / 2;
        const int token = 8 * (f % 2) + l / 4, column = 8 * (f / 2) + 2 * (l % 4) + i % 2;
#pragma unroll
        for (int block = 0; block < SLICE / 16; block++) {
            double e = 0.0, o = 0.0;
#pragma unroll
            for (int w = 0; w < QUARTERS; w++) {
                e += m.parts[block * QUARTERS + w][0][i];
                if (reads) o += m.parts[block * QUARTERS + w][1][i];
            }
            m.e[16 * block + column][token] = (double)v[block] - e;
            if (reads) m.o[16 * block + column][token] = o;
        }
        if (!reads) return;
        const int half = i / 128, g = i % 128, s = 8 * (g / 64) + g % 64 / 2 / 4;
        const int t = 8 * half + 2 * (g % 64 / 2 % 4) + g % 2;
        double weight = 0.0;
#pragma unroll
        for (int w = 0; w < QUARTERS; w++) weight += m.scores[half * QUARTERS + w][g];
        m.weights[s][t] = s <= t ? weight * in.inverse[s] : 0.0;
    }

    /* This thread's values of a chunk, as gather wants them. */
    __device__ static void values(float (&v)[2], const mn_walk_job &job, const scene &s,
                                  int64_t t) {
        const int i = (int)threadIdx.x, f = i / 64, l = i % 64 / 2;
        const int64_t token = t + 8 * (f % 2) + l / 4;
        const int column = 8 * (f / 2) + 2 * (l % 4) + i % 2;
        const T *row = mn_row<T>(job.p.v, s.span.b, s.span.t0 + token, s.h);
#pragma unroll
        for (int block = 0; block < SLICE / 16; block++) {
            const int j = 16 * block + column;
            v[block] = token < s.span.length && j < s.columns ? mn_float(row[s.first + j]) : 0.0f;
        }
    }

    /* e behind the chunk's own writes, o, and M <- (M + z e' / sigma) Phi'. */
    __device__ void write(const room<RP> &m, const inputs<RP> &in, const mn_walk_job &job,
                          const scene &s) {
        const int i = lane % 4, j = lane / 4;
        double e[2][2][2] = {}, left[8], plain[8];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            left[2 * k] = m.e[value + j][4 * k + i];
            left[2 * k + 1] = m.e[value + 8 + j][4 * k + i];
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            double b[4];
#pragma unroll
            for (int k = 0; k < 4; k++) b[k] = in.undo[8 * half + j][4 * k + i];
            mn_dmma_16(e[half], left, b);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const double scale = in.inverse[8 * (k / 2) + 2 * i + k % 2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                plain[2 * k + half] = e[k / 2][half][k % 2];
                left[2 * k + half] = plain[2 * k + half] * scale;
            }
        }
        if (job.p.o.data && quarter < 2) put(m, job, s, plain);
#pragma unroll
        for (int b = 0; b < TILES; b++) {
            double z[4];
#pragma unroll
            for (int k = 0; k < 4; k++) z[k] = in.z[8 * (k / 2) + 2 * i + k % 2][row(b) + j];
            mn_dmma_16(M[b], left, z);
            const double2 phi = *(const double2 *)&in.ends[0][row(b) + 2 * i];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const double x = M[b][half][0], y = M[b][half][1];
                const bool turns = job.step == 2;
                M[b][half][0] = turns ? phi.x * x - phi.y * y : phi.x * x;
                M[b][half][1] = turns ? phi.y * x + phi.x * y : phi.y * y;
            }
        }
    }

    /* o of half of the tokens, `quarter` says which; `e` is a left factor. */
    __device__ void put(const room<RP> &m, const mn_walk_job &job, const scene &s,
                        const double (&e)[8]) const {
        const int i = lane % 4, j = lane / 4, token = 8 * quarter + 2 * i;
        double c[2][2], b[4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const double2 o = *(const double2 *)&m.o[value + 8 * half + j][token];
            c[half][0] = o.x, c[half][1] = o.y;
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            b[k] = m.weights[8 * (k / 2) + 2 * i + k % 2][8 * quarter + j];
        }
        mn_dmma_16(c, e, b);
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const int t = token + x % 2, column = value + 8 * (x / 2) + j;
            if (t < s.low || t >= s.high || column >= s.columns) continue;
            T *out = mn_row<T>(job.p.o, s.span.b, s.span.t0 + s.t + t, s.h);
            mn_put(out + s.first + column, (float)(job.p.scale * c[x / 2][x % 2]));
        }
    }

    /* use(number, row, column of V) for what this lane has of M */
    template <typename F>
    __device__ void each(const mn_walk_job &job, const scene &s, F use) {
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

template <int RP>
__device__ static void ask(inputs<RP> &in, const mn_walk_job &job, int64_t place, int64_t group) {
    const int64_t at = place * CHUNK * RP;
    const int i = (int)threadIdx.x;
    const mn_walk_work &work = job.work;
    mn_walk_fetch<CHUNK, RP, THREADS>(in.keys, work.keys + at, RP, i);
    if (job.reads) mn_walk_fetch<CHUNK, RP, THREADS>(in.queries, work.queries + at, RP, i);
    mn_walk_fetch<CHUNK, RP, THREADS>(in.z, work.z + group * CHUNK * RP, RP, i);
    mn_walk_fetch<3, RP, THREADS>(in.ends, work.ends + place * 3 * RP, RP, i);
    mn_walk_fetch<CHUNK, CHUNK, THREADS>(in.undo, work.undo + group * 256, CHUNK, i);
    if (i < CHUNK / 2) mn_walk_copy(&in.inverse[2 * i], work.inverse + group * CHUNK + 2 * i);
    mn_walk_copies_end();
}

/* One token of a steep chunk, or what comes before the first one (-1). */
template <int RP>
__device__ static void fill_steep(inputs<RP> &in, const mn_walk_job &job, const scene &s,
                                  int token) {
    const int64_t at = s.place * CHUNK * RP;
    for (int e = threadIdx.x; e < CHUNK * RP; e += THREADS) {
        const int t = e / RP, r = e % RP;
        in.keys[t][r] = t == token ? job.work.keys[at + e] : 0.0;
        if (job.reads) in.queries[t][r] = t == token ? job.work.queries[at + e] : 0.0;
        in.z[t][r] = t == token ? job.work.z[s.group * CHUNK * RP + e] : 0.0;
    }
    const int t = (int)threadIdx.x;
    if (t < CHUNK) in.inverse[t] = t == token ? job.work.inverse[s.group * CHUNK + t] : 0.0;
    mn_walk_steep_end<RP, THREADS>(in.ends, job.work.ends + s.place * 3 * RP,
                                   job.work.noised + at, token, job.step, t);
}

template <typename T, int RP>
__global__ void __launch_bounds__(THREADS, 1)
mean_kernel(const __grid_constant__ mn_walk_job job, int slices) {
    extern __shared__ __align__(16) unsigned char memory[];
    room<RP> &m = *(room<RP> *)memory;
    constexpr int STAGES = room<RP>::STAGES;
    const mn_call &call = job.p.call;
    scene s;
    const int64_t walk = blockIdx.x / slices;
    s.g = walk % call.G, s.h = walk / call.G % call.H, s.n = walk / call.G / call.H;
    const mn_walk_columns columns = mn_walk_columns_of(call, s.g);
    const int skipped = (int)(blockIdx.x % slices) * SLICE;
    s.first = columns.first + skipped, s.columns = min(columns.count - skipped, (int)SLICE);
    if (s.columns <= 0) return;
    s.span = mn_span_at(call, s.n);
    const int64_t slot = mn_walk_slot(call, s.n), chunks = (s.span.length + CHUNK - 1) / CHUNK;
    worker<T, RP> mine;
    const float *given = mn_row<float>(job.p.M0, s.n, 0, s.h);
    mine.each(job, s, [&](double &x, int r, int column) {
        x = given ? (double)given[r * call.V + column] : 0.0;
    });
    float v[2], next_v[2];
    bool steep_next = chunks > 0 && job.work.steep[slot * call.H + s.h];
    s.place = slot * call.H + s.h;
    if (chunks > 0) ask(m.in[0], job, s.place, s.place * call.G + s.g);
    mine.values(next_v, job, s, 0);
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        inputs<RP> &in = m.in[chunk % STAGES];
        const int64_t next = (slot + chunk + 1) * call.H + s.h;
        const bool last = chunk + 1 == chunks;
        s.place = (slot + chunk) * call.H + s.h, s.group = s.place * call.G + s.g;
        s.t = chunk * CHUNK;
        const int count = (int)min((int64_t)CHUNK, s.span.length - s.t);
        const bool steep = steep_next;
        steep_next = !last && job.work.steep[next];
        v[0] = next_v[0], v[1] = next_v[1];
        mn_walk_copies_wait<0>();
        __syncthreads();
        if (STAGES == 2 && !last) ask(m.in[(chunk + 1) % STAGES], job, next, next * call.G + s.g);
        mine.values(next_v, job, s, s.t + CHUNK);
        for (int token = steep ? -1 : 0; token < (steep ? count : 1); token++) {
            s.low = 0, s.high = count;
            if (steep) {
                s.low = max(token, 0), s.high = token + 1;
                __syncthreads();
                fill_steep(in, job, s, token);
                __syncthreads();
            }
            mine.read(m, in, job.reads);
            __syncthreads();
            mine.gather(m, in, v, job.reads);
            __syncthreads();
            mine.write(m, in, job, s);
        }
        if (STAGES == 1) {
            __syncthreads();
            if (!last) ask(m.in[0], job, next, next * call.G + s.g);
        }
    }
    float *mean = mn_row<float>(job.p.M, s.n, 0, s.h);
    if (!mean) return;
    mine.each(job, s, [&](double &x, int r, int column) { mean[r * call.V + column] = (float)x; });
}

/* ---- launches -------------------------------------------------------------------------------- */

template <typename T, int RP>
static int start(const mn_walk_job *job, cudaStream_t stream) {
    const mn_call &call = job->p.call;
    const int64_t columns = mn_ceil_div(call.V, call.G), slices = mn_ceil_div(columns, SLICE);
    const int64_t blocks = mn_n_spans(call) * call.H * call.G * slices;
    return mn_launch_with_room(mean_kernel<T, RP>, dim3((unsigned)blocks), THREADS,
                               sizeof(room<RP>), stream, *job, (int)slices);
}

template <typename T>
static int mean(const mn_walk_job *job, cudaStream_t stream) {
    if (job->rows == 32) return start<T, 32>(job, stream);
    if (job->rows == 64) return start<T, 64>(job, stream);
    if (job->rows == 128) return start<T, 128>(job, stream);
    return start<T, 256>(job, stream);
}

int mn_walk_mean(const mn_walk_job *job, cudaStream_t stream) {
    return job->p.call.dtype == MN_BF16 ? mean<mn_bf16>(job, stream) : mean<float>(job, stream);
}
