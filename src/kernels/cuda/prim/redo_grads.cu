/* redo_grads.cu - which heads have gradients to make again, from what, and what of them is taken:
 * redo_grads.h. A block has a head of a sequence. */
#include "kernels/cuda/prim/redo_grads.h"

#include "kernels/cuda/prim/first_wild.cuh"

namespace mneme {

enum { REDO_GRADS_THREADS = 256 };

/* How many tokens of a sequence have cotangents that become zeros; the block calls. */
template <typename T>
__device__ static int cut_of(const mn_redo_grads &r, const mn_span &span, int64_t h) {
    bool wild = false;
    for (int i = 0; span.length > 1 && i < r.n_grads; i++) {
        const T *first = mn_row<T>(r.grads[i].call, span.b, span.t0, h);
        for (int64_t j = threadIdx.x; j < r.grads[i].width; j += REDO_GRADS_THREADS) {
            wild = wild || mn_is_wild(mn_float(first[j]));
        }
    }
    if (!__syncthreads_or(wild)) return 0;
    const int64_t end = span.t0 + span.length;
    const int behind = mn_redo_first_token(span.length, [&](int64_t t, float most) {
        bool found = false;
        for (int i = 0; i < r.n_cots && !found; i++) {
            const T *row = mn_row<T>(r.cots[i].call, span.b, end - 1 - t, h);
            found = mn_redo_has_wild(row, r.cots[i].width, most);
        }
        return found;
    });
    return behind > 0 ? (int)span.length - behind : 0;
}

/* Tokens [first, length) of all tensors of a list, from the one to the other. */
template <typename T, typename F>
__device__ static void each_number(const mn_redo_tensor *list, int count, const mn_span &span,
                                   int64_t first, int64_t h, F use) {
    for (int i = 0; i < count; i++) {
        const mn_redo_tensor &x = list[i];
        for (int64_t at = threadIdx.x; at < (span.length - first) * x.width;
             at += REDO_GRADS_THREADS) {
            const int64_t t = first + at / x.width, j = at % x.width;
            use(mn_row<T>(x.call, span.b, span.t0 + t, h) + j,
                mn_row<T>(x.own, span.b, span.t0 + t, h) + j, t);
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(REDO_GRADS_THREADS)
redo_grads_find_kernel(const __grid_constant__ mn_redo_grads r) {
    const int64_t n = blockIdx.x / r.call.H, h = blockIdx.x % r.call.H;
    const mn_span span = mn_span_at(r.call, n);
    const int cut = cut_of<T>(r, span, h);
    const bool aside = r.aside && r.aside[blockIdx.x];
    if (threadIdx.x == 0) {
        r.cuts[blockIdx.x] = cut;
        r.skips[blockIdx.x] = cut == 0 || aside;
        r.takes[blockIdx.x] = cut > 0 && aside;
    }
    const int64_t each = r.n_zeros / gridDim.x;
    for (int64_t i = threadIdx.x; i < each; i += REDO_GRADS_THREADS) {
        r.zeros[blockIdx.x * each + i] = 0;
    }
    if (cut == 0) return;
    each_number<T>(r.cots, r.n_cots, span, 0, h, [&](const T *from, T *to, int64_t t) {
        mn_put(to, t < cut ? 0.0f : mn_float(*from));
    });
}

template <typename T>
__global__ void __launch_bounds__(REDO_GRADS_THREADS)
redo_grads_store_kernel(const __grid_constant__ mn_redo_grads r) {
    const int64_t n = blockIdx.x / r.call.H, h = blockIdx.x % r.call.H;
    const int cut = r.cuts[blockIdx.x];
    if (cut == 0) return;
    each_number<T>(r.grads, r.n_grads, mn_span_at(r.call, n), cut, h,
                   [&](T *to, const T *from, int64_t) { *to = *from; });
}

/* ---- what it takes --------------------------------------------------------------------------- */

/* `rows` times `bytes`, in steps of 16. */
static void *take(mn_redo_grads *redo, int64_t rows, int64_t bytes) {
    size_t size;
    redo->ok = redo->ok && mn_mul_size(&size, (size_t)rows, (size_t)bytes) &&
               mn_add_size(&size, size, 15) && mn_add_size(&size, size / 16 * 16, redo->used);
    if (!redo->ok) return NULL;
    void *at = redo->base ? redo->base + redo->used : NULL;
    redo->used = size;
    return at;
}

mn_redo_grads mn_redo_grads_of(const mn_call &call, void *base) {
    mn_redo_grads redo = {};
    redo.call = call, redo.base = (char *)base, redo.ok = true;
    const int64_t heads = mn_n_spans(call) * call.H, bytes = (int64_t)sizeof(int);
    redo.cuts = (int *)take(&redo, heads, bytes);
    redo.skips = (int *)take(&redo, heads, bytes);
    redo.takes = (int *)take(&redo, heads, bytes);
    return redo;
}

static mn_redo_tensor tensor_of(mn_redo_grads *redo, const mn_out &call, int64_t width) {
    const mn_call &c = redo->call;
    const int64_t size = c.dtype == MN_BF16 ? 2 : 4, row = c.H * width;
    void *own = take(redo, c.B * c.T, row * size);
    return { call, { own, { c.T * row, row, width } }, width };
}

void mn_redo_grads_cot(mn_redo_grads *redo, mn_in *view, int64_t width) {
    if (!view->data || width == 0) return;
    const mn_out call = { (void *)view->data,
                          { view->stride[0], view->stride[1], view->stride[2] } };
    const mn_redo_tensor x = tensor_of(redo, call, width);
    redo->cots[redo->n_cots++] = x;
    *view = { x.own.data, { x.own.stride[0], x.own.stride[1], x.own.stride[2] } };
}

void mn_redo_grads_grad(mn_redo_grads *redo, mn_out *view, int64_t width) {
    if (!view->data || width == 0) return;
    const mn_redo_tensor x = tensor_of(redo, *view, width);
    redo->grads[redo->n_grads++] = x;
    *view = x.own;
}

/* ---- launches -------------------------------------------------------------------------------- */

static int launch(void (*narrow)(mn_redo_grads), void (*wide)(mn_redo_grads),
                  const mn_redo_grads &redo, void *stream) {
    const unsigned blocks = (unsigned)(mn_n_spans(redo.call) * redo.call.H);
    const auto kernel = redo.call.dtype == MN_BF16 ? narrow : wide;
    kernel<<<blocks, REDO_GRADS_THREADS, 0, (cudaStream_t)stream>>>(redo);
    return mn_launch_status();
}

int mn_redo_grads_find(const mn_redo_grads *redo, void *stream) {
    return launch(redo_grads_find_kernel<mn_bf16>, redo_grads_find_kernel<float>, *redo, stream);
}

int mn_redo_grads_store(const mn_redo_grads *redo, void *stream) {
    return launch(redo_grads_store_kernel<mn_bf16>, redo_grads_store_kernel<float>, *redo, stream);
}

}    // namespace mneme
