/* trainer_moments.c - the optimiser's moments in a checkpoint.
 *
 * One rank writes optimizer.safetensors: first.NAME and second.NAME of every parameter. Of N ranks
 * each writes what it owns to optimizer-RRRRR-of-NNNNN.safetensors, where first.NAME@BEGIN has
 * numbers from BEGIN on. Any number of ranks reads either. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "io/safetensors.h"
#include "train/run/run_folder.h"
#include "train/trainer_internal.h"

enum { PATH = MN_RUN_PATH, NAME = MN_PARAM_NAME + 32 };

/* ---- names ----------------------------------------------------------------------------------- */

static mn_status path_of(char path[PATH], const char *folder, int rank, int world) {
    char name[64] = "optimizer.safetensors";
    if (world > 1) snprintf(name, sizeof name, "optimizer-%05d-of-%05d.safetensors", rank, world);
    return mn_run_join(path, folder, name);
}

static void name_of(char name[NAME], const mn_model_param *p, bool second, int64_t begin,
                    int world) {
    const char *which = second ? "second" : "first";
    if (world == 1) snprintf(name, NAME, "%s.%s", which, p->name);
    else snprintf(name, NAME, "%s.%s@%" PRId64, which, p->name, begin);
}

/* ---- writing --------------------------------------------------------------------------------- */

/* Moments that are on a GPU, copied to memory of the host, (2 n_params) pieces of those that this
 * rank owns; to be freed. */
static mn_status fetch_moments(float **copies, mn_trainer *t) {
    mn_status st = MN_OK;
    for (int i = 0; st == MN_OK && i < 2 * mn_model_params(t->model); i++) {
        const mn_model_param *p = mn_model_param_at(t->model, i / 2);
        int64_t begin, count;
        mn_trainer_owned(t, i / 2, &begin, &count);
        copies[i] = malloc((size_t)count * sizeof **copies + 1);
        st = copies[i] ? mn_trainer_fetch_moment(copies[i], t, i / 2, i % 2)
                       : mn_fail(MN_ERR_MEMORY, "no memory to save the moments of %s", p->name);
    }
    return st;
}

static mn_status write_moments(mn_trainer *t, const char *path, mn_stored_tensor *tensors,
                               char (*names)[NAME], float *const *copies) {
    const int world = mn_comm_world(t->comm);
    int n = 0;
    for (int i = 0; i < 2 * mn_model_params(t->model); i++) {
        const mn_model_param *p = mn_model_param_at(t->model, i / 2);
        int64_t begin, count;
        const float *moment = copies[i];
        mn_trainer_owned(t, i / 2, &begin, &count);
        if (!moment) {
            moment = i % 2 ? mn_optimizer_second(t->optimizer, i / 2)
                           : mn_optimizer_first(t->optimizer, i / 2);
        }
        if (count == 0 && world > 1) continue;
        name_of(names[n], p, i % 2, begin, world);
        tensors[n] = (mn_stored_tensor){ .name = names[n], .dtype = MN_STORED_F32, .rank = 1,
                                         .shape = { count }, .data = moment,
                                         .bytes = (size_t)count * sizeof(float) };
        n++;
    }
    return mn_safetensors_write(path, tensors, n, NULL, 0);
}

