// labels: sanitize
/* test_decode_plan.c - what a decoded token is lowered to, without a GPU (support/decode/shadow.h):
 * all launches and all instructions of megakernels, done block by block in several orders, leave in
 * each element what the tape's operations one after the other leave there, without races; and the
 * instructions are those that they were. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/rng.h"
#include "base/util.h"
#include "infer/session.h"
#include "support/check.h"
#include "support/decode/shadow.h"
#include "support/model_case.h"
#include "tape/tape_internal.h"

enum { VOCABULARY = 256, STEPS = 4, BLOCKS = 12 };    // the fourth step is recorded

/* A model, and what its steps are lowered to. `trace` is of the instructions of all steps: what it
 * becomes when they are meant to change is printed. */
static const struct {
    const char *name, *config;
    shadow_counts expected;
} models[] = {
#define EXPECT(launches, megakernels, stages, barriers, steps, trace)                              \
    { launches, megakernels, stages, barriers, steps, 0, UINT64_C(trace) }
#define PLAN_CASE(name, config, expected) { name, config, expected },
#include "model/decode_plan.def"
#undef PLAN_CASE
};

static void decode(const char *config) {
    const mn_context_options there = { .n_threads = 1, .device = "cuda" };
    const mn_session_options how = { .dtype = MN_BF16, .prefill_chunk = STEPS };
    char text[512];
    mn_context *context = NULL;
    mn_model *model = NULL;
    mn_session *session = NULL;
    int32_t tokens[STEPS];
    model_case_tokens(tokens, STEPS, VOCABULARY, 9);
    snprintf(text, sizeof text, "{%s, \"vocab_size\": %d, \"max_position_embeddings\": 32}",
             config, VOCABULARY);
    mn_status st = mn_context_create(&context, &there);
    if (st == MN_OK) st = model_case_create(&model, text, MN_F32, 0.0, 3);
    if (st == MN_OK) st = mn_session_create(&session, context, model, &how);
    for (int i = 0; st == MN_OK && i < STEPS; i++) {
        st = mn_session_step(session, tokens[i]);
        CHECK(shadow_agrees(), "%s: step %d leaves something else than it was asked for", text, i);
    }
    if (st != MN_OK) check_fatal("%s: %s", text, mn_last_error());
    mn_session_destroy(session);
    mn_model_destroy(model);
    mn_context_destroy(context);
}

static bool same(const shadow_counts *a, const shadow_counts *b) {
    return a->launches == b->launches && a->megakernels == b->megakernels &&
           a->stages == b->stages && a->barriers == b->barriers && a->steps == b->steps &&
           a->trace == b->trace;
}

/* In any order of blocks the same instructions; and those that are expected. */
static void lower(size_t i) {
    shadow_counts got = { 0 };
    bool expected = true;
    for (int order = 0; order < SHADOW_ORDERS; order++) {
        shadow_start(BLOCKS, (shadow_order)order, 3);
        decode(models[i].config);
        got = shadow_counted();
        CHECK(shadow_failures() == 0, "%s, order %d: %d failures", models[i].name, order,
              shadow_failures());
        expected = same(&got, &models[i].expected) && expected;
    }
    if (!expected) {
        printf("%s: EXPECT(%d, %d, %d, %d, %d, 0x%" PRIx64 ")\n", models[i].name, got.launches,
               got.megakernels, got.stages, got.barriers, got.steps, got.trace);
    }
    CHECK(expected, "%s: other instructions than before", models[i].name);
}

static void steps_are_lowered_to_what_they_mean(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(models); i++) lower(i);
    check_done();
}

/* Rows whose step may not be a launch of its own. */
static void no_step_is_launched_apart(void **state) {
    static const char *const alone[] = {
        "\"layers\": \"hypermlp\", \"num_heads\": 2",
        "\"layers\": \"hyperglu\", \"num_heads\": 2, \"layout\": \"position\"",
        "\"layers\": \"mesa\", \"num_heads\": 1, \"head_dim\": 96",
        "\"layers\": \"mesa\", \"num_heads\": 1, \"head_dim\": 128",
    };
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(alone); i++) {
        char config[256];
        snprintf(config, sizeof config, "%s, \"num_hidden_layers\": 2, \"hidden_size\": 128, "
                 "\"intermediate_size\": 96", alone[i]);
        shadow_start(BLOCKS, SHADOW_ANY, 7);
        decode(config);
        const shadow_counts got = shadow_counted();
        CHECK(shadow_failures() == 0 && got.megakernels > 0, "%s: %d failures in %d megakernels",
              alone[i], shadow_failures(), got.megakernels);
        CHECK(got.apart == 0, "%s: %d operators in launches of their own", alone[i], got.apart);
    }
    check_done();
}

