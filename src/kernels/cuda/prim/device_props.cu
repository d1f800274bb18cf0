/* device_props.cu - facts of machine.h, each device's kept in one word, so that threads that ask at
 * the
 * same time need no lock: they find nothing yet or all of it. */
#include "kernels/cuda/prim/device_props.h"

#include <cuda_runtime.h>
#include <stdint.h>

enum { MOST_DEVICES = 64 };

/* Bits of the word from the lowest on, the last of which says that it is known. */
enum { PROCESSORS = 16, SHARED = 32, MAJOR = 6, MINOR = 6, COOPERATES = 1 };

static uint64_t pack(const mn_machine &m) {
    uint64_t word = 1;
    word = word << COOPERATES | (m.cooperates ? 1u : 0u);
    word = word << MINOR | (uint64_t)m.minor;
    word = word << MAJOR | (uint64_t)m.major;
    word = word << SHARED | (uint64_t)m.shared_bytes;
    return word << PROCESSORS | (uint64_t)m.processors;
}

static int take(uint64_t *word, int bits) {
    const uint64_t low = *word & (((uint64_t)1 << bits) - 1);
    *word >>= bits;
    return (int)low;
}

static mn_machine unpack(uint64_t word) {
    mn_machine m = {};
    m.processors = take(&word, PROCESSORS), m.shared_bytes = take(&word, SHARED);
    m.major = take(&word, MAJOR), m.minor = take(&word, MINOR);
    m.cooperates = take(&word, COOPERATES) != 0;
    return m;
}

/* False, and nothing known, when the driver does not answer. */
static bool ask(mn_machine *m, int device) {
    const struct {
        cudaDeviceAttr which;
        int *to;
    } facts[] = { { cudaDevAttrMultiProcessorCount, &m->processors },
                  { cudaDevAttrMaxSharedMemoryPerBlockOptin, &m->shared_bytes },
                  { cudaDevAttrComputeCapabilityMajor, &m->major },
                  { cudaDevAttrComputeCapabilityMinor, &m->minor } };
    int cooperates = 0;
    bool known = cudaDeviceGetAttribute(&cooperates, cudaDevAttrCooperativeLaunch, device) ==
                 cudaSuccess;
    for (const auto &fact : facts) {
        known = known && cudaDeviceGetAttribute(fact.to, fact.which, device) == cudaSuccess;
    }
    m->cooperates = cooperates != 0;
    if (known) return true;
    (void)cudaGetLastError();    // not for the next launch to report
    *m = {};
    return false;
}

mn_machine mn_machine_in_use(void) {
    static uint64_t words[MOST_DEVICES];
    mn_machine m = {};
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) {
        (void)cudaGetLastError();
        return m;
    }
    if (device >= MOST_DEVICES) {
        (void)ask(&m, device);
        return m;
    }
    const uint64_t word = __atomic_load_n(&words[device], __ATOMIC_RELAXED);
    if (word != 0) return unpack(word);
    if (ask(&m, device)) __atomic_store_n(&words[device], pack(m), __ATOMIC_RELAXED);
    return m;
}
