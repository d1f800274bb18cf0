/* megakernel_epilogue.cuh - what becomes of the sums of a out_tile (kernels/decode.h): a warp has a
 * out_tile, four
 * lanes a column, the first of which stores.
 *
 * What an epilogue reads from memory is asked for before the sums are there. Words go first, to
 * those
 * who wait for them; then the same elements to where they would lie without a megakernel. */
#ifndef MN_KERNELS_CUDA_DECODE_MEGAKERNEL_EPILOGUE_CUH
#define MN_KERNELS_CUDA_DECODE_MEGAKERNEL_EPILOGUE_CUH

#include "kernels/cuda/decode/megakernel.cuh"

#if __CUDA_ARCH__ >= 900

/* A call: what is written out once stays near the processor. */
template <bool NARROW>
__device__ __noinline__ float mn_decode_activation(int f, float x) {
    switch (f) {
#define UNARY(id, name, about)                                                                     \
    case MN_UNARY_##id: return mn_fn_##id<NARROW>::value(x);
#include "kernels/unary.def"
#undef UNARY
    default: return x;
    }
}

/* x of a lane's column, rounded: to who waits for it, and to memory. All lanes call; `owner`: the
 * column is there, and this its first lane. */
__device__ inline void mn_decode_store_result(const mn_decode_pipe &place, bool owner,
                                              mn_bf16 *to, int words,
                                      float x) {
    const int column = threadIdx.x % 32 / 4;
    const float right = __shfl_down_sync(0xffffffffu, x, 4);
    const uint32_t two = mn_bf16_pack2(x, right);
    if (owner && words >= 0 && column % 2 == 0) mn_decode_store_word(place, words + column * 2,
                                                                     two);
    if (owner) to[column] = __ushort_as_bfloat16((unsigned short)two);
}

/* ---- lists of small works -------------------------------------------------------------------- */

__device__ inline float mn_decode_epi_load(const mn_decode_epi_input &in,
                                           const mn_decode_pipe &place,
                                        const float (*values)[MN_DECODE_TILE_N]) {
    const int column = threadIdx.x % 32 / 4, i = column * in.source.step + in.source.odd;
    if (in.from >= 0) return values[in.from][column];
    mn_decode_word1 x;
    do {
        x.fetch(place.words + mn_decode_word_from(in.source.at, i));
    } while (x.most() == MN_DECODE_SENTINEL);
    return x.number(i % 2);
}

__device__ inline float mn_decode_epi_apply(const mn_decode_epi_instr &e, float a, float b) {
    if (e.kind == MN_DECODE_UNARY) {
        const float y = e.narrow ? mn_decode_activation<true>(e.f, a)
            : mn_decode_activation<false>(e.f, a);
        return e.n_inputs > 1 ? y * b : y;
    }
    if (e.kind == MN_DECODE_PAIR) {
        const mn_pair_forward pair = { (mn_pair_kind)e.f, e.scale, e.shift };
        const float x[3][1] = { { a }, { b }, { 0.0f } };
        float y[1][1];
        pair.run<false>(x, y);
        return y[0][0];
    }
    return a;
}

/* What a list reads ahead of column `column`. */
__device__ inline uintptr_t mn_decode_prefetched_at(const mn_decode_out_tile &u, int i,
                                                    int column) {
    return (uintptr_t)u.prefetched[i] + column * u.prefetched_step[i];
}

/* Number i of those, from the word of memory that it lies in. */
__device__ inline float mn_decode_prefetched(const mn_decode_out_tile &u, int i, int column,
                                             uint32_t word) {
    if (u.prefetched_wide[i]) return __uint_as_float(word);
    return mn_decode_prefetched_at(u, i, column) & 2 ? mn_bf16_high(word) : mn_bf16_low(word);
}

/* One after the other, from the out_tile's gemms x and y and the words that hold what was read
 * ahead; a lane has its column of all of them. values: of the out_tile. */
