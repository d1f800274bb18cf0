/* memory.cpp - memory of the device: the host's, in regions that kernels may touch. */
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "cudart/runtime.h"

namespace cudart {

/* No more than half of the host's memory: what a program is told that it may take, it can take. */
size_t global_bytes() {
    static const size_t bytes = std::min(GLOBAL_BYTES, (size_t)sysconf(_SC_PHYS_PAGES) / 2 *
                                                           (size_t)sysconf(_SC_PAGESIZE));
    return bytes;
}

void remember(void *at, size_t bytes, Origin origin) {
    state().regions[(uintptr_t)at] = { bytes, origin };
    if (origin != Origin::VARIABLE) ptx_memory_add(at, bytes);    // variables are the interpreter's
}

void forget(void *at) {
    state().regions.erase((uintptr_t)at);
    ptx_memory_remove(at);
}

/* Whether all of it is memory that the device may touch; pages side by side count as one piece. */
bool is_known(const void *at, size_t bytes) {
    const auto &regions = state().regions;
    uintptr_t from = (uintptr_t)at;
    while (bytes > 0) {
        auto next = regions.upper_bound(from);
        if (next == regions.begin()) return false;
        const auto &[start, region] = *std::prev(next);
        if (from - start >= region.bytes) return false;
        const size_t here = std::min(bytes, region.bytes - (from - start));
        from += here, bytes -= here;
    }
    return true;
}

/* Bytes of 0xff: floats are NaN and indices out of range, so that reading what nobody wrote
 * shows. */
static cudaError_t allocate(void **out, size_t bytes, Origin origin) {
    if (!out) return cudaErrorInvalidValue;
    *out = nullptr;
    if (bytes == 0) return cudaSuccess;
    const bool counted = origin == Origin::DEVICE;
    if (bytes > global_bytes() - (counted ? state().used : 0)) return cudaErrorMemoryAllocation;
    const size_t whole = ptx::rounded_up(bytes, ALLOCATION_ALIGNMENT);
    void *at = aligned_alloc(ALLOCATION_ALIGNMENT, whole);
    if (!at) return cudaErrorMemoryAllocation;
    memset(at, 0xff, whole);
    if (counted) state().used += bytes;
    remember(at, bytes, origin);
    *out = at;
    return cudaSuccess;
}

static cudaError_t release(void *at, Origin origin) {
    if (!at) return cudaSuccess;
    const auto found = state().regions.find((uintptr_t)at);
    if (found == state().regions.end() || found->second.origin != origin)
        return cudaErrorInvalidValue;
    if (origin == Origin::DEVICE) state().used -= found->second.bytes;
    forget(at);
    if (origin != Origin::HOST_REGISTERED) free(at);
    return cudaSuccess;
}

}    // namespace cudart

using namespace cudart;

extern "C" {

cudaError_t cudaMalloc(void **out, size_t bytes) {
    return on_device([&] {
        const cudaError_t code = check_device(0);
        return code == cudaSuccess ? allocate(out, bytes, Origin::DEVICE) : code;
    });
}

cudaError_t cudaFree(void *at) {
    return always([&] { return release(at, Origin::DEVICE); });
}

/* Captured allocations would live with the graph: not needed so far. */
cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream) {
    return on_device([&] {
        const cudaError_t code = settled(stream);
        return code == cudaSuccess ? allocate(out, bytes, Origin::DEVICE) : code;
    });
}

cudaError_t cudaFreeAsync(void *at, cudaStream_t stream) {
    return always([&] {
        const cudaError_t code = settled(stream);
        return code == cudaSuccess ? release(at, Origin::DEVICE) : code;
    });
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned) {
    return on_device([&] { return allocate(out, bytes, Origin::HOST); });
}

cudaError_t cudaMallocHost(void **out, size_t bytes) {
    return cudaHostAlloc(out, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void *at) {
    return always([&] { return release(at, Origin::HOST); });
}

cudaError_t cudaHostRegister(void *at, size_t bytes, unsigned) {
    return on_device([&] {
        if (!at || bytes == 0) return cudaErrorInvalidValue;
        remember(at, bytes, Origin::HOST_REGISTERED);
        return cudaSuccess;
    });
}

cudaError_t cudaHostUnregister(void *at) {
    return always([&] { return release(at, Origin::HOST_REGISTERED); });
}

cudaError_t cudaHostGetDevicePointer(void **out, void *at, unsigned) {
    return on_device([&] {
        *out = is_known(at, 1) ? at : nullptr;
        return *out ? cudaSuccess : cudaErrorInvalidValue;
    });
}

cudaError_t cudaMemGetInfo(size_t *unused, size_t *all) {
    return on_device([&] {
        *all = global_bytes(), *unused = global_bytes() - state().used;
        return cudaSuccess;
    });
}

/* The one pool keeps nothing; its handle is the address of what nobody looks at. */
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    static char there;
    *pool = (cudaMemPool_t)(void *)&there;
    return done(check_device(device));
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) {
    return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) {
    return cudaSuccess;
}

}    // extern "C"
