/* sample.h - one call of an operator with memory of its own, for whoever walks the table: golden
 * vectors, tests, benchmarks.
 *
 *   mn_sample_init(&s, MN_OP_delta); call = (mn_call *)s.args; sizes, decay ...;
 *   mn_sample_allocate(&s, MN_ALL_FIELDS); mn_sample_draw(&s, seed); mn_op_run(context, s.op, ...);
 *   mn_sample_free(&s); */
#ifndef MN_OPS_SAMPLE_H
#define MN_OPS_SAMPLE_H

#include "ops/describe.h"

enum { MN_MAX_FIELDS = 32 };
#define MN_ALL_FIELDS UINT64_MAX

/* A tensor of a sample; `count` is 0 and the pointers NULL where the field is absent. */
typedef struct mn_sample_tensor {
    const mn_field *field;
    char axes[MN_MAX_RANK + 1];
    int64_t count, held;     // numbers of the tensor; those in memory, all or what repeats
    void *data, *partner;    // partner: gradient of an input, cotangent of a result
} mn_sample_tensor;

typedef struct mn_sample {
    mn_op_id op;
    bool forward_only;       // set before allocate: no gradients, no cotangents
    bool repeated;           // set before allocate: holds the start of large tensors only
    int n_tensors;
    mn_sample_tensor tensors[MN_MAX_FIELDS];
    _Alignas(64) unsigned char args[MN_MAX_ARGS_BYTES];
} mn_sample;

/* Zero sizes, float32, default parameters, no tensors. */
void mn_sample_init(mn_sample *sample, mn_op_id op);

/* Gives every tensor its memory, results and gradients filled with a NaN pattern. Bit i of `fields`
 * says whether optional field i is there; required ones always are. Sizes must be set. */
mn_status mn_sample_allocate(mn_sample *sample, uint64_t fields);
void mn_sample_free(mn_sample *sample);

/* Fills inputs and cotangents by their laws, as a function of `seed` and nothing else. */
void mn_sample_draw(mn_sample *sample, uint64_t seed);

/* The same for large tensors in little time: the first few ten thousand numbers are drawn, the rest
 * repeats them. For measuring, where nothing depends on the values being independent. Of a
 * `repeated` sample only these have memory: it serves to make a sample on a device. */
void mn_sample_draw_repeated(mn_sample *sample, uint64_t seed);

/* Every input and cotangent of `to` becomes that of `from`, of the same sizes, times 1 + size or
 * 1 - size as chance has it. */
void mn_sample_nudge(mn_sample *to, const mn_sample *from, double size, uint64_t seed);

/* Makes the result `result` use the memory of the input `input`, for decode steps in place. False
 * when there are no two such tensors of one size. The result's tensor is then absent. */
bool mn_sample_in_place(mn_sample *sample, const char *input, const char *result);

/* The tensor called `name`; NULL if there is none. */
mn_sample_tensor *mn_sample_find(mn_sample *sample, const char *name);

/* The words before and after every tensor are as allocate left them. */
bool mn_sample_guards_intact(const mn_sample *sample);

/* Element i of memory of the sample's type, as a double, and back. */
double mn_sample_get(const mn_sample *sample, const void *data, int64_t i);
void mn_sample_set(const mn_sample *sample, void *data, int64_t i, double x);

#endif
