/* info.c - mneme info: version and build, targets, kernels as chosen here, and the table of
 * layers; or what a model is. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/command.h"
#include "cli/models/info_model.h"
#include "cli/options.h"
#include "io/json_write.h"
#include "definition/mixer.h"
#include "layers/layer.h"
#include "ops/run.h"
#include "runtime/device.h"

static const bool composed[MN_OP_COUNT] = {
#define COMPOSE(name, parts) [MN_OP_##name] = true,
#include "ops/compose/compose.def"
};

static void print_help(void) {
    puts("usage: mneme info [options]\n"
         "       mneme info MODEL [--batch N] [--context N] [--json]\n\n"
         "What a model is and takes, without reading its weights: family, layers, parameters,\n"
         "state of a sequence, memory to run and to train. MODEL is a folder, or that of a run.\n"
         "Without MODEL, what this program is and what it runs here: version and build, the\n"
         "targets present, the kernel that serves each operator and pass, and the sequence layers\n"
         "with their three axes.\n\n"
         "  --target NAME   ref, avx2, avx512, neon (default: MN_TARGET, else the best here)\n"
         "  --json          the same as JSON\n"
         "  --batch N       of MODEL: sequences at once (1)\n"
         "  --context N     of MODEL: tokens of a sequence (the model's, 4096 at most)\n"
         "  --table NAME    a table of the documents as Markdown: layers, operators, options");
}

static const char *compiler(void) {
#if defined(__clang__)
    return "clang " __clang_version__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#else
    return "unknown";
#endif
}

static const char *processor(void) {
#if defined(__x86_64__)
    return "x86-64";
#elif defined(__aarch64__)
    return "arm64";
#else
    return "other";
#endif
}

/* The target that serves a pass in float32; NULL where nothing of its own does. */
static const char *serves(const mn_context *context, mn_op_id op, mn_pass pass) {
    const mn_kernel *kernel = mn_op_kernel(context, op, pass, MN_F32);
    return kernel && kernel->run ? kernel->target : NULL;
}

static const char *kind_of(const mn_context *context, mn_op_id op) {
    if (composed[op]) return "composed";
    return serves(context, op, MN_FORWARD) ? "kernel" : "missing";
}

/* ---- text ------------------------------------------------------------------------------------ */

static void print_build(const mn_context *context) {
    printf("mneme %s\n\n", mn_version());
    printf("  compiler   %s, C11\n", compiler());
    printf("  processor  %s, %d worker thread%s\n", processor(), mn_context_threads(context),
           mn_context_threads(context) == 1 ? "" : "s");
    puts("\ntargets");
    for (int id = 0; id < MN_TARGET_COUNT; id++) {
        const char *name = mn_target_name((mn_target_id)id);
        const bool chosen = strcmp(name, mn_context_target(context)) == 0;
        const char *how = chosen                                  ? "chosen"
                          : mn_target_available((mn_target_id)id) ? "present"
                                                                  : "absent";
        printf("  %-10s %-8s %s\n", name, how, mn_target_about((mn_target_id)id));
    }
}

/* The GPUs that can be seen, or the reason why there are none. */
static void print_devices(void) {
    int count;
    printf("\ndevices\n");
    printf("  CUDA %s\n", mn_device_built() ? "built in" : "not built in");
    if (mn_device_count(&count) != MN_OK) printf("  none: %s\n", mn_last_error());
    for (int i = 0; i < count; i++) {
        mn_device_info info;
        if (mn_device_describe(&info, i) == MN_OK) {
            printf("  cuda:%-5d %s, compute capability %d.%d, %.1f of %.1f GB free\n", i, info.name,
                   info.major, info.minor, (double)info.free_bytes / 1e9,
                   (double)info.bytes / 1e9);
        } else {
            printf("  cuda:%-5d %s\n", i, mn_last_error());
        }
    }
}

static void print_kernels(const mn_context *context) {
    printf("\noperators, float32 (float64 always runs on ref); on GPUs, also bf16\n");
    printf("  %-16s %-9s %-9s %-9s %s\n", "", "forward", "backward", "step", "on GPUs");
    for (int op = 0; op < MN_OP_COUNT; op++) {
        const char *name = mn_op_describe((mn_op_id)op)->name;
        const char *kind = kind_of(context, (mn_op_id)op);
        if (strcmp(kind, "kernel") != 0) {
            printf("  %-16s %s\n", name, kind);
            continue;
        }
        printf("  %-16s", name);
        for (int pass = 0; pass < MN_PASS_COUNT; pass++) {
            const char *target = serves(context, (mn_op_id)op, (mn_pass)pass);
            printf(" %-9s", target ? target : pass == MN_STEP ? "forward" : "-");
        }
        for (int pass = 0; pass < MN_PASS_COUNT; pass++) {
            const bool there = mn_op_has_cuda((mn_op_id)op, (mn_pass)pass);
            if (there) printf(" %s", mn_pass_name((mn_pass)pass));
        }
        printf("\n");
    }
}

