/* few_weights.cuh - products of a stage (kernels/few.h): c = a b' of few rows with several weights.
 *
 * Such products read every weight once and do next to nothing with it: what counts is how many
 * bytes are on their way, and that they are before the numbers they wait for. The weights of a
 * strip come in pieces, four packs of 16 bytes a thread, which no other thread looks at; six pieces
 * are on their way at a time, the first ones asked for before the barrier in front of the stage.
 *
 * bf16: warps share the strip's rows of weights in units of 32 numbers. A lane's 16 bytes are the
 * left factor of two products of tensor cores, whose eight lower rows stay zero; the numbers of a
 * unit are taken in the order in which the lanes have them, in both factors. float32: a warp has
 * a column. Sums are float32, of each warp in order, then over the warps. */
#ifndef MN_KERNELS_CUDA_FEW_WEIGHTS_CUH
#define MN_KERNELS_CUDA_FEW_WEIGHTS_CUH

#include "kernels/cuda/few_ending.cuh"

/* The block's strips, a thread each. */
__device__ inline void mn_few_tabulate(mn_few_table &table, const mn_few_products_at &p) {
    int strip = threadIdx.x, all = 0;
#pragma unroll 1
    for (int i = 0; i < p.n; i++) {
        const mn_few_weight &w = p.of[i];
        int first = (int)blockIdx.x - w.begin;
        if (first < 0) first += gridDim.x;
        const int count = w.turns + (first < w.rest), turn = strip - all;
        all += count;
        if (turn < 0 || turn >= count) continue;
        mn_few_strip s;
        s.column = (first + turn * (int)gridDim.x) * MN_FEW_COLUMNS;
        s.step = (int)w.b_row * (p.wide ? 4 : 2);
        s.rows = (const char *)w.b + s.column * (int64_t)s.step;
        s.product = (short)i, s.turn = (short)turn;
        s.n_rows = (short)min(MN_FEW_COLUMNS, w.N - s.column);
        table.at[strip] = s;
    }
    if (threadIdx.x == 0) table.n = all;
}

/* Asks the second cache for the weights of the first strips, a warp for each row, and for what
 * their endings read. */
__device__ inline void mn_few_ask_weights(const mn_few_table &table, const mn_few_products_at &p) {
    enum { ASKED = 12, LINE = 128 };
    const int lane = threadIdx.x % 32, bytes = p.K * (p.wide ? 4 : 2);
    const int strips = min(table.n, (int)ASKED), rows = strips * MN_FEW_COLUMNS;
    if (!p.settled) return;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < rows; i += MN_FEW_WARPS) {
        const mn_few_strip &s = table.at[i / MN_FEW_COLUMNS];
        const int row = i % MN_FEW_COLUMNS;
        if (row >= s.n_rows) continue;
        const char *from = s.rows + row * (int64_t)s.step;
        for (int at = lane * LINE; at < bytes; at += 32 * LINE) mn_few_ask_line(from + at);
    }
    if ((int)threadIdx.x < strips) mn_few_ask_tails(p, table.at[threadIdx.x]);
}

/* acc (16,8) += (the 8 rows of which a lane has w0 and w1, and 8 of zeros) b */
__device__ inline void mn_few_multiply_add(float (&acc)[4], uint32_t w0, uint32_t w1, uint32_t b0,
                                           uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(w0), "r"(0), "r"(w1), "r"(0), "r"(b0), "r"(b1));
}

/* How threads lie on a piece of a strip, and what they make of it. PARTS sums of each number come
 * out, number by number. */
template <typename T>
struct mn_few_lanes;

template <>
struct mn_few_lanes<mn_bf16> {
    static constexpr int PARTS = MN_FEW_WARPS, NUMBERS = MN_FEW_PACKS * MN_FEW_WARPS * 32;
    float acc[2][4];

    __device__ static int column(void) {
        return threadIdx.x % 32 / 4;
    }

