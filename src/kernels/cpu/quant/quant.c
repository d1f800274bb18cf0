/* quant.c - products with weights of 8 or 4 bits. Contract in quant.h, layout in kernels/quant.h.
 *
 *   w = scale q  or  fma(scale, q, least)        s = fma(a[k], w[k], s) for k going up
 *
 * A vector holds the same input of MN_VW rows of W, which are columns of C. Codes of 8 bits are
 * widened one input at a time; of 4 bits a vector of 32-bit words brings eight inputs, shifted down
 * one after the other. */
#include "kernels/cpu/quant/quant.h"

#include "base/util.h"
#include "kernels/cpu/simd/row.h"

enum {
    PER_STRIP = MN_QUANT_STRIP / MN_VW,    // vectors of a strip
    ROWS = 4,                              // of A that share a weight in registers
    MOST_VECTORS = 4,
};

/* Scales, and in 4 bits least values, of a vector of rows. */
typedef struct {
    vf scale, least;
} levels;

static inline vf widen8(const unsigned char *codes) {
    return vf_from_vi(vi_load_i8((const int8_t *)codes));
}

static inline vf widen4(vi words, int i) {
    return vf_from_bits4(vi_srl(words, 4 * i));
}

/* Half precision, finite: exponent and fraction moved into place, and the exponent's offset made
 * good by a product, which is exact for subnormal numbers too. */
static inline vf from_half(vi h) {
    const vf size = vi_as_vf(vi_shl(vi_and(h, vi_set1(0x7fff)), 13));
    const vi sign = vi_shl(vi_and(h, vi_set1(0x8000)), 16);
    return vi_as_vf(vi_or(vf_as_vi(vf_mul(size, vf_set1(0x1p112f))), sign));
}

static inline levels load_levels(const mn_quant *q, int bits, int64_t at) {
    if (bits == 8) return (levels){ vf_load((const float *)q->scales + at), vf_zero() };
    const vi pair = vi_load((const uint32_t *)q->scales + at);
    return (levels){ from_half(vi_and(pair, vi_set1(0xffff))), from_half(vi_srl(pair, 16)) };
}

/* Where vector j of the strips from `strip` on begins: among the scales of group 0, and codes. */
static inline int64_t scales_at(const mn_quant *q, int64_t strip, int j) {
    return (strip + j / PER_STRIP) * mn_quant_groups(q) * MN_QUANT_STRIP + j % PER_STRIP * MN_VW;
}

static inline const unsigned char *codes_at(const mn_quant *q, int bits, int64_t strip, int j) {
    const int lane = j % PER_STRIP * MN_VW;
    return (const unsigned char *)q->codes + (strip + j / PER_STRIP) * mn_quant_strip_bytes(q) +
           (bits == 8 ? lane : 4 * lane);
}

/* ---- few rows -------------------------------------------------------------------------------- */

typedef struct {
    const mn_product *p;
    int64_t i0, strip, k0, K;
    int cols;
} few_args;

typedef void few_function(const few_args *t);

/* The next n <= 8 inputs, which begin at a multiple of 8, with `codes` of each vector there. */
MN_ALWAYS_INLINE void few_terms(vf sum[ROWS][MOST_VECTORS], const float *a, int64_t a_row,
                                const unsigned char *const *codes, int64_t at, const levels *l,
                                int rows, int vectors, int bits, int n) {
    vi words[MOST_VECTORS];
    MN_UNROLL
    for (int j = 0; j < vectors && bits == 4; j++) {
        words[j] = vi_load(codes[j] + at);
    }
    MN_UNROLL
    for (int c = 0; c < n; c++) {
        MN_UNROLL
        for (int j = 0; j < vectors; j++) {
            const vf w = bits == 8
                             ? vf_mul(l[j].scale, widen8(codes[j] + at + c * MN_QUANT_STRIP))
                             : vf_fma(l[j].scale, widen4(words[j], c), l[j].least);
            MN_UNROLL
            for (int i = 0; i < rows; i++) {
                sum[i][j] = vf_fma(vf_set1(a[i * a_row + c]), w, sum[i][j]);
            }
        }
    }
}

MN_ALWAYS_INLINE void few_end(const few_args *t, vf sum[ROWS][MOST_VECTORS], int rows,
                              int vectors) {
    const mn_product *p = t->p;
    const bool add = p->accumulate || t->k0 > 0;
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < vectors; j++) {
            float *c = p->c + (t->i0 + i) * p->c_row + t->strip * MN_QUANT_STRIP + j * MN_VW;
            if (t->cols <= j * MN_VW) break;
            const int lanes = vf_lanes(t->cols - j * MN_VW);
            vf_store_row(c, add ? vf_add(vf_load_row(c, lanes), sum[i][j]) : sum[i][j], lanes);
        }
    }
}

