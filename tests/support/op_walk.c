/* op_visit.c - one test per operator, and the targets to run them on. */
#include "support/op_walk.h"

#include <stdlib.h>
#include <string.h>

#include "base/util.h"

static void (*current)(mn_op_id op);

static void run_one(void **state) {
    current((mn_op_id)(intptr_t)*state);
    check_done();
}

int op_visit(const char *title, void (*test)(mn_op_id op), int argc, char **argv) {
    static struct CMUnitTest tests[MN_OP_COUNT];
    current = test;
    for (int i = 0; i < MN_OP_COUNT; i++) {
        tests[i] = (struct CMUnitTest){ .name = mn_op_describe((mn_op_id)i)->name,
                                        .test_func = run_one,
                                        .initial_state = (void *)(intptr_t)i };
    }
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return _cmocka_run_group_tests(title, tests, MN_OP_COUNT, NULL, NULL);
}

int op_targets(op_target out[MN_TARGET_COUNT + 1]) {
    int n = 0;
    out[n++] = (op_target){ "ref", MN_F64 };
    for (int id = 0; id < MN_TARGET_COUNT; id++) {
        if (!mn_target_available((mn_target_id)id)) continue;
        out[n++] = (op_target){ mn_target_name((mn_target_id)id), MN_F32 };
    }
    return n;
}

enum { MOST_CONTEXTS = 16 };

static struct {
    char target[16];
    int n_threads;
    mn_context *context;
} contexts[MOST_CONTEXTS];

static void destroy_contexts(void) {
    for (int i = 0; i < MOST_CONTEXTS; i++) mn_context_destroy(contexts[i].context);
}

mn_context *op_context(const char *target, int n_threads) {
    int i = 0;
    for (; i < MOST_CONTEXTS && contexts[i].context; i++) {
        if (contexts[i].n_threads == n_threads && strcmp(contexts[i].target, target) == 0) {
            return contexts[i].context;
        }
    }
    if (i == MOST_CONTEXTS) check_fatal("more than %d contexts", MOST_CONTEXTS);
    if (i == 0) atexit(destroy_contexts);
    const mn_context_options options = { .n_threads = n_threads, .target = target };
    if (mn_context_create(&contexts[i].context, &options) != MN_OK) {
        check_fatal("context %s: %s", target, mn_last_error());
    }
    contexts[i].n_threads = n_threads;
    strncpy(contexts[i].target, target, sizeof contexts[i].target - 1);
    return contexts[i].context;
}

bool op_has_backward(mn_op_id op) {
    int count;
    const mn_field *fields = mn_op_fields(op, &count);
    for (int i = 0; i < count; i++) {
        if (fields[i].role <= MN_ROLE_OPT) return true;
    }
    return false;
}

void op_run(mn_context *context, mn_sample *sample, mn_pass pass, const op_case *c) {
    const mn_status st = mn_op_run(context, sample->op, pass, sample->args);
    if (st != MN_OK) check_fatal("%s: %s", op_case_text(c), mn_last_error());
    CHECK(mn_sample_guards_intact(sample), "%s %s: memory around a result was overwritten",
          mn_context_target(context), op_case_text(c));
}

void op_run_both(mn_context *context, mn_sample *sample, const op_case *c) {
    op_run(context, sample, MN_FORWARD, c);
    if (op_has_backward(c->op)) op_run(context, sample, MN_BACKWARD, c);
}