mn_status mn_trainer_save_moments(mn_trainer *t, const char *folder) {
    char path[PATH];
    const mn_status named = path_of(path, folder, mn_comm_rank(t->comm), mn_comm_world(t->comm));
    if (named != MN_OK) return named;
    const size_t n = 2 * (size_t)mn_model_params(t->model);
    mn_stored_tensor *tensors = calloc(n, sizeof *tensors);
    char(*names)[NAME] = calloc(n, sizeof *names);
    float **copies = calloc(n, sizeof *copies);
    mn_status st = tensors && names && copies ? MN_OK
                                              : mn_fail(MN_ERR_MEMORY, "no memory to write %s",
                                                        path);
    if (st == MN_OK && t->there) st = fetch_moments(copies, t);
    if (st == MN_OK) st = write_moments(t, path, tensors, names, copies);
    for (size_t i = 0; copies && i < n; i++) free(copies[i]);
    free(copies);
    free(tensors);
    free(names);
    return st;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* Numbers [begin, begin + its elements) of a moment, of which this rank takes what it owns. */
static mn_status take(mn_trainer *t, int i, bool second, const mn_stored_tensor *from,
                      int64_t begin) {
    const int64_t n = mn_stored_elements(from);
    int64_t own, count;
    mn_trainer_owned(t, i, &own, &count);
    const int64_t low = mn_max(own, begin), high = mn_min(own + count, begin + n);
    if (low >= high) return MN_OK;
    float *numbers = malloc((size_t)n * sizeof *numbers);
    mn_status st = numbers ? mn_safetensors_read_f32(numbers, from)
                           : mn_fail(MN_ERR_MEMORY, "no memory to read %s", from->name);
    if (st == MN_OK && t->there) {
        st = mn_trainer_send_moment(t, i, second, numbers + (low - begin), low, high - low);
    }
    if (st == MN_OK && !t->there) {
        float *to = second ? mn_optimizer_second(t->optimizer, i)
                           : mn_optimizer_first(t->optimizer, i);
        memcpy(to + (low - own), numbers + (low - begin), (size_t)(high - low) * sizeof *to);
    }
    free(numbers);
    return st;
}

/* Who owned what when `world` ranks wrote: (world + 1) numbers. */
static mn_status shares_of(int64_t **elements, mn_trainer *t, int world) {
    const int n = mn_model_params(t->model);
    mn_optim_param *params = calloc((size_t)n, sizeof *params);
    *elements = calloc(2 * ((size_t)world + 1), sizeof **elements);
    if (params && *elements) {
        for (int i = 0; i < n; i++) params[i].count = mn_model_param_at(t->model, i)->info.count;
        mn_optim_shares(params, n, world, *elements, *elements + world + 1);
    }
    const bool fits = params && *elements;
    free(params);
    return fits ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for the shares of %d ranks", world);
}

/* With `apply` takes the moments, without it only checks that all are there and fit. */
static mn_status read_file(mn_trainer *t, const char *path, int64_t low, int64_t high, int world,
                           bool apply) {
    mn_safetensors *file;
    mn_status st = mn_safetensors_open(&file, path);
    int64_t start = 0;
    for (int i = 0; st == MN_OK && i < mn_model_params(t->model); i++) {
        const mn_model_param *p = mn_model_param_at(t->model, i);
        const int64_t begin = mn_max(low - start, 0);
        const int64_t count = mn_min(high - start, p->info.count) - begin;
        start += p->info.count;
        for (int second = 0; second < 2 && st == MN_OK && count > 0; second++) {
            char name[NAME];
            const mn_stored_tensor *found;
            name_of(name, p, second, begin, world);
            st = mn_safetensors_get(&found, file, name);
            if (st == MN_OK && mn_stored_elements(found) != count) {
                st = mn_fail(MN_ERR_FORMAT, "%s: %s has another size than the model", path, name);
            }
            if (st == MN_OK && apply) st = take(t, i, second, found, begin);
        }
    }
    mn_safetensors_close(file);
    return st;
}

/* How many ranks wrote the checkpoint. */
static mn_status writers_of(int *world, const char *folder) {
    char path[PATH];
    for (*world = 1; *world <= MN_RANKS_MOST; (*world)++) {
        const mn_status st = path_of(path, folder, 0, *world);
        if (st != MN_OK) return st;
        if (access(path, F_OK) == 0) return MN_OK;
    }
    return mn_fail(MN_ERR_IO, "%s holds no optimizer.safetensors", folder);
}

mn_status mn_trainer_load_moments(mn_trainer *t, const char *folder, bool apply) {
    int world;
    int64_t *elements = NULL;
    mn_status st = writers_of(&world, folder);
    if (st == MN_OK) st = shares_of(&elements, t, world);
    for (int r = 0; st == MN_OK && r < world; r++) {
        char path[PATH];
        st = path_of(path, folder, r, world);
        if (st == MN_OK) st = read_file(t, path, elements[r], elements[r + 1], world, apply);
    }
    free(elements);
    return st;
}
