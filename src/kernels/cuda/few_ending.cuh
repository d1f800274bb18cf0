/* few_ending.cuh - what becomes of the sums of a unit (kernels/few.h): a warp has a unit, four
 * lanes a column, the first of which stores.
 *
 * What an ending reads from memory is asked for before the sums are there. Words go first, to those
 * who wait for them; then the same numbers to where they would lie without a program. */
#ifndef MN_KERNELS_CUDA_FEW_ENDING_CUH
#define MN_KERNELS_CUDA_FEW_ENDING_CUH

#include "kernels/cuda/few_program.cuh"

#if __CUDA_ARCH__ >= 900

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

/* x, which is rounded already, of a lane's column: to who waits for it, and to memory. All lanes
 * call; `mine`: the column is there, and this its first lane. */
__device__ inline void mn_few_deliver(const mn_few_place &place, bool mine, mn_bf16 *to, int words,
                                      float x) {
    const int column = threadIdx.x % 32 / 4;
    const uint32_t own = mn_few_bits(x), right = __shfl_down_sync(0xffffffffu, own, 4);
    if (mine && words >= 0 && column % 2 == 0) {
        mn_few_say((char *)place.program + words + column * 4, own | right << 16, place.run);
    }
    if (mine && to) to[column] = __float2bfloat16_rn(x);
}

/* ---- lists of small works -------------------------------------------------------------------- */

__device__ inline float mn_few_input_of(const mn_few_input &in, const char *program, unsigned run,
                                        const float (*values)[MN_FEW_COLUMNS]) {
    const int column = threadIdx.x % 32 / 4, i = column * in.source.step + in.source.odd;
    if (in.from >= 0) return values[in.from][column];
    if (in.wide) return __ldcg((const float *)in.source.at + i);
    mn_few_one x;
    do {
        x.ask(in.source, program, i);
    } while (!x.there(in.source, run));
    return x.number(in.source, i);
}

__device__ inline float mn_few_result_of(const mn_few_end &e, float a, float b) {
    if (e.kind == MN_FEW_UNARY) {
        const float y = e.narrow ? mn_few_function<true>(e.f, a) : mn_few_function<false>(e.f, a);
        return e.n_inputs > 1 ? y * b : y;
    }
    if (e.kind == MN_FEW_PAIR) {
        const mn_pair_forward pair = { (mn_pair_kind)e.f, e.scale, e.shift };
        const float x[3][1] = { { a }, { b }, { 0.0f } };
        float y[1][1];
        pair.run<false>(x, y);
        return y[0][0];
    }
    return a;
}

/* One after the other; a lane has its column of all of them. values: of the unit. */
__device__ __noinline__ void mn_few_list(const mn_few_unit &u, const mn_few_end *ends,
                                         const char *program, unsigned run,
                                         float (*values)[MN_FEW_COLUMNS]) {
    const int column = threadIdx.x % 32 / 4;
    const bool there = column < u.n_rows, mine = there && threadIdx.x % 4 == 0;
    mn_few_place place = {};
    place.program = program, place.run = run;
#pragma unroll 1
    for (int i = 0; i < u.n_ends; i++) {
        const mn_few_end &e = ends[u.first_end + i];
        float a = 0.0f, b = 0.0f;
        if (there) a = mn_few_input_of(e.in[0], program, run, values);
        if (there && e.n_inputs > 1) b = mn_few_input_of(e.in[1], program, run, values);
        __syncwarp();
        float y = mn_few_result_of(e, a, b);
        __syncwarp();
        if (!e.wide) y = mn_few_round(y);
        values[2 + i][column] = y;
        const bool stores = mine && (e.per == 1 || column == 0);
        if (!e.wide) mn_few_deliver(place, stores, (mn_bf16 *)e.to, e.to_words, y);
        else if (stores) ((float *)e.to)[column] = y;
        __syncwarp();
    }
}

/* ---- a unit ---------------------------------------------------------------------------------- */

struct mn_few_finish {
    const mn_few_unit &u;
    const mn_few_place &place;
    int column;
    bool mine;                       // a column that is there, and its first lane
    mn_few_one plus;
    float tail[MN_FEW_TAPS - 1], bias[2], taps_bias;
    uint4 taps;

