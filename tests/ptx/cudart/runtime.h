/* runtime.h - the state of the stand-in for the CUDA runtime, and what its files ask of each
 * other. */
#ifndef PTX_CUDART_RUNTIME_H
#define PTX_CUDART_RUNTIME_H

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ptx.h"
#include "value.h"

namespace cudart {

/* The device describes itself as an H200. */
constexpr size_t KIB = 1024, MIB = 1024 * KIB;
constexpr size_t GLOBAL_BYTES = 143771 * MIB, PAGE_BYTES = 2 * MIB;
constexpr size_t SHARED_DEFAULT = 48 * KIB, SHARED_OPTIN = 227 * KIB, SHARED_PROCESSOR = 228 * KIB;
constexpr size_t SHARED_RESERVED = 1 * KIB;    // of each block
constexpr int PROCESSORS = PTX_PROCESSORS, MAJOR = 9, MINOR = 0, WARP = 32;
constexpr int BLOCK_THREADS = 1024, PROCESSOR_THREADS = 2048, PROCESSOR_BLOCKS = 32;
constexpr int REGISTERS = 64 * 1024, L2_BYTES = 50 * (int)MIB;
constexpr unsigned PORTABLE_CLUSTER = 8, LARGEST_CLUSTER = 16;
constexpr size_t ALLOCATION_ALIGNMENT = 256;

/* Something a stream does: its parameters are inside, so that a graph can do it again. */
using Work = std::function<cudaError_t()>;

/* How many works of each stream are known to be done. */
using Clock = std::map<cudaStream_t, size_t>;

/* Streams that record a graph together. */
struct Capture {
    cudaStream_t origin = nullptr;
    std::vector<cudaStream_t> members;
    std::vector<Work> works;
    bool invalid = false, ended = false;
};

/* Where the text of a module is and what became of it. */
struct Module {
    const void *fatbin = nullptr;
    ptx_module *ptx = nullptr;
    cudaError_t code = cudaSuccess;
    bool tried = false;
};

struct Variable {
    Module *module;
    const char *name;
    size_t bytes;
};

enum class Origin { DEVICE, HOST, HOST_REGISTERED, VARIABLE, PAGES };

struct Region {
    size_t bytes;
    Origin origin;
};

}    // namespace cudart

/* The runtime's handles point to these. */
struct CUkern_st {
    cudart::Module *module;
    const char *name;
    ptx_kernel *ptx;
    long max_dynamic;    // what cudaFuncSetAttribute allowed; -1: nothing was said
    bool large_cluster;
};

struct CUstream_st {
    unsigned flags = 0;
    std::shared_ptr<cudart::Capture> capture;
    cudart::Clock seen;
};

struct CUevent_st {
    bool timing = true, recorded = false;
    double at = 0.0;
    std::shared_ptr<cudart::Capture> capture;    // of the last record, if that was captured
    cudart::Clock seen;
};

struct CUgraph_st {
    std::vector<cudart::Work> works;
};

struct CUgraphExec_st {
    std::vector<cudart::Work> works;
};

namespace cudart {

struct State {
    std::mutex lock;
    cudaError_t lost = cudaSuccess;    // a kernel failed: as on a GPU, nothing works from then on
    std::map<uintptr_t, Region> regions;
    size_t used = 0;
    std::unordered_map<const void *, cudaKernel_t> kernels;    // by the host's function
    std::unordered_map<const void *, Variable> variables;      // by the host's shadow
    std::unordered_set<const void *> live;                     // handles given out
    CUstream_st default_stream;
};

/* The one there is. */
State &state();

/* Keeps a code for cudaGetLastError and gives it back. */
cudaError_t done(cudaError_t code);
extern thread_local cudaError_t last_error;

/* A call that does not need the device's state to be sound: questions, and giving things back. */
template <typename F> cudaError_t always(F &&body) {
    std::lock_guard<std::mutex> hold(state().lock);
    return done(body());
}

/* A call that needs the device: refused for ever once a kernel has failed. */
template <typename F> cudaError_t on_device(F &&body) {
    std::lock_guard<std::mutex> hold(state().lock);
    return done(state().lost != cudaSuccess ? state().lost : body());
}

double seconds_now();
bool tracing();    // PTX_TRACE=1

template <typename Handle> bool is_live(Handle handle) {
    return state().live.count(handle) != 0;
}

template <typename Handle> cudaError_t destroy(Handle handle) {
    if (state().live.erase(handle) == 0) return cudaErrorInvalidResourceHandle;
    delete handle;
    return cudaSuccess;
}

/* memory.cpp */
size_t global_bytes();
void remember(void *at, size_t bytes, Origin origin);
void forget(void *at);
/* Whether all of it is memory that the device may touch; pages side by side count as one piece. */
bool is_known(const void *at, size_t bytes);

/* module.cpp */
cudaError_t find_kernel(cudaKernel_t *out, const void *function);
size_t allowed_dynamic(cudaKernel_t kernel);
int most_threads(cudaKernel_t kernel);
cudaError_t find_variable(void **at, size_t *bytes, const void *symbol);

/* stream.cpp */
/* Does a work of a stream now, or records it. */
cudaError_t submit(cudaStream_t handle, Work work);
/* A question for which the stream's work must have run: not while it is only recorded. */
cudaError_t settled(cudaStream_t handle);

/* launch.cpp */
bool shared_fits(cudaKernel_t kernel, size_t dynamic);
cudaError_t launch(const void *function, const ptx_launch &how, cudaStream_t stream);
ptx_launch plain_launch(dim3 grid, dim3 block, void **args, size_t shared);

/* copy.cpp */
cudaError_t copy_flat(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                      cudaStream_t stream);

/* device.cpp */
cudaError_t check_device(int device);

/* driver.cpp: the driver's functions, which programs ask for by name */
cudaError_t driver_function(const char *name, void **out, cudaDriverEntryPointQueryResult *found);

/* tensor_map.cpp */
CUresult encode_tiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                      const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                      const cuuint32_t *steps, CUtensorMapInterleave interleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                      CUtensorMapFloatOOBfill fill);

/* pages.cpp */
CUresult page_granularity(size_t *bytes, const CUmemAllocationProp *,
                          CUmemAllocationGranularity_flags);
CUresult page_reserve(CUdeviceptr *at, size_t bytes, size_t, CUdeviceptr, unsigned long long);
CUresult page_unreserve(CUdeviceptr at, size_t bytes);
CUresult page_create(CUmemGenericAllocationHandle *page, size_t bytes, const CUmemAllocationProp *,
                     unsigned long long);
CUresult page_release(CUmemGenericAllocationHandle page);
CUresult page_map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle page,
                  unsigned long long);
CUresult page_allow(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count);
CUresult page_unmap(CUdeviceptr at, size_t bytes);

}    // namespace cudart
#endif
