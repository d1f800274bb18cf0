/* bayes_mean.cu - means and what is read from them, chunk after chunk, from what the walk over
 * covariances leaves; bayes_walk.cuh.
 *
 * A block has a slice of 32 value columns of a group. Of its four warps each has 16 of these, which
 * are rows of Mh', and half of the state's rows. Three barriers a chunk. It begins with the walk
 * over covariances, beside a block of which it finds room on a processor, and follows it. */
#include "kernels/cuda/after.cuh"
#include "kernels/cuda/bayes_walk.cuh"

enum {
    WARPS = 4, THREADS = 32 * WARPS, SLICE = MN_WALK_SLICE, CHUNK = MN_WALK_CHUNK,
    HALVES = 2,                     // warps that share value columns
    OWN = 256 / THREADS,            // numbers of a thread of 16 tokens by 16 columns
};

/* What the covariance's walk leaves of a chunk. */
template <int RP>
struct alignas(16) writes {
    double z[8][2 * RP + 2];
    double undo[CHUNK][CHUNK + 4];
    double phi[RP], inverse[CHUNK];
};

template <int RP>
struct alignas(16) room {
    double keys[8][2 * RP + 2], queries[8][2 * RP + 2];
    writes<RP> in[2];
    double parts[WARPS][2][256];        // kh Mh and qh Mh, by fragments
    double scores[WARPS][128];          // z qh', the same
    double e[SLICE][CHUNK + 4], o[SLICE][CHUNK + 4];    // v - kh Mh, qh Mh
    double weights[CHUNK][CHUNK + 2];   // z_s.qh_t / sigma_s
    uint64_t arrived[2];                // keys and queries, writes
};

/* Where a block is, and which tokens [low, high) of the chunk at `place` it works on. */
struct scene {
    int64_t walk, n, h, g, place, group, t;    // group: place * G + g; t: the chunk's first token
    int first, columns;                  // value columns
    int low, high;
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

    /* Tokens of a left factor: 2 (l % 4) and eight more, then their neighbours. */
    __device__ int token(int k) const { return 2 * (lane % 4) + k / 2 + 8 * (k % 2); }

