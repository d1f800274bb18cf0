/* test_pipelines.c - who waits for whom in kernels whose warps have roles, without a GPU.
 *
 * A warp, or several that go in step, is an agent that does the same for each chunk: it waits for
 * mbarriers, reads and writes slots of shared memory, arrives. Every order in which agents may go
 * on is gone through where there are not too many, else many drawn ones, and in each of them
 *
 *   - a wait by parity, as mbarrier.try_wait has it, ends when its phase is over, not one before
 *     or two behind it, which have the same parity;
 *   - a slot holds the chunk that its reader has come for;
 *   - nobody waits for ever, and no phase is left with some of its arrivals.
 *
 * Tiles that TMA brings come in any order. The tables below repeat what the kernels do; whoever
 * changes roles or stages of one changes its row here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MAX_RINGS = 16, MAX_SLOTS = 12, MAX_AGENTS = 16, MAX_OPS = 24, MAX_STATES = 1 << 15,
       MAX_DEPTH = 1 << 12 };

/* One thing that a role does for chunk n; its text is
 *
 *   b?   waits until the phase of barrier b that belongs to the chunk is over
 *   b=   the same, where its own chunk is one of the sequence's
 *   b~   waits until the phase before that one is, as those who fill an empty slot do
 *   b!   arrives        b^x  arrives, and so does a tile of x by TMA, some time later
 *   -x   reads x        +x   writes x
 *
 * A digit behind it: of the chunk that many before; @0, @1: of the first or second half of a chunk,
 * where a ring has a turn for each. */
typedef struct {
    char kind;
    int ring, data, lag, half;    // half: -1 where there are none
} action;

/* Agents that do this: `shares`: each takes every n-th chunk, else each takes all. */
typedef struct {
    int n_agents;
    bool shares;
    const char *text;
} role;

/* Rings: a letter, slots, and for barriers behind a colon the arrivals of a phase. */
typedef struct {
    const char *name, *rings;
    role roles[8];
    bool fails;    // kept as an example of what is to be found
} protocol;

