/* test_moebius.c - Kalman Linear Attention and the selective scan beyond what the operator table's
 * own tests ask: long sequences, harsh inputs, segments side by side, decoding, and closed forms.
 *
 * Where the judge is the float64 reference, tolerances are measured case by case
 * (support/op_error.h). */
#include "support/op_error.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "base/util.h"
#include "kernels/cpuid.h"
#include "kernels/cpu/simd/vector_targets.h"

#define MN_PER_TARGET "kernels/cpu/moebius/moebius_map.h"
#include "kernels/cpu/simd/per_target.h"

/* Changes drawn inputs. */
typedef void spoil_fn(mn_sample *s, uint64_t seed);

static void set_all(mn_sample *s, const char *name, uint64_t seed,
                    double (*value)(double u, int64_t i)) {
    mn_sample_tensor *t = mn_sample_find(s, name);
    for (int64_t i = 0; t->data && i < t->count; i++) {
        const double u = mn_rng_uniform(seed, (uint64_t)(t - s->tensors) + 50, (uint64_t)i);
        mn_sample_set(s, t->data, i, value(u, i));
    }
}

static void match_reference(op_case c, spoil_fn *spoil) {
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    op_tolerances tolerances;
    mn_sample drawn, want;
    c.dtype = MN_F32;
    op_open(&drawn, &c);
    if (spoil) spoil(&drawn, c.seed);
    c.dtype = MN_F64;
    op_open(&want, &c);
    op_convert(&want, &drawn);
    op_measure(&tolerances, &want, &c);
    c.dtype = MN_F32;
    for (int i = 0; i < n_targets; i++) {
        if (targets[i].dtype != MN_F32) continue;
        mn_sample got;
        op_open(&got, &c);
        op_convert(&got, &want);
        op_run_both(op_context(targets[i].name, 2), &got, &c);
        op_compare(targets[i].name, &got, &want, &tolerances, &c);
        CHECK(mn_sample_guards_intact(&got), "%s: wrote beside a tensor", targets[i].name);
        mn_sample_free(&got);
    }
    mn_sample_free(&drawn);
    mn_sample_free(&want);
}

static op_case case_of(mn_op_id op, int64_t B, int64_t T, int64_t V, int64_t K) {
    return (op_case){ .op = op, .fields = MN_ALL_FIELDS, .B = B, .T = T, .H = 1, .K = K, .V = V,
                      .seed = (uint64_t)(T + 7 * V + K) };
}

/* ---- against the reference ------------------------------------------------------------------ */

/* Dynamics of a layer at its start: slow decay, little noise, memories of hundreds of tokens. */
static double slow_decay(double u, int64_t i) { return (void)i, 0.9 + 0.099 * u; }
static double little_noise(double u, int64_t i) { return (void)i, 1e-5 * pow(100.0, u); }

static void like_a_layer(mn_sample *s, uint64_t seed) {
    set_all(s, "a", seed, slow_decay);
    set_all(s, "p", seed, little_noise);
}

static void awkward_sizes(void **state) {
    (void)state;
    static const int64_t V[] = { 1, 7, 8, 9, 15, 16, 17, 33, 130 }, K[] = { 1, 2, 3, 16, 17, 64 };
    for (size_t i = 0; i < MN_COUNTOF(V) * MN_COUNTOF(K); i++) {
        op_case c = case_of(MN_OP_moebius, 1 + (int64_t)i % 2, 31 + (int64_t)i % 4,
                            V[i % MN_COUNTOF(V)], K[i / MN_COUNTOF(V)]);
        c.choice[0] = (int)(i % 3 == 0);
        match_reference(c, NULL);
        c.op = MN_OP_scan;
        c.choice[0] = (int)(i % 2);
        match_reference(c, NULL);
    }
    check_done();
}

/* Many blocks, and more than the 512 tokens of one chunk where other implementations go wrong. */
static void gradients_of_long_sequences(void **state) {
    (void)state;
    op_case c = case_of(MN_OP_moebius, 1, 1500, 20, 8);
    match_reference(c, like_a_layer);
    c.choice[0] = 1;
    match_reference(c, like_a_layer);
    match_reference(case_of(MN_OP_moebius, 2, 1500, 5, 3), NULL);
    c.op = MN_OP_scan;    // choice 1: with softplus, without which a drawn state may grow
    match_reference(c, NULL);
    check_done();
}

