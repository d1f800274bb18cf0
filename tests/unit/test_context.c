/* test_context.c - a context serves one thread at a time and says so, a forked child may give up
 * what it inherited, and results do not share memory. */
// labels: sanitize
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ops/context.h"
#include "support/check.h"

static mn_context *context_of(int n_threads) {
    mn_context *context = NULL;
    const mn_context_options options = { .n_threads = n_threads };
    if (mn_context_create(&context, &options) != MN_OK) check_fatal("%s", mn_last_error());
    return context;
}

enum { N = 64 };

static mn_status norm(mn_context *context, float *y) {
    static float x[N], w[N];
    for (int i = 0; i < N; i++) x[i] = (float)i, w[i] = 1.0f;
    mn_rms_norm_args args = { .call = { .dtype = MN_F32, .B = 1, .V = N }, .eps = 1e-5 };
    args.x.data = x, args.w.data = w, args.y.data = y;
    return mn_op_rms_norm(context, &args);
}

typedef struct meeting {
    mn_context *context;
    mn_status status;
    char why[256];
} meeting;

static void *call_from_elsewhere(void *argument) {
    meeting *m = argument;
    float y[N];
    m->status = norm(m->context, y);
    snprintf(m->why, sizeof m->why, "%s", mn_last_error());
    return NULL;
}

static void call_in_thread(meeting *m) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, call_from_elsewhere, m) != 0) check_fatal("no thread");
    pthread_join(thread, NULL);
}

static void second_thread_is_refused(void **state) {
    (void)state;
    float y[N];
    meeting m = { .context = context_of(2) };
    CHECK(mn_context_enter(m.context) == MN_OK, "%s", mn_last_error());
    CHECK(norm(m.context, y) == MN_OK, "the thread that is inside: %s", mn_last_error());
    call_in_thread(&m);
    CHECK(m.status == MN_ERR_ARGUMENT && strstr(m.why, "another thread"), "status %d, %s",
          (int)m.status, m.why);
    mn_context_leave(m.context);
    call_in_thread(&m);
    CHECK(m.status == MN_OK, "in turns: %s", m.why);
    CHECK(norm(m.context, y) == MN_OK, "and back: %s", mn_last_error());
    mn_context_destroy(m.context);
    check_done();
}

/* Same numbers on the child's one thread, and an end. */
static void child_gives_up_its_context(void **state) {
    (void)state;
    float y[N], again[N];
    mn_context *context = context_of(4);
    CHECK(norm(context, y) == MN_OK, "%s", mn_last_error());
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        alarm(10);
        const bool same = norm(context, again) == MN_OK && memcmp(y, again, sizeof y) == 0;
        mn_context_destroy(context);
        _exit(same ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ends with %x", status);
    CHECK(norm(context, again) == MN_OK && memcmp(y, again, sizeof y) == 0, "the parent goes on");
    mn_context_destroy(context);
    check_done();
}

/* Two results of `additive`: o of B T H V numbers and a state of B H K V, at these places. */
static mn_status additive_into(mn_context *context, float *o, float *last) {
    enum { T = 4, K = 4, V = 4 };
    static float q[T * K], k[T * K], v[T * V];
    mn_additive_args args = { .call = { .dtype = MN_F32, .B = 1, .T = T, .H = 1, .K = K, .V = V },
                              .scale = 1.0, .decay = MN_DECAY_NONE };
    args.q.data = q, args.k.data = k, args.v.data = v, args.o.data = o, args.state.data = last;
    return mn_op_additive(context, &args);
}

static void results_have_their_own_memory(void **state) {
    (void)state;
    float room[64] = { 0 };
    mn_context *context = context_of(1);
    CHECK(additive_into(context, room, room + 16) == MN_OK, "%s", mn_last_error());
    CHECK(additive_into(context, room, room) == MN_ERR_ARGUMENT, "the same memory");
    CHECK(strstr(mn_last_error(), "share memory"), "%s", mn_last_error());
    CHECK(additive_into(context, room, room + 15) == MN_ERR_ARGUMENT, "one number in common");
    CHECK(additive_into(context, room + 15, room) == MN_ERR_ARGUMENT, "the other way round");
    CHECK(additive_into(context, room + 16, room) == MN_OK, "%s", mn_last_error());
    mn_context_destroy(context);
    check_done();
}

/* dq and dk of B sequences of T tokens in rows of 8 numbers, of which dk has those from `first`. */
static mn_status additive_gradients(mn_context *context, int64_t B, int64_t T, int64_t first) {
    enum { K = 4, MOST = 3 };
    static float q[MOST * K], k[MOST * K], v[MOST * K], grad[8 * MOST];
    const int64_t step = 8;
    mn_additive_args args = { .call = { .dtype = MN_F32, .B = B, .T = T, .H = 1, .K = K, .V = K },
                              .scale = 1.0, .decay = MN_DECAY_NONE };
    const mn_in tokens = { q, { T * K, K, K } };
    args.q = args.k = args.v = args.cot.o = tokens;
    args.k.data = k, args.v.data = v;
    args.grad.q = (mn_out){ grad, { T * step, step, K } };
    args.grad.k = (mn_out){ grad + first, { T * step, step, K } };
    return mn_op_additive_backward(context, &args);
}

static void gradients_lie_side_by_side(void **state) {
    (void)state;
    mn_context *context = context_of(1);
    for (int64_t one = 0; one < 2; one++) {    // a sequence of many tokens, many of one token
        const int64_t B = one ? 3 : 1, T = one ? 1 : 3;
        CHECK(additive_gradients(context, B, T, 4) == MN_OK, "%s", mn_last_error());
        CHECK(additive_gradients(context, B, T, 3) == MN_ERR_ARGUMENT, "one number in common");
    }
    mn_context_destroy(context);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(second_thread_is_refused),
        cmocka_unit_test(child_gives_up_its_context),
        cmocka_unit_test(results_have_their_own_memory),
        cmocka_unit_test(gradients_lie_side_by_side),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
