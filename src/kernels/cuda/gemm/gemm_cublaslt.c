/* gemm_cublaslt.c - matrix gemms through cuBLASLt, which is found when the megakernel runs.
 *
 * The library counts columns first: our row-major c = a b is its c' = b' a'. The algorithm for a
 * shape is one of the first that its heuristics name, chosen by the shape alone and kept; so are
 * the descriptions.
 *
 * Rows of c are tokens unless a is transposed, and what a token gets must not depend on how many
 * others there are. So these gemms are asked for without sums in parts that are added later,
 * and as if there were at least MIN_ROWS: for fewer the library has kernels that add in an order
 * of their own, while those that work by tiles of c add along K in the same order whatever the
 * tile. That was seen of kernels for rows of whole packs of 16 bytes; other rows have the one that
 * is best for UNALIGNED_ROWS, however many they are. */
#include "kernels/gemm.h"

#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "kernels/cuda/gemm/gemm_fallback.h"

/* Columns of c, as many at a time as the weights for them have room, which are numbers then. */
static int run_quant(mn_gemm_handle *p, const mn_gemm_problem *given, void *space, void *stream) {
    enum { COLUMNS = 64 };
    if (given->alike || mn_gemm_quant_few(given)) return mn_gemm_quant_several(given, 1, stream);
    const size_t item = mn_dtype_bytes(given->dtype), c_item = mn_dtype_bytes(given->c_dtype);
    const int64_t room = MN_GEMM_UNPACKED / ((int64_t)item * mn_max(given->K, 1));
    const int64_t most = room < COLUMNS ? mn_max(room, 1) : room / COLUMNS * COLUMNS;
    void *unpacked = (char *)space + MN_GEMM_WORKSPACE;
    int code = 0;
    for (int64_t j = 0; code == 0 && j < given->N; j += most) {
        mn_gemm_problem one = *given;
        one.quant = NULL;
        one.N = mn_min(most, given->N - j);
        one.b = unpacked;
        one.b_row = given->K;
        one.c = (char *)given->c + (size_t)j * c_item;
        if (given->bias) one.bias = (const char *)given->bias + (size_t)j * c_item;
        if (given->onto) one.onto = (const char *)given->onto + (size_t)j * c_item;
        code = mn_quant_rows_cuda(given->quant, given->dtype, unpacked, NULL, j, one.N, stream);
        if (code == 0) code = mn_gemm_run(p, &one, space, stream);
    }
    return code;
}

#if MN_HAVE_CUBLASLT_H
#include <cublasLt.h>
#include <dlfcn.h>

/* The calls used here, by the names cublasLt.h gives them. */
#define CALLS(CALL)                                                                                \
    CALL(cublasLtCreate) CALL(cublasLtDestroy) CALL(cublasLtMatmul)                                \
    CALL(cublasLtMatmulDescCreate) CALL(cublasLtMatmulDescSetAttribute)                            \
    CALL(cublasLtMatmulDescDestroy) CALL(cublasLtMatrixLayoutCreate)                               \
    CALL(cublasLtMatrixLayoutDestroy) CALL(cublasLtMatmulPreferenceCreate)                         \
    CALL(cublasLtMatmulPreferenceSetAttribute) CALL(cublasLtMatmulPreferenceDestroy)               \
    CALL(cublasLtMatmulAlgoGetHeuristic) CALL(cublasLtMatmulAlgoConfigGetAttribute)

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

/* What an algorithm is chosen by: everything but the addresses, of which the alignment counts.
 * Compared as bytes, so it is made from a zeroed one. */
typedef struct shape {
    int64_t M, N, K, a_row, b_row, c_row;
    int32_t dtype, c_dtype, align_a, align_b, align_c;
    int32_t a_transposed, b_transposed, adds, biased;
} shape;

/* Of our b, a and c: factors change places. */
typedef struct layouts {
    cublasLtMatrixLayout_t a, b, c;
} layouts;

typedef struct chosen {
    struct chosen *next;
    shape shape;
    bool plain;    // the library has no algorithm for it
    bool own;      // another one would serve more rows, but not these
    cublasLtMatmulDesc_t desc;
    layouts of;
    cublasLtMatmulAlgo_t algo;
} chosen;

enum { BUCKETS = 256 };

struct mn_gemm_handle {
    bool tried, fast;
    library lib;
    cublasLtHandle_t handle;
    chosen *buckets[BUCKETS];
};

static bool ok(cublasStatus_t status) {
    return status == CUBLAS_STATUS_SUCCESS;
}

