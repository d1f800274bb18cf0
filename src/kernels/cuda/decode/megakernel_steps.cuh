/* megakernel_steps.cuh - stages that read and write memory as launches of their own do: small
 * works, and the steps of the operators of decode_steps.def; and memories with what is around them,
 * which do not.
 *
 * A barrier of the whole grid stands in front of a stage that reads what earlier stages wrote:
 * plain tensors are complete behind it. Results that later stages read as hand-off words are
 * published from memory, by the block that wrote them. */
#ifndef MN_KERNELS_CUDA_DECODE_MEGAKERNEL_STEPS_CUH
#define MN_KERNELS_CUDA_DECODE_MEGAKERNEL_STEPS_CUH

#include "kernels/cuda/additive/additive_column_step.cuh"
#include "kernels/cuda/attention/attention_step.cuh"
#include "kernels/cuda/bayes/bayes_step.cuh"
#include "kernels/cuda/curvature/curvature_step.cuh"
#include "kernels/cuda/decode/megakernel.cuh"
#include "kernels/cuda/dplr/dplr_step.cuh"
#include "kernels/cuda/hyper/hyper_step.cuh"
#include "kernels/cuda/importance/importance_step.cuh"
#include "kernels/cuda/longhorn/longhorn_step.cuh"
#include "kernels/cuda/lru/lru_step.cuh"
#include "kernels/cuda/mesa/mesa_step.cuh"
#include "kernels/cuda/mlstm/mlstm_step.cuh"
#include "kernels/cuda/moebius/moebius_step.cuh"
#include "kernels/cuda/scan/scan_step.cuh"

namespace mneme::decode {

/* ---- instances ------------------------------------------------------------------------------- */

constexpr unsigned MN_DECODE_ALL_STEPS = (1u << MN_DECODE_STEPS) - 1;
static_assert(MN_DECODE_STEPS < 32, "a bit for each step");

constexpr bool mn_decode_same_name(const char *a, const char *b) {
    while (*a && *a == *b) a++, b++;
    return *a == *b;
}

/* The steps of a folder of kernels/cuda, as bits. */
constexpr unsigned mn_decode_steps_of(const char *name) {
    unsigned steps = 0;
#define DECODE_STEP(op, folder, columns, results, memory)                                          \
    if (mn_decode_same_name(#folder, name)) steps |= 1u << MN_DECODE_STEP_##op;
#include "kernels/decode_steps.def"
#undef DECODE_STEP
    return steps;
}

enum { MN_DECODE_MEMORY_SCRATCH, MN_DECODE_MEMORY_RING };

/* Those that take the ring of weights. */
constexpr unsigned MN_DECODE_RING_STEPS = 0
#define DECODE_STEP(op, folder, columns, results, memory)                                          \
    | (unsigned)(MN_DECODE_MEMORY_##memory == MN_DECODE_MEMORY_RING) << MN_DECODE_STEP_##op
#include "kernels/decode_steps.def"
#undef DECODE_STEP
    ;

/* Which stages an instance of the megakernel has: registers and stack of one do not depend on what
 * others have. WORKS: barriers, and stages behind them; SMALL: small works, beside which products
 * do not keep all their registers; STREAMS: attention without a barrier. */
template <bool WORKS, bool ATTENDS, bool HYPER, unsigned STEPS, bool SMALL = true,
          bool STREAMS = ATTENDS>
struct mn_decode_stages {
    static constexpr bool works = WORKS, attends = ATTENDS, hyper = HYPER, small = SMALL;
    static constexpr bool streams = STREAMS;
    static constexpr unsigned steps = STEPS, of_ring = STEPS & MN_DECODE_RING_STEPS;
    // stages of their own that models with those steps have
    static constexpr bool has_palimpsa = STEPS >> MN_DECODE_STEP_importance & 1;
    static constexpr bool has_kla = STEPS >> MN_DECODE_STEP_moebius & 1;
    static constexpr bool has_bayes = STEPS >> MN_DECODE_STEP_bayes & 1;
};

#if __CUDA_ARCH__ >= 900

/* The warps that compute; the producer warp takes no part. */
struct mn_decode_consumers {
    static constexpr int size = MN_DECODE_THREADS;
    static constexpr bool WIDE = false;

    __device__ static int threads(void) {
        return MN_DECODE_THREADS;
    }

    __device__ static int thread(int turn) {
        return (int)(threadIdx.x + MN_DECODE_THREADS - turn) % MN_DECODE_THREADS;
    }

    __device__ static void sync(void) {
        mn_decode_consumer_sync();
    }
};

/* Barrier `number` of this launch, counted from 1: consumers of all blocks arrive and wait. All
 * blocks are resident, and all have the same barriers in the same order. */
__device__ inline void mn_decode_grid_sync(mn_decode_header *header, unsigned number) {
    mn_decode_consumer_sync();
    if (threadIdx.x == 0) {
        const unsigned all = number * gridDim.x;
        unsigned arrived;
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(&header->arrived) : "memory");
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived)
                         : "l"(&header->arrived) : "memory");
        } while (arrived < all);
    }
    mn_decode_consumer_sync();
}

