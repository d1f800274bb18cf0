/* address_keep.c - one safetensors file: value, first and second of each parameter, and the step
 * and loss as two numbers. */
#include "experiments/collision/address_keep.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/status.h"
#include "experiments/job_keep.h"
#include "io/safetensors.h"

enum { PATH = 4096, NAME = 32, PARTS = 3 };

static const char *const part_names[PARTS] = { "value", "first", "second" };

static float *part_of(const mn_address_model *model, mn_optimizer *optimizer, int64_t i, int part) {
    if (part == 0) return model->params[i].value;
    return part == 1 ? mn_optimizer_first(optimizer, i) : mn_optimizer_second(optimizer, i);
}

static bool state_path(char path[PATH], const char *folder) {
    return snprintf(path, PATH, "%s/state.safetensors", folder) < PATH;
}

mn_status mn_address_save(const char *folder, const mn_address_model *model,
                          mn_optimizer *optimizer, const mn_address_progress *now) {
    enum { MOST = PARTS * MN_ADDRESS_PARAMS + 1 };
    char path[PATH], names[MOST][NAME];
    mn_stored_tensor tensors[MOST];
    const double numbers[2] = { (double)now->step, now->loss };
    int64_t n = 0;
    if (!state_path(path, folder)) return mn_fail(MN_ERR_ARGUMENT, "%s: too long a path", folder);
    for (int64_t i = 0; i < model->n_params; i++) {
        for (int part = 0; part < PARTS; part++, n++) {
            const int64_t count = model->params[i].count;
            snprintf(names[n], NAME, "%s.%d", part_names[part], (int)i);
            tensors[n] = (mn_stored_tensor){ .name = names[n], .dtype = MN_STORED_F32, .rank = 1,
                                             .shape = { count },
                                             .data = part_of(model, optimizer, i, part),
                                             .bytes = (size_t)count * sizeof(float) };
        }
    }
    tensors[n++] = (mn_stored_tensor){ .name = "progress", .dtype = MN_STORED_F64, .rank = 1,
                                       .shape = { 2 }, .data = numbers, .bytes = sizeof numbers };
    const mn_status st = mn_keep_make(folder);
    return st == MN_OK ? mn_safetensors_write(path, tensors, n, NULL, 0) : st;
}

/* Every part of every parameter; with `apply` they are copied, without it only looked for. */
static bool take_parts(const mn_safetensors *file, mn_address_model *model,
                       mn_optimizer *optimizer, bool apply) {
    for (int64_t i = 0; i < model->n_params; i++) {
        for (int part = 0; part < PARTS; part++) {
            char name[NAME];
            snprintf(name, sizeof name, "%s.%d", part_names[part], (int)i);
            const mn_stored_tensor *found = mn_safetensors_find(file, name);
            if (!found || mn_stored_elements(found) != model->params[i].count) return false;
            float *to = part_of(model, optimizer, i, part);
            if (apply && mn_safetensors_read_f32(to, found) != MN_OK) return false;
        }
    }
    return true;
}

bool mn_address_take(const char *folder, mn_address_model *model, mn_optimizer *optimizer,
                     mn_address_progress *now) {
    char path[PATH];
    mn_safetensors *file = NULL;
    double numbers[2];
    if (!state_path(path, folder) || mn_safetensors_open(&file, path) != MN_OK) return false;
    const mn_stored_tensor *progress = mn_safetensors_find(file, "progress");
    const bool fits = progress && mn_stored_elements(progress) == 2 &&
                      mn_safetensors_read_f64(numbers, progress) == MN_OK &&
                      take_parts(file, model, optimizer, false) &&
                      take_parts(file, model, optimizer, true);
    if (fits) *now = (mn_address_progress){ (int64_t)numbers[0], numbers[1] };
    mn_safetensors_close(file);
    return fits;
}
