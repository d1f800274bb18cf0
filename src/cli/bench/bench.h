/* bench.h - measuring operators: cases, what they count, ceilings, results.
 *
 * A case is a row of bench.def. Its ceiling is something this machine cannot do faster, done in the
 * same run between the repetitions of the operator; the share is the time of the ceiling for the
 * same amount of work divided by the operator's time. */
#ifndef MN_CLI_BENCH_BENCH_H
#define MN_CLI_BENCH_BENCH_H

#include <jansson.h>
#include <stdio.h>

#include "ops/context.h"
#include "ops/sample.h"

typedef enum mn_bench_pass {
    MN_BENCH_FORWARD,
    MN_BENCH_TRAIN,    // forward and backward, timed as one
    MN_BENCH_STEP,     // one token, states in place
} mn_bench_pass;

typedef enum mn_ceiling_id {
#define CEILING(id, name, unit, about) MN_CEILING_##id,
#include "cli/bench/ceilings.def"
#undef CEILING
    MN_CEILING_COUNT
} mn_ceiling_id;

typedef struct mn_ceiling_info {
    const char *name, *unit, *about;
} mn_ceiling_info;

typedef struct mn_bench_case {
    const char *name;
    mn_op_id op;
    mn_bench_pass pass;
    mn_ceiling_id ceiling;
    double asked;        // share the requirements name; 0: none
    const char *with;    // optional inputs, and parameters as name=value
    mn_call call;
} mn_bench_case;

/* FULL is what bench.def says, QUICK the same in a fraction of a second, CHECK small enough for the
 * reference. */
typedef enum mn_bench_scale { MN_BENCH_FULL, MN_BENCH_QUICK, MN_BENCH_CHECK } mn_bench_scale;

/* ---- case.c ---- */

/* The cases of the CPU or of a GPU. */
const mn_bench_case *mn_bench_cases(int *count, bool device);

/* Whether the ceiling is of a GPU. */
bool mn_ceiling_of_device(mn_ceiling_id id);
const mn_ceiling_info *mn_ceiling_describe(mn_ceiling_id id);
const char *mn_bench_pass_name(mn_bench_pass pass);

/* A sample of the case, allocated and not drawn, states of a STEP in place. Free it, also after
 * failure, with mn_sample_free. */
mn_status mn_bench_open(mn_sample *sample, const mn_bench_case *which, mn_bench_scale scale,
                        mn_dtype dtype, bool repeated);

/* Floating-point operations in the recurrent form (a backward pass counts as two forward), and
 * bytes that the case has to move in a call of `dtype`. */
double mn_bench_work(const mn_bench_case *which, const mn_sample *sample);
double mn_bench_bytes(const mn_bench_case *which, const mn_sample *sample, mn_dtype dtype);

/* Cells of the state times tokens: what the DIVIDE ceiling counts. */
double mn_bench_cells(const mn_bench_case *which, const mn_sample *sample);

/* ---- check.c ---- */

/* Runs a small form of the case on `context` and in double on the reference and compares. On a
 * device, in `dtype` and on inputs rounded to it. */
mn_status mn_bench_check(const mn_bench_case *which, mn_context *context, mn_context *reference,
                         mn_dtype dtype);

/* ---- ceiling.c ---- */

typedef struct mn_cell_loop mn_cell_loop;

typedef struct mn_ceiling {
    mn_ceiling_id id;
    mn_context *context;          // borrowed
    double flop, bytes, cells;    // of the case
    float *a, *b, *c;
    int64_t count;               // floats in a
    const mn_cell_loop *loop;    // of DIVIDE; NULL: this target has none
} mn_ceiling;

/* Memory and sizes for the ceiling of a case; THREADS needs none of it. */
mn_status mn_ceiling_open(mn_ceiling *ceiling, const mn_bench_case *which, const mn_sample *sample,
                          mn_context *context);
void mn_ceiling_close(mn_ceiling *ceiling);

/* Runs it once: the seconds it needs for the amount of work of the case; NaN where the target has
 * no such ceiling. */
double mn_ceiling_seconds(mn_ceiling *ceiling);

/* ---- measure.c ---- */

typedef struct mn_bench_options {
    int n_runs;       // 0: 7, fewer where the case is slow
    int n_layers;     // of models on a GPU; 0: as many as the case has
    int n_threads;    // 0: one per core
    const char *target;
    const char *device;      // NULL: the CPU
    mn_dtype dtype;          // of a device's cases
    int bits;                // of the weights of models that decode there: 8 or 4; 0: of dtype
    int streams;             // sequences that decode there in a batch; 0: none
    mn_bench_scale scale;    // FULL or QUICK
} mn_bench_options;

