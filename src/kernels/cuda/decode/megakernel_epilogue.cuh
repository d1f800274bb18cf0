/* megakernel_epilogue.cuh - what becomes of the sums of a unit (kernels/decode.h): a warp has a
 * unit, four
 * lanes a column, the first of which stores.
 *
 * What an ending reads from memory is asked for before the sums are there. Words go first, to those
 * who wait for them; then the same numbers to where they would lie without a program. */
#ifndef MN_KERNELS_CUDA_DECODE_MEGAKERNEL_EPILOGUE_CUH
#define MN_KERNELS_CUDA_DECODE_MEGAKERNEL_EPILOGUE_CUH

#include "kernels/cuda/decode/megakernel.cuh"

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

/* x of a lane's column, rounded: to who waits for it, and to memory. All lanes call; `mine`: the
 * column is there, and this its first lane. */
__device__ inline void mn_few_deliver(const mn_few_place &place, bool mine, mn_bf16 *to, int words,
                                      float x) {
    const int column = threadIdx.x % 32 / 4;
    const float right = __shfl_down_sync(0xffffffffu, x, 4);
    const uint32_t two = mn_few_two(x, right);
    if (mine && words >= 0 && column % 2 == 0) mn_few_say(place, words + column * 2, two);
    if (mine) to[column] = __ushort_as_bfloat16((unsigned short)two);
}

/* ---- lists of small works -------------------------------------------------------------------- */