/* Works that wait for none of those in front run beside them, on other warps. `smem`: 32 floats. */
template <typename Block>
__device__ __noinline__ void mn_decode_run_small(const mn_decode_small_instr &p, float *smem) {
#pragma unroll 1
    for (int i = 0; i < p.n; i++) {
        const mn_decode_job &job = *(const mn_decode_job *)p.job[i];
        if (job.waits) Block::sync();
        mn_decode_run_op<Block>(job, mn_decode_dst{}, smem);
        __syncwarp();
    }
}

/* Whether an instruction is a step that takes the ring. */
template <typename Stages>
__device__ inline bool mn_decode_takes_ring(const mn_decode_instr &instr) {
    if constexpr (Stages::of_ring == 0) return false;
    else return instr.kind == MN_DECODE_STEP && (Stages::of_ring >> instr.work.step.step & 1);
}

template <typename Block, unsigned STEPS>
__device__ __noinline__ void mn_decode_run_step(const mn_decode_step_instr &p,
                                                unsigned char *smem) {
    switch (p.step) {
#define DECODE_STEP(op, folder, columns, results, memory)                                          \
    case MN_DECODE_STEP_##op:                                                                      \
        if constexpr ((STEPS >> MN_DECODE_STEP_##op & 1) != 0) {                                   \
            folder::op##_step<mn_bf16, Block>(*(const mn_##op##_args *)p.args, 0, p.head,          \
                                              p.column, smem);                                     \
        }                                                                                          \
        break;
#include "kernels/decode_steps.def"
#undef DECODE_STEP
    }
}

/* The token's rows from words, to shared memory behind attention's own. */
struct mn_decode_attend_words {
    const mn_bf16 *q, *k, *v;
    int64_t q_step;
    const mn_decode_attend_instr &p;
    const char *words;
    int n_q;

    __device__ mn_decode_attend_words(const mn_decode_attend_instr &instr, const char *at,
                                      unsigned char *to)
        : q((mn_bf16 *)to), q_step(instr.of.K), p(instr), words(at),
          n_q((int)(instr.of.H / instr.of.J * instr.of.K)) {
        k = q + n_q;
        v = k + instr.of.K;
    }

    __device__ void wait(bool last) const {
        const int K = (int)p.of.K, all = n_q + (last ? K + (int)p.of.V : 0);
#pragma unroll 1
        for (int i = 4 * threadIdx.x; i < all; i += 4 * MN_DECODE_THREADS) {
            const int at = i < n_q ? mn_decode_word_from(p.q.at, i)
                           : i < n_q + K ? mn_decode_word_from(p.k.at, i - n_q)
                                         : mn_decode_word_from(p.v.at, i - n_q - K);
            mn_decode_word2 two;
            do {
                two.fetch(words + at);
            } while (two.most() == MN_DECODE_SENTINEL);
            *(uint2 *)(q + i) = two.elements();
        }
    }
};

/* The sum of a head's parts, to words and memory. */
__device__ inline void mn_decode_sum_parts(const mn_decode_work_instr &w,
                                           const mn_decode_pipe &place, int n_parts) {
    const mn_decode_attention &p = w.attend.of;
    const int V = (int)p.V, words = w.published[0].words;
    mn_bf16 *const o = (mn_bf16 *)p.o + w.attend.head * p.V;
    const auto store = [&](int64_t a, float y) {
        const uint32_t two = mn_bf16_pack2(y, __shfl_down_sync(0xffffffffu, y, 1));
        if (a < V && a % 2 == 0 && words >= 0) {
            mn_decode_store_word(place, mn_decode_word_from(words, (unsigned)a), two);
        }
        if (a < V) o[a] = __float2bfloat16_rn(y);
    };
    attention::mn_step_combine_few(p.parts + w.attend.head * p.n_parts * (p.V + 2), n_parts, V,
                                   !p.relu, (float)p.eps, store);
}

/* Waits for the barrier that stands in front, if any, by itself: where the token stands is older.
 * Whether results have been published. */
