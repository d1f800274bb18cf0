/* quantize.c - weights to 8 or 4 bits: scales and codes that make the error small.
 *
 * In 8 bits a group's scale is its largest size over 127. In 4 bits, scale s and least value m of a
 * group minimise sum_k v_k (s q_k + m - x_k)^2: from several starts, of which each sets codes, s
 * and m follow from the codes by least squares, and then codes from s and m.
 *
 * With second moments H of the inputs, inputs are taken in their order, and the error of one is
 * made good by those behind it, as in GPTQ (Frantar et al. 2022): with H^-1 = U'U, weight j moves
 * by -e_k U_kj / U_kk. */
#include "ops/quantize.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"

/* ---- groups ---------------------------------------------------------------------------------- */

/* The nearest whole number within [low, high], ties to even: of sizes below 2^22. */
static float nearest(float x, float low, float high) {
    const float inside = x < low ? low : x > high ? high : x;
    return inside + 0x1.8p23f - 0x1.8p23f;
}

static float scale8(const float *x, int64_t n) {
    float most = 0.0f;
    for (int64_t i = 0; i < n; i++) most = fmaxf(most, fabsf(x[i]));
    return most / 127.0f;
}

static int code8(float x, float scale) {
    return scale > 0.0f ? (int)nearest(x / scale, -127.0f, 127.0f) : 0;
}

typedef struct pair {
    uint16_t scale, least;
} pair;

static uint32_t packed(pair p) {
    return (uint32_t)p.least << 16 | p.scale;
}

/* `inverse` is that of the scale, 0 where that is 0. */
static float code4(float x, float inverse, float least) {
    return nearest((x - least) * inverse, 0.0f, 15.0f);
}

static float inverse_of(float scale) {
    return scale > 0.0f ? 1.0f / scale : 0.0f;
}

static double importance_of(const float *v, int64_t i) {
    return v ? (double)v[i] : 1.0;
}

/* Scale and least value by least squares from the codes that `scale` and `least` make; false where
 * all codes are the same. */
static bool fit(double *s, double *m, const float *x, const float *v, int64_t n, double scale,
                double least) {
    const float inverse = inverse_of((float)scale), low = (float)least;
    double one = 0, sum_q = 0, sum_qq = 0, sum_x = 0, sum_qx = 0;
    for (int64_t i = 0; i < n; i++) {
        const double w = importance_of(v, i), q = code4(x[i], inverse, low);
        one += w;
        sum_q += w * q;
        sum_qq += w * q * q;
        sum_x += w * x[i];
        sum_qx += w * q * x[i];
    }
    const double d = one * sum_qq - sum_q * sum_q;
    if (!(d > 0.0)) return false;
    *s = (one * sum_qx - sum_q * sum_x) / d;
    *m = (sum_x - *s * sum_q) / one;
    return *s > 0.0 && isfinite(*s) && isfinite(*m);
}

static double error4(const float *x, const float *v, int64_t n, pair p) {
    const float scale = mn_f16_to_float(p.scale), least = mn_f16_to_float(p.least);
    const float inverse = inverse_of(scale);
    double error = 0.0;
    for (int64_t i = 0; i < n; i++) {
        const double d = (double)scale * code4(x[i], inverse, least) + least - x[i];
        error += importance_of(v, i) * d * d;
    }
    return error;
}

enum { STARTS = 12, ROUNDS = 2, STEPS_4 = 15 };

/* The pair with the least error among those that the starts lead to. The starts' ranges go from
 * well inside that of the weights to a little beyond it. */
static pair pair4(const float *x, const float *v, int64_t n) {
    float low = x[0], high = x[0];
    for (int64_t i = 1; i < n; i++) {
        low = fminf(low, x[i]);
        high = fmaxf(high, x[i]);
    }
    const double range = (double)high - low, middle = 0.5 * ((double)high + low);
    pair best = { mn_f16_from_float((float)(range / STEPS_4)), mn_f16_from_float(low) };
    double least_error = error4(x, v, n, best);
    for (int start = 0; start < STARTS && range > 0.0; start++) {
        const double part = 0.6 + 0.45 * start / (STARTS - 1);
        double s = part * range / STEPS_4, m = middle - 0.5 * part * range;
        for (int round = 0; round < ROUNDS && fit(&s, &m, x, v, n, s, m); round++) {
            const pair p = { mn_f16_from_float((float)s), mn_f16_from_float((float)m) };
            const double error = error4(x, v, n, p);
            if (error < least_error) {
                least_error = error;
                best = p;
            }
        }
    }
    return best;
}

