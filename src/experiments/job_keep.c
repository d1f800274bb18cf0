/* job_keep.c - checkpoints of jobs, see job_keep.h. The state is written before the checkpoint of
 * its step and removed after the next one, so that every complete checkpoint has its state. */
#include "experiments/job_keep.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "io/json_write.h"
#include "train/run/run_folder.h"

static mn_status state_path(char path[MN_RUN_PATH], const char *folder, int64_t step) {
    char name[48];
    snprintf(name, sizeof name, "state-%lld.json", (long long)step);
    return mn_run_join(path, folder, name);
}

mn_status mn_keep_make(const char *folder) {
    char above[MN_RUN_PATH];
    snprintf(above, sizeof above, "%s", folder);
    char *slash = strrchr(above, '/');
    if (slash) *slash = '\0';
    const mn_status st = slash && above[0] ? mn_run_make_folder(above) : MN_OK;
    return st == MN_OK ? mn_run_make_folder(folder) : st;
}

mn_status mn_keep_save(const char *folder, mn_trainer *trainer, json_t *state) {
    char path[MN_RUN_PATH], before[MN_RUN_PATH];
    const int64_t step = mn_trainer_step_number(trainer), last = mn_run_pointed(folder, "last");
    mn_status st = state ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for the state of a job");
    if (st == MN_OK) st = mn_keep_make(folder);
    if (st == MN_OK) st = state_path(path, folder, step);
    if (st == MN_OK) st = state_path(before, folder, last);
    if (st == MN_OK) st = mn_json_save(path, state);
    json_decref(state);
    if (st == MN_OK) st = mn_trainer_save(trainer, false);
    if (st == MN_OK && last >= 0 && last != step) unlink(before);
    return st;
}

void mn_keep_take(json_t **state, const char *folder, mn_trainer *trainer) {
    char path[MN_RUN_PATH];
    mn_json root = { 0 };
    const int64_t step = mn_run_pointed(folder, "last");
    *state = NULL;
    if (step < 0) return;
    mn_status st = state_path(path, folder, step);
    if (st == MN_OK) st = mn_json_load(&root, path, MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_trainer_resume(trainer, NULL);
    if (st == MN_OK) *state = json_incref(root.value);
    else mn_keep_drop(folder);
    mn_json_free(&root);
}

void mn_keep_drop(const char *folder) {
    char path[MN_RUN_PATH];
    mn_run_clear(folder);
    if (mn_run_join(path, folder, "checkpoints") == MN_OK) mn_run_remove_folder(path);
    mn_run_remove_folder(folder);
}