    /* The first number of pack i of a piece. */
    __device__ static int place(int chunk, int i) {
        const int unit = (chunk * MN_FEW_PACKS + i) * MN_FEW_WARPS + threadIdx.x / 32;
        return unit * 32 + threadIdx.x % 4 * 8;
    }

    __device__ void clear(void) {
#pragma unroll
        for (int i = 0; i < 8; i++) acc[i / 4][i % 4] = 0.0f;
    }

    __device__ void add(const mn_few_products_at &p, const mn_bf16 *x, int chunk,
                        const uint4 (*w)[MN_FEW_THREADS]) {
        const int row = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < MN_FEW_PACKS; i++) {
            const int k = place(chunk, i);
            uint4 b = make_uint4(0, 0, 0, 0);
            if (row < p.M && k < p.K) b = *(const uint4 *)(x + row * p.step + k);
            const uint4 a = w[i][threadIdx.x];
            mn_few_multiply_add(acc[0], a.x, a.y, b.x, b.y);
            mn_few_multiply_add(acc[1], a.z, a.w, b.z, b.w);
        }
    }

    /* sums: of the strip's numbers, row after row. */
    __device__ void keep(float (*sums)[MN_FEW_WARPS + 1], int M) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, left = 2 * (lane % 4);
        if (left < M) sums[left * MN_FEW_COLUMNS + lane / 4][warp] = acc[0][0] + acc[1][0];
        if (left + 1 < M) {
            sums[(left + 1) * MN_FEW_COLUMNS + lane / 4][warp] = acc[0][1] + acc[1][1];
        }
    }
};

template <>
struct mn_few_lanes<float> {
    static constexpr int PARTS = MN_FEW_WARPS / MN_FEW_COLUMNS;
    static constexpr int NUMBERS = MN_FEW_PACKS * PARTS * 128;
    float acc[MN_FEW_DEEPEST];

    __device__ static int column(void) {
        return threadIdx.x / 32 % MN_FEW_COLUMNS;
    }

    __device__ static int place(int chunk, int i) {
        const int part = threadIdx.x / 32 / MN_FEW_COLUMNS;
        return ((chunk * MN_FEW_PACKS + i) * PARTS + part) * 128 + threadIdx.x % 32 * 4;
    }

    __device__ void clear(void) {
#pragma unroll
        for (int i = 0; i < MN_FEW_DEEPEST; i++) acc[i] = 0.0f;
    }

    __device__ void add(const mn_few_products_at &p, const float *x, int chunk,
                        const uint4 (*w)[MN_FEW_THREADS]) {
#pragma unroll
        for (int i = 0; i < MN_FEW_PACKS; i++) {
            const int k = place(chunk, i);
            if (k >= p.K) continue;
            const float4 b = *(const float4 *)&w[i][threadIdx.x];
#pragma unroll
            for (int row = 0; row < MN_FEW_DEEPEST; row++) {
                if (row >= p.M) continue;
                const float4 a = *(const float4 *)(x + row * p.step + k);
                acc[row] = fmaf(a.x, b.x, acc[row]);
                acc[row] = fmaf(a.y, b.y, acc[row]);
                acc[row] = fmaf(a.z, b.z, acc[row]);
                acc[row] = fmaf(a.w, b.w, acc[row]);
            }
        }
    }

    __device__ void keep(float (*sums)[MN_FEW_WARPS + 1], int M) const {
        const int part = threadIdx.x / 32 / MN_FEW_COLUMNS;
#pragma unroll
        for (int row = 0; row < MN_FEW_DEEPEST; row++) {
            if (row >= M) continue;
            const float all = mn_warp_sum(acc[row]);
            if (threadIdx.x % 32 == 0) sums[row * MN_FEW_COLUMNS + column()][part] = all;
        }
    }
};

/* The pieces of a block's strips, one after the other. */
template <typename T>
struct mn_few_pieces {
    typedef mn_few_lanes<T> lanes;
    int strip, chunk, chunks, slot, K;