/* ---- rows ------------------------------------------------------------------------------------ */

typedef struct job {
    mn_quant_stored *out;
    const float *w;
    const mn_quantize_how *how;
    float *rows;                 // a row for each worker, where errors are made good
    double *errors;              // two for each row
    _Atomic bool bad;
} job;

enum { ITEM_ROWS = 8 };

static int64_t groups_of(const mn_quant_stored *s) {
    return mn_ceil_div(s->cols, s->group);
}

/* What the error of input k does to the weights behind it. */
static void make_good(float *x, const float *inverse, int64_t cols, int64_t k, float error) {
    const float *u = inverse + k * cols;
    const float by = error / u[k];
    for (int64_t j = k + 1; j < cols; j++) x[j] -= by * u[j];
}

static void put4(uint8_t *codes, int64_t k, int q) {
    if (k % 2 == 0) codes[k / 2] = (uint8_t)q;
    else codes[k / 2] |= (uint8_t)(q << 4);
}

/* Input by input, the group's scale being set where it begins. x is changed where errors are made
 * good. */
static void quantize_row(const job *j, float *x, int64_t row) {
    mn_quant_stored *s = j->out;
    const float *v = j->how->importance, *inverse = j->how->inverse;
    const int64_t first = row * groups_of(s);
    const int64_t row_bytes = s->bits == 8 ? s->cols : (s->cols + 1) / 2;
    unsigned char *codes = (unsigned char *)s->codes + row * row_bytes;
    for (int64_t g = 0; g < groups_of(s); g++) {
        const int64_t k0 = g * s->group, k1 = mn_min(k0 + s->group, s->cols);
        pair p = { 0, 0 };
        float scale, least = 0.0f, inverse_scale = 0.0f;
        if (s->bits == 8) {
            scale = scale8(x + k0, k1 - k0);
            ((float *)s->scales)[first + g] = scale;
        } else {
            p = pair4(x + k0, v ? v + k0 : NULL, k1 - k0);
            scale = mn_f16_to_float(p.scale);
            least = mn_f16_to_float(p.least);
            inverse_scale = inverse_of(scale);
            ((uint16_t *)s->scales)[first + g] = p.scale;
            ((uint16_t *)s->least)[first + g] = p.least;
        }
        for (int64_t k = k0; k < k1; k++) {
            const int q = s->bits == 8 ? code8(x[k], scale)
                                       : (int)code4(x[k], inverse_scale, least);
            const float w = s->bits == 8 ? scale * (float)q : fmaf(scale, (float)q, least);
            if (s->bits == 8) ((int8_t *)codes)[k] = (int8_t)q;
            else put4(codes, k, q);
            if (inverse) make_good(x, inverse, s->cols, k, x[k] - w);
        }
    }
}

static float stored_weight(const mn_quant_stored *s, int64_t row, int64_t k) {
    const int64_t at = row * groups_of(s) + k / s->group;
    if (s->bits == 8) {
        return ((const float *)s->scales)[at] *
               (float)((const int8_t *)s->codes)[row * s->cols + k];
    }
    const uint8_t byte = ((const uint8_t *)s->codes)[row * ((s->cols + 1) / 2) + k / 2];
    const pair p = { ((const uint16_t *)s->scales)[at], ((const uint16_t *)s->least)[at] };
    return mn_quant_weight4(packed(p), k % 2 ? byte >> 4 : byte & 15);
}

static void quantize_rows(void *context, int64_t item, int worker) {
    job *j = context;
    const int64_t cols = j->out->cols, last = mn_min((item + 1) * ITEM_ROWS, j->out->rows);
    const float most = j->out->bits == 8 ? 3e38f : 30000.0f;
    const float *v = j->how->importance;
    float *x = j->rows + worker * cols;
    for (int64_t row = item * ITEM_ROWS; row < last; row++) {
        const float *w = j->w + row * cols;
        for (int64_t k = 0; k < cols; k++) {
            if (!(fabsf(w[k]) <= most)) j->bad = true;
        }
        if (j->bad) return;
        memcpy(x, w, (size_t)cols * sizeof *x);
        quantize_row(j, x, row);
        double error = 0.0, all = 0.0;
        for (int64_t k = 0; k < cols; k++) {
            const double d = (double)stored_weight(j->out, row, k) - w[k];
            error += importance_of(v, k) * d * d;
            all += importance_of(v, k) * w[k] * w[k];
        }
        j->errors[2 * row] = error;
        j->errors[2 * row + 1] = all;
    }
}

