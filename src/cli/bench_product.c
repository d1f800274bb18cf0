/* bench_product.c - how fast the GPU multiplies bf16 matrices: cuBLASLt, taken from the machine at
 * run time, so that the program neither needs nor carries it. */
#include <math.h>

#include "cli/bench.h"

#if MN_HAVE_CUBLASLT_H
#include <cublasLt.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/rng.h"

enum { N = 8192, RUNS = 9, DRAWN = 40000, WORKSPACE = 64 << 20 };

/* The calls used here, by the names cublasLt.h gives them. */
#define CALLS(CALL)                                                                                \
    CALL(cublasLtCreate) CALL(cublasLtDestroy) CALL(cublasLtMatmul)                                \
    CALL(cublasLtMatmulDescCreate) CALL(cublasLtMatmulDescSetAttribute)                            \
    CALL(cublasLtMatmulDescDestroy) CALL(cublasLtMatrixLayoutCreate)                               \
    CALL(cublasLtMatrixLayoutDestroy) CALL(cublasLtMatmulPreferenceCreate)                         \
    CALL(cublasLtMatmulPreferenceSetAttribute) CALL(cublasLtMatmulPreferenceDestroy)               \
    CALL(cublasLtMatmulAlgoGetHeuristic)

#define NAME(name) #name
#define EXPANDED(name) NAME(name)

typedef struct library {
    void *handle;
#define MEMBER(name) __typeof__(name) *name;
    CALLS(MEMBER)
#undef MEMBER
} library;

static bool load(library *lib) {
    lib->handle = dlopen("libcublasLt.so." EXPANDED(CUBLAS_VER_MAJOR), RTLD_NOW | RTLD_LOCAL);
    if (!lib->handle) return false;
    bool all = true;
    void *found;
#define FIND(name)                                                                                 \
    found = dlsym(lib->handle, #name);                                                             \
    memcpy(&lib->name, &found, sizeof found);                                                      \
    all = all && found;
    CALLS(FIND)
#undef FIND
    return all;
}

/* C = A' B of N x N, with an algorithm chosen. */
typedef struct product {
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t layout;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t chosen;
    void *a, *b, *c, *workspace;
} product;

static bool open_product(product *p, const library *lib) {
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const size_t workspace = WORKSPACE;
    int found = 0;
    return lib->cublasLtCreate(&p->handle) == CUBLAS_STATUS_SUCCESS &&
           lib->cublasLtMatmulDescCreate(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) ==
               CUBLAS_STATUS_SUCCESS &&
           lib->cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                               sizeof transposed) == CUBLAS_STATUS_SUCCESS &&
           lib->cublasLtMatrixLayoutCreate(&p->layout, CUDA_R_16BF, N, N, N) ==
               CUBLAS_STATUS_SUCCESS &&
           lib->cublasLtMatmulPreferenceCreate(&p->preference) == CUBLAS_STATUS_SUCCESS &&
           lib->cublasLtMatmulPreferenceSetAttribute(
               p->preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
               sizeof workspace) == CUBLAS_STATUS_SUCCESS &&
           lib->cublasLtMatmulAlgoGetHeuristic(p->handle, p->desc, p->layout, p->layout, p->layout,
                                               p->layout, p->preference, 1, &p->chosen,
                                               &found) == CUBLAS_STATUS_SUCCESS &&
           found > 0;
}

static void close_product(product *p, const library *lib) {
    if (p->preference) lib->cublasLtMatmulPreferenceDestroy(p->preference);
    if (p->layout) lib->cublasLtMatrixLayoutDestroy(p->layout);
    if (p->desc) lib->cublasLtMatmulDescDestroy(p->desc);
    if (p->handle) lib->cublasLtDestroy(p->handle);
}

/* Random numbers, repeated: a product of zeros is faster than one of data. */
static bool fill(product *p, mn_device *device) {
    const size_t count = (size_t)N * N, bytes = count * sizeof(uint16_t);
    void **const memory[] = { &p->a, &p->b, &p->c };
    uint16_t *host = malloc(bytes);
    bool ok = host && mn_device_allocate(device, &p->workspace, WORKSPACE) == MN_OK;
    for (size_t i = 0; ok && i < count; i++) {
        host[i] = i < DRAWN ? mn_bf16_from_float((float)mn_rng_normal(1, 0, i)) : host[i - DRAWN];
    }
    for (int i = 0; ok && i < 3; i++) {
        ok = mn_device_allocate(device, memory[i], bytes) == MN_OK &&
             mn_device_upload(device, *memory[i], host, bytes) == MN_OK;
    }
    free(host);
    return ok;
}

static double measure(const product *p, const library *lib, mn_device *device) {
    const float one = 1.0f, zero = 0.0f;
    double seconds[RUNS];
    mn_device_event *from = NULL, *to = NULL;
    bool ok = mn_device_event_create(device, &from) == MN_OK &&
              mn_device_event_create(device, &to) == MN_OK;
    for (int run = -2; ok && run < RUNS; run++) {    // two warm up
        ok = mn_device_event_record(device, from) == MN_OK &&
             lib->cublasLtMatmul(p->handle, p->desc, &one, p->a, p->layout, p->b, p->layout, &zero,
                                 p->c, p->layout, p->c, p->layout, &p->chosen.algo, p->workspace,
                                 WORKSPACE, mn_device_stream(device)) == CUBLAS_STATUS_SUCCESS &&
             mn_device_event_record(device, to) == MN_OK &&
             mn_device_seconds(device, &seconds[run < 0 ? 0 : run], from, to) == MN_OK;
    }
    mn_device_event_destroy(from);
    mn_device_event_destroy(to);
    return ok ? 2.0 * N * N * N / mn_bench_median(seconds, RUNS) : NAN;
}

double mn_bench_product_rate(mn_device *device) {
    library lib = { 0 };
    product p = { 0 };
    double rate = NAN;
    if (load(&lib)) {
        if (open_product(&p, &lib) && fill(&p, device)) rate = measure(&p, &lib, device);
        close_product(&p, &lib);
        void *const memory[] = { p.a, p.b, p.c, p.workspace };
        for (int i = 0; i < 4; i++) mn_device_free(device, memory[i]);
    }
    if (lib.handle) dlclose(lib.handle);
    return rate;
}

#else

double mn_bench_product_rate(mn_device *device) {
    (void)device;
    return NAN;
}

#endif