__device__ __noinline__ bool mn_decode_run_attend(const mn_decode_instr &instr,
                                                  mn_decode_header *header,
                                                  const mn_decode_pipe place,
                                                  unsigned char *smem) {
    enum { N = 16 / sizeof(mn_bf16) };
    typedef mn_decode_consumers block;
    const mn_decode_attend_instr &p = instr.work.attend;
    const attention::mn_attend_span span(p.of);
    if (instr.sync) mn_decode_grid_sync(header, instr.sync);
    else block::sync();    // the scratch is no longer another stage's
    if (p.n_slots == 0 && span.parts() <= attention::MN_STEP_FEW_PARTS) {
        mn_decode_sum_parts(instr.work, place, (int)span.parts());
        return true;
    }
    if (p.n_slots == 0) {
        attention::mn_attend_combine<mn_bf16, block>(p.of, p.head, smem);
    } else if (p.by_words) {
        const mn_decode_attend_words token(p, place.words, smem + mn_decode_attend_bytes(p.of.K));
        attention::mn_attend_piece<mn_bf16, N, block>(p.of, p.head, p.slot, p.n_slots, token,
                                                      smem);
    } else {
        const attention::mn_attend_token<mn_bf16> token(p.of, p.head);
        attention::mn_attend_piece<mn_bf16, N, block>(p.of, p.head, p.slot, p.n_slots, token,
                                                      smem);
    }
    block::sync();    // the next stage's row lies where the scratch does
    return p.n_slots > 0;
}

template <typename Block>
__device__ __noinline__ void mn_decode_run_hyper_piece(const mn_decode_hyper_instr &p,
                                                       unsigned char *smem) {
    enum { N = 16 / sizeof(mn_bf16) };
    hyper::step_piece<mn_bf16, N, Block>(p.of, p.phase, p.head, p.slot, p.n_slots, smem);
}

enum { MN_DECODE_PUBLISH = 4 };    // pairs of elements that a thread has on their way

/* What this block has stored goes to words as well, two elements a thread at a time. */
__device__ inline void mn_decode_publish(const mn_decode_work_instr &p,
                                         const mn_decode_pipe &place) {
#pragma unroll 1
    for (int i = 0; i < p.n_published; i++) {
        const mn_decode_publication &out = p.published[i];
        if (out.words < 0) continue;
#pragma unroll(MN_DECODE_PUBLISH)
        for (int k = threadIdx.x * 2; k < out.count; k += 2 * MN_DECODE_THREADS) {
            const mn_bf16 low = out.from[k], high = k + 1 < out.count ? out.from[k + 1] : low;
            mn_decode_store_word(place, mn_decode_word_from(out.words, (unsigned)k),
                                 mn_bf16_pack2(mn_float(low), mn_float(high)));
        }
    }
}

template <typename Stages>
__device__ inline void mn_decode_run_work(mn_decode_smem &smem, const mn_decode_instr &instr,
                                          const mn_decode_pipe &place) {
    const mn_decode_work_instr &p = instr.work;
    typedef mn_decode_consumers block;
    if (Stages::attends && instr.kind == MN_DECODE_ATTEND) {
        const bool done = mn_decode_run_attend(instr, smem.header, place, smem.scratch);
        if (!done) mn_decode_publish(p, place);
        return;
    }
    mn_decode_consumer_sync();    // the scratch is no longer another stage's
    if constexpr (Stages::small) {
        if (instr.kind == MN_DECODE_SMALL) {
            mn_decode_run_small<block>(p.small, (float *)smem.scratch);
        }
    }
    if constexpr (Stages::steps != 0) {
        if (instr.kind == MN_DECODE_STEP) {
            unsigned char *memory = mn_decode_takes_ring<Stages>(instr) ? smem.ring[0]
                                                                        : smem.scratch;
            mn_decode_run_step<block, Stages::steps>(p.step, memory);
        }
    }
    if constexpr (Stages::hyper) {
        if (instr.kind == MN_DECODE_HYPER) mn_decode_run_hyper_piece<block>(p.hyper, smem.scratch);
    }
    mn_decode_consumer_sync();
    if (mn_decode_takes_ring<Stages>(instr)) mn_decode_clear_ring(smem, MN_DECODE_THREADS);
    mn_decode_publish(p, place);
}

/* ---- memories with what is around them ------------------------------------------------------- */

/* A token of Palimpsa, of Kalman Linear Attention and of the Bayesian Layer as stages without a
 * barrier: what they read comes as hand-off words, and the small works in front of them and behind
 * them are done in registers (kernels/decode_image.h).
 *
 * States and parameters are asked for before the words are there. Hand-off words of the last
 * result are stored first, then the plain tensors. */