/* A recorded token of HyperMLP beyond the last lag that its mixes have is refused, as reading all
 * tokens at once is, and none before it. */
static void mixes_have_no_more_lags(void **state) {
    enum { LAGS = 5 };
    const mn_context_options there = { .n_threads = 1, .device = "cuda" };
    const mn_session_options how = { .dtype = MN_BF16, .prefill_chunk = STEPS };
    mn_context *context = NULL;
    mn_model *model = NULL;
    mn_session *session = NULL;
    (void)state;
    shadow_start(BLOCKS, SHADOW_FIRST, 3);
    mn_status st = mn_context_create(&context, &there);
    if (st == MN_OK) {
        st = model_case_create(&model, "{\"layers\": \"hyperglu\", \"num_hidden_layers\": 1, "
                               "\"num_heads\": 1, \"hidden_size\": 64, \"block_size\": 5, "
                               "\"intermediate_size\": 96, \"vocab_size\": 256, "
                               "\"max_position_embeddings\": 32}", MN_F32, 0.0, 3);
    }
    if (st == MN_OK) st = mn_session_create(&session, context, model, &how);
    for (int i = 0; st == MN_OK && i < LAGS; i++) st = mn_session_step(session, i);
    if (st != MN_OK) check_fatal("%s", mn_last_error());
    st = mn_session_step(session, LAGS);
    CHECK(st == MN_ERR_ARGUMENT, "token %d of %d lags: status %d", LAGS, LAGS, (int)st);
    CHECK(shadow_failures() == 0, "%d failures", shadow_failures());
    mn_session_destroy(session);
    mn_model_destroy(model);
    mn_context_destroy(context);
    check_done();
}

/* ---- memory that is used again --------------------------------------------------------------- */

enum { WIDTH = 64, BUFFERS = 5, WEIGHTS = 3, SEQUENCES = 400 };

/* Buffers and weights of a step that has nothing to do with a model. */
typedef struct scratch {
    mn_context *context;
    mn_tape *tape;
    char *buffer[BUFFERS];
    void *weight[WEIGHTS];
} scratch;

static void open_scratch(scratch *s) {
    const mn_context_options there = { .n_threads = 1, .device = "cuda" };
    const size_t bytes = WIDTH * mn_dtype_bytes(MN_BF16);
    mn_status st = mn_context_create(&s->context, &there);
    if (st == MN_OK) st = mn_tape_create(&s->tape, s->context, MN_BF16);
    for (int i = 0; st == MN_OK && i < BUFFERS; i++) {
        st = mn_device_allocate(s->context->device, (void **)&s->buffer[i], bytes);
    }
    for (int i = 0; st == MN_OK && i < WEIGHTS; i++) {
        st = mn_device_allocate(s->context->device, &s->weight[i], WIDTH * bytes);
    }
    if (st != MN_OK) check_fatal("%s", mn_last_error());
    mn_tape_start(s->tape, MN_TAPE_DEFER | MN_TAPE_REPEATS);
    for (int i = 1; i < BUFFERS; i++) {    // the first is not declared
        mn_tape_input(s->tape, s->buffer[i], NULL, (int64_t[]){ 1, 1, 1, WIDTH });
    }
    for (int i = 0; i < WEIGHTS; i++) {
        mn_tape_leaf(s->tape, s->weight[i], NULL, WIDTH, WIDTH, false);
    }
}

static void close_scratch(scratch *s) {
    mn_tape_destroy(s->tape);
    mn_context_destroy(s->context);
}

static int draw(uint64_t sequence, uint64_t *at, int below) {
    return (int)(mn_rng_bits(21, sequence, (*at)++) % (uint64_t)below);
}

