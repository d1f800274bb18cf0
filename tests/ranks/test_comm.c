// labels: sanitize
/* test_comm.c - collectives between processes over loopback, their failures, and the sum tree. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/rng.h"
#include "base/status.h"
#include "ranks/comm.h"
#include "ranks/tcp.h"
#include "ranks/tree.h"
#include "support/check.h"
#include "support/ranks.h"

static void check_ranks(rank_fn fn) {
    static const int worlds[] = { 1, 2, 3, 4, 7, 8 };
    for (int i = 0; i < 6; i++) {
        int codes[16];
        run_ranks(fn, NULL, worlds[i], codes);
        for (int r = 0; r < worlds[i]; r++) assert_int_equal(codes[r], 0);
    }
}

/* ---- collectives ----------------------------------------------------------------------------- */

enum { COUNT = 100003 };

static float item(int rank, int64_t i) {
    return (float)(mn_rng_uniform(7, (uint64_t)rank, (uint64_t)i) * 3.0 - 1.0);
}

/* Sum over ranks in the order of the tree, written down once more by its recursion. */
static float tree_sum(int first, int end, int64_t i) {
    if (end - first == 1) return item(first, i);
    int half = 1;
    while (2 * half < end - first) half *= 2;
    return tree_sum(first, first + half, i) + tree_sum(first + half, end, i);
}

static int gathers(mn_comm *comm, void *job) {
    (void)job;
    const int n = mn_comm_world(comm), me = mn_comm_rank(comm);
    int all[16];
    const int own = 100 + me;
    if (mn_comm_all_gather(comm, all, &own, sizeof own) != MN_OK) return 1;
    for (int r = 0; r < n; r++) {
        if (all[r] != 100 + r) return 2;
    }
    for (int root = 0; root < n; root++) {
        char text[1000] = "";
        if (me == root) snprintf(text, sizeof text, "from %d", root);
        if (mn_comm_broadcast(comm, root, text, sizeof text) != MN_OK) return 3;
        int from = -1;
        if (sscanf(text, "from %d", &from) != 1 || from != root) return 4;
    }
    return mn_comm_barrier(comm) == MN_OK ? 0 : 5;
}

static int sums(mn_comm *comm, void *job) {
    (void)job;
    const int n = mn_comm_world(comm), me = mn_comm_rank(comm);
    float *data = malloc(COUNT * sizeof *data);
    for (int64_t i = 0; i < COUNT; i++) data[i] = item(me, i);
    if (mn_comm_all_reduce(comm, data, COUNT) != MN_OK) return 1;
    for (int64_t i = 0; i < COUNT; i++) {
        if (data[i] != tree_sum(0, n, i)) return 2;
    }
    free(data);
    return 0;
}

/* Each rank sends to all at once more than sockets buffer. */
static int all_to_all(mn_comm *comm, void *job) {
    (void)job;
    enum { BYTES = 1 << 20 };
    const int n = mn_comm_world(comm), me = mn_comm_rank(comm);
    unsigned char *out = malloc((size_t)n * BYTES), *in = malloc((size_t)n * BYTES);
    mn_transfer t[32];
    for (int r = 0; r < n; r++) {
        memset(out + (size_t)r * BYTES, 16 * me + r, BYTES);
        t[2 * r] = (mn_transfer){ r, true, out + (size_t)r * BYTES, BYTES };
        t[2 * r + 1] = (mn_transfer){ r, false, in + (size_t)r * BYTES, BYTES };
    }
    if (mn_comm_exchange(comm, t, 2 * n) != MN_OK) return 1;
    for (int64_t i = 0; i < (int64_t)n * BYTES; i++) {
        if (in[i] != (unsigned char)(16 * (i / BYTES) + me)) return 2;
    }
    free(out);
    free(in);
    return 0;
}

/* x -> a x + b: maps do not commute, so their order shows. */
static void compose(void *context, void *out, const void *a, const void *b) {
    (void)context;
    const double *first = a, *then = b;
    double *both = out;
    both[0] = then[0] * first[0];
    both[1] = then[0] * first[1] + then[1];
}

static int scans(mn_comm *comm, void *job) {
    (void)job;
    const int me = mn_comm_rank(comm);
    double map[2] = { 2.0 + me, 1.0 + me }, want[2] = { 1.0, 0.0 };
    if (mn_comm_exclusive_scan(comm, map, sizeof map, compose, NULL) != MN_OK) return 1;
    for (int r = 0; r < me; r++) {
        const double next[2] = { 2.0 + r, 1.0 + r }, before[2] = { want[0], want[1] };
        compose(NULL, want, before, next);
    }
    return me == 0 || (map[0] == want[0] && map[1] == want[1]) ? 0 : 2;
}

static int parts(mn_comm *comm, void *job) {
    (void)job;
    const int n = mn_comm_world(comm), me = mn_comm_rank(comm);
    if (n % 2) return 0;
    mn_comm *pair;
    if (mn_comm_part(&pair, comm, me / 2 * 2, 2) != MN_OK) return 1;
    int both[2];
    if (mn_comm_all_gather(pair, both, &me, sizeof me) != MN_OK) return 2;
    mn_comm_destroy(pair);
    return both[0] == me / 2 * 2 && both[1] == both[0] + 1 ? 0 : 3;
}