/* The kernels that have these roles, by file. */
static const protocol protocols[] = {
    { "additive/additive_token_chunk_sm90.cu", "f4:1 r4:1 s4:1 e4:1 o2:1 p2:1 x4 d4 P4 O2",
      { { 1, false, "e~ f^x" },
        { 2, true, "f? -x +d r!" },
        { 1, false, "f? r? -x -d +P s!" },
        { 1, false, "f? r? -x -d s? -P p~ +O -x -d e! o!" },
        { 1, false, "o? -O p!" } }, false },
    { "additive/additive_token_chunk_sm90.cu, gradients of decays",
      "f3:1 r3:1 s3:1 e3:2 o2:3 p2:1 x3 d3 P3 O2 Q2",
      { { 1, false, "e~ f^x" },
        { 1, false, "f? -x +d r!" },
        { 1, false, "f? r? -x -d +P s! p~ +Q o!" },
        { 2, false, "f? r? -x -d s? -P p~ +O -x -d e! o!" },
        { 1, false, "o? -O -Q p!" } }, false },
    { "two warps that make decays in turn, three stages", "f3:1 r3:1 e3:1 x3 d3",
      { { 1, false, "e~ f^x" },
        { 2, true, "f? -x +d r!" },
        { 1, false, "f? r? -x -d e!" } }, true },
    { "additive/additive_channel_chunk_sm90.cu", "f8:1 c8:2 o8:1 e8:1 x8 y8 v8",
      { { 1, false, "e~ f^x" },
        { 4, true, "f? -x +y c!" },
        { 4, true, "f? -x +y c!" },
        { 1, false, "f? c? -x -y +v o!" },
        { 1, false, "o? -v e!1" },    // behind the last chunk once more
      }, false },
    { "additive/additive_channel_chunk_sm90.cu, states alone", "f8:1 c8:2 e8:1 x8 y8",
      { { 1, false, "e~ f^x" },
        { 4, true, "f? -x +y c!" },
        { 4, true, "f? -x +y c!" },
        { 1, false, "f? c? -x -y e!" } }, false },
    /* each block scales its half of the channels, x, for both: y here, p in the other block */
    { "additive/additive_channel_chunk_sm90.cu, two blocks of a head",
      "f8:1 F8:1 c8:2 C8:2 h8:1 H8:1 o8:1 O8:1 e8:2 E8:2 x8 X8 y8 Y8 p8 P8",
      { { 1, false, "e~ f^x" },
        { 1, false, "E~ F^X" },
        { 4, true, "f? -x +y +p H! C! h? c!" },
        { 4, true, "F? -X +Y +P h! c! H? C!" },
        { 1, false, "f? c? -y -P o!" },
        { 1, false, "F? C? -Y -p O!" },
        { 1, false, "o? e! E!" },
        { 1, false, "O? E! e!" } }, false },
    { "delta/delta_fwd_chunk.cu", "f3:3 s3:1 e3:1 o2:1 p2:1 x3 P3 O2",
      { { 1, false, "e~ f^x" },
        { 1, false, "e~ f! o?3 -O3 p!3" },
        { 1, false, "e~ f!" },
        { 1, false, "f? -x +P s!" },
        { 1, false, "f? -x s? -P p~ +O o! -x e!" } }, false },
    { "delta/delta_bwd_chunk.cu", "f2:1 e2:2 o1:2 p1:1 x2 S1",
      { { 1, false, "e~ f^x" },
        { 2, false, "p~ f? -x +S o! -x e!" },
        { 1, false, "o? -S p!" } }, false },
    { "delta/delta_state_scan.cuh", "f2:1 b2:1 e2:2 x2 y2",
      { { 1, false, "e~ f^x b^y" },
        { 2, false, "f? -x b? -y -x e!" } }, false },
    { "delta/delta_grad_sm90.cuh", "k2:1 K2:2 v2:1 V2:2 m1:1 M1:2 q2 x2 y1",
      { { 1, false, "K~ k^q V~@0 v^x@0 V~@1 v^x@1 M~ m^y" },
        { 2, false, "v?@0 -x@0 V!@0 v?@1 -x@1 V!@1 k? m? -q -y M! -q K!" } }, false },
    { "curvature/curvature_fwd_chunk.cu", "t4:1 r4:3 g4:3 s2:1 u2:1 x4 w4 z4 P2",
      { { 1, false, "g~ t^x" },
        { 1, false, "g~ +w r!" },
        { 2, false, "t? -x +z r! -x g!" },
        { 1, false, "t? r? -x -z -w u~ +P s!" },
        { 1, false, "t? -x s? -P -w -z u! g!" } }, false },
    { "curvature/curvature_bwd_sm90.cu, queries",
      "t3:1 r3:3 g3:5 s2:1 u2:1 R2:1 l2:1 x3 w3 z3 m3 P2 Y2",
      { { 1, false, "g~ t^x" },
        { 1, false, "g~ +w r!" },
        { 2, false, "t? -x +z r! -x g!" },
        { 1, false, "t? r? -x -z -w u~ +P +m s! -x -w g!" },
        { 1, false, "t? r? -x -z s? -P l~ +Y R! u! -x g!" },
        { 1, false, "t? R? -Y -x -z -w -m g! l!" } }, false },
    { "curvature/curvature_bwd_sm90.cu, keys", "t3:1 r3:1 g3:1 s2:1 u2:1 R2:1 l2:1 x3 w3 P2 Y2",
      { { 1, false, "g~ t^x" },
        { 1, false, "g~ +w t? -x r!" },
        { 1, false, "t? r? -x -w u~ +P s!" },
        { 1, false, "t? r? -x -w s? -P l~ +Y R! u! -x -w g!" },
        { 1, false, "R? -Y l!" } }, false },
    { "curvature/curvature_moments_sm90.cu", "t6:1 r6:1 g6:2 x6 w6",
      { { 1, false, "g~ t^x" },
        { 1, false, "g~ +w t? -x r!" },
        { 2, false, "t? r? -x -w g!" } }, false },
    { "attention/attention_fwd_flash_sm90.cuh", "k2:1 v2:1 K2:2 V2:2 x2 y2",
      { { 1, false, "K~ +x k! V~ +y v!" },
        { 2, false, "k? -x v?1 -y1 K! V!1" } }, false },
    { "attention/attention_bwd_single_pass_sm90.cuh", "f2:1 E2:2 z2:2 y2:2 u2:2 Q1:1 x2 D2 q1",
      { { 1, false, "E~ +x f!" },
        { 2, false, "z?2 -D2 -x1 f? E!1 y!2 Q~2 +q2 u!2 -x y~ +D z!" },
        { 2, true, "u? -q Q!" } }, false },
    { "importance/importance_bwd_mma.cuh", "f2:1 S1:2 T1:1 L1:1 x2 s1",
      { { 1, false, "L=2 +x f!" },
        { 1, false, "f? -x T~@0 +s@0 S!@0 -x S?@0 -s@0 T!@0 T~@1 +s@1 S!@1" },
        { 1, false, "f? -x S?1@1 -s1@1 T!1@1 L!1 T~@0 +s@0 S!@0 -x T~@1 +s@1 S!@1" } }, false },
    { "dplr/dplr_chunk_sm90.cu", "f12:1 e12:4 x12",
      { { 6, true, "e~ +x f!" }, { 4, false, "f? -x e!" } }, false },
    { "more producers than stages", "f3:1 e3:1 x3",
      { { 4, true, "e~ +x f!" }, { 1, false, "f? -x e!" } }, true },
    { "a slot given back by one of two readers", "f2:1 e2:1 x2",
      { { 1, false, "e~ f^x" }, { 1, false, "f? -x" }, { 1, false, "f? -x e!" } }, true },
    { "two arrivals where one is expected", "f2:1 e2:1 o1:1 p1:1 x2 S1",
      { { 1, false, "e~ f^x" },
        { 2, false, "p~ f? -x +S o! -x e!" },
        { 1, false, "o? -S p!" } }, true },
    { "an arrival too few", "f2:2 x2", { { 1, false, "f^x" }, { 1, false, "f? -x" } }, true },
};

