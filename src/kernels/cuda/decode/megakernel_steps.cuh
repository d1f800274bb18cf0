/* megakernel_steps.cuh - stages that read and write memory as launches of their own do: small
 * works, and the steps of the operators of decode_steps.def.
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
 * do not keep all their registers. */
template <bool WORKS, bool ATTENDS, bool HYPER, unsigned STEPS, bool SMALL = true>
struct mn_decode_stages {
    static constexpr bool works = WORKS, attends = ATTENDS, hyper = HYPER, small = SMALL;
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
        if (mn_decode_run_attend(instr, smem.header, place, smem.scratch)) return;
        mn_decode_consumer_sync();
        mn_decode_publish(p, place);
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