    /* Parts of kh Mh, qh Mh and z qh' over these rows. */
    __device__ void read(room<RP> &m, const writes<RP> &in, bool reads) {
        double e[2][2][2] = {}, o[2][2][2] = {}, s[2][2] = {};
        const int j = lane / 4, pair = 2 * (lane % 4), half = value / 16;
#pragma unroll
        for (int b = 0; b < TILES; b++) {
            const int c = 2 * (row(b) + pair);
            double k[4], q[4], z[4], right[2];
            mn_walk_left(k, &m.keys[j][c]);
            mn_dmma_8(e[0], k, M[b][0]);
            mn_dmma_8(e[1], k, M[b][1]);
            if (!reads) continue;
            mn_walk_left(q, &m.queries[j][c]);
            mn_dmma_8(o[0], q, M[b][0]);
            mn_dmma_8(o[1], q, M[b][1]);
            mn_walk_left(z, &in.z[j][c]);
            mn_walk_right(right, &m.queries[j][c], half);
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
    __device__ void gather(room<RP> &m, const writes<RP> &in, const unsigned (&v)[OWN][SLICE / 16],
                           bool reads) const {
#pragma unroll
        for (int own = 0; own < OWN; own++) {
            const int i = (int)threadIdx.x + own * THREADS, f = i / 64, l = i % 64 / 2;
            const int token = 8 * (f % 2) + l / 4, column = 8 * (f / 2) + 2 * (l % 4) + i % 2;
#pragma unroll
            for (int block = 0; block < SLICE / 16; block++) {
                const double (*parts)[2][256] = m.parts + block * HALVES;
                const double e = parts[0][0][i] + parts[1][0][i];
                const unsigned bits = sizeof(T) == 2 ? v[own][block] << 16 : v[own][block];
                m.e[16 * block + column][token] = (double)__uint_as_float(bits) - e;
                if (reads) m.o[16 * block + column][token] = parts[0][1][i] + parts[1][1][i];
            }
            if (!reads) continue;
            const int half = i / 128, g = i % 128, s = 8 * (g / 64) + g % 64 / 2 / 4;
            const int t = 8 * half + 2 * (g % 64 / 2 % 4) + g % 2;
            const double weight = m.scores[half * HALVES][g] + m.scores[half * HALVES + 1][g];
            m.weights[s][t] = s <= t ? weight * in.inverse[s] : 0.0;
        }
    }

    /* This thread's values of a chunk, as gather wants them, as bits. Tokens behind the last one
     * get its values. */
    __device__ static void values(unsigned (&v)[OWN][SLICE / 16], const mn_walk_job &job,
                                  const scene &s, int64_t t) {
#pragma unroll
        for (int own = 0; own < OWN; own++) {
            const int i = (int)threadIdx.x + own * THREADS, f = i / 64, l = i % 64 / 2;
            const int64_t token = min(t + 8 * (f % 2) + l / 4, s.span.length - 1);
            const int column = 8 * (f / 2) + 2 * (l % 4) + i % 2;
            const T *row = mn_row<T>(job.p.v, s.span.b, s.span.t0 + token, s.h) + s.first;
#pragma unroll
            for (int block = 0; block < SLICE / 16; block++) {
                const T *at = row + min(16 * block + column, s.columns - 1);
                v[own][block] = sizeof(T) == 2 ? *(const uint16_t *)at : *(const unsigned *)at;
            }
        }
    }

    /* e behind the chunk's own writes, o, and M <- (M + z e' / sigma) Phi'. */
    __device__ void write(const room<RP> &m, const writes<RP> &in, const mn_walk_job &job,
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
            const double scale = in.inverse[token(k)];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                plain[2 * k + half] = e[k % 2][half][k / 2];
                left[2 * k + half] = plain[2 * k + half] * scale;
            }
        }
        if (job.p.o.data) put(m, job, s, plain);
#pragma unroll
        for (int b = 0; b < TILES; b++) {
            double z[4];
#pragma unroll
            for (int k = 0; k < 4; k += 2) {
                const double2 pair = *(const double2 *)&in.z[2 * i + k / 2][2 * (row(b) + j)];
                z[k] = pair.x, z[k + 1] = pair.y;
            }
            mn_dmma_16(M[b], left, z);
            const double2 phi = *(const double2 *)&in.phi[row(b) + 2 * i];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const double x = M[b][half][0], y = M[b][half][1];
                const bool turns = job.step == 2;
                M[b][half][0] = turns ? phi.x * x - phi.y * y : phi.x * x;
                M[b][half][1] = turns ? phi.y * x + phi.x * y : phi.y * y;
            }
        }
    }

    /* o of half of the tokens, `part` says which; `e` is a left factor. */
    __device__ void put(const room<RP> &m, const mn_walk_job &job, const scene &s,
                        const double (&e)[8]) const {
        const int i = lane % 4, j = lane / 4, token = 8 * part + 2 * i;
        double c[2][2], b[4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const double2 o = *(const double2 *)&m.o[value + 8 * half + j][token];
            c[half][0] = o.x, c[half][1] = o.y;
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            b[k] = m.weights[this->token(k)][8 * part + j];
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

/* Asks for keys and queries of the chunk at `place`, by one warp. */
template <int RP>
__device__ static void ask_keys(room<RP> &m, const mn_walk_job &job, int64_t place) {
    constexpr int SIZE = mn_walk_panel(RP);
    if (threadIdx.x % 32 == 0) mn_walk_expect(&m.arrived[0], (job.reads ? 2 : 1) * SIZE);
    __syncwarp();
    mn_walk_fetch<SIZE>(m.keys[0], job.work.keys + place * SIZE, &m.arrived[0]);
    if (!job.reads) return;
    mn_walk_fetch<SIZE>(m.queries[0], job.work.queries + place * SIZE, &m.arrived[0]);
}

/* `chunk` is the sequence's first, second, ... at `place`. Its writes are asked for once all blocks
 * of the covariance have said that they are there; `known` of them are already. By one warp. */
template <int RP>
__device__ static void ask_writes(room<RP> &m, int &known, const mn_walk_job &job, const scene &s,
                                  int64_t place, int chunk) {
    const int64_t group = place * job.p.call.G + s.g;
    const mn_walk_work &work = job.work;
    constexpr int SIZE = mn_walk_panel(RP);
    writes<RP> &in = m.in[chunk % 2];
    const int *done = work.done + s.walk * MN_WALK_BLOCKS + (int)threadIdx.x % job.blocks;
    while (known <= chunk) {    // alike in all lanes, of which each looks after one block
        int there;
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(done) : "memory");
        known = __reduce_min_sync(0xffffffffu, there);
        mn_walk_before_copies();
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        mn_walk_expect(&m.arrived[1], SIZE + MN_WALK_UNDO + RP + CHUNK);
    }
    __syncwarp();
    mn_walk_fetch<SIZE>(in.z[0], work.z + group * SIZE, &m.arrived[1]);
    mn_walk_fetch<MN_WALK_UNDO>(in.undo[0], work.undo + group * MN_WALK_UNDO, &m.arrived[1]);
    mn_walk_fetch<RP>(in.phi, work.ends + place * 3 * RP, &m.arrived[1]);
    mn_walk_fetch<CHUNK>(in.inverse, work.inverse + group * CHUNK, &m.arrived[1]);
}

/* One token of a steep chunk, or what comes before the first one (-1). */
template <int RP>
__device__ static void fill_steep(room<RP> &m, writes<RP> &in, const mn_walk_job &job,
                                  const scene &s, int token) {
    const double *keys = job.work.keys + s.place * mn_walk_panel(RP);
    const double *queries = job.work.queries + s.place * mn_walk_panel(RP);
    const double *z = job.work.z + s.group * mn_walk_panel(RP);
#pragma unroll 1
    for (int e = threadIdx.x; e < CHUNK * RP; e += THREADS) {
        const int t = e / RP, r = e % RP;
        const int at = mn_walk_panel_at(t, r, RP);
        m.keys[0][at] = t == token ? keys[at] : 0.0;
        if (job.reads) m.queries[0][at] = t == token ? queries[at] : 0.0;
        in.z[0][at] = t == token ? z[at] : 0.0;
    }
    const int t = (int)threadIdx.x;
    if (t < CHUNK) in.inverse[t] = t == token ? job.work.inverse[s.group * CHUNK + t] : 0.0;
    mn_walk_steep_phi<RP, THREADS>(in.phi, job.work.noised + s.place * mn_walk_noised(RP), token,
                                   job.step, t);
    mn_walk_before_copies();
}

/* The sequence, head and slice of a block. */
template <typename T, int RP>
__device__ static void walk(const mn_walk_job &job, scene &s) {
    extern __shared__ __align__(16) unsigned char memory[];
    room<RP> &m = *(room<RP> *)memory;
    const mn_call &call = job.p.call;
    const int64_t slot = mn_walk_slot(call, s.n), chunks = (s.span.length + CHUNK - 1) / CHUNK;
    worker<T, RP> mine;
    const float *given = mn_row<float>(job.p.M0, s.n, 0, s.h);
    mine.each(job, s, [&](double &x, int r, int column) {
        x = given ? (double)given[r * call.V + column] : 0.0;
    });
    unsigned v[OWN][SLICE / 16], next_v[OWN][SLICE / 16];
    int known = 0;    // chunks whose writes are there
    s.place = slot * call.H + s.h;
    bool steep_next = chunks > 0 && job.work.steep[s.place];
    if (chunks > 0) mine.values(next_v, job, s, 0);
    const bool asks = threadIdx.x < 32;
    if (threadIdx.x == 0) mn_walk_open(&m.arrived[0]), mn_walk_open(&m.arrived[1]);
    __syncthreads();
    if (asks && chunks > 0) {
        mn_walk_before_copies();
        ask_keys(m, job, s.place), ask_writes(m, known, job, s, s.place, 0);
    }
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        writes<RP> &in = m.in[chunk % 2];
        const int64_t next = (slot + chunk + 1) * call.H + s.h;
        const bool last = chunk + 1 == chunks, steep = steep_next;
        s.place = (slot + chunk) * call.H + s.h, s.group = s.place * call.G + s.g;
        s.t = chunk * CHUNK;
        const int count = (int)min((int64_t)CHUNK, s.span.length - s.t), end = steep ? count : 1;
        steep_next = !last && job.work.steep[next];
#pragma unroll
        for (int i = 0; i < OWN * SLICE / 16; i++) v[i % OWN][i / OWN] = next_v[i % OWN][i / OWN];
        mn_walk_await(&m.arrived[0], (unsigned)chunk);
        mn_walk_await(&m.arrived[1], (unsigned)chunk);
        __syncthreads();
        mine.values(next_v, job, s, s.t + CHUNK);
        for (int token = steep ? -1 : 0; token < end; token++) {
            s.low = 0, s.high = count;
            if (steep) {
                s.low = max(token, 0), s.high = token + 1;
                __syncthreads();
                fill_steep(m, in, job, s, token);
                __syncthreads();
            }
            mine.read(m, in, job.reads);
            __syncthreads();
            if (asks && token + 1 == end && !last) ask_keys(m, job, next);
            mine.gather(m, in, v, job.reads);
            __syncthreads();
            mine.write(m, in, job, s);
        }
        if (asks && !last) ask_writes(m, known, job, s, next, (int)chunk + 1);
    }
    float *mean = mn_row<float>(job.p.M, s.n, 0, s.h);
    if (!mean) return;
    mine.each(job, s, [&](double &x, int r, int column) { mean[r * call.V + column] = (float)x; });
}

