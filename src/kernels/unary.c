/* unary.c - loops over the functions of one number in plain C, computed in double. */
#include "kernels/unary.h"

#include "kernels/functions_scalar.h"

static double value(mn_unary kind, double x) {
    switch (kind) {
#define UNARY(id, name, about)                                                                     \
    case MN_UNARY_##id: return value_##id##_f64(x);
#include "kernels/elementwise.def"
    default: return NAN;
    }
}

static double slope(mn_unary kind, double x) {
    switch (kind) {
#define UNARY(id, name, about)                                                                     \
    case MN_UNARY_##id: return slope_##id##_f64(x);
#include "kernels/elementwise.def"
    default: return NAN;
    }
}

#define LOOPS(suffix, TYPE)                                                                        \
    void mn_unary_forward_##suffix(const mn_unary_args *p) {                                       \
        const TYPE *x = p->x, *b = p->b;                                                           \
        TYPE *y = p->y;                                                                            \
        for (int64_t i = 0; i < p->n; i++) {                                                       \
            y[i] = (TYPE)(value(p->kind, (double)x[i]) * (b ? (double)b[i] : 1.0));                \
        }                                                                                          \
    }                                                                                              \
    void mn_unary_backward_##suffix(const mn_unary_args *p) {                                      \
        const TYPE *x = p->x, *b = p->b, *dy = p->dy;                                              \
        TYPE *dx = p->dx, *db = p->db;                                                             \
        for (int64_t i = 0; i < p->n; i++) {                                                       \
            const double g = (double)dy[i], from = b ? g * (double)b[i] : g;                       \
            const double to_x = slope(p->kind, (double)x[i]) * from;                               \
            if (db) {                                                                              \
                const double to_b = value(p->kind, (double)x[i]) * g;                              \
                db[i] = (TYPE)(p->add_b ? db[i] + to_b : to_b);                                    \
            }                                                                                      \
            if (dx) dx[i] = (TYPE)(p->add_x ? dx[i] + to_x : to_x);                                \
        }                                                                                          \
    }
LOOPS(f32, float)
LOOPS(f64, double)

static const char *const names[MN_UNARY_COUNT] = {
#define UNARY(id, name, about) [MN_UNARY_##id] = name,
#include "kernels/elementwise.def"
};

const char *mn_unary_name(mn_unary kind) {
    return (unsigned)kind < MN_UNARY_COUNT ? names[kind] : "?";
}
