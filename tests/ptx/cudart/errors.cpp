/* errors.cpp - errors: the last one, and all in words. */
#include <time.h>

#include <cstdlib>
#include <cstring>

#include "cudart/runtime.h"

namespace cudart {

thread_local cudaError_t last_error = cudaSuccess;

/* Constructors of other files register kernels before this file's would have run, and
 * destructors unregister them after: so made at first use, and never destroyed. */
State &state() {
    static State *const all = new State;
    return *all;
}

cudaError_t done(cudaError_t code) {
    if (code != cudaSuccess && code != cudaErrorNotReady) last_error = code;
    return code;
}

double seconds_now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

bool tracing() {
    static const bool on = [] {
        const char *said = getenv("PTX_TRACE");
        return said && strcmp(said, "1") == 0;
    }();
    return on;
}

struct ErrorText {
    cudaError_t code;
    const char *name, *text;
};

#define ERROR(name, text)                                                                          \
    { name, #name, text }
static const ErrorText error_texts[] = {
    ERROR(cudaSuccess, "no error"),
    ERROR(cudaErrorInvalidValue, "invalid argument"),
    ERROR(cudaErrorMemoryAllocation, "out of memory"),
    ERROR(cudaErrorInitializationError, "initialization error"),
    ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    ERROR(cudaErrorInvalidPitchValue, "invalid pitch argument"),
    ERROR(cudaErrorInvalidSymbol, "invalid device symbol"),
    ERROR(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    ERROR(cudaErrorInsufficientDriver,
          "CUDA driver version is insufficient for CUDA runtime version"),
    ERROR(cudaErrorMissingConfiguration, "__global__ function call is not configured"),
    ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR(cudaErrorInvalidKernelImage, "device kernel image is invalid"),
    ERROR(cudaErrorNoKernelImageForDevice,
          "no kernel image is available for execution on the device"),
    ERROR(cudaErrorInvalidPtx, "a PTX JIT compilation failed"),
    ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    ERROR(cudaErrorSymbolNotFound, "named symbol not found"),
    ERROR(cudaErrorNotReady, "device not ready"),
    ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    ERROR(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    ERROR(cudaErrorLaunchTimeout, "the launch timed out and was terminated"),
    ERROR(cudaErrorMisalignedAddress, "misaligned address"),
    ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    ERROR(cudaErrorCooperativeLaunchTooLarge, "too many blocks in cooperative launch"),
    ERROR(cudaErrorNotPermitted, "operation not permitted"),
    ERROR(cudaErrorNotSupported, "operation not supported"),
    ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    ERROR(cudaErrorStreamCaptureInvalidated,
          "operation failed due to a previous error during capture"),
    ERROR(cudaErrorStreamCaptureMerge,
          "operation would result in a merge of separate capture sequences"),
    ERROR(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    ERROR(cudaErrorStreamCaptureIsolation,
          "dependency created on uncaptured work in another stream"),
    ERROR(cudaErrorStreamCaptureImplicit,
          "operation would make the legacy stream depend on a capturing blocking stream"),
    ERROR(cudaErrorCapturedEvent,
          "operation not permitted on an event last recorded in a capturing stream"),
    ERROR(cudaErrorInvalidClusterSize,
          "cluster target block dimensions are invalid for the launch"),
    ERROR(cudaErrorUnknown, "unknown error"),
};
#undef ERROR

static const ErrorText *error_text(cudaError_t code) {
    for (const ErrorText &row : error_texts) {
        if (row.code == code) return &row;
    }
    return nullptr;
}

}    // namespace cudart

using namespace cudart;

extern "C" {

cudaError_t cudaPeekAtLastError(void) {
    std::lock_guard<std::mutex> hold(state().lock);
    return state().lost != cudaSuccess ? state().lost : last_error;
}

cudaError_t cudaGetLastError(void) {
    const cudaError_t code = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return code;
}

const char *cudaGetErrorName(cudaError_t code) {
    const ErrorText *row = error_text(code);
    return row ? row->name : "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t code) {
    const ErrorText *row = error_text(code);
    return row ? row->text : "unrecognized error code";
}

}    // extern "C"
