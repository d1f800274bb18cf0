/* unary.h - ids of the functions of one number, and what one loop over them does. */
#ifndef MN_KERNELS_UNARY_H
#define MN_KERNELS_UNARY_H

#include <stdbool.h>
#include <stdint.h>

typedef enum mn_unary {
#define UNARY(id, name, about) MN_UNARY_##id,
#include "kernels/elementwise.def"
    MN_UNARY_COUNT
} mn_unary;

/* n numbers: y = f(x), or y = f(x) b with a second factor. Backward from dy: dx = f'(x) dy [b] and
 * db = f(x) dy, added when `add_x`, `add_b`. Pointers not wanted are NULL. float or double. */
typedef struct mn_unary_args {
    mn_unary kind;
    int64_t n;
    const void *x, *b, *dy;
    void *y, *dx, *db;
    bool add_x, add_b;
} mn_unary_args;

void mn_unary_forward_f32(const mn_unary_args *p);
void mn_unary_forward_f64(const mn_unary_args *p);
void mn_unary_backward_f32(const mn_unary_args *p);
void mn_unary_backward_f64(const mn_unary_args *p);

const char *mn_unary_name(mn_unary kind);

#endif
