/* reserve.c - reserved addresses by mmap, available memory by /proc and the control group. */
#include "runtime/reserve.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/status.h"

void *mn_reserve_take(size_t bytes) {
    void *address = mmap(NULL, bytes ? bytes : 1, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return address == MAP_FAILED ? NULL : address;
}

void mn_reserve_give(void *address, size_t bytes) {
    if (address) munmap(address, bytes ? bytes : 1);
}

/* The first number of a file, such as "max" is not; false: there is none. */
static bool number_in(unsigned long long *out, const char *path) {
    FILE *file = fopen(path, "r");
    const bool read = file && fscanf(file, "%llu", out) == 1;
    if (file) fclose(file);
    return read;
}

static bool available_of_system(unsigned long long *out) {
    FILE *file = fopen("/proc/meminfo", "r");
    char line[128];
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file)) {
        found = sscanf(line, "MemAvailable: %llu kB", out) == 1;
    }
    if (file) fclose(file);
    *out *= 1024;
    return found;
}

/* What pages of files take counts as used there and can be dropped. */
static bool left_of_group(unsigned long long *out) {
    unsigned long long most, used, files = 0;
    if (!number_in(&most, "/sys/fs/cgroup/memory.max") ||
        !number_in(&used, "/sys/fs/cgroup/memory.current")) {
        return false;
    }
    FILE *file = fopen("/sys/fs/cgroup/memory.stat", "r");
    char line[128];
    while (file && fgets(line, sizeof line, file) && sscanf(line, "file %llu", &files) != 1) {}
    if (file) fclose(file);
    used -= files < used ? files : used;
    *out = most > used ? most - used : 0;
    return true;
}

mn_status mn_memory_available(size_t *bytes) {
    unsigned long long system = 0, group = 0;
    const bool one = available_of_system(&system), other = left_of_group(&group);
    if (!one && !other) {
        return mn_fail(MN_ERR_UNSUPPORTED, "this system does not say how much memory is available");
    }
    *bytes = (size_t)(one && (!other || system < group) ? system : group);
    return MN_OK;
}

mn_status mn_memory_check(size_t need, const char *what) {
    const char *any = getenv("MN_MEMORY");
    size_t room;
    if ((any && strcmp(any, "any") == 0) || mn_memory_available(&room) != MN_OK) return MN_OK;
    if (need <= room) return MN_OK;
    return mn_fail(MN_ERR_MEMORY, "%s takes %.1f GB of memory and %.1f GB are available; free "
                   "some, or set MN_MEMORY=any to try all the same", what, (double)need / 1e9,
                   (double)room / 1e9);
}