/* Cut into segments where V is small, whole where it is not; the first also as part of a pack. */
static void segments_match_reference(void **state) {
    (void)state;
    static const int64_t cu[] = { 0, 10, 2500, 2600, 4700 };
    match_reference(case_of(MN_OP_moebius, 1, 2048, 3, 5), like_a_layer);
    match_reference(case_of(MN_OP_moebius, 1, 3001, 11, 4), NULL);
    op_case c = case_of(MN_OP_moebius, 1, cu[4], 5, 4);
    c.cu_seqlens = cu;
    c.n_seqs = 4;
    match_reference(c, like_a_layer);
    check_done();
}

/* ---- harsh inputs --------------------------------------------------------------------------- */

static double harsh_decay(double u, int64_t i) {
    static const double values[] = { 1.0, 1.0 - 1e-6, 0.5, 1e-3, 1e-12, -0.7 };
    return (void)u, values[i % 6];
}
static double harsh_noise(double u, int64_t i) {
    static const double values[] = { 0.0, 1e-7, 1e-3, 1.0, 100.0 };
    return (void)u, values[i % 5];
}
static double harsh_precision(double u, int64_t i) {
    return i % 7 == 0 ? 1e-4 : i % 11 == 0 ? 1e4 : pow(10.0, 8.0 * u - 4.0);
}
static double harsh_key(double u, int64_t i) {
    return i % 3 == 0 ? 0.0 : i % 17 == 0 ? 1e-15 : i % 5 == 0 ? 100.0 * u : 2.0 * u - 1.0;
}

static void harsh(mn_sample *s, uint64_t seed) {
    set_all(s, "a", seed, harsh_decay);
    set_all(s, "p", seed, harsh_noise);
    set_all(s, "prec", seed, harsh_precision);
    set_all(s, "k", seed, harsh_key);
}

/* Far outside: precisions that allow no bound, and flat or negative priors now and then. */
static double absurd_precision(double u, int64_t i) {
    return i % 41 == 3 ? 1e14 : i % 29 == 3 ? -0.25 * u : u;
}
static double flat_prior(double u, int64_t i) { return i % 2 ? 0.0 : 1e-14 * u; }
static double some_decay(double u, int64_t i) { return (void)i, 0.3 + 0.7 * u; }

static void absurd(mn_sample *s, uint64_t seed) {
    set_all(s, "prec", seed, absurd_precision);
    set_all(s, "lam0", seed, flat_prior);
    set_all(s, "a", seed, some_decay);
}

/* Nothing is ever observed: precision starts at nothing and stays there, eta grows by 1 / a. */
static double zero(double u, int64_t i) { return (void)u, (void)i, 0.0; }

static void unobserved(mn_sample *s, uint64_t seed) {
    set_all(s, "a", seed, some_decay);
    set_all(s, "lam0", seed, zero);
    set_all(s, "k", seed, zero);
}

static void harsh_inputs_match_reference(void **state) {
    (void)state;
    for (int prior = 0; prior < 2; prior++) {
        op_case c = case_of(MN_OP_moebius, 1, 150, 19, 7);
        c.choice[0] = prior;
        match_reference(c, harsh);
        match_reference(c, absurd);
        c.T = 6;
        match_reference(c, unobserved);
    }
    match_reference(case_of(MN_OP_moebius, 1, 2100, 6, 3), absurd);
    check_done();
}

/* Over 65,536 tokens a precision neither vanishes nor overflows, whatever the form. */
static void precision_stays_positive(void **state) {
    (void)state;
    static const int64_t widths[] = { 6, 18 };
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int i = 0; i < 2 * n_targets; i++) {
        op_case c = case_of(MN_OP_moebius, 1, 65536, widths[i % 2], 5);
        const op_target *target = &targets[i / 2];
        mn_sample s;
        c.dtype = target->dtype;
        op_open(&s, &c);
        harsh(&s, 3);
        op_run(op_context(target->name, 2), &s, MN_FORWARD, &c);
        static const char *const names[] = { "y", "yvar", "lam", "eta" };
        for (size_t n = 0; n < MN_COUNTOF(names); n++) {
            const mn_sample_tensor *t = mn_sample_find(&s, names[n]);
            const bool positive = n == 1 || n == 2;
            for (int64_t at = 0; at < t->count; at++) {
                const double x = mn_sample_get(&s, t->data, at);
                if (!CHECK(isfinite(x) && (!positive || x > 0.0), "%s, V=%d: %s[%d] is %g",
                           target->name, (int)c.V, names[n], (int)at, x)) break;
            }
        }
        mn_sample_free(&s);
    }
    check_done();
}