/* All of a buffer, or half of one, as a row. */
static mn_view some_of(const scratch *s, int buffer, int64_t count, int half) {
    const int64_t shape[4] = { 1, 1, 1, count };
    char *at = s->buffer[buffer] + (count < WIDTH && half ? WIDTH / 2 * 2 : 0);
    return mn_flat_view(at, MN_BF16, shape);
}

static void product(const scratch *s, const void *a, int weight, const mn_view *c, int64_t count) {
    mn_tape_product(s->tape, &(mn_matmul_args){ .dtype = MN_BF16, .c_dtype = MN_BF16, .a = a,
        .b = s->weight[weight], .c = c->data, .M = 1, .N = count, .K = WIDTH,
        .b_transposed = true });
}

/* c = silu(x) W' by way of scratch memory, which the next one finds free; some of it is larger. */
static void by_scratch(const scratch *s, int from, int weight, const mn_view *c, int64_t count,
                       int larger) {
    const mn_tape_mark mark = mn_tape_hold(s->tape);
    mn_unary_params work = { .f = MN_UNARY_SILU, .shape = { 1, 1, 1, WIDTH },
                             .x = some_of(s, from, WIDTH, 0) };
    work.y = mn_flat_view(mn_tape_memory(s->tape, larger ? 3 * WIDTH : WIDTH), MN_BF16, work.shape);
    mn_tape_do(s->tape, MN_ELEMENTWISE_UNARY, &work);
    product(s, work.y.data, weight, c, count);
    mn_tape_let_go(s->tape, mark);
}

/* An operation that reads some buffers and writes another, or the same. */
static void any_operation(const scratch *s, uint64_t sequence, uint64_t *at) {
    const int kind = draw(sequence, at, 6), from = draw(sequence, at, BUFFERS);
    const int other = draw(sequence, at, BUFFERS), half = draw(sequence, at, 2);
    const int64_t count = draw(sequence, at, 3) ? WIDTH : WIDTH / 2;
    int to = draw(sequence, at, BUFFERS);
    if (kind < 2) {    // a product is not made in place
        if (to == from) to = (from + 1) % BUFFERS;
        const mn_view c = some_of(s, to, count, half);
        product(s, s->buffer[from], draw(sequence, at, WEIGHTS), &c, count);
    } else if (kind == 2) {
        mn_tape_do(s->tape, MN_ELEMENTWISE_UNARY, &(mn_unary_params){ .f = MN_UNARY_SILU,
            .shape = { 1, 1, 1, count }, .x = some_of(s, from, count, half),
            .y = some_of(s, to, count, half) });
    } else if (kind == 3) {
        mn_tape_do(s->tape, MN_ELEMENTWISE_PAIR, &(mn_pair_params){ .kind = MN_PAIR_ADD,
            .shape = { 1, 1, 1, count }, .a = some_of(s, from, count, 0),
            .b = some_of(s, other, count, 0), .y = some_of(s, to, count, 0) });
    } else if (kind == 4) {
        const mn_view c = some_of(s, to, count, half);
        by_scratch(s, from, draw(sequence, at, WEIGHTS), &c, count, draw(sequence, at, 2));
    } else {
        mn_tape_do(s->tape, MN_ELEMENTWISE_MOVE, &(mn_move_params){ .times = 1,
            .shape = { 1, 1, 1, count }, .from = some_of(s, from, count, half),
            .to = some_of(s, to, count, half) });
    }
}

/* Sequences of operations that overwrite what others read and wrote, in whole and in part. */
static void memory_is_used_again(void **state) {
    (void)state;
    for (uint64_t i = 0; i < SEQUENCES; i++) {
        scratch s = { 0 };
        uint64_t at = 0;
        shadow_start(BLOCKS, (shadow_order)(i % SHADOW_ORDERS), i);
        open_scratch(&s);
        for (int k = 0; k < 12; k++) any_operation(&s, i, &at);
        mn_tape_flush(s.tape);
        CHECK(mn_tape_status(s.tape) == MN_OK, "sequence %d: %s", (int)i, mn_last_error());
        CHECK(shadow_agrees() && shadow_failures() == 0, "sequence %d of operations", (int)i);
        close_scratch(&s);
    }
    check_done();
}

