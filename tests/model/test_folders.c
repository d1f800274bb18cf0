/* test_folders.c - model folders of other software, named by MNEME_CHECKPOINTS: loaded and written
 * back they hold the same tensors, bit by bit under the same names, shapes and types, and the same
 * keys; older configurations are taken for the same weights; fresh models of default
 * configurations have the tensors that the software that defines them writes. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io/json.h"
#include "io/safetensors.h"
#include "model/checkpoint.h"
#include "model/families/dialect.h"
#include "support/check.h"
#include "support/folder.h"

enum { PATH = 4096, LONG = PATH + 64 };

static const char *root(void) {
    return getenv("MNEME_CHECKPOINTS");
}

static bool is_there(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file) fclose(file);
    return file != NULL;
}

/* Calls `visit` for each name in a folder below the root. */
static void each(const char *below, void (*visit)(const char *name)) {
    char path[PATH];
    snprintf(path, sizeof path, "%s/%s", root(), below);
    DIR *folder = opendir(path);
    if (!CHECK(folder != NULL, "%s: no such folder", path)) return;
    for (const struct dirent *at; (at = readdir(folder));) {
        if (at->d_name[0] != '.') visit(at->d_name);
    }
    closedir(folder);
}

/* ---- there and back -------------------------------------------------------------------------- */

/* The tensors of one file; returns how many there are. */
static int64_t check_tensors(const char *from, const char *name) {
    mn_safetensors *before = NULL, *after = NULL;
    int64_t n = 0;
    CHECK(mn_safetensors_open(&before, from) == MN_OK, "%s", mn_last_error());
    CHECK(mn_safetensors_open(&after, in_folder("model.safetensors")) == MN_OK, "%s",
          mn_last_error());
    for (int64_t i = 0; before && after && i < mn_safetensors_count(before); i++) {
        const mn_stored_tensor *a = mn_safetensors_at(before, i);
        const mn_stored_tensor *b = mn_safetensors_find(after, mn_safetensors_name(before, i));
        n++;
        if (!CHECK(b != NULL, "%s: %s is gone", name, mn_safetensors_name(before, i))) continue;
        bool same = a->dtype == b->dtype && a->rank == b->rank && a->bytes == b->bytes;
        for (int k = 0; same && k < a->rank; k++) same = a->shape[k] == b->shape[k];
        CHECK(same && memcmp(a->data, b->data, a->bytes) == 0, "%s: %s is another", name,
              mn_safetensors_name(before, i));
    }
    mn_safetensors_close(before);
    mn_safetensors_close(after);
    return n;
}

/* Those of all files of the folder, which are those that were written. */
static void check_files(const char *folder, const char *name) {
    char path[LONG + 256];
    int64_t n = 0;
    DIR *files = opendir(folder);
    for (const struct dirent *at; files && (at = readdir(files));) {
        const size_t length = strlen(at->d_name);
        const bool is_model = strncmp(at->d_name, "model", 5) == 0 && length > 12 &&
                              strcmp(at->d_name + length - 12, ".safetensors") == 0;
        snprintf(path, sizeof path, "%s/%s", folder, at->d_name);
        if (is_model) n += check_tensors(path, name);
    }
    if (files) closedir(files);
    mn_safetensors *after = NULL;
    CHECK(mn_safetensors_open(&after, in_folder("model.safetensors")) == MN_OK, "%s",
          mn_last_error());
    CHECK(after && n > 0 && n == mn_safetensors_count(after), "%s: not the %lld tensors it had",
          name, (long long)n);
    mn_safetensors_close(after);
}

static void check_keys(const char *from, const char *name) {
    mn_json before = { 0 }, after = { 0 };
    CHECK(mn_json_load(&before, from, MN_JSON_PYTHON) == MN_OK, "%s", mn_last_error());
    CHECK(mn_json_load(&after, in_folder("config.json"), MN_JSON_PYTHON) == MN_OK, "%s",
          mn_last_error());
    for (mn_json at = { 0 }; mn_json_next(&at, &before);) {
        const mn_json same = mn_json_member(&after, at.name);
        CHECK(same.value && json_equal(at.value, same.value), "%s: %s is not kept", name, at.name);
    }
    mn_json_free(&before);
    mn_json_free(&after);
}

static void check_folder(const char *name) {
    char weights[LONG], index[LONG], config[LONG], folder[PATH];
    snprintf(folder, sizeof folder, "%s/%s", root(), name);
    snprintf(weights, sizeof weights, "%s/model.safetensors", folder);
    snprintf(index, sizeof index, "%s/model.safetensors.index.json", folder);
    snprintf(config, sizeof config, "%s/config.json", folder);
    if (!is_there(weights) && !is_there(index)) return;
    mn_model *model = NULL;
    const mn_status st = mn_checkpoint_load(&model, folder, MN_F32);
    if (!CHECK(st == MN_OK, "%s", mn_last_error())) return;
    CHECK(mn_checkpoint_save(model, in_folder("")) == MN_OK, "%s", mn_last_error());
    mn_model_destroy(model);
    check_files(folder, name);
    check_keys(config, name);
}