    __device__ explicit mn_few_pieces(const mn_few_products_at &p)
        : strip(0), chunk(0), chunks((p.K + lanes::NUMBERS - 1) / lanes::NUMBERS), slot(0),
          K(p.K) {}

    /* Asks for this piece, if it is there, and goes on to the next. */
    __device__ void ask(mn_few_block &room, const mn_few_table &table) {
        if (strip < table.n) {
            const mn_few_strip s = table.at[strip];
            const char *row = s.rows + lanes::column() * s.step;
#pragma unroll
            for (int i = 0; i < MN_FEW_PACKS; i++) {
                const int k = lanes::place(chunk, i);
                const bool there = lanes::column() < s.n_rows && k < K;
                mn_few_bring(&room.ring[slot][i][threadIdx.x],
                             there ? row + k * (int)sizeof(T) : s.rows, there);
            }
        }
        mn_few_commit();
        advance();
    }

    __device__ void advance(void) {
        slot = slot + 1 == MN_FEW_SLOTS ? 0 : slot + 1;
        chunk++;
        if (chunk < chunks) return;
        chunk = 0;
        strip++;
    }
};

/* Asks for the first pieces of a stage: as many groups of copies as there are slots. */
template <typename T>
__device__ __noinline__ void mn_few_begin(mn_few_block &room, const mn_few_products_at &p,
                                          const mn_few_table &table) {
    mn_few_pieces<T> next(p);
#pragma unroll 1
    for (int i = 0; i < MN_FEW_SLOTS; i++) next.ask(room, table);
}

/* All pieces are on their way already: three strips of one piece each at a time, or one strip. */
template <typename T>
__device__ inline void mn_few_multiply_few(mn_few_block &room, const mn_few_products_at &p,
                                           int n, int chunks, const T *x) {
    enum { TOGETHER = 3 };
    mn_few_arrived<0>();
    const int numbers = p.M * MN_FEW_COLUMNS;
    if (chunks == 1) {
#pragma unroll 1
        for (int first = 0; first < n; first += TOGETHER) {
            mn_few_lanes<T> sum[TOGETHER];
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                sum[j].clear();
                sum[j].add(p, x, 0, room.ring[first + j < n ? first + j : first]);
            }
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                if (first + j < n) sum[j].keep(room.sums + (first + j) * numbers, p.M);
            }
        }
        return;
    }
#pragma unroll 1
    for (int j = 0; j < n; j++) {
        mn_few_lanes<T> sum;
        sum.clear();
#pragma unroll 3
        for (int chunk = 0; chunk < chunks; chunk++) {
            sum.add(p, x, chunk, room.ring[j * chunks + chunk]);
        }
        sum.keep(room.sums + j * numbers, p.M);
    }
}

/* What becomes of the sums of a batch: a warp has a row of a strip. */
template <typename T>
__device__ inline void mn_few_finish(mn_few_block &room, const mn_few_column<T> &column,
                                     bool has) {
    const int lane = threadIdx.x % 32;
    __syncthreads();
    if (has) {
        const float *parts = room.sums[threadIdx.x / 32 * MN_FEW_COLUMNS + lane / 4];
        float all;
        if (mn_few_lanes<T>::PARTS == 1) {
            all = parts[0];
        } else {
            all = parts[lane % 4 * 2] + parts[lane % 4 * 2 + 1];
            all += __shfl_xor_sync(0xffffffffu, all, 1);
            all += __shfl_xor_sync(0xffffffffu, all, 2);
        }
        column.store(all, room.values);
    }
    if (column.p.n_ends == 0) return;    // else there is one batch
    __syncthreads();
    if (has) column.end(room.values);
}

/* The products, whose first pieces have been asked for; the rows of a are at x. `column`: this
 * warp's of the first batch. */
