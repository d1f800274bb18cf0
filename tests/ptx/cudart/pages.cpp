/* pages.cpp - the driver's memory of which a program chooses the addresses. A page is a file
 * without a name, and its handle the file's number + 1, since 0 is none. */
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "cudart/runtime.h"

namespace cudart {

CUresult page_granularity(size_t *bytes, const CUmemAllocationProp *,
                          CUmemAllocationGranularity_flags) {
    *bytes = PAGE_BYTES;
    return CUDA_SUCCESS;
}

static bool whole_pages(size_t bytes) {
    return bytes > 0 && bytes % PAGE_BYTES == 0;
}

/* mmap knows nothing of PAGE_BYTES: more is taken, and what is over at both ends given back. */
CUresult page_reserve(CUdeviceptr *at, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    if (!whole_pages(bytes)) return CUDA_ERROR_INVALID_VALUE;
    void *taken = mmap(nullptr, bytes + PAGE_BYTES, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (taken == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    const uintptr_t start = (uintptr_t)taken,
                    used = (start + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    if (used > start) munmap(taken, used - start);
    munmap((void *)(used + bytes), start + PAGE_BYTES - used);
    *at = (CUdeviceptr)used;
    return CUDA_SUCCESS;
}

CUresult page_unreserve(CUdeviceptr at, size_t bytes) {
    return munmap((void *)at, bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The same bytes as fresh memory of cudaMalloc. */
static bool fill_page(int file, size_t bytes) {
    if (ftruncate(file, (off_t)bytes) != 0) return false;
    void *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) return false;
    memset(at, 0xff, bytes);
    munmap(at, bytes);
    return true;
}

CUresult page_create(CUmemGenericAllocationHandle *page, size_t bytes, const CUmemAllocationProp *,
                     unsigned long long) {
    std::lock_guard<std::mutex> hold(state().lock);
    if (!whole_pages(bytes)) return CUDA_ERROR_INVALID_VALUE;
    if (bytes > global_bytes() - state().used) return CUDA_ERROR_OUT_OF_MEMORY;
    const int file = memfd_create("ptx_page", 0);
    if (file < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    if (!fill_page(file, bytes)) {
        close(file);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    state().used += bytes;
    *page = (CUmemGenericAllocationHandle)file + 1;
    return CUDA_SUCCESS;
}

CUresult page_release(CUmemGenericAllocationHandle page) {
    std::lock_guard<std::mutex> hold(state().lock);
    const off_t bytes = page > 0 ? lseek((int)page - 1, 0, SEEK_END) : -1;
    if (bytes < 0) return CUDA_ERROR_INVALID_VALUE;
    state().used -= (size_t)bytes;
    close((int)page - 1);    // what is mapped stays until it is unmapped
    return CUDA_SUCCESS;
}

CUresult page_map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle page,
                  unsigned long long) {
    if (page == 0 || !whole_pages(bytes) || at % PAGE_BYTES != 0) return CUDA_ERROR_INVALID_VALUE;
    void *mapped = mmap((void *)at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)page - 1,
                        (off_t)offset);
    return mapped == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult page_allow(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    std::lock_guard<std::mutex> hold(state().lock);
    if (count != 1 || access->location.id != 0) return CUDA_ERROR_INVALID_VALUE;
    if (access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return CUDA_ERROR_NOT_SUPPORTED;
    if (mprotect((void *)at, bytes, PROT_READ | PROT_WRITE) != 0) return CUDA_ERROR_INVALID_VALUE;
    remember((void *)at, bytes, Origin::PAGES);
    return CUDA_SUCCESS;
}

/* The range may hold several pieces that were allowed one by one; the addresses stay reserved. */
CUresult page_unmap(CUdeviceptr at, size_t bytes) {
    std::lock_guard<std::mutex> hold(state().lock);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap((void *)at, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED)
        return CUDA_ERROR_INVALID_VALUE;
    auto &regions = state().regions;
    for (auto it = regions.lower_bound(at); it != regions.end() && it->first < at + bytes;) {
        const uintptr_t start = (it++)->first;
        forget((void *)start);
    }
    return CUDA_SUCCESS;
}

}    // namespace cudart