static void ranks_gather_and_broadcast(void **state) {
    (void)state;
    check_ranks(gathers);
}

static void ranks_sum_in_the_order_of_a_tree(void **state) {
    (void)state;
    check_ranks(sums);
}

static void ranks_send_more_than_sockets_hold(void **state) {
    (void)state;
    check_ranks(all_to_all);
}

static void ranks_scan_in_their_order(void **state) {
    (void)state;
    check_ranks(scans);
}

static void neighbours_are_a_communicator_of_their_own(void **state) {
    (void)state;
    check_ranks(parts);
}

/* ---- agreement and failure ------------------------------------------------------------------- */

static int one_fails(mn_comm *comm, void *job) {
    (void)job;
    const int n = mn_comm_world(comm);
    mn_status mine = MN_OK;
    if (mn_comm_rank(comm) == n - 1) mine = mn_fail(MN_ERR_IO, "the disk is full");
    if (mn_comm_agree(comm, mine) != MN_ERR_IO) return 1;
    char want[64];
    snprintf(want, sizeof want, "rank %d: the disk is full", n - 1);
    if (n > 1 && strcmp(mn_last_error(), want) != 0) return 2;
    if (mn_comm_same(comm, "number", 5) != MN_OK) return 3;
    const uint64_t own = (uint64_t)mn_comm_rank(comm);
    return (mn_comm_same(comm, "number", own) == MN_OK) == (n == 1) ? 0 : 4;
}

static void all_ranks_hear_of_a_failure(void **state) {
    (void)state;
    check_ranks(one_fails);
}

static int dies(mn_comm *comm, void *job) {
    (void)job;
    if (mn_comm_rank(comm) == 1) raise(SIGKILL);
    const double started = mn_seconds();
    mn_status st = MN_OK;
    for (int i = 0; i < 10 && st == MN_OK; i++) st = mn_comm_barrier(comm);
    if (st != MN_ERR_IO || mn_seconds() - started > 5.0) return 1;
    return strstr(mn_last_error(), "rank ") ? 0 : 2;
}

static void a_rank_that_is_killed_stops_all(void **state) {
    (void)state;
    int codes[4];
    run_ranks(dies, NULL, 4, codes);
    for (int r = 0; r < 4; r++) assert_int_equal(codes[r], r == 1 ? -1 : 0);
}

static int gives_up(mn_comm *comm, void *job) {
    (void)job;
    if (mn_comm_rank(comm) == 2) {
        mn_comm_abort(comm, "not enough memory");
        return 0;
    }
    const mn_status st = mn_comm_barrier(comm);
    if (st == MN_OK) return 1;
    return strstr(mn_last_error(), "not enough memory") || strstr(mn_last_error(), "gone") ? 0 : 2;
}

static void a_rank_that_gives_up_says_why(void **state) {
    (void)state;
    int codes[4];
    run_ranks(gives_up, NULL, 4, codes);
    for (int r = 0; r < 4; r++) assert_int_equal(codes[r], 0);
}

static int mismatch(mn_comm *comm, void *job) {
    (void)job;
    char data[64] = "";
    const size_t bytes = mn_comm_rank(comm) == 0 ? 8 : 16;
    mn_transfer t[2] = { { 1 - mn_comm_rank(comm), true, data, bytes },
                         { 1 - mn_comm_rank(comm), false, data + 32, bytes } };
    return mn_comm_exchange(comm, t, 2) == MN_OK;
}

static void messages_of_another_length_are_refused(void **state) {
    (void)state;
    int codes[2];
    run_ranks(mismatch, NULL, 2, codes);
    assert_int_equal(codes[0], 0);
    assert_int_equal(codes[1], 0);
}

/* ---- strangers ------------------------------------------------------------------------------- */

static int log_pipe;

static void log_line(const char *line) {
    const ssize_t n = write(log_pipe, line, strlen(line));
    (void)n;
}

/* Rank 1 has `theirs`; before it comes, somebody says something else. Both exit codes, and the log
 * of rank 0. */
static void meet_with(const char *theirs, int codes[2], char *log, size_t room) {
    int listener, port, pipes[2];
    assert_int_equal(mn_tcp_listen(&listener, &port, "127.0.0.1", 0), MN_OK);
    assert_int_equal(pipe(pipes), 0);
    pid_t pids[2];
    for (int r = 0; r < 2; r++) {
        pids[r] = fork();
        if (pids[r] != 0) continue;
        alarm(60);
        log_pipe = pipes[1];
        const mn_comm_options how = { .rank = r, .world = 2, .port = port,
                                      .token = r ? theirs : "right", .limit = 3.0, .silence = 9.0,
                                      .listener = r ? -1 : listener, .log = log_line };
        mn_comm *comm;
        const mn_status st = mn_comm_create(&comm, &how);
        if (st == MN_OK) mn_comm_destroy(comm);
        _exit(st == MN_OK ? 0 : strstr(mn_last_error(), "token") ? 3 : 4);
    }
    close(listener);
    close(pipes[1]);
    for (int r = 0; r < 2; r++) {
        int status;
        waitpid(pids[r], &status, 0);
        codes[r] = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    }
    const ssize_t n = read(pipes[0], log, room - 1);
    log[n > 0 ? n : 0] = '\0';
    close(pipes[0]);
}