static void print_mixers(void) {
    static const char row[] = "  %-16s %-25s %-32s %-16s %-16s %s\n";
    putchar('\n');
    printf(row, "layer", "transition", "belief", "read", "operator", "state of a sequence");
    for (int i = 0; i < mn_mixer_count(); i++) {
        const mn_mixer_info *info = mn_mixer_row(i);
        char formula[MN_MIXER_FORMULA];
        mn_mixer_state_formula(formula, info);
        printf(row, info->name, mn_mixer_transition_name(info), mn_mixer_belief_name(info),
               mn_mixer_read_name(info), mn_op_describe(info->op)->name, formula);
    }
    puts("\n  \"+ccq\" after a layer that keeps a matrix (all but the caches) contracts the query "
         "along\n"
         "  the curvature of the keys first: gla+ccq, gdn+ccq, bayes+ccq. It adds H K K + H K + 1 "
         "to the\n"
         "  state. L is the number of tokens so far; G noise groups, J key-value heads, Q "
         "branches.");
}

/* ---- tables of the documents ----------------------------------------------------------------- */

/* A row of the table of layers; bars inside of a cell would end it. */
static void print_layers_table(void) {
    puts("| layer | transition | belief | read | operator | state of a sequence |\n"
         "|---|---|---|---|---|---|");
    for (int i = 0; i < mn_mixer_count(); i++) {
        const mn_mixer_info *info = mn_mixer_row(i);
        char formula[MN_MIXER_FORMULA];
        mn_mixer_state_formula(formula, info);
        printf("| %s | %s | %s | %s | %s | %s |\n", info->name, mn_mixer_transition_name(info),
               mn_mixer_belief_name(info), mn_mixer_read_name(info),
               mn_op_describe(info->op)->name, formula);
    }
}

static void print_operators_table(void) {
    puts("| operator | equation |\n|---|---|");
    for (int op = 0; op < MN_OP_COUNT; op++) {
        const mn_op_info *info = mn_op_describe((mn_op_id)op);
        printf("| %s | `%s` |\n", info->name, info->about);
    }
}

enum { LAYER_KEYS = 64 };    // more than any layer has options

static void print_options_table(void) {
    puts("| layer | options |\n|---|---|");
    for (int kind = 0; kind < MN_LAYER_COUNT; kind++) {
        const char *keys[LAYER_KEYS];
        const int n = mn_layer_option_keys((mn_layer_kind)kind, keys, LAYER_KEYS);
        printf("| %s |", mn_layer_kind_name((mn_layer_kind)kind));
        for (int i = 0; i < n; i++) printf("%s `%s`", i ? "," : "", keys[i]);
        puts(" |");
    }
}

static const struct {
    const char *name;
    void (*print)(void);
} tables[] = {
    { "layers", print_layers_table },
    { "operators", print_operators_table },
    { "options", print_options_table },
};