mn_status mn_quantize(mn_quant_stored *out, const float *w, const mn_quantize_how *how,
                      mn_threads *threads, double *error, double *all) {
    static const mn_quantize_how plain;
    const int64_t workers = threads ? mn_threads_count(threads) : 1;
    const int64_t items = mn_ceil_div(out->rows, ITEM_ROWS);
    job j = { .out = out, .w = w, .how = how ? how : &plain };
    j.rows = malloc((size_t)(workers * out->cols) * sizeof *j.rows);
    j.errors = malloc((size_t)out->rows * 2 * sizeof *j.errors);
    mn_status st = MN_OK;
    if (!j.rows || !j.errors) st = mn_fail(MN_ERR_MEMORY, "no memory to quantise a matrix");
    if (st == MN_OK && threads) mn_threads_run(threads, items, quantize_rows, &j);
    for (int64_t i = 0; st == MN_OK && !threads && i < items; i++) quantize_rows(&j, i, 0);
    if (st == MN_OK && j.bad) {
        st = mn_fail(MN_ERR_ARGUMENT, "a weight is not finite%s",
                     out->bits == 8 ? "" : ", or beyond what float16 scales hold");
    }
    *error = *all = 0.0;
    for (int64_t row = 0; st == MN_OK && row < out->rows; row++) {
        *error += j.errors[2 * row];
        *all += j.errors[2 * row + 1];
    }
    free(j.rows);
    free(j.errors);
    return st;
}

/* ---- files and memory ------------------------------------------------------------------------ */

mn_quant_sizes mn_quant_stored_sizes(const mn_quant_stored *s) {
    const size_t rows = (size_t)s->rows, pairs = rows * (size_t)groups_of(s);
    if (s->bits == 8) return (mn_quant_sizes){ rows * (size_t)s->cols, pairs * sizeof(float), 0 };
    return (mn_quant_sizes){ rows * (size_t)((s->cols + 1) / 2), pairs * 2, pairs * 2 };
}

static bool f16_finite(uint16_t x) {
    return (x >> 10 & 31) != 31;
}

mn_status mn_quant_check(const mn_quant_stored *s, const char *name) {
    const int64_t n = s->rows * groups_of(s);
    const size_t codes = mn_quant_stored_sizes(s).codes;
    for (int64_t i = 0; i < n; i++) {
        const bool fine = s->bits == 8 ? isfinite(((const float *)s->scales)[i]) != 0
                                       : f16_finite(((const uint16_t *)s->scales)[i]) &&
                                             f16_finite(((const uint16_t *)s->least)[i]);
        if (fine) continue;
        return mn_fail(MN_ERR_FORMAT, "%s: the scale of group %lld of row %lld is not finite", name,
                       (long long)(i % groups_of(s)), (long long)(i / groups_of(s)));
    }
    for (size_t i = 0; s->bits == 8 && i < codes; i++) {
        if (((const int8_t *)s->codes)[i] != -128) continue;
        return mn_fail(MN_ERR_FORMAT, "%s: code %zu is -128; codes go from -127 to 127", name, i);
    }
    return MN_OK;
}

static int64_t strips_of(const mn_quant *q) {
    return mn_ceil_div(q->rows, MN_QUANT_STRIP);
}

size_t mn_quant_codes_bytes(const mn_quant *q) {
    return (size_t)(strips_of(q) * mn_quant_strip_bytes(q));
}

size_t mn_quant_scales_bytes(const mn_quant *q) {
    return (size_t)(strips_of(q) * mn_quant_groups(q) * MN_QUANT_STRIP) * 4;
}

static void *take(size_t bytes) {
    const size_t whole = (bytes + 63) / 64 * 64;
    void *memory = aligned_alloc(64, whole > 0 ? whole : 64);
    if (memory) memset(memory, 0, whole);
    return memory;
}

