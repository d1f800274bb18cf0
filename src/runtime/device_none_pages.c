/* device_none_pages.c - pages of the backend of a build without CUDA, apart from the rest of it for
 * tests that bring a backend without pages. */
#include "base/status.h"
#include "runtime/device_backend.h"

static mn_status refuse(void) {
    return mn_fail(MN_ERR_UNSUPPORTED, MN_BACKEND_MISSING);
}

mn_status mn_backend_page_bytes(size_t *bytes) {
    *bytes = 0;
    return refuse();
}

mn_status mn_backend_reserve(void **out, size_t bytes) {
    (void)bytes;
    *out = NULL;
    return refuse();
}

void mn_backend_unreserve(void *at, size_t bytes) {
    (void)at, (void)bytes;
}

mn_status mn_backend_page_create(uint64_t *page, size_t bytes) {
    (void)bytes;
    *page = 0;
    return refuse();
}

void mn_backend_page_destroy(uint64_t page) {
    (void)page;
}

mn_status mn_backend_page_map(void *at, uint64_t page, size_t bytes) {
    (void)at, (void)page, (void)bytes;
    return refuse();
}

void mn_backend_page_unmap(void *at, size_t bytes) {
    (void)at, (void)bytes;
}
