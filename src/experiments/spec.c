/* spec.c - JSON objects laid over each other, and ways into them. */
#include <string.h>

#include "base/status.h"
#include "experiments/job_internal.h"

enum { NAME = 128 };

static mn_status no_memory(void) {
    return mn_fail(MN_ERR_MEMORY, "no memory for the description of a job");
}

mn_status mn_spec_set(json_t *root, const char *path, json_t *value) {
    char name[NAME];
    const char *dot;
    json_t *at = root;
    for (; value && (dot = strchr(path, '.')) != NULL; path = dot + 1) {
        const size_t length = (size_t)(dot - path);
        if (length == 0 || length >= NAME) break;
        memcpy(name, path, length);
        name[length] = '\0';
        json_t *next = json_object_get(at, name);
        if (!json_is_object(next)) {
            next = json_object();
            if (json_object_set_new(at, name, next) != 0) break;
        }
        at = next;
    }
    if (!value) return no_memory();
    if (strchr(path, '.')) {
        json_decref(value);
        return mn_fail(MN_ERR_ARGUMENT, "\"%s\" is no way into a job", path);
    }
    return json_object_set_new(at, path, value) == 0 ? MN_OK : no_memory();
}

json_t *mn_spec_get(const json_t *root, const char *path) {
    char name[NAME];
    json_t *whole = json_object_get(root, path);
    const char *dot = strchr(path, '.');
    if (whole || !dot || (size_t)(dot - path) >= NAME) return whole;
    memcpy(name, path, (size_t)(dot - path));
    name[dot - path] = '\0';
    return mn_spec_get(json_object_get(root, name), dot + 1);
}

mn_status mn_spec_merge(json_t *base, const json_t *over) {
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)over, key, value) {
        json_t *there = json_object_get(base, key);
        if (json_is_object(there) && json_is_object(value)) {
            const mn_status st = mn_spec_merge(there, value);
            if (st != MN_OK) return st;
        } else if (json_object_set_new(base, key, json_deep_copy(value)) != 0) {
            return no_memory();
        }
    }
    return MN_OK;
}