/* Where input k of a row's lane lies among the strip's codes. */
static void move_codes(const mn_quant *q, const mn_quant_stored *s, int64_t row, bool load) {
    const int64_t lane = row % MN_QUANT_STRIP;
    unsigned char *strip = (unsigned char *)q->codes +
                           row / MN_QUANT_STRIP * mn_quant_strip_bytes(q);
    uint8_t *own = (uint8_t *)s->codes + row * mn_quant_file_row(q);
    if (q->bits == 8) {
        for (int64_t k = 0; k < q->cols; k++) {
            unsigned char *at = strip + k * MN_QUANT_STRIP + lane;
            if (load) *at = own[k];
            else own[k] = *at;
        }
        return;
    }
    uint32_t *words = (uint32_t *)strip;
    for (int64_t k = 0; k < q->cols; k++) {
        uint32_t *word = &words[k / 8 * MN_QUANT_STRIP + lane];
        const int up = (int)(k % 8) * 4;
        if (load) *word |= (uint32_t)(k % 2 ? own[k / 2] >> 4 : own[k / 2] & 15) << up;
        else put4(own, k, (int)(*word >> up & 15));
    }
}

static void move_scales(const mn_quant *q, const mn_quant_stored *s, int64_t row, bool load) {
    const int64_t groups = mn_quant_groups(q), lane = row % MN_QUANT_STRIP;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t at = (row / MN_QUANT_STRIP * groups + g) * MN_QUANT_STRIP + lane;
        const int64_t there = row * groups + g;
        float *scale = (float *)q->scales + at;
        uint32_t *both = (uint32_t *)q->scales + at;
        if (q->bits == 8 && load) *scale = ((const float *)s->scales)[there];
        else if (q->bits == 8) ((float *)s->scales)[there] = *scale;
        else if (load) {
            *both = packed((pair){ ((const uint16_t *)s->scales)[there],
                                   ((const uint16_t *)s->least)[there] });
        } else {
            ((uint16_t *)s->scales)[there] = (uint16_t)*both;
            ((uint16_t *)s->least)[there] = (uint16_t)(*both >> 16);
        }
    }
}

mn_status mn_quant_load(mn_quant **out, const mn_quant_stored *s) {
    mn_quant *q = calloc(1, sizeof *q);
    *out = q;
    if (!q) return mn_fail(MN_ERR_MEMORY, "no memory for quantised weights");
    *q = (mn_quant){ .bits = s->bits, .rows = s->rows, .cols = s->cols, .group = s->group };
    q->codes = take(mn_quant_codes_bytes(q));
    q->scales = take(mn_quant_scales_bytes(q));
    if (!q->codes || !q->scales) {
        mn_quant_free(q);
        *out = NULL;
        return mn_fail(MN_ERR_MEMORY, "no memory for quantised weights; use a smaller model");
    }
    for (int64_t row = 0; row < q->rows; row++) {
        move_codes(q, s, row, true);
        move_scales(q, s, row, true);
    }
    return MN_OK;
}

void mn_quant_store(mn_quant_stored *out, const mn_quant *q) {
    for (int64_t row = 0; row < q->rows; row++) {
        move_codes(q, out, row, false);
        move_scales(q, out, row, false);
    }
}

void mn_quant_free(mn_quant *q) {
    if (!q) return;
    free((void *)q->codes);
    free((void *)q->scales);
    free(q);
}

size_t mn_quant_device_codes_bytes(const mn_quant *q) {
    return (size_t)(q->rows * mn_quant_row_bytes(q));
}

size_t mn_quant_device_scales_bytes(const mn_quant *q) {
    return (size_t)(q->rows * mn_quant_groups(q)) * 4;
}

void mn_quant_to_device_form(unsigned char *codes, unsigned char *scales, const mn_quant *q) {
    const int64_t groups = mn_quant_groups(q), row_bytes = mn_quant_row_bytes(q);
    memset(codes, 0, mn_quant_device_codes_bytes(q));
    for (int64_t row = 0; row < q->rows; row++) {
        const int64_t strip = row / MN_QUANT_STRIP;
        const mn_quant_stored one = { .codes = codes + row * (row_bytes - mn_quant_file_row(q)) };
        move_codes(q, &one, row, false);
        for (int64_t g = 0; g < groups; g++) {
            const int64_t at = (strip * groups + g) * MN_QUANT_STRIP + row % MN_QUANT_STRIP;
            memcpy(scales + (row * groups + g) * 4, (const uint32_t *)q->scales + at, 4);
        }
    }
}

void mn_quant_unpack(float *out, const mn_quant *q) {
    for (int64_t row = 0; row < q->rows; row++) {
        for (int64_t k = 0; k < q->cols; k++) out[row * q->cols + k] = mn_quant_weight(q, row, k);
    }
}
