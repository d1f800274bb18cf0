/* swiglu.c - y = h down', h = silu(a) u, a = x gate', u = x up'.
 *
 *   dh = dy down         da = dh u silu'(a)     du = dh silu(a)      silu'(a) = s (1 + a (1 - s))
 *   dx = da gate + du up      dgate = da'x      dup = du'x           ddown = dy'h
 *
 * Three products forward, eight backward (two of them again); the elementwise part works in place
 * over blocks of the hidden activations. */
#include "base/dtype.h"
#include "base/status.h"
#include "ops/compose/compose.h"
#include "ops/elementwise/elementwise.h"
#include "ops/workspace.h"

/* Hidden activations (B,V). Forward: h from a and u. Backward: da, du, h from a, u and dh; h lies
 * over dh. a and u are float32 where the others are bf16, and else lie where da and du do, or h. */
typedef struct hidden {
    mn_dtype dtype, inner;
    int64_t count;
    void *a, *u, *da, *du, *dh;
} hidden;

static mn_view flat(void *data, int64_t count, mn_dtype dtype) {
    return (mn_view){ data, dtype, { count, count, count, 1 } };
}

static mn_status blend(mn_context *context, const hidden *x) {
    const int64_t n = x->count;
    const mn_fused_params job = {
        .f = x->dh ? MN_FUSED_SWIGLU_BACK : MN_FUSED_SWIGLU, .shape = { 1, 1, 1, n },
        .in = { flat(x->a, n, x->inner), flat(x->u, n, x->inner), flat(x->dh, n, x->dtype) },
        .out = { flat(x->da, n, x->dtype), flat(x->du, n, x->dtype), flat(x->dh, n, x->dtype) },
    };
    return mn_elementwise_run(context, MN_ELEMENTWISE_FUSED, &job);
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