/* ---- a protocol, read ------------------------------------------------------------------------ */

typedef struct {
    char letter;
    int slots, arrivals;
} ring;

typedef struct {
    int first, step, n_actions, longest;    // longest lag
    const action *actions;
} agent;

static ring rings[MAX_RINGS];
static agent agents[MAX_AGENTS];
static action read_actions[8][MAX_OPS];
static int n_rings, n_agents, n_chunks;

static int ring_of(char letter) {
    for (int i = 0; i < n_rings; i++) {
        if (rings[i].letter == letter) return i;
    }
    fail_msg("no ring %c", letter);
    return -1;
}

static action read_action(const char **at) {
    const char *p = *at;
    const bool data = *p == '-' || *p == '+';
    action x = { .kind = data ? p[0] : p[1], .ring = ring_of(data ? p[1] : p[0]), .half = -1 };
    p += 2;
    if (x.kind == '^') x.data = ring_of(*p++);
    if (*p >= '0' && *p <= '9') x.lag = *p++ - '0';
    if (*p == '@') x.half = p[1] - '0', p += 2;
    while (*p == ' ') p++;
    *at = p;
    return x;
}

static void read_protocol(const protocol *p) {
    n_rings = n_agents = 0;
    for (const char *at = p->rings; *at; n_rings++) {
        ring *r = &rings[n_rings];
        char *end;
        r->letter = *at++, r->slots = (int)strtol(at, &end, 10), r->arrivals = 0;
        if (*end == ':') r->arrivals = (int)strtol(end + 1, &end, 10);
        for (at = end; *at == ' ';) at++;
        assert_true(n_rings < MAX_RINGS && r->slots <= MAX_SLOTS);
    }
    for (int i = 0; i < 8 && p->roles[i].text; i++) {
        const role *r = &p->roles[i];
        int n = 0, longest = 0;
        for (const char *at = r->text; *at; n++) {
            assert_true(n < MAX_OPS);
            read_actions[i][n] = read_action(&at);
            const action *x = &read_actions[i][n];
            if (x->kind != '=' && x->lag > longest) longest = x->lag;
        }
        for (int k = 0; k < r->n_agents; k++) {
            assert_true(n_agents < MAX_AGENTS);
            agents[n_agents++] = (agent){ r->shares ? k : 0, r->shares ? r->n_agents : 1, n,
                                          longest, read_actions[i] };
        }
    }
}

/* ---- what may happen ------------------------------------------------------------------------- */

typedef struct {
    uint8_t done, arrived, tiles;    // phases that are over; of this one, and tiles to come
    uint8_t holds, comes;            // a slot's chunk, and one that TMA brings into it, from 1 on
} slot;

