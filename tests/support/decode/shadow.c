/* shadow.c - tags of a device's memory. */
#define _GNU_SOURCE
#include "support/decode/shadow.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { INITIAL = 11, UNIT = 2, PAGE = 4096 };    // UNIT: bytes of the smallest element
static const size_t region_bytes = (size_t)1 << 30;

static unsigned char *region;
static size_t used;
static uint64_t *tags[SHADOW_SETS];
static unsigned char *dirty;    // of each page of tags, whether one of them was set
static shadow_set at_work;
static const shadow_watch *watching;
static int failures;

void *shadow_reserve(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED) return memory;
    fprintf(stderr, "no memory for a device\n");
    abort();
}

void shadow_clear(void) {
    const size_t bytes = region_bytes / UNIT * sizeof **tags;
    if (region) {
        munmap(region, region_bytes);
        for (int i = 0; i < SHADOW_SETS; i++) munmap(tags[i], bytes);
        free(dirty);
    }
    dirty = calloc(region_bytes / UNIT / PAGE + 1, 1);
    if (!dirty) abort();
    region = shadow_reserve(region_bytes);
    for (int i = 0; i < SHADOW_SETS; i++) tags[i] = shadow_reserve(bytes);
    used = 256;
    failures = 0;
    watching = NULL;
}

void *shadow_allocate(size_t bytes) {
    void *memory = region + used;
    if (used + bytes > region_bytes) return NULL;
    used += (bytes + 255) / 256 * 256;
    return memory;
}

uint64_t shadow_mix(uint64_t tag, uint64_t more) {
    uint64_t x = (tag ^ (more + UINT64_C(0x9e3779b97f4a7c15))) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 29) * UINT64_C(0x94d049bb133111eb) + more;
    return x ^ x >> 32 ? x ^ x >> 32 : 1;
}

size_t shadow_slot(const void *at) {
    const uintptr_t offset = (uintptr_t)at - (uintptr_t)region;
    if (offset < region_bytes) return offset / UNIT;
    shadow_fail("%p is no address of the device", at);
    return 0;
}

size_t shadow_slots(void) {
    return region_bytes / UNIT;
}

uint64_t shadow_at(shadow_set set, size_t slot) {
    return tags[set][slot] ? tags[set][slot] : shadow_mix(INITIAL, slot);
}

void shadow_set_at(shadow_set set, size_t slot, uint64_t tag) {
    tags[set][slot] = tag;
    dirty[slot / PAGE] = 1;
}

void shadow_use(shadow_set set) {
    at_work = set;
}

void shadow_watch_by(const shadow_watch *watch) {
    watching = watch;
}

uint64_t shadow_get(const void *at) {
    const size_t slot = shadow_slot(at);
    uint64_t tag;
    if (watching && watching->kept(slot, &tag)) return tag;
    if (watching) watching->reads(slot);
    return shadow_at(at_work, slot);
}

void shadow_put(void *at, uint64_t tag) {
    const size_t slot = shadow_slot(at);
    if (!watching || !watching->writes(slot, tag)) shadow_set_at(at_work, slot, tag);
}

void shadow_copied(void *to, const void *from, size_t bytes) {
    for (int set = 0; set < SHADOW_SETS; set++) {
        for (size_t i = 0; i < bytes / UNIT; i++) {
            const uint64_t tag = shadow_at((shadow_set)set, shadow_slot(from) + i);
            shadow_set_at((shadow_set)set, shadow_slot(to) + i, tag);
        }
    }
}

void shadow_forget(void *at, size_t bytes) {
    for (size_t i = 0; i < bytes / UNIT; i++) {
        const size_t slot = shadow_slot(at) + i;
        if (!dirty[slot / PAGE]) continue;
        for (int set = 0; set < SHADOW_SETS; set++) tags[set][slot] = 0;
    }
}

static bool page_agrees(size_t page) {
    for (size_t i = page * PAGE; i < (page + 1) * PAGE; i++) {
        if (tags[SHADOW_ASKED][i] == tags[SHADOW_DONE][i]) continue;
        shadow_fail("element at %zu: %s", i * UNIT, !tags[SHADOW_DONE][i] ? "it was not written"
                    : !tags[SHADOW_ASKED][i] ? "nobody asked for it" : "it is something else");
        return false;
    }
    return true;
}

bool shadow_agrees(void) {
    for (size_t page = 0; page * PAGE * UNIT < used; page++) {
        if (dirty[page] && !page_agrees(page)) return false;
    }
    return true;
}

void shadow_fail(const char *format, ...) {
    va_list args;
    if (++failures > 10) return;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
}

int shadow_failures(void) {
    return failures;
}