/* ---- one sequence in pieces ----------------------------------------------------------------- */

/* Runs tokens [t0, t1) of `whole` from `state_of`'s final state (or whole's initial one) into part,
 * and puts its tokens into `joined`. Single tokens keep their state in place, as decoding does. */
static void run_piece(mn_context *context, mn_sample *part, mn_sample *joined,
                      const mn_sample *whole, const mn_sample *state_of, op_case c, int64_t t0,
                      int64_t t1) {
    c.T = t1 - t0;
    op_open(part, &c);
    op_copy_shared(part, whole, OP_GIVEN);
    op_copy_states(part, 0, whole, 0, c.B, OP_GIVEN);
    if (state_of) op_carry_state(part, state_of);
    if (c.T == 1) op_stay_in_place(part);
    op_copy_tokens(part, 0, whole, t0, c.T, OP_GIVEN);
    op_run(context, part, MN_FORWARD, &c);
    op_copy_tokens(joined, t0, part, 0, c.T, OP_COMPUTED);
}

/* In pieces of `step` tokens, against all at once. A state that is handed over is rounded, and a
 * single token is computed in another order: a few roundings of 2^-24 a step, which fade with the
 * state over the hundreds of tokens it remembers, so outputs agree to some tens of them. */
static void pieces_match_whole(const op_target *target, op_case c, int64_t step, spoil_fn *spoil) {
    mn_context *context = op_context(target->name, 2);
    mn_sample whole, joined, part[2];
    c.dtype = target->dtype;
    op_open(&whole, &c);
    op_open(&joined, &c);
    if (spoil) spoil(&whole, c.seed);
    op_run(context, &whole, MN_FORWARD, &c);
    int now = 0;
    for (int64_t t = 0; t < c.T; t += step, now = !now) {
        if (t >= 2 * step) mn_sample_free(&part[now]);
        run_piece(context, &part[now], &joined, &whole, t ? &part[!now] : NULL, c, t,
                  mn_min(t + step, c.T));
    }
    op_copy_states(&joined, 0, &part[!now], 0, c.B, OP_COMPUTED);
    const double tolerance = c.dtype == MN_F64 ? 1e-13 : 4e-6;
    for (int i = 0; i < whole.n_tensors; i++) {
        const mn_sample_tensor *t = &whole.tensors[i];
        double error = 0.0, size = 0.0;
        for (int64_t at = 0; t->field->role == MN_ROLE_OUT && at < t->count; at++) {
            const double x = mn_sample_get(&whole, t->data, at);
            error += pow(x - mn_sample_get(&joined, joined.tensors[i].data, at), 2.0);
            size += x * x;
        }
        CHECK(sqrt(error) <= tolerance * sqrt(size), "%s, pieces of %d: %s off by %.2e of %.2e, %s",
              target->name, (int)step, t->field->name, sqrt(error), sqrt(size), op_case_text(&c));
    }
    mn_sample_free(&part[0]);
    mn_sample_free(&part[1]);
    mn_sample_free(&whole);
    mn_sample_free(&joined);
}

/* Pieces below the length that is cut run token after token, so this holds the two forms
 * together. */
static void segments_match_sequential(void **state) {
    (void)state;
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int i = 0; i < n_targets; i++) {
        pieces_match_whole(&targets[i], case_of(MN_OP_moebius, 1, 5000, 7, 6), 1000, like_a_layer);
        pieces_match_whole(&targets[i], case_of(MN_OP_moebius, 2, 2200, 16, 3), 1100, NULL);
    }
    check_done();
}

/* Which form a sequence takes is its own affair: in a pack, sequences on both sides of the length
 * that is cut give the bits they give alone. */