typedef struct mn_bench_result {
    const mn_bench_case *which;
    mn_call call;    // sizes as run
    int n_runs;
    double flop, bytes, amount;    // amount: in the ceiling's unit
    double min_s, median_s;        // operator
    double first_s, second_s;      // of a device: the first two calls with all that they wait for
    double ceiling_min_s, ceiling_median_s;
    double share;    // ceiling's median time over the operator's
} mn_bench_result;

typedef struct mn_bench_gpu mn_bench_gpu;

/* The contexts of one run of the program. */
typedef struct mn_bench {
    mn_bench_options options;
    mn_context *context, *single, *reference;
    mn_bench_gpu *gpu;    // NULL: the CPU is measured
} mn_bench;

mn_status mn_bench_create(mn_bench *bench, const mn_bench_options *options);
void mn_bench_destroy(mn_bench *bench);

/* Checks the case, then repeats ceiling, operator, ceiling, operator ... after a warm-up. */
mn_status mn_bench_measure(mn_bench_result *result, const mn_bench *bench,
                           const mn_bench_case *which);

/* Sorts `x`; the mean of the two in the middle when n is even. */
double mn_bench_median(double *x, int n);

/* ---- gpu.c ---- */

/* Memory and events for measuring on the context's device; measures the ceilings once at their
 * best. Destroy accepts NULL. */
mn_status mn_bench_gpu_create(mn_bench_gpu **out, mn_context *context);
void mn_bench_gpu_destroy(mn_bench_gpu *gpu);

/* Whether the device has the kernels of the case; if not, the message names the operator. */
mn_status mn_bench_gpu_serves(const mn_bench_case *which);

/* mn_bench_measure on the device: copy and operator in turn, each between two events; inputs come
 * from memory because several sets of them take turns. The first two calls of the case in this run
 * of the program are timed from the host, which shows what loading a kernel costs. */
mn_status mn_bench_gpu_measure(mn_bench_result *result, const mn_bench *bench,
                               const mn_bench_case *which);

/* The same for one sample, drawn, `n` times, without a check; result->which is set. */
mn_status mn_bench_gpu_time(mn_bench_result *result, const mn_bench *bench, const mn_sample *sample,
                            int n);

/* Large copies in bytes a second, and matrix products in floating-point operations a second; NaN
 * where there is no cuBLASLt. */
double mn_bench_gpu_copy_rate(const mn_bench_gpu *gpu);
double mn_bench_gpu_product_rate(const mn_bench_gpu *gpu);

/* ---- product.c ---- */

/* Floating-point operations a second of the device's bf16 matrix product; NaN without cuBLASLt. */
double mn_bench_product_rate(mn_device *device);

/* ---- report.c ---- */

void mn_bench_print_header(FILE *out, const mn_bench *bench);
void mn_bench_print(FILE *out, const mn_bench *bench, const mn_bench_result *result);
void mn_bench_print_footer(FILE *out, const mn_bench *bench, const mn_bench_result *results,
                           int count);

/* The GPU, and its ceilings at their best. */
void mn_bench_print_gpu(FILE *out, const mn_bench *bench);

/* What a document of results begins with: `what` was measured, by which program, on what. */
json_t *mn_bench_root_json(const mn_bench *bench, const char *what);

/* All of it as one JSON document on `out`. */
mn_status mn_bench_json(FILE *out, const mn_bench *bench, const mn_bench_result *results,
                        int count);

/* ---- grid.c ---- */

/* Every operator whose name contains `only` at every shape of grid.def. Returns the exit status. */
int mn_bench_grid(const mn_bench_options *options, const char *only, bool json, bool list);

/* ---- train.c ---- */

/* Times the training steps of train.def whose names contain `only` (NULL: all) and prints
 * them. Returns the exit status. */
int mn_bench_train(const mn_bench_options *options, const char *only, bool json, bool list);

/* ---- train_gpu.c ---- */

/* The same on a GPU with the models of train_cuda.def: training steps, memory against its
 * prediction, time to the first step, prefill and decoding. */
int mn_bench_train_gpu(const mn_bench_options *options, const char *only, bool json, bool list);

/* Prefill and decoding alone, of the same models. */
int mn_bench_infer_gpu(const mn_bench_options *options, const char *only, bool json, bool list);

/* ---- decode.c ---- */

/* Decoding on the CPU with weights of float32, 8 and 4 bits. Returns the exit status. */
int mn_bench_infer(const mn_bench_options *options, bool json);

#endif
