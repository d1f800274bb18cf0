/* bayes_mean_scan.cu - means and what is read from them, chunk after chunk, from what the scan over
 * covariances leaves; bayes_fwd_chunk.cuh.
 *
 * A block has a slice of 32 value columns of a group. Of its warps each has 16 of these, which are
 * rows of Mh', and a part of the state's rows, a half, or a quarter where blocks are small and many
 * processors idle:
 *
 *   E = kh Mh - v    O = qh Mh    W = qh z'    e' = - E'L^-T / sigma    o = O + W e    Mh' + e'z
 *
 * What warps have of a sum is exchanged once, between two barriers of which one is the next
 * chunk's. A block starts beside a block of the covariance scan on the same processor, and
 * follows that scan chunk by chunk. */
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/bayes/bayes_fwd_chunk.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::bayes {

enum {
    SLICE = MN_SCAN_SLICE, CHUNK = MN_SCAN_CHUNK,
};

template <int RP>
struct sizes {
    static constexpr int PARTS = RP == 64 ? 4 : 2;    // warps that share value columns
    static constexpr int WARPS = SLICE / 16 * PARTS, THREADS = 32 * WARPS;
    /* The warps that issue loads, and that store no o where others do. */
    static constexpr int KEYS = PARTS - 2, WRITES = PARTS - 1;
    /* Blocks of eight value columns of O that a warp leaves for others. */
    static constexpr int LEFT = PARTS == 2 ? 1 : 2;
};

/* What the covariance scan leaves of a chunk. */
template <int RP>
struct alignas(16) writes {
    double z[8][2 * RP + 2];
    double undo[CHUNK][CHUNK + 4];    // L^-1
    double phi[RP], inverse[CHUNK];
};

/* What warps have of sums: E' by values and tokens; by fragments, pairs of numbers of each lane,
 * O of eight value columns that another warp reads, and W of eight s. */
template <int RP>
struct alignas(16) shares {
    static constexpr int WARPS = sizes<RP>::WARPS;
    double e[WARPS][16][CHUNK + 4], o[WARPS][sizes<RP>::LEFT][2][64], w[WARPS][2][64];
};

template <int RP>
struct alignas(16) smem {
    double keys[8][2 * RP + 2], queries[8][2 * RP + 2];
    writes<RP> in[2];
    shares<RP> share[2];                // of steps in turn
    unsigned values[sizes<RP>::WARPS][4][32];    // v of a chunk, for each lane what it asked for
    uint64_t arrived[2];                // keys and queries, writes
};

/* Where a block is. */
struct ctx {
    int64_t scan, n, h, g;
    int first, columns;    // value columns
    bool pairs;            // of two neighbours in 16 bits one is at a word's start
    mn_span span;
};

/* A chunk of `count` tokens from token t on, which lies at `place` of the work space; [low, high)
 * are those that are gone through. `step` counts chunks, or the steps of steep ones. */
struct tokens {
    int64_t t;
    unsigned chunk, place, step;
    int count, low, high;
};

/* A word on its way to shared memory. */
__device__ static inline void copy_word(unsigned *to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(mn_smem_addr(to)), "l"(from)
                 : "memory");
}

template <typename T, int RP>
struct worker {
    using of = sizes<RP>;
    static constexpr int PARTS = of::PARTS, TILES = RP / (8 * PARTS);
    double M[TILES][2][2];
    int index, lane, value, part;    // own warp; first column of the slice; part of the rows

    __device__ worker(void) {
        index = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
        value = index / PARTS * 16, part = index % PARTS;
    }

    __device__ int row(int b) const { return part * (RP / PARTS) + 8 * b; }

    /* Whether it subtracts values and stores o: two of those that share value columns. */
    __device__ bool ends(void) const { return PARTS == 2 || part < 2; }

    __device__ void put_share(double (&to)[64], const double (&x)[2]) const {
        *(double2 *)&to[2 * lane] = make_double2(x[0], x[1]);
    }

    __device__ void add_share(double (&x)[2], const double (&from)[64]) const {
        const double2 pair = *(const double2 *)&from[2 * lane];
        x[0] += pair.x, x[1] += pair.y;
    }