static void a_wrong_token_is_refused_and_logged(void **state) {
    (void)state;
    int codes[2];
    char log[500];
    meet_with("right", codes, log, sizeof log);
    assert_int_equal(codes[0] + codes[1], 0);
    assert_string_equal(log, "");
    meet_with("wrong", codes, log, sizeof log);
    assert_int_equal(codes[0], 4);    // rank 1 did not come
    assert_int_equal(codes[1], 3);    // its token is wrong
    assert_non_null(strstr(log, "refused a connection from 127.0.0.1: its token is wrong"));
}

/* ---- the tree -------------------------------------------------------------------------------- */

/* Adds the items of [first, end) as a holder does; leaves its nodes in `rest`. */
static int hold(float *rest, int64_t first, int64_t end, mn_tree *tree, bool all) {
    tree->n = 0;
    for (int64_t i = first; i < end; i++) {
        mn_tree_push(tree, i, 0);
        rest[tree->n - 1] = item((int)i, 0);
        while (mn_tree_join(tree, all && i == end - 1)) rest[tree->n - 1] += rest[tree->n];
    }
    return tree->n;
}

static void the_tree_has_one_order_for_all_holders(void **state) {
    (void)state;
    for (int items = 1; items <= 40; items++) {
        float rest[MN_TREE_DEPTH], joined[MN_TREE_DEPTH];
        mn_tree tree;
        assert_int_equal(hold(rest, 0, items, &tree, true), 1);
        assert_true(rest[0] == tree_sum(0, items, 0));
        for (int world = 1; world <= items; world++) {
            mn_tree sum = { .n = 0 };
            for (int r = 0; r < world; r++) {
                const int64_t first = items * r / world, end = items * (r + 1) / world;
                const int n = hold(rest, first, end, &tree, false);
                for (int i = 0; i < n; i++) {
                    mn_tree_push(&sum, tree.first[i], tree.level[i]);
                    joined[sum.n - 1] = rest[i];
                    const bool last = r == world - 1 && i == n - 1;
                    while (mn_tree_join(&sum, last)) joined[sum.n - 1] += joined[sum.n];
                }
            }
            assert_int_equal(sum.n, 1);
            assert_true(joined[0] == tree_sum(0, items, 0));
        }
    }
}

static void rows_sum_in_the_order_of_the_tree(void **state) {
    (void)state;
    for (int rows = 1; rows <= 20; rows++) {
        float data[20 * 3];
        for (int r = 0; r < rows; r++) {
            for (int i = 0; i < 3; i++) data[3 * r + i] = item(r, i);
        }
        mn_tree_sum_rows(data, rows, 3);
        for (int i = 0; i < 3; i++) assert_true(data[i] == tree_sum(0, rows, i));
    }
}

static void a_plan_of_sums_has_the_order_of_the_tree(void **state) {
    (void)state;
    for (int items = 1; items <= 40; items++) {
        for (int world = 1; world <= items && world <= 9; world++) {
            mn_tree nodes[9];
            mn_tree_sum sums[40];
            float row[40];
            int rows = 0;
            for (int r = 0; r < world; r++) {
                const int64_t first = items * r / world, end = items * (r + 1) / world;
                rows += hold(row + rows, first, end, &nodes[r], false);
            }
            const int last = rows / 2, n = mn_tree_plan(sums, nodes, world, last);
            assert_int_equal(n, rows - 1);
            for (int i = 0; i < n; i++) row[sums[i].to] = row[sums[i].a] + row[sums[i].b];
            assert_true(row[n > 0 ? last : 0] == tree_sum(0, items, 0));
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_gather_and_broadcast),
        cmocka_unit_test(ranks_sum_in_the_order_of_a_tree),
        cmocka_unit_test(ranks_send_more_than_sockets_hold),
        cmocka_unit_test(ranks_scan_in_their_order),
        cmocka_unit_test(neighbours_are_a_communicator_of_their_own),
        cmocka_unit_test(all_ranks_hear_of_a_failure),
        cmocka_unit_test(a_rank_that_is_killed_stops_all),
        cmocka_unit_test(a_rank_that_gives_up_says_why),
        cmocka_unit_test(messages_of_another_length_are_refused),
        cmocka_unit_test(a_wrong_token_is_refused_and_logged),
        cmocka_unit_test(the_tree_has_one_order_for_all_holders),
        cmocka_unit_test(rows_sum_in_the_order_of_the_tree),
        cmocka_unit_test(a_plan_of_sums_has_the_order_of_the_tree),
    };
    return cmocka_run_group_tests_name("ranks", tests, NULL, NULL);
}