/* A number of a parameter in either type. */
__device__ inline float mn_decode_param(const void *data, int i, bool wide) {
    return wide ? ((const float *)data)[i] : mn_float(((const mn_bf16 *)data)[i]);
}

/* Palimpsa. */

/* All that a thread waits for: a lane has elements 8 lane and on of q and k. */
struct mn_decode_palimpsa_inputs {
    mn_decode_word4 q, k;
    mn_decode_word1 v, by, b, g;

    __device__ void fetch(const mn_decode_palimpsa_instr &m, const mn_decode_pipe &place) {
        const int lane = threadIdx.x % 32, column = lane % MN_DECODE_TILE_V, first = 8 * lane;
        const char *const words = place.words;
        const bool inside = first < m.K, has_by = m.has_by;
        const char *const at_q = words + mn_decode_word_from(m.q.at, inside ? first : 0);
        const char *const at_k = words + mn_decode_word_from(m.k.at, inside ? first : 0);
        const char *const at_v = words + mn_decode_word_from(m.v.at, column);
        const char *const at_b = words + mn_decode_word_from(m.b.at, column);
        uint32_t most;
        by.none();
        do {
            q.fetch(at_q);
            k.fetch(at_k);
            v.fetch(at_v);
            b.fetch(at_b);
            g.fetch(words + m.g.at);
            if (has_by) by.fetch(words + m.by.at);
            most = max(max(q.most(), k.most()), max(v.most(), b.most()));
            most = max(most, max(g.most(), by.most()));
        } while (most == MN_DECODE_SENTINEL);
    }
};

/* Eight numbers, normalised and rounded, and their own lane's part of a row. */
struct mn_decode_normed_row {
    uint32_t two[4];

    __device__ mn_decode_normed_row(const mn_decode_word4 &from, bool inside,
                                    const mn_decode_qk_norm &front) {
        float x[8], squares = 0.0f;
        from.get(x);
#pragma unroll
        for (int j = 0; j < 8; j++) squares = fmaf(x[j], x[j], squares);
        squares = mn_warp_sum(inside ? squares : 0.0f);
        const float factor = mn_decode_l2_scale(front, squares);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            two[i] = mn_bf16_pack2(x[2 * i] * factor, x[2 * i + 1] * factor);
        }
    }

    /* The eight numbers of another lane. */
    __device__ void of_lane(float (&x)[8], int lane) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t pair = __shfl_sync(0xffffffffu, two[i], lane);
            x[2 * i] = mn_bf16_low(pair), x[2 * i + 1] = mn_bf16_high(pair);
        }
    }

    __device__ void store(mn_bf16 *to) const {
        ((uint4 *)to)[threadIdx.x % 32] = make_uint4(two[0], two[1], two[2], two[3]);
    }
};

/* x of column `lane` from lanes 0 to 7 of a warp. */
__device__ inline void mn_decode_store_columns(const mn_decode_pipe &place,
                                               const mn_decode_result_at &at, float x) {
    const int lane = threadIdx.x % 32;
    const uint32_t two = mn_bf16_pack2(x, __shfl_down_sync(0xffffffffu, x, 1));
    if (lane < MN_DECODE_TILE_V && lane % 2 == 0 && at.handoff >= 0) {
        mn_decode_store_word(place, at.handoff + lane * 2, two);
    }
    if (lane < MN_DECODE_TILE_V && at.to) at.to[lane] = __float2bfloat16_rn(x);
}

/* A thread's eight rows of a column. */
struct mn_decode_palimpsa_rows {
    float mu[8], I[8];

    __device__ void load(const mn_decode_palimpsa_instr &m, int64_t at) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            mu[j] = __ldcg(m.mean + at + j * m.V);
            I[j] = __ldcg(m.importance + at + j * m.V);
        }
    }

    /* a I + (1 - a) ip + k^2 b, (a I mu + k v) / I; returns mu'q. */
    __device__ float next(const float (&q)[8], const float (&k)[8], float a, float fresh, float v,
                          float b) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float kept = a * I[j];
            I[j] = fmaf(k[j] * k[j], b, kept + fresh) + importance::min_importance;
            mu[j] = fmaf(k[j], v, kept * mu[j]) * recurrent::mn_rcp_ftz(I[j]);
            sum = fmaf(q[j], mu[j], sum);
        }
        return sum;
    }

    __device__ void store(const mn_decode_palimpsa_instr &m, int64_t at) const {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            m.mean[at + j * m.V] = mu[j];
            m.importance[at + j * m.V] = I[j];
        }
    }
};

