/* device_props.cu - facts of device_props.h, each device's kept in one word, so that threads that
 * ask at the same time need no lock: they find nothing yet or all of it. */
#include "kernels/cuda/prim/device_props.h"

#include <cuda_runtime.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace mneme {

enum { MAX_DEVICES = 64 };

/* Bits of the word from the lowest on, the last of which says that it is known. */
enum { SM_COUNT = 16, SMEM = 32, MAJOR = 6, MINOR = 6, COOP_LAUNCH = 1 };

static uint64_t pack(const mn_device_props &m) {
    uint64_t word = 1;
    word = word << COOP_LAUNCH | (m.coop_launch ? 1u : 0u);
    word = word << MINOR | (uint64_t)m.minor;
    word = word << MAJOR | (uint64_t)m.major;
    word = word << SMEM | (uint64_t)m.shared_bytes;
    return word << SM_COUNT | (uint64_t)m.processors;
}

static int take(uint64_t *word, int bits) {
    const uint64_t low = *word & (((uint64_t)1 << bits) - 1);
    *word >>= bits;
    return (int)low;
}

static mn_device_props unpack(uint64_t word) {
    mn_device_props m = {};
    m.processors = take(&word, SM_COUNT), m.shared_bytes = take(&word, SMEM);
    m.major = take(&word, MAJOR), m.minor = take(&word, MINOR);
    m.coop_launch = take(&word, COOP_LAUNCH) != 0;
    return m;
}

/* MN_CUDA_MACHINE=80 lets launches choose as on a GPU of compute capability 8.0, so that what runs
 * there can be checked and timed on a newer one: no TMA, no wgmma, 163 KiB of shared memory. */
static void take_for_older(mn_device_props *m) {
    const char *machine = getenv("MN_CUDA_MACHINE");
    if (!machine || strcmp(machine, "80") != 0 || m->major < 8) return;
    m->major = 8, m->minor = 0;
    if (m->shared_bytes > 163 * 1024) m->shared_bytes = 163 * 1024;
}

__global__ void compiled_for_what(void) {
}

/* A newer GPU than any that machine code is there for runs the PTX of an older one, in which what
 * that one has not is left out: launches choose as on it. */
static bool take_for_compiled(mn_device_props *m) {
    if (m->major <= 9) return true;
    cudaFuncAttributes of;
    if (cudaFuncGetAttributes(&of, compiled_for_what) != cudaSuccess) return false;
    if (of.ptxVersion < 10 * m->major) m->major = of.ptxVersion / 10, m->minor = of.ptxVersion % 10;
    return true;
}

/* False, and nothing known, when the driver does not answer. */
static bool fetch(mn_device_props *m, int device) {
    const struct {
        cudaDeviceAttr which;
        int *to;
    } facts[] = { { cudaDevAttrMultiProcessorCount, &m->processors },
                  { cudaDevAttrMaxSharedMemoryPerBlockOptin, &m->shared_bytes },
                  { cudaDevAttrComputeCapabilityMajor, &m->major },
                  { cudaDevAttrComputeCapabilityMinor, &m->minor } };
    int coop_launch = 0;
    bool known = cudaDeviceGetAttribute(&coop_launch, cudaDevAttrCooperativeLaunch, device) ==
                 cudaSuccess;
    for (const auto &fact : facts) {
        known = known && cudaDeviceGetAttribute(fact.to, fact.which, device) == cudaSuccess;
    }
    m->coop_launch = coop_launch != 0;
    known = known && take_for_compiled(m);
    take_for_older(m);
    if (known) return true;
    (void)cudaGetLastError();    // not for the next launch to report
    *m = {};
    return false;
}

mn_device_props mn_device_props_current(void) {
    static uint64_t words[MAX_DEVICES];
    mn_device_props m = {};
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) {
        (void)cudaGetLastError();
        return m;
    }
    if (device >= MAX_DEVICES) {
        (void)fetch(&m, device);
        return m;
    }
    const uint64_t word = __atomic_load_n(&words[device], __ATOMIC_RELAXED);
    if (word != 0) return unpack(word);
    if (fetch(&m, device)) __atomic_store_n(&words[device], pack(m), __ATOMIC_RELAXED);
    return m;
}

}    // namespace mneme