bool mn_gemm_has_cublaslt(mn_gemm_handle *p) {
    if (!p->tried) p->fast = load(&p->lib) && ok(p->lib.cublasLtCreate(&p->handle));
    p->tried = true;
    return p->fast;
}

/* ---- shapes ---------------------------------------------------------------------------------- */

enum { MAX_ALIGN = 16, WORKSPACE_ALIGN = 256, WORKSPACE = MN_GEMM_WORKSPACE - WORKSPACE_ALIGN };

/* Heuristics asked for; depth up to which the end of a tile counts, in results of many elements. */
enum { CHOICES = 8, MAX_SHORT_K = 4096, MIN_ELEMENTS = 1 << 24 };

enum { MIN_ROWS = 256, UNALIGNED_ROWS = 4096 };

static bool rows_are_tokens(const shape *s) {
    return !s->a_transposed;
}

static bool has_packs(const shape *s) {
    const int64_t a = MAX_ALIGN / (int64_t)mn_dtype_bytes(s->dtype);
    const int64_t c = MAX_ALIGN / (int64_t)mn_dtype_bytes(s->c_dtype);
    return s->a_row % a == 0 && s->b_row % a == 0 && s->c_row % c == 0 &&
           s->align_a == MAX_ALIGN && s->align_b == MAX_ALIGN && s->align_c == MAX_ALIGN;
}

/* The rows that an algorithm is asked for. */
static int64_t rows_queried(const shape *s) {
    if (!rows_are_tokens(s)) return s->M;
    return has_packs(s) ? mn_max(s->M, MIN_ROWS) : UNALIGNED_ROWS;
}

static int32_t alignment(const void *at) {
    const uintptr_t low = (uintptr_t)at & -(uintptr_t)at;
    return low == 0 || low > MAX_ALIGN ? MAX_ALIGN : (int32_t)low;
}

static void describe(shape *s, const mn_gemm_problem *w) {
    memset(s, 0, sizeof *s);
    s->M = w->M, s->N = w->N, s->K = w->K;
    s->a_row = w->a_row, s->b_row = w->b_row, s->c_row = w->c_row;
    s->dtype = w->dtype, s->c_dtype = w->c_dtype;
    s->align_a = alignment(w->a), s->align_b = alignment(w->b), s->align_c = alignment(w->c);
    s->a_transposed = w->a_transposed, s->b_transposed = w->b_transposed;
    s->adds = w->onto || w->accumulate, s->biased = w->bias != NULL;
    if (w->onto && alignment(w->onto) < s->align_c) s->align_c = alignment(w->onto);
}

static unsigned bucket_of(const shape *s) {
    const unsigned char *bytes = (const unsigned char *)s;
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < sizeof *s; i++) hash = (hash ^ bytes[i]) * 16777619u;
    return hash % BUCKETS;
}

static cudaDataType_t type_of(int32_t dtype) {
    return dtype == MN_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

static bool make_desc(const library *lib, chosen *c) {
    const cublasOperation_t flip = CUBLAS_OP_T;
    const cublasLtEpilogue_t bias = CUBLASLT_EPILOGUE_BIAS;
    const cudaDataType_t type = type_of(c->shape.c_dtype);
    if (!ok(lib->cublasLtMatmulDescCreate(&c->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F))) return false;
#define SET(attribute, value)                                                                      \
    ok(lib->cublasLtMatmulDescSetAttribute(c->desc, CUBLASLT_MATMUL_DESC_##attribute, &(value),    \
                                           sizeof(value)))
    if (c->shape.b_transposed && !SET(TRANSA, flip)) return false;
    if (c->shape.a_transposed && !SET(TRANSB, flip)) return false;
    return !c->shape.biased || (SET(EPILOGUE, bias) && SET(BIAS_DATA_TYPE, type));
#undef SET
}

/* A matrix that we store as rows of `n` elements, `row` apart. */
static bool make_layout(const library *lib, cublasLtMatrixLayout_t *out, int32_t dtype, int64_t n,
                        int64_t rows, int64_t row) {
    return ok(lib->cublasLtMatrixLayoutCreate(out, type_of(dtype), (uint64_t)n, (uint64_t)rows,
                                              row));
}

/* Of `s` with M rows. */
static bool make_layouts(const library *lib, layouts *l, const shape *s, int64_t M) {
    return make_layout(lib, &l->a, s->dtype, s->b_transposed ? s->K : s->N,
                       s->b_transposed ? s->N : s->K, s->b_row) &&
           make_layout(lib, &l->b, s->dtype, s->a_transposed ? M : s->K,
                       s->a_transposed ? s->K : M, s->a_row) &&
           make_layout(lib, &l->c, s->c_dtype, s->N, M, s->c_row);
}

static void destroy_layouts(const library *lib, layouts *l) {
    if (l->a) lib->cublasLtMatrixLayoutDestroy(l->a);
    if (l->b) lib->cublasLtMatrixLayoutDestroy(l->b);
    if (l->c) lib->cublasLtMatrixLayoutDestroy(l->c);
}

static bool set_preference(const library *lib, cublasLtMatmulPreference_t preference,
                           const shape *s) {
    const uint64_t space = WORKSPACE;
    const uint32_t a = (uint32_t)s->align_b, b = (uint32_t)s->align_a, c = (uint32_t)s->align_c;
    const uint32_t whole = CUBLASLT_REDUCTION_SCHEME_NONE;
#define SET(attribute, value)                                                                      \
    ok(lib->cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_##attribute,     \
                                                 &(value), sizeof(value)))
    return SET(MAX_WORKSPACE_BYTES, space) && SET(MIN_ALIGNMENT_A_BYTES, a) &&
           SET(MIN_ALIGNMENT_B_BYTES, b) && SET(MIN_ALIGNMENT_C_BYTES, c) &&
           SET(MIN_ALIGNMENT_D_BYTES, c) &&
           (!rows_are_tokens(s) || SET(REDUCTION_SCHEME_MASK, whole));
#undef SET
}