static void packed_segments_are_separate(void **state) {
    (void)state;
    static const int64_t cu[] = { 0, 10, 2500, 2600, 4700 };
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int i = 0; i < n_targets; i++) {
        op_case c = case_of(MN_OP_moebius, 1, cu[4], 9, 4);
        mn_context *context = op_context(targets[i].name, 2);
        mn_sample packed, joined, alone;
        c.dtype = targets[i].dtype;
        c.cu_seqlens = cu;
        c.n_seqs = 4;
        op_open(&packed, &c);
        op_open(&joined, &c);
        op_run(context, &packed, MN_FORWARD, &c);
        for (int64_t n = 0; n < 4; n++) {
            op_case one = c;
            one.cu_seqlens = NULL;
            one.T = cu[n + 1] - cu[n];
            op_open(&alone, &one);
            op_copy_shared(&alone, &packed, OP_GIVEN);
            op_copy_states(&alone, 0, &packed, n, 1, OP_GIVEN);
            op_copy_tokens(&alone, 0, &packed, cu[n], one.T, OP_GIVEN);
            op_run(op_context(targets[i].name, 1), &alone, MN_FORWARD, &one);
            op_copy_tokens(&joined, cu[n], &alone, 0, one.T, OP_COMPUTED);
            op_copy_states(&joined, n, &alone, 0, 1, OP_COMPUTED);
            mn_sample_free(&alone);
        }
        for (int f = 0; f < packed.n_tensors; f++) {
            const mn_sample_tensor *t = &packed.tensors[f];
            const size_t bytes = (size_t)t->count * (c.dtype == MN_F64 ? 8 : 4);
            if (t->field->role != MN_ROLE_OUT) continue;
            CHECK(memcmp(t->data, joined.tensors[f].data, bytes) == 0, "%s: %s differs",
                  targets[i].name, t->field->name);
        }
        mn_sample_free(&packed);
        mn_sample_free(&joined);
    }
    check_done();
}

static void steps_match_scan(void **state) {
    (void)state;
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int i = 0; i < n_targets; i++) {
        op_case c = case_of(MN_OP_moebius, 2, 40, 37, 19);
        pieces_match_whole(&targets[i], c, 1, like_a_layer);
        c.choice[0] = 1;
        pieces_match_whole(&targets[i], c, 1, NULL);
        c.op = MN_OP_scan;
        pieces_match_whole(&targets[i], c, 1, NULL);
    }
    check_done();
}

/* ---- closed forms --------------------------------------------------------------------------- */

/* Without process noise (its floor, 1e-12, is below what float32 sees here) den is a^2, and both
 * states are convolutions: lam_t = a^-2t lam0 + sum_i a^-2(t-i) prec_i k_i^2, and the same with
 * a^-1 and prec v k for eta. */
static void without_noise_it_is_a_convolution(void **state) {
    (void)state;
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int i = 0; i < n_targets; i++) {
        op_case c = case_of(MN_OP_moebius, 1, 100, 21, 1);
        mn_sample s;
        c.dtype = targets[i].dtype;
        op_open(&s, &c);
        set_all(&s, "p", 1, zero);
        like_a_layer(&s, 1);
        set_all(&s, "p", 1, zero);
        op_run(op_context(targets[i].name, 2), &s, MN_FORWARD, &c);
#define AT(name, at) mn_sample_get(&s, mn_sample_find(&s, name)->data, at)
        for (int64_t m = 0; m < c.V; m++) {
            const double a = AT("a", m), lam0 = AT("lam0", m), eta0 = AT("eta0", m);
            for (int64_t t = 0; t < c.T; t += 9) {
                double lam = lam0 * pow(a, -2.0 * (double)(t + 1)),
                       eta = eta0 * pow(a, -(double)(t + 1));
                double size = fabs(eta);
                for (int64_t j = 0; j <= t; j++) {
                    const double prec = AT("prec", j * c.V + m), k = AT("k", j);
                    const double gain = pow(a, -(double)(t - j));
                    lam += gain * gain * prec * k * k;
                    eta += gain * prec * AT("v", j * c.V + m) * k;
                    size += fabs(gain * prec * AT("v", j * c.V + m) * k);
                }
                /* den is off by 1e-12 lam / a^2, with lam up to 1e11 here at the end of the line */
                const double q = AT("q", t), off = 1e-12 * lam * (double)c.T;
                const double tolerance = (c.dtype == MN_F64 ? 1e-12 : 1e-5) + off;
                CHECK(fabs(AT("y", t * c.V + m) - q * eta / lam) <=
                          tolerance * fabs(q) * size / lam,
                      "%s: y[%d,%d]", targets[i].name, (int)t, (int)m);
                CHECK(fabs(AT("yvar", t * c.V + m) - q * q / lam) <= tolerance * q * q / lam,
                      "%s: yvar[%d,%d]", targets[i].name, (int)t, (int)m);
            }
        }
#undef AT
        mn_sample_free(&s);
    }
    check_done();
}

/* ---- maps ----------------------------------------------------------------------------------- */

typedef struct map_target {
    const char *name;
    int width;
    bool (*available)(void);
    void (*compose)(float *out, const float *later, const float *earlier, int64_t count);
} map_target;

#if MN_HAVE_AVX2 || MN_HAVE_AVX512 || MN_HAVE_NEON
enum { WIDTH_avx2 = 8, WIDTH_avx512 = 16, WIDTH_neon = 8 };    // floats of a vector