template <typename T>
__device__ inline void mn_few_multiply_all(mn_few_block &room, const mn_few_products_at &p,
                                           const mn_few_table &table, const T *x,
                                           mn_few_column<T> &column) {
    mn_few_pieces<T> next(p);
    const int batch = p.M == 1 ? MN_FEW_BATCH : MN_FEW_BATCH / p.M, warp = threadIdx.x / 32;
    if (table.n * next.chunks <= MN_FEW_SLOTS && table.n <= batch) {
        mn_few_multiply_few(room, p, table.n, next.chunks, x);
        mn_few_finish(room, column, warp < table.n * p.M);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < MN_FEW_SLOTS; i++) next.advance();
    int slot = 0;
#pragma unroll 1
    for (int first = 0; first < table.n; first += batch) {
        const int count = min(batch, table.n - first);
        const bool has = warp < count * p.M;
        if (first > 0) column.begin(table.at[first + (has ? warp / p.M : 0)], warp % p.M);
#pragma unroll 1
        for (int j = 0; j < count; j++) {
            mn_few_lanes<T> sum;
            sum.clear();
#pragma unroll 1
            for (int chunk = 0; chunk < next.chunks; chunk++) {
                mn_few_arrived<MN_FEW_SLOTS - 1>();
                sum.add(p, x, chunk, room.ring[slot]);
                next.ask(room, table);
                slot = slot + 1 == MN_FEW_SLOTS ? 0 : slot + 1;
            }
            sum.keep(room.sums + j * p.M * MN_FEW_COLUMNS, p.M);
        }
        mn_few_finish(room, column, has);
        if (first + batch < table.n) __syncthreads();
    }
}

/* This warp's row of a strip of the first batch. */
template <typename T>
__device__ inline void mn_few_first_column(mn_few_column<T> &column, const mn_few_products_at &p,
                                           const mn_few_table &table) {
    const int warp = threadIdx.x / 32, strip = p.M == 1 ? warp : warp / p.M;
    column.begin(table.at[strip < table.n ? strip : 0], p.M == 1 ? 0 : warp % p.M);
}

/* ---- the rows of a --------------------------------------------------------------------------- */

/* Eight numbers of bf16; nothing is converted before all packs are on their way. */
__device__ inline void mn_few_floats(float (&x)[8], const uint4 &raw) {
    const uint32_t words[4] = { raw.x, raw.y, raw.z, raw.w };
#pragma unroll
    for (int j = 0; j < 4; j++) {
        x[2 * j] = __uint_as_float(words[j] << 16);
        x[2 * j + 1] = __uint_as_float(words[j] & 0xffff0000u);
    }
}

/* One row, of which a warp brings the units that it multiplies: as they are, or normalised (in
 * groups of `width`, gated behind that or not), for which the squares of all units are added up
 * through shared memory. At most MN_FEW_LONGEST numbers. */
