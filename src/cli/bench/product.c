/* product.c - how fast the GPU multiplies bf16 matrices where it has cuBLASLt
 * (kernels/gemm.h). */
#include <math.h>
#include <stdlib.h>

#include "base/bf16.h"
#include "base/rng.h"
#include "cli/bench/bench.h"
#include "kernels/gemm.h"

enum { N = 8192, RUNS = 9, DRAWN = 40000 };

/* Factors, result and work space. */
typedef struct matrices {
    void *a, *b, *c, *space;
} matrices;

/* Random numbers, repeated: a product of zeros is faster than one of data. */
static bool fill(matrices *m, mn_device *device) {
    const size_t count = (size_t)N * N, bytes = count * sizeof(uint16_t);
    void **const memory[] = { &m->a, &m->b, &m->c };
    uint16_t *host = malloc(bytes);
    bool ok = host && mn_device_allocate(device, &m->space, MN_GEMM_WORKSPACE) == MN_OK;
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

static double measure(const matrices *m, mn_gemm_handle *products, mn_device *device) {
    const mn_gemm_problem work = { .dtype = MN_BF16, .c_dtype = MN_BF16, .a = m->a, .b = m->b,
                                   .c = m->c, .M = N, .N = N, .K = N, .a_row = N, .b_row = N,
                                   .c_row = N, .b_transposed = true };
    double seconds[RUNS];
    mn_device_event *from = NULL, *to = NULL;
    bool ok = mn_device_event_create(device, &from) == MN_OK &&
              mn_device_event_create(device, &to) == MN_OK;
    for (int run = -2; ok && run < RUNS; run++) {    // two warm up
        ok = mn_device_event_record(device, from) == MN_OK &&
             mn_gemm_run(products, &work, m->space, mn_device_stream(device)) == 0 &&
             mn_device_event_record(device, to) == MN_OK &&
             mn_device_seconds(device, &seconds[run < 0 ? 0 : run], from, to) == MN_OK;
    }
    mn_device_event_destroy(from);
    mn_device_event_destroy(to);
    return ok ? 2.0 * N * N * N / mn_bench_median(seconds, RUNS) : NAN;
}

double mn_bench_product_rate(mn_device *device) {
    matrices m = { 0 };
    double rate = NAN;
    mn_gemm_handle *products = mn_device_use(device) == MN_OK ? mn_gemm_create() : NULL;
    if (products && mn_gemm_has_cublaslt(products) && fill(&m, device)) {
        rate = measure(&m, products, device);
    }
    mn_gemm_destroy(products);
    void *const memory[] = { m.a, m.b, m.c, m.space };
    for (int i = 0; i < 4; i++) mn_device_free(device, memory[i]);
    return rate;
}
