/* few_ending.cuh - what becomes of the sums of a strip (kernels/few.h): a warp has a row of eight
 * columns, four lanes each, the first of which stores.
 *
 * What a column adds to its sum, and what its endings read from memory, is asked for before the
 * sums are there. Values of endings stay in shared memory, where those of other products of the
 * same block are too. */
#ifndef MN_KERNELS_CUDA_FEW_ENDING_CUH
#define MN_KERNELS_CUDA_FEW_ENDING_CUH

#include "kernels/cuda/few_stage.cuh"

__device__ inline float mn_few_number(const char *data, bool wide, int64_t i) {
    return wide ? ((const float *)data)[i] : mn_float(((const mn_bf16 *)data)[i]);
}

/* Stores x, and returns it as it is stored. */
__device__ inline float mn_few_rounded(char *data, bool wide, int64_t i, float x) {
    if (wide) {
        ((float *)data)[i] = x;
        return x;
    }
    const mn_bf16 y = __float2bfloat16_rn(x);
    ((mn_bf16 *)data)[i] = y;
    return __bfloat162float(y);
}

/* A call: what is written out once stays near the processor. */
template <bool NARROW>
__device__ __noinline__ float mn_few_function(int f, float x) {
    switch (f) {
#define UNARY(id, name, about)                                                                     \
    case MN_UNARY_##id: return mn_fn_##id<NARROW>::value(x);
#include "kernels/unary.def"
#undef UNARY
    default: return x;
    }
}

/* A column of one row of a strip, from before its sum is there. Numbers from memory stay as they
 * are stored until they are needed: nothing waits for them before. T: the type of the product. */
template <typename T>
struct mn_few_column {
    const mn_few_products_at &p;
    const mn_few_weight *w;
    int product, column, place;                 // place: among the values
    int64_t at;
    bool mine;                                  // a column that is there, and its first lane
    T bias, plus;
    uint32_t early[MN_FEW_EARLY];
    float tail[MN_FEW_TAPS - 1];
    uint4 taps;

    __device__ explicit mn_few_column(const mn_few_products_at &stage) : p(stage) {}

    __device__ void begin(const mn_few_strip &s, int row) {
        const int lane = threadIdx.x % 32;
        product = s.product, column = s.column + lane / 4;
        place = s.turn * MN_FEW_COLUMNS + lane / 4;
        w = &p.of[product];
        mine = lane / 4 < s.n_rows && lane % 4 == 0;
        at = row * (int64_t)w->N + column;
        if (!mine) return;
        if (w->bias) bias = ((const T *)w->bias)[column];
        if (w->sum) plus = ((const T *)w->plus)[at];
#pragma unroll
        for (int i = 0; i < MN_FEW_EARLY; i++) {
            if (i >= w->n_operands) continue;
            const mn_few_operand &from = p.operand[w->first_operand + i];
            if (from.wide) early[i] = ((const uint32_t *)from.data)[(int64_t)column * from.step];
            else early[i] = ((const uint16_t *)from.data)[(int64_t)column * from.step];
        }
        if (w->conv >= 0) ask_conv(p.end[w->conv]);
    }

    __device__ void ask_conv(const mn_few_end &e) {
        if (e.taps != MN_FEW_TAPS) return;
        const float *tail0 = (const float *)e.in[3].data;
#pragma unroll
        for (int m = 0; m < MN_FEW_TAPS - 1; m++) {
            tail[m] = 0.0f;
            if (tail0) tail[m] = tail0[m * (int64_t)w->N + column];
        }
        if (e.in[1].wide) {
            taps = ((const uint4 *)e.in[1].data)[column];
        } else {
            const uint2 two = ((const uint2 *)e.in[1].data)[column];
            taps.x = two.x, taps.y = two.y;
        }
    }

    /* Tap m of four. */
    __device__ float tap(bool wide, int m) const {
        const uint32_t words[4] = { taps.x, taps.y, taps.z, taps.w };
        if (wide) return __uint_as_float(words[m]);
        return __uint_as_float(m % 2 ? words[m / 2] & 0xffff0000u : words[m / 2] << 16);
    }

    __device__ float input(const mn_few_source &from,
                           float (*values)[MN_FEW_TURNS * MN_FEW_COLUMNS]) const {
        if (from.from >= 0) return values[from.from][place];
        if (from.from == -1) {
            return mn_few_number(from.data, from.wide, (int64_t)column * from.step);
        }
        uint32_t x = early[0];
#pragma unroll
        for (int i = 1; i < MN_FEW_EARLY; i++) x = from.from == -2 - i ? early[i] : x;
        return __uint_as_float(from.wide ? x : x << 16);
    }