template <typename T, int RP>
__global__ void __maxnreg__((RP < 256 ? 152 : 255))
mean_kernel(const __grid_constant__ mn_walk_job job, int slices) {
    const mn_call &call = job.p.call;
    scene s;
    s.walk = blockIdx.x / slices;
    s.g = s.walk % call.G, s.h = s.walk / call.G % call.H, s.n = s.walk / call.G / call.H;
    const mn_walk_columns columns = mn_walk_columns_of(call, s.g);
    const int skipped = (int)(blockIdx.x % slices) * SLICE;
    s.first = columns.first + skipped, s.columns = min(columns.count - skipped, (int)SLICE);
    s.span = mn_span_at(call, s.n);
    if (s.columns > 0) walk<T, RP>(job, s);
    mn_wait_for_before();
}

/* ---- launches -------------------------------------------------------------------------------- */

template <typename T, int RP>
static int start(const mn_walk_job *job, cudaStream_t stream) {
    const mn_call &call = job->p.call;
    const int64_t columns = mn_ceil_div(call.V, call.G), slices = mn_ceil_div(columns, SLICE);
    const int64_t blocks = mn_n_spans(call) * call.H * call.G * slices;
    const cudaError_t code = cudaFuncSetAttribute(
        mean_kernel<T, RP>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(room<RP>));
    if (code != cudaSuccess) return code;
    return mn_launch_early(mean_kernel<T, RP>, dim3((unsigned)blocks), THREADS, sizeof(room<RP>),
                           stream, *job, (int)slices);
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
