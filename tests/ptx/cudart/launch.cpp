/* launch.cpp - launches of kernels, checked as the driver would, and their attributes. */
#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "cudart/runtime.h"

namespace cudart {

/* A launch with copies of its arguments, which may be gone when a graph runs it. */
struct Launch {
    static constexpr size_t ALIGNMENT = 128;    // of a CUtensorMap
    struct Free {
        void operator()(unsigned char *bytes) const {
            free(bytes);
        }
    };

    cudaKernel_t kernel;
    ptx_launch how;
    std::unique_ptr<unsigned char, Free> bytes;
    std::vector<void *> args;

    Launch(cudaKernel_t of, const ptx_launch &given) : kernel(of), how(given) {
        const int n = ptx_kernel_params(kernel->ptx);
        std::vector<size_t> at(1, 0);
        for (int i = 0; i < n; i++) {
            const size_t taken = ptx_kernel_param_size(kernel->ptx, i);
            at.push_back(at.back() + ptx::rounded_up(taken, ALIGNMENT));
        }
        bytes.reset((unsigned char *)aligned_alloc(ALIGNMENT, at.back() + ALIGNMENT));
        for (int i = 0; i < n; i++) {
            args.push_back(bytes.get() + at[i]);
            memcpy(args[i], given.args[i], ptx_kernel_param_size(kernel->ptx, i));
        }
        how.args = args.data();
    }
};

static std::string demangled(const char *name) {
    int status = 0;
    char *text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    const std::string result = status == 0 && text ? text : name;
    free(text);
    return result;
}

static void trace(const Launch &launch, double seconds, bool failed) {
    const ptx_launch &l = launch.how;
    fprintf(stderr, "ptx: %s grid %u,%u,%u block %u,%u,%u cluster %u,%u,%u shared %zu: %.6f s%s\n",
            demangled(launch.kernel->name).c_str(), l.grid[0], l.grid[1], l.grid[2], l.block[0],
            l.block[1], l.block[2], l.cluster[0], l.cluster[1], l.cluster[2], l.shared, seconds,
            failed ? " FAILED" : "");
}

static cudaError_t run(const Launch &launch) {
    const double start = seconds_now();
    const bool failed = ptx_run(launch.kernel->ptx, &launch.how) != 0;
    if (tracing()) trace(launch, seconds_now() - start, failed);
    if (failed) state().lost = cudaErrorLaunchFailure;
    return failed ? cudaErrorLaunchFailure : cudaSuccess;
}

static bool grid_fits(const unsigned grid[3]) {
    return grid[0] >= 1 && grid[1] >= 1 && grid[2] >= 1 && grid[0] <= 0x7fffffffu &&
           grid[1] <= 65535 && grid[2] <= 65535;
}

static bool block_fits(const unsigned block[3], int most) {
    if (block[0] < 1 || block[1] < 1 || block[2] < 1) return false;
    if (block[0] > 1024 || block[1] > 1024 || block[2] > 64) return false;
    return block[0] * block[1] * block[2] <= (unsigned)most;
}

bool shared_fits(cudaKernel_t kernel, size_t dynamic) {
    return dynamic <= allowed_dynamic(kernel) &&
           dynamic + ptx_kernel_static_shared(kernel->ptx) <= SHARED_OPTIN;
}

static bool cluster_fits(cudaKernel_t kernel, const ptx_launch &how) {
    uint64_t blocks = 1;
    for (int i = 0; i < 3; i++) {
        if (how.cluster[i] < 1 || how.grid[i] % how.cluster[i] != 0) return false;
        blocks *= how.cluster[i];
    }
    return blocks <= (kernel->large_cluster ? LARGEST_CLUSTER : PORTABLE_CLUSTER);
}

static cudaError_t check_launch(cudaKernel_t kernel, const ptx_launch &how) {
    if (!grid_fits(how.grid) || !block_fits(how.block, most_threads(kernel)))
        return cudaErrorInvalidValue;
    if (!shared_fits(kernel, how.shared)) return cudaErrorInvalidValue;
    if (!cluster_fits(kernel, how)) return cudaErrorInvalidClusterSize;
    if (!how.args && ptx_kernel_params(kernel->ptx) > 0) return cudaErrorInvalidValue;
    return cudaSuccess;
}

cudaError_t launch(const void *function, const ptx_launch &how, cudaStream_t stream) {
    cudaKernel_t kernel = nullptr;
    cudaError_t code = find_kernel(&kernel, function);
    if (code == cudaSuccess) code = check_launch(kernel, how);
    if (code != cudaSuccess) return code;
    const auto kept = std::make_shared<const Launch>(kernel, how);
    return submit(stream, [kept] { return run(*kept); });
}

ptx_launch plain_launch(dim3 grid, dim3 block, void **args, size_t shared) {
    return { { grid.x, grid.y, grid.z }, { block.x, block.y, block.z }, { 1, 1, 1 }, shared, args };
}

/* Cooperative launches need nothing more: the interpreter lets all blocks run at once. What
 * orders launches or ranks them is of no use where each ends before the next. */
static cudaError_t take_attribute(ptx_launch *how, const cudaLaunchAttribute &attribute) {
    switch (attribute.id) {
    case cudaLaunchAttributeClusterDimension:
        how->cluster[0] = attribute.val.clusterDim.x;
        how->cluster[1] = attribute.val.clusterDim.y;
        how->cluster[2] = attribute.val.clusterDim.z;
        return cudaSuccess;
    case cudaLaunchAttributeIgnore:
    case cudaLaunchAttributeCooperative:
    case cudaLaunchAttributeProgrammaticStreamSerialization:
    case cudaLaunchAttributePriority:
    case cudaLaunchAttributeClusterSchedulingPolicyPreference:
    case cudaLaunchAttributePreferredSharedMemoryCarveout: return cudaSuccess;
    default: return cudaErrorNotSupported;
    }
}

/* Registers are not known of PTX and do not count. */
static int blocks_a_processor(cudaKernel_t kernel, int block, size_t dynamic) {
    const int warps = (block + WARP - 1) / WARP;
    const size_t shared = ptx_kernel_static_shared(kernel->ptx) + dynamic + SHARED_RESERVED;
    const int by_threads = PROCESSOR_THREADS / (warps * WARP),
              by_shared = (int)(SHARED_PROCESSOR / shared);
    return std::min({ by_threads, by_shared, PROCESSOR_BLOCKS });
}

struct CallConfiguration {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};

/* <<<>>> pushes, and the stub of the kernel that it then calls pops. */
static thread_local std::vector<CallConfiguration> configurations;

}    // namespace cudart

