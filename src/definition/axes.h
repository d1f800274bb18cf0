/* axes.h - the three choices that make a layer, as small tables of functions over one head.
 *
 *   predict (transition): the memory drifts before the token arrives
 *   observe (belief):     the token's evidence enters
 *   run     (read):       a query becomes an output
 *
 * In equations x~ is what the transition left of x, and a prime is a transpose. Each value is one
 * object in a file; transitions.def, beliefs.def and reads.def list them. Nothing here allocates or
 * fails: mixer.c checks the token and owns the memory. */
#ifndef MN_DEFINITION_AXES_H
#define MN_DEFINITION_AXES_H

#include "definition/mixer.h"

/* Keys and values of all tokens so far, for beliefs that forget nothing. Row t of k is (J,K) or
 * (Q,K), row t of v is (J,V) or (H,V). `scratch` has room for three numbers per token. */
typedef struct mn_cache {
    int64_t length, capacity;
    int64_t k_count, v_count;    // numbers per token; 0: the row keeps no cache
    double *k, *v, *scratch;
} mn_cache;

/* One head at one token. `in` holds this head's rows of the inputs (of the first of its two query
 * branches where it has two); `part` this head's parts of the state, in the order of the operator's
 * initial states. Cell (i, j) of a memory lies at i * key_step + j * value_step. */
typedef struct mn_head {
    const mn_mixer_config *config;
    const mn_call *size;
    const mn_belief *belief;
    mn_token in;
    double *part[MN_MIXER_PARTS];
    int64_t count[MN_MIXER_PARTS];    // numbers per head of each part
    int n_parts;
    int64_t h;                        // which head
    int64_t key_step, value_step;
    const mn_cache *cache;
    const mn_token *token;            // all heads' inputs, for reads with two query branches
    double *scratch;                  // R numbers
} mn_head;

struct mn_transition {
    const char *name, *equation;
    int decay;                        // mn_decay of the operator
    void (*predict)(mn_head *head);
};

struct mn_belief {
    const char *name, *equation;
    bool matrix;                      // keeps a K x V memory, so that +ccq makes sense
    void (*start)(mn_head *head);     // fresh state; memory is zero before; NULL: zero is right
    void (*observe)(mn_head *head);   // NULL: a cache, which keeps tokens as they come
    double (*mean)(const mn_head *head, int64_t i, int64_t j);    // expected memory cell
    void (*variance)(double *out, const mn_head *head);           // of scale mean'q, V numbers
};

struct mn_read {
    const char *name, *equation;
    bool variance;
    int kind;                                       // `kind` of the operator, where it has one
    void (*run)(double *o, const mn_head *head);    // V numbers
};

#define TRANSITION(object) extern const mn_transition mn_transition_##object;
#include "definition/transitions.def"
#undef TRANSITION
#define BELIEF(object) extern const mn_belief mn_belief_##object;
#include "definition/beliefs.def"
#undef BELIEF
#define READ(object) extern const mn_read mn_read_##object;
#include "definition/reads.def"
#undef READ

/* Step size of value column j in a selective scan: softplus(dt + bias), or dt as given. */
double mn_scan_step(const mn_head *head, int64_t j);

/* The curvature of the keys, parts kk (K,K) and ks (K) of one head, both sums over unit keys. */
void mn_curvature_observe(double *kk, double *ks, const double *k, int64_t K);

/* qt = q - gamma C q with C the covariance of `count` keys. */
void mn_curvature_contract(double *qt, const double *q, double gamma, const double *kk,
                           const double *ks, int64_t count, int64_t K);

/* Rotary position `position` on one row of K numbers, in place; kind as in mn_attention_args. */
void mn_turn_row(double *x, int64_t K, int64_t position, int kind, double base);

/* o_j = scale sum_i q_i mean_ij, which several reads share. */
void mn_read_mean(double *o, const mn_head *head);

#endif
