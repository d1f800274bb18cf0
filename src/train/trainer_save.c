/* trainer_save.c - checkpoints: OUT/checkpoints/step-N, complete or not there.
 *
 *   written into .step-N.new, each file and the folder brought to the disk, "done" last, then
 *   renamed. OUT/last and OUT/best are links that change in one step. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "io/file.h"
#include "io/json_write.h"
#include "io/safetensors.h"
#include "model/checkpoint.h"
#include "train/trainer_parts.h"

enum { PATH = 4096 };

static mn_status io_fail(const char *what, const char *path) {
    return mn_fail(MN_ERR_IO, "%s: cannot %s: %s", path, what, strerror(errno));
}

static mn_status join(char path[PATH], const char *folder, const char *name) {
    if (snprintf(path, PATH, "%s/%s", folder, name) < PATH) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "%s/%s: the path is too long", folder, name);
}

static mn_status make_folder(const char *path) {
    if (mkdir(path, 0777) == 0 || errno == EEXIST) return MN_OK;
    return io_fail("make the folder", path);
}

/* Brings the names in a folder to the disk. */
static mn_status sync_folder(const char *path) {
    const int fd = open(path, O_RDONLY | O_DIRECTORY);
    const bool synced = fd >= 0 && fsync(fd) == 0;
    const mn_status st = synced ? MN_OK : io_fail("sync", path);
    if (fd >= 0) close(fd);
    return st;
}

/* Removes a folder of files. Missing is fine. */
static void remove_folder(const char *path) {
    DIR *dir = opendir(path);
    if (!dir) return;
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        char file[PATH];
        if (entry->d_name[0] == '.' && (!entry->d_name[1] || entry->d_name[1] == '.')) continue;
        if (join(file, path, entry->d_name) == MN_OK) unlink(file);
    }
    closedir(dir);
    rmdir(path);
}

/* ---- the optimiser --------------------------------------------------------------------------- */

static mn_status save_moments(mn_trainer *t, const char *path) {
    const int n = mn_model_params(t->model);
    mn_stored_tensor *tensors = calloc(2 * (size_t)n, sizeof *tensors);
    char(*names)[MN_PARAM_NAME + 8] = calloc(2 * (size_t)n, sizeof *names);
    for (int i = 0; tensors && names && i < 2 * n; i++) {
        const mn_model_param *p = mn_model_param_at(t->model, i / 2);
        snprintf(names[i], sizeof *names, "%s.%s", i % 2 ? "second" : "first", p->name);
        tensors[i] = (mn_stored_tensor){
            .name = names[i], .dtype = MN_STORED_F32, .rank = 1, .shape = { p->info.count },
            .data = i % 2 ? mn_optimizer_second(t->optimizer, i / 2)
                          : mn_optimizer_first(t->optimizer, i / 2),
            .bytes = (size_t)p->info.count * sizeof(float) };
    }
    const mn_status st = tensors && names
                             ? mn_safetensors_write(path, tensors, 2 * n, NULL, 0)
                             : mn_fail(MN_ERR_MEMORY, "no memory to write %s", path);
    free(tensors);
    free(names);
    return st;
}

/* With `apply` copies the moments, without it only checks that all are there and fit. */
static mn_status load_moments(mn_trainer *t, const mn_safetensors *file, const char *path,
                              bool apply) {
    for (int i = 0; i < 2 * mn_model_params(t->model); i++) {
        const mn_model_param *p = mn_model_param_at(t->model, i / 2);
        char name[MN_PARAM_NAME + 8];
        const mn_stored_tensor *found;
        snprintf(name, sizeof name, "%s.%s", i % 2 ? "second" : "first", p->name);
        mn_status st = mn_safetensors_get(&found, file, name);
        if (st == MN_OK && mn_stored_elements(found) != p->info.count) {
            st = mn_fail(MN_ERR_FORMAT, "%s: %s has another size than the model", path, name);
        }
        if (st == MN_OK && apply) {
            st = mn_safetensors_read_f32(i % 2 ? mn_optimizer_second(t->optimizer, i / 2)
                                               : mn_optimizer_first(t->optimizer, i / 2), found);
        }
        if (st != MN_OK) return st;
    }
    return MN_OK;
}