    /* Parts of E and O over these rows; that of O is left for other warps, but for the value
     * columns that this one reads, which `own` has. */
    template <bool READS>
    __device__ void read(double (&own)[2][2], double (&e)[2][2][2], const smem<RP> &m,
                         shares<RP> &share) const {
        const int j = lane / 4, pair = 2 * (lane % 4);
        double o[2][2][2] = {};
#pragma unroll
        for (int x = 0; x < 8; x++) e[x / 4][x / 2 % 2][x % 2] = 0.0;
#pragma unroll
        for (int b = 0; b < TILES; b++) {
            double a[4];
            mn_state_scan_left(a, &m.keys[j][2 * (row(b) + pair)]);
            mn_mma_f64_k8(e[0], a, M[b][0]);
            mn_mma_f64_k8(e[1], a, M[b][1]);
            if (!READS) continue;
            mn_state_scan_left(a, &m.queries[j][2 * (row(b) + pair)]);
            mn_mma_f64_k8(o[0], a, M[b][0]);
            mn_mma_f64_k8(o[1], a, M[b][1]);
        }
#pragma unroll
        for (int f = 0; f < (READS ? 2 : 0); f++) {
            double others[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                others[i] = part ? o[0][f][i] : o[1][f][i];
                own[f][i] = part ? o[1][f][i] : o[0][f][i];
            }
            if (PARTS == 2) {
                put_share(share.o[index][0][f], others);
            } else {
                put_share(share.o[index][0][f], o[0][f]);
                put_share(share.o[index][of::LEFT - 1][f], o[1][f]);
            }
        }
    }

    /* E - v for the others, v being the values of half of the tokens, or of none. */
    __device__ void take_values(double (&e)[2][2][2], const smem<RP> &m, shares<RP> &share) const {
        const int j = lane / 4, pair = 2 * (lane % 4);
        asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
        for (int x = 0; x < 4; x++) {
            unsigned bits = m.values[index][sizeof(T) == 2 ? x / 2 : x][lane];
            if (sizeof(T) == 2) bits = x % 2 ? bits & 0xffff0000u : bits << 16;
            e[x / 2][0][x % 2] -= (double)__uint_as_float(part == 0 ? bits : 0);
            e[x / 2][1][x % 2] -= (double)__uint_as_float(part == 1 ? bits : 0);
        }
#pragma unroll
        for (int x = 0; x < 8; x++) {
            share.e[index][8 * (x / 4) + pair + x % 2][8 * (x / 2 % 2) + j] =
                e[x / 4][x / 2 % 2][x % 2];
        }
    }

    /* Its part of W: s in the half that this warp's value columns say. */
    __device__ void weigh(const smem<RP> &m, const writes<RP> &in, shares<RP> &share) const {
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

    /* Asks for its values of a chunk of `count` tokens from token t on: the first eight tokens for
     * one of the warps that share them, the others for the other one. Tokens behind the last one
     * get its values, columns behind the last one some of those in front. On their way they are in
     * no register: there is none that could wait. Columns are hidden from the compiler, which has
     * none to keep addresses in. */
    __device__ void request_values(smem<RP> &m, const mn_state_scan_job &job, const ctx &s,
                                   int64_t t, int count) const {
        if (!ends()) return;
        int own = column(0);
        asm volatile("" : "+r"(own));
        const T *from = mn_row<T>(job.p.v, s.span.b, s.span.t0 + t, s.h) + s.first;
        from += min(8 * part + lane / 4, count - 1) * job.p.v.stride[1];
        unsigned (*to)[32] = m.values[index];
        if (sizeof(T) == 2 && s.pairs) {
#pragma unroll
            for (int w = 0; w < 2; w++) {
                copy_word(&to[w][lane], from + min(own + 8 * w, s.columns - 2));
            }
            return;
        }
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const T *at = from + min(own + 8 * (x / 2) + x % 2, s.columns - 1);
            if (sizeof(T) == 4) copy_word(&to[x][lane], at);
            else ((uint16_t *)&to[x / 2][lane])[x % 2] = *(const uint16_t *)at;
        }
    }

