/* megakernel_steps.cu - what who plans a megakernel asks of the stages of megakernel_steps.cuh
 * (kernels/decode_image.h). */
#include "kernels/cuda/decode/megakernel_steps.cuh"

#include "kernels/cuda/bayes/bayes_step.cuh"
#include "kernels/cuda/importance/importance_step.cuh"

namespace mneme::decode {

extern "C" bool mn_megakernel_takes_step(mn_decode_step_kind step, const void *args) {
    switch (step) {
#define DECODE_STEP(op, folder, columns, results, memory)                                          \
    case MN_DECODE_STEP_##op: return folder::op##_step_supported((const mn_##op##_args *)args);
#include "kernels/decode_steps.def"
#undef DECODE_STEP
    default: return false;
    }
}

extern "C" void mn_megakernel_fill_job(void *to, const mn_decode_op *work, int64_t begin,
                                       int64_t end, int turn, bool waits) {
    mn_decode_job *job = (mn_decode_job *)to;
    *job = mn_decode_job_of(*work);
    const int pack = work->kind <= MN_DECODE_FILL && job->packs ? MN_DECODE_PACK : 1;
    job->begin = (int)(begin / pack), job->end = (int)((end + pack - 1) / pack);
    job->turn = turn, job->waits = waits;
}

}    // namespace mneme::decode