/* Kernels whose two groups of warps work on a tile each, one epilogue its tile while the other
 * multiplies. Others (options from 4 on) share a tile, which is larger and costs less to read. */
static bool is_pingpong(const library *lib, const cublasLtMatmulAlgo_t *algo) {
    uint32_t option = 0;
    size_t size;
    return ok(lib->cublasLtMatmulAlgoConfigGetAttribute(
               algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, &option, sizeof option, &size)) &&
           option > 0 && option < 4;
}

/* Where sums are short the end of a tile counts. */
static bool is_short(const shape *s) {
    return s->dtype == MN_BF16 && has_packs(s) && s->K <= MAX_SHORT_K &&
           s->M * s->N >= MIN_ELEMENTS;
}

/* Without sums in parts the first may be one with few large tiles for rows of float32, which leaves
 * most processors without work: the first whose tiles fill a tenth of them, or who fills most. */
static const cublasLtMatmulAlgo_t *most_waves(const cublasLtMatmulHeuristicResult_t *results,
                                               int n) {
    const float enough = 0.1f;
    int best = 0;
    for (int i = 0; i < n && results[best].wavesCount < enough; i++) {
        if (results[i].wavesCount >= results[best].wavesCount) best = i;
    }
    return &results[best].algo;
}

static const cublasLtMatmulAlgo_t *best_of(const library *lib, const shape *s,
                                           const cublasLtMatmulHeuristicResult_t *results, int n) {
    if (s->dtype == MN_F32 && rows_are_tokens(s)) return most_waves(results, n);
    for (int i = 0; i < n && is_short(s); i++) {
        if (is_pingpong(lib, &results[i].algo)) return &results[i].algo;
    }
    return &results[0].algo;
}

/* An algorithm for the shape as if it had `rows` rows. */
static bool choose(mn_gemm_handle *p, chosen *c, int64_t rows) {
    const library *lib = &p->lib;
    const shape *s = &c->shape;
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t results[CHOICES];
    layouts asked = { 0 };
    const int wanted = is_short(s) || s->dtype == MN_F32 ? CHOICES : 1;
    int found = 0;
    const bool there =
        make_layouts(lib, &asked, s, rows) &&
        ok(lib->cublasLtMatmulPreferenceCreate(&preference)) &&
        set_preference(lib, preference, s) &&
        ok(lib->cublasLtMatmulAlgoGetHeuristic(p->handle, c->desc, asked.a, asked.b, asked.c,
                                               asked.c, preference, wanted, results, &found)) &&
        found > 0;
    if (preference) lib->cublasLtMatmulPreferenceDestroy(preference);
    destroy_layouts(lib, &asked);
    if (there) c->algo = *best_of(lib, s, results, found);
    return there;
}

/* The choice for a shape, made when it is first asked for; NULL when memory is out. */
static chosen *find(mn_gemm_handle *p, const mn_gemm_problem *work) {
    shape s;
    describe(&s, work);
    chosen **at = &p->buckets[bucket_of(&s)];
    for (; *at; at = &(*at)->next) {
        if (memcmp(&(*at)->shape, &s, sizeof s) == 0) return *at;
    }
    chosen *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    made->shape = s;
    made->plain = !make_desc(&p->lib, made) || !make_layouts(&p->lib, &made->of, &s, s.M) ||
                  !choose(p, made, rows_queried(&s));
    return *at = made;
}