static void there_and_back(void **state) {
    (void)state;
    if (!root()) skip();
    each(".", check_folder);
    check_done();
}

/* ---- older configurations -------------------------------------------------------------------- */

static void check_older(const char *file) {
    char path[LONG], folder[PATH];
    snprintf(path, sizeof path, "%s/configs-v4/%s", root(), file);
    mn_json json = { 0 };
    mn_model_config config = { 0 };
    mn_model *model = NULL;
    mn_status st = mn_json_load(&json, path, MN_JSON_PYTHON);
    if (st == MN_OK) st = mn_model_config_read(&config, &json);
    if (st == MN_OK) st = mn_model_create(&model, &config, MN_F32);
    snprintf(folder, sizeof folder, "%s/%.*s", root(), (int)strcspn(file, "."), file);
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    if (st == MN_OK && is_there(path)) st = mn_checkpoint_read_weights(model, folder);
    CHECK(st == MN_OK, "%s: %s", file, mn_last_error());
    mn_model_destroy(model);
    mn_model_config_free(&config);
    mn_json_free(&json);
}

static void older_configurations(void **state) {
    (void)state;
    if (!root()) skip();
    each("configs-v4", check_older);
    check_done();
}

/* ---- defaults -------------------------------------------------------------------------------- */

static bool same_shape(const mn_param_info *info, const mn_json *shape) {
    const int64_t rank = mn_json_count(shape);
    int64_t count = 1;
    bool same = rank == info->rank;
    for (int64_t i = 0; i < rank; i++) {
        const mn_json at = mn_json_item(shape, i);
        int64_t n = 0;
        if (mn_json_read_i64(&n, &at) != MN_OK) return false;
        same = same && i < 4 && n == info->shape[i];
        count *= n;
    }
    return same || (info->rank <= 1 && count == info->count);
}

static void check_listed(mn_model *model, const mn_json *list, const char *type) {
    const mn_model_config *config = mn_model_describe(model);
    int found = 0;
    for (int i = 0; i < mn_model_params(model); i++) {
        const mn_model_param *p = mn_model_param_at(model, i);
        int layer = -1;
        char name[MN_PARAM_NAME];
        const bool in_layer = sscanf(p->name, "model.layers.%d.", &layer) == 1;
        const char *kind = in_layer
                               ? mn_layer_kind_name(mn_model_layer(model, layer)->kind) : NULL;
        mn_dialect_name(name, config->family, kind, p->name);
        bool here = false;
        for (int64_t k = 0; k < mn_json_count(list) && !here; k++) {
            const mn_json at = mn_json_item(list, k), shape = mn_json_member(&at, "shape");
            const char *theirs = "";
            if (mn_json_get_text(&theirs, &at, "name") != MN_OK) continue;
            if (strcmp(theirs, name) != 0) continue;
            here = true;
            found++;
            CHECK(same_shape(&p->info, &shape), "%s: %s has another shape", type, name);
        }
        CHECK(here, "%s: they have no %s", type, name);
    }
    CHECK(found == mn_json_count(list), "%s: %d of %lld tensors", type, found,
          (long long)mn_json_count(list));
}

static void check_default(const char *type) {
    char path[PATH];
    mn_json json = { 0 }, list = { 0 };
    mn_model_config config = { 0 };
    mn_model *model = NULL;
    snprintf(path, sizeof path, "%s/fla-defaults/%s/config.json", root(), type);
    mn_status st = mn_json_load(&json, path, MN_JSON_PYTHON);
    if (st == MN_OK) st = mn_model_config_read(&config, &json);
    if (st == MN_OK) st = mn_model_create(&model, &config, MN_F32);
    snprintf(path, sizeof path, "%s/fla-defaults/%s/tensors.json", root(), type);
    if (st == MN_OK) st = mn_json_load(&list, path, MN_JSON_STANDARD);
    CHECK(st == MN_OK, "%s: %s", type, mn_last_error());
    if (st == MN_OK) check_listed(model, &list, type);
    mn_model_destroy(model);
    mn_model_config_free(&config);
    mn_json_free(&json);
    mn_json_free(&list);
}

static void default_configurations(void **state) {
    (void)state;
    if (!root()) skip();
    each("fla-defaults", check_default);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(there_and_back, make_folder, remove_folder),
        cmocka_unit_test(older_configurations),
        cmocka_unit_test(default_configurations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
