/* convert.c - mneme convert: the same model in another type, under another family's names, or as
 * GGUF. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/command.h"
#include "cli/models/models.h"
#include "cli/options.h"
#include "io/folder.h"
#include "model/gguf/gguf.h"

typedef struct request {
    const char *given[2];
    int n;
    const char *dtype, *family, *to;
    bool overwrite, quiet;
} request;

static void print_help(void) {
    puts("usage: mneme convert MODEL OUT [options]\n\n"
         "Writes the model of a folder again, one tensor in memory at a time: in another type or\n"
         "under the names and the configuration of another family that computes the same. The\n"
         "tokenizer, chat template and settings of generation go along. MODEL is a folder or that\n"
         "of a training run.\n\n"
         "  --dtype NAME    f32, f16, bf16, with --to gguf also q8_0 (default: as stored)\n"
         "  --family NAME   the model_type to write, such as transformer, llama, or mneme for the\n"
         "                  keys of mneme's own configurations (default: as it is)\n"
         "  --to gguf       one file that llama.cpp reads, of the models that it has; OUT is its\n"
         "                  name\n"
         "  --overwrite     write over a model in OUT\n"
         "  --quiet         no progress");
}

static const struct {
    const char *name;
    mn_stored_dtype dtype;
} dtypes[] = {
    { "f32", MN_STORED_F32 }, { "f16", MN_STORED_F16 }, { "bf16", MN_STORED_BF16 },
};

static mn_status find_dtype(mn_stored_dtype *out, const char *name) {
    *out = MN_STORED_COUNT;
    if (!name) return MN_OK;
    for (size_t i = 0; i < MN_COUNTOF(dtypes); i++) {
        if (strcmp(dtypes[i].name, name) != 0) continue;
        *out = dtypes[i].dtype;
        return MN_OK;
    }
    return mn_fail(MN_ERR_ARGUMENT, "--dtype %s: there are f32, f16, bf16", name);
}

/* The model_type that a configuration is written as, into `type`. */
static mn_status type_written(char type[64], const mn_model_config *c) {
    char *text = NULL;
    size_t size;
    const mn_status st = mn_model_config_write(&text, &size, c);
    json_t *root = st == MN_OK ? json_loads(text, 0, NULL) : NULL;
    const char *name = json_string_value(json_object_get(root, "model_type"));
    snprintf(type, 64, "%s", name ? name : "");
    json_decref(root);
    free(text);
    return st;
}

/* The configuration as one of that family, without what the source's file said. A family computes
 * the same where its configuration, read again, is the same. */
static mn_status retarget(mn_model **out, mn_model_config *c, const char *family) {
    const char *known = mn_model_type_known(family);
    if (!known) return mn_fail(MN_ERR_ARGUMENT, "--family %s: no such model_type is known", family);
    char type[64], why[512], layers[256];
    free(c->source);
    c->source = NULL;
    c->family = known;
    mn_status st = type_written(type, c);
    const bool other = st == MN_OK && strcmp(type, known) != 0;
    mn_layers_describe(layers, sizeof layers, c);
    snprintf(why, sizeof why, "its class has not all settings of %s", layers);
    if (st == MN_OK && !other) st = mn_transfer_target(out, c);
    if (st == MN_OK && !other) return st;
    if (!other) snprintf(why, sizeof why, "%s", mn_last_error());
    return mn_fail(MN_ERR_UNSUPPORTED, "no %s model computes what this one does: %s%s", known, why,
                   strcmp(known, "mneme") ? "; --family mneme takes most models" : "");
}

static mn_status target_of(mn_model **out, const mn_source *source, const char *family) {
    mn_model_config config = { 0 };
    mn_status st = mn_model_config_copy(&config, mn_model_describe(source->model));
    if (st == MN_OK) {
        st = family ? retarget(out, &config, family) : mn_model_sketch(out, &config);
    }
    mn_model_config_free(&config);
    return st;
}

/* ---- GGUF ------------------------------------------------------------------------------------ */