static const map_target map_targets[] = {
#define MAP_TARGET(id, name)                                                                       \
    { #name, WIDTH_##name, mn_cpu_has_##name, mn_moebius_compose_##name },
    MN_VECTOR_TARGETS(MAP_TARGET)
};

/* The map of one token in lane `i` of entries `width` apart. */
static void one_token(float *map, int width, int i, double a, double p, double prec, double k,
                      double v) {
    const double d = fmax(a * a, 1e-12), phi = prec * k * k, r = prec * v * k;
    const double entries[MOEBIUS_ENTRIES] = { 1 + phi * p, phi * d, p, d, r * p, r * d, a };
    for (int e = 0; e < MOEBIUS_ENTRIES; e++) map[e * width + i] = (float)entries[e];
}

/* A map of one token composed with itself 20 times stands for 2^20 equal tokens: entries stay >= 0
 * with A + D = 1, and the state it leads to is the fixed point of the filter's equations. */
static void composed_maps_stay_bounded(void **state) {
    (void)state;
    for (size_t t = 0; t < MN_COUNTOF(map_targets); t++) {
        const map_target *target = &map_targets[t];
        if (!target->available()) continue;
        const int w = target->width;
        _Alignas(64) float map[MOEBIUS_ENTRIES * 16];
        double a[16], p[16], phi[16];
        for (int i = 0; i < w; i++) {
            const double k = i % 5 == 4 ? 0.0 : mn_rng_normal(1, 1, (uint64_t)i);
            const double prec = harsh_precision(mn_rng_uniform(1, 2, (uint64_t)i), i);
            a[i] =
                i % 3 == 2 ? harsh_decay(0, i) : slow_decay(mn_rng_uniform(1, 3, (uint64_t)i), i);
            p[i] = fmax(harsh_noise(0, i), 1e-7);
            phi[i] = prec * k * k;
            one_token(map, w, i, a[i], p[i], prec, k, 0.5);
        }
        for (int n = 0; n < 20; n++) {
            target->compose(map, map, map, 1);
            for (int i = 0; i < w; i++) {
                const double A = map[i], B = map[w + i], C = map[2 * w + i], D = map[3 * w + i];
                CHECK(A >= 0 && B >= 0 && C >= 0 && D >= 0 && isfinite(B) && isfinite(C),
                      "%s: entries %g %g %g %g", target->name, A, B, C, D);
                CHECK(fabs(A + D - 1.0) <= 1e-6, "%s: A + D = %.9g", target->name, A + D);
                CHECK(B * C <= 0.25 * (1 + 1e-5), "%s: BC = %.9g", target->name, B * C);
            }
        }
        /* lam solves lam (a^2 + p lam) = lam + phi (a^2 + p lam); started from lam = 1 */
        for (int i = 0; i < w; i++) {
            const double d = fmax(a[i] * a[i], 1e-12), half = (1 + phi[i] * p[i] - d) / 2;
            const double root = sqrt(half * half + p[i] * phi[i] * d);
            const double want = half >= 0 ? (half + root) / p[i] : phi[i] * d / (root - half);
            const double got =
                ((double)map[i] + map[w + i]) / ((double)map[2 * w + i] + map[3 * w + i]);
            /* lanes with a = 1, or close to it, and nothing observed have not arrived after 2^20 */
            if (phi[i] == 0.0 && d > 0.99) continue;
            /* an error of 2^-24 in each of 20 squarings doubles at the next: 2^-4 at the very worst
             * where the map is almost the identity, and far less where it contracts */
            CHECK(fabs(got - want) <= 2e-3 * want, "%s: lane %d leads to %g, not %g", target->name,
                  i, got, want);
        }
    }
    check_done();
}
#endif

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(awkward_sizes),
        cmocka_unit_test(gradients_of_long_sequences),
        cmocka_unit_test(segments_match_reference),
        cmocka_unit_test(harsh_inputs_match_reference),
        cmocka_unit_test(precision_stays_positive),
        cmocka_unit_test(segments_match_sequential),
        cmocka_unit_test(packed_segments_are_separate),
        cmocka_unit_test(steps_match_scan),
        cmocka_unit_test(without_noise_it_is_a_convolution),
#if MN_HAVE_AVX2 || MN_HAVE_AVX512 || MN_HAVE_NEON
        cmocka_unit_test(composed_maps_stay_bounded),
#endif
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("moebius and scan", tests, NULL, NULL);
}