using namespace cudart;

extern "C" {

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                     struct CUstream_st *stream) {
    configurations.push_back({ grid, block, shared, stream });
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    if (configurations.empty()) return done(cudaErrorMissingConfiguration);
    const CallConfiguration c = configurations.back();
    configurations.pop_back();
    *grid = c.grid, *block = c.block, *shared = c.shared;
    *(cudaStream_t *)stream = c.stream;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args,
                               size_t shared, cudaStream_t stream) {
    return on_device(
        [&] { return launch(kernel, plain_launch(grid, block, args, shared), stream); });
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **args,
                             size_t shared, cudaStream_t stream) {
    return on_device(
        [&] { return launch(function, plain_launch(grid, block, args, shared), stream); });
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **args,
                                        size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(function, grid, block, args, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function,
                                void **args) {
    return on_device([&] {
        if (!config) return cudaErrorInvalidValue;
        ptx_launch how = plain_launch(config->gridDim, config->blockDim, args,
                                      config->dynamicSmemBytes);
        for (unsigned i = 0; i < config->numAttrs; i++) {
            const cudaError_t code = take_attribute(&how, config->attrs[i]);
            if (code != cudaSuccess) return code;
        }
        return launch(function, how, config->stream);
    });
}

cudaError_t cudaFuncSetAttribute(const void *function, cudaFuncAttribute which, int value) {
    return on_device([&] {
        cudaKernel_t kernel = nullptr;
        const cudaError_t code = find_kernel(&kernel, function);
        if (code != cudaSuccess) return code;
        switch (which) {
        case cudaFuncAttributeMaxDynamicSharedMemorySize:
            if (value < 0 || (size_t)value + ptx_kernel_static_shared(kernel->ptx) > SHARED_OPTIN) {
                return cudaErrorInvalidValue;
            }
            kernel->max_dynamic = value;
            return cudaSuccess;
        case cudaFuncAttributePreferredSharedMemoryCarveout:
            return value >= -1 && value <= 100 ? cudaSuccess : cudaErrorInvalidValue;
        case cudaFuncAttributeNonPortableClusterSizeAllowed:
            kernel->large_cluster = value != 0;
            return cudaSuccess;
        default: return cudaErrorNotSupported;
        }
    });
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *function) {
    return on_device([&] {
        cudaKernel_t kernel = nullptr;
        const cudaError_t code = find_kernel(&kernel, function);
        if (code != cudaSuccess) return code;
        *out = cudaFuncAttributes();
        out->sharedSizeBytes = ptx_kernel_static_shared(kernel->ptx);
        out->maxThreadsPerBlock = most_threads(kernel);
        out->numRegs = std::min(255, REGISTERS / out->maxThreadsPerBlock);    // PTX does not say
        out->ptxVersion = out->binaryVersion = 10 * MAJOR + MINOR;
        out->maxDynamicSharedSizeBytes = (int)allowed_dynamic(kernel);
        out->preferredShmemCarveout = -1;
        out->nonPortableClusterSizeAllowed = kernel->large_cluster;
        return cudaSuccess;
    });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks,
                                                                   const void *function, int block,
                                                                   size_t dynamic, unsigned) {
    return on_device([&] {
        cudaKernel_t kernel = nullptr;
        const cudaError_t code = find_kernel(&kernel, function);
        if (code != cudaSuccess) return code;
        if (!blocks || block < 1) return cudaErrorInvalidValue;
        const bool fits = block <= most_threads(kernel) && shared_fits(kernel, dynamic);
        *blocks = fits ? blocks_a_processor(kernel, block, dynamic) : 0;
        return cudaSuccess;
    });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function,
                                                          int block, size_t dynamic) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block, dynamic,
                                                                  0);
}

}    // extern "C"
