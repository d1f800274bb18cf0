/* copy.cpp - copies, fills and variables. */
#include <cstring>

#include "cudart/runtime.h"

namespace cudart {

struct Copy {
    void *to;
    const void *from;
    size_t to_step, from_step, bytes, rows;
    cudaMemcpyKind kind;
};

static size_t extent(size_t step, size_t bytes, size_t rows) {
    return rows == 0 || bytes == 0 ? 0 : (rows - 1) * step + bytes;
}

static cudaError_t check_copy(const Copy &c) {
    if (c.kind < cudaMemcpyHostToHost || c.kind > cudaMemcpyDefault)
        return cudaErrorInvalidMemcpyDirection;
    if (c.rows > 1 && (c.bytes > c.to_step || c.bytes > c.from_step))
        return cudaErrorInvalidPitchValue;
    const size_t written = extent(c.to_step, c.bytes, c.rows),
                 read = extent(c.from_step, c.bytes, c.rows);
    if (written == 0) return cudaSuccess;
    if (!c.to || !c.from) return cudaErrorInvalidValue;
    const bool to_device = c.kind == cudaMemcpyHostToDevice || c.kind == cudaMemcpyDeviceToDevice;
    const bool from_device = c.kind == cudaMemcpyDeviceToHost || c.kind == cudaMemcpyDeviceToDevice;
    const bool known = (!to_device || is_known(c.to, written)) &&
                       (!from_device || is_known(c.from, read));
    return known ? cudaSuccess : cudaErrorInvalidValue;
}

/* Checked again when it runs: a graph may outlive the memory. */
static cudaError_t run_copy(const Copy &c) {
    const cudaError_t code = check_copy(c);
    if (code != cudaSuccess) return code;
    for (size_t i = 0; i < c.rows && c.bytes > 0; i++) {
        memmove((char *)c.to + i * c.to_step, (const char *)c.from + i * c.from_step, c.bytes);
    }
    return cudaSuccess;
}

static cudaError_t copy(const Copy &c, cudaStream_t stream) {
    const cudaError_t code = check_copy(c);
    return code != cudaSuccess ? code : submit(stream, [c] { return run_copy(c); });
}

cudaError_t copy_flat(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                      cudaStream_t stream) {
    return copy({ to, from, bytes, bytes, bytes, 1, kind }, stream);
}

static cudaError_t run_fill(void *to, size_t step, int value, size_t bytes, size_t rows) {
    const size_t written = extent(step, bytes, rows);
    if (!is_known(to, written)) return cudaErrorInvalidValue;
    for (size_t i = 0; i < rows && written > 0; i++) memset((char *)to + i * step, value, bytes);
    return cudaSuccess;
}

static cudaError_t fill(void *to, size_t step, int value, size_t bytes, size_t rows,
                        cudaStream_t stream) {
    if (rows > 1 && bytes > step) return cudaErrorInvalidPitchValue;
    if (!is_known(to, extent(step, bytes, rows))) return cudaErrorInvalidValue;
    return submit(stream, [=] { return run_fill(to, step, value, bytes, rows); });
}

/* The place of `bytes` from `offset` on in a variable. */
static cudaError_t inside_variable(char **at, const void *symbol, size_t bytes, size_t offset) {
    void *start = nullptr;
    size_t whole = 0;
    const cudaError_t code = find_variable(&start, &whole, symbol);
    if (code != cudaSuccess) return code;
    if (offset > whole || bytes > whole - offset) return cudaErrorInvalidValue;
    *at = (char *)start + offset;
    return cudaSuccess;
}

}    // namespace cudart

using namespace cudart;

extern "C" {

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return on_device([&] { return copy_flat(to, from, bytes, kind, stream); });
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_step, const void *from, size_t from_step,
                              size_t bytes, size_t rows, cudaMemcpyKind kind, cudaStream_t stream) {
    return on_device([&] {
        return copy({ to, from, to_step, from_step, bytes, rows, kind }, stream);
    });
}

cudaError_t cudaMemcpy2D(void *to, size_t to_step, const void *from, size_t from_step, size_t bytes,
                         size_t rows, cudaMemcpyKind kind) {
    return cudaMemcpy2DAsync(to, to_step, from, from_step, bytes, rows, kind, nullptr);
}

cudaError_t cudaMemset2DAsync(void *to, size_t step, int value, size_t bytes, size_t rows,
                              cudaStream_t stream) {
    return on_device([&] { return fill(to, step, value, bytes, rows, stream); });
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    return cudaMemset2DAsync(to, bytes, value, bytes, 1, stream);
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    return cudaMemsetAsync(to, value, bytes, nullptr);
}

cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
    size_t bytes;
    return on_device([&] { return find_variable(out, &bytes, symbol); });
}

cudaError_t cudaGetSymbolSize(size_t *bytes, const void *symbol) {
    void *at;
    return on_device([&] { return find_variable(&at, bytes, symbol); });
}

cudaError_t cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t bytes,
                                    size_t offset, cudaMemcpyKind kind, cudaStream_t stream) {
    return on_device([&] {
        char *at = nullptr;
        const cudaError_t code = inside_variable(&at, symbol, bytes, offset);
        return code == cudaSuccess ? copy_flat(at, from, bytes, kind, stream) : code;
    });
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset,
                               cudaMemcpyKind kind) {
    return cudaMemcpyToSymbolAsync(symbol, from, bytes, offset, kind, nullptr);
}

cudaError_t cudaMemcpyFromSymbolAsync(void *to, const void *symbol, size_t bytes, size_t offset,
                                      cudaMemcpyKind kind, cudaStream_t stream) {
    return on_device([&] {
        char *at = nullptr;
        const cudaError_t code = inside_variable(&at, symbol, bytes, offset);
        return code == cudaSuccess ? copy_flat(to, at, bytes, kind, stream) : code;
    });
}

cudaError_t cudaMemcpyFromSymbol(void *to, const void *symbol, size_t bytes, size_t offset,
                                 cudaMemcpyKind kind) {
    return cudaMemcpyFromSymbolAsync(to, symbol, bytes, offset, kind, nullptr);
}

}    // extern "C"