/* What follows from the sum over rows, a lane of warp 0 having a column of it. */
__device__ inline void mn_decode_palimpsa_results(const mn_decode_palimpsa_instr &m,
                                                  const mn_decode_pipe &place, float o, float raw,
                                                  float gated, float skip) {
    const float skipped = mn_bf16_rounded(raw * skip), read = mn_bf16_rounded(m.scale * o);
    if (m.skip) {
        mn_decode_store_columns(place, m.sum, read + skipped);
        mn_decode_store_columns(place, m.skipped, skipped);
    }
    mn_decode_store_columns(place, m.o, read);
    if (m.has_by) mn_decode_store_columns(place, m.gated, gated);
}

/* Warps that have rows make q and k each for themselves: that takes no meeting of the block. */
__device__ inline void mn_decode_palimpsa_step(mn_decode_smem &smem,
                                               const mn_decode_palimpsa_instr &m,
                                               mn_decode_pipe &place) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = (m.K + 31) / 32;
    const int column = lane % MN_DECODE_TILE_V, row = warp * 32 + lane / MN_DECODE_TILE_V * 8;
    const int64_t at = row * (int64_t)m.V + column;
    const bool inside = row < m.K;
    float raw = 0.0f, gated = 0.0f, skip = 0.0f;
    if (warp < n_warps) {
        mn_decode_palimpsa_rows rows = {};
        if (inside) rows.load(m, at);
        const float prior = mn_decode_param(m.prior, 0, m.prior_wide);
        if (m.skip) skip = mn_float(*m.skip);
        mn_decode_palimpsa_inputs in;
        in.fetch(m, place);
        __syncwarp();
        const float ip = mn_bf16_rounded(m.prior_wide ? expf(prior) : __expf(prior));
        const float g = __uint_as_float(in.g.a), a = expf(g), fresh = -expm1f(g) * ip;
        const mn_decode_normed_row q(in.q, 8 * lane < m.K, m.front[0]);
        const mn_decode_normed_row k(in.k, 8 * lane < m.K, m.front[1]);
        float own_q[8], own_k[8];
        q.of_lane(own_q, row / 8);
        k.of_lane(own_k, row / 8);
        raw = in.v.number(column % 2);
        gated = m.has_by ? mn_bf16_rounded(raw * in.by.number(m.by.odd)) : raw;
        float o = rows.next(own_q, own_k, a, fresh, gated, in.b.number(column % 2));
        if (!inside) o = 0.0f;
        o += __shfl_xor_sync(0xffffffffu, o, 8);
        o += __shfl_xor_sync(0xffffffffu, o, 16);
        if (lane < MN_DECODE_TILE_V) smem.columns[place.buf][warp][lane].x = o;
        if (inside) rows.store(m, at);
        if (warp == 0 && 8 * lane < m.K) {
            if (m.front[0].to) q.store(m.front[0].to);
            if (m.front[1].to) k.store(m.front[1].to);
        }
        if (threadIdx.x == 0 && m.exp_prior) *m.exp_prior = __float2bfloat16_rn(ip);
        if (threadIdx.x == 0 && m.wide_prior) *m.wide_prior = ip;
    }
    mn_decode_consumer_sync();
    if (warp == 0) {
        float o = 0.0f;
#pragma unroll 1
        for (int i = 0; i < n_warps; i++) o += smem.columns[place.buf][i][column].x;
        mn_decode_palimpsa_results(m, place, o, raw, gated, skip);
    }
    place.buf ^= 1;
}

/* Kalman Linear Attention. */

/* Slots of a lane, each MN_DECODE_KLA_LANES behind the one before. */
struct mn_decode_kla_slots {
    float a[MN_DECODE_KLA_SLOTS], p[MN_DECODE_KLA_SLOTS];
    float lam[MN_DECODE_KLA_SLOTS], eta[MN_DECODE_KLA_SLOTS];

    /* a and p, which go by parameters alone, and the states. `at`: of the first slot. */
    __device__ void load(const mn_decode_kla_instr &m, int slot, int at) {
#pragma unroll
        for (int i = 0; i < MN_DECODE_KLA_SLOTS; i++) {
            const int to = at + i * MN_DECODE_KLA_LANES;
            if (slot + i * MN_DECODE_KLA_LANES >= m.K) break;
            float x[MN_DECODE_KLA_DYNAMICS];
            lam[i] = __ldcg(m.lam + to), eta[i] = __ldcg(m.eta + to);
#pragma unroll
            for (int k = 0; k < MN_DECODE_KLA_DYNAMICS; k++) x[k] = m.dynamics[k][to];
#pragma unroll
            for (int k = 0; k < MN_DECODE_KLA_DYNAMICS; k++) {
                x[k] = mn_bf16_rounded(x[k]);
                m.rounded[k][to] = __float2bfloat16_rn(x[k]);
            }
            const float2 made = moebius::discretise(x[0], x[1], x[2], m.mode);
            m.a[to] = a[i] = made.x, m.p[to] = p[i] = made.y;
        }
    }
};

