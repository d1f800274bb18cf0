/* program.h - what the functions of programs.c read and give: a golden file on a tape. */
#ifndef MN_CLI_CHECK_PROGRAM_H
#define MN_CLI_CHECK_PROGRAM_H

#include "io/safetensors.h"
#include "runtime/device.h"
#include "tape/tape.h"

enum { MN_PROGRAM_TENSORS = 40 };

/* How a tensor of the file lies in the tape's: [rows][heads][a][b] there, and here with `times`
 * heads for each, of which the first counts, and a and b exchanged if `turned`. `odds`: x of the
 * file is log(x / (1 - x)) here. With `lags` the file has (lag, b) and here is (b, lags) from the
 * last of so many lags to the first, as a convolution has its taps. */
typedef struct mn_program_layout {
    int64_t heads, a, b, times;
    bool turned, odds;
    int64_t lags;
} mn_program_layout;

typedef struct mn_program_tensor {
    char name[32];
    mn_program_layout layout;
    mn_tensor *x;
    int64_t count, stored;    // numbers here, and in the file
    void *data, *grad;        // inputs: memory of the tape's side
    double *value, *gradient; // as the file has them; gradient: of inputs
} mn_program_tensor;

typedef struct mn_program {
    const mn_safetensors *file;
    mn_tape *tape;
    mn_device *device;        // NULL: memory of the host
    mn_dtype dtype;
    bool rounded;             // inputs are rounded to bf16
    double nudge;             // and moved by that much
    int n_inputs, n_outputs;
    mn_program_tensor inputs[MN_PROGRAM_TENSORS], outputs[MN_PROGRAM_TENSORS];
} mn_program;

/* The input `name`; NULL where the file has none. Of rank 4 and 3 (B,T,H,X) and (B,T,1,X) or, with
 * `heads`, (B,T,H,1); others are parameters, (1,1,rows,cols). */
mn_tensor *mn_program_in(mn_program *p, const char *name);
mn_tensor *mn_program_in_heads(mn_program *p, const char *name);

/* An initial state of `layout`, as (1,1,1,count); NULL where the file has none. */
mn_tensor *mn_program_state_in(mn_program *p, const char *name, mn_program_layout layout);

/* A parameter whose layout says how it is taken. */
mn_tensor *mn_program_odds_in(mn_program *p, const char *name);

/* A parameter of `layout` as (1,1,rows,cols). */
mn_tensor *mn_program_param_in(mn_program *p, const char *name, int64_t rows, int64_t cols,
                               mn_program_layout layout);

/* Result `name` of the file. */
void mn_program_out(mn_program *p, const char *name, mn_tensor *x);
void mn_program_state_out(mn_program *p, const char *name, mn_tensor *x,
                          mn_program_layout layout);

/* Numbers of the metadata; `otherwise` where there is none. */
double mn_program_number(const mn_program *p, const char *key, double otherwise);

/* Size of an axis of a tensor of the file, which is there. */
int64_t mn_program_size(const mn_program *p, const char *name, int axis);

/* ---- program_layers.c: whole layers, as models have them ---- */

void mn_program_diff_layer(mn_program *p);
void mn_program_gated_attention(mn_program *p);
void mn_program_kda(mn_program *p);
void mn_program_qwen_gdn(mn_program *p);
void mn_program_lightning(mn_program *p);
void mn_program_log_linear(mn_program *p);
void mn_program_hawk(mn_program *p);
void mn_program_time_mix(mn_program *p);
void mn_program_channel_mix(mn_program *p);

/* ---- programs.c ---- */

typedef void (*mn_program_fn)(mn_program *p);

/* What makes `op`; NULL where nothing does. */
mn_program_fn mn_program_find(const char *op);

#endif
