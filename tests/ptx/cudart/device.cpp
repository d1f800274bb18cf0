/* device.cpp - what the device says of itself: an H200 of the host's memory. */
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cudart/runtime.h"

namespace cudart {

/* CUDA_VISIBLE_DEVICES hides the device where it names no first one, as for the driver. */
static bool is_visible() {
    const char *said = getenv("CUDA_VISIBLE_DEVICES");
    return !said || (*said >= '0' && atoi(said) == 0);
}

cudaError_t check_device(int device) {
    if (!is_visible()) return cudaErrorNoDevice;
    return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}

static void describe(cudaDeviceProp *p) {
    *p = cudaDeviceProp();
    snprintf(p->name, sizeof p->name, "PTX interpreter");
    memcpy(p->uuid.bytes, "PTX interpreter", sizeof p->uuid.bytes);
    p->totalGlobalMem = global_bytes(), p->totalConstMem = 64 * KIB;
    p->sharedMemPerBlock = SHARED_DEFAULT, p->sharedMemPerBlockOptin = SHARED_OPTIN;
    p->sharedMemPerMultiprocessor = SHARED_PROCESSOR,
    p->reservedSharedMemPerBlock = SHARED_RESERVED;
    p->regsPerBlock = REGISTERS, p->regsPerMultiprocessor = REGISTERS;
    p->warpSize = WARP, p->memPitch = 0x7fffffff;
    p->maxThreadsPerBlock = BLOCK_THREADS, p->maxThreadsPerMultiProcessor = PROCESSOR_THREADS;
    p->maxBlocksPerMultiProcessor = PROCESSOR_BLOCKS, p->multiProcessorCount = PROCESSORS;
    p->maxThreadsDim[0] = 1024, p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7fffffff, p->maxGridSize[1] = 65535, p->maxGridSize[2] = 65535;
    p->major = MAJOR, p->minor = MINOR;
    p->textureAlignment = 512, p->texturePitchAlignment = 32, p->surfaceAlignment = 512;
    p->canMapHostMemory = 1, p->concurrentKernels = 1, p->ECCEnabled = 1, p->asyncEngineCount = 3;
    p->unifiedAddressing = 1, p->memoryBusWidth = 6144;
    p->l2CacheSize = L2_BYTES, p->persistingL2CacheMaxSize = L2_BYTES / 8 * 5;
    p->accessPolicyMaxWindowSize = 128 * (int)MIB;
    p->streamPrioritiesSupported = 1, p->globalL1CacheSupported = 1, p->localL1CacheSupported = 1;
    p->computePreemptionSupported = 1, p->canUseHostPointerForRegisteredMem = 1;
    p->cooperativeLaunch = 1, p->hostRegisterSupported = 1, p->memoryPoolsSupported = 1;
    p->clusterLaunch = 1, p->unifiedFunctionPointers = 1, p->hostNumaId = -1, p->deviceNumaId = -1;
}

static cudaError_t attribute(int *value, cudaDeviceAttr which) {
    cudaDeviceProp p;
    describe(&p);
    switch (which) {
#define ATTRIBUTE(id, of) case id: *value = (int)(of); return cudaSuccess;
#include "cudart/attributes.def"
#undef ATTRIBUTE
    default: return cudaErrorInvalidValue;
    }
}

}    // namespace cudart

using namespace cudart;

extern "C" {

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = is_visible() ? 1 : 0;
    return done(is_visible() ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return done(check_device(0));
}

cudaError_t cudaSetDevice(int device) {
    return on_device([&] { return check_device(device); });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *facts, int device) {
    const cudaError_t code = check_device(device);
    if (code == cudaSuccess) describe(facts);
    return done(code);
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int device) {
    const cudaError_t code = check_device(device);
    return done(code == cudaSuccess ? attribute(value, which) : code);
}

cudaError_t cudaDeviceSynchronize(void) {
    return on_device([] { return check_device(0); });
}

cudaError_t cudaDeviceReset(void) {
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
    return done(driver_function(name, out, found));
}

cudaError_t cudaGetDriverEntryPoint(const char *name, void **out, unsigned long long,
                                    cudaDriverEntryPointQueryResult *found) {
    return done(driver_function(name, out, found));
}

}    // extern "C"
