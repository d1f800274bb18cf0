/* graft.c - mneme graft: other layers in the place of chosen ones. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/command.h"
#include "cli/models/models.h"
#include "cli/options.h"
#include "io/json_write.h"
#include "model/folder/graft.h"

typedef struct request {
    const char *given[2];
    int n;
    const char *layers, *to, *add, *preset, *options;
    int seed;
    bool overwrite, quiet, json;
} request;

static const struct {
    const char *name;
    int of;
    const char *layers, *to, *about;
} presets[] = {
#define PRESET(name, of, layers, to, about) { name, of, layers, to, about },
#include "cli/models/presets.def"
#undef PRESET
};

static void print_help(void) {
    puts("usage: mneme graft MODEL OUT --layers WHICH --to LAYER [options]\n\n"
         "Writes the model of a folder with other layers in the place of chosen ones. Tensors\n"
         "that both have by role and shape are kept, heads that serve several are repeated, the\n"
         "others are made as training would start them; says what was kept, made and dropped.\n"
         "The rest of the model stays bit for bit. mneme train --from OUT goes on from there.\n\n"
         "  --layers WHICH  numbers from 0, ranges and kinds: 3,7,11  0-5  attention  gdn  all\n"
         "  --to LAYER      the new kind: bayes, kla, palimpsa, gdn+ccq; mneme info lists them\n"
         "  --add ccq       condition the queries of chosen layers on the curvature of the keys\n"
         "  --preset NAME   layers and kind of a paper:");
    for (size_t i = 0; i < MN_COUNTOF(presets); i++) {
        printf("                  %s: %s of %d, %s: %s\n", presets[i].name, presets[i].layers,
               presets[i].of, presets[i].to, presets[i].about);
    }
    puts("  --options JSON  options of the new kind: '{\"noise_groups\": 1}'\n"
         "  --seed N        of what is made (1337)\n"
         "  --overwrite     write over a model in OUT\n"
         "  --json          the report as JSON\n"
         "  --quiet         no progress");
}

/* ---- which layers ---------------------------------------------------------------------------- */

/* One item of the list, of `n` characters: a number, a range, a kind or all. */
static mn_status choose_item(bool *chosen, const mn_model_config *c, const char *item, size_t n) {
    char name[MN_MIXER_NAME] = "";
    char *end;
    bool any = false;
    snprintf(name, sizeof name, "%.*s", (int)mn_min(n, sizeof name - 1), item);
    long first = strtol(name, &end, 10), last = first;
    if (end != name && *end == '-') {
        char *rest = end + 1;
        last = strtol(rest, &end, 10);
        if (end == rest) last = -1;
    }
    const bool numbers = name[0] && *end == '\0';
    if (numbers && (first < 0 || last < first || last >= c->n_layers)) {
        return mn_fail(MN_ERR_ARGUMENT, "--layers %s: there are layers 0 to %d", name,
                       c->n_layers - 1);
    }
    for (int i = 0; i < c->n_layers; i++) {
        const bool here = numbers ? i >= first && i <= last
                                  : strcmp(name, "all") == 0 || strcmp(name, c->names[i]) == 0;
        chosen[i] |= here;
        any |= here;
    }
    if (any) return MN_OK;
    char layers[256];
    mn_layers_describe(layers, sizeof layers, c);
    return mn_fail(MN_ERR_ARGUMENT, "--layers %s: no layer is that; the model's are %s", name,
                   layers);
}

static mn_status choose(bool *chosen, const mn_model_config *c, const char *list) {
    mn_status st = MN_OK;
    while (*list && st == MN_OK) {
        const size_t n = strcspn(list, ",");
        st = choose_item(chosen, c, list, n);
        list += n + (list[n] == ',');
    }
    return st;
}

static mn_status apply_preset(request *r, const mn_model_config *c) {
    for (size_t i = 0; i < MN_COUNTOF(presets); i++) {
        if (strcmp(presets[i].name, r->preset) != 0) continue;
        if (c->n_layers != presets[i].of && !r->layers) {
            return mn_fail(MN_ERR_ARGUMENT, "--preset %s is for models of %d layers and this one "
                           "has %d; name the layers with --layers", r->preset, presets[i].of,
                           c->n_layers);
        }
        if (!r->layers) r->layers = presets[i].layers;
        if (!r->to) r->to = presets[i].to;
        return MN_OK;
    }
    return mn_fail(MN_ERR_ARGUMENT, "--preset %s: there is none of that name; mneme graft --help "
                   "lists them", r->preset);
}

static mn_status check_asked(const request *r) {
    if (!r->layers) return mn_fail(MN_ERR_ARGUMENT, "say which layers: --layers 3,7,11");
    if (!r->to && !r->add) return mn_fail(MN_ERR_ARGUMENT, "say what they become: --to LAYER");
    if (r->add && strcmp(r->add, "ccq") != 0 && strcmp(r->add, "+ccq") != 0) {
        return mn_fail(MN_ERR_ARGUMENT, "--add %s: only ccq is added", r->add);
    }
    return MN_OK;
}

/* ---- the report ------------------------------------------------------------------------------ */

static const char *fate(const mn_graft_row *row) {
    if (row->dropped) return "dropped";
    if (row->kept == 0) return "made";
    if (row->kept < row->count) return "kept in part";
    return row->repeated ? "kept, repeated" : "kept";
}