/* All that a lane waits for. */
struct mn_decode_kla_inputs {
    mn_decode_word1 q[MN_DECODE_KLA_SLOTS], k[MN_DECODE_KLA_SLOTS], v, prec, z, gate;

    __device__ void fetch(const mn_decode_kla_instr &m, const mn_decode_pipe &place, int channel,
                          int slot) {
        const char *const words = place.words;
        const bool has_z = m.weight != nullptr, has_gate = m.has_gate;
        uint32_t most;
        z.none();
        gate.none();
#pragma unroll
        for (int i = 0; i < MN_DECODE_KLA_SLOTS; i++) q[i].none(), k[i].none();
        do {
            v.fetch(words + mn_decode_word_from(m.v.at, channel));
            prec.fetch(words + mn_decode_word_from(m.prec.at, channel));
            if (has_z) z.fetch(words + mn_decode_word_from(m.z.at, channel));
            if (has_gate) gate.fetch(words + mn_decode_word_from(m.gate.at, channel));
            most = max(max(v.most(), prec.most()), max(z.most(), gate.most()));
#pragma unroll
            for (int i = 0; i < MN_DECODE_KLA_SLOTS; i++) {
                const int s = slot + i * MN_DECODE_KLA_LANES;
                if (s >= m.K) break;
                q[i].fetch(words + mn_decode_word_from(m.q.at, s));
                k[i].fetch(words + mn_decode_word_from(m.k.at, s));
                most = max(most, max(q[i].most(), k[i].most()));
            }
        } while (most == MN_DECODE_SENTINEL);
    }
};

__device__ inline float mn_decode_half_sum(float x) {
#pragma unroll
    for (int lanes = MN_DECODE_KLA_LANES / 2; lanes > 0; lanes /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, lanes);
    }
    return x;
}

/* Numbers of a half of a warp, normalised and rounded; stored where the norm's result goes. */
__device__ inline void mn_decode_norm_slots(float (&x)[MN_DECODE_KLA_SLOTS],
                                            const mn_decode_word1 (&from)[MN_DECODE_KLA_SLOTS],
                                            const mn_decode_qk_norm &front, int slot, int K) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < MN_DECODE_KLA_SLOTS; i++) {
        x[i] = from[i].number(slot % 2);
        squares = fmaf(x[i], x[i], squares);
    }
    const float factor = mn_decode_l2_scale(front, mn_decode_half_sum(squares));
#pragma unroll
    for (int i = 0; i < MN_DECODE_KLA_SLOTS; i++) {
        const int s = slot + i * MN_DECODE_KLA_LANES;
        x[i] = mn_bf16_rounded(x[i] * factor);
        if (front.to && threadIdx.x < MN_DECODE_KLA_LANES && s < K) {
            front.to[s] = __float2bfloat16_rn(x[i]);
        }
    }
}

/* x of two channels, from the first lane of either half of a warp. */
__device__ inline void mn_decode_store_halves(const mn_decode_pipe &place,
                                              const mn_decode_result_at &at, int channel,
                                              float x) {
    const int lane = threadIdx.x % 32;
    const uint32_t two = mn_bf16_pack2(x, __shfl_down_sync(0xffffffffu, x, MN_DECODE_KLA_LANES));
    if (lane == 0 && at.handoff >= 0) mn_decode_store_word(place, at.handoff + channel * 2, two);
    if (lane % MN_DECODE_KLA_LANES == 0 && at.to) at.to[channel] = __float2bfloat16_rn(x);
}