/* Bytes alone, so that equal states are equal in memory. */
typedef struct {
    uint8_t chunk[MAX_AGENTS], next[MAX_AGENTS];
    slot slots[MAX_RINGS][MAX_SLOTS];
    uint8_t for_barrier[MAX_RINGS][MAX_SLOTS];    // whose tile is to come, its ring
} state;

typedef enum { GOES_ON, WAITS, WRONG } outcome;

static char message[200];

static bool ended(const state *s, int a) {
    return s->chunk[a] >= n_chunks + agents[a].longest;
}

static void complete(slot *b, const ring *r) {
    if (b->arrived < r->arrivals || b->tiles) return;
    b->done++, b->arrived = 0;
}

static outcome wait_for(const slot *b, const ring *r, int turn, bool before) {
    const int phase = turn / r->slots - before;
    const bool over = b->done > phase, seems = (b->done & 1) != (phase & 1);
    if (over == seems) return over ? GOES_ON : WAITS;
    snprintf(message, sizeof message, "%c: %d phases over, phase %d seems %s", r->letter, b->done,
             phase, seems ? "over" : "to come");
    return WRONG;
}

static outcome act(state *s, const action *x, int turn) {
    const ring *r = &rings[x->ring];
    slot *at = &s->slots[x->ring][turn % r->slots];
    switch (x->kind) {
    case '?': case '=': case '~': return wait_for(at, r, turn, x->kind == '~');
    case '+': at->holds = (uint8_t)(turn + 1); return GOES_ON;
    case '-':
        if (at->holds == turn + 1) return GOES_ON;
        snprintf(message, sizeof message, "%c has chunk %d where %d is read", r->letter,
                 at->holds - 1, turn);
        return WRONG;
    case '^': {
        const int place = turn % rings[x->data].slots;
        s->slots[x->data][place].comes = (uint8_t)(turn + 1);
        s->for_barrier[x->data][place] = (uint8_t)x->ring;
        at->tiles++;
    }   // fallthrough
    default:
        at->arrived++;
        complete(at, r);
        return GOES_ON;
    }
}

/* One action of an agent, with those behind it that no other agent can tell apart from it: up to
 * the next wait, and arrivals by themselves. */
static outcome step(state *s, int a) {
    const agent *of = &agents[a];
    bool moved = false;
    while (!ended(s, a)) {
        const action *x = &of->actions[s->next[a]];
        const int chunk = s->chunk[a] - x->lag;
        const bool arrives = x->kind == '!' || x->kind == '^';
        const bool own = x->kind != '=' || s->chunk[a] < n_chunks;
        if (chunk >= 0 && chunk < n_chunks && own) {
            if (moved && strchr("?=~", x->kind)) return GOES_ON;
            const outcome found = act(s, x, x->half < 0 ? chunk : 2 * chunk + x->half);
            if (found != GOES_ON) return found;
            moved = true;
        }
        if (++s->next[a] == of->n_actions) {
            s->next[a] = 0;
            s->chunk[a] = (uint8_t)(s->chunk[a] + of->step);
        }
        if (moved && arrives) return GOES_ON;
    }
    return GOES_ON;
}

/* A tile comes to slot `place` of ring `data`. */
static bool deliver(state *s, int data, int place) {
    slot *to = &s->slots[data][place];
    if (!to->comes) return false;
    const int which = s->for_barrier[data][place];
    slot *b = &s->slots[which][(to->comes - 1) % rings[which].slots];
    to->holds = to->comes, to->comes = 0;
    b->tiles--;
    complete(b, &rings[which]);
    return true;
}

/* Event number `event`: a step of an agent, or a tile. */
static outcome happen(state *s, int event) {
    if (event < n_agents) return ended(s, event) ? WAITS : step(s, event);
    event -= n_agents;
    return deliver(s, event / MAX_SLOTS, event % MAX_SLOTS) ? GOES_ON : WAITS;
}

/* Nothing can happen any more: all have ended, and no phase is half over. */
static outcome at_rest(const state *s) {
    for (int a = 0; a < n_agents; a++) {
        if (ended(s, a)) continue;
        const action *x = &agents[a].actions[s->next[a]];
        snprintf(message, sizeof message, "agent %d stands at chunk %d: %c%c", a, s->chunk[a],
                 rings[x->ring].letter, x->kind);
        return WRONG;
    }
    for (int i = 0; i < n_rings * MAX_SLOTS; i++) {
        if (!s->slots[i / MAX_SLOTS][i % MAX_SLOTS].arrived) continue;
        snprintf(message, sizeof message, "%c: some have arrived", rings[i / MAX_SLOTS].letter);
        return WRONG;
    }
    return GOES_ON;
}

