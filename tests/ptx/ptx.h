/* ptx.h - runs kernels of PTX on a CPU, for tests: one process, one launch at a time. */
#ifndef PTX_H
#define PTX_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ptx_module ptx_module;
typedef struct ptx_kernel ptx_kernel;

/* Takes a copy of the text, which ends with a zero. NULL and a message on stderr where it cannot
 * be read. */
ptx_module *ptx_module_load(const char *text);
void ptx_module_free(ptx_module *module);    /* with its kernels and variables; NULL accepted */

/* By its mangled name; NULL if the module has none. */
ptx_kernel *ptx_module_kernel(ptx_module *module, const char *name);

/* A variable of the module (__device__, __constant__): its place and size; NULL if there is
 * none. */
void *ptx_module_variable(ptx_module *module, const char *name, size_t *bytes);

int ptx_kernel_params(const ptx_kernel *kernel);               /* how many parameters */
size_t ptx_kernel_param_size(const ptx_kernel *kernel, int i); /* bytes of each */
size_t ptx_kernel_static_shared(ptx_kernel *kernel);
int ptx_kernel_max_threads(const ptx_kernel *kernel); /* .maxntid, or 1024 */

typedef struct ptx_launch {
    unsigned grid[3], block[3], cluster[3]; /* cluster: ones where there is none */
    size_t shared;                          /* dynamic bytes */
    void *const *args;                      /* one pointer for each parameter */
} ptx_launch;

/* Runs a launch to its end. Nonzero, with a message on stderr, where it fails: a bad access, an
 * instruction that is not known, threads that wait for each other for ever. */
int ptx_run(ptx_kernel *kernel, const ptx_launch *launch);

/* What kernels may touch of global memory. */
void ptx_memory_add(const void *at, size_t bytes);
void ptx_memory_remove(const void *at);

/* How many multiprocessors kernels are told of: those of an H200. */
#define PTX_PROCESSORS 132

/* What cuTensorMapEncodeTiled leaves in the 128 bytes of a CUtensorMap (64-byte aligned).
 * strides[i] is the stride in bytes of dimension i + 1, as there. */
typedef struct ptx_tensor_map {
    uint64_t magic; /* PTX_TENSOR_MAP */
    uint64_t address;
    uint32_t dims[5];
    uint32_t box[5];
    uint64_t strides[4];
    uint8_t rank, element_bytes, swizzle /* CUtensorMapSwizzle */, type /* CUtensorMapDataType */;
    uint8_t step[5]; /* element strides */
    uint8_t fill;
    uint8_t rest[6];
} ptx_tensor_map;
#define PTX_TENSOR_MAP 0x70616d5f78747000ull

#ifdef __cplusplus
}
#endif
#endif