/* ---- attention over a cache of several parts ------------------------------------------------- */

/* Heads, key-value heads, tokens that the caches have room for; barriers: eight query heads of a
 * key-value head are too many for the ring. */
static const struct {
    int64_t H, J, capacity;
    int barriers;
} attends[] = { { 8, 8, 700, 0 }, { 8, 2, 1300, 0 }, { 14, 14, 513, 0 }, { 2, 1, 256, 0 },
                { 8, 1, 600, 1 } };

/* y = attention(x Wq', x Wk', x Wv') Wo', heads of 8 numbers. */
static void attend_once(scratch *s, int64_t H, int64_t J, int64_t capacity) {
    enum { K = 8, TURNS = 4 };
    static const double inv_freq[TURNS / 2] = { 1.0, 0.1 };
    static const int64_t position = 3;
    const int64_t width = H * K, wide[4] = { 1, 1, 1, width }, bytes = capacity * J * K * 2;
    mn_attend how = { .capacity = capacity, .turns = TURNS, .scale = 0.5, .turned_scale = 1.0,
                      .inv_freq = inv_freq };
    mn_device *device = s->context->device;
    void *weights, *to;
    mn_status st = mn_device_allocate(device, &how.keys, (size_t)bytes);
    if (st == MN_OK) st = mn_device_allocate(device, &how.values, (size_t)bytes);
    if (st == MN_OK) st = mn_device_allocate(device, &weights, (size_t)(4 * width * width * 2));
    if (st == MN_OK) st = mn_device_allocate(device, &to, (size_t)(width * 2));
    if (st != MN_OK) check_fatal("%s", mn_last_error());
    mn_tape_start(s->tape, MN_TAPE_DEFER | MN_TAPE_REPEATS);
    mn_tape_set_position(s->tape, &position);
    mn_tape_declare(s->tape, how.keys, (size_t)bytes);
    mn_tape_declare(s->tape, how.values, (size_t)bytes);
    mn_tensor *x = mn_tape_input(s->tape, to, NULL, wide), *made[3];
    for (int i = 0; i < 3; i++) {
        const int64_t rows = (i == 0 ? H : J) * K;
        void *w = (char *)weights + i * width * width * 2;
        made[i] = mn_tape_linear(s->tape, x, mn_tape_leaf(s->tape, w, NULL, rows, width, false),
                                 NULL);
        made[i] = mn_tape_heads(s->tape, made[i], i == 0 ? H : J);
    }
    mn_tensor *o = mn_tape_flat(s->tape, mn_tape_attend(s->tape, &how, made[0], made[1], made[2]));
    void *w = (char *)weights + 3 * width * width * 2;
    mn_tape_linear(s->tape, o, mn_tape_leaf(s->tape, w, NULL, width, width, false), NULL);
    mn_tape_flush(s->tape);
}

static void parts_of_attention_are_shared_out(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(attends) * SHADOW_ORDERS; i++) {
        const size_t k = i / SHADOW_ORDERS;
        scratch s = { 0 };
        shadow_start(BLOCKS, (shadow_order)(i % SHADOW_ORDERS), 5);
        open_scratch(&s);
        attend_once(&s, attends[k].H, attends[k].J, attends[k].capacity);
        const shadow_counts got = shadow_counted();
        CHECK(mn_tape_status(s.tape) == MN_OK, "case %zu: %s", k, mn_last_error());
        CHECK(shadow_agrees() && shadow_failures() == 0, "case %zu of attention", k);
        CHECK(got.megakernels == 1 && got.launches == 1 && got.barriers == attends[k].barriers,
              "case %zu: %d launches, %d megakernels, %d barriers", k, got.launches,
              got.megakernels, got.barriers);
        close_scratch(&s);
    }
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(steps_are_lowered_to_what_they_mean),
                                        cmocka_unit_test(no_step_is_launched_apart),
                                        cmocka_unit_test(mixes_have_no_more_lags),
                                        cmocka_unit_test(parts_of_attention_are_shared_out),
                                        cmocka_unit_test(memory_is_used_again) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