/* Half a warp has a channel, so that warps meet nowhere. */
__device__ inline void mn_decode_kla_step(const mn_decode_kla_instr &m,
                                          const mn_decode_pipe &place) {
    const int lane = threadIdx.x % 32, slot = lane % MN_DECODE_KLA_LANES;
    const int channel = threadIdx.x / MN_DECODE_KLA_LANES, at = channel * m.K + slot;
    if (threadIdx.x >= MN_DECODE_KLA_COLUMNS * MN_DECODE_KLA_LANES) return;
    mn_decode_kla_slots cell = {};
    cell.load(m, slot, at);
    const float weight =
        m.weight ? mn_decode_param(m.weight, channel * m.weight_step, m.weight_wide) : 0.0f;
    mn_decode_kla_inputs in;
    in.fetch(m, place, channel, slot);
    __syncwarp();
    float q[MN_DECODE_KLA_SLOTS], k[MN_DECODE_KLA_SLOTS], y = 0.0f, yvar = 0.0f;
    mn_decode_norm_slots(q, in.q, m.front[0], slot, m.K);
    mn_decode_norm_slots(k, in.k, m.front[1], slot, m.K);
    const float v = in.v.number(channel % 2), prec = in.prec.number(channel % 2);
#pragma unroll
    for (int i = 0; i < MN_DECODE_KLA_SLOTS; i++) {
        const int to = at + i * MN_DECODE_KLA_LANES;
        if (slot + i * MN_DECODE_KLA_LANES >= m.K) break;
        const moebius::step_inputs x = { cell.a[i], cell.p[i], k[i], q[i], v, prec };
        moebius::moebius_step_slot(&y, &yvar, cell.lam[i], cell.eta[i], x, m.from_prior);
        m.lam[to] = cell.lam[i], m.eta[to] = cell.eta[i];
    }
    __syncwarp();
    y = mn_bf16_rounded(mn_decode_half_sum(y));
    const float weighted = mn_bf16_rounded(in.z.number(channel % 2) * weight);
    const float sum = m.weight ? mn_bf16_rounded(y + weighted) : y;
    if (m.has_gate) mn_decode_store_halves(place, m.out, channel,
                                           sum * in.gate.number(channel % 2));
    if (m.weight) {
        mn_decode_store_halves(place, m.sum, channel, sum);
        mn_decode_store_halves(place, m.weighted, channel, weighted);
    }
    mn_decode_store_halves(place, m.y, channel, y);
}

/* The Bayesian Layer. */

typedef bayes::step_smem<MN_DECODE_THREADS, bayes::STEP_NARROW> mn_decode_bayes_numbers;

/* The token, behind the numbers of the step. */
struct mn_decode_bayes_smem {
    alignas(16) unsigned char numbers[sizeof(mn_decode_bayes_numbers)];
    alignas(16) mn_bf16 q[bayes::STEP_NARROW], k[bayes::STEP_NARROW];
    mn_bf16 la[bayes::STEP_NARROW], v[bayes::STEP_NARROW], l2, r2;
};

static_assert(sizeof(mn_decode_bayes_smem) <= MN_DECODE_SCRATCH, "the Bayesian Layer's token");

__device__ inline uint32_t mn_decode_wait_word(const char *at) {
    mn_decode_word1 one;
    do {
        one.fetch(at);
    } while (one.most() == MN_DECODE_SENTINEL);
    return one.a;
}

/* A row of K, normalised, by a warp. */
__device__ inline void mn_decode_bayes_row(mn_bf16 *to, const char *words,
                                           const mn_decode_source &from,
                                           const mn_decode_qk_norm &front, int K) {
    const int lane = threadIdx.x % 32;
    const bool inside = 8 * lane < K;
    mn_decode_word4 row;
    row.none();
    if (inside) {
        do {
            row.fetch(words + mn_decode_word_from(from.at, 8 * lane));
        } while (row.most() == MN_DECODE_SENTINEL);
    }
    __syncwarp();
    const mn_decode_normed_row made(row, inside, front);
    if (!inside) return;
    made.store(to);
    if (front.to) made.store(front.to);
}

/* One of the first warps each: q, k, the decay and the noises, v. */
__device__ inline void mn_decode_bayes_token(mn_decode_bayes_smem &token,
                                             const mn_decode_bayes_instr &m, const char *words) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp == 0) mn_decode_bayes_row(token.q, words, m.q, m.front[0], m.K);
    if (warp == 1) mn_decode_bayes_row(token.k, words, m.k, m.front[1], m.K);
    if (warp == 2) {
        mn_decode_word1 la, l2, r2;
        la.a = mn_decode_wait_word(words + m.la.at);
        l2.a = mn_decode_wait_word(words + m.l2.at);
        r2.a = mn_decode_wait_word(words + m.r2.at);
        const mn_bf16 decay = __float2bfloat16_rn(la.number(m.la.odd));
        for (int i = lane; i < m.K; i += 32) {
            token.la[i] = decay;
            if (m.la_to) m.la_to[i] = decay;
        }
        if (lane == 0) token.l2 = __float2bfloat16_rn(l2.number(m.l2.odd));
        if (lane == 0) token.r2 = __float2bfloat16_rn(r2.number(m.r2.odd));
        if (lane == 0 && m.p0_to) *m.p0_to = __float2bfloat16_rn(m.p0);
    }
    if (warp == 3) {
        for (int i = 2 * lane; i < m.V; i += 64) {
            *(uint32_t *)(token.v + i) = mn_decode_wait_word(words
                                                             + mn_decode_word_from(m.v.at, i));
        }
    }
}