/* ---- the rest of the run's state ------------------------------------------------------------- */

static mn_status save_progress(const mn_trainer *t, const char *path) {
    char hash[32];
    snprintf(hash, sizeof hash, "%016" PRIx64, mn_corpus_fingerprint(t->train));
    json_t *recent = json_array();
    for (int i = 0; i < MN_SPIKE_WINDOW && i < t->n_recent; i++) {
        json_array_append_new(recent, mn_json_real(t->recent[i]));
    }
    json_t *root = json_pack("{s:I, s:I, s:o, s:I, s:I, s:I, s:o, s:s, s:I}",
                             "step", (json_int_t)t->step, "tokens", (json_int_t)t->tokens,
                             "best_loss", mn_json_real(t->best),
                             "best_step", (json_int_t)t->best_step, "worse", (json_int_t)t->worse,
                             "n_recent", (json_int_t)t->n_recent, "recent", recent,
                             "data", hash, "seed", (json_int_t)t->options.seed);
    const mn_status st = root ? mn_json_save(path, root)
                              : mn_fail(MN_ERR_MEMORY, "no memory to write %s", path);
    json_decref(root);
    return st;
}

static mn_status load_progress(mn_trainer *t, const char *path) {
    mn_json root = { 0 };
    const char *hash = "";
    char own[32];
    mn_status st = mn_json_load(&root, path, MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_json_get_i64(&t->step, &root, "step");
    if (st == MN_OK) st = mn_json_get_i64(&t->tokens, &root, "tokens");
    t->best = NAN;
    if (st == MN_OK) st = mn_json_opt_f64(&t->best, &root, "best_loss");
    if (st == MN_OK) st = mn_json_get_i64(&t->best_step, &root, "best_step");
    if (st == MN_OK) st = mn_json_get_i64(&t->worse, &root, "worse");
    if (st == MN_OK) st = mn_json_get_i64(&t->n_recent, &root, "n_recent");
    if (st == MN_OK) st = mn_json_get_text(&hash, &root, "data");
    const mn_json recent = mn_json_member(&root, "recent");
    for (int64_t i = 0; st == MN_OK && i < mn_json_count(&recent) && i < MN_SPIKE_WINDOW; i++) {
        const mn_json item = mn_json_item(&recent, i);
        st = mn_json_read_f64(&t->recent[i], &item);
    }
    snprintf(own, sizeof own, "%016" PRIx64, mn_corpus_fingerprint(t->train));
    if (st == MN_OK && strcmp(own, hash) != 0) {
        st = mn_fail(MN_ERR_ARGUMENT, "%s: the run was trained on other data, or with another "
                     "tokenizer or split; start a new run for these", path);
    }
    mn_json_free(&root);
    return st;
}

/* ---- saving ---------------------------------------------------------------------------------- */

static mn_status write_all(mn_trainer *t, const char *folder) {
    char path[PATH];
    mn_status st = mn_checkpoint_save(t->model, folder);
    if (st == MN_OK && t->tokenizer) {
        st = join(path, folder, "tokenizer.json");
        if (st == MN_OK) st = mn_tokenizer_save(t->tokenizer, path);
    }
    if (st == MN_OK) st = join(path, folder, "optimizer.safetensors");
    if (st == MN_OK) st = save_moments(t, path);
    if (st == MN_OK) st = join(path, folder, "progress.json");
    if (st == MN_OK) st = save_progress(t, path);
    if (st == MN_OK) st = join(path, folder, "done");
    if (st == MN_OK) st = mn_file_write_bytes(path, "", 0);
    return st == MN_OK ? sync_folder(folder) : st;
}

/* OUT/name becomes a link to checkpoints/step-N, in one step. */
static mn_status point(const char *out, const char *name, const char *step) {
    char link[PATH], fresh[PATH], target[64];
    snprintf(target, sizeof target, "checkpoints/%.40s", step);
    mn_status st = join(link, out, name);
    if (st == MN_OK && snprintf(fresh, PATH, "%s.new", link) >= PATH) {
        st = mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", link);
    }
    if (st != MN_OK) return st;
    unlink(fresh);
    if (symlink(target, fresh) != 0) return io_fail("make the link", fresh);
    if (rename(fresh, link) != 0) return io_fail("replace the link", link);
    return sync_folder(out);
}

/* The name of the checkpoint a link points to, "" if none. */
static void pointed(char name[64], const char *out, const char *link) {
    char path[PATH], target[PATH];
    name[0] = '\0';
    if (join(path, out, link) != MN_OK) return;
    const ssize_t n = readlink(path, target, sizeof target - 1);
    if (n <= 0) return;
    target[n] = '\0';
    const char *slash = strrchr(target, '/');
    snprintf(name, 64, "%.63s", slash ? slash + 1 : target);
}

/* Removes checkpoints that nothing points to and no rule keeps, and what was left half written. */
static void prune(const mn_trainer *t, const char *folder) {
    char last[64], best[64];
    pointed(last, t->options.out, "last");
    pointed(best, t->options.out, "best");
    DIR *dir = opendir(folder);
    if (!dir) return;
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        const char *name = entry->d_name;
        const bool half = strncmp(name, ".step-", 6) == 0;
        if (!half && strncmp(name, "step-", 5) != 0) continue;
        if (strcmp(name, last) == 0 || strcmp(name, best) == 0) continue;
        const int64_t step = strtoll(name + 5, NULL, 10), keep = t->options.keep_every;
        char path[PATH];
        if (!half && keep > 0 && step % keep == 0) continue;
        if (join(path, folder, name) == MN_OK) remove_folder(path);
    }
    closedir(dir);
}