static mn_status find_type(mn_gguf_as *out, const char *name) {
    static const struct {
        const char *name;
        mn_gguf_as as;
    } types[] = { { "f32", MN_GGUF_AS_F32 }, { "f16", MN_GGUF_AS_F16 },
                  { "bf16", MN_GGUF_AS_BF16 }, { "q8_0", MN_GGUF_AS_Q8_0 } };
    *out = MN_GGUF_AS_STORED;
    for (size_t i = 0; name && i < MN_COUNTOF(types); i++) {
        if (strcmp(types[i].name, name) != 0) continue;
        *out = types[i].as;
        return MN_OK;
    }
    return name ? mn_fail(MN_ERR_ARGUMENT, "--dtype %s: there are f32, f16, bf16, q8_0", name)
                : MN_OK;
}

static mn_status write_gguf(const request *r, mn_gguf_plan *plan) {
    mn_progress bar = { 0 };
    const char *path = r->given[1];
    if (!r->overwrite && access(path, F_OK) == 0) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: there is a file already; write to another, or say "
                       "--overwrite", path);
    }
    mn_status st = mn_folder_make_above(path);
    if (st != MN_OK) return st;
    mn_progress_start(&bar, "weights", "bytes", 0, mn_gguf_plan_bytes(plan), r->quiet);
    st = mn_gguf_plan_write(plan, path, mn_models_progress, &bar);
    if (st == MN_OK) mn_progress_finish(&bar, NULL);
    else mn_progress_clear(&bar);
    return st;
}

static mn_status to_gguf(const request *r) {
    mn_gguf_as as;
    mn_source source;
    mn_gguf_plan *plan = NULL;
    mn_status st = find_type(&as, r->dtype);
    if (st == MN_OK && strcmp(r->to, "gguf") != 0) {
        st = mn_fail(MN_ERR_ARGUMENT, "--to %s: only gguf is written", r->to);
    }
    if (st == MN_OK && r->family) {
        st = mn_fail(MN_ERR_ARGUMENT, "--family and --to do not go together; convert twice");
    }
    if (st == MN_OK) st = mn_models_open(&source, r->given[0]);
    if (st != MN_OK) return st;
    st = mn_gguf_plan_create(&plan, &source, as);
    if (st == MN_OK) st = write_gguf(r, plan);
    if (st == MN_OK) {
        printf("%s: %d tensors as %s%s%s\n", r->given[1], mn_gguf_plan_tensors(plan),
               mn_gguf_plan_arch(plan), r->dtype ? ", " : "", r->dtype ? r->dtype : "");
        if (mn_gguf_plan_remark(plan)[0]) fprintf(stderr, "note: %s\n", mn_gguf_plan_remark(plan));
    }
    mn_gguf_plan_destroy(plan);
    mn_source_close(&source);
    return st;
}

static mn_status convert(const request *r) {
    if (r->to) return to_gguf(r);
    mn_stored_dtype dtype;
    mn_source source;
    mn_model *target = NULL;
    mn_transfer *transfer = NULL;
    mn_status st = find_dtype(&dtype, r->dtype);
    if (st == MN_OK) st = mn_models_open(&source, r->given[0]);
    if (st != MN_OK) return st;
    st = target_of(&target, &source, r->family);
    if (st == MN_OK) st = mn_transfer_create(&transfer, &source, target, dtype, NULL, NULL);
    if (st == MN_OK) st = mn_models_write(transfer, r->given[1], dtype, r->overwrite, r->quiet);
    if (st == MN_OK) {
        const char *family = transfer->family;
        printf("%s: %d tensors as %s%s%s\n", r->given[1], transfer->n_tensors,
               family ? family : "mneme", r->dtype ? ", " : "", r->dtype ? r->dtype : "");
    }
    mn_transfer_destroy(transfer);
    mn_source_close(&source);
    return st;
}

int mn_command_convert(int argc, char **argv) {
    request r = { 0 };
    const mn_option rows[] = { { NULL, .list = r.given, .n = &r.n, .most = 2 },
                               { "--dtype", .text = &r.dtype },
                               { "--family", .text = &r.family },
                               { "--to", .text = &r.to },
                               { "--overwrite", .flag = &r.overwrite },
                               { "--quiet", .flag = &r.quiet } };
    const int mistake = mn_options_read(rows, MN_COUNTOF(rows), "convert", argc, argv);
    if (mistake < 0) print_help();
    if (mistake != 0) return mistake < 0 ? 0 : mistake;
    if (r.n != 2) {
        return mn_options_mistake("convert", "", "name the model and the folder to write");
    }
    const mn_status st = convert(&r);
    if (st != MN_OK) fprintf(stderr, "mneme convert: %s\n", mn_last_error());
    return st == MN_OK ? 0 : 2;
}