/* ---- gemms -------------------------------------------------------------------------------- */

/* Algorithms that use work space want it to begin at a multiple of 256. */
static void *aligned_workspace(void *space) {
    return (void *)(((uintptr_t)space + WORKSPACE_ALIGN - 1) / WORKSPACE_ALIGN * WORKSPACE_ALIGN);
}

static bool run_cublaslt(mn_gemm_handle *p, const chosen *c, const mn_gemm_problem *w, void *space,
                     void *stream) {
    const float one = 1.0f, beta = c->shape.adds ? 1.0f : 0.0f;
    const library *lib = &p->lib;
    if (w->bias && !ok(lib->cublasLtMatmulDescSetAttribute(
                       c->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &w->bias, sizeof w->bias))) {
        return false;
    }
    const void *onto = w->onto ? w->onto : w->c;
    return ok(lib->cublasLtMatmul(p->handle, c->desc, &one, w->b, c->of.a, w->a, c->of.b, &beta,
                                  onto, c->of.c, w->c, c->of.c, &c->algo, aligned_workspace(space),
                                  WORKSPACE, stream));
}

/* What takes the place of an algorithm that the library refused to run: one for many rows may not
 * serve few of them where N or K are a few elements, so first one for this number of rows. */
static void fall_back(mn_gemm_handle *p, chosen *c) {
    const bool own = !c->own && rows_queried(&c->shape) != c->shape.M;
    c->plain = !own || !choose(p, c, c->shape.M);
    c->own = true;
}

/* Wide products of float32, which the library has tiles for however few rows there are. */
static bool has_alike_tiles(const mn_gemm_problem *w) {
    enum { WIDE = 64 };
    shape s;
    describe(&s, w);
    return w->dtype == MN_F32 && !w->a_transposed && w->N >= WIDE && w->K >= WIDE && has_packs(&s);
}

int mn_gemm_run(mn_gemm_handle *p, const mn_gemm_problem *work, void *space, void *stream) {
    if (work->quant) return run_quant(p, work, space, stream);
    if (mn_gemm_rows_supported(work)) return mn_gemm_rows(work, 1, stream);
    if (work->alike && !has_alike_tiles(work)) return mn_gemm_simt(work, stream);
    if (work->step && mn_gemm_small_m_supported(work)) return mn_gemm_small_m(work, stream);
    if (mn_gemm_small_n_supported(work)) return mn_gemm_small_n(work, stream);
    chosen *c = work->K > 0 && mn_gemm_has_cublaslt(p) ? find(p, work) : NULL;
    if (!c || c->plain) return mn_gemm_simt(work, stream);
    if (run_cublaslt(p, c, work, space, stream)) return 0;
    fall_back(p, c);
    return mn_gemm_run(p, work, space, stream);
}

mn_gemm_handle *mn_gemm_create(void) {
    return calloc(1, sizeof(mn_gemm_handle));
}

static void discard(const library *lib, chosen *c) {
    destroy_layouts(lib, &c->of);
    if (c->desc) lib->cublasLtMatmulDescDestroy(c->desc);
    free(c);
}

void mn_gemm_destroy(mn_gemm_handle *p) {
    if (!p) return;
    for (int i = 0; i < BUCKETS; i++) {
        for (chosen *c = p->buckets[i], *next; c; c = next) {
            next = c->next;
            discard(&p->lib, c);
        }
    }
    if (p->handle) p->lib.cublasLtDestroy(p->handle);
    if (p->lib.handle) dlclose(p->lib.handle);
    free(p);
}

#else

struct mn_gemm_handle {
    bool nothing;
};

mn_gemm_handle *mn_gemm_create(void) {
    return calloc(1, sizeof(mn_gemm_handle));
}

void mn_gemm_destroy(mn_gemm_handle *gemms) {
    free(gemms);
}

bool mn_gemm_has_cublaslt(mn_gemm_handle *gemms) {
    (void)gemms;
    return false;
}

int mn_gemm_run(mn_gemm_handle *gemms, const mn_gemm_problem *work, void *space, void *stream) {
    if (work->quant) return run_quant(gemms, work, space, stream);
    (void)gemms, (void)space;
    if (mn_gemm_rows_supported(work)) return mn_gemm_rows(work, 1, stream);
    if (work->alike) return mn_gemm_simt(work, stream);
    if (work->step && mn_gemm_small_m_supported(work)) return mn_gemm_small_m(work, stream);
    if (mn_gemm_small_n_supported(work)) return mn_gemm_small_n(work, stream);
    return mn_gemm_simt(work, stream);
}

#endif