    /* One token of a convolution, and the tail of inputs that it leaves. */
    __device__ float convolve(const mn_few_end &e, float x) const {
        const int64_t N = w->N;
        const int M = e.taps - 1;
        const float *tail0 = (const float *)e.in[3].data;
        float *to = (float *)e.tail.data;
        float sum = e.in[2].data ? mn_few_number(e.in[2].data, e.in[2].wide, column) : 0.0f;
        if (e.taps == MN_FEW_TAPS) {
#pragma unroll
            for (int m = 0; m < MN_FEW_TAPS - 1; m++) {
                sum = fmaf(tap(e.in[1].wide, m), tail[m], sum);
                if (m > 0 && to) to[(m - 1) * N + column] = tail[m];
            }
            sum = fmaf(tap(e.in[1].wide, MN_FEW_TAPS - 1), x, sum);
        } else {
#pragma unroll 1
            for (int m = 0; m < M; m++) {
                const float u = tail0 ? tail0[m * N + column] : 0.0f;
                const int64_t tap = (int64_t)column * e.taps + m;
                sum = fmaf(mn_few_number(e.in[1].data, e.in[1].wide, tap), u, sum);
                if (m > 0 && to) to[(m - 1) * N + column] = u;
            }
            const int64_t tap = (int64_t)column * e.taps + M;
            sum = fmaf(mn_few_number(e.in[1].data, e.in[1].wide, tap), x, sum);
        }
        if (to && M > 0) to[(M - 1) * N + column] = x;
        return e.f ? mn_silu(sum).value : sum;
    }

    __device__ float result(const mn_few_end &e,
                            float (*values)[MN_FEW_TURNS * MN_FEW_COLUMNS]) const {
        const bool two = e.in[1].data || e.in[1].from >= 0;
        const float a = e.kind == MN_FEW_FILL ? 0.0f : input(e.in[0], values);
        if (e.kind == MN_FEW_CONV) return convolve(e, a);
        const float b = two ? input(e.in[1], values) : 0.0f;
        if (e.kind == MN_FEW_UNARY) {
            const float y = e.narrow ? mn_few_function<true>(e.f, a)
                                     : mn_few_function<false>(e.f, a);
            return two ? y * b : y;
        }
        if (e.kind == MN_FEW_PAIR) {
            const mn_pair_forward pair = { (mn_pair_kind)e.f, e.scale, e.shift };
            const float x[3][1] = { { a }, { b }, { 0.0f } };
            float y[1][1];
            pair.run<false>(x, y);
            return y[0][0];
        }
        return e.kind == MN_FEW_FILL ? e.shift : a;
    }

    /* The product itself. */
    __device__ void store(float sum, float (*values)[MN_FEW_TURNS * MN_FEW_COLUMNS]) const {
        if (!mine) return;
        if (w->bias) sum += mn_float(bias);
        const float rounded = mn_few_rounded((char *)w->c, sizeof(T) == 4, at, sum);
        if (w->sum) mn_put((T *)w->sum + at, rounded + mn_float(plus));
        if (p.n_ends > 0) values[product][place] = rounded;
    }

    /* What follows from it; products of the block have been stored. */
    __device__ void end(float (*values)[MN_FEW_TURNS * MN_FEW_COLUMNS]) const {
        if (!mine) return;
#pragma unroll 1
        for (int i = 0; i < p.n_ends; i++) {
            const mn_few_end &e = p.end[i];
            if (e.product != product) continue;
            const float y = result(e, values);
            values[e.value][place] = mn_few_rounded(e.out.data, e.out.wide, column, y);
        }
    }
};

/* Asks the second cache for what endings of a strip will read of tails. */
__device__ inline void mn_few_ask_tails(const mn_few_products_at &p, const mn_few_strip &s) {
    const mn_few_weight &w = p.of[s.product];
    if (w.plus) {
        mn_few_ask_line((const char *)w.plus + s.column * (p.wide ? 4 : 2));
    }
    if (w.conv < 0) return;
    const mn_few_end &e = p.end[w.conv];
    const float *tail0 = (const float *)e.in[3].data;
#pragma unroll 1
    for (int m = 0; m < e.taps - 1 && tail0; m++) {
        mn_few_ask_line(tail0 + m * (int64_t)w.N + s.column);
    }
    mn_few_ask_line(e.in[1].data + (int64_t)s.column * e.taps * (e.in[1].wide ? 4 : 2));
}

#endif
