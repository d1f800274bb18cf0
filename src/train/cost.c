/* cost.c - the cost model of steps on many ranks. */
#include "train/cost.h"

#include <math.h>

#include "base/util.h"
#include "ranks/tree.h"

/* Of a batch's time that goes into its backward pass: two of three matrix products. */
static const double backward_part = 2.0 / 3.0;

/* Bytes of others' gradients that a GPU has room for. */
static const double at_once = 128.0 * 1048576.0;

/* Numbers of gradients put aside while a rank has others to make, see reduce.h. */
static double sums_kept(const mn_cost_input *in, int64_t ranks, int64_t own) {
    const double all = (double)in->parameters;
    if (!in->shards_gradients || ranks == 1) return (double)mn_tree_slots(0, own) * all;
    if (own == 1) return 0.0;
    return (double)(mn_tree_slots(0, in->batches) + 1) * all / (double)ranks;
}

mn_cost mn_train_cost(const mn_cost_input *in, int64_t ranks) {
    const double all = (double)in->parameters * sizeof(float), n = (double)ranks;
    const int64_t own = mn_ceil_div(in->batches, ranks);
    const double others = (n - 1.0) / n, each = in->flops * (double)in->tokens / in->rate;
    const double rounds = in->shards_gradients ? (double)own : 1.0;
    mn_cost c;
    /* values and gradients whole, moments shared out, and one row of each rank for the own part */
    const bool asks = in->shards_parameters && ranks > 1;
    const double at_work = sizeof(float) * (double)(in->outside + in->block);
    const double held = asks ? fmin(all, all / n + at_work) : all;
    const double kept = 2.0 * held + 2.0 * all / n + sizeof(float) * sums_kept(in, ranks, own) +
                        (double)in->shadow * (double)in->parameters;
    const double on_the_way = ranks == 1 ? 0.0 : in->device ? fmin(all, at_once)
                              : asks ? at_work : all;
    c.bytes = (size_t)(kept + on_the_way) + in->activations;
    /* values that are asked for come in every round, forward and back */
    const double values = asks ? 2.0 * rounds : 1.0;
    c.sent = others * all * (rounds + values);
    c.compute = (double)own * each;
    const double gradients = others * all / in->bandwidth;
    const double hidden = in->device || asks ? 0.0 : fmin(gradients, backward_part * each);
    c.communicate = rounds * (gradients - hidden) + values * others * all / in->bandwidth;
    if (ranks > 1) c.communicate += (rounds + 2.0) * in->latency * ceil(log2(n));
    if (asks) c.communicate += values * (double)in->blocks * in->latency * ceil(log2(n));
    c.seconds = c.compute + c.communicate;
    c.tokens_per_second = (double)(in->batches * in->tokens) / c.seconds;
    c.efficiency = (double)in->batches * each / (n * c.seconds);
    return c;
}