    /* e' / sigma from E's parts: rows are values, e[half] has tokens [8 half, 8 half + 8). */
    __device__ void solve(double (&e)[2][2][2], const writes<RP> &in,
                          const shares<RP> &share) const {
        const int i = 2 * (lane % 4), j = lane / 4;
        double a[8];
#pragma unroll
        for (int f = 0; f < 4; f++) {    // rows 8 (f % 2) on, tokens 8 (f / 2) on
            double2 x[PARTS];
#pragma unroll
            for (int n = 0; n < PARTS; n++) {    // of two its own one first, which is the same
                const int from = PARTS == 2 ? index ^ n : index / PARTS * PARTS + n;
                x[n] = *(const double2 *)&share.e[from][8 * (f % 2) + j][8 * (f / 2) + i];
            }
            double2 sum = make_double2(x[0].x + x[1].x, x[0].y + x[1].y);
            if (PARTS == 4) {
                const double2 &low = x[PARTS - 2], &high = x[PARTS - 1];
                sum.x += low.x + high.x, sum.y += low.y + high.y;
            }
            double *to = &a[4 * (f / 2) + f % 2];
            to[0] = sum.x, to[2] = sum.y;
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
        if (turns) move<true>(in.phi);
        else move<false>(in.phi);
    }

    /* M <- M Phi', of pairs or of numbers. */
    template <bool TURNS>
    __device__ void move(const double (&phi)[RP]) {
#pragma unroll
        for (int b = 0; b < TILES; b++) {
            const double2 by = *(const double2 *)&phi[row(b) + 2 * (lane % 4)];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const double x = M[b][half][0], y = M[b][half][1];
                M[b][half][0] = TURNS ? by.x * x - by.y * y : by.x * x;
                M[b][half][1] = TURNS ? by.y * x + by.x * y : by.y * y;
            }
        }
    }

    /* o of eight value columns, `part` says which of two blocks. */
    __device__ void put(double (&c)[2][2], const double (&e)[2][2][2], const shares<RP> &share,
                        const mn_state_scan_job &job, const ctx &s, const tokens &at) const {
        const int pair = 2 * (lane % 4), j = lane / 4;
        double a[8], b[4];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            if (PARTS == 2) add_share(c[m], share.o[index ^ 1][0][m]);
#pragma unroll
            for (int n = 1; n < (PARTS == 2 ? 0 : PARTS); n++) {
                add_share(c[m], share.o[index ^ n][part * (of::LEFT - 1)][m]);
            }
        }
#pragma unroll
        for (int f = 0; f < 4; f++) {    // tokens t 8 (f % 2) on, s 8 (f / 2) on
            const double2 first = *(const double2 *)&share.w[PARTS * (f / 2)][f % 2][2 * lane];
            double w[2] = { first.x, first.y };
#pragma unroll
            for (int n = 1; n < PARTS; n++) add_share(w, share.w[PARTS * (f / 2) + n][f % 2]);
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const bool before = 8 * (f / 2) + pair + x <= 8 * (f % 2) + j;
                a[4 * (f / 2) + f % 2 + 2 * x] = before ? w[x] : 0.0;
            }
        }
#pragma unroll
        for (int x = 0; x < 4; x++) b[x] = part ? e[x / 2][1][x % 2] : e[x / 2][0][x % 2];
        mn_mma_f64_k16(c, a, b);
        int own = column(0) + 8 * part;
        asm volatile("" : "+r"(own));
        T *rows = mn_row<T>(job.p.o, s.span.b, s.span.t0 + at.t, s.h) + s.first + own;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int t = 8 * m + j;
            T *out = rows + t * job.p.o.stride[1];