__device__ __noinline__ void mn_decode_epi_list(const mn_decode_out_tile &u,
                                                const mn_decode_epi_instr *epis,
                                         mn_decode_pipe place, float (*values)[MN_DECODE_TILE_N],
                                         float x, float y, uint4 prefetched) {
    const int column = threadIdx.x % 32 / 4;
    const bool there = column < u.n_rows, owner = there && threadIdx.x % 4 == 0;
    const uint32_t held[MN_DECODE_PREFETCHED] =
        { prefetched.x, prefetched.y, prefetched.z, prefetched.w };
    values[0][column] = x, values[1][column] = y;
#pragma unroll
    for (int i = 0; i < MN_DECODE_PREFETCHED; i++) {
        values[2 + MN_DECODE_EPILOGUES + i][column] = mn_decode_prefetched(u, i, column, held[i]);
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < u.n_epis; i++) {
        const mn_decode_epi_instr &e = epis[i];
        float a = 0.0f, b = 0.0f;
        if (there) a = mn_decode_epi_load(e.in[0], place, values);
        if (there && e.n_inputs > 1) b = mn_decode_epi_load(e.in[1], place, values);
        __syncwarp();
        float z = mn_decode_epi_apply(e, a, b);
        __syncwarp();
        if (!e.wide) z = mn_bf16_rounded(z);
        values[2 + i][column] = z;
        const bool stores = owner && (e.per == 1 || column == 0);
        if (!e.wide) mn_decode_store_result(place, stores, (mn_bf16 *)e.to, e.to_handoff, z);
        else if (stores) ((float *)e.to)[column] = z;
        __syncwarp();
    }
}

/* ---- a out_tile
 * ---------------------------------------------------------------------------------- */

/* The head of a out_tile. */
struct mn_decode_tile_header {
    unsigned first, second;

    __device__ explicit mn_decode_tile_header(const mn_decode_out_tile &u) {
        const uint2 both = *(const uint2 *)&u;
        first = mn_decode_uniform(both.x), second = mn_decode_uniform(both.y);
    }

    __device__ int form(void) const {
        return first & 255;
    }

    __device__ int n_col_tiles(void) const {
        return first >> 8 & 255;
    }

    __device__ int col_tile(int i) const {
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

    __device__ bool stores_c(void) const {
        return second >> 17 & 1;
    }
};

struct mn_decode_epilogue {
    const mn_decode_out_tile &u;
    const mn_decode_pipe &place;
    int column, form, f, words;
    bool there, owner;        // a column that is there, and its first lane
    bool stores_c;              // gemms
    float bias[2];
    uint32_t held[6];        // as it was found: what is added; tail, taps, bias; what a list reads

    /* Asks, where there is a out_tile. */
    __device__ mn_decode_epilogue(const mn_decode_out_tile &out_tile,
                                  const mn_decode_tile_header &kind,
                             const mn_decode_pipe &at, bool has)
        : u(out_tile), place(at) {
        column = threadIdx.x % 32 / 4;
        there = has && column < kind.n_rows();
        owner = there && threadIdx.x % 4 == 0;
        form = kind.form(), f = kind.f(), words = u.to_handoff, stores_c = kind.stores_c();
        bias[0] = bias[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < 6; i++) asm("" : "=r"(held[i]));    // any elements
        if (!has) return;
        if (form == MN_DECODE_EPI_ADD) load_plus();
        if (form == MN_DECODE_EPI_CONV && there) load_taps();
        if (__builtin_expect(form >= MN_DECODE_EPI_DECAY, 0) && there) load_prefetched();
        if (__builtin_expect(kind.biased(), 0) && there) {
            if (u.bias[0]) bias[0] = mn_float(u.bias[0][column]);
            if (u.bias[1]) bias[1] = mn_float(u.bias[1][column]);
        }
    }

    /* The word of what is added. */
    __device__ void load_plus(void) {
        mn_decode_word1 word;
        word.none();
        if (there) word.fetch(place.words + u.plus.at + column / 2 * 4);
        held[0] = word.a;
    }

    /* Before the sums are there. */
    __device__ void wait_plus(void) {
        if (form != MN_DECODE_EPI_ADD) return;
        while (__builtin_expect(__any_sync(0xffffffffu, held[0] == MN_DECODE_SENTINEL),
                                0)) load_plus();
    }

    __device__ float add(float x) const {
        return x + (column % 2 ? mn_bf16_high(held[0]) : mn_bf16_low(held[0]));
    }

    /* Three inputs before this one, four taps in two words, a bias. */
    __device__ void load_taps(void) {
#pragma unroll
        for (int m = 0; m < MN_DECODE_TAPS - 1; m++) {
            held[m] = u.tail0 ? __ldcg((const uint32_t *)u.tail0 + m * u.N + column) : 0u;
        }
        const uint2 taps = ((const uint2 *)u.taps)[column];
        held[3] = taps.x, held[4] = taps.y, held[5] = 0;
        if (u.taps_bias) held[5] = ((const uint16_t *)u.taps_bias)[column];
    }