    /* Asks, where there is a unit. */
    __device__ mn_few_finish(const mn_few_unit &unit, const mn_few_place &at, bool has)
        : u(unit), place(at) {
        const int lane = threadIdx.x % 32;
        column = lane / 4;
        mine = has && column < u.n_rows && lane % 4 == 0;
        bias[0] = bias[1] = 0.0f;
        if (!has || column >= u.n_rows) return;
        if (u.bias[0]) bias[0] = mn_float(u.bias[0][column]);
        if (u.bias[1]) bias[1] = mn_float(u.bias[1][column]);
        if (u.form == MN_FEW_ADDED) plus.ask(u.plus, place.program, column);
        if (u.form == MN_FEW_CONVOLVED) ask_taps();
    }

    __device__ void ask_taps(void) {
#pragma unroll
        for (int m = 0; m < MN_FEW_TAPS - 1; m++) {
            tail[m] = u.tail0 ? __ldcg(u.tail0 + m * (int64_t)u.N + column) : 0.0f;
        }
        if (u.wide_taps) {
            taps = ((const uint4 *)u.taps)[column];
        } else {
            const uint2 two = ((const uint2 *)u.taps)[column];
            taps.x = two.x, taps.y = two.y;
        }
        taps_bias = 0.0f;
        if (!u.taps_bias) return;
        taps_bias = u.wide_bias ? ((const float *)u.taps_bias)[column]
                                : mn_float(((const mn_bf16 *)u.taps_bias)[column]);
    }

    /* Tap m of four. */
    __device__ float tap(int m) const {
        const uint32_t words[4] = { taps.x, taps.y, taps.z, taps.w };
        if (u.wide_taps) return __uint_as_float(words[m]);
        return m % 2 ? mn_few_high(words[m / 2]) : mn_few_low(words[m / 2]);
    }

    __device__ void deliver(mn_bf16 *to, int words, float x) const {
        mn_few_deliver(place, mine, to, words, x);
    }

    /* One token of a convolution, and the tail of inputs that it leaves. */
    __device__ float convolve(float x) const {
        float sum = taps_bias;
#pragma unroll
        for (int m = 0; m < MN_FEW_TAPS - 1; m++) sum = fmaf(tap(m), tail[m], sum);
        sum = fmaf(tap(MN_FEW_TAPS - 1), x, sum);
        return u.f ? mn_silu(sum).value : sum;
    }

    __device__ void keep_tail(float x) const {
        if (!mine || !u.tail) return;
#pragma unroll
        for (int m = 1; m < MN_FEW_TAPS; m++) {
            u.tail[(m - 1) * (int64_t)u.N + column] = m < MN_FEW_TAPS - 1 ? tail[m] : x;
        }
    }

    __device__ float sum(float x) {
        if (column < u.n_rows && !plus.there(u.plus, place.run)) {
            do {
                plus.ask(u.plus, place.program, column);
            } while (!plus.there(u.plus, place.run));
        }
        __syncwarp();
        return mn_few_round(x + plus.number(u.plus, column));
    }

    /* From the sums, complete in all four lanes. */
    __device__ void run(float first, float second, const mn_few_end *ends,
                        float (*values)[MN_FEW_COLUMNS]) {
        const float x = mn_few_round(first + bias[0]), y = mn_few_round(second + bias[1]);
        if (u.form == MN_FEW_FUNCTION) {
            const float f = u.narrow ? mn_few_function<true>(u.f, x)
                                     : mn_few_function<false>(u.f, x);
            deliver(u.to, u.to_words, mn_few_round(f * y));
        } else if (u.form == MN_FEW_ADDED) {
            deliver(u.to, u.to_words, sum(x));
        } else if (u.form == MN_FEW_CONVOLVED) {
            deliver(u.to, u.to_words, mn_few_round(convolve(x)));
            keep_tail(x);
        } else if (u.form == MN_FEW_LISTED) {
            values[0][column] = x, values[1][column] = y;
            __syncwarp();
            mn_few_list(u, ends, place.program, place.run, values);
        }
        deliver(u.c[0], u.c_words[0], x);
        if (u.n_strips > 1) deliver(u.c[1], u.c_words[1], y);
    }
};

#endif

#endif
