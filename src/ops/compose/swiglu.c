/* swiglu.c - y = h down', h = silu(a) u, a = x gate', u = x up'.
 *
 *   dh = dy down         da = dh u silu'(a)     du = dh silu(a)      silu'(a) = s (1 + a (1 - s))
 *   dx = da gate + du up      dgate = da'x      dup = du'x           ddown = dy'h
 *
 * Three products forward, eight backward (two of them again); the elementwise part works in place
 * over blocks of the hidden activations. */
#include <math.h>

#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "ops/compose/compose.h"
#include "ops/workspace.h"

#if MN_HAVE_X86_TARGETS
#define MN_TARGET avx2
#include "kernels/cpu/simd/map.h"
#undef MN_TARGET
#define MN_TARGET avx512
#include "kernels/cpu/simd/map.h"
#undef MN_TARGET
#endif

enum { ITEM = 16384, CHUNK = 512 };

/* Hidden activations (B,V). Forward: h from a and u. Backward: da, du, h from a, u and dh; h lies
 * over dh. a and u are float32 where the others are bf16, and else lie where da and du do, or h. */
typedef struct hidden {
    mn_dtype dtype, inner;
    int64_t count;
    void *a, *u, *da, *du, *dh;
    void (*sigmoid)(float *y, const float *x, int64_t n);
} hidden;

static void sigmoid_f32(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = (float)(1.0 / (1.0 + exp(-(double)x[i])));
}

static void sigmoid_f64(double *y, const double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = 1.0 / (1.0 + exp(-x[i]));
}

#define BLEND(name, TYPE)                                                                          \
    static void name(TYPE *a, TYPE *u, TYPE *dh, const TYPE *s, int64_t n) {                       \
        for (int64_t i = 0; !dh && i < n; i++) a[i] = a[i] * s[i] * u[i];                          \
        for (int64_t i = 0; dh && i < n; i++) {                                                    \
            const TYPE a_i = a[i], u_i = u[i], d = dh[i], silu = a_i * s[i];                       \
            a[i] = d * u_i * (s[i] * (1 + a_i * (1 - s[i])));                                      \
            u[i] = d * silu;                                                                       \
            dh[i] = silu * u_i;                                                                    \
        }                                                                                          \
    }
BLEND(blend_f32, float)
BLEND(blend_f64, double)
#undef BLEND

static void blend_item(void *context, int64_t item, int worker) {
    (void)worker;
    const hidden *x = context;
    const int64_t end = mn_min(x->count, (item + 1) * ITEM);
    for (int64_t i = item * ITEM; i < end; i += CHUNK) {
        const int64_t n = mn_min(CHUNK, end - i);
        if (x->dtype == MN_F64) {
            double s[CHUNK], *a = (double *)x->a + i, *dh = x->dh ? (double *)x->dh + i : NULL;
            sigmoid_f64(s, a, n);
            blend_f64(a, (double *)x->u + i, dh, s, n);
        } else {
            float s[CHUNK], *a = (float *)x->a + i, *dh = x->dh ? (float *)x->dh + i : NULL;
            x->sigmoid(s, a, n);
            blend_f32(a, (float *)x->u + i, dh, s, n);
        }
    }
}

static mn_status blend(mn_context *context, hidden *x) {
    if (context->plans) return MN_OK;
    if (context->device) {
        const mn_glue step = { .dtype = x->dtype, .B = 1, .T = 1, .H = 1, .width = x->count,
                               .wide = x->inner == x->dtype ? 0 : MN_GLUE_F32_A | MN_GLUE_F32_B,
                               .a = { .data = x->a }, .b = { .data = x->u },
                               .c = { .data = x->dh }, .x = { .data = x->da },
                               .y = { .data = x->du }, .z = { .data = x->dh } };
        return mn_run_glue(context, x->dh ? MN_GLUE_swiglu_back : MN_GLUE_swiglu, &step);
    }
    x->sigmoid = sigmoid_f32;
#if MN_HAVE_X86_TARGETS
    if (context->target == MN_TARGET_AVX2) x->sigmoid = mn_map_sigmoid_avx2;
    if (context->target == MN_TARGET_AVX512) x->sigmoid = mn_map_sigmoid_avx512;
#endif
    mn_threads_run(context->threads, mn_ceil_div(x->count, ITEM), blend_item, x);
    return MN_OK;
}

/* c (B,out) = x (B,in) weight', c in type `to` */
static mn_status linear(mn_context *context, const mn_call *call, void *c, mn_dtype to,
                        const void *x, int64_t in, const void *weight, int64_t out) {
    const mn_matmul_args args = { .dtype = call->dtype, .c_dtype = to, .c = c,
                                  .a = x, .b = weight,
                                  .M = call->B, .N = out, .K = in, .b_transposed = true };
    return mn_matmul(context, &args);
}