    /* One token of a convolution, without its function, and the tail of inputs that it leaves. */
    __device__ float convolve(float x) const {
        float sum = fmaf(mn_bf16_low(held[3]), __uint_as_float(held[0]), mn_bf16_low(held[5]));
        sum = fmaf(mn_bf16_high(held[3]), __uint_as_float(held[1]), sum);
        sum = fmaf(mn_bf16_low(held[4]), __uint_as_float(held[2]), sum);
        return fmaf(mn_bf16_high(held[4]), x, sum);
    }

    __device__ void store_tail(float x) const {
        float *const tail = u.tail + column;
        const int N = u.N;
        if (!owner || !u.tail) return;
        tail[0] = __uint_as_float(held[1]);
        tail[N] = __uint_as_float(held[2]);
        tail[2 * N] = x;
    }

    /* The words of memory that what a list reads lies in. */
    __device__ void load_prefetched(void) {
#pragma unroll
        for (int i = 0; i < MN_DECODE_PREFETCHED; i++) {
            held[i] = 0;
            const uintptr_t at = mn_decode_prefetched_at(u, i, column);
            if (u.prefetched[i]) held[i] = *(const uint32_t *)(at & ~(uintptr_t)3);
        }
    }

    /* x + dt, softplus of it, -exp(A), rounded, the last unless it is wide; the product of the
     * latter two is a decay. */
    __device__ void decay(float (&made)[3], float x) const {
        made[0] = mn_bf16_rounded(x + mn_decode_prefetched(u, 0, column, held[0]));
        made[1] = mn_bf16_rounded(mn_fn_SOFTPLUS<true>::value(made[0]));
        made[2] = mn_fn_NEG_EXP<false>::value(mn_decode_prefetched(u, 1, column, held[1]));
        if (!f) made[2] = mn_bf16_rounded(made[2]);
    }

    __device__ void store_made(const mn_decode_epi_instr *epis, const float (&made)[3]) const {
#pragma unroll
        for (int i = 0; i < 3; i++) {
            if (!owner || (epis[i].per > 1 && column > 0)) continue;
            if (epis[i].wide) ((float *)epis[i].to)[column] = made[i];
            else ((mn_bf16 *)epis[i].to)[column] = __float2bfloat16_rn(made[i]);
        }
    }

    /* What few out_tiles have; a list delivers by itself. */
    __device__ void run_rare(float x, float y, const mn_decode_epi_instr *epis,
                             float (*values)[MN_DECODE_TILE_N]) const {
        if (form == MN_DECODE_EPI_F32) {
            if (owner) ((float *)u.to)[column] = x;
        } else if (form == MN_DECODE_EPI_LIST) {
            const uint4 prefetched = make_uint4(held[0], held[1], held[2], held[3]);
            mn_decode_epi_list(u, epis, place, values, x, y, prefetched);
        } else if (form == MN_DECODE_EPI_DECAY) {
            float made[3];
            decay(made, x);
            mn_decode_store_result(place, owner, u.to, words, made[1] * made[2]);
            store_made(epis, made);
        } else {
            mn_decode_store_result(place, owner, u.to, words, mn_decode_activation<true>(f, x) * y);
        }
    }

    /* From the sums, complete in all four lanes; the second is 1 where there is none. `epis`: of
     * the out_tile. No branches on the way to most words. */
    __device__ void run(float first, float second, const mn_decode_epi_instr *epis,
                        float (*values)[MN_DECODE_TILE_N]) {
        const bool silu = f == MN_UNARY_SILU, convolved = form == MN_DECODE_EPI_CONV;
        const bool rare = form >= MN_DECODE_EPI_F32 ||
                          (form == MN_DECODE_EPI_ACT && !silu && f != MN_UNARY_SIGMOID);
        const float x = mn_bf16_rounded(first + bias[0]), y = mn_bf16_rounded(second + bias[1]);
        if (__builtin_expect(rare, 0)) {
            run_rare(x, y, epis, values);
        } else {
            const float sum = convolve(x), added = add(x), at = convolved ? sum : x;
            const float s = mn_sigmoid(at);
            float result = form == MN_DECODE_EPI_ADD ? added : x;
            result = convolved ? (f ? sum * s : sum) : result;
            result = form == MN_DECODE_EPI_ACT ? (silu ? s * x : s) * y : result;
            mn_decode_store_result(place, owner, u.to, words, result);
            if (convolved) store_tail(x);
        }
        if (!stores_c) return;
        mn_bf16 *const one = u.c[0], *const other = u.c[1];
        if (owner && one) one[column] = __float2bfloat16_rn(x);
        if (owner && other) other[column] = __float2bfloat16_rn(y);
    }
};

#endif

#endif
