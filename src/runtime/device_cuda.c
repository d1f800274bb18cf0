/* device_cuda.c - the backend over the CUDA runtime, linked statically: a machine without a driver
 * still starts the program, and learns here what is missing. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "runtime/device_backend.h"

/* The kernels are machine code for 8.0 and 9.0a, and PTX from 8.0 on. */
enum { LEAST_MAJOR = 8 };

bool mn_backend_built(void) {
    return true;
}

/* CUDA counts 13.1 as 13010. */
static mn_status driver_too_old(void) {
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (driver == 0) {
        return mn_fail(MN_ERR_UNSUPPORTED,
                       "no NVIDIA driver: libcuda is not installed or does not load; use the CPU");
    }
    return mn_fail(MN_ERR_UNSUPPORTED,
                   "the NVIDIA driver is too old: it supports CUDA %d.%d, this build needs %d.%d",
                   driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
}

static mn_status translate(cudaError_t code, const char *what) {
    if (code == cudaSuccess) return MN_OK;
    cudaGetLastError();    // a failure that is not for ever is reported once
    if (code == cudaErrorInsufficientDriver) return driver_too_old();
    if (code == cudaErrorNoDevice) {
        return mn_fail(MN_ERR_UNSUPPORTED,
                       "no GPU is visible: none is installed, or CUDA_VISIBLE_DEVICES hides it");
    }
    const char *text = cudaGetErrorString(code);
    if (code == cudaErrorMemoryAllocation) {
        return mn_fail(MN_ERR_MEMORY, "%s: the GPU's memory is full (%s)", what, text);
    }
    if (code == cudaErrorNoKernelImageForDevice) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: this build has no kernels for this GPU (%s)", what,
                       text);
    }
    return mn_fail(MN_ERR_INTERNAL, "%s: %s (%s)", what, text, cudaGetErrorName(code));
}

mn_status mn_backend_check(int code, const char *what) {
    return translate((cudaError_t)code, what);
}

mn_status mn_backend_count(int *count) {
    *count = 0;
    const mn_status st = translate(cudaGetDeviceCount(count), "GPUs cannot be counted");
    if (st != MN_OK) *count = 0;
    return st;
}

mn_status mn_backend_describe(mn_device_info *info, int index) {
    struct cudaDeviceProp facts;
    mn_status st = translate(cudaGetDeviceProperties(&facts, index), "GPU properties");
    if (st != MN_OK) return st;
    *info = (mn_device_info){ .index = index,
                              .major = facts.major,
                              .minor = facts.minor,
                              .n_processors = facts.multiProcessorCount,
                              .bytes = facts.totalGlobalMem,
                              .l2_bytes = (size_t)facts.l2CacheSize };
    snprintf(info->name, sizeof info->name, "%s", facts.name);
    memcpy(info->uuid, facts.uuid.bytes, sizeof info->uuid);
    if (facts.major < LEAST_MAJOR) {
        return mn_fail(MN_ERR_UNSUPPORTED,
                       "cuda:%d (%s) has compute capability %d.%d; the kernels need %d.0 or newer",
                       index, info->name, facts.major, facts.minor, LEAST_MAJOR);
    }
    st = mn_backend_use(index);
    size_t all;
    if (st == MN_OK) st = translate(cudaMemGetInfo(&info->free_bytes, &all), "GPU memory");
    return st;
}

mn_status mn_backend_use(int index) {
    return translate(cudaSetDevice(index), "the GPU cannot be used");
}

mn_status mn_backend_stream_create(void **stream) {
    cudaStream_t made = NULL;
    const mn_status st = translate(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking),
                                   "a stream cannot be made");
    *stream = made;
    return st;
}

void mn_backend_stream_destroy(void *stream) {
    if (stream) cudaStreamDestroy(stream);
}

mn_status mn_backend_synchronize(void *stream) {
    return translate(cudaStreamSynchronize(stream), "work on the GPU failed");
}

mn_status mn_backend_done(void *stream, bool *done) {
    const cudaError_t code = cudaStreamQuery((cudaStream_t)stream);
    *done = code == cudaSuccess;
    return code == cudaErrorNotReady ? MN_OK : translate(code, "work on the GPU failed");
}

/* Keeps what was freed in the device's pool, for the next call. */
static bool has_pool(cudaMemPool_t *pool) {
    int device = 0, there = 0;
    const uint64_t all = UINT64_MAX;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&there, cudaDevAttrMemoryPoolsSupported, device) == cudaSuccess &&
           there && cudaDeviceGetDefaultMemPool(pool, device) == cudaSuccess &&
           cudaMemPoolSetAttribute(*pool, cudaMemPoolAttrReleaseThreshold, (void *)&all) ==
               cudaSuccess;
}