/* c (B,out) = x (B,in) weight, added to c if asked */
static mn_status linear_back(mn_context *context, const mn_call *call, void *c, const void *x,
                             int64_t in, const void *weight, int64_t out, bool add) {
    const mn_matmul_args args = { .dtype = call->dtype, .c_dtype = call->dtype, .c = c,
                                  .a = x, .b = weight, .M = call->B,
                                  .N = out, .K = in, .accumulate = add };
    return mn_matmul(context, &args);
}

/* c (rows,cols) = a' b, a (B,rows), b (B,cols); nothing where c is not wanted */
static mn_status weight_gradient(mn_context *context, const mn_call *call, void *c, const void *a,
                                 int64_t rows, const void *b, int64_t cols) {
    const mn_matmul_args args = { .dtype = call->dtype, .c_dtype = call->dtype, .c = c,
                                  .a = a, .b = b,
                                  .M = rows, .N = cols, .K = call->B, .a_transposed = true };
    return c ? mn_matmul(context, &args) : MN_OK;
}

static mn_status backward(mn_context *context, const mn_swiglu_args *p, hidden *x) {
    const mn_call *c = &p->call;
    void *dx = p->grad.x.data;
    mn_status st = linear_back(context, c, x->dh, p->cot.y.data, c->K, p->down.data, c->V, false);
    if (st == MN_OK) st = blend(context, x);
    if (st == MN_OK && dx) {
        st = linear_back(context, c, dx, x->da, c->V, p->gate.data, c->K, false);
        if (st == MN_OK) st = linear_back(context, c, dx, x->du, c->V, p->up.data, c->K, true);
    }
    if (st == MN_OK) {
        st = weight_gradient(context, c, p->grad.gate.data, x->da, c->V, p->x.data, c->K);
    }
    if (st == MN_OK) {
        st = weight_gradient(context, c, p->grad.up.data, x->du, c->V, p->x.data, c->K);
    }
    if (st != MN_OK) return st;
    return weight_gradient(context, c, p->grad.down.data, p->cot.y.data, c->K, x->dh, c->V);
}

static mn_status clear(mn_context *context, void *data, int64_t count, mn_dtype dtype) {
    return mn_workspace_clear(context, data, (size_t)count * mn_dtype_bytes(dtype));
}

/* Without a cotangent every gradient is zero. */
static mn_status clear_gradients(mn_context *context, const mn_swiglu_args *p) {
    const mn_call *c = &p->call;
    mn_status st = clear(context, p->grad.x.data, c->B * c->K, c->dtype);
    if (st == MN_OK) st = clear(context, p->grad.gate.data, c->V * c->K, c->dtype);
    if (st == MN_OK) st = clear(context, p->grad.up.data, c->V * c->K, c->dtype);
    if (st == MN_OK) st = clear(context, p->grad.down.data, c->V * c->K, c->dtype);
    return st;
}

mn_status mn_compose_swiglu(mn_context *context, mn_pass pass, const void *args) {
    const mn_swiglu_args *p = args;
    const mn_call *c = &p->call;
    const bool back = pass == MN_BACKWARD;
    const size_t size = mn_dtype_bytes(c->dtype);
    if (back && !p->cot.y.data) return clear_gradients(context, p);
    if (!back && !p->y.data) return MN_OK;
    const bool apart = c->dtype == MN_BF16;
    hidden x = { .dtype = c->dtype, .inner = apart ? MN_F32 : c->dtype };
    const size_t inner = mn_dtype_bytes(x.inner);
    x.a = mn_workspace_array(context, c->B, c->V, inner);
    x.u = mn_workspace_array(context, c->B, c->V, inner);
    x.da = apart ? mn_workspace_array(context, c->B, c->V, size) : x.a;
    x.du = apart && back ? mn_workspace_array(context, c->B, c->V, size) : x.u;
    x.dh = back ? mn_workspace_array(context, c->B, c->V, size) : NULL;
    if (!x.a || !x.u || !x.da || !x.du || (back && !x.dh)) {
        return mn_fail(MN_ERR_MEMORY, "swiglu: no memory for %lld x %lld hidden activations",
                       (long long)c->B, (long long)c->V);
    }
    x.count = c->B * c->V;
    mn_status st = linear(context, c, x.a, x.inner, p->x.data, c->K, p->gate.data, c->V);
    if (st == MN_OK) st = linear(context, c, x.u, x.inner, p->x.data, c->K, p->up.data, c->V);
    if (st != MN_OK || back) return st == MN_OK ? backward(context, p, &x) : st;
    st = blend(context, &x);
    if (st != MN_OK) return st;
    return linear(context, c, p->y.data, c->dtype, x.da, c->V, p->down.data, c->K);
}