#pragma unroll
            for (int x = 0; x < 2; x++) {
                if (t < at.low || t >= at.high || own + x >= s.columns) continue;
                mn_put(out + x, (float)(job.p.scale * c[m][x]));
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
template <bool READS, int RP>
__device__ static void request_keys(smem<RP> &m, const mn_state_scan_job &job, unsigned place) {
    constexpr int SIZE = mn_state_scan_smem_tile(RP);
    if (threadIdx.x % 32 == 0) mn_state_scan_expect(&m.arrived[0], (READS ? 2 : 1) * SIZE);
    __syncwarp();
    mn_state_scan_load<SIZE>(m.keys[0], job.work.keys + (uint64_t)place * SIZE, &m.arrived[0]);
    if (!READS) return;
    mn_state_scan_load<SIZE>(m.queries[0], job.work.queries + (uint64_t)place * SIZE,
                             &m.arrived[0]);
}

/* `chunk` is the sequence's first, second, ... at `place`. Issues the loads of z (16,RP), L^-1
 * (16,16), Phi (RP) and 1 / sigma (16) once all blocks of the covariance have counted the chunk in
 * work.done; the first `known` chunks are known to be counted. By one warp. */
template <int RP>
__device__ static void request_writes(smem<RP> &m, int &known, const mn_state_scan_job &job,
                                      const ctx &s, unsigned place, int chunk) {
    const uint64_t group = place * (unsigned)job.p.call.G + (unsigned)s.g;
    const mn_state_scan_work &work = job.work;
    constexpr int SIZE = mn_state_scan_smem_tile(RP);
    writes<RP> &in = m.in[chunk % 2];
    const int *done = work.done + s.scan * MN_SCAN_BLOCKS + (threadIdx.x & (job.blocks - 1));
    if (known <= chunk) {    // alike in all lanes, of which each looks after one block
        do {
            const int there = mn_load_acquire(done);
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
template <bool READS, int RP>
__device__ static void fill_steep(smem<RP> &m, writes<RP> &in, const mn_state_scan_job &job,
                                  int64_t g, int64_t place, const mn_state_scan_steep_step &step) {
    const int64_t group = place * job.p.call.G + g;
    const double *keys = job.work.keys + place * mn_state_scan_smem_tile(RP);
    const double *queries = job.work.queries + place * mn_state_scan_smem_tile(RP);
    const double *z = job.work.z + group * mn_state_scan_smem_tile(RP);
    constexpr int THREADS = sizes<RP>::THREADS;
#pragma unroll 1
    for (int e = threadIdx.x; e < CHUNK * RP; e += THREADS) {
        const int t = e / RP, r = e % RP;
        const int at = mn_state_scan_smem_tile_at(t, r, RP);
        m.keys[0][at] = step.has(t) ? keys[at] : 0.0;
        if (READS) m.queries[0][at] = step.has(t) ? queries[at] : 0.0;
        in.z[0][at] = step.has(t) ? z[at] : 0.0;
    }
    const int t = (int)threadIdx.x;
    if (t < CHUNK) in.inverse[t] = step.has(t) ? job.work.inverse[group * CHUNK + t] : 0.0;
    mn_state_scan_steep_phi<RP, THREADS>(in.phi, job.work.ends + place * 3 * RP,
                                         job.work.noised + place * mn_state_scan_noised(RP),
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

/* What one warp knows of the covariance's scan: chunks whose writes are there, and whether those of
 * the next chunk have been asked for. */
struct news {
    int known;
    bool asked;
};

/* One step: a chunk, or what `low` and `high` say of a steep one. Behind it `left` chunks follow,
 * if it is its chunk's last step, for which the next one is asked for; else 0. */
template <bool READS, bool STEEP, typename T, int RP>
__device__ static void advance(worker<T, RP> &mine, smem<RP> &m, news &seen,
                               const mn_state_scan_job &job, const ctx &s, const tokens &at,
                               int left, int tail) {
    const writes<RP> &in = m.in[at.chunk % 2];
    shares<RP> &share = m.share[at.step % 2];
    double e[2][2][2], o[2][2];
    mine.template read<READS>(o, e, m, share);
    if (!STEEP) await_copies(&m.arrived[1], at.chunk);
    mine.take_values(e, m, share);
    if (READS) mine.weigh(m, in, share);
    __syncthreads();
    if (left > 0) {
        const unsigned next = at.place + (unsigned)job.p.call.H;
        if (mine.index == sizes<RP>::KEYS) request_keys<READS>(m, job, next);
        if (mine.index == sizes<RP>::WRITES && seen.known > (int)at.chunk + 1) {
            request_writes(m, seen.known, job, s, next, (int)at.chunk + 1), seen.asked = true;
        }
        mine.request_values(m, job, s, at.t + CHUNK, left > 1 ? (int)CHUNK : tail);
    }
    mine.solve(e, in, share);
    if (READS && mine.ends()) mine.put(o, e, share, job, s, at);
    mine.write(in, e, job.step == 2);
}

/* A steep chunk, a step at a time. */
template <bool READS, typename T, int RP>
__device__ static void advance_steep(worker<T, RP> &mine, smem<RP> &m, news &seen,
                                     const mn_state_scan_job &job, const ctx &s, tokens &at,
                                     int left, int tail) {
    const int begin = mn_state_scan_steep_begin(m.keys[0], RP);
    await_copies(&m.arrived[1], at.chunk);
#pragma unroll 1
    for (int token = begin - 1; token < at.count; token++, at.step++) {
        const mn_state_scan_steep_step one = { token, job.step, token < begin };
        at.low = one.front ? 0 : token, at.high = token + 1;
        __syncthreads();
        fill_steep<READS>(m, m.in[at.chunk % 2], job, s.g, at.place, one);
        __syncthreads();
        advance<READS, true>(mine, m, seen, job, s, at, token + 1 == at.count ? left : 0, tail);
    }
}

/* The sequence, head and slice of a block; READS: o is wanted. */
template <typename T, int RP, bool READS>
__device__ static void state_scan(const mn_state_scan_job &job, const ctx &s) {
    extern __shared__ __align__(16) unsigned char memory[];
    smem<RP> &m = *(smem<RP> *)memory;
    const mn_call &call = job.p.call;
    const int chunks = (int)((s.span.length + CHUNK - 1) / CHUNK);
    const int tail = (int)(s.span.length - (chunks - 1) * (int64_t)CHUNK);    // of the last chunk
    worker<T, RP> mine;
    const float *given = mn_row<float>(job.p.M0, s.n, 0, s.h);
    mine.each(job, s, [&](double &x, int r, int column) {
        x = given ? (double)given[r * call.V + column] : 0.0;
    });
    news seen = { 0, false };
    tokens at = {};
    at.place = (unsigned)(mn_state_scan_slot(call, s.n) * call.H + s.h);
    if (threadIdx.x == 0) mn_state_scan_open(&m.arrived[0]), mn_state_scan_open(&m.arrived[1]);
    __syncthreads();
    if (chunks > 0) {
        mn_state_scan_before_copies();
        if (mine.index == sizes<RP>::KEYS) request_keys<READS>(m, job, at.place);
        if (mine.index == sizes<RP>::WRITES) request_writes(m, seen.known, job, s, at.place, 0);
        mine.request_values(m, job, s, 0, chunks > 1 ? (int)CHUNK : tail);
    }
    for (int left = chunks - 1; left >= 0; left--) {
        at.count = at.high = left > 0 ? (int)CHUNK : tail, at.low = 0;
        seen.asked = left == 0;
        await_copies(&m.arrived[0], at.chunk);
        if (mn_state_scan_is_steep(m.keys[0], RP)) {
            advance_steep<READS>(mine, m, seen, job, s, at, left, tail);
        } else {
            advance<READS, false>(mine, m, seen, job, s, at, left, tail), at.step++;
        }
        at.chunk++, at.place += (unsigned)call.H, at.t += CHUNK;
        if (mine.index == sizes<RP>::WRITES && !seen.asked) {
            request_writes(m, seen.known, job, s, at.place, (int)at.chunk);
        }
    }
    float *mean = mn_row<float>(job.p.M, s.n, 0, s.h);
    if (!mean) return;
    mine.each(job, s, [&](double &x, int r, int column) { mean[r * call.V + column] = (float)x; });
}

/* Grid: slices blocks for each group g of a head h of a sequence n, 32 value columns each.
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
    if (job.redo && s.span.length == 0) {    // nearly always; what comes behind it still waits
        mn_pdl_wait();
        return;
    }
    s.pairs = job.p.v.stride[1] % 2 == 0 && s.columns % 2 == 0 &&
              (uintptr_t)(mn_row<T>(job.p.v, s.span.b, s.span.t0, s.h) + s.first) % 4 == 0;
    if (s.columns > 0 && job.reads && job.p.o.data) state_scan<T, RP, true>(job, s);
    else if (s.columns > 0) state_scan<T, RP, false>(job, s);
    mn_pdl_wait();
}

/* ---- launches -------------------------------------------------------------------------------- */

template <typename T, int RP, int REGISTERS = (RP == 64 ? 128 : RP < 128 ? 168 : 255)>
static int start(const mn_state_scan_job *job, cudaStream_t stream) {
    const mn_call &call = job->p.call;
    const int64_t columns = mn_ceil_div(call.V, call.G), slices = mn_ceil_div(columns, SLICE);
    const int64_t blocks = mn_n_spans(call) * call.H * call.G * slices;
    const auto kernel = mean_kernel<T, RP, REGISTERS>;
    const cudaError_t code = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(smem<RP>));
    if (code != cudaSuccess) return code;
    return mn_launch_pdl(kernel, dim3((unsigned)blocks), sizes<RP>::THREADS, sizeof(smem<RP>),
                         stream, *job, (int)slices);
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