/* A call: its sums in double would take registers of products. */
__device__ __noinline__ void mn_decode_bayes_step(mn_decode_smem &smem,
                                                  const mn_decode_bayes_instr &m,
                                                  const mn_decode_pipe place) {
    mn_decode_bayes_smem &token = *(mn_decode_bayes_smem *)smem.scratch;
    const mn_bayes_args &p = *(const mn_bayes_args *)m.args;
    mn_decode_consumer_sync();    // the scratch is no longer another stage's
    mn_decode_bayes_token(token, m, place.words);
    mn_decode_consumer_sync();
    const bayes::step_token<mn_bf16> of = { token.q, token.k, token.la, token.v - m.first,
                                            mn_float(token.l2), mn_float(token.r2) };
    bayes::bayes_step_group<mn_bf16, mn_decode_consumers, mn_decode_bayes_numbers>(
        p, 0, m.head, m.group, of, token.numbers);
    mn_decode_consumer_sync();
    for (int i = 2 * threadIdx.x; i < m.V && m.o.handoff >= 0; i += 2 * MN_DECODE_THREADS) {
        mn_decode_store_word(place, mn_decode_word_from(m.o.handoff, (unsigned)i),
                             mn_bf16_pack2(mn_float(m.o.to[i]), mn_float(m.o.to[i + 1])));
    }
}

#endif

static_assert(sizeof(mn_decode_job) <= MN_DECODE_JOB_BYTES, "a small work");
#define DECODE_STEP(op, folder, columns, results, memory)                                          \
    static_assert(sizeof(mn_##op##_args) <= MN_DECODE_ARGS_BYTES, "arguments of " #op);
#include "kernels/decode_steps.def"
#undef DECODE_STEP
static_assert(sizeof(bayes::step_smem<MN_DECODE_THREADS, bayes::STEP_NARROW>) <=
              MN_DECODE_SCRATCH && sizeof(importance::step_smem) <= MN_DECODE_SCRATCH,
              "a step's shared memory");
static_assert(sizeof(curvature::step_smem) <= MN_DECODE_SCRATCH &&
              sizeof(dplr::step_smem<MN_DECODE_THREADS>) <= MN_DECODE_SCRATCH &&
              sizeof(mlstm::step_tile<mn_cta<MN_DECODE_THREADS>>::smem) <= MN_DECODE_SCRATCH &&
              sizeof(longhorn::step_of<recurrent::MN_COLUMNS_CELL, 64, mn_cta<MN_DECODE_THREADS>,
                                       longhorn::STEP_OWNERS / 32>::smem) <= MN_DECODE_SCRATCH,
              "a step's shared memory");
static_assert((int)importance::STEP_COLUMNS == 8 && (int)moebius::STEP_COLUMNS == 8 &&
              (int)dplr::STEP_COLUMNS == 64 && (int)additive::STEP_COLUMNS == 16 &&
              8 * (int)longhorn::STAGE_WARPS == 16 && (int)lru::STEP_COLUMNS == 32 &&
              (int)scan::STEP_COLUMNS == 16 &&
              mlstm::step_tile<mn_cta<MN_DECODE_THREADS>>::columns == 64,
              "columns of decode_steps.def");
static_assert(sizeof(attention::mn_attend_smem<mn_vec_width<mn_bf16>()>) +
              attention::MN_STEP_HEADS * MN_DECODE_ATTEND_WIDEST * sizeof(float) <=
              MN_DECODE_SCRATCH && (int)attention::MN_STEP_THREADS == (int)MN_DECODE_THREADS,
              "attention's shared memory");
static_assert(attention::mn_attend_smem<mn_vec_width<mn_bf16>()>::bytes(128) <=
              (size_t)(4 * (MN_DECODE_ATTEND_WIDEST + 4 * MN_DECODE_ATTEND_KEYS +
                            8 * MN_DECODE_THREADS + MN_DECODE_WARPS + 2 + 4 * 128)),
              "mn_decode_attend_bytes");
static_assert(hyper::step_smem<mn_vec_width<mn_bf16>()>::bytes(
                  MN_DECODE_ATTEND_WIDEST, MN_DECODE_HYPER_RANKS, MN_DECODE_HYPER_RANKS) <=
              MN_DECODE_SCRATCH, "shared memory of HyperMLP");

}    // namespace mneme::decode

#endif