mn_status mn_backend_allocate(void **out, size_t bytes) {
    *out = NULL;
    cudaMemPool_t pool;
    cudaError_t code = cudaMalloc(out, bytes);
    if (code == cudaErrorMemoryAllocation) {    // the pool may keep what nobody uses
        cudaGetLastError();
        if (has_pool(&pool) && cudaMemPoolTrimTo(pool, 0) == cudaSuccess) {
            code = cudaMalloc(out, bytes);
        }
    }
    if (code != cudaErrorMemoryAllocation) return translate(code, "GPU memory");
    cudaGetLastError();
    return mn_fail(MN_ERR_MEMORY, "the GPU has no %zu bytes left", bytes);
}

void mn_backend_free(void *data) {
    cudaFree(data);
}

mn_status mn_backend_pool_allocate(void **out, size_t bytes, void *stream) {
    cudaMemPool_t pool;
    *out = NULL;
    if (!has_pool(&pool)) {
        cudaGetLastError();
        return mn_backend_allocate(out, bytes);
    }
    const cudaError_t code = cudaMallocAsync(out, bytes, stream);
    if (code != cudaErrorMemoryAllocation) return translate(code, "GPU memory");
    cudaGetLastError();
    return mn_fail(MN_ERR_MEMORY, "the GPU has no %zu bytes left", bytes);
}

/* Memory of cudaMalloc may be given back this way as well. */
void mn_backend_pool_free(void *data, void *stream) {
    if (cudaFreeAsync(data, stream) == cudaSuccess) return;
    cudaGetLastError();
    cudaFree(data);
}

mn_status mn_backend_host_allocate(void **out, size_t bytes) {
    *out = NULL;
    return translate(cudaHostAlloc(out, bytes, cudaHostAllocMapped), "host memory for copies");
}

void mn_backend_host_free(void *data) {
    cudaFreeHost(data);
}

mn_status mn_backend_copy(void *to, const void *from, size_t bytes, mn_backend_way way,
                          void *stream) {
    static const enum cudaMemcpyKind kinds[] = {
        [MN_TO_DEVICE] = cudaMemcpyHostToDevice,
        [MN_FROM_DEVICE] = cudaMemcpyDeviceToHost,
        [MN_ON_DEVICE] = cudaMemcpyDeviceToDevice,
    };
    return translate(cudaMemcpyAsync(to, from, bytes, kinds[way], stream), "a copy failed");
}

mn_status mn_backend_copy_rows(void *to, size_t to_step, const void *from, size_t from_step,
                               size_t bytes, int64_t rows, void *stream) {
    return translate(cudaMemcpy2DAsync(to, to_step, from, from_step, bytes, (size_t)rows,
                                       cudaMemcpyDeviceToDevice, stream), "a copy failed");
}

mn_status mn_backend_fill(void *to, unsigned char value, size_t bytes, void *stream) {
    return translate(cudaMemsetAsync(to, value, bytes, stream), "filling memory failed");
}

/* ---- pages ----------------------------------------------------------------------------------- */

/* The driver's functions, found through the runtime: a program that serves machines without a GPU
 * cannot link to the driver. */
typedef struct page_calls {
    CUresult (*least)(size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags);
    CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    CUresult (*unreserve)(CUdeviceptr, size_t);
    CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                       unsigned long long);
    CUresult (*release)(CUmemGenericAllocationHandle);
    CUresult (*map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle,
                    unsigned long long);
    CUresult (*unmap)(CUdeviceptr, size_t);
    CUresult (*allow)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
} page_calls;

static bool find_call(const char *name, void *function) {
    enum cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t code = cudaGetDriverEntryPointByVersion(name, function, 12000,
                                                              cudaEnableDefault, &found);
#else
    const cudaError_t code = cudaGetDriverEntryPoint(name, function, cudaEnableDefault, &found);
#endif
    if (code == cudaSuccess && found == cudaDriverEntryPointSuccess) return true;
    cudaGetLastError();
    return false;
}

static mn_status find_calls(const page_calls **out) {
    static page_calls calls;    // `allow` is the last one to be there
    *out = &calls;
    if (calls.allow) return MN_OK;
    if (find_call("cuMemGetAllocationGranularity", &calls.least) &&
        find_call("cuMemAddressReserve", &calls.reserve) &&
        find_call("cuMemAddressFree", &calls.unreserve) &&
        find_call("cuMemCreate", &calls.create) && find_call("cuMemRelease", &calls.release) &&
        find_call("cuMemMap", &calls.map) && find_call("cuMemUnmap", &calls.unmap) &&
        find_call("cuMemSetAccess", &calls.allow)) {
        return MN_OK;
    }
    return mn_fail(MN_ERR_UNSUPPORTED, "the NVIDIA driver has no pages of memory to map "
                   "(train.shard=parameters); take train.shard=gradients");
}

static mn_status page_result(CUresult code, const char *what) {
    if (code == CUDA_SUCCESS) return MN_OK;
    return mn_fail(code == CUDA_ERROR_OUT_OF_MEMORY ? MN_ERR_MEMORY : MN_ERR_INTERNAL,
                   "pages of the GPU's memory: %s failed (%d)", what, (int)code);
}

