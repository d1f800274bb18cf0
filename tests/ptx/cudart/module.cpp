/* module.cpp - modules and kernels as nvcc registers them; device code is the PTX of their fat
 * binaries. */
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "cudart/runtime.h"

namespace cudart {

/* A fat binary: this header, then entries of a header and a payload each. The layout is not
 * documented; what is here was read from nvcc's output. */
struct FatHeader {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes;    // of all entries
};

struct FatEntry {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t payload_bytes;       // padded with zeros
    uint32_t compressed_bytes;    // 0: not compressed
    uint32_t options_at;
    uint16_t minor, major;
    uint32_t arch;    // 90
};

constexpr uint32_t FAT_WRAPPER_MAGIC = 0x466243b1, FAT_MAGIC = 0xba55ed50;
constexpr uint16_t FAT_PTX = 1;

struct FatWrapper {
    uint32_t magic, version;
    const unsigned char *data;
    const void *rest;
};

/* The entry with PTX for the newest GPU that is not newer than this one; NULL if there is none. */
static const FatEntry *find_ptx(const void *fatbin) {
    const auto *wrapper = (const FatWrapper *)fatbin;
    if (!wrapper || wrapper->magic != FAT_WRAPPER_MAGIC) return nullptr;
    const auto *header = (const FatHeader *)wrapper->data;
    if (header->magic != FAT_MAGIC) return nullptr;
    const unsigned char *at = wrapper->data + header->header_bytes, *end = at + header->bytes;
    const FatEntry *best = nullptr;
    while (at < end) {
        const auto *entry = (const FatEntry *)at;
        const bool fits = entry->kind == FAT_PTX && entry->arch <= 10 * MAJOR + MINOR;
        if (fits && (!best || entry->arch > best->arch)) best = entry;
        at += entry->header_bytes + entry->payload_bytes;
    }
    return best;
}

static cudaError_t load(Module *module) {
    const FatEntry *entry = find_ptx(module->fatbin);
    if (!entry) {
        fprintf(stderr, "cudart: a module has no PTX: MN_CUDA_MACHINES lacks 90a-virtual\n");
        return cudaErrorNoKernelImageForDevice;
    }
    if (entry->compressed_bytes != 0) {
        fprintf(stderr, "cudart: the PTX of a module is compressed; compile with --no-compress\n");
        return cudaErrorInvalidPtx;
    }
    const char *text = (const char *)entry + entry->header_bytes;
    const std::string copy(text, strnlen(text, entry->payload_bytes));
    const double start = seconds_now();
    module->ptx = ptx_module_load(copy.c_str());
    if (tracing()) {
        fprintf(stderr, "ptx: module of %zu bytes read in %.6f s\n", copy.size(),
                seconds_now() - start);
    }
    return module->ptx ? cudaSuccess : cudaErrorInvalidPtx;
}

/* Reads the module at the first use of anything in it; one that failed is not tried again. */
static cudaError_t need(Module *module) {
    if (!module->tried) module->code = load(module), module->tried = true;
    return module->code;
}

/* The kernel of a host's function, or of a handle that cudaGetKernel gave. */
static cudaKernel_t registered(const void *function) {
    const auto found = state().kernels.find(function);
    if (found != state().kernels.end()) return found->second;
    return is_live(function) ? (cudaKernel_t)(uintptr_t)function : nullptr;
}

cudaError_t find_kernel(cudaKernel_t *out, const void *function) {
    cudaKernel_t kernel = registered(function);
    if (!kernel) return cudaErrorInvalidDeviceFunction;
    const cudaError_t code = need(kernel->module);
    if (code != cudaSuccess) return code;
    if (!kernel->ptx) kernel->ptx = ptx_module_kernel(kernel->module->ptx, kernel->name);
    if (!kernel->ptx) {
        fprintf(stderr, "cudart: the PTX has no kernel %s\n", kernel->name);
        return cudaErrorInvalidDeviceFunction;
    }
    *out = kernel;
    return cudaSuccess;
}

size_t allowed_dynamic(cudaKernel_t kernel) {
    if (kernel->max_dynamic >= 0) return (size_t)kernel->max_dynamic;
    const size_t fixed = ptx_kernel_static_shared(kernel->ptx);
    return fixed < SHARED_DEFAULT ? SHARED_DEFAULT - fixed : 0;
}

int most_threads(cudaKernel_t kernel) {
    return std::min(ptx_kernel_max_threads(kernel->ptx), BLOCK_THREADS);
}

cudaError_t find_variable(void **at, size_t *bytes, const void *symbol) {
    const auto found = state().variables.find(symbol);
    if (found == state().variables.end()) return cudaErrorInvalidSymbol;
    const Variable &variable = found->second;
    const cudaError_t code = need(variable.module);
    if (code != cudaSuccess) return code;
    size_t there = 0;
    *at = ptx_module_variable(variable.module->ptx, variable.name, &there);
    if (!*at) return cudaErrorInvalidSymbol;
    *bytes = variable.bytes;
    if (!is_known(*at, there)) remember(*at, there, Origin::VARIABLE);
    return cudaSuccess;
}

}    // namespace cudart

using namespace cudart;

extern "C" {

void **__cudaRegisterFatBinary(void *fatbin) {
    std::lock_guard<std::mutex> hold(state().lock);
    auto *module = new Module;
    module->fatbin = fatbin;
    return (void **)module;
}

void __cudaRegisterFatBinaryEnd(void **) {
}

/* At exit only: nothing is given back, kernels of other files may still run. */
void __cudaUnregisterFatBinary(void **) {
}

char __cudaInitModule(void **) {
    return 1;
}

/* A function that several files register, a template's, is that of the first: all are the same. */
void __cudaRegisterFunction(void **module, const char *host, char *, const char *name, int, uint3 *,
                            uint3 *, dim3 *, dim3 *, int *) {
    std::lock_guard<std::mutex> hold(state().lock);
    if (state().kernels.count(host) != 0) return;
    auto *kernel = new CUkern_st{ (Module *)module, name, nullptr, -1, false };
    state().kernels[host] = kernel;
    state().live.insert(kernel);
}

void __cudaRegisterVar(void **module, char *host, char *, const char *name, int, size_t bytes, int,
                       int) {
    std::lock_guard<std::mutex> hold(state().lock);
    state().variables.insert({ host, { (Module *)module, name, bytes } });
}

cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *function) {
    return always([&] {
        *out = registered(function);
        return *out ? cudaSuccess : cudaErrorInvalidDeviceFunction;
    });
}

cudaError_t cudaGetKernel(cudaKernel_t *out, const void *function) {
    return __cudaGetKernel(out, function);
}

}    // extern "C"
