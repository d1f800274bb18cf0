/* driver.cpp - the driver's functions that programs ask for. */
#include <cstring>

#include "cudart/runtime.h"

namespace cudart {

static const struct {
    const char *name;
    void *function;
} driver_functions[] = {
    { "cuTensorMapEncodeTiled", (void *)encode_tiled },
    { "cuMemGetAllocationGranularity", (void *)page_granularity },
    { "cuMemAddressReserve", (void *)page_reserve },
    { "cuMemAddressFree", (void *)page_unreserve },
    { "cuMemCreate", (void *)page_create },
    { "cuMemRelease", (void *)page_release },
    { "cuMemMap", (void *)page_map },
    { "cuMemUnmap", (void *)page_unmap },
    { "cuMemSetAccess", (void *)page_allow },
};

cudaError_t driver_function(const char *name, void **out, cudaDriverEntryPointQueryResult *found) {
    if (!name || !out) return cudaErrorInvalidValue;
    *out = nullptr;
    for (const auto &known : driver_functions) {
        if (strcmp(known.name, name) == 0) *out = known.function;
    }
    if (found) *found = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *out || found ? cudaSuccess : cudaErrorSymbolNotFound;
}

}    // namespace cudart
