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
__device__ inline void mn_few_deliver(const char *program, unsigned run, bool mine, mn_bf16 *to,
                                      int words, float x) {
    const int column = threadIdx.x % 32 / 4;
    const uint32_t own = mn_few_bits(x), right = __shfl_down_sync(0xffffffffu, own, 4);
    if (mine && words >= 0 && column % 2 == 0) {
        mn_few_say((char *)program + words + column * 4, own | right << 16, run);
    }
    if (mine) to[column] = __float2bfloat16_rn(x);
}

/* ---- lists of small works -------------------------------------------------------------------- */

__device__ inline float mn_few_input_of(const mn_few_input &in, const char *program, unsigned run,
                                        const float (*values)[MN_FEW_COLUMNS]) {
    const int column = threadIdx.x % 32 / 4, i = column * in.source.step + in.source.odd;
    if (in.from >= 0) return values[in.from][column];
    mn_few_one x;
    do {
        x.ask(program + in.source.at + i / 2 * 8);
    } while (!x.there(run));
    return x.number(i % 2);
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
        if (!e.wide) mn_few_deliver(program, run, stores, (mn_bf16 *)e.to, e.to_words, y);
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
    uint32_t early[MN_FEW_EARLY];    // words that hold what a list reads

    /* Asks, where there is a unit. */
    __device__ mn_few_finish(const mn_few_unit &unit, const mn_few_place &at, bool has)
        : u(unit), place(at) {
        column = threadIdx.x % 32 / 4;
        has = has && column < u.n_rows;
        mine = has && threadIdx.x % 4 == 0;
        bias[0] = bias[1] = 0.0f;
        if (!has) return;
        if (u.bias[0]) bias[0] = mn_float(u.bias[0][column]);
        if (u.bias[1]) bias[1] = mn_float(u.bias[1][column]);
        if (u.form == MN_FEW_ADDED) plus.ask(plus_at());
        if (u.form == MN_FEW_CONVOLVED) ask_taps();
        if (u.form == MN_FEW_LISTED) ask_early();
    }

    __device__ void ask_taps(void) {
#pragma unroll
        for (int m = 0; m < MN_FEW_TAPS - 1; m++) {
            tail[m] = u.tail0 ? __ldcg(u.tail0 + m * u.N + column) : 0.0f;
        }
        const uint2 two = ((const uint2 *)u.taps)[column];
        taps = make_uint4(two.x << 16, two.x & 0xffff0000u, two.y << 16, two.y & 0xffff0000u);
        taps_bias = u.taps_bias ? mn_float(u.taps_bias[column]) : 0.0f;
    }

    __device__ const char *plus_at(void) const {
        return place.program + u.plus.at + column / 2 * 8;
    }

    __device__ uintptr_t early_at(int i) const {
        return (uintptr_t)u.early[i] + column * u.early_step[i];
    }

    __device__ void ask_early(void) {
#pragma unroll
        for (int i = 0; i < MN_FEW_EARLY; i++) {
            if (u.early[i]) early[i] = *(const uint32_t *)(early_at(i) & ~(uintptr_t)3);
        }
    }

    __device__ void keep_early(float (*values)[MN_FEW_COLUMNS]) const {
        if (column >= u.n_rows) return;
#pragma unroll
        for (int i = 0; i < MN_FEW_EARLY; i++) {
            if (!u.early[i]) continue;
            const bool high = u.early_wide[i] || (early_at(i) & 2);
            const uint32_t all = u.early_wide[i] ? early[i] : early[i] & 0xffff0000u;
            values[2 + MN_FEW_ENDINGS + i][column] = __uint_as_float(high ? all : early[i] << 16);
        }
    }

    /* One token of a convolution, and the tail of inputs that it leaves. */
    __device__ float convolve(float x) const {
        const float sum = fmaf(__uint_as_float(taps.w), x,
                               fmaf(__uint_as_float(taps.z), tail[2],
                                    fmaf(__uint_as_float(taps.y), tail[1],
                                         fmaf(__uint_as_float(taps.x), tail[0], taps_bias))));
        if (mine && u.tail) {
            u.tail[column] = tail[1];
            u.tail[u.N + column] = tail[2];
            u.tail[2 * u.N + column] = x;
        }
        return u.f ? mn_fn_SILU<true>::value(sum) : sum;
    }

    __device__ float add(float x) {
        while (column < u.n_rows && !plus.there(place.run)) plus.ask(plus_at());
        __syncwarp();
        return x + plus.number(column % 2);
    }

    /* From the sums, complete in all four lanes. */
    __device__ void run(float first, float second, const mn_few_end *ends,
                        float (*values)[MN_FEW_COLUMNS]) {
        const float x = mn_few_round(first + bias[0]), y = mn_few_round(second + bias[1]);
        float result = x;
        if (u.form == MN_FEW_ADDED) result = add(x);
        else if (u.form == MN_FEW_CONVOLVED) result = convolve(x);
        else if (u.form == MN_FEW_FUNCTION && u.f == MN_UNARY_SILU) {
            result = mn_fn_SILU<true>::value(x) * y;
        } else if (u.form == MN_FEW_FUNCTION) {
            result = mn_few_function<true>(u.f, x) * y;
        } else if (u.form == MN_FEW_LISTED) {
            values[0][column] = x, values[1][column] = y;
            keep_early(values);
            __syncwarp();
            mn_few_list(u, ends, place.program, place.run, values);
        }
        if (u.form != MN_FEW_LISTED) {
            mn_few_deliver(place.program, place.run, mine, u.to, u.to_words, mn_few_round(result));
        }
        if (mine && u.c[0]) u.c[0][column] = __float2bfloat16_rn(x);
        if (mine && u.c[1]) u.c[1][column] = __float2bfloat16_rn(y);
    }
};

#endif

#endif
