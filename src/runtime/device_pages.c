/* device_pages.c - pages of a GPU's memory, mapped one by one. */
#include "runtime/device_pages.h"

#include <stdlib.h>

#include "base/status.h"
#include "runtime/device_backend.h"

struct mn_device_pages {
    mn_device *device;
    size_t page;               // bytes
    void *at;
    int64_t n, n_window;
    uint64_t *own, *window;    // (n): memory of pages and of the window, by the backend's names
    bool *has, *mapped;        // (n): own[i] is there; something is behind address i
};

void *mn_device_pages_at(const mn_device_pages *p) {
    return p->at;
}

int64_t mn_device_pages_count(const mn_device_pages *p) {
    return p->n;
}

size_t mn_device_page_bytes(const mn_device_pages *p) {
    return p->page;
}

size_t mn_device_pages_held(const mn_device_pages *p) {
    int64_t n = p->n_window;
    for (int64_t i = 0; i < p->n; i++) n += p->has[i];
    return (size_t)n * p->page;
}

static void *address(const mn_device_pages *p, int64_t i) {
    return (char *)p->at + (size_t)i * p->page;
}

static mn_status give_own(mn_device_pages *p, int64_t i) {
    if (p->has[i]) return MN_OK;
    const mn_status st = mn_backend_page_create(&p->own[i], p->page);
    p->has[i] = st == MN_OK;
    return st;
}

static mn_status map_page(mn_device_pages *p, int64_t i, uint64_t memory) {
    const mn_status st = mn_backend_page_map(address(p, i), memory, p->page);
    p->mapped[i] = st == MN_OK;
    return st;
}

/* Nothing is behind the addresses of pages that change, and what only they needed is given back. */
static void unmap(mn_device_pages *p, const int32_t *window) {
    for (int64_t i = 0; i < p->n; i++) {
        const bool own = !window || window[i] < 0;
        if (p->mapped[i] && !(own && p->has[i])) {
            mn_backend_page_unmap(address(p, i), p->page);
            p->mapped[i] = false;
        }
        if (!own && p->has[i]) {
            mn_backend_page_destroy(p->own[i]);
            p->has[i] = false;
        }
    }
    while (p->n_window > 0) mn_backend_page_destroy(p->window[--p->n_window]);
}

mn_status mn_device_pages_map(mn_device_pages *p, const int32_t *window) {
    int64_t widest = 0;
    mn_status st = mn_device_synchronize(p->device);
    if (st != MN_OK) return st;
    unmap(p, window);
    for (int64_t i = 0; window && i < p->n; i++) {
        if (window[i] >= widest) widest = window[i] + INT64_C(1);
    }
    while (st == MN_OK && p->n_window < widest) {
        st = mn_backend_page_create(&p->window[p->n_window], p->page);
        if (st == MN_OK) p->n_window++;
    }
    for (int64_t i = 0; st == MN_OK && i < p->n; i++) {
        const bool own = !window || window[i] < 0;
        if (own) st = give_own(p, i);
        if (st == MN_OK && !p->mapped[i]) {
            st = map_page(p, i, own ? p->own[i] : p->window[window[i]]);
        }
    }
    if (st != MN_ERR_MEMORY) return st;
    return mn_fail(st, "the GPU has no memory for %.0f MiB of pages",
                   (double)((size_t)p->n * p->page) / 1048576.0);
}

mn_status mn_device_pages_create(mn_device_pages **out, mn_device *device, size_t bytes) {
    *out = NULL;
    mn_device_pages *p = calloc(1, sizeof *p);
    if (!p) return mn_fail(MN_ERR_MEMORY, "no memory for a table of pages");
    p->device = device;
    mn_status st = mn_device_use(device);
    if (st == MN_OK) st = mn_backend_page_bytes(&p->page);
    if (st == MN_OK) {
        p->n = (int64_t)((bytes + p->page - 1) / p->page);
        p->own = calloc((size_t)p->n + 1, sizeof *p->own);
        p->window = calloc((size_t)p->n + 1, sizeof *p->window);
        p->has = calloc((size_t)p->n + 1, sizeof *p->has);
        p->mapped = calloc((size_t)p->n + 1, sizeof *p->mapped);
        if (!p->own || !p->window || !p->has || !p->mapped) {
            st = mn_fail(MN_ERR_MEMORY, "no memory for a table of pages");
        }
    }
    if (st == MN_OK) st = mn_backend_reserve(&p->at, (size_t)p->n * p->page);
    if (st == MN_OK) st = mn_device_pages_map(p, NULL);
    if (st != MN_OK) {
        mn_device_pages_destroy(p);
        return st;
    }
    *out = p;
    return MN_OK;
}

void mn_device_pages_destroy(mn_device_pages *p) {
    if (!p) return;
    if (p->at && mn_device_synchronize(p->device) == MN_OK) {
        for (int64_t i = 0; i < p->n; i++) {
            if (p->mapped[i]) mn_backend_page_unmap(address(p, i), p->page);
            if (p->has[i]) mn_backend_page_destroy(p->own[i]);
        }
        while (p->n_window > 0) mn_backend_page_destroy(p->window[--p->n_window]);
        mn_backend_unreserve(p->at, (size_t)p->n * p->page);
    }
    free(p->own);
    free(p->window);
    free(p->has);
    free(p->mapped);
    free(p);
}