/* One block of K; rows, vectors and bits are constants where this is expanded. */
MN_ALWAYS_INLINE void few(const few_args *t, int rows, int vectors, int bits) {
    const mn_quant *q = t->p->quant;
    const int64_t end = t->k0 + t->K, a_row = t->p->a_row;
    const float *a = t->p->a + t->i0 * a_row;
    const unsigned char *codes[MOST_VECTORS];
    vf sum[ROWS][MOST_VECTORS];
    MN_UNROLL
    for (int j = 0; j < vectors; j++) {
        codes[j] = codes_at(q, bits, t->strip, j);
        MN_UNROLL
        for (int i = 0; i < rows; i++) sum[i][j] = vf_zero();
    }
    for (int64_t k = t->k0; k < end;) {
        const int64_t group = k / q->group, stop = mn_min(end, (group + 1) * q->group);
        levels l[MOST_VECTORS];
        MN_UNROLL
        for (int j = 0; j < vectors; j++) {
            l[j] = load_levels(q, bits, scales_at(q, t->strip, j) + group * MN_QUANT_STRIP);
        }
        for (; k + 8 <= stop; k += 8) {
            few_terms(sum, a + k, a_row, codes, k * MN_QUANT_STRIP * bits / 8, l, rows, vectors,
                      bits, 8);
        }
        if (k == stop) continue;
        few_terms(sum, a + k, a_row, codes, k * MN_QUANT_STRIP * bits / 8, l, rows, vectors, bits,
                  (int)(stop - k));
        k = stop;
    }
    few_end(t, sum, rows, vectors);
}

/* Strips that advance together hide each other's latency, as many as registers hold the sums of. */
#if MN_VW == 16
enum { WIDE_ROWS = 4 };
#else
enum { WIDE_ROWS = 1 };
#endif
enum { NARROW = PER_STRIP };

#define DEFINE(rows, bits)                                                                         \
    static void narrow_##rows##_##bits(const few_args *t) { few(t, rows, NARROW, bits); }          \
    static void wide_##rows##_##bits(const few_args *t) { few(t, rows, MOST_VECTORS, bits); }
DEFINE(1, 8) DEFINE(2, 8) DEFINE(3, 8) DEFINE(4, 8)
DEFINE(1, 4) DEFINE(2, 4) DEFINE(3, 4) DEFINE(4, 4)
#define ALL(width, bits) { width##_1_##bits, width##_2_##bits, width##_3_##bits, width##_4_##bits }
static few_function *const few_of[2][2][ROWS] = { { ALL(narrow, 8), ALL(wide, 8) },
                                                  { ALL(narrow, 4), ALL(wide, 4) } };
#undef ALL
#undef DEFINE

void MN_T(mn_quant_few)(const mn_product *p, int64_t j0, int64_t j1) {
    const int64_t block = mn_matmul_block(p->K), many = mn_min(p->M, ROWS);
    few_args t = { .p = p };
    for (int64_t j = j0; j < j1; j += t.cols) {
        t.strip = j / MN_QUANT_STRIP;
        for (t.i0 = 0; t.i0 < p->M; t.i0 += ROWS) {
            const int rows = (int)mn_min(ROWS, p->M - t.i0);
            const bool wide = many <= WIDE_ROWS && j1 - j >= MOST_VECTORS * MN_VW;
            t.cols = (int)mn_min(j1 - j, (wide ? MOST_VECTORS : NARROW) * MN_VW);
            for (t.k0 = 0; t.k0 < p->K; t.k0 += block) {
                t.K = mn_min(block, p->K - t.k0);
                few_of[p->quant->bits == 4][wide][rows - 1](&t);
            }
        }
    }
}

/* ---- packing --------------------------------------------------------------------------------- */

/* Columns of C from j0 on, `vectors` of them, inputs [k0, k1): one row of vectors an input. */
MN_ALWAYS_INLINE void unpack(float *dst, const mn_quant *q, int64_t j0, int vectors, int64_t k0,
                             int64_t k1, int bits) {
    for (int j = 0; j < vectors; j++) {
        const int64_t strip = j0 / MN_QUANT_STRIP;
        const unsigned char *codes = codes_at(q, bits, strip, j);
        float *to = dst + j * MN_VW;
        for (int64_t k = k0; k < k1;) {
            const int64_t group = k / q->group, stop = mn_min(k1, (group + 1) * q->group);
            const levels l = load_levels(q, bits, scales_at(q, strip, j) + group * MN_QUANT_STRIP);
            for (; k < stop; k++, to += vectors * MN_VW) {
                const int64_t at = (bits == 8 ? k : k / 8 * 4) * MN_QUANT_STRIP;
                if (bits == 8) {
                    vf_store(to, vf_mul(l.scale, widen8(codes + at)));
                    continue;
                }
                const vi words = vi_load(codes + at);
                vf_store(to, vf_fma(l.scale, widen4(words, (int)(k % 8)), l.least));
            }
        }
    }
}

void MN_T(mn_quant_pack)(const mn_product *p, const mn_chunk *chunk, int64_t panel) {
    const int64_t cols = MN_T(mn_matmul_panel)(), j0 = chunk->j0 + panel * cols;
    const int vectors = (int)mn_ceil_div(mn_min(cols, chunk->j1 - j0), MN_VW);
    float *dst = chunk->packed + panel * cols * (chunk->k1 - chunk->k0);
    if (p->quant->bits == 8) unpack(dst, p->quant, j0, vectors, chunk->k0, chunk->k1, 8);
    else unpack(dst, p->quant, j0, vectors, chunk->k0, chunk->k1, 4);
}
