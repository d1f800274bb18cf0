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
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX: *value = p.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimY: *value = p.maxThreadsDim[1]; break;
    case cudaDevAttrMaxBlockDimZ: *value = p.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = p.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[2]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = (int)p.sharedMemPerMultiprocessor;
        break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = (int)p.reservedSharedMemPerBlock; break;
    case cudaDevAttrTotalConstantMemory: *value = (int)p.totalConstMem; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxPitch: *value = (int)p.memPitch; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = p.regsPerMultiprocessor; break;
    case cudaDevAttrClockRate: *value = 1980000; break;          // kHz
    case cudaDevAttrMemoryClockRate: *value = 3201000; break;    // kHz
    case cudaDevAttrTextureAlignment: *value = (int)p.textureAlignment; break;
    case cudaDevAttrGpuOverlap: *value = 1; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrCanMapHostMemory: *value = p.canMapHostMemory; break;
    case cudaDevAttrConcurrentKernels: *value = p.concurrentKernels; break;
    case cudaDevAttrEccEnabled: *value = p.ECCEnabled; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrMaxPersistingL2CacheSize: *value = p.persistingL2CacheMaxSize; break;
    case cudaDevAttrMaxAccessPolicyWindowSize: *value = p.accessPolicyMaxWindowSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrAsyncEngineCount: *value = p.asyncEngineCount; break;
    case cudaDevAttrUnifiedAddressing: *value = p.unifiedAddressing; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrStreamPrioritiesSupported: *value = p.streamPrioritiesSupported; break;
    case cudaDevAttrGlobalL1CacheSupported: *value = p.globalL1CacheSupported; break;
    case cudaDevAttrLocalL1CacheSupported: *value = p.localL1CacheSupported; break;
    case cudaDevAttrSingleToDoublePrecisionPerfRatio: *value = 2; break;
    case cudaDevAttrComputePreemptionSupported: *value = p.computePreemptionSupported; break;
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
        *value = p.canUseHostPointerForRegisteredMem;
        break;
    case cudaDevAttrCooperativeLaunch: *value = p.cooperativeLaunch; break;
    case cudaDevAttrHostRegisterSupported: *value = p.hostRegisterSupported; break;
    case cudaDevAttrMemoryPoolsSupported: *value = p.memoryPoolsSupported; break;
    case cudaDevAttrClusterLaunch: *value = p.clusterLaunch; break;
    case cudaDevAttrHostNumaId: *value = p.hostNumaId; break;
    case cudaDevAttrNumaId: *value = p.deviceNumaId; break;
    case cudaDevAttrMemSyncDomainCount: *value = 4; break;
    /* What this device has not. */
    case cudaDevAttrKernelExecTimeout:
    case cudaDevAttrIntegrated:
    case cudaDevAttrComputeMode:
    case cudaDevAttrPciBusId:
    case cudaDevAttrPciDeviceId:
    case cudaDevAttrPciDomainId:
    case cudaDevAttrTccDriver:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrIsMultiGpuBoard:
    case cudaDevAttrMultiGpuBoardGroupID:
    case cudaDevAttrHostNativeAtomicSupported:
    case cudaDevAttrPageableMemoryAccess:
    case cudaDevAttrPageableMemoryAccessUsesHostPageTables:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrDirectManagedMemAccessFromHost:
    case cudaDevAttrGPUDirectRDMASupported:
    case cudaDevAttrMemoryPoolSupportedHandleTypes:
    case cudaDevAttrIpcEventSupport:
    case cudaDevAttrMpsEnabled: *value = 0; break;
    default: return cudaErrorInvalidValue;
    }
    return cudaSuccess;
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
