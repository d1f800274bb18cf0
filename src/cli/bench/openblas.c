/* openblas.c - OpenBLAS by dlopen: no other command loads it or needs it to be installed. */
#include "cli/bench/openblas.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>
#include <sys/resource.h>

#include "base/util.h"

/* The interface of CBLAS: row-major 101, no transpose 111. */
enum { ROW_MAJOR = 101, NO_TRANSPOSE = 111 };
typedef void sgemm_fn(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                      const float *a, int lda, const float *b, int ldb, float beta, float *c,
                      int ldc);
typedef void set_threads_fn(int n_threads);

typedef struct library {
    bool tried;
    sgemm_fn *sgemm;
    set_threads_fn *set_threads;
} library;

static bool address_space_is_limited(void) {
    struct rlimit limit;
    return getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY;
}

/* Never closed: its threads would have to end first. */
static const library *open_library(void) {
    static library blas;
    static const char *const names[] = { "libopenblas.so.0", "libopenblas.so" };
    if (blas.tried) return &blas;
    blas.tried = true;
    if (!MN_HAVE_OPENBLAS || address_space_is_limited()) return &blas;
    void *handle = NULL;
    for (size_t i = 0; i < MN_COUNTOF(names) && !handle; i++) {
        handle = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    }
    void *sgemm = handle ? dlsym(handle, "cblas_sgemm") : NULL;
    void *set = handle ? dlsym(handle, "openblas_set_num_threads") : NULL;
    if (!sgemm || !set) return &blas;
    memcpy(&blas.sgemm, &sgemm, sizeof sgemm);    // a function, which no cast from an object gives
    memcpy(&blas.set_threads, &set, sizeof set);
    return &blas;
}

bool mn_openblas_sgemm(int n_threads, int n, const float *a, const float *b, float *c) {
    const library *blas = open_library();
    if (!blas->sgemm) return false;
    blas->set_threads(n_threads);
    blas->sgemm(ROW_MAJOR, NO_TRANSPOSE, NO_TRANSPOSE, n, n, n, 1.0f, a, n, b, n, 0.0f, c, n);
    return true;
}