/* Memory of the current device. */
static mn_status page_kind(CUmemAllocationProp *kind, const page_calls **calls) {
    int device = 0;
    mn_status st = find_calls(calls);
    if (st == MN_OK) st = translate(cudaGetDevice(&device), "the GPU cannot be used");
    memset(kind, 0, sizeof *kind);
    kind->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    kind->location.id = device;
    return st;
}

mn_status mn_backend_page_bytes(size_t *bytes) {
    CUmemAllocationProp kind;
    const page_calls *calls;
    *bytes = 0;
    const mn_status st = page_kind(&kind, &calls);
    if (st != MN_OK) return st;
    return page_result(calls->least(bytes, &kind, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                       "asking for their size");
}

mn_status mn_backend_reserve(void **out, size_t bytes) {
    const page_calls *calls;
    CUdeviceptr at = 0;
    *out = NULL;
    mn_status st = find_calls(&calls);
    if (st == MN_OK) st = page_result(calls->reserve(&at, bytes, 0, 0, 0), "reserving addresses");
    if (st == MN_OK) *out = (void *)(uintptr_t)at;
    return st;
}

void mn_backend_unreserve(void *at, size_t bytes) {
    const page_calls *calls;
    if (find_calls(&calls) == MN_OK) calls->unreserve((CUdeviceptr)(uintptr_t)at, bytes);
}

mn_status mn_backend_page_create(uint64_t *page, size_t bytes) {
    CUmemAllocationProp kind;
    const page_calls *calls;
    CUmemGenericAllocationHandle made = 0;
    mn_status st = page_kind(&kind, &calls);
    if (st == MN_OK) st = page_result(calls->create(&made, bytes, &kind, 0), "taking memory");
    *page = (uint64_t)made;
    return st;
}

void mn_backend_page_destroy(uint64_t page) {
    const page_calls *calls;
    if (find_calls(&calls) == MN_OK) calls->release((CUmemGenericAllocationHandle)page);
}

mn_status mn_backend_page_map(void *at, uint64_t page, size_t bytes) {
    CUmemAllocationProp kind;
    const page_calls *calls;
    const CUdeviceptr to = (CUdeviceptr)(uintptr_t)at;
    mn_status st = page_kind(&kind, &calls);
    if (st == MN_OK) {
        st = page_result(calls->map(to, bytes, 0, (CUmemGenericAllocationHandle)page, 0),
                         "mapping");
    }
    const CUmemAccessDesc access = { kind.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    return st == MN_OK ? page_result(calls->allow(to, bytes, &access, 1), "access") : st;
}

void mn_backend_page_unmap(void *at, size_t bytes) {
    const page_calls *calls;
    if (find_calls(&calls) == MN_OK) calls->unmap((CUdeviceptr)(uintptr_t)at, bytes);
}

/* ---- time and graphs ------------------------------------------------------------------------- */

mn_status mn_backend_event_create(void **event) {
    cudaEvent_t made = NULL;
    const mn_status st = translate(cudaEventCreate(&made), "an event cannot be made");
    *event = made;
    return st;
}

void mn_backend_event_destroy(void *event) {
    if (event) cudaEventDestroy(event);
}

mn_status mn_backend_event_record(void *event, void *stream) {
    return translate(cudaEventRecord(event, stream), "an event cannot be recorded");
}

mn_status mn_backend_event_wait(void *event, void *stream) {
    return translate(cudaStreamWaitEvent(stream, event, 0), "a stream cannot wait");
}

mn_status mn_backend_event_seconds(double *seconds, void *from, void *to) {
    float milliseconds = 0.0f;
    *seconds = 0.0;
    mn_status st = translate(cudaEventSynchronize(to), "work on the GPU failed");
    if (st == MN_OK) st = translate(cudaEventElapsedTime(&milliseconds, from, to), "event times");
    if (st == MN_OK) *seconds = 1e-3 * milliseconds;
    return st;
}

/* Relaxed: a library that sets itself up while work is recorded does no harm. */
mn_status mn_backend_capture_begin(void *stream) {
    return translate(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed),
                     "work cannot be recorded");
}

mn_status mn_backend_capture_end(void **graph, void *stream) {
    cudaGraph_t recorded = NULL;
    cudaGraphExec_t made = NULL;
    *graph = NULL;
    mn_status st = translate(cudaStreamEndCapture(stream, &recorded), "recording work failed");
    if (st == MN_OK) {
        st = translate(cudaGraphInstantiate(&made, recorded, 0), "a graph cannot be made");
    }
    if (recorded) cudaGraphDestroy(recorded);
    *graph = made;
    return st;
}

mn_status mn_backend_graph_launch(void *graph, void *stream) {
    return translate(cudaGraphLaunch(graph, stream), "a graph cannot be launched");
}

void mn_backend_graph_destroy(void *graph) {
    if (graph) cudaGraphExecDestroy(graph);
}