__device__ inline void mn_few_bring_own(mn_bf16 *x, float *squares, const mn_few_products_at &p) {
    constexpr int TURNS = MN_FEW_LONGEST / (MN_FEW_WARPS * 256);    // of a lane
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool norm = p.way == MN_FEW_OWN_NORM;
    const mn_few_job &job = p.first;
    const bool gated = norm && job.kind == MN_FEW_GATED_NORM;
    const mn_bf16 *from = norm ? (const mn_bf16 *)job.side[0].data : (const mn_bf16 *)p.a;
    const mn_bf16 *weights = (const mn_bf16 *)job.side[gated ? 2 : 1].data;
    uint4 own[TURNS], gate[TURNS], weight[TURNS];
    int low[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        const int unit = (i * 8 + lane / 4) * MN_FEW_WARPS + warp, k = unit * 32 + lane % 4 * 8;
        if (k >= p.K) continue;
        own[i] = *(const uint4 *)(from + k);
        if (!norm) continue;
        const int group = gated ? (int)mn_quotient((uint32_t)k, p.by_width) : 0;
        low[i] = group * job.width;
        const int skip = !gated || job.taps == 1 ? 0 : group % job.taps * job.width;
        weight[i] = *(const uint4 *)(weights + skip + k - low[i]);
        if (gated) gate[i] = *(const uint4 *)((const mn_bf16 *)job.side[1].data + k);
    }
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        const int unit = (i * 8 + lane / 4) * MN_FEW_WARPS + warp, k = unit * 32 + lane % 4 * 8;
        float y[8], sum = 0.0f;
        if (i * MN_FEW_WARPS * 256 >= p.K) continue;
        if (!norm) {
            if (k < p.K) *(uint4 *)(x + k) = own[i];
            continue;
        }
        if (k < p.K) {
            mn_few_floats(y, own[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) sum = fmaf(y[j], y[j], sum);
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (k < p.K && lane % 4 == 0) squares[unit] = sum;
    }
    if (!norm) {
        __syncwarp();
        return;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        const int unit = (i * 8 + lane / 4) * MN_FEW_WARPS + warp, k = unit * 32 + lane % 4 * 8;
        if (k >= p.K) continue;
        float mine = 0.0f, u[8], z[8], w[8];
        const float4 *parts = (const float4 *)(squares + low[i] / 32);
#pragma unroll 4
        for (int at = 0; at < job.width / 128; at++) {
            const float4 four = parts[at];
            mine += (four.x + four.y) + (four.z + four.w);
        }
        const float r = rsqrtf(fmaf(mine, p.inverse_width, job.scale));
        mn_few_floats(u, own[i]);
        mn_few_floats(w, weight[i]);
        if (gated) mn_few_floats(z, gate[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (gated) u[j] *= mn_few_gate(job, z[j]);
            u[j] = u[j] * r * w[j];
        }
        mn_store<8>(x, k, u);
        if (blockIdx.x == 0) mn_store<8>((mn_bf16 *)p.a, k, u);
    }
    __syncwarp();
}

/* Any rows, by all threads. */
template <typename T>
__device__ __noinline__ void mn_few_bring_rows(T *x, const mn_few_products_at &p, float *room) {
    constexpr int N = 16 / (int)sizeof(T);
    const int packs = p.K / N;
    if (p.has_first) {
        mn_few_do(p.first, { (char *)x, p.K, p.step }, room);
        __syncthreads();
        if (blockIdx.x > 0) return;
        T *a = (T *)p.a;
        for (int i = threadIdx.x; i < p.M * p.K; i += blockDim.x) {
            const int row = i / p.K;
            a[i] = x[row * p.step + i - row * p.K];
        }
        return;
    }
    for (int i = threadIdx.x; i < p.M * packs; i += blockDim.x) {
        const int row = i / packs, at = (i - row * packs) * N;
        *(uint4 *)(x + row * p.step + at) = *(const uint4 *)((const T *)p.a + row * p.a_row + at);
    }
    __syncthreads();
}

/* Calls of their own for what is rare, so that the rest keeps its registers. */
__device__ __noinline__ void mn_few_products_wide(mn_few_block &room, const mn_few_products_at &p,
                                                  const mn_few_table &table) {
    if (!p.settled) mn_few_begin<float>(room, p, table);
    if (table.n == 0) return;
    mn_few_column<float> column(p);
    mn_few_first_column(column, p, table);
    mn_few_bring_rows((float *)room.rows, p, room.room);
    mn_few_multiply_all(room, p, table, (const float *)room.rows, column);
}

__device__ inline void mn_few_products_run(mn_few_block &room, const mn_few_products_at &p,
                                           const mn_few_table &table) {
    if (p.wide) {
        mn_few_products_wide(room, p, table);
        return;
    }
    if (!p.settled) mn_few_begin<mn_bf16>(room, p, table);
    if (table.n == 0) return;
    mn_bf16 *x = (mn_bf16 *)room.rows;
    mn_few_column<mn_bf16> column(p);
    mn_few_first_column(column, p, table);
    if (p.way == MN_FEW_BY_BLOCK) mn_few_bring_rows(x, p, room.room);
    else mn_few_bring_own(x, room.squares, p);
    mn_few_multiply_all(room, p, table, (const mn_bf16 *)x, column);
}

#endif