mn_status mn_trainer_save(mn_trainer *t, bool best) {
    char folder[PATH], fresh[PATH], final[PATH], name[64], hidden[80];
    snprintf(name, sizeof name, "step-%08" PRId64, t->step);
    snprintf(hidden, sizeof hidden, ".%s.new", name);
    mn_status st = make_folder(t->options.out);
    if (st == MN_OK) st = join(folder, t->options.out, "checkpoints");
    if (st == MN_OK) st = make_folder(folder);
    if (st == MN_OK) st = join(fresh, folder, hidden);
    if (st == MN_OK) st = join(final, folder, name);
    if (st != MN_OK) return st;
    char done[PATH];
    st = join(done, final, "done");
    if (st == MN_OK && access(done, F_OK) != 0) {    // else this step is saved already
        remove_folder(fresh);
        remove_folder(final);
        st = make_folder(fresh);
        if (st == MN_OK) st = write_all(t, fresh);
        if (st == MN_OK && rename(fresh, final) != 0) st = io_fail("put in place", final);
        if (st == MN_OK) st = sync_folder(folder);
        if (st != MN_OK) {
            char why[1024];
            snprintf(why, sizeof why, "%s", mn_last_error());
            remove_folder(fresh);
            return mn_fail(st, "%s; the checkpoints before it are as they were", why);
        }
    }
    if (st == MN_OK) st = point(t->options.out, "last", name);
    if (st == MN_OK && best) st = point(t->options.out, "best", name);
    if (st == MN_OK) prune(t, folder);
    return st;
}

/* ---- resuming -------------------------------------------------------------------------------- */

mn_status mn_trainer_resume(mn_trainer *t, const char *path) {
    char folder[PATH], file[PATH];
    mn_status st = path ? (snprintf(folder, PATH, "%s", path) < PATH
                               ? MN_OK : mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", path))
                        : join(folder, t->options.out, "last");
    if (st == MN_OK) st = join(file, folder, "done");
    if (st == MN_OK && access(file, F_OK) != 0) {
        return mn_fail(MN_ERR_IO, "%s holds no complete checkpoint to go on from", folder);
    }
    mn_safetensors *moments = NULL;
    if (st == MN_OK) st = join(file, folder, "optimizer.safetensors");
    if (st == MN_OK) st = mn_safetensors_open(&moments, file);
    if (st == MN_OK) st = load_moments(t, moments, file, false);
    if (st == MN_OK) st = mn_checkpoint_read_weights(t->model, folder);
    if (st == MN_OK) st = load_moments(t, moments, file, true);
    mn_safetensors_close(moments);
    if (st == MN_OK) st = join(file, folder, "progress.json");
    return st == MN_OK ? load_progress(t, file) : st;
}