/* ---- all orders, or many --------------------------------------------------------------------- */

static uint64_t seen[4 * MAX_STATES];
static state stack[MAX_DEPTH];

static uint64_t hash_of(const state *s) {
    uint64_t words[(sizeof *s + 7) / 8] = { 0 }, h = 0x9e3779b97f4a7c15u;
    memcpy(words, s, sizeof *s);
    for (size_t i = 0; i < sizeof words / 8; i++) {
        h = (h ^ words[i]) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    return h | 1;
}

/* Whether a state is new; `count` states are known. */
static bool is_new(const state *s) {
    const uint64_t h = hash_of(s);
    size_t i = h >> 20;
    for (;; i++) {
        uint64_t *at = &seen[i % (4 * MAX_STATES)];
        if (*at == h) return false;
        if (*at == 0) return *at = h, true;
    }
}

/* WAITS: there are too many states. */
static outcome try_all(void) {
    size_t depth = 1, states = 1;
    memset(seen, 0, sizeof seen);
    memset(&stack[0], 0, sizeof stack[0]);
    for (int a = 0; a < n_agents; a++) stack[0].chunk[a] = (uint8_t)agents[a].first;
    while (depth > 0) {
        const state now = stack[--depth];
        bool rests = true;
        for (int event = 0; event < n_agents + n_rings * MAX_SLOTS; event++) {
            state after = now;
            const outcome found = happen(&after, event);
            if (found == WRONG) return WRONG;
            if (memcmp(&after, &now, sizeof now) == 0) continue;
            rests = false;
            if (!is_new(&after)) continue;
            if (++states == MAX_STATES || depth == MAX_DEPTH) return WAITS;
            stack[depth++] = after;
        }
        if (rests && at_rest(&now) == WRONG) return WRONG;
    }
    return GOES_ON;
}

static uint32_t draw(uint64_t *random) {
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*random >> 33);
}

/* A run in which whoever is first in a drawn order goes on, and the order changes now and then. */
static outcome try_one(uint64_t random) {
    const int n = n_agents + n_rings * MAX_SLOTS;
    int order[MAX_AGENTS + MAX_RINGS * MAX_SLOTS];
    state s;
    memset(&s, 0, sizeof s);
    for (int a = 0; a < n_agents; a++) s.chunk[a] = (uint8_t)agents[a].first;
    for (int i = 0; i < n; i++) order[i] = i;
    for (bool moved = true; moved;) {
        for (int i = 0, few = draw(&random) % 4 == 0 ? n : 2; i < few; i++) {
            const uint32_t a = draw(&random) % (uint32_t)n, b = draw(&random) % (uint32_t)n;
            const int kept = order[a];
            order[a] = order[b], order[b] = kept;
        }
        moved = false;
        for (int i = 0; i < n && !moved; i++) {
            const state before = s;
            if (happen(&s, order[i]) == WRONG) return WRONG;
            moved = memcmp(&before, &s, sizeof s) != 0;
        }
    }
    return at_rest(&s);
}

static void check(const protocol *p) {
    static const int counts[] = { 0, 1, 2, 3, 4, 5, 7, 8, 13, 26 };
    outcome found = GOES_ON;
    int most = -1;    // chunks of which all orders were tried
    bool all = true;
    read_protocol(p);
    for (size_t i = 0; i < sizeof counts / sizeof counts[0] && found != WRONG; i++) {
        n_chunks = counts[i];
        found = all ? try_all() : WAITS;
        all = found == GOES_ON;
        if (all) most = n_chunks;
        for (uint64_t run = 0; run < 60 && found == WAITS; run++) {
            if (try_one(run) == WRONG) found = WRONG;
        }
    }
    if ((found == WRONG) != p->fails) {
        fail_msg("%s, %d chunks: %s", p->name, n_chunks, p->fails ? "found nothing" : message);
    }
    if (p->fails) printf("%s: found %s\n", p->name, message);
    else printf("%s: all orders of up to %d chunks, some of up to %d\n", p->name, most, n_chunks);
}

static void all_protocols(void **unused) {
    (void)unused;
    for (size_t i = 0; i < sizeof protocols / sizeof protocols[0]; i++) check(&protocols[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(all_protocols) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