__device__ inline float mn_few_input_of(const mn_few_input &in, const mn_few_place &place,
                                        const float (*values)[MN_FEW_COLUMNS]) {
    const int column = threadIdx.x % 32 / 4, i = column * in.source.step + in.source.odd;
    if (in.from >= 0) return values[in.from][column];
    mn_few_one x;
    do {
        x.ask(place.words + mn_few_word_from(in.source.at, i));
    } while (x.most() == MN_FEW_UNSAID);
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

/* What a list reads ahead of column `column`. */
__device__ inline uintptr_t mn_few_early_at(const mn_few_unit &u, int i, int column) {
    return (uintptr_t)u.early[i] + column * u.early_step[i];
}

/* Number i of those, from the word of memory that it lies in. */
__device__ inline float mn_few_early(const mn_few_unit &u, int i, int column, uint32_t word) {
    if (u.early_wide[i]) return __uint_as_float(word);
    return mn_few_early_at(u, i, column) & 2 ? mn_few_high(word) : mn_few_low(word);
}

/* One after the other, from the unit's products x and y and the words that hold what was read
 * ahead; a lane has its column of all of them. values: of the unit. */
__device__ __noinline__ void mn_few_list(const mn_few_unit &u, const mn_few_end *ends,
                                         mn_few_place place, float (*values)[MN_FEW_COLUMNS],
                                         float x, float y, uint4 early) {
    const int column = threadIdx.x % 32 / 4;
    const bool there = column < u.n_rows, mine = there && threadIdx.x % 4 == 0;
    const uint32_t held[MN_FEW_EARLY] = { early.x, early.y, early.z, early.w };
    values[0][column] = x, values[1][column] = y;
#pragma unroll
    for (int i = 0; i < MN_FEW_EARLY; i++) {
        values[2 + MN_FEW_ENDINGS + i][column] = mn_few_early(u, i, column, held[i]);
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < u.n_ends; i++) {
        const mn_few_end &e = ends[i];
        float a = 0.0f, b = 0.0f;
        if (there) a = mn_few_input_of(e.in[0], place, values);
        if (there && e.n_inputs > 1) b = mn_few_input_of(e.in[1], place, values);
        __syncwarp();
        float z = mn_few_result_of(e, a, b);
        __syncwarp();
        if (!e.wide) z = mn_few_round(z);
        values[2 + i][column] = z;
        const bool stores = mine && (e.per == 1 || column == 0);
        if (!e.wide) mn_few_deliver(place, stores, (mn_bf16 *)e.to, e.to_words, z);
        else if (stores) ((float *)e.to)[column] = z;
        __syncwarp();
    }
}

/* ---- a unit ---------------------------------------------------------------------------------- */

/* The head of a unit. */
struct mn_few_kind_of {
    unsigned first, second;

    __device__ explicit mn_few_kind_of(const mn_few_unit &u) {
        const uint2 both = *(const uint2 *)&u;
        first = mn_few_even(both.x), second = mn_few_even(both.y);
    }

    __device__ int form(void) const {
        return first & 255;
    }

    __device__ int n_strips(void) const {
        return first >> 8 & 255;
    }

    __device__ int strip(int i) const {
        return first >> (16 + 8 * i) & 255;
    }

    __device__ int n_rows(void) const {
        return second & 255;
    }

    __device__ int f(void) const {
        return second >> 8 & 255;
    }

    __device__ bool biased(void) const {
        return second >> 16 & 1;
    }

    __device__ bool keeps(void) const {
        return second >> 17 & 1;
    }
};

struct mn_few_finish {
    const mn_few_unit &u;
    const mn_few_place &place;
    int column, form, f, words;
    bool there, mine;        // a column that is there, and its first lane
    bool keeps;              // products
    float bias[2];
    uint32_t held[6];        // as it was found: what is added; tail, taps, bias; what a list reads

    /* Asks, where there is a unit. */
    __device__ mn_few_finish(const mn_few_unit &unit, const mn_few_kind_of &kind,
                             const mn_few_place &at, bool has)
        : u(unit), place(at) {
        column = threadIdx.x % 32 / 4;
        there = has && column < kind.n_rows();
        mine = there && threadIdx.x % 4 == 0;
        form = kind.form(), f = kind.f(), words = u.to_words, keeps = kind.keeps();
        bias[0] = bias[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < 6; i++) asm("" : "=r"(held[i]));    // any numbers
        if (!has) return;
        if (form == MN_FEW_ADDED) ask_plus();
        if (form == MN_FEW_CONVOLVED && there) ask_taps();
        if (__builtin_expect(form >= MN_FEW_DECAYED, 0) && there) ask_early();
        if (__builtin_expect(kind.biased(), 0) && there) {
            if (u.bias[0]) bias[0] = mn_float(u.bias[0][column]);
            if (u.bias[1]) bias[1] = mn_float(u.bias[1][column]);
        }
    }

    /* The word of what is added. */
    __device__ void ask_plus(void) {
        mn_few_one word;
        word.none();
        if (there) word.ask(place.words + u.plus.at + column / 2 * 4);
        held[0] = word.a;
    }

    /* Before the sums are there. */
    __device__ void settle(void) {
        if (form != MN_FEW_ADDED) return;
        while (__builtin_expect(__any_sync(0xffffffffu, held[0] == MN_FEW_UNSAID), 0)) ask_plus();
    }

    __device__ float add(float x) const {
        return x + (column % 2 ? mn_few_high(held[0]) : mn_few_low(held[0]));
    }

    /* Three inputs before this one, four taps in two words, a bias. */
    __device__ void ask_taps(void) {
#pragma unroll
        for (int m = 0; m < MN_FEW_TAPS - 1; m++) {
            held[m] = u.tail0 ? __ldcg((const uint32_t *)u.tail0 + m * u.N + column) : 0u;
        }
        const uint2 taps = ((const uint2 *)u.taps)[column];
        held[3] = taps.x, held[4] = taps.y, held[5] = 0;
        if (u.taps_bias) held[5] = ((const uint16_t *)u.taps_bias)[column];
    }

    /* One token of a convolution, without its function, and the tail of inputs that it leaves. */
    __device__ float convolve(float x) const {
        float sum = fmaf(mn_few_low(held[3]), __uint_as_float(held[0]), mn_few_low(held[5]));
        sum = fmaf(mn_few_high(held[3]), __uint_as_float(held[1]), sum);
        sum = fmaf(mn_few_low(held[4]), __uint_as_float(held[2]), sum);
        return fmaf(mn_few_high(held[4]), x, sum);
    }

    __device__ void keep_tail(float x) const {
        float *const tail = u.tail + column;
        const int N = u.N;
        if (!mine || !u.tail) return;
        tail[0] = __uint_as_float(held[1]);
        tail[N] = __uint_as_float(held[2]);
        tail[2 * N] = x;
    }

    /* The words of memory that what a list reads lies in. */
    __device__ void ask_early(void) {
#pragma unroll
        for (int i = 0; i < MN_FEW_EARLY; i++) {
            held[i] = 0;
            const uintptr_t at = mn_few_early_at(u, i, column);
            if (u.early[i]) held[i] = *(const uint32_t *)(at & ~(uintptr_t)3);
        }
    }

    /* x + dt, softplus of it, -exp(A), rounded, the last unless it is wide; the product of the
     * latter two is a decay. */
    __device__ void decay(float (&made)[3], float x) const {
        made[0] = mn_few_round(x + mn_few_early(u, 0, column, held[0]));
        made[1] = mn_few_round(mn_fn_SOFTPLUS<true>::value(made[0]));
        made[2] = mn_fn_NEG_EXP<false>::value(mn_few_early(u, 1, column, held[1]));
        if (!f) made[2] = mn_few_round(made[2]);
    }

    __device__ void keep_made(const mn_few_end *ends, const float (&made)[3]) const {
#pragma unroll
        for (int i = 0; i < 3; i++) {
            if (!mine || (ends[i].per > 1 && column > 0)) continue;
            if (ends[i].wide) ((float *)ends[i].to)[column] = made[i];
            else ((mn_bf16 *)ends[i].to)[column] = __float2bfloat16_rn(made[i]);
        }
    }

    /* What few units have; a list delivers by itself. */
    __device__ void run_rare(float x, float y, const mn_few_end *ends,
                             float (*values)[MN_FEW_COLUMNS]) const {
        if (form == MN_FEW_WIDENED) {
            if (mine) ((float *)u.to)[column] = x;
        } else if (form == MN_FEW_LISTED) {
            const uint4 early = make_uint4(held[0], held[1], held[2], held[3]);
            mn_few_list(u, ends, place, values, x, y, early);
        } else if (form == MN_FEW_DECAYED) {
            float made[3];
            decay(made, x);
            mn_few_deliver(place, mine, u.to, words, made[1] * made[2]);
            keep_made(ends, made);
        } else {
            mn_few_deliver(place, mine, u.to, words, mn_few_function<true>(f, x) * y);
        }
    }

    /* From the sums, complete in all four lanes; the second is 1 where there is none. `ends`: of
     * the unit. No branches on the way to most words. */
    __device__ void run(float first, float second, const mn_few_end *ends,
                        float (*values)[MN_FEW_COLUMNS]) {
        const bool silu = f == MN_UNARY_SILU, convolved = form == MN_FEW_CONVOLVED;
        const bool rare = form >= MN_FEW_WIDENED ||
                          (form == MN_FEW_FUNCTION && !silu && f != MN_UNARY_SIGMOID);
        const float x = mn_few_round(first + bias[0]), y = mn_few_round(second + bias[1]);
        if (__builtin_expect(rare, 0)) {
            run_rare(x, y, ends, values);
        } else {
            const float sum = convolve(x), added = add(x), at = convolved ? sum : x;
            const float s = mn_sigmoid(at);
            float result = form == MN_FEW_ADDED ? added : x;
            result = convolved ? (f ? sum * s : sum) : result;
            result = form == MN_FEW_FUNCTION ? (silu ? s * x : s) * y : result;
            mn_few_deliver(place, mine, u.to, words, result);
            if (convolved) keep_tail(x);
        }
        if (!keeps) return;
        mn_bf16 *const one = u.c[0], *const other = u.c[1];
        if (mine && one) one[column] = __float2bfloat16_rn(x);
        if (mine && other) other[column] = __float2bfloat16_rn(y);
    }
};

#endif

#endif