static bool alike(const mn_graft_row *a, const mn_graft_row *b) {
    return strcmp(a->name, b->name) == 0 && a->count == b->count && a->kept == b->kept &&
           a->dropped == b->dropped;
}

static void print_report(const mn_graft *g, const mn_source *source, const bool *chosen) {
    const mn_model_config *from = mn_model_describe(source->model);
    const mn_model_config *to = mn_model_describe(g->transfer->target);
    int64_t kept = 0, made = 0, dropped = 0;
    printf("layers");
    for (int i = 0, n = 0; i < from->n_layers; i++) {
        if (chosen[i]) printf("%s %d %s -> %s", n++ ? "," : "", i, from->names[i], to->names[i]);
    }
    putchar('\n');
    for (int i = 0; i < g->n_rows; i++) {
        const mn_graft_row *row = &g->rows[i];
        int times = 0;
        bool told = false;
        for (int k = 0; k < g->n_rows; k++) {
            if (!alike(row, &g->rows[k])) continue;
            times++;
            told |= k < i;
        }
        kept += row->kept;
        made += row->dropped ? 0 : row->count - row->kept;
        dropped += row->dropped ? row->count : 0;
        if (told) continue;
        char count[48];
        snprintf(count, sizeof count, "%d x %" PRId64, times, row->count);
        printf("  %-15s %-28s %16s", fate(row), row->name, count);
        if (row->kept > 0 && row->kept < row->count) printf(", of which %" PRId64, row->kept);
        putchar('\n');
    }
    printf("numbers: %" PRId64 " kept, %" PRId64 " made, %" PRId64 " dropped\n", kept, made,
           dropped);
}

static mn_status print_json(const mn_graft *g, const char *out) {
    json_t *list = json_array();
    for (int i = 0; i < g->n_rows; i++) {
        const mn_graft_row *row = &g->rows[i];
        json_array_append_new(list, json_pack("{s:i, s:s, s:s, s:I, s:I, s:b}", "layer", row->layer,
                                              "name", row->name, "fate", fate(row), "numbers",
                                              (json_int_t)row->count, "kept",
                                              (json_int_t)row->kept, "repeated",
                                              (int)row->repeated));
    }
    json_t *root = json_pack("{s:s, s:o}", "out", out, "parameters", list);
    char *text = NULL;
    const mn_status st = mn_json_text(&text, root, MN_JSON_PRETTY);
    if (st == MN_OK) puts(text);
    free(text);
    json_decref(root);
    return st;
}

/* ---- the verb -------------------------------------------------------------------------------- */

static mn_status graft_source(request *r, const mn_source *source) {
    bool chosen[MN_MAX_LAYERS] = { false };
    const mn_model_config *c = mn_model_describe(source->model);
    mn_graft *graft = NULL;
    mn_json options = { 0 };
    mn_status st = r->preset ? apply_preset(r, c) : MN_OK;
    if (st == MN_OK) st = check_asked(r);
    if (st == MN_OK) st = choose(chosen, c, r->layers);
    if (st == MN_OK && r->options) {
        st = mn_json_parse(&options, r->options, strlen(r->options), "--options",
                           MN_JSON_STANDARD);
    }
    const mn_graft_request how = { .chosen = chosen, .to = r->to, .add_ccq = r->add != NULL,
                                   .options = r->options ? &options : NULL,
                                   .seed = (uint64_t)r->seed };
    if (st == MN_OK) st = mn_graft_create(&graft, source, &how);
    if (st == MN_OK) {
        st = mn_models_write(graft->transfer, r->given[1], MN_STORED_COUNT, r->overwrite,
                             r->quiet);
    }
    if (st == MN_OK && r->json) st = print_json(graft, r->given[1]);
    else if (st == MN_OK) print_report(graft, source, chosen);
    mn_graft_destroy(graft);
    mn_json_free(&options);
    return st;
}

static mn_status graft(request *r) {
    mn_source source;
    mn_status st = mn_models_open(&source, r->given[0]);
    if (st != MN_OK) return st;
    st = graft_source(r, &source);
    mn_source_close(&source);
    return st;
}

int mn_command_graft(int argc, char **argv) {
    request r = { .seed = 1337 };
    const mn_option rows[] = { { NULL, .list = r.given, .n = &r.n, .most = 2 },
                               { "--layers", .text = &r.layers },
                               { "--to", .text = &r.to },
                               { "--add", .text = &r.add },
                               { "--preset", .text = &r.preset },
                               { "--options", .text = &r.options },
                               { "--seed", .count = &r.seed, .low = 0, .high = 2147483647 },
                               { "--overwrite", .flag = &r.overwrite },
                               { "--json", .flag = &r.json },
                               { "--quiet", .flag = &r.quiet } };
    const int mistake = mn_options_read(rows, MN_COUNTOF(rows), "graft", argc, argv);
    if (mistake < 0) print_help();
    if (mistake != 0) return mistake < 0 ? 0 : mistake;
    if (r.n != 2) return mn_options_mistake("graft", "", "name the model and the folder to write");
    const mn_status st = graft(&r);
    if (st != MN_OK) fprintf(stderr, "mneme graft: %s\n", mn_last_error());
    return st == MN_OK ? 0 : 2;
}