static int print_table(const char *name) {
    for (size_t i = 0; i < MN_COUNTOF(tables); i++) {
        if (strcmp(tables[i].name, name) != 0) continue;
        tables[i].print();
        return 0;
    }
    fprintf(stderr, "mneme info: no table is called \"%s\"; there are layers, operators, options\n",
            name);
    return 2;
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static json_t *targets_json(const mn_context *context) {
    json_t *list = json_array();
    for (int id = 0; id < MN_TARGET_COUNT; id++) {
        const char *name = mn_target_name((mn_target_id)id);
        json_array_append_new(list, json_pack("{s:s, s:s, s:b, s:b}", "name", name, "about",
                                              mn_target_about((mn_target_id)id), "present",
                                              (int)mn_target_available((mn_target_id)id), "chosen",
                                              strcmp(name, mn_context_target(context)) == 0));
    }
    return list;
}

static json_t *kernels_json(const mn_context *context) {
    json_t *list = json_array();
    for (int op = 0; op < MN_OP_COUNT; op++) {
        const mn_op_info *info = mn_op_describe((mn_op_id)op);
        json_t *row = json_pack("{s:s, s:s, s:s}", "op", info->name, "kind",
                                kind_of(context, (mn_op_id)op), "about", info->about);
        for (int pass = 0; pass < MN_PASS_COUNT; pass++) {
            const char *target = serves(context, (mn_op_id)op, (mn_pass)pass);
            json_object_set_new(row, mn_pass_name((mn_pass)pass),
                                target ? json_string(target) : json_null());
        }
        json_t *passes = json_array();
        for (int pass = 0; pass < MN_PASS_COUNT; pass++) {
            if (!mn_op_has_cuda((mn_op_id)op, (mn_pass)pass)) continue;
            json_array_append_new(passes, json_string(mn_pass_name((mn_pass)pass)));
        }
        json_object_set_new(row, "cuda", passes);
        json_array_append_new(list, row);
    }
    return list;
}

/* Whether CUDA is built in, the GPUs, and why there are none. */
static json_t *devices_json(void) {
    int count;
    json_t *list = json_array();
    const mn_status st = mn_device_count(&count);
    json_t *why = st == MN_OK ? json_null() : json_string(mn_last_error());
    for (int i = 0; i < count; i++) {
        mn_device_info info;
        char name[32];
        if (mn_device_describe(&info, i) != MN_OK) continue;
        snprintf(name, sizeof name, "cuda:%d", i);
        json_array_append_new(
            list, json_pack("{s:s, s:s, s:i, s:i, s:i, s:I, s:I}", "device", name, "name",
                            info.name, "major", info.major, "minor", info.minor, "processors",
                            info.n_processors, "bytes", (json_int_t)info.bytes, "free_bytes",
                            (json_int_t)info.free_bytes));
    }
    return json_pack("{s:b, s:o, s:o}", "built", (int)mn_device_built(), "why", why, "devices",
                     list);
}

static json_t *axis_json(const char *name, const char *equation) {
    return json_pack("{s:s, s:s}", "name", name, "equation", equation);
}

static json_t *mixers_json(void) {
    json_t *list = json_array();
    for (int i = 0; i < mn_mixer_count(); i++) {
        const mn_mixer_info *info = mn_mixer_row(i);
        char formula[MN_MIXER_FORMULA];
        mn_mixer_state_formula(formula, info);
        json_array_append_new(
            list,
            json_pack(
                "{s:s, s:o, s:o, s:o, s:s, s:b, s:b, s:b, s:s}", "name", info->name, "transition",
                axis_json(mn_mixer_transition_name(info), mn_mixer_transition_equation(info)),
                "belief", axis_json(mn_mixer_belief_name(info), mn_mixer_belief_equation(info)),
                "read", axis_json(mn_mixer_read_name(info), mn_mixer_read_equation(info)), "op",
                mn_op_describe(info->op)->name, "variance", (int)mn_mixer_has_variance(info),
                "cache", (int)mn_mixer_has_cache(info), "ccq", (int)mn_mixer_has_matrix(info),
                "state", formula));
    }
    return list;
}

static mn_status print_json(const mn_context *context) {
    json_t *root =
        json_pack("{s:s, s:{s:s, s:s}, s:i, s:s, s:o, s:o, s:o, s:o}", "version", mn_version(),
                  "build", "compiler", compiler(), "processor", processor(), "threads",
                  mn_context_threads(context), "target", mn_context_target(context), "targets",
                  targets_json(context), "cuda", devices_json(), "kernels", kernels_json(context),
                  "mixers", mixers_json());
    char *text = NULL;
    if (!root) return mn_fail(MN_ERR_MEMORY, "no memory for the answer");
    const mn_status st = mn_json_text(&text, root, MN_JSON_PRETTY);
    if (st == MN_OK) puts(text);
    free(text);
    json_decref(root);
    return st;
}

int mn_command_info(int argc, char **argv) {
    mn_context_options options = { 0 };
    bool json = false;
    const char *table = NULL, *model = NULL;
    int batch = 1, length = 0;
    const mn_option rows[] = { { NULL, .text = &model },
                               { "--json", .flag = &json },
                               { "--batch", .count = &batch, .low = 1, .high = 1 << 20 },
                               { "--context", .count = &length, .low = 1, .high = 1 << 24 },
                               { "--table", .text = &table },
                               { "--target", .text = &options.target } };
    const int mistake = mn_options_read(rows, MN_COUNTOF(rows), "info", argc, argv);
    if (mistake < 0) print_help();
    if (mistake != 0) return mistake < 0 ? 0 : mistake;
    if (table) return print_table(table);
    mn_context *context = NULL;
    mn_status st = mn_context_create(&context, &options);
    if (st == MN_OK && model) {
        st = mn_info_model(model, batch, length, json, context);
    } else if (st == MN_OK && json) {
        st = print_json(context);
    } else if (st == MN_OK) {
        print_build(context);
        print_devices();
        print_kernels(context);
        print_mixers();
    }
    if (st != MN_OK) fprintf(stderr, "mneme info: %s\n", mn_last_error());
    mn_context_destroy(context);
    return st == MN_OK ? 0 : 2;
}
