/* auto_map.c - writes modeling_mneme.py, which is part of the program, beside a model. */
#include "model/folder/auto_map.h"

#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "io/file.h"

enum { PATH = 4096 };

extern const unsigned char mn_modeling_py[];
extern const size_t mn_modeling_py_size;

static const mn_layer_kind covered[] = {
#define AUTO_KIND(kind) MN_LAYER_##kind,
#include "model/folder/auto_map.def"
#undef AUTO_KIND
};

static mn_status refuse(const char *what) {
    return mn_fail(MN_ERR_UNSUPPORTED, "modeling_mneme.py has no %s", what);
}

static mn_status check(const mn_model_config *c) {
    if (c->decoder != MN_DECODER_NONE) return refuse("decoder behind the last block");
    if (c->mlp == MN_MLP_RWKV7) return refuse("channel mix of RWKV-7");
    if (c->block.shared_blocks > 0) return refuse("blocks that share their weights");
    for (int i = 0; i < c->n_layers; i++) {
        mn_layer_kind kind;
        bool ccq, found = false;
        const mn_status st = mn_layer_kind_find(&kind, &ccq, c->names[i]);
        if (st != MN_OK) return st;
        for (size_t k = 0; k < MN_COUNTOF(covered); k++) found |= covered[k] == kind;
        if (!found) return refuse(c->names[i]);
    }
    return MN_OK;
}

bool mn_auto_map_covers(const mn_model_config *config) {
    return check(config) == MN_OK;
}

mn_status mn_auto_map_add(json_t *object, const mn_model_config *config, const char *folder) {
    const char *type = json_string_value(json_object_get(object, "model_type"));
    char path[PATH];
    const bool ours = type && strcmp(type, "mneme") == 0;
    const bool published = type && strcmp(type, "palimpsa") == 0;    // code without a package
    if ((!ours && !published) || !mn_auto_map_covers(config)) return MN_OK;
    json_t *map = json_pack("{s:s, s:s}", "AutoConfig", "modeling_mneme.MnemeConfig",
                            "AutoModelForCausalLM", "modeling_mneme.MnemeForCausalLM");
    bool failed = json_object_set_new(object, "auto_map", map) != 0;
    if (ours) {
        failed |= json_object_set_new(object, "architectures",
                                      json_pack("[s]", "MnemeForCausalLM")) != 0;
    }
    if (failed) return mn_fail(MN_ERR_MEMORY, "no memory for a configuration");
    if (snprintf(path, PATH, "%s/modeling_mneme.py", folder) >= PATH) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", folder);
    }
    return mn_file_write_bytes(path, mn_modeling_py, mn_modeling_py_size);
}
