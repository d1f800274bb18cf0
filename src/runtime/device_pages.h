/* device_pages.h - memory of a GPU whose addresses stay while what is behind them comes and goes.
 *
 *   addresses   | page 0 | page 1 | page 2 | page 3 | page 4 |
 *   window map      -1       0        1        0        1
 *   memory        own     window 0 window 1 window 0 window 1
 *
 * A page has memory of its own, or shares a page of the window with others: what is stored through
 * one of their addresses is what all of them hold afterwards. Whoever uses such pages one after the
 * other, in the order of a stream, needs memory for the widest of them only. */
#ifndef MN_RUNTIME_DEVICE_PAGES_H
#define MN_RUNTIME_DEVICE_PAGES_H

#include "runtime/device.h"

typedef struct mn_device_pages mn_device_pages;

/* Room for `bytes`, all of it with memory of its own, uninitialised. */
mn_status mn_device_pages_create(mn_device_pages **out, mn_device *device, size_t bytes);
void mn_device_pages_destroy(mn_device_pages *pages);    // waits for the device; NULL accepted

void *mn_device_pages_at(const mn_device_pages *pages);
int64_t mn_device_pages_count(const mn_device_pages *pages);
size_t mn_device_page_bytes(const mn_device_pages *pages);

/* window[i]: which page of the window is behind page i, -1: it has memory of its own. NULL: all
 * have. Waits for the device. Pages that have memory of their own before and after hold what they
 * held. On failure nothing may be read or written any more. */
mn_status mn_device_pages_map(mn_device_pages *pages, const int32_t *window);

/* Bytes of the GPU's memory behind them. */
size_t mn_device_pages_held(const mn_device_pages *pages);

#endif
